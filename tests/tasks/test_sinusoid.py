from __future__ import annotations

import math

import pytest
import torch

from metanudge.tasks import Sinusoid


def fitted_wave(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Amplitude and phase by least squares: a·sin(x − p) = (a·cos p)·sin x − (a·sin p)·cos x."""
    design = torch.cat([x.sin(), -x.cos()], dim=1)
    c, s = torch.linalg.lstsq(design, y).solution.flatten().tolist()
    return math.hypot(c, s), math.atan2(s, c)


def test_support_and_query_lie_on_one_sine_wave_in_the_stated_ranges():
    source = Sinusoid(shots=5, queries=7, seed=3, dtype=torch.float64)
    waves = []
    for task in source.batch(range(400)):
        (xs, ys), (xq, yq) = task.support, task.query
        assert xs.shape == ys.shape == (5, 1)
        assert xq.shape == yq.shape == (7, 1)
        a, p = fitted_wave(xs, ys)
        torch.testing.assert_close(yq, a * (xq - p).sin(), rtol=1e-7, atol=1e-7)
        waves.append((a, p))
    amplitudes, phases = torch.tensor(waves, dtype=torch.float64).unbind(1)
    assert 0.1 <= amplitudes.min() < 0.3 < 4.8 < amplitudes.max() <= 5
    assert -1e-6 <= phases.min() < 0.1 < 3.0 < phases.max() <= math.pi + 1e-6
    assert abs(amplitudes.mean() - 2.55) < 5 * 4.9 / math.sqrt(12 * 400)
    x = source.batch(range(400)).stacks[0].query[0]
    assert -5 <= x.min() < -4.9 < 4.9 < x.max() <= 5


def test_noise_has_the_stated_size_and_leaves_the_inputs():
    clean, noisy = Sinusoid(queries=100), Sinusoid(queries=100, noise=0.5)
    a, b = clean.batch(range(50)).stacks[0], noisy.batch(range(50)).stacks[0]
    assert torch.equal(a.query[0], b.query[0])
    assert abs((b.query[1] - a.query[1]).std() - 0.5) < 0.03
    assert abs((b.support[1] - a.support[1]).std() - 0.5) < 0.1


def test_properties():
    source = Sinusoid()
    assert (source.kind, source.num_outputs, source.input_shape, source.classes("val")) == (
        "regression",
        1,
        (1,),
        (),
    )
    assert repr(source) == "Sinusoid(shots=10, queries=10, seed=0, input_shape=(1,), device='cpu')"
    assert not torch.equal(source.task(0).support[0], source.task(0, "test").support[0])


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_a_wrong_noise_is_refused(noise):
    with pytest.raises(ValueError, match="not a standard deviation"):
        Sinusoid(noise=noise)


@pytest.mark.parametrize("option", ["amplitude", "phase", "domain"])
def test_a_wrong_range_is_refused(option):
    with pytest.raises(ValueError, match=rf"{option}=\(2, 1\) is not a range"):
        Sinusoid(**{option: (2, 1)})
