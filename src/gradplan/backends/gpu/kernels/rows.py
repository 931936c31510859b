"""The engines *map* and *row state then map*."""

import triton
import triton.language as tl

from .formulas import (
    apply,
    count_of_pairs,
    first_state,
    hits_of_pairs,
    in_f64,
    in_groups,
    join,
    join_told,
    mapped,
    merge,
    numbers,
    product_of_others,
    product_of_pairs,
    product_of_row,
    product_quotients,
    product_state,
    products_of_pairs,
    publish,
    row_scale,
    share_of_pairs,
    sums_of_groups,
    term,
    tile_state,
    told,
    told_of_none,
)
from .tiles import (
    axis_offset,
    by_row,
    cache_of,
    fetch,
    fetch_raw,
    nearby,
    place,
    put,
    tile_rows,
    widened,
    widened_again,
)
from .waiting import (
    alternate,
    arrive,
    await_opening,
    enter_cluster,
    exchange,
    leave,
    meet_cluster,
    open_up,
    turn,
)


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
    NEAR: tl.constexpr,
    FULL: tl.constexpr,
):
    """Nothing depends on anything: a program takes one tile."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    pid = tl.program_id(0)
    steps = tl.cdiv(n, C).to(tl.int32)
    outer, rows = tile_rows(pid // steps, row_dims, R)
    begin = (pid % steps).to(n.dtype) * C
    index = begin + tl.arange(0, C)
    near = nearby(pid // steps, row_dims, begin, R, C, NEAR)
    at = (outer, rows, index, rows < row_dims[0], index < n, near)
    CACHE: tl.constexpr = cache_of(False, R == 1)
    a = fetch(dy, DY, at, (row_dims, row_dy, axis_dims, axis_dy), 0.0, WIDE, FULL, CACHE)
    b = fetch(x, X, at, (row_dims, row_x, axis_dims, axis_x), 0.0, WIDE, FULL, CACHE)
    c = fetch(y, Y, at, (row_dims, row_y, axis_dims, axis_y), 0.0, WIDE, FULL, CACHE)
    value = mapped(KIND, ELEMENT, EXTREME, a, b, c, p)
    put(out, OUT, value, at, (row_dims, row_out, axis_dims, axis_out), R, C, FULL)
    if OUT2 != "n":
        value = mapped(KIND, ELEMENT, EXTREME, a, b, c, q)
        put(out2, OUT2, value, at, (row_dims, row_out2, axis_dims, axis_out2), R, C, FULL)


@triton.jit
def row_tiles(
    dy,
    x,
    y,
    out,
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
    axis_order,
    order_base,
    n,
    p,
    q,
    parts,
    lead,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    PHASE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    CAREFUL: tl.constexpr,
    PAIRS: tl.constexpr,
    PIECES: tl.constexpr,
    NEAR: tl.constexpr,
    FULL: tl.constexpr,
):
    """A program loads a tile of R rows by C places, learns the state of its rows, and maps it.

    PHASE "whole": the tile holds whole rows: one read, the state, one write. Longer rows are cut
    into `parts` tiles, whose states meet in `states` [slot, row tile, part, R]. "cluster": the
    programs of a row wait for each other with their tiles in registers, so still one read; what
    they tell each other of a single row goes from one shared memory to the others. "lagged": every
    tile is read twice, by two programs, the second so shortly after the first that it finds the
    tile in the cache; what it must know of its rows the last of the first left behind the states.
    "partial", `join_rows` and "apply" do the same in three launches, and give the same bits.

    PAIRS: full tiles of halves, of max and min, whose ties share. PIECES: in how many pieces a tile
    of one row is taken, see `row_pieces`; 0: it is not for such a tile.
    """
    pid = tl.program_id(0)
    if PHASE == "lagged":
        count = tl.num_programs(0) // 2
        second, pid = alternate(turn(counters), count, lead)
        tile, part = pid // parts, pid % parts
        total = count.to(tl.int64) * R
        joined = states + (4 if KIND == "prod" else 1) * total
        counter = counters + 1 + tile
        if second:
            part = parts - 1 - part  # what was read last is the surest to be in the cache
            row_tile(
                dy, x, y, out, joined, counter, row_dims, row_dy, row_x, row_y, row_out,
                axis_dims, axis_dy, axis_x, axis_y, axis_out, axis_order, order_base,
                n, p, q, parts, tile, part, total,
                KIND, TIES, ELEMENT, DY, X, Y, OUT, "second", R, C, W, 1, CAREFUL, PAIRS, NEAR,
                FULL,
            )  # fmt: skip
            leave(counter, parts)
        else:
            row_tile(
                dy, x, y, out, states, counter, row_dims, row_dy, row_x, row_y, row_out,
                axis_dims, axis_dy, axis_x, axis_y, axis_out, axis_order, order_base,
                n, p, q, parts, tile, part, total,
                KIND, TIES, ELEMENT, DY, X, Y, OUT, "partial", R, C, W, K, CAREFUL, PAIRS, NEAR,
                FULL,
            )  # fmt: skip
            if arrive(counter, parts):
                join_tile(
                    dy, y, states, joined, row_dims, row_dy, row_y, axis_dims, axis_dy, axis_y,
                    p, q, tile, total, parts, KIND, TIES, ELEMENT, DY, Y, R, K, FULL,
                )  # fmt: skip
                open_up(counter, parts)
    else:
        if PHASE == "apply":
            pid = tl.num_programs(0) - 1 - pid  # what was read last may still be in the cache
        if PHASE == "whole":
            tile, part = pid, 0
        else:
            tile, part = pid // parts, pid % parts
        total = tl.num_programs(0).to(tl.int64) * R
        if PIECES > 0 and KIND == "prod":
            product_pieces(
                dy, x, out, states, row_dims, row_dy, row_x, row_out,
                axis_dims, axis_dy, axis_x, axis_out, n, p, q, parts, tile, part, total,
                ELEMENT, DY, X, OUT, PHASE, C, W, K, CAREFUL, PIECES, NEAR, FULL,
            )  # fmt: skip
        elif PIECES > 0:
            row_pieces(
                dy, x, y, out, states, row_dims, row_dy, row_x, row_y, row_out,
                axis_dims, axis_dy, axis_x, axis_y, axis_out, n, p, q, parts, tile, part, total,
                KIND, ELEMENT, DY, X, Y, OUT, PHASE, C, W, K, PIECES, NEAR,
            )  # fmt: skip
        else:
            row_tile(
                dy, x, y, out, states, counters, row_dims, row_dy, row_x, row_y, row_out,
                axis_dims, axis_dy, axis_x, axis_y, axis_out, axis_order, order_base,
                n, p, q, parts, tile, part, total,
                KIND, TIES, ELEMENT, DY, X, Y, OUT, PHASE, R, C, W, K, CAREFUL, PAIRS, NEAR,
                FULL,
            )  # fmt: skip


@triton.jit
def row_pieces(
    dy, x, y, out, states, row_dims, row_dy, row_x, row_y, row_out,
    axis_dims, axis_dy, axis_x, axis_y, axis_out, n, p, q, parts, tile, part, total,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    OUT: tl.constexpr, PHASE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    PIECES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """A full tile of one row, whose state is a sum: in pieces one after the other. Of a whole tile
    the compiler works out each step of a formula for all elements before the next step, and the
    assembler leaves it so, which takes twice the registers."""
    Q: tl.constexpr = C // PIECES
    CACHE: tl.constexpr = cache_of(False, True)
    WIDE: tl.constexpr = ELEMENT == "f64"
    start = tl.zeros((), n.dtype)
    if PHASE == "cluster":
        room = enter_cluster(K)
        start = part.to(n.dtype) * C
    outer, rows = tile_rows(tile, row_dims, 1)
    row_mask = rows < row_dims[0]
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    places = ()
    raws = ()
    for i in tl.static_range(PIECES):
        begin = start + i * Q
        index = begin + tl.arange(0, Q)
        at = (outer, rows, index, row_mask, index < n, nearby(tile, row_dims, begin, 1, Q, NEAR))
        raw_a = fetch_raw(dy, DY, at, (row_dims, row_dy, axis_dims, axis_dy), 0.0, True, CACHE)
        raw_b = fetch_raw(x, X, at, (row_dims, row_x, axis_dims, axis_x), 1.0, True, CACHE)
        raw_c = fetch_raw(y, Y, at, (row_dims, row_y, axis_dims, axis_y), 0.0, True, CACHE)
        places += (at,)
        raws += ((raw_a, raw_b, raw_c),)
    wide = ()
    for i in tl.static_range(PIECES):
        a = widened(raws[i][0], DY, WIDE)
        b = widened(raws[i][1], X, WIDE)
        c = widened(raws[i][2], Y, WIDE)
        wide += ((a, b, c),)
        added = sums_of_groups(term(KIND, ELEMENT, a, b, c), 1, Q, W, OUT == "t")
        if i == 0:
            sums = added
        else:
            sums += added
    s0 = tl.sum(sums, 1) * row_scale(ELEMENT)
    if PHASE == "cluster":
        s0, _, _ = in_cluster(KIND, "", room, states, tile, part, parts, total, s0, s0, s0, K)
    k0, k1, k2 = numbers(KIND, "", ELEMENT, s0, s0, s0, a, c, p, q, row_mask)
    for i in tl.static_range(PIECES):
        a = widened_again(raws[i][0], DY, wide[i][0])
        b = widened_again(raws[i][1], X, wide[i][1])
        c = widened_again(raws[i][2], Y, wide[i][2])
        value = apply(KIND, "", ELEMENT, k0, k1, k2, a, b, c, 0)
        put(out, OUT, value, places[i], out_steps, 1, Q, True)


@triton.jit
def product_pieces(
    dy, x, out, states, row_dims, row_dy, row_x, row_out, axis_dims, axis_dy, axis_x, axis_out,
    n, p, q, parts, tile, part, total,
    ELEMENT: tl.constexpr, DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr,
    PHASE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    CAREFUL: tl.constexpr, PIECES: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The same for a product, of which a tile need not be full. What is not usual is read again,
    when the tile needs no registers any more."""
    H: tl.constexpr = C // 2 // PIECES
    CACHE: tl.constexpr = cache_of(False, True)
    WIDE: tl.constexpr = ELEMENT == "f64"
    start = tl.zeros((), n.dtype)
    if PHASE == "cluster":
        room = enter_cluster(K)
        start = part.to(n.dtype) * C
    outer, rows = tile_rows(tile, row_dims, 1)
    row_mask = rows < row_dims[0]
    x_steps = (row_dims, row_x, axis_dims, axis_x)
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    places = ()
    raws = ()
    for i in tl.static_range(PIECES):
        begin = start + i * 2 * H
        at_a, at_b = halves_of(tile, outer, rows, row_mask, row_dims, begin, n, 1, H, NEAR)
        raw_a = fetch_raw(x, X, at_a, x_steps, 1.0, FULL, CACHE)
        raw_b = fetch_raw(x, X, at_b, x_steps, 1.0, FULL, CACHE)
        places += ((at_a, at_b),)
        raws += ((raw_a, raw_b),)
    at_a, at_b = places[0]
    here = (outer, rows, at_a[2], row_mask, row_mask, at_a[5])
    factor = fetch(dy, DY, here, (row_dims, row_dy, axis_dims, axis_dy), 0.0, True, FULL)
    wide = ()
    for i in tl.static_range(PIECES):
        a = factors(raws[i][0], X, places[i][0][2], n, WIDE, 1, H, FULL)
        b = factors(raws[i][1], X, places[i][1][2], n, WIDE, 1, H, FULL)
        wide += ((a, b),)
        m, e, far = products_of_pairs(ELEMENT, a, b, 1, H, W, OUT == "t")
        if i == 0:
            ms, es, fars = m, e, far
        else:
            ms, es, fars = ms * m, es + e, tl.maximum(fars, far)
    fars = tl.max(in_groups(fars, 1, H, W, OUT == "t"), 2)
    s0, s1, usual = product_of_row(ELEMENT, ms, es, fars, PIECES)
    s1 = s1.to(tl.float64)
    s2 = tl.zeros((1,), tl.float64)
    if PHASE == "cluster":
        if not usual:
            s0, s1, s2 = careful_state(x, X, at_a, x_steps, start, n, ELEMENT, 1, C, CAREFUL)
        s0, s1, s2 = in_cluster("prod", "", room, states, tile, part, parts, total, s0, s1, s2, K)
    k0, k1, k2 = numbers("prod", "", ELEMENT, s0, s1, s2, factor, 0.0, p, q, row_mask)
    if PIECES == 1:
        if usual & (tl.min(k2, 0) != 0.0):
            put_quotients(
                out, OUT, places[0], out_steps, raws[0], wide[0], k0, k1,
                X, ELEMENT, 1, H, FULL, False, True,
            )  # fmt: skip
        else:
            careful_product(
                x, X, out, OUT, at_a, x_steps, out_steps, start, n, s0, s1, s2, factor, usual,
                PHASE, ELEMENT, C, CAREFUL,
            )  # fmt: skip
    elif usual & (tl.min(k2, 0) == 2.0):
        for i in tl.static_range(PIECES):
            put_quotients(
                out, OUT, places[i], out_steps, raws[i], wide[i], k0, k1,
                X, ELEMENT, 1, H, FULL, False, False,
            )  # fmt: skip
    elif usual & (tl.min(k2, 0) != 0.0):
        for i in tl.static_range(PIECES):
            put_quotients(
                out, OUT, places[i], out_steps, raws[i], wide[i], k0, k1,
                X, ELEMENT, 1, H, FULL, False, True,
            )  # fmt: skip
    else:
        careful_product(
            x, X, out, OUT, at_a, x_steps, out_steps, start, n, s0, s1, s2, factor, usual,
            PHASE, ELEMENT, C, CAREFUL,
        )  # fmt: skip


