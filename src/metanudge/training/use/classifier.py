"""`Classifier`: a model adapted to the classes of a support set, and what it says about files."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn

from metanudge.objective import Objective
from metanudge.task import Batch, map_tensors, tensors
from metanudge.training.errors import UserError
from metanudge.training.use.examples import examples_to_label, explained
from metanudge.training.use.export import export_model
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
class Classifier:
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

    def export(
        self, folder: str | os.PathLike[str], *, program: bool = True, overwrite: bool = False
    ) -> Path:
        """Write the adapted model to a new folder; what was written is read again and checked
        before it gets its name.

        - `model.safetensors`: the state_dict.
        - `model.json`: class names, preprocessing, and what made it.
        - `program.pt2`: a `torch.export` program (any batch size), which runs without metanudge and
          without the model's code. Its logits equal the model's to 1e-5.

        Args:
            folder: where to; must not exist.
            program: write the program; turn this off for models that `torch.export` cannot trace.
            overwrite: replace an exported model that is there already.
        """
        if program and self.preprocessing.has_tokens:
            raise UserError(
                "A torch.export program takes numbers, and this model reads tokens with their mask."
                " Export without it: --no-program, or export(..., program=False)."
            )
        about = {
            "classes": list(self.classes),
            "support_examples": dict(zip(self.classes, self.counts, strict=True)),
            "outputs": "logits, one per class in this order; softmax gives probabilities",
            "preprocessing": asdict(self.preprocessing),
        }
        return export_model(
            self.model, folder, self.support, about, program=program, overwrite=overwrite
        )


def write_predictions(
    file: IO[str], classes: Sequence[str], predictions: Iterable[Prediction]
) -> list[Prediction]:
    """Write predictions as CSV: file, label, probability, and one column of probabilities per
    class. Returns what was written.
    """
    fixed = ("file", "label", "probability")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*fixed, *(f"class {name}" if name in fixed else name for name in classes)])
    written = []
    for found in predictions:
        numbers = (found.probability, *found.probabilities)
        writer.writerow([found.file, found.label, *(f"{number:.6f}" for number in numbers)])
        written.append(found)
    return written
