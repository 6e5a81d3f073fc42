"""The result against the number of adaptation steps, as a picture."""

from __future__ import annotations

from pathlib import Path

from metanudge.training.evaluation.report import EvaluationReport
from metanudge.training.files import replacing


def plot_steps(report: EvaluationReport, path: Path | str, *, title: str = "") -> None:
    """Draw accuracy (or query loss) against the number of adaptation steps, with confidence
    intervals, into an image file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    what = "accuracy" if report.classification else "loss"
    for protocol in dict.fromkeys(row.batch_norm for row in report.rows):
        rows = [row for row in report.rows if row.batch_norm == protocol]
        values = [getattr(row, what) for row in rows]
        errors = [getattr(row, f"{what}_ci95") for row in rows]
        label = f"BatchNorm {protocol}" if protocol else "mean, 95 % confidence"
        axes.errorbar(
            [row.steps for row in rows],
            values,
            yerr=errors,
            marker="o",
            markersize=4,
            capsize=3,
            label=label,
        )
    axes.axvline(
        report.steps, color="0.7", linewidth=1, linestyle=":", zorder=0, label="as trained"
    )
    axes.set_xlabel("adaptation steps")
    axes.set_ylabel("query accuracy" if report.classification else "query loss")
    axes.set_title(title or f"{report.tasks} {report.split or ''} tasks")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    with replacing(Path(path)) as stream:
        figure.savefig(stream, format=Path(path).suffix[1:].lower() or "png", dpi=150)
