"""`walks` for log-cumsum-exp: a part's terms are exponentials from one reference a row, so that S
is their sum.

The reference of a part is in the middle of its y, which never falls. A part of which some row's y
are far apart or not finite, or sums overflow, is taken anew in f64, place by place. What goes from
part to part is in terms of y where it leaves (bare), or, after a usual part, of the reference there
and 2³² times as large, as all sums of usual parts are.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon
from .arithmetic import exp_of_difference, far_exp, power_of_two_f32, powered, split_exp
from .line_scans import behind_sum, both_added, even, exp_between, near_enough
from .ragged import run_length
from .stretches import NOTHING, ratio, times
from .walk_memory import (
    address_of,
    ask,
    ask_part,
    begin_of,
    copy_layout,
    flat,
    is_whole,
    line_layout,
    lines_layout,
    lines_of,
    numbers_of,
    run_of,
    shared_layout,
    unit_of,
)
from .walk_scans import all_have_read, edge_places
from .walks import block_of, nth, store_part
from .waves import both_last, tell_last

_INFINITY = tl.constexpr(float("inf"))
# Sums are larger by so much: weights are down to e⁻²⁰, and a small dy times them is to stay a
# normal number.
_POWER = tl.constexpr(32)
_UPWARDS = tl.constexpr(2.0**32)
_DOWNWARDS = tl.constexpr(2.0**-32)
_LEAST = tl.constexpr(2.0**-1000)
# log₂ e in two parts.
_LOG2_E = tl.constexpr(1.4426950216293335)
_LOG2_E_MORE = tl.constexpr(1.925963033500011e-08)


@gluon.jit
def walk_logs(
    dy,
    x,
    y,
    out,
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
    tiles,
    parts,
    ELEMENT: tl.constexpr,
    FLIP: tl.constexpr,
    SIDE: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    STAGES: tl.constexpr,
    NW: tl.constexpr,
    FULL: tl.constexpr,
    ANYWHERE: tl.constexpr,
    V: tl.constexpr,
):
    """The same as `walks.walk_rows`."""
    UP: tl.constexpr = not FLIP
    C: tl.constexpr = G * E
    SHAPE: tl.constexpr = [C, R] if SIDE else [G, E]
    LINE: tl.constexpr = line_layout(SIDE, R, E, NW)
    COPY: tl.constexpr = copy_layout(SIDE, R, E, ELEMENT, NW, V)
    SHARED: tl.constexpr = shared_layout(SIDE, E, ELEMENT)
    LINES: tl.constexpr = lines_layout(SIDE, R, NW)
    kept = gl.allocate_shared_memory(dy.dtype.element_ty, [STAGES] + SHAPE, SHARED)
    kept_x = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES] + SHAPE, SHARED)
    kept_y = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES] + SHAPE, SHARED)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    count = (tiles - first + programs - 1) // programs * parts
    for stage in gl.static_range(STAGES - 1):
        tile, begin, _ = part_of(stage, first, programs, parts, n, UP, C)
        head, body = run_of(dy, tile, n, row_dims, row_dy, ANYWHERE)
        ask_part(
            dy, x, y, dy, kept, kept_x, kept_y, kept, row_dims, row_dy, row_x, row_y,
            axis_dy, axis_x, axis_y, n, head, body, tile, begin, stage < count, stage, "affine", UP,
            SIDE, R, G, E, FULL, COPY, LINE, ANYWHERE,
        )  # fmt: skip
    number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
    beyond = (G - 1 - number if UP else number) * E
    lanes = gl.arange(0, R, gl.SliceLayout(0, LINES))
    # Of the part at hand: where it is, and y at its ends and past it, asked for a part before.
    tile, begin, place = part_of(first * 0, first, programs, parts, n, UP, C)
    head, body = run_of(dy, tile, n, row_dims, row_dy, ANYWHERE)
    low, high, past = ends_of(
        y, tile, begin, head, body, lanes, n, row_dims, row_y, axis_y, UP, SIDE, R, C, ANYWHERE
    )
    # Of the part behind: what leaves it, its reference, and whether it is in terms of that, which
    # all rows of a tile are, or none.
    carry = gl.full([R], 0.0, gl.float64, gl.SliceLayout(0, LINES))
    prior = gl.full([R], 0.0, gl.float32, gl.SliceLayout(0, LINES))
    prior_e = gl.full([R], 0.0, gl.float32, gl.SliceLayout(0, LINES))
    fine = first * 0
    for i in range(count):
        freed = (i + STAGES - 1) % STAGES
        ask(
            dy, x, y, dy, kept, kept_x, kept_y, kept, row_dims, row_dy, row_x, row_y,
            axis_dy, axis_x, axis_y, n, first, programs, i + STAGES - 1, count, parts,
            freed, "affine", UP, SIDE, R, G, E, FULL, COPY, LINE, ANYWHERE,
        )  # fmt: skip
        # Where a part is: worked out in each turn. Handed on it was slower by 15 points along
        # axis 0.
        tile, begin, place = part_of(i, first, programs, parts, n, UP, C)
        later_tile, later_begin, _later = part_of(
            gl.minimum(i + 1, count - 1), first, programs, parts, n, UP, C
        )
        later_head, later_body = run_of(dy, later_tile, n, row_dims, row_dy, ANYWHERE)
        later_low, later_high, later_past = ends_of(
            y, later_tile, later_begin, later_head, later_body, lanes, n, row_dims, row_y, axis_y,
            UP, SIDE, R, C, ANYWHERE,
        )  # fmt: skip
        head, body = run_of(dy, tile, n, row_dims, row_dy, ANYWHERE)
        if ANYWHERE:
            if place == 0:
                carry = careful_part(
                    dy, x, y, out, tile, edge_line(dy, n, head, body, UP, UP, LINES), n, n,
                    row_dims, row_dy, row_x, row_y, row_out, axis_dy, axis_x, axis_y, axis_out,
                    gl.zeros_like(carry), UP, False, 1, run_length(dy.dtype), 1, LINES, False, NW,
                )  # fmt: skip
                fine = fine * 0
        ref, ref_e, usual = reference_of(low, high)
        if fine == 1:
            inward = handed_on(carry, ref, ref_e, prior, prior_e)
        else:
            inward = carry * (wide_exp(ref, past) * _UPWARDS)
        inward = gl.where(arrives(place, n, head, body, UP, ANYWHERE), inward, 0.0)
        async_copy.wait_group(STAGES - 1)
        if FULL or is_whole(tile, begin, body, row_dims, SIDE, R, C):
            carry, good = walk_part(
                dy, x, y, out, kept, kept_x, kept_y, i % STAGES, row_dims, row_dy, row_x, row_y,
                row_out, axis_dy, axis_x, axis_y, axis_out, n, head, body, tile, begin, place,
                carry, inward, past, prior, ref, ref_e, usual, fine, number, beyond, ELEMENT, UP,
                SIDE, R, G, E, NW, True, ANYWHERE,
            )  # fmt: skip
        else:
            carry, good = walk_part(
                dy, x, y, out, kept, kept_x, kept_y, i % STAGES, row_dims, row_dy, row_x, row_y,
                row_out, axis_dy, axis_x, axis_y, axis_out, n, head, body, tile, begin, place,
                carry, inward, past, prior, ref, ref_e, usual, fine, number, beyond, ELEMENT, UP,
                SIDE, R, G, E, NW, False, ANYWHERE,
            )  # fmt: skip
        if ANYWHERE:
            if place == parts - 1:
                bare = carry
                if good == 1:
                    bare = carry * (wide_exp(low, ref) * _DOWNWARDS)
                careful_part(
                    dy, x, y, out, tile, edge_line(dy, n, head, body, UP, not UP, LINES), n, n,
                    row_dims, row_dy, row_x, row_y, row_out, axis_dy, axis_x, axis_y, axis_out,
                    bare, UP, False, 1, run_length(dy.dtype), 1, LINES, False, NW,
                )  # fmt: skip
        prior, prior_e = ref, ref_e
        low, high, past = later_low, later_high, later_past
        fine = good


@gluon.jit
def walk_part(
    dy, x, y, out, kept, kept_x, kept_y, stage, row_dims, row_dy, row_x, row_y, row_out, axis_dy,
    axis_x, axis_y, axis_out, n, head, body, tile, begin, place, carry, inward, past, prior, ref,
    ref_e, usual, fine, number, beyond, ELEMENT: tl.constexpr, UP: tl.constexpr, SIDE: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr,
    ANYWHERE: tl.constexpr,
):  # fmt: skip
    """A part that has arrived in shared memory, and so much at it in terms of its reference;
    returns what leaves it, and whether that is in such terms."""
    LINE: tl.constexpr = line_layout(SIDE, R, E, NW)
    LINES: tl.constexpr = lines_layout(SIDE, R, NW)
    COPY: tl.constexpr = copy_layout(SIDE, R, E, ELEMENT, NW)
    terms = terms_of(
        kept, kept_y, stage, begin, body, begin + beyond, ref, ref_e, ELEMENT, UP, SIDE, R, G, E,
        FULL, LINE, LINES,
    )  # fmt: skip
    total = summed(terms, E, UP)
    s, behind = gl.associative_scan((total, gl.zeros_like(total)), 0, behind_sum)
    results, S = shares_of(
        terms, behind + inward.to(gl.float32)[None, :], kept_x, stage, begin, body, ref, ref_e,
        ELEMENT, UP, SIDE, R, G, E, FULL, LINE, LINES,
    )  # fmt: skip
    each = gl.where(finite(S) & usual[None, :], 1, 0)
    left, of_row = gl.reduce((gl.where(number == G - 1, s, 0.0), each), 0, sum_and_least)
    good = gl.min(of_row, 0)
    if good == 1:
        store_part(
            out, kept, stage, results, tile, begin, head, body, row_dims, row_out, axis_out, UP,
            SIDE, R, G, E, FULL, LINE, COPY, ANYWHERE,
        )  # fmt: skip
        # In f64: roundings do not add up along a row.
        carry = left.to(gl.float64) + inward
    else:
        bare = carry
        if fine == 1:
            bare = carry * (wide_exp(past, prior) * _DOWNWARDS)
        carry = careful_part(
            dy, x, y, out, tile, begin + head + beyond, head + body, n, row_dims, row_dy, row_x,
            row_y, row_out, axis_dy, axis_x, axis_y, axis_out,
            gl.where(arrives(place, n, head, body, UP, ANYWHERE), bare, 0.0), UP, SIDE, R, G, E,
            LINES, ANYWHERE,
        )  # fmt: skip
    return carry, good


@gluon.jit
def arrives(place, n, head, body, UP: tl.constexpr, ANYWHERE: tl.constexpr):
    """Whether anything is behind a part."""
    if ANYWHERE:
        return (place > 0) | ((head + body < n) if UP else (head > 0))
    else:
        return place > 0


@gluon.jit
def edge_line(dy, n, head, body, UP: tl.constexpr, BEHIND: tl.constexpr, LINES: tl.constexpr):
    """The places of an edge, a line each; -1 where there is none."""
    place, there, _first = edge_places(n, head, body, UP, BEHIND, run_length(dy.dtype), LINES)
    return gl.where(there, place, -1)


@gluon.jit
def take_logs(
    dy, y, kept, kept_y, kept_s, kept_good, target, units, dy_steps, y_steps, tile, begin, stage, n,
    ends, ELEMENT: tl.constexpr, UP: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """For `held_scans`: tell, bare, what leaves the near end of a part where nothing arrives, and y
    of that place, with whether some factor on the way to it is 0; keep what is behind its lines,
    and whether it is a usual part."""
    LINE: tl.constexpr = line_layout(False, 1, E, NW)
    LINES: tl.constexpr = lines_layout(False, 1, NW)
    number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
    line = begin + (G - 1 - number if UP else number) * E
    low, high, past = ends
    ref, ref_e, usual = reference_of(low, high)
    terms = terms_of(
        kept, kept_y, stage, begin, n, line, ref, ref_e, ELEMENT, UP, False, 1, G, E, FULL, LINE,
        LINES,
    )  # fmt: skip
    if ELEMENT == "f32":  # kept in place of dy
        value = flat(lines_of(terms, 1, G, E), False, 1, G, E)
        kept.index(stage).store(gl.convert_layout(value, LINE))
    total = summed(terms, E, UP)
    s, behind = gl.associative_scan((total, gl.zeros_like(total)), 0, behind_sum)
    leaving = bared(s.to(gl.float64), low[None, :], ref[None, :])
    good = least(gl.where(finite(s) & usual[None, :], 1, 0))
    # Of a usual part only the step behind it can be so large.
    step = high.to(gl.float64) - past.to(gl.float64)
    shut = number * 0 + gl.where(step < NOTHING, 1, 0)[None, :]
    if good == 0:
        leaving, a, _behind, _passes = careful_totals(
            dy, y, tile, line, n, n, dy_steps[0], dy_steps[1], y_steps[1], dy_steps[2], y_steps[2],
            UP, False, 1, E, LINES,
        )  # fmt: skip
        shut = gl.where(a == 0.0, 1, 0)
    tell_last(target, leaving, leaving, False, G, LINES)
    near = gl.zeros_like(leaving) + low[None, :]
    tell_last(target + units.to(gl.int64), near, shut, True, G, LINES)
    kept_s.index(stage).store(behind)
    kept_good.index(stage).store(gl.full([G, 1], 0, gl.int32, LINES) + good)


@gluon.jit
def give_logs(
    dy, x, y, out, kept, kept_x, kept_y, kept_s, kept_good, dy_steps, x_steps, y_steps, out_steps,
    tile, place, begin, stage, last, n, ends, arriving, ELEMENT: tl.constexpr, UP: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """For `held_scans`: the gradients of a part, at which so much arrives in terms of y past it,
    f64 [G, 1] and the same for all lines."""
    LINE: tl.constexpr = line_layout(False, 1, E, NW)
    LINES: tl.constexpr = lines_layout(False, 1, NW)
    COPY: tl.constexpr = copy_layout(False, 1, E, ELEMENT, NW)
    number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
    line = begin + (G - 1 - number if UP else number) * E
    low, high, past = ends
    ref, ref_e, _usual = reference_of(low, high)
    arriving = gl.where(place > 0, arriving, 0.0)
    inward = gl.where(place > 0, brought(arriving, past[None, :], ref[None, :]), 0.0)
    if ELEMENT == "f32":
        terms = numbers_of(
            kept, stage, begin, n, 0.0, gl.float32, UP, False, 1, G, E, FULL, LINE, LINES
        )
    else:
        terms = terms_of(
            kept, kept_y, stage, begin, n, line, ref, ref_e, ELEMENT, UP, False, 1, G, E, FULL,
            LINE, LINES,
        )  # fmt: skip
    S = kept_s.index(stage).load(LINES) + inward.to(gl.float32)
    results, S = shares_of(
        terms, S, kept_x, last, begin, n, ref, ref_e, ELEMENT, UP, False, 1, G, E, FULL, LINE,
        LINES,
    )  # fmt: skip
    if least(gl.where(finite(S), kept_good.index(stage).load(LINES), 0)) == 1:
        store_part(
            out, kept, stage, results, tile, begin, 0, n, out_steps[0], out_steps[1], out_steps[2],
            UP, False, 1, G, E, FULL, LINE, COPY,
        )  # fmt: skip
    else:
        careful_part(
            dy, x, y, out, tile, line, n, n, dy_steps[0], dy_steps[1], x_steps[1], y_steps[1],
            out_steps[1], dy_steps[2], x_steps[2], y_steps[2], out_steps[2],
            gl.sum(gl.where(number == 0, arriving, 0.0), 0), UP, False, 1, G, E, LINES,
        )  # fmt: skip


@gluon.jit
def past_place(y, tile, begin, n, y_steps, UP: tl.constexpr, C: tl.constexpr):
    """y of the place past a part, as f32; 0 where there is none."""
    place = gl.minimum(begin + C, n) if UP else begin - 1
    return value_at(y, tile, 0, place, n, y_steps[0], y_steps[1], y_steps[2], False, 1)


@gluon.jit
def summed(terms, E: tl.constexpr, UP: tl.constexpr):
    """The sum of a line's terms, from its far end; see `block_of`."""
    B: tl.constexpr = block_of(E)
    for block in gl.static_range(0, E // B):
        total = terms[nth(block * B, E, UP)]
        for k in gl.static_range(block * B + 1, (block + 1) * B):
            total = terms[nth(k, E, UP)] + total
        if block == 0:
            all_s = total
        else:
            all_s = total + all_s
    return all_s


@gluon.jit
def shares_of(
    terms, S, kept_x, stage, begin, n, ref, ref_e, ELEMENT: tl.constexpr, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The gradients of a part's lines, at which S arrives, and S of their last places: it is not
    finite where any was not."""
    u = numbers_of(kept_x, stage, begin, n, 0.0, gl.float32, UP, SIDE, R, G, E, FULL, LINE, LINES)
    whole, part = -(ref_e + _POWER), -beyond_whole(ref, ref_e)
    results = ()
    for k in gl.static_range(0, E):
        S = terms[nth(k, E, UP)] + S
        # Where x is −∞ the share is 0.
        if ELEMENT == "f32":
            above = gl.maximum(
                u[nth(k, E, UP)], ref[None, :] - 104.0, propagate_nan=tl.PropagateNan.ALL
            )
            weight, power = split_exp(above, whole[None, :], part[None, :])
            half = power >> 1
            value = weight * power_of_two_f32(half) * power_of_two_f32(power - half) * S
        else:
            value = exp_of_difference(u[nth(k, E, UP)], ref[None, :], ELEMENT, -_POWER) * S
        if UP:
            results = (value,) + results
        else:
            results = results + (value,)
    return results, S


@gluon.jit
def least(values):
    return gl.min(gl.min(values, 0), 0)


@gluon.jit
def arrived_logs(
    heard_s, heard_low, lane, needed, base, first, programs, units, parts, place, past, next_past,
    before,
):  # fmt: skip
    """As `waves.arrived_from`: what arrives at this program's part of a wave, in terms of y `past`
    it, and at the wave after, in terms of y past this program's part of that one; `before` arrived
    at this wave. What goes from wave to wave counts where a row has all of a wave: then each
    program has a part of it, and may take its own y for a measure.

    The factor from one y to another is never 0 as long as both are finite. An infinity that passes
    a part with a factor that is 0, which its last bit tells, is multiplied by 0; a number is next
    to nothing there, so that nobody looks for such parts as long as all is finite."""
    s = heard_s.to(gl.float64, bitcast=True)
    low = (heard_low & -2).to(gl.float64, bitcast=True)
    end = gl.minimum(base + programs, units)
    own = first - place  # lane of the row's first part
    next_own = end - end % parts - base
    mine = (needed != 0) & (lane >= own) & (lane < first)
    others = (needed != 0) & (lane >= next_own)
    here = gl.where(mine, s * weight(past, low), 0.0)
    there = gl.where(others, s * weight(next_past, low), 0.0)
    here, there = gl.reduce((here, there), 0, both_added)
    here = gl.where(own < 0, here + before, here)
    there = gl.where(next_own < 0, there + before * decay(next_past, past), there)
    if (finite(here) & finite(there)) == 0:
        shut = (needed != 0) & ((heard_low & 1) != 0)
        shut_me, shut_next = gl.reduce(
            (gl.where(shut & (lane < first), lane, -1), gl.where(shut, lane, -1)), 0, both_last
        )
        to_me = gl.where(lane < shut_me, 0.0, weight(past, low))
        to_next = gl.where(lane < shut_next, 0.0, weight(next_past, low))
        here, there = gl.reduce(
            (gl.where(mine, s * to_me, 0.0), gl.where(others, s * to_next, 0.0)), 0, both_added
        )
        here = gl.where(own < 0, here + before * gl.where(shut_me < 0, 1.0, 0.0), here)
        fades = gl.where(shut_next < 0, decay(next_past, past), 0.0)
        there = gl.where(next_own < 0, there + before * fades, there)
    return here, there


@gluon.jit
def weight(a, b):
    """`ratio` of an f32 and f64 that f32 holds."""
    b = b.to(gl.float32)
    a = gl.zeros_like(b) + a
    return gl.where(a == b, 1.0, far_exp(a, b))


@gluon.jit
def decay(a, b):
    """`ratio` of f32 by f64, 0 only where their difference is infinite."""
    found = ratio(a.to(gl.float64), b.to(gl.float64))
    return gl.where((found == 0.0) & (a - b != -_INFINITY), _LEAST, found)


@gluon.jit
def part_of(i, first, programs, parts, n, UP: tl.constexpr, C: tl.constexpr):
    """The tile of rows of a program's i-th part, its first place, and how far it is from the far
    end."""
    tile, place = unit_of(i, first, programs, parts)
    return tile, begin_of(place, parts, n, UP, C), place


@gluon.jit
def ends_of(
    y, tile, begin, head, body, lane, n, row_dims, row_y, axis_y, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """y at the near and the far end of a part, and of the place past it, f32 [R]; 0 where there is
    none. All of the place past it, where it has none of a run's places."""
    last = gl.minimum(begin + C, body) - 1
    if UP:
        near, far, past = begin, last, last + 1
        if ANYWHERE:
            near = gl.minimum(begin, body)
            far = gl.maximum(near, last)
    else:
        near, far, past = last, begin, begin - 1
        if ANYWHERE:
            far = gl.minimum(begin, last)
            past = gl.minimum(begin, body) - 1
    return (
        value_at(y, tile, lane, near + head, n, row_dims, row_y, axis_y, SIDE, R),
        value_at(y, tile, lane, far + head, n, row_dims, row_y, axis_y, SIDE, R),
        value_at(y, tile, lane, past + head, n, row_dims, row_y, axis_y, SIDE, R),
    )


@gluon.jit
def value_at(
    pointer, tile, lane, place, n, row_dims, row_steps, axis_steps, SIDE: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """A tile's values at places of its rows, as f32; 0 where there are none."""
    at, there = address_of(tile, lane, place, n, row_dims, row_steps, axis_steps, SIDE, R)
    return gl.load(pointer + at, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def reference_of(low, high):
    """The reference of a part's rows, f32 [R], how many ln 2 it is, and whether it will do."""
    ref, e = even((low + high) * 0.5, gl.zeros_like(low))
    return ref, e, near_enough(low, high, ref)


@gluon.jit
def terms_of(
    kept, kept_y, stage, begin, n, line, ref, ref_e, ELEMENT: tl.constexpr, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """dy of a part's places in terms of the reference, E columns [G, R]."""
    d = numbers_of(kept, stage, begin, n, 0.0, gl.float32, UP, SIDE, R, G, E, FULL, LINE, LINES)
    v = numbers_of(kept_y, stage, begin, n, 0.0, gl.float32, UP, SIDE, R, G, E, FULL, LINE, LINES)
    whole, part = ref_e + _POWER, beyond_whole(ref, ref_e)
    terms = ()
    for j in gl.static_range(0, E):
        if ELEMENT == "f32":
            weight, power = split_exp(-v[j], whole[None, :], part[None, :])
            term = d[j] * powered(weight, power)
        else:
            term = d[j] * exp_of_difference(ref[None, :], v[j], ELEMENT, _POWER)
        if not FULL:
            term = gl.where(line + j < n, term, 0.0)
        terms = terms + (term,)
    return terms


@gluon.jit
def beyond_whole(ref, e):
    """What ref, which is e · ln 2 but for a rounding, has beyond e as a power of two."""
    return gl.fma(ref, gl.zeros_like(ref) + _LOG2_E, -e) + ref * _LOG2_E_MORE


@gluon.jit
def bared(s, low, ref):
    """What leaves a part's near end in terms of y there, f64."""
    return s * (far_exp(low, ref) * _DOWNWARDS)


@gluon.jit
def brought(s, past, ref):
    """What arrives in terms of y past a part, in terms of its reference."""
    return s * (far_exp(ref, past) * _UPWARDS)


@gluon.jit
def wide_exp(x, y):
    """exp(x − y) by f64: along a row its error may come again and again."""
    return gl.exp(x.to(gl.float64) - y.to(gl.float64))


@gluon.jit
def handed_on(s, ref, e, prior, prior_e):
    """What leaves a usual part in terms of its reference, in terms of the next one's."""
    wide: tl.constexpr = gl.float64
    return s * exp_between(ref.to(wide), e.to(wide), prior.to(wide), prior_e.to(wide))


@gluon.jit
def finite(s):
    return gl.abs(s) < _INFINITY


@triton.jit
def sum_and_least(s1, good1, s2, good2):
    return s1 + s2, tl.minimum(good1, good2)


@gluon.jit
def careful_totals(
    dy, y, tile, line, end, n, row_dims, row_dy, row_y, axis_dy, axis_y, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, E: tl.constexpr, LINES: tl.constexpr,
    ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """What each line and all behind it do to an S that arrives, [G, R], what is added and a
    factor; and what those behind it do alone. S is in terms of y of its own place."""
    lane = gl.arange(0, R, gl.SliceLayout(0, LINES))[None, :]
    s = (line * 0 + lane * 0).to(gl.float64)
    a = s + 1.0
    for k in range(0, E):
        place = place_of(line, k, end, UP, E, ANYWHERE)
        d, c = careful_place(
            dy, y, tile, lane, place, n, row_dims, row_dy, row_y, axis_dy, axis_y, UP, SIDE, R
        )
        s = d + c * s
        a = times(a, c)
    a, s, passes, behind = gl.associative_scan(
        (a, s, gl.zeros_like(s) + 1.0, gl.zeros_like(s)), 0, behind_factors
    )
    return s, a, behind, passes


@gluon.jit
def place_of(line, k, end, UP: tl.constexpr, E: tl.constexpr, ANYWHERE: tl.constexpr):
    """The k-th place of each line from its far end; -1 behind the end of a run."""
    place = line + (E - 1 - k if UP else k)
    if ANYWHERE:
        return gl.where(place < end, place, -1)
    else:
        return place


@triton.jit
def behind_factors(a1, s1, b1, p1, a2, s2, b2, p2):
    """As `behind_affine`."""
    return times(a1, a2), s2 + a2 * s1, times(a1, b2), p2 + b2 * s1


@gluon.jit
def careful_place(
    dy, y, tile, lane, place, n, row_dims, row_dy, row_y, axis_dy, axis_y, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dy of a place, and what S of the next is multiplied by, f64."""
    d = value_at(dy, tile, lane, place, n, row_dims, row_dy, axis_dy, SIDE, R)
    v = value_at(y, tile, lane, place, n, row_dims, row_y, axis_y, SIDE, R)
    after = place + 1 if UP else place - 1
    v_after = value_at(y, tile, lane, after, n, row_dims, row_y, axis_y, SIDE, R)
    c = ratio(v.to(gl.float64), v_after.to(gl.float64))
    goes_on = (place >= 0) & (place < n) & (after >= 0) & (after < n)
    return d.to(gl.float64), gl.where(goes_on, c, 1.0)


@gluon.jit
def careful_part(
    dy, x, y, out, tile, line, end, n, row_dims, row_dy, row_x, row_y, row_out, axis_dy, axis_x,
    axis_y, axis_out, arriving, UP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, LINES: tl.constexpr, ANYWHERE: tl.constexpr = False,
    NW: tl.constexpr = 1,
):  # fmt: skip
    """A part, place by place: `arriving`, f64 [R], is in terms of y past it. Returns what leaves it
    in terms of y at its near end. NW: so many warps each have all of it."""
    s, a, behind, passes = careful_totals(
        dy, y, tile, line, end, n, row_dims, row_dy, row_y, axis_dy, axis_y, UP, SIDE, R, E, LINES,
        ANYWHERE,
    )  # fmt: skip
    number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
    leaving = gl.sum(gl.where(number == G - 1, s + a * arriving[None, :], 0.0), 0)
    S = behind + passes * arriving[None, :]
    all_have_read(NW)
    lane = gl.arange(0, R, gl.SliceLayout(0, LINES))[None, :]
    for k in range(0, E):
        place = place_of(line, k, end, UP, E, ANYWHERE)
        d, c = careful_place(
            dy, y, tile, lane, place, n, row_dims, row_dy, row_y, axis_dy, axis_y, UP, SIDE, R
        )
        S = d + c * S
        u = value_at(x, tile, lane, place, n, row_dims, row_x, axis_x, SIDE, R).to(gl.float64)
        v = value_at(y, tile, lane, place, n, row_dims, row_y, axis_y, SIDE, R).to(gl.float64)
        value = gl.where(u == -_INFINITY, 0.0, gl.exp(u - v) * S)
        at, there = address_of(tile, lane, place, n, row_dims, row_out, axis_out, SIDE, R)
        element: tl.constexpr = out.dtype.element_ty
        if element == gl.bfloat16 or element == gl.float16:
            value = value.to(gl.float32)
        gl.store(out + at, value.to(element), mask=there)
    return leaving
