"""Where a run tells its progress: a terminal, a notebook, or neither."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from metanudge.training.progress import ConsoleReporter


def told(console: Console) -> ConsoleReporter:
    """Thirty meta-steps, with a validation after ten of them, in no time at all."""
    reporter = ConsoleReporter(console)
    reporter.begin([("data", "sinusoid")], total=30, done=0)
    for step in range(1, 31):
        validated = {"val_loss": 0.5} if step == 10 else {}
        reporter.step(step, {"residual": 0.1} | validated)
    reporter.end()
    return reporter


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What a notebook shows: each output with all that stood in it, one after the other."""
    shown: list[list[str]] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id, "only an output with an id can be changed"
        shown.append([data["text/plain"]])
        place = shown[-1]
        return SimpleNamespace(update=lambda new, raw: place.append(new["text/plain"]))

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    # rich's own outputs, which are not about progress
    monkeypatch.setattr("rich.jupyter.display", lambda *_: None)
    return shown


def test_a_notebook_has_one_output_that_changes(outputs: list[list[str]]) -> None:
    told(Console(force_jupyter=True))
    (texts,) = outputs
    assert texts[0] == ""
    assert texts[-1].splitlines()[0].startswith("step 10/30"), "validations stay"
    assert texts[-1].splitlines()[1].startswith("step 30/30")
    assert len(texts[-1].splitlines()) == 2
    assert len(texts) <= 5, "not at every meta-step"


@pytest.mark.parametrize("terminal", [True, False])
def test_elsewhere_no_notebook_is_asked(outputs: list[list[str]], terminal: bool) -> None:
    file = io.StringIO()
    told(Console(file=file, force_jupyter=False, force_terminal=terminal, width=100))
    assert outputs == []
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step ")]
    assert ("\x1b[?25l" in file.getvalue()) is terminal, "a live line hides the cursor"
    if not terminal:
        assert [line.split(" · ")[0] for line in lines] == ["step 1/30", "step 10/30", "step 30/30"]
