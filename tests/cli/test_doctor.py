"""`metanudge doctor`: its verdict, also when something is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from metanudge.cli import doctor, main
from metanudge.cli.doctor import Check, self_test
from metanudge.estimators import Exact
from metanudge.learner import MetaLearner
from metanudge.solvers import GradientDescent


def test_everything_is_shown_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("metanudge", "python", "torch", "numpy", "cpu", "memory", "cache", "mnist1d", "omniglot", "tensorboard", "PASS"):
        assert word in text
    assert "FAIL" not in text
    assert torch.get_num_threads() == threads


def test_both_engines_and_the_main_estimators_are_checked() -> None:
    checks = self_test()
    assert {check.engine for check in checks} == {"stacked", "inplace"}
    assert {check.estimator.split()[0].rstrip(",") for check in checks} == {"FOBMAML", "IMAML", "MAML"}
    assert all(check.passed for check in checks)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    correct = MetaLearner.meta_gradient

    def wrong(self: MetaLearner, *args: Any, **options: Any) -> Any:
        gradient, stats = correct(self, *args, **options)
        return {name: leaf * 1.001 for name, leaf in gradient.items()}, dataclasses.replace(stats)

    monkeypatch.setattr(MetaLearner, "meta_gradient", wrong)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "8 of 8 checks FAILED" in text
    assert "FAIL" in text


def test_a_gradient_that_is_no_number_fails() -> None:
    assert not Check("any", "stacked", float("nan"), 1.0).passed


def test_the_oracle_is_the_implicit_gradient() -> None:
    model, tasks = doctor._problem()
    oracle = doctor._dense_oracle(model, tasks)
    solver = GradientDescent(lr=0.4, steps=60)
    learner = MetaLearner(model, torch.nn.functional.cross_entropy, lam=doctor._LAM, solver=solver, estimator=Exact())
    gradient, _ = learner.meta_gradient(tasks)
    torch.testing.assert_close(torch.cat([leaf.flatten() for leaf in gradient.values()]), oracle, rtol=1e-12, atol=1e-14)
