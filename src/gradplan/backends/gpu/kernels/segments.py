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
    D: tl.constexpr,
):
    """Add the rows of `dout` that the words from begin to end name: a few one by one, many P at
    a time."""
    positions = (tl.full((), 1, tl.int64) << shift) - 1
    if UNIT:
        across = column
    else:
        across = column.to(tl.int64) * dout_column
    if end - begin > P // 2:
        sums = tl.zeros((P, D), tl.float64)
        for at in range(begin, end, P):
            place = at + tl.arange(0, P)
            there = place < end
            position = tl.load(words + place, mask=there, other=0) & positions
            row = axis_offset(position, index_dims, dout_steps)
            source = dout + row[:, None] + across[None, :]
            sums += tl.load(source, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float64)
        total += tl.sum(sums, 0)
    else:
        for at in range(begin, end):
            position = tl.load(words + at) & positions
            source = dout + axis_offset(position, index_dims, dout_steps) + across
            total += tl.load(source, mask=inside, other=0.0).to(tl.float64)
    return total


@triton.jit
def add_sums(total, sums, begin, end, column, inside, columns, P: tl.constexpr, D: tl.constexpr):
    """Add sums taken before, P at a time."""
    if end > begin:
        parts = tl.zeros((P, D), tl.float64)
        for at in range(begin, end, P):
            place = at + tl.arange(0, P)
            there = (place < end)[:, None] & inside[None, :]
            source = sums + place[:, None].to(tl.int64) * columns + column[None, :]
            parts += tl.load(source, mask=there, other=0.0)
        total += tl.sum(parts, 0)
    return total


@triton.jit
def sum_stretches(
    words,
    dout,
    sums,
    more,
    index_dims,
    dout_steps,
    dout_column,
    columns,
    count,
    shift,
    LEVEL: tl.constexpr,
    UNIT: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
):
    """Rows named so often that one program would take long: L words in a row of one name.

    LEVEL 1 sums the rows they name into `sums`; LEVEL 2 sums L of those into `more`.
    """
    slices = tl.cdiv(columns, D)
    stretch = (tl.program_id(0) // slices).to(tl.int64)
    column = (tl.program_id(0) % slices) * D + tl.arange(0, D)
    inside = column < columns
    SPAN: tl.constexpr = L if LEVEL == 1 else L * L
    begin = stretch * SPAN
    if begin + SPAN <= count:
        if (tl.load(words + begin) >> shift) == (tl.load(words + begin + SPAN - 1) >> shift):
            total = tl.zeros((D,), tl.float64)
            if LEVEL == 1:
                total = add_rows(
                    total, words, dout, begin, begin + L, column, inside,
                    index_dims, dout_steps, dout_column, shift, UNIT, P, D,
                )  # fmt: skip
                tl.store(sums + stretch * columns + column, total, mask=inside)
            else:
                low = stretch * L
                total = add_sums(total, sums, low, low + L, column, inside, columns, P, D)
                tl.store(more + stretch * columns + column, total, mask=inside)


@triton.jit
def sum_rows(
    words,
    starts,
    dout,
    sums,
    more,
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
    """T rows of the table a program, D columns of each; rows nobody names are zeroed together.

    A row's words are taken in order: those before the first whole stretch, sums of stretches, of
    stretches of stretches, and back down to the words behind the last.
    """
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
        name = first + r
        known = name < rows
        begins = tl.load(starts + name, mask=known, other=0)
        ends = tl.load(starts + name + 1, mask=known, other=0)
        if ends > begins:
            total = tl.zeros((D,), tl.float64)
            low = tl.cdiv(begins, L)
            high = ends // L
            whole = high > low
            total = add_rows(
                total, words, dout, begins, tl.where(whole, low * L, ends), column, inside,
                index_dims, dout_steps, dout_column, shift, UNIT, P, D,
            )  # fmt: skip
            if whole:
                lower = tl.cdiv(low, L)
                higher = high // L
                wholes = higher > lower
                stop = tl.where(wholes, lower * L, high)
                total = add_sums(total, sums, low, stop, column, inside, columns, P, D)
                if wholes:
                    total = add_sums(total, more, lower, higher, column, inside, columns, P, D)
                    total = add_sums(total, sums, higher * L, high, column, inside, columns, P, D)
                total = add_rows(
                    total, words, dout, high * L, ends, column, inside,
                    index_dims, dout_steps, dout_column, shift, UNIT, P, D,
                )  # fmt: skip
            if BY_COUNT:
                total = total / (ends - begins).to(tl.float64)
            goal = table + name * table_row + across
            if ACCUMULATE:
                total += tl.load(goal, mask=inside, other=0.0).to(tl.float64)
            if element == tl.float64:
                tl.store(goal, total, mask=inside)
            else:
                tl.store(goal, total.to(tl.float32).to(element), mask=inside)


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
