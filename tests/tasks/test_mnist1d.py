from __future__ import annotations

import numpy as np
import pytest
import torch

from metanudge.tasks import MNIST1D, mnist1d
from metanudge.tasks.mnist1d_recipe import generate


@pytest.mark.parametrize(
    ("num_samples", "file"), [(5000, "mnist1d_5000_original"), (12000, "mnist1d_12000")]
)
def test_generated_data_equal_the_published_ones(data, num_samples, file):
    made = generate(num_samples)
    published = np.load(data / "mnist1d" / f"{file}.npz")
    for name in ("x_train", "x_test"):
        np.testing.assert_allclose(getattr(made, name), published[name], rtol=0, atol=1e-12)
    for name in ("y_train", "y_test"):
        assert np.array_equal(getattr(made, name), published[name])


def test_generation_is_bit_reproducible_and_ignores_the_global_stream():
    np.random.seed(0)  # noqa: NPY002
    first = generate(500)
    np.random.seed(1)  # noqa: NPY002
    second = generate(500)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first.x_train, generate(500, seed=43).x_train)


@pytest.mark.parametrize("num_samples", [0, -10, 1234])
def test_a_number_of_samples_that_cannot_be_shared_out_is_refused(num_samples):
    with pytest.raises(ValueError, match=rf"num_samples={num_samples}.*multiple of 10"):
        MNIST1D(num_samples=num_samples)


def test_the_second_source_reads_the_cache(monkeypatch, cache):
    first = MNIST1D(num_samples=1000, queries=5)
    assert [p.name for p in cache.iterdir()] == ["mnist1d-1000-seed42-v1.npz"]

    def never(*_args, **_kwargs):
        raise AssertionError("generated again")

    monkeypatch.setattr(mnist1d, "generate", never)
    assert torch.equal(
        first.task(3).query[0], MNIST1D(num_samples=1000, queries=5).task(3).query[0]
    )


@pytest.mark.parametrize("content", [b"", b"damaged", None], ids=["empty", "garbage", "cut"])
def test_a_corrupt_cache_file_is_made_anew(content, cache):
    good = MNIST1D(num_samples=1000, queries=5).task(0).query[0]
    (path,) = cache.iterdir()
    saved = path.read_bytes()
    path.write_bytes(saved[: len(saved) // 2] if content is None else content)
    assert torch.equal(MNIST1D(num_samples=1000, queries=5).task(0).query[0], good)
    assert path.read_bytes() == saved


def test_without_cache_nothing_is_written(cache):
    MNIST1D(num_samples=1000, queries=5, cache=False)
    assert not cache.exists()


def test_splits_share_classes_but_no_example():
    source = MNIST1D(num_samples=1000, shots=1, queries=1, ways=10)
    made = generate(1000)
    rows = {split: set(source._pools[split].rows.tolist()) for split in ("train", "val", "test")}
    assert [len(rows[s]) for s in rows] == [640, 160, 200]
    assert set.union(*rows.values()) == set(range(1000))
    assert all(source.classes(split) == tuple("0123456789") for split in ("train", "val", "test"))
    x, _ = source.task(0, "test").support
    assert all((torch.from_numpy(made.x_test).float() == row).all(dim=1).any() for row in x)


def test_labels_stand_for_one_digit_each():
    source = MNIST1D(num_samples=1000, shots=2, queries=3, dtype=torch.float64)
    made = generate(1000)
    x, y = source.task(7).query
    digits = [int(made.y_train[(made.x_train == row.numpy()).all(axis=1)][0]) for row in x]
    assert y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(set(digits)) == 3
    assert (
        [digits[i] for i in (0, 3, 6)]
        == [digits[i] for i in (1, 4, 7)]
        == [digits[i] for i in (2, 5, 8)]
    )


def test_properties_and_defaults():
    source = MNIST1D(num_samples=2000)
    assert (source.ways, source.shots, source.queries, source.seed) == (3, 5, 10, 0)
    assert (source.kind, source.num_outputs, source.input_shape) == ("classification", 3, (40,))
    assert (
        repr(source)
        == "MNIST1D(ways=3, shots=5, queries=10, seed=0, input_shape=(40,), classes=10/10/10,"
        " device='cpu')"
    )
    assert source.task(0).support[0].dtype == torch.float32


def test_a_split_that_is_too_small_says_so_when_used():
    source = MNIST1D(num_samples=500, shots=5, queries=10)  # about 8 validation examples per class
    source.task(0)
    with pytest.raises(
        ValueError, match=r"split 'val' has \d+ examples.*shots=5 and queries=10 need 15"
    ):
        source.task(0, "val")
