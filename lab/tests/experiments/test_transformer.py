"""The Transformer: its tasks are the chains they claim to be, its rows are measured against the
right gradient, and its verdict follows from them.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import metanudge as mn
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments import transformer, transformer_quality, transformer_runs
from metanudge_lab.experiments.base import FinishedCell, Result
from metanudge_lab.experiments.fewshot import Trial
from metanudge_lab.experiments.transformer_quality import qualities
from metanudge_lab.experiments.transformer_rows import at_equal_cost, final
from metanudge_lab.experiments.transformer_runs import DIFFERENCE, METHODS, Config
from metanudge_lab.experiments.transformer_tasks import GPT, MarkovChains
from metanudge_lab.experiments.working import working_in

CPU = torch.device("cpu")
SMALL = Config(
    inner_rates=(0.3,),
    meta_rates=(3e-3,),
    iterations=4,
    points=(0, 4),
    seeds=1,
    methods=(DIFFERENCE, m.MAML),
    tasks=2,
    quality_tasks=2,
    test_tasks=3,
    symbols=8,
    length=5,
    sequences=2,
    width=8,
    layers=1,
    heads=2,
    steps=3,
    save_every=2,
)


def test_sequences_follow_their_chain() -> None:
    source = MarkovChains(symbols=4, length=4000, sequences=2, seed=1)
    chain = source.transitions(source._keys([7], "test"))[0]
    assert np.allclose(chain.sum(-1), 1)
    x, y = (torch.cat(pair) for pair in zip(*_sets(source.task(7, "test")), strict=True))
    counts = torch.zeros(4, 4, dtype=torch.float64)
    counts.index_put_((x.flatten(), y.flatten()), torch.ones(1, dtype=torch.float64), True)
    total = counts.sum(-1, keepdim=True)
    p = torch.from_numpy(chain)
    # frequencies of independent draws: five standard deviations of each
    assert bool(((counts / total - p).abs() <= 5 * (p * (1 - p) / total).sqrt()).all())


def _sets(task: mn.Task) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return task.support, task.query


def test_a_task_is_its_own_whatever_stands_beside_it() -> None:
    source = MarkovChains(symbols=8, length=5, sequences=2, seed=3)
    beside, alone = source.batch([4, 9])[1], source.task(9)
    for one, other in zip(_sets(beside), _sets(alone), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(alone.support[0], source.task(9, "val").support[0])


def test_the_network_sees_no_later_symbol() -> None:
    torch.manual_seed(0)
    model = GPT(symbols=8, length=6, width=8, heads=2).double()
    x = torch.randint(0, 8, (2, 6), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 4:] = (x[:, 4:] + 1) % 8
    before, after = model(x), model(changed)
    assert torch.equal(before[..., :4], after[..., :4])
    assert not torch.allclose(before[..., 4:], after[..., 4:])


def _by_hand(trial: Trial, inner: float, *, first_order: bool) -> Tensor:
    """The gradient of the adaptation by autograd through all steps, or FO-MAML's, in float64."""
    batch = trial.source.batch(range(SMALL.quality_tasks), "val")
    theta = {n: p.detach().double().requires_grad_() for n, p in trial.model.named_parameters()}

    def loss(phi: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        out = functional_call(trial.model, phi, (data[0],))
        return torch.nn.functional.cross_entropy(out, data[1])

    total = torch.zeros((), dtype=torch.float64)
    for task in batch:
        phi = {n: p * 1.0 for n, p in theta.items()}
        for _ in range(SMALL.steps):
            pull = sum(((phi[n] - p) ** 2).sum() for n, p in theta.items())
            inner_loss = loss(phi, task.support) + SMALL.lam / 2 * pull
            g = torch.autograd.grad(inner_loss, list(phi.values()), create_graph=True)
            phi = {n: p - inner * d for (n, p), d in zip(phi.items(), g, strict=True)}
        if first_order:
            phi = {n: theta[n] + (p - theta[n]).detach() for n, p in phi.items()}
        total = total + loss(phi, task.query) / len(batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(theta.values()))])


