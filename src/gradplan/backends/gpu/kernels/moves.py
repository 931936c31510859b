"""The engine *segment sum*: a pass of its sort, which moves the words to their places.

A warp takes a block of a few times 32 words. What is before a word among those of its digit is
counted with votes: of each 32 words and each bit of the digit, the warp learns which have it; those
that agree with a word in all bits have its digit. It is in Gluon because only there the words that
a thread has are known.

Rows that no index names are zeroed meanwhile, for the words leave the memory idle. The launch
before has left at each named row the position of one of its indices, whichever came last, in one
of several copies, lest all wait for a few rows that most indices name. A row is named where the
index at that position names it: nobody has to clear the marks, for what memory happened to hold
cannot pass for one.
"""

import triton
import triton.language as tl

from ..gluon import gl, gluon
from ..launch import interpreted
from .segments import row_at, words_of
from .waiting import take_turn

_INTERPRETED = tl.constexpr(interpreted())


@gluon.jit
def move_words(
    indices,
    words,
    moved,
    counts,
    totals,
    marks,
    table,
    index_dims,
    index_steps,
    rows,
    padding,
    count,
    low,
    shift,
    blocks,
    tile,
    table_row,
    table_column,
    columns,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
    UNIT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One pass of the radix sort: every word to its place by this digit, in order.

    Programs behind the blocks zero what no index names of tiles of the table, from `tile` on.
    """
    take_turn(EARLY)
    block = gl.program_id(0)
    if block < blocks:
        move_block(
            indices, words, moved, counts, totals, block, blocks, index_dims, index_steps, rows,
            padding, count, low, shift, FIRST, BITS, BLOCK,
        )  # fmt: skip
    elif marks is not None:
        clear_tile(
            indices, marks, table, tile + block - blocks, index_dims, index_steps, rows, padding,
            count, table_row, table_column, columns, COPIES, UNIT, T, D,
        )  # fmt: skip


@gluon.jit
def move_block(
    indices,
    words,
    moved,
    counts,
    totals,
    block,
    blocks,
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
    """The words of one block to their places."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    position = block.to(count.dtype) * BLOCK + gl.arange(0, BLOCK, LANES)
    inside = position < count
    DIGITS: gl.constexpr = 1 << BITS
    one = gl.arange(0, DIGITS, LANES)
    total = gl.load(totals + one)
    base = gl.load(counts + one.to(gl.int64) * blocks + block) - total
    if FIRST:
        word = words_of(indices, position, count, index_dims, index_steps, rows, padding, shift)
    else:
        word = gl.load(words + position, mask=inside, other=0)
    digit = ((word >> low) & (DIGITS - 1)).to(gl.int32)
    # What is beyond the list is behind all others of the block, so it does not count.
    rank = rank_of(digit, BITS, BLOCK)
    base += gl.associative_scan(total, 0, plus)
    gl.store(moved + gl.gather(base, digit, 0) + rank, word, mask=inside)


@triton.jit
def plus(a, b):
    return a + b


@gluon.jit
def rank_of(digit, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of those before it have the same digit."""
    if _INTERPRETED:
        lane = gl.arange(0, BLOCK, None)
        same = (digit[:, None] == digit[None, :]) & (lane[:, None] > lane[None, :])
        return gl.sum(same.to(gl.int32), 1)
    else:
        return gl.inline_asm_elementwise(
            ranking(BITS, BLOCK // 32),
            ranked(BLOCK // 32),
            [digit],
            dtype=gl.int32,
            is_pure=False,  # all threads take part in it, wherever it would be moved
            pack=BLOCK // 32,
        )


@triton.constexpr_function
def ranked(each):
    return ",".join(["=r"] * each + ["r"] * each)


@triton.constexpr_function
def ranking(bits, each):
    """The ranks of the digits that a thread has, which are behind them in the list of operands. The
    first digits of all threads, thread by thread, come before all second ones."""
    lines = [
        f".reg .b32 vote<{each * bits}>, bit<{bits}>, rank<{each}>, lower, same, many;",
        ".reg .pred has;",
        "mov.u32 lower, %lanemask_lt;",
    ]
    for j in range(each):
        for k in range(bits):
            lines += [
                f"and.b32 same, ${each + j}, {1 << k};",
                "setp.ne.u32 has, same, 0;",
                f"vote.sync.ballot.b32 vote{j * bits + k}, has, 0xffffffff;",
            ]
    for j in range(each):
        # All ones where the digit has the bit.
        lines += [f"bfe.s32 bit{k}, ${each + j}, {k}, 1;" for k in range(bits)]
        lines.append(f"mov.b32 rank{j}, 0;")
        for i in range(j + 1):
            lines.append(f"mov.b32 same, {'lower' if i == j else '-1'};")
            # Those that agree in this bit as well: same & ~(vote ^ bit).
            lines += [
                f"lop3.b32 same, same, vote{i * bits + k}, bit{k}, 0x90;" for k in range(bits)
            ]
            lines += ["popc.b32 many, same;", f"add.u32 rank{j}, rank{j}, many;"]
    lines += [f"mov.b32 ${j}, rank{j};" for j in range(each)]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def clear_tile(
    indices,
    marks,
    table,
    tile,
    index_dims,
    index_steps,
    rows,
    padding,
    count,
    table_row,
    table_column,
    columns,
    COPIES: tl.constexpr,
    UNIT: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Zero the rows of a tile of the table that no index names."""
    MARKS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // COPIES, COPIES], [1, 1], [1, 0])
    RUN: gl.constexpr = 128 // table.dtype.element_ty.primitive_bitwidth if UNIT else 1
    TILE: gl.constexpr = gl.BlockedLayout([1, RUN], [1, 32], [1, 1], [1, 0])
    slices = tl.cdiv(columns, D)
    first = (tile // slices).to(gl.int64) * T
    row = (first + gl.arange(0, T, gl.SliceLayout(1, MARKS)))[:, None]
    copy = gl.arange(0, COPIES, gl.SliceLayout(0, MARKS))[None, :]
    there = (row < rows) & (copy >= 0)
    position = gl.load(marks + copy.to(gl.int64) * rows + row, mask=there, other=0)
    # Whatever memory held, it is not read beyond the indices.
    known = there & (position >= 0) & (position < count)
    named = row_at(indices, position, known, index_dims, index_steps, rows, padding) == row
    named = gl.max((named | ~there).to(gl.int32), 1)
    empty = gl.convert_layout(named, gl.SliceLayout(1, TILE)) == 0
    row = first + gl.arange(0, T, gl.SliceLayout(1, TILE))
    column = (tile % slices).to(columns.dtype) * D + gl.arange(0, D, gl.SliceLayout(0, TILE))
    if UNIT:
        across = column
    else:
        across = column.to(gl.int64) * table_column
    goal = table + row[:, None] * table_row + across[None, :]
    mask = empty[:, None] & (column < columns)[None, :]
    gl.store(goal, gl.full((T, D), 0.0, table.dtype.element_ty, TILE), mask=mask)
