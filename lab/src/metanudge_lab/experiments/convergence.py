"""Theorems 1 and 2: meta-optimizers on objectives whose smoothness grows with the gradient, and how
far Proposition 3 reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import metanudge as mn
from metanudge import optim
from metanudge_lab.experiments import convergence_figures as figures
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    ResultTable,
    Row,
    Settings,
    Shown,
)
from metanudge_lab.experiments.convergence_rows import (
    EXPONENTIAL,
    FLOOR,
    GROWING,
    MEMORY,
    PROBLEMS,
    RIPPLED,
    SMOOTHNESS,
    STEEPNESS,
    count_of,
)
from metanudge_lab.experiments.convergence_verdict import compare, judge
from metanudge_lab.experiments.meta_objectives import MetaObjective, Regression, Rippled
from metanudge_lab.experiments.meta_optimizers import (
    CLIPPED,
    GD,
    MEMORIES,
    OPTIMIZERS,
    SNGDM,
    Best,
    best,
    fastest,
    lowest_end,
    tuned,
)
from metanudge_lab.experiments.smoothness import PATH, smoothness

WIDE = tuple(10 ** (2 * k / 3 - 7) for k in range(13))  # step sizes for starts of any steepness


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full ten minutes on a CPU.

    `rates` is the first grid of step sizes, the same for every optimizer and problem; `epsilon` the
    ‖∇F‖ to be reached; `floor_nus` the nudges whose bias is compared with the ‖∇F‖ that is reached;
    `radii` the distances of the starts whose steepness is compared.
    """

    steps: int = 300
    rates: tuple[float, ...] = tuple(10 ** (2 * k / 3 - 6) for k in range(12))
    epsilon: float = 0.01
    problems: tuple[str, ...] = PROBLEMS
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    radius: float = 6.0
    radii: tuple[float, ...] = (2.0, 3.0, 4.5, 6.0)
    lam: float = 2.0
    dim: int = 5
    tasks: int = 8
    seeds: int = 3
    floor_nus: tuple[float, ...] = (0.2, 0.1, 0.05, 0.02)
    floor_steps: int = 60

    @classmethod
    def quick(cls) -> Config:
        """A minute or so."""
        rates = tuple(10 ** (2 * k / 3 - 3) for k in range(7))
        return cls(
            steps=150, rates=rates, radii=(2.0, 9.0), seeds=1, floor_nus=(0.1, 0.03), floor_steps=25
        )


