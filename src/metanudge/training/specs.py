"""Solver, estimator, outer optimizer and model from their specs (see `spec_language`).

What can be named is what stands in the registry beside the classes: `solvers.SOLVERS`,
`estimators.ESTIMATORS`, `models.MODELS`; optimizers are torch's and ours. A class or function
declares its options by its own signature, and judges their values when it is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from metanudge import models, optim
from metanudge.estimators import ESTIMATORS, Estimator
from metanudge.learner import MetaLearner
from metanudge.names import near
from metanudge.solvers import SOLVERS, Solver, TorchOptimizer
from metanudge.training.config import own_code
from metanudge.training.errors import UserError
from metanudge.training.spec_language import (
    Spec,
    convert,
    known,
    make,
    normal,
    options_of,
    split,
    split_options,
)

TaskKind = Literal["classification", "regression"]
HF = "hf:"
"""What a model of transformers is named by."""
_OF_THE_SOLVER = ("optimizer", "steps", "tol", "batch_size")  # the others are the optimizer's


# --- Code of the user's own, named as `module:attribute`


def named(text: str, flag: str, *, makes: str) -> tuple[str, dict[str, str], Any]:
    """Name, raw options and what is imported of `module:attribute:options`."""
    own = own_code(text)
    assert own is not None, text
    module, attribute, options = own
    name = f"{module}:{attribute}"
    where = f"{flag} {name}"
    return name, split_options(options, where), _imported(module, attribute, where, makes)


def function(text: str, flag: str, *, makes: str) -> tuple[str, dict[str, str], Any]:
    """The same, where it may be called: a class, an object or a function that is no part of Python
    itself.
    """
    own = named(text, flag, makes=makes)
    found = own[2]
    home = str(getattr(inspect.unwrap(found), "__module__", "")).partition(".")[0]
    if not callable(found) or home in sys.stdlib_module_names:
        raise UserError(
            f"{flag} {own[0]} is {getattr(found, '__qualname__', type(found).__name__)!r} of"
            f" {home or 'no module'}, which makes no {makes}. Name a function or class of yours."
        )
    return own


def _imported(module: str, attribute: str, where: str, makes: str) -> Any:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UserError(
            f"{where}: {module} is a module of Python itself and makes no {makes}. Name one of"
            " yours."
        )
    here = os.getcwd()
    # the installed command does not look in the current folder, `python -m` does
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{where}: the module {module!r} cannot be imported ({error})."
            " Give it as Python would import it from the current folder, e.g. my_nets:Net for"
            " my_nets.py."
        ) from error
    except AttributeError as error:
        names = [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
        raise UserError(f"{where}: {error}.{near(attribute, names)}") from error
    return found


def _parse(text: str, targets: Mapping[str, Any], what: str) -> Spec:
    flag = f"--{what}"
    name, raw = split(flag, text)
    name = known(name, targets, flag, what)
    return Spec(name, convert(raw, targets[name], flag, name))


# --- Solvers


def named_solvers() -> dict[str, type[Solver]]:
    """The solvers by their names in snake case."""
    words = r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+"
    return {"_".join(re.findall(words, kind.__name__)).lower(): kind for kind in SOLVERS}


def parse_solver(text: str, kind: TaskKind = "classification") -> Spec:
    """A solver's spec, with its options converted; `auto` becomes what suits the tasks (squared
    errors curve more than cross-entropy).
    """
    if normal(text) == "auto":
        lr = 0.1 if kind == "classification" else 0.01
        return Spec("gradient_descent", {"lr": lr, "steps": 5})
    solvers = named_solvers()
    name, raw = split("--solver", text)
    name = known(name, ("auto", *solvers), "--solver", "solver")
    if name == "auto":
        raise UserError(
            "--solver auto takes no options. Name the solver: gradient_descent:lr=0.1,steps=5."
        )
    if solvers[name] is not TorchOptimizer:
        return Spec(name, convert(raw, solvers[name], "--solver", name))
    own = {key: value for key, value in raw.items() if key in _OF_THE_SOLVER}
    rest = {key: value for key, value in raw.items() if key not in _OF_THE_SOLVER}
    values = convert(own, TorchOptimizer, "--solver", name)
    if "optimizer" not in values:
        raise UserError(
            "--solver torch_optimizer needs an optimizer, e.g."
            " torch_optimizer:optimizer=adam,steps=5,lr=0.01."
        )
    chosen = known(values["optimizer"], OPTIMIZERS, "--solver", "optimizer")
    also = sorted(_OF_THE_SOLVER)
    more = convert(rest, OPTIMIZERS[chosen], "--solver", chosen, also=also)
    return Spec(name, {**values, "optimizer": chosen, **more})


def build_solver(text: str, kind: TaskKind = "classification") -> Solver:
    """The solver that a spec describes.

    Example:
        >>> build_solver("gradient-descent:lr=0.1,steps=5")
        GradientDescent(lr=0.1, steps=5, tol=None, batch_size=None)
    """
    spec = parse_solver(text, kind)
    solver, options = named_solvers()[spec.name], dict(spec.options)
    if solver is TorchOptimizer:
        own = {key: options.pop(key) for key in _OF_THE_SOLVER if key in options}
        optimizer = OPTIMIZERS[own.pop("optimizer")]
        return make("--solver", spec.name, TorchOptimizer, optimizer, **own, options=options)
    return make("--solver", spec.name, solver, **options)


# --- Estimators


def named_estimators() -> dict[str, type[Estimator]]:
    """The estimators by their names in lower case."""
    return {kind.__name__.lower(): kind for kind in ESTIMATORS}


def parse_estimator(text: str) -> Spec:
    """An estimator's spec, with its options converted; `auto` is fobmaml."""
    return _parse("fobmaml" if normal(text) == "auto" else text, named_estimators(), "estimator")


