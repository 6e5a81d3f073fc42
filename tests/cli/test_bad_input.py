"""Bad input ends with exit code 2 and a message that names the culprit and the fix; no traceback,
nothing half-written.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from metanudge.cli import main
from metanudge.tasks.omniglot_files import _SHA256
from metanudge.training.config import TrainConfig
from trained_runs import make_run, vector_run, vector_table, write_images

Refuse = Callable[..., str]
TINY = [
    "--ways=2", "--shots=1", "--queries=2", "--model=mlp:hidden=(4,)",
    "--solver=gradient_descent:lr=0.1,steps=1",
    "--tasks=2", "--iterations=2", "--eval-tasks=2", "--test-tasks=2",
]  # fmt: skip

ANY_WAYS = ["mnist1d", "--head", "prototypes"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good inputs of every kind; tests that spoil one copy it first."""
    folder = tmp_path_factory.mktemp("good")
    vector_table(folder / "data.csv", classes=20)
    vector_run(folder / "run", folder / "data.csv")
    vector_table(folder / "few.csv", classes=3, each=4, first=40, seed=1)
    vector_table(folder / "rows.csv", classes=3, each=4, first=40, seed=2)
    write_images(folder / "photos", ["a", "b", "c"], 4)
    pictures = TrainConfig(
        data=str(folder / "photos"),
        ways=2,
        shots=1,
        queries=1,
        data_options="splits=(1.0,0.0,0.0)",
        model="mlp",
        head="fixed",
    )
    make_run(folder / "photo-run", pictures)
    make_run(folder / "sine-run", TrainConfig("sinusoid"))
    vector_run(folder / "any-run", folder / "data.csv", head="prototypes")
    vector_table(folder / "wide.csv", classes=5, features=9)
    vector_table(folder / "single.csv", classes=1)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a cache of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("METANUDGE_DATA", raising=False)
    return tmp_path / "here"


