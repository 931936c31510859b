"""What `make sanitize` runs below compute-sanitizer: a reduced grid on the GPU.

Every kind, with one element each in turn: in every layout with the measured thresholds, in every
variant with the interpreter's small ones, so that small shapes are split and tiled too, where
programs wait for each other and where they do not, and in small parts that are held or walked. The
sanitizer finds reads and writes out of bounds, races in shared memory and reads of memory nobody
wrote; results are checked as well. Of all cases those come first that together run every kernel.

Where groups of warps hand on what they found in shared memory (`held_rows`, `held_scan`), one
thread arrives at a barrier for all of its group, which met at a barrier of its own before. That is
right, but racecheck follows no such chain, and calls the same in a dozen lines of CUDA a race; so
it leaves these two kernels out, and memcheck and initcheck do not.

`--compile` fills Triton's cache in many processes beforehand. `--parts 4` then starts every tool of
the sanitizer at once, each four times with `--part 1/4` and so on, for one process is slow below
it, and tells how they ended. `--device cpu` runs what it can in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from covering import (
    clustered,
    clustered_table,
    covering,
    held,
    held_table,
    small_table,
    walked_or_held,
    walked_table,
)
from gradplan import PlanPreference, cases
from gradplan.backends.gpu import aot, launch, program, programs, segments, table
from gradplan.cases import Problem
from gradplan.kinds import ElementKind
from gradplan.registry import ELEMENTS, KINDS, Engine, KindSpec
from gradplan.views import view

TOOLS = {
    "memcheck": (),
    "racecheck": ("--kernel-regex-exclude", "kns=held_"),
    "initcheck": (),
}
_PER_LAYOUT = 2
_HANGS_S = 600.0
_sort = segments._sort


def _sort_with_marks(problem: Any, places: dict[str, int], *rest: Any) -> Iterator[launch.Step]:
    """The one place where memory that nobody wrote is read on purpose: see `kernels.moves`."""
    if not problem.desc.accumulate:
        yield program.clearing(places["marks"], (places["bounds"] - places["marks"]) // 8)
    yield from _sort(problem, places, *rest)


def in_every_layout(spec: KindSpec, element: ElementKind) -> Iterator[Problem]:
    """A few cases of each layout, spread over its shapes, options and data."""
    for layout in cases.layouts_of(spec):
        every = list(cases.grid(spec, element, layout, turns=True))
        yield from map(Problem, every[:: -(-len(every) // _PER_LAYOUT)])
    if spec.engine is Engine.RECURRENCE and spec.ties:  # rows of the very length that a warp takes
        yield Problem(cases.Case(desc=cases.describe(spec, element, (5, 512), (1,))))


def in_parts(spec: KindSpec, element: ElementKind) -> Iterator[Problem]:
    """Of what is held or walked in small parts, each way through the kernels once."""
    if element is ElementKind.F64:
        element = ElementKind.F32
    some: Any = {Engine.ROW_STATE: held, Engine.RECURRENCE: walked_or_held}.get(spec.engine)
    if some:
        yield from _each_way(some(spec, element))


def in_clusters(spec: KindSpec, element: ElementKind) -> Iterator[Problem]:
    """The same of clusters."""
    if spec.engine is Engine.ROW_STATE:
        yield from _each_way(clustered(spec, element))


def _each_way(some: Iterable[tuple[cases.Case, program.Program]]) -> Iterator[Problem]:
    met = set()
    for case, launched in some:
        last = launched.steps[-1]
        fixed = dict(last.constants)
        way = (last.kernel, launched.layout, fixed["FULL"], fixed.get("MORE"), last.grain)
        if way not in met:
            met.add(way)
            yield Problem(case)


def some_problems(arch: str, kinds: Sequence[str] | None) -> list[tuple[Problem, table.Table]]:
    """All problems, each with the thresholds that it is meant for; first come those that together
    run every kernel in every phase."""
    measured = table.table_of("sm_90" if arch == "interpreter" else arch)
    grids: list[tuple[Any, Any]] = [
        (lambda _: measured, in_every_layout),
        (lambda _: small_table(), covering),
        (lambda _: small_table(waits=False), covering),
    ]
    if arch != "interpreter":  # where no program waits for another
        grids.append((_table_of_parts, in_parts))
        grids.append((lambda _: clustered_table(), in_clusters))
    first: list[tuple[Problem, table.Table]] = []
    rest: list[tuple[Problem, table.Table]] = []
    met: set[Any] = set()
    for shift, (table_for, problems) in enumerate(grids):
        for turn, spec in enumerate(KINDS.values()):
            if kinds and spec.kind.value not in kinds:
                continue
            thresholds = table_for(spec)
            for problem in problems(spec, ELEMENTS[(turn + shift) % len(ELEMENTS)]):
                ways = set(_ways(problem, thresholds))
                if not ways <= met:
                    first.append((problem, thresholds))
                elif shift != 2:  # where nothing waits, what is new is enough
                    rest.append((problem, thresholds))
                met |= ways
    return first + rest


def _table_of_parts(spec: KindSpec) -> table.Table:
    return held_table() if spec.engine is Engine.ROW_STATE else walked_table()


def _strides(problem: Problem) -> dict[str, tuple[int, ...]]:
    return {name: view(array).strides for name, array in problem.arrays.items()}


def _ways(problem: Problem, thresholds: table.Table) -> Iterator[tuple[Any, ...]]:
    """The kernels of a problem, with what they compile other code for."""
    program = programs.choose(problem.desc, _strides(problem), thresholds)
    for step in program.steps:
        fixed = dict(step.constants)
        yield step.kernel, program.layout, fixed.get("PHASE", fixed.get("LEVEL"))


def compile_all(some: Sequence[tuple[Problem, table.Table]], arch: str, jobs: int) -> None:
    """Every kernel of the problems, into Triton's cache."""
    todo: dict[object, aot.Variant] = {}
    for problem, thresholds in some:
        aligned = 16 if all(a.ctypes.data % 16 == 0 for a in problem.arrays.values()) else 1
        for step in programs.choose(problem.desc, _strides(problem), thresholds).steps:
            variant = aot.Variant(step, aligned, problem.desc.element, str(problem.case))
            todo.setdefault(variant.key, variant)
    capability = int(arch.removeprefix("sm_"))
    failed = [
        built.error
        for built in aot.build_all([(one, capability) for one in todo.values()], jobs)
        if built.error
    ]
    print(f"{len(todo)} kernels, {len(failed)} failed: {failed[:3]}", flush=True)


