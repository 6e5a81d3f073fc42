"""Labelled examples from a torch `Dataset`, a HuggingFace one, or any sequence of (input, label)
items.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metanudge.names import shown, some
from metanudge.tasks.images import image_tensor
from metanudge.tasks.on_disk import OnDisk, spooled, wanted

_INPUT_KEYS = ("image", "img", "pixel_values", "inputs", "input", "features", "x")
_LABEL_KEYS = ("label", "labels", "target", "class", "y")


def read_dataset(
    dataset: Any,
    *,
    input_key: str | int | None,
    label_key: str | int | None,
    image_size: int | tuple[int, int] | None = None,
    grey: bool | None = None,
    on_disk: bool | None = False,
) -> tuple[Tensor | OnDisk, list[Any], str]:
    """All inputs, all labels, and what was decided about them; the whole data set is read once, in
    order.

    See `Labelled.from_dataset` for what the items may be.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"A {type(dataset).__name__} with {some(list(dataset))} is several data sets. Give one"
            f" of them: data[{next(iter(dataset), 'train')!r}]."
        )
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    labels: list[Any] = []

    def inputs() -> Iterator[Tensor]:
        for i, item in enumerate(_items(dataset)):
            value = _pick(item, input_key, _INPUT_KEYS, 0, i)
            label = _pick(item, label_key, _LABEL_KEYS, 1, i)
            try:
                example = _as_tensor(value, size, grey)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"The input of item {i} ({type(value).__name__}) cannot be made a tensor:"
                    f" {error}. Items need tensors, arrays, numbers or 8-bit images; give the data"
                    " set a transform."
                ) from error
            labels.append(label.item() if isinstance(label, (Tensor, np.generic)) else label)
            yield example

    reading = _alike(inputs())
    first = next(reading, None)
    if first is None:
        raise ValueError(
            "The data set is empty. Give one with at least a few examples of a few classes."
        )
    count = len(dataset) if hasattr(dataset, "__len__") else 0
    whole, note = itertools.chain([first], reading), ""
    if count and wanted(on_disk, first, count):
        examples: Tensor | OnDisk = spooled(whole, count)
        note = f"{count:,} examples are kept decoded in a file, not in memory"
    else:
        examples = torch.stack(list(whole))
    names = _class_names(dataset, label_key)
    return examples, _named(labels, names), note


def _alike(examples: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same examples; refused where their shapes differ."""
    first: Tensor | None = None
    for i, example in enumerate(examples):
        first = example if first is None else first
        if example.shape != first.shape:
            raise ValueError(
                f"Item {i} has an input of shape {tuple(example.shape)}, item 0 has"
                f" {tuple(first.shape)}. All inputs must have the same shape; images are made so"
                " with image_size= (and grey=), others in the data set's transform."
            )
        yield example


def _items(dataset: Any) -> Iterator[Any]:
    if not hasattr(dataset, "__len__"):
        yield from dataset
        return
    # By index where there is a length: `Dataset.__getitem__` need not raise the IndexError that
    # ends an iteration.
    for i in range(len(dataset)):
        try:
            item = dataset[i]
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow says that a file is broken
            files = getattr(dataset, "samples", None)
            file = f" ({shown(files[i][0])})" if isinstance(files, list) and i < len(files) else ""
            raise ValueError(
                f"Item {i}{file} cannot be read: {shown(error)}. Correct it, or leave it out."
            ) from error
        yield item


# --- Classes by their names


def _class_names(dataset: Any, label_key: str | int | None) -> Sequence[str] | None:
    """What the numbers of its classes stand for, where the data set says it: `features` of
    datasets, `classes` (or `categories`) of torchvision, also behind a `Subset`.
    """
    if getattr(dataset, "target_transform", None) is not None:
        return None  # labels are what it makes of them
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        keys = _LABEL_KEYS if label_key is None else (label_key,)
        found = next((features[key] for key in keys if key in features), None)
        return getattr(found, "names", None)
    for name in ("classes", "categories"):
        if isinstance(names := getattr(dataset, name, None), (list, tuple)):
            return [", ".join(one) if isinstance(one, tuple) else str(one) for one in names]
    if isinstance(parts := getattr(dataset, "datasets", None), (list, tuple)):  # ConcatDataset
        each = [_class_names(part, label_key) for part in parts]
        return each[0] if each and all(one == each[0] for one in each) else None
    within = getattr(dataset, "dataset", None)
    return None if within is None else _class_names(within, label_key)


def _named(labels: list[Any], names: Sequence[str] | None) -> list[Any]:
    """The labels by the names of their classes, where they are numbers of them."""
    whole = all(isinstance(label, int) and not isinstance(label, bool) for label in labels)
    if not names or not whole or len(set(names)) < len(names):
        return labels
    if (lowest := min(labels)) == -1:
        raise ValueError(
            f"Item {labels.index(-1)} has the label -1, which stands for none: this part of the"
            " data set is not labelled. Give another, or leave such items out."
        )
    return [names[label] for label in labels] if 0 <= lowest <= max(labels) < len(names) else labels


# --- One item


def _pick(item: Any, key: str | int | None, usual: Sequence[str], place: int, number: int) -> Any:
    option = ("input_key", "label_key")[place]
    if isinstance(item, Mapping):
        found = next((k for k in usual if k in item), None) if key is None else key
        if found is None or found not in item:
            raise ValueError(
                f"Item {number} has no"
                f" {'key ' + repr(key) if key is not None else f'key among {usual}'}; it has"
                f" {list(item)}. Name the key with {option}=."
            )
        return item[found]
    if not isinstance(item, Sequence) or isinstance(item, str):
        raise TypeError(
            f"Item {number} is a {type(item).__name__}. Items must be pairs (input, label) or"
            " dicts; wrap the data set."
        )
    where = place if key is None else key
    if not isinstance(where, int) or not -len(item) <= where < len(item):
        raise ValueError(
            f"Item {number} is a sequence of {len(item)} values and has no {option}={where!r}. Use"
            f" a place such as {place}."
        )
    return item[where]


def _as_tensor(value: Any, size: tuple[int, int] | None, grey: bool | None) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    pillow = sys.modules.get("PIL.Image")  # loaded where somebody has a picture
    if pillow is not None and isinstance(value, pillow.Image):
        return image_tensor(value, grey=grey, size=size)
    return torch.as_tensor(np.array(value))  # a copy: some are read-only
