"""Live tensor memory during a call; see `metanudge.bench.memory`."""

from metanudge.bench.memory import Allocations, trainable_bytes

__all__ = ["Allocations", "trainable_bytes"]
