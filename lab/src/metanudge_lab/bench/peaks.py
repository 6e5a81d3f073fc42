"""What the machine can do at best, measured: multiplications per second and bytes per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from metanudge.training.device import Precision, computing_in
from metanudge_lab.bench.timing import Times, timed


@dataclass(frozen=True)
class Peaks:
    """The peaks of a device in one precision.

    Attributes:
        flops: floating-point operations per second of the best large matrix product.
        bandwidth: pairs (bytes moved, bytes per second) of a triad a = b + c, from cache-sized to
            large.
    """

    flops: float
    bandwidth: tuple[tuple[int, float], ...]

    def bytes_per_second(self, moved: int) -> float:
        """The best rate measured at this much traffic or more: what fits into a cache may come from
        there.

        Example:
            >>> peaks = Peaks(1e9, ((1_000, 8e9), (1_000_000, 2e9)))
            >>> (peaks.bytes_per_second(500), peaks.bytes_per_second(5_000),
            ...     peaks.bytes_per_second(10**9))
            (8000000000.0, 2000000000.0, 2000000000.0)
        """
        return max(
            [rate for size, rate in self.bandwidth if size >= moved], default=self.bandwidth[-1][1]
        )

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "flops_per_s": self.flops,
            "bytes_per_s": [{"moved": size, "rate": rate} for size, rate in self.bandwidth],
        }


_SIDES: dict[str, tuple[int, ...]] = {"cpu": (512, 1024), "cuda": (2048, 4096, 8192)}
_MEGABYTES: dict[str, tuple[float, ...]] = {"cpu": (0.5, 4, 32, 256), "cuda": (24, 192, 1536, 6144)}


def measure_peaks(device: torch.device, name: Precision = "fp32", *, quick: bool = False) -> Peaks:
    """Measure; a second or two (quick: much less, and less exact)."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    sides, sizes = _SIDES[kind], _MEGABYTES[kind]
    if quick:
        sides, sizes = sides[:1], sizes[:2]
    with computing_in(name, device), torch.no_grad():
        flops = max(_product_rate(side, device, name) for side in sides)
    if kind == "cuda":  # on a small or crowded card, what fits
        sizes = (
            tuple(size for size in sizes if size * 1e6 < 0.5 * torch.cuda.mem_get_info(device)[0])
            or sizes[:1]
        )
    bandwidth = tuple(_triad_rate(megabytes, device) for megabytes in sizes)
    if kind == "cuda":
        torch.cuda.empty_cache()
    return Peaks(flops, bandwidth)


def _product_rate(side: int, device: torch.device, name: Precision) -> float:
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return (
        2
        * side**3
        / _fastest(lambda: torch.mm(a, b, out=out), device, calls=5 if device.type == "cuda" else 1)
    )


def _triad_rate(megabytes: float, device: torch.device) -> tuple[int, float]:
    count = int(megabytes * 1e6 / 12)
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    moved = 3 * 4 * count
    calls = max(1, int(20e6 // moved)) if device.type == "cpu" else 5
    return moved, moved / _fastest(lambda: torch.add(b, c, alpha=2.0, out=a), device, calls=calls)


def _fastest(work: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """Seconds of one call: the best of a few runs, since others can only slow us down."""

    def several() -> None:
        for _ in range(calls):
            work()

    several()
    times = Times()
    while len(times.seconds) < 5 or (sum(times.seconds) < 0.2 and len(times.seconds) < 50):
        timed(several, device, times)
    return min(times.device_seconds or times.seconds) / calls
