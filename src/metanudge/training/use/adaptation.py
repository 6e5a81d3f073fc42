"""`adapt`: a run and a few examples in, a `Classifier` or a `Regressor` out."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from metanudge.estimators import NonFiniteError
from metanudge.models import Prototypes
from metanudge.names import some
from metanudge.task import Batch, map_tensors
from metanudge.tasks.read_csv import as_number, read_columns
from metanudge.training import runs
from metanudge.training.errors import UserError, refused
from metanudge.training.evaluation import with_support_statistics
from metanudge.training.runs import Run
from metanudge.training.use.classifier import Classifier
from metanudge.training.use.examples import explained, read_support
from metanudge.training.use.preprocessing import Preprocessing
from metanudge.training.use.regressor import InUnits, Regressor


def adapt(
    run: Run | str | os.PathLike[str],
    support: str | os.PathLike[str],
    *,
    steps: int | None = None,
    trust: bool = False,
) -> Classifier | Regressor:
    """Adapt a run's learner to new classes, or to another task like those it was given.

    Args:
        run: a run, or its folder.
        support: a folder with one sub-folder per class that holds a few examples, or a table (.csv;
            of texts also .tsv, .jsonl) with a label or target column.
        steps: adaptation steps, if not as many as in training.
        trust: import the code that the run's configuration names, where its model is not one of
            ours.
    """
    if not isinstance(run, Run):
        run = runs.load(run, trust=trust)
    if run.shapes.kind != "classification":
        return _regressor(run, Path(support), steps)
    how = Preprocessing.of(run)
    with explained():
        raw, labels, how = read_support(Path(support), how)
    classes = run.shapes.labels or tuple(sorted(set(labels)))
    if unknown := sorted(set(labels) - set(classes)):
        raise UserError(
            f"--support {support} has the class {unknown[0]!r}, but {run.folder} was trained on"
            f" tasks with the classes {some(classes, 8)}, which mean the same in all of them."
        )
    ways = run.shapes.num_outputs
    if run.config.head == "fixed" and len(classes) != ways:
        raise UserError(
            f"--support {support} has {len(classes)} classes ({some(classes, 8)}), but {run.folder}"
            f" was trained for {ways} ways. Give exactly {ways} classes, or train a run with --ways"
            f" {len(classes)}, or one for any number of classes: --head prototypes."
        )
    if len(classes) < 2:
        raise UserError(
            f"--support {support} has one class, {some(classes, 8)}, and so nothing to tell apart."
            " Give two or more."
        )
    run = run.for_ways(len(classes))
    device = next(run.learner.parameters()).device
    inputs = map_tensors(lambda t: t.to(device), how.inputs(raw))
    targets = torch.tensor([classes.index(label) for label in labels], device=device)
    model = _adapted(run, inputs, targets, support, steps)
    return Classifier(model, classes, how, inputs, tuple(labels.count(name) for name in classes))


def _regressor(run: Run, support: Path, steps: int | None) -> Regressor:
    shapes = run.shapes
    if not shapes.targets:
        raise UserError(
            f"{run.folder} was trained on {run.config.data}, a regression: it has no classes, and"
            " its tasks are no tables. Use a run on given tasks or on classified data."
        )
    how = Preprocessing.of(run)
    with explained():
        if not support.is_file():
            raise UserError(
                f"--support {support} is no table. Give a .csv file with the columns"
                f" {some([*(how.columns or ()), *shapes.targets], 8)}."
            )
        named = [*shapes.targets, *filter(None, [run.config.task_column])]
        read = read_columns(
            support, named, how.columns, delimiter=how.delimiter, needed=shapes.targets
        )
        if run.config.task_column and len(tasks := sorted(set(read.text[named[-1]]))) > 1:
            raise UserError(
                f"--support {support} has rows of {len(tasks)} tasks ({some(tasks, 3)}). A learner"
                " adapts to one at a time; give the rows of one."
            )
        raw = torch.from_numpy(read.values)
        how.check(raw, support)
        cells = zip(*(read.text[name] for name in shapes.targets), strict=True)
        known = torch.tensor(
            [[as_number(cell, where) for cell in row]
             for row, where in zip(cells, read.rows, strict=True)], dtype=torch.float64
        )  # fmt: skip
    inputs = how.tensor(raw).to(next(run.learner.parameters()).device)
    targets = (known if shapes.target_scale is None else shapes.target_scale.apply(known)).to(
        inputs
    )
    if not bool(targets.isfinite().all()):
        raise UserError(f"--support {support} has targets too large for {inputs.dtype}.")
    model = InUnits(_adapted(run, inputs, targets, support, steps), shapes.target_scale, inputs)
    return Regressor(model.eval(), shapes.targets, how, inputs)


def _adapted(
    run: Run, inputs: Batch, targets: Tensor, support: object, steps: int | None
) -> nn.Module:
    """The run's model after adaptation, in evaluation mode and frozen; a head of prototypes as the
    linear layer that it then is.
    """
    prototypes = run.config.head == "prototypes"
    known = (inputs, targets) if prototypes else inputs
    with refused(f"--support {support}: ", NonFiniteError), run.precision():
        adapted = run.learner.adapt((known, targets), steps=steps)
        model = with_support_statistics(adapted, known)
        if isinstance(model, Prototypes):
            model = model.fixed(inputs, targets, model.most)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model
