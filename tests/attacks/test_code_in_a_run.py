"""A stranger's run folder runs no code: every payload would leave a marker file, and none may."""

from __future__ import annotations

import importlib.machinery
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import metanudge
from attacked_runs import COMMANDS, TINY, arguments, call, rewrite
from metanudge.training import runs, specs, use
from metanudge.training.checkpoint.files import MANIFEST, seal
from metanudge.training.checkpoint.store import CheckpointStore
from metanudge.training.errors import UserError

NETS = """
from pathlib import Path
import functools, os
from torch import nn
Path({mark!r}).touch()

class Net(nn.Sequential):
    def __init__(self, in_features: int = 3, ways: int = 3) -> None:
        super().__init__(nn.Linear(in_features, ways))

class Impostor:
    def __init__(self) -> None:
        Path("called").touch()

def net(in_features: int, ways: int) -> nn.Module:
    return Net(in_features, ways)

def nothing():
    return None

partial = functools.partial(Net, ways=3)
cached = functools.cache(net)
number = 3
"""
HUB = "from pathlib import Path\nPath({mark!r}).touch()\ndef bomb():\n    raise SystemExit\n"

# Each is a `model` that, once imported or called, makes the marker file.
PAYLOADS = {
    "shell": "os:system:command='touch {mark}'",
    "subprocess": "subprocess:getoutput:cmd='touch {mark}'",
    "copy a file": "shutil:copyfile:src='{run}/config.json',dst='{mark}'",
    "module of the current folder": "my_nets:Net",
    "module that shadows a library": "tabulate:Net",
    "torch.hub": "torch.hub:load:repo_or_dir='{run}',source=local,model=bomb",
    "through another module": "torch:os.system:command='touch {mark}'",
}


@pytest.fixture
def mark(here: Path, run: Path) -> Path:
    """The file that must not appear, with the code that would make it in every place that Python
    might look.
    """
    mark = here / "owned"
    for name in ("my_nets.py", "tabulate.py"):
        (here / name).write_text(NETS.format(mark=str(mark)))
    (run / "hubconf.py").write_text(HUB.format(mark=str(mark)))
    return mark


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_model_named_by_a_file_is_not_imported(
    payload: str, command: str, mark: Path, run: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = PAYLOADS[payload].format(mark=mark, run=run)
    rewrite(run, model=model)
    path = sys.path.copy()
    assert call(*arguments(command, run, few)) == 2
    assert not mark.exists()
    assert sys.path == path, "the current folder joins the path with trust only"
    assert "my_nets" not in sys.modules
    said = capsys.readouterr().err
    for word in (model, str(run / "config.json"), "--trust"):
        assert word in said


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "estimator": {"estimator": "os:system:command='touch {mark}'"},
    "solver": {"solver": "torch_optimizer:optimizer=os.system,lr=0.1,steps=1"},
    "optimizer": {"optimizer": "builtins:exec:source='touch {mark}'"},
    "data": {"data": "os:system:command='touch {mark}'"},
    "an expression as a value": {"model": "mlp:hidden=__import__('os').system('touch {mark}')"},
    "an expression in a list": {"model": "mlp:hidden=[__import__('os').system('touch {mark}')]"},
    "a dunder as an option": {"model": "mlp:__class__=os.system"},
    "a dunder of an estimator": {"estimator": "fobmaml:__init__=os.system"},
    "a dunder of the data": {"data_options": "__class__=os.system"},
    "a value nested very deep": {"model": "mlp:hidden=" + "(" * 20_000 + ")" * 20_000},
    "a pattern": {"adapt": "$(touch {mark})`touch {mark}`"},
}


@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_no_other_setting_runs_code(
    setting: str, mark: Path, run: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run, **{name: text.format(mark=mark) for name, text in OTHER_SETTINGS[setting].items()})
    for command in ("config", "eval"):
        call(*arguments(command, run, few))
        assert not mark.exists()
        assert "Traceback" not in capsys.readouterr().err
    assert call(*arguments("config", run, few)) == 2


