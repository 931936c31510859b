"""The engine *row state then map* for a long axis beside few rows, which lie in one run: two reads.

Rows side by side, few of them, leave memory in short pieces, at any address. Where the places of an
axis follow each other without a gap, so many of them taken together are a *line* of `width`
elements that 16 bytes divide, and lines follow each other too: rows repeat along a line. A program
takes a chunk of `each` groups of G lines, all lanes of a line at a time; lane l has row l % N. What
is behind the last whole group is taken element by element, by the program of the last chunk.

First the states of all chunks, then their sums and the numbers of rows, then the gradient. Of max
and min the first read leaves a bit an element, whether it is the extremum, and there is no second.
"""

import triton
import triton.language as tl

from ..launch import interpreted
from .formulas import apply, hit, hits_of_pairs, met, numbers, plus, row_scale, term
from .tiles import by_row, cache_of, outer_offset, widened
from .waiting import await_launch_before, let_next_begin, take_turn

_INTERPRETED = tl.constexpr(interpreted())
_BITS = tl.constexpr(8)  # lines of a group that leaves bits


@triton.jit
def lines_of(pointer, MODE: tl.constexpr, block, dims, steps):
    """An array from the beginning of a block on: all that lies in one run."""
    if MODE == "n":
        return 0
    else:
        return pointer + outer_offset(block.to(tl.int64), dims, steps)


@triton.jit
def of_rows(start, MODE: tl.constexpr, steps, number, there):
    """One value a row of an operand that has no more."""
    if by_row(MODE):
        return tl.load(start + number * steps[0], mask=there, other=0.0)
    else:
        return 0.0


@triton.jit
def chunk_of(pid, n, rows, width, chunks, each, G: tl.constexpr):
    """A program's block, its first group and the one behind its last; how many are whole, and how
    many elements are behind them, if they are this program's."""
    block, chunk = pid // chunks, pid % chunks
    whole = n * rows // (width * G)
    first = chunk.to(tl.int64) * each
    left = tl.where(chunk == chunks - 1, n * rows - whole * (width * G), 0).to(tl.int32)
    return block, first, tl.minimum(first + each, whole), whole, left


@triton.jit
def taken(start, MODE: tl.constexpr, offset, there, WIDE: tl.constexpr):
    """The elements of an operand, [L, G], in f32 or f64."""
    if MODE == "n":
        return 0.0
    else:
        told: tl.constexpr = cache_of(False, True)
        raw = tl.load(start + offset, mask=there, other=0.0, eviction_policy=told)
        return widened(raw, MODE, WIDE)