def test_estimates_are_compared_with_the_gradient_of_the_adaptation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {name: METHODS[name] for name in (DIFFERENCE, m.MAML, m.FO_MAML)}
    monkeypatch.setattr(transformer_quality, "METHODS", few)
    trial = transformer_runs.make_trial(DIFFERENCE, SMALL, seed=0, device=CPU)
    rows = {(r["method"], r["precision"]): r for r in qualities(7, trial, 0.3, SMALL)}
    exact, first = (_by_hand(trial, 0.3, first_order=flag) for flag in (False, True))
    cosine = float(torch.cosine_similarity(first, exact, dim=0))
    # float32 estimates: rounding of some hundred operations, and no more
    assert rows[m.FO_MAML, "fp32"]["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert rows[m.FO_MAML, "fp32"]["error"] == pytest.approx(
        float((first - exact).norm() / exact.norm()), rel=1e-4
    )
    assert rows[m.MAML, "fp32"]["error"] < 1e-4
    assert rows[DIFFERENCE, "fp32"]["cosine"] > 0.9999
    assert cosine < 0.999
    assert not rows[DIFFERENCE, "tf32"]["run"], "no CUDA device"
    assert rows[DIFFERENCE, "bf16"]["run"]


def test_fewer_bits_are_compared_on_the_way_of_the_training() -> None:
    """Up to the last point but one; a width of 8 has products of few terms, each 2⁻⁹ off."""
    config = dataclasses.replace(SMALL, points=(0, 2, 4))
    rows = transformer.measure({"part": "bits", "inner": 0.3, "seed": 0}, config, CPU)
    assert [(row["iteration"], row["precision"]) for row in rows] == [
        (step, precision) for step in (0, 2) for precision in ("bf16", "bf16-true")
    ]
    assert all(0.9 < row["cosine"] < 1 - 1e-7 for row in rows)
    assert all(row["nu"] > row["nu_in_float32"] for row in rows), "coarser, so larger nudges"


def test_gradients_spent_are_those_that_were_taken() -> None:
    """K = 3: 3·3 + 1 for each task of a meta-step, and one look on both tasks: at seven ε, and at
    the gradient without products, 3 + 1.
    """
    cell = {"part": "training", "method": DIFFERENCE, "inner": 0.3, "seed": 0}
    rows = transformer.measure(cell, SMALL, CPU)
    spent = {row["iteration"]: row["gradients"] for row in rows if row["kind"] == "curve"}
    assert spent[4] == 4 * 2 * 10 + (7 * 10 + 4) * 2
    assert spent[4] - spent[2] == 2 * 2 * 10


def test_a_broken_off_cell_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"part": "quality", "inner": 0.3, "seed": 0}
    seen: list[int] = []

    def look(step: int, trial: Trial, inner: float, config: Config) -> list[dict[str, object]]:
        seen.append(step)
        if seen == [0, 4, 0, 4]:
            raise KeyboardInterrupt
        theta = [float(leaf.detach().norm()) for leaf in trial.model.parameters()]
        return [{"kind": "quality", "iteration": step, "theta": theta}]

    monkeypatch.setattr(transformer, "qualities", look)
    whole = transformer.measure(dict(cell), SMALL, CPU)
    with pytest.raises(KeyboardInterrupt), working_in(tmp_path / "cell"):
        transformer.measure(dict(cell), SMALL, CPU)
    with working_in(tmp_path / "cell"):
        again = transformer.measure(dict(cell), SMALL, CPU)
    assert seen == [0, 4, 0, 4, 4], "what was found before the crash is not measured again"
    for row in (*whole, *again):
        row.pop("seconds", None)
    assert again == whole


def transformer_result(
    *,
    fp32: float = 0.999,
    coarse: float | None = 0.98,
    behind: float = 0.0,
    broken: bool = False,
    bits: float = 0.999,
    inner_rates: tuple[float, ...] = (0.1,),
) -> Result[Config]:
    """Differences with these cosines, and a loss so much above MAML's; FO-MAML is 0.05 above."""
    config = Config(
        inner_rates=inner_rates,
        iterations=100,
        points=(0, 100),
        methods=(DIFFERENCE, m.MAML, m.FO_MAML),
    )
    levels = {DIFFERENCE: behind, m.MAML: 0.0, m.FO_MAML: 0.05}
    cosines = {DIFFERENCE: fp32, m.MAML: 1.0, m.FO_MAML: 0.5}

    def measured() -> Iterator[FinishedCell]:
        noise = random.Random(0)
        for cell in transformer.cells(config):
            if cell["part"] == "rates":
                yield FinishedCell(cell, [{"kind": "chosen", "rate": 1e-3}], 0.0, 0)
                continue
            if cell["part"] == "bits":
                row = {"kind": "bits", "iteration": 0, "cosine": bits}
                few = [{**row, "precision": precision} for precision in ("bf16", "bf16-true")]
                yield FinishedCell(cell, few, 0.0, 0)
                continue
            method = str(cell.get("method", DIFFERENCE))
            common = 2.6 + 0.02 * int(cell["seed"] or 0)
            rows: list[dict[str, object]] = [
                {
                    "kind": "curve",
                    "method": method,
                    "rate": 1e-3,
                    "iteration": step,
                    "gradients": step * (6.0 if method == m.FO_MAML else 16.0),
                    "seconds": step * 0.01,
                    "loss": common + levels[method] + 1 / step + 0.002 * noise.random(),
                    "ci95": 0.01,
                }
                for step in (10, 50, 100)
            ]
            if method == DIFFERENCE:
                quality = [(name, "fp32", value) for name, value in cosines.items()]
                quality += [(DIFFERENCE, name, coarse) for name in ("tf32", "bf16")]
                rows += [
                    {
                        "kind": "quality",
                        "method": name,
                        "precision": precision,
                        "iteration": step,
                        "run": value is not None,
                        "cosine": value,
                        "error": None,
                    }
                    for step in config.points
                    for name, precision, value in quality
                ]
                if broken and cell["seed"] == 0:
                    rows = [*rows[:1], {"kind": "diverged", "method": method, "rate": 1e-3}]
            yield FinishedCell(cell, rows, 0.0, 0)

    return Result("transformer", "full", config, list(measured()))


