from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from metanudge.tasks import Labelled

SMALL = {"ways": 2, "shots": 1, "queries": 2, "splits": (1.0, 0.0, 0.0)}


def labels(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def image(seed: int, size: tuple[int, int] = (9, 7), mode: str = "L") -> Image.Image:
    shape = (size[1], size[0]) + (() if mode == "L" else (len(mode),))
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode=None
    )


def image_folder(root: Path, *, classes: tuple[str, ...] = ("a", "b", "c"), each: int = 3) -> Path:
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(each):
            image(100 * c + i).save(root / name / f"{i}.png")
    return root


# --- arrays
# --------------------------------------------------------------------------------------------------


def test_ragged_classes_are_drawn_from_evenly_and_never_beyond_their_end():
    counts = [3, 7, 100, 31]
    y = np.concatenate([np.full(n, c) for c, n in enumerate(counts)])
    source = Labelled(np.arange(len(y)), y, **SMALL)
    seen: dict[int, set[int]] = {c: set() for c in range(4)}
    for task in source.batch(range(800)):
        rows = torch.cat([task.support[0], task.query[0]]).flatten().tolist()
        by_label = torch.cat([task.support[1], task.query[1]]).tolist()
        for label in (0, 1):
            (c,) = {int(y[row]) for row, own in zip(rows, by_label, strict=True) if own == label}
            seen[c] |= {row for row, own in zip(rows, by_label, strict=True) if own == label}
    assert [len(seen[c]) for c in range(4)] == counts


def test_labels_may_be_strings_and_order_of_the_data_does_not_choose_the_classes():
    names = np.array(["owl", "cat", "dog", "ant", "bee"])[labels(5, 4)]
    options = {**SMALL, "splits": (0.4, 0.4, 0.2)}
    a = Labelled(np.arange(20), names, **options)
    shuffled = np.random.default_rng(0).permutation(20)
    b = Labelled(np.arange(20)[shuffled], names[shuffled].astype(object), **options)
    assert [a.classes(s) for s in ("train", "val", "test")] == [
        b.classes(s) for s in ("train", "val", "test")
    ]
    assert len({*a.classes("train"), *a.classes("val"), *a.classes("test")}) == 5


def test_seed_leaves_the_class_split_and_split_seed_changes_it():
    x, y = np.arange(200), labels(50, 4)
    a, b = (Labelled(x, y, ways=2, queries=2, seed=seed) for seed in (0, 1))
    assert a.classes("test") == b.classes("test")
    assert not torch.equal(a.task(0).support[0], b.task(0).support[0])
    assert Labelled(x, y, ways=2, queries=2, split_seed=1).classes("test") != a.classes("test")
    assert [len(a.classes(s)) for s in ("train", "val", "test")] == [32, 8, 10]


def test_explicit_lists_are_followed():
    lists = {"train": [3, 1, 0], "test": ["2", "4"]}
    source = Labelled(np.arange(60), labels(6, 10), ways=2, queries=2, splits=lists)
    assert [source.classes(s) for s in ("train", "val", "test")] == [
        ("0", "1", "3"),
        (),
        ("2", "4"),
    ]
    with pytest.raises(ValueError, match=r"Split 'val' .* has 0 classes, but ways=2"):
        source.task(0, "val")


def test_a_source_may_have_test_classes_only():
    assert Labelled(np.arange(20), labels(2, 10), ways=2, queries=2, splits={"test": [0, 1]}).task(
        0, "test"
    )


@pytest.mark.parametrize(
    ("x", "dtype", "value"),
    [
        (np.full((20, 2), 51, dtype=np.uint8), torch.float32, 0.2),
        (np.full((20, 2), 51, dtype=np.int16), torch.int64, 51),
        (np.full((20, 2), True), torch.float32, 1.0),
        (np.full((20, 2), 0.5, dtype=np.float64), torch.float32, 0.5),
        (torch.full((20, 2), 0.5, dtype=torch.bfloat16), torch.float32, 0.5),
        ([[0.5, 0.5]] * 20, torch.float32, 0.5),
    ],
    ids=["uint8", "integers", "bool", "float64", "bfloat16", "list"],
)
def test_input_types(x, dtype, value):
    source = Labelled(x, labels(4, 5), **SMALL)
    inputs = source.task(0).support[0]
    assert inputs.dtype == dtype
    assert inputs.shape == (2, 2)
    torch.testing.assert_close(inputs, torch.full_like(inputs, value))


