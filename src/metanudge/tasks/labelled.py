"""`Labelled`: few-shot tasks from any labelled data, be it arrays, a `Dataset`, a folder of images
or a CSV file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from metanudge.tasks.class_splits import FRACTIONS, Splits, split_classes
from metanudge.tasks.classification import ClassEpisodes, Pool
from metanudge.tasks.counts import Count, check_span
from metanudge.tasks.episodes import Sizes, Split, Stream
from metanudge.tasks.on_disk import OnDisk
from metanudge.tasks.options import passes_on
from metanudge.tasks.read_csv import read_csv
from metanudge.tasks.read_dataset import read_dataset
from metanudge.tasks.read_folder import ImageSize, read_folder
from metanudge.tasks.standardise import Standardisation


class Divided(Sizes, total=False):
    """What every source takes whose classes are divided; see `Labelled`."""

    splits: Splits
    split_seed: int
    drop_small: bool


class LabelledOptions(Divided, total=False):
    """The options that every way of building a `Labelled` takes; see there."""

    standardise: bool | Standardisation


class Labelled(ClassEpisodes):
    """Few-shot tasks from inputs and labels; classes may have different numbers of examples.

    The *classes* are divided among the splits, so that validation and test tasks hold classes never
    trained on.

    Args:
        x: inputs, shape `(num_examples, ...)`. Floats come out in `dtype`; uint8 is taken for
            images and comes out in [0, 1]; other integers (token numbers) stay as they are. What is
            mapped from a file (`np.load(file, mmap_mode="r")`) stays there.
        y: one label per example: integers or strings.
        ways, shots, queries: classes per task, support and query examples per class.
        splits: fractions of the classes for train, val and test, or lists of classes: `{"train":
            [...], "test": [...]}` (classes in no list are left out).
        split_seed: of the division by fractions; apart from `seed`, so that runs with another
            `seed` train on the same classes.
        drop_small: leave out the classes with fewer than shots + queries examples, instead of
            refusing them. This happens after the division, so the splits do not depend on shots and
            queries.
        standardise: take each column's mean over the training classes from it and divide it by
            their standard deviation (`source.standardisation`); one found before may be given. For
            floating inputs.
        stream: seed, device and dtype; see `Episodes`.

    Example:
        >>> x, y = torch.randn(200, 8), torch.arange(200) % 20
        >>> source = Labelled(x, y, ways=3, shots=2, queries=5)
        >>> source
        Labelled(ways=3, shots=2, queries=5, seed=0, input_shape=(8,), classes=13/3/4, device='cpu')
        >>> source.task(0, "test").support[1].tolist()
        [0, 0, 1, 1, 2, 2]
    """

    def __init__(
        self,
        x: Tensor | ArrayLike | OnDisk,
        y: Tensor | Sequence[Any] | NDArray[Any],
        *,
        ways: Count = 5,
        shots: Count = 1,
        queries: int = 15,
        standardise: bool | Standardisation = False,
        splits: Splits = FRACTIONS,
        split_seed: int = 0,
        drop_small: bool = False,
        **stream: Unpack[Stream],
    ) -> None:
        if isinstance(x, np.memmap):
            x = OnDisk.of(x)
        examples = _as_examples(x)
        pools = class_pools(y, len(examples), splits, split_seed)
        self.standardisation = _standardisation(standardise, examples, pools["train"])
        if self.standardisation is not None:
            scale = self.standardisation
            if isinstance(examples, OnDisk):
                examples = replace(examples, standardisation=scale)
            else:
                examples = scale.apply(examples)
        self.columns: tuple[str, ...] | None = None
        self._fingerprint: str | None = None
        if drop_small:
            needed = check_span("shots", shots)[1] + queries
            pools = {split: pool.without_small(needed) for split, pool in pools.items()}
        super().__init__(examples, pools, ways=ways, shots=shots, queries=queries, **stream)
        _check_range(self._examples, examples, self.dtype)

    def fingerprint(self) -> str | None:
        """Hex sha256 of the files it was read from; None for arrays and data sets."""
        return self._fingerprint

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        input_key: str | int | None = None,
        label_key: str | int | None = None,
        image_size: int | tuple[int, int] | None = None,
        grey: bool | None = None,
        on_disk: bool | None = None,
        **options: Unpack[LabelledOptions],
    ) -> Self:
        """From a data set of torch, torchvision or Hugging Face's `datasets` (or anything with
        length and items), read once.

        Its transforms are those of its items; classes keep their names where the data set has them
        (`classes`, or a `ClassLabel` among `features`).

        Args:
            dataset: its items are pairs (input, label), or dicts as `datasets` has them. Inputs are
                tensors, arrays, numbers or Pillow images, all of one shape.
            input_key, label_key: the keys of a dict item (usual names such as "image" and "label"
                are found without), or the places in a tuple item (0 and 1).
            image_size: side, or (height, width), that Pillow images are resized to; None keeps
                them.
            grey: Pillow images get one channel or three; None leaves grey ones grey.
            on_disk: keep the inputs in a file, which is gone with the source, so that they need not
                fit into memory; None where they take more than 256 MiB.
            options: see `Labelled`.

        Example:
            >>> data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.arange(60) % 6)
            >>> Labelled.from_dataset(data, ways=2, queries=3,
            ...     splits=(0.5, 0.0, 0.5)).classes("train")
            ('1', '2', '3')
        """
        x, y, note = read_dataset(
            dataset,
            input_key=input_key,
            label_key=label_key,
            image_size=image_size,
            grey=grey,
            on_disk=on_disk,
        )
        source = cls(x, y, **options)
        source.note = note
        return source

    @classmethod
    @passes_on(__init__)
    def from_folder(
        cls,
        path: str | os.PathLike[str],
        *,
        image_size: ImageSize = "auto",
        grey: bool | None = None,
        on_disk: bool | None = None,
        **options: Unpack[LabelledOptions],
    ) -> Self:
        """From a folder with one sub-folder per class; the names of the sub-folders are the
        classes.

        Args:
            path: the folder. Files beside the sub-folders, and hidden files, are not looked at.
            image_size: side, or (height, width), that images are resized to; None keeps them.
                "auto" takes the images' own size where they agree and squares where they do not,
                the longest side at most 84 pixels; "small" at most 32.
            grey: one channel instead of three; None where all images are grey.
            on_disk: decode the examples once into a file of the cache folder ($METANUDGE_CACHE)
                and read them there, so that they need not fit into memory; None where they take
                more than 256 MiB. Another listing of the folder, size or time of a file is decoded
                anew.
            options: see `Labelled`.

        A class folder holds images (PNG, JPEG, BMP, GIF, WebP, TIFF or PPM) or arrays: .npy, .npz
        with one array, .csv with one vector. Other files are passed over with a warning. Images are
        turned as their EXIF data say, what is transparent becomes white, and an animation is its
        first picture. The order of the examples follows the sorted names, not the file system.
        """
        read = read_folder(path, image_size=image_size, grey=grey, on_disk=on_disk)
        source = cls(read.examples, read.labels, **options)
        source.note, source._fingerprint = read.note, read.fingerprint
        return source

    @classmethod
    @passes_on(__init__)
    def from_csv(
        cls,
        path: str | os.PathLike[str],
        *,
        label: str = "label",
        features: Sequence[str] | None = None,
        delimiter: str | None = None,
        standardise: bool | Standardisation = True,
        **options: Unpack[Divided],
    ) -> Self:
        """From a CSV file with a header: one row per example, numbers in every column but the
        label's.

        Args:
            path: the file, in UTF-8.
            label: the column that holds the class.
            features: the columns to use as inputs; None takes all but the label.
            delimiter: what separates the cells; None takes the comma, semicolon, tab or bar that
                the first line is made with.
            standardise, options: see `Labelled`; here the columns are standardised unless told
                otherwise.
        """
        table = read_csv(path, label=label, features=features, delimiter=delimiter)
        _check_no_quantity(table.text[label], label)
        source = cls(table.values, table.text[label], standardise=standardise, **options)
        source.columns, source._fingerprint = table.names, table.fingerprint
        if source.standardisation is not None:
            source.note = (
                "standardised over the training classes; standardise=false leaves them as they are"
            )
        return source


def class_pools(
    y: Tensor | Sequence[Any] | NDArray[Any], examples: int, splits: Splits, seed: int
) -> dict[Split, Pool]:
    """The classes of each split; `y` has one label for each of the examples."""
    labels, names = _as_labels(y)
    if examples != len(labels):
        raise ValueError(
            f"x has {examples} examples and y has {len(labels)} labels. Each example needs"
            " exactly one label."
        )
    parts = split_classes(names, splits, seed=seed)
    return {split: Pool.of(labels, names=names, keep=places) for split, places in parts.items()}


def _check_no_quantity(labels: Sequence[str], name: str) -> None:
    """Refuse labels that are real numbers, most of them different."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return
    if len(set(numbers)) * 10 > len(numbers) and not all(n.is_integer() for n in numbers):
        raise ValueError(
            f"The label {name!r} is {numbers[0]:g}, {numbers[-1]:g} and so on: a quantity, where"
            " classes were expected. Where rows belong to regression tasks, name them:"
            f" --task-column COLUMN --target {name} (in Python: metanudge.tasks.Given.from_table)."
        )


