"""What a run tells: the facts at its start; the test's result, summary.json and the learning curve
at its end.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metanudge.baselines import Comparison, measure
from metanudge.evaluation import Evaluation, ci95
from metanudge.learner import MetaLearner
from metanudge.names import clock
from metanudge.task import TaskBatch
from metanudge.tasks import Episodes, Text
from metanudge.tasks.episodes import Split
from metanudge.tasks.images import is_picture
from metanudge.training.config import TrainConfig
from metanudge.training.data import DataShapes
from metanudge.training.device import environment
from metanudge.training.distributed import Group
from metanudge.training.files import (
    SEAL,
    is_intact,
    parse_json,
    read_bytes,
    seal,
    without_nan,
    write_text,
)
from metanudge.training.metrics import (
    describe_learned,
    inner_rates,
    learning_curve,
    read_metrics,
    save,
    stiffness,
)
from metanudge.training.runs import CURVE, METRICS, SUMMARY
from metanudge.training.sources import build_learner
from metanudge.training.specs import is_made
from metanudge.version import __version__

_PRODUCTS = {
    "unrolled": ", differentiated through all steps at once",
    "autograd": ", differentiated step by step",
    "difference": ", differentiated by differences of gradients",
}


def facts(
    config: TrainConfig,
    source: Episodes,
    learner: MetaLearner,
    group: Group,
    products: str | None,
) -> list[tuple[str, str]]:
    """What is being trained, how and on what; `products` as in `Stats`."""
    device, own = learner.problem().device, group.slice(config.tasks)
    batch = source.batch(range(max(1, len(own))))
    engine, why = learner.choose_engine(batch)
    second_order = learner.estimator.second_order(learner.solver)
    path = engine.path(learner.problem(), batch, second_order=second_order)
    threads = torch.get_num_threads()
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {threads} thread{'s' * (threads > 1)}"
    )
    plain = config.precision == "fp32" or (config.precision == "tf32" and device.type == "cpu")
    where = f"{name}, {config.dtype}" + ("" if plain else f", {config.precision}")
    return [
        ("data", f"{config.data}: {source.sizes()}; {config.tasks} tasks per meta-step"),
        ("inputs", describe_inputs(source)),
        ("model", f"{config.model}, {_trainable(learner):,} parameters, {_term(config, learner)}"),
        *_own_parts(config),
        (
            "estimator",
            f"{config.estimator} with {config.solver}{_PRODUCTS.get(products or '', '')}",
        ),
        ("optimizer", f"{config.optimizer}, {config.schedule}, {config.iterations} meta-steps"),
        ("engine", ", ".join(filter(None, [f"{engine.name} ({why})", path]))),
        ("device", where + _processes(group)),
    ]


def remarks(config: TrainConfig, device: torch.device) -> Iterator[str]:
    """What a user may want to know before the first meta-step."""
    if config.compile and device.type == "cuda":
        yield (
            "The first meta-steps build kernels for this GPU: up to half a minute, seconds where"
            " they are cached."
        )
    if config.precision == "tf32" and device.type == "cpu":
        yield (
            "--precision tf32 is for NVIDIA GPUs and changes nothing on a CPU: this run computes in"
            " fp32."
        )


def recorded(config: TrainConfig, source: Episodes, *, processes: int) -> dict[str, Any]:
    """What the state of every checkpoint says of its run: by which program, where, how, on what."""
    return {
        "version": __version__,
        "environment": environment(source.device, processes=processes),
        "config": config.to_dict(),
        "data_sha256": source.fingerprint(),
        "shapes": DataShapes.of(source).to_dict(),
    }


def _processes(group: Group) -> str:
    if group.world == 1:
        return ""
    return f"; {group.world} processes" + f", {group.shards} a model" * (group.shards > 1)


def _own_parts(config: TrainConfig) -> list[tuple[str, str]]:
    """The loss, metrics and augmentation of the user's own."""
    rows = []
    if (config.loss, config.query_loss) != ("auto", "same"):
        own = "" if config.query_loss == "same" else f", of query sets {config.query_loss}"
        rows.append(("loss", config.loss + own))
    if config.metrics:
        rows.append(("metrics", config.metrics))
    if config.augment != "none":
        which = "support and query" if config.augment_query else "support"
        rows.append(("augmented", f"{which} sets of training tasks: {config.augment}"))
    return rows


