"""The engine *segment sum*: a stable radix sort of the indices, then sums of fixed chunks.

A sort word holds an index's row above its position, so equal rows stay in the order in which they
came and the sums have one order, whatever runs first. Skipped indices count as one row behind the
table. The sort is written here because a bound launch may not allocate, which every library sort
does, and because only the bits that number the table need sorting; `moves` has its other half.

The sorted words are summed in chunks of equal length, so a row named a million times costs no more
than a million rows named once. A segment is all words of one row. One that lies within a chunk is
written at once; what a chunk has of a segment that reaches beyond it becomes an entry of the next,
much shorter list, which is summed the same way.
"""

import triton
import triton.language as tl

from .formulas import row_scale
from .tiles import axis_offset
from .waiting import await_launch_before, take_turn

_NONE = tl.constexpr(-1)
"""The key of what is skipped, of entries that stand for nothing, and of what is beyond a list."""
_LINK = tl.constexpr(-3)
"""This less a key: an entry of its segment to which nothing is to be added."""


@triton.jit
def row_at(indices, position, inside, index_dims, index_steps, rows, padding):
    """The rows that indices name, at these positions in C order; `rows` where one is skipped."""
    where = axis_offset(position, index_dims, index_steps)
    row = tl.load(indices + where, mask=inside, other=-1).to(tl.int64)
    return tl.where((row >= 0) & (row < rows) & (row != padding), row, rows)


@triton.jit
def words_of(indices, position, count, index_dims, index_steps, rows, padding, shift):
    """Sort words straight from the indices."""
    row = row_at(indices, position, position < count, index_dims, index_steps, rows, padding)
    return (row << shift) | position.to(tl.int64)


