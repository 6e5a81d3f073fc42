"""RESULTS.md: the report for readers of the repository."""

from __future__ import annotations

from metanudge_lab.experiments.base import ResultTable
from metanudge_lab.experiments.spread import CONVENTION
from metanudge_lab.report.entries import Entry, answers, text_of
from metanudge_lab.report.figures import file_name
from metanudge_lab.report.numbers import beside


def markdown(entries: list[Entry]) -> str:
    """The whole text, generated from the rows."""
    head = [
        "# Results",
        "",
        (
            "The paper's figures and tables, measured anew. `metanudge report` writes this page"
            " from the rows beside it; do not edit it."
        ),
        "",
        CONVENTION,
        "",
        "| experiment | in the paper | verdict | measured |",
        "|---|---|---|---|",
    ]
    summary = [
        f"| [{entry.name}](#{entry.name}) | {_cell(entry.experiment.where)} | {_status(entry)} |"
        f" {_cell(entry.gist) or '–'} |"
        for entry in entries
    ]
    return (
        "\n".join(
            [
                *head,
                *summary,
                *_claims(entries),
                *(line for entry in entries for line in _section(entry)),
            ]
        )
        + "\n"
    )


def _claims(entries: list[Entry]) -> list[str]:
    lines = [
        "",
        "## Claims",
        "",
        "Every numbered claim of the paper, and those of its text with numbers in them.",
        "",
        "| in the paper | claim | answered by | it | remark |",
        "|---|---|---|---|---|",
    ]
    for answer in answers(entries):
        links = ", ".join(f"[{name}](#{name})" for name in answer.claim.experiments)
        cells = (answer.claim.where, answer.claim.says, links, answer.status, answer.claim.because)
        lines.append(f"| {' | '.join(_cell(cell) or '–' for cell in cells)} |")
    return [
        *lines,
        "",
        "## Numbers",
        "",
        "Those that the paper gives.",
        "",
        *_table(beside(entries)),
    ]


def _section(entry: Entry) -> list[str]:
    lines = [
        "",
        f"## {entry.name}",
        "",
        f"**{entry.experiment.title}** ({entry.experiment.where})",
        "",
        f"*{entry.whose}:* {entry.experiment.claim}",
        "",
    ]
    if entry.result is None:
        return [*lines, f"Not run yet: `{entry.command}`."]
    lines += [
        f"*Ours:* {entry.measured}",
        "",
        f"*Verdict:* **{_status(entry)}**. {entry.reason}",
        "",
    ]
    if entry.aside:
        lines += [entry.aside, ""]
    for drawing in entry.drawings:
        lines += [f"![{_cell(drawing.alt)}](figures/{file_name(entry.name, drawing)}.png)", ""]
    if entry.table is not None:
        lines += [*_table(entry.table), ""]
        if entry.table.details is not None:
            lines += ["Every run:", "", *_table(entry.table.details), ""]
    if entry.experiment.notes:
        lines += [entry.experiment.notes, ""]
    if entry.not_run:
        lines += [f"Not run: {'; '.join(entry.not_run)}.", ""]
    facts = [*entry.settings, *entry.facts]
    lines.append("Settings: " + "; ".join(f"{key} {value}" for key, value in facts) + ".")
    lines += [
        "",
        *(
            f"Measured on: {'; '.join(value for _, value in machine)}."
            for machine in entry.machines
        ),
    ]
    return lines


def _table(table: ResultTable) -> list[str]:
    rows = [" | ".join(_cell(text_of(value)) for value in row) for row in table.rows]
    return [
        f"| {' | '.join(map(_cell, table.header))} |",
        "|" + "---|" * len(table.header),
        *(f"| {row} |" for row in rows),
    ]


def _status(entry: Entry) -> str:
    quick = " (quick)" if entry.result is not None and entry.result.mode == "quick" else ""
    return entry.status + quick


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
