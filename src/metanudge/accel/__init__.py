"""Faster gradients for models that are chains of common layers, and meta-steps as CUDA graphs.

Known to the stacked engine by its registry only (see `engines.stacked`). The library works
without this folder, slower.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from metanudge.accel.chain import Chain
from metanudge.accel.group import ChainGroup
from metanudge.accel.layers import NoChain
from metanudge.accel.recordings import Recordings
from metanudge.engines.stacked import Offer, Recorder, register
from metanudge.problem import Problem
from metanudge.task import Batch, Stack


class Chains:
    """Takes the gradients of chains of layers on pairs of tensors."""

    def offer(self, problem: Problem, stack: Stack) -> Offer | str:
        """What a chain makes of these tasks, or why the model is none."""
        sets = (stack.support, stack.query)
        if not all(map(_is_pair, sets)):
            return "no native layers: the data are no pairs of tensors"
        try:
            chain = Chain.of(problem)
        except NoChain as reason:
            return f"no native layers: {reason}"
        blocks = [chain.why_no_blocks(inputs) for inputs, _ in sets]
        why = next((reason for reason in blocks if reason is not None), None)
        loss = "" if chain.has_cross_entropy else ", the loss by torch.func (no F.cross_entropy)"
        path = "fused blocks" if why is None else f"native layers (no fused blocks: {why})"
        paths = path + loss, "native layers, twice differentiable" + loss
        return Offer(partial(ChainGroup, chain, paths), *paths, fused=why is None)

    def recorder(self) -> Recorder:
        """CUDA graphs."""
        return Recordings()


def _is_pair(batch: Batch) -> bool:
    return (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and all(isinstance(leaf, Tensor) for leaf in batch)
    )


register(Chains())
