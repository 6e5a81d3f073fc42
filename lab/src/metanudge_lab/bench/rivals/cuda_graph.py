"""The `vmap` MAML recorded once as a CUDA graph and replayed: no Python and no launches between its
kernels.
"""

from __future__ import annotations

import torch

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender
from metanudge_lab.bench.rivals import counts, vmap
from metanudge_lab.bench.workload import Workload


def prepare(workload: Workload, *, second_order: bool) -> ReadyContender:
    """Record a step; every replay first copies the tasks to where the recording reads them, as a
    training loop must.
    """
    model, theta = vmap.model_and_theta(workload)
    compute = vmap.meta_gradient(workload, model, second_order=second_order)
    tasks = [*workload.support, *workload.query]
    inputs = [tensor.clone() for tensor in tasks]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute(theta, *inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute(theta, *inputs)

    # A recording does not keep the memory that it reads: weights and buffers must outlive it.
    def step(read: object = (model, theta)) -> Gradient:
        torch._foreach_copy_(inputs, tasks)
        graph.replay()
        return result

    return ReadyContender(
        step,
        lambda: counts.maml(workload) if second_order else counts.fomaml(workload),
        engine=lambda: "CUDA graph",
    )


CONTENDERS = (
    Contender(
        "graph-maml",
        "MAML, vmap in a CUDA graph",
        "torch",
        "MAML",
        lambda w: prepare(w, second_order=True),
        cuda_only=True,
    ),
    Contender(
        "graph-fomaml",
        "FO-MAML, vmap in a CUDA graph",
        "torch",
        "FO-MAML",
        lambda w: prepare(w, second_order=False),
        cuda_only=True,
    ),
)
