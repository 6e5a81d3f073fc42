"""One safetensors file: named tensors ↔ its bytes, in the order they were given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

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


def check_tensor(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that the file cannot hold; `where` is its place, for the message."""
    plain = tensor.detach()
    if (
        type(plain) is not Tensor
        or plain.layout != torch.strided
        or plain.is_meta
        or plain.is_quantized
    ):
        kind = f"{type(plain).__name__}, {plain.layout}, {plain.device}"
        raise TypeError(
            f"{where} is a tensor without plain dense values ({kind}), which a checkpoint cannot"
            " hold. Convert it first: to_dense(), dequantize(), full_tensor() or materialise it."
        )
    if plain.dtype not in DTYPES:
        raise TypeError(
            f"{where} has dtype {plain.dtype}, which a checkpoint cannot hold. "
            "Convert it first: a complex tensor with torch.view_as_real."
        )


def encode_tensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor.

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
            plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
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
