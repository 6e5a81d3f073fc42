"""Query losses and outputs of adapted parameters, one task or many at once; BatchNorm with the
statistics of the batch or of the support set, without touching any running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from metanudge.engines.undisturbed import uninterrupted
from metanudge.learner import MetaLearner
from metanudge.objective import Objective
from metanudge.params import Params
from metanudge.task import Batch, Task, TaskBatch
from metanudge.training.evaluation.report import BatchNormProtocol


class Predictor:
    """Query loss and output of one task at φ, in every protocol that applies to the model."""

    PREFIX = "objective.model."

    def __init__(self, learner: MetaLearner) -> None:
        self._statistics = SupportStatistics(learner.model)
        self._outputs = Outputs(Objective(self._statistics.model, learner.loss)).eval()
        self._loss = learner.loss
        self._cannot_stack = False
        self.protocols: tuple[BatchNormProtocol | None, ...] = (
            ("transductive", "inductive") if self._statistics.norms else (None,)
        )

    def task(self, phi: Params, support: Batch, query: Batch) -> list[tuple[Tensor, Tensor]]:
        """(loss, output) per protocol; works inside `vmap` and outside."""
        parameters = {self.PREFIX + n: leaf for n, leaf in phi.items()}
        found = []
        if None not in self.protocols:
            with self._statistics.batch_statistics():
                found.append(functional_call(self._outputs, parameters, (query,)))
            measured = self._statistics.measure(
                lambda: functional_call(self._outputs, parameters, (support,))
            )
            parameters |= {self.PREFIX + n: leaf for n, leaf in measured.items()}
        found.append(functional_call(self._outputs, parameters, (query,)))
        return [(self._loss(output, query[1]), output) for output in found]

    def group(
        self, phi: Params, tasks: Sequence[Task], *, stacked: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """The same for tasks of equal shape; every tensor has a leading task axis."""
        with uninterrupted(), torch.no_grad():
            if stacked and len(tasks) > 1 and not self._cannot_stack:
                (stack,) = TaskBatch.of(tasks).stacks
                try:
                    return vmap(self.task, randomness="same")(phi, stack.support, stack.query)
                except RuntimeError:
                    self._cannot_stack = (
                        True  # the loop below gives the same numbers, or a better error
                    )
            each = [
                self.task({n: leaf[r] for n, leaf in phi.items()}, t.support, t.query)
                for r, t in enumerate(tasks)
            ]
        columns = zip(*each, strict=True)
        return [
            (torch.stack([c[0] for c in column]), torch.stack([c[1] for c in column]))
            for column in columns
        ]


class Outputs(nn.Module):
    """Batch in, model output out, for whatever form of inputs `Objective` knows."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: Batch) -> Any:
        """The model's output."""
        return self.objective.output(batch)[0]


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