@triton.jit
def careful_product(
    x, X: tl.constexpr, out, OUT: tl.constexpr, at, x_steps, out_steps, begin, n, s0, s1, s2, dy,
    usual, PHASE: tl.constexpr, ELEMENT: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """A row of which something is not usual; a cluster has seen to its state."""
    if PHASE != "cluster" and not usual:
        s0, s1, s2 = careful_state(x, X, at, x_steps, begin, n, ELEMENT, 1, C, H)
    careful_map(
        x, X, out, OUT, at, x_steps, out_steps, begin, n, s0, s1, s2, dy, ELEMENT, 1, C, H
    )  # fmt: skip


@triton.jit
def in_cluster(
    KIND: tl.constexpr, TIES: tl.constexpr, room, states, tile, part, parts, total, s0, s1, s2,
    K: tl.constexpr,
):  # fmt: skip
    """The state of a row, of which each program of a cluster has a part."""
    first = 0
    if KIND == "prod":
        first = states + tile.to(tl.int64) * parts
    number = told(KIND, first + part + tl.arange(0, 1), total, s0, s1, s2)
    heard = exchange(room, tl.sum(number, 0), told_of_none(KIND, TIES), K)
    s0, s1, s2 = join_told(KIND, TIES, heard, first, total, K)
    return anywhere(s0, 1), anywhere(s1, 1), anywhere(s2, 1)


@triton.jit
def halves_of(
    tile, outer, rows, row_mask, row_dims, begin, n,
    R: tl.constexpr, H: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Where the two halves of a product's tile are: a pair multiplies in the registers of one
    thread."""
    first = begin + tl.arange(0, H)
    second = first + H
    near_a = nearby(tile, row_dims, begin, R, H, NEAR)
    near_b = nearby(tile, row_dims, begin + H, R, H, NEAR)
    at_a = (outer, rows, first, row_mask, first < n, near_a)
    return at_a, (outer, rows, second, row_mask, second < n, near_b)


@triton.jit
def put_quotients(
    out, OUT: tl.constexpr, places, out_steps, raws, values, share, scale,
    X: tl.constexpr, ELEMENT: tl.constexpr, R: tl.constexpr, H: tl.constexpr, FULL: tl.constexpr,
    SPENT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The gradients of both halves, where dividing is all there is to do."""
    share, scale = anywhere(share, R), anywhere(scale, R)
    a = tl.broadcast_to(widened_again(raws[0], X, values[0]), (R, H))
    b = tl.broadcast_to(widened_again(raws[1], X, values[1]), (R, H))
    a, b = product_quotients(ELEMENT, share, scale, a, b, SCALED)
    put(out, OUT, a, places[0], out_steps, R, H, FULL, SPENT)
    put(out, OUT, b, places[1], out_steps, R, H, FULL, SPENT)


@triton.jit
def anywhere(number, R: tl.constexpr):
    """The number of each row, of a single one for any arrangement of threads: otherwise the
    compiler moves the tile to where the number is, through shared memory."""
    if R == 1:
        return tl.full((1,), tl.max(number, 0), number.dtype)
    else:
        return number


@triton.jit
def factors(
    raw, X: tl.constexpr, index, n, WIDE: tl.constexpr,
    R: tl.constexpr, H: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What is multiplied, 1 where there is no element."""
    value = tl.broadcast_to(widened(raw, X, WIDE), (R, H))
    if by_row(X) and not FULL:  # one value a row, beyond its end too
        value = tl.where((index < n)[None, :], value, 1.0)
    return value


@triton.jit
def row_tile(
    dy, x, y, out, states, counter, row_dims, row_dy, row_x, row_y, row_out,
    axis_dims, axis_dy, axis_x, axis_y, axis_out, axis_order, order_base,
    n, p, q, parts, tile, part, total,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, CAREFUL: tl.constexpr, PAIRS: tl.constexpr,
    NEAR: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One part of a tile of rows, in one of the phases of `row_tiles`; "second" is the second read
    of "lagged". `total` is the number of states of all parts."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    STATE: tl.constexpr = PHASE != "apply" and PHASE != "second"  # whether it learns one
    SPENT: tl.constexpr = PHASE == "second"  # whether nobody reads the tile again
    CACHE: tl.constexpr = cache_of(SPENT, True)
    if PHASE == "cluster" and R == 1:
        room = enter_cluster(K)
    begin = tl.zeros((), n.dtype)
    if PHASE != "whole":
        begin = part.to(n.dtype) * C
    outer, rows = tile_rows(tile, row_dims, R)
    row_mask = rows < row_dims[0]
    lane = tl.arange(0, R)
    dy_steps = (row_dims, row_dy, axis_dims, axis_dy)
    x_steps = (row_dims, row_x, axis_dims, axis_x)
    y_steps = (row_dims, row_y, axis_dims, axis_y)
    out_steps = (row_dims, row_out, axis_dims, axis_out)
    slot = states
    if PHASE != "whole" and not (PHASE == "cluster" and R == 1):
        slot += (tile.to(tl.int64) * parts + part) * R
    if KIND == "prod":
        H: tl.constexpr = C // 2
        at_a, at_b = halves_of(tile, outer, rows, row_mask, row_dims, begin, n, R, H, NEAR)
        raw_a = fetch_raw(x, X, at_a, x_steps, 1.0, FULL, CACHE)
        raw_b = fetch_raw(x, X, at_b, x_steps, 1.0, FULL, CACHE)
        here = (outer, rows, at_a[2], row_mask, row_mask, at_a[5])
        factor = fetch(dy, DY, here, dy_steps, 0.0, True, FULL)
        a = factors(raw_a, X, at_a[2], n, WIDE, R, H, FULL)
        b = factors(raw_b, X, at_b[2], n, WIDE, R, H, FULL)
        if STATE:
            s0, s1, usual = product_of_pairs(ELEMENT, a, b, R, H, W, OUT == "t")
            s2 = tl.zeros((R,), tl.float64)
            if not usual:
                s0, s1, s2 = careful_state(x, X, at_a, x_steps, begin, n, ELEMENT, R, C, CAREFUL)
    else:
        index = begin + tl.arange(0, C)
        mask = index < n
        at = (outer, rows, index, row_mask, mask, nearby(tile, row_dims, begin, R, C, NEAR))
        raw_a = fetch_raw(dy, DY, at, dy_steps, 0.0, FULL, CACHE)
        raw_b = fetch_raw(x, X, at, x_steps, 1.0, FULL, CACHE)
        raw_c = fetch_raw(y, Y, at, y_steps, 0.0, FULL, CACHE)
        a, b, c = widened(raw_a, DY, WIDE), widened(raw_b, X, WIDE), widened(raw_c, Y, WIDE)
        order = ordered(index, axis_dims, axis_order, order_base, TIES)
        if PAIRS:
            hits = hits_of_pairs(raw_b, raw_c, ELEMENT, R, C)
        if STATE and PAIRS:
            s0 = count_of_pairs(hits, R, C, W, OUT == "t")
            s1 = s0
            s2 = s0
        elif STATE:
            s0 = tile_state(
                KIND, TIES, ELEMENT, a, b, c, order, mask[None, :], R, C, W, OUT == "t", FULL
            )
            s1 = s0
            s2 = s0
    if PHASE == "second":
        await_opening(counter)
    elif PHASE == "cluster" and R == 1:
        s0, s1, s2 = in_cluster(KIND, TIES, room, states, tile, part, parts, total, s0, s1, s2, K)
    elif PHASE == "cluster":
        publish(KIND, slot + lane, total, s0, s1, s2)
        meet_cluster()
        first = states + tile.to(tl.int64) * parts * R
        s0, s1, s2 = join(KIND, TIES, first, total, parts, R, K)
    elif PHASE == "partial":
        publish(KIND, slot + lane, total, s0, s1, s2)
    if PHASE != "partial":
        if STATE:
            if KIND == "prod":
                k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, factor, 0.0, p, q, row_mask)
            else:
                k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, a, c, p, q, row_mask)
        else:
            here = tile.to(tl.int64) * R + lane
            total = total // parts
            k0, k1, k2 = known_numbers(states, here, total, TIES, ELEMENT)
        if KIND == "prod":
            if tl.min(k2, 0) != 0.0:
                put_quotients(
                    out, OUT, (at_a, at_b), out_steps, (raw_a, raw_b), (a, b), k0, k1,
                    X, ELEMENT, R, H, FULL, SPENT, True,
                )  # fmt: skip
            else:
                if not STATE:
                    s0, s1, s2 = known_product(states, here, total)
                careful_map(
                    x, X, out, OUT, at_a, x_steps, out_steps, begin, n, s0, s1, s2, factor,
                    ELEMENT, R, C, CAREFUL,
                )  # fmt: skip
        elif PAIRS:
            value = share_of_pairs(hits, k0, ELEMENT, R, C)
            tl.store(place(out, OUT, at, out_steps), value, eviction_policy=cache_of(SPENT))
        else:
            # Widened anew, so that in between halves wait in half the registers.
            a = widened_again(raw_a, DY, a)
            b = widened_again(raw_b, X, b)
            c = widened_again(raw_c, Y, c)
            value = apply(KIND, TIES, ELEMENT, k0, k1, k2, a, b, c, order)
            put(out, OUT, value, at, out_steps, R, C, FULL, SPENT)


@triton.jit
def careful_state(
    x,
    X: tl.constexpr,
    at,
    x_steps,
    begin,
    n,
    ELEMENT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
):
    """The state of a tile with zeros, infinities, NaNs or extreme exponents, in small steps: x is
    read again, so that the usual way keeps its registers."""
    s0, s1, s2 = first_state(R)
    for step in range(0, C // H):
        index = begin + step * H + tl.arange(0, H)
        here = (at[0], at[1], index, at[3], index < n)
        b = fetch(x, X, here, x_steps, 1.0, ELEMENT == "f64", False)
        t0, t1, t2 = product_state(ELEMENT, b, (index < n)[None, :], R, H)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    return s0, s1, s2


@triton.jit
def careful_map(
    x,
    X: tl.constexpr,
    out,
    OUT: tl.constexpr,
    at,
    x_steps,
    out_steps,
    begin,
    n,
    s0,
    s1,
    s2,
    dy,
    ELEMENT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
):
    """The gradient of such a tile."""
    for step in range(0, C // H):
        index = begin + step * H + tl.arange(0, H)
        here = (at[0], at[1], index, at[3], index < n)
        b = fetch(x, X, here, x_steps, 1.0, ELEMENT == "f64", False)
        value = product_of_others(ELEMENT, s0, s1, s2, dy, b)
        put(out, OUT, value, here, out_steps, R, H, False)


@triton.jit
def ordered(index, dims, steps, base, TIES: tl.constexpr):
    """The place of each element in C order over the reduced axes."""
    if TIES == "first" or TIES == "last":
        return (axis_offset(index, dims, steps) + base).to(index.dtype)[None, :]
    else:
        return index[None, :]


@triton.jit
def join_rows(
    dy,
    y,
    states,
    joined,
    row_dims,
    row_dy,
    row_y,
    axis_dims,
    axis_dy,
    axis_y,
    p,
    q,
    parts,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    Y: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """The numbers [slot, row tile, R] of rows cut into parts, from their states [slot, row tile,
    part, R]."""
    total = tl.num_programs(0).to(tl.int64) * parts * R
    join_tile(
        dy, y, states, joined, row_dims, row_dy, row_y, axis_dims, axis_dy, axis_y,
        p, q, tl.program_id(0), total, parts, KIND, TIES, ELEMENT, DY, Y, R, K, False,
    )  # fmt: skip


@triton.jit
def join_tile(
    dy, y, states, joined, row_dims, row_dy, row_y, axis_dims, axis_dy, axis_y,
    p, q, tile, total, parts, KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr,
    DY: tl.constexpr, Y: tl.constexpr, R: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The same of one row tile. Three `numbers`, and of products the three parts of their state."""
    outer, rows = tile_rows(tile, row_dims, R)
    row_mask = rows < row_dims[0]
    lane = tl.arange(0, R)
    at = (outer, rows, lane, row_mask, row_mask)
    WIDE: tl.constexpr = ELEMENT == "f64" or KIND == "prod"
    a, c = 0.0, 0.0
    if by_row(DY):
        a = fetch(dy, DY, at, (row_dims, row_dy, axis_dims, axis_dy), 0.0, WIDE, FULL)
    if by_row(Y):
        c = fetch(y, Y, at, (row_dims, row_y, axis_dims, axis_y), 0.0, WIDE, FULL)
    start = states + tile.to(tl.int64) * parts * R
    s0, s1, s2 = join(KIND, TIES, start, total, parts, R, K)
    k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, a, c, p, q, row_mask)
    total = total // parts
    here = tile.to(tl.int64) * R + lane
    slot = number_slots(joined, TIES, ELEMENT) + here
    tl.store(slot, k0)
    tl.store(slot + total, k1)
    tl.store(slot + 2 * total, k2)
    if KIND == "prod":
        slot = joined + 3 * total + here
        tl.store(slot, s0)
        tl.store(slot + total, s1)
        tl.store(slot + 2 * total, s2)


@triton.jit
def number_slots(joined, TIES: tl.constexpr, ELEMENT: tl.constexpr):
    if in_f64(ELEMENT, TIES):
        return joined
    else:
        return joined.to(tl.pointer_type(tl.float32))


@triton.jit
def known_numbers(joined, here, total, TIES: tl.constexpr, ELEMENT: tl.constexpr):
    """What `join_tile` left. Another program may have written next to it a moment ago: not from
    the first cache."""
    slot = number_slots(joined, TIES, ELEMENT) + here
    k0 = tl.load(slot, cache_modifier=".cg")
    k1 = tl.load(slot + total, cache_modifier=".cg")
    k2 = tl.load(slot + 2 * total, cache_modifier=".cg")
    return k0, k1, k2


@triton.jit
def known_product(joined, here, total):
    slot = joined + 3 * total + here
    s0 = tl.load(slot, cache_modifier=".cg")
    s1 = tl.load(slot + total, cache_modifier=".cg")
    s2 = tl.load(slot + 2 * total, cache_modifier=".cg")
    return s0, s1, s2
