"""`metanudge bench`: the command, and the same options in `python -m metanudge_lab.bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro

from metanudge.cli import main
from metanudge_lab.bench.__main__ import main as plain_main
from metanudge_lab.bench.__main__ import parser
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, ReadyContender
from metanudge_lab.bench.workload import Workload

QUICK = [
    "--quick",
    "--case",
    "sinusoid",
    "--only",
    "fomaml",
    "loop-fomaml",
    "--repeats",
    "1",
    "--warmup",
    "1",
    "--no-first-step",
]


def test_it_prints_a_table_and_writes_numbers_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *QUICK, "--device", "cpu", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for needed in (
        "FO-MAML, loop over tasks",
        "× roofline",
        "peak memory",
        "sinusoid-cpu-fp32-quick.json",
        "sinusoid-cpu-fp32-quick.png",
    ):
        assert needed in text
    picture, file = (tmp_path / f"sinusoid-cpu-fp32-quick.{kind}" for kind in ("png", "json"))
    picture.unlink()
    assert main(["bench", "--draw", str(file)]) == 0
    assert picture.is_file()
    assert "FO-MAML, loop over tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [
            "--case",
            "omniglot",
            "mnist1d",
            "--only",
            "maml",
            "--repeats",
            "3",
            "--limit-seconds",
            "7",
            "--precision",
            "tf32",
        ],
        [
            "--quick",
            "--no-first-step",
            "--threads",
            "2",
            "--tasks",
            "4",
            "--out",
            "elsewhere",
            "--explain",
        ],
    ],
)
def test_both_ways_to_call_it_understand_the_same_options(argv: list[str]) -> None:
    assert BenchConfig(**vars(parser().parse_args(argv))) == tyro.cli(BenchConfig, args=argv)


def test_every_option_is_explained() -> None:
    text = parser().format_help()
    for option in (
        "--limit-seconds",
        "--no-first-step",
        "TF32",
        "Where to compute.",
        "results/bench",
    ):
        assert option in text


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--case", "omnigot"]) == 2
    assert "Did you mean 'omniglot'" in capsys.readouterr().err
    assert main(["bench", "--draw", str(tmp_path / "none.json")]) == 2
    assert "There is no file" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("[1]")
    assert main(["bench", "--draw", str(tmp_path / "other.json")]) == 2
    assert "not a result of metanudge bench" in capsys.readouterr().err
    assert plain_main(["--draw", "any.json"]) == 2
    assert "metanudge bench --draw" in capsys.readouterr().err
    assert plain_main(["--case", "omnigot"]) == 2


def test_an_estimator_of_ours_that_fails_is_shown_and_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(workload: Workload) -> ReadyContender:
        raise RuntimeError("cannot be done")

    monkeypatch.setattr(
        "metanudge_lab.bench.run.CONTENDERS",
        (Contender("broken", "Broken", "metanudge", "MAML", broken),),
    )
    assert (
        main(
            [
                "bench",
                "--quick",
                "--case",
                "sinusoid",
                "--no-first-step",
                "--device",
                "cpu",
                "--out",
                str(tmp_path),
            ]
        )
        == 1
    )
    assert "Broken failed: RuntimeError: cannot be done" in capsys.readouterr().out
