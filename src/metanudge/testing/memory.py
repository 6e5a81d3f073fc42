"""Live tensor memory during a call.

On a GPU the allocator tells. On a CPU it is counted on allocations: every storage an operator
returns, until it is freed.

    with Allocations() as seen:
        model(x).sum().backward()
    seen.peak  # bytes

Only what is allocated inside counts: parameters and data that exist before are the same for every
method. What a kernel allocates for itself and frees before it returns (the workspace of a
convolution) is not seen, unless `Workspaces` has measured it on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call holds at a time, beyond what was there before it; on the device
    where it works.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with Allocations() as seen:
        work()
    return seen.peak


class Allocations(TorchDispatchMode):
    """Bytes held now (`live`) and at most (`peak`) by storages that came to life inside the
    context.

    Args:
        block: what sizes are rounded up to, where an allocator gives out no less.
        workspaces: bytes that operators take while they run.
    """

    def __init__(self, block: int = 1, workspaces: Mapping[Any, int] | None = None) -> None:
        super().__init__()
        self._block = block
        self._workspaces = workspaces or {}
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            # A view or an in-place operator returns the storage of an argument, which may be older
            # than the context.
            if storage._cdata not in given:
                self._track(storage)
        self.peak = max(self.peak, self.live + self._workspaces.get(func, 0))
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        size = self._sizes[key] = -(-storage.nbytes() // self._block) * self._block
        self.live += size
        self.peak = max(self.peak, self.live)
        # torch keeps one Python object per storage for as long as the storage lives, so the
        # finalizer runs when it is freed.
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class Workspaces(TorchDispatchMode):
    """The most that each operator takes on a GPU beside what it is given and returns, in bytes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.found: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats(self._device)
        result = func(*args, **(kwargs or {}))
        most = torch.cuda.max_memory_allocated(self._device)
        if (beside := most - torch.cuda.memory_allocated(self._device)) > 0:
            self.found[func] = max(beside, self.found.get(func, 0))
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def trainable_bytes(model: nn.Module) -> int:
    """Size of one copy of the trainable parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
