"""Loss, metrics, optimizer, augmentation and data of the user's own, named as module:attribute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.cli import main
from metanudge.cli.train import parse
from metanudge.tasks import Labelled, Sinusoid
from metanudge.training import runs
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from trained_runs import vector_table, write_images

CODE = '''
import torch
from torch import nn
from metanudge.tasks import Labelled, Sinusoid

def huber(output, target):
    return nn.functional.huber_loss(output, target)

def scaled(output, target, by: float = 1.0):
    return by * nn.functional.mse_loss(output, target)

class Smooth(nn.Module):
    def __init__(self, smoothing: float = 0.5):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target, label_smoothing=self.smoothing)

def mae(output, target):
    return (output - target).abs().mean()

def whole(model, batch):
    return model(batch[0]).mean()

class Descent(torch.optim.Optimizer):
    """Gradient descent with momentum, by hand."""

    def __init__(self, params, lr: float = 0.01, momentum: float = 0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                v = self.state[p].setdefault("velocity", torch.zeros_like(p))
                v.mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] * v)

def descent(params, lr: float = 0.01):
    return Descent(params, lr=lr)

def no_optimizer(params):
    return list(params)

class Waves(Sinusoid):
    """Sines of a user."""

def waves(shots=3, *, noise: float = 0.0, **stream):
    return Sinusoid(shots=shots, queries=4, noise=noise, **stream)

fixed = Sinusoid(shots=3, queries=4)
number = 3

class Points(torch.utils.data.Dataset):
    classes = [f"k{i}" for i in range(12)]

    def __len__(self):
        return 96

    def __getitem__(self, i):
        if i >= 96:
            raise IndexError(i)
        return torch.randn(5, generator=torch.Generator().manual_seed(i)), i % 12

def points():
    return Points()

ready = Points()

def louder(x, generator, by: float = 1.0):
    return x + by * torch.randn(x.shape, generator=generator, dtype=x.dtype)

def shorter(x, generator):
    return x[:1]
'''
TINY = [
    "--tasks", "2", "--iterations", "4", "--eval-every", "2", "--eval-tasks", "4", "--test-tasks",
    "5", "--checkpoint-every", "2", "--solver", "gradient_descent:lr=0.05,steps=1", "--device",
    "cpu", "--model", "mlp:hidden=(6,)",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "own_parts_of_a_user.py").write_text(CODE.replace("'''", '"""'))
    sys.modules.pop("own_parts_of_a_user", None)
    return tmp_path


