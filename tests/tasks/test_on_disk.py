"""Examples that stay on disk give the tasks of those in memory, bit for bit, and take none of
it.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metanudge.tasks import Labelled, on_disk
from metanudge.tasks.on_disk import OnDisk, read_examples, write_examples
from metanudge.tasks.standardise import Standardisation
from trained_runs import write_images

SMALL = {"ways": 2, "shots": 1, "queries": 2, "splits": (0.5, 0.25, 0.25)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "examples"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures", list("abcdefgh"), 4)


def same(one: Labelled, other: Labelled) -> bool:
    batches = [[s.batch(range(9), split) for split in ("train", "val", "test")]
               for s in (one, other)]  # fmt: skip
    return all(
        torch.equal(a, b)
        for mine, theirs in zip(*batches, strict=True)
        for part in ("support", "query")
        for a, b in zip(getattr(mine.stacks[0], part), getattr(theirs.stacks[0], part), strict=True)
    )


def test_a_folder_of_pictures_on_disk_is_the_one_in_memory(pictures: Path, cache: Path) -> None:
    eager = Labelled.from_folder(pictures, on_disk=False, **SMALL)
    lazy = Labelled.from_folder(pictures, on_disk=True, **SMALL)
    assert isinstance(lazy._examples, OnDisk)
    assert same(eager, lazy)
    assert same(eager, lazy.to("cpu"))
    assert eager.fingerprint() == lazy.fingerprint()
    assert eager.input_shape == lazy.input_shape == (1, 20, 20)
    (file,) = cache.iterdir()
    assert f"kept decoded in {file}" in lazy.note


def test_a_folder_is_decoded_once(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Labelled.from_folder(pictures, on_disk=True, **SMALL)
    monkeypatch.setattr("metanudge.tasks.read_folder.write_examples", None)
    assert same(first, Labelled.from_folder(pictures, on_disk=True, **SMALL))
    monkeypatch.undo()
    monkeypatch.setenv("METANUDGE_CACHE", str(cache.parent))
    Image.fromarray(np.zeros((20, 20), np.uint8)).save(pictures / "a" / "0.png")
    changed = Labelled.from_folder(pictures, on_disk=True, **SMALL)
    assert same(changed, Labelled.from_folder(pictures, on_disk=False, **SMALL))
    assert not same(first, changed), "and the first one still has its file, which has no name now"
    assert len(list(cache.iterdir())) == 1
    Labelled.from_folder(pictures, on_disk=True, image_size=10, **SMALL)
    assert len(list(cache.iterdir())) == 2, "another size stays beside it"


def test_large_sets_stay_on_disk_by_themselves(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 * 4 * 20 * 20
    monkeypatch.setattr(on_disk, "LARGE", size)
    assert not isinstance(Labelled.from_folder(pictures, **SMALL)._examples, OnDisk)
    monkeypatch.setattr(on_disk, "LARGE", size - 1)
    assert isinstance(Labelled.from_folder(pictures, **SMALL)._examples, OnDisk)


def test_a_damaged_file_is_made_anew(pictures: Path, cache: Path) -> None:
    whole = Labelled.from_folder(pictures, on_disk=True, **SMALL)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    cuts = [good[:cut] for cut in (0, 5, len(good) // 2, len(good) - 1)]
    flips = [
        good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        for place in rng.integers(8 * 4 * 20 * 20, size=20)
    ]
    for damaged in [*cuts, *flips, b"nothing of ours", good + b"more"]:
        file.unlink()  # what is mapped stays as it is
        file.write_bytes(damaged)
        assert read_examples(file) is None
    assert same(whole, Labelled.from_folder(pictures, on_disk=True, **SMALL))
    assert file.read_bytes() == good


def test_a_broken_picture_is_named_and_leaves_nothing(pictures: Path, cache: Path) -> None:
    (pictures / "e" / "2.png").write_bytes((pictures / "e" / "2.png").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"e/2\.png cannot be read as an example"):
        Labelled.from_folder(pictures, on_disk=True, image_size=20, grey=True, **SMALL)
    assert not list(cache.iterdir())


def test_a_disk_that_takes_no_more_is_named(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ValueError, match=r"12,800 bytes, and 1,000 are free.*METANUDGE_CACHE"):
        Labelled.from_folder(pictures, on_disk=True, **SMALL)
    assert not list(cache.iterdir())
    cache.rmdir()
    cache.write_text("in the way")
    with pytest.raises(ValueError, match="on_disk=false"):
        Labelled.from_folder(pictures, on_disk=True, **SMALL)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bool", "int16", "uint16", "uint8"]
)
@pytest.mark.parametrize("mode", ["r", "c"])
def test_mapped_arrays_stay_where_they_are(tmp_path: Path, dtype: str, mode: str) -> None:
    x = (np.random.default_rng(0).normal(size=(40, 3)) * 100).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
    y = np.arange(40) % 8
    lazy, eager = Labelled(mapped, y, **SMALL), Labelled(x, y, **SMALL)
    assert isinstance(lazy._examples, OnDisk)
    assert np.shares_memory(lazy._examples.data.numpy(), mapped)
    assert same(eager, lazy)
    if dtype.startswith(("float", "bool")):
        scaled = Labelled(mapped, y, standardise=True, **SMALL)
        assert isinstance(scaled._examples, OnDisk)
        assert scaled.standardisation == Labelled(x, y, standardise=True, **SMALL).standardisation
        assert same(scaled, Labelled(x, y, standardise=True, **SMALL))


def test_what_mapped_arrays_may_not_hold(tmp_path: Path) -> None:
    x = np.ones((40, 3))
    x[23, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match="NaN or infinity in 1 examples, the first is number 23"):
        Labelled(np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(40) % 8, **SMALL)
    x[23, 1] = 1e300
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"1e\+300, which are infinite in torch.float32"):
        Labelled(np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(40) % 8, **SMALL)


def test_statistics_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part to the bit what NumPy says; in more, to the rounding of one sum more each."""
    x = np.random.default_rng(0).normal(5.0, 3.0, size=(1000, 7))
    x[:, 3] = 2.5
    whole = Standardisation.of(x)
    power = np.frexp(np.abs(x).max(axis=0))[1]
    z = np.ldexp(x, -power)
    assert whole.mean == tuple(np.ldexp(z.mean(axis=0), power).tolist())
    scale = np.ldexp(z.std(axis=0), power)
    scale[3] = 1.0
    assert whole.scale == tuple(scale.tolist())
    monkeypatch.setattr("metanudge.tasks.standardise._AT_ONCE", 7 * 64)
    parts = Standardisation.of(x)
    # 1000 additions of numbers of the size of the mean round to 1000 · 2⁻⁵³ of it at the most
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1000 * 2**-53)
    np.testing.assert_allclose(parts.scale, whole.scale, rtol=2000 * 2**-53 * (5 / 3) ** 2)


