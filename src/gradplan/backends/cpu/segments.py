"""The engine *segment sum* on a CPU: how a problem is laid out and launched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...descriptors import (
    EmbeddingBackwardDescriptor,
)
from ...errors import Unsupported
from ...geometry import Dim
from . import choices
from .jit import Kernel, kernel
from .kernels import layout as at
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
    write_dim,
    write_nest,
)

__all__ = ["program", "workspace_bytes"]

_SEGMENT_BLOCK = 64
# Columns of a row that are summed at a time: few where there are few rows to share.
_SEGMENT_SLICE, _WIDE_SEGMENT_SLICE = 128, 512
# The fewest bytes of a row of the table that leave past the caches. In ms through them and past
# them, 64 MB of f32, one index to eight rows: rows of 16, 64, 128 and 1024 5.7, 2.3, 2.6, 2.1
# and 7.8, 2.6, 1.7, 2.0 (where rows begin with lines 5.8, 2.2, 2.6, 2.1 and 7.5, 2.4, 1.6, 1.2).
_STREAMED_BYTES = 512


def program(
    desc: EmbeddingBackwardDescriptor, strides: Strides, index_shape: Sequence[int]
) -> Program:
    n, rows, columns = desc.num_indices, desc.num_embeddings, desc.embedding_dim
    if rows * columns == 0 or (n == 0 and desc.accumulate):
        return empty()
    shift, key_bits = _sort_bits(desc)
    *dout, dout_column = strides["dout"]
    table_row, table_column = strides["dweight"]
    unit = columns == 1 or (dout_column == 1 and table_column == 1)
    targets = n if desc.accumulate else rows
    many = targets >= ENOUGH_UNITS * _SEGMENT_BLOCK
    width = _WIDE_SEGMENT_SLICE if many else _SEGMENT_SLICE
    slices = -(-columns // width)
    # Indices may have any rank, so their dimensions may need more room than a problem's.
    meta = array("q", bytes(8 * (at.META_WORDS + at.DIM_WORDS * len(index_shape))))
    meta[at.EXTENT], meta[at.ROWS], meta[at.COLUMNS] = n, rows, columns
    meta[at.PADDING] = -1 if desc.padding_idx is None else desc.padding_idx
    meta[at.SHIFT], meta[at.KEY_BITS], meta[at.LANE_BLOCKS] = shift, key_bits, slices
    meta[at.LANE_WIDTH] = width
    lines = unit and columns * desc.element.size_bytes >= _STREAMED_BYTES
    meta[at.STREAMING] = lines and not desc.accumulate and streams(desc, room_of())
    meta[at.ACCUMULATE], meta[at.BY_COUNT] = desc.accumulate, desc.scale_grad_by_freq
    header, words = 64, lines_of(8 * n)
    meta[at.WORDS_AT] = header
    meta[at.SPARE_AT] = header + words
    meta[at.STARTS_AT] = header + 2 * words
    # Positions run over the indices in C order, whatever their rank.
    places = [
        Dim(extent, (row_step, index_step, 0, table_row))
        for extent, row_step, index_step in zip(index_shape, dout, strides["indices"], strict=True)
    ]
    write_nest(meta, places[::-1], at.AXIS, at.MORE_INDEX, at.MORE_AXIS_AT)
    write_dim(meta, at.ACROSS, Dim(columns, (dout_column, 0, 0, table_column)))
    units = -(-targets // _SEGMENT_BLOCK) * slices
    elements = columns * (n + (0 if desc.accumulate else rows))
    name = f"embedding_{desc.element.value}_{desc.index.value}_{'unit' if unit else 'any'}"
    return Program(
        kernel=partial(_segments_kernel, name, (desc.element, desc.index, unit)),
        meta=meta,
        operands=("dout", "indices", None, "dweight"),
        offsets=(0, 0, 0, 0),
        launches=((at.PARTIAL, 1, 1), launch_of(at.APPLY, units, elements)),
        workspace_bytes=_workspace(n),
        reads={},
        layout="rows" if unit else "strided",
        variant="sorted_streamed" if meta[at.STREAMING] else "sorted",
        why=f"indices are sorted, then each row is summed in their order, {width} "
        "columns at a time",
        others=choices.tables(
            unit=unit,
            lines=lines,
            accumulates=desc.accumulate,
            streamed=bool(meta[at.STREAMING]),
            takes=bytes_of(desc),
            room=room_of(),
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


def _workspace(n: int) -> int:
    return 64 + 2 * lines_of(8 * n) + lines_of(8 * (n + 1))


def _segments_kernel(name: str, arguments: tuple[Any, ...]) -> Kernel:
    def build() -> Any:
        from .kernels import segments

        return segments.build(*arguments)

    return kernel(name, build)


def workspace_bytes(desc: EmbeddingBackwardDescriptor) -> int:
    """The most workspace that any layout needs."""
    _sort_bits(desc)
    return _workspace(desc.num_indices)
