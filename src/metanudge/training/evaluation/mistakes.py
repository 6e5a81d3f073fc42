"""What `metanudge eval` leaves in the folder of a run, with the examples that were not recognised:
RUN/eval-SPLIT.json.
"""

from __future__ import annotations

import base64
import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metanudge.task import own_inputs
from metanudge.tasks import EncodedText, Episodes, Text
from metanudge.tasks.episodes import Split
from metanudge.tasks.images import is_picture
from metanudge.training.evaluation.measure import episode_classes
from metanudge.training.evaluation.report import EvaluationReport, Mistake
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
        pair = partial(_texts, source)
    elif is_picture(tuple(source.input_shape)):
        pair = partial(_pictures, source)
    else:
        return []
    found: list[dict[str, Any]] = []
    for worst in report.classes[:WORST]:
        for mistake in worst.wrong:
            names = episode_classes(source, [mistake.task], split)
            if names is None or mistake.taken_for not in names[0]:
                continue
            label = names[0].index(mistake.taken_for)
            wrong, like = pair(split, mistake, label)
            of = {"class": worst.name, "taken_for": mistake.taken_for}
            found.append({**of, "example": wrong, "like": like})
    return found


def _texts(
    source: Text | EncodedText, split: Split, mistake: Mistake, label: int
) -> list[dict[str, str]]:
    """The query example of a mistake, and the first support example of a label."""
    (rows,) = source.episode_rows([mistake.task], split)
    wrong = rows[:, rows.shape[1] - source.queries :].reshape(-1)[mistake.query]
    return [{"text": source.texts[row][:_LONGEST]} for row in (wrong, rows[label, 0])]


def _pictures(source: Episodes, split: Split, mistake: Mistake, label: int) -> list[dict[str, str]]:
    drawn = source.task(mistake.task, split)
    inputs, labels = drawn.support
    like = own_inputs(inputs)[int((labels == label).nonzero()[0])]
    wrong = own_inputs(drawn.query[0])[mistake.query]
    return [{"png": _png(x, source.dark_is_one)} for x in (wrong, like)]


def _png(picture: Tensor, inverted: bool) -> str:
    from PIL import Image

    x = picture.detach().float().cpu()
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:  # not the brightness of a file
        x = (x - low) / max(high - low, 1e-12)
    x = 1 - x if inverted else x
    pixels = (255 * x).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels)
    image.thumbnail((_LARGEST, _LARGEST))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")
