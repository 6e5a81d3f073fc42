"""Few-shot tasks from texts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from metanudge.tasks import EncodedText, Labelled, Text
from metanudge.tasks.read_texts import read_texts
from text_models import CLASSES, rows, save_bert, save_tokenizer, write_csv, write_jsonl

STREAM = """
import hashlib
from metanudge.tasks import Text
from text_models import rows
source = Text.from_table(rows(), label="intent", ways=2, shots=2, queries=3, seed=7)
digest = hashlib.sha256()
for task in source.batch(range(20), "train"):
    for inputs, labels in (task.support, task.query):
        for tensor in (inputs["input_ids"], inputs["attention_mask"], labels):
            digest.update(repr(tensor.tolist()).encode())
print(digest.hexdigest())
"""


def decoded(ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
    """The texts again, from bytes."""
    return [
        bytes(row[: int(count)].sub(1).tolist()).decode()
        for row, count in zip(ids, mask.sum(1), strict=True)
    ]


def test_a_task_holds_texts_of_its_classes_and_a_mask():
    table = rows()
    label_of = {row["text"]: row["intent"] for row in table}
    source = Text.from_table(table, label="intent", ways=2, shots=2, queries=3)
    [names] = source.episode_classes([4])
    task = source.task(4)
    for inputs, labels in (task.support, task.query):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        texts = decoded(ids, mask)
        assert [label_of[text] for text in texts] == [names[int(label)] for label in labels]
        assert bool((ids[mask == 0] == 0).all())
        longest = max(len(text) for text in texts)
        assert longest <= ids.shape[1] <= 1.5 * longest
    assert len({*decoded(**_named(task.support[0])), *decoded(**_named(task.query[0]))}) == 10


def _named(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"ids": inputs["input_ids"], "mask": inputs["attention_mask"]}


def test_the_rows_are_those_of_labelled():
    table = rows()
    numbers = torch.arange(len(table))
    options = {"ways": 3, "shots": 2, "queries": 2, "seed": 3}
    source = Text.from_table(table, label="intent", **options)
    same = Labelled(numbers, [row["intent"] for row in table], **options)
    for index in range(5):
        texts = decoded(**_named(source.task(index, "train").query[0]))
        places = same.task(index, "train").query[0].flatten().tolist()
        assert texts == [table[place]["text"] for place in places]


def test_an_episode_depends_on_its_number_alone():
    source = Text.from_table(rows(), label="intent", ways=2, shots=2, queries=3)
    together = source.batch(range(10, 20))
    for place in range(10):
        alone = source.task(10 + place)
        for one, other in ((together[place].support, alone.support),
                           (together[place].query, alone.query)):  # fmt: skip
            assert torch.equal(one[0]["input_ids"], other[0]["input_ids"])
            assert torch.equal(one[0]["attention_mask"], other[0]["attention_mask"])


def test_the_stream_is_the_same_in_another_process():
    digest = hashlib.sha256()
    source = Text.from_table(rows(), label="intent", ways=2, shots=2, queries=3, seed=7)
    for task in source.batch(range(20), "train"):
        for inputs, labels in (task.support, task.query):
            for tensor in (inputs["input_ids"], inputs["attention_mask"], labels):
                digest.update(repr(tensor.tolist()).encode())
    command = [sys.executable, "-c", STREAM]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert ran.stdout.split() == [digest.hexdigest()]


def test_files_of_all_kinds_give_the_same_source(tmp_path: Path):
    table = rows()
    table[0]["text"] = 'two lines\nand a "quote", too'
    comma, lines = write_csv(tmp_path / "a.csv", table), write_jsonl(tmp_path / "a.jsonl", table)
    tabs = tmp_path / "a.tsv"
    # a text with a tab of its own would need quotes; these have none
    plain = "\n".join(f"{row['text']}\t{row['intent']}" for row in table[1:])
    tabs.write_text(f"text\tintent\n{plain}\n")
    columns = {name: [row[name] for row in table] for name in ("text", "intent")}
    read = [read_texts(found, label="intent") for found in (comma, lines, table, columns)]
    assert all(one.texts == [row["text"] for row in table] for one in read)
    assert all(one.labels == [row["intent"] for row in table] for one in read)
    assert read_texts(tabs, label="intent").texts == read[0].texts[1:]


def test_long_texts_are_cut_with_a_note():
    table = rows()
    source = Text.from_table(table, label="intent", ways=2, queries=3, max_length=10)
    cut = sum(len(row["text"]) > 10 for row in table)
    assert f"{cut} of {len(table)} texts are cut to 10" in source.note
    assert source.task(0).query[0]["input_ids"].shape[1] == 10


def test_a_tokenizer_of_transformers(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "words")
    source = Text.from_table(rows(), label="intent", tokenizer=str(folder), ways=2, queries=3)
    ids = source.task(0).support[0]["input_ids"]
    assert ids[:, 0].tolist() == [2, 2]
    assert source.form.vocabulary == 16
    cut = Text.from_table(
        rows(), label="intent", tokenizer=str(folder), ways=2, queries=3, max_length=4
    )
    assert cut.task(0).support[0]["input_ids"][:, -1].tolist() == [3, 3]
    with pytest.raises(ValueError, match="max_length=40 is more than the 32"):
        Text.from_table(rows(), label="intent", tokenizer=str(folder), max_length=40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["a", " "], "labels": ["x", "y"]}, "Text 1 is empty"),
        ({"texts": ["a", 3], "labels": ["x", "y"]}, "Text 1 is a int"),
        ({"texts": [], "labels": []}, "texts holds none"),
        ({"texts": ["a", "b"], "labels": ["x"]}, "2 examples and y has 1 labels"),
        ({"tokenizer": "nobody/has-this"}, "tokenizer 'nobody/has-this' is not there"),
        ({"max_length": -1}, "max_length=-1 is not a positive integer"),
        ({"shots": 9}, "has 8 examples, but shots=9"),
    ],
)
def test_what_cannot_be(change, message):
    table = rows()
    texts, labels = ([row[name] for row in table] for name in ("text", "intent"))
    with pytest.raises((ValueError, TypeError), match=message):
        Text(**{"texts": texts, "labels": labels, "ways": 2, "queries": 3} | change)


def test_a_broken_line_is_named(tmp_path: Path):
    file = write_jsonl(tmp_path / "a.jsonl", rows(2))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], '{"text": "open', *lines[3:]]))
    with pytest.raises(ValueError, match=r"line 4 is not JSON"):
        read_texts(file, label="intent")
    file.write_text("\n".join([*lines[:3], '["a", "b"]']))
    with pytest.raises(ValueError, match=r"line 4 is a JSON list"):
        read_texts(file, label="intent")
    file.write_text("\n".join([*lines[:3], '{"text": "a"}']))
    with pytest.raises(ValueError, match=r"line 4 has no column 'intent'"):
        read_texts(file, label="intent")
    with pytest.raises(TypeError, match="The table is a int"):
        read_texts(3)
    with pytest.raises(ValueError, match="both text and label"):
        read_texts(rows(), text="text", label="text")


def test_features_are_masked_means_and_are_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    folder = save_bert(tmp_path / "bert")
    table = rows(4)
    options = {"label": "intent", "encoder": str(folder), "ways": 2, "queries": 2}
    plain = EncodedText.from_table(table, standardise=False, **options)
    # by hand, one text at a time, so without padding
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModel))
    found = []
    for row in table:
        with torch.no_grad():
            hidden = model.eval()(**tokenizer(row["text"], return_tensors="pt")).last_hidden_state
        mean = hidden[0].mean(0)
        found.append((mean / mean.norm()).numpy())
    by_hand = Labelled(np.stack(found), [r["intent"] for r in table], ways=2, queries=2)
    for index in range(3):
        assert torch.allclose(plain.task(index).query[0], by_hand.task(index).query[0], atol=1e-5)
    [kept] = (tmp_path / "cache" / "encoded").iterdir()
    before = kept.stat().st_mtime_ns
    monkeypatch.setattr("metanudge.tasks.encoder._computed", None)  # it would be called in vain
    scaled = EncodedText.from_table(table, **options)
    assert kept.stat().st_mtime_ns == before
    x = scaled._examples[torch.from_numpy(scaled._pools["train"].members())]
    assert torch.allclose(x.mean(0), torch.zeros(16), atol=1e-5)
    assert torch.allclose(x.std(0, unbiased=False), torch.ones(16), atol=1e-4)
    assert set(scaled.classes("train")) <= set(CLASSES)


def test_an_encoder_without_safe_weights_is_refused(tmp_path: Path):
    folder = save_bert(tmp_path / "bert")
    options = {"label": "intent", "encoder": str(folder), "ways": 2, "queries": 2}
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle that could run any code"):
        EncodedText.from_table(rows(4), **options)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        EncodedText.from_table(rows(4), **options)
