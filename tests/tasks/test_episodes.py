"""What every source promises: an episode is a pure function of (seed, split, index)."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from conformance import rows_as_inputs, sources
from metanudge.task import Task
from metanudge.tasks import Episodes, Sinusoid

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
SOURCES = sources()


@pytest.fixture(params=SOURCES)
def source(request) -> Episodes:
    return SOURCES[request.param]()


def report() -> str:
    """One line per source and split, with a digest of some of its tasks."""
    lines = []
    for name, make in SOURCES.items():
        source = make()
        for split in ("train", "val", "test"):
            lines.append(f"{name} {split} {digest(source.batch(range(100, 108), split))}")
    return "\n".join(lines)


def equal(a: Task, b: Task) -> bool:
    leaves = [pytree.tree_leaves((t.support, t.query)) for t in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*leaves, strict=True))


def digest(tasks) -> str:
    result = hashlib.sha256()
    for task in tasks:
        for leaf in pytree.tree_leaves((task.support, task.query)):
            result.update(leaf.contiguous().numpy().tobytes())
    return result.hexdigest()


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import metanudge.models, metanudge.tasks
assert not {"PIL", "pooch", "matplotlib"} & set(sys.modules), "loaded before they are needed"
from test_episodes import report
print(report())
"""


def test_fresh_processes_see_the_same_stream():
    def start(hash_seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, str(SRC), str(HERE), str(HERE.parent)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    processes = [start("1"), start("2")]
    here = report() + "\n"
    assert [process.communicate()[0] for process in processes] == [here, here]


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (30, [1016, 296, 896, 569, 1089, 809, 143, 783, 903, 248, 568, 888, 413, 1013, 373]),
        (
            200,
            [
                5856,
                1816,
                4616,
                2609,
                5009,
                6689,
                1863,
                2663,
                663,
                1088,
                1688,
                6168,
                5973,
                1933,
                5733,
            ],
        ),
    ],
    ids=["shuffle", "Floyd"],
)
def test_the_stream_stays_what_it_was(each, expected):
    # Other draws change every seeded result that anyone has published: a reason for a major
    # release, never an accident.
    assert rows_as_inputs(each=each).task(12345, "test").support[0].flatten().tolist() == expected


