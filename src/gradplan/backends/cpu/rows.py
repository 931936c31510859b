"""The engines *map* and *row state then map* on a CPU: how a problem is laid out and launched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...descriptors import (
    BinaryParamBackwardDescriptor,
    ReduceBackwardDescriptor,
)
from ...geometry import Dim, c_strides, nest
from ...kinds import BinaryKind, ElementKind, OpCategory, ReduceKind, SoftmaxKind, TieRule
from ...registry import Engine
from . import choices
from .jit import Kernel, kernel
from .kernels import layout as at
from .program import (
    ENOUGH_UNITS,
    GRAIN_ELEMENTS,
    Program,
    Strides,
    bytes_of,
    empty,
    float_bits,
    launch_of,
    room_of,
    streams,
    write_dim,
    write_nest,
)

__all__ = ["program", "workspace_bytes"]

# Long rows are cut into chunks of this many elements when rows alone cannot feed the cores.
_CHUNK_ELEMENTS = 1 << 16
# Up to so many elements rows run side by side: where all arrays take less than `_SHORT_SHARE` of
# the last cache, and where they take more. That takes, as a share of the time that rows one by
# one take, of rows of 16, 32, 48, 64 and 80 in 3 MiB: softmax f32 0.23, 0.41, 0.53, 0.67, 0.85,
# bf16 0.14, 0.26, 0.40, 0.52, 0.66, f64 0.41, 0.68, 0.89, 1.14, 1.28; in 100 MiB: f32 0.61, 1.23,
# 1.62, 2.17, 2.24, bf16 0.35, 0.60, 1.19, 1.92, 1.94, f64 0.99, 1.58, 1.61, 1.60, 1.71.
_SHORT = {
    ElementKind.F32: (64, 28),
    ElementKind.F16: (64, 40),
    ElementKind.BF16: (64, 40),
    ElementKind.F64: (40, 16),
}
_SHORT_SHARE = 0.35
# They pass through tiles; but f32 and f64 of fewer elements than this are faster where they lie.
_TURNED = 8
# The same where strides are read at run time: through tiles (softmax of every other of 256 bf16
# 0.98 ns an element one by one, 0.65 so), and where they lie.
_LONGEST_TURNED = 256
_LONGEST_APART = {ElementKind.F32: 32, ElementKind.F64: 16}
# The fewest bytes in one piece, of a row and of rows side by side, that leave past the caches. In
# ns an element of 100 MiB, through them and past them: softmax f32 one by one, rows of 64, 256,
# 512 and 4096 0.38, 0.27, 0.25, 0.26 and 1.40, 0.34, 0.22, 0.23 (where rows begin with lines
# 0.34, 0.25, 0.24, 0.25 and 0.35, 0.21, 0.21, 0.23); side by side, 16, 64 and 256 0.30, 0.41,
# 0.34 and 0.52, 0.33, 0.29, 64 and 128 of bf16 0.16, 0.19 and 0.19, 0.18.
_STREAMED_ROW_BYTES, _STREAMED_STRIP_BYTES = 2048, 256
_SLOW = (SoftmaxKind.LOG_SOFTMAX, ReduceKind.LOG_SUM_EXP, ReduceKind.PROD)


def program(desc: Any, strides: Strides) -> Program:
    shape, axes = desc.shape_and_axes
    rank = len(shape)
    reduced = desc.category is OpCategory.REDUCTION
    outputs = [op.name for op in desc.operands if op.output and op.name in strides]
    if 0 in shape or not outputs:
        return empty()
    names = ("dy", "x", "y", *outputs)
    operands = tuple(name if name in strides else None for name in names)
    rows: list[Sequence[int]] = [strides.get(name, (0,) * rank) for name in names]
    rows += [(0,) * rank] * (5 - len(rows))
    ties = desc.ties if desc.spec.ties else None
    rows.append(_index_steps(shape, axes, ties))

    flat = not reduced and desc.spec.engine is Engine.MAP
    stateless = flat or desc.spec.engine is Engine.MAP or ties is TieRule.ALL
    lead = 3
    if flat:  # nothing depends on anything: all dimensions are one nest
        along, across = nest(shape, range(rank), rows, lead), nest(shape, (), rows, lead)
    else:
        along = nest(shape, axes, rows, lead)
        others = [axis for axis in range(rank) if axis not in axes]
        across = nest(shape, others, rows, lead)
    n, row_count = along.size, across.size

    inner, beside = along.dims[0], across.dims[0]
    columns = (
        not flat
        and beside.extent > 1
        and (abs(beside.strides[lead]) < abs(inner.strides[lead]) or inner.extent == 1)
    )
    used = [k for k, name in enumerate(names[:3]) if name in strides] + list(
        range(3, 3 + len(outputs))
    )
    loop = beside if columns else inner
    looped = [k for k in used if not (reduced and not columns and k in (0, 2))]
    unit = all(loop.strides[k] == 1 for k in looped)

    short = turned = False
    if not flat and not columns and len(along.dims) == 1 and 1 < n < beside.extent:
        turned = _turns(desc, inner, looped)
        short = n <= _longest(desc, unit, turned)
        turned = turned and short
    if short:
        # A step of one row and of the next are never 1 apart, but in tiles.
        loop, looped, unit = beside, used, turned
    meta = array("q", bytes(8 * at.META_WORDS))
    width, blocks, chunk = 1, row_count, n
    if turned:
        split = False
        width = min(_lanes_of(desc.op), at.TILE // n // 8 * 8)
        blocks = -(-beside.extent // width)
        meta[at.LANE_WIDTH], meta[at.LANE_BLOCKS] = width, blocks
        groups = blocks * (row_count // beside.extent)
    elif columns or short:
        width, split = _strips(n, row_count, beside.extent, _lanes_of(desc.op), stateless)
        if short:  # not so wide that there are few
            width = min(width, GRAIN_ELEMENTS // n // 64 * 64)
        blocks = -(-beside.extent // width)
        meta[at.LANE_WIDTH], meta[at.LANE_BLOCKS] = width, blocks
        groups = blocks * (row_count // beside.extent)
    else:
        groups = row_count
        split = groups < ENOUGH_UNITS and n > 2 * _CHUNK_ELEMENTS
    if stateless and not turned:
        chunk = max(1, min(n, GRAIN_ELEMENTS // width))
    elif split:
        chunk = _chunk(n, width)
    chunks = -(-n // chunk)
    meta[at.EXTENT], meta[at.CHUNK], meta[at.CHUNKS] = n, chunk, chunks
    meta[at.ROWS], meta[at.INDEX_BASE] = row_count, along.offsets[5]
    p, q = _params(desc, n, strides)
    meta[at.PARAM], meta[at.PARAM2] = float_bits(p), float_bits(q)
    write_nest(meta, along.dims, at.AXIS, at.MORE_AXIS, at.MORE_AXIS_AT)
    write_nest(meta, across.dims, at.ACROSS, at.MORE_ACROSS, at.MORE_ACROSS_AT)
    piece = loop.extent * desc.element.size_bytes
    lines = piece >= (_STREAMED_STRIP_BYTES if columns else _STREAMED_ROW_BYTES)
    meta[at.STREAMING] = unit and lines and not turned and streams(desc, room_of())
    if turned:
        meta += _in_tiles(meta, inner, width, reduced)

    units = groups * chunks
    workspace = 0
    if not stateless and chunks > 1:
        workspace = row_count * chunks * 8 * _STATE_SLOTS.get(desc.op, 1)
        meta[at.LAST_UNIT] = units - 1
    kind, element = _SAME_KERNEL.get(desc.op, desc.op), desc.element
    # A weight that f32 cannot hold well is applied in f64, also to halves.
    extreme = kind == BinaryKind.LERP and any(
        weight != 0 and not 2.0**-100 < abs(weight) < 2.0**100 for weight in (p, q)
    )
    tie_name = f"_{ties.value}" if ties is not None else ""
    together = columns or short
    arguments = (kind, element, ties, together, unit, reduced, len(outputs), extreme, turned)
    layout = "flat" if flat and len(along.dims) == 1 else "columns" if columns else "rows"
    pattern = "turned" if turned else "unit" if unit else "any"
    name = f"{kind.value}{tie_name}_{element.value}_{'columns' if together else 'rows'}_{pattern}"
    variant = "beside" if short and not turned else pattern
    variant += f"{'_split' if workspace else ''}{'_streamed' if meta[at.STREAMING] else ''}"
    name += f"{len(outputs) if len(outputs) > 1 else ''}{'_extreme' if extreme else ''}"
    item = element.size_bytes
    return Program(
        kernel=partial(_rows_kernel, name, arguments),
        meta=meta,
        operands=operands,
        offsets=tuple(
            (a + b) * item for a, b in zip(along.offsets[:5], across.offsets[:5], strict=True)
        ),
        launches=_row_launches(units, n * row_count, row_count, chunks, stateless),
        workspace_bytes=workspace,
        # A row stays in the cache between its state and its map; many side by side do not.
        reads=dict.fromkeys(("dy", "x", "y"), 2)
        if not stateless and (workspace or columns)
        else {},
        layout=layout,
        variant=variant,
        why=_why_rows(layout, unit, chunks if workspace else 1, width, short),
        others=choices.rows(
            unit=unit,
            turned=turned,
            lines=lines,
            strided=[names[k] for k in looped if loop.strides[k] != 1],
            split=None if stateless else workspace > 0,
            units=groups,
            enough=ENOUGH_UNITS,
            streamed=bool(meta[at.STREAMING]),
            takes=bytes_of(desc),
            room=room_of(),
        ),
    )


def _in_tiles(meta: array[int], axis: Dim, pitch: int, reduced: bool) -> array[int]:
    """The same block for rows that tiles hold: so many lanes to a step."""
    made = array("q", meta)
    by_row = 0 if reduced else pitch
    write_dim(made, at.AXIS, Dim(axis.extent, (by_row, pitch, by_row, pitch, 0, axis.strides[5])))
    return made


def _turns(desc: Any, axis: Dim, looped: Sequence[int]) -> bool:
    """Whether short rows pass through tiles that turn them round: where lanes that are apart take
    long one by one, or elements of a row arrive eight at a time."""
    if desc.element in (ElementKind.F16, ElementKind.BF16) or desc.op in _SLOW:
        return True
    return axis.extent >= _TURNED and all(abs(axis.strides[k]) <= 1 for k in looped)


def _longest(desc: Any, unit: bool, turned: bool) -> int:
    """Up to how many elements rows are short."""
    if not unit:
        return _LONGEST_TURNED if turned else _LONGEST_APART[desc.element]
    small, large = _SHORT[desc.element]
    return small if bytes_of(desc) <= room_of(_SHORT_SHARE) else large


def _index_steps(shape: Sequence[int], axes: Sequence[int], ties: TieRule | None) -> list[int]:
    """How far a step along each axis goes in the order that ties are broken by, if they are."""
    steps = [0] * len(shape)
    if ties in (TieRule.FIRST, TieRule.LAST):
        for axis, step in zip(axes, c_strides([shape[axis] for axis in axes]), strict=True):
            steps[axis] = step
    return steps


def _row_launches(
    units: int, elements: int, rows: int, chunks: int, stateless: bool
) -> tuple[tuple[int, int, int], ...]:
    if stateless or chunks == 1:
        return (launch_of(at.APPLY if stateless else at.FUSED, units, elements),)
    return (
        launch_of(at.PARTIAL, units, elements),
        launch_of(at.COMBINE, rows, rows * chunks),
        launch_of(at.APPLY, units, elements),
    )


_STATE_SLOTS = {ReduceKind.PROD: 3}
# Which x equal y is all that counts for both extrema, and a sum's gradient is a mean's with n = 1.
_SAME_KERNEL: dict[Any, Any] = {ReduceKind.MIN: ReduceKind.MAX, ReduceKind.SUM: ReduceKind.MEAN}


def _rows_kernel(name: str, arguments: tuple[Any, ...]) -> Kernel:
    def build() -> Any:
        from .kernels import rows

        return rows.build(*arguments)

    return kernel(name, build)


def _lanes_of(op: Any) -> int:
    """The most rows side by side that a kernel takes; `rows.max_lanes` makes room for them."""
    return 1024 if op == ReduceKind.PROD else 2048


def _strips(n: int, row_count: int, lanes: int, most: int, stateless: bool) -> tuple[int, bool]:
    """How many rows side by side are a unit of work, and whether they are cut along the axis.

    Memory is read best by whole pages, so strips are wide, and where that leaves too few of
    them, they are cut into chunks. Narrow enough for the cache to keep a strip between its state
    and its map, they would touch a new page every step.
    """
    wide = min(lanes, most)
    groups = -(-lanes // wide) * (row_count // lanes)
    if stateless:
        return wide, False
    if groups < ENOUGH_UNITS and n * wide > 2 * _CHUNK_ELEMENTS:
        return wide, True
    narrow = max(_CHUNK_ELEMENTS // n // 64 * 64, 64 if n < 1024 else 256)
    return min(wide, narrow), False


def _chunk(n: int, width: int) -> int:
    """The steps of a split row's chunk, or of a strip of so many rows."""
    return max(1, min(n, _CHUNK_ELEMENTS * min(4, -(-width // 512)) // width))


def _params(desc: Any, n: int, strides: Strides) -> tuple[float, float]:
    """The numbers p and q of the formulas."""
    if isinstance(desc, BinaryParamBackwardDescriptor):
        weights = (1.0 - desc.param, desc.param)
        return weights if "da" in strides else weights[::-1]
    if isinstance(desc, ReduceBackwardDescriptor):
        if desc.kind in (ReduceKind.SUM, ReduceKind.MEAN):
            return (float(n) if desc.kind is ReduceKind.MEAN else 1.0), 0.0
        m = n - desc.correction
        return (m if m > 0 else 1.0), 0.0
    return 0.0, 0.0


def _why_rows(layout: str, unit: bool, chunks: int, width: int, short: bool) -> str:
    reason = {
        "flat": "one flat loop over all elements",
        "rows": "the axis is the nearest in memory: each row is one loop",
        "columns": f"other rows lie nearer in memory than the axis: {width} side by side",
    }[layout]
    if short:
        reason = f"rows are short: {width} side by side"
        reason += ", through tiles that turn them round" if unit else ", where they lie"
    if not unit:
        reason += "; strides differ from 1 and are read at run time"
    if chunks > 1:
        reason += f"; rows are cut into {chunks} chunks that every core shares"
    return reason


def workspace_bytes(desc: Any, n: int, rows: int) -> int:
    """The most workspace that any layout of rows of n elements needs."""
    if desc.spec.engine is Engine.MAP or getattr(desc, "ties", None) is TieRule.ALL:
        return 0
    width = min(rows, _lanes_of(desc.op))
    if n * width <= 2 * _CHUNK_ELEMENTS:
        return 0
    chunks = -(-n // _chunk(n, min(width, 512)))  # no strip of those rows has shorter ones
    return int(rows * chunks * 8 * _STATE_SLOTS.get(desc.op, 1))
