"""`import metanudge` is light, and imports point one way: what a module may know is written down
here and nowhere else.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import metanudge as mn
from metanudge.cli import main

PACKAGE = Path(__file__).parent.parent / "src" / "metanudge"

# Every unit (a module or a folder of the package) may import units of lower layers, and of its own
# layer.
LAYERS = (
    {"version", "names", "html_table"},
    {"params", "spread", "task"},
    {"proximal", "objective"},
    {"rates"},
    {"problem"},
    {"solvers"},
    {"engines"},
    {"accel"},
    {"estimators"},
    {"tuning", "setting", "evaluation", "split", "curvature"},
    {"engine_choice"},
    {"adapting"},
    {"learner", "gradcheck", "gradient_report", "bilevel"},
    {"testing"},
    {"planning"},
    {"training"},
    {"page"},
    {"cli", "__main__"},
)
LAYER = {unit: height for height, units in enumerate(LAYERS) for unit in units}

# Units beside the layers, and all they may know of the package; only `training` and what stands on
# it may import them.
APART: dict[str, set[str]] = {
    "optim": {"spread"},
    "prototypes": set(),
    "models": {"names", "prototypes"},
    "tasks": {"names", "task"},
    "token_bags": set(),
    "linear_fits": set(),
    "baselines": {"evaluation", "linear_fits", "task", "token_bags"},
}
USERS_OF_APART = LAYER["training"]

# What may be loaded besides the standard library: when a module is imported, and inside the
# functions that need it.
EAGER = {"torch", "numpy", "metanudge"}
LAZY_IN_TASKS = {"PIL", "pandas", "pooch", "transformers"}
MAY_LOAD_MORE = {"training", "page", "cli", "__main__"}


@dataclass(frozen=True)
class Import:
    """One import statement: who imports what, and whether it runs when the module is loaded."""

    path: Path
    line: int
    target: str  # dotted name
    eager: bool

    @property
    def importer(self) -> str:
        return unit_of(self.path)

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    @property
    def unit(self) -> str:
        """The unit of the package that is imported; empty for the package itself."""
        return [*self.target.split("."), ""][1]

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE.parent)}:{self.line} imports {self.target}"


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


UNITS = {unit_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}


def imports_of(path: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(path, node.lineno, alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            # `from metanudge import optim` imports the unit, not the package.
            names = [
                f"{module}.{a.name}" if module == "metanudge" and a.name in UNITS else module
                for a in node.names
            ]
            found.extend(
                Import(path, node.lineno, target, eager) for target in dict.fromkeys(names)
            )
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            ) or for_types_only(node, child)
            visit(child, eager and not lazy)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def for_types_only(node: ast.AST, child: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and "TYPE_CHECKING" in ast.unparse(node.test)
        and child in node.body
    )


def absolute(path: Path, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = ["metanudge", *path.relative_to(PACKAGE).parts[:-1]]
    return ".".join(
        [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
    )


IMPORTS = [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path)]
WITHIN = [i for i in IMPORTS if i.top == "metanudge"]


def test_every_unit_has_its_place():
    """A new module or folder is put into LAYERS (or APART) here, by somebody who has thought about
    it.
    """
    assert set() == UNITS - set(LAYER) - set(APART)
    assert len(IMPORTS) > 100, "the parser has seen the package"


def allowed(found: Import) -> bool:
    importer, unit = found.importer, found.unit
    if importer == "__init__":
        return LAYER.get(unit, -1) < USERS_OF_APART or not found.eager
    if importer in APART:
        return unit == importer or unit in APART[importer]
    # the package itself stands on everything but training, experiments and the command line
    if unit in ("", *APART):
        return LAYER[importer] >= USERS_OF_APART
    return LAYER[unit] <= LAYER[importer]


def test_imports_point_one_way():
    wrong = [str(found) for found in WITHIN if not allowed(found)]
    assert not wrong, "\n".join(wrong)


def test_the_rule_would_see_an_offence():
    problem, learner, tasks, init = (
        PACKAGE / n for n in ("problem.py", "learner.py", "tasks/draws.py", "__init__.py")
    )
    assert not allowed(Import(problem, 1, "metanudge.engines.stacked", True))
    assert not allowed(Import(problem, 1, "metanudge.learner", False)), "also inside a function"
    assert not allowed(Import(learner, 1, "metanudge.training.config", True))
    assert not allowed(Import(learner, 1, "metanudge", True))
    assert not allowed(Import(learner, 1, "metanudge.tasks", True))
    assert not allowed(Import(tasks, 1, "metanudge.params", True))
    assert not allowed(Import(init, 1, "metanudge.cli", True))
    assert allowed(Import(learner, 1, "metanudge.task", True))
    assert allowed(Import(tasks, 1, "metanudge.task", True))


ROOT = PACKAGE.parents[1]


def test_nothing_here_knows_the_lab():
    """Not by a late import or a name in a string either; and core tests use no helper of the lab's
    tests.
    """
    paths = {
        path
        for folder in ("src", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    } - {Path(__file__)}
    assert len(paths) > 200
    assert not [path for path in paths if "metanudge_lab" in path.read_text(encoding="utf-8")]
    helpers = {path.stem for path in (ROOT / "lab" / "tests").glob("*.py")}
    wrong = [
        f"{path}: {found.target}"
        for path in (ROOT / "tests").rglob("*.py")
        for found in imports_of(path)
        if found.top in helpers
    ]
    assert not wrong, "\n".join(wrong)


def test_training_works_without_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "metanudge_lab", None)
    sizes = ["--iterations", "2", "--tasks", "2", "--eval-every", "0", "--test-tasks", "2"]
    assert (
        main(["train", "sinusoid", *sizes, "--device", "cpu", "--out", str(tmp_path / "run")]) == 0
    )
    assert (tmp_path / "run" / "summary.json").is_file()


def is_late(found: Import) -> bool:
    """The public names load late (see `metanudge.__init__`), the command line loads what a command
    needs when it runs, and Triton is not everywhere.
    """
    early = found.eager or found.importer in ("__init__", "cli", "__main__")
    return not early and not needs_triton(found.target)


def needs_triton(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return path.is_file() and any(one.eager and one.top == "triton" for one in imports_of(path))


def test_only_the_command_line_imports_late():
    """An import inside a function hides who knows whom: it is either a cycle or needless."""
    wrong = [str(found) for found in WITHIN if is_late(found)]
    assert not wrong, "\n".join(wrong)


def test_the_rule_would_see_a_late_import():
    found = Import(PACKAGE / "estimators" / "base.py", 1, "metanudge.problem", False)
    assert is_late(found)
    assert not is_late(Import(PACKAGE / "cli" / "train.py", 1, "metanudge.training.loop", False))


def test_no_module_imports_itself_by_a_detour():
    """Module by module, imports have no cycles, those inside functions included (folders'
    `__init__` files aside, which only re-export).
    """
    graph: dict[str, set[str]] = {}
    for found in WITHIN:
        if found.path.name != "__init__.py":
            name = ".".join(found.path.relative_to(PACKAGE.parent).with_suffix("").parts)
            graph.setdefault(name, set()).add(found.target)

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail, name))
        if name not in done:
            for target in graph.get(name, ()):
                walk(target, (*trail, name))
            done.add(name)

    done: set[str] = set()
    for name in graph:
        walk(name, ())


# Loaded on CUDA devices only, where torch brings it.
TRITON = (
    "accel/step.py",
    "accel/head.py",
    "accel/trunk/cuda.py",
    "accel/trunk/kernels.py",
    "accel/trunk/launches.py",
    "accel/trunk/first_kernels.py",
    "accel/trunk/tail.py",
    "accel/trunk/tail_kernels.py",
    "engines/packed_kernels.py",
)


def test_light_units_load_only_torch_and_numpy():
    wrong = []
    for found in IMPORTS:
        if (
            found.importer in MAY_LOAD_MORE
            or found.top in sys.stdlib_module_names
            or found.top in EAGER
        ):
            continue
        if found.top == "triton" and found.path.relative_to(PACKAGE).as_posix() in TRITON:
            continue
        if found.importer == "tasks" and found.top in LAZY_IN_TASKS and not found.eager:
            continue
        wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


PROGRAM = """
import json, sys

def loaded():
    return {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

start = loaded()
import metanudge
print(json.dumps(sorted(loaded() - start)))
import numpy, torch
before = loaded()
for name in metanudge.__all__:
    getattr(metanudge, name)
print(json.dumps(sorted(loaded() - before)))
"""


def test_importing_loads_only_torch_and_numpy():
    """In a fresh process the package alone loads nothing, and all its public names load nothing
    beside torch and numpy.
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    alone, with_names = (json.loads(line) for line in result.stdout.splitlines())
    assert alone == ["metanudge"]
    assert with_names == []


def test_every_public_name_is_there():
    """The names are listed by hand for lazy loading: the list for `__all__`, for the loader and for
    type checkers agree.
    """
    missing = [name for name in mn.__all__ if not hasattr(mn, name)]
    assert not missing
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom) and ".training" not in str(statement.module)
        for alias in statement.names
    }
    assert typed == set(mn.__all__) - {"__version__", "load_run"}
    assert set(mn.__all__) <= set(dir(mn))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mn.nonsense
