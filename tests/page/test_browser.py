"""The page of a run in a real browser: nothing runs or asks, nothing leaves the window, and all of
it can be read, on a phone and on a desk, in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
from metanudge.page import read_run, run_page
from pages import CLASSES, evil_run, text_run

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here; install one, or name it with CHROMIUM"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Page]:
    assert PROGRAM is not None
    with chromium.browser(PROGRAM) as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of pages."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {"pictures": evil_run(folder), "texts": text_run(folder)[0]}
    runs["0.1"] = Path(__file__).parents[1] / "data" / "run-0.1" / "mnist1d"
    for name, run in runs.items():
        (folder / f"{name}.html").write_text(run_page(read_run(run)), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in runs}


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["pictures", "texts", "0.1"])
def test_it_fits_and_can_be_read(
    tab: chromium.Page, pages: dict[str, str], name: str, width: int, dark: bool
) -> None:
    tab.size(width, 900, dark=dark)
    tab.open(pages[name])
    assert tab.complaints == []
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.beyond() == []
    assert tab.faint() == []
    figures = "[...document.querySelectorAll('figure svg')].map(one => one.getBoundingClientRect())"
    boxes = tab.run(f"{figures}.map(box => [box.width, box.height])")
    assert len(boxes) == (1 if name == "0.1" else 2)
    assert all(wide > 300 and high > 180 for wide, high in boxes)
    assert tab.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 28)" if dark else "rgb(252, 252, 250)"
    )


def test_no_name_becomes_an_element(tab: chromium.Page, pages: dict[str, str]) -> None:
    tab.open(pages["pictures"])
    assert tab.complaints == []
    assert tab.run("document.title").startswith("<script>alert(4)<")
    assert tab.run("document.scripts.length") == 0
    assert tab.run("[...document.querySelectorAll('*')].filter(one => [...one.attributes].some("
                   "a => a.name.startsWith('on'))).length") == 0  # fmt: skip
    names = tab.run("[...document.querySelectorAll('table.names bdi')].map(one => one.textContent)")
    assert set(CLASSES) <= set(names)
    sizes = tab.run("[...document.images].map(one => one.naturalWidth)")
    assert sizes
    assert set(sizes) == {8}, "all pictures are there, and no others"


def test_what_is_faint_or_beyond_would_be_seen(tab: chromium.Page, tmp_path: Path) -> None:
    style = "color: #999; background: #fff; white-space: nowrap; width: 150vw"
    head = "<meta name=viewport content='width=device-width, initial-scale=1'>"
    (tmp_path / "bad.html").write_text(f"{head}<p style='{style}'>hard to read</p><p>well</p>")
    tab.size(400, 800)
    tab.open((tmp_path / "bad.html").as_uri())
    assert tab.faint() == ["2.8: hard to read"]
    assert len(tab.beyond()) == 1
