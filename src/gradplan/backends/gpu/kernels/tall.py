"""The engine *row state then map* for a long axis beside few rows, which lie in one run: two reads.

Rows side by side, few of them, leave memory in short pieces, at any address. Where the places of an
axis follow each other without a gap, so many of them taken together are a *line* of `width`
elements that 16 bytes divide, and lines follow each other too: rows repeat along a line. A program
takes the lines of a chunk, all lanes of a line at a time; lane l has row l % N. What is behind the
last line, less than one, is taken element by element, by the program of the last chunk.

First the states of all chunks, then their sums and the numbers of rows, then the gradient. Of max
and min the first read leaves a bit an element, whether it is the extremum, and there is no second.
"""

import triton
import triton.language as tl

from .formulas import apply, counts, numbers, operands_of, row_scale, term
from .tiles import by_row, cache_of, outer_offset, widened


@triton.constexpr_function
def met(mode, kind, operand):
    """How elements meet an operand: "n" where only the numbers of a row know it."""
    return mode if operand in operands_of(kind) else "n"


@triton.jit
def lines_of(pointer, MODE: tl.constexpr, block, dims, steps):
    """An array from the beginning of a block on: all that lies in one run."""
    if MODE == "n":
        return 0
    else:
        return pointer + outer_offset(block.to(tl.int64), dims, steps)


@triton.jit
def taken(start, MODE: tl.constexpr, row, place, mask, L: tl.constexpr, G: tl.constexpr):
    """An operand's elements, [L, G], or what its rows have, [L, 1]."""
    if MODE == "n":
        return 0.0
    elif MODE == "c":
        return tl.load(start + place, mask=mask, other=0.0, eviction_policy=cache_of(False, True))
    else:
        return row


@triton.jit
def of_rows(start, MODE: tl.constexpr, steps, number, there):
    """One value a row, [L, 1], of an operand that has no more."""
    if by_row(MODE):
        return tl.load(start + number * steps[0], mask=there, other=0.0)[:, None]
    else:
        return 0.0