def cells(config: Config) -> list[Cell]:
    """One for each seed, problem, sampling of tasks and optimizer; for each problem's smoothness;
    for the memory of the optimizers where smoothness grows; for the steepness of the start; and one
    for the estimator's bias.
    """
    seeds, growing = range(config.seeds), [name for name in config.problems if name in GROWING]

    def every(
        seeds: Sequence[int], problems: Sequence[str], whats: Sequence[str], *sampled: bool
    ) -> list[Cell]:
        keys = itertools.product(seeds, problems, sampled, whats)
        return [
            {"problem": problem, "what": what, "sampled": one, "seed": seed}
            for seed, problem, one, what in keys
        ]

    return [
        *every(seeds, config.problems, config.optimizers, False, True),
        *every(seeds, config.problems, (SMOOTHNESS,), False),
        *every(seeds, growing, (MEMORY,), False),
        *every(seeds, (EXPONENTIAL,), (STEEPNESS,), True),
        *every((0,), (EXPONENTIAL,), (FLOOR,), False),
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Runs at every step size, and the curve of the best; or the smoothness along a path; or what
    shorter memories or other starts change; or the bias that is left at the end.
    """
    problem, what, seed = str(cell["problem"]), str(cell["what"]), int(cell["seed"] or 0)
    objective = build(problem, config, seed, device)
    if what == SMOOTHNESS:
        return smoothness(objective, steps=config.steps, epsilon=config.epsilon)
    if what == FLOOR:
        assert isinstance(objective, Regression)
        return _floors(objective, config)
    if what == MEMORY:
        return [
            {
                "kind": MEMORY,
                "optimizer": optimizer,
                "variant": variant,
                "reached": fastest(objective, make, **_grid(config)),
            }
            for optimizer, variants in MEMORIES.items()
            for variant, make in variants.items()
        ]
    if what == STEEPNESS:
        return _starts(config, seed, device)
    sampled = 1000 + seed if cell["sampled"] else None
    return tuned(objective, what, sampled=sampled, **_grid(config))


def _grid(config: Config) -> dict[str, Any]:
    return {"rates": config.rates, "steps": config.steps, "epsilon": config.epsilon}


def build(problem: str, config: Config, seed: int, device: torch.device) -> MetaObjective:
    """The problem of a name; the rippled one starts where its gradient is about as large."""
    options: dict[str, Any] = {
        "dim": config.dim,
        "tasks": config.tasks,
        "lam": config.lam,
        "device": device,
    }
    if problem == RIPPLED:
        return Rippled(seed, radius=10 * config.radius, **options)
    return Regression(problem, seed, radius=config.radius, **options)


def _starts(config: Config, seed: int, device: torch.device) -> list[Row]:
    """Where runs with one task a step end, from starts ever farther out."""
    rows: list[Row] = []
    for radius in config.radii:
        objective = build(EXPONENTIAL, replace(config, radius=radius), seed, device)
        ends = {
            name: lowest_end(
                objective, OPTIMIZERS[name], rates=WIDE, steps=config.steps, seed=1000 + seed
            )
            for name in (GD, CLIPPED, SNGDM)
        }
        start = float(objective.gradient(objective.start).norm())
        rows += [
            {"kind": STEEPNESS, "radius": radius, "start": start, "optimizer": name, "last": end}
            for name, end in ends.items()
        ]
    return rows


def _floors(objective: Regression, config: Config) -> list[Row]:
    """ClippedGD on FO-B-MAML's meta-gradients, from near the minimiser: ‖∇F‖ where they vanish, for
    forward and symmetric differences.
    """
    rows: list[Row] = []
    for stencil, nu in itertools.product(("forward", "symmetric"), config.floor_nus):
        setup = objective.setup(objective.minimiser() + 0.1)
        solver = mn.GradientDescent(lr=1 / (4 + config.lam), steps=30)
        learner = mn.MetaLearner(
            setup.model,
            setup.loss,
            lam=config.lam,
            solver=solver,
            estimator=mn.FOBMAML(nu=nu, stencil=stencil),  # type: ignore[arg-type]
        )
        optimizer = optim.ClippedGD(learner.parameters(), lr=1.0, max_norm=1.0)
        for _ in range(config.floor_steps):
            optimizer.zero_grad()
            learner.backward(setup.tasks, metrics=False)
            optimizer.step()
        (theta,) = (p.detach()[0] for p in learner.parameters())
        (estimate,) = learner.meta_gradient(setup.tasks, metrics=False)[0].values()
        exact = objective.gradient(theta)
        rows.append(
            {
                "kind": FLOOR,
                "stencil": stencil,
                "nu": nu,
                "norm": float(exact.norm()),
                "bias": float((estimate[0] - exact).norm()),
            }
        )
    return rows


def draw(result: Result[Config]) -> list[Drawing]:
    """Runs at the best step sizes; the smoothness along a path, with the fitted line and how the
    global form fails; the bias left.
    """
    kinds = {row["kind"] for row in result.rows()}
    pictures = (
        ("curve", figures.runs),
        (PATH, figures.growth),
        (STEEPNESS, figures.starts),
        (FLOOR, figures.floors),
    )
    return [picture(result) for kind, picture in pictures if kind in kinds] or [
        figures.floors(result)
    ]


def table(result: Result[Config]) -> ResultTable:
    """Steps to ε and the best step size with all tasks; ‖∇F‖ at the end with one task a step."""
    rows = []
    for problem in result.distinct("problem"):
        for optimizer in (name for name in OPTIMIZERS if name in result.distinct("what")):
            every, one = (
                best(result, problem, optimizer, sampled=sampled) for sampled in (False, True)
            )
            if every is not None or one is not None:
                steps = (
                    None if every is None else Shown(every.reached, count_of(every.reached, result))
                )
                end = None if one is None else Shown.short(one.last)
                rows.append((problem, optimizer, steps, _rate(every), end, _rate(one)))
    steps_to = (f"steps to ‖∇F‖ ≤ {result.config.epsilon:g}", "step size")
    end_of = ("‖∇F‖ at the end, one task a step", "step size for it")
    return ResultTable(("problem", "optimizer", *steps_to, *end_of), rows)


def _rate(found: Best | None) -> Shown | None:
    if found is None:
        return None
    return Shown.number(found.rate, ".2g", " (edge of the grid)" if found.edge else "")


EXPERIMENT = Experiment(
    name="convergence",
    title="Convergence of the meta-optimizers",
    where="Proposition 3, Theorems 1 and 2",
    claim=(
        "The meta-objective's smoothness grows with its gradient, ℒ(θ) = ℒ₀ + ℒ₁‖∇F(θ)‖, so"
        " normalized or clipped gradient methods suit it better than plain gradient descent; they"
        " reach ‖∇F‖ ≤ ε + b, b the estimator's bias, in O(ℒ₀Δ/ε² + ℒ₁²Δ/ℒ₀) steps."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    compare=compare,
    labels=("what",),
    notes=(
        "The paper has no experiment for this. Ours: tasks of linear regression whose inner problem"
        " is quadratic and whose outer loss grows exponentially, like r⁴, or (a control, the only"
        " one with the paper's Lipschitz outer loss) linearly; and a rippled inner loss under a"
        " quadratic outer one, which has what Proposition 3 assumes for its first part."
        " Meta-gradients are exact, in closed form, so that the optimizers alone differ; the step"
        " size of each comes from the same grid, then from a finer one around the best, and is"
        " constant or decays linearly to 0 within all, a third or a tenth of the steps; ClippedGD"
        " clips at 1 and NormalizedGD has smoothing 1 everywhere, SNGDM has momentum 0.9, Adam its"
        " usual ones; both average past gradients, of which the first are the largest by far, so"
        " shorter memories are measured beside them. With one task a step starts ever farther out,"
        " hence steeper, are compared as well. L₀ and L₁ are those of the lowest line above (‖∇F‖,"
        " ‖∇²F‖) along a clipped path: the local form of Zhang et al. (2020). The bias is that of"
        " FO-B-MAML's meta-gradients (loss nudge, several ν, exponential problem, ClippedGD)."
    ),
)
