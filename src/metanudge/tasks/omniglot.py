"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people (Lake et al.
2015, Science 350).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch

from metanudge.names import near
from metanudge.tasks.classification import ClassEpisodes, Pool
from metanudge.tasks.counts import Count
from metanudge.tasks.episodes import SPLITS, About, Split, Stream
from metanudge.tasks.omniglot_files import DRAWERS, find_files, load_omniglot, verify_file

_RANDOM_SIZES = {"train": 1100, "val": 100, "test": 423}


class Omniglot(ClassEpisodes):
    """Few-shot tasks from Omniglot: inputs `(n, 1, 28, 28)` in [0, 1], ink 1 on paper 0.

    The whole set is held on the device as uint8 (102 MB with rotations, 25 MB without) and episodes
    are gathered there.

    Args:
        ways, shots, queries: classes per task, support and query examples per class; a class has 20
            examples.
        root: folder with a local copy (`omniglot_28.npz`, or the two archives zipped or unpacked).
            None looks in $METANUDGE_DATA, then in the cache folder, then downloads 15 MB.
        split_by: "vinyals" (1028 / 172 / 423 characters, by alphabet) or "random" (1100 / 100 /
            423).
        split_seed: of the random split.
        rotations: count every character turned by 90°, 180° and 270° as a class of its own, in
            every split.
        download: allow the download.
        stream: seed, device and dtype; see `Episodes`.

    Example:
        >>> source = Omniglot(ways=5, shots=1, queries=15)           # doctest: +SKIP
        >>> source.task(0).query[0].shape                            # doctest: +SKIP
        torch.Size([75, 1, 28, 28])

    The example is not run as a test because it may have to download the data.
    """

    dark_is_one = True
    about = About(
        "1,623 handwritten characters, 20 drawings each, 28×28",
        licence="MIT",
        cite="Lake, Salakhutdinov, Tenenbaum (2015), Science 350(6266)",
        made="15 MB downloaded at first use from github.com/brendenlake/omniglot",
        missing="not found; metanudge data fetch omniglot",
    )

    def __init__(
        self,
        ways: Count = 5,
        shots: Count = 1,
        queries: int = 15,
        *,
        root: str | os.PathLike[str] | None = None,
        split_by: Literal["vinyals", "random"] = "vinyals",
        split_seed: int = 1,
        rotations: bool = True,
        download: bool = True,
        **stream: Unpack[Stream],
    ) -> None:
        if split_by not in ("vinyals", "random"):
            raise ValueError(
                f"There is no split_by={split_by!r}.{near(split_by, ['vinyals', 'random'])} Use"
                " 'vinyals' (by alphabet) or 'random'."
            )
        data, turns = load_omniglot(root, download=download), 4 if rotations else 1
        random = split_by == "random"
        parts = random_split(data.names, seed=split_seed) if random else vinyals_split()
        unknown = {name for names in parts.values() for name in names} - set(data.names)
        if unknown:
            raise ValueError(
                f"This copy of Omniglot has no character {min(unknown)!r} ({len(unknown)} of the"
                " Vinyals split miss). Its folders were renamed; use the original archives, or"
                " split_by='random'."
            )
        number = {name: i for i, name in enumerate(data.names)}
        images = torch.from_numpy(data.images)  # (character, drawer, height, width)
        turned = torch.stack([torch.rot90(images, turn, (2, 3)) for turn in range(turns)], dim=1)
        examples = turned.reshape(-1, 1, *images.shape[2:])
        pools = {
            split: _pool([number[name] for name in names], names, turns)
            for split, names in parts.items()
        }
        super().__init__(examples, pools, ways=ways, shots=shots, queries=queries, **stream)
        self.split_by = split_by

    @classmethod
    def fetch(cls) -> None:
        """Find the drawings, or download them."""
        cls(rotations=False)

    @classmethod
    def files(cls) -> list[Path]:
        """Local copies, the cached archives, and what was made of them."""
        return find_files()

    @classmethod
    def verify(cls, file: Path) -> str:
        """Whether the drawings are all there, and whether they are the original ones."""
        return verify_file(file)


def _pool(characters: list[int], names: tuple[str, ...], turns: int) -> Pool:
    """The classes (character, turn) of some characters; each is `DRAWERS` consecutive rows of the
    data.
    """
    starts = (np.array(characters)[:, None] * turns + np.arange(turns)).reshape(-1) * DRAWERS
    rows = (starts[:, None] + np.arange(DRAWERS)).reshape(-1)
    labels = tuple(
        f"{name}/rot{90 * turn:03d}" if turns > 1 else name
        for name in names
        for turn in range(turns)
    )
    counts = np.full(len(starts), DRAWERS)
    return Pool(labels, rows, np.cumsum(counts) - counts, counts)


def vinyals_split() -> dict[Split, tuple[str, ...]]:
    """The split of Vinyals et al. (2016), as published with prototypical networks; by alphabet, so
    harder than random.

    Example:
        >>> {split: len(names) for split, names in vinyals_split().items()}
        {'train': 1028, 'val': 172, 'test': 423}
    """
    file = resources("metanudge.tasks") / "omniglot_vinyals.json"
    listed = json.loads(file.read_text(encoding="utf-8"))
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
