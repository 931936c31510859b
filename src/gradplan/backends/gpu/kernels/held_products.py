"""Products, as `held` has them: those of parts, and the gradients of rows with zeros,
infinities, NaNs or extreme factors.
"""

import triton.language as tl

from ..gluon import gl, gluon
from .arithmetic import multiply, plain_parts
from .formulas import (
    distance,
    merge,
    product_of_others,
    product_reach,
    product_state,
    times_few_parts,
)
from .held_memory import at_spot, part_place, run_of, slice_place, spread, within
from .held_states import careful_layout, heard_parts
from .tiles import fetch, put, widened


@gluon.jit
def unit_products(
    kept, X: tl.constexpr, stage, unit, parts, row_dims, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NW: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
    S: tl.constexpr, spot, CLASSES: tl.constexpr,
):  # fmt: skip
    """Products [R, NW] of what each warp has of each row of a part, as significands and exponents,
    and whether some factor is so far from 1 that they or its reciprocal need not be right.

    Two slices are multiplied element by element, which is exact: of halves in f32, of f32 in f64.
    """
    LOW: tl.constexpr = product_reach(ELEMENT)
    Q: tl.constexpr = run_of(ELEMENT, R)
    P: tl.constexpr = C // (S * NW * Q)
    # So many products of two stay within f64 whatever they are.
    MANY: tl.constexpr = max(1, (4 if ELEMENT == "f32" else 8) // P)
    for k in gl.static_range(S // 2):
        a = factors(
            kept, X, stage, unit, spot, parts, row_dims, n, R, C, NEAR, FULL, TILE, k, S, CLASSES
        )
        b = factors(
            kept, X, stage, unit, spot, parts, row_dims, n, R, C, NEAR, FULL, TILE, k + S // 2, S,
            CLASSES,
        )  # fmt: skip
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
    kept, X: tl.constexpr, stage, unit, spot, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr, k, S: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """A slice of a part, 1 where there is no element."""
    x = widened(kept.index(stage * S + k).load(TILE), X, False)
    if not FULL:
        at = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, k, S, CLASSES)
        x = gl.where(at[3][:, None] & at[4][None, :], x, 1.0)
    return x


@gluon.jit
def here(pointer, MODE: tl.constexpr, spot, steps, CLASSES: tl.constexpr):
    """An array for `small_place`."""
    if CLASSES > 0:
        return at_spot(pointer, MODE, spot, steps, CLASSES)
    else:
        return pointer


@gluon.jit
def small_place(
    unit, spot, parts, row_dims, n, step, R: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    NEAR: tl.constexpr, LAYOUT: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The place of H steps of a unit, of which those before have as many."""
    if CLASSES > 0:
        row, begin = spot[1], spot[2] + step * H
        number = row - spot[4]
        return spread(spot[0] * 0, row, begin, row_dims, spot[5], R, H, NEAR, LAYOUT, number)
    else:
        begin = (unit % parts).to(n.dtype) * C + step * H
        return part_place(unit // parts, begin, row_dims, n, R, H, NEAR, LAYOUT)


@gluon.jit
def careful_product(
    x, X: tl.constexpr, steps, unit, spot, parts, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NW: tl.constexpr, NEAR: tl.constexpr, ALONE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """The state of a unit with zeros, infinities, NaNs or extreme exponents, in small steps: x is
    read again, so that the usual way keeps its registers."""
    LAYOUT: tl.constexpr = careful_layout(R, NW)
    H: tl.constexpr = 32 * NW // R
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, LAYOUT))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    x = here(x, X, spot, steps, CLASSES)
    for step in range(0, C // H):
        at = small_place(unit, spot, parts, steps[0], n, step, R, C, H, NEAR, LAYOUT, CLASSES)
        b = fetch(x, X, at, within(steps, CLASSES), 1.0, False, False)
        t0, t1, t2 = product_state(ELEMENT, b, at[4][None, :], R, H)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    ROWS: tl.constexpr = gl.SliceLayout(1, ALONE)
    s0, s1 = gl.convert_layout(s0, ROWS), gl.convert_layout(s1, ROWS)
    return s0, s1, gl.convert_layout(s2, ROWS)


@gluon.jit
def careful_shares(
    dy, x, out, told, DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, dy_steps, x_steps,
    out_steps, unit, spot, units, parts, n, ELEMENT: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, NW: tl.constexpr, NEAR: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The gradient of a unit whose rows have such factors."""
    LAYOUT: tl.constexpr = careful_layout(R, NW)
    H: tl.constexpr = 32 * NW // R
    row_dims = x_steps[0]
    s0, s1, s2 = heard_parts(told, unit, spot, parts, units, row_dims, R, NW, CLASSES)
    x, out = here(x, X, spot, x_steps, CLASSES), here(out, OUT, spot, out_steps, CLASSES)
    for step in range(0, C // H):
        at = small_place(unit, spot, parts, row_dims, n, step, R, C, H, NEAR, LAYOUT, CLASSES)
        b = fetch(x, X, at, within(x_steps, CLASSES), 1.0, False, False)
        beside = at
        if CLASSES > 0:
            row = spot[1] - spot[4]
            beside = spread(spot[0], row, spot[2], row_dims, spot[5], R, H, NEAR, LAYOUT, row)
        given = fetch(dy, DY, beside, dy_steps, 0.0, True, False)
        value = product_of_others(ELEMENT, s0, s1, s2, given, b)
        put(out, OUT, value, at, within(out_steps, CLASSES), R, H, False)
