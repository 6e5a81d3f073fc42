"""The figures of the documentation that are drawn from rows in results/, each for light and for
dark pages; `conf.py` draws them when the documentation is built.

python docs/draw.py FOLDER
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measured

PAPER = {"light": ("#ffffff", "#24292f", "#0d7a70"), "dark": ("#131416", "#cfd0d0", "#4fd1c5")}
OTHERS = {
    "light": ("#b4491c", "#5b4fb5", "#7a6a00"),
    "dark": ("#f0a070", "#b5aef5", "#d9c95c"),
}
ESTIMATORS = {
    "fobmaml": ("FO-B-MAML", "FOBMAML()"),
    "fobmaml-gradient": ("FO-B-MAML gradient nudge", 'nudge="gradient"'),
    "maml": ("MAML", "MAML()"),
    "fomaml": ("FO-MAML", "FOMAML()"),
}


def accuracy(lam: float, lr: float, data: str = "MNIST-1D") -> float:
    """Percent on test tasks, mean over seeds."""
    found = [
        cell["rows"][0]["test"]
        for cell in measured.rows("lambda-networks")["cells"]
        if (cell["cell"]["data"], cell["cell"]["lam"], cell["cell"]["inner"]) == (data, lam, lr)
    ]
    return 100 * mean(found)


def errors(problem: str, steps: int = 5, nudge: str = "loss") -> dict[float, float]:
    """Relative error of the meta-gradient against the K-step one for each ν, mean over seeds."""
    found: dict[float, list[float]] = defaultdict(list)
    for cell in measured.rows("auto-nu")["cells"]:
        key = cell["cell"]
        if (key["problem"], key["steps"], key["nudge"]) == (problem, steps, nudge):
            for row in cell["rows"]:
                if not row["auto"]:
                    found[row["nu"]].append(row["error_steps"])
    return {nu: mean(found[nu]) for nu in sorted(found)}


def choosing(theme: str) -> Any:
    """Which estimator, which λ and inner learning rate, which ν: three measurements."""
    import matplotlib.pyplot as plt

    paper, ink, ours = PAPER[theme]
    colours = {"axes.prop_cycle": plt.cycler(color=[ours, *OTHERS[theme]])}
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    face = {"figure.facecolor": paper, "axes.facecolor": paper, "legend.labelcolor": ink}
    with plt.rc_context({**face, **colours, **dict.fromkeys(names, ink), "svg.hashsalt": "0"}):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8.8, 3.4), layout="constrained")
        _estimators(left, ours, OTHERS[theme][0])
        _stiffness(middle)
        _nu(right)
    return figure


def _estimators(axes: Any, *colours: str) -> None:
    """Accuracy with the steps of training and with more, beside the price."""
    for place, (key, (name, code)) in enumerate(ESTIMATORS.items()):
        few, many = (float(text.split()[0]) for text in measured.omniglot(name, 2000))
        axes.plot([many, few], [place, place], color="grey", linewidth=1)
        label = {} if place else {"label": "5 steps, as in training"}
        axes.plot(few, place, "o", color=colours[0], **label)
        label = {} if place else {"label": "16 steps"}
        axes.plot(many, place, "s", color=colours[1], **label)
        said = f"{code}, {measured.bench(key)[0]} ms"
        axes.annotate(said, (64, place), (0, 7), textcoords="offset points")
    axes.set(xlabel="accuracy on Omniglot, %", yticks=[], ylim=(4.6, -0.6), xlim=(63, 101))
    axes.set_title("Estimator", fontsize=10)
    axes.legend(fontsize=8, loc="lower center")


def _stiffness(axes: Any) -> None:
    config = measured.rows("lambda-networks")["config"]
    for lr, mark in zip(config["rates"], "os^D", strict=False):
        found = [accuracy(lam, lr) for lam in config["lams"]]
        axes.semilogx(config["lams"], found, mark + "-", label=f"lr {lr}")
    axes.set(xlabel="λ", ylabel="accuracy on MNIST-1D, %")
    axes.set_title("λ and inner learning rate", fontsize=10)
    axes.legend(fontsize=8)


def _nu(axes: Any) -> None:
    for problem, mark, name in (("tanh", "o", "smooth (tanh)"), ("relu", "s", "kinks (ReLU)")):
        found = errors(problem)
        axes.loglog(list(found), list(found.values()), mark + "-", label=name)
    axes.set(xlabel="ν", ylabel="relative error of the gradient")
    axes.set_title("ν", fontsize=10)
    axes.legend(fontsize=8)


def draw(folder: Path) -> None:
    """`choosing-light.svg` and `choosing-dark.svg`."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for theme in PAPER:
        figure = choosing(theme)
        figure.savefig(folder / f"choosing-{theme}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
