"""Ridge and logistic regression with a penalty for every feature, learned by hypergradient descent
on a validation set.

    python examples/ridge.py

    inner:  φ*(x) = argmin_φ  mean loss on the training set + ½ Σ_j exp(x_j) φ_j²
    outer:  F(x) = mean loss of φ*(x) on the validation set

Most features are noise. One penalty for all must spare them or shrink the others; with one each,
hypergradient descent finds out which feature is which. Prints a table of losses, and how well the
penalties tell informative features from noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import metanudge as mn

Loss = Callable[[Tensor, Tensor], Tensor]
INFORMATIVE = 5
TEST = 2000
LOSSES: dict[str, Loss] = {
    "ridge": lambda prediction, y: 0.5 * (prediction - y).square().mean(),
    "logistic": lambda prediction, y: F.softplus(-y.sign() * prediction).mean(),
}


def draw(features: int, sizes: Sequence[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Data sets of these sizes; only the first features carry information."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.zeros(features, dtype=torch.float64)
    teacher[:INFORMATIVE] = torch.tensor([2.0, -1.5, 1.0, 1.5, -2.0])
    sets = []
    for size in sizes:
        inputs = torch.randn(size, features, generator=generator, dtype=torch.float64)
        sets.append(
            (inputs, inputs @ teacher + torch.randn(size, generator=generator, dtype=torch.float64))
        )
    return sets


def learn(
    loss: Loss,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    x: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Adam on the log-penalties; returns them and the inner solution."""

    def inner(x: Tensor, phi: Tensor) -> Tensor:
        return loss(train[0] @ phi, train[1]) + 0.5 * (x.exp() * phi.square()).sum()

    def outer(x: Tensor, phi: Tensor) -> Tensor:
        return loss(validation[0] @ phi, validation[1])

    x, solver, estimator = (
        x.clone(),
        mn.LBFGS(tol=1e-6),
        mn.FOBMAML(nu=1e-2, nudge="gradient", start="solution"),
    )
    optimizer = torch.optim.Adam([x], lr=0.4)
    phi = torch.zeros(train[0].shape[1], dtype=torch.float64)
    for _ in range(steps):
        result = mn.hypergradient(inner, outer, x, phi, solver=solver, estimator=estimator)
        x.grad, phi = result.gradient, result.phi  # the next solve starts where this one ended
        optimizer.step()
    return x, mn.hypergradient(inner, outer, x, phi, solver=solver, estimator=estimator).phi


def main(argv: Sequence[str] | None = None) -> list[dict[str, str | float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--features", type=int, default=20, help=f"{INFORMATIVE} of them informative; default 20"
    )
    parser.add_argument("--train", type=int, default=30, help="training examples; default 30")
    parser.add_argument(
        "--validation", type=int, default=200, help="validation examples; default 200"
    )
    parser.add_argument("--steps", type=int, default=25, help="outer steps; default 25")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    train, validation, test = draw(
        options.features, (options.train, options.validation, TEST), options.seed
    )
    start = torch.tensor(-2.0, dtype=torch.float64)
    rows: list[dict[str, str | float]] = []
    for name, loss in LOSSES.items():
        for penalty, x, steps in (
            ("fixed", start, 0),
            ("one, learned", start, options.steps),
            ("each, learned", start.expand(options.features), options.steps),
        ):
            found, phi = learn(loss, train, validation, x, steps)
            found = found.expand(options.features)
            rows.append(
                {
                    "problem": name,
                    "penalty": penalty,
                    "validation": float(loss(validation[0] @ phi, validation[1])),
                    "test": float(loss(test[0] @ phi, test[1])),
                    "informative": float(found[:INFORMATIVE].mean().exp()),
                    "noise": float(found[INFORMATIVE:].mean().exp()),
                }
            )

    table = Table(
        title=f"{options.train} training examples, {options.features} features",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in rows[0]:
        table.add_column(
            column, justify="left" if column in ("problem", "penalty") else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(
            *(value if isinstance(value, str) else f"{value:.3g}" for value in row.values())
        )
    console = Console()
    console.print(table)
    console.print("validation, test: mean losses.")
    console.print("informative, noise: geometric mean of the penalties on features of each kind.")
    return rows


if __name__ == "__main__":
    main()
