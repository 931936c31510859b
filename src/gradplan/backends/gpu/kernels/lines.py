"""The engine *recurrence* for rows that lie in memory one element after the other, or side by side.

A thread takes a line, V neighbouring elements of a row, and runs the recurrence through them in
registers; only what each line does to an S that arrives from behind goes through a scan across
threads. Lines are numbered from the far end of the axis, so that scan runs forwards. A
neighbour's x or y is the next register, or at the end of a line one more load.
"""

import triton
import triton.language as tl

from .arithmetic import exp_of_difference, reciprocal_f64, weight_below
from .forwards import log_sums, look_ahead, over, products_before, sum_at, within_or
from .joins import join_span
from .line_memory import (
    bit_of,
    bring,
    edge_of,
    line_of,
    masks_of,
    raw_line_of,
    row_base,
    store_lines,
    widened_line,
    words_of,
)
from .line_scans import (
    behind_affine,
    behind_gated,
    behind_sum,
    both_picked,
    chosen,
    even,
    exp_between,
    factors,
    gates_of,
    last_gated,
    leads_of,
    mask,
    mode_of,
    near_enough,
    picked,
    prefixes,
    shifted,
    spread,
    steps_up,
    through,
    tiled,
    within,
)
from .log_tiles import careful_log_sums, careful_logs
from .stretches import affine
from .tiles import cache_of, tile_row
from .waiting import alternate, arrive, await_opening, leave, open_up, turn

_INFINITY = tl.constexpr(float("inf"))
_RANGE = tl.constexpr(40.0)


@triton.jit
def scan_lines(
    dy,
    x,
    y,
    out,
    carries,
    states,
    counters,
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
    lead,
    window,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    SIDE: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
    FULL: tl.constexpr,
):
    """`steps` tiles of M lines a row, R rows a program of W warps; the phases are those of
    `scan_tile`.

    PHASE "lagged": every chunk is read twice, by two programs of one launch, the second so shortly
    after the first that it finds the chunk in the cache. In between the last of `window` chunks
    joins their carries, and hands on what leaves them in `links`, behind the carries.

    Y is "b" where y holds the words of `winners`; "n" where the scan is run again from x: `states`
    is that of `scan_tile`, which "whole" fills itself.

    PAIRS: halves of cummax and cummin, which are compared two at a time.
    """
    tiles_along = tl.cdiv(n, M * V)
    chunks = tl.cdiv(tiles_along.to(tl.int32), steps)  # programs are counted in 32 bits
    pid = tl.program_id(0)
    if PHASE == "lagged":
        count = tl.num_programs(0) // 2
        second, pid = alternate(turn(counters), count, lead)
        tile = pid // chunks
        place = pid % chunks  # from the far end
        windows = tl.cdiv(chunks, window)
        number = place // window
        members = tl.minimum(window, chunks - number * window)
        counter = counters + 1 + tile * windows + number
        chunk = place if FLIP else chunks - 1 - place
        total = count.to(tl.int64) * R
        if second:
            lines_chunk(
                dy, x, y, out, carries, states, counter, row_dims, row_dy, row_x, row_y, row_out,
                axis_dims, axis_dy, axis_x, axis_y, axis_out, n, steps, tile, chunk, chunks, total,
                KIND, TIES, ELEMENT, X, Y, "second", FLIP, WIDE, SIDE, R, M, V, W, PAIRS,
                0, FULL,
            )  # fmt: skip
            leave(counter, members + (number + 1 < windows).to(tl.int32))
        else:
            lines_chunk(
                dy, x, y, out, carries, states, counter, row_dims, row_dy, row_x, row_y, row_out,
                axis_dims, axis_dy, axis_x, axis_y, axis_out, n, steps, tile, chunk, chunks, total,
                KIND, TIES, ELEMENT, X, Y, "partial", FLIP, WIDE, SIDE, R, M, V, W, PAIRS,
                0, FULL,
            )  # fmt: skip
            if arrive(counter, members):
                lane = tl.arange(0, R)
                s = tl.zeros((R,), tl.float64)
                gate = tl.zeros((R,), tl.float64)
                links = carries + 2 * total + (tile.to(tl.int64) * windows + number) * 2 * R + lane
                if number > 0:
                    await_opening(counter - 1)
                    s = tl.load(links - 2 * R, cache_modifier=".cg")
                    gate = tl.load(links - R, cache_modifier=".cg")
                    leave(counter - 1, window + 1)
                s, gate = join_span(
                    carries, total, tile, chunks, number * window, members, lane, s, gate,
                    gates_of(KIND), FLIP, R, R, K,
                )  # fmt: skip
                tl.store(links, s)
                tl.store(links + R, gate)
                open_up(counter, members)
    else:
        if PHASE == "apply":
            # The last chunks that were read are the first to be mapped.
            pid = tl.num_programs(0) - 1 - pid
        lines_chunk(
            dy, x, y, out, carries, states, counters, row_dims, row_dy, row_x, row_y, row_out,
            axis_dims, axis_dy, axis_x, axis_y, axis_out, n, steps, pid // chunks, pid % chunks,
            chunks, tl.num_programs(0).to(tl.int64) * R,
            KIND, TIES, ELEMENT, X, Y, PHASE, FLIP, WIDE, SIDE, R, M, V, W, PAIRS,
            AHEAD, FULL,
        )  # fmt: skip


