"""Drawing tasks while the device works on the last ones."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from metanudge.task import TaskBatch
from metanudge.tasks.episodes import Episodes, Split


class Ahead:
    """Batches of a source, each drawn in a thread of its own while the one before is in use.

    Episodes are functions of their number, so what is drawn ahead and then not asked for is simply
    forgotten.

    Args:
        source: where the tasks come from.
        split: "train", "val" or "test".

    Example:
        >>> from metanudge.tasks import Sinusoid
        >>> ahead = Ahead(Sinusoid(seed=0))
        >>> first, second = ahead.batch(range(2), then=range(2, 4)), ahead.batch(range(2, 4))
        >>> len(first), bool((second[0].support[0] == Sinusoid(seed=0).task(2).support[0]).all())
        (2, True)
    """

    def __init__(self, source: Episodes, split: Split = "train") -> None:
        self._source = source
        self._split: Split = split
        self._pool: ThreadPoolExecutor | None = None
        self._next: tuple[range, Future[TaskBatch]] | None = None

    def batch(self, indices: range, *, then: range | None = None) -> TaskBatch:
        """The episodes with these indices; those of `then` are begun with when they are there."""
        known, self._next = self._next, None
        if known is not None and known[0] == indices:
            drawn = known[1].result()
        else:
            drawn = self._source.batch(indices, self._split)
        if then is not None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="metanudge-tasks")
            self._next = then, self._pool.submit(self._source.batch, then, self._split)
        return drawn

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
