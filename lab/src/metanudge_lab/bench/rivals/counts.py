"""What the two classics evaluate per task."""

from __future__ import annotations

from metanudge_lab.bench.contender import Work
from metanudge_lab.bench.workload import Workload


def maml(workload: Workload) -> Work:
    """K support gradients, one query gradient, and a Hessian product for each step on the way
    back.
    """
    return Work(workload.steps, 1, workload.steps)


def fomaml(workload: Workload) -> Work:
    """K support gradients and one query gradient."""
    return Work(workload.steps, 1)
