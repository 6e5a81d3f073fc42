"""One meta-step of MAML on a large Transformer with every library's own code: what each says.

python lab/benchmarks/large_rivals.py llama-1b --out results/bench

Random weights, random tokens, K inner steps of plain SGD, one task, all parameters adapt; the model
and its data are a case of large.py. Every try is a process of its own, so that running out of
memory harms no other. What a rival's gradient is worth is measured beside it: the same try in
float64 on a small sibling against MAML unrolled by hand, since a recomputed forward pass can read
other weights than the first one did, and says nothing.

Rows are saved one by one; the same command on the same commit and machine goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from large import CASES, ESTIMATORS, GIB, Case, Rows, next_token
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import metanudge as mn
from metanudge_lab.device_memory import release

Step = Callable[[], None]  # leaves the meta-gradient in `.grad`
Prepare = Callable[[nn.Module, mn.Task, float, int], Step]
MARK = "row: "


def unrolled(model: nn.Module, task: mn.Task, lr: float, steps: int) -> Step:
    """By hand: `torch.func.functional_call` and `torch.autograd.grad`."""
    theta = dict(model.named_parameters())

    def loss(phi: dict[str, Tensor], batch: Tensor) -> Tensor:
        return next_token(lambda x: functional_call(model, phi, (x,)), batch)

    def step() -> None:
        phi = theta
        for _ in range(steps):
            found = torch.autograd.grad(
                loss(phi, task.support), list(phi.values()), create_graph=True
            )
            phi = {n: p - lr * g for (n, p), g in zip(phi.items(), found, strict=True)}
        loss(phi, task.query).backward()

    return step


def learn2learn(model: nn.Module, task: mn.Task, lr: float, steps: int) -> Step:
    """`MAML` with `clone` and `adapt`."""
    maml = importlib.import_module("learn2learn.algorithms").MAML(model, lr=lr)

    def step() -> None:
        learner = maml.clone()
        for _ in range(steps):
            learner.adapt(next_token(learner, task.support))
        next_token(learner, task.query).backward()

    return step


def higher(model: nn.Module, task: mn.Task, lr: float, steps: int) -> Step:
    """`innerloop_ctx`."""
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    innerloop = importlib.import_module("higher").innerloop_ctx

    def step() -> None:
        with innerloop(model, inner, copy_initial_weights=False) as (adapted, optimizer):
            for _ in range(steps):
                optimizer.step(next_token(adapted, task.support))
            next_token(adapted, task.query).backward()

    return step


def torchopt(model: nn.Module, task: mn.Task, lr: float, steps: int) -> Step:
    """`MetaSGD` and `recover_state_dict`."""
    library = importlib.import_module("torchopt")

    def step() -> None:
        start = library.extract_state_dict(model, by="reference", detach_buffers=True)
        try:
            optimizer = library.MetaSGD(model, lr=lr)
            for _ in range(steps):
                optimizer.step(next_token(model, task.support))
            next_token(model, task.query).backward()
        finally:
            library.recover_state_dict(model, start)

    return step


def ours(estimator: str) -> Prepare:
    """Of large.py, in place; λ = 0 where the estimator can be without."""

    def prepare(model: nn.Module, task: mn.Task, lr: float, steps: int) -> Step:
        learner = mn.MetaLearner(
            model,
            next_token,
            lam=2.0 if estimator.startswith("fobmaml") else 0.0,
            solver=mn.GradientDescent(lr=lr, steps=steps),
            estimator=ESTIMATORS[estimator],
            engine="inplace",
        )
        return lambda: learner.backward([task], metrics=False) and None

    return prepare


CONTENDERS: dict[str, Prepare] = {
    "learn2learn": learn2learn,
    "higher": higher,
    "torchopt": torchopt,
    "unrolled": unrolled,
    **{name: ours(name) for name in ("maml-autograd", "maml-difference", "fomaml", "fobmaml")},
}
FIRST_ORDER = ("maml-difference", "fomaml", "fobmaml")
TRIES = {
    "as it is": "the case's checkpointing, torch's own choice of attention",
    "math": "the case's checkpointing, attention as matrix products, layers that higher can slice",
    "math, no checkpointing": "the same, activations kept",
}


class Sliceable(nn.ModuleList):
    """Whose slices are lists: higher cannot make the module that a slice of torch's own is."""

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


@contextlib.contextmanager
def _attention(way: str) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH) if way.startswith("math") else contextlib.nullcontext():
        yield


