"""Tables of given tasks: small linear problems with something in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def schools(
    path: Path,
    *,
    tasks: int = 100,
    rows: int | tuple[int, int] = 18,
    features: int = 6,
    noise: float = 0.3,
    seed: int = 0,
    scales: int | None = None,
) -> Path:
    """Each school is y = (common + a·direction)·x + noise with an a of its own; `scales` seeds
    units of the features and the target, over eight orders of magnitude.
    """
    rng = np.random.default_rng(seed)
    common, direction = rng.normal(size=(2, features))
    size, shift = np.ones(features + 1), np.zeros(features + 1)
    if scales is not None:
        units = np.random.default_rng(scales)
        size = 10 ** units.uniform(-4, 4, features + 1)
        shift = units.normal(size=features + 1) * 10 ** units.uniform(-3, 3, features + 1)
    lines = [",".join(["school", *(f"x{i}" for i in range(features)), "score"])]
    for task in range(tasks):
        weight = common + 2 * rng.normal() * direction
        count = rows if isinstance(rows, int) else int(rng.integers(*rows))
        x = rng.normal(size=(count, features))
        y = x @ weight + noise * rng.normal(size=count)
        for row in np.column_stack([x, y]) * size + shift:
            lines.append(",".join([f"s{task:03d}", *(repr(float(v)) for v in row)]))
    path.write_text("\n".join(lines) + "\n")
    return path
