"""Code of the user's own, named as `module:attribute`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from metanudge.names import near
from metanudge.training.config import own_code
from metanudge.training.errors import UserError
from metanudge.training.spec_language import split_options


def named(text: str, flag: str, *, makes: str) -> tuple[str, dict[str, str], Any]:
    """Name, raw options and what is imported of `module:attribute:options`."""
    own = own_code(text)
    assert own is not None, text
    module, attribute, options = own
    found = import_own(module, attribute, flag, makes=makes)
    name = f"{module}:{attribute}"
    return name, split_options(options, f"{flag} {name}"), found


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


def import_own(module: str, attribute: str, flag: str, *, makes: str) -> Any:
    """What an attribute of a module of the user's own is; `flag` names it and `makes` says what it
    should be.
    """
    where = f"{flag} {module}:{attribute}"
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
