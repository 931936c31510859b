"""The engine *recurrence* for long rows that lie in memory one element after the other.

A row is cut into tiles, a program each, which is read once: a program tells what its tile does to
an S that arrives from behind, waits for what arrives, and goes on with what it has read. Lines are
those of `lines`. What waits is kept as it was read, so that many programs can wait at a time.
"""

import triton
import triton.language as tl

from ..launch import interpreted
from .arithmetic import exp_of_difference, weight_below
from .line_memory import (
    bit_of,
    columns_of,
    edge_of,
    line_of,
    masks_of,
    raw_line_of,
    row_base,
    store_lines,
    words_of,
)
from .line_scans import (
    chosen,
    even,
    factors,
    last_gated,
    leads,
    mask,
    mode_of,
    near_enough,
    prefixes,
    shifted,
    steps_up,
    through,
    within,
)
from .log_tiles import careful_logs
from .stretches import LEAST, NOTHING, affine, fading, larger, opened
from .tiles import tile_row
from .waiting import in_order

_INTERPRETED = tl.constexpr(interpreted())
_INFINITY = tl.constexpr(float("inf"))
_NOT_TOLD = tl.constexpr(-1)
_SOME_NAN = tl.constexpr(0x7FF8 << 48)
_ONE = tl.constexpr(0x3FF0 << 48)


