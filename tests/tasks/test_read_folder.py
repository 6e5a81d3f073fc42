"""Folders as people have them: pictures of every size and kind, files that do not belong there, and
names that are no text.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metanudge.models import Conv4
from metanudge.tasks import Labelled
from metanudge.tasks.read_folder import read_folder

SMALL = {"ways": 2, "shots": 1, "queries": 1, "splits": (1.0, 0.0, 0.0)}


def picture(
    file: Path, size: tuple[int, int] = (20, 20), mode: str = "L", **options: object
) -> Path:
    """A picture of (width, height), some of it dark."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(str(file))).integers(
        0, 200, (size[1], size[0], 3), dtype=np.uint8
    )
    Image.fromarray(pixels).convert(mode).save(file, **options)
    return file


def folder(
    root: Path, size: tuple[int, int] = (20, 20), mode: str = "L", suffix: str = "png"
) -> Path:
    for name in "ab":
        for number in range(2):
            picture(root / name / f"{number}.{suffix}", size, mode)
    return root


# --- Size and channels
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "mode", "shape", "note"),
    [
        ((20, 20), "L", (1, 20, 20), ""),
        ((20, 20), "1", (1, 20, 20), ""),
        ((30, 24), "RGB", (3, 24, 30), ""),
        ((84, 84), "P", (3, 84, 84), ""),
        ((400, 300), "RGB", (3, 63, 84), "shrunk from 300×400; image_size= sets another size"),
    ],
)
def test_size_and_channels_are_the_pictures_own(
    tmp_path: Path, size: tuple[int, int], mode: str, shape: tuple[int, ...], note: str
) -> None:
    source = Labelled.from_folder(folder(tmp_path, size, mode), **SMALL)
    assert source.input_shape == shape
    assert source.note == note


def test_pictures_that_do_not_agree_become_squares(tmp_path: Path) -> None:
    folder(tmp_path)
    picture(tmp_path / "a" / "wide.png", (30, 10), "RGB")
    source = Labelled.from_folder(tmp_path, **SMALL)
    assert source.input_shape == (3, 30, 30)  # one of them has colours
    assert source.note.startswith("made square from 2 different sizes of up to 30 pixels")
    picture(tmp_path / "a" / "large.png", (1000, 700))
    assert Labelled.from_folder(tmp_path, **SMALL).input_shape == (3, 84, 84)


def test_what_is_given_is_taken(tmp_path: Path) -> None:
    folder(tmp_path, (40, 30), "RGB")
    assert Labelled.from_folder(tmp_path, image_size=28, grey=True, **SMALL).input_shape == (
        1,
        28,
        28,
    )
    assert Labelled.from_folder(tmp_path, image_size=None, **SMALL).input_shape == (3, 30, 40)
    assert Labelled.from_folder(tmp_path, grey=True, **SMALL).input_shape == (1, 30, 40)


def test_conv4_takes_pictures_that_are_not_square() -> None:
    assert Conv4(ways=3, channels=4, image_size=(63, 84), in_channels=3)(
        torch.rand(2, 3, 63, 84)
    ).shape == (2, 3)
    with pytest.raises(ValueError, match=r"image_size=\(15, 84\) is too small"):
        Conv4(image_size=(15, 84))


# --- Kinds of pictures
# --------------------------------------------------------------------------------------------------


def only(root: Path, **options: object) -> torch.Tensor:
    """The examples of a folder, in the order of their names."""
    return read_folder(root, **options).examples


