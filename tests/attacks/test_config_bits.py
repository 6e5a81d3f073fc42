"""Every single bit of a run's config.json, flipped: refused, or the same run in every setting."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from metanudge.training import runs
from metanudge.training.config import MAY_CHANGE, TrainConfig
from metanudge.training.errors import UserError
from training.test_trainer import go


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    go(folder, iterations=2, checkpoint_every=1, eval_every=0, test_tasks=0)
    return folder


@pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "before the first"])
def test_no_flipped_bit_changes_a_run(
    tmp_path: Path, trained: Path, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    if not saved:
        shutil.rmtree(run / "checkpoints")
    data, config = (run / "config.json").read_bytes(), runs.read_config(run)
    flipped = bytearray(data)
    # spares thousands of writes
    monkeypatch.setattr(
        "metanudge.training.files.read_bytes", lambda path, limit=None: bytes(flipped)
    )
    refused = 0
    for place in range(8 * len(data)):
        flipped[place // 8] ^= 1 << place % 8
        try:
            found = runs.read_config(run)
        except UserError:
            refused += 1
        else:
            assert found == config, (
                f"bit {place % 8} of {data[place // 8 - 20 : place // 8 + 20]!r}"
            )
        flipped[place // 8] = data[place // 8]
    assert refused > 0.99 * 8 * len(data)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"lam": 2.0', '"lam": 3.0', "lam was 2.0, now 3.0"),
        ('"iterations": 2', '"iterations": 6', "iterations was 2, now 6"),
        ('"seed": 0', '"seed": 1', "seed was 0, now 1"),
        ('"fobmaml"', '"fomaml"', "estimator was 'fobmaml', now 'fomaml'"),
    ],
)
def test_the_setting_that_was_changed_is_named(
    tmp_path: Path, trained: Path, old: str, new: str, words: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    change(run / "config.json", old, new)
    for read in (runs.read_config, runs.load):
        with pytest.raises(UserError, match=rf"config\.json was changed .*{words}"):
            read(run)


def test_a_new_seal_does_not_hide_the_change_from_the_checkpoint(
    tmp_path: Path, trained: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    config = runs.read_config(run)
    (run / "config.json").write_text(dataclasses.replace(config, lam=3.0).to_json())
    with pytest.raises(UserError, match=r"lam was 2\.0, now 3\.0"):
        runs.load(run)
    allowed = dataclasses.replace(config, iterations=9, out="elsewhere")
    (run / "config.json").write_text(allowed.to_json())
    assert runs.load(run).config == allowed
    assert "iterations" in MAY_CHANGE


def test_a_settings_file_of_ones_own_may_be_edited_without_its_seal(
    tmp_path: Path, trained: Path
) -> None:
    file = tmp_path / "mine.json"
    shutil.copy(trained / "config.json", file)
    change(file, '"lam": 2.0', '"lam": 3.0')
    with pytest.raises(UserError, match=r'mine\.json was changed.*remove its line "sha256"'):
        TrainConfig.read(file)
    text = file.read_text()
    file.write_text(text[: text.rindex(",")] + "\n}\n")
    assert TrainConfig.read(file).lam == 3.0