@triton.jit
def scan_chain(
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
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    LEVELS: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    PAIRS: tl.constexpr,
    FULL: tl.constexpr,
):
    """A tile of M lines, by W warps; the rest are those of `arriving_at`.

    All rows go on from their far ends side by side: what a tile waits for began long before.
    """
    C: tl.constexpr = M * V
    UP: tl.constexpr = not FLIP
    MODE: tl.constexpr = mode_of(KIND)
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    # As in `lines_chunk`.
    POWER: tl.constexpr = 0 if WIDE else 32
    UPWARDS: tl.constexpr = 2.0**POWER
    DOWNWARDS: tl.constexpr = 2.0**-POWER
    tiles = tl.cdiv(n, C).to(tl.int32)
    rows = tl.num_programs(0) // tiles
    turn = in_order(told)
    told += 1
    place = turn // rows  # from the far end
    row = turn % rows
    carried = place > 0
    begin = (place if FLIP else tiles - 1 - place).to(n.dtype) * C
    outer, first = tile_row(row, row_dims, 1)
    number = tl.arange(0, M)
    start = begin + (number if FLIP else M - 1 - number) * V
    after = start + V if UP else start - 1
    before = start - 1 if UP else start + V
    here = first + number * 0
    there = here < row_dims[0]
    dy_base = row_base(outer, here, row_dims, row_dy, False)
    out_base = row_base(outer, here, row_dims, row_out, False)
    if X != "n":
        x_base = row_base(outer, here, row_dims, row_x, False)
    if Y != "n" and Y != "b":
        y_base = row_base(outer, here, row_dims, row_y, False)
    d_raw = raw_line_of(dy, dy_base, axis_dy, start, there, n, False, V, FULL)
    u_raw, v_raw, u_edge, v_edge = d_raw, d_raw, start, start
    if MODE == "affine":
        u_raw = raw_line_of(x, x_base, axis_x, start, there, n, False, V, FULL)
        v_raw = raw_line_of(y, y_base, axis_y, start, there, n, False, V, FULL)
        u_edge = edge_of(x, x_base, axis_x, after, there, n, TYPE, False)
        v_edge = edge_of(y, y_base, axis_y, before, there, n, TYPE, False)
    elif Y == "b":
        v_raw, v_edge = words_of(y, outer, here, row_dims, start, there, n, UP, False, V)
    elif MODE == "gate":
        v_raw = raw_line_of(y, y_base, axis_y, start, there, n, False, V, FULL)
        v_edge = edge_of(y, y_base, axis_y, after, there, n, TYPE, False)
        if TIES == "first":
            u_edge = edge_of(y, y_base, axis_y, before, there, n, TYPE, False)
        else:
            u_raw = raw_line_of(x, x_base, axis_x, start, there, n, False, V, FULL)
            u_edge = edge_of(x, x_base, axis_x, after, there, n, TYPE, False)
    if KIND == "log_cumsum_exp":
        u_raw = raw_line_of(x, x_base, axis_x, start, there, n, False, V, FULL)
        v = line_of(y, y_base, axis_y, start, there, n, TYPE, False, M, V, FULL)
        last = tl.minimum(begin + C, n) - 1
        near_end = begin if UP else last
        far_end = last if UP else begin
        past = last + 1 if UP else begin - 1
        y_row = row_base(outer, first, row_dims, row_y, False)
        inside = first < row_dims[0]
        # y never falls, and a NaN stays: its ends tell all.
        low = edge_of(y, y_row, axis_y, near_end, inside, n, TYPE, False)
        high = edge_of(y, y_row, axis_y, far_end, inside, n, TYPE, False)
        y_past = edge_of(y, y_row, axis_y, past, inside, n, TYPE, False).to(tl.float64)
        ref, _ = even((high + low) * 0.5, tl.zeros_like(low))
        usual = near_enough(low, high, ref)
        d = columns_of(d_raw.to(TYPE), M, V)
        terms = ()
        for j in tl.static_range(0, V):
            term = d[j] * exp_of_difference(ref, v[j], ELEMENT, POWER)
            if not FULL:
                term = tl.where(start + j < n, term, 0.0)
            terms = terms + (term,)
        d = terms
        f = d
    else:
        d, f, w = steps_of(
            d_raw, u_raw, v_raw, u_edge, v_edge, start, n,
            KIND, MODE, "marked" if Y == "b" else TIES, ELEMENT, TYPE, UP, PAIRS, FULL, M, V,
        )  # fmt: skip
    s, a = prefixes(d, f, MODE, UP, V)
    leaving = s[0] if UP else s[V - 1]
    gain = a[0] if UP else a[V - 1]
    # Across lines: what is behind each (b, p), and what all do together.
    nothing = tl.zeros_like(leaving)
    if MODE == "sum":
        all_s = tl.associative_scan(leaving, 0, added)
        p = preceding(all_s, number, nothing)
        b = p
        total_s = final(all_s).to(tl.float64)
        total_a = tl.full((), 1.0, tl.float64)
    else:
        all_a, all_s = tl.associative_scan(
            (gain, leaving), 0, affine if MODE == "affine" else last_gated
        )
        b = preceding(all_a, number, tl.zeros_like(gain) + (1.0 if MODE == "affine" else -1))
        p = preceding(all_s, number, nothing)
        total_a, total_s = final(all_a), final(all_s)
        if MODE == "gate":
            total_a = tl.where(total_a != 0, 1.0, 0.0)
        total_a = total_a.to(tl.float64)
        total_s = total_s.to(tl.float64)
    if KIND == "log_cumsum_exp":
        span = begin + tl.arange(0, C)
        lane = tl.arange(0, 1)
        at = (outer, first + lane, span, first + lane < row_dims[0], span < n)
        sound = tl.where(usual & (tl.abs(total_s.to(TYPE)) < _INFINITY), 1, 0)
        if sound == 1:
            total_a = tl.exp(low.to(tl.float64) - y_past)
            # 0 only where the step behind the tile is so large: what is infinite stays so.
            some = (total_a == 0.0) & (high.to(tl.float64) - y_past >= NOTHING)
            total_a = tl.where(some, LEAST, total_a)
            total_s = total_s * tl.exp((low - ref).to(tl.float64)) * DOWNWARDS
            arriving = arriving_at(
                told, row, rows, place, tiles, total_a, total_s, KIND, B, LEVELS, T, W
            )
            inward = tl.where(carried, arriving * tl.exp(ref.to(tl.float64) - y_past) * UPWARDS, 0)
            inward = inward.to(TYPE)
            zero = nothing_of(arriving, place, tiles)
            g = ()
            for j in tl.static_range(0, V):
                g = g + (later(d[j], zero, "f64" if WIDE else "f32"),)
            u = columns_of(later(u_raw, zero, ELEMENT).to(TYPE), M, V)
            s, a = prefixes(g, g, MODE, UP, V)
            behind = p + inward
            results = ()
            largest = tl.zeros_like(behind)
            for j in tl.static_range(0, V):
                S = s[j] + behind
                # An S that overflows on the way shows here; where x is −∞ the weight is 0.
                largest = tl.maximum(largest, tl.abs(S))
                results = results + (weight_below(u[j], ref, ELEMENT, -POWER) * S,)
            # A NaN is no largest: it shows in what arrives, or before in what leaves.
            if (tl.max(largest, 0) < _INFINITY) & (tl.abs(inward) < _INFINITY):
                store_lines(
                    out, out_base, axis_out, start, there, n, results, False, M, V, FULL, False
                )
            else:
                sound = sound * 0
        else:
            own_a, own_s = careful_logs(
                (dy, x, y, out),
                (row_dims, row_dy, axis_dims, axis_dy),
                (row_dims, row_x, axis_dims, axis_x),
                (row_dims, row_y, axis_dims, axis_y),
                (row_dims, row_out, axis_dims, axis_out),
                at, n, tl.zeros((1,), tl.float64), "t", "t", "t", "t", "partial", FLIP, 1, C, True,
            )  # fmt: skip
            arriving = arriving_at(
                told, row, rows, place, tiles, tl.sum(own_a, 0), tl.sum(own_s, 0),
                KIND, B, LEVELS, T, W,
            )  # fmt: skip
        if sound == 0:
            careful_logs(
                (dy, x, y, out),
                (row_dims, row_dy, axis_dims, axis_dy),
                (row_dims, row_x, axis_dims, axis_x),
                (row_dims, row_y, axis_dims, axis_y),
                (row_dims, row_out, axis_dims, axis_out),
                at, n, tl.where(carried, arriving, 0.0) + tl.zeros((1,), tl.float64),
                "t", "t", "t", "t", "apply", FLIP, 1, C, True,
            )  # fmt: skip
    else:
        arriving = arriving_at(
            told, row, rows, place, tiles, total_a, total_s, KIND, B, LEVELS, T, W
        )
        inward = tl.where(carried, arriving, 0.0).to(TYPE)
        behind = tl.where(carried, through(MODE, p, b, inward + nothing), p)
        zero = nothing_of(arriving, place, tiles)
        d, f, w = steps_of(
            later(d_raw, zero, ELEMENT), later(u_raw, zero, ELEMENT),
            later(v_raw, zero, "f32" if Y == "b" else ELEMENT), u_edge, v_edge, start, n,
            KIND, MODE, "marked" if Y == "b" else TIES, ELEMENT, TYPE, UP, PAIRS, FULL, M, V,
        )  # fmt: skip
        if MODE == "affine":
            S = behind
            results = ()
            for j in tl.static_range(0, V):
                if UP:
                    S = d[V - 1 - j] + f[V - 1 - j] * S
                    results = (w[V - 1 - j] * S,) + results
                else:
                    S = d[j] + f[j] * S
                    results = results + (w[j] * S,)
        else:
            s, a = prefixes(d, f, MODE, UP, V)
            results = ()
            for j in tl.static_range(0, V):
                S = through(MODE, s[j], a[j], behind)
                if MODE == "gate":
                    S = chosen(w[j], S)
                results = results + (S,)
        store_lines(out, out_base, axis_out, start, there, n, results, False, M, V, FULL, False)


