"""Targets, what a run has found so far, and its tables and verdicts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from problems import Problem, Wrong, build, check
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import KindSpec

T = TypeVar("T")

MEAN = "speed-up over torch, geometric mean"
WORST = "speed-up over torch, worst row"
DOUBLING = "time ratio per doubling, out of cache, worst"
RUN = "plan.run of 8 × 8, worst kind, µs"
FUNCTION = "function call of 8 × 8, worst kind, µs"
FIRST_CALL = "first call beyond importing Numba, worst kind, s"
SKEW = "embedding, one hot row over uniform"
PEAK = "peak beyond workspace_size, worst kind, bytes"
WRONG = "results outside their guarantee"
OTHERS = "cores taken by other processes"

TARGETS: dict[str, tuple[str, float]] = {
    MEAN: (">=", 4.0),
    WORST: (">=", 1.0),
    DOUBLING: ("<=", 2.3),
    RUN: ("<=", 15.0),
    FUNCTION: ("<=", 30.0),
    FIRST_CALL: ("<=", 0.3),
    SKEW: ("<=", 3.0),
    PEAK: ("<=", 1e6),
    WRONG: ("<=", 0),
    # On a busy machine torch's threads wait for each other by whole time slices: its figures grow
    # a hundredfold, and every speed-up is a lie.
    OTHERS: ("<=", 0.25),
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Sizes:
    """How large the problems are; tables are (rows, columns, indices)."""

    square: int = 2048
    table: tuple[int, int, int] = (30_000, 256, 20_000)
    growth: tuple[int, ...] = (2_500_000, 5_000_000, 10_000_000)
    skew: tuple[int, int, int] = (30_000, 64, 1_000_000)
    processes: int = 5
    caches: float = 4.0
    """The data of a batch whose growth is judged, in last caches."""


QUICK = Sizes(512, (3_000, 64, 2_000), (62_500, 125_000, 250_000), (3_000, 64, 50_000), 2, 0.1)


@dataclass
class Bench:
    """One run: what was asked, and what has been found so far."""

    specs: Sequence[KindSpec]
    elements: Sequence[ElementKind]
    rounds: int
    sizes: Sizes
    console: Console
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` makes; None, noted, where it finds a result outside its guarantee."""
        try:
            return work()
        except Wrong as wrong:
            self.wrong.append(str(wrong))
            self.console.print(f"[bold red]WRONG, not timed:[/] {wrong}")
            return None

    def right(self, problem: Problem) -> dict[str, Any] | None:
        """The errors of a result inside its guarantee; None, noted, where it is outside."""
        return self.attempt(lambda: asdict(check(problem)))

    def note(self, section: str, **row: Any) -> None:
        self.rows.setdefault(section, []).append(row)

    def worst(self, section: str, column: str, target: str) -> None:
        """Hold the largest figure of a column to a target."""
        if rows := self.rows.get(section):
            self.found[target] = max(row[column] for row in rows)

    def each(self, items: Iterable[Any], what: str) -> Iterable[Any]:
        listed = list(items)
        quiet = not self.console.is_terminal
        return track(listed, what, console=self.console, transient=True, disable=quiet)

    def square(self, spec: KindSpec, *how: Any, **more: Any) -> Problem:
        """The problem of the usual size: a square, or the table of an embedding."""
        rows, columns, count = self.sizes.table
        if spec.category is OpCategory.EMBEDDING:
            return build(spec, (count, columns), *how, table=rows, **more)
        return build(spec, (self.sizes.square,) * 2, *how, **more)


def new_table(title: str, *columns: str, caption: str | None = None) -> Table:
    # As wide as its title, which would be wrapped otherwise.
    table = Table(title=title, caption=caption, min_width=len(title) + 2)
    table.title_justify = table.caption_justify = "left"
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k == 0 else "right", no_wrap=True)
    return table


def marked(text: str, bad: bool) -> str:
    return f"[bold red]{text}[/]" if bad else text


def misses(target: str, value: float) -> bool:
    sense, limit = TARGETS[target]
    return not _COMPARE[sense](value, limit)


def verdict(bench: Bench) -> bool:
    """Print every target that was measured; whether all are met, on a quiet machine."""
    bench.found[WRONG] = len(bench.wrong)
    good, busy = True, misses(OTHERS, bench.found[OTHERS])
    if busy:
        bench.console.print("[bold yellow]The machine is busy: no time above is to be believed.[/]")
    for target, (sense, limit) in TARGETS.items():
        value = bench.found.get(target)
        if value is None:
            bench.console.print(f"[dim]not measured[/]  {target}")
            continue
        missed = misses(target, value)
        good = good and not missed
        if busy and target not in (WRONG, PEAK, OTHERS):
            word = "[yellow]void[/]  "
        else:
            word = "[bold red]missed[/]" if missed else "[green]met[/]   "
        bench.console.print(f"{word}  {target}: {value:.3g} (target {sense} {limit:g})")
    return good
