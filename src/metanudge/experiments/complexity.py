"""Table 1: what each method spends to reach a precision of the meta-gradient, and how that grows with precision and condition number."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import metanudge as mn
from metanudge.bench.memory import peak_memory, trainable_bytes
from metanudge.estimators import Estimator
from metanudge.experiments import quadratics as q
from metanudge.experiments import style
from metanudge.experiments.base import Cell, Drawing, Experiment, Result, Row, Shown, Table, Verdict
from metanudge.experiments.problems import Setup, classification_tasks, log_slope, relative_error, seeded
from metanudge.experiments.spread import Spread, sentence, short
from metanudge.solvers import Solver
from metanudge.tasks import Quadratic

MAML, IMAML, FO_MAML, REPTILE = "MAML", "iMAML", "FO-MAML", "Reptile"
FORWARD, SYMMETRIC, FIVE_POINT = (f"FO-B-MAML {kind}" for kind in ("forward", "symmetric", "five-point"))
GRADIENT, TANGENT = (f"FO-B-MAML {kind}" for kind in ("gradient nudge", "tangent"))
METHODS = (MAML, IMAML, FORWARD, SYMMETRIC, FIVE_POINT, GRADIENT, TANGENT, FO_MAML, REPTILE)
BIASED = (FO_MAML, REPTILE)
NUS = {FORWARD: 1e-6, SYMMETRIC: 1e-3, FIVE_POINT: 0.01, GRADIENT: 1e-3}  # the stencil's own error is then about 1e-6 or less
GD, NESTEROV = "gradient descent", "Nesterov"
PRECISION, MEMORY = "precision", "memory"


@dataclass(frozen=True)
class Config:
    """Sizes of the measurement.

    `conditions` are those of the support objective, c; with λ = 1/c the inner problem's is κ = (c + 1)/2. Steps grow by a third or a
    half at a time until the last precision is reached, up to `most_steps`.
    """

    precisions: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4)
    conditions: tuple[float, ...] = (10.0, 40.0, 160.0)
    methods: tuple[str, ...] = METHODS
    solvers: tuple[str, ...] = (GD, NESTEROV)
    most_steps: int = 4096
    dim: int = 20
    seeds: int = 3
    memory_steps: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    memory_examples: tuple[int, ...] = (50, 100, 200)

    @classmethod
    def quick(cls) -> Config:
        """A minute or two."""
        return cls(most_steps=1536, seeds=1, memory_steps=(2, 8, 32), memory_examples=(50, 200))

    @classmethod
    def full(cls) -> Config:
        """Half an hour on a CPU."""
        return cls()


def cells(config: Config) -> list[Cell]:
    """One for each seed, condition number, solver and method; one for each method's memory."""
    reaching: list[Cell] = [
        {"what": PRECISION, "method": method, "solver": solver, "condition": condition, "seed": seed}
        for seed in range(config.seeds)
        for condition in config.conditions
        for solver in config.solvers
        for method in config.methods
    ]
    return [*reaching, *({"what": MEMORY, "method": m, "solver": GD, "condition": None, "seed": 0} for m in config.methods)]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Errors and costs at ever more steps; or peak memory against steps and examples."""
    method = str(cell["method"])
    if cell["what"] == MEMORY:
        return _memory(method, config, device)
    condition = float(cell["condition"] or 1)
    problem = q.Problem(int(cell["seed"] or 0), dim=config.dim, tasks=1, lam=1 / condition, device=device, condition=condition)
    tolerances = config.precisions if method == IMAML else (None,)
    return [row for tolerance in tolerances for row in _until(problem, method, str(cell["solver"]), tolerance, config)]


def _until(problem: q.Problem, method: str, solver: str, tolerance: float | None, config: Config) -> list[Row]:
    """Ever more steps until the last precision is reached; for iMAML that of `tolerance`, with a linear system solved just well enough."""
    rows: list[Row] = []
    wanted = tolerance if tolerance is not None else min(config.precisions)
    for steps in lengths(config.most_steps):
        learner = problem.learner(estimator(method, tolerance, config.dim), steps)
        learner.engine = "inplace" if "inplace" in learner.estimator.engines else "stacked"
        learner.solver = make_solver(solver, problem, steps)
        begun = time.process_time()
        found, stats = learner.meta_gradient(problem.tasks, metrics=False)
        seconds = time.process_time() - begun
        (estimate,) = found.values()
        rows.append(
            {
                "tolerance": tolerance,
                "steps": steps,
                "error": relative_error(estimate, problem.exact),
                "delta": _delta(learner, problem),
                "gradients": stats.support_gradients + stats.query_gradients,
                "products": stats.hessian_products,
                "seconds": seconds,
            }
        )
        if rows[-1]["error"] <= wanted:
            break
    return rows


def lengths(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … up to a number.

    Example:
        >>> lengths(20)
        [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [2**k for k in range(most.bit_length())]
    return sorted(n for n in {*powers, *(3 * n for n in powers)} if n <= most)


def estimator(method: str, tolerance: float | None, dim: int) -> Estimator:
    """The method; iMAML's conjugate gradient stops at a quarter of the precision that is wanted."""
    if method == IMAML:
        return mn.IMAML(cg_steps=2 * dim, tol=0.25 * (tolerance or 1e-6))
    simple: dict[str, Estimator] = {MAML: mn.MAML(), FO_MAML: mn.FOMAML(), REPTILE: mn.Reptile(), TANGENT: mn.FOBMAML(stencil="tangent")}
    if method in simple:
        return simple[method]
    if method == GRADIENT:
        return mn.FOBMAML(nu=NUS[method], nudge="gradient")
    return mn.FOBMAML(nu=NUS[method], stencil=method.removeprefix("FO-B-MAML "))  # type: ignore[arg-type]


