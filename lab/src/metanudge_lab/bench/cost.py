"""What a meta-step must compute and move at least: a cost model layer by layer, and the roofline
bound that follows.

Only multiplications of the model count (convolutions, matrix products), as direct ones: a layer y =
a·b of F operations costs F forwards and F for the gradient of each operand that needs one. A
Hessian product, on top of a gradient at the same place, costs the tangent of each of these:
forwards ȧb + aḃ, backwards twice as many products again. The least traffic reads the operands and
writes the result of each multiplication once; everything between two multiplications
(normalisation, activations, pooling, parameter updates) is taken to be fused into them and free.
Each multiplication takes the longer of its arithmetic at the measured peak and its traffic at the
measured bandwidth.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from metanudge.training.device import Precision, computing_in
from metanudge_lab.bench.contender import Work
from metanudge_lab.bench.peaks import Peaks
from metanudge_lab.bench.workload import Workload


@dataclass(frozen=True)
class Product:
    """One kernel's work: operations and bytes."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Multiplication:
    """A multiplication of the model's forward pass, for one task.

    Attributes:
        name: operator and shapes.
        flops: of the forward pass.
        operands: bytes of each operand, and whether it needs a gradient.
        result: bytes of the result.
    """

    name: str
    flops: int
    operands: tuple[tuple[int, bool], ...]
    result: int

    def gradient(self) -> list[Product]:
        """Forward and backward: the same number of operations for the result and for each
        gradient.
        """
        everything = self.result + sum(size for size, _ in self.operands)
        return [Product(self.flops, everything)] * (1 + sum(needed for _, needed in self.operands))

    def hessian_product(self) -> list[Product]:
        """What a Hessian product adds to a gradient: the tangents of all of its products."""
        needed = [size for size, needs in self.operands if needs]
        total = self.result + sum(size for size, _ in self.operands)
        products = [Product(self.flops * len(needed), total + sum(needed))] if needed else []
        for place in range(len(needed)):
            moving = needed[:place] + needed[place + 1 :]
            # ġ·b + g·ḃ for the gradient of a: the tangent of g is always there, that of b where b
            # is differentiated.
            products.append(
                Product(self.flops * (1 + len(moving)), total + self.result + sum(moving))
            )
        return products


@dataclass(frozen=True)
class LeastCost:
    """Operations and bytes of something, and the least time it takes."""

    flops: float
    bytes: float
    seconds: float

    def __add__(self, other: LeastCost) -> LeastCost:
        return LeastCost(
            self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class CostModel:
    """The multiplications of one task's support and query set, and how many tasks there are."""

    support: tuple[Multiplication, ...]
    query: tuple[Multiplication, ...]
    tasks: int

    def parts(self, work: Work, peaks: Peaks) -> dict[str, LeastCost]:
        """LeastCost of every multiplication in a whole meta-step, by name."""
        parts: dict[str, LeastCost] = {}
        for layers, times in (
            (self.support, work.support_gradients),
            (self.query, work.query_gradients),
        ):
            for layer in layers:
                cost = self._cost(layer.gradient(), times, peaks)
                parts[layer.name] = parts.get(layer.name, LeastCost(0, 0, 0)) + cost
        for layer in self.support:
            cost = self._cost(layer.hessian_product(), work.hessian_products, peaks)
            parts[layer.name] = parts.get(layer.name, LeastCost(0, 0, 0)) + cost
        return parts

    def total(self, work: Work, peaks: Peaks) -> LeastCost:
        """LeastCost of a whole meta-step."""
        return sum(self.parts(work, peaks).values(), start=LeastCost(0, 0, 0))

    def _cost(self, products: list[Product], times: float, peaks: Peaks) -> LeastCost:
        cost = LeastCost(0, 0, 0)
        for product in products:
            flops, moved = self.tasks * product.flops, self.tasks * product.bytes
            seconds = max(flops / peaks.flops, moved / peaks.bytes_per_second(moved))
            cost += LeastCost(times * flops, times * moved, times * seconds)
        return cost


def cost_model(workload: Workload, name: Precision = "fp32") -> CostModel:
    """Count the multiplications of a workload's model on one task."""
    model = copy.deepcopy(workload.model)
    device = workload.device
    counted = []
    for x, y in (workload.support, workload.query):
        with computing_in(name, device), _Multiplications() as seen:
            workload.loss(model(x[0]), y[0])
        counted.append(tuple(seen.found))
    return CostModel(counted[0], counted[1], len(workload.tasks))


class _Multiplications(TorchDispatchMode):
    """Notes every operator that torch counts floating-point operations for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Multiplication] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            operands = [a for a in args if isinstance(a, Tensor) and a.ndim > 1]
            output = result if isinstance(result, Tensor) else result[0]
            shapes = " · ".join("×".join(map(str, a.shape)) for a in operands)
            self.found.append(
                Multiplication(
                    f"{func._overloadpacket.__name__} {shapes}",
                    int(count(*args, **kwargs, out_val=result)),
                    tuple((a.numel() * a.element_size(), a.requires_grad) for a in operands),
                    output.numel() * output.element_size(),
                )
            )
        return result
