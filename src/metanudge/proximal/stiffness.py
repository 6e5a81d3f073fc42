"""λ as users write it (a number, one per tensor, one per parameter), checked and as one tensor per
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from metanudge.names import some
from metanudge.params import Params, wide

Operator = Callable[[Params], Mapping[str, Tensor]]
Regulariser = Callable[[Params, Params], Tensor]
Stiffness = float | Tensor | Mapping[str, float | Tensor] | Operator


def stiffness_per_parameter(
    lam: float | Tensor | Mapping[str, float | Tensor],
    parameters: Mapping[str, Tensor],
    *,
    zero: bool = False,
) -> Params:
    """λ as one tensor per parameter, 0-d or of the parameter's shape; raises where it is not
    positive (with `zero`: where it is negative) or does not fit.
    """
    if isinstance(lam, Mapping):
        keys = _key_of_each(lam, parameters)
        return {
            name: _stiffness(lam[keys[name]], f"lam[{keys[name]!r}]", p, zero=zero)
            for name, p in parameters.items()
        }
    if isinstance(lam, Tensor) and lam.ndim > 0:
        raise ValueError(
            f"lam is a tensor of shape {tuple(lam.shape)}. One value per parameter goes into a"
            " mapping from parameter name to a tensor of that parameter's shape; a single number"
            " applies to all."
        )
    return {name: _stiffness(lam, "lam", p, zero=zero) for name, p in parameters.items()}


def _key_of_each(lam: Mapping[str, object], parameters: Mapping[str, object]) -> dict[str, str]:
    """Which key of a mapping each parameter has its value from: its own name, or else the first
    pattern (as in a shell) that fits.

    Example:
        >>> names = dict.fromkeys(["body.lora_A", "body.bias", "head"])
        >>> _key_of_each({"*": 1.0, "*lora_*": 5.0, "head": 2.0}, names)
        {'body.lora_A': '*', 'body.bias': '*', 'head': 'head'}
    """
    fitting = {
        name: [name] if name in lam else [key for key in lam if fnmatchcase(name, key)]
        for name in parameters
    }
    used = {key for key in lam if key in parameters or any(fnmatchcase(n, key) for n in parameters)}
    unknown = sorted(map(str, set(lam) - used))
    missing = sorted(name for name, keys in fitting.items() if not keys)
    if unknown or missing:
        both = {"unknown": unknown, "missing": missing}
        parts = [f"{what}: {some(names)}" for what, names in both.items() if names]
        raise ValueError(
            "The names in lam do not match the model's trainable parameters"
            f" ({'; '.join(parts)}). Give one value per name, or pattern of names, that adapts:"
            f" {some(list(parameters))}."
        )
    return {name: keys[0] for name, keys in fitting.items()}


def _stiffness(value: float | Tensor, what: str, parameter: Tensor, *, zero: bool) -> Tensor:
    try:
        tensor = torch.as_tensor(
            value, dtype=wide(parameter.dtype), device=parameter.device
        ).detach()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        got = (
            repr(value) if len(repr(value)) < 40 else f"a {type(value).__name__} that is too large"
        )
        raise TypeError(
            f"{what} must be a number or a tensor, got {got}. Write e.g. lam=2.0."
        ) from error
    if tensor.ndim > 0 and tensor.shape != parameter.shape:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)} but its parameter has"
            f" {tuple(parameter.shape)}. Give a number or a tensor of the parameter's shape."
        )
    bad = tensor[~(torch.isfinite(tensor) & ((tensor >= 0) if zero else (tensor > 0)))]
    if bad.numel():
        shown = f"{'an entry of ' if tensor.ndim else ''}{float(bad[0])}"
        raise ValueError(
            f"{what} must be positive and finite, got {shown}: λ is the stiffness of the proximal"
            " term ½λ‖φ − θ‖², and without it the inner problem has no unique solution. Start with"
            " 2.0, or about 1/(inner learning rate). MAML, FOMAML and Reptile also take lam=0."
        )
    return tensor
