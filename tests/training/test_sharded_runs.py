"""`--shard N`: the run of one process on N of them, stopped and resumed on any number; and what
happens to one rank happens to all.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import metanudge as mn
from metanudge.training import runs
from metanudge.training.checkpoint import files, load
from metanudge.training.config import TrainConfig
from metanudge.training.distributed import Group
from metanudge.training.errors import StopTraining, UserError
from metanudge.training.loop import OutOfMemory, Trainer
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import Quiet
from metanudge.training.trainer import train
from ranks import on_ranks
from training.test_distributed import kill_and_restart
from training.test_trainer import fingerprint

pytestmark = pytest.mark.timeout(600)  # ranks that wait for each other are slow on a busy machine

# λ beside sharded parameters, clipping, a first layer that two and four ranks cannot halve
RUN = TrainConfig(
    "sinusoid", shots=4, queries=4, model="mlp:hidden=(7,5),activation=tanh", dtype="float64",
    estimator="fobmaml:nu=0.05", solver="gradient_descent:lr=0.05,steps=2,batch_size=3", tasks=3,
    learn_lam="tensor", lam_lr=0.1, clip=0.3, iterations=6, eval_every=3, eval_tasks=7,
    test_tasks=5, checkpoint_every=2, metrics_every=1, baselines="none", device="cpu",
)  # fmt: skip
# Sums of a few dozen terms of order one in another order, 1e-15, divided by ν = 0.05 and by the
# roots of Adam's squares, the least of which is 2e-4, times its rate of 0.01 (0.1 for λ), six
# times: 6e-11 for λ, less for θ.
CLOSE = 1e-10


def on_this_rank(config: TrainConfig, **options: Any) -> int | str:
    """The exit code of a run; what it is refused with."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    kept, Group.close = Group.close, lambda self: None  # type: ignore[method-assign]
    try:
        return train(config, reporter=Quiet(), **options)
    except StopTraining as stopped:
        return stopped.code
    except UserError as error:
        return str(error)
    finally:
        Group.close = kept  # type: ignore[method-assign]


def at_step(step: int, rank: int, happens: Callable[[], object]) -> None:
    """Have something happen on one rank, once, before a meta-step."""
    plain, waiting = Trainer._meta_step, [step]

    def meta_step(self: Trainer) -> Any:
        if dist.get_rank() == rank and waiting == [self.step]:
            waiting.clear()
            happens()
        return plain(self)

    Trainer._meta_step = meta_step  # type: ignore[method-assign]


def run_out_of_memory() -> None:
    raise OutOfMemory("on purpose")


def runs_of_two(folder: Path) -> dict[str, Any]:
    """Whole; stopped by a signal to one rank, and resumed; where a number is not finite, where the
    disk is full, and what is refused.
    """
    found: dict[str, Any] = {}
    config = dataclasses.replace(RUN, shard=2)

    def go(name: str, **changes: Any) -> None:
        found[name] = on_this_rank(dataclasses.replace(config, out=str(folder / name), **changes))

    go("whole")
    at_step(4, 1, lambda: signal.raise_signal(signal.SIGTERM))
    go("stopped")
    resumed = dataclasses.replace(config, out=str(folder / "stopped"))
    found["left"] = len(read_metrics(folder / "stopped" / "metrics.jsonl"))
    dist.barrier()
    found["resumed"] = on_this_rank(resumed, resume=folder / "stopped")
    go("nan", solver="gradient_descent:lr=1e200,steps=3", lam=1e-201)
    for name, changes in REFUSED.items():
        go(name, **changes)
    at_step(3, dist.get_rank(), run_out_of_memory)
    go("memory")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    at_step(2, 0, lambda: setattr(files.disk, "write", full))
    go("full disk")
    return found


REFUSED: dict[str, dict[str, Any]] = {
    "divides a model among 3 processes, and there are 2": {"shard": 3},
    "--engine stacked and --shard 2 contradict each other": {"engine": "stacked"},
    "Exact needs the stacked engine": {"estimator": "exact"},
    "no Hessian products by autograd": {"estimator": "imaml"},
    "LBFGS looks at whole tensors": {"solver": "lbfgs"},
    "--optimizer rprop": {"optimizer": "rprop"},
    'learn_lam="parameter" is not served': {"learn_lam": "parameter"},
    'learn_lr="parameter" is not served': {
        "estimator": "maml:products=difference", "learn_lr": "parameter", "learn_lam": "none",
        "lam_lr": None,
    },
}  # fmt: skip


