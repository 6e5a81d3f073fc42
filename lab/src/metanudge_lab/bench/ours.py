"""metanudge's own estimators as contenders: `MetaLearner.backward`, as a user's training loop calls
it.
"""

from __future__ import annotations

from metanudge.engine_choice import EngineName
from metanudge.estimators import (
    ESMAML,
    ESTIMATORS,
    FOBMAML,
    FOMAML,
    IMAML,
    MAML,
    Estimator,
    Exact,
    Reptile,
    Stats,
)
from metanudge.learner import MetaLearner
from metanudge.solvers import GradientDescent
from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender, Work
from metanudge_lab.bench.workload import Workload


def prepare(
    workload: Workload, estimator: Estimator, engine: EngineName = "auto"
) -> ReadyContender:
    """A learner around its own copy of the model."""
    model = workload.copy_model()
    solver = GradientDescent(lr=workload.lr, steps=workload.steps)
    learner = MetaLearner(
        model, workload.loss, lam=workload.lam, solver=solver, estimator=estimator, engine=engine
    )
    last: list[Stats] = []

    def step() -> Gradient:
        learner.zero_grad(set_to_none=True)
        last[:] = [learner.backward(workload.tasks, metrics=False)]
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def work() -> Work:
        return Work(last[0].support_gradients, last[0].query_gradients, last[0].hessian_products)

    return ReadyContender(step, work, engine=lambda: last[0].engine)


def _contender(name: str, label: str, estimator: Estimator, method: str) -> Contender:
    return Contender(
        name, label, "metanudge", method, lambda workload: prepare(workload, estimator)
    )


OURS = (
    _contender("fobmaml", "FO-B-MAML as by default", FOBMAML(), "FO-B-MAML"),
    _contender("fobmaml-loss", "FO-B-MAML, loss nudge", FOBMAML(nu=0.1), "FO-B-MAML"),
    _contender(
        "fobmaml-gradient",
        "FO-B-MAML, gradient nudge",
        FOBMAML(nu=0.1, nudge="gradient"),
        "FO-B-MAML gradient",
    ),
    _contender(
        "fobmaml-tangent", "FO-B-MAML, tangent", FOBMAML(stencil="tangent"), "FO-B-MAML tangent"
    ),
    _contender("maml", "MAML", MAML(), "MAML"),
    _contender("fomaml", "FO-MAML", FOMAML(), "FO-MAML"),
    _contender("reptile", "Reptile", Reptile(), "Reptile"),
    _contender("imaml", "iMAML, 5 CG steps", IMAML(cg_steps=5), "iMAML"),
)

# Random directions and dense Hessians are not there for their speed.
_APART = (ESMAML, Exact)
_LISTED = (FOBMAML, MAML, FOMAML, Reptile, IMAML)


def added() -> list[Contender]:
    """The estimators that somebody added to metanudge's, each as it is by default."""
    return [
        _contender(kind.__name__.lower(), kind.__name__, kind(), kind.__name__)
        for kind in ESTIMATORS
        if kind not in (*_LISTED, *_APART)
    ]
