"""The adapted model on disk: its weights and its program, each read again and checked; and what it
says, as a table.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metanudge.training.errors import UserError
from metanudge.training.use.files import DESCRIPTION, new_folder, umask
from metanudge.training.use.preprocessing import Preprocessing
from metanudge.version import __version__

WEIGHTS, PROGRAM = "model.safetensors", "program.pt2"
LARGEST_EXPORT_ERROR = 1e-5
T = TypeVar("T")


class Adapted:
    """A model that was adapted to a support set: inputs in, what it says of each out."""

    model: nn.Module
    preprocessing: Preprocessing
    support: Any

    @property
    def about(self) -> dict[str, Any]:
        """What `model.json` says of its outputs and of the support set."""
        raise NotImplementedError

    def export(
        self, folder: str | os.PathLike[str], *, program: bool = True, overwrite: bool = False
    ) -> Path:
        """Write the adapted model to a new folder; what was written is read again and checked
        before it gets its name.

        - `model.safetensors`: the state_dict.
        - `model.json`: class names (or targets), preprocessing, and what made it.
        - `program.pt2`: a `torch.export` program (any batch size), which runs without metanudge and
          without the model's code. Its outputs equal the model's to 1e-5.

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
        description = {
            "format": "metanudge adapted model 1",
            "metanudge": __version__,
            "torch": torch.__version__,
            "batch_norm": "statistics of the support set" if has_batch_norm(self.model) else None,
            **self.about,
            "preprocessing": asdict(self.preprocessing),
        }
        with new_folder(Path(folder), overwrite=overwrite, mark=DESCRIPTION) as temporary:
            save_weights(self.model, temporary / WEIGHTS)
            if program:
                save_program(self.model, temporary / PROGRAM, inputs=self.support)
            (temporary / DESCRIPTION).write_text(
                json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        return Path(folder)


def write_table(
    file: IO[str],
    fixed: Sequence[str],
    what: str,
    names: Sequence[str],
    found: Iterable[T],
    cells: Callable[[T], Iterable[object]],
) -> list[T]:
    """Write what was found as CSV, a row each: fixed columns, then one for each name, called `what`
    as well where a fixed one has its name. Returns what was written.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*fixed, *(f"{what} {name}" if name in fixed else name for name in names)])
    written = []
    for one in found:
        writer.writerow(cells(one))
        written.append(one)
    return written


def save_weights(model: nn.Module, file: Path) -> None:
    """Write the state_dict, read it again and compare."""
    from safetensors.torch import load_file, save_file

    # Tensors that share memory cannot be stored as they are.
    saved = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(saved, file)
    os.chmod(file, 0o666 & ~umask())  # safetensors makes files that only their owner can read
    again = load_file(file)
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)


def save_program(model: nn.Module, file: Path, *, inputs: Tensor) -> None:
    """Write a `torch.export` program for any batch size, read it again and compare its logits.

    Args:
        model: inputs in, logits out.
        file: where to.
        inputs: `(n, *input_shape)`; the program is traced with and checked on them.
    """
    example = inputs[:2] if len(inputs) > 1 else inputs.repeat(2, *[1] * (inputs.ndim - 1))
    try:
        exported = torch.export.export(
            model, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},)
        )
        torch.export.save(exported, file)
        again = torch.export.load(file).module()
    except Exception as error:  # tracing runs the user's own code; it can raise anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"torch.export cannot trace this model ({type(error).__name__}: {reason}). "
            "Export without the program: --no-program, or export(..., program=False)."
        ) from error
    for checked in (inputs, inputs[:1]):
        with torch.no_grad():
            difference = float((again(checked) - model(checked)).abs().max())
        if not difference <= LARGEST_EXPORT_ERROR:
            raise UserError(
                f"The torch.export program gives other logits than the model (by {difference:.2g}),"
                " so it was not kept. Export without it: --no-program, or export(...,"
                " program=False)."
            )


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some layer normalises with statistics of the support set."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())
