"""Numbers for README and documentation, from the rows in results/: nothing is typed by hand there
that is not compared with this (`tests/test_docs.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"

# what is written in the tables → (nudge, start, ν) in the ablation
VARIANTS = {
    "FOBMAML()": ("loss", "theta", "auto"),
    "FOBMAML(nu=0.1)": ("loss", "theta", "0.1"),
    'FOBMAML(start="shifted")': ("loss", "shifted", "auto"),
    'FOBMAML(nudge="gradient")': ("gradient", "theta", "auto"),
}
PARTS = ("mnist1d", "omniglot", "sinusoid", "overshoot")


def rows(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def trained(variant: str) -> list[str]:
    """Percent after training, with 5 steps / with 16, on each part of the ablation; a training that
    ended in NaN counts 0 there.
    """
    nudge, start, nu = VARIANTS[variant]
    cells = [
        cell
        for cell in rows("ablation")["cells"]
        if cell["cell"].get("stencil") == "symmetric"
        and (cell["cell"]["nudge"], cell["cell"]["start"], cell["cell"]["nu"]) == (nudge, start, nu)
    ]
    found = []
    for part in PARTS:
        of_part = [row for cell in cells if cell["cell"]["part"] == part for row in cell["rows"]]
        pair = [100 * mean(row[key] for row in of_part) for key in ("accuracy", "accuracy_more")]
        found.append("\u00a0/\u00a0".join(f"{value:.1f}" for value in pair) if any(pair) else "NaN")
    return found


def bench(name: str, case: str = "omniglot-cuda-tf32") -> tuple[str, str]:
    """Milliseconds and gigabytes of one meta-step."""
    (row,) = (row for row in rows(f"bench/{case}")["rows"] if row["name"] == name)
    ms = 1e3 * row["seconds"]["median"]
    memory = row["memory_bytes"] or 0
    return f"{ms:.1f}" if ms < 100 else f"{ms:.0f}", f"{memory / 1e9:.1f}"


def sentence(experiment: str) -> str:
    """What RESULTS.md says was measured."""
    text = (RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| \[{experiment}\].*\| ([^|]+) \|$", text, re.MULTILINE)
    assert found is not None, experiment
    return found[1]


def shown(experiment: str, **where: str) -> dict[str, str]:
    """The row of RESULTS.md's table of an experiment that has these texts in these columns, by
    column ("inner_rate" for "inner rate").
    """
    text = (RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {experiment}\n")[2].partition("\n## ")[0]
    wanted = {key.replace("_", " "): value for key, value in where.items()}
    heads: list[str] = []
    for line in section.splitlines():
        if not line.startswith("| "):
            heads = heads if line.startswith("|-") else []
            continue
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        heads = heads or cells
        row = dict(zip(heads, cells, strict=True))
        if wanted.items() <= row.items():
            return row
    raise LookupError(f"no row of {experiment} in RESULTS.md has {wanted}")


def omniglot(method: str, meta_steps: int) -> tuple[str, str]:
    """5-way 1-shot: percent with the 5 steps of training, and with 16."""
    row = shown(
        "omniglot", setting="5-way 1-shot", method=method, **{"meta-steps": str(meta_steps)}
    )
    return row["accuracy, %"], row["with 16 steps, %"]


def transformer(method: str, inner: str = "0.3") -> dict[str, str]:
    """The small GPT: loss in the end and with the gradients of the cheapest method, gradients, and
    how many trainings diverged.
    """
    return shown("transformer", inner_rate=inner, estimate=method)


def default_table() -> str:
    """What might be the default, each at learning rates of its own, on everything that was measured
    so.
    """
    shifted = "FO-B-MAML gradient nudge, shifted start, ν = 0.1"
    heads = ("MNIST-1D, %", "Omniglot, %", "sinusoids, %", "small GPT, loss", "at equal gradients")
    lines = [f"| | {' | '.join(heads)} | failed there |", "|---|---|---|---|---|---|---|"]
    for code, image, nudged, gpt in (
        ("FOBMAML()", "FO-B-MAML", "loss, theta, symmetric, ν auto", "FO-B-MAML, automatic ν"),
        ('FOBMAML(nudge="gradient")', "FO-B-MAML gradient nudge", None, shifted),
        ("MAML()", "MAML", "MAML, autograd products", "MAML"),
        ('MAML(products="difference")', None, "MAML by differences", "MAML by differences"),
        ("FOMAML()", "FO-MAML", "FO-MAML", "FO-MAML"),
    ):
        cells = ["–", "–", "–"]
        if image is not None:
            few, many = omniglot(image, 2000)
            cells[:2] = [percent(shown("mnist1d", method=image)["after 600 iterations"]), few]
            cells[1] += f"; {many}"
        if nudged is not None:
            row = shown("ablation", **{"nudge, start, stencil, ν": nudged})
            cells[2] = "; ".join(
                percent(row[f"sinusoids, own rates{more}"]) for more in ("", ", 16 steps")
            )
        rows = [transformer(gpt, inner) for inner in ("0.1", "0.3", "1")]
        failed = sum(int(row["diverged"].split()[0]) for row in rows)
        of = sum(int(row["diverged"].split()[-1]) for row in rows)
        middle = rows[1]
        cells += [middle["loss"], middle["loss, equal gradients"], f"{failed} of {of}"]
        lines.append(f"| `{code}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(share: str) -> str:
    """A share with its interval.

    Example:
        >>> percent("0.963 ± 0.006")
        '96.3 ± 0.6'
    """
    return " ± ".join(f"{100 * float(part):.1f}" for part in share.split(" ± "))


def along_training(network: str, method: str) -> tuple[str, str]:
    """Median cosine with the gradient of the K steps, and the median relative error, along a
    training.
    """
    found = [
        row
        for cell in rows("along-training")["cells"]
        if (cell["cell"]["network"], cell["cell"]["method"]) == (network, method)
        for row in cell["rows"]
    ]
    middle = [median(row[key] for row in found) for key in ("cosine_steps", "error_steps")]
    return f"{middle[0]:.2f}", f"{100 * middle[1]:.2g}"


def by_differences() -> dict[str, str]:
    """MAML by differences on the Transformer: least cosine in float32, the median in bf16 autocast;
    what a meta-step of 100 million parameters takes at most, as a multiple of as many plain
    gradients.
    """
    quality = [
        row
        for cell in rows("transformer")["cells"]
        for row in cell["rows"]
        if row["kind"] == "quality" and row["method"] == "MAML by differences"
    ]
    cosines = {
        precision: [row["cosine"] for row in quality if row["precision"] == precision]
        for precision in ("fp32", "bf16")
    }
    costs = [
        row["per_gradient"]
        for row in rows("bench/large-gpt-100m")["rows"]
        if row["estimator"] == "maml-difference"
    ]
    return {
        "difference_least": f"{min(cosines['fp32']):.4f}",
        "difference_bf16": f"{median(cosines['bf16']):.3f}",
        "difference_cost": f"{max(costs):.2f}",
    }


# At this commit the benchmark's own loss took half of a plain step of a Llama; seconds of all kinds
# hold it, and ratios are smaller than they should be.
SLOW_LOSS = "a1037b8"
LARGE = {
    "llama-7b": "7.2 billion, bf16",
    "llama-7b-lora": "7.2 billion, bf16, LoRA r = 16",
    "gpt-100m": "110 million",
}
CALLED = {
    "fobmaml": "`FOBMAML(nu=0.1)`",
    "fobmaml-gradient": '`FOBMAML(nu=0.1, nudge="gradient")`',
    "fomaml": "`FOMAML()`",
    "maml-difference": '`MAML(products="difference")`',
    "maml-difference-host": '`MAML(products="difference", trajectory="host")`',
    "maml-autograd": '`MAML(products="autograd")`',
    "learn2learn": "learn2learn",
    "higher": "higher",
    "torchopt": "TorchOpt",
    "unrolled": "by hand, `torch.func`",
}
PRECISION = {"fp32": ", fp32", "tf32": ", TF32", "bf16": ", bf16 autocast", "bf16-true": ""}


def large_table() -> str:
    """Meta-steps on large models beside a plain step."""
    heads = (
        "parameters",
        "estimator",
        "plain step",
        "meta-step",
        "memory beyond a plain step's",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, name in LARGE.items():
        for row in rows(f"bench/large-{case}")["rows"]:
            extra = f"{row['peak_gib'] - row['plain_gib']:.2f} GiB"
            if "beyond" in row and row["adapting"] == row["parameters"]:
                extra += f"; in all {row['beyond']:.2f} bytes a parameter, activations aside"
            cells = (
                name + PRECISION[row["precision"]],
                f"{CALLED[row['estimator']]}, K = {row['steps']}",
                f"{row['plain_s']:.3f} s, {row['plain_gib']:.1f} GiB",
                f"{row['per_gradient']:.2f} × {row['gradients']:g} plain steps",
                extra,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rivals_table() -> str:
    """What each library says to 1.1 billion parameters."""
    found = rows("bench/large-rivals-llama-1b")["rows"]
    ways = ("as it is", "math, no checkpointing")
    lines = [
        "| | with checkpointing | activations kept, attention as matrix products |",
        "|---|---|---|",
    ]
    for contender in dict.fromkeys(row["contender"] for row in found):
        cells = []
        for way in ways:
            one = [row for row in found if (row["contender"], row["try"]) == (contender, way)]
            cells.append(_said(one[0]) if one else "–")
        lines.append(f"| {CALLED[contender]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _said(row: Any) -> str:
    if "error" in row:
        kind, _, words = row["error"].partition(": ")
        return f"`{kind}`: {words.split('. ')[0][:80].rstrip('.: ')}"
    return f"{row['meta_s']:.1f} s, {row['peak_gib']:.0f} GiB"


def silently_wrong() -> str:
    """Relative errors, on the sibling, of gradients through recomputed activations."""
    found = rows("bench/large-rivals-llama-1b")["rows"]
    wrong = [
        f"{CALLED[row['contender']]} {row['sibling_error']:.2f}"
        for row in found
        if row["contender"] in ("learn2learn", "higher", "torchopt", "unrolled")
        and row["try"] == "as it is"
        and row["sibling_error"] is not None
    ]
    return ", ".join(wrong)


def sibling_table() -> str:
    """Cosines to MAML in float64 on the small sibling with adapters."""
    found = [row for row in rows("bench/lora-sibling")["rows"] if "cosine" in row]
    ways = list(dict.fromkeys((row["precision"], row["attention"]) for row in found))
    names = {"fp32": "float32", "tf32": "TF32", "bf16-base": "bf16 base"}
    heads = [names[precision] + (", flash" if how == "flash" else "") for precision, how in ways]
    lines = [f"| adapters | estimator | {' | '.join(heads)} |", "|---" * (2 + len(ways)) + "|"]
    for state, name in dict.fromkeys((row["adapters"], row["estimator"]) for row in found):
        cosines = []
        for precision, how in ways:
            key = {"adapters": state, "estimator": name, "precision": precision, "attention": how}
            values = [row["cosine"] for row in found if key.items() <= row.items()]
            cosines.append(f"{min(values):.4f}" if values else "–")
        lines.append(f"| {state} | {CALLED[name].replace('nu=0.1', '')} | {' | '.join(cosines)} |")
    return "\n".join(lines)


def slow_loss() -> str:
    """What is wrong with the seconds above; empty once they are measured anew."""
    cases = [f"large-{case}" for case in LARGE] + ["large-rivals-llama-1b"]
    if not any(rows(f"bench/{case}")["machine"]["commit"].startswith(SLOW_LOSS) for case in cases):
        return ""
    return (
        "Seconds of the Llamas are to be measured anew: the benchmark's own loss took half of a"
        " plain step, so that they are too long, and multiples of a plain step too near to 1. So is"
        ' `MAML(products="autograd")`, whose error has been mended since.'
    )


def online_table() -> str:
    """Data cleaning online: a row for each method."""
    heads = ("", "accuracy, %", "AUROC", "cos K", "cos 20", "seconds", "peak MB")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows("hyper_cleaning_online")["table"]:
        cosines = [f"{row[key]:.3f}" if row[key] is not None else "–" for key in ("own", "long")]
        values = (
            f"{100 * mean(row['accuracy']):.1f}",
            f"{mean(row['auroc']):.3f}",
            *cosines,
            f"{mean(row['seconds']):.2f}",
            f"{mean(row['megabytes']):.2f}",
        )
        lines.append(f"| {row['method']} | {' | '.join(values)} |")
    return "\n".join(lines)


def substitutions() -> dict[str, str]:
    """What pages write as {{ name }}."""
    table = ["| | MNIST-1D | Omniglot | sinusoids | sinusoids, steps that overshoot |"]
    table += ["|---|---|---|---|---|"]
    table += [f"| `{name}` | {' | '.join(trained(name))} |" for name in VARIANTS]
    cells = [c["cell"] for c in rows("ablation")["cells"] if c["cell"]["part"] == PARTS[0]]
    tried = {tuple(sorted(cell.items() - {("seed", cell["seed"])})) for cell in cells}
    values = {"trained_table": "\n".join(table), "variants": str(len(tried))}
    values["default_table"] = default_table()
    values |= {"large_table": large_table(), "rivals_table": rivals_table()}
    values |= {"sibling_table": sibling_table(), "slow_loss": slow_loss()}
    values["silently_wrong"] = silently_wrong()
    values |= by_differences()
    config = rows("hyper_cleaning_online")["config"]
    values |= {f"online_{key}": str(config[key]) for key in ("seeds", "training_steps")}
    values["online_table"] = online_table()
    for name in (
        "memory-cnn",
        "memory-steps",
        "bias-rates",
        "auto-nu",
        "gradient-quality",
        "inner-rates",
    ):
        values[name.replace("-", "_")] = sentence(name)
    for row in rows("bench/omniglot-cuda-tf32")["rows"]:
        key = row["name"].replace("-", "_")
        values[f"{key}_ms"], values[f"{key}_gb"] = bench(row["name"])
    for row in rows("bench/omniglot-cuda-bf16")["rows"]:
        values[f"{row['name'].replace('-', '_')}_bf16_ms"] = bench(
            row["name"], "omniglot-cuda-bf16"
        )[0]
    best = "FO-B-MAML gradient nudge, shifted start, ν = 0.5"
    values["omniglot_long"] = omniglot(best, 40000)[0]
    for key, name in (
        ("loss", "FO-B-MAML"),
        ("gradient", "FO-B-MAML gradient nudge"),
        ("maml", "MAML"),
        ("fomaml", "FO-MAML"),
    ):
        values[f"omniglot_{key}"], values[f"omniglot_{key}_16"] = omniglot(name, 2000)
    return values
