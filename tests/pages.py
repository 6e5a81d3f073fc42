"""Runs to make pages of, whose names would be markup if anything let them."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from html import unescape
from pathlib import Path

from metanudge.cli import main
from metanudge.training.config import TrainConfig
from metanudge.training.files import seal
from metanudge.training.progress import Quiet
from metanudge.training.spec_language import show_options
from metanudge.training.trainer import train
from trained_runs import write_images

CLASSES = (
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(2)>',
    "{{ 7 * 7 }}",
    "&lt;b&gt;$\\frac{1}{0}$",
    "plain",
    "a-name-without-any-place-to-break-it-that-goes-on-and-on-and-on-until-it-leaves-every-phone",
)
BASELINE = "<b onclick=alert(3)>baseline</b>"
DATA = "<i>$data$<!--"
EVIL = (*CLASSES, BASELINE, DATA)
_SIZES = TrainConfig(
    ways=2, shots=1, queries=2, tasks=2, iterations=2, eval_every=1, eval_tasks=4, test_tasks=4,
    model="mlp:hidden=(4,)", solver="gradient_descent:lr=0.1,steps=2", estimator="fomaml",
    metrics_every=1, device="cpu",
)  # fmt: skip


def evil_run(folder: Path) -> Path:
    """A finished and evaluated run on pictures."""
    splits = {"train": ["one", "two"], "val": ["three", "four"], "test": list(CLASSES)}
    data = write_images(
        folder / DATA, [name for names in splits.values() for name in names], each=4, size=8
    )
    run = folder / "<script>alert(4)<"
    config = dataclasses.replace(
        _SIZES, data=str(data), data_options=show_options({"splits": splits}), out=str(run)
    )
    finish(config, run)
    summary = json.loads((run / "summary.json").read_text())
    del summary["sha256"]
    found = {**summary["baselines"]["chance"], "accuracy": 0.99}
    summary["baselines"] = {BASELINE: found, **summary["baselines"]}
    (run / "summary.json").write_text(seal(summary, indent=2))
    return run


def text_run(folder: Path) -> tuple[Path, dict[str, str]]:
    """A finished and evaluated run on texts, and the label of every text."""
    labels = ["</title><script>alert(5)</script>", "b\u202ec", "plain", "d", "e", "f", "g", "h"]
    texts = {
        f"<p>{label[::-1]} {number}</p> & 'so on'": label for label in labels for number in range(4)
    }
    with open(folder / "texts.csv", "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([("text", "label"), *texts.items()])
    run = folder / "texts"
    config = dataclasses.replace(
        _SIZES, data=str(folder / "texts.csv"), text="text", model="text:width=4", out=str(run),
        data_options="splits=(0.25,0.25,0.5)",
    )  # fmt: skip
    finish(config, run)
    return run, texts


def finish(config: TrainConfig, run: Path) -> None:
    """Train and evaluate."""
    assert train(config, reporter=Quiet()) == 0
    assert main(["eval", str(run), "--tasks", "12", "--device", "cpu"]) == 0


def words_of(page: str) -> str:
    """The text of a page, one space between words."""
    page = re.sub(r"<(style|svg|title)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())
