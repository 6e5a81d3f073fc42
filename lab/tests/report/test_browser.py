"""The page in a real browser: everything is there, nothing is complained about, tables sort, and it
fits a phone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import chromium
from metanudge_lab import report
from metanudge_lab.experiments import NAMES
from metanudge_lab.experiments.run import Options, run
from metanudge_lab.report import entries as gathering
from toy_experiment import toy

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here; install one, or name it with CHROMIUM"
)

LONG = "A long sentence about what was found, with a number such as 3.141592653589793 in it. " * 4
TOYS = {
    "toy": toy(claim=LONG),
    "joy": toy(name="joy"),
    "a-much-longer-name": toy(
        name="a-much-longer-name", where="Appendix, Table 12", config=type(toy().config())
    ),
}
ROWS = Path(__file__).parents[3] / "results" / "quick"
ORDER = "[...document.querySelectorAll('#summary tbody th')].map(cell => cell.textContent)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "available", lambda: tuple(TOYS))
        patch.setattr(gathering, "load", TOYS.__getitem__)
        run(TOYS["toy"], Options(mode="quick", folder=folder, device="cpu"))
        run(TOYS["a-much-longer-name"], Options(mode="full", folder=folder, device="cpu"))
        report.write(folder)
    assert PROGRAM is not None
    with chromium.browser(PROGRAM) as tab:
        tab.url = (folder / "report.html").as_uri()
        yield tab


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_opens_without_complaint_and_fits(page: chromium.Page, width: int, dark: bool) -> None:
    page.size(width, 800, dark=dark)
    page.open(page.url)
    assert page.complaints == []
    assert page.run("document.documentElement.scrollWidth") <= width, (
        "the page itself never scrolls sideways"
    )
    assert page.beyond() == []
    assert page.faint() == []
    pictures = (
        "[...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect())"
    )
    boxes = page.run(f"{pictures}.map(box => [box.width, box.height])")
    assert len(boxes) == 4
    assert all(wide > 300 and high > 150 for wide, high in boxes)
    labels = page.run(
        "[...document.querySelectorAll('figure [role=img]')].map(one =>"
        " one.getAttribute('aria-label'))"
    )
    assert all(labels)
    assert page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 28)" if dark else "rgb(252, 252, 250)"
    )


def test_a_click_sorts_and_another_turns_the_order_round(page: chromium.Page) -> None:
    page.size(1280, 800)
    page.open(page.url)
    assert page.run(ORDER) == ["toy", "joy", "a-much-longer-name"]
    verdict = "document.querySelector('#summary thead th:nth-child(3)')"
    page.run(f"{verdict}.querySelector('button').click()")
    assert page.run(ORDER) == ["toy", "a-much-longer-name", "joy"], "reproduced before not run yet"
    assert page.run(f"{verdict}.getAttribute('aria-sort')") == "ascending"
    page.run(f"{verdict}.querySelector('button').click()")
    assert page.run(ORDER)[0] == "joy"
    assert page.run(f"{verdict}.getAttribute('aria-sort')") == "descending"
    page.run("document.querySelector('#summary thead th:nth-child(2) button').click()")
    assert page.run(ORDER)[0] == "a-much-longer-name", "Appendix before Table"
    assert page.run(f"{verdict}.getAttribute('aria-sort')") is None, "one heading at a time"


def test_numbers_sort_as_numbers(page: chromium.Page) -> None:
    page.open(page.url)
    table = "document.querySelector('#toy table.numbers')"
    page.run(f"{table}.querySelector('th:nth-child(2) button').click()")
    page.run(f"{table}.querySelector('th:nth-child(2) button').click()")
    assert page.run(f"[...{table}.tBodies[0].rows].map(row => row.cells[1].textContent)") == [
        "2 times 2",
        "1 times 2",
    ]


def test_the_keyboard_sorts_too(page: chromium.Page) -> None:
    page.open(page.url)
    page.run("document.querySelector('#summary thead th:nth-child(3) button').focus()")
    page.press("Enter", 13, "\r")
    assert page.run(ORDER) == ["toy", "a-much-longer-name", "joy"]


def test_on_paper_everything_is_unfolded(page: chromium.Page) -> None:
    page.open(page.url)
    assert page.run("[...document.querySelectorAll('details')].every(one => !one.open)")
    page.call("Page.printToPDF")
    assert page.run("[...document.querySelectorAll('details')].every(one => one.open)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the repository's quick results."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "quick").symlink_to(ROWS)
    file = folder / "report.html"
    file.write_text(report.page(report.gather(folder)), encoding="utf-8")
    return file.as_uri()


@pytest.mark.skipif(not ROWS.is_dir(), reason="no results beside the tests")
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_of_the_repository_shows_every_experiment(
    page: chromium.Page, whole: str, width: int
) -> None:
    page.size(width, 800)
    page.open(whole)
    assert page.complaints == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.beyond() == []
    below = "[...document.querySelectorAll('figcaption')].map(one => one.getClientRects().length)"
    found = page.run(below)
    assert found
    assert set(found) == {int(width < 600)}, "legends beside the picture, or below it"
    assert page.run("document.title") == "metanudge: the paper, reproduced"
    assert page.run(ORDER) == list(NAMES)
    bare = (
        "[...document.querySelectorAll('article')].filter(one => !one.querySelector('.todo') &&"
        " !one.querySelector('figure svg'))"
    )
    assert page.run(f"{bare}.map(one => one.id)") == [], "every result has its figure"
    boxes = page.run(
        "[...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect()).map(b"
        " => [b.width, b.height])"
    )
    assert len(boxes) >= 10
    assert all(wide > 300 and high > 150 for wide, high in boxes)
    page.run("document.querySelector('#summary thead th:nth-child(3) button').click()")
    ranks = page.run(
        "[...document.querySelectorAll('#summary tbody td:nth-child(3)')].map(cell =>"
        " Number(cell.dataset.sort))"
    )
    assert ranks == sorted(ranks)


def test_a_script_error_would_be_seen(page: chromium.Page, tmp_path: Path) -> None:
    file = tmp_path / "broken.html"
    file.write_text(
        "<!doctype html><script>nonsense()</script><img src='missing.png'>", encoding="utf-8"
    )
    page.open(file.as_uri())
    assert len(page.complaints) >= 2
