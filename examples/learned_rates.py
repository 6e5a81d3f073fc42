"""Learned inner rates: how far each layer goes in each step is learned with the initialisation.

    python examples/learned_rates.py [PICTURE]

Sine waves of random height and phase, from ten points each, in three steps. The baseline is MAML
with the solver's own rate for everything, at four of them.
"""

import sys

import matplotlib.pyplot as plt
import torch

import metanudge as mn

META_STEPS = 400
STEPS = 3
source = mn.tasks.Sinusoid(shots=10, queries=20, seed=0)
test = source.batch(range(200), "test")


def train(lr: float, learn_lr: str | None = None) -> tuple[mn.MetaLearner, list[float]]:
    torch.manual_seed(0)
    learner = mn.MetaLearner(
        mn.models.MLP(1, 1, hidden=(32, 32), activation="tanh"),
        torch.nn.functional.mse_loss,
        lam=0,  # three steps, no tie: the step size alone says how far
        learn_lr=learn_lr,
        solver=mn.GradientDescent(lr=lr, steps=STEPS),
        estimator=mn.MAML(),
    )
    rates = {"rate_lr": 0.02} if learn_lr else {}
    optimizer = torch.optim.Adam(learner.parameter_groups(lr=3e-3, **rates))
    losses = []
    for step, tasks in enumerate(source.batches(size=8, count=META_STEPS)):
        optimizer.zero_grad()
        learner.backward(tasks, metrics=False)
        optimizer.step()
        if (step + 1) % (META_STEPS // 10) == 0:
            losses.append(learner.evaluate(test).mean_loss)
    return learner, losses


figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
at = [META_STEPS * (i + 1) // 10 for i in range(10)]
for lr in (0.003, 0.01, 0.03, 0.1):
    losses = train(lr)[1]
    print(f"one rate for all, {lr:5}    loss {losses[-1]:.2f}")
    left.plot(at, losses, "--", label=f"{lr}")
learner, losses = train(0.01, learn_lr="step")
print(f"learned, from 0.01         loss {losses[-1]:.2f}")
left.plot(at, losses, "k", label="learned")
left.set(xlabel="meta-steps", ylabel="loss on new waves", ylim=(0, 4))
left.legend(ncols=2)
for name, rate in learner.rates().items():
    right.plot(range(1, STEPS + 1), rate.detach(), "o-", label=name)
right.set(xlabel="inner step", ylabel="learned rate", xticks=range(1, STEPS + 1), yscale="log")
right.legend(fontsize=7, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "learned_rates.png")
