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
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from metanudge.names import some
from metanudge.objective import Loss, Metrics, Objective
from metanudge.params import Params, wide
from metanudge.proximal import (
    Diagonal,
    LogStiffness,
    Proximal,
    Regulariser,
    Stiffness,
    proximal_term,
)
from metanudge.rates import LearnedRates
from metanudge.spread import Spread, is_spread, local
from metanudge.task import TaskBatch, tensors

Nudge = Literal["loss", "gradient"]


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

    smallest_lam: float | Tensor
    """The strong convexity that is known; NaN where none is."""

    @property
    def rates(self) -> LearnedRates | None:
        """The inner learning rates, where they are learned."""

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
        query_loss: of f, where it is another than that of f̂.
        metrics: functions of (output, target) that are measured with the query loss.
        zero_lam: λ may be 0 as well.
        rates: in place of the solver's learning rate, where it is learned.

    Attributes:
        objective, query_objective: f̂ and f, the same object where they have the same loss.
        parameters: those that adapt.
        shared: those that are meta-learned but do not adapt.
        meta_parameters: everything that gets a meta-gradient: the two above in the model's order,
            then what the proximal term learns, and inner rates.
        smallest_lam: the strong convexity that the proximal term guarantees by itself: the smallest
            λ.

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
        query_loss: Loss | None = None,
        metrics: Metrics | None = None,
        zero_lam: bool = False,
        rates: LearnedRates | None = None,
    ) -> None:
        self.objective = self.query_objective = objective
        if query_loss is not None and query_loss is not objective.loss:
            self.query_objective = Objective(objective.model, query_loss)
        self.metrics = dict(metrics or {})
        _refuse_synchronising_wrappers(objective.model)
        for own in (objective, self.query_objective):
            _refuse_parameters_of_the_loss(own.loss)
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
        nowhere = [n for n, p in trainable.items() if p.is_meta]
        if nowhere:
            raise ValueError(
                f"Parameters that are to be learned ({some(nowhere, 3)}) lie on the meta device:"
                " they have no values yet, or are offloaded and fetched for forward passes only."
                " Load their values, or offload the frozen parameters alone."
            )
        (self.device,) = devices
        adapting = names_that_adapt(adapt, trainable, dict(objective.model.named_parameters()))
        self.parameters = {n: p for n, p in trainable.items() if n in adapting}
        self.shared = {n: p for n, p in trainable.items() if n not in adapting}
        _refuse_coarse(self.parameters)
        self.proximal = (
            lam
            if isinstance(lam, Proximal)
            else proximal_term(lam, self.parameters, regulariser, zero=zero_lam)
        )
        self.smallest_lam = self.proximal.smallest_curvature

        self.rates = rates
        self.meta_parameters: dict[str, nn.Parameter] = {
            **trainable,
            **self.proximal.learned,
            **(rates.learned if rates is not None else {}),
        }

    def objective_of(self, which: str) -> Objective:
        """f̂ (`"support"`) or f (`"query"`)."""
        return self.objective if which == "support" else self.query_objective

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
        """Identities of the modules of model and loss that have tensors, and of those tensors that
        solves or forward passes may write; models may share the others.
        """
        found: set[int] = set()
        for module in (*self.objective.modules(), *self.query_objective.modules()):
            if module._parameters or module._buffers:
                found.add(id(module))
            found |= {
                id(p) for p in module._parameters.values() if p is not None and p.requires_grad
            }
            found |= {
                id(b)
                for name, b in module._buffers.items()
                if b is not None and not is_constant(module, name)
            }
        return frozenset(found)

    @cached_property
    def quantised(self) -> bool:
        """Whether some weights are parameters of a class of their own. Their layers may pack them
        for inference where no gradient is asked for, and give none from then on: those of
        bitsandbytes do in evaluation mode.
        """
        kinds = {type(p) for p in self.objective.model.parameters()} - {nn.Parameter}
        return any(nn.Parameter in kind.__mro__ for kind in kinds)

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

    @property
    def largest_lam(self) -> float | None:
        """The largest λ, where there is one per parameter; waits for the device."""
        known = self.proximal.lam.values() if isinstance(self.proximal, Diagonal) else ()
        return max((float(leaf.max()) for leaf in known if leaf.numel()), default=None)

    def buffers(self) -> Params:
        """Copies of the model's buffers, as `functional_call` on an objective takes them."""
        return {f"model.{n}": b.detach().clone() for n, b in self.objective.model.named_buffers()}

    def zero_gradient(self) -> Params:
        """A meta-gradient of zero, in float32 at least."""
        meta = self.meta_parameters
        return {n: torch.zeros_like(local(p), dtype=wide(p.dtype)) for n, p in meta.items()}

    def check_tasks(self, batch: TaskBatch) -> None:
        """Raise a `ValueError` where the tasks' device or floating dtype does not fit the model."""
        weights = self.objective.model.parameters()  # frozen ones, too: a bfloat16 base with LoRA
        dtypes = {p.dtype for p in weights if p.is_floating_point()}
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


