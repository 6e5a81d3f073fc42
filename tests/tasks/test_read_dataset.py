"""Data sets as torchvision and `datasets` have them: stand-ins that behave as their classes do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from metanudge.tasks import Labelled, on_disk
from metanudge.tasks.on_disk import OnDisk
from trained_runs import write_images

SMALL = {"ways": 2, "shots": 1, "queries": 1, "splits": (1.0, 0.0, 0.0)}
NAMES = ["ant", "bee", "cat", "dog"]


class Vision(Dataset):
    """torchvision's `ImageFolder`: files and class numbers in `samples`, names in `classes`,
    transforms of its own.
    """

    def __init__(
        self,
        root: Path,
        transform: Callable[[Image.Image], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
    ) -> None:
        self.root, self.transform, self.target_transform = root, transform, target_transform
        self.classes = sorted(folder.name for folder in root.iterdir())
        self.class_to_idx = {name: place for place, name in enumerate(self.classes)}
        self.samples = [
            (str(file), self.class_to_idx[name])
            for name in self.classes
            for file in sorted((root / name).iterdir())
        ]
        self.imgs = self.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        with open(path, "rb") as file:
            sample = Image.open(file).convert("RGB")
        if self.transform is not None:
            sample = self.transform(sample)
        return sample, target if self.target_transform is None else self.target_transform(target)


class ClassLabel:
    """The feature of a column with classes, as `datasets` has it."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.num_classes = names, len(names)


class Table:
    """A `datasets.Dataset`: columns with features, rows as dicts, `None` where there is none."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
        self._rows, self.features, self.column_names = rows, features, list(features)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


class Streamed:
    """A `datasets.IterableDataset`: no length, no places."""

    def __init__(self, table: Table) -> None:
        self._table, self.features = table, table.features

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._table)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures", NAMES, 3)


def table(root: Path, labels: Callable[[int], int] = int, key: str = "label") -> Table:
    rows = [
        {"image": Image.open(file).copy(), key: labels(place)}
        for place, name in enumerate(NAMES)
        for file in sorted((root / name).iterdir())
    ]
    return Table(rows, {"image": object(), key: ClassLabel(NAMES)})


def to_tensor(image: Image.Image) -> Tensor:
    """torchvision's `ToTensor`."""
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def test_a_data_set_of_torchvision_goes_straight_in(root: Path) -> None:
    source = Labelled.from_dataset(Vision(root), **SMALL)
    assert source.classes("train") == tuple(NAMES)
    assert source.input_shape == (3, 20, 20)
    folder = Labelled.from_folder(root, grey=False, **SMALL)
    assert torch.equal(source.task(4).query[0], folder.task(4).query[0])
    small = Labelled.from_dataset(Vision(root), grey=True, image_size=(8, 6), **SMALL)
    assert small.input_shape == (1, 8, 6)


def test_its_transforms_are_respected(root: Path) -> None:
    shrunk = Labelled.from_dataset(
        Vision(root, lambda image: to_tensor(image.resize((5, 4))) - 0.5), **SMALL
    )
    assert shrunk.input_shape == (3, 4, 5)
    assert shrunk.task(0).support[0].min() < 0
    merged = Labelled.from_dataset(Vision(root, target_transform=lambda y: y // 2), **SMALL)
    assert merged.classes("train") == ("0", "1"), "what a target transform makes has no names"


def test_names_behind_subsets_and_unions(root: Path) -> None:
    vision = Vision(root)
    half = Subset(vision, range(6))
    assert Labelled.from_dataset(half, **SMALL).classes("train") == ("ant", "bee")
    both = ConcatDataset([half, Subset(vision, range(6, 12))])
    assert Labelled.from_dataset(both, **SMALL).classes("train") == tuple(NAMES)
    mapped = Subset(Vision(root, target_transform=lambda y: y + 1), range(6))
    assert Labelled.from_dataset(mapped, **SMALL).classes("train") == ("1", "2")


def test_tuples_of_synonyms_and_categories_are_names(root: Path) -> None:
    vision = Vision(root)
    vision.classes = [("ant", "emmet"), ("bee",), ("cat", "puss"), ("dog",)]  # ImageNet's
    assert Labelled.from_dataset(vision, **SMALL).classes("train")[0] == "ant, emmet"
    del vision.classes
    vision.categories = NAMES  # Caltech101's
    assert Labelled.from_dataset(vision, **SMALL).classes("train") == tuple(NAMES)
    vision.categories = ["same"] * 4
    assert Labelled.from_dataset(vision, **SMALL).classes("train") == ("0", "1", "2", "3")


@pytest.mark.parametrize("kind", [lambda t: t, Streamed])
def test_a_table_of_datasets_goes_straight_in(root: Path, kind: Callable[[Table], Any]) -> None:
    source = Labelled.from_dataset(kind(table(root)), **SMALL)
    assert source.classes("train") == tuple(NAMES)
    folder = Labelled.from_folder(root, **SMALL)
    assert torch.equal(source.task(4).query[0], folder.task(4).query[0])


def test_another_column_has_names_of_its_own(root: Path) -> None:
    found = table(root, key="fine_label")
    with pytest.raises(ValueError, match="Name the key with label_key="):
        Labelled.from_dataset(found, **SMALL)
    source = Labelled.from_dataset(found, label_key="fine_label", **SMALL)
    assert source.classes("train") == tuple(NAMES)


def test_what_is_no_single_labelled_data_set(root: Path) -> None:
    with pytest.raises(TypeError, match=r"with train, test is several data sets.*data\['train'\]"):
        Labelled.from_dataset({"train": table(root), "test": table(root)}, **SMALL)
    with pytest.raises(ValueError, match="Item 0 has the label -1, which stands for none"):
        Labelled.from_dataset(table(root, lambda _: -1), **SMALL)


def test_a_broken_picture_is_named_by_its_file(root: Path) -> None:
    file = root / "cat" / "1.png"
    file.write_bytes(file.read_bytes()[:-150])
    with pytest.raises(ValueError, match=r"Item 7 \(.*cat/1\.png\) cannot be read: .*truncated"):
        Labelled.from_dataset(Vision(root), **SMALL)


def test_pictures_of_other_sizes_are_refused_or_resized(root: Path) -> None:
    Image.new("RGB", (9, 7)).save(root / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"Item 12 has .* \(3, 7, 9\).*image_size="):
        Labelled.from_dataset(Vision(root), **SMALL)
    assert Labelled.from_dataset(Vision(root), image_size=6, **SMALL).input_shape == (3, 6, 6)


def test_large_data_sets_stay_on_disk(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    eager = Labelled.from_dataset(Vision(root), **SMALL)
    assert eager.note == ""
    monkeypatch.setattr(on_disk, "LARGE", 12 * 3 * 20 * 20 - 1)
    lazy = Labelled.from_dataset(Vision(root), **SMALL)
    assert isinstance(lazy._examples, OnDisk)
    assert "kept decoded in a file" in lazy.note
    assert not list((tmp_path / "cache" / "examples").iterdir()), "it has no name"
    for number in range(5):
        for part in ("support", "query"):
            for mine, theirs in zip(
                getattr(lazy.task(number), part), getattr(eager.task(number), part), strict=True
            ):
                assert torch.equal(mine, theirs)
    assert not isinstance(
        Labelled.from_dataset(Vision(root), on_disk=False, **SMALL)._examples, OnDisk
    )
