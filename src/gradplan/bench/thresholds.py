"""What `gradplan tune` asks of each threshold of the GPU's table: what else, and where it tells.

`FIELDS` has an entry for every field of `Table`; a test holds the two together. An entry is either
the reason why nothing is measured, or makes the field's questions: the values to be tried, and the
problems whose kernels they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..backends.gpu import programs
from ..backends.gpu.launch import Step
from ..backends.gpu.table import Table, using, without
from ..geometry import c_strides, told_strides
from ..kinds import ElementKind, OpCategory
from ..registry import KINDS, KindSpec
from .problems import posed
from .workloads import Draw, Workload, custom

__all__ = ["FIELDS", "Probe", "Question", "questions", "steps_of"]


@dataclass(frozen=True)
class Probe:
    """A problem that a threshold decides."""

    spec: KindSpec
    element: ElementKind
    workload: Workload

    def __str__(self) -> str:
        case = self.workload
        absent = f" without {', '.join(case.without)}" if case.without else ""
        return f"{self.spec.kind.value} {self.element.value} {case.name}{absent}"


@dataclass(frozen=True)
class Question:
    """One choice: the tables to be compared by what they are called, and on what."""

    name: str
    now: str
    tables: dict[str, Table]
    """In the order of their values, what is now among them."""
    probes: tuple[Probe, ...]


Ask = Callable[[str, Table], Iterator[Question]]


def _probes(
    kind: str,
    shape: tuple[int, ...],
    axis: int = 1,
    elements: str = "bf16 f32",
    without: tuple[str, ...] = (),
    draw: Draw = Draw.UNIFORM,
) -> tuple[Probe, ...]:
    spec = next(spec for spec in KINDS.values() if spec.kind.value == kind)
    if spec.category is OpCategory.EMBEDDING:
        case = Workload(f"{'x'.join(map(str, shape))} {draw.value}", shape, draw=draw)
    else:
        case = replace(custom(shape, axis, "contiguous"), without=without)
    return tuple(Probe(spec, ElementKind(name), case) for name in elements.split())


def _half_and_double(value: int) -> list[int]:
    return [size for size in (value // 2, value, 2 * value) if size]


def _up_to_four_times(value: int) -> list[int]:
    return [size for size in (value // 4, value // 2, value, 2 * value, 4 * value) if size]


def _either(value: bool) -> list[bool]:
    return [False, True]


def _on(*groups: Sequence[Probe], values: Callable[[Any], Sequence[Any]] = _half_and_double) -> Ask:
    """A field that is one number, measured on these problems."""

    def ask(name: str, table: Table) -> Iterator[Question]:
        now = getattr(table, name)
        tables = {str(value): replace(table, **{name: value}) for value in values(now)}
        yield Question(name, str(now), tables, tuple(probe for some in groups for probe in some))

    return ask


def _with_entry(table: Table, name: str, k: int, entry: Any) -> Table:
    """A table with another entry in one of its fields."""
    entries: list[Any] = list(getattr(table, name))
    entries[k] = entry
    return replace(table, **dict[str, Any]({name: tuple(entries)}))


Shapes = Sequence[tuple[tuple[int, ...], int]]
"""With the axis of each."""

Choice = Shapes | Callable[[str, bool], Shapes]
"""The same, or what tells them for a kind, and for halves or the others."""


def _on_shapes(
    kind: str, shapes: Choice, half: bool, without: tuple[str, ...] = ()
) -> tuple[Probe, ...]:
    element = "bf16" if half else "f32"
    some = shapes(kind, half) if callable(shapes) else shapes
    asked = (_probes(kind, shape, axis, element, without) for shape, axis in some)
    return tuple(probe for probes in asked for probe in probes)


def _cluster_rows(kind: str, half: bool) -> Shapes:
    """Rows that a cluster holds: of products of f32 shorter ones."""
    return [((1024, 65536), 1)] if kind == "prod" and not half else _held_rows(kind, half)


def _held_rows(kind: str, half: bool) -> Shapes:
    """Rows that could be held: of two operands in f32 shorter ones."""
    short = kind in ("softmax", "log_softmax") and not half
    return [((1024, 32768 if short else 131072), 1)]


def _long_rows(kind: str, half: bool) -> Shapes:
    """Rows that a cluster could take in place of another way."""
    return [((1024, n), 1) for n in ((32768, 65536, 131072) if kind == "prod" else (32768,))]


_RAGGED: Shapes = [((4096, 50257), 1)]


def _in_lines(kind: str, half: bool) -> Shapes:
    """Rows of a scan; the shorter ones of cumsum have a field of their own."""
    return [((8192, 8192), 1), *([((1 << 16, 1024), 1)] if kind != "cumsum" else [])]


def _side_by_side(kind: str, half: bool) -> Shapes:
    """Rows side by side, as long as ..."""
    return [((128, 1024, 512), 1)] if _rounded(kind, half) else [((64, 2048, 512), 1)]


def _narrow(kind: str, half: bool) -> Shapes:
    return [((1024, 8192), 0)] if _rounded(kind, half) else [((8192, 8192), 0)]


def _uneven(kind: str, half: bool) -> Shapes:
    """Rows that fill no tile, too short to be walked and long enough."""
    longer = (16384, 5008) if kind == "cumsum" and not half else (1 << 16, 768)
    return [((1 << 18, 272), 1), (longer, 1)]


def _few_beside(kind: str, half: bool) -> Shapes:
    """Rows side by side, few and more, of which lines could be made."""
    more = (64, 2048, 1032) if kind in ("max", "min") else (8, 8192, 2002)
    return [((256, 4096, 66), 1), ((64, 2048, 510), 1), (more, 1)]


def _many_parts(kind: str, half: bool) -> Shapes:
    """Rows side by side, cut into some parts, and into more."""
    more = (1 << 16, 1024) if kind in ("max", "min") else (1 << 15, 2048)
    return [((1 << 14, 2048), 0), (more, 0)]


def _rounded(kind: str, half: bool) -> bool:
    """... products of f32 may be whose factors are rounded one by one."""
    return kind == "cumprod" and not half


def _label(name: str, kind: str, half: bool) -> str:
    return f"{name} {kind or 'others'} {'halves' if half else 'f32'}"


def _by_kind(
    other: str,
    shapes: Choice,
    least: int,
    most: int,
    smaller: bool = True,
    without: tuple[str, ...] = (),
) -> Ask:
    """A field with two sizes for each kind, for halves and for the others; `other` stands for the
    kinds without a line of their own. A first size is so many to so many times the second. Where
    parts are too many for a cluster, larger ones are tried: there nothing `smaller` tells."""

    def ask(name: str, table: Table) -> Iterator[Question]:
        now_lines = getattr(table, name)
        for k, (kind, *sizes) in enumerate(now_lines):
            shown = kind if kind in {spec.kind.value for spec in KINDS.values()} else other
            for half in (True, False):
                first = 0 if half else 2
                now = (sizes[first], sizes[first + 1])
                first_held = name.startswith("cluster") and _is_moot(table, name, shown, half)
                if not now[0] or first_held:
                    continue
                tables = {}
                for one, two in sorted(
                    {(one, now[1]) for one in _half_and_double(now[0]) if smaller or one >= now[0]}
                    | {(now[0], two) for two in _half_and_double(now[1])}
                ):
                    if least * two <= one <= most * two or (one, two) == now:
                        entry = (kind, *sizes[:first], one, two, *sizes[first + 2 :])
                        tables[f"{one}/{two}"] = _with_entry(table, name, k, entry)
                label = _label(name, kind, half)
                probes = _on_shapes(shown, shapes, half, without)
                yield Question(label, f"{now[0]}/{now[1]}", tables, probes)

    return ask


def _by_side(
    shapes: Choice, short: bool = False, other: str = "cummax", without: tuple[str, ...] = ()
) -> Ask:
    """A field with tiles of rows side by side for each kind: narrower and wider ones, of as many
    elements, and more and fewer threads for the same. Rows that are `short` take smaller and larger
    tiles instead, and shorter and longer lines."""

    def ask(name: str, table: Table) -> Iterator[Question]:
        now_tiles = getattr(table, name)
        for k, (kind, *tiles) in enumerate(now_tiles):
            for half in (True, False):
                rows, lines, length, warps = now = tiles[0 if half else 1]
                some = {now}
                if short:
                    some |= {(rows // 2, lines, length, warps), (2 * rows, lines, length, warps)}
                    some |= {(rows, 2 * lines, length // 2, warps)}
                    some |= {(rows, lines // 2, 2 * length, warps)}
                else:
                    some |= {(rows // 2, 2 * lines, length, warps)}
                    some |= {(2 * rows, lines // 2, length, warps)}
                some |= {(rows, lines, length, two) for two in _half_and_double(warps)}
                tables = {}
                for one in sorted(some):
                    pair = (one, tiles[1]) if half else (tiles[0], one)
                    made = _with_entry(table, name, k, (kind, *pair))
                    tables["x".join(map(str, one))] = made
                probes = _on_shapes(kind or other, shapes, half, without)
                label = _label(name, kind, half)
                yield Question(label, "x".join(map(str, now)), tables, probes)

    return ask


_PLACES: dict[str, tuple[str, Choice]] = {
    "lines": ("cummax", [((8192, 8192), 1), ((1024, 131072), 1)]),
    "alone_rows": ("cummax", [((1 << 16, 1024), 1)]),
    "forward_lines": ("log_cumsum_exp", [((1 << 16, 1024), 1)]),
    "side": ("cummax", _side_by_side),
    "short_side": ("cummax", [((1024, 64, 1024), 1)]),
    "narrow_side": ("cummax", _narrow),
    "chained": ("cummax", [((64, 1 << 20), 1)]),
    "chained_far": ("cummax", [((1, 1 << 27), 1)]),
    "whole_columns": ("prod", [((1024, 64, 1024), 1)]),
    "longest_rows": ("std", [((1024, 32768), 1)]),
    "lagged_rows": ("std", [((1, 1 << 27), 1)]),
    "lagged_columns": ("std", [((1 << 17, 1024), 0)]),
    "walked_rows": ("cummax", [((1 << 19, 128), 1), ((1024, 131072), 1)]),
    "walked_ragged": ("cummax", [((1 << 18, 255), 1), ((8192, 8191), 1)]),
    "walked_uneven": ("cummax", _uneven),
    "held_scans": ("cummax", [((64, 32768), 1), ((1, 1 << 27), 1)]),
    "held_rows": ("std", _held_rows),
    "held_columns": ("std", [((64, 2048, 512), 1)]),
    "cluster_rows": ("std", _cluster_rows),
    "cluster_columns": ("var", [((64, 2048, 512), 1)]),
    "long_rows": ("std", _long_rows),
    "ragged_rows": ("std", _RAGGED),
    "ragged_even": ("std", [((1 << 15, 768), 1)]),
    "tall_rows": ("std", _few_beside),
    "tall_parts": ("max", _many_parts),
    "ragged_eighths": ("log_softmax", [((16384, 5000), 1)]),
    "even_rows": ("var", [((4096, 50304), 1)]),
    "even_whole": ("softmax", [((16384, 5000), 1)]),
    "ragged_whole": ("prod", [((8192, 8191), 1)]),
    "ragged_warp": ("prod", [((1 << 16, 601), 1)]),
}


def _is_moot(table: Table, place: str, kind: str, half: bool) -> bool:
    """Whether there is nothing to choose: no cluster takes the rows, or they are held first; or a
    cluster takes the longest rows."""
    where, _, layout = place.partition("_")
    element = ElementKind.BF16 if half else ElementKind.F32
    rather = table.number_of(table.cluster_first, f"long_{layout}", kind, element)
    if where == "longest":
        return kind in ("softmax", "log_softmax") or bool(rather)
    if where not in ("cluster", "held") or layout == "scans":
        return False
    never = not table.part_of(f"cluster_{layout}", kind, element)[0]
    first = table.number_of(table.held_first, f"held_{layout}", kind, element)
    return never or (where == "cluster" and bool(first) and not rather)


def _by_place(values: Sequence[int], others: Sequence[int] | None = None) -> Ask:
    """A field with a number for each kind where a field of tiles decides; other numbers for the
    kinds that it does not name."""

    def ask(name: str, table: Table) -> Iterator[Question]:
        now_lines = getattr(table, name)
        for k, (place, kind, *numbers) in enumerate(now_lines):
            for half in (True, False):
                # Products of f32 are not taken as runs where they are aligned.
                never = name == "ragged_even" and kind == "prod" and not half
                if never or _is_moot(table, place, kind, half):
                    continue
                now = numbers[0 if half else 1]
                tables = {}
                some = values if kind or others is None else others
                for value in sorted({*some, now}):
                    pair = (value, numbers[1]) if half else (numbers[0], value)
                    tables[str(value)] = _with_entry(table, name, k, (place, kind, *pair))
                other, shapes = _PLACES[place]
                without = _NO_Y if place.startswith(_FORWARD) else ()
                probes = _on_shapes(kind or other, shapes, half, without)
                yield Question(_label(f"{name} {place}", kind, half), str(now), tables, probes)

    return ask


def _by_length(size: int) -> Ask:
    """A field with a number for each kind and length of rows, of so many elements in all."""

    def ask(name: str, table: Table) -> Iterator[Question]:
        for k, (kind, least, *numbers) in enumerate(getattr(table, name)):
            length = max(64, least)
            for half in (True, False):
                now = numbers[0 if half else 1]
                tables = {}
                for value in sorted({max(length, now // 2), now, 2 * now}):
                    pair = (value, numbers[1]) if half else (numbers[0], value)
                    tables[str(value)] = _with_entry(table, name, k, (kind, least, *pair))
                probes = _on_shapes(kind or "std", [((size // length, length - 1), 1)], half)
                yield Question(_label(f"{name} {least}", kind, half), str(now), tables, probes)

    return ask


_RARE = "for rows side by side that are no neighbours in memory, or are recomputed"
_NO_Y = ("y",)
_FEW_ROWS = (
    *_probes("softmax", (16, 1 << 16)),
    *_probes("softmax", (32, 1 << 16)),
)
_TALL_SCANS = _probes("cumsum", (1 << 20, 64), 0)
_WIDE_ELEMENTS = (
    *_probes("softmax", (64, 1 << 20), elements="f64"),
    *_probes("var", (8192, 8192), 0, elements="f64"),
)
_TALL = (*_probes("softmax", (1 << 18, 260), 0), *_probes("var", (1 << 19, 100), 0))
_COLUMNS = (*_probes("softmax", (8192, 8192), 0), *_probes("var", (8192, 8192), 0))
_SHORT_SCANS = (
    *_probes("cumprod", (1 << 20, 64), without=_NO_Y),
    *_probes("log_cumsum_exp", (1 << 20, 64), elements="f32", without=_NO_Y),
)
_SCANS = (
    *_probes("cumprod", (8192, 8192), without=_NO_Y),
    *_probes("log_cumsum_exp", (8192, 8192), elements="f32", without=_NO_Y),
)
_LARGE = _probes("embedding", (128256, 4096, 32768), draw=Draw.ZIPF)
_SMALL = _probes("embedding", (50304, 768, 262144), draw=Draw.ZIPF)
_SAME = _probes("embedding", (50304, 768, 262144), elements="f32", draw=Draw.SAME)
_FEW = (
    *_probes("embedding", (50304, 768, 128), draw=Draw.ZIPF),
    *_probes("embedding", (8192, 1024, 512), draw=Draw.ZIPF),
    *_probes("embedding", (8192, 1024, 512), draw=Draw.SAME),
)

FIELDS: dict[str, Ask | str] = {
    "fill": _on(_FEW_ROWS),
    "map_bytes": _on(
        _probes("lerp", (1 << 26,), 0), _probes("norm2", (8192, 8192)), values=_up_to_four_times
    ),
    "row_tile": _on(_probes("softmax", (1 << 20, 64)), _probes("var", (1 << 17, 512))),
    "resident_words": _on(
        _probes("softmax", (2048, 16384), elements="f32"),
        _probes("softmax", (1024, 32768)),
        _probes("var", (1024, 65536)),
    ),
    "packed": "where the architecture has no clusters",
    "column_factor": _on(
        _probes("var", (64, 2048, 512), 1, "f32"), _probes("var", (64, 1024, 512), 1, "f32")
    ),
    "column_bytes": _on(
        _probes("softmax", (16, 1 << 22), 0), _probes("cumprod", (64, 1 << 20), 0, without=_NO_Y)
    ),
    "column_tile": _on(
        _probes("var", (1024, 64, 1024), 1, "bf16"),
        _probes("softmax", (1024, 64, 1024), 1, "bf16"),
    ),
    "lagged_rows": _by_kind("std", [((1, 1 << 27), 1)], 512, 16384),
    "lagged_columns": _by_kind("var", [((1 << 17, 1024), 0)], 512, 16384),
    "lagged_width": _on(_probes("var", (8192, 8192), 0, elements="f64")),
    "cluster_rows": _by_kind("std", _cluster_rows, 512, 16384, smaller=False),
    "ragged_rows": _by_kind("std", _RAGGED, 2048, 16384, smaller=False),
    "ragged_short": _on(
        _probes("log_softmax", (8192, 8191), 1, "bf16"),
        _probes("log_softmax", (8192, 12288), 1, "bf16"),
    ),
    "ragged_tile": _by_length(1 << 26),
    "ragged_even": _by_place((1, 2048)),
    "cluster_columns": "for f64, and where 16 does not divide all addresses: as large as the "
    "assembler takes without spilling",
    "held_rows": _by_kind("std", [((64, 1 << 20), 1)], 512, 4096),
    "held_columns": _by_kind("std", [((8192, 8192), 0)], 512, 4096),
    "held_width": _on(_COLUMNS, values=lambda now: [now // 2, now]),
    "held_bytes": "all that a processor has, but for what its joins take",
    "held_registers": "as many as the assembler takes without spilling",
    "held_classes": "as many as the assembler takes without spilling",
    "held_nested": "as many as the assembler takes without spilling",
    "held_halved": "where the assembler would spill",
    "held_masked": "as many as the assembler takes without spilling",
    "held_scan_registers": "as many as the assembler takes without spilling",
    "walked_rows": _by_kind("cummax", [((1024, 131072), 1)], 512, 4096),
    "walked_from": _by_place((0, 1 << 40)),
    "walked_parts": _on(
        _probes("cumprod", (8192, 8192), elements="bf16"),
        _probes("cummax", (8192, 8192)),
        values=lambda now: sorted({2, 3, now}),
    ),
    "walked_warps": _on(_probes("cummax", (264, 1 << 17)), _probes("cumprod", (528, 1 << 17))),
    "walked_ragged": _by_kind("cummax", [((8192, 8191), 1)], 512, 4096),
    "walked_columns": _by_kind("cummax", [((64, 2048, 512), 1)], 512, 8192),
    "walked_strips": _by_kind("cummax", [((8192, 8192), 0)], 512, 8192),
    "walked_grains": "parts are never full, and are halved for that: neighbouring sizes coincide",
    "walked_axis": _on(_probes("cummax", (1024, 512, 512), 1), _probes("cummax", (512, 1024, 512))),
    "held_scans": _by_kind("cummax", [((1, 1 << 27), 1)], 512, 8192),
    "tall_programs": _on(
        _TALL, values=lambda now: [tuple(k * one // 2 for one in now) for k in (1, 2, 4)]
    ),
    "tall_room": "what a processor has, of the smallest of an architecture",
    "tall_bytes": "the longest lines that the assembler takes without spilling",
    "tall_rows": _by_place((1, 4096)),
    "tall_parts": _by_place((1, 4096)),
    "held_first": _by_place((0, 1)),
    "cluster_first": _by_place((0, 2, 4, 8), (0, 8)),
    "edges_apart": _by_place((0, 1)),
    "edges_always": _by_place((0, 1)),
    "walked_column_parts": _on(
        _probes("cumprod", (64, 2048, 512), 1, "bf16"),
        _probes("cummax", (64, 2048, 512), 1, "bf16"),
        values=lambda now: sorted({2, 3, now}),
    ),
    "strided_tile": "as large as the assembler takes without spilling",
    "cluster": _on(
        _probes("softmax", (1024, 32768), elements="f32"),
        _probes("max", (1024, 131072), elements="bf16"),
        values=lambda now: sorted({0, 4, 8, now}),
    ),
    "lag": _on(_WIDE_ELEMENTS),
    "lag_bytes": _on(_WIDE_ELEMENTS),
    "scan_tile": _on(_SHORT_SCANS),
    "scan_resident": _on(
        _probes("cumprod", (8192, 8192), elements="bf16", without=_NO_Y),
        _probes("log_cumsum_exp", (8192, 8192), elements="f32", without=_NO_Y),
        _probes("cumprod", (16384, 4096), without=_NO_Y),
    ),
    "scan_step": _on(_SCANS),
    "scan_product": "a matter of rounding, not of speed: the guarantee follows from it",
    "scan_words": _on(_SCANS, _SHORT_SCANS),
    "scan_columns": _on(
        _probes("cumsum", (128, 1 << 19), 0), _probes("cumprod", (256, 1 << 18), 0)
    ),
    "alone": _by_kind("cummax", [((1024, 64, 1024), 1)], 32, 256),
    "alone_axis": "as many additions as the guarantee allows for",
    "alone_rows": _by_place((0, 1024)),
    "scan_column_bytes": _RARE,
    "scan_column_step": _RARE,
    "scan_column_few": _on(_probes("cumprod", (8192, 8192), 0, without=_NO_Y)),
    "scan_fill": _on(_probes("cumsum", (128, 1 << 17)), _probes("cumsum", (256, 1 << 17))),
    "scan_lag": _on(_TALL_SCANS),
    "lagged_scans": "kind by kind: those whose first read is cheap",
    "chained": _by_kind("cummax", [((64, 1 << 20), 1)], 512, 16384),
    "chained_far": _by_kind("cummax", [((1, 1 << 27), 1)], 512, 16384),
    "chained_many": _by_kind("cumprod", [((1024, 32768), 1), ((1024, 131072), 1)], 512, 16384),
    "chained_from": _on(_probes("cumprod", (4096, 16384)), _probes("cumprod", (8192, 8192))),
    "chain": _on(_probes("cumprod", (1, 1 << 27)), _probes("cumprod", (64, 1 << 20))),
    "evened": _on(
        _probes("cummax", (65536, 1000), 0),
        _probes("cumprod", (65536, 1000), 0),
        values=lambda now: [(), now, ("cumprod", *now)],
    ),
    "evened_from": _on(
        _probes("cummax", (16384, 1100), 0),
        _probes("cummax", (65536, 109), 0),
        _probes("cummax", (65536, 1000), 0),
        values=lambda now: [now // 8, now // 2, now, 4 * now],
    ),
    "scan_chunk": _RARE,
    "side": _by_side(_side_by_side),
    "short_side": _by_side([((1024, 64, 1024), 1)], short=True),
    "narrow_side": _by_side(_narrow),
    "ahead": _by_place((0, 1, 2)),
    "strips": _on(
        _probes("cumsum", (64, 2048, 512), 1), _probes("cumsum", (4096, 16384), 0, "f32")
    ),
    "side_chunk": _on(_TALL_SCANS),
    "side_window": _on(_TALL_SCANS),
    "lines": _by_kind("cummax", _in_lines, 32, 1024),
    "short_lines": _by_kind("cummax", [((1 << 20, 64), 1)], 32, 1024),
    "forward_lines": _by_kind("log_cumsum_exp", _in_lines, 32, 1024, without=_NO_Y),
    "forward_side": _by_side([((8192, 8192), 0)], other="log_cumsum_exp", without=_NO_Y),
    "thread_words": _on(
        _probes("softmax", (8192, 8192)),
        _probes("var", (8192, 8192)),
        _probes("var", (32768, 1024), elements="f32"),
    ),
    "learned_bytes": "of a forward pass: `benchmarks/torch_front.py` measures it",
    "learned_thread": "of a forward pass: `benchmarks/torch_front.py` measures it",
    "sort_block": _on(_SMALL),
    "sort_bits": _on(_LARGE, _SMALL, values=lambda now: sorted({4, 6, 8, now})),
    "sum_block": "of no weight: lists with more blocks take long elsewhere",
    "chunk": _on(_LARGE, _SMALL, _SAME),
    "chunk_bytes": _on(_LARGE),
    "together": _on(_LARGE, _SMALL, _SAME),
    "chunk_registers": _on(
        _LARGE, _SMALL, _SAME, values=lambda now: sorted({64, 80, 96, 128, now})
    ),
    "chunk_more": _on(_SAME),
    "chunk_more_bytes": _on(_SAME),
    "together_more": _on(_SAME),
    "mark_blocks": "only whether it is much more or less than a few hundred blocks tells",
    "clear_rows": _on(_LARGE, _SMALL),
    "clear_columns": _on(_LARGE, _SMALL),
    "few_indices": _on(
        _probes("embedding", (8192, 1024, 512), draw=Draw.ZIPF),
        _probes("embedding", (2048, 512, 1024), draw=Draw.ZIPF),
    ),
    "few_columns": _on(_FEW),
    "few_words": _on(_FEW),
    "few_warps": _on(_FEW),
    "few_zeros": _on(_probes("embedding", (8192, 4096, 128), draw=Draw.ZIPF)),
    "few_programs": _on(
        _probes("embedding", (16384, 16, 512)),
        _probes("embedding", (8192, 2048, 512)),
        values=_up_to_four_times,
    ),
    "marks_from": _on(
        _probes("cummax", (64, 64), 1, without=_NO_Y),
        _probes("cummax", (1024, 64), 1, without=_NO_Y),
        values=lambda now: [now // 8, now, 8 * now],
    ),
    "join": _on(_WIDE_ELEMENTS),
    "join_lanes": _on(_probes("cumprod", (1 << 20, 64), 0, without=_NO_Y)),
    "early": "what the architecture can",
    "marks": "what a limit of the workspace takes away",
    "paired": "what the architecture has",
    "at_once": _by_place((0, 8, 16)),
    "registers": _by_place((0, 64, 80, 96, 128, 168)),
    "roomy": _on(_probes("cumprod", (8192, 8192)), values=_either),
}


_WALKED = ("walked_", "held_scans", "alone")
_FORWARD = "forward_"


def questions(table: Table, names: Sequence[str] | None = None) -> Iterator[Question]:
    """What there is to be measured of these fields, or of all."""
    for name, ask in FIELDS.items():
        if not isinstance(ask, str) and (names is None or name in names):
            yield from ask(name, apart(table, name))


def apart(table: Table, name: str) -> Table:
    """The table in which a field is measured.

    Tiles in registers stand aside for parts in shared memory, but where addresses are not aligned,
    and elements are f64, and for rows that one takes alone; those whose elements lie over threads
    for lines, but where arrays do not lie in runs: they are measured by themselves.
    """
    if name.startswith(_WALKED):
        return table
    table = without(table, "walked", "held_scans")
    if not name.startswith("tall"):  # whose rows others would have to read twice too
        table = replace(table, tall_programs=(0, 0))
    table = replace(without(table, "alone"), alone_rows=())
    if name.startswith(_FORWARD) or name in ("registers", "ahead"):
        return table
    nowhere = (0, 0, 0, 1)
    return replace(without(table, "forward_lines"), forward_side=(("", nowhere, nowhere),))


def steps_of(probe: Probe, arch: str, table: Table) -> tuple[Step, ...]:
    """What a table launches for a problem: where two agree, there is nothing to compare."""
    case = probe.workload
    desc, _ = posed(probe.spec, probe.element, case)
    strides = {
        op.name: told_strides(op.shape, c_strides(op.shape))
        for op in desc.operands
        if op.name not in case.without
    }
    with using(arch, table):
        return programs.prepare(desc, strides, arch, 0).steps
