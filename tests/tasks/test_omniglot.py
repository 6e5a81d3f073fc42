from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import re
import stat
import threading
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metanudge.tasks import Omniglot, omniglot_files
from metanudge.tasks.omniglot import random_split, vinyals_split
from metanudge.tasks.omniglot_files import CHARACTERS, load_omniglot, read_part

FEW = {"images_background": 3, "images_evaluation": 2}


@functools.cache
def png(seed: int, size: tuple[int, int] = (105, 105)) -> bytes:
    ink = np.random.default_rng(seed).integers(0, 2, size, dtype=bool)
    file = io.BytesIO()
    Image.fromarray(ink).save(file, "PNG")
    return file.getvalue()


def entries(part: str) -> dict[str, bytes]:
    first = 0 if part == "images_background" else 500
    return {
        f"{part}/Alphabet_of_{part[7]}/character{c + 1:02d}/{c + 1:04d}_{d + 1:02d}.png": png(
            first + 20 * c + d
        )
        for c in range(FEW[part])
        for d in range(20)
    }


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_folder(root: Path, files: dict[str, bytes]) -> None:
    for name in sorted(files, reverse=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(files[name])


def write_all(root: Path, *, zipped: tuple[bool, bool] = (True, True)) -> Path:
    for part, as_zip in zip(FEW, zipped, strict=True):
        if as_zip:
            write_zip(root / f"{part}.zip", entries(part))
        else:
            write_folder(root, entries(part))
    return root


@pytest.fixture
def few(monkeypatch):
    """Pretend that Omniglot has five characters."""
    monkeypatch.setattr(omniglot_files, "CHARACTERS", FEW)


# --- the real data
# ------------------------------------------------------------------------------------------------


def test_the_archives_give_exactly_the_published_images(data, tmp_path, cache, monkeypatch):
    published = np.load(data / "omniglot" / "omniglot_28.npz")
    chosen = published["class_names"][::12]  # shrinking all 32,460 images takes ten seconds
    counts = {}
    for part in FEW:
        with zipfile.ZipFile(data / "omniglot" / f"{part}.zip") as archive:
            wanted = [
                n
                for n in archive.namelist()
                if n.endswith(".png") and n.split("/", 1)[1].rsplit("/", 1)[0] in chosen
            ]
            write_zip(tmp_path / f"{part}.zip", {name: archive.read(name) for name in wanted})
        counts[part] = len(wanted) // 20
    assert sum(counts.values()) == len(chosen) == 136
    monkeypatch.setattr(omniglot_files, "CHARACTERS", counts)
    made = load_omniglot(tmp_path)
    assert made.names == tuple(chosen)
    assert np.array_equal(made.images, published["images"][::12])
    assert len(list((cache / "omniglot").iterdir())) == 1
    monkeypatch.setattr(omniglot_files, "read_part", None)  # from now on the cached result must do
    assert np.array_equal(load_omniglot(tmp_path).images, made.images)


def test_the_whole_archives_are_complete_and_in_order(data, monkeypatch):
    monkeypatch.setattr(
        omniglot_files, "_shrunk", lambda content, where: np.zeros((28, 28), np.uint8)
    )
    names = [
        read_part(data / "omniglot" / f"{part}.zip", count).names
        for part, count in CHARACTERS.items()
    ]
    assert sum(names, ()) == tuple(np.load(data / "omniglot" / "omniglot_28.npz")["class_names"])


def test_splits_equal_the_published_lists(data):
    names = np.load(data / "omniglot" / "omniglot_28.npz")["class_names"].tolist()

    def listed(kind: str, split: str) -> list[str]:
        return (data / "omniglot" / kind / f"{split}.txt").read_text().split()

    vinyals, random = vinyals_split(), random_split(names, seed=1)
    source, upright = Omniglot(root=data), Omniglot(root=data, rotations=False)
    for split in ("train", "val", "test"):
        assert sorted(random[split]) == sorted(listed("splits_random", split))
        assert sorted(source.classes(split)) == sorted(listed("splits_vinyals", split))
        assert set(vinyals[split]) == {
            line.rsplit("/", 1)[0] for line in listed("splits_vinyals", split)
        }
        assert set(upright.classes(split)) == set(vinyals[split])


def test_tasks_hold_the_images_of_their_classes(data):
    published = np.load(data / "omniglot" / "omniglot_28.npz")
    source = Omniglot(ways=3, shots=1, queries=2, root=data / "omniglot", dtype=torch.float64)
    assert (source.num_outputs, source.input_shape, source.kind) == (
        3,
        (1, 28, 28),
        "classification",
    )
    images = published["images"][published["vinyals_split"] == "test"]
    known = {
        np.rot90(image, turn).tobytes(): (c, turn)
        for c, own in enumerate(images)
        for image in own
        for turn in range(4)
    }
    turns = Counter()
    for task in source.batch(range(40), "test"):
        x, y = (torch.cat(parts) for parts in zip(task.support, task.query, strict=True))
        drawn = [known[(one * 255).round().byte().numpy().tobytes()] for one in x]
        by_label = [
            {own for own, label in zip(drawn, y.tolist(), strict=True) if label == wanted}
            for wanted in range(3)
        ]
        assert [len(own) for own in by_label] == [1, 1, 1]
        assert len(set.union(*by_label)) == 3
        turns.update(turn for _, turn in set.union(*by_label))
    assert set(turns) == {0, 1, 2, 3}


def test_rotated_classes_are_named_after_their_turn(data):
    source = Omniglot(ways=2, shots=1, queries=1, root=data)
    name = source.classes("train")[5]
    assert name.endswith("rot090")
    pool = source._pools["train"]
    upright, turned = (source._examples[pool.rows[pool.starts[i] + 7]][0] for i in (4, 5))
    # counter-clockwise, as Pillow's rotate
    assert torch.equal(torch.rot90(upright, 1, (0, 1)), turned)


def test_the_environment_names_the_data_folder(data, monkeypatch):
    monkeypatch.setenv("METANUDGE_DATA", str(data))
    source = Omniglot(split_by="random", download=False)
    assert (
        repr(source) == "Omniglot(ways=5, shots=1, queries=15, seed=0, input_shape=(1, 28, 28),"
        " classes=4400/400/1692, device='cpu')"
    )
    x, y = source.task(0).query
    assert (x.shape, x.dtype, y.shape) == ((75, 1, 28, 28), torch.float32, (75,))
    assert x.min() == 0
    assert x.max() == 1
    assert Omniglot(split_by="random", split_seed=2).classes("val") != source.classes("val")
    with pytest.raises(ValueError, match=r"has 20 examples, but shots=6 and queries=15 need 21"):
        Omniglot(shots=6)


# --- where it is found
# --------------------------------------------------------------------------------------------


def test_zips_and_folders_give_the_same(few, tmp_path):
    results = [
        load_omniglot(write_all(tmp_path / f"{zipped}", zipped=zipped))
        for zipped in ((True, True), (False, False), (True, False))
    ]
    for result in results:
        assert result.names == results[0].names
        assert np.array_equal(result.images, results[0].images)
    assert results[0].names[:3] == tuple(f"Alphabet_of_b/character0{i}" for i in (1, 2, 3))
    image = Image.open(io.BytesIO(png(21))).convert("L").resize((28, 28), Image.Resampling.LANCZOS)
    assert np.array_equal(results[0].images[1, 1], 255 - np.asarray(image))


def test_places_are_searched_in_order(few, tmp_path, monkeypatch, cache):
    with pytest.raises(
        FileNotFoundError, match=rf"not found in {cache}/omniglot.*Allow download=True"
    ):
        load_omniglot(download=False)
    write_all(cache / "omniglot")
    names = load_omniglot(download=False).names
    monkeypatch.setenv("METANUDGE_DATA", str(tmp_path / "data"))
    # the data folder has no Omniglot: the cache still serves
    assert load_omniglot(download=False).names == names
    write_all(tmp_path / "data" / "omniglot")
    seen = []
    monkeypatch.setattr(omniglot_files, "_from_parts", lambda parts: seen.extend(parts.values()))
    load_omniglot(download=False)
    write_all(tmp_path / "root", zipped=(False, True))
    load_omniglot(tmp_path / "root")
    wanted = ["data/omniglot/images_background.zip", "data/omniglot/images_evaluation.zip"]
    wanted += ["root/images_background", "root/images_evaluation.zip"]
    assert seen == [tmp_path / name for name in wanted]


def test_a_root_without_the_data_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"not found in .*nowhere, .*omniglot_28.npz, or images_background"
    ):
        Omniglot(root=tmp_path / "nowhere")


