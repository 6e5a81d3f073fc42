"""Results as tables: rows of text, so that a terminal without rich can show them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class TextTable:
    """A heading, columns, rows of text, and remarks below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: tuple[int, ...] = (0,)  # columns that are set to the left

    def __str__(self) -> str:
        """As plain text."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [self.title, ""]
        for line in lines:
            cells = [
                cell.ljust(width) if i in self.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  ".join(cells).rstrip())
        return "\n".join([*text, *(["", *self.notes] if self.notes else [])])


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(0.0000123), duration(0.0123), duration(12.3)
        ('12.3 µs', '12.3 ms', '12.3 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def amount(value: float, unit: str) -> str:
    """A number with a decimal prefix.

    Example:
        >>> amount(1234567, "B"), amount(999, "FLOP"), amount(1.3e11, "FLOP/s")
        ('1.23 MB', '999 FLOP', '130 GFLOP/s')
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def comparison(result: Result) -> TextTable:
    """The table of a comparison, fastest first."""
    rows = result["rows"]
    fastest = min((row["seconds"]["median"] for row in rows), default=0.0)
    columns = [
        "contender",
        "by",
        "median",
        "quartiles",
        "× fastest",
        "peak memory",
        "gradients/s",
        "× roofline",
    ]
    body = []
    for row in sorted(rows, key=lambda row: row["seconds"]["median"]):
        seconds = row["seconds"]
        body.append(
            [
                row["label"],
                row["package"],
                duration(seconds["median"]),
                "–".join(duration(q) for q in seconds["quartiles"]),
                f"{seconds['median'] / fastest:.2f}",
                amount(row["memory_bytes"], "B"),
                amount(row["gradients_per_s"], "").strip(),
                f"{row['times_roofline']:.3g}",
            ]
        )
        if "cpu_median" in seconds:
            body[-1].insert(4, duration(seconds["cpu_median"]))
    if any("cpu_median" in row["seconds"] for row in rows):
        columns.insert(4, "CPU time")
    return TextTable(
        f"{result['title']}: {_work(result)}, on {where(result)}",
        tuple(columns),
        tuple(map(tuple, body)),
        tuple(_remarks(result)),
    )


def _remarks(result: Result) -> list[str]:
    rounds = sorted({len(row["seconds"]["samples"]) for row in result["rows"]})
    calls = (
        "One call of each."
        if rounds == [1]
        else f"Medians of {' to '.join(map(str, rounds))} interleaved calls."
    )
    notes = [f"{calls} Rivals run MAML's plain SGD, without our proximal term."]
    notes += [f"{row['label']} failed: {row['error']}" for row in result["failed"]]
    reasons: dict[str, list[str]] = {}
    for row in result["absent"]:
        reasons.setdefault(row["reason"], []).append(row["label"])
    notes += [f"Left out, {reason}: {'; '.join(labels)}" for reason, labels in reasons.items()]
    return notes


def first_steps(result: Result) -> TextTable:
    """The table of what a fresh process takes to its first meta-step."""
    rows = tuple(
        (
            row["contender"],
            row["caches"],
            *(duration(row[key]) for key in ("import_s", "first_step_s", "second_step_s")),
        )
        for row in result["first_step"]
    )
    columns = (
        "a fresh process",
        "compilers' caches",
        "imports",
        "to the end of the first step",
        "the second step",
    )
    return TextTable("How long the first meta-step takes", columns, rows)


def scaling(result: Result) -> TextTable:
    """The table of a scaling measurement: one line for every contender and axis."""
    lines = []
    for curve in result["curves"]:
        points = ", ".join(f"{p['value']}: {_value(curve, p['measured'])}" for p in curve["points"])
        exponent = "launch-bound" if curve["exponent"] is None else f"{curve['exponent']:.2f}"
        lines.append((curve["label"], f"{curve['quantity']} / {curve['axis']}", exponent, points))
    title = f"{result['title']}: how it grows, on {where(result)}"
    notes = (
        (
            "Exponents are slopes in log-log, fitted above the launch-bound regime: where it takes"
            " at least 1.5 times the shortest."
        ),
    )
    return TextTable(
        title,
        ("contender", "quantity", "exponent", "measured"),
        tuple(lines),
        notes,
        left=(0, 1, 3),
    )


