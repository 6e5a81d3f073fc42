"""The in-place engine: the user's own module, parameters overwritten, plain `loss.backward()`.

Whatever trains with `loss.backward()` runs here: cuDNN recurrent nets, flash attention, compiled modules, checkpointing. Tasks and
nudges are solved one after the other, so the memory is that of one training step (one that adds up two gradients, support and query,
for the loss nudge), whatever their number and the number of steps, plus copies of the trainable parameters: θ, the displacement d and
the accumulating meta-gradient (and ∇f(φ_0) for the gradient nudge, the un-nudged solution where solves start there).

Afterwards, also when the loss raises in the middle of a solve, parameters, buffers, `.grad` and the global random state are as
they were. Hooks registered on parameters see the inner gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metanudge.engines.diagnosis import model_refuses
from metanudge.engines.inner import Cost, Inner, Measured
from metanudge.engines.randomness import Draws, minibatch
from metanudge.params import Params
from metanudge.problem import LossError, Problem
from metanudge.task import Batch, Task, TaskBatch, map_tensors


class Guard:
    """What the engine disturbs in the user's module, and how to put it back."""

    def __init__(self, problem: Problem) -> None:
        self._parameters = problem.parameters
        self._gradients = [(p, p.grad) for p in problem.objective.parameters()]  # a loss may have parameters of its own
        self.theta = {n: p.detach().clone() for n, p in problem.parameters.items()}
        model = problem.objective.model
        self._buffers = [
            _Buffer(module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore_buffers(self) -> None:
        """Undo what a forward pass did to the buffers: BatchNorm's running statistics and the like."""
        for buffer in self._buffers:
            buffer.restore()

    def restore(self) -> None:
        """Put everything back."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self.theta[name])  # .data: the values are what they were, so graphs made before stay valid
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.restore_buffers()
        torch.clear_autocast_cache()


@dataclass
class _Buffer:
    module: nn.Module
    name: str
    tensor: Tensor | None
    value: Tensor | None

    def restore(self) -> None:
        if self.module._buffers[self.name] is not self.tensor:
            self.module._buffers[self.name] = self.tensor
        # Always: BatchNorm's kernels and writes through .data leave no trace in the version counter.
        if self.tensor is not None:
            assert self.value is not None
            self.tensor.data.copy_(self.value)


@dataclass(frozen=True)
class InplaceEngine:
    """Solves one task and one nudge at a time on the user's own module."""

    name = "inplace"

    @contextmanager
    def session(
        self, problem: Problem, batch: TaskBatch, *, width: int, seed: int, cost: Cost, first: int = 0
    ) -> Iterator[Iterator[Inner]]:
        """The tasks of a batch as groups of one; the module is restored when the session ends."""
        _refuse_synchronising_wrappers(problem.objective.model)
        draws = Draws(seed, problem.device)
        with draws.preserved():
            guard = Guard(problem)
            try:
                yield (InplaceInner(problem, place, task, guard, draws, cost) for place, task in enumerate(batch, first))
            finally:
                guard.restore()


class InplaceInner(Inner):
    """One task on the user's module."""

    def __init__(self, problem: Problem, place: int, task: Task, guard: Guard, draws: Draws, cost: Cost) -> None:
        super().__init__(problem, [place], cost)
        self._task = task
        self._guard = guard
        self._draws = draws

    @property
    def nudges_at_once(self) -> int:
        """One."""
        return 1

    def data_gradient(self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None) -> tuple[Tensor, Params]:
        """Losses and gradient of f̂ + ν f by one `backward()` each, so that their activations never live together."""
        self._write(d)
        total = self._backward(self._support(step, batch_size), step, "support", None)
        self.cost.support_gradients += 1
        if offsets is not None:
            total = total + self._backward(self._task.query, step, "query", offsets[0])
            self.cost.query_gradients += 1
        return total.reshape(1), self._collect()

    def query_gradient(self, d: Params, step: int = 0) -> Params:
        """∇f(θ + d)."""
        self._write(d)
        self._backward(self._task.query, step, "query", None)
        self.cost.query_gradients += 1
        return self._collect()

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d."""
        if shift is not None:
            d = shift if d is None else {n: leaf + shift[n] for n, leaf in d.items()}
        loss, accuracy = self._evaluate(self._task.query, d, 0, "query")
        return Measured(loss.reshape(1), accuracy.reshape(1))

    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """f̂ + ν f without gradients."""
        total = self._evaluate(self._task.support, d, step, "support")[0]
        if offsets is not None:
            total = total + offsets[0] * self._evaluate(self._task.query, d, step, "query")[0]
        return total.reshape(1)

    def data_hvp(self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None) -> tuple[Tensor, Params, Params]:
        """Losses, gradient and Hessian-vector product by double backward."""
        self._write(d)
        leaves = list(self.problem.parameters.values())
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivatives
            total = self._forward(self._support(step, batch_size), step, "support")[0]
            if offsets is not None:
                total = total + offsets[0] * self._forward(self._task.query, step, "query")[0]
        self.cost.support_gradients += 1
        self.cost.query_gradients += 0 if offsets is None else 1
        self.cost.hessian_products += 1
        g = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        directions = [v[n][0].to(p.dtype) for n, p in self.problem.parameters.items()]
        if any(leaf.requires_grad for leaf in g):
            hv = torch.autograd.grad(g, leaves, grad_outputs=directions, materialize_grads=True)
        else:  # a loss that is linear in the parameters has no second derivative at all
            hv = tuple(torch.zeros_like(p) for p in leaves)
        self._guard.restore_buffers()
        dtypes = self.problem.theta_dtypes
        return (
            total.detach().reshape(1),
            {n: leaf.detach().unsqueeze(0).to(dtypes[n]) for n, leaf in zip(dtypes, g, strict=True)},
            {n: leaf.unsqueeze(0).to(dtypes[n]) for n, leaf in zip(dtypes, hv, strict=True)},
        )

    def apart(self, row: int) -> Inner:
        """A group of one is apart already."""
        return self

    def adopt(self, d: Params) -> None:
        """Leave θ + d in the module for good: what `adapt` does on a copy of the user's module."""
        self._write(d)
        self._guard.theta = {n: p.detach().clone() for n, p in self.problem.parameters.items()}

    def _write(self, d: Params | None) -> None:
        """Put φ = θ + d into the module."""
        theta = self._guard.theta
        with torch.no_grad():
            for name, parameter in self.problem.parameters.items():
                if d is None:
                    parameter.data.copy_(theta[name])
                elif d[name].dtype == parameter.dtype:
                    torch.add(theta[name], d[name][0], out=parameter.data)
                else:
                    parameter.data.copy_(theta[name] + d[name][0])
        if torch.is_autocast_enabled(self.problem.device.type):
            torch.clear_autocast_cache()  # it holds casts of the parameters' old values

    def _support(self, step: int, batch_size: int | None) -> Batch:
        size = self._task.num_support
        if batch_size is None or batch_size >= size:
            return self._task.support
        chosen = minibatch(self._draws.seed, self.places[0], step, size, batch_size).to(self.problem.device)
        return map_tensors(lambda t: t[chosen], self._task.support)

    def _forward(self, batch: Batch, step: int, which: str) -> tuple[Tensor, Tensor]:
        self._draws.seed_for(step, which)
        try:
            loss, accuracy = self.problem.objective(batch)
        except LossError:
            raise
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            raise model_refuses(self.problem, batch, which, error) from error
        return loss, accuracy

    def _backward(self, batch: Batch, step: int, which: str, scale: Tensor | None) -> Tensor:
        loss, _ = self._forward(batch, step, which)
        loss = loss if scale is None else loss * scale
        if loss.requires_grad:  # a loss that ignores the parameters contributes nothing
            loss.backward()
        self._guard.restore_buffers()
        return loss.detach()

    def _evaluate(self, batch: Batch, d: Params | None, step: int, which: str) -> tuple[Tensor, Tensor]:
        self._write(d)
        with torch.no_grad():
            loss, accuracy = self._forward(batch, step, which)
        self._guard.restore_buffers()
        return loss, accuracy

    def _collect(self) -> Params:
        """Take the gradients out of the module, with a row axis, in the dtype of the displacements."""
        collected: Params = {}
        for (name, parameter), dtype in zip(self.problem.parameters.items(), self.problem.theta_dtypes.values(), strict=True):
            g = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = None
            collected[name] = g.detach().to(dtype).unsqueeze(0)
        return collected


def _refuse_synchronising_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"The model {'' if not name else repr(name) + ' '}is wrapped in DistributedDataParallel, which would average the "
                "gradients of the inner steps over the ranks. Wrap the learner instead: "
                "DistributedDataParallel(mn.MetaLearner(model, ...))."
            )
