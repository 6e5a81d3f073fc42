"""What a checkpoint holds: any nest of Python values, tensors and arrays ↔ flat tensors and JSON,
and named tensors ↔ the bytes of a safetensors file.

A document is plain JSON wherever it can be. What JSON cannot say is a mapping whose first key
begins with `$` and tells the kind: `{"$tuple": [...]}`, `{"$tensor": name}`. A dictionary that JSON
would change, or that has such a key itself, is written as its pairs: `{"$dict": [[key, value],
...]}`.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metanudge.names import some
from metanudge.spread import gathered, is_spread, local

# The dtypes a checkpoint can hold, by their names in a safetensors file.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": Counter,
}
_DEEPEST = 100


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested value into its tensors and a JSON document that says where they belong.

    Holds what optimizers, schedulers and random generators put into their states: None, bool, int,
    float, str, bytes, list, tuple, dict, OrderedDict, Counter (keys of any such type), dense
    tensors, NumPy arrays and scalars. `unpack` gives it back exactly: types, key types, order,
    every bit of every number, and the memory layout of tensors (a sum over a channels-last tensor
    rounds differently from one over its contiguous copy). Tensors lose their device (they come back
    on the CPU) and shared ones come back as separate copies. Anything else is refused with its
    place.

    Example:
        >>> tensors, document = pack({0: {"step": torch.tensor(3.0)}, "betas": (0.9, 0.999)})
        >>> document
        {'$dict': [[0, {'step': {'$tensor': '0:0/step'}}], ['betas', {'$tuple': [0.9, 0.999]}]]}
        >>> tensors
        {'0:0/step': tensor(3.)}
        >>> unpack(tensors, document)
        {0: {'step': tensor(3.)}, 'betas': (0.9, 0.999)}
    """
    packer = _Packer()
    document = packer.encode(value, ())
    return packer.tensors, document


class _Packer:
    """Takes a value apart, and has the tensors that were found in it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def _place(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        check_tensor(tensor, _spell(path))
        # The number makes the name unique: the keys 0 and "0" spell the same path.
        name = f"{len(self.tensors)}:{'/'.join(str(key) for key in path)}"
        self.tensors[name] = tensor
        return name

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        """The document of the value at a place."""
        if len(path) > _DEEPEST:
            raise ValueError(
                f"{_spell(path[:3])}... is nested more than {_DEEPEST} levels deep. Does it contain"
                " itself? Save plain values, such as a state_dict()."
            )
        kind = type(value)  # exact types only: a subclass would come back as its base
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() < 64 else {"$int": hex(value)}
        if kind is float:
            # JSON has no inf, nan
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            check_text(value, _spell(path))
            return value
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(item, (*path, i)) for i, item in enumerate(value)]}
        if kind in _MAPPINGS.values():
            return self._encode_mapping(value, path)
        if isinstance(value, Tensor):
            name, order = self._place(value, path), _layout(value)
            return {"$tensor": name} if order is None else {"$tensor": name, "order": order}
        if (array := _as_tensor(value)) is not None:
            return {"$array" if kind is np.ndarray else "$scalar": self._place(array, path)}
        raise TypeError(
            f"{_spell(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot"
            " hold. It holds None, bool, int, float, str, bytes, list, tuple, dict, tensors and"
            " NumPy arrays (no subclasses): convert it, or save its state_dict()."
        )

    def _encode_mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if isinstance(key, Tensor):
                raise TypeError(
                    f"{_spell(path)} has a tensor as a key, which cannot be told apart from others"
                    " after loading. For an optimizer, save optimizer.state_dict() instead of"
                    " optimizer.state."
                )
            if type(key) is str:
                check_text(key, _spell(path))
        if type(value) is dict and all(
            type(key) is str and not key.startswith("$") for key in value
        ):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        tag = next(tag for tag, mapping in _MAPPINGS.items() if type(value) is mapping)
        return {
            tag: [
                [self.encode(key, (*path, key)), self.encode(item, (*path, key))]
                for key, item in value.items()
            ]
        }


def unpack(tensors: Mapping[str, Tensor], document: Any) -> Any:
    """The value that `pack` took apart."""
    if isinstance(document, list):
        return [unpack(tensors, item) for item in document]
    if not isinstance(document, dict):
        return document
    tag = next(iter(document), "")
    if not tag.startswith("$"):
        return {key: unpack(tensors, item) for key, item in document.items()}
    content = document[tag]
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](
            {unpack(tensors, key): unpack(tensors, item) for key, item in content}
        )
    if tag == "$tensor" and "order" in document:
        order = document["order"]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return tensors[content].permute(order).contiguous().permute(inverse)
    match tag:
        case "$int":
            return int(content, 16)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "$bytes":
            return base64.b64decode(content)
        case "$tuple":
            return tuple(unpack(tensors, item) for item in content)
        case "$tensor":
            return tensors[content]
        case "$array":
            return tensors[content].numpy()
        case "$scalar":
            return tensors[content].numpy()[()]
    raise ValueError(f"unknown kind of value {tag!r}")


def _spell(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def check_text(text: str, where: str) -> None:
    """Refuse text that no file can hold; `where` is its place, for the message."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"{where} holds the text {text!a} with a lone surrogate, which no text file can hold."
            " Save it as bytes: os.fsencode(text)."
        )


