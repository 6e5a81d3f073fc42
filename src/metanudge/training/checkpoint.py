"""Checkpoints that survive a crash at any instant and tell when they are damaged.

A checkpoint is a folder: one safetensors file per group of tensors, `state.json` for everything else, and
`manifest.json` with the size and sha256 of each file. Nothing is pickled, so loading a stranger's checkpoint runs none
of its code, and `model.safetensors` opens in any program that reads the format.

    store = CheckpointStore("runs/omniglot/checkpoints")
    store.save(
        step, {"model": model.state_dict()}, {"optimizer": optimizer.state_dict(), "rng": rng_state()}, best=improved
    )
    ...
    checkpoint = store.load()  # or store.load("best"), or store.load(300)
    model.load_state_dict(checkpoint.tensors["model"])
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    set_rng_state(checkpoint.state["rng"])

Four parts: values (`pack`, `unpack`), random states, one folder (`save`, `load`), many folders (`CheckpointStore`).
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import operator
import os
import random
import re
import struct
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "load",
    "pack",
    "rng_state",
    "save",
    "set_rng_state",
    "unpack",
]

VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; says which file, what is wrong with it and what to do.

    Attributes:
        file: the file or folder in question.
        alternative: the newest earlier intact checkpoint, as a name for `CheckpointStore.load`; None if there is none.
    """

    def __init__(self, file: Path, problem: str, fix: str, alternative: str | None = None) -> None:
        super().__init__(file, problem, fix, alternative)
        self.file, self.problem, self.fix, self.alternative = file, problem, fix, alternative

    def __str__(self) -> str:
        offer = f" Checkpoint {self.alternative!r} is intact: load that one." if self.alternative else ""
        return f"{self.file} {self.problem}. {self.fix}{offer}"


# --- Values: any nest of Python values, tensors and arrays ↔ flat tensors and JSON ----------------

