"""The bilevel examples, in small: they run, and find what they are there to find."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_ridge(script, capsys):
    rows = script(EXAMPLES / "ridge.py").main(
        ["--features", "10", "--train", "20", "--steps", "12"]
    )
    assert "one, learned" in capsys.readouterr().out
    by_name = {(row["problem"], row["penalty"]): row for row in rows}
    for problem in ("ridge", "logistic"):
        fixed, one, each = (
            by_name[problem, penalty] for penalty in ("fixed", "one, learned", "each, learned")
        )
        assert each["validation"] < one["validation"] < fixed["validation"]
        assert each["test"] < fixed["test"]
        assert each["noise"] > 10 * each["informative"], (
            "the penalties tell which features carry information"
        )
