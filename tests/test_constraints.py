"""Every package that `make` installs is pinned: what both pyproject.toml name, what builds the
packages, and all that these need.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT, LAB = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
    for folder in ("", "lab")
)
# torch's builds for CUDA name the versions themselves
FROM_TORCH = re.compile("nvidia-|cuda-|triton")


def pins() -> dict[str, SpecifierSet]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): r.specifier for r in requirements}


def needed() -> dict[str, str | None]:
    """The name of every package that `make` installs here, and its version, if it is there."""
    project = PYPROJECT["project"]
    # hatchling asks for `editables` by itself when it makes an editable install.
    named = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["docs"],
        *LAB["project"]["dependencies"],
    ]
    queue = [
        *named,
        *PYPROJECT["build-system"]["requires"],
        *LAB["build-system"]["requires"],
        "editables",
    ]
    queue = [text for text in queue if Requirement(text).name != project["name"]]
    found: dict[str, str | None] = {}
    while queue:
        name, version, more = look_up(Requirement(queue.pop()))
        if name not in found:
            found[name] = version
            queue += more
    return found


def look_up(requirement: Requirement) -> tuple[str, str | None, list[str]]:
    name = canonicalize_name(requirement.name)
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return name, None, []
    return name, package.version, list(applicable(package.requires or [], requirement.extras))


def applicable(requirements: list[str], extras: set[str]) -> Iterator[str]:
    for text in requirements:
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield text


def test_everything_is_pinned():
    missing = {name for name in needed() if name not in pins() and not FROM_TORCH.match(name)}
    assert not missing, "add them to constraints.txt"


def test_pins_are_exact():
    assert all(re.fullmatch(r"==[\w.]+", str(specifier)) for specifier in pins().values())
    assert str(pins()["torch"]) == "==2.13.0"
    assert "torch>=2.10" in PYPROJECT["project"]["dependencies"]


@pytest.mark.skipif(
    not Path(sys.prefix, ".ready").exists(), reason="not the environment that make builds"
)
def test_the_environment_holds_the_pinned_versions():
    expected = pins()
    other = {
        name: version
        for name, version in needed().items()
        if version and name in expected and version not in expected[name]
    }
    assert not other, "delete .venv; make builds it anew"
