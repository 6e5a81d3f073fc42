"""Figures as bytes, and as SVG inside a page, in the colours of its theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from metanudge.training.metrics import (
    AFTER,
    BASELINE,
    BEFORE,
    BY_CHANCE,
    FAINT,
    INK,
    VALIDATION,
)

INK_AND_GRID = {INK: "var(--ink)", FAINT: "var(--grid)"}
OF_A_RUN = {
    BEFORE: "var(--before)", AFTER: "var(--after)", VALIDATION: "var(--validation)",
    BASELINE: "var(--baseline)", BY_CHANCE: "var(--chance)",
}  # fmt: skip


def render(figure: Any, kind: str, *, salt: str, transparent: bool = False) -> bytes:
    """A figure as PNG or SVG; the same figure and salt give the same bytes."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(stream, format=kind, dpi=160, transparent=transparent, metadata=metadata)
    return stream.getvalue()


def inlined(svg: bytes, stem: str, colors: Mapping[str, str]) -> str:
    """An SVG file of matplotlib as markup to stand in a page: its ids are its own, and its colours
    those of the page, by what to put in their place.
    """
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # would hold for the whole page
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|\burl\(#|\bhref="#)', rf"\g<1>{stem}-", text)
    text = re.sub(
        r'(<svg[^>]*?) width="([\d.]+)pt"', r'\1 style="--drawn: \2px"', text, count=1
    )  # no smaller, or its words are unreadable
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for color, variable in colors.items():
        text = text.replace(color, variable)
    return text
