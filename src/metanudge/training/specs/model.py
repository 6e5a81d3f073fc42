"""The model from its spec: one of ours, or the user's own as `module:attribute`, sized for the
data.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import nn

from metanudge import models
from metanudge.names import near
from metanudge.training.errors import UserError
from metanudge.training.specs.language import Spec, known, normal, split, split_options
from metanudge.training.specs.targets import convert, make, parameters
from metanudge.training.trust import own_code


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
        raise UserError(
            f"--model {spec.name} made a {type(model).__name__}, not an nn.Module. Name a class or"
            " function that makes one."
        )
    return model


def _model_factory(text: str) -> tuple[str, dict[str, str], Any]:
    """Name, raw options and factory of a model: one of ours, or `module:attribute`."""
    if own := own_code(text):
        module, attribute, options = own
        name = f"{module}:{attribute}"
        return name, split_options(options, f"--model {name}"), _import(module, attribute)
    name, raw = split("--model", text)
    name = known(name, ("auto", *models.MODELS), "--model", "model")
    return name, raw, models.MODELS.get(name)


def _import(module: str, attribute: str) -> Any:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UserError(
            f"--model {module}:{attribute}: {module} is a module of Python itself and makes no"
            " nn.Module. Name one of yours."
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
            f"--model {module}:{attribute}: the module {module!r} cannot be imported ({error})."
            " Give it as Python would import it from the current folder, e.g. my_nets:Net for"
            " my_nets.py."
        ) from error
    except AttributeError as error:
        names = [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
        raise UserError(
            f"--model {module}:{attribute}: {error}.{near(attribute, names)}"
        ) from error
    if not _makes_modules(found):
        what = (
            f"the class {found.__qualname__}"
            if isinstance(found, type)
            else f"a {type(found).__name__}"
        )
        raise UserError(
            f"--model {module}:{attribute} is {what}. Name a subclass of nn.Module, or a function"
            " of yours that makes one."
        )
    return found


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
    if len(shape) == 3 and min(shape[1:]) >= 16:
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
        "image_size": shape[-2:] if len(shape) == 3 and shape[1] != shape[2] else shape[-1],
        "length": shape[-1],
    }
    accepted = parameters(factory)
    if "d_model" in accepted and len(shape) == 2:
        facts |= {"length": shape[0], "d_model": shape[1]}
    return {name: value for name, value in facts.items() if name in accepted}