def part_of(text: str) -> tuple[int, int]:
    """Which part of how many."""
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError
    return int(part), int(parts)


def sanitizer() -> str:
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def run_parts(parts: int, given: Sequence[str], limit_s: float = _HANGS_S) -> int:
    """All tools at once, each over all parts: how many found something, or did not end."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for tool, part in itertools.product(TOOLS, range(1, parts + 1)):
            log = Path(folder) / f"{tool}_{part}"
            below = [sanitizer(), "--tool", tool, *TOOLS[tool], "--error-exitcode", "1"]
            command = [*below, sys.executable, __file__, "--part", f"{part}/{parts}", *given]
            with log.open("w") as out:
                # A session of its own: what hangs ends with all that it started.
                process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            running.append((f"{tool} {part}/{parts}", log, process))
        begin, wrong = time.monotonic(), 0
        for title, log, process in running:
            try:
                code = process.wait(timeout=max(1.0, begin + limit_s - time.monotonic()))
                ended = "right" if code == 0 else f"wrong, exit code {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code, ended = process.wait(), f"did not end in {limit_s:.0f} s"
            print(f"{title}: {ended}, {time.monotonic() - begin:.0f} s")
            lines = log.read_text(errors="replace").splitlines()[-3 if code == 0 else -60 :]
            print("\n".join(f"    {line}" for line in lines), flush=True)
            wrong += code != 0
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", nargs="+", help="only these")
    parser.add_argument("--compile", metavar="ARCH", help="only compile, for sm_90 or another")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="K/N", help="every N-th case"
    )
    parser.add_argument("--parts", type=int, metavar="N", help="all tools and all N parts at once")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    options = parser.parse_args(argv)
    if options.device != "cpu":
        # Each buffer is an allocation of its own, so that a step beyond its end is seen.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        segments._sort = _sort_with_marks
    if options.compile:
        compile_all(some_problems(options.compile, options.kind), options.compile, options.jobs)
        return 0
    if options.parts:
        given = ["--device", options.device]
        if options.kind:
            given += ["--kind", *options.kind]
        if options.stop_after < math.inf:
            given += ["--stop-after", str(options.stop_after)]
        return 1 if run_parts(options.parts, given) else 0
    arch = "interpreter" if options.device == "cpu" else launch.device_arch(0)
    triton = PlanPreference(backend="triton")
    missed = count = 0
    begin = time.monotonic()
    part, parts = options.part
    some = some_problems(arch, options.kind)[part - 1 :: parts]
    for problem, thresholds in some:
        took = time.monotonic() - begin
        if took > options.stop_after:
            print(f"out of time after {count} of {len(some)} cases", flush=True)
            break
        if count % 20 == 0:
            print(f"{took:.0f} s, {count} of {len(some)} cases", flush=True)
        with table.using(arch, thresholds):
            problem.run(options.device, triton)
            promise = problem.plan(options.device, triton).precision_guarantee
        outcome = problem.outcome(promise.relative_error)
        count += 1
        if not outcome.ok:
            missed += 1
            print(outcome, flush=True)
    print(f"{count} cases, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
