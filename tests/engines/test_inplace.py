"""The in-place engine runs whatever trains with `loss.backward()`, and leaves the module as it
found it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import conformance
import metanudge as mn
from conformance import SOLVER, Snapshot, by_hand, give_gradients, gradient, learner_for, rounding
from metanudge.solvers import Oracle, Solution
from problems import Setup, classification_tasks, conv_net, mlp, relative_error, seeded

# torch says this once a process when vmap meets CPU flash attention: slower, and right.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def check(setup: Setup, *, stacked: bool, tol: float = 1e-10) -> None:
    """The engine matches plain loops on copies (and the stacked engine), and changes nothing."""
    give_gradients(setup.model)
    before = Snapshot(setup.model)
    result = gradient(setup, mn.FOBMAML(nu=0.1), "inplace")
    before.assert_unchanged()
    assert relative_error(result, by_hand(setup)) < tol
    if stacked:
        assert relative_error(result, gradient(setup, mn.FOBMAML(nu=0.1), "stacked")) < tol
    for estimator in (mn.FOMAML(), mn.FOBMAML(nu=0.1, nudge="gradient", start="solution")):
        other = gradient(setup, estimator, "inplace")
        before.assert_unchanged()
        if stacked:
            assert relative_error(other, gradient(setup, estimator, "stacked")) < tol


# ------------------------------------------------------------------------------------- what it runs


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def sequences(seed: int = 0, features: int = 3) -> mn.TaskBatch:
    return classification_tasks((5, features), 3, 2, 4, 6, seed)


def test_lstm():
    check(Setup(seeded(0, Recurrent), F.cross_entropy, sequences()), stacked=False)


def test_scaled_dot_product_attention():
    check(conformance.attention(tasks=2), stacked=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch._dynamo's own imports
def test_compiled_module(backend: str):
    """The compiled code must read the overwritten parameters, not constants baked in at the first
    call.
    """
    plain = mlp(tasks=2)
    torch.compiler.reset()
    compiled = torch.compile(plain.model, backend=backend)
    setup = Setup(compiled, plain.loss, plain.tasks)
    give_gradients(compiled)
    before = Snapshot(compiled)
    result = gradient(setup, mn.FOBMAML(nu=0.1), "inplace")
    before.assert_unchanged()
    assert all(n.startswith("_orig_mod.") for n in result), "named like the module's own parameters"
    assert relative_error(list_of(result), list_of(by_hand(plain))) < 1e-10


def list_of(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("_orig_mod."): g for n, g in gradient.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_module_with_running_statistics():
    """Compiled code writes buffers by other kernels than eager code; they must come back all the
    same.
    """
    plain = conv_net(tasks=2)
    torch.compiler.reset()
    compiled = torch.compile(plain.model, backend="aot_eager")
    before = Snapshot(compiled)
    result = gradient(Setup(compiled, plain.loss, plain.tasks), mn.FOBMAML(nu=0.1), "inplace")
    before.assert_unchanged()
    assert relative_error(list_of(result), list_of(by_hand(plain))) < 1e-10


class Checkpointed(nn.Module):
    """An embedding layer, then a block whose activations are computed again in the backward pass,
    dropout included.
    """

    def __init__(self, use_reentrant: bool | None, dropout: float) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(3, 5)
        self.block = nn.Sequential(nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.use_reentrant is None:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [True, False])
# torch's word on forward passes without grad
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing(use_reentrant: bool):
    tasks = mlp(tasks=2).tasks
    check(
        Setup(seeded(0, lambda: Checkpointed(use_reentrant, 0.0)), F.cross_entropy, tasks),
        stacked=False,
    )
    with_dropout, plain = (
        Setup(seeded(0, lambda r=r: Checkpointed(r, 0.4)), F.cross_entropy, tasks)
        for r in (use_reentrant, None)
    )
    assert (
        relative_error(gradient(with_dropout, None, "inplace"), gradient(plain, None, "inplace"))
        < rounding()
    )


@pytest.mark.parametrize("frozen", [("0.weight",), ("0.weight", "0.bias"), ("2.weight", "2.bias")])
def test_frozen_parameters(frozen: tuple[str, ...]):
    setup = mlp(tasks=2)
    for n in frozen:
        parameter = setup.model.get_parameter(n).requires_grad_(False)
        parameter.grad = torch.ones_like(parameter)  # left over from before it was frozen
    check(setup, stacked=True)
    assert not set(gradient(setup, None, "inplace")) & set(frozen)


class Tied(nn.Module):
    """Input and output share their weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().T.clone())
        self.again = nn.Linear(4, 4)
        self.again.weight = self.hidden.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.hidden(self.embed(x)))))


