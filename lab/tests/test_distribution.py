"""The lab as a distribution: which version, which commands, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import metanudge
import metanudge_lab
from metanudge.cli.commands import GROUP
from metanudge.cli.program import available
from metanudge_lab.commands import COMMANDS

PACKAGE = Path(metanudge_lab.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]

# Every unit may import those of lower layers and itself, but not its neighbours.
LAYERS = (
    {"style", "progress", "provenance", "device_memory"},
    {"bench", "experiments"},
    {"claims"},
    {"report"},
    {"cli"},
    {"commands"},
)
HEIGHT = {unit: height for height, units in enumerate(LAYERS) for unit in units}


def test_the_version_is_the_library_s() -> None:
    assert PROJECT["version"] == metanudge.__version__
    assert f"metanudge=={metanudge.__version__}" in PROJECT["dependencies"]


def test_the_commands_join_metanudge() -> None:
    ((name, target),) = PROJECT["entry-points"][GROUP].items()
    assert target == "metanudge_lab.commands:COMMANDS"
    assert [entry.value for entry in entry_points(group=GROUP, name=name)] == [target], (
        "install it: pip install -e lab"
    )
    assert COMMANDS.items() <= available().items()
    assert all(callable(import_module(command.module).run) for command in COMMANDS.values())


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    program = f"""
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
from metanudge.cli import main
sys.exit(main({arguments!r}))"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "bench" in done.stdout or arguments != ["--help"]
    assert done.stdout.splitlines()[-1] == "False"


def test_imports_point_one_way() -> None:
    wrong, seen = [], 0
    for path in PACKAGE.rglob("*.py"):
        importer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for unit in units_imported(path):
            seen += 1
            if importer == "__init__" or (unit != importer and HEIGHT[unit] >= HEIGHT[importer]):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {unit}")
    assert not wrong, "\n".join(wrong)
    assert seen > 100


def units_imported(path: Path) -> list[str]:
    """Units of the lab that a module imports, at once or later."""
    targets = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets += [f"{node.module}.{alias.name}" for alias in node.names]
    return [target.split(".")[1] for target in targets if target.startswith("metanudge_lab.")]