@triton.jit
def preceding(values, number, first):
    """Of each line, what the one behind it has."""
    return tl.where(number > 0, tl.gather(values, tl.maximum(number - 1, 0), 0), first)


@triton.jit
def final(values):
    """What the last has."""
    return tl.sum(tl.gather(values, tl.full((1,), values.shape[0] - 1, tl.int32), 0), 0)


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def steps_of(
    d_raw, u_raw, v_raw, u_edge, v_edge, start, n,
    KIND: tl.constexpr, MODE: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr,
    TYPE: tl.constexpr, UP: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr,
    M: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of each place what is added, what S of the next place is multiplied by (or gated), and what
    is multiplied with S in the end, in memory order."""
    NEAR: tl.constexpr = 0 if UP else V - 1
    d = columns_of(d_raw.to(TYPE), M, V)
    if not FULL:
        d = within(d, start, n, V)
    c = d
    w = d
    if MODE == "affine":
        c = shifted(columns_of(u_raw.to(TYPE), M, V), u_edge, UP, V)
        w = shifted(columns_of(v_raw.to(TYPE), M, V), v_edge, not UP, V)
    elif MODE == "gate":
        if TIES == "marked":
            w = masks_of(v_raw, V)
            after = bit_of(v_edge, 0 if UP else V - 1)
        elif TIES == "first":
            v = columns_of(v_raw.to(TYPE), M, V)
            w, after = steps_up(KIND, TIES, v, u_edge, v_edge, UP, V)
        else:
            w = columns_of(leads(u_raw, v_raw, ELEMENT, PAIRS), M, V)
            after = mask((u_edge == v_edge) | (u_edge != u_edge))
        c = shifted(w, after, UP, V)
    f = d
    if MODE != "sum":
        f = factors(c, start, n, MODE, UP, V, FULL)
        weights = ()
        for j in tl.static_range(0, V):
            weight = w[j]
            if not FULL or j == NEAR:
                previous = start + j - 1 if UP else start + j + 1
                begins = (previous < 0) | (previous >= n)
                if MODE == "affine":
                    weight = tl.where(begins, 1.0, weight)
                else:
                    weight = weight | mask(begins)
            weights = weights + (weight,)
        w = weights
    return d, f, w


@triton.jit
def nothing_of(arriving, place, tiles):
    """0, which only shows when something has arrived."""
    bits = arriving.to(tl.int64, bitcast=True)
    return tl.where((bits == _NOT_TOLD) & (place >= tiles), 1, 0)


@triton.jit
def later(values, zero, ELEMENT: tl.constexpr):
    """The same values, in a way that no assembler sees through: what is computed from them anew
    is not kept in registers instead of them."""
    if _INTERPRETED:
        return values
    elif ELEMENT == "f64":
        return tl.inline_asm_elementwise(
            "{ .reg .b64 z; cvt.u64.u32 z, $2; xor.b64 $0, $1, z; }", "=l,l,r", [values, zero],
            dtype=values.dtype, is_pure=True, pack=1,
        )  # fmt: skip
    elif ELEMENT == "f32":
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [values, zero],
            dtype=values.dtype, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [values, zero],
            dtype=values.dtype, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def arriving_at(
    told, row, rows, place, tiles, a, s,
    KIND: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Tell what this tile does to an S that arrives (s + a · S), and the S that arrives here.

    That is joined from what each tile behind this one has told, in their order. B tiles make a
    stretch, whose last tile tells what they do together; so do B stretches, and so on, in LEVELS.
    Of what is nearest this tile is joined one by one, what is further by stretches, and further
    by longer ones: nobody waits for one that waits for what arrives in turn. There are never more
    than T of them.
    """
    each = stretches(tiles, LEVELS, B)  # tiles and stretches of a row
    total = rows.to(tl.int64) * each
    own = told + row.to(tl.int64) * each
    tell(own + place, total, a, s, KIND)
    for level in tl.static_range(1, LEVELS):
        if (place + 1) % (B**level) == 0:
            mates = tl.arange(0, B)
            first = own + stretches(tiles, level - 1, B) + (place // (B**level)) * B
            mate_a, mate_s = hear(first + mates, total, mates < B, KIND, max(1, B // (32 * W)))
            all_a, all_s = folded(mate_a, mate_s, KIND)
            target = own + stretches(tiles, level, B) + place // (B**level)
            tell(target, total, all_a, all_s, KIND)
    lane = tl.arange(0, T)
    source = lane * 0
    needed = lane < 0
    begin = place * 0  # of the longest stretches
    before = place * 0
    for level in tl.static_range(LEVELS - 1, -1, -1):
        # All but the last whole stretch, which may not be told yet.
        end = place if level == 0 else tl.maximum(place // (B**level) - 1, 0)
        at = begin + lane - before
        inside = (lane >= before) & (at < end)
        source = tl.where(inside, stretches(tiles, level, B) + at, source)
        needed = needed | inside
        before += end - begin
        begin = end * B
    each_a, each_s = hear(own + source, total, needed, KIND, max(1, T // (32 * W)))
    if KIND == "extremum":
        each_s = tl.where(needed, each_s, -_INFINITY)
    a, s = folded(each_a, each_s, KIND)
    return s


@triton.jit
def stretches(tiles, LEVELS: tl.constexpr, B: tl.constexpr):
    """How many tiles and stretches of a row there are below a level."""
    found = tiles * 0
    count = tiles
    for _ in tl.static_range(0, LEVELS):
        found += count
        count = tl.cdiv(count, B)
    return found


@triton.jit
def tell(target, total, a, s, KIND: tl.constexpr):
    """Store both, which no reader takes for what is not told yet."""
    store_told(target, s)
    if KIND != "cumsum" and KIND != "extremum":
        store_told(target + total, a)


@triton.jit
def store_told(target, value):
    bits = value.to(tl.int64, bitcast=True)
    bits = tl.where(bits == _NOT_TOLD, _SOME_NAN, bits)
    tl.atomic_xchg(target, bits, sem="relaxed", scope="gpu")


@triton.jit
def hear(sources, total, needed, KIND: tl.constexpr, E: tl.constexpr):
    """What was told of those that are needed, not before it is; nothing is done by the others.

    A thread has E of them, and asks for all at once.
    """
    a = tl.full(sources.shape, 1.0, tl.float64)
    if _INTERPRETED:
        s = tl.load(sources, mask=needed, other=0)
        if KIND != "cumsum" and KIND != "extremum":
            a = tl.load(sources + total, mask=needed, other=_ONE).to(tl.float64, bitcast=True)
    elif KIND == "cumsum" or KIND == "extremum":
        s = tl.inline_asm_elementwise(
            asking(E, 1),
            asked(E, 1),
            [sources.to(tl.int64), needed.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=E,
        )
    else:
        s, bits = tl.inline_asm_elementwise(
            asking(E, 2),
            asked(E, 2),
            [sources.to(tl.int64), (sources + total).to(tl.int64), needed.to(tl.int32)],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=E,
        )
        a = bits.to(tl.float64, bitcast=True)
    return a, s.to(tl.float64, bitcast=True)


@triton.constexpr_function
def asking(count, words):
    """Load `count` times 1 or 2 words until none of them is what is not told yet."""
    each, every = range(count), range(count * words)
    others = [0] * count + [_ONE.value] * count
    lines = [".reg .pred again;", *(f".reg .pred needed{k};" for k in each)]
    lines += [f"setp.ne.s32 needed{k}, ${2 * count * words + k}, 0;" for k in each]
    lines += [f"mov.b64 ${k}, {others[k]};" for k in every]
    lines += ["ask:"]
    for k in every:
        source = count * words + k
        lines += [f"@needed{k % count} ld.relaxed.gpu.global.b64 ${k}, [${source}];"]
    lines += ["setp.eq.s64 again, $0, -1;"]
    lines += [f"setp.eq.or.s64 again, ${k}, -1, again;" for k in every[1:]]
    lines += ["@again bra ask;"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def asked(count, words):
    """The constraints of that."""
    return ",".join(["=&l"] * (count * words) + ["l"] * (count * words) + ["r"] * count)


@triton.jit
def folded(a, s, KIND: tl.constexpr):
    """What stretches do one after the other, the first of them first."""
    if KIND == "cumsum":
        s = tl.sum(s, 0)
        a = tl.full((), 1.0, tl.float64)
    elif KIND == "extremum":
        s = tl.reduce(s, 0, larger)
        a = tl.full((), 1.0, tl.float64)
    elif mode_of(KIND) == "gate":
        f, s = tl.associative_scan((a.to(tl.int32), s), 0, opened)
        a, s = final(f).to(tl.float64), final(s)
    else:
        a, s = tl.associative_scan((a, s), 0, fading if KIND == "log_cumsum_exp" else affine)
        a, s = final(a), final(s)
    return a, s
