"""Verification: every kind, element and layout, held to its own guarantee on this machine.

The cases are those of the tests (`cases.grid`). Kernels are compiled on first use, which takes far
longer than running them and happens one at a time in a process, so the work is spread over
processes that share the kernel cache.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from . import cases
from .backends import find
from .kinds import ElementKind, Named, OpCategory
from .registry import ELEMENTS, KINDS, Engine
from .sku import PlanPreference

__all__ = ["Row", "Task", "check", "tasks", "verify"]


@dataclass(frozen=True)
class Task:
    """The cases of one kind and element."""

    category: OpCategory
    kind: Named
    element: ElementKind
    quick: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Row:
    """What came of a task: the case nearest to its guarantee, and every case that missed it."""

    kind: str
    element: str
    cases: int
    worst_error: float
    guarantee: float
    misses: tuple[str, ...]

    @property
    def share(self) -> float:
        """The part of the guarantee that was used up."""
        return self.worst_error / self.guarantee

    @property
    def ok(self) -> bool:
        return not self.misses


def tasks(quick: bool = False, device: str = "cpu") -> list[Task]:
    """What there is to check, what takes longest first.

    Raises `Unsupported` where the device has no backend. `quick` checks each kind with one
    element, taking turns, and one kernel each: 18 kernels instead of some 400.
    """
    find(device, PlanPreference())
    specs = sorted(KINDS.values(), key=lambda spec: spec.engine is not Engine.RECURRENCE)
    return [
        Task(spec.category, spec.kind, element, quick, device)
        for turn, spec in enumerate(specs)
        for element in ((ELEMENTS[turn % len(ELEMENTS)],) if quick else ELEMENTS)
    ]


def check(task: Task) -> Row:
    """Run the cases of a task. An error raised by a case is a miss: others still run."""
    spec = KINDS[task.category, task.kind]
    count, worst, misses = 0, (0.0, 1.0), []
    for layout in cases.layouts_of(spec):
        if task.quick and layout not in cases.QUICK_LAYOUTS:
            continue
        for case in cases.grid(spec, task.element, layout, quick=task.quick):
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
    return Row(task.kind.value, task.element.value, count, *worst, tuple(misses))


def verify(todo: Sequence[Task], jobs: int = 1) -> Iterator[Row]:
    """The row of every task, as each is done; `jobs=1` stays in this process."""
    if jobs == 1:
        yield from map(check, todo)
        return
    # A forked child would inherit the locks of threads that it does not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, max(len(todo), 1)), mp_context=context) as pool:
        pending = [pool.submit(check, task) for task in todo]
        try:
            for future in as_completed(pending):
                yield future.result()
        finally:
            for future in pending:
                future.cancel()
