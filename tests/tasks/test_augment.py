"""Augmentation changes the support sets of training tasks, by numbers that follow from the episode
alone.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from metanudge.task import Task
from metanudge.tasks import Changes, Episodes, Given, Labelled, Sinusoid, Text

HERE = Path(__file__).parent


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


def pictures(**options: object) -> Labelled:
    x = np.random.default_rng(0).integers(0, 256, (60, 1, 6, 5), dtype=np.uint8)
    return Labelled(x, np.arange(60) % 12, ways=2, shots=2, queries=3, **options)  # type: ignore[arg-type]


def ragged() -> Given:
    tasks = [Task((torch.randn(n, 2), torch.randn(n, 1)), (torch.randn(4, 2), torch.randn(4, 1)))
             for n in (3, 5, 5, 3, 4, 5)]  # fmt: skip
    return Given(tasks, splits=(1.0, 0.0, 0.0))


def report() -> str:
    """A digest of augmented tasks."""
    source = pictures(augment=Changes(flip=True, shift=2, noise=0.1), augment_query=True)
    found = hashlib.sha256()
    for task in source.batch(range(20)):
        for x, _ in (task.support, task.query):
            found.update(x.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("make", [pictures, Sinusoid, ragged], ids=["pictures", "sines", "given"])
def test_only_what_is_asked_for_changes(make: object, query: bool) -> None:
    plain: Episodes = make()  # type: ignore[operator]
    source = plain.augmented(noisy, query=query)
    for mine, theirs in zip(source.batch(range(5)), plain.batch(range(5)), strict=True):
        assert torch.equal(mine.support[1], theirs.support[1])
        assert torch.equal(mine.query[1], theirs.query[1])
        assert not torch.equal(mine.support[0], theirs.support[0])
        assert torch.equal(mine.query[0], theirs.query[0]) is not query
        # the same function of other numbers
        assert (mine.support[0] - theirs.support[0]).unique().numel() > 1
    if make is not ragged:
        for split in ("val", "test"):
            one, other = source.task(2, split), plain.task(2, split)
            assert torch.equal(one.support[0], other.support[0])
            assert torch.equal(one.query[0], other.query[0])


@pytest.mark.parametrize("make", [pictures, ragged], ids=["pictures", "given"])
def test_a_task_is_the_same_in_every_batch(make: object) -> None:
    source = make().augmented(noisy, query=True)  # type: ignore[operator]
    torch.manual_seed(0)
    whole = source.batch(range(8))
    torch.manual_seed(1)
    for number in (5, 2, 7):
        alone = source.task(number)
        for part in ("support", "query"):
            assert torch.equal(getattr(alone, part)[0], getattr(whole[number], part)[0])
    assert not torch.equal(whole[1].support[0], source.task(2).support[0])
    other = source.batch([3, 3])
    assert torch.equal(other[0].support[0], other[1].support[0])


def test_another_process_changes_them_in_the_same_way() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import test_augment; print(test_augment.report())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(HERE), *sys.path],
        env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == report()


def test_support_and_query_are_changed_by_different_numbers() -> None:
    x = torch.zeros(60, 4)
    source = Labelled(
        x, np.arange(60) % 12, ways=2, shots=2, queries=2, augment=noisy, augment_query=True
    )
    task = source.task(0)
    assert not torch.equal(task.support[0], task.query[0])


def test_a_function_that_works_in_place_does_not_reach_the_data() -> None:
    source = ragged()
    before = [task.support[0].clone() for task in source.batch(range(6))]
    source.augmented(lambda x, _: x.zero_(), query=True).batch(range(6))
    after = [task.support[0] for task in source.batch(range(6))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_flips_and_shifts_are_what_they_are_called() -> None:
    """Against loops over pixels."""
    x = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    seen = set()
    for seed in range(60):
        drawn = torch.Generator().manual_seed(seed)
        flips = torch.rand(2, generator=drawn) < 0.5
        by = torch.randint(-2, 3, (2, 2, 1), generator=drawn)
        found = Changes(flip=True, shift=2)(x, torch.Generator().manual_seed(seed))
        for n in range(2):
            down, right = int(by[0, n]), int(by[1, n])
            seen.add((bool(flips[n]), down, right))
            one = x[n].flip(-1) if flips[n] else x[n]
            for row in range(4):
                for column in range(5):
                    r, c = min(max(row + down, 0), 3), min(max(column + right, 0), 4)
                    assert torch.equal(found[n, :, row, column], one[:, r, c])
    assert len(seen) > 40
    still = Changes()(x, torch.Generator())
    assert torch.equal(still, x)


@pytest.mark.parametrize(
    ("augment", "error", "message"),
    [
        ("flip", TypeError, "augment='flip' is no function"),
        (lambda x, g: x[:1], ValueError, r"made \(1, 1, 6, 5\) of torch.float32"),
        (lambda x, g: x.double(), ValueError, "of torch.float64 of inputs"),
        (lambda x, g: None, ValueError, "made NoneType of inputs"),
    ],
)
def test_what_is_no_augmentation(augment: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pictures(augment=augment).task(0)


def test_what_cannot_be_augmented() -> None:
    texts = Text(["a b", "c d", "e f"] * 6, ["x", "y", "z"] * 6, ways=2, shots=1, queries=1,
                 splits=(1.0, 0.0, 0.0), augment=noisy)  # fmt: skip
    with pytest.raises(TypeError, match="augment changes inputs that are tensors"):
        texts.task(0)
    with pytest.raises(ValueError, match="flip and shift are for pictures"):
        Sinusoid(augment=Changes(flip=True)).task(0)
    with pytest.raises(ValueError, match="shift=-1"):
        Changes(shift=-1)
