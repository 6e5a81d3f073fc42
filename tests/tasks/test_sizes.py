"""Tasks of many sizes: how many ways and shots an episode has is a function of (seed, split,
index), and the task is the one that a source of that size alone would have drawn.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.utils import _pytree as pytree

from conformance import rows_as_inputs
from metanudge.task import Task
from metanudge.tasks import Labelled, Sinusoid, Text, with_support
from metanudge.tasks.episodes import Episodes


def _size(task: Task) -> tuple[int, int]:
    ways = int(task.support[1].max()) + 1
    assert sorted(set(task.query[1].tolist())) == list(range(ways))
    return ways, task.num_support // ways


def _equal(a: Task, b: Task) -> bool:
    ours, theirs = (pytree.tree_leaves((t.support, t.query)) for t in (a, b))
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_each_task_is_that_of_a_source_of_its_size() -> None:
    source = rows_as_inputs(ways=(2, 6), shots=(1, 4), alike=3)
    tasks = source.batch(range(60), "val")
    names = source.episode_classes(range(60), "val")
    sizes = [_size(task) for task in tasks]
    assert len(set(sizes)) > 10
    for index, (ways, shots) in enumerate(sizes):
        alone = rows_as_inputs(ways=ways, shots=shots)
        assert _equal(tasks[index], alone.task(index, "val"))
        assert names[index : index + 1] == alone.episode_classes([index], "val")
        assert (source.episode_rows([index], "val") == alone.episode_rows([index], "val")).all()
        assert sizes[index] == sizes[index // 3 * 3]  # of its meta-batch


def test_the_sizes_stay_what_they_were() -> None:
    # other draws change every seeded run with varying sizes
    source = rows_as_inputs(ways=(2, 6), shots=(1, 4), alike=1)
    assert [_size(task) for task in source.batch(range(8))] == [
        (5, 1),
        (6, 4),
        (6, 4),
        (2, 2),
        (2, 2),
        (6, 2),
        (2, 1),
        (3, 2),
    ]


def test_a_meta_batch_stacks_and_its_parts_are_of_its_size() -> None:
    source = rows_as_inputs(ways=(2, 6), shots=(1, 4), alike=8)
    for batch in source.batches(size=8, count=10):
        assert len(batch.stacks) == 1
    whole = source.batch(range(16, 24))
    for own in (range(16, 19), range(19, 24)):  # as two ranks share it
        for row, index in enumerate(own):
            assert _equal(source.batch(own)[row], whole[index - 16])
    assert len(source.batch(range(4, 12)).stacks) == 2


def test_every_size_is_as_likely_as_every_other() -> None:
    source = rows_as_inputs(ways=(2, 4), shots=(1, 2), alike=1)
    count = 900
    found = Counter(map(_size, source.batch(range(count))))
    assert set(found) == {(ways, shots) for ways in (2, 3, 4) for shots in (1, 2)}
    spread = math.sqrt(count * (1 / 6) * (5 / 6))
    assert all(abs(n - count / 6) < 5 * spread for n in found.values())


def test_splits_and_seeds_have_sizes_of_their_own() -> None:
    streams = [
        [_size(t) for t in rows_as_inputs(ways=(2, 6), shots=(1, 4), alike=1, seed=seed).batch(
            range(40), split)]
        for seed, split in ((0, "train"), (1, "train"), (0, "val"), (0, "test"))
    ]  # fmt: skip
    assert len({tuple(stream) for stream in streams}) == 4


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_source_carries_the_support_set(split: str) -> None:
    plain: Episodes = rows_as_inputs(ways=(2, 4))
    carried = plain.with_support().batch(range(40), split)  # type: ignore[arg-type]
    again = with_support(plain.batch(range(40), split))  # type: ignore[arg-type]
    assert all(_equal(a, b) for a, b in zip(carried, again, strict=True))
    assert len(plain.task(0).support) == 2


def test_other_sources_take_ranges() -> None:
    points = Sinusoid(shots=(2, 9), alike=1).batch(range(30))
    assert len({task.num_support for task in points}) > 4
    texts = [f"{word} {i}" for word in ("ant", "bee", "cat") for i in range(4)]
    source = Text(
        texts, [t[:3] for t in texts], ways=(2, 3), shots=1, queries=2, splits=(1.0, 0.0, 0.0),
        alike=1,
    )  # fmt: skip
    assert {_size(task)[0] for task in source.batch(range(20))} == {2, 3}
    assert source.sizes() == "2-3-way 1-shot, 2 queries"
    assert "ways=2-3, shots=1" in repr(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": (10, 3)}, r"ways=\(10, 3\) runs backwards. Give the least first: \(3, 10\)"),
        ({"ways": (0, 5)}, "ways=0 is not a positive integer"),
        ({"ways": (1, 5)}, r"ways=\(1, 5\) makes tasks of one class"),
        ({"ways": (2, 41)}, "26 classes, but ways=41"),
        ({"shots": (1, 2, 3)}, r"shots=\(1, 2, 3\) is not a positive integer"),
        ({"shots": (1, 27)}, "have 30|has 30 examples, but shots=27 and queries=4 need 31"),
        ({"shots": (2.0, 3)}, "shots=2.0 is not"),
        ({"alike": 0}, "alike=0 is not"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_as_inputs(**options)


def test_regression_has_no_prototypes() -> None:
    with pytest.raises(ValueError, match="regression, but prototypes are means"):
        Sinusoid().with_support()


def test_small_classes_are_left_out_for_the_most_shots() -> None:
    y = [0] * 20 + [1] * 20 + [2] * 9
    source = Labelled(
        torch.arange(49), y, ways=2, shots=(1, 5), queries=5, drop_small=True, splits=(1, 0, 0)
    )
    assert source.classes("train") == ("0", "1")
