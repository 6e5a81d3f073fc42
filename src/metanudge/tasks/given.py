"""`Given`: tasks that are there already, such as schools, patients or machines, each a problem of
its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.task import Task, TaskBatch
from metanudge.tasks.class_splits import FRACTIONS, Splits, split_classes
from metanudge.tasks.draws import Keys, choose, fork, uniform
from metanudge.tasks.episodes import SPLITS, Episodes, Split, Stream, as_indices, check_split
from metanudge.tasks.options import passes_on
from metanudge.tasks.read_tasks import Layout, TaskType, read_tasks
from metanudge.tasks.standardise import Standardisation
from metanudge.tasks.task_rows import Kind, Part, TaskRows


class GivenOptions(Stream, total=False):
    """The options that every way of building a `Given` takes; see there."""

    splits: Splits
    split_seed: int
    standardise: bool | Standardisation
    target_scale: Standardisation | None


class Given(Episodes):
    """A stream of given tasks; the *tasks* are divided among the splits.

    A training episode is a task drawn at random, divided anew where its division is left to
    chance. Where tasks differ in size it takes a random part of both sets, so that many have the
    same shape and are solved side by side: the largest number with two binary digits (…, 8, 12, 16,
    24, …) that there are. In validation and test episode i is task i, all of it, with one
    division.

    Args:
        tasks: batches `(inputs, targets)`, support and query as they are: floating targets
            `(n,)` or `(n, targets)` for regression, whole numbers for classes, which mean the same
            in all tasks. A mapping names the tasks.
        splits: fractions of the tasks for train, val and test, or lists of their names.
        split_seed: of the division by fractions.
        standardise: take each input's mean over the training tasks from it and divide it by their
            standard deviation, and each target of a regression likewise (`source.standardisation`,
            `source.target_scale`, which turns outputs into the target's units).
        target_scale: that of the targets, where it was found before.
        stream: seed, device and dtype; see `Episodes`.

    Example:
        >>> x = torch.linspace(0, 1, 12)[:, None]
        >>> tasks = [Task((x[:5], slope * x[:5]), (x[5:], slope * x[5:])) for slope in range(10)]
        >>> source = Given(tasks)
        >>> source
        Given(regression of target, 6/2/2 tasks of 5 support and 7 query examples)
        >>> source.batch(range(2), "test")[1].query[1].shape
        torch.Size([7, 1])
    """

    kind: Kind  # type: ignore[misc]  # of the tasks, not of the class

    def __init__(
        self,
        tasks: Sequence[Task] | Mapping[str, Task] | TaskRows,
        *,
        standardise: bool | Standardisation = True,
        splits: Splits = FRACTIONS,
        split_seed: int = 0,
        target_scale: Standardisation | None = None,
        **stream: Unpack[Stream],
    ) -> None:
        read = tasks if isinstance(tasks, TaskRows) else TaskRows.of(tasks)
        sizes = np.array([_sizes(parts) for parts in read.parts])  # (tasks, 2)
        super().__init__(
            ways=1, shots=int(sizes[:, 0].max()), queries=int(sizes[:, 1].max()), **stream
        )
        self.kind, self.note = read.kind, read.note
        self.names, self.labels, self.targets = read.names, read.labels, read.targets
        self.columns = read.columns
        self._read, self._sizes, self._fingerprint = read.parts, sizes, read.fingerprint
        divided = split_classes(read.names, splits, seed=split_seed, what=("task", "tasks"))
        self._pools = {split: np.array(found, dtype=np.int64) for split, found in divided.items()}
        train = [part.rows for task in self._pools["train"] for part in read.parts[task]]
        known = standardise is False or (
            isinstance(standardise, Standardisation)
            and (target_scale is not None or self.kind == "classification")
        )
        if not train and not known:
            raise ValueError(
                f"None of the {len(read.names)} tasks is for training. Give more tasks, or others"
                " in splits."
            )
        rows = np.concatenate([np.empty(0, dtype=np.int64), *train])
        x, self.standardisation = _standardised(read.x, rows, standardise)
        y, self.target_scale = read.y, target_scale
        if self.kind == "regression":
            if target_scale is None and standardise is not False:
                self.target_scale = Standardisation.of(read.y[rows].double().cpu().numpy())
            if self.target_scale is not None:
                y = self.target_scale.apply(y)
        self._x, self._y = self._stored(x, "inputs"), self._stored(y, "targets")
        self._common = [_common(sizes[self._pools["train"], side]) for side in (0, 1)]

    @classmethod
    @passes_on(__init__)
    def from_table(
        cls,
        table: str | os.PathLike[str] | Any,
        *,
        target: str | Sequence[str],
        task_column: str | None = None,
        features: Sequence[str] | None = None,
        support: float = 0.5,
        split_column: str | None = None,
        time_column: str | None = None,
        task_type: TaskType = "auto",
        drop_small: bool = False,
        delimiter: str | None = None,
        **options: Unpack[GivenOptions],
    ) -> Self:
        """From a table in which each row is an example and says which task it belongs to.

        Args:
            table: a .csv or .tsv file, a .parquet file (with pandas), a DataFrame, or a folder with
                one such file a task, which has the file's name.
            target: the column to predict, or several (regression).
            task_column: the column that names the task; none in a folder.
            features: the columns with the inputs; None takes all others.
            support: a fraction of a task's rows to adapt on, or their number (in classification of
                each class), drawn at random. The other rows are the query set.
            split_column: a column that says `support` or `query` instead.
            time_column: numbers or dates: the first rows are for the support set, not random ones.
            task_type: "classification", "regression", or what the target looks like: text, and few
                whole numbers, are classes.
            drop_small: leave out tasks that are too small to be divided instead of refusing them.
            delimiter: of a .csv file; found in its first line where it is None.
            options: see `Given`.
        """
        targets = (target,) if isinstance(target, str) else tuple(target)
        given = None if features is None else tuple(features)
        layout = Layout(
            targets, task_column, given, split_column, time_column, task_type, support, drop_small,
            delimiter,
        )  # fmt: skip
        read = read_tasks(table, layout)
        source = cls(read, **options)
        if source.standardisation is not None:
            how = "standardised over the training tasks; standardise=false leaves them as they are"
            source.note = "; ".join(filter(None, [how, read.note]))
        return source

    @property
    def num_outputs(self) -> int:
        """One for each class, or one for each target."""
        return len(self.labels) or len(self.targets)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input."""
        return tuple(self._x.shape[1:])

    def num_tasks(self, split: Split) -> int:
        """How many tasks a split has."""
        check_split(split)
        return len(self._pools[split])

    def task_names(self, split: Split) -> tuple[str, ...]:
        """The names of a split's tasks; in validation and test episode i is task i."""
        check_split(split)
        return tuple(self.names[number] for number in self._pools[split])

    def pooled(self, count: int) -> TaskBatch | None:
        """The first training tasks, all of their rows; None where there are none."""
        if not self.num_tasks("train"):
            return None
        numbers = self._pool("train")[:count]
        keys = self._keys(range(len(numbers)), "train")
        return self._episodes(numbers, keys, whole=True)

    def fingerprint(self) -> str | None:
        """Hex sha256 of the files it was read from; None for tasks."""
        return self._fingerprint

    def sizes(self) -> str:
        """Kind, number and sizes of the tasks."""
        counts = "/".join(str(self.num_tasks(split)) for split in SPLITS)
        support, query = (
            "–".join(str(n) for n in sorted({column.min(), column.max()}))
            for column in self._sizes.T
        )
        what = f"{self.kind} of {', '.join(self.targets)}"
        what += f" ({len(self.labels)} classes)" if self.labels else ""
        return f"{what}, {counts} tasks of {support} support and {query} query examples"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sizes()})"

    def batch(self, indices: Iterable[int], split: Split = "train") -> TaskBatch:
        """The episodes with these indices; in validation and test task number index (beginning
        again, with other divisions, after the last).
        """
        if split == "train":
            return super().batch(indices, split)
        numbers = as_indices(indices)
        pool = self._pool(split)
        keys = self._keys(numbers, split)
        return self._handed_out(self._episodes(pool[numbers % len(pool)], keys, whole=True))

    def draw(self, keys: Keys, split: Split) -> TaskBatch:
        """Tasks of a split, each drawn at random."""
        pool = self._pool(split)
        numbers = (uniform(fork(keys, np.array([0])), 1)[:, 0] * len(pool)).astype(np.int64)
        return self._episodes(pool[numbers], keys, whole=split != "train")

    def _pool(self, split: Split) -> NDArray[np.int64]:
        check_split(split)
        if not len(self._pools[split]):
            raise ValueError(
                f"Split {split!r} has none of the {len(self.names)} tasks. Give it some with"
                " splits, such as (0.64, 0.16, 0.2)."
            )
        return self._pools[split]

    def _episodes(self, numbers: NDArray[np.int64], keys: Keys, *, whole: bool) -> TaskBatch:
        sets = [
            rows
            for number, key in zip(numbers, keys, strict=True)
            for rows in self._rows(int(number), np.array([key]), whole)
        ]
        index = torch.from_numpy(np.concatenate(sets)).to(self.device)
        lengths = [len(rows) for rows in sets]
        x, y = (t.index_select(0, index).split(lengths) for t in (self._x, self._y))
        pairs = list(zip(x, y, strict=True))
        return TaskBatch.of([Task(s, q) for s, q in zip(pairs[::2], pairs[1::2], strict=True)])

    def _rows(self, number: int, key: Keys, whole: bool) -> list[NDArray[np.int64]]:
        """Rows of the support and of the query set."""
        sets: tuple[list[NDArray[np.int64]], ...] = ([], [])
        for place, part in enumerate(self._read[number]):
            rows = part.rows
            if 0 < part.support < len(part):
                rows = rows[_order(fork(key, np.array([3 + place])), len(part), len(part))]
            sets[0].append(rows[: part.support])
            sets[1].append(rows[part.support :])
        found = [np.concatenate(rows) for rows in sets]
        if whole:
            return found
        for side, rows in enumerate(found):
            size = len(rows) if self._common[side] else _rounded(len(rows))
            if size < len(rows):
                found[side] = rows[_order(fork(key, np.array([1 + side])), len(rows), size)]
        return found

    def _stored(self, values: Tensor, what: str) -> Tensor:
        if not values.is_floating_point():
            return values.to(self.device)
        stored = values.to(self.device, self.dtype)
        if not bool(stored.isfinite().all()):
            raise ValueError(
                f"The {what} hold numbers of up to {float(values.abs().max()):.3g}, which are"
                f" infinite in {self.dtype}. Scale them down."
            )
        return stored


