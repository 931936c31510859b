"""Thresholds: how large tiles are and when a row is split, one table an architecture.

The numbers for the H200 (sm_90) were measured on it; other architectures use them until somebody
measures there. The interpreter's are small, so that small shapes meet every variant.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Table", "table_of"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Sizes are in elements of a tile, unless they say otherwise."""

    fill: int
    """So many programs fill the machine: with fewer, rows are split."""
    map_tile: int
    """A map's tile."""
    row_tile: int
    """Short rows are put together up to this."""
    resident_words: int
    """What a program may keep of its rows, in 32-bit registers, all operands together."""
    column_bytes: int
    """Neighbouring rows are taken together up to this many bytes."""
    streamed_tile: int
    """A step of a row that is read twice."""
    scan_tile: int
    """Short rows of a scan are put together up to this."""
    scan_resident: int
    """The longest row of a scan that stays in registers; half of it for f64."""
    scan_step: int
    """A tile of a longer row."""
    scan_columns: int
    """The longest axis of neighbouring rows that stays in registers."""
    scan_column_step: int
    """Steps along the axis in a tile of neighbouring rows."""
    triangle: int
    """Rows from here on sum halves on the matrix units; at least 1024."""
    triangle_tile: int
    triangle_warps: int
    thread_words: int
    """Registers a thread gives to a tile: decides the number of warps."""
    sort_block: int
    sort_bits: int
    sum_block: int
    stretch: int
    """Words of one name that are summed by a program of their own."""
    together: int
    """Rows of dout added at a time."""
    table_rows: int
    """Rows of an embedding table a program."""
    table_columns: int
    join: int
    """Tiles whose carries are joined at a time."""


_SM_90 = Table(
    fill=264,
    map_tile=4096,
    row_tile=4096,
    resident_words=32768,
    column_bytes=128,
    streamed_tile=4096,
    scan_tile=2048,
    scan_resident=8192,
    scan_step=4096,
    scan_columns=256,
    scan_column_step=64,
    triangle=1024,
    triangle_tile=8192,
    triangle_warps=4,
    thread_words=32,
    sort_block=2048,
    sort_bits=8,
    sum_block=4096,
    stretch=64,
    together=16,
    table_rows=8,
    table_columns=1024,
    join=256,
)

_INTERPRETER = Table(
    fill=3,
    map_tile=64,
    row_tile=64,
    resident_words=128,
    column_bytes=16,
    streamed_tile=32,
    scan_tile=64,
    scan_resident=64,
    scan_step=32,
    scan_columns=16,
    scan_column_step=8,
    triangle=1024,
    triangle_tile=1024,
    triangle_warps=4,
    thread_words=32,
    sort_block=32,
    sort_bits=2,
    sum_block=32,
    stretch=8,
    together=4,
    table_rows=4,
    table_columns=64,
    join=4,
)


def table_of(arch: str) -> Table:
    """The thresholds of an architecture."""
    return _INTERPRETER if arch == "interpreter" else _SM_90
