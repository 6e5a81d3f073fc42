"""Signals at awkward moments: obeyed within seconds, with nothing lost, and the resumed run ends
with the same bytes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import metanudge as mn
from metanudge.cli import main
from metanudge.training import loop, runs, sources, trainer
from metanudge.training.errors import Interrupted, StopRequest, StopTraining
from metanudge.training.evaluation import measure
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import Quiet
from metanudge.training.trainer import train
from metanudge.training.use import adaptation
from trained_runs import vector_run, vector_table
from training.test_distributed import FLAGS, train_on
from training.test_trainer import TINY, fingerprint, go

ALLOWED = 5.0  # seconds from the signal to the end


def attack(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    *,
    call: int,
    moment: str,
    number: int = signal.SIGTERM,
) -> Callable[[], float]:
    """Send this process a signal at one call of a function: before, after, or in the midst of one
    that does not end by itself.

    Returns a function that tells the seconds since.
    """
    plain, calls, sent = getattr(owner, name), [0], [0.0]

    def attacked(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] != call:
            return plain(*args, **options)
        result = plain(*args, **options) if moment == "after" else None
        sent[0] = time.monotonic()
        signal.raise_signal(number)
        while moment == "within":
            assert time.monotonic() < sent[0] + 2 * ALLOWED, "the signal was not obeyed"
            time.sleep(0.001)
        return plain(*args, **options) if moment == "before" else result

    monkeypatch.setattr(owner, name, attacked)
    return lambda: time.monotonic() - sent[0]


def stop_and_go_on(
    folder: Path,
    since: Callable[[], float],
    monkeypatch: pytest.MonkeyPatch,
    code: int = 143,
    **changes: Any,
) -> int:
    """Train until the attack, then to the end without it; the step at which the run was stopped."""
    config = dataclasses.replace(TINY, out=str(folder), **changes)
    with pytest.raises(
        StopTraining, match=r"is saved; go on with: metanudge train --resume"
    ) as stopped:
        train(config, reporter=Quiet())
    assert since() < ALLOWED
    assert stopped.value.code == code
    monkeypatch.undo()
    step = runs.load(folder, checkpoint="last").state.step
    assert train(runs.read_config(folder), resume=folder, reporter=Quiet()) == 0
    return step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed: 8 meta-steps, validated after 4 and 8 in two batches each,
    tested in three.
    """
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(folder, eval_tasks=12, test_tasks=18)
    return folder


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PATIENCE", 0.05)


# Two batches a validation, three in the test: 1, 2 | 3, 4 | 5, 6, 7.
@pytest.mark.parametrize(
    ("call", "moment", "step"),
    [(1, "before", 4), (1, "within", 4), (1, "after", 4), (2, "within", 4), (2, "after", 4), (3,
    "before", 8), (3, "within", 8),
     (4, "within", 8), (4, "after", 8), (5, "within", 8), (6, "before", 8), (7, "after", 8)],
)  # fmt: skip
def test_sigterm_in_validation_and_test(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
    call: int,
    moment: str,
    step: int,
) -> None:
    since = attack(monkeypatch, mn.MetaLearner, "evaluate", call=call, moment=moment)
    assert (
        stop_and_go_on(tmp_path / "run", since, monkeypatch, eval_tasks=12, test_tasks=18) == step
    )
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


