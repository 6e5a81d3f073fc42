"""`metanudge data list|fetch|verify`: which data sets there are, where their files lie, and whether
those are whole.
"""

from __future__ import annotations

import os
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
    from metanudge.tasks import SOURCES
    from metanudge.training.errors import UserError

    if options.action == "list":
        if options.name is not None:
            raise UserError(f"data list takes no name, got {options.name!r}. It lists everything.")
        return _list()
    if options.action == "fetch":
        if options.name is None:
            raise UserError(
                "data fetch needs a name: metanudge data fetch NAME, with NAME one of"
                f" {', '.join(SOURCES)}."
            )
        return _fetch(_known(options.name))
    if options.action == "verify":
        return _verify(options)
    actions = ("list", "fetch", "verify")
    raise UserError(
        f"There is no action {options.action!r}.{near(options.action, actions)} Use one of:"
        f" {', '.join(actions)}."
    )


def _known(name: str) -> str:
    from metanudge.names import near
    from metanudge.tasks import SOURCES
    from metanudge.training.errors import UserError

    if _plain(name) not in SOURCES:
        raise UserError(
            f"There is no data set {name!r}.{near(name, SOURCES)} The data sets are"
            f" {', '.join(SOURCES)}."
        )
    return _plain(name)


def _plain(name: str) -> str:
    return name.lower().replace("-", "")


def _list() -> int:
    from metanudge.tasks import SOURCES
    from metanudge.tasks.cache import cache_folder

    for name, source in SOURCES.items():
        about, files = source.about, source.files()
        print(f"{name}: {about.what}")
        print(f"  licence  {about.licence}")
        print(f"  cite     {about.cite}")
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
    from metanudge.tasks import SOURCES
    from metanudge.training.errors import UserError

    source = SOURCES[name]
    if not source.about.made:
        print(f"{name} has no files: every task is computed when it is drawn. Nothing to fetch.")
        return 0
    before = source.files()
    try:
        source.fetch()
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{name}: {error}") from error
    for file in source.files():
        there = ", was there already" if file in before else ""
        print(f"{name}: {file} ({_megabytes(file)}){there}")
    print("ready.")
    return 0


def _verify(options: DataOptions) -> int:
    from metanudge.tasks import SOURCES
    from metanudge.training.errors import EXIT_BAD_INPUT

    if options.name is not None and _is_path(options.name):
        print(_verify_own(Path(options.name), options.label))
        return 0
    wrong = 0
    for name in SOURCES if options.name is None else [_known(options.name)]:
        source = SOURCES[name]
        files = source.files()
        if not files:
            how = f" (metanudge data fetch {name} gets them)" if source.about.made else ""
            print(f"{name}: no files to check{how}")
        for file in files:
            try:
                print(f"OK     {file}: {source.verify(file)}")
            except ValueError as error:
                print(f"WRONG  {error}")
                wrong += 1
    if wrong:
        print(
            f"{wrong} wrong. Delete a wrong file from the cache and it is made or downloaded again;"
            " replace one of your own."
        )
    return EXIT_BAD_INPUT if wrong else 0


def _is_path(name: str) -> bool:
    from metanudge.tasks import SOURCES

    return _plain(name) not in SOURCES and (
        os.sep in name or Path(name).exists() or Path(name).suffix == ".csv"
    )


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
    fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    return (
        f"OK     {path}: {len(labels)} examples of shape {shape}, {len(counts)} classes\n      "
        f" fewest: {fewest!r} with {counts[fewest]}, most: {most!r} with {counts[most]};"
        " a class needs shots + queries of them (see metanudge train --help)"
    )


def _megabytes(path: Path) -> str:
    files = [path] if path.is_file() else path.rglob("*")
    return f"{sum(file.stat().st_size for file in files if file.is_file()) / 1e6:.1f} MB"
