"""`metanudge data list|fetch|verify`: which data sets there are, where their files lie, and whether
those are whole.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from metanudge.cli.flags import parse
from metanudge.names import near
from metanudge.training.errors import EXIT_BAD_INPUT, UserError, refused

if TYPE_CHECKING:
    from metanudge.tasks import Episodes

ACTIONS = ("list", "fetch", "verify")

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
    options = parse(DataOptions, "data", argv, EXAMPLES)
    from metanudge.tasks import SOURCES

    names = ", ".join(SOURCES)
    if options.action == "list":
        if options.name is not None:
            raise UserError(f"data list takes no name, got {options.name!r}. It lists everything.")
        return _list(SOURCES)
    if options.action not in ACTIONS:
        raise UserError(
            f"There is no action {options.action!r}.{near(options.action, ACTIONS)} Use one of:"
            f" {', '.join(ACTIONS)}."
        )
    if options.name is None:
        if options.action == "verify":
            return _verify(SOURCES)
        raise UserError(
            f"data fetch needs a name: metanudge data fetch NAME, with NAME one of {names}."
        )
    name = options.name.lower().replace("-", "")
    if name in SOURCES:
        chosen = {name: SOURCES[name]}
        return _fetch(name, SOURCES[name]) if options.action == "fetch" else _verify(chosen)
    path = Path(options.name)
    if options.action == "verify" and (
        os.sep in options.name or path.exists() or path.suffix == ".csv"
    ):
        print(_verify_own(path, options.label))
        return 0
    raise UserError(
        f"There is no data set {options.name!r}.{near(options.name, SOURCES)} The data sets are"
        f" {names}."
    )


def _list(sources: Mapping[str, type[Episodes]]) -> int:
    from metanudge.tasks.cache import cache_folder

    for name, source in sources.items():
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


def _fetch(name: str, source: type[Episodes]) -> int:
    if not source.about.made:
        print(f"{name} has no files: every task is computed when it is drawn. Nothing to fetch.")
        return 0
    before = source.files()
    with refused(f"{name}: ", ValueError, RuntimeError, OSError):
        source.fetch()
    for file in source.files():
        there = ", was there already" if file in before else ""
        print(f"{name}: {file} ({_megabytes(file)}){there}")
    print("ready.")
    return 0


def _verify(sources: Mapping[str, type[Episodes]]) -> int:
    wrong = 0
    for name, source in sources.items():
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


def _verify_own(path: Path, label: str) -> str:
    """What a user's own folder or table holds."""
    from metanudge.tasks.read_csv import read_csv
    from metanudge.tasks.read_folder import read_folder

    if not path.exists():
        raise UserError(
            f"There is no file or folder {path}. Give a folder with one sub-folder per class, or a"
            " .csv file."
        )
    with refused("", ValueError, TypeError, OSError):
        if path.is_dir():
            folder = read_folder(path)
            shape, labels = tuple(folder.examples.shape[1:]), folder.labels
        else:
            table = read_csv(path, label=label)
            shape, labels = table.values.shape[1:], table.text[label]
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
