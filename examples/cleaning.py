"""Find wrong labels: learn a weight for every training example, judged by a few clean ones;
the baseline trains on all labels as they are.

    python examples/cleaning.py [PICTURE]

    inner:  φ*(x) = argmin_φ  Σ_i σ(x_i) loss_i(φ) / n + 0.01 ‖φ‖²     300 examples, 40 % wrong
    outer:  F(x)  = mean loss of φ*(x) on 60 examples with right labels
"""

import sys

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import metanudge as mn

torch.manual_seed(0)
centres = 0.7 * torch.randn(4, 10).double()


def draw(size: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(4, (size,))
    return torch.randn(size, 10) + centres[labels], labels


(inputs, right), clean, test = draw(300), draw(60), draw(2000)
wrong = torch.rand(300) < 0.4
given = torch.where(wrong, (right + 1) % 4, right)  # systematic: each class taken for the next


def inner(x: Tensor, phi: Tensor) -> Tensor:
    losses = cross_entropy(inputs @ phi, given, reduction="none")
    return (x.sigmoid() * losses).mean() + 0.01 * phi.square().sum()


def outer(x: Tensor, phi: Tensor) -> Tensor:
    return cross_entropy(clean[0] @ phi, clean[1])


def accuracy(phi: Tensor) -> float:
    return float(((test[0] @ phi).argmax(1) == test[1]).double().mean())


x, phi = torch.zeros(300).double(), torch.zeros(10, 4).double()
first = mn.hypergradient(inner, outer, x, phi)
optimizer = torch.optim.Adam([x], lr=1.0)
for _ in range(15):
    result = mn.hypergradient(inner, outer, x, phi)
    x.grad, phi = result.gradient, result.phi
    optimizer.step()
weights = [x.sigmoid()[chosen].tolist() for chosen in (~wrong, wrong)]
print(f"right on the test set, trained on all labels  {accuracy(first.phi):.0%}")
print(f"right on the test set, weights learned        {accuracy(phi):.0%}")
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.hist(weights, bins=20, label=["right label", "wrong label"])
axes.set(xlabel="learned weight", ylabel="examples")
axes.legend()
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "cleaning.png")
