"""The page of a run says what its folder holds, whatever is missing there, and believes nothing of
it to be more than text, numbers and small pictures.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from metanudge.cli import main
from metanudge.page import read_run, run_page
from metanudge.page.words import Numbers
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from metanudge.training.evaluation import eval_file
from metanudge.training.files import seal
from pages import EVIL, evil_run, text_run, words_of

OLD = Path(__file__).parents[1] / "data" / "run-0.1"


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evil_run(tmp_path_factory.mktemp("evil"))


def page_of(run: Path) -> str:
    return run_page(read_run(run))


def changed(run: Path, to: Path, file: str, **values: Any) -> Path:
    """A copy of a run in whose sealed file some values are others."""
    shutil.copytree(run, to)
    document = json.loads((to / file).read_text())
    document.pop("sha256", None)
    indent = 1 if file.startswith("eval") else 2
    (to / file).write_text(seal({**document, **values}, indent=indent))
    return to


@pytest.mark.parametrize("name", ["csv", "images", "mnist1d"])
def test_runs_of_version_0_1(name: str) -> None:
    text = words_of(page_of(OLD / name))
    summary = json.loads((OLD / name / "summary.json").read_text())
    assert f"{100 * summary['test']['accuracy']:.2f} %" in text
    assert "No baselines were measured" in text
    assert "metanudge eval" in text
    assert "finished" in text
    assert "was changed" not in text


def test_what_was_trained_and_found(evil: Path) -> None:
    """Every number of summary.json and of the evaluation's table, as the page writes it."""
    text = words_of(page_of(evil))
    summary = json.loads((evil / "summary.json").read_text())
    evaluation = json.loads(eval_file(evil, "test").read_text())
    for found in (summary["test"], *summary["baselines"].values()):
        assert f"{100 * found['accuracy']:.2f} ± {100 * found['accuracy_ci95']:.2f} %" in text or (
            f"{100 * found['accuracy']:.2f} %" in text
        )
    for row in evaluation["rows"]:
        assert f"{row['steps']} {100 * row['accuracy']:.2f} ± " in text
    for one in evaluation["classes"]:
        assert f"{100 * one['accuracy']:.1f} %" in text
    assert "2 meta-steps of 2 tasks" in text
    assert "gradient descent (lr = 0.1, steps = 2)" in text
    assert f"torch {summary['torch']}" in text


def test_nothing_of_a_folder_is_markup(evil: Path) -> None:
    """Class names, the data's name and a baseline's name are HTML here."""
    page = page_of(evil)
    assert "<script" not in page
    assert "onerror" not in re.sub(r"&lt;.*?&gt;", "", page)
    assert "<img src=x" not in page
    assert page.count("<title>") == page.count("</title>") == 1
    assert "script-src" not in page
    assert "default-src 'none'" in page
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(one.startswith(("data:", "#")) for one in addresses), addresses
    shown = unescape(page)
    for name in EVIL:
        assert name in shown, "they are there, as text"


def test_mistakes_are_pictures_of_the_task_they_were_made_in(evil: Path) -> None:
    page = page_of(evil)
    evaluation = json.loads(eval_file(evil, "test").read_text())
    assert evaluation["shown"], "an untrained learner makes mistakes"
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 2 * len(evaluation["shown"])
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
            assert image.size == (8, 8)


def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    run, texts = text_run(tmp_path)
    evaluation = json.loads(eval_file(run, "test").read_text())
    assert evaluation["shown"]
    shown = unescape(page_of(run))
    for one in evaluation["shown"]:
        for part, label in (("example", one["class"]), ("like", one["taken_for"])):
            assert texts[one[part]["text"]] == label
            assert one[part]["text"] in shown


