"""In place, gradient descent takes gradients as they come; the solution is that of whole gradients,
whatever comes when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import metanudge as mn
from conformance import Snapshot, by_hand, gradient, learner_for
from metanudge.engines import Cost, InplaceEngine
from metanudge.solvers import Oracle, Solution
from problems import Setup, conv_net, mlp, relative_error, seeded

AS_IT_COMES = mn.GradientDescent(0.1, 4)
# a tolerance needs the residual before the step, so the gradient must be held
WHOLE = mn.GradientDescent(0.1, 4, tol=1e-300)


@dataclass(frozen=True)
class Spy:
    """A solver that keeps what it has solved."""

    solver: mn.GradientDescent
    solutions: list[Solution] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.solver.steps

    def solve(self, oracle: Oracle, start: dict[str, Tensor] | None = None) -> Solution:
        self.solutions.append(self.solver.solve(oracle, start))
        return self.solutions[-1]


def solutions(
    setup: Setup, solver: mn.GradientDescent, estimator: Any = None, engine: str = "inplace"
) -> list[Solution]:
    spy = Spy(solver)
    learner_for(setup, estimator or mn.FOBMAML(nu=0.1), engine, solver=spy).meta_gradient(
        setup.tasks, seed=3, metrics=False
    )
    return spy.solutions


def assert_same(a: list[Solution], b: list[Solution], tol: float) -> None:
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        assert relative_error(left.displacement, right.displacement) < tol
        torch.testing.assert_close(left.losses, right.losses, rtol=tol, atol=0)
        torch.testing.assert_close(left.residuals, right.residuals, rtol=tol, atol=0)
        assert left.residuals.shape == (4, 1)
        assert torch.equal(left.steps, right.steps)
        assert torch.equal(left.residual, left.residuals[-1])


class Tied(nn.Module):
    """The hidden layer is used twice, each time in a checkpoint of its own: its gradient comes in
    two parts a pass.
    """

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(3, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for _ in range(2):
            x = (
                self.block(x)
                if self.use_reentrant is None
                else checkpoint(self.block, x, use_reentrant=self.use_reentrant)
            )
        return self.head(x)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x))


class TwoHeads(nn.Module):
    """The support loss sees one head, the query loss the other, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def two_heads() -> Setup:
    (x, y), (u, v) = mlp(tasks=2).tasks.stacks[0].support, mlp(tasks=2).tasks.stacks[0].query

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"], int(batch["head"][0])), batch["y"])

    support, query = (
        {"x": a, "y": b, "head": torch.full(b.shape, head)} for a, b, head in ((x, y, 0), (u, v, 1))
    )
    return Setup(seeded(0, TwoHeads), loss, mn.TaskBatch(support, query))


