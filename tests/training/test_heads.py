"""`--head prototypes`: runs for any number of classes, from settings to labelled files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from metanudge.baselines import PENALTIES, logistic
from metanudge.cli import main
from metanudge.models import MLP, Prototypes
from metanudge.page.words import tasks_of
from metanudge.task import Task
from metanudge.training import runs
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from metanudge.training.evaluation import evaluate_run, evaluate_tasks
from metanudge.training.evaluation.mistakes import mistakes
from metanudge.training.progress import Quiet
from metanudge.training.sources import build_learner
from metanudge.training.trainer import train
from metanudge.training.use import Classifier, adapt
from metanudge.training.use.examples import examples_to_label
from trained_runs import (
    character_folders,
    make_run,
    omniglot_run,
    vector_run,
    vector_table,
    write_images,
)
from training.test_trainer import fingerprint, go

MANY = {
    "data": "mnist1d", "data_options": "num_samples=1000", "head": "prototypes", "ways": "2-4",
    "shots": "1-3", "queries": 2, "model": "mlp:hidden=(8,)", "tasks": 3, "estimator": "fomaml",
}  # fmt: skip


class Mirror(MLP):
    """A model of the user's own, with a head."""


MODULE = MLP(6, 3, hidden=(5,))


def test_a_run_with_many_sizes_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    said = go(tmp_path / "whole", **MANY)
    assert said.facts["data"].startswith("mnist1d: 2-4-way 1-3-shot, 2 queries; 3 tasks")
    assert "head of prototypes" in said.facts["model"]
    go(tmp_path / "first", **{**MANY, "iterations": 4})
    config = TrainConfig.read(tmp_path / "first" / "config.json")
    train(dataclasses.replace(config, iterations=8), resume=tmp_path / "first", reporter=Quiet())
    assert fingerprint(tmp_path / "first") == fingerprint(tmp_path / "whole")
    with pytest.raises(UserError, match="--ways was '2-4', now '2-3'"):
        train(dataclasses.replace(config, ways="2-3"), resume=tmp_path / "first", reporter=Quiet())


def test_ranges_are_kept_and_the_head_stays_where_it_begins(tmp_path: Path) -> None:
    go(tmp_path / "run", **MANY)
    config = TrainConfig.read(tmp_path / "run" / "config.json")
    assert (config.head, config.ways, config.shots) == ("prototypes", "2-4", "1-3")
    run = runs.load(tmp_path / "run")
    model = run.learner.model
    assert isinstance(model, Prototypes)
    assert model.most == 4
    assert not bool(model.weight.any())
    assert not bool(model.bias.any())
    fresh = build_learner(config, run.shapes).model
    assert isinstance(fresh, Prototypes)
    assert not torch.equal(fresh.features[0][1].weight, model.features[0][1].weight)  # type: ignore[index]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"logistic regression", "nearest centroid", "chance"} <= summary["baselines"].keys()


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vector_table(folder / "data.csv", classes=20)
    vector_run(folder / "run", folder / "data.csv", head="prototypes")
    vector_run(folder / "fixed", folder / "data.csv")
    vector_table(folder / "others.csv", classes=30, first=40)
    for ways in (2, 7, 12):
        vector_table(folder / f"few{ways}.csv", classes=ways, each=4, first=40, seed=1)
        vector_table(folder / f"rows{ways}.csv", classes=ways, each=5, first=40, seed=2)
    return folder


@pytest.mark.parametrize("ways", [2, 7, 12])
def test_what_it_says_is_what_the_learner_computes(vectors: Path, ways: int) -> None:
    """Adapting to files is the learner's own adaptation, and the exported layer the prototypes."""
    run = runs.load(vectors / "run")
    found = adapt(run, vectors / f"few{ways}.csv")
    assert isinstance(found, Classifier)
    table = vectors / f"rows{ways}.csv"
    raw = torch.stack([row for _, _, row in examples_to_label(table, found.preprocessing, ())])
    inputs = found.preprocessing.inputs(raw)
    labels = torch.arange(ways * 4) // 4
    whole = run.for_ways(ways).learner
    adapted = whole.adapt(((found.support, labels), labels))
    assert isinstance(adapted, Prototypes)
    with torch.no_grad():
        expected = adapted(found.support, labels, inputs)
    # the same sums in another order: a few float32 roundings of logits of this size
    assert torch.allclose(found.logits(inputs), expected, rtol=1e-5, atol=1e-5)
    assert found.logits(inputs).shape == (ways * 5, ways)
    assert [p.label for p in found.predict(table)] == [p.truth for p in found.predict(table)]


