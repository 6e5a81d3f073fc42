"""How MNIST-1D is made: ten digit-like templates, randomly padded, scaled, shifted, noised and
sheared.

Greydanus and Kobak (2024), *Scaling down deep learning with MNIST-1D*; with 5,000 examples and seed
42 this gives the frozen data set that the authors publish, to rounding error. All random numbers
come from one legacy MT19937 stream, in which the number of draws per example is itself random
(rejection sampling): the draws are therefore made example by example, and everything after them on
whole arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_CLASSES = 10
LENGTH = 40  # numbers per finished example

_TEMPLATES = np.array(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
_TEMPLATE = _TEMPLATES.shape[1]
_MIN_PADDING, _MAX_PADDING = 36, 60
_WIDTH = _TEMPLATE + _MAX_PADDING  # every example has this length until it is subsampled
_SCALE = 0.4
_MAX_TRANSLATION = 48
_CORRELATED_NOISE, _SMOOTHING = 0.25, 2.0
_WHITE_NOISE = 0.02
_SHEAR = 0.75
_TRAIN_FRACTION = 0.8


class MNIST1DArrays(NamedTuple):
    """The finished data set."""

    x_train: Array  # (0.8·num_samples, 40)
    y_train: NDArray[np.int64]
    x_test: Array  # (0.2·num_samples, 40)
    y_test: NDArray[np.int64]


class _Draws(NamedTuple):
    padding: Array  # U[0, 1), one per example
    scale: Array
    translation: NDArray[np.int64]
    noise: Array  # (num_samples, 2·width) standard normals: the correlated noise, then the white
    shear: Array
    order: NDArray[np.int64]  # the final shuffle


def generate(num_samples: int, *, seed: int = 42) -> MNIST1DArrays:
    """Make the data set; the same numbers for the same arguments.

    Args:
        num_samples: examples in all, a multiple of 10; the last fifth is the test part.
        seed: seed of the whole data set.

    Example:
        >>> data = generate(1000)
        >>> data.x_train.shape, np.bincount(np.concatenate([data.y_train, data.y_test])).tolist()
        ((800, 40), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    if num_samples < NUM_CLASSES or num_samples % NUM_CLASSES:
        raise ValueError(
            f"num_samples={num_samples} cannot be shared out evenly: MNIST-1D has equally many"
            f" examples of each of its {NUM_CLASSES} classes. Use a multiple of {NUM_CLASSES}, such"
            " as 5000 or 12000."
        )
    # legacy: the published set comes from it
    draws = _draw(num_samples, np.random.RandomState(seed))
    labels = np.repeat(np.arange(NUM_CLASSES), num_samples // NUM_CLASSES)
    x = _dilated(_normalised_templates()[labels], draws.padding)
    x *= (1 + _SCALE * (draws.scale - 0.5))[:, None]
    columns = (np.arange(_WIDTH) - draws.translation[:, None]) % _WIDTH
    x = np.take_along_axis(x, columns, axis=1)
    correlated = _smoothed(_CORRELATED_NOISE * draws.noise[:, :_WIDTH])
    x = np.where(x == 0, correlated, x)  # templates are never exactly 0, so these are the padding
    x += _WHITE_NOISE * draws.noise[:, _WIDTH:]
    x -= (_SHEAR * (draws.shear - 0.5))[:, None] * np.linspace(-0.5, 0.5, _WIDTH)
    x = _resampled(x, _WIDTH, LENGTH)[draws.order]
    x = (x - x.mean()) / x.std()
    y = labels[draws.order]
    cut = int(_TRAIN_FRACTION * num_samples)
    return MNIST1DArrays(x[:cut], y[:cut], x[cut:], y[cut:])


def _draw(count: int, stream: np.random.RandomState) -> _Draws:
    uniforms = np.empty((count, 3))
    translation = np.empty(count, dtype=np.int64)
    noise = np.empty((count, 2 * _WIDTH))
    for i in range(count):
        uniforms[i, :2] = stream.random_sample(2)
        translation[i] = stream.randint(_MAX_TRANSLATION)
        # 72 + 72 draws: an even number leaves no half pair behind
        noise[i] = stream.standard_normal(2 * _WIDTH)
        uniforms[i, 2] = stream.random_sample()
    padding, scale, shear = uniforms.T
    return _Draws(padding, scale, translation, noise, shear, stream.permutation(count))


def _normalised_templates() -> Array:
    x: Array = _TEMPLATES - _TEMPLATES.mean(axis=1, keepdims=True)
    x /= _TEMPLATES.std(axis=1, keepdims=True)
    x -= x[:, :1]  # starts, and ends, at zero
    return x / 6


def _dilated(templates: Array, padding: Array) -> Array:
    """Append a random number of zeros, then stretch to the full width."""
    padded = np.zeros((len(templates), _WIDTH))
    padded[:, :_TEMPLATE] = templates + 1e-8
    extra = np.floor(padding * (_MAX_PADDING - _MIN_PADDING + 1)).astype(np.int64)
    x = np.empty_like(padded)
    for p in range(_MAX_PADDING - _MIN_PADDING + 1):
        rows = extra == p
        x[rows] = _resampled(padded[rows], _TEMPLATE + _MIN_PADDING + p, _WIDTH)
    return x


def _resampled(x: Array, length: int, new_length: int) -> Array:
    """Linear interpolation of the first `length` columns at `new_length` points, both ends kept."""
    old, new = np.linspace(0, 1, length), np.linspace(0, 1, new_length)
    right = np.clip(np.searchsorted(old, new), 1, length - 1)
    left = right - 1
    slope = (x[:, right] - x[:, left]) / (old[right] - old[left])
    return slope * (new - old[left]) + x[:, left]


def _smoothed(x: Array) -> Array:
    """Gaussian filter along the rows, cut off at four standard deviations, mirrored at the
    edges.
    """
    radius = int(4 * _SMOOTHING + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / _SMOOTHING) ** 2)
    weights /= weights.sum()
    mirrored = np.pad(x, ((0, 0), (radius, radius)), mode="symmetric")
    smooth = np.zeros_like(x)
    for i, weight in enumerate(weights):
        smooth += weight * mirrored[:, i : i + x.shape[1]]
    return smooth
