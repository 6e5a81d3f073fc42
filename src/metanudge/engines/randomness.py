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
its own (see `own_generator`), so that what other threads draw meanwhile changes nothing. On other
devices, in modules made by `torch.compile` and inside `torch.utils.checkpoint` it draws from the
global one, and there other threads should not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from metanudge.engines.own_generator import Habit, OwnGenerator
from metanudge.engines.uninterrupted import obey, restored

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 63-bit hash of integers (the splitmix64 finaliser, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


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
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                # only steps that draw nothing are recorded, and a recording may not touch them
                self._generators = []
                return
            index = device.index if device.index is not None else torch.cuda.current_device()
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[index])

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
