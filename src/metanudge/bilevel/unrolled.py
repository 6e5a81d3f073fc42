"""`Unrolled`: the hypergradient through training steps of a live model that are taken for good."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from metanudge.bilevel.live import Loss, Lower, State, Steps, Where
from metanudge.bilevel.tree import Tree
from metanudge.engines import Cost
from metanudge.engines.undisturbed import restored, uninterrupted
from metanudge.estimators import NonFiniteError
from metanudge.estimators.products import check_epsilon, made, warn_of_kinks
from metanudge.estimators.reverse import walk_back
from metanudge.names import check_known
from metanudge.params import Params, norm
from metanudge.setting import add_to_grad
from metanudge.solvers.adjoint import Point, PulledBack
from metanudge.solvers.base import check_count

How = Literal["auto", "autograd", "difference"]


@dataclass(frozen=True)
class UnrolledStats:
    """What `Unrolled.step` did.

    Attributes:
        losses: the lower loss before each training step.
        upper_loss: after the last one.
        gradient_norm: norm of the hypergradient that was added to `.grad`.
        products: how Hessians were multiplied with: `"autograd"` or `"difference"`.
        error: for differences, how far one-sided ones are from the central one in the last step,
            relatively: an error bound where the loss is smooth, near 1 or above where kinks or
            rounding leave nothing to differentiate. None for autograd.
        lower_gradients, upper_gradients, hessian_products: backward passes through each loss, the
            training steps' own among them, and second ones.
    """

    losses: tuple[float, ...]
    upper_loss: float
    gradient_norm: float
    products: str
    error: float | None
    lower_gradients: int
    upper_gradients: int
    hessian_products: int


class Unrolled:
    """Trains a live model, and differentiates an upper loss through its last K training steps.

    With φ_{k+1}, s_{k+1} = U(φ_k, s_k, ∂_φ g_k(x, φ_k)) for k = 0 … K−1, the steps of the optimizer
    on lower losses g_k, `step` adds

        d/dx f(x, φ_K(x)) = ∂_x f + Σ_k ∂_x⟨∂_φ g_k, w_k⟩,    w_k = ∂f/∂(gradient of step k),

    to the `.grad` of the upper variables x. The parameters φ_0 and what the optimizer remembers s_0
    at entry count as constants. K = 1 is the second-order gradient of DARTS for SGD, and for Adam
    that of SAMA without its approximations.

    Args:
        lower: the module that trains.
        upper: x: a module, a tensor, or a dict, list or tuple of tensors (or `parameters()`); those
            that require gradients.
        lower_loss: g(batch), a scalar made with `lower` and `upper` as they are.
        upper_loss: f(validation), likewise; it may depend on x directly.
        optimizer: of `lower.parameters()`, or of some of them: `torch.optim.SGD`, `Adam` or `AdamW`
            with any groups; not with `amsgrad` or `maximize`. Options are read in every step.
        steps: K, the training steps of a call of `step`.
        products: how the steps' Hessians enter: `"autograd"`, exact, by a double backward of one
            step at a time; `"difference"`, by two plain gradients each; `"auto"`: autograd, or
            differences where the loss cannot be differentiated twice or that does not fit.
        epsilon: of a difference, relative to 1 + ‖φ‖. `"auto"`: from the precision of the
            gradients, as seen where `step` is called.
        trajectory: where φ_0 … φ_{K−1} are kept for the way back: on the `"device"` or the
            `"host"`. `"auto"`: on the device, or on the host where that is too small.

    After `step` the model's parameters, buffers and `.grad`, the optimizer's state and torch's
    random state are those of K plain training steps (`zero_grad`, `backward`, `step`), to the bit:
    all other passes replay a step's own random numbers and buffers and leave none of theirs. Where
    `step` raises, also at Ctrl-C, they are as they were before it, and nothing is added to `.grad`
    of x. What else the losses change or draw from (a third module, NumPy's generator) is the
    caller's business, and nothing may change gradients or parameters between `backward` and the
    optimizer's step. Where Adam divides by less than the gradient's rounding its step counts as
    constant.

    Cost: K lower gradients for the training, one upper gradient, and K double backwards or, with
    differences, 2K lower gradients. Memory: that of a training step (or one double backward), K
    copies of φ (with Adam of φ, gradient and two moments), and copies of φ, of what the optimizer
    remembers and of the gradient.

    Example:
        >>> model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> _ = nn.init.ones_(model.weight)
        >>> x = torch.zeros((), dtype=torch.float64, requires_grad=True)
        >>> fit = lambda a: (model(a) - 1).square().sum() + x.exp() * model.weight.square().sum()
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.25)
        >>> loop = Unrolled(model, x, fit, lambda a: model(a).sum(), sgd, steps=1)
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> stats = loop.step(one, one)  # φ_1 = φ_0 − ¼ (2(φ_0 − 1) + 2eˣφ_0), φ_0 = 1
        >>> model.weight.item(), x.grad.item(), stats.losses
        (0.5, -0.5, (1.0,))
    """

    def __init__(
        self,
        lower: nn.Module,
        upper: nn.Module | Tensor | Iterable[Tensor] | dict[str, Any],
        lower_loss: Loss,
        upper_loss: Loss,
        optimizer: torch.optim.Optimizer,
        steps: int,
        *,
        products: How = "auto",
        epsilon: float | Literal["auto"] = "auto",
        trajectory: Where = "auto",
    ) -> None:
        check_count(steps, "steps", "It is the number of training steps of a call.")
        check_known("products", products, get_args(How))
        check_known("trajectory", trajectory, get_args(Where))
        check_epsilon(epsilon)
        for name, value, kind in (
            ("lower", lower, nn.Module),
            ("optimizer", optimizer, torch.optim.Optimizer),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must be a live {kind.__name__}, got {value!r}. Write e.g. lower=model,"
                    " optimizer=torch.optim.Adam(model.parameters())."
                )
        for name, loss in (("lower_loss", lower_loss), ("upper_loss", upper_loss)):
            if not callable(loss):
                raise TypeError(f"{name} must be a function of a batch, got {loss!r}.")
        modules = [*lower.modules(), *(upper.modules() if isinstance(upper, nn.Module) else ())]
        self._lower = Lower(lower, lower_loss, optimizer, _variables(upper), modules)
        self._upper_loss, self._steps = upper_loss, steps
        self._products, self._epsilon, self._keep = products, epsilon, trajectory

    def step(self, batches: Any, validation: Any) -> UnrolledStats:
        """Train for K steps, and add the hypergradient of the upper loss on `validation` to
        `.grad` of the upper variables.

        Args:
            batches: a list of K batches, or an iterator that has K more (`iter(loader)`), for one
                step each; anything else is one batch for all steps, and so is a list of one.
            validation: what `upper_loss` takes.
        """
        taken = self._taken(batches)
        self._lower.refresh()
        finished = False

        def put_back() -> None:
            if not finished:
                entry.restore()

        with uninterrupted(), torch.inference_mode(False), torch.enable_grad():
            entry = State(self._lower, parameters=True, optimizer=True)
            with restored(put_back):
                stats, gradient = self._run(taken, validation)
                add_to_grad(gradient, self._lower.shared)
                finished = True
        return stats

    def _taken(self, batches: Any) -> list[Any]:
        if isinstance(batches, Iterator):
            taken = list(islice(batches, self._steps))
        else:
            taken = batches if isinstance(batches, list) else [batches]
            taken = taken * self._steps if len(taken) == 1 else taken
        if len(taken) != self._steps:
            raise ValueError(
                f"Got {len(taken)} batches for {self._steps} steps. Give one for each step, or one"
                " batch for all of them (a batch that is itself a list: inside a list)."
            )
        return taken

    def _run(self, batches: list[Any], validation: Any) -> tuple[UnrolledStats, Params]:
        lower, cost = self._lower, Cost()
        steps = Steps(lower, cost, self._steps, self._keep)
        for batch in batches:
            steps.take(batch)
        with restored(State(lower, parameters=True).restore):
            loss, q, gradient = steps.upper_gradient(self._upper_loss, validation)
            products = made(self._products, self._epsilon, lower)
            sizes: list[Tensor] = []

            def bend(step: int, point: Point, back: PulledBack) -> Params:
                hw = products(steps, point.d, back.by_gradient, step, None)
                for name, leaf in gradient.items():
                    leaf.add_(hw.pop(name), alpha=back.factor)
                sizes.append(norm(hw)[0])
                return hw

            walk_back(steps.backwards(), steps.pull_back, steps.end(q), bend)
        if not steps.depends:
            raise ValueError(
                "Neither lower_loss nor upper_loss depends on upper, so the hypergradient is zero."
                " Use it in one of them, and look for .detach(), torch.no_grad() or .item()."
            )
        losses, size = _finite(steps.losses, loss, sizes, norm(gradient)[0])
        error = None if steps.asymmetry is None else float(steps.asymmetry)
        if error is not None:
            warn_of_kinks(error, "one-sided ones are more than a third from the central one")
        stats = UnrolledStats(
            losses=tuple(losses[:-1]),
            upper_loss=losses[-1],
            gradient_norm=size,
            products=products.name,
            error=error,
            lower_gradients=cost.support_gradients,
            upper_gradients=cost.query_gradients,
            hessian_products=cost.hessian_products,
        )
        return stats, {n: leaf[0] for n, leaf in gradient.items()}


def _variables(upper: Any) -> dict[str, Tensor]:
    """The upper variables by name."""
    if isinstance(upper, nn.Module):
        upper = dict(upper.named_parameters())
    tree = Tree(
        list(upper) if isinstance(upper, Iterator) else upper, "upper", lambda t: t.requires_grad
    )
    if not tree.tensors:
        raise ValueError(
            "No tensor in upper requires gradients, so there is nothing to differentiate by. Call"
            " requires_grad_() on what shall be learned."
        )
    for name, leaf in zip(tree.tensors, tree.originals, strict=True):
        if not leaf.is_leaf:
            raise ValueError(
                f"{name} was computed from other tensors, and .grad is kept by those alone that"
                " were not. Give what it was computed from, and compute it inside the losses."
            )
    return dict(zip(tree.tensors, tree.originals, strict=True))


def _finite(
    lower: list[Tensor], upper: Tensor, products: list[Tensor], size: Tensor
) -> tuple[list[float], float]:
    """The losses and the hypergradient's norm as numbers, for which the device is waited for once;
    raises where something is not finite.
    """
    found = torch.stack([t.double().to(size.device) for t in (*lower, upper, *products, size)])
    steps = range(len(lower))
    quantities = [
        *(f"lower loss before training step {k}" for k in steps),
        "upper loss",
        *(f"Hessian product of training step {k}" for k in reversed(steps)),
        "hypergradient",
    ]
    values = found.tolist()
    for quantity, value in zip(quantities, values, strict=True):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"The {quantity} is NaN or Inf. Usually the training diverges: use a"
                " smaller lr. If it is step 0, look for NaN in the data, the parameters or upper."
                " Model and optimizer are as they were, and nothing was written to .grad."
            )
    return values[: len(lower) + 1], values[-1]
