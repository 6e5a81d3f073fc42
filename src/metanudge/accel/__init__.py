"""Faster gradients for models that are chains of common layers, and meta-steps as CUDA graphs.

Known to the stacked engine by its registry only (see `engines.stacked`). The library works
without this folder, slower.
"""

from metanudge.accel.group import Chains
from metanudge.engines.stacked import register

register(Chains())
