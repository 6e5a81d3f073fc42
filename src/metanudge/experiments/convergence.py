"""Theorems 1 and 2: meta-optimizers on objectives whose smoothness grows with the gradient, and how far Proposition 3 reaches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import metanudge as mn
from metanudge import optim
from metanudge.experiments import style
from metanudge.experiments.base import Cell, Drawing, Experiment, Result, Row, Shown, Table, Verdict
from metanudge.experiments.meta_objectives import MetaObjective, Regression, Rippled
from metanudge.experiments.outer_loss import drawn
from metanudge.experiments.problems import log_slope
from metanudge.experiments.spread import Spread, short

EXPONENTIAL, QUARTIC, RIPPLED, LINEAR = "exponential", "quartic", "rippled", "linear"
TITLES = {
    EXPONENTIAL: "outer loss grows\nexponentially",
    QUARTIC: "outer loss grows\nlike r⁴",
    RIPPLED: "rippled inner loss\n(Proposition 3)",
    LINEAR: "outer loss grows\nlinearly (control)",
}
GROWING = (EXPONENTIAL, QUARTIC)
GD, CLIPPED, NORMALIZED, SNGDM, ADAM = "GD", "ClippedGD", "NormalizedGD", "SNGDM", "Adam"
OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    GD: lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    CLIPPED: lambda parameters, rate: optim.ClippedGD(parameters, lr=rate, max_norm=1.0),
    NORMALIZED: lambda parameters, rate: optim.NormalizedGD(parameters, lr=rate, smoothing=1.0),
    SNGDM: lambda parameters, rate: optim.SNGDM(parameters, lr=rate),
    ADAM: lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
}
BOUNDED = (CLIPPED, NORMALIZED, SNGDM)
LOOKS: dict[str, dict[str, Any]] = {
    GD: {"color": "#d1495b", "marker": "v"},
    CLIPPED: {"color": "#1f6fd6", "marker": "o"},
    NORMALIZED: {"color": "#0d9488", "marker": "D"},
    SNGDM: {"color": "#7c4dd6", "marker": "^"},
    ADAM: {"color": "#e07b00", "marker": "P"},
}
SCHEDULES = ("constant", "decaying")
PATH, PAIRS, PROOF, CONSTANTS, FLOOR = "path", "pairs", "proof", "constants", "floor"
FASTER = 2.0  # "superior": at most half of GD's steps


@dataclass(frozen=True)
class Config:
    """Sizes of the measurement.

    `rates` is the grid of step sizes, the same for every optimizer and problem; `epsilon` the ‖∇F‖ to be reached; `floor_nus` the nudges
    whose bias is compared with the ‖∇F‖ that is reached.
    """

    steps: int = 1000
    rates: tuple[float, ...] = tuple(10 ** (k / 4 - 5) for k in range(25))
    epsilon: float = 0.01
    problems: tuple[str, ...] = tuple(TITLES)
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    radius: float = 6.0
    lam: float = 2.0
    dim: int = 5
    tasks: int = 8
    seeds: int = 3
    floor_nus: tuple[float, ...] = (0.3, 0.2, 0.1, 0.05)
    floor_steps: int = 60

    @classmethod
    def quick(cls) -> Config:
        """A minute or so."""
        rates = tuple(10 ** (k / 2 - 4) for k in range(9))
        return cls(steps=200, rates=rates, seeds=1, floor_nus=(0.3, 0.1), floor_steps=25)

    @classmethod
    def full(cls) -> Config:
        """Half an hour on a CPU."""
        return cls()


def cells(config: Config) -> list[Cell]:
    """One for each seed, problem, sampling of tasks and optimizer; one for each problem's smoothness; one for the estimator's bias."""
    runs: list[Cell] = [
        {"problem": problem, "what": optimizer, "sampled": sampled, "seed": seed}
        for seed in range(config.seeds)
        for problem in config.problems
        for sampled in (False, True)
        for optimizer in config.optimizers
    ]
    smoothness: list[Cell] = [
        {"problem": problem, "what": "smoothness", "sampled": False, "seed": seed} for seed in range(config.seeds) for problem in config.problems
    ]
    return [*runs, *smoothness, {"problem": EXPONENTIAL, "what": FLOOR, "sampled": False, "seed": 0}]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Runs at every step size, and the curve of the best; or the smoothness along a path; or the bias that is left at the end."""
    problem, what, seed = str(cell["problem"]), str(cell["what"]), int(cell["seed"] or 0)
    objective = build(problem, config, seed, device)
    if what == "smoothness":
        return _smoothness(objective, config)
    if what == FLOOR:
        assert isinstance(objective, Regression)
        return _floors(objective, config)
    return _tuned(objective, what, config, sampled=bool(cell["sampled"]), seed=seed)


