"""The store: which checkpoints it keeps and how it finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import is_sample, names, sample, saved
from metanudge.training.checkpoint import CheckpointError, CheckpointStore, load, save


def test_last_best_steps_and_pruning(tmp_path: Path) -> None:
    store = saved(tmp_path / "a" / "b", steps="1* 2 3* 4 5")
    assert names(store) == ["save-000003-step-3-best", "save-000004-step-4", "save-000005-step-5"]
    assert is_sample(store.load(), 5)
    assert is_sample(store.load("best"), 3)
    assert is_sample(store.load(4), 4)
    assert is_sample(store.load("save-000004-step-4"), 4)
    assert is_sample(CheckpointStore(store.root).load("best"), 3)
    store.save(6, **sample(6), best=True)
    assert names(store) == ["save-000005-step-5", "save-000006-step-6-best"]
    assert names(saved(tmp_path / "one", steps="1* 2 3", keep=1)) == [
        "save-000001-step-1-best",
        "save-000003-step-3",
    ]


def test_a_run_that_went_back_continues_from_its_newest_save(tmp_path: Path) -> None:
    store = saved(tmp_path, steps="10 20 30 15 20", keep=3)
    assert names(store) == ["save-000003-step-30", "save-000004-step-15", "save-000005-step-20"]
    assert store.load().folder.name == store.load(20).folder.name == "save-000005-step-20"


def test_unknown_names_list_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint 'last'.*none yet") as caught:
        CheckpointStore(tmp_path / "nothing").load()
    assert caught.value.alternative is None
    with pytest.raises(
        CheckpointError, match=r"no checkpoint 'best'.*: save-000001-step-2, save-000002-step-3"
    ) as caught:
        saved(tmp_path / "x", steps="2 3").load("best")
    assert caught.value.alternative == "save-000002-step-3"
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "absent")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep=0.*Try 2"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"step=-1"):
        CheckpointStore(tmp_path).save(-1, {}, {})
    with pytest.raises(TypeError):
        CheckpointStore(tmp_path).save(1.5, {}, {})  # type: ignore[arg-type]
    save(tmp_path / "one", step=0, tensors={}, state={})
    with pytest.raises(
        CheckpointError,
        match=r"one could not be written \(the folder exists already\).*another name",
    ):
        save(tmp_path / "one", step=1, tensors={}, state={})
    assert load(tmp_path / "one").step == 0
