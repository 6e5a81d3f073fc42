"""Every numbered claim of the paper, and every claim of its text with a number in it: which
experiment answers it, or why none can.

What stands in `by` is the name of an experiment, or of one and of some of its statements
("mnist1d: early"); the verdict is theirs, never written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from metanudge_lab.experiments.base import Statement, Verdict, state_of

State = Literal["reproduced", "partly", "not", "unfinished", "untestable"]
STATES: dict[State, str] = {
    "reproduced": "holds",
    "partly": "holds in part",
    "not": "does not hold",
    "unfinished": "not measured yet",
    "untestable": "not testable",
}


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        where: its place, with the paper's own numbers.
        says: in a sentence.
        by: what answers it.
        because: why nothing can, or what the answer leaves out.
        label: of the paper's source, where it has one.
    """

    where: str
    says: str
    by: tuple[str, ...] = ()
    because: str = ""
    label: str = ""

    @property
    def experiments(self) -> tuple[str, ...]:
        """Names of those that answer it."""
        return tuple(dict.fromkeys(one.partition(": ")[0] for one in self.by))

    def state(self, verdicts: Mapping[str, Verdict]) -> State:
        """From the verdicts there are."""
        if not self.by:
            return "untestable"
        if any(name not in verdicts for name in self.experiments):
            return "unfinished"
        found = [statements(one, verdicts) for one in self.by]
        if not all(found):  # a quick run may be too short for some of them
            return "unfinished"
        return state_of([statement for some in found for statement in some])


def statements(one: str, verdicts: Mapping[str, Verdict]) -> list[Statement]:
    """What an entry of `by` names: some statements of a verdict, if it makes them, or all of it."""
    experiment, _, name = one.partition(": ")
    verdict = verdicts[experiment]
    if name:
        return [part for part in verdict.parts if part.name == name]
    if verdict.status == "partly":
        return [Statement(True, verdict.reason), Statement(False, verdict.reason)]
    return [Statement(verdict.status == "reproduced", verdict.reason)]


_SIZES = "the paper gives neither the sizes of its tasks nor the device; the course is measured"

