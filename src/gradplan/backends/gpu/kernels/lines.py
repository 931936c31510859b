"""The engine *recurrence* for rows that lie in memory one element after the other.

A thread takes a line of V neighbouring elements in one load and runs the recurrence through them
in registers; only what each line does to an S that arrives from behind goes through a scan across
threads. Lines are numbered from the far end of the axis, so that scan runs forwards. A
neighbour's x or y is the next register, or at the end of a line one more load.
"""

import triton
import triton.language as tl

from .arithmetic import exp_of_difference
from .recurrence import beats, careful_logs, extremum
from .tiles import outer_offset

_INFINITY = tl.constexpr(float("inf"))
_RANGE = tl.constexpr(40.0)


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
def behind_sum(s1, p1, s2, p2):
    """(sum, sum of what is behind the last): the first argument is nearer the far end."""
    return s1 + s2, s1 + p2


@triton.jit
def behind_affine(a1, s1, b1, p1, a2, s2, b2, p2):
    """(a, s) as in `affine`, and the same for what is behind the last."""
    return a1 * a2, s2 + a2 * s1, a1 * b2, p2 + b2 * s1


@triton.jit
def behind_gated(a1, s1, b1, p1, a2, s2, b2, p2):
    """The same with gates: 1 lets S through, 0 does not; a choice, never a product."""
    s = s2 + tl.where(a2 != 0, s1, 0.0)
    p = p2 + tl.where(b2 != 0, s1, 0.0)
    return a1 & a2, s, a1 & b2, p


@triton.jit
def through(MODE: tl.constexpr, s, a, arriving):
    """s + a · arriving, in the way of a mode."""
    if MODE == "sum":
        return s + arriving
    elif MODE == "affine":
        return s + a * arriving
    else:
        return s + tl.where(a != 0, arriving, 0.0)


@triton.jit
def joined(MODE: tl.constexpr, a, b):
    """The factor or gate of two in a row."""
    if MODE == "affine":
        return a * b
    else:
        return a & b


@triton.jit
def shifted(columns, edge, UP: tl.constexpr, V: tl.constexpr):
    """Each element's neighbour above (UP) or below in memory; `edge` beyond the line."""
    if UP:
        return columns[1:] + (edge,)
    else:
        return (edge,) + columns[: V - 1]


@triton.jit
def line_of(pointer, base, index, mask, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer + base[:, None] + index)
    else:
        return tl.load(pointer + base[:, None] + index, mask=mask, other=0.0)


@triton.jit
def edge_of(pointer, base, place, row_mask, n, TYPE: tl.constexpr):
    """One element a line, beside it; 0 where the row ends."""
    there = row_mask & (place >= 0) & (place < n)
    return tl.load(pointer + base + place, mask=there, other=0.0).to(TYPE)