OWN = "own_parts_of_a_user"


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_all_of_them_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with them is told apart, goes on to the same bytes, and is loaded with trust."""
    flags = [
        f"{OWN}:waves", "--data-options", "noise=0.1", "--shots", "5", "--loss", f"{OWN}:huber",
        "--query-loss", f"{OWN}:scaled:by=2.0", "--metrics", f"mae={OWN}:mae", "--optimizer",
        f"{OWN}:Descent:lr=0.02", "--augment", f"{OWN}:louder:by=0.5", *TINY,
        "--metrics-every", "1",
    ]  # fmt: skip
    assert main(["train", *flags, "--out", "whole"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in (f"loss {OWN}:huber, of query sets {OWN}:scaled:by=2.0", "test mae"):
        assert word in said
    assert "ridge" not in said, "losses of two kinds are not compared"
    whole = Path("whole")
    seen = rows(whole)
    assert all(row["query_mae"] > 0 for row in seen)
    assert [("val_mae" in row) for row in seen] == [False, True, False, True]
    summary = json.loads((whole / "summary.json").read_text())
    config = runs.read_config(whole, trust=True)
    assert config.data == f"{OWN}:waves"
    assert config.optimizer == f"{OWN}:Descent:lr=0.02"

    # what is measured is what Python measures
    run = mn.load_run(whole, trust=True)
    assert run.source.shots == 5
    tasks = run.source.batch(range(5), "test")
    found = run.learner.evaluate(tasks)
    # sums of 5 numbers in float64 in another order
    assert summary["test"]["metrics"]["mae"] == pytest.approx(float(found.extra["mae"].mean()))
    with torch.no_grad():
        model = run.learner.adapt(tasks[0].support)
        x, y = tasks[0].query
        loss = 2 * nn.functional.mse_loss(model(x), y)
    # float32: a few operations on a few dozen numbers
    assert float(found.loss[0]) == pytest.approx(float(loss), rel=1e-5)

    # Stopped in the middle, and gone on with.
    assert main(["train", *flags, "--iterations", "2", "--out", "parts"]) == 0
    assert main(["train", "--resume", "parts", "--iterations", "4"]) == 2
    assert main(["train", "--resume", "parts", "--iterations", "4", "--trust"]) == 0
    assert (here / "parts" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    last = [runs.load(name, checkpoint="last", trust=True).state.tensors["model"]
            for name in ("whole", "parts")]  # fmt: skip
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", f"{OWN}:huber"),
        ("query_loss", f"{OWN}:huber"),
        ("metrics", f"mae={OWN}:mae"),
        ("optimizer", f"{OWN}:descent:lr=0.1"),
        ("augment", f"{OWN}:louder"),
        ("data", f"{OWN}:Waves"),
    ],
)
def test_a_file_that_names_one_needs_trust(here: Path, name: str, value: str) -> None:
    """Or the same named with its flag, where it is the command line's word."""
    file = here / "config.json"
    file.write_text(TrainConfig(**({"data": "sinusoid"} | {name: value})).to_json())
    for asked in (lambda: parse(["--config", "config.json"]), lambda: runs.read_config(here)):
        with pytest.raises(UserError) as refused:
            asked()
        for word in (value, "config.json", "--trust", f"the {name.replace('_', ' ')} "):
            assert word in str(refused.value)
    said = [value] if name == "data" else ["--" + name.replace("_", "-"), value]
    for more in (["--trust"], said):
        assert getattr(parse(["--config", "config.json", *more]).train, name) == value
    assert getattr(runs.read_config(here, trust=True), name) == value
    assert OWN not in sys.modules, "nothing was imported"


