"""How a configuration becomes an episode source and a learner."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal, cast

import torch

from metanudge.engines.randomness import mix
from metanudge.estimators.run import check_learnable
from metanudge.learner import MetaLearner
from metanudge.models import Prototypes
from metanudge.objective import Loss
from metanudge.problem import UnmatchedPattern
from metanudge.rates import InnerRates, RatePer
from metanudge.solvers import GradientDescent
from metanudge.tasks import SOURCES, EncodedText, Episodes, Given, Text
from metanudge.tasks.omniglot_files import DownloadError
from metanudge.training import own_parts, specs
from metanudge.training.config import GIVEN, TEXT, LearnLr, TrainConfig, flag, own_code
from metanudge.training.data import Data, DataShapes
from metanudge.training.device import device_called
from metanudge.training.errors import UserError, count, refused, spelled
from metanudge.training.hf_models import build_classifier, with_adapters
from metanudge.training.own_data import Folder, OwnSource, given_tasks, own_data, own_source
from metanudge.training.shards import divided
from metanudge.training.spec_language import Spec, known, normal
from metanudge.training.specs import Shapes
from metanudge.training.text_data import text_data


def find_data(config: TrainConfig) -> Data:
    """The data set, folder or table that a configuration names."""
    text, default = config.data, TrainConfig()
    if not text:
        raise UserError(
            "What should be trained on? Name the data: metanudge train mnist1d (or omniglot,"
            " sinusoid, a folder with one sub-folder per class, a .csv file)."
        )
    given = {name: value for name in GIVEN if (value := getattr(config, name)) not in (None, "")}
    if any(given.get(name) not in (None, getattr(default, name)) for name in GIVEN):
        return given_tasks(config, given)
    if any(getattr(config, name) is not None for name in TEXT):
        return text_data(config)
    if own_code(text):
        return own_source(text)
    if (name := normal(text)) in SOURCES:
        return Data(name, name, SOURCES[name], SOURCES[name].kind == "classification")
    if (found := own_data(text)) is not None:
        return found
    known(text, SOURCES, "data", "data set or folder")
    raise AssertionError("unreachable")


def for_device(config: TrainConfig, device: torch.device) -> TrainConfig:
    """The configuration with what depends on where it runs: on a CPU, the user's own pictures get
    a small network on small pictures that learns in few and cheap meta-steps.
    """
    data = find_data(config)
    ours = not (own_code(config.model) or config.model.startswith(specs.HF))
    frugal = device.type == "cpu" and isinstance(data, Folder) and data.has_pictures()
    found: dict[str, Any] = {
        "tasks": config.tasks or (4 if frugal else 16),
        "patience": (0 if data.name in SOURCES else 3) if (p := config.patience) is None else p,
    }
    if normal(config.estimator) == "auto":  # fomaml cannot learn λ
        found["estimator"] = "fomaml" if frugal and config.learn_lam == "none" else "fobmaml"
    if config.head == "auto":
        wanted = isinstance(count("--ways", config.ways), tuple) or (frugal and config.adapt == "*")
        found["head"] = "prototypes" if wanted and ours else "fixed"
    if frugal and normal(config.model) == "auto":
        found["model"] = "conv4:channels=32"
    if frugal and "image_size" not in data.options(config.data_options):
        found["data_options"] = ",".join(filter(None, [config.data_options, "image_size=small"]))
    return dataclasses.replace(config, **found)


def build_source(
    config: TrainConfig, *, device: torch.device | None = None, remembered: DataShapes | None = None
) -> Episodes:
    """The episodes that a configuration describes; with what a checkpoint remembers of the data,
    prepared as for it.
    """
    data = find_data(config)
    options = data.options(config.data_options)
    if remembered is not None:
        options = data.as_remembered(options, remembered)
    if config.ways is not None and not data.has_classes:
        raise UserError(
            f"--ways {config.ways}: {data.what} tasks are regression and have no classes. Leave"
            " --ways out."
        )
    sizes = {name: count(flag(name), getattr(config, name)) for name in ("ways", "shots")}
    sizes["queries"] = config.queries
    options |= {name: size for name, size in sizes.items() if size is not None}
    if any(isinstance(size, tuple) for size in sizes.values()):
        options["alike"] = config.tasks or 16
    place = device if device is not None else device_called(config.device)
    dtype = getattr(torch, config.dtype)
    try:
        with refused(f"{config.data}: "), refused(f"{config.data} cannot be read: ", OSError):
            source = data.build(**options, seed=config.seed, device=place, dtype=dtype)
    except DownloadError as error:
        raise UserError(
            f"{config.data}: {error} On the command line, root is --data-options root=FOLDER. Where"
            f" there is a network, metanudge data fetch {data.name} gets the files and says where"
            " they are."
        ) from error
    source = source if config.head != "prototypes" else _with_support(config, source)
    return source if config.augment == "none" else own_parts.augmented(config, source)


def _with_support(config: TrainConfig, source: Episodes) -> Episodes:
    if source.kind != "classification" or isinstance(source, Given):
        what = (
            "they are regression"
            if source.kind != "classification"
            else "the classes of given tasks mean the same in all of them"
        )
        raise UserError(
            f"{config.data}: --head prototypes is for tasks with classes of their own, but {what}."
            " Leave --head out."
        )
    return source.with_support()


def check_splits(config: TrainConfig, source: Episodes) -> None:
    """Draw one task of every split that the run will use, so that a split without enough classes is
    refused at the start.
    """
    needed: list[tuple[Literal["train", "val", "test"], bool, str]] = [
        ("train", True, ""),
        ("val", config.eval_every > 0, "--eval-every 0"),
        ("test", config.test_tasks > 0, "--test-tasks 0"),
    ]
    for split, used, off in needed:
        if used:
            try:
                source.task(0, split)
            except ValueError as error:
                without = f" Or do without this split: {off}." if off else ""
                raise UserError(f"{config.data}: {error}{without}") from error


# The learner


def build_learner(
    config: TrainConfig, shapes: Shapes, *, ways: int | None = None, mesh: Any = None
) -> MetaLearner:
    """The learner that a configuration describes, with its initial weights, on its device.

    Args:
        config: of the run.
        shapes: an episode source, or anything else that says what the tasks look like.
        ways: for how many classes a head of prototypes is made, if not those of the shapes.
        mesh: over whose shards the model is divided.
    """
    device = device_called(config.device)
    solver, estimator = (
        specs.build_solver(config.solver, shapes.kind),
        specs.build_estimator(config.estimator),
    )
    # Weights are drawn on the CPU, so that they are the same wherever the run goes.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(config.seed, 1))
        build = build_classifier if config.model.startswith(specs.HF) else specs.build_model
        model = build(config.model, shapes)
        if config.peft != "none":
            model = with_adapters(model, config.peft)
        if config.head == "prototypes":
            model = _with_prototypes(model, config, ways or shapes.num_outputs)
    model = model.to(getattr(torch, config.dtype)).train()
    model = model.to(device) if mesh is None else divided(model, mesh)
    loss: Loss = (
        torch.nn.functional.cross_entropy
        if shapes.kind == "classification"
        else torch.nn.functional.mse_loss
    )
    if config.loss != "auto":
        loss = own_parts.build_function(config.loss, "--loss")
    other = config.query_loss
    query_loss = None if other == "same" else own_parts.build_function(other, "--query-loss")
    try:
        estimator.check(solver)
        learner = MetaLearner(
            model,
            loss,
            lam=config.lam,
            learn_lam=None if config.learn_lam == "none" else config.learn_lam,
            learn_lr=_inner_rates(config.learn_lr),
            adapt=None if config.adapt == "*" else config.patterns,
            query_loss=query_loss,
            metrics=own_parts.build_metrics(config.metrics) if config.metrics else None,
            solver=solver,
            estimator=estimator,
            engine=config.engine,
            chunk=config.chunk,
            compile=config.compile,
            seed=config.seed,
        )
        check_learnable(estimator, learner.problem())
    except UnmatchedPattern as error:
        raise UserError(f"--adapt {error.pattern!r} {error.problem}") from error
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return learner


def _with_prototypes(model: torch.nn.Module, config: TrainConfig, ways: int) -> torch.nn.Module:
    try:
        # a copy: a module of the user's own keeps its head
        return Prototypes(copy.deepcopy(model), most=ways)
    except ValueError as error:
        raise UserError(
            f"--head prototypes takes the place of a linear layer called head, and --model"
            f" {config.model} has none. Use one that has, or --head fixed."
        ) from error


def _inner_rates(word: LearnLr) -> InnerRates | None:
    if word == "none":
        return None
    per = cast(RatePer, word.removeprefix("signed-"))
    return InnerRates(per, positive=not word.startswith("signed-"))


def resolve(config: TrainConfig, source: Episodes, mesh: Any = None) -> TrainConfig:
    """The configuration with every choice written out in one fixed way: specs canonical, `auto`
    decided, paths absolute. What is measured is measured by a model divided over a mesh.
    """
    data = find_data(config)
    if isinstance(source, Given):
        # a fraction is taken of what no column divides
        support = config.support or (None if config.split_column else 0.5)
        sizes: dict[str, Any] = {"support": support, "task_type": source.kind}
    elif isinstance(data, OwnSource):
        sizes = {}  # its code is asked again as it was asked
    else:
        ways = spelled(*source.spans["ways"]) if source.kind == "classification" else None
        shots = spelled(*source.spans["shots"])
        sizes = {"ways": ways, "shots": shots, "queries": source.queries}
    if isinstance(source, (Text, EncodedText)):
        form = source.form
        sizes |= {"tokenizer": form.tokenizer or None, "encoder": form.encoder or None}
        sizes |= {"label": config.label or "label"}
    return dataclasses.replace(
        config,
        data=data.name,
        **sizes,
        data_options=data.all_options(config.data_options, source),
        model=str(specs.parse_model(config.model, source)),
        solver=_measured(config, source, mesh),
        estimator=str(specs.parse_estimator(config.estimator)),
        optimizer=str(specs.parse_optimizer(config.optimizer)),
        **_own(config),
    )


def _own(config: TrainConfig) -> dict[str, Any]:
    """Loss, metrics and augmentation where they are not the usual ones."""
    found: dict[str, Any] = {}
    for name, usual in (("loss", "auto"), ("query_loss", "same")):
        if (text := getattr(config, name)) != usual:
            found[name] = str(own_parts.parse_function(text, flag(name)))
    if config.metrics:
        found["metrics"] = own_parts.parse_metrics(config.metrics)
    if config.augment != "none":
        found["augment"] = own_parts.parse_augment(config.augment)
    return found


def _measured(config: TrainConfig, source: Episodes, mesh: Any) -> str:
    """The solver's spec with a number where its learning rate is to follow the curvature of the
    first tasks: where the user says lr=auto, and by default for given regression tasks.
    """
    asked = normal(config.solver) != "auto"
    wish = config.solver
    if not asked and isinstance(source, Given) and source.kind == "regression":
        wish = "gradient_descent:lr=auto,steps=10"
    spec = specs.parse_solver(wish, source.kind)
    if spec.options.get("lr") != "auto":
        return str(spec)
    plain = dataclasses.replace(config, solver=str(spec), learn_lr="none")
    try:
        learner = build_learner(plain, source, mesh=mesh)
        learner.evaluate(source.batch(range(min(config.tasks, 8))), steps=1)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if asked:
            raise UserError(f"--solver {config.solver}: {error}") from error
        return str(specs.parse_solver(config.solver, source.kind))
    assert isinstance(learner.solver, GradientDescent)
    return str(Spec(spec.name, {**spec.options, "lr": learner.solver.rate}))