def _standardisation(
    wanted: bool | Standardisation, examples: Tensor | OnDisk, train: Pool
) -> Standardisation | None:
    width = math.prod(examples.shape[1:])
    if isinstance(wanted, Standardisation):
        if len(wanted.mean) != width:
            raise ValueError(
                f"standardise has the means of {len(wanted.mean)} columns, but x has {width}. Give"
                " others."
            )
        return wanted
    if not wanted or not len(train.names):
        return None
    if not examples.is_floating_point():
        what = examples.data.dtype if isinstance(examples, OnDisk) else examples.dtype
        raise ValueError(
            f"standardise=True needs floating inputs, and x is {what}. Convert it, or leave"
            " standardise out."
        )
    rows = torch.from_numpy(train.members())

    def read(part: slice) -> NDArray[np.floating]:
        if isinstance(examples, OnDisk):
            return examples.rows(rows[part]).numpy()
        return examples[rows[part].to(examples.device)].cpu().numpy()

    return Standardisation.over(len(rows), width, read)


def _check_range(held: Tensor | OnDisk, given: Tensor | OnDisk, dtype: torch.dtype) -> None:
    """Refuse finite numbers that are infinite in the type of the inputs."""
    if not given.is_floating_point():
        return
    stored = (part.to(dtype) for part in held.parts()) if isinstance(held, OnDisk) else [held]
    if not all(bool(part.isfinite().all()) for part in stored):
        whole = given.data if isinstance(given, OnDisk) else given
        raise ValueError(
            f"x holds numbers of up to {float(whole.abs().max()):.3g}, which are infinite in"
            f" {dtype}. Scale them down."
        )


