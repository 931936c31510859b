"""Why a GPU variant was chosen and no other, asked of the choice itself.

Each engine tries its variants in a fixed order. Of one that comes before the chosen we ask which
threshold of the table kept it out: that field is changed, and the same code chooses again. Of one
that comes after we ask what it would have cost: those before it are taken out of the table. So no
rule is written twice, and what is told stays true when the rules change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...explanation import Other
from ...registry import Engine
from .program import Program, Strides, up
from .programs import choose
from .table import Lines, Table, without

__all__ = ["others"]

# The order in which an engine tries its variants.
_ORDER = {
    Engine.ROW_STATE: ("resident", "cluster", "held", "tall", "lagged", "split"),
    Engine.RECURRENCE: ("walked", "held", "resident", "chained", "tiled", "lagged", "split"),
}
_MOST = 1 << 40
_NOT_ALIGNED = "16 does not divide all addresses"


def others(desc: Any, strides: Strides, table: Table, runs: str = "") -> tuple[Other, ...]:
    """Every other variant of the engine, in the order in which they are tried.

    `runs` is the one that does run, which may be another where addresses are not aligned.
    """
    chosen = choose(desc, strides, table)
    order = _ORDER.get(desc.spec.engine, ())
    passed: dict[str | None, str] = {}
    while runs and chosen.variant != runs and chosen.unaligned is not None:
        why = "the arrays do not lie alike within 16 bytes" if chosen.alike else _NOT_ALIGNED
        passed[_base(chosen, order)] = why
        chosen = chosen.unaligned
    name = _base(chosen, order)
    told = []
    if name is not None:
        place = order.index(name)
        for other in (*order[:place], *order[place + 1 :]):
            if other in passed:
                why = passed[other]
            elif passed and other in ("walked", "held"):  # in shared memory
                why = _NOT_ALIGNED
            elif order.index(other) < place:
                why = _barred(desc, strides, table, other)
            else:
                why = _cost(desc, strides, table, chosen, other)
            told.append(Other(other, why))
    return (*told, *_source(chosen))


def _base(program: Program, order: Sequence[str]) -> str | None:
    """The variant without what is said behind it of its inputs; None where there is no choice."""
    return next((name for name in order if program.variant.startswith(name)), None)


def _barred(desc: Any, strides: Strides, table: Table, other: str) -> str:
    """Why a variant that is tried before the chosen was not taken: the threshold in its way."""
    if other == "cluster" and not table.cluster:
        return "the architecture has no clusters"
    if other in ("held", "walked") and not any(a or b for _, a, _, b, _ in table.held_rows):
        return "the architecture's processors have too little shared memory"
    if other == "cluster":
        apart = replace(table, held_first=())
        if choose(desc, strides, apart).variant == other:
            return "parts in shared memory come first for this kind (held_first)"
    if other == "held":
        table = replace(table, tall_programs=(0, 0))
        if choose(desc, strides, table).variant == other:
            return "lines come first: rows so few, or in so many parts (tall_rows, tall_parts)"
    if other == "resident":
        apart = replace(table, cluster_first=())
        if choose(desc, strides, apart).variant == other:
            return "a cluster comes first for rows so long (cluster_first)"
    reached = [
        (value / max(now, 1), f"{meaning}: {now:,}; it would take {value:,} ({field})")
        for field, meaning, now, tables in _ways(table, desc, other)
        for value, changed in tables
        if choose(desc, strides, changed).variant.startswith(other)
    ]
    if reached:  # the least change of all
        return min(reached, key=lambda way: max(way[0], 1 / way[0]))[1]
    if other == "tiled" and "x" in strides and "y" not in strides:
        return "y is not given: it is recomputed in parts, which meet through carries"
    return "not for this kind in this layout, whatever the size"


Way = tuple[str, str, int, Iterator[tuple[int, Table]]]


def _ways(table: Table, desc: Any, other: str) -> Iterator[Way]:
    """(field, what it means, its value, other values with their tables) that let a variant in."""
    if other == "resident" and desc.spec.engine is Engine.ROW_STATE:
        yield _raised(table, "resident_words", "registers in which a program may keep its rows")
        now, _ = table.part_of("ragged_rows", desc.op, desc.element)
        values = (
            (k * now, replace(table, ragged_rows=_longer(table.ragged_rows, k))) for k in _powers()
        )
        yield "ragged_rows", "the longest row that begins anywhere and stays", now, values
    elif other == "resident":
        yield _raised(table, "scan_resident", "the longest row that stays in registers")
        yield _raised(table, "scan_columns", "the longest axis of neighbouring rows that stays")
        tile, _ = table.lines_of(desc.op, desc.element)
        now = max(tile, table.lines_of(desc.op, desc.element, 1)[0])
        values = ((k * tile, replace(table, lines=_longer(table.lines, k))) for k in _powers())
        yield "lines", "the longest row that lies in one run and stays in registers", now, values
        now, _ = table.part_of("forward_lines", desc.op, desc.element)
        values = (
            (k * now, replace(table, forward_lines=_longer(table.forward_lines, k)))
            for k in _powers()
        )
        yield "forward_lines", "the longest such row whose y is not given", now, values
    elif other == "chained":
        now = table.chained_from
        lower = ((now // k, _with(table, "chained_from", now // k)) for k in _powers() if now // k)
        yield "chained_from", "the shortest of many rows that are cut", now, lower
    elif other == "cluster":
        yield _raised(table, "cluster", "the most programs of a cluster")
    elif other == "walked" or (other == "held" and desc.spec.engine is Engine.RECURRENCE):
        walked = ("walked_rows", "walked_uneven", "walked_ragged")
        for place in ("held_scans",) if other == "held" else walked:
            yield _shorter(table, desc, place)
        if other == "walked":
            now = table.walked_axis
            lower = (
                (now // k, _with(table, "walked_axis", now // k)) for k in _powers() if now // k
            )
            yield "walked_axis", "the shortest strided axis that is walked", now, lower
        now = table.fill
        lower = ((now // k, _with(table, "fill", now // k)) for k in _powers() if now // k > 1)
        yield "fill", "twice the programs that walk a row each", now, lower
    elif other == "held":
        yield _raised(
            table, "fill", "twice the programs that stay, in whose shared memory a row fits"
        )
    elif other == "lagged" and desc.spec.engine is Engine.RECURRENCE:
        yield _raised(table, "scan_lag", "bytes that are read before the first is read again")
    elif other == "lagged":
        yield _raised(table, "lag", "parts that are read before the first is read again")
    elif other == "tiled":
        for field in ("fill", "scan_fill"):
            now = getattr(table, field)
            values = ((now // k, _with(table, field, now // k)) for k in _powers() if now // k)
            yield field, "programs that fill the machine: below, rows are cut", now, values


def _raised(table: Table, field: str, meaning: str) -> Way:
    now: int = getattr(table, field)
    low = max(now, 1)
    changes: Iterator[dict[str, Any]] = ({field: k * low} for k in _powers())
    values = ((change[field], replace(table, **change)) for change in changes)
    return field, meaning, now, values


def _shorter(table: Table, desc: Any, place: str) -> Way:
    now = table.number_of(table.walked_from, place, desc.op, desc.element)
    lower = ((now // k, _walked_from(table, place, now // k)) for k in _powers() if now // k)
    return "walked_from", "the shortest row whose parts wait in shared memory", now, lower


def _walked_from(table: Table, place: str, value: int) -> Table:
    others = (one for one in table.walked_from if one[0] != place)
    return replace(table, walked_from=((place, "", value, value), *others))


def _with(table: Table, field: str, value: Any) -> Table:
    return replace(table, **dict[str, Any]({field: value}))


def _powers() -> Iterator[int]:
    return (1 << k for k in range(1, 21))


def _longer(lines: Lines, factor: int) -> Lines:
    return tuple((kind, factor * a, b, factor * c, d) for kind, a, b, c, d in lines)


def _cost(desc: Any, strides: Strides, table: Table, chosen: Program, other: str) -> str:
    """What a variant that is tried after the chosen would cost."""
    made = choose(desc, strides, _only(table, other, desc))
    if not made.variant.startswith(other):
        return f"not for this kind in this layout; {chosen.variant} comes first"
    more = _bytes_read(desc, strides, made) - _bytes_read(desc, strides, chosen)
    costs = [f"read {more:,} bytes more"] if more > 0 else []
    if made.workspace_bytes and not chosen.workspace_bytes:
        costs.append("take a workspace")
    if made.counters and not chosen.counters:
        costs.append("let programs wait for each other")
    if costs:
        return f"it would {' and '.join(costs)}"
    return f"{chosen.variant} comes first, and moves no more"


def _only(table: Table, other: str, desc: Any) -> Table:
    """A table that keeps out what is tried before a variant. Its sizes mean nothing any more."""
    shape, axes = desc.shape_and_axes
    half = max(2, up(prod(shape[axis] for axis in axes)) // 2) if other == "cluster" else 2
    lines = tuple((kind, 1, b, 1, d) for kind, _, b, _, d in table.lines)
    forward = tuple((kind, 2, b, 2, d) for kind, _, b, _, d in table.forward_lines)
    barred = replace(table, resident_words=0, scan_resident=0, scan_columns=0, lines=lines)
    barred = replace(barred, forward_lines=forward)
    barred = replace(barred, alone_rows=(), short_lines=())
    barred = replace(barred, ragged_rows=(("", half, 1, half, 1),))
    never_walked = replace(without(barred, "walked"), walked_from=())
    if other == "held":
        barred = never_walked
    elif other != "cluster":
        barred = without(never_walked, "held_scans")
    if other == "resident":
        return replace(without(table, "walked", "held"), cluster=0)
    if other == "chained":
        return replace(barred, scan_fill=_MOST)
    never = tuple((kind, 0, b, 0, d) for kind, _, b, _, d in table.chained)
    barred = replace(barred, chained=never, chained_far=never, chained_many=never)
    if other in ("tiled", "split", "lagged"):
        fill = 1 if other == "tiled" else _MOST
        barred = replace(barred, scan_fill=fill)
        if other != "lagged":
            barred = replace(barred, fill=fill)
    if other in ("held", "tall", "lagged", "split"):
        barred = replace(barred, cluster=0)
    if other in ("tall", "lagged", "split"):
        barred = without(barred, "walked", "held")
    if other in ("lagged", "split"):
        barred = replace(barred, tall_programs=(0, 0))
    return replace(barred, lag=0, scan_lag=0) if other == "split" else barred


def _bytes_read(desc: Any, strides: Strides, program: Program) -> int:
    inputs = (op for op in desc.operands if not op.output and op.name in strides)
    return sum(op.size_bytes * program.reads.get(op.name, 1) for op in inputs)


def _source(chosen: Program) -> Iterator[Other]:
    """Whether a saved y is used, where it may be left out."""
    if chosen.variant.endswith("_recomputed"):
        yield Other("from_y", "y is not given, so the scan is run again from x")
    elif chosen.variant.endswith("_marked"):
        yield Other("from_y", "x is read once and leaves a bit a place, which is less than y")
        yield Other("recomputed", "the bits are kept, so x is not scanned again")
    elif chosen.variant.endswith("_from_y"):
        yield Other("recomputed", "y is given: reading it is cheaper than to scan x again")
