"""How right MAML by differences is on adapters of a bfloat16 base: cosine to float64.

python lab/benchmarks/lora_sibling.py --out results/bench

A small Llama, trained a little on Markov chains and rounded to bfloat16, with LoRA adapters in
float32. The reference is MAML unrolled by hand in float64 on the same weights, attention as matrix
products, nothing recomputed. Estimators run in place as they do on large models: with gradient
checkpointing and attention that has no second derivative.

Rows are saved one by one; the same command on the same commit and machine goes on from there.
"""

from __future__ import annotations

import argparse
import copy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from large import Rows, attending
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.training.device import Precision, computing_in

SYMBOLS, LAM = 64, 0.1
ESTIMATORS: dict[str, Estimator] = {
    "maml-difference": mn.MAML(products="difference"),
    "fomaml": mn.FOMAML(),
    "fobmaml": mn.FOBMAML(),
    "fobmaml-gradient": mn.FOBMAML(nu=0.1, nudge="gradient"),
}
WAYS: tuple[tuple[str, str], ...] = (  # precision of the base and of products; attention
    ("fp32", "torch's choice"),
    ("tf32", "torch's choice"),
    ("bf16-base", "torch's choice"),
    ("bf16-base", "flash"),
)


def sequences(transitions: Tensor, rows: int, length: int, chance: torch.Generator) -> Tensor:
    """Markov chains."""
    steps = [torch.randint(SYMBOLS, (rows,), generator=chance)]
    for _ in range(length - 1):
        steps.append(torch.multinomial(transitions[steps[-1]], 1, generator=chance)[:, 0])
    return torch.stack(steps, 1)


def tasks_of(count: int, seed: int, args: argparse.Namespace) -> list[mn.Task]:
    """Chains whose transitions are variations of common ones; model inputs of Hugging Face."""
    shared = 2 * torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(0))
    tasks = []
    for index in range(count):
        chance = torch.Generator().manual_seed(seed + index)
        own = 1.5 * torch.randn(SYMBOLS, SYMBOLS, generator=chance)
        transitions = torch.softmax(shared + own, -1)
        made = [sequences(transitions, args.rows, args.length, chance) for _ in range(2)]
        batches = [sequence.to(args.device) for sequence in made]
        support, query = ({"input_ids": b, "labels": b} for b in batches)
        tasks.append(mn.Task(support, query))
    return tasks


def adapted_base(args: argparse.Namespace) -> nn.Module:
    """A small Llama after some training, its weights those of bfloat16, with LoRA adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=SYMBOLS,
            use_cache=False,
            attn_implementation="sdpa",
        )
    ).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for task in tasks_of(args.pretraining, 1000, args):
        optimizer.zero_grad()
        model(**task.support).loss.backward()
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    where = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=where)).train()


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What adapts, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def in_float64(model: nn.Module, tasks: list[mn.Task], lr: float, steps: int) -> Tensor:
    """MAML unrolled by hand."""
    model = copy.deepcopy(model).double()
    theta = adapters(model)

    def loss(phi: dict[str, Tensor], batch: Any) -> Tensor:
        return functional_call(model, phi, kwargs=batch).loss

    total: Tensor | float = 0.0
    for task in tasks:
        phi: dict[str, Tensor] = dict(theta)
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(steps):
                gradients = torch.autograd.grad(
                    loss(phi, task.support), list(phi.values()), create_graph=True
                )
                phi = {
                    name: p - lr * (g + LAM * (p - theta[name]))
                    for (name, p), g in zip(phi.items(), gradients, strict=True)
                }
            found = torch.autograd.grad(loss(phi, task.query), list(theta.values()))
        total = total + torch.cat([g.flatten() for g in found]) / len(tasks)
    assert isinstance(total, Tensor)
    return total


def estimated(
    model: nn.Module, tasks: list[mn.Task], lr: float, steps: int, way: tuple[str, str], name: str
) -> tuple[Tensor, mn.Stats]:
    """The meta-gradient in place, under checkpointing, on a base of this precision."""
    model = copy.deepcopy(model)
    if way[0] == "bf16-base":
        for p in model.parameters():
            if not p.requires_grad:
                p.data = p.data.bfloat16()
    hugging: Any = model
    hugging.enable_input_require_grads()
    hugging.gradient_checkpointing_enable({"use_reentrant": False})
    learner = mn.MetaLearner(
        model,
        lam=LAM,
        solver=mn.GradientDescent(lr=lr, steps=steps),
        estimator=ESTIMATORS[name],
        engine="inplace",
    )
    inside: Precision = "fp32" if way[0] == "fp32" else "tf32"
    with computing_in(inside, next(model.parameters()).device), attending(way[1]):
        stats = learner.backward(tasks, metrics=False)
    found = [p.grad for p in adapters(model).values()]
    return torch.cat([g.flatten() for g in found if g is not None]), stats


def measure(args: argparse.Namespace, rows: Rows) -> None:
    """Rows: adapters, inner rate, way of computing, estimator."""
    model = adapted_base(args)
    tasks = tasks_of(args.tasks, 0, args)
    common = {"lam": LAM, "steps": args.steps, "tasks": args.tasks}
    for state in ("untrained", "moved"):
        if state == "moved":
            chance = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for name, p in adapters(model).items():
                    if "lora_B" in name:
                        p.copy_(0.05 * torch.randn(p.shape, generator=chance))

        @cache
        def reference(lr: float) -> Tensor:
            return in_float64(model, tasks, lr, args.steps)

        for lr, way, name in product(args.lr, WAYS, args.estimators):
            key = {"adapters": state, "lr": lr, **common, "precision": way[0], "attention": way[1]}
            key["estimator"] = name
            if not rows.has(**key):
                rows.add(
                    {**key, **_compared(reference(lr), model, tasks, lr, args.steps, way, name)}
                )


def _compared(
    reference: Tensor,
    model: nn.Module,
    tasks: list[mn.Task],
    lr: float,
    steps: int,
    way: tuple[str, str],
    name: str,
) -> dict[str, Any]:
    row: dict[str, Any] = {"reference_norm": float(reference.norm())}
    try:
        found, stats = estimated(model, tasks, lr, steps, way, name)
    except (RuntimeError, mn.MetanudgeError) as error:
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return row | {
        "cosine": float(torch.cosine_similarity(found.double(), reference, dim=0)),
        "norm_ratio": float(found.double().norm() / reference.norm()),
        "epsilon_or_nu": stats.nu,
        "estimated_error": stats.error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    parser.add_argument("--lr", nargs="+", type=float, default=[1.0, 5.0])
    for key, value in {"steps": 5, "tasks": 3, "width": 256, "layers": 4, "rows": 8}.items():
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--pretraining", type=int, default=150, help="steps of the base")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measure(args, Rows(args.out / "lora-sibling.json", args.device))


if __name__ == "__main__":
    main()