def weights(run: Path) -> torch.Tensor:
    learner = mn.load_run(run, checkpoint="last").learner
    return torch.cat([p.detach().flatten() for p in learner.parameters()])


def assert_close(run: Path, other: Path) -> None:
    """Weights, λ, and what was written down of every meta-step."""
    assert float((weights(run) - weights(other)).abs().max()) < CLOSE
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (run, other))
    assert len(ours) == len(theirs)
    for row, same in zip(ours, theirs, strict=True):
        assert row.keys() == same.keys()
        known = {name: value for name, value in same.items() if value is not None}
        assert {name: row[name] for name in known} == pytest.approx(known, rel=1e-8)


def alone(folder: Path) -> Path:
    assert train(dataclasses.replace(RUN, engine="inplace", out=str(folder)), reporter=Quiet()) == 0
    return folder


def test_two_ranks_are_one_process_and_stop_together(tmp_path: Path) -> None:
    ranks = on_ranks(2, runs_of_two, tmp_path)
    for rank in ranks:
        for part in REFUSED:
            assert part in rank.pop(part)
            assert not (tmp_path / part).exists()
        assert rank == {
            "whole": 0, "stopped": 143, "left": 5, "resumed": 0, "nan": 4,
            "memory": 5, "full disk": 6,
        }  # fmt: skip
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")
    assert_close(tmp_path / "whole", alone(tmp_path / "alone"))
    left = tmp_path / "memory"  # at the checkpoint of meta-step 2
    config = runs.read_config(left)
    with pytest.raises(UserError, match="and there is one"):
        train(config, resume=left, reporter=Quiet())
    config = dataclasses.replace(config, shard=1, engine="inplace")
    assert train(config, resume=left, reporter=Quiet()) == 0
    assert_close(left, tmp_path / "whole")
    run = mn.load_run(tmp_path / "whole")
    assert run.config.shard == 2
    assert run.evaluate(tasks=3).tasks == 3


def every_layout(folder: Path) -> list[Any]:
    """On four ranks: 2 × 2, then 4 shards, and two meta-steps for others to go on from."""
    found = []
    for shard, iterations in ((2, 6), (4, 6), (4, 2)):
        out = folder / f"{shard} {iterations}"
        changes = {"shard": shard, "iterations": iterations, "out": str(out), "test_tasks": 0}
        found.append(on_this_rank(dataclasses.replace(RUN, **changes)))
    few = dataclasses.replace(RUN, shard=2, tasks=1, out=str(folder / "few"))
    return [*found, on_this_rank(few)]


def gone_on(run: Path, iterations: int) -> Any:
    """Resumed on all of these ranks."""
    config = dataclasses.replace(runs.read_config(run), iterations=iterations)
    saved = load(max((run / "checkpoints").iterdir()))
    code = on_this_rank(dataclasses.replace(config, shard=dist.get_world_size()), resume=run)
    return code, saved.step


def test_from_four_ranks_to_two_to_one(tmp_path: Path) -> None:
    for rank in on_ranks(4, every_layout, tmp_path):
        assert rank[:3] == [0, 0, 0]
        assert "--tasks 1 cannot be split over 2 groups" in rank[3]
    reference = alone(tmp_path / "alone")
    assert_close(tmp_path / "2 6", reference)
    assert_close(tmp_path / "4 6", reference)
    run = tmp_path / "4 2"
    before = weights(run)
    assert on_ranks(2, gone_on, run, 4) == [(0, 2)] * 2
    assert not torch.equal(weights(run), before)
    config = dataclasses.replace(runs.read_config(run), iterations=6, shard=1)
    assert train(config, resume=run, reporter=Quiet()) == 0
    assert float((weights(run) - weights(reference)).abs().max()) < CLOSE


@pytest.mark.parametrize("moment", ["meta-step", "checkpoint"])
@pytest.mark.skipif(sys.platform == "win32", reason="torchrun has no signals there")
def test_torchrun_goes_on_after_the_kill_of_a_rank(tmp_path: Path, moment: str) -> None:
    kill_and_restart(tmp_path, "--shard", "2", moment=moment)
