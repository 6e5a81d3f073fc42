"""The stacked engine: tasks × nudges on one batch axis with `torch.func`.

Every gradient is `vmap(grad(...))` over rows; derivatives are always taken inside `vmap`, never outside it: `grad(vmap(...))`
gives wrong second derivatives through `F.batch_norm` (2–5 % off, silently, in torch 2.13). Groups of at most `chunk` rows bound the
memory. Buffers are copied for every evaluation and thrown away, so running statistics stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from metanudge.engines.chain import Chain, Data, losses_of_rows
from metanudge.engines.diagnosis import StackingError, cannot_stack, model_refuses
from metanudge.engines.inner import Cost, Inner, Measured, NudgedOracle
from metanudge.engines.randomness import Draws, minibatch
from metanudge.engines.trunk import triton_works
from metanudge.params import Flat, Params, flatten, norm, unflatten
from metanudge.problem import LossError, Nudge, Problem
from metanudge.proximal import Diagonal
from metanudge.solvers.base import LinearSolver, Solution, check_count
from metanudge.task import Batch, Stack, TaskBatch, map_tensors, num_examples

_COLUMNS_AT_ONCE = 32


@dataclass(frozen=True)
class StackedEngine:
    """Solves up to `chunk` rows (tasks × nudges) at once; None for all of them.

    The chunk bounds the memory and does not change the result.
    """

    chunk: int | None = None
    name = "stacked"

    def __post_init__(self) -> None:
        if self.chunk is not None:
            check_count(self.chunk, "chunk", "It is the number of solves (tasks × nudges) held in memory at once.")

    @contextmanager
    def session(
        self, problem: Problem, batch: TaskBatch, *, width: int, seed: int, cost: Cost, first: int = 0
    ) -> Iterator[Iterator[Inner]]:
        """The tasks of a batch in groups of equal shape, small enough for the chunk."""
        problem.proximal.refresh()
        draws = Draws(seed, problem.device)
        tasks_at_once = len(batch) if self.chunk is None else max(1, self.chunk // width)
        nudges_at_once = width if self.chunk is None else min(width, self.chunk)
        groups = (
            StackedInner(problem, stack[begin : begin + tasks_at_once].moved(first), nudges_at_once, draws, cost)
            for stack in batch.stacks
            for begin in range(0, len(stack), tasks_at_once)
        )
        with draws.preserved():
            yield groups
        cost.drew = draws.used


class StackedInner(Inner):
    """Tasks of equal shape side by side."""

    def __init__(self, problem: Problem, stack: Stack, nudges_at_once: int, draws: Draws, cost: Cost) -> None:
        super().__init__(problem, stack.places, cost)
        self._stack = stack
        self._nudges_at_once = nudges_at_once
        self._draws = draws
        self._theta = problem.theta
        self._omega = {n: p.detach() for n, p in problem.shared.items()}
        alike = len({leaf.dtype for leaf in self._theta.values()}) == 1
        self._chain = Chain.of(problem) if alike and all(map(_is_pair, (stack.support, stack.query))) else None
        self._shapes = {n: leaf.shape for n, leaf in self._theta.items()}
        self._first: dict[tuple[str, int | None], tuple[Tensor, Tensor]] = {}
        self._prepared: dict[str, tuple[Tensor, list[Data]]] = {}
        model = problem.objective.model
        self._buffers = {f"model.{n}": b.detach() for n, b in model.named_buffers()}
        # Only a module in training mode writes its buffers; then every row needs its own copy to write to.
        self._buffers_written = any(m.training and next(m.buffers(recurse=False), None) is not None for m in model.modules())

    @cached_property
    def _flat_theta(self) -> Tensor:
        return torch.cat([leaf.flatten() for leaf in self._theta.values()])

    def zeros(self, rows: int) -> Params:
        """Zero displacements; of a chain in one matrix."""
        if self._chain is None:
            return super().zeros(rows)
        dtype = next(iter(self.problem.theta_dtypes.values()))
        return Flat(torch.zeros(rows, self._flat_theta.numel(), dtype=dtype, device=self.problem.device), self._shapes)

    def oracle(self, offsets: list[float], nudge: Nudge | None, force: Params | None, shift: Params | None) -> NudgedOracle:
        """Where kernels for it exist, oracles that descend in one pass over memory."""
        if self._chain is None or shift is not None or not _fuses(self.problem):
            return super().oracle(offsets, nudge, force, shift)
        return FusedOracle(self, offsets, nudge, force, None)

    @property
    def nudges_at_once(self) -> int:
        """As many as the chunk allows."""
        return self._nudges_at_once

    def data_gradient(self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None) -> tuple[Tensor, Params]:
        """Losses and gradient of f̂ + ν f for all rows."""
        rows = _rows(d)
        self._count(rows, offsets)
        if self._chain is not None:
            support = self._minibatch_of_support(step, batch_size)
            parts: list[tuple[Batch, str, Tensor | None]] = [(support, "support", None)]
            if offsets is not None:
                parts.append((self._stack.query, "query", offsets))
            return self._chain_gradient(d, parts, step)

        def row(d: Params, nu: Tensor | None, buffers: Params, support: Batch, query: Batch) -> tuple[Params, Tensor]:
            def loss(d: Params) -> tuple[Tensor, Tensor]:
                value = self._nudged(d, nu, buffers, support, query, step)
                return value, value.detach()

            return grad(loss, has_aux=True)(d)

        g, losses = self._over_rows(row, rows, (d, offsets), step, batch_size, with_query=offsets is not None)
        return losses, g

    @property
    def theta(self) -> Params:
        """θ."""
        return self._theta

    def gradient_at_theta(self, d: Params, offsets: Tensor | None, batch_size: int | None) -> tuple[Tensor, Params]:
        """At θ all nudges of a task are alike: one evaluation a task serves them all, in this solve and in later ones."""
        if self._chain is None:
            return super().gradient_at_theta(d, offsets, batch_size)
        rows = _rows(d)
        self._count(rows, offsets)
        losses, g = (known.repeat(rows // self.tasks, *[1] * (known.ndim - 1)) for known in self._at_theta("support", batch_size))
        if offsets is not None:
            query = (known.repeat(rows // self.tasks, *[1] * (known.ndim - 1)) for known in self._at_theta("query", None))
            losses, g = (torch.addcmul(a, b, offsets.view(-1, *[1] * (b.ndim - 1))) for a, b in zip((losses, g), query, strict=True))
        return losses, Flat(g, self._shapes)

    def _at_theta(self, which: str, batch_size: int | None) -> tuple[Tensor, Tensor]:
        """Losses and gradients of the tasks at θ in the first inner step."""
        if (which, batch_size) not in self._first:
            batch = self._minibatch_of_support(0, batch_size) if which == "support" else self._stack.query
            losses, g = self._chain_gradient(self.zeros(self.tasks), [(batch, which, None)], 0)
            self._first[which, batch_size] = losses, g.matrix
        return self._first[which, batch_size]

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∇f(θ + d) for all rows."""
        rows = _rows(d)
        self.cost.query_gradients += rows
        if shared and self._omega:
            leaves = {n: leaf.detach().requires_grad_() for n, leaf in d.items()}
            omega = {n: p.detach().requires_grad_() for n, p in self._omega.items()}

            def both(d: Params, buffers: Params, support: Batch, query: Batch) -> Tensor:
                return self._loss(d, buffers, query, step, "query", self._theta | omega)[0]

            losses = self._over_rows(both, rows, (leaves,), step, None)
            g = torch.autograd.grad(losses.sum(), [*leaves.values(), *omega.values()], materialize_grads=True)
            found = dict(zip([*leaves, *omega], g, strict=True))
            return {n: leaf if n in leaves else leaf.unsqueeze(0) for n, leaf in found.items()}
        if self._chain is not None:
            return self._chain_gradient(d, [(self._stack.query, "query", None)], step)[1]

        def row(d: Params, buffers: Params, support: Batch, query: Batch) -> Params:
            return grad(lambda d: self._loss(d, buffers, query, step, "query")[0])(d)

        return self._over_rows(row, rows, (d,), step, None)

    def shared_gradient(self, d: Params, offsets: Tensor | None, weights: Sequence[float]) -> Params:
        """The weighted gradient of f̂ + ν f by the shared parameters: first derivatives only, so autograd may sum over rows by itself."""
        rows = _rows(d)
        self._count(rows, offsets)
        omega = {n: p.detach().requires_grad_() for n, p in self._omega.items()}

        def row(d: Params, nu: Tensor | None, buffers: Params, support: Batch, query: Batch) -> Tensor:
            value = self._loss(d, buffers, support, 0, "support", self._theta | omega)[0]
            return value if nu is None else value + nu * self._loss(d, buffers, query, 0, "query", self._theta | omega)[0]

        losses = self._over_rows(row, rows, (d, offsets), 0, None, with_query=offsets is not None).unflatten(0, (len(weights), -1))
        total = sum((w * part.sum() for w, part in zip(weights[1:], losses[1:], strict=True)), weights[0] * losses[0].sum())
        g = torch.autograd.grad(total, list(omega.values()), materialize_grads=True)
        return {n: leaf.unsqueeze(0) for n, leaf in zip(omega, g, strict=True)}

    def shared_hvp(self, d: Params, v: Params) -> Params:
        """∂²f̂/∂ω∂φ v for all rows: the gradient by ω of ⟨∇_φ f̂, v⟩."""
        rows = _rows(d)
        still = {n: torch.zeros_like(p) for n, p in self._omega.items()}

        def row(d: Params, v: Params, buffers: Params, support: Batch, query: Batch) -> Params:
            def along(e: Params) -> Tensor:
                g = grad(lambda d: self._nudged(d | e, None, buffers, support, query, 0))(d)
                return torch.stack([(leaf * v[n]).sum() for n, leaf in g.items()]).sum()

            return grad(along)(still)

        mixed = self._over_rows(row, rows, (d, v), 0, None, with_query=False, second_order=True)
        self._count(rows, None)
        self.cost.hessian_products += rows
        return mixed

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d for all rows."""
        if shift is not None:
            d = shift if d is None else {n: leaf + shift[n] for n, leaf in d.items()}
        d = self.zeros(self.tasks) if d is None else d
        if self._chain is not None:
            with torch.no_grad():
                phi, query = self._moved(d), self._stack.query
                portions = self._portions(query, "query", _rows(d))
                judge = vmap(self.problem.objective.judge, randomness="same")
                values = [
                    self._chain_losses({n: p[rows] for n, p in phi.items()}, data, targets, 0, "query", judge)
                    for rows, data, targets in portions
                ]
                return Measured(*(torch.cat(column) for column in zip(*values, strict=True)))

        def row(d: Params, buffers: Params, support: Batch, query: Batch) -> tuple[Tensor, Tensor]:
            return self._loss(d, buffers, query, 0, "query")

        with torch.no_grad():
            return Measured(*self._over_rows(row, _rows(d), (d,), 0, None))

    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """f̂ + ν f without gradients."""

        def row(d: Params, nu: Tensor | None, buffers: Params, support: Batch, query: Batch) -> Tensor:
            return self._nudged(d, nu, buffers, support, query, step)

        with torch.no_grad():
            return self._over_rows(row, _rows(d), (d, offsets), step, None, with_query=offsets is not None)

    def data_hvp(self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None) -> tuple[Tensor, Params, Params]:
        """Losses, gradient and Hessian-vector product: forward over reverse, reverse over reverse where that is missing."""
        rows = _rows(d)
        _load_forward_mode()

        def row(d: Params, v: Params, nu: Tensor | None, buffers: Params, support: Batch, query: Batch) -> Any:
            def gradient(d: Params) -> tuple[Params, Tensor]:
                def loss(d: Params) -> tuple[Tensor, Tensor]:
                    value = self._nudged(d, nu, buffers, support, query, step)
                    return value, value.detach()

                return grad(loss, has_aux=True)(d)

            if forward_mode:
                g, hv, value = jvp(gradient, (d,), (v,), has_aux=True)  # type: ignore[misc]
            else:
                g, pull_back, value = vjp(gradient, d, has_aux=True)  # type: ignore[misc]
                (hv,) = pull_back(v)
            return value, g, hv

        forward_mode = True
        arguments = (row, rows, (d, v, offsets), step, batch_size, offsets is not None)
        try:
            losses, g, hv = self._over_rows(*arguments, diagnose=False, second_order=True)
        except torch.cuda.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError):
            forward_mode = False  # the Hessian is symmetric, so the transposed product is the product
            losses, g, hv = self._over_rows(*arguments, second_order=True)
        self._count(rows, offsets)
        self.cost.hessian_products += rows
        return losses, g, hv

    def unrolled_gradient(self, solver: LinearSolver, *, truncate: int | None) -> tuple[Params, Solution]:
        """d f(φ_K(h)) / dh for all meta-parameters h through the last `truncate` steps of the solver, and the solution φ_K.

        Displacements before those steps count as constants, so that `truncate=0` is FO-MAML and `truncate=steps` is MAML.
        """
        unrolled = solver.steps if truncate is None else min(truncate, solver.steps)
        proximal = self.problem.proximal
        h = {n: p.detach() for n, p in self.problem.meta_parameters.items()}

        def row(start: Params, chosen: list[Tensor], buffers: Params, support: Batch, query: Batch) -> Any:
            def outer(h: Params) -> Any:
                force, mu = proximal.bind({n: h[n] for n in self._theta}, {n: h[n] for n in proximal.learned})
                d, memory = start, solver.memory(start)
                losses, residuals = [], []
                for step in range(solver.steps):
                    if step == solver.steps - unrolled:
                        d, memory = _detached(d), _detached(memory)
                    batch = map_tensors(lambda t, i=step: t[chosen[i]], support) if chosen else support

                    def inner(d: Params, batch: Batch = batch, step: int = step) -> tuple[Tensor, Tensor]:
                        value = self._loss(d, buffers, batch, step, "support", h)[0]
                        return value, value.detach()

                    g, loss = grad(inner, has_aux=True)(d)
                    g = {n: leaf + g[n] for n, leaf in force(d).items()}
                    d, memory = solver.update(d, g, memory, strong_convexity=mu, inplace=False)
                    losses.append(loss)
                    residuals.append(norm({n: leaf.detach().unsqueeze(0) for n, leaf in g.items()})[0])
                d = solver.result(d, memory)
                d = d if unrolled else _detached(d)
                value = self._loss(d, buffers, query, 0, "query", h)[0]
                return value, (torch.stack(losses).detach(), torch.stack(residuals), _detached(d))

            return grad(outer, has_aux=True)(h)

        chosen = self._minibatches(solver.steps, solver.batch_size)
        arguments = (self.zeros(self.tasks), chosen)
        g, (losses, residuals, d) = self._over_rows(row, self.tasks, arguments, 0, None, second_order=True)
        self.cost.support_gradients += self.tasks * solver.steps
        self.cost.query_gradients += self.tasks
        self.cost.hessian_products += self.tasks * unrolled
        residual = residuals[:, -1]
        steps = torch.full((self.tasks,), solver.steps, device=self.problem.device)
        return g, Solution(d, steps, residual, residual / self.problem.smallest_lam, losses.T, residuals.T)

    def hessian(self, d: Params) -> Tensor:
        """Dense Hessian of f̂(θ + d) of each task, `(tasks, n, n)`, some columns at a time."""
        size = sum(leaf[0].numel() for leaf in d.values())
        columns = []
        for first in range(0, size, _COLUMNS_AT_ONCE):
            count = min(_COLUMNS_AT_ONCE, size - first)
            basis = torch.zeros(count, size, dtype=next(iter(d.values())).dtype, device=self.problem.device)
            basis[:, first : first + count] = torch.eye(count)
            v = unflatten(basis.repeat_interleave(self.tasks, 0), d)
            repeated = {n: torch.cat([leaf] * count) for n, leaf in d.items()}
            columns.append(flatten(self.data_hvp(repeated, v, None, 0, None)[2]).unflatten(0, (count, self.tasks)))
        return torch.cat(columns).permute(1, 2, 0)

    def apart(self, row: int) -> Inner:
        """One task of the group."""
        return StackedInner(self.problem, self._stack[row : row + 1], self._nudges_at_once, self._draws, self.cost)

    def _chain_gradient(self, d: Params, parts: list[tuple[Batch, str, Tensor | None]], step: int) -> tuple[Tensor, Flat]:
        """Losses and gradient of a weighted sum of losses; rows do not mix, so the gradient of their sum has every row's."""
        phi, judge = self._moved(d), losses_of_rows(self.problem.objective)
        total: Tensor | None = None
        gradient: Tensor | None = None
        for batch, which, weight in parts:
            losses, pieces = [], []
            for rows, data, targets in self._portions(batch, which, _rows(d)):
                leaves = [leaf[rows].detach().requires_grad_() for leaf in phi.values()]
                value = self._chain_losses(dict(zip(phi, leaves, strict=True)), data, targets, step, which, judge)
                value = value if weight is None else value * weight[rows]
                g = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
                losses.append(value.detach())
                pieces.append(torch.cat([piece.flatten(1) for piece in g], dim=1))
            value = torch.cat(losses) if len(losses) > 1 else losses[0]
            matrix = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            total = value if total is None else total + value
            gradient = matrix if gradient is None else gradient.add_(matrix)
        assert total is not None
        assert gradient is not None
        return total, Flat(gradient.to(next(iter(d.values())).dtype), self._shapes)

    def _chain_losses(self, phi: Params, data: Data, targets: Tensor, step: int, which: str, judge: Callable[..., Any]) -> Any:
        """What `judge` makes of the outputs of some rows at φ."""
        chain = self._chain
        assert chain is not None

        def run() -> Any:
            self._draws.seed_for(step, which)
            return judge(chain.outputs(data, phi), targets)

        return self._explained(run)

    def _portions(self, batch: Batch, which: str, rows: int) -> Iterator[tuple[slice, Data, Tensor]]:
        """The rows that the chain takes at once, with their tasks' data and targets."""
        assert self._chain is not None
        inputs, targets = batch
        known = self._prepared.get(which)
        if known is None or known[0] is not inputs:
            known = self._prepared[which] = (inputs, self._explained(lambda: self._chain_data(inputs)))
        portions = known[1]
        limit = portions[0].rows_at_once
        if len(portions) == 1 and (limit is None or rows <= limit):
            yield slice(0, rows), portions[0], _repeated(targets, rows // self.tasks)
            return
        for first in range(0, rows, self.tasks):
            for data in portions:
                yield slice(first + data.tasks.start, first + data.tasks.stop), data, targets[data.tasks]

    def _chain_data(self, inputs: Tensor) -> list[Data]:
        assert self._chain is not None
        with torch.no_grad():
            return self._chain.prepare(inputs)

    def _moved(self, d: Params) -> Params:
        """φ = θ + d."""
        if isinstance(d, Flat):
            return d.like((self._flat_theta + d.matrix).to(self._flat_theta.dtype))
        return {n: (self._theta[n] + leaf).to(self._theta[n].dtype) for n, leaf in d.items()}

    def _loss(
        self, d: Params, buffers: Params, batch: Batch, step: int, which: str, theta: Params | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of one row at θ + d, with the shared parameters as they are unless d moves them too."""
        theta = self._theta | self._omega if theta is None else theta
        self._draws.seed_for(step, which)
        phi = {f"model.{n}": theta[n] for n in self._omega if n not in d}
        phi |= {f"model.{n}": (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}
        # Fresh copies: a module may write its buffers, and what it writes must not outlive this evaluation.
        kept = {n: b.clone() for n, b in buffers.items()} if self._buffers_written else buffers
        return functional_call(self.problem.objective, (phi, kept), (batch,))

    def _nudged(self, d: Params, nu: Tensor | None, buffers: Params, support: Batch, query: Batch, step: int) -> Tensor:
        value = self._loss(d, buffers, support, step, "support")[0]
        return value if nu is None else value + nu * self._loss(d, buffers, query, step, "query")[0]

    def _over_rows(
        self,
        function: Callable[..., Any],
        rows: int,
        arguments: Sequence[Any],
        step: int,
        batch_size: int | None,
        with_query: bool = True,
        *,
        diagnose: bool = True,
        second_order: bool = False,
    ) -> Any:
        """`vmap` a function of one row's arguments, buffers, support and query over all rows."""
        arguments = [dict(argument) if isinstance(argument, Flat) else argument for argument in arguments]  # vmap knows plain dicts only
        repeats = rows // self.tasks
        support = self._minibatch_of_support(step, batch_size)
        data = [_repeated(support, repeats), _repeated(self._stack.query, repeats) if with_query else None]
        buffers = self._buffers
        if self._buffers_written:
            buffers = {n: b.expand(rows, *b.shape) for n, b in buffers.items()}
        in_dims = (
            *(None if argument is None else 0 for argument in arguments),
            0 if self._buffers_written else None,
            *(map_tensors(lambda _: 0, _constants_apart(batch)) for batch in data),
        )

        def run() -> Any:
            # The fused attention kernels know no second derivatives and, on a CPU, no vmap.
            plain = second_order or self.problem.device.type == "cpu"
            with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
                return vmap(function, in_dims=in_dims, randomness="same")(*arguments, buffers, *data)

        return self._explained(run) if diagnose else run()

    def _explained(self, run: Callable[[], Any]) -> Any:
        """Run, and where it fails say which sub-module and what to do."""
        try:
            return run()
        except (torch.cuda.OutOfMemoryError, LossError):
            raise
        except (RuntimeError, NotImplementedError, IndexError, ValueError, AssertionError) as error:
            raise self._diagnosed(run, error) from error

    def _diagnosed(self, run: Callable[[], Any], error: Exception) -> Exception:
        """Tell a model that refuses its data from one that cannot be stacked: only the latter runs by itself."""
        task = self._stack.task(0)
        for which, batch in (("support", task.support), ("query", task.query)):
            try:
                with torch.no_grad():
                    buffers = {n: b.clone() for n, b in self._buffers.items()}
                    functional_call(self.problem.objective, buffers, (batch,))
            except LossError:
                raise
            except (RuntimeError, IndexError, ValueError, AssertionError) as alone:
                return model_refuses(self.problem, batch, which, alone)
        return error if isinstance(error, StackingError) else cannot_stack(self.problem, run, error)

    def _count(self, rows: int, offsets: Tensor | None) -> None:
        self.cost.support_gradients += rows
        self.cost.query_gradients += rows if offsets is not None else 0

    def _minibatches(self, steps: int, batch_size: int | None) -> list[Tensor]:
        """Indices of each step's minibatch, `(tasks, batch_size)` a step; empty when all examples are used."""
        size = num_examples(self._stack.support, axis=1)
        if batch_size is None or batch_size >= size:
            return []
        return [self._minibatch(step, size, batch_size) for step in range(steps)]

    def _minibatch(self, step: int, size: int, batch_size: int) -> Tensor:
        rows = [minibatch(self._draws.seed, place, step, size, batch_size) for place in self.places]
        return torch.stack(rows).to(self.problem.device)

    def _minibatch_of_support(self, step: int, batch_size: int | None) -> Batch:
        size = num_examples(self._stack.support, axis=1)
        if batch_size is None or batch_size >= size:
            return self._stack.support
        chosen = self._minibatch(step, size, batch_size)
        tasks = torch.arange(len(chosen), device=chosen.device)[:, None]
        return map_tensors(lambda t: t[tasks, chosen], self._stack.support)


class FusedOracle(NudgedOracle):
    """Nudged problems on a CUDA device that take a whole step of gradient descent in one kernel."""

    def descend(self, d: Params, lr: float, step: int = 0, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        """d ← d − lr ∇g(d), in place; data losses and ‖∇g‖ at the old d."""
        from metanudge.engines import fused

        loss, g = self.data_gradient(d, step, batch_size)
        proximal, pull = self.inner.problem.proximal, self._pull
        if isinstance(d, Flat) and isinstance(g, Flat) and isinstance(proximal, Diagonal) and isinstance(pull, Flat | None):
            assert proximal.common is not None
            matrix = None if pull is None else pull.matrix
            return loss, fused.step(d.matrix, g.matrix, proximal.common, matrix, self._pull_scale, lr)
        self.complete(g, d)
        for name, leaf in d.items():
            leaf.add_(g[name], alpha=-lr)
        return loss, norm(g)


def _fuses(problem: Problem) -> bool:
    on_cuda = problem.device.type == "cuda" and triton_works() and set(problem.theta_dtypes.values()) == {torch.float32}
    return on_cuda and isinstance(problem.proximal, Diagonal) and problem.proximal.common is not None


@cache
def _load_forward_mode() -> None:
    """Have torch load its forward-mode rules now: doing so warns of a deprecation within torch that users can do nothing about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _rows(d: Params) -> int:
    return next(iter(d.values())).shape[0]


def _detached(d: Params) -> Params:
    return {n: leaf.detach() for n, leaf in d.items()}


def runs_trunk(problem: Problem, batch: TaskBatch) -> bool:
    """Whether the model begins with convolution blocks that run as one operation on the data of all tasks."""
    chain = Chain.of(problem)
    sets = [data for stack in batch.stacks for data in (stack.support, stack.query)]
    return chain is not None and all(_is_pair(data) and chain.runs_trunk(data[0]) for data in sets)


def _is_pair(batch: Batch) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(leaf, Tensor) for leaf in batch)


def _constants_apart(batch: Batch) -> Batch:
    """The batch with everything that is no tensor replaced by None, which `vmap` leaves alone."""
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, batch)


def _repeated(batch: Batch, times: int) -> Batch:
    return batch if times == 1 else map_tensors(lambda t: t.repeat(times, *[1] * (t.ndim - 1)), batch)
