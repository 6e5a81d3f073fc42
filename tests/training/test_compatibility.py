"""Runs of version 0.1, kept in tests/data/run-0.1: they evaluate, adapt and go on as that version
did.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from metanudge.training import runs, sources
from metanudge.training.checkpoint import CheckpointStore, save
from metanudge.training.errors import UserError
from metanudge.training.metrics import read_metrics
from metanudge.training.trainer import train
from metanudge.training.use import adapt
from metanudge.version import __version__
from training.test_trainer import Listener

KEPT = Path(__file__).parents[1] / "data" / "run-0.1"
DATA = {"csv": "points.csv", "images": "signs", "mnist1d": "mnist1d"}
EXPECTED = json.loads((KEPT / "expected.json").read_text())

# float32 (eps 6e-8) through 5 inner steps, a network of 3 to 6 layers and up to 2 meta-steps of
# Adam, whose first steps divide a gradient by its own size: a few hundred roundings, each amplified
# by at most about 10.
CLOSE = {"rel": 2e-4, "abs": 2e-5}


def moved(folder: Path, name: str) -> Path:
    """A copy of a kept run, which now finds its data here: written anew in config.json and in the
    copies that its checkpoints have.
    """
    run = shutil.copytree(KEPT / name, folder / name)
    if name == "mnist1d":
        return run
    (was,) = {json.loads((run / "config.json").read_text())["data"]}
    now = str(KEPT / DATA[name])
    (run / "config.json").write_text((run / "config.json").read_text().replace(was, now))
    for entry in CheckpointStore(run / "checkpoints").list():
        checkpoint = CheckpointStore(run / "checkpoints").load(entry.name)
        assert "version" not in checkpoint.state
        shutil.rmtree(entry.folder)
        state = checkpoint.state | {"config": checkpoint.state["config"] | {"data": now}}
        save(entry.folder, step=checkpoint.step, tensors=checkpoint.tensors, state=state)
    return run


@pytest.mark.parametrize("name", DATA)
def test_a_run_of_0_1_evaluates_as_it_did(tmp_path: Path, name: str) -> None:
    run = runs.load(moved(tmp_path, name), checkpoint="last")
    found = run.learner.evaluate(run.source.batch(range(4), "test"), seed=0)
    assert found.loss.tolist() == pytest.approx(EXPECTED[name]["loss"], **CLOSE)
    assert found.accuracy.tolist() == EXPECTED[name]["accuracy"]


@pytest.mark.parametrize("name", ["csv", "images"])
def test_a_run_of_0_1_adapts_as_it_did(tmp_path: Path, name: str) -> None:
    support = tmp_path / "few.csv"
    if name == "csv":
        header, *rows = (KEPT / "points.csv").read_text().splitlines()
        support.write_text(
            "\n".join([header, *(row for row in rows if row.endswith((",k0", ",k1")))]) + "\n"
        )
    else:
        support = tmp_path / "few"
        for sign in ("s00", "s01"):
            shutil.copytree(KEPT / "signs" / sign, support / sign)
    classifier = adapt(runs.load(moved(tmp_path, name), checkpoint="last"), support)
    found = [p for prediction in classifier.predict(support) for p in prediction.probabilities]
    assert found == pytest.approx(
        [p for row in EXPECTED[name]["probabilities"] for p in row], **CLOSE
    )


@pytest.mark.parametrize("name", DATA)
def test_a_run_of_0_1_goes_on_as_it_would_have_and_says_what_it_cannot_promise(
    tmp_path: Path, name: str
) -> None:
    run, listener = moved(tmp_path, name), Listener()
    old = (run / "metrics.jsonl").read_bytes()
    assert (
        train(
            dataclasses.replace(runs.read_config(run), iterations=6), resume=run, reporter=listener
        )
        == 0
    )
    assert any(
        "Not bit-equal" in note and "metanudge 0.1" in note and __version__ in note
        for note in listener.notes
    )
    assert (run / "metrics.jsonl").read_bytes().startswith(old)
    rows = read_metrics(run / "metrics.jsonl")[4:]
    for row, expected in zip(rows, EXPECTED[name]["resumed"], strict=True):
        # 0.1 told the mean of the query loss over both nudged solutions, not that between them
        for key in {
            "query_loss_before",
            "residual_start",
            "gradient_norm",
            "val_loss",
        } & expected.keys():
            assert row[key] == pytest.approx(expected[key], **CLOSE), key
    assert json.loads((run / "config.json").read_text())["version"] == __version__
    # the new configuration and both kinds of checkpoint agree
    assert runs.load(run, checkpoint="last").state.step == 6
    assert runs.load(run, checkpoint="4").state.step == 4


def test_what_0_1_did_by_default_is_written_out(tmp_path: Path) -> None:
    options = {name: runs.read_config(moved(tmp_path, name)).data_options for name in DATA}
    assert options == {
        "csv": "delimiter=',',standardise=false",
        "images": "image_size=28,grey=true",
        "mnist1d": "num_samples=400",
    }


@pytest.mark.parametrize("where", ["config.json", "its state"])
def test_a_newer_run_is_refused_with_both_versions(tmp_path: Path, where: str) -> None:
    run = moved(tmp_path, "mnist1d")
    if where == "config.json":
        values = json.loads((run / "config.json").read_text()) | {"version": "7.1", "novelty": 3}
        (run / "config.json").write_text(json.dumps(values))
    else:
        checkpoint = CheckpointStore(run / "checkpoints").load()
        shutil.rmtree(checkpoint.folder)
        save(
            checkpoint.folder,
            step=4,
            tensors=checkpoint.tensors,
            state=checkpoint.state | {"version": "7.1"},
        )
    with pytest.raises(
        UserError, match=rf"{where} was written by metanudge 7\.1, and this is {__version__}"
    ):
        runs.load(run, checkpoint="last")


@pytest.mark.parametrize("name", DATA)
def test_a_new_run_records_every_data_option_and_that_is_the_same_data(
    tmp_path: Path, name: str
) -> None:
    from metanudge.training.config import TrainConfig

    given: dict[str, Any] = {
        "data": str(KEPT / DATA[name]) if name != "mnist1d" else name,
        "ways": 2,
        "shots": 1,
        "queries": 1,
    }
    config = TrainConfig(**given, data_options="num_samples=400" if name == "mnist1d" else "")
    source = runs.build_source(config)
    resolved = sources.resolve(config, source)
    again = runs.build_source(resolved)
    assert sources.resolve(resolved, again) == resolved
    for split in ("train", "val", "test"):
        for first, second in zip(
            source.task(3, split).support, again.task(3, split).support, strict=True
        ):  # type: ignore[arg-type]
            assert first.equal(second)
    assert {"csv": "split_seed=0", "images": "split_seed=0", "mnist1d": "data_seed=42"}[
        name
    ] in resolved.data_options
