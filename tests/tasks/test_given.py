"""Given tasks: what is read, how it is divided, and that the stream is a pure function."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from given_tables import schools
from metanudge.task import Task
from metanudge.tasks import Given
from metanudge.tasks.read_csv import read_columns


def rows_of(batch: torch.Tensor) -> list[float]:
    return sorted(batch.flatten().tolist())


def numbered(path: Path, *, tasks: int = 10, rows: int = 7, more: str = "") -> Path:
    """A table whose one feature is the number of its row."""
    lines = [f"task,x,y{',' + more if more else ''}"]
    lines += [
        f"t{t},{t * rows + r},{(t * rows + r) % 5 + 0.5}"
        + {"": "", "when": f",{(r * 3) % rows}", "part": f",{'support' if r < 2 else 'Query'}"}[
            more
        ]
        for t in range(tasks)
        for r in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def plain(path: Path, **options: object) -> Given:
    return Given.from_table(
        path, task_column="task", target="y", features=["x"], standardise=False, **options
    )


def test_every_row_of_a_task_is_in_one_of_its_sets(tmp_path: Path) -> None:
    source = plain(numbered(tmp_path / "t.csv"))
    names = [n for split in ("train", "val", "test") for n in source.task_names(split)]
    assert sorted(names) == [f"t{i}" for i in range(10)], "each task is in one split"
    for i, name in enumerate(source.task_names("test")):
        task = source.task(i, "test")
        first = 7 * int(name[1:])
        assert task.num_support == 4  # half of seven, to even
        both = torch.cat([task.support[0], task.query[0]])
        assert rows_of(both) == [first + r for r in range(7)]
        for x, y in (task.support, task.query):
            assert y.shape == (len(x), 1)
            assert torch.equal(y, x % 5 + 0.5)


def test_training_divides_anew_and_test_does_not(tmp_path: Path) -> None:
    source = plain(numbered(tmp_path / "t.csv"), support=3)
    drawn = {tuple(rows_of(source.task(i).support[0])) for i in range(200)}
    assert len(drawn) > 100
    assert all(len(support) == 3 for support in drawn)
    again = plain(tmp_path / "t.csv", support=3).task(1, "test")
    assert torch.equal(source.task(1, "test").support[0], again.support[0])
    # other seed, other divisions, the same tasks in the same splits
    other = plain(tmp_path / "t.csv", support=3, seed=1)
    assert other.task_names("test") == source.task_names("test")


def test_a_column_or_the_time_decides_who_is_support(tmp_path: Path) -> None:
    by_column = plain(numbered(tmp_path / "c.csv", more="part"), split_column="part")
    in_time = plain(numbered(tmp_path / "t.csv", more="when"), time_column="when", support=2)
    for source, expected in ((by_column, [0, 1]), (in_time, [0, 5])):  # 0·3 and 5·3 = 1 modulo 7
        for i, name in enumerate(source.task_names("test")):
            found = [row - 7 * int(name[1:]) for row in rows_of(source.task(i, "test").support[0])]
            assert found == expected
        assert source.task(0).num_query == 5


def test_dates_are_in_order(tmp_path: Path) -> None:
    days = ["2024-03-01", "2023-12-31", "2024-01-15", "2024-01-15T12:00"]
    lines = [f"{t},{r},{r * 1.5},{day}" for t in range(5) for r, day in enumerate(days)]
    (tmp_path / "t.csv").write_text("task,x,y,day\n" + "\n".join(lines) + "\n")
    source = plain(tmp_path / "t.csv", time_column="day")
    assert rows_of(source.task(0, "test").support[0]) == [1, 2]


def test_tasks_of_different_sizes_are_drawn_in_few_shapes(tmp_path: Path) -> None:
    source = Given.from_table(
        schools(tmp_path / "s.csv", rows=(8, 60)), task_column="school", target="score"
    )
    batch = source.batch(range(300))
    sizes = {(task.num_support, task.num_query) for task in batch}
    assert {n for pair in sizes for n in pair} <= {4, 6, 8, 12, 16, 24}
    assert len(batch.stacks) <= 12
    for i in range(source.num_tasks("test")):
        task = source.task(i, "test")
        assert abs(task.num_support - task.num_query) <= 1, "test tasks are whole"


def test_standardisation_is_that_of_the_training_tasks(tmp_path: Path) -> None:
    path = schools(tmp_path / "s.csv", tasks=20, scales=3)
    source = Given.from_table(path, task_column="school", target="score", dtype=torch.float64)
    read = read_columns(path, ["school"])
    train = np.isin(read.text["school"], source.task_names("train"))
    x, y = read.values[train, :-1], read.values[train, -1:]
    # a sum of n terms carries n roundings of numbers up to the largest
    close = {"rtol": len(x) * 1e-15, "atol": 0.0}
    assert source.standardisation is not None
    assert source.target_scale is not None
    np.testing.assert_allclose(source.standardisation.mean, x.mean(0), **close)
    np.testing.assert_allclose(source.standardisation.scale, x.std(0), rtol=1e-9)
    np.testing.assert_allclose(source.target_scale.mean, y.mean(0), **close)
    np.testing.assert_allclose(source.target_scale.scale, y.std(0), rtol=1e-9)


def test_classes_are_in_both_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"u{t},{x:.4f},{'walk' if r % 3 else 'run'}"
        for t in range(10)
        for r, x in enumerate(rng.normal(size=12))
    ]
    (tmp_path / "t.csv").write_text("user,x,what\n" + "\n".join(lines) + "\n")
    source = Given.from_table(tmp_path / "t.csv", task_column="user", target="what", support=2)
    assert (source.kind, source.labels, source.num_outputs) == (
        "classification",
        ("run", "walk"),
        2,
    )
    task = source.task(0, "test")
    assert task.support[1].bincount().tolist() == [2, 2]
    assert task.query[1].bincount().tolist() == [2, 6]


def test_a_folder_with_one_table_a_task_is_the_same_as_one_table(tmp_path: Path) -> None:
    whole = schools(tmp_path / "s.csv", tasks=12)
    header, *lines = whole.read_text().splitlines()
    (tmp_path / "each").mkdir()
    for name in {line[:4] for line in lines}:
        own = [line[5:] for line in lines if line.startswith(name)]
        (tmp_path / "each" / f"{name}.csv").write_text("\n".join([header[7:], *own]) + "\n")
    a = Given.from_table(whole, task_column="school", target="score")
    b = Given.from_table(tmp_path / "each", target="score")
    assert a.names == b.names
    for i in range(5):
        assert torch.equal(a.task(i).query[0], b.task(i).query[0])
    assert a.fingerprint() != b.fingerprint()


def test_a_data_frame_is_the_same_as_its_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    path = schools(tmp_path / "s.csv", tasks=12)
    a = Given.from_table(path, task_column="school", target="score")
    read = read_columns(path, ["school"])
    frame = pandas.DataFrame(read.text | dict(zip(read.names, read.values.T, strict=True)))
    b = Given.from_table(frame, task_column="school", target="score")
    assert torch.equal(a.task(3).support[0], b.task(3).support[0])
    frame.loc[2, "x1"] = None
    with pytest.raises(ValueError, match=r"The table, row 2, column 'x1': '' is not a finite"):
        Given.from_table(frame, task_column="school", target="score")


def test_several_targets(tmp_path: Path) -> None:
    path = schools(tmp_path / "s.csv", tasks=12)
    source = Given.from_table(path, task_column="school", target=["score", "x0"])
    assert source.num_outputs == 2
    assert source.input_shape == (5,)
    assert source.task(0).query[1].shape[1] == 2


def test_tasks_from_python() -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = {
        f"task {n}": Task(
            (torch.randn(n + 2, 3, generator=generator), torch.randn(n + 2, generator=generator)),
            (torch.randn(4, 3, generator=generator), torch.randn(4, generator=generator)),
        )
        for n in range(10)
    }
    source = Given(tasks, splits={"train": ["task 0", "task 1"], "test": ["task 7"]},
                   standardise=False)  # fmt: skip
    found, given = source.task(0, "test"), tasks["task 7"]
    assert torch.equal(found.support[0], given.support[0])
    assert torch.equal(found.query[1][:, 0], given.query[1])
    with pytest.raises(ValueError, match="Split 'val' has none of the 10 tasks"):
        source.task(0, "val")


@pytest.mark.parametrize(
    ("support", "query", "message"),
    [
        ((torch.zeros(3, 2), torch.zeros(3)), torch.zeros(3, 2), "no pair"),
        ((torch.zeros(3, 2), torch.zeros(3)), (torch.zeros(3, 1), torch.zeros(3)), "differ"),
        (*[(torch.full((3, 2), torch.nan), torch.zeros(3))] * 2, "NaN or infinity"),
        (*[(torch.zeros(3, 2), torch.full((3,), -1))] * 2, "are classes 0, 1"),
    ],
    ids=["no pair", "shapes", "not finite", "negative class"],
)
def test_tasks_that_are_refused(support: object, query: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Given([Task(support, query)])


def test_parquet_without_its_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    (tmp_path / "s.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="needs pandas with pyarrow"):
        Given.from_table(tmp_path / "s.parquet", task_column="school", target="score")
