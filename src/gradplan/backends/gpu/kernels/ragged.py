"""The engines *map* and *row state then map* for rows that begin anywhere.

A row of 50257 halves begins at another place within 16 bytes each time, and read element by element
it takes eight times the loads. Here a row is its run, which begins and ends where 16 divides the
address and is read 16 bytes at a time, and its two edges before and behind it, of fewer elements
than 16 bytes hold. The arrays lie alike: the edges of a row are as long in each of them.

Columns are counted from the beginning of the run. Rows are cut into parts by columns; the first
part has the edges too. A place on the axis is not known: ties that go by it are not for this.
"""

import triton
import triton.language as tl

from .formulas import (
    apply,
    count_of_pairs,
    first_state,
    hits_of_pairs,
    mapped,
    merge,
    numbers,
    product_of_others,
    product_of_pairs,
    product_quotients,
    product_state,
    publish,
    row_scale,
    share_of_pairs,
    sums_of_groups,
    term,
)
from .rows import anywhere, in_cluster, join_tile, known_numbers, known_product
from .tiles import USUAL, by_row, cache_of, outer_offset, tile_row, widened, widened_again
from .waiting import alternate, arrive, await_opening, enter_cluster, leave, open_up, turn


@triton.constexpr_function
def run_length(pointer_type):
    """The elements of 16 bytes."""
    return 128 // pointer_type.element_ty.primitive_bitwidth


@triton.constexpr_function
def apart(mode):
    """The mode of an operand whose elements are read one by one."""
    return "s" if mode == "t" else mode


@triton.jit
def row_starts(pointer, MODE: tl.constexpr, outer, row, dims, steps, R: tl.constexpr):
    """Pointers [R, 1] to the first elements of rows; of one row that lies in a run a scalar, of
    which the compiler remembers what is said of its alignment."""
    if MODE == "n":
        return 0
    else:
        base = pointer + outer_offset(outer, dims, steps) + row * steps[0]
        if R == 1 and MODE == "t":
            return base
        else:
            return base + (tl.arange(0, R) * steps[0])[:, None]


@triton.jit
def rows_there(row, dims, R: tl.constexpr):
    """Which rows of a tile there are, [R]."""
    if R == 1:
        return tl.full((1,), True, tl.int1)
    else:
        return row + tl.arange(0, R) < dims[0]


@triton.jit
def runs_of(start, n):
    """How many elements of a row are before its run, and how many are in it: [R, 1] or scalars."""
    V: tl.constexpr = run_length(start.dtype)
    before = ((0 - start.to(tl.int64)) & 15) // (16 // V)
    head = tl.minimum(before.to(n.dtype), n)
    return head, (n - head) // V * V


@triton.jit
def in_run(start, MODE: tl.constexpr, head, begin, columns):
    """Pointers to columns of the run, counted from `begin`, a multiple of 16 bytes."""
    if MODE == "n" or by_row(MODE):
        return start
    else:
        if len(start.shape) == 0:
            return tl.multiple_of(start + head, 16) + begin + columns
        else:
            return tl.multiple_of(start + head, (16, 16)) + (begin + columns)


@triton.jit
def at_edges(start, MODE: tl.constexpr, place):
    if MODE == "n" or by_row(MODE):
        return start
    else:
        return start + place


@triton.jit
def read(source, MODE: tl.constexpr, mask, row_mask, other, CACHE: tl.constexpr = USUAL):
    """As it is stored; `other` where there is no element."""
    if MODE == "n":
        return 0.0
    elif by_row(MODE):
        return tl.load(source, mask=row_mask, other=0.0)
    else:
        return tl.load(source, mask=mask, other=other, eviction_policy=CACHE)


@triton.jit
def write(target, value, mask, R: tl.constexpr, C: tl.constexpr, SPENT: tl.constexpr = False):
    """Rounded once."""
    element: tl.constexpr = target.dtype.element_ty
    if element == tl.bfloat16 or element == tl.float16:
        value = value.to(tl.float32)
    value = tl.broadcast_to(value.to(element), (R, C))
    tl.store(target, value, mask=mask, eviction_policy=cache_of(SPENT))


@triton.jit
def edges_apart(head, body, n, row_mask, V: tl.constexpr):
    """The places [R, 2 · V] of both edges in their rows, and which there are: V lanes for each."""
    lane = tl.arange(0, 2 * V)[None, :]
    behind = head + body + (lane - V)
    place = tl.where(lane < V, lane, behind)
    return place, row_mask & tl.where(lane < V, lane < head, behind < n)


