"""How long a run will take, said once after a few meta-steps where that is hours on a CPU."""

from __future__ import annotations

from statistics import median

from metanudge.training.clock import clock
from metanudge.training.config import TrainConfig

_LOOK = 3
_LONG = 3600.0


class DurationWatch:
    """Looks at the first meta-steps; the very first is left out, which warms up.

    Args:
        config: of the run.
        width: solves a task and meta-step; an evaluated task takes one.
        done: meta-steps that were done before.

    Example:
        >>> watch = DurationWatch(TrainConfig("photos", tasks=4, iterations=1000, eval_every=0),
        ...     width=2, done=0)
        >>> [watch.see(seconds) is not None for seconds in (60.0, 20.0, 20.0, 20.0)]
        [False, False, True, False]
    """

    def __init__(self, config: TrainConfig, *, width: int, done: int) -> None:
        self._config, self._width, self._done = config, width, done
        self._seconds: list[float] = []

    def see(self, seconds: float) -> str | None:
        """A note, where the run will take more than an hour after the last of the first few
        meta-steps.
        """
        if len(self._seconds) == _LOOK:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < _LOOK:
            return None
        config, step = self._config, median(self._seconds[1:])
        left = config.iterations - self._done - _LOOK
        evaluated = config.test_tasks + (
            left // config.eval_every * config.eval_tasks if config.eval_every else 0
        )
        evaluation = evaluated * step / config.tasks / max(1, self._width)
        if left * step + evaluation < _LONG:
            return None
        return (
            f"This will take about {clock(left * step + evaluation)} on this CPU: {left} meta-steps"
            f" of {step:.2g} s, and {evaluated} tasks to evaluate. To cut it: fewer --iterations or"
            f" --tasks ({config.tasks}), --eval-tasks, --test-tasks, --queries; a smaller --model"
            " (conv4:channels=32); smaller images (--data-options image_size=28); a GPU (--device"
            " cuda). Ctrl-C saves; --resume goes on."
        )
