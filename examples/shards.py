"""Many processes: the tasks of a meta-batch, or the model, divided among them; beside one process.

    torchrun --nproc-per-node=2 examples/shards.py [PICTURE]

On CPUs here (gloo); with GPUs say "cuda" and "nccl", and nothing else changes.
"""

import copy
import sys

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import metanudge as mn

META_STEPS = 20
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
source = mn.tasks.MNIST1D(ways=3, shots=5, queries=10, seed=0)
test = source.batch(range(60), "test")
torch.manual_seed(0)  # the same weights on all ranks
start = mn.models.MLP(40, 3, hidden=(128, 128), activation="tanh")


def train(model: torch.nn.Module, **over: object) -> tuple[list[float], float, int]:
    loss, estimator = torch.nn.functional.cross_entropy, mn.FOBMAML(nudge="gradient", nu=0.1)
    learner = mn.MetaLearner(model, loss, lam=1.0, estimator=estimator, engine="inplace")
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    losses = []
    for tasks in source.batches(size=4, count=META_STEPS):  # all ranks are given all tasks
        optimizer.zero_grad()
        losses.append(learner.backward(tasks, **over).query_loss)
        optimizer.step()
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    return losses, learner.evaluate(test).mean_accuracy, held


sharded = copy.deepcopy(start)
for layer in (*(m for m in sharded.modules() if isinstance(m, torch.nn.Linear)), sharded):
    fully_shard(layer, mesh=mesh)
found = {
    "one process": train(copy.deepcopy(start)),
    "tasks divided": train(copy.deepcopy(start), over=mesh["ranks"]),
    "model divided": train(sharded),
}
if dist.get_rank() == 0:
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for (name, (losses, accuracy, held)), line in zip(found.items(), ("-", "--", ":"), strict=True):
        print(f"{name:14} {held:6} parameters held   new tasks {accuracy:.0%}")
        axes.plot(losses, line, linewidth=5 - len(line) * 1.4, label=name)
    axes.set(xlabel="meta-steps", ylabel="query loss after adaptation")
    axes.legend()
    figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "shards.png")
dist.barrier()  # nobody leaves while another one is still at work
dist.destroy_process_group()
