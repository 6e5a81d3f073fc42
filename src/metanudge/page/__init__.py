"""Pages that need nothing else: one HTML file with its style and its pictures in it.

`metanudge page RUN` writes one of a run. What it shows is read from the run's folder, and nothing
of that is believed to be more than text, numbers and small pictures.
"""

from metanudge.page.found import Found, read_run
from metanudge.page.run_page import run_page

__all__ = ["Found", "read_run", "run_page"]