def test_one_part_alone_is_refused(few, tmp_path):
    write_zip(tmp_path / "images_background.zip", entries("images_background"))
    with pytest.raises(
        FileNotFoundError, match="holds images_background but not images_evaluation"
    ):
        load_omniglot(tmp_path)


def test_a_processed_file_is_checked(few, tmp_path):
    good = {"images": np.zeros((5, 20, 28, 28), np.uint8), "class_names": np.array(list("abcde"))}
    np.savez(tmp_path / "omniglot_28.npz", **good)
    assert (
        load_omniglot(tmp_path).names
        == load_omniglot(tmp_path / "omniglot_28.npz").names
        == tuple("abcde")
    )
    for bad in (
        {"images": good["images"][:4]},
        {"images": good["images"].astype(float)},
        {"class_names": np.zeros(4)},
    ):
        np.savez(tmp_path / "omniglot_28.npz", **{**good, **bad})
        with pytest.raises(
            ValueError, match=r"omniglot_28.npz is damaged or is not the processed Omniglot set"
        ):
            load_omniglot(tmp_path)
    (tmp_path / "omniglot_28.npz").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="is damaged"):
        load_omniglot(tmp_path)


def test_the_cached_result_is_made_anew_when_it_is_damaged_or_the_source_changes(
    few, tmp_path, cache
):
    root = write_all(tmp_path / "root", zipped=(True, False))
    first = load_omniglot(root).images
    (cached,) = (cache / "omniglot").iterdir()
    cached.write_bytes(cached.read_bytes()[:1000])
    assert np.array_equal(load_omniglot(root).images, first)
    changed = root / "images_evaluation" / "Alphabet_of_e" / "character01" / "0001_01.png"
    changed.write_bytes(png(999))
    os.utime(changed, (1, 1))
    assert not np.array_equal(load_omniglot(root).images, first)


