"""Interrupts at every line and at random moments: the user's module, `.grad`, random state and
handlers are as they were.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import _named_member_accessor, stateless

import metanudge as mn

SOURCES = str(Path(mn.__file__).parent)
TRACED = (SOURCES, stateless.__file__, _named_member_accessor.__file__)


class Gated(nn.Module):
    """No chain of layers, with shared weights, buffers that are written, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = nn.Parameter(self.first.weight.detach().new_zeros(4, 4).fill_(0.1))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.head(self.drop(torch.tanh(h) * torch.sigmoid(self.second(h))))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "in place": lambda: (Gated(), {"engine": "inplace"}),
    "in place, shared layers": lambda: (
        Gated(),
        {"engine": "inplace", "adapt": "head.*", "learn_lam": "tensor"},
    ),
    "vmap": lambda: (Gated(), {"engine": "stacked"}),
    "chain": lambda: (chain(), {"engine": "auto"}),
    "MAML under vmap": lambda: (Gated(), {"engine": "auto", "estimator": mn.MAML()}),
}


class Case:
    """A learner in the middle of its life: some gradients are there, others are not."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model, options = CASES[name]()
        estimator = options.pop("estimator", mn.FOBMAML(nu=0.1))
        n, steps = (1, 2) if options["engine"] == "inplace" else (2, 1)
        solver = mn.GradientDescent(lr=0.05, steps=steps)
        self.learner = mn.MetaLearner(
            model, F.cross_entropy, estimator=estimator, solver=solver, **options
        )
        self.tasks = mn.TaskBatch(
            support=(torch.randn(n, 4, 3), torch.randint(2, (n, 4))),
            query=(torch.randn(n, 5, 3), torch.randint(2, (n, 5))),
        )
        self.gradients = [
            torch.randn_like(p) if place % 2 else None
            for place, p in enumerate(self.learner.parameters())
        ]
        self.reset()
        self.before = self.state()
        self.learner.backward(self.tasks)
        self.after = self.written()
        self.reset()

    def reset(self) -> None:
        for p, g in zip(self.learner.parameters(), self.gradients, strict=True):
            p.grad = None if g is None else g.clone()
        self.learner.calls = 0

    def written(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.learner.parameters()]

    def state(self) -> list[Any]:
        """All that an interrupt must leave alone, tensors by identity and value; `.grad` is looked
        at apart.
        """
        found: list[Any] = [
            torch.get_rng_state(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        ]
        found += [
            torch._C._functorch.get_dynamic_layer_stack_depth(),
            torch.backends.cuda.flash_sdp_enabled(),
        ]
        found += [
            self.learner._choice.cannot_stack,
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGALRM),
        ]
        for module in self.learner.modules():
            found += [module.training, dict(module._forward_hooks), dict(module._forward_pre_hooks)]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                found += [id(tensor), None if tensor is None else tensor.detach().clone()]
                if isinstance(tensor, nn.Parameter):
                    found += [
                        tensor.requires_grad,
                        tensor._backward_hooks,
                        tensor._post_accumulate_grad_hooks or None,
                    ]
        return found

    def check(self) -> None:
        """As before, with all gradients written or none."""
        now = self.state()
        assert len(now) == len(self.before)
        assert all(map(same, now, self.before)), [
            pair for pair in zip(now, self.before, strict=True) if not same(*pair)
        ]
        grads, old = self.written(), self.gradients
        whole = all(map(same, grads, self.after))
        assert whole or all(map(same, grads, old))
        if whole:
            self.reset()
        assert self.learner.calls == 0


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b or bool(type(a) is type(b) and a == b)


class Tracer:
    """Notes the lines of our sources and of torch's `functional_call` as they run, and strikes at
    the first passage of a given one.
    """

    def __init__(
        self, target: tuple[str, int] | None = None, strike: Callable[[], None] = lambda: None
    ) -> None:
        self.lines: dict[tuple[str, int], None] = {}
        self._target = target
        self._strike = strike

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            if self._target is None:
                self.lines[place] = None
            elif place == self._target:
                sys.settrace(None)
                self._strike()
        return self

    @contextmanager
    def tracing(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


STRIKES = {"signal": lambda: signal.raise_signal(signal.SIGINT), "exception": raise_interrupt}


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("name", ["in place", "vmap", "chain"])
def test_at_every_line(name: str, strike: str) -> None:
    case = Case(name)
    tracer = Tracer()
    with tracer.tracing():
        case.learner.backward(case.tasks)
    case.reset()
    assert len(tracer.lines) > 250
    for line in tracer.lines:
        with pytest.raises(KeyboardInterrupt), Tracer(line, STRIKES[strike]).tracing():
            case.learner.backward(case.tasks)
        case.check()
    case.learner.backward(case.tasks)
    assert all(map(same, case.written(), case.after))


@pytest.mark.parametrize("name", ["in place", "vmap"])
@pytest.mark.parametrize("use", ["evaluate", "adapt", "choose_nu", "meta_gradient"])
def test_elsewhere_too(name: str, use: str) -> None:
    """A signal at every seventh line of what else works on the module."""
    case = Case(name)
    if use == "choose_nu":
        case.learner.estimator = mn.FOBMAML()
    argument: Any = case.tasks[0].support if use == "adapt" else case.tasks
    tracer = Tracer()
    with tracer.tracing():
        getattr(case.learner, use)(argument)
    case.reset()
    for line in list(tracer.lines)[::7]:
        with pytest.raises(KeyboardInterrupt), Tracer(line, STRIKES["signal"]).tracing():
            getattr(case.learner, use)(argument)
        case.learner.calls = 0
        case.check()


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Timeout(RuntimeError):
    """What a handler may raise that looks like an error of the model's."""


@pytest.mark.parametrize(
    ("name", "times"),
    [(name, 1000 if name in ("in place", "vmap", "chain") else 200) for name in CASES],
)
def test_at_random_moments(name: str, times: int) -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Timeout

    signal.signal(signal.SIGALRM, ring)
    draw = random.Random(0)
    try:
        case = Case(name)
        # on a busy machine others take longer
        length = min(timed(lambda: case.learner.backward(case.tasks)) for _ in range(20))
        case.reset()
        hits = 0
        for _ in range(times):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, length))
                    case.learner.backward(case.tasks)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Timeout:
                hits += 1
            case.check()
        assert hits > times / 3
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    case.learner.backward(case.tasks)
    assert all(map(same, case.written(), case.after))
