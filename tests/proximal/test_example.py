"""The example that learns a stiffness per layer, in small: it runs, and moves λ away from a bad
start.
"""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "learned_stiffness.py"


def test_stiffness_falls_where_it_was_too_large(script, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path))
    result = script(EXAMPLE).main(
        ["--steps", "8", "--tasks", "8", "--test-tasks", "10", "--samples", "2000"]
    )
    said = capsys.readouterr().out
    assert "features.1.weight" in said
    assert "λ learned" in said
    assert result["stiffness"].keys() == {
        "features.1.weight",
        "features.1.bias",
        "head.weight",
        "head.bias",
    }
    assert max(result["stiffness"].values()) < 4.5, "5 is too stiff"
    assert set(result["accuracy"]) == {"fixed", "learned"}
