"""Where to compute."""

from __future__ import annotations

import os

import torch

from metanudge.training.errors import UserError


def device_called(name: str) -> torch.device:
    """The device of a name: auto (CUDA where there is one), cpu, cuda or cuda:1; `UserError` where
    it cannot be had.

    Under torchrun, cuda is another GPU for every local rank.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"--device {name} is no device that torch knows. Use auto, cpu, cuda or cuda:1."
        ) from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = (
        device.index
        if device.index is not None
        else int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1)
    )
    if index >= count:
        found = (
            f"{count} CUDA devices"
            if count
            else "no GPU"
            if torch.version.cuda
            else "no GPU, being a build without CUDA"
        )
        raise UserError(
            f"--device {name}: torch finds {found} here. Use --device cpu, or --device auto to take"
            " what there is."
        )
    return torch.device("cuda", index)
