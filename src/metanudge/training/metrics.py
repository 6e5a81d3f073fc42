"""What a run writes down, one JSON line per meta-step, and the learning curve that is drawn of it.

The pictures of a run have quiet axes, one colour for each thing, and a legend off the data. On a
page the colours follow the reader's theme: `metanudge.page.svg` puts variables of the page in their
place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metanudge.learner import MetaLearner
from metanudge.training.errors import UserError, readable
from metanudge.training.files import (
    open_to_append,
    parse_json,
    read_bytes,
    replacing,
    without_nan,
)

Values = Mapping[str, float | int | str | None]
INK, FAINT = "#23272f", "#d5dae1"
BEFORE, AFTER, VALIDATION = "#9aa3b2", "#2f6fde", "#d9480f"
BASELINE, BY_CHANCE = "#2b8a3e", "#6b7280"
CHANCE = "chance"


class MetricsLog:
    """A file of JSON lines that can be cut back to where a checkpoint left it.

    NaN and infinity become null, so every line is valid JSON. The same values give the same bytes.

    Args:
        file: is appended to.
        size: cut the file back to this many bytes first; lines after a checkpoint are written again
            by the resumed run.
    """

    def __init__(self, file: Path, *, size: int | None = None) -> None:
        self._path = file
        self._file = open_to_append(file)
        if size is not None and self._file.tell() >= size:
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)
        self._digest = hashlib.sha256(read_bytes(file))

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    @property
    def sha256(self) -> str:
        """Of the bytes so far, as they were written."""
        return self._digest.hexdigest()

    @property
    def in_place(self) -> bool:
        """Whether the file still has its name: a deleted or moved one can be written to, and nobody
        would see it.
        """
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def write(self, values: Values) -> None:
        """Add a line and hand it to the operating system."""
        line = json.dumps(without_nan(values), allow_nan=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._digest.update(line)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_metrics(file: Path, *, size: int, sha256: str | None) -> None:
    """Refuse a metrics file that does not begin with what it held when a checkpoint was saved; one
    that is not there may be.
    """
    if not os.path.lexists(file):
        return
    with readable(file):
        data = read_bytes(file)
    what = ""
    if len(data) < size:
        what = f"has {len(data)} bytes, and had {size}"
    elif sha256 not in (None, hashlib.sha256(data[:size]).hexdigest()):
        what = "does not match the sha256 that the checkpoint has of it"
    if what:
        raise UserError(
            f"{file} was changed since the checkpoint was saved: it {what}. Put it back, or move it"
            " away to go on without it."
        )


def read_metrics(
    file: Path, *, note: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; those that something has damaged are left out, and
    `note` is told which.
    """
    if not os.path.lexists(file):
        return []
    # what follows the last newline was cut off by a crash
    lines = read_bytes(file).split(b"\n")[:-1]
    rows = [_row(line) for line in lines]
    damaged = [str(number) for number, row in enumerate(rows, 1) if row is None]
    if damaged:
        more = ", …" if len(damaged) > 5 else ""
        note(
            f"{file} has damaged lines, {len(damaged)} of {len(rows)}, which are left out here:"
            f" line {', '.join(damaged[:5])}{more}."
        )
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as `MetricsLog` writes it; None for anything else."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    sound = (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and all(v is None or type(v) in (int, float) for v in row.values())
    )
    return row if sound else None


def stiffness(learner: MetaLearner) -> dict[str, float]:
    """λ where it is learned: `lam`, or `lam.NAME` for each tensor (the geometric mean of its
    entries); nothing where it is fixed.
    """
    log_lam = learner.log_lam
    return {} if log_lam is None else _means("lam", log_lam, learner.learn_lam == "scalar")


def inner_rates(learner: MetaLearner) -> dict[str, float]:
    """Inner rates where they are learned: `inner_lr`, or `inner_lr.NAME` for each tensor (the mean
    of its entries or steps, geometric where they are positive).
    """
    rates = learner.learned_rates
    if rates is None:
        return {}
    return _means("inner_lr", rates, rates.what.per == "scalar", logs=rates.what.positive)


def _means(key: str, learned: nn.Module, one: bool, *, logs: bool = True) -> dict[str, float]:
    named = dict(learned.named_parameters())
    means = torch.stack([p.detach().double().mean() for p in named.values()])
    names = [key] if one else [f"{key}.{name}" for name in named]
    return dict(zip(names, (means.exp() if logs else means).tolist(), strict=True))


LEARNED = {"lam": "λ", "inner_lr": "inner lr"}  # as metrics and people call it


def describe_learned(values: Mapping[str, Any], key: str) -> str | None:
    """What is learned besides the model, among a meta-step's values, in a word; None where it is
    not.

    Example:
        >>> (describe_learned({"lam": 1.5}, "lam"),
        ...     describe_learned({"lam.0.weight": 0.5, "lam.0.bias": 3.25, "residual": 9.0}, "lam"))
        ('λ 1.5', 'λ 0.5–3.25')
    """
    found = [value for name, value in values.items() if name == key or name.startswith(f"{key}.")]
    if not found:
        return None
    low, high = f"{min(found):.3g}", f"{max(found):.3g}"
    return f"{LEARNED[key]} {low}" + ("" if low == high else f"–{high}")


