"""The engines *map* and *row state then map*."""

import triton
import triton.language as tl

from .arithmetic import rough_quotient
from .formulas import (
    apply,
    first_state,
    inside,
    mapped,
    merge,
    plain_product,
    product_of_others,
    product_share,
    product_state,
    term,
    tile_state,
)
from .tiles import axis_offset, fetch, fetch_keeping, fetch_raw, put, widened, widened_again


@triton.jit
def map_tiles(
    dy,
    x,
    y,
    out,
    out2,
    row_dims,
    row_dy,
    row_x,
    row_y,
    row_out,
    row_out2,
    axis_dims,
    axis_dy,
    axis_x,
    axis_y,
    axis_out,
    axis_out2,
    n,
    p,
    q,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    EXTREME: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    OUT2: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """Nothing depends on anything: a program takes one tile."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    pid = tl.program_id(0)
    steps = tl.cdiv(n, C)
    tile = (pid // steps).to(tl.int64)
    tiles = tl.cdiv(row_dims[0], R)
    rows = (tile % tiles) * R + tl.arange(0, R)
    index = (pid % steps).to(n.dtype) * C + tl.arange(0, C)
    at = (tile // tiles, rows, index, rows < row_dims[0], index < n)
    a = fetch(dy, DY, at, (row_dims, row_dy, axis_dims, axis_dy), 0.0, WIDE, FULL)
    b = fetch(x, X, at, (row_dims, row_x, axis_dims, axis_x), 0.0, WIDE, FULL)
    c = fetch(y, Y, at, (row_dims, row_y, axis_dims, axis_y), 0.0, WIDE, FULL)
    value = mapped(KIND, ELEMENT, EXTREME, a, b, c, p)
    put(out, OUT, value, at, (row_dims, row_out, axis_dims, axis_out), R, C, FULL)
    if OUT2 != "n":
        value = mapped(KIND, ELEMENT, EXTREME, a, b, c, q)
        put(out2, OUT2, value, at, (row_dims, row_out2, axis_dims, axis_out2), R, C, FULL)


@triton.jit
def resident(
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
    axis_order,
    order_base,
    n,
    p,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """A tile holds whole rows: one read, the state, one write."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(row_dims[0], R)
    rows = (pid % tiles) * R + tl.arange(0, R)
    row_mask = rows < row_dims[0]
    index = tl.arange(0, C)
    mask = index < n
    at = (pid // tiles, rows, index, row_mask, mask)
    x_steps = (row_dims, row_x, axis_dims, axis_x)
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    raw_a = fetch_raw(dy, DY, at, (row_dims, row_dy, axis_dims, axis_dy), 0.0, FULL, "")
    raw_b = fetch_raw(x, X, at, x_steps, 1.0, FULL, "")
    a = widened(raw_a, DY, WIDE)
    b = widened(raw_b, X, WIDE)
    if KIND == "prod":
        m, exponent, ordinary = plain_product(ELEMENT, b, mask[None, :], R, C, FULL)
        share, usual = product_share(ELEMENT, m, exponent, a.to(tl.float64), row_mask)
        if usual & (tl.min(tl.where(row_mask & ~ordinary, 0, 1), 0) == 1):
            put(out, OUT, rough_quotient(share.to(b.dtype), b, ELEMENT), at, out_steps, R, C, FULL)
        else:
            careful_product(x, X, out, OUT, a, at, x_steps, out_steps, 0, n, ELEMENT, R, C)
    else:
        raw_c = fetch_raw(y, Y, at, (row_dims, row_y, axis_dims, axis_y), 0.0, FULL, "")
        c = widened(raw_c, Y, WIDE)
        order = ordered(index, axis_dims, axis_order, order_base, TIES)
        s0, _, _ = tile_state(KIND, TIES, ELEMENT, a, b, c, order, mask[None, :], R, C, FULL)
        # Widened anew, so that in between halves wait in half the registers.
        a, b, c = (
            widened_again(raw_a, DY, a),
            widened_again(raw_b, X, b),
            widened_again(raw_c, Y, c),
        )
        value = apply(KIND, TIES, ELEMENT, s0, a, b, c, order, n, p)
        put(out, OUT, value, at, out_steps, R, C, FULL)


@triton.jit
def careful_product(
    x,
    X: tl.constexpr,
    out,
    OUT: tl.constexpr,
    dy,
    at,
    x_steps,
    out_steps,
    begin,
    n,
    ELEMENT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """A product with zeros, infinities, NaNs or extreme exponents, in small steps: x is read
    again, so that the usual way keeps its registers."""
    H: tl.constexpr = small_step(R, C)
    s0, s1, s2 = first_state("prod", "", R)
    for step in range(0, C // H):
        index = begin + step * H + tl.arange(0, H)
        here = (at[0], at[1], index, at[3], index < n)
        b = fetch(x, X, here, x_steps, 1.0, ELEMENT == "f64", False)
        t0, t1, t2 = product_state(ELEMENT, b, (index < n)[None, :], R, H)
        s0, s1, s2 = merge("prod", "", s0, s1, s2, t0, t1, t2)
    for step in range(0, C // H):
        index = begin + step * H + tl.arange(0, H)
        here = (at[0], at[1], index, at[3], index < n)
        b = fetch(x, X, here, x_steps, 1.0, ELEMENT == "f64", False)
        value = product_of_others(ELEMENT, s0, s1, s2, dy, b)
        put(out, OUT, value, here, out_steps, R, H, False)


@triton.constexpr_function
def small_step(r, c):
    """Steps of the axis that make a tile of about 512 elements."""
    return min(c, max(1, 512 // r))


@triton.jit
def ordered(index, dims, steps, base, TIES: tl.constexpr):
    """The place of each element in C order over the reduced axes."""
    if TIES == "first" or TIES == "last":
        return (axis_offset(index, dims, steps) + base).to(index.dtype)[None, :]
    else:
        return index[None, :]


@triton.jit
def streamed(
    dy,
    x,
    y,
    out,
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
    axis_order,
    order_base,
    n,
    p,
    chunk,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    PHASE: tl.constexpr,
    SLOTS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    FULL: tl.constexpr,
):
    """Rows longer than a tile, in chunks of whole tiles.

    PHASE "fused" walks a whole row twice, the second time backwards, from what the caches still
    hold. Where rows alone cannot fill the machine, "partial" leaves the state of each chunk in
    `states` [slot, row tile, chunk, R], and "apply" joins them in order and maps its chunk.
    """
    WIDE: tl.constexpr = ELEMENT == "f64"
    SUM: tl.constexpr = KIND != "prod" and TIES != "first" and TIES != "last"
    chunks = tl.cdiv(n, chunk)
    pid = tl.program_id(0)
    if PHASE == "apply":
        # The last chunks that were read are the first to be mapped.
        pid = tl.num_programs(0) - 1 - pid
    part = pid % chunks
    tile = (pid // chunks).to(tl.int64)
    tiles = tl.cdiv(row_dims[0], R)
    outer = tile // tiles
    lane = tl.arange(0, R)
    rows = (tile % tiles) * R + lane
    row_mask = rows < row_dims[0]
    begin = part.to(n.dtype) * chunk
    steps = tl.cdiv(tl.minimum(n - begin, chunk), C)
    width = tl.full((), C, n.dtype)
    dy_steps = (row_dims, row_dy, axis_dims, axis_dy)
    x_steps = (row_dims, row_x, axis_dims, axis_x)
    y_steps = (row_dims, row_y, axis_dims, axis_y)
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    s0, s1, s2 = first_state(KIND, TIES, R)
    # What is read twice should stay in the cache until it is.
    LATER: tl.constexpr = "evict_last" if PHASE == "fused" else ""
    DONE: tl.constexpr = "evict_first"
    if PHASE != "apply":
        if SUM:
            sums = tl.zeros((R, C), tl.int32 if KIND == "max" or KIND == "min" else tl.float64)
            for step in range(0, steps):
                index = begin + width * step + tl.arange(0, C)
                mask = index < n
                at = (outer, rows, index, row_mask, mask)
                a = fetch_keeping(dy, DY, at, dy_steps, 0.0, WIDE, FULL, LATER)
                b = fetch_keeping(x, X, at, x_steps, 1.0, WIDE, FULL, LATER)
                c = fetch_keeping(y, Y, at, y_steps, 0.0, WIDE, FULL, LATER)
                sums += inside(term(KIND, ELEMENT, a, b, c), mask[None, :], R, C, FULL)
            s0 = tl.sum(sums, 1).to(tl.float64)
        else:
            for step in range(0, steps):
                index = begin + width * step + tl.arange(0, C)
                mask = index < n
                at = (outer, rows, index, row_mask, mask)
                a = fetch(dy, DY, at, dy_steps, 0.0, WIDE, FULL)
                b = fetch(x, X, at, x_steps, 1.0, WIDE, FULL)
                c = fetch(y, Y, at, y_steps, 0.0, WIDE, FULL)
                order = ordered(index, axis_dims, axis_order, order_base, TIES)
                t0, t1, t2 = tile_state(
                    KIND, TIES, ELEMENT, a, b, c, order, mask[None, :], R, C, FULL
                )
                s0, s1, s2 = merge(KIND, TIES, s0, s1, s2, t0, t1, t2)
    if PHASE == "partial":
        total = tl.num_programs(0).to(tl.int64) * R
        slot = states + (tile * chunks + part) * R + lane
        tl.store(slot, s0)
        if SLOTS > 1:
            tl.store(slot + total, s1)
            tl.store(slot + 2 * total, s2)
    else:
        if PHASE == "apply":
            total = tl.num_programs(0).to(tl.int64) * R
            if SUM:
                joined = tl.zeros((R, K), tl.float64)
                for k in range(0, chunks, K):
                    one = k + tl.arange(0, K)
                    slots = states + (tile * chunks + one[None, :]) * R + lane[:, None]
                    joined += tl.load(slots, mask=one[None, :] < chunks, other=0.0)
                s0 = tl.sum(joined, 1)
            else:
                for k in range(0, chunks):
                    slot = states + (tile * chunks + k) * R + lane
                    t0 = tl.load(slot)
                    if SLOTS > 1:
                        t1 = tl.load(slot + total)
                        t2 = tl.load(slot + 2 * total)
                    else:
                        t1 = s1
                        t2 = s2
                    s0, s1, s2 = merge(KIND, TIES, s0, s1, s2, t0, t1, t2)
        if KIND == "prod":
            a = fetch(dy, DY, (outer, rows, rows, row_mask, row_mask), dy_steps, 0.0, True, FULL)
            share, usual = product_share(
                ELEMENT, s0, tl.minimum(tl.maximum(s1, -2000.0), 2000.0).to(tl.int32), a, row_mask
            )
            usual = usual & (tl.max(tl.where(row_mask, s2, 0.0), 0) == 0.0)
        for step in range(0, steps):
            start = begin + width * (steps - 1 - step)
            index = start + tl.arange(0, C)
            at = (outer, rows, index, row_mask, index < n)
            if KIND == "prod":
                if usual:
                    b = fetch(x, X, at, x_steps, 1.0, WIDE, FULL)
                    put(
                        out,
                        OUT,
                        rough_quotient(share.to(b.dtype), b, ELEMENT),
                        at,
                        out_steps,
                        R,
                        C,
                        FULL,
                    )
                else:
                    H: tl.constexpr = small_step(R, C)
                    for some in range(0, C // H):
                        near = start + some * H + tl.arange(0, H)
                        here = (outer, rows, near, row_mask, near < n)
                        d = fetch(x, X, here, x_steps, 1.0, WIDE, False)
                        value = product_of_others(ELEMENT, s0, s1, s2, a, d)
                        put(out, OUT, value, here, out_steps, R, H, False)
            else:
                a = fetch_keeping(dy, DY, at, dy_steps, 0.0, WIDE, FULL, DONE)
                b = fetch_keeping(x, X, at, x_steps, 1.0, WIDE, FULL, DONE)
                c = fetch_keeping(y, Y, at, y_steps, 0.0, WIDE, FULL, DONE)
                order = ordered(index, axis_dims, axis_order, order_base, TIES)
                value = apply(KIND, TIES, ELEMENT, s0, a, b, c, order, n, p)
                put(out, OUT, value, at, out_steps, R, C, FULL)
