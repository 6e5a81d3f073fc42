from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp, vmap

import conformance
from metanudge import models

CASES = conformance.models()


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    options, shape = CASES[name]
    numbers = torch.randint(257, shape) if name == "text" else torch.randn(shape, dtype=dtype)
    return models.build(name, **options).to(dtype), numbers


def test_every_model_is_tested():
    assert set(CASES) == set(models.MODELS)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        # convolutions + BatchNorm + linear layer, counted by hand
        ("conv1d", {}, (64 + 784 + 784) + 3 * 32 + (80 * 3 + 3)),
        ("conv4", {}, (640 + 3 * 36928) + 4 * 128 + (64 * 5 + 5)),
        (
            "conv4",
            {"ways": 20, "image_size": 84, "in_channels": 3, "channels": 32},
            896 + 3 * 9248 + 256 + 800 * 20 + 20,
        ),
        ("mlp", {}, 80 + 1640 + 41),
        (
            "transformer",
            {},
            128 * 128
            + 128 * 384
            + 384
            + 128 * 128
            + 128
            + 128 * 512
            + 512
            + 512 * 128
            + 128
            + 512
            + 645,
        ),
    ],
)
def test_number_of_parameters(name, options, count):
    assert sum(p.numel() for p in models.build(name, **options).parameters()) == count


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    model, x = make(name)
    out = model(x)
    ways = CASES[name][0].get("ways", 4)
    assert out.shape == (len(x), ways)
    F.cross_entropy(out, torch.zeros(len(x), dtype=torch.long)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_stacked_copies_give_what_single_ones_do(name):
    model, x = make(name, torch.float64)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = (
                False  # running statistics are written in place, which vmap cannot do
            )
            module.running_mean = module.running_var = module.num_batches_tracked = None
    params = {k: p.detach() for k, p in model.named_parameters()}
    stacked = {k: torch.stack([p, 1.1 * p]) for k, p in params.items()}
    y = torch.arange(len(x)) % CASES[name][0].get("ways", 4)

    def loss(p):
        return F.cross_entropy(functional_call(model, p, (x,)), y)

    together = vmap(grad(loss))(stacked)
    for i in range(2):
        alone = grad(loss)({k: v[i] for k, v in stacked.items()})
        for k in params:
            torch.testing.assert_close(together[k][i], alone[k], rtol=1e-9, atol=1e-12)


# torch's own forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_and_forward_mode_exist_and_agree(name):
    model, x = make(name, torch.float64)
    params = {k: p.detach() for k, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    direction = {k: torch.ones_like(p) for k, p in params.items()}
    y = torch.arange(len(x)) % CASES[name][0].get("ways", 4)

    def loss(p):
        fresh = {k: b.clone() for k, b in buffers.items()}
        return F.cross_entropy(functional_call(model, {**p, **fresh}, (x,)), y)

    def slope(p):
        return sum(
            (g * d).sum() for g, d in zip(grad(loss)(p).values(), direction.values(), strict=True)
        )

    reverse = grad(slope)(params)
    _, forward = jvp(grad(loss), (params,), (direction,))
    for k in params:
        torch.testing.assert_close(reverse[k], forward[k], rtol=1e-7, atol=1e-9)


def test_conv1d_takes_a_channel_axis_too():
    model, x = make("conv1d")
    assert torch.equal(model(x), model(x[:, None]))


def test_batch_norm_keeps_torch_defaults():
    norms = [
        m
        for name in ("conv1d", "conv4")
        for m in make(name)[0].modules()
        if "BatchNorm" in type(m).__name__
    ]
    assert len(norms) == 7
    assert all(m.track_running_stats and m.affine and m.momentum == 0.1 for m in norms)


def test_attention_kernels_agree():
    options, _ = CASES["transformer"]
    model, x = make("transformer")
    fused = models.TransformerBlock(**options, attention="fused")
    fused.load_state_dict(model.state_dict())
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_transformer_block_is_the_standard_one():
    model, x = make("transformer", torch.float64)
    reference = torch.nn.TransformerEncoderLayer(
        16, 4, 20, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj_weight": "qkv.weight",
        "self_attn.in_proj_bias": "qkv.bias",
        "self_attn.out_proj.weight": "project.weight",
        "self_attn.out_proj.bias": "project.bias",
        "linear1.weight": "feed_forward.0.weight",
        "linear1.bias": "feed_forward.0.bias",
        "linear2.weight": "feed_forward.2.weight",
        "linear2.bias": "feed_forward.2.bias",
        "norm1.weight": "attention_norm.weight",
        "norm1.bias": "attention_norm.bias",
        "norm2.weight": "feed_forward_norm.weight",
        "norm2.bias": "feed_forward_norm.bias",
    }
    state = model.state_dict()
    reference.load_state_dict({theirs: state[ours] for theirs, ours in names.items()})
    expected = model.head(reference(x + model.positions).mean(dim=1))
    torch.testing.assert_close(model(x), expected)


def test_shorter_sequences_are_fine_and_longer_ones_are_explained():
    model, x = make("transformer")
    assert model(x[:, :3]).shape == (4, 5)
    with pytest.raises(
        ValueError, match=r"7 vectors, but the model was built for length=6. Build it with length=7"
    ):
        model(torch.zeros(1, 7, 16))


@pytest.mark.parametrize("activation", models.ACTIVATIONS)
def test_activations(activation):
    assert models.MLP(2, 3, activation=activation)(torch.zeros(1, 2)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "conv5",
            {},
            ValueError,
            r"no model 'conv5'. Did you mean 'conv4'\? The choices are conv1d, conv4, features",
        ),
        ("Conv4", {}, ValueError, "Did you mean 'conv4'"),
        (
            "conv4",
            {"way": 5},
            TypeError,
            "'conv4' has no option 'way'. Its options are ways, channels, image_size",
        ),
        ("conv4", {"image_size": 12}, ValueError, "image_size=12 is too small.*16 or more"),
        ("conv1d", {"length": 7}, ValueError, "length=7 is too short.*8 or more"),
        ("mlp", {"activation": "rely"}, ValueError, "no activation 'rely'. Did you mean 'relu'"),
        ("transformer", {"heads": 3}, ValueError, "heads=3 do not divide d_model=128"),
        ("transformer", {"attention": "flash"}, ValueError, "no attention 'flash'"),
    ],
)
def test_wrong_names_and_options_are_explained(name, options, error, message):
    with pytest.raises(error, match=message):
        models.build(name, **options)
