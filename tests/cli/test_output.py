"""Any terminal, file or pipe: the commands as processes, where only a process shows what
happens.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metanudge.cli import program as output
from metanudge.training import errors

METANUDGE = [sys.executable, "-m", "metanudge"]
TINY = [
    "train", "sinusoid", "--model", "mlp:hidden=(4,)", "--solver",
    "gradient_descent:lr=0.01,steps=1", "--tasks", "2",
    "--iterations", "3",
    "--eval-every", "2", "--eval-tasks", "2", "--test-tasks", "2", "--device", "cpu",
]  # fmt: skip
DONE = {"config.json", "metrics.jsonl", "timing.jsonl", "checkpoints", "summary.json", "curve.png"}


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


def contents(run: Path) -> set[str]:
    return {path.name for path in run.iterdir() if not path.name.startswith(".")}


# refused with a λ in the message, before torch is loaded
UNLEARNED = ["train", "mnist1d", "--lam-lr", "1"]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize(
    "command", [["--help"], ["train", "--help"], UNLEARNED, ["trian"]], ids=" ".join
)
def test_output_that_is_not_utf8(command: list[str], encoding: str) -> None:
    done = subprocess.run(
        [*METANUDGE, *command],
        env=environment(PYTHONIOENCODING=encoding),
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == (0 if "--help" in command else 2)
    text = " ".join((done.stdout + done.stderr).decode(encoding).replace("|", " ").split())
    assert "Traceback" not in text
    if command == ["train", "--help"]:
        assert "Stiffness lambda of" in text
    if command == UNLEARNED:
        assert "lambda is not learned" in text


def test_a_poor_environment(tmp_path: Path) -> None:
    """No home, no cache, no terminal, no UTF-8: a whole run."""
    changes = {"TERM": "dumb", "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    poor = {
        name: value
        for name, value in environment(**changes).items()
        if name not in ("HOME", "METANUDGE_CACHE")
    }
    done = subprocess.run(
        [*METANUDGE, *TINY, "--out", "run"],
        env=poor,
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    for word in ("lambda = 2", "nu 0.", "+/-"):
        assert word in text
    assert contents(tmp_path / "run") == DONE


def test_what_an_encoding_lacks_is_spelled_out() -> None:
    output.codecs.register_error("metanudge", output._spell)
    for text, ascii_text in [
        ("λ ± ν → φ…", "lambda +/- nu -> phi..."),
        ("╭─┬│", "+-+|"),
        ("a\udcffb", "a\\xffb"),
        ("日", "?"),
    ]:
        assert text.encode("ascii", "metanudge") == ascii_text.encode()
    assert "λ ± ·".encode("cp1252", "metanudge") == b"lambda \xb1 \xb7"


def redirected(
    redirection: str, command: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    shell = [
        "bash",
        "-c",
        f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}',
        "-",
        *METANUDGE,
        *command,
    ]
    return subprocess.run(
        shell,
        env=environment(),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
        check=False,
    )


def test_a_run_outlives_its_reader(tmp_path: Path) -> None:
    done = redirected("| head -1", [*TINY, "--out", "run"], tmp_path)
    assert (done.returncode, done.stderr) == (
        0,
        "metanudge: nobody reads the output any more; going on without it.\n",
    )
    assert contents(tmp_path / "run") == DONE
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") == 3


def test_closed_streams_take_everything(tmp_path: Path) -> None:
    """And their descriptors are not given to files, where a stray print would end up."""
    assert redirected(">&- 2>&- <&-", ["train", "--help"], tmp_path).returncode == 0
    program = (
        "from metanudge.cli.program import prepare; prepare(); print(1); assert open('file',"
        " 'w').fileno() > 2"
    )
    shell = ["bash", "-c", '"$@" >&- 2>&- <&-', "-", sys.executable, "-c", program]
    assert subprocess.run(shell, cwd=tmp_path, timeout=100, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_to_a_full_disk(tmp_path: Path) -> None:
    done = redirected("> /dev/full", ["--help"], tmp_path)
    assert done.returncode == 6
    assert (
        done.stderr
        == "metanudge: the output cannot be written (No space left on device); going on without"
        " it.\n"
    )


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"]], ids=" ".join)
def test_help_into_a_closed_pipe_says_nothing(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*METANUDGE, *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("columns", ["1", "0", "-3", "x"])
def test_help_on_a_narrow_terminal_comes_to_an_end(columns: str) -> None:
    done = subprocess.run(
        [*METANUDGE, "train", "--help"],
        env=environment(COLUMNS=columns),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert b"--iterations" in done.stdout


def test_names_that_are_no_text(tmp_path: Path) -> None:
    for flags in (["--out", b"bad\xff"], ["--data-options", b"root=\xff"]):
        command = [*METANUDGE, *TINY, *flags]
        done = subprocess.run(
            command,
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )  # type: ignore[arg-type]
        assert done.returncode == 2
        assert "not valid UTF-8" in done.stderr
        assert "xff" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_stream_keeps_what_it_was(tmp_path: Path) -> None:
    output.codecs.register_error("metanudge", output._spell)
    with (tmp_path / "file").open("w") as file:
        stream = output._stream(
            io.TextIOWrapper(io.BytesIO(), "latin-1", line_buffering=True), file.fileno()
        )
        assert (stream.encoding, stream.line_buffering, stream.errors) == (
            "latin-1",
            True,
            "metanudge",
        )
        stream.write("λ\n")
    assert (tmp_path / "file").read_text() == "lambda\n"


def test_the_table_of_exit_codes_is_complete() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = {
        int(code): meaning
        for code, meaning in re.findall(r"^\| (\d+) \| ([^|]+?) \|", text, re.MULTILINE)
    }
    named = {
        value
        for name, value in vars(errors).items()
        if name.startswith("EXIT_") and isinstance(value, int)
    }
    assert table == errors.EXIT_CODES
    assert named == set(table)
    for code, meaning in table.items():
        assert f"{code} {meaning}" in errors.exit_codes()