def test_batch_size_and_order_do_not_matter(source):
    one_by_one = [source.task(i) for i in range(12)]
    for size in (1, 3, 4, 12):
        together = [task for tasks in source.batches(size=size, count=12 // size) for task in tasks]
        assert all(equal(a, b) for a, b in zip(one_by_one, together, strict=True))
    shuffled = source.batch([7, 2, 2, 11])
    assert all(equal(shuffled[row], one_by_one[i]) for row, i in enumerate([7, 2, 2, 11]))


def test_a_resumed_stream_goes_on_where_it_stopped(source):
    whole = list(source.batches(size=3, count=4))
    resumed = list(source.batches(size=3, count=2, start=2))
    endless = list(islice(source.batches(size=3, count=None, start=2), 2))
    for tasks in (resumed, endless):
        assert [digest(t) for t in tasks] == [digest(t) for t in whole[2:]]
    assert list(source.batches(count=0)) == []


def test_seeds_splits_and_indices_differ(source):
    other = copy.copy(source)
    other.seed = 1
    drawn = [
        digest([s.task(i, split)])
        for s in (source, other)
        for split in ("train", "val", "test")
        for i in range(20)
    ]
    assert len(set(drawn)) == len(drawn)


def test_global_random_state_is_neither_read_nor_changed(source):
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = digest(source.batch(range(3)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    torch.manual_seed(1)
    assert digest(source.batch(range(3))) == first


def test_moving_a_source_keeps_the_stream(source):
    moved = source.to("cpu")
    assert moved is not source
    assert equal(moved.task(4), source.task(4))
    away = source.to("meta")
    assert away.task(4).support[0].device.type == "meta"
    assert (source.device.type, away.device.type) == ("cpu", "meta")


@pytest.mark.parametrize("each", [30, 200], ids=["shuffle", "Floyd"])
def test_an_episode_holds_no_example_twice_and_one_class_per_label(each):
    source = rows_as_inputs(each=each)
    for task in source.batch(range(200)):
        (xs, ys), (xq, yq) = task.support, task.query
        rows = torch.cat([xs, xq]).flatten().tolist()
        assert len(set(rows)) == len(rows) == 35
        assert ys.dtype == torch.int64
        assert ys.tolist() == [label for label in range(5) for _ in range(3)]
        assert yq.tolist() == [label for label in range(5) for _ in range(4)]
        classes = {
            (label, row % 40) for label, row in zip(ys.tolist() + yq.tolist(), rows, strict=True)
        }
        assert len(classes) == 5
        assert len({c for _, c in classes}) == 5


def test_splits_share_no_class():
    source = rows_as_inputs()
    drawn = {
        split: {int(x) % 40 for task in source.batch(range(100), split) for x in task.support[0]}
        for split in ("train", "val", "test")
    }
    assert [len(drawn[split]) for split in drawn] == [26, 6, 8]
    assert len(set.union(*drawn.values())) == 40
    assert {split: set(map(str, classes)) for split, classes in drawn.items()} == {
        split: set(source.classes(split)) for split in ("train", "val", "test")
    }


@pytest.mark.parametrize("each", [30, 200], ids=["shuffle", "Floyd"])
def test_classes_and_examples_are_uniform_at_every_place(each):
    source = rows_as_inputs(each=each, splits=(1, 0, 0))
    rows = source.batch(range(6000)).stacks[0].support[0].view(6000, 5, 3)
    for values, cells in ((rows % 40, 40), (rows // 40, each)):
        for place in (values[:, 0, 0], values[:, 4, 2]):
            counts = torch.bincount(place, minlength=cells).double()
            excess = ((counts - 6000 / cells) ** 2 / (6000 / cells)).sum() - (cells - 1)
            assert abs(excess) < 4 * (2 * (cells - 1)) ** 0.5
    first, second = rows[:, 0, 0] % 40, rows[:, 1, 0] % 40
    pairs = torch.bincount(first * 40 + second, minlength=1600)[
        ~torch.eye(40, dtype=bool).flatten()
    ].double()
    expected = 6000 / pairs.numel()
    excess = ((pairs - expected) ** 2 / expected).sum() - (pairs.numel() - 1)
    assert abs(excess) < 4 * (2 * (pairs.numel() - 1)) ** 0.5


@pytest.mark.parametrize("name", ["ways", "shots", "queries"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "5"])
def test_counts_must_be_positive_integers(name, value):
    with pytest.raises(
        ValueError, match=rf"{name}={value!r} is not a positive integer.*at least one"
    ):
        rows_as_inputs(**{name: value})


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, None, True])
def test_seeds_must_be_64_bit_integers(seed):
    with pytest.raises(ValueError, match=r"cannot number a stream.*from 0 to"):
        Sinusoid(seed=seed)


def test_numpy_integers_are_integers():
    a, b = (Sinusoid(shots=kind(3), queries=kind(4), seed=kind(5)) for kind in (int, np.int64))
    assert equal(a.task(0), b.task(0))
    assert repr(a) == repr(b)


def test_the_largest_seed_works():
    assert Sinusoid(seed=2**64 - 1).task(2**62).num_support == 10


def test_an_integer_dtype_is_refused():
    with pytest.raises(ValueError, match=r"torch.int32 cannot hold the inputs.*floating"):
        Sinusoid(dtype=torch.int32)


@pytest.mark.parametrize(
    ("split", "near"), [("valid", "'val'"), ("validation", "'val'"), ("Train", "'train'")]
)
@pytest.mark.parametrize("ask", ["task", "batch", "batches", "classes"])
def test_an_unknown_split_names_the_near_one(split, near, ask):
    source = rows_as_inputs()
    calls = {
        "task": lambda: source.task(0, split),
        "batch": lambda: source.batch([0], split),
        "batches": lambda: source.batches(split=split),
        "classes": lambda: source.classes(split),
    }
    with pytest.raises(
        ValueError,
        match=rf"no split {split!r}. Did you mean {near}\? The splits are train, val, test",
    ):
        calls[ask]()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0 is not a positive integer"),
        ({"count": -1}, "count=-1 batches cannot be drawn"),
        ({"start": -1}, "start=-1 is before the first batch"),
    ],
)
def test_batches_checks_its_options_at_the_call(options, message):
    with pytest.raises(ValueError, match=message):
        Sinusoid().batches(**options)


@pytest.mark.parametrize("indices", [[], [[0, 1]], [0.5], ["a"]])
def test_indices_must_be_integers(indices):
    with pytest.raises(ValueError, match="non-empty sequence of integers"):
        Sinusoid().batch(indices)


def test_negative_indices_are_refused():
    with pytest.raises(ValueError, match="no episode -3"):
        Sinusoid().batch([0, -3])


def test_indices_may_be_arrays_tensors_and_generators():
    source = Sinusoid()
    expected = digest(source.batch([3, 1]))
    for indices in (
        np.array([3, 1]),
        torch.tensor([3, 1]),
        (i for i in (3, 1)),
        np.array([3, 1], dtype=np.uint8),
    ):
        assert digest(source.batch(indices)) == expected


class _Numbered(torch.utils.data.Dataset):
    """Episodes by number, as loader workers ask for them."""

    def __init__(self, source: Episodes) -> None:
        self.source = source

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.source.task(index).support[0]


def test_loader_workers_see_the_same_episodes():
    source = Sinusoid(shots=3, queries=2, seed=5)
    loader = torch.utils.data.DataLoader(_Numbered(source), batch_size=2, num_workers=2)
    assert torch.equal(
        torch.cat(list(loader)), torch.stack([source.task(i).support[0] for i in range(6)])
    )
