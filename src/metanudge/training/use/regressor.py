"""`Regressor`: a model adapted to a given regression task, and what it predicts for other rows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from metanudge.tasks.read_csv import as_number, read_columns
from metanudge.tasks.standardise import Standardisation
from metanudge.training.use.examples import explained
from metanudge.training.use.export import Adapted, write_table
from metanudge.training.use.preprocessing import Preprocessing


@dataclass(frozen=True)
class Estimate:
    """What the model says about one row.

    Attributes:
        row: FILE:ROW.
        values: one for each target, in its units.
        truth: what the table itself says, where it does.
    """

    row: str
    values: tuple[float, ...]
    truth: tuple[float, ...] | None = None


class InUnits(nn.Module):
    """A model whose outputs are turned into the targets' units."""

    def __init__(self, model: nn.Module, scale: Standardisation | None, like: Tensor) -> None:
        super().__init__()
        self.model = model
        scale = Standardisation((0.0,), (1.0,)) if scale is None else scale
        self.register_buffer("mean", like.new_tensor(scale.mean))
        self.register_buffer("scale", like.new_tensor(scale.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Predictions `(n, targets)`."""
        predicted: Tensor = self.model(x) * self.scale + self.mean
        return predicted


@dataclass(frozen=True)
class Regressor(Adapted):
    """A model adapted to the rows of a support set; made by `adapt`.

    Attributes:
        model: an ordinary module in evaluation mode, inputs in, targets in their units out.
        targets: their names.
        preprocessing: how rows become inputs.
        support: the inputs it was adapted on.
    """

    model: nn.Module
    targets: tuple[str, ...]
    preprocessing: Preprocessing = field(repr=False)
    support: Tensor = field(repr=False)

    def predict(self, path: str | os.PathLike[str]) -> list[Estimate]:
        """Predictions for the rows of a table, in their order."""
        how, file = self.preprocessing, Path(path)
        with explained():
            read = read_columns(file, self.targets, how.columns, delimiter=how.delimiter, needed=())
            raw = torch.from_numpy(read.values)
            how.check(raw, file)
            columns = [read.text[name] for name in self.targets]
            cells = list(zip(*columns, strict=True))
            known = [
                tuple(map(as_number, row, [where] * len(row))) if all(row) else None
                for row, where in zip(cells, read.rows, strict=True)
            ]
        with torch.no_grad():
            found = self.model(how.tensor(raw).to(self.support.device)).double().cpu().tolist()
        return [
            Estimate(f"{file.name}:{number}", tuple(values), truth)
            for number, (values, truth) in enumerate(zip(found, known, strict=True), start=1)
        ]

    @property
    def about(self) -> dict[str, Any]:
        """Its targets and support examples."""
        return {
            "targets": list(self.targets),
            "support_examples": len(self.support),
            "outputs": "one per target in this order, in the target's units",
        }


def write_estimates(
    file: IO[str], targets: tuple[str, ...], estimates: Iterable[Estimate]
) -> list[Estimate]:
    """Write predictions as CSV: row, and one column per target. Returns what was written."""

    def cells(found: Estimate) -> list[str]:
        return [found.row, *(f"{value:.9g}" for value in found.values)]

    return write_table(file, ("row",), "target", targets, estimates, cells)