class Untracked(nn.Module):
    """Weights that are used again without their gradient, below and above where it comes from;
    their φ is read after it is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            torch.tanh(self.embed(x))
            @ self.hidden.weight.detach()
            @ self.hidden.weight.detach().square()
        )
        x = self.hidden(x) + x @ self.embed.weight.detach() @ self.head.weight.detach()
        return self.head(torch.tanh(x)) @ self.head.weight.detach() @ self.embed.weight


def strided() -> Setup:
    """Parameters in other memory layouts than the usual: channels last, and transposed."""
    setup = conv_net(tasks=2)
    for module in setup.model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        elif isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.T.contiguous().T
    assert sum(not p.is_contiguous() for p in setup.model.parameters()) > 1
    return setup


SETUPS: dict[str, Callable[[], Setup]] = {
    "mlp": lambda: mlp(tasks=2, hidden=8),
    "conv_net": lambda: conv_net(tasks=2, dropout=0.3),
    "tied": lambda: Setup(seeded(0, lambda: Tied(None)), F.cross_entropy, mlp(tasks=2).tasks),
    "untracked": lambda: Setup(seeded(0, Untracked), F.cross_entropy, mlp(tasks=2).tasks),
    "two_heads": two_heads,
    "strided": strided,
}
ESTIMATORS = {
    "loss": mn.FOBMAML(nu=0.1),
    "gradient": mn.FOBMAML(nu=0.1, nudge="gradient"),
    "gradient, shifted": mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
    "gradient, solution": mn.FOBMAML(nu=0.1, nudge="gradient", start="solution"),
    "solution": mn.FOBMAML(nu=0.1, start="solution"),
    "none": mn.FOMAML(),
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_as_with_whole_gradients(setup: str, estimator: str):
    """Displacements, losses and residuals of every step."""
    made, chosen = SETUPS[setup](), ESTIMATORS[estimator]
    before = Snapshot(made.model)
    assert_same(solutions(made, AS_IT_COMES, chosen), solutions(made, WHOLE, chosen), 1e-12)
    before.assert_unchanged()


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_residuals_are_those_of_the_stacked_engine(nudge: str):
    setup = mlp(tasks=1, hidden=8)
    inplace = solutions(setup, AS_IT_COMES, mn.FOBMAML(nu=0.1, nudge=nudge))
    stacked = solutions(setup, AS_IT_COMES, mn.FOBMAML(nu=0.1, nudge=nudge), "stacked")
    residuals = torch.cat([s.residuals for s in stacked], 1)
    torch.testing.assert_close(
        torch.cat([s.residuals for s in inplace], 1), residuals, rtol=1e-10, atol=0
    )
    assert float(residuals.min()) > 0.01


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("estimator", ["loss", "gradient", "none"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_that_come_in_parts(use_reentrant: bool, estimator: str):
    """Re-entrant checkpoints run backward passes within the backward pass, so that a tied
    parameter's gradient is there twice.
    """
    tasks, chosen = mlp(tasks=2).tasks, ESTIMATORS[estimator]
    apart, plain = (
        Setup(seeded(0, lambda r=r: Tied(r)), F.cross_entropy, tasks) for r in (use_reentrant, None)
    )
    assert_same(solutions(apart, AS_IT_COMES, chosen), solutions(plain, WHOLE, chosen), 1e-12)


def test_parameters_seen_by_one_of_the_losses_only():
    """The proximal term acts exactly once a step on each of them; the head that nobody uses stays
    where it is.
    """
    setup = two_heads()
    result = gradient(setup, mn.FOBMAML(nu=0.1), "inplace", solver=AS_IT_COMES)
    expected = by_hand(setup, steps=4)
    assert relative_error(result, expected) < 1e-10
    assert float(result["heads.1.weight"].norm()) > 0.01
    assert torch.equal(result["heads.2.weight"], torch.zeros(3, 5, dtype=torch.float64))


class Elsewhere(nn.Module):
    """One large parameter that the loss ignores, pulled by the proximal term alone."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.arange(20.0))
        self.small = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.small


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_without_a_gradient_the_proximal_term_pulls_once_a_step(offset: float):
    """d_K = (1 − αλ)^K d_0, with one pass and with two."""
    setup = Setup(
        Elsewhere().double(),
        F.mse_loss,
        mn.TaskBatch(*[(torch.ones(1, 3, dtype=torch.float64),) * 2] * 2),
    )
    learner = learner_for(setup, engine="inplace")
    start = {
        "large": torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(0),
        "small": torch.zeros(1, dtype=torch.float64),
    }
    expected = start["large"] * (1 - 0.1 * 2.0) ** 4
    with InplaceEngine().session(
        learner.problem(), setup.tasks, width=1, seed=0, cost=Cost()
    ) as groups:
        solution = next(groups).solve(
            AS_IT_COMES, offsets=[offset], nudge="loss" if offset else None, start=start
        )
    torch.testing.assert_close(solution.displacement["large"], expected, rtol=1e-14, atol=0)
    norms = (2.0 * torch.linspace(-1, 1, 20, dtype=torch.float64)).norm() * 0.8 ** torch.arange(
        4, dtype=torch.float64
    )
    torch.testing.assert_close(solution.residuals[:, 0], norms, rtol=1e-12, atol=0)


