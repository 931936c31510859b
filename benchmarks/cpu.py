"""The CPU benchmark: `python benchmarks/cpu.py [--quick] [--json out.json] [--kinds ...]`.

Six tables, each driven by the registry: against torch, growth (its rule stands in growth.py),
overhead, start-up, skewed embeddings and memory. Nothing is timed before its result has met the
plan's own guarantee, and targets stand in `report.TARGETS`; the exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from growth import growth
from measure import (
    Others,
    copy_bandwidth,
    machine,
    medians,
    peak_extra_bytes,
)
from problems import Problem, build, has_axis
from report import (
    FIRST_CALL,
    FUNCTION,
    MEAN,
    OTHERS,
    PEAK,
    QUICK,
    RUN,
    SKEW,
    TARGETS,
    WORST,
    Bench,
    Sizes,
    marked,
    misses,
    new_table,
    verdict,
)
from rich.console import Console
from torch_peers import VIEW_KINDS, missing

import gradplan as gp
from gradplan.kinds import ElementKind, EmbeddingKind, OpCategory
from gradplan.registry import KINDS


def against_torch(bench: Bench) -> None:
    """Ours and torch's autograd in turns, in one process, on the same tensors."""
    bandwidth = copy_bandwidth(bench.rounds)
    table = new_table(
        f"Against torch, {bench.sizes.square} × {bench.sizes.square}; "
        f"embedding {' × '.join(map(str, bench.sizes.table))}",
        *("kind", "element", "axis", "ours ms", "+ alloc ms", "torch ms", "speed-up", "of floor"),
        caption=f"floor: each byte once at the copy bandwidth, {bandwidth / 1e9:.1f} GB/s read and "
        "written; above 100 %: data stays in the cache",
    )
    cases = [
        (spec, element, axis)
        for spec in bench.specs
        for element in bench.elements
        for axis in ((1, 0) if has_axis(spec) else (None,))
    ]
    for spec, element, axis in bench.each(cases, "against torch"):
        problem = bench.square(spec, -1 if axis is None else axis, element, numpy=False)
        errors = bench.right(problem)
        if errors is None:
            continue
        launch = problem.plan.bind(problem.args)
        calls = {"ours": launch, "alloc": problem.function, "torch": problem.graph.backward}
        others = Others()
        ms = {name: 1e3 * s for name, s in medians(calls, bench.rounds).items()}
        speed_up, floor_ms = ms["torch"] / ms["ours"], 1e3 * problem.fewest_bytes / bandwidth
        name, where = spec.kind.value, "–" if axis is None else str(axis)
        bench.note(
            "against_torch",
            kind=name,
            element=element.value,
            axis=axis,
            sku=str(launch.sku),
            **{f"{key}_ms": value for key, value in ms.items()},
            speed_up=speed_up,
            speed_up_with_alloc=ms["torch"] / ms["alloc"],
            floor_ms=floor_ms,
            copy_bytes_per_s=bandwidth,
            other_cores=others.cores(),
            **errors,
        )
        table.add_row(
            *(name, element.value, where),
            *(f"{ms[key]:.3f}" for key in ("ours", "alloc", "torch")),
            marked(f"{speed_up:.2f}", misses(WORST, speed_up)),
            f"{floor_ms / ms['ours']:.0%}",
        )
    bench.console.print(table)
    rows = bench.rows.get("against_torch", [])
    _sum_up(bench, [row for row in rows if row["kind"] not in VIEW_KINDS])


def _sum_up(bench: Bench, races: list[dict[str, Any]]) -> None:
    if not races:
        return
    worst = min(races, key=lambda row: float(row["speed_up"]))
    mean = geometric_mean(row["speed_up"] for row in races)
    bench.found[MEAN] = mean
    bench.found[WORST] = worst["speed_up"]
    bench.console.print(
        f"Geometric mean {mean:.2f} (with allocation of the result "
        f"{geometric_mean(row['speed_up_with_alloc'] for row in races):.2f}) over {len(races)} "
        f"rows, without {', '.join(VIEW_KINDS)}, where torch returns a view.\n"
        f"Worst row: {worst['kind']} {worst['element']} axis {worst['axis']}, "
        f"{worst['speed_up']:.2f}.\n"
    )