def test_photographs_are_turned_as_their_camera_was(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90° to see it upright
    file = picture(tmp_path / "a" / "0.png", (30, 20), exif=exif)
    with Image.open(file) as image:
        upright = np.asarray(image.transpose(Image.Transpose.ROTATE_270))
    assert only(tmp_path).shape == (1, 1, 30, 20)
    assert np.array_equal(only(tmp_path)[0, 0].numpy(), upright)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_becomes_white(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a").mkdir()
    clear = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    # black ink on nothing: without the paper all is black
    clear.paste((0, 0, 0, 255), (0, 0, 20, 10))
    clear.convert(mode).save(tmp_path / "a" / "0.png")
    pixels = only(tmp_path)
    assert pixels.shape[1] == (1 if mode == "LA" else 3)
    assert pixels[:, :, :10].max() == 0
    assert pixels[:, :, 10:].min() == 255


def test_a_palette_with_transparent_colours(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    image = Image.new("P", (20, 20), 0)
    image.putpalette([0, 0, 0, 200, 0, 0])
    image.paste(1, (0, 0, 20, 10))
    image.save(tmp_path / "a" / "0.png", transparency=b"\0\xff")
    pixels = only(tmp_path)
    assert pixels[0, :, 0, 0].tolist() == [200, 0, 0]
    assert pixels[0, :, 19, 0].tolist() == [255, 255, 255]


def test_an_animation_is_its_first_picture(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    frames = [Image.new("L", (20, 20), shade) for shade in (10, 240)]
    frames[0].save(tmp_path / "a" / "0.gif", save_all=True, append_images=frames[1:])
    assert set(only(tmp_path).flatten().tolist()) == {10}


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "webp", "tiff", "ppm"])
def test_the_formats_we_mean(tmp_path: Path, suffix: str) -> None:
    assert only(folder(tmp_path, mode="RGB", suffix=suffix)).shape == (4, 3, 20, 20)


@pytest.mark.parametrize("suffix", ["pcx", "tga", "eps", "ico"])
def test_formats_we_do_not_mean_meet_no_parser(tmp_path: Path, suffix: str) -> None:
    folder(tmp_path)
    picture(tmp_path / "a" / f"x.{suffix}", mode="RGB")
    with pytest.warns(UserWarning, match=f"a/x.{suffix}"):
        assert len(only(tmp_path)) == 4
    (tmp_path / "a" / f"x.{suffix}").rename(tmp_path / "a" / "x.png")
    with pytest.raises(ValueError, match=r"x.png cannot be read as an example \(cannot identify"):
        read_folder(tmp_path)


def test_a_picture_that_unpacks_to_too_much_is_named(tmp_path: Path) -> None:
    folder(tmp_path)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 10_000, 9_000, 8, 0, 0, 0, 0)
    (tmp_path / "b" / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")
    )
    for options in ({}, {"image_size": 28, "grey": True}):
        with pytest.raises(ValueError, match=r"b/bomb.png cannot be read.*90000000 pixels"):
            read_folder(tmp_path, **options)


# --- Files that do not belong there
# ----------------------------------------------------------------------------------------


def test_what_is_no_example_is_passed_over_and_named(tmp_path: Path) -> None:
    folder(tmp_path)
    expected = read_folder(tmp_path)
    for name in ("notes.txt", "Thumbs.db", "README"):
        (tmp_path / "b" / name).write_bytes(b"\xd0\xcf\x11\xe0 hello")
    for hidden in (".DS_Store", "._0.png"):
        (tmp_path / "a" / hidden).write_bytes(b"x")
    for part in (".git", "__MACOSX"):
        (tmp_path / part).mkdir()
    with pytest.warns(
        UserWarning,
        match=(
            r"passed over what is no example: b/README, b/Thumbs.db, b/notes.txt\. Examples are"
            r" images"
        ),
    ):
        read = read_folder(tmp_path)
    assert read.examples.equal(expected.examples)
    assert read.labels == expected.labels == ["a", "a", "b", "b"]
    assert read.fingerprint == expected.fingerprint
    for file in (tmp_path / "b").glob("*.png"):
        file.unlink()
    with (
        pytest.warns(UserWarning, match="b/README"),
        pytest.raises(ValueError, match=r"class folder .*/b holds no examples"),
    ):
        read_folder(tmp_path)


def test_a_picture_needs_no_suffix(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "scan-0001")
    assert len(only(tmp_path)) == 4


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, np.nan]), "it holds NaN or infinity"),
        (np.array([1.0, -np.inf], dtype=np.float16), "it holds NaN or infinity"),
        (np.array(["a", "b"]), "its values are of type <U1, not numbers"),
        (np.array([1j, 2]), "its values are of type complex128, not numbers"),
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_numbers_that_are_none_name_their_file(
    tmp_path: Path, array: np.ndarray, message: str, suffix: str
) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "good.npy", np.zeros(2))
    (np.save if suffix == "npy" else np.savez)(tmp_path / "a" / f"second.{suffix}", array)
    with pytest.raises(
        ValueError, match=rf"a/second.{suffix} cannot be read as an example \({message}"
    ):
        read_folder(tmp_path)


