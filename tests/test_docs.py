"""What README and documentation show is true: their code runs, their numbers are those of results/,
and their links lead somewhere.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch

import metanudge as mn
from documents import PAGES, ROOT, Page, anchors
from given_tables import schools
from metanudge.cli import main
from trained_runs import write_images

COMMANDS = ("start.md", "own-table.md")  # pages whose commands run
ALL = [Page(path) for path in PAGES]
# A run of the command line as a page shows it, only smaller.
SMALL = [
    *("--tasks", "2", "--iterations", "2", "--eval-every", "0", "--test-tasks", "4"),
    *("--solver", "gradient_descent:lr=0.1,steps=1"),
]


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder to work in, and the random state of before."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        yield


def run(page: Page, names: dict[str, object], *, rivals: bool = False) -> dict[str, object]:
    """A page's Python, in order; blocks that need a rival only where wanted."""
    for block in page.blocks:
        if block.language == "python" and not block.not_run and (rivals or not block.needs):
            exec(compile(block.text, str(page), "exec"), names)
    return names


def with_python(pages: list[Page]) -> list[Page]:
    return [page for page in pages if any(block.language == "python" for block in page.blocks)]


def setting(page: Page) -> dict[str, object]:
    """What a page builds upon: those about other libraries on the first of them."""
    if page.path.parent.name == "coming-from" and page.path.stem not in ("index", "betty"):
        return run(Page(page.path.with_name("index.md")), {})
    return {}


