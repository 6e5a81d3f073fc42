"""Pictures as files, and as SVG inside the page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

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


def legend(drawing: Drawing) -> list[tuple[str, str, str]]:
    """The picture's legends once more, for windows that are narrower than the picture: colour,
    kind of line and text of each entry.
    """
    from matplotlib.colors import to_hex, to_rgba_array
    from matplotlib.lines import Line2D

    legends = [axes.get_legend() for axes in drawing.figure.axes] + drawing.figure.legends
    found: dict[str, tuple[str, str, str]] = {}
    for one in filter(None, legends):
        for handle, text in zip(one.legend_handles, one.get_texts(), strict=True):
            if isinstance(handle, Line2D):
                color, solid = to_hex(handle.get_color()), handle.get_linestyle() in ("-", "None")
            else:
                faces = to_rgba_array(cast(Any, handle).get_facecolor())  # of a bar, or of markers
                color, solid = to_hex(tuple(faces[0])), True
            entry = INK_AND_GRID.get(color, color), "solid" if solid else "dashed", text.get_text()
            found.setdefault(text.get_text(), entry)
    return list(found.values())


@functools.lru_cache(maxsize=64)  # for the file and for the page
def _svg(drawing: Drawing, stem: str) -> bytes:
    return render(drawing.figure, "svg", salt=stem, transparent=True)
