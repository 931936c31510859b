"""Between the launches of a scan whose rows are cut: what each tile adds to the scan's own state,
the state before each tile, and the S that arrives at each.
"""

import triton
import triton.language as tl

from .arithmetic import exp_of_difference, multiply
from .stretches import affine, extremum, fading, gated, larger, log_add, opened, pick
from .tiles import fetch

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def scan_states(
    x,
    states,
    row_dims,
    row_x,
    axis_dims,
    axis_x,
    n,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    X: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """What each tile adds to the scan's own state: where y is not given."""
    tiles_along = tl.cdiv(n, C)
    pid = tl.program_id(0)
    part = pid % tiles_along
    tile = (pid // tiles_along).to(tl.int64)
    tiles = tl.cdiv(row_dims[0], R)
    lane = tl.arange(0, R)
    rows = (tile % tiles) * R + lane
    slot = (tile * tiles_along + part) * R + lane
    total = tl.num_programs(0).to(tl.int64) * R
    index = part.to(n.dtype) * C + tl.arange(0, C)
    mask = (index < n)[None, :]
    at = (tile // tiles, rows, index, rows < row_dims[0], index < n)
    WIDE: tl.constexpr = ELEMENT == "f64" or KIND == "cumprod"
    u = fetch(x, X, at, (row_dims, row_x, axis_dims, axis_x), 0.0, WIDE, FULL)
    u = tl.broadcast_to(u, (R, C))
    if KIND == "cumprod":
        tl.store(states + slot, tl.reduce(tl.where(mask, u, 1.0), 1, multiply))
    else:
        u = tl.where(mask, extremum(KIND, u), -_INFINITY)
        m = tl.reduce(u, 1, larger)
        tl.store(states + slot, m.to(tl.float64))
        if KIND == "log_cumsum_exp":
            # Two infinities have no difference.
            e = tl.where(u == m[:, None], 1.0, exp_of_difference(u, m[:, None], ELEMENT))
            e = tl.where(mask, e, 0.0)
            if ELEMENT == "f32":
                e = e.to(tl.float64)
            tl.store(states + total + slot, tl.sum(e, 1).to(tl.float64))


@triton.jit
def join_states(
    states,
    total,
    tiles_along,
    KIND: tl.constexpr,
    FLIP: tl.constexpr,
    R: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
):
    """In place: the state before each tile, from what each tile adds."""
    groups = R // J
    tile = (tl.program_id(0) // groups).to(tl.int64)
    lane = (tl.program_id(0) % groups) * J + tl.arange(0, J)
    m = tl.full((J,), 1.0 if KIND == "cumprod" else -_INFINITY, tl.float64)
    e = tl.zeros((J,), tl.float64)
    for block in range(0, tl.cdiv(tiles_along, K)):
        step = block * K + tl.arange(0, K)
        inside = (step < tiles_along)[None, :]
        # Shifted by one: each tile's state is that of all tiles before it.
        if FLIP:
            place = tiles_along - 1 - step
            back = 1
        else:
            place = step
            back = -1
        source = states + (tile * tiles_along + place[None, :]) * R + lane[:, None]
        before = source + back * R
        here = inside & (step > block * K)[None, :]
        last = (step == tl.minimum(block * K + K, tiles_along) - 1)[None, :]
        if KIND == "cumprod":
            own = tl.load(before, mask=here, other=1.0)
            m_last = pick(tl.load(source, mask=inside, other=1.0), last)
            tl.debug_barrier()
            scanned = tl.associative_scan(own, 1, multiply) * m[:, None]
            tl.store(source, scanned, mask=inside)
            m = pick(scanned, last) * m_last
        elif KIND == "log_cumsum_exp":
            own = tl.load(before, mask=here, other=-_INFINITY)
            sums = tl.load(before + total, mask=here, other=0.0)
            m_last = pick(tl.load(source, mask=inside, other=0.0), last)
            e_last = pick(tl.load(source + total, mask=inside, other=0.0), last)
            tl.debug_barrier()
            m2, e2 = tl.associative_scan((own, sums), 1, log_add)
            m2, e2 = log_add(m[:, None], e[:, None], m2, e2)
            tl.store(source, m2, mask=inside)
            tl.store(source + total, e2, mask=inside)
            m, e = log_add(pick(m2, last), pick(e2, last), m_last, e_last)
        else:
            own = tl.load(before, mask=here, other=-_INFINITY)
            m_last = pick(tl.load(source, mask=inside, other=0.0), last)
            tl.debug_barrier()
            scanned = larger(m[:, None], tl.associative_scan(own, 1, larger))
            tl.store(source, scanned, mask=inside)
            m = larger(pick(scanned, last), m_last)


@triton.jit
def join_carries(
    carries,
    total,
    tiles_along,
    GATES: tl.constexpr,
    FLIP: tl.constexpr,
    R: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
):
    """In place: the S that arrives at each tile, from what each tile does to an arriving S."""
    groups = R // J
    tile = tl.program_id(0) // groups
    lane = (tl.program_id(0) % groups) * J + tl.arange(0, J)
    s = tl.zeros((J,), tl.float64)
    gate = tl.zeros((J,), tl.float64)
    join_span(
        carries, total, tile, tiles_along, 0, tiles_along, lane, s, gate, GATES, FLIP, R, J, K
    )  # fmt: skip


@triton.jit
def join_span(
    carries, total, tile, tiles_along, first, count, lane, s, gate,
    GATES: tl.constexpr, FLIP: tl.constexpr, R: tl.constexpr, J: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """`count` tiles from the first one on, counted from the far end, where (s, gate) arrives; what
    leaves the last of them comes back. What other programs stored a moment ago is not taken from
    the first cache.

    GATES says what tiles do: "" a factor, "fades" one of `fading`, "open" a gate, "winners" the two
    bits of `gated`.
    """
    tile = tile.to(tl.int64)
    end = first + count
    for block in range(0, tl.cdiv(count, K)):
        low = first + block * K
        step = low + tl.arange(0, K)
        inside = (step < end)[None, :]
        # What leaves a tile arrives at the one before; nothing arrives at the far end.
        if FLIP:
            place = step
            onward = 1
        else:
            place = tiles_along - 1 - step
            onward = -1
        source = carries + (tile * tiles_along + place[None, :]) * R + lane[:, None]
        own_s = tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
        own_a = tl.load(source + total, mask=inside, other=0.0, cache_modifier=".cg")
        tl.debug_barrier()
        started = low > 0
        if GATES == "open":
            f, sums = tl.associative_scan((own_a.to(tl.int32), own_s), 1, opened)
            sums = tl.where(started & (f != 0), sums + s[:, None], sums)
            flags = tl.zeros((J, K), tl.float64)
        elif GATES == "winners":
            f, sums = tl.associative_scan((own_a.to(tl.int32), own_s), 1, gated)
            arrives = started & ((f & 2) == 0) & (gate[:, None] == 0.0)
            sums = tl.where(arrives, sums + s[:, None], sums)
            flags = (f & 1).to(tl.float64)
        else:
            c, sums = tl.associative_scan((own_a, own_s), 1, fading if GATES == "fades" else affine)
            sums = tl.where(started, sums + c * s[:, None], sums)
            flags = tl.zeros((J, K), tl.float64)
        begin = inside & (step == low)[None, :]
        tl.store(source, tl.broadcast_to(s[:, None], (J, K)), mask=begin)
        tl.store(source + total, tl.broadcast_to(gate[:, None], (J, K)), mask=begin)
        target = source + onward * R
        inner = ((step + 1 < end) & (step + 1 < low + K))[None, :]
        tl.store(target, sums, mask=inner)
        tl.store(target + total, flags, mask=inner)
        last = (step == tl.minimum(low + K, end) - 1)[None, :]
        s = pick(sums, last)
        gate = pick(flags, last)
    return s, gate
