"""How exact the arithmetic of a model's gradients is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from metanudge.problem import Problem

_ON_CUDNN = (nn.modules.conv._ConvNd, nn.RNNBase)


class Precision(Enum):
    """What gradients are computed in, by the coarsest part."""

    DOUBLE = "float64"
    SINGLE = "float32"
    TENSOR_FLOAT = "TF32"
    AUTOCAST = "16 bits, float32 parameters"
    HALF = "16-bit parameters"


class Computed(Protocol):
    """What gradients are computed of."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """What adapts."""

    device: torch.device
    """Where it lies."""


def precision_of(problem: Computed) -> Precision:
    """Of the parameters that adapt, the present autocast and the device's matrix products."""
    bits = min(torch.finfo(p.dtype).bits for p in problem.parameters.values())
    if bits < 32:
        return Precision.HALF
    by_policy = (
        isinstance(problem, Problem) and problem.spread is not None and problem.spread.in_half
    )
    if by_policy or torch.is_autocast_enabled(problem.device.type):
        return Precision.AUTOCAST
    if bits > 32:
        return Precision.DOUBLE
    return Precision.TENSOR_FLOAT if _on_tensor_cores(problem) else Precision.SINGLE


def _on_tensor_cores(problem: Computed) -> bool:
    if problem.device.type != "cuda":
        return False
    if torch.get_float32_matmul_precision() != "highest":
        return True
    modules = getattr(problem, "modules", [])  # functions of tensors have none
    return torch.backends.cudnn.allow_tf32 and any(isinstance(m, _ON_CUDNN) for m in modules)