_LARGE = 2**16  # bytes


def is_constant(module: nn.Module, name: str) -> bool:
    """Whether a buffer is large and no running statistic: quantised weights, masks, tables that no
    checkpoint holds.
    """
    buffer = module._buffers[name]
    if buffer is None or buffer.numel() * buffer.element_size() < _LARGE:
        return False
    if buffer.is_meta or buffer.is_inference():  # without values, or without a version
        return False
    return not buffer.is_floating_point() or name in module._non_persistent_buffers_set


# By name: to import FSDP takes a second, and nobody has one wrapped who has not.
_SYNCHRONISING = {"DistributedDataParallel", "FullyShardedDataParallel"}


def _refuse_coarse(parameters: Mapping[str, Tensor]) -> None:
    coarse = [name for name, parameter in parameters.items() if _is_coarse(parameter)]
    if not coarse:
        return
    first = parameters[coarse[0]]
    kind = first.dtype if first.dtype.itemsize < 2 else type(first.data).__name__
    raise TypeError(
        f"{some(coarse, 3)} cannot adapt: numbers of 8 bits or fewer ({kind}) cannot move a little."
        " Freeze it with requires_grad_(False) and adapt others (LoRA), or keep it in bfloat16 or"
        " float32."
    )


def _is_coarse(parameter: Tensor) -> bool:
    """Whether 16 bits an entry are nowhere kept: 8-bit numbers, and quantised tensors, which call
    themselves by the type that they compute in.
    """
    size, wrapper = parameter.numel(), cast(Any, parameter)
    if is_spread(parameter) or not is_traceable_wrapper_subclass(wrapper):
        return parameter.dtype.itemsize < 2
    parts = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
    return not any(
        t.is_floating_point() and t.dtype.itemsize > 1 and t.numel() == size for t in parts
    )


def _refuse_synchronising_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        found = _SYNCHRONISING & {kind.__name__ for kind in type(module).__mro__}
        if found:
            raise TypeError(
                f"The model {'' if not name else repr(name) + ' '}is wrapped in {found.pop()},"
                " which averages the gradients of the inner steps over the ranks, or none at all."
                " Wrap the learner instead: DDP(learner), with learner = mn.MetaLearner(model, ...)"
                " and DDP = torch.nn.parallel.DistributedDataParallel."
            )


def _refuse_parameters_of_the_loss(loss: Any) -> None:
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    learnable = [name for name, parameter in own if parameter.requires_grad]
    if learnable:
        raise ValueError(
            f"The loss ({type(loss).__name__}) has parameters that require grad"
            f" ({some(learnable, 3)}), which would never be learned: only the model's are. Make"
            " them part of the model and write loss(model, batch), with adapt= for what adapts, or"
            " freeze them: loss.requires_grad_(False)."
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
            only = f", only frozen ones ({some(frozen, 12)}). Set requires_grad=True on them; whole"
            only += " numbers cannot adapt."
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
