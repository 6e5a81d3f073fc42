"""Values: whatever `pack` takes comes back to the last bit, and what it cannot keep is refused."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from checkpoints import DTYPES, identical, random_tensor, through_files
from metanudge.training.checkpoint import pack, save, unpack
from metanudge.training.checkpoint.values import decode_tensors, encode_tensors

ARRAYS = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(dtype).itemsize)
    array = np.frombuffer(raw, dtype="u1" if dtype == "bool" else dtype)
    return (array % 2 == 0 if dtype == "bool" else array).reshape(shape)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)
texts = st.text(max_size=8) | st.sampled_from(
    ["$tensor", "$dict", "$", "order", "__metadata__", "a/b"]
)
simple = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | texts
)
keys = simple | st.binary(max_size=4) | st.tuples(simple, simple)
leaves = (
    simple
    | st.binary(max_size=8)
    | st.builds(random_tensor, st.sampled_from(DTYPES), shapes, seeds)
    | st.builds(random_array, st.sampled_from(ARRAYS), shapes, seeds)
    | st.builds(
        lambda dtype, seed: random_array(dtype, (1,), seed)[0], st.sampled_from(ARRAYS), seeds
    )
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@seed(0)
@settings(
    max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(values)
def test_any_value_comes_back_bit_for_bit(value: Any) -> None:
    tensors, document = pack(value)
    text = json.dumps(document, allow_nan=False)
    read = decode_tensors(b"".join(bytes(chunk) for chunk in encode_tensors(tensors)))
    assert identical(value, unpack(read, json.loads(text)))


def test_awkward_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    payload = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))[0]
    value = {
        "floats": [
            math.nan,
            -math.nan,
            payload,
            math.inf,
            -math.inf,
            -0.0,
            5e-324,
            1e308,
            1.0,
            0.1,
        ],
        "integers": [0, 1, True, False, -1, 2**63, -(2**63), 2**64 - 1, 10**5000],
        "keys": {0: "a", "0": "b", 1.5: "c", None: "d", (1, "x"): "e", b"0": "f", -math.inf: "g"},
        "tags": {"$tuple": [1], "x": 2},
        "empty": [(), [], {}, "", b"", OrderedDict(), Counter()],
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"betas": (0.9, 0.999), "fused": None}],
        },
    }
    assert identical(through_files(value, tmp_path / "one"), value)


@seed(0)
@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(value=values)
def test_any_value_comes_back_from_the_disk(value: Any, tmp_path: Path) -> None:
    assert identical(value, through_files(value, tmp_path / "one"))


VIEWS = {
    "channels last": (
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        True,
    ),
    "transposed": (torch.arange(6.0).reshape(2, 3).T, True),
    "strided": (torch.arange(12).reshape(3, 4)[:, ::2], False),
    "expanded": (torch.ones(1).expand(3), False),
    "one of an expanded": (torch.ones(()).expand(3)[:1].clone().as_strided((1,), (0,)), False),
    "negative bit": (torch.complex(torch.ones(2), torch.ones(2)).conj().imag, False),
    "parameter": (nn.Parameter(torch.ones(2, 2)), True),
    "scalar": (torch.tensor(3.0), True),
    "empty": (torch.empty(0, 3), True),
}


@pytest.mark.parametrize(("tensor", "dense"), VIEWS.values(), ids=VIEWS)
def test_views_come_back_with_their_values_and_dense_ones_with_their_layout(
    tensor: Tensor, dense: bool, tmp_path: Path
) -> None:
    result = through_files(tensor, tmp_path / "one")
    assert torch.equal(result, tensor)
    assert (
        result.stride()
        == (tensor if dense else tensor.clone(memory_format=torch.contiguous_format)).stride()
    )
    result.add_(1)  # ordinary memory of its own


class Fancy(int):
    """A subclass would come back as a plain int."""


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (object(), TypeError, r"state\['a'\]\[0\] is a builtins\.object"),
        ({1, 2}, TypeError, r"state\['a'\]\[0\] is a builtins\.set"),
        (Fancy(3), TypeError, r"Fancy.*no subclasses"),
        (1j, TypeError, r"builtins\.complex"),
        (np.array(["x"]), TypeError, r"numpy\.ndarray"),
        (np.array([1.0], dtype=">f8"), TypeError, r"numpy\.ndarray"),
        (np.datetime64("2020"), TypeError, r"numpy\.datetime64"),
        (torch.ones(2, dtype=torch.complex64), TypeError, r"dtype torch\.complex64.*view_as_real"),
        (np.ones(2, dtype=np.complex128), TypeError, r"dtype torch\.complex128.*view_as_real"),
        (torch.eye(2).to_sparse(), TypeError, r"sparse.*to_dense"),
        (torch.empty(2, device="meta"), TypeError, r"meta.*materialise"),
        ({torch.ones(1): 1}, TypeError, r"tensor as a key.*state_dict"),
        ("\ud800", ValueError, r"lone surrogate.*bytes"),
        ({"\udc00": 1}, ValueError, r"lone surrogate.*bytes"),
        (nested(200), ValueError, r"nested more than 100"),
        (ITSELF, ValueError, r"nested more than 100.*contain itself"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused_before_the_disk_is_touched(
    value: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path / "one", step=0, tensors={}, state={"a": [value]})
    assert not list(tmp_path.iterdir())
