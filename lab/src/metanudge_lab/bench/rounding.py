"""What the arithmetic does to the meta-gradient: its distance from the same learner's in float64,
‖g − g₆₄‖ / ‖g₆₄‖.

A rounding error that flips a choice of ReLU or max-pooling changes a gradient far more than one
that does not, so a single error is a matter of luck. Many are measured, each on a model and a
meta-batch of its own, the same ones for every contender, precision and path.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from metanudge.engines.stacked import compilation, offers_for
from metanudge.objective import Objective
from metanudge.problem import Problem
from metanudge.testing.problems import relative_error
from metanudge.training.device import Precision, computing_in
from metanudge_lab.bench.cases import Case
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, Gradient
from metanudge_lab.bench.suite import Result, context, describe, names, title_of, workload_of
from metanudge_lab.bench.workload import Workload
from metanudge_lab.device_memory import release
from metanudge_lab.progress import Progress

DEFAULT = ("fobmaml-loss", "fobmaml-gradient", "fomaml")
BLOCKS, LAYERS = "blocks", "layer by layer"
_TASKS = {"cpu": 2, "cuda": 8}
_BATCHES, _QUICK_BATCHES = 16, 3
_DRAWS = 10_000
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """A way to compute a meta-gradient.

    Attributes:
        contender, precision: whose, and in which arithmetic.
        path: whether convolution blocks run as one operation, or layer by layer.
        compiled: whether kernels may be built.
    """

    contender: Contender
    precision: Precision
    path: str
    compiled: bool

    def __str__(self) -> str:
        return f"{self.contender.name}, {self.precision}, {self.path}"

    def gradient(self, workload: Workload) -> Gradient:
        """The mean meta-gradient of a workload."""
        with compilation(self.compiled), computing_in(self.precision, workload.device):
            return self.contender.prepare(workload).step()


@dataclass
class Found:
    """The errors of every cell, batch by batch; a cell that fails is left out from then on."""

    errors: dict[Cell, list[float]]
    skipped: list[str]
    failed: list[Result] = field(default_factory=list)

    def add(self, batch: Mapping[Cell, float | Exception], device: torch.device) -> None:
        """Those of one meta-batch."""
        for cell, error in batch.items():
            if isinstance(error, float):
                self.errors[cell].append(error)
                continue
            del self.errors[cell]
            if cell.precision == "bf16" and device.type == "cpu":
                self.skipped.append(f"{cell} does not run here: {describe(error)}")
            else:
                told = {"label": str(cell), "error": describe(error)}
                self.failed.append({**names(cell.contender), **told})


def rounding(
    case: Case,
    contenders: Sequence[Contender],
    config: BenchConfig,
    device: torch.device,
    progress: Progress,
) -> Result:
    """Measure one case in every precision that the device has."""
    until = time.monotonic() + config.limit_seconds
    batches = (
        config.batches
        if config.batches is not None
        else _QUICK_BATCHES
        if config.quick
        else _BATCHES
    )
    workload = _workload(case, config, device, 0)
    precisions, skipped = _precisions(device)
    cells = [
        Cell(contender, name, path, compiled)
        for contender in contenders
        for name in precisions
        for path, compiled in paths(workload, name).items()
    ]
    found = Found({cell: [] for cell in cells}, skipped)
    took, done = 0.0, 0
    progress.begin(f"{case.name}, rounding", total=batches * len(cells), done=0)
    try:
        for batch in range(batches):
            begin = time.monotonic()
            if batch and begin + took > until:
                skipped.append(
                    f"{batches - batch} of {batches} meta-batches left out: the limit of"
                    f" {config.limit_seconds:g} s"
                )
                progress.note(f"{case.name}: {skipped[-1]}")
                break
            drawn = _workload(case, config, device, batch)
            found.add(_one_batch(drawn, list(found.errors), progress), device)
            release(device)
            took, done = max(took, time.monotonic() - begin), batch + 1
    finally:
        progress.end()
    return {
        "kind": "rounding",
        "case": case.name,
        "title": title_of(case, config),
        **_all_precisions(context(workload, config, device)),
        "batches": done,
        "rows": [_row(cell, np.array(errors)) for cell, errors in found.errors.items()],
        "ratios": _ratios(found.errors),
        "failed": found.failed,
        "skipped": skipped,
    }


def paths(workload: Workload, name: Precision) -> dict[str, bool]:
    """The ways through the model in a precision, and whether each may build kernels; a single one
    where both come to the same.
    """
    problem = Problem(Objective(workload.model, workload.loss), workload.lam)
    found: dict[str, bool] = {}
    for compiled in (True, False):
        with compilation(compiled), computing_in(name, workload.device):
            offers = offers_for(problem, workload.tasks)
            fused = bool(offers) and all(offer.fused for offer in offers)
            found.setdefault(BLOCKS if fused else LAYERS, compiled)
    return found


def in_float64(workload: Workload) -> Workload:
    """The same weights and data, as float64."""
    return dataclasses.replace(
        workload, model=workload.copy_model().double(), tasks=workload.tasks.to(torch.float64)
    )


def error_of(gradient: Gradient, exact: Gradient) -> float:
    """‖g − g₆₄‖ / ‖g₆₄‖ over all parameters together, in float64.

    Example:
        >>> exact = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
        >>> error_of({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.5)}, exact)
        0.1
    """
    return relative_error(
        {name: gradient[name].double() for name in exact},
        {name: g.double() for name, g in exact.items()},
    )


def root_mean_square(errors: Numbers) -> Numbers:
    """Along the last axis."""
    return np.asarray(np.sqrt(np.mean(np.square(errors), axis=-1)))


def median(errors: Numbers) -> Numbers:
    """Along the last axis."""
    return np.asarray(np.median(errors, axis=-1))


def ratio(
    errors: Numbers, others: Numbers, statistic: Callable[[Numbers], Numbers]
) -> dict[str, Any]:
    """A statistic of errors over that of others on the same batches, and its 95 % interval from a
    bootstrap over the batches.

    Example:
        >>> ratio(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0]), median)
        {'ratio': 2.0, 'interval': [2.0, 2.0]}
    """
    count = len(errors)
    interval = None
    if count > 1:
        drawn = np.random.default_rng(0).integers(count, size=(_DRAWS, count))
        interval = np.quantile(
            statistic(errors[drawn]) / statistic(others[drawn]), (0.025, 0.975)
        ).tolist()
    return {"ratio": float(statistic(errors) / statistic(others)), "interval": interval}


def _workload(case: Case, config: BenchConfig, device: torch.device, batch: int) -> Workload:
    """A model and a meta-batch of their own for every number; a case makes them from two
    neighbouring seeds.
    """
    tasks = {} if config.quick or config.tasks is not None else {"tasks": _TASKS[device.type]}
    return workload_of(case, config, device, seed=2 * batch, **tasks)


def _precisions(device: torch.device) -> tuple[list[Precision], list[str]]:
    """Those that the device has, and why it lacks the others."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ["fp32", "tf32", "bf16"], []
    reason = (
        "this GPU has no TF32 products"
        if device.type == "cuda"
        else "TF32 products are a matter of GPUs"
    )
    return ["fp32", "bf16"], [f"tf32 left out: {reason}"]


