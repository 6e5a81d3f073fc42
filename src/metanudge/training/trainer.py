"""`train`: from a configuration to a finished run. Everything is checked before anything is
written.

A run writes one line of metrics per meta-step, and its checkpoints hold the length of that file: a
resumed run cuts it back and writes the same bytes again. Where a signal came before a meta-step was
validated, the checkpoint also holds its line, and the resumed run begins with the validation.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from metanudge.estimators import NonFiniteError
from metanudge.spread import local
from metanudge.training.checkpoint import CheckpointStore
from metanudge.training.checkpoint.sharded import hollow
from metanudge.training.checkpoint.store import contents_of
from metanudge.training.config import TrainConfig
from metanudge.training.continuing import Plan
from metanudge.training.device import computing_in
from metanudge.training.distributed import Group
from metanudge.training.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_DONE,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_SIGINT,
    PATIENCE,
    CheckpointError,
    Interrupted,
    StopRequest,
    StopTraining,
)
from metanudge.training.files import RunLock
from metanudge.training.loop import OutOfMemory, Surroundings, Trainer, load_weights, weights_of
from metanudge.training.metrics import MetricsLog
from metanudge.training.preparation import (
    advice_of_plan,
    claim,
    make_plan,
    make_trainer,
    read_data,
    try_out,
)
from metanudge.training.progress import (
    ConsoleReporter,
    DivergenceWatch,
    DurationWatch,
    Quiet,
    Reporter,
    memory_used,
)
from metanudge.training.runs import CHECKPOINTS, METRICS, TIMING
from metanudge.training.shards import sharded
from metanudge.training.sinks import Sink, open_sink
from metanudge.training.summary import (
    Outcome,
    compared,
    facts,
    recorded,
    remarks,
    result_table,
    tested,
    write_summary,
)
from metanudge.training.trust import named_code


def train(
    config: TrainConfig,
    *,
    resume: Path | None = None,
    reporter: Reporter | None = None,
    allow_changed_data: bool = False,
) -> int:
    """Train as configured, or continue the run in the folder `resume` (also on data that have
    changed, if allowed); returns 0.

    Raises `UserError` for what the user can put right (nothing is written then), `StopTraining`
    where a run ends early.
    """
    with StopRequest() as stop:
        stop.patience = 0.0  # until something is written
        group = Group.from_environment()
        reporter = reporter or (ConsoleReporter() if group.leads else Quiet())
        try:
            with RunLock(reporter.note, job=group.job) as lock:
                config.check()
                if config.shard > 1:
                    group = sharded(group, config)
                around = Surroundings(group, stop, reporter.note)
                plan = group.share(lambda: make_plan(config, resume, group, lock), Plan.hollow)
                config, source = read_data(config, plan, around, allow_changed_data)
                trainer = make_trainer(config, plan, source, around)
                if plan.checkpoint is not None:
                    plan = plan.hollow()  # what was read need not be held to the end
                with computing_in(config.precision, source.device):
                    share = config.tasks // group.world
                    if advice := advice_of_plan(trainer.learner, source, share):
                        around.note(f"Memory may not suffice. {advice}")
                    products = try_out(trainer.learner, source, config)
                    stop.patience = None
                    folder = group.share(lambda: claim(plan, config, lock))
                    config = dataclasses.replace(config, out=str(folder))
                    with Training(config, plan, trainer, reporter, products) as training:
                        training.run()
        finally:
            group.close()
    return EXIT_DONE


class Training:
    """A run, from its first or its next meta-step to its summary: what is validated, written down,
    saved and told around the meta-steps of a trainer.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        trainer: Trainer,
        reporter: Reporter,
        products: str | None,
    ) -> None:
        self.config, self.trainer, self.reporter = config, trainer, reporter
        self._products = products
        self.folder, self.resumed = Path(str(config.out)), plan.saved is not None
        self.learner, self.group = trainer.learner, trainer.around.group
        several = f"torchrun --nproc-per-node={self.group.world} -m " * (self.group.shards > 1)
        self._again = f"{several}metanudge train --resume {shlex.quote(str(self.folder))}"
        self.device = trainer.source.device
        self.store = CheckpointStore(self.folder / CHECKPOINTS)
        state = plan.checkpoint.state if plan.checkpoint is not None else {}
        self.best: dict[str, Any] | None = state.get("best")
        self.saved_step = trainer.step if plan.checkpoint is not None else None
        # of a meta-step that is not validated yet
        self._pending: dict[str, Any] | None = state.get("pending")
        self._watch = DivergenceWatch(getattr(self.learner.solver, "lr", None), config.lam)
        self._duration = DurationWatch(
            config, width=self.learner.estimator.width, done=trainer.step
        )
        self._began = time.monotonic()
        self._log: MetricsLog | None = None
        self._timing: MetricsLog | None = None
        self._sinks: list[Sink] = []
        if self.group.leads:
            size = state.get("metrics_size", 0)
            self._log = MetricsLog(self.folder / METRICS, size=size)
            if self._log.size < size:
                reporter.note(
                    f"{METRICS} is not there any more: it begins anew with step {trainer.step + 1}."
                )
            self._timing = MetricsLog(self.folder / TIMING)
            settings = config.to_dict()
            self._sinks = [open_sink(name, self.folder, settings) for name in config.sinks]

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.reporter.end()
        for thing in (self._log, self._timing, *self._sinks):
            if thing is not None:
                # a line that did not fit on the disk; the run has stopped because of it
                with suppress(OSError):
                    thing.close()

    def run(self) -> None:
        """Train, test, write the summary."""
        config, trainer = self.config, self.trainer
        about = facts(config, trainer.source, self.learner, self.group, self._products)
        where = str(self.folder) + (f" (resumed at step {trainer.step})" if self.resumed else "")
        self.reporter.begin([*about, ("run", where)], total=config.iterations, done=trainer.step)
        for remark in remarks(config, self.device):
            self.reporter.note(remark)
        with self._stopping_in_order():
            if self._pending is not None:
                self.saved_step = None  # the checkpoint lacks the validation's result
                self._complete(self._pending, 0.0)
            trainer.on_step, trainer.done = self._after_step, self._out_of_patience()
            trainer.run()
            self.reporter.end()
            self._finish()

    def _after_step(self, step: int, values: dict[str, Any]) -> None:
        look = self.learner.tuner.last
        warnings = (
            self._watch.see(values["residual_start"], values["residual"]),
            # of ε the tuner warns itself
            self._watch.see_error(look.error) if look is not None and look.symbol == "ν" else None,
        )
        for warning in filter(None, warnings):
            self.reporter.note(warning)
        self._complete(values, self.trainer.seconds)

    def _complete(self, values: dict[str, Any], seconds: float) -> None:
        """Validate where it is time, write the meta-step down, and save where it is time."""
        self._pending, values, improved = values, dict(values), False
        step, last = self.trainer.step, self.trainer.step == self.config.iterations
        if self.config.eval_every and (step % self.config.eval_every == 0 or last):
            improved = self._validate(values)
        self.trainer.done = self._out_of_patience()
        self._record(values, seconds)
        self._pending = None
        last = last or self.trainer.done
        if improved or step % self.config.checkpoint_every == 0 or last:
            self._save(best=improved)

    def _out_of_patience(self) -> bool:
        most = (self.config.patience or 0) * self.config.eval_every
        return most > 0 and self.best is not None and self.trainer.step - self.best["step"] >= most

    def _validate(self, values: dict[str, Any]) -> bool:
        """Add the validation's result to the values; returns whether it is the best so far."""
        result = self.trainer.evaluate("val", self.config.eval_tasks)
        loss, accuracy = result.mean_loss, result.mean_accuracy
        values |= {
            "val_loss": loss,
            "val_accuracy": accuracy,
            "val_accuracy_ci95": result.accuracy_ci95,
            **{f"val_{name}": float(value.mean()) for name, value in result.extra.items()},
        }
        score = -loss if math.isnan(accuracy) else accuracy
        if not math.isfinite(score) or (self.best is not None and score <= self.best["score"]):
            return False
        self.best = {
            "step": self.trainer.step,
            "score": score,
            "loss": loss,
            "accuracy": None if math.isnan(accuracy) else accuracy,
            "tasks": len(result.loss),
        }
        return True

    def _record(self, values: dict[str, Any], seconds: float) -> None:
        if self._log is None or self._timing is None:
            return
        step, memory = self.trainer.step, memory_used(self.device)
        with self._writing():
            self._log.write(values)
            timing = {"step": step, "seconds": round(seconds, 6), "memory_bytes": memory}
            self._timing.write({**timing, "time": round(time.time(), 3)})
            for sink in self._sinks:
                sink.write(step, values)
        self.reporter.step(step, {**values, "memory": memory})
        long = self._duration.see(seconds) if self.device.type == "cpu" else None
        if long is not None:
            self.reporter.note(long)

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint of this step, unless there is one; all ranks of a model must come."""
        step, together = self.trainer.step, self.group.shards > 1
        if not (self.group.leads or together) or (self.saved_step == step and not best):
            return
        about = recorded(self.config, self.trainer.source, processes=self.group.world)
        state = about | self.trainer.state() | {"best": self.best}
        if self._log is not None:
            state |= {"metrics_size": self._log.size, "metrics_sha256": self._log.sha256}
        if self._pending is not None:
            state["pending"] = self._pending
        contents = contents_of(weights_of(self.learner), state, spread=together)

        def write() -> None:
            assert self._log is not None
            with self._writing():
                self._log.sync()
                self.store.add(step, contents, best=best)

        (self.group if together else Group()).hand_in(contents, write)
        self.saved_step = step

    def _finish(self) -> None:
        """Test the best weights, write summary and picture, show the table."""
        test: dict[str, Any] | None = None
        beside = None
        if self.config.test_tasks:
            if self.best is not None:
                found = self.group.share(lambda: self.store.load("best"), hollow)
                load_weights(self.learner, found, self.group)
            result = self.trainer.evaluate("test", self.config.test_tasks)
            test = tested(result)
            if self.group.leads:
                classes = self.trainer.source.kind == "classification"
                own = result.accuracy if classes else result.loss
                with self.trainer.around.stop.interruptible(PATIENCE):
                    beside = compared(
                        self.config, self.trainer.source, own, untrained=self.group.shards == 1
                    )
        if not self.group.leads:
            return
        seconds = time.monotonic() - self._began
        outcome = Outcome(self.trainer.step, self.best, test, beside, seconds, self.resumed)
        with self._writing():
            write_summary(
                self.folder,
                self.config,
                outcome,
                self.learner,
                processes=self.group.world,
                note=self.reporter.note,
            )
        table = result_table(self.folder, self.config, outcome, self.learner)
        self.reporter.table("Result", table)
        if beside is not None and (verdict := beside.verdict()) is not None:
            self.reporter.note(verdict)

    # When something happens

    @contextmanager
    def _stopping_in_order(self) -> Iterator[None]:
        """Save what there is before a run ends early, and say how to go on."""
        try:
            yield
        except Interrupted as stopped:
            self._save()
            name = "Interrupted" if stopped.code == EXIT_SIGINT else "Asked to stop"
            trust = " --trust" if named_code(self.config) else ""
            raise StopTraining(
                f"{name}. Meta-step {self.trainer.step} is saved; go on with: {self._again}{trust}",
                stopped.code,
            ) from stopped
        except NonFiniteError as error:
            saved = self._save_if_sound()
            raise StopTraining(
                f"Stopped at meta-step {self.trainer.step + 1}, before the update. {error} {saved}",
                EXIT_NOT_FINITE,
            ) from error
        except OutOfMemory as error:
            # ranks that hold the same model may be in the midst of the meta-step
            saved = self._save_if_sound() if self.group.shards == 1 else self._kept()
            engine = self.trainer.engine()
            fix = (
                "Use --engine inplace"
                if engine == "stacked" and "inplace" in self.learner.estimator.engines
                else "Use a smaller model"
            )
            raise StopTraining(
                f"Out of memory at meta-step {self.trainer.step + 1}, one solve at a time"
                f" ({error}). {saved} {fix}, --precision bf16, fewer --shots or --queries, a device"
                f" with more memory, or several (--shard). {self._planned()}".rstrip(),
                EXIT_OUT_OF_MEMORY,
            ) from error

    def _planned(self) -> str:
        """What meta-steps would fit, on a CUDA device."""
        return advice_of_plan(
            self.learner, self.trainer.source, self.config.tasks // self.group.world
        )

    def _save_if_sound(self) -> str:
        """Save the present state unless θ itself is broken; says what was done."""
        step = self.trainer.step
        sound = all(bool(torch.isfinite(local(p)).all()) for p in self.learner.parameters())
        if self.group.shards > 1:
            sound = self.group.agree(int(not sound)) is None
        if not sound:
            return f"θ itself is not finite after meta-step {step}: not saved. {self._kept()}"
        self._save()
        return f"The state after meta-step {step} is saved in {self.folder}."

    def _kept(self) -> str:
        if self.saved_step is None:
            return "No checkpoint was written yet."
        return f"The checkpoint of meta-step {self.saved_step} is intact."

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Stop in good order where the run folder is gone or takes no more; never make it anew."""
        assert self._log is not None
        step = self.trainer.step
        if not self._log.in_place:
            raise StopTraining(
                f"{self.folder} was deleted or moved while meta-step {step} was trained, so"
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
            raise StopTraining(
                f"Stopped at meta-step {step}. {what} {self._kept()} When there is space, go on"
                f" with: {self._again}",
                EXIT_CANNOT_WRITE,
            ) from error
