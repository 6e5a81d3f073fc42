"""Characters of an invented script, for where Omniglot is not at hand: a few strokes each, drawn by
many shaky hands.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from metanudge.tasks import Labelled

SIZE = 28
_POINTS = 24  # per stroke


@functools.cache
def glyphs(characters: int, drawers: int = 20, *, strokes: int = 3, seed: int = 0) -> Tensor:
    """Images of every character by every drawer, ink 255 on paper 0: uint8, `(characters, drawers,
    28, 28)`.

    A stroke is a quadratic Bézier curve. Characters differ in their control points; drawers move
    these a little, and turn, stretch and shift the whole.

    Example:
        >>> images = glyphs(3, 2)
        >>> images.shape, images.dtype, bool((images > 127).any(dim=(2, 3)).all())
        (torch.Size([3, 2, 28, 28]), torch.uint8, True)
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # in [−1, 1]²
    points = torch.rand(characters, 1, strokes, 3, 2, generator=generator) * 1.4 - 0.7
    points = points + 0.06 * normal(characters, drawers, strokes, 3, 2)
    turn = torch.eye(2) + 0.12 * normal(characters, drawers, 1, 2, 2)
    points = points @ turn + 0.08 * normal(characters, drawers, 1, 1, 2)
    t = torch.linspace(0, 1, _POINTS)
    weights = torch.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2])  # (3, points)
    # (characters, drawers, strokes · points, 2)
    curves = torch.einsum("cdskx,kp->cdspx", points, weights).flatten(2, 3)
    # Ink falls off with the distance to the nearest point of a curve as a Gaussian, which is a
    # product of its coordinates'.
    # (characters, drawers, points, 2, 28)
    ink = torch.exp(-(((torch.linspace(-1, 1, SIZE) - curves[..., None]) / 0.09) ** 2))
    images = [(one[:, :, 0, :, None] * one[:, :, 1, None, :]).amax(1) for one in ink]
    return (255 * torch.stack(images)).round().byte()


def glyph_tasks(
    ways: int, shots: int, queries: int, *, seed: int, device: torch.device, characters: int = 150
) -> Labelled:
    """Tasks like Omniglot's; the same characters whatever the seed, which is that of the stream of
    tasks.
    """
    images = glyphs(characters)
    labels = torch.arange(characters).repeat_interleave(images.shape[1])
    inputs = images.reshape(-1, 1, SIZE, SIZE)
    return Labelled(
        inputs,
        labels,
        ways=ways,
        shots=shots,
        queries=queries,
        seed=seed,
        splits=(0.6, 0.15, 0.25),
        device=device,
    )