class Bomb:
    """Makes the marker when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint_is_not_loaded(
    name: str, mark: Path, run: Path, few: Path
) -> None:
    import hashlib

    for entry in CheckpointStore(run / "checkpoints").list():
        data = pickle.dumps(Bomb(mark))
        (entry.folder / name).write_bytes(data)
        manifest = json.loads((entry.folder / MANIFEST).read_text())
        del manifest["sha256"]
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (entry.folder / MANIFEST).write_bytes(seal(manifest))
    for command in ("eval", "resume"):
        assert call(*arguments(command, run, few)) == 2
        assert not mark.exists()


@pytest.mark.parametrize("kind", ["npy", "npz", "omniglot"])
def test_a_pickle_among_the_data_is_not_loaded(kind: str, mark: Path, run: Path, few: Path) -> None:
    bombs = np.array([Bomb(mark)], dtype=object)
    place = run / "data" / "a"
    place.mkdir(parents=True)
    if kind == "npy":
        np.save(place / "0.npy", bombs, allow_pickle=True)
    else:
        np.savez(place / "0.npz", images=bombs)
    data = (
        {"data": "omniglot", "data_options": f"root={str(place / '0.npz')!r}"}
        if kind == "omniglot"
        else {"data": str(place.parent)}
    )
    rewrite(run, **data)
    assert call(*arguments("config", run, few)) == 2
    assert call(*arguments("eval", run, few)) == 2
    assert not mark.exists()


@pytest.mark.parametrize("command", ["resume", "config"])
def test_a_file_does_not_send_results_away(
    command: str,
    mark: Path,
    run: Path,
    few: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)

    class Sent:
        log = finish = staticmethod(lambda *args, **options: None)

        def __init__(self, **options: Any) -> None:
            mark.touch()

    wandb.init = Sent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    rewrite(run, wandb=True)
    assert call(*arguments(command, run, few)) == 2
    assert "wandb" in capsys.readouterr().err
    assert not mark.exists()
    assert call(*arguments(command, run, few), "--no-wandb") == 0
    assert not mark.exists()
    assert call(*arguments("eval", run, few)) == 0, "where nothing is trained, nothing is sent"
    assert not mark.exists()


@pytest.mark.parametrize("command", ["resume", "config"])
def test_a_file_does_not_say_where_to_write(command: str, here: Path, run: Path, few: Path) -> None:
    rewrite(run, out=str(here / "elsewhere"))
    assert call(*arguments(command, run, few)) == 0
    assert not (here / "elsewhere").exists()


def test_python_m_takes_no_module_from_the_current_folder(here: Path) -> None:
    for name in (
        "json",
        "shlex",
        "difflib",
        "torch",
        "numpy",
        "tyro",
        "rich",
        "safetensors",
        "matplotlib",
    ):
        (here / f"{name}.py").write_text("open('owned', 'w')\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(metanudge.__file__).parents[1])}
    command = [sys.executable, "-m", "metanudge", "eval", "no-such-run"]
    done = subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, (here / "owned").exists()) == (2, False), done.stderr
    assert "no-such-run" in done.stderr


# With trust


def test_trust_imports_the_model(
    mark: Path, run: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with a model of one's own: named on the command line it needs no trust, from the file
    it does.
    """
    assert (
        call(
            "train",
            str(few.with_name("table.csv")),
            *TINY,
            "--model",
            "my_nets:Net",
            "--out",
            "own",
        )
        == 0
    )
    assert mark.exists()
    own = Path("own")
    for command in ("eval", "adapt", "resume"):
        assert call(*arguments(command, own, few)) == 2
        assert call(*arguments(command, own, few), "--trust") == 0
    assert "trust" not in (own / "config.json").read_text()
    more = ["train", "--resume", "own", "--iterations", "4"]
    assert call(*more, "--model", "my_nets:net") == 2
    assert call(*more, "--model=my_nets:Net") == 0
    capsys.readouterr()


def test_trust_in_python(mark: Path, run: Path, few: Path) -> None:
    rewrite(run, model="my_nets:Net")
    for refused in (
        lambda: runs.load(run),
        lambda: runs.read_config(run),
        lambda: use.adapt(run, few),
    ):
        with pytest.raises(UserError, match=r"my_nets:Net.*trust=True"):
            refused()
    assert not mark.exists()
    assert runs.read_config(run, trust=True).model == "my_nets:Net"
    with pytest.raises(UserError, match="The model has changed"):  # the weights are another model's
        runs.load(run, trust=True)
    assert mark.exists()


class Shapes:
    kind, num_outputs, input_shape = "classification", 3, (3,)


@pytest.mark.parametrize(
    "name",
    [
        "Net",
        "net",
        "partial",
        "cached",
        "Net.__call__.__class__",
        "Impostor",
        "number",
        "os.system",
        "os.makedirs",
        "nothing",
    ],
)
def test_what_is_named_must_make_a_network(name: str, mark: Path, here: Path) -> None:
    """Also where it is trusted; what can be told before the call is told before the call."""
    if name in ("Net", "net", "partial", "cached"):
        assert isinstance(specs.build_model(f"my_nets:{name}", Shapes()), nn.Module)  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=r"my_nets:.*nn\.Module"):
        specs.build_model(f"my_nets:{name}", Shapes())  # type: ignore[arg-type]
    assert not (here / "called").exists()


def test_modules_of_python_itself_are_not_even_imported(here: Path) -> None:
    sys.modules.pop("antigravity", None)  # opens a browser
    with pytest.raises(UserError, match=r"antigravity.*Python itself"):
        specs.build_model("antigravity:fly", Shapes())  # type: ignore[arg-type]
    assert "antigravity" not in sys.modules


# What a terminal is told


def test_names_from_files_give_a_terminal_no_orders(
    here: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (few, few.with_name("table.csv")):
        (here / file.name).write_text(file.read_text().replace(",c", ",\x1b]0;owned\x07[red]c"))
    assert call("train", "table.csv", *TINY, "--out", "own") == 0
    for command in ("eval", "adapt"):
        assert call(*arguments(command, Path("own"), here / few.name)) == 0
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        assert r"\x1b]0;owned\x07[red]c" in said.out


def test_notes_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    from metanudge.training.progress import ConsoleReporter

    ConsoleReporter().note("\x1b[2J \\[link=x]y[/link] [red]z")
    assert capsys.readouterr().out == "note \\x1b[2J \\[link=x]y[/link] [red]z\n"
