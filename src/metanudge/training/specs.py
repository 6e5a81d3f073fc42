"""The spec language of the command line: `NAME`, or `NAME:key=value,key=value`.

    fobmaml:nu=0.1,stencil=forward        gradient_descent:lr=0.1,steps=5        adam:lr=0.01,betas=(0.9,0.99)
    torch_optimizer:optimizer=adam,steps=5,lr=0.01        conv4:channels=32        my_package.nets:Net:width=64

Names match whatever their case, `-` and `_` (`FO-MAML`, `fomaml`). Values are converted to the types that the target declares, and
the target itself judges them. `canonical` writes a spec in one fixed way, so that two specs mean the same when they are equal.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from metanudge import models, optim, solvers
from metanudge.estimators import ESTIMATORS, Estimator
from metanudge.solvers import Solver, TorchOptimizer
from metanudge.training.config import near
from metanudge.training.errors import UserError

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class Shapes(Protocol):
    """What a model must fit: an episode source says it, and a checkpoint remembers it."""

    @property
    def kind(self) -> Literal["classification", "regression"]:
        """What the tasks are."""

    @property
    def num_outputs(self) -> int:
        """Outputs per example."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""


@dataclass(frozen=True)
class Spec:
    """A name and its options, converted; `str` gives the canonical text.

    Example:
        >>> str(parse_estimator("FO-B-MAML:stencil=forward,nu=1e-1"))
        'fobmaml:nu=0.1,stencil=forward'
    """

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        options = ",".join(f"{key}={show(value)}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


# --- The four things a spec can name ---------------------------------------------------------------------------------


def parse_solver(text: str) -> Spec:
    """A solver's spec, with its options converted."""
    name, raw = split("--solver", text)
    name = known(name, SOLVERS, "--solver", "solver")
    if SOLVERS[name] is not TorchOptimizer:
        return Spec(name, convert(raw, SOLVERS[name], "--solver", name))
    own = {"optimizer", "steps", "tol", "batch_size"}
    values = convert({k: v for k, v in raw.items() if k in own}, TorchOptimizer, "--solver", name)
    if "optimizer" not in values:
        raise UserError("--solver torch_optimizer needs an optimizer, e.g. torch_optimizer:optimizer=adam,steps=5,lr=0.01.")
    values["optimizer"] = known(values["optimizer"], OPTIMIZERS, "--solver", "optimizer")
    rest = {key: value for key, value in raw.items() if key not in own}
    return Spec(name, values | convert(rest, OPTIMIZERS[values["optimizer"]], "--solver", values["optimizer"], also=sorted(own)))


def build_solver(text: str) -> Solver:
    """The solver that a spec describes.

    Example:
        >>> build_solver("gradient-descent:lr=0.1,steps=5")
        GradientDescent(lr=0.1, steps=5, tol=None, batch_size=None)
    """
    spec = parse_solver(text)
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
        IMAML(cg_steps=3, tol=0.0)
    """
    spec = parse_estimator(text)
    return make("--estimator", spec.name, ESTIMATORS_BY_NAME[spec.name], **spec.options)


def parse_optimizer(text: str) -> Spec:
    """An outer optimizer's spec, with its options converted."""
    name, raw = split("--optimizer", text)
    name = known(name, OPTIMIZERS, "--optimizer", "optimizer")
    return Spec(name, convert(raw, OPTIMIZERS[name], "--optimizer", name))


def build_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer that a spec describes, for these parameters."""
    spec = parse_optimizer(text)
    closure = inspect.signature(OPTIMIZERS[spec.name].step).parameters.get("closure")  # type: ignore[attr-defined]
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"--optimizer {spec.name} evaluates the objective several times per step and needs it to stay the same, which a "
            "stream of tasks does not. Use another, such as adam:lr=0.01; as inner solver it is --solver lbfgs."
        )
    return make("--optimizer", spec.name, OPTIMIZERS[spec.name], list(parameters), **spec.options)


def parse_model(text: str, shapes: Shapes) -> Spec:
    """A model's spec; `auto` becomes the network that suits the data."""
    if normal(text) == "auto":
        return Spec(_suitable(shapes), {})
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
        raise UserError(f"--model {spec.name} made a {type(model).__name__}, not an nn.Module. Name a class or function that makes one.")
    return model


# --- Names -----------------------------------------------------------------------------------------------------------


def normal(name: str) -> str:
    """A name without case, hyphens and underscores."""
    return re.sub(r"[-_\s]", "", name).lower()


def known(name: str, names: Iterable[str], flag: str, what: str) -> str:
    """The name as it is listed, or an error with the nearest one."""
    spelled = {normal(candidate): candidate for candidate in names}
    if normal(name) not in spelled:
        suggestion = near(normal(name), spelled)
        for plain, candidate in spelled.items():
            suggestion = suggestion.replace(f"'{plain}'", f"'{candidate}'")
        raise UserError(f"{flag}: there is no {what} {name!r}.{suggestion} The choices are {', '.join(spelled.values())}.")
    return spelled[normal(name)]


def _snake(name: str) -> str:
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)).lower()


