"""Outer optimizers that bound the length of a step: `ClippedGD`, `NormalizedGD` and `SNGDM`.

The smoothness of the meta-objective grows with its gradient, L(θ) = L₀ + L₁‖∇F(θ)‖ (§5, Proposition
3), so the right step size is 1/(L₀ + L₁‖g‖): it shrinks where the gradient is large, and a fixed
one that is safe there is needlessly small elsewhere. All three work on `.grad` like any
`torch.optim` optimizer: parameter groups, closures, schedulers, hooks and `state_dict` behave as
usual.

The norm ‖·‖ is *global*: one number over all parameters of all groups that have a gradient, as in
the theory, where θ is a single vector. Groups may still differ in `lr` and the other options. A
step reads nothing back to the host, so it does not stall a GPU. A zero gradient moves nothing; a
NaN or infinite gradient makes the norm, and so all of θ, NaN.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from metanudge.spread import gathered

__all__ = ["SNGDM", "ClippedGD", "NormalizedGD", "global_norm"]


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors taken as one vector, as a 0-d tensor on the first one's device.

    Summed in float64, whatever the tensors are: squares of entries near 1e-23 or 1e20 leave
    float32's range, and normalised steps are made for gradients of any size.

    Example:
        >>> global_norm([torch.tensor([3e30]), torch.tensor([[4e30]])])
        tensor(5.0000e+30, dtype=torch.float64)
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    device = tensors[0].device
    # Apple's GPUs lack float64
    dtype = torch.float32 if any(t.device.type == "mps" for t in tensors) else torch.float64
    norms = [torch.linalg.vector_norm(t, dtype=dtype).to(device) for t in tensors]
    return gathered(torch.linalg.vector_norm(torch.stack(norms)))


class _GlobalNormOptimizer(Optimizer):
    """θ ← θ − lr · v/d(‖v‖) with the global norm: subclasses choose the vector v and the divisor
    d.
    """

    def _vector(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """The direction v for one parameter: its gradient, unless it is an average of these."""
        return gradient

    @abstractmethod
    def _divisor(self, norm: Tensor, group: dict[str, Any]) -> Tensor:
        """d(‖v‖), a 0-d tensor; may be zero where ‖v‖ is."""

    @abstractmethod
    def _check(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for options, other than `lr`, that make no sense."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to optimize, with options of their own if wanted (as in
        `torch.optim.Optimizer`).
        """
        group = {**self.defaults, **param_group}
        if not 0 <= float(group["lr"]) < math.inf:
            raise ValueError(
                f"{type(self).__name__} got lr={group['lr']}. It is the size of a step and must be"
                " finite and ≥ 0. Try 1e-2."
            )
        self._check(group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move the parameters once; `closure`, if given, computes the gradients and returns the
        loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            (p, p.grad, g) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        for param, gradient, _ in moving:
            self._check_gradient(param, gradient)
        moves = [
            (param, self._vector(param, gradient, group), group)
            for param, gradient, group in moving
        ]
        norm = global_norm([vector for _, vector, _ in moves])
        for group in self.param_groups:
            divisor = self._divisor(norm, group)
            # v is zero then: 0/1 moves nothing, 0/0 would be NaN
            divisor = torch.where(divisor == 0, 1.0, divisor)
            for param, vector, _ in (move for move in moves if move[2] is group):
                # Half-precision types could not hold the divisor.
                wide = vector.to(torch.promote_types(vector.dtype, torch.float32))
                param.sub_(wide / divisor.to(param.device) * group["lr"])
        return loss

    def _check_gradient(self, param: Tensor, gradient: Tensor) -> None:
        # Checked for all parameters before the first one moves, so that a refused step leaves θ as
        # it was.
        if gradient.layout != torch.strided:
            raise TypeError(
                f"{type(self).__name__} got a sparse gradient ({gradient.layout}) for a parameter"
                f" of shape {tuple(param.shape)}, and its norm is defined for dense gradients only."
                " Build the embedding with sparse=False, or call param.grad ="
                " param.grad.to_dense() before step()."
            )
        if gradient.is_complex():
            raise TypeError(
                f"{type(self).__name__} got a complex gradient ({gradient.dtype}) for a parameter"
                f" of shape {tuple(param.shape)}, and is written for real ones. Optimize"
                " torch.view_as_real(param) instead: real and imaginary part as two real numbers."
            )


class ClippedGD(_GlobalNormOptimizer):
    """Clipped gradient descent, θ ← θ − lr · min(1, max_norm/‖g‖) · g (§5, Theorem 1).

    Near a solution it is plain gradient descent; far away no step is longer than `lr * max_norm`.
    For an (L₀, L₁)-smooth objective lr ≈ 1/(2L₀) and max_norm ≈ L₀/L₁ follow the theory within
    constants.

    Args:
        params: parameters or parameter groups, as for any `torch.optim` optimizer.
        lr: step size where nothing is clipped.
        max_norm: largest global gradient norm that is used as it is; `math.inf` gives plain
            gradient descent.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = ClippedGD([x], lr=0.5, max_norm=2.0)
        >>> (x**2).sum().backward()  # gradient (6, 8), norm 10: clipped to norm 2
        >>> optimizer.step()
        >>> x.detach()
        tensor([2.4000, 3.2000])
    """

    def __init__(self, params: ParamsT, lr: float | Tensor, max_norm: float) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm})

    def _check(self, group: dict[str, Any]) -> None:
        if not group["max_norm"] > 0:
            raise ValueError(
                f"ClippedGD got max_norm={group['max_norm']}. Gradients are clipped to that norm,"
                " so it must be > 0. Try 1.0, or math.inf for no clipping."
            )

    def _divisor(self, norm: Tensor, group: dict[str, Any]) -> Tensor:
        return torch.clamp(norm / group["max_norm"], min=1.0)


