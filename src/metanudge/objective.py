"""The user's model and loss as one: a batch in, a loss and an accuracy out, whatever form of loss,
batch and output they use.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, get_args

import torch
from torch import Tensor, nn

from metanudge.names import some
from metanudge.params import Params, wide
from metanudge.task import Batch, describe, kind_of, map_tensors, tensors

Loss = Callable[..., Any]
Metrics = Mapping[str, Callable[[Any, Any], Any]]
_NAMES_OF_MODELS = ("model", "module", "net", "network")
_IGNORED = -100  # the label that torch and Hugging Face leave out
_PREDICT_THE_NEXT = ("CausalLM", "LMHead", "ConditionalGeneration")  # in names of their classes


def takes_model(loss: Loss) -> bool:
    """Whether `loss` has the form `loss(model, batch)` rather than `loss(output, target)`.

    It does when its first parameter is named `model`, `module`, `net` or `network`, or is annotated
    as an `nn.Module`.

    Example:
        >>> (takes_model(lambda model, batch: model(**batch).loss),
        ...     takes_model(nn.functional.cross_entropy))
        (True, False)
    """
    first = _first_parameter(loss.forward if isinstance(loss, nn.Module) else loss)
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
    """What the loss returns is no loss, or what a metric returns no number."""


def own_loss(model: nn.Module, batch: Batch) -> Any:
    """The output of a model that computes its loss by itself when it is given `labels`, as those of
    Hugging Face do; a batch is a mapping of its arguments, or a pair `(inputs, labels)`.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    inputs, labels = _pair(batch)
    return _called(model, inputs, labels=labels)


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
        """What the model says about a batch (the logits of an output that has them), and the
        targets: of a pair `(inputs, targets)`, or of a mapping with `labels`.
        """
        if isinstance(batch, Mapping) and "labels" in batch:
            output, target = self.model(**batch), batch["labels"]
        else:
            inputs, target = _pair(batch)
            output = _called(self.model, inputs)
        logits = getattr(output, "logits", None)
        return output if logits is None else logits, target

    def forward(
        self, batch: Batch, outputs: list[Any] | None = None
    ) -> tuple[Tensor, Tensor, Params]:
        """Loss and accuracy of a batch, and what else the loss reports; the accuracy is NaN where
        the batch is no classification. The model's output and the targets are left in `outputs`.
        """
        if not self.takes_model:
            output, target = self.output(batch)
            if outputs is not None:
                outputs[:] = output, target
            return self.judge(output, target)
        result = self.loss(self.model, batch)
        output = result[-1] if isinstance(result, tuple) and result else result
        if isinstance(batch, Mapping):
            target = batch.get("labels")
        else:
            target = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        logits = getattr(output, "logits", None)
        if outputs is not None:
            outputs[:] = logits, target
        return self._judged(result, logits, target)

    def loss_alone(self, batch: Batch) -> Tensor:
        """The loss of a batch, without the accuracy."""
        if self.takes_model:
            return _read(self.loss(self.model, batch))[0]
        return self.judge_loss(*self.output(batch))

    def judge(self, output: Any, target: Any) -> tuple[Tensor, Tensor, Params]:
        """As `forward`, of the model's output and the targets."""
        return self._judged(self._result(output, target), output, target)

    def judge_loss(self, output: Any, target: Any) -> Tensor:
        """Loss of the model's output on the targets."""
        return _read(self._result(output, target))[0]

    def _judged(self, result: Any, output: Any, target: Any) -> tuple[Tensor, Tensor, Params]:
        loss, extra = _read(result)
        accuracy = classification_accuracy(output, target, shift=self._predicts_the_next)
        if accuracy is None:
            accuracy = loss.detach().new_full((), math.nan)
        return loss, accuracy, extra

    def _result(self, output: Any, target: Any) -> Any:
        try:
            return self.loss(output, target)
        except (TypeError, AttributeError) as error:
            if str(error).startswith("'Tensor' object is not callable"):
                what = "calls its first argument as if it were the model. To get the model"
            elif str(error).startswith("'Tensor' object has no attribute 'lo"):
                what = "gets the logits of an output that has them. To get all of it"
            else:
                raise
            raise LossError(f"The loss {what}, write loss(model, batch): {_RULE}") from error

    @cached_property
    def _predicts_the_next(self) -> bool:
        """Whether labels are the inputs, each to be told from those before it: a causal language
        model of Hugging Face, by its name.
        """
        for module in self.model.modules():
            if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
                return False
            if any(part in type(module).__name__ for part in _PREDICT_THE_NEXT):
                return True
        return False


