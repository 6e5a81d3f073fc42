"""One file and one line add an estimator, a solver, a source or a model: the command line and its
errors, `check_gradient`, the bilevel functions and the conformance suite know it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import conformance
import metanudge as mn
from metanudge.cli import main
from metanudge.estimators import ESTIMATORS
from metanudge.models import MODELS
from metanudge.solvers import SOLVERS
from metanudge.tasks import SOURCES

TINY = ["--iterations=2", "--tasks=2", "--eval-every=0", "--test-tasks=2", "--device=cpu"]

ESTIMATOR = '''
from dataclasses import dataclass
from metanudge.estimators import FOMAML, Estimator
from metanudge.estimators.base import refuse_stiffness

@dataclass(frozen=True)
class Borrowed(Estimator):
    """Another estimator's gradient."""

    strength: float = 1.0

    def check_problem(self, problem):
        refuse_stiffness(self, problem, "it was not asked to")

    def accumulate(self, inner, solver, total):
        FOMAML().accumulate(inner, solver, total)
'''

SOLVER = '''
from dataclasses import dataclass
from metanudge.solvers import GradientDescent

@dataclass(frozen=True)
class TwoSteps:
    """Two steps downhill."""

    rate: float = 0.1

    @property
    def steps(self):
        return 2

    def solve(self, oracle, start=None):
        return GradientDescent(lr=self.rate, steps=self.steps).solve(oracle, start)
'''

SOURCE = '''
import torch
from metanudge.tasks import Sinusoid
from metanudge.tasks.episodes import About

class Parabolas(Sinusoid):
    """Sinusoids, squared."""

    about = About("regression: parabolas of a kind")

    def __init__(self, shots: int = 3, queries: int = 4, *, power: int = 2, **stream):
        super().__init__(shots, queries, **stream)
        if power < 1:
            raise ValueError(f"power={power} is too small. Use 1 or more.")
        self.power = power

    def draw(self, keys, split):
        return tuple((x, y**self.power) for x, y in super().draw(keys, split))
'''

MODEL = '''
from torch import nn

