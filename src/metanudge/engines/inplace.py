"""The in-place engine: the user's own module, parameters overwritten, plain `loss.backward()`.

Whatever trains with `loss.backward()` runs here: cuDNN recurrent nets, flash attention, compiled
modules, checkpointing. Tasks and nudges are solved one after the other, so the memory is that of
one training step, whatever their number and the number of steps, plus copies of the trainable
parameters: θ, the displacement d and the accumulating meta-gradient (and the un-nudged solution
where solves start there). Gradient descent takes gradients up as autograd makes them (`Descent`);
with a tolerance, and with other solvers, a step holds a whole gradient, for the loss nudge one that
adds up two. The gradient nudge keeps ∇f(φ_0) besides; where gradient descent takes gradients up, it
keeps it in the place of d, of which only what φ − θ lacks is held (`remainder`).

Afterwards, also when the loss raises in the middle of a solve, parameters, buffers, `.grad` and the
global random state are as they were. Hooks registered on parameters see the inner gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metanudge.engines.descent import Descent, Forces, Listener, row, take_gradient
from metanudge.engines.diagnosis import model_refuses
from metanudge.engines.inner import Cost, Inner, Measured, NudgedOracle, Nudging
from metanudge.engines.once import refuse_once_differentiable
from metanudge.engines.packed import PackedParams, pack, place, zeros
from metanudge.engines.randomness import Draws, minibatch
from metanudge.engines.ranks import check_solver, refuse_products
from metanudge.engines.undisturbed import Guard, claimed, restored, uninterrupted
from metanudge.objective import LossError, check_seen, metrics_of_rows
from metanudge.params import Params, names_to_pack
from metanudge.problem import Problem
from metanudge.proximal import Diagonal
from metanudge.solvers.base import Solution, Solver
from metanudge.spread import agreed
from metanudge.task import Batch, Task, TaskBatch, map_tensors

Result = TypeVar("Result")
_LARGE = 2**22  # entries, from which on a tensor's own traffic counts more than a kernel's launch


@dataclass(frozen=True)
class InplaceEngine:
    """Solves one task and one nudge at a time on the user's own module."""

    name = "inplace"

    @contextmanager
    def session(
        self,
        problem: Problem,
        batch: TaskBatch,
        *,
        width: int,
        seed: int,
        cost: Cost,
        first: int = 0,
    ) -> Iterator[Iterator[Inner]]:
        """The tasks of a batch as groups of one; the module is restored when the session ends."""
        if problem.spread is not None:
            problem.spread.check(batch.tensors, seed)
        with uninterrupted(), claimed(problem):
            problem.proximal.refresh()
            draws, guard = Draws(seed, problem.device, problem.modules), Guard(problem)
            listener = Listener(problem.parameters)
            with draws.preserved(), restored(guard.restore), restored(listener.close):
                guard.clear()
                yield (
                    InplaceInner(problem, place, task, guard, listener, draws, cost)
                    for place, task in enumerate(batch, first)
                )

    def path(self, problem: Problem, batch: TaskBatch, *, second_order: bool) -> str:
        """There is one way only."""
        return ""


