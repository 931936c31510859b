"""How time grows with the extent, once the data no longer fits the cache.

Extents double up to rows of 10⁷, f32, in three layouts: one row; a batch of rows; a batch of 64
columns each, whose axis is strided (n counts the elements of one batch entry; an embedding has
n / 64 indices). The batch is as large as it takes for all data of the smallest problem, read or
written, to be `Sizes.caches` times the last cache, so there no pass finds what the one before
has read. One row alone cannot be that long below 10⁷: it is judged where the smaller problem's
data exceeds the cache, and dim elsewhere.

The rule: a doubling takes at most `report.TARGETS[DOUBLING]` times the time. Each round runs both
extents, in alternating order; a ratio is the median over the rounds of large over small in
the same round, so a slow spell of the machine meets both. Every run starts with cold caches, swept
by reading (a sweep that writes would leave its write-backs to be clocked), and with threads
awake, so that no fixed cost makes the smaller look slow.

Arrays are NumPy's own, touched before: no page faults, and no alignment that NumPy does not give.
Where they lie, and on pages of which size, is a matter of luck that makes a time up to twice
another of the same problem. So both extents of a doubling use the same memory: the smaller problem
lies in the first half of the larger one's arrays and workspace, then in the second. The ratio is
the larger problem's time over the mean of the two: 2 where cost is linear, whatever the memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

import numpy as np
from measure import Others, l3_bytes
from problems import Lent, Problem, batch, build, check, has_axis, in_one_memory
from report import DOUBLING, Bench, marked, misses, new_table

import gradplan as gp
from gradplan.kinds import OpCategory
from gradplan.registry import KindSpec

__all__ = ["growth"]

_COLUMNS = 64
# Where the system does not tell.
_USUAL_CACHE = 32 << 20


def growth(bench: Bench) -> None:
    """Time by extent, and its ratio per doubling."""
    extents, cache = bench.sizes.growth, l3_bytes() or _USUAL_CACHE
    table = new_table(
        f"Growth, f32, cold; last cache {cache / 2**20:.0f} MiB",
        *("kind", "layout", "batch", *(f"{n / 1e6:.4g}M, ms" for n in extents)),
        *(f"× {k + 1}" for k in range(len(extents) - 1)),
        caption="medians; × k: ratio of one doubling; dim where the smaller problem fits the cache",
    )
    judged: list[float] = []
    clock = _ColdClock(cache)
    cases = [(spec, wide) for spec in bench.specs for wide in ((False, True)[: 1 + has_axis(spec)])]
    for spec, wide in bench.each(cases, "growth"):
        singles = _checked(bench, spec, wide)
        if singles is None:
            continue
        layouts = {} if wide else {"row": singles}
        batches = _batches(bench, singles, bench.sizes.caches * cache)
        if batches is not None:
            layouts["columns" if wide else "rows"] = batches
        for layout, problems in layouts.items():
            row = _judged(clock, problems, cache, bench.rounds)
            bench.note("growth", kind=spec.kind.value, layout=layout, extents=extents, **row)
            marks = list(zip(row["ratios"], row["judged"], strict=True))
            judged += [ratio for ratio, counts in marks if counts]
            table.add_row(
                *(spec.kind.value, layout, f"{row['smallest_bytes'] / cache:.1f} caches"),
                *(f"{t:.3f}" for t in row["ms"]),
                *(
                    marked(f"{ratio:.2f}", misses(DOUBLING, ratio))
                    if counts
                    else f"[dim]{ratio:.2f}[/]"
                    for ratio, counts in marks
                ),
            )
    bench.console.print(table)
    if judged:
        bench.found[DOUBLING] = max(judged)


def _judged(
    clock: _ColdClock, problems: Sequence[Problem], cache: int, count: int
) -> dict[str, Any]:
    """The row of these problems: a time for each, a ratio for each doubling."""
    others = Others()
    doublings = [clock.doubling(a, b, count) for a, b in pairwise(problems)]
    return {
        "shapes": [problem.desc.shape_and_axes[0] for problem in problems],
        "smallest_bytes": problems[0].fewest_bytes,
        "ms": [1e3 * d.small for d in doublings] + [1e3 * doublings[-1].large],
        "ratios": [d.ratio for d in doublings],
        "judged": [problem.fewest_bytes > cache for problem in problems[:-1]],
        "rounds": [d.rounds for d in doublings],
        "other_cores": others.cores(),
    }


def _checked(bench: Bench, spec: KindSpec, wide: bool) -> list[Problem] | None:
    """A problem for each extent; None, noted, where a result is outside its guarantee."""
    made = []
    for n in bench.sizes.growth:
        wide = wide or spec.category is OpCategory.EMBEDDING
        shape = (n // _COLUMNS, _COLUMNS) if wide else (n,)
        problem = build(spec, shape, 0, table=bench.sizes.table[0])
        if bench.attempt(partial(check, problem, torch=False)) is None:
            return None
        made.append(problem)
    return made


def _batches(bench: Bench, singles: Sequence[Problem], wanted: float) -> list[Problem] | None:
    """So many copies of each that the data of the smallest is as large as wanted."""
    if singles[0].spec.category is OpCategory.EMBEDDING:  # a batch is more indices
        (count, width), rows = singles[0].inputs["dout"].shape, bench.sizes.table[0]
        count *= ceil(wanted / singles[0].inputs["dout"].nbytes)
        shapes = [(count << k, width) for k in range(len(singles))]
        made = [build(singles[0].spec, shape, 0, table=rows) for shape in shapes]
        right = (bench.attempt(partial(check, problem, torch=False)) for problem in made)
        return made if all(right) else None
    copies = max(1, ceil(wanted / singles[0].fewest_bytes))
    return bench.attempt(lambda: [batch(problem, copies) for problem in singles])


@dataclass(frozen=True)
class _Doubling:
    """Seconds by round: the smaller problem in either half, the larger."""

    rounds: Sequence[tuple[float, float, float]]

    @property
    def small(self) -> float:
        return median((a + b) / 2 for a, b, _ in self.rounds)

    @property
    def large(self) -> float:
        return median(whole for _, _, whole in self.rounds)

    @property
    def ratio(self) -> float:
        return median(2 * whole / (a + b) for a, b, whole in self.rounds)


class _ColdClock:
    """Clocks single calls, each with cold caches and threads awake."""

    def __init__(self, cache: int) -> None:
        self._sweep = np.ones(4 * cache // 8)
        self._small = np.ones(1 << 16, np.float32)

    def seconds(self, problem: Lent) -> float:
        """One run on arrays just filled, their contents driven out of every cache."""
        problem.fill()
        self._sweep.sum()
        gp.lerp_backward(self._small, 0.5)
        begin = time.perf_counter()
        problem.call()
        return time.perf_counter() - begin

    def doubling(self, small: Problem, large: Problem, count: int) -> _Doubling:
        """Both problems in the larger one's memory; the first round is not kept."""
        problems = in_one_memory(small, large)
        rounds = []
        for turn in range(count + 1):
            order = (0, 1, 2) if turn % 2 else (2, 1, 0)
            taken = {k: self.seconds(problems[k]) for k in order}
            rounds.append((taken[0], taken[1], taken[2]))
        return _Doubling(rounds[1:])
