"""The training loop: every meta-step is a function of (configuration, step, state), so a run can stop anywhere and go on.

Episode b of meta-step s is episode s·tasks + b of the source, and everything random is seeded by (seed, s). A checkpoint holds θ, the
optimizer's state and the length of the metrics file; a resumed run cuts the file back to it and writes the same bytes again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metanudge.engines.randomness import mix
from metanudge.estimators import NonFiniteError, Stats
from metanudge.learner import Evaluation, MetaLearner
from metanudge.optim import global_norm
from metanudge.params import Params
from metanudge.tasks import Episodes
from metanudge.tasks.episodes import Split
from metanudge.training import specs
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.config import TrainConfig, flag
from metanudge.training.distributed import Group
from metanudge.training.errors import EXIT_DONE, EXIT_NOT_FINITE, EXIT_OUT_OF_MEMORY, StopTraining, UserError
from metanudge.training.metrics import MetricsLog, Sink, Timing, check_sinks, open_sinks, read_metrics
from metanudge.training.plots import learning_curve
from metanudge.training.progress import ConsoleReporter, Quiet, Reporter, clock, memory_used
from metanudge.training.runs import (
    CHECKPOINTS,
    CONFIG,
    CURVE,
    METRICS,
    SUMMARY,
    TIMING,
    DataShapes,
    build_learner,
    build_source,
    check_splits,
    choose_device,
    load_weights,
    precision,
    read_config,
    resolve,
)  # fmt: skip
from metanudge.training.signals import CODES, StopRequest
from metanudge.version import __version__

T = TypeVar("T")

# What a resumed run may change: how far and where it goes, not what it computes.
MAY_CHANGE = ("iterations", "test_tasks", "checkpoint_every", "device", "engine", "chunk", "tensorboard", "wandb")
_MEANS = ("query_loss_before", "query_accuracy_before", "query_loss", "query_accuracy", "residual_start", "residual", "delta")
_RECENT = 50


@dataclass(frozen=True)
class Plan:
    """Where a run lives and where it begins; made by rank 0 without writing anything."""

    folder: Path
    saved: TrainConfig | None  # the configuration in the folder, for a run that goes on
    checkpoint: Checkpoint | None


def train(config: TrainConfig, *, resume: Path | None = None, reporter: Reporter | None = None) -> int:
    """Train as configured, or continue the run in the folder `resume`; returns 0.

    Raises `UserError` for what the user can put right (nothing is written then), `StopTraining` where a run ends early.
    """
    with StopRequest() as stop:
        group = Group.from_environment()
        try:
            return _train(config, resume, group, stop, reporter or (ConsoleReporter() if group.leads else Quiet()))
        finally:
            group.close()


def _train(config: TrainConfig, resume: Path | None, group: Group, stop: StopRequest, reporter: Reporter) -> int:
    config.check()
    device = choose_device(config)
    plan = group.share(lambda: _plan(config, resume, group))
    check_sinks(config)
    source = group.one_after_the_other(lambda: build_source(config, device=device))
    check_splits(config, source)
    config = dataclasses.replace(resolve(config, source), out=str(plan.folder))
    if plan.saved is not None:
        _check_unchanged(plan, config)
    learner = build_learner(config, source)
    optimizer = specs.build_optimizer(config.optimizer, learner.parameters())
    if plan.checkpoint is not None:
        load_weights(learner, plan.checkpoint)
        optimizer.load_state_dict(plan.checkpoint.state["optimizer"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    with precision(config, device):
        _try_out(learner, source, config)
        group.share(lambda: _claim(plan.folder, config))
        trainer = Trainer(config, plan, source, learner, optimizer, group, stop, reporter)
        try:
            trainer.run()
        finally:
            reporter.end()
            trainer.close()
    return EXIT_DONE


# --- Before the first step -------------------------------------------------------------------------------------------


def _plan(config: TrainConfig, resume: Path | None, group: Group) -> Plan:
    if resume is not None:
        chosen: str = "last"
        if resume.parent.name == CHECKPOINTS and not (resume / CONFIG).exists():
            resume, chosen = resume.parent.parent, resume.name
        saved = read_config(resume)
        if config.out not in (None, saved.out):
            raise UserError(
                f"--out {config.out} and --resume {resume} contradict each other: a run goes on where it is. Leave --out out."
            )
        return Plan(resume, saved, _checkpoint(resume, chosen))
    folder = Path(config.out).expanduser() if config.out else _default_folder(config, group)
    if not folder.exists() or (folder.is_dir() and not _contents(folder)):
        return Plan(folder, None, None)
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file. Give a new or empty folder.")
    if group.elastic and (folder / CONFIG).is_file():  # torchrun starts the same command again after a failure
        return Plan(folder, read_config(folder), _checkpoint(folder, "last"))
    more = f", or continue the run in it: metanudge train --resume {shlex.quote(str(folder))}" if (folder / CONFIG).is_file() else ""
    raise UserError(f"--out {folder} is not empty (it holds {_contents(folder)[0]}). Give a new or empty folder{more}.")


def _contents(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".new-"))
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}). Give a folder of yours.") from error


def _default_folder(config: TrainConfig, group: Group) -> Path:
    name = Path(config.data).expanduser().resolve().stem
    if group.restarted:  # the first start chose a name; go on there
        for folder in sorted(Path("runs").glob(f"{name}-*"), reverse=True):
            if (folder / CONFIG).is_file() and not (folder / SUMMARY).exists():
                return folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{name}-{stamp}"
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{stamp}-{number}"
    return folder


def _checkpoint(folder: Path, name: str) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run was stopped before its first one."""
    store = CheckpointStore(folder / CHECKPOINTS)
    if name == "last" and not store.list():
        return None
    try:
        return store.load(name)
    except CheckpointError as error:
        if error.alternative is None:
            raise
        command = f"metanudge train --resume {shlex.quote(str(folder / CHECKPOINTS / error.alternative))}"
        raise UserError(f"{error} Continue from it with: {command}") from error


