"""The bilevel examples, in small: they run, and find what they are there to find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_ridge(capsys):
    rows = load("ridge").main(["--features", "10", "--train", "20", "--steps", "12"])
    assert "one, learned" in capsys.readouterr().out
    by_name = {(row["problem"], row["penalty"]): row for row in rows}
    for problem in ("ridge", "logistic"):
        fixed, one, each = (by_name[problem, penalty] for penalty in ("fixed", "one, learned", "each, learned"))
        assert each["validation"] < one["validation"] < fixed["validation"]
        assert each["test"] < fixed["test"]
        assert each["noise"] > 10 * each["informative"], "the penalties tell which features carry information"
