"""§ 5.3: what a meta-gradient costs where inner solves are stochastic: steps of SGD against δ and
against ε.
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
from metanudge_lab.experiments.bias_constants import Nudged
from metanudge_lab.experiments.spread import Spread

FORWARD, SYMMETRIC = STENCILS = ("forward", "symmetric")
OWN, SHARED = "own noise", "shared noise"
OUTER = 4  # the power of 1/ε in the outer steps, Theorem 1
PAPER = {FORWARD: 6.0, SYMMETRIC: 5.5}
NEAR = 0.3  # of an exponent


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement; two minutes or so on a CPU.

    `noise` is σ of the inner gradients; `chains` how many solves are averaged over; `nus` the scan
    in which every precision finds its best ν.
    """

    at: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    nus: tuple[float, ...] = tuple(10 ** (k / 8 - 2.75) for k in range(22))
    noise: float = 0.01
    chains: int = 64
    multiple: float = 2.0
    size: float = 4.0
    spread: float = 2.0
    dim: int = 3
    examples: int = 12
    seeds: int = 3

    @classmethod
    def quick(cls) -> Config:
        """A few seconds."""
        return cls(at=(64, 128, 256, 512), chains=32, seeds=1)


def cells(config: Config) -> list[Cell]:
    """One for each seed, and whether the solves of a difference share their noise."""
    return [
        {"noises": noises, "seed": seed}
        for seed, noises in itertools.product(range(config.seeds), (OWN, SHARED))
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """The distance from the solution after so many steps, and the error of differences with the
    best ν.
    """
    problem = Nudged(int(cell["seed"] or 0), config, config.multiple, config.size)  # type: ignore[arg-type]
    nus = [0.0, *config.nus, *(-nu for nu in config.nus)]
    found = solves(
        problem, nus, config, shared=cell["noises"] == SHARED, seed=int(cell["seed"] or 0)
    )
    exact, star = problem.exact(), problem.solution(0.0)
    rows: list[Row] = []
    for steps, phi in found.items():  # (ν, chain, coordinate)
        delta = float((phi[0] - star).norm(dim=1).mean())
        rows.append({"kind": "inner", "steps": steps, "delta": delta})
        for stencil in STENCILS:
            errors = [
                _error(phi, stencil, place, nu, problem.lam, exact)
                for place, nu in enumerate(config.nus)
            ]
            least = min(errors)
            best = errors.index(least)
            row = {"kind": "gradient", "steps": steps, "stencil": stencil, "error": least}
            rows.append({**row, "nu": config.nus[best], "edge": best in (0, len(errors) - 1)})
    return rows


def solves(
    problem: Nudged, nus: list[float], config: Config, *, shared: bool, seed: int
) -> dict[int, Tensor]:
    """SGD with steps 1/(μ(k + κ)), all ν and chains side by side; φ after some numbers of steps.

    Every solve starts at its solution, so that noise alone keeps it from there: what is left of
    another start falls faster.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor(nus, dtype=torch.float64)[:, None, None]
    phi = torch.stack([problem.solution(nu) for nu in nus])[:, None]
    phi = phi.repeat(1, config.chains, 1)
    steepest = problem.support.bounds[1] + max(nus) * problem.query.bounds[1] + problem.lam
    kappa = steepest / problem.lam
    found = {}
    for step in range(1, max(config.at) + 1):
        shape = (1 if shared else len(nus), config.chains, config.dim)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        slope = _slopes(problem.support, phi) + weights * _slopes(problem.query, phi)
        slope += problem.lam * (phi - problem.theta) + config.noise * drawn
        phi = phi - slope / (problem.lam * (step + kappa))
        if step in config.at:
            found[step] = phi
    return found


def _slopes(loss: Any, phi: Tensor) -> Tensor:
    """Gradients of a logistic loss at many φ."""
    return -loss.size * (torch.sigmoid(-phi @ loss.a.T) @ loss.a) / len(loss.a)


def _error(phi: Tensor, stencil: str, place: int, nu: float, lam: float, exact: Tensor) -> float:
    """Mean distance of the difference quotient from the exact meta-gradient."""
    low, width = (phi[0], nu)
    if stencil == SYMMETRIC:
        low, width = phi[1 + place + (len(phi) - 1) // 2], 2 * nu
    estimate = -lam * (phi[1 + place] - low) / width
    return float((estimate - exact).norm(dim=1).mean())


def power(result: Result[Config], noises: str, kind: str, stencil: str | None = None) -> float:
    """The power of 1/δ (kind "inner") or of 1/ε with which steps grow; the median over the seeds.
    NaN where the best ν lies at an end of the scan: the error is then that of ν.
    """
    key = "delta" if kind == "inner" else "error"
    found = []
    for seed in result.distinct("seed"):
        where = {"kind": kind, "noises": noises, "seed": seed}
        rows = result.rows(**where) if stencil is None else result.rows(stencil=stencil, **where)
        if len(rows) > 1 and not any(row.get("edge") for row in rows):
            found.append(-1 / log_slope([r["steps"] for r in rows], [r[key] for r in rows]))
    return Spread.of(found).median if found else math.nan


def judge(result: Result[Config]) -> Verdict:
    """The inner steps for δ, and with Theorem 1's outer steps the whole."""
    inner = power(result, OWN, "inner")
    words = f"SGD takes δ^-{inner:.2f} steps to a mean distance of δ"
    statements = [
        Statement(
            abs(inner - 1) <= NEAR, words, f"{words}, not δ^-1 (σ²/δ², not σ²/δ)", "inner steps"
        )
    ]
    for stencil, theirs in PAPER.items():
        own = power(result, OWN, "gradient", stencil)
        words = (
            f"{stencil} differences with the best ν take ε^-{own:.2f} inner steps to an error of ε,"
            f" so ε^-{OUTER + own:.2f} in all"
        )
        statements.append(
            Statement(
                abs(OUTER + own - theirs) <= NEAR, words, f"{words}, not ε^-{theirs:g}", "total"
            )
        )
    shared = {s: power(result, SHARED, "gradient", s) for s in STENCILS}
    told = " and ".join(f"ε^-{p:.2f} ({s})" for s, p in shared.items() if not math.isnan(p))
    gap = power(result, OWN, "gradient", FORWARD) - power(result, OWN, "gradient", SYMMETRIC)
    more = (
        f"Symmetric differences do save a power of ε, {gap:.2f} of it (paper: 0.5). Where the"
        " solves of a difference share their random numbers, as the library's do, most of the noise"
        f" cancels: {told or 'no more than the smallest ν of the scan leaves,'} inner steps."
    )
    return Verdict.of(statements, _measured(result), more)


def _measured(result: Result[Config]) -> str:
    inner, forward, symmetric = (
        power(result, OWN, "inner"),
        *(OUTER + power(result, OWN, "gradient", stencil) for stencil in STENCILS),
    )
    return (
        f"Steps of SGD go as δ^-{inner:.2f}; with ε⁻⁴ outer steps the whole goes as"
        f" ε^-{forward:.2f} (forward) and ε^-{symmetric:.2f} (symmetric)."
    )


def _curve(result: Result[Config], key: str, **where: Any) -> dict[int, Spread]:
    return result.spreads(key, "steps", result.config.at, **where)


def draw(result: Result[Config]) -> list[Drawing]:
    """Distance and errors against steps."""
    figure, axes = style.figure(1, width=8.2, height=4.2)
    curves: list[tuple[str, str, dict[str, Any]]] = [
        ("distance δ of a solve", "#6b7280", {"kind": "inner", "key": "delta", "noises": OWN})
    ]
    for stencil, colour in ((FORWARD, "#e07b00"), (SYMMETRIC, "#1f6fd6")):
        for noises in (OWN, SHARED):
            where = {"kind": "gradient", "key": "error", "stencil": stencil, "noises": noises}
            curves.append((f"error, {stencil}, {noises}", colour, where))
    for name, colour, where in curves:
        found = _curve(result, **where)
        if found:
            dashes = ":" if where["noises"] == SHARED else "-"
            look: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4, "label": name}
            style.band(axes, found, linestyle=dashes, **look)
    axes.set(xscale="log", yscale="log", xlabel="steps of SGD", ylabel="mean error, best ν")
    style.legend(axes)
    found_powers = power(result, OWN, "inner")
    return [
        Drawing(
            figure,
            alt=(
                "Distance of inner solves and errors of meta-gradients against steps of SGD; steps"
                f" go as δ to the power -{found_powers:.2f}."
            ),
        )
    ]


