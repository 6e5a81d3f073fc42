"""Parameters that are spread over processes: `DTensor`s, as FSDP2 (`fully_shard`) and tensor
parallelism make them.

All state of ours (θ, displacements, λ, meta-gradients) is made of plain tensors, of the parts that
lie in this process; entry by entry nothing else is needed. What looks at all entries at once, inner
products and norms, asks the other ranks, so that every number which decides something is the same
on all of them. All ranks over which one model is spread work on the same task.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_Groups = tuple[Any, ...]


def _is(thing: object, home: str, kind: str) -> bool:
    """Whether it is of a class of torch; nothing can be before its module is loaded, and loading
    takes time.
    """
    known = getattr(sys.modules.get(home), kind, None)
    return known is not None and isinstance(thing, known)


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`."""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process, in the same memory; itself if it is not
    spread.
    """
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return part.detach()


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """What of a whole tensor belongs to this process's part of another one of its shape."""
    if value.ndim == 0 or not is_spread(like):
        return value
    return local(spread_like(value, like))


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which every rank has a part, spread like another one."""
    if not is_spread(like) or is_spread(part):
        return part
    return type(like.data).from_local(  # type: ignore[attr-defined]
        part,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has all of, spread like another one; whole beside one of another
    shape.
    """
    if not is_spread(like):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor  # loaded already

    mesh, alike = like.device_mesh, value.shape == like.shape  # type: ignore[attr-defined]
    places = like.placements if alike else [Replicate()] * mesh.ndim  # type: ignore[attr-defined]
    return distribute_tensor(value, mesh, places, src_data_rank=None)


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is spread, every rank must ask for it."""
    return tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This process's part of a parameter's `.grad`."""
    g = parameter.grad
    if g is not None and is_spread(g) and g.placements != parameter.placements:  # type: ignore[attr-defined]
        g = g.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return None if g is None else local(g)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules to which `fully_shard` was applied."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return [m for m in model.modules() if _is(m, "torch.distributed.fsdp", "FSDPModule")]


def reshard(modules: Iterable[Any]) -> None:
    """Forget gathered parameters: they are gathered anew by the next forward pass, from what is
    written to the shards by then.
    """
    for module in modules:
        module.reshard()


def at_rest(model: nn.Module) -> None:
    """Have the shards in the place of gathered parameters; where an error broke off a pass, FSDP
    believes to be still in it, and is told otherwise.
    """
    modules = sharded_modules(model)
    for module in modules:
        if module._get_fsdp_state()._training_state.name != "IDLE":
            # the root does it for all others; torch before 2.13 has no way
            with suppress(RuntimeError, AttributeError):
                module.reset_iter_state()
    reshard(modules)


class Spread:
    """Over which ranks a model is spread, and what they know together.

    Args:
        model: the whole of it, frozen parameters included.

    Attributes:
        modules: those to which `fully_shard` was applied.
        ranks: how many processes work on the same task.
        in_half: whether passes compute in 16 bits by FSDP's own policy.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = sharded_modules(model)
        policies = [module._get_fsdp_state()._mp_policy for module in self.modules]
        dtypes = [policy.param_dtype for policy in policies if policy.param_dtype is not None]
        self.in_half = any(dtype.itemsize < 4 for dtype in dtypes)
        self._holders: dict[str, _Groups] = {}
        groups: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            if is_spread(parameter):
                mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
                own = [mesh.get_group(axis) for axis in range(mesh.ndim)]
                groups |= {group.group_name: group for group in own}
                self._holders[name] = tuple(
                    g for g, at in zip(own, placements, strict=True) if not at.is_replicate()
                )
                if self.modules and placements[0].is_replicate():
                    raise TypeError(
                        f"{name} is sharded over one dimension of a mesh and copied over another"
                        " (HSDP), which would average the inner gradients of different tasks. Shard"
                        " over one dimension, fully_shard(model, mesh=mesh['shards']), and split"
                        " the tasks over the other: learner.backward(tasks, over=mesh['tasks'])."
                    )
        self._groups = tuple(groups.values())
        self.ranks = 1
        for group in self._groups:
            self.ranks *= group.size()

    @classmethod
    def of(cls, model: nn.Module) -> Spread | None:
        """That of a model; None where all of it lies in this process."""
        found = any(is_spread(p) for p in model.parameters()) or sharded_modules(model)
        return cls(model) if found else None

    def sum(self, values: Mapping[str, Tensor]) -> Tensor:
        """Σ of one value for each parameter (or the part of it that is here) over all parameters
        and all their parts.
        """
        parts: dict[_Groups, list[Tensor]] = {}
        for name, value in values.items():
            parts.setdefault(self._holders.get(name, ()), []).append(value)
        sums = []
        for groups, leaves in parts.items():
            sums.append(torch.stack(leaves).sum(0))
            for group in groups:
                dist.all_reduce(sums[-1], group=group)
        return torch.stack(sums).sum(0)

    def largest(self, value: Tensor) -> Tensor:
        """The largest value of any rank."""
        for group in self._groups:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """A number that every rank has computed for itself, the same on all: their mean."""
        if is_spread(value):
            value = value.full_tensor()  # type: ignore[attr-defined]
        total = value.double()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return (total / self.ranks).to(value.dtype)

    def check(self, batch: Iterable[Tensor], seed: int) -> None:
        """Raise on every rank where ranks have different tasks or seeds, or inner gradients would
        be wrong by a factor.
        """
        for module in self.modules:
            _check_reduction(module)
        sums = torch.stack([tensor.double().nan_to_num().sum() for tensor in batch])
        own = torch.cat([sums, sums.new_tensor([float(seed)])])
        if not torch.equal(self.largest(own.clone()), -self.largest(-own)):
            raise ValueError(
                f"The {self.ranks} ranks over which the model is sharded were given different tasks"
                " or seeds. They compute one meta-gradient together: give all of them the same"
                " tasks, and split a meta-batch with learner.backward(tasks, over=mesh['tasks'])."
            )


def _check_reduction(module: Any) -> None:
    """Inner gradients are equal on all ranks, and their mean is wanted."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
        name = type(module).__name__.removeprefix("FSDP")
        factor, ranks = group.gradient_divide_factor, group.mesh_info.shard_mesh_size
        if factor not in (None, float(ranks)):
            raise ValueError(
                f"set_gradient_divide_factor({factor:g}) was called on the sharded {name}: all"
                f" {ranks} ranks have the same inner gradients, which would come out"
                f" {ranks / factor:g} times too large. Leave it out, or set it to {ranks}."
            )
        if not group.reduce_grads:
            raise ValueError(
                f"set_requires_gradient_sync(False) was called on the sharded {name}, so that inner"
                " steps would get no gradients. Set it to True: learner.backward adds up in .grad"
                " as it is."
            )


_present: ContextVar[Spread | None] = ContextVar("spread", default=None)


def present() -> Spread | None:
    """Over which ranks the parameters are spread that are worked on now."""
    return _present.get()


def agreed(value: Tensor) -> Tensor:
    """A number that each rank has computed for itself, the same on all of them."""
    spread = present()
    return value if spread is None else spread.mean(value)


@contextmanager
def spread_over(spread: Spread | None) -> Iterator[None]:
    """Within, norms and inner products of dicts of parameters are those of all ranks' parts."""
    token = _present.set(spread)
    try:
        yield
    finally:
        _present.reset(token)