def _built(case: Case, way: str, device: torch.device) -> nn.Module:
    with torch.device(device):
        torch.manual_seed(0)
        model: Any = case.build()
    if way != "as it is":
        model.model.layers = Sliceable(model.model.layers)
    if way.endswith("no checkpointing"):
        model.gradient_checkpointing_disable()
    return model


def _task(case: Case, rows: int, length: int, device: torch.device) -> mn.Task:
    def tokens(seed: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed)
        return torch.randint(case.vocabulary, (rows, length + 1), generator=chance).to(device)

    return mn.Task(tokens(0), tokens(1))


def sibling_error(contender: str, way: str, steps: int, device: torch.device) -> float:
    """Relative error of a try's gradient in float64 on `llama-tiny`, to MAML by hand."""
    case = CASES["llama-tiny"]

    def gradient(who: str, how: str) -> Tensor:
        model = _built(case, how, device).double()
        task = _task(case, 2, 32, device)
        with _attention("math"):
            CONTENDERS[who](model, task, 0.1, steps)()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    reference = gradient("unrolled", "math, no checkpointing")
    found = gradient(contender, way)
    if found.shape != reference.shape:
        return float("nan")
    return float((found - reference).norm() / reference.norm())


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The row of one try."""
    case, (contender, way) = CASES[args.case], args.one
    row: dict[str, Any] = {
        "case": args.case,
        "contender": contender,
        "version": _version(contender),
        "try": way,
        "steps": args.steps,
        "tasks": 1,
    }
    try:
        row["sibling_error"] = sibling_error(contender, way, args.steps, device)
    except Exception as error:
        row["sibling_error"], row["sibling_said"] = None, _said(error)
    release(device)
    model = _built(case, way, device)
    task = _task(case, args.sequences or case.rows, args.tokens or case.length, device)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    with _attention(way):
        row["plain_s"], row["plain_gib"], _ = _timed(
            lambda: next_token(model, task.support).backward(), model, device
        )
        try:
            step = CONTENDERS[contender](model, task, case.lr, args.steps)
            row["meta_s"], row["peak_gib"], row["gradient_norm"] = _timed(step, model, device)
        except Exception as error:
            row["error"] = _said(error)
            if device.type == "cuda":
                row["gib_when_it_failed"] = torch.cuda.max_memory_allocated(device) / GIB
    return row


def _timed(step: Step, model: nn.Module, device: torch.device) -> tuple[float, float | None, float]:
    """Seconds of the second run, peak of GiB in it, and the norm of the gradient."""
    cuda = device.type == "cuda"
    for run in range(2):
        model.zero_grad(set_to_none=True)
        release(device)
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(device) / GIB if cuda else None
        if run:
            break
    parts = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack(parts).norm()) if parts else 0.0
    model.zero_grad(set_to_none=True)
    return seconds, peak, norm


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _version(contender: str) -> str:
    if contender not in ("learn2learn", "higher", "torchopt"):
        return torch.__version__ if contender == "unrolled" else mn.__version__
    try:
        return metadata.version(contender)
    except metadata.PackageNotFoundError:
        try:
            return str(getattr(importlib.import_module(contender), "__version__", "unknown"))
        except Exception as error:
            return _said(error)


def _in_own_process(args: argparse.Namespace, contender: str, way: str) -> dict[str, Any]:
    """The row of one try, or what its process ended with."""
    sizes = [f"--{key}={value}" for key in ("sequences", "tokens") if (value := getattr(args, key))]
    command = [sys.executable, __file__, args.case, f"--steps={args.steps}", *sizes]
    row = {"case": args.case, "contender": contender, "try": way, "steps": args.steps, "tasks": 1}
    try:
        done = subprocess.run(
            [*command, "--one", contender, way],
            capture_output=True,
            text=True,
            timeout=args.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"not done after {args.timeout} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return row | {"error": f"exit {done.returncode}: {done.stderr[-300:]}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[n for n in CASES if n.startswith("llama")])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--tries", nargs="+", choices=TRIES, default=list(TRIES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sequences", type=int, help="instead of the case's")
    parser.add_argument("--tokens", type=int, help="of a sequence, instead of the case's")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of one try")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.one:
        print(MARK + json.dumps(measure(args, device)), flush=True)
        return
    rows = Rows(args.out / f"large-rivals-{args.case}.json", device, tries=TRIES)
    for contender in args.contenders:
        for way in args.tries[:1] if contender in FIRST_ORDER else args.tries:
            if not rows.has(**{"contender": contender, "try": way, "steps": args.steps}):
                rows.add(_in_own_process(args, contender, way))


if __name__ == "__main__":
    main()
