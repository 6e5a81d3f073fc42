"""Every rival computes what it is compared on: the meta-gradient of its method, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from metanudge.estimators import FOBMAML, FOMAML, IMAML, MAML
from metanudge_lab.bench import ours
from metanudge_lab.bench.cases import CASES
from metanudge_lab.bench.contender import Contender, Gradient
from metanudge_lab.bench.rivals import RIVALS, betty, compiled
from metanudge_lab.bench.workload import Workload
from problems import relative_error

# The rivals have no proximal term; ours all but vanishes.
NO_LAM = 1e-12
ESTIMATORS = {"MAML": MAML(), "FO-MAML": FOMAML()}
CUDA = torch.cuda.is_available()

# The rivals are old: they warn of what torch has deprecated since.
pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """What torch.compile is given is tested, not torch.compile itself, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def work_of(case: str, lam: float = NO_LAM, device: str = "cpu") -> Workload:
    return CASES[case].make(device, quick=True, steps=3, lam=lam, dtype=torch.float64, tasks=3)


def device_for(rival: Contender) -> str:
    return "cuda" if rival.cuda_only and CUDA else "cpu"


def ours_of(workload: Workload, estimator: object) -> Gradient:
    return ours.prepare(workload, estimator, "stacked").step()  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["mnist1d", "omniglot", "sinusoid", "transformer"])
@pytest.mark.parametrize(
    "rival", [r for r in RIVALS if r.method in ESTIMATORS], ids=lambda r: r.name
)
def test_a_rival_gives_the_meta_gradient_of_its_method(rival: Contender, case: str) -> None:
    device = device_for(rival)
    if absence := rival.absence(torch.device(device)):
        pytest.skip(absence)
    workload = work_of(case, device=device)
    expected = ours_of(workload, ESTIMATORS[rival.method])
    prepared = rival.prepare(workload)
    first, second = ({n: g.clone() for n, g in prepared.step().items()} for _ in range(2))
    assert set(first) == {name for name, _ in workload.model.named_parameters()}
    assert relative_error(first, expected) < 1e-6
    assert relative_error(second, expected) < 1e-6, "a step leaves the next one as it found it"
    other = ours_of(workload, ESTIMATORS["FO-MAML" if rival.method == "MAML" else "MAML"])
    assert relative_error(first, other) > 1e-4, "the two methods can be told apart on this problem"


def test_bettys_imaml_is_imaml_where_its_conjugate_gradient_is_right() -> None:
    """With one iteration; from the second on its search directions differ from those of the
    conjugate gradient.
    """
    pytest.importorskip("betty", reason="not installed: pip install 'metanudge-lab[rivals]'")
    workload = work_of("sinusoid", lam=2.0)
    expected = ours_of(workload, IMAML(cg_steps=1))
    prepared = betty.prepare(workload, cg_steps=1)
    for _ in range(2):
        assert relative_error(prepared.step(), expected) < 1e-6
    assert (
        relative_error(
            betty.prepare(workload, cg_steps=3).step(), ours_of(workload, IMAML(cg_steps=3))
        )
        > 1e-3
    )


@pytest.mark.parametrize("case", ["mnist1d", "omniglot", "sinusoid", "transformer"])
def test_the_compiled_gradient_nudge_is_ours(case: str) -> None:
    workload = work_of(case, lam=2.0)
    own = ours.prepare(workload, FOBMAML(nu=compiled.NU, nudge="gradient"), "stacked")
    expected = own.step()
    (rival,) = (r for r in compiled.CONTENDERS if r.name == "compile-gradient")
    prepared = rival.prepare(workload)
    for _ in range(2):
        assert relative_error(prepared.step(), expected) < 1e-10
    assert prepared.work() == own.work()


def test_counts_of_evaluations_agree_with_ours() -> None:
    """What a rival says it evaluates is what our estimator of the same method counts."""
    workload = work_of("sinusoid")
    for method, estimator in ESTIMATORS.items():
        own = ours.prepare(workload, estimator, "stacked")
        own.step()
        for rival in RIVALS:
            if rival.method == method and rival.absence(torch.device("cpu")) is None:
                assert rival.prepare(workload).work() == own.work()
