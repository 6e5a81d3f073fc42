"""A first few-shot learner: tell three digits of MNIST-1D apart after five examples of each.

    python examples/first_learner.py [PICTURE]

Which digits, and which of them is called 0, 1 or 2, changes from task to task. Learns an
initialisation, then adapts it and random weights to new tasks; the baseline is the nearest class
mean.
"""

import sys

import matplotlib.pyplot as plt
import torch

import metanudge as mn

STEPS = (1, 2, 5, 10)
torch.manual_seed(0)
source = mn.tasks.MNIST1D(ways=3, shots=5, queries=10, seed=0)
test = source.batch(range(60), "test")  # made of examples that no training task holds
learner = mn.MetaLearner(
    mn.models.Conv1D(ways=3),
    torch.nn.functional.cross_entropy,
    lam=2.0,
    solver=mn.GradientDescent(lr=0.1, steps=5),
    estimator=mn.FOBMAML(start="shifted"),
)


def curve() -> list[float]:
    return [learner.evaluate(test, steps=steps).mean_accuracy for steps in STEPS]


def nearest_mean(task: mn.Task) -> float:
    (x, y), (queries, answers) = task.support, task.query
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    return float((torch.cdist(queries, means).argmin(1) == answers).double().mean())


untrained = curve()
optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
for tasks in source.batches(size=16, count=40):
    optimizer.zero_grad()
    learner.backward(tasks, metrics=False)
    optimizer.step()
trained = curve()
baseline = sum(map(nearest_mean, test)) / len(test)

print(f"nearest class mean            {baseline:.0%}")
print(f"5 steps from random weights   {untrained[2]:.0%}")
print(f"5 steps from what it learned  {trained[2]:.0%}")

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
axes.plot(STEPS, trained, marker="o", label="from what it learned")
axes.plot(STEPS, untrained, marker="s", label="from random weights")
axes.axhline(baseline, color="grey", linestyle="--", label="nearest class mean")
axes.set(xlabel="steps on 15 examples", ylabel="accuracy", ylim=(0.3, 1))
axes.legend(loc="center right")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "first_learner.png")
