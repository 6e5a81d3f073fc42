"""Live tensor memory during a call; see `metanudge_lab.bench.memory`."""

from metanudge_lab.bench.memory import Allocations, trainable_bytes

__all__ = ["Allocations", "trainable_bytes"]
