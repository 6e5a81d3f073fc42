"""What `metanudge eval` leaves in the folder of a run, with the examples that were not recognised:
RUN/eval-SPLIT.json.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metanudge.task import own_inputs
from metanudge.tasks import EncodedText, Episodes, Text
from metanudge.tasks.episodes import Split
from metanudge.tasks.images import is_picture
from metanudge.training.evaluation.measure import episode_classes
from metanudge.training.evaluation.report import EvaluationReport
from metanudge.training.files import seal, write_text
from metanudge.training.runs import Run

WORST = 8  # classes whose mistakes are shown
_LARGEST = 112  # pixels a side
_LONGEST = 300  # characters of a text


def eval_file(folder: Path, split: str) -> Path:
    """Where an evaluation's results are."""
    return folder / f"eval-{split}.json"


def write_report(run: Run, report: EvaluationReport, split: Split) -> None:
    """Write a report with examples of what the worst classes were taken for, sealed."""
    document = {
        "run": str(run.folder),
        "step": run.state.step,
        **report.as_dict(),
        "shown": mistakes(run.source, report, split),
    }
    write_text(eval_file(run.folder, split), seal(document, indent=1))


def mistakes(source: Episodes, report: EvaluationReport, split: Split) -> list[dict[str, Any]]:
    """The kept mistakes of the worst classes, for sources of pictures and texts: the example that
    was not recognised, and a support example of the class it was taken for, as PNG in base 64 or
    as text. The tasks are drawn once more.
    """
    if isinstance(source, (Text, EncodedText)):
        examples: _Texts | _Pictures = _Texts(source, split)
    elif is_picture(tuple(source.input_shape)):
        examples = _Pictures(source, split)
    else:
        return []
    found: list[dict[str, Any]] = []
    for worst in report.classes[:WORST]:
        for mistake in worst.wrong:
            names = episode_classes(source, [mistake.task], split)
            if names is None or mistake.taken_for not in names[0]:
                continue
            label = names[0].index(mistake.taken_for)
            wrong, like = examples.pair(mistake.task, mistake.query, label)
            of = {"class": worst.name, "taken_for": mistake.taken_for}
            found.append({**of, "example": wrong, "like": like})
    return found


class _Texts:
    """Examples of a source of texts."""

    def __init__(self, source: Text | EncodedText, split: Split) -> None:
        self._source, self._split = source, split

    def pair(self, task: int, query: int, label: int) -> tuple[Mapping[str, str], ...]:
        """A query example of a task, and its first support example of a label."""
        (rows,) = self._source.episode_rows([task], self._split)
        shots = rows.shape[1] - self._source.queries
        wrong = rows[:, shots:].reshape(-1)[query]
        return tuple(
            {"text": self._source.texts[row][:_LONGEST]} for row in (wrong, rows[label, 0])
        )


class _Pictures:
    """Examples of a source of pictures."""

    def __init__(self, source: Episodes, split: Split) -> None:
        self._source, self._split = source, split

    def pair(self, task: int, query: int, label: int) -> tuple[Mapping[str, str], ...]:
        """A query example of a task, and its first support example of a label."""
        drawn = self._source.task(task, self._split)
        inputs, labels = drawn.support
        like = own_inputs(inputs)[int((labels == label).nonzero()[0])]
        wrong = own_inputs(drawn.query[0])[query]
        return tuple({"png": self._png(x)} for x in (wrong, like))

    def _png(self, picture: Tensor) -> str:
        from PIL import Image

        x = picture.detach().float().cpu()
        low, high = float(x.min()), float(x.max())
        if low < 0 or high > 1:  # not the brightness of a file
            x = (x - low) / max(high - low, 1e-12)
        x = 1 - x if self._source.dark_is_one else x
        pixels = (255 * x).round().to(torch.uint8).permute(1, 2, 0).numpy()
        image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels)
        image.thumbnail((_LARGEST, _LARGEST))
        stream = io.BytesIO()
        image.save(stream, format="PNG")
        return base64.b64encode(stream.getvalue()).decode("ascii")
