"""Labelled examples from a torch `Dataset`, a HuggingFace one, or any sequence of (input, label)
items.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metanudge.tasks.images import image_tensor

_INPUT_KEYS = ("image", "img", "pixel_values", "inputs", "input", "features", "x")
_LABEL_KEYS = ("label", "labels", "target", "class", "y")


def read_dataset(
    dataset: Any, *, input_key: str | int | None, label_key: str | int | None
) -> tuple[Tensor, list[Any]]:
    """All inputs, stacked, and all labels; the whole data set is read once, in order.

    See `Labelled.from_dataset` for what the items may be.
    """
    examples: list[Tensor] = []
    labels: list[Any] = []
    for i, item in enumerate(_items(dataset)):
        value = _pick(item, input_key, _INPUT_KEYS, 0, i)
        label = _pick(item, label_key, _LABEL_KEYS, 1, i)
        try:
            example = _as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The input of item {i} ({type(value).__name__}) cannot be made a tensor: {error}."
                " Items need tensors, arrays, numbers or 8-bit images; give the data set a"
                " transform."
            ) from error
        if examples and example.shape != examples[0].shape:
            raise ValueError(
                f"Item {i} has an input of shape {tuple(example.shape)}, item 0 has"
                f" {tuple(examples[0].shape)}. All inputs must have the same shape; resize or pad"
                " them in the data set's transform."
            )
        examples.append(example)
        labels.append(label.item() if isinstance(label, (Tensor, np.generic)) else label)
    if not examples:
        raise ValueError(
            "The data set is empty. Give one with at least a few examples of a few classes."
        )
    return torch.stack(examples), labels


def _items(dataset: Any) -> Iterable[Any]:
    # By index where there is a length: `Dataset.__getitem__` need not raise the IndexError that
    # ends an iteration.
    return (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else dataset


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


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    pillow = sys.modules.get("PIL.Image")  # loaded where somebody has a picture
    if pillow is not None and isinstance(value, pillow.Image):
        return image_tensor(value)
    return torch.as_tensor(np.asarray(value))
