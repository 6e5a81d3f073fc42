"""Checkpoints: exact round trips, a crash at every system call of a save, and every kind of damage on the disk."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

import metanudge
from metanudge.optim import SNGDM, ClippedGD, NormalizedGD
from metanudge.training import checkpoint as module
from metanudge.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    load,
    pack,
    rng_state,
    save,
    set_rng_state,
    unpack,
)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def identical(a: Any, b: Any) -> bool:
    """Equal in type, order, layout and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape, a.stride(), bits(a)) == (b.dtype, b.shape, b.stride(), bits(b))
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    return bool(a == b)


def through_files(value: Any, folder: Path) -> Any:
    save(folder, step=0, tensors={}, state={"value": value})
    state = load(folder).state
    shutil.rmtree(folder)
    return state["value"]


def sample(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "tensors": {
            "model": {
                "weight": torch.randn(3, 4, generator=generator),
                "bias": torch.randn(4, generator=generator).bfloat16(),
            },
            "ema": {"weight": torch.randn(3, 4, generator=generator, dtype=torch.float64)},
        },
        "state": {"epoch": step, "loss": 1 / (step + 1), "betas": (0.9, 0.999), "generator": generator.get_state()},
    }


def is_sample(checkpoint: Checkpoint, step: int) -> bool:
    return checkpoint.step == step and identical([checkpoint.tensors, checkpoint.state], [sample(step)["tensors"], sample(step)["state"]])


def saved(root: Path, steps: str = "1* 2 3", keep: int = 2) -> CheckpointStore:
    """A store after saves at these steps; * marks the best so far."""
    store = CheckpointStore(root, keep=keep)
    for step in steps.split():
        store.save(int(step.strip("*")), **sample(int(step.strip("*"))), best=step.endswith("*"))
    return store


def names(store: CheckpointStore) -> list[str]:
    return [entry.name for entry in store.list()]


