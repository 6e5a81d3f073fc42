"""Checkpoints that survive a crash at any instant and tell when they are damaged.

A checkpoint is a folder: one safetensors file per group of tensors, `state.json` for everything
else, and `manifest.json` with the size and sha256 of each file. Nothing is pickled, so loading a
stranger's checkpoint runs none of its code, and `model.safetensors` opens in any program that reads
the format.

    store = CheckpointStore("runs/omniglot/checkpoints")
    store.save(
        step, {"model": model.state_dict()}, {"optimizer": optimizer.state_dict()}, best=improved
    )
    ...
    checkpoint = store.load()  # or store.load("best"), or store.load(300)
    model.load_state_dict(checkpoint.tensors["model"])
    optimizer.load_state_dict(checkpoint.state["optimizer"])

Models that are spread over ranks have the same checkpoints, by `metanudge.training.checkpoint.
sharded`: what is on the disk is whole.

Three parts: values (`pack`, `unpack`); files that vouch for themselves; folders,
one (`save`, `load`) and many (`CheckpointStore`).
"""

from metanudge.training.checkpoint.store import Checkpoint, CheckpointStore, load, save
from metanudge.training.checkpoint.values import pack, unpack
from metanudge.training.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "load",
    "pack",
    "save",
    "unpack",
]