@pytest.fixture
def refuse(here: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that must be refused; returns what it said, with the line breaks taken out."""

    def run(*argv: object) -> str:
        before = _tree(here), _tree(made)
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as stopped:  # how tyro ends
            code = stopped.code  # type: ignore[assignment]
        said = capsys.readouterr()
        text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", said.err + said.out).split())
        assert code == 2, text
        assert "Traceback" not in text
        assert (_tree(here), _tree(made)) == before, "something was written"
        return text

    return run


def _tree(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_dir()
    }


def says(text: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in text, f"{part!r} is not in: {text}"


# --- metanudge
# --------------------------------------------------------------------------------------------------


def test_unknown_command(refuse: Refuse) -> None:
    says(refuse("trian", "mnist1d"), "'trian'", "Did you mean 'train'?")


def test_a_process_of_its_own(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "metanudge", "eval", "nowhere"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    says(done.stderr, "There is no run nowhere")
    assert "Traceback" not in done.stderr


# --- metanudge train
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["mnist1d", "--estimator", "fobmal"],
            ["--estimator", "'fobmal'", "Did you mean 'fobmaml'?"],
        ),
        (["mnist1d", "--estimator", "maml:nu=0.1"], ["--estimator maml", "'nu'"]),
        (
            ["mnist1d", "--solver", "gradient_descent:lrr=0.1,steps=5"],
            ["--solver", "'lrr'", "Did you mean 'lr'?"],
        ),
        (["mnist1d", "--solver", "gradient_descent:lr=-1,steps=5"], ["--solver", "lr", "-1"]),
        (["mnist1d", "--optimizer", "adm"], ["--optimizer", "'adm'", "Did you mean"]),
        (["mnist1d", "--model", "conv5"], ["--model", "'conv5'", "Did you mean 'conv4'?"]),
        (
            ["mnist1d", "--model", "no_such_module:Net"],
            ["--model no_such_module:Net", "cannot be imported"],
        ),
        (
            ["mnist1d", "--data-options", "num_sample=2000"],
            ["--data-options", "'num_sample'", "Did you mean 'num_samples'?"],
        ),
        (["omniglt"], ["'omniglt'", "Did you mean 'omniglot'?"]),
        (["no/such/folder"], ["no/such/folder", "There is no file or folder"]),
        ([], ["Name the data"]),
        (["mnist1d", "--ways", "11"], ["10 classes", "ways=11", "Lower ways"]),
        ([*ANY_WAYS, "--ways", "10-3"], ["--ways 10-3 runs backwards", "3-10"]),
        ([*ANY_WAYS, "--ways", "0-5"], ["--ways 0-5", "1 or more"]),
        ([*ANY_WAYS, "--ways", "1-5"], ["ways=(1, 5)", "tasks of one class"]),
        ([*ANY_WAYS, "--ways", "3-11"], ["10 classes", "ways=11", "Lower ways"]),
        ([*ANY_WAYS, "--ways", "3..10"], ["--ways '3..10'", "a range such as 3-10"]),
        ([*ANY_WAYS, "--shots", "5-1"], ["--shots 5-1 runs backwards", "1-5"]),
        ([*ANY_WAYS, "--shots", "1-2.5"], ["--shots '1-2.5'", "a range such as"]),
        (["mnist1d", "--shots", "1-99999"], ["shots=99999", "Lower shots"]),
        (["mnist1d", "--ways", "3-10", "--head", "fixed"], ["--ways 3-10", "--head prototypes"]),
        (["sinusoid", "--head", "prototypes"], ["they are regression", "Leave --head out"]),
        (["mnist1d", "--head", "prototype"], ["--head", "prototypes"]),
        ([*ANY_WAYS, "--model", "torch.nn:Flatten"], ["linear layer called head", "Flatten"]),
        (
            ["{made}/data.csv", "--task-column=label", "--target=x1", "--head=prototypes"],
            ["they are regression", "Leave --head out"],
        ),
        (["mnist1d", "--iterations", "-3"], ["--iterations -3", "1 or more"]),
        (["mnist1d", "--shots", "0"], ["--shots 0", "1 or more"]),
        (["mnist1d", "--lam", "-2"], ["--lam -2", "positive"]),
        (["mnist1d", "--seed", "-1"], ["--seed -1", "0 or more"]),
        (["mnist1d", "--tasks", "two"], ["--tasks", "two"]),
        (["mnist1d", "--iteratons", "5"], ["--iteratons"]),
        (["sinusoid", "--ways", "5"], ["--ways 5", "regression"]),
        (["--config", "none.json"], ["--config none.json", "no such file"]),
        (["--resume", "nowhere"], ["--resume nowhere", "does not exist"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_train_flags(refuse: Refuse, made: Path, flags: list[str], parts: list[str]) -> None:
    says(refuse("train", *(flag.format(made=made) for flag in flags)), *parts)


def test_train_on_a_gpu_that_is_not_there(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    says(refuse("train", "mnist1d", "--device", "cuda"), "--device cuda", "Use --device cpu")


def test_a_split_with_fewer_classes_than_the_range(refuse: Refuse, made: Path) -> None:
    text = refuse("train", made / "data.csv", *TINY, "--head=prototypes", "--ways=2-4")
    says(text, "Split 'val'", "3 classes", "ways=4", "--eval-every 0")


def test_train_with_too_few_classes(refuse: Refuse, made: Path) -> None:
    says(refuse("train", made / "photos", "--ways", "5"), "ways=5", "Lower ways")


def test_train_with_too_few_examples(refuse: Refuse, made: Path) -> None:
    text = refuse(
        "train",
        made / "photos",
        "--ways",
        "2",
        "--shots",
        "3",
        "--queries",
        "9",
        "--data-options",
        "splits=(1.0,0.0,0.0)",
    )
    says(text, "'a'", "4 examples", "shots=3 and queries=9 need 12", "Lower shots or queries")


def test_train_with_a_file_that_is_no_image(refuse: Refuse, here: Path) -> None:
    write_images(here / "photos", ["a", "b"], 2)
    (here / "photos" / "b" / "notes.png").write_text("not an image")
    says(refuse("train", "photos", "--ways", "2"), "b/notes.png", "cannot be read")


def test_train_with_a_truncated_image(refuse: Refuse, here: Path) -> None:
    write_images(here / "photos", ["a", "b"], 2)
    file = here / "photos" / "a" / "1.png"
    file.write_bytes(file.read_bytes()[:100])
    says(refuse("train", "photos", "--ways", "2"), "a/1.png", "cannot be read")


def test_train_on_an_empty_folder(refuse: Refuse, here: Path) -> None:
    (here / "empty").mkdir()
    says(refuse("train", "empty"), "empty", "no sub-folders")


def test_train_with_an_empty_class(refuse: Refuse, here: Path) -> None:
    write_images(here / "photos", ["a", "b"], 2)
    (here / "photos" / "c").mkdir()
    says(refuse("train", "photos"), "photos/c", "is empty")


def test_train_on_a_csv_without_the_column(refuse: Refuse, made: Path) -> None:
    text = refuse("train", made / "data.csv", "--data-options", "label=lable")
    says(text, "data.csv", "no column 'lable'", "Did you mean 'label'?")


@pytest.mark.parametrize("cell", ["nan", "inf", "", "abc"])
def test_train_on_a_csv_with_a_cell_that_is_no_number(
    refuse: Refuse, here: Path, cell: str
) -> None:
    (here / "bad.csv").write_text(f"u,v,label\n1,2,a\n3,{cell},b\n")
    says(refuse("train", "bad.csv"), "bad.csv, line 3, column 'v'", "not a finite number")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{oops", ["config.json", "not valid JSON"]),
        (
            '{"data": "mnist1d", "iteration": 5}',
            ["config.json", "'iteration'", "Did you mean 'iterations'?"],
        ),
        ('{"data": "mnist1d", "ways": "three"}', ["config.json", "ways", "'three'"]),
        ("[1]", ["config.json", "list"]),
    ],
)
def test_train_from_a_bad_config(refuse: Refuse, here: Path, text: str, parts: list[str]) -> None:
    (here / "config.json").write_text(text)
    says(refuse("train", "--config", "config.json"), *parts)


def test_train_into_a_folder_with_something_in_it(refuse: Refuse, here: Path, made: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").write_text("x")
    says(refuse("train", made / "data.csv", *TINY, "--out", "thesis"), "--out", "thesis", "empty")


@pytest.mark.parametrize("out", ["file/run", "/proc/metanudge-run"])
def test_train_where_nothing_can_be_written(
    refuse: Refuse, here: Path, made: Path, out: str
) -> None:
    (here / "file").write_text("x")
    if out.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("this system has no /proc")
    says(refuse("train", made / "data.csv", *TINY, "--out", out), out)


def test_resume_with_a_changed_model(
    refuse: Refuse, here: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(made / "data.csv"), *TINY, "--out", "run"]) == 0
    capsys.readouterr()
    says(
        refuse("train", "--resume", "run", "--iterations", "4", "--model", "mlp:hidden=(8,)"),
        "model",
        "run",
    )


# --- Archives
# --------------------------------------------------------------------------------------------------


def archives(folder: Path, entry: str, *, link: bool = False) -> Path:
    """Two files named like Omniglot's, the first with an entry it must not have."""
    folder.mkdir(parents=True)
    for part in ("images_background", "images_evaluation"):
        with zipfile.ZipFile(folder / f"{part}.zip", "w") as archive:
            archive.writestr(f"{part}/Latin/character01/0001_01.png", b"")
            if part == "images_background":
                info = zipfile.ZipInfo(entry)
                info.external_attr = ((stat.S_IFLNK if link else stat.S_IFREG) | 0o644) << 16
                archive.writestr(info, b"/etc/passwd")
    return folder


@pytest.mark.parametrize(
    ("entry", "link", "reason"),
    [
        ("images_background/../../evil.png", False, "leaves its folder"),
        ("/tmp/evil.png", False, "absolute path"),
        ("images_background/link.png", True, "symbolic link"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_archive_with_an_unsafe_entry(
    refuse: Refuse,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    entry: str,
    link: bool,
    reason: str,
) -> None:
    folder = archives(here / "omniglot", entry, link=link)
    if command == "train":
        text = refuse("train", "omniglot", "--data-options", f"root={folder}")
    else:
        monkeypatch.setenv("METANUDGE_DATA", str(here))
        text = refuse("data", "verify", "omniglot")
    says(text, "images_background.zip", entry, reason, "Get the original archive")


def test_archive_with_the_wrong_checksum(refuse: Refuse, tmp_path: Path) -> None:
    archives(tmp_path / "cache" / "omniglot", "images_background/x.png")
    says(
        refuse("data", "verify", "omniglot"),
        "images_background.zip",
        "wrong checksum",
        _SHA256["images_background"],
        "Delete it",
    )


# --- metanudge eval
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["{made}/nowhere"], ["There is no run", "nowhere"]),
        (["{made}/photos"], ["is not a run", "config.json"]),
        (["{made}/run", "--tasks", "0"], ["--tasks 0", "1 or more"]),
        (["{made}/run", "--tasks", "-5"], ["--tasks -5", "1 or more"]),
        (["{made}/run", "--steps", "5", "-1"], ["--steps -1"]),
        (["{made}/run", "--split", "tst"], ["--split", "tst", "test"]),
        (["{made}/run", "--checkpoint", "bset"], ["bset"]),
        (
            ["{made}/run", "--json", "no/such/folder.json"],
            ["--json no/such/folder.json", "Create it first"],
        ),
        (["{made}/run", "--json", "."], ["--json .", "is a folder"]),
        (
            ["{made}/run", "--plot", "no/such/plot.png"],
            ["--plot no/such/plot.png", "Create it first"],
        ),
        (["{made}/run", "--plot", "plot.xyz"], ["--plot plot.xyz", ".png"]),
        (["{made}/photo-run"], ["--split test", "0 classes"]),
        ([], ["RUN"]),
        (["{made}/run", "--ways", "4"], ["for 3 ways", "4 classes", "--head prototypes"]),
        (["{made}/run", "--ways", "2-3"], ["--ways 2-3", "--head prototypes"]),
        (["{made}/run", "--shots", "99"], ["shots=99", "12 examples"]),
        (["{made}/any-run", "--ways", "10"], ["ways=10", "4 in test"]),
        (["{made}/any-run", "--ways", "1"], ["1 way ", "nothing to tell apart"]),
        (["{made}/any-run", "--ways", "4-2"], ["--ways 4-2 runs backwards"]),
        (["{made}/any-run", "--queries", "0"], ["--queries 0", "1 or more"]),
        (["{made}/any-run", "--data", "{made}/wide.csv", "--split", "val"], ["--split val"]),
        (["{made}/any-run", "--data", "nowhere.csv"], ["no file or folder nowhere.csv"]),
        (["{made}/any-run", "--data", "mnist1d"], ["not of the kind", "data.csv"]),
        (["{made}/any-run", "--data", "{made}/photos"], ["photos"]),
        (["{made}/any-run", "--data", "{made}/few.csv", "--ways", "4"], ["ways=4", "3 classes"]),
        (["{made}/sine-run", "--ways", "3"], ["--ways 3", "regression"]),
        (["{made}/sine-run", "--data", "{made}/few.csv"], ["not of the kind", "sinusoid"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_eval_flags(refuse: Refuse, made: Path, flags: list[str], parts: list[str]) -> None:
    says(refuse("eval", *(flag.format(made=made) for flag in flags)), *parts)


@pytest.mark.parametrize("command", ["eval", "adapt"])
def test_a_damaged_checkpoint(refuse: Refuse, here: Path, made: Path, command: str) -> None:
    shutil.copytree(made / "run", here / "run")
    (file,) = (here / "run").rglob("model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    more = (
        ["--tasks", "2"]
        if command == "eval"
        else ["--support", made / "few.csv", "--export", "model"]
    )
    says(refuse(command, "run", *more), "model.safetensors")


def test_eval_when_the_data_have_moved(refuse: Refuse, here: Path, made: Path) -> None:
    shutil.copytree(made / "run", here / "run")
    config = dataclasses.replace(
        TrainConfig.read(here / "run" / "config.json"), data="/no/such/place/data.csv"
    )
    (here / "run" / "config.json").write_text(config.to_json())
    says(refuse("eval", "run"), "/no/such/place/data.csv")


# --- metanudge adapt
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["{made}/nowhere", "--support", "{made}/few.csv", "--export", "m"],
            ["There is no run", "nowhere"],
        ),
        (["{made}/run", "--export", "m"], ["--support"]),
        (
            ["{made}/run", "--support", "{made}/few.csv"],
            ["Nothing to do", "--predict DIR --out FILE", "--export DIR"],
        ),
        (
            ["{made}/run", "--support", "{made}/few.csv", "--predict", "{made}/rows.csv"],
            ["--predict needs --out"],
        ),
        (
            ["{made}/run", "--support", "{made}/few.csv", "--out", "o.csv"],
            ["--out needs --predict"],
        ),
        (
            ["{made}/run", "--support", "{made}/none", "--export", "m"],
            ["--support", "neither a folder nor a .csv"],
        ),
        (
            ["{made}/run", "--support", "{made}/data.csv", "--export", "m"],
            ["20 classes", "3 ways", "--ways 20"],
        ),
        (
            ["{made}/any-run", "--support", "{made}/single.csv", "--export", "m"],
            ["one class, c00", "two or more"],
        ),
        (
            ["{made}/run", "--support", "{made}/photos", "--export", "m"],
            ["photos", "(1, 20, 20)", "6 numbers"],
        ),
        (
            ["{made}/run", "--support", "{made}/few.csv", "--export", "m", "--steps", "0"],
            ["--steps 0", "1 or more"],
        ),
        (
            ["{made}/run", "--support", "{made}/few.csv", "--export", "no/m"],
            ["--export no/m", "Create it first"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--export",
                "{made}/photos",
                "--overwrite",
            ],
            ["not an exported model"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--predict",
                "{made}/no",
                "--out",
                "o.csv",
            ],
            ["--predict", "does not exist"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--predict",
                "{made}/rows.csv",
                "--out",
                "{made}/few.csv",
            ],
            ["--overwrite"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--predict",
                "{made}/rows.csv",
                "--out",
                ".",
            ],
            ["--out .", "is a folder"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--predict",
                "{made}/rows.csv",
                "--out",
                "no/o.csv",
            ],
            ["Create it first"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--predict",
                "{made}/rows.csv",
                "--out",
                "/proc/o.csv",
            ],
            ["--out /proc/o.csv"],
        ),
        (
            [
                "{made}/run",
                "--support",
                "{made}/few.csv",
                "--predict",
                "{made}/photos",
                "--out",
                "o.csv",
            ],
            ["a/0.png", "6 numbers"],
        ),
        (
            ["{made}/sine-run", "--support", "{made}/few.csv", "--export", "m"],
            ["regression", "no classes"],
        ),
        (
            ["{made}/photo-run", "--support", "{made}/photos", "--export", "m"],
            ["3 classes (a, b, c)", "2 ways"],
        ),
    ],
    ids=lambda value: (
        " ".join(value[2:])[:60] if isinstance(value, list) and len(value) > 2 else None
    ),
)
def test_adapt_flags(refuse: Refuse, made: Path, flags: list[str], parts: list[str]) -> None:
    says(refuse("adapt", *(flag.format(made=made) for flag in flags)), *parts)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (
            lambda few: [
                file.rename(file.with_suffix(".txt")).write_text("x")
                for file in (few / "b").iterdir()
            ],
            ["few/b", "no examples"],
        ),
        (
            lambda few: (few / "b" / "0.png").write_bytes(b"\x89PNG broken"),
            ["b/0.png", "cannot be read"],
        ),
        (lambda few: [file.unlink() for file in (few / "b").iterdir()], ["few/b", "is empty"]),
        (lambda few: shutil.rmtree(few / "b"), ["1 classes (a)", "2 ways"]),
        (lambda few: (few / "b" / "deeper").mkdir(), ["b/deeper", "folder inside a class folder"]),
    ],
    ids=["text files", "broken image", "empty class", "class missing", "nested"],
)
@pytest.mark.filterwarnings("default")  # as for users, to whom a warning is a note
def test_adapt_with_a_bad_support_folder(
    refuse: Refuse, here: Path, made: Path, spoil: Callable[[Path], object], parts: list[str]
) -> None:
    write_images(here / "few", ["a", "b"], 2)
    spoil(here / "few")
    says(
        refuse(
            "adapt",
            made / "photo-run",
            "--support",
            "few",
            "--predict",
            made / "photos",
            "--out",
            "o.csv",
        ),
        *parts,
    )


