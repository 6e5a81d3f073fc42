"""The contract of an estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod

from metanudge.engines import Inner
from metanudge.estimators.total import MetaGradient
from metanudge.names import some
from metanudge.problem import TwoLevels
from metanudge.solvers.base import Solution, Solver


class Estimator(ABC):
    """How to differentiate: turns solves of the inner problem into a meta-gradient, for models with
    tasks and any bilevel problem alike.

    Attributes:
        repeats_itself: whether every call launches the same kernels and never waits for the device.
        needs_stiffness: whether λ must be positive: without it the inner problem need not have one
            solution, but K steps have an end all the same.
        learns_rates: whether it has a gradient for learned inner rates.
    """

    repeats_itself = False
    needs_stiffness = True
    learns_rates = False

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines it runs on."""
        return ("stacked", "inplace")

    @property
    def width(self) -> int:
        """How many inner problems of one task it solves side by side where the engine can."""
        return 1

    @property
    def automatic(self) -> bool:
        """Whether it leaves the choice of ν, or ε, to a tuner."""
        return False

    def graphs(self, solver: Solver) -> int:
        """How many support gradients it holds with the graphs that made them: none where first
        derivatives are enough.
        """
        return 0

    def second_order(self, solver: Solver) -> bool:
        """Whether it needs second derivatives."""
        return self.graphs(solver) > 0

    def on(self, problem: TwoLevels) -> Estimator:
        """What takes its place once something is known of the problem; usually itself."""
        return self

    def check(self, solver: Solver) -> None:  # noqa: B027 (most work with any)
        """Raise where the estimator cannot work with this solver."""

    def check_problem(self, problem: TwoLevels) -> None:  # noqa: B027 (most work with any)
        """Raise where the estimator cannot learn what this problem wants learned (a stiffness,
        shared layers), or not with its term.
        """

    @abstractmethod
    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the meta-gradient of a group of tasks to `total`, divided by the number of tasks of
        the whole batch.
        """


def refuse_stiffness(estimator: Estimator, problem: TwoLevels, why: str) -> None:
    """Raise where λ is to be learned."""
    if problem.proximal.learned:
        raise ValueError(
            f"{type(estimator).__name__} has no gradient for the stiffness λ (learn_lam): {why}."
            " Use FOBMAML, MAML, IMAML or Exact, or leave learn_lam out."
        )


def refuse_shared(estimator: Estimator, problem: TwoLevels, why: str) -> None:
    """Raise where some layers are shared."""
    if problem.shared:
        raise ValueError(
            f"{type(estimator).__name__} has no gradient for parameters that do not adapt"
            f" ({some(list(problem.shared), 3)}): {why}. Use FOBMAML, MAML, IMAML, FOMAML or Exact,"
            " leave adapt out, or freeze them with requires_grad_(False)."
        )


def solve_plainly(inner: Inner, solver: Solver, total: MetaGradient) -> Solution:
    """Solve the un-nudged problem of every task and note what it did to the query loss."""
    total.record_start(inner)
    solution = inner.solve(solver)
    total.record_solution(inner, solution)
    return solution
