"""The engine *recurrence*: S[k] = dy[k] + c[k] · S[k+1], from the far end of the axis.

Inside a tile the recurrence is an associative scan over pairs; between tiles it goes through
carries kept in f64. FLIP says that the axis is walked the other way (`reverse=True`): then "next"
is the place before in memory.

- cumsum adds;
- cumprod scans (c, s) with c = x[k+1];
- cummax, cummin scan (gates, s): a gate chooses, it never multiplies;
- log-cumsum-exp needs no c inside a tile. With F[k] = exp(y[k] − m) for one m a tile,
  S[k] = F[k] · Σ_{j≥k} dy[j] / F[j], so a plain sum does, as long as the tile's y lie within e⁴⁰ of
  each other; a tile where they do not takes the pairs, in f64.
"""

import triton
import triton.language as tl

from .arithmetic import exp_of_difference, multiply
from .tiles import fetch, put

_INFINITY = tl.constexpr(float("inf"))
_RANGE = tl.constexpr(40.0)
_SMALL = tl.constexpr(2.0**-90)


@triton.jit
def affine(c1, s1, c2, s2):
    """(c, s) stands for S ↦ s + c · S; the first argument is the part nearer the far end."""
    return c1 * c2, s2 + c2 * s1


@triton.jit
def gated(f1, s1, f2, s2):
    """Gates of a stretch: bit 0, its first element is a winner; bit 1, one of the others is."""
    closed = ((f2 & 2) | (f1 & 1)) != 0
    return (f2 & 3) | ((f1 & 1) << 1) | (f1 & 2), s2 + tl.where(closed, 0.0, s1)


@triton.jit
def opened(f1, s1, f2, s2):
    """A gate a stretch: 1 lets all that arrives through to its first element."""
    return f1 & f2, s2 + tl.where(f2 != 0, s1, 0.0)


@triton.jit
def first_wins(m1, i1, m2, i2):
    wins = (m2 > m1) | ((m2 != m2) & (m1 == m1))
    return tl.where(wins, m2, m1), tl.where(wins, i2, i1)


@triton.jit
def last_wins(m1, i1, m2, i2):
    wins = (m2 >= m1) | (m2 != m2)
    return tl.where(wins, m2, m1), tl.where(wins, i2, i1)


