"""How the documentation is built: `make docs`, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

import metanudge
from metanudge.training.config import TrainConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))
import draw
import measured

project = "metanudge"
author = "The metanudge authors"
copyright = "The metanudge authors, Apache-2.0"
version = release = metanudge.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = measured.substitutions()
myst_heading_anchors = 3

# Docstrings say `name` for code, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
smartquotes_action = "qe"  # --flags keep their dashes
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_custom_sections = [("Cost", "Cost")]
# Links to public names are checked; types of torch and of the inside are not linked.
nitpick_ignore_regex = [("py:.*", r"(?!metanudge\.[A-Z]).*")]

html_theme = "furo"
html_title = f"metanudge {release}"
html_static_path = ["_static", "_build/drawn"]
html_css_files = ["extra.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0d7a70", "color-brand-content": "#0d7a70"},
    "dark_css_variables": {"color-brand-primary": "#4fd1c5", "color-brand-content": "#4fd1c5"},
}


class Help(SphinxDirective):
    """What a command prints for `--help`: the reference cannot drift from the program."""

    required_arguments = 0
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A block of text."""
        asked = [*self.arguments, "--help"]
        done = subprocess.run(
            [sys.executable, "-m", "metanudge", *asked],
            env={**os.environ, "COLUMNS": "88", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=True,
        )
        text = done.stdout.strip()
        return [nodes.literal_block(text, text, language="text")]


def _as_it_is(self: GoogleDocstring) -> tuple[str, list[str]]:
    """Of an attribute's docstring: a first line with a colon is no `type: description`."""
    return "", self._dedent(self._consume_to_end())


def setup(app: Sphinx) -> None:
    """What is our own."""
    TrainConfig.__annotations__["data"] = "str"  # what the command line is told beside it is long
    GoogleDocstring._consume_inline_attribute = _as_it_is  # type: ignore[method-assign]
    draw.draw(Path(app.confdir) / "_build" / "drawn")
    app.add_directive("help", Help)