@triton.jit
def count_digits(
    indices,
    words,
    counts,
    marks,
    index_dims,
    index_steps,
    rows,
    padding,
    count,
    low,
    shift,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """How often each digit occurs in each block: counts[digit, block]; and, where `marks`
    [copy, row] are wanted, the position of an index of each named row, in one copy at least."""
    take_turn(EARLY)
    block = tl.program_id(0)
    position = block.to(count.dtype) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    if FIRST:
        word = words_of(indices, position, count, index_dims, index_steps, rows, padding, shift)
        if marks is not None:
            row = word >> shift
            goal = marks + (block % COPIES).to(tl.int64) * rows + row
            tl.store(goal, position.to(tl.int64), mask=inside & (row < rows))
    else:
        word = tl.load(words + position, mask=inside, other=0)
    digit = ((word >> low) & ((1 << BITS) - 1)).to(tl.int32)
    found = tl.histogram(digit, 1 << BITS, mask=inside)
    blocks = tl.num_programs(0)
    tl.store(counts + tl.arange(0, 1 << BITS).to(tl.int64) * blocks + block, found)


@triton.jit
def sum_counts(counts, totals, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """In place: how often a digit occurs in the blocks before; totals[digit]. A program a digit."""
    take_turn(EARLY)
    digit = tl.program_id(0).to(tl.int64)
    carry = tl.zeros((), counts.dtype.element_ty)
    for begin in range(0, blocks, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < blocks
        own = tl.load(counts + digit * blocks + place, mask=inside, other=0)
        tl.store(counts + digit * blocks + place, tl.cumsum(own, 0) - own + carry, mask=inside)
        carry += tl.sum(own, 0)
    tl.store(totals + digit, carry)


@triton.jit
def find_bounds(words, bounds, rows, count, shift, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Where the words of each named row begin and end."""
    take_turn(EARLY)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(words + place, mask=place < count, other=0) >> shift
    kept = (place < count) & (row < rows)
    behind = tl.load(words + place + 1, mask=place + 1 < count, other=-1) >> shift
    before = tl.load(words + place - 1, mask=(place > 0) & (place < count), other=-1) >> shift
    tl.store(bounds + 2 * row, place, mask=kept & (before != row))
    tl.store(bounds + 2 * row + 1, place + 1, mask=kept & (behind != row))


@triton.jit
def entry_at(entries, place, inside):
    """An entry as it stands in a list."""
    return tl.load(entries + place, mask=inside, other=_NONE)


@triton.jit
def key_of(entry, rows, shift, FIRST: tl.constexpr):
    """The row that an entry names, and whether a value comes with it. Words come first, then
    keys."""
    if FIRST:
        key = (entry >> shift).to(rows.dtype)
        key = tl.where(key < rows, key, _NONE)
        return key, key >= 0
    else:
        key = entry.to(rows.dtype)
        return tl.where(key <= _LINK, _LINK - key, key), key >= 0


@triton.jit
def sum_chunks(
    entries,
    values,
    keys,
    sums,
    bounds,
    table,
    index_dims,
    value_steps,
    value_column,
    table_row,
    table_column,
    rows,
    columns,
    count,
    length,
    shift,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum `length` entries of a list by segment, in D columns; P of them are loaded at a time.

    FIRST: the entries are words, the values rows of dout; otherwise keys, and sums taken before.
    Of a segment that began before the chunk, entry 2k of the next list (`keys`, `sums`) gets what
    is here; of one that goes on behind it, entry 2k + 1, which is but a link where they are the
    same. LAST: one chunk is the whole list.
    """
    if LAST:
        await_launch_before(EARLY)
    else:
        take_turn(EARLY)
    slices = tl.cdiv(columns, D)
    chunk = (tl.program_id(0) // slices).to(tl.int64)
    one = tl.program_id(0) % slices
    column = one.to(columns.dtype) * D + tl.arange(0, D)
    inside = column < columns
    if UNIT:
        source, goal = column, column
    else:
        source, goal = column.to(tl.int64) * value_column, column.to(tl.int64) * table_column
    # Halves are summed in f32, chunk by chunk; bfloat16 scaled down, exactly, lest it overflow.
    HALVES: tl.constexpr = FIRST and (ELEMENT == "f16" or ELEMENT == "bf16")
    UP: tl.constexpr = row_scale(ELEMENT) if HALVES else 1.0
    begin = chunk * length
    entries += begin
    size = tl.minimum(count - begin, length).to(tl.int32)
    known = tl.minimum(count - begin, length + 1).to(tl.int32)  # and one behind
    ahead = ()
    for j in tl.static_range(P):
        ahead = ahead + (entry_at(entries, j, j < known),)
    first, _ = key_of(ahead[0], rows, shift, FIRST)
    last, _ = key_of(entry_at(entries, size - 1, size > 0), rows, shift, FIRST)
    before, _ = key_of(entry_at(entries, -1, begin > 0), rows, shift, FIRST)
    behind, _ = key_of(entry_at(entries, size, size < known), rows, shift, FIRST)
    began = (first >= 0) & (before == first)
    goes_on = (last >= 0) & (behind == last)
    if not LAST:
        target = sums + 2 * chunk * columns + column
    total = tl.zeros((D,), tl.float32 if HALVES else tl.float64)
    for at in range(0, size, P):
        # All loads first, so that they are under way together; and then the entries of the next
        # step, whose loads need not wait for them.
        names = ()
        loaded = ()
        for j in tl.static_range(P):
            key, valued = key_of(ahead[j], rows, shift, FIRST)
            if FIRST:
                position = ahead[j] & ((tl.full((), 1, tl.int64) << shift) - 1)
                row = axis_offset(position, index_dims, value_steps)
            else:
                row = (begin + at + j) * columns
            value = tl.load(values + row + source, mask=inside & valued, other=0.0)
            names = names + (key,)
            loaded = loaded + (value,)
        ahead = ()
        for j in tl.static_range(P):
            ahead = ahead + (entry_at(entries, at + P + j, at + P + j < known),)
        following, _ = key_of(ahead[0], rows, shift, FIRST)
        names = names + (following,)
        for j in tl.static_range(P):
            key = names[j]
            value = loaded[j].to(total.dtype)
            if UP != 1.0:
                value = value * (1.0 / UP)
            total += value
            if (key >= 0) & (names[j + 1] != key):
                if began & (key == first):
                    if not LAST:
                        tl.store(target, total.to(tl.float64) * UP, mask=inside)
                else:
                    put_row(
                        table + key.to(tl.int64) * table_row + goal, total, UP, bounds, key, inside,
                        ELEMENT, ACCUMULATE, BY_COUNT,
                    )  # fmt: skip
                total = tl.zeros((D,), total.dtype)
    if not LAST:
        whole = began & (first == last)
        if goes_on:
            tl.store(target + tl.where(whole, 0, columns), total.to(tl.float64) * UP, mask=inside)
        if one == 0:
            rest = tl.where(whole, _LINK - last, last)
            tl.store(keys + 2 * chunk, tl.where(began, first, _NONE).to(tl.int64))
            tl.store(keys + 2 * chunk + 1, tl.where(goes_on, rest, _NONE).to(tl.int64))


@triton.jit
def put_row(
    goal,
    total,
    UP: tl.constexpr,
    bounds,
    key,
    inside,
    ELEMENT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Round the sum of a whole segment once and store it."""
    if BY_COUNT or ACCUMULATE:
        total = total.to(tl.float64)
    if BY_COUNT:
        bounds += 2 * key.to(tl.int64)
        total = total / (tl.load(bounds + 1) - tl.load(bounds)).to(tl.float64)
    if UP != 1.0:
        total = total * UP
    if ACCUMULATE:
        total += tl.load(goal, mask=inside, other=0.0).to(tl.float64)
    if ELEMENT != "f64":
        total = total.to(tl.float32)
    tl.store(goal, total.to(goal.dtype.element_ty), mask=inside)


@triton.jit
def clear_rows(
    table,
    table_row,
    table_column,
    rows,
    columns,
    UNIT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Zero the table, a tile of it in each program."""
    tile, slices = tl.program_id(0), tl.cdiv(columns, D)
    row = (tile // slices).to(tl.int64) * T + tl.arange(0, T)
    column = (tile % slices).to(columns.dtype) * D + tl.arange(0, D)
    if UNIT:
        across = column
    else:
        across = column.to(tl.int64) * table_column
    goal = table + row[:, None] * table_row + across[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(goal, tl.zeros(goal.shape, table.dtype.element_ty), mask=mask)
