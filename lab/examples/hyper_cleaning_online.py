"""Data hyper-cleaning online: the weights of the training examples are learned while a live model
trains, instead of solving the inner problem for every change of a weight (`hyper_cleaning.py`).

    python lab/examples/hyper_cleaning_online.py --out runs/hyper_cleaning_online

    lower:  Adam on minibatches,  mean_i σ(x_i) ℓ_i(φ) + l2 ‖φ‖²,  40 % wrong labels, never reset
    upper:  after every K steps x moves along the hypergradient of the loss on right labels

`mn.Unrolled` differentiates through the K steps. Beside it, with as many steps between two upper
ones: darts (betty 0.1.1, where it is installed; else its formula), −∂²g/∂x∂φ · ∂f/∂φ by one central
difference at the last minibatch, for an inverse Hessian of 1; and SAMA (Choe et al. 2023), the same
with ∂f/∂φ times the derivative of Adam's step by its gradient. Both leave the parameters at the
difference's second point, φ − εv, as betty's code does. Last, the inner problem solved anew for
every hypergradient, by FO-B-MAML.

All online ones have the same training steps, all the same upper Adam, with that rate of a grid that
is best for them on the selection set. Prints a table and writes `hyper_cleaning_online.json`.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hyper_cleaning as solved
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.tasks.mnist1d_recipe import NUM_CLASSES
from metanudge.testing.memory import peak_memory
from metanudge_lab.provenance import provenance

ANEW = "FO-B-MAML symmetric"
RADIUS = 0.01  # ‖εv‖ of darts and SAMA, betty's default
BETTY = importlib.util.find_spec("betty") is not None


@dataclass(frozen=True)
class Config:
    train: int = 1000
    validation: int = 500
    filters: int = 64
    batch: int = 100
    lr: float = 0.01
    training_steps: int = 600
    between: tuple[int, ...] = (1, 5, 20)  # K
    rates: tuple[float, ...] = (0.1, 0.3, 1.0)
    looks: int = 3  # at the hypergradients' directions, along a training
    seeds: int = 3
    data: solved.Config = field(init=False)

    def __post_init__(self) -> None:
        data = solved.Config(train=self.train, validation=self.validation, filters=self.filters)
        object.__setattr__(self, "data", data)


class Live:
    """A model that trains, and the logits of the examples' weights."""

    def __init__(self, cleaning: solved.Cleaning, config: Config) -> None:
        data = cleaning.data
        self.l2, self.given = cleaning.config.l2, data.given
        self.train, (self.features, self.labels) = data.train, data.validation
        self.model = nn.Linear(data.train.shape[1], NUM_CLASSES, bias=False)
        nn.init.zeros_(self.model.weight)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.x = torch.zeros(len(data.train), requires_grad=True)

    def lower_loss(self, index: Tensor) -> Tensor:
        losses = F.cross_entropy(self.model(self.train[index]), self.given[index], reduction="none")
        penalty = self.l2 * self.model.weight.square().sum()
        return (torch.sigmoid(self.x[index]) * losses).mean() + penalty

    def upper_loss(self, _: Any = None) -> Tensor:
        return F.cross_entropy(self.model(self.features), self.labels)

    def plain_step(self, index: Tensor) -> None:
        self.adam.zero_grad()
        self.lower_loss(index).backward(inputs=list(self.model.parameters()))
        self.adam.step()

    def double(self) -> Live:
        """A copy in float64."""
        wide = copy.deepcopy(self)
        wide.model.double()
        wide.x = wide.x.detach().double().requires_grad_()
        wide.train, wide.features = self.train.double(), self.features.double()
        for state in wide.adam.state.values():
            state.update({n: state[n].double() for n in ("exp_avg", "exp_avg_sq")})
        return wide


Advance = Callable[[list[Tensor]], None]
"""Trains on so many minibatches and leaves a hypergradient in `x.grad`."""


def unrolled(live: Live, steps: int, **options: Any) -> Advance:
    loop = mn.Unrolled(
        live.model, live.x, live.lower_loss, live.upper_loss, live.adam, steps, **options
    )
    return lambda batches: loop.step(batches, None) and None


def differenced(live: Live, *, adjoint: bool) -> Advance:
    """darts, or with Adam's adjoint SAMA."""

    def advance(batches: list[Tensor]) -> None:
        for index in batches:
            live.plain_step(index)
        weight = live.model.weight
        (v,) = torch.autograd.grad(live.upper_loss(), weight)
        v = v * adam_adjoint(live.adam, weight) if adjoint else v
        epsilon = RADIUS / v.norm()
        weight.data.add_(v, alpha=float(epsilon))
        (plus,) = torch.autograd.grad(live.lower_loss(batches[-1]), live.x)
        weight.data.add_(v, alpha=-2 * float(epsilon))
        (minus,) = torch.autograd.grad(live.lower_loss(batches[-1]), live.x)
        live.x.grad = (minus - plus) / (2 * epsilon)

    return advance