@triton.jit
def scan_lines(
    dy,
    x,
    y,
    out,
    carries,
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
    X: tl.constexpr,
    Y: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    FULL: tl.constexpr,
):
    """`steps` tiles of M lines a row, R rows a program; the phases are those of `scan_tile`."""
    C: tl.constexpr = M * V
    L: tl.constexpr = R * M
    UP: tl.constexpr = not FLIP
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    MODE: tl.constexpr = mode_of(KIND)
    tiles_along = tl.cdiv(n, C)
    chunks = tl.cdiv(tiles_along.to(tl.int32), steps)  # programs are counted in 32 bits
    pid = tl.program_id(0)
    if PHASE == "apply":
        # The last chunks that were read are the first to be mapped.
        pid = tl.num_programs(0) - 1 - pid
    chunk = pid % chunks
    tile = (pid // chunks).to(tl.int64)
    tiles = tl.cdiv(row_dims[0], R)
    outer = tile // tiles
    line = tl.arange(0, L)
    rows = (tile % tiles) * R + line // M
    row_mask = rows < row_dims[0]
    dy_base = outer_offset(outer, row_dims, row_dy) + rows.to(tl.int64) * row_dy[0]
    out_base = outer_offset(outer, row_dims, row_out) + rows.to(tl.int64) * row_out[0]
    if X != "n":
        x_base = outer_offset(outer, row_dims, row_x) + rows.to(tl.int64) * row_x[0]
    if Y != "n":
        y_base = outer_offset(outer, row_dims, row_y) + rows.to(tl.int64) * row_y[0]
    lane = tl.arange(0, R)
    slot = (tile * chunks + chunk) * R + lane
    total = tl.num_programs(0).to(tl.int64) * R
    carry = tl.zeros((R,), tl.float64)
    factor = tl.full((R,), 1.0, tl.float64)
    if PHASE == "apply":
        carry = tl.load(carries + slot)
    begin_part = chunk.to(n.dtype) * steps
    count = tl.minimum(steps, tiles_along - begin_part)
    if FLIP:
        block = line % M
    else:
        block = M - 1 - line % M
    nearest = (tl.arange(0, M) == M - 1)[None, :]
    for step in range(0, count):
        if FLIP:
            part = begin_part + step
            carried = part > 0
        else:
            part = begin_part + count - 1 - step
            carried = part < tiles_along - 1
        if PHASE == "partial":
            carried = begin_part * 0 + step > 0  # within the chunk alone
        begin = part.to(n.dtype) * C
        start = begin + block * V
        index = start[:, None] + tl.arange(0, V)[None, :]
        mask = row_mask[:, None] & (index < n)
        after = start + V if UP else start - 1
        before = start - 1 if UP else start + V
        arriving = carry
        d = columns_of(line_of(dy, dy_base, index, mask, FULL).to(TYPE), L, V)
        if KIND == "log_cumsum_exp":
            u = columns_of(line_of(x, x_base, index, mask, FULL).to(TYPE), L, V)
            v = columns_of(line_of(y, y_base, index, mask, FULL).to(TYPE), L, V)
            last = tl.minimum(begin + C, n) - 1
            near_end = begin if UP else last
            far_end = last if UP else begin
            past = last + 1 if UP else begin - 1
            # y never falls, and a NaN stays: its ends tell all.
            low = edge_of(y, y_base, near_end + block * 0, row_mask, n, TYPE)
            high = edge_of(y, y_base, far_end + block * 0, row_mask, n, TYPE)
            usual = (low > high - _RANGE) & (high < _INFINITY) & (low > -_INFINITY)
            ref = tl.where(row_mask, (high + low) * 0.5, 0.0)
            g = ()
            for j in tl.static_range(0, V):
                term = d[j] * exp_of_difference(ref, v[j], ELEMENT)
                if not FULL:
                    term = tl.where(start + j < n, term, 0.0)
                g = g + (term,)
            d = g
            one = line % M == M - 1
            ref_row = picked(ref, one, R, M)
            own = tl.exp(picked(low, one, R, M) - ref_row)
            onward = own
            if PHASE != "resident":
                y_past = edge_of(y, y_base, past + block * 0, row_mask, n, TYPE)
                onward = tl.exp(ref_row - picked(y_past, one, R, M))
                arriving = carry * onward
        # c of each place, in memory order: what S of the next place is multiplied by, or gated.
        c = d
        if MODE == "affine":
            u = columns_of(line_of(x, x_base, index, mask, FULL).to(TYPE), L, V)
            c = shifted(u, edge_of(x, x_base, after, row_mask, n, TYPE), UP, V)
            w = columns_of(line_of(y, y_base, index, mask, FULL).to(TYPE), L, V)
            w = shifted(w, edge_of(y, y_base, before, row_mask, n, TYPE), FLIP, V)
        elif MODE == "gate":
            v = columns_of(line_of(y, y_base, index, mask, FULL).to(TYPE), L, V)
            y_after = edge_of(y, y_base, after, row_mask, n, TYPE)
            wins = ()
            if TIES == "first":
                y_before = edge_of(y, y_base, before, row_mask, n, TYPE)
                m = shifted(v, y_before, FLIP, V)
                for j in tl.static_range(0, V):
                    wins = wins + (beats(TIES, extremum(KIND, v[j]), extremum(KIND, m[j])),)
                nearer = v[V - 1] if UP else v[0]
                wins_after = beats(TIES, extremum(KIND, y_after), extremum(KIND, nearer))
            else:
                u = columns_of(line_of(x, x_base, index, mask, FULL).to(TYPE), L, V)
                for j in tl.static_range(0, V):
                    wins = wins + ((u[j] == v[j]) | (u[j] != u[j]),)
                x_after = edge_of(x, x_base, after, row_mask, n, TYPE)
                wins_after = (x_after == y_after) | (x_after != x_after)
            c = shifted(wins, wins_after, UP, V)
        # Through the line, from the far side: (a, s) for all behind the line.
        if MODE == "sum":
            if UP:
                s = (d[V - 1],)
                for j in tl.static_range(1, V):
                    s = (d[V - 1 - j] + s[0],) + s
            else:
                s = (d[0],)
                for j in tl.static_range(1, V):
                    s = s + (d[j] + s[j - 1],)
            a = s
        else:
            f = ()
            for j in tl.static_range(0, V):
                next_place = start + j + 1 if UP else start + j - 1
                exists = (next_place >= 0) & (next_place < n)
                if MODE == "affine":
                    f = f + (tl.where(exists, c[j], 1.0),)
                else:
                    f = f + ((~(c[j] & exists)).to(tl.int32) & 1,)
            if not FULL:
                kept = ()
                for j in tl.static_range(0, V):
                    kept = kept + (tl.where(start + j < n, d[j], 0.0),)
                d = kept
            if UP:
                s = (d[V - 1],)
                a = (f[V - 1],)
                for j in tl.static_range(1, V):
                    s = (through(MODE, d[V - 1 - j], f[V - 1 - j], s[0]),) + s
                    a = (joined(MODE, f[V - 1 - j], a[0]),) + a
            else:
                s = (d[0],)
                a = (f[0],)
                for j in tl.static_range(1, V):
                    s = s + (through(MODE, d[j], f[j], s[j - 1]),)
                    a = a + (joined(MODE, f[j], a[j - 1]),)
        leaving = s[0] if UP else s[V - 1]
        gain = a[0] if UP else a[V - 1]
        # Across lines.
        leaving = tl.reshape(leaving, (R, M))
        if MODE == "sum":
            all_s, behind = tl.associative_scan((leaving, tl.zeros((R, M), TYPE)), 1, behind_sum)
            if PHASE != "resident":
                more = tl.where(carried, arriving, 0.0)[:, None]
                behind = tl.where(carried, behind + more.to(TYPE), behind)
                all_s = tl.where(carried, all_s + more.to(TYPE), all_s)
            total_s = picked_row(all_s, nearest)
            total_a = tl.full((R,), 1.0, tl.float64)
        else:
            gain = tl.reshape(gain, (R, M))
            if MODE == "affine":
                all_a, all_s, b, behind = tl.associative_scan(
                    (gain, leaving, tl.full((R, M), 1.0, TYPE), tl.zeros((R, M), TYPE)),
                    1,
                    behind_affine,
                )
            else:
                all_a, all_s, b, behind = tl.associative_scan(
                    (gain, leaving, tl.full((R, M), 1, tl.int32), tl.zeros((R, M), TYPE)),
                    1,
                    behind_gated,
                )
            if PHASE != "resident":
                more = carry[:, None].to(TYPE)
                behind = tl.where(carried, through(MODE, behind, b, more), behind)
                all_s = tl.where(carried, through(MODE, all_s, all_a, more), all_s)
            total_s = picked_row(all_s, nearest)
            total_a = picked_row(all_a, nearest)
        behind = tl.reshape(behind, (L,))
        if PHASE != "partial":
            results = ()
            for j in tl.static_range(0, V):
                S = through(MODE, s[j], a[j], behind)
                if KIND == "cumprod":
                    previous = start + j - 1 if UP else start + j + 1
                    has_prev = (previous >= 0) & (previous < n)
                    S = tl.where(has_prev, w[j], 1.0) * S
                elif KIND == "log_cumsum_exp":
                    e = exp_of_difference(u[j], ref, ELEMENT)
                    S = tl.where(u[j] == -_INFINITY, 0.0, e * S)
                elif MODE == "gate":
                    starts = start + j == 0 if UP else start + j == n - 1
                    S = tl.where(wins[j] | starts, S, 0.0)
                results = results + (S,)
        if KIND == "log_cumsum_exp":
            # What overflows, or is not finite in dy, shows at the first place.
            finite = tl.abs(total_s) < _INFINITY
            good = tl.min(tl.where(row_mask & ~usual, 0, 1), 0)
            ok = good * tl.min(tl.where(finite, 1, 0), 0)
            new_s = own * total_s.to(tl.float64)
            new_a = own * onward
            if ok == 1:
                if PHASE != "partial":
                    store_lines(out, out_base, index, mask, results, L, V, FULL)
            else:
                span = begin + tl.arange(0, C)
                row_lane = (tile % tiles) * R + lane
                at = (outer, row_lane, span, row_lane < row_dims[0], span < n)
                s_in = tl.zeros((R,), tl.float64)
                if PHASE != "resident":
                    s_in = tl.where(carried, carry, 0.0)
                new_a, new_s = careful_logs(
                    (dy, x, y, out),
                    (row_dims, row_dy, axis_dims, axis_dy),
                    (row_dims, row_x, axis_dims, axis_x),
                    (row_dims, row_y, axis_dims, axis_y),
                    (row_dims, row_out, axis_dims, axis_out),
                    at, n, s_in, "t", "t", "t", "t", PHASE, FLIP, R, C,
                )  # fmt: skip
            carry = new_s
            factor = factor * new_a
        else:
            if PHASE != "partial":
                store_lines(out, out_base, index, mask, results, L, V, FULL)
            carry = total_s.to(tl.float64)
            factor = factor * total_a.to(tl.float64)
    if PHASE == "partial":
        tl.store(carries + slot, carry)
        tl.store(carries + total + slot, factor)


@triton.constexpr_function
def mode_of(kind):
    """How the recurrence of a kind goes through a line."""
    return {"cumprod": "affine", "cummax": "gate", "cummin": "gate"}.get(kind, "sum")


@triton.jit
def picked_row(values, chosen):
    """The value of each row at the one chosen line: picked, never multiplied."""
    return tl.sum(tl.where(chosen, values, tl.zeros_like(values)), 1)


@triton.jit
def picked(values, chosen, R: tl.constexpr, M: tl.constexpr):
    """The same for values of shape [R · M], in f64."""
    return tl.sum(tl.reshape(tl.where(chosen, values, 0.0), (R, M)), 1).to(tl.float64)


@triton.jit
def store_lines(
    out, base, index, mask, results, L: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr
):
    """Round a tile once and store it."""
    element: tl.constexpr = out.dtype.element_ty
    value = tile_of_columns(results, L, V)
    if element == tl.bfloat16 or element == tl.float16:
        value = value.to(tl.float32)
    if FULL:
        tl.store(out + base[:, None] + index, value.to(element))
    else:
        tl.store(out + base[:, None] + index, value.to(element), mask=mask)
