"""What is trained on Omniglot for long, in which order it matters, and at what sizes."""

from __future__ import annotations

from dataclasses import dataclass

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments import omniglot_runs as runs
from metanudge_lab.experiments.base import Settings
from metanudge_lab.experiments.omniglot_recipes import RECIPES
from metanudge_lab.experiments.omniglot_runs import FIVE_WAY, SHIFTED, TWENTY_WAY, Sizes

AUTOMATIC = "FO-B-MAML, automatic ν"
ESTIMATORS: dict[str, Estimator] = {
    m.LOSS: m.ESTIMATORS[m.LOSS],
    AUTOMATIC: mn.FOBMAML(),
    SHIFTED: runs.ESTIMATORS[SHIFTED],
    m.FO_MAML: m.ESTIMATORS[m.FO_MAML],
    m.MAML: m.ESTIMATORS[m.MAML],
    m.DAMPED: m.DAMPED_IMAML,
}
# Setting, methods, meta-steps, seeds: what matters most comes first. Not part of the config: more
# may be added without measuring anew what there is.
PLAN: tuple[tuple[str, tuple[str, ...], int, int], ...] = (
    (FIVE_WAY[0], tuple(ESTIMATORS), 12000, 3),
    (TWENTY_WAY[0], (m.LOSS, SHIFTED, m.MAML), 12000, 3),
    (FIVE_WAY[1], (m.LOSS, SHIFTED), 12000, 3),
    (FIVE_WAY[0], (m.LOSS, SHIFTED), 40000, 3),
)
# What the recipes are measured with (learned rates need MAML), in these settings; one ingredient
# alone only in the first.
RECIPE_METHOD, RECIPE_STEPS, RECIPE_SEEDS = m.MAML, 12000, 3
RECIPE_SETTINGS = (FIVE_WAY[0], FIVE_WAY[1], *TWENTY_WAY)
AIMS = dict(zip(RECIPE_SETTINGS, (99.5, 99.9, 97.5, 99.3), strict=True))
ALL = "all together"


@dataclass(frozen=True)
class Config(Sizes, Settings):
    """Sizes of the measurement. In full an hour on a GPU.

    Attributes:
        shorten: divide the plan's numbers of meta-steps by this.
        seeds: at most so many of the plan's.
        inner_rates: of the grid of learning rates.
        tuning_keep: how many pairs of the grid go on to the next round.
        adapt_steps: with how many steps the trained learners adapt.
    """

    shorten: int = 1
    seeds: int = 3
    inner_rates: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
    tuning_keep: int = 3
    adapt_steps: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 16, 25, 50)

    @classmethod
    def quick(cls) -> Config:
        """A minute or two; a narrow network, one seed, one pair of learning rates."""
        return cls(shorten=400, seeds=1, test_tasks=100, adapt_steps=(1, 5, 16), **runs.QUICK)

    @property
    def plan(self) -> tuple[tuple[str, tuple[str, ...], int, int], ...]:
        """What of the plan is trained, and for how long; of short runs only the first."""
        return tuple(
            (setting, methods, max(1, iterations // self.shorten), min(seeds, self.seeds))
            for setting, methods, iterations, seeds in (PLAN if self.shorten == 1 else PLAN[:1])
        )

    @property
    def recipes(self) -> list[tuple[str, str, int]]:
        """Setting, recipe and meta-steps."""
        return [
            (setting, recipe, max(1, used.longer * RECIPE_STEPS // self.shorten))
            for setting in RECIPE_SETTINGS[: None if self.shorten == 1 else 1]
            for recipe, used in RECIPES.items()
            if setting == RECIPE_SETTINGS[0] or recipe == ALL
        ]
