"""How many classes and examples a task has: a number, or a range of them."""

from __future__ import annotations

import numpy as np

Count = int | tuple[int, int]
"""How many; of (least, most) any number in between, anew for other tasks."""
WHY = "A task needs at least one class, one support and one query example."


def check_count(name: str, value: int, *, why: str) -> int:
    """`value` as an int; raises `ValueError` unless it is a positive integer."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer. {why}")
    return int(value)


def check_span(name: str, value: Count) -> tuple[int, int]:
    """The least and the most; raises `ValueError` unless they are positive integers in this order.

    Example:
        >>> check_span("ways", 5), check_span("ways", (3, 10))
        ((5, 5), (3, 10))
    """
    pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)
    least, most = (check_count(name, one, why=WHY) for one in pair)
    if least > most:
        raise ValueError(
            f"{name}={value!r} runs backwards. Give the least first: ({most}, {least})."
        )
    return least, most


def is_integer(value: object) -> bool:
    """Whether this is an integer, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
