"""Peak memory of one meta-step: how the four memory experiments measure, draw, tabulate and judge
it.

A meta-step is made of one task at a time, as for a model that fills the device: on the in-place
engine, and for MAML as its users have it, plain autograd through the inner steps (the library's own
MAML in place, one step at a time, holds far less, and is no part of the paper's comparison). What
was there before (the model and the task)
does not count; the meta-gradient in `.grad` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import metanudge as mn
from metanudge.task import Task
from metanudge.testing.memory import peak_memory, trainable_bytes
from metanudge.testing.problems import log_slope
from metanudge_lab import style
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Result,
    ResultTable,
    Row,
    Shown,
    Statement,
    Verdict,
)

STEP = "one training step"
METHODS = (*m.ESTIMATORS, STEP)
MARGIN = 0.10  # "nearly identical", "comparable", "tracks closely"
FLAT = 0.01
MB = 1e6
RATE = 0.01  # inner learning rate
HOW = (
    "One task at a time, on the in-place engine; MAML is plain autograd through the inner steps, as"
    " its users have it and the paper has: not the library's own, which walks back one step at a"
    " time and keeps no graph of them. What existed before the step does not count. On a GPU the"
    " allocator tells; without one, live tensors are counted, which leaves out workspaces of"
    " kernels."
)


def random_task(
    shape: tuple[int, ...], *, ways: int, shots: int, queries: int, device: torch.device
) -> Task:
    """A task of noise: memory does not depend on what is in the tensors."""
    generator = torch.Generator().manual_seed(0)

    def examples(each: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(ways * each, *shape, generator=generator)
        return x.to(device), torch.arange(ways, device=device).repeat_interleave(each)

    return Task(examples(shots), examples(queries))


def measure_step(
    method: str, model: nn.Module, task: Task, *, steps: int, device: torch.device
) -> Row:
    """Bytes that one meta-step (or one plain training step on the query set) needs at its peak, and
    those of one copy of θ.
    """
    work = (
        _training_step(model, task)
        if method == STEP
        else meta_step(method, model, task, steps=steps)
    )
    if device.type == "cuda":  # what libraries allocate once and keep is no part of the step
        work()
        model.zero_grad(set_to_none=True)
    return {"memory": peak_memory(work, device), "parameters": trainable_bytes(model)}


def meta_step(method: str, model: nn.Module, task: Task, *, steps: int) -> Callable[[], object]:
    """What adds a method's meta-gradient of one task to `.grad`."""
    if method == m.MAML:
        return lambda: unrolled(model, task, steps=steps)
    learner = mn.MetaLearner(
        model,
        nn.functional.cross_entropy,
        lam=m.LAM,
        solver=mn.GradientDescent(lr=RATE, steps=steps),
        estimator=m.ESTIMATORS[method],
        engine="inplace",
    )
    return lambda: learner.backward(task, metrics=False)


def unrolled(model: nn.Module, task: Task, *, steps: int) -> None:
    """MAML as in a textbook: every inner step keeps its graph, and one backward pass goes through
    all of them.
    """
    theta: dict[str, Tensor] = dict(model.named_parameters())

    def loss(phi: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, phi, (batch[0],)), batch[1])

    phi = theta
    for _ in range(steps):
        gradients = torch.autograd.grad(
            loss(phi, task.support), list(phi.values()), create_graph=True
        )
        phi = {
            n: p - RATE * (g + m.LAM * (p - theta[n]))
            for (n, p), g in zip(phi.items(), gradients, strict=True)
        }
    loss(phi, task.query).backward()


def _training_step(model: nn.Module, task: Task) -> Callable[[], object]:
    x, y = task.query
    return lambda: nn.functional.cross_entropy(model(x), y).backward()


def memory(result: Result[Any], method: str, **where: Any) -> float:
    """Bytes of one method at one size; NaN where they are not measured."""
    found = result.values("memory", method=method, **where)
    return found[0] if found else math.nan


def extra_copies(result: Result[Any], method: str, than: str, **where: Any) -> float:
    """How much more one method needs than another, in copies of the parameters."""
    found = result.values("parameters", method=method, **where)
    return (
        (memory(result, method, **where) - memory(result, than, **where)) / found[0]
        if found
        else math.nan
    )


