"""Meta-training for the experiments on few-shot classification: Adam on a stream of tasks, accuracy
on others.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.estimators.products import ProductsWarning
from metanudge.evaluation import ci95
from metanudge.params import Params
from metanudge.task import TaskBatch
from metanudge.tasks import Episodes
from metanudge.tasks.episodes import Split
from metanudge.training.loop import Course, Trainer
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row
from metanudge_lab.experiments.working import Diary, working_folder

AT_ONCE = 100  # tasks evaluated side by side
PRODUCT = 2  # gradients that a Hessian product counts as: what it takes by differences
CHECKPOINT_EVERY = 1000  # meta-steps, of which a crash may cost as many


@dataclass(frozen=True)
class Recipe:
    """How to meta-train.

    Attributes:
        inner: learning rate of the inner steps.
        rate: meta-learning rate of Adam.
        iterations: meta-steps.
        tasks: per meta-step.
        cosine: let the meta-learning rate fall to 0 along a cosine.
        clip: the largest norm of a meta-gradient.
        share: of the meta-learning rate with which inner rates are learned, where they are.
        save_every: meta-steps between checkpoints, if not `CHECKPOINT_EVERY`.
    """

    inner: float
    rate: float
    iterations: int
    tasks: int = 16
    cosine: bool = False
    clip: float | None = None
    share: float = 1.0
    save_every: int | None = None

    @property
    def checkpoint_every(self) -> int:
        """Meta-steps between checkpoints."""
        return self.save_every or CHECKPOINT_EVERY

    @property
    def rates(self) -> dict[str, float]:
        """Both learning rates, as they stand in a row."""
        return {"inner": self.inner, "rate": self.rate}

    @property
    def course(self) -> Course:
        """For the trainer."""
        schedule: Literal["cosine", "constant"] = "cosine" if self.cosine else "constant"
        return Course(
            self.iterations,
            self.tasks,
            schedule,
            clip=self.clip,
            checkpoint_every=self.checkpoint_every,
        )


@dataclass
class Trial:
    """A model that can be meta-trained again and again from the same initial weights, with one
    estimator.

    Learners are kept by their inner learning rate: on a GPU each has recorded its meta-step. Where
    inner rates are learned every training starts with a new one. `drawn` says with how many inner
    steps a meta-step is taken, counted from 0, where not all have `steps`.
    `seconds` are those of the meta-steps of the training that is going on, or was the last.
    """

    model: nn.Module
    estimator: Estimator
    source: Episodes
    lam: float = m.LAM
    steps: int = m.STEPS
    regression: bool = False
    learn_lr: mn.InnerRates | None = None
    drawn: Callable[[int], int] | None = None
    _initial: dict[str, Tensor] = field(init=False)
    _learners: dict[float, mn.MetaLearner] = field(init=False, default_factory=dict)
    seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._initial = {
            name: leaf.detach().clone() for name, leaf in self.model.state_dict().items()
        }

    def learner(self, inner: float) -> mn.MetaLearner:
        """The learner with this inner learning rate, at the initial weights."""
        self.model.load_state_dict(self._initial)
        if inner not in self._learners or self.learn_lr is not None:
            self._learners[inner] = self._make(inner, self.estimator)
        return self._learners[inner]

    def _make(
        self, inner: float, estimator: Estimator, steps: int | None = None, **options: Any
    ) -> mn.MetaLearner:
        solver = mn.GradientDescent(lr=inner, steps=steps or self.steps)
        loss = nn.functional.mse_loss if self.regression else nn.functional.cross_entropy
        return mn.MetaLearner(
            self.model,
            loss,
            lam=self.lam,
            learn_lr=self.learn_lr,
            solver=solver,
            estimator=estimator,
            **options,
        )

    def gradient(
        self, inner: float, estimator: Estimator, tasks: TaskBatch
    ) -> tuple[Params, mn.Stats, float | None]:
        """A meta-gradient at the model's present weights by any estimator, its statistics, and the
        ν or ε that was used.
        """
        learner = self._make(inner, estimator, compile=False)
        with _quiet():
            found, stats = learner.meta_gradient(tasks, metrics=False)
        return found, stats, stats.nu if stats.nu is not None else learner.tuner.nu

    def cost(self, inner: float, estimator: Estimator | None = None) -> float:
        """Gradients that a meta-step takes for each task: support, query, and `PRODUCT` for each
        Hessian product. Looks at a ν or ε that chooses itself are counted by the tuner.
        """
        task = self.source.batch([0])
        _, spent, _ = self.gradient(inner, estimator or self.estimator, task)
        return spent.support_gradients + spent.query_gradients + PRODUCT * spent.hessian_products

    def train(
        self,
        recipe: Recipe,
        *,
        at: Collection[int] = (),
        see: Callable[[int, mn.MetaLearner], None] | None = None,
        rows: list[Row] | None = None,
        until: int | None = None,
    ) -> bool:
        """Meta-train from the initial weights; whether every gradient was finite.

        A long training of a cell that is measured again after a crash goes on from its last
        checkpoint.

        Args:
            recipe: how.
            at: after which iterations (0 is before the first) to call `see`; the calls end where
                training diverges.
            see: gets the iteration and the learner.
            rows: what `see` adds rows to. They are kept with the checkpoints; without them, a
                training that is seen is not.
            until: after which iteration to break off.
        """
        learner = self.learner(recipe.inner)
        fused = learner.problem().device.type == "cuda"
        rate_lr = None if self.learn_lr is None else recipe.rate * recipe.share
        groups = learner.parameter_groups(lr=recipe.rate, rate_lr=rate_lr)
        optimizer = torch.optim.Adam(groups, fused=fused)
        folder = _checkpoints(recipe) if see is None or rows is not None else None
        trainer = Trainer(learner, self.source, optimizer, recipe.course, folder=folder)
        file = None if folder is None else folder.parent / "diary.json"
        diary = Diary([] if rows is None else rows, file, trainer.step)

        def note(step: int) -> None:
            diary.seconds += trainer.seconds
            self.seconds = diary.seconds
            if see is not None and step in at:
                see(step, learner)
                diary.write(step)
            elif step % recipe.checkpoint_every == 0:
                diary.write(step)

        turn = self._turning(trainer, recipe.inner)

        def after(step: int, values: object) -> None:
            note(step)
            turn(step)
            trainer.done = step == until

        trainer.on_step = after
        if trainer.step == 0:
            note(0)
        turn(trainer.step)
        trainer.done = trainer.step == until
        try:
            with _quiet():
                trainer.run()
        except mn.NonFiniteError:
            return False
        return True

    def _turning(self, trainer: Trainer, inner: float) -> Callable[[int], None]:
        """What gives the trainer the learner of the next meta-step where numbers of inner steps are
        drawn: one for each, since each has recorded its meta-step, all with the same weights.
        """
        learners: dict[int, mn.MetaLearner] = {}

        def turn(step: int) -> None:
            if self.drawn is not None:
                steps = self.drawn(step)
                if steps not in learners:
                    learners[steps] = self._make(inner, self.estimator, steps)
                trainer.learner = learners[steps]

        return turn

    def scores(
        self, recipe: Recipe, *, split: Split, tasks: int, steps: Sequence[int | None] = (None,)
    ) -> list[Tensor]:
        """Accuracies on so many tasks of a split after training, for each number of steps of
        adaptation (None: as in training).

        For regression, shares of the variance that are explained. Zeros where training diverged.
        """
        if not self.train(recipe):
            return [torch.zeros(tasks, dtype=torch.float64) for _ in steps]
        quality = explained if self.regression else accuracies
        return [
            quality(self._learners[recipe.inner], self.source, split, tasks, steps=count)
            for count in steps
        ]

    def score(self, recipe: Recipe, *, split: Split, tasks: int) -> float:
        """Their mean with as many steps as in training."""
        return float(self.scores(recipe, split=split, tasks=tasks)[0].mean())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that differences are not worth having: what they are worth is
    measured.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProductsWarning)
        yield


def _checkpoints(recipe: Recipe) -> Path | None:
    """Where the checkpoints of a training go; None where it is too short for any, or where none
    could be read again.
    """
    place = working_folder()
    readable = importlib.util.find_spec("safetensors") is not None
    if place is None or recipe.iterations <= recipe.checkpoint_every or not readable:
        return None
    name = f"{recipe.iterations}-steps-inner-{recipe.inner:g}-meta-{recipe.rate:g}"
    folder = place / name / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def accuracies(
    learner: mn.MetaLearner, source: Episodes, split: Split, tasks: int, *, steps: int | None = None
) -> Tensor:
    """Accuracy on the query sets of episodes 0 … tasks − 1 of a split after adaptation with the
    learner's own steps, or so many.
    """
    parts = (range(first, min(first + AT_ONCE, tasks)) for first in range(0, tasks, AT_ONCE))
    return torch.cat(
        [learner.evaluate(source.batch(part, split), steps=steps).accuracy for part in parts]
    )


def explained(
    learner: mn.MetaLearner, source: Episodes, split: Split, tasks: int, *, steps: int | None = None
) -> Tensor:
    """1 − squared error / mean square of the targets of all tasks, on the query sets, like
    `accuracies`; at least 0.
    """
    batch = source.batch(range(tasks), split)
    squares = torch.cat([stack.query[1].double().square().flatten() for stack in batch.stacks])
    return (
        (1 - learner.evaluate(batch, steps=steps).loss / squares.mean().cpu())
        .nan_to_num(0.0)
        .clamp(min=0)
    )


def accuracy(learner: mn.MetaLearner, source: Episodes, split: Split, tasks: int) -> float:
    """Their mean."""
    return float(accuracies(learner, source, split, tasks).mean())


def summary(found: Tensor) -> dict[str, float]:
    """Mean accuracy and the half-width of its 95 % confidence interval over the tasks, as they
    stand in a row.

    Example:
        >>> summary(torch.tensor([0.5, 0.5, 0.5]))
        {'accuracy': 0.5, 'ci95': 0.0}
    """
    return {
        "accuracy": float(found.mean()),
        "ci95": ci95(found),
    }


class Search(NamedTuple):
    """The best recipe (with its own number of iterations), and all that were tried with their
    accuracies.
    """

    best: Recipe
    tried: list[Recipe]
    scores: list[float]

    def rows(self, kind: str, length: str = "iteration") -> list[Row]:
        """What was tried, as rows; `length` is the key of the number of iterations."""
        return [
            {"kind": kind, **one.rates, length: one.iterations, "accuracy": score}
            for one, score in zip(self.tried, self.scores, strict=True)
        ]


def best_recipe(
    trial: Trial, recipes: list[Recipe], rounds: tuple[int, ...], *, keep: int, tasks: int
) -> Search:
    """The recipe with the highest validation accuracy, found in rounds of growing length of which
    only the best few reach the next.

    Args:
        trial: what is trained.
        recipes: the grid.
        rounds: iterations of each round.
        keep: how many go on to the next round.
        tasks: validation tasks.
    """
    tried: list[Recipe] = []
    scores: list[float] = []
    left = list(recipes)
    for number, iterations in enumerate(rounds):
        if len(left) > 1:
            found = [
                trial.score(replace(recipe, iterations=iterations), split="val", tasks=tasks)
                for recipe in left
            ]
            tried += [replace(recipe, iterations=iterations) for recipe in left]
            scores += found
            order = sorted(range(len(left)), key=lambda i: -found[i])
            left = [left[i] for i in order[: keep if number < len(rounds) - 1 else 1]]
    return Search(left[0], tried, scores)
