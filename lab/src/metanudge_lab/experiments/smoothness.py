"""How a meta-objective's smoothness grows with its gradient: along a path, between far points, and
against Proposition 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from metanudge import optim
from metanudge_lab.experiments.base import Row
from metanudge_lab.experiments.meta_objectives import MetaObjective, Rippled
from metanudge_lab.experiments.outer_loss_rows import drawn

PATH, PAIRS, PROOF, CONSTANTS = "path", "pairs", "proof", "constants"


def smoothness(objective: MetaObjective, *, steps: int, epsilon: float) -> list[Row]:
    """(‖∇F‖, ‖∇²F‖) along a clipped path; pairs of points far apart; the proof's own step with the
    constants found; Proposition 3's.
    """
    path = _path(objective, 2 * steps)
    seen = [path[0], *(path[k] for k in drawn(len(path) - 1))]
    rows: list[Row] = []
    for point in seen:
        here = objective.all(point)
        lowest = float(torch.linalg.eigvalsh(here.hessian)[0])
        rows.append(
            {
                "kind": PATH,
                "norm": float(here.gradient.norm()),
                "curvature": _norm(here.hessian),
                "lowest": lowest,
            }
        )
    constants = envelope([(row["norm"], row["curvature"]) for row in rows])
    return [
        *rows,
        *_pairs(objective, constants),
        *_proof(objective, constants, steps=steps, epsilon=epsilon),
        *_stated(objective, seen),
    ]


def _path(objective: MetaObjective, steps: int) -> list[Tensor]:
    """Clipped gradient descent that takes about half of its steps to come near the minimiser."""
    theta = objective.start.clone().requires_grad_()
    rate = min(0.4, 2 * float((objective.start - objective.minimiser()).norm()) / steps)
    optimizer = optim.ClippedGD([theta], lr=rate, max_norm=1.0)
    path = []
    for _ in range(steps):
        path.append(theta.detach().clone())
        theta.grad = objective.gradient(path[-1])
        optimizer.step()
    return path


def envelope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line L₀ + L₁g that lies above all points (g, h), and of all such lines as little as
    possible: least Σ (L₀ + L₁g)/h.

    Example:
        >>> envelope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (1.0, 2.0)])
        (1.0, 2.0)
    """
    candidates = [(max(h for _, h in points), 0.0)]
    for (g, h), (other_g, other_h) in itertools.combinations(points, 2):
        if g != other_g:
            slope = (other_h - h) / (other_g - g)
            candidates.append((h - slope * g, slope))
    above = [
        (a, b)
        for a, b in candidates
        if b >= 0 and a > 0 and all(a + b * g >= h * (1 - 1e-9) for g, h in points)
    ]
    return min(above, key=lambda line: sum((line[0] + line[1] * g) / h for g, h in points))


def _pairs(objective: MetaObjective, constants: tuple[float, float]) -> list[Row]:
    """‖∇F(θ') − ∇F(θ*)‖ over min(ℒ(θ*), ℒ(θ'))‖θ' − θ*‖, θ' ever farther from the minimiser: at
    most 1 if the global form held.
    """
    centre = objective.minimiser()
    away = (objective.start - centre) / (objective.start - centre).norm()
    farthest = float((objective.start - centre).norm())
    rows: list[Row] = []
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0):
        other = centre + share * farthest * away
        gradients = [objective.gradient(point) for point in (centre, other)]
        smoothness = min(constants[0] + constants[1] * float(g.norm()) for g in gradients)
        secant = float((gradients[1] - gradients[0]).norm()) / (share * farthest)
        rows.append(
            {
                "kind": PAIRS,
                "distance": share * farthest,
                "secant": secant,
                "ratio": secant / smoothness,
            }
        )
    return rows


def _proof(
    objective: MetaObjective, constants: tuple[float, float], *, steps: int, epsilon: float
) -> list[Row]:
    """The step g/(L₀ + L₁‖g‖) of the proof: steps to ε, its bound, and how often F fell by less
    than promised.
    """
    flat, steep = constants
    lowest = float(objective.values(objective.minimiser()).mean())
    theta = objective.start.clone().requires_grad_()
    # NormalizedGD's lr/(smoothing + ‖g‖) with lr = 1/L₁ and smoothing = L₀/L₁; for L₁ = 0 plain
    # gradient descent.
    optimizer = (
        optim.NormalizedGD([theta], lr=1 / steep, smoothing=flat / steep)
        if steep > 0
        else torch.optim.SGD([theta], lr=1 / flat)
    )
    start = float(objective.values(theta.detach()).mean()) - lowest
    bound = 4 * flat * start / epsilon**2 + 4 * steep**2 * start / flat
    broken, taken = 0, 0
    while taken < steps:
        here = theta.detach().clone()
        gradient = objective.gradient(here)
        norm = float(gradient.norm())
        if norm <= epsilon:
            break
        theta.grad = gradient
        optimizer.step()
        fell = float(objective.values(here).mean() - objective.values(theta.detach()).mean())
        broken += fell < norm**2 / (2 * (flat + steep * norm)) * (1 - 1e-9) - 1e-13
        taken += 1
    return [
        {
            "kind": PROOF,
            "flat": flat,
            "steep": steep,
            "steps": taken,
            "bound": bound,
            "broken": broken,
            "excess": start,
        }
    ]


def _stated(objective: MetaObjective, points: Sequence[Tensor]) -> list[Row]:
    """‖∇²F_i‖ over Proposition 3's ℒ, where its assumptions hold: with its constants, and with
    those that its proof gives.
    """
    if not isinstance(objective, Rippled):
        return []
    smooth, _, bend = objective.constants
    ratios: dict[str, float] = {"stated": 0.0, "proved": 0.0}
    for point in [*points, objective.minimiser()]:
        for gradient, hessian in zip(
            objective.gradients(point), objective.hessians(point), strict=True
        ):
            shape = smooth + bend / objective.lam * float(gradient.norm())
            for name, factor in (("stated", 0.25), ("proved", 4.0)):
                ratios[name] = max(ratios[name], _norm(hessian) / (factor * shape))
    return [{"kind": CONSTANTS, **ratios}]


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
