"""Before the first meta-step: where a run lives and begins, and everything that could be wrong with
it: a folder that is taken, memory that does not suffice, inner steps that cannot settle, a model
that does not fit. Only `claim` writes.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
import os
import shlex
import time
from pathlib import Path

import torch
from torch import Tensor

from metanudge.engines import StackedEngine, StackingError
from metanudge.engines.room import free_memory
from metanudge.engines.undisturbed import Guard, restored
from metanudge.estimators import NonFiniteError
from metanudge.learner import MetaLearner
from metanudge.planning import plan
from metanudge.solvers import GradientDescent, Solver
from metanudge.spread import local
from metanudge.task import describe
from metanudge.tasks import Episodes
from metanudge.tasks.ngrams import NGRAMS
from metanudge.training import continuing, sources, specs
from metanudge.training.config import TrainConfig
from metanudge.training.continuing import Plan
from metanudge.training.data import DataShapes
from metanudge.training.device import device_called, environment
from metanudge.training.distributed import Group
from metanudge.training.errors import UserError, readable, refused
from metanudge.training.files import (
    LOCK,
    RunLock,
    check_free,
    is_real_folder,
    job_of,
    open_to_append,
    write_text,
)
from metanudge.training.loop import Course, Surroundings, Trainer
from metanudge.training.runs import CHECKPOINTS, CONFIG, METRICS, TIMING
from metanudge.training.shards import check_sharded
from metanudge.training.sinks import check_sink
from metanudge.training.summary import check_summary
from metanudge.tuning import NuTuner


def make_plan(config: TrainConfig, resume: Path | None, group: Group, lock: RunLock) -> Plan:
    """Where the run goes: the folder of `resume`, `--out`, or a new one; `UserError` where that
    cannot be.

    A run that is there is locked before any of it is read, a new one by `claim`.
    """
    if resume is not None:
        chosen: str = "last"
        if resume.parent.name == CHECKPOINTS and not (resume / CONFIG).exists():
            resume, chosen = resume.parent.parent, resume.name
        plan = Plan(resume, *continuing.read_run(resume, chosen, lock))
        if plan.saved is not None and config.out not in (None, plan.saved.out):
            raise UserError(
                f"--out {config.out} and --resume {resume} contradict each other: a run goes on"
                " where it is. Leave --out out."
            )
        return plan
    folder = Path(config.out).expanduser() if config.out else _default_folder(config, group)
    if group.job is not None and (folder / CONFIG).is_file() and job_of(folder) == group.job:
        # torchrun starts the same command again after a failure
        return Plan(folder, *continuing.read_run(folder, "last", lock))
    if config.out and folder.exists():
        check_free(folder)
        _check_empty(folder)
    return Plan(folder, named=bool(config.out))


def _check_empty(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file. Give a new or empty folder.")
    found = _contents(folder)
    if found:
        more = (
            f", or continue the run in it: metanudge train --resume {shlex.quote(str(folder))}"
            if CONFIG in found
            else ""
        )
        raise UserError(
            f"--out {folder} is not empty (it holds {found[0]}). Give a new or empty folder{more}."
        )


def _contents(folder: Path) -> list[str]:
    with readable(folder, " Give a folder of yours."):
        names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if not name.startswith(".new-") and name != LOCK]


def _default_folder(config: TrainConfig, group: Group) -> Path:
    name = Path(config.data).expanduser().resolve().stem.replace(":", "-")
    if group.job is not None:  # an earlier start of this job may have chosen a name; go on there
        for folder in Path("runs").glob(f"{glob.escape(name)}-*"):
            if job_of(folder) == group.job:
                return folder
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def read_data(
    config: TrainConfig, plan: Plan, around: Surroundings, allow_changed: bool
) -> tuple[TrainConfig, Episodes]:
    """The source, and the configuration with every choice written out; checked against the data and
    against the run that goes on.
    """
    group, note = around.group, around.note
    device = device_called(config.device)
    for name in config.sinks:
        check_sink(name)
    config = sources.for_device(config, device)
    if config.encoder is not None and config.encoder != NGRAMS:
        note(f"features of {Path(config.encoder).name}: computed once, then read from the cache")
    remembered = (
        DataShapes.from_dict(plan.checkpoint.state["shapes"])
        if plan.checkpoint is not None
        else None
    )
    source = group.one_after_the_other(
        lambda: sources.build_source(config, device=device, remembered=remembered)
    )
    check_data_fits(config, source, len(group.slice(config.tasks)))
    sources.check_splits(config, source)
    if group.shards > 1:  # what is measured, they measure together
        config = sources.resolve(config, source, group.mesh)
    # one for all ranks: it may hold what was measured
    config = group.share(lambda: sources.resolve(config, source))
    config = dataclasses.replace(config, out=str(plan.folder))
    config.check()  # once more: it has absolute paths now
    if plan.saved is not None:
        config = continuing.check_unchanged(plan, config, source)
        continuing.check_data(plan, source, allow=allow_changed, note=note)
        continuing.say_what_differs(plan, config, environment(device, processes=group.world), note)
        if group.leads:
            check_summary(plan.folder, note)
    return config, source


def make_trainer(
    config: TrainConfig, plan: Plan, source: Episodes, around: Surroundings
) -> Trainer:
    """A trainer where the run begins or goes on; its device is set up for bytes that repeat."""
    learner = sources.build_learner(config, source, mesh=around.group.mesh)
    with refused("", StackingError):  # by a model that is divided
        check_solves_fit(config, source, len(around.group.slice(config.tasks)), learner)
    if around.group.mesh is not None:
        check_sharded(config, around.group)
    if plan.saved is None:
        check_steps(config.lam, learner.solver)
    groups = specs.parameter_groups(learner, config.lam_lr, config.rate_lr)
    course = Course(
        iterations=config.iterations,
        tasks=config.tasks,
        schedule=config.schedule,
        clip=config.clip,
        seed=config.seed,
        metrics_every=config.metrics_every,
    )
    optimizer = specs.build_optimizer(config.optimizer, groups)
    trainer = Trainer(learner, source, optimizer, course, around=around)
    if plan.checkpoint is not None:
        trainer.load(plan.checkpoint)
    if source.device.type == "cuda":
        torch.cuda.set_device(source.device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return trainer


def try_out(learner: MetaLearner, source: Episodes, config: TrainConfig) -> str | None:
    """One task through the learner before anything is written: a model that does not fit the data
    fails here. Returns how `MAML` multiplied with Hessians, where that is the estimator.
    """
    batch = source.batch([0])
    inputs, _ = batch[0].query
    problem = learner.problem()
    guard = Guard(problem)  # BatchNorm would note the batch's statistics
    try:
        with restored(guard.restore), torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs, _ = problem.objective.output((inputs, None))
    except Exception as error:
        raise UserError(
            f"--model {config.model} cannot take the data, inputs of {describe(inputs)}: {error}"
        ) from error
    wanted = (batch[0].num_query, source.num_outputs)
    if isinstance(outputs, Tensor) and tuple(outputs.shape) != wanted:
        raise UserError(
            f"--model {config.model} gives outputs of shape {tuple(outputs.shape)} for"
            f" {wanted[0]} examples; the tasks need {wanted}. Give it as many outputs as there"
            " are ways (1 for regression)."
        )
    tuner, learner.tuner = learner.tuner, NuTuner()  # the run chooses a ν on tasks of its own
    try:
        products = learner.meta_gradient(batch, seed=0)[1].products
        learner.estimator = learner.estimator.on(learner.problem())  # alike on all ranks
        return products
    except (NonFiniteError, torch.OutOfMemoryError):
        return None  # the training loop deals with these
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(str(error)) from error
    finally:
        learner.tuner = tuner


def claim(plan: Plan, config: TrainConfig, lock: RunLock) -> Path:
    """Make the folder and write the configuration, which makes it a run; returns the folder."""
    folder = plan.folder
    _check_contents(folder)
    try:
        if plan.saved is None:
            folder = _make_folder(plan)
            lock.take(folder)
            _check_empty(folder)  # another process may have come first
        write_text(folder / CONFIG, dataclasses.replace(config, out=str(folder)).to_json())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}). Give a folder of yours on a disk with"
            " space left: --out FOLDER"
        ) from error
    return folder


def _check_contents(folder: Path) -> None:
    """Refuse a folder in which something else stands where the run adds to files and other packages
    write theirs.
    """
    try:
        for name in (METRICS, TIMING):
            if os.path.lexists(folder / name):
                open_to_append(folder / name).close()
        for name in (CHECKPOINTS, "tensorboard", "wandb"):
            is_real_folder(folder / name)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written to ({error.strerror}).") from error


def _make_folder(plan: Plan) -> Path:
    for number in itertools.count(1):
        folder = (
            plan.folder if number == 1 else plan.folder.with_name(f"{plan.folder.name}-{number}")
        )
        try:
            folder.mkdir(parents=True, exist_ok=plan.named)
            return folder
        except FileExistsError:
            if plan.named:
                raise
    raise AssertionError("unreachable")


def check_steps(lam: float, solver: Solver) -> None:
    """Refuse gradient descent that the proximal term alone drives away from θ: each step multiplies
    φ − θ by 1 − lr·λ.

    Example:
        >>> check_steps(30.0, GradientDescent(lr=0.1, steps=5))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        metanudge.training.errors.UserError: --lam 30 with lr=0.1 in --solver: lr·λ is 3, ...
    """
    if isinstance(solver, GradientDescent) and lam * (lr := solver.rate) >= 2:
        raise UserError(
            f"--lam {lam:g} with lr={lr:g} in --solver: lr·λ is {lam * lr:.3g}, and"
            " from 2 on every inner step ends further from the initialisation than it began,"
            f" whatever the data. Use lr below 2/λ = {2 / lam:.3g}, or --lam below 2/lr ="
            f" {2 / lr:.3g}."
        )


def check_data_fits(config: TrainConfig, source: Episodes, tasks: int) -> None:
    """Refuse a run where the examples of one meta-step's `tasks`, or the results of an evaluation,
    cannot fit, before any are drawn.
    """
    _refuse_if_more(_data(config, source, tasks), source, config)


def check_solves_fit(
    config: TrainConfig, source: Episodes, tasks: int, learner: MetaLearner
) -> None:
    """Refuse a run whose solves cannot fit side by side: three copies of the parameters each (φ,
    displacement, gradient) at the least.
    """
    solves = min(tasks * learner.estimator.width, _at_once(learner, source))
    held = [local(p) for p in learner.problem().parameters.values()]
    copies = 3 * sum(p.numel() * p.element_size() for p in held)
    _refuse_if_more(
        _data(config, source, tasks) | {f"{solves:,} solves side by side": int(solves * copies)},
        source,
        config,
    )


def _data(config: TrainConfig, source: Episodes, tasks: int) -> dict[str, int]:
    """What is held, and its bytes at least."""
    evaluated = max(config.eval_tasks if config.eval_every else 0, config.test_tasks)
    task = (
        source.ways
        * (source.shots + source.queries)
        * (math.prod(source.input_shape) * source.dtype.itemsize + 8)
    )
    return {
        f"the examples of {tasks:,} tasks": tasks * task,
        f"the results of {evaluated:,} evaluated tasks": evaluated * 32,
    }


def _at_once(learner: MetaLearner, source: Episodes) -> float:
    """How many solves are held side by side; 1 where the memory decides, as it does on a GPU and
    for second derivatives.
    """
    engine, _ = learner.choose_engine(source.batch([0]))
    if (
        not isinstance(engine, StackedEngine)
        or source.device.type != "cpu"
        or learner.estimator.second_order(learner.solver)
    ):
        return 1
    return engine.chunk or math.inf


def _refuse_if_more(needs: dict[str, int], source: Episodes, config: TrainConfig) -> None:
    free = free_memory(source.device) if source.device.type == "cuda" else available_memory()
    needed = sum(needs.values())
    if free is None or needed <= free:
        return
    detail = ", ".join(
        f"{_gib(size)} for {what}" for what, size in needs.items() if size > needed // 100
    )
    raise UserError(
        f"--tasks {config.tasks} with --eval-tasks {config.eval_tasks} and --test-tasks"
        f" {config.test_tasks} needs at least {_gib(needed)} of memory ({detail}), and {_gib(free)}"
        " are free. Use fewer of them, fewer --shots or --queries, or a --chunk of solves to be"
        " held at once."
    )


def available_memory() -> int | None:
    """Bytes that this process can still have, as the system and its control group allow; None where
    they do not tell.
    """
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):  # counts the cache that can be given back
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        cached = sum(
            int(line.split()[1])
            for line in _lines("/sys/fs/cgroup/memory.stat")
            if line.startswith("inactive_file ")
        )
        free = min(free, int(limit[0]) - int(used[0]) + cached)
    return free


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _gib(size: int) -> str:
    return f"{size * 10 // 2**30 / 10:,.1f} GiB"


def advice_of_plan(learner: MetaLearner, source: Episodes, tasks: int) -> str:
    """What to change where a meta-step of so many tasks does not fit the device; empty where it
    does, or where nobody can tell.
    """
    if source.device.type != "cuda" or learner.problem().spread is not None:
        return ""
    try:
        batch = source.batch(range(max(1, tasks)))
        own = plan(learner, batch, estimators=[learner.estimator], timed=False)
        return plan(learner, batch, timed=False).advice if own.advice else ""
    except (RuntimeError, ValueError, TypeError, NotImplementedError, StopIteration):
        return ""
    finally:
        torch.cuda.empty_cache()
