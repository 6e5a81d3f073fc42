"""README and documentation as tests see them: their blocks of code, and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if "_build" not in path.relative_to(ROOT).parts
    ),
)
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|needs): (?P<why>[^\n]+?) -->\n)?"
    r"^```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `not_run` says why none runs it, `needs` which package it wants."""

    language: str
    text: str
    not_run: str
    needs: str


@dataclass(frozen=True)
class Page:
    path: Path

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return [
            Block(
                found["language"],
                found["text"],
                found["why"] if found["mark"] == "not run" else "",
                found["why"] if found["mark"] == "needs" else "",
            )
            for found in BLOCK.finditer(self.text)
        ]

    def links(self) -> list[str]:
        """Targets of links and pictures to files of the repository."""
        prose = BLOCK.sub("", self.text)
        found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose))
        return [target for target in found if not re.match(r"\w+:", target)]


def anchors(text: str) -> set[str]:
    """What headings can be linked to as."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
