"""Settings of the whole suite."""

import torch

# The tests' tensors are tiny: one thread is faster than handing work over, much faster where cores are shared.
torch.set_num_threads(1)
