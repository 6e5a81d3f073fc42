"""Hypergradients of any bilevel problem: the derivative of an outer loss through the solution of an
inner one.

    minimise over x:  F(x) = f(x, φ*(x))   with   φ*(x) = argmin_φ g(x, φ)

The identity behind it (paper, § General Discussion, completed by the term in which f depends on x
itself): with φ_ν = argmin_φ g(x, φ) + ν f(x, φ),

    ∇F(x) = d/dν ∂_x[g + ν f](x, φ_ν)  at  ν = 0,

where ∂_x is taken at fixed φ: plain first-order gradients of the user's two functions.

Online, where φ is a live model that trains on, `Unrolled` differentiates through its last steps.
"""

from metanudge.bilevel.solve import Hypergradient, hypergradient, solve_bilevel
from metanudge.bilevel.unrolled import Unrolled, UnrolledStats

__all__ = ["Hypergradient", "Unrolled", "UnrolledStats", "hypergradient", "solve_bilevel"]
