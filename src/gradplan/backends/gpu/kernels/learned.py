"""Reductions whose forward pass learns what lets the backward pass move less.

`extrema` is the forward of max and min: beside y it tells for each row where its only winner is
(≥ 0), or how many winners there are (negative). The gradient of a row with one winner is then a
matter of writing: `map_learned` reads x only where rows have ties or a NaN. For var and std it
takes the mean of each row, which their forward knows.

Arrays are rows × n, one row after the other; 16 divides n, and 2³⁰ is larger.
"""

import triton
import triton.language as tl

from .arithmetic import quotient
from .formulas import apply, counts, hit, numbers
from .tiles import USUAL, cache_of, widened

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def larger(a, b):
    """A NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def joined(a, b, best, ties, place, more, there):
    """Of two stretches with the extrema a and b, the better of which is `best`."""
    ties = tl.where(a == b, ties + more, tl.where(a == best, ties, more))
    return best, ties, tl.where(a == best, place, there)


@triton.jit
def join_larger(a, ties, place, b, more, there):
    return joined(a, b, larger(a, b), ties, place, more, there)


@triton.jit
def join_smaller(a, ties, place, b, more, there):
    return joined(a, b, smaller(a, b), ties, place, more, there)


@triton.jit
def part_of(
    x, rows, n, row, begin, other, C: tl.constexpr, FULL: tl.constexpr, CACHE: tl.constexpr = USUAL
):  # fmt: skip
    """C places of some rows as they are stored; `other` where there is no element."""
    index = begin + tl.arange(0, C)
    source = x + (row.to(tl.int64) * n)[:, None] + index[None, :]
    if FULL:
        return tl.load(source, eviction_policy=CACHE)
    else:
        mask = (row < rows)[:, None] & (index < n)[None, :]
        return tl.load(source, mask=mask, other=other, eviction_policy=CACHE)


@triton.jit
def extrema(
    x,
    y,
    known,
    rows,
    n,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    FULL: tl.constexpr,
):
    """A program walks R rows by C places at a time, and keeps one state for every W neighbours.

    Rows with a NaN, and rows that are all −∞ (for min ∞), are told by their number of winners, also
    where that is 1: so nothing on the way need know of them.
    """
    WIDE: tl.constexpr = ELEMENT == "f64"
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    WORST: tl.constexpr = -_INFINITY if KIND == "max" else _INFINITY
    GROUPS: tl.constexpr = C // W
    row = tl.program_id(0).to(rows.dtype) * R + tl.arange(0, R)
    best = tl.full((R, GROUPS), WORST, TYPE)
    ties = tl.zeros((R, GROUPS), tl.int32)
    place = tl.zeros((R, GROUPS), tl.int32)
    group = tl.arange(0, GROUPS)[None, :] * W
    lane = 256 + tl.arange(0, W)[None, None, :]
    for begin in range(0, n, C):
        value = part_of(x, rows, n, row, begin, WORST, C, FULL)
        value = tl.reshape(widened(value, "t", WIDE), (R, GROUPS, W))
        if KIND == "max":
            better = larger(best, tl.reduce(value, 2, larger))
        else:
            better = smaller(best, tl.reduce(value, 2, smaller))
        # How many of the group win, and above that the place of a single one.
        code = tl.sum(tl.where(value == better[:, :, None], lane, 0), 2)
        new = better != best
        ties = tl.where(new, 0, ties) + (code >> 8)
        place = tl.where(new, begin + group + (code & 255), place)
        best = better
    if KIND == "max":
        best, ties, place = tl.reduce((best, ties, place), 1, join_larger)
    else:
        best, ties, place = tl.reduce((best, ties, place), 1, join_smaller)
    lost = best != best
    ties = tl.where(best == WORST, n.to(tl.int32), ties)
    if tl.max(lost.to(tl.int32), 0) > 0:
        nans = tl.zeros((R, C), tl.int32)
        for begin in range(0, n, C):
            value = widened(part_of(x, rows, n, row, begin, 0.0, C, FULL), "t", WIDE)
            nans += (value != value).to(tl.int32)
        ties = tl.where(lost, tl.sum(nans, 1), ties)
    one = (ties == 1) & (best != WORST) & (best == best)
    mask = row < rows
    tl.store(y + row, best.to(y.dtype.element_ty), mask=mask)
    tl.store(known + row, tl.where(one, place, 0 - ties), mask=mask)


@triton.jit
def map_learned(
    dy,
    x,
    y,
    known,
    out,
    rows,
    n,
    p,
    q,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIKE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """The gradient of R rows by C places. ALIKE: dy is one number for all rows; p and q are those
    of `formulas.numbers`."""
    WIDE: tl.constexpr = ELEMENT == "f64"
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    steps = tl.cdiv(n, C)
    pid = tl.program_id(0)
    row = (pid // steps).to(rows.dtype) * R + tl.arange(0, R)
    begin = (pid % steps).to(n.dtype) * C
    index = begin + tl.arange(0, C)
    mask = row < rows
    told = tl.load(known + row, mask=mask, other=0)
    factor = tl.load(dy + row * 0 if ALIKE else dy + row, mask=mask, other=0.0).to(TYPE)
    if counts(KIND):
        if tl.min(told, 0) >= 0:
            value = tl.where(index[None, :] == told[:, None], factor[:, None], 0.0)
        else:
            raw = part_of(x, rows, n, row, begin, 0.0, C, FULL, cache_of(False, True))
            extremum = tl.load(y + row, mask=mask, other=0.0).to(TYPE)
            share = quotient(factor, tl.where(told < 0, 0 - told, 1).to(TYPE), ELEMENT)
            hits = hit(widened(raw, "t", WIDE), extremum[:, None])
            value = tl.where(hits, share[:, None], 0.0)
    else:
        raw = part_of(x, rows, n, row, begin, 0.0, C, FULL, cache_of(False, True))
        deviation = factor
        if KIND == "std":
            deviation = tl.load(y + row, mask=mask, other=1.0).to(TYPE)
        mean = told.to(tl.float64)
        # Differences overflow, and infinities cancel, where a sum in f64 does neither.
        odd = tl.abs(mean) * 0.0 != 0.0
        if tl.max(odd.to(tl.int32), 0) > 0:
            # In small steps, so that the usual way keeps its registers.
            FEW: tl.constexpr = C // 8
            total = tl.zeros((R, FEW), tl.float64)
            for start in range(0, n, FEW):
                total += part_of(x, rows, n, row, start, 0.0, FEW, FULL).to(tl.float64)
            mean = tl.where(odd, tl.sum(total, 1) * q, mean)
        k0, k1, k2 = numbers(KIND, "", ELEMENT, mean, mean, mean, factor, deviation, p, 1.0, mask)
        value = apply(KIND, "", ELEMENT, k0, k1, k2, 0.0, widened(raw, "t", WIDE), 0.0, index)
    element: tl.constexpr = out.dtype.element_ty
    target = out + (row.to(tl.int64) * n)[:, None] + index[None, :]
    value = tl.broadcast_to(value.to(element), (R, C))
    if FULL:
        tl.store(target, value)
    else:
        tl.store(target, value, mask=mask[:, None] & (index < n)[None, :])
