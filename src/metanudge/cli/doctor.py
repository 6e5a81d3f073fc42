"""`metanudge doctor`: what is installed, what is found, and whether meta-gradients come out right
on this machine.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from metanudge.cli.flags import parse
from metanudge.cli.reproducibility import reproducibility
from metanudge.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from metanudge import TaskBatch
    from metanudge.engine_choice import EngineName
    from metanudge.estimators import Estimator
    from metanudge.testing.problems import Setup

OPTIONAL = {"tensorboard": "metanudge train --tensorboard", "wandb": "metanudge train --wandb"}


@dataclass(frozen=True)
class DoctorOptions:
    """Show versions, devices, memory and data, and what is not reproducible here; check
    meta-gradients against the exact one.

    Exit code 0 when every check passes, 1 otherwise.

    examples: metanudge doctor, metanudge doctor runs/first
    """

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """A run whose versions, threads and processor are compared with this machine's."""


def run(argv: list[str]) -> int:
    """Run the command."""
    options = parse(DoctorOptions, "doctor", argv)
    for title, lines in (
        ("versions", versions()),
        ("machine", machine()),
        ("data", data()),
        ("optional packages", optional()),
        ("reproducibility", reproducibility(options.run)),
    ):
        print(title)
        for name, text in lines.items():
            print(f"  {name:<11}  {text}")
    print("self-test: meta-gradients against the dense oracle (2 tasks, 17 parameters, float64)")
    started = time.perf_counter()
    results = self_test()
    width = max(len(result.estimator) for result in results)
    print(f"  {'estimator':<{width}}  {'engine':<8}  relative error  allowed")
    for result in results:
        verdict = "PASS" if result.passed else "FAIL"
        print(
            f"  {result.estimator:<{width}}  {result.engine:<8}  {result.error:14.1e} "
            f" {result.allowed:7.0e}  {verdict}"
        )
    failed = sum(not result.passed for result in results)
    verdict = "all meta-gradients are right"
    if failed:
        verdict = f"{failed} of {len(results)} checks FAILED"
    print(f"{verdict} ({time.perf_counter() - started:.1f} s)")
    if failed:
        print(
            "Meta-gradients on this machine cannot be trusted. Reinstall torch, and report this"
            " output if that does not help."
        )
    return 1 if failed else 0


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    import numpy
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return {
        "metanudge": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} ({cuda})",
        "numpy": numpy.__version__,
    }


def machine() -> dict[str, str]:
    """Devices, threads, memory."""
    import torch

    from metanudge.training.preparation import available_memory

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"torch threads: {torch.get_num_threads()} (OMP_NUM_THREADS changes it)"
    found = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": f"{usable} cores usable, {threads}",
    }
    if (memory := available_memory()) is not None:
        found["memory"] = f"{memory / 2**30:.1f} GiB available"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        found["gpu"] = "none that torch can use"
    return found


def data() -> dict[str, str]:
    """Which data sets are at hand."""
    from metanudge.tasks import SOURCES
    from metanudge.tasks.cache import cache_folder

    there = "" if cache_folder().is_dir() else " (not there yet; made when needed)"
    own = os.environ.get("METANUDGE_DATA", "none named; METANUDGE_DATA names a folder")
    found = {"cache": f"{cache_folder()}{there}", "own copies": own}
    for name, source in SOURCES.items():
        if source.about.made:
            found[name] = ", ".join(map(str, source.files())) or source.about.missing
    return found


def optional() -> dict[str, str]:
    """Packages that add something."""
    found = {}
    for name, what in OPTIONAL.items():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = f"not installed; for {what}: pip install 'metanudge[{name}]'"
    return found


@dataclass(frozen=True)
class Check:
    """One estimator on one engine against the oracle."""

    estimator: str
    engine: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is small enough; NaN is not."""
        return self.error <= self.allowed


def self_test() -> list[Check]:
    """Meta-gradients of the main estimators on both engines, against an implicit gradient made with
    dense Hessians.

    The inner problem is solved to rounding error, where the implicit gradient and MAML's agree. The
    oracle uses plain autograd and shares no code with the engines.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problem is tiny: more threads would only wait for each other
    try:
        return _checks()
    finally:
        torch.set_num_threads(threads)


def _checks() -> list[Check]:
    import metanudge as mn
    from metanudge.testing.problems import relative_error

    model, loss, tasks = small_problem()
    oracle = _dense_oracle(model, tasks)
    estimators: list[tuple[str, Estimator, float]] = [
        ("FOBMAML symmetric, nu=0.01", mn.FOBMAML(nu=0.01), 1e-4),
        ("FOBMAML symmetric, gradient nudge", mn.FOBMAML(nu=0.01, nudge="gradient"), 1e-4),
        ("FOBMAML tangent", mn.FOBMAML(stencil="tangent"), 1e-8),
        ("IMAML, 20 CG steps", mn.IMAML(cg_steps=20), 1e-8),
        ("MAML", mn.MAML(), 1e-8),
    ]
    engines: tuple[EngineName, ...] = ("stacked", "inplace")
    solver = mn.GradientDescent(lr=0.4, steps=30)
    checks = []
    for (name, estimator, allowed), engine in product(estimators, engines):
        if engine in estimator.engines:
            learner = mn.MetaLearner(
                model, loss, lam=_LAM, solver=solver, estimator=estimator, engine=engine
            )
            gradient, _ = learner.meta_gradient(tasks, metrics=False)
            checks.append(Check(name, engine, relative_error(gradient, oracle), allowed))
    return checks


_LAM = 2.0


def small_problem() -> Setup:
    """Two tasks and a perceptron of 17 parameters."""
    from metanudge.testing.problems import mlp

    return mlp(features=2, hidden=3, classes=2, tasks=2, support=6, query=6)


def _dense_oracle(model: torch.nn.Module, tasks: TaskBatch) -> Tensor:
    """λ (∇²f̂ + λ)⁻¹ ∇f at the inner optimum, averaged over the tasks; Newton's method and dense
    Hessians.
    """
    import torch
    from torch.func import functional_call
    from torch.nn.functional import cross_entropy

    shapes = {name: p.shape for name, p in model.named_parameters()}
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(phi: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        parts = phi.split([shape.numel() for shape in shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        return cross_entropy(functional_call(model, named, (batch[0],)), batch[1])

    def gradient(phi: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        at = phi.detach().requires_grad_()
        return torch.autograd.grad(loss(at, batch), at)[0]

    def solve(phi: Tensor, batch: tuple[Tensor, Tensor], right: Tensor) -> Tensor:
        """(∇²f̂ + λ)⁻¹ times the right-hand side."""
        hessian = torch.autograd.functional.hessian(lambda p: loss(p, batch), phi)
        return torch.linalg.solve(hessian + _LAM * torch.eye(len(phi), dtype=phi.dtype), right)

    total = torch.zeros_like(theta)
    for task in tasks:
        phi = theta
        for _ in range(8):
            slope = gradient(phi, task.support) + _LAM * (phi - theta)
            phi = phi - solve(phi, task.support, slope)
        total += _LAM * solve(phi, task.support, gradient(phi, task.query)) / len(tasks)
    return total