def build(problem: str, config: Config, seed: int, device: torch.device) -> MetaObjective:
    """The problem of a name; the rippled one starts where its gradient is about as large."""
    options: dict[str, Any] = {"dim": config.dim, "tasks": config.tasks, "lam": config.lam, "device": device}
    if problem == RIPPLED:
        return Rippled(seed, radius=10 * config.radius, **options)
    return Regression(problem, seed, radius=config.radius, **options)


def run(
    objective: MetaObjective, make: Callable[[list[Tensor], float], torch.optim.Optimizer], rate: float, *, steps: int, decaying: bool, seed: int | None
) -> list[float]:
    """‖∇F(θ)‖ before each step and at the end; with a seed each step sees one task drawn at random. Ends early where it overflows."""
    theta = objective.start.clone().requires_grad_()
    optimizer = make([theta], rate)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    norms: list[float] = []
    for step in range(steps + 1):
        gradients = objective.gradients(theta.detach())
        mean = gradients.mean(0)
        norms.append(float(mean.norm()))
        if step == steps or not norms[-1] < 1e12:
            break
        if decaying:
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        task = None if generator is None else int(torch.randint(objective.tasks, (), generator=generator))
        theta.grad = mean if task is None else gradients[task]
        optimizer.step()
    return norms


def _tuned(objective: MetaObjective, optimizer: str, config: Config, *, sampled: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    best: tuple[tuple[float, float], list[float]] | None = None
    for rate, schedule in itertools.product(config.rates, SCHEDULES):
        norms = run(
            objective, OPTIMIZERS[optimizer], rate, steps=config.steps, decaying=schedule == "decaying", seed=1000 + seed if sampled else None
        )
        reached, last = _reached(norms, config), _last(norms, config)
        rows.append({"kind": "run", "rate": rate, "schedule": schedule, "reached": reached, "last": last})
        score = (math.inf if reached is None or sampled else reached, last if math.isfinite(last) else math.inf)
        if best is None or score < best[0]:
            best = score, norms
    assert best is not None
    kept = [0, *drawn(config.steps)]
    return [*rows, *({"kind": "curve", "step": k, "norm": float(f"{best[1][k]:.5g}")} for k in kept if k < len(best[1]))]


def _reached(norms: Sequence[float], config: Config) -> int | None:
    """The first step at which ‖∇F‖ ≤ ε; None where that never happens."""
    return next((step for step, norm in enumerate(norms) if norm <= config.epsilon), None)


def _last(norms: Sequence[float], config: Config) -> float:
    """The mean ‖∇F‖ over the last tenth of the steps; NaN where a run overflowed."""
    if len(norms) <= config.steps:
        return math.nan
    tail = norms[-max(1, config.steps // 10) :]
    return math.fsum(tail) / len(tail)


def _smoothness(objective: MetaObjective, config: Config) -> list[Row]:
    """(‖∇F‖, ‖∇²F‖) along a clipped path; pairs of points far apart; the proof's own step with the constants found; Proposition 3's."""
    theta = objective.start.clone().requires_grad_()
    optimizer = optim.ClippedGD([theta], lr=0.1, max_norm=1.0)
    path = []
    for _ in range(config.steps):
        path.append(theta.detach().clone())
        theta.grad = objective.gradient(path[-1])
        optimizer.step()
    seen = [path[0], *(path[k] for k in drawn(config.steps - 1))]
    rows: list[Row] = []
    for point in seen:
        here = objective.all(point)
        rows.append({"kind": PATH, "norm": float(here.gradient.norm()), "curvature": _norm(here.hessian)})
    constants = envelope([(row["norm"], row["curvature"]) for row in rows])
    return [*rows, *_pairs(objective, constants), *_proof(objective, constants, config), *_stated(objective, seen)]


def envelope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line L₀ + L₁g that lies above all points (g, h), and of all such lines as little as possible: least Σ (L₀ + L₁g)/h.

    Example:
        >>> envelope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (1.0, 2.0)])
        (1.0, 2.0)
    """
    candidates = [(max(h for _, h in points), 0.0)]
    for (g, h), (other_g, other_h) in itertools.combinations(points, 2):
        if g != other_g:
            slope = (other_h - h) / (other_g - g)
            candidates.append((h - slope * g, slope))
    above = [(a, b) for a, b in candidates if b >= 0 and a > 0 and all(a + b * g >= h * (1 - 1e-9) for g, h in points)]
    return min(above, key=lambda line: sum((line[0] + line[1] * g) / h for g, h in points))


def _pairs(objective: MetaObjective, constants: tuple[float, float]) -> list[Row]:
    """‖∇F(θ') − ∇F(θ*)‖ over min(ℒ(θ*), ℒ(θ'))‖θ' − θ*‖, θ' ever farther from the minimiser: at most 1 if the global form held."""
    centre = objective.minimiser()
    away = (objective.start - centre) / (objective.start - centre).norm()
    farthest = float((objective.start - centre).norm())
    rows: list[Row] = []
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0):
        other = centre + share * farthest * away
        gradients = [objective.gradient(point) for point in (centre, other)]
        smoothness = min(constants[0] + constants[1] * float(g.norm()) for g in gradients)
        ratio = float((gradients[1] - gradients[0]).norm()) / (smoothness * share * farthest)
        rows.append({"kind": PAIRS, "distance": share * farthest, "ratio": ratio})
    return rows


def _proof(objective: MetaObjective, constants: tuple[float, float], config: Config) -> list[Row]:
    """The step g/(L₀ + L₁‖g‖) of the proof: steps to ε, its bound, and how often F fell by less than promised."""
    flat, steep = constants
    lowest = float(objective.values(objective.minimiser()).mean())
    theta = objective.start.clone().requires_grad_()
    # NormalizedGD's lr/(smoothing + ‖g‖) with lr = 1/L₁ and smoothing = L₀/L₁; for L₁ = 0 plain gradient descent.
    optimizer = optim.NormalizedGD([theta], lr=1 / steep, smoothing=flat / steep) if steep > 0 else torch.optim.SGD([theta], lr=1 / flat)
    start = float(objective.values(theta.detach()).mean()) - lowest
    bound = 4 * flat * start / config.epsilon**2 + 4 * steep**2 * start / flat
    broken, steps = 0, 0
    while steps < config.steps:
        here = theta.detach().clone()
        gradient = objective.gradient(here)
        norm = float(gradient.norm())
        if norm <= config.epsilon:
            break
        theta.grad = gradient
        optimizer.step()
        fell = float(objective.values(here).mean() - objective.values(theta.detach()).mean())
        broken += fell < norm**2 / (2 * (flat + steep * norm)) * (1 - 1e-9) - 1e-13
        steps += 1
    return [{"kind": PROOF, "flat": flat, "steep": steep, "steps": steps, "bound": bound, "broken": broken, "excess": start}]


def _stated(objective: MetaObjective, points: Sequence[Tensor]) -> list[Row]:
    """‖∇²F_i‖ over Proposition 3's ℒ, where its assumptions hold: with its constants, and with those that its proof gives."""
    if not isinstance(objective, Rippled):
        return []
    smooth, _, bend = objective.constants
    ratios: dict[str, float] = {"stated": 0.0, "proved": 0.0}
    for point in [*points, objective.minimiser()]:
        for gradient, hessian in zip(objective.gradients(point), objective.hessians(point), strict=True):
            shape = smooth + bend / objective.lam * float(gradient.norm())
            for name, factor in (("stated", 0.25), ("proved", 4.0)):
                ratios[name] = max(ratios[name], _norm(hessian) / (factor * shape))
    return [{"kind": CONSTANTS, **ratios}]