def overhead(bench: Bench) -> None:
    """What a call costs on an 8 × 8 array, where there is next to no work."""
    table = new_table(
        "Overhead, 8 × 8 f32 NumPy, µs", "kind", "plan.run", "function", "bound launch"
    )
    for spec in bench.each(bench.specs, "overhead"):
        problem = build(spec, (8, 8), table=8)
        if bench.right(problem) is None:
            continue
        launch = problem.plan.bind(problem.args)
        calls = {"run": problem.run, "function": problem.function, "bound": launch}
        us = {name: 1e6 * s for name, s in medians(calls, bench.rounds).items()}
        bench.note("overhead", kind=spec.kind.value, **{f"{name}_us": t for name, t in us.items()})
        table.add_row(
            spec.kind.value,
            marked(f"{us['run']:.1f}", misses(RUN, us["run"])),
            marked(f"{us['function']:.1f}", misses(FUNCTION, us["function"])),
            f"{us['bound']:.1f}",
        )
    bench.console.print(table)
    bench.worst("overhead", "run_us", RUN)
    bench.worst("overhead", "function_us", FUNCTION)


_CHILD = """
import pickle, sys, time
import numpy
function, keywords = pickle.load(sys.stdin.buffer)
t0 = time.perf_counter()
import gradplan
t1 = time.perf_counter()
getattr(gradplan, function)(**keywords)
t2 = time.perf_counter()
getattr(gradplan, function)(**keywords)
t3 = time.perf_counter()
had_numba = "numba" in sys.modules
import numba
t4 = time.perf_counter()
print(t1 - t0, t2 - t1, t3 - t2, had_numba + 0, t4 - t3)
"""


def start_up(bench: Bench) -> None:
    """New processes, each with one first call of a kind whose kernels are on disk."""
    table = new_table(
        "Start-up of a second process, s",
        *("kind", "import gradplan", "first call", "next call", "Numba loaded", "beyond Numba"),
        caption="import gradplan: after NumPy; beyond Numba: the first call, less the import of "
        "Numba where the call needed it",
    )
    for spec in bench.each(bench.specs, "start-up"):
        problem = bench.square(spec)
        if bench.right(problem) is None:  # which also leaves the kernels on disk
            continue
        question = pickle.dumps((problem.spec.function, problem.keywords))
        tries = [_ask_child(question) for _ in range(bench.sizes.processes)]
        imported, first, after, had_numba, _ = (
            median(column) for column in zip(*tries, strict=True)
        )
        beyond = first - (_numba_import_s(bench) if had_numba else 0)
        bench.note(
            "start_up",
            kind=spec.kind.value,
            import_s=imported,
            first_call_s=first,
            next_call_s=after,
            numba_loaded=bool(had_numba),
            beyond_numba_s=beyond,
        )
        table.add_row(
            *(spec.kind.value, f"{imported:.3f}", f"{first:.3f}", f"{after:.4f}"),
            "yes" if had_numba else "no",
            marked(f"{beyond:.3f}", misses(FIRST_CALL, beyond)),
        )
    bench.console.print(table)
    bench.worst("start_up", "beyond_numba_s", FIRST_CALL)


def _ask_child(question: bytes, code: str = _CHILD) -> list[float]:
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, input=question, stdout=subprocess.PIPE, check=True)
    return [float(word) for word in answer.stdout.split()]


def _numba_import_s(bench: Bench) -> float:
    code = "import time, numpy\nt = time.perf_counter()\nimport numba\nprint(time.perf_counter()-t)"
    return median(_ask_child(b"", code)[0] for _ in range(bench.sizes.processes))


