"""Experiments, report and benchmark of metanudge: what measures it, beside the library that a wheel
of it holds.
"""