def _ratio(result: Result[Any], one: str, other: str, **here: Any) -> float:
    return memory(result, one, **here) / memory(result, other, **here)


def _beyond(result: Result[Any], rival: str, place: str, **here: Any) -> str:
    ours, theirs = memory(result, m.LOSS, **here), memory(result, rival, **here)
    copies = extra_copies(result, m.LOSS, rival, **here)
    return (
        f"at {place} FO-B-MAML is {ours / theirs - 1:+.0%} from {rival}, {copies:.1f} copies of the"
        " parameters"
    )


def megabytes(peak: float) -> str:
    """Bytes as megabytes, without exponents.

    Example:
        >>> megabytes(1234567), megabytes(2517000000)
        ('1.23', '2517')
    """
    return f"{peak / MB:.3g}" if peak < 1000 * MB else f"{peak / MB:.0f}"


def _megabytes(peak: float) -> Shown:
    return Shown(peak, "–" if math.isnan(peak) else megabytes(peak))


@dataclass(frozen=True)
class Axis:
    """What memory is measured against.

    Attributes:
        key: of the sizes in cells.
        label: for a figure.
        at: words for one size, such as "width {}".
    """

    key: str
    label: str
    at: str

    def cells(self, sizes: Sequence[int]) -> list[Cell]:
        """One for each size and method."""
        return [{self.key: size, "method": method} for size in sizes for method in METHODS]

    def draw(self, result: Result[Any], **where: Any) -> list[Drawing]:
        """Megabytes against size; and, for first-order methods, as a multiple of FO-MAML's, with
        the margin of the claim shaded.
        """
        figure, (left, right) = style.figure(2, width=10.8, height=4.4)
        sizes = sorted(result.distinct(self.key))
        for method in result.distinct("method"):
            known = [s for s in sizes if memory(result, method, **{self.key: s}, **where) > 0]
            peaks = [memory(result, method, **{self.key: s}, **where) for s in known]
            look = (
                style.line(method)
                if method != STEP
                else {**style.line(method), "linestyle": ":", "linewidth": 1.2, "marker": ""}
            )
            left.plot(known, [peak / MB for peak in peaks], **look)
            if method not in (m.MAML, m.IMAML):
                ratios = [
                    peak / memory(result, m.FO_MAML, **{self.key: s}, **where)
                    for s, peak in zip(known, peaks, strict=True)
                ]
                right.plot(known, ratios, **look)
        left.set(ylabel="peak memory of a meta-step, MB", yscale="log")
        right.set(ylabel="relative to FO-MAML", title="first-order methods")
        right.axhspan(1 - MARGIN, 1 + MARGIN, color=style.INK, alpha=0.10, linewidth=0)
        low, high = right.get_ylim()
        right.set_ylim(min(low, 1 - 1.5 * MARGIN), max(high, 1 + 1.5 * MARGIN))
        for one in (left, right):
            one.set(xlabel=self.label)
            one.set_xscale("log", base=2)
            one.set_xticks(sizes)
            style.plain_ticks(one.xaxis)
        style.plain_ticks(left.yaxis)
        left.yaxis.set_minor_formatter(
            lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
        )
        handles, labels = left.get_legend_handles_labels()
        style.legend(right, handles=handles, labels=labels)
        return [Drawing(figure, alt=self._alt(result, **where))]

    def table(self, result: Result[Any], **where: Any) -> ResultTable:
        """Megabytes at every size, and at the largest also relative to FO-MAML and the difference
        in copies of θ.
        """
        sizes = sorted(result.distinct(self.key))
        rows = []
        for method in result.distinct("method"):
            peaks = [memory(result, method, **{self.key: s}, **where) for s in sizes]
            at_last = {self.key: sizes[-1], **where}
            ratio, copies = (
                peaks[-1] / memory(result, m.FO_MAML, **at_last),
                extra_copies(result, method, m.FO_MAML, **at_last),
            )
            rows.append(
                (
                    method,
                    *map(_megabytes, peaks),
                    Shown.number(ratio, ".2f"),
                    Shown.number(copies, "+.1f") if method in m.FIRST_ORDER else None,
                )
            )
        head = (
            *(f"MB, {self.at.format(s)}" for s in sizes),
            f"relative to FO-MAML at {self.at.format(sizes[-1])}",
            "the difference in copies of θ",
        )
        return ResultTable(("method", *head), rows)

    def judge(self, result: Result[Any], **where: Any) -> Verdict:
        """The claim's parts: FO-B-MAML within the margin of FO-MAML and Reptile at every size;
        MAML and iMAML above it at every size.
        """
        return Verdict.of(
            self.compare(result, **where),
            self._summary(result, **where),
            self.above_a_step(result, **where),
        )

    def compare(self, result: Result[Any], **where: Any) -> list[Statement]:
        """All parts set methods against one another."""
        sizes = sorted(result.distinct(self.key))
        places = {self.at.format(s): {self.key: s, **where} for s in sizes}
        found = []
        for rival in (m.FO_MAML, m.REPTILE):
            beyond = [
                _beyond(result, rival, place, **here)
                for place, here in places.items()
                if not abs(_ratio(result, m.LOSS, rival, **here) - 1) <= MARGIN
            ]
            words = f"FO-B-MAML is within {MARGIN:.0%} of {rival} at every size"
            found.append(Statement(not beyond, words, "; ".join(beyond), "first order"))
        for rival in (m.MAML, m.IMAML):
            name = rival.partition(",")[0]
            over = [
                p for p, here in places.items() if not _ratio(result, rival, m.LOSS, **here) > 1
            ]
            times = [_ratio(result, rival, m.LOSS, **here) for here in places.values()]
            words = f"{name} needs {min(times):.1f} to {max(times):.1f} times as much"
            contrary = f"{name} needs no more than it at {', '.join(over)}"
            found.append(Statement(not over, words, contrary, "second order"))
        return found

    def growth(self, result: Result[Any], method: str, **where: Any) -> float:
        """The power of the size with which memory grows from the last size but one to the last."""
        sizes = sorted(result.distinct(self.key))[-2:]
        peaks = [memory(result, method, **{self.key: size}, **where) for size in sizes]
        return log_slope(sizes, peaks) if len(sizes) > 1 else math.nan

    def above_a_step(self, result: Result[Any], **where: Any) -> str:
        """What a meta-step needs beyond a training step on the same examples."""
        places = [{self.key: s, **where} for s in sorted(result.distinct(self.key))]
        ratios = [
            memory(result, m.LOSS, **here) / memory(result, STEP, **here) - 1 for here in places
        ]
        return (
            f"It is {min(ratios):.1%} to {max(ratios):.1%} above one plain training step, which has"
            " no θ to return to and no meta-gradient."
        )

    def _summary(self, result: Result[Any], **where: Any) -> str:
        """The numbers at the largest size, and the widest distance from FO-MAML at any."""
        sizes = sorted(result.distinct(self.key))
        last = {self.key: sizes[-1], **where}
        mb = {method: megabytes(memory(result, method, **last)) for method in METHODS}
        ranges = []
        for method in (m.LOSS, m.GRADIENT):
            apart = [
                memory(result, method, **{self.key: s}, **where)
                / memory(result, m.FO_MAML, **{self.key: s}, **where)
                - 1
                for s in sizes
            ]
            ranges.append(f"{min(apart):+.1%} to {max(apart):+.1%}")
        return (
            f"At {self.at.format(sizes[-1])} a meta-step needs {mb[m.LOSS]} MB with FO-B-MAML,"
            f" {mb[m.GRADIENT]} with its gradient nudge, {mb[m.FO_MAML]} with FO-MAML,"
            f" {mb[m.REPTILE]} with Reptile, {mb[m.IMAML]} with iMAML and {mb[m.MAML]} with MAML (a"
            f" plain training step: {mb[STEP]}); over all sizes FO-B-MAML's differs from FO-MAML's"
            f" by {ranges[0]}, with the gradient nudge by {ranges[1]}."
        )

    def _alt(self, result: Result[Any], **where: Any) -> str:
        last = max(result.distinct(self.key))
        found = {
            method: memory(result, method, **{self.key: last}, **where)
            for method in result.distinct("method")
        }
        ends = ", ".join(
            f"{method} {megabytes(peak)} MB" for method, peak in found.items() if peak > 0
        )
        return (
            f"Peak memory of a meta-step against {self.label}, logarithmic, and relative to"
            f" FO-MAML. At {self.at.format(last)}: {ends}."
        )