def test_renamed_characters_are_refused_for_the_published_split(few, tmp_path):
    with pytest.raises(
        ValueError, match=r"has no character 'Alphabet_of_the_Magi/character01' \(1623 of.*'random'"
    ):
        Omniglot(root=write_all(tmp_path))


def test_an_unknown_split_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match=r"split_by='vinyal'. Did you mean 'vinyals'"):
        Omniglot(split_by="vinyal", download=False)


# --- archives that are not to be trusted
# --------------------------------------------------------------------------


def test_wrong_counts_are_refused(tmp_path):
    files = entries("images_background")
    path = write_zip(tmp_path / "some.zip", files)
    with pytest.raises(ValueError, match=r"some.zip holds 3 characters, expected 4"):
        read_part(path, 4)
    files.popitem()
    with pytest.raises(
        ValueError, match=r"fewer.zip holds 19 images of Alphabet_of_b/character03, expected 20"
    ):
        read_part(write_zip(tmp_path / "fewer.zip", files), 3)
    with pytest.raises(ValueError, match="holds 0 characters"):
        read_part(write_zip(tmp_path / "empty.zip", {}), 3)


def test_foreign_files_are_passed_over(tmp_path):
    files = entries("images_background")
    junk = {
        "__MACOSX/images_background/Alphabet_of_b/character01/._0001_01.png": b"junk",
        "images_background/.DS_Store": b"junk",
        "images_background/Alphabet_of_b/readme.txt": b"junk",
    }
    assert len(read_part(write_zip(tmp_path / "a.zip", files | junk), 3).names) == 3


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("../outside.png", "a path that leaves its folder"),
        ("images_background/../../outside.png", "a path that leaves its folder"),
        ("images_background\\..\\outside.png", "a path that leaves its folder"),
        ("/etc/passwd", "an absolute path"),
        ("C:/windows/system.ini", "an absolute path"),
    ],
)
def test_entries_that_lead_outside_are_refused(tmp_path, entry, reason):
    path = write_zip(tmp_path / "evil.zip", entries("images_background") | {entry: b"x"})
    with pytest.raises(
        ValueError, match=rf"evil.zip was refused: its entry .* is {reason}"
    ) as caught:
        read_part(path, 3)
    assert repr(entry) in str(caught.value)


