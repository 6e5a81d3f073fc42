"""What is published: a lean source distribution, and one version everywhere."""

from __future__ import annotations

import re
import tarfile
import tomllib
from pathlib import Path

import pytest

import metanudge as mn

ROOT = Path(__file__).parents[1]


def test_the_source_distribution_is_lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("hatchling.build", reason="make installs it with the tools")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers()}
    assert {name.split("/")[0] for name in names} == {
        *("src", "examples", "pyproject.toml", "README.md", "LICENSE"),
        *("CHANGELOG.md", "CITATION.cff", "PKG-INFO", ".gitignore"),
    }
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert ours <= names


def test_versions_and_classifiers_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [mn.__version__]
    library, lab = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in ("", "lab")
    )
    assert library["classifiers"] == lab["classifiers"]
    assert library["requires-python"] == lab["requires-python"] == ">=3.11"
    assert "Programming Language :: Python :: 3.11" in library["classifiers"]
