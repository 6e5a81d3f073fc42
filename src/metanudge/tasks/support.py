"""`with_support`: tasks whose batches carry the support set, for heads that are made from it."""

from __future__ import annotations

from metanudge.task import Batch, QueryInputs, TaskBatch, tensors


def with_support(tasks: TaskBatch, *, most: int = 64) -> TaskBatch:
    """Tasks of `(inputs, labels)` as `metanudge.models.Prototypes` takes them: support
    `((x_s, y_s), y_s)` and query `((x_s, y_s, x_q), y_q)`. No tensor is copied.

    Args:
        tasks: classification tasks; inputs may be mappings.
        most: of the head; more classes are refused.

    `source.with_support()` gives all tasks of a source in this way.

    Example:
        >>> from metanudge.tasks import MNIST1D
        >>> source = MNIST1D(ways=3, shots=2, queries=5, num_samples=2000, cache=False)
        >>> (x_s, y_s, x_q), y_q = with_support(source.batch(range(4)))[0].query
        >>> len(x_s), len(y_s), len(x_q), len(y_q)
        (6, 6, 15, 15)
    """

    for stack in tasks.stacks:
        for labels in tensors((stack.support[1], stack.query[1])):
            if labels.is_floating_point() or labels.is_complex():
                raise TypeError(
                    f"The targets are {labels.dtype}, but prototypes are means of classes. Give"
                    " class numbers; a regression needs a head of its own."
                )
            if int(labels.max()) >= most:
                raise ValueError(
                    f"A task has a class {int(labels.max())}, but the head has room for"
                    f" most={most}: 0 to {most - 1}. Build Prototypes and call with_support with a"
                    " larger most, or draw tasks of fewer ways."
                )
    return carrying(tasks)


def carrying(tasks: TaskBatch) -> TaskBatch:
    """The same for tasks whose labels are known to be good: nothing looks at their values."""

    def changed(support: Batch, query: Batch) -> tuple[Batch, Batch]:
        (x_s, y_s), (x_q, y_q) = support, query
        return ((x_s, y_s), y_s), (QueryInputs(x_s, y_s, x_q), y_q)

    return tasks.rearranged(changed)