# The dtypes a checkpoint can hold, by their names in a safetensors file.
_DTYPES = {
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
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$OrderedDict": OrderedDict, "$Counter": Counter}
_DEEPEST = 100


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested value into its tensors and a JSON document that says where they belong.

    Holds what optimizers, schedulers and random generators put into their states: None, bool, int, float, str, bytes,
    list, tuple, dict, OrderedDict, Counter (keys of any such type), dense tensors, NumPy arrays and scalars. `unpack`
    gives it back exactly: types, key types, order, every bit of every number, and the memory layout of tensors (a sum
    over a channels-last tensor rounds differently from one over its contiguous copy). Tensors lose their device (they
    come back on the CPU) and shared ones come back as separate copies. Anything else is refused with its place.

    Example:
        >>> tensors, document = pack({0: {"step": torch.tensor(3.0)}, "betas": (0.9, 0.999)})
        >>> document
        {'$dict': [[0, {'step': {'$tensor': '0:0/step'}}], ['betas', {'$tuple': [0.9, 0.999]}]]}
        >>> tensors
        {'0:0/step': tensor(3.)}
        >>> unpack(tensors, document)
        {0: {'step': tensor(3.)}, 'betas': (0.9, 0.999)}
    """
    tensors: dict[str, Tensor] = {}

    def place(tensor: Tensor, path: tuple[Any, ...]) -> str:
        _check_tensor(tensor, _spell(path))
        # The number makes the name unique: the keys 0 and "0" spell the same path.
        name = f"{len(tensors)}:{'/'.join(str(key) for key in path)}"
        tensors[name] = tensor
        return name

    def encode(value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > _DEEPEST:
            raise ValueError(
                f"{_spell(path[:3])}... is nested more than {_DEEPEST} levels deep. Does it contain itself? "
                "Save plain values, such as a state_dict()."
            )
        kind = type(value)  # exact types only: a subclass would come back as its base
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() < 64 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}  # JSON has no inf, nan
        if kind is str:
            _check_text(value, _spell(path))
            return value
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind is list:
            return [encode(item, (*path, i)) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [encode(item, (*path, i)) for i, item in enumerate(value)]}
        if kind in _MAPPINGS.values():
            return encode_mapping(value, path)
        if isinstance(value, Tensor):
            name, order = place(value, path), _layout(value)
            return {"$tensor": name} if order is None else {"$tensor": name, "order": order}
        if (array := _as_tensor(value)) is not None:
            return {"$array" if kind is np.ndarray else "$scalar": place(array, path)}
        raise TypeError(
            f"{_spell(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. "
            "It holds None, bool, int, float, str, bytes, list, tuple, dict, tensors and NumPy arrays (no subclasses): "
            "convert it, or save its state_dict()."
        )

    def encode_mapping(value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if isinstance(key, Tensor):
                raise TypeError(
                    f"{_spell(path)} has a tensor as a key, which cannot be told apart from others after loading. "
                    "For an optimizer, save optimizer.state_dict() instead of optimizer.state."
                )
            if type(key) is str:
                _check_text(key, _spell(path))
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, (*path, key)) for key, item in value.items()}
        tag = next(tag for tag, mapping in _MAPPINGS.items() if type(value) is mapping)
        return {tag: [[encode(key, (*path, key)), encode(item, (*path, key))] for key, item in value.items()]}

    document = encode(value, ())
    return tensors, document


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
        return _MAPPINGS[tag]({unpack(tensors, key): unpack(tensors, item) for key, item in content})
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


def _check_text(text: str, where: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"{where} holds the text {text!a} with a lone surrogate, which no text file can hold. Save it as bytes: os.fsencode(text)."
        )


def _check_tensor(tensor: Tensor, where: str) -> None:
    plain = tensor.detach()
    if type(plain) is not Tensor or plain.layout != torch.strided or plain.is_meta or plain.is_quantized:
        kind = f"{type(plain).__name__}, {plain.layout}, {plain.device}"
        raise TypeError(
            f"{where} is a tensor without plain dense values ({kind}), which a checkpoint cannot hold. "
            "Convert it first: to_dense(), dequantize(), full_tensor() or materialise it."
        )
    if plain.dtype not in _DTYPES:
        raise TypeError(
            f"{where} has dtype {plain.dtype}, which a checkpoint cannot hold. "
            "Convert it first: a complex tensor with torch.view_as_real."
        )


def _as_tensor(value: Any) -> Tensor | None:
    """A NumPy array or scalar as a tensor, or None for anything else and for dtypes that torch does not know."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        with suppress(TypeError, ValueError):
            return torch.from_numpy(np.array(value, order="C"))
    return None


def _layout(tensor: Tensor) -> list[int] | None:
    """The order of the axes in memory, slowest first, where the tensor is dense but not contiguous."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.ndim), key=lambda axis: -tensor.stride()[axis])
    return order if tensor.permute(order).is_contiguous() else None


# --- Random states --------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The states of the global random generators of Python, NumPy and torch (CPU and every GPU), as `save` takes them.

    A `torch.Generator` of your own is saved with `generator.get_state()`, a NumPy one with `rng.bit_generator.state`.

    Example:
        >>> before = rng_state()
        >>> first = torch.rand(2)
        >>> set_rng_state(before)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  the global state, since models may use it
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global random generators back; states of GPUs that this machine does not have are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)


# --- One checkpoint: a folder that appears complete or not at all ---------------------------------


class _Disk:
    """Every call that changes the disk, one system call a name: tests replace `_disk` to stop the program at each."""

    mkdir = staticmethod(os.mkdir)
    open = staticmethod(os.open)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)


_disk = _Disk()


@dataclass(frozen=True)
class Checkpoint:
    """What `load` returns: tensors by group and name (on the CPU), and the state as it was given to `save`."""

    folder: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Write one checkpoint to a new folder, which appears complete or, whatever happens, not at all.

    Args:
        folder: must not exist yet.
        step: number of outer steps done.
        tensors: groups of named tensors; each becomes `<group>.safetensors`, with these names, for other programs too.
        state: everything else that a resumed run needs, whatever `pack` can hold: optimizer, scheduler, random states.

    Needs host memory for the largest tensor, not for the whole file.

    Example:
        >>> import tempfile
        >>> runs = tempfile.TemporaryDirectory()
        >>> folder = Path(runs.name) / "final"
        >>> save(folder, step=7, tensors={"model": {"weight": torch.ones(2)}}, state={"best_loss": float("inf")})
        >>> sorted(path.name for path in folder.iterdir())
        ['manifest.json', 'model.safetensors', 'state.json']
        >>> load(folder).tensors["model"]["weight"], load(folder).state
        (tensor([1., 1.]), {'best_loss': inf})
        >>> runs.cleanup()
    """
    folder = Path(folder)
    # Everything that can be refused is refused before the disk is touched.
    groups = _check_groups(tensors)
    packed, document = pack(dict(state))
    if packed:
        groups["state"] = packed
    contents: dict[str, Iterable[bytes | memoryview]] = {f"{group}.safetensors": _safetensors(groups[group]) for group in groups}
    contents[STATE] = [json.dumps(document, allow_nan=False).encode()]
    new = folder.with_name(f".new-{folder.name}")
    with _os_errors_explained(folder):
        if folder.exists():
            raise FileExistsError(errno.EEXIST, "the folder exists already", str(folder))
        _make_folder(folder.parent)
        _remove(new)
        try:
            _disk.mkdir(new)
            files = {name: _write_file(new / name, chunks) for name, chunks in contents.items()}
            _write_file(new / MANIFEST, [_seal({"version": VERSION, "step": int(step), "files": files})])
            _sync_folder(new)
            _disk.rename(new, folder)
        except OSError:
            with suppress(OSError):
                _remove(new)
            raise
        _sync_folder(folder.parent)


def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify one checkpoint: every size, every sha256, every header, before anything is returned."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    _check_names(folder, manifest["files"])
    groups: dict[str, dict[str, Tensor]] = {}
    document: Any = None
    for name, expected in manifest["files"].items():
        data = _read_verified(folder / name, expected)
        try:
            if name == STATE:
                document = json.loads(data)
            else:
                groups[name.removesuffix(".safetensors")] = _tensors(data)
        except (ValueError, KeyError, safetensors.SafetensorError) as error:
            raise _damaged(folder / name, f"cannot be parsed ({error})") from error
    packed = groups.pop("state", {})
    try:
        state: dict[str, Any] = {**unpack(packed, document)}
    except Exception as error:
        # The checksums are right, so somebody wrote it this way; whatever goes wrong, it is no state of ours.
        raise _damaged(folder / STATE, f"does not describe a state ({error!r})") from error
    return Checkpoint(folder, manifest["step"], groups, state)


def _check_groups(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    for group, named in tensors.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", group) or group == "state":
            raise ValueError(
                f"The tensor group is called {group!r}; it names a file, so use letters, digits, '_' and '-' ('state' is taken)."
            )
        for name, tensor in named.items():
            where = f"tensors[{group!r}][{name!r}]"
            if not isinstance(name, str) or name == "__metadata__":
                raise TypeError(f"{where}: a tensor's name must be text other than '__metadata__'. Rename it.")
            _check_text(name, where)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{where} is a {type(tensor).__name__}, not a tensor. Put it into state instead.")
            _check_tensor(tensor, where)
    return dict(tensors)


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor.

    The library's own writer either builds the whole file in memory or reports a full disk without its error code.
    """
    # Data of wide types first keeps every tensor aligned to its type; the header keeps the order it was given.
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    offset, offsets = 0, {}
    for name in ordered:
        offsets[name] = [offset, offset := offset + tensors[name].numel() * tensors[name].element_size()]
    header = {
        name: {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets[name]}
        for name, tensor in tensors.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        if tensors[name].numel():
            plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy().data


def _tensors(data: bytes) -> dict[str, Tensor]:
    # Not safetensors.torch.load, which did not know unsigned integers before version 0.6 and loses the order.
    views = dict(safetensors.deserialize(data))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    tensors = {}
    for name in header:
        raw, dtype = views[name]["data"], dtypes[views[name]["dtype"]]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(views[name]["shape"])
    return tensors


def _write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file through to the disk; returns what the manifest says about it."""
    digest, size = hashlib.sha256(), 0
    try:
        descriptor = _disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                rest = memoryview(chunk)
                while rest:  # a system call may write less than it was given
                    rest = rest[_disk.write(descriptor, rest) :]
            _disk.fsync(descriptor)
        finally:
            _disk.close(descriptor)
    except OSError as error:
        error.filename = str(path)  # write and fsync know a number only
        raise
    return {"bytes": size, "sha256": digest.hexdigest()}


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: until then a power cut may undo a rename or bring a deleted file back."""
    if os.name == "nt":  # Windows cannot open folders; NTFS keeps its names in a journal
        return
    descriptor = _disk.open(folder, os.O_RDONLY)
    try:
        _disk.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems that cannot sync a folder say so
            raise
    finally:
        _disk.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        _disk.mkdir(folder)
        _sync_folder(folder.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            _remove(child)
        _disk.rmdir(path)
    elif path.exists() or path.is_symlink():
        _disk.unlink(path)


def _seal(document: dict[str, Any]) -> bytes:
    """JSON that carries the sha256 of itself: the manifest vouches for all files, so it must vouch for itself too."""
    body = json.dumps(document, indent=1)
    sealed = {**document, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return json.dumps(sealed, indent=1).encode() + b"\n"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(folder, "does not exist", "Check the path.")
    data = _read(path)
    try:
        manifest: dict[str, Any] = json.loads(data)
        del manifest["sha256"]
        # Written again it must give the same bytes: this compares the checksum and everything it does not cover.
        intact = _seal(manifest) == data
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise _damaged(path, "does not match its own sha256")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            path,
            f"has format version {manifest.get('version')}, and this metanudge reads version {VERSION}",
            "Load it with the metanudge that wrote it, or a newer one.",
        )
    return manifest


def _check_names(folder: Path, files: Mapping[str, Any]) -> None:
    # Hidden files are file managers' and network file systems' own and do no harm.
    found = {path.name for path in _children(folder) if not path.name.startswith(".")} - {MANIFEST}
    for name in sorted(files.keys() - found):
        raise _damaged(folder / name, "is missing")
    for name in sorted(found - files.keys()):
        raise CheckpointError(
            folder / name,
            "is not in the manifest: it does not belong to this checkpoint",
            "Move it out of the folder.",
        )


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(folder, f"cannot be listed ({error.strerror})", "Change its permissions.") from error


def _read_verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    data = _read(path)
    if len(data) != expected["bytes"]:
        raise _damaged(path, f"has {len(data)} bytes where the manifest says {expected['bytes']}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != expected["sha256"]:
        raise _damaged(path, f"has sha256 {digest[:12]}... where the manifest says {expected['sha256'][:12]}...")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except OSError as error:
        raise CheckpointError(
            path, f"cannot be read ({error.strerror})", "Check its permissions and the disk; nothing was loaded."
        ) from error


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(file, problem, "The checkpoint is damaged; nothing of it was loaded.")


_FIXES = {
    errno.ENOSPC: "Free some space, then save again.",
    errno.EDQUOT: "Free some of your quota, then save again.",
    errno.EACCES: "Choose a folder that you may write to, or change its permissions.",
    errno.EPERM: "Choose a folder that you may write to, or change its permissions.",
    errno.EROFS: "Choose a folder on a disk that is not read-only.",
    errno.EEXIST: "Choose another name, or remove what is there.",
}


@contextmanager
def _os_errors_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            Path(error.filename or folder),
            f"could not be written ({error.strerror}); earlier checkpoints are untouched",
            _FIXES.get(error.errno or 0, "Check the disk and the path, then save again."),
        ) from error


# --- Many checkpoints: the last, the best, and no more than wanted --------------------------------


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a store, as its folder's name tells it."""

    folder: Path
    number: int  # saves are counted from 1; the highest is the last
    step: int
    best: bool  # whether it was the best so far when it was saved

    @property
    def name(self) -> str:
        """The folder's name, which `CheckpointStore.load` accepts."""
        return self.folder.name


# Which checkpoint is the last and which the best stands in the folders' names, and in them alone. A new folder gets its
# name by one rename, so both change at one instant, together with the data: pointer files or symbolic links would need
# instants of their own, could point at what is gone, and could be damaged (links also get lost in copies and archives).
# Counting the saves keeps the names unique when a run goes back to an earlier step and comes by the same one again.
_NAME = re.compile(r"save-(?P<number>\d+)-step-(?P<step>\d+)(?P<best>-best)?")
_LEFTOVER = re.compile(rf"\.(new|old)-{_NAME.pattern}")


class CheckpointStore:
    """The checkpoints of one run in one folder: `last`, `best`, and the newest few.

    A crash, a kill or a power cut at any instant leaves the checkpoints of before or those of after a save, never
    less; what it leaves behind is removed by the next save. One process may write to a store at a time, others may
    read.

    Args:
        root: the folder; made by the first save.
        keep: how many of the newest checkpoints to keep, besides the best. With 2 or more, one that turns out to be
            damaged has an earlier one to fall back on.

    Example:
        >>> import tempfile
        >>> runs = tempfile.TemporaryDirectory()
        >>> store = CheckpointStore(runs.name, keep=2)
        >>> for step, improved in [(100, True), (200, False), (300, False)]:
        ...     store.save(step, {"model": {"weight": torch.full((2,), step)}}, {"loss": 1 / step}, best=improved)
        >>> [entry.name for entry in store.list()]
        ['save-000001-step-100-best', 'save-000002-step-200', 'save-000003-step-300']
        >>> store.load().step, store.load("best").step, store.load(200).tensors["model"]["weight"]
        (300, 100, tensor([200, 200]))
        >>> runs.cleanup()
    """

    def __init__(self, root: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"CheckpointStore got keep={keep}, but must keep at least the last checkpoint. Try 2.")
        self.root = Path(root)
        self.keep = keep

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        best: bool = False,
    ) -> None:
        """Add a checkpoint (see `save` above), then remove those that are no longer wanted.

        Raises `CheckpointError` if it cannot be written; the earlier ones are then untouched.
        """
        step = operator.index(step)  # a step of 3.0 or True would give a name that is never found again
        if step < 0:
            raise ValueError(f"Checkpoints count the outer steps done, got step={step}. Give a number ≥ 0.")
        self._remove_leftovers()
        number = max((entry.number for entry in self.list()), default=0) + 1
        name = f"save-{number:06d}-step-{step}" + ("-best" if best else "")
        save(self.root / name, step=step, tensors=tensors, state=state)
        self._prune()

    def load(self, name: str | int = "last") -> Checkpoint:
        """The checkpoint called `"last"`, `"best"`, by its folder's name, or by its step (the newest save of it).

        Raises `CheckpointError` if any file of it is damaged, with an intact one to load instead as `.alternative`.
        """
        entry = self._find(name)
        try:
            checkpoint = load(entry.folder)
            if checkpoint.step != entry.step:
                raise _damaged(entry.folder, f"holds step {checkpoint.step}: it was renamed")
        except CheckpointError as error:
            error.alternative = self._intact(besides=entry)
            raise
        return checkpoint

    def list(self) -> tuple[Entry, ...]:
        """All checkpoints, oldest save first; names only, nothing is read or verified."""
        entries = []
        for folder in _children(self.root):
            if match := _NAME.fullmatch(folder.name):
                entries.append(Entry(folder, int(match["number"]), int(match["step"]), match["best"] is not None))
        return tuple(sorted(entries, key=lambda entry: entry.number))

    def _find(self, name: str | int) -> Entry:
        entries = self.list()
        for entry in reversed(entries):
            if name == "last" or (name == "best" and entry.best) or name in (entry.name, entry.step):
                return entry
        found = ", ".join(entry.name for entry in entries) or "none yet"
        raise CheckpointError(
            self.root,
            f"has no checkpoint {name!r}",
            f"It has: {found}.",
            alternative=self._intact(besides=None),
        )

    def _intact(self, *, besides: Entry | None) -> str | None:
        """The newest checkpoint that loads and is earlier than the given one, else the newest that loads."""
        others = [entry for entry in reversed(self.list()) if entry != besides]
        if besides is not None:
            others.sort(key=lambda entry: entry.number > besides.number)
        for entry in others:
            with suppress(CheckpointError):
                load(entry.folder)
                return entry.name
        return None

    def _prune(self) -> None:
        entries = self.list()
        wanted = {*entries[-self.keep :], *[entry for entry in entries if entry.best][-1:]}
        unwanted = [entry for entry in entries if entry not in wanted]
        try:
            for entry in unwanted:
                # Renamed first, and for good: a folder that is being emptied must not look like a checkpoint.
                _disk.rename(entry.folder, self.root / f".old-{entry.name}")
            if unwanted:
                _sync_folder(self.root)
        except OSError as error:
            _warn_left_behind(self.root, error)
            return
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what crashed saves began to write and what earlier saves began to remove."""
        for path in _children(self.root):
            if _LEFTOVER.fullmatch(path.name):
                try:
                    _remove(path)
                except OSError as error:
                    _warn_left_behind(path, error)


def _warn_left_behind(path: Path, error: OSError) -> None:
    # No reason to stop a run: the checkpoint itself is safe, and the next save tries again.
    warnings.warn(
        f"{path} could not be removed ({error.strerror}) and takes up space until the next save tries again.",
        stacklevel=2,
    )