def _concrete_solvers() -> dict[str, Any]:
    found: list[Any] = [getattr(solvers, name) for name in solvers.__all__]
    wanted: list[Any] = [c for c in found if dataclasses.is_dataclass(c) and hasattr(c, "solve")]
    return {_snake(c.__name__): c for c in wanted}


def _all_optimizers() -> dict[str, OptimizerFactory]:
    classes = [*vars(torch.optim).values(), *(getattr(optim, name) for name in optim.__all__)]
    wanted = [c for c in classes if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer]
    return {c.__name__.lower(): c for c in wanted}


SOLVERS: dict[str, Any] = _concrete_solvers()
ESTIMATORS_BY_NAME: dict[str, Any] = {estimator.__name__.lower(): estimator for estimator in ESTIMATORS}
OPTIMIZERS: dict[str, OptimizerFactory] = _all_optimizers()


def make(flag: str, name: str, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a target; what it refuses becomes a `UserError` that names the flag."""
    needed = [n for n, p in list(inspect.signature(target).parameters.items())[len(args) :] if _required(p) and n not in options]
    if needed:
        example = ",".join(f"{key}=..." for key in needed)
        raise UserError(f"{flag} {name} needs the option{'s' * (len(needed) > 1)} {', '.join(needed)}. Write {name}:{example}.")
    try:
        return target(*args, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"{flag} {name}: {error}") from error


def _required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variadic


def _model_factory(text: str) -> tuple[str, dict[str, str], Any]:
    """Name, raw options and factory of a model: one of ours, or `module:attribute`."""
    parts = text.split(":")
    if len(parts) > 1 and "=" not in parts[1] and parts[1]:
        name, options = ":".join(parts[:2]), ":".join(parts[2:])
        return name, split_options(options, f"--model {name}"), _import(parts[0], parts[1])
    name, raw = split("--model", text)
    name = known(name, ("auto", *models.MODELS), "--model", "model")
    return name, raw, models.MODELS.get(name)


def _import(module: str, attribute: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:  # the installed command does not look in the current folder, `python -m` does
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"--model {module}:{attribute}: the module {module!r} cannot be imported ({error}). "
            "Give it as Python would import it from the current folder, e.g. my_nets:Net for my_nets.py."
        ) from error
    except AttributeError as error:
        names = [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
        raise UserError(f"--model {module}:{attribute}: {error}.{near(attribute, names)}") from error
    if not callable(found):
        raise UserError(f"--model {module}:{attribute} is a {type(found).__name__}. Name a class or function that makes an nn.Module.")
    return found


def _suitable(shapes: Shapes) -> str:
    shape = shapes.input_shape
    if len(shape) == 3 and shape[1] == shape[2] >= 16:
        return "conv4"
    if shape == (40,) and shapes.kind == "classification":
        return "conv1d"
    return "mlp"


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
        "image_size": shape[-1],
        "length": shape[-1],
    }
    accepted = _parameters(factory)
    if "d_model" in accepted and len(shape) == 2:
        facts |= {"length": shape[0], "d_model": shape[1]}
    return {name: value for name, value in facts.items() if name in accepted}


# --- Text ↔ options --------------------------------------------------------------------------------------------------


def split(flag: str, text: str) -> tuple[str, dict[str, str]]:
    """Name and raw options of a spec."""
    name, colon, options = text.partition(":")
    if not name.strip():
        raise UserError(f"{flag} {text!r} names nothing. Write NAME or NAME:key=value,key=value.")
    return name.strip(), split_options(options, f"{flag} {name}") if colon else {}


def split_options(text: str, where: str) -> dict[str, str]:
    """`key=value,key=value` as a dict; commas inside brackets and quotes belong to the value.

    Example:
        >>> split_options("hidden=(64,64),activation=tanh", "--model mlp")
        {'hidden': '(64,64)', 'activation': 'tanh'}
    """
    options: dict[str, str] = {}
    for part in _split_commas(text, where):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UserError(f"{where}: {part.strip()!r} is not an option. Write key=value,key=value.")
        if key in options:
            raise UserError(f"{where}: the option {key!r} is given twice. Keep one of them.")
        options[key] = value.strip()
    return options


def _split_commas(text: str, where: str) -> list[str]:
    parts, depth, quote, begin = [], 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[place - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    if depth or quote:
        raise UserError(f"{where}: {text!r} has a bracket or a quote that is not closed.")
    parts.append(text[begin:])
    return [part for part in parts if part.strip()]


def convert(raw: Mapping[str, str], target: Any, flag: str, name: str, *, also: Sequence[str] = ()) -> dict[str, Any]:
    """Raw options as the types that a class or function declares, in the order of its declaration."""
    declared = _parameters(target)
    for key in raw:
        if key not in declared:
            choices = [*also, *declared]
            listed = f"Its options are {', '.join(choices)}." if choices else "It has no options."
            raise UserError(f"{flag} {name} has no option {key!r}.{near(key, choices)} {listed}")
    return {key: _value(raw[key], hint, f"{flag} {name}: {key}") for key, hint in declared.items() if key in raw}


def _parameters(target: Any) -> dict[str, Any]:
    """The options that a target takes, with their types (None where nothing is declared)."""
    if isinstance(target, nn.Module):
        return {}
    signature = inspect.signature(target)
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # a name that only type checkers know
        hints = {}
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return {n: hints.get(n) for n, p in signature.parameters.items() if p.kind not in fixed and n not in ("self", "params", "options")}


def _value(text: str, hint: Any, where: str) -> Any:
    """A raw value as the declared type; where none fits, an error that says what would."""
    for kind in _alternatives(hint):
        converted = _try(text, kind)
        if converted is not _NO:
            return converted
    wanted = " or ".join(_spell(kind) for kind in _alternatives(hint))
    raise UserError(f"{where}={text} is not {wanted}.")


_NO = object()


def _alternatives(hint: Any) -> list[Any]:
    if hint is None:
        return [Any]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        found = [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
        if type(None) in typing.get_args(hint):
            found = [kind for kind in found if kind is not Any] + [type(None)]
        # Text fits everything, so it comes last.
        return sorted((kind for kind in found if kind is not torch.Tensor), key=lambda kind: kind is str)
    if hint is type(None):
        return [type(None)]
    return [hint]


def _try(text: str, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    word = text.lower()
    if kind is type(None):
        return None if word in ("none", "null") else _NO
    if kind is bool:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(word, _NO)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return _NO
    if origin is Literal:
        literal = _literal(text)
        return literal if literal in typing.get_args(kind) else _NO
    if kind is str or (isinstance(kind, type) and issubclass(kind, os.PathLike)) or origin is os.PathLike:
        literal = _literal(text)
        return literal if isinstance(literal, str) else text
    literal = _literal(text)
    container = origin if isinstance(origin, type) else kind if isinstance(kind, type) else None
    if container is tuple or container in (Sequence, list):
        if not isinstance(literal, (tuple, list)):
            return _NO
        return tuple(literal) if container is not list else list(literal)
    if isinstance(container, type) and issubclass(container, Mapping):
        return literal if isinstance(literal, dict) else _NO
    return literal


def _literal(text: str) -> Any:
    """Numbers, quoted text, tuples, lists and dicts as Python writes them (true/false/none too); anything else is text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _spell(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if kind in names:
        return names[kind]
    return "a list such as (1,2)" if typing.get_origin(kind) in (tuple, list, Sequence) else str(kind)


def show(value: Any) -> str:
    """A value as `convert` reads it back.

    Example:
        >>> show(0.1), show(True), show((64, 64)), show("tanh"), show("a,b")
        ('0.1', 'true', '(64,64)', 'tanh', "'a,b'")
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_./~][\w./~+-]*", value) and value.lower() not in ("true", "false", "none", "null")
        return value if plain else repr(value)
    if isinstance(value, (tuple, list, dict)):
        return repr(value).replace(", ", ",") if not _holds_text(value) else repr(value)
    return repr(value)


def _holds_text(value: Any) -> bool:
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(isinstance(item, str) or (isinstance(item, (tuple, list, dict)) and _holds_text(item)) for item in items)
