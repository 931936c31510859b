"""The engine *segment sum*: a stable radix sort of the indices, then sums of fixed chunks.

A sort word holds an index's row above its position, so equal rows stay in the order in which they
came and the sums have one order, whatever runs first. Skipped indices count as one row behind the
table. The sort is written here because a bound launch may not allocate, which every library sort
does, and because only the bits that number the table need sorting.

The sorted words are summed in chunks of equal length, so a row named a million times costs no more
than a million rows named once. A segment is all words of one row. One that lies within a chunk is
written at once; what a chunk has of a segment that reaches beyond it becomes an entry of the next,
much shorter list, which is summed the same way.
"""

import triton
import triton.language as tl

from .formulas import row_scale
from .tiles import axis_offset

_NONE = tl.constexpr(-1)
"""The key of what is skipped, and of entries that stand for nothing."""
_OUTSIDE = tl.constexpr(-2)
"""The key before and behind a list: no entry has it."""


@triton.jit
def words_of(indices, position, count, index_dims, index_steps, rows, padding, shift):
    """Sort words straight from the indices, at these positions in C order."""
    inside = position < count
    where = axis_offset(position, index_dims, index_steps)
    row = tl.load(indices + where, mask=inside, other=0).to(tl.int64)
    kept = (row >= 0) & (row < rows) & (row != padding)
    return (tl.where(kept, row, rows) << shift) | position.to(tl.int64)


@triton.jit
def count_digits(
    indices,
    words,
    counts,
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
):
    """How often each digit occurs in each block: counts[digit, block]."""
    block = tl.program_id(0)
    position = block.to(count.dtype) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    if FIRST:
        word = words_of(indices, position, count, index_dims, index_steps, rows, padding, shift)
    else:
        word = tl.load(words + position, mask=inside, other=0)
    digit = ((word >> low) & ((1 << BITS) - 1)).to(tl.int32)
    found = tl.histogram(digit, 1 << BITS, mask=inside)
    blocks = tl.num_programs(0)
    tl.store(counts + tl.arange(0, 1 << BITS).to(tl.int64) * blocks + block, found.to(tl.int64))


