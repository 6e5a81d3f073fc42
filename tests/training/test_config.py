"""`TrainConfig`: JSON there and back, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metanudge.names import printable
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from metanudge.version import __version__

finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=20).map(printable)
configs = st.builds(
    TrainConfig,
    data=text,
    ways=st.none() | st.integers() | st.sampled_from(["3-10", "5"]),
    head=st.sampled_from(["fixed", "prototypes"]),
    lam=finite,
    clip=st.none() | finite,
    schedule=st.sampled_from(["constant", "cosine"]),
    seed=st.integers(),
    tensorboard=st.booleans(),
    out=st.none() | text,
    estimator=text,
)


@given(configs)
def test_json_round_trip_is_exact(config: TrainConfig) -> None:
    again = TrainConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()


def test_importing_the_configuration_loads_no_torch() -> None:
    code = "import sys, metanudge.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"iteratons": 3}', ["iteratons", "iterations"]),
        ('{"iterations": "3"}', ["iterations", "'3'", "whole number"]),
        ('{"iterations": true}', ["iterations", "True"]),
        ('{"schedule": "cosin"}', ["schedule", "cosine"]),
        ('{"tensorboard": 1}', ["tensorboard", "true or false"]),
        (r'{"data": "x\u001b[2J"}', ["data", r"x\x1b[2J", "control characters"]),
        ("[1]", ["list"]),
        ("{", ["JSON"]),
        ("[" * 100_000, ["JSON", "nested too deeply"]),
        ('{"lam":' * 100_000, ["JSON", "nested too deeply"]),
        ('{"lam": 1' + "0" * 400 + "}", ["lam", "float"]),
        ('{"lam": -1' + "0" * 400 + "}", ["lam", "float"]),
        ('{"iterations": 1' + "0" * 5000 + "}", ["JSON", "digits"]),
        ('{"lam": 1e999}', ["lam", "float"]),
        ('{"lam": NaN}', ["JSON", "NaN"]),
        ('{"clip": -Infinity}', ["JSON", "-Infinity"]),
        ('{"lam": 2, "lam": 3}', ["'lam' is given twice"]),
        (b'{"data": "caf\xe9.csv"}', ["JSON", "utf-8"]),
        (TrainConfig("sinusoid").to_json().encode("utf-16"), ["JSON", "utf-8"]),
        ('{"version": "0.9"}', ["metanudge 0.9", __version__]),
        ('{"version": "1000000.0"}', ["version", "1000000.0"]),
        ('{"version": 2}', ["version is 2", __version__]),
        ('{"version": "new"}', ["version is 'new'", __version__]),
        ('{"version": null, "sha256": "0"}', ["own sha256"]),
        ('{"data": ' + '"' + "x" * 5000 + '", "ways": "' + "y" * 5000 + '"}', ["ways", "..."]),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_bad_document_is_refused_by_name(text: str | bytes, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        TrainConfig.from_json(text, where="run.json")
    assert "run.json" in str(refused.value)
    assert len(str(refused.value)) < 1000
    for word in words:
        assert word in str(refused.value)


def test_a_file_that_is_no_configuration_is_refused_without_reading_all_of_it(
    tmp_path: Path,
) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(
        UserError, match=r"huge\.json cannot be read \(it has more than 1048576 bytes"
    ):
        TrainConfig.read(huge)
    (tmp_path / "latin.json").write_bytes(b'{"data": "caf\xe9.csv"}')
    with pytest.raises(UserError, match=r"latin\.json cannot be read \('utf-8' codec"):
        TrainConfig.read(tmp_path / "latin.json")
    with pytest.raises(UserError, match=r"nothing\.json cannot be read \(No such file"):
        TrainConfig.read(tmp_path / "nothing.json")


def test_the_version_is_recorded(tmp_path: Path) -> None:
    assert json.loads(TrainConfig("sinusoid").to_json())["version"] == __version__


def test_a_whole_number_may_stand_for_a_float_and_left_out_fields_have_defaults() -> None:
    config = TrainConfig.from_json('{"data": "sinusoid", "lam": 3}')
    of_0_1 = {"tasks": 16, "estimator": "fobmaml", "head": "fixed", "patience": 0}
    assert config == TrainConfig("sinusoid", lam=3.0, **of_0_1)
    assert isinstance(config.lam, float)


@pytest.mark.parametrize(
    "bad",
    [
        {"iterations": 0}, {"tasks": -1}, {"patience": -1}, {"ways": 0}, {"shots": -1},
        {"seed": -1},
        {"ways": "5-3", "head": "prototypes"}, {"ways": "3-5", "head": "fixed"},
        {"shots": "0-3"}, {"shots": "many"},
        {"seed": 1 << 63}, {"iterations": 1 << 63},
        {"lam": -0.1}, {"lam": float("nan")},
        {"clip": -1.0}, {"chunk": 0}, {"eval_every": -1}, {"checkpoint_every": 0},
        {"precision": "bf16", "dtype": "float64"},
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_with_their_flag(bad: dict[str, object]) -> None:
    with pytest.raises(UserError, match="--" + next(iter(bad)).replace("_", "-")):
        TrainConfig("sinusoid", **bad).check()  # type: ignore[arg-type]
