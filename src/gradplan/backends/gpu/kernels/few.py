"""The engine *segment sum* where indices are few: one launch, with nothing sorted.

Every program reads all indices. A program of a position sums the values of all positions that name
the same row if it is the first of them, in their order, and else does nothing; the programs behind
those zero the rows that nobody names. So there is no list, no workspace, and no launch to wait for.
"""

import triton
import triton.language as tl

from .segments import row_at
from .tiles import axis_offset


@triton.jit
def sum_few(
    indices,
    values,
    table,
    index_dims,
    index_steps,
    value_steps,
    value_column,
    table_row,
    table_column,
    rows,
    columns,
    padding,
    count,
    ELEMENT: tl.constexpr,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    Z: tl.constexpr,
    S: tl.constexpr,
):
    """N is no less than `count`. Values are summed in D columns, of P positions at a time; T rows
    are zeroed in Z columns, S of them at a time."""
    slices = tl.cdiv(columns, D)
    summing = count * slices
    pid = tl.program_id(0)
    position = tl.arange(0, N)
    named = row_at(indices, position, position < count, index_dims, index_steps, rows, padding)
    named = named.to(rows.dtype)
    if pid < summing:
        own = pid // slices
        key = tl.max(tl.where(position == own, named, 0), 0)
        same = named == key
        first = next_of(same, position, 0) == own
        if first & (key < rows):
            column = (pid % slices).to(columns.dtype) * D + tl.arange(0, D)
            sum_row(
                indices, values, table + key.to(tl.int64) * table_row, index_dims, index_steps,
                value_steps, value_column, table_column, key, rows, column, column < columns,
                padding, count, own, position, same,
                ELEMENT, UNIT, ACCUMULATE, BY_COUNT, P,
            )  # fmt: skip
    elif not ACCUMULATE:
        parts = tl.cdiv(columns, Z)
        tile = pid - summing
        row = (tile // parts).to(rows.dtype) * T + tl.arange(0, T)
        hit = tl.max((named[None, :] == row[:, None]).to(tl.int32), 1)
        empty = (hit == 0) & (row < rows)
        place = table + row.to(tl.int64) * table_row
        start = (tile % parts).to(columns.dtype) * Z
        for begin in range(start, tl.minimum(start + Z, columns), S):
            column = begin + tl.arange(0, S)
            if UNIT:
                across = column
            else:
                across = column.to(tl.int64) * table_column
            mask = empty[:, None] & (column < columns)[None, :]
            goal = place[:, None] + across[None, :]
            tl.store(goal, tl.zeros((T, S), table.dtype.element_ty), mask=mask)


@triton.jit
def sum_row(
    indices,
    values,
    goal,
    index_dims,
    index_steps,
    value_steps,
    value_column,
    table_column,
    key,
    rows,
    column,
    inside,
    padding,
    count,
    own,
    position,
    same,
    ELEMENT: tl.constexpr,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    P: tl.constexpr,
):
    """Some columns of a row: the `same` of all positions name it, `own` first."""
    if UNIT:
        source = column
        goal += column
    else:
        source = column.to(tl.int64) * value_column
        goal += column.to(tl.int64) * table_column
    at = axis_offset(own, index_dims, value_steps)
    # A sum begins with 0, so that -0.0 alone comes as 0.0, as it does from a sorted list.
    total = 0.0 + tl.load(values + at + source, mask=inside, other=0.0).to(tl.float64)
    behind = next_of(same, position, own + 1)
    while behind < position.shape[0]:
        begin = behind // P * P
        place = begin + tl.arange(0, P)
        named = row_at(indices, place, place < count, index_dims, index_steps, rows, padding)
        others = axis_offset(place, index_dims, value_steps)
        mask = ((named.to(rows.dtype) == key) & (place > own))[:, None] & inside[None, :]
        value = tl.load(values + others[:, None] + source[None, :], mask=mask, other=0.0)
        total += tl.sum(value.to(tl.float64), 0)
        behind = next_of(same, position, begin + P)
    if BY_COUNT:
        total = total / tl.sum(same.to(tl.float64), 0)
    if ACCUMULATE:
        total += tl.load(goal, mask=inside, other=0.0).to(tl.float64)
    if ELEMENT != "f64":
        total = total.to(tl.float32)
    tl.store(goal, total.to(goal.dtype.element_ty), mask=inside)


@triton.jit
def next_of(same, position, begin):
    """The first of these positions from `begin` on, or one behind all."""
    return tl.min(tl.where(same & (position >= begin), position, position.shape[0]), 0)