# The learning curve


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean over the last `window` values (fewer at the beginning).

    Example:
        >>> smooth([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    return [
        sum(part) / len(part)
        for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    ]


def learning_curve(
    rows: Sequence[Mapping[str, Any]],
    *,
    test: Mapping[str, Any] | None = None,
    beside: Mapping[str, Mapping[str, float]] | None = None,
    size: tuple[float, float] = (9.5, 4.5),
) -> Any:
    """A figure of query accuracy (loss, for regression) before and after adaptation over the
    meta-steps, with the validations; a remark where training goes on and validation falls.

    Args:
        rows: as `read_metrics` gives them.
        test: the test result, drawn as a line, with keys "accuracy" or "loss".
        beside: the baselines, the best first; it and chance are lines, too.
        size: width and height in inches.
    """
    quantity = quantity_of(rows)
    percent = quantity == "accuracy"
    scale = 100.0 if percent else 1.0

    def column(key: str) -> tuple[list[int], list[float]]:
        found = [(row["step"], scale * row[key]) for row in rows if row.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]

    figure, axes = new_figure(*size)
    nudged = any(row.get("nudged") for row in rows)
    window = max(1, len(column(f"query_{quantity}")[0]) // 30)
    for key, color, label in (
        (f"query_{quantity}_before", BEFORE, "before adaptation"),
        (f"query_{quantity}", AFTER, "after adaptation" + " (nudged)" * nudged),
    ):
        steps, values = column(key)
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=0.8)
        axes.plot(
            steps, smooth(values, window), color=color, linewidth=2.0, label=f"training, {label}"
        )
    steps, values = column(f"val_{quantity}")
    if steps:
        axes.plot(
            steps,
            values,
            "o-",
            color=VALIDATION,
            markersize=5,
            linewidth=1.2,
            markeredgecolor="white",
            label="validation",
        )
    _mark(axes, rows, quantity, test, beside or {})
    axes.set_xlabel("meta-step")
    axes.set_ylabel("query accuracy (%)" if percent else "query loss")
    if percent:
        axes.set_ylim(0, 102)
    elif all(
        value > 0
        for key in ("query_loss", "query_loss_before", "val_loss")
        for value in column(key)[1]
    ):
        axes.set_yscale("log")
    return figure


def quantity_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a curve shows: "accuracy", or "loss" where there is none."""
    return "accuracy" if any(_known(row) for row in rows) else "loss"


def _mark(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    quantity: str,
    test: Mapping[str, Any] | None,
    beside: Mapping[str, Mapping[str, float]],
) -> None:
    """Lines for the test and what it is compared with, and the remark."""
    percent = quantity == "accuracy"
    scale = 100.0 if percent else 1.0
    if test is not None and test.get(quantity) is not None:
        value = scale * test[quantity]
        level(axes, "test", value, percent=percent, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    baseline_levels(axes, beside, quantity, scale)
    if (step := parted(rows, quantity)) is not None:
        remark = f"validation is worse since step {step}, training is not"
        axes.axvline(step, color=VALIDATION, linewidth=0.8, linestyle=":")
        axes.annotate(
            remark, (step, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8,
            color=VALIDATION, ha="right", va="bottom",
        )  # fmt: skip


def parted(rows: Sequence[Mapping[str, Any]], quantity: str) -> int | None:
    """The step of the best validation, where the last one is worse beyond both intervals and
    training went on improving; losses have no intervals and are not judged.

    Example:
        >>> rows = [{"step": s, "query_accuracy": s / 10, "val_accuracy": v,
        ...     "val_accuracy_ci95": 0.01} for s, v in ((1, 0.5), (2, 0.7), (3, 0.6))]
        >>> parted(rows, "accuracy"), parted(rows[:2], "accuracy")
        (2, None)
    """
    key = f"val_{quantity}"
    looks = [row for row in rows if row.get(key) is not None and row.get(f"{key}_ci95") is not None]
    if quantity != "accuracy" or not looks:
        return None
    best, last = max(looks, key=lambda row: row[key]), looks[-1]
    if best[key] - last[key] <= best[f"{key}_ci95"] + last[f"{key}_ci95"]:
        return None
    trained = [(row["step"], row["query_accuracy"]) for row in rows if _known(row)]
    before = [value for step, value in trained if step <= best["step"]][-5:]
    after = [value for _, value in trained][-5:]
    better = before and sum(after) / len(after) > sum(before) / len(before)
    return int(best["step"]) if better else None


def _known(row: Mapping[str, Any]) -> bool:
    return row.get("query_accuracy") is not None


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def tidy(axes: Any) -> None:
    """The house style for axes made otherwise."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both", labelsize=9)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(INK)


def level(axes: Any, name: str, value: float, *, percent: bool, **line: Any) -> None:
    """A horizontal line with its value in the legend."""
    text = f"{name} {value:.1f} %" if percent else f"{name} {value:.3g}"
    axes.axhline(value, label=text, **line)


def baseline_levels(
    axes: Any, beside: Mapping[str, Mapping[str, Any]], quantity: str, scale: float
) -> None:
    """Lines for the best baseline, and for chance; `beside` has the best first."""
    for place, (name, found) in enumerate(beside.items()):
        if (place == 0 or name == CHANCE) and found.get(quantity) is not None:
            color = BY_CHANCE if name == CHANCE else BASELINE
            level(
                axes, name, scale * found[quantity], percent=quantity == "accuracy",
                color=color, linestyle=(0, (1, 2)), linewidth=1.4,
            )  # fmt: skip


def save(figure: Any, file: Path, title: str) -> None:
    """Write a figure with its title and a legend beside the axes."""
    (axes,) = figure.axes
    # a folder's name is no formula, dollars or not
    axes.set_title(title, loc="left", fontsize=11, color=INK, parse_math=False)
    axes.legend(
        frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, labelcolor=INK
    )
    with replacing(file) as stream:
        figure.savefig(stream, format=file.suffix[1:].lower() or "png")
