"""The page and RESULTS.md say what the rows say, with all, some or none of the results there."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from metanudge.cli import main
from metanudge.training.errors import UserError
from metanudge_lab import report
from metanudge_lab.claims import Claim
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Experiment, FinishedCell, Result, ResultTable, Shown
from metanudge_lab.experiments.run import Options, run
from metanudge_lab.report import entries as gathering
from metanudge_lab.report import short
from metanudge_lab.report.entries import Answer, sort_key, text_of
from metanudge_lab.report.figures import inline
from toy_experiment import toy

TOYS = {"toy": toy(), "joy": toy(name="joy", title="Another toy", notes="")}


@pytest.fixture(autouse=True)
def only_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "available", lambda: tuple(TOYS))
    monkeypatch.setattr(gathering, "load", TOYS.__getitem__)


def measured(
    folder: Path, mode: str = "quick", experiment: Experiment = TOYS["toy"], pattern: str = "*"
) -> None:
    run(experiment, Options(mode=mode, folder=folder, device="cpu", pattern=pattern))


class Outline(HTMLParser):
    """The tags of a page that are open at its end, its ids and what it asks for from elsewhere."""

    VOID = ("meta", "link", "br", "img", "use", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if values.get("id") else []
        addresses = [values.get(key) or "#" for key in ("src", "href", "xlink:href")]
        self.outside += [address for address in addresses if not address.startswith(("#", "data:"))]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    return parser


def test_everything_about_a_result_is_on_the_page(tmp_path: Path) -> None:
    measured(tmp_path)
    toy_entry, joy_entry = report.write(tmp_path)
    assert (toy_entry.state, joy_entry.state) == ("reproduced", "missing")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    seen = outline(text)
    assert seen.open == []
    assert len(seen.ids) == len(set(seen.ids)), "ids are not shared between figures"
    assert seen.outside == [], "nothing is loaded from elsewhere"
    for needed in (
        "y is factor times x &amp; more.",
        '<span class="nb">y = 4</span> at',
        "It is twice x &lt;as claimed&gt;.",
        "Nothing is random.",
        "reproduced",
        "quick settings",
        "1.0, 2.0",
        "commit",
        "torch",
        'aria-label="y against x"',
        "nothing &amp; &lt;more&gt;",
        "metanudge reproduce joy",
        "not run yet",
        "prefers-color-scheme: dark",
        "The paper&#39;s numbers, and ours",
        "99.24 ± 0.29 %",
    ):
        assert needed in text, needed
    assert text.count("<svg") == 2


def test_files_are_written_once_and_the_same(tmp_path: Path) -> None:
    measured(tmp_path)
    report.write(tmp_path)
    first = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    names = {str(path.relative_to(tmp_path)) for path in first}
    figures = {f"figures/toy{end}" for end in (".png", ".svg", "-empty.png", "-empty.svg")}
    assert names == {"report.html", "RESULTS.md", "quick/toy.json", *figures}
    report.write(tmp_path)
    assert {path: path.read_bytes() for path in first} == first


def test_an_unfinished_result_is_shown_without_a_verdict(tmp_path: Path) -> None:
    measured(tmp_path, pattern="factor=1.0 seed=0")
    entry = report.gather(tmp_path)[0]
    assert entry.state == "unfinished"
    assert entry.measured == "1 of 4 cells are measured."
    assert entry.drawings
    assert "unfinished" in report.page([entry])


def test_what_was_not_run_is_listed_also_beside_a_verdict(tmp_path: Path) -> None:
    measured(tmp_path, pattern="factor=2.0*")
    early = toy(enough=lambda result: bool(result.measured))
    entry = gathering.entry(early, tmp_path)
    assert entry.state == "reproduced"
    assert entry.not_run == ["1.0 (2 times)"]
    assert "Not run: 2 of 4 cells" in report.page([entry])
    assert "Not run: 1.0 (2 times)." in report.markdown([entry])
    measured(tmp_path)
    assert not gathering.entry(early, tmp_path).not_run


def test_full_results_go_before_quick_ones_and_the_page_says_so(tmp_path: Path) -> None:
    measured(tmp_path)
    measured(tmp_path, "full")
    entry = report.gather(tmp_path)[0]
    assert entry.result is not None
    assert entry.result.mode == "full"
    text = report.page([entry])
    assert "These are the full settings. There is also a quick measurement, not shown." in text
    assert "There is also a quick measurement, not shown." in report.markdown([entry])


def test_no_results_at_all(tmp_path: Path) -> None:
    entries = report.write(tmp_path)
    assert [entry.state for entry in entries] == ["missing", "missing"]
    assert "2</b> not run yet" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_verdict_comes_from_the_rows(tmp_path: Path) -> None:
    measured(tmp_path)
    file = tmp_path / "quick" / "toy.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace('{"x": 2, "y": 4.0}', '{"x": 2, "y": 5.0}'),
        encoding="utf-8",
    )
    entry = report.gather(tmp_path)[0]
    assert entry.state == "not"
    assert entry.measured == "y = 5 at x = 2."


def test_rows_that_lack_something_are_named(tmp_path: Path) -> None:
    measured(tmp_path)
    file = tmp_path / "quick" / "toy.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"y":', '"z":'), encoding="utf-8")
    with pytest.raises(UserError, match=rf"{re.escape(str(file))}: its rows lack 'y'.*--restart"):
        report.gather(tmp_path)


def test_markdown_has_tables_figures_and_provenance(tmp_path: Path) -> None:
    measured(tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "| [toy](#toy) | Table 0 | reproduced (quick) | y = 4 at x = 2. |" in text
    assert "![y against x](figures/toy.png)" in text
    assert "| 2.0 | 2 times 2 |" in text
    assert "Not run yet: `metanudge reproduce joy`." in text
    assert "| 99.24 ± 0.29 % | not measured yet | omniglot |" in text
    assert "Measured on:" in text


def test_figures_follow_the_theme_and_keep_their_ids_apart(tmp_path: Path) -> None:
    measured(tmp_path)
    drawing = report.gather(tmp_path)[0].drawings[0]
    text = inline(drawing, "toy")
    assert text.startswith("<svg")
    assert "var(--ink)" in text
    assert "var(--grid)" in text
    assert "#23272f" not in text
    assert "<style" not in text
    assert all(name.startswith("toy-") for name in re.findall(r'\bid="([^"]+)"', text))
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    assert used
    assert used <= set(re.findall(r'\bid="([^"]+)"', text))


def test_the_summary_has_the_first_sentence() -> None:
    entry = report.Entry(
        TOYS["toy"], "reproduced", "At 0.5 it is 1.2 (iMAML, 5 CG: 3). At λ = 2 it is less.", ""
    )
    assert entry.gist == "At 0.5 it is 1.2 (iMAML, 5 CG: 3)."
    assert dataclasses.replace(entry, measured="").gist == ""


def test_long_tables_are_folded_and_words_stand_left(tmp_path: Path) -> None:
    measured(tmp_path)
    entry = report.gather(tmp_path)[0]
    assert "Table of" not in report.page([entry])
    longer = dataclasses.replace(
        entry, table=ResultTable(("name", "n"), [(f"row {n}", n) for n in range(13)])
    )
    text = report.page([longer])
    assert "<summary>Table of 13 rows</summary>" in text
    assert '<td data-sort="row 3" class="text">row 3</td><td data-sort="3.0">3</td>' in text
    assert outline(text).open == []


def test_values_of_tables() -> None:
    assert [sort_key(value) for value in (1, 0.5, "a", None, Shown(2.0, "two"))] == [
        "1.0",
        "0.5",
        "a",
        "",
        "2.0",
    ]
    assert text_of(True) == "True"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--results", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    measured(tmp_path)
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    page = tmp_path / "elsewhere" / "page.html"
    assert main(["report", "--results", str(tmp_path), "--out", str(page)]) == 0
    assert "1 of 2 experiments have results" in capsys.readouterr().out
    assert page.is_file()
    (tmp_path / "quick" / "toy.json").write_text("{", encoding="utf-8")
    assert main(["report", "--results", str(tmp_path)]) == 2
    assert "toy.json cannot be read as JSON" in capsys.readouterr().err


def test_the_first_screen_counts_claims_by_their_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ["reproduced", "not", "not", "not", "not", "not", "not", "partly", "unfinished"]
    by = ["a", "b", "b", "c", "d", "e", "f", "g", "h"]
    asked = [
        Answer(Claim(f"Place {place}", f"claim {place}.", (name,)), state)  # type: ignore[arg-type]
        for place, (name, state) in enumerate(zip(by, states, strict=True))
    ]
    monkeypatch.setattr(short, "answers", lambda entries: asked)
    lines = short.in_short([])
    assert [(line.head, line.text, line.link) for line in lines] == [
        ("Holds", "1 of 9 claims: Place 0.", ""),
        ("Does not hold", "Place 1: claim 1.", "b"),
        ("Does not hold", "Place 3: claim 3.", "c"),
        ("Does not hold", "Place 4: claim 4.", "d"),
        ("Does not hold", "Place 5: claim 5.", "e"),
        ("Does not hold", "Nor do 2 more: Place 6; Place 2.", ""),
        ("Holds in part", "1 of 9 claims: Place 7.", ""),
        ("Open", "1 not measured yet.", ""),
    ]


def test_what_to_use_follows_from_the_rows() -> None:
    """The best is named with those it does not lead seed by seed, and the cheapest of them."""
    rows = {m.LOSS: (0.95, 0.96, 0.97), m.FO_MAML: (0.951, 0.959, 0.968), m.MAML: (0.9, 0.91, 0.92)}
    where = {"kind": "test", "setting": "5-way 1-shot", "iteration": 7, "iterations": 7}
    cells = [
        FinishedCell(
            {"method": method, "seed": seed, **where}, [{"accuracy": accuracies[seed]}], 1.0, 0
        )
        for method, accuracies in rows.items()
        for seed in range(3)
    ]
    config = dataclasses.make_dataclass("Config", [("iterations", int)])(7)
    line = short.best(Result("omniglot", "full", config, cells), "test")
    assert (
        f"{m.LOSS}, 96.00 ± 2.48 %; not told apart from it: {m.FO_MAML}; behind it: {m.MAML}"
        in (line.text)
    )
    assert line.text.endswith("FO-MAML spends least: 6 gradients a task.")
    assert short.best(Result("omniglot", "full", config, cells), "more steps").text == ""
