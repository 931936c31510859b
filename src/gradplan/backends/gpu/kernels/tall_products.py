"""Products of a long axis beside few rows, in lines as in `tall`: x is read twice.

A thread multiplies what it has of a group of lines, two factors at a time, and keeps a significand
and an exponent a lane. A chunk in which some factor is not usual is taken again, line by line, some
lanes at a time. What is left of a chunk, and of a row, is three numbers: significand, exponent, and
what is odd.
"""

import triton
import triton.language as tl

from ..launch import interpreted
from .arithmetic import plain_parts
from .formulas import (
    first_state,
    merge,
    product_of_others,
    product_quotients,
    product_state,
    products_of_pairs,
    times_few_parts,
    usual_distance,
)
from .tall import chunk_of, leave_numbers, lines_of, number_of, of_rows, rounded
from .tiles import cache_of, widened
from .waiting import await_launch_before, let_next_begin, take_turn

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def tall_products(
    x,
    room,
    states,
    row_dims,
    row_x,
    n,
    width,
    chunks,
    each,
    ELEMENT: tl.constexpr,
    STAGES: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The products [part, chunk, N] of chunks; `room` is for three lines a program."""
    let_next_begin(EARLY)
    rows = row_dims[0]
    block, first, last, whole, left = chunk_of(tl.program_id(0), n, rows, width, chunks, each, G)
    x_at = lines_of(x, "c", block, row_dims, row_x)
    lane = tl.arange(0, L)
    offset = lane[:, None] + (tl.arange(0, G // 2) * width)[None, :]
    inside = (lane < width)[:, None] & (offset >= 0)
    m = tl.full((L,), 1.0, tl.float64)
    e = tl.zeros((L,), tl.int32)
    far = tl.zeros((L,), tl.uint32)
    for group in tl.range(first, last, num_stages=STAGES):
        a, b = pair_of_lines(x_at + group * (width * G), width, offset, inside, ELEMENT, G)
        m, e, far = times_lines(m, e, far, a, b, ELEMENT, L, G // 2)
    for begin in range(0, left, width):
        there = (lane < tl.minimum(width, left - begin))[:, None]
        a = line_of(x_at + (whole * (width * G) + begin), lane[:, None], there, ELEMENT)
        m, e, far = times_lines(m, e, far, a, tl.full((L, 1), 1.0, a.dtype), ELEMENT, L, 1)
    own = room + tl.program_id(0).to(tl.int64) * 3 * width
    if tl.max(far, 0) < usual_distance(ELEMENT):
        put_product(
            own + lane, lane < width, width, m, e.to(tl.float64), tl.zeros((L,), tl.float64)
        )
    else:
        Q: tl.constexpr = few_lanes(L)
        for piece in range(0, width, Q):
            some = piece + tl.arange(0, Q)
            s0, s1, s2 = first_state(Q)
            for line in range(first * G, last * G):
                there = (some < width)[:, None]
                s0, s1, s2 = times_line(s0, s1, s2, x_at + line * width, some, there, ELEMENT, Q)
            for begin in range(0, left, width):
                start = x_at + (whole * (width * G) + begin)
                there = (some < tl.minimum(width, left - begin))[:, None]
                s0, s1, s2 = times_line(s0, s1, s2, start, some, there, ELEMENT, Q)
            put_product(own + some, some < width, width, s0, s1, s2)
    tl.debug_barrier()
    fold_products(own, states, rows.to(tl.int32), width, F, H)


@triton.constexpr_function
def few_lanes(lanes):
    """Lanes of a line that are taken at a time where each of them takes many registers; there are
    none in the interpreter, which is slow."""
    return max(1, lanes // (2 if _INTERPRETED.value else 8))


@triton.jit
def line_of(start, offset, there, ELEMENT: tl.constexpr):
    """Elements of some lines, in f32 or f64; 1 where there is none."""
    told: tl.constexpr = cache_of(False, True)
    raw = tl.load(start + offset, mask=there, other=1.0, eviction_policy=told)
    return widened(raw, "c", ELEMENT == "f64")


@triton.jit
def pair_of_lines(start, width, offset, there, ELEMENT: tl.constexpr, G: tl.constexpr):
    """The two halves of a group of lines, whose factors are multiplied two by two."""
    a = line_of(start, offset, there, ELEMENT)
    return a, line_of(start + width * (G // 2), offset, there, ELEMENT)


@triton.jit
def times_lines(m, e, far, a, b, ELEMENT: tl.constexpr, L: tl.constexpr, H: tl.constexpr):
    """The products of lanes so far, times two halves [L, H] of a group; and the farthest from usual
    of their factors."""
    W: tl.constexpr = 1 if ELEMENT == "f64" else H  # so that they stay within f64
    t, more, away = products_of_pairs(ELEMENT, a, b, L, H, W, True)
    t, more = tl.reduce((t, more), 1, times_few_parts)
    m, above = plain_parts(m * t)
    return m, e + more + above, tl.maximum(far, tl.max(away, 1))


@triton.jit
def times_line(s0, s1, s2, start, lane, there, ELEMENT: tl.constexpr, L: tl.constexpr):
    """The same with one line more, whatever its factors are."""
    value = line_of(start, lane[:, None], there, ELEMENT)
    t0, t1, t2 = product_state(ELEMENT, value, there, L, 1)
    return merge(s0, s1, s2, t0, t1, t2)


@triton.jit
def fold_products(own, states, rows, width, F: tl.constexpr, H: tl.constexpr):
    """`tall.fold`, of products that are in memory."""
    program = tl.program_id(0).to(tl.int64)
    times = width // rows
    total = tl.num_programs(0).to(tl.int64) * rows
    for begin in range(0, rows, H):
        number = begin + tl.arange(0, H)
        turn = tl.arange(0, F)
        s0, s1, s2 = first_state(H)
        for after in range(0, times, F):
            there = (after + turn < times)[:, None] & (number < rows)[None, :]
            at = (after + turn)[:, None] * rows + number[None, :]
            t0, t1, t2 = product_at(own + at, there, width)
            t0, t1, t2 = tl.reduce((t0, t1, t2), 0, merge)
            s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
        put_product(states + program * rows + number, number < rows, total, s0, s1, s2)


@triton.jit
def product_at(slot, there, apart):
    """The three parts of products; those of 1 where there is none. What other threads have written
    a moment ago is not taken from the first cache."""
    s0 = tl.load(slot, mask=there, other=1.0, cache_modifier=".cg")
    s1 = tl.load(slot + apart, mask=there, other=0.0, cache_modifier=".cg")
    s2 = tl.load(slot + 2 * apart, mask=there, other=0.0, cache_modifier=".cg")
    return s0, s1, s2


@triton.jit
def put_product(slot, there, apart, s0, s1, s2):
    """Leave them."""
    tl.store(slot, s0, mask=there)
    tl.store(slot + apart, s1, mask=there)
    tl.store(slot + 2 * apart, s2, mask=there)


@triton.jit
def tall_product_numbers(
    dy,
    states,
    joined,
    row_dims,
    row_dy,
    p,
    q,
    chunks,
    total,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The `numbers` of rows [slot, row], from the products of their chunks; and behind them the
    products of rows [part, row]."""
    take_turn(EARLY)
    rows = row_dims[0]
    tiles = tl.cdiv(rows, R).to(tl.int32)
    block, begin = tl.program_id(0) // tiles, tl.program_id(0) % tiles * R
    number = begin.to(tl.int64) + tl.arange(0, R)
    there = number < rows
    some = tl.arange(0, K)
    first = states + block.to(tl.int64) * chunks * rows
    s0, s1, s2 = first_state(R)
    for chunk in range(0, chunks, K):
        mask = there[:, None] & (chunk + some < chunks)[None, :]
        at = (chunk + some)[None, :].to(tl.int64) * rows + number[:, None]
        t0, t1, t2 = product_at(first + at, mask, total * chunks)
        t0, t1, t2 = tl.reduce((t0, t1, t2), 1, merge)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    leave_numbers(
        dy, dy, joined, row_dims, row_dy, row_dy, p, q, total, block, number, there, s0, s1, s2,
        "prod", "", ELEMENT, DY, "n",
    )  # fmt: skip
    put_product(joined + 3 * total + block.to(tl.int64) * rows + number, there, total, s0, s1, s2)


@triton.jit
def tall_quotients(
    dy,
    x,
    out,
    joined,
    row_dims,
    row_dy,
    row_x,
    row_out,
    n,
    width,
    chunks,
    each,
    total,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    STAGES: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The gradients of the same lines, from the last on: those may still be in the cache."""
    await_launch_before(EARLY)
    rows = row_dims[0]
    block, first, last, whole, left = chunk_of(
        tl.num_programs(0) - 1 - tl.program_id(0), n, rows, width, chunks, each, G
    )
    x_at = lines_of(x, "c", block, row_dims, row_x)
    out_at = lines_of(out, "c", block, row_dims, row_out)
    lane = tl.arange(0, L)
    slot = number_of(joined, block, rows, lane % rows.to(tl.int32), ELEMENT)
    share, scale, easy = tl.load(slot), tl.load(slot + total), tl.load(slot + 2 * total)
    if tl.min(easy, 0) != 0.0:
        offset = lane[:, None] + (tl.arange(0, G // 2) * width)[None, :]
        inside = (lane < width)[:, None] & (offset >= 0)
        for group in tl.range(first, last, num_stages=STAGES):
            start = group * (width * G)
            a, b = pair_of_lines(x_at + start, width, offset, inside, ELEMENT, G)
            a, b = product_quotients(ELEMENT, share, scale, a, b)
            tl.store(out_at + start + offset, rounded(a, out), mask=inside)
            tl.store(out_at + start + width * (G // 2) + offset, rounded(b, out), mask=inside)
        for begin in range(0, left, width):
            start = whole * (width * G) + begin
            there = (lane < tl.minimum(width, left - begin))[:, None]
            a = line_of(x_at + start, lane[:, None], there, ELEMENT)
            a, b = product_quotients(ELEMENT, share, scale, a, tl.full((L, 1), 1.0, a.dtype))
            tl.store(out_at + start + lane[:, None], rounded(a, out), mask=there)
    else:
        dy_at = lines_of(dy, DY, block, row_dims, row_dy)
        products = joined + 3 * total + block.to(tl.int64) * rows
        Q: tl.constexpr = few_lanes(L)
        for piece in range(0, width, Q):
            some = piece + tl.arange(0, Q)
            number = some % rows.to(tl.int32)
            factor = of_rows(dy_at, DY, row_dy, number, some < width)
            s0, s1, s2 = product_at(products + number, some < width, total)
            for line in range(first * G, last * G):
                there = (some < width)[:, None]
                start = line * width
                put_others(
                    x_at + start, out_at + start, some, there, s0, s1, s2, factor, ELEMENT
                )  # fmt: skip
            for begin in range(0, left, width):
                there = (some < tl.minimum(width, left - begin))[:, None]
                start = whole * (width * G) + begin
                put_others(
                    x_at + start, out_at + start, some, there, s0, s1, s2, factor, ELEMENT
                )  # fmt: skip


@triton.jit
def put_others(x, out, lane, there, s0, s1, s2, factor, ELEMENT: tl.constexpr):
    """The gradients of a line, whatever its factors are."""
    value = line_of(x, lane[:, None], there, ELEMENT)
    value = product_of_others(ELEMENT, s0, s1, s2, factor[:, None], value)
    tl.store(out + lane[:, None], rounded(value, out), mask=there)
