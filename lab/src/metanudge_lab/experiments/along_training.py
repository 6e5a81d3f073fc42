"""Gradient quality along the training of real networks: every estimator against both exact
meta-gradients.
"""

from __future__ import annotations

import torch

from metanudge_lab.device_memory import release
from metanudge_lab.experiments.along_figures import draw, table
from metanudge_lab.experiments.along_runs import METHODS, NETWORKS, Config, qualities
from metanudge_lab.experiments.along_verdict import CLOSE, REACHED, compare, enough, judge
from metanudge_lab.experiments.base import Cell, Experiment, Row


def cells(config: Config) -> list[Cell]:
    """One for each estimator; those of a network and a seed share a training, so they follow one
    another.
    """
    return [
        {"network": network, "seed": seed, "method": method}
        for network in NETWORKS
        if network in config.networks
        for seed in range(config.seeds)
        for method in METHODS
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Cosines and errors at every point of a training."""
    release(device)
    network, method = str(cell["network"]), str(cell["method"])
    return qualities(network, method, int(cell["seed"] or 0), config, device)


EXPERIMENT = Experiment(
    name="along-training",
    title="Gradient quality along training",
    where="not in the paper",
    claim=(
        "Ours: all along the training of real networks the first-order estimate that is made"
        " for a target is the closest to it: MAML by differences to the gradient of the K steps,"
        " FO-B-MAML to the implicit gradient at the inner optimum, each closer than FO-MAML and"
        " Reptile; and MAML by differences is close enough to trust (relative error at most"
        f" {CLOSE:g})."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    compare=compare,
    unit=("network", "seed"),
    enough=enough,
    notes=(
        "Three convolutions with BatchNorm on MNIST-1D (3-way 5-shot, inner rate 0.1), as they"
        " are and with GELU and average pooling; Conv4 with 32 filters on Omniglot (5-way"
        " 1-shot, inner rate 0.05); two layers of width 32 on Markov chains of 16 symbols (λ ="
        " 0.5, inner rate 0.3); else λ = 2, K = 5. Training is by autograd through the steps,"
        " which favours no estimate, with Adam and a cosine, 4 tasks a meta-step; gradients are"
        " compared on 2 validation tasks. The exact gradients are in float64: through the K"
        " steps with the inner rate of training, and at the point that 400 steps of L-BFGS find,"
        " by conjugate gradient. Estimates are in float32 with the inner rate of training, as in"
        f" training. Where the residual at that point is not below {REACHED:g} of that at θ,"
        " there is no inner optimum to speak of: with ReLU and max-pooling the steps end at a"
        " kink, whose gradient jumps, and the implicit gradient is that of a point nearby. What"
        " is compared is the geometric mean of the errors along a training, paired by seed. The"
        " experiment “transformer” has a larger GPT, at three inner rates and in coarser"
        " precisions."
    ),
)
