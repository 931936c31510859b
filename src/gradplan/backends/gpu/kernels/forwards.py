"""The scan itself where no y is given, in lines: from x alone, in the precision of its sums.

A line is run through from its near side, where rows begin; what the lines before it amount to comes
by a scan across threads. Lines are numbered from the far end, so this one runs backwards.

- log-cumsum-exp: y[k] = ref + log F[k] + 32 log 2, with one reference a tile and F a plain sum of
  exp(x − ref) · 2⁻³²: then S[k] = F[k] · Σ_{j≥k} dy[j] / F[j] is one as well, and a small dy over a
  large F stays a normal number (which f64 has enough of without the 2⁻³²).
- cumprod: y is a product.

The state before a tile, (m, e) for m + log e, or a product, is kept in f64.
"""

import triton
import triton.language as tl

from .arithmetic import (
    exp_f32,
    exp_of_difference,
    multiply,
    reciprocal,
    rough_exp,
    rough_reciprocal,
    weight_below,
)
from .line_memory import raw_line_of, row_base, widened_line
from .line_scans import behind_sum, even, near_enough, spread, tiled
from .stretches import log_add
from .tiles import tile_row

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def line_states(
    x,
    states,
    row_dims,
    row_x,
    axis_dims,
    axis_x,
    n,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    FLIP: tl.constexpr,
    SIDE: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    FULL: tl.constexpr,
):
    """What each tile adds to the scan's own state, as `scan_states` of tiles that are no lines."""
    tiles_along = tl.cdiv(n, M * V)
    pid = tl.program_id(0)
    part = pid % tiles_along.to(tl.int32)
    tile = pid // tiles_along.to(tl.int32)
    outer, first = tile_row(tile, row_dims, R)
    rows, block = lines_at(first, FLIP, SIDE, R, M)
    start = part.to(n.dtype) * (M * V) + block * V
    base = row_base(outer, rows, row_dims, row_x, SIDE)
    raw = raw_line_of(x, base, axis_x, start, rows < row_dims[0], n, SIDE, V, FULL)
    m, e = state_of(raw, start, n, KIND, ELEMENT, SIDE, R, M, V, FULL)
    slot = states + (tile.to(tl.int64) * tiles_along + part) * R + tl.arange(0, R)
    tl.store(slot, m)
    if KIND == "log_cumsum_exp":
        tl.store(slot + tl.num_programs(0).to(tl.int64) * R, e)


