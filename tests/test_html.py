"""What notebooks show: the numbers of `str`, as a table, with nothing that could be taken for
markup.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import metanudge as mn
from metanudge.html_table import html_table


class Cells(HTMLParser):
    """The text of every cell and note, and whether each tag that opens is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    tasks = mn.tasks.Sinusoid(shots=3, queries=3, seed=0).batch(range(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mn.models.MLP(1, 1, hidden=(3,))
    learner = mn.MetaLearner(
        model, torch.nn.functional.mse_loss, solver=mn.GradientDescent(lr=0.01, steps=2)
    )
    labelled = mn.Evaluation(*(torch.tensor([0.25, 0.75]) for _ in range(4)))
    return {
        "Stats": learner.backward(tasks),
        "Evaluation": learner.evaluate(tasks),
        "Evaluation of classes": labelled,
        "GradientReport": mn.check_gradient(learner, tasks, estimators=[mn.FOMAML()]),
        "Hypergradient": mn.hypergradient(
            lambda x, phi: (phi - x).square().sum(),
            lambda x, phi: phi.sum(),
            torch.ones(2),
            torch.ones(2),
        ),
    }


@pytest.mark.parametrize(
    "name",
    ["Stats", "Evaluation", "Evaluation of classes", "GradientReport", "Hypergradient"],
)
def test_a_table_has_the_numbers_of_the_text(results: dict[str, object], name: str) -> None:
    found = results[name]
    number = r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?"
    shown = " ".join(Cells(found._repr_html_()).texts)  # type: ignore[attr-defined]
    missing = set(re.findall(number, str(found))) - set(re.findall(number, shown))
    assert not missing - {"64"}, "of float64"


def test_markup_is_shown_not_obeyed(results: dict[str, object]) -> None:
    attack = "<img src=x onerror=alert(1)>"
    stats, report = results["Stats"], results["GradientReport"]
    for html in (
        html_table([(attack, attack)], head=[attack], notes=[attack]),
        replace(stats, path=attack)._repr_html_(),  # type: ignore[type-var, attr-defined]
        replace(report, notes=(attack,))._repr_html_(),  # type: ignore[type-var, attr-defined]
    ):
        assert "<img" not in html
        assert attack in Cells(html).texts