def make_solver(name: str, problem: q.Problem, steps: int) -> Solver:
    """Gradient descent at 1/(L̂ + λ), or Nesterov's with the momentum for the inner problem's condition number."""
    if name == GD:
        return mn.GradientDescent(lr=problem.rate, steps=steps)
    root = math.sqrt(kappa(1 / problem.lam))
    return mn.Nesterov(lr=problem.rate, steps=steps, momentum=(root - 1) / (root + 1))


def kappa(condition: float) -> float:
    """Of the inner problem, (1 + λ)/(1/c + λ) with λ = 1/c.

    Example:
        >>> kappa(9.0)
        5.0
    """
    return (condition + 1) / 2


def _delta(learner: mn.MetaLearner, problem: q.Problem) -> float:
    """‖φ_K − φ*‖ of the un-nudged solve."""
    task = next(iter(problem.tasks))
    adapted = next(learner.adapt(task.support).parameters())
    return float((adapted.detach() - Quadratic.solution(task, problem.theta, problem.lam)).norm())


def _memory(method: str, config: Config, device: torch.device) -> list[Row]:
    """Peak bytes of a meta-gradient of one task, in copies of θ, against steps, and against the number of examples."""
    rows: list[Row] = []
    fewest = min(config.memory_examples)
    for steps, examples in [*((steps, fewest) for steps in config.memory_steps), *((2, n) for n in config.memory_examples if n > fewest)]:
        model, loss, tasks = _perceptron(examples)
        learner = mn.MetaLearner(model.to(device), loss, lam=2.0, estimator=estimator(method, None, config.dim))
        learner.engine = "inplace" if "inplace" in learner.estimator.engines else "stacked"
        learner.solver = mn.GradientDescent(lr=0.1, steps=steps)
        tasks = tasks.to(device)
        learner.meta_gradient(tasks, metrics=False)
        peak = peak_memory(lambda learner=learner, tasks=tasks: learner.meta_gradient(tasks, metrics=False), device)
        rows.append({"steps": steps, "examples": examples, "memory": peak / trainable_bytes(model)})
    return rows