def test_adapt_with_a_bad_file_among_the_good(refuse: Refuse, here: Path, made: Path) -> None:
    write_images(here / "few", ["a", "b"], 2)
    write_images(here / "unknown", ["x"], 3)
    (here / "unknown" / "x" / "2.png").write_text("not an image")
    says(
        refuse(
            "adapt",
            made / "photo-run",
            "--support",
            "few",
            "--predict",
            "unknown",
            "--out",
            "o.csv",
        ),
        "unknown/x/2.png",
        "move other",
    )


def test_adapt_on_an_empty_folder(refuse: Refuse, here: Path, made: Path) -> None:
    (here / "unknown").mkdir()
    text = refuse(
        "adapt",
        made / "run",
        "--support",
        made / "few.csv",
        "--predict",
        "unknown",
        "--out",
        "o.csv",
    )
    says(text, "--predict unknown holds no files")


def test_adapt_with_a_table_without_labels(refuse: Refuse, here: Path, made: Path) -> None:
    (here / "few.csv").write_text((made / "few.csv").read_text().replace("label", "species"))
    says(
        refuse("adapt", made / "run", "--support", "few.csv", "--export", "m"),
        "few.csv",
        "no column 'label'",
        "species",
    )


def test_adapt_with_a_table_without_a_column(refuse: Refuse, here: Path, made: Path) -> None:
    (here / "rows.csv").write_text((made / "rows.csv").read_text().replace("x3", "y3"))
    text = refuse(
        "adapt",
        made / "run",
        "--support",
        made / "few.csv",
        "--predict",
        "rows.csv",
        "--out",
        "o.csv",
    )
    says(text, "rows.csv", "no column 'x3'")


