"""The two-level problem: the user's model and loss, and the proximal term that ties a task to the meta-parameters.

    outer:  F_i(θ) = f_i(φ*_i(θ))                                   (paper, eq. 6)
    inner:  φ*_i(θ) = argmin_φ  f̂_i(φ) + ½‖φ − θ‖²_λ                (paper, eq. 7)
    nudged: φ*_{i,ν}(θ) = argmin_φ  f̂_i(φ) + ½‖φ − θ‖²_λ + ν p(φ)   (paper, eq. 11)

The nudge p is the query loss f_i itself (`"loss"`, the paper) or its linearisation ⟨∇f_i(φ_0), φ⟩ at the un-nudged solution
(`"gradient"`); both give the same derivative at ν = 0. The engines evaluate it; this file says what is evaluated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metanudge.params import Params
from metanudge.task import Batch, TaskBatch, describe, tensors

Nudge = Literal["loss", "gradient"]
Loss = Callable[..., Tensor]
Stiffness = float | Tensor | Mapping[str, float | Tensor]


def takes_model(loss: Loss) -> bool:
    """Whether `loss` has the form `loss(model, batch)` rather than `loss(output, target)`.

    It does when its first parameter is named `model` or `module`, or is annotated as an `nn.Module`.

    Example:
        >>> takes_model(lambda model, batch: model(**batch).loss), takes_model(nn.functional.cross_entropy)
        (True, False)
    """
    try:
        first = next(iter(inspect.signature(loss).parameters.values()))
    except (StopIteration, TypeError, ValueError):
        return False
    annotated = first.annotation in ("nn.Module", "torch.nn.Module", "Module") or (
        isinstance(first.annotation, type) and issubclass(first.annotation, nn.Module)
    )
    return first.name in ("model", "module") or annotated


class LossError(ValueError):
    """What the loss returns is no loss."""


class Objective(nn.Module):
    """The user's model and loss as one module: a batch in, a scalar out. It shares the model and changes nothing in it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.takes_model = takes_model(loss)

    def output(self, batch: Batch) -> tuple[Any, Any]:
        """What the model says about a batch `(inputs, targets)`, and the targets."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            kind = type(batch).__name__
            raise TypeError(
                f"loss(output, target) needs batches of the form (inputs, targets), got {kind} with {describe(batch)}. "
                "For other batches give a function loss(model, batch): its first parameter must be named 'model'."
            )
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return self.model(**inputs), target
        if isinstance(inputs, (tuple, list)):
            return self.model(*inputs), target
        return self.model(inputs), target

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of a batch; the accuracy is NaN where the batch is no classification."""
        if self.takes_model:
            return self._checked(self.loss(self.model, batch), None)
        return self.judge(*self.output(batch))

    def judge(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of the model's output on the targets."""
        return self._checked(self.loss(output, target), classification_accuracy(output, target))

    @staticmethod
    def _checked(loss: Any, accuracy: Tensor | None) -> tuple[Tensor, Tensor]:
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError(
                f"The loss must be a scalar tensor, got {got}. Reduce it over the examples (mean is usual), "
                "e.g. reduction='mean' in torch's losses."
            )
        return loss, accuracy if accuracy is not None else loss.detach().new_full((), math.nan)


def classification_accuracy(output: Any, target: Any) -> Tensor | None:
    """Share of examples whose largest output is the target's class; None unless logits `(n, classes)` meet labels `(n,)`."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    integer = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if output.ndim != 2 or target.ndim != 1 or not integer or output.shape[1] < 2:
        return None
    return (output.detach().argmax(1) == target).to(output.dtype).mean()


class Problem:
    """A model, a loss and a stiffness λ, with the names and tensors the engines need.

    Args:
        objective: model and loss.
        lam: λ > 0 as a number, one number per tensor (mapping from parameter name), or one per parameter (mapping from
            name to a tensor of the parameter's shape). Names left out of a mapping are an error.
    """

    def __init__(self, objective: Objective, lam: Stiffness) -> None:
        self.objective = objective
        self.parameters = {n: p for n, p in objective.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "No parameter of the model requires grad, so there is nothing to meta-learn. "
                "Set requires_grad=True on the parameters that should adapt."
            )
        devices = {p.device for p in self.parameters.values()}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"The trainable parameters lie on several devices ({names}). Move the model to one device.")
        (self.device,) = devices
        self.lam = stiffness_per_parameter(lam, self.parameters)

    @property
    def theta(self) -> Params:
        """The meta-parameters, detached (no copy)."""
        return {name: p.detach() for name, p in self.parameters.items()}

    @property
    def theta_dtypes(self) -> dict[str, torch.dtype]:
        """Dtype in which displacements are kept: the parameter's own, float32 at least."""
        return {n: torch.promote_types(p.dtype, torch.float32) for n, p in self.parameters.items()}

    @cached_property
    def smallest_lam(self) -> float:
        """The smallest stiffness: the strong-convexity constant that the proximal term guarantees by itself."""
        return min(float(value.min()) for value in self.lam.values())

    def check_tasks(self, batch: TaskBatch) -> None:
        """Raise a `ValueError` where the tasks' device or floating dtype does not fit the model."""
        dtypes = {p.dtype for p in self.parameters.values()}
        autocast = torch.is_autocast_enabled(self.device.type)
        for stack in batch.stacks:
            for what, data in (("support", stack.support), ("query", stack.query)):
                for tensor in tensors(data):
                    if tensor.device != self.device:
                        raise ValueError(
                            f"The {what} data lie on {tensor.device} but the model on {self.device}. "
                            f"Move them together: tasks.to({str(self.device)!r}) or learner.to({str(tensor.device)!r})."
                        )
                    if tensor.is_floating_point() and tensor.dtype not in dtypes and not autocast:
                        wanted = ", ".join(sorted(map(str, dtypes)))
                        raise ValueError(
                            f"The {what} data hold a {tensor.dtype} tensor of shape {tuple(tensor.shape)} but the model's "
                            f"parameters are {wanted}. Cast one of them: tasks.to({wanted}) or learner.to({tensor.dtype})."
                        )


def stiffness_per_parameter(lam: Stiffness, parameters: Mapping[str, Tensor]) -> Params:
    """λ as one tensor per parameter, 0-d or of the parameter's shape; raises where it is not positive or does not fit."""
    if isinstance(lam, Mapping):
        unknown, missing = sorted(set(lam) - set(parameters)), sorted(set(parameters) - set(lam))
        if unknown or missing:
            parts = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
            raise ValueError(
                f"The names in lam do not match the model's trainable parameters ({'; '.join(parts)}). "
                f"Give one value per parameter name: {', '.join(parameters)}."
            )
        return {name: _stiffness(lam[name], f"lam[{name!r}]", p) for name, p in parameters.items()}
    if isinstance(lam, Tensor) and lam.ndim > 0:
        raise ValueError(
            f"lam is a tensor of shape {tuple(lam.shape)}. One value per parameter goes into a mapping from parameter name to "
            "a tensor of that parameter's shape; a single number applies to all."
        )
    return {name: _stiffness(lam, "lam", p) for name, p in parameters.items()}


def _stiffness(value: float | Tensor, what: str, parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    tensor = torch.as_tensor(value, dtype=dtype, device=parameter.device).detach()
    if tensor.ndim > 0 and tensor.shape != parameter.shape:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)} but its parameter has {tuple(parameter.shape)}. "
            "Give a number or a tensor of the parameter's shape."
        )
    if not bool(torch.isfinite(tensor).all()) or not bool((tensor > 0).all()):
        shown = float(tensor) if tensor.ndim == 0 else f"an entry of {float(tensor[~(torch.isfinite(tensor) & (tensor > 0))][0])}"
        raise ValueError(
            f"{what} must be positive and finite, got {shown}: λ is the stiffness of the proximal term ½λ‖φ − θ‖², and "
            "without it the inner problem has no unique solution. Start with 2.0, or about 1/(inner learning rate)."
        )
    return tensor
