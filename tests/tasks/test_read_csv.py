"""CSV files as people have them: other delimiters, marks and encodings, and cells that are wrong in
ways that must be named.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from metanudge.tasks import Labelled
from metanudge.tasks.read_csv import read_csv


def table(path: Path, text: str, *, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found_in_the_first_line(tmp_path: Path, delimiter: str) -> None:
    text = "\n".join(
        delimiter.join(cells)
        for cells in (['"a,b;c"', "b", "label"], ["1", "2", "x"], ["3", "4", "y"])
    )
    read = read_csv(table(tmp_path / "data.csv", text))
    assert read.names == ("a,b;c", "b")
    assert read.values.tolist() == [[1, 2], [3, 4]]
    assert read.text["label"] == ["x", "y"]


def test_the_label_decides_between_delimiters(tmp_path: Path) -> None:
    read = read_csv(table(tmp_path / "data.csv", "width, cm, at noon;label\n1;x\n"))
    assert read.names == ("width, cm, at noon",)
    with pytest.raises(ValueError, match="no column 'label'"):
        read_csv(tmp_path / "data.csv", delimiter=",")
    assert read_csv(
        table(tmp_path / "tab.csv", "a\tlabel\n1\tx\n"), delimiter="tab"
    ).values.tolist() == [[1]]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_marks_encodings_and_line_ends(tmp_path: Path, encoding: str, end: str) -> None:
    text = end.join(["größe,label", '1.5,"two\nlines"', "", "2,é", ""])
    read = read_csv(table(tmp_path / "data.csv", text, encoding=encoding))
    assert read.names == ("größe",)
    assert read.text["label"] == ["two\nlines", "é"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,label\n1,x\n2,\n", r"line 3: the label \(column 'label'\) is empty"),
        ("a,label\n1,x\n2,  \n", r"line 3: the label \(column 'label'\) is empty"),
        (
            "a;label\n1,5;x\n",
            (
                r"line 2, column 'a': '1,5' is not a finite number\. If its comma is a decimal"
                r" point, write a point"
            ),
        ),
        ('a,label\n1,x\n2,"y\n3,z\n', "unexpected end of data.*close every quote"),
        (
            "a,label\n1,x\n" + "9" * 400 + ",x\n",
            r"line 3, column 'a': '9{40}' is not a finite number",
        ),
        ("a,label\n1,x\nNaN,x\n", "line 3, column 'a': 'NaN' is not a finite number"),
        ("a,label\n1,x\n1,2,x\n", "line 3: 3 cells, but the header names 2 columns.*delimiter ','"),
        ("a;lable\n1;x\n", r"no column 'label'. Did you mean 'lable'\? Its columns are: a, lable"),
        (",".join(f"x{i}" for i in range(30)) + "\n", r"x18, x19 and 10 more"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(table(tmp_path / "data.csv", text))


def test_large_numbers_are_numbers(tmp_path: Path) -> None:
    read = read_csv(
        table(
            tmp_path / "data.csv", "a,b,label\n1e308,1e308,x\n123456789012345678901234567890,-7,y\n"
        )
    )
    assert read.values.tolist() == [[1e308, 1e308], [123456789012345678901234567890.0, -7]]
    rows = "".join(f"1e300,{i},c{i % 3}\n" for i in range(12))
    with pytest.raises(ValueError, match=r"up to 1e\+300, which are infinite in torch.float32"):
        Labelled.from_csv(
            table(tmp_path / "data.csv", "a,b,label\n" + rows),
            standardise=False,
            ways=2,
            queries=2,
            splits=(1.0, 0.0, 0.0),
        )


def test_labels_may_be_optional(tmp_path: Path) -> None:
    assert read_csv(table(tmp_path / "a.csv", "a,b\n1,2\n"), labelled=False).text["label"] == [""]
    assert read_csv(table(tmp_path / "b.csv", "a,label\n1,\n2,x\n"), labelled=False).text[
        "label"
    ] == [
        "",
        "x",
    ]


def test_reading_is_linear_in_columns_and_rows(tmp_path: Path) -> None:
    def seconds(columns: int, rows: int) -> float:
        header = ",".join([*(f"x{i}" for i in range(columns)), "label"])
        path = table(
            tmp_path / "wide.csv", header + "\n" + (",".join(["1.5"] * columns) + ",c\n") * rows
        )
        times = []
        for _ in range(3):
            begin = time.process_time()
            assert read_csv(path).values.shape == (rows, columns)
            times.append(time.process_time() - begin)
        return min(times)

    # Twenty times as much takes twenty times as long; 400 times where it is quadratic.
    assert seconds(20_000, 2) < 100 * max(seconds(1_000, 2), 1e-3)
    assert seconds(2, 20_000) < 100 * max(seconds(2, 1_000), 1e-3)


def test_the_fingerprint_is_that_of_the_content_and_its_meaning(tmp_path: Path) -> None:
    text = "a,b,label\n1,2,x\n3,4,y\n"
    first = read_csv(table(tmp_path / "one.csv", text)).fingerprint
    assert len(first) == 64
    assert (
        read_csv(table(tmp_path / "two.csv", text), delimiter=",", features=["a", "b"]).fingerprint
        == first
    )
    others = [
        read_csv(table(tmp_path / "one.csv", text.replace("4", "5"))).fingerprint,
        read_csv(tmp_path / "two.csv", features=["b", "a"]).fingerprint,
        read_csv(tmp_path / "two.csv", label="b", features=["a"]).fingerprint,
    ]
    assert len({first, *others}) == 4


# --- Standardised
# --------------------------------------------------------------------------------------------------


def wide_scales(path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 3)) * [1.0, 1e4, 1e-3] + [0.0, 5e4, 1.0]
    lines = [f"{a},{b},{c},7,c{i % 12:02d}" for i, (a, b, c) in enumerate(rows.tolist())]
    return table(path, "a,b,c,same,label\n" + "\n".join(lines) + "\n")


def test_columns_are_standardised_with_the_training_classes_alone(tmp_path: Path) -> None:
    path = wide_scales(tmp_path / "data.csv")
    options = {"ways": 2, "shots": 1, "queries": 1, "splits": (0.5, 0.25, 0.25)}
    source = Labelled.from_csv(path, **options)
    read = read_csv(path)
    train = np.isin(read.text["label"], source.classes("train"))
    assert 0 < train.sum() < len(train)
    mean, scale = read.values[train].mean(axis=0), read.values[train].std(axis=0)
    scale[3] = 1.0  # a column that is the same everywhere is only shifted
    found = source.standardisation
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-12)
    np.testing.assert_allclose(
        source._examples.numpy(), ((read.values - mean) / scale), rtol=1e-6, atol=1e-6
    )
    assert source.columns == ("a", "b", "c", "same")
    assert "standardise=false" in source.note
    again = Labelled.from_csv(path, standardise=found, **(options | {"splits": (0.25, 0.5, 0.25)}))
    assert again._examples.equal(source._examples)
    plain = Labelled.from_csv(path, standardise=False, **options)
    assert plain.standardisation is None
    assert plain._examples.numpy().tolist() == read.values.astype(np.float32).tolist()
    assert plain.fingerprint() == source.fingerprint() == read.fingerprint


def test_what_cannot_be_standardised(tmp_path: Path) -> None:
    y = np.arange(12) % 3
    with pytest.raises(ValueError, match="needs floating inputs"):
        Labelled(
            np.zeros((12, 2), dtype=np.uint8),
            y,
            ways=2,
            queries=2,
            splits=(1.0, 0.0, 0.0),
            standardise=True,
        )
    source = Labelled(
        np.ones((12, 2)), y, ways=2, queries=2, splits={"test": [0, 1, 2]}, standardise=True
    )
    assert source.standardisation is None  # nothing to train on, nothing to take the numbers from
    assert source.fingerprint() is None


def test_statistics_of_enormous_numbers_are_finite(tmp_path: Path) -> None:
    x = np.array([[1e300, -1e-300], [3e300, 1e-300]] * 6)
    found = Labelled(
        x, np.arange(12) % 3, ways=2, queries=2, splits=(1.0, 0.0, 0.0), standardise=True
    )
    assert found.standardisation.scale == pytest.approx((1e300, 1e-300))
    assert found._examples.abs().max() == 1
