"""Sharded checkpoints: the same bits on as many ranks, the same parameters on fewer or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import metanudge as mn
from metanudge.training.checkpoint import CheckpointError
from metanudge.training.checkpoint.sharded import load_sharded, save_sharded
from ranks import on_ranks


def made(
    *, width: int = 6, mesh: DeviceMesh | None = None
) -> tuple[mn.MetaLearner, torch.optim.Optimizer]:
    """A learner with λ, dropout and buffers, and Adam; sharded where there are ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 3)
        model = nn.Sequential(*layers).double()
    if dist.is_initialized():
        fully_shard(model, mesh=mesh)
    solver = mn.GradientDescent(lr=0.1, steps=1)
    learner = mn.MetaLearner(
        model,
        F.cross_entropy,
        learn_lam="tensor",
        solver=solver,
        estimator=mn.FOBMAML(nu=0.1),
        engine="inplace",
    )
    return learner, torch.optim.Adam(learner.parameter_groups(lr=0.02, lam_lr=0.1))


def train(learner: mn.MetaLearner, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(learner.calls)
    for _ in range(steps):
        x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (2, 5), generator=generator)
        learner.backward(mn.TaskBatch(support=(x, y), query=(-x, y)))
        optimizer.step()
        optimizer.zero_grad()


def values(learner: mn.MetaLearner, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = dict(learner.state_dict())
    for name, p in learner.named_parameters():
        tensors |= {f"{name} {key}": value for key, value in optimizer.state[p].items()}
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for n, t in tensors.items()
    }


def written(folder: Path) -> list[dict[str, Tensor]]:
    """Two steps, a checkpoint, two more steps: what there was at both ends."""
    learner, optimizer = made()
    train(learner, optimizer, 2)
    save_sharded(folder, learner, optimizer, step=2, state={"note": "ν", "x": torch.ones(2)})
    before = values(learner, optimizer)
    train(learner, optimizer, 2)
    return [before, values(learner, optimizer)]


def gone_on(folder: Path) -> list[Any]:
    """The checkpoint, read by others, and two more steps; refusals."""
    learner, optimizer = made()
    step, state = load_sharded(folder, learner, optimizer)
    assert (step, state["note"]) == (2, "ν")
    assert torch.equal(state["x"], torch.ones(2))
    results = [values(learner, optimizer)]
    train(learner, optimizer, 2)
    results.append(values(learner, optimizer))
    with pytest.raises(CheckpointError, match=r"of another shape: model.0.weight \(6, 4\)"):
        load_sharded(folder, *made(width=5))
    with pytest.raises(CheckpointError, match="has no state for this optimizer"):
        load_sharded(folder, learner, torch.optim.SGD(learner.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="the folder exists already"):
        save_sharded(folder, learner)
    return results


def both(folder: Path) -> list[Any]:
    """Written, read again, and written once more from a mesh of tasks × shards."""
    results = [*written(folder), *gone_on(folder)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tasks", "shards"))
    learner, optimizer = made(mesh=mesh["shards"])
    load_sharded(folder, learner, optimizer)
    save_sharded(folder.with_name("from a mesh"), learner, optimizer)
    return results


@pytest.mark.timeout(600)
def test_four_ranks_two_and_one(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for at_save, at_end, loaded, again in on_ranks(4, both, folder):
        for name, value in at_save.items():
            assert torch.equal(value, loaded[name]), name
        for name, value in at_end.items():
            assert torch.equal(value, again[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from a mesh", "saved"]
    learner, optimizer = made()
    load_sharded(tmp_path / "from a mesh", learner, optimizer)
    for name, value in values(learner, optimizer).items():
        assert torch.equal(value, at_save[name]), name
    for loaded, again in [*on_ranks(2, gone_on, folder), gone_on(folder)]:
        for name, value in at_save.items():
            assert torch.equal(value, loaded[name]), name
        for name, value in at_end.items():
            # sums of a few dozen terms in another order, divided by ν and, in Adam, by the gradient
            torch.testing.assert_close(value, again[name], rtol=0, atol=1e-10)


TRAINING = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from training.checkpoint.test_sharded import made, train, values
from metanudge.training.checkpoint.sharded import load_sharded, save_sharded
from metanudge.training.distributed import Group

folder = Path(sys.argv[1])
torch.set_num_threads(1)
Group.from_environment()  # heeds nothing that killed ranks have left in torchrun's store
learner, optimizer = made()
saved = folder / "saved"
done = load_sharded(saved, learner, optimizer)[0] if saved.exists() else 0
for step in range(done, 4):
    train(learner, optimizer, 1)
    if step == 1:
        save_sharded(saved, learner, optimizer, step=2)
    elif step == 2 and done == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
end = values(learner, optimizer)
if dist.get_rank() == 0:
    torch.save((done, end), folder / "end.pt")
dist.destroy_process_group()
"""


def undisturbed() -> dict[str, Tensor]:
    learner, optimizer = made()
    for _ in range(4):
        train(learner, optimizer, 1)
    return values(learner, optimizer)


@pytest.mark.timeout(600)
def test_torchrun_goes_on_after_the_kill_of_one_rank(tmp_path: Path) -> None:
    tests = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (tests, tests.parent / "src")))
    (tmp_path / "run.py").write_text(TRAINING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "--max-restarts=3", "--standalone", "run.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    begun, end = torch.load(tmp_path / "end.pt")
    assert begun == 2
    for name, value in on_ranks(2, undisturbed)[0].items():
        assert torch.equal(value, end[name]), name