def test_the_usual_patience_is_short_enough(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = attack(
        monkeypatch, mn.MetaLearner, "evaluate", call=2, moment="within", number=signal.SIGINT
    )
    stop_and_go_on(tmp_path / "run", since, monkeypatch, code=130, eval_tasks=12, test_tasks=18)
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


def test_the_same_validation_interrupted_twice(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    run = tmp_path / "run"
    for number, config in enumerate(
        [dataclasses.replace(TINY, out=str(run), eval_tasks=12, test_tasks=18), None], start=1
    ):
        with monkeypatch.context() as patch:
            attack(patch, mn.MetaLearner, "evaluate", call=number, moment="within")
            with pytest.raises(StopTraining):
                train(
                    config or runs.read_config(run),
                    resume=None if config else run,
                    reporter=Quiet(),
                )
        assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert train(runs.read_config(run), resume=run, reporter=Quiet()) == 0
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
@pytest.mark.parametrize(("name", "call"), [("choose_nu", 1), ("meta_gradient", 6)])
def test_a_signal_in_a_meta_step_that_takes_long(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
    engine: str,
    name: str,
    call: int,
) -> None:
    go(tmp_path / "whole", engine=engine)
    since = attack(monkeypatch, mn.MetaLearner, name, call=call, moment="within")
    # The first meta-gradient of all is the trial before the run, so the sixth belongs to meta-step
    # 5.
    assert stop_and_go_on(tmp_path / "run", since, monkeypatch, engine=engine) == (
        0 if name == "choose_nu" else 4
    )
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_two_ranks_leave_a_validation_together(tmp_path: Path) -> None:
    """Only rank 1 is told to stop, in the midst of a batch; one process then goes on to what one
    process alone would have done.
    """
    program = tmp_path / "attacked.py"
    program.write_text(
        "import os, signal, sys, time\nimport metanudge as mn\nfrom metanudge.cli import main\nfrom"
        " metanudge.training import loop\nloop.PATIENCE, plain, calls = 0.05,"
        " mn.MetaLearner.evaluate, []\ndef attacked(self, *args, **options):\n    calls.append(1)\n"
        "    if len(calls) == 2 and os.environ['RANK'] == '1':\n       "
        " signal.raise_signal(signal.SIGTERM)\n        while True:\n            time.sleep(0.001)\n"
        "    return plain(self, *args, **options)\nmn.MetaLearner.evaluate = attacked\ncode ="
        " main(sys.argv[1:])\nsys.stdout.flush()\nos._exit(code)\n"
    )
    run, alone = tmp_path / "run", tmp_path / "alone"
    codes, outputs = train_on(2, tmp_path, *FLAGS, "--out", str(run), program=[str(program)])
    assert codes == [143, 143], outputs
    assert "Traceback" not in "".join(outputs)
    assert runs.load(run, checkpoint="last").state.step == 10
    assert len(read_metrics(run / "metrics.jsonl")) == 9
    assert main(["train", "--resume", str(run)]) == 0
    assert main(["train", *FLAGS, "--out", str(alone)]) == 0
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (run, alone))
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    # float64, and sums in another order over two ranks; 20 well-conditioned meta-steps
    assert [row["val_loss"] for row in ours if "val_loss" in row] == pytest.approx(
        [r["val_loss"] for r in theirs if "val_loss" in r], rel=1e-10
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["eval", "adapt"])
def test_a_signal_in_eval_and_adapt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    number: int,
    code: int,
) -> None:
    vector_table(tmp_path / "data.csv", classes=20)
    run = vector_run(tmp_path / "run", tmp_path / "data.csv")
    vector_table(tmp_path / "few.csv", classes=3, each=4)
    vector_table(tmp_path / "rows.csv", classes=3, each=4)
    (tmp_path / "out").mkdir()
    owner, name = (measure, "adapted") if command == "eval" else (adaptation.Classifier, "logits")
    since = attack(monkeypatch, owner, name, call=1, moment="within", number=number)
    flags = {
        "eval": ["--json", str(tmp_path / "out" / "found.json")],
        "adapt": [
            "--support",
            str(tmp_path / "few.csv"),
            "--predict",
            str(tmp_path / "rows.csv"),
            "--out",
            str(tmp_path / "out" / "l.csv"),
        ],
    }
    assert main([command, str(run), *flags[command]]) == code
    assert since() < ALLOWED
    assert list((tmp_path / "out").iterdir()) == []
    assert "nothing was lost" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["make_plan", "build_source", "build_learner", "try_out"])
def test_a_signal_before_the_first_meta_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    owner = sources if place.startswith("build_") else trainer
    since = attack(monkeypatch, owner, place, call=1, moment="within", number=signal.SIGINT)
    assert main(["train", "sinusoid", "--out", str(tmp_path / "run")]) == 130
    assert since() < ALLOWED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Interrupted; nothing was lost." in said
    assert not (tmp_path / "run").exists()


PROGRAM = """
import os, signal, sys
class Attack:
    def find_spec(name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Attack)
from metanudge.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", ["tyro", "torch", "torch.nn"])
def test_a_signal_while_modules_are_loaded(tmp_path: Path, module: str) -> None:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        module,
        "train",
        "sinusoid",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "metanudge: Interrupted; nothing was lost.\n"
    assert not (tmp_path / "run").exists()


def test_a_process_in_a_long_validation(tmp_path: Path) -> None:
    flags = [
        "sinusoid",
        "--tasks",
        "2",
        "--eval-every",
        "1",
        "--eval-tasks",
        "10000000",
        "--out",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-m", "metanudge", "train", *flags]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "run" / "timing.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - sent < ALLOWED
    assert process.returncode == 143, said
    assert "Traceback" not in said


def test_what_cleans_up_is_not_interrupted_again() -> None:
    done = []

    def clean_up() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.6)  # longer than it takes until the signal is brought back to mind
            done.append(True)

    with pytest.raises(Interrupted), StopRequest() as stop, stop.interruptible():
        clean_up()
    assert done


def test_an_interrupt_that_gets_lost_comes_again() -> None:
    def lose_it() -> None:
        with suppress(KeyboardInterrupt):  # as a callback from C may do
            signal.raise_signal(signal.SIGTERM)
        end = time.monotonic() + ALLOWED
        while time.monotonic() < end:
            time.sleep(0.001)

    with pytest.raises(Interrupted), StopRequest() as stop, stop.interruptible():
        lose_it()


def test_the_timer_of_others_goes_on() -> None:
    before = signal.getsignal(signal.SIGALRM)
    left = signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        with StopRequest():
            signal.raise_signal(signal.SIGTERM)
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
