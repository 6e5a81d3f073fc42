"""Data hyper-cleaning: find wrong labels by learning a weight for every training example, on
MNIST-1D with 40 % wrong labels.

    python lab/examples/hyper_cleaning.py --out runs/hyper_cleaning

    inner:  φ*(x) = argmin_φ  mean_i σ(x_i) ℓ_i(φ) + l2 ‖φ‖²  on training data, 40 % mislabelled
    outer:  F(x) = mean loss of φ*(x) on a small validation set with right labels

The model is a softmax classifier on fixed random convolutional features. Every method solves the
same inner problem with the same solver and the same outer Adam. Prints a table, writes
`hyper_cleaning.json` (the same numbers, and where they come from) and a plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import metanudge as mn
from metanudge.tasks.mnist1d_recipe import NUM_CLASSES, generate
from metanudge.testing.memory import peak_memory
from metanudge_lab.provenance import provenance

METHODS = {
    "FO-B-MAML symmetric": mn.FOBMAML(nu=0.1),
    "FO-B-MAML gradient nudge": mn.FOBMAML(nu=0.1, nudge="gradient"),
    "FO-B-MAML tangent": mn.FOBMAML(stencil="tangent"),
    "MAML": mn.MAML(),
    "iMAML, 10 CG steps": mn.IMAML(cg_steps=10),
}
REFERENCES = ("all labels as they are", "validation examples alone", "all labels right")


@dataclass(frozen=True)
class Config:
    train: int = 1000
    validation: int = 500
    wrong: float = 0.4  # share of training labels that are wrong
    mistakes: str = "systematic"  # a wrong label is the next class; "random": any other class
    filters: int = 64
    l2: float = 3e-3
    inner_steps: int = 30
    outer_steps: int = 15
    outer_lr: float = 0.5
    # every final classifier takes the best for it on the selection set
    final_l2: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    selection: int = 500
    seeds: int = 3


@dataclass(frozen=True)
class Data:
    """Features with a constant 1, `(n, features)`, and labels, of each part."""

    train: Tensor
    given: Tensor  # labels as they are
    right: Tensor
    clean: Tensor  # where both agree
    validation: tuple[Tensor, Tensor]
    selection: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass
class Run:
    """One method on one seed."""

    method: str
    seed: int
    auroc: float
    accuracy: float
    cosine: float  # of its first hypergradient with the exact one
    seconds: float  # CPU time of one hypergradient, median
    megabytes: float  # peak memory of one hypergradient
    weights: list[float]


def load(config: Config, seed: int) -> Data:
    arrays = generate(5000)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(arrays.y_train), generator=draw)
    x, y = torch.from_numpy(arrays.x_train).float()[order], torch.from_numpy(arrays.y_train)[order]
    filters, bias = (
        torch.randn(config.filters, 1, 7, generator=draw) / 7**0.5,
        torch.randn(config.filters, generator=draw),
    )

    def features(inputs: Tensor) -> Tensor:
        maps = torch.tanh(F.conv1d(inputs.unsqueeze(1), filters, bias))
        return torch.cat([maps.amax(2), maps.mean(2)], 1)

    n, v, s = config.train, config.validation, config.selection
    raw = features(x[: n + v + s])
    mean, std = raw[:n].mean(0), raw[:n].std(0)

    def scaled(raw: Tensor) -> Tensor:
        return torch.cat([(raw - mean) / std, torch.ones(len(raw), 1)], 1)

    parts, labels = scaled(raw), y[: n + v + s]
    clean = torch.rand(n, generator=draw) >= config.wrong
    shift = (
        torch.ones(n, dtype=torch.long)
        if config.mistakes == "systematic"
        else torch.randint(1, NUM_CLASSES, (n,), generator=draw)
    )
    return Data(
        train=parts[:n],
        given=torch.where(clean, labels[:n], (labels[:n] + shift) % NUM_CLASSES),
        right=labels[:n],
        clean=clean,
        validation=(parts[n : n + v], labels[n : n + v]),
        selection=(parts[n + v :], labels[n + v :]),
        test=(
            scaled(features(torch.from_numpy(arrays.x_test).float())),
            torch.from_numpy(arrays.y_test),
        ),
    )


class Cleaning:
    """The bilevel problem of one data set."""

    def __init__(self, data: Data, config: Config) -> None:
        self.data, self.config = data, config
        self.init = torch.zeros(data.train.shape[1], NUM_CLASSES)
        # Softmax losses have curvature of at most half the largest eigenvalue of the features'
        # second moment.
        largest = float(torch.linalg.eigvalsh(data.train.T @ data.train / len(data.train))[-1])
        self.solver = mn.Nesterov(
            lr=1 / (largest / 2 + 2 * config.l2), steps=config.inner_steps, momentum=0.9
        )

    def inner(self, x: Tensor, phi: Tensor) -> Tensor:
        losses = F.cross_entropy(self.data.train @ phi, self.data.given, reduction="none")
        return (torch.sigmoid(x) * losses).mean() + self.config.l2 * phi.square().sum()

    def outer(self, x: Tensor, phi: Tensor) -> Tensor:
        features, labels = self.data.validation
        return F.cross_entropy(features @ phi, labels)

    def hypergradient(
        self, estimator: Any, x: Tensor, init: Tensor, solver: Any = None
    ) -> mn.Hypergradient:
        return mn.hypergradient(
            self.inner, self.outer, x, init, solver=solver or self.solver, estimator=estimator
        )

    def clean(self, name: str, seed: int, exact: Tensor) -> Run:
        """Hypergradient descent on the weights; each solve starts where the last one ended."""
        estimator = METHODS[name]
        x = torch.zeros(self.config.train, requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=self.config.outer_lr)
        phi, seconds, first = self.init, [], torch.empty(0)
        for step in range(self.config.outer_steps):
            start = time.process_time()
            result = self.hypergradient(estimator, x, phi)
            seconds.append(time.process_time() - start)
            first = result.gradient if step == 0 else first
            x.grad, phi = result.gradient, result.phi
            optimizer.step()
        weights = torch.sigmoid(x.detach())
        return Run(
            method=name,
            seed=seed,
            auroc=auroc(weights, self.data.clean),
            accuracy=self.final_accuracy(weights, self.data.given)[1],
            cosine=float(F.cosine_similarity(first, exact, 0)),
            seconds=statistics.median(seconds),
            megabytes=peak_memory(lambda: self.hypergradient(estimator, x, phi), x.device) / 1e6,
            weights=weights.tolist(),
        )

    def exact(self) -> Tensor:
        """The hypergradient at equal weights, by the dense implicit function theorem at a precise
        solution.
        """
        return self.hypergradient(
            mn.Exact(), torch.zeros(self.config.train), self.init, mn.LBFGS(tol=1e-5)
        ).gradient

    def reference(self, name: str) -> float:
        """Test accuracy without cleaning."""
        ones = torch.ones(self.config.train)
        if name == "validation examples alone":
            return self.final_accuracy(0 * ones, self.data.given)[1]
        return self.final_accuracy(
            ones, self.data.right if name == "all labels right" else self.data.given
        )[1]

    def final_accuracy(self, weights: Tensor, labels: Tensor) -> tuple[float, float]:
        """Train on the weighted training examples and the validation examples; accuracies on the
        selection set and the test set, with the penalty that is best on the former.
        """
        features = torch.cat([self.data.train, self.data.validation[0]])
        targets = torch.cat([labels, self.data.validation[1]])
        weights = torch.cat([weights, torch.ones(len(self.data.validation[1]))])
        best = (-1.0, 0.0)
        phi = self.init
        for l2 in sorted(self.config.final_l2, reverse=True):

            def loss(_: Tensor, phi: Tensor, l2: float = l2) -> Tensor:
                losses = F.cross_entropy(features @ phi, targets, reduction="none")
                return (weights * losses).sum() / weights.sum() + l2 * phi.square().sum()

            phi = fit(loss, phi)
            best = max(best, (accuracy(phi, *self.data.selection), accuracy(phi, *self.data.test)))
        return best


def fit(loss: Any, init: Tensor) -> Tensor:
    """A plain minimisation by torch's L-BFGS."""
    phi = init.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [phi], max_iter=100, tolerance_grad=1e-4, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(phi, phi)
        value.backward()
        return value

    optimizer.step(closure)
    return phi.detach()


