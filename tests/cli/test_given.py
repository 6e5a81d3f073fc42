"""Given tasks on the command line, from the table to predictions; and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import metanudge as mn
from given_tables import schools
from metanudge.cli import main
from metanudge.evaluation import ci95
from metanudge.tasks import Given
from metanudge.training import runs
from metanudge.training.config import TrainConfig
from metanudge.training.sources import build_learner, build_source, resolve
from metanudge.training.specs import build_optimizer, parameter_groups
from metanudge.training.use import Classifier, Regressor, adapt

COLUMNS = {"task_column": "school", "target": "score"}
FLAGS = ["--task-column=school", "--target=score"]
TINY = [
    "--model=mlp:hidden=(4,)", "--tasks=2", "--iterations=2", "--eval-every=1", "--eval-tasks=3",
    "--test-tasks=50", "--metrics-every=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def test_a_run_beats_ridge_pooled_and_task_by_task(here: Path) -> None:
    schools(here / "schools.csv")
    flags = ["--support=6", "--iterations=40", "--tasks=8", "--eval-every=20"]
    assert main(["train", "schools.csv", *FLAGS, *flags, "--out=run"]) == 0
    found = summary("run")
    others = found["baselines"]
    assert set(others) == {
        "ridge regression",
        "pooled ridge",
        "mean predictor",
        "untrained network, adapted",
    }
    assert found["test"]["tasks"] == 20, "each held-out school once"
    assert json.loads(Path("run/config.json").read_text())["model"] == "table"
    for name, other in others.items():
        assert found["test"]["loss"] < other["loss"], name
        assert other["learner_better_by"] == pytest.approx(other["loss"] - found["test"]["loss"])
    run = mn.load_run("run")
    own = run.learner.evaluate(run.source.batch(range(20), "test")).loss
    for name, other in mn.baselines.measure(run.source, 20).items():
        # paired by school; of logarithms, for in some schools ridge regression is far off
        gain = other.log() - own.log()
        assert float(gain.mean()) > ci95(gain), name


def test_units_do_not_make_it_diverge(here: Path) -> None:
    """In 20 random units the tasks are the same but for rounding, so the runs are, too."""
    plain = Given.from_table(schools(here / "s.csv", tasks=20), **COLUMNS, support=6)
    expected = plain.batch(range(20), "test")
    for scales in range(20):
        path = schools(here / f"{scales}.csv", tasks=20, scales=scales)
        found = Given.from_table(path, **COLUMNS, support=6).batch(range(20), "test")
        for task, other in zip(expected, found, strict=True):
            for own, theirs in zip(task.query, other.query, strict=True):
                # float64 cells lose |shift| / size ≤ 1e3·3 / 1e-4 of their 2e-16; float32 has 6e-8
                torch.testing.assert_close(theirs, own, rtol=0, atol=1e-6)
    losses = [loss_after_training(here / f"{name}.csv") for name in ("s", *range(20))]
    assert losses == pytest.approx([losses[0]] * 21, rel=1e-3)


def loss_after_training(table: Path) -> float:
    """On the test tasks, after some meta-steps at the defaults."""
    config = TrainConfig(str(table), task_column="school", target="score", support=6, tasks=2)
    source = build_source(config)
    config = resolve(config, source)
    learner = build_learner(config, source)
    optimizer = build_optimizer(config.optimizer, parameter_groups(learner, None))
    for tasks in source.batches(size=2, count=2):
        optimizer.zero_grad()
        learner.backward(tasks, metrics=False)
        optimizer.step()
    return learner.evaluate(source.batch(range(2), "test")).mean_loss


def test_eval_and_adapt_speak_in_the_units_of_the_target(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = schools(here / "schools.csv", tasks=12, rows=(9, 20), scales=1)
    assert main(["train", "schools.csv", *FLAGS, *TINY, "--out=run"]) == 0
    said = capsys.readouterr().out
    assert "regression of score, 8/2/2 tasks" in said
    assert "(2 tasks)" in said, "eval and test count no task twice"
    assert main(["eval", "run", "--json=eval.json"]) == 0
    said = capsys.readouterr().out
    assert "R²" in said
    assert "baselines on the same tasks" in said
    found = json.loads(Path("eval.json").read_text())
    [row] = [row for row in found["rows"] if row["steps"] == found["steps"]]

    # By hand, from the raw table.
    run = runs.load("run")
    shapes = run.shapes
    assert shapes.target_scale is not None
    scale, mean = shapes.target_scale.scale[0], shapes.target_scale.mean[0]
    outputs, truths = [], []
    for task in (run.source.task(i, "test") for i in range(2)):
        model = run.learner.adapt(task.support)
        outputs += (model(task.query[0]).detach().double() * scale + mean).flatten().tolist()
        truths += (task.query[1].double() * scale + mean).flatten().tolist()
    error, truth = np.subtract(outputs, truths), np.array(truths)
    # float32 outputs: a relative rounding of 6e-8 in each of the steps
    assert row["rmse"][0] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-4)
    r2 = 1 - np.sum(error**2) / np.sum((truth - truth.mean()) ** 2)
    assert row["r2"] == pytest.approx(r2, abs=1e-4)

    # A school of its own: its rows are those of the table, its predictions in the table's units.
    lines = path.read_text().splitlines()
    name = run.source.task_names("test")[0]
    rows = [line for line in lines[1:] if line.startswith(name)]
    Path("few.csv").write_text("\n".join([lines[0], *rows[:6]]) + "\n")
    header = ",".join(cell for cell in lines[0].split(",") if cell != "score")
    Path("rest.csv").write_text(
        "\n".join([header, *(row.rsplit(",", 1)[0] for row in rows[6:])]) + "\n"
    )
    command = ["adapt", "run", "--support=few.csv", "--predict=rest.csv", "--out=out.csv"]
    assert main([*command, "--export=model"]) == 0
    regressor = adapt("run", "few.csv")
    assert isinstance(regressor, Regressor)
    values = np.array([[float(cell) for cell in row.split(",")[1:]] for row in rows])
    assert shapes.standardisation is not None
    x = shapes.standardisation.apply(torch.from_numpy(values[:, :-1])).float()
    y = shapes.target_scale.apply(torch.from_numpy(values[:, -1:])).float()
    model = run.learner.adapt((x[:6], y[:6]))
    expected = (model(x[6:]).detach().double() * scale + mean).flatten().tolist()
    with open("out.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["row"] for row in written] == [f"rest.csv:{i + 1}" for i in range(len(expected))]
    assert [float(row["score"]) for row in written] == pytest.approx(
        expected, abs=1e-5 * (abs(mean) + scale)
    )
    assert json.loads(Path("model/model.json").read_text())["targets"] == ["score"]
    # the rows of several schools are no task
    assert main(["adapt", "run", "--support=schools.csv", "--export=other"]) == 2
    assert "has rows of 12 tasks" in capsys.readouterr().err


def test_a_resumed_run_gives_the_same_bytes(here: Path) -> None:
    schools(here / "s.csv", tasks=12, rows=(8, 30))
    assert main(["train", "s.csv", *FLAGS, *TINY, "--iterations=4", "--out=whole"]) == 0
    assert main(["train", "s.csv", *FLAGS, *TINY, "--out=parts"]) == 0
    assert main(["train", "--resume=parts", "--iterations=4"]) == 0
    assert Path("whole/metrics.jsonl").read_bytes() == Path("parts/metrics.jsonl").read_bytes()
    assert (
        "baselines" not in summary("whole")
        or summary("whole")["baselines"] == (summary("parts")["baselines"])
    )


def test_classes_that_mean_the_same_in_all_tasks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"u{t},{x:.4f},{z:.4f},{'run' if x + t % 3 > 1 else 'walk'}"
        for t in range(12)
        for x, z in 3 * rng.normal(size=(20, 2))
    ]
    Path("users.csv").write_text("\n".join(["user,x,z,what", *lines]) + "\n")
    flags = ["--task-column=user", "--target=what", "--support=3"]
    assert main(["train", "users.csv", *flags, *TINY, "--out=run"]) == 0
    assert "pooled logistic" in capsys.readouterr().out
    Path("few.csv").write_text("\n".join(["user,x,z,what", *lines[:8]]) + "\n")
    classifier = adapt("run", "few.csv")
    assert isinstance(classifier, Classifier)
    assert classifier.classes == ("run", "walk")
    Path("odd.csv").write_text("x,z,what\n1,2,swim\n")
    assert main(["adapt", "run", "--support=odd.csv", "--export=other"]) == 2
    assert "the class 'swim'" in capsys.readouterr().err


def test_no_baselines(here: Path) -> None:
    schools(here / "s.csv", tasks=12)
    assert main(["train", "s.csv", *FLAGS, *TINY, "--baselines=none", "--out=run"]) == 0
    assert "baselines" not in summary("run")


GOOD = "school,x,z,score\n" + "".join(
    f"s{t},{x},{x * t},{(x * 7 + t) % 11 + 0.25}\n" for t in range(8) for x in range(6)
)


def changed(old: str, new: str, count: int = 1) -> Callable[[], None]:
    def write() -> None:
        assert old in GOOD
        Path("s.csv").write_text(GOOD.replace(old, new, count))

    return write


def folder(**files: str) -> Callable[[], None]:
    def write() -> None:
        Path("s.csv").mkdir()
        good = {f"{n}.csv": "x,score\n1,2\n2,3\n3,5\n4,1\n" for n in "abcdefgh"}
        for name, text in (good | {k.replace("_", "."): v for k, v in files.items()}).items():
            Path("s.csv", name).write_text(text)

    return write


def with_column(name: str, values: Callable[[int], str]) -> Callable[[], None]:
    def write() -> None:
        header, *rows = GOOD.splitlines()
        lines = [f"{header},{name}", *(f"{row},{values(i)}" for i, row in enumerate(rows))]
        Path("s.csv").write_text("\n".join(lines) + "\n")

    return write


BAD = {
    "one row": (changed("s0,", "alone,"), [], ["Task 'alone' has one row", "drop_small=true"]),
    "constant target": (
        lambda: Path("s.csv").write_text(
            "school,x,score\n" + "".join(f"s{i % 4},{i},7.5\n" for i in range(20))
        ),
        [],
        ["'score' is 7.5 in every row", "nothing to learn"],
    ),
    "constant class": (
        lambda: Path("s.csv").write_text(
            "school,x,score\n" + "".join(f"s{i % 4},{i},yes\n" for i in range(20))
        ),
        [],
        ["'score' is 'yes' in every row"],
    ),
    "mixed target": (changed("0.25", "n/a"), [], ["line 2", "'n/a'", "task type classification"]),
    "missing feature": (changed("s0,3,", "s0,,"), [], ["line 5, column 'x'", "not a finite"]),
    "missing target": (changed(",0.25\n", ",\n"), [], ["line 2", "the target", "is empty"]),
    "missing task": (changed("s0,", ","), [], ["line 2", "the task", "is empty"]),
    "not finite": (changed("s0,3,", "s0,inf,"), [], ["'inf' is not a finite number"]),
    "text feature": (changed("s0,3,", "s0,tall,"), [], ["'tall'", "features=[...]"]),
    "no such column": (
        changed("school,x", "school,x"),
        ["--target=scroe"],
        ["no column 'scroe'", "Did you mean 'score'?"],
    ),
    "two of a name": (changed("school,x,z", "school,x,x"), [], ["two columns named 'x'"]),
    "target is a feature": (
        changed("school", "school"),
        ["--data-options=features=[x,score]"],
        ["'score' is named twice"],
    ),
    "other words": (
        with_column("part", lambda i: "train" if i % 2 else "test"),
        ["--split-column=part"],
        ["'test' is neither support nor query", "splits="],
    ),
    "no query": (
        with_column("part", lambda i: "support"),
        ["--split-column=part"],
        ["no row for its query set"],
    ),
    "no order": (
        with_column("when", lambda i: "2024-01-01" if i else "soon"),
        ["--time-column=when"],
        ["'soon' cannot be put in order", "2024-03-31"],
    ),
    "more than there are": (
        changed("school", "school"),
        ["--support=6"],
        ["has 6 rows, and support=6 leaves none", "5 or less"],
    ),
    "half an example": (changed("school", "school"), ["--support=2.5"], ["--support 2.5"]),
    "class of one": (
        lambda: Path("s.csv").write_text(
            "school,x,score\n"
            + "".join(f"s{i % 4},{i},{'a' if i else 'rare'}\n" for i in range(20))
        ),
        [],
        ["Class 'rare' of Task 's0' has one row"],
    ),
    "quantity as class": (
        changed("school", "school"),
        ["--task-type=classification"],
        ["a quantity, where classes were expected", "task type regression"],
    ),
    "ways": (changed("school", "school"), ["--ways=3"], ["--ways 3", "--support"]),
    "twice divided": (
        with_column("part", lambda i: "support" if i % 2 else "query"),
        ["--split-column=part", "--support=3"],
        ["--support and --split-column contradict"],
    ),
    "no target": (changed("school", "school"), ["--target="], ["Name it with --target"]),
    "few tasks": (
        lambda: Path("s.csv").write_text(
            "school,x,score\n" + "".join(f"s{i % 2},{i},{i * 1.5}\n" for i in range(8))
        ),
        [],
        ["has none of the 2 tasks"],
    ),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(here: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    write, flags, parts = BAD[case]
    write()
    before = sorted(here.rglob("*"))
    assert main(["train", "s.csv", *FLAGS, *flags, *TINY, "--out=run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for part in parts:
        assert part in said
    assert "Traceback" not in said
    assert sorted(here.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({"notes_txt": "hello"}, ["notes.txt is no table", "move this one away"]),
        ({"empty_csv": "x,score\n"}, ["empty.csv holds a header and no rows"]),
        ({"other_csv": "z,score\n1,2\n2,3\n"}, ["other.csv has no column 'x'"]),
        ({"a_tsv": "x\tscore\n1\t2\n2\t3\n"}, ["two files for the task 'a'"]),
    ],
    ids=["stray file", "empty task", "other columns", "two files"],
)
def test_folders_that_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], parts: list[str]
) -> None:
    folder(**files)()
    assert main(["train", "s.csv", "--target=score", *TINY, "--out=run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for part in parts:
        assert part in said
    assert not Path("run").exists()


def test_a_folder_with_one_table_a_task(here: Path) -> None:
    folder()()
    assert main(["train", "s.csv", "--target=score", *TINY, "--out=run"]) == 0
    assert runs.load("run").source.names == tuple("abcdefgh")


def test_numbers_as_labels_of_single_rows_get_a_hint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.csv").write_text(GOOD)
    assert (
        main(["train", "s.csv", "--data-options=label=score,features=[x,z]", *TINY, "--out=run"])
        == 2
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "--task-column" in said
