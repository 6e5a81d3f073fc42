"""ES-MAML: evolution strategies on the adapted query loss (Song et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.engines import Inner
from metanudge.engines.randomness import mix
from metanudge.estimators.base import Estimator, refuse_shared, refuse_stiffness, solve_plainly
from metanudge.estimators.total import MetaGradient
from metanudge.params import Params, per_row, tiled, wide
from metanudge.problem import TwoLevels
from metanudge.solvers.base import Solver, check_count, check_positive
from metanudge.spread import part_of


@dataclass(frozen=True)
class ESMAML(Estimator):
    """∇F_i ≈ 1/(2σn) Σ_s [F_i(θ + σε_s) − F_i(θ − σε_s)] ε_s with ε_s ~ N(0, I): antithetic
    Gaussian smoothing (paper, §3.4).

    Args:
        sigma: σ, size of the perturbations.
        samples: n; the error falls as n^-1/2 and grows with the square root of the number of
            parameters.
        seed: of the perturbations; each task of a batch gets its own, and other ones in every
            meta-step.

    Cost per task: 2n solves; no gradient of the query loss at all.
    """

    sigma: float = 0.01
    samples: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self.sigma, "sigma", "0.01 times the size of the parameters is usual.")
        check_count(self.samples, "samples", "20 to 1000 is usual.")

    @property
    def width(self) -> int:
        """One sample is solved at a time, its two signs together."""
        return 2

    def check_problem(self, problem: TwoLevels) -> None:
        """Only θ is perturbed, or what stands in its place in a bilevel problem."""
        refuse_stiffness(self, problem, "ES-MAML perturbs θ and nothing else")
        if problem.learns_theta:
            refuse_shared(self, problem, "ES-MAML perturbs θ and nothing else")

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the smoothed gradients of a group of tasks."""
        if inner.reports_solution:
            solve_plainly(inner, solver, total)
        else:
            total.record_start(inner)
        share = 1 / (2 * self.samples)
        for sample in range(self.samples):
            noise = self._noise(inner, total.seed, sample)
            for signs in inner.parts((1.0, -1.0)):
                shift = tiled(noise, [sign * self.sigma for sign in signs])
                solution = inner.solve(solver, offsets=[0.0] * len(signs), shift=shift)
                total.record(inner, solution, share=share * len(signs))
                measured = inner.measure_query(solution.displacement, shift)
                total.check(inner.places, "query loss", measured.loss)
                total.record_query(None, measured, tasks=inner.tasks, share=share * len(signs))
                by_sign = measured.loss.unflatten(0, (len(signs), -1))
                for sign, losses in zip(signs, by_sign, strict=True):
                    weighted = {n: leaf * per_row(losses, leaf) for n, leaf in noise.items()}
                    total.add(weighted, sign / (2 * self.sigma * self.samples))

    def _noise(self, inner: Inner, meta_step: int, sample: int) -> Params:
        """ε_s of every task, the same on every engine and for every chunk, from its own seed and
        that of the meta-step.
        """
        problem = inner.problem
        perturbed = problem.parameters if problem.learns_theta else problem.shared
        seeds = [
            mix(self.seed, *inner.stream(meta_step, row), sample, 3) for row in range(inner.tasks)
        ]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = {}
        for name, p in perturbed.items():
            rows = [torch.randn(p.shape, generator=g, dtype=torch.float64) for g in generators]
            here = [part_of(row.to(problem.device, wide(p.dtype)), p) for row in rows]
            noise[name] = torch.stack(here)
        return noise
