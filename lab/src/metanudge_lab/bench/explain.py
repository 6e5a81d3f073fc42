"""Where the time of a meta-step goes: the cost model beside what the profiler saw."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from metanudge.training.device import computing_in
from metanudge_lab.bench.cases import Case
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, ReadyContender
from metanudge_lab.bench.cost import LeastCost, cost_model
from metanudge_lab.bench.peaks import Peaks, measure_peaks
from metanudge_lab.bench.suite import Result, context, enter, title_of, workload_of
from metanudge_lab.bench.timing import round_robin

_SHOWN = 15
_LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


def explain(case: Case, contender: Contender, config: BenchConfig, device: torch.device) -> Result:
    """LeastCost, bound and profile of one contender's meta-step, as JSON values."""
    workload = workload_of(case, config, device)
    with computing_in(config.precision, device):
        peaks = measure_peaks(device, config.precision, quick=config.quick)
        model = cost_model(workload, config.precision)
        entrant = enter(contender, workload, config)
        times = round_robin({"": entrant.prepared.step}, rounds=config.repeats, device=device)[""]
        seen = _profile(entrant.prepared, device)
    work = entrant.prepared.work()
    cost = model.total(work, peaks)
    return {
        "kind": "explain",
        "case": case.name,
        "title": title_of(case, config),
        "name": contender.name,
        "label": contender.label,
        "engine": entrant.prepared.engine() or contender.package,
        **context(workload, config, device, peaks),
        "work_per_task": asdict(work),
        "seconds": times.describe(),
        "memory_bytes": entrant.memory,
        "flops": cost.flops,
        "flops_per_s": cost.flops / times.median,
        "least_bytes": cost.bytes,
        "roofline_s": cost.seconds,
        "layers": [
            _layer(name, part, peaks)
            for name, part in model.parts(work, peaks).items()
            if part.seconds
        ],
        **seen,
    }


def _layer(name: str, part: LeastCost, peaks: Peaks) -> Result:
    arithmetic = part.flops / peaks.flops
    return {
        "name": name,
        **asdict(part),
        "bound_by": "arithmetic" if arithmetic >= 0.999 * part.seconds else "memory",
    }


def _profile(prepared: ReadyContender, device: torch.device) -> Result:
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        prepared.step()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = profiler.events() or []
    operators = [e for e in events if e.device_type.name == "CPU" and e.name.startswith("aten::")]
    kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    launches = [e for e in events if e.device_type.name == "CPU" and e.name.startswith(_LAUNCHES)]
    return {
        "operators": len(operators),
        "kernels": len(kernels) if on_gpu else None,
        "launches": len(launches) if on_gpu else None,
        "time_of": "kernel" if on_gpu else "operator",
        "time": _shares(
            [(e.name, e.self_device_time_total) for e in kernels]
            if on_gpu
            else [(e.name, e.self_cpu_time_total) for e in events]
        ),
    }


def _shares(spent: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """The names that took longest, and one line for the rest; microseconds in, seconds out."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, microseconds in spent:
        total[name] += microseconds
        calls[name] += 1
    names = sorted(total, key=lambda name: -total[name])
    whole = sum(total.values()) or 1.0
    rows = [
        {"name": n[:80], "calls": calls[n], "seconds": total[n] / 1e6, "share": total[n] / whole}
        for n in names[:_SHOWN]
    ]
    if rest := names[_SHOWN:]:
        other = sum(total[n] for n in rest)
        rows.append(
            {
                "name": f"{len(rest)} others",
                "calls": sum(calls[n] for n in rest),
                "seconds": other / 1e6,
                "share": other / whole,
            }
        )
    return rows
