"""What is learned: a model and its loss, and the term that ties a task's parameters to θ; and how a
meta-gradient reaches `.grad`, or autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.engines.stacked import compilation
from metanudge.engines.undisturbed import claimed, restored, uninterrupted
from metanudge.objective import Loss, Metrics, Objective, own_loss
from metanudge.params import Params
from metanudge.problem import Problem
from metanudge.proximal import LogStiffness, Per, Regulariser, Stiffness
from metanudge.rates import InnerRates, LearnedRates, RatePer
from metanudge.solvers import Solver
from metanudge.solvers.rated import own_rate
from metanudge.spread import at_rest, is_spread, spread_over, whole


class Setting(nn.Module):
    """The two-level problem of a learner, whose attributes may be exchanged at any time; see
    `MetaLearner`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        lam: Stiffness | None,
        learn_lam: Per | None,
        learn_lr: RatePer | InnerRates | None,
        adapt: str | Sequence[str] | None,
        regulariser: Regulariser | None,
        query_loss: Loss | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
        for name, given, default in (
            ("loss", loss, "a model that computes its own"),
            ("query_loss", query_loss, "that of the support set"),
        ):
            if given is not None and not callable(given):
                raise TypeError(
                    f"{name} must be callable, got {type(given).__name__}. Pass e.g."
                    f" torch.nn.functional.cross_entropy, or None for {default}."
                )
        if regulariser is not None and (lam is not None or learn_lam is not None):
            raise ValueError(
                "regulariser stands in place of ½λ‖φ − θ‖², so"
                f" {'lam' if lam is not None else 'learn_lam'} would have no effect. Give one of"
                " them."
            )
        if regulariser is not None and not callable(regulariser):
            raise TypeError(
                f"regulariser must be a function of (phi, theta), got {type(regulariser).__name__}."
            )
        self.model = model
        self.loss: Loss = own_loss if loss is None else loss
        self.query_loss = query_loss
        self.metrics = _checked_metrics(metrics)
        self.lam: Stiffness = lam if lam is not None else 2.0
        self.learn_lam = learn_lam
        self.learn_lr = (
            learn_lr
            if learn_lr is None or isinstance(learn_lr, InnerRates)
            else InnerRates(learn_lr)
        )
        self.regulariser = regulariser
        self.adapting = adapt
        self.log_lam: LogStiffness | None = None
        self.log_lr: LearnedRates | None = None  # positive ones
        self.lr: LearnedRates | None = None
        self._made: tuple[Hashable, Problem, Any] | None = None
        self._away = False  # the model holds what it has adapted to

    def _settle(self, solver: Solver) -> None:
        """Make the problem, with λ and the solver's rate among the parameters where they are
        learned; nothing else may be asked before.
        """
        fixed = self.problem()
        if self.learn_lam is not None:
            self.log_lam = LogStiffness(self.lam, self.learn_lam, fixed.parameters)
        if self.learn_lr is not None:
            start = own_rate(solver)
            rates = LearnedRates(self.learn_lr, start, solver.steps, fixed.parameters)
            setattr(self, "log_lr" if self.learn_lr.positive else "lr", rates)
        self.problem()

    def _describe(self) -> str:
        """What ties a task to θ, and what adapts, for `repr`."""
        term: dict[str, object] = {"lam": self.lam}
        if self.regulariser is not None:
            term = {"regulariser": self.regulariser}
        more = {"learn_lam": self.learn_lam, "learn_lr": self.learn_lr, "adapt": self.adapting}
        shown = term | {name: value for name, value in more.items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def problem(self) -> Problem:
        """The two-level problem as it stands: made anew when parameters were frozen, moved, cast or
        exchanged.
        """
        at_rest(self.model)  # or its parameters might be gathered copies
        key = self._fingerprint()
        if self._made is None or self._made[0] != key:
            term = self.log_lam if self.log_lam is not None else self.lam
            objective, patterns = Objective(self.model, self.loss), self.adapting
            problem = Problem(
                objective,
                term,
                adapt=patterns,
                regulariser=self.regulariser,
                query_loss=self.query_loss,
                metrics=self.metrics,
                zero_lam=self._takes_zero_lam(),
                rates=self.learned_rates,
            )
            # What the key knows by its id is kept alive with it: a freed object's id may be given
            # to another.
            lam = dict(self.lam) if isinstance(self.lam, Mapping) else self.lam
            kept = (lam, self.log_lam, self.learned_rates, self.query_loss, *self.metrics.values())
            self._made = (key, problem, kept)
        return self._made[1]

    def stiffness(self) -> Params:
        """λ of each parameter that adapts as it is now, 0-d or of the parameter's shape
        (copies).
        """
        problem = self.problem()
        problem.proximal.refresh()
        own = problem.parameters
        return {
            n: whole(leaf.clone(), own[n]) if leaf.ndim else leaf.clone()
            for n, leaf in problem.lam.items()
        }

    def lam_parameters(self) -> Iterator[nn.Parameter]:
        """log λ, where it is learned."""
        if self.log_lam is not None:
            yield from self.log_lam.parameters()

    @property
    def learned_rates(self) -> LearnedRates | None:
        """`log_lr` or `lr`, where inner rates are learned."""
        return self.lr if self.log_lr is None else self.log_lr

    def rates(self) -> Params:
        """The learned inner rate of each parameter that adapts as it is now: 0-d, of the
        parameter's shape, or one per step (copies); empty where none is learned.
        """
        if self.learned_rates is None:
            return {}
        now = self.learned_rates.now()
        return {n: now.whole(n).clone() for n in self.problem().parameters}

    def rate_parameters(self) -> Iterator[nn.Parameter]:
        """What is kept of the inner rates, where they are learned."""
        if self.learned_rates is not None:
            yield from self.learned_rates.parameters()

    def parameter_groups(
        self, lr: float | None, lam_lr: float | None = None, rate_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: the model's with `lr` (None: the optimizer's own); log
        λ with `lam_lr` and learned inner rates with `rate_lr` (default: `lr`), without weight
        decay.

        Example:
            >>> import metanudge as mn, torch
            >>> loss = nn.functional.mse_loss
            >>> learner = mn.MetaLearner(nn.Linear(2, 1), loss, learn_lam="tensor")
            >>> optimizer = torch.optim.AdamW(learner.parameter_groups(lr=1e-3, lam_lr=1e-2))
            >>> [(len(group["params"]), group["lr"], group["weight_decay"])
            ...     for group in optimizer.param_groups]
            [(2, 0.001, 0.01), (2, 0.01, 0.0)]
        """
        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters()), **_at(lr)}]
        for own, name, what, parameters in (
            (lam_lr, "lam", "λ is", [*self.lam_parameters()]),
            (rate_lr, "rate", "inner rates are", [*self.rate_parameters()]),
        ):
            if parameters:
                rate = _at(lr if own is None else own)
                groups.append({"params": parameters, "weight_decay": 0.0, **rate})
            elif own is not None:
                learn = "learn_lam" if name == "lam" else "learn_lr"
                raise ValueError(
                    f"{name}_lr={own!r} was given, but {what} not learned. Make the learner with"
                    f" {learn}, or leave {name}_lr out."
                )
        return groups

    def _fingerprint(self) -> Hashable:
        """What changes when the problem does, without waiting for the device."""
        parts = (self.model, self.loss, self.regulariser, self.log_lam, self.learned_rates)
        return (
            tuple((id(p), p.requires_grad, p.device, p.dtype) for p in self.parameters()),
            tuple(map(id, parts)),
            id(self.query_loss),
            tuple((name, id(metric)) for name, metric in self.metrics.items()),
            _fingerprint(self.lam),
            tuple(self.adapting) if isinstance(self.adapting, list) else self.adapting,
            self._takes_zero_lam(),
        )

    def _takes_zero_lam(self) -> bool:
        """Whether λ may be 0: not where estimates divide by it."""
        return False


def _at(lr: float | None) -> dict[str, float]:
    return {} if lr is None else {"lr": lr}


def _checked_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a mapping from names to functions of (output, target), got"
            f" {type(metrics).__name__}. Write e.g. metrics={{'mae': nn.functional.l1_loss}}."
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric):
            raise TypeError(
                f"metrics[{name!r}] is {type(metric).__name__}. Give a name and a function of"
                " (output, target) that returns a number."
            )
    return dict(metrics)


def _fingerprint(lam: Stiffness) -> Hashable:
    if isinstance(lam, Mapping):
        return tuple((name, _fingerprint(value)) for name, value in lam.items())
    return (id(lam), lam._version) if isinstance(lam, Tensor) else lam


@contextmanager
def at_work(setting: Setting, *, compile: bool, alone: bool = True) -> Iterator[Problem]:
    """Within, signals wait, the model is ours (or at least nobody else's), and gradients are on, as
    inner solves need them.
    """
    if setting._away:
        raise RuntimeError(
            "Within `with learner.adapted(...)` the model holds what it has adapted to, not θ."
            " Leave the block first, or use learner.adapt, which makes a copy."
        )
    enabled = torch.is_grad_enabled()
    assert setting._made is not None
    with (
        uninterrupted(),
        claimed(setting._made[1], alone=alone),
        restored(lambda: torch._C._set_grad_enabled(enabled)),
        restored(lambda: at_rest(setting.model)),
    ):
        # only now: another thread's work would look like exchanged parameters
        problem = setting.problem()
        compiling = nullcontext() if compile else compilation(False)
        spread = spread_over(problem.spread)
        with torch.inference_mode(False), torch.enable_grad(), compiling, spread:
            yield problem


def add_to_grad(gradient: Params, parameters: Mapping[str, Tensor]) -> None:
    """Add a meta-gradient to `.grad`, and leave nothing of it in `gradient`; hooks on the
    parameters see it as they would see an ordinary gradient.
    """
    leaves = [gradient.pop(n).to(p.dtype) for n, p in parameters.items()]
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values()):
        _Gradients.apply(leaves, *parameters.values()).backward()
    else:
        _add(leaves, list(parameters.values()))


@torch.no_grad()
def _add(gradients: list[Tensor], parameters: list[Tensor]) -> None:
    """What autograd does where no hook is registered, in a fraction of its time: a thread of its
    own and a node for each parameter.

    All are written or none: the first ones can be taken back, the others are written at once.
    """
    pairs = list(zip(parameters, gradients, strict=True))
    known = [(p.grad, g) for p, g in pairs if p.grad is not None]
    known.sort(key=lambda pair: is_spread(pair[0]))  # one kind at a time, for torch's sake
    new = [
        (p, g if g.stride() == p.stride() else torch.empty_like(p).copy_(g))
        for p, g in pairs
        if p.grad is None
    ]
    try:
        for p, g in new:
            p.grad = g
        for _, alike in groupby(known, key=lambda pair: is_spread(pair[0])):
            torch._foreach_add_(*map(list, zip(*alike, strict=True)))
    except BaseException:
        for p, _ in new:
            p.grad = None
        raise


class _Gradients(torch.autograd.Function):
    """A zero whose derivative in each tensor is a given one."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        # autograd takes a gradient over that nobody else holds, and copies it otherwise
        ctx.gradients.clear()
        return (None, *gradients)


def meta_loss(
    compute: Callable[[], tuple[Params, float]], parameters: dict[str, nn.Parameter]
) -> Tensor:
    """A query loss whose derivative is a meta-gradient; `compute` makes both."""
    return _MetaLoss.apply(compute, *parameters.values())


class _MetaLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], tuple[Params, float]], *parameters: Tensor
    ) -> Tensor:
        gradient, loss = compute()
        ctx.save_for_backward(
            *(g.to(p.dtype) for g, p in zip(gradient.values(), parameters, strict=True))
        )
        return parameters[0].new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return (None, *(g * outputs[0] for g in ctx.saved_tensors))
