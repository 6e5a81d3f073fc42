"""Optimizers, schedulers and random generators: a resumed run is the uninterrupted one to the last
bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from checkpoints import identical, through_files
from metanudge.optim import SNGDM, ClippedGD, NormalizedGD
from metanudge.training.checkpoint import CheckpointStore, load, save

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, amsgrad, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(
        p, lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    ),
    "ClippedGD": lambda p: ClippedGD(p, lr=0.1, max_norm=0.1),
    "NormalizedGD": lambda p: NormalizedGD(p, lr=0.01, smoothing=0.1),
    "SNGDM": lambda p: SNGDM(p, lr=0.01),
}


def rng_state() -> dict[str, Any]:
    """The states of the global random generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)


def build(
    name: str, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(12, 2),
    )
    if name != "LBFGS":  # torch's flattens with view() and refuses other layouts
        model.to(memory_format=torch.channels_last)
    groups = [{"params": model[0].parameters()}, {"params": model[5].parameters()}]
    optimizer = OPTIMIZERS[name](model.parameters() if name == "LBFGS" else groups)
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: lr_scheduler.LRScheduler,
    steps: int,
) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 2, 4, 4)
        scale = float(np.random.rand()) + random.random()  # noqa: NPY002  global on purpose

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = scale * (model(x) ** 2).mean()  # noqa: B023  used within the iteration
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        scheduler.step()
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(name: str, tmp_path: Path) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    parts = model, optimizer, scheduler = build(name, seed=0)
    train(*parts, steps=5)
    store = CheckpointStore(tmp_path)
    store.save(
        5,
        {"model": model.state_dict()},
        {
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": rng_state(),
        },
    )
    kept = optimizer.state_dict()
    assert identical(store.load().state["optimizer"], kept)
    losses = train(*parts, steps=5)

    random.seed(9)
    np.random.seed(9)  # noqa: NPY002
    resumed = model_2, optimizer_2, scheduler_2 = build(name, seed=9)
    restored = store.load("last")
    model_2.load_state_dict(restored.tensors["model"])
    optimizer_2.load_state_dict(restored.state["optimizer"])
    scheduler_2.load_state_dict(restored.state["scheduler"])
    set_rng_state(restored.state["rng"])
    assert train(*resumed, steps=5) == losses
    assert identical(dict(model.state_dict()), dict(model_2.state_dict()))
    assert identical(optimizer.state_dict(), optimizer_2.state_dict())


def one_parameter() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 2, 5]),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, gamma=0.5)],
            milestones=[2],
        ),
    ],
    ids=["MultiStep", "OneCycle", "Plateau", "Lambda", "WarmRestarts", "Sequential"],
)
def test_scheduler_states_come_back(
    make: Callable[..., lr_scheduler.LRScheduler], tmp_path: Path
) -> None:
    optimizer = one_parameter()
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*[0.5] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    state = scheduler.state_dict()
    result = through_files(state, tmp_path / "one")
    assert identical(result, state)
    make(one_parameter()).load_state_dict(result)


def test_generators_of_ones_own_come_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    others = [
        np.random.Generator(bits(5))
        for bits in (np.random.PCG64, np.random.Philox, np.random.SFC64)
    ]
    state = {
        "torch": generator.get_state(),
        "numpy": [other.bit_generator.state for other in others],
    }
    first = [torch.rand(3, generator=generator).tolist()] + [
        other.random(3).tolist() for other in others
    ]
    restored = through_files(state, tmp_path / "one")
    generator.set_state(restored["torch"])
    for other, kept in zip(others, restored["numpy"], strict=True):
        other.bit_generator.state = kept
    assert first == [torch.rand(3, generator=generator).tolist()] + [
        other.random(3).tolist() for other in others
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_and_random_states_of_a_gpu_come_back(tmp_path: Path) -> None:
    x = nn.Parameter(torch.randn(3, 4, device="cuda"))
    optimizer = torch.optim.Adam([x], lr=0.1, fused=True)
    (x**2).sum().backward()
    optimizer.step()
    save(
        tmp_path / "one",
        step=1,
        tensors={"m": {"x": x}},
        state={"o": optimizer.state_dict(), "r": rng_state()},
    )
    first = torch.rand(3, device="cuda")
    result = load(tmp_path / "one")
    set_rng_state(result.state["r"])
    assert torch.equal(first, torch.rand(3, device="cuda"))
    assert torch.equal(result.tensors["m"]["x"].cuda(), x)
    y = nn.Parameter(x.detach().clone())
    resumed = torch.optim.Adam([y], lr=0.1, fused=True)
    resumed.load_state_dict(result.state["o"])
    for p, o in ((x, optimizer), (y, resumed)):
        o.zero_grad()
        (p**2).sum().backward()
        o.step()
    assert torch.equal(x, y)
