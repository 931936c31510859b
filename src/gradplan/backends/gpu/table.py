"""The thresholds of each architecture, in one table each.

The numbers for the H200 (sm_90) were measured on it, but for `few_*`, `evened`, `evened_from` and
`marks_from`, which were counted; other architectures use them until somebody measures there. The
interpreter's are small, so that small shapes meet every variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...kinds import ElementKind
from .thresholds import Lines, Table

__all__ = ["Lines", "Table", "table_of", "using", "without"]


_SM_90 = Table(
    early=True,
    fill=264,
    map_bytes=4096,
    row_tile=1024,
    resident_words=32768,
    packed=16384,
    column_factor=4,
    column_bytes=128,
    column_tile=8192,
    lagged_rows=(
        ("softmax", 16384, 8, 8192, 4),
        ("max", 16384, 8, 16384, 8),
        ("min", 16384, 8, 16384, 8),
        ("prod", 16384, 4, 16384, 8),
        ("log_softmax", 16384, 8, 8192, 4),
        ("", 16384, 4, 16384, 4),
    ),
    lagged_columns=(
        ("log_softmax", 8192, 2, 4096, 4),
        ("", 16384, 4, 8192, 4),
    ),
    lagged_width=128,
    cluster_rows=(
        ("log_softmax", 16384, 4, 8192, 4),
        ("softmax", 16384, 8, 8192, 8),
        ("prod", 16384, 4, 16384, 8),
        ("", 16384, 4, 16384, 8),
    ),
    ragged_rows=(
        ("softmax", 8192, 4, 8192, 8),
        ("log_softmax", 16384, 4, 8192, 4),
        ("prod", 16384, 8, 8192, 4),
        ("max", 16384, 4, 16384, 4),
        ("min", 16384, 4, 16384, 4),
        ("", 16384, 4, 8192, 4),
    ),
    ragged_short=8192,
    ragged_tile=(
        ("softmax", 128, 2048, 512),
        ("log_softmax", 256, 512, 256),
        ("log_softmax", 128, 1024, 128),
        ("", 1, 512, 512),
    ),
    ragged_even=(
        ("ragged_even", "softmax", 2048, 2048),
        ("ragged_even", "log_softmax", 2048, 2048),
        ("ragged_even", "prod", 2048, 2048),
        ("ragged_even", "", 1, 1),
    ),
    edges_apart=(
        ("ragged_rows", "softmax", 1, 1),
        ("ragged_rows", "log_softmax", 1, 1),
        ("ragged_rows", "max", 1, 1),
        ("ragged_rows", "min", 1, 1),
    ),
    edges_always=(
        ("even_rows", "var", 1, 0),
        ("even_whole", "softmax", 0, 1),
    ),
    cluster_columns=(
        ("var", 0, 4, 16384, 4),
        ("prod", 0, 4, 0, 4),
        ("", 0, 4, 8192, 4),
    ),
    held_rows=(
        ("softmax", 8192, 4, 4096, 4),
        ("log_softmax", 8192, 4, 4096, 4),
        ("", 16384, 4, 8192, 4),
    ),
    held_columns=(
        ("softmax", 16384, 4, 4096, 4),
        ("log_softmax", 16384, 4, 4096, 4),
        ("", 32768, 4, 16384, 4),
    ),
    held_width=256,
    held_bytes=192 << 10,
    held_registers=(
        ("max", 112, 144, 136, 144),
        ("min", 112, 144, 136, 144),
        ("", 136, 144, 136, 144),
    ),
    held_masked=(
        ("prod", 136, 144, 136, 144),
        ("var", 152, 136, 144, 136),
        ("std", 152, 136, 144, 136),
        ("", 152, 136, 152, 136),
    ),
    held_classes=(
        ("prod", 168, 120, 168, 120),
        ("log_softmax", 160, 128, 160, 128),
        ("var", 152, 128, 160, 144),
        ("std", 152, 128, 160, 144),
        ("", 152, 128, 152, 128),
    ),
    held_nested=(
        ("prod", 168, 120, 168, 120),
        ("softmax", 152, 128, 176, 128),
        ("log_softmax", 168, 128, 168, 128),
        ("var", 152, 128, 160, 144),
        ("std", 152, 128, 160, 144),
        ("", 176, 128, 152, 128),
    ),
    held_halved=(),
    walked_rows=(
        ("cumsum", 2048, 1, 1024, 1),
        ("cumprod", 1024, 1, 2048, 2),
        ("log_cumsum_exp", 2048, 2, 2048, 2),
        ("", 2048, 1, 4096, 2),
    ),
    walked_from=(
        ("walked_rows", "cumsum", 16384, 16384),
        ("walked_rows", "cumprod", 1024, 2048),
        ("walked_rows", "log_cumsum_exp", 1024, 1024),
        ("walked_rows", "", 2048, 2048),
        ("walked_ragged", "log_cumsum_exp", 768, 512),
        ("walked_ragged", "", 512, 512),
        ("walked_uneven", "cumsum", 512, 4096),
        ("walked_uneven", "", 512, 512),
        ("held_scans", "cumprod", 1 << 20, 1 << 20),
        ("held_scans", "log_cumsum_exp", 1 << 20, 1 << 20),
        ("held_scans", "cumsum", 1 << 20, 1 << 20),
        ("held_scans", "", 1 << 16, 1 << 16),
    ),
    walked_parts=2,
    walked_warps=8,
    walked_ragged=(
        ("cumprod", 1024, 1, 512, 1),
        ("log_cumsum_exp", 1024, 1, 512, 1),
        ("", 2048, 1, 1024, 1),
    ),
    walked_columns=(
        ("cumsum", 16384, 4, 0, 4),
        ("cumprod", 4096, 4, 2048, 4),
        ("log_cumsum_exp", 8192, 8, 2048, 4),
        ("", 8192, 4, 8192, 8),
    ),
    walked_strips=(
        ("cumsum", 0, 4, 0, 4),
        ("cumprod", 4096, 4, 0, 4),
        ("log_cumsum_exp", 4096, 4, 0, 4),
        ("", 8192, 4, 0, 4),
    ),
    walked_grains=(
        ("cumsum", 16384, 4, 8192, 4),
        ("cumprod", 4096, 4, 2048, 4),
        ("log_cumsum_exp", 8192, 8, 2048, 4),
        ("", 0, 4, 8192, 4),
    ),
    walked_axis=1024,
    walked_column_parts=3,
    held_scans=(
        ("cumsum", 16384, 4, 8192, 4),
        ("cumprod", 8192, 8, 4096, 4),
        ("log_cumsum_exp", 8192, 4, 4096, 4),
        ("mark", 16384, 4, 8192, 4),
        ("", 16384, 8, 8192, 4),
    ),
    held_scan_registers=(("cumprod", 208, 96, 112, 80), ("", 208, 96, 120, 80)),
    tall_programs=(528, 396),
    tall_bytes=16384,
    tall_room=128 << 10,
    tall_rows=(
        ("tall_rows", "softmax", 256, 256),
        ("tall_rows", "log_softmax", 1024, 1024),
        ("tall_rows", "max", 1024, 1024),
        ("tall_rows", "min", 1024, 1024),
        ("tall_rows", "", 1024, 128),
    ),
    tall_parts=(
        ("tall_parts", "softmax", 4096, 256),
        ("tall_parts", "log_softmax", 4096, 256),
        ("tall_parts", "max", 128, 128),
        ("tall_parts", "min", 128, 128),
    ),
    held_first=(
        ("held_rows", "prod", 1, 1),
        ("held_columns", "", 1, 1),
    ),
    cluster_first=(
        ("long_rows", "prod", 0, 4),
        ("long_rows", "", 0, 8),
    ),
    lag=352,
    lag_bytes=18 << 20,
    strided_tile=4096,
    cluster=8,
    scan_tile=1024,
    scan_resident=4096,
    scan_step=1024,
    scan_product=(8192, 1024),
    scan_words=16,
    scan_columns=128,
    alone=(("", 256, 4, 128, 4),),
    alone_axis=64,  # a chain of additions, of which the guarantee allows for some more
    alone_rows=(("alone_rows", "", 1024, 1024),),
    scan_column_bytes=1024,
    scan_column_step=4,
    scan_column_few=64,
    scan_fill=192,
    scan_lag=26 << 20,
    lagged_scans=("cumsum",),
    chained=(
        ("cumsum", 8192, 4, 8192, 8),
        ("log_cumsum_exp", 2048, 2, 2048, 4),
        ("", 4096, 4, 2048, 4),
    ),
    chained_far=(
        ("cumsum", 8192, 4, 8192, 8),
        ("cumprod", 4096, 4, 2048, 4),
        ("", 4096, 4, 4096, 8),
    ),
    chained_many=(("cumprod", 2048, 4, 1024, 4), ("", 0, 4, 0, 4)),
    chained_from=16384,
    chain=16,
    evened=("cummax", "cummin", "log_cumsum_exp"),
    evened_from=1 << 25,
    scan_chunk=32,
    side=(
        ("cumsum", (64, 8, 16, 4), (64, 16, 16, 4)),
        ("cumprod", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("log_cumsum_exp", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("", (32, 16, 16, 4), (32, 8, 8, 4)),
    ),
    short_side=(
        ("log_cumsum_exp", (32, 8, 8, 2), (64, 4, 16, 4)),
        ("", (128, 4, 16, 4), (64, 4, 16, 4)),
    ),
    narrow_side=(
        ("cumsum", (32, 32, 16, 8), (32, 16, 16, 4)),
        ("cumprod", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("log_cumsum_exp", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("", (32, 16, 16, 4), (32, 8, 16, 4)),
    ),
    ahead=(
        ("lines", "cumsum", 1, 0),
        ("side", "cumsum", 0, 0),
        ("side", "cumprod", 1, 0),
        ("side", "log_cumsum_exp", 1, 1),
        ("side", "", 0, 1),
        ("narrow_side", "cumsum", 0, 0),
        ("narrow_side", "cumprod", 1, 1),
        ("narrow_side", "log_cumsum_exp", 1, 2),
        ("narrow_side", "", 0, 1),
    ),
    strips=512,
    side_chunk=512,
    side_window=64,
    lines=(
        ("cumsum", 2048, 16, 4096, 32),
        ("cumprod", 1024, 16, 1024, 8),
        ("log_cumsum_exp", 1024, 32, 1024, 16),
        ("", 1024, 8, 1024, 16),
    ),
    short_lines=(("cumsum", 4096, 32, 4096, 32), ("log_cumsum_exp", 512, 16, 256, 8)),
    forward_lines=(("", 1024, 32, 1024, 16),),
    forward_side=(("", (32, 8, 8, 4), (32, 8, 8, 4)),),
    thread_words=32,
    learned_bytes=8192,
    learned_thread=64,
    sort_block=256,
    sort_bits=9,
    sum_block=1024,
    chunk=128,
    chunk_bytes=2048,
    together=8,
    chunk_registers=80,
    chunk_more=128,
    chunk_more_bytes=512,
    together_more=16,
    mark_blocks=512,
    clear_rows=8,
    clear_columns=1024,
    few_indices=512,
    few_columns=256,
    few_words=4096,
    few_warps=4,
    few_zeros=16384,
    few_programs=2048,
    marks_from=1 << 14,
    join=1024,
    join_lanes=32,
    paired=(ElementKind.F16, ElementKind.BF16),
    at_once=(
        ("longest_rows", "prod", 32, 0),
        ("cluster_rows", "prod", 0, 16),
        ("cluster_rows", "softmax", 32, 32),
        ("cluster_rows", "log_softmax", 16, 16),
        ("cluster_rows", "var", 16, 32),
        ("cluster_rows", "std", 16, 32),
        ("ragged_rows", "softmax", 8, 0),
        ("ragged_rows", "log_softmax", 16, 8),
        ("ragged_rows", "var", 16, 32),
        ("ragged_rows", "std", 16, 32),
    ),
    registers=(
        ("lines", "cumsum", 64, 0),
        ("lines", "cummax", 80, 0),
        ("lines", "cummin", 80, 0),
        ("lines", "log_cumsum_exp", 136, 128),
        ("forward_lines", "cumprod", 128, 0),
        ("forward_lines", "log_cumsum_exp", 168, 136),
        ("side", "cumsum", 128, 0),
        ("side", "cumprod", 168, 0),
        ("side", "cummax", 255, 168),
        ("side", "cummin", 255, 168),
        ("short_side", "cumsum", 128, 0),
        ("narrow_side", "cumsum", 128, 128),
        ("narrow_side", "cummax", 255, 168),
        ("narrow_side", "cummin", 255, 168),
        ("chained", "cumprod", 128, 128),
        ("chained", "log_cumsum_exp", 128, 96),
        ("chained_far", "log_cumsum_exp", 168, 0),
        ("chained", "cummax", 96, 96),
        ("chained", "cummin", 96, 96),
        ("lagged_rows", "softmax", 80, 0),
        ("lagged_rows", "log_softmax", 80, 168),
        ("lagged_rows", "max", 96, 0),
        ("lagged_rows", "min", 96, 0),
        ("lagged_rows", "prod", 0, 96),
        ("lagged_columns", "softmax", 168, 0),
        ("lagged_columns", "log_softmax", 0, 96),
        ("lagged_columns", "max", 128, 0),
        ("lagged_columns", "min", 128, 0),
        ("lagged_columns", "var", 168, 96),
        ("lagged_columns", "std", 168, 96),
        ("longest_rows", "softmax", 32, 0),
        ("longest_rows", "var", 64, 0),
        ("longest_rows", "std", 64, 0),
        ("longest_rows", "prod", 56, 0),
        ("cluster_rows", "var", 80, 96),
        ("cluster_rows", "std", 80, 96),
        ("cluster_rows", "prod", 168, 120),
        ("ragged_rows", "softmax", 80, 80),
        ("ragged_rows", "log_softmax", 0, 168),
        ("ragged_rows", "max", 0, 168),
        ("ragged_rows", "min", 0, 168),
        ("ragged_rows", "var", 96, 96),
        ("ragged_rows", "std", 96, 96),
        ("ragged_rows", "prod", 80, 128),
        ("ragged_eighths", "log_softmax", 0, 80),
        ("ragged_whole", "prod", 80, 80),
        ("ragged_warp", "prod", 0, 72),
        ("whole_columns", "prod", 96, 0),
        ("cluster_columns", "max", 0, 80),
        ("cluster_columns", "min", 0, 80),
        ("cluster_columns", "var", 0, 168),
    ),
)

_INTERPRETER = Table(
    fill=3,
    map_bytes=256,
    row_tile=64,
    resident_words=128,
    packed=1 << 30,
    column_factor=1,
    column_bytes=16,
    column_tile=256,
    lagged_rows=(("", 128, 4, 64, 4),),
    lagged_columns=(("", 128, 4, 64, 4),),
    lagged_width=16,
    cluster_rows=(("", 128, 4, 64, 4),),
    cluster_columns=(("", 128, 4, 64, 4),),
    ragged_rows=(("", 128, 1, 128, 1),),
    ragged_short=64,
    ragged_tile=(("softmax", 64, 256, 128), ("", 1, 256, 256)),
    ragged_even=(
        ("ragged_even", "max", 1, 1),
        ("ragged_even", "min", 1, 1),
        ("ragged_even", "", 2048, 2048),
    ),
    held_rows=(("", 0, 4, 0, 4),),
    held_columns=(("", 0, 4, 0, 4),),
    held_width=128,
    held_bytes=192 << 10,
    held_registers=(("", 136, 144, 136, 144),),
    held_masked=(("", 152, 136, 152, 136),),
    held_classes=(("", 152, 128, 152, 128),),
    held_nested=(("", 152, 128, 152, 128),),
    held_halved=(),
    walked_rows=(("", 0, 4, 0, 4),),
    walked_from=(),
    walked_parts=2,
    walked_warps=1,
    walked_ragged=(("", 0, 4, 0, 4),),
    walked_columns=(("", 0, 4, 0, 4),),
    walked_strips=(("", 0, 4, 0, 4),),
    walked_grains=(("", 0, 4, 0, 4),),
    walked_axis=1,
    walked_column_parts=3,
    held_scans=(("", 0, 4, 0, 4),),
    held_scan_registers=(("cumprod", 208, 96, 112, 80), ("", 208, 96, 120, 80)),
    tall_programs=(8, 8),
    tall_bytes=128,
    tall_room=128 << 10,
    tall_rows=(),
    tall_parts=(),
    held_first=(),
    cluster_first=(),
    edges_apart=(("ragged_warp", "max", 1, 1), ("ragged_warp", "log_softmax", 1, 1)),
    edges_always=(("even_warp", "max", 1, 0),),
    lag=5,
    lag_bytes=1 << 20,
    strided_tile=128,
    cluster=0,
    scan_tile=64,
    scan_resident=64,
    scan_step=32,
    scan_product=(64, 64),
    scan_words=32,
    scan_columns=16,
    alone=(("", 4, 1, 4, 1),),
    alone_axis=8,
    alone_rows=(("alone_rows", "", 256, 0),),
    scan_column_bytes=64,
    scan_column_step=4,
    scan_column_few=8,
    scan_fill=3,
    scan_lag=1024,
    lagged_scans=("cumsum", "cumprod", "cummax", "log_cumsum_exp"),
    chained=(("", 32, 1, 32, 1),),
    chained_far=(("", 32, 1, 32, 1),),
    chained_many=(("cumprod", 32, 1, 32, 1), ("", 0, 1, 0, 1)),
    chained_from=64,
    chain=2,
    evened=("cumprod", "cummax", "cummin", "log_cumsum_exp"),
    evened_from=1,
    scan_chunk=8,
    side=(("cumsum", (8, 2, 4, 1), (4, 2, 2, 1)), ("", (8, 2, 2, 1), (4, 4, 2, 1))),
    short_side=(("cumsum", (8, 2, 4, 1), (4, 2, 2, 1)), ("", (8, 2, 2, 1), (4, 4, 2, 1))),
    narrow_side=(("", (4, 2, 4, 1), (2, 4, 2, 1)),),
    ahead=(("side", "", 1, 0), ("narrow_side", "", 0, 2), ("lines", "cumsum", 1, 0)),
    strips=3,
    side_chunk=12,
    side_window=2,
    lines=(("", 32, 1, 32, 1),),
    short_lines=(("log_cumsum_exp", 16, 1, 16, 1),),
    forward_lines=(("", 32, 1, 32, 1),),
    forward_side=(("", (8, 2, 2, 1), (4, 4, 2, 1)),),
    thread_words=32,
    learned_bytes=256,
    learned_thread=16,
    sort_block=32,
    sort_bits=2,
    sum_block=4,
    chunk=8,
    chunk_bytes=128,
    together=4,
    chunk_registers=80,
    chunk_more=8,
    chunk_more_bytes=64,
    together_more=2,
    mark_blocks=4,
    clear_rows=4,
    clear_columns=64,
    few_indices=6,
    few_columns=32,
    few_words=128,
    few_warps=1,
    few_zeros=64,
    few_programs=128,
    marks_from=32,
    join=8,
    join_lanes=2,
    at_once=(("whole_rows", "", 1, 1), ("ragged_rows", "softmax", 0, 0), ("ragged_rows", "", 1, 1)),
)


_OTHERS = replace(
    _SM_90,
    cluster_rows=tuple(
        (kind, a, max(8, w), b, max(8, v)) for kind, a, w, b, v in _SM_90.cluster_rows
    ),
    ragged_rows=tuple(
        (kind, a, max(8, w), b, max(8, v)) for kind, a, w, b, v in _SM_90.ragged_rows
    ),
    edges_always=(),  # found by measuring on sm_90
    # For the stack; what is enough for others was found by compiling for sm_90.
    registers=(("ragged_whole", "prod", 128, 128),),
    held_scans=(("cumprod", 8192, 4, 4096, 4), *_SM_90.held_scans),
    held_masked=(
        ("softmax", 136, 144, 152, 136),
        ("std", 152, 136, 144, 128),
        *_SM_90.held_masked,
    ),
    held_classes=(
        ("var", 136, 136, 160, 144),
        ("std", 136, 136, 160, 144),
        *_SM_90.held_classes,
    ),
    held_nested=(
        ("prod", 200, 112, 168, 120),
        ("var", 200, 112, 152, 144),
        ("std", 200, 112, 152, 144),
        ("softmax", 176, 128, 176, 128),
        ("log_softmax", 176, 128, 176, 128),
        *_SM_90.held_nested,
    ),
    held_halved=("var", "std"),
)
_NONE: Lines = (("", 0, 1, 0, 1),)
_WALKED = ("walked_rows", "walked_ragged", "walked_columns", "walked_grains", "walked_strips")
_HELD = ("held_rows", "held_columns", "held_scans")


def without(table: Table, *fields: str) -> Table:
    """The same without tiles of these sizes; "walked" and "held" stand for all of theirs."""
    groups = {"walked": _WALKED, "held": _HELD}
    names = [name for field in fields for name in groups.get(field, (field,))]
    return replace(table, **dict[str, Any](dict.fromkeys(names, _NONE)))


# These have less shared memory than a processor keeps rows in, so none are walked or held.
_SM_80 = replace(
    without(_OTHERS, "walked", "held"),
    early=False,
    tall_room=64 << 10,
    registers=(),
    roomy=True,
    cluster=0,
    paired=(ElementKind.F16,),
)
_SM_120 = replace(without(_OTHERS, "walked", "held"), tall_room=64 << 10)
_PROCESSORS = 132  # of the H200


_TABLES = {"interpreter": _INTERPRETER, "sm_80": _SM_80, "sm_90": _SM_90}


def table_of(arch: str, processors: int | None = None) -> Table:
    """The thresholds of an architecture, on a device with so many multiprocessors."""
    others = _SM_120 if arch.startswith("sm_12") else _OTHERS
    table = _TABLES.get(arch, _TABLES["sm_80"] if arch.startswith("sm_8") else others)
    if processors is None or processors == _PROCESSORS:
        return table
    return replace(table, fill=2 * processors)


@contextmanager
def using(arch: str, table: Table) -> Iterator[None]:
    """Other thresholds for an architecture meanwhile: to measure them, or to test small tiles.

    What is selected and bound within keeps them. Plans are shared, so they are forgotten before
    and after; no other thread may select any meanwhile.
    """
    from ...plans import forget_plans

    before = dict(_TABLES)
    _TABLES[arch] = table
    forget_plans()
    try:
        yield
    finally:
        _TABLES.clear()
        _TABLES.update(before)
        forget_plans()
