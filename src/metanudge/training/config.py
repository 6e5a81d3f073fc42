"""`TrainConfig`: all that decides how a run goes, as one dataclass. Loading it needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from metanudge.training.device import Precision
from metanudge.training.errors import ChangedError, UserError, check_count, check_text, check_ways
from metanudge.training.files import SEAL, is_intact, read_text, seal
from metanudge.training.upgrade import parsed, settings, upgrade
from metanudge.version import __version__

# What a resumed run may change: how far and where it goes, not what it computes.
MAY_CHANGE = (
    "iterations", "patience", "test_tasks", "baselines", "checkpoint_every",
    "device", "engine", "chunk", "shard", "compile", "tensorboard", "wandb",
)  # fmt: skip

Schedule = Literal["constant", "cosine"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "float64"]
Engine = Literal["auto", "stacked", "inplace"]
LearnLam = Literal["none", "scalar", "tensor", "parameter"]
LearnLr = Literal[
    "none", "scalar", "tensor", "parameter", "step",
    "signed-scalar", "signed-tensor", "signed-parameter", "signed-step",
]  # fmt: skip
Head = Literal["auto", "fixed", "prototypes"]
TaskType = Literal["auto", "classification", "regression"]
Baselines = Literal["all", "none"]
GIVEN = ("task_column", "target", "support", "split_column", "time_column", "task_type")
"""What says that the data are given tasks, and how they are laid out."""
TEXT = ("text", "label", "tokenizer", "encoder")
"""The same for texts."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. The defaults are the paper's MNIST-1D experiment.
    Solver, estimator, optimizer and model are written NAME:key=value,key=value.

    Example:
        >>> config = TrainConfig("mnist1d", estimator="fomaml", iterations=100)
        >>> TrainConfig.from_json(config.to_json()) == config
        True
    """

    data: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA", help_behavior_hint="")
    ] = ""
    """What to train on: mnist1d, omniglot, sinusoid, a FOLDER with one sub-folder per class, a .csv
    file, texts with --text and --label, given tasks (a table with --task-column and --target, or a
    folder with one table a task and --target), or your own source or data set as module:attribute.
    """

    ways: int | str | None = None
    """Classes per task, or a range such as 3-10, drawn anew for every meta-step (with --head
    prototypes). None: the data set's own default.
    """

    shots: int | str | None = None
    """Support examples per class, or a range such as 1-5. None: the data set's own default."""

    queries: int | None = None
    """Query examples per class. None: the data set's own default."""

    data_options: str = ""
    """More options of the data set, e.g. num_samples=4000 (mnist1d), rotations=false (omniglot),
    image_size=84,grey=true (folder of images), label=species,features=[a,b],standardise=false
    (.csv)."""

    task_column: str | None = None
    """Given tasks: the column that names the task a row belongs to."""

    target: str = ""
    """Given tasks: the column to predict, or several with commas."""

    support: float | None = None
    """Given tasks: the fraction of a task's rows to adapt on, or their number (5; of each class in
    classification). None: 0.5.
    """

    split_column: str | None = None
    """Given tasks: a column that says support or query, instead of --support."""

    time_column: str | None = None
    """Given tasks: numbers or dates; the first rows are adapted on, the later ones predicted."""

    task_type: TaskType = "auto"
    """Given tasks: classification, regression, or what the target looks like."""

    text: str | None = None
    """Texts (.csv, .tsv or .jsonl): the column with the text; --label names the class."""

    label: str | None = None
    """Texts: the column with the class. None: label."""

    tokenizer: str | None = None
    """Texts: bytes, or the folder or name of a tokenizer. None: that of --model hf:…, or bytes; the
    models auto, features and mlp need none.
    """

    encoder: str | None = None
    """Texts: folder or name of a frozen encoder; its features, computed once, are the inputs.
    ngrams: counts of words and of runs of letters, which need no encoder; the default where no
    --tokenizer is named and the model reads no tokens.
    """

    augment: str = "none"
    """Change the support sets of training tasks: flip, shift=PIXELS, noise=STD with commas, or your
    own function of (inputs, generator) as module:attribute.
    """

    augment_query: bool = False
    """Change their query sets, too."""

    model: str = "auto"
    """auto, conv1d, conv4, mlp, table, text or transformer with options (conv4:channels=32, the
    choice for your own pictures on a CPU), a text classifier as hf:FOLDER or hf:NAME, or your own
    as module:attribute.
    """

    head: Head = "auto"
    """fixed: the model's last layer, for as many classes as --ways. prototypes: one made from the
    support set, so that the run can be used with any number of classes. auto: fixed; prototypes for
    a range of --ways and, on a CPU, for pictures of your own, since they learn in fewer meta-steps.
    """

    peft: str = "none"
    """Adapters for a model hf:…, whose own weights stay: lora:r=8,target_modules=[query,value]."""

    loss: str = "auto"
    """auto (cross-entropy; squared error in regression), or your own loss(output, target) as
    module:attribute.
    """

    query_loss: str = "same"
    """Your own loss of query sets, where it is another than --loss: module:attribute."""

    metrics: str = ""
    """Functions of (output, target) to measure: NAME=module:attribute, several with commas."""

    lam: float = 2.0
    """Stiffness λ of the proximal term that ties a task's parameters to the initialisation."""

    learn_lam: LearnLam = "none"
    """Meta-learn λ from --lam on: one for all parameters (scalar), one per tensor, or one per
    parameter. none: it stays fixed.
    """

    lam_lr: float | None = None
    """Learning rate of log λ, where it is learned. None: the optimizer's."""

    learn_lr: LearnLr = "none"
    """Meta-learn the inner learning rates (maml only) from the solver's lr on: scalar, tensor,
    parameter (Meta-SGD) or step (one per tensor and step); signed-… ones may become negative.
    """

    rate_lr: float | None = None
    """Learning rate of (the logarithms of) the inner rates, where they are learned. None: the
    optimizer's.
    """

    adapt: str = "*"
    """Which parameters adapt to a task, as a pattern of their names or several with commas
    (head.*); the others are meta-learned only.
    """

    solver: str = "auto"
    """How a task is adapted to: gradient_descent:lr=0.1,steps=5 (auto; for regression lr=0.01, for
    given regression tasks lr=auto,steps=10), nesterov, lbfgs, newton_cg; lr=auto: 0.1/(curvature
    of the first tasks + λ), the number is kept. torch_optimizer:optimizer=adam,lr=0.01,steps=5.
    """

    estimator: str = "auto"
    """How the meta-gradient is made: fobmaml (auto; on a CPU, for pictures of your own, fomaml,
    which is faster), maml, fomaml, reptile, imaml, esmaml, exact. fobmaml:nu=0.1 is the paper's.
    """

    optimizer: str = "adam:lr=0.01"
    """The outer optimizer: any of torch.optim, clippedgd, normalizedgd, sngdm, or your own as
    module:attribute (with options: my_optim:Lion:lr=0.001).
    """

    schedule: Schedule = "constant"
    """Learning rate over the run: constant, or cosine from its value down to 0."""

    clip: float | None = None
    """Clip the meta-gradient to this norm."""

    iterations: int = 600
    """Meta-steps."""

    tasks: int = 0
    """Tasks per meta-step. 0: 16; on a CPU, for pictures of your own, 4."""

    seed: int = 0
    """Of the initial weights, the stream of tasks and everything else that is random."""

    device: Device = "auto"
    """Where to train; auto takes a GPU when there is one."""

    precision: Precision = "fp32"
    """fp32, tf32 (matrix products on NVIDIA GPUs), or bf16 (activations; parameters and
    meta-gradients stay wide).
    """

    dtype: Dtype = "float32"
    """Type of the parameters."""

    engine: Engine = "auto"
    """stacked: many solves side by side; inplace: one after the other; auto decides and says why.
    """

    chunk: int | None = None
    """Stacked engine: how many solves (tasks × nudges) are held in memory at once. None: all, on a
    GPU as many as fit.
    """

    shard: int = 1
    """Divide the model among so many processes (torchrun, FSDP2), tasks among groups of so many."""

    compile: bool = True
    """On a GPU, build kernels and record meta-steps: much faster steps for up to half a minute at
    the start.
    """

    metrics_every: int = 5
    """Meta-steps between measurements of query loss and accuracy, each of which costs about a tenth
    of a meta-step.
    """

    eval_every: int = 100
    """Meta-steps between validations, which choose the best checkpoint. 0: never."""

    patience: int | None = None
    """Stop after so many validations without a better one. 0: never. None: 3 with data of your own,
    never with mnist1d, omniglot and sinusoid.
    """

    eval_tasks: int = 100
    """Validation tasks."""

    test_tasks: int = 1000
    """Test tasks at the end. 0: no test."""

    baselines: Baselines = "all"
    """Measure simple methods on the same test tasks, for comparison. none: leave them out."""

    checkpoint_every: int = 50
    """Meta-steps between checkpoints."""

    out: str | None = None
    """Folder for everything the run writes; new or empty. None: runs/DATA-TIME."""

    tensorboard: bool = False
    """Also write TensorBoard events (pip install 'metanudge[tensorboard]')."""

    wandb: bool = False
    """Also log to Weights & Biases (pip install 'metanudge[wandb]')."""

    def check(self) -> None:
        """Raise `UserError` for values that make no sense whatever the data; the rest is checked by
        what uses it.
        """
        for name, value in self.to_dict().items():
            check_text(flag(name), value)
        for name, least in _LEAST.items():
            check_count(flag(name), getattr(self, name), least)
        check_ways(self.ways, self.head)
        if not 0 <= self.lam < math.inf:
            raise UserError(
                f"--lam {self.lam} is not a positive number. It ties a task to the initialisation;"
                " the paper uses 2. maml, fomaml and reptile also take 0."
            )
        for name in ("lam_lr", "rate_lr", "clip"):
            value, what = getattr(self, name), "norm" if name == "clip" else "learning rate"
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{flag(name)} {value} is not a positive number. It is a {what}.")
        owners = ("lam_lr", "learn_lam", "λ is"), ("rate_lr", "learn_lr", "inner rates are")
        for own, learn, what in owners:
            if getattr(self, own) is not None and getattr(self, learn) == "none":
                raise UserError(
                    f"{flag(own)} {getattr(self, own)} was given, but {what} not learned. Add"
                    f" {flag(learn)} tensor, or leave {flag(own)} out."
                )
        if self.augment_query and self.augment == "none":
            raise UserError("--augment-query needs --augment. Say how tasks are to be changed.")
        if not self.patterns:
            why = f"--adapt {self.adapt!r} names no parameters."
            raise UserError(f"{why} Use '*' for all, or a pattern of names such as 'head.*'.")
        if self.support is not None and not (
            0 < self.support < 1 or (1 <= self.support < math.inf and self.support % 1 == 0)
        ):
            raise UserError(
                f"--support {self.support:g} is neither a fraction of a task's rows (0.5) nor a"
                " number of them (5)."
            )
        if self.iterations * (self.tasks or 16) >= 1 << 63:
            raise UserError(
                f"--iterations {self.iterations} of --tasks {self.tasks} are more tasks than can be"
                " numbered: 2**63. Use fewer."
            )
        if self.precision != "fp32" and self.dtype == "float64":
            both = f"--precision {self.precision} and --dtype float64"
            raise UserError(f"{both} contradict each other. Leave one of them out.")

    @property
    def patterns(self) -> list[str]:
        """The patterns of `adapt`, one by one."""
        return [pattern.strip() for pattern in self.adapt.split(",") if pattern.strip()]

    @property
    def sinks(self) -> list[str]:
        """The packages that metrics go to as well."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """A JSON document that `from_json` turns back into an equal configuration, with this
        version and a seal.
        """
        return seal({**self.to_dict(), "version": __version__}, indent=2)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, where: str = "the configuration"
    ) -> TrainConfig:
        """From `to_dict`'s result; fields left out have their defaults. Anything unknown or of the
        wrong type is refused.
        """
        return cls(**settings(values, _kinds(), where))

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "the configuration") -> TrainConfig:
        """From `to_json`'s result, of this version or an earlier one; `where` names the file in
        error messages.
        """
        values = parsed(text, where)
        recorded = {key: value for key, value in values.items() if key not in (SEAL, "version")}
        config = cls.from_dict(upgrade(recorded, values.get("version"), where=where), where=where)
        if SEAL in values and not is_intact(values, indent=2):
            raise ChangedError(
                f"{where} was changed after it was written: it does not match its own {SEAL}. Put"
                " back what was there, or, "
                f'if the change is meant, remove its line "{SEAL}".',
                config,
            )
        return config

    @classmethod
    def read(cls, file: Path) -> TrainConfig:
        """From a file that holds `to_json`'s result."""
        return cls.from_json(read_text(file, limit=1 << 20), where=str(file))

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """The fields in which two configurations differ, with both values."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


_LEAST = {
    "ways": 1, "shots": 1, "queries": 1, "iterations": 1, "tasks": 0, "seed": 0, "chunk": 1,
    "shard": 1, "metrics_every": 1, "patience": 0,
    "eval_every": 0, "eval_tasks": 1, "test_tasks": 0, "checkpoint_every": 1,
}  # fmt: skip


@functools.cache
def _kinds() -> dict[str, Any]:
    """The types of the fields."""
    return get_type_hints(TrainConfig)


def flag(name: str) -> str:
    """A field as the command line spells it."""
    return "--" + name.replace("_", "-")


def own_code(model: str) -> tuple[str, str, str] | None:
    """Module, attribute and options of a model written module:attribute:options; None for one of
    ours.

    Example:
        >>> own_code("my_nets:Net:width=64"), own_code("conv4:channels=32")
        (('my_nets', 'Net', 'width=64'), None)
    """
    module, attribute, options = [*model.split(":", 2), "", ""][:3]
    return (module, attribute, options) if attribute and "=" not in attribute else None