def test_an_exported_model_is_an_ordinary_one(vectors: Path, tmp_path: Path) -> None:
    found = adapt(vectors / "run", vectors / "few7.csv")
    assert isinstance(found, Classifier)
    found.export(tmp_path / "model")
    plain = MLP(6, 7, hidden=(16,))
    plain.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    program = torch.export.load(tmp_path / "model" / "program.pt2").module()
    with torch.no_grad():
        assert torch.equal(plain(x), found.logits(x))
        assert torch.allclose(program(x), plain(x), rtol=0, atol=1e-5)


def test_evaluated_with_other_ways_and_shots(vectors: Path) -> None:
    run = runs.load(vectors / "run")
    other = run.elsewhere(ways=4, shots=2, queries=6)
    report = evaluate_run(other, tasks=20, steps=[0, 20], baselines=True)
    tasks = other.source.batch(range(20), "test")
    assert tasks[0].num_support == 8
    result = other.learner.evaluate(tasks)
    assert report.task_accuracies == pytest.approx(result.accuracy.tolist())
    assert report.main.accuracy > 0.9
    assert report.baselines is not None
    assert run.for_ways(3) is run
    again = evaluate_run(run.elsewhere(ways="2-4"), tasks=40)
    assert again.tasks == 40


def test_other_data_are_all_test_data_and_prepared_as_in_training(vectors: Path) -> None:
    for name, ways in (("run", 25), ("fixed", 3)):
        run = runs.load(vectors / name)
        other = run.elsewhere(data=str(vectors / "others.csv"), ways=ways if ways > 3 else None)
        assert [len(other.source.classes(s)) for s in ("train", "val", "test")] == [0, 0, 30]  # type: ignore[arg-type]
        own, theirs = run.source, other.source
        assert own.standardisation == theirs.standardisation  # type: ignore[attr-defined]
        report = evaluate_run(other, tasks=5, baselines=True)
        assert report.main.accuracy > 0.8
        assert report.baselines is not None


def test_learned_rates_of_every_number_come_along(tmp_path: Path) -> None:
    changes = {"ways": 3, "shots": 2, "learn_lr": "parameter", "estimator": "maml"}
    go(tmp_path / "run", **{**MANY, **changes, "baselines": "none"})
    run = runs.load(tmp_path / "run")
    for ways in (2, 6):
        other = run.elsewhere(ways=ways, shots=2)
        assert evaluate_run(other, tasks=5).tasks == 5
        rates, own = other.learner.rates(), run.learner.rates()
        first = rates["features.features.1.weight"]
        assert torch.equal(first, own["features.features.1.weight"])
        assert not bool((first == 0.05).all())
        assert torch.equal(rates["bias"][:2], own["bias"][:2])


@pytest.mark.parametrize("model", [f"{__name__}:Mirror:hidden=(5,)", f"{__name__}:MODULE"])
def test_models_of_the_users_own(tmp_path: Path, model: str) -> None:
    table = vector_table(tmp_path / "data.csv", classes=20)
    folder = vector_run(tmp_path / "run", table, head="prototypes", model=model)
    for _ in range(2):
        assert evaluate_run(runs.load(folder, trust=True).elsewhere(ways=4), tasks=4).tasks == 4
    assert isinstance(MODULE.head, torch.nn.Linear)  # the user's module is left as it is


def test_texts(tmp_path: Path) -> None:
    words = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "lynx"]
    rows = [f"{word} number {i},{word}" for word in words for i in range(8)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    config = TrainConfig(
        data=str(tmp_path / "texts.csv"), text="text", ways=2, shots=2, queries=2,
        head="prototypes", model="text:width=8", solver="gradient_descent:lr=0.1,steps=2",
    )  # fmt: skip
    folder = make_run(tmp_path / "run", config, iterations=1)
    (tmp_path / "few.csv").write_text("\n".join(["text,label", *rows[:32]]))
    found = adapt(folder, tmp_path / "few.csv")
    assert isinstance(found, Classifier)
    assert found.classes == ("ant", "bee", "cat", "dog")
    assert len(list(found.predict(tmp_path / "few.csv"))) == 32
    other = runs.load(folder).elsewhere(data=str(tmp_path / "few.csv"), ways=4)
    assert evaluate_run(other, tasks=3, baselines=True).tasks == 3


def test_given_tasks_elsewhere(tmp_path: Path) -> None:
    def table(name: str, first: int) -> str:
        rng = np.random.default_rng(first)
        lines = ["school,x,y"]
        for school in range(first, first + 12):
            lines += [f"s{school},{x:.4f},{school + 2 * x:.4f}" for x in rng.normal(size=10)]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    config = TrainConfig(
        data=table("a.csv", 0), task_column="school", target="y", model="mlp:hidden=(4,)",
        solver="gradient_descent:lr=0.05,steps=3",
    )  # fmt: skip
    run = runs.load(make_run(tmp_path / "run", config))
    other = run.elsewhere(data=table("b.csv", 50))
    report = evaluate_run(other, tasks=100, baselines=True)
    assert report.tasks == 12
    assert other.source.target_scale == run.shapes.target_scale  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="given tasks have the classes and rows"):
        run.elsewhere(ways=3)


