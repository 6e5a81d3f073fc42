"""The floating tensors of a pytree by name: what x and φ are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from metanudge.params import Params
from metanudge.task import describe


class Tree:
    """A pytree (tensor, dict, list, tuple, nested), seen as the floating tensors in it; all other
    leaves are constants.

    Args:
        tree: the user's structure.
        what: its name in messages: `"x"`, `"upper"`, or `"phi"` (which the user gives as `init`).
        wanted: which of the floating tensors are variables; all by default.

    Example:
        >>> import torch
        >>> tree = Tree({"w": torch.zeros(2), "depth": 3}, "x")
        >>> list(tree.tensors), tree.build({"x['w']": torch.ones(2)})
        (["x['w']"], {'w': tensor([1., 1.]), 'depth': 3})
    """

    def __init__(
        self, tree: Any, what: str, wanted: Callable[[Tensor], bool] = lambda _: True
    ) -> None:
        entries, self._spec = pytree.tree_flatten_with_path(tree)
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for _, leaf in entries]
        self._names: list[str | None] = []
        self.tensors: Params = {}
        self.originals: list[Tensor] = []
        for path, leaf in entries:
            name = what + pytree.keystr(path)
            if isinstance(leaf, Tensor) and leaf.is_complex():
                raise TypeError(
                    f"{name} is complex ({describe(leaf)}), and gradients here are those of real"
                    " numbers. Pass torch.view_as_real(...) of it and undo that inside the"
                    " two functions."
                )
            variable = isinstance(leaf, Tensor) and leaf.is_floating_point() and wanted(leaf)
            self._names.append(name if variable else None)
            if variable:
                self.tensors[name] = leaf.detach()
                self.originals.append(leaf)
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in self._leaves):
            given, purpose = ("init", "solve for") if what == "phi" else (what, "differentiate by")
            raise TypeError(
                f"{given} holds no floating tensor (got {type(tree).__name__} with"
                f" {describe(tree)}), so there is nothing to {purpose}. Give a tensor, or a dict,"
                " list or tuple of tensors; for a module, dict(module.named_parameters())."
            )

    def build(self, tensors: Params, *, alone: bool = False) -> Any:
        """The structure with these tensors in place of its variables; `alone`: and None in place of
        its constants.
        """
        pairs = zip(self._names, self._leaves, strict=True)
        leaves = [(None if alone else leaf) if n is None else tensors[n] for n, leaf in pairs]
        return pytree.tree_unflatten(leaves, self._spec)
