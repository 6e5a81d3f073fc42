"""Tasks side by side with native kernels: models that are chains of common layers (see `chain`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metanudge.accel.chain import Chain
from metanudge.accel.layers import NoChain, steps_of_problem
from metanudge.accel.oracle import FlatOracle
from metanudge.accel.passes import Part, Passes
from metanudge.accel.recordings import Recordings
from metanudge.engines.inner import Inner, Measured, Nudging
from metanudge.engines.stacked import Offer, Recorder
from metanudge.engines.vmapped import Members, StackedInner, explained
from metanudge.params import Params, norm, num_rows, per_row, wide
from metanudge.problem import Problem
from metanudge.proximal import Diagonal
from metanudge.solvers.base import LinearSolver, Solution, Solver, unroll
from metanudge.task import Batch, Stack


class ChainGroup(StackedInner):
    """Tasks of equal shape side by side, for a model that is a chain.

    Args:
        chain: the model.
        paths: what it does, for people: where first derivatives are enough, and where they are not.
    """

    def __init__(self, chain: Chain, paths: tuple[str, str], members: Members) -> None:
        super().__init__(members)
        self._chain = chain
        self._paths = paths
        self.path = paths[0]
        self._first: dict[tuple[str, int | None], tuple[Tensor, Tensor]] = {}

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self._chain, self.problem, self._stack, self._draws)

    def zeros(self, rows: int) -> Params:
        """Zero displacements, in one matrix."""
        theta = self._passes.theta
        shape, dtype = (rows, theta.matrix.numel()), wide(theta.matrix.dtype)
        return theta.like(torch.zeros(shape, dtype=dtype, device=self.problem.device))

    def oracle(self, **how: Unpack[Nudging]) -> FlatOracle:
        """Oracles that work on whole matrices."""
        if (force := how.get("force")) is not None:
            how["force"] = self._passes.theta.holding(force)
        return FlatOracle(self, self._gradient_at_theta, **how)

    def solve(
        self, solver: Solver, *, start: Params | None = None, **how: Unpack[Nudging]
    ) -> Solution:
        """Solve from displacements in one matrix."""
        start = None if start is None else self._passes.theta.holding(start)
        return super().solve(solver, start=start, **how)

    def apart(self, row: int) -> Inner:
        """One task of the group."""
        return ChainGroup(self._chain, self._paths, self._members.alone(row))

    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """Losses and gradient of f̂ + ν f for all rows."""
        self.count(num_rows(d), offsets)
        return self._passes.gradient(d, self._parts(offsets, step, batch_size), step)

    def _gradient_at_theta(
        self, rows: int, offsets: Tensor | None, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """At θ all nudges of a task are alike: one evaluation a task serves them all, in this solve
        and in later ones.
        """
        self.count(rows, offsets)

        def copies(which: str, size: int | None) -> Iterator[Tensor]:
            for known in self._at_theta(which, size):
                yield known.repeat(rows // self.tasks, *[1] * (known.ndim - 1))

        losses, g = copies("support", batch_size)
        if offsets is not None:
            query = copies("query", None)
            losses, g = (
                torch.addcmul(a, b, per_row(offsets, b))
                for a, b in zip((losses, g), query, strict=True)
            )
        return losses, self._passes.theta.like(g)

    def _at_theta(self, which: str, batch_size: int | None) -> tuple[Tensor, Tensor]:
        """Losses and gradients of the tasks at θ in the first inner step."""
        if (which, batch_size) not in self._first:
            part = self._support(0, batch_size) if which == "support" else self._query
            losses, g = self._passes.gradient(self.zeros(self.tasks), [part], 0)
            self._first[which, batch_size] = losses, g.matrix
        return self._first[which, batch_size]

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∇f(θ + d) for all rows."""
        if shared and self._omega:
            return super().query_gradient(d, step, shared=True)
        self.cost.query_gradients += num_rows(d)
        return self._passes.gradient(d, [self._query], step)[1]

    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """Losses, gradient and Hessian-vector product, backwards twice: the Hessian is
        symmetric.
        """
        phi, parts = self._passes.moved(d), self._parts(offsets, step, batch_size)

        def run() -> tuple[Tensor, Params, Params]:
            leaves = {n: leaf.detach().requires_grad_() for n, leaf in phi.items()}
            losses = torch.stack([self._smooth(leaves, part, step) for part in parts]).sum(0)
            g = torch.autograd.grad(
                losses.sum(), list(leaves.values()), create_graph=True, materialize_grads=True
            )
            bent = [
                (leaf, v[n].to(leaf.dtype))
                for n, leaf in zip(leaves, g, strict=True)
                if leaf.requires_grad
            ]
            hv: Sequence[Tensor]
            if bent:
                outputs, along = zip(*bent, strict=True)
                hv = torch.autograd.grad(
                    outputs, list(leaves.values()), along, materialize_grads=True
                )
            else:
                hv = [torch.zeros_like(leaf) for leaf in g]
            first, second = (
                {n: x.detach().to(d[n].dtype) for n, x in zip(leaves, xs, strict=True)}
                for xs in (g, hv)
            )
            return losses.detach(), first, second

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels know no second derivatives
            losses, g, hv = explained(self.problem, self._stack, run)
        self.count(num_rows(d), offsets, products=1)
        return losses, g, hv

    def unrolled_gradient(self, solver: LinearSolver, *, unrolled: int) -> tuple[Params, Solution]:
        """MAML's gradient of every row, layer by layer, where nothing but θ is learned."""
        proximal = self.problem.proximal
        if self._omega or proximal.learned or not isinstance(proximal, Diagonal):
            return super().unrolled_gradient(solver, unrolled=unrolled)
        force, mu = proximal.bind(self.theta, {})

        def run() -> tuple[Params, Params, list[Tensor], list[Tensor]]:
            theta = {
                n: leaf.detach().repeat(self.tasks, *[1] * leaf.ndim).requires_grad_()
                for n, leaf in self.theta.items()
            }

            def moved(d: Params) -> Params:
                return {n: (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}

            def data_gradient(d: Params, step: int) -> tuple[Tensor, Params]:
                part = self._support(step, solver.batch_size)
                if step < solver.steps - unrolled:
                    return self._passes.gradient(d, [part], step)
                phi = moved(d)
                loss = self._smooth(phi, part, step)
                g = torch.autograd.grad(
                    loss.sum(), list(phi.values()), create_graph=True, materialize_grads=True
                )
                return loss.detach(), {
                    n: leaf.to(d[n].dtype) for n, leaf in zip(phi, g, strict=True)
                }

            losses, residuals = [], []

            def gradient(d: Params, step: int) -> Params:
                loss, g = data_gradient(d, step)
                g = {n: leaf + g[n] for n, leaf in force(d).items()}
                losses.append(loss)
                residuals.append(norm({n: leaf.detach() for n, leaf in g.items()}))
                return g

            d = unroll(
                solver, dict(self.zeros(self.tasks)), gradient, strong_convexity=mu, last=unrolled
            )
            still = {n: leaf.detach() for n, leaf in d.items()}
            # its own second derivatives are not wanted
            along = self._passes.gradient(still, [self._query], 0)[1]
            ends = moved(d)
            found = torch.autograd.grad(
                [*ends.values()],
                [*theta.values()],
                [along[n].to(leaf.dtype) for n, leaf in ends.items()],
            )
            return dict(zip(theta, found, strict=True)), still, losses, residuals

        with sdpa_kernel(SDPBackend.MATH):
            g, d, losses, residuals = explained(self.problem, self._stack, run)
        return g, self._unrolled(d, losses, residuals, unrolled)

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d for all rows."""
        return self._passes.measure(self.shifted(d, shift))

    def _parts(self, offsets: Tensor | None, step: int, batch_size: int | None) -> list[Part]:
        """The data of f̂ + ν f."""
        support, (query, which, _) = self._support(step, batch_size), self._query
        return [support] if offsets is None else [support, (query, which, offsets)]

    def _support(self, step: int, batch_size: int | None) -> Part:
        return self._minibatch_of_support(step, batch_size), "support", None

    @property
    def _query(self) -> Part:
        return self._stack.query, "query", None

    def _smooth(self, phi: Params, part: Part, step: int) -> Tensor:
        """Weighted losses of all rows that can be differentiated twice."""
        self.path = self._paths[1]
        return self._passes.smooth(phi, part, step)


class Chains:
    """Takes the gradients of chains of layers on pairs of tensors."""

    def offer(self, problem: Problem, stack: Stack) -> Offer | str:
        """What a chain makes of these tasks, or why the model is none."""
        sets = (stack.support, stack.query)
        if not all(map(_is_pair, sets)):
            return "no native layers: the data are no pairs of tensors"
        try:
            steps = steps_of_problem(problem)
        except NoChain as reason:
            return f"no native layers: {reason}"
        chain = Chain(problem, steps)
        blocks = [chain.why_no_blocks(inputs) for inputs, _ in sets]
        why = next((reason for reason in blocks if reason is not None), None)
        loss = "" if chain.has_cross_entropy else ", the loss by torch.func (no F.cross_entropy)"
        path = "fused blocks" if why is None else f"native layers (no fused blocks: {why})"
        paths = path + loss, "native layers, twice differentiable" + loss
        return Offer(partial(ChainGroup, chain, paths), *paths, fused=why is None)

    def recorder(self) -> Recorder:
        """CUDA graphs."""
        return Recordings()


def _is_pair(batch: Batch) -> bool:
    return (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and all(isinstance(leaf, Tensor) for leaf in batch)
    )
