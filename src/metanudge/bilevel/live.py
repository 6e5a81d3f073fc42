"""Training steps of a live model, taken for good, and noted so that each can be evaluated once more
as it was: parameters, buffers, random numbers and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metanudge.bilevel.inner import Gradients, gradients, second_gradients
from metanudge.bilevel.problem import scalar_of
from metanudge.engines import Cost
from metanudge.engines.once import refuse_once_differentiable
from metanudge.engines.randomness import generators
from metanudge.engines.undisturbed import Buffers, obey
from metanudge.names import some
from metanudge.params import Params, norm, wide, zeros_like
from metanudge.solvers.adjoint import Adjoint, Point, PulledBack
from metanudge.solvers.optimizer_update import Rule, Still, pulled_through, rules_of
from metanudge.solvers.trajectory import as_it_is, chosen, moved, to_host
from metanudge.task import describe

Loss = Callable[[Any], Tensor]
Where = Literal["auto", "device", "host"]


class Lower:
    """A module with its loss and its optimizer, and what the loss depends on besides.

    Attributes:
        parameters: what the optimizer moves.
        shared: the upper variables.
        modules: all whose buffers and modes the losses may change.
        device: where the parameters lie.
        twice_differentiable: whether nothing is known against second derivatives of the loss.
    """

    twice_differentiable = True

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        shared: Params,
        modules: Sequence[nn.Module],
    ) -> None:
        self._module, self.loss, self.optimizer = module, loss, optimizer
        self.shared, self.modules = shared, modules
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in modules):
            raise TypeError(
                "lower or upper is wrapped in DistributedDataParallel, which would not average the"
                " gradients that Unrolled takes. Train in one process, with the module inside."
            )
        self.refresh()

    def refresh(self) -> None:
        """See what the optimizer moves now."""
        moving = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        names = {id(p): f"lower.{n}" for n, p in self._module.named_parameters()}
        strange = [describe(p) for key, p in moving.items() if key not in names]
        if strange:
            raise ValueError(
                f"The optimizer moves tensors that are no parameters of lower: {some(strange, 3)}."
                " Make it from lower.parameters(), once lower is complete."
            )
        self.parameters = {names[key]: p for key, p in moving.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "The optimizer moves no parameter of lower that requires gradients, so nothing"
                " trains. Call requires_grad_(True) on what shall move."
            )
        shared = {id(leaf) for leaf in self.shared.values()}
        for name, p in self.parameters.items():
            if not p.is_floating_point():
                raise TypeError(f"{name} holds no real numbers ({describe(p)}). Freeze it.")
            if id(p) in shared:
                raise ValueError(
                    f"{name} is in upper, and the optimizer moves it, too. Take it out of one of"
                    " them."
                )
        self.device = next(iter(self.parameters.values())).device
        self.rules()

    def rules(self) -> list[Rule]:
        """How each of the optimizer's groups moves now."""
        return rules_of(self.optimizer, "Unrolled differentiates the optimizer's steps, and")


class State:
    """What training steps and evaluations change, as it is now: random numbers, buffers and modes.

    Args:
        before: an earlier one, whose copies of buffers serve again where nothing has changed.
        parameters: those and their `.grad`, too.
        optimizer: what the optimizer remembers, too.
    """

    def __init__(
        self,
        lower: Lower,
        before: State | None = None,
        *,
        parameters: bool = False,
        optimizer: bool = False,
    ) -> None:
        self._generators = generators(lower.device)
        self._random = [generator.get_state() for generator in self._generators]
        self._buffers: Buffers = Buffers(lower.modules, None if before is None else before._buffers)
        self._modes = [(module, module.training) for module in lower.modules]
        moving = list(lower.parameters.values())
        self._parameters = [(p, p.grad, p.detach().clone()) for p in moving if parameters]
        self._state = lower.optimizer.state
        self._memory = {
            p: [(key, t, t.clone() if isinstance(t, Tensor) else t) for key, t in found.items()]
            for p, found in ((p, self._state.get(p, {})) for p in moving if optimizer)
        }

    def restore(self) -> None:
        """Put it back; it does not matter how often."""
        for generator, state in zip(self._generators, self._random, strict=True):
            generator.set_state(state)
        self._buffers.restore()
        for module, mode in self._modes:
            module.training = mode
        for p, grad, value in self._parameters:
            p.data.copy_(value)
            p.grad = grad
        for p, memory in self._memory.items():
            self._state.pop(p, None)
            for key, tensor, value in memory:
                self._state[p][key] = tensor.copy_(value) if isinstance(tensor, Tensor) else value


