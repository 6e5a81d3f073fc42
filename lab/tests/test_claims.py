"""The list of the paper's claims is complete, and answered from the rows alone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from metanudge_lab.claims import CLAIMS, Claim
from metanudge_lab.experiments import available, load
from metanudge_lab.experiments.base import Statement, Verdict
from metanudge_lab.experiments.store import find
from metanudge_lab.report.numbers import NUMBERS

ROOT = Path(__file__).parents[2]
PAPERS = [folder / "shared" / "paper" / "fo-b-maml.tex" for folder in ROOT.parents]
NAMES = {
    "framedtheorem": "Theorem",
    "framedlemma": "Lemma",
    "framedcorollary": "Corollary",
    "framedproposition": "Proposition",
    "figure": "Figure",
    "table": "Table",
    "table*": "Table",
    "algorithm": "Algorithm",
}


def numbered(text: str) -> dict[str, str]:
    """Label → "Theorem 1", counted as LaTeX does."""
    counts: Counter[str] = Counter()
    found = {}
    for kind, body in re.findall(r"\\begin\{([a-z*]+)\}(.*?)(?=\\end\{\1\})", text, re.DOTALL):
        if kind in NAMES:
            counts[NAMES[kind]] += 1
            found[re.findall(r"\\label\{([^}]+)\}", body)[0]] = (
                f"{NAMES[kind]} {counts[NAMES[kind]]}"
            )
    return found


def test_labels_are_numbered_as_in_the_paper() -> None:
    text = r"\begin{figure}\label{a}\end{figure}\begin{table}\label{t}\end{table}\begin{figure}"
    assert numbered(text + r"\label{b}\end{figure}") == {
        "a": "Figure 1",
        "t": "Table 1",
        "b": "Figure 2",
    }


def equations(text: str) -> dict[int, str]:
    """The paper's equations by their numbers: one to a display, none where it says so."""
    body = re.sub(r"(?<!\\)%.*", "", text).partition(r"\begin{document}")[2]
    kinds = r"\\begin\{(equation|multline|align)\}(.*?)\\end\{\1\}"
    found = [text for _, text in re.findall(kinds, body, re.DOTALL) if r"\nonumber" not in text]
    return dict(enumerate(found, start=1))


# What stands in the equations that claims and experiments name.
NAMED = {
    14: "eq:Bias", 16: r"\cO\Big(\lambda\nu +", 17: "eq:overallbias", 18: "^{For}", 19: "^{Sym}",
    20: "eq:generalInner", 25: "eq:ABias1", 26: "eq:A_nu_Smoothness", 27: "eq:AppOVB",
    30: r"\|\vz''\| \leq", 32: r"E(\nu) \leq", 33: r"\text{Bias}_{\text{Sym}} \leq",
}  # fmt: skip


def test_equations_have_the_papers_numbers() -> None:
    paper = next((file for file in PAPERS if file.is_file()), None)
    if paper is None:
        pytest.skip("the paper's source is not beside the repository")
    found = equations(paper.read_text(encoding="utf-8"))
    for number, part in NAMED.items():
        assert part in found[number], number
    sources = [claim.where for claim in CLAIMS] + [load(name).where for name in available()]
    cited = [
        int(number)
        for where in sources
        for list_ in re.findall(r"[Ee]quations? ([\d, and]+)", where)
        for number in re.findall(r"\d+", list_)
    ]
    assert cited
    assert set(cited) <= set(NAMED)


def test_every_numbered_claim_of_the_paper_has_a_row() -> None:
    paper = next((file for file in PAPERS if file.is_file()), None)
    if paper is None:
        pytest.skip("the paper's source is not beside the repository")
    rows = {claim.label: claim for claim in CLAIMS if claim.label}
    for label, name in numbered(paper.read_text(encoding="utf-8")).items():
        assert label in rows, f"{name} ({label}) has no row"
        assert name in rows[label].where


def test_rows_are_answered_or_say_why_not() -> None:
    assert len({(claim.where, claim.says) for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.by or claim.because, claim.where
        assert set(claim.experiments) <= set(available()), claim.where


@pytest.mark.parametrize("name", sorted({name for claim in CLAIMS for name in claim.experiments}))
def test_the_statements_that_answer_exist(name: str) -> None:
    experiment = load(name)
    results = [one for one in find(experiment, ROOT / "results") if experiment.enough(one)]
    if not results:
        pytest.skip("not measured yet")
    parts = {part.name for part in experiment.judge(results[0]).parts}
    wanted = [one.partition(": ") for claim in CLAIMS for one in claim.by]
    assert {part for one, _, part in wanted if one == name and part} <= parts


def test_numbers_are_the_papers_and_ours_come_from_the_rows() -> None:
    paper = next((file for file in PAPERS if file.is_file()), None)
    if paper is not None:
        text = paper.read_text(encoding="utf-8")
        for one in NUMBERS:
            if one.where == "Table 2":
                mean, _, ci = one.theirs.removesuffix(" %").partition(" ± ")
                padded = {f"{value} \\pm {ci}" for value in (mean, f"{float(mean):.2f}")}
                assert any(number in text for number in padded), one.theirs
    results = {name: find(load(name), ROOT / "results")[0] for name in {o.by for o in NUMBERS}}
    told = {(one.where, one.what): one.ours(results[one.by]) for one in NUMBERS}
    assert len(told) == len(NUMBERS)
    for place, text in told.items():
        assert re.search(r"\d", text), place
    last = max(results["mnist1d"].config.at)
    ends = results["mnist1d"].values("accuracy", kind="curve", method="FO-B-MAML", iteration=last)
    assert told["§ 6.2", "accuracy on MNIST-1D in the end"].startswith(
        f"{sum(ends) / len(ends):.3f} ±"
    )


def test_the_state_is_that_of_the_statements() -> None:
    parts = (Statement(True, "a", "", "a"), Statement(False, "b", "no b", "b"))
    verdicts = {"one": Verdict.of(parts, "measured")}
    states = {
        "one: a": "reproduced",
        "one: b": "not",
        "one": "partly",
        "one: c": "unfinished",
        "two": "unfinished",
    }
    for by, state in states.items():
        assert Claim("here", "it is so", (by,)).state(verdicts) == state
    assert Claim("here", "it is so", ("one: a", "one: b")).state(verdicts) == "partly"
    assert Claim("here", "it is so", because="no data").state(verdicts) == "untestable"