CLAIMS = (
    Claim(
        "Proposition 1",
        "The meta-gradient is −λ times the derivative of the nudged solution in ν at ν = 0.",
        ("bias-rates: nu forward", "bias-rates: nu symmetric"),
        "differences converge to the implicit gradient at their orders",
        "prop:1",
    ),
    Claim(
        "Equations 14, 18 and 19; Proposition 2",
        "The bias of exact solves is O(λν) with forward and O(λν²) with symmetric differences.",
        ("bias-rates: nu forward", "bias-rates: nu symmetric"),
        label="prop:refined_bias",
    ),
    Claim(
        "Equations 18 and 19; Proposition 2",
        "The constants of these orders are L₁/μ + L₀L̂₂/μ² and L₂/μ + (L₁L̂₂ + L₀L̂₃)/μ² + L₀L̂₂²/μ³.",
        ("bias-constants: scale",),
    ),
    Claim(
        "Equation 27",
        "The forward bias is at most (L₀/λ)(L₁ + L₀L̂₂/λ)ν + 2δ/ν for λ ≥ 2L̂₁.",
        ("bias-constants: forward bound",),
    ),
    Claim(
        "Equations 30 and 32",
        "‖z″‖ ≤ 𝒞₂ with its formula; the symmetric error is at most λν²𝒞₃/6 + λδ/ν.",
        ("bias-constants: second derivative", "bias-constants: symmetric bound"),
    ),
    Claim(
        "After equation 27; equation 33",
        "The best ν is √(2λ²δ/(L₀(L₁λ + L₀L̂₂))) with forward and (3δ/𝒞₃)^⅓ with symmetric"
        " differences.",
        ("bias-constants: forward best ν", "bias-constants: symmetric best ν"),
    ),
    Claim(
        "Equations 16 and 17; Corollary 1",
        "With inner precision δ and the best ν the bias is O(λδ^½) at ν ~ δ^½, and O(λδ^⅔) at"
        " ν ~ δ^⅓.",
        ("bias-rates: delta forward", "bias-rates: delta symmetric"),
        label="corr1",
    ),
    Claim(
        "Proposition 3",
        "The smoothness of F_i grows with its gradient, with constants L₁/4 and L̂₂/(4λ).",
        ("convergence: constants", "convergence: global"),
        label="prop:smooth",
    ),
    Claim(
        "Proposition 3, classical smoothness",
        "With μ-strong convexity ‖∇F_i‖ is at most G = λL₀/μ.",
        ("bias-constants: gradient",),
        "the constant ℒ₀ + Gℒ₁ that follows has the factors of the proposition",
    ),
    Claim(
        "Theorem 1, deterministic",
        "ClippedGD reaches ‖∇F‖ ≤ ε + b in O(ℒ₀Δ/ε² + ℒ₁²Δ/ℒ₀) steps; each lowers F as its proof"
        " says.",
        ("convergence: proof", "convergence: floor", "outer-rates: deterministic"),
        "the number of steps itself is far below the bound wherever it was counted",
        "Th1",
    ),
    Claim(
        "Theorem 1, stochastic",
        "With sampled tasks ClippedGD takes O(Δσ̃² max(ℒ₀/ε⁴, ℒ₁⁴/ℒ₀³)) steps.",
        ("outer-rates: clipped",),
    ),
    Claim(
        "Theorem 2",
        "SGD takes O(ℒΔ/ε² + ℒΔσ̃²/ε⁴) steps.",
        ("outer-rates: sgd",),
        label="Th2",
    ),
    Claim(
        "Abstract and § 5.2",
        "Normalized or clipped gradient methods suit the meta-objective better than plain descent.",
        ("convergence: clipped", "convergence: inner growth"),
    ),
    Claim(
        "Abstract and Conclusion",
        "With SNGDM (momentum) convergence is superior.",
        ("convergence: momentum", "convergence: sampled"),
    ),
    Claim(
        "§ 5.3, Complexity Comparison",
        "An inner solve by SGD to precision δ takes O(σ²/δ) steps.",
        ("inner-noise: inner steps",),
    ),
    Claim(
        "§ 5.3, Stochastic Case; Contribution 4",
        "ε-stationarity costs ε⁻⁶ gradients with forward, ε⁻⁵·⁵ with symmetric differences.",
        ("inner-noise: total",),
    ),
    Claim(
        "Table 1, compute",
        "A meta-gradient takes every method O(√κ log(1/ε)) inner steps.",
        ("complexity: steps",),
        label="tab:1",
    ),
    Claim(
        "Table 1, memory",
        "MAML's memory is that of the activations times the inner steps, FO-B-MAML's Mem(θ).",
        ("complexity: memory", "complexity: mem theta", "memory-steps: flat"),
    ),
    Claim(
        "Table 1, bias",
        "The bias is δ for MAML and iMAML, 1 for FO-MAML and Reptile, √δ and δ^⅔ for FO-B-MAML.",
        ("complexity: bias", "complexity: biased"),
    ),
    Claim(
        "§ 5.3, Memory Efficiency",
        "The two subproblems solved one after the other leave the peak that of first-order"
        " training.",
        ("memory-cnn: first order", "memory-width: first order"),
    ),
    Claim(
        "Figure 1, above",
        "FO-B-MAML's error falls with every inner step, FO-MAML's and Reptile's do not.",
        ("gradient-quality: more steps",),
        label="fig:acc",
    ),
    Claim(
        "Figure 1 and § 6.1",
        "It outperforms iMAML with 2 or 5 conjugate-gradient steps, and is competitive otherwise.",
        (
            "gradient-quality: imaml-2",
            "gradient-quality: imaml-5",
            "outer-loss: imaml",
            "outer-loss: competitive",
        ),
    ),
    Claim(
        "Figure 1, below",
        "Its outer loss ends below that of FO-MAML and Reptile.",
        ("outer-loss: first order",),
    ),
    Claim(
        "§ 3.4 and Figure 1",
        "ES-MAML fails on the synthetic problem.",
        ("gradient-quality: es-maml",),
        "with 20 samples in 20 dimensions; the paper does not say how many it takes",
    ),
    Claim(
        "Figure 2",
        "On MNIST-1D FO-B-MAML follows MAML more closely than other first-order methods.",
        ("mnist1d: tracks",),
        label="fig:mnist_results",
    ),
    Claim(
        "§ 6.2",
        "It is above 0.85 within 100 iterations and ends at about 0.95, competitive with MAML.",
        ("mnist1d: early", "mnist1d: final", "mnist1d: competitive"),
    ),
    Claim("§ 6.2", "FO-MAML remains below 0.55 throughout.", ("mnist1d: fo-maml",)),
    Claim(
        "Table 2",
        "FO-B-MAML reaches 99.24 ± 0.29 and 99.70 ± 0.17 % on Omniglot (5-way, 1 and 5 shots).",
        ("omniglot: accuracy",),
        "in the longest run of FO-B-MAML, one in each setting",
        label="tab:omniglot_results",
    ),
    Claim(
        "Table 2 and § 6.3",
        "It matches or exceeds iMAML (GD) with 3 times fewer inner steps.",
        ("omniglot: imaml", "omniglot: own imaml", "omniglot: fewer"),
    ),
    Claim("§ 6.3", "Longer meta-training would bring more.", ("omniglot: long",)),
    Claim(
        "Figure 3, left",
        "FO-B-MAML's memory stays at first-order training's as channels grow, MAML's does not.",
        ("memory-cnn",),
        label="fig:memory_scalability",
    ),
    Claim(
        "Figure 3, right",
        "The same for the embedding dimension of a Transformer.",
        ("memory-width",),
    ),
    Claim(
        "Figure 3 and § 6.4, megabytes",
        "About 10³ MB at 250 channels, below 3·10² MB at dimension 512.",
        because=_SIZES + " under Figure 3",
    ),
    Claim(
        "§ 6.4",
        "On MNIST-1D MAML takes more than 40 MB, FO-B-MAML 25.",
        ("memory-mnist1d",),
    ),
    Claim(
        "§ 7, equation 20",
        "The same identity learns other hyperparameters: shared parts, λ.",
        ("lambda-effect: learned",),
        "λ alone is learned here; shared parts are tested against autograd in the library",
    ),
    Claim(
        "§ 7, Limitations",
        "Differentiating in ν by AD would bring back MAML's memory.",
        ("complexity: ad in nu",),
    ),
    Claim(
        "Figure 4",
        "The error is flat for ν ≤ 10⁻², falls with K, and rises sharply beyond ν = 0.1.",
        ("nu-sensitivity: flat", "nu-sensitivity: steps", "nu-sensitivity: bias"),
        label="fig:nu_precision",
    ),
    Claim(
        "Appendix A.1",
        "At K = 100 the error is near 10⁻², at K = 5 an order of magnitude above.",
        ("nu-sensitivity: levels",),
        "by how much they differ is compared; how low they are depends on the problem's spectrum,"
        " which the paper does not give",
    ),
    Claim(
        "Appendix A.1",
        "A small ν amplifies the noise of unfinished solves.",
        ("nu-sensitivity: noise",),
    ),
    Claim(
        "Appendix A.1, rule of thumb",
        "ν of 0.1 to 0.5 for K ≤ 10, 0.01 or 0.001 for K ≥ 50.",
        ("nu-sensitivity: rule",),
    ),
    Claim(
        "Figure 5",
        "From λ = 0.1 to 10 the distance of adaptation falls from 3.25 to 1.75, and stability"
        " grows.",
        ("lambda-effect: distance", "lambda-effect: stability"),
        "condition numbers 25 and 5 are what our spectrum was chosen by; of the distances, which"
        " depend on sizes that the paper does not give, the ratio is compared",
        "fig:lambda_effect",
    ),
    Claim(
        "Appendix A.2",
        "λ = 2 is robust across benchmarks; start with λ ≈ 1/α.",
        ("lambda-networks: robust", "lambda-networks: inverse rate"),
    ),
    Claim(
        "After Assumption 4",
        "λ > L̂₁ makes the inner problem strongly convex (assumed of networks too).",
        ("lambda-networks: convex",),
        label="assumption3",
    ),
    Claim(
        "Appendix A.2",
        "λ can be meta-learned by the same differences.",
        ("lambda-effect: learned",),
    ),
    Claim(
        "Figure 6",
        "MAML's memory grows aggressively with the sequence length; FO-B-MAML tracks FO-MAML.",
        ("memory-length: first order", "memory-length: second order"),
        label="fig:transformer_seq_scaling",
    ),
    Claim(
        "Figure 6, megabytes",
        "MAML needs about 10³ MB at a length of 512.",
        because=_SIZES + " under Figure 6",
    ),
    Claim(
        "Appendix B",
        "FO-B-MAML avoids the quadratic growth with the sequence length.",
        ("memory-length: quadratic",),
    ),
    Claim(
        "Algorithm 1",
        "Any inner solver and any meta-optimizer will do.",
        because="it is the algorithm, not a claim; the library's tests run every solver with it",
        label="alg:FOBMAML",
    ),
)
