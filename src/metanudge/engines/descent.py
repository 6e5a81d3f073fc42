"""Gradient descent that takes every parameter's gradient as soon as autograd has it, and never
holds a whole one.

Where memory is short it also holds displacements in a quarter of their size (`remainder`) while the
module holds φ = θ + d: φ − θ is d already, less what rounding φ has lost. That is at most half a
unit in the last place of φ where φ and θ are alike. In steps of |φ|ε/254 it fits into int8, and d
comes back within 2⁻³² |φ| in float32 (2⁻⁶¹ |φ| in float64) and its own rounding: φ itself is 256
times farther from θ + d. In inner steps that is less than what the rounding of φ does to the
gradient, unless α times the curvature is below about 1/256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from metanudge.engines.packed import PackedParams, Step
from metanudge.params import Params, joined, names_to_pack
from metanudge.proximal import Diagonal
from metanudge.spread import gradient_of, is_spread, local

Take = Callable[[str, Tensor], None]
_LEFT = 0.02  # of all entries, in parameters whose gradients wait
_PIECE = 0.05  # of all entries: how many displacements are unpacked at a time
_LEAST = (
    2**18
    # where kernels are launched; a smaller piece takes no less time, and the allocator's blocks
    # have twice the size
)

_MOST = 127  # of int8


class Listener:
    """Hears of every parameter whose gradient is there, from the first use until `close`.

    Left out are the smallest parameters, a fiftieth of all entries, which would cost more time than
    memory; those below float32 that are not packed; and those that are spread over ranks, whose
    gradients come from there, on a stream of their own.

    Attributes:
        waiting: whose gradients wait for the end of each backward pass, since they are too small
            for the device to work on one by one.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        self._take: Take | None = None

    @cached_property
    def names(self) -> list[str]:
        """Whom it hears of, the smaller ones first."""
        parameters, waiting = self._parameters, set(self.waiting)
        heard = [n for n in _all_but_the_smallest(parameters) if n not in waiting]
        return heard + names_to_pack(parameters)

    @cached_property
    def waiting(self) -> list[str]:
        """Of what is packed none."""
        parameters = self._parameters
        return [n for n in _all_but_the_smallest(parameters) if _is_little(parameters[n])]

    @contextmanager
    def handing_to(self, take: Take) -> Iterator[None]:
        """Within, backward passes hand over names and parameters as soon as their `.grad` has all
        that the pass adds to it.
        """
        if not self._handles:
            for name in self.names:
                self._handles.append(
                    self._parameters[name].register_post_accumulate_grad_hook(
                        partial(self._hear, name)
                    )
                )
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hear(self, name: str, parameter: Tensor) -> None:
        if self._take is not None:
            self._take(name, parameter)


@dataclass(frozen=True)
class Forces:
    """What the data do not give of a gradient: λ d, and ν p where the nudge pulls with a constant
    force p.

    Attributes:
        lam: λ of each parameter, 0-d or of its shape.
        pull: p, `(1, ...)` each.
        nu: ν.
        common: λ, where there is one number for all.
    """

    lam: Params
    pull: Params | None
    nu: float
    common: float | None = None

    @classmethod
    def made(cls, term: Diagonal, pull: Params | None, nu: float) -> Forces:
        """Those of a proximal term and a force."""
        least = term.smallest_curvature
        one = least if isinstance(least, float) and term.common is not None else None
        return cls(term.lam, pull, nu, one)

    def of(self, name: str, like: Tensor) -> list[Tensor]:
        """λ and, where there is one, p of a parameter, in the shape of its gradient."""
        return [
            values[name].expand_as(like) for values in (self.lam, self.pull) if values is not None
        ]

    def add(self, g: Tensor, d: Tensor, lam: Tensor, pull: Tensor | None = None) -> None:
        """g += λ d + ν p."""
        g.addcmul_(d, lam)
        if pull is not None:
            g.add_(pull, alpha=self.nu)

    def add_to_all(self, g: Params, d: Params) -> None:
        """The same for many small ones."""
        if self.common is None:
            for name, leaf in g.items():
                self.add(leaf, d[name], *self.of(name, leaf))
            return
        leaves = list(g.values())
        torch._foreach_add_(leaves, [d[n] for n in g], alpha=self.common)
        if self.pull is not None:
            torch._foreach_add_(leaves, [self.pull[n] for n in g], alpha=self.nu)


