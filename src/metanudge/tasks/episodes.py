"""`Episodes`: the base of every task source. An episode is a pure function of (seed, split, index).

So any worker, rank or resumed run sees the same stream of tasks, whatever the batch size, and
`source.task(1000)` costs no more than `source.task(0)`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count as count_from
from pathlib import Path
from typing import ClassVar, Literal, Self, TypedDict, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.names import near
from metanudge.task import Batch, Task, TaskBatch
from metanudge.tasks.augment import Augment, augmented
from metanudge.tasks.counts import WHY, Count, check_count, check_span, is_integer
from metanudge.tasks.draws import Keys, episode_keys, root_key, uniform
from metanudge.tasks.support import carrying

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SIZES = len(SPLITS) + 1  # random streams of their own, next to those of splits and their classes


class Stream(TypedDict, total=False):
    """What every stream of tasks takes; see `Episodes`."""

    seed: int
    device: torch.device | str
    dtype: torch.dtype
    alike: int
    augment: Augment | None
    augment_query: bool


class Sizes(Stream, total=False):
    """The same with the size of a task."""

    ways: Count
    shots: Count
    queries: int


@dataclass(frozen=True)
class About:
    """What `metanudge data` says of a source.

    Attributes:
        what: the data in a few words.
        licence, cite: of the data.
        made: how its files come into being; empty where there are none.
        missing: what to say or do where they are not there yet.
    """

    what: str
    licence: str = "–"
    cite: str = "–"
    made: str = ""
    missing: str = ""


class Episodes(ABC):
    """A stream of tasks for each of the splits "train", "val" and "test".

    A source says how tasks are drawn (`draw`) and what they look like (`kind`, `num_outputs`,
    `input_shape`); this class numbers them. The arguments of its constructor, but for those below,
    are its `--data-options` on the command line: their types, defaults and checks are declared
    there and nowhere else.

    Args:
        ways: classes per task (1 for regression), or the least and the most of them: each is as
            likely.
        shots: support examples per class, or the least and the most.
        queries: query examples per class.
        seed: another seed is another stream of tasks; 0 ≤ seed < 2⁶⁴.
        device: where the tensors of a task live.
        dtype: floating dtype of the inputs.
        augment: a function (inputs `(n, ...)` of a task, generator) → inputs that changes support
            sets in training, such as `metanudge.tasks.Changes(flip=True)`; see `augmented`.
        augment_query: change query sets, too.
        alike: so many tasks one after the other have as many ways and shots, so that they stack:
            those of a meta-batch.

    Attributes:
        ways, shots: where they vary, the most.
        spans: the least and the most of both.

    Example:
        >>> from metanudge.tasks import Sinusoid
        >>> source = Sinusoid(shots=5, queries=10, seed=0)
        >>> for tasks in source.batches(size=4, count=2):
        ...     print(len(tasks), tasks[0].num_support, tasks[0].num_query)
        4 5 10
        4 5 10
        >>> again = Sinusoid(shots=5, queries=10, seed=0).task(6)
        >>> # the last batch held episodes 4, 5, 6 and 7
        >>> torch.equal(tasks[2].support[0], again.support[0])
        True
    """

    kind: ClassVar[Literal["classification", "regression"]]
    about: ClassVar[About] = About("tasks")
    dark_is_one: ClassVar[bool] = False
    """Whether pictures are inverted: ink 1, paper 0."""
    note: str = ""
    """What a reader decided about the inputs and its user may want otherwise."""

    def __init__(
        self,
        *,
        ways: Count,
        shots: Count,
        queries: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        augment: Augment | None = None,
        augment_query: bool = False,
        alike: int = 16,
    ) -> None:
        self.spans = {"ways": check_span("ways", ways), "shots": check_span("shots", shots)}
        self.ways, self.shots = (most for _, most in self.spans.values())
        self.queries = check_count("queries", queries, why=WHY)
        self.alike = check_count("alike", alike, why="A size is of at least one task.")
        self._with_support = False
        if not is_integer(seed) or not 0 <= seed < 1 << 64:
            raise ValueError(
                f"seed={seed!r} cannot number a stream of tasks. Use an integer from 0 to 2**64"
                " - 1."
            )
        if not dtype.is_floating_point:
            raise ValueError(
                f"dtype={dtype} cannot hold the inputs. Use a floating dtype such as torch.float32."
            )
        self.seed = int(seed)
        self.device = torch.device(device)
        self.dtype = dtype
        self._augment, self._augment_query = augment, augment_query
        if augment is not None and not callable(augment):
            raise TypeError(f"augment={augment!r} is no function. Give one of (inputs, generator).")

    @property
    def num_outputs(self) -> int:
        """Outputs a model for these tasks needs: 1, or one per way in classification."""
        return 1

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input."""

    def classes(self, split: Split) -> tuple[str, ...]:
        """Names of the classes that the tasks of a split are drawn from (none for regression)."""
        check_split(split)
        return ()

    def num_tasks(self, split: Split) -> int | None:
        """How many different tasks a split has; None where the stream does not end. An evaluation
        counts none of them twice.
        """
        check_split(split)
        return None

    def pooled(self, count: int) -> TaskBatch | None:
        """Up to `count` training tasks whose examples may be thrown together; None where classes
        mean something else in every task.
        """
        return None if self.kind == "classification" else self.batch(range(count))

    def sizes(self) -> str:
        """What a task is made of, in a few words."""
        if self.kind == "classification":
            return f"{self._span('ways')}-way {self._span('shots')}-shot, {self.queries} queries"
        return f"regression, {self._span('shots')} support and {self.queries} query points"

    def _span(self, name: str) -> str:
        return "-".join(str(count) for count in dict.fromkeys(self.spans[name]))

    def fingerprint(self) -> str | None:
        """Hex sha256 of the files that the tasks are drawn from; None where they are generated or
        have a checksum of their own.
        """
        return None

    @classmethod  # noqa: B027 (most have none)
    def fetch(cls) -> None:
        """Download or generate its files, where it has some."""

    @classmethod
    def files(cls) -> list[Path]:
        """Its files or folders that are there, in the order in which they are looked for."""
        return []

    @classmethod
    def verify(cls, file: Path) -> str:
        """What is in one of its files that is as it should be; `ValueError` names the file and what
        is wrong with it.
        """
        raise NotImplementedError(f"{cls.__name__} has files and no way to verify them")

    @abstractmethod
    def draw(self, keys: Keys, split: Split) -> tuple[Batch, Batch] | TaskBatch:
        """Support and query of one episode per key, every tensor `(num_tasks, num_examples, ...)`;
        tasks of different sizes as a `TaskBatch`. This is what a source of your own writes.

        Pure: row r depends on `keys[r]` and `split` alone, not on the other rows. Random numbers
        come from the keys (`metanudge.tasks.draws`).
        """

    def batch(self, indices: Iterable[int], split: Split = "train") -> TaskBatch:
        """The episodes with these indices, stacked; any order, repeats allowed.

        Example:
            >>> from metanudge.tasks import Sinusoid
            >>> len(Sinusoid().batch(range(10, 14)))
            4
        """
        numbers = as_indices(indices)
        tasks: dict[int, Task] = {}
        for places, source in self._by_size(numbers, split):
            keys = self._keys(numbers[places], split)
            drawn = source.draw(keys, split)
            batch = drawn if isinstance(drawn, TaskBatch) else TaskBatch(*drawn)
            if self._augment is not None and split == "train":
                batch = augmented(batch, keys, self._augment, query=self._augment_query)
            if len(places) == len(numbers):
                return self._handed_out(batch)
            tasks |= zip(places.tolist(), batch, strict=True)
        return self._handed_out(TaskBatch.of([tasks[place] for place in range(len(numbers))]))

    def _handed_out(self, batch: TaskBatch) -> TaskBatch:
        return carrying(batch) if self._with_support else batch

    def _by_size(
        self, numbers: NDArray[np.int64], split: Split
    ) -> list[tuple[NDArray[np.int64], Self]]:
        """The places of the episodes of one size, and a source that draws that size; for all sizes
        among these episodes.
        """
        check_split(split)
        low, high = np.array(list(self.spans.values())).T
        if (low == high).all():
            return [(np.arange(len(numbers)), self)]
        root = root_key(self.seed, _SIZES + SPLITS.index(split))
        drawn = uniform(episode_keys(root, numbers // self.alike), 2)
        sizes = low + (drawn * (high - low + 1)).astype(np.int64)
        found = []
        for ways, shots in np.unique(sizes, axis=0).tolist():
            one = copy.copy(self)
            one.ways, one.shots = ways, shots
            found.append((np.flatnonzero((sizes == (ways, shots)).all(axis=1)), one))
        return found

    def task(self, index: int, split: Split = "train") -> Task:
        """One episode."""
        return self.batch([index], split)[0]

    def batches(
        self, *, size: int = 16, count: int | None = 600, start: int = 0, split: Split = "train"
    ) -> Iterator[TaskBatch]:
        """Batches number `start`, `start + 1`, …; batch b holds the episodes b·size … b·size + size
        − 1.

        Args:
            size: tasks per batch.
            count: how many batches; None never ends.
            start: number of the first batch, to resume where a run stopped.
            split: "train", "val" or "test".
        """
        # Checked here and not in the generator, whose body would run only when the first batch is
        # asked for.
        size = check_count("size", size, why="A batch needs at least one task.")
        check_split(split)
        if count is not None and count < 0:
            raise ValueError(
                f"count={count} batches cannot be drawn. Use 0 or more, or None for a stream"
                " without end."
            )
        if start < 0:
            raise ValueError(
                f"start={start} is before the first batch. Batches are numbered from 0."
            )
        numbers = count_from(start) if count is None else range(start, start + count)
        return (self.batch(range(b * size, (b + 1) * size), split) for b in numbers)

    def augmented(self, augment: Augment | None, *, query: bool = False) -> Self:
        """The same stream with training tasks changed by `augment`, a function of (inputs `(n,
        ...)` of one task, generator seeded by the episode) that keeps their shape, or by nothing.

        Example:
            >>> from metanudge.tasks import Sinusoid
            >>> noisy = Sinusoid().augmented(lambda x, g: x + torch.randn(x.shape, generator=g))
            >>> torch.equal(noisy.task(3).support[0], Sinusoid().task(3).support[0])
            False
        """
        changed = copy.copy(self)
        changed._augment, changed._augment_query = augment, query
        return changed

    def to(self, device: torch.device | str) -> Self:
        """The same stream of tasks on another device; this source stays as it is.

        Example:
            >>> from metanudge.tasks import Sinusoid
            >>> Sinusoid().to("meta").task(0).support[0].device.type
            'meta'
        """
        moved = copy.copy(self)
        moved.device = torch.device(device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device))
        return moved

    def with_support(self) -> Self:
        """The same stream of tasks in batches that carry the support set; see
        `metanudge.tasks.with_support`.
        """
        if self.kind != "classification":
            raise ValueError(
                f"The tasks of this {type(self).__name__} are regression, but prototypes are means"
                " of classes. A regression needs a head of its own."
            )
        carries = copy.copy(self)
        carries._with_support = True
        return carries

    def _keys(self, indices: Iterable[int], split: Split) -> Keys:
        """The key of each episode, from which everything about it is drawn."""
        check_split(split)
        return episode_keys(root_key(self.seed, SPLITS.index(split)), as_indices(indices))

    def __repr__(self) -> str:
        sizes = [len(self.classes(split)) for split in SPLITS]
        parts = [f"ways={self._span('ways')}"] if any(sizes) else []
        parts += [f"shots={self._span('shots')}", f"queries={self.queries}", f"seed={self.seed}"]
        parts += [f"input_shape={self.input_shape}"]
        parts += ["classes=" + "/".join(map(str, sizes))] if any(sizes) else []
        return f"{type(self).__name__}({', '.join(parts)}, device={str(self.device)!r})"


def check_split(split: str) -> None:
    """Raise `ValueError` for anything but "train", "val" and "test"."""
    if split not in SPLITS:
        raise ValueError(
            f"There is no split {split!r}.{near(split, SPLITS)} The splits are {', '.join(SPLITS)}."
        )


def as_indices(indices: Iterable[int]) -> NDArray[np.int64]:
    """Episode numbers as an array; `ValueError` where they are none."""
    values = np.asarray(
        indices if isinstance(indices, (range, np.ndarray, Tensor)) else list(indices)
    )
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
        raise ValueError(
            f"Episodes are asked for by a non-empty sequence of integers, got shape {values.shape}"
            f" of {values.dtype}. Use source.batch(range(16)), or source.task(3) for a single one."
        )
    if int(values.min()) < 0:
        raise ValueError(f"There is no episode {int(values.min())}. Episodes are numbered from 0.")
    return values.astype(np.int64)
