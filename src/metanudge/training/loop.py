"""The training loop: every meta-step is a function of (configuration, step, state), so a run can
stop anywhere and go on.

Episode b of meta-step s is episode s·tasks + b of the source, and everything random is seeded by
(seed, s). A checkpoint holds θ, the optimizer's state and the length of the metrics file; a resumed
run cuts the file back to it and writes the same bytes again. Where a signal came before a meta-step
was validated, the checkpoint also holds its line, and the resumed run begins with the validation.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from metanudge.engines.randomness import mix
from metanudge.estimators import NonFiniteError, Stats
from metanudge.evaluation import Evaluation
from metanudge.learner import MetaLearner
from metanudge.params import Params
from metanudge.tasks import Episodes
from metanudge.tasks.ahead import Ahead
from metanudge.tasks.episodes import Split
from metanudge.training.checkpoint import CheckpointError, CheckpointStore
from metanudge.training.combine import Own, combine
from metanudge.training.config import TrainConfig
from metanudge.training.distributed import Group
from metanudge.training.divergence import DivergenceWatch
from metanudge.training.duration import DurationWatch
from metanudge.training.environment import environment
from metanudge.training.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    StopTraining,
)
from metanudge.training.memory import OutOfMemory, halving
from metanudge.training.metrics import MetricsLog, Sink, Timing, open_sinks
from metanudge.training.plan import Plan
from metanudge.training.progress import Reporter, memory_used
from metanudge.training.runs import (
    CHECKPOINTS,
    METRICS,
    TIMING,
    DataShapes,
    choose_device,
    load_weights,
    weights_of,
)
from metanudge.training.signals import CODES, PATIENCE, Interrupted, StopRequest
from metanudge.training.stiffness import stiffness
from metanudge.training.summary import Outcome, facts, result_table, tested, write_summary
from metanudge.training.trust import own_code
from metanudge.tuning import NuEstimate, NuTuner, is_automatic
from metanudge.version import __version__

T = TypeVar("T")


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
        self.config, self.folder, self.source, self.learner, self.optimizer = (
            config,
            plan.folder,
            source,
            learner,
            optimizer,
        )
        self.group, self.stop, self.reporter = group, stop, reporter
        self.device = choose_device(config)
        self.store = CheckpointStore(self.folder / CHECKPOINTS)
        state = plan.checkpoint.state if plan.checkpoint is not None else {}
        self.step = plan.checkpoint.step if plan.checkpoint is not None else 0
        self._ahead = Ahead(source)
        self.best: dict[str, Any] | None = state.get("best")
        self.saved_step = self.step if plan.checkpoint is not None else None
        self._pending: dict[str, Any] | None = state.get("pending")
        if config.chunk is None and state.get("chunk") is not None:
            self.learner.chunk = state["chunk"]
        learner.tuner = NuTuner()  # trying the learner out may have chosen a ν already
        if state.get("tuner") is not None:
            learner.tuner.load_state_dict(state["tuner"])
        self._lrs = state.get("lrs") or [float(g["lr"]) for g in optimizer.param_groups]
        rate = getattr(learner.solver, "lr", None)
        self._watch = DivergenceWatch(rate, config.lam)
        self._duration = (
            DurationWatch(config, width=learner.estimator.width, done=self.step)
            if self.device.type == "cpu"
            else None
        )
        self._began = time.monotonic()
        self._log: MetricsLog | None = None
        self._timing: Timing | None = None
        self._sinks: list[Sink] = []
        self._resumed = plan.saved is not None
        if group.leads:
            self._log = MetricsLog(self.folder / METRICS, size=state.get("metrics_size", 0))
            if self._log.size < state.get("metrics_size", 0):
                reporter.note(
                    f"{METRICS} is not there any more: it begins anew with step {self.step + 1}."
                )
            self._timing = Timing(self.folder / TIMING)
            self._sinks = open_sinks(config, self.folder)

    def run(self) -> None:
        """Train, test, write the summary."""
        about = facts(self.config, self.source, self.learner, self.group)
        where = str(self.folder) + (f" (resumed at step {self.step})" if self._resumed else "")
        self.reporter.begin([*about, ("run", where)], total=self.config.iterations, done=self.step)
        if self.config.compile and self.learner.problem().device.type == "cuda":
            self.reporter.note(
                "The first meta-steps build kernels for this GPU: up to half a minute, seconds"
                " where they are cached."
            )
        if self._pending is not None:
            self.saved_step = None  # the checkpoint lacks the validation's result
            self._complete(0.0)
        if self.config.precision == "tf32" and self.device.type == "cpu":
            self.reporter.note(
                "--precision tf32 is for NVIDIA GPUs and changes nothing on a CPU: this run"
                " computes in fp32."
            )
        while self.step < self.config.iterations:
            stopped = self._meta_step()
            if stopped is not None:
                self._stop(stopped)
        self.reporter.end()
        self._finish()

    # One meta-step

    def _meta_step(self) -> int | None:
        """One update of θ; returns a signal's number where the run should end now."""
        began = time.monotonic()
        gradient, values, stopped = self._gradient()
        self._set_lr()
        for name, parameter in self.learner.problem().meta_parameters.items():
            parameter.grad = gradient[name].to(parameter)
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.learner.parameters(), self.config.clip)
        values["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if self._measured:
            values |= stiffness(self.learner)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._pending = values
        self._complete(time.monotonic() - began)
        return stopped

    def _complete(self, seconds: float) -> None:
        """Validate where it is time, write the meta-step down, and save where it is time."""
        assert self._pending is not None
        values, improved = dict(self._pending), False
        if self.config.eval_every and (
            self.step % self.config.eval_every == 0 or self.step == self.config.iterations
        ):
            improved = self._validate(values)
        self._record(values, seconds)
        self._pending = None
        if (
            improved
            or self.step % self.config.checkpoint_every == 0
            or self.step == self.config.iterations
        ):
            self._save(best=improved)

    def _gradient(self) -> tuple[Params, dict[str, Any], int | None]:
        """The mean meta-gradient over all ranks' tasks, its statistics and a signal; raises before
        anything is changed.
        """
        tasks, own = self.config.tasks, self.group.slice(self.config.tasks)
        seed = mix(self.config.seed, 3, self.step)
        self._choose_nu(seed)
        failure: NonFiniteError | None = None
        gradient: Params = {}
        stats: Stats | None = None
        broken_off = False
        if len(own):
            now = range(self.step * tasks + own.start, self.step * tasks + own.stop)
            then = range(now.start + tasks, now.stop + tasks)
            batch = self._ahead.batch(now, then=then if self.device.type == "cuda" else None)
            try:
                with self.stop.interruptible(PATIENCE):
                    gradient, stats = self._with_memory(
                        partial(
                            self.learner.meta_gradient,
                            batch,
                            metrics=self._measured,
                            seed=seed,
                            first=own.start,
                        ),
                        rows=len(own) * self.learner.estimator.width,
                    )
            except NonFiniteError as error:
                failure = error
            except Interrupted:
                gradient, stats, broken_off = {}, None, True
        result = combine(
            Own(gradient, stats, failure, self.stop.signal, broken_off),
            self.group,
            self.learner,
            tasks=tasks,
        )
        if result.broken_off:
            assert result.signal is not None
            self._stop(result.signal)
        if result.failure is not None:
            self._not_finite(result.failure)
        warning = self._watch.see(result.values["residual_start"], result.values["residual"])
        if warning is not None:
            self.reporter.note(warning)
        kept = {
            name: value
            for name, value in result.values.items()
            if self._measured or not name.startswith("query_")
        }
        return result.gradient, {"step": self.step + 1, **kept}, result.signal

    def _choose_nu(self, seed: int) -> None:
        """Where ν is automatic and it is time, rank 0 chooses it on the first tasks of this
        meta-step, for all ranks.
        """
        tuner, tasks = self.learner.tuner, self.config.tasks
        if not is_automatic(self.learner.estimator) or self.step % tuner.interval(tasks):
            return

        def choose() -> tuple[dict[str, Any], NuEstimate] | int | None:
            few, own = tuner.tasks(tasks), max(1, len(self.group.slice(tasks)))
            batch = self.source.batch(range(self.step * tasks, self.step * tasks + few))
            look = partial(
                self.learner.choose_nu, batch, seed=seed, rungs_at_once=max(1, own // few)
            )
            before = tuner.state_dict()
            try:
                with self.stop.interruptible(PATIENCE):
                    found = self._with_memory(
                        look, rows=max(own, few) * self.learner.estimator.width
                    )
            except Interrupted:
                tuner.load_state_dict(before)
                return self.stop.signal
            return tuner.state_dict(), found

        chosen = self.group.share(choose)
        if not isinstance(chosen, tuple):
            assert chosen is not None
            self._stop(chosen)
        state, found = chosen
        tuner.load_state_dict(state)
        tuner.last = found
        # of ε the tuner has warned
        warning = self._watch.see_error(found.error) if found.symbol == "ν" else None
        if warning is not None:
            self.reporter.note(warning)

    @property
    def _measured(self) -> bool:
        """Whether this meta-step also measures query loss and accuracy: the first, the last and
        every so many.
        """
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
        values |= {
            "val_loss": loss,
            "val_accuracy": accuracy,
            "val_accuracy_ci95": result.accuracy_ci95,
        }
        score = -loss if math.isnan(accuracy) else accuracy
        if not math.isfinite(score) or (self.best is not None and score <= self.best["score"]):
            return False
        self.best = {
            "step": self.step,
            "score": score,
            "loss": loss,
            "accuracy": None if math.isnan(accuracy) else accuracy,
        }
        return True

    def _evaluate(self, split: Split, count: int) -> Evaluation:
        """`learner.evaluate` over `count` tasks in batches of a meta-step's size, one for each rank
        at a time.

        A signal ends it, for all ranks after the same batch: what was measured is measured again
        when the run goes on.
        """
        size = max(1, self.config.tasks * self.learner.estimator.width)
        columns = torch.zeros(4, count, dtype=torch.float64)
        self._stop_if_asked()
        for first in range(0, count, size * self.group.world):
            begin = first + size * self.group.rank
            places = range(begin, min(begin + size, count))
            if len(places):
                with suppress(Interrupted), self.stop.interruptible(PATIENCE):
                    batch = self.source.batch(places, split)
                    result = self._with_memory(
                        partial(self.learner.evaluate, batch, seed=mix(self.config.seed, 4)),
                        rows=len(batch),
                    )
                    measured = torch.stack(
                        [result.loss_before, result.accuracy_before, result.loss, result.accuracy]
                    )
                    columns[:, places.start : places.stop] = measured
            self._stop_if_asked()
        return Evaluation(*self.group.sum(columns))

    def _stop_if_asked(self) -> None:
        """Save and stop if any rank was asked to; every rank must come by."""
        signal = self.group.agree(self.stop.signal)
        if signal is not None:
            self._stop(signal)

    def _record(self, values: dict[str, Any], seconds: float) -> None:
        if self._log is None or self._timing is None:
            return
        memory = memory_used(self.device)
        with self._writing():
            self._log.write(values)
            self._timing.write(self.step, seconds, memory)
            for sink in self._sinks:
                sink.write(self.step, values)
        self.reporter.step(self.step, {**values, "memory": memory})
        long = self._duration.see(seconds) if self._duration is not None else None
        if long is not None:
            self.reporter.note(long)

    # When something happens

    def _with_memory(self, call: Callable[[], T], *, rows: int) -> T:
        """Call, with half the chunk after each time the memory runs out."""
        try:
            return halving(
                call,
                self.learner,
                rows=rows,
                halves=lambda: self._engine() != "inplace",
                note=self._note_halving,
            )
        except OutOfMemory as error:
            self._out_of_memory(str(error), self._engine())

    def _engine(self) -> str:
        return self.learner.choose_engine(self.source.batch(range(self.config.tasks)))[0].name

    def _note_halving(self, before: int, now: int) -> None:
        self.reporter.note(
            f"Out of memory at step {self.step + 1} with {before} solves at once; going on with"
            f" {now}."
        )

    def _out_of_memory(self, message: str, engine: str) -> NoReturn:
        saved = self._save_if_sound()
        fix = (
            "Use --engine inplace"
            if engine == "stacked" and "inplace" in self.learner.estimator.engines
            else "Use a smaller model"
        )
        raise StopTraining(
            f"Out of memory at meta-step {self.step + 1}, one solve at a time ({message}). {saved}"
            f" {fix}, --precision bf16, fewer --shots or --queries, or a device with more memory.",
            EXIT_OUT_OF_MEMORY,
        )

    def _not_finite(self, message: str) -> NoReturn:
        saved = self._save_if_sound()
        raise StopTraining(
            f"Stopped at meta-step {self.step + 1}, before the update. {message} {saved}",
            EXIT_NOT_FINITE,
        )

    def _save_if_sound(self) -> str:
        """Save the present state unless θ itself is broken; says what was done."""
        if not all(bool(torch.isfinite(p).all()) for p in self.learner.parameters()):
            before = f"step {self.saved_step}" if self.saved_step is not None else "none"
            return (
                f"θ itself is not finite after meta-step {self.step}, so no checkpoint was written"
                f" (the last one: {before})."
            )
        self._save()
        return f"The state after meta-step {self.step} is saved in {self.folder}."

    def _stop(self, number: int) -> NoReturn:
        self._save()
        name = "Interrupted" if CODES[number] == 130 else "Asked to stop"
        trust = " --trust" if own_code(self.config.model) else ""
        raise StopTraining(
            f"{name}. Meta-step {self.step} is saved; go on with: metanudge train --resume"
            f" {shlex.quote(str(self.folder))}{trust}",
            CODES[number],
        )

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if not self.group.leads or (self.saved_step == self.step and not best):
            return
        assert self._log is not None
        state = {
            "version": __version__,
            "environment": environment(self.device, processes=self.group.world),
            "config": self.config.to_dict(),
            "data_sha256": self.source.fingerprint(),
            "shapes": DataShapes.of(self.source).to_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lrs": self._lrs,
            "best": self.best,
            "chunk": self.learner.chunk,
            "tuner": (
                self.learner.tuner.state_dict() if is_automatic(self.learner.estimator) else None
            ),
            "metrics_size": self._log.size,
            "metrics_sha256": self._log.sha256,
        }
        if self._pending is not None:
            state["pending"] = self._pending
        weights = {part: module.state_dict() for part, module in weights_of(self.learner).items()}
        with self._writing():
            self._log.sync()
            self.store.save(self.step, weights, state, best=best)
        self.saved_step = self.step

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Stop in good order where the run folder is gone or takes no more; never make it anew."""
        assert self._log is not None
        if not self._log.in_place:
            raise StopTraining(
                f"{self.folder} was deleted or moved while meta-step {self.step} was trained, so"
                " there is nowhere to write to. Stopped; nothing was made in its place. If it was"
                " moved, go on with: metanudge train --resume NEW-PLACE",
                EXIT_CANNOT_WRITE,
            )
        try:
            yield
        except (OSError, CheckpointError) as error:
            what = (
                str(error)
                if isinstance(error, CheckpointError)
                else f"{self.folder} cannot be written ({error.strerror or error})."
            )
            kept = (
                f"The checkpoint of meta-step {self.saved_step} is intact."
                if self.saved_step is not None
                else "No checkpoint was written yet."
            )
            raise StopTraining(
                f"Stopped at meta-step {self.step}. {what} {kept} When there is space, go on with: "
                f"metanudge train --resume {shlex.quote(str(self.folder))}",
                EXIT_CANNOT_WRITE,
            ) from error

    # The end

    def _finish(self) -> None:
        """Test the best weights, write summary and picture, show the table."""
        test: dict[str, Any] | None = None
        if self.config.test_tasks:
            if self.best is not None:
                load_weights(self.learner, self.group.share(lambda: self.store.load("best")))
            test = tested(self._evaluate("test", self.config.test_tasks))
        if self.group.leads:
            outcome = Outcome(
                step=self.step,
                best=self.best,
                test=test,
                seconds=time.monotonic() - self._began,
                resumed=self._resumed,
            )
            with self._writing():
                write_summary(
                    self.folder,
                    self.config,
                    outcome,
                    self.learner,
                    processes=self.group.world,
                    note=self.reporter.note,
                )
            self.reporter.table(
                "Result", result_table(self.folder, self.config, outcome, self.learner)
            )

    def close(self) -> None:
        """Close the files."""
        for thing in (self._log, self._timing, *self._sinks):
            if thing is not None:
                # a line that did not fit on the disk; the run has stopped because of it
                with suppress(OSError):
                    thing.close()
