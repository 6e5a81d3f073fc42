"""`metanudge data`: listing, fetching, and finding what is wrong with which file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metanudge.cli import main
from trained_runs import omniglot_folder, vector_table, write_images


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("METANUDGE_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def mnist1d(cache: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["data", "fetch", "mnist1d"]) == 0
    capsys.readouterr()
    (file,) = cache.glob("mnist1d*.npz")
    return file


def test_list(mnist1d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    text = capsys.readouterr().out
    for part in (
        "mnist1d:",
        "omniglot:",
        "sinusoid:",
        "Apache-2.0",
        "MIT",
        "Lake",
        f"{mnist1d} (3.9 MB)",
        "METANUDGE_DATA",
    ):
        assert part in text


def test_fetch_again_says_so(mnist1d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "mnist-1d"]) == 0
    assert "was there already" in capsys.readouterr().out


def test_fetch_what_has_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "fetch", "sinusoid"]) == 0
    assert "Nothing to fetch" in capsys.readouterr().out


def test_verify_good_files(mnist1d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify"]) == 0
    text = capsys.readouterr().out
    assert f"OK     {mnist1d}: 9600 + 2400 examples, equal to the recipe" in text
    assert "omniglot: no files to check (metanudge data fetch omniglot gets them)" in text


def test_verify_finds_a_changed_number(mnist1d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(mnist1d) as file:
        arrays = dict(file)
    arrays["x_test"][5, 3] += 1e-6
    np.savez(mnist1d, **arrays)
    assert main(["data", "verify", "mnist1d"]) == 2
    text = capsys.readouterr().out
    assert f"WRONG  {mnist1d}: x_test differs from what the recipe gives" in text
    assert "Delete it" in text


def test_verify_finds_a_damaged_file(mnist1d: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mnist1d.write_bytes(mnist1d.read_bytes()[:1000])
    assert main(["data", "verify", "mnist1d"]) == 2
    assert f"WRONG  {mnist1d} is damaged" in capsys.readouterr().out


def test_verify_finds_a_blank_drawing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.ones((1623, 20, 28, 28), dtype=np.uint8)
    images[7, 2] = 0
    (cache / "omniglot").mkdir(parents=True)
    np.savez(
        cache / "omniglot" / "omniglot_28.npz",
        images=images,
        class_names=np.array([f"A/character{i:04d}" for i in range(1623)]),
    )
    assert main(["data", "verify", "omniglot"]) == 2
    assert "drawing 3 of A/character0007 is blank" in capsys.readouterr().out


def test_verify_the_real_omniglot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "omniglot_28.npz").symlink_to(omniglot_folder() / "omniglot_28.npz")
    monkeypatch.setenv("METANUDGE_DATA", str(tmp_path / "copy"))
    assert main(["data", "verify", "omniglot"]) == 0
    assert "1623 characters × 20 drawings" in capsys.readouterr().out


def test_verify_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(write_images(tmp_path / "photos", ["a", "b"], 3))]) == 0
    assert "6 examples of shape (1, 20, 20), 2 classes" in capsys.readouterr().out
    assert main(["data", "verify", str(vector_table(tmp_path / "table.csv", classes=4))]) == 0
    assert "48 examples of shape (6,), 4 classes" in capsys.readouterr().out
    (tmp_path / "photos" / "b" / "x.png").write_text("no image")
    assert main(["data", "verify", str(tmp_path / "photos")]) == 2
    assert "b/x.png" in capsys.readouterr().err
