"""Programs: a problem with known strides, ready to run.

A program owns the meta block of its geometry and knows its kernel, its launches (phase, units)
and its workspace. It is immutable and shared by all threads; what changes from call to call
(addresses, workspace, phase) stands in a call block of the caller's own.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

from ...descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
)
from ...errors import Unsupported
from ...explanation import Other
from ...geometry import Dim, c_strides, nest
from ...kinds import BinaryKind, OpCategory, ReduceKind, ScanKind, TieRule
from ...registry import Engine
from ...threads import max_threads
from ...views import View
from . import choices, pool
from .jit import Kernel, kernel
from .kernels import layout as at

__all__ = ["Program", "prepare"]

Strides = Mapping[str, tuple[int, ...]]

# Below this many elements a problem runs on the caller's thread alone: waking another costs
# some 3 µs, and 16 Ki elements take about 5.
_ALONE_ELEMENTS = 1 << 14
# A launch is handed out in pieces of this many elements at least; where there are enough for eight
# a thread, of up to eight times as many, which keep a core longer in its own part of memory
# (softmax bf16 of 2048 × 2048, two cores: 0.44 ms in place of 0.51).
_GRAIN_ELEMENTS = 1 << 15
_GRAINS_A_THREAD, _LARGEST_GRAIN = 8, 1 << 18
# Long rows are cut into chunks of this many elements when rows alone cannot feed the cores.
_CHUNK_ELEMENTS = 1 << 16
_ENOUGH_UNITS = 32
# Outputs are streamed where a problem takes more than this share of the last cache. Measured with
# one of 32 MiB: ordinary stores win at 24 MiB (softmax bf16, 0.62 against 0.92 ms) and by 10 % at
# 32, and lose at 48 (softmax f32, 1.49 against 1.32). Scans through tiles, which leave in short
# pieces otherwise, gain sooner (cumsum f32 rows, 32 MiB, 1.7 against 1.2).
_STREAMED_SHARE, _STREAMED_SCAN_SHARE = 1.1, 0.7


@dataclass(frozen=True)
class Program:
    """What a bound problem runs."""

    kernel: Callable[[], Kernel]
    meta: array[int]
    operands: tuple[str | None, ...]
    """The argument behind each pointer of the call block: dy, x, y, out, out2."""
    offsets: tuple[int, ...]
    """Added to those pointers, in bytes."""
    launches: tuple[tuple[int, int, int], ...]
    """(phase, units, grain), one after the other."""
    workspace_bytes: int
    reads: Mapping[str, int]
    """How often each input comes from memory; once, where not named."""
    layout: str
    variant: str
    why: str
    others: tuple[Other, ...] = ()
    idle: list[_Call] = field(default_factory=list)
    """Calls that no thread uses now; taking one and putting it back are atomic."""

    def bind(self, views: Mapping[str, View], workspace: int) -> Callable[[], None]:
        """A launch for these very arrays, with the workspace at this address."""
        if not self.launches:
            return _nothing
        call = _Call(self)
        call.point(views, workspace)
        return call.run

    def run(self, views: Mapping[str, View], workspace: int, stream: int = 0) -> None:
        """Launch once."""
        self._run(_Call.point, views, workspace)

    def launch(self, addresses: Mapping[str, int], workspace: int, stream: int = 0) -> None:
        """Launch once for arrays at these addresses."""
        self._run(_Call.point_at, addresses, workspace)

    def _run(self, point: Callable[[_Call, Any, int], None], arrays: Any, workspace: int) -> None:
        if not self.launches:
            return
        try:
            call = self.idle.pop()
        except IndexError:
            call = _Call(self)
        point(call, arrays, workspace)
        call.run()
        self.idle.append(call)


def _nothing() -> None:
    """What an empty problem runs."""


class _Call:
    """A call block of a program, and its launches with all they need; for one thread at a time."""

    __slots__ = ("_block", "_launches", "_meta", "_pointers")

    def __init__(self, program: Program) -> None:
        self._meta = program.meta  # which the block points to
        self._block = array("q", (program.meta.buffer_info()[0], 0, 0, 0, 0, 0, 0, 0))
        named = enumerate(zip(program.operands, program.offsets, strict=False))
        self._pointers = [(at.DY + k, name, offset) for k, (name, offset) in named if name]
        address, work = self._block.buffer_info()[0], program.kernel()
        self._launches: list[tuple[int, Callable[..., object], tuple[Any, ...]]] = [
            (phase, work.entry, work.arguments(address, 0, 0, units))
            if grain >= units
            else (phase, pool.parallel, (work, address, units, grain))
            for phase, units, grain in program.launches
        ]

    def point(self, views: Mapping[str, View], workspace: int) -> None:
        block = self._block
        for word, name, offset in self._pointers:
            block[word] = views[name].ptr + offset
        block[at.WORKSPACE] = workspace

    def point_at(self, addresses: Mapping[str, int], workspace: int) -> None:
        """The same; a small call would pay a twentieth for addresses made of views."""
        block = self._block
        for word, name, offset in self._pointers:
            block[word] = addresses[name] + offset
        block[at.WORKSPACE] = workspace

    def run(self) -> None:
        for phase, launch, arguments in self._launches:
            self._block[at.PHASE] = phase
            launch(*arguments)


def prepare(desc: Any, strides: Strides, index_shape: Sequence[int] | None = None) -> Program:
    """The program for arrays with these strides (in elements); an argument not given is absent.

    `index_shape` is the shape of an embedding's indices where they are of higher rank.
    """
    engine = desc.spec.engine
    if engine in (Engine.MAP, Engine.ROW_STATE):
        return _prepare_rows(desc, strides)
    if engine is Engine.RECURRENCE:
        return _prepare_recurrence(desc, strides)
    return _prepare_segments(desc, strides, index_shape or (desc.num_indices,))


def _empty() -> Program:
    return Program(
        kernel=_no_kernel,
        meta=array("q"),
        operands=(),
        offsets=(),
        launches=(),
        workspace_bytes=0,
        reads={},
        layout="empty",
        variant="none",
        why="there are no elements",
    )


def _no_kernel() -> Kernel:
    raise AssertionError("an empty program has no kernel")


def _float_bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _write_dim(meta: array[int], position: int, dim: Dim) -> None:
    meta[position] = dim.extent
    for k, step in enumerate(dim.strides):
        meta[position + 1 + k] = step


def _write_nest(
    meta: array[int], dims: Sequence[Dim], innermost: int, count: int, more: int
) -> None:
    """Put the innermost dimension at `innermost`, the number of others at `count`, and those
    at `more`."""
    _write_dim(meta, innermost, dims[0])
    meta[count] = len(dims) - 1
    for d, dim in enumerate(dims[1:]):
        _write_dim(meta, more + d * at.DIM_WORDS, dim)


def _launch(phase: int, units: int, elements: int) -> tuple[int, int, int]:
    """A launch of so many units that visit so many elements in all."""
    if elements <= _ALONE_ELEMENTS:
        return phase, units, units
    fair = elements // (_GRAINS_A_THREAD * max_threads())
    grain = max(_GRAIN_ELEMENTS, min(fair, _LARGEST_GRAIN))
    return phase, units, max(1, units * grain // elements)


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


def _prepare_rows(desc: Any, strides: Strides) -> Program:
    shape, axes = desc.shape_and_axes
    rank = len(shape)
    reduced = desc.category is OpCategory.REDUCTION
    outputs = [op.name for op in desc.operands if op.output and op.name in strides]
    if 0 in shape or not outputs:
        return _empty()
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

    meta = array("q", bytes(8 * at.META_WORDS))
    width, blocks, chunk = 1, row_count, n
    if columns:
        width, split = _strips(n, row_count, beside.extent, _lanes_of(desc.op), stateless)
        blocks = -(-beside.extent // width)
        meta[at.LANE_WIDTH], meta[at.LANE_BLOCKS] = width, blocks
        groups = blocks * (row_count // beside.extent)
    else:
        groups = row_count
        split = groups < _ENOUGH_UNITS and n > 2 * _CHUNK_ELEMENTS
    if stateless:
        chunk = max(1, min(n, _GRAIN_ELEMENTS // width))
    elif split:
        chunk = _chunk(n, width)
    chunks = -(-n // chunk)
    meta[at.EXTENT], meta[at.CHUNK], meta[at.CHUNKS] = n, chunk, chunks
    meta[at.ROWS], meta[at.INDEX_BASE] = row_count, along.offsets[5]
    p, q = _params(desc, n, strides)
    meta[at.PARAM], meta[at.PARAM2] = _float_bits(p), _float_bits(q)
    _write_nest(meta, along.dims, at.AXIS, at.MORE_AXIS, at.MORE_AXIS_AT)
    _write_nest(meta, across.dims, at.ACROSS, at.MORE_ACROSS, at.MORE_ACROSS_AT)
    meta[at.STREAMING] = unit and _streams(desc)

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
    arguments = (kind, element, ties, columns, unit, reduced, len(outputs), extreme)
    layout = "flat" if flat and len(along.dims) == 1 else "columns" if columns else "rows"
    pattern = "unit" if unit else "any"
    variant = f"{pattern}{'_split' if workspace else ''}{'_streamed' if meta[at.STREAMING] else ''}"
    name = f"{kind.value}{tie_name}_{element.value}_{'columns' if columns else 'rows'}_{pattern}"
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
        why=_why_rows(layout, unit, chunks if workspace else 1, width),
        others=choices.rows(
            unit=unit,
            strided=[names[k] for k in looped if loop.strides[k] != 1],
            split=None if stateless else workspace > 0,
            units=groups,
            enough=_ENOUGH_UNITS,
            streamed=bool(meta[at.STREAMING]),
            takes=_bytes(desc),
            room=_STREAMED_SHARE * _cache_bytes(),
        ),
    )


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
        return (_launch(at.APPLY if stateless else at.FUSED, units, elements),)
    return (
        _launch(at.PARTIAL, units, elements),
        _launch(at.COMBINE, rows, rows * chunks),
        _launch(at.APPLY, units, elements),
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
    if groups < _ENOUGH_UNITS and n * wide > 2 * _CHUNK_ELEMENTS:
        return wide, True
    narrow = max(_CHUNK_ELEMENTS // n // 64 * 64, 64 if n < 1024 else 256)
    return min(wide, narrow), False


def _chunk(n: int, width: int) -> int:
    """The steps of a split row's chunk, or of a strip of so many rows."""
    return max(1, min(n, _CHUNK_ELEMENTS * min(4, -(-width // 512)) // width))


@cache
def _cache_bytes() -> int:
    """The size of the last cache, or a usual one where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]
    return 32 << 20


def _streams(desc: Any, share: float = _STREAMED_SHARE) -> bool:
    """Whether outputs go past the caches: where the problem does not fit the last one anyway.

    An ordinary store reads the line that it overwrites, and drives inputs out.
    """
    return _bytes(desc) > share * _cache_bytes()


def _bytes(desc: Any) -> int:
    return sum(op.size_bytes for op in desc.operands)


def _why_rows(layout: str, unit: bool, chunks: int, width: int) -> str:
    reason = {
        "flat": "one flat loop over all elements",
        "rows": "the axis is the nearest in memory: each row is one loop",
        "columns": f"other rows lie nearer in memory than the axis: {width} side by side",
    }[layout]
    if not unit:
        reason += "; strides differ from 1 and are read at run time"
    if chunks > 1:
        reason += f"; rows are cut into {chunks} chunks that every core shares"
    return reason


_TILE_ELEMENTS = 2048
# Of rows that lie side by side, half a page is read at a time.
_DIRECT_BYTES = 2048
# A split row's chunk. Eight of them make a unit of work.
_SCAN_CHUNK = 1 << 13
# Rows longer than this are split wherever states are recomputed: it bounds the checkpoints.
_CHECKPOINTED = 1 << 16


def _row_lanes(rows: int) -> int:
    """How many rows, one after the other in memory, run as lanes: more hide more of the time that
    a step takes to feed the next, while there are enough to go round."""
    return 32 if rows >= 256 else 16 if rows >= 64 else 8


def _prepare_recurrence(desc: ScanBackwardDescriptor, strides: Strides) -> Program:
    shape, (axis,) = desc.shape_and_axes
    rank = len(shape)
    if 0 in shape:
        return _empty()
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
    row_lanes = 8 if recomputes else _row_lanes(lane.extent)
    if beside:
        width = min(_DIRECT_BYTES // desc.element.size_bytes if direct else 64, lane.extent)
    else:
        width = min(row_lanes, lane.extent)
    groups = -(-lane.extent // width) * (row_count // lane.extent)
    split = n > 4 * _SCAN_CHUNK and (groups < _ENOUGH_UNITS or (recomputes and n > _CHECKPOINTED))
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
        width = min(8 if recomputes else _row_lanes(lane.extent), lane.extent)
        blocks = -(-lane.extent // width) + (1 if n % chunk else 0)
        units = blocks * row_count
    meta[at.BESIDE] = beside
    steps = min(chunk, (_TILE_ELEMENTS if recomputes else 2 * _TILE_ELEMENTS) // width, 256)
    lines = direct or (not beside and line.strides[lead] == 1)
    meta[at.STREAMING] = not recomputes and lines and _streams(desc, _STREAMED_SCAN_SHARE)
    _write_nest(meta, (line,), at.AXIS, at.MORE_AXIS, at.MORE_AXIS_AT)
    _write_nest(meta, outer, at.ACROSS, at.MORE_ACROSS, at.MORE_ACROSS_AT)
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
    item = element.size_bytes
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
            enough=_ENOUGH_UNITS,
            extent=n,
            shortest=4 * _SCAN_CHUNK,
            lines=lines,
            streamed=bool(meta[at.STREAMING]),
            takes=_bytes(desc),
            room=_STREAMED_SCAN_SHARE * _cache_bytes(),
        ),
    )


def _place_scan_memory(meta: array[int], chunks: int, states: int, checkpoints: int) -> int:
    """Give what the chunks of all rows tell each other its place, and where `states` of a lane are
    recomputed their checkpoints, so many for a thread. The bytes of all of it."""
    size = 0

    def place(word: int, more: int) -> None:
        nonlocal size
        meta[word], size = size, size + _lines(more)

    if chunks:
        place(at.PARTIALS, 24 * chunks)
        place(at.CARRIES, 8 * chunks)
    if chunks and states:
        place(at.STATES, 8 * max(2, states) * chunks)  # a product is two numbers
    if states:
        meta[at.SLOT_BYTES] = _lines(8 * states * checkpoints)
        place(at.CHECKPOINTS, meta[at.SLOT_BYTES] * max_threads())
    return size


def _scan_launches(
    units: int, elements: int, rows: int, split: bool, recomputes: bool
) -> tuple[tuple[int, int, int], ...]:
    if not split:
        return (_launch(at.FUSED, units, elements),)
    backward = (
        _launch(at.PARTIAL, units, elements),
        (at.COMBINE, rows, rows),
        _launch(at.APPLY, units, elements),
    )
    if not recomputes:
        return backward
    return _launch(at.FORWARD, units, elements), (at.FORWARD_COMBINE, rows, rows), *backward


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


_SEGMENT_BLOCK = 64
# Columns of a row that are summed at a time: few where there are few rows to share.
_SEGMENT_SLICE, _WIDE_SEGMENT_SLICE = 128, 512


def _prepare_segments(
    desc: EmbeddingBackwardDescriptor, strides: Strides, index_shape: Sequence[int]
) -> Program:
    n, rows, columns = desc.num_indices, desc.num_embeddings, desc.embedding_dim
    if rows * columns == 0 or (n == 0 and desc.accumulate):
        return _empty()
    shift, key_bits = _sort_bits(desc)
    *dout, dout_column = strides["dout"]
    table_row, table_column = strides["dweight"]
    unit = columns == 1 or (dout_column == 1 and table_column == 1)
    targets = n if desc.accumulate else rows
    many = targets >= _ENOUGH_UNITS * _SEGMENT_BLOCK
    width = _WIDE_SEGMENT_SLICE if many else _SEGMENT_SLICE
    slices = -(-columns // width)
    # Indices may have any rank, so their dimensions may need more room than a problem's.
    meta = array("q", bytes(8 * (at.META_WORDS + at.DIM_WORDS * len(index_shape))))
    meta[at.EXTENT], meta[at.ROWS], meta[at.COLUMNS] = n, rows, columns
    meta[at.PADDING] = -1 if desc.padding_idx is None else desc.padding_idx
    meta[at.SHIFT], meta[at.KEY_BITS], meta[at.LANE_BLOCKS] = shift, key_bits, slices
    meta[at.LANE_WIDTH], meta[at.STREAMING] = width, unit and not desc.accumulate and _streams(desc)
    meta[at.ACCUMULATE], meta[at.BY_COUNT] = desc.accumulate, desc.scale_grad_by_freq
    header, words = 64, _lines(8 * n)
    meta[at.WORDS_AT] = header
    meta[at.SPARE_AT] = header + words
    meta[at.STARTS_AT] = header + 2 * words
    # Positions run over the indices in C order, whatever their rank.
    places = [
        Dim(extent, (row_step, index_step, 0, table_row))
        for extent, row_step, index_step in zip(index_shape, dout, strides["indices"], strict=True)
    ]
    _write_nest(meta, places[::-1], at.AXIS, at.MORE_INDEX, at.MORE_AXIS_AT)
    _write_dim(meta, at.ACROSS, Dim(columns, (dout_column, 0, 0, table_column)))
    units = -(-targets // _SEGMENT_BLOCK) * slices
    elements = columns * (n + (0 if desc.accumulate else rows))
    name = f"embedding_{desc.element.value}_{desc.index.value}_{'unit' if unit else 'any'}"
    return Program(
        kernel=partial(_segments_kernel, name, (desc.element, desc.index, unit)),
        meta=meta,
        operands=("dout", "indices", None, "dweight"),
        offsets=(0, 0, 0, 0),
        launches=((at.PARTIAL, 1, 1), _launch(at.APPLY, units, elements)),
        workspace_bytes=_segment_workspace(n),
        reads={},
        layout="rows" if unit else "strided",
        variant="sorted_streamed" if meta[at.STREAMING] else "sorted",
        why=f"indices are sorted, then each row is summed in their order, {width} "
        "columns at a time",
        others=choices.tables(
            unit=unit,
            accumulates=desc.accumulate,
            streamed=bool(meta[at.STREAMING]),
            takes=_bytes(desc),
            room=_STREAMED_SHARE * _cache_bytes(),
        ),
    )


def _sort_bits(desc: EmbeddingBackwardDescriptor) -> tuple[int, int]:
    """Bits that number the positions and the rows in one sort word."""
    n, rows = desc.num_indices, desc.num_embeddings
    shift, key_bits = max(n - 1, 0).bit_length(), max(rows - 1, 1).bit_length()
    if shift + key_bits > 62:
        raise Unsupported(
            f"EmbeddingBackwardPlan: {rows} rows and {n} indices need more than 62 bits to number"
        )
    return shift, key_bits


def _segment_workspace(n: int) -> int:
    return 64 + 2 * _lines(8 * n) + _lines(8 * (n + 1))


def _lines(size: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-size // 64) * 64


def _segments_kernel(name: str, arguments: tuple[Any, ...]) -> Kernel:
    def build() -> Any:
        from .kernels import segments

        return segments.build(*arguments)

    return kernel(name, build)


def workspace_bound(desc: Any) -> int:
    """The most workspace that any layout of the problem needs, in bytes."""
    if isinstance(desc, EmbeddingBackwardDescriptor):
        _sort_bits(desc)
        return _segment_workspace(desc.num_indices)
    shape, axes = desc.shape_and_axes
    total = prod(shape)
    if total == 0:
        return 0
    n = prod(shape[axis] for axis in axes)
    rows = total // n
    if isinstance(desc, ScanBackwardDescriptor):
        slots = {ScanKind.CUMSUM: 0, ScanKind.LOG_CUMSUM_EXP: 2}.get(desc.kind, 1)
        bound = 0
        if n > 4 * _SCAN_CHUNK:
            left = 8 * max(2, slots) if slots else 0  # of its state by a chunk
            bound = (32 + left) * rows * -(-n // _SCAN_CHUNK) + 4 * 64
        # A tile has at most 64 lanes, and a lane leaves a checkpoint every 32 steps or more.
        longest = min(n, _CHECKPOINTED)
        return bound + max_threads() * _lines(8 * slots * 64 * -(-longest // 32))
    if desc.spec.engine is Engine.MAP or getattr(desc, "ties", None) is TieRule.ALL:
        return 0
    width = min(rows, _lanes_of(desc.op))
    if n * width <= 2 * _CHUNK_ELEMENTS:
        return 0
    chunks = -(-n // _chunk(n, min(width, 512)))  # no strip of those rows has shorter ones
    return int(rows * chunks * 8 * _STATE_SLOTS.get(desc.op, 1))