def test_tied_parameters():
    setup = Setup(seeded(0, Tied), F.cross_entropy, mlp(tasks=2).tasks)
    assert "again.weight" not in dict(setup.model.named_parameters())
    check(setup, stacked=True)
    assert setup.model.again.weight is setup.model.hidden.weight


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_stay(training: bool):
    setup = conv_net(tasks=2)
    with torch.no_grad():  # statistics of a trained net, not the 0 and 1 of a new one
        for module in setup.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(torch.linspace(-0.2, 0.3, 3))
                module.running_var.copy_(torch.linspace(0.5, 2.0, 3))
                module.num_batches_tracked.fill_(17)
    setup.model.train(training)
    check(setup, stacked=True)


class Counting(nn.Module):
    """Counts its calls in a buffer, in one of the ways modules write their buffers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.calls.add_(1)
        elif self.how == "through .data":
            self.calls.data.add_(1)
        elif self.how == "exchanged":
            self.calls = self.calls + 1
        else:
            self.largest = x.detach().abs().amax()
        return self.linear(x) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("how", ["in place", "through .data", "exchanged", "appearing"])
def test_buffers_come_back_however_they_are_written(how: str):
    """Every evaluation sees the buffers as they were before the call, and so does the user
    afterwards.
    """
    setup = Setup(seeded(0, lambda: Counting(how)), F.cross_entropy, mlp(tasks=2).tasks)
    before = Snapshot(setup.model)
    first = gradient(setup, None, "inplace")
    before.assert_unchanged()
    assert relative_error(gradient(setup, None, "inplace"), first) == 0


@dataclass
class Output:
    """What a HuggingFace model returns."""

    loss: Tensor | None
    logits: Tensor


class LanguageModel(nn.Module):
    """A HuggingFace-style model: keyword arguments in, an object with `.loss` out, weights tied."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=11)
        self.embed = nn.Embedding(11, 4)
        self.block = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        hidden = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.lm_head(self.norm(hidden + torch.tanh(self.block(hidden.cumsum(1)))))
        loss = (
            None
            if labels is None
            else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        )
        return Output(loss, logits)


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def language_tasks(seed: int = 0) -> mn.TaskBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw(sequences: int) -> dict[str, Tensor]:
        ids = torch.randint(11, (2, sequences, 6), generator=generator)
        labels = ids.roll(-1, 2)
        labels[..., -1] = -100
        return {"input_ids": ids, "attention_mask": (ids > 0).double(), "labels": labels}

    return mn.TaskBatch(support=draw(3), query=draw(4))


def test_module_that_returns_an_object_with_loss():
    check(Setup(seeded(0, LanguageModel), language_loss, language_tasks()), stacked=True)