@triton.jit
def edges_of(head, body, n, row_mask, EDGES: tl.constexpr):
    """The places [R, EDGES] of both edges in their rows, one after the other, and which there
    are."""
    lane = tl.arange(0, EDGES)[None, :]
    return tl.where(lane < head, lane, lane + body), row_mask & (lane < n - body)


@triton.jit
def map_ragged(
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
):
    """Nothing depends on anything: a program takes one tile."""
    V: tl.constexpr = run_length(out.dtype)
    CACHE: tl.constexpr = cache_of(False, R == 1)
    steps = tl.cdiv(n, C).to(tl.int32)
    tile, part = tl.program_id(0) // steps, tl.program_id(0) % steps
    outer, row = tile_row(tile, row_dims, R)
    row_mask = rows_there(row, row_dims, R)[:, None]
    dy_at = row_starts(dy, DY, outer, row, row_dims, row_dy, R)
    x_at = row_starts(x, X, outer, row, row_dims, row_x, R)
    y_at = row_starts(y, Y, outer, row, row_dims, row_y, R)
    out_at = row_starts(out, OUT, outer, row, row_dims, row_out, R)
    out2_at = row_starts(out2, OUT2, outer, row, row_dims, row_out2, R)
    head, body = runs_of(out_at, n)
    begin = part.to(n.dtype) * C
    columns = tl.arange(0, C)[None, :]
    mask = row_mask & (columns < body - begin)
    map_tile(
        in_run(dy_at, DY, head, begin, columns), in_run(x_at, X, head, begin, columns),
        in_run(y_at, Y, head, begin, columns), in_run(out_at, OUT, head, begin, columns),
        in_run(out2_at, OUT2, head, begin, columns), mask, row_mask, p, q,
        KIND, ELEMENT, EXTREME, DY, X, Y, OUT2, R, C, CACHE,
    )  # fmt: skip
    if part == 0:
        place, there = edges_apart(head, body, n, row_mask, V)
        map_tile(
            at_edges(dy_at, DY, place), at_edges(x_at, X, place), at_edges(y_at, Y, place),
            at_edges(out_at, OUT, place), at_edges(out2_at, OUT2, place), there, row_mask, p, q,
            KIND, ELEMENT, EXTREME, apart(DY), apart(X), apart(Y), OUT2, R, 2 * V, USUAL,
        )  # fmt: skip


