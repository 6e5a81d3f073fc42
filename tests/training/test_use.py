"""Adapting a run to new classes, labelling files, and exporting the adapted model."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import metanudge as mn
from metanudge.models import MLP
from metanudge.training import runs, use
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from metanudge.training.use import Classifier, Preprocessing, adapt, write_predictions
from trained_runs import (
    character_folders,
    make_run,
    omniglot_folder,
    omniglot_run,
    vector_run,
    vector_table,
    write_images,
)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vector_run(folder / "run", vector_table(folder / "data.csv"))
    vector_table(folder / "few.csv", classes=3, each=4, first=40, seed=1)
    vector_table(folder / "rows.csv", classes=3, each=10, first=40, seed=2)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained run on colour pictures of 20×16, and two classes of pictures of other sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    write_images(folder / "data", [f"k{i}" for i in range(8)], 4)
    config = TrainConfig(
        data=str(folder / "data"), ways=2, shots=1, queries=2,
        data_options="image_size=16,grey=false",
        model="conv4:channels=4,image_size=16", solver="gradient_descent:lr=0.05,steps=2",
    )  # fmt: skip
    make_run(folder / "run", config)
    write_images(folder / "few", ["left", "right"], 3, size=24, seed=1)
    write_images(folder / "many", ["left", "right"], 5, size=31, seed=2)
    return folder


def test_a_table_is_labelled(vectors: Path) -> None:
    classifier = adapt(vectors / "run", vectors / "few.csv")
    assert classifier.classes == ("c40", "c41", "c42")
    found = list(classifier.predict(vectors / "rows.csv"))
    assert [p.file for p in found[:2]] == ["rows.csv:1", "rows.csv:2"]
    assert all(p.label == p.truth for p in found)
    for p in found:
        assert sum(p.probabilities) == pytest.approx(1)
        assert p.probability == max(p.probabilities)


def test_columns_are_found_by_name_and_the_label_is_optional(vectors: Path, tmp_path: Path) -> None:
    classifier = adapt(vectors / "run", vectors / "few.csv")
    with (vectors / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shuffled = tmp_path / "shuffled.csv"
    columns = ["note", *reversed([c for c in rows[0] if c != "label"])]
    lines = [
        ",".join(columns),
        *(",".join("hello" if c == "note" else row[c] for c in columns) for row in rows),
    ]
    shuffled.write_text("\n".join(lines))
    expected, found = (
        list(classifier.predict(vectors / "rows.csv")),
        list(classifier.predict(shuffled)),
    )
    assert [p.probabilities for p in found] == [p.probabilities for p in expected]
    assert {p.truth for p in found} == {None}


def test_vectors_in_class_folders(vectors: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for c, name in enumerate(("a", "b", "c")):
        (tmp_path / "few" / name).mkdir(parents=True)
        for i in range(3):
            np.save(tmp_path / "few" / name / f"{i}.npy", rng.normal(size=6) + 6 * np.eye(6)[c])
    found = list(adapt(vectors / "run", tmp_path / "few").predict(tmp_path / "few"))
    assert [p.label for p in found] == [p.truth for p in found]


def test_pictures_are_prepared_as_in_training(pictures: Path) -> None:
    run = runs.load(pictures / "run")
    classifier = adapt(run, pictures / "few")
    assert classifier.preprocessing == Preprocessing((3, 16, 16), grey=False, image_size=(16, 16))
    with Image.open(pictures / "few" / "left" / "0.png") as image:
        pixels = (
            np.asarray(
                image.convert("RGB").resize((16, 16), Image.Resampling.LANCZOS), dtype=np.float32
            )
            / 255
        )
    torch.testing.assert_close(classifier.support[0], torch.from_numpy(pixels).permute(2, 0, 1))


def test_a_prediction_does_not_depend_on_the_other_files(pictures: Path) -> None:
    classifier = adapt(pictures / "run", pictures / "few")
    together = {p.file: p.probabilities for p in classifier.predict(pictures / "many")}
    assert list(together) == sorted(together)
    for file in ("left/0.png", "right/3.png"):
        (alone,) = classifier.predict(pictures / "many" / file)
        assert alone.probabilities == pytest.approx(together[file], abs=1e-6)


def test_files_are_read_a_few_at_a_time(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = adapt(pictures / "run", pictures / "few")
    expected = [p.label for p in classifier.predict(pictures / "many")]
    monkeypatch.setattr(use.classifier, "FILES_AT_ONCE", 3)
    assert [p.label for p in classifier.predict(pictures / "many")] == expected


def test_hidden_files_are_passed_over(pictures: Path, tmp_path: Path) -> None:
    write_images(tmp_path, ["deep"], 2)
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    assert [p.file for p in adapt(pictures / "run", pictures / "few").predict(tmp_path)] == [
        "deep/0.png",
        "deep/1.png",
    ]


def test_omniglot_has_dark_ink_as_one() -> None:
    how = Preprocessing((1, 28, 28), image_size=(28, 28), invert=True)
    assert how.tensor(torch.tensor([[0, 255]], dtype=torch.uint8)).tolist() == [[1.0, 0.0]]


def test_the_csv(vectors: Path) -> None:
    classifier = adapt(vectors / "run", vectors / "few.csv")
    text = io.StringIO()
    odd = Classifier(
        classifier.model,
        ("file", "a,b", 'q"'),
        classifier.preprocessing,
        classifier.support,
        (1, 1, 1),
    )
    written = write_predictions(text, odd.classes, odd.predict(vectors / "rows.csv"))
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert list(rows[0]) == ["file", "label", "probability", "class file", "a,b", 'q"']
    assert len(rows) == len(written) == 30
    assert float(rows[0]["a,b"]) == pytest.approx(written[0].probabilities[1], abs=1e-6)


def test_export_is_complete_and_runs_without_this_package(pictures: Path, tmp_path: Path) -> None:
    classifier = adapt(pictures / "run", pictures / "few")
    folder = classifier.export(tmp_path / "model")
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.json",
        "model.safetensors",
        "program.pt2",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    about = json.loads((folder / "model.json").read_text())
    assert about["classes"] == ["left", "right"]
    assert about["support_examples"] == {"left": 3, "right": 3}
    assert about["preprocessing"]["image_size"] == [16, 16]
    assert about["batch_norm"] == "statistics of the support set"
    saved, own = load_file(folder / "model.safetensors"), classifier.model.state_dict()
    assert saved.keys() == own.keys()
    assert all(torch.equal(saved[name], own[name]) for name in own)
    torch.save(classifier.support, tmp_path / "x.pt")
    script = (
        "import sys, torch; m = torch.export.load(sys.argv[1]).module(); x ="
        " torch.load(sys.argv[2])\n"
    )
    script += (
        "torch.save([m(x), m(x[:1]), m(x.repeat(5, 1, 1, 1))], sys.argv[3]); assert 'metanudge' not"
        " in sys.modules"
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            folder / "program.pt2",
            tmp_path / "x.pt",
            tmp_path / "y.pt",
        ],
        check=True,
        timeout=120,
    )
    logits = classifier.logits(classifier.support)
    whole, first, repeated = torch.load(tmp_path / "y.pt")
    torch.testing.assert_close(whole, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(first, logits[:1], atol=1e-5, rtol=0)
    torch.testing.assert_close(repeated, logits.repeat(5, 1), atol=1e-5, rtol=0)


class Undecided(MLP):
    """A model whose path depends on its data, which cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


