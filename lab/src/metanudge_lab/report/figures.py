"""Pictures as files, and as SVG inside the page."""

from __future__ import annotations

import functools
from pathlib import Path

from metanudge.page.svg import INK_AND_GRID, inlined, render
from metanudge_lab.experiments.base import Drawing
from metanudge_lab.experiments.store import write_bytes


def file_name(name: str, drawing: Drawing) -> str:
    """Of a picture, without its ending."""
    return f"{name}-{drawing.suffix}" if drawing.suffix else name


def save(drawing: Drawing, folder: Path, name: str) -> None:
    """Write the picture as PNG and SVG; the same rows give the same bytes."""
    stem = file_name(name, drawing)
    write_bytes(folder / f"{stem}.png", render(drawing.figure, "png", salt=stem))
    write_bytes(folder / f"{stem}.svg", _svg(drawing, stem))


def inline(drawing: Drawing, name: str) -> str:
    """The picture as SVG markup to stand in a page: its ids are its own, and it takes the page's
    ink and grid colours.
    """
    stem = file_name(name, drawing)
    return inlined(_svg(drawing, stem), stem, INK_AND_GRID)


@functools.lru_cache(maxsize=64)  # for the file and for the page
def _svg(drawing: Drawing, stem: str) -> bytes:
    return render(drawing.figure, "svg", salt=stem, transparent=True)