def _perceptron(examples: int) -> Setup:
    """Its activations weigh more than its parameters."""
    model = seeded(0, lambda: nn.Sequential(nn.Linear(10, 20), *(layer for _ in range(3) for layer in (nn.Tanh(), nn.Linear(20, 20)))))
    return Setup(model, nn.functional.cross_entropy, classification_tasks((10,), 20, 1, examples, examples, 0))


@dataclass(frozen=True)
class Spent:
    """What a method spends to reach a precision, interpolated between the numbers of steps that were tried; infinite if it never does."""

    steps: float
    gradients: float
    products: float
    seconds: float


NEVER = Spent(math.inf, math.inf, math.inf, math.inf)


def spent(rows: Sequence[Row], precision: float) -> Spent:
    """Between the last number of steps after which the error is above the precision and the next; errors fall geometrically.

    Example:
        >>> rows = [{"steps": k, "error": 10.0**-k, "gradients": 2 * k, "products": 0, "seconds": 0.1 * k, "tolerance": None} for k in (1, 3)]
        >>> spent(rows, 1e-2)
        Spent(steps=2.0, gradients=4.0, products=0.0, seconds=0.2)
    """
    rows = [row for row in rows if row["tolerance"] in (None, precision)]
    above = [place for place, row in enumerate(rows) if not row["error"] <= precision]
    if not above:
        return _between(rows[0], rows[0], 0.0) if rows else NEVER
    if above[-1] + 1 == len(rows):
        return NEVER
    before, after = rows[above[-1]], rows[above[-1] + 1]
    share = math.log(before["error"] / precision) / math.log(before["error"] / after["error"])
    return _between(before, after, share)


def _between(before: Row, after: Row, share: float) -> Spent:
    keys = ("steps", "gradients", "products", "seconds")
    return Spent(*(float(f"{(1 - share) * before[key] + share * after[key]:.6g}") for key in keys))


def reach(result: Result[Config], method: str, solver: str, condition: float, precision: float) -> Spent | None:
    """The median over the seeds; None where nothing was measured."""
    found = []
    for seed in result.distinct("seed"):
        rows = result.rows(what=PRECISION, method=method, solver=solver, condition=condition, seed=seed)
        if rows:
            found.append(spent(rows, precision))
    if not found:
        return None
    return Spent(*(Spread.of([getattr(one, key) for one in found]).median for key in ("steps", "gradients", "products", "seconds")))


@dataclass(frozen=True)
class Exponents:
    """Fitted powers of a method's steps, error and memory.

    Attributes:
        kappa: of the steps in κ, at the last precision.
        log_precision: of the steps in log(1/ε), at the largest κ.
        delta: of the error in δ; 0 for an error that stays.
        memory: of the peak memory in the number of steps.
    """

    kappa: float
    log_precision: float
    delta: float


def exponents(result: Result[Config], method: str, solver: str) -> Exponents:
    """NaN where a precision is never reached, or too little was measured."""
    config = result.config
    conditions, precisions = config.conditions, config.precisions
    by_kappa = [reach(result, method, solver, c, min(precisions)) for c in conditions]
    by_precision = [reach(result, method, solver, max(conditions), e) for e in precisions]
    slopes = []
    for seed in result.distinct("seed"):
        rows = result.rows(what=PRECISION, method=method, solver=solver, condition=max(conditions), seed=seed)
        rows = [row for row in rows if row["tolerance"] in (None, min(precisions)) and 1e-9 < row["delta"] < 0.1 * rows[0]["delta"]]
        slopes += [_slope([row["delta"] for row in rows], [row["error"] for row in rows])]
    finite = [slope for slope in slopes if math.isfinite(slope)]
    return Exponents(
        kappa=_slope([kappa(c) for c in conditions], [math.nan if one is None else one.steps for one in by_kappa]),
        log_precision=_slope([math.log(1 / e) for e in precisions], [math.nan if one is None else one.steps for one in by_precision]),
        delta=Spread.of(finite).median if finite else math.nan,
    )


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    return log_slope(x, y) if len(x) > 1 and all(math.isfinite(value) and value > 0 for value in y) else math.nan
