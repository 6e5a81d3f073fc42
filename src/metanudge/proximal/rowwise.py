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

    def __call__(self, *arguments: Params, apart: tuple[bool, ...] = ()) -> Params:
        """The function of every row; `apart[i]` False says that argument i has no row axis."""
        arguments = tuple(dict(argument) for argument in arguments)  # vmap knows plain dicts only
        has_rows = (*apart, *[True] * (len(arguments) - len(apart)))
        rows = next(
            leaf.shape[0]
            for argument, own in zip(arguments, has_rows, strict=True)
            if own
            for leaf in argument.values()
        )
        if rows > 1 and self._stacks:
            try:
                in_dims = tuple(0 if own else None for own in has_rows)
                return vmap(self._function, in_dims=in_dims, randomness="same")(*arguments)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:
                self._stacks = False  # the loop gives the same numbers, or the error itself
        each = [
            self._function(
                *(
                    {n: leaf[r] for n, leaf in a.items()} if own else a
                    for a, own in zip(arguments, has_rows, strict=True)
                )
            )
            for r in range(rows)
        ]
        return {name: torch.stack([row[name] for row in each]) for name in each[0]}
