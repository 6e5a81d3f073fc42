"""`adapt`: a run and a few examples per class in, a `Classifier` out."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from metanudge.estimators import NonFiniteError
from metanudge.names import some
from metanudge.training import runs
from metanudge.training.errors import UserError
from metanudge.training.evaluation import with_support_statistics
from metanudge.training.runs import Run
from metanudge.training.use.classifier import Classifier
from metanudge.training.use.examples import explained, read_support
from metanudge.training.use.preprocessing import Preprocessing


def adapt(
    run: Run | str | os.PathLike[str],
    support: str | os.PathLike[str],
    *,
    steps: int | None = None,
    trust: bool = False,
) -> Classifier:
    """Adapt a run's learner to new classes.

    Args:
        run: a run, or its folder.
        support: a folder with one sub-folder per class that holds a few examples, or a table (.csv)
            with a label column.
        steps: adaptation steps, if not as many as in training.
        trust: import the code that the run's configuration names, where its model is not one of
            ours.
    """
    if not isinstance(run, Run):
        run = runs.load(run, trust=trust)
    if run.shapes.kind != "classification":
        raise UserError(
            f"{run.folder} was trained on {run.config.data}, a regression: it has no classes. Use a"
            " run on classified data."
        )
    how = Preprocessing.of(run)
    with explained():
        raw, labels, how = read_support(Path(support), how)
    classes = tuple(sorted(set(labels)))
    if len(classes) != run.shapes.num_outputs:
        raise UserError(
            f"--support {support} has {len(classes)} classes ({some(classes, 8)}), but {run.folder}"
            f" was trained for {run.shapes.num_outputs} ways. Give exactly {run.shapes.num_outputs}"
            f" classes, or train a run with --ways {len(classes)}."
        )
    device = next(run.learner.parameters()).device
    inputs = how.tensor(raw).to(device)
    targets = torch.tensor([classes.index(label) for label in labels], device=device)
    try:
        with run.precision():
            adapted = run.learner.adapt((inputs, targets), steps=steps)
            model = with_support_statistics(adapted, inputs)
    except NonFiniteError as error:
        raise UserError(f"--support {support}: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Classifier(model, classes, how, inputs, tuple(labels.count(name) for name in classes))