class Straight(nn.Linear):
    """A line."""

    def __init__(self, in_features: int = 1, out_features: int = 1, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
'''


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test adds is gone after it."""
    lists, dicts = (ESTIMATORS, SOLVERS), (SOURCES, MODELS)
    before = [list(kinds) for kinds in lists], [dict(named) for named in dicts]
    yield
    for kinds, saved in zip(lists, before[0], strict=True):
        kinds[:] = saved
    for named, kept in zip(dicts, before[1], strict=True):
        named.clear()
        named.update(kept)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def added(folder: Path, text: str) -> ModuleType:
    """The module of one new file."""
    file = folder / "added_here.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("added_here", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["train", *flags, *TINY]) == 2
    return capsys.readouterr().err


def trained(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, str]:
    """The configuration that a run on these flags records."""
    assert main(["train", *flags, *TINY, "--out", "run"]) == 0, capsys.readouterr().err
    return json.loads(Path("run/config.json").read_text(encoding="utf-8"))


def small_learner(**options: object) -> tuple[mn.MetaLearner, mn.TaskBatch]:
    model, loss, tasks = conformance.small(tasks=2)
    return mn.MetaLearner(model, loss, lam=2.0, **options), tasks  # type: ignore[arg-type]


def test_an_estimator(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Borrowed = added(here, ESTIMATOR).Borrowed
    ESTIMATORS.append(Borrowed)
    # the command line, and its errors
    said = refused(capsys, "sinusoid", "--estimator", "borowed")
    assert "Did you mean 'borrowed'?" in said
    assert "exact, borrowed." in said
    said = refused(capsys, "sinusoid", "--estimator", "borrowed:strenght=2")
    assert "Did you mean 'strength'?" in said
    said = refused(capsys, "sinusoid", "--estimator", "borrowed", "--learn-lam", "tensor")
    assert "Borrowed has no gradient for the stiffness" in said
    config = trained(capsys, "sinusoid", "--estimator", "Borrowed:strength=2")
    assert config["estimator"] == "borrowed:strength=2.0"
    # Python's own errors
    with pytest.raises(TypeError, match=r"Write estimator=mn\.Borrowed\(\)"):
        small_learner(estimator="borrowed")
    # check_gradient
    learner, tasks = small_learner(estimator=Borrowed())
    assert "Borrowed" in {row.estimator for row in mn.check_gradient(learner, tasks).rows}
    # bilevel functions
    conformance.check_bilevel(Borrowed(), conformance.small(tasks=1))
    x = torch.zeros((), dtype=torch.float64)
    with pytest.raises(TypeError, match=r"one of FOBMAML.*Borrowed, got 'maml'"):
        mn.hypergradient(_inner, _outer, x, torch.ones(2), estimator="maml")  # type: ignore[arg-type]
    # the conformance suite
    (mine,) = (e for e in conformance.estimators() if type(e) is Borrowed)
    for check in (conformance.check_engines_agree, conformance.check_chunks):
        check(mine, conformance.small(tasks=2))


def _inner(x: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
    return (phi - 1).square().sum() + x.exp() * phi.square().sum()


def _outer(x: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
    return (phi - 0.25).square().sum()


def test_a_solver(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TwoSteps = added(here, SOLVER).TwoSteps
    SOLVERS.append(TwoSteps)
    said = refused(capsys, "sinusoid", "--solver", "twosteeps")
    assert "Did you mean 'two_steps'?" in said
    assert "torch_optimizer, two_steps." in said
    said = refused(capsys, "sinusoid", "--solver", "two_steps:rat=2")
    assert "Did you mean 'rate'?" in said
    config = trained(capsys, "sinusoid", "--solver", "two-steps:rate=0.01")
    assert config["solver"] == "two_steps:rate=0.01"
    learner, tasks = small_learner(estimator=mn.FOMAML(), solver=TwoSteps())
    plain, _ = small_learner(estimator=mn.FOMAML(), solver=mn.GradientDescent(lr=0.1, steps=2))
    ((found,), (expected,)) = (
        mn.check_gradient(each, tasks, estimators=[mn.FOMAML()]).rows for each in (learner, plain)
    )
    assert found.cosine_implicit == pytest.approx(expected.cosine_implicit, rel=1e-9)
    x, init = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for estimator in (mn.FOBMAML(nu=1e-3), mn.FOMAML()):
        mine, gd = (
            mn.hypergradient(_inner, _outer, x, init, solver=solver, estimator=estimator).gradient
            for solver in (TwoSteps(), mn.GradientDescent(lr=0.1, steps=2))
        )
        assert float(mine) == pytest.approx(float(gd), rel=1e-9)
    solver = conformance.solvers()["TwoSteps"]
    conformance.check_engines_agree(mn.FOMAML(), conformance.small(tasks=2), solver=solver)


def test_a_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SOURCES["parabolas"] = added(here, SOURCE).Parabolas
    said = refused(capsys, "parabola")
    assert "Did you mean 'parabolas'?" in said
    assert "sinusoid, parabolas." in said
    said = refused(capsys, "parabolas", "--data-options", "pover=3")
    assert "Did you mean 'power'? Its options are power." in said
    assert "power=0 is too small" in refused(capsys, "parabolas", "--data-options", "power=0")
    assert "power=x is not a whole number" in refused(capsys, "parabolas", "--data-options=power=x")
    assert "regression" in refused(capsys, "parabolas", "--ways", "3")
    config = trained(capsys, "parabolas", "--shots", "2")
    assert (config["data"], config["data_options"]) == ("parabolas", "power=2")
    assert main(["eval", "run", "--tasks", "2"]) == 0
    assert main(["data", "list"]) == 0
    assert "parabolas: regression: parabolas of a kind" in capsys.readouterr().out
    assert main(["data", "verify", "parabolas"]) == 0
    assert main(["data", "fetch", "parabola"]) == 2
    assert "Did you mean 'parabolas'?" in capsys.readouterr().err
    source = conformance.sources()["parabolas"]()
    learner = mn.MetaLearner(torch.nn.Linear(1, 1), F.mse_loss, lam=2.0)
    assert mn.check_gradient(learner, source.batch(range(2)), nus=[0.1]).rows


def test_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MODELS["straight"] = added(here, MODEL).Straight
    said = refused(capsys, "sinusoid", "--model", "strait")
    assert "Did you mean 'straight'?" in said
    assert "transformer, straight." in said
    said = refused(capsys, "sinusoid", "--model", "straight:bia=false")
    assert "Did you mean 'bias'?" in said
    assert trained(capsys, "sinusoid", "--model", "straight")["model"] == "straight"
    options, shape = conformance.models()["straight"]
    model = mn.models.build("straight", **options)
    assert model(torch.zeros(shape)).shape == (shape[0], 4)
    with pytest.raises(ValueError, match="Did you mean 'straight'"):
        mn.models.build("strait")
