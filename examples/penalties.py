"""A penalty for every feature, learned on a validation set: a bilevel problem.

    python examples/penalties.py [PICTURE]

    inner:  φ*(x) = argmin_φ  mean squared error on 30 training examples + Σ_j exp(x_j) φ_j²
    outer:  F(x)  = mean squared error of φ*(x) on 200 validation examples

Five of twenty features carry information. The baseline is one penalty for all, learned likewise.
"""

import sys

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import metanudge as mn

torch.manual_seed(0)
teacher = torch.tensor([2.0, -1.5, 1.0, 1.5, -2.0] + 15 * [0.0]).double()


def draw(size: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 20).double()
    return inputs, inputs @ teacher + torch.randn(size)


train, validation, test = draw(30), draw(200), draw(2000)


def error(phi: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    return (data[0] @ phi - data[1]).square().mean()


def inner(x: Tensor, phi: Tensor) -> Tensor:
    return error(phi, train) + (x.exp() * phi.square()).sum()


def outer(x: Tensor, phi: Tensor) -> Tensor:
    return error(phi, validation)


def learn(x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    optimizer, phi = torch.optim.Adam([x], lr=0.4), torch.zeros(20).double()
    for _ in range(steps):
        result = mn.hypergradient(inner, outer, x, phi)
        x.grad, phi = result.gradient, result.phi  # the next solve starts where this one ended
        optimizer.step()
    return x.exp().expand(20), mn.hypergradient(inner, outer, x, phi).phi


start = torch.tensor(-2.0).double()
cases = {"fixed": (start, 0), "one for all": (start, 15), "one each": (start.expand(20), 15)}
for name, (x, steps) in cases.items():
    penalties, phi = learn(x.clone(), steps)
    print(f"penalty {name:12} test error {error(phi, test):.2f}")
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.bar(range(20), penalties.tolist(), color=["#0d9488"] * 5 + ["#d1495b"] * 15)
axes.set(yscale="log", xlabel="feature; the first five carry information", ylabel="penalty")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "penalties.png")
