"""The scripts of the tutorials run, and say what their pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "docs" / "record.py"
NAMES = (
    *("first_learner", "own_images", "penalties", "cleaning", "gradient_quality"),
    *("schools", "intents", "learned_rates", "shards", "serving"),
)
# These take longer: the words are compared after so few meta-steps, the numbers by `make test-all`.
SMALL = {"schools": 4, "intents": 2, "learned_rates": 10, "shards": 2, "serving": 2}
WITH_HF = ("intents", "serving")
NUMBER = r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?%?"


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_is_recorded(
    name: str, script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(name)
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path))
    record = script(RECORD)
    said = record.run(name, tmp_path / "picture.png")
    assert_alike(said, (record.RECORDED / f"{name}.txt").read_text("utf-8"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", SMALL)
def test_in_small_it_says_the_same_words(
    name: str, script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(name)
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path))
    record = script(RECORD)
    said = record.run(name, tmp_path / "picture.png", meta_steps=SMALL[name])
    assert words(said) == words((record.RECORDED / f"{name}.txt").read_text("utf-8"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def needs(name: str) -> None:
    if name in WITH_HF:
        pytest.importorskip("peft", reason="needs transformers and peft: pip install metanudge[hf]")


def test_each_is_at_most_60_lines_and_shown(script) -> None:
    record = script(RECORD)
    assert record.NAMES == NAMES
    pages = [page.read_text("utf-8") for page in RECORD.parent.rglob("*.md")]
    for name in NAMES:
        lines = (record.EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()
        assert len(lines) <= 60, name
        for shown in (f"examples/{name}.py", f"recorded/{name}.txt", f"recorded/{name}.png"):
            assert any(shown in page for page in pages), shown


def words(said: str) -> list[str]:
    """What is said but for the numbers; methods may be ranked otherwise."""
    return sorted(re.sub(NUMBER, "0", said).split())


def assert_alike(said: str, recorded: str) -> None:
    """The same words, and the same numbers up to what other CPUs make of them: a training carries
    rounding up to a few of a hundred right answers; below 1e-5 only rounding is left.
    """
    assert re.sub(NUMBER, "0", said).split() == re.sub(NUMBER, "0", recorded).split()
    for ours, theirs in zip(re.findall(NUMBER, said), re.findall(NUMBER, recorded), strict=True):
        a, b = (float(text.rstrip("%")) for text in (ours, theirs))
        allowed = 10 if ours.endswith("%") else max(0.05 * abs(b), 1e-5)
        assert abs(a - b) <= allowed, (ours, theirs)


def test_a_changed_output_would_be_seen() -> None:
    assert_alike("metanudge 81%\n", "metanudge 84%\n")
    for other in ("metanudge 60%\n", "metanudge: 84%\n", "error 0.84\n"):
        with pytest.raises(AssertionError):
            assert_alike(other, "metanudge 84%\n")
    with pytest.raises(AssertionError):
        assert_alike("error 0.9", "error 0.8")