@triton.jit
def larger(a, b):
    """The larger; NaN is larger than any number."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def ratio(a, b):
    """exp(a − b), and 1 where they are equal: two infinities have no difference."""
    return tl.where(a == b, 1.0, tl.exp(a - b))


@triton.jit
def log_add(m1, e1, m2, e2):
    """(m, e) stands for m + log e, m the largest term, in f64."""
    m = larger(m1, m2)
    return m, e1 * ratio(m1, m) + e2 * ratio(m2, m)


@triton.jit
def pick(value, chosen):
    """The value of each row at the one chosen place: picked, never multiplied."""
    return tl.sum(tl.where(chosen, value, 0.0), 1)


@triton.jit
def extremum(KIND: tl.constexpr, x):
    """cummin is cummax of −x."""
    if KIND == "cummin":
        return -x
    else:
        return x


@triton.jit
def beats(TIES: tl.constexpr, x, m):
    if TIES == "first":
        return (x > m) | ((x != x) & (m == m))
    else:
        return (x >= m) | (x != x)


@triton.jit
def scan_tile(
    dy,
    x,
    y,
    out,
    carries,
    states,
    row_dims,
    row_dy,
    row_x,
    row_y,
    row_out,
    axis_dims,
    axis_dy,
    axis_x,
    axis_y,
    axis_out,
    n,
    steps,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """A chunk of the axis a program: `steps` tiles, taken from the far end.

    PHASE "resident": one tile holds whole rows. "whole": a chunk is a whole row. Else "partial"
    leaves in `carries` what each chunk does to an S that arrives at its far end, `join_carries`
    makes of them the S that does arrive, and "apply" uses it: [slot, row tile, chunk, R]. Where no
    y was given, `states` holds the scan's own state before each tile: [slot, row tile, tile, R].
    """
    tiles_along = tl.cdiv(n, C)
    chunks = tl.cdiv(tiles_along, steps)
    pid = tl.program_id(0)
    if PHASE == "apply":
        # The last chunks that were read are the first to be mapped.
        pid = tl.num_programs(0) - 1 - pid
    chunk = pid % chunks
    tile = (pid // chunks).to(tl.int64)
    tiles = tl.cdiv(row_dims[0], R)
    lane = tl.arange(0, R)
    rows = (tile % tiles) * R + lane
    slot = (tile * chunks + chunk) * R + lane
    total = tl.num_programs(0).to(tl.int64) * R
    states_total = total // chunks * tiles_along
    carry = tl.zeros((R,), tl.float64)
    gate = tl.zeros((R,), tl.float64)
    if PHASE == "apply":
        carry = tl.load(carries + slot)
        gate = tl.load(carries + total + slot)
    if PHASE == "resident":
        tile_of(
            dy, x, y, out, row_dims, row_dy, row_x, row_y, row_out,
            axis_dims, axis_dy, axis_x, axis_y, axis_out, states, slot, states_total,
            n, tile // tiles, rows, chunk, tiles_along, carry, gate, False,
            KIND, TIES, ELEMENT, DY, X, Y, OUT, PHASE, FLIP, WIDE, R, C, FULL,
        )  # fmt: skip
        begin = chunk
        count = chunk * 0
    else:
        begin = chunk * steps
        count = tl.minimum(steps, tiles_along - begin)
    GATES: tl.constexpr = TIES != ""
    PARTIAL: tl.constexpr = PHASE == "partial"
    if PARTIAL and not GATES:
        gate += 1.0  # the factor of a chunk, so far
    for step in range(0, count):
        if FLIP:
            part = begin + step
            carried = part > 0
        else:
            part = begin + count - 1 - step
            carried = part < tiles_along - 1
        if PARTIAL:
            # Within the chunk alone.
            carried = begin * 0 + step > 0
        a, s = tile_of(
            dy, x, y, out, row_dims, row_dy, row_x, row_y, row_out,
            axis_dims, axis_dy, axis_x, axis_y, axis_out,
            states, (tile * tiles_along + part) * R + lane, states_total,
            n, tile // tiles, rows, part, tiles_along, carry, gate, carried,
            KIND, TIES, ELEMENT, DY, X, Y, OUT, PHASE, FLIP, WIDE, R, C, FULL,
        )  # fmt: skip
        if PARTIAL:
            if GATES:
                f, carry = gated(
                    gate.to(tl.int32), tl.where(carried, carry, 0.0), a.to(tl.int32), s
                )
                gate = tl.where(carried, f, a.to(tl.int32)).to(tl.float64)
            else:
                carry = tl.where(carried, s + a * carry, s)
                gate = tl.where(carried, gate * a, a)
        else:
            carry = s
            gate = a
    if PARTIAL:
        tl.store(carries + slot, carry)
        tl.store(carries + total + slot, gate)


@triton.jit
def tile_of(
    dy, x, y, out, row_dims, row_dy, row_x, row_y, row_out,
    axis_dims, axis_dy, axis_x, axis_y, axis_out, states, slot, total,
    n, outer, rows, part, tiles_along, carry, gate, carried,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr, FLIP: tl.constexpr,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    return run_tile(
        (dy, x, y, out),
        (row_dims, row_dy, axis_dims, axis_dy),
        (row_dims, row_x, axis_dims, axis_x),
        (row_dims, row_y, axis_dims, axis_y),
        (row_dims, row_out, axis_dims, axis_out),
        states,
        slot,
        total,
        n,
        outer,
        rows,
        rows < row_dims[0],
        part,
        tiles_along,
        carry,
        gate.to(tl.int32),
        carried,
        KIND,
        TIES,
        ELEMENT,
        DY,
        X,
        Y,
        OUT,
        "apply" if PHASE == "whole" else PHASE,
        FLIP,
        WIDE,
        R,
        C,
        FULL,
    )


@triton.jit
def run_tile(
    arrays,
    dy_steps,
    x_steps,
    y_steps,
    out_steps,
    states,
    slot,
    total,
    n,
    outer,
    rows,
    row_mask,
    part,
    tiles_along,
    carry,
    gate,
    carried,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """The gradient of a tile, stored unless PHASE is "partial".

    Comes back: for "partial" what the tile does to an arriving S, (c or gates, s); otherwise the
    gate and S of the tile's first place, for the tile before.
    """
    dy, x, y, out = arrays
    begin = part.to(n.dtype) * C
    # From the far end, so that the recurrence is a forward scan: Triton turns the others round
    # by shuffles that cost more than the scan.
    if FLIP:
        index = begin + tl.arange(0, C)
    else:
        index = begin + (C - 1) - tl.arange(0, C)
    mask = index < n
    low = index == begin
    high = index == tl.minimum(begin + C, n) - 1
    if FLIP:
        has_next = mask & (index > 0)
        has_prev = index + 1 < n
        ahead = (outer, rows, index - 1, row_mask, has_next)
        behind = (outer, rows, index + 1, row_mask, has_prev)
        first, far = high, low
        near_end, far_end, past = tl.minimum(begin + C, n) - 1, begin, begin - 1
        start = part == tiles_along - 1
    else:
        has_next = index + 1 < n
        has_prev = mask & (index > 0)
        ahead = (outer, rows, index + 1, row_mask, has_next)
        behind = (outer, rows, index - 1, row_mask, has_prev)
        first, far = low, high
        near_end, far_end = begin, tl.minimum(begin + C, n) - 1
        past = far_end + 1
        start = part == 0
    at = (outer, rows, index, row_mask, mask)
    first = first[None, :]
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    d = tl.broadcast_to(fetch(dy, DY, at, dy_steps, 0.0, WIDE, FULL), (R, C))
    if not FULL:
        d = tl.where(mask[None, :], d, 0.0)

    if KIND == "cumsum":
        s = tl.cumsum(d, 1, reverse=False)
        if PHASE == "apply":
            s = tl.where(carried, s + carry[:, None].to(TYPE), s)
        if PHASE != "partial":
            put(out, OUT, s, at, out_steps, R, C, FULL)
        if PHASE == "resident":
            return carry, carry
        elif PHASE == "partial":
            return tl.full((R,), 1.0, tl.float64), pick(s, first).to(tl.float64)
        else:
            # The tile's own sum is added to the carry in f64.
            own = tl.sum(d.to(tl.float64), 1)
            return gate.to(tl.float64), tl.where(carried, carry + own, own)
    elif KIND == "cumprod":
        c = tl.broadcast_to(fetch(x, X, ahead, x_steps, 1.0, WIDE, False), (R, C))
        c = tl.where(has_next[None, :], c, 1.0)
        a, s = tl.associative_scan((c, d), 1, affine, reverse=False)
        if PHASE == "partial":
            return pick(a, first).to(tl.float64), pick(s, first).to(tl.float64)
        else:
            if PHASE == "apply":
                s = tl.where(carried, s + a * carry[:, None].to(TYPE), s)
            if Y == "n":
                w = tl.broadcast_to(fetch(x, X, behind, x_steps, 1.0, WIDE, False), (R, C))
                w = tl.where(has_prev[None, :] & ~first, w, 1.0)
                w = tl.associative_scan(w, 1, multiply, reverse=True)
                if PHASE != "resident":
                    w = w * tl.load(states + slot)[:, None].to(TYPE)
            else:
                w = fetch(y, Y, behind, y_steps, 1.0, WIDE, False)
                w = tl.where(has_prev[None, :], w, 1.0)
            put(out, OUT, w * s, at, out_steps, R, C, FULL)
            return carry, pick(s, first).to(tl.float64)
    elif KIND == "log_cumsum_exp":
        return log_tile(
            (dy, x, y, out),
            d,
            dy_steps,
            x_steps,
            y_steps,
            out_steps,
            states,
            slot,
            total,
            at,
            first,
            far,
            (near_end, far_end, past),
            n,
            carry,
            carried,
            ELEMENT,
            DY,
            X,
            Y,
            OUT,
            PHASE,
            FLIP,
            R,
            C,
            FULL,
        )
    else:
        winner = winners(
            x, y, x_steps, y_steps, states, slot, at, behind, first, start,
            KIND, TIES, X, Y, PHASE, FLIP, WIDE, R, C, FULL,
        )  # fmt: skip
        f, s = tl.associative_scan((winner.to(tl.int32), d), 1, gated, reverse=False)
        if PHASE == "partial":
            own = tl.sum(tl.where(first, f, 0), 1)
            return own.to(tl.float64), pick(s, first).to(tl.float64)
        else:
            if PHASE == "apply":
                arrives = carried & ((f & 2) == 0) & (gate[:, None] == 0)
                s = tl.where(arrives, s + carry[:, None].to(TYPE), s)
            put(out, OUT, tl.where(winner, s, 0.0), at, out_steps, R, C, FULL)
            own = tl.sum((first & winner).to(tl.int32), 1)
            return own.to(tl.float64), pick(s, first).to(tl.float64)


@triton.jit
def winners(
    x, y, x_steps, y_steps, states, slot, at, behind, first, start,
    KIND: tl.constexpr, TIES: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, PHASE: tl.constexpr,
    FLIP: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Which places start a new extremum. The first of a row always does."""
    if Y == "n":
        v = tl.broadcast_to(extremum(KIND, fetch(x, X, at, x_steps, 0.0, WIDE, FULL)), (R, C))
        v = tl.where(at[4][None, :], v, -_INFINITY)
        place = tl.broadcast_to(at[2][None, :], (R, C))
        if TIES == "first":
            _, best = tl.associative_scan((v, place), 1, first_wins, reverse=True)
        else:
            _, best = tl.associative_scan((v, place), 1, last_wins, reverse=True)
        wins = best == place
        if PHASE != "resident":
            wins = wins & (beats(TIES, v, tl.load(states + slot)[:, None].to(v.dtype)) | start)
        return wins | (first & start)
    elif TIES == "first":
        v = extremum(KIND, fetch(y, Y, at, y_steps, 0.0, WIDE, FULL))
        m = extremum(KIND, fetch(y, Y, behind, y_steps, 0.0, WIDE, False))
        return tl.broadcast_to(beats(TIES, v, m), (R, C)) | (first & start)
    else:
        v = fetch(x, X, at, x_steps, 0.0, WIDE, FULL)
        m = fetch(y, Y, at, y_steps, 0.0, WIDE, FULL)
        return tl.broadcast_to((v == m) | (v != v), (R, C)) | (first & start)