def _as_tensor(value: Any) -> Tensor | None:
    """A NumPy array or scalar as a tensor, or None for anything else and for dtypes that torch does
    not know.
    """
    if type(value) is np.ndarray or isinstance(value, np.generic):
        with suppress(TypeError, ValueError):
            return torch.from_numpy(np.array(value, order="C"))
    return None


def _layout(tensor: Tensor) -> list[int] | None:
    """The order of the axes in memory, slowest first, where the tensor is dense but not
    contiguous.
    """
    if is_spread(tensor) or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.ndim), key=lambda axis: -tensor.stride()[axis])
    return order if tensor.permute(order).is_contiguous() else None


# Tensors


def differences(own: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]) -> str:
    """How the tensors of a model and of a checkpoint differ in name and shape, in words; empty
    where they do not.
    """
    found = {
        "not in the checkpoint": sorted(own.keys() - saved.keys()),
        "only in the checkpoint": sorted(saved.keys() - own.keys()),
        "of another shape": [
            f"{name} {tuple(saved[name])} → {tuple(own[name])}"
            for name in own
            if name in saved and saved[name] != own[name]
        ],
    }
    return "; ".join(f"{what}: {some(names, 3)}" for what, names in found.items() if names)


def check_tensor(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that the file cannot hold; `where` is its place, for the message."""
    plain = local(tensor).detach()
    if (
        type(plain) is not Tensor
        or plain.layout != torch.strided
        or plain.is_meta
        or plain.is_quantized
    ):
        kind = f"{type(plain).__name__}, {plain.layout}, {plain.device}"
        raise TypeError(
            f"{where} is a tensor without plain dense values ({kind}), which a checkpoint cannot"
            " hold. Convert it first: to_dense(), dequantize() or materialise it."
        )
    if plain.dtype not in DTYPES:
        raise TypeError(
            f"{where} has dtype {plain.dtype}, which a checkpoint cannot hold. "
            "Convert it first: a complex tensor with torch.view_as_real."
        )


def encode_tensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor. One that is spread over ranks is gathered
    when its turn comes: each of them must go through the file.

    The library's own writer either builds the whole file in memory or reports a full disk without
    its error code.
    """
    # Data of wide types first keeps every tensor aligned to its type; the header keeps the order it
    # was given.
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    offset, offsets = 0, {}
    for name in ordered:
        offsets[name] = [
            offset,
            offset := offset + tensors[name].numel() * tensors[name].element_size(),
        ]
    header = {
        name: {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets[name],
        }
        for name, tensor in tensors.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        if tensors[name].numel():
            plain = gathered(tensors[name].detach()).resolve_conj().resolve_neg().cpu().contiguous()
            # A tensor of one element counts as contiguous whatever its stride, but only stride 1
            # can be seen as bytes.
            yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def decode_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in the order of its header."""
    import safetensors  # here: a trainer that only writes does without the package

    # Not safetensors.torch.load, which did not know unsigned integers before version 0.6 and loses
    # the order.
    views = dict(safetensors.deserialize(data))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors = {}
    for name in header:
        raw, dtype = views[name]["data"], dtypes[views[name]["dtype"]]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(views[name]["shape"])
    return tensors
