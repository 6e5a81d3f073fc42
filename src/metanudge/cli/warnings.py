"""Warnings as the command line tells them: one line each, without the line of code that they come
from.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from metanudge.cli.errors import report


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Tell warnings that are meant for users as notes on stderr; leave those for programmers as
    they are.
    """
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UserWarning):
                report(f"note: {message}")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield
