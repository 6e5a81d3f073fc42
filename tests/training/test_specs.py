"""The spec language: names, options, types, round trip, suggestions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import metanudge as mn
from metanudge.training import specs
from metanudge.training.errors import UserError
from metanudge.training.spec_language import Spec, split

positive = st.floats(min_value=1e-300, max_value=1e300)


@dataclass(frozen=True)
class Everything:
    """A target with every type that options have."""

    flag: bool = False
    count: int = 0
    size: float = 0.0
    maybe: float | None = None
    name: str = ""
    pair: tuple[float, float] = (0.0, 0.0)
    mixed: int | str = 0


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "flag": st.booleans(),
            "count": st.integers(),
            "size": st.floats(allow_nan=False),
            "maybe": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "name": st.text(),
            "pair": st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2),
            "mixed": st.integers(),
        },
    )
)
def test_every_option_round_trips_through_its_canonical_text(options: dict[str, object]) -> None:
    text = str(Spec("everything", options))
    _, raw = split("--x", text)
    again = specs.convert(raw, Everything, "--x", "everything")
    assert again == options
    assert {k: type(v) for k, v in again.items()} == {k: type(v) for k, v in options.items()}


@given(positive, st.integers(1, 10**6), st.none() | positive)
def test_a_solver_spec_builds_what_it_says(lr: float, steps: int, tol: float | None) -> None:
    text = f"Gradient-Descent:steps={steps},lr={lr!r}" + ("" if tol is None else f",tol={tol!r}")
    assert specs.build_solver(text) == mn.GradientDescent(lr=lr, steps=steps, tol=tol)
    canonical = str(specs.parse_solver(text))
    assert str(specs.parse_solver(canonical)) == canonical


def refusal(build: Callable[[str], object], text: str) -> str:
    """What a spec is refused with; all that it should say when it is not."""
    try:
        build(text)
    except UserError as error:
        return str(error)
    return "--estimator --solver"


@given(st.text())
def test_any_text_gives_an_estimator_or_a_user_error(text: str) -> None:
    assert "--estimator" in refusal(specs.build_estimator, text)


@given(st.text(alphabet="abnu=,:()[]'\"0.1-_ ", max_size=30))
def test_any_options_give_a_solver_or_a_user_error(text: str) -> None:
    assert "--solver" in refusal(specs.build_solver, "gradient_descent:lr=0.1,steps=1," + text)


@pytest.mark.parametrize("spelling", ["fomaml", "FOMAML", "fo-maml", "FO_MAML", "Fo-MaMl"])
def test_names_ignore_case_and_hyphens(spelling: str) -> None:
    assert specs.build_estimator(spelling) == mn.FOMAML()


@pytest.mark.parametrize(("kind", "lr"), [("classification", 0.1), ("regression", 0.01)])
def test_the_automatic_solver_follows_the_kind_of_tasks(
    kind: Literal["classification", "regression"], lr: float
) -> None:
    assert specs.build_solver("auto", kind) == mn.GradientDescent(lr=lr, steps=5)
    canonical = str(specs.parse_solver("Auto", kind))
    assert specs.build_solver(canonical) == mn.GradientDescent(lr=lr, steps=5)
    assert "takes no options" in refusal(specs.build_solver, "auto:lr=0.2")


def test_all_estimators_and_solvers_can_be_named() -> None:
    for name in specs.named_estimators():
        assert type(specs.build_estimator(name)).__name__.lower() == name
    assert set(specs.named_solvers()) == {
        "gradient_descent",
        "nesterov",
        "torch_optimizer",
        "lbfgs",
        "newton_cg",
    }


def test_a_torch_optimizer_as_inner_solver_takes_its_own_options() -> None:
    solver = specs.build_solver("torch_optimizer:optimizer=adam,steps=5,lr=0.01,betas=(0.8,0.9)")
    assert solver == mn.TorchOptimizer(
        torch.optim.Adam, steps=5, options={"lr": 0.01, "betas": (0.8, 0.9)}
    )


def test_outer_optimizers_are_torchs_and_ours() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    sgd = specs.build_optimizer("sgd:lr=0.5,momentum=0.9,nesterov=true", parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.param_groups[0]["nesterov"] is True
    assert isinstance(
        specs.build_optimizer("clipped-gd:lr=0.1,max_norm=1", parameters), mn.optim.ClippedGD
    )


def test_models_are_sized_by_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = mn.tasks.Sinusoid()
    assert str(specs.parse_model("auto", source)) == "mlp"
    assert specs.build_model("MLP:hidden=[8,4],activation=tanh", source)(
        torch.zeros(3, 1)
    ).shape == (3, 1)
    images = mn.tasks.Labelled(
        torch.zeros(90, 3, 16, 16), torch.arange(90) % 9, ways=2, shots=1, queries=2
    )
    assert str(specs.parse_model("auto", images)) == "conv4"
    assert specs.build_model("conv4:channels=4", images)(torch.zeros(5, 3, 16, 16)).shape == (5, 2)
    (tmp_path / "my_own_nets.py").write_text(
        "import torch\ndef net(num_outputs, width=3):\n    return"
        " torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, num_outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert specs.build_model("my_own_nets:net:width=7", source)[0].out_features == 7  # type: ignore[index]
    assert str(specs.parse_model("my_own_nets:net:width=7", source)) == "my_own_nets:net:width=7"
    with pytest.raises(UserError, match="'net'"):
        specs.build_model("my_own_nets:nett", source)


@pytest.mark.parametrize(
    ("build", "text", "words"),
    [
        (specs.build_estimator, "fobmalm", ["fobmalm", "Did you mean 'fobmaml'?"]),
        (specs.build_estimator, "fobmaml:mu=0.1", ["'mu'", "Did you mean 'nu'?"]),
        (specs.build_estimator, "fobmaml:nu=big", ["nu=big", "a number"]),
        (specs.build_estimator, "fobmaml:nu=-1", ["positive"]),
        (specs.build_estimator, "fobmaml:nu=atuo", ["nu=atuo", "a number", "Did you mean 'auto'?"]),
        (specs.build_estimator, "fobmaml:stencil=forwards", ["stencil=forwards", "five-point"]),
        (specs.build_estimator, "fobmaml:nu", ["'nu'", "key=value"]),
        (specs.build_estimator, "fobmaml:nu=1,nu=2", ["twice"]),
        (specs.build_estimator, "", ["NAME"]),
        (specs.build_solver, "gradient_decent:lr=0.1,steps=5",
        ["Did you mean 'gradient_descent'?"]),
        (specs.build_solver, "gradient_descent:lr=0.1", ["steps", "steps=..."]),
        (specs.build_solver, "gradient_descent:lr=0.1,steps=2.5", ["steps=2.5", "whole number"]),
        (specs.build_solver, "torch_optimizer:steps=5", ["optimizer=adam"]),
        (specs.build_solver, "torch_optimizer:optimizer=adm,steps=5", ["Did you mean 'adam'?"]),
        (specs.build_solver, "torch_optimizer:optimizer=sgd,steps=5,momentun=1",
        ["Did you mean 'momentum'?"]),
        (lambda text: specs.build_optimizer(text, [torch.nn.Parameter(torch.zeros(2))]),
        "adam:lr=-1", ["adam", "-1"]),
        (lambda text: specs.build_optimizer(text, [torch.nn.Parameter(torch.zeros(2))]),
        "lbfgs:lr=1", ["lbfgs", "adam"]),
        (lambda text: specs.build_model(text, mn.tasks.Sinusoid()), "mpl", ["Did you mean 'mlp'?"]),
        (lambda text: specs.build_model(text, mn.tasks.Sinusoid()), "mlp:hidden=8", ["hidden=8",
        "(1,2)"]),
        (lambda text: specs.build_model(text, mn.tasks.Sinusoid()), "no_such_module:Net",
        ["no_such_module"]),
    ],
)  # fmt: skip
def test_mistakes_are_named_and_the_nearest_name_is_offered(
    build: object, text: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        build(text)  # type: ignore[operator]
    for word in words:
        assert word in str(refused.value)
