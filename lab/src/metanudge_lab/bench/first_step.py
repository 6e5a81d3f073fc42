"""How long a user waits for the first meta-step: a fresh process, with empty caches, then with what
the process before left in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Where torch, its compilers and the CUDA driver keep what they compiled.
CACHES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME",
)
_PATIENCE = 300  # seconds
_PROGRAM = "from metanudge_lab.bench.first_step import child; child()"


def first_steps(
    contender: str,
    case: str,
    *,
    device: str,
    precision: str,
    quick: bool = False,
    threads: int | None = None,
    **sizes: int,
) -> list[dict[str, Any]]:
    """Seconds from starting a process to its import, first and second meta-step; once cold and once
    from the caches of that.

    Args:
        contender, case: names.
        device, precision, quick, threads: as in `BenchConfig`.
        sizes: of the case, where they are not its own.
    """
    with tempfile.TemporaryDirectory(prefix="metanudge-bench-") as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        rows = []
        for caches_are in ("empty", "filled"):
            request = {
                "contender": contender, "case": case, "device": device, "precision": precision,
                "quick": quick, "threads": threads,
                "sizes": sizes, "started": time.time(),
            }  # fmt: skip
            rows.append(
                {
                    "contender": contender,
                    "caches": caches_are,
                    **_ask_a_fresh_process(request, caches),
                }
            )
    return rows


def _ask_a_fresh_process(request: dict[str, Any], variables: dict[str, str]) -> dict[str, float]:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"It took longer than {_PATIENCE} s.") from error
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def child() -> None:
    """The fresh process: reads what to do from standard input, writes the times to standard
    output.
    """
    request = json.loads(sys.stdin.read())
    import torch

    from metanudge.training.device import computing_in
    from metanudge_lab.bench.cases import CASES
    from metanudge_lab.bench.contender import choose
    from metanudge_lab.bench.ours import added
    from metanudge_lab.bench.suite import CONTENDERS

    imported = time.time()
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    device = torch.device(request["device"])
    workload = CASES[request["case"]].make(device, quick=request["quick"], **request["sizes"])
    (contender,) = choose([*CONTENDERS, *added()], [request["contender"]])
    ends = []
    with computing_in(request["precision"], device):
        prepared = contender.prepare(workload)
        for _ in range(2):
            prepared.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ends.append(time.time())
    started = request["started"]
    print(
        json.dumps(
            {
                "import_s": imported - started,
                "first_step_s": ends[0] - started,
                "second_step_s": ends[1] - ends[0],
            }
        )
    )
