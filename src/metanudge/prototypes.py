"""`Prototypes`: a last layer that is made from the support set, for any number of classes."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

ABSENT = -1e9  # the logit of a class without support examples; finite, so that 0 · it is 0


class Prototypes(nn.Module):
    """Any network with a head made from the support set, so that tasks may have any number of
    classes (Proto-MAML: Triantafillou et al. 2020, *Meta-Dataset*, section 3).

    The logit of class c for features h is 2s⟨h, p_c⟩ − s‖p_c‖² + ⟨h, w_c⟩ + b_c: a linear layer
    whose weights start at the class means p_c of the support set's features, at the present
    parameters, times a learned scale s; w and b start at zero. At w = b = 0 the class with the
    nearest mean wins. Classes without support examples get a logit of −10⁹.

    Batches carry the support set: those of `source.with_support()`, and what
    `metanudge.tasks.with_support` makes of others. `metanudge train --head prototypes` leaves w and
    b at zero: labels are given at random, and what is learned of them is noise.

    Args:
        network: its last linear layer, `head`, is taken off; where it has none it makes features.
        width: numbers per example that it then makes; None takes them from `head`.
        most: largest number of classes.

    Example:
        >>> import metanudge as mn
        >>> from metanudge.models import MLP
        >>> from metanudge.tasks import Labelled
        >>> x, y = torch.randn(400, 8), torch.arange(400) % 40
        >>> learner = mn.MetaLearner(Prototypes(MLP(8, 5)), nn.functional.cross_entropy)
        >>> five, three = (Labelled(x, y, ways=n, queries=3).with_support() for n in (5, 3))
        >>> stats = learner.backward(five.batch(range(4)))
        >>> len(learner.evaluate(three.batch(range(9), "test")).accuracy)
        9
    """

    fixed_start = ("weight", "bias")

    def __init__(self, network: nn.Module, width: int | None = None, *, most: int = 64) -> None:
        super().__init__()
        if most < 2:
            raise ValueError(f"most={most} classes leave nothing to tell apart. Use 2 or more.")
        head = getattr(network, "head", None)
        if width is None:
            if not isinstance(head, nn.Linear):
                raise ValueError(
                    f"{type(network).__name__} has no linear layer called head, so how many numbers"
                    " its features have is not known. Give width, and a network that makes them."
                )
            width = head.in_features
        if head is not None:
            network.head = nn.Identity()
        like = next(iter(network.parameters()), torch.empty(0))
        self.features, self.most = network, most
        self.log_scale = nn.Parameter(like.new_tensor(-math.log(width)))
        self.weight = nn.Parameter(like.new_zeros(most, width))
        self.bias = nn.Parameter(like.new_zeros(most))

    def forward(self, x_support: Any, y_support: Tensor, x: Any = None) -> Tensor:
        """Logits `(n, most)` of the inputs `x`; of the support set itself where it is None.

        Args:
            x_support: inputs of the support set; a mapping is passed on as keyword arguments.
            y_support: class numbers below `most`.
            x: inputs of the same kind.
        """
        known = self._features(x_support)
        weight, bias, present = self._head(known, y_support)
        logits = (known if x is None else self._features(x)) @ weight.mT + bias
        return torch.where(present, logits, ABSENT)

    def fixed(self, x_support: Any, y_support: Tensor, ways: int) -> nn.Module:
        """The network with an ordinary linear layer for classes 0 … ways−1 in the place of this
        one: inputs in, logits `(n, ways)` out. It shares the features.
        """
        if not 0 < ways <= self.most:
            raise ValueError(f"ways={ways} is not from 1 to most={self.most}.")
        with torch.no_grad():
            weight, bias, _ = self._head(self._features(x_support), y_support)
            like = {"device": weight.device, "dtype": weight.dtype}
            head: nn.Linear = nn.utils.skip_init(nn.Linear, weight.shape[1], ways, **like)
            head.weight.copy_(weight[:ways])
            head.bias.copy_(bias[:ways])
        if not hasattr(self.features, "head"):
            return nn.Sequential(self.features, head).train(self.training)
        network = copy.copy(self.features)
        network._modules = dict(network._modules)
        network.head = head.train(self.training)
        return network

    def _features(self, x: Any) -> Tensor:
        found: Tensor = self.features(**x) if isinstance(x, dict) else self.features(x)
        return found

    def _head(self, known: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, biases and which classes there are."""
        # not one_hot, which looks at the labels' values and so does not stack
        members = (labels[:, None] == torch.arange(self.most, device=labels.device)).to(known)
        counts = members.sum(0)
        means = members.mT @ known / counts.clamp(min=1)[:, None]
        scale = self.log_scale.exp()
        weight = 2 * scale * means + self.weight
        return weight, self.bias - scale * means.square().sum(1), counts > 0
