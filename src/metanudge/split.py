"""A meta-batch split over ranks: each makes the meta-gradient of its tasks, all get the mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from metanudge.estimators.total import NonFiniteError, Stats
from metanudge.params import Params, norm
from metanudge.spread import local
from metanudge.task import TaskBatch

_MEANS = tuple(
    field.name
    for field in dataclasses.fields(Stats)
    if field.type == "float" and field.name != "gradient_norm"
)


def mean_over(
    over: Any, batch: TaskBatch, compute: Callable[[TaskBatch, int], tuple[Params, Stats]]
) -> tuple[Params, Stats]:
    """The mean meta-gradient of a batch, of which each rank computes a contiguous part, and the
    statistics of all of it; the same on every rank.

    Args:
        over: a mesh of one dimension, or a process group.
        batch: all tasks, on every rank the same.
        compute: makes both for some of the tasks, given the place of the first one.

    What is not finite on one rank is raised on all.
    """
    group = _group_of(over)
    rank, ranks, tasks = dist.get_rank(group), dist.get_world_size(group), len(batch)
    if tasks < ranks:
        raise ValueError(
            f"{tasks} tasks cannot be split over {ranks} ranks. Give at least {ranks} tasks, or"
            " split them over fewer ranks."
        )
    begin, end = tasks * rank // ranks, tasks * (rank + 1) // ranks
    failure = ""
    try:
        gradient, stats = compute(batch[begin:end], begin)
    except NonFiniteError as error:
        failure = str(error)
    failures: list[Any] = [None] * ranks
    dist.all_gather_object(failures, failure, group=group)
    if any(failures):
        raise NonFiniteError(next(filter(None, failures)))
    weight = (end - begin) / tasks
    for leaf in gradient.values():
        dist.all_reduce(local(leaf).mul_(weight), group=group)
    return gradient, _joined(gradient, stats, weight, tasks, group)


def _joined(gradient: Params, stats: Stats, weight: float, tasks: int, group: Any) -> Stats:
    """The statistics of all ranks' tasks."""
    own = [getattr(stats, name) for name in _MEANS]
    own += [*stats.extra.values(), (stats.error or 0.0) * stats.gradient_norm]
    device = next(iter(gradient.values())).device
    sums = torch.tensor(own, dtype=torch.float64, device=device) * weight
    dist.all_reduce(sums, group=group)
    *means, error = sums.tolist()
    length = float(norm({n: local(leaf).unsqueeze(0) for n, leaf in gradient.items()}))
    return dataclasses.replace(
        stats,
        **dict(zip(_MEANS, means[: len(_MEANS)], strict=True)),
        extra=dict(zip(stats.extra, means[len(_MEANS) :], strict=True)),
        tasks=tasks,
        gradient_norm=length,
        error=None if stats.error is None or length == 0 else error / length,
    )


def _group_of(over: Any) -> Any:
    if isinstance(over, dist.ProcessGroup):
        return over
    if not hasattr(over, "get_group") or over.ndim != 1:
        found = f"a mesh of {over.ndim} dimensions" if hasattr(over, "ndim") else repr(over)
        raise TypeError(
            "over must be one dimension of a device mesh (mesh['tasks']) or a process group, got"
            f" {found}."
        )
    return over.get_group()