def _check_unchanged(plan: Plan, config: TrainConfig) -> None:
    assert plan.saved is not None
    changed = dataclasses.replace(plan.saved, out=config.out).differences(config)
    fixed = [name for name in changed if name not in MAY_CHANGE or (name == "iterations" and config.schedule == "cosine")]
    if fixed:
        detail = "; ".join(f"{flag(name)} was {changed[name][0]!r}, now {changed[name][1]!r}" for name in fixed)
        raise UserError(
            f"{plan.folder} was started with another configuration ({detail}), and would not be the same run any more. Leave these flags "
            f"out to continue it, or start a new run with another --out. A resumed run may change {', '.join(map(flag, MAY_CHANGE))}."
        )
    done = plan.checkpoint.step if plan.checkpoint is not None else 0
    if config.iterations < done:
        raise UserError(f"--iterations {config.iterations}: {plan.folder} has already done {done} meta-steps. Give {done} or more.")


def _try_out(learner: MetaLearner, source: Episodes, config: TrainConfig) -> None:
    """One task through the learner before anything is written: a model that does not fit the data fails here."""
    batch = source.batch([0])
    inputs, _ = batch[0].query
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = copy.deepcopy(learner.model)(inputs)  # a copy: BatchNorm would note the batch's statistics
    except Exception as error:
        raise UserError(f"--model {config.model} cannot take the data, inputs of shape {tuple(inputs.shape)}: {error}") from error
    wanted = (len(inputs), source.num_outputs)
    if isinstance(outputs, Tensor) and tuple(outputs.shape) != wanted:
        raise UserError(
            f"--model {config.model} gives outputs of shape {tuple(outputs.shape)} for {len(inputs)} examples; the tasks need {wanted}. "
            "Give it as many outputs as there are ways (1 for regression)."
        )
    try:
        learner.meta_gradient(batch, seed=0)
    except (NonFiniteError, torch.OutOfMemoryError):
        pass  # the training loop deals with these
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(str(error)) from error


