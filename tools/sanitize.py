"""What `make sanitize` runs below compute-sanitizer: a reduced grid on the GPU.

Every kind, with one element each in turn, over every layout; once with the measured thresholds and
once with the interpreter's small ones, so that small shapes are split, streamed and tiled too. The
sanitizer finds reads and writes out of bounds, races in shared memory and reads of memory nobody
wrote; results are checked as well.
"""

from __future__ import annotations

import os
import sys

# Each buffer is an allocation of its own, so that a step beyond its end is seen.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from gradplan import cases, plans
from gradplan.backends.gpu import precision, programs, table
from gradplan.registry import ELEMENTS, KINDS


def some_cases(spec, element, per_layout):
    """A few cases of each layout, spread over its shapes, options and data."""
    for layout in cases.layouts_of(spec):
        every = list(cases.grid(spec, element, layout, complete=False))
        yield from every[:: max(1, len(every) // per_layout)]


def main() -> int:
    missed = count = 0
    for small in (False, True):
        plans._plans.clear()
        if small:
            for module in (programs, precision):
                module.table_of = lambda arch: table._INTERPRETER
        for turn, spec in enumerate(KINDS.values()):
            element = ELEMENTS[(turn + small) % len(ELEMENTS)]
            for case in some_cases(spec, element, 3):
                outcome = cases.run_plan(case, "cuda")
                count += 1
                if not outcome.ok:
                    missed += 1
                    print(outcome, flush=True)
    print(f"{count} cases, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
