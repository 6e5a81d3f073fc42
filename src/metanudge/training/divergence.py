"""Inner solves that overshoot, and meta-gradients that drown in their own error: noticed, and said
once.
"""

from __future__ import annotations

from collections import deque

from metanudge.solvers import GradientDescent, Solver, stability_advice
from metanudge.training.errors import UserError

_RECENT = 20


def check_steps(lam: float, solver: Solver) -> None:
    """Refuse gradient descent that the proximal term alone drives away from θ: each step multiplies
    φ − θ by 1 − lr·λ.

    Example:
        >>> check_steps(30.0, GradientDescent(lr=0.1, steps=5))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        metanudge.training.errors.UserError: --lam 30 with lr=0.1 in --solver: lr·λ is 3, ...
    """
    if isinstance(solver, GradientDescent) and lam * solver.lr >= 2:
        raise UserError(
            f"--lam {lam:g} with lr={solver.lr:g} in --solver: lr·λ is {lam * solver.lr:.3g}, and"
            " from 2 on every inner step ends further from the initialisation than it began,"
            f" whatever the data. Use lr below 2/λ = {2 / lam:.3g}, or --lam below 2/lr ="
            f" {2 / solver.lr:.3g}."
        )


class DivergenceWatch:
    """Looks at whether the inner residual grew, meta-step by meta-step.

    Args:
        lr: the solver's, where it has one.
        lam: λ.

    Example:
        >>> watch = DivergenceWatch()
        >>> [step for step in range(200) if watch.see(1.0, 2.0)]
        [19]
    """

    def __init__(self, lr: float | None = None, lam: float | None = None) -> None:
        self._lr, self._lam = lr, lam
        self._grew: deque[bool] = deque(maxlen=_RECENT)
        self._warned = False
        self._doubted = False

    def see(self, start: float, end: float) -> str | None:
        """A warning, the first time that more than half of the recent meta-steps ended with a
        larger residual than they began with.
        """
        self._grew.append(end > start)
        if self._warned or len(self._grew) < _RECENT or sum(self._grew) <= _RECENT / 2:
            return None
        self._warned = True
        return (
            f"The inner residual grew in {sum(self._grew)} of {_RECENT} meta-steps: the inner steps"
            " overshoot. Training may work all the same, and fomaml often does; fobmaml and imaml"
            f" rely on inner steps that settle and may stop learning. {self._remedy()}"
        )

    def _remedy(self) -> str:
        text = stability_advice(self._lr, self._lam, where="lr in --solver", stiffness="--lam")
        return f"{text[0].upper()}{text[1:]}."

    def see_error(self, error: float) -> str | None:
        """A warning, the first time that no ν was found at which the meta-gradient is larger than
        its error.

        Example:
            >>> watch = DivergenceWatch()
            >>> [bool(watch.see_error(error)) for error in (0.2, 1.5, 1.5)]
            [False, True, False]
        """
        if self._doubted or error < 1:
            return None
        self._doubted = True
        return (
            "No ν was found at which the meta-gradient of a few tasks is larger than its error:"
            " the inner steps overshoot, or cross the kinks of ReLU and max-pooling too often."
            " Noise averages out over tasks and meta-steps, so training may work all the same."
            f" {self._remedy()} More --tasks help too, and so does --estimator"
            " fobmaml:stencil=tangent, which has no ν."
        )
