"""Signals as a user sends them: exit codes of a real process, and a second Ctrl-C that does not
wait.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from metanudge.training.errors import StopRequest
from training.test_resume import finish, lines, start

LONG = [
    "sinusoid",
    "--tasks",
    "2",
    "--solver",
    "gradient_descent:lr=0.01,steps=1",
    "--iterations",
    "1000000",
    "--eval-every",
    "0",
]


def test_ctrl_c_ends_a_process_with_130_after_saving(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LONG, "--out", str(run))
    while lines(run / "metrics.jsonl") < 3:
        assert process.poll() is None, finish(process)
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130
    assert f"--resume {run}" in output
    assert "Traceback" not in output
    assert len(list((run / "checkpoints").iterdir())) == 1


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal is None
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_ctrl_c_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert (stop.code, codes) == (130, [])
        signal.raise_signal(signal.SIGTERM)
        assert (stop.code, codes) == (143, [])
        signal.raise_signal(signal.SIGINT)
        assert codes == [130]
