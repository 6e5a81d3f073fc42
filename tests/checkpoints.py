"""What the checkpoint tests share: samples, comparison to the last bit, and a disk that dies at any
call.

disk = on_disk(MortalDisk(5))  # the fixture of tests/training/checkpoint
with pytest.raises(Killed):
    CheckpointStore(root).save(9, **sample(9))
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metanudge.training.checkpoint import Checkpoint, CheckpointStore, load, save

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32,
    torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits, so NaNs with payloads, infinities and subnormals are among the values."""
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        return torch.tensor([byte % 2 == 0 for byte in raw], dtype=dtype).reshape(shape)
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)


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
        "state": {
            "epoch": step,
            "loss": 1 / (step + 1),
            "betas": (0.9, 0.999),
            "generator": generator.get_state(),
        },
    }


def is_sample(checkpoint: Checkpoint, step: int) -> bool:
    return checkpoint.step == step and identical(
        [checkpoint.tensors, checkpoint.state], [sample(step)["tensors"], sample(step)["state"]]
    )


def saved(root: Path, steps: str = "1* 2 3", keep: int = 2) -> CheckpointStore:
    """A store after saves at these steps; * marks the best so far."""
    store = CheckpointStore(root, keep=keep)
    for step in steps.split():
        store.save(int(step.strip("*")), **sample(int(step.strip("*"))), best=step.endswith("*"))
    return store


def names(store: CheckpointStore) -> list[str]:
    return [entry.name for entry in store.list()]


class Killed(BaseException):
    """Not an Exception, so that no handler takes it for an error."""


class MortalDisk:
    """Counts the calls that change the disk and dies at the n-th: from then on, cleaning up has no
    effect either.
    """

    def __init__(
        self, die_at: int | None = None, *, half: bool = False, error: OSError | None = None
    ) -> None:
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
