"""The networks of the paper's experiments, and `build` to get one by name.

BatchNorm layers keep torch's defaults: batch statistics in training mode, running statistics in
evaluation mode. Few-shot work usually stays in training mode (transductive), as the MAML code does.
Every network has its last linear layer as `head`, for methods that adapt the head and share the
rest.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metanudge.names import check_known
from metanudge.prototypes import Prototypes as Prototypes

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


class AddChannel(nn.Module):
    """`(n, length)` → `(n, 1, length)`; inputs that have a channel axis pass."""

    per_example = True  # what it does to an example does not depend on the others

    def forward(self, x: Tensor) -> Tensor:
        """Inputs with a channel axis."""
        return x.unsqueeze(1) if x.ndim == 2 else x


class Conv1D(nn.Sequential):
    """Three convolutions for MNIST-1D: kernel 3, each with BatchNorm, ReLU and max-pooling by 2,
    then a linear layer.

    Args:
        ways: number of outputs.
        channels: filters of every convolution.
        length: numbers per example, at least 8.

    Example:
        >>> Conv1D(ways=3)(torch.zeros(15, 40)).shape
        torch.Size([15, 3])
    """

    def __init__(self, ways: int = 3, *, channels: int = 16, length: int = 40) -> None:
        if length < 8:
            raise ValueError(
                f"length={length} is too short for three poolings by 2. Use 8 or more."
            )
        blocks = _blocks(nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, [1, *[channels] * 3])
        features = nn.Sequential(AddChannel(), *blocks, nn.Flatten())
        super().__init__(_parts(features, nn.Linear(channels * (length // 8), ways)))


class Conv4(nn.Sequential):
    """The four-layer backbone of the MAML literature: 3×3 convolutions with BatchNorm, ReLU and 2×2
    max-pooling.

    Args:
        ways: number of outputs.
        channels: filters of every convolution.
        image_size: side of square images, or (height, width); at least 16.
        in_channels: 1 for grey images, 3 for colour.

    Example:
        >>> Conv4(ways=5)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        ways: int = 5,
        *,
        channels: int = 64,
        image_size: int | tuple[int, int] = 28,
        in_channels: int = 1,
    ) -> None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        if min(height, width) < 16:
            raise ValueError(
                f"image_size={image_size} is too small for four poolings by 2. Use 16 or more."
            )
        blocks = _blocks(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, [in_channels, *[channels] * 4])
        features = nn.Sequential(*blocks, nn.Flatten())
        super().__init__(
            _parts(features, nn.Linear(channels * (height // 16) * (width // 16), ways))
        )


class MLP(nn.Sequential):
    """A fully connected network; by default the one of the sinusoid experiment (Finn et al. 2017).

    Args:
        in_features: numbers per example; inputs of more axes are flattened.
        out_features: number of outputs.
        hidden: width of each hidden layer.
        activation: a name in `ACTIVATIONS`; smooth ones (tanh, softplus, …) suit finite differences
            better than relu.

    Example:
        >>> MLP(1, 1, hidden=(40, 40))(torch.zeros(10, 1)).shape
        torch.Size([10, 1])
    """

    def __init__(
        self,
        in_features: int = 1,
        out_features: int = 1,
        *,
        hidden: Sequence[int] = (40, 40),
        activation: str = "relu",
    ) -> None:
        check_known("activation", activation, list(ACTIVATIONS))
        make = ACTIVATIONS[activation]
        widths = [in_features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for narrow, wide in pairwise(widths):
            layers += [nn.Linear(narrow, wide), make()]
        super().__init__(_parts(nn.Sequential(*layers), nn.Linear(widths[-1], out_features)))


class TableNet(nn.Module):
    """A network for rows of a table: a linear map and a hidden layer side by side, added up, then a
    linear layer.

    What depends on the inputs linearly, as much in tables does, needs no hidden unit.

    Args:
        in_features: numbers per example, standardised.
        out_features: number of outputs.
        width: of the hidden layer and of the features.
        activation: a name in `ACTIVATIONS`.

    Example:
        >>> TableNet(6, 1)(torch.zeros(10, 6)).shape
        torch.Size([10, 1])
    """

    def __init__(
        self,
        in_features: int = 1,
        out_features: int = 1,
        *,
        width: int = 40,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_known("activation", activation, list(ACTIVATIONS))
        make = ACTIVATIONS[activation]
        self.linear = nn.Linear(in_features, width)
        self.hidden = nn.Sequential(nn.Linear(in_features, width), make(), nn.Linear(width, width))
        self.head = nn.Linear(width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs: `(n, in_features)` → `(n, out_features)`."""
        x = x.flatten(1)
        outputs: Tensor = self.head(self.linear(x) + self.hidden(x))
        return outputs


class TransformerBlock(nn.Module):
    """One standard Transformer block (Vaswani et al. 2017) on a sequence of vectors, then a linear
    layer on the mean.

    Args:
        ways: number of outputs.
        d_model: size of the vectors.
        heads: attention heads; must divide d_model.
        hidden: width of the feed-forward network.
        length: longest sequence.
        attention: "math" works with every estimator. "fused" lets torch choose a flash kernel,
            which needs far less memory on long sequences, but has neither second derivatives (MAML,
            IMAML) nor forward mode (tangent), and on the CPU no batching rule for the stacked
            engine.

    Example:
        >>> TransformerBlock(d_model=64, length=32, ways=5)(torch.zeros(2, 32, 64)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        ways: int = 5,
        *,
        d_model: int = 128,
        heads: int = 8,
        hidden: int = 512,
        length: int = 128,
        attention: Literal["math", "fused"] = "math",
    ) -> None:
        super().__init__()
        if d_model % heads:
            raise ValueError(
                f"heads={heads} do not divide d_model={d_model}. Each head works on d_model/heads"
                " numbers."
            )
        self.heads = heads
        check_known("attention", attention, ("math", "fused"))
        self.attention = attention
        self.positions = nn.Parameter(0.02 * torch.randn(length, d_model))
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.project = nn.Linear(d_model, d_model)
        self.attention_norm = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, hidden), nn.ReLU(), nn.Linear(hidden, d_model)
        )
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, ways)

    def forward(self, x: Tensor) -> Tensor:
        """Logits: `(n, length, d_model)` → `(n, ways)`."""
        if x.shape[1] > len(self.positions):
            raise ValueError(
                f"The sequence has {x.shape[1]} vectors, but the model was built for"
                f" length={len(self.positions)}. Build it with length={x.shape[1]} or more."
            )
        x = x + self.positions[: x.shape[1]]
        x = self.attention_norm(x + self._attend(x))
        x = self.feed_forward_norm(x + self.feed_forward(x))
        logits: Tensor = self.head(x.mean(dim=1))
        return logits

    def _attend(self, x: Tensor) -> Tensor:
        # (n, length, 3·d_model) → three of (n, heads, length, d_model/heads)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH) if self.attention == "math" else nullcontext():
            mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return projected


class FeatureNet(nn.Module):
    """A linear layer on features that are good already, such as a frozen encoder's; what is learned
    beside it is one factor for each.

    The linear layer begins at 0, so that the untrained network adapts to a task as a classifier by
    class means does; `metanudge train` leaves it there (`fixed_start`), since labels are given at
    random and what is learned of them is noise. Wider networks fit the training classes and lose on
    others.

    Args:
        in_features: numbers per example, standardised.
        ways: number of outputs.
        gain: length of an example after scaling.

    Example:
        >>> FeatureNet(384, ways=3)(torch.zeros(10, 384)).shape
        torch.Size([10, 3])
    """

    fixed_start = ("head.",)  # names whose initialisation is not learned begin so

    def __init__(self, in_features: int = 384, ways: int = 5, *, gain: float = 6.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(in_features))
        self.gain = gain / in_features**0.5
        self.head = nn.Linear(in_features, ways)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits: `(n, in_features)` → `(n, ways)`."""
        logits: Tensor = self.head(x.flatten(1) * self.scale * self.gain)
        return logits


class TextNet(nn.Module):
    """Tokens embedded, two convolutions over neighbours, the mean and the largest over a text, then
    a linear layer.

    Args:
        ways: number of outputs.
        vocabulary: token numbers that there are (257: bytes and padding).
        width: of the embedding and of every convolution.

    Example:
        >>> TextNet(ways=3)(torch.ones(4, 20, dtype=torch.long)).shape
        torch.Size([4, 3])
    """

    def __init__(self, ways: int = 5, *, vocabulary: int = 257, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.near = nn.Conv1d(width, width, kernel_size=5, padding=2)
        self.far = nn.Conv1d(width, width, kernel_size=5, padding=2)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, ways)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits: token numbers `(n, length)` and their mask → `(n, ways)`."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        there = mask[:, None, :].to(self.embedding.weight.dtype)
        x = self.embedding(input_ids).transpose(1, 2) * there
        x = F.gelu(self.near(x)) * there  # what stands behind a text must not reach into it
        x = F.gelu(self.far(x)) * there
        mean = x.sum(2) / there.sum(2).clamp(min=1)
        largest = (x + (there - 1) * 1e4).amax(2)
        logits: Tensor = self.head(self.norm(torch.cat([mean, largest], 1)))
        return logits


def _blocks(convolution: Any, norm: Any, pool: Any, channels: Sequence[int]) -> Iterator[nn.Module]:
    """Convolutions from each number of channels to the next, with what follows them."""
    for before, after in pairwise(channels):
        yield convolution(before, after, kernel_size=3, padding=1)
        yield from (norm(after), nn.ReLU(), pool(2))


def _parts(features: nn.Module, head: nn.Module) -> OrderedDict[str, nn.Module]:
    return OrderedDict(features=features, head=head)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "conv1d": Conv1D,
    "conv4": Conv4,
    "features": FeatureNet,
    "mlp": MLP,
    "table": TableNet,
    "text": TextNet,
    "transformer": TransformerBlock,
}


def build(name: str, **options: Any) -> nn.Module:
    """A model by its name in `MODELS`, with the options of its class.

    Example:
        >>> build("conv4", ways=20)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 20])
    """
    check_known("model", name, list(MODELS))
    make = MODELS[name]
    accepted = inspect.signature(make).parameters
    for option in options:
        if option not in accepted:
            raise TypeError(
                f"Model {name!r} has no option {option!r}. Its options are {', '.join(accepted)}."
            )
    return make(**options)
