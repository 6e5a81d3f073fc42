"""Each estimator's meta-gradient against the closed form, on the paper's quadratic tasks.

    python examples/quadratic.py --out runs/quadratic

Writes `quadratic.png` (error against inner steps) and `quadratic.json` (the same numbers), and
prints a table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import metanudge as mn

METHODS = {
    "FO-B-MAML symmetric": mn.FOBMAML(nu=1e-2),
    "FO-B-MAML forward": mn.FOBMAML(nu=1e-2, stencil="forward"),
    "FO-B-MAML gradient nudge": mn.FOBMAML(nu=1e-2, nudge="gradient"),
    "FO-B-MAML tangent": mn.FOBMAML(stencil="tangent"),
    "MAML": mn.MAML(),
    "iMAML, 5 CG steps": mn.IMAML(cg_steps=5),
    "FO-MAML": mn.FOMAML(),
    "Reptile": mn.Reptile(),
    "ES-MAML, 20 samples": mn.ESMAML(sigma=1e-3, samples=20),
}
STEPS = (1, 5, 10, 20, 50, 100, 200)
CONDITION, LAM, TASKS = 20.0, 1.0, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/quadratic"),
        help="folder for the plot and the numbers",
    )
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    console = Console()

    source = mn.tasks.Quadratic(dim=20, condition=CONDITION, seed=0)
    tasks = next(iter(source.batches(size=TASKS, count=1)))
    model = source.model(
        torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    theta = next(model.parameters()).detach()
    truth = torch.stack([source.meta_gradient(task, theta, LAM) for task in tasks]).mean(0)

    errors: dict[str, list[float]] = {name: [] for name in METHODS}
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(METHODS) * len(STEPS))
        for name, estimator in METHODS.items():
            progress.update(bar, description=name)
            for steps in STEPS:
                solver = mn.Nesterov(lr=1 / (CONDITION + LAM), steps=steps)
                learner = mn.MetaLearner(
                    model, source.loss, lam=LAM, solver=solver, estimator=estimator
                )
                (estimate,) = learner.meta_gradient(tasks, metrics=False)[0].values()
                errors[name].append(float((estimate - truth).norm() / truth.norm()))
                progress.advance(bar)

    title = "Relative error of the meta-gradient against the closed form, by inner steps"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("estimator", no_wrap=True)
    for steps in STEPS:
        table.add_column(str(steps), justify="right", no_wrap=True)
    for name, row in errors.items():
        table.add_row(name, *(f"{value:.0e}" for value in row))
    console.print(table)
    (out / "quadratic.json").write_text(
        json.dumps({"steps": STEPS, "lam": LAM, "condition": CONDITION, "errors": errors}, indent=2)
    )
    plot(errors, out / "quadratic.png")
    console.print(
        "FO-MAML and Reptile stop improving; FO-B-MAML goes on down to its ν², the tangent to"
        " rounding."
    )
    console.print(f"Plot: {out / 'quadratic.png'}")


def plot(errors: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for name, row in errors.items():
        ours = name.startswith("FO-B-MAML")
        axes.loglog(
            STEPS,
            row,
            marker="o",
            markersize=3.5,
            linewidth=2 if ours else 1.2,
            linestyle="-" if ours else "--",
            label=name,
        )
    axes.set_xlabel("inner steps (Nesterov)")
    axes.set_ylabel("relative error of the meta-gradient")
    axes.set_title("Quadratic tasks, dimension 20, condition number 20, λ = 1")
    axes.set_ylim(bottom=1e-12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
