"""A regression problem for every school: given tasks, beside linear methods.

    python examples/schools.py [PICTURE] [TABLE]

A row of the table is a pupil: the school, what else is known, the score. Without one it is made up:
100 schools in which the score depends on the same things to different degrees. The learner is
trained on some schools and sees six pupils of each of the others.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.functional import mse_loss

import metanudge as mn

META_STEPS = 300


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


table = sys.argv[2] if len(sys.argv) > 2 else make_up(Path(tempfile.mkdtemp(), "schools.csv"))
source = mn.tasks.Given.from_table(table, task_column="school", target="score", support=6)
torch.manual_seed(0)
model, solver = mn.models.TableNet(*source.input_shape, 1), mn.GradientDescent(lr="auto", steps=10)
learner = mn.MetaLearner(model, mse_loss, solver=solver)
optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
for tasks in source.batches(size=16, count=META_STEPS):
    optimizer.zero_grad()
    learner.backward(tasks, metrics=False)
    optimizer.step()
count = source.num_tasks("test")  # schools that no training task holds
left = {"metanudge": learner.evaluate(source.batch(range(count), "test")).loss}
left |= mn.baselines.measure(source, count)  # penalties are chosen on validation schools
ranked = sorted(left, key=lambda name: float(left[name].mean()))
print("of the variance of a score is left, on average over", count, "new schools:")
for name in ranked:
    print(f"  {name:18} {float(left[name].mean()):.3f}")
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.boxplot([left[name].numpy() for name in ranked[::-1]], orientation="horizontal")
axes.set_yticks(range(1, len(ranked) + 1), ranked[::-1])
axes.set(xlabel="part of the variance left, each school a value", xscale="log")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "schools.png")
