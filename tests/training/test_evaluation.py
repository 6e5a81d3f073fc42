"""Evaluation against a loop written out by hand, both BatchNorm protocols, class names and the
report.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import metanudge as mn
from metanudge.models import MLP, Conv1D
from metanudge.tasks import MNIST1D, Labelled, Sinusoid
from metanudge.training import runs
from metanudge.training.config import TrainConfig
from metanudge.training.evaluation import (
    evaluate_run,
    evaluate_tasks,
    measure,
    plot_steps,
    with_support_statistics,
)
from metanudge.training.evaluation.measure import episode_classes
from trained_runs import make_run, vector_run, vector_table


@pytest.fixture
def source() -> MNIST1D:
    return MNIST1D(ways=3, shots=5, queries=6, num_samples=1000, cache=False)


@pytest.fixture
def learner() -> mn.MetaLearner:
    torch.manual_seed(0)
    return mn.MetaLearner(
        Conv1D(3, channels=4), cross_entropy, solver=mn.GradientDescent(lr=0.1, steps=3)
    )


def by_hand(
    learner: mn.MetaLearner, task: mn.Task, steps: int, protocol: str
) -> tuple[float, float]:
    adapted = (
        learner.adapt(task.support, steps=steps) if steps else learner.adapt(task.support, steps=1)
    )
    if not steps:
        adapted.load_state_dict(learner.model.state_dict())
    x, y = task.query
    if protocol == "inductive":
        # Momentum 1 makes the running statistics those of the one batch; torch keeps the unbiased
        # variance, undone here.
        sizes: dict[nn.Module, int] = {}
        norms = [m for m in adapted.modules() if isinstance(m, nn.BatchNorm1d)]
        for norm in norms:
            norm.momentum = 1.0
            norm.register_forward_pre_hook(
                lambda m, inputs: sizes.update({m: inputs[0].numel() // m.num_features})
            )
        with torch.no_grad():
            adapted.train()(task.support[0])
            for norm in norms:
                norm.running_var.mul_((sizes[norm] - 1) / sizes[norm])
        adapted.eval()
    with torch.no_grad():
        logits = adapted(x)
    return float(cross_entropy(logits, y)), float((logits.argmax(1) == y).double().mean())


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_equals_a_loop_by_hand(learner: mn.MetaLearner, source: MNIST1D, engine: str) -> None:
    learner.engine = engine  # type: ignore[assignment]
    batch = source.batch(range(5), "test")
    before = {name: value.clone() for name, value in learner.named_parameters()}
    report = evaluate_tasks(learner, batch, steps=[0, 2])
    assert [(row.steps, row.batch_norm) for row in report.rows] == [
        (k, protocol) for k in (0, 2, 3) for protocol in ("transductive", "inductive")
    ]
    for row in report.rows:
        expected = [by_hand(learner, task, row.steps, str(row.batch_norm)) for task in batch]
        losses, accuracies = torch.tensor(expected, dtype=torch.float64).T
        assert row.loss == pytest.approx(float(losses.mean()), abs=1e-5)
        assert row.accuracy == pytest.approx(float(accuracies.mean()), abs=1e-9)
        assert row.accuracy_ci95 == pytest.approx(
            1.96 * float(accuracies.std()) / math.sqrt(5), abs=1e-9
        )
        assert row.worst_decile == pytest.approx(float(accuracies.min()))
    assert all(torch.equal(value, before[name]) for name, value in learner.named_parameters())


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_running_statistics_stay_as_they_are(
    learner: mn.MetaLearner, source: MNIST1D, engine: str
) -> None:
    learner.engine = engine  # type: ignore[assignment]
    before = {name: value.clone() for name, value in learner.named_buffers()}
    evaluate_tasks(learner, source.batch(range(2), "test"), steps=[])
    assert all(torch.equal(value, before[name]) for name, value in learner.named_buffers())


def test_transductive_equals_the_learners_own_evaluation(
    learner: mn.MetaLearner, source: MNIST1D
) -> None:
    batch = source.batch(range(12), "test")
    own = learner.evaluate(batch)
    report = evaluate_tasks(learner, batch, steps=[])
    assert report.task_accuracies == pytest.approx(own.accuracy.tolist())
    assert report.task_losses == pytest.approx(own.loss.tolist(), rel=1e-5)
    assert report.main.accuracy_ci95 == pytest.approx(own.accuracy_ci95)


def test_inductive_predictions_do_not_depend_on_each_other_and_transductive_ones_do(
    source: MNIST1D, learner: mn.MetaLearner
) -> None:
    task = source.task(0, "test")
    adapted = learner.adapt(task.support)
    frozen = with_support_statistics(adapted, task.support[0])
    x = task.query[0]
    with torch.no_grad():
        torch.testing.assert_close(frozen(x)[:1], frozen(x[:1]))
        # the statistics are exactly the support's
        torch.testing.assert_close(frozen(task.support[0]), adapted(task.support[0]))
        assert not torch.allclose(adapted(x)[:2], adapted(x[:2]), atol=1e-3)
    assert not frozen.training
    assert adapted.training


def test_batch_norm_without_running_statistics(source: MNIST1D) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 8),
        nn.BatchNorm1d(8, track_running_stats=False, affine=False),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    learner = mn.MetaLearner(model, cross_entropy)
    report = evaluate_tasks(learner, source.batch(range(3), "test"), steps=[])
    assert [row.batch_norm for row in report.rows] == ["transductive", "inductive"]
    assert model[1].running_mean is None


def test_frozen_batch_norm_has_one_protocol(learner: mn.MetaLearner, source: MNIST1D) -> None:
    learner.model.eval()
    report = evaluate_tasks(learner, source.batch(range(3), "test"), steps=[])
    assert [row.batch_norm for row in report.rows] == [None]


def test_dropout_is_off_in_predictions(source: MNIST1D) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), MLP(40, 3))
    learner = mn.MetaLearner(model, cross_entropy)
    report = evaluate_tasks(learner, source.batch(range(4), "test"), steps=[0])
    with torch.no_grad():
        expected = [
            float(cross_entropy(model[1](task.query[0]), task.query[1]))
            for task in source.batch(range(4), "test")
        ]
    assert report.at(0).loss == pytest.approx(sum(expected) / 4, rel=1e-5)


def test_class_names_are_the_ones_the_episode_was_drawn_from() -> None:
    # One constant per class, so the inputs tell which class an example is from.
    numbers = torch.arange(30) // 3
    source = Labelled(
        numbers[:, None].float(),
        [f"n{n}" for n in numbers.tolist()],
        ways=2,
        shots=1,
        queries=2,
        splits=(0.0, 0.0, 1.0),
    )
    names = episode_classes(source, range(20), "test")
    assert names is not None
    for task, classes in zip(source.batch(range(20), "test"), names, strict=True):
        assert [f"n{int(value)}" for value in task.support[0][:, 0]] == list(classes)
    assert episode_classes(Sinusoid(), range(3), "test") is None


def test_accuracy_by_class_counts_every_query(learner: mn.MetaLearner, source: MNIST1D) -> None:
    batch = source.batch(range(8), "test")
    names = episode_classes(source, range(8), "test")
    report = evaluate_tasks(learner, batch, steps=[], classes=names)
    assert sum(c.examples for c in report.classes) == 8 * 3 * 6
    right = sum(c.accuracy * c.examples for c in report.classes)
    assert right / (8 * 3 * 6) == pytest.approx(report.main.accuracy)
    assert [c.accuracy for c in report.classes] == sorted(c.accuracy for c in report.classes)
    assert {c.name for c in evaluate_tasks(learner, batch, steps=[]).classes} == {
        "label 0",
        "label 1",
        "label 2",
    }


def test_regression_reports_the_loss_only() -> None:
    torch.manual_seed(0)
    learner = mn.MetaLearner(
        MLP(1, 1, hidden=(8,)), mse_loss, solver=mn.GradientDescent(lr=0.01, steps=2)
    )
    batch = Sinusoid(shots=5, queries=5).batch(range(6), "test")
    report = evaluate_tasks(learner, batch)
    assert not report.classification
    assert report.classes == ()
    assert report.main.loss == pytest.approx(learner.evaluate(batch).mean_loss, rel=1e-5)
    assert "query loss" in str(report)
    assert "%" not in str(report).replace("95 %", "")
    assert report.as_dict()["rows"][0]["accuracy"] is None


def test_diverged_tasks_are_counted_and_wrong() -> None:
    torch.manual_seed(0)
    learner = mn.MetaLearner(
        MLP(40, 3, hidden=(8,)), cross_entropy, solver=mn.GradientDescent(lr=1e30, steps=3)
    )
    report = evaluate_tasks(
        learner, MNIST1D(num_samples=1000, cache=False).batch(range(3), "test"), steps=[0]
    )
    assert report.main.diverged == 3
    assert report.main.accuracy == 0
    assert "diverged on 3 of 3 tasks" in str(report)
    json.dumps(report.as_dict(), allow_nan=False)


def test_batches_do_not_change_the_result(
    learner: mn.MetaLearner, source: MNIST1D, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = source.batch(range(7), "test")
    seen: list[tuple[int, int | None]] = []
    whole = evaluate_tasks(learner, batch)
    monkeypatch.setattr(measure, "TASKS_AT_ONCE", 3)
    parts = evaluate_tasks(learner, batch, progress=lambda done, total: seen.append((done, total)))
    assert parts.task_accuracies == whole.task_accuracies
    assert seen[-1] == (7, 7)


def test_a_run(tmp_path: Path) -> None:
    table = vector_table(tmp_path / "data.csv", classes=20)
    run = runs.load(vector_run(tmp_path / "run", table))
    report = evaluate_run(run, tasks=10, steps=[0, 1])
    assert report.main.accuracy > 0.9 > report.at(0).accuracy
    assert {c.name for c in report.classes} <= set(run.source.classes("test"))
    plot_steps(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_a_run_with_bf16_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    config = TrainConfig(
        "mnist1d",
        data_options="num_samples=1000",
        model="conv1d:channels=4",
        queries=5,
        precision="bf16",
    )
    run = runs.load(make_run(tmp_path / "run", config))
    report = evaluate_run(run, tasks=3, steps=[0])
    assert all(math.isfinite(row.loss) for row in report.rows)
    task = run.source.task(0, "test")
    with run.precision():
        frozen = with_support_statistics(run.learner.adapt(task.support), task.support[0])
    assert all(
        value.dtype == torch.float32 for name, value in frozen.named_buffers() if "running" in name
    )


def test_mistakes_are_explained(learner: mn.MetaLearner, source: MNIST1D) -> None:
    batch = source.batch(range(2), "test")
    with pytest.raises(ValueError, match="steps=-1 cannot be taken"):
        evaluate_tasks(learner, batch, steps=[-1])
    with pytest.raises(ValueError, match="classes has 1 entries for 2 tasks"):
        evaluate_tasks(learner, batch, classes=[("a",)])
    with pytest.raises(ValueError, match="no result for steps=77"):
        evaluate_tasks(learner, batch, steps=[]).at(77)
    other = mn.MetaLearner(
        MLP(40, 3), lambda model, batch: cross_entropy(model(batch[0]), batch[1])
    )
    with pytest.raises(TypeError, match="loss\\(output, target\\)"):
        evaluate_tasks(other, batch)


def test_what_a_class_is_taken_for_equals_counting_by_hand(source: MNIST1D) -> None:
    torch.manual_seed(0)
    learner = mn.MetaLearner(MLP(40, 3), cross_entropy, solver=mn.GradientDescent(lr=0.1, steps=2))
    report = evaluate_tasks(
        learner, source.batch(range(8), "test"), steps=[],
        classes=source.episode_classes(range(8), "test"),
    )  # fmt: skip
    taken: dict[tuple[str, str], list[tuple[int, int]]] = {}
    both: dict[tuple[str, str], int] = {}
    for number, names in enumerate(source.episode_classes(range(8), "test")):
        task = source.task(number, "test")
        with torch.no_grad():
            found = learner.adapt(task.support)(task.query[0]).argmax(1).tolist()
        for place, (label, own) in enumerate(zip(task.query[1].tolist(), found, strict=True)):
            taken.setdefault((names[label], names[own]), []).append((number, place))
        for one in names:
            for other in names:
                both[one, other] = both.get((one, other), 0) + 6
    assert any(one != other for one, other in taken), "it makes mistakes"
    for found_class in report.classes:
        name = found_class.name
        assert found_class.accuracy == len(taken.get((name, name), [])) / both[name, name]
        others = {other: len(at) for (one, other), at in taken.items() if other != name == one}
        most = sorted(others, key=lambda other: (-others[other], other))[:4]
        assert [(t.name, t.times, t.examples) for t in found_class.taken_for] == [
            (other, others[other], both[name, other]) for other in most
        ]
        for mistake in found_class.wrong:
            assert (mistake.task, mistake.query) in taken[name, mistake.taken_for]
        assert len(found_class.wrong) == min(4, sum(others.values()))
