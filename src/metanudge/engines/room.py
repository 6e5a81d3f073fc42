"""How many solves fit side by side into a device's free memory, from what one of them keeps for its
backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from metanudge.engines.randomness import Draws
from metanudge.engines.undisturbed import tensors_kept
from metanudge.problem import Problem
from metanudge.solvers.trajectory import free_memory as free_memory
from metanudge.task import Batch, Task

_SHARE = 0.7  # of the free memory; the rest is for the optimizer, the caller and fragments
# memory in use at the height of a backward pass, as a multiple of what the forward pass kept
_KEPT = 2.0
# of the parameters: φ, displacement, gradient, force, update, and what is on its way between them
_COPIES = 8


def bytes_per_row(problem: Problem, task: Task, *, graphs: int = 0) -> int:
    """An estimate of the memory that one row takes; so many support gradients are held with the
    graph that made them.
    """
    support, query = (_kept_by(problem, batch) for batch in (task.support, task.query))
    parameters = sum(p.numel() * p.element_size() for p in problem.parameters.values())
    # A gradient with a graph behind it keeps about as much again for each of its two passes.
    return int(_KEPT * (support * max(1, 3 * graphs) + query)) + _COPIES * parameters


def rows_that_fit(per_row: int, free: int) -> int:
    """How many rows to hold at once, at least one.

    Example:
        >>> rows_that_fit(per_row=10, free=1000), rows_that_fit(per_row=10**6, free=1000)
        (70, 1)
    """
    return max(1, int(_SHARE * free) // max(1, per_row))


def _kept_by(problem: Problem, batch: Batch) -> int:
    """Bytes that a forward pass on a batch keeps for its backward pass, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in problem.objective.model.parameters()}
    alive: list[Tensor] = []  # or one tensor's address might be given to the next
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        """There is no backward pass: the graph need not keep what it would keep. Of a function that
        keeps its own result that would be a cycle, which is never freed.
        """
        alive.append(tensor)
        place = tensor.untyped_storage().data_ptr()
        if place not in known:
            kept[place] = max(kept.get(place, 0), tensor.numel() * tensor.element_size())

    watch = torch.autograd.graph.saved_tensors_hooks(note, lambda nothing: nothing)
    try:
        with (
            Draws(0, problem.device).preserved(),
            torch.enable_grad(),
            tensors_kept(problem.modules),
            watch,
        ):
            functional_call(problem.objective, problem.buffers(), (batch,))
    finally:
        alive.clear()  # they have the graph, which has `note`, which has them
    return sum(kept.values())
