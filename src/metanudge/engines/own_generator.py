"""Random numbers from a generator that no other thread knows, for models that draw from torch's
global one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class OwnGenerator(TorchDispatchMode):
    """Within, this thread's random operations on the CPU use it wherever they would use the global
    generator.

    Both are kept at one state, so that it makes no difference which of them an operation used: the
    numbers are those that the global one gives when nobody else draws. `torch.utils.checkpoint`
    sets the global one back to draw the same numbers again, so within it draws are left to that
    one.

    Attributes:
        used: whether anything was drawn so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False
        self._generator = torch.Generator()

    def seeded(self, value: int) -> OwnGenerator:
        """Itself, with a new seed."""
        self._generator.manual_seed(value)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, with a random one's generator set."""
        kwargs = kwargs or {}
        if (
            torch.Tag.nondeterministic_seeded not in func.tags
            or kwargs.get("generator") is not None
        ):
            return func(*args, **kwargs)
        self.used = True
        with_generator = _with_generator(func)
        if with_generator is None or _within_checkpoint():
            result = func(*args, **kwargs)
            self._generator.set_state(torch.default_generator.get_state())
        else:
            result = with_generator(*args, **{**kwargs, "generator": self._generator})
            torch.default_generator.set_state(self._generator.get_state())
        return result


@cache
def _with_generator(func: OpOverload) -> OpOverload | None:
    """The form of a random operation that takes a generator, if there is one."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    packet = func.overloadpacket
    return getattr(packet, name) if name in packet.overloads() else None


def _within_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
    return False


class Habit:
    """Whether a model draws, as far as is known: in these modes of its parts (training or
    evaluation) it drew nothing last time.
    """

    _quiet: ClassVar[WeakKeyDictionary[nn.Module, tuple[bool, ...]]] = WeakKeyDictionary()

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._modes = tuple([module.training for module in modules])

    @property
    def is_quiet(self) -> bool:
        """Whether it is known that it drew nothing last time."""
        return bool(self._modules) and self._quiet.get(self._modules[0]) == self._modes

    @property
    def may_draw(self) -> bool:
        """Not where it is known not to, nor where `torch.compile` has made a part of it, which then
        draws in its own ways.
        """
        if self.is_quiet:
            return False
        return not any(
            "_orig_mod" in module._modules or module._compiled_call_impl is not None
            for module in self._modules
        )

    def note(self, *, drew: bool) -> None:
        """What it did this time."""
        if self._modules and drew:
            self._quiet.pop(self._modules[0], None)
        elif self._modules:
            self._quiet[self._modules[0]] = self._modes
