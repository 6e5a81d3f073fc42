"""How a file becomes an input of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metanudge.task import Batch
from metanudge.tasks import SOURCES
from metanudge.tasks.images import is_picture
from metanudge.tasks.read_csv import read_csv, read_header
from metanudge.tasks.standardise import Standardisation
from metanudge.tasks.text import TextForm
from metanudge.training.errors import UserError
from metanudge.training.own_data import TABLES
from metanudge.training.runs import Run
from metanudge.training.spec_language import convert, split_options


@dataclass(frozen=True)
class Preprocessing:
    """How a file becomes an input of the model; the same as in training.

    Attributes:
        input_shape: of one example, channels first.
        dtype: of the inputs.
        grey: images get one channel instead of three.
        image_size: (height, width) that images are resized to with a Lanczos filter; None for
            inputs that are no images.
        invert: dark becomes 1 and light 0 (Omniglot: ink 1, paper 0); otherwise light is 1.
        label: the label's column in a table.
        columns: the columns with numbers, in order; None for all but the label, in the file's
            order.
        delimiter: what separates the cells of a table; None for what its first line is made with.
        mean, scale: taken from and divided out of the numbers of an example, one each; None where
            they are left as they are.
        text: the column with texts in a table.
        form: how a text becomes tokens or features; None where examples are no texts.
    """

    input_shape: tuple[int, ...]
    dtype: str = "float32"
    grey: bool = True
    image_size: tuple[int, int] | None = None
    invert: bool = False
    label: str = "label"
    columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    text: str = "text"
    form: TextForm | None = None

    @classmethod
    def of(cls, run: Run) -> Preprocessing:
        """What a run's training data went through."""
        shape = run.shapes.input_shape
        image = is_picture(shape)
        form = run.shapes.form
        is_table = run.shapes.targets or (
            form is None and Path(run.config.data).suffix.lower() in TABLES
        )
        table = _table_options(run) if is_table else {}
        if form is not None:
            options = split_options(run.config.data_options, "--data-options")
            table = {"text": run.config.text, "label": run.config.label or "label", "form": form}
            table |= convert(
                {key: options[key] for key in options if key == "delimiter"},
                read_csv, "--data-options", "of texts",
            )  # fmt: skip
        found = run.shapes.standardisation
        return cls(
            input_shape=shape,
            dtype=run.config.dtype,
            grey=not image or shape[0] == 1,
            image_size=(shape[1], shape[2]) if image else None,
            invert=run.config.data in SOURCES and SOURCES[run.config.data].dark_is_one,
            mean=None if found is None else found.mean,
            scale=None if found is None else found.scale,
            **table,
        )

    def tensor(self, raw: Tensor) -> Tensor:
        """Raw examples `(n, ...)` as model inputs: uint8 to [0, 1], floats to `dtype`, other
        integers (token numbers) as they are.

        Where the training data were standardised, all are numbers and get the same mean and scale.
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.mean is not None and self.scale is not None:
            return Standardisation(self.mean, self.scale).apply(raw).to(dtype)
        if raw.dtype == torch.uint8:
            return (255 - raw if self.invert else raw).to(dtype) / 255
        return raw.to(dtype) if raw.is_floating_point() or raw.dtype == torch.bool else raw.long()

    def inputs(self, raw: Tensor) -> Batch:
        """What the model is called with: a tensor, or a mapping of tokens and their mask."""
        return self.form.inputs(raw) if self.has_tokens and self.form else self.tensor(raw)

    @property
    def has_tokens(self) -> bool:
        """Whether the model reads token numbers of texts."""
        return self.form is not None and not self.form.encoder

    def check(self, raw: Tensor, where: object) -> None:
        """Refuse examples of another shape than the model's, and numbers that are not finite as
        inputs.
        """
        if tuple(raw.shape[1:]) != self.input_shape:
            kind = f"shape {self.input_shape}"
            if len(self.input_shape) == 1:
                kind = f"{self.input_shape[0]} numbers"
            raise UserError(
                f"{where} has shape {tuple(raw.shape[1:])}, but the run was trained on examples of"
                f" {kind}. Give data of the same kind, or use a run that was trained on this kind."
            )
        inputs = self.tensor(raw)
        if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
            raise UserError(
                f"{where} holds NaN, infinity or numbers too large for {self.dtype}. Correct it or"
                " leave it out."
            )


def _table_options(run: Run) -> dict[str, Any]:
    """Label, columns and delimiter of the table that a run was trained on."""
    raw = split_options(run.config.data_options, "--data-options")
    read = {key: raw[key] for key in raw if key in ("label", "features", "delimiter")}
    options = convert(read, read_csv, "--data-options", "of a .csv file")
    if run.shapes.targets:
        options["label"] = run.shapes.targets[0]
    # their order matters to the model
    columns = options.pop("features", None) or run.shapes.columns
    if columns is None and Path(run.config.data).is_file():
        label = options.get("label", "label")
        columns = [name for name in read_header(run.config.data, **options) if name != label]
    return {**options, "columns": None if columns is None else tuple(columns)}
