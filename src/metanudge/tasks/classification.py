"""`ClassEpisodes`: the base of every classification source. Classes and examples are drawn without
replacement.

One tensor holds all examples on the device, in the compact type they came in, or a file does where
they are too many; an episode is a set of row numbers, drawn with NumPy, and one gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.task import Batch, TaskBatch
from metanudge.tasks.counts import Count
from metanudge.tasks.draws import Keys, choose, fork
from metanudge.tasks.episodes import (
    SPLITS,
    Episodes,
    Split,
    Stream,
    as_indices,
    check_split,
)
from metanudge.tasks.on_disk import OnDisk


@dataclass(frozen=True)
class Pool:
    """The classes of one split, and which rows of the data belong to each.

    Example:
        >>> pool = Pool.of(np.array([1, 0, 1, 1]), names=["cat", "dog"])
        >>> pool.counts.tolist(), pool.rows.tolist()
        ([1, 3], [1, 0, 2, 3])
    """

    names: tuple[str, ...]
    rows: NDArray[np.int64]  # row numbers, class after class
    starts: NDArray[np.int64]  # (num_classes,): where each class begins in `rows`
    counts: NDArray[np.int64]  # (num_classes,)

    @classmethod
    def of(
        cls,
        labels: NDArray[np.int64],
        *,
        names: Sequence[str],
        rows: NDArray[np.int64] | None = None,
        keep: Sequence[int] | None = None,
    ) -> Pool:
        """A pool from one label per row.

        Args:
            labels: class number of every example, an index into `names`.
            names: class names.
            rows: the row number of every example; 0, 1, 2, … when None.
            keep: the classes that belong to this pool, in this order; all when None.
        """
        order = np.argsort(labels, kind="stable")
        sorted_rows = order if rows is None else rows[order]
        counts = np.bincount(labels, minlength=len(names)).astype(np.int64)
        starts = np.cumsum(counts) - counts
        kept = np.arange(len(names)) if keep is None else np.asarray(keep, dtype=np.int64)
        return cls(
            tuple(names[i] for i in kept), sorted_rows.astype(np.int64), starts[kept], counts[kept]
        )

    def members(self) -> NDArray[np.int64]:
        """The row numbers of all its classes, in order."""
        spans = zip(self.starts, self.counts, strict=True)
        parts = [self.rows[start : start + count] for start, count in spans]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def without_small(self, size: int) -> Pool:
        """The pool without the classes that have fewer than `size` examples."""
        kept = np.flatnonzero(self.counts >= size)
        return Pool(
            tuple(self.names[i] for i in kept), self.rows, self.starts[kept], self.counts[kept]
        )


class ClassEpisodes(Episodes):
    """N-way K-shot classification tasks from a table of examples.

    Labels are 0…ways−1 in the order in which the classes were drawn, so a class has no fixed label.
    Support and query are class-major: all examples of label 0, then those of label 1, and so on. No
    example occurs twice in a task. Images in uint8 come out as floats in [0, 1], floating inputs in
    `dtype`, other integers (token numbers) unchanged.

    Args:
        examples: all inputs, shape `(num_examples, *input_shape)`, in memory or on disk.
        pools: the classes of each split; a split without a pool has no tasks.
        ways, shots, queries, stream: see `Episodes`.
    """

    kind: ClassVar[Literal["classification", "regression"]] = "classification"

    def __init__(
        self,
        examples: Tensor | OnDisk,
        pools: Mapping[Split, Pool],
        *,
        ways: Count,
        shots: Count,
        queries: int,
        **stream: Unpack[Stream],
    ) -> None:
        super().__init__(ways=ways, shots=shots, queries=queries, **stream)
        if self.spans["ways"][0] == 1:
            raise ValueError(
                f"ways={ways} makes tasks of one class, in which there is nothing to tell apart."
                " Use 2 or more ways."
            )
        if isinstance(examples, Tensor):
            examples = examples.to(
                self.device, self.dtype if examples.is_floating_point() else None
            )
        self._examples = examples
        self._pools = dict(pools)
        self._problems = {split: self._problem(split) for split in SPLITS}
        if all(self._problems.values()):
            widest = max(SPLITS, key=lambda split: len(self.classes(split)))
            raise ValueError(self._problems[widest])

    @property
    def num_outputs(self) -> int:
        """Outputs a model for these tasks needs: one per way."""
        return self.ways

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input."""
        return tuple(self._examples.shape[1:])

    def classes(self, split: Split) -> tuple[str, ...]:
        """Names of the classes that the tasks of a split are drawn from."""
        check_split(split)
        return self._pools[split].names if split in self._pools else ()

    def episode_classes(
        self, indices: Iterable[int], split: Split = "train"
    ) -> list[tuple[str, ...]]:
        """For each episode the names of its classes, in the order of their labels; draws no
        examples.

        Example:
            >>> from metanudge.tasks import Labelled
            >>> animals = ["ant", "ant", "bee", "bee", "cat", "cat"]
            >>> source = Labelled(torch.arange(6), animals, ways=2, shots=1, queries=1,
            ...     splits=(1.0, 0.0, 0.0))
            >>> [names] = source.episode_classes([3])
            >>> [animals[int(row)] for row in source.task(3).support[0]] == list(names)
            True
        """
        numbers = as_indices(indices)
        found: list[tuple[str, ...]] = [()] * len(numbers)
        for places, source in self._by_size(numbers, split):
            drawn = source._classes(self._keys(numbers[places], split), split)
            for place, classes in zip(places, drawn, strict=True):
                found[place] = tuple(self._pools[split].names[c] for c in classes)
        return found

    def episode_rows(self, indices: Iterable[int], split: Split = "train") -> NDArray[np.int64]:
        """Which examples the episodes, all of one size, are made of, as row numbers of the data:
        `(num_tasks, ways, shots + queries)`, support first; draws none.
        """
        numbers = as_indices(indices)
        ((_, source),) = self._by_size(numbers, split)
        return source._rows(self._keys(numbers, split), split)

    def _problem(self, split: Split) -> str | None:
        """Why no task can be drawn from a split, or None when all is well."""
        names = self.classes(split)
        if len(names) < self.ways:
            others = ", ".join(f"{len(self.classes(s))} in {s}" for s in SPLITS)
            return (
                f"Split {split!r} of this {type(self).__name__} has {len(names)} classes, but"
                f" ways={self.ways} needs that many different ones in a task (classes: {others})."
                " Lower ways, or give this split more classes."
            )
        counts, needed = self._pools[split].counts, self.shots + self.queries
        smallest = int(counts.argmin())
        if counts[smallest] < needed:
            return (
                f"Class {names[smallest]!r} of split {split!r} has {counts[smallest]} examples, but"
                f" shots={self.shots} and queries={self.queries} need {needed} different ones of"
                f" each class ({int((counts < needed).sum())} of {len(names)} classes are too"
                " small). Lower shots or queries, or leave the small classes out."
            )
        return None

    def _classes(self, keys: Keys, split: Split) -> NDArray[np.int64]:
        """Which classes of the pool each episode is made of: `(num_tasks, ways)`, in the order of
        the labels.
        """
        if problem := self._problems[split]:
            raise ValueError(problem)
        size = len(self._pools[split].names)
        return choose(fork(keys, np.array([0])), np.array([size]), self.ways, limit=size)

    def _rows(self, keys: Keys, split: Split) -> NDArray[np.int64]:
        """Which rows each episode uses: `(num_tasks, ways, shots + queries)`, support first."""
        classes, pool = self._classes(keys, split), self._pools[split]
        places = choose(
            fork(keys[:, None], np.arange(1, self.ways + 1)),
            pool.counts[classes],
            self.shots + self.queries,
            limit=int(pool.counts.max()),
        )
        rows: NDArray[np.int64] = pool.rows[pool.starts[classes][..., None] + places]
        return rows

    def draw(self, keys: Keys, split: Split) -> tuple[Batch, Batch] | TaskBatch:
        """One task per key."""
        rows = self._rows(keys, split)
        return self._gather(rows[..., : self.shots]), self._gather(rows[..., self.shots :])

    def _gather(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        tasks, ways, each = rows.shape
        index = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1))
        if isinstance(self._examples, OnDisk):
            found = self._examples.rows(index)
            found = found.to(self.device, self.dtype if found.is_floating_point() else None)
        else:
            found = self._examples.index_select(0, index.to(self.device))
        inputs = found.view(tasks, ways * each, *self.input_shape)
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(self.dtype).div_(255)
        labels = torch.arange(ways, device=self.device).repeat_interleave(each).repeat(tasks, 1)
        return inputs, labels