def _floors(objective: Regression, config: Config) -> list[Row]:
    """ClippedGD on FO-B-MAML's meta-gradients, from near the minimiser: ‖∇F‖ where they vanish, for forward and symmetric differences."""
    rows: list[Row] = []
    for stencil, nu in itertools.product(("forward", "symmetric"), config.floor_nus):
        setup = objective.setup(objective.minimiser() + 0.1)
        solver = mn.GradientDescent(lr=1 / (4 + config.lam), steps=30)
        learner = mn.MetaLearner(setup.model, setup.loss, lam=config.lam, solver=solver, estimator=mn.FOBMAML(nu=nu, stencil=stencil))  # type: ignore[arg-type]
        optimizer = optim.ClippedGD(learner.parameters(), lr=1.0, max_norm=1.0)
        for _ in range(config.floor_steps):
            optimizer.zero_grad()
            learner.backward(setup.tasks, metrics=False)
            optimizer.step()
        (theta,) = (p.detach()[0] for p in learner.parameters())
        (estimate,) = learner.meta_gradient(setup.tasks, metrics=False)[0].values()
        exact = objective.gradient(theta)
        rows.append({"kind": FLOOR, "stencil": stencil, "nu": nu, "norm": float(exact.norm()), "bias": float((estimate[0] - exact).norm())})
    return rows


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