# --- Values ---------------------------------------------------------------------------------------

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
ARRAYS = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits, so NaNs with payloads, infinities and subnormals are among the values."""
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        return torch.tensor([byte % 2 == 0 for byte in raw], dtype=dtype).reshape(shape)
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(dtype).itemsize)
    array = np.frombuffer(raw, dtype="u1" if dtype == "bool" else dtype)
    return (array % 2 == 0 if dtype == "bool" else array).reshape(shape)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)
texts = st.text(max_size=8) | st.sampled_from(["$tensor", "$dict", "$", "order", "__metadata__", "a/b"])
simple = st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | texts
keys = simple | st.binary(max_size=4) | st.tuples(simple, simple)
leaves = (
    simple
    | st.binary(max_size=8)
    | st.builds(random_tensor, st.sampled_from(DTYPES), shapes, seeds)
    | st.builds(random_array, st.sampled_from(ARRAYS), shapes, seeds)
    | st.builds(lambda dtype, seed: random_array(dtype, (1,), seed)[0], st.sampled_from(ARRAYS), seeds)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@seed(0)
@settings(max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_any_value_comes_back_bit_for_bit(value: Any) -> None:
    tensors, document = pack(value)
    text = json.dumps(document, allow_nan=False)
    read = module._tensors(b"".join(bytes(chunk) for chunk in module._safetensors(tensors)))
    assert identical(value, unpack(read, json.loads(text)))


def test_awkward_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    payload = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))[0]
    value = {
        "floats": [math.nan, -math.nan, payload, math.inf, -math.inf, -0.0, 5e-324, 1e308, 1.0, 0.1],
        "integers": [0, 1, True, False, -1, 2**63, -(2**63), 2**64 - 1, 10**5000],
        "keys": {0: "a", "0": "b", 1.5: "c", None: "d", (1, "x"): "e", b"0": "f", -math.inf: "g"},
        "tags": {"$tuple": [1], "x": 2},
        "empty": [(), [], {}, "", b"", OrderedDict(), Counter()],
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"betas": (0.9, 0.999), "fused": None}],
        },
    }
    assert identical(through_files(value, tmp_path / "one"), value)


@seed(0)
@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(value=values)
def test_any_value_comes_back_from_the_disk(value: Any, tmp_path: Path) -> None:
    assert identical(value, through_files(value, tmp_path / "one"))


VIEWS = {
    "channels last": (torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
    "transposed": (torch.arange(6.0).reshape(2, 3).T, True),
    "strided": (torch.arange(12).reshape(3, 4)[:, ::2], False),
    "expanded": (torch.ones(1).expand(3), False),
    "negative bit": (torch.complex(torch.ones(2), torch.ones(2)).conj().imag, False),
    "parameter": (nn.Parameter(torch.ones(2, 2)), True),
    "scalar": (torch.tensor(3.0), True),
    "empty": (torch.empty(0, 3), True),
}


@pytest.mark.parametrize(("tensor", "dense"), VIEWS.values(), ids=VIEWS)
def test_views_come_back_with_their_values_and_dense_ones_with_their_layout(tensor: Tensor, dense: bool, tmp_path: Path) -> None:
    result = through_files(tensor, tmp_path / "one")
    assert torch.equal(result, tensor)
    assert result.stride() == (tensor.stride() if dense else tensor.contiguous().stride())
    result.add_(1)  # ordinary memory of its own


def test_tied_tensors_are_both_written(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    save(tmp_path / "one", step=0, tensors={"model": {"a": base, "b": base, "c": base[1:]}}, state={"d": base})
    result = load(tmp_path / "one")
    assert identical(result.tensors["model"], {"a": base, "b": base, "c": base[1:]})
    assert identical(result.state, {"d": base})


class Fancy(int):
    """A subclass would come back as a plain int."""


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (object(), TypeError, r"state\['a'\]\[0\] is a builtins\.object"),
        ({1, 2}, TypeError, r"state\['a'\]\[0\] is a builtins\.set"),
        (Fancy(3), TypeError, r"Fancy.*no subclasses"),
        (1j, TypeError, r"builtins\.complex"),
        (np.array(["x"]), TypeError, r"numpy\.ndarray"),
        (np.array([1.0], dtype=">f8"), TypeError, r"numpy\.ndarray"),
        (np.datetime64("2020"), TypeError, r"numpy\.datetime64"),
        (torch.ones(2, dtype=torch.complex64), TypeError, r"dtype torch\.complex64.*view_as_real"),
        (np.ones(2, dtype=np.complex128), TypeError, r"dtype torch\.complex128.*view_as_real"),
        (torch.eye(2).to_sparse(), TypeError, r"sparse.*to_dense"),
        (torch.empty(2, device="meta"), TypeError, r"meta.*materialise"),
        ({torch.ones(1): 1}, TypeError, r"tensor as a key.*state_dict"),
        ("\ud800", ValueError, r"lone surrogate.*bytes"),
        ({"\udc00": 1}, ValueError, r"lone surrogate.*bytes"),
        (nested(200), ValueError, r"nested more than 100"),
        (ITSELF, ValueError, r"nested more than 100.*contain itself"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused_before_the_disk_is_touched(
    value: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path / "one", step=0, tensors={}, state={"a": [value]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"../model": {}}, ValueError, r"'../model'.*names a file"),
        ({"state": {}}, ValueError, r"'state' is taken"),
        ({"model": {"__metadata__": torch.ones(1)}}, TypeError, r"\['__metadata__'\].*Rename"),
        ({"model": {0: torch.ones(1)}}, TypeError, r"\[0\].*must be text"),
        ({"model": {"\ud800": torch.ones(1)}}, ValueError, r"lone surrogate"),
        ({"model": {"extra": 3}}, TypeError, r"\['extra'\] is a int, not a tensor.*state"),
    ],
)
def test_bad_groups_are_refused(tensors: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path / "one", step=0, tensors=tensors, state={})


def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    tensors = {f"{dtype}": random_tensor(dtype, (2, 3), seed=1) for dtype in DTYPES} | {"empty": torch.empty(0, 2)}
    save(tmp_path / "one", step=0, tensors={"model": tensors}, state={})
    read = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert identical({name: read[name] for name in tensors}, tensors)


# --- Optimizers, schedulers, random generators ----------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, amsgrad, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"),
    "ClippedGD": lambda p: ClippedGD(p, lr=0.1, max_norm=0.1),
    "NormalizedGD": lambda p: NormalizedGD(p, lr=0.01, smoothing=0.1),
    "SNGDM": lambda p: SNGDM(p, lr=0.01),
}


def build(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(12, 2))
    if name != "LBFGS":  # torch's flattens with view() and refuses other layouts
        model.to(memory_format=torch.channels_last)
    groups = [{"params": model[0].parameters()}, {"params": model[5].parameters()}]
    optimizer = OPTIMIZERS[name](model.parameters() if name == "LBFGS" else groups)
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x, scale = torch.randn(5, 2, 4, 4), float(np.random.rand()) + random.random()  # noqa: NPY002  global on purpose

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = scale * (model(x) ** 2).mean()  # noqa: B023  used within the iteration
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        scheduler.step()
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(name: str, tmp_path: Path) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    parts = model, optimizer, scheduler = build(name, seed=0)
    train(*parts, steps=5)
    store = CheckpointStore(tmp_path)
    store.save(
        5,
        {"model": model.state_dict()},
        {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "rng": rng_state()},
    )
    kept = optimizer.state_dict()
    assert identical(store.load().state["optimizer"], kept)
    losses = train(*parts, steps=5)

    random.seed(9)
    np.random.seed(9)  # noqa: NPY002
    resumed = model_2, optimizer_2, scheduler_2 = build(name, seed=9)
    restored = store.load("last")
    model_2.load_state_dict(restored.tensors["model"])
    optimizer_2.load_state_dict(restored.state["optimizer"])
    scheduler_2.load_state_dict(restored.state["scheduler"])
    set_rng_state(restored.state["rng"])
    assert train(*resumed, steps=5) == losses
    assert identical(dict(model.state_dict()), dict(model_2.state_dict()))
    assert identical(optimizer.state_dict(), optimizer_2.state_dict())


def one_parameter() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 2, 5]),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, gamma=0.5)], milestones=[2]),
    ],
    ids=["MultiStep", "OneCycle", "Plateau", "Lambda", "WarmRestarts", "Sequential"],
)
def test_scheduler_states_come_back(make: Callable[..., lr_scheduler.LRScheduler], tmp_path: Path) -> None:
    optimizer = one_parameter()
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*[0.5] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    state = scheduler.state_dict()
    result = through_files(state, tmp_path / "one")
    assert identical(result, state)
    make(one_parameter()).load_state_dict(result)


def test_generators_of_ones_own_come_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    others = [np.random.Generator(bits(5)) for bits in (np.random.PCG64, np.random.Philox, np.random.SFC64)]
    state = {"torch": generator.get_state(), "numpy": [other.bit_generator.state for other in others]}
    first = [torch.rand(3, generator=generator).tolist()] + [other.random(3).tolist() for other in others]
    restored = through_files(state, tmp_path / "one")
    generator.set_state(restored["torch"])
    for other, kept in zip(others, restored["numpy"], strict=True):
        other.bit_generator.state = kept
    assert first == [torch.rand(3, generator=generator).tolist()] + [other.random(3).tolist() for other in others]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_and_random_states_of_a_gpu_come_back(tmp_path: Path) -> None:
    x = nn.Parameter(torch.randn(3, 4, device="cuda"))
    optimizer = torch.optim.Adam([x], lr=0.1, fused=True)
    (x**2).sum().backward()
    optimizer.step()
    save(tmp_path / "one", step=1, tensors={"m": {"x": x}}, state={"o": optimizer.state_dict(), "r": rng_state()})
    first = torch.rand(3, device="cuda")
    result = load(tmp_path / "one")
    set_rng_state(result.state["r"])
    assert torch.equal(first, torch.rand(3, device="cuda"))
    assert torch.equal(result.tensors["m"]["x"].cuda(), x)
    y = nn.Parameter(x.detach().clone())
    resumed = torch.optim.Adam([y], lr=0.1, fused=True)
    resumed.load_state_dict(result.state["o"])
    for p, o in ((x, optimizer), (y, resumed)):
        o.zero_grad()
        (p**2).sum().backward()
        o.step()
    assert torch.equal(x, y)


# --- The store ------------------------------------------------------------------------------------


def test_last_best_steps_and_pruning(tmp_path: Path) -> None:
    store = saved(tmp_path / "a" / "b", steps="1* 2 3* 4 5")
    assert names(store) == ["save-000003-step-3-best", "save-000004-step-4", "save-000005-step-5"]
    assert is_sample(store.load(), 5)
    assert is_sample(store.load("best"), 3)
    assert is_sample(store.load(4), 4)
    assert is_sample(store.load("save-000004-step-4"), 4)
    assert is_sample(CheckpointStore(store.root).load("best"), 3)
    store.save(6, **sample(6), best=True)
    assert names(store) == ["save-000005-step-5", "save-000006-step-6-best"]
    assert names(saved(tmp_path / "one", steps="1* 2 3", keep=1)) == ["save-000001-step-1-best", "save-000003-step-3"]


def test_a_run_that_went_back_continues_from_its_newest_save(tmp_path: Path) -> None:
    store = saved(tmp_path, steps="10 20 30 15 20", keep=3)
    assert names(store) == ["save-000003-step-30", "save-000004-step-15", "save-000005-step-20"]
    assert store.load().folder.name == store.load(20).folder.name == "save-000005-step-20"


def test_unknown_names_list_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint 'last'.*none yet") as caught:
        CheckpointStore(tmp_path / "nothing").load()
    assert caught.value.alternative is None
    with pytest.raises(CheckpointError, match=r"no checkpoint 'best'.*: save-000001-step-2, save-000002-step-3") as caught:
        saved(tmp_path / "x", steps="2 3").load("best")
    assert caught.value.alternative == "save-000002-step-3"
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "absent")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep=0.*Try 2"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"step=-1"):
        CheckpointStore(tmp_path).save(-1, {}, {})
    with pytest.raises(TypeError):
        CheckpointStore(tmp_path).save(1.5, {}, {})  # type: ignore[arg-type]
    save(tmp_path / "one", step=0, tensors={}, state={})
    with pytest.raises(CheckpointError, match=r"one could not be written \(the folder exists already\).*another name"):
        save(tmp_path / "one", step=1, tensors={}, state={})
    assert load(tmp_path / "one").step == 0


# --- Crashes --------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception, so that no handler takes it for an error."""


