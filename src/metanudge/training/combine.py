"""One meta-gradient from those of all ranks, and one answer to whether the run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metanudge.estimators import NonFiniteError, Stats
from metanudge.learner import MetaLearner
from metanudge.optim import global_norm
from metanudge.params import Params
from metanudge.training.distributed import Group
from metanudge.training.signals import CODES

_MEANS = (
    "query_loss_before",
    "query_accuracy_before",
    "query_loss",
    "query_accuracy",
    "residual_start",
    "residual",
    "delta",
)


@dataclass(frozen=True)
class Own:
    """What one rank brings to a meta-step.

    Attributes:
        gradient: the mean over the rank's tasks; empty where it has none, or met a number that is
            not finite.
        stats: of the same tasks; None in the same cases.
        failure: what was not finite.
        signal: the number of a signal that asks the run to stop.
        broken_off: whether the signal came in the middle, so that there is no gradient.
    """

    gradient: Params
    stats: Stats | None
    failure: NonFiniteError | None
    signal: int | None
    broken_off: bool = False


@dataclass(frozen=True)
class Combined:
    """What all ranks know after it, each the same.

    Attributes:
        gradient: the mean over all tasks.
        values: its statistics, for the metrics.
        failure: what was not finite on one of the ranks; there is no gradient then.
        signal: the number of a signal that one of the ranks received.
        broken_off: whether one of the ranks broke off; there is no gradient then.
    """

    gradient: Params
    values: dict[str, Any]
    failure: str | None
    signal: int | None
    broken_off: bool = False


def combine(own: Own, group: Group, learner: MetaLearner, *, tasks: int) -> Combined:
    """The ranks' results as one, weighted by their share of the `tasks`: one all-reduce."""
    if group.world > 1:
        return _reduced(own, group, learner, tasks)
    if own.failure is not None:
        return Combined({}, {}, str(own.failure), own.signal)
    if own.broken_off:
        return Combined({}, {}, None, own.signal, True)
    assert own.stats is not None
    names = (*_MEANS, "nu", "error", "gradient_norm")
    return Combined(
        own.gradient, {name: getattr(own.stats, name) for name in names}, None, own.signal
    )


def _reduced(own: Own, group: Group, learner: MetaLearner, tasks: int) -> Combined:
    stats, gradient = own.stats, own.gradient
    share = 0.0 if stats is None else stats.tasks / tasks
    sums = {name: 0.0 if stats is None else share * getattr(stats, name) for name in _MEANS}
    sums["nu"] = 0.0 if stats is None or stats.nu is None else share * stats.nu
    sums["error"] = (
        0.0 if stats is None or stats.error is None else share * stats.error * stats.gradient_norm
    )
    sums["failed"] = float(own.failure is not None)
    sums["broken off"] = float(own.broken_off)
    for number in CODES:
        sums[f"signal {number}"] = float(own.signal == number)
    if not gradient:
        gradient = learner.problem().zero_gradient()
    gradient, sums = group.reduce(gradient, sums, share)
    signals = [number for number in CODES if sums[f"signal {number}"]]
    signal = signals[0] if signals else None
    if sums["failed"]:
        messages = [
            text
            for text in group.gather(str(own.failure) if own.failure is not None else None)
            if text
        ]
        return Combined({}, {}, messages[0], signal)
    if sums["broken off"]:
        return Combined({}, {}, None, signal, True)
    norm = float(global_norm(list(gradient.values())))
    values = {name: sums[name] for name in _MEANS}
    error = sums["error"] / norm if sums["error"] and norm else None
    return Combined(
        gradient,
        {**values, "nu": sums["nu"] or None, "error": error, "gradient_norm": norm},
        None,
        signal,
    )
