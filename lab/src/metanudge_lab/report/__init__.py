"""From rows to a page: every experiment with its figure, the paper's claim, what we measured and
whether the claim held.

FOLDER/figures/NAME.png, .svg    drawn from the rows
FOLDER/report.html               one self-contained page: light and dark, phone and print
FOLDER/RESULTS.md                the same in Markdown
"""

from metanudge_lab.report.entries import Entry, gather
from metanudge_lab.report.markdown import markdown
from metanudge_lab.report.page import page
from metanudge_lab.report.write import write

__all__ = ["Entry", "gather", "markdown", "page", "write"]
