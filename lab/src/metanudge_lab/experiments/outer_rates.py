"""Theorems 1 and 2: how the number of meta-steps grows as ε falls, on an instance made to be hard
and on an easy one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metanudge.testing.problems import log_slope
from metanudge_lab import style
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    ResultTable,
    Row,
    Settings,
    Shown,
    Statement,
    Verdict,
)
from metanudge_lab.experiments.meta_optimizers import CLIPPED
from metanudge_lab.experiments.spread import Spread

SGD = "SGD"
HARD, EASY = "hard", "easy"
NEAR = 0.3  # of an exponent


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement; two minutes on a CPU.

    `excess` is Δ, `curvature` ℒ, `noise` σ̃ of the sampled task's gradient; `chains` run side by
    side, and their mean ‖∇F‖ counts.
    """

    epsilons: tuple[float, ...] = (0.2, 0.14, 0.1, 0.07, 0.05)
    methods: tuple[str, ...] = (SGD, CLIPPED)
    instances: tuple[str, ...] = (HARD, EASY)
    excess: float = 1.0
    curvature: float = 1.0
    noise: float = 1.0
    chains: int = 32
    rates: int = 20
    most_steps: int = 60000
    seeds: int = 3

    @classmethod
    def quick(cls) -> Config:
        """A few seconds."""
        return cls(epsilons=(0.4, 0.28, 0.2), most_steps=4000, seeds=1)


