"""Pictures as files, and as SVG inside the page."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path

from metanudge_lab.experiments.base import Drawing
from metanudge_lab.experiments.store import write_bytes
from metanudge_lab.style import FAINT, INK

_THEMED = {INK: "var(--ink)", FAINT: "var(--grid)"}


def file_name(name: str, drawing: Drawing) -> str:
    """Of a picture, without its ending."""
    return f"{name}-{drawing.suffix}" if drawing.suffix else name


def save(drawing: Drawing, folder: Path, name: str) -> None:
    """Write the picture as PNG and SVG; the same rows give the same bytes."""
    stem = file_name(name, drawing)
    write_bytes(folder / f"{stem}.png", _render(drawing, "png", salt=stem))
    write_bytes(folder / f"{stem}.svg", _svg(drawing, stem))


def inline(drawing: Drawing, name: str) -> str:
    """The picture as SVG markup to stand in a page: its ids are its own, and it takes the page's
    ink and grid colours.
    """
    stem = file_name(name, drawing)
    text = _svg(drawing, stem).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # would hold for the whole page
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|\burl\(#|\bhref="#)', rf"\g<1>{stem}-", text)
    text = re.sub(
        r'(<svg[^>]*?) width="([\d.]+)pt"', r'\1 style="--drawn: \2px"', text, count=1
    )  # no smaller, or its words are unreadable
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for color, variable in _THEMED.items():
        text = text.replace(color, variable)
    return text


@functools.lru_cache(maxsize=64)  # for the file and for the page
def _svg(drawing: Drawing, stem: str) -> bytes:
    return _render(drawing, "svg", salt=stem, transparent=True)


def _render(drawing: Drawing, kind: str, *, salt: str, transparent: bool = False) -> bytes:
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        drawing.figure.savefig(
            stream, format=kind, dpi=160, transparent=transparent, metadata=metadata
        )
    return stream.getvalue()
