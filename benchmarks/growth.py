"""How time grows with the extent, once the data no longer fits the cache.

Extents double up to rows of 10⁷, f32, in three layouts: one row; a batch of rows; a batch of 64
columns each, whose axis is strided (n counts the elements of one batch entry; an embedding has
n / 64 indices). The batch is as large as it takes for all data of the smallest problem, read or
written, to be `Sizes.caches` times the last cache, so there no pass finds what the one before
has read. One row alone cannot be that long below 10⁷: it is judged where the smaller problem's
data exceeds the cache, and dim elsewhere.

The rule: a doubling takes at most `report.TARGETS[DOUBLING]` times the time. Each round runs every
extent once, in alternating order; a ratio is the median over the rounds of large over small in
the same round, so a slow spell of the machine meets both. Every run starts with cold caches, swept
by reading (a sweep that writes would leave its write-backs to be clocked), and with threads
awake, so that no fixed cost makes the smaller look slow.

Arrays are NumPy's own, touched before: no page faults, and no alignment that NumPy does not give.
Where they lie, and on pages of which size, is a matter of luck that makes a time up to twice
another of the same problem. So every ratio is the median over three places, whatever the first
one gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

import numpy as np
from measure import Others, l3_bytes
from problems import Problem, batch, build, check, has_axis, moved
from report import DOUBLING, Bench, marked, misses, new_table

import gradplan as gp
from gradplan.kinds import OpCategory
from gradplan.registry import KindSpec

__all__ = ["growth"]

_COLUMNS = 64
_PLACES = 3
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
            row = _judged(clock, problems, cache, max(3, bench.rounds // 2))
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
    """The row of these problems: medians over several places of their arrays."""
    others = Others()
    places = [_times(clock, problems, count)]
    places += [_times(clock, list(map(moved, problems)), count) for _ in range(_PLACES - 1)]
    return {
        "shapes": [problem.desc.shape_and_axes[0] for problem in problems],
        "smallest_bytes": problems[0].fewest_bytes,
        "ms": [1e3 * median(column) for column in zip(*(s for s, _ in places), strict=True)],
        "ratios": [median(column) for column in zip(*(r for _, r in places), strict=True)],
        "judged": [problem.fewest_bytes > cache for problem in problems[:-1]],
        "places": [ratios for _, ratios in places],
        "rounds": count,
        "other_cores": others.cores(),
    }


def _times(
    clock: _ColdClock, problems: Sequence[Problem], count: int
) -> tuple[list[float], list[float]]:
    """Median seconds of each problem, and the ratios of their doublings."""
    rounds = clock.rounds([problem.plan.bind(problem.args) for problem in problems], count)
    return [median(column) for column in zip(*rounds, strict=True)], _ratios(rounds)


def _ratios(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Large over small for each doubling: the median over the rounds."""
    return [median(b / a for a, b in pairs) for pairs in zip(*map(pairwise, rounds), strict=True)]


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


class _ColdClock:
    """Clocks single calls, each with cold caches and threads awake."""

    def __init__(self, cache: int) -> None:
        self._sweep = np.ones(4 * cache // 8)
        self._small = np.ones(1 << 16, np.float32)

    def seconds(self, call: Callable[[], object]) -> float:
        self._sweep.sum()
        gp.lerp_backward(self._small, 0.5)
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def rounds(self, calls: Sequence[Callable[[], object]], count: int) -> list[list[float]]:
        """Seconds of each call, round by round; the first round is not clocked."""
        for call in calls:
            call()
        made = []
        for turn in range(count):
            order = range(len(calls))
            taken = {k: self.seconds(calls[k]) for k in (order if turn % 2 else reversed(order))}
            made.append([taken[k] for k in order])
        return made
