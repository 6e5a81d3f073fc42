"""The training loop: every meta-step is a function of (course, step, state), so training can stop
anywhere and go on.

Episode b of meta-step s is episode s·tasks + b of the source, and everything random is seeded by
(seed, s). A checkpoint holds θ and the state of optimizer, chunk and ν.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from metanudge.engines.randomness import mix
from metanudge.estimators import NonFiniteError
from metanudge.evaluation import Evaluation
from metanudge.learner import MetaLearner
from metanudge.params import Params
from metanudge.spread import at_rest, is_spread, local
from metanudge.tasks import Episodes
from metanudge.tasks.ahead import Ahead
from metanudge.tasks.episodes import Split
from metanudge.training.checkpoint import Checkpoint, CheckpointStore
from metanudge.training.checkpoint.sharded import handed_out
from metanudge.training.checkpoint.values import differences
from metanudge.training.distributed import Group, Share, combine
from metanudge.training.errors import (
    PATIENCE,
    Interrupted,
    StopRequest,
    UserError,
    is_out_of_memory,
)
from metanudge.training.metrics import inner_rates, stiffness
from metanudge.tuning import NuEstimate, is_automatic

T = TypeVar("T")


@dataclass(frozen=True)
class Course:
    """How far a learner is trained, and how: all that is not about the learner or its data.

    Attributes:
        iterations: meta-steps.
        tasks: per meta-step.
        schedule: of the optimizer's learning rates: constant, or cosine down to 0.
        clip: the meta-gradient to this norm.
        seed: of dropout masks, minibatches and search directions.
        metrics_every: meta-steps between measurements of query loss and accuracy; 0: none.
        checkpoint_every: meta-steps between checkpoints, where the trainer has a folder.
    """

    iterations: int
    tasks: int = 16
    schedule: Literal["constant", "cosine"] = "constant"
    clip: float | None = None
    seed: int = 0
    metrics_every: int = 0
    checkpoint_every: int = 1000

    def measures(self, number: int) -> bool:
        """Whether meta-step `number`, counted from 1, measures query loss and accuracy."""
        return self.metrics_every > 0 and (
            number in (1, self.iterations) or number % self.metrics_every == 0
        )


@dataclass(frozen=True)
class Surroundings:
    """The process that trains: its share of the tasks, whom it obeys, and whom it tells."""

    group: Group = field(default_factory=Group)
    stop: StopRequest = field(default_factory=StopRequest)
    note: Callable[[str], None] = lambda text: None


class Trainer:
    """Meta-training of a learner on a source's tasks.

    With a folder it saves checkpoints there and, made again in the same way, goes on from the last
    one to the same bytes. `NonFiniteError`, `OutOfMemory` and `Interrupted` come before θ is
    changed.

    Args:
        learner: what is trained.
        source: where the tasks come from.
        optimizer: any of torch's, made with the learner's parameters.
        course: how far and how.
        folder: for the checkpoints; None writes nothing.
        on_step: called after each meta-step with the number of those that are done and the values
            of this one.
        around: other processes that train along, a signal to obey, and a listener; by default none.

    Attributes:
        step: meta-steps done.
        done: whether to end before the course does.
        seconds: that the last one took.

    Example:
        >>> from metanudge.models import MLP
        >>> from metanudge.tasks import Sinusoid
        >>> learner = MetaLearner(MLP(1, 1, hidden=(8,)), nn.functional.mse_loss)
        >>> optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
        >>> trainer = Trainer(learner, Sinusoid(seed=0), optimizer, Course(iterations=3, tasks=2),
        ...     on_step=lambda step, values: print(step, sorted(values)[:3]))
        >>> trainer.run()
        1 ['delta', 'error', 'gradient_norm']
        2 ['delta', 'error', 'gradient_norm']
        3 ['delta', 'error', 'gradient_norm']
        >>> len(trainer.evaluate("test", 5).loss)
        5
    """

    def __init__(
        self,
        learner: MetaLearner,
        source: Episodes,
        optimizer: torch.optim.Optimizer,
        course: Course,
        *,
        folder: Path | None = None,
        on_step: Callable[[int, dict[str, Any]], None] | None = None,
        around: Surroundings | None = None,
    ) -> None:
        self.learner, self.source, self.optimizer, self.course = learner, source, optimizer, course
        self.on_step = on_step
        self.around = Surroundings() if around is None else around
        self.step, self.done, self.seconds = 0, False, 0.0
        self._ahead = Ahead(source)
        self._lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._store = None if folder is None else CheckpointStore(folder)
        if self._store is not None and self._store.list():
            checkpoint, now = self._store.load(), asdict(course)
            if (was := checkpoint.state.get("course")) != now:
                raise UserError(
                    f"{checkpoint.folder} belongs to another course ({was}, now {now}). Train in"
                    " another folder, or remove this one."
                )
            self.load(checkpoint)

    def run(self) -> None:
        """Train to the end of the course."""
        try:
            while self.step < self.course.iterations and not self.done:
                values, signal = self._meta_step()
                if self.on_step is not None:
                    self.on_step(self.step, values)
                if self._store is not None and (
                    self.step % self.course.checkpoint_every == 0
                    or self.step == self.course.iterations
                ):
                    state = {"course": asdict(self.course), **self.state()}
                    self._store.save(self.step, weights_of(self.learner), state)
                if signal is not None:
                    raise Interrupted(signal)
        finally:
            self._ahead.close()

    def evaluate(self, split: Split, count: int) -> Evaluation:
        """`learner.evaluate` over `count` tasks (all, where the split has fewer), in batches of a
        meta-step's size, one for each rank at a time. A signal to any rank raises `Interrupted` on
        all of them, after the same batch.
        """
        count = min(count, self.source.num_tasks(split) or count)
        group, stop = self.around.group, self.around.stop
        size = max(1, self.course.tasks * self.learner.estimator.width)
        names = list(self.learner.metrics)
        columns = torch.zeros(4 + 2 * len(names), count, dtype=torch.float64)
        self._obey()
        for first in range(0, count, size * (group.world // group.shards)):
            begin = first + size * (group.rank // group.shards)
            places = range(begin, min(begin + size, count))
            if len(places):
                with suppress(Interrupted), stop.interruptible(self._patience):
                    batch = self.source.batch(places, split)
                    result = self._with_memory(
                        partial(self.learner.evaluate, batch, seed=mix(self.course.seed, 4)),
                        rows=len(batch),
                    )
                    columns[:, places.start : places.stop] = result.columns(names)
            self._obey()
        return Evaluation.of(group.sum(columns), names)

    def engine(self) -> str:
        """The name of the engine that meta-steps run on."""
        return self.learner.choose_engine(self.source.batch(range(self.course.tasks)))[0].name

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the weights."""
        learner = self.learner
        return {
            "optimizer": self.optimizer.state_dict(),
            "lrs": self._lrs,
            "chunk": learner.chunk,
            "tuner": learner.tuner.state_dict() if learner.tuner.nu is not None else None,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; `UserError` where it is of another model or optimizer."""
        group = self.around.group
        load_weights(self.learner, checkpoint, group)
        state = checkpoint.state
        try:
            saved = handed_out(state["optimizer"], self.optimizer, group)
            self.optimizer.load_state_dict(saved)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{checkpoint.folder} has no state for this optimizer ({error!r}). Resume from"
                " another checkpoint."
            ) from error
        if self.learner.chunk is None:
            self.learner.chunk = state["chunk"]
        if state["tuner"] is not None:
            # `MAML()` has something where it went over to differences
            self.learner.problem().twice_differentiable &= is_automatic(self.learner.estimator)
            self.learner.tuner.load_state_dict(state["tuner"])
        self._lrs = state["lrs"]
        self.step = checkpoint.step

    # One meta-step

    def _meta_step(self) -> tuple[dict[str, Any], int | None]:
        """One update of θ; its values, and a signal that asks to stop."""
        began = time.monotonic()
        measured = self.course.measures(self.step + 1)
        gradient, values, signal = self._gradient(measured)
        if self.course.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * self.step / self.course.iterations))
            for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
                group["lr"] = lr * factor
        for name, parameter in self.learner.problem().meta_parameters.items():
            parameter.grad = gradient[name].to(parameter.dtype)
        if self.course.clip is not None:
            _clip(list(self.learner.parameters()), self.course.clip, values["gradient_norm"])
        values["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if measured:
            values |= stiffness(self.learner) | inner_rates(self.learner)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds = time.monotonic() - began
        return values, signal

    def _gradient(self, measured: bool) -> tuple[Params, dict[str, Any], int | None]:
        """The mean meta-gradient over all ranks' tasks, its statistics and a signal."""
        tasks, group, stop = self.course.tasks, self.around.group, self.around.stop
        own = group.slice(tasks)
        seed = mix(self.course.seed, 3, self.step)
        self._choose_nu(seed)
        share = Share()
        if len(own):
            now = range(self.step * tasks + own.start, self.step * tasks + own.stop)
            then = range(now.start + tasks, now.stop + tasks)
            on_gpu = self.source.device.type == "cuda"
            batch = self._ahead.batch(now, then=then if on_gpu else None)
            call = partial(self.learner.meta_gradient, batch, metrics=measured, seed=seed)
            call = partial(call, first=own.start, over=group.over)
            try:
                with stop.interruptible(self._patience):
                    share = Share(
                        *self._with_memory(call, rows=len(own) * self.learner.estimator.width)
                    )
            except NonFiniteError as error:
                share = Share(failure=error)
            except Interrupted:
                share = Share(broken_off=True)
        gradient, values, signal = combine(
            share, group, self.learner, tasks=tasks, measured=measured, signal=stop.signal
        )
        return gradient, {"step": self.step + 1, **values}, signal

    def _choose_nu(self, seed: int) -> None:
        """Where ν is automatic and it is time, rank 0 chooses it on the first tasks of this
        meta-step, for all ranks.
        """
        learner, group, tasks = self.learner, self.around.group, self.course.tasks
        tuner = learner.tuner
        if not is_automatic(learner.estimator) or self.step % tuner.interval(tasks):
            return

        def choose() -> tuple[dict[str, Any], NuEstimate] | int | None:
            few, own = tuner.tasks(tasks), max(1, len(group.slice(tasks)))
            batch = self.source.batch(range(self.step * tasks, self.step * tasks + few))
            look = partial(learner.choose_nu, batch, seed=seed, rungs_at_once=max(1, own // few))
            before = tuner.state_dict()
            try:
                with self.around.stop.interruptible(self._patience):
                    found = self._with_memory(look, rows=max(own, few) * learner.estimator.width)
            except Interrupted:
                tuner.load_state_dict(before)
                return self.around.stop.signal
            return tuner.state_dict(), found

        made = choose() if group.shards > 1 else None  # nobody can choose alone
        chosen = group.share(choose if made is None else lambda: made)
        if not isinstance(chosen, tuple):
            assert chosen is not None
            raise Interrupted(chosen)
        state, found = chosen
        tuner.load_state_dict(state)
        tuner.last = found

    @property
    def _patience(self) -> float | None:
        """Seconds after a signal that a meta-step or a batch is broken off; None: it is not, since
        other ranks would wait for this one in the midst of it.
        """
        return None if self.around.group.shards > 1 else PATIENCE

    def _obey(self) -> None:
        """Stop if any rank was asked to; every rank must come by."""
        signal = self.around.group.agree(self.around.stop.signal)
        if signal is not None:
            raise Interrupted(signal)

    def _with_memory(self, call: Callable[[], T], *, rows: int) -> T:
        """Call, with half of `learner.chunk` after each time the memory runs out; the learner keeps
        the smaller chunk.

        Args:
            call: computes with the learner, and may be called again.
            rows: solves that the call makes; what the first chunk is when the learner has none.
        """
        learner = self.learner
        while True:
            try:
                return call()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            # Out here the exception, and with it the tensors of its frames, is gone.
            if next(learner.parameters()).device.type == "cuda":
                torch.cuda.empty_cache()
            chunk = min(learner.chunk or rows, rows)
            if chunk <= 1 or self.engine() == "inplace":
                raise OutOfMemory(message)
            learner.chunk = chunk // 2
            self.around.note(
                f"Out of memory at step {self.step + 1} with {chunk} solves at once; going on with"
                f" {learner.chunk}."
            )


def _clip(parameters: list[nn.Parameter], most: float, norm: float) -> None:
    """Scale gradients of a norm down to `most`, as `clip_grad_norm_` does where none is spread over
    ranks.
    """
    if not any(is_spread(p) for p in parameters):
        nn.utils.clip_grad_norm_(parameters, most)
        return
    for p in parameters:
        if p.grad is not None:
            local(p.grad).mul_(min(1.0, most / (norm + 1e-6)))


class OutOfMemory(Exception):
    """One solve at a time is still too much; the message is torch's."""


def weights_of(learner: MetaLearner) -> dict[str, Mapping[str, torch.Tensor]]:
    """What a checkpoint holds of a learner: the model, log λ and inner rates where learned."""
    at_rest(learner.model)
    return {part: module.state_dict() for part, module in _parts(learner).items()}


def load_weights(learner: MetaLearner, checkpoint: Checkpoint, group: Group | None = None) -> None:
    """Put a checkpoint's weights (stiffness, inner rates) into a learner; `UserError` names what
    differs where they do not fit. Of a group's ranks, the first has their values.
    """
    for part, module in _parts(learner).items():
        saved, own = checkpoint.tensors.get(part, {}), module.state_dict()
        shapes, was = ({name: t.shape for name, t in one.items()} for one in (own, saved))
        if detail := differences(shapes, was):
            what = {"model": "model", "log_lam": "learned stiffness"}.get(part, "learned inner lr")
            raise UserError(
                f"The {what} has changed since {checkpoint.folder} was saved ({detail}). Resume "
                "with the model it was trained with, or start a new run."
            )
        (group or Group()).hand_to(module, saved)


def _parts(learner: MetaLearner) -> dict[str, nn.Module]:
    names = ("model", "log_lam", "log_lr", "lr")
    return {name: part for name in names if (part := getattr(learner, name)) is not None}
