"""The tasks of a meta-batch shared among the processes of `torchrun`, with one all-reduce per
meta-step.

    torchrun --nproc-per-node=4 -m metanudge train omniglot

Every rank holds θ and the optimizer, takes a contiguous slice of the tasks, and gets the sum of all
ranks' meta-gradients; so all take the same step. With `--shard N` each N ranks hold one model
together (see `shards`), and the learner splits the tasks over such groups. Only rank 0 touches the
run folder: what it reads it hands out to the others, and what they hold they hand in when it
writes, a tensor at a time.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metanudge.estimators import NonFiniteError, Stats
from metanudge.learner import MetaLearner
from metanudge.optim import global_norm
from metanudge.params import Params
from metanudge.spread import spread_like
from metanudge.training.errors import (
    CODES,
    CheckpointError,
    Interrupted,
    StopTraining,
    UserError,
)

T = TypeVar("T")

_QUERY = ("query_loss_before", "query_accuracy_before", "query_loss", "query_accuracy")
_INNER = ("residual_start", "residual", "delta")
MEET = timedelta(minutes=10)  # for all ranks to start and find each other


@dataclass(frozen=True)
class Group:
    """The processes of a run; one that is alone needs no torch.distributed.

    Attributes:
        job: what rank 0 knows the torchrun job by, over all its restarts; None where nothing
            restarts it.
        mesh: tasks × shards, where several ranks hold one model together.
    """

    rank: int = 0
    world: int = 1
    job: str | None = None
    mesh: Any = None

    @classmethod
    def from_environment(cls) -> Group:
        """The group that torchrun's variables describe, connected; a group of one where there are
        none.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            backend = (
                "cpu:gloo,cuda:nccl"
                if torch.cuda.is_available() and dist.is_nccl_available()
                else "gloo"
            )
            store, rank, world = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=_fresh(store, rank, world), rank=rank, world_size=world
            )
        job = _job(store) if dist.get_rank() == 0 and "TORCHELASTIC_RUN_ID" in os.environ else None
        return cls(dist.get_rank(), dist.get_world_size(), job)

    @property
    def leads(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        """How many ranks hold one model together; they compute everything together."""
        return 1 if self.mesh is None else int(self.mesh.size(1))

    @property
    def over(self) -> Any:
        """Where models are sharded, the ranks over which a learner splits the tasks; None where
        there is one model only.
        """
        return None if self.world == self.shards or self.mesh is None else self.mesh["tasks"]

    def share(self, make: Callable[[], T], sent: Callable[[T], T] = lambda made: made) -> T:
        """What rank 0 makes, on every rank; what it refuses (`UserError`), every rank refuses.

        Args:
            sent: what the others get of it.
        """
        if self.world == 1:
            return make()
        message: list[Any] = [None, None]
        if not self.leads:
            dist.broadcast_object_list(message)
            if message[0] is not None:
                raise message[0]
            return message[1]
        try:
            made = make()
            message = [None, sent(made)]
        except Exception as error:
            known = isinstance(error, (CheckpointError, StopTraining))
            dist.broadcast_object_list([error if known else UserError(str(error)), None])
            raise
        dist.broadcast_object_list(message)
        return made

    def hand_out(self, value: Tensor, like: Tensor) -> Tensor:
        """A tensor of rank 0's on every rank, spread like another one where that is; the other
        ranks give one of its shape without values, on the meta device.
        """
        if self.world > 1:
            value = (
                value.to(like.device) if self.leads else torch.empty_like(value, device=like.device)
            )
            dist.broadcast(value, 0)
        return spread_like(value, like)

    def hand_to(self, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Put tensors of rank 0's, of the names and shapes that a module has, into it."""
        own = module.state_dict()
        module.load_state_dict({n: self.hand_out(saved[n], like) for n, like in own.items()})

    def hand_in(self, contents: Mapping[str, Iterable[Any]], write: Callable[[], None]) -> None:
        """Have rank 0 write what all ranks hold together: as it goes through the contents, they
        give their parts. What stops it, stops all.
        """
        failure: list[Exception] = []
        if self.leads:
            try:
                write()
            except Exception as error:
                failure = [error]
        if self.world > 1:
            for chunks in contents.values():
                for _ in chunks:  # on rank 0 what it did not come to
                    pass

        def outcome() -> None:
            for error in failure:
                raise error

        self.share(outcome)

    def one_after_the_other(self, make: Callable[[], T]) -> T:
        """Rank 0 makes it first (and fills caches), then the others."""
        made: list[T] = []
        self.share(lambda: made.append(make()))
        return made[0] if self.leads else make()

    def slice(self, count: int) -> range:
        """Which of `count` things are this rank's: a contiguous range, empty where there are more
        ranks than things. Where models are sharded, every rank is given all of them.

        Example:
            >>> [list(Group(rank, 3).slice(4)) for rank in range(3)]
            [[0], [1], [2, 3]]
        """
        if self.shards > 1:
            return range(count)
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def reduce(
        self, gradient: Params, values: Mapping[str, float], weight: float
    ) -> tuple[Params, dict[str, float]]:
        """The weighted sum of gradients and values over all ranks: one all-reduce of one float64
        buffer.
        """
        if self.world == 1:
            return gradient, dict(values)
        parts = [leaf.detach().reshape(-1).double() * weight for leaf in gradient.values()]
        device = parts[0].device
        buffer = torch.cat(
            [*parts, torch.tensor(list(values.values()), dtype=torch.float64, device=device)]
        )
        dist.all_reduce(buffer)
        pieces = buffer.split([leaf.numel() for leaf in gradient.values()] + [len(values)])
        summed = {
            n: piece.view_as(leaf).to(leaf.dtype)
            for (n, leaf), piece in zip(gradient.items(), pieces, strict=False)
        }
        return summed, dict(zip(values, pieces[-1].tolist(), strict=True))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over all ranks; of those that hold one model together, one."""
        if self.rank % self.shards:
            tensor = torch.zeros_like(tensor)
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, number: int | None) -> int | None:
        """The largest of the ranks' numbers, the same on every rank; None where no rank has one."""
        if self.world == 1:
            return number
        largest = torch.tensor([number or 0])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest) or None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Share:
    """What one rank brings to a meta-step.

    Attributes:
        gradient: the mean over the rank's tasks; empty where it has none, broke off, or met a
            number that is not finite.
        stats: of the same tasks; None in the same cases.
        failure: what was not finite.
        broken_off: whether a signal came in the middle.
    """

    gradient: Params = field(default_factory=dict)
    stats: Stats | None = None
    failure: NonFiniteError | None = None
    broken_off: bool = False


def combine(
    share: Share,
    group: Group,
    learner: MetaLearner,
    *,
    tasks: int,
    measured: bool,
    signal: int | None,
) -> tuple[Params, dict[str, Any], int | None]:
    """The ranks' shares of the `tasks` as one: the mean meta-gradient, its statistics, and a signal
    that one of the ranks received.

    Raises on every rank what one of them met: `NonFiniteError`, or `Interrupted` where it broke
    off.
    """
    extra = [f"query_{name}" for name in learner.metrics] if measured else []
    means = (*(_QUERY if measured else ()), *extra, *_INNER)
    if group.world > 1 and group.shards == 1:
        return _reduced(share, group, learner, tasks, means, signal)
    if share.failure is not None:
        raise share.failure
    if share.broken_off:
        assert signal is not None
        raise Interrupted(signal)
    assert share.stats is not None
    names = (*means, "nu", "error", "gradient_norm")
    values = {name: _value(share.stats, name) for name in names}
    signal = group.agree(signal)
    return share.gradient, values | _told(share.stats.nudged), signal


def _value(stats: Stats, name: str) -> Any:
    """A statistic by its name, or the user's own metric."""
    own = stats.extra.get(name.removeprefix("query_"))
    return getattr(stats, name) if name in (*_QUERY, *_INNER) or own is None else own


def _told(nudged: bool) -> dict[str, Any]:
    """That query loss and accuracy are those of nudged solutions, where they are."""
    return {"nudged": 1} if nudged else {}


def _reduced(
    share: Share,
    group: Group,
    learner: MetaLearner,
    tasks: int,
    means: tuple[str, ...],
    signal: int | None,
) -> tuple[Params, dict[str, Any], int | None]:
    """The same over several ranks: one all-reduce."""
    stats = share.stats
    weight = 0.0 if stats is None else stats.tasks / tasks
    own = {name: _value(stats, name) for name in means} if stats is not None else {}
    if stats is not None:
        own["nu"] = stats.nu or 0.0
        own["error"] = (stats.error or 0.0) * stats.gradient_norm
    sums = {name: weight * own.get(name, 0.0) for name in (*means, "nu", "error")}
    sums["nudged"] = float(stats is not None and stats.nudged)
    sums["failed"] = float(share.failure is not None)
    sums["broken off"] = float(share.broken_off)
    for number in CODES:
        sums[f"signal {number}"] = float(signal == number)
    gradient, sums = group.reduce(share.gradient or learner.problem().zero_gradient(), sums, weight)
    signals = [number for number in CODES if sums[f"signal {number}"]]
    if sums["failed"]:
        messages = group.gather(str(share.failure) if share.failure is not None else "")
        raise NonFiniteError(next(filter(None, messages)))
    if sums["broken off"]:
        raise Interrupted(signals[0])
    norm = float(global_norm(list(gradient.values())))
    values: dict[str, Any] = {name: sums[name] for name in means}
    values["nu"] = sums["nu"] or None
    values["error"] = sums["error"] / norm if sums["error"] and norm else None
    values["gradient_norm"] = norm
    return gradient, values | _told(sums["nudged"] > 0), signals[0] if signals else None


def _job(store: Any) -> str:
    """A name made up at the first start of a torchrun job and kept in its store, which outlives
    restarts and is no other job's.
    """
    if not store.check(["metanudge/job"]):
        store.set("metanudge/job", f"{os.environ['TORCHELASTIC_RUN_ID']}/{uuid.uuid4().hex}")
    return str(store.get("metanudge/job").decode())


def _fresh(store: Any, rank: int, world: int) -> Any:
    """A part of the store that only these processes use.

    torchrun keeps one store over all its restarts (pytorch/pytorch#135712), so a rank may find the
    addresses that the killed ranks left there, and connect to nobody for half an hour. So rank 0
    names a new part of the store, and each rank waits until rank 0 has called it by a name it made
    up just now: what an earlier life left answers to neither.
    """
    if rank == 0:
        part = uuid.uuid4().hex
        store.set("metanudge/part", part)
        for other in range(1, world):
            hello = f"metanudge/{part}/hello/{other}"
            _wait(lambda: store.check([hello]), f"rank {other}")  # noqa: B023 (called at once)
            store.set(f"metanudge/{part}/welcome/{store.get(hello).decode()}", "")
        return dist.PrefixStore(part, store)  # type: ignore[attr-defined]
    own = uuid.uuid4().hex
    found = ""

    def welcome() -> bool:
        nonlocal found
        if (
            store.check(["metanudge/part"])
            and (part := store.get("metanudge/part").decode()) != found
        ):
            found = part
            store.set(f"metanudge/{found}/hello/{rank}", own)
        return bool(found) and store.check([f"metanudge/{found}/welcome/{own}"])

    _wait(welcome, "rank 0")
    return dist.PrefixStore(found, store)  # type: ignore[attr-defined]


def _wait(ready: Callable[[], bool], whom: str) -> None:
    end = time.monotonic() + MEET.total_seconds()
    while not ready():
        if time.monotonic() > end:
            raise UserError(
                f"There was no word from {whom} in {MEET}, so the ranks cannot start. Look at what"
                " it said, and start all again."
            )
        time.sleep(0.01)
