"""One folder: its tensors are complete, named as given and readable by other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from checkpoints import DTYPES, identical, random_tensor
from metanudge.training.checkpoint import load, save


def test_tied_tensors_are_both_written(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    save(
        tmp_path / "one",
        step=0,
        tensors={"model": {"a": base, "b": base, "c": base[1:]}},
        state={"d": base},
    )
    result = load(tmp_path / "one")
    assert identical(result.tensors["model"], {"a": base, "b": base, "c": base[1:]})
    assert identical(result.state, {"d": base})


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"../model": {}}, ValueError, r"'../model'.*names a file"),
        ({"state": {}}, ValueError, r"'state' is taken"),
        ({"model": {"__metadata__": torch.ones(1)}}, TypeError, r"\['__metadata__'\].*Rename"),
        ({"model": {0: torch.ones(1)}}, TypeError, r"\[0\].*must be text"),
        ({"model": {"\ud800": torch.ones(1)}}, ValueError, r"lone surrogate"),
        ({"model": {"extra": 3}}, TypeError, r"\['extra'\] is a int, not a tensor.*state"),
    ],
)
def test_bad_groups_are_refused(
    tensors: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path / "one", step=0, tensors=tensors, state={})


def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    tensors = {f"{dtype}": random_tensor(dtype, (2, 3), seed=1) for dtype in DTYPES} | {
        "empty": torch.empty(0, 2)
    }
    save(tmp_path / "one", step=0, tensors={"model": tensors}, state={})
    read = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert identical({name: read[name] for name in tensors}, tensors)
