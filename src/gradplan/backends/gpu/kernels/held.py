"""The engine *row state then map* for rows that no program holds alone: one read, on few programs
that stay.

Rows are cut into parts, as in `rows`. As many programs as the machine runs at a time take all parts
in turn. A part stays in shared memory from its read to its write, and three groups of a program's
warps work on different parts at the same time: one *takes* and tells the states of parts as they
arrive, one *joins* what all parts of a row have told, one *gives*: it maps parts whose rows are
known, and asks for the next ones. So memory never waits for the programs, nor they for each other,
but for a moment.

This is Gluon, Triton's lower level, where a program says itself what lies in shared memory and when
it is asked for. All programs must run at the same time: the launch is a cooperative one.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon, mbarrier
from ..launch import interpreted
from .arithmetic import multiply, plain_parts, power_of_two
from .formulas import (
    apply,
    counts,
    distance,
    hits_of_pairs,
    merge,
    numbers,
    operands_of,
    plus,
    product_of_others,
    product_quotients,
    product_state,
    row_scale,
    share_of_pairs,
    term,
    times_few_parts,
)
from .hearing import hear, overheard
from .tiles import by_row, fetch, fetch_raw, outer_offset, place, put, tile_row, widened

_INTERPRETED = tl.constexpr(interpreted())
_ODD = tl.constexpr(1 << 20)


@gluon.jit
def held_rows(
    dy,
    x,
    y,
    out,
    told,
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
    p,
    q,
    parts,
    units,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    NW: tl.constexpr,
    JOINERS: tl.constexpr,
    REGISTERS: tl.constexpr,
    PAIRS: tl.constexpr,
    NEAR: tl.constexpr,
    FULL: tl.constexpr,
):
    """`units` parts of R rows by C places; a program has room for STAGES of them, and asks for the
    states of up to K parts of a row.

    `told` are the states [unit, R]; all bits of one that is not told yet are 1. A state is its own
    flag: nobody waits for more than the very numbers that it needs. A product that is no plain
    number is told as NaN, and its parts stand behind all states.
    """
    TILE: tl.constexpr = tile_layout(OUT, ELEMENT, R, NW)
    ALONE: tl.constexpr = alone_layout(R, NW, NW)
    SHARED: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0] if OUT == "t" else [0, 1])
    LINE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # What elements meet: arrays, or one value a row.
    A: tl.constexpr = met(DY, KIND, "dy")
    B: tl.constexpr = met(X, KIND, "x")
    Z: tl.constexpr = met(Y, KIND, "y")
    dy_steps = (row_dims, row_dy, axis_dims, axis_dy)
    x_steps = (row_dims, row_x, axis_dims, axis_x)
    y_steps = (row_dims, row_y, axis_dims, axis_y)
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS)
    kept_dy = room(dy, A, R, C // S, STAGES * S, SHARED)
    kept_x = room(x, B, R, C // S, STAGES * S, SHARED)
    kept_y = room(y, Z, R, C // S, STAGES * S, SHARED)
    sums = gl.allocate_shared_memory(sum_type(KIND, ELEMENT), [R, NW], SHARED)
    powers = gl.allocate_shared_memory(gl.int32, [R, NW], SHARED)
    far = gl.allocate_shared_memory(gl.int32, [R, NW], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [6, R], LINE)  # twice three numbers
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    count = (units - first + programs - 1) // programs
    if _INTERPRETED:  # which knows no threads: all of a program's units, one step after the other
        for i in range(count):
            unit = first + i * programs
            ask_unit(
                dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, unit, units,
                parts, i, n, R, C, S, NEAR, FULL, TILE,
            )  # fmt: skip
            beside = beside_of(
                dy, y, unit, parts, dy_steps, y_steps, n, A, Z, R, C, NEAR, FULL, TILE
            )
            take_unit(
                x, told, kept_dy, kept_x, kept_y, sums, powers, far, x_steps, unit, units, parts, i,
                n, beside, KIND, ELEMENT, X, A, B, Z, R, C, NW, PAIRS, NEAR, FULL, TILE, ALONE,
            )  # fmt: skip
        for i in range(count):
            unit = first + i * programs
            join_unit(
                dy, y, told, lines, dy_steps, y_steps, unit, units, parts, 0, p, q, KIND, TIES,
                ELEMENT, DY, Y, R, K, MORE, JOINERS, FULL,
            )  # fmt: skip
            beside = beside_of(
                dy, y, unit, parts, dy_steps, y_steps, n, A, Z, R, C, NEAR, FULL, TILE
            )
            give_unit(
                dy, x, out, told, kept_dy, kept_x, kept_y, dy_steps, x_steps, out_steps, unit,
                units, parts, i, n, beside, known_rows(lines, 0, TILE), KIND, TIES, ELEMENT, DY, X,
                OUT, A, B, Z, R, C, NW, PAIRS, NEAR, FULL, TILE,
            )  # fmt: skip
    else:
        arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(arrived.index(stage), 32 * NW)
            mbarrier.init(taken.index(stage), 1)
        known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        used = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(known.index(half), 1)
            mbarrier.init(used.index(half), 1)
        gl.warp_specialize(
            [
                (
                    taking,
                    (
                        dy, x, y, told, kept_dy, kept_x, kept_y, sums, powers, far, arrived, taken,
                        dy_steps, x_steps, y_steps, first, programs, count, units, parts, n, KIND,
                        ELEMENT, X, A, B, Z, R, C, STAGES, NW, PAIRS, NEAR, FULL, TILE, ALONE,
                    ),
                ),
                (
                    giving,
                    (
                        dy, x, y, out, told, kept_dy, kept_x, kept_y, lines, arrived, taken, known,
                        used, dy_steps, x_steps, y_steps, out_steps, first, programs, count, units,
                        parts, n, KIND, TIES, ELEMENT, DY, X, OUT, A, B, Z, R, C, STAGES, NW,
                        PAIRS, NEAR, FULL, TILE,
                    ),
                ),
                (
                    joining,
                    (
                        dy, y, told, lines, known, used, dy_steps, y_steps, first, programs, count,
                        units, parts, p, q, KIND, TIES, ELEMENT, DY, Y, R, K, MORE, JOINERS, FULL,
                    ),
                ),
            ],
            [NW, JOINERS],
            [REGISTERS[0], REGISTERS[1]],
        )  # fmt: skip


@gluon.jit
def taking(
    dy, x, y, told, kept_dy, kept_x, kept_y, sums, powers, far, arrived, taken, dy_steps, x_steps,
    y_steps, first, programs, count, units, parts, n, KIND: tl.constexpr, ELEMENT: tl.constexpr,
    X: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr, NW: tl.constexpr, PAIRS: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Take and tell the states of all units of a program."""
    beside = beside_of(dy, y, first, parts, dy_steps, y_steps, n, A, Z, R, C, NEAR, FULL, TILE)
    stage = 0
    phase = 0
    for i in range(count):
        unit = first + i * programs
        later = gl.minimum(unit + programs, units - 1)
        after = beside_of(dy, y, later, parts, dy_steps, y_steps, n, A, Z, R, C, NEAR, FULL, TILE)
        mbarrier.wait(arrived.index(stage), phase)
        take_unit(
            x, told, kept_dy, kept_x, kept_y, sums, powers, far, x_steps, unit, units, parts, stage,
            n, beside, KIND, ELEMENT, X, A, B, Z, R, C, NW, PAIRS, NEAR, FULL, TILE, ALONE,
        )  # fmt: skip
        mbarrier.arrive(taken.index(stage))  # all have loaded: their sums met at a barrier
        beside = after
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def giving(
    dy, x, y, out, told, kept_dy, kept_x, kept_y, lines, arrived, taken, known, used, dy_steps,
    x_steps, y_steps, out_steps, first, programs, count, units, parts, n, KIND: tl.constexpr,
    TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr, X: tl.constexpr,
    OUT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr, NW: tl.constexpr, PAIRS: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask for all units of a program, and write their gradients when their rows are known."""
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS)
    for ahead in gl.static_range(STAGES):
        ask_unit(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps,
            first + ahead * programs, units, parts, ahead, n, R, C, S, NEAR, FULL, TILE,
        )  # fmt: skip
        async_copy.mbarrier_arrive(arrived.index(ahead), increment_count=False)
    beside = beside_of(dy, y, first, parts, dy_steps, y_steps, n, A, Z, R, C, NEAR, FULL, TILE)
    stage = 0
    phase = 0
    for i in range(count):
        unit = first + i * programs
        later = gl.minimum(unit + programs, units - 1)
        after = beside_of(dy, y, later, parts, dy_steps, y_steps, n, A, Z, R, C, NEAR, FULL, TILE)
        mbarrier.wait(arrived.index(stage), phase)
        mbarrier.wait(known.index(i & 1), (i >> 1) & 1)
        give_unit(
            dy, x, out, told, kept_dy, kept_x, kept_y, dy_steps, x_steps, out_steps, unit, units,
            parts, stage, n, beside, known_rows(lines, i & 1, TILE), KIND, TIES, ELEMENT, DY, X,
            OUT, A, B, Z, R, C, NW, PAIRS, NEAR, FULL, TILE,
        )  # fmt: skip
        mbarrier.wait(taken.index(stage), phase)
        gl.thread_barrier()  # all have loaded
        mbarrier.arrive(used.index(i & 1))
        ask_unit(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps,
            unit + STAGES * programs, units, parts, stage, n, R, C, S, NEAR, FULL, TILE,
        )  # fmt: skip
        async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)
        beside = after
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def joining(
    dy, y, told, lines, known, used, dy_steps, y_steps, first, programs, count, units, parts, p, q,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    Y: tl.constexpr, R: tl.constexpr, K: tl.constexpr, MORE: tl.constexpr, JOINERS: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Join what the parts of rows have told, for all units of a program."""
    for i in range(count):
        if i > 1:
            mbarrier.wait(used.index(i & 1), ((i >> 1) & 1) ^ 1)
        join_unit(
            dy, y, told, lines, dy_steps, y_steps, first + i * programs, units, parts, i & 1, p, q,
            KIND, TIES, ELEMENT, DY, Y, R, K, MORE, JOINERS, FULL,
        )  # fmt: skip
        gl.thread_barrier()  # all have stored
        mbarrier.arrive(known.index(i & 1))


@gluon.jit
def join_unit(
    dy, y, told, lines, dy_steps, y_steps, unit, units, parts, half, p, q, KIND: tl.constexpr,
    TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr, Y: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, MORE: tl.constexpr, JOINERS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The numbers of a unit's rows, from the states of their parts, in an order that depends on
    their number alone."""
    HEARD: tl.constexpr = heard_layout(R, K, JOINERS)
    ROW: tl.constexpr = gl.SliceLayout(1, HEARD)
    TYPE: tl.constexpr = gl.float64 if KIND == "prod" else gl.float32
    tile = unit // parts
    dy_row = of_rows(dy, DY, tile, dy_steps, R, FULL, ROW, TYPE)
    y_row = of_rows(y, Y, tile, y_steps, R, FULL, ROW, TYPE)
    s0, s1, s2 = joined(told, tile, 0, parts, KIND, ELEMENT, R, K, JOINERS, HEARD)
    if MORE:
        for part in range(K, parts, K):
            t0, t1, t2 = joined(told, tile, part, parts, KIND, ELEMENT, R, K, JOINERS, HEARD)
            if KIND == "prod":
                s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
            else:
                s0 += t0
    k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, dy_row, y_row, p, q, s2 == s2)
    if KIND == "prod":
        if gl.min(k2, 0) == 0.0:
            s0, s1, s2 = heard_parts(told, unit, parts, units, ELEMENT, R, JOINERS)
            s0, s1 = gl.convert_layout(s0, ROW), gl.convert_layout(s1, ROW)
            s2 = gl.convert_layout(s2, ROW)
            k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, dy_row, y_row, p, q, s2 == s2)
    lines.index(3 * half).store(k0)
    lines.index(3 * half + 1).store(k1)
    lines.index(3 * half + 2).store(k2)


@gluon.jit
def known_rows(lines, half, TILE: tl.constexpr):
    """The numbers of rows, for whoever has elements of them."""
    ROWS: tl.constexpr = gl.SliceLayout(1, TILE)
    k0, k1 = lines.index(3 * half).load(ROWS), lines.index(3 * half + 1).load(ROWS)
    return k0, k1, lines.index(3 * half + 2).load(ROWS)


@gluon.jit
def beside_of(
    dy, y, unit, parts, dy_steps, y_steps, n, A: tl.constexpr, Z: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What elements of a unit meet of one value a row."""
    at = unit_place(unit, parts, dy_steps[0], n, R, C, NEAR, TILE)
    return aside(dy, y, A, Z, at, dy_steps, y_steps, FULL)


@gluon.jit
def take_unit(
    x, told, kept_dy, kept_x, kept_y, sums, powers, far, x_steps, unit, units, parts, stage, n,
    beside, KIND: tl.constexpr, ELEMENT: tl.constexpr, X: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    NW: tl.constexpr, PAIRS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Take and tell the state of a unit."""
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS)
    Q: tl.constexpr = run_of(ELEMENT, R)
    row_dims = x_steps[0]
    lane = gl.arange(0, R, gl.SliceLayout(1, ALONE))
    target = told + unit.to(gl.int64) * R + lane
    if KIND == "prod":
        m, e, distant = unit_products(
            kept_x, X, stage, unit, parts, row_dims, n, ELEMENT, R, C, NW, NEAR, FULL, TILE, S
        )
        sums.store(m)
        powers.store(e)
        far.store(distant)
        m, e = plain_parts(gl.reduce(sums.load(ALONE), 1, multiply))
        e += gl.sum(powers.load(ALONE), 1)
        # 2 where some factor is far from 1, 1 where only their product is.
        odd = 2 * gl.max(far.load(ALONE), 1) | (gl.abs(e) > 900).to(gl.int32)
        odd = gl.max(odd, 0)
        if odd == 0:
            tell(target, m * power_of_two(e), R, KIND, ELEMENT)
        else:
            t0, t1, t2 = m, e.to(gl.float64), m * 0.0
            if odd > 1:
                t0, t1, t2 = careful_product(
                    x, X, x_steps, unit, parts, n, ELEMENT, R, C, NW, NEAR, ALONE
                )
            tell_parts(target, units, t0, t1, t2, R, KIND, ELEMENT)
    else:
        for k in gl.static_range(S):
            a = loaded(kept_dy, A, stage, beside, k, S, TILE)
            b = loaded(kept_x, B, stage, beside, k, S, TILE)
            c = loaded(kept_y, Z, stage, beside, k, S, TILE)
            if PAIRS:
                values = hits_of_pairs(b, c, ELEMENT, R, C // S)
            else:
                a, b, c = widened(a, A, False), widened(b, B, False), widened(c, Z, False)
                values = tl.broadcast_to(term(KIND, ELEMENT, a, b, c), (R, C // S))
                if not FULL:
                    now = slice_place(unit, parts, row_dims, n, R, C, NEAR, TILE, k, S)
                    values = gl.where(now[3][:, None] & now[4][None, :], values, 0)
            added = gl.reduce(gl.reshape(values, (R, C // (S * NW * Q), NW, Q)), 1, plus)
            if k == 0:
                total = added
            else:
                total += added
        sums.store(gl.sum(total.to(gl.int32) if PAIRS else total, 2))
        state = gl.sum(sums.load(ALONE).to(gl.float64), 1)
        tell(target, -state if PAIRS else state, R, KIND, ELEMENT)


@gluon.jit
def give_unit(
    dy, x, out, told, kept_dy, kept_x, kept_y, dy_steps, x_steps, out_steps, unit, units, parts,
    stage, n, beside, rows, KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr,
    DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NW: tl.constexpr, PAIRS: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a unit, from the numbers of its rows."""
    if KIND == "prod":
        usual = gl.min(rows[2], 0) != 0.0
        if usual:
            map_unit(
                out, kept_dy, kept_x, kept_y, out_steps, unit, parts, stage, n, beside, rows, KIND,
                TIES, ELEMENT, OUT, A, B, Z, R, C, NW, PAIRS, NEAR, FULL, TILE,
            )  # fmt: skip
        else:
            careful_shares(
                dy, x, out, told, DY, X, OUT, dy_steps, x_steps, out_steps, unit, units, parts, n,
                ELEMENT, R, C, NW, NEAR,
            )  # fmt: skip
    else:
        map_unit(
            out, kept_dy, kept_x, kept_y, out_steps, unit, parts, stage, n, beside, rows, KIND,
            TIES, ELEMENT, OUT, A, B, Z, R, C, NW, PAIRS, NEAR, FULL, TILE,
        )  # fmt: skip


@gluon.jit
def map_unit(
    out, kept_dy, kept_x, kept_y, out_steps, unit, parts, stage, n, beside, rows,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, OUT: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    NW: tl.constexpr, PAIRS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The same where these numbers are enough."""
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS)
    k0, k1, k2 = rows
    row_dims = out_steps[0]
    if KIND == "prod":
        for k in range(S // 2):
            a = factors(kept_x, B, stage, unit, parts, row_dims, n, R, C, NEAR, FULL, TILE, k, S)
            b = factors(
                kept_x, B, stage, unit, parts, row_dims, n, R, C, NEAR, FULL, TILE, k + S // 2, S
            )
            da, db = product_quotients(ELEMENT, k0, k1, a, b)
            at = slice_place(unit, parts, row_dims, n, R, C, NEAR, TILE, k, S)
            put(out, OUT, da, at, out_steps, R, C // S, FULL)
            at = slice_place(unit, parts, row_dims, n, R, C, NEAR, TILE, k + S // 2, S)
            put(out, OUT, db, at, out_steps, R, C // S, FULL)
    else:
        for k in range(S):
            at = slice_place(unit, parts, row_dims, n, R, C, NEAR, TILE, k, S)
            a = loaded(kept_dy, A, stage, beside, k, S, TILE)
            b = loaded(kept_x, B, stage, beside, k, S, TILE)
            c = loaded(kept_y, Z, stage, beside, k, S, TILE)
            if PAIRS:
                hits = hits_of_pairs(b, c, ELEMENT, R, C // S)
                value = share_of_pairs(hits, k0, ELEMENT, R, C // S)
                gl.store(place(out, OUT, at, out_steps), value)
            else:
                a, b, c = widened(a, A, False), widened(b, B, False), widened(c, Z, False)
                value = apply(KIND, TIES, ELEMENT, k0, k1, k2, a, b, c, 0)
                put(out, OUT, value, at, out_steps, R, C // S, FULL)


@triton.constexpr_function
def slices(kind, element, r, c, warps, pairs):
    """In how many slices a part is worked on: so many elements a thread at a time."""
    most = 64 if pairs else 16 if kind == "prod" else 32
    found = max(1, min(c // (warps * run_of(element, r)), r * c // (32 * warps * most)))
    return max(2, found) if kind == "prod" else found


@triton.constexpr_function
def tile_layout(out, element, r, warps):
    """A part [R, C]: 16 bytes a thread, neighbouring threads along what lies in memory together."""
    v = 4 if element == "f32" else 8
    if out == "t":
        return gl.BlockedLayout([1, v], [1, 32], [1, warps], [1, 0])
    return gl.BlockedLayout([v, 1], [r // v, 32 * v // r], [1, warps], [0, 1])


@triton.constexpr_function
def alone_layout(r, count, warps):
    """[R, count]: a thread has all of a row; the first R threads have one each."""
    across, over = min(r, 32), max(1, r // 32)
    return gl.BlockedLayout([1, count], [across, 32 // across], [over, warps // over], [0, 1])


@triton.constexpr_function
def heard_layout(r, k, warps):
    """States of the parts of rows [R, K], each told to one thread; neighbouring threads have
    neighbouring rows, a thread some parts one after the other."""
    across, over = min(r, 32), max(1, min(r // 32, warps))
    some = max(1, k // (32 * warps // (across * over)))
    return gl.BlockedLayout([1, some], [across, 32 // across], [over, warps // over], [0, 1])


@triton.constexpr_function
def met(mode, kind, operand):
    """How elements meet an operand: "n" where only the numbers of a row know it."""
    return mode if operand in operands_of(kind) else "n"


@triton.constexpr_function
def sum_type(kind, element):
    """What the sums of a warp are; of halves f32, in groups that are small beside their bits."""
    return gl.int32 if counts(kind) else word_type(kind, element)


@triton.constexpr_function
def word_type(kind, element):
    """What a state is told in."""
    wide = kind == "prod" or (element == "f32" and not counts(kind))
    return gl.float64 if wide else gl.float32


@triton.constexpr_function
def word_bits(kind, element):
    return word_type(kind, element).primitive_bitwidth


@triton.constexpr_function
def word_scale(kind, element):
    """What a state is divided by when it is told: a part of bfloat16 may sum to more than f32
    holds, even of `term`s."""
    return 16.0 if element == "bf16" and not counts(kind) and kind != "prod" else 1.0


@gluon.jit
def room(pointer, MODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
         SHARED: tl.constexpr):  # fmt: skip
    """Shared memory for the parts of an array."""
    if MODE == "t" or MODE == "c":
        return gl.allocate_shared_memory(pointer.dtype.element_ty, [STAGES, R, C], SHARED)
    else:
        return 0


@gluon.jit
def unit_place(unit, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """The place of a unit, as in `tiles`."""
    return part_place(unit // parts, (unit % parts).to(n.dtype) * C, row_dims, n, R, C, NEAR, TILE)


@gluon.jit
def slice_place(unit, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
                TILE: tl.constexpr, k, S: tl.constexpr):  # fmt: skip
    """The same of the k-th of S slices of it."""
    begin = (unit % parts).to(n.dtype) * C + k * (C // S)
    return part_place(unit // parts, begin, row_dims, n, R, C // S, NEAR, TILE)


@gluon.jit
def part_place(tile, begin, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """The same of C places from `begin` on."""
    outer, row = tile_row(tile, row_dims, R)
    lane = gl.arange(0, R, gl.SliceLayout(1, TILE))
    step = gl.arange(0, C, gl.SliceLayout(0, TILE))
    index = begin + step
    if NEAR:
        near = (row, lane, begin, step)
    else:
        near = (row, lane.to(gl.int64), begin, step.to(gl.int64))
    return outer, lane, index, row + lane < row_dims[0], index < n, near


@gluon.jit
def ask_unit(
    dy, x, y, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, kept_dy, kept_x, kept_y, dy_steps,
    x_steps, y_steps, unit, units, parts, stage, n, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask for a unit's part of all arrays, slice by slice, if there is that unit."""
    if unit < units:
        for k in range(S):
            at = slice_place(unit, parts, dy_steps[0], n, R, C, NEAR, TILE, k, S)
            ask(dy, A, kept_dy, stage * S + k, at, dy_steps, FULL)
            ask(x, B, kept_x, stage * S + k, at, x_steps, FULL)
            ask(y, Z, kept_y, stage * S + k, at, y_steps, FULL)


@gluon.jit
def ask(pointer, MODE: tl.constexpr, kept, stage, at, steps, FULL: tl.constexpr):
    """Ask for an array's part, into a place of its room."""
    if MODE == "t" or MODE == "c":
        source = place(pointer, MODE, at, steps)
        if FULL:
            async_copy.async_copy_global_to_shared(kept.index(stage), source)
        else:
            mask = at[3][:, None] & at[4][None, :]
            async_copy.async_copy_global_to_shared(kept.index(stage), source, mask=mask)


@gluon.jit
def aside(dy, y, A: tl.constexpr, Z: tl.constexpr, at, dy_steps, y_steps, FULL: tl.constexpr):
    """The one value a row that elements meet, [R, 1], if there is one: of dy or of y."""
    if by_row(A):
        return fetch_raw(dy, A, at, dy_steps, 0.0, FULL)
    elif by_row(Z):
        return fetch_raw(y, Z, at, y_steps, 0.0, FULL)
    else:
        return 0


@gluon.jit
def loaded(
    kept, MODE: tl.constexpr, stage, beside, k, S: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The k-th of S slices of an operand's part as it is stored, or [R, 1]."""
    if MODE == "t" or MODE == "c":
        return kept.index(stage * S + k).load(TILE)
    elif by_row(MODE):
        return beside
    else:
        return 0.0


@gluon.jit
def of_rows(
    pointer, MODE: tl.constexpr, tile, steps, R: tl.constexpr, FULL: tl.constexpr,
    ROW: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One value a row, [R], for `numbers`."""
    if by_row(MODE):
        outer, row = tile_row(tile, steps[0], R)
        base = pointer + outer_offset(outer, steps[0], steps[1])
        lane = row + gl.arange(0, R, ROW)
        source = base + (lane if MODE == "u" else lane * steps[1][0])
        if FULL:
            return gl.load(source).to(TYPE)
        else:
            return gl.load(source, mask=lane < steps[0][0], other=0.0).to(TYPE)
    else:
        return 0.0


@triton.constexpr_function
def run_of(element, r):
    """Places of a warp that lie together."""
    return 32 * (4 if element == "f32" else 8) // r


@gluon.jit
def unit_products(
    kept, X: tl.constexpr, stage, unit, parts, row_dims, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NW: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Products [R, NW] of what each warp has of each row of a part, as significands and exponents,
    and whether some factor is so far from 1 that they or its reciprocal need not be right.

    Two slices are multiplied element by element, which is exact: of halves in f32, of f32 in f64.
    """
    LOW: tl.constexpr = 100 if ELEMENT == "f32" else 120
    Q: tl.constexpr = run_of(ELEMENT, R)
    P: tl.constexpr = C // (S * NW * Q)
    # So many products of two stay within f64 whatever they are.
    MANY: tl.constexpr = max(1, (4 if ELEMENT == "f32" else 8) // P)
    for k in gl.static_range(S // 2):
        a = factors(kept, X, stage, unit, parts, row_dims, n, R, C, NEAR, FULL, TILE, k, S)
        b = factors(kept, X, stage, unit, parts, row_dims, n, R, C, NEAR, FULL, TILE, k + S // 2, S)
        if ELEMENT == "f32":
            pairs = a.to(gl.float64) * b.to(gl.float64)
            beyond = gl.maximum(distance(a, LOW), distance(b, LOW))
        else:
            pairs = a * b
            beyond = distance(pairs, LOW)
            pairs = pairs.to(gl.float64)
        now = gl.reduce(gl.reshape(pairs, (R, P, NW, Q)), 1, multiply)
        beyond = gl.max(gl.reshape(beyond, (R, P, NW, Q)), 1)
        if k == 0:
            distant = beyond
        else:
            distant = gl.maximum(distant, beyond)
        if k % MANY == 0:
            some = now
        else:
            some *= now
        if k % MANY == MANY - 1 or k == S // 2 - 1:
            m2, e2 = plain_parts(some)
            if k < MANY:
                m, e = m2, e2
            else:
                m, e = m * m2, e + e2
    m, e = gl.reduce((m, e), 2, times_few_parts)
    m, more = plain_parts(m)
    return m, e + more, (gl.max(distant, 2) >= (2 * LOW << 24)).to(gl.int32)


@gluon.jit
def factors(
    kept, X: tl.constexpr, stage, unit, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, k, S: tl.constexpr,
):  # fmt: skip
    """A slice of a part, 1 where there is no element."""
    x = widened(kept.index(stage * S + k).load(TILE), X, False)
    if not FULL:
        at = slice_place(unit, parts, row_dims, n, R, C, NEAR, TILE, k, S)
        x = gl.where(at[3][:, None] & at[4][None, :], x, 1.0)
    return x


@triton.constexpr_function
def careful_layout(r, warps):
    """One element a thread, [R, 32 · warps / R]: what is careful takes many registers."""
    across, over = min(r, 32), max(1, r // 32)
    return gl.BlockedLayout([1, 1], [across, 32 // across], [over, warps // over], [0, 1])


@gluon.jit
def careful_product(
    x, X: tl.constexpr, steps, unit, parts, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NW: tl.constexpr, NEAR: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The state of a unit with zeros, infinities, NaNs or extreme exponents, in small steps: x is
    read again, so that the usual way keeps its registers."""
    LAYOUT: tl.constexpr = careful_layout(R, NW)
    H: tl.constexpr = 32 * NW // R
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, LAYOUT))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    for step in range(0, C // H):
        begin = (unit % parts).to(n.dtype) * C + step * H
        at = part_place(unit // parts, begin, steps[0], n, R, H, NEAR, LAYOUT)
        b = fetch(x, X, at, steps, 1.0, False, False)
        t0, t1, t2 = product_state(ELEMENT, b, at[4][None, :], R, H)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    ROWS: tl.constexpr = gl.SliceLayout(1, ALONE)
    s0, s1 = gl.convert_layout(s0, ROWS), gl.convert_layout(s1, ROWS)
    return s0, s1, gl.convert_layout(s2, ROWS)


@gluon.jit
def careful_shares(
    dy, x, out, told, DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, dy_steps, x_steps,
    out_steps, unit, units, parts, n, ELEMENT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    NW: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The gradient of a unit whose rows have such factors."""
    LAYOUT: tl.constexpr = careful_layout(R, NW)
    H: tl.constexpr = 32 * NW // R
    s0, s1, s2 = heard_parts(told, unit, parts, units, ELEMENT, R, NW)
    for step in range(0, C // H):
        begin = (unit % parts).to(n.dtype) * C + step * H
        at = part_place(unit // parts, begin, x_steps[0], n, R, H, NEAR, LAYOUT)
        b = fetch(x, X, at, x_steps, 1.0, False, False)
        given = fetch(dy, DY, at, dy_steps, 0.0, True, False)
        value = product_of_others(ELEMENT, s0, s1, s2, given, b)
        put(out, OUT, value, at, out_steps, R, H, False)


@gluon.jit
def words_of(told, tile, part, parts, R: tl.constexpr, K: tl.constexpr, HEARD: tl.constexpr):
    """Where the states of a tile's rows are told, [R, K], from a part on, and which are."""
    lane = gl.arange(0, R, gl.SliceLayout(1, HEARD))[:, None]
    one = part + gl.arange(0, K, gl.SliceLayout(0, HEARD))[None, :]
    words = told + tile.to(gl.int64) * parts * R + (lane + one * R)
    return words, (one < parts).to(gl.int32) + lane * 0


@gluon.jit
def tell(target, state, R: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr):
    """Store the states [R], which no reader takes for what is not told yet: a NaN of ours has
    other bits."""
    TYPE: tl.constexpr = word_type(KIND, ELEMENT)
    state = (state * (1.0 / word_scale(KIND, ELEMENT))).to(TYPE)
    state = gl.where(state != state, float("nan"), state)
    if _INTERPRETED:
        gl.store(target, state)
    else:
        gl.inline_asm_elementwise(
            telling(R, TYPE.primitive_bitwidth),
            "=r,l,d" if TYPE == gl.float64 else "=r,l,f",
            [target.to(gl.int64), state],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def tell_parts(
    target, units, s0, s1, s2, R: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr
):
    """Tell products part by part where they are no plain numbers."""
    odd = (s2 != 0.0) | (gl.abs(s1) > 900.0)
    total = units.to(gl.int64) * R
    gl.store(target + total, s0)
    gl.store(target + 2 * total, s1)
    gl.store(target + 3 * total, s2)
    fence(s0)
    plain = s0 * power_of_two(gl.where(odd, 0.0, s1).to(gl.int32))
    tell(target, gl.where(odd, float("nan"), plain), R, KIND, ELEMENT)


@gluon.jit
def heard_parts(told, unit, parts, units, ELEMENT: tl.constexpr, R: tl.constexpr, NW: tl.constexpr):
    """Products of rows some of whose parts were told so, [R]: significand, exponent, and what is
    odd about them. All have been heard before."""
    HEARD: tl.constexpr = careful_layout(R, NW)
    K: tl.constexpr = 32 * NW // R
    total = units.to(gl.int64) * R
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, HEARD))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    for first in range(0, parts, K):
        words, needed = words_of(told, unit // parts, first, parts, R, K, HEARD)
        t0 = overheard(words, needed, 64).to(gl.float64, bitcast=True)
        fence(t0)
        odd = (t0 != t0) & (needed != 0)
        m, e = plain_parts(gl.where(needed != 0, t0, 1.0))
        t0 = gl.where(odd, gl.load(words + total, mask=odd, other=1.0, cache_modifier=".cg"), m)
        t1 = gl.load(words + 2 * total, mask=odd, other=0.0, cache_modifier=".cg")
        t1 = gl.where(odd, t1, e.to(gl.float64))
        t2 = gl.load(words + 3 * total, mask=odd, other=0.0, cache_modifier=".cg")
        t0, t1, t2 = gl.reduce((t0, t1, t2), 1, merge)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    return s0, s1, s2


@gluon.jit
def fence(value):
    """What was stored before is seen by whoever hears what is told after."""
    if not _INTERPRETED:
        gl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,l", [value.to(gl.int64, bitcast=True)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def telling(r, bits):
    """By the first R threads: the others have the same."""
    return (
        "{ .reg .pred mine; .reg .u32 thread; mov.u32 thread, %tid.x; "
        f"setp.lt.u32 mine, thread, {r}; @mine st.relaxed.gpu.global.f{bits} [$1], $2; "
        "mov.u32 $0, 0; }"
    )


@gluon.jit
def numbers_of(heard):
    """What was told, as f64."""
    if heard.dtype == gl.int64:
        return heard.to(gl.float64, bitcast=True)
    else:
        return heard.to(gl.float32, bitcast=True).to(gl.float64)


@gluon.jit
def joined(
    told, tile, part, parts, KIND: tl.constexpr, ELEMENT: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, JOINERS: tl.constexpr, HEARD: tl.constexpr,
):  # fmt: skip
    """The states of K parts of rows from one on, joined, when all of them have been told; of
    products significand, exponent, and whether some part was told otherwise."""
    BITS: tl.constexpr = word_bits(KIND, ELEMENT)
    EACH: tl.constexpr = (R * K + 32 * JOINERS - 1) // (32 * JOINERS)
    words, needed = words_of(told, tile, part, parts, R, K, HEARD)
    heard = hear(words, (0 - needed).to(gl.int64 if BITS == 64 else gl.int32), EACH, R * BITS // 8)
    if KIND == "prod":
        states = gl.where(needed != 0, heard.to(gl.float64, bitcast=True), 1.0)
        m, e = plain_parts(states)
        e = gl.where(states != states, _ODD, e)
        m, e = gl.reduce((m, e), 1, times_few_parts)
        odd = e > _ODD // 2
        m, above = plain_parts(m)
        return m, gl.where(odd, 0, e + above).to(gl.float64), odd.to(gl.float64)
    else:
        state = gl.sum(numbers_of(heard), 1)
        if not counts(KIND) and ELEMENT != "f32":
            state = state * (row_scale(ELEMENT) * word_scale(KIND, ELEMENT))
        return state, state, state