@triton.jit
def map_tile(
    dy, x, y, out, out2, mask, row_mask, p, q,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, EXTREME: tl.constexpr, DY: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT2: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = ELEMENT == "f64"
    a = widened(read(dy, DY, mask, row_mask, 0.0, CACHE), DY, WIDE)
    b = widened(read(x, X, mask, row_mask, 0.0, CACHE), X, WIDE)
    c = widened(read(y, Y, mask, row_mask, 0.0, CACHE), Y, WIDE)
    write(out, mapped(KIND, ELEMENT, EXTREME, a, b, c, p), mask, R, C)
    if OUT2 != "n":
        write(out2, mapped(KIND, ELEMENT, EXTREME, a, b, c, q), mask, R, C)


@triton.jit
def row_ragged(
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
    axis_y,
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
    EDGES: tl.constexpr,
    APART: tl.constexpr,
):
    """A tile of R rows by C columns, and the edges of its rows: the phases are those of
    `rows.row_tiles`, and so are states and counters. Edges have EDGES lanes, as many as they can
    be long together, or, APART, half of them each; 0 where 16 divides the address of each row, and
    its bytes."""
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
            ragged_tile(
                dy, x, y, out, joined, counter, row_dims, row_dy, row_x, row_y, row_out,
                n, p, q, parts, tile, part, total,
                KIND, TIES, ELEMENT, DY, X, Y, OUT, "second", R, C, W, 1, CAREFUL, PAIRS, PIECES,
                EDGES, APART,
            )  # fmt: skip
            leave(counter, parts)
        else:
            ragged_tile(
                dy, x, y, out, states, counter, row_dims, row_dy, row_x, row_y, row_out,
                n, p, q, parts, tile, part, total,
                KIND, TIES, ELEMENT, DY, X, Y, OUT, "partial", R, C, W, K, CAREFUL, PAIRS, PIECES,
                EDGES, APART,
            )  # fmt: skip
            if arrive(counter, parts):
                join_tile(
                    dy, y, states, joined, row_dims, row_dy, row_y, axis_dims, axis_dy, axis_y,
                    p, q, tile, total, parts, KIND, TIES, ELEMENT, DY, Y, R, K, False,
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
        ragged_tile(
            dy, x, y, out, states, counters, row_dims, row_dy, row_x, row_y, row_out,
            n, p, q, parts, tile, part, total,
            KIND, TIES, ELEMENT, DY, X, Y, OUT, PHASE, R, C, W, K, CAREFUL, PAIRS, PIECES, EDGES,
            APART,
        )  # fmt: skip


@triton.jit
def ragged_tile(
    dy, x, y, out, states, counter, row_dims, row_dy, row_x, row_y, row_out,
    n, p, q, parts, tile, part, total,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, CAREFUL: tl.constexpr, PAIRS: tl.constexpr,
    PIECES: tl.constexpr, EDGES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One part of a tile of rows, in pieces one after the other (see `rows.row_pieces`)."""
    Q: tl.constexpr = C // PIECES
    WIDE: tl.constexpr = ELEMENT == "f64"
    STATE: tl.constexpr = PHASE != "apply" and PHASE != "second"  # whether it learns one
    SPENT: tl.constexpr = PHASE == "second"  # whether nobody reads the tile again
    CACHE: tl.constexpr = cache_of(SPENT, True)
    if PHASE == "cluster":
        room = enter_cluster(K)
    outer, row = tile_row(tile, row_dims, R)
    lane = tl.arange(0, R)
    row_there = rows_there(row, row_dims, R)
    row_mask = row_there[:, None]
    dy_at = row_starts(dy, DY, outer, row, row_dims, row_dy, R)
    x_at = row_starts(x, X, outer, row, row_dims, row_x, R)
    y_at = row_starts(y, Y, outer, row, row_dims, row_y, R)
    out_at = row_starts(out, OUT, outer, row, row_dims, row_out, R)
    head, body = runs_of(out_at, n)
    begin = tl.zeros((), n.dtype)
    if PHASE != "whole":
        begin = part.to(n.dtype) * C
    if EDGES > 0:
        if APART:
            place, there = edges_apart(head, body, n, row_mask, EDGES // 2)
        else:
            place, there = edges_of(head, body, n, row_mask, EDGES)
        if PHASE != "whole":
            there &= part == 0
    slot = states
    if PHASE == "partial":
        slot += (tile.to(tl.int64) * parts + part) * R
    if not STATE:
        here = tile.to(tl.int64) * R + lane
    if KIND == "prod":
        product_tile(
            x_at, out_at, read(dy_at, DY, row_mask, row_mask, 0.0).to(tl.float64),
            states, slot, counter, head, body, begin, place, there, row_there,
            p, q, parts, tile, part, total, room if PHASE == "cluster" else 0,
            ELEMENT, X, OUT, PHASE, R, C, W, K, CAREFUL, EDGES,
        )  # fmt: skip
    else:
        # Of an operand with one value a row any column will do, and what `other` says is not hit.
        other_x = 0.0
        if KIND == "max" or KIND == "min":
            extreme = read(y_at, Y, row_mask, row_mask, 0.0)
            other_x = tl.where(extreme == 0.0, 1.0, 0.0).to(x.dtype.element_ty)
        raws = ()
        for i in tl.static_range(PIECES):
            columns = i * Q + tl.arange(0, Q)[None, :]
            mask = row_mask & (columns < body - begin)
            raw_a = read(in_run(dy_at, DY, head, begin, columns), DY, mask, row_mask, 0.0, CACHE)
            raw_b = read(in_run(x_at, X, head, begin, columns), X, mask, row_mask, other_x, CACHE)
            raw_c = read(in_run(y_at, Y, head, begin, columns), Y, mask, row_mask, 0.0, CACHE)
            raws += ((raw_a, raw_b, raw_c),)
        if EDGES > 0:
            edge_a = read(at_edges(dy_at, DY, place), DY, there, row_mask, 0.0)
            edge_b = read(at_edges(x_at, X, place), X, there, row_mask, other_x)
            edge_c = read(at_edges(y_at, Y, place), Y, there, row_mask, 0.0)
            edge_a = widened(edge_a, apart(DY), WIDE)
            edge_b = widened(edge_b, apart(X), WIDE)
            edge_c = widened(edge_c, apart(Y), WIDE)
        wide = ()
        hits = ()
        for i in tl.static_range(PIECES):
            a = widened(raws[i][0], DY, WIDE)
            b = widened(raws[i][1], X, WIDE)
            c = widened(raws[i][2], Y, WIDE)
            wide += ((a, b, c),)
            if PAIRS:
                hits += (hits_of_pairs(raws[i][1], raws[i][2], ELEMENT, R, Q),)
            if STATE:
                if PAIRS:
                    added = count_of_pairs(hits[i], R, Q, W, True)
                else:
                    added = tl.broadcast_to(term(KIND, ELEMENT, a, b, c), (R, Q))
                    added = sums_of_groups(added, R, Q, W, True)
                if i == 0:
                    sums = added
                else:
                    sums += added
        if STATE:
            if not PAIRS:
                sums = tl.sum(sums, 1).to(tl.float64)
                if ELEMENT != "f32" and ELEMENT != "f64":
                    if KIND != "max" and KIND != "min":
                        sums *= row_scale(ELEMENT)
            s0 = sums
            if EDGES > 0:
                edge = term(KIND, ELEMENT, edge_a, edge_b, edge_c)
                few = tl.sum(tl.broadcast_to(edge, (R, EDGES)).to(tl.float64), 1)
                if ELEMENT != "f32" and ELEMENT != "f64":
                    if KIND != "max" and KIND != "min":
                        few *= row_scale(ELEMENT)
                s0 += anywhere(few, R)
        if PHASE == "second":
            await_opening(counter)
        elif PHASE == "cluster":
            s0, _, _ = in_cluster(KIND, TIES, room, states, tile, part, parts, total, s0, s0, s0, K)
        elif PHASE == "partial":
            publish(KIND, slot + lane, total, s0, s0, s0)
        if PHASE != "partial":
            if STATE:
                k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s0, s0, a, c, p, q, row_there)
            else:
                k0, k1, k2 = known_numbers(states, here, total // parts, TIES, ELEMENT)
            for i in tl.static_range(PIECES):
                columns = i * Q + tl.arange(0, Q)[None, :]
                mask = row_mask & (columns < body - begin)
                target = in_run(out_at, OUT, head, begin, columns)
                if PAIRS:
                    value = share_of_pairs(hits[i], k0, ELEMENT, R, Q)
                    tl.store(target, value, mask=mask, eviction_policy=cache_of(SPENT))
                else:
                    # Widened anew, so that in between halves wait in half the registers.
                    a = widened_again(raws[i][0], DY, wide[i][0])
                    b = widened_again(raws[i][1], X, wide[i][1])
                    c = widened_again(raws[i][2], Y, wide[i][2])
                    value = apply(KIND, TIES, ELEMENT, k0, k1, k2, a, b, c, 0)
                    write(target, value, mask, R, Q, SPENT)
            if EDGES > 0:
                value = apply(KIND, TIES, ELEMENT, k0, k1, k2, edge_a, edge_b, edge_c, 0)
                write(at_edges(out_at, OUT, place), value, there, R, EDGES, SPENT)


@triton.jit
def product_tile(
    x_at, out_at, dy, states, slot, counter, head, body, begin, place, there, row_there,
    p, q, parts, tile, part, total, room,
    ELEMENT: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, CAREFUL: tl.constexpr,
    EDGES: tl.constexpr,
):  # fmt: skip
    """The same for a product: a pair multiplies in the registers of one thread."""
    H: tl.constexpr = C // 2
    WIDE: tl.constexpr = ELEMENT == "f64"
    STATE: tl.constexpr = PHASE != "apply" and PHASE != "second"
    SPENT: tl.constexpr = PHASE == "second"
    CACHE: tl.constexpr = cache_of(SPENT, True)
    row_mask = row_there[:, None]
    lane = tl.arange(0, R)
    first = tl.arange(0, H)[None, :]
    mask_a = row_mask & (first < body - begin)
    mask_b = row_mask & (first + H < body - begin)
    raw_a = read(in_run(x_at, X, head, begin, first), X, mask_a, row_mask, 1.0, CACHE)
    raw_b = read(in_run(x_at, X, head, begin + H, first), X, mask_b, row_mask, 1.0, CACHE)
    edge = widened(read(at_edges(x_at, X, place), X, there, row_mask, 1.0), apart(X), WIDE)
    a, b = widened(raw_a, X, WIDE), widened(raw_b, X, WIDE)
    if STATE:
        s0, s1, usual = product_of_pairs(ELEMENT, a, b, R, H, W, True)
        edge_a, edge_b = tl.split(tl.reshape(edge, (R, EDGES // 2, 2)))
        t0, t1, usual_too = product_of_pairs(ELEMENT, edge_a, edge_b, R, EDGES // 2, 1, True)
        usual &= usual_too
        none = tl.zeros((R,), tl.float64)
        s0, s1, s2 = merge(s0, s1, none, anywhere(t0, R), anywhere(t1, R), none)
        if not usual:
            s0, s1, s2 = careful_state(
                x_at, edge, head, body, begin, there, row_mask, ELEMENT, X, R, C, CAREFUL, EDGES
            )  # fmt: skip
    if PHASE == "second":
        await_opening(counter)
    elif PHASE == "cluster":
        s0, s1, s2 = in_cluster("prod", "", room, states, tile, part, parts, total, s0, s1, s2, K)
    elif PHASE == "partial":
        publish("prod", slot + lane, total, s0, s1, s2)
    if PHASE != "partial":
        if STATE:
            k0, k1, k2 = numbers("prod", "", ELEMENT, s0, s1, s2, dy, 0.0, p, q, row_there)
            divides = usual & (tl.min(k2, 0) != 0.0)
        else:
            here = tile.to(tl.int64) * R + lane
            k0, k1, k2 = known_numbers(states, here, total // parts, "", ELEMENT)
            divides = tl.min(k2, 0) != 0.0
        if divides:
            k0, k1 = anywhere(k0, R), anywhere(k1, R)
            a, b = widened_again(raw_a, X, a), widened_again(raw_b, X, b)
            a, b = product_quotients(ELEMENT, k0, k1, a, b)
            write(in_run(out_at, OUT, head, begin, first), a, mask_a, R, H, SPENT)
            write(in_run(out_at, OUT, head, begin + H, first), b, mask_b, R, H, SPENT)
            edge_a, edge_b = tl.split(tl.reshape(edge, (R, EDGES // 2, 2)))
            edge_a, edge_b = product_quotients(ELEMENT, k0, k1, edge_a, edge_b)
            edge = tl.reshape(tl.join(edge_a, edge_b), (R, EDGES))
            write(at_edges(out_at, OUT, place), edge, there, R, EDGES, SPENT)
        else:
            if not STATE:
                s0, s1, s2 = known_product(states, here, total // parts)
            careful_map(
                x_at, out_at, edge, head, body, begin, place, there, row_mask, s0, s1, s2, dy,
                ELEMENT, X, OUT, R, C, CAREFUL, EDGES,
            )  # fmt: skip


@triton.jit
def careful_state(
    x_at, edge, head, body, begin, there, row_mask,
    ELEMENT: tl.constexpr, X: tl.constexpr, R: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    EDGES: tl.constexpr,
):  # fmt: skip
    """The state of a tile with zeros, infinities, NaNs or extreme exponents, in small steps: x is
    read again, so that the usual way keeps its registers."""
    s0, s1, s2 = first_state(R)
    t0, t1, t2 = product_state(ELEMENT, edge, there, R, EDGES)
    s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    for step in range(0, C // H):
        columns = begin + step * H + tl.arange(0, H)[None, :]
        mask = row_mask & (columns < body)
        b = widened(read(x_at + head + columns, X, mask, row_mask, 1.0), apart(X), ELEMENT == "f64")
        t0, t1, t2 = product_state(ELEMENT, b, mask, R, H)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    return s0, s1, s2


@triton.jit
def careful_map(
    x_at, out_at, edge, head, body, begin, place, there, row_mask, s0, s1, s2, dy,
    ELEMENT: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """The gradient of such a tile."""
    edge = product_of_others(ELEMENT, s0, s1, s2, dy, edge)
    write(at_edges(out_at, OUT, place), edge, there, R, EDGES)
    for step in range(0, C // H):
        columns = begin + step * H + tl.arange(0, H)[None, :]
        mask = row_mask & (columns < body)
        b = widened(read(x_at + head + columns, X, mask, row_mask, 1.0), apart(X), ELEMENT == "f64")
        value = product_of_others(ELEMENT, s0, s1, s2, dy, b)
        write(out_at + head + columns, value, mask, R, H)
