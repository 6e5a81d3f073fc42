"""MAML with inner learning rates that are learned, against one that is tuned: Meta-SGD (Li et al.
2017), and one rate per tensor and step (LSLR of MAML++, Antoniou et al. 2019).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

import metanudge as mn
from metanudge.models import MLP, Conv1D
from metanudge.tasks import MNIST1D, Sinusoid
from metanudge_lab import style
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    ResultTable,
    Row,
    Settings,
    Shown,
    Statement,
    Verdict,
)
from metanudge_lab.experiments.equal_cost import COUNTED, passes
from metanudge_lab.experiments.spread import Mean, paired

TUNING_SEED = 1000
FIRST_SEED = 10  # those before were looked at when the settings were found
SINUSOIDS, MNIST_1D = "sinusoids", "MNIST-1D"
PROBLEMS = {SINUSOIDS: "share of the variance explained", MNIST_1D: "accuracy"}
META_SGD, LSLR = "Meta-SGD", "LSLR"
METHODS: dict[str, mn.InnerRates | None] = {
    m.MAML: None,
    META_SGD: mn.InnerRates("parameter", positive=False),
    LSLR: mn.InnerRates("step"),
}
CLIP = 1.0
SHARES = {META_SGD: 0.1}  # rates of 0.01 or so, not their logarithms: Adam's steps must be smaller
_LOOKS = {
    m.MAML: style.line(m.MAML),
    META_SGD: {**style.line("FO-B-MAML"), "label": META_SGD},
    LSLR: {**style.line("FO-B-MAML gradient"), "label": LSLR},
}


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full twenty minutes or so on a CPU core.

    Attributes:
        inner_rates, meta_rates: the grid, the same for every method; learned rates start at the
            inner one and learn with the meta one.
        tuning, iterations, tasks: meta-steps of tuning and of the runs that count, and tasks a
            step: on sinusoids, and on MNIST-1D.
        at_steps: inner steps after which the test tasks are looked at; training has 5.
    """

    inner_rates: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
    meta_rates: tuple[float, ...] = (0.01, 0.003, 0.001)
    tuning: tuple[int, int] = (200, 75)
    iterations: tuple[int, int] = (1500, 500)
    tasks: tuple[int, int] = (8, 4)
    at_steps: tuple[int, ...] = (1, 5, 10)
    seeds: int = 5
    val_tasks: int = 100
    test_tasks: int = 300

    @classmethod
    def quick(cls) -> Config:
        """A minute or two."""
        return cls(
            inner_rates=(0.1, 0.03),
            meta_rates=(0.01,),
            tuning=(40, 15),
            iterations=(150, 40),
            seeds=2,
            val_tasks=40,
            test_tasks=100,
        )


def cells(config: Config) -> list[Cell]:
    """A training for each problem, seed and method."""
    return [
        {"problem": problem, "method": method, "seed": seed}
        for problem, seed, method in itertools.product(PROBLEMS, _seeds(config), METHODS)
    ]


