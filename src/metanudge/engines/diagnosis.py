"""Error messages for models that refuse their data or the stacked engine: which sub-module, why,
what to do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import functional_call

from metanudge.objective import LossError
from metanudge.problem import Problem
from metanudge.task import Batch, Task, describe


class StackingError(RuntimeError):
    """A model that runs on its own but not under `torch.func.vmap`."""


def where_it_fails(problem: Problem, run: Callable[[], object]) -> str | None:
    """Run again and name the innermost sub-module that is running when it fails; None when that
    cannot be told.
    """
    running: list[str] = []
    handles = []
    for name, module in problem.objective.model.named_modules():
        label = f"{name or 'the model itself'} ({type(module).__name__})"
        handles.append(
            module.register_forward_pre_hook(lambda *_, label=label: running.append(label))
        )
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with torch.no_grad():
            run()
    except Exception:
        return running[-1] if running else None
    finally:
        for handle in handles:
            handle.remove()
    return None


def model_refuses(problem: Problem, batch: Batch, which: str, error: Exception) -> Exception:
    """What to raise when model or loss fail on a batch as it is.

    Out of memory stays what it is, so that callers can halve their chunk.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return error
    objective = problem.objective_of(which)
    place = where_it_fails(problem, lambda: functional_call(objective, problem.buffers(), (batch,)))
    return ValueError(
        f"Model or loss failed on the {which} data of a task ({describe(batch)}):"
        f" {_first_line(error)}. It happened in {place or 'the loss, or after the model'}. Check"
        " that the tasks' shapes and dtypes are what the model and the loss expect."
    )


def cannot_stack(problem: Problem, run: Callable[[], object], error: Exception) -> StackingError:
    """What to raise when the model runs by itself but not on the stacked engine."""
    place = (
        where_it_fails(problem, run)
        or f"the model ({type(problem.objective.model).__name__}), in its backward pass"
    )
    return StackingError(
        f"The stacked engine runs many tasks through torch.func.vmap, and {place} does not support"
        f' it: {_first_line(error)}. Use engine="inplace", which needs nothing but loss.backward().'
    )


def diagnosed(
    problem: Problem, task: Task, run: Callable[[], object], error: Exception
) -> Exception:
    """What to raise when a stacked run fails: tell a model that refuses its data from one that
    cannot be stacked, which runs by itself.
    """
    buffers = problem.buffers()
    for which, batch in (("support", task.support), ("query", task.query)):
        try:
            with torch.no_grad():
                functional_call(problem.objective_of(which), buffers, (batch,))
        except LossError:
            raise
        except (RuntimeError, IndexError, ValueError, AssertionError) as alone:
            return model_refuses(problem, batch, which, alone)
    return error if isinstance(error, StackingError) else cannot_stack(problem, run, error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
