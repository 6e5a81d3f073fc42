"""A meta-step in place on large Transformers: seconds per gradient, and memory, beside a plain
training step's.

python lab/benchmarks/large.py gpt-100m --out results/bench
python lab/benchmarks/large.py llama-1b llama-7b-lora --estimators fobmaml maml-difference

Random weights, random tokens: neither changes what a step costs. Seconds are measured round-robin
with those of a plain gradient (forward, backward, nothing else). `per gradient` is the time of a
meta-step over that of as many plain gradients as it takes; memory is the allocator's peak.
Activations are what a forward and a backward pass take beside parameters where every gradient is
dropped as soon as it is there; `beyond` are the bytes that the meta-step takes without them, a
parameter that adapts; `extra_gib` is what it takes more than a plain step.

Rows are saved one by one; the same command on the same commit and machine goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.training.device import Precision, computing_in
from metanudge.training.files import write_text
from metanudge_lab.bench.timing import round_robin
from metanudge_lab.device_memory import release
from metanudge_lab.experiments.transformer_tasks import GPT
from metanudge_lab.provenance import provenance, same_machine

GIB = 2**30
ATTENTION: dict[str, SDPBackend | None] = {
    "torch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
ESTIMATORS: dict[str, Estimator] = {
    "fomaml": mn.FOMAML(),
    "fobmaml": mn.FOBMAML(nu=0.1),
    "fobmaml-gradient": mn.FOBMAML(nu=0.1, nudge="gradient"),
    "maml-difference": mn.MAML(products="difference", epsilon=1e-3),
    "maml-difference-host": mn.MAML(products="difference", epsilon=1e-3, trajectory="host"),
    "maml-autograd": mn.MAML(products="autograd"),
}


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the model on the default device.
        precisions: that it is measured in; "bf16-true" means parameters in bfloat16.
        rows, length: sequences of the support set and of the query set, and tokens of each.
        vocabulary: how many tokens there are.
        lam, lr: of the inner problem.
    """

    build: Callable[[], nn.Module]
    precisions: tuple[str, ...]
    rows: int
    length: int
    vocabulary: int
    lam: float = 2.0
    lr: float = 0.01


def _gpt(rows: int) -> Case:
    sizes = {"symbols": 16384, "length": 512, "width": 768, "layers": 12, "heads": 12}
    return Case(lambda: GPT(**sizes), ("fp32", "tf32", "bf16"), rows, 512, sizes["symbols"])


def _llama(width: int, inside: int, layers: int, heads: int, *, lora: bool = False) -> Case:
    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=inside,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            vocab_size=32000,
            use_cache=False,
            attn_implementation="sdpa",
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            from peft import LoraConfig, get_peft_model

            model.enable_input_require_grads()
            where = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            model = get_peft_model(model, LoraConfig(r=16, target_modules=where))
        return model.train()

    return Case(build, ("bf16-true",), 2, 512, 32000)


CASES: dict[str, Case] = {
    "gpt-100m": _gpt(8),
    "gpt-100m-2-sequences": _gpt(2),
    "llama-tiny": _llama(64, 128, 2, 4),
    "llama-tiny-lora": _llama(64, 128, 2, 4, lora=True),
    "llama-1b": _llama(2048, 8192, 16, 32),
    "llama-1b-lora": _llama(2048, 8192, 16, 32, lora=True),
    "llama-7b": _llama(4096, 14336, 32, 32),
    "llama-7b-lora": _llama(4096, 14336, 32, 32, lora=True),
}


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of every token after the first."""
    out, targets = model(batch[:, :-1]), batch[:, 1:]
    if hasattr(
        out, "logits"
    ):  # in rows: along another axis torch's softmax takes many times longer
        return F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
    return F.cross_entropy(out.float(), targets)


class Rows:
    """What a benchmark has measured, in a file that is written after each row; what the same code
    has measured on the same machine is there already.
    """

    def __init__(self, file: Path, device: torch.device, **beside: Any) -> None:
        self._file = file
        self._found: dict[str, Any] = {"machine": provenance(device), **beside, "rows": []}
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if same_machine(before["machine"], self._found["machine"]):
                self._found["rows"] = before["rows"]

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values."""
        return any(key.items() <= row.items() for row in self._found["rows"])

    def add(self, row: dict[str, Any]) -> None:
        """One more."""
        print(json.dumps(row), flush=True)
        self._found["rows"].append(row)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, json.dumps(self._found, indent=1))


def attending(attention: str) -> Any:
    """Within, attention is computed in one way."""
    backend = ATTENTION[attention]
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