class Descent:
    """One step d ← d − α ∇g(d), for one row, while backward passes run at φ = θ + d.

    A gradient that comes in several parts (support and query set) is gone when the next part
    arrives. The norm of their sum is what d has moved by, divided by α: the module still holds the
    φ at which the step began, so the old d is φ − θ, up to the rounding of φ.

    Args:
        parameters: the module's own, holding φ.
        theta: θ.
        d: the displacement, `(1, ...)` each; overwritten.
        lr: α.
        forces: what the data do not give (proximal term, linear nudge).
        parts: how many backward passes there will be.

    Cost: the gradient by the parameter that autograd is at, and by those that nobody hands over.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        theta: Params,
        d: Params,
        lr: float,
        forces: Forces,
        *,
        parts: int,
    ) -> None:
        self._parameters = parameters
        self._theta = theta
        self._d = d
        self._lr = lr
        self._forces = forces
        self._parts = parts
        self._norms: dict[str, Tensor | None] = {}  # None where the motion will tell
        self._packed = d.packed if isinstance(d, PackedParams) else {}
        self._steps: dict[str, Step] = {}  # of what is packed
        self._most = 1

    def pack(self, names: Iterable[str]) -> None:
        """Hold only remainders of these displacements until the gradients are there, whose memory
        the new displacements take.

        For a single backward pass, and parameters that hold φ = θ + d from now until it is through.
        """
        assert self._parts == 1
        parameters = self._parameters.values()
        least = 1 if all(p.device.type == "cpu" for p in parameters) else _LEAST
        self._most = max(least, int(_PIECE * sum(p.numel() for p in parameters)))
        for name in names:
            if name in self._packed:
                continue
            at = self._parameters[name].data.unsqueeze(0), self._theta[name].unsqueeze(0)
            self._d[name] = remainder(*at, self._d[name], most=self._most)

    def take(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient, or one more part of it, and step."""
        g = parameter.grad
        if g is None:  # a hook of the user's was here before
            return
        parameter.grad = None
        if name in self._packed:
            self._descend(name, g)
        elif name in self._norms:
            self._norms[name] = None
            self._d[name].add_(g, alpha=-self._lr)
        else:
            self._norms[name] = self._step(name, g.unsqueeze(0))

    def gather(self, names: Iterable[str]) -> None:
        """After a backward pass: step with what has waited for its end, all at once."""
        parts = {n: row(take_gradient(self._parameters[n])) for n in names}
        if not parts:
            return
        if parts.keys() <= self._norms.keys():
            self._norms |= dict.fromkeys(parts)
        else:
            self._forces.add_to_all(parts, self._d)
            alone = (
                torch._foreach_norm([*parts.values()]) if self._parts == 1 else [None] * len(parts)
            )
            self._norms |= dict(zip(parts, alone, strict=True))
        torch._foreach_add_([self._d[n] for n in parts], [*parts.values()], alpha=-self._lr)

    def finish(self) -> Tensor:
        """Step where nothing was handed over, too; ‖∇g‖ at the old d, `(1,)`. What the parameters
        hold then means nothing.
        """
        for name in [n for n in self._d if n not in self._norms and n not in self._steps]:
            if name in self._packed:
                self._descend(name, take_gradient(self._parameters[name]))
            elif self._d[name].dtype == torch.int8:
                self._norms[name] = self._step(name, row(take_gradient(self._parameters[name])))
        if steps := self._steps:
            found = Step.norms(list(steps.values()))
            self._norms |= dict(zip(steps, found.unbind(), strict=True))
        rest = {
            n: row(take_gradient(p)) for n, p in self._parameters.items() if n not in self._norms
        }
        norms = {name: norm for name, norm in self._norms.items() if norm is not None}
        norms |= self._motions([name for name, norm in self._norms.items() if norm is None])
        if rest:
            self._forces.add_to_all(rest, self._d)
            leaves = list(rest.values())
            norms |= dict(zip(rest, torch._foreach_norm(leaves), strict=True))
            torch._foreach_add_([self._d[n] for n in rest], leaves, alpha=-self._lr)
        return joined(norms).reshape(1)

    def _descend(self, name: str, g: Tensor) -> None:
        """Step where displacements are packed."""
        if self._forces.pull is not None:
            g = torch.add(g, self._forces.pull[name][0], alpha=self._forces.nu)
        self._steps.setdefault(name, Step()).take(
            self._packed[name], g, self._lr, self._forces.lam[name], last=self._parts == 1
        )

    def _step(self, name: str, g: Tensor) -> Tensor | None:
        """Step with the first part of a parameter's gradient, which is overwritten; its norm if it
        is the only part.
        """
        d, forces = self._d[name], self._forces.of(name, g)
        if d.dtype == torch.int8:
            return self._unpack(name, g, d, forces)
        self._forces.add(g, d, *forces)
        d.add_(g, alpha=-self._lr)
        return torch.linalg.vector_norm(g) if self._parts == 1 else None

    def _unpack(self, name: str, g: Tensor, lost: Tensor, forces: list[Tensor]) -> Tensor:
        """Step from a displacement that was packed, piece by piece, and put the new one into g."""
        phi, theta = self._parameters[name].data.unsqueeze(0), self._theta[name].unsqueeze(0)
        norms = []
        for step, *at in pieces(g, phi, theta, lost, *forces, most=self._most):
            d = recovered(*at[:3])
            self._forces.add(step, d, *at[3:])
            norms.append(torch.linalg.vector_norm(step))
            torch.add(d, step, alpha=-self._lr, out=step)
            del d  # or it would still be alive while the next one is made
        self._d[name] = g
        return torch.linalg.vector_norm(torch.stack(norms))

    def _motions(self, names: list[str]) -> Params:
        """‖φ − θ − d‖ / α of these parameters; overwrites φ, which saves a copy."""
        if not names:
            return {}
        phi = [self._parameters[n].data for n in names]
        torch._foreach_sub_(phi, [self._theta[n] for n in names])
        torch._foreach_sub_(phi, [self._d[n][0] for n in names])
        motions = list(torch._foreach_norm(phi))
        torch._foreach_mul_(motions, 1 / self._lr)
        return dict(zip(names, motions, strict=True))


