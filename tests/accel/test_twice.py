"""The convolution for second derivatives is torch's, twice differentiable."""

import pytest
import torch
from torch import nn

from metanudge.accel.twice import convolve, convolve_patches, patches

LAYERS = {
    "one axis": (lambda: nn.Conv1d(2, 3, 3, padding=1, stride=2), (4, 6, 9)),
    "two axes": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 0), stride=(1, 2)), (2, 6, 5, 6)),
    "dilated": (lambda: nn.Conv1d(1, 2, 3, dilation=2), (2, 3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_two_derivatives(name):
    make, shape = LAYERS[name]
    rows = 3
    torch.manual_seed(0)
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(
        rows * layer.out_channels, *layer.weight.shape[1:], dtype=torch.float64, requires_grad=True
    )
    function = nn.functional.conv1d if isinstance(layer, nn.Conv1d) else nn.functional.conv2d
    exact = function(x, weight, None, layer.stride, layer.padding, layer.dilation, rows)
    torch.testing.assert_close(
        convolve(layer, x, weight, rows, layer.padding), exact, rtol=0, atol=1e-13
    )
    assert torch.autograd.gradcheck(
        lambda x, w: convolve(layer, x, w, rows, layer.padding), (x, weight)
    )
    assert torch.autograd.gradgradcheck(
        lambda x, w: convolve(layer, x, w, rows, layer.padding), (x, weight)
    )
    assert torch.autograd.gradgradcheck(
        lambda w: convolve(layer, x.detach(), w, rows, layer.padding), (weight,)
    ), "data need no gradient"


@pytest.mark.parametrize("channels", [1, 3])
def test_on_patches_it_is_a_matrix_product(channels):
    rows, examples, co, kernel, padding = 2, 3, 4, (3, 2), (1, 0)
    torch.manual_seed(0)
    x = torch.randn(rows, examples, channels, 5, 6, dtype=torch.float64)
    weight = torch.randn(rows, co, channels, *kernel, dtype=torch.float64, requires_grad=True)
    exact = torch.stack(
        [nn.functional.conv2d(x[row], weight[row], padding=padding) for row in range(rows)]
    )

    def found(weight: torch.Tensor) -> torch.Tensor:
        y = convolve_patches(patches(x, kernel, padding), weight)
        return y.view(examples, *exact.shape[3:], rows, co).permute(3, 0, 4, 1, 2)

    torch.testing.assert_close(found(weight), exact, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(found, (weight,))
    assert torch.autograd.gradgradcheck(found, (weight,))


def test_autocast_lowers_the_precision():
    layer = nn.Conv1d(1, 1, 3)
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found, exact = (
            convolve(layer, x, weight, 2, layer.padding),
            nn.functional.conv1d(x, weight, groups=2),
        )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact)
