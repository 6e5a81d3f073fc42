"""What may bring more on Omniglot, one ingredient at a time and all together: learned inner rates,
a head of prototypes, shifted training images, three times as many meta-steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.models import Conv4, Prototypes
from metanudge.task import Batch, TaskBatch
from metanudge.tasks import Episodes, with_support
from metanudge.tasks.draws import Keys, fork, uniform
from metanudge.tasks.episodes import Split
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.omniglot_runs import Sizes, settings_of, tasks_of

MOST_PIXELS = 2  # a training image is moved by at most so many each way
_SHIFTS = 71  # a child of an episode's key that draws nothing else


@dataclass(frozen=True)
class Ingredients:
    """Which of them are used.

    Attributes:
        rates: inner rates that are learned, one for each tensor and step.
        prototypes: the head is made from the support set.
        shifts: training images are shifted at random.
        longer: times as many meta-steps, of a cosine as long.
    """

    rates: bool = False
    prototypes: bool = False
    shifts: bool = False
    longer: int = 1


RECIPES = {
    "learned rates": Ingredients(rates=True),
    "prototype head": Ingredients(prototypes=True),
    "shifted images": Ingredients(shifts=True),
    "three times as long": Ingredients(longer=3),
    "all together": Ingredients(rates=True, prototypes=True, shifts=True, longer=3),
}


class Prepared(Episodes):
    """The tasks of a source with some ingredients."""

    kind = "classification"

    def __init__(self, source: Episodes, used: Ingredients) -> None:
        super().__init__(
            ways=source.ways,
            shots=source.shots,
            queries=source.queries,
            seed=source.seed,
            device=source.device,
        )
        self.source, self.used = source, used

    @property
    def num_outputs(self) -> int:
        """One per way."""
        return self.source.num_outputs

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of an image."""
        return self.source.input_shape

    def draw(self, keys: Keys, split: Split) -> TaskBatch:
        """The source's episodes, shifted (in training) and with the support set beside."""
        drawn = self.source.draw(keys, split)
        assert isinstance(drawn, tuple)
        if self.used.shifts and split == "train":
            drawn = _shifted(*drawn, keys)
        batch = TaskBatch(*drawn)
        return with_support(batch) if self.used.prototypes else batch


def _shifted(support: Batch, query: Batch, keys: Keys) -> tuple[Batch, Batch]:
    """Every image moved by whole pixels, each way on its own; what comes in is paper."""
    examples = support[0].shape[1]
    draws = uniform(fork(keys, np.array([_SHIFTS])), 2 * (examples + query[0].shape[1]))
    pixels = torch.from_numpy(np.floor((2 * MOST_PIXELS + 1) * draws)).long() - MOST_PIXELS
    down, right = pixels.to(support[0].device).unflatten(1, (2, -1)).unbind(1)
    return (
        (moved(support[0], down[:, :examples], right[:, :examples]), *support[1:]),
        (moved(query[0], down[:, examples:], right[:, examples:]), *query[1:]),
    )


def moved(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Images `(…, 1, height, width)` moved by whole pixels `(…)`; zeros come in.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> moved(image, torch.tensor([1]), torch.tensor([0])).tolist()
        [[[[0.0, 0.0], [1.0, 2.0]]]]
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) - down[..., None]
    columns = torch.arange(width, device=images.device) - right[..., None]
    inside = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[
        ..., None, :
    ]
    places = rows.clamp(0, height - 1)[..., :, None] * width
    places = places + columns.clamp(0, width - 1)[..., None, :]
    found = images.flatten(-2).gather(-1, places.flatten(-2)[..., None, :])
    return found.unflatten(-1, (height, width)) * inside[..., None, :, :]


def make_trial(
    setting: str,
    used: Ingredients,
    estimator: Estimator,
    sizes: Sizes,
    *,
    seed: int,
    device: torch.device,
) -> tuple[fewshot.Trial, str]:
    """What is trained in a setting with some ingredients, and the name of its data."""
    ways, shots = settings_of(setting)
    source, name = tasks_of(
        ways, shots, sizes.queries, glyphs=sizes.glyphs, seed=seed, device=device
    )

    def build() -> torch.nn.Module:
        network = Conv4(ways=ways, channels=sizes.channels)
        return Prototypes(network) if used.prototypes else network

    model = m.seeded(seed, build, device)
    learned = mn.InnerRates("step") if used.rates else None
    trial = fewshot.Trial(model, estimator, Prepared(source, used), learn_lr=learned)
    return trial, name