def test_data_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ways", "2", "--shots", "1", "--queries", "2"]
    for name in ("points", "ready", "Points"):
        assert main(["train", f"{OWN}:{name}", *sizes, *TINY, "--out", name]) == 0
        source = mn.load_run(name, trust=True).source
        assert isinstance(source, Labelled)
        assert set(source.classes("train")) <= {f"k{i}" for i in range(12)}
    assert main(["train", f"{OWN}:fixed", *TINY, "--out", "fixed"]) == 0
    assert isinstance(mn.load_run("fixed", trust=True).source, Sinusoid)
    assert main(["train", f"{OWN}:Waves", *TINY, "--shots", "7"]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith(f"{OWN}-Waves-")


def test_a_class_of_losses_with_options(here: Path) -> None:
    vector_table(here / "data.csv", classes=12, each=6)
    sizes = ["--ways", "2", "--shots", "1", "--queries", "2"]
    loss = ["--loss", f"{OWN}:Smooth:smoothing=0.25"]
    assert main(["train", "data.csv", *sizes, *loss, *TINY, "--out", "run"]) == 0
    assert mn.load_run("run", trust=True).learner.loss.smoothing == 0.25  # type: ignore[union-attr]


def test_pictures_are_augmented_in_training_alone(here: Path) -> None:
    write_images(here / "photos", [f"k{i}" for i in range(10)], 4)
    flags = ["photos", "--ways", "2", "--shots", "1", "--queries", "2", "--head", "fixed", *TINY]
    more = ["--augment", "shift=3,flip", "--augment-query", "--metrics-every", "1"]
    assert main(["train", *flags, *more, "--iterations", "6", "--out", "whole"]) == 0
    assert main(["train", *flags, *more, "--out", "parts"]) == 0
    assert main(["train", "--resume", "parts", "--iterations", "6"]) == 0
    assert (here / "whole" / "metrics.jsonl").read_bytes() == (
        here / "parts" / "metrics.jsonl"
    ).read_bytes()
    run = mn.load_run("whole")
    assert (run.config.augment, run.config.augment_query) == ("flip=true,shift=3", True)
    plain = Labelled.from_folder(here / "photos", ways=2, shots=1, queries=2)
    for split in ("train", "val", "test"):
        assert torch.equal(run.source.task(1, split).support[0], plain.task(1, split).support[0])
    trained = runs.build_source(run.config)
    assert not torch.equal(trained.task(1).support[0], plain.task(1).support[0])
    assert main(["train", "--resume", "parts", "--iterations", "7", "--augment", "flip"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["sinusoid", "--loss", "huber"], ["--loss huber", "module:attribute"]),
        (["sinusoid", "--loss", f"{OWN}:hubber"], ["Did you mean 'huber'"]),
        (["sinusoid", "--loss", "no_such_module_here:f"], ["no_such_module_here", "imported"]),
        (["sinusoid", "--loss", "math:sqrt"], ["math is a module of Python itself"]),
        (["sinusoid", "--loss", f"{OWN}:number"], ["--loss", "makes no function"]),
        (["sinusoid", "--loss", f"{OWN}:whole"], ["takes the model"]),
        (["sinusoid", "--loss", f"{OWN}:scaled:times=2"], ["no option 'times'", "by"]),
        (["sinusoid", "--loss", f"{OWN}:Smooth:smoothing=much"], ["smoothing=much", "a number"]),
        (["sinusoid", "--query-loss", "mse"], ["--query-loss mse", "module:attribute"]),
        (["sinusoid", "--metrics", "mae"], ["--metrics", "key=value"]),
        (["sinusoid", "--metrics", "mae=l1"], ["--metrics l1", "module:attribute"]),
        (["sinusoid", "--metrics", f"loss={OWN}:mae"], ["--metrics loss", "taken"]),
        (["sinusoid", "--metrics", f"m={OWN}:scaled:by=2"], ["metrics take no options"]),
        (["sinusoid", "--optimizer", f"{OWN}:no_optimizer"], ["made a list", "Optimizer"]),
        (
            ["sinusoid", "--optimizer", f"{OWN}:Descent:rate=1"],
            ["no option 'rate'", "lr, momentum"],
        ),
        (["sinusoid", "--augment", "flip"], ["--augment flip: ", "for pictures"]),
        (["sinusoid", "--augment", "rotate=3"], ["no option 'rotate'", "flip, shift, noise"]),
        (["sinusoid", "--augment", "noise=-1"], ["noise=-1"]),
        (["sinusoid", "--augment", "shift=two"], ["shift=two", "whole number"]),
        (["sinusoid", "--augment", f"{OWN}:shorter"], ["same shape and type"]),
        (["sinusoid", "--augment-query"], ["--augment-query needs --augment"]),
        ([f"{OWN}:nothing"], ["nothing"]),
        ([f"{OWN}:number"], ["made a int", "source of tasks"]),
        ([f"{OWN}:waves:noise=1"], ["--data-options"]),
        ([f"{OWN}:waves", "--data-options", "noice=1"], ["no option 'noice'", "noise"]),
        ([f"{OWN}:waves", "--ways", "3"], ["ways"]),
        ([f"{OWN}:fixed", "--shots", "3"], ["--shots 3", "decides them itself"]),
        (["no_such_module_here:tasks"], ["no_such_module_here", "imported"]),
    ],
    ids=lambda value: value[-1] if isinstance(value[-1], str) else None,
)
def test_bad_input(flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags, *TINY, "--out", "run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in error, error
    assert "Traceback" not in error
    assert not Path("run").exists()
