"""Nudged problems whose displacements and gradients lie in one matrix each: a step is a few
operations, on a CUDA device one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Unpack

import torch
from torch import Tensor

from metanudge.accel.flat import Flat
from metanudge.accel.toolchain import triton_works
from metanudge.engines.inner import Inner, NudgedOracle, Nudging
from metanudge.params import Params, norm, wide
from metanudge.problem import TwoLevels
from metanudge.proximal import Diagonal

AtTheta = Callable[[int, Tensor | None, int | None], tuple[Tensor, Params]]
"""Number of rows, offsets and batch size → losses and gradient for the first step from θ itself."""


class FlatOracle(NudgedOracle):
    """The nudged problems of a group of tasks, in matrices.

    Args:
        at_theta: evaluates f̂ + ν f where all displacements are zero.
    """

    force: Flat | None

    def __init__(self, inner: Inner, at_theta: AtTheta, **how: Unpack[Nudging]) -> None:
        super().__init__(inner, **how)
        self._at_theta = at_theta
        self._start: Params | None = None  # the zeros handed out, until a gradient is asked for

    def zeros(self) -> Params:
        """The displacement of θ itself."""
        self._start = super().zeros()
        return self._start

    def data_gradient(self, d: Params, step: int, batch_size: int | None) -> tuple[Tensor, Params]:
        """Losses and gradient of what the data say."""
        at_theta = d is self._start and step == 0 and self.shift is None
        self._start = None
        if at_theta:
            return self._at_theta(self.rows, self.nu, batch_size)
        return super().data_gradient(d, step, batch_size)

    def complete(self, g: Params, d: Params) -> None:
        """Add proximal term and linear nudge to the data's gradient, in place."""
        proximal = self.inner.problem.proximal
        assert isinstance(g, Flat)
        if isinstance(d, Flat) and isinstance(proximal, Diagonal) and proximal.common is not None:
            g.matrix.addcmul_(d.matrix, proximal.common)
        else:
            proximal.add_force(g, d, self.theta)
        if self.pull is not None:
            g.matrix.add_(self.pull.matrix, alpha=self.pull_scale)

    def descend(
        self, d: Params, lr: float, step: int = 0, batch_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """d ← d − lr ∇g(d), in place; data losses and ‖∇g‖ at the old d."""
        loss, g = self.data_gradient(d, step, batch_size)
        assert isinstance(d, Flat)
        assert isinstance(g, Flat)
        lam = _lam_of_kernel(self.inner.problem) if self.shift is None else None
        if lam is not None:
            from metanudge.accel.step import step as descend

            pull = None if self.pull is None else self.pull.matrix
            return loss, descend(d.matrix, g.matrix, lam, pull, self.pull_scale, lr)
        self.complete(g, d)
        d.matrix.add_(g.matrix, alpha=-lr)
        return loss, norm(g)

    @cached_property
    def pull(self) -> Flat | None:
        """The force of a linear nudge on all rows, to be multiplied by `pull_scale`."""
        if self.nudge != "gradient":
            return None
        assert self.force is not None
        if len(self.offsets) == 1:
            return self.force
        return self.force.like(torch.cat([self.force.matrix * nu for nu in self.offsets]))


def _lam_of_kernel(problem: TwoLevels) -> Tensor | None:
    """λ, where one kernel takes a whole step."""
    proximal = problem.proximal
    on_cuda = problem.device.type == "cuda" and triton_works()
    if not on_cuda or {wide(p.dtype) for p in problem.parameters.values()} != {torch.float32}:
        return None
    return proximal.common if isinstance(proximal, Diagonal) else None
