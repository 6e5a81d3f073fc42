"""report.html: one page that needs nothing else."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING

from metanudge.page.run_page import asset, environment
from metanudge.version import __version__
from metanudge_lab.experiments.spread import CONVENTION
from metanudge_lab.report.entries import STATES, Entry, answers, sort_key, text_of
from metanudge_lab.report.figures import inline, legend
from metanudge_lab.report.numbers import beside
from metanudge_lab.report.short import in_short

if TYPE_CHECKING:
    from markupsafe import Markup

_WHOLE = re.compile(
    r"[^\s(]+ [=≥≤×±]"
    r" [^\s;,)]+|\b\d+-(?:way|shot)\b|\b(?:[A-Z]+-)+[A-Z]+\b|\d[\d.]*e-\d+|\d[\d.]* %"
)


def page(entries: list[Entry]) -> str:
    """The page as HTML."""
    from markupsafe import Markup

    templates = environment()
    templates.filters |= {"text_of": text_of, "sort_key": sort_key, "glued": glued}
    counts = {state: sum(entry.state == state for entry in entries) for state in STATES}
    return templates.from_string(_asset("page.html.j2")).render(
        entries=entries,
        answers=answers(entries),
        beside=beside(entries),
        short=in_short(entries),
        convention=CONVENTION,
        counts=[(state, text, counts[state]) for state, text in STATES.items() if counts[state]],
        ranks={state: rank for rank, state in enumerate(STATES)},
        pictures={
            entry.name: [
                (Markup(inline(drawing, entry.name)), drawing.alt, legend(drawing))
                for drawing in entry.drawings
            ]
            for entry in entries
        },
        style=Markup(asset("base.css") + _asset("page.css")),
        script=Markup(_asset("page.js")),
        version=__version__,
    )


def glued(text: str) -> Markup:
    """The text as markup in which formulas, numbers and names of methods stay on one line.

    Example:
        >>> glued("FO-MAML at λ = 0.04")
        Markup('<span class="nb">FO-MAML</span> at <span class="nb">λ = 0.04</span>')
    """
    from markupsafe import Markup, escape

    return Markup(_WHOLE.sub(r'<span class="nb">\g<0></span>', str(escape(text))))


def _asset(name: str) -> str:
    return resources.files("metanudge_lab.report").joinpath(name).read_text(encoding="utf-8")
