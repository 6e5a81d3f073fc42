"""Which estimate is closest to which gradient along training, and whether it is close."""

from __future__ import annotations

import math
import statistics

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.along_runs import CORE, KINKED, METHODS, NETWORKS, Config
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.network_errors import TARGETS
from metanudge_lab.experiments.spread import below, short
from metanudge_lab.experiments.transformer_runs import AUTOMATIC, DIFFERENCE

OURS = {"steps": DIFFERENCE, "implicit": AUTOMATIC}
CLOSE = 0.1  # relative error
REACHED = 1e-3  # residual at the optimum over that at θ


def judge(result: Result[Config]) -> Verdict:
    """Who is closest, whether that is close, and whether there is an optimum to be close to."""
    statements = [*compare(result), *_trusted(result)]
    left = [one for one in result.config.networks if one not in _networks(result)]
    statements += [Statement(None, NETWORKS[one]) for one in left]
    return Verdict.of(statements, measured(result), _why(result))


def compare(result: Result[Config]) -> list[Statement]:
    """Ours against FO-MAML and Reptile, network by network."""
    found = []
    for network in _networks(result):
        for target, ours in OURS.items():
            if target == "implicit" and not _reached(result, network):
                continue
            own = errors(result, network, ours, target)
            rivals = (m.FO_MAML, m.REPTILE)
            behind = [one for one in rivals if below(own, errors(result, network, one, target))]
            words = f"{NETWORKS[network]}: {ours} is {{}} to the {TARGETS[target]} than"
            closer = f"{words.format('closer')} {' and '.join(behind) or 'neither'}"
            left = [one for one in rivals if one not in behind]
            contrary = f"{words.format('not clearly closer')} {' and '.join(left)}"
            found.append(Statement(not left, closer, contrary, target))
    return found


def _trusted(result: Result[Config]) -> list[Statement]:
    """How far MAML by differences is from the gradient of the K steps at the worst point, and where
    the implicit gradient is not to be had.
    """
    found = []
    for network in _networks(result):
        values = result.values(f"error_{'steps'}", network=network, method=DIFFERENCE)
        worst = max(math.inf if math.isnan(value) else value for value in values)
        words = (
            f"{NETWORKS[network]}: its error is at most {short(worst)} at all {len(values)} points"
        )
        found.append(Statement(worst <= CLOSE, words, f"{words}, aim {CLOSE:g}", "trust"))
        if not _reached(result, network):
            residual = statistics.median(result.values("residual", network=network))
            text = (
                f"what is closest to the implicit gradient on {NETWORKS[network]}, where the inner"
                f" optimum is not reached (residual {short(residual)} of that at θ)"
            )
            found.append(Statement(None, text, name="implicit"))
    return found


def enough(result: Result[Config]) -> bool:
    """Whether the small networks are measured; the others may wait."""
    return not any(cell["network"] in CORE for cell in result.missing)


def errors(result: Result[Config], network: str, method: str, target: str) -> list[float]:
    """The geometric mean over the points of a training, seed by seed; infinite where an estimate
    was not finite.
    """
    found = []
    for seed in range(result.config.seeds):
        where = {"network": network, "method": method, "seed": seed}
        values = result.values(f"error_{target}", **where)
        fine = values and not any(math.isnan(value) for value in values)
        found.append(statistics.geometric_mean(values) if fine else math.inf)
    return found


def cosine(result: Result[Config], network: str, method: str, target: str) -> float:
    """The median over points and seeds; −1 where an estimate was not finite."""
    values = result.values(f"cosine_{target}", network=network, method=method)
    return statistics.median(-1.0 if math.isnan(value) else value for value in values)


def measured(result: Result[Config]) -> str:
    """The best estimates of each target on each network beside MAML's own, in words."""
    texts = []
    for network in _networks(result):
        for target, name in TARGETS.items():
            found = {
                method: cosine(result, network, method, target)
                for method in METHODS
                if method != m.MAML
            }
            best = sorted(found, key=lambda method: -found[method])[:3]
            told = ", ".join(f"{method} {found[method]:.3f}" for method in best)
            texts.append(f"{NETWORKS[network]}, {name}: {told}")
    return f"Highest median cosines beside MAML's own: {'; '.join(texts)}."


def _why(result: Result[Config]) -> str:
    texts = []
    for network in _networks(result):
        growth = statistics.median(result.values("growth", network=network))
        kinks = "has kinks" if network in KINKED else "is smooth"
        texts.append(
            f"{NETWORKS[network]} {kinks}; its K steps leave {short(growth)} of the residual"
        )
    return f"{'; '.join(texts)}."


def _networks(result: Result[Config]) -> list[str]:
    """Those that are measured with every method and seed."""
    left = {cell["network"] for cell in result.missing}
    return [
        network
        for network in result.config.networks
        if network not in left
        and all(result.rows(network=network, method=method) for method in METHODS)
    ]


def _reached(result: Result[Config], network: str) -> bool:
    return statistics.median(result.values("residual", network=network)) <= REACHED
