"""Inner solves that overshoot: noticed over many meta-steps, said once."""

from __future__ import annotations

from collections import deque

_RECENT = 50


class DivergenceWatch:
    """Looks at whether the inner residual grew, meta-step by meta-step.

    Example:
        >>> watch = DivergenceWatch()
        >>> [step for step in range(200) if watch.see(1.0, 2.0)]
        [49]
    """

    def __init__(self) -> None:
        self._grew: deque[bool] = deque(maxlen=_RECENT)
        self._warned = False

    def see(self, start: float, end: float) -> str | None:
        """A warning, the first time that more than half of the recent meta-steps ended with a larger residual than they began with."""
        self._grew.append(end > start)
        if self._warned or len(self._grew) < _RECENT or sum(self._grew) <= _RECENT / 2:
            return None
        self._warned = True
        return (
            f"The inner residual grew in {sum(self._grew)} of {_RECENT} meta-steps: the inner steps overshoot. Training may "
            "work all the same; for accurate meta-gradients use a smaller lr in --solver or a larger --lam."
        )