@triton.jit
def log_tile(
    arrays,
    d,
    dy_steps,
    x_steps,
    y_steps,
    out_steps,
    states,
    slot,
    total,
    at,
    first,
    far,
    ends,
    n,
    carry,
    carried,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    WIDE: tl.constexpr = ELEMENT == "f64"
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    _dy, x, y, out = arrays
    row_mask = at[3]
    mask = at[4][None, :]
    u = tl.broadcast_to(fetch(x, X, at, x_steps, 0.0, WIDE, FULL), (R, C))
    here = row_mask[:, None] & mask
    if Y == "n":
        top = tl.max(tl.where(here & (u == u), u, -_INFINITY), 1)
        broken = tl.max(tl.where(here & ((u != u) | (u == _INFINITY)), 1, 0), 1)
        m0 = tl.full((R,), -_INFINITY, TYPE)
        if PHASE != "resident":
            m0 = tl.load(states + slot).to(TYPE)
        high = tl.maximum(top, m0)
        low = tl.maximum(m0, pick(u, first))
        usual = (broken == 0) & (m0 == m0) & (low > high - _RANGE) & (high < _INFINITY)
        low = high  # the reference: sums are at most their number, so that a small dy stays normal
    else:
        v = tl.broadcast_to(fetch(y, Y, at, y_steps, 0.0, WIDE, FULL), (R, C))
        # y never falls, and a NaN stays: its ends tell all.
        low = value_at(y, Y, at, ends[0], n, y_steps, R)
        high = value_at(y, Y, at, ends[1], n, y_steps, R)
        usual = (low > high - _RANGE) & (high < _INFINITY) & (low > -_INFINITY)
    # One reference a row, in the middle of what the exponents reach.
    ref = tl.where(row_mask, (high + low) * 0.5, 0.0).to(TYPE)
    e = exp_of_difference(u, ref[:, None], ELEMENT)
    if Y == "n":
        e = tl.where(mask & (u > -_INFINITY), e, 0.0)
        f = tl.cumsum(e, 1, reverse=True)
        if PHASE != "resident":
            e0 = tl.load(states + total + slot).to(TYPE)
            f += (e0 * exp_of_difference(m0, ref, ELEMENT))[:, None]
        g = d / tl.where(f == 0.0, 1.0, f)
        own = pick(f, first).to(tl.float64)
        arriving = own
        if PHASE != "resident":
            x_past = value_at(x, X, at, ends[2], n, x_steps, R).to(TYPE)
            usual = usual & ~(x_past - ref > _RANGE)
            arrived = pick(f, far[None, :]) + exp_of_difference(x_past, ref, ELEMENT)
            arriving = 1.0 / arrived.to(tl.float64)
    else:
        g = d * exp_of_difference(ref[:, None], v, ELEMENT)
        own = tl.exp(low - ref.to(tl.float64))
        arriving = own
        if PHASE != "resident":
            y_past = value_at(y, Y, at, ends[2], n, y_steps, R)
            arriving = tl.exp(ref.to(tl.float64) - y_past)
    if not WIDE:  # times weights down to e⁻²⁰, a small dy would be no normal number
        size = tl.max(tl.where(here, tl.abs(d), 0.0), 1)
        usual = usual & ((size == 0.0) | (size > _SMALL))
    if not FULL:
        g = tl.where(mask, g, 0.0)
    s = tl.cumsum(g, 1, reverse=False)
    if PHASE == "apply":
        brought = (carry * arriving).to(TYPE)
        s = tl.where(carried, s + brought[:, None], s)
        if Y == "n" and not WIDE:
            usual = usual & (~carried | (brought == 0.0) | (tl.abs(brought) > _SMALL))
    dx = tl.where(u == -_INFINITY, 0.0, e * s)
    c_first = own * arriving
    all_of_it = pick(s, first)
    s_first = own * all_of_it.to(tl.float64)
    # What overflows, or is not finite in dy, shows at the first place.
    usual = usual & (tl.abs(all_of_it) < _INFINITY)
    every = tl.min(tl.where(row_mask & ~usual, 0, 1), 0) == 1
    if every:
        if PHASE != "partial":
            put(out, OUT, dx, at, out_steps, R, C, FULL)
    else:
        arriving_s = tl.zeros((R,), tl.float64)
        if PHASE == "apply":
            arriving_s = tl.where(carried, carry, 0.0)
        if Y == "n":
            before = tl.full((R,), -_INFINITY, tl.float64)
            sums = tl.zeros((R,), tl.float64)
            if PHASE != "resident":  # loaded anew, lest they take registers meanwhile
                before = tl.load(states + slot, cache_modifier=".cg")
                sums = tl.load(states + total + slot, cache_modifier=".cg")
            c_first, s_first = careful_log_sums(
                arrays, dy_steps, x_steps, out_steps, at, n, arriving_s, before, sums,
                DY, X, OUT, PHASE, FLIP, R, C,
            )  # fmt: skip
        else:
            c_first, s_first = careful_logs(
                arrays, dy_steps, x_steps, y_steps, out_steps, at, n, arriving_s,
                DY, X, Y, OUT, PHASE, FLIP, R, C,
            )  # fmt: skip
    return c_first, s_first


@triton.jit
def small_step(at, begin, step, n, FLIP: tl.constexpr, C: tl.constexpr, H: tl.constexpr):
    """H places of a tile of C, counted from its far end: the lowest, all of them from the far end
    on, and what follows each."""
    if FLIP:
        low = begin + step * H
        index = low + tl.arange(0, H)
        follows = index - 1
    else:
        low = begin + C - H - step * H
        index = low + (H - 1) - tl.arange(0, H)
        follows = index + 1
    mask = index < n
    has_next = mask & (follows >= 0) & (follows < n)
    here = (at[0], at[1], index, at[3], mask)
    return low, here, (at[0], at[1], follows, at[3], has_next)


@triton.jit
def careful_logs(
    arrays, dy_steps, x_steps, y_steps, out_steps, at, n, arriving,
    DY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr,
    FLIP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile whose y are far apart or not finite, by pairs in f64, in small steps: what they need
    is read again, so that the usual way keeps its registers."""
    dy, x, y, out = arrays
    H: tl.constexpr = eighth(C)
    begin = tl.min(at[2], 0)
    factor = tl.full((R,), 1.0, tl.float64)
    s = arriving
    for step in range(0, C // H):
        low, here, ahead = small_step(at, begin, step, n, FLIP, C, H)
        index, mask, has_next = here[2], here[4], ahead[4]
        d = tl.broadcast_to(fetch(dy, DY, here, dy_steps, 0.0, True, False), (R, H))
        u = fetch(x, X, here, x_steps, 0.0, True, False)
        v = fetch(y, Y, here, y_steps, 0.0, True, False)
        c = ratio(v, fetch(y, Y, ahead, y_steps, 0.0, True, False))
        c = tl.broadcast_to(tl.where(has_next[None, :], c, 1.0), (R, H))
        d = tl.where(mask[None, :], d, 0.0)
        a, sums = tl.associative_scan((c, d), 1, affine, reverse=False)
        sums += a * s[:, None]
        if FLIP:
            first = (index == low + H - 1)[None, :]
        else:
            first = (index == low)[None, :]
        s = pick(sums, first)
        factor = factor * pick(a, first)
        if PHASE != "partial":
            dx = tl.where(u == -_INFINITY, 0.0, tl.exp(u - v) * sums)
            tl.debug_barrier()  # threads that hold the same have loaded dy, which may be dx
            put(out, OUT, dx, here, out_steps, R, H, False)
    return factor, s


@triton.jit
def careful_log_sums(
    arrays, dy_steps, x_steps, out_steps, at, n, arriving, m0, e0,
    DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr,
    FLIP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The same where no y was given, but the state (m0, e0) before the tile; the places before each
    step are summed anew."""
    dy, x, _y, out = arrays
    H: tl.constexpr = few(R, C)
    COUNT: tl.constexpr = C // H
    begin = tl.min(at[2], 0)
    factor = tl.full((R,), 1.0, tl.float64)
    s = arriving
    lowest = tl.full((R, H), -_INFINITY, tl.float64)
    none = tl.zeros((R, H), tl.float64)
    for step in range(0, COUNT):
        m, e = m0, e0
        for nearer in range(0, COUNT - 1 - step):
            low = begin + C - H - nearer * H if FLIP else begin + nearer * H
            index = low + tl.arange(0, H)
            mask = index < n
            here = (at[0], at[1], index, at[3], mask)
            u = tl.broadcast_to(fetch(x, X, here, x_steps, 0.0, True, False), (R, H))
            u = tl.where(mask[None, :], u, lowest)
            top = tl.reduce(u, 1, larger)
            sums = tl.sum(tl.where(mask[None, :], ratio(u, top[:, None]), 0.0), 1)
            m, e = log_add(m, e, top, sums)
        low, here, ahead = small_step(at, begin, step, n, FLIP, C, H)
        index, mask, has_next = here[2], here[4], ahead[4]
        if FLIP:
            first = (index == tl.minimum(low + H, n) - 1)[None, :]
        else:
            first = (index == low)[None, :]
        exists = low < n
        d = tl.broadcast_to(fetch(dy, DY, here, dy_steps, 0.0, True, False), (R, H))
        d = tl.where(mask[None, :], d, 0.0)
        u = tl.broadcast_to(fetch(x, X, here, x_steps, 0.0, True, False), (R, H))
        x_next = tl.broadcast_to(fetch(x, X, ahead, x_steps, 0.0, True, False), (R, H))
        begun = (tl.where(mask[None, :], u, lowest), tl.where(mask[None, :], 1.0, none))
        m1, e1 = tl.associative_scan(begun, 1, log_add, reverse=True)
        m1, e1 = log_add(m[:, None], e[:, None], m1, e1)
        # The state one step on: the same scan over what follows, begun with the first.
        begun = (
            tl.where(has_next[None, :], x_next, lowest),
            tl.where(has_next[None, :], 1.0, none),
        )
        m2, e2 = tl.associative_scan(begun, 1, log_add, reverse=True)
        m2, e2 = log_add(pick(u, first)[:, None], tl.full((R, 1), 1.0, tl.float64), m2, e2)
        m2, e2 = log_add(m[:, None], e[:, None], m2, e2)
        same = (m1 == m2) & (tl.abs(m1) == _INFINITY)
        c = tl.where(same, 1.0, ratio(m1, m2) * e1 / e2)
        c = tl.where(has_next[None, :], c, 1.0)
        a, sums = tl.associative_scan((c, d), 1, affine, reverse=False)
        sums += a * s[:, None]
        s = tl.where(exists, pick(sums, first), s)
        factor = tl.where(exists, factor * pick(a, first), factor)
        if PHASE != "partial":
            w = tl.where(u == _INFINITY, float("nan"), ratio(u, m1) / e1)
            dx = tl.where(u == -_INFINITY, 0.0, w * sums)
            tl.debug_barrier()
            put(out, OUT, dx, here, out_steps, R, H, False)
    return factor, s


@triton.constexpr_function
def eighth(c):
    return max(1, c // 8)


@triton.constexpr_function
def few(r, c):
    """Places of a small step of r rows that take many registers."""
    return min(eighth(c), max(1, 256 // r))


@triton.jit
def value_at(pointer, MODE: tl.constexpr, at, place, n, steps, R: tl.constexpr):
    """One value a row, f64, at a place of the axis; 0 where there is none."""
    index = place + tl.arange(0, 1)
    there = (at[0], at[1], index, at[3], (index >= 0) & (index < n))
    value = fetch(pointer, MODE, there, steps, 0.0, True, False)
    return tl.reshape(tl.broadcast_to(value, (R, 1)), (R,))


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

    GATES says what tiles do: "" a factor, "open" a gate, "winners" the two bits of `gated`.
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
            c, sums = tl.associative_scan((own_a, own_s), 1, affine)
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
