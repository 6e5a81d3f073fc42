"""Runs as configured: files, bad options, a fresh process, a machine with torch and numpy only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import metanudge
import metanudge_lab
from metanudge.training.errors import UserError
from metanudge_lab.bench import tables
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.first_step import first_steps
from metanudge_lab.bench.plots import draw
from metanudge_lab.bench.run import run
from metanudge_lab.progress import Lines

QUICK = BenchConfig(quick=True, repeats=2, warmup=1, first_step=False, device="cpu", threads=1)


def test_a_run_writes_each_result_and_puts_the_threads_back(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    config = replace(
        QUICK, case=("sinusoid", "mnist1d"), only=("reptile",), out=tmp_path / "new" / "folder"
    )
    results = dict(run(config, Lines()))
    assert [file.name for file in results] == [
        "sinusoid-cpu-fp32-quick.json",
        "mnist1d-cpu-fp32-quick.json",
    ]
    for file, result in results.items():
        assert json.loads(file.read_text()) == result
    assert torch.get_num_threads() == threads
    file = next(iter(results))
    draw(results[file], file.with_suffix(".png"))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"case": ("omnigot",)}, "Did you mean 'omniglot'"),
        ({"only": ("fomalm",)}, "Did you mean 'fomaml'"),
        ({"repeats": 0}, "--repeats 0"),
        ({"threads": 0}, "--threads 0"),
        (
            {"explain": True, "scaling": True},
            "--explain and --scaling measure different things. Use one at a time",
        ),
        ({"scaling": True, "rounding": True}, "--scaling and --rounding measure different things"),
        ({"explain": True, "scaling": True, "rounding": True}, "one at a time"),
        ({"rounding": True, "precision": "bf16"}, "every precision"),
        (
            {"rounding": True, "only": ("loop-maml",)},
            "loop-maml is torch's. Use fobmaml, fobmaml-loss",
        ),
        ({"rounding": True, "batches": 0}, "--batches 0"),
        ({"batches": 4}, "use --repeats"),
        ({"explain": True, "only": ("graph-maml",)}, "needs a CUDA device"),
    ],
)
def test_bad_options_are_explained(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        list(run(replace(QUICK, out=tmp_path, **options), Lines()))


def test_a_fresh_process_has_a_first_step() -> None:
    rows = first_steps("reptile", "sinusoid", device="cpu", precision="fp32", quick=True, threads=1)
    assert [row["caches"] for row in rows] == ["empty", "filled"]
    assert all(0 < row["import_s"] < row["first_step_s"] for row in rows)
    assert all(0 < row["second_step_s"] < row["first_step_s"] for row in rows)
    assert "empty" in str(tables.first_steps({"first_step": rows}))


def test_a_first_step_that_fails_does_not_lose_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "metanudge_lab.bench.first_step._PROGRAM", "raise SystemExit('no such device')"
    )
    config = replace(QUICK, first_step=True, case=("sinusoid",), only=("reptile",), out=tmp_path)
    ((_, result),) = run(config, Lines())
    assert "first_step" not in result
    assert "no such device" in result["failed"][0]["error"]
    assert "The first meta-step of a fresh process failed" in str(tables.comparison(result))


PROGRAM = """
import sys
for name in ("rich", "tyro", "matplotlib", "jinja2", "safetensors", "PIL", "pooch"):
    sys.modules[name] = None
from metanudge_lab.bench.__main__ import main
rounding = ["--rounding", "--quick", "--case", "sinusoid", "--only", "fomaml", "--batches", "2"]
rounding += ["--device", "cpu"]
sys.exit(main(sys.argv[1:]) or main([*rounding, "--out", sys.argv[-1]]))
"""


def test_measuring_needs_torch_and_numpy_only(tmp_path: Path) -> None:
    arguments = [
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
    arguments += ["--device", "cpu", "--out"]
    paths = os.pathsep.join(
        str(Path(package.__file__).parents[1]) for package in (metanudge, metanudge_lab)
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *arguments, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FO-MAML, loop over tasks" in done.stdout
    assert "rounding errors of the meta-gradient" in done.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "sinusoid-cpu-fp32-quick.json",
        "sinusoid-rounding-cpu-quick.json",
    ]
