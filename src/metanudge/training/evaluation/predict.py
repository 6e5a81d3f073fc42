"""Query losses and outputs of adapted parameters, one task or many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from metanudge.engines.undisturbed import uninterrupted
from metanudge.learner import MetaLearner
from metanudge.params import Params
from metanudge.problem import Objective
from metanudge.task import Batch, Task, TaskBatch
from metanudge.training.evaluation.batchnorm import SupportStatistics
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
