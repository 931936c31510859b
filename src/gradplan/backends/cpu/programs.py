"""Programs: a problem with known strides, ready to run.

A program owns the meta block of its geometry and knows its kernel, its launches (phase, units)
and its workspace. It is immutable and shared by all threads; what changes from call to call
(addresses, workspace, phase) stands in a call block of the caller's own.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
)
from ...errors import Unsupported
from ...geometry import Dim, c_strides, nest
from ...kinds import BinaryKind, OpCategory, ReduceKind, ScanKind, TieRule
from ...registry import Engine
from ...threads import max_threads
from ...views import View
from . import pool
from .jit import Kernel, kernel
from .kernels import layout as at

__all__ = ["Program", "prepare"]

Strides = Mapping[str, tuple[int, ...]]

# Below this many elements a problem runs on the caller's thread alone: waking another costs
# some 3 µs, and 16 Ki elements take about 5.
_ALONE_ELEMENTS = 1 << 14
# A launch is handed out in pieces of about this many elements.
_GRAIN_ELEMENTS = 1 << 15
# Long rows are cut into chunks of this many elements when rows alone cannot feed the cores.
_CHUNK_ELEMENTS = 1 << 16
_ENOUGH_UNITS = 32

_OPERANDS = ("dy", "x", "y", "out", "out2")


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

    def bind(self, views: Mapping[str, View], workspace: int) -> Callable[[], None]:
        """A launch for these very arrays, with the workspace at this address."""
        if not self.launches:
            return _nothing
        block = array("q", (self.meta.buffer_info()[0], 0, 0, 0, 0, 0, workspace, 0))
        for k, name in enumerate(self.operands):
            if name is not None:
                block[at.DY + k] = views[name].ptr + self.offsets[k]
        return partial(_run, self.kernel(), block, self)


def _nothing() -> None:
    """What an empty problem runs."""


def _run(work: Kernel, block: array[int], program: Program) -> None:
    address = block.buffer_info()[0]
    for phase, units, grain in program.launches:
        block[at.PHASE] = phase
        if grain >= units:
            work(address, 0, 0, units)
        else:
            pool.parallel(work, address, units, grain)


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
    return phase, units, max(1, units * _GRAIN_ELEMENTS // elements)


def _params(desc: Any, n: int, strides: Strides) -> tuple[float, float]:
    """The numbers p and q of the formulas."""
    if isinstance(desc, BinaryParamBackwardDescriptor):
        weights = (1.0 - desc.param, desc.param)
        return weights if "da" in strides else weights[::-1]
    if isinstance(desc, ReduceBackwardDescriptor):
        if desc.kind is ReduceKind.MEAN:
            return float(n), 0.0
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
    ties = getattr(desc, "ties", None)
    indexed = desc.spec.ties and ties in (TieRule.FIRST, TieRule.LAST)
    index = [0] * rank
    if indexed:
        for axis, step in zip(axes, c_strides([shape[axis] for axis in axes]), strict=True):
            index[axis] = step
    rows.append(index)

    stateless = desc.spec.engine is Engine.MAP or ties is TieRule.ALL
    lead = 3
    if stateless:  # nothing depends on anything: all dimensions are one nest
        along, across = nest(shape, range(rank), rows, lead), nest(shape, (), rows, lead)
    else:
        along = nest(shape, axes, rows, lead)
        others = [axis for axis in range(rank) if axis not in axes]
        across = nest(shape, others, rows, lead)
    n, row_count = along.size, across.size
    extent = n if not reduced else _product(shape[axis] for axis in axes)

    inner, beside = along.dims[0], across.dims[0]
    columns = (
        not stateless
        and beside.extent > 1
        and (abs(beside.strides[lead]) < abs(inner.strides[lead]) or inner.extent == 1)
    )
    used = [k for k, name in enumerate(names[:3]) if name in strides] + list(
        range(3, 3 + len(outputs))
    )
    loop = beside if columns else inner
    scalars = reduced and not stateless and not columns
    looped = [k for k in used if not (scalars and k in (0, 2))]
    steps = {k: loop.strides[k] for k in looped}
    if all(step == 1 for step in steps.values()):
        pattern = "unit"
    elif stateless and all(step == (0 if k in (0, 2) else 1) for k, step in steps.items()):
        pattern = "broadcast"
    else:
        pattern = "any"

    meta = array("q", bytes(8 * at.META_WORDS))
    width, blocks = 1, row_count
    if columns:
        width = _lane_width(beside.extent, desc.element.size_bytes)
        blocks = -(-beside.extent // width)
        meta[at.LANE_WIDTH], meta[at.LANE_BLOCKS] = width, blocks
        groups = blocks * (row_count // beside.extent)
    else:
        groups = row_count
    chunk = n
    if stateless or (groups < _ENOUGH_UNITS and n * width > 2 * _CHUNK_ELEMENTS):
        chunk = max(1, min(n, _CHUNK_ELEMENTS // width))
    if stateless:
        chunk = min(n, _GRAIN_ELEMENTS)
    chunks = -(-n // chunk)
    meta[at.EXTENT], meta[at.CHUNK], meta[at.CHUNKS] = n, chunk, chunks
    meta[at.INDEX_BASE] = along.offsets[5]
    p, q = _params(desc, extent, strides)
    meta[at.PARAM], meta[at.PARAM2] = _float_bits(p), _float_bits(q)
    _write_nest(meta, along.dims, at.AXIS, at.MORE_AXIS, at.MORE_AXIS_AT)
    _write_nest(meta, across.dims, at.ACROSS, at.MORE_ACROSS, at.MORE_ACROSS_AT)

    elements = n * row_count
    units = groups * chunks
    workspace = 0
    if stateless:
        launches = [_launch(at.APPLY, units, elements)]
    elif chunks == 1:
        launches = [_launch(at.FUSED, units, elements)]
    else:
        workspace = row_count * chunks * 8 * _STATE_SLOTS.get(desc.op, 1)
        launches = [
            _launch(at.PARTIAL, units, elements),
            (at.COMBINE, row_count, row_count),
            _launch(at.APPLY, units, elements),
        ]
    kind, element = desc.op, desc.element
    # A weight that f32 cannot hold well is applied in f64, also to halves.
    extreme = kind == BinaryKind.LERP and any(
        weight != 0 and not 2.0**-100 < abs(weight) < 2.0**100 for weight in (p, q)
    )
    tie_name = f"_{ties.value}" if desc.spec.ties and ties is not None else ""
    arguments = (
        kind,
        element,
        ties if desc.spec.ties else None,
        columns,
        pattern,
        scalars,
        len(outputs),
        extreme,
    )
    layout = "flat" if stateless and len(along.dims) == 1 else "columns" if columns else "rows"
    variant = f"{pattern}{'_split' if workspace else ''}"
    name = f"{kind.value}{tie_name}_{element.value}_{'columns' if columns else 'rows'}_{pattern}"
    name += f"{'_scalars' if scalars else ''}{len(outputs) if len(outputs) > 1 else ''}"
    name += "_extreme" if extreme else ""
    item = element.size_bytes
    return Program(
        kernel=partial(_rows_kernel, name, arguments),
        meta=meta,
        operands=operands,
        offsets=tuple(
            (a + b) * item for a, b in zip(along.offsets[:5], across.offsets[:5], strict=True)
        ),
        launches=tuple(launches),
        workspace_bytes=workspace,
        # A row stays in the cache between its state and its map; many side by side do not.
        reads=dict.fromkeys(("dy", "x", "y"), 2) if workspace or columns else {},
        layout=layout,
        variant=variant,
        why=_why_rows(layout, pattern, chunks, width),
    )


_STATE_SLOTS = {ReduceKind.PROD: 3}


def _rows_kernel(name: str, arguments: tuple[Any, ...]) -> Kernel:
    def build() -> Any:
        from .kernels import rows

        return rows.build(*arguments)

    return kernel(name, build)


def _product(extents: Any) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


def _lane_width(lanes: int, size: int) -> int:
    """About 1 KiB of each operand a step: pages and prefetchers like long runs."""
    return min(lanes, max(64, 1024 // size))


def _why_rows(layout: str, pattern: str, chunks: int, width: int) -> str:
    reason = {
        "flat": "one flat loop over all elements",
        "rows": "the axis is the nearest in memory: each row is one loop",
        "columns": f"other rows lie nearer in memory than the axis: {width} side by side",
    }[layout]
    if pattern == "broadcast":
        reason += "; dy and y are one number a row"
    elif pattern == "any":
        reason += "; strides differ from 1 and are read at run time"
    if chunks > 1 and layout != "flat":
        reason += f"; rows are cut into {chunks} chunks that every core shares"
    return reason


_TILE_ELEMENTS = 2048
_ROW_LANES = 8
# A split row's chunk. Eight of them make a unit of work.
_SCAN_CHUNK = 1 << 13
# Rows longer than this are split wherever states are recomputed: it bounds the checkpoints.
_CHECKPOINTED = 1 << 16


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
    if beside:
        width = 64 if recomputes else max(64, 1024 // desc.element.size_bytes)
        width = min(width, lane.extent)
    else:
        width = min(_ROW_LANES, lane.extent)
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
        width = min(_ROW_LANES, lane.extent)
        blocks = -(-lane.extent // width) + (1 if n % chunk else 0)
        units = blocks * row_count
    meta[at.BESIDE] = beside
    steps = min(chunk, _TILE_ELEMENTS // width, 256)
    _write_nest(meta, (line,), at.AXIS, at.MORE_AXIS, at.MORE_AXIS_AT)
    _write_nest(meta, outer, at.ACROSS, at.MORE_ACROSS, at.MORE_ACROSS_AT)
    meta[at.EXTENT], meta[at.CHUNK], meta[at.CHUNKS] = n, chunk, chunks
    meta[at.LANE_WIDTH], meta[at.LANE_BLOCKS], meta[at.STEPS] = width, blocks, steps

    workspace = 0

    def reserve(size: int) -> int:
        nonlocal workspace
        begin, workspace = workspace, workspace + _lines(size)
        return begin

    if split:
        meta[at.PARTIALS] = reserve(16 * row_count * chunks)
        meta[at.CARRIES] = reserve(8 * row_count * chunks)
        if recomputes:
            meta[at.STATES] = reserve(8 * slots * row_count * chunks)
    if recomputes:
        slot_bytes = _lines(8 * slots * width * -(-chunk // steps))
        meta[at.SLOT_BYTES] = slot_bytes
        meta[at.CHECKPOINTS] = reserve(slot_bytes * max_threads())
    elements = n * row_count
    if not split:
        launches = [_launch(at.FUSED, units, elements)]
    else:
        launches = [
            _launch(at.PARTIAL, units, elements),
            (at.COMBINE, row_count, row_count),
            _launch(at.APPLY, units, elements),
        ]
        if recomputes:
            launches[:0] = [
                _launch(at.FORWARD, units, elements),
                (at.FORWARD_COMBINE, row_count, row_count),
            ]
    kind, element = desc.kind, desc.element
    ties = desc.ties if desc.spec.ties else None
    source = "" if not slots else "_from_y" if from_y else "_recomputed"
    name = f"{kind.value}{f'_{ties.value}' if ties else ''}_{element.value}_scan{source}"
    layout = "columns" if beside else "rows"
    variant = (source[1:] or "plain") + ("_split" if split else "")
    why = f"{width} {'chunks of a row' if split and not beside else 'rows'} run side by side, "
    why += "as they lie" if beside else "through tiles that turn them round"
    if split:
        why += f"; rows are cut into {chunks} chunks that meet through carries"
    if recomputes:
        why += "; y is not given, so the scan is recomputed from checkpoints"
    item = element.size_bytes
    return Program(
        kernel=partial(_recurrence_kernel, name, (kind, element, ties, from_y)),
        meta=meta,
        operands=tuple(
            key if key in strides and (slots or key in ("dy", "dx")) else None for key in names
        ),
        offsets=tuple(start * item for start in starts),
        launches=tuple(launches),
        workspace_bytes=workspace,
        reads={
            "dy": 2 if split else 1,
            "x": (5 if split else 2) if recomputes else 2 if split else 1,
            "y": 2 if split else 1,
        },
        layout=layout,
        variant=variant,
        why=why,
    )


def _recurrence_kernel(name: str, arguments: tuple[Any, ...]) -> Kernel:
    def build() -> Any:
        from .kernels import recurrence

        return recurrence.build(*arguments)

    return kernel(name, build)


_SEGMENT_SLICE, _SEGMENT_BLOCK = 128, 64


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
    slices = -(-columns // _SEGMENT_SLICE)
    # Indices may have any rank, so their dimensions may need more room than a problem's.
    meta = array("q", bytes(8 * (at.META_WORDS + at.DIM_WORDS * len(index_shape))))
    meta[at.EXTENT], meta[at.ROWS], meta[at.COLUMNS] = n, rows, columns
    meta[at.PADDING] = -1 if desc.padding_idx is None else desc.padding_idx
    meta[at.SHIFT], meta[at.KEY_BITS], meta[at.LANE_BLOCKS] = shift, key_bits, slices
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
    targets = n if desc.accumulate else rows
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
        variant="sorted",
        why=f"indices are sorted, then each row is summed in their order, {_SEGMENT_SLICE} "
        "columns at a time",
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
    total = _product(shape)
    if total == 0:
        return 0
    n = _product(shape[axis] for axis in axes)
    rows = total // n
    if isinstance(desc, ScanBackwardDescriptor):
        slots = {ScanKind.CUMSUM: 0, ScanKind.LOG_CUMSUM_EXP: 2}.get(desc.kind, 1)
        bound = 0
        if n > 4 * _SCAN_CHUNK:
            bound = (24 + 8 * slots) * rows * -(-n // _SCAN_CHUNK) + 4 * 64
        # A tile has at most 64 lanes, and a lane leaves a checkpoint every 32 steps or more.
        longest = min(n, _CHECKPOINTED)
        return bound + max_threads() * _lines(8 * slots * 64 * -(-longest // 32))
    if desc.spec.engine is Engine.MAP or getattr(desc, "ties", None) is TieRule.ALL:
        return 0
    width = min(rows, max(64, 1024 // desc.element.size_bytes))
    if n * width <= 2 * _CHUNK_ELEMENTS:
        return 0
    chunks = max(-(-n // _CHUNK_ELEMENTS), -(-n // max(1, _CHUNK_ELEMENTS // width)))
    return int(rows * chunks * 8 * _STATE_SLOTS.get(desc.op, 1))
