"""`Task` and `TaskBatch`: the support and query data that the inner and the outer problem are made
of.

A *batch* is any pytree (tensor, tuple, list, mapping, nested) whose tensors share their leading
axis, the examples. The usual batch is a pair `(inputs, targets)`. This module knows torch and
nothing of the rest of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Batch = Any
"""A pytree of tensors that share their leading axis (the examples)."""


class QueryInputs(NamedTuple):
    """Inputs of a query set that come with the support set; the examples are those of `x`."""

    x_support: Batch
    y_support: Tensor
    x: Batch


def own_inputs(inputs: Batch) -> Batch:
    """Inputs without the support set that they may carry."""
    if isinstance(inputs, QueryInputs):
        return inputs.x
    return inputs[0] if isinstance(inputs, tuple) else inputs


def plain(batch: Batch) -> Batch:
    """A batch with its mappings as dicts, whatever their class (a tokenizer's `BatchEncoding`)."""
    if isinstance(batch, Mapping):
        return {name: plain(part) for name, part in batch.items()}
    return type(batch)(map(plain, batch)) if type(batch) in (tuple, list) else batch


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in pytree order."""
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def describe(batch: Batch) -> str:
    """Shapes and dtypes of a batch in one line, for error messages."""
    shapes = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors(batch)]
    return ", ".join(shapes) or "no tensors"


def kind_of(value: object) -> str:
    """What a function has returned in place of a scalar tensor, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def num_examples(batch: Batch, *, axis: int = 0, what: str = "batch") -> int:
    """How many examples a batch holds; raises `ValueError` when it is empty or its tensors
    disagree.
    """
    leaves = tensors(
        pytree.tree_map(
            lambda part: part.x if isinstance(part, QueryInputs) else part,
            batch,
            is_leaf=lambda part: isinstance(part, QueryInputs),
        )
    )
    if not leaves:
        raise ValueError(
            f"The {what} holds no tensor (got {type(batch).__name__}). "
            "Give a pair (inputs, targets), or any nested tuple or dict of tensors."
        )
    for leaf in leaves:
        if leaf.ndim <= axis:
            raise ValueError(
                f"The {what} holds a tensor of shape {tuple(leaf.shape)}, which has no axis {axis}"
                " for the examples. Every tensor needs its examples on the leading axis (after the"
                " task axis in a TaskBatch)."
            )
    sizes = {leaf.shape[axis] for leaf in leaves}
    if len(sizes) > 1:
        raise ValueError(
            f"The tensors of the {what} disagree on the number of examples: {describe(batch)}. "
            f"Axis {axis} counts the examples and must be the same for inputs and targets."
        )
    (size,) = sizes
    if size == 0:
        raise ValueError(
            f"The {what} is empty ({describe(batch)}). A task needs at least one support and one"
            " query example."
        )
    return size


def signature(batch: Batch) -> tuple[Any, ...]:
    """What two batches must share to be stacked: structure, shapes, dtypes and devices."""
    leaves, spec = pytree.tree_flatten(batch)
    parts = (
        (tuple(leaf.shape), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else ("constant", repr(leaf))
        for leaf in leaves
    )
    return str(spec), *parts


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Apply `function` to every tensor of a batch and leave the rest as it is."""
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _stack(batches: Sequence[Batch]) -> Batch:
    return pytree.tree_map(
        lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
        *batches,
    )


# Not frozen: Lightning casts a dataclass by setting the fields of a copy (`precision="bf16-true"`).
@dataclass(unsafe_hash=True)
class Task:
    """One task: the examples to adapt on and the examples to be judged on.

    Args:
        support: batch for the inner problem f̂, usually `(inputs, targets)`.
        query: batch for the outer problem f, of the same kind; its number of examples may differ.

    Example:
        >>> task = Task(support=(torch.zeros(5, 2), torch.zeros(5)),
        ...     query=(torch.zeros(9, 2), torch.zeros(9)))
        >>> task.num_support, task.num_query
        (5, 9)
    """

    support: Batch
    query: Batch

    def __post_init__(self) -> None:
        for name in ("support", "query"):
            batch = plain(getattr(self, name))
            num_examples(batch, what=f"{name} set")
            object.__setattr__(self, name, batch)

    @property
    def num_support(self) -> int:
        """Number of support examples."""
        return num_examples(self.support)

    @property
    def num_query(self) -> int:
        """Number of query examples."""
        return num_examples(self.query)

    def to(self, *args: Any, **kwargs: Any) -> Task:
        """Move (or cast the floating tensors of) the task like `Tensor.to`."""
        move = _mover(args, kwargs)
        return Task(map_tensors(move, self.support), map_tensors(move, self.query))


@dataclass(frozen=True)
class Stack:
    """Tasks of equal shape on one leading axis, and their places in the batch they come from."""

    places: tuple[int, ...]
    support: Batch  # every tensor (num_tasks, num_support, ...)
    query: Batch  # every tensor (num_tasks, num_query, ...)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: slice) -> Stack:
        return replace(self.mapped(lambda t: t[rows]), places=self.places[rows])

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What it shares with stacks of the same shape: see `signature`."""
        return signature(self.support), signature(self.query)

    def moved(self, first: int) -> Stack:
        """The same tasks as part of a larger batch in which this one begins at place `first`."""
        return replace(self, places=tuple(first + p for p in self.places)) if first else self

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Stack:
        """The same tasks with `function` applied to every tensor."""
        support, query = (map_tensors(function, part) for part in (self.support, self.query))
        return Stack(self.places, support, query)

    def task(self, row: int) -> Task:
        """One task of the stack (views, no copies)."""
        one = self.mapped(lambda t: t[row])
        return Task(one.support, one.query)


def _differentiable(stack: Stack) -> Stack:
    """The same, with copies of what was made in inference mode (Lightning's validation), through
    which no gradient passes.
    """
    if not any(leaf.is_inference() for leaf in tensors((stack.support, stack.query))):
        return stack
    with torch.inference_mode(False):
        return stack.mapped(torch.clone)


class TaskBatch(Sequence[Task]):
    """A meta-batch: tasks stacked on a leading axis; tasks of different shapes are allowed.

    Args:
        support: batch whose tensors have shape `(num_tasks, num_support, ...)`.
        query: batch whose tensors have shape `(num_tasks, num_query, ...)`.

    Or, as of any sequence, `TaskBatch(tasks)`. Tasks that differ in shape are put together with
    `TaskBatch.of`:

    Example:
        >>> a = Task((torch.zeros(5, 2), torch.zeros(5)), (torch.zeros(9, 2), torch.zeros(9)))
        >>> b = Task((torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(9, 2), torch.zeros(9)))
        >>> batch = TaskBatch.of([a, b, a])
        >>> len(batch), batch[1].num_support, [s.places for s in batch.stacks]
        (3, 3, [(0, 2), (1,)])
    """

    stacks: tuple[Stack, ...]

    def __init__(self, support: Batch | Iterable[Task], query: Batch | None = None) -> None:
        if query is None:
            self._set(TaskBatch.of(support).stacks)
            return
        support, query = plain(support), plain(query)
        for batch, what in ((support, "support set"), (query, "query set")):
            num_examples(batch, axis=1, what=what)
        counts = {leaf.shape[0] for leaf in tensors(support) + tensors(query)}
        if len(counts) > 1:
            raise ValueError(
                f"Support ({describe(support)}) and query ({describe(query)}) disagree on the"
                " number of tasks. The first axis of every tensor counts the tasks; to put tasks"
                " of different shapes together use TaskBatch.of."
            )
        (count,) = counts
        if count == 0:
            raise ValueError("The batch holds no task. Give at least one.")
        self._set([Stack(tuple(range(count)), support, query)])

    def _set(self, stacks: Iterable[Stack]) -> TaskBatch:
        self.stacks = tuple(map(_differentiable, stacks))
        self._where = {
            place: (stack, row) for stack in self.stacks for row, place in enumerate(stack.places)
        }
        return self

    @classmethod
    def of(cls, tasks: TaskBatch | Task | Iterable[Task]) -> TaskBatch:
        """A batch from tasks: those of equal shape are stacked, the others kept apart, the order
        remembered.
        """
        if isinstance(tasks, TaskBatch):
            return tasks
        items = list(tasks) if isinstance(tasks, Iterable) else [tasks]
        for item in items:
            if not isinstance(item, Task):
                raise TypeError(
                    f"Expected tasks, got {type(item).__name__}. Build them with"
                    " mn.Task(support=..., query=...) or stack tensors into"
                    " mn.TaskBatch(support=..., query=...)."
                )
        if not items:
            raise ValueError("The batch holds no task. Give at least one.")
        alike: dict[Any, list[int]] = {}
        for place, item in enumerate(items):
            alike.setdefault((signature(item.support), signature(item.query)), []).append(place)
        stacks = []
        for places in alike.values():
            support = _stack([items[place].support for place in places])
            query = _stack([items[place].query for place in places])
            stacks.append(Stack(tuple(places), support, query))
        return cls.__new__(cls)._set(stacks)

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskBatch: ...
    def __getitem__(self, index: int | slice) -> Task | TaskBatch:
        if isinstance(index, slice):
            return TaskBatch.of([self[i] for i in range(*index.indices(len(self)))])
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of a batch of {len(self)}")
        stack, row = self._where[index % len(self)]
        return stack.task(row)

    def __repr__(self) -> str:
        parts = []
        for stack in self.stacks:
            support, query = describe(stack.task(0).support), describe(stack.task(0).query)
            parts.append(f"{len(stack)} × support [{support}], query [{query}]")
        return f"TaskBatch({len(self)} tasks: {'; '.join(parts)})"

    @property
    def tensors(self) -> list[Tensor]:
        """Those of all tasks, stacked."""
        return [t for stack in self.stacks for t in tensors((stack.support, stack.query))]

    def to(self, *args: Any, **kwargs: Any) -> TaskBatch:
        """Move (or cast the floating tensors of) all tasks like `Tensor.to`."""
        return self.mapped(_mover(args, kwargs))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> TaskBatch:
        """The same tasks with `function` applied to every tensor."""
        return TaskBatch.__new__(TaskBatch)._set(stack.mapped(function) for stack in self.stacks)

    def rearranged(self, function: Callable[[Batch, Batch], tuple[Batch, Batch]]) -> TaskBatch:
        """The same tasks with support and query sets of another structure, which `function` makes
        of stacked ones.
        """
        return TaskBatch.__new__(TaskBatch)._set(
            Stack(stack.places, *function(stack.support, stack.query)) for stack in self.stacks
        )


def _mover(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """`Tensor.to` with these arguments, where a dtype applies to floating tensors only (labels stay
    integers).
    """
    dtypes = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)]
    if dtypes and not dtypes[0].is_floating_point:
        raise ValueError(
            f"Tasks can be cast to floating dtypes only, got {dtypes[0]}; integer labels stay as"
            " they are."
        )

    def move(tensor: Tensor) -> Tensor:
        if dtypes and not tensor.is_floating_point():
            rest = [a for a in args if not isinstance(a, torch.dtype)]
            options = {k: v for k, v in kwargs.items() if k != "dtype"}
            return tensor.to(*rest, **options) if rest or options else tensor
        return tensor.to(*args, **kwargs)

    return move