def adam_adjoint(adam: torch.optim.Adam, weight: Tensor) -> Tensor:
    """The derivative of the last step, α m̂/(√v̂ + eps), by its gradient, entry by entry."""
    options, state, g = adam.param_groups[0], adam.state[weight], weight.grad
    assert g is not None
    (b1, b2), t = options["betas"], float(state["step"])
    m, root = state["exp_avg"] / (1 - b1**t), (state["exp_avg_sq"] / (1 - b2**t)).sqrt()
    below = root + options["eps"]
    by_m = (1 - b1) / (1 - b1**t) / below
    by_root = m / below**2 * (1 - b2) / (1 - b2**t) * g / root.clamp(min=1e-30)
    return options["lr"] * (by_m - by_root)


def betty(live: Live, steps: int) -> Advance:
    """betty's engine with two `ImplicitProblem`s, on the live model and its Adam."""
    configs = importlib.import_module("betty.configs")
    importlib.import_module("betty.logging.logger_base").get_logger().setLevel(logging.WARNING)
    base: Any = importlib.import_module("betty.problems").ImplicitProblem
    waiting: list[Tensor] = []
    found: list[Tensor] = []

    class Upper(base):
        def get_batch(self) -> None:
            return None

        def training_step(self, _: None) -> Tensor:
            return live.upper_loss()

        def trainable_parameters(self) -> list[Tensor]:
            return [live.x]

        def custom_optimizer_step(self) -> None:
            found.append(live.x.grad)  # type: ignore[arg-type]

    class Lower(base):
        def get_batch(self) -> Tensor:
            return waiting.pop(0)

        def training_step(self, index: Tensor) -> Tensor:
            return live.lower_loss(index)

    holder = nn.Module()
    holder.x = nn.Parameter(torch.zeros(1))
    upper = Upper(
        "upper", configs.Config(first_order=True, retain_graph=True), holder, device="cpu"
    )
    config = configs.Config(type="darts", darts_alpha=RADIUS, unroll_steps=steps)
    lower = Lower("lower", config, live.model, live.adam, device="cpu")
    engine = importlib.import_module("betty.engine").Engine(
        config=configs.EngineConfig(train_iters=steps),
        problems=[upper, lower],
        dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )

    def advance(batches: list[Tensor]) -> None:
        waiting.extend(batches)
        engine.run()
        live.x.grad = found.pop()

    return advance


def methods(config: Config) -> dict[str, tuple[int, Callable[[Live, int], Advance]]]:
    """K and how to advance, by name."""
    darts = "darts, betty" if BETTY else "darts' formula"
    known: dict[str, Callable[[Live, int], Advance]] = {
        "Unrolled": unrolled,
        "Unrolled by differences": lambda live, k: unrolled(live, k, products="difference"),
        darts: betty if BETTY else lambda live, k: differenced(live, adjoint=False),
        "SAMA": lambda live, k: differenced(live, adjoint=True),
    }
    return {f"{n}, K={k}": (k, make) for n, make in known.items() for k in config.between}


@dataclass
class Run:
    """One method with one upper rate on one seed."""

    method: str
    rate: float
    seed: int
    auroc: float
    selection: float
    accuracy: float
    seconds: float  # CPU time of the whole
    megabytes: float  # peak memory of a hypergradient and the training steps before it