class NormalizedGD(_GlobalNormOptimizer):
    """Normalized gradient descent, θ ← θ − lr · g/(smoothing + ‖g‖) (appendix, "Convergence of
    NormalizedGD").

    With `lr = 1/L₁` and `smoothing = L₀/L₁` this is the step g/(L₀ + L₁‖g‖) of the proof, which
    lowers F by at least ‖g‖²/(2(L₀ + L₁‖g‖)) each time. With `smoothing = 0` every step has length
    `lr`, whatever the gradient, so `lr` must be lowered for the iterates to settle (any scheduler
    does).

    Args:
        params: parameters or parameter groups, as for any `torch.optim` optimizer.
        lr: length of a step where ‖g‖ is large.
        smoothing: gradient norm at which the step is half as long as that; ≥ 0.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = NormalizedGD([x], lr=0.5)
        >>> (x**2).sum().backward()
        >>> optimizer.step()
        >>> x.detach()
        tensor([2.7000, 3.6000])
    """

    def __init__(self, params: ParamsT, lr: float | Tensor, smoothing: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "smoothing": smoothing})

    def _check(self, group: dict[str, Any]) -> None:
        if not 0 <= group["smoothing"] < math.inf:
            raise ValueError(
                f"NormalizedGD got smoothing={group['smoothing']}. It is added to the gradient norm"
                " and must be finite and ≥ 0. Try 0.0 (steps of length lr) or L0/L1."
            )

    def _divisor(self, norm: Tensor, group: dict[str, Any]) -> Tensor:
        return norm + group["smoothing"]


class SNGDM(_GlobalNormOptimizer):
    """Stochastic normalized gradient descent with momentum, m ← βm + (1 − β)g, θ ← θ − lr · m/‖m‖.

    Cutkosky and Mehta, "Momentum Improves Normalized SGD", ICML 2020 (arXiv:2002.03305).
    Normalising alone does not converge with noisy gradients, since a small gradient is then mostly
    noise; normalising their average does, without large batches. The first step takes m = g. Every
    step has length `lr`: lower it over time (any scheduler does).

    Args:
        params: parameters or parameter groups, as for any `torch.optim` optimizer.
        lr: length of a step.
        momentum: β, the weight of the past, 0 ≤ β < 1; averages over about 1/(1 − β) steps.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = SNGDM([x], lr=0.5, momentum=0.9)
        >>> (x**2).sum().backward()
        >>> optimizer.step()
        >>> x.detach()
        tensor([2.7000, 3.6000])
    """

    def __init__(self, params: ParamsT, lr: float | Tensor, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _check(self, group: dict[str, Any]) -> None:
        if not 0 <= group["momentum"] < 1:
            raise ValueError(
                f"SNGDM got momentum={group['momentum']}. It is the weight of past gradients in an"
                " average and must be ≥ 0 and < 1. Try 0.9."
            )

    def _vector(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state, beta = self.state[param], group["momentum"]
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(beta).add_(gradient, alpha=1 - beta)
        else:
            state["momentum_buffer"] = gradient.clone()
        average: Tensor = state["momentum_buffer"]
        return average

    def _divisor(self, norm: Tensor, group: dict[str, Any]) -> Tensor:
        return norm
