"""The engine *row state then map* for rows that no program holds alone: one read, on few programs
that stay.

Rows are cut into parts, as in `rows`. As many programs as the machine runs at a time take all parts
in turn. A part stays in shared memory from its read to its write: a program tells the state of its
part, and while others tell theirs it takes the state of its next part, whose memory it had asked
for before. So memory never waits for the programs, nor they for each other, but for a moment.

This is Gluon, Triton's lower level, where a program says itself what lies in shared memory and when
it is asked for. All programs must run at the same time: the launch is a cooperative one.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon
from ..launch import interpreted
from .arithmetic import multiply, plain_parts, power_of_two, reciprocal, rough_reciprocal
from .formulas import (
    apply,
    counts,
    distance,
    hits_of_pairs,
    merge,
    numbers,
    numbers_needed,
    operands_of,
    plus,
    product_of_others,
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
    PAIRS: tl.constexpr,
    NEAR: tl.constexpr,
    FULL: tl.constexpr,
):
    """`units` parts of R rows by C places; a program has room for STAGES of them, and asks for the
    states of K parts of a row at a time; MORE says that there are more.

    `told` are the states [unit, R]; all bits of one that is not told yet are 1. A state is its own
    flag: nobody waits for more than the very numbers that it needs. A product that is no plain
    number is told as NaN, and its parts stand behind all states.
    """
    TILE: tl.constexpr = tile_layout(OUT, ELEMENT, R, NW)
    HEARD: tl.constexpr = heard_layout(R, K, NW)
    ALONE: tl.constexpr = alone_layout(R, NW, NW)
    JOIN: tl.constexpr = join_layout(OUT, R, K, NW)
    ROW: tl.constexpr = gl.SliceLayout(1, JOIN)
    SHARED: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0] if OUT == "t" else [0, 1])
    KNOWN: tl.constexpr = gl.float64 if KIND == "prod" else gl.float32
    LINE: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # What elements meet: arrays, or one value a row.
    A: tl.constexpr = met(DY, KIND, "dy")
    B: tl.constexpr = met(X, KIND, "x")
    Z: tl.constexpr = met(Y, KIND, "y")
    dy_steps = (row_dims, row_dy, axis_dims, axis_dy)
    x_steps = (row_dims, row_x, axis_dims, axis_x)
    y_steps = (row_dims, row_y, axis_dims, axis_y)
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    kept_dy = room(dy, A, R, C, STAGES, SHARED)
    kept_x = room(x, B, R, C, STAGES, SHARED)
    kept_y = room(y, Z, R, C, STAGES, SHARED)
    sums = gl.allocate_shared_memory(sum_type(KIND, ELEMENT), [R, NW], SHARED)
    some = gl.allocate_shared_memory(gl.float64, [R, 32 * NW // R], SHARED)
    if KIND == "prod":
        more = gl.allocate_shared_memory(gl.int32, [R, 32 * NW // R], SHARED)
        powers = gl.allocate_shared_memory(gl.int32, [R, NW], SHARED)
        far = gl.allocate_shared_memory(gl.int32, [R, NW], SHARED)
        SMALL: tl.constexpr = NW * run_of(ELEMENT, R)
    lines = (
        gl.allocate_shared_memory(gl.float32, [R], LINE),
        gl.allocate_shared_memory(gl.float32, [R], LINE),
        gl.allocate_shared_memory(gl.float32, [R], LINE),
    )
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    for stage in gl.static_range(STAGES - 1):
        ask_unit(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps,
            first + stage * programs, units, parts, stage, n, R, C, NEAR, FULL, TILE,
        )  # fmt: skip
    at = unit_place(first, parts, row_dims, n, R, C, NEAR, TILE)
    beside = aside(dy, y, A, Z, at, dy_steps, y_steps, FULL)
    count = (units - first + programs - 1) // programs
    for i in range(count + 1):
        # What is known of the former unit's rows arrives while the state of this one is taken.
        unit = first + i * programs
        freed = (i + STAGES - 1) % STAGES
        former = gl.maximum(unit - programs, 0)
        at = unit_place(former, parts, row_dims, n, R, C, NEAR, TILE)
        before = aside(dy, y, A, Z, at, dy_steps, y_steps, FULL)
        words, needed = words_of(told, former, 0, parts, R, K, HEARD)
        heard = overheard(words, needed, word_bits(KIND, ELEMENT))
        dy_row = of_rows(dy, DY, former // parts, dy_steps, R, FULL, ROW, KNOWN)
        y_row = of_rows(y, Y, former // parts, y_steps, R, FULL, ROW, KNOWN)
        later = gl.minimum(unit + programs, units - 1)
        then = unit_place(later, parts, row_dims, n, R, C, NEAR, TILE)
        after = aside(dy, y, A, Z, then, dy_steps, y_steps, FULL)
        if i < count:
            async_copy.wait_group(STAGES - 2)
            lane = gl.arange(0, R, gl.SliceLayout(1, ALONE))
            target = told + unit.to(gl.int64) * R + lane
            if KIND == "prod":
                m, e, distant = held_products(
                    kept_x, X, i % STAGES, unit, parts, row_dims, n, ELEMENT, R, C, NW, NEAR, FULL,
                    TILE, 0,
                )  # fmt: skip
                m2, e2, distant2 = held_products(
                    kept_x, X, i % STAGES, unit, parts, row_dims, n, ELEMENT, R, C, NW, NEAR, FULL,
                    TILE, C // 2,
                )  # fmt: skip
                m, e, distant = m * m2, e + e2, distant | distant2
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
                            x, X, x_steps, unit, parts, row_dims, n, ELEMENT, R, C, SMALL, NEAR,
                            TILE, ALONE,
                        )  # fmt: skip
                    tell_parts(target, units, t0, t1, t2, R, KIND, ELEMENT)
            else:
                a = loaded(kept_dy, A, i % STAGES, beside, TILE)
                b = loaded(kept_x, B, i % STAGES, beside, TILE)
                c = loaded(kept_y, Z, i % STAGES, beside, TILE)
                if PAIRS:
                    values = hits_of_pairs(b, c, ELEMENT, R, C)
                else:
                    a, b, c = widened(a, A, False), widened(b, B, False), widened(c, Z, False)
                    values = tl.broadcast_to(term(KIND, ELEMENT, a, b, c), (R, C))
                    if not FULL:
                        now = unit_place(unit, parts, row_dims, n, R, C, NEAR, TILE)
                        values = gl.where(now[3][:, None] & now[4][None, :], values, 0)
                sums.store(warp_sums(values, ELEMENT, R, C, NW))
                state = gl.sum(sums.load(ALONE).to(gl.float64), 1)
                tell(target, -state if PAIRS else state, R, KIND, ELEMENT)
        if i > 0:
            if KIND == "prod":
                s0, s1, s2 = joined_products(
                    told, words, needed, heard, former, parts, some, more, KIND, ELEMENT, OUT, R, K,
                    NW, MORE, HEARD, JOIN,
                )  # fmt: skip
            else:
                s0 = joined(
                    told, words, heard, former, parts, some, KIND, ELEMENT, OUT, R, K, NW, MORE,
                    HEARD, JOIN,
                )  # fmt: skip
                s1 = s0
                s2 = s0
            k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, dy_row, y_row, p, q, s2 == s2)
            if KIND == "prod":
                plain = gl.min(k2, 0) != 0.0
                if not plain:
                    s0, s1, s2 = heard_parts(
                        told, former, parts, units, KIND, ELEMENT, R, K, HEARD, ROW
                    )
                    k0, k1, k2 = numbers(
                        KIND, TIES, ELEMENT, s0, s1, s2, dy_row, y_row, p, q, s2 == s2
                    )
                    plain = gl.min(k2, 0) != 0.0
            k0 = spread(k0, lines[0], OUT, TILE)
            if numbers_needed(KIND) > 1:
                k1 = spread(k1, lines[1], OUT, TILE)
            if numbers_needed(KIND) > 2:
                k2 = spread(k2, lines[2], OUT, TILE)
            if KIND == "prod":
                if plain:
                    for half in gl.static_range(2):
                        b = kept_x.index(freed).slice(half * (C // 2), C // 2, 1).load(TILE)
                        value = product_shares(widened(b, B, False), k0, k1, ELEMENT)
                        begin = (former % parts).to(n.dtype) * C + half * (C // 2)
                        here = part_place(
                            former // parts, begin, row_dims, n, R, C // 2, NEAR, TILE
                        )
                        put(out, OUT, value, here, out_steps, R, C // 2, FULL)
                else:
                    careful_shares(
                        dy, x, out, DY, X, OUT, dy_steps, x_steps, out_steps, former, parts,
                        row_dims, n, s0, s1, s2, ELEMENT, R, C, SMALL, NEAR, TILE,
                    )  # fmt: skip
            else:
                a = loaded(kept_dy, A, freed, before, TILE)
                b = loaded(kept_x, B, freed, before, TILE)
                c = loaded(kept_y, Z, freed, before, TILE)
                if PAIRS:
                    hits = hits_of_pairs(b, c, ELEMENT, R, C)
                    value = share_of_pairs(hits, k0, ELEMENT, R, C)
                    gl.store(place(out, OUT, at, out_steps), value)
                else:
                    a, b, c = widened(a, A, False), widened(b, B, False), widened(c, Z, False)
                    value = apply(KIND, TIES, ELEMENT, k0, k1, k2, a, b, c, 0)
                    put(out, OUT, value, at, out_steps, R, C, FULL)
        ask_unit(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps,
            unit + (STAGES - 1) * programs, units, parts, freed, n, R, C, NEAR, FULL, TILE,
        )  # fmt: skip
        beside = after


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
    neighbouring rows."""
    across, over = min(r, 32), max(1, r // 32)
    some = k // (32 * warps // r)
    return gl.BlockedLayout([1, some], [across, 32 // across], [over, warps // over], [0, 1])


@triton.constexpr_function
def join_layout(out, r, k, warps):
    """Of rows side by side [R, lanes]: what the threads of a row have joined."""
    return heard_layout(r, k, warps) if out == "t" else alone_layout(r, 32 * warps // r, warps)


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
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask for a unit's part of all arrays, if there is that unit."""
    if unit < units:
        at = unit_place(unit, parts, dy_steps[0], n, R, C, NEAR, TILE)
        ask(dy, A, kept_dy, stage, at, dy_steps, FULL)
        ask(x, B, kept_x, stage, at, x_steps, FULL)
        ask(y, Z, kept_y, stage, at, y_steps, FULL)
    async_copy.commit_group()


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
def loaded(kept, MODE: tl.constexpr, stage, beside, TILE: tl.constexpr):
    """An operand's part as it is stored: [R, C], or [R, 1]."""
    if MODE == "t" or MODE == "c":
        return kept.index(stage).load(TILE)
    elif by_row(MODE):
        return beside
    else:
        return 0.0


@gluon.jit
def of_rows(pointer, MODE: tl.constexpr, tile, steps, R: tl.constexpr, FULL: tl.constexpr,
            ROW: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
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
def warp_sums(values, ELEMENT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NW: tl.constexpr):
    """Sums [R, NW] of what each warp has of each row of a part [R, C]."""
    Q: tl.constexpr = run_of(ELEMENT, R)
    values = gl.reshape(values, (R, C // (NW * Q), NW, Q))
    if values.dtype == gl.int16:  # of pairs
        return gl.sum(gl.reduce(values, 1, plus).to(gl.int32), 2)
    else:
        return gl.sum(gl.sum(values, 1), 2)


@gluon.jit
def held_products(
    kept, X: tl.constexpr, stage, unit, parts, row_dims, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NW: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """The products of half a part, from SKIP on: of a whole one would take too many registers."""
    x = widened(kept.index(stage).slice(SKIP, C // 2, 1).load(TILE), X, False)
    if not FULL:
        begin = (unit % parts).to(n.dtype) * C + SKIP
        at = part_place(unit // parts, begin, row_dims, n, R, C // 2, NEAR, TILE)
        x = gl.where(at[3][:, None] & at[4][None, :], x, 1.0)
    return warp_products(x, ELEMENT, R, C // 2, NW)


@gluon.jit
def warp_products(x, ELEMENT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, NW: tl.constexpr):
    """Products [R, NW], as significands and exponents, and whether some factor is so far from 1
    that they or its reciprocal need not be right."""
    Q: tl.constexpr = run_of(ELEMENT, R)
    P: tl.constexpr = C // (NW * Q)
    LOW: tl.constexpr = 100 if ELEMENT == "f32" else 60
    MANY: tl.constexpr = 8 if ELEMENT == "f32" else 16  # within f64 whatever they are
    G: tl.constexpr = MANY if MANY < P else P
    distant = gl.reshape(distance(x, LOW), (R, P, NW, Q))
    distant = gl.max(gl.max(distant, 1), 2) >= (2 * LOW << 24)
    if ELEMENT == "f32" or G < 2:
        few = gl.reshape(x, (R, P // G, G, NW, Q)).to(gl.float64)
    else:
        few = gl.reshape(x, (R, P // G, G // 2, 2, NW, Q))
        few = gl.reduce(few, 3, multiply).to(gl.float64)  # exact
    m, e = plain_parts(gl.reduce(few, 2, multiply))
    m, e = gl.reduce((m, e), 1, times_few_parts)
    m, e = gl.reduce((m, e), 2, times_few_parts)
    m, more = plain_parts(m)
    return m, e + more, distant.to(gl.int32)


@gluon.jit
def product_shares(x, share, scale, ELEMENT: tl.constexpr):
    """share · scale² / x."""
    each = reciprocal(x) if ELEMENT == "f32" else rough_reciprocal(x)
    return share[:, None] * each * scale[:, None] * scale[:, None]


@gluon.jit
def careful_product(
    x, X: tl.constexpr, steps, unit, parts, row_dims, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, NEAR: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """The state of a unit with zeros, infinities, NaNs or extreme exponents, in small steps: x is
    read again, so that the usual way keeps its registers."""
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, TILE))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    for step in range(0, C // H):
        begin = (unit % parts).to(n.dtype) * C + step * H
        at = part_place(unit // parts, begin, row_dims, n, R, H, NEAR, TILE)
        b = fetch(x, X, at, steps, 1.0, False, False)
        t0, t1, t2 = product_state(ELEMENT, b, at[4][None, :], R, H)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    return in_layout(s0, s1, s2, gl.SliceLayout(1, ALONE))


@gluon.jit
def in_layout(s0, s1, s2, ROWS: tl.constexpr):
    """The same for other threads."""
    s0, s1 = gl.convert_layout(s0, ROWS), gl.convert_layout(s1, ROWS)
    return s0, s1, gl.convert_layout(s2, ROWS)


@gluon.jit
def careful_shares(
    dy, x, out, DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, dy_steps, x_steps, out_steps,
    unit, parts, row_dims, n, s0, s1, s2, ELEMENT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    H: tl.constexpr, NEAR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of a unit whose rows have such factors."""
    s0, s1, s2 = in_layout(s0, s1, s2, gl.SliceLayout(1, TILE))
    for step in range(0, C // H):
        begin = (unit % parts).to(n.dtype) * C + step * H
        at = part_place(unit // parts, begin, row_dims, n, R, H, NEAR, TILE)
        b = fetch(x, X, at, x_steps, 1.0, False, False)
        given = fetch(dy, DY, at, dy_steps, 0.0, True, False)
        value = product_of_others(ELEMENT, s0, s1, s2, given, b)
        put(out, OUT, value, at, out_steps, R, H, False)


@gluon.jit
def words_of(told, unit, first, parts, R: tl.constexpr, K: tl.constexpr, HEARD: tl.constexpr):
    """Where the states of a unit's rows are told, [R, K], from a first part on, and which are."""
    lane = gl.arange(0, R, gl.SliceLayout(1, HEARD))[:, None]
    one = first + gl.arange(0, K, gl.SliceLayout(0, HEARD))[None, :]
    words = told + (unit // parts * parts).to(gl.int64) * R + (lane + one * R)
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
def heard_parts(
    told, unit, parts, units, KIND: tl.constexpr, ELEMENT: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, HEARD: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Products of rows some of whose parts were told so, [R]: significand, exponent, and what is
    odd about them. All have been heard before."""
    total = units.to(gl.int64) * R
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, HEARD))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    for first in range(0, parts, K):
        words, needed = words_of(told, unit, first, parts, R, K, HEARD)
        t0 = overheard(words, needed, word_bits(KIND, ELEMENT)).to(gl.float64, bitcast=True)
        fence(t0)
        odd = (t0 != t0) & (needed != 0)
        m, e = plain_parts(gl.where(needed != 0, t0, 1.0))
        t0 = gl.where(odd, gl.load(words + total, mask=odd, other=1.0, cache_modifier=".cg"), m)
        t1 = gl.load(words + 2 * total, mask=odd, other=0.0, cache_modifier=".cg")
        t1 = gl.where(odd, t1, e.to(gl.float64))
        t2 = gl.load(words + 3 * total, mask=odd, other=0.0, cache_modifier=".cg")
        t0, t1, t2 = gl.reduce((t0, t1, t2), 1, merge)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    return in_layout(s0, s1, s2, ROW)


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
def joined(
    told, words, heard, unit, parts, some, KIND: tl.constexpr, ELEMENT: tl.constexpr,
    OUT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, NW: tl.constexpr,
    MORE: tl.constexpr, HEARD: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """The states of rows, f64 [R], from those of their parts, in an order that depends on their
    number alone."""
    state = gl.sum(by_lanes(numbers_of(hear(words, heard, R * K // (32 * NW))), R, K, NW), 2)
    if MORE:
        for first in range(K, parts, K):
            later, needed = words_of(told, unit, first, parts, R, K, HEARD)
            others = numbers_of(
                hear(later, overheard(later, needed, word_bits(KIND, ELEMENT)), R * K // (32 * NW))
            )
            state += gl.sum(by_lanes(others, R, K, NW), 2)
    if OUT == "t":
        state = gl.convert_layout(gl.sum(state, 1), gl.SliceLayout(1, JOIN))
    else:
        some.store(state)
        state = gl.sum(some.load(JOIN), 1)
    if counts(KIND) or ELEMENT == "f32":
        return state
    else:
        return state * (row_scale(ELEMENT) * word_scale(KIND, ELEMENT))


@gluon.jit
def numbers_of(heard):
    """What was told, as f64."""
    if heard.dtype == gl.int64:
        return heard.to(gl.float64, bitcast=True)
    else:
        return heard.to(gl.float32, bitcast=True).to(gl.float64)


@gluon.jit
def by_lanes(values, R: tl.constexpr, K: tl.constexpr, NW: tl.constexpr):
    """[R, K] as what each of the threads of a row has."""
    LANES: tl.constexpr = 32 * NW // R
    return gl.reshape(values, (R, LANES, K // LANES))


@gluon.jit
def joined_products(
    told, words, needed, heard, unit, parts, some, more, KIND: tl.constexpr,
    ELEMENT: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    NW: tl.constexpr, MORE: tl.constexpr, HEARD: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """The same of products: significand, exponent, and whether some part was told otherwise."""
    m, e = told_products(hear(words, heard, R * K // (32 * NW)), needed, R, K, NW)
    if MORE:
        for first in range(K, parts, K):
            later, needed_too = words_of(told, unit, first, parts, R, K, HEARD)
            heard_too = hear(
                later, overheard(later, needed_too, word_bits(KIND, ELEMENT)), R * K // (32 * NW)
            )
            m2, e2 = told_products(heard_too, needed_too, R, K, NW)
            m *= m2
            e += e2
    if OUT == "t":
        m, e = gl.reduce((m, e), 1, times_few_parts)
        m = gl.convert_layout(m, gl.SliceLayout(1, JOIN))
        e = gl.convert_layout(e, gl.SliceLayout(1, JOIN))
    else:
        some.store(m)
        more.store(e)
        m, e = gl.reduce((some.load(JOIN), more.load(JOIN)), 1, times_few_parts)
    odd = e > _ODD // 2
    m, above = plain_parts(m)
    return m, gl.where(odd, 0, e + above).to(gl.float64), odd.to(gl.float64)


@gluon.jit
def told_products(heard, needed, R: tl.constexpr, K: tl.constexpr, NW: tl.constexpr):
    """Products of the parts that a thread has; an exponent that none comes near says that one of
    them was told part by part."""
    states = gl.where(needed != 0, heard.to(gl.float64, bitcast=True), 1.0)
    m, e = plain_parts(states)
    e = gl.where(states != states, _ODD, e)
    return gl.reduce((by_lanes(m, R, K, NW), by_lanes(e, R, K, NW)), 2, times_few_parts)


@gluon.jit
def spread(number, line, OUT: tl.constexpr, TILE: tl.constexpr):
    """A number a row, [R], for whoever has elements of it."""
    ROWS: tl.constexpr = gl.SliceLayout(1, TILE)
    if OUT == "t":
        return gl.convert_layout(number, ROWS, assert_trivial=True)
    else:
        line.store(number)
        return line.load(ROWS)
