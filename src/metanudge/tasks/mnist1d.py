"""MNIST-1D: 40 numbers per example, ten classes; a data set small enough to meta-train on in a
minute.

Greydanus and Kobak (2024), *Scaling down deep learning with MNIST-1D*. Generated on first use,
never downloaded.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from metanudge.tasks.cache import cache_folder, load_arrays, save_arrays
from metanudge.tasks.classification import ClassEpisodes, Pool
from metanudge.tasks.counts import Count
from metanudge.tasks.episodes import SPLITS, About, Stream
from metanudge.tasks.mnist1d_recipe import LENGTH, NUM_CLASSES, MNIST1DArrays, generate

_NAMES = tuple(str(digit) for digit in range(NUM_CLASSES))


class MNIST1D(ClassEpisodes):
    """Few-shot tasks from MNIST-1D: inputs `(n, 40)`, the digits 0…9 as classes.

    All ten classes occur in every split, as in the paper's experiment; what differs is the
    *examples*. The first 80 % of the data set are its train part and the rest is its test part, as
    published; the last fifth of the train part is the validation split. With 12,000 examples: 7,680
    train, 1,920 val, 2,400 test.

    Args:
        ways, shots, queries: classes per task, support and query examples per class.
        num_samples: examples in all, a multiple of 10. The paper has 12,000; the published set has
            5,000.
        data_seed: of the data themselves; 42 is the published one.
        cache: keep the generated data in the cache folder. Making 12,000 examples takes about 0.3
            s.
        stream: seed, device and dtype; see `Episodes`.

    Example:
        >>> source = MNIST1D(ways=3, shots=5, queries=10, num_samples=2000, cache=False)
        >>> task = source.task(0)
        >>> task.support[0].shape, task.query[1].unique().tolist()
        (torch.Size([15, 40]), [0, 1, 2])
    """

    about = About(
        "10 classes of 40 numbers each, 12,000 examples",
        licence="Apache-2.0",
        cite="Greydanus, Kobak (2024), Scaling down deep learning with MNIST-1D, ICML",
        made="generated at first use in under a second",
        missing="not cached; generated at first use",
    )

    def __init__(
        self,
        ways: Count = 3,
        shots: Count = 5,
        queries: int = 10,
        *,
        num_samples: int = 12000,
        data_seed: int = 42,
        cache: bool = True,
        **stream: Unpack[Stream],
    ) -> None:
        data = _load(num_samples, data_seed) if cache else generate(num_samples, seed=data_seed)
        examples = torch.from_numpy(np.concatenate([data.x_train, data.x_test]))
        labels = np.concatenate([data.y_train, data.y_test])
        first_test = len(data.y_train)
        first_val = first_test - first_test // 5
        parts = pairwise([0, first_val, first_test, len(labels)])
        pools = {
            split: Pool.of(labels[first:end], names=_NAMES, rows=np.arange(first, end))
            for split, (first, end) in zip(SPLITS, parts, strict=True)
        }
        super().__init__(examples, pools, ways=ways, shots=shots, queries=queries, **stream)

    @classmethod
    def fetch(cls) -> None:
        """Generate the usual data set."""
        cls()

    @classmethod
    def files(cls) -> list[Path]:
        """The data sets in the cache folder."""
        return sorted(cache_folder().glob("mnist1d-*.npz"))

    @classmethod
    def verify(cls, file: Path) -> str:
        """Compare a cached data set with what the recipe gives."""
        match = re.fullmatch(r"mnist1d-(\d+)-seed(\d+)-v1\.npz", file.name)
        if match is None:
            raise ValueError(
                f"{file}: its name is not mnist1d-EXAMPLES-seedSEED-v1.npz, so nothing reads it."
                " Delete it."
            )
        found, again = _read(file), "Delete it; it is generated again."
        if found is None:
            raise ValueError(f"{file} is damaged or misses an array. {again}")
        fresh = generate(int(match[1]), seed=int(match[2]))
        for key, expected in fresh._asdict().items():
            if found[key].shape != expected.shape:
                raise ValueError(
                    f"{file}: {key} has shape {found[key].shape}, expected {expected.shape}."
                    f" {again}"
                )
            difference = float(np.abs(found[key] - expected).max())
            if not difference <= 1e-12:
                raise ValueError(
                    f"{file}: {key} differs from what the recipe gives, by up to"
                    f" {difference:.2g}. {again}"
                )
        return f"{len(fresh.y_train)} + {len(fresh.y_test)} examples, equal to the recipe"


def _load(num_samples: int, seed: int) -> MNIST1DArrays:
    path = cache_folder() / f"mnist1d-{num_samples}-seed{seed}-v1.npz"
    found = _read(path)
    if found is not None and len(found["y_train"]) + len(found["y_test"]) == num_samples:
        return MNIST1DArrays(**found)
    data = generate(num_samples, seed=seed)
    save_arrays(path, data._asdict())
    return data


def _read(path: Path) -> dict[str, NDArray[Any]] | None:
    x, y = (None, LENGTH), (None,)
    return load_arrays(path, {"x_train": x, "y_train": y, "x_test": x, "y_test": y})
