"""What a classifier says about files, and the table it is written to."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO


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
        writer.writerow(
            [
                found.file,
                found.label,
                f"{found.probability:.6f}",
                *(f"{p:.6f}" for p in found.probabilities),
            ]
        )
        written.append(found)
    return written
