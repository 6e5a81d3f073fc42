"""Loss, metrics and augmentation of the user's own, as `module:attribute`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from metanudge.objective import takes_model
from metanudge.tasks import Changes, Episodes
from metanudge.tasks.augment import Augment
from metanudge.training.config import TrainConfig, own_code
from metanudge.training.errors import UserError, refused
from metanudge.training.spec_language import Spec, convert, make, show_options, split_options
from metanudge.training.specs import function

_TAKEN = ("loss", "accuracy")


def parse_function(text: str, flag: str) -> Spec:
    """The spec of a function of (output, target), with its options converted."""
    if not own_code(text):
        raise UserError(
            f"{flag} {text}: name a function of (output, target) as module:attribute, such as"
            " my_losses:focal for focal in my_losses.py."
        )
    return _parsed(text, flag, "(output, target)")[0]


def build_function(text: str, flag: str) -> Callable[..., Any]:
    """The function of (output, target) that a spec names; a class is called for one.

    Example:
        >>> build_function("torch.nn:CrossEntropyLoss:label_smoothing=0.1", "--loss")
        CrossEntropyLoss()
    """
    spec = parse_function(text, flag)
    found = _built(text, flag, "(output, target)")
    if not callable(found):
        raise UserError(f"{flag} {spec.name} made a {type(found).__name__}, which is no function.")
    if takes_model(found):
        raise UserError(
            f"{flag} {spec.name} takes the model. Here it is called as function(output, target)."
        )
    return found


def _parsed(text: str, flag: str, arguments: str) -> tuple[Spec, Any]:
    """The spec of a function of the user's own, or of a class that makes one, and what it names."""
    name, raw, found = function(text, flag, makes=f"function of {arguments}")
    return Spec(name, convert(raw, found, flag, name)), found


def _built(text: str, flag: str, arguments: str) -> Any:
    spec, found = _parsed(text, flag, arguments)
    if isinstance(found, type):
        return make(flag, spec.name, found, **spec.options)
    return functools.partial(found, **spec.options) if spec.options else found


def metric_specs(text: str) -> dict[str, str]:
    """The metrics by name, as specs."""
    found = split_options(text, "--metrics")
    for name in found:
        if name in _TAKEN or name.endswith(("_before", "_ci95")):
            raise UserError(f"--metrics {name}=…: this name is taken. Use another.")
        if (own := own_code(found[name])) and own[2]:
            raise UserError(
                f"--metrics {name}={found[name]}: metrics take no options. Name a function that"
                " needs none."
            )
    return {name: str(parse_function(spec, "--metrics")) for name, spec in found.items()}


def parse_metrics(text: str) -> str:
    """The metrics in one fixed way."""
    return ",".join(f"{name}={spec}" for name, spec in metric_specs(text).items())


def build_metrics(text: str) -> dict[str, Callable[..., Any]]:
    """The metrics by name."""
    return {name: build_function(spec, "--metrics") for name, spec in metric_specs(text).items()}


# --- Augmentation


def parse_augment(text: str) -> str:
    """What changes training tasks, in one fixed way.

    Example:
        >>> parse_augment("shift=2,flip")
        'flip=true,shift=2'
    """
    if own_code(text):
        return str(_parsed(text, "--augment", "(inputs, generator)")[0])
    return show_options(_changes(text))


def build_augment(text: str) -> Augment:
    """What changes training tasks."""
    if own_code(text):
        return _built(text, "--augment", "(inputs, generator)")
    return make("--augment", text, Changes, **_changes(text))


def _changes(text: str) -> dict[str, Any]:
    parts = [part if "=" in part else f"{part}=true" for part in text.split(",") if part.strip()]
    return convert(split_options(",".join(parts), "--augment"), Changes, "--augment", text)


def augmented(config: TrainConfig, source: Episodes) -> Episodes:
    """A source whose training tasks are changed as a configuration says; tried on one."""
    source = source.augmented(build_augment(config.augment), query=config.augment_query)
    kinds = TypeError, ValueError, RuntimeError, IndexError
    with refused(f"--augment {config.augment}: ", *kinds):
        source.task(0)
    return source
