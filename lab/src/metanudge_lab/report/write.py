"""Everything that is drawn and written from a folder of results."""

from __future__ import annotations

from pathlib import Path

from metanudge_lab.experiments.store import write_text
from metanudge_lab.report import figures
from metanudge_lab.report.entries import Entry, gather
from metanudge_lab.report.markdown import markdown
from metanudge_lab.report.page import page

PAGE, MARKDOWN, FIGURES = "report.html", "RESULTS.md", "figures"


def write(folder: Path, file: Path | None = None) -> list[Entry]:
    """Draw the figures of a folder of results, and write its page and its RESULTS.md.

    Args:
        folder: with NAME.json and quick/NAME.json.
        file: where the page goes; FOLDER/report.html when left out.
    """
    entries = gather(folder)
    for entry in entries:
        for drawing in entry.drawings:
            figures.save(drawing, folder / FIGURES, entry.name)
    write_text(folder / MARKDOWN, markdown(entries))
    write_text(file if file is not None else folder / PAGE, page(entries))
    return entries