def _sizes(parts: Sequence[Part]) -> tuple[int, int]:
    support = sum(part.support for part in parts)
    return support, sum(map(len, parts)) - support


def _common(sizes: NDArray[np.int64]) -> bool:
    """Whether all sizes are the same."""
    return bool((sizes == sizes[:1]).all())


def _rounded(size: int) -> int:
    """The largest number with at most two binary digits other than 0 up to this.

    Example:
        >>> [_rounded(n) for n in (1, 3, 5, 7, 13, 30)]
        [1, 3, 4, 6, 12, 24]
    """
    low = max(0, size.bit_length() - 2)
    return size >> low << low


def _order(key: Keys, count: int, size: int) -> NDArray[np.int64]:
    """`size` of the numbers below `count` in random order."""
    return choose(key, np.array([count]), size, limit=count)[0]


def _standardised(
    x: Tensor, rows: NDArray[np.int64], wanted: bool | Standardisation
) -> tuple[Tensor, Standardisation | None]:
    if isinstance(wanted, Standardisation):
        if len(wanted.mean) != x[0].numel():
            raise ValueError(
                f"standardise has the means of {len(wanted.mean)} inputs, but there are"
                f" {x[0].numel()}. Give others."
            )
        return wanted.apply(x), wanted
    if not wanted or not x.is_floating_point():
        return x, None
    found = Standardisation.of(x[torch.from_numpy(rows).to(x.device)].double().cpu().numpy())
    return found.apply(x), found
