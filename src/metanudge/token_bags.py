"""What linear methods see of a text: counts of its tokens and of those beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BINS, _LONGEST = 1024, 3
_FACTOR = 1_000_003


def token_bags(inputs: Mapping[str, Any]) -> Tensor:
    """Roots of the counts of runs of up to three tokens, hashed into 1024 bins, of length 1:
    `(..., n, 1024)` in double precision.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [5, 6, 9]])
        >>> bags = token_bags({"input_ids": ids, "attention_mask": (ids > 0).long()})
        >>> bags.shape, round(float(bags[0] @ bags[1]), 3)
        (torch.Size([2, 1024]), 0.707)
    """
    ids: Tensor = inputs["input_ids"].cpu()
    mask: Tensor = inputs["attention_mask"].cpu().bool()
    bags = torch.zeros(*ids.shape[:-1], _BINS, dtype=torch.float64)
    run, there = torch.zeros_like(ids), torch.ones_like(mask)
    for length in range(1, min(_LONGEST, ids.shape[-1]) + 1):
        count = ids.shape[-1] - length + 1
        run = run[..., :count] * _FACTOR + ids[..., length - 1 :] + 1
        there = there[..., :count] & mask[..., length - 1 :]
        bags.scatter_add_(-1, (run * 2_654_435_761 >> 12) % _BINS, there.double())
    bags = bags.sqrt()
    return bags / bags.norm(dim=-1, keepdim=True).clamp(min=1e-12)
