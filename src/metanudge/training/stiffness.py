"""The learned stiffness of a run: as numbers for the metrics, as text for the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from metanudge.learner import MetaLearner


def stiffness(learner: MetaLearner) -> dict[str, float]:
    """λ where it is learned: `lam`, or `lam.NAME` for each tensor (the geometric mean of its
    entries); nothing where it is fixed.
    """
    if learner.log_lam is None:
        return {}
    named = dict(learner.log_lam.named_parameters())
    means = torch.stack([p.detach().double().mean() for p in named.values()]).exp().tolist()
    names = ["lam"] if learner.learn_lam == "scalar" else [f"lam.{name}" for name in named]
    return dict(zip(names, means, strict=True))


def describe_stiffness(values: Mapping[str, Any]) -> str | None:
    """The λ among a meta-step's values in a word; None where there is none.

    Example:
        >>> (describe_stiffness({"lam": 1.5}),
        ...     describe_stiffness({"lam.0.weight": 0.5, "lam.0.bias": 3.25, "residual": 9.0}))
        ('λ 1.5', 'λ 0.5–3.25')
    """
    found = [value for name, value in values.items() if name == "lam" or name.startswith("lam.")]
    if not found:
        return None
    low, high = f"{min(found):.3g}", f"{max(found):.3g}"
    return f"λ {low}" if low == high else f"λ {low}–{high}"
