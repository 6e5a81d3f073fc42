"""How good is my gradient? A smooth network and one with kinks, at every ν.

    python examples/gradient_quality.py [PICTURE]

`check_gradient` compares estimators on your own model with both exact answers, in float64. The
baseline is FO-MAML, which has no ν.
"""

import sys

import matplotlib.pyplot as plt
import torch

import metanudge as mn

tasks = mn.tasks.MNIST1D(ways=3, shots=5, queries=10, seed=0).batch(range(2))
figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True, layout="constrained")
for place, activation in zip(axes, ("tanh", "relu"), strict=True):
    torch.manual_seed(0)
    learner = mn.MetaLearner(
        mn.models.MLP(40, 3, hidden=(8,), activation=activation),
        torch.nn.functional.cross_entropy,
        lam=2.0,
        solver=mn.Nesterov(lr=0.1, steps=60),
    )
    report = mn.check_gradient(
        learner,
        tasks,
        estimators=[mn.FOBMAML(), mn.FOBMAML(nudge="gradient"), mn.FOMAML()],
        nus=(1e-3, 1e-2, 1e-1, 0.5),
    )
    if activation == "tanh":
        print(report)
    for nudge in ("loss nudge", "gradient nudge"):
        rows = [row for row in report.rows if row.estimator.endswith(nudge)]
        place.loglog(
            [row.nu for row in rows], [row.error_implicit for row in rows], "o-", label=nudge
        )
    place.axhline(report.rows[-1].error_implicit, color="grey", linestyle="--", label="FO-MAML")
    place.set(xlabel="ν", title=activation)
axes[0].set_ylabel("relative error of the meta-gradient")
axes[0].legend(loc="lower right")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "gradient_quality.png")
