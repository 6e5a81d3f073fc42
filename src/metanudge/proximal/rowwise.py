"""A user's function of one task's dicts, run for all rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import vmap

from metanudge.params import Params


class Rowwise:
    """Runs rows side by side with `vmap`, or one after the other where the function does not
    support that.
    """

    def __init__(self, function: Callable[..., Params]) -> None:
        self._function = function
        self._stacks = True

    def __call__(self, *arguments: Params) -> Params:
        """The function of every row."""
        arguments = tuple(dict(argument) for argument in arguments)  # vmap knows plain dicts only
        rows = len(next(iter(arguments[0].values())))
        if rows > 1 and self._stacks:
            try:
                return vmap(self._function, randomness="same")(*arguments)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:
                self._stacks = False  # the loop gives the same numbers, or the error itself
        each = [
            self._function(*({n: leaf[r] for n, leaf in a.items()} for a in arguments))
            for r in range(rows)
        ]
        return {name: torch.stack([row[name] for row in each]) for name in each[0]}