def measure(name: str, args: argparse.Namespace, device: torch.device, rows: Rows) -> None:
    """Rows of one case: each precision, number of steps and estimator."""
    case = CASES[name]
    size = {"sequences": args.sequences or case.rows, "length": args.tokens or case.length}
    common = {"case": name, "tasks": args.tasks, "attention": args.attention, "rounds": args.rounds}
    wanted = [
        {**common, **size, "precision": precision, "steps": steps, "estimator": estimator}
        for precision in case.precisions
        for steps in args.steps
        for estimator in args.estimators
    ]
    wanted = [key for key in wanted if not rows.has(**key)]
    if not wanted:
        return
    with torch.device(device):
        torch.manual_seed(0)
        model = case.build()
    total = sum(p.numel() for p in model.parameters())
    adapting = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def tokens(seed: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed)
        shape = size["sequences"], size["length"] + 1
        return torch.randint(case.vocabulary, shape, generator=chance).to(device)

    tasks = [mn.Task(tokens(2 * i), tokens(2 * i + 1)) for i in range(args.tasks)]

    def plain() -> None:
        next_token(model, tasks[0].support).backward()
        model.zero_grad(set_to_none=True)

    for key in wanted:
        inside: Precision = "tf32" if key["precision"] == "bf16-true" else key["precision"]
        with computing_in(inside, device), attending(args.attention):
            base, activations = _peak(plain, device), _activations(model, plain, device)
            row = {
                **key,
                "parameters": total,
                "adapting": adapting,
                "tokens": size["sequences"] * size["length"],
                "plain_gib": base,
                "activations_gib": activations,
            }
            try:
                row |= _one(model, tasks, plain, case, key, args, device)
                if base is not None and activations is not None:
                    row["extra_gib"] = row["peak_gib"] - base
                    row["beyond"] = (row["peak_gib"] - activations) * GIB / adapting
            except (torch.OutOfMemoryError, RuntimeError, mn.MetanudgeError) as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        rows.add(row)
        model.zero_grad(set_to_none=True)
        release(device)


def _one(
    model: nn.Module,
    tasks: list[mn.Task],
    plain: Callable[[], None],
    case: Case,
    key: dict[str, Any],
    args: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    learner = mn.MetaLearner(
        model,
        next_token,
        lam=case.lam,
        solver=mn.GradientDescent(lr=case.lr, steps=key["steps"]),
        estimator=ESTIMATORS[key["estimator"]],
        engine="inplace",
    )
    stats: list[mn.Stats] = []

    def meta() -> None:
        stats.append(learner.backward(tasks, metrics=False))
        model.zero_grad(set_to_none=True)

    peak = _peak(meta, device)
    plain()
    times = round_robin({"plain": plain, "meta": meta}, rounds=args.rounds, device=device)
    last = stats[-1]
    gradients = last.tasks * (last.support_gradients + last.query_gradients)
    ratios = [
        whole / (gradients * one)
        for whole, one in zip(times["meta"].seconds, times["plain"].seconds, strict=True)
    ]
    adapting = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {
        "gradients": gradients,
        "hessian_products": last.hessian_products,
        "plain_s": times["plain"].median,
        "meta_s": times["meta"].median,
        "per_gradient": statistics.median(ratios),
        "per_gradient_range": [min(ratios), max(ratios)],
        "peak_gib": peak,
        "bytes_per_adapting_parameter": None if peak is None else peak * GIB / adapting,
        "gradient_norm": last.gradient_norm,
    }
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            meta()
        table = seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=25)
        print(table, flush=True)
    return found


def _peak(work: Callable[[], None], device: torch.device) -> float | None:
    """GiB that are allocated at most; None where no GPU counts them."""
    work()
    gc.collect()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / GIB


def _activations(model: nn.Module, plain: Callable[[], None], device: torch.device) -> float | None:
    """GiB of a plain step whose gradients are dropped one by one, beside the parameters."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad
    ]
    peak = _peak(plain, device)
    for hook in hooks:
        hook.remove()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return None if peak is None else peak - held / GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument(
        "--estimators", nargs="+", choices=ESTIMATORS, default=["fomaml", "maml-difference"]
    )
    parser.add_argument("--steps", nargs="+", type=int, default=[5])
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="plain steps beside meta-steps")
    parser.add_argument(
        "--attention", choices=ATTENTION, default="torch's choice", help="flash and math are forced"
    )
    parser.add_argument("--sequences", type=int, help="instead of the case's")
    parser.add_argument("--tokens", type=int, help="of a sequence, instead of the case's")
    parser.add_argument("--profile", action="store_true", help="print where a meta-step spends it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.cases:
        measure(name, args, device, Rows(args.out / f"large-{name}.json", device))
        release(device)


if __name__ == "__main__":
    main()
