"""`metanudge adapt RUN --support DIR --predict DIR --out FILE`: a few examples per class in, labels
with probabilities out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metanudge.cli.eval import progress_bar
from metanudge.cli.flags import OfARun, parse
from metanudge.names import printable, shown, some
from metanudge.training.errors import UserError

if TYPE_CHECKING:
    from metanudge.training.evaluation import Progress
    from metanudge.training.use import Classifier, Estimate, Prediction

EXAMPLES = """
examples:
  metanudge adapt runs/omniglot --support few/ --predict unknown/ --out labels.csv
  metanudge adapt runs/omniglot --support few/ --export my_model/
  metanudge adapt runs/iris --support few.csv --predict rows.csv --out labels.csv
  metanudge adapt runs/schools --support new_school.csv --predict pupils.csv --out scores.csv

  few/ has one sub-folder per class:   few/cat/1.png few/cat/2.png few/dog/1.png …
"""


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(OfARun):
    """Adapt a trained learner to new classes from a few examples of each, or to a new task like
    those it was given, then label files or predict rows with it, or export it.

    The classes need not have occurred in training; there must be as many as the run has ways,
    unless it was trained with --head prototypes. Files are prepared as in training. BatchNorm
    layers keep the statistics of the support set, so a file's label does not depend on the other
    files.
    """

    support: Path
    """Folder with one sub-folder per class that holds a few examples, or a .csv table with a label
    column.
    """

    predict: Path | None = None
    """Files to label: a folder (sub-folders too), a single file, or a .csv table."""

    out: Path | None = None
    """Where the labels go: a .csv with file, label, probability, and one column per class; for
    regression with row, and one column per target in its units.
    """

    export: Path | None = None
    """New folder for the adapted model: model.safetensors, model.json, and program.pt2 for
    torch.export.
    """

    program: bool = True
    """Whether --export also writes the torch.export program."""

    steps: int | None = None
    """Adaptation steps, if not as many as in training."""

    overwrite: bool = False
    """Replace what --out and --export name, if it exists."""


def run(argv: list[str]) -> int:
    """Run the command."""
    options = parse(AdaptOptions, "adapt", argv, EXAMPLES)
    from metanudge.training import runs, use

    if (options.predict is None) != (options.out is None):
        given, missing = ("--predict", "--out") if options.out is None else ("--out", "--predict")
        raise UserError(
            f"{given} needs {missing}: --predict says which files to label, --out where the"
            " labels go."
        )
    if options.out is None and options.export is None:
        raise UserError(
            "Nothing to do. Label files with --predict DIR --out FILE, or keep the adapted model"
            " with --export DIR."
        )
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps {options.steps} is too small. Use 1 or more, or leave it out.")
    if options.export is not None:
        use.check_new_folder(options.export, overwrite=options.overwrite)
    if options.out is not None:
        use.check_new_file(options.out, overwrite=options.overwrite, flag="--out")
    trained = runs.load(
        options.run, checkpoint=options.checkpoint, device=options.device, trust=options.trust
    )
    adapted = use.adapt(trained, options.support, steps=options.steps)
    if isinstance(adapted, use.Regressor):
        rows, names = len(adapted.support), some(adapted.targets, 8)
        print(printable(f"adapted to {rows} rows from {options.support}, to predict {names}"))
    else:
        print(printable(_adapted(adapted, options.support)))
    if options.predict is not None and options.out is not None:
        with (
            use.new_file(options.out, overwrite=options.overwrite, flag="--out") as file,
            progress_bar("labelling", "files") as progress,
        ):
            if isinstance(adapted, use.Regressor):
                estimates = adapted.predict(options.predict)
                use.write_estimates(file, adapted.targets, estimates)
                said = _errors(estimates, adapted.targets, options.out)
            else:
                predictions = _counted(adapted.predict(options.predict), progress)
                written = use.write_predictions(file, adapted.classes, predictions)
                said = _summary(written, adapted, options.out)
        print(printable(said))
    if options.export is not None:
        adapted.export(options.export, program=options.program, overwrite=options.overwrite)
        outputs = "predictions" if isinstance(adapted, use.Regressor) else "logits"
        print(_exported(options.export, options.program, outputs))
    return 0


def _errors(estimates: list[Estimate], targets: tuple[str, ...], out: Path) -> str:
    """What was written, and how wrong it is where the table knows better."""
    lines = [f"{len(estimates)} rows predicted → {out}"]
    known = [(e.values, e.truth) for e in estimates if e.truth is not None]
    for place, name in enumerate(targets if known else ()):
        squares = [(values[place] - truth[place]) ** 2 for values, truth in known]
        lines.append(
            f"  {shown(name)}: RMSE {math.sqrt(sum(squares) / len(squares)):.4g} on the"
            f" {len(known)} rows whose target is known"
        )
    return "\n".join(lines)


def _counted(predictions: Iterator[Prediction], progress: Progress | None) -> Iterator[Prediction]:
    for number, found in enumerate(predictions, start=1):
        if progress is not None:
            progress(number, None)
        yield found


def _adapted(classifier: Classifier, support: Path) -> str:
    each = sorted(set(classifier.counts))
    count = f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}"
    text = (
        f"adapted to {len(classifier.classes)} classes with {count} examples each from {support}:"
        f" {some(classifier.classes, 8)}"
    )
    if classifier.looks_inverted:
        text += (
            "\nnote: these pictures are mostly dark; Omniglot learners expect dark ink on light"
            " paper. Invert them if they are not."
        )
    return text


def _summary(written: list[Prediction], classifier: Classifier, out: Path) -> str:
    width = max(len(shown(name)) for name in classifier.classes)
    lines = [f"{len(written)} examples labelled → {out}"]
    for name in classifier.classes:
        found = [p.probability for p in written if p.label == name]
        mean = f"   mean probability {sum(found) / len(found):.2f}" if found else ""
        lines.append(f"  {shown(name):{width}}  {len(found):5d}{mean}")
    known = [p for p in written if p.truth is not None]
    if known:
        right = sum(p.label == p.truth for p in known)
        lines.append(
            f"{right} of the {len(known)} whose class is known are right"
            f" ({right / len(known):.1%})."
        )
    return "\n".join(lines)


def _exported(folder: Path, program: bool, outputs: str) -> str:
    text = f"adapted model → {folder}: model.safetensors, model.json"
    if not program:
        return text
    return (
        f'{text}, program.pt2\n  {outputs} = torch.export.load("{folder}/program.pt2").module()'
        "(inputs)   # checked: equal to the model to 1e-5"
    )
