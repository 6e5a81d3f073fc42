"""Tasks side by side with `torch.func`: any model that works under `vmap`.

Every gradient is `vmap(grad(...))` over rows; derivatives are always taken inside `vmap`, never
outside it: `grad(vmap(...))` gives wrong second derivatives through `F.batch_norm` (2–5 % off,
silently, in torch 2.13). Buffers are copied for every evaluation and thrown away, so running
statistics stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from metanudge.engines.diagnosis import diagnosed
from metanudge.engines.inner import Cost, Inner, Measured
from metanudge.engines.randomness import Draws, minibatch
from metanudge.objective import LossError, check_seen, metrics_of_rows
from metanudge.params import Params, num_rows
from metanudge.problem import Problem
from metanudge.solvers.base import LinearSolver, Solution, Trace, unroll
from metanudge.task import Batch, Stack, map_tensors, num_examples

Which = Literal["support", "query"]
T = TypeVar("T")


class Data(NamedTuple):
    """What the model sees of one row, or of all."""

    buffers: Params
    support: Batch
    query: Batch


@dataclass(frozen=True)
class Members:
    """The tasks of a group, and what they are solved with."""

    problem: Problem
    stack: Stack
    nudges_at_once: int
    draws: Draws
    cost: Cost

    def alone(self, row: int) -> Members:
        """One of the tasks."""
        return replace(self, stack=self.stack[row : row + 1])


class StackedInner(Inner):
    """Tasks of equal shape side by side under `vmap`."""

    problem: Problem
    columns_at_once = 32

    def __init__(self, members: Members) -> None:
        problem, self._stack = members.problem, members.stack
        super().__init__(problem, self._stack.places, members.cost)
        self._members, self._draws = members, members.draws
        self.nudges_at_once = members.nudges_at_once
        self.theta = problem.theta
        self._omega = {n: p.detach() for n, p in problem.shared.items()}
        model = problem.objective.model
        self._buffers = {f"model.{n}": b.detach() for n, b in model.named_buffers()}
        # Only a module in training mode writes its buffers; then every row needs its own copy to
        # write to.
        self._buffers_written = any(
            m.training and next(m.buffers(recurse=False), None) is not None for m in model.modules()
        )

    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """Losses and gradient of f̂ + ν f for all rows."""
        self.count(num_rows(d), offsets)
        slope = partial(self._slope, step=step)
        g, losses = self._over_rows(slope, (d, offsets), step, batch_size)
        return losses, g

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∇f(θ + d) for all rows."""
        self.cost.query_gradients += num_rows(d)
        if shared and self._omega:
            leaves = {n: leaf.detach().requires_grad_() for n, leaf in d.items()}
            omega = {n: p.detach().requires_grad_() for n, p in self._omega.items()}

            def both(data: Data, d: Params) -> Tensor:
                return self._loss(data, d, step, "query", self.theta | omega)[0]

            losses = self._over_rows(both, (leaves,), step)
            g = torch.autograd.grad(
                losses.sum(), [*leaves.values(), *omega.values()], materialize_grads=True
            )
            found = dict(zip([*leaves, *omega], g, strict=True))
            return {n: leaf if n in leaves else leaf.unsqueeze(0) for n, leaf in found.items()}

        def row(data: Data, d: Params) -> Params:
            return grad(lambda d: self._loss(data, d, step, "query")[0])(d)

        return self._over_rows(row, (d,), step)

    def shared_gradient(
        self, d: Params, offsets: Tensor | None, weights: Sequence[float]
    ) -> Params:
        """The weighted gradient of f̂ + ν f by the shared parameters: first derivatives only, so
        autograd may sum over rows by itself.
        """
        self.count(num_rows(d), offsets)
        omega = {n: p.detach().requires_grad_() for n, p in self._omega.items()}
        nudged = partial(self._nudged, step=0, theta=self.theta | omega)
        losses = self._over_rows(nudged, (d, offsets), 0).unflatten(0, (len(weights), -1))
        total = sum(
            (w * part.sum() for w, part in zip(weights[1:], losses[1:], strict=True)),
            weights[0] * losses[0].sum(),
        )
        g = torch.autograd.grad(total, list(omega.values()), materialize_grads=True)
        return {n: leaf.unsqueeze(0) for n, leaf in zip(omega, g, strict=True)}

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d for all rows."""
        d = self.shifted(d, shift)
        rows, metrics = num_rows(d), self.problem.metrics

        def row(data: Data, d: Params) -> Any:
            seen: list[Any] = []
            return self._loss(data, d, 0, "query", None, seen), check_seen(metrics, seen)

        with torch.no_grad():
            (loss, accuracy, extra), outputs = self._over_rows(row, (d,), 0)
        return Measured(loss, accuracy, extra | metrics_of_rows(metrics, outputs, rows, extra))

    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """f̂ + ν f without gradients."""
        with torch.no_grad():
            return self._over_rows(partial(self._nudged, step=step), (d, offsets), step)

    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """Losses, gradient and Hessian-vector product: forward over reverse, reverse over reverse
        where that is missing.
        """
        _load_forward_mode()

        def row(data: Data, d: Params, v: Params, nu: Tensor | None) -> Any:
            def slope(d: Params) -> tuple[Params, Tensor]:
                return self._slope(data, d, nu, step=step)

            if forward_mode:
                g, hv, value = jvp(slope, (d,), (v,), has_aux=True)  # type: ignore[misc]
            else:
                g, pull_back, value = vjp(slope, d, has_aux=True)  # type: ignore[misc]
                (hv,) = pull_back(v)
            return value, g, hv

        forward_mode = True
        arguments = (row, (d, v, offsets), step, batch_size)
        try:
            losses, g, hv = self._over_rows(*arguments, diagnose=False, second_order=True)
        except torch.cuda.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError):
            # the Hessian is symmetric, so the transposed product is the product
            forward_mode = False
            losses, g, hv = self._over_rows(*arguments, second_order=True)
        self.count(num_rows(d), offsets, products=1)
        return losses, g, hv

    def support_gradient(self, d: Params, step: int, batch_size: int | None) -> Params:
        """With shared parameters as if they adapted, too, and had not moved yet."""
        if not self._omega:
            return self.data_gradient(d, None, step, batch_size)[1]
        still = self._still(num_rows(d))
        return StackedInner.data_gradient(self, d | still, None, step, batch_size)[1]

    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """In the same way, along a direction that does not move them."""
        if not self._omega:
            return self.data_hvp(d, v, None, step, batch_size)[2]
        still = self._still(num_rows(d))
        return StackedInner.data_hvp(self, d | still, v | still, None, step, batch_size)[2]

    def _still(self, rows: int) -> Params:
        return {n: p.new_zeros(rows, *p.shape) for n, p in self._omega.items()}

    def unrolled_gradient(self, solver: LinearSolver, *, unrolled: int) -> tuple[Params, Solution]:
        """MAML's gradient of every row: backwards through the steps, within `vmap`."""
        proximal = self.problem.proximal
        h = {n: p.detach() for n, p in self.problem.meta_parameters.items()}

        def row(data: Data, start: Params, chosen: list[Tensor]) -> Any:
            def outer(h: Params) -> Any:
                force, mu = proximal.bind(
                    {n: h[n] for n in self.theta}, {n: h[n] for n in proximal.learned}
                )
                losses, residuals = [], []

                def gradient(d: Params, step: int) -> Params:
                    part = data
                    if chosen:
                        batch = map_tensors(lambda t: t[chosen[step]], data.support)
                        part = data._replace(support=batch)

                    def inner(d: Params) -> tuple[Tensor, Tensor]:
                        value = self._loss(part, d, step, "support", h)[0]
                        return value, value.detach()

                    g, loss = grad(inner, has_aux=True)(d)
                    g = {n: leaf + g[n] for n, leaf in force(d).items()}
                    losses.append(loss)
                    norms = [torch.linalg.vector_norm(leaf.detach()) for leaf in g.values()]
                    residuals.append(torch.linalg.vector_norm(torch.stack(norms)))
                    return g

                d = unroll(solver, start, gradient, strong_convexity=mu, last=unrolled)
                value = self._loss(data, d, 0, "query", h)[0]
                return value, (
                    torch.stack(losses).detach(),
                    torch.stack(residuals),
                    {n: leaf.detach() for n, leaf in d.items()},
                )

            return grad(outer, has_aux=True)(h)

        drawn = (self._minibatch(step, solver.batch_size) for step in range(solver.steps))
        arguments = (self.zeros(self.tasks), [indices for indices in drawn if indices is not None])
        g, (losses, residuals, d) = self._over_rows(row, arguments, 0, second_order=True)
        return g, self._unrolled(d, losses.unbind(1), residuals.unbind(1), unrolled)

    def _unrolled(
        self, d: Params, losses: Sequence[Tensor], residuals: Sequence[Tensor], unrolled: int
    ) -> Solution:
        """The solution of steps of which the last `unrolled` were differentiated, counted; losses
        and residuals are those of all tasks in each step.
        """
        self.cost.support_gradients += self.tasks * len(losses)
        self.cost.query_gradients += self.tasks
        self.cost.hessian_products += self.tasks * unrolled
        trace = Trace(self.oracle())
        for loss, residual in zip(losses, residuals, strict=True):
            trace.note(loss, residual)
        return trace.solution(d, len(losses))

    def apart(self, row: int) -> Inner:
        """One task of the group."""
        return StackedInner(self._members.alone(row))

    def _loss(
        self,
        data: Data,
        d: Params,
        step: int,
        which: Which,
        theta: Params | None = None,
        *seen: Any,
    ) -> tuple[Tensor, Tensor, Params]:
        """What `Objective.forward` says of one row at θ + d, with the shared parameters as they are
        unless d moves them too.
        """
        theta = self.theta | self._omega if theta is None else theta
        phi = {f"model.{n}": theta[n] for n in self._omega if n not in d}
        phi |= {f"model.{n}": (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}
        # Fresh copies: a module may write its buffers, and what it writes must not outlive this
        # evaluation.
        written = self._buffers_written
        kept = {n: b.clone() for n, b in data.buffers.items()} if written else data.buffers
        batch = data.support if which == "support" else data.query
        with self._draws.seeded(step, which):
            return functional_call(self.problem.objective_of(which), (phi, kept), (batch, *seen))

    def _nudged(
        self, data: Data, d: Params, nu: Tensor | None, *, step: int, theta: Params | None = None
    ) -> Tensor:
        value = self._loss(data, d, step, "support", theta)[0]
        return value if nu is None else value + nu * self._loss(data, d, step, "query", theta)[0]

    def _slope(
        self, data: Data, d: Params, nu: Tensor | None, *, step: int
    ) -> tuple[Params, Tensor]:
        """Gradient and value of one row's nudged loss."""

        def loss(d: Params) -> tuple[Tensor, Tensor]:
            value = self._nudged(data, d, nu, step=step)
            return value, value.detach()

        return grad(loss, has_aux=True)(d)

    def _over_rows(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        step: int,
        batch_size: int | None = None,
        *,
        diagnose: bool = True,
        second_order: bool = False,
    ) -> Any:
        """`vmap` a function of one row's data and arguments over all rows, those of the first
        argument; where offsets are None among them, it does without the query set.
        """
        # vmap knows plain dicts only
        arguments = [
            dict(argument) if isinstance(argument, dict) else argument for argument in arguments
        ]
        rows, with_query = num_rows(arguments[0]), all(part is not None for part in arguments)
        repeats = rows // self.tasks
        support = self._minibatch_of_support(step, batch_size)
        query = repeated(self._stack.query, repeats) if with_query else None
        buffers = self._buffers
        if self._buffers_written:
            buffers = {n: b.expand(rows, *b.shape) for n, b in buffers.items()}
        data = Data(buffers, repeated(support, repeats), query)
        dims = (map_tensors(lambda _: 0, _constants_apart(batch)) for batch in data[1:])
        in_dims = (
            Data(0 if self._buffers_written else None, *dims),  # type: ignore[arg-type]
            *(None if argument is None else 0 for argument in arguments),
        )

        def run() -> Any:
            # The fused attention kernels know no second derivatives and, on a CPU, no vmap.
            plain = second_order or self.problem.device.type == "cpu"
            with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
                return vmap(function, in_dims=in_dims, randomness="same")(data, *arguments)

        return explained(self.problem, self._stack, run) if diagnose else run()

    def _minibatch(self, step: int, batch_size: int | None) -> Tensor | None:
        """Indices of a step's minibatch, `(tasks, batch_size)`; None when all examples are used."""
        size = num_examples(self._stack.support, axis=1)
        if batch_size is None or batch_size >= size:
            return None
        rows = [minibatch(self._draws.seed, place, step, size, batch_size) for place in self.places]
        return torch.stack(rows).to(self.problem.device)

    def _minibatch_of_support(self, step: int, batch_size: int | None) -> Batch:
        chosen = self._minibatch(step, batch_size)
        if chosen is None:
            return self._stack.support
        tasks = torch.arange(len(chosen), device=chosen.device)[:, None]
        return map_tensors(lambda t: t[tasks, chosen], self._stack.support)


def explained(problem: Problem, stack: Stack, run: Callable[[], T]) -> T:
    """Run something on a stack of tasks, and where it fails say which sub-module and what to do."""
    try:
        return run()
    except (torch.cuda.OutOfMemoryError, LossError):
        raise
    except (RuntimeError, NotImplementedError, IndexError, ValueError, AssertionError) as error:
        raise diagnosed(problem, stack.task(0), run, error) from error


@cache
def _load_forward_mode() -> None:
    """Have torch load its forward-mode rules now: doing so warns of a deprecation within torch that
    users can do nothing about.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _constants_apart(batch: Batch) -> Batch:
    """The batch with everything that is no tensor replaced by None, which `vmap` leaves alone."""
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, batch)


def repeated(batch: Batch, times: int) -> Batch:
    """All tasks of a batch, several times over."""
    return (
        batch if times == 1 else map_tensors(lambda t: t.repeat(times, *[1] * (t.ndim - 1)), batch)
    )