def minibatches(config: Config, seed: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(config.train, generator=draw).split(config.batch)


def clean(problem: solved.Cleaning, config: Config, name: str, rate: float, seed: int) -> Run:
    """Train, and move the weights after every K steps."""
    steps, make = methods(config)[name]
    live, batches = Live(problem, config), minibatches(config, seed)
    advance, optimizer = make(live, steps), torch.optim.Adam([live.x], lr=rate)
    start = time.process_time()
    for _ in range(config.training_steps // steps):
        live.x.grad = None
        advance([next(batches) for _ in range(steps)])
        optimizer.step()
    seconds = time.process_time() - start
    taken = [next(batches) for _ in range(steps)]
    megabytes = peak_memory(lambda: advance(taken), live.x.device) / 1e6
    return judged(problem, name, rate, seed, live.x, seconds, megabytes)


def judged(
    problem: solved.Cleaning,
    name: str,
    rate: float,
    seed: int,
    x: Tensor,
    seconds: float,
    megabytes: float,
) -> Run:
    weights = torch.sigmoid(x.detach())
    selection, accuracy = problem.final_accuracy(weights, problem.data.given)
    found = solved.auroc(weights, problem.data.clean)
    return Run(name, rate, seed, found, selection, accuracy, seconds, megabytes)


def clean_anew(problem: solved.Cleaning, rate: float, seed: int) -> Run:
    """As `hyper_cleaning.py` does: the inner problem is solved for every hypergradient."""
    estimator, x = solved.METHODS[ANEW], torch.zeros(problem.config.train, requires_grad=True)
    optimizer, phi = torch.optim.Adam([x], lr=rate), problem.init
    start = time.process_time()
    for _ in range(problem.config.outer_steps):
        result = problem.hypergradient(estimator, x, phi)
        x.grad, phi = result.gradient, result.phi
        optimizer.step()
    seconds = time.process_time() - start
    megabytes = peak_memory(lambda: problem.hypergradient(estimator, x, phi), x.device) / 1e6
    return judged(problem, "solved anew", rate, seed, x, seconds, megabytes)


def look(problem: solved.Cleaning, config: Config, seed: int) -> list[dict[str, Any]]:
    """Cosines of every method's hypergradient with the exact ones, all through the same training
    steps of one training: through as many as it looks at, and through the most.
    """
    live, batches, most = Live(problem, config), minibatches(config, seed), max(config.between)
    advance, optimizer = unrolled(live, most), torch.optim.Adam([live.x], lr=0.3)
    every = max(1, config.training_steps // most // config.looks)
    rows: list[dict[str, Any]] = []
    for turn in range(config.training_steps // most):
        taken = [next(batches) for _ in range(most)]
        if turn % every == 0 and turn < every * config.looks:
            exact = {k: gradient(live.double(), taken, k, unrolled) for k in config.between}
            for name, (k, make) in methods(config).items():
                g = gradient(copy.deepcopy(live), taken, k, make).double()
                own, long = (float(F.cosine_similarity(g, exact[n], 0)) for n in (k, most))
                rows.append({"method": name, "seed": seed, "turn": turn, "own": own, "long": long})
        live.x.grad = None
        advance(taken)
        optimizer.step()
    return rows


def gradient(live: Live, taken: list[Tensor], steps: int, make: Any) -> Tensor:
    """The hypergradient of a copy, through the last so many of the training steps."""
    live.x.grad = None
    for index in taken[: len(taken) - steps]:
        live.plain_step(index)
    make(live, steps)(taken[len(taken) - steps :])
    assert live.x.grad is not None
    return live.x.grad


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/hyper_cleaning_online"))
    defaults = Config()
    for name in ("train", "validation", "filters", "batch", "training_steps", "looks", "seeds"):
        flag, value = f"--{name.replace('_', '-')}", getattr(defaults, name)
        parser.add_argument(flag, type=int, default=value, help=f"default {value}")
    parser.add_argument("--rates", type=float, nargs="+", default=defaults.rates)
    arguments = vars(parser.parse_args(argv))
    out: Path = arguments.pop("out")
    config = Config(**{**arguments, "rates": tuple(arguments["rates"])})

    start = time.perf_counter()
    runs: list[Run] = []
    cosines: list[dict[str, Any]] = []
    for seed in range(config.seeds):
        problem = solved.Cleaning(solved.load(config.data, seed), config.data)
        cosines += look(problem, config, seed)
        for rate in config.rates:
            runs += [clean(problem, config, name, rate, seed) for name in methods(config)]
            runs.append(clean_anew(problem, rate, seed))
    result = {
        "config": asdict(config),
        "betty": BETTY,
        "seconds": time.perf_counter() - start,
        "table": table(runs, cosines),
        "runs": [asdict(run) for run in runs],
        "cosines": cosines,
        "provenance": provenance(torch.device("cpu")),
    }
    show(config, result["table"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "hyper_cleaning_online.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"Numbers: {path}")
    return result


def table(runs: list[Run], cosines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, with the upper rate that is best for it on the selection set."""
    rows = []
    for name in dict.fromkeys(run.method for run in runs):
        by_rate: dict[float, list[Run]] = {}
        for run in runs:
            if run.method == name:
                by_rate.setdefault(run.rate, []).append(run)
        rate, best = max(
            by_rate.items(), key=lambda pair: statistics.mean(run.selection for run in pair[1])
        )
        row: dict[str, Any] = {"method": name, "rate": rate}
        for key in ("accuracy", "auroc", "seconds", "megabytes"):
            row[key] = [getattr(run, key) for run in best]
        seen = [each for each in cosines if each["method"] == name]
        for key in ("own", "long"):
            row[key] = statistics.mean(each[key] for each in seen) if seen else None
        rows.append(row)
    return rows


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    data = config.data
    made = Table(
        title=f"{data.wrong:.0%} of {data.train} training labels wrong; {config.training_steps}"
        f" training steps, seeds: {config.seeds}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    made.add_column("cleaned by", no_wrap=True)
    for column in (
        "accuracy",
        "AUROC",
        "rate",
        "cos K",
        f"cos {max(config.between)}",
        "s",
        "MB",
    ):
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(
            row["method"].replace("Unrolled by", "  by"),
            solved.spread(row["accuracy"], ".1%"),
            f"{statistics.mean(row['auroc']):.3f}",
            f"{row['rate']:g}",
            *("" if row[key] is None else f"{row[key]:.3f}" for key in ("own", "long")),
            f"{statistics.mean(row['seconds']):.2f}",
            f"{statistics.mean(row['megabytes']):.2f}",
        )
    console = Console()
    console.print(made)
    console.print("cos: with the exact hypergradient, float64, through the K steps before it, and")
    console.print(
        f"through {max(config.between)}. rate: of the upper Adam, the best of {config.rates}."
    )
    console.print("s: CPU time of a whole run. MB: peak memory of K steps and a hypergradient.")


if __name__ == "__main__":
    main()