@triton.jit
def tall_states(
    dy,
    x,
    y,
    room,
    states,
    row_dims,
    row_dy,
    row_x,
    row_y,
    n,
    width,
    chunks,
    each,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    STAGES: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The states [chunk, N] of chunks; `room` is for a line a program."""
    let_next_begin(EARLY)
    rows = row_dims[0]
    block, first, last, whole, left = chunk_of(tl.program_id(0), n, rows, width, chunks, each, G)
    A: tl.constexpr = met(DY, KIND, "dy")
    B: tl.constexpr = met(X, KIND, "x")
    Z: tl.constexpr = met(Y, KIND, "y")
    dy_at = lines_of(dy, A, block, row_dims, row_dy)
    x_at = lines_of(x, B, block, row_dims, row_x)
    y_at = lines_of(y, Z, block, row_dims, row_y)
    lane = tl.arange(0, L)
    offset = lane[:, None] + (tl.arange(0, G) * width)[None, :]
    inside = (lane < width)[:, None] & (offset >= 0)
    state = tl.zeros((L,), tl.float64)
    for group in tl.range(first, last, num_stages=STAGES):
        start = group * (width * G)
        state += state_of(
            dy_at + start, x_at + start, y_at + start, offset, inside, KIND, ELEMENT, A, B, Z, L, G
        )
    for begin in range(0, left, width):
        start = whole * (width * G) + begin
        there = (lane < tl.minimum(width, left - begin))[:, None]
        state += state_of(
            dy_at + start, x_at + start, y_at + start, lane[:, None], there, KIND, ELEMENT, A, B, Z,
            L, 1,
        )  # fmt: skip
    if ELEMENT != "f32" and ELEMENT != "f64":
        state *= row_scale(ELEMENT)
    fold(state, room, states, rows.to(tl.int32), width, L, F, H)


@triton.jit
def state_of(
    dy, x, y, offset, there, KIND: tl.constexpr, ELEMENT: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, Z: tl.constexpr, L: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """What a group of lines adds to the states of its lanes; halves in f32."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    a = taken(dy, A, offset, there, WIDE)
    b = taken(x, B, offset, there, WIDE)
    c = taken(y, Z, offset, there, WIDE)
    some = tl.broadcast_to(term(KIND, ELEMENT, a, b, c), (L, G))
    return tl.sum(tl.where(there, some, 0.0), 1).to(tl.float64)


@triton.jit
def fold(state, room, states, rows, width, L: tl.constexpr, F: tl.constexpr, H: tl.constexpr):
    """Leave the states of rows, which repeat along a line: by way of memory, for their number is
    no power of two."""
    lane = tl.arange(0, L)
    own = room + tl.program_id(0).to(tl.int64) * width
    tl.store(own + lane, state, mask=lane < width)
    tl.debug_barrier()
    times = width // rows
    for begin in range(0, rows, H):
        number = begin + tl.arange(0, H)
        turn = tl.arange(0, F)
        total = tl.zeros((H,), tl.float64)
        for after in range(0, times, F):
            there = (after + turn < times)[:, None] & (number < rows)[None, :]
            at = (after + turn)[:, None] * rows + number[None, :]
            total += tl.sum(tl.load(own + at, mask=there, other=0.0, cache_modifier=".cg"), 0)
        target = states + tl.program_id(0).to(tl.int64) * rows + number
        tl.store(target, total, mask=number < rows)


@triton.jit
def tall_marks(
    x,
    y,
    room,
    states,
    bits,
    row_dims,
    row_x,
    row_y,
    n,
    width,
    chunks,
    each,
    ELEMENT: tl.constexpr,
    Y: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    L: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The same of max and min: how many elements are the extremum of their row, and which, as a
    word of 8 bits a lane and group. PAIRS: halves, compared two at a time."""
    let_next_begin(EARLY)
    G: tl.constexpr = _BITS
    rows = row_dims[0]
    block, first, last, whole, left = chunk_of(tl.program_id(0), n, rows, width, chunks, each, G)
    x_at = lines_of(x, "c", block, row_dims, row_x)
    y_at = lines_of(y, Y, block, row_dims, row_y)
    lane = tl.arange(0, L)
    inside = lane < width
    extremum = of_rows(y_at, Y, row_y, lane % rows.to(tl.int32), inside)
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" else tl.float32
    words = words_of(bits, block, n * rows, width)
    offset = lane[:, None] + (tl.arange(0, G) * width)[None, :]
    bit = (1 << tl.arange(0, G))[None, :]
    count = tl.zeros((L,), tl.int32)
    for group in tl.range(first, last, num_stages=STAGES):
        tile = tl.load(
            x_at + group * (width * G) + offset, mask=inside[:, None], other=0.0,
            eviction_policy=cache_of(True),
        )  # fmt: skip
        if PAIRS:
            hits = hits_of_pairs(tile, extremum[:, None], ELEMENT, L, G)
            word = tl.reduce(hits & bit.to(tl.int16), 1, plus)
        else:
            hits = hit(widened(tile, "c", ELEMENT == "f64"), extremum.to(TYPE)[:, None])
            word = tl.sum(tl.where(hits, bit, 0), 1)
        tl.store(words + group * width + lane, word.to(tl.uint8), mask=inside)
        count += ones_of(word)
    if left > 0:
        word = tl.zeros((L,), tl.int32)
        for begin in range(0, left, width):
            there = lane < tl.minimum(width, left - begin)
            one = tl.load(x_at + (whole * (width * G) + begin) + lane, mask=there, other=0.0)
            equal = hit(one.to(TYPE), extremum.to(TYPE)) & there
            word |= equal.to(tl.int32) << (begin // width)
        tl.store(words + whole * width + lane, word.to(tl.uint8), mask=inside)
        count += ones_of(word)
    fold(count.to(tl.float64), room, states, rows.to(tl.int32), width, L, F, H)


@triton.jit
def words_of(bits, block, size, width):
    """Where a block of so many elements has its words."""
    return bits + block.to(tl.int64) * tl.cdiv(size, width * _BITS) * width


@triton.jit
def ones_of(word):
    """How many bits of words are set."""
    word = word.to(tl.int32)
    if _INTERPRETED:
        count = word & 0
        for g in tl.static_range(0, _BITS):
            count += (word >> g) & 1
        return count
    else:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def number_of(joined, block, rows, row, ELEMENT: tl.constexpr):
    """Where the first of the numbers of rows are."""
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" else tl.float32
    return joined.to(tl.pointer_type(TYPE)) + block.to(tl.int64) * rows + row


@triton.jit
def tall_numbers(
    dy,
    y,
    states,
    joined,
    row_dims,
    row_dy,
    row_y,
    p,
    q,
    chunks,
    total,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    Y: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The `numbers` of rows [slot, row], from the states of their chunks."""
    take_turn(EARLY)
    rows = row_dims[0]
    tiles = tl.cdiv(rows, R).to(tl.int32)
    block, begin = tl.program_id(0) // tiles, tl.program_id(0) % tiles * R
    number = begin.to(tl.int64) + tl.arange(0, R)
    there = number < rows
    some = tl.arange(0, K)
    state = tl.zeros((R,), tl.float64)
    first = states + block.to(tl.int64) * chunks * rows
    for chunk in range(0, chunks, K):
        mask = there[:, None] & (chunk + some < chunks)[None, :]
        at = (chunk + some)[None, :].to(tl.int64) * rows + number[:, None]
        state += tl.sum(tl.load(first + at, mask=mask, other=0.0), 1)
    state = state + 0.0  # the compiler takes a sum over a loop that is used once alone
    leave_numbers(
        dy, y, joined, row_dims, row_dy, row_y, p, q, total, block, number, there, state, state,
        state, KIND, TIES, ELEMENT, DY, Y,
    )  # fmt: skip


@triton.jit
def leave_numbers(
    dy, y, joined, row_dims, row_dy, row_y, p, q, total, block, number, there, s0, s1, s2,
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, DY: tl.constexpr,
    Y: tl.constexpr,
):  # fmt: skip
    """The `numbers` of some rows, from their states."""
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" else tl.float32
    dy_at = lines_of(dy, DY, block, row_dims, row_dy)
    y_at = lines_of(y, Y, block, row_dims, row_y)
    a = of_rows(dy_at, DY, row_dy, number, there)
    c = of_rows(y_at, Y, row_y, number, there)
    if by_row(DY):
        a = a.to(TYPE)
    if by_row(Y):
        c = c.to(TYPE)
    k0, k1, k2 = numbers(KIND, TIES, ELEMENT, s0, s1, s2, a, c, p, q, there)
    slot = number_of(joined, block, row_dims[0], number, ELEMENT)
    tl.store(slot, k0, mask=there)
    tl.store(slot + total, k1, mask=there)
    tl.store(slot + 2 * total, k2, mask=there)


@triton.jit
def tall_map(
    dy,
    x,
    y,
    out,
    joined,
    row_dims,
    row_dy,
    row_x,
    row_y,
    row_out,
    n,
    width,
    chunks,
    each,
    total,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
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
    A: tl.constexpr = met(DY, KIND, "dy")
    B: tl.constexpr = met(X, KIND, "x")
    Z: tl.constexpr = met(Y, KIND, "y")
    dy_at = lines_of(dy, A, block, row_dims, row_dy)
    x_at = lines_of(x, B, block, row_dims, row_x)
    y_at = lines_of(y, Z, block, row_dims, row_y)
    out_at = lines_of(out, "c", block, row_dims, row_out)
    lane = tl.arange(0, L)
    slot = number_of(joined, block, rows, lane % rows.to(tl.int32), ELEMENT)
    k0 = tl.load(slot)
    k1 = tl.load(slot + total)
    k2 = tl.load(slot + 2 * total)
    offset = lane[:, None] + (tl.arange(0, G) * width)[None, :]
    inside = (lane < width)[:, None] & (offset >= 0)
    for group in tl.range(first, last, num_stages=STAGES):
        start = group * (width * G)
        map_lines(
            dy_at + start, x_at + start, y_at + start, out_at + start, k0, k1, k2, offset, inside,
            KIND, ELEMENT, A, B, Z, L, G,
        )  # fmt: skip
    for begin in range(0, left, width):
        start = whole * (width * G) + begin
        there = (lane < tl.minimum(width, left - begin))[:, None]
        map_lines(
            dy_at + start, x_at + start, y_at + start, out_at + start, k0, k1, k2, lane[:, None],
            there, KIND, ELEMENT, A, B, Z, L, 1,
        )  # fmt: skip


@triton.jit
def map_lines(
    dy, x, y, out, k0, k1, k2, offset, there, KIND: tl.constexpr,
    ELEMENT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, L: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The gradients of a group of lines, rounded once."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    a = taken(dy, A, offset, there, WIDE)
    b = taken(x, B, offset, there, WIDE)
    c = taken(y, Z, offset, there, WIDE)
    value = apply(KIND, "", ELEMENT, k0, k1, k2, a, b, c, 0)
    tl.store(out + offset, tl.broadcast_to(rounded(value, out), (L, G)), mask=there)


@triton.jit
def rounded(value, target):
    element: tl.constexpr = target.dtype.element_ty
    if element == tl.bfloat16 or element == tl.float16:
        value = value.to(tl.float32)
    return value.to(element)


@triton.jit
def tall_shares(
    out,
    joined,
    bits,
    row_dims,
    row_out,
    n,
    width,
    chunks,
    each,
    ELEMENT: tl.constexpr,
    STAGES: tl.constexpr,
    L: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The gradients of max and min, from the bits of their lines."""
    await_launch_before(EARLY)
    G: tl.constexpr = _BITS
    rows = row_dims[0]
    block, first, last, whole, left = chunk_of(
        tl.num_programs(0) - 1 - tl.program_id(0), n, rows, width, chunks, each, G
    )
    out_at = lines_of(out, "c", block, row_dims, row_out)
    lane = tl.arange(0, L)
    inside = lane < width
    slot = number_of(joined, block, rows, lane % rows.to(tl.int32), ELEMENT)
    share = rounded(tl.load(slot), out)
    words = words_of(bits, block, n * rows, width)
    for group in tl.range(first, last, num_stages=STAGES):
        word = tl.load(words + group * width + lane, mask=inside, other=0).to(tl.int32)
        at = out_at + group * (width * G) + lane
        for g in tl.static_range(0, G):
            tl.store(at + g * width, tl.where((word & (1 << g)) != 0, share, 0.0), mask=inside)
    if left > 0:
        word = tl.load(words + whole * width + lane, mask=inside, other=0).to(tl.int32)
        for begin in range(0, left, width):
            value = tl.where(((word >> (begin // width)) & 1) != 0, share, 0.0)
            target = out_at + (whole * (width * G) + begin) + lane
            tl.store(target, value, mask=lane < tl.minimum(width, left - begin))
