"""A regression problem for every school: meta-learning on given tasks, beside ridge regression.

    python examples/schools.py [schools.csv]

A row of the table is a pupil: the school, what else is known, the score. Without one it is made up:
100 schools in which the score depends on the same things to different degrees. The learner is
trained on some schools and sees six pupils of each of the others.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import mse_loss

import metanudge as mn


def make_up(path: Path) -> Path:
    rng = np.random.default_rng(0)
    common, direction = rng.normal(size=(2, 6))
    lines = ["school,a,b,c,d,e,f,score"]
    for school in range(100):
        weight = common + 2 * rng.normal() * direction
        for x in rng.normal(size=(18, 6)):
            row = [*x, 50 + 10 * (x @ weight + 0.3 * rng.normal())]
            lines.append(",".join([f"s{school:03d}", *(f"{v:.4f}" for v in row)]))
    path.write_text("\n".join(lines))
    return path


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", nargs="?", type=Path)
    parser.add_argument("--iterations", type=int, default=300)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        table = options.table or make_up(Path(folder, "schools.csv"))
        source = mn.tasks.Given.from_table(table, task_column="school", target="score", support=6)
    model, solver = mn.models.MLP(*source.input_shape, 1), mn.GradientDescent(lr=0.007, steps=10)
    learner = mn.MetaLearner(model, mse_loss, solver=solver)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    for tasks in source.batches(size=16, count=options.iterations):
        learner.backward(tasks, metrics=False)
        optimizer.step()
        optimizer.zero_grad()
    count = source.num_tasks("test")
    result = {"metanudge": learner.evaluate(source.batch(range(count), "test")).mean_loss}
    result |= {n: float(s.mean()) for n, s in mn.baselines.measure(source, count).items()}
    for name, loss in sorted(result.items(), key=lambda item: item[1]):
        print(f"{name:18} {loss:.3f} of the variance of a score is left")
    return result


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