def test_the_verdict_follows_the_rows() -> None:
    good = transformer.judge(transformer_result())
    assert good.status == "reproduced"
    assert "TF32 the median is 0.9800" in good.reason
    low = transformer.judge(transformer_result(fp32=0.98))
    assert low.status == "partly"
    assert "least cosine of all 10 is 0.9800, aim 0.99" in low.reason
    unrun = transformer.judge(transformer_result(coarse=None))
    assert unrun.status == "partly"
    assert "Not tested: TF32" in unrun.reason
    assert "median is 0.9600" in transformer.judge(transformer_result(coarse=0.96)).reason
    rounded = transformer.judge(transformer_result(bits=0.95))
    assert rounded.status == "partly"
    assert "bf16 parameters has a least cosine of 0.9500 to itself" in rounded.reason
    late = transformer.judge(transformer_result(behind=0.03))
    assert late.status == "partly"
    assert "behind it" in late.reason
    broken = transformer.judge(transformer_result(broken=True))
    assert "differences diverge with 1 seeds" in broken.reason
    assert "2 points were not reached" in broken.reason


def test_a_diverged_run_is_no_number() -> None:
    result = transformer_result(broken=True)
    assert math.isnan(final(result, DIFFERENCE, 0.1, 0))
    assert final(result, DIFFERENCE, 0.1, 1) == pytest.approx(2.63, abs=0.003)
    shown = transformer.table(result)
    line = next(row for row in shown.rows if row[:2] == (0.1, DIFFERENCE))
    assert line[-1] == "1 of 5"


def test_at_equal_cost_the_cheapest_training_sets_the_budget() -> None:
    """FO-MAML's 600 gradients in all are 37.5 meta-steps of MAML, between 10 and 50."""
    result = transformer_result()
    cheap = at_equal_cost(result, m.FO_MAML, 0.1, "gradients")
    assert cheap[0] == final(result, m.FO_MAML, 0.1, 0)
    share = math.log(37.5 / 10) / math.log(5)
    expected = 2.6 + 0.1 + share * (0.02 - 0.1)
    dear = at_equal_cost(result, m.MAML, 0.1, "gradients")
    assert dear[0] == pytest.approx(expected, abs=0.002)


def test_names_that_are_shuffled_do_not_pass() -> None:
    """The verdict holds for few of 200 ways to name the runs of each seed: those in which FO-MAML's
    never counts as one of differences, (2/3)¹⁰ of all.
    """
    result = transformer_result(inner_rates=(0.1, 0.3))
    shuffle, passed = random.Random(1), 0
    names = result.config.methods
    for _ in range(200):
        swaps = {
            (measured.cell["inner"], measured.cell["seed"]): dict(
                zip(names, shuffle.sample(names, 3), strict=True)
            )
            for measured in result.measured
            if "seed" in measured.cell
        }
        renamed = []
        for one in result.measured:
            swap = swaps.get((one.cell["inner"], one.cell.get("seed")), {})
            cell = {k: swap.get(v, v) if k == "method" else v for k, v in one.cell.items()}
            rows = [{**row, "method": swap.get(row.get("method"), "")} for row in one.rows]
            renamed.append(FinishedCell(cell, rows, 0.0, 0) if swap else one)
        verdict = transformer.judge(dataclasses.replace(result, measured=renamed))
        passed += verdict.status == "reproduced"
    assert passed <= 10
