"""Models that are shared among threads, and threads that draw random numbers meanwhile."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import metanudge as mn
from metanudge.engines import undisturbed
from metanudge.engines.randomness import Draws

ENGINES = ["inplace", "stacked"]


class Net(nn.Module):
    """No chain of layers, so that the stacked engine calls it; `between` is called in the middle of
    every forward pass.
    """

    def __init__(
        self, between: Callable[[], None] = lambda: None, first: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4) if first is None else first
        self.head = nn.Linear(4, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.between()
        return self.head(h)


def learner_of(model: nn.Module, engine: Any = "inplace") -> mn.MetaLearner:
    return mn.MetaLearner(
        model,
        F.cross_entropy,
        engine=engine,
        estimator=mn.FOBMAML(nu=0.1),
        solver=mn.GradientDescent(0.05, 2),
    )


def some_tasks(seed: int) -> mn.TaskBatch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, 3, generator=generator), torch.randint(2, (2, 4), generator=generator)
    return mn.TaskBatch(support=(x, y), query=(x + 1, y))


def gradient(learner: mn.MetaLearner, tasks: mn.TaskBatch) -> list[Tensor]:
    return list(learner.meta_gradient(tasks, seed=0)[0].values())


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("engine", ENGINES)
def test_shared_models_in_two_threads_are_refused_or_right(engine: str) -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    models = [Net(first=first), Net(first=first)]
    learners = [learner_of(model, engine) for model in models]
    tasks = [some_tasks(seed) for seed in range(2)]
    expected = [gradient(*pair) for pair in zip(learners, tasks, strict=True)]
    values = copy.deepcopy([model.state_dict() for model in models])
    barrier = threading.Barrier(2)

    def work(who: int) -> bool:
        barrier.wait()
        try:
            return equal(gradient(learners[who], tasks[who]), expected[who])
        except RuntimeError as error:
            return "in use in another thread" in str(error)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(100):
            assert all(pool.map(work, range(2)))
    assert not undisturbed._claims
    for model, before in zip(models, values, strict=True):
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Pause:
    """Holds the thread that calls it until told to go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.go_on.wait(20)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("use", ["backward", "evaluate", "adapt"])
def test_a_model_in_use_is_refused_before_anything_is_touched(engine: str, use: str) -> None:
    torch.manual_seed(0)
    pause, tasks = Pause(), some_tasks(0)
    model = Net(pause)
    learner, other = learner_of(model, engine), learner_of(Net(first=model.first), engine)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(learner.backward, tasks)
        assert pause.entered.wait(20)
        try:
            before = [(p, p.grad, p._version) for p in other.parameters()]
            with pytest.raises(
                RuntimeError,
                match=r"in use in another thread \(ThreadPoolExecutor.*copy.deepcopy\(model\)",
            ):
                getattr(other, use)(tasks[0].support if use == "adapt" else tasks)
            assert all(p.grad is grad and p._version == version for p, grad, version in before)
            # one learner in two threads
            with pytest.raises(RuntimeError, match="in use in another thread"):
                learner.evaluate(tasks)
        finally:
            pause.go_on.set()
        running.result(20)
    other.backward(tasks)


def test_adaptations_of_one_model_may_run_at_once() -> None:
    torch.manual_seed(0)
    # both are in the middle of a forward pass, or nobody comes through
    barrier = threading.Barrier(2)
    net = Net()
    learner, support = learner_of(net), some_tasks(0)[0].support
    alone = learner.adapt(support)
    net.between = lambda: barrier.wait(20) and None  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(2) as pool:
        adapted = list(pool.map(learner.adapt, [support, support]))
    for model in adapted:
        assert all(
            torch.equal(tensor, alone.state_dict()[name])
            for name, tensor in model.state_dict().items()
        )


def test_a_claim_ends_with_its_block() -> None:
    problem = learner_of(Net()).problem()

    def fail() -> None:
        # the same thread may have it twice
        with undisturbed.claimed(problem), undisturbed.claimed(problem):
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(undisturbed.claimed(problem).__enter__).result(20)
    undisturbed._claims.clear()


class Stranger:
    """Another thread that draws from the global generator whenever it is called, while the caller
    waits.
    """

    def __init__(self) -> None:
        self._orders: queue.Queue[bool] = queue.Queue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        self._done.clear()
        self._orders.put(True)
        assert self._done.wait(20)

    def _work(self) -> None:
        while self._orders.get():
            torch.rand(7)
            self._done.set()

    def leave(self) -> None:
        self._orders.put(False)
        self._thread.join(20)


class Noisy(nn.Module):
    """Draws in many ways, in the middle of which `between` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.3)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for noise in (
            F.dropout,
            F.alpha_dropout,
            lambda h: h + 0.1 * torch.randn_like(h),
            lambda h: h * torch.rand(4),
            self.drop,
        ):
            self.between()
            h = noise(h)
        return self.head(h + 0.1 * torch.empty(4).normal_())


class WithRecurrence(Noisy):
    """Dropout inside of one of torch's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 2, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.between()
        return self.recurrent(self.first(x))[0]


@pytest.mark.parametrize(
    ("kind", "engine"), [(Noisy, "inplace"), (Noisy, "stacked"), (WithRecurrence, "inplace")]
)
def test_random_numbers_do_not_depend_on_what_other_threads_draw(
    kind: type[Noisy], engine: str
) -> None:
    torch.manual_seed(0)
    model = kind()
    learner, tasks = learner_of(model, engine), some_tasks(0)
    alone = gradient(learner, tasks)
    torch.manual_seed(1)
    assert equal(gradient(learner, tasks), alone)
    stranger = model.between = Stranger()
    try:
        assert equal(gradient(learner, tasks), alone)
    finally:
        stranger.leave()
        model.between = lambda: None
    assert not equal(list(learner.meta_gradient(tasks, seed=1)[0].values()), alone)


def test_a_model_that_begins_to_draw_is_noticed() -> None:
    torch.manual_seed(0)
    model = Noisy().eval()
    learner, tasks = learner_of(nn.Sequential(model, nn.Dropout(0.0)), "inplace"), some_tasks(0)
    gradient(learner, tasks)
    model.train()  # another mode: looked at again
    gradient(learner, tasks)
    assert Draws(0, torch.device("cpu"), learner.problem().modules)._own is not None
    quiet = learner_of(
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0), Net(first=nn.Linear(2, 4))), "inplace"
    )
    gradient(quiet, tasks)
    assert Draws(0, torch.device("cpu"), quiet.problem().modules)._own is None
    quiet.model[1].p = 0.5
    gradient(quiet, tasks)
    assert Draws(0, torch.device("cpu"), quiet.problem().modules)._own is not None


class Partly(nn.Module):
    """Dropout outside and inside of a checkpoint, whose second pass must see the masks of the
    first.
    """

    def __init__(self, *, through_checkpoint: bool) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self._through_checkpoint = through_checkpoint

    def block(self, h: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.middle(F.dropout(h, 0.3))), 0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.2)
        h = (
            checkpoint(self.block, h, use_reentrant=False)
            if self._through_checkpoint
            else self.block(h)
        )
        return self.head(F.dropout(h, 0.5))


def test_checkpoints_draw_the_same_numbers_again() -> None:
    torch.manual_seed(0)
    model = Partly(through_checkpoint=False)
    other = Partly(through_checkpoint=True)
    other.load_state_dict(model.state_dict())
    assert equal(*(gradient(learner_of(m), some_tasks(0)) for m in (model, other)))
