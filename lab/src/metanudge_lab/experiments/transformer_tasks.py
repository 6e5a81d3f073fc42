"""What the Transformer learns from: Markov chains that share structure; and the network, a small
GPT.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metanudge.task import Batch
from metanudge.tasks import Episodes
from metanudge.tasks.draws import Keys, fork, normal, root_key, uniform
from metanudge.tasks.episodes import Split, Stream

BASES = 6  # chains that every task mixes
SHIFTS = 8  # ways to rename the symbols
SHARPNESS = 2.5  # of the base chains' transitions: the deviation of their logits


class MarkovChains(Episodes):
    """Predict the next symbol of a Markov chain, in a few sequences of it.

    A task mixes the same six chains with weights of its own and then renames all symbols by a
    cyclic shift. The chains are the same whatever the seed, which is that of the stream of tasks.
    Inputs and targets are numbers of symbols, `(sequences, length)` each.

    Args:
        symbols: of the alphabet.
        length: symbols of a sequence that are predicted, each from those before it.
        sequences: in the support and in the query set of a task.
        stream: seed, device and dtype; see `Episodes`.

    Example:
        >>> x, y = MarkovChains(symbols=16, length=4, sequences=3).task(0).support
        >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
        (torch.Size([3, 4]), True)
    """

    kind: ClassVar[Literal["classification", "regression"]] = "classification"

    def __init__(
        self, *, symbols: int = 32, length: int = 32, sequences: int = 8, **stream: Unpack[Stream]
    ) -> None:
        super().__init__(ways=1, shots=sequences, queries=sequences, **stream)
        self.symbols, self.length = symbols, length

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sequence."""
        return (self.length,)

    def transitions(self, keys: Keys) -> NDArray[np.float64]:
        """The probabilities of the next symbol, `(num_tasks, symbols, symbols)`."""
        weights = _softmax(2 * normal(fork(keys, np.array([0])), BASES))
        shift = (uniform(fork(keys, np.array([1])), 1)[:, 0] * SHIFTS).astype(np.int64)
        mixed = np.einsum("nm,mij->nij", weights, _bases(self.symbols))
        renamed = (np.arange(self.symbols) + shift[:, None]) % self.symbols
        rows = np.arange(len(keys))[:, None, None]
        return mixed[rows, renamed[:, :, None], renamed[:, None, :]]

    def draw(self, keys: Keys, split: Split) -> tuple[Batch, Batch]:
        """Sequences of a chain for each task: every symbol, and the one after it."""
        upto = self.transitions(keys).cumsum(-1)[..., :-1]  # the last would be 1, but for rounding
        places = fork(keys[:, None], np.arange(2, 2 + self.shots + self.queries))
        chance = uniform(places, self.length + 1)  # (num_tasks, sequences, length + 1)
        rows = np.arange(len(keys))[:, None]
        found = [(chance[..., 0] * self.symbols).astype(np.int64)]
        for place in range(1, self.length + 1):
            found.append((chance[..., place, None] >= upto[rows, found[-1]]).sum(-1))
        x = torch.from_numpy(np.stack(found, axis=-1)).to(self.device)
        inputs, targets = x[..., :-1], x[..., 1:]
        few = self.shots
        return (inputs[:, :few], targets[:, :few]), (inputs[:, few:], targets[:, few:])


@functools.cache
def _bases(symbols: int) -> NDArray[np.float64]:
    key = np.array([root_key(0, 3)], dtype=np.uint64)  # no split's, those are 0, 1 and 2
    drawn = normal(key, BASES * symbols * symbols).reshape(BASES, symbols, symbols)
    return _softmax(SHARPNESS * drawn)


def _softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(x - x.max(-1, keepdims=True))
    found: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return found


class GPT(nn.Module):
    """A decoder-only Transformer (Radford et al. 2019) with pre-normalised blocks and GELU: smooth,
    and twice differentiable.

    Args:
        symbols: of the alphabet.
        length: longest sequence.
        width: of the vectors; `heads` must divide it.
        layers: blocks.
        heads: of attention.

    Example:
        >>> GPT(symbols=16, length=4, width=8)(torch.zeros(3, 4, dtype=torch.long)).shape
        torch.Size([3, 16, 4])
    """

    def __init__(
        self,
        *,
        symbols: int = 32,
        length: int = 32,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of the next symbol, `(n, length)` → `(n, symbols, length)`, as `cross_entropy`
        wants them.
        """
        x = self.embedding(symbols) + self.positions[: symbols.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.mT


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        moved: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return moved

    def _attend(self, x: Tensor) -> Tensor:
        # three of (n, heads, length, width/heads)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        # made anew each time: a buffer would be copied for every task that runs beside others
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return projected
