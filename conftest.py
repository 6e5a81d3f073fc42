"""Settings of the whole suite."""

import importlib.util

import torch

# The tests' tensors are tiny: one thread is faster than handing work over, much faster where cores are shared.
torch.set_num_threads(1)

# Triton comes with torch for CUDA; elsewhere the modules with its kernels cannot even be imported.
NAMES = ("fused", "head", "trunk/cuda", "trunk/kernels", "trunk/first_kernels", "trunk/tail", "trunk/tail_kernels")
TRITON = [f"src/metanudge/engines/{name}.py" for name in NAMES]
collect_ignore = [] if importlib.util.find_spec("triton") else TRITON