def test_parameters_that_the_loss_ignores():
    """An unused parameter has gradient 0, with second-order estimators too."""

    class WithSpare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
            self.spare = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    setup = Setup(seeded(0, WithSpare), F.cross_entropy, mlp(tasks=2).tasks)
    check(setup, stacked=True)
    for estimator in (mn.FOBMAML(nu=0.1), mn.IMAML()):
        result = gradient(setup, estimator, "inplace")
        assert torch.equal(result["spare"], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_of_the_caller_does_not_matter(grad_mode: Callable[[], Any], engine: str):
    """Users measure under no_grad or inference_mode; adaptation needs gradients all the same, or
    must say that it cannot.
    """
    setup = mlp(tasks=2)
    learner = learner_for(setup, engine=engine)
    gradient_outside, _ = learner.meta_gradient(setup.tasks, seed=1)
    evaluation = learner.evaluate(setup.tasks)
    with grad_mode():
        gradient_inside, _ = learner.meta_gradient(setup.tasks, seed=1)
        inside = learner.evaluate(setup.tasks)
    assert relative_error(gradient_inside, gradient_outside) < 1e-12
    assert torch.allclose(inside.loss, evaluation.loss, rtol=1e-12)


# ----------------------------------------------------------------------------- when the loss raises


class Interrupted(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


ERRORS = {"RuntimeError": RuntimeError, "ValueError": ValueError, "Interrupted": Interrupted}


class Bomb(torch.autograd.Function):
    """Raises in the backward pass, when half of the gradients are there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise ctx.error("planned, in the backward pass")


class Fails:
    """Cross-entropy that raises at its nth call."""

    def __init__(self, at: int | None, error: type[BaseException]) -> None:
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise self.error("planned")
        return F.cross_entropy(output, target)


def fragile() -> Setup:
    """BatchNorm, dropout, a frozen parameter, an evaluating sub-module, gradients that are there
    already.
    """
    setup = conv_net(tasks=2, dropout=0.3)
    setup.model[0].bias.requires_grad_(False)
    setup.model[5].eval()
    give_gradients(setup.model)
    return setup


def number_of_calls(estimator: Any) -> int:
    setup, loss = fragile(), Fails(None, RuntimeError)
    learner_for(Setup(setup.model, loss, setup.tasks), estimator, "inplace").meta_gradient(
        setup.tasks
    )
    return loss.calls


ESTIMATORS_THAT_FAIL = {
    "loss": mn.FOBMAML(nu=0.1),
    "gradient": mn.FOBMAML(nu=0.1, nudge="gradient", start="solution"),
    "imaml": mn.IMAML(cg_steps=2),
}


@pytest.mark.parametrize("estimator", ESTIMATORS_THAT_FAIL)
def test_everything_is_restored_when_the_loss_raises(estimator: str):
    """At every call of the loss in turn, and by every kind of exception."""
    chosen = ESTIMATORS_THAT_FAIL[estimator]
    calls = number_of_calls(chosen)
    assert calls > 10
    setup = fragile()
    before = Snapshot(setup.model)
    for at in range(1, calls + 1):
        error = list(ERRORS.values())[at % len(ERRORS)]
        loss = Fails(at, error)
        learner = learner_for(Setup(setup.model, loss, setup.tasks), chosen, "inplace")
        with pytest.raises((error, ValueError), match="planned"):
            learner.backward(setup.tasks)
        before.assert_unchanged()


@pytest.mark.parametrize("error", ERRORS)
def test_everything_is_restored_when_the_backward_pass_raises(error: str):
    """The bomb sits behind the first convolution: the other gradients have been accumulated when it
    goes off.
    """
    setup = fragile()
    blast = {"at": -1, "calls": 0}

    def bomb(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        blast["calls"] += torch.is_grad_enabled()
        return (
            Bomb.apply(output, ERRORS[error])
            if blast["calls"] == blast["at"] and torch.is_grad_enabled()
            else None
        )

    setup.model[0].register_forward_hook(bomb)
    learner = learner_for(setup, engine="inplace")
    before = Snapshot(setup.model)
    for at in range(1, 2 * 2 * 2 * SOLVER.steps + 1):
        blast.update(at=at, calls=0)
        with pytest.raises(ERRORS[error], match="planned"):
            learner.backward(setup.tasks)
        before.assert_unchanged()
    blast.update(at=-1)
    learner.meta_gradient(setup.tasks)
    before.assert_unchanged()


def test_the_stacked_engine_changes_nothing_when_the_loss_raises():
    setup = fragile()
    counting = Fails(None, RuntimeError)
    learner_for(Setup(setup.model, counting, setup.tasks)).meta_gradient(setup.tasks)
    before = Snapshot(setup.model)
    for at in range(1, counting.calls + 1):
        loss = Fails(at, RuntimeError if at % 2 else Interrupted)
        with pytest.raises((RuntimeError, Interrupted), match="planned"):
            learner_for(Setup(setup.model, loss, setup.tasks)).backward(setup.tasks)
        before.assert_unchanged()


def test_failed_calls_do_not_use_up_random_numbers():
    """After an error the next call draws what it would have drawn."""
    setup = mlp(dropout=0.4)
    expected = learner_for(setup, engine="inplace").meta_gradient(setup.tasks)[0]
    loss = Fails(3, RuntimeError)
    learner = learner_for(Setup(setup.model, loss, setup.tasks), engine="inplace")
    with pytest.raises(ValueError, match="planned"):
        learner.meta_gradient(setup.tasks)
    assert relative_error(learner.meta_gradient(setup.tasks)[0], expected) == 0


# ---------------------------------------------------------------------------------------- precision


def in_float32(setup: Setup) -> Setup:
    return Setup(setup.model.float(), setup.loss, setup.tasks.to(torch.float32))


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_autocast_sees_the_updated_weights(engine: str):
    """autocast caches the bf16 casts of the parameters: a solve that overwrites them must not read
    old ones.
    """
    setup = in_float32(mlp(tasks=2, hidden=16))

    def under_autocast(**options: Any) -> tuple[dict[str, Tensor], mn.Stats]:
        learner = learner_for(setup, mn.FOMAML(), engine, solver=mn.GradientDescent(0.5, 3))
        with torch.autocast("cpu", torch.bfloat16, **options):
            return learner.meta_gradient(setup.tasks)

    result, stats = under_autocast()
    expected, expected_stats = under_autocast(cache_enabled=False)
    assert all(torch.equal(result[n], expected[n]) for n in expected)
    assert stats == expected_stats
    assert stats.query_loss != stats.query_loss_before
    assert all(g.dtype == torch.float32 for g in result.values())


def test_autocast_cache_holds_nothing_old_afterwards():
    """A forward pass of the user in the same autocast block reads θ, not what the last inner step
    had written.
    """
    setup = in_float32(mlp(tasks=2, hidden=16))
    x = setup.tasks[0].support[0]
    learner = learner_for(setup, engine="inplace", solver=mn.GradientDescent(0.5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        before = setup.model(x)
        learner.meta_gradient(setup.tasks)
        assert torch.equal(setup.model(x), before)


@dataclass(frozen=True)
class Spy:
    """A solver that keeps what it has solved."""

    solver: mn.GradientDescent
    solutions: list[Solution]

    @property
    def steps(self) -> int:
        return self.solver.steps

    def solve(self, oracle: Oracle, start: dict[str, Tensor] | None = None) -> Solution:
        self.solutions.append(self.solver.solve(oracle, start))
        return self.solutions[-1]


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_have_float32_displacements(dtype: torch.dtype, engine: str):
    setup = mlp(tasks=2, hidden=8)
    truth = gradient(setup, mn.FOMAML(), engine)
    low = Setup(setup.model.to(dtype), setup.loss, setup.tasks.to(dtype))
    spy = Spy(SOLVER, [])
    learner = learner_for(low, mn.FOMAML(), engine, solver=spy)
    before = Snapshot(low.model)
    result, _ = learner.meta_gradient(low.tasks, seed=7)
    before.assert_unchanged()
    assert all(g.dtype == torch.float32 for g in result.values())
    for solution in spy.solutions:
        assert all(leaf.dtype == torch.float32 for leaf in solution.displacement.values())
    error = relative_error({n: g.double() for n, g in result.items()}, truth)
    assert error < 0.03, "as close as the precision of the parameters allows"
    learner.backward(low.tasks)
    assert all(p.grad.dtype == dtype for p in low.model.parameters())


# ----------------------------------------------------------------------------------------- refusals


def test_refuses_a_model_wrapped_in_the_first_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)  # as far as a single process without a group gets
    for engine in ("inplace", "stacked"):
        with pytest.raises(TypeError, match=r"'1' is wrapped in FullyShardedDataParallel"):
            mn.MetaLearner(nn.Sequential(nn.Linear(1, 1), wrapped), F.mse_loss, engine=engine)


def test_refuses_parameters_without_values():
    with pytest.raises(ValueError, match=r"0.weight, 0.bias\) lie on the meta device.*offload"):
        mn.MetaLearner(nn.Sequential(nn.Linear(1, 1, device="meta")), F.mse_loss)


def test_refuses_a_model_wrapped_in_distributed_data_parallel():
    """DDP would average the gradients of the inner steps over the ranks, and on the stacked engine
    those of no step: another algorithm, silently.
    """
    setup = mlp(tasks=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(setup.model)
        for model, loss in (
            (wrapped, F.cross_entropy),
            (nn.Sequential(wrapped), F.cross_entropy),
        ):
            for engine in ("inplace", "stacked", "auto"):
                with pytest.raises(TypeError, match=r"DistributedDataParallel.*DDP\(learner\)"):
                    learner_for(Setup(model, loss, setup.tasks), engine=engine)
            learner = learner_for(setup)
            learner.model = model
            with pytest.raises(TypeError, match=r"DDP\(learner\)"):
                learner.backward(setup.tasks)
    finally:
        dist.destroy_process_group()