def test_the_page_of_a_run_with_many_sizes(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [f"c{i}" for i in range(12)], 6, size=8)
    config = TrainConfig(
        data=str(data), head="prototypes", ways="2-4", shots="1-2", queries=2, tasks=2,
        model="mlp:hidden=(4,)", solver="gradient_descent:lr=0.1,steps=1",
        data_options="splits=(0.3,0.3,0.4)",
    )  # fmt: skip
    folder = make_run(tmp_path / "run", config)
    run = runs.load(folder)
    report = evaluate_run(run, tasks=20)
    shown = mistakes(run.source, report, "test")
    assert shown
    assert all(one["example"]["png"] and one["like"]["png"] for one in shown)
    assert tasks_of(run.config) == "tasks of 2-4 classes, with 1-2 examples of each to adapt on"
    for flags, kept in ((["--ways=3"], False), ([], True)):
        assert main(["eval", str(folder), "--tasks=4", "--device=cpu", *flags]) == 0
        assert (folder / "eval-test.json").exists() == kept


def test_given_classes_need_no_prototypes(tmp_path: Path) -> None:
    rows = [f"s{school},{x},{'ab'[x % 2]}" for school in range(12) for x in range(8)]
    (tmp_path / "a.csv").write_text("\n".join(["school,x,y", *rows]))
    config = TrainConfig(
        str(tmp_path / "a.csv"), task_column="school", target="y", head="prototypes"
    )
    with pytest.raises(UserError, match="the classes of given tasks mean the same in all"):
        runs.build_source(config)


# --- Better than logistic regression on pixels


def _share(run: runs.Run, support: Path, predict: Path) -> tuple[float, float]:
    """Right answers of the run, and of logistic regression with its best penalty."""
    found = adapt(run, support)
    assert isinstance(found, Classifier)
    how, classes = found.preprocessing, found.classes
    named = list(examples_to_label(predict, how, classes))
    truth = torch.tensor([classes.index(str(name)) for _, name, _ in named])
    x = found.support.flatten(1).double()
    y = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(found.counts))
    query = how.inputs(torch.stack([row for _, _, row in named]))
    linear = [
        logistic(x, y, len(classes), penalty)(query.flatten(1).double()).argmax(1)
        for penalty in PENALTIES["classification"]
    ]
    own = found.logits(query).argmax(1)
    return float((own == truth).double().mean()), max(
        float((guess == truth).double().mean()) for guess in linear
    )


def _corners(root: Path, classes: range, each: int, seed: int) -> Path:
    """Pictures of 8×8 whose four middle pixels tell the class; the others are noise."""
    rng = np.random.default_rng(seed)
    middles = np.random.default_rng(99).choice(np.arange(0, 256, 85), size=(100, 2, 2))
    for c in classes:
        (root / f"c{c}").mkdir(parents=True)
        for n in range(each):
            pixels = rng.integers(0, 256, (8, 8))
            pixels[3:5, 3:5] = np.clip(middles[c] + rng.normal(scale=12, size=(2, 2)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"c{c}" / f"{n}.png")
    return root


def test_trained_with_five_classes_used_with_three_and_twelve(tmp_path: Path) -> None:
    config = TrainConfig(
        data=str(_corners(tmp_path / "data", range(40), 20, 0)), head="prototypes", ways=5,
        shots=5, queries=10, model="features", estimator="fomaml", optimizer="adam:lr=0.05",
        tasks=4,
    )  # fmt: skip
    run = runs.load(make_run(tmp_path / "run", config, iterations=60))
    for ways in (3, 12):
        new = range(50, 50 + ways)
        support = _corners(tmp_path / f"few{ways}", new, 5, 1)
        own, linear = _share(run, support, _corners(tmp_path / f"many{ways}", new, 10, 2))
        print(ways, own, linear)
        assert own > linear + 0.1


def test_unseen_characters_in_threes_and_twelves(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    root = tmp_path_factory.getbasetemp() / "omniglot-prototypes"
    run = runs.load(omniglot_run(root, head="prototypes"))
    for ways in (3, 12):
        found = [
            _share(
                run,
                *character_folders(
                    tmp_path / f"{ways}-{seed}", ways=ways, shots=5, queries=10, seed=seed
                ),
            )
            for seed in range(3)
        ]
        own, linear = (sum(shares) / len(found) for shares in zip(*found, strict=True))
        assert own > linear + 0.05, (ways, own, linear)


def test_tasks_of_ones_own(vectors: Path) -> None:
    run = runs.load(vectors / "run").for_ways(4)
    tasks = run.elsewhere(ways=4).source.batch(range(3), "test")
    assert isinstance(tasks[0], Task)
    assert evaluate_tasks(run.learner, tasks).tasks == 3