def table(result: Result[Config]) -> ResultTable:
    """Exponents, with the paper's."""
    rows: list[tuple[str | Shown, ...]] = []
    for noises in result.distinct("noises"):
        inner = power(result, noises, "inner")
        rows.append((noises, "inner solve", Shown.number(inner, ".2f", " of 1/δ"), "1 of 1/δ", "–"))
        for stencil in STENCILS:
            found = power(result, noises, "gradient", stencil)
            share = f"{PAPER[stencil] - OUTER:g} of 1/ε"
            total = Shown.number(OUTER + found, ".2f", f" ({PAPER[stencil]:g})")
            shown = Shown.number(found, ".2f", " of 1/ε")
            rows.append((noises, f"{stencil} differences", shown, share, total))
    header = ("solves", "of", "power of the steps", "in the paper")
    return ResultTable((*header, "with the outer steps (the paper's)"), rows)


EXPERIMENT = Experiment(
    name="inner-noise",
    title="What stochastic inner solves cost",
    where="§ 5.3, Complexity Comparison and Stochastic Case",
    claim=(
        "An inner solve by SGD to precision δ takes O(σ²/δ) steps; with ε⁻⁴ outer steps, ε-"
        "stationarity costs O(ε⁻⁶) gradients with forward and O(ε⁻⁵·⁵) with symmetric differences."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    notes=(
        "The logistic task of the constants' experiment, Gaussian noise on inner gradients, SGD"
        " with steps 1/(μ(k + κ)) from each solve's own solution, so that noise alone counts; the"
        " best of a scan of ν at every number of steps. The paper"
        " needs E‖φ̃ − φ*‖ ≤ δ and takes σ²/δ steps for it; for strongly convex losses it is the"
        " square of the distance that falls as σ²/k, so that the distance takes σ²/δ², hence ε⁻⁴"
        " and ε⁻³ inner steps, and ε⁻⁸ and ε⁻⁷ in all. The outer power is Theorem 1's (measured"
        " under meta-steps against ε), the inner one is measured here."
    ),
)
