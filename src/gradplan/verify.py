"""Verification: every kind, element and layout, held to its own guarantee on this machine.

The cases are those of the tests (`cases.grid`). Kernels are compiled on first use, which takes far
longer than running them and happens one at a time in a process, so the work is spread over
processes that share the kernel cache. A task holds all cases that run the same kernels: none is
compiled twice. On a GPU nearly every combination of shape, layout and option is a kernel of its
own, so they take turns there unless `complete` asks for all.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from . import cases
from .backends import find
from .cases import Case, Layout
from .errors import Unsupported
from .kinds import ElementKind, Named, OpCategory
from .registry import ELEMENTS, KINDS, Engine, KindSpec
from .sku import PlanPreference

__all__ = ["Row", "Task", "check", "merged", "tasks", "verify"]

# Layouts whose kernels are the same on a GPU for the most part. On the CPU all share theirs.
_GPU_LAYOUTS = (
    (Layout.CONTIGUOUS, Layout.TRANSPOSED, Layout.IN_PLACE, Layout.BROADCAST),
    (Layout.OFFSET, Layout.NEGATIVE, Layout.SHIFTED),
    (Layout.SLICED,),
    (Layout.MIXED,),
)


@dataclass(frozen=True)
class Task:
    """The cases of one kind and element, in some layouts; `until` is by `time.time`."""

    category: OpCategory
    kind: Named
    element: ElementKind
    quick: bool = False
    device: str = "cpu"
    layouts: tuple[Layout, ...] = tuple(Layout)
    turns: bool = False
    until: float | None = None
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Shapes and axes in place of the grid's."""

    @property
    def key(self) -> str:
        """What tells it from other tasks, in any run."""
        words = [self.device, self.kind.value, self.element.value]
        words += [layout.value for layout in self.layouts]
        words += [str(pair) for pair in self.shapes]
        words += [name for name in ("quick", "turns") if getattr(self, name)]
        return " ".join(words)

    def cases(self) -> Iterator[Case]:
        spec = KINDS[self.category, self.kind]
        for layout in cases.layouts_of(spec):
            if layout in self.layouts and not (self.quick and layout not in cases.QUICK_LAYOUTS):
                yield from cases.grid(
                    spec,
                    self.element,
                    layout,
                    quick=self.quick,
                    turns=self.turns,
                    own=self.shapes,
                )


@dataclass(frozen=True)
class Row:
    """What came of a task: the case nearest to its guarantee, and every case that missed it.

    `cases` were run; where that is less than `planned`, time was out.
    """

    kind: str
    element: str
    cases: int
    worst_error: float
    guarantee: float
    misses: tuple[str, ...]
    planned: int

    @property
    def share(self) -> float:
        """The part of the guarantee that was used up."""
        return self.worst_error / self.guarantee

    @property
    def ok(self) -> bool:
        return not self.misses


def tasks(
    quick: bool = False,
    device: str = "cpu",
    *,
    complete: bool = False,
    stop_after: float | None = None,
    specs: Collection[KindSpec] | None = None,
    elements: Collection[ElementKind] | None = None,
    layouts: Collection[Layout] | None = None,
    shapes: Callable[[KindSpec], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] | None = None,
) -> list[Task]:
    """What there is to check, what takes longest first.

    Raises `Unsupported` where the device has no backend. `quick` checks each kind with one
    element, taking turns, and one kernel each: 18 kernels instead of some 400. `complete` makes a
    difference on a GPU alone. No case is begun later than `stop_after` seconds from now. `shapes`
    gives shapes and axes in place of the grid's; a kind for which it gives none is left out, as is
    one that lies in none of the layouts.
    """
    if not find(device, PlanPreference()).here:
        raise Unsupported(f"device {device!r} is not here: nothing can run on it")
    ordered = sorted(KINDS.values(), key=lambda spec: spec.engine is not Engine.RECURRENCE)
    gpu = device != "cpu"
    until = None if stop_after is None else time.time() + stop_after
    made = []
    for group in _GPU_LAYOUTS if gpu and not quick else (tuple(Layout),):
        chosen = tuple(one for one in group if layouts is None or one in layouts)
        for turn, spec in enumerate(ordered):
            own = () if shapes is None else shapes(spec)
            if (specs is not None and spec not in specs) or (shapes is not None and not own):
                continue
            wanted = [one for one in ELEMENTS if elements is None or one in elements]
            if quick and elements is None:
                wanted = [ELEMENTS[turn % len(ELEMENTS)]]
            turns = gpu and not (complete or quick)
            made += [
                Task(spec.category, spec.kind, element, quick, device, chosen, turns, until, own)
                for element in wanted
            ]
    return [task for task in made if next(task.cases(), None) is not None]


def check(task: Task) -> Row:
    """Run the cases of a task. An error raised by a case is a miss: others still run."""
    count, worst, misses = 0, (0.0, 1.0), []
    todo = list(task.cases())
    for case in todo:
        if task.until is not None and time.time() >= task.until:
            break
        count += 1
        try:
            outcome = cases.run_plan(case, task.device)
        except Exception as error:
            misses.append(f"{case}: {type(error).__name__}: {error}")
            continue
        if not outcome.ok:
            misses.append(str(outcome))
        if count == 1 or outcome.error / outcome.guarantee > worst[0] / worst[1]:
            worst = outcome.error, outcome.guarantee
    return Row(task.kind.value, task.element.value, count, *worst, tuple(misses), len(todo))


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for each kind and element, in the order of the registry."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.kind, row.element
        before = found.get(key)
        if before is not None:
            worst = max(before, row, key=lambda one: (one.cases > 0, one.share))
            row = replace(
                worst,
                cases=before.cases + row.cases,
                misses=before.misses + row.misses,
                planned=before.planned + row.planned,
            )
        found[key] = row
    kinds = [spec.kind.value for spec in KINDS.values()]
    elements = [element.value for element in ELEMENTS]
    return sorted(
        found.values(), key=lambda row: (kinds.index(row.kind), elements.index(row.element))
    )


def verify(todo: Sequence[Task], jobs: int = 1) -> Iterator[tuple[Task, Row]]:
    """Every task with its row, as each is done; `jobs=1` stays in this process."""
    if jobs == 1:
        for task in todo:
            yield task, check(task)
        return
    # A forked child would inherit the locks of threads that it does not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, max(len(todo), 1)), mp_context=context) as pool:
        pending = {pool.submit(check, task): task for task in todo}
        try:
            for future in as_completed(pending):
                yield pending[future], future.result()
        finally:
            for future in pending:
                future.cancel()
