"""What `make sanitize` runs below compute-sanitizer: a reduced grid on the GPU.

Every kind, with one element each in turn: in every layout with the measured thresholds, then in
every variant with the interpreter's small ones, so that small shapes are split and tiled
too. The sanitizer finds reads and writes out of bounds, races in shared memory and reads of memory
nobody wrote; results are checked as well.

`--compile` fills Triton's cache in many processes beforehand, for below the sanitizer there is but
one. `--device cpu` runs everything in Triton's interpreter, to try it out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Each buffer is an allocation of its own, so that a step beyond its end is seen.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from covering import covering
from gradplan import PlanPreference, cases
from gradplan.backends.gpu import aot, launch, program, programs, segments, table
from gradplan.cases import Problem
from gradplan.kinds import ElementKind
from gradplan.registry import ELEMENTS, KINDS, KindSpec

_PER_LAYOUT = 3
_sort = segments._sort


def _sort_with_marks(problem: Any, places: dict[str, int], *rest: Any) -> Iterator[launch.Step]:
    """The one place where memory that nobody wrote is read on purpose: see `kernels.moves`."""
    if not problem.desc.accumulate:
        yield program.clearing(places["marks"], problem.desc.num_embeddings)
    yield from _sort(problem, places, *rest)


def in_every_layout(spec: KindSpec, element: ElementKind) -> Iterator[Problem]:
    """A few cases of each layout, spread over its shapes, options and data."""
    for layout in cases.layouts_of(spec):
        every = list(cases.grid(spec, element, layout, turns=True))
        yield from map(Problem, every[:: -(-len(every) // _PER_LAYOUT)])


def some_problems(arch: str, kinds: Sequence[str] | None) -> Iterator[Problem]:
    """All problems, each while the thresholds that it is meant for are in force."""
    measured = table.table_of("sm_90" if arch == "interpreter" else arch)
    small = table.table_of("interpreter")
    for shift, (thresholds, problems) in enumerate(
        ((measured, in_every_layout), (small, covering))
    ):
        with table.using(arch, thresholds):
            for turn, spec in enumerate(KINDS.values()):
                if not kinds or spec.kind.value in kinds:
                    yield from problems(spec, ELEMENTS[(turn + shift) % len(ELEMENTS)])


def compile_all(problems: Iterator[Problem], arch: str, jobs: int) -> None:
    """Every kernel of the problems, into Triton's cache."""
    todo: dict[object, aot.Variant] = {}
    for problem in problems:
        arrays = problem.arrays
        strides = {
            name: tuple(
                0 if n == 1 else step // a.itemsize
                for n, step in zip(a.shape, a.strides, strict=True)
            )
            for name, a in arrays.items()
        }
        aligned = 16 if all(a.ctypes.data % 16 == 0 for a in arrays.values()) else 1
        for step in programs.prepare(problem.desc, strides, arch, 0).steps:
            variant = aot.Variant(step, aligned, problem.desc.element, str(problem.case))
            todo.setdefault(variant.key, variant)
    capability = int(arch.removeprefix("sm_"))
    failed = [
        built.error
        for built in aot.build_all([(one, capability) for one in todo.values()], jobs)
        if built.error
    ]
    print(f"{len(todo)} kernels, {len(failed)} failed: {failed[:3]}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", nargs="+", help="only these")
    parser.add_argument("--compile", metavar="ARCH", help="only compile, for sm_90 or another")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    segments._sort = _sort_with_marks
    if options.compile:
        compile_all(some_problems(options.compile, options.kind), options.compile, options.jobs)
        return 0
    arch = "interpreter" if options.device == "cpu" else launch.device_arch(0)
    triton = PlanPreference(backend="triton")
    missed = count = 0
    begin, last = time.monotonic(), None
    for problem in some_problems(arch, options.kind):
        if problem.desc.op != last:
            last = problem.desc.op
            print(f"{time.monotonic() - begin:.0f} s, {count} cases: {last}", flush=True)
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
