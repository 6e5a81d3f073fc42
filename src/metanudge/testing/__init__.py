"""For tests and measurements of meta-learning code: small problems, imprecise solvers, curvature,
live memory.
"""