def _claim(folder: Path, config: TrainConfig) -> None:
    """Make the folder and write the configuration, which makes it a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / CONFIG, config.to_json())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}). Give a folder of yours on a disk with space left: --out FOLDER"
        ) from error


def write_file(file: Path, text: str) -> None:
    """Write a file that is there complete or not at all."""
    temporary = file.with_name(f".new-{file.name}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


# --- The loop --------------------------------------------------------------------------------------------------------


class Trainer:
    """One run, from its first or its next meta-step to its summary."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        source: Episodes,
        learner: MetaLearner,
        optimizer: torch.optim.Optimizer,
        group: Group,
        stop: StopRequest,
        reporter: Reporter,
    ) -> None:
        self.config, self.folder, self.source, self.learner, self.optimizer = config, plan.folder, source, learner, optimizer
        self.group, self.stop, self.reporter = group, stop, reporter
        self.device = choose_device(config)
        self.store = CheckpointStore(self.folder / CHECKPOINTS)
        state = plan.checkpoint.state if plan.checkpoint is not None else {}
        self.step = plan.checkpoint.step if plan.checkpoint is not None else 0
        self.best: dict[str, Any] | None = state.get("best")
        self.saved_step = self.step if plan.checkpoint is not None else None
        if config.chunk is None and state.get("chunk") is not None:
            self.learner.chunk = state["chunk"]
        self._lrs = state.get("lrs") or [float(g["lr"]) for g in optimizer.param_groups]
        self._diverged: list[bool] = []
        self._warned = False
        self._began = time.monotonic()
        self._log: MetricsLog | None = None
        self._timing: Timing | None = None
        self._sinks: list[Sink] = []
        self._resumed = plan.saved is not None
        if group.leads:
            self._log = MetricsLog(self.folder / METRICS, size=state.get("metrics_size", 0))
            if not self._log.complete:
                reporter.note(f"{METRICS} is shorter than it was when the checkpoint was saved: some lines are missing.")
            self._timing = Timing(self.folder / TIMING)
            self._sinks = open_sinks(config, self.folder)

    def run(self) -> None:
        """Train, test, write the summary."""
        self.reporter.begin(self.facts(), total=self.config.iterations, done=self.step)
        while self.step < self.config.iterations:
            stopped = self._meta_step()
            if stopped is not None:
                self._stop(stopped)
        self.reporter.end()
        self._finish()

    def facts(self) -> list[tuple[str, str]]:
        """What is being trained, for the top of the screen."""
        config, source = self.config, self.source
        shape = f"{source.ways}-way {source.shots}-shot, {source.queries} queries" if source.kind == "classification" else (
            f"regression, {source.shots} support and {source.queries} query points"
        )  # fmt: skip
        own = self.group.slice(config.tasks)
        engine, why = self.learner.choose_engine(source.batch(range(max(1, len(own)))))
        trainable = sum(p.numel() for p in self.learner.parameters() if p.requires_grad)
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        where = f"{device}, {config.dtype}" + (f", {config.precision}" if config.precision != "fp32" else "")
        return [
            ("data", f"{config.data}: {shape}; {config.tasks} tasks per meta-step"),
            ("model", f"{config.model}, {trainable:,} parameters, λ = {config.lam:g}"),
            ("estimator", f"{config.estimator} with {config.solver}"),
            ("optimizer", f"{config.optimizer}, {config.schedule}, {config.iterations} meta-steps"),
            ("engine", f"{engine.name} ({why})"),
            ("device", where + (f"; {self.group.world} processes" if self.group.world > 1 else "")),
            ("run", str(self.folder) + (f" (resumed at step {self.step})" if self._resumed else "")),
        ]

    # One meta-step

    def _meta_step(self) -> int | None:
        """One update of θ; returns a signal's number where the run should end now."""
        began = time.monotonic()
        gradient, values, stopped = self._gradient()
        self._set_lr()
        for name, parameter in self.learner.problem().parameters.items():
            parameter.grad = gradient[name].to(parameter.dtype)
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.learner.parameters(), self.config.clip)
        values["lr"] = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.monotonic() - began
        improved = False
        if self.config.eval_every and (self.step % self.config.eval_every == 0 or self.step == self.config.iterations):
            improved = self._validate(values)
        self._record(values, seconds)
        if improved or self.step % self.config.checkpoint_every == 0 or self.step == self.config.iterations:
            self._save(best=improved)
        return stopped

    def _gradient(self) -> tuple[Params, dict[str, Any], int | None]:
        """The mean meta-gradient over all ranks' tasks and its statistics; raises before anything is changed."""
        tasks, own = self.config.tasks, self.group.slice(self.config.tasks)
        seed = mix(self.config.seed, 3, self.step)
        failure: NonFiniteError | None = None
        gradient: Params = {}
        stats: Stats | None = None
        if len(own):
            batch = self.source.batch(range(self.step * tasks + own.start, self.step * tasks + own.stop))
            try:
                gradient, stats = self._with_memory(
                    partial(self.learner.meta_gradient, batch, metrics=self._measured, seed=seed, first=own.start),
                    rows=len(own) * self.learner.estimator.width,
                )
            except NonFiniteError as error:
                failure = error
        if self.group.world == 1:
            if failure is not None:
                self._not_finite(str(failure))
            assert stats is not None
            return gradient, self._values(stats, {name: getattr(stats, name) for name in _MEANS}), self.stop.signal
        return self._reduced(gradient, stats, failure)

    def _reduced(
        self, gradient: Params, stats: Stats | None, failure: NonFiniteError | None
    ) -> tuple[Params, dict[str, Any], int | None]:
        share = 0.0 if stats is None else stats.tasks / self.config.tasks
        sums = {name: 0.0 if stats is None else share * getattr(stats, name) for name in _MEANS}
        sums["nu"] = 0.0 if stats is None or stats.nu is None else share * stats.nu
        sums["error"] = 0.0 if stats is None or stats.error is None else share * stats.error * stats.gradient_norm
        sums["failed"] = float(failure is not None)
        for number in CODES:
            sums[f"signal {number}"] = float(self.stop.signal == number)
        if not gradient:
            problem = self.learner.problem()
            gradient = {n: torch.zeros_like(p, dtype=problem.theta_dtypes[n]) for n, p in problem.parameters.items()}
        gradient, sums = self.group.reduce(gradient, sums, share)
        if sums["failed"]:
            messages = [text for text in self.group.gather(str(failure) if failure is not None else None) if text]
            self._not_finite(messages[0])
        signals = [number for number in CODES if sums[f"signal {number}"]]
        values = self._values(stats, {name: sums[name] for name in _MEANS})
        norm = float(global_norm(list(gradient.values())))
        values |= {"nu": sums["nu"] or None, "error": sums["error"] / norm if sums["error"] and norm else None, "gradient_norm": norm}
        return gradient, values, (signals[0] if signals else None)

    def _values(self, stats: Stats | None, means: dict[str, float]) -> dict[str, Any]:
        self._watch_divergence(means["residual"] > means["residual_start"])
        rest = {"nu": stats.nu, "error": stats.error, "gradient_norm": stats.gradient_norm} if stats is not None else {}
        if not self._measured:
            means = {name: value for name, value in means.items() if not name.startswith("query_")}
        return {"step": self.step + 1, **means, **rest}

    @property
    def _measured(self) -> bool:
        """Whether this meta-step also measures query loss and accuracy: the first, the last and every so many."""
        number = self.step + 1
        return number in (1, self.config.iterations) or number % self.config.metrics_every == 0

    def _set_lr(self) -> None:
        if self.config.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * self.step / self.config.iterations))
            for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
                group["lr"] = lr * factor

    def _validate(self, values: dict[str, Any]) -> bool:
        """Add the validation's result to the values; returns whether it is the best so far."""
        result = self._evaluate("val", self.config.eval_tasks)
        loss, accuracy = result.mean_loss, result.mean_accuracy
        values |= {"val_loss": loss, "val_accuracy": accuracy, "val_accuracy_ci95": result.accuracy_ci95}
        score = -loss if math.isnan(accuracy) else accuracy
        if not math.isfinite(score) or (self.best is not None and score <= self.best["score"]):
            return False
        self.best = {"step": self.step, "score": score, "loss": loss, "accuracy": None if math.isnan(accuracy) else accuracy}
        return True

    def _evaluate(self, split: Split, count: int) -> Evaluation:
        """`learner.evaluate` over `count` tasks in batches of a meta-step's size, shared among the ranks batch by batch."""
        size = max(1, self.config.tasks * self.learner.estimator.width)
        columns = torch.zeros(4, count, dtype=torch.float64)
        for number, begin in enumerate(range(0, count, size)):
            if split == "test" and self.stop.signal is not None and self.group.world == 1:
                self._stop(self.stop.signal)
            if number % self.group.world != self.group.rank:
                continue
            end = min(begin + size, count)
            batch = self.source.batch(range(begin, end), split)
            result = self._with_memory(partial(self.learner.evaluate, batch, seed=mix(self.config.seed, 4)), rows=len(batch))
            columns[:, begin:end] = torch.stack([result.loss_before, result.accuracy_before, result.loss, result.accuracy])
        return Evaluation(*self.group.sum(columns))

    def _record(self, values: dict[str, Any], seconds: float) -> None:
        if self._log is None or self._timing is None:
            return
        memory = memory_used(self.device)
        self._log.write(values)
        self._timing.write(self.step, seconds, memory)
        for sink in self._sinks:
            sink.write(self.step, values)
        self.reporter.step(self.step, {**values, "memory": memory})

    # When something happens

    def _with_memory(self, call: Callable[[], T], *, rows: int) -> T:
        """Call, with half the chunk after each time the memory runs out."""
        while True:
            try:
                return call()
            except torch.OutOfMemoryError as error:
                message = str(error).splitlines()[0]
            except RuntimeError as error:
                if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
                    raise
                message = str(error).splitlines()[0]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            chunk = min(self.learner.chunk or rows, rows)
            engine, _ = self.learner.choose_engine(self.source.batch(range(self.config.tasks)))
            if engine.name == "inplace" or chunk <= 1:
                self._out_of_memory(message, engine.name)
            self.learner.chunk = chunk // 2
            self.reporter.note(f"Out of memory at step {self.step + 1} with {chunk} solves at once; going on with {self.learner.chunk}.")

    def _out_of_memory(self, message: str, engine: str) -> None:
        saved = self._save_if_sound()
        fix = "Use --engine inplace" if engine == "stacked" and "inplace" in self.learner.estimator.engines else "Use a smaller model"
        raise StopTraining(
            f"Out of memory at meta-step {self.step + 1}, one solve at a time ({message}). {saved} {fix}, --precision bf16, fewer "
            "--shots or --queries, or a device with more memory.",
            EXIT_OUT_OF_MEMORY,
        )

    def _not_finite(self, message: str) -> None:
        saved = self._save_if_sound()
        raise StopTraining(f"Stopped at meta-step {self.step + 1}, before the update. {message} {saved}", EXIT_NOT_FINITE)

    def _save_if_sound(self) -> str:
        """Save the present state unless θ itself is broken; says what was done."""
        if not all(bool(torch.isfinite(p).all()) for p in self.learner.parameters()):
            before = f"step {self.saved_step}" if self.saved_step is not None else "none"
            return f"θ itself is not finite after meta-step {self.step}, so no checkpoint was written (the last one: {before})."
        self._save()
        return f"The state after meta-step {self.step} is saved in {self.folder}."

    def _stop(self, number: int) -> None:
        self._save()
        name = "Interrupted" if CODES[number] == 130 else "Asked to stop"
        raise StopTraining(
            f"{name}. Meta-step {self.step} is saved; go on with: metanudge train --resume {shlex.quote(str(self.folder))}", CODES[number]
        )

    def _watch_divergence(self, diverged: bool) -> None:
        self._diverged = [*self._diverged[-_RECENT + 1 :], diverged]
        if not self._warned and len(self._diverged) == _RECENT and sum(self._diverged) > _RECENT / 2:
            self._warned = True
            self.reporter.note(
                f"The inner residual grew in {sum(self._diverged)} of {_RECENT} meta-steps: the inner steps overshoot. Training may "
                "work all the same; for accurate meta-gradients use a smaller lr in --solver or a larger --lam."
            )

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if not self.group.leads or (self.saved_step == self.step and not best):
            return
        assert self._log is not None
        self._log.sync()
        state = {
            "config": self.config.to_dict(),
            "shapes": DataShapes.of(self.source).to_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lrs": self._lrs,
            "best": self.best,
            "chunk": self.learner.chunk,
            "metrics_size": self._log.size,
        }
        self.store.save(self.step, {"model": self.learner.model.state_dict()}, state, best=best)
        self.saved_step = self.step

    # The end

    def _finish(self) -> None:
        """Test the best weights, write summary and picture, show the table."""
        which = "best" if self.best is not None else "last"
        test: dict[str, Any] | None = None
        if self.config.test_tasks:
            if which == "best":
                load_weights(self.learner, self.group.share(lambda: self.store.load("best")))
            result = self._evaluate("test", self.config.test_tasks)
            loss_ci = float(1.96 * result.loss.std() / math.sqrt(len(result.loss))) if len(result.loss) > 1 else math.nan
            test = {
                "tasks": len(result.loss),
                "loss": result.mean_loss,
                "loss_ci95": loss_ci,
                "loss_before": float(result.loss_before.mean()),
                "accuracy": result.mean_accuracy,
                "accuracy_ci95": result.accuracy_ci95,
                "accuracy_before": float(result.accuracy_before.mean()),
            }
            test = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in test.items()}
        if self.group.leads:
            self._summarise(which, test)

    def _summarise(self, which: str, test: dict[str, Any] | None) -> None:
        config, rows = self.config, read_metrics(self.folder / METRICS)
        seconds = time.monotonic() - self._began
        step = self.best["step"] if self.best is not None else self.step
        summary = {
            "version": __version__,
            "torch": torch.__version__,
            "device": str(self.device),
            "processes": self.group.world,
            "parameters": sum(p.numel() for p in self.learner.parameters() if p.requires_grad),
            "steps": self.step,
            "checkpoint": which,
            "checkpoint_step": step,
            "validation": self.best,
            "test": test,
            "seconds": round(seconds, 3),
        }
        write_file(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        title = f"{Path(config.data).name} · {config.model.split(':')[0]} · {config.estimator}"
        learning_curve(rows, self.folder / CURVE, title=title, test=test)
        lines = [("meta-steps", f"{self.step} in {clock(seconds)}" + (" (this part of the run)" if self._resumed else ""))]
        if self.best is not None:
            good = f"{self.best['accuracy']:.2%}" if self.best["accuracy"] is not None else f"loss {self.best['loss']:.4g}"
            lines.append(("best validation", f"{good} at step {step} ({config.eval_tasks} tasks)"))
        if test is not None:
            if test["accuracy"] is not None:
                lines.append(
                    (
                        "test accuracy",
                        f"{test['accuracy']:.2%} ± {test['accuracy_ci95'] or math.nan:.2%} (95 % CI, {test['tasks']} tasks)",
                    )
                )
                lines.append(("before adaptation", f"{test['accuracy_before']:.2%}"))
            lines.append(
                (
                    "test loss",
                    f"{_number(test['loss'])} ± {_number(test['loss_ci95'])} (before adaptation {_number(test['loss_before'])})",
                )
            )
        lines += [("curve", str(self.folder / CURVE)), ("summary", str(self.folder / SUMMARY))]
        self.reporter.table("Result", lines)

    def close(self) -> None:
        """Close the files."""
        for thing in (self._log, self._timing, *self._sinks):
            if thing is not None:
                thing.close()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


__all__ = ["MAY_CHANGE", "Trainer", "train"]