@pytest.mark.parametrize("page", with_python(ALL), ids=str)
def test_python_runs(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(page, setting(page))
    if page.path.name == "README.md":
        assert names["stats"].support_gradients == 10  # type: ignore[attr-defined]
        assert "against the implicit gradient" in capsys.readouterr().out
        assert all(p.grad is not None for p in names["learner"].parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("rival", ["higher", "torchopt", "betty", "learn2learn"])
@pytest.mark.filterwarnings("ignore")  # the rivals are old
def test_their_loop_gives_our_gradient(rival: str) -> None:
    if importlib.util.find_spec(rival) is None:
        pytest.skip(f"{rival} is not installed: pip install 'metanudge-lab[rivals]'")
    page = Page(ROOT / "docs" / "coming-from" / f"{rival}.md")
    names = setting(page)
    found = []
    for block in page.blocks:
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
            if "model" in names:
                found.append([p.grad.clone() for p in names["model"].parameters()])  # type: ignore[attr-defined]
    theirs, ours = found if "model" in names else ([names["theirs"]], [names["ours"]])
    error = torch.cat([(a - b).flatten() for a, b in zip(theirs, ours, strict=True)]).norm()
    assert error < 1e-6 * torch.cat([b.flatten() for b in ours]).norm()


@pytest.mark.parametrize("rival", ["higher", "torchopt", "learn2learn"])
def test_our_loop_gives_the_gradient_of_steps_written_out(rival: str) -> None:
    """Also where the rival does not install: their loops are K differentiable steps of gradient
    descent on the support loss, and the query loss's gradient through them. In float64 two orders
    of summation differ by some hundred roundings.
    """
    page = Page(ROOT / "docs" / "coming-from" / f"{rival}.md")
    names = run(page, setting(page))
    model, loss, tasks = (names[name] for name in ("model", "loss", "tasks"))
    theta = dict(model.named_parameters())  # type: ignore[attr-defined]
    total = torch.zeros((), dtype=torch.float64)
    for task in tasks:  # type: ignore[attr-defined]
        phi = theta
        for _ in range(5):
            x, y = task.support
            error = loss(torch.func.functional_call(model, phi, x), y)  # type: ignore[operator, arg-type]
            found = torch.autograd.grad(error, list(phi.values()), create_graph=True)
            phi = {k: v - 0.01 * g for (k, v), g in zip(phi.items(), found, strict=True)}
        x, y = task.query
        total = total + loss(torch.func.functional_call(model, phi, x), y) / len(tasks)  # type: ignore[operator, arg-type]
    for parameter, wanted in zip(
        theta.values(), torch.autograd.grad(total, list(theta.values())), strict=True
    ):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-14)


def test_every_block_runs_or_says_why_not() -> None:
    """Python runs above and the commands of two pages below; text is a script's recorded output,
    and the rest are directives.
    """

    def runs(page: Page, language: str) -> bool:
        return language == "python" or (language == "console" and page.path.name in COMMANDS)

    bare = [
        f"{page}: {block.text.splitlines()[0]}"
        for page in ALL
        for block in page.blocks
        if not (runs(page, block.language) or block.not_run or block.language.startswith("{"))
    ]
    assert not bare, "\n".join(bare)
    assert sum(len(page.blocks) for page in ALL) > 40, "they were found"


def test_start_here_from_nothing_to_a_learner_on_a_folder(tmp_path: Path) -> None:
    """Exactly what the page says, only shorter trainings."""
    write_images(tmp_path / "photos", [f"class{number}" for number in range(20)], each=6)
    write_images(tmp_path / "few", ["a", "b", "c"], each=1)
    write_images(tmp_path / "many", ["."], each=4)
    assert run_commands(Page(ROOT / "docs" / "start.md")) == 4
    said = (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(said) == 1 + 4


def test_the_commands_of_the_tutorial_on_tables(tmp_path: Path) -> None:
    schools(tmp_path / "schools.csv")
    assert run_commands(Page(ROOT / "docs" / "tutorials" / "own-table.md")) == 2


def run_commands(page: Page) -> int:
    """How many there are; trainings are made shorter."""
    lines = [
        line
        for block in page.blocks
        if block.language == "console" and not block.not_run
        for line in block.text.splitlines()
    ]
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        assert program == "metanudge"
        short = SMALL if arguments[0] == "train" else []
        assert main([*arguments, *short]) == 0, line
    return len(lines)


def test_links_lead_somewhere() -> None:
    broken = []
    for page in ALL:
        for target in page.links():
            file, _, anchor = target.partition("#")
            path = (page.path.parent / file).resolve() if file else page.path
            text = (
                path.read_text(encoding="utf-8") if path.suffix == ".md" and path.exists() else ""
            )
            for included in re.findall(r"```\{include\} (\S+)", text):
                text += (path.parent / included).read_text(encoding="utf-8")
            if not path.exists() or (anchor and anchor not in anchors(text)):
                broken.append(f"{page}: {target}")
    assert not broken, "\n".join(broken)
    assert sum(len(page.links()) for page in ALL) > 40, "they were found"


def test_numbers_of_the_readme_are_those_of_the_results(script) -> None:
    measured = script(ROOT / "docs" / "measured.py")
    automatic, unmeasured = "FO-B-MAML, automatic ν", ("–", "–", "–")
    expected = []
    for key, name, in_transformer in (
        ("fobmaml", "FO-B-MAML", automatic),
        ("fobmaml-gradient", "FO-B-MAML gradient nudge", None),
        (None, None, "MAML by differences"),
        ("maml", "MAML", "MAML"),
        ("fomaml", "FO-MAML", "FO-MAML"),
    ):
        fast = (
            unmeasured if key is None else (measured.bench(key)[0], *measured.omniglot(name, 2000))
        )
        loss = measured.transformer(in_transformer)["loss"] if in_transformer else "–"
        expected.append((*fast, shorter(loss)))
    table = [
        tuple(cell.strip() for cell in line.split("|")[3:7])
        for line in Page(ROOT / "README.md").text.splitlines()
        if "±" in line and line.startswith("| `")
    ]
    assert table == expected
    first, second = (measured.transformer(name) for name in ("FO-MAML", "MAML"))
    times = float(second["gradients"]) / float(first["gradients"])
    alike = [shorter(one["loss, equal gradients"]).split()[0] for one in (first, second)]
    said = (
        f"FO-MAML, which takes {times:.1f} times fewer a step, has {alike[0]} and MAML {alike[1]}"
    )
    assert said in " ".join(Page(ROOT / "README.md").text.split())


def shorter(loss: str) -> str:
    """With three digits behind the point."""
    return " ± ".join(f"{float(part):.3f}" for part in loss.split(" ± ")) if "±" in loss else loss


def test_what_the_readme_says_of_differences_was_measured(script) -> None:
    measured = script(ROOT / "docs" / "measured.py")
    text = " ".join(Page(ROOT / "README.md").text.split())
    (_, smooth), (cosine, _) = (
        measured.along_training(network, "MAML by differences") for network in ("smooth", "mnist1d")
    )
    assert f"to within {smooth} % with GELU" in text
    assert f"cosine {cosine} with ReLU" in text


def test_the_readme_is_short_and_its_first_screen_has_the_essentials() -> None:
    lines = Page(ROOT / "README.md").text.splitlines()
    assert len(lines) <= 120
    for needed in ("make run", "make test", "learner.backward(tasks)", "learner.adapt("):
        assert needed in "\n".join(lines[:40])


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    missing = [
        name
        for name in mn.__all__
        if name != "__version__" and not re.search(rf":: metanudge\.{name}\b", text)
    ]
    assert not missing, "add them to a page in docs/reference/api"


def test_every_source_and_model_is_in_the_reference() -> None:
    folder = ROOT / "docs" / "reference" / "api"
    models = {model.__name__ for model in mn.models.MODELS.values()}
    for module, page, names in (
        ("tasks", "data.md", set(mn.tasks.__all__) - {"SOURCES"}),
        ("models", "models.md", models),
    ):
        text = (folder / page).read_text(encoding="utf-8")
        shown = set(re.findall(rf":: metanudge\.{module}\.(\w+)", text))
        assert names <= shown, page


def test_every_setting_has_a_description() -> None:
    """The page on configuration is made from them."""
    from metanudge.training.config import TrainConfig

    (body,) = ast.parse(inspect.getsource(TrainConfig)).body
    pairs = itertools.pairwise(body.body)  # type: ignore[attr-defined]
    described = {
        field.target.id
        for field, after in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(field.target, ast.Name)
    }
    assert {field.name for field in dataclasses.fields(TrainConfig)} == described


def test_every_command_is_in_the_reference() -> None:
    from metanudge.cli.commands import OWN

    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^```\{help\} (\w+)$", text, re.MULTILINE) == list(OWN)
