"""A small GPT on Markov chains, whose inner steps do not converge: which estimates still resemble
the gradient of the adaptation along training, and what they train.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from metanudge.training.device import computing_in
from metanudge_lab.device_memory import release
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments.base import Cell, Experiment, Result, ResultTable, Row, Shown
from metanudge_lab.experiments.transformer_figures import draw
from metanudge_lab.experiments.transformer_quality import COARSE, NAMES, bits, qualities
from metanudge_lab.experiments.transformer_rows import (
    at_equal_cost,
    cosines,
    diverged,
    finals,
    mean_of,
)
from metanudge_lab.experiments.transformer_runs import (
    DIFFERENCE,
    METHODS,
    Config,
    search,
    train,
)
from metanudge_lab.experiments.transformer_verdict import EVERYWHERE, MEDIAN, NOISE, enough, judge

_known: dict[tuple[str, float, Config], float] = {}


def cells(config: Config) -> list[Cell]:
    """Meta-learning rates; the training by differences, along which gradients are compared; the
    other trainings; the default estimator in bfloat16.
    """
    rates: list[Cell] = [
        {"part": "rates", "method": method, "inner": inner}
        for method in config.methods
        for inner in config.inner_rates
    ]
    quality: list[Cell] = [
        {"part": "quality", "inner": inner, "seed": seed}
        for seed in range(config.seeds)
        for inner in config.inner_rates
    ]
    others: list[Cell] = [
        {"part": "training", "method": method, "inner": inner, "seed": seed}
        for seed in range(config.seeds)
        for method in config.methods
        if method != DIFFERENCE
        for inner in config.inner_rates
    ]
    bits: list[Cell] = [{"part": "bits", "inner": inner, "seed": 0} for inner in config.inner_rates]
    return [*rates, *quality, *others, *bits]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Search for a rate on validation tasks, or train with it and test on the way; differences also
    compare gradients.
    """
    inner, method = float(cell["inner"] or 0), str(cell.get("method", DIFFERENCE))
    release(device)
    with computing_in("tf32", device):
        if cell["part"] == "rates":
            return _search(method, inner, config, device)
        if (method, inner, config) not in _known:
            _search(method, inner, config, device)
        recipe = inner, _known[method, inner, config]
        if cell["part"] == "bits":
            return bits(*recipe, int(cell["seed"] or 0), config, device)
        start = partial(train, method, recipe, int(cell["seed"] or 0), config, device)
        if cell["part"] == "training":
            return start()

        def see(step: int, trial: fewshot.Trial, inner: float) -> list[Row]:
            return qualities(step, trial, inner, config)

        return start(at=config.points, see=see)


def remember(result: Result[Config]) -> None:
    """Rates that were found before."""
    for row in result.rows(kind="chosen"):
        _known[str(row["method"]), float(row["inner"]), result.config] = float(row["rate"])


def _search(method: str, inner: float, config: Config, device: torch.device) -> list[Row]:
    rows = search(method, inner, config, device)
    _known[method, inner, config] = float(rows[-1]["rate"])
    return rows


def table(result: Result[Config]) -> ResultTable:
    """By inner rate and estimate: cosines at each point, rates, losses and what was spent."""
    rows = [
        _line(result, method, "fp32", inner)
        for inner in result.config.inner_rates
        for method in METHODS
    ]
    rows += [
        _line(result, DIFFERENCE, precision, inner)
        for inner in result.config.inner_rates
        for precision in COARSE
    ]
    head = ("inner rate", "estimate", *(f"cosine at {point}" for point in result.config.points))
    rest = ("meta-rate", "loss", "loss, equal gradients", "loss, equal seconds", "gradients")
    return ResultTable((*head, *rest, "seconds", "diverged"), rows)


def _line(
    result: Result[Config], method: str, precision: str, inner: float
) -> tuple[str | float | Shown | None, ...]:
    where = {"inner": inner}
    found = [
        cosines(result, method, precision, iteration=point, **where)
        for point in result.config.points
    ]
    quality = [
        Shown(statistics.median(c), f"{statistics.median(c):.4f} ({min(c):.4f})") if c else None
        for c in found
    ]
    if precision != "fp32":
        return (inner, f"{method}, {NAMES[precision]}", *quality, *(None,) * 7)
    losses = finals(result, method, inner)
    means = [
        mean_of(list(values.values()))
        for values in (
            losses,
            at_equal_cost(result, method, inner, "gradients"),
            at_equal_cost(result, method, inner, "seconds"),
        )
    ]
    shown = [None if mean is None else Shown.of(mean, 4) for mean in means]
    ends = result.rows(kind="curve", method=method, inner=inner, iteration=result.config.iterations)
    spent = [
        statistics.mean(row[key] for row in ends) if ends else None
        for key in ("gradients", "seconds")
    ]
    failed = f"{len(diverged(losses))} of {len(losses)}" if losses else None
    chosen = result.rows(kind="chosen", method=method, inner=inner)
    rate = chosen[0]["rate"] if chosen else None
    return (inner, method, *quality, rate, *shown, *spent, failed)


EXPERIMENT = Experiment(
    name="transformer",
    title="A Transformer whose inner steps do not converge",
    where="not in the paper",
    claim=(
        "Ours: on a small GPT, adapted with 5 steps, MAML by differences has the gradient of the"
        f" adaptation all along training (cosine at least {EVERYWHERE:g} in float32, in the median"
        f" at least {MEDIAN:g} in TF32 and in bf16 autocast) and trains as well as MAML."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    remember=remember,
    enough=enough,
    notes=(
        "Tasks are Markov chains of 32 symbols that mix six common ones and rename the symbols; a"
        " task has 8 sequences of 32 symbols to adapt to and as many to predict. Two layers of"
        " width 64, λ = 0.5. Weights at which gradients are compared come from training with MAML"
        " by differences at the same inner rate; the exact gradient is autograd through all steps"
        " in float64; ν and ε that choose themselves do so on the first four tasks. Cosines are"
        " medians over the seeds (least in brackets). Training: Adam with a cosine down to 0, in"
        " TF32 on a GPU; every method's meta-learning rate from the same grid (0.0003, 0.001,"
        " 0.003, 0.01) at each inner rate, by the loss on validation tasks after 200 meta-steps of"
        " one seed more. ± is a 95 % confidence interval over the seeds (Student's t); differences"
        " are paired by seed, which fixes weights and tasks. The verdict compares after equally"
        " many meta-steps. Equal gradients and seconds: those of the cheapest training; others are"
        " read off their curves there, with their learning rates still on the way down; seconds are"
        " those of runs that shared one GPU and 16 cores, up to 15 at a time, and those of MAML by"
        " differences come from a later run, about 2.8 times slower, so that its seconds are"
        " no comparison. Gradients"
        " are all that were taken, looks at ν and ε included, a Hessian product as"
        f" {fewshot.PRODUCT}. Losses closer than {NOISE:g} are alike, whatever the seeds say."
        " Diverged: a gradient was not finite, or the loss ends above that of a uniform guess. The"
        " gradients were compared a second time after ε was chosen in another way: in bf16 autocast"
        " the first way had taken ε 30 times too large, cosines down to 0.54, in 9 of 60 cases."
        " Meta-learning rates are those found with the first way. In bfloat16 FO-B-MAML's default,"
        " its ν chosen by itself, is compared with itself in float32: one seed, on a CPU, all"
        " points but the last."
    ),
)
