"""Error messages for models that refuse their data or the stacked engine: which sub-module, why,
what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from metanudge.objective import LossError
from metanudge.problem import Problem
from metanudge.task import Batch, Task, describe


class StackingError(RuntimeError):
    """A model that runs on its own but not under `torch.func.vmap`."""


@contextmanager
def innermost_module(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Put the name of the innermost sub-module that is running when an error flies into `found`."""
    running: list[str] = []
    handles = []
    for name, module in model.named_modules():
        label = f"{name or 'the model itself'} ({type(module).__name__})"
        handles.append(
            module.register_forward_pre_hook(lambda *_, label=label: running.append(label))
        )
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield
    except Exception:
        found.extend(running[-1:])
        raise
    finally:
        for handle in handles:
            handle.remove()


def where_it_fails(problem: Problem, run: Any) -> str | None:
    """Run again and name the sub-module in which it fails; None when that cannot be told."""
    found: list[str] = []
    try:
        with innermost_module(problem.objective.model, found), torch.no_grad():
            run()
    except Exception:
        return found[0] if found else None
    return None


def model_refuses(problem: Problem, batch: Batch, which: str, error: Exception) -> Exception:
    """What to raise when model or loss fail on a batch as it is.

    Out of memory stays what it is, so that callers can halve their chunk.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return error
    buffers = {f"model.{n}": b.detach().clone() for n, b in problem.objective.model.named_buffers()}
    objective = problem.objective_of(which)
    place = where_it_fails(problem, lambda: functional_call(objective, buffers, (batch,)))
    return ValueError(
        f"Model or loss failed on the {which} data of a task ({describe(batch)}):"
        f" {_first_line(error)}. It happened in {place or 'the loss, or after the model'}. Check"
        " that the tasks' shapes and dtypes are what the model and the loss expect."
    )


def cannot_stack(problem: Problem, run: Any, error: Exception) -> StackingError:
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
    buffers = {f"model.{n}": b.detach().clone() for n, b in problem.objective.model.named_buffers()}
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