def cells(config: Config) -> list[Cell]:
    """One for each seed, instance, optimizer, and whether tasks are sampled."""
    keys = itertools.product(range(config.seeds), config.instances, (False, True), config.methods)
    return [
        {"instance": instance, "sampled": sampled, "method": method, "seed": seed}
        for seed, instance, sampled, method in keys
        if sampled or seed == 0
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """The fewest steps to every ε over a grid of constant step sizes."""
    rows: list[Row] = []
    for place, epsilon in enumerate(config.epsilons):
        generator = torch.Generator().manual_seed(1000 * int(cell["seed"] or 0) + place)
        steps, rate = fewest(
            epsilon,
            config,
            instance=str(cell["instance"]),
            clipped=cell["method"] == CLIPPED,
            noise=config.noise if cell["sampled"] else 0.0,
            generator=generator,
        )
        rows.append({"epsilon": epsilon, "steps": steps, "rate": rate})
    return rows


def fewest(
    epsilon: float,
    config: Config,
    *,
    instance: str,
    clipped: bool,
    noise: float,
    generator: torch.Generator,
) -> tuple[int | None, float | None]:
    """Steps after which the mean ‖∇F‖ of the chains is at most ε, with the step size that gets
    there first; all step sizes run side by side.
    """
    largest = 1 / config.curvature
    rates = largest * 2.0 ** (-torch.arange(config.rates, dtype=torch.float64) / 2)[:, None]
    chains = config.chains if noise else 1
    theta = _start(epsilon, config, instance).expand(config.rates, chains, 2).clone()
    for step in range(config.most_steps + 1):
        gradient = meta_gradient(theta, epsilon, config, instance)
        norms = gradient.norm(dim=2).mean(1)
        if bool((norms <= epsilon).any()):
            place = int(norms.argmin())
            return step, float(rates[place, 0])
        if noise:  # the sampled task moves the second coordinate by ±σ̃
            sign = torch.randint(2, (config.rates, chains), generator=generator) * 2 - 1
            gradient[:, :, 1] += noise * sign
        scale = rates
        if clipped:
            scale = rates / gradient.norm(dim=2).clamp(min=1.0)
        theta -= scale[..., None] * gradient
    return None, None


def meta_gradient(theta: Tensor, epsilon: float, config: Config, instance: str) -> Tensor:
    """∇F of f(x, y) = h(x) + ℒy²/2, with h of slope 2ε far out (hard) or ℒx²/2 (easy).

    The tasks' inner losses are linear, ∓cy, so that φ* = θ ± c/λ and ∇F_i = ∇F ± (0, ℒc/λ).
    """
    x, y = theta[..., 0], theta[..., 1]
    width = 2 * epsilon / config.curvature  # as sharp at its bottom as ℒ allows
    slope = 2 * epsilon * x / torch.sqrt(x**2 + width**2)
    slope = slope if instance == HARD else config.curvature * x
    return torch.stack([slope, config.curvature * y], dim=-1)


def _start(epsilon: float, config: Config, instance: str) -> Tensor:
    """Where F is Δ above its least value."""
    if instance == EASY:
        x = math.sqrt(2 * config.excess / config.curvature)
    else:
        width = 2 * epsilon / config.curvature
        x = math.sqrt((config.excess / (2 * epsilon) + width) ** 2 - width**2)
    return torch.tensor([x, 0.0], dtype=torch.float64)


def exponent(result: Result[Config], instance: str, method: str, *, sampled: bool) -> float:
    """The power of 1/ε with which the median number of steps grows; NaN where some ε was not
    reached.
    """
    curve = _curve(result, instance, method, sampled=sampled)
    steps = [spread.median for spread in curve.values()]
    if len(steps) < 2 or not all(0 < one < math.inf for one in steps):
        return math.nan
    return -log_slope(list(curve), steps)


def _curve(
    result: Result[Config], instance: str, method: str, *, sampled: bool
) -> dict[float, Spread]:
    where = {"instance": instance, "method": method, "sampled": sampled}
    return result.spreads("steps", "epsilon", result.config.epsilons, **where)


def judge(result: Result[Config]) -> Verdict:
    """Whether steps grow as the theorems' bounds on the hard instance, and no faster on the
    easy one.
    """
    statements = [
        _rate(result, CLIPPED, False, 2.0, "deterministic"),
        _rate(result, CLIPPED, True, 4.0, "clipped"),
        _rate(result, SGD, False, 2.0, "sgd"),
        _rate(result, SGD, True, 4.0, "sgd"),
    ]
    easy = exponent(result, EASY, SGD, sampled=True)
    more = (
        "The bounds are worst cases: on the easy instance, a parabola with as much noise, steps go"
        f" as ε^-{easy:.2f}. The second terms of Theorem 1, which do not grow with 1/ε, are not"
        " seen here."
    )
    return Verdict.of(statements, _measured(result), more)


def _rate(
    result: Result[Config], method: str, sampled: bool, theory: float, name: str
) -> Statement:
    power = exponent(result, HARD, method, sampled=sampled)
    words = (
        f"{method} with {'sampled tasks' if sampled else 'all tasks'} takes steps that go as"
        f" ε^-{power:.2f}"
    )
    return Statement(
        power <= theory + NEAR,
        f"{words} (bound: {theory:g})",
        f"{words}, above the bound's {theory:g}",
        name,
    )


def _measured(result: Result[Config]) -> str:
    told = []
    for sampled, method in itertools.product((False, True), result.config.methods):
        power = exponent(result, HARD, method, sampled=sampled)
        told.append(f"ε^-{power:.2f} ({method}, {'sampled' if sampled else 'all'} tasks)")
    return f"On the hard instance the steps to ‖∇F‖ ≤ ε go as {', '.join(told)}."


def draw(result: Result[Config]) -> list[Drawing]:
    """Steps against ε."""
    figure, axes = style.figure(2, width=9.6, height=3.9, sharey=True)
    looks = {SGD: "#0d9488", CLIPPED: "#d1495b"}
    for one, instance in zip(axes, (HARD, EASY), strict=True):
        for method, sampled in itertools.product(looks, (True, False)):
            curve = _curve(result, instance, method, sampled=sampled)
            finite = {e: s for e, s in curve.items() if 0 < s.high < math.inf}
            if finite:
                name = f"{method}, {'one task' if sampled else 'all tasks'} a step"
                dashes = "-" if sampled else ":"
                look: dict[str, Any] = {
                    "color": looks[method],
                    "marker": "o",
                    "markersize": 4,
                    "label": name,
                }
                style.band(one, finite, linestyle=dashes, **look)
        one.set(xscale="log", yscale="log", xlabel="ε", title=f"{instance} instance")
        one.invert_xaxis()
        style.plain_ticks(one.xaxis)
    axes[0].set_ylabel("meta-steps to ‖∇F‖ ≤ ε")
    style.legend(axes[1])
    done = [m for m in looks if not math.isnan(exponent(result, HARD, m, sampled=True))]
    told = ", ".join(f"{m} ε^-{exponent(result, HARD, m, sampled=True):.2f}" for m in done)
    return [Drawing(figure, alt=f"Meta-steps against ε, hard and easy instance. Hard: {told}.")]


def table(result: Result[Config]) -> ResultTable:
    """Steps at every ε, and the exponent."""
    rows = []
    keys = itertools.product(result.config.instances, (False, True), result.config.methods)
    for instance, sampled, method in keys:
        curve = _curve(result, instance, method, sampled=sampled)
        if curve:
            steps = [
                Shown.number(curve[e].median, ".0f") if e in curve else None
                for e in result.config.epsilons
            ]
            power = Shown.number(exponent(result, instance, method, sampled=sampled), ".2f")
            kind = "one" if sampled else "all"
            rows.append((instance, method, kind, *steps, power))
    at = (f"steps to {e:g}" for e in result.config.epsilons)
    return ResultTable(("instance", "optimizer", "tasks a step", *at, "power of 1/ε"), rows)


EXPERIMENT = Experiment(
    name="outer-rates",
    title="Meta-steps against ε",
    where="Theorems 1 and 2",
    claim=(
        "To E‖∇F‖ ≤ ε ClippedGD takes O(ℒ₀Δ/ε²) steps with all tasks and O(Δσ̃²ℒ₀/ε⁴) with"
        " sampled ones; SGD O(ℒΔ/ε² + ℒΔσ̃²/ε⁴)."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    notes=(
        "The bounds are for the worst function, so we take one that is hard: along x a slope of 2ε"
        " from Δ above the minimum, along y a parabola of curvature ℒ on which two tasks pull by"
        " ±σ̃, so that only step sizes of about ε²/(ℒσ̃²) keep ‖∇F‖ below ε, and with those x takes"
        " Δℒσ̃²/(8ε⁴) steps. It is a B-MAML objective: the tasks' inner losses are linear. ε is"
        " reached when the mean over the chains is. Meta-gradients are exact, step sizes constant,"
        " the best of a grid by factors of √2; ClippedGD clips at 1."
    ),
)
