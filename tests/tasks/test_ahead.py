"""`Ahead`: what is drawn ahead is what is asked for."""

from __future__ import annotations

import pytest
import torch

from metanudge.tasks import Sinusoid
from metanudge.tasks.ahead import Ahead


def test_batches_are_the_sources_own_whatever_was_drawn_ahead() -> None:
    source = Sinusoid(seed=3)
    ahead = Ahead(source, "val")
    asked = [
        (range(2), range(2, 4)),
        (range(2, 4), range(4, 6)),
        (range(9, 12), None),
        (range(4, 6), range(1)),
    ]
    for indices, then in asked:
        got, want = ahead.batch(indices, then=then), source.batch(indices, "val")
        assert torch.equal(got.stacks[0].query[0], want.stacks[0].query[0])
    ahead.close()


def test_an_error_in_the_thread_reaches_who_asks_for_that_batch() -> None:
    ahead = Ahead(Sinusoid())
    ahead.batch(range(2), then=range(-2, 0))
    with pytest.raises(ValueError, match="no episode -2"):
        ahead.batch(range(-2, 0))
    assert len(ahead.batch(range(2))) == 2
    ahead.close()