def build_estimator(text: str) -> Estimator:
    """The estimator that a spec describes.

    Example:
        >>> build_estimator("imaml:cg_steps=3")
        IMAML(cg_steps=3, tol=0.0, damping=0.0)
    """
    spec = parse_estimator(text)
    return make("--estimator", spec.name, named_estimators()[spec.name], **spec.options)


# --- Outer optimizers


def _all_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    found = [*vars(torch.optim).values(), *(getattr(optim, name) for name in optim.__all__)]
    return {
        kind.__name__.lower(): kind
        for kind in found
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }


OPTIMIZERS = _all_optimizers()


def parse_optimizer(text: str) -> Spec:
    """An outer optimizer's spec, with its options converted."""
    if own_code(text):
        name, raw, found = function(text, "--optimizer", makes="optimizer")
        return Spec(name, convert(raw, found, "--optimizer", name))
    return _parse(text, OPTIMIZERS, "optimizer")


def build_optimizer(text: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The outer optimizer that a spec describes, for these parameters or groups of them."""
    spec = parse_optimizer(text)
    made = OPTIMIZERS.get(spec.name) or function(spec.name, "--optimizer", makes="optimizer")[2]
    step = getattr(made, "step", lambda closure=None: None)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"--optimizer {spec.name} evaluates the objective several times per step and needs it"
            " to stay the same, which a stream of tasks does not. Use another, such as"
            " adam:lr=0.01; as inner solver it is --solver lbfgs."
        )
    found = make("--optimizer", spec.name, made, list(parameters), **spec.options)
    if not isinstance(found, torch.optim.Optimizer):
        raise UserError(
            f"--optimizer {spec.name} made a {type(found).__name__}, no torch.optim.Optimizer."
        )
    return found


def parameter_groups(
    learner: MetaLearner, lam_lr: float | None, rate_lr: float | None = None
) -> list[Any]:
    """What an outer optimizer optimises: the learner's parameters; log λ and inner rates, where
    they are learned, in groups without weight decay.
    """
    _, *learned = learner.parameter_groups(None, lam_lr, rate_lr)
    fixed = getattr(learner.model, "fixed_start", ())
    own = [p for name, p in learner.model.named_parameters() if not name.startswith(fixed)]
    return [{"params": own}, *learned] if learned else own


# --- Models: one of ours, or the user's own as `module:attribute`, sized for the data


class Shapes(Protocol):
    """What a model must fit: an episode source says it, and a checkpoint remembers it."""

    @property
    def kind(self) -> TaskKind:
        """What the tasks are."""

    @property
    def num_outputs(self) -> int:
        """Outputs per example."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""


def parse_model(text: str, shapes: Shapes) -> Spec:
    """A model's spec; `auto` becomes the network that suits the data."""
    if normal(text) == "auto":
        return Spec(_suitable(shapes), {})
    if text.startswith(HF):
        folder = Path(name := text.removeprefix(HF)).expanduser()
        return Spec(HF + str(folder.resolve()) if name and folder.is_dir() else text, {})
    name, raw, factory = _model_factory(text)
    return Spec(name, convert(raw, factory, "--model", name) if raw else {})


def build_model(text: str, shapes: Shapes) -> nn.Module:
    """The network that a spec describes, its inputs and outputs sized for the data.

    Example:
        >>> from metanudge.tasks import Sinusoid
        >>> build_model("mlp:hidden=(8,)", Sinusoid()).head
        Linear(in_features=8, out_features=1, bias=True)
    """
    spec = parse_model(text, shapes)
    _, _, factory = _model_factory(spec.name)
    if isinstance(factory, nn.Module):
        return factory
    model = make("--model", spec.name, factory, **(_sizes(factory, shapes) | dict(spec.options)))
    if not isinstance(model, nn.Module):
        raise UserError(
            f"--model {spec.name} made a {type(model).__name__}, not an nn.Module. Name a class or"
            " function that makes one."
        )
    return model


def is_made(text: str) -> bool:
    """Whether a spec makes a network, and is not one that can be trained once only."""
    return (
        normal(text) == "auto"
        or text.startswith(HF)
        or not isinstance(_model_factory(text)[2], nn.Module)
    )


def _model_factory(text: str) -> tuple[str, dict[str, str], Any]:
    """Name, raw options and factory of a model."""
    if own_code(text):
        return _own_model(*named(text, "--model", makes="nn.Module"))
    name, raw = split("--model", text)
    name = known(name, ("auto", *models.MODELS), "--model", "model")
    return name, raw, models.MODELS.get(name)


def _own_model(name: str, raw: dict[str, str], found: Any) -> tuple[str, dict[str, str], Any]:
    if not _makes_modules(found):
        kind = type(found).__name__
        what = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {kind}"
        raise UserError(
            f"--model {name} is {what}. Name a subclass of nn.Module, or a function of yours that"
            " makes one."
        )
    return name, raw, found


def _makes_modules(found: Any) -> bool:
    """Whether this may be called for a network, as far as can be told without calling it."""
    if isinstance(found, nn.Module):
        return True
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    if isinstance(found, functools.partial):
        return _makes_modules(found.func)
    function = inspect.unwrap(found)
    home = str(getattr(function, "__module__", "")).partition(".")[0]
    return (
        inspect.isfunction(function) or inspect.ismethod(function)
    ) and home not in sys.stdlib_module_names


def _suitable(shapes: Shapes) -> str:
    shape = shapes.input_shape
    if (form := getattr(shapes, "form", None)) is not None:
        return "text" if form.vocabulary else "features"
    if len(shape) == 3 and min(shape[1:]) >= 16:
        return "conv4"
    if shapes.kind == "regression" and len(shape) == 1 and getattr(shapes, "targets", None):
        return "table"
    if shape == (40,) and shapes.kind == "classification":
        return "conv1d"
    return "mlp"


def vocabulary_of(shapes: Shapes) -> int:
    """How many tokens texts are made of; 0 where inputs are numbers."""
    return getattr(getattr(shapes, "form", None), "vocabulary", 0)


def _sizes(factory: Callable[..., Any], shapes: Shapes) -> dict[str, Any]:
    """The arguments of a model that follow from the data, for those it takes."""
    shape = shapes.input_shape
    facts: dict[str, Any] = {
        "ways": shapes.num_outputs,
        "num_outputs": shapes.num_outputs,
        "out_features": shapes.num_outputs,
        "num_classes": shapes.num_outputs,
        "input_shape": shape,
        "in_features": math.prod(shape),
        "in_channels": shape[0],
        "image_size": shape[-2:] if len(shape) == 3 and shape[1] != shape[2] else shape[-1],
        "length": shape[-1],
    }
    accepted = options_of(factory)
    if size := vocabulary_of(shapes):
        facts["vocabulary"] = size
    if "d_model" in accepted and len(shape) == 2:
        facts |= {"length": shape[0], "d_model": shape[1]}
    return {name: value for name, value in facts.items() if name in accepted}
