"""`metanudge data list|fetch|verify`: which data sets there are, where their files lie, and whether
those are whole.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import tyro

EXAMPLES = """
examples:
  metanudge data list               what there is, where it lies, its licence
  metanudge data fetch omniglot     download it now instead of at first use
  metanudge data verify             check every file that is there
  metanudge data verify photos/     check your own folder or .csv: what is wrong, examples per class
"""


@dataclass(frozen=True)
class Description:
    """What a data set is and where it comes from."""

    what: str
    licence: str
    cite: str
    made: str  # how its files come into being; empty where there are none


SETS = {
    "mnist1d": Description(
        "10 classes of 40 numbers each, 12,000 examples",
        "Apache-2.0",
        "Greydanus, Kobak (2024), Scaling down deep learning with MNIST-1D, ICML",
        "generated at first use in under a second",
    ),
    "omniglot": Description(
        "1,623 handwritten characters, 20 drawings each, 28×28",
        "MIT",
        "Lake, Salakhutdinov, Tenenbaum (2015), Science 350(6266)",
        "15 MB downloaded at first use from github.com/brendenlake/omniglot",
    ),
    "sinusoid": Description(
        "regression: sine waves of random amplitude and phase",
        "–",
        "Finn, Abbeel, Levine (2017), MAML, ICML",
        "",
    ),
}


@dataclass(frozen=True)
class DataOptions:
    """List, fetch or verify data sets."""

    action: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="list|fetch|verify")]
    """list: what there is; fetch NAME: get it now; verify [NAME]: check its files (or your own
    folder or .csv).
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """mnist1d, omniglot or sinusoid; for verify also a path."""

    label: str = "label"
    """verify FILE.csv: the column that holds the class."""


def run(argv: list[str]) -> int:
    """Run the command."""
    options = tyro.cli(
        DataOptions,
        args=argv,
        prog="metanudge data",
        description=f"{cleandoc(DataOptions.__doc__ or '')}\n{EXAMPLES}",
    )
    from metanudge.names import near
    from metanudge.training.errors import UserError

    if options.action == "list":
        if options.name is not None:
            raise UserError(f"data list takes no name, got {options.name!r}. It lists everything.")
        return _list()
    if options.action == "fetch":
        if options.name is None:
            raise UserError(
                "data fetch needs a name: metanudge data fetch NAME, with NAME one of"
                f" {', '.join(SETS)}."
            )
        return _fetch(_known(options.name))
    if options.action == "verify":
        return _verify(options)
    actions = ("list", "fetch", "verify")
    raise UserError(
        f"There is no action {options.action!r}.{near(options.action, actions)} Use one of:"
        f" {', '.join(actions)}."
    )


def find_files(name: str) -> list[Path]:
    """The files or folders of a data set that are there, in the order in which they are looked
    for.
    """
    from metanudge.tasks.cache import cache_folder

    if name == "mnist1d":
        return sorted(cache_folder().glob("mnist1d-*.npz"))
    if name != "omniglot":
        return []
    data = os.environ.get("METANUDGE_DATA")
    folders = [
        *([Path(data), Path(data) / "omniglot"] if data else []),
        cache_folder() / "omniglot",
    ]
    names = (
        "omniglot_28.npz",
        "images_background.zip",
        "images_evaluation.zip",
        "images_background",
        "images_evaluation",
    )
    found = [folder / name for folder in folders for name in names if (folder / name).exists()]
    return found + sorted((cache_folder() / "omniglot").glob("omniglot_28-*.npz"))


def _known(name: str) -> str:
    from metanudge.names import near
    from metanudge.training.errors import UserError

    if name.lower().replace("-", "") not in SETS:
        raise UserError(
            f"There is no data set {name!r}.{near(name, SETS)} The data sets are {', '.join(SETS)}."
        )
    return name.lower().replace("-", "")


def _list() -> int:
    from metanudge.tasks.cache import cache_folder

    for name, about in SETS.items():
        print(f"{name}: {about.what}")
        print(f"  licence  {about.licence}")
        print(f"  cite     {about.cite}")
        files = find_files(name)
        if not about.made:
            print("  files    none: every task is computed when it is drawn")
        elif not files:
            print(f"  files    none yet: {about.made}")
        for number, file in enumerate(files):
            print(f"  {'files' if number == 0 else '':<8} {file} ({_megabytes(file)})")
    print(
        "your own: a folder with one sub-folder per class, or a .csv with a label column: metanudge"
        " train PATH"
    )
    print(
        f"cache: {cache_folder()} (METANUDGE_CACHE changes it); METANUDGE_DATA names a folder with"
        " your own copies"
    )
    return 0


def _fetch(name: str) -> int:
    from metanudge.training.errors import UserError

    if not SETS[name].made:
        print(f"{name} has no files: every task is computed when it is drawn. Nothing to fetch.")
        return 0
    from metanudge.tasks import MNIST1D, Omniglot

    before = find_files(name)
    make: Callable[[], object] = MNIST1D if name == "mnist1d" else lambda: Omniglot(rotations=False)
    try:
        make()
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{name}: {error}") from error
    for file in find_files(name):
        print(
            f"{name}: {file} ({_megabytes(file)}){', was there already' if file in before else ''}"
        )
    print("ready.")
    return 0