def describe_inputs(source: Episodes) -> str:
    """The shape of one example, and what was decided about it."""
    shape = source.input_shape
    size = "×".join(map(str, shape))
    what = f"images {size}" if is_picture(shape) else f"{size} number{'s' * (shape != (1,))}"
    if isinstance(source, Text):
        what = f"texts of up to {size} tokens"
    return what + (f" ({source.note})" if source.note else "")


def tested(result: Evaluation) -> dict[str, Any]:
    """The test's result as JSON values, with 95 % confidence intervals over the tasks; None for
    what is not finite.
    """
    values: dict[str, Any] = {
        "tasks": len(result.loss),
        "loss": result.mean_loss,
        "loss_ci95": ci95(result.loss),
        "loss_before": float(result.loss_before.mean()),
        "accuracy": result.mean_accuracy,
        "accuracy_ci95": result.accuracy_ci95,
        "accuracy_before": float(result.accuracy_before.mean()),
    }
    if result.extra:
        values["metrics"] = {n: float(value.mean()) for n, value in result.extra.items()}
        values["metrics_ci95"] = {name: ci95(value) for name, value in result.extra.items()}
    return without_nan(values)


def compared(
    config: TrainConfig,
    source: Episodes,
    own: Tensor,
    split: Split = "test",
    *,
    untrained: bool = True,
) -> Comparison | None:
    """A learner beside the baselines; None where none are asked for.

    Args:
        config: of the run.
        source: of the tasks.
        own: accuracy (regression: loss) of the learner on each of the first tasks of the split.
        untrained: whether to compare with the untrained model as well, which then must fit here.
    """
    own_loss = (config.loss, config.query_loss) != ("auto", "same")
    if config.baselines == "none" or (own_loss and source.kind == "regression"):
        return None  # losses of two kinds cannot be compared
    fresh = build_learner(config, source) if untrained and is_made(config.model) else None
    kind = source.kind

    def as_it_began(batch: TaskBatch) -> Tensor:
        assert fresh is not None
        result = fresh.evaluate(batch)
        return result.accuracy if kind == "classification" else result.loss

    adapts = None if fresh is None else as_it_began
    return Comparison(kind, own, measure(source, len(own), split, untrained=adapts))


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: meta-steps done.
        best: the best validation, with the step of its checkpoint; None where there was none.
        test: as `tested` gives it; None where there was none.
        beside: the test beside the baselines; None where they were not measured.
        seconds: that the run, or its resumed part, took.
        resumed: whether this was only the last part of the run.
    """

    step: int
    best: dict[str, Any] | None
    test: dict[str, Any] | None
    beside: Comparison | None
    seconds: float
    resumed: bool


def write_summary(
    folder: Path,
    config: TrainConfig,
    outcome: Outcome,
    learner: MetaLearner,
    *,
    processes: int,
    note: Callable[[str], None],
) -> None:
    """Write summary.json, sealed, and the learning curve."""
    best, beside = outcome.best, outcome.beside
    summary = {
        "version": __version__,
        **environment(learner.problem().device, processes=processes),
        "parameters": _trainable(learner),
        **({"lam": stiffness(learner)} if learner.log_lam is not None else {}),
        **({"inner_lr": found} if (found := inner_rates(learner)) else {}),
        "steps": outcome.step,
        "checkpoint": "best" if best is not None else "last",
        "checkpoint_step": best["step"] if best is not None else outcome.step,
        "validation": best,
        "test": outcome.test,
        **({} if beside is None else {"baselines": without_nan(beside.as_dict())}),
        "seconds": round(outcome.seconds, 3),
    }
    write_text(folder / SUMMARY, seal(summary, indent=2))
    title = f"{Path(config.data).name} · {config.model.split(':')[0]} · {config.estimator}"
    curve = learning_curve(
        read_metrics(folder / METRICS, note=note),
        test=outcome.test,
        beside=None if beside is None else beside.as_dict(),
    )
    save(curve, folder / CURVE, title)


def check_summary(folder: Path, note: Callable[[str], None]) -> None:
    """Tell `note` where summary.json is not what a run wrote; that of version 0.1 has no seal."""
    file = folder / SUMMARY
    if not os.path.lexists(file):
        return
    try:
        summary = parse_json(read_bytes(file))
        sound = isinstance(summary, dict) and (
            is_intact(summary, indent=2) if SEAL in summary else "version" in summary
        )
    except (OSError, ValueError):
        sound = False
    if not sound:
        note(
            f"{file} was changed after the run wrote it: do not rely on its numbers. The end of"
            " this run writes it anew."
        )


def result_table(
    folder: Path, config: TrainConfig, outcome: Outcome, learner: MetaLearner
) -> list[tuple[str, str]]:
    """The result for the screen."""
    best, test = outcome.best, outcome.test
    lines = [
        (
            "meta-steps",
            f"{outcome.step} in {clock(outcome.seconds)}"
            + (" (this part of the run)" if outcome.resumed else ""),
        )
    ]
    if best is not None:
        good = (
            f"{best['accuracy']:.2%}"
            if best["accuracy"] is not None
            else f"loss {best['loss']:.4g}"
        )
        tasks = best.get("tasks", config.eval_tasks)
        lines.append(("best validation", f"{good} at step {best['step']} ({tasks} tasks)"))
    if test is not None:
        if test["accuracy"] is not None:
            accuracy = f"{test['accuracy']:.2%} ± {test['accuracy_ci95'] or math.nan:.2%}"
            lines.append(("test accuracy", f"{accuracy} (95 % CI, {test['tasks']} tasks)"))
            alone = " (class means alone)" if config.head == "prototypes" else ""
            lines.append(("before adaptation", f"{test['accuracy_before']:.2%}{alone}"))
        loss = f"{_number(test['loss'])} ± {_number(test['loss_ci95'])}"
        lines.append(("test loss", f"{loss} (before adaptation {_number(test['loss_before'])})"))
        for name, value in test.get("metrics", {}).items():
            interval = _number(test["metrics_ci95"][name])
            lines.append((f"test {name}", f"{_number(value)} ± {interval}"))
    if outcome.beside is not None:
        lines += outcome.beside.rows()
    for name, learned in (
        ("learned stiffness", describe_learned(stiffness(learner), "lam")),
        ("learned rates", describe_learned(inner_rates(learner), "inner_lr")),
    ):
        if learned is not None:
            lines.append((name, learned))
    if outcome.step < config.iterations:
        more = f"metanudge train --resume {shlex.quote(str(folder))} --patience 0"
        lines.append(("stopped early", f"no better validation since; to go on: {more}"))
    later = config.eval_every < outcome.step and config.schedule == "constant"
    if best is not None and best["step"] == outcome.step and later:
        more = f"--resume {shlex.quote(str(folder))} --iterations {2 * outcome.step}"
        lines.append(("still improving", f"metanudge train {more}"))
    return [*lines, ("curve", str(folder / CURVE)), ("summary", str(folder / SUMMARY))]


def _term(config: TrainConfig, learner: MetaLearner) -> str:
    """The head, λ, whether it and the inner rates are learned, and what adapts."""
    problem = learner.problem()
    text = "head of prototypes, " if config.head == "prototypes" else ""
    text += f"λ = {config.lam:g}"
    if learner.log_lam is not None:
        text += " to begin with, learned" + (
            "" if config.learn_lam == "scalar" else f" per {config.learn_lam}"
        )
    if config.learn_lr != "none":
        text += f"; inner rates learned ({config.learn_lr})"
    if problem.shared:
        text += (
            f"; {sum(p.numel() for p in problem.parameters.values()):,} adapt ({config.adapt}), the"
            " others are shared"
        )
    return text


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _trainable(learner: MetaLearner) -> int:
    return sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