def test_scalar_examples_get_a_feature_axis():
    assert Labelled(np.arange(20.0), labels(4, 5), **SMALL).input_shape == (1,)


def test_the_given_tensor_is_not_changed():
    x = torch.full((20, 1, 2, 2), 255, dtype=torch.uint8)
    source = Labelled(x, labels(4, 5), **SMALL)
    source.task(0).support[0].zero_()
    assert (x == 255).all()
    assert (source.task(0).support[0] == 1).all()


def test_too_few_classes():
    with pytest.raises(
        ValueError, match=r"Split 'train' of this Labelled has 3 classes, but ways=5.*Lower ways"
    ):
        Labelled(np.arange(30), labels(3, 10), ways=5, queries=2, splits=(1, 0, 0))


def test_too_few_examples_and_leaving_the_small_classes_out():
    y = np.concatenate([labels(4, 10), [9, 9]])
    message = (
        r"Class '9' of split 'train' has 2 examples.*shots=1 and queries=2 need 3.*\(1 of 5"
        r" classes.*Lower"
    )
    with pytest.raises(ValueError, match=message):
        Labelled(np.arange(42), y, **SMALL)
    assert Labelled(np.arange(42), y, **SMALL, drop_small=True).classes("train") == (
        "0",
        "1",
        "2",
        "3",
    )


def test_leaving_small_classes_out_does_not_move_the_others():
    y = np.concatenate([labels(30, 4), np.repeat(np.arange(30), np.arange(30))])
    few = Labelled(np.arange(len(y)), y, ways=2, shots=1, queries=1, drop_small=True)
    many = Labelled(np.arange(len(y)), y, ways=2, shots=1, queries=15, drop_small=True)
    for split in ("train", "val", "test"):
        assert set(many.classes(split)) <= set(few.classes(split))


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (np.zeros((20, 2)), labels(4, 4), ValueError, "x has 20 examples and y has 16 labels"),
        (np.zeros((0, 2)), [], ValueError, r"x has shape \(0, 2\) and so no examples"),
        (np.array(["a"] * 20), labels(4, 5), TypeError, "inputs must be numbers"),
        (np.zeros((20, 2), dtype=complex), labels(4, 5), TypeError, "inputs must be numbers"),
        (torch.zeros(20, 2, dtype=torch.complex64), labels(4, 5), TypeError, "x is complex"),
        (np.zeros((20, 2)), np.eye(20), ValueError, "one label per example.*argmax"),
        (np.zeros((20, 2)), np.linspace(0, 1, 20), TypeError, "labels must be integers or strings"),
        (np.zeros((20, 2)), [0.0] * 19 + [math.nan], TypeError, "none missing"),
        (np.zeros((20, 2)), ["a"] * 19 + [None], TypeError, "none missing"),
    ],
)
def test_wrong_arrays_are_refused(x, y, error, message):
    with pytest.raises(error, match=message):
        Labelled(x, y, **SMALL)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_found(bad):
    x = torch.zeros(20, 2, 3)
    x[7, 1, 2] = bad
    x[9] = bad
    with pytest.raises(ValueError, match="NaN or infinity in 2 examples, the first is number 7"):
        Labelled(x, labels(4, 5), **SMALL)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((0.5, 0.5), "do not divide the classes"),
        ((0.5, 0.4, 0.2), "do not divide the classes"),
        ((1.5, -0.5, 0.0), "do not divide the classes"),
        ({"train": ["cat"], "valid": []}, "no split 'valid'. Did you mean 'val'"),
        (
            {"train": ["cot"]},
            "lists the class 'cot', which the data do not have. Did you mean 'cat'",
        ),
        (
            {"train": ["cat", "dog"], "test": ["dog"]},
            "'dog' is listed in split 'train' and again in 'test'",
        ),
        ({"train": ["cat", "cat"]}, "'cat' is listed in split 'train' and again in 'train'"),
    ],
)
def test_wrong_splits_are_refused(splits, message):
    y = np.array(["cat", "dog", "owl"])[labels(3, 5)]
    with pytest.raises(ValueError, match=message):
        Labelled(np.zeros((15, 2)), y, ways=2, queries=2, splits=splits)


