"""How Omniglot's 1,623 characters are divided into meta-train, meta-validation and meta-test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from metanudge.tasks.episodes import SPLITS, Split

_RANDOM_SIZES = {"train": 1100, "val": 100, "test": 423}


def vinyals_split() -> dict[Split, tuple[str, ...]]:
    """The split of Vinyals et al. (2016), as published with prototypical networks; by alphabet, so
    harder than random.

    Example:
        >>> {split: len(names) for split, names in vinyals_split().items()}
        {'train': 1028, 'val': 172, 'test': 423}
    """
    listed = json.loads(
        (files("metanudge.tasks") / "omniglot_vinyals.json").read_text(encoding="utf-8")
    )
    return {
        split: tuple(
            f"{alphabet}/character{number:02d}"
            for alphabet, (first, last) in listed[split].items()
            for number in range(first, last + 1)
        )
        for split in SPLITS
    }


def random_split(names: Sequence[str], *, seed: int) -> dict[Split, tuple[str, ...]]:
    """A random split in the manner of the MAML paper: 1,100 / 100 / 423 characters, whatever their
    alphabets.

    The MAML paper's own split followed the order of its authors' file system and is not published;
    this one shuffles the sorted names with `numpy.random.RandomState(seed)`.
    """
    ordered = sorted(names)
    shuffled = np.random.RandomState(seed).permutation(len(ordered))
    ends = np.cumsum(list(_RANDOM_SIZES.values()))
    parts = np.split(shuffled, ends[:-1])
    return {
        split: tuple(ordered[i] for i in sorted(part))
        for split, part in zip(SPLITS, parts, strict=True)
    }
