"""The documentation as built: every link inside it leads somewhere, and no page is wider than a
phone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import chromium

ROOT = Path(__file__).parents[1]
PROGRAM = chromium.find()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason="needs the tools of the documentation: make docs")
    out = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-n", "-b", "html", "-d", str(out / "trees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "docs", str(out / "html")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


class Parts(HTMLParser):
    """What a page points to, and what can be pointed to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value and not re.match(r"\w+:|//", value):
                self.targets.append(value)


def broken(site: Path) -> list[str]:
    pages = {page.resolve(): Parts(page) for page in site.rglob("*.html")}
    found = []
    for page, parts in pages.items():
        if "_modules" in page.relative_to(site.resolve()).parts:
            continue  # sources; Sphinx knows one name a module for the ways back from them
        for target in parts.targets:
            path, _, place = target.partition("#")
            file = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            known = pages[file].places if file in pages else set()
            if not file.is_file() or (place and file in pages and unquote(place) not in known):
                found.append(f"{page.relative_to(site.resolve())}: {target}")
    return found


def test_every_link_inside_leads_somewhere(site: Path) -> None:
    assert not broken(site)


def test_a_broken_link_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"></p><a href="#here"></a><a href="b.html#no">')
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><img src="none.png">')
    assert sorted(broken(tmp_path)) == ["a.html: b.html#no", "b.html: none.png"]


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; CHROMIUM may name one")
def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    assert PROGRAM is not None
    pages = [page for page in site.rglob("*.html") if "_modules" not in page.parts]
    assert len(pages) > 30
    wide = {}
    with chromium.browser(PROGRAM) as tab:
        tab.size(400, 800)
        for page in pages:
            tab.open(page.as_uri())
            # what lies in a box of its own that scrolls does not count
            width = tab.run("document.documentElement.scrollWidth")
            if width > 400:
                wide[page.relative_to(site).as_posix()] = width
    assert not wide