def embedding(bench: Bench) -> None:
    """One hot row that every index names, against uniform indices."""
    rows, columns, count = bench.sizes.skew
    spec = KINDS[OpCategory.EMBEDDING, EmbeddingKind.EMBEDDING]
    if spec not in bench.specs:
        return
    hot = torch.full((count,), rows // 2)
    problems = {
        "uniform": build(spec, (count, columns), table=rows),
        "one hot row": build(spec, (count, columns), table=rows, indices=hot),
    }
    if any(bench.right(problem) is None for problem in problems.values()):
        return
    calls = {name: p.plan.bind(p.args) for name, p in problems.items()}
    ms = {name: 1e3 * s for name, s in medians(calls, bench.rounds).items()}
    ratio = ms["one hot row"] / ms["uniform"]
    table = new_table(f"Embedding {rows} × {columns}, {count} indices, f32", "indices", "ms")
    for name, value in ms.items():
        table.add_row(name, f"{value:.3f}")
    table.add_row("ratio", marked(f"{ratio:.2f}", misses(SKEW, ratio)))
    bench.console.print(table)
    bench.note("embedding", uniform_ms=ms["uniform"], one_hot_row_ms=ms["one hot row"], ratio=ratio)
    bench.found[SKEW] = ratio


def memory(bench: Bench) -> None:
    """The peak of one run beyond its arrays, against what the plan says it needs."""
    table = new_table(
        f"Memory of one run, {bench.sizes.square}² f32, bytes",
        *("kind", "layout", "workspace_size", "peak, allocators", "peak, resident"),
        caption="without optional y too, where the kind can do without",
    )
    cases = [
        (spec, layout)
        for spec in bench.specs
        for layout in (("square", "row") if has_axis(spec) else ("square",))
    ]
    for spec, layout in bench.each(cases, "memory"):
        row = (bench.sizes.square**2,)
        problem = bench.square(spec) if layout == "square" else build(spec, row)
        for name, args in _with_and_without_y(problem):
            traced, resident = peak_extra_bytes(partial(problem.plan.run, args))
            size = problem.plan.workspace_size
            beyond = max(traced, resident or 0) - size
            bench.note(
                "memory",
                kind=spec.kind.value,
                layout=layout + name,
                workspace_bytes=size,
                traced_bytes=traced,
                resident_bytes=resident,
                beyond_bytes=beyond,
            )
            seen = "–" if resident is None else f"{resident:,}"
            table.add_row(
                *(spec.kind.value, layout + name, f"{size:,}", f"{traced:,}"),
                marked(seen, misses(PEAK, beyond)),
            )
    bench.console.print(table)
    bench.worst("memory", "beyond_bytes", PEAK)


def _with_and_without_y(problem: Problem) -> list[tuple[str, Any]]:
    cases = [("", problem.args)]
    if any(op.name == "y" and not op.required for op in problem.desc.operands):
        arrays = problem.inputs | problem.outputs | {"y": None}
        cases.append((", no y", type(problem.args)(**arrays)))
    return cases


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "torch": against_torch,
    "growth": growth,
    "overhead": overhead,
    "start-up": start_up,
    "embedding": embedding,
    "memory": memory,
}


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    kinds = [spec.kind.value for spec in KINDS.values()]
    elements = [element.value for element in ElementKind]
    parser = argparse.ArgumentParser(description="gradplan on the CPU, against torch and targets")
    parser.add_argument("--quick", action="store_true", help="small problems, few repeats")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, metavar="KIND")
    parser.add_argument("--elements", nargs="+", choices=elements, default=["f32", "f16", "bf16"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, help="rounds of each timing")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run the sections asked for; 1 where a target is missed."""
    asked = _arguments(given)
    if gaps := missing():
        raise SystemExit(f"torch_peers.py has no row for: {', '.join(gaps)}")
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(gp.get_num_threads())
    console = Console(width=None if sys.stdout.isatty() else 120)
    bench = Bench(
        specs=[spec for spec in KINDS.values() if spec.kind.value in asked.kinds],
        elements=[ElementKind.coerce(name) for name in asked.elements],
        rounds=asked.repeats or (5 if asked.quick else 15),
        sizes=QUICK if asked.quick else Sizes(),
        console=console,
    )
    about, others = machine(), Others()
    console.print_json(json.dumps(about), indent=None)
    for name in asked.sections:
        SECTIONS[name](bench)
    bench.found[OTHERS] = others.cores()
    good = verdict(bench)
    if asked.json:
        targets = {
            name: {"limit": list(limit), "value": bench.found.get(name)}
            for name, limit in TARGETS.items()
        }
        report = {"machine": about, "sizes": asdict(bench.sizes), "rounds": bench.rounds}
        report |= {"rows": bench.rows, "targets": targets, "wrong": bench.wrong, "met": good}
        asked.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