def _as_examples(x: Tensor | ArrayLike | OnDisk) -> Tensor | OnDisk:
    if isinstance(x, OnDisk):
        _check(x)
        return x
    if isinstance(x, Tensor):
        examples = x.detach()
    else:
        array = np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"x has dtype {array.dtype}; inputs must be numbers, in one array of shape"
                " (num_examples, ...). Encode text first, and make all inputs the same shape."
            )
        examples = torch.from_numpy(np.ascontiguousarray(array))
    if examples.ndim == 1:
        examples = examples[:, None]  # a model needs a feature axis
    _check(examples)
    if examples.dtype == torch.bool:
        return examples.float()
    keep = examples.dtype == torch.uint8 or examples.is_floating_point()
    return examples if keep else examples.long()


def _check(examples: Tensor | OnDisk) -> None:
    """Refuse what cannot be inputs."""
    whole = examples.data if isinstance(examples, OnDisk) else examples
    if whole.is_complex():
        raise TypeError(
            "x is complex; inputs must be real numbers. Stack real and imaginary part on an axis of"
            " their own."
        )
    if whole.ndim == 0 or len(whole) == 0:
        raise ValueError(
            f"x has shape {tuple(whole.shape)} and so no examples. Give shape (num_examples, ...)."
        )
    if not whole.is_floating_point():
        return
    rows: list[int] = []
    first = 0
    for part in examples.parts() if isinstance(examples, OnDisk) else [whole]:
        finite = part.isfinite().flatten(1).all(dim=1)
        rows += [first + row for row in (~finite).nonzero().flatten().tolist()]
        first += len(part)
    if rows:
        raise ValueError(
            f"x holds NaN or infinity in {len(rows)} examples, the first is number {rows[0]}."
            " They would spread to every parameter; correct these examples or leave them out."
        )


def _as_labels(
    y: Tensor | Sequence[Any] | NDArray[Any],
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers, and the sorted names they stand for."""
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if values.ndim != 1:
        raise ValueError(
            f"y has shape {values.shape}, expected one label per example, shape (num_examples,). "
            "One-hot labels become numbers with y.argmax(1)."
        )
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(np.str_)  # columns of text, as pandas keeps them
    if values.dtype.kind == "f" and bool((np.isfinite(values) & (values == np.rint(values))).all()):
        values = values.astype(np.int64)
    if values.dtype.kind not in "biuU":
        raise TypeError(
            f"y has dtype {values.dtype} (first label: {values[:1].tolist()}); labels must be"
            " integers or strings, none missing. Real-valued targets are regression: see"
            " metanudge.tasks.Given."
        )
    unique, numbers = np.unique(values, return_inverse=True)
    return numbers.astype(np.int64), tuple(str(name) for name in unique.tolist())
