"""The page of a run."""

from __future__ import annotations

import base64
import binascii
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from metanudge.names import shown
from metanudge.page.found import Found
from metanudge.page.svg import INK_AND_GRID, OF_A_RUN, inlined, render
from metanudge.page.words import Numbers, all_settings, lead, machine, settings
from metanudge.training.evaluation import steps_figure
from metanudge.training.metrics import BASELINE, BY_CHANCE, learning_curve, parted, quantity_of
from metanudge.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_SIZE = (4.9, 3.3)  # inches of a figure, whose legend stands below it
_PNG = b"\x89PNG\r\n\x1a\n"
_UNFOLDED = 12  # rows of a table
_LINES = {":": "dotted", "-": "solid", "--": "dashed"}


@dataclass(frozen=True)
class Figure:
    """A figure as markup, and its legend: (colour, kind of line, text)."""

    svg: Markup
    legend: list[tuple[str, str, str]]
    alt: str


def run_page(found: Found) -> str:
    """The page as HTML."""
    from markupsafe import Markup

    test = None if found.summary is None else found.summary["test"]
    beside = (found.summary or {}).get("baselines")
    numbers = None if test is None else Numbers.of(test)
    evaluation = found.evaluation
    curve = None
    if found.rows:
        figure = learning_curve(found.rows, test=test, beside=beside, size=_SIZE)
        what = f"query {quantity_of(found.rows)}"
        curve = _figure(figure, "curve", f"{what} over {found.steps} meta-steps")
    return environment().from_string(asset("run.html.j2")).render(
        found=found,
        config=found.config,
        name=found.folder.resolve().name,
        folder=shlex.quote(str(found.folder)),
        lead=lead(found.config),
        test=test,
        numbers=numbers,
        bars=[] if test is None or numbers is None else numbers.bars(test, beside),
        verdict=("", "") if numbers is None else numbers.verdict(beside),
        curve=curve,
        parted=parted(found.rows, quantity_of(found.rows)),
        evaluated=None if evaluation is None else _evaluated(evaluation),
        settings=settings(found),
        all_settings=all_settings(found.config),
        machine=[] if found.summary is None else machine(found.summary),
        style=Markup(asset("base.css") + asset("run.css")),
        unfolded=_UNFOLDED,
        version=__version__,
    )  # fmt: skip


def environment() -> Environment:
    """Templates in which everything is escaped, and a misspelled name is an error."""
    from jinja2 import Environment, StrictUndefined

    made = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters["shown"] = shown
    return made


def asset(name: str) -> str:
    """A file of this folder."""
    return resources.files("metanudge.page").joinpath(name).read_text(encoding="utf-8")


def _evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of an evaluation."""
    rows, own = evaluation["rows"], evaluation["steps"]
    main = next((row for row in rows if row["steps"] == own), rows[0] if rows else {})
    numbers, split = Numbers.of(main), evaluation["split"]
    figure = steps_figure(evaluation, size=_SIZE) if rows else None
    alt = f"query {numbers.quantity} against adaptation steps on {split} tasks"
    examples: dict[str, list[dict[str, Any]]] = {}
    for one in evaluation["shown"]:
        pair = [_example(one["example"]), _example(one["like"])]
        if all(pair):
            examples.setdefault(one["class"], []).append({**one, "pair": pair})
    return {
        "numbers": numbers,
        "main": main,
        "rows": rows,
        "protocols": any(row["batch_norm"] for row in rows),
        "figure": None if figure is None else _figure(figure, "steps", alt),
        "bars": numbers.bars(main, evaluation["baselines"]) if main else [],
        "classes": evaluation["classes"],
        "examples": examples,
        "has_texts": any("text" in one["example"] for one in evaluation["shown"]),
    }


def _example(found: Mapping[str, str]) -> dict[str, str]:
    """A picture or a text; nothing where it is neither."""
    if "text" in found:
        return {"text": shown(found["text"])}
    try:
        data = base64.b64decode(found.get("png", ""), validate=True)
    except (binascii.Error, ValueError):
        return {}
    encoded = base64.b64encode(data).decode("ascii")
    return {"png": f"data:image/png;base64,{encoded}"} if data.startswith(_PNG) else {}


def _figure(figure: Any, stem: str, alt: str) -> Figure:
    from markupsafe import Markup

    colors = {**INK_AND_GRID, **OF_A_RUN}
    svg = inlined(render(figure, "svg", salt=stem, transparent=True), stem, colors)
    legend = []
    for handle, text in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        # an errorbar's handle is a container of lines
        line = handle if hasattr(handle, "get_linestyle") else handle[0]
        color = line.get_color()
        kind = "dotted" if color in (BASELINE, BY_CHANCE) else _LINES[line.get_linestyle()]
        legend.append((colors[color], kind, text))
    return Figure(Markup(svg), legend, alt)