def _seeds(config: Config) -> range:
    return range(FIRST_SEED, FIRST_SEED + config.seeds)


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Tune on validation tasks, train, and test after several numbers of steps."""
    problem, method = str(cell["problem"]), str(cell["method"])
    found = tuned(problem, method, config, device)
    trial = _trial(problem, method, device, seed=int(cell["seed"] or 0))
    scores = trial.scores(
        found.best, split="test", tasks=config.test_tasks, steps=list(config.at_steps)
    )
    test: list[Row] = [
        {"kind": "test", "steps": steps, "quality": float(score.mean()), **found.best.rates}
        for steps, score in zip(config.at_steps, scores, strict=True)
    ]
    return [*found.rows("tuning", "iterations"), *test]


def _trial(problem: str, method: str, device: torch.device, *, seed: int) -> fewshot.Trial:
    regression = problem == SINUSOIDS
    source = (
        Sinusoid(shots=10, queries=10, seed=seed, device=device)
        if regression
        else MNIST1D(ways=3, shots=5, queries=10, seed=seed, device=device)
    )
    model = m.seeded(seed, lambda: MLP(1, 1) if regression else Conv1D(ways=3), device)
    return fewshot.Trial(
        model, mn.MAML(), source, lam=0.0, regression=regression, learn_lr=METHODS[method]
    )


@functools.cache
def tuned(problem: str, method: str, config: Config, device: torch.device) -> fewshot.Search:
    """The best pair of rates, on a model and a stream of tasks of its own; the same for all
    seeds.
    """
    place = list(PROBLEMS).index(problem)
    recipes = [
        fewshot.Recipe(
            inner,
            rate,
            config.iterations[place],
            config.tasks[place],
            clip=CLIP,
            share=SHARES.get(method, 1.0),
        )
        for inner, rate in itertools.product(config.inner_rates, config.meta_rates)
    ]
    trial = _trial(problem, method, device, seed=TUNING_SEED)
    rounds = (config.tuning[place],)
    return fewshot.best_recipe(trial, recipes, rounds, keep=1, tasks=config.val_tasks)


def draw(result: Result[Config]) -> list[Drawing]:
    """Quality against inner steps, with 95 % bands over the seeds."""
    figure, axes = style.figure(len(PROBLEMS), width=10.0, height=4.0)
    for panel, (problem, quality) in zip(axes, PROBLEMS.items(), strict=True):
        for method, look in _LOOKS.items():
            means = curve(result, problem, method)
            if means:
                style.band(panel, {k: one.spread for k, one in means.items()}, **look)
        panel.set(xlabel="inner steps on test tasks", ylabel=quality, title=problem)
        style.legend(panel, beside=False, loc="lower right")
    return [Drawing(figure, alt=_alt(result))]


def table(result: Result[Config]) -> ResultTable:
    """Quality after each number of steps, and the rates that tuning found."""
    rows: list[tuple[str | int | Shown, ...]] = []
    for problem, method in itertools.product(PROBLEMS, METHODS):
        means = curve(result, problem, method)
        if means:
            (row, *_) = result.rows(kind="test", problem=problem, method=method)
            rates = f"{row['inner']:g}, {row['rate']:g}"
            found = (Shown.of(one, 3) for one in means.values())
            rows.append((problem, method, _passes(method), *found, rates))
    after = (f"after {k} steps" for k in result.config.at_steps)
    head = ("tasks", "method", "gradients a task and meta-step")
    return ResultTable((*head, *after, "inner and meta-learning rate"), rows)


def judge(result: Result[Config]) -> Verdict:
    """Whether learned rates are better with the same seeds."""
    measured = []
    spent = ", ".join(f"{_passes(method)} ({method})" for method in METHODS)
    for problem in PROBLEMS:
        plain = _qualities(result, problem, m.MAML)
        parts = [
            f"{method} {more.mean:+.3f} ± {more.ci95:.3f}"
            for method, more in _gains(result, problem).items()
        ]
        measured.append(f"{problem}: MAML {Mean.of(plain).text(3)}, {', '.join(parts)}")
    return Verdict.of(
        compare(result),
        f"After {m.STEPS} steps, with the paired difference to MAML: {'; '.join(measured)}.",
        f"The verdict is at equal meta-steps, each of {spent} backward passes for a task.",
    )


def compare(result: Result[Config]) -> list[Statement]:
    """Who is better than MAML, the interval of the difference above zero."""
    statements = []
    for problem in PROBLEMS:
        for method, more in _gains(result, problem).items():
            contrary = "is worse" if more.mean + more.half < 0 else "cannot be told from MAML"
            statements.append(
                Statement(
                    more.mean - more.half > 0,
                    f"on {problem} {method} is better than MAML",
                    f"on {problem} {method} {contrary}",
                    f"{method}, {problem}",
                )
            )
    return statements


def _passes(method: str) -> int:
    """That a meta-step takes for each task."""
    return passes(mn.MAML(), m.STEPS, METHODS[method])


def _gains(result: Result[Config], problem: str) -> dict[str, Mean]:
    plain = _qualities(result, problem, m.MAML)
    return {
        method: paired(_qualities(result, problem, method), plain) for method in (META_SGD, LSLR)
    }


def curve(result: Result[Config], problem: str, method: str) -> dict[int, Mean]:
    """Mean quality over the seeds with its interval after each number of steps."""
    where = {"kind": "test", "problem": problem, "method": method}
    found = result.along("quality", "steps", result.config.at_steps, **where)
    return {steps: Mean.of(values) for steps, values in found.items()}


def _qualities(result: Result[Config], problem: str, method: str) -> list[float]:
    """With the steps of training, seed by seed."""
    where = {"kind": "test", "problem": problem, "method": method, "steps": m.STEPS}
    return [result.values("quality", seed=seed, **where)[0] for seed in _seeds(result.config)]


def _alt(result: Result[Config]) -> str:
    ends = []
    for problem, method in itertools.product(PROBLEMS, METHODS):
        means = curve(result, problem, method)
        if m.STEPS in means:
            ends.append(f"{method} on {problem} {means[m.STEPS].mean:.3f}")
    return f"Quality on test tasks against inner steps; after {m.STEPS}: {', '.join(ends)}."


EXPERIMENT = Experiment(
    name="inner-rates",
    title="Learned inner learning rates",
    where="not in the paper",
    claim=(
        "With inner learning rates that are meta-learned, one per parameter (Meta-SGD) or one per"
        " tensor and step (LSLR of MAML++), MAML adapts better than with one that was tuned, on"
        " sinusoids and on MNIST-1D."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    compare=compare,
    unit=("problem", "seed"),
    notes=(
        "MAML through 5 steps of gradient descent, λ = 0; sinusoids with 10 shots and a network"
        " of two hidden layers of 40, MNIST-1D 3-way 5-shot with three convolutions. Every method"
        " chooses its inner and meta-learning rate on validation tasks from the same grid, with a"
        " seed of its own; meta-gradients are clipped to norm 1. Learned rates start at the inner"
        " one and are learned with Adam like the network: those of LSLR as logarithms, at the"
        " meta-learning rate; Meta-SGD's, which may become negative, as they are, at a tenth of"
        " it. Clipping and that tenth were added after a first trial on sinusoids without them,"
        " in which three of three runs with learned rates explained nothing on test tasks (seeds"
        " 0 and 1); they were then looked at on seed 0. The grid was made wider and the runs longer"
        " after 9 of 30 shorter ones, seeds 0 to 4, whose best inner rate was the grid's largest;"
        " what is shown has seeds from 10 on, which nobody looked at before. Beyond 5 steps the"
        " last rate goes on. Intervals are 95 %, Student's t over the seeds, of the differences"
        " paired by seed. " + COUNTED
    ),
)
