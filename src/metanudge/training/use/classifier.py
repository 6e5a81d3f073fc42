"""`Classifier`: a model adapted to the classes of a support set, and what it says about files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from metanudge.objective import Objective
from metanudge.task import Batch, map_tensors, tensors
from metanudge.training.use.examples import examples_to_label, explained
from metanudge.training.use.export import Adapted, write_table
from metanudge.training.use.preprocessing import Preprocessing

FILES_AT_ONCE = 256


@dataclass(frozen=True)
class Prediction:
    """What the model says about one file.

    Attributes:
        file: its path relative to the folder given, or FILE:ROW for the rows of a table.
        label: the most probable class.
        probability: of that class.
        probabilities: of every class, in the order of `Classifier.classes`.
        truth: the class that the file's sub-folder or the table's label column names, where there
            is one.
    """

    file: str
    label: str
    probability: float
    probabilities: tuple[float, ...]
    truth: str | None = None


@dataclass(frozen=True)
class Classifier(Adapted):
    """A model adapted to the classes of a support set; made by `adapt`.

    Attributes:
        model: an ordinary module in evaluation mode, inputs in, logits out.
        classes: class names in the order of the outputs.
        preprocessing: how files become inputs.
        support: the inputs it was adapted on.
        counts: support examples per class.
    """

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing = field(repr=False)
    support: Batch = field(repr=False)
    counts: tuple[int, ...]

    @property
    def looks_inverted(self) -> bool:
        """Whether an Omniglot learner was shown light ink on dark paper."""
        return self.preprocessing.invert and float(self.support.mean()) > 0.5

    def logits(self, inputs: Batch) -> Tensor:
        """`(n, classes)` for preprocessed inputs `(n, *input_shape)`."""
        device = tensors(self.support)[0].device
        objective = Objective(self.model, nn.functional.cross_entropy)  # knows all forms of inputs
        with torch.no_grad():
            found, _ = objective.output((map_tensors(lambda t: t.to(device), inputs), None))
        logits: Tensor = found
        return logits

    def predict(self, path: str | os.PathLike[str]) -> Iterator[Prediction]:
        """Predictions for a folder of files (flat or nested), a single file or a table, in the
        order of the sorted names.

        Files are read a few at a time, as the predictions are asked for. Hidden files are passed
        over.
        """
        with explained():
            examples = examples_to_label(Path(path), self.preprocessing, self.classes)
            while part := list(islice(examples, FILES_AT_ONCE)):
                raw = torch.stack([example for _, _, example in part])
                chances = self.logits(self.preprocessing.inputs(raw)).double().softmax(1).cpu()
                for (file, truth, _), row in zip(part, chances, strict=True):
                    best = int(row.argmax())
                    yield Prediction(
                        file, self.classes[best], float(row[best]), tuple(row.tolist()), truth
                    )

    @property
    def about(self) -> dict[str, Any]:
        """Its classes and support examples."""
        return {
            "classes": list(self.classes),
            "support_examples": dict(zip(self.classes, self.counts, strict=True)),
            "outputs": "logits, one per class in this order; softmax gives probabilities",
        }


def write_predictions(
    file: IO[str], classes: Sequence[str], predictions: Iterable[Prediction]
) -> list[Prediction]:
    """Write predictions as CSV: file, label, probability, and one column of probabilities per
    class. Returns what was written.
    """

    def cells(found: Prediction) -> list[str]:
        numbers = (found.probability, *found.probabilities)
        return [found.file, found.label, *(f"{number:.6f}" for number in numbers)]

    fixed = ("file", "label", "probability")
    return write_table(file, fixed, "class", classes, predictions, cells)
