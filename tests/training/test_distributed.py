"""Several processes: the same θ as one, and a killed rank costs nothing but time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from metanudge.training import distributed, runs
from metanudge.training.distributed import Group
from metanudge.training.metrics import read_metrics
from training.test_resume import lines

# Three tasks: with two ranks the slices differ in length, with four one rank has none.
FLAGS = [
    "sinusoid", "--shots", "4", "--queries", "4", "--model", "mlp:hidden=(6,),activation=tanh",
    "--solver",
    "gradient_descent:lr=0.05,steps=2,batch_size=3", "--tasks", "3", "--dtype", "float64",
    "--iterations", "20", "--eval-every", "10",
    "--eval-tasks", "20", "--test-tasks", "20", "--checkpoint-every", "4", "--device", "cpu",
]  # fmt: skip


# Seconds for a group of ranks, from start to end: a few on an idle machine, many where it is busy
# with other things.
LIMIT = 150


def train_on(
    world: int, folder: Path, *flags: str, program: Sequence[str] = ("-m", "metanudge")
) -> tuple[list[int | None], list[str]]:
    """Train with one process per rank; their exit codes (None: ended here, out of time) and what
    they said.
    """
    # The rendezvous is served from here, as torchrun does it: the system picks a free port, and
    # nobody can take it before rank 0 does.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    command = [sys.executable, *program, "train", *flags]
    logs = [folder / f"said-{world}-{rank}.txt" for rank in range(world)]
    processes: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    try:
        for rank, log in enumerate(logs):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as said:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=said, stderr=subprocess.STDOUT
                    )
                )
        end = time.monotonic() + LIMIT
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.02)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes, [log.read_text() for log in logs]


def weights(folder: Path) -> torch.Tensor:
    run = runs.load(folder, checkpoint="last", trust=True)
    return torch.cat([p.detach().reshape(-1) for p in run.learner.parameters()])


def nus(folder: Path) -> list[float]:
    return [row["nu"] for row in read_metrics(folder / "metrics.jsonl")]


def own(folder: Path, name: str) -> list[float]:
    found = [row[name] for row in read_metrics(folder / "metrics.jsonl") if name in row]
    assert found, name
    return found


@pytest.mark.timeout(4 * LIMIT)
def test_one_two_and_four_ranks_agree(tmp_path: Path) -> None:
    found = {}
    for world in (1, 2, 4):
        codes, outputs = train_on(
            world,
            tmp_path,
            *FLAGS,
            "--estimator",
            "fobmaml:nu=auto",
            "--augment",
            "noise=0.1",
            "--metrics",
            "mae=torch.nn.functional:l1_loss",
            "--out",
            str(tmp_path / str(world)),
        )
        assert codes == [0] * world, outputs
        assert all("Result" not in output for output in outputs[1:])  # rank 0 alone talks
        found[world] = weights(tmp_path / str(world))
    assert found[1].dtype == torch.float64
    for world in (2, 4):
        assert float((found[world] - found[1]).abs().max()) < 1e-10
        assert lines(tmp_path / str(world) / "metrics.jsonl") == 20
        assert nus(tmp_path / str(world)) == pytest.approx(nus(tmp_path / "1"), rel=1e-12)
        for name in ("query_mae", "val_mae"):
            assert own(tmp_path / str(world), name) == pytest.approx(
                own(tmp_path / "1", name), rel=1e-8
            )


def test_every_rank_stops_when_one_meets_nan(tmp_path: Path) -> None:
    flags = [
        (
            flag
            if flag != "gradient_descent:lr=0.05,steps=2,batch_size=3"
            else "gradient_descent:lr=1e200,steps=3"
        )
        for flag in FLAGS
    ]
    codes, outputs = train_on(
        2, tmp_path, *flags, "--lam", "1e-201", "--out", str(tmp_path / "run")
    )
    assert codes == [4, 4], outputs
    assert "meta-step 1" in outputs[0]
    assert "meta-step" not in outputs[1]


def test_bad_input_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    codes, outputs = train_on(2, tmp_path, *FLAGS, "--out", str(tmp_path / "full"))
    assert codes == [2, 2], outputs
    assert "thesis.tex" in outputs[0]


ATTACK = """
import os, runpy, signal
from metanudge.training import distributed, loop
calls, first = [], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
def attacked(*args, plain={place}):
    calls.append(args)
    if first and os.environ["RANK"] == "1" and len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args)
{place} = attacked
runpy.run_module("metanudge", run_name="__main__", alter_sys=True)
"""
MOMENTS = {
    "meta-step": {"place": "loop.Trainer._meta_step", "call": 15},
    "checkpoint": {"place": "distributed.Group.hand_in", "call": 2},
}


def kill_and_restart(folder: Path, *flags: str, moment: str = "meta-step") -> None:
    """Under torchrun rank 1 is killed, all start again, and the end is that of a whole run."""
    codes, outputs = train_on(2, folder, *FLAGS, *flags, "--out", str(folder / "whole"))
    assert codes == [0, 0], outputs
    (folder / "attack.py").write_text(ATTACK.format(**MOMENTS[moment]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    train = [str(folder / "attack.py"), "train", *FLAGS, *flags, "--out", str(folder / "run")]
    log = folder / "said.txt"
    with log.open("wb") as said:
        launcher = subprocess.Popen(
            [*torchrun, "--max-restarts=3", "--standalone", *train],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        launcher.wait(2 * LIMIT)
    finally:
        launcher.terminate()  # its ranks with it
        launcher.wait()
    assert launcher.returncode == 0, log.read_text()
    assert "resumed at step" in log.read_text()
    assert torch.equal(weights(folder / "run"), weights(folder / "whole"))
    ours, theirs = ((folder / run / "metrics.jsonl").read_bytes() for run in ("run", "whole"))
    assert ours == theirs


@pytest.mark.timeout(4 * LIMIT)
def test_torchrun_restarts_after_the_kill_of_one_rank_and_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    kill_and_restart(tmp_path)


def test_restarted_ranks_meet_in_a_part_of_the_store_of_their_own() -> None:
    """Whoever comes first, nobody answers to what an earlier life left in the store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    delays = [(0.0, 0.0, 0.0), (0.2, 0.0, 0.1), (0.0, 0.2, 0.0)]

    def meet(rank: int, delay: float) -> Any:
        time.sleep(delay)
        return distributed._fresh(TCPStore("127.0.0.1", server.port, is_master=False), rank, 3)

    for life, life_delays in enumerate(delays):
        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(meet, range(3), life_delays, timeout=60))
        assert not any(part.check(["address"]) for part in parts)
        parts[1].set("address", str(life))
        assert [part.get("address") for part in parts] == [str(life).encode()] * 3


def test_slices_cover_every_task_once() -> None:
    for count in range(1, 9):
        for world in range(1, 12):
            assert [i for rank in range(world) for i in Group(rank, world).slice(count)] == list(
                range(count)
            )
