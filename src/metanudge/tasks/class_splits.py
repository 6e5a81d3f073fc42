"""Dividing classes among meta-train, meta-validation and meta-test: by fractions and a seed, or by
lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from metanudge.names import near
from metanudge.tasks.draws import choose, episode_keys, root_key
from metanudge.tasks.episodes import SPLITS, Split, check_split

Splits = Sequence[float] | Mapping[Split, Sequence[object]]
FRACTIONS = (0.64, 0.16, 0.2)
"""Of the classes, for train, val and test, where nothing else is said."""

_STREAM = len(SPLITS)  # a random stream of its own, next to those of the three splits


def split_classes(
    names: Sequence[str], splits: Splits, *, seed: int, what: tuple[str, str] = ("class", "classes")
) -> dict[Split, list[int]]:
    """Which classes, as places in `names`, belong to each split.

    Args:
        names: all class names; the result depends on their order, so sort them.
        splits: three fractions for train, val and test that add up to 1, or split → class names.
            Classes that no list names are left out.
        seed: of the shuffle before the fractions are cut; lists ignore it.
        what: one and several of what is divided, for messages.

    Example:
        >>> {split: len(places) for split,
        ...     places in split_classes("abcdefghij", (0.6, 0.2, 0.2), seed=0).items()}
        {'train': 6, 'val': 2, 'test': 2}
        >>> split_classes(["cat", "dog", "owl"], {"train": ["owl", "cat"]}, seed=0)
        {'train': [0, 2], 'val': [], 'test': []}
    """
    if isinstance(splits, Mapping):
        return _by_lists(names, splits, *what)
    return _by_fractions(len(names), tuple(splits), seed, what[1])


def _by_fractions(
    count: int, fractions: tuple[float, ...], seed: int, many: str
) -> dict[Split, list[int]]:
    if len(fractions) != len(SPLITS) or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9:
        raise ValueError(
            f"splits={fractions} do not divide the {many}. Give three fractions for train, val and"
            " test that add up to 1, such as (0.64, 0.16, 0.2), or lists of them: {'train':"
            " [...], 'val': [...], 'test': [...]}."
        )
    key = episode_keys(root_key(seed, _STREAM), np.array([0]))
    order = choose(key, np.array([count]), count, limit=count)[0]
    ends = np.rint(np.cumsum(fractions) * count).astype(np.int64)
    parts = np.split(order, ends[:-1])
    return {split: sorted(part.tolist()) for split, part in zip(SPLITS, parts, strict=True)}


def _by_lists(
    names: Sequence[str], splits: Mapping[Split, Sequence[object]], one: str, many: str
) -> dict[Split, list[int]]:
    place = {name: i for i, name in enumerate(names)}
    taken: dict[str, str] = {}
    result: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for split, wanted in splits.items():
        check_split(split)
        for name in map(str, wanted):
            if name not in place:
                raise ValueError(
                    f"Split {split!r} lists the {one} {name!r}, which the data do not"
                    f" have.{near(name, names)} There are {len(names)} {many}:"
                    f" {', '.join(names[:10])}{', …' if len(names) > 10 else ''}."
                )
            if name in taken:
                raise ValueError(
                    f"{one.capitalize()} {name!r} is listed in split {taken[name]!r} and again in"
                    f" {split!r}. Splits must not share {many}; list each once."
                )
            taken[name] = split
            result[split].append(place[name])
    return {split: sorted(places) for split, places in result.items()}
