"""BatchNorm with the statistics of the batch, or with those of the support set, without touching
any running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metanudge.problem import Objective


def with_support_statistics(model: nn.Module, inputs: Any) -> nn.Module:
    """A copy of an adapted model in evaluation mode, its BatchNorm layers normalising with the
    statistics of the support set.

    This is the inductive protocol: what the copy says about an example does not depend on the other
    examples it is given.

    Args:
        model: an adapted model, as `MetaLearner.adapt` returns it.
        inputs: the inputs of the support set.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
        >>> frozen = with_support_statistics(net, x)
        >>> (bool(torch.allclose(frozen(x), net(x))),
        ...     bool(torch.allclose(frozen(x[:1]), frozen(x)[:1])))
        (True, True)
    """
    statistics = SupportStatistics(model)
    # knows the forms that inputs may have
    objective = Objective(statistics.model, nn.functional.cross_entropy)
    measured = statistics.measure(lambda: objective.output((inputs, None)))
    buffers = dict(statistics.model.named_buffers())
    with torch.no_grad():
        for name, value in measured.items():
            buffers[name].copy_(value)
    for norm in statistics.norms.values():
        norm.track_running_stats = True
    return statistics.model


class SupportStatistics:
    """A copy of a model that predicts in either BatchNorm protocol without touching any running
    statistics.

    Dropout is off in predictions. A layer that is in evaluation mode in the original is frozen and
    left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = {
            name
            for name, m in model.named_modules()
            if isinstance(m, _BatchNorm) and not m.training
        }
        self.model = copy.deepcopy(model).eval()
        self.norms = {
            n: m
            for n, m in self.model.named_modules()
            if isinstance(m, _BatchNorm) and n not in frozen
        }
        for norm in self.norms.values():
            norm.track_running_stats = (
                False  # in training mode: the batch's statistics, and no buffer is written
            )
            if norm.running_mean is None:
                like = next(iter(self.model.parameters()))
                norm.register_buffer("running_mean", like.new_zeros(norm.num_features))
                norm.register_buffer("running_var", like.new_ones(norm.num_features))

    @contextmanager
    def batch_statistics(self) -> Iterator[None]:
        """BatchNorm normalises with the batch it is given."""
        for norm in self.norms.values():
            norm.training = True
        try:
            yield
        finally:
            for norm in self.norms.values():
                norm.training = False

    def measure(self, forward: Callable[[], Any]) -> dict[str, Tensor]:
        """Mean and variance that every BatchNorm layer sees in one forward pass, keyed like
        `state_dict`.

        The variance is the one the layer divides by (biased), so that evaluation mode reproduces
        the pass exactly.
        """
        measured: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                x: Tensor = inputs[0].detach()
                x = x.to(torch.promote_types(x.dtype, torch.float32))  # activations may be bf16
                axes = [axis for axis in range(x.ndim) if axis != 1]
                measured[f"{name}.running_mean"] = x.mean(axes)
                measured[f"{name}.running_var"] = x.var(axes, unbiased=False)

            return note

        handles = [norm.register_forward_pre_hook(hook(name)) for name, norm in self.norms.items()]
        try:
            with self.batch_statistics(), torch.no_grad():
                forward()
        finally:
            for handle in handles:
                handle.remove()
        return measured