def _verify(options: DataOptions) -> int:
    from metanudge.training.errors import EXIT_BAD_INPUT

    if options.name is not None and _is_path(options.name):
        print(_verify_own(Path(options.name), options.label))
        return 0
    names = list(SETS) if options.name is None else [_known(options.name)]
    wrong = 0
    for name in names:
        files = find_files(name)
        if not files:
            print(
                f"{name}: no files to check"
                + (f" (metanudge data fetch {name} gets them)" if SETS[name].made else "")
            )
        for file in files:
            try:
                verdict = f"OK     {file}: {_verify_file(name, file)}"
            except ValueError as error:
                verdict, wrong = f"WRONG  {error}", wrong + 1
            print(verdict)
    if wrong:
        print(
            f"{wrong} wrong. Delete a wrong file from the cache and it is made or downloaded again;"
            " replace one of your own."
        )
    return EXIT_BAD_INPUT if wrong else 0


def _is_path(name: str) -> bool:
    return name.lower().replace("-", "") not in SETS and (
        os.sep in name or Path(name).exists() or Path(name).suffix == ".csv"
    )


def _verify_file(name: str, file: Path) -> str:
    """What is in a file that is as it should be; `ValueError` names the file and what is wrong with
    it.
    """
    if name == "mnist1d":
        return _verify_mnist1d(file)
    if file.suffix == ".npz":
        return _verify_omniglot_arrays(file)
    return _verify_omniglot_part(file)


def _verify_mnist1d(file: Path) -> str:
    import numpy as np

    from metanudge.tasks.cache import load_arrays
    from metanudge.tasks.mnist1d_recipe import LENGTH, generate

    match = re.fullmatch(r"mnist1d-(\d+)-seed(\d+)-v1\.npz", file.name)
    if match is None:
        raise ValueError(
            f"{file}: its name is not mnist1d-EXAMPLES-seedSEED-v1.npz, so nothing reads it."
            " Delete it."
        )
    x, y = (None, LENGTH), (None,)
    arrays = load_arrays(file, {"x_train": x, "y_train": y, "x_test": x, "y_test": y})
    if arrays is None:
        raise ValueError(f"{file} is damaged or misses an array. Delete it; it is generated again.")
    fresh = generate(int(match[1]), seed=int(match[2]))._asdict()
    for key, expected in fresh.items():
        if arrays[key].shape != expected.shape:
            raise ValueError(
                f"{file}: {key} has shape {arrays[key].shape}, expected {expected.shape}. Delete"
                " it; it is generated again."
            )
        difference = float(np.abs(arrays[key] - expected).max())
        if not difference <= 1e-12:
            raise ValueError(
                f"{file}: {key} differs from what the recipe gives, by up to {difference:.2g}."
                " Delete it; it is generated again."
            )
    return f"{len(fresh['y_train'])} + {len(fresh['y_test'])} examples, equal to the recipe"


def _verify_omniglot_arrays(file: Path) -> str:
    import numpy as np

    from metanudge.tasks.omniglot_files import load_omniglot

    arrays = load_omniglot(file)
    if len(set(arrays.names)) != len(arrays.names):
        raise ValueError(f"{file} names a character twice. Replace it.")
    blank = np.argwhere(~arrays.images.any(axis=(2, 3)))
    if len(blank):
        character, drawer = blank[0]
        raise ValueError(
            f"{file}: drawing {drawer + 1} of {arrays.names[character]} is blank ({len(blank)}"
            " such). Replace it."
        )
    return (
        f"{len(arrays.names)} characters × {arrays.images.shape[1]} drawings, sha256"
        f" {_digest(file)[:16]}…"
    )


def _verify_omniglot_part(path: Path) -> str:
    from metanudge.tasks.cache import cache_folder
    from metanudge.tasks.omniglot_archive import DRAWERS, read_part
    from metanudge.tasks.omniglot_files import _SHA256, CHARACTERS

    part = path.name.removesuffix(".zip")
    note = ""
    if path.is_file():
        expected, found = _SHA256[part], _digest(path)
        if expected == found:
            note = ", the original archive"
        elif path.parent == cache_folder() / "omniglot":
            raise ValueError(
                f"{path} has the wrong checksum: sha256 {found}, expected {expected}. Delete it; it"
                " is downloaded again."
            )
        else:
            note = (
                f", not the original archive (sha256 {found[:8]}… instead of {expected[:8]}…) but"
                " complete and readable"
            )
    arrays = read_part(path, CHARACTERS[part])
    return f"{len(arrays.names)} characters × {DRAWERS} drawings{note}"


def _verify_own(path: Path, label: str) -> str:
    """What a user's own folder or table holds."""
    from collections import Counter

    from metanudge.tasks.read_csv import read_csv
    from metanudge.tasks.read_folder import read_folder
    from metanudge.training.errors import UserError

    if not path.exists():
        raise UserError(
            f"There is no file or folder {path}. Give a folder with one sub-folder per class, or a"
            " .csv file."
        )
    try:
        if path.is_dir():
            folder = read_folder(path)
            shape, labels = tuple(folder.examples.shape[1:]), folder.labels
        else:
            table = read_csv(path, label=label)
            shape, labels = table.values.shape[1:], table.labels
    except (ValueError, TypeError, OSError) as error:
        raise UserError(str(error)) from error
    counts = Counter(labels)
    smallest, largest = (
        min(counts, key=lambda name: counts[name]),
        max(counts, key=lambda name: counts[name]),
    )
    return (
        f"OK     {path}: {len(labels)} examples of shape {shape}, {len(counts)} classes\n      "
        f" fewest: {smallest!r} with {counts[smallest]}, most: {largest!r} with {counts[largest]};"
        " a class needs shots + queries of them (see metanudge train --help)"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _megabytes(path: Path) -> str:
    def sizes() -> Iterator[int]:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                yield file.stat().st_size

    return f"{sum(sizes()) / 1e6:.1f} MB"