@triton.jit
def lines_chunk(
    dy, x, y, out, carries, states, counter, row_dims, row_dy, row_x, row_y, row_out,
    axis_dims, axis_dy, axis_x, axis_y, axis_out, n, steps, tile, chunk, chunks, total,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, X: tl.constexpr,
    Y: tl.constexpr, PHASE: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    PAIRS: tl.constexpr, AHEAD: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A chunk of a tile of rows, from its far end; "second" is the second read of "lagged"."""
    C: tl.constexpr = M * V
    L: tl.constexpr = R * M
    UP: tl.constexpr = not FLIP
    MODE: tl.constexpr = mode_of(KIND)
    NEAR: tl.constexpr = 0 if UP else V - 1  # of a line's elements the nearest to where rows end
    SPENT: tl.constexpr = PHASE == "second"
    CACHE: tl.constexpr = cache_of(SPENT, KIND == "cumsum")
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    AXIS: tl.constexpr = 0 if SIDE else 1
    # Sums of a log-cumsum-exp are larger by so much: weights are down to e⁻²⁰, and a small dy times
    # them is to stay a normal number.
    POWER: tl.constexpr = 0 if WIDE else 32
    UPWARDS: tl.constexpr = 2.0**POWER
    DOWNWARDS: tl.constexpr = 2.0**-POWER
    tiles_along = tl.cdiv(n, C)
    outer, first = tile_row(tile, row_dims, R)
    tile = tile.to(tl.int64)
    line = tl.arange(0, L)
    if SIDE:
        rows = first + line % R
        number = line // R
    else:
        rows = first + line // M
        number = line % M
    row_mask = rows < row_dims[0]
    dy_base = row_base(outer, rows, row_dims, row_dy, SIDE)
    out_base = row_base(outer, rows, row_dims, row_out, SIDE)
    if X != "n":
        x_base = row_base(outer, rows, row_dims, row_x, SIDE)
    if Y != "n" and Y != "b":
        y_base = row_base(outer, rows, row_dims, row_y, SIDE)
    lane = tl.arange(0, R)
    lane_mask = first + lane < row_dims[0]
    RECOMPUTED: tl.constexpr = KIND != "cumsum" and Y == "n"
    if KIND == "log_cumsum_exp":
        if RECOMPUTED:
            x_lane = row_base(outer, first + lane, row_dims, row_x, SIDE)
        else:
            y_lane = row_base(outer, first + lane, row_dims, row_y, SIDE)
    slot = (tile * chunks + chunk) * R + lane
    if RECOMPUTED and PHASE != "resident":
        states_total = total // chunks * tiles_along
        row_slot = tile * tiles_along * R + lane
    carry = tl.zeros((R,), tl.float64)
    factor = tl.full((R,), 1.0, tl.float64)
    # A carry of log-cumsum-exp is in terms of the y that it comes from (bare), between tiles of
    # their reference.
    bare = tl.full((), 1, tl.int32)
    prior = tl.zeros((R,), tl.float64)
    prior_e = prior
    if PHASE == "apply":
        carry = tl.load(carries + slot)
    begin_part = chunk.to(n.dtype) * steps
    count = tl.minimum(steps, tiles_along - begin_part)
    if FLIP:
        block = number
    else:
        block = M - 1 - number
    nearest = spread(tl.arange(0, M) == M - 1, not SIDE)
    if RECOMPUTED and PHASE == "whole":
        look_ahead(
            x, states, x_base, axis_x, block, row_mask, n, row_slot, states_total, count,
            KIND, ELEMENT, FLIP, SIDE, R, M, V, FULL,
        )  # fmt: skip
    # Rows that are only summed up: a tile is in registers before its turn.
    KEPT: tl.constexpr = AHEAD > 0 and not SIDE
    if KEPT:
        far = (begin_part if FLIP else begin_part + count - 1).to(n.dtype) * C + block * V
        to_come = raw_line_of(dy, dy_base, axis_dy, far, row_mask, n, SIDE, V, FULL, CACHE)
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
        after = start + V if UP else start - 1
        before = start - 1 if UP else start + V
        last = tl.minimum(begin + C, n) - 1
        if AHEAD > 0 and SIDE:
            # What a later tile reads is on its way from memory before its turn.
            to_come = begin + AHEAD * C if FLIP else begin - AHEAD * C
            left = row_dims[0] - first
            bring(
                dy, row_base(outer, first, row_dims, row_dy, SIDE), axis_dy, to_come, n, left, R, C
            )
            if X != "n":
                bring(
                    x, row_base(outer, first, row_dims, row_x, SIDE), axis_x, to_come, n, left, R, C
                )
            if Y != "n" and Y != "b":
                bring(
                    y, row_base(outer, first, row_dims, row_y, SIDE), axis_y, to_come, n, left, R, C
                )
        if KEPT:
            raw = to_come
            further = start + C if FLIP else start - C
            to_come = raw_line_of(
                dy, dy_base, axis_dy, further, row_mask & (step + 1 < count), n, SIDE, V, False,
                CACHE,
            )  # fmt: skip
            d = widened_line(raw, TYPE, SIDE, L, V)
        else:
            d = line_of(
                dy, dy_base, axis_dy, start, row_mask, n, TYPE, SIDE, L, V, FULL, CACHE
            )  # fmt: skip
        if KIND == "log_cumsum_exp":
            u = line_of(x, x_base, axis_x, start, row_mask, n, TYPE, SIDE, L, V, FULL, CACHE)
            near_end = begin if UP else last
            far_end = last if UP else begin
            past = last + 1 if UP else begin - 1
            if RECOMPUTED:
                x_first = edge_of(x, x_lane, axis_x, near_end + lane * 0, lane_mask, n, TYPE, SIDE)
                m0 = tl.full((R,), -_INFINITY, tl.float64)
                e0 = tl.zeros((R,), tl.float64)
                if PHASE != "resident":
                    here = row_slot + part.to(tl.int64) * R
                    m0 = tl.load(states + here, cache_modifier=".cg")
                    e0 = tl.load(states + states_total + here, cache_modifier=".cg")
                e, sums, usual, ref_row, e_row = log_sums(
                    u, start, n, m0, e0, x_first, lane_mask, ELEMENT, UP, SIDE, R, M, V, FULL
                )
                g = ()
                for j in tl.static_range(0, V):
                    g = g + (within_or(over(d[j], sums[j], ELEMENT), start, n, j, 0.0, FULL),)
                d = g
                onward = tl.zeros((R,), tl.float64)
                if PHASE != "resident":
                    beyond = here - R if FLIP else here + R
                    behind_it = lane_mask & (past >= 0) & (past < n)
                    if bare == 1:
                        x_past = edge_of(
                            x, x_lane, axis_x, past + lane * 0, lane_mask, n, TYPE, SIDE
                        )
                        if PHASE == "partial":  # what is infinite is not to meet a factor of 0
                            usual = usual & ~(x_past.to(tl.float64) - ref_row > _RANGE)
                        onward = sum_at(
                            states, beyond, behind_it, states_total, x_past, ref_row, ELEMENT
                        )
                        onward = tl.where(behind_it, reciprocal_f64(onward), 0.0)
                    else:
                        onward = exp_between(ref_row, e_row, prior, prior_e)
            else:
                v = line_of(y, y_base, axis_y, start, row_mask, n, TYPE, SIDE, L, V, FULL, CACHE)
                # y never falls, and a NaN stays: its ends tell all.
                low = edge_of(y, y_base, axis_y, near_end + block * 0, row_mask, n, TYPE, SIDE)
                high = edge_of(y, y_base, axis_y, far_end + block * 0, row_mask, n, TYPE, SIDE)
                ref, _ = even(tl.where(row_mask, (high + low) * 0.5, 0.0), tl.zeros_like(low))
                usual = near_enough(low, high, ref)
                g = ()
                for j in tl.static_range(0, V):
                    term = d[j] * exp_of_difference(ref, v[j], ELEMENT, POWER)
                    if not FULL:
                        term = tl.where(start + j < n, term, 0.0)
                    g = g + (term,)
                d = g
                # The same once a row, and what has arrived there in its terms.
                low = edge_of(y, y_lane, axis_y, near_end + lane * 0, lane_mask, n, TYPE, SIDE)
                high = edge_of(y, y_lane, axis_y, far_end + lane * 0, lane_mask, n, TYPE, SIDE)
                middle = tl.where(lane_mask, (high + low) * 0.5, 0.0)
                ref_row, e_row = even(middle, tl.zeros_like(low))
                ref_row, e_row = ref_row.to(tl.float64), e_row.to(tl.float64)
                y_past = tl.zeros((R,), tl.float64)
                onward = y_past
                if PHASE != "resident":
                    y_past = edge_of(y, y_lane, axis_y, past + lane * 0, lane_mask, n, TYPE, SIDE)
                    y_past = y_past.to(tl.float64)
                    if bare == 1:
                        onward = tl.exp(ref_row - y_past) * UPWARDS
                    else:
                        onward = exp_between(ref_row, e_row, prior, prior_e)
        # c of each place, in memory order: what S of the next place is multiplied by, or gated.
        c = d
        if MODE == "affine":
            u = line_of(x, x_base, axis_x, start, row_mask, n, TYPE, SIDE, L, V, FULL, CACHE)
            edge = edge_of(x, x_base, axis_x, after, row_mask, n, TYPE, SIDE)
            c = shifted(u, edge, UP, V)
            if PHASE != "partial" and RECOMPUTED:
                product = tl.full((R,), 1.0, tl.float64)
                if PHASE != "resident":
                    product = tl.load(
                        states + row_slot + part.to(tl.int64) * R, cache_modifier=".cg"
                    )
                w = products_before(u, start, n, product, UP, SIDE, R, M, V, FULL)
            elif PHASE != "partial":
                w = line_of(y, y_base, axis_y, start, row_mask, n, TYPE, SIDE, L, V, FULL, CACHE)
                edge = edge_of(y, y_base, axis_y, before, row_mask, n, TYPE, SIDE)
                w = shifted(w, edge, FLIP, V)
        elif Y == "b":
            word, beyond = words_of(y, outer, rows, row_dims, start, row_mask, n, UP, SIDE, V)
            wins = masks_of(word, V)
            c = shifted(wins, bit_of(beyond, 0 if UP else V - 1), UP, V)
        elif MODE == "gate":
            v = raw_line_of(y, y_base, axis_y, start, row_mask, n, SIDE, V, FULL, CACHE)
            y_after = edge_of(y, y_base, axis_y, after, row_mask, n, TYPE, SIDE)
            if TIES == "first":
                y_before = edge_of(y, y_base, axis_y, before, row_mask, n, TYPE, SIDE)
                v = widened_line(v, TYPE, SIDE, L, V)
                wins, wins_after = steps_up(KIND, TIES, v, y_before, y_after, UP, V)
            else:
                u = raw_line_of(x, x_base, axis_x, start, row_mask, n, SIDE, V, FULL, CACHE)
                wins = leads_of(u, v, ELEMENT, PAIRS, SIDE, L, V)
                x_after = edge_of(x, x_base, axis_x, after, row_mask, n, TYPE, SIDE)
                wins_after = mask((x_after == y_after) | (x_after != x_after))
            c = shifted(wins, wins_after, UP, V)
        # Through the line, from the far side: (a, s) for all behind the line.
        f = d
        if MODE != "sum":
            f = factors(c, start, n, MODE, UP, V, FULL)
            if not FULL:
                d = within(d, start, n, V)
        s, a = prefixes(d, f, MODE, UP, V)
        leaving = s[0] if UP else s[V - 1]
        gain = a[0] if UP else a[V - 1]
        # Across lines.
        leaving = tiled(leaving, SIDE, R, M)
        nothing = tl.zeros_like(leaving)
        if PHASE == "second":
            if step == 0:
                await_opening(counter)
                carry = tl.load(carries + slot, cache_modifier=".cg")
        # What arrives is added to a tile's own total in f64: roundings do not add up along a row.
        arriving = tl.where(carried, carry, 0.0)
        if KIND == "log_cumsum_exp" and PHASE != "resident":
            arriving = arriving * onward
        spread_out = spread(arriving.to(TYPE), SIDE)
        if MODE == "sum":
            if PHASE == "partial":
                total_s = tl.sum(leaving, AXIS).to(tl.float64)
                behind = nothing
            else:
                all_s, behind = tl.associative_scan((leaving, nothing), AXIS, behind_sum)
                total_s = picked(all_s, nearest, AXIS).to(tl.float64)
            if PHASE != "resident":
                behind = tl.where(carried, behind + spread_out, behind)
                total_s = tl.where(carried, total_s + arriving, total_s)
            total_a = tl.full((R,), 1.0, tl.float64)
        else:
            gain = tiled(gain, SIDE, R, M)
            b = tl.zeros_like(gain) + (1.0 if MODE == "affine" else -1)
            if PHASE == "partial":
                all_a, all_s = tl.associative_scan(
                    (gain, leaving), AXIS, affine if MODE == "affine" else last_gated
                )
                behind = nothing
            else:
                all_a, all_s, b, behind = tl.associative_scan(
                    (gain, leaving, b, nothing),
                    AXIS,
                    behind_affine if MODE == "affine" else behind_gated,
                )
            total_a, total_s = both_picked(all_a, all_s, nearest, AXIS)
            if MODE == "gate":
                total_a = tl.where(total_a != 0, 1.0, 0.0)
            total_a = total_a.to(tl.float64)
            total_s = total_s.to(tl.float64)
            if PHASE != "resident":
                behind = tl.where(carried, through(MODE, behind, b, spread_out), behind)
                if MODE == "affine":
                    total_s = tl.where(carried, total_s + total_a * arriving, total_s)
                else:
                    total_s = tl.where(carried & (total_a != 0.0), total_s + arriving, total_s)
        behind = tl.reshape(behind, (L,))
        if PHASE != "partial":
            results = ()
            largest = tl.zeros_like(behind)
            for j in tl.static_range(0, V):
                S = through(MODE, s[j], a[j], behind)
                if KIND == "cumprod":
                    weight = w[j]
                    if not RECOMPUTED and (not FULL or j == NEAR):
                        previous = start + j - 1 if UP else start + j + 1
                        weight = tl.where((previous >= 0) & (previous < n), weight, 1.0)
                    S = weight * S
                elif KIND == "log_cumsum_exp":
                    # An S that overflows on the way shows here; where u is −∞ the weight is 0.
                    largest = tl.maximum(largest, tl.abs(S))
                    if RECOMPUTED:
                        S = e[j] * S
                    else:
                        S = weight_below(u[j], ref, ELEMENT, -POWER) * S
                elif MODE == "gate":
                    if not FULL or j == NEAR:
                        begins = start + j == 0 if UP else start + j == n - 1
                        S = chosen(wins[j] | mask(begins), S)
                    else:
                        S = chosen(wins[j], S)
                results = results + (S,)
        if KIND == "log_cumsum_exp":
            # What overflows, or is not finite in dy, shows at the first place.
            finite = tl.abs(total_s.to(TYPE)) < _INFINITY
            if PHASE != "resident":  # nor may what arrives overflow
                finite = finite & (~carried | (tl.abs(arriving.to(TYPE)) < _INFINITY))
            good = 1
            if RECOMPUTED:
                finite = finite & (usual | ~lane_mask)
                if PHASE != "partial":
                    good = tl.min(tl.where(row_mask & (largest == _INFINITY), 0, 1), 0)
            else:
                if PHASE != "partial":
                    usual = usual & (largest < _INFINITY)
                good = tl.min(tl.where(row_mask & ~usual, 0, 1), 0)
            ok = good * tl.min(tl.where(finite, 1, 0), 0)
            if ok == 1:
                if PHASE != "partial":
                    store_lines(
                        out, out_base, axis_out, start, row_mask, n, results,
                        SIDE, L, V, FULL, SPENT,
                    )  # fmt: skip
                elif RECOMPUTED:  # a chunk is one tile
                    own = sum_at(states, here, lane_mask, states_total, x_first, ref_row, ELEMENT)
                    factor = own * onward
                    total_s = total_s * own
                else:
                    factor = factor * tl.exp(low.to(tl.float64) - y_past)
                carry = total_s
                bare = bare * 0
            else:
                span = begin + tl.arange(0, C)
                at = (outer, first + lane, span, lane_mask, span < n)
                s_in = tl.zeros((R,), tl.float64)
                if PHASE != "resident":
                    if bare == 0:
                        if RECOMPUTED:
                            x_past = edge_of(
                                x, x_lane, axis_x, past + lane * 0, lane_mask, n, TYPE, SIDE
                            )
                            carry = carry * sum_at(
                                states, beyond, behind_it, states_total, x_past, prior, ELEMENT
                            )
                        else:
                            carry = carry * tl.exp(y_past - prior) * DOWNWARDS
                    s_in = tl.where(carried, carry, 0.0)
                HOW: tl.constexpr = "c" if SIDE else "t"
                if RECOMPUTED:
                    new_a, carry = careful_log_sums(
                        (dy, x, y, out),
                        (row_dims, row_dy, axis_dims, axis_dy),
                        (row_dims, row_x, axis_dims, axis_x),
                        (row_dims, row_out, axis_dims, axis_out),
                        at, n, s_in, m0, e0, HOW, HOW, HOW, PHASE, FLIP, R, C,
                        256 if SIDE else 32 * W,
                    )  # fmt: skip
                else:
                    new_a, carry = careful_logs(
                        (dy, x, y, out),
                        (row_dims, row_dy, axis_dims, axis_dy),
                        (row_dims, row_x, axis_dims, axis_x),
                        (row_dims, row_y, axis_dims, axis_y),
                        (row_dims, row_out, axis_dims, axis_out),
                        at, n, s_in, HOW, HOW, HOW, HOW, PHASE, FLIP, R, C,
                    )  # fmt: skip
                factor = factor * new_a
                bare = bare * 0 + 1
            prior, prior_e = ref_row, e_row
        else:
            if PHASE != "partial":
                store_lines(
                    out, out_base, axis_out, start, row_mask, n, results, SIDE, L, V, FULL, SPENT
                )  # fmt: skip
            carry = total_s
            factor = factor * total_a
    if PHASE == "partial":
        if KIND == "log_cumsum_exp" and not RECOMPUTED:
            if bare == 0:
                first_place = begin_part * C if UP else tl.minimum((begin_part + count) * C, n) - 1
                low = edge_of(y, y_lane, axis_y, first_place + lane * 0, lane_mask, n, TYPE, SIDE)
                carry = carry * tl.exp(low.to(tl.float64) - prior) * DOWNWARDS
        tl.store(carries + slot, carry)
        tl.store(carries + total + slot, factor)