def test_arrays_of_another_byte_order(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "0.npy", np.array([1.5, -2.0], dtype=">f4"))
    assert only(tmp_path).tolist() == [[1.5, -2.0]]


def test_an_array_that_unpacks_to_too_much_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metanudge.tasks.read_folder._MOST_BYTES", 1000)
    (tmp_path / "a").mkdir()
    np.savez_compressed(tmp_path / "a" / "0.npz", np.zeros(1_000_000))
    with pytest.raises(
        ValueError, match=r"a/0.npz cannot be read.*unpacks to more than 1,000 bytes"
    ):
        read_folder(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "loop", "broken link"])
@pytest.mark.parametrize("name", ["x.png", "x"])
def test_pipes_and_links_to_nowhere_are_refused_and_not_waited_for(
    tmp_path: Path, kind: str, name: str
) -> None:
    folder(tmp_path)
    odd = tmp_path / "a" / name
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(odd if kind == "loop" else "nowhere")
    with pytest.raises(ValueError, match=f"a/{name} is a broken link, a FIFO or a device"):
        read_folder(tmp_path)


def test_a_folder_that_links_to_itself(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="self/a is a folder inside a class folder"):
        read_folder(tmp_path)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "a" / "0.png").chmod(0)
    with pytest.raises(
        ValueError, match=r"a/0.png cannot be read as an example \(Permission denied\)"
    ):
        read_folder(tmp_path, image_size=20, grey=True)


def test_an_error_of_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path)

    def fails(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(
        ValueError, match=r"a/0.png cannot be read as an example \(Permission denied\)"
    ):
        read_folder(tmp_path)


def test_names_that_a_terminal_would_obey_or_cannot_show(tmp_path: Path) -> None:
    folder(tmp_path)
    bad = os.fsdecode(b"x\x1b[2J\xff.png")
    (tmp_path / "a" / bad).write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"a/x\\x1b\[2J\\udcff.png cannot be read"):
        read_folder(tmp_path)
    (tmp_path / "a" / bad).unlink()
    picture(tmp_path / "a" / "good.png").rename(tmp_path / "a" / bad)
    assert len(only(tmp_path)) == 5  # the name of a file is only shown, not used
    (tmp_path / os.fsdecode(b"c\xff")).mkdir()
    with pytest.raises(ValueError, match=r"c\\udcff has a name that cannot be shown. Rename it"):
        read_folder(tmp_path)


# --- Fingerprints
# --------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_names_and_contents(tmp_path: Path) -> None:
    source = Labelled.from_folder(folder(tmp_path / "one"), **SMALL)
    first = source.fingerprint()
    assert len(first) == 64
    assert source.to("cpu").fingerprint() == first
    (tmp_path / "one").rename(tmp_path / "two")
    assert (
        Labelled.from_folder(tmp_path / "two", image_size=28, grey=True, **SMALL).fingerprint()
        == first
    )
    (tmp_path / "two" / "a" / "0.png").rename(tmp_path / "two" / "a" / "2.png")
    renamed = read_folder(tmp_path / "two").fingerprint
    picture(tmp_path / "two" / "a" / "2.png", mode="RGB")
    changed = read_folder(tmp_path / "two").fingerprint
    assert len({first, renamed, changed}) == 3
