"""Random numbers as a pure function of their place: (key, draw number) → number, for whole arrays
at once.

A stateful generator gives episode 1000 only after episodes 0…999. Here every number is a hash of
where it belongs, so any worker, rank or resumed run computes the same one without its predecessors,
and a meta-batch costs a handful of array operations. The hash is the output function of SplitMix64
(Steele, Lea, Flood 2014, *Fast splittable pseudorandom number generators*): draw d of key k is
`mix(k + (d + 1)·γ)`, and keys are themselves draws of a parent key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio, as in SplitMix64
# any other odd constant: children of a key must not repeat its draws
_FORK_GAMMA = 0xD1342543DE82EF95
_SORT_LIMIT = 64  # sorting beats Floyd's loop for populations up to about this size


def _mix(z: Keys) -> Keys:
    """Scramble in place; a bijection of 64 bits in which every input bit reaches every output
    bit.
    """
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def root_key(seed: int, stream: int) -> int:
    """The key of one stream (one split) of one seed.

    Example:
        >>> root_key(0, 0) == root_key(0, 0), root_key(0, 0) == root_key(0, 1)
        (True, False)
    """
    key = np.array([seed & _MASK], dtype=np.uint64)
    return int(fork(fork(key, np.array([0])), np.array([stream]))[0])


def episode_keys(root: int, indices: NDArray[np.int64]) -> Keys:
    """One key per episode index, shape of `indices`."""
    return fork(np.array([root], dtype=np.uint64), indices)


def fork(keys: Keys, children: NDArray[np.int64]) -> Keys:
    """Child keys, for draws of another purpose; `keys` and `children` broadcast."""
    return _mix(keys + (children.astype(np.uint64) + np.uint64(1)) * np.uint64(_FORK_GAMMA))


def bits(keys: Keys, count: int) -> Keys:
    """Draws 0…count−1 of every key: 64 random bits each, shape `(*keys.shape, count)`."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return _mix(keys[..., None] + steps)


def uniform(keys: Keys, count: int) -> NDArray[np.float64]:
    """Draws from U[0, 1) with 53 random bits, shape `(*keys.shape, count)`.

    Example:
        >>> bool((uniform(np.array([7], dtype=np.uint64), 1000) < 1).all())
        True
    """
    return (bits(keys, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(keys: Keys, count: int) -> NDArray[np.float64]:
    """Standard normal draws (Box and Muller 1958), shape `(*keys.shape, count)`."""
    pairs = (count + 1) // 2
    u = uniform(keys, 2 * pairs)
    # 1 − u lies in (0, 1], so the logarithm is finite
    radius = np.sqrt(-2.0 * np.log1p(-u[..., :pairs]))
    angle = 2.0 * np.pi * u[..., pairs:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return np.ascontiguousarray(both[..., :count])


def choose(
    keys: Keys, population: NDArray[np.int64], size: int, *, limit: int
) -> NDArray[np.int64]:
    """Choose `size` different numbers below `population` for every key, in random order.

    Args:
        keys: shape `(*rows)`; one choice each.
        population: shape `(*rows)` or one that broadcasts to it; row r chooses from
            0…population[r]−1.
        size: how many to choose, at most the smallest population.
        limit: a bound on every population that is the same for all calls of one stream. It decides
            between two algorithms (a full shuffle, or Floyd's), so it must not depend on which rows
            happen to be in the call.

    Returns:
        shape `(*rows, size)`; every ordered choice is equally likely.

    Example:
        >>> picked = choose(np.arange(3, dtype=np.uint64), np.array([5, 500, 500]), 4, limit=500)
        >>> picked.shape, bool((picked[0] < 5).all()), [len(set(row)) for row in picked.tolist()]
        ((3, 4), True, [4, 4, 4])
    """
    assert 0 < size <= int(population.min()), (size, population)
    assert int(population.max()) <= limit, (population, limit)
    if limit <= max(_SORT_LIMIT, size * size // 16):
        return _shuffled(keys, population, limit)[..., :size]
    chosen = _floyd(keys, population, size)
    order = _shuffled(fork(keys, np.array([0])), np.array([size]), size)
    return np.take_along_axis(chosen, order, axis=-1)


def _shuffled(keys: Keys, population: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """0…population−1 in random order, then numbers that are not in the population, shape `(*rows,
    limit)`.

    The low bits of each random key hold its column: one sort then yields the order itself, and
    since no two keys are equal it does not depend on which sorting algorithm this machine has.
    """
    low = np.uint64((1 << limit.bit_length()) - 1)
    columns = np.arange(limit, dtype=np.uint64)
    ranks = (bits(keys, limit) & ~low) | columns
    if int(population.min()) < limit:
        beyond = columns >= population[..., None].astype(np.uint64)
        # what is not in the population is sorted to the end
        ranks |= np.where(beyond, ~low, np.uint64(0))
    ranks.sort(axis=-1)
    return (ranks & low).astype(np.int64)


def _floyd(keys: Keys, population: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """A uniform random subset per row in `size` steps (Bentley and Floyd 1987); its order is not
    random.
    """
    tops = population[..., None] - size + np.arange(size)  # step i draws from 0…tops[i]
    drawn = (uniform(keys, size) * (tops + 1)).astype(np.int64)
    chosen = np.empty(drawn.shape, dtype=np.int64)
    for i in range(size):
        repeated = (chosen[..., :i] == drawn[..., i : i + 1]).any(axis=-1)
        chosen[..., i] = np.where(repeated, tops[..., i], drawn[..., i])
    return chosen