def test_symbolic_links_and_giant_entries_are_refused(tmp_path, monkeypatch):
    path = write_zip(tmp_path / "link.zip", entries("images_background"))
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("images_background/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ValueError, match="its entry 'images_background/link' is a symbolic link"):
        read_part(path, 3)
    monkeypatch.setattr(omniglot_files, "_MAX_BYTES", 100)
    with pytest.raises(
        ValueError,
        match=r"'images_background/Alphabet_of_b/character01/0001_01.png' is [\d,]+ bytes long",
    ):
        read_part(write_zip(tmp_path / "giant.zip", entries("images_background")), 3)


def test_archives_are_limited_by_what_they_unpack_to(tmp_path, monkeypatch):
    files = entries("images_background")
    path = write_zip(tmp_path / "a.zip", files)
    name = next(iter(files))
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_BZIP2) as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
    with pytest.raises(
        ValueError, match=rf"packed.zip: {name} cannot be read .*other than deflate"
    ):
        read_part(tmp_path / "packed.zip", 3)
    monkeypatch.setattr(omniglot_files, "_MAX_TOTAL", 1000)
    with pytest.raises(ValueError, match=r"a.zip was refused: it unpacks to more than 1,000 bytes"):
        read_part(path, 3)
    monkeypatch.setattr(omniglot_files, "_MAX_BYTES", 100)
    write_folder(tmp_path, files)
    with pytest.raises(ValueError, match=r"0001_01.png is more than 100 bytes long"):
        read_part(tmp_path / "images_background", 3)


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("content", [b"not an image", png(0)[:60], png(0, (64, 64)), b""], ids=len)
def test_an_unreadable_image_is_named(tmp_path, as_zip, content):
    name = "images_background/Alphabet_of_b/character02/0002_05.png"
    files = entries("images_background") | {name: content}
    write_folder(tmp_path, files)
    path = write_zip(tmp_path / "a.zip", files) if as_zip else tmp_path / "images_background"
    with pytest.raises(
        ValueError, match=r"character02/0002_05.png is not a readable Omniglot image"
    ):
        read_part(path, 3)


def test_damaged_archives_are_named(tmp_path):
    path = write_zip(tmp_path / "a.zip", entries("images_background"))
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ValueError, match=r"a.zip is not a readable zip archive"):
        read_part(path, 3)
    flipped = good.index(png(7)) + 50
    path.write_bytes(good[:flipped] + bytes([good[flipped] ^ 1]) + good[flipped + 1 :])
    with pytest.raises(ValueError, match=r"character01/0001_08.png cannot be read \(Bad CRC"):
        read_part(path, 3)


# --- download
# --------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


@pytest.fixture
def server(few, tmp_path, monkeypatch):
    """A web server with the archives; the loader is pointed to it."""
    root = write_all(tmp_path / "www")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=root)
    ) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        monkeypatch.setattr(omniglot_files, "_URL", f"http://127.0.0.1:{web.server_port}/")
        sums = {
            part: hashlib.sha256((root / f"{part}.zip").read_bytes()).hexdigest() for part in FEW
        }
        monkeypatch.setattr(omniglot_files, "_SHA256", sums)
        yield root
        web.shutdown()


def test_download_then_the_cache(server, cache):
    images = load_omniglot().images
    assert images.shape == (5, 20, 28, 28)
    assert {p.name for p in (cache / "omniglot").glob("*.zip")} == {
        "images_background.zip",
        "images_evaluation.zip",
    }
    for file in server.glob("*.zip"):
        file.unlink()
    assert np.array_equal(load_omniglot(download=False).images, images)


def test_a_download_with_the_wrong_checksum_is_refused_and_not_kept(server, cache):
    (server / "images_evaluation.zip").write_bytes(b"something else")
    with pytest.raises(
        RuntimeError, match=r"Could not download .*images_evaluation.zip.*hash.*METANUDGE_DATA"
    ):
        load_omniglot()
    assert not (cache / "omniglot" / "images_evaluation.zip").exists()
    write_zip(server / "images_evaluation.zip", entries("images_evaluation"))
    with pytest.MonkeyPatch.context() as patch:
        digest = hashlib.sha256((server / "images_evaluation.zip").read_bytes()).hexdigest()
        patch.setitem(omniglot_files._SHA256, "images_evaluation", digest)
        assert load_omniglot().images.shape == (5, 20, 28, 28)  # goes on where it stopped


def test_what_is_downloaded_cannot_change():
    """The address names a commit, and each archive has a sha256; nothing else in the package
    downloads.
    """
    assert re.fullmatch(
        r"https://[^/]+/brendenlake/omniglot/[0-9a-f]{40}/python/", omniglot_files._URL
    )
    assert set(omniglot_files._SHA256) == set(CHARACTERS)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in omniglot_files._SHA256.values())
    sources = Path(omniglot_files.__file__).parents[1].rglob("*.py")
    fetching = [
        path.name
        for path in sources
        if re.search(r"pooch\.|urllib|requests\.|urlopen", path.read_text(encoding="utf-8"))
    ]
    assert fetching == ["omniglot_files.py"]


def test_no_network_says_what_to_do(server):
    (server / "images_background.zip").unlink()
    with pytest.raises(
        RuntimeError, match=r"Could not download .*Without a network, put images_background.zip"
    ):
        load_omniglot()