# --- data sets
# --------------------------------------------------------------------------------------------------


class Items(Dataset):
    """A data set of given items; like many real ones it does not raise IndexError."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i % len(self.items)]


def test_all_kinds_of_items_give_the_same_source():
    x, y = torch.arange(40.0).view(20, 2), labels(4, 5)
    expected = Labelled(x, y, **SMALL).task(3).query[0]
    kinds = {
        "tensors": TensorDataset(x, torch.from_numpy(y)),
        "arrays": Items([(row.numpy(), int(label)) for row, label in zip(x, y, strict=True)]),
        "lists": Items([(row.tolist(), np.int64(label)) for row, label in zip(x, y, strict=True)]),
        "dicts": Items(
            [{"x": row, "label": int(label), "id": "?"} for row, label in zip(x, y, strict=True)]
        ),
        "generator": ((row, label) for row, label in zip(x, y, strict=True)),
    }
    for dataset in kinds.values():
        assert torch.equal(Labelled.from_dataset(dataset, **SMALL).task(3).query[0], expected)
    keyed = Items([{"emb": row, "kind": f"k{label}"} for row, label in zip(x, y, strict=True)])
    source = Labelled.from_dataset(keyed, input_key="emb", label_key="kind", **SMALL)
    assert torch.equal(source.task(3).query[0], expected)
    placed = Items([("id", int(label), row) for row, label in zip(x, y, strict=True)])
    source = Labelled.from_dataset(placed, input_key=2, label_key=-2, **SMALL)
    assert torch.equal(source.task(3).query[0], expected)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 3)])
def test_pillow_images_become_channels_first_in_0_to_1(mode, channels):
    images = [image(i, mode=mode) for i in range(20)]
    source = Labelled.from_dataset(
        Items([{"image": im, "label": int(c)} for im, c in zip(images, labels(4, 5), strict=True)]),
        **SMALL,
    )
    assert source.input_shape == (channels, 7, 9)
    x = source.task(0).support[0]
    assert x.dtype == torch.float32
    assert 0 <= x.min() < 0.2 < 0.8 < x.max() <= 1
    wanted = [
        torch.from_numpy(np.asarray(im.convert("L" if channels == 1 else "RGB")).copy())
        for im in images
    ]
    stored = torch.stack([w.view(7, 9, channels).permute(2, 0, 1) for w in wanted]) / 255
    assert all((stored == one).flatten(1).all(dim=1).any() for one in x)


@pytest.mark.parametrize(
    ("items", "options", "error", "message"),
    [
        ([], {}, ValueError, "The data set is empty"),
        (
            [{"picture": 1, "label": 0}],
            {},
            ValueError,
            r"has \['picture', 'label'\]. Name the key with input_key=",
        ),
        ([{"x": 1, "kind": 0}], {}, ValueError, "Name the key with label_key="),
        ([{"x": 1, "y": 0}], {"input_key": "z"}, ValueError, r"no key 'z'; it has \['x', 'y'\]"),
        ([(1,)], {}, ValueError, "sequence of 1 values and has no label_key=1"),
        ([(1, 2)], {"input_key": "x"}, ValueError, "has no input_key='x'"),
        ([torch.zeros(3)], {}, TypeError, "Item 0 is a Tensor.*pairs"),
        (["ab"], {}, TypeError, "Item 0 is a str"),
        ([("text", 0)], {}, ValueError, r"input of item 0 \(str\) cannot be made a tensor"),
        (
            [([1, 2], 0), ([1], 0)],
            {},
            ValueError,
            r"Item 1 has an input of shape \(1,\), item 0 has \(2,\)",
        ),
        ([(Image.new("I;16", (4, 4)), 0)], {}, ValueError, "more than 8 bits per channel"),
    ],
)
def test_wrong_items_are_refused(items, options, error, message):
    with pytest.raises(error, match=message):
        Labelled.from_dataset(Items(items), **options)


# --- folders
# --------------------------------------------------------------------------------------------------


def test_a_folder_of_images(tmp_path):
    root = image_folder(tmp_path / "data")
    (root / "README.txt").write_text("not looked at")
    (root / "a" / ".hidden").write_text("not looked at")
    source = Labelled.from_folder(root, image_size=28, **SMALL)
    assert source.input_shape == (1, 28, 28)
    assert source.classes("train") == ("a", "b", "c")
    assert Labelled.from_folder(root, image_size=(5, 6), grey=False, **SMALL).input_shape == (
        3,
        5,
        6,
    )
    kept = Labelled.from_folder(root, image_size=None, **SMALL)
    assert kept.input_shape == (1, 7, 9)
    stored = (
        np.stack([np.asarray(Image.open(root / c / f"{i}.png")) for c in "abc" for i in range(3)])
        / 255
    )
    x = kept.task(0).support[0].numpy()
    assert all(np.isclose(stored, one[0], atol=1e-7).all(axis=(1, 2)).any() for one in x)


def test_the_order_of_the_file_system_does_not_matter(tmp_path, monkeypatch):
    root = image_folder(tmp_path / "data", classes=("c", "a", "b"))
    first = [Labelled.from_folder(root, **SMALL).task(i).query[0] for i in range(5)]
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(iterdir(self), reverse=True)))
    second = [Labelled.from_folder(root, **SMALL).task(i).query[0] for i in range(5)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv"])
def test_a_folder_of_vectors(tmp_path, suffix):
    vector = np.array([1.5, -2.0, 0.25])
    for c in range(3):
        (tmp_path / f"c{c}").mkdir()
        for i in range(3):
            file = tmp_path / f"c{c}" / f"{i}.{suffix}"
            if suffix == "npy":
                np.save(file, vector + c)
            elif suffix == "npz":
                np.savez(file, vector + c)
            else:
                file.write_text(
                    "\n".join(str(v) for v in vector + c)
                    if i
                    else ",".join(str(v) for v in vector + c)
                )
    x, _ = Labelled.from_folder(tmp_path, **SMALL).task(0).query
    assert {tuple((row - row[2] + 0.25).tolist()) for row in x} == {(1.5, -2.0, 0.25)}


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        Labelled.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no sub-folders"):
        Labelled.from_folder(tmp_path)
    image_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*empty is empty"):
        Labelled.from_folder(tmp_path, **SMALL)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.png", b"not an image"),
        ("cut.png", None),
        ("bad.npy", b"\x93NUMPY\x01\x00"),
        ("pickle.npy", b"\x80\x04N."),
        ("words.csv", b"1,two,3"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content):
    root = image_folder(tmp_path / "data")
    (root / "b" / name).write_bytes(
        (root / "a" / "0.png").read_bytes()[:40] if content is None else content
    )
    with pytest.raises(ValueError, match=rf"{name} cannot be read as an example"):
        Labelled.from_folder(root, **SMALL)


def test_pickles_in_arrays_are_not_run(tmp_path):
    root = image_folder(tmp_path / "data")
    np.save(root / "a" / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"objects.npy cannot be read"):
        Labelled.from_folder(root, **SMALL)


def test_an_archive_of_two_arrays_and_a_deep_image_and_a_nested_folder_are_named(tmp_path):
    root = image_folder(tmp_path / "data")
    np.savez(root / "a" / "two.npz", x=np.zeros(2), y=np.zeros(2))
    with pytest.raises(
        ValueError, match=r"two.npz cannot be read.*\['x', 'y'\], expected exactly one"
    ):
        Labelled.from_folder(root, **SMALL)
    (root / "a" / "two.npz").unlink()
    Image.new("I;16", (4, 4)).save(root / "a" / "deep.png")
    with pytest.raises(ValueError, match=r"deep.png cannot be read.*more than 8 bits"):
        Labelled.from_folder(root, **SMALL)
    (root / "a" / "deep.png").unlink()
    (root / "a" / "inner").mkdir()
    with pytest.raises(ValueError, match="inner is a folder inside a class folder"):
        Labelled.from_folder(root, **SMALL)


def test_images_of_different_sizes_need_an_image_size(tmp_path):
    root = image_folder(tmp_path / "data")
    image(0, size=(3, 3)).save(root / "c" / "small.png")
    with pytest.raises(
        ValueError,
        match=r"small.png has shape \(1, 3, 3\), but .*0.png has \(1, 7, 9\).*image_size=",
    ):
        Labelled.from_folder(root, image_size=None, **SMALL)
    Labelled.from_folder(root, **SMALL)


# --- CSV
# --------------------------------------------------------------------------------------------------


def csv_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.csv"
    path.write_bytes(text.encode("utf-8"))
    return path


def test_a_csv_file(tmp_path):
    rows = "".join(f'{i},"class {c}",{-i}.5\r\n' for i, c in enumerate(labels(3, 4)))
    path = csv_file(tmp_path, "\ufeffa,label,b\r\n" + rows + "\r\n")
    source = Labelled.from_csv(path, standardise=False, **SMALL)
    assert source.classes("train") == ("class 0", "class 1", "class 2")
    x, _ = source.task(0).support
    assert x.shape == (2, 2)
    assert torch.equal(x[:, 1], -x[:, 0] - 0.5) or torch.equal(x[:, 1].abs(), x[:, 0] + 0.5)
    assert Labelled.from_csv(path, features=["b"], **SMALL).input_shape == (1,)


def test_another_delimiter_and_label(tmp_path):
    path = csv_file(
        tmp_path, "kind;x\n" + "".join(f"{c};{i}\n" for i, c in enumerate(labels(3, 4)))
    )
    assert Labelled.from_csv(path, label="kind", delimiter=";", **SMALL).classes("train") == (
        "0",
        "1",
        "2",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,lable\n1,x\n", r"no column 'label'. Did you mean 'lable'\? Its columns are: a, lable"),
        ("", "no column 'label'. Its columns are: none"),
        ("a,label\n", "a header and no rows"),
        ("label\nx\n", "no column besides label"),
        ("a,a,label\n1,2,x\n", "two columns named 'a'"),
        ("a,b,label\n1,2,x\n3,four,y\n", "line 3, column 'b': 'four' is not a finite number"),
        ("a,label\n1,x\n,y\n", "line 3, column 'a': '' is not a finite number"),
        ("a,label\nnan,x\n", "line 2, column 'a': 'nan' is not a finite number"),
        ("a,label\n-inf,x\n", "line 2, column 'a': '-inf' is not a finite number"),
        ('a,label\n1,"two\nlines"\nx,y\n', "line 4, column 'a'"),
        ("a,b,label\n1,x\n", "line 2: 2 cells, but the header names 3 columns"),
    ],
)
def test_wrong_csv_files_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        Labelled.from_csv(csv_file(tmp_path, text), **SMALL)


def test_missing_and_binary_csv_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        Labelled.from_csv(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"a,label\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="not a readable CSV file in UTF-8"):
        Labelled.from_csv(tmp_path / "binary.csv")
    with pytest.raises(ValueError, match="no column 'z'"):
        Labelled.from_csv(csv_file(tmp_path, "a,label\n1,x\n"), features=["z"])
