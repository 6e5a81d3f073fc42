"""A stiffness for every layer, learned together with the initialisation, on few-shot MNIST-1D.

    python examples/learned_stiffness.py

λ says how firmly a task's parameters are tied to the initialisation. Here every tensor has its own,
started at one value for all and meta-learned with the same nudged solves that make the
meta-gradient of θ. Where λ falls, a layer adapts freely; where it rises, tasks share it. Prints the
learned λ of every tensor, and the accuracy beside that of the fixed λ it was started from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import metanudge as mn


def make_learner(lam: float, learn_lam: Literal["tensor"] | None, *, seed: int) -> mn.MetaLearner:
    """A small perceptron with a smooth activation and enough inner steps: λ's gradient is that of
    converged inner solves.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mn.models.MLP(40, 3, hidden=(32,), activation="tanh")
    return mn.MetaLearner(
        model,
        torch.nn.functional.cross_entropy,
        lam=lam,
        learn_lam=learn_lam,
        solver=mn.Nesterov(lr=0.05, steps=20),
        estimator=mn.FOBMAML(nu=0.05, nudge="gradient"),
    )


def train(
    learner: mn.MetaLearner, batches: Iterable[mn.TaskBatch], progress: Callable[[], None]
) -> None:
    """Adam on θ and, with a learning rate of its own, on log λ."""
    rates = {"lr": 3e-3} if learner.log_lam is None else {"lr": 3e-3, "lam_lr": 3e-2}
    optimizer = torch.optim.Adam(learner.parameter_groups(**rates))
    for tasks in batches:
        optimizer.zero_grad()
        learner.backward(tasks, metrics=False)
        optimizer.step()
        progress()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lam", type=float, default=5.0, help="λ of all tensors at the start")
    parser.add_argument("--steps", type=int, default=200, help="meta-steps")
    parser.add_argument("--tasks", type=int, default=16, help="tasks per meta-step")
    parser.add_argument("--test-tasks", type=int, default=500)
    parser.add_argument("--samples", type=int, default=4000, help="examples of MNIST-1D")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    console = Console()
    source = mn.tasks.MNIST1D(
        ways=3, shots=5, queries=10, seed=options.seed, num_samples=options.samples
    )
    test = source.batch(range(options.test_tasks), "test")

    learners = {
        "fixed": make_learner(options.lam, None, seed=options.seed),
        "learned": make_learner(options.lam, "tensor", seed=options.seed),
    }
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for kind, learner in learners.items():
            bar = progress.add_task(f"λ {kind}", total=options.steps)
            train(
                learner,
                source.batches(size=options.tasks, count=options.steps),
                partial(progress.advance, bar),
            )

    stiffness = {name: float(lam) for name, lam in learners["learned"].stiffness().items()}
    table = Table(title=f"Stiffness, {options.lam:g} at the start", box=box.SIMPLE_HEAD)
    table.add_column("parameter")
    table.add_column("λ", justify="right")
    for name, lam in stiffness.items():
        table.add_row(name, f"{lam:.3g}")
    console.print(table)
    results = {kind: learner.evaluate(test) for kind, learner in learners.items()}
    for kind, result in results.items():
        console.print(f"λ {kind:8}", str(result), soft_wrap=True)
    return {
        "stiffness": stiffness,
        "accuracy": {kind: result.mean_accuracy for kind, result in results.items()},
    }


if __name__ == "__main__":
    main()
