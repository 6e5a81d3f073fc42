"""The adapted model on disk: its weights and its program, each read again and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metanudge.training.errors import UserError
from metanudge.training.use.files import DESCRIPTION, new_folder, umask
from metanudge.version import __version__

WEIGHTS, PROGRAM = "model.safetensors", "program.pt2"
LARGEST_EXPORT_ERROR = 1e-5


def export_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    support: Any,
    about: Mapping[str, Any],
    *,
    program: bool,
    overwrite: bool,
) -> Path:
    """Write an adapted model, what `about` says of it and its program to a new folder, which gets
    its name once all was read again and checked; see `Classifier.export`.
    """
    with new_folder(Path(folder), overwrite=overwrite, mark=DESCRIPTION) as temporary:
        save_weights(model, temporary / WEIGHTS)
        if program:
            save_program(model, temporary / PROGRAM, inputs=support)
        description = {
            "format": "metanudge adapted model 1",
            "metanudge": __version__,
            "torch": torch.__version__,
            "batch_norm": "statistics of the support set" if has_batch_norm(model) else None,
            **about,
        }
        (temporary / DESCRIPTION).write_text(
            json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return Path(folder)


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