def accuracy(phi: Tensor, features: Tensor, labels: Tensor) -> float:
    return float(((features @ phi).argmax(1) == labels).double().mean())


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive example scores higher than a negative one; ties count half."""
    ours, theirs = scores[positive].double().unsqueeze(1), scores[~positive].double()
    return float((ours > theirs).double().mean() + 0.5 * (ours == theirs).double().mean())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/hyper_cleaning"),
        help="folder for the plot and the numbers",
    )
    defaults = Config()
    for name in (
        "train",
        "validation",
        "selection",
        "filters",
        "inner_steps",
        "outer_steps",
        "seeds",
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(defaults, name),
            help=f"default {getattr(defaults, name)}",
        )
    parser.add_argument(
        "--mistakes",
        choices=("systematic", "random"),
        default=defaults.mistakes,
        help=f"default {defaults.mistakes}",
    )
    arguments = vars(parser.parse_args(argv))
    out: Path = arguments.pop("out")
    config = Config(**arguments)

    start = time.perf_counter()
    runs: list[Run] = []
    references: dict[str, list[float]] = {name: [] for name in REFERENCES}
    for seed in range(config.seeds):
        problem = Cleaning(load(config, seed), config)
        exact = problem.exact()
        runs += [problem.clean(name, seed, exact) for name in METHODS]
        for name in REFERENCES:
            references[name].append(problem.reference(name))
    result = {
        "config": asdict(config),
        "seconds": time.perf_counter() - start,
        "references": references,
        "runs": [{k: v for k, v in asdict(run).items() if k != "weights"} for run in runs],
        "provenance": provenance(torch.device("cpu")),
    }
    show(config, references, runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "hyper_cleaning.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot(load(config, 0).clean, [run for run in runs if run.seed == 0], out / "hyper_cleaning.png")
    print(f"Plot: {out / 'hyper_cleaning.png'}")
    return result


def show(config: Config, references: dict[str, list[float]], runs: list[Run]) -> None:
    wrong = (
        f"{config.wrong:.0%} of {config.train} training labels wrong, {config.mistakes} mistakes"
    )
    table = Table(
        title=f"{wrong}; {config.validation} validation examples, seeds: {config.seeds}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("trained on", no_wrap=True)
    for column in ("test accuracy", "AUROC", "cosine", "ms", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, values in references.items():
        table.add_row(name, spread(values, ".1%"), "", "", "", "")
    table.add_section()
    table.add_row("labels cleaned by")
    for name in METHODS:
        ours = [run for run in runs if run.method == name]
        table.add_row(
            f"  {name}",
            spread([run.accuracy for run in ours], ".1%"),
            spread([run.auroc for run in ours], ".3f"),
            f"{statistics.mean(run.cosine for run in ours):.3f}",
            f"{1000 * statistics.median(run.seconds for run in ours):.0f}",
            f"{statistics.mean(run.megabytes for run in ours):.2f}",
        )
    console = Console()
    console.print(table)
    console.print("AUROC: right against wrong labels, by learned weight.")
    console.print("cosine: of the first hypergradient with the exact one at the optimum.")
    console.print("ms, MB: CPU time and peak memory of one hypergradient.")
    console.print("Every row trains on the validation examples as well.")


def spread(values: list[float], form: str) -> str:
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form)}"


def plot(clean: Tensor, runs: list[Run], path: Path) -> None:
    """How the learned weights of right and of wrong labels are spread, method by method."""
    from metanudge_lab.style import figure

    made, axes = figure(len(runs), 1, width=2.5 * len(runs), height=2.8, sharey=True, squeeze=False)
    for one, run in zip(axes[0], runs, strict=True):
        weights = torch.tensor(run.weights)
        for mask, label, colour in (
            (clean, "right label", "#0d9488"),
            (~clean, "wrong label", "#d1495b"),
        ):
            one.hist(
                weights[mask].tolist(), bins=20, range=(0, 1), alpha=0.65, color=colour, label=label
            )
        one.set_title(f"{run.method}\nAUROC {run.auroc:.3f}", fontsize=9)
        one.set_xlabel("learned weight")
    axes[0][0].set_ylabel("examples")
    axes[0][0].legend(fontsize=8, frameon=False)
    made.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