def test_a_model_that_cannot_be_traced_leaves_nothing_behind(vectors: Path, tmp_path: Path) -> None:
    classifier = adapt(vectors / "run", vectors / "few.csv")
    other = Classifier(
        Undecided(6, 3),
        classifier.classes,
        classifier.preprocessing,
        classifier.support,
        classifier.counts,
    )
    with pytest.raises(UserError, match=r"torch\.export cannot trace this model.*--no-program"):
        other.export(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    other.export(tmp_path / "model", program=False)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]


def test_export_replaces_only_what_it_made(vectors: Path, tmp_path: Path) -> None:
    classifier = adapt(vectors / "run", vectors / "few.csv")
    classifier.export(tmp_path / "model", program=False)
    with pytest.raises(UserError, match=r"exists already.*--overwrite"):
        classifier.export(tmp_path / "model", program=False)
    classifier.export(tmp_path / "model", program=False, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not an exported model"):
        classifier.export(tmp_path / "mine", program=False, overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").is_file()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with use.new_file(tmp_path / "out.csv", overwrite=False, flag="--out") as file:
            file.write("half")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_more_steps_can_be_asked_for(vectors: Path) -> None:
    few, many = (adapt(vectors / "run", vectors / "few.csv", steps=steps) for steps in (1, 50))
    assert (
        next(many.predict(vectors / "rows.csv")).probability
        > next(few.predict(vectors / "rows.csv")).probability
    )


def test_regression_has_no_classes(tmp_path: Path, vectors: Path) -> None:
    run = make_run(tmp_path / "run", TrainConfig("sinusoid"))
    with pytest.raises(UserError, match="a regression: it has no classes"):
        adapt(run, vectors / "few.csv")


def test_unseen_characters(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The measure of the whole: at least 90 % from 5 examples per class of characters that training
    has never shown.
    """
    omniglot_folder()
    run = runs.load(omniglot_run(tmp_path_factory.getbasetemp() / "omniglot-run"))
    right = total = 0
    for seed in range(4):
        support, predict = character_folders(
            tmp_path / str(seed), ways=5, shots=5, queries=15, seed=seed
        )
        classifier = adapt(run, support, steps=20)
        assert not classifier.looks_inverted
        found = list(classifier.predict(predict))
        right += sum(p.label == p.truth for p in found)
        total += len(found)
    assert total == 300
    assert right / total >= 0.9


def test_a_run_in_python_is_what_the_commands_use(vectors: Path) -> None:
    run = mn.load_run(vectors / "run", device="cpu")
    assert run.config.ways == run.source.ways == 3
    support, rows = vectors / "few.csv", vectors / "rows.csv"
    own, commands = run.adapt(support, steps=3), adapt(vectors / "run", support, steps=3)
    for mine, theirs in zip(own.predict(rows), commands.predict(rows), strict=True):
        assert mine == theirs
    report = run.evaluate(tasks=7, split="train", steps=[0])
    assert report.tasks == 7
    assert [row.steps for row in report.rows] == [0, run.learner.solver.steps]  # type: ignore[attr-defined]


def test_a_run_with_code_of_its_own_is_loaded_with_trust_only(
    vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "nets_of_load_run.py").write_text(
        "from torch import nn\n\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, in_features: int, ways: int):\n"
        "        super().__init__(in_features, ways)\n"
    )
    vector_run(tmp_path / "run", vectors / "data.csv", model="nets_of_load_run:Net")
    sys.modules.pop("nets_of_load_run")
    with pytest.raises(UserError, match="trust=True"):
        mn.load_run(tmp_path / "run")
    assert "nets_of_load_run" not in sys.modules
    assert mn.load_run(tmp_path / "run", trust=True).evaluate(tasks=2, split="train").tasks == 2
    with pytest.raises(UserError, match="There is no run"):
        mn.load_run(tmp_path / "nothing")
