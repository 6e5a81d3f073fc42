"""Inner solves that overshoot, and meta-gradients that drown in their own error: noticed, and said once."""

from __future__ import annotations

from collections import deque

_RECENT = 20


class DivergenceWatch:
    """Looks at whether the inner residual grew, meta-step by meta-step.

    Example:
        >>> watch = DivergenceWatch()
        >>> [step for step in range(200) if watch.see(1.0, 2.0)]
        [19]
    """

    def __init__(self) -> None:
        self._grew: deque[bool] = deque(maxlen=_RECENT)
        self._warned = False
        self._doubted = False

    def see(self, start: float, end: float) -> str | None:
        """A warning, the first time that more than half of the recent meta-steps ended with a larger residual than they began with."""
        self._grew.append(end > start)
        if self._warned or len(self._grew) < _RECENT or sum(self._grew) <= _RECENT / 2:
            return None
        self._warned = True
        return (
            f"The inner residual grew in {sum(self._grew)} of {_RECENT} meta-steps: the inner steps overshoot. Training may work all the "
            "same, and fomaml often does; fobmaml and imaml rely on inner steps that settle and may stop learning. Use a smaller lr in "
            "--solver or a larger --lam."
        )

    def see_error(self, error: float) -> str | None:
        """A warning, the first time that no ν was found at which the meta-gradient is larger than its error.

        Example:
            >>> watch = DivergenceWatch()
            >>> [bool(watch.see_error(error)) for error in (0.2, 1.5, 1.5)]
            [False, True, False]
        """
        if self._doubted or error < 1:
            return None
        self._doubted = True
        return (
            "No ν was found at which the meta-gradient of a few tasks is larger than its error: the inner steps overshoot, or cross the "
            "kinks of ReLU and max-pooling too often. Noise averages out over tasks and meta-steps, so training may work all the same. A "
            "smaller lr in --solver, a larger --lam or more --tasks help; so does --estimator fobmaml:stencil=tangent, which has no ν."
        )