@triton.jit
def lines_at(first, FLIP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """The row of each line of a tile, and its place among those of the row in memory."""
    line = tl.arange(0, R * M)
    if SIDE:
        rows, number = first + line % R, line // R
    else:
        rows, number = first + line // M, line % M
    if FLIP:
        return rows, number
    else:
        return rows, M - 1 - number


@triton.jit
def look_ahead(
    x, states, base, steps, block, row_mask, n, slot, total, count,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, FLIP: tl.constexpr, SIDE: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Leave the state before each of `count` tiles, all of a row, in `states`."""
    C: tl.constexpr = M * V
    m = tl.full((R,), 1.0 if KIND == "cumprod" else -_INFINITY, tl.float64)
    e = tl.zeros((R,), tl.float64)
    start = (count - 1 if FLIP else count * 0).to(n.dtype) * C + block * V
    to_come = raw_line_of(x, base, steps, start, row_mask, n, SIDE, V, FULL)
    for step in range(0, count):
        part = count - 1 - step if FLIP else count * 0 + step
        start = part.to(n.dtype) * C + block * V
        raw = to_come
        # The next tile is on its way meanwhile; behind the last one nothing is read.
        further = start - C if FLIP else start + C
        to_come = raw_line_of(
            x, base, steps, further, row_mask & (step + 1 < count), n, SIDE, V, False
        )
        at = states + slot + part.to(tl.int64) * R
        tl.store(at, m)
        m1, e1 = state_of(raw, start, n, KIND, ELEMENT, SIDE, R, M, V, FULL)
        if KIND == "cumprod":
            m = m * m1
        else:
            tl.store(at + total, e)
            m, e = log_add(m, e, m1, e1)
    tl.debug_barrier()  # each thread may ask for what another has stored


@triton.jit
def state_of(
    raw, start, n, KIND: tl.constexpr, ELEMENT: tl.constexpr, SIDE: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a tile of lines adds to the state: [R], f64."""
    AXIS: tl.constexpr = 0 if SIDE else 1
    L: tl.constexpr = R * M
    WIDE: tl.constexpr = ELEMENT == "f64" or KIND == "cumprod"
    u = widened_line(raw, tl.float64 if WIDE else tl.float32, SIDE, L, V)
    if KIND == "cumprod":
        own = within_or(u[0], start, n, 0, 1.0, FULL)
        for j in tl.static_range(1, V):
            own = own * within_or(u[j], start, n, j, 1.0, FULL)
        one = tl.reduce(tiled(own, SIDE, R, M), AXIS, multiply)
        return one, one
    else:
        top = largest_of(u, start, n, SIDE, R, M, V, FULL)
        # Of infinities alone nothing is summed up.
        ref = tl.where(tl.abs(top) < _INFINITY, top, 0.0)
        at = tl.reshape(tl.broadcast_to(spread(ref, SIDE), (M, R) if SIDE else (R, M)), (L,))
        own = tl.zeros_like(u[0])
        for j in tl.static_range(0, V):
            if ELEMENT == "f64":
                e = tl.exp(u[j] - at)
            elif ELEMENT == "f32":
                e = exp_f32(u[j] - at)  # what the difference loses is a last bit of e
            else:
                e = rough_exp(u[j] - at, 0.0)
            own += within_or(e, start, n, j, 0.0, FULL)
        sums = tl.sum(tiled(own, SIDE, R, M).to(tl.float64), AXIS)
        m = tl.where(sums == sums, top.to(tl.float64), float("nan"))
        return m, tl.where(tl.abs(top) < _INFINITY, sums, 1.0)


@triton.jit
def largest_of(
    u, start, n, SIDE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The largest number of each row of a tile."""
    own = within_or(u[0], start, n, 0, -_INFINITY, FULL)
    for j in tl.static_range(1, V):
        own = tl.maximum(own, within_or(u[j], start, n, j, -_INFINITY, FULL))
    return tl.max(tiled(own, SIDE, R, M), 0 if SIDE else 1)


@triton.jit
def within_or(value, start, n, J: tl.constexpr, OTHER: tl.constexpr, FULL: tl.constexpr):
    """What takes the place of a value where the row has ended."""
    if FULL:
        return value
    else:
        return tl.where(start + J < n, value, OTHER)


@triton.jit
def log_sums(
    u, start, n, m0, e0, x_first, lane_mask,
    ELEMENT: tl.constexpr, UP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    V: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Of each place exp(x − ref) · 2⁻³² and F; of each row whether that is the usual, and ref as
    `even` gives it, f64."""
    L: tl.constexpr = R * M
    AXIS: tl.constexpr = 0 if SIDE else 1
    TYPE: tl.constexpr = u[0].dtype
    before = m0.to(TYPE)
    high = tl.maximum(largest_of(u, start, n, SIDE, R, M, V, FULL), before)
    high = tl.where(lane_mask, high, 0.0)
    # The largest term of y where the tile begins; y never falls.
    low = tl.maximum(x_first, before)
    # Of the largest term, so that sums are at most their number, or half as much again.
    ref, whole = even(high, tl.zeros_like(high))
    usual = near_enough(low, high, ref)
    at = tl.reshape(tl.broadcast_to(spread(ref, SIDE), (M, R) if SIDE else (R, M)), (L,))
    e = ()
    for j in tl.static_range(0, V):
        term = weight_below(u[j], at, ELEMENT, power_of(ELEMENT))
        e = e + (within_or(term, start, n, j, 0.0, FULL),)
    if UP:
        sums = (e[0],)
        for j in tl.static_range(1, V):
            sums = sums + (sums[j - 1] + e[j],)
    else:
        sums = (e[V - 1],)
        for j in tl.static_range(1, V):
            sums = (sums[0] + e[V - 1 - j],) + sums
    whole_line = tiled(sums[V - 1] if UP else sums[0], SIDE, R, M)
    _, nearer = tl.associative_scan(
        (whole_line, tl.zeros_like(whole_line)), AXIS, behind_sum, reverse=True
    )
    base = e0.to(TYPE) * exp_of_difference(before, ref, ELEMENT, power_of(ELEMENT))
    nearer = tl.reshape(nearer + spread(base, SIDE), (L,))
    F = ()
    for j in tl.static_range(0, V):
        F = F + (nearer + sums[j],)
    return e, F, usual, ref.to(tl.float64), whole.to(tl.float64)


@triton.constexpr_function
def power_of(element):
    return 0 if element == "f64" else -32


@triton.constexpr_function
def scale_of(element):
    return 2.0 ** (0 if element == "f64" else -32)


@triton.jit
def sum_at(states, slot, there, total, x, ref, ELEMENT: tl.constexpr):
    """F at the place of x, from the state before its tile, in which it is the first; 0 where there
    is none."""
    m = tl.load(states + slot, mask=there, other=-_INFINITY, cache_modifier=".cg")
    e = tl.load(states + total + slot, mask=there, other=0.0, cache_modifier=".cg")
    sums = e * tl.exp(m - ref) + tl.exp(x.to(tl.float64) - ref)
    return tl.where(there, sums * scale_of(ELEMENT), 0.0)


@triton.jit
def over(d, sums, ELEMENT: tl.constexpr):
    """d / F."""
    if ELEMENT == "f64":
        return d / sums
    elif ELEMENT == "f32":
        return d * reciprocal(sums)
    else:
        return d * rough_reciprocal(sums)


@triton.jit
def products_before(
    u, start, n, state, UP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    V: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Of each place the product of all before it, from the product before the tile."""
    AXIS: tl.constexpr = 0 if SIDE else 1
    kept = ()
    for j in tl.static_range(0, V):
        kept = kept + (within_or(u[j], start, n, j, 1.0, FULL),)
    one = tl.full(u[0].shape, 1.0, u[0].dtype)
    if UP:
        w = (one,)
        for j in tl.static_range(1, V):
            w = w + (w[j - 1] * kept[j - 1],)
        whole_line = w[V - 1] * kept[V - 1]
    else:
        w = (one,)
        for j in tl.static_range(1, V):
            w = (w[0] * kept[V - j],) + w
        whole_line = w[0] * kept[0]
    whole_line = tiled(whole_line, SIDE, R, M)
    _, nearer = tl.associative_scan(
        (whole_line, tl.zeros_like(whole_line) + 1.0), AXIS, behind_product, reverse=True
    )
    nearer = tl.reshape(nearer * spread(state.to(one.dtype), SIDE), (R * M,))
    found = ()
    for j in tl.static_range(0, V):
        found = found + (w[j] * nearer,)
    return found


@triton.jit
def behind_product(a1, b1, a2, b2):
    """As `behind_sum`."""
    return a1 * a2, a1 * b2