def take_gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient, taken out of it; zeros where there is none."""
    g = gradient_of(parameter)
    if g is None:
        return torch.zeros_like(local(parameter), requires_grad=False)
    parameter.grad = None
    return g


def row(g: Tensor) -> Tensor:
    """A gradient with a row axis, in the dtype of displacements."""
    return (g if g.dtype.itemsize >= 4 else g.float()).unsqueeze(0)


def _is_little(parameter: Tensor) -> bool:
    return parameter.device.type != "cpu" and parameter.numel() < _LEAST


def _all_but_the_smallest(parameters: Mapping[str, Tensor]) -> list[str]:
    sizes = {
        n: p.numel() for n, p in parameters.items() if p.dtype.itemsize >= 4 and not is_spread(p)
    }
    left = _LEFT * sum(sizes.values())
    for name in sorted(sizes, key=sizes.__getitem__):
        left -= sizes[name]
        if left < 0:
            break
        del sizes[name]
    return sorted(sizes, key=sizes.__getitem__)


def remainder(phi: Tensor, theta: Tensor, d: Tensor, *, most: int) -> Tensor:
    """What rounding φ = θ + d has lost of d, in int8; of φ, θ and d `most` entries are worked on at
    a time.

    Example:
        >>> theta, d = torch.tensor([1000.0]), torch.tensor([1.0001])
        >>> phi = theta + d
        >>> lost = remainder(phi, theta, d, most=1)
        >>> [round(float(x), 6) for x in (d, phi - theta, recovered(phi, theta, lost))]
        [1.0001, 1.000122, 1.0001]
    """
    lost = torch.empty_like(phi, dtype=torch.int8)
    unit = torch.finfo(phi.dtype).eps / (2 * _MOST)
    for part, at, centre, moved in pieces(lost, phi, theta, d, most=most):
        # Where φ is 0 this is 0/0, and whatever int8 makes of that is multiplied by φ again.
        part.copy_(
            torch.sub(at, centre)
            .sub_(moved)
            .div_(at)
            .mul_(-1 / unit)
            .round_()
            .clamp_(-_MOST, _MOST)
        )
    return lost


def recovered(phi: Tensor, theta: Tensor, lost: Tensor) -> Tensor:
    """d, from φ and θ as they were for `remainder`."""
    return torch.sub(phi, theta).addcmul_(phi, lost, value=torch.finfo(phi.dtype).eps / (2 * _MOST))


def pieces(*leaves: Tensor, most: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of about `most` entries at most, cut alike out of tensors of one shape, along its
    longest axis.

    Example:
        >>> [tuple(piece.shape) for (piece,) in pieces(torch.zeros(2, 5), most=4)]
        [(2, 2), (2, 2), (2, 1)]
    """
    shape = leaves[0].shape
    if leaves[0].numel() <= most:
        return iter([leaves])
    axis = max(range(len(shape)), key=shape.__getitem__)
    length = max(1, most * shape[axis] // max(1, leaves[0].numel()))
    return zip(*(leaf.split(length, axis) for leaf in leaves), strict=True)
