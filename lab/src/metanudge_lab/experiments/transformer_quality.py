"""How far every estimate is from the gradient of the K-step adaptation, on the Transformer's
weights of the moment.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.task import TaskBatch
from metanudge.testing.problems import vector
from metanudge.training.device import Precision, computing_in
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row
from metanudge_lab.experiments.transformer_runs import (
    AUTOMATIC,
    DIFFERENCE,
    METHODS,
    Config,
    course_of,
    make_trial,
)

COARSE: tuple[Precision, ...] = ("tf32", "bf16")
NAMES: dict[str, str] = {
    "fp32": "float32",
    "tf32": "TF32",
    "bf16": "bf16 autocast",
    "bf16-true": "bf16 parameters",
}


def qualities(step: int, trial: fewshot.Trial, inner: float, config: Config) -> list[Row]:
    """A row for every estimator in float32, and for MAML both ways in the coarser precisions.

    The exact gradient is that of autograd through all steps, in float64 on a copy of the model.
    """
    tasks = trial.source.batch(range(config.quality_tasks), "val")
    device = trial.source.device
    double = replace(trial, model=copy.deepcopy(trial.model).double())
    exact: Tensor | None = None
    with computing_in("fp32", device), suppress(mn.NonFiniteError):
        exact = vector(double.gradient(inner, mn.MAML(), tasks.to(torch.float64))[0])
    wanted: list[tuple[str, Precision]] = [(name, "fp32") for name in METHODS]
    wanted += [(name, precision) for precision in COARSE for name in (DIFFERENCE, m.MAML)]
    rows = []
    for name, precision in wanted:
        row: Row = {"kind": "quality", "method": name, "precision": precision, "iteration": step}
        if precision == "tf32" and device.type != "cuda":
            rows.append(row | {"run": False, **_BLANK})
            continue
        with computing_in(precision, device):
            rows.append(row | {"run": True, **_compared(exact, METHODS[name], tasks, trial, inner)})
    return rows


def bits(inner: float, rate: float, seed: int, config: Config, device: torch.device) -> list[Row]:
    """The default estimator in bfloat16, by autocast and with parameters in it, against itself in
    float32, along a training by differences up to the last point but one.
    """
    trial = make_trial(DIFFERENCE, config, seed=seed, device=device)
    tasks = trial.source.batch(range(config.quality_tasks), "val")
    rows, points = list[Row](), config.points[:-1]

    def look(step: int, learner: mn.MetaLearner) -> None:
        half = replace(trial, model=copy.deepcopy(trial.model).bfloat16())
        with computing_in("fp32", device):
            exact, _, nu = trial.gradient(inner, METHODS[AUTOMATIC], tasks)
        target = vector(exact).double()
        common = {"kind": "bits", "method": AUTOMATIC, "iteration": step, "nu_in_float32": nu}
        for precision, one in (("bf16", trial), ("bf16-true", half)):
            inside: Precision = "bf16" if precision == "bf16" else "fp32"
            with computing_in(inside, device):
                found = _compared(target, METHODS[AUTOMATIC], tasks, one, inner)
            rows.append({**common, "precision": precision, **found})

    course = course_of(inner, rate, config.iterations, config)
    trial.train(course, at=points, see=look, rows=rows, until=points[-1])
    return rows


_BLANK: Row = dict.fromkeys(("cosine", "error", "nu", "expected"))


def _compared(
    exact: Tensor | None, estimator: Estimator, tasks: TaskBatch, trial: fewshot.Trial, inner: float
) -> Row:
    """Cosine and relative error, the ν or ε that was used, and the error that the estimate expects
    of itself; NaN where it or the exact gradient is not finite.
    """
    try:
        gradient, stats, nu = trial.gradient(inner, estimator, tasks)
    except mn.NonFiniteError:
        exact = None
    if exact is None:
        return {**_BLANK, "cosine": math.nan, "error": math.nan}
    found = vector(gradient).double()
    return {
        "cosine": float(torch.cosine_similarity(found, exact, dim=0)),
        "error": float((found - exact).norm() / exact.norm()),
        "nu": nu,
        "expected": stats.error,
    }
