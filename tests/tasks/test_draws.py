from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metanudge.tasks.draws import bits, choose, episode_keys, fork, normal, root_key, uniform


def keys_of(count: int, seed: int = 0):
    return episode_keys(root_key(seed, 0), np.arange(count))


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean, for equally likely cells."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_bits_are_splitmix64():
    # Reference output of the authors' C code for the state 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert bits(np.array([1234567], dtype=np.uint64), 5)[0].tolist() == expected


def test_keys_depend_on_seed_stream_and_index_and_never_collide():
    keys = np.concatenate(
        [episode_keys(root_key(s, t), np.arange(5000)) for s in (0, 1, 2**63) for t in range(4)]
    )
    assert len(np.unique(keys)) == keys.size
    assert len(
        np.unique(
            np.concatenate(
                [bits(keys[:100], 50).ravel(), fork(keys[:100, None], np.arange(50)).ravel()]
            )
        )
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_every_bit_is_fair_and_neighbours_are_independent(seed):
    drawn = bits(keys_of(20_000, seed), 2)
    on = np.unpackbits(drawn.view(np.uint8)).reshape(20_000, 2, 64)
    assert np.abs(on.mean(axis=0) - 0.5).max() < 5 * 0.5 / math.sqrt(20_000)
    u = uniform(keys_of(20_000, seed), 2)
    # draws of one episode; the same draw of the next one
    for a, b in ((u[:, 0], u[:, 1]), (u[:-1, 0], u[1:, 0])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(20_000)


def test_uniform_is_uniform():
    u = uniform(keys_of(1000), 64).ravel()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(chi_square(np.bincount((u * 200).astype(int), minlength=200))) < 4


def test_normal_has_the_moments_and_tails_of_a_normal():
    z = normal(keys_of(2000), 65)
    assert z.shape == (2000, 65)
    n = z.size
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((np.abs(z) > 3).mean() - 0.0027) < 5 * math.sqrt(0.0027 / n)
    # the two halves of one pair
    assert abs(np.corrcoef(z[:, 0], z[:, 33])[0, 1]) < 5 / math.sqrt(2000)


@pytest.mark.parametrize("limit", [5, 64, 65], ids=["shuffle", "shuffle, larger limit", "Floyd"])
def test_every_ordered_choice_is_equally_likely(limit):
    chosen = choose(keys_of(60_000), np.array([5]), 3, limit=limit)
    number = {p: i for i, p in enumerate(permutations(range(5), 3))}
    counts = np.bincount([number[tuple(row)] for row in chosen.tolist()], minlength=60)
    assert abs(chi_square(counts)) < 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    data=st.data(),
    seed=st.integers(0, 2**64 - 1),
    size=st.integers(1, 30),
    extra=st.integers(0, 400),
)
def test_choices_are_distinct_within_range_and_independent_of_the_other_rows(
    data, seed, size, extra
):
    limit = size + extra
    population = np.array(data.draw(st.lists(st.integers(size, limit), min_size=1, max_size=6)))
    keys = keys_of(len(population), seed)
    chosen = choose(keys, population, size, limit=limit)
    assert chosen.shape == (len(population), size)
    assert (chosen >= 0).all()
    assert (chosen < population[:, None]).all()
    assert all(len(set(row)) == size for row in chosen.tolist())
    for row in range(len(population)):
        alone = choose(keys[row : row + 1], population[row : row + 1], size, limit=limit)
        assert alone[0].tolist() == chosen[row].tolist()