def test_files_of_examples_keep_what_stands_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "new" / "examples.bin"
    rows = [torch.full((2, 3), float(n)) for n in range(4)]
    write_examples(file, rows, 4, lambda: {"fingerprint": "abc"})
    found = read_examples(file)
    assert found is not None
    held, about = found
    assert held.shape == (4, 2, 3)
    assert torch.equal(held.rows(torch.tensor([3, 1])), torch.stack([rows[3], rows[1]]))
    assert about["fingerprint"] == "abc"
    with pytest.raises(
        ValueError, match=r"Example 1 is torch.int64 and the first is torch.float32"
    ):
        write_examples(file, [rows[0], rows[1].long()], 2, dict)
    assert os.listdir(file.parent) == ["examples.bin"]
    assert read_examples(tmp_path / "none") is None


# --- Memory
# --------------------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of this process that belong to no file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Anonymous: +([0-9]+) kB", text)[1]) * 1024  # type: ignore[index]


def most_used(folder: Path, on_disk: bool) -> int:
    """The most that reading a folder and drawing tasks takes beyond what was there."""
    ended, before = threading.Event(), anonymous()
    seen = [before]

    def watch() -> None:
        while not ended.wait(0.01):
            seen.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        source = Labelled.from_folder(folder, on_disk=on_disk, ways=2, shots=1, queries=2)
        for _ in source.batches(size=1, count=100):
            pass
    finally:
        ended.set()
        thread.join()
    return max(*seen, anonymous()) - before


def measure(root: str) -> None:
    """What both ways use, printed; in a process of its own, where nothing was freed before."""
    for lazily in (True, False):
        most_used(Path(root, "small"), lazily)  # whatever the first use takes
    gc.collect()
    print(most_used(Path(root, "large"), True), most_used(Path(root, "large"), False))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux counts it so")
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """Anonymous memory, what the system cannot take back: of 32 MiB of pictures at most half is
    used when they are on disk, all of it when they are not.
    """
    rng, size = np.random.default_rng(0), 20 * 80 * 3 * 84 * 84
    for root, each in (("small", 5), ("large", 80)):
        for number in range(20):
            (tmp_path / root / f"c{number}").mkdir(parents=True)
            for place in range(each):
                pixels = rng.integers(0, 256, (84, 84, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / root / f"c{number}" / f"{place}.ppm")
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]; import test_on_disk as t; t.measure(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent), *sys.path],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    on_disk_used, in_memory_used = map(int, done.stdout.split())
    assert on_disk_used < size / 2
    assert in_memory_used > size
