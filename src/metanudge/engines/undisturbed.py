"""Nothing of the user's stays disturbed: parameters are overwritten or exchanged while solves run,
and no signal, error or other thread must see that.

Signals wait. A handler that raises (Ctrl-C does) may do so between any two instructions: of ours,
and of torch's, where a parameter is exchanged or a `vmap` is entered. Blocking the signal does not
help, since another thread may take it and Python runs the handler in the main thread all the same.
So within `uninterrupted` all of Python's handlers are replaced by one that takes a note. What was
noted goes to the handler that was there before, at the next loss evaluation (`obey`) and on the way
out; nothing else can raise there, so that all that was touched is put back. Handlers exist in the
main thread only; in others there is nothing to do.

One thread at a time works on a model (`claimed`). What the in-place engine writes to it is put back
by a `Guard`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal makes an enum of its answer, which takes 40 times as long
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from metanudge.problem import Problem, is_constant
from metanudge.spread import local, reshard

PATIENCE = 2.0
"""Seconds that a signal waits; then one more is obeyed wherever the program is, since the
evaluation may hang.
"""

_NUMBERS = range(1, _signal.NSIG)
_open: set[object] = set()
_replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}
_waiting: list[tuple[int, float]] = []


class _Interrupted(BaseException):
    """What a handler raised, on its way out through code that may have its own ideas about
    errors.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, signals wait for `obey` or the end; can be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    token = object()
    try:
        with restored(lambda: _leave(token)):
            _enter(token)
            yield
    except _Interrupted as interrupted:
        if _open:
            raise
        raise interrupted.error from None


def obey() -> None:
    """Hand over a signal that waits: everything touched up to here is put back if its handler
    raises.
    """
    if _waiting and threading.current_thread() is threading.main_thread():
        number, _ = _waiting.pop(0)
        try:
            _replaced[number](number, sys._getframe())
        except BaseException as error:
            raise _Interrupted(error) from None


@contextmanager
def restored(restore: Callable[[], None]) -> Iterator[None]:
    """Run `restore` on the way out, and again in case something cut it short; it must not matter
    how often it runs.
    """
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()


@contextmanager
def tensors_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, `functional_call` may exchange the modules' parameters and buffers; should that be
    cut short, they are put back.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tensors, dict(tensors))
        for module in modules
        for tensors in (module._parameters, module._buffers)
        if tensors
    ]

    def restore() -> None:
        for tensors, before in kept:
            if any(tensors.get(name) is not tensor for name, tensor in before.items()):
                tensors.update(before)

    with restored(restore):
        yield


def _enter(token: object) -> None:
    _open.add(token)
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _note:
            _replaced[number] = handler
            _signal.signal(number, _note)


def _leave(token: object) -> None:
    _open.discard(token)
    if not _open:
        with restored(_put_back):
            pass
        _hand_over()


def _put_back() -> None:
    for number, handler in list(_replaced.items()):
        if _signal.getsignal(number) is _note:  # or somebody has set another one meanwhile
            _signal.signal(number, handler)


def _hand_over() -> None:
    """Call the handlers of what is still waiting, all of them."""
    if _waiting:
        number, _ = _waiting.pop(0)
        try:
            _replaced[number](number, sys._getframe())
        finally:
            _hand_over()


