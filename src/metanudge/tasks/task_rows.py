"""`TaskRows`: the rows of all given tasks in one table, and how each task is divided into support
and query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.names import shown, some
from metanudge.task import Task, describe

Kind = Literal["classification", "regression"]


@dataclass(frozen=True)
class Part:
    """Rows of a task of which `support`, drawn at random, are for the support set and the others
    for the query set.
    """

    rows: NDArray[np.int64]
    support: int

    def __len__(self) -> int:
        return len(self.rows)


Parts = tuple[Part, ...]
"""A task: one part where it is divided at random, one for each class where the classes are to be in
both sets, and where the division is given one that is all support and one that is all query.
"""


@dataclass(frozen=True)
class TaskRows:
    """What given tasks hold.

    Attributes:
        kind: what the tasks are.
        x: inputs of all rows, `(rows, ...)`.
        y: `(rows, targets)` numbers, or `(rows,)` class numbers.
        names: of the tasks.
        parts: of the tasks.
        targets: names of the targets.
        labels: the classes, where there are some.
        columns: names of the inputs, where they have some.
        fingerprint: hex sha256 of the files they were read from.
        note: what was decided about them.
    """

    kind: Kind
    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    parts: tuple[Parts, ...]
    targets: tuple[str, ...]
    labels: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    fingerprint: str | None = None
    note: str = ""

    @classmethod
    def of(cls, tasks: Sequence[Task] | Mapping[str, Task]) -> TaskRows:
        """From tasks with batches `(inputs, targets)`; targets of whole numbers are classes."""
        names = tuple(tasks) if isinstance(tasks, Mapping) else tuple(map(str, range(len(tasks))))
        found = list(tasks.values()) if isinstance(tasks, Mapping) else list(tasks)
        if not found:
            raise ValueError("There is no task. Give at least one for training.")
        pairs = [
            _pair(batch, f"The {what} of task {name!r}")
            for name, task in zip(names, found, strict=True)
            for what, batch in (("support", task.support), ("query", task.query))
        ]
        _check_alike([x for x, _ in pairs], "inputs")
        _check_alike([y for _, y in pairs], "targets")
        x, y = (torch.cat(column) for column in zip(*pairs, strict=True))
        ends = np.cumsum([0, *(len(x) for x, _ in pairs)])
        rows = [np.arange(a, b) for a, b in pairwise(ends)]
        parts = tuple(
            (Part(s, len(s)), Part(q, 0)) for s, q in zip(rows[::2], rows[1::2], strict=True)
        )
        if y.is_floating_point():
            y = y[:, None] if y.ndim == 1 else y
            targets = _numbered("target", y.shape[1])
            return cls("regression", x, y, names, parts, targets)
        if y.ndim != 1 or int(y.min()) < 0:
            raise ValueError(
                f"Targets of whole numbers are classes 0, 1, …: one per example, got {describe(y)}"
                f" from {int(y.min())} on. For regression give floating targets."
            )
        labels = tuple(map(str, range(int(y.max()) + 1)))
        return cls("classification", x, y.long(), names, parts, ("class",), labels)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name} {i + 1}" for i in range(count))


def _pair(batch: object, what: str) -> tuple[Tensor, Tensor]:
    if (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
    ):
        x, y = (part.detach() for part in batch)
        if y.is_complex() or y.dtype == torch.bool or y.ndim > 2:
            raise ValueError(
                f"{what} has targets of {describe(y)}. Give numbers, (examples,) or (examples,"
                " targets), or whole numbers for classes, (examples,)."
            )
        for part, name in ((x, "inputs"), (y, "targets")):
            if part.is_floating_point() and not bool(part.isfinite().all()):
                raise ValueError(f"{what} has {name} with NaN or infinity. Correct them.")
        return (x[:, None] if x.ndim == 1 else x), y
    raise TypeError(f"{what} is no pair (inputs, targets) of tensors. Give pairs.")


def _check_alike(parts: Sequence[Tensor], what: str) -> None:
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
            raise ValueError(
                f"The tasks' {what} differ: {describe(first)} and {describe(part)}. Only the"
                " number of examples may."
            )


def divide(
    task: NDArray[np.int64],
    names: Sequence[str],
    *,
    support: float,
    role: NDArray[np.bool_] | None = None,
    time: NDArray[np.float64] | None = None,
    classes: NDArray[np.int64] | None = None,
    labels: Sequence[str] = (),
    drop_small: bool = False,
) -> tuple[tuple[str, ...], tuple[Parts, ...]]:
    """The tasks that can be divided, and their parts.

    Args:
        task: the task of each row, as a place in `names`.
        names: of the tasks.
        support: below 1 the fraction of a task's rows for its support set, else their number; of
            each class, where there are classes and no order.
        role: whether a row is for the support set, where that is given.
        time: of each row; the first ones are for the support set.
        classes, labels: of each row and their names, in classification.
        drop_small: leave out tasks that are too small instead of refusing them.
    """
    if not (0 < support < 1 or (support >= 1 and support == int(support))):
        raise ValueError(
            f"support={support:g} is neither a fraction of the rows (0.5) nor a number of them (5)."
        )
    kept: list[str] = []
    parts: list[Parts] = []
    order = np.argsort(task, kind="stable")
    for name, rows in zip(
        names, np.split(order, np.cumsum(np.bincount(task, minlength=len(names)))), strict=False
    ):
        where = f"Task {shown(name)!r}"
        try:
            if role is not None:
                parts.append(_as_given(rows, role, where))
            elif time is not None:
                rows = rows[np.argsort(time[rows], kind="stable")]
                first = _count(len(rows), support, where)
                parts.append((Part(rows[:first], first), Part(rows[first:], 0)))
            elif classes is None:
                parts.append((Part(rows, _count(len(rows), support, where)),))
            else:
                parts.append(_by_class(rows, classes[rows], labels, support, where))
        except _TooSmall as error:
            if not drop_small:
                raise ValueError(f"{error} Or leave such tasks out: drop_small=true.") from error
        else:
            kept.append(name)
    if not kept:
        raise ValueError(f"None of the {len(names)} tasks is large enough: {some(names, 3)}.")
    return tuple(kept), tuple(parts)


class _TooSmall(ValueError):
    """A task that cannot be divided."""


def _as_given(rows: NDArray[np.int64], role: NDArray[np.bool_], where: str) -> Parts:
    chosen = role[rows]
    if chosen.all() or not chosen.any():
        which = "query" if chosen.all() else "support"
        raise _TooSmall(f"{where} has no row for its {which} set ({len(rows)} rows in all).")
    return Part(rows[chosen], int(chosen.sum())), Part(rows[~chosen], 0)


def _by_class(
    rows: NDArray[np.int64],
    classes: NDArray[np.int64],
    labels: Sequence[str],
    support: float,
    where: str,
) -> Parts:
    found = []
    for c in np.unique(classes):
        own = rows[classes == c]
        found.append(Part(own, _count(len(own), support, f"Class {labels[c]!r} of {where}")))
    return tuple(found)


def _count(rows: int, support: float, where: str) -> int:
    """How many of the rows are for the support set; at least one is left for the query set."""
    if rows == 1:
        raise _TooSmall(
            f"{where} has one row, which cannot be for both support and query. Give it more."
        )
    if support < 1:
        return min(max(1, round(support * rows)), rows - 1)
    if support >= rows:
        raise _TooSmall(
            f"{where} has {rows} rows, and support={support:g} leaves none of them for the query"
            f" set. Use {rows - 1} or less, or a fraction such as 0.5."
        )
    return int(support)
