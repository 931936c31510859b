"""What limits a kernel, by Nsight Compute's counters.

    PYTHONPATH=src python tools/counters.py --json profile.json      # on a GPU, with ncu
    PYTHONPATH=src python tools/counters.py --table profile.json     # markdown

Each problem of `gradplan bench` that is asked for runs once, with cold caches; ncu reads counters
of its kernels and leaves the clocks alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "lts__t_bytes.avg.pct_of_peak_sustained_elapsed": "l2",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issued",
    "sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active": "f64",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "special",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "launch__registers_per_thread": "registers",
}
_STALLS = ("long_scoreboard", "barrier", "short_scoreboard", "wait", "not_selected", "membar")
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_METRICS |= {_STALLED.format(name): name for name in _STALLS}
_UNITS = {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "ns": 1e-3, "us": 1.0, "ms": 1e3}
_UNITS |= {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}

PROBLEMS = [
    "rows:max:bf16",
    "rows:prod:bf16",
    "narrow:var:bf16",
    "wide:prod:bf16",
    "wide:std:f32",
    "vocabulary:softmax:f32",
    "columns:softmax:bf16",
    "columns:softmax:f32",
    "columns:var:bf16",
    "columns:prod:bf16",
    "middle:prod:bf16",
    "long:softmax:bf16",
    "long:prod:bf16",
    "one:softmax:bf16",
    "rows:cumsum:bf16",
    "rows:cummax:bf16",
    "rows:cummax:f32",
    "wide:cumprod:bf16",
    "columns:cummax:bf16",
    "columns:log_cumsum_exp:f32",
    "long:cumsum:bf16",
    "long:cumprod:bf16",
    "long:cummax:bf16",
    "long:log_cumsum_exp:bf16",
    "one:cumsum:bf16",
    "one:cumprod:f32",
    "one:log_cumsum_exp:bf16",
    "rows_no_y:cummax:bf16",
    "rows_no_y:cumprod:bf16",
    "small_zipf:embedding:bf16",
]


def serve(problems: list[str]) -> None:
    """Below ncu: run each problem once."""
    import torch

    from gradplan.bench.problems import build
    from gradplan.bench.workloads import CUDA, custom
    from gradplan.kinds import ElementKind
    from gradplan.registry import KINDS
    from gradplan.terminal import parse_shape

    works = {one.name: one for one in CUDA}
    specs = {spec.kind.value: spec for spec in KINDS.values()}
    flush = torch.empty(1 << 26, dtype=torch.int32, device="cuda")
    for name in problems:
        case, kind, element = name.split(":")
        shape, _, axis = case.partition("@")
        work = works[case] if case in works else custom(parse_shape(shape), int(axis), "contiguous")
        problem = build(specs[kind], ElementKind(element), work, "cuda")
        launch = problem.plan().bind(problem.args())
        launch()
        flush.zero_()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        flush[:1].zero_()  # by torch: here the next problem begins
        launch()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        del problem, launch
        torch.cuda.empty_cache()


def profile(problems: list[str]) -> list[dict[str, Any]]:
    """Counters of each kernel of each problem."""
    command = [
        *("ncu", "--clock-control", "none", "--cache-control", "none"),
        *("--profile-from-start", "off", "--csv"),
        *("--page", "raw", "--metrics", ",".join(_METRICS)),
        *(sys.executable, __file__, "--serve", *problems),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = told.stdout.splitlines()
    begin = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise SystemExit(f"ncu gave no table:\n{told.stdout[-2000:]}\n{told.stderr[-2000:]}")
    table = list(csv.DictReader(io.StringIO("\n".join(lines[begin:]))))
    units, rows = table[0], table[1:]
    found: list[dict[str, Any]] = []
    place = -1
    for row in rows:
        if "at::" in row["Kernel Name"]:
            place += 1
            continue
        made: dict[str, Any] = {"problem": problems[place], "kernel": row["Kernel Name"]}
        for metric, name in _METRICS.items():
            text = row.get(metric, "").replace(",", "")
            if text:
                made[name] = float(text) * _UNITS.get(units[metric], 1.0)
        found.append(made)
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line a kernel that takes a share of its problem worth telling."""
    head = ("problem", "kernel", "µs", "memory", "L2", "issued", "f64", "warps", "waits most for")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        if row.get("us", 0.0) < 4:
            continue
        waits = sorted(_STALLS, key=lambda name: -row.get(name, 0.0))[:2]
        cells = [
            row["problem"],
            row["kernel"],
            f"{row.get('us', 0.0):.0f}",
            *(f"{row.get(name, 0.0):.0f} %" for name in ("memory", "l2", "issued", "f64", "warps")),
            ", ".join(f"{name.replace('_', ' ')} {row.get(name, 0.0):.1f}" for name in waits),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("problems", nargs="*", help="case:kind:element, or 4096x100@0:max:f32")
    parser.add_argument("--json", help="where counters are written")
    parser.add_argument("--table", metavar="JSON", help="print the table of earlier ones")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    problems = chosen.problems or list(PROBLEMS)
    if chosen.serve:
        serve(problems)
    elif chosen.table:
        print(markdown(json.loads(Path(chosen.table).read_text())))
    else:
        os.environ.setdefault("PYTHONPATH", "src")
        rows = profile(problems)
        if chosen.json:
            Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n")
        print(markdown(rows))


if __name__ == "__main__":
    main()
