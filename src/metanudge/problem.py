"""The two-level problem: the user's model and loss, and the proximal term that ties a task to the
meta-parameters.

    outer:  F_i(θ) = f_i(φ*_i(θ))                                   (paper, eq. 6)
    inner:  φ*_i(θ) = argmin_φ  f̂_i(φ) + ½‖φ − θ‖²_λ                (paper, eq. 7)
    nudged: φ*_{i,ν}(θ) = argmin_φ  f̂_i(φ) + ½‖φ − θ‖²_λ + ν p(φ)   (paper, eq. 11)

Parameters that do not adapt are shared by all tasks: f̂ and f depend on them too, and they are
meta-learned with the rest. The nudge p is the query loss f_i itself (`"loss"`, the paper) or its
linearisation ⟨∇f_i(φ_0), φ⟩ at the un-nudged solution (`"gradient"`); both give the same derivative
at ν = 0. The engines evaluate it; this file says what is evaluated.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from metanudge.names import some
from metanudge.params import Params, wide
from metanudge.proximal import (
    Diagonal,
    LogStiffness,
    Proximal,
    Regulariser,
    Stiffness,
    proximal_term,
)
from metanudge.spread import Spread, local
from metanudge.task import Batch, TaskBatch, describe, kind_of, tensors

Nudge = Literal["loss", "gradient"]
Loss = Callable[..., Tensor]
_NAMES_OF_MODELS = ("model", "module", "net", "network")


def takes_model(loss: Loss) -> bool:
    """Whether `loss` has the form `loss(model, batch)` rather than `loss(output, target)`.

    It does when its first parameter is named `model`, `module`, `net` or `network`, or is annotated
    as an `nn.Module`.

    Example:
        >>> (takes_model(lambda model, batch: model(**batch).loss),
        ...     takes_model(nn.functional.cross_entropy))
        (True, False)
    """
    first = _first_parameter(loss)
    if first is None:
        return False
    kinds = (first.annotation, *get_args(first.annotation))
    annotated = any(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
    return (
        first.name in _NAMES_OF_MODELS
        or annotated
        or first.annotation in ("nn.Module", "torch.nn.Module", "Module")
    )


def _first_parameter(loss: Loss) -> inspect.Parameter | None:
    # annotations may be text, of names that are not known at run time
    for evaluate in (True, False):
        try:
            return next(iter(inspect.signature(loss, eval_str=evaluate).parameters.values()), None)
        except Exception:
            continue
    return None


_RULE = (
    "its first parameter must be named 'model' (or module, net, network) or be annotated as an"
    " nn.Module; all else is called as loss(output, target)."
)


class LossError(ValueError):
    """What the loss returns is no loss."""


class Objective(nn.Module):
    """The user's model and loss as one module: a batch in, a scalar out. It shares the model and
    changes nothing in it.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.takes_model = takes_model(loss)

    def output(self, batch: Batch) -> tuple[Any, Any]:
        """What the model says about a batch `(inputs, targets)`, and the targets."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            kind = type(batch).__name__
            raise TypeError(
                f"loss(output, target) needs batches of the form (inputs, targets), got {kind} with"
                f" {describe(batch)}. For other batches give a function loss(model, batch): {_RULE}"
            )
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return self.model(**inputs), target
        if isinstance(inputs, (tuple, list)):
            return self.model(*inputs), target
        return self.model(inputs), target

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of a batch; the accuracy is NaN where the batch is no
        classification.
        """
        if not self.takes_model:
            return self.judge(*self.output(batch))
        loss = self.loss_alone(batch)
        return loss, loss.detach().new_full((), math.nan)

    def loss_alone(self, batch: Batch) -> Tensor:
        """The loss of a batch, without the accuracy."""
        if self.takes_model:
            return _checked(self.loss(self.model, batch))
        return self.judge_loss(*self.output(batch))

    def judge(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of the model's output on the targets."""
        loss, accuracy = self.judge_loss(output, target), classification_accuracy(output, target)
        return loss, accuracy if accuracy is not None else loss.detach().new_full((), math.nan)

    def judge_loss(self, output: Any, target: Any) -> Tensor:
        """Loss of the model's output on the targets."""
        try:
            return _checked(self.loss(output, target))
        except TypeError as error:
            if not str(error).startswith("'Tensor' object is not callable"):
                raise
            raise LossError(
                "The loss calls its first argument as if it were the model. To get the model:"
                f" {_RULE}"
            ) from error


def _checked(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    raise LossError(
        f"The loss must be a scalar tensor, got {kind_of(loss)}. Reduce it over the examples (mean"
        " is usual), e.g. reduction='mean' in torch's losses."
    )


def classification_accuracy(output: Any, target: Any) -> Tensor | None:
    """Share of examples whose largest output is the target's class; None unless logits `(n,
    classes)` meet labels `(n,)`.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    integer = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if output.ndim != 2 or target.ndim != 1 or not integer or output.shape[1] < 2:
        return None
    return (output.detach().argmax(1) == target).to(output.dtype).mean()


class TwoLevels(Protocol):
    """What estimators know of a two-level problem, be it a model with tasks or any two functions
    (`bilevel`).
    """

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """What adapts: φ at the start of a solve."""

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """What both levels depend on directly, does not adapt, and gets a meta-gradient."""

    twice_differentiable: bool
    """Whether nothing is known against second derivatives of the inner loss."""

    learns_theta: bool
    """Whether θ, where φ starts and what the proximal term ties it to, gets a meta-gradient too."""

    proximal: Proximal
    """The term that ties φ to θ."""

    device: torch.device
    """Where the tensors lie."""

    theta_dtypes: dict[str, torch.dtype]
    """Dtype in which displacements are kept."""

    smallest_lam: float | Tensor
    """The strong convexity that is known; NaN where none is."""

    def zero_gradient(self) -> Params:
        """A meta-gradient of zero."""


class Problem:
    """A model, a loss and a proximal term, with the names and tensors the engines need.

    Args:
        objective: model and loss.
        lam: the proximal term, or λ > 0 of ½‖φ − θ‖²_λ: a number, one number per tensor (mapping
            from parameter name), one per parameter (mapping from name to a tensor of the
            parameter's shape), or an operator. Names left out of a mapping are an error.
        adapt: patterns of the names of parameters that adapt; all by default.
        regulariser: R(φ, θ) in place of the term that `lam` describes.
        zero_lam: λ may be 0 as well.

    Attributes:
        parameters: those that adapt.
        shared: those that are meta-learned but do not adapt.
        meta_parameters: everything that gets a meta-gradient: the two above in the model's order,
            then what the proximal term learns.
        smallest_lam: the strong convexity that the proximal term guarantees by itself: the smallest
            λ.
        theta_dtypes: those of displacements: the parameter's own, float32 at least.
        spread: over which ranks the model is spread; None where all of it is here.
    """

    learns_theta = True

    def __init__(
        self,
        objective: Objective,
        lam: Stiffness | LogStiffness | Proximal,
        *,
        adapt: str | Sequence[str] | None = None,
        regulariser: Regulariser | None = None,
        zero_lam: bool = False,
    ) -> None:
        self.objective = objective
        self.spread = Spread.of(objective.model)
        self.twice_differentiable = self.spread is None  # autograd sees copies, not our parts
        trainable = {n: p for n, p in objective.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "No parameter of the model requires grad, so there is nothing to meta-learn. "
                "Set requires_grad=True on the parameters that should adapt."
            )
        devices = {p.device for p in trainable.values()}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"The trainable parameters lie on several devices ({names}). Move the model to one"
                " device (device_map={'': 0}), or shard it over processes, one for each GPU:"
                " fully_shard(model) of torch.distributed.fsdp, under torchrun."
            )
        (self.device,) = devices
        adapting = names_that_adapt(adapt, trainable, dict(objective.model.named_parameters()))
        self.parameters = {n: p for n, p in trainable.items() if n in adapting}
        self.shared = {n: p for n, p in trainable.items() if n not in adapting}
        coarse = [n for n, p in self.parameters.items() if p.dtype.itemsize < 2]
        if coarse:
            raise TypeError(
                f"{some(coarse, 3)} cannot adapt: numbers of 8 bits"
                f" ({self.parameters[coarse[0]].dtype}) cannot move a little. Freeze it with"
                " requires_grad_(False) and adapt others (LoRA), or keep it in bfloat16 or float32."
            )
        self.proximal = (
            lam
            if isinstance(lam, Proximal)
            else proximal_term(lam, self.parameters, regulariser, zero=zero_lam)
        )
        self.smallest_lam = self.proximal.smallest_curvature
        self.theta_dtypes = {n: wide(p.dtype) for n, p in self.parameters.items()}
        self.meta_parameters: dict[str, nn.Parameter] = {**trainable, **self.proximal.learned}

    @property
    def theta(self) -> Params:
        """The meta-parameters that adapt, detached (no copy)."""
        return {name: p.detach() for name, p in self.parameters.items()}

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The model and all its parts."""
        return list(self.objective.model.modules())

    @cached_property
    def parts(self) -> frozenset[int]:
        """Identities of the modules of model and loss that have tensors, and of these tensors."""
        modules = [
            (m, [*m._parameters.values(), *m._buffers.values()]) for m in self.objective.modules()
        ]
        return frozenset(
            id(part)
            for module, tensors in modules
            if tensors
            for part in (module, *tensors)
            if part is not None
        )

    @property
    def lam(self) -> Params:
        """λ of each parameter that adapts, 0-d or of its shape; a `TypeError` where the proximal
        term is no ½‖φ − θ‖²_λ.
        """
        if not isinstance(self.proximal, Diagonal):
            raise TypeError(
                f"The proximal term is {type(self.proximal).__name__}, which has no λ per"
                " parameter."
            )
        return self.proximal.lam

    def zero_gradient(self) -> Params:
        """A meta-gradient of zero, in float32 at least."""
        meta = self.meta_parameters
        return {n: torch.zeros_like(local(p), dtype=wide(p.dtype)) for n, p in meta.items()}

    def check_tasks(self, batch: TaskBatch) -> None:
        """Raise a `ValueError` where the tasks' device or floating dtype does not fit the model."""
        dtypes = {p.dtype for p in (*self.parameters.values(), *self.shared.values())}
        autocast = torch.is_autocast_enabled(self.device.type)
        for stack in batch.stacks:
            for what, data in (("support", stack.support), ("query", stack.query)):
                for tensor in tensors(data):
                    if tensor.device != self.device:
                        raise ValueError(
                            f"The {what} data lie on {tensor.device} but the model on"
                            f" {self.device}. Move them together: tasks.to({str(self.device)!r}) or"
                            f" learner.to({str(tensor.device)!r})."
                        )
                    if tensor.is_floating_point() and tensor.dtype not in dtypes and not autocast:
                        wanted = ", ".join(sorted(map(str, dtypes)))
                        raise ValueError(
                            f"The {what} data hold a {tensor.dtype} tensor of shape"
                            f" {tuple(tensor.shape)} but the model's parameters are {wanted}. Cast"
                            f" one of them: tasks.to({wanted}) or learner.to({tensor.dtype})."
                        )


def names_that_adapt(
    patterns: str | Sequence[str] | None,
    trainable: Mapping[str, Any],
    everything: Mapping[str, Any],
) -> set[str]:
    """The names that match one of the patterns (as in a shell: `*`, `?`, `[…]`); all for None. A
    pattern must match something.

    Example:
        >>> names = dict.fromkeys(["body.weight", "body.bias", "head.weight", "head.bias"])
        >>> sorted(names_that_adapt("head.*", names, names))
        ['head.bias', 'head.weight']
    """
    if patterns is None:
        return set(trainable)
    several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    given: list[Any] = list(patterns) if several else [patterns]
    if not given or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            f"adapt must be a pattern of parameter names or a list of them, got {patterns!r}. Leave"
            " it out to adapt all."
        )
    found: set[str] = set()
    for pattern in given:
        matching = {name for name in trainable if fnmatch.fnmatchcase(name, pattern)}
        if not matching:
            frozen = [name for name in everything if fnmatch.fnmatchcase(name, pattern)]
            only = f", only frozen ones ({some(frozen, 12)}). Set requires_grad=True on them."
            detail = only if frozen else f".{_near(pattern, trainable)}"
            raise UnmatchedPattern(pattern, f"matches no trainable parameter{detail}")
        found |= matching
    return found


class UnmatchedPattern(ValueError):
    """A pattern of `adapt` that fits no parameter.

    Attributes:
        pattern: as it was given.
        problem: what is wrong with it.
    """

    def __init__(self, pattern: str, problem: str) -> None:
        super().__init__(f"adapt={pattern!r} {problem}")
        self.pattern, self.problem = pattern, problem


def _near(pattern: str, names: Mapping[str, Any]) -> str:
    """Names that a pattern which matches nothing may have meant; all of them (or the first few)
    where none is close.
    """
    whole = list(names)
    modules = [name.rpartition(".")[0] for name in whole]
    stem = pattern.rstrip("*?.")
    close = {
        name
        for name, module in zip(whole, modules, strict=True)
        if difflib.get_close_matches(stem, [name, module, *module.split(".")], n=1, cutoff=0.5)
        or (stem and stem.lower() in name.lower())
    }
    if close:
        return f" Near matches: {some([name for name in whole if name in close], 12)}."
    return f" The trainable parameters are {some(whole, 12)}."