@triton.jit
def tall_states(
    dy,
    x,
    y,
    room,
    states,
    bits,
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
    L: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
):
    """The states [chunk, N] of chunks of `each` lines; `room` is for a line a program."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    A: tl.constexpr = met(DY, KIND, "dy")
    B: tl.constexpr = met(X, KIND, "x")
    Z: tl.constexpr = met(Y, KIND, "y")
    block, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    rows = row_dims[0]
    lane = tl.arange(0, L)
    dy_at = lines_of(dy, A, block, row_dims, row_dy)
    x_at = lines_of(x, B, block, row_dims, row_x)
    y_at = lines_of(y, Z, block, row_dims, row_y)
    y_row = of_rows(y_at, Z, row_y, lane % rows, lane < width)
    count = n * rows // width
    first = chunk.to(tl.int64) * each
    last = tl.minimum(first + each, count)
    state = tl.zeros((L,), tl.float64)
    for line in range(first, last, G):
        number = line + tl.arange(0, G)
        place = lane[:, None] + number[None, :] * width
        mask = (lane < width)[:, None] & (number < last)[None, :]
        a = widened(taken(dy_at, A, 0.0, place, mask, L, G), A, WIDE)
        b = widened(taken(x_at, B, 0.0, place, mask, L, G), B, WIDE)
        c = widened(taken(y_at, Z, y_row, place, mask, L, G), Z, WIDE)
        some = tl.where(mask, tl.broadcast_to(term(KIND, ELEMENT, a, b, c), (L, G)), 0)
        state += tl.sum(some, 1).to(tl.float64)  # halves of G lines in f32
        if counts(KIND):
            word = tl.sum(some << tl.arange(0, G)[None, :], 1).to(tl.uint8)
            tl.store(word_at(bits, block, line, count, width, G) + lane, word, mask=lane < width)
    if chunk == chunks - 1:
        place = lane[:, None].to(tl.int64) + count * width
        mask = place < n * rows
        a = plain(taken(dy_at, A, 0.0, place, mask, L, 1), A, WIDE)
        b = plain(taken(x_at, B, 0.0, place, mask, L, 1), B, WIDE)
        c = plain(taken(y_at, Z, y_row, place, mask, L, 1), Z, WIDE)
        some = tl.broadcast_to(term(KIND, ELEMENT, a, b, c), (L, 1))
        state += tl.sum(tl.where(mask, some, 0), 1).to(tl.float64)
    if ELEMENT != "f32" and ELEMENT != "f64":
        if not counts(KIND):
            state *= row_scale(ELEMENT)
    # Rows repeat along a line: by way of memory, for their number is no power of two.
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
def plain(value, MODE: tl.constexpr, WIDE: tl.constexpr):
    """In f32 or f64, element by element."""
    if MODE == "n":
        return 0.0
    else:
        return value.to(tl.float64 if WIDE else tl.float32)


@triton.jit
def word_at(bits, block, line, count, width, G: tl.constexpr):
    """Where G lines from a line on have their bits, a word of 8 a lane."""
    return bits + (block.to(tl.int64) * tl.cdiv(count, G) + line // G) * width


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
):
    """The `numbers` of rows [slot, row], from the states of their chunks."""
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
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" else tl.float32
    dy_at = lines_of(dy, DY, block, row_dims, row_dy)
    y_at = lines_of(y, Y, block, row_dims, row_y)
    a = of_rows(dy_at, DY, row_dy, number, there)
    c = of_rows(y_at, Y, row_y, number, there)
    if by_row(DY):
        a = a.to(TYPE)
    if by_row(Y):
        c = c.to(TYPE)
    k0, k1, k2 = numbers(KIND, TIES, ELEMENT, state, state, state, a, c, p, q, there)
    slot = joined.to(tl.pointer_type(TYPE)) + block.to(tl.int64) * rows + number
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
    bits,
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
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
):
    """The gradients of the same lines, from the last on: those may still be in the cache."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    A: tl.constexpr = met(DY, KIND, "dy")
    B: tl.constexpr = met(X, KIND, "x")
    Z: tl.constexpr = met(Y, KIND, "y")
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    block, chunk = pid // chunks, pid % chunks
    rows = row_dims[0]
    lane = tl.arange(0, L)
    row = lane % rows
    dy_at = lines_of(dy, A, block, row_dims, row_dy)
    x_at = lines_of(x, B, block, row_dims, row_x)
    y_at = lines_of(y, Z, block, row_dims, row_y)
    out_at = lines_of(out, "c", block, row_dims, row_out)
    y_row = of_rows(y_at, Z, row_y, row, lane < width)
    slot = joined.to(tl.pointer_type(TYPE)) + block.to(tl.int64) * rows + row
    k0 = tl.load(slot)
    k1 = tl.load(slot + total)
    k2 = tl.load(slot + 2 * total)
    count = n * rows // width
    first = chunk.to(tl.int64) * each
    last = tl.minimum(first + each, count)
    for line in range(first, last, G):
        number = line + tl.arange(0, G)
        place = lane[:, None] + number[None, :] * width
        mask = (lane < width)[:, None] & (number < last)[None, :]
        if counts(KIND):
            word = tl.load(word_at(bits, block, line, count, width, G) + lane, mask=lane < width)
            hits = (word.to(tl.int32)[:, None] >> tl.arange(0, G)[None, :]) & 1
            value = tl.where(hits != 0, k0[:, None], 0.0)
        else:
            a = widened(taken(dy_at, A, 0.0, place, mask, L, G), A, WIDE)
            b = widened(taken(x_at, B, 0.0, place, mask, L, G), B, WIDE)
            c = widened(taken(y_at, Z, y_row, place, mask, L, G), Z, WIDE)
            value = apply(KIND, TIES, ELEMENT, k0, k1, k2, a, b, c, 0)
        given(out_at + place, value, mask, L, G)
    if chunk == chunks - 1:
        place = lane[:, None].to(tl.int64) + count * width
        mask = place < n * rows
        a = plain(taken(dy_at, A, 0.0, place, mask, L, 1), A, WIDE)
        b = plain(taken(x_at, B, 0.0, place, mask, L, 1), B, WIDE)
        c = plain(taken(y_at, Z, y_row, place, mask, L, 1), Z, WIDE)
        given(out_at + place, apply(KIND, TIES, ELEMENT, k0, k1, k2, a, b, c, 0), mask, L, 1)


@triton.jit
def given(target, value, mask, L: tl.constexpr, G: tl.constexpr):
    """Rounded once."""
    element: tl.constexpr = target.dtype.element_ty
    if element == tl.bfloat16 or element == tl.float16:
        value = value.to(tl.float32)
    tl.store(target, tl.broadcast_to(value.to(element), (L, G)), mask=mask)
