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
awake, so that no fixed cost makes the smaller look slow. A ratio above the target is measured
again, three times as long, and the median of all rounds counts.

Arrays are NumPy's own, touched before: no page faults, and no alignment that NumPy does not give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
from measure import Others, l3_bytes
from problems import Problem, batch, build, check, data_bytes, has_axis
from report import DOUBLING, Bench, marked, misses, new_table

import gradplan as gp
from gradplan.bench.problems import question
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import KindSpec

__all__ = ["growth"]

_COLUMNS = 64
_AGAIN = 3
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
    cases = [
        (spec, layout)
        for spec in bench.specs
        for layout in (("row", "rows", "columns") if has_axis(spec) else ("row", "rows"))
    ]
    for spec, layout in bench.each(cases, "growth"):
        others = Others()
        problems = _problems(bench, spec, layout, cache)
        if problems is None:
            continue
        counted = [problem.fewest_bytes > cache for problem in problems[:-1]]
        calls = [problem.plan.bind(problem.args) for problem in problems]
        rounds = clock.rounds(calls, max(3, bench.rounds // 2))
        if any(_missed(_ratios(rounds), counted)):
            rounds += clock.rounds(calls, (_AGAIN - 1) * len(rounds))
        ratios, ms = _ratios(rounds), [1e3 * median(column) for column in zip(*rounds, strict=True)]
        judged += [ratio for ratio, counts in zip(ratios, counted, strict=True) if counts]
        size = problems[0].fewest_bytes
        bench.note(
            "growth",
            kind=spec.kind.value,
            layout=layout,
            extents=extents,
            shapes=[problem.desc.shape_and_axes[0] for problem in problems],
            smallest_bytes=size,
            ms=ms,
            ratios=ratios,
            judged=counted,
            rounds=len(rounds),
            other_cores=others.cores(),
        )
        table.add_row(
            *(spec.kind.value, layout, f"{size / cache:.1f} caches"),
            *(f"{t:.3f}" for t in ms),
            *(
                marked(f"{ratio:.2f}", missed) if counts else f"[dim]{ratio:.2f}[/]"
                for ratio, counts, missed in zip(
                    ratios, counted, _missed(ratios, counted), strict=True
                )
            ),
        )
    bench.console.print(table)
    if judged:
        bench.found[DOUBLING] = max(judged)


def _missed(ratios: Sequence[float], counted: Sequence[bool]) -> list[bool]:
    pairs = zip(ratios, counted, strict=True)
    return [counts and misses(DOUBLING, ratio) for ratio, counts in pairs]


def _ratios(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Large over small for each doubling: the median over the rounds."""
    return [median(b / a for a, b in pairs) for pairs in zip(*map(pairwise, rounds), strict=True)]


def _problems(bench: Bench, spec: KindSpec, layout: str, cache: int) -> list[Problem] | None:
    """One for each extent; None, noted, where a result is outside its guarantee."""
    rows, made = bench.sizes.table[0], []
    wide = layout == "columns" or not _stacks(spec)
    shapes = [(n // _COLUMNS, _COLUMNS) if wide else (n,) for n in bench.sizes.growth]
    copies = 1
    if layout != "row":
        while _bytes(spec, shapes[0], copies, rows) < bench.sizes.caches * cache:
            copies += 1
    for shape in shapes:
        problem = bench.attempt(partial(_checked, spec, shape, copies, rows))
        if problem is None:
            return None
        made.append(problem)
    return made


def _stacks(spec: KindSpec) -> bool:
    """Whether copies stand side by side; of an embedding, a batch is more indices."""
    return spec.category is not OpCategory.EMBEDDING


def _bytes(spec: KindSpec, shape: tuple[int, ...], copies: int, rows: int) -> int:
    one = shape if _stacks(spec) else (copies * shape[0], *shape[1:])
    desc, _ = question(spec, one, 0, ElementKind.F32, rows)
    return data_bytes(desc) * (copies if _stacks(spec) else 1)


def _checked(spec: KindSpec, shape: tuple[int, ...], copies: int, rows: int) -> Problem:
    one = shape if _stacks(spec) else (copies * shape[0], *shape[1:])
    problem = build(spec, one, 0, table=rows)
    check(problem, torch=False)
    return batch(problem, copies) if _stacks(spec) else problem


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