def _note(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _open or any(same == number and now - since > PATIENCE for same, since in _waiting):
        _replaced[number](number, frame)
    else:
        _waiting.append((number, now))


@dataclass(frozen=True)
class _Claim:
    thread: threading.Thread
    things: frozenset[int]
    alone: bool


_claims: dict[object, _Claim] = {}
_claiming = threading.Lock()


@contextmanager
def claimed(problem: Problem, *, alone: bool = True) -> Iterator[None]:
    """Within, no other thread may claim the problem's model or one that shares a part, a parameter
    or a buffer with it.

    Without `alone` it may if it, too, only wants to look at it. The same thread may claim it again.
    """
    claim = _Claim(threading.current_thread(), problem.parts, alone)
    token = object()
    with restored(lambda: _release(token)):
        _claim(token, claim)
        yield


def _claim(token: object, claim: _Claim) -> None:
    with _claiming:
        for other in _claims.values():
            if (
                other.thread is not claim.thread
                and (other.alone or claim.alone)
                and not other.things.isdisjoint(claim.things)
            ):
                raise RuntimeError(
                    f"The model is in use in another thread ({other.thread.name}), or shares"
                    " parameters with one that is. Meta-gradients, evaluations and adaptations"
                    " change its parameters while they run and put them back at the end. Give each"
                    " thread a learner with its own copy of the model (copy.deepcopy(model)), or"
                    " take turns with a threading.Lock."
                )
        _claims[token] = claim


def _release(token: object) -> None:
    _claims.pop(token, None)


class Guard:
    """What the engine disturbs in the user's module, and how to put it back."""

    def __init__(self, problem: Problem) -> None:
        self._parameters = problem.parameters
        # a loss may have parameters of its own
        own = (*problem.objective.parameters(), *problem.query_objective.parameters())
        self._gradients = [(p, p.grad) for p in dict.fromkeys(own)]
        self.theta = {n: self.phi(n).clone() for n in problem.parameters}
        self._sharded = [] if problem.spread is None else problem.spread.modules
        self.buffers = Buffers(problem.modules)
        self._versions = {n: p._version for n, p in problem.parameters.items()}
        self._shared = problem.shared
        self._always = problem.quantised

    def clear(self) -> None:
        """Take away what would be in the way of inner gradients; from here on the module is not as
        it was.
        """
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._want(adapting=True, shared=False)

    @contextmanager
    def sharing(self, *, adapting: bool = True) -> Iterator[None]:
        """Gradients by the shared parameters, which inner steps do without, and by those that adapt
        unless that is turned off.
        """
        _forget(self._shared)
        self._want(adapting=adapting, shared=True)
        try:
            yield
        finally:
            self._want(adapting=True, shared=False)
            if not adapting:
                _forget(self._parameters)

    def _want(self, *, adapting: bool, shared: bool) -> None:
        """Of quantised models always all gradients, of which some are forgotten: a layer that is
        not asked for one may give none later.
        """
        if self._shared and not self._always:
            for parameters, on in ((self._parameters, adapting), (self._shared, shared)):
                for parameter in parameters.values():
                    parameter.requires_grad_(on)

    def phi(self, name: str) -> Tensor:
        """Where φ is written: what of a parameter lies in this process."""
        # .data: at the end the values are what they were, so graphs made before stay valid
        return local(self._parameters[name]).data

    def wrote(self) -> None:
        """Parameters were written: nobody may go on with what was gathered before."""
        reshard(self._sharded)

    def holds_still(self, name: str) -> bool:
        """Whether a real parameter was written by nobody but the engine so far; an `nn.Embedding`
        with `max_norm` writes its own.
        """
        parameter = self._parameters[name]
        return parameter.is_floating_point() and parameter._version == self._versions[name]

    def restore_buffers(self) -> None:
        """Undo what a forward pass did to the buffers: BatchNorm's running statistics and the
        like.
        """
        self.buffers.look()
        self.buffers.restore()

    def restore(self) -> None:
        """Put everything back; it does not matter how often."""
        self._want(adapting=True, shared=True)
        for name, theta in self.theta.items():
            self.phi(name).copy_(theta)
        self.wrote()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.buffers.restore()
        torch.clear_autocast_cache()


def _forget(parameters: Mapping[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


class Buffers:
    """The buffers of modules as they are now.

    Args:
        before: what was noted before, whose copies serve again where nothing has changed.
    """

    def __init__(self, modules: Iterable[nn.Module], before: Buffers | None = None) -> None:
        known = {} if before is None else {(b.module, b.name): b.value for b in before.all}
        self.all: list[Buffer] = [
            Buffer(module, name, known.get((module, name)))
            for module in modules
            for name in module._buffers
        ]

    def look(self) -> None:
        """After an evaluation: which constants are some."""
        for buffer in self.all:
            buffer.look()

    def restore(self) -> None:
        """Put them back; it does not matter how often."""
        for buffer in self.all:
            buffer.restore()


# In which modes (training or not) of its module a constant was seen not to be written.
_still = WeakTensorKeyDictionary()


def stands_still(module: nn.Module, name: str) -> bool:
    """Whether a constant is known not to be written by forward passes in the present mode."""
    return module.training in _still.get(module._buffers[name], ())


class Buffer:
    """A buffer as it was, and a copy of its values, unless it is a constant (`is_constant`) that no
    forward pass was seen to write.

    A constant is compared with its copy after the first evaluation, and does without one from then
    on: its version counter is watched instead. Others are always put back, since BatchNorm's
    kernels and writes through `.data` leave no trace in the version counter.
    """

    def __init__(self, module: nn.Module, name: str, copy: Tensor | None = None) -> None:
        self.module, self.name = module, name
        self._tensor = tensor = module._buffers[name]
        self._constant = is_constant(module, name)
        self._version = tensor._version if tensor is not None and self._constant else 0
        known = self._constant and stands_still(module, name)
        self.value = None if tensor is None or known else _copied(tensor, copy)

    def look(self) -> None:
        """After an evaluation: whether a constant is one."""
        if not self._constant or self._tensor is None:
            return
        if self.value is None:
            if self._tensor._version == self._version:
                return
            _still[self._tensor].discard(self.module.training)
            raise RuntimeError(
                f"The forward pass has written to the buffer {self.name!r} of"
                f" {type(self.module).__name__} in place, which it did not do at first; its values"
                " could not be put back. The next call will keep a copy of them."
            )
        self._constant = self._tensor._version == self._version and torch.equal(
            self._tensor, self.value
        )
        if self._constant:
            _still.setdefault(self._tensor, set()).add(self.module.training)
            self.value = None

    def restore(self) -> None:
        """Put it back."""
        if self.module._buffers[self.name] is not self._tensor:
            self.module._buffers[self.name] = self._tensor
        if self.value is not None:
            assert self._tensor is not None
            self._tensor.data.copy_(self.value)


def _copied(tensor: Tensor, copy: Tensor | None) -> Tensor:
    return copy if copy is not None and torch.equal(tensor, copy) else tensor.detach().clone()
