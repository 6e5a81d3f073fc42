"""Texts on the command line: train, eval, adapt, and what is refused."""

from __future__ import annotations

import builtins
import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from metanudge.baselines import Baselines
from metanudge.cli import main
from metanudge.tasks import Labelled
from metanudge.tasks.ngrams import ngrams
from metanudge.training import runs
from metanudge.training.config import TrainConfig
from metanudge.training.files import SEAL
from metanudge.training.sources import build_learner
from metanudge.training.specs import build_optimizer, parameter_groups
from text_models import rows, save_bert, save_tokenizer, write_csv, write_jsonl

SHORT = ["--iterations=2", "--tasks=2", "--eval-tasks=2", "--test-tasks=4", "--ways=2", "--shots=2",
         "--queries=3", "--engine=inplace"]  # fmt: skip


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def train(data: Path, out: Path, *flags: str) -> int:
    named = ["--text=text", "--label=intent", f"--out={out}"]
    return main(["train", str(data), *SHORT, *named, *flags])


def adapted(run: Path, folder: Path, *flags: str) -> list[dict[str, str]]:
    """What the run says of all rows of two classes, adapted to two of each."""
    table = [row for row in rows() if row["intent"] in ("intent03", "intent07")]
    few = write_csv(folder / "few.csv", [*table[:2], *table[8:10]])
    many = write_jsonl(folder / "many.jsonl", table)
    out = folder / "labels.csv"
    where = [f"--support={few}", f"--predict={many}", f"--out={out}", "--overwrite"]
    assert main(["adapt", str(run), *where, *flags]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_clinc150(tmp_path: Path) -> None:
    """From the published file to the baselines."""
    file = Path(os.environ.get("METANUDGE_DATA", "")) / "clinc150" / "data_full.json"
    if not file.is_file():
        pytest.skip("METANUDGE_DATA names no folder with clinc150/data_full.json")
    pairs = json.loads(file.read_text(encoding="utf-8"))["val"]
    table = [{"text": text, "intent": intent} for text, intent in pairs]
    data, run = write_csv(tmp_path / "intents.csv", table), tmp_path / "run"
    assert train(data, run) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert {"logistic regression", "nearest centroid", "chance"} <= set(summary["baselines"])
    assert len({intent for _, intent in pairs}) == 150


def test_without_an_encoder_words_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, run = write_csv(tmp_path / "a.csv", rows()), tmp_path / "run"
    assert train(data, run) == 0
    assert "1024 numbers (ngrams)" in capsys.readouterr().out
    config = json.loads((run / "config.json").read_text())
    named = {"model": "features", "tokenizer": None, "encoder": "ngrams"}
    assert {name: config[name] for name in named} == named
    assert "standardise=false" in config["data_options"].lower()
    assert main(["eval", str(run), "--tasks=4"]) == 0
    assert main(["train", f"--resume={run}", "--iterations=3"]) == 0
    again = ["--config", str(run / "config.json"), f"--out={tmp_path / 'b'}"]
    assert main(["train", *again]) == 0, "a file that names n-grams needs no trust"
    loaded = runs.load(run)
    table = [row for row in rows() if row["intent"] in ("intent03", "intent07")]
    x = torch.from_numpy(ngrams([row["text"] for row in table]))
    few = [0, 1, 8, 9]
    model = loaded.learner.adapt((x[few], torch.tensor([0, 0, 1, 1]))).eval()
    with torch.no_grad():
        chances = model(x).double().softmax(1)
    found = adapted(run, tmp_path)
    wanted = [float(row["intent07"]) for row in found]
    assert torch.allclose(chances[:, 1], torch.tensor(wanted).double(), atol=1e-5)
    right = [row["label"] == own["intent"] for row, own in zip(found, table, strict=True)]
    assert all(right), "two words tell the class"


def test_bytes_from_training_to_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, run = write_csv(tmp_path / "a.csv", rows()), tmp_path / "run"
    assert train(data, run, "--tokenizer=bytes") == 0
    said = capsys.readouterr().out
    assert "texts of up to 15 tokens (bytes tokens)" in said
    assert "logistic regression" in said
    config = json.loads((run / "config.json").read_text())
    assert (config["model"], config["tokenizer"], config["label"]) == ("text", "bytes", "intent")
    assert main(["eval", str(run), "--tasks=4"]) == 0
    found = adapted(run, tmp_path)
    assert len(found) == 16
    assert {row["label"] for row in found} <= {"intent03", "intent07"}
    # the same as the learner adapted in Python, to texts encoded by hand
    loaded = runs.load(run)
    ids = [[byte + 1 for byte in row["text"].encode()] for row in rows() if row["intent"] in
           ("intent03", "intent07")]  # fmt: skip
    width = max(map(len, ids))
    whole = torch.tensor([one + [0] * (width - len(one)) for one in ids])
    mask = (whole > 0).long()
    few = torch.tensor([0, 1, 8, 9])
    support = {"input_ids": whole[few], "attention_mask": mask[few]}, torch.tensor([0, 0, 1, 1])
    model = loaded.learner.adapt(support).eval()
    with torch.no_grad():
        chances = model(whole, mask).double().softmax(1)
    wanted = [float(row["intent07"]) for row in found]
    assert torch.allclose(chances[:, 1], torch.tensor(wanted).double(), atol=1e-5)


def test_frozen_features_from_training_to_labels(tmp_path: Path):
    data, run = write_jsonl(tmp_path / "a.jsonl", rows()), tmp_path / "run"
    folder = save_bert(tmp_path / "bert")
    assert train(data, run, f"--encoder={folder}") == 0
    loaded = runs.load(run)
    assert loaded.config.model == "features"
    assert loaded.shapes.form is not None
    assert loaded.shapes.form.encoder == str(folder.resolve())
    assert loaded.source.standardisation == loaded.shapes.standardisation is not None
    assert len(adapted(run, tmp_path, f"--export={tmp_path / 'model'}")) == 16
    assert main(["train", f"--resume={run}", "--iterations=3"]) == 0
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    out = tmp_path / "again.csv"
    few = tmp_path / "few.csv"
    flags = [f"--support={few}", f"--predict={few}", f"--out={out}"]
    assert main(["adapt", str(run), *flags]) == 2
    assert not out.exists()


@pytest.mark.parametrize("peft", ["none", "lora:r=2,target_modules=[query,value]"])
def test_a_model_of_transformers(peft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, run = write_csv(tmp_path / "a.csv", rows()), tmp_path / "run"
    folder = save_bert(tmp_path / "bert")
    assert train(data, run, f"--model=hf:{folder}", f"--peft={peft}", "--adapt=*") == 0
    config = json.loads((run / "config.json").read_text())
    assert config["model"] == f"hf:{folder.resolve()}"
    assert config["tokenizer"] == str(folder.resolve())
    assert main(["eval", str(run), "--tasks=4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "None of its code would be run" in said
    assert "--trust" in said
    assert main(["eval", str(run), "--tasks=4", "--trust"]) == 0
    loaded = runs.load(run, trust=True)
    trained = {n for n, p in loaded.learner.model.named_parameters() if p.requires_grad}
    assert (peft == "none") == any("word_embeddings" in name for name in trained)
    assert any("classifier" in name for name in trained)
    assert len(adapted(run, tmp_path, "--trust")) == 16
    exported = tmp_path / "model"
    flags = [f"--support={tmp_path / 'few.csv'}", f"--export={exported}", "--trust"]
    assert main(["adapt", str(run), *flags]) == 2
    assert not exported.exists()
    assert main(["adapt", str(run), *flags, "--no-program"]) == 0


def _broken(file: Path) -> Path:
    lines = write_jsonl(file, rows()).read_text().splitlines()
    file.write_text("\n".join([*lines[:4], '{"text": ', *lines[4:]]))
    return file


def _with(file: Path, *more: dict[str, str]) -> Path:
    return write_csv(file, [*rows(), *more])


BAD: dict[str, tuple[list[str], str]] = {
    "unknown tokenizer": (["--tokenizer=nobody/has-this"], "'nobody/has-this' is not there"),
    "no such tokenizer folder": (["--tokenizer=./nowhere"], "no folder './nowhere'"),
    "folder without tokenizer": (["--tokenizer={empty}"], "no folder with a tokenizer"),
    "unknown text column": (["--text=words"], "no column 'words'"),
    "unknown label column": (["--label=class"], "(--text, --label)"),
    "text is label": (["--label=text"], "cannot be both text and label"),
    "more tokens than the tokenizer's model": (
        ["--tokenizer={words}", "--data-options=max_length=99"],
        "max_length=99 is more than the 32",
    ),
    "text longer than the model": (
        ["--model=hf:{bert}", "--tokenizer={words}"],
        "takes 4 tokens, and the longest text has",
    ),
    "more tokens than the model knows": (["--model=hf:{bert}", "--tokenizer=bytes",
                                          "--data-options=max_length=4"], "knows 16 tokens"),
    "hf on numbers": (["--model=hf:{bert}", "--encoder={bert}"], "Leave one of the two out"),
    "hf of nothing": (["--model=hf:", "--tokenizer=bytes"], "names no model"),
    "hf without weights": (["--model=hf:{words}"], "has no weights"),
    "tokens of n-grams": (["--model=text", "--encoder=ngrams"], "cannot take the data"),
    "nearly n-grams": (["--encoder=ngram"], "Did you mean 'ngrams'?"),
    "no tokens": (["--data-options=max_length=0"], "max_length=0 is not a positive integer"),
    "encoder without weights": (["--encoder={words}"], "has no weights"),
    "encoder in pickle": (["--encoder={pickled}"], "a pickle that could run any code"),
    "encoder and tokenizer": (["--encoder={bert}", "--tokenizer=bytes"], "contradict each other"),
    "peft for ours": (["--peft=lora"], "is for models of transformers"),
    "unknown adapter": (["--peft=ia4"], "ia4"),
    "unknown layer": (
        ["--model=hf:{bert}", "--data-options=max_length=4", "--peft=lora:target_modules=[nope]"],
        "nope",
    ),
    "empty text": (["{empty_text}"], "the text (column 'text') is empty"),
    "class with one example": (["{small_class}"], "has 1 examples, but shots=2"),
    "broken line": (["{broken}"], "line 5 is not JSON"),
    "no table": (["{empty}"], "is no file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags, message = BAD[case]
    needed = " ".join(flags)
    places: dict[str, Any] = {"empty": tmp_path / "empty"}
    places["empty"].mkdir()
    if "{words}" in needed:
        places["words"] = save_tokenizer(tmp_path / "words")
    for name in ("bert", "pickled"):
        if f"{{{name}}}" in needed:
            places[name] = save_bert(tmp_path / name, longest=4)
    if "pickled" in places:
        os.rename(places["pickled"] / "model.safetensors", places["pickled"] / "model.bin")
    files = {
        "empty_text": lambda: _with(tmp_path / "b.csv", {"text": " ", "intent": "intent00"}),
        "small_class": lambda: _with(tmp_path / "b.csv", {"text": "alone", "intent": "single"}),
        "broken": lambda: _broken(tmp_path / "b.jsonl"),
    }
    places |= {name: make() for name, make in files.items() if f"{{{name}}}" in needed}
    data = write_csv(tmp_path / "a.csv", rows())
    given = [flag.format(**places) for flag in flags]
    if not given[0].startswith("--"):
        data = Path(given.pop(0))
    run = tmp_path / "run"
    assert train(data, run, *given) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not run.exists()


def test_flags_of_texts_need_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_csv(tmp_path / "a.csv", rows())
    assert main(["train", str(data), "--label=intent", f"--out={tmp_path / 'run'}"]) == 2
    assert "--label is for texts" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["transformers", "peft"])
def test_what_is_not_installed_is_named(missing: str, tmp_path: Path, capsys, monkeypatch):
    data, folder = write_csv(tmp_path / "a.csv", rows()), save_bert(tmp_path / "bert")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    flags = [f"--model=hf:{folder}", "--peft=lora:r=2"]
    assert train(data, tmp_path / "run", *flags) == 2
    said = capsys.readouterr().err
    assert f"needs {missing}" in said
    assert "metanudge[hf]" in said.replace("\n", "")
    assert not (tmp_path / "run").exists()


def test_a_name_in_a_file_needs_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_csv(tmp_path / "a.csv", rows())
    assert train(data, tmp_path / "run") == 0
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    values = {k: v for k, v in values.items() if k != SEAL} | {"tokenizer": "someone/elses"}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    assert main(["train", f"--config={other}", f"--out={tmp_path / 'b'}"]) == 2
    assert "might be fetched" in capsys.readouterr().err


def test_features_of_length_1_train_at_the_defaults(tmp_path: Path):
    """Clusters on a sphere, where nearest centroid is the best there is."""
    torch.manual_seed(0)
    centres = torch.randn(40, 32)
    x = centres.repeat_interleave(20, 0) + 1.5 * torch.randn(800, 32)
    x = x / x.norm(dim=1, keepdim=True)
    y = torch.arange(40).repeat_interleave(20)
    source = Labelled(x, y, ways=5, shots=5, queries=10, standardise=True)
    learner = build_learner(TrainConfig("x", model="features"), source)
    optimizer = build_optimizer(TrainConfig().optimizer, parameter_groups(learner, None))
    for tasks in source.batches(size=16, count=100):
        optimizer.zero_grad()
        learner.backward(tasks)
        optimizer.step()
    test = source.batch(range(100), "test")
    val = source.batch(range(20), "val")
    centroid = Baselines.fit("classification", val, classes=5).scores(test)["nearest centroid"]
    assert learner.evaluate(test).mean_accuracy >= float(centroid.mean()) - 0.03
