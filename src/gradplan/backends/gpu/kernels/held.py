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

import triton.language as tl

from ..gluon import async_copy, gl, gluon, mbarrier
from ..launch import interpreted
from .arithmetic import multiply, plain_parts, power_of_two
from .formulas import (
    apply,
    hits_of_pairs,
    merge,
    met,
    numbers,
    plus,
    product_quotients,
    share_of_pairs,
    term,
)
from .held_memory import (
    aside,
    ask_slice,
    ask_unit,
    at_spot,
    classed,
    finer,
    is_whole,
    loaded,
    of_rows,
    pieces,
    room,
    run_of,
    slice_place,
    slices,
    spot_of,
    tile_layout,
    unit_place,
    within,
)
from .held_products import careful_product, careful_shares, factors, unit_products
from .held_states import (
    alone_layout,
    heard_layout,
    heard_parts,
    joined,
    sum_type,
    target_of,
    tell,
    tell_parts,
)
from .ragged import run_length
from .tiles import put, widened

_INTERPRETED = tl.constexpr(interpreted())


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
    CLASSES: tl.constexpr,
):
    """`units` parts of R rows by C places; a program has room for STAGES of them, and asks for the
    states of up to K parts of a row. For CLASSES, if there are any, see `held_memory`.

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
    V: tl.constexpr = run_length(out.dtype)
    dy_steps = classed((row_dims, row_dy, axis_dims, axis_dy), CLASSES, V)
    x_steps = classed((row_dims, row_x, axis_dims, axis_x), CLASSES, V)
    y_steps = classed((row_dims, row_y, axis_dims, axis_y), CLASSES, V)
    out_steps = classed((row_dims, row_out, axis_dims, axis_out), CLASSES, V)
    origin = (out, row_out, axis_out[0])
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    kept_dy = room(dy, A, R, C // S, STAGES * S, SHARED)
    kept_x = room(x, B, R, C // S, STAGES * S, SHARED)
    kept_y = room(y, Z, R, C // S, STAGES * S, SHARED)
    P: tl.constexpr = pieces(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    finer_dy = finer(kept_dy, A, R, C // S, STAGES * S, P, SHARED)
    finer_x = finer(kept_x, B, R, C // S, STAGES * S, P, SHARED)
    finer_kept = (finer_dy, finer_x, finer(kept_y, Z, R, C // S, STAGES * S, P, SHARED))
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
                parts, i, n, origin, finer_kept, R, C, S, P, NEAR, FULL, TILE, CLASSES,
            )  # fmt: skip
            beside = beside_of(
                dy, y, unit, parts, dy_steps, y_steps, n, origin, A, Z, R, C, NEAR, FULL, TILE,
                CLASSES,
            )  # fmt: skip
            take_unit(
                x, told, kept_dy, kept_x, kept_y, sums, powers, far, x_steps, unit, units, parts, i,
                n, origin, finer_kept, beside, KIND, ELEMENT, X, A, B, Z, R, C, NW, PAIRS, NEAR,
                FULL, TILE, ALONE, CLASSES,
            )  # fmt: skip
        for i in range(count):
            unit = first + i * programs
            join_unit(
                dy, y, told, lines, dy_steps, y_steps, unit, units, parts, n, origin, 0, p, q, KIND,
                TIES, ELEMENT, DY, Y, R, C, K, MORE, JOINERS, FULL, CLASSES,
            )  # fmt: skip
            beside = beside_of(
                dy, y, unit, parts, dy_steps, y_steps, n, origin, A, Z, R, C, NEAR, FULL, TILE,
                CLASSES,
            )  # fmt: skip
            give_unit(
                dy, x, y, out, told, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps,
                unit, units, units, parts, i, n, origin, finer_kept, beside,
                known_rows(lines, 0, TILE), KIND, TIES, ELEMENT, DY, X, OUT, A, B, Z, R, C, NW,
                PAIRS, NEAR, FULL, TILE, CLASSES,
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
                        dy_steps, x_steps, y_steps, first, programs, count, units, parts, n, origin,
                        finer_kept, KIND, ELEMENT, X, A, B, Z, R, C, STAGES, NW, PAIRS, NEAR, FULL,
                        TILE, ALONE, CLASSES,
                    ),
                ),
                (
                    giving,
                    (
                        dy, x, y, out, told, kept_dy, kept_x, kept_y, lines, arrived, taken, known,
                        used, dy_steps, x_steps, y_steps, out_steps, first, programs, count, units,
                        parts, n, origin, finer_kept, KIND, TIES, ELEMENT, DY, X, OUT, A, B, Z, R,
                        C, STAGES, NW, PAIRS, NEAR, FULL, TILE, CLASSES,
                    ),
                ),
                (
                    joining,
                    (
                        dy, y, told, lines, known, used, dy_steps, y_steps, first, programs, count,
                        units, parts, n, origin, p, q, KIND, TIES, ELEMENT, DY, Y, R, C, K, MORE,
                        JOINERS, FULL, CLASSES,
                    ),
                ),
            ],
            [NW, JOINERS],
            [REGISTERS[0], REGISTERS[1]],
        )  # fmt: skip


@gluon.jit
def taking(
    dy, x, y, told, kept_dy, kept_x, kept_y, sums, powers, far, arrived, taken, dy_steps, x_steps,
    y_steps, first, programs, count, units, parts, n, origin, finer_kept, KIND: tl.constexpr,
    ELEMENT: tl.constexpr, X: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, NW: tl.constexpr, PAIRS: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Take and tell the states of all units of a program."""
    beside = beside_of(
        dy, y, first, parts, dy_steps, y_steps, n, origin, A, Z, R, C, NEAR, FULL, TILE, CLASSES
    )
    stage = 0
    phase = 0
    for i in range(count):
        unit = first + i * programs
        later = gl.minimum(unit + programs, units - 1)
        after = beside_of(
            dy, y, later, parts, dy_steps, y_steps, n, origin, A, Z, R, C, NEAR, FULL, TILE, CLASSES
        )
        mbarrier.wait(arrived.index(stage), phase)
        take_unit(
            x, told, kept_dy, kept_x, kept_y, sums, powers, far, x_steps, unit, units, parts, stage,
            n, origin, finer_kept, beside, KIND, ELEMENT, X, A, B, Z, R, C, NW, PAIRS, NEAR, FULL,
            TILE, ALONE, CLASSES,
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
    x_steps, y_steps, out_steps, first, programs, count, units, parts, n, origin, finer_kept,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    X: tl.constexpr, OUT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, NW: tl.constexpr, PAIRS: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Ask for all units of a program, and write their gradients when their rows are known."""
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    P: tl.constexpr = pieces(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    for ahead in gl.static_range(STAGES):
        ask_unit(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps,
            first + ahead * programs, units, parts, ahead, n, origin, finer_kept, R, C, S, P, NEAR,
            FULL, TILE, CLASSES,
        )  # fmt: skip
        if CLASSES > 0:
            gl.thread_barrier()  # some may have stored, not asked
        async_copy.mbarrier_arrive(arrived.index(ahead), increment_count=False)
    beside = beside_of(
        dy, y, first, parts, dy_steps, y_steps, n, origin, A, Z, R, C, NEAR, FULL, TILE, CLASSES
    )
    stage = 0
    phase = 0
    for i in range(count):
        unit = first + i * programs
        later = gl.minimum(unit + programs, units - 1)
        after = beside_of(
            dy, y, later, parts, dy_steps, y_steps, n, origin, A, Z, R, C, NEAR, FULL, TILE, CLASSES
        )
        mbarrier.wait(arrived.index(stage), phase)
        mbarrier.wait(taken.index(stage), phase)
        mbarrier.wait(known.index(i & 1), (i >> 1) & 1)
        give_unit(
            dy, x, y, out, told, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps,
            unit, unit + STAGES * programs, units, parts, stage, n, origin, finer_kept, beside,
            known_rows(lines, i & 1, TILE), KIND, TIES, ELEMENT, DY, X, OUT, A, B, Z, R, C, NW,
            PAIRS, NEAR, FULL, TILE, CLASSES,
        )  # fmt: skip
        gl.thread_barrier()  # all have loaded
        mbarrier.arrive(used.index(i & 1))
        async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)
        beside = after
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def joining(
    dy, y, told, lines, known, used, dy_steps, y_steps, first, programs, count, units, parts, n,
    origin, p, q, KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    Y: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, MORE: tl.constexpr,
    JOINERS: tl.constexpr, FULL: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Join what the parts of rows have told, for all units of a program."""
    for i in range(count):
        if i > 1:
            mbarrier.wait(used.index(i & 1), ((i >> 1) & 1) ^ 1)
        join_unit(
            dy, y, told, lines, dy_steps, y_steps, first + i * programs, units, parts, n, origin,
            i & 1, p, q, KIND, TIES, ELEMENT, DY, Y, R, C, K, MORE, JOINERS, FULL, CLASSES,
        )  # fmt: skip
        gl.thread_barrier()  # all have stored
        mbarrier.arrive(known.index(i & 1))


@gluon.jit
def join_unit(
    dy, y, told, lines, dy_steps, y_steps, unit, units, parts, n, origin, half, p, q,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    Y: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, MORE: tl.constexpr,
    JOINERS: tl.constexpr, FULL: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The numbers of a unit's rows, from the states of their parts, in an order that depends on
    their number alone."""
    HEARD: tl.constexpr = heard_layout(R, K, JOINERS)
    ROW: tl.constexpr = gl.SliceLayout(1, HEARD)
    TYPE: tl.constexpr = gl.float64 if KIND == "prod" else gl.float32
    tile = unit // parts
    row_dims = dy_steps[0]
    spot = spot_of(unit, parts, row_dims, n, origin, R, C, CLASSES)
    dy_row = of_rows(dy, DY, spot, dy_steps, R, FULL, ROW, TYPE, CLASSES)
    y_row = of_rows(y, Y, spot, y_steps, R, FULL, ROW, TYPE, CLASSES)
    s0, s1, s2 = joined(
        told, tile, spot, 0, parts, row_dims, KIND, ELEMENT, R, K, JOINERS, HEARD, CLASSES
    )
    if MORE:
        for part in range(K, parts, K):
            t0, t1, t2 = joined(
                told, tile, spot, part, parts, row_dims, KIND, ELEMENT, R, K, JOINERS, HEARD,
                CLASSES,
            )  # fmt: skip
            if KIND == "prod":
                s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
            else:
                s0 += t0
    k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, dy_row, y_row, p, q, s2 == s2)
    if KIND == "prod":
        if gl.min(k2, 0) == 0.0:
            s0, s1, s2 = heard_parts(told, unit, spot, parts, units, row_dims, R, JOINERS, CLASSES)
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
    dy, y, unit, parts, dy_steps, y_steps, n, origin, A: tl.constexpr, Z: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """What elements of a unit meet of one value a row."""
    at = unit_place(unit, parts, dy_steps[0], n, origin, R, C, NEAR, TILE, CLASSES)
    return aside(dy, y, A, Z, at, dy_steps, y_steps, FULL)


@gluon.jit
def take_unit(
    x, told, kept_dy, kept_x, kept_y, sums, powers, far, x_steps, unit, units, parts, stage, n,
    origin, finer_kept, beside, KIND: tl.constexpr, ELEMENT: tl.constexpr, X: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    NW: tl.constexpr, PAIRS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr, ALONE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Take and tell the state of a unit."""
    row_dims = x_steps[0]
    spot = spot_of(unit, parts, row_dims, n, origin, R, C, CLASSES)
    lane = gl.arange(0, R, gl.SliceLayout(1, ALONE))
    target = target_of(told, unit, spot, lane, units, parts, row_dims, R, CLASSES)
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    P: tl.constexpr = pieces(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    # What is not masked takes fewer instructions; of products both ways took more registers than
    # there are.
    TWO: tl.constexpr = CLASSES > 0 or KIND != "prod"
    if FULL or (TWO and is_whole(spot, row_dims, n, R, C, CLASSES)):
        sum_unit(
            kept_dy, kept_x, kept_y, sums, powers, far, row_dims, unit, spot, parts, stage, n,
            beside, KIND, ELEMENT, X, A, B, Z, R, C, S, NW, PAIRS, NEAR, True, TILE, CLASSES,
        )  # fmt: skip
    else:
        sum_unit(
            finer_kept[0], finer_kept[1], finer_kept[2], sums, powers, far, row_dims, unit, spot,
            parts, stage, n, beside, KIND, ELEMENT, X, A, B, Z, R, C, S * P, NW, PAIRS, NEAR, False,
            TILE, CLASSES,
        )  # fmt: skip
    if KIND == "prod":
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
                    x, X, x_steps, unit, spot, parts, n, ELEMENT, R, C, NW, NEAR, ALONE, CLASSES
                )
            tell_parts(target, units, t0, t1, t2, R, KIND, ELEMENT, CLASSES)
    else:
        state = gl.sum(sums.load(ALONE).to(gl.float64), 1)
        tell(target, -state if PAIRS else state, R, KIND, ELEMENT)


@gluon.jit
def sum_unit(
    kept_dy, kept_x, kept_y, sums, powers, far, row_dims, unit, spot, parts, stage, n, beside,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, X: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NW: tl.constexpr,
    PAIRS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """What each warp has of the states of a unit's rows, left for all to join."""
    Q: tl.constexpr = run_of(ELEMENT, R)
    if KIND == "prod":
        m, e, distant = unit_products(
            kept_x, X, stage, unit, parts, row_dims, n, ELEMENT, R, C, NW, NEAR, FULL, TILE, S,
            spot, CLASSES,
        )  # fmt: skip
        sums.store(m)
        powers.store(e)
        far.store(distant)
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
                now = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, k, S, CLASSES)
                values = gl.where(now[3][:, None] & now[4][None, :], values, 0)
            added = gl.reduce(gl.reshape(values, (R, C // (S * NW * Q), NW, Q)), 1, plus)
            if k == 0:
                total = added
            else:
                total += added
        sums.store(gl.sum(total.to(gl.int32) if PAIRS else total, 2))


@gluon.jit
def give_unit(
    dy, x, y, out, told, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps, unit,
    later, units, parts, stage, n, origin, finer_kept, beside, rows, KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr, DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NW: tl.constexpr,
    PAIRS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a unit, from the numbers of its rows. A slice of it that was loaded
    makes room for the same slice of a later unit, which is asked for at once."""
    S: tl.constexpr = slices(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    P: tl.constexpr = pieces(KIND, ELEMENT, R, C, NW, PAIRS, CLASSES)
    if KIND == "prod":
        usual = gl.min(rows[2], 0)
        if usual == 2.0:
            map_product(
                dy, x, y, out, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps, unit,
                later, units, parts, stage, n, origin, finer_kept, rows, ELEMENT, OUT, A, B, Z, R,
                C, S, P, NEAR, FULL, False, TILE, CLASSES,
            )  # fmt: skip
        elif usual == 1.0:
            map_product(
                dy, x, y, out, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps, unit,
                later, units, parts, stage, n, origin, finer_kept, rows, ELEMENT, OUT, A, B, Z, R,
                C, S, P, NEAR, FULL, True, TILE, CLASSES,
            )  # fmt: skip
        else:
            spot = spot_of(unit, parts, out_steps[0], n, origin, R, C, CLASSES)
            careful_shares(
                dy, x, out, told, DY, X, OUT, dy_steps, x_steps, out_steps, unit, spot, units,
                parts, n, ELEMENT, R, C, NW, NEAR, CLASSES,
            )  # fmt: skip
            ask_unit(
                dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, later,
                units, parts, stage, n, origin, finer_kept, R, C, S, P, NEAR, FULL, TILE, CLASSES,
            )  # fmt: skip
    else:
        map_unit(
            dy, x, y, out, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps, unit,
            later, units, parts, stage, n, origin, finer_kept, beside, rows, KIND, TIES, ELEMENT,
            OUT, A, B, Z, R, C, S, P, PAIRS, NEAR, FULL, TILE, CLASSES,
        )  # fmt: skip


@gluon.jit
def map_unit(
    dy, x, y, out, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps, unit, later,
    units, parts, stage, n, origin, finer_kept, beside, rows, KIND: tl.constexpr,
    TIES: tl.constexpr, ELEMENT: tl.constexpr, OUT: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    PAIRS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """The same where these numbers are enough."""
    row_dims = out_steps[0]
    spot = spot_of(unit, parts, row_dims, n, origin, R, C, CLASSES)
    out = at_spot(out, OUT, spot, out_steps, CLASSES)
    out_steps = within(out_steps, CLASSES)
    then = spot_of(later, parts, row_dims, n, origin, R, C, CLASSES)
    then_dy, then_x = at_spot(dy, A, then, dy_steps, CLASSES), at_spot(x, B, then, x_steps, CLASSES)
    then_y = at_spot(y, Z, then, y_steps, CLASSES)
    soon = is_whole(then, row_dims, n, R, C, CLASSES)  # what is not, is asked for in the end
    whole = is_whole(spot, row_dims, n, R, C, CLASSES)
    if FULL or whole:
        for k in range(S):
            at = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, k, S, CLASSES)
            a = loaded(kept_dy, A, stage, beside, k, S, TILE)
            b = loaded(kept_x, B, stage, beside, k, S, TILE)
            c = loaded(kept_y, Z, stage, beside, k, S, TILE)
            if FULL or soon:
                ask_slice(
                    then_dy, then_x, then_y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps,
                    y_steps, later, units, then, parts, stage, n, k, R, C, S, NEAR, TILE, CLASSES,
                )  # fmt: skip
            value = mapped_slice(a, b, c, rows, KIND, TIES, ELEMENT, A, B, Z, R, C // S, PAIRS)
            put(out, OUT, value, at, out_steps, R, C // S, True)
    else:
        for k in range(S):
            for piece in range(k * P, (k + 1) * P):
                at = slice_place(
                    unit, spot, parts, row_dims, n, R, C, NEAR, TILE, piece, S * P, CLASSES
                )
                a = loaded(finer_kept[0], A, stage, beside, piece, S * P, TILE)
                b = loaded(finer_kept[1], B, stage, beside, piece, S * P, TILE)
                c = loaded(finer_kept[2], Z, stage, beside, piece, S * P, TILE)
                value = mapped_slice(
                    a, b, c, rows, KIND, TIES, ELEMENT, A, B, Z, R, C // (S * P), PAIRS
                )
                put(out, OUT, value, at, out_steps, R, C // (S * P), False)
            if FULL or soon:
                ask_slice(
                    then_dy, then_x, then_y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps,
                    y_steps, later, units, then, parts, stage, n, k, R, C, S, NEAR, TILE, CLASSES,
                )  # fmt: skip
    if not FULL:
        if not soon:
            ask_unit(
                dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, later,
                units, parts, stage, n, origin, finer_kept, R, C, S, P, NEAR, FULL, TILE, CLASSES,
            )  # fmt: skip


@gluon.jit
def mapped_slice(
    a, b, c, rows, KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The gradients of a slice that was loaded."""
    if PAIRS:
        hits = hits_of_pairs(b, c, ELEMENT, R, C)
        return share_of_pairs(hits, rows[0], ELEMENT, R, C)
    else:
        a, b, c = widened(a, A, False), widened(b, B, False), widened(c, Z, False)
        return apply(KIND, TIES, ELEMENT, rows[0], rows[1], rows[2], a, b, c, 0)


@gluon.jit
def map_product(
    dy, x, y, out, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, out_steps, unit, later,
    units, parts, stage, n, origin, finer_kept, rows, ELEMENT: tl.constexpr, OUT: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, SCALED: tl.constexpr,
    TILE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The same of products."""
    row_dims = out_steps[0]
    spot = spot_of(unit, parts, row_dims, n, origin, R, C, CLASSES)
    out = at_spot(out, OUT, spot, out_steps, CLASSES)
    out_steps = within(out_steps, CLASSES)
    then = spot_of(later, parts, row_dims, n, origin, R, C, CLASSES)
    then_dy, then_x = at_spot(dy, A, then, dy_steps, CLASSES), at_spot(x, B, then, x_steps, CLASSES)
    then_y = at_spot(y, Z, then, y_steps, CLASSES)
    soon = is_whole(then, row_dims, n, R, C, CLASSES)  # what is not, is asked for in the end
    whole = is_whole(spot, row_dims, n, R, C, CLASSES)
    if FULL or (CLASSES > 0 and whole):
        for k in range(S // 2):
            far = k + S // 2
            a = factors(
                kept_x, B, stage, unit, spot, parts, row_dims, n, R, C, NEAR, True, TILE, k, S,
                CLASSES,
            )  # fmt: skip
            b = factors(
                kept_x, B, stage, unit, spot, parts, row_dims, n, R, C, NEAR, True, TILE, far, S,
                CLASSES,
            )  # fmt: skip
            if FULL or soon:
                ask_slice(
                    then_dy, then_x, then_y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps,
                    y_steps, later, units, then, parts, stage, n, k, R, C, S, NEAR, TILE, CLASSES,
                )  # fmt: skip
                ask_slice(
                    then_dy, then_x, then_y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps,
                    y_steps, later, units, then, parts, stage, n, far, R, C, S, NEAR, TILE, CLASSES,
                )  # fmt: skip
            da, db = product_quotients(ELEMENT, rows[0], rows[1], a, b, SCALED)
            at = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, k, S, CLASSES)
            put(out, OUT, da, at, out_steps, R, C // S, True)
            at = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, far, S, CLASSES)
            put(out, OUT, db, at, out_steps, R, C // S, True)
    else:
        for k in range(S // 2):
            far = k + S // 2
            for piece in range(k * P, (k + 1) * P):
                distant = piece + S * P // 2
                a = factors(
                    finer_kept[1], B, stage, unit, spot, parts, row_dims, n, R, C, NEAR, False,
                    TILE, piece, S * P, CLASSES,
                )  # fmt: skip
                b = factors(
                    finer_kept[1], B, stage, unit, spot, parts, row_dims, n, R, C, NEAR, False,
                    TILE, distant, S * P, CLASSES,
                )  # fmt: skip
                da, db = product_quotients(ELEMENT, rows[0], rows[1], a, b, SCALED)
                at = slice_place(
                    unit, spot, parts, row_dims, n, R, C, NEAR, TILE, piece, S * P, CLASSES
                )
                put(out, OUT, da, at, out_steps, R, C // (S * P), False)
                at = slice_place(
                    unit, spot, parts, row_dims, n, R, C, NEAR, TILE, distant, S * P, CLASSES
                )
                put(out, OUT, db, at, out_steps, R, C // (S * P), False)
            if FULL or soon:
                ask_slice(
                    then_dy, then_x, then_y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps,
                    y_steps, later, units, then, parts, stage, n, k, R, C, S, NEAR, TILE, CLASSES,
                )  # fmt: skip
                ask_slice(
                    then_dy, then_x, then_y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps,
                    y_steps, later, units, then, parts, stage, n, far, R, C, S, NEAR, TILE, CLASSES,
                )  # fmt: skip
    if not FULL:
        if not soon:
            ask_unit(
                dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, later,
                units, parts, stage, n, origin, finer_kept, R, C, S, P, NEAR, FULL, TILE, CLASSES,
            )  # fmt: skip
