"""Displacements and meta-gradients of 16-bit parameters, in 24 bits an entry.

Small differences of what is stored in 16 bits would drown in rounding, and float32 is as much as θ
and φ together. A float32 without its last byte has the same range and 16 binary digits, 256 times
finer than bfloat16: a sum over some steps and a difference of two solutions lose about 2⁻¹⁷ a
piece of d, far below what the rounding of φ does to the gradients.

Whoever asks a `PackedParams` for a leaf gets it in float32, a copy; `descend`, `place` and `add`
work on it piece by piece, on a CUDA device in one pass over memory each (`packed_kernels`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from metanudge.params import Params, joined, norm, wide
from metanudge.spread import local

logger = logging.getLogger("metanudge")

_PIECE = 2**20  # entries that are unpacked at a time
_MOST = 16  # pieces
_EVERY = 61  # of a sample, at least; odd, so that it is of all columns
_MANY = 14  # a sample has about 2¹⁴ entries at most
_TILE = 4096  # entries that one program of a kernel works on
_SEEN, _SEEN_OF_FEW = 2, 64  # entries of a tile that are a sample of it: where there are many, few


class Packed:
    """float32 without the last byte of each entry, rounded to the nearest.

    Attributes:
        high, low: the upper two bytes and the third one, of all entries in a row.
        shape: of the tensor.

    Example:
        >>> packed = Packed.of(torch.tensor([1.0, 1 + 2**-16, -3e-9]))
        >>> packed.nbytes, (packed.open() - packed.open().bfloat16()).tolist()[0]
        (9, 0.0)
    """

    def __init__(self, high: Tensor, low: Tensor, shape: torch.Size) -> None:
        self.high, self.low, self.shape = high, low, shape

    @classmethod
    def zeros(cls, shape: torch.Size, device: torch.device) -> Packed:
        """Zeros."""
        size = shape.numel()
        high = torch.zeros(size, dtype=torch.int16, device=device)
        return cls(high, torch.zeros(size, dtype=torch.uint8, device=device), shape)

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        """A tensor, rounded."""
        high = torch.empty(tensor.numel(), dtype=torch.int16, device=tensor.device)
        made = cls(high, torch.empty_like(high, dtype=torch.uint8), tensor.shape)
        flat = tensor.detach().reshape(-1)
        for piece, (part,) in made._pieces(flat):
            piece._close(part.to(torch.float32, copy=True))
        return made

    @property
    def nbytes(self) -> int:
        """Three for each entry."""
        return self.high.nbytes + self.low.nbytes

    def open(self) -> Tensor:
        """In float32."""
        bits = self.high.int().bitwise_left_shift_(16)
        # the third byte counts 0 … 255, in int32 as it is
        return bits.add_(self.low, alpha=256).view(torch.float32).view(self.shape)

    def every(self, stride: int) -> Tensor:
        """Every so-manieth entry, in float32."""
        high = self.high[::stride]
        return Packed(high, self.low[::stride], high.shape).open()

    def _close(self, values: Tensor) -> None:
        """Overwrite with float32 values, which are overwritten."""
        # not just any NaN: rounding up a CUDA device's, all ones, would make it 0
        bits = values.masked_fill_(values.isnan(), torch.nan).view(torch.int32)
        bits.add_(bits.bitwise_right_shift(8).bitwise_and_(1).add_(0x7F))  # ties to even
        self.high.copy_(bits.bitwise_right_shift(16))
        self.low.copy_(bits.bitwise_right_shift_(8).bitwise_and_(0xFF))

    def _pieces(self, *flat: Tensor) -> Iterator[tuple[Packed, tuple[Tensor, ...]]]:
        """Parts of it, and of tensors of as many entries (or one entry: as they are)."""
        size = self.high.numel()
        length = max(_PIECE, -(-size // _MOST))
        for first in range(0, size, length):
            cut = slice(first, min(first + length, size))
            shape = torch.Size((cut.stop - first,))
            own = Packed(self.high[cut], self.low[cut], shape)
            yield own, tuple(leaf[cut] if leaf.numel() == size else leaf for leaf in flat)


class Step:
    """One step of a packed displacement, whose gradient comes in one part or two; `norms` says how
    long it was. How parallel two parts are is seen on a sample of their entries, since the first
    one is gone when the second is there.
    """

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._seen: Tensor | None = None

    def take(self, d: Packed, g: Tensor, lr: float, lam: Tensor | None, *, last: bool) -> None:
        """d ← d − α (g + λ d) with the first part of a gradient, d ← d − α g with the second."""
        again = bool(self._squares)
        sums, self._seen = descend(
            d, g, lr, None if again else lam, self._seen, keep=not (again or last)
        )
        self._squares.append(sums.sum(-1))

    @staticmethod
    def norms(steps: list[Step]) -> Tensor:
        """‖g + λ d‖ of each, d being what it was: `(steps,)`."""
        first = torch.stack([step._squares[0][0] for step in steps])
        blank = torch.zeros_like(first[0]).expand(4)
        last = [step._squares[1] if len(step._squares) > 1 else blank for step in steps]
        second, dot, before, now = torch.stack(last, 1)
        along = (dot / (before * now).sqrt()).nan_to_num(0.0)
        return (first + second + 2 * (first * second).sqrt() * along).clamp_min(0).sqrt()


def descend(
    d: Packed, g: Tensor, lr: float, lam: Tensor | None, seen: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """d ← d − α s with s = g + λ d, which is g alone where λ is None; otherwise λ is 0-d or of the
    shape of d.

    Returns ‖s‖² in parts, `(1, n)`, and a sample of s if it is to be kept. With the sample of
    another s before it, also in parts, `(4, n)`: the samples' product and their squares.
    """
    kernels = _kernels_for(g)
    if kernels is not None:
        tiles = -(-d.high.numel() // _TILE)
        each = _SEEN if d.high.numel() >= _PIECE else _SEEN_OF_FEW
        like: dict[str, Any] = {"dtype": torch.float32, "device": g.device}
        found = torch.empty(1 if seen is None else 4, tiles, **like)
        sample = torch.empty(tiles * each, **like) if keep else None
        stiff = None if lam is None else lam.contiguous()
        kernels.descend(d, g.contiguous(), lr, stiff, seen, sample, found, tile=_TILE)
        return found, sample
    sums, kept = [torch.zeros((), device=g.device)], None
    if keep or seen is not None:
        stride = max(_EVERY, d.high.numel() >> _MANY | 1)
        now = g.reshape(-1)[::stride].float()
        if lam is not None:
            stiff = lam.reshape(-1)[::stride] if lam.ndim else lam
            now = torch.addcmul(now, d.every(stride), stiff.float())
        kept = now if keep else None
        if seen is not None:
            sums += [torch.dot(seen, now), torch.dot(seen, seen), torch.dot(now, now)]
    force = [] if lam is None else [lam.reshape(-1)]
    for piece, (part, *by) in d._pieces(g.reshape(-1), *force):
        old, step = piece.open(), part.float()
        if by:
            step = torch.addcmul(step, old, by[0].float())
        sums[0].add_(torch.dot(step, step))
        piece._close(old.add_(step, alpha=-lr))
        del old, step  # or they would still be alive while the next ones are made
    return torch.stack(sums)[:, None], kept


def place(d: Packed, theta: Tensor, phi: Tensor) -> None:
    """φ ← θ + d."""
    kernels = _kernels_for(phi) if theta.is_contiguous() and phi.is_contiguous() else None
    if kernels is not None:
        kernels.place(d, theta, phi)
    elif phi.is_contiguous():
        for piece, (centre, out) in d._pieces(theta.reshape(-1), phi.view(-1)):
            torch.add(centre, piece.open(), out=out)
    else:
        torch.add(theta, d.open().view(theta.shape), out=phi)


def add(m: Packed, rows: Packed | Tensor, weight: float, scale: Tensor | None) -> None:
    """m ← m + w · scale ⊙ rows; scale is 0-d or of the shape of m, None for 1."""
    kernels = _kernels_for(m.high)
    if kernels is not None:
        rows = rows.contiguous() if isinstance(rows, Tensor) else rows
        kernels.add(m, rows, weight, None if scale is None else scale.contiguous())
        return
    given = [] if isinstance(rows, Packed) else [rows.reshape(-1)]
    others = given if scale is None else [*given, scale.reshape(-1)]
    first = 0
    for piece, (*parts,) in m._pieces(*others):
        total, size = piece.open(), piece.high.numel()
        by = None if scale is None else parts.pop().float()
        if isinstance(rows, Packed):
            cut = slice(first, first + size)
            row = Packed(rows.high[cut], rows.low[cut], torch.Size((size,))).open()
        else:
            row = parts[0].float()
        piece._close(
            total.add_(row, alpha=weight) if by is None else total.addcmul_(row, by, value=weight)
        )
        first += size
        del total, row


class PackedParams(dict[str, Tensor]):
    """Parameters some of which are packed; asked for, these are copies in float32.

    To change one, work on what `packed` has of it.

    Attributes:
        packed: those that are.

    Example:
        >>> d = PackedParams({"w": torch.ones(2), "big": Packed.of(torch.ones(1, 3))})
        >>> {name: leaf.tolist() for name, leaf in d.items()}
        {'w': [1.0, 1.0], 'big': [[1.0, 1.0, 1.0]]}
    """

    def __init__(self, leaves: Mapping[str, Tensor | Packed]) -> None:
        self.packed = {n: leaf for n, leaf in leaves.items() if isinstance(leaf, Packed)}
        empty = torch.empty(0)  # whoever does not ask finds nothing
        plain = {n: leaf if isinstance(leaf, Tensor) else empty for n, leaf in leaves.items()}
        super().__init__(plain)

    def __getitem__(self, name: str) -> Tensor:
        """A leaf."""
        return self.packed[name].open() if name in self.packed else super().__getitem__(name)

    def items(self) -> Any:
        """Names and leaves, which are made one by one."""
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        """Leaves, which are made one by one."""
        return (self[name] for name in self)

    def pop(self, name: str, *default: Any) -> Any:
        """Take a leaf out."""
        if name not in self.packed:
            return super().pop(name, *default)
        super().pop(name)
        return self.packed.pop(name).open()


@norm.register(PackedParams)
def _norm(a: PackedParams) -> Tensor:
    # one after the other: together they would be as large as what is saved
    return joined({n: torch.linalg.vector_norm(leaf) for n, leaf in a.items()}).reshape(1)


def zeros(
    parameters: Mapping[str, Tensor], names: Iterable[str], *, rows: bool = False
) -> PackedParams:
    """Zeros of the parameters' shapes (and a row axis), in float32 at least, those of these names
    packed.
    """
    chosen, ahead = set(names), (1,) if rows else ()
    leaves: dict[str, Tensor | Packed] = {}
    for name, parameter in parameters.items():
        own = local(parameter)
        shape = torch.Size((*ahead, *own.shape))
        if name in chosen:
            leaves[name] = Packed.zeros(shape, own.device)
        else:
            leaves[name] = torch.zeros(shape, dtype=wide(own.dtype), device=own.device)
    return PackedParams(leaves)


def pack(leaves: Params, names: Iterable[str]) -> PackedParams:
    """Leaves, those of these names packed; they are used up."""
    order = list(leaves)
    packed = {n: Packed.of(leaves.pop(n)) for n in names}
    return PackedParams({n: packed[n] if n in packed else leaves[n] for n in order})


def _kernels_for(tensor: Tensor) -> Any:
    """The kernels, on a device for which there are some; where tensors have no numbers, those that
    do nothing.
    """
    if tensor.device.type != "cuda":
        return None
    if type(tensor) is Tensor:
        return _working_kernels()
    planned = type(tensor).__name__ == "FakeTensor"
    return _NO_KERNELS if planned and (triton_is_there() or not torch.cuda.is_available()) else None


def _nothing(*args: Any, **options: Any) -> None:
    pass


_NO_KERNELS = SimpleNamespace(descend=_nothing, place=_nothing, add=_nothing)


@cache
def triton_is_there() -> bool:
    """Whether Triton is installed (it comes with torch for CUDA) and knows the current device."""
    found = importlib.util.find_spec("triton")
    return found is not None and torch.cuda.get_device_capability() >= (8, 0)


@cache
def _working_kernels() -> Any:
    if not triton_is_there():
        return None
    from metanudge.engines.packed_kernels import KERNELS

    try:
        KERNELS.try_out(Packed)
    except Exception as error:  # no compiler, another Triton: each says so in its own way
        logger.warning(
            "16-bit parameters: steps take longer, since kernels do not work here: %s", error
        )
        return None
    return KERNELS