def test_adapt_with_nan_in_a_table(refuse: Refuse, here: Path, made: Path) -> None:
    lines = (made / "rows.csv").read_text().splitlines()
    lines[2] = ",".join(["nan", *lines[2].split(",")[1:]])
    (here / "rows.csv").write_text("\n".join(lines))
    text = refuse(
        "adapt",
        made / "run",
        "--support",
        made / "few.csv",
        "--predict",
        "rows.csv",
        "--out",
        "o.csv",
    )
    says(text, "rows.csv, line 3, column 'x0'", "not a finite number")


# --- metanudge data, metanudge doctor
# --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["fetch", "omniglt"], ["'omniglt'", "Did you mean 'omniglot'?"]),
        (["fetch"], ["needs a name"]),
        (["verify", "mnist"], ["'mnist'", "Did you mean 'mnist1d'?"]),
        (["verfy"], ["'verfy'", "Did you mean 'verify'?"]),
        (["list", "omniglot"], ["takes no name"]),
        (["verify", "no/such"], ["no/such", "There is no file or folder"]),
        ([], ["list|fetch|verify"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_data_flags(refuse: Refuse, flags: list[str], parts: list[str]) -> None:
    says(refuse("data", *flags), *parts)


def test_data_fetch_without_a_network(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("pooch.retrieve", offline)
    says(
        refuse("data", "fetch", "omniglot"),
        "images_background.zip",
        "no route to host",
        "METANUDGE_DATA",
    )


def test_train_without_a_network(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("pooch.retrieve", offline)
    says(
        refuse("train", "omniglot"),
        "images_background.zip",
        "no route to host",
        "METANUDGE_DATA",
        "--data-options root=FOLDER",
    )


def test_doctor_takes_no_arguments(refuse: Refuse) -> None:
    says(refuse("doctor", "--deep"), "--deep")