def test_without_a_gradient_a_force_pulls_once_a_step():
    """d_K = (1 − αλ)^K d_0 + ((1 − αλ)^K − 1) ν p / λ, with a λ for every entry."""
    setup = Setup(
        Elsewhere().double(),
        F.mse_loss,
        mn.TaskBatch(*[(torch.ones(1, 3, dtype=torch.float64),) * 2] * 2),
    )
    lam = {
        "large": torch.linspace(1, 3, 20, dtype=torch.float64),
        "small": torch.tensor(2.0, dtype=torch.float64),
    }
    learner = learner_for(setup, engine="inplace", lam=lam)
    start = {
        "large": torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(0),
        "small": torch.zeros(1, dtype=torch.float64),
    }
    force = {
        "large": torch.linspace(5, -2, 20, dtype=torch.float64).unsqueeze(0),
        "small": torch.zeros(1, dtype=torch.float64),
    }
    left = (1 - 0.1 * lam["large"]) ** 4
    expected = left * start["large"] + (left - 1) * 0.3 * force["large"] / lam["large"]
    with InplaceEngine().session(
        learner.problem(), setup.tasks, width=1, seed=0, cost=Cost()
    ) as groups:
        solution = next(groups).solve(
            AS_IT_COMES, offsets=[0.3], nudge="gradient", force=force, start=start
        )
    torch.testing.assert_close(solution.displacement["large"], expected, rtol=1e-14, atol=1e-15)


class Bounded(nn.Module):
    """torch scales rows of this embedding down when they are used: φ is not what the engine has
    written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 6, max_norm=1.0)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x[:, 0] > 0).long()))


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_parameters_that_the_model_writes(nudge: str):
    setup = Setup(seeded(0, Bounded), F.cross_entropy, mlp(tasks=2).tasks)
    assert float(setup.model.embed.weight.detach()[:2].norm(dim=1).min()) > 1.5
    expected, result = (
        gradient(setup, mn.FOBMAML(nu=0.1, nudge=nudge, stencil="forward"), "inplace", solver=s)
        for s in (WHOLE, AS_IT_COMES)
    )
    assert relative_error(result, expected) < 1e-12
    assert float(expected["embed.weight"].norm()) > 0.01


def doubled(g: Tensor) -> Tensor:
    return 2 * g


def emptied(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("estimator", ["loss", "gradient"])
def test_hooks_of_the_user_come_first(estimator: str):
    setup, chosen = mlp(tasks=2, hidden=8), ESTIMATORS[estimator]
    plain = solutions(setup, AS_IT_COMES, chosen)
    weight, bias = setup.model[0].weight, setup.model[2].weight
    weight.register_hook(doubled)
    bias.register_post_accumulate_grad_hook(emptied)
    hooked = solutions(setup, AS_IT_COMES, chosen)
    assert_same(hooked, solutions(setup, WHOLE, chosen), 1e-12)
    assert relative_error(hooked[0].displacement, plain[0].displacement) > 0.01
    assert len(bias._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["0.weight", "all"])
def test_low_precision_is_as_with_whole_gradients(dtype: torch.dtype, which: str):
    """φ − θ in 8 or 11 bits says nothing about d: such parameters wait until both passes are
    done.
    """
    setup = mlp(tasks=2, hidden=8)
    low, tasks = setup.model.float(), setup.tasks.to(torch.float32)
    if which == "all":
        low, tasks = low.to(dtype), tasks.to(dtype)
    else:
        low[0].to(dtype).register_forward_pre_hook(lambda module, inputs: inputs[0].to(dtype))
        low[0].register_forward_hook(lambda module, inputs, output: output.float())
    chosen = Setup(low, setup.loss, tasks)
    a, b = (solutions(chosen, solver) for solver in (AS_IT_COMES, WHOLE))
    assert all(leaf.dtype == torch.float32 for leaf in a[0].displacement.values())
    assert_same(a, b, 1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_residuals_in_single_precision(scale: float):
    """Two passes are measured by the motion of d, whose start is known up to the rounding of φ:
    about 2⁻²⁴‖θ‖/α.
    """
    setup = mlp(tasks=1, hidden=8)
    with torch.no_grad():
        setup.model[0].bias.mul_(scale)
        for parameter in setup.model.parameters():
            parameter.copy_(parameter.float())
    data = setup.tasks.to(torch.float32)
    truth = solutions(Setup(setup.model, setup.loss, data.to(torch.float64)), WHOLE)
    theta = torch.cat([p.detach().flatten() for p in setup.model.parameters()]).norm()
    measured = solutions(Setup(setup.model.float(), setup.loss, data), AS_IT_COMES)
    for exact, rounded in zip(truth, measured, strict=True):
        assert float((exact.residuals - rounded.residuals).abs().max()) < 2**-24 * float(
            theta
        ) / 0.1 + 1e-6 * float(exact.residuals.max())


def test_no_hook_stays_when_a_pass_fails_between_two_gradients():
    """The gradients of the upper layers have moved d already; nothing of it may be left."""
    setup = mlp(tasks=2, hidden=8)

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise RuntimeError("planned")

    expected = gradient(setup, None, "inplace")
    handle = setup.model[0].register_forward_hook(lambda module, inputs, output: Bomb.apply(output))
    before = Snapshot(setup.model)
    with pytest.raises(RuntimeError, match="planned"):
        gradient(setup, None, "inplace")
    before.assert_unchanged()
    handle.remove()
    assert relative_error(gradient(setup, None, "inplace"), expected) == 0


# --------------------------------------------------------------------------------- on a CUDA device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Recurrent(nn.Module):
    """cuDNN's LSTM, whose weights move to another storage in the middle of a solve."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 4, -1))[0][:, -1])


