"""Links in a run folder are neither read nor written through, FIFOs and devices are refused,
temporary names cannot be guessed.

A read is seen by what the program then knows, a write by the victim's bytes. Where a FIFO is waited
for, the test's time runs out.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from attacked_runs import arguments, call
from metanudge.training import files

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs links and FIFOs"),
    pytest.mark.timeout(60),
]

# Every file that a command reads or adds to; the place of the last checkpoint is filled in.
READ = {
    "config": ("config.json", ("eval", "adapt", "resume", "config")),
    "metrics": ("metrics.jsonl", ("resume",)),
    "timing": ("timing.jsonl", ("resume",)),
    "manifest": ("{last}/manifest.json", ("eval", "resume")),
    "weights": ("{last}/model.safetensors", ("eval", "resume")),
    "state": ("{last}/state.json", ("eval", "resume")),
}
FOLDERS = {"checkpoints": "checkpoints", "one checkpoint": "{last}"}


def place(run: Path, name: str) -> list[Path]:
    """The file or folder of that name, of every checkpoint where it is in one."""
    if "{last}" not in name:
        return [run / name]
    return [Path(name.format(last=folder)) for folder in (run / "checkpoints").iterdir()]


def moved_and_linked(path: Path) -> Path:
    """The same content as before, but behind a link."""
    target = path.rename(
        path.parents[len(path.parts) - len(Path.cwd().parts) - 1]
        / f"moved-{path.parent.name}-{path.name}"
    )
    path.symlink_to(target)
    return target


def hard_link(path: Path) -> None:
    os.link(path, Path.cwd() / "second-name")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/null")


CASES = [(file, command) for file, (_, commands) in READ.items() for command in commands]


@pytest.mark.parametrize("attack", [moved_and_linked, fifo, device])
@pytest.mark.parametrize(
    ("file", "command"), CASES, ids=[f"{file}-{command}" for file, command in CASES]
)
def test_what_is_no_plain_file_is_not_opened(
    file: str,
    command: str,
    attack: Callable[[Path], object],
    run: Path,
    few: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = place(run, READ[file][0])
    for path in paths:
        attack(path)
    before = {path: path.lstat() for path in paths}
    outside = {path: path.read_bytes() for path in Path.cwd().glob("moved-*")}
    assert call(*arguments(command, run, few)) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert paths[0].name in said
    assert ("a FIFO" if attack is fifo else "a link") in said
    assert {path: path.lstat() for path in paths} == before, "it is left as it was"
    assert {path: path.read_bytes() for path in outside} == outside


@pytest.mark.parametrize("command", ["eval", "resume"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_behind_links_are_not_used(
    folder: str, command: str, run: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = [moved_and_linked(path) for path in place(run, FOLDERS[folder])]
    before = [sorted(target.rglob("*")) for target in targets]
    assert call(*arguments(command, run, few)) == 2
    assert "a link" in capsys.readouterr().err
    assert [sorted(target.rglob("*")) for target in targets] == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_file_with_a_second_name_is_not_added_to(
    name: str, run: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hard_link(run / name)
    before = (run / name).read_bytes()
    assert call(*arguments("resume", run, few)) == 2
    assert "second name" in capsys.readouterr().err
    assert Path("second-name").read_bytes() == before


def test_links_where_files_are_written_are_replaced_not_followed(
    here: Path, run: Path, few: Path
) -> None:
    """At the names of results, and at the names that temporary files had when they could be
    guessed.
    """
    names = ["config.json", "summary.json", "curve.png", "eval-test.png"]
    guesses = [f".new-{name}" for name in names]
    saves = [f"checkpoints/.{mark}-save-{number:06d}-step-{step}{best}" for mark in ("new", "old")
             for number in range(1, 6) for step in range(1, 5) for best in ("",
             "-best")]  # fmt: skip
    (here / "folder").mkdir()
    victims = {}
    for name in [*names[1:], *guesses]:
        victims[name] = here / f"victim-{name}"
        victims[name].write_text("precious")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victims[name])
    for name in saves:
        (run / name).symlink_to(here / "folder")
    assert call(*arguments("resume", run, few)) == 0
    assert call(*arguments("eval", run, few)) == 0
    assert {victim.read_text() for victim in victims.values()} == {"precious"}
    assert list((here / "folder").iterdir()) == []
    assert all(stat.S_ISREG((run / name).lstat().st_mode) for name in names)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_other_packages_do_not_write_through_links_either(
    name: str, here: Path, run: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).symlink_to(here)
    config = (run / "config.json").read_bytes()
    assert call(*arguments("resume", run, few)) == 2
    assert "a link" in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == config


def test_the_run_folder_itself_may_be_a_link(here: Path, run: Path, few: Path) -> None:
    (here / "newest").symlink_to(run)
    assert call(*arguments("eval", here / "newest", few)) == 0
    assert call(*arguments("resume", here / "newest", few)) == 0


def test_devices_and_sockets_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="a device"):
        files.read_bytes(Path("/dev/null"))
    with pytest.raises(OSError, match="a device"):
        files.open_to_append(Path("/dev/null"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(OSError, match="a socket"):
            files.read_bytes(Path("socket"))
    assert call("train", "--config", "/dev/null") == 2
    assert "a device" in capsys.readouterr().err


def test_a_fifo_among_the_data_is_not_waited_for(
    here: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "photos/a/1.png",
        "photos/a/1.npy",
        "characters/images_background.zip",
        "characters/images_evaluation.zip",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(name)
    assert call("train", "photos", "--out", "x") == 2
    assert "FIFO" in capsys.readouterr().err
    assert call("train", "omniglot", "--data-options", "root=characters", "--out", "x") == 2


def test_temporary_names_are_never_the_same(tmp_path: Path) -> None:
    made = {files.temporary_name(tmp_path / "config.json").name for _ in range(1000)}
    assert len(made) == 1000
    assert all(name.startswith(".new-config.json-") for name in made)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    files.write_text(tmp_path / "a", "old")
    with suppress(KeyboardInterrupt), files.replacing(tmp_path / "a") as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert files.read_text(tmp_path / "a") == "old"
    files.write_text(tmp_path / "a", "new")
    assert files.read_bytes(tmp_path / "a", limit=3) == b"new"
    with pytest.raises(OSError, match="more than 2 bytes"):
        files.read_bytes(tmp_path / "a", limit=2)
