"""Several processes: the same θ as one, and a killed rank costs nothing but time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from metanudge.training import runs
from metanudge.training.distributed import Group
from training.test_resume import finish, lines

# Three tasks: with two ranks the slices differ in length, with four one rank has none.
FLAGS = [
    "sinusoid", "--shots", "4", "--queries", "4", "--model", "mlp:hidden=(6,),activation=tanh", "--solver",
    "gradient_descent:lr=0.05,steps=2,batch_size=3", "--tasks", "3", "--dtype", "float64", "--iterations", "20", "--eval-every", "10",
    "--eval-tasks", "20", "--test-tasks", "20", "--checkpoint-every", "4", "--device", "cpu",
]  # fmt: skip


def launch(world: int, *flags: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "metanudge", "train", *flags]
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in runs.load(folder, checkpoint="last").learner.parameters()])


@pytest.mark.timeout(280)
def test_one_two_and_four_ranks_agree(tmp_path: Path) -> None:
    found = {}
    for world in (1, 2, 4):
        processes = launch(world, *FLAGS, "--out", str(tmp_path / str(world)))
        outputs = [finish(process) for process in processes]
        assert [process.returncode for process in processes] == [0] * world, outputs
        assert all("Result" not in output for output in outputs[1:])  # rank 0 alone talks
        found[world] = weights(tmp_path / str(world))
    assert found[1].dtype == torch.float64
    for world in (2, 4):
        assert float((found[world] - found[1]).abs().max()) < 1e-10
        assert lines(tmp_path / str(world) / "metrics.jsonl") == 20


def test_every_rank_stops_when_one_meets_nan(tmp_path: Path) -> None:
    flags = [flag if flag != "gradient_descent:lr=0.05,steps=2,batch_size=3" else "gradient_descent:lr=1e200,steps=3" for flag in FLAGS]
    processes = launch(2, *flags, "--out", str(tmp_path / "run"))
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [4, 4], outputs
    assert "meta-step 1" in outputs[0]
    assert "meta-step" not in outputs[1]


def test_bad_input_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    processes = launch(2, *FLAGS, "--out", str(tmp_path / "full"))
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert "thesis.tex" in outputs[0]


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks' process ids in /proc")
@pytest.mark.timeout(280)
def test_torchrun_restarts_after_the_kill_of_one_rank_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    flags = [flag if flag != "20" else "60" for flag in FLAGS]
    whole = launch(2, *flags, "--out", str(tmp_path / "whole"))
    outputs = [finish(process) for process in whole]
    assert [process.returncode for process in whole] == [0, 0], outputs
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--standalone"]
    launcher = subprocess.Popen(
        [*torchrun, "-m", "metanudge", "train", *flags, "--out", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while lines(run / "metrics.jsonl") < 15:
        assert launcher.poll() is None, finish(launcher)
        time.sleep(0.002)
    os.kill(children(launcher.pid)[-1], signal.SIGKILL)
    output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, output
    assert "resumed at step" in output
    assert torch.equal(weights(run), weights(tmp_path / "whole"))
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_slices_cover_every_task_once() -> None:
    for count in range(1, 9):
        for world in range(1, 12):
            assert [i for rank in range(world) for i in Group(rank, world).slice(count)] == list(range(count))