@triton.jit
def sum_counts(counts, totals, blocks, BLOCK: tl.constexpr):
    """In place: how often a digit occurs in the blocks before; totals[digit]. A program a digit."""
    digit = tl.program_id(0).to(tl.int64)
    carry = tl.zeros((), tl.int64)
    for begin in range(0, blocks, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < blocks
        own = tl.load(counts + digit * blocks + place, mask=inside, other=0)
        tl.store(counts + digit * blocks + place, tl.cumsum(own, 0) - own + carry, mask=inside)
        carry += tl.sum(own, 0)
    tl.store(totals + digit, carry)


@triton.jit
def move_words(
    indices,
    words,
    moved,
    counts,
    totals,
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
    BLOCK_BITS: tl.constexpr,
):
    """One pass of the radix sort: every word to its place by this digit, in order."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin = block.to(count.dtype) * BLOCK
    position = begin + lane
    inside = position < count
    if FIRST:
        word = words_of(indices, position, count, index_dims, index_steps, rows, padding, shift)
    else:
        word = tl.load(words + position, mask=inside, other=0)
    DIGITS: tl.constexpr = 1 << BITS
    digit = ((word >> low) & (DIGITS - 1)).to(tl.int32)
    digit = tl.where(inside, digit, DIGITS - 1)  # behind all others of the block
    found = tl.histogram(digit, DIGITS, mask=inside)
    blocks = tl.num_programs(0)
    one = tl.arange(0, DIGITS)
    total = tl.load(totals + one)
    base = tl.cumsum(total, 0) - total + tl.load(counts + one.to(tl.int64) * blocks + block)
    base -= (tl.cumsum(found, 0) - found).to(tl.int64)
    order = tl.sort((digit << BLOCK_BITS) | lane)
    source = order & (BLOCK - 1)
    target = tl.gather(base, order >> BLOCK_BITS, 0) + lane
    position = begin + source
    inside = position < count
    if FIRST:
        word = words_of(indices, position, count, index_dims, index_steps, rows, padding, shift)
    else:
        word = tl.load(words + position, mask=inside, other=0)
    tl.store(moved + target, word, mask=inside)


@triton.jit
def find_starts(words, starts, rows, count, shift, steps, BLOCK: tl.constexpr):
    """starts[row]: the first word of a row or of any behind it; by bisection."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row <= rows
    wanted = row << shift
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + count
    for _ in range(0, steps):
        open_ = low < high
        middle = (low + high) >> 1
        word = tl.load(words + middle, mask=inside & open_, other=0)
        below = open_ & (word < wanted)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    tl.store(starts + row, low, mask=inside)


@triton.jit
def entry_at(entries, place, end, rows, shift, FIRST: tl.constexpr):
    """The row that an entry names, and where its value is. Words come first, then keys."""
    inside = (place >= 0) & (place < end)
    found = tl.load(entries + place, mask=inside, other=0)
    if FIRST:
        position = found & ((tl.full((), 1, tl.int64) << shift) - 1)
        found = found >> shift
        found = tl.where(found < rows, found, _NONE)
    else:
        position = place
    return tl.where(inside, found, _OUTSIDE), position


@triton.jit
def sum_chunks(
    entries,
    values,
    keys,
    sums,
    starts,
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
):
    """Sum `length` entries of a list by segment, in D columns; P of them are loaded at a time.

    FIRST: the entries are words, the values rows of dout; otherwise keys, and sums taken before.
    Of a segment that began before the chunk, entry 2k of the next list (`keys`, `sums`) gets what
    is here; of one that goes on behind it, entry 2k + 1. LAST: one chunk is the whole list.
    """
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
    end = tl.minimum(begin + length, count)
    first, _ = entry_at(entries, begin, count, rows, shift, FIRST)
    last, _ = entry_at(entries, end - 1, count, rows, shift, FIRST)
    before, _ = entry_at(entries, begin - 1, count, rows, shift, FIRST)
    behind, _ = entry_at(entries, end, count, rows, shift, FIRST)
    began = (first >= 0) & (before == first)
    goes_on = (last >= 0) & (behind == last)
    if not LAST:
        target = sums + 2 * chunk * columns + column
    total = tl.zeros((D,), tl.float32 if HALVES else tl.float64)
    previous = first
    for at in range(begin, end, P):
        # All loads first, so that they are under way together.
        names = ()
        loaded = ()
        for j in tl.static_range(P):
            key, position = entry_at(entries, at + j, end, rows, shift, FIRST)
            if FIRST:
                row = axis_offset(position, index_dims, value_steps)
            else:
                row = position * columns
            value = tl.load(values + row + source, mask=inside & (key >= 0), other=0.0)
            names = names + (key,)
            loaded = loaded + (value,)
        following, _ = entry_at(entries, at + P, count, rows, shift, FIRST)
        names = names + (following,)
        for j in tl.static_range(P):
            key = names[j]
            value = loaded[j].to(total.dtype)
            if UP != 1.0:
                value = value * (1.0 / UP)
            total = tl.where(key == previous, total, 0.0) + value
            previous = key
            if (key >= 0) & (names[j + 1] != key):
                if began & (key == first):
                    if not LAST:
                        tl.store(target, total.to(tl.float64) * UP, mask=inside)
                else:
                    put_row(
                        table + key * table_row + goal, total, UP, starts + key, inside,
                        ELEMENT, ACCUMULATE, BY_COUNT,
                    )  # fmt: skip
    if not LAST:
        if goes_on:
            whole = began & (first == last)
            tl.store(target + tl.where(whole, 0, columns), total.to(tl.float64) * UP, mask=inside)
            if whole:
                tl.store(target + columns, tl.zeros((D,), tl.float64), mask=inside)
        if one == 0:
            tl.store(keys + 2 * chunk, tl.where(began, first, _NONE))
            tl.store(keys + 2 * chunk + 1, tl.where(goes_on, last, _NONE))


@triton.jit
def put_row(
    goal,
    total,
    UP: tl.constexpr,
    starts,
    inside,
    ELEMENT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Round the sum of a whole segment once and store it."""
    if BY_COUNT or ACCUMULATE:
        total = total.to(tl.float64)
    if BY_COUNT:
        total = total / (tl.load(starts + 1) - tl.load(starts)).to(tl.float64)
    if UP != 1.0:
        total = total * UP
    if ACCUMULATE:
        total += tl.load(goal, mask=inside, other=0.0).to(tl.float64)
    if ELEMENT != "f64":
        total = total.to(tl.float32)
    tl.store(goal, total.to(goal.dtype.element_ty), mask=inside)


@triton.jit
def clear_rows(
    starts,
    table,
    table_row,
    table_column,
    rows,
    columns,
    EVERY: tl.constexpr,
    UNIT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Zero the rows of the table that no index names, or every one."""
    slices = tl.cdiv(columns, D)
    row = (tl.program_id(0) // slices).to(tl.int64) * T + tl.arange(0, T)
    column = (tl.program_id(0) % slices).to(columns.dtype) * D + tl.arange(0, D)
    if UNIT:
        across = column
    else:
        across = column.to(tl.int64) * table_column
    there = row < rows
    if not EVERY:
        begin = tl.load(starts + row, mask=there, other=0)
        there = there & (begin == tl.load(starts + row + 1, mask=there, other=1))
    mask = there[:, None] & (column < columns)[None, :]
    goal = table + row[:, None] * table_row + across[None, :]
    tl.store(goal, tl.zeros((T, D), table.dtype.element_ty), mask=mask)
