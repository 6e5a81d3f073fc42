"""What happens to every class: how often it is recognised, and what it is taken for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from metanudge.training.evaluation.report import ClassAccuracy, Mistake, TakenFor

_MOST = 4  # mistakes that are kept of a class, and classes that one is taken for


class ClassTally:
    """Hits and mistakes of every class, over all tasks.

    Example:
        >>> from torch import tensor
        >>> tally = ClassTally()
        >>> tally.add(0, tensor([0, 1, 1, 1]), tensor([0, 0, 1, 1]), ("cat", "dog"))
        >>> cat, dog = tally.classes
        >>> cat.accuracy, cat.taken_for, dog.accuracy
        (0.5, (TakenFor(name='dog', times=1, examples=2),), 1.0)
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._taken: dict[str, Counter[str]] = {}
        self._beside: dict[str, Counter[str]] = {}
        self._wrong: dict[str, list[Mistake]] = {}

    def add(
        self, task: int, predicted: Tensor | None, target: Tensor, names: Sequence[str] | None
    ) -> None:
        """Note the query examples of one task; without predictions (regression) nothing, and of a
        prediction −1 only that it is wrong.
        """
        if predicted is None:
            return

        def name(label: int) -> str:
            return names[label] if names and label < len(names) else f"label {label}"

        labels = Counter(target.tolist())
        for label, examples in labels.items():
            self._seen[name(label)] += examples
            others = {name(other): examples for other in labels if other != label}
            self._beside.setdefault(name(label), Counter()).update(others)
        for query, (label, found) in enumerate(
            zip(target.tolist(), predicted.tolist(), strict=True)
        ):
            if found == label:
                self._hits[name(label)] += 1
            elif found >= 0:
                self._taken.setdefault(name(label), Counter())[name(found)] += 1
                wrong = self._wrong.setdefault(name(label), [])
                if len(wrong) < _MOST:
                    wrong.append(Mistake(task, query, name(found)))

    @property
    def classes(self) -> tuple[ClassAccuracy, ...]:
        """Worst first."""
        found = [
            ClassAccuracy(
                name, self._hits[name] / count, count, self._others(name),
                tuple(self._wrong.get(name, ())),
            )
            for name, count in self._seen.items()
        ]  # fmt: skip
        return tuple(sorted(found, key=lambda c: (c.accuracy, c.name)))

    def _others(self, name: str) -> tuple[TakenFor, ...]:
        """What a class is taken for, most often first."""
        taken, beside = self._taken.get(name, Counter()), self._beside[name]
        ordered = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:_MOST]
        # an output beyond the classes of the task stands beside every example
        return tuple(
            TakenFor(other, times, beside[other] or self._seen[name]) for other, times in ordered
        )