class InplaceInner(Inner):
    """One task on the user's module."""

    problem: Problem
    unrolls = False

    def __init__(
        self,
        problem: Problem,
        place: int,
        task: Task,
        guard: Guard,
        listener: Listener,
        draws: Draws,
        cost: Cost,
    ) -> None:
        super().__init__(problem, [place], cost)
        self._task = task
        self._guard = guard
        self._listener = listener
        self._draws = draws
        self.theta = guard.theta
        if problem.spread is not None:
            self.path = f"parameters spread over {problem.spread.ranks} ranks"

    def solve(self, solver: Solver, **how: Any) -> Solution:
        """Of parameters that are spread over ranks, not by what looks at whole tensors."""
        if self.problem.spread is not None:
            check_solver(solver)
        return super().solve(solver, **how)

    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """Losses and gradient of f̂ + ν f by one `backward()` each, so that their activations never
        live together.
        """
        self._write(d)
        return self._pass(offsets, step, batch_size), self._collect()

    def oracle(self, **how: Unpack[Nudging]) -> NudgedOracle:
        """Without a shift of θ, oracles that descend without a whole gradient; the proximal term
        must act parameter by parameter.
        """
        shifted = how.get("shift") is not None
        if shifted or not isinstance(self.problem.proximal, Diagonal):
            return super().oracle(**how)
        return InplaceOracle(self, **how)

    def descend(
        self,
        d: Params,
        offsets: Tensor | None,
        lr: float,
        step: int,
        batch_size: int | None,
        forces: Forces,
    ) -> tuple[Tensor, Tensor]:
        """One step of gradient descent; losses and norm of the gradient at the old d."""
        self._write(d)
        parts, waiting = 1 if offsets is None else 2, self._listener.waiting
        descent = Descent(self.problem.parameters, self.theta, d, lr, forces, parts=parts)
        if forces.pull is not None:  # a fourth copy, which d makes room for
            descent.pack(n for n in self._listener.names if self._guard.holds_still(n))
        with self._listener.handing_to(descent.take):
            total = self._pass(offsets, step, batch_size, partial(descent.gather, waiting))
        return total, descent.finish()

    def _pass(
        self,
        offsets: Tensor | None,
        step: int,
        batch_size: int | None,
        after_each: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Backward passes of f̂ and, with offsets, of ν f; losses of f̂ + ν f."""
        total = self._backward(self._support(step, batch_size), step, "support", None)
        after_each()
        if offsets is not None:
            total = total + self._backward(self._task.query, step, "query", offsets[0])
            after_each()
        self.count(1, offsets)
        return total.reshape(1)

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∇f(θ + d)."""
        self._write(d)
        with self._guard.sharing() if shared else nullcontext():
            self._backward(self._task.query, step, "query", None)
        self.cost.query_gradients += 1
        return self._collect() | (self._collect(self.problem.shared) if shared else {})

    def shared_gradient(
        self, d: Params, offsets: Tensor | None, weights: Sequence[float]
    ) -> Params:
        """The weighted gradient of f̂ + ν f by the shared parameters alone."""
        self._write(d)
        with self._guard.sharing(adapting=False):
            self._pass(offsets, 0, None)
        return {n: leaf.mul_(weights[0]) for n, leaf in self._collect(self.problem.shared).items()}

    def support_gradient(self, d: Params, step: int, batch_size: int | None) -> Params:
        """By all that requires grad, in one backward pass."""
        with self._guard.sharing():
            g = self.data_gradient(d, None, step, batch_size)[1]
        return g | self._collect(self.problem.shared)

    def support_difference(
        self, d: Params, v: Params, epsilon: Tensor, step: int, batch_size: int | None
    ) -> Params:
        """Two backward passes into the same `.grad`, the second one with the other sign."""
        batch, shared = self._support(step, batch_size), self.problem.shared
        size = float(epsilon)  # waits for the device; but a number moves many tensors at once
        with self._guard.sharing():
            for sign in (1.0, -1.0):
                self._write(d, v, sign * size)
                scale = torch.tensor(sign, device=self.problem.device)
                self._backward(batch, step, "support", scale)
        self.count(2, None)
        return self._collect() | self._collect(shared)

    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """By all that requires grad, in one double backward."""
        with self._guard.sharing():
            hv = self.data_hvp(d, v, None, step, batch_size)[2]
        return hv | self._collect(self.problem.shared)

    def _bend(self, loss: Tensor, v: Params) -> list[Tensor]:
        """Leave the gradient of ⟨∇_φ loss, v⟩ in the module; returns ∇_φ loss."""
        parameters = self.problem.parameters
        refuse_once_differentiable(loss, parameters.values())
        g = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=True, materialize_grads=True
        )
        bent = [
            (leaf, v[n][0].to(leaf.dtype))
            for n, leaf in zip(parameters, g, strict=True)
            if leaf.requires_grad
        ]
        if bent:  # a loss that is linear in the parameters has no second derivative at all
            outputs, along = zip(*bent, strict=True)
            try:
                torch.autograd.backward(list(outputs), list(along))
            except BaseException:  # what it has left behind is part of no gradient
                for parameter in (*parameters.values(), *self.problem.shared.values()):
                    parameter.grad = None
                raise
        return [leaf.detach() for leaf in g]

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d."""
        if shift is not None:
            d = self.shifted(d, shift)
        outputs: list[Any] = []
        loss, accuracy, extra = self._evaluate(self._task.query, d, 0, "query", outputs)
        more = {name: value.reshape(1) for name, value in extra.items()}
        seen = map_tensors(lambda t: t.detach()[None], check_seen(self.problem.metrics, outputs))
        more |= metrics_of_rows(self.problem.metrics, seen, 1, extra)
        return Measured(loss.reshape(1), accuracy.reshape(1), more)

    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """f̂ + ν f without gradients."""
        total = self._evaluate(self._task.support, d, step, "support")[0]
        if offsets is not None:
            total = total + offsets[0] * self._evaluate(self._task.query, d, step, "query")[0]
        return total.reshape(1)

    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """Losses, gradient and Hessian-vector product by double backward."""
        refuse_products(self.problem)
        self._write(d)
        with sdpa_kernel(SDPBackend.MATH):  # fused ones have one derivative; checkpoints run below
            total = self._loss(self._support(step, batch_size), step, "support")
            if offsets is not None:
                total = total + offsets[0] * self._loss(self._task.query, step, "query")
            g = self._bend(total, v)
        self.count(1, offsets, products=1)
        self._guard.restore_buffers()
        first = {n: row(leaf) for n, leaf in zip(self.problem.parameters, g, strict=True)}
        return total.detach().reshape(1), first, self._collect()

    def _write(self, d: Params | None, along: Params | None = None, by: float = 0.0) -> None:
        """Put φ = θ + d into the module, or φ moved further along a direction."""
        theta = self.theta
        packed = d.packed if isinstance(d, PackedParams) else {}
        together: Params = {}  # one kernel for many; large ones are read and written once instead
        with torch.no_grad():
            for name in self.problem.parameters:
                phi = self._guard.phi(name)
                if d is None:
                    together[name] = phi
                elif name in packed and along is None:
                    place(packed[name], theta[name], phi)
                elif d[name].dtype != phi.dtype and along is not None:
                    phi.copy_((theta[name] + d[name][0]).add_(along[name][0], alpha=by))
                elif d[name].dtype != phi.dtype or phi.numel() >= _LARGE:
                    torch.add(theta[name], d[name][0], out=phi)
                    if along is not None:
                        phi.add_(along[name][0], alpha=by)
                else:
                    together[name] = phi
            if together:
                places = list(together.values())
                torch._foreach_copy_(places, [theta[n] for n in together])
                if d is not None:
                    torch._foreach_add_(places, [d[n][0] for n in together])
                if along is not None:
                    torch._foreach_add_(places, [along[n][0] for n in together], alpha=by)
        self._guard.wrote()
        if torch.is_autocast_enabled(self.problem.device.type):
            torch.clear_autocast_cache()  # it holds casts of the parameters' old values

    def _support(self, step: int, batch_size: int | None) -> Batch:
        size = self._task.num_support
        if batch_size is None or batch_size >= size:
            return self._task.support
        chosen = minibatch(self._draws.seed, self.places[0], step, size, batch_size).to(
            self.problem.device
        )
        return map_tensors(lambda t: t[chosen], self._task.support)

    def _run(
        self, function: Callable[[Batch], Result], batch: Batch, step: int, which: str
    ) -> Result:
        """Evaluate a function of the batch with the random numbers of this step."""
        try:
            with self._draws.seeded(step, which):
                return function(batch)
        except LossError:
            raise
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            raise model_refuses(self.problem, batch, which, error) from error

    def _loss(self, batch: Batch, step: int, which: str) -> Tensor:
        return self._run(self.problem.objective_of(which).loss_alone, batch, step, which)

    def _backward(self, batch: Batch, step: int, which: str, scale: Tensor | None) -> Tensor:
        loss = self._loss(batch, step, which)
        if loss.requires_grad:  # a loss that ignores the parameters contributes nothing
            loss.backward(None if scale is None else scale.to(loss.dtype))
        self._guard.restore_buffers()
        value = agreed(loss.detach())
        return value if scale is None else value * scale

    def _evaluate(
        self, batch: Batch, d: Params | None, step: int, which: str, outputs: Any = None
    ) -> tuple[Tensor, Tensor, Params]:
        self._write(d)
        objective = self.problem.objective_of(which)
        with torch.set_grad_enabled(self.problem.quantised):
            measured = self._run(partial(objective, outputs=outputs), batch, step, which)
        self._guard.restore_buffers()
        loss, accuracy, extra = measured
        numbers = {n: agreed(value) for n, value in extra.items()}
        return agreed(loss.detach()), agreed(accuracy), numbers

    def _collect(self, parameters: Mapping[str, Tensor] | None = None) -> Params:
        """Take the gradients (by the parameters that adapt, unless others are given) out of the
        module, with a row axis.
        """
        return {
            n: row(take_gradient(p))
            for n, p in (self.problem.parameters if parameters is None else parameters).items()
        }


class InplaceOracle(NudgedOracle):
    """A nudged problem of one task that descends while the gradient comes in."""

    inner: InplaceInner

    def begin(self, start: Params | None) -> Params:
        """With displacements of large 16-bit parameters in 24 bits."""
        parameters = self.inner.problem.parameters
        if not (names := names_to_pack(parameters)):
            return super().begin(start)
        return zeros(parameters, names, rows=True) if start is None else pack(start, names)

    def descend(
        self, d: Params, lr: float, step: int = 0, batch_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """d ← d − lr ∇g(d); data loss and ‖∇g‖ at the old d."""
        proximal = self.inner.problem.proximal
        assert isinstance(proximal, Diagonal)
        return self.inner.descend(
            d, self.nu, lr, step, batch_size, Forces.made(proximal, self.pull, self.pull_scale)
        )
