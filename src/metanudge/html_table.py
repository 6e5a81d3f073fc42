"""A small table as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    rows: Iterable[Sequence[object]], *, head: Sequence[object] = (), notes: Iterable[str] = ()
) -> str:
    """Rows of cells, the first of each to the left; everything is escaped.

    Example:
        >>> html_table([("ν", 0.1)])
        '<table><tbody><tr><th style="text-align:left">ν</th><td>0.1</td></tr></tbody></table>'
    """
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    top = f"<thead><tr>{top}</tr></thead>" if top else ""
    body = "".join(
        f'<tr><th style="text-align:left">{escape(str(first))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table>{top}<tbody>{body}</tbody></table>{below}"
