"""Solver, estimator and outer optimizer from their specs. What is exported by its package can be
named, in snake or lower case.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from metanudge import optim, solvers
from metanudge.estimators import ESTIMATORS, Estimator
from metanudge.learner import MetaLearner
from metanudge.solvers import Solver, TorchOptimizer
from metanudge.training.errors import UserError
from metanudge.training.specs.language import Spec, known, normal, split
from metanudge.training.specs.targets import convert, make

TaskKind = Literal["classification", "regression"]
OptimizerFactory = Callable[..., torch.optim.Optimizer]


def _snake(name: str) -> str:
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)).lower()


def _concrete_solvers() -> dict[str, Any]:
    found: list[Any] = [getattr(solvers, name) for name in solvers.__all__]
    wanted: list[Any] = [c for c in found if dataclasses.is_dataclass(c) and hasattr(c, "solve")]
    return {_snake(c.__name__): c for c in wanted}


def _all_optimizers() -> dict[str, OptimizerFactory]:
    classes = [*vars(torch.optim).values(), *(getattr(optim, name) for name in optim.__all__)]
    wanted = [
        c
        for c in classes
        if isinstance(c, type)
        and issubclass(c, torch.optim.Optimizer)
        and c is not torch.optim.Optimizer
    ]
    return {c.__name__.lower(): c for c in wanted}


SOLVERS: dict[str, Any] = _concrete_solvers()
ESTIMATORS_BY_NAME: dict[str, Any] = {
    estimator.__name__.lower(): estimator for estimator in ESTIMATORS
}
OPTIMIZERS: dict[str, OptimizerFactory] = _all_optimizers()


def parse_solver(text: str, kind: TaskKind = "classification") -> Spec:
    """A solver's spec, with its options converted; `auto` becomes what suits the tasks (squared
    errors curve more than cross-entropy).
    """
    if normal(text) == "auto":
        return Spec(
            "gradient_descent", {"lr": 0.1 if kind == "classification" else 0.01, "steps": 5}
        )
    name, raw = split("--solver", text)
    name = known(name, ("auto", *SOLVERS), "--solver", "solver")
    if name == "auto":
        raise UserError(
            "--solver auto takes no options. Name the solver: gradient_descent:lr=0.1,steps=5."
        )
    if SOLVERS[name] is not TorchOptimizer:
        return Spec(name, convert(raw, SOLVERS[name], "--solver", name))
    own = {"optimizer", "steps", "tol", "batch_size"}
    values = convert({k: v for k, v in raw.items() if k in own}, TorchOptimizer, "--solver", name)
    if "optimizer" not in values:
        raise UserError(
            "--solver torch_optimizer needs an optimizer, e.g."
            " torch_optimizer:optimizer=adam,steps=5,lr=0.01."
        )
    values["optimizer"] = known(values["optimizer"], OPTIMIZERS, "--solver", "optimizer")
    rest = {key: value for key, value in raw.items() if key not in own}
    return Spec(
        name,
        values
        | convert(
            rest, OPTIMIZERS[values["optimizer"]], "--solver", values["optimizer"], also=sorted(own)
        ),
    )


def build_solver(text: str, kind: TaskKind = "classification") -> Solver:
    """The solver that a spec describes.

    Example:
        >>> build_solver("gradient-descent:lr=0.1,steps=5")
        GradientDescent(lr=0.1, steps=5, tol=None, batch_size=None)
    """
    spec = parse_solver(text, kind)
    options = dict(spec.options)
    if SOLVERS[spec.name] is TorchOptimizer:
        factory = OPTIMIZERS[options.pop("optimizer")]
        own = {key: options.pop(key) for key in ("steps", "tol", "batch_size") if key in options}
        return make("--solver", spec.name, TorchOptimizer, factory, **own, options=options)
    return make("--solver", spec.name, SOLVERS[spec.name], **options)


def parse_estimator(text: str) -> Spec:
    """An estimator's spec, with its options converted."""
    name, raw = split("--estimator", text)
    name = known(name, ESTIMATORS_BY_NAME, "--estimator", "estimator")
    return Spec(name, convert(raw, ESTIMATORS_BY_NAME[name], "--estimator", name))


def build_estimator(text: str) -> Estimator:
    """The estimator that a spec describes.

    Example:
        >>> build_estimator("imaml:cg_steps=3")
        IMAML(cg_steps=3, tol=0.0, damping=0.0)
    """
    spec = parse_estimator(text)
    return make("--estimator", spec.name, ESTIMATORS_BY_NAME[spec.name], **spec.options)


def parse_optimizer(text: str) -> Spec:
    """An outer optimizer's spec, with its options converted."""
    name, raw = split("--optimizer", text)
    name = known(name, OPTIMIZERS, "--optimizer", "optimizer")
    return Spec(name, convert(raw, OPTIMIZERS[name], "--optimizer", name))


def parameter_groups(learner: MetaLearner, lam_lr: float | None) -> list[Any]:
    """What an outer optimizer optimises: the learner's parameters; log λ, where it is learned, in a
    group without weight decay.
    """
    if learner.log_lam is None:
        return list(learner.parameters())
    own = {} if lam_lr is None else {"lr": lam_lr}
    return [
        {"params": list(learner.model.parameters())},
        {"params": list(learner.lam_parameters()), "weight_decay": 0.0, **own},
    ]


def build_optimizer(text: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The outer optimizer that a spec describes, for these parameters or groups of them."""
    spec = parse_optimizer(text)
    closure = inspect.signature(OPTIMIZERS[spec.name].step).parameters.get("closure")  # type: ignore[attr-defined]
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"--optimizer {spec.name} evaluates the objective several times per step and needs it"
            " to stay the same, which a stream of tasks does not. Use another, such as"
            " adam:lr=0.01; as inner solver it is --solver lbfgs."
        )
    return make("--optimizer", spec.name, OPTIMIZERS[spec.name], list(parameters), **spec.options)
