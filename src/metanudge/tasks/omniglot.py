"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people (Lake et al.
2015, Science 350).
"""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import torch

from metanudge.names import near
from metanudge.tasks.classification import ClassEpisodes, Pool
from metanudge.tasks.omniglot_archive import DRAWERS
from metanudge.tasks.omniglot_files import load_omniglot
from metanudge.tasks.omniglot_splits import random_split, vinyals_split


class Omniglot(ClassEpisodes):
    """Few-shot tasks from Omniglot: inputs `(n, 1, 28, 28)` in [0, 1], ink 1 on paper 0.

    The whole set is held on the device as uint8 (102 MB with rotations, 25 MB without) and episodes
    are gathered there.

    Args:
        ways, shots, queries: classes per task, support and query examples per class; a class has 20
            examples.
        seed: of the stream of tasks.
        root: folder with a local copy (`omniglot_28.npz`, or the two archives zipped or unpacked).
            None looks in $METANUDGE_DATA, then in the cache folder, then downloads 15 MB.
        split_by: "vinyals" (1028 / 172 / 423 characters, by alphabet) or "random" (1100 / 100 /
            423).
        split_seed: of the random split.
        rotations: count every character turned by 90°, 180° and 270° as a class of its own, in
            every split.
        download: allow the download.
        device, dtype: of the tensors.

    Example:
        >>> source = Omniglot(ways=5, shots=1, queries=15)           # doctest: +SKIP
        >>> source.task(0).query[0].shape                            # doctest: +SKIP
        torch.Size([75, 1, 28, 28])

    The example is not run as a test because it may have to download the data.
    """

    def __init__(
        self,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        *,
        seed: int = 0,
        root: str | os.PathLike[str] | None = None,
        split_by: Literal["vinyals", "random"] = "vinyals",
        split_seed: int = 1,
        rotations: bool = True,
        download: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if split_by not in ("vinyals", "random"):
            raise ValueError(
                f"There is no split_by={split_by!r}.{near(split_by, ['vinyals', 'random'])} Use"
                " 'vinyals' (by alphabet) or 'random'."
            )
        data = load_omniglot(root, download=download)
        turns = 4 if rotations else 1
        parts = (
            vinyals_split() if split_by == "vinyals" else random_split(data.names, seed=split_seed)
        )
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
        super().__init__(
            turned.reshape(-1, 1, *images.shape[2:]),
            {
                split: _pool([number[name] for name in names], names, turns)
                for split, names in parts.items()
            },
            ways=ways,
            shots=shots,
            queries=queries,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        self.split_by = split_by


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