@needs_cuda
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("estimator", ["loss", "gradient"])
@pytest.mark.parametrize("model", ["mlp", "conv_net", "lstm"])
def test_cuda_is_as_with_whole_gradients(model: str, estimator: str, stream: bool):
    """There backward passes and hooks run in a thread of their own, and on the stream of the
    forward pass.
    """
    setup = (
        SETUPS[model]()
        if model != "lstm"
        else Setup(seeded(0, Recurrent), F.cross_entropy, mlp(tasks=2).tasks)
    )
    setup = Setup(setup.model.cuda(), setup.loss, setup.tasks.to("cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side if stream else torch.cuda.current_stream()):
        results = [
            solutions(setup, solver, ESTIMATORS[estimator]) for solver in (AS_IT_COMES, WHOLE)
        ]
        assert_same(*results, 1e-9)


@needs_cuda
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_cuda_memory_is_that_of_a_training_step_and_three_copies(nudge: str):
    """Counted by the allocator itself."""
    model = nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())),
        nn.Linear(1024, 3),
    ).cuda()
    x, y = torch.randn(1, 64, 1024, device="cuda"), torch.randint(3, (1, 64), device="cuda")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    setup = Setup(model, F.cross_entropy, mn.TaskBatch((x, y), (x, y)))

    def peak(run: Callable[[], Any]) -> int:
        run()  # kernels are chosen and workspaces taken at the first call
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    plain = peak(lambda: F.cross_entropy(model(x[0]), y[0]).backward())
    model.zero_grad(set_to_none=True)
    learner = learner_for(setup, mn.FOBMAML(nu=0.1, nudge=nudge), "inplace", solver=AS_IT_COMES)
    assert peak(lambda: learner.meta_gradient(setup.tasks)) <= 1.05 * (plain + 3 * size)
    assert plain >= size
