"""Which places of a row are its running extremum: the first of two launches of cummax and cummin.

The second needs one bit a place of what x says, so x is read once and the bits are left in the
workspace: a word for each line of `lines`, a sixteenth of x, of f64 a 64th.
"""

import triton
import triton.language as tl

from .chains import arriving_at
from .line_memory import line_of, row_base, word_at
from .line_scans import spread, tiled
from .stretches import beats, extremum, larger
from .tiles import tile_row
from .waiting import in_order

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def mark_winners(
    x,
    words,
    told,
    row_dims,
    row_x,
    axis_x,
    n,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    SIDE: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    LEVELS: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    FULL: tl.constexpr,
):
    """R rows, in tiles of M lines from where the scan begins: all of them ("whole"), or a tile a
    program that waits for the extremum before it ("chained", see `chains`)."""
    C: tl.constexpr = M * V
    L: tl.constexpr = R * M
    UP: tl.constexpr = not FLIP
    AXIS: tl.constexpr = 0 if SIDE else 1
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    tiles = tl.cdiv(n, C).to(tl.int32)
    if PHASE == "chained":
        count = tl.num_programs(0) // tiles
        turn = in_order(told)
        told += 1
        tile = turn % count
        place = turn // count
        steps = place * 0 + 1
    else:
        tile = tl.program_id(0)
        place = tile * 0
        steps = tiles
    outer, first = tile_row(tile, row_dims, R)
    line = tl.arange(0, L)
    if SIDE:
        rows = first + line % R
        number = line // R
    else:
        rows = first + line // M
        number = line % M
    row_mask = rows < row_dims[0]
    base = row_base(outer, rows, row_dims, row_x, SIDE)
    block = number if UP else M - 1 - number
    extreme = tl.full((R,), -_INFINITY, TYPE)
    for step in range(0, steps):
        part = place + step
        begin = (part if UP else tiles - 1 - part).to(n.dtype) * C
        start = begin + block * V
        found = line_of(x, base, axis_x, start, row_mask, n, TYPE, SIDE, L, V, FULL)
        u = ()
        for j in tl.static_range(0, V):
            value = extremum(KIND, found[j])
            if not FULL:
                value = tl.where(start + j < n, value, -_INFINITY)
            u = u + (value,)
        largest = u[0]
        for j in tl.static_range(1, V):
            largest = either(largest, u[j])
        largest = tiled(largest, SIDE, R, M)
        nothing = tl.full(largest.shape, -_INFINITY, TYPE)
        _, before = tl.associative_scan((largest, nothing), AXIS, before_either)
        total = tl.reduce(largest, AXIS, either)
        if PHASE == "chained":
            own = tl.reduce(total, 0, either).to(tl.float64)
            arriving = arriving_at(
                told, tile, tl.num_programs(0) // tiles, place, tiles, own, own,
                "extremum", B, LEVELS, T, W,
            )  # fmt: skip
            extreme = either(extreme, tl.zeros_like(extreme) + arriving.to(TYPE))
        m = tl.reshape(either(before, spread(extreme, SIDE) + tl.zeros_like(before)), (L,))
        word = tl.zeros((L,), tl.int32)
        for k in tl.static_range(0, V):
            if UP:
                wins = beats(TIES, u[k], m)
                if k == 0:  # the row begins here
                    wins = wins | (start == 0)
                word = tl.where(wins, word | (1 << k), word)
                m = either(m, u[k])
            else:
                wins = beats(TIES, u[V - 1 - k], m)
                if k == 0 or not FULL:
                    wins = wins | (start + (V - 1 - k) == n - 1)
                word = tl.where(wins, word | (1 << (V - 1 - k)), word)
                m = either(m, u[V - 1 - k])
        target = words + word_at(outer, rows, row_dims, start, n, SIDE, V)
        tl.store(target, word.to(words.dtype.element_ty), mask=row_mask & (start < n))
        extreme = either(extreme, total)


@triton.jit
def either(a, b):
    """The larger; NaN is larger than any number."""
    if a.dtype == tl.float32:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return larger(a, b)


@triton.jit
def before_either(m1, p1, m2, p2):
    """(largest, largest of what is before the last)."""
    return either(m1, m2), either(m1, p2)
