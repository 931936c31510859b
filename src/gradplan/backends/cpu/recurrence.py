"""The engine *recurrence* on a CPU: how a problem is laid out and launched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...descriptors import (
    ScanBackwardDescriptor,
)
from ...geometry import Dim, nest
from ...kinds import ScanKind
from ...threads import max_threads
from . import choices
from .jit import Kernel, kernel
from .kernels import layout as at
from .kernels.layout import LINE, MAX_LANES
from .program import (
    ENOUGH_UNITS,
    Program,
    Strides,
    bytes_of,
    empty,
    launch_of,
    lines_of,
    room_of,
    streams,
    write_nest,
)

__all__ = ["program", "workspace_bytes"]

# Elements of short rows that are lanes together. In ns an element, 2²² of f32 in rows of 8: cumsum
# and cumprod 0.10, 0.30 with so many, 0.09, 0.54 with twice as many.
_TOGETHER = 512
# Of rows that lie side by side, half a page is read at a time.
_DIRECT_BYTES = 2048
# The share of the last cache beyond which outputs are streamed: tiles, which leave in short pieces
# otherwise, gain sooner than rows do (cumsum f32 rows, 32 MiB, 1.7 against 1.2 ms).
_TILES_STREAMED_SHARE = 0.7
# Bytes of a row at least, of which each begins as far into a line as the others: shorter pieces of
# lines are slower past the caches. In ns an element: cumsum f32, rows of 16, 48 and 1000 of 2²²
# elements 0.19, 0.13, 0.35 past them, 0.11, 0.19, 0.17 otherwise.
_SHORTEST_STREAMED = 128
# A split row's chunk. Eight of them make a unit of work.
_SCAN_CHUNK = 1 << 13
# Rows longer than this are split wherever states are recomputed: it bounds the checkpoints.
_CHECKPOINTED = 1 << 16


def _row_lanes(rows: int, n: int) -> int:
    """How many rows of n elements, one after the other in memory, run as lanes: more hide more of
    the time that a step takes to feed the next, while there are enough to go round."""
    usual = 32 if rows >= 256 else 16 if rows >= 64 else 8
    if n > 4 * _SCAN_CHUNK:  # narrower rather than cut
        while usual > 8 and rows < ENOUGH_UNITS * usual:
            usual //= 2
    # Of short rows many, for each group of them has work of its own.
    return max(usual, min(_TOGETHER // n, MAX_LANES, rows // ENOUGH_UNITS) // 8 * 8)


def program(desc: ScanBackwardDescriptor, strides: Strides) -> Program:
    shape, (axis,) = desc.shape_and_axes
    rank = len(shape)
    if 0 in shape:
        return empty()
    names = ("dy", "x", "y", "dx")
    rows: list[Sequence[int]] = [strides.get(name, (0,) * rank) for name in names]
    lead = 3
    along = nest(shape, (axis,), rows, lead, ordered=True)
    across = nest(shape, [d for d in range(rank) if d != axis], rows, lead)
    (line,) = along.dims
    n, row_count = line.extent, across.size
    starts = list(across.offsets)
    if desc.reverse:
        starts = [o + (n - 1) * step for o, step in zip(starts, line.strides, strict=True)]
        line = Dim(n, tuple(-step for step in line.strides))
    from_y = "y" in strides
    slots = 0 if desc.kind is ScanKind.CUMSUM else 1
    if desc.kind is ScanKind.LOG_CUMSUM_EXP and not from_y:
        slots = 2
    recomputes = slots > 0 and not from_y

    lane = across.dims[0]
    beside = lane.extent > 1 and abs(lane.strides[lead]) < abs(line.strides[lead])
    used = [0, 3] if not slots else [0, 1, 2, 3]
    direct = beside and not recomputes and all(lane.strides[k] == 1 for k in used)
    row_lanes = 8 if recomputes else _row_lanes(lane.extent, n)
    if beside:
        width = min(_DIRECT_BYTES // desc.element.size_bytes if direct else 64, lane.extent)
    else:
        width = min(row_lanes, lane.extent)
    groups = -(-lane.extent // width) * (row_count // lane.extent)
    split = n > 4 * _SCAN_CHUNK and (groups < ENOUGH_UNITS or (recomputes and n > _CHECKPOINTED))
    meta = array("q", bytes(8 * at.META_WORDS))
    chunk, chunks = n, 1
    outer = across.dims
    if split:
        chunk, chunks = _SCAN_CHUNK, -(-n // _SCAN_CHUNK)
    blocks = -(-lane.extent // width)
    units = blocks * (row_count // lane.extent) * chunks
    if split and not beside:  # the chunks of a row are the lanes, but for a shorter last one
        lane = Dim(n // chunk, tuple(step * chunk for step in line.strides))
        outer = (lane, *(dim for dim in across.dims if dim.extent > 1))
        width = min(8 if recomputes else _row_lanes(lane.extent, chunk), lane.extent)
        blocks = -(-lane.extent // width) + (1 if n % chunk else 0)
        units = blocks * row_count
    meta[at.BESIDE] = beside
    steps = min(chunk, (at.RECOMPUTED_TILE if recomputes else at.TILE) // width, 256)
    item = desc.element.size_bytes
    even = lane.extent == 1 or lane.strides[lead] * item % LINE == 0
    lines = direct or (
        not beside and line.strides[lead] == 1 and even and n * item >= _SHORTEST_STREAMED
    )
    room = room_of(_TILES_STREAMED_SHARE)
    meta[at.STREAMING] = not recomputes and lines and streams(desc, room)
    write_nest(meta, (line,), at.AXIS, at.MORE_AXIS, at.MORE_AXIS_AT)
    write_nest(meta, outer, at.ACROSS, at.MORE_ACROSS, at.MORE_ACROSS_AT)
    meta[at.EXTENT], meta[at.CHUNK], meta[at.CHUNKS] = n, chunk, chunks
    meta[at.LANE_WIDTH], meta[at.LANE_BLOCKS], meta[at.STEPS] = width, blocks, steps
    meta[at.LAST_UNIT] = units - 1 if split else 0
    states = slots if recomputes else 0
    workspace = _place_scan_memory(
        meta, row_count * chunks if split else 0, states, width * -(-chunk // steps)
    )
    kind, element = desc.kind, desc.element
    ties = desc.ties if desc.spec.ties else None
    source = "plain" if not slots else "from_y" if from_y else "recomputed"
    name = f"{kind.value}{f'_{ties.value}' if ties else ''}_{element.value}_scan_{source}"
    arguments: tuple[Any, ...] = (kind, element, ties)
    if not recomputes:
        name += "_direct" if direct else "_tiled"
        arguments += (direct,)
    layout = "columns" if beside else "rows"
    variant = source + ("_split" if split else "") + ("_streamed" if meta[at.STREAMING] else "")
    lanes = f"{width} {'chunks of a row' if split and not beside else 'rows'}"
    as_they_lie = direct or (beside and recomputes)
    return Program(
        kernel=partial(_recurrence_kernel, name, arguments, recomputes),
        meta=meta,
        operands=tuple(
            key if key in strides and (slots or key in ("dy", "dx")) else None for key in names
        ),
        offsets=tuple(start * item for start in starts),
        launches=_scan_launches(units, n * row_count, row_count, split, recomputes),
        workspace_bytes=workspace,
        reads={
            "dy": 2 if split else 1,
            "x": (5 if split else 2) if recomputes else 2 if split else 1,
            "y": 2 if split else 1,
        },
        layout=layout,
        variant=variant,
        why=_why_scan(lanes, as_they_lie, chunks, recomputes),
        others=choices.scans(
            source=source,
            split=split,
            units=groups,
            enough=ENOUGH_UNITS,
            extent=n,
            shortest=4 * _SCAN_CHUNK,
            lines=lines,
            streamed=bool(meta[at.STREAMING]),
            takes=bytes_of(desc),
            room=room,
        ),
    )


def _place_scan_memory(meta: array[int], chunks: int, states: int, checkpoints: int) -> int:
    """Give what the chunks of all rows tell each other its place, and where `states` of a lane are
    recomputed their checkpoints, so many for a thread. The bytes of all of it."""
    size = 0

    def place(word: int, more: int) -> None:
        nonlocal size
        meta[word], size = size, size + lines_of(more)

    if chunks:
        place(at.PARTIALS, 24 * chunks)
        place(at.CARRIES, 8 * chunks)
    if chunks and states:
        place(at.STATES, 8 * max(2, states) * chunks)  # a product is two numbers
    if states:
        meta[at.SLOT_BYTES] = lines_of(8 * states * checkpoints)
        place(at.CHECKPOINTS, meta[at.SLOT_BYTES] * max_threads())
    return size


def _scan_launches(
    units: int, elements: int, rows: int, split: bool, recomputes: bool
) -> tuple[tuple[int, int, int], ...]:
    if not split:
        return (launch_of(at.FUSED, units, elements),)
    backward = (
        launch_of(at.PARTIAL, units, elements),
        (at.COMBINE, rows, rows),
        launch_of(at.APPLY, units, elements),
    )
    if not recomputes:
        return backward
    return launch_of(at.FORWARD, units, elements), (at.FORWARD_COMBINE, rows, rows), *backward


def _why_scan(lanes: str, as_they_lie: bool, chunks: int, recomputes: bool) -> str:
    way = "as they lie" if as_they_lie else "through tiles that turn them round"
    reason = f"{lanes} run side by side, {way}"
    if chunks > 1:
        reason += f"; rows are cut into {chunks} chunks that meet through carries"
    if recomputes:
        reason += "; y is not given, so the scan is recomputed from checkpoints"
    return reason


def _recurrence_kernel(name: str, arguments: tuple[Any, ...], recomputes: bool) -> Kernel:
    def build() -> Any:
        from .kernels import recurrence, sweep

        return recurrence.build(*arguments) if recomputes else sweep.build(*arguments)

    return kernel(name, build)


def workspace_bytes(desc: ScanBackwardDescriptor, n: int, rows: int) -> int:
    """The most workspace that any layout of rows of n elements needs."""
    slots = {ScanKind.CUMSUM: 0, ScanKind.LOG_CUMSUM_EXP: 2}.get(desc.kind, 1)
    bound = 0
    if n > 4 * _SCAN_CHUNK:
        left = 8 * max(2, slots) if slots else 0  # of its state by a chunk
        bound = (32 + left) * rows * -(-n // _SCAN_CHUNK) + 4 * 64
    # A tile has at most 64 lanes, and a lane leaves a checkpoint every 32 steps or more.
    longest = min(n, _CHECKPOINTED)
    return bound + max_threads() * lines_of(8 * slots * 64 * -(-longest // 32))