def test_unfinished_runs(evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(evil, tmp_path / "a run")
    for file in ("summary.json", "eval-test.json"):
        (run / file).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    assert main(["page", str(run)]) == 0
    said = capsys.readouterr().out
    assert "unfinished: 1 of 2 meta-steps" in said
    text = words_of((run / "page.html").read_text(encoding="utf-8"))
    assert "unfinished: 1 of 2 meta-steps" in text
    assert f"metanudge train --resume '{run}'" in text
    (run / "metrics.jsonl").unlink()
    assert "No meta-step has been measured yet" in words_of(page_of(run))


def test_a_run_that_goes_on_is_unfinished(evil: Path, tmp_path: Path) -> None:
    run = shutil.copytree(evil, tmp_path / "run")
    config = TrainConfig.read(run / "config.json").to_dict() | {"iterations": 5}
    (run / "config.json").write_text(TrainConfig(**config).to_json())
    assert "unfinished: 2 of 5 meta-steps" in words_of(page_of(run))


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "text for a number": ("summary.json", {"steps": "2"}, "it.steps is '2'"),
    "a number out of reach": ("summary.json", {"steps": 10**400}, "it.steps is 1000"),
    "true for a number": ("summary.json", {"seconds": True}, "it.seconds is True"),
    "a list for an object": ("summary.json", {"test": []}, "it.test is []"),
    "half a row": ("eval-test.json", {"rows": [{"steps": 1}]}, r"it.rows[0] has no loss"),
    "a class that is no text": (
        "eval-test.json",
        {"classes": [{"name": 1, "accuracy": 0.5, "examples": 2, "taken_for": []}]},
        "it.classes[0].name is 1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_run_writes_is_refused(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    file, values, told = WRONG[what]
    run = changed(evil, tmp_path / "run", file, **values)
    assert main(["page", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / file} is not what a run writes" in said
    assert told in said
    assert not (run / "page.html").exists()


def test_what_is_no_picture_is_left_out(evil: Path, tmp_path: Path) -> None:
    svg = base64.b64encode(b"<svg onload='alert(1)'/>").decode()
    good = json.loads(eval_file(evil, "test").read_text())["shown"][0]
    bad = [{**good, "example": {"png": value}} for value in (svg, 'x" onerror="alert(1)', "")]
    run = changed(evil, tmp_path / "run", "eval-test.json", shown=[good, *bad])
    assert page_of(run).count("<img") == 2


def test_changed_files_are_named(evil: Path, tmp_path: Path) -> None:
    run = shutil.copytree(evil, tmp_path / "run")
    for file in ("summary.json", "eval-test.json"):
        text = (run / file).read_text()
        (run / file).write_text(text.replace('"tasks": ', '"tasks": 1'))
    page = words_of(page_of(run))
    assert page.count("was changed after") == 2, "by a digit"


def test_bad_input(evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for flags, told in (
        ([str(tmp_path / "none")], "There is no run"),
        ([str(tmp_path / "empty")], "is not a run: it has no config.json"),
        ([str(evil), "--out", str(tmp_path)], "is a folder"),
        ([str(evil), "--out", str(tmp_path / "no" / "page.html")], "there is no folder"),
    ):
        assert main(["page", *flags]) == 2
        assert told in capsys.readouterr().err
    linked = shutil.copytree(evil, tmp_path / "linked")
    (linked / "summary.json").unlink()
    (linked / "summary.json").symlink_to(evil / "summary.json")
    with pytest.raises(UserError, match="links in a run folder are not followed"):
        read_run(linked)


def test_the_verdict_names_who_is_better() -> None:
    accuracy, loss = Numbers("accuracy"), Numbers("loss")

    def beside(gain: float, interval: float) -> dict[str, dict[str, Any]]:
        return {"a": {"learner_better_by": gain, "learner_better_by_ci95": interval}}

    assert accuracy.verdict(beside(-0.2, 0.1)) == (
        "bad", "A is better here, by 20.00 ± 10.00 % on the same tasks.",
    )  # fmt: skip
    assert accuracy.verdict(beside(0.2, 0.1))[0] == "good"
    assert accuracy.verdict(beside(-0.2, 0.3))[0] == accuracy.verdict(beside(0.2, 0.3))[0] == "half"
    assert loss.verdict(beside(-0.2, 0.1))[1] == "A is better here, by 0.2 ± 0.1 on the same tasks."
    assert accuracy.verdict(None) == ("", "")
    [first, second] = accuracy.bars({"accuracy": 0.5}, {"b": {"accuracy": 0.7}})
    assert (first.name, first.length, second.own) == ("b", 70.0, True)
    [first, second] = loss.bars({"loss": 0.5}, {"b": {"loss": 2.0}})
    assert (first.own, first.length, second.length) == (True, 25.0, 100.0)