def _one_batch(
    workload: Workload, cells: Sequence[Cell], progress: Progress
) -> dict[Cell, float | Exception]:
    """The error of each cell on one meta-batch, or what it raised."""
    exact: dict[str, Gradient] = {}
    found: dict[Cell, float | Exception] = {}
    for cell in cells:
        progress.start(str(cell))
        begin = time.monotonic()
        name = cell.contender.name
        if name not in exact:
            exact[name] = Cell(cell.contender, "fp32", LAYERS, compiled=False).gradient(
                in_float64(workload)
            )
        try:
            found[cell] = error_of(cell.gradient(workload), exact[name])
        # an operator that this precision lacks, an overflow: a result as well
        except Exception as error:
            found[cell] = error
            progress.note(f"{workload.case}: {cell} failed. {describe(error)}")
        progress.finish(str(cell), time.monotonic() - begin)
    return found


def _row(cell: Cell, errors: Numbers) -> Result:
    return {
        **names(cell.contender),
        "precision": cell.precision,
        "path": cell.path,
        "rms": float(root_mean_square(errors)),
        "median": float(median(errors)),
        "largest": float(errors.max()),
        "errors": errors.tolist(),
    }


def _ratios(errors: dict[Cell, list[float]]) -> list[Result]:
    """Blocks over layer by layer, where both were measured."""
    layers = {
        (cell.contender.name, cell.precision): np.array(found)
        for cell, found in errors.items()
        if cell.path == LAYERS
    }
    rows = []
    for cell, found in errors.items():
        others = layers.get((cell.contender.name, cell.precision))
        if cell.path == BLOCKS and others is not None:
            compared = {
                "rms": ratio(np.array(found), others, root_mean_square),
                "median": ratio(np.array(found), others, median),
            }
            rows.append({**names(cell.contender), "precision": cell.precision, **compared})
    return rows


def _all_precisions(found: Result) -> Result:
    """A context that names none, since all were measured."""
    return {
        **found,
        "config": {name: value for name, value in found["config"].items() if name != "precision"},
    }
