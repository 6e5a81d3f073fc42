"""MAML by hand with `torch.func`: all tasks at once by `vmap`.

`vmap(grad(…))`, not `grad(vmap(…))`: the second derivatives of BatchNorm with affine parameters are
wrong in the latter.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender
from metanudge_lab.bench.rivals import counts
from metanudge_lab.bench.workload import Workload

Params = dict[str, Tensor]
MetaGradient = Callable[[Params, Tensor, Tensor, Tensor, Tensor], Params]


def model_and_theta(workload: Workload) -> tuple[nn.Module, Params]:
    """A model that `vmap` can work with (its BatchNorm layers keep no running statistics), and its
    parameters.
    """
    model = replace_all_batch_norm_modules_(workload.copy_model())
    return model, {name: p.detach() for name, p in model.named_parameters()}


def meta_gradient(workload: Workload, model: nn.Module, *, second_order: bool) -> MetaGradient:
    """The mean meta-gradient as a function of θ and the stacked support and query sets."""

    def loss(phi: Params, x: Tensor, y: Tensor) -> Tensor:
        return workload.loss(functional_call(model, phi, (x,)), y)

    def adapt(theta: Params, x: Tensor, y: Tensor) -> Params:
        phi = theta
        for _ in range(workload.steps):
            g = grad(loss)(phi, x, y)
            phi = {name: p - workload.lr * g[name] for name, p in phi.items()}
        return phi

    def query_loss(theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
        return loss(adapt(theta, sx, sy), qx, qy)

    def first_order(theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Params:
        return grad(loss)(adapt(theta, sx, sy), qx, qy)

    of_tasks = vmap(grad(query_loss) if second_order else first_order, in_dims=(None, 0, 0, 0, 0))

    def mean(theta: Params, *data: Tensor) -> Params:
        return {name: g.mean(0) for name, g in of_tasks(theta, *data).items()}

    return mean


def prepare(workload: Workload, *, second_order: bool) -> ReadyContender:
    """All tasks side by side."""
    model, theta = model_and_theta(workload)
    compute = meta_gradient(workload, model, second_order=second_order)
    data = (*workload.support, *workload.query)

    def step() -> Gradient:
        return compute(theta, *data)

    return ReadyContender(
        step, lambda: counts.maml(workload) if second_order else counts.fomaml(workload)
    )


CONTENDERS = (
    Contender(
        "vmap-maml",
        "MAML, torch.func vmap",
        "torch",
        "MAML",
        lambda w: prepare(w, second_order=True),
    ),
    Contender(
        "vmap-fomaml",
        "FO-MAML, torch.func vmap",
        "torch",
        "FO-MAML",
        lambda w: prepare(w, second_order=False),
    ),
)
