"""A crash in the middle of a cell costs what came after its last checkpoint, and no number."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import metanudge as mn
from metanudge.models import MLP
from metanudge.tasks import Sinusoid
from metanudge_lab.experiments import fewshot, store
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row
from metanudge_lab.experiments.run import Options, run
from metanudge_lab.experiments.working import working_in
from toy_experiment import Config, toy

RECIPE = fewshot.Recipe(0.01, 0.05, 7, 2, cosine=True)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewshot, "CHECKPOINT_EVERY", 2)


def trained(*, crash_at: int | None = None, rows: list[Row]) -> tuple[fewshot.Trial, list[int]]:
    model = m.seeded(0, lambda: MLP(1, 1, hidden=(5,)), torch.device("cpu"))
    trial = fewshot.Trial(model, mn.FOBMAML(), Sinusoid(seed=0), regression=True)
    steps: list[int] = []

    def see(step: int, learner: mn.MetaLearner) -> None:
        steps.append(step)
        loss = learner.evaluate(trial.source.batch(range(3), "test")).mean_loss
        rows.append({"iteration": step, "loss": loss, "trained": trial.seconds > 0})
        if step == crash_at:
            raise KeyboardInterrupt

    trial.train(RECIPE, at=range(8), see=see, rows=rows)
    return trial, steps


def test_a_training_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    undisturbed: list[Row] = [{"kind": "before"}]
    expected, _ = trained(rows=undisturbed)
    folder = tmp_path / "cell"
    with pytest.raises(KeyboardInterrupt), working_in(folder):
        trained(crash_at=5, rows=[{"kind": "before"}])
    assert folder.is_dir()
    rows: list[Row] = [{"kind": "before"}]
    with working_in(folder):
        found, steps = trained(rows=rows)
        assert found.seconds > 0
    assert steps == [5, 6, 7], "after the checkpoint of step 4"
    assert rows == undisturbed
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not folder.exists()


def test_what_is_seen_and_not_kept_is_seen_again(tmp_path: Path) -> None:
    seen: list[int] = []
    model = m.seeded(0, lambda: MLP(1, 1, hidden=(5,)), torch.device("cpu"))
    trial = fewshot.Trial(model, mn.FOMAML(), Sinusoid(seed=0), regression=True)
    with working_in(tmp_path / "cell"):
        for _ in range(2):
            trial.train(RECIPE, at=(3,), see=lambda step, _: seen.append(step))
        short = dataclasses.replace(RECIPE, iterations=2)
        assert trial.train(short), "no longer than from one checkpoint to the next"
        assert not (tmp_path / "cell").exists()
    assert seen == [3, 3]


def test_a_cell_works_beside_its_rows_until_it_is_done(tmp_path: Path) -> None:
    options = Options(mode="quick", folder=tmp_path, device="cpu")
    config = Config.quick()
    cell = {"factor": 1.0, "seed": 0}
    place = store.working_folder(store.result_file(tmp_path, "toy", "quick"), config, cell)
    assert place.parent == tmp_path / "quick" / "toy.cells"
    assert place != store.working_folder(
        store.result_file(tmp_path, "toy", "quick"), Config(seeds=9), cell
    )

    def crash(_: object) -> None:
        place.mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(toy(crash), options)
    assert place.is_dir()
    seen: list[bool] = []
    run(
        toy(lambda _: seen.append(place.is_dir())),
        dataclasses.replace(options, pattern="factor=1.0 seed=0"),
    )
    assert seen == [True]
    assert not place.parent.exists()
    place.mkdir(parents=True)
    run(toy(), dataclasses.replace(options, restart=True))
    assert not place.parent.exists()
