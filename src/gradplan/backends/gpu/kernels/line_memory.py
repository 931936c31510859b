"""Lines in memory: how V neighbouring elements of a row come into a thread's registers, and back.

Where rows lie side by side (SIDE), the elements of a line come by V loads, each of which takes
neighbouring rows together; otherwise by one.
"""

import triton
import triton.language as tl

from ..launch import interpreted
from .tiles import USUAL, cache_of, outer_offset, request

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def columns_of(t, L: tl.constexpr, V: tl.constexpr):
    """The V columns of a tile [L, V]; nothing moves."""
    if V == 1:
        return (tl.reshape(t, (L,)),)
    else:
        a, b = tl.split(tl.permute(tl.reshape(t, (L, 2, V // 2)), (0, 2, 1)))
        return columns_of(a, L, V // 2) + columns_of(b, L, V // 2)


@triton.jit
def tile_of_columns(columns, L: tl.constexpr, V: tl.constexpr):
    """The tile [L, V] of V columns; nothing moves."""
    if V == 1:
        return tl.reshape(columns[0], (L, 1))
    else:
        a = tile_of_columns(columns[: V // 2], L, V // 2)
        b = tile_of_columns(columns[V // 2 :], L, V // 2)
        return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (L, V))


@triton.jit
def row_base(outer, rows, dims, steps, SIDE: tl.constexpr):
    """Where each row starts; side by side they are neighbours."""
    if SIDE:
        return outer_offset(outer, dims, steps) + rows.to(tl.int64)
    else:
        return outer_offset(outer, dims, steps) + rows.to(tl.int64) * steps[0]


@triton.jit
def along(index, steps, SIDE: tl.constexpr):
    """How far a place on the axis is from its start."""
    if SIDE:
        return index.to(tl.int64) * steps[0]
    else:
        return index


@triton.jit
def bring(pointer, base, steps, begin, n, count, R: tl.constexpr, C: tl.constexpr):
    """Ask the second cache for C steps of R rows side by side, of which there are `count`."""
    if not _INTERPRETED:
        ITEM: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
        PIECE: tl.constexpr = min(R, 64 // ITEM)
        PIECES: tl.constexpr = R // PIECE
        lane = tl.arange(0, C * PIECES)
        place = tl.minimum(tl.maximum(begin + lane // PIECES, 0), n - 1)
        row = tl.minimum((lane % PIECES) * PIECE, count - 1)
        source = pointer + base + place.to(tl.int64) * steps[0] + row
        request(source)


@triton.jit
def raw_line_of(
    pointer, base, steps, start, row_mask, n,
    SIDE: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr, CACHE: tl.constexpr = USUAL,
):  # fmt: skip
    """The V elements of each line as they are stored, in memory order; 0 where there are none:
    a tile [L, V], or V columns where rows lie side by side."""
    if SIDE:
        found = ()
        for j in tl.static_range(0, V):
            source = pointer + base + along(start + j, steps, SIDE)
            if FULL:
                value = tl.load(source, eviction_policy=CACHE)
            else:
                there = row_mask & (start + j < n)
                value = tl.load(source, mask=there, other=0.0, eviction_policy=CACHE)
            found = found + (value,)
        return found
    else:
        index = start[:, None] + tl.arange(0, V)[None, :]
        source = pointer + base[:, None] + index
        if FULL:
            return tl.load(source, eviction_policy=CACHE)
        else:
            there = row_mask[:, None] & (index < n)
            return tl.load(source, mask=there, other=0.0, eviction_policy=CACHE)


@triton.jit
def line_of(
    pointer, base, steps, start, row_mask, n, TYPE: tl.constexpr,
    SIDE: tl.constexpr, L: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr,
    CACHE: tl.constexpr = USUAL,
):  # fmt: skip
    """The same as V columns to compute with."""
    raw = raw_line_of(pointer, base, steps, start, row_mask, n, SIDE, V, FULL, CACHE)
    return widened_line(raw, TYPE, SIDE, L, V)


@triton.jit
def widened_line(raw, TYPE: tl.constexpr, SIDE: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    if SIDE:
        found = ()
        for j in tl.static_range(0, V):
            found = found + (raw[j].to(TYPE),)
        return found
    else:
        return columns_of(raw.to(TYPE), L, V)


@triton.jit
def edge_of(pointer, base, steps, place, row_mask, n, TYPE: tl.constexpr, SIDE: tl.constexpr):
    """One element a line, beside it; 0 where the row ends."""
    there = row_mask & (place >= 0) & (place < n)
    return tl.load(pointer + base + along(place, steps, SIDE), mask=there, other=0.0).to(TYPE)


@triton.jit
def store_lines(
    out, base, steps, start, row_mask, n, results,
    SIDE: tl.constexpr, L: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr, SPENT: tl.constexpr,
):  # fmt: skip
    """Round a tile once and store it."""
    element: tl.constexpr = out.dtype.element_ty
    told: tl.constexpr = cache_of(SPENT)
    if SIDE:
        for j in tl.static_range(0, V):
            value = results[j]
            if element == tl.bfloat16 or element == tl.float16:
                value = value.to(tl.float32)
            target = out + base + along(start + j, steps, SIDE)
            if FULL:
                tl.store(target, value.to(element), eviction_policy=told)
            else:
                mask = row_mask & (start + j < n)
                tl.store(target, value.to(element), mask=mask, eviction_policy=told)
    else:
        value = tile_of_columns(results, L, V)
        if element == tl.bfloat16 or element == tl.float16:
            value = value.to(tl.float32)
        index = start[:, None] + tl.arange(0, V)[None, :]
        if FULL:
            tl.store(out + base[:, None] + index, value.to(element), eviction_policy=told)
        else:
            mask = row_mask[:, None] & (index < n)
            target = out + base[:, None] + index
            tl.store(target, value.to(element), mask=mask, eviction_policy=told)


@triton.jit
def word_at(outer, rows, dims, start, n, SIDE: tl.constexpr, V: tl.constexpr):
    """Where the word of each line is: lines of a row one after the other, or side by side."""
    lines = tl.cdiv(n, V).to(tl.int64)
    number = start // V
    if SIDE:
        return (outer * lines + number) * dims[0] + rows
    else:
        return (outer * dims[0] + rows) * lines + number


@triton.jit
def words_of(
    words, outer, rows, dims, start, row_mask, n, UP: tl.constexpr, SIDE: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """The word of each line, and that of the line after it."""
    word = tl.load(
        words + word_at(outer, rows, dims, start, n, SIDE, V), mask=row_mask & (start < n), other=0
    )
    after = start + V if UP else start - V
    beyond = tl.load(
        words + word_at(outer, rows, dims, after, n, SIDE, V),
        mask=row_mask & (after >= 0) & (after < n),
        other=0,
    )
    return word.to(tl.int32), beyond.to(tl.int32)


@triton.jit
def bit_of(word, NUMBER: tl.constexpr):
    """A bit as a mask: all bits or none."""
    return (word << (31 - NUMBER)) >> 31


@triton.jit
def masks_of(word, V: tl.constexpr):
    found = ()
    for j in tl.static_range(0, V):
        found = found + (bit_of(word, j),)
    return found