def _pair(batch: Batch) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        "loss(output, target) needs batches of the form (inputs, targets), or mappings with"
        f" 'labels', got {type(batch).__name__} with {describe(batch)}. For other batches give a"
        f" function loss(model, batch): {_RULE}"
    )


def _called(model: nn.Module, inputs: Any, **more: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs, **more)
    return model(*inputs, **more) if isinstance(inputs, (tuple, list)) else model(inputs, **more)


def _read(result: Any) -> tuple[Tensor, Params]:
    """The loss in what a loss function or a model has returned, and the numbers in a mapping beside
    it.
    """
    beside: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, beside = result
    elif hasattr(result, "loss"):
        result = result.loss
    if not isinstance(result, Tensor) or result.ndim > 0:
        raise LossError(
            f"The loss must be a scalar tensor, got {kind_of(result)}. Reduce it over the examples"
            " (mean is usual), e.g. reduction='mean' in torch's losses. A model computes a loss of"
            " its own only where the batch has 'labels'."
        )
    numbers = {
        name: torch.as_tensor(value, device=result.device)
        for name, value in beside.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
    }
    return result, {name: value.detach() for name, value in numbers.items()}


def classification_accuracy(output: Any, target: Any, *, shift: bool = False) -> Tensor | None:
    """Share of examples whose largest output is the target's class, those labelled −100 left out;
    None unless logits `(n, classes)` meet labels `(n,)`, or `(n, positions, classes)` meet `(n,
    positions)`. With `shift`, a position's output is for the label of the next one.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0], [4.0, 3.0], [6.0, 5.0]])
        >>> float(classification_accuracy(logits, torch.tensor([1, 1, -100])))
        0.5
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    integer = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    if not integer or output.ndim not in (2, 3) or output.shape[:-1] != target.shape:
        return None
    classes = output.shape[-1]
    # of a square, torch's losses have the classes on the other axis
    if classes < 2 or (output.ndim == 3 and classes == output.shape[1]):
        return None
    if output.ndim == 3 and shift:
        output, target = output[:, :-1], target[:, 1:]
    known = target != _IGNORED
    right = (output.detach().argmax(-1) == target) & known
    return right.to(wide(output.dtype)).sum() / known.sum()


def check_seen(metrics: Metrics, outputs: Sequence[Any]) -> Sequence[Any]:
    """Output and target, where there are metrics to be measured; raises where one is not known."""
    if not metrics:
        return []
    if any(part is None for part in outputs):
        raise LossError(
            f"The metrics {some(list(metrics), 3)} are functions of (output, target), which"
            " loss(model, batch) hides. Return the model's output with logits beside the loss, or"
            " return (loss, {name: number})."
        )
    return outputs


def metrics_of_rows(
    metrics: Metrics, outputs: Sequence[Any], rows: int, reported: Params
) -> Params:
    """What metrics say of each row's output and target, `(rows,)` each; `reported` is what the loss
    says beside them. They are called row by row, so that they may be any code.
    """
    if not metrics:
        return {}
    twice = [name for name in metrics if name in reported]
    if twice:
        raise LossError(
            f"The metric {twice[0]!r} has the name of a number that the loss reports. Rename one."
        )
    found: dict[str, list[float]] = {name: [] for name in metrics}
    for row in range(rows):
        own, target = map_tensors(itemgetter(row), list(outputs))
        for name, metric in metrics.items():
            found[name].append(_number(name, metric, own, target))
    device = tensors(outputs)[0].device
    return {n: torch.tensor(v, dtype=torch.float64, device=device) for n, v in found.items()}


def _number(name: str, metric: Callable[[Any, Any], Any], output: Any, target: Any) -> float:
    try:
        value = metric(output, target)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise LossError(
            f"The metric {name!r} failed on one task's output ({describe(output)}) and targets"
            f" ({describe(target)}): {what}"
        ) from error
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    try:
        assert not isinstance(value, (Tensor, str))
        return float(value)
    except (AssertionError, TypeError, ValueError) as error:
        raise LossError(
            f"The metric {name!r} must return a number, got {kind_of(value)}. Reduce it over the"
            " examples (mean is usual)."
        ) from error
