"""Every experiment keeps the contract, at sizes that take a second or two."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import metanudge
import metanudge_lab.experiments
from metanudge_lab.experiments import NAMES, available, load, store
from metanudge_lab.experiments.base import STATUSES, Result, json_safe, label
from metanudge_lab.experiments.run import Options, run
from tiny_experiments import TINY, tiny

SOURCE = Path(metanudge_lab.experiments.__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Measured once, when first asked for."""
    folder = tmp_path_factory.mktemp("results")

    class Results(dict):
        def __missing__(self, name: str) -> Result:
            run(load(name), Options(mode="quick", folder=folder, device="cpu"), config=tiny(name))
            self[name] = store.read(load(name), store.result_file(folder, name, "quick"))
            return self[name]

    return Results()


def test_every_file_with_an_experiment_is_listed() -> None:
    found = [
        import_module(f"metanudge_lab.experiments.{path.stem}") for path in SOURCE.glob("[a-z]*.py")
    ]
    assert (
        {module.EXPERIMENT.name for module in found if hasattr(module, "EXPERIMENT")}
        == set(available())
        <= set(NAMES)
    )
    assert set(TINY) == set(available()), (
        "lab/tests/tiny_experiments.py has settings for every experiment"
    )


@pytest.mark.parametrize("name", available())
def test_it_says_what_it_is(name: str) -> None:
    experiment = load(name)
    for text in (experiment.title, experiment.where, experiment.claim):
        assert text
        assert text == text.strip()
    assert len(experiment.claim) > 40


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize("name", available())
def test_its_settings_can_be_saved(name: str, mode: str) -> None:
    experiment = load(name)
    config = experiment.configuration(mode)
    assert dataclasses.is_dataclass(config)
    json.dumps(json_safe(dataclasses.asdict(config)), allow_nan=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)
    cells = experiment.cells(config)
    assert len({label(cell) for cell in cells}) == len(cells) > 0


@pytest.mark.parametrize("name", available())
def test_it_measures_draws_and_judges(name: str, results: dict[str, Result]) -> None:
    experiment, result = load(name), results[name]
    assert result.complete
    assert result.config == tiny(name), "the settings come back from the file"
    verdict = experiment.judge(result)
    assert verdict.status in STATUSES
    assert verdict.measured
    assert any(character.isdigit() for character in verdict.measured), (
        "what was measured has numbers"
    )
    assert verdict.reason
    assert experiment.table(result).rows
    drawings = experiment.draw(result)
    assert drawings
    assert all(len(drawing.alt) > 40 for drawing in drawings), "a picture is described in words"
    assert len({drawing.suffix for drawing in drawings}) == len(drawings)


@pytest.mark.parametrize("name", available())
def test_a_part_of_the_cells_can_be_shown(name: str, results: dict[str, Result]) -> None:
    experiment, result = load(name), results[name]
    for measured in (result.measured[:1], result.measured[-1:]):
        part = dataclasses.replace(result, measured=measured)
        assert experiment.draw(part)
        experiment.table(part)


@pytest.mark.parametrize("name", available())
def test_measuring_again_gives_the_same(name: str, results: dict[str, Result]) -> None:
    """From the cell alone, whatever was measured before."""
    import torch

    experiment, result = load(name), results[name]
    last = result.measured[-1]
    again = json_safe(experiment.measure(dict(last.cell), result.config, torch.device("cpu")))
    assert [sorted(row) for row in again] == [sorted(row) for row in last.rows]
    if not any("seconds" in key or "memory" in key for row in again for key in row):
        assert again == last.rows


PROGRAM = """
import sys
for missing in ("rich", "tyro", "matplotlib", "jinja2", "safetensors"):
    sys.modules[missing] = None
import torch
from metanudge_lab.experiments import available, load
from tiny_experiments import tiny
for name in available():
    experiment, config = load(name), tiny(name)
    assert experiment.measure(experiment.cells(config)[0], config, torch.device("cpu")), name
"""


def test_measuring_needs_torch_and_numpy_only() -> None:
    paths = os.pathsep.join(
        str(path)
        for path in (
            Path(metanudge.__file__).parents[1],
            SOURCE.parents[1],
            Path(__file__).parents[1],
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
