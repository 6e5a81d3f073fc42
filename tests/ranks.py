"""Several processes on the CPU (gloo), each of them running one function of a test file."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOADED = ["torch.distributed.tensor.parallel", "torch.distributed.checkpoint"]
LIMIT = 120  # seconds; a few on an idle machine


@dataclass(frozen=True)
class Failed:
    """What a rank says instead of an answer."""

    traceback: str


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns on each of so many ranks; what it raises fails the test.

    The ranks are forked from a server that has loaded torch once, and nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", *LOADED, "metanudge.learner"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_work, args=(rank, world, folder, send, function, args))
            for rank, (_, send) in enumerate(pipes)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, send in pipes:
                send.close()
            return [_answer(receive, rank) for rank, (receive, _) in enumerate(pipes)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _answer(receive: Connection, rank: int) -> Any:
    assert wait([receive], LIMIT), f"rank {rank} did not answer in {LIMIT} s"
    try:
        # as bytes: tensors would be fetched from a process that has ended
        found = torch.load(io.BytesIO(receive.recv_bytes()), weights_only=False)
    except EOFError:
        raise AssertionError(f"rank {rank} died") from None
    if isinstance(found, Failed):
        raise AssertionError(f"rank {rank}:\n{found.traceback}")
    return found


def _work(
    rank: int,
    world: int,
    folder: str,
    send: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'meet'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=LIMIT),
        )
        answer = function(*args)
        dist.barrier()
    except BaseException:
        answer = Failed(traceback.format_exc())
    finally:
        written = io.BytesIO()
        torch.save(answer, written)
        send.send_bytes(written.getvalue())
        if dist.is_initialized():
            dist.destroy_process_group()
