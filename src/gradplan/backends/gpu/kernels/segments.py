"""The engine *segment sum*: a stable radix sort of the indices, then each row summed in order.

A sort word holds an index's row above its position, so equal rows stay in the order in which they
came and the sums have one order, whatever runs first. Skipped indices count as one row behind the
table. The sort is written here because a bound launch may not allocate, which every library sort
does, and because only the bits that number the table need sorting.
"""

import triton
import triton.language as tl

from .tiles import axis_offset


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
def sum_counts(counts, total, BLOCK: tl.constexpr):
    """In place: the exclusive running sum. One program."""
    carry = tl.zeros((), tl.int64)
    for block in range(0, tl.cdiv(total, BLOCK)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < total
        own = tl.load(counts + place, mask=inside, other=0)
        tl.store(counts + place, tl.cumsum(own, 0) - own + carry, mask=inside)
        carry += tl.sum(own, 0)


@triton.jit
def move_words(
    indices,
    words,
    moved,
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
    base = tl.load(counts + tl.arange(0, DIGITS).to(tl.int64) * blocks + block)
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
def add_rows(
    total,
    words,
    dout,
    begin,
    end,
    column,
    inside,
    index_dims,
    dout_steps,
    dout_column,
    shift,
    UNIT: tl.constexpr,
    P: tl.constexpr,
):
    """Add the rows of `dout` that the words from begin to end name, P at a time."""
    for at in range(begin, end, P):
        place = at + tl.arange(0, P)
        there = place < end
        word = tl.load(words + place, mask=there, other=0)
        position = word & ((tl.full((), 1, tl.int64) << shift) - 1)
        row = axis_offset(position, index_dims, dout_steps)
        if UNIT:
            source = dout + row[:, None] + column[None, :]
        else:
            source = dout + row[:, None] + column[None, :].to(tl.int64) * dout_column
        values = tl.load(source, mask=there[:, None] & inside[None, :], other=0.0)
        total += tl.sum(values.to(tl.float64), 0)
    return total


@triton.jit
def sum_stretches(
    words,
    dout,
    sums,
    index_dims,
    dout_steps,
    dout_column,
    columns,
    count,
    shift,
    UNIT: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
):
    """Rows named so often that one program would take long: L words in a row of one name."""
    slices = tl.cdiv(columns, D)
    stretch = (tl.program_id(0) // slices).to(tl.int64)
    column = (tl.program_id(0) % slices) * D + tl.arange(0, D)
    inside = column < columns
    begin = stretch * L
    if begin + L <= count:
        same = (tl.load(words + begin) >> shift) == (tl.load(words + begin + L - 1) >> shift)
        if same:
            total = tl.zeros((D,), tl.float64)
            total = add_rows(
                total, words, dout, begin, begin + L, column, inside,
                index_dims, dout_steps, dout_column, shift, UNIT, P,
            )  # fmt: skip
            tl.store(sums + stretch * columns + column, total, mask=inside)


@triton.jit
def sum_rows(
    words,
    starts,
    dout,
    sums,
    table,
    index_dims,
    dout_steps,
    dout_column,
    table_row,
    table_column,
    rows,
    columns,
    shift,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """T rows of the table a program, D columns of each; rows nobody names are zeroed together."""
    slices = tl.cdiv(columns, D)
    first = (tl.program_id(0) // slices).to(tl.int64) * T
    column = (tl.program_id(0) % slices) * D + tl.arange(0, D)
    inside = column < columns
    element: tl.constexpr = table.dtype.element_ty
    if UNIT:
        across = column
    else:
        across = column.to(tl.int64) * table_column
    if not ACCUMULATE:
        row = first + tl.arange(0, T)
        there = row < rows
        begin = tl.load(starts + row, mask=there, other=0)
        end = tl.load(starts + row + 1, mask=there, other=0)
        empty = there & (begin == end)
        target = table + row[:, None] * table_row + across[None, :]
        tl.store(target, tl.zeros((T, D), element), mask=empty[:, None] & inside[None, :])
    for r in range(0, T):
        row_here = first + r
        known = row_here < rows
        begin_here = tl.load(starts + row_here, mask=known, other=0)
        end_here = tl.load(starts + row_here + 1, mask=known, other=0)
        if end_here > begin_here:
            total = tl.zeros((D,), tl.float64)
            low = tl.cdiv(begin_here, L)
            high = end_here // L
            head = tl.minimum(end_here, tl.where(high > low, low * L, end_here))
            total = add_rows(
                total, words, dout, begin_here, head, column, inside,
                index_dims, dout_steps, dout_column, shift, UNIT, P,
            )  # fmt: skip
            if high > low:
                for stretch in range(low, high, P):
                    some = stretch + tl.arange(0, P)
                    there_too = (some < high)[:, None] & inside[None, :]
                    part = tl.load(
                        sums + some[:, None] * columns + column[None, :], mask=there_too, other=0.0
                    )
                    total += tl.sum(part, 0)
                total = add_rows(
                    total, words, dout, high * L, end_here, column, inside,
                    index_dims, dout_steps, dout_column, shift, UNIT, P,
                )  # fmt: skip
            if BY_COUNT:
                total = total / (end_here - begin_here).to(tl.float64)
            target_here = table + row_here * table_row + across
            if ACCUMULATE:
                total += tl.load(target_here, mask=inside, other=0.0).to(tl.float64)
            if element == tl.float64:
                tl.store(target_here, total, mask=inside)
            else:
                tl.store(target_here, total.to(tl.float32).to(element), mask=inside)


@triton.jit
def clear(
    table,
    table_row,
    table_column,
    rows,
    columns,
    UNIT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Zero a table that no index names."""
    slices = tl.cdiv(columns, D)
    row = (tl.program_id(0) // slices).to(tl.int64) * T + tl.arange(0, T)
    column = (tl.program_id(0) % slices) * D + tl.arange(0, D)
    if UNIT:
        across = column
    else:
        across = column.to(tl.int64) * table_column
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    element: tl.constexpr = table.dtype.element_ty
    tl.store(
        table + row[:, None] * table_row + across[None, :], tl.zeros((T, D), element), mask=mask
    )
