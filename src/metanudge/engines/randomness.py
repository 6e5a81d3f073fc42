"""Random numbers inside a solve: every loss evaluation gets its own seed, the global state comes
out as it went in.

A stencil subtracts solutions, so all its solves must see the same dropout masks and the same
minibatches; anything else is noise that 1/ν amplifies. Evaluations are therefore seeded by (seed of
the meta-step, inner step, support or query): the same for all tasks and nudges, different from step
to step and from meta-step to meta-step.

The engines agree on minibatches always, on dropout masks where torch draws them alike with and
without `vmap`: on the CPU for contiguous tensors. Elsewhere (CUDA's fused dropout, transposed
tensors) each engine has masks of its own, as good as the other's.

torch's generators are the whole process's. On a CPU a model that draws does so from a generator of
its own (`OwnGenerator`), so that what other threads draw meanwhile changes nothing. On other
devices, in modules made by `torch.compile` and inside `torch.utils.checkpoint` it draws from the
global one, and there other threads should not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from metanudge.engines.undisturbed import obey, restored

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 63-bit hash of integers (the splitmix64 finaliser, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def generators(device: torch.device) -> list[torch.Generator]:
    """torch's own, which a model on a device draws from: the CPU's first."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.init()
    return [torch.default_generator, torch.cuda.default_generators[index]]


class Draws:
    """Seeds torch's generators for one loss evaluation after the other on one device.

    Args:
        modules: what may draw: a model, then all its parts. It is looked at in its first
            evaluations, and does not pay for a generator of its own where it drew nothing last
            time.
    """

    def __init__(self, seed: int, device: torch.device, modules: Sequence[nn.Module] = ()) -> None:
        self.seed = seed
        self._used = False
        self._habit = Habit(modules)
        self._own = OwnGenerator() if device.type == "cpu" and self._habit.may_draw else None
        self._looked_at: set[str] = set()
        self._last: int | None = None
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # only steps that draw nothing are recorded, and a recording may not touch them
        self._generators = [] if recording else generators(device)

    def seeded(self, step: int, which: str) -> AbstractContextManager[object]:
        """Within, the `"support"` or `"query"` loss at an inner step is evaluated: with its random
        numbers, unless a signal waits.
        """
        obey()
        value = mix(self.seed, step, 0 if which == "support" else 1)
        self._look()
        for generator in self._generators:
            generator.manual_seed(value)
        self._last = value
        if self._own is None or (which in self._looked_at and not self._own.used):
            return nullcontext()
        self._looked_at.add(which)
        return self._own.seeded(value)

    def _look(self) -> None:
        """Note whether a CUDA generator was used since it was seeded."""
        self._used = self._used or any(
            generator.get_offset() > 0 for generator in self._generators[1:]
        )

    def _global_moved(self, seed: int) -> bool:
        """Whether anybody has drawn from the global generator since it got this seed."""
        return not torch.equal(
            torch.Generator().manual_seed(seed).get_state(), torch.default_generator.get_state()
        )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the generators' states on the way out."""
        states = [generator.get_state() for generator in self._generators]

        def restore() -> None:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

        with restored(restore):
            for generator in self._generators[1:]:
                generator.manual_seed(self.seed)
            yield
            self._look()
            if self._last is not None and self._generators:
                own = self._own.used if self._own is not None else self._global_moved(self._last)
                self._habit.note(drew=self._used or own)


def minibatch(seed: int, place: int, step: int, size: int, batch_size: int) -> Tensor:
    """Indices of the support examples that the task at `place` uses in an inner step,
    `(batch_size,)`, without repeats.
    """
    generator = torch.Generator().manual_seed(mix(seed, place, step, 2))
    return torch.randperm(size, generator=generator)[:batch_size]


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