@dataclass(frozen=True)
class _Step:
    batch: Any
    state: State
    rules: dict[str, tuple[Rule, int]]


class Steps:
    """Training steps as they are taken, then walked back.

    Attributes:
        problem: what trains.
        losses: the lower loss before each step.
        depends: whether a loss has been found to depend on the upper variables.
        asymmetry: how far one-sided differences of the last step are from the central one,
            relatively; None where there were none.
    """

    def __init__(self, lower: Lower, cost: Cost, count: int, keep: Where) -> None:
        self.problem, self.cost, self.losses = lower, cost, list[Tensor]()
        self.depends = False
        self.asymmetry: Tensor | None = None
        self.theta = {n: torch.zeros((), device=lower.device) for n in lower.parameters}
        self._count, self._keep, self._away = count, keep, as_it_is
        self._steps: list[_Step] = []
        self._points: list[Point] = []
        state = lower.optimizer.state
        self._times = {
            n: int(state[p].get("step", state[p].get("momentum_buffer") is not None))
            if p in state
            else 0
            for n, p in lower.parameters.items()
        }

    # ------------------------------------------------------------------------------------ forwards

    def take(self, batch: Any) -> None:
        """One step of the optimizer."""
        lower, number = self.problem, len(self._steps)
        state = State(lower, self._steps[-1].state if self._steps else None)
        lower.optimizer.zero_grad()
        loss = self._lower_loss(batch, number)
        if loss.requires_grad:
            loss.backward(inputs=list(lower.parameters.values()))
        self.cost.support_gradients += 1
        self._check(number)
        groups = lower.rules()
        rules, point = self._rules(groups), self._point(groups)
        if self._keep == "auto":
            gradients = point.g is not None
            self._keep = chosen(point.d, point.memory, self._count, gradients=gradients)
        self._away = to_host if self._keep == "host" else as_it_is
        self._points.append(moved(point, self._away))
        del point
        self._steps.append(_Step(batch, state, rules))
        lower.optimizer.step()
        for name, p in lower.parameters.items():
            self._times[name] += p.grad is not None
        self.losses.append(loss.detach())

    def _check(self, number: int) -> None:
        gradients = [p.grad for p in self.problem.parameters.values() if p.grad is not None]
        if not gradients:
            raise ValueError(
                f"lower_loss(batch) in step {number} depends on no parameter that the optimizer"
                " moves. Use lower in it, and look for .detach(), torch.no_grad() or .item()."
            )
        if any(g.layout != torch.strided for g in gradients):
            raise TypeError(
                "A parameter of lower has a sparse gradient, and steps with such are not"
                " differentiated. Use nn.Embedding(sparse=False)."
            )

    def _rules(self, groups: list[Rule]) -> dict[str, tuple[Rule, int]]:
        names = {id(p): n for n, p in self.problem.parameters.items()}
        return {
            names[id(p)]: (Still() if p.grad is None else rule, self._times[names[id(p)]])
            for rule, group in zip(groups, self.problem.optimizer.param_groups, strict=True)
            for p in group["params"]
            if id(p) in names
        }

    def _point(self, groups: list[Rule]) -> Point:
        """Where the step begins; what a linear rule remembers has no part in its derivative."""
        parameters, state = self.problem.parameters, self.problem.optimizer.state
        d = {n: _row(p, p) for n, p in parameters.items()}
        if groups[0].linear:
            return Point(d, (d,) * max(rule.remembers for rule in groups))
        first, second = (
            {n: _row(state[p].get(key) if p in state else None, p) for n, p in parameters.items()}
            for key in ("exp_avg", "exp_avg_sq")
        )
        return Point(d, (first, second), {n: _row(p.grad, p) for n, p in parameters.items()})

    # ----------------------------------------------------------------------------------- backwards

    def upper_gradient(self, loss: Loss, batch: Any) -> tuple[Tensor, Params, Params]:
        """The upper loss after the last step, its gradient by what moves, and by the upper
        variables.
        """
        value = _scalar("upper_loss", loss, batch)
        found = gradients(value, self.problem.parameters | self.problem.shared)
        self.cost.query_gradients += 1
        if all(found[n] is None for n in self.problem.parameters):
            raise ValueError(
                "upper_loss(validation) depends on no parameter that the optimizer moves, so the"
                " training steps play no part. Use lower in it, and look for .detach(),"
                " torch.no_grad() or .item(); or call upper_loss(validation).backward()."
            )
        g = self._rows(found)
        return value.detach(), {n: g.pop(n) for n in self.problem.parameters}, g

    def end(self, q: Params) -> Adjoint:
        """What a derivative by the parameters is by what the last step left behind."""
        return Adjoint(q, tuple(zeros_like(q) for _ in self._points[-1].memory))

    def backwards(self) -> Iterator[tuple[int, Point]]:
        """Every step and where it began, the last one first; then forgotten."""
        device = self.problem.device
        while self._points:
            point = self._points.pop()
            fetch = as_it_is if self._away is as_it_is else lambda t: t.to(device)
            yield len(self._points), moved(point, fetch)

    def pull_back(self, step: int, point: Point, after: Adjoint) -> PulledBack:
        """The optimizer's own vector–Jacobian product."""
        return pulled_through(self._steps[step].rules, point, after)

    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """By a double backward of one step; see `metanudge.engines.Inner`."""
        lower = self.problem
        # The fused attention kernels have no second derivatives; checkpoints attend again below.
        with sdpa_kernel(SDPBackend.MATH):
            loss = self._again(step, d)
            refuse_once_differentiable(loss, lower.parameters.values())
            g = gradients(loss, lower.parameters, create_graph=True)
            self.cost.support_gradients += 1
            self.cost.hessian_products += 1
            # of a loss that is linear in the parameters nothing is left
            product = sum((t * v[n][0]).sum() for n, t in g.items() if t is not None)
            assert isinstance(product, Tensor)
            return self._rows(second_gradients(product, lower.parameters | lower.shared))

    def support_difference(
        self, d: Params, v: Params, epsilon: Tensor, step: int, batch_size: int | None
    ) -> Params:
        """By two plain gradients; see `metanudge.engines.Inner`."""
        both = self.problem.parameters | self.problem.shared
        ends = []
        for sign in (1.0, -1.0):
            ends.append(self._rows(gradients(self._again(step, d, v, sign * epsilon), both)))
            self.cost.support_gradients += 1
        plus, minus = ends
        if step == self._count - 1:  # whose gradient is still in .grad
            self.asymmetry = self._asymmetry(plus, minus)
        return {n: leaf.sub_(minus[n]) for n, leaf in plus.items()}

    def _asymmetry(self, plus: Params, minus: Params) -> Tensor:
        here = {n: _row(p.grad, p) for n, p in self.problem.parameters.items()}
        even = norm({n: leaf.mul_(-2).add_(plus[n]).add_(minus[n]) for n, leaf in here.items()})
        odd = norm({n: torch.sub(plus[n], minus[n]) for n in here})
        return even[0] / odd[0]

    def _again(
        self, step: int, d: Params, along: Params | None = None, by: Tensor | None = None
    ) -> Tensor:
        """The lower loss of a step as it was, or at parameters moved along a direction."""
        self._steps[step].state.restore()
        for name, p in self.problem.parameters.items():
            leaf = d[name][0]
            if along is not None and by is not None:
                leaf = torch.addcmul(leaf, along[name][0], by[0].to(leaf))
            p.data.copy_(leaf)
        if torch.is_autocast_enabled(self.problem.device.type):
            torch.clear_autocast_cache()  # it holds casts of the parameters' old values
        return self._lower_loss(self._steps[step].batch, step)

    def _rows(self, found: Gradients) -> Params:
        """Gradients in the form of displacements, zero where there is none; `found` is emptied."""
        self.depends = self.depends or any(found[n] is not None for n in self.problem.shared)
        tensors = self.problem.parameters | self.problem.shared
        return {n: _row(found.pop(n), t) for n, t in tensors.items()}

    def _lower_loss(self, batch: Any, step: int) -> Tensor:
        return _scalar("lower_loss", self.problem.loss, batch, f" in step {step}")


def _row(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A copy with a row axis, in float32 or wider; zero for None."""
    dtype = wide(like.dtype)
    if tensor is None:
        return torch.zeros((1, *like.shape), dtype=dtype, device=like.device)
    return tensor.detach().to(dtype, copy=True).unsqueeze(0)


def _scalar(name: str, loss: Loss, batch: Any, when: str = "") -> Tensor:
    obey()
    return scalar_of(
        f"{name}(batch)", lambda: loss(batch), lambda: f"{when} with {describe(batch)}"
    )
