"""Damage: whatever happened to a file, it is refused, named, and an intact checkpoint is
offered.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoints import is_sample, sample, saved
from metanudge.training.checkpoint import CheckpointError, load, save
from metanudge.training.checkpoint.files import seal


def damage(file: Path, kind: str, rng: random.Random) -> None:
    data = file.read_bytes()
    if kind == "deleted":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "grown":
        file.write_bytes(data + rng.randbytes(rng.randrange(1, 9)))
    else:
        position = rng.randrange(len(data))
        flipped = bytes([data[position] ^ (1 << rng.randrange(8))])
        file.write_bytes(data[:position] + flipped + data[position + 1 :])


@pytest.mark.parametrize("block", range(4))
def test_a_hundred_damaged_checkpoints_are_all_refused(block: int, tmp_path: Path) -> None:
    store = saved(tmp_path / "run")
    files = sorted(store.load().folder.iterdir())
    assert [file.name for file in files] == [
        "ema.safetensors", "manifest.json", "model.safetensors", "state.json", "state.safetensors",
    ]  # fmt: skip
    originals = {file: file.read_bytes() for file in files}
    for case in range(25 * block, 25 * (block + 1)):
        rng = random.Random(case)
        file = files[case % len(files)]
        damage(file, ["truncated", "flipped", "deleted", "grown"][case // len(files) % 4], rng)
        for name in ("last", 3, "save-000003-step-3"):
            with pytest.raises(CheckpointError) as caught:
                store.load(name)
            assert caught.value.file == file
            assert str(file) in str(caught.value)
            assert caught.value.alternative == "save-000002-step-2"
            assert "'save-000002-step-2' is intact" in str(caught.value)
        assert is_sample(store.load(caught.value.alternative), 2)
        assert is_sample(store.load("best"), 1)
        file.write_bytes(originals[file])
    assert is_sample(store.load(), 3)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    save(tmp_path / "one", step=3, **sample(3))
    file = tmp_path / "one" / "manifest.json"
    data = file.read_bytes()
    for position in range(len(data)):
        for bit in (0, 5, 7):  # another digit, another case, not UTF-8
            file.write_bytes(
                data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]
            )
            with pytest.raises(
                CheckpointError, match=r"manifest\.json does not match its own sha256"
            ):
                load(tmp_path / "one")


def test_the_alternative_skips_what_is_damaged_too_and_may_be_newer(tmp_path: Path) -> None:
    store = saved(tmp_path, steps="1 2 3 4", keep=4)
    (store.load(3).folder / "state.json").unlink()
    (store.load(4).folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes where the manifest says") as caught:
        store.load()
    assert caught.value.alternative == "save-000002-step-2"
    shutil.rmtree(store.root / "save-000002-step-2")
    (store.load(1).folder / "manifest.json").unlink()
    store.save(5, **sample(5))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing") as caught:
        store.load(1)
    assert caught.value.alternative == "save-000005-step-5"
    for entry in store.list():
        (entry.folder / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        store.load()
    assert caught.value.alternative is None


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    (folder / "manifest.json").write_bytes(seal({**manifest, **changes}))


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path)
    rewrite_manifest(store.load().folder, version=2)
    with pytest.raises(
        CheckpointError, match=r"format version 2.*reads version 1.*newer"
    ) as caught:
        store.load()
    assert caught.value.alternative == "save-000002-step-2"


SIZED = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": None}, {"step": None}, {"files": []}, {"files": {"state.json": None}},
        {"files": {"state.json": {}}},
        {"files": {"state.json": SIZED | {"bytes": -1}}},
        {"files": {"state.json": SIZED | {"bytes": "1"}}},
        {"files": {"state.json": SIZED | {"sha256": 5}}}, {"step": "3"}, {"step": -3},
        {"step": True}, {"step": 3.0}, {"step": [3]},
    ],
)  # fmt: skip
def test_a_manifest_that_lacks_something_is_refused_although_its_seal_is_right(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    store = saved(tmp_path)
    folder = store.load().folder
    manifest = json.loads((folder / "manifest.json").read_bytes()) | changes
    del manifest["sha256"]
    (folder / "manifest.json").write_bytes(
        seal({key: value for key, value in manifest.items() if value is not None})
    )
    with pytest.raises(
        CheckpointError, match=r"manifest\.json does not say which step and files"
    ) as caught:
        store.load()
    assert caught.value.alternative == "save-000002-step-2"


@pytest.mark.parametrize(
    "document",
    [b"[" * 100_000, b'{"a":' * 100_000, b"5", b"[]", b'"sha256"', b'{"sha256": NaN}', b""],
)
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path: Path, document: bytes) -> None:
    store = saved(tmp_path)
    (store.load().folder / "manifest.json").write_bytes(document)
    with pytest.raises(CheckpointError, match=r"manifest\.json does not match its own sha256"):
        store.load()


def test_strange_files_and_renamed_folders_are_refused(tmp_path: Path) -> None:
    store = saved(tmp_path)
    folder = store.load().folder
    (folder / ".DS_Store").write_bytes(b"a file manager was here")
    assert is_sample(store.load(), 3)
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"other\.safetensors is not in the manifest"):
        store.load()
    (folder / "other.safetensors").unlink()
    folder.rename(tmp_path / "save-000009-step-7")
    with pytest.raises(CheckpointError, match="holds step 3: it was renamed"):
        store.load()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("model.safetensors", b'\x08\0\0\0\0\0\0\0{"a":1} ', "cannot be parsed"),
        ("model.safetensors", b"", "cannot be parsed"),
        ("state.json", b"{", "cannot be parsed"),
        ("state.json", b"[" * 100_000, "cannot be parsed"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "cannot be parsed"),
        ("state.json", b'{"a": {"$tensor": "gone"}}', "does not describe a state"),
        (
            "state.json",
            b'{"a": {"$pickle": ""}}',
            "does not describe a state.*unknown kind of value",
        ),
        ("state.json", b"[]", "does not describe a state"),
    ],
)
def test_wrong_content_with_the_right_checksums_is_refused(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    save(tmp_path / "one", step=1, **sample(1))
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_bytes())
    (tmp_path / "one" / name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    rewrite_manifest(
        tmp_path / "one", files={**manifest["files"], name: {"bytes": len(data), "sha256": digest}}
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path / "one")
    assert caught.value.file.name == name
