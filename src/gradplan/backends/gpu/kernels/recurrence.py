"""The engine *recurrence*: S[k] = dy[k] + c[k] · S[k+1], from the far end of the axis.

Inside a tile the recurrence is an associative scan over pairs; between tiles it goes through
carries kept in f64. FLIP says that the axis is walked the other way (`reverse=True`): then "next"
is the place before in memory.

- cumsum adds;
- cumprod scans (c, s) with c = x[k+1];
- cummax, cummin scan (gates, s): a gate chooses, it never multiplies;
- log-cumsum-exp is in `log_tiles`.
"""

import triton
import triton.language as tl

from .arithmetic import multiply
from .log_tiles import log_tile
from .stretches import affine, beats, extremum, first_wins, gated, last_wins, pick, times
from .tiles import fetch, put

_INFINITY = tl.constexpr(float("inf"))


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
                both = times(gate, a) if KIND == "log_cumsum_exp" else gate * a
                gate = tl.where(carried, both, a)
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
            KIND, TIES, X, Y, PHASE, WIDE, R, C, FULL,
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
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
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