class MortalDisk:
    """Counts the calls that change the disk and dies at the n-th: from then on, cleaning up has no effect either."""

    def __init__(self, die_at: int | None = None, *, half: bool = False, error: OSError | None = None) -> None:
        self.die_at, self.half, self.error = die_at, half, error
        self.trace: list[tuple[str, tuple[Any, ...], Any]] = []
        self.dead = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.dead:
                raise Killed
            if len(self.trace) + 1 == self.die_at:
                if self.error is not None:
                    self.die_at = None
                    raise self.error
                if name == "write" and self.half:
                    os.write(args[0], args[1][: len(args[1]) // 2])
                self.dead = True
                raise Killed
            result = None if name == "fsync" else getattr(os, name)(*args)  # no power is cut here
            self.trace.append((name, args, result))
            return result

        return call

    def close_all(self) -> None:
        for name, _, result in self.trace:
            if name == "open":
                with suppress(OSError):
                    os.close(result)


UseDisk = Callable[[MortalDisk], MortalDisk]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> UseDisk:
    def use(disk: MortalDisk) -> MortalDisk:
        monkeypatch.setattr(module, "_disk", disk)
        return disk

    return use


def deaths(before: Path | None, root: Path, on_disk: UseDisk, *, half: bool) -> Iterator[int]:
    """Yields after each death of a save of step 9, at its first, second, ... call, until one save lives."""
    for number in range(1, 1000):
        shutil.rmtree(root, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, root)
        disk = on_disk(MortalDisk(number, half=half))
        try:
            CheckpointStore(root).save(9, **sample(9), best=True)
        except Killed:
            disk.close_all()
            on_disk(MortalDisk())
            yield number
        else:
            assert number > 30
            return
    raise AssertionError("the save never completed")


def check_survivors(store: CheckpointStore) -> str:
    """What is left is the old store or the new one, each complete."""
    assert all(is_sample(store.load(name), store.load(name).step) for name in names(store))
    last, best = store.load("last"), store.load("best")
    old = is_sample(last, 3) and is_sample(best, 1)
    new = is_sample(last, 9) and is_sample(best, 9)
    assert old or new
    return "old" if old else "new"


def check_next_save(store: CheckpointStore) -> None:
    store.save(11, **sample(11))
    assert is_sample(store.load(), 11)
    assert sorted(path.name for path in store.root.iterdir()) == sorted(names(store)), "leftovers"
    assert len(names(store)) <= 3


@pytest.mark.parametrize("half", [False, True], ids=["before each call", "half-way through writes"])
def test_a_crash_at_any_call_leaves_the_old_or_the_new_checkpoints(half: bool, tmp_path: Path, on_disk: UseDisk) -> None:
    before = saved(tmp_path / "before").root
    seen = []
    for _ in deaths(before, tmp_path / "run", on_disk, half=half):
        store = CheckpointStore(tmp_path / "run")
        seen.append(check_survivors(store))
        check_next_save(store)
    assert seen == sorted(seen, reverse=True)  # old until one instant, new from there on
    assert {"old", "new"} == set(seen)


def test_a_crash_in_the_first_save_leaves_nothing_or_all(tmp_path: Path, on_disk: UseDisk) -> None:
    for _ in deaths(None, tmp_path / "run", on_disk, half=True):
        store = CheckpointStore(tmp_path / "run")
        assert not names(store) or is_sample(store.load(), 9)
        check_next_save(store)


def test_a_second_crash_while_tidying_up_does_no_harm(tmp_path: Path, on_disk: UseDisk) -> None:
    before, crashed = saved(tmp_path / "before").root, tmp_path / "crashed"
    for first in deaths(before, crashed, on_disk, half=False):
        if first % 9:
            continue
        for second in range(1, 12):
            root = tmp_path / f"run-{first}-{second}"
            shutil.copytree(crashed, root)
            disk = on_disk(MortalDisk(second))
            with pytest.raises(Killed):
                CheckpointStore(root).save(11, **sample(11))
            disk.close_all()
            on_disk(MortalDisk())
            check_survivors(CheckpointStore(root))
            check_next_save(CheckpointStore(root))


def test_leftovers_go_before_the_next_save_needs_their_space(tmp_path: Path, on_disk: UseDisk) -> None:
    store = saved(tmp_path)
    on_disk(MortalDisk(15))
    with pytest.raises(Killed):
        store.save(9, **sample(9))
    assert (tmp_path / ".new-save-000004-step-9").is_dir()
    disk = on_disk(MortalDisk())
    store.save(11, **sample(11))
    calls = [name for name, *_ in disk.trace]
    assert calls.index("rmdir") < calls.index("mkdir")


def test_writes_that_take_less_than_they_are_given_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(module._Disk):
        @staticmethod
        def write(descriptor: int, data: Any) -> int:  # type: ignore[override]
            return os.write(descriptor, data[:7])

    monkeypatch.setattr(module, "_disk", Short())
    assert is_sample(saved(tmp_path).load(), 3)


def test_everything_is_synced_before_something_relies_on_it(tmp_path: Path, on_disk: UseDisk) -> None:
    """What a power cut needs and no killed process shows: each name and each byte is durable before the next stage."""
    root = saved(tmp_path / "run").root
    disk = on_disk(MortalDisk())
    CheckpointStore(root).save(9, **sample(9), best=True)
    paths: dict[int, Path] = {}
    unsynced: set[Path] = set()  # files with bytes, folders with names, that a power cut would take
    renamed = removed = 0
    for name, args, result in disk.trace:
        if name == "open":
            paths[result] = Path(args[0])
            if args[1] & os.O_CREAT:
                unsynced |= {Path(args[0]), Path(args[0]).parent}
        elif name == "write":
            unsynced.add(paths[args[0]])
        elif name == "fsync":
            unsynced.discard(paths[args[0]])
        elif name == "mkdir":
            unsynced.add(Path(args[0]).parent)
        elif name == "rename" and Path(args[0]).name.startswith(".new-"):
            assert unsynced == {root}, "the new folder and its files are durable before it gets its name"
            renamed += 1
        elif name == "rename":
            assert renamed == 1
            assert removed or root not in unsynced, "the new name is durable before an old one goes"
            removed += 1
            unsynced.add(root)
        elif name in ("unlink", "rmdir"):
            assert root not in unsynced, "an old name is gone for good before its files go"
    assert (renamed, removed) == (1, 2)


SIGKILL_SCRIPT = """
import os, shutil, signal, sys
from metanudge.training import checkpoint as module

class Disk:
    def __init__(self, die_at):
        self.left = die_at
    def __getattr__(self, name):
        def call(*args):
            self.left -= 1
            if self.left == 0:
                if name == "write":
                    os.write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return getattr(os, name)(*args)
        return call

before, root = sys.argv[1:]
new = module.load(before + "/../sample")
for number in range(1, 1000):
    shutil.copytree(before, f"{root}/{number}")
    child = os.fork()
    if child == 0:
        module._disk = Disk(number)
        module.CheckpointStore(f"{root}/{number}").save(9, new.tensors, new.state, best=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        sys.exit(os.WEXITSTATUS(status))
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_process_killed_at_any_call_leaves_the_old_or_the_new_checkpoints(tmp_path: Path) -> None:
    before = saved(tmp_path / "before").root
    save(tmp_path / "sample", step=9, **sample(9))
    source = str(Path(metanudge.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", SIGKILL_SCRIPT, str(before), str(tmp_path / "run")],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": source},
    )
    roots = sorted((tmp_path / "run").iterdir(), key=lambda path: int(path.name))
    seen = [check_survivors(CheckpointStore(root)) for root in roots]
    assert len(seen) > 30
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == "new"
    for root in roots[::5]:
        check_next_save(CheckpointStore(root))


# --- Errors of the disk ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "not read-only"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_an_error_of_the_disk_at_any_call_is_explained_and_harmless(code: int, fix: str, tmp_path: Path, on_disk: UseDisk) -> None:
    before = saved(tmp_path / "before").root
    raised = 0
    for number in range(1, 40):
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        disk = on_disk(MortalDisk(number, error=OSError(code, os.strerror(code))))
        store, caught = CheckpointStore(root), None
        try:
            store.save(9, **sample(9), best=True)
        except (CheckpointError, UserWarning) as error:  # warnings are errors in tests
            caught = error
        committed = any(name == "rename" for name, *_ in disk.trace)
        assert check_survivors(store) == ("new" if committed else "old")
        if isinstance(caught, CheckpointError):
            raised += 1
            assert os.strerror(code) in str(caught)
            assert fix in str(caught)
            assert root in [caught.file, *caught.file.parents]
            assert committed or sorted(path.name for path in root.iterdir()) == names(store), "leftovers"
        else:  # the new checkpoint is safe, only an old one could not be removed
            assert committed
            assert caught is None or "could not be removed" in str(caught)
        disk.close_all()
        on_disk(MortalDisk())
        check_next_save(store)
    assert raised > 25


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_is_explained(tmp_path: Path) -> None:
    store = saved(tmp_path / "run")
    store.root.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*may write to"):
            store.save(9, **sample(9))
        assert check_survivors(store) == "old"
    finally:
        store.root.chmod(0o700)


def test_a_file_in_the_way_of_the_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        CheckpointStore(tmp_path / "file").save(1, {}, {})
    with pytest.raises(CheckpointError, match="could not be written"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, {}, {})


def test_a_leftover_that_stays_is_a_warning_not_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(module._Disk):
        @staticmethod
        def rmdir(path: Any) -> None:  # type: ignore[override]
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    store = saved(tmp_path, steps="1 2")
    monkeypatch.setattr(module, "_disk", Stubborn())
    with pytest.warns(UserWarning, match=r"\.old-save-000001-step-1 could not be removed \(Device or resource busy\)"):
        store.save(3, **sample(3))
    monkeypatch.undo()
    assert is_sample(store.load(), 3)
    store.save(4, **sample(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == names(store)


# --- Damage ---------------------------------------------------------------------------------------


def damage(file: Path, kind: str, rng: random.Random) -> None:
    data = file.read_bytes()
    if kind == "deleted":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "grown":
        file.write_bytes(data + rng.randbytes(rng.randrange(1, 9)))
    else:
        position = rng.randrange(len(data))
        flipped = bytes([data[position] ^ (1 << rng.randrange(8))])
        file.write_bytes(data[:position] + flipped + data[position + 1 :])


@pytest.mark.parametrize("block", range(4))
def test_a_hundred_damaged_checkpoints_are_all_refused(block: int, tmp_path: Path) -> None:
    store = saved(tmp_path / "run")
    files = sorted(store.load().folder.iterdir())
    assert [file.name for file in files] == [
        "ema.safetensors", "manifest.json", "model.safetensors", "state.json", "state.safetensors",
    ]  # fmt: skip
    originals = {file: file.read_bytes() for file in files}
    for case in range(25 * block, 25 * (block + 1)):
        rng = random.Random(case)
        file = files[case % len(files)]
        damage(file, ["truncated", "flipped", "deleted", "grown"][case // len(files) % 4], rng)
        for name in ("last", 3, "save-000003-step-3"):
            with pytest.raises(CheckpointError) as caught:
                store.load(name)
            assert caught.value.file == file
            assert str(file) in str(caught.value)
            assert caught.value.alternative == "save-000002-step-2"
            assert "'save-000002-step-2' is intact" in str(caught.value)
        assert is_sample(store.load(caught.value.alternative), 2)
        assert is_sample(store.load("best"), 1)
        file.write_bytes(originals[file])
    assert is_sample(store.load(), 3)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    save(tmp_path / "one", step=3, **sample(3))
    file = tmp_path / "one" / "manifest.json"
    data = file.read_bytes()
    for position in range(len(data)):
        for bit in (0, 5, 7):  # another digit, another case, not UTF-8
            file.write_bytes(data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :])
            with pytest.raises(CheckpointError, match=r"manifest\.json does not match its own sha256"):
                load(tmp_path / "one")


def test_the_alternative_skips_what_is_damaged_too_and_may_be_newer(tmp_path: Path) -> None:
    store = saved(tmp_path, steps="1 2 3 4", keep=4)
    (store.load(3).folder / "state.json").unlink()
    (store.load(4).folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes where the manifest says") as caught:
        store.load()
    assert caught.value.alternative == "save-000002-step-2"
    shutil.rmtree(store.root / "save-000002-step-2")
    (store.load(1).folder / "manifest.json").unlink()
    store.save(5, **sample(5))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing") as caught:
        store.load(1)
    assert caught.value.alternative == "save-000005-step-5"
    for entry in store.list():
        (entry.folder / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        store.load()
    assert caught.value.alternative is None


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    (folder / "manifest.json").write_bytes(module._seal({**manifest, **changes}))


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path)
    rewrite_manifest(store.load().folder, version=2)
    with pytest.raises(CheckpointError, match=r"format version 2.*reads version 1.*newer") as caught:
        store.load()
    assert caught.value.alternative == "save-000002-step-2"


def test_strange_files_and_renamed_folders_are_refused(tmp_path: Path) -> None:
    store = saved(tmp_path)
    folder = store.load().folder
    (folder / ".DS_Store").write_bytes(b"a file manager was here")
    assert is_sample(store.load(), 3)
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"other\.safetensors is not in the manifest"):
        store.load()
    (folder / "other.safetensors").unlink()
    folder.rename(tmp_path / "save-000009-step-7")
    with pytest.raises(CheckpointError, match="holds step 3: it was renamed"):
        store.load()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("model.safetensors", b'\x08\0\0\0\0\0\0\0{"a":1} ', "cannot be parsed"),
        ("model.safetensors", b"", "cannot be parsed"),
        ("state.json", b"{", "cannot be parsed"),
        ("state.json", b'{"a": {"$tensor": "gone"}}', "does not describe a state"),
        ("state.json", b'{"a": {"$pickle": ""}}', "does not describe a state.*unknown kind of value"),
        ("state.json", b"[]", "does not describe a state"),
    ],
)
def test_wrong_content_with_the_right_checksums_is_refused(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    save(tmp_path / "one", step=1, **sample(1))
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_bytes())
    (tmp_path / "one" / name).write_bytes(data)
    digest = module.hashlib.sha256(data).hexdigest()
    rewrite_manifest(tmp_path / "one", files={**manifest["files"], name: {"bytes": len(data), "sha256": digest}})
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path / "one")
    assert caught.value.file.name == name