def rounding(result: Result) -> TextTable:
    """The table of rounding errors: one line for every contender, precision and path."""
    ratios = {(row["name"], row["precision"]): row for row in result["ratios"]}
    columns = ["contender", "precision", "path", "root mean square", "median", "largest"]
    if ratios:
        columns += ["RMS, blocks / layers", "median, blocks / layers"]
    lines = []
    for row in result["rows"]:
        cells = [
            row["label"],
            row["precision"],
            row["path"],
            *(f"{row[key]:.2e}" for key in ("rms", "median", "largest")),
        ]
        if ratios:
            compared = (
                ratios.get((row["name"], row["precision"])) if row["path"] == "blocks" else None
            )
            cells += [
                "" if compared is None else _ratio(compared[key]) for key in ("rms", "median")
            ]
        lines.append(tuple(cells))
    batches = "1 meta-batch" if result["batches"] == 1 else f"{result['batches']} meta-batches"
    notes = []
    notes.append(
        f"Relative to the meta-gradient of the same learner in float64, over {batches}, each with a"
        " model of its own."
    )
    notes.append(
        "A rounding that flips a choice of ReLU or max-pooling makes an error jump: few large ones"
        " rule the root mean square."
    )
    if ratios:
        notes.append("In brackets 95 % intervals, from a bootstrap over the meta-batches.")
    notes += [f"{row['label']} failed: {row['error']}" for row in result["failed"]] + result[
        "skipped"
    ]
    title = (
        f"{result['title']}: rounding errors of the meta-gradient, {_work(result)}, on"
        f" {where(result)}"
    )
    return TextTable(title, tuple(columns), tuple(lines), tuple(notes), left=(0, 1, 2))


def _ratio(compared: Result) -> str:
    interval = (
        ""
        if compared["interval"] is None
        else f" ({'–'.join(f'{end:.3g}' for end in compared['interval'])})"
    )
    return f"{compared['ratio']:.3g}{interval}"


def _value(curve: Result, value: float) -> str:
    return duration(value) if curve["quantity"] == "time" else amount(value, "B")


def explanation(result: Result) -> list[TextTable]:
    """The cost model, the layers and the operators of an explained meta-step."""
    bound = result["roofline_s"]
    layers = tuple(
        (
            layer["name"],
            amount(layer["flops"], "FLOP"),
            amount(layer["bytes"], "B"),
            layer["bound_by"],
            f"{layer['seconds'] / bound:.1%}",
        )
        for layer in result["layers"]
    )
    spent = tuple(
        (op["name"], f"{op['calls']:,}", duration(op["seconds"]), f"{op['share']:.1%}")
        for op in result["time"]
    )
    title = (
        f"{result['title']}, {result['label']} ({result['engine']}): {_work(result)}, on"
        f" {where(result)}"
    )
    return [
        TextTable(title, ("", "meta-step"), tuple(_facts(result)), left=(0, 1)),
        TextTable(
            "What must be computed",
            ("multiplication, one task", "operations", "least traffic", "bound by", "of the bound"),
            layers,
        ),
        TextTable(
            "Where the time goes (profiled: slower than unobserved)",
            (result["time_of"], "calls", "time", "share"),
            spent,
        ),
    ]


def _facts(result: Result) -> list[tuple[str, str]]:
    work, seconds, bound = (
        result["work_per_task"],
        result["seconds"]["median"],
        result["roofline_s"],
    )
    evaluations = (
        f"{work['support_gradients']:g} support and {work['query_gradients']:g} query gradients"
    )
    if work["hessian_products"]:
        evaluations += f", {work['hessian_products']:g} Hessian products"
    facts = [
        ("per task", evaluations),
        (
            "arithmetic",
            f"{amount(result['flops'], 'FLOP')}, {amount(result['flops_per_s'], 'FLOP/s')} reached",
        ),
        (
            "best product",
            f"{amount(result['peaks']['flops_per_s'], 'FLOP/s')} measured on this machine",
        ),
        (
            "least traffic",
            (
                f"{amount(result['least_bytes'], 'B')},"
                f" {result['flops'] / result['least_bytes']:.3g} FLOP per byte"
            ),
        ),
        (
            "roofline",
            (
                f"{duration(bound)} at best; measured {duration(seconds)}, {seconds / bound:.3g}"
                " times as long"
            ),
        ),
        ("peak memory", amount(result["memory_bytes"], "B")),
        ("operators", f"{result['operators']:,} called"),
    ]
    if result["kernels"] is not None:
        facts.append(
            (
                "kernels",
                f"{result['kernels']:,} on the device, from {result['launches']:,} launches",
            )
        )
    return facts


def where(result: Result) -> str:
    """The device in a few words."""
    machine = result["provenance"]
    threads = f"{machine['threads']} thread" + "s" * (machine["threads"] > 1)
    name = machine["device"] if machine["cuda"] else f"{machine['cpu']}, {threads}"
    return ", ".join(
        [name, *([result["config"]["precision"]] if "precision" in result["config"] else [])]
    )


def _work(result: Result) -> str:
    work = result["workload"]
    return (
        f"{work['tasks']} tasks of {work['support']} + {work['query']} examples, {work['steps']}"
        " steps"
    )
