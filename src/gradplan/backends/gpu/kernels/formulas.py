"""The formulas of map and row-state gradients, one branch a kind, as in the CPU's `formulas`.

Most row states are a sum: `term` is what an element adds, and `apply` maps a tile to the gradient
from the sums of its rows. The ties FIRST and LAST keep an index instead, and prod the parts of a
product: `tile_state`, `merge` and `apply` cover all. Places beyond the axis are left out by
choice, never by a product with zero.
"""

import triton
import triton.language as tl

from .arithmetic import (
    exp,
    exp_of_difference,
    multiply,
    parts,
    parts_f32,
    power_of_two,
    product_f64,
    quotient,
    scaled,
)

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_FAR = tl.constexpr(2.0**62)


@triton.jit
def hit(x, y):
    """Whether x is the extremum y: NaN equals NaN."""
    return (x == y) | ((x != x) & (y != y))


@triton.jit
def inside(values, mask, R: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    """The values of a whole tile, 0 beyond the axis."""
    if FULL:
        return tl.broadcast_to(values, (R, C))
    else:
        return tl.where(mask, tl.broadcast_to(values, (R, C)), tl.zeros((R, C), values.dtype))


@triton.jit
def term(KIND: tl.constexpr, ELEMENT: tl.constexpr, dy, x, y):
    """What an element adds to the state of its row: f64, or a count."""
    if KIND == "softmax":
        return product_f64(y, dy, ELEMENT)
    elif KIND == "log_softmax":
        return dy.to(tl.float64)
    elif KIND == "var" or KIND == "std":
        return x.to(tl.float64)
    else:  # max and min, shared among ties
        return hit(x, y).to(tl.int32)


@triton.jit
def tile_state(
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    dy,
    x,
    y,
    order,
    mask,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    """The state of a tile's part of each row: three f64 of shape [R], of which most use one."""
    none = tl.zeros((R,), tl.float64)
    if KIND == "prod":
        return product_state(ELEMENT, x, mask, R, C)
    elif TIES == "first":
        far = (
            tl.full((1, 1), 0x3FFFFFFFFFFFFFFF, tl.int64) if order.dtype == tl.int64 else 0x7FFFFFFF
        )
        tie = hit(x, y) & mask
        return tl.min(tl.where(tie, order, far), 1).to(tl.float64), none, none
    elif TIES == "last":
        tie = hit(x, y) & mask
        return tl.max(tl.where(tie, order, -1), 1).to(tl.float64), none, none
    else:
        added = inside(term(KIND, ELEMENT, dy, x, y), mask, R, C, FULL)
        return tl.sum(added, 1).to(tl.float64), none, none


@triton.jit
def first_state(KIND: tl.constexpr, TIES: tl.constexpr, R: tl.constexpr):
    """The state of no elements."""
    none = tl.zeros((R,), tl.float64)
    if KIND == "prod":
        return none + 1.0, none, none
    elif TIES == "first":
        return none + _FAR, none, none
    elif TIES == "last":
        return none - 1.0, none, none
    else:
        return none, none, none


@triton.jit
def merge(KIND: tl.constexpr, TIES: tl.constexpr, s0, s1, s2, t0, t1, t2):
    """The state of two parts of a row, the first of them first on the axis."""
    if KIND == "prod":
        m, more, _ = parts(s0 * t0)
        a, b = s2.to(tl.int32), t2.to(tl.int32)
        zeros = tl.minimum((a & 3) + (b & 3), 2)
        infinite = tl.minimum(((a >> 2) & 3) + ((b >> 2) & 3), 2)
        nans = tl.minimum((a >> 4) + (b >> 4), 2)
        count = (zeros + 4 * infinite + 16 * nans).to(tl.float64)
        return m, s1 + t1 + more.to(tl.float64), count
    elif TIES == "first":
        return tl.minimum(s0, t0), s1, s2
    elif TIES == "last":
        return tl.maximum(s0, t0), s1, s2
    else:
        return s0 + t0, s1, s2


@triton.jit
def apply(KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, s0, dy, x, y, order, n, p):
    """The gradient of a tile, from the states of its rows (of shape [R]); not of prod."""
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" else tl.float32
    if KIND == "softmax":
        return y * dy - y * s0[:, None].to(TYPE)  # dy − s might overflow
    elif KIND == "log_softmax":
        return dy - times(exp(y, ELEMENT), s0[:, None], TYPE)
    elif KIND == "var":
        deviation = x - (s0 / n.to(tl.float64))[:, None].to(TYPE)
        m = tl.full((), p, tl.float64)
        return times(deviation, dy.to(tl.float64) * (2.0 / m), TYPE)
    elif KIND == "std":
        deviation = x - (s0 / n.to(tl.float64))[:, None].to(TYPE)
        m = tl.full((), p, tl.float64)
        share = dy.to(tl.float64) / (m * tl.where(y == 0.0, 1.0, y).to(tl.float64))
        return tl.where(y == 0.0, 0.0, times(deviation, share, TYPE))
    elif TIES == "split":
        share = quotient(dy, s0[:, None].to(TYPE), ELEMENT)
        return tl.where(hit(x, y), share, 0.0)
    else:
        return tl.where(order == s0[:, None].to(order.dtype), dy, 0.0)


@triton.jit
def times(a, factor, TYPE: tl.constexpr):
    """a · factor, one f64 a row; where f32 does not hold the factor, their product may fit."""
    if TYPE == tl.float64:
        return a * factor
    else:
        size = tl.abs(factor)
        down = tl.where(size > 1e30, 2.0**-60, tl.where(size < 1e-30, 2.0**60, 1.0))
        return a * (1.0 / down).to(tl.float32) * (factor * down).to(tl.float32)


@triton.jit
def inverse(numerator, p, TYPE: tl.constexpr):
    """A scalar quotient, taken in f64 and rounded once."""
    return (tl.full((), numerator, tl.float64) / tl.full((), p, tl.float64)).to(TYPE)


@triton.jit
def product_state(ELEMENT: tl.constexpr, x, mask, R: tl.constexpr, C: tl.constexpr):
    """Π of the significands, the sum of the exponents, and how many are 0, infinite or NaN.

    Those three count as ±1 in the product, so leaving one factor out is exact whatever it was;
    each is counted up to 2, since one is all that leaves. 512 significands multiply to less than
    2⁵¹².
    """
    x = tl.where(mask, tl.broadcast_to(x, (R, C)), 1.0)
    if ELEMENT == "f64":
        m, e, _ = parts(x)
    else:
        m, e, _ = parts_f32(x)
    m, more = product_of(m, R, C)
    zeros = tl.minimum(tl.sum((x == 0.0).to(tl.int32), 1), 2)
    infinite = tl.minimum(tl.sum((tl.abs(x) == _INFINITY).to(tl.int32), 1), 2)
    nans = tl.minimum(tl.sum((x != x).to(tl.int32), 1), 2)
    count = (zeros + 4 * infinite + 16 * nans).to(tl.float64)
    return m, (tl.sum(e, 1) + more).to(tl.float64), count


@triton.jit
def product_of(m, R: tl.constexpr, C: tl.constexpr):
    """The product of significands as significand and exponent."""
    B: tl.constexpr = 512
    if C > B:
        m = tl.reduce(tl.reshape(m, (R, C // B, B)), 2, multiply)
        m, above, _ = parts(m)
        m, more, _ = parts(tl.reduce(m, 1, multiply))
        return m, more + tl.sum(above, 1)
    else:
        m, more, _ = parts(tl.reduce(m, 1, multiply))
        return m, more


@triton.jit
def plain_product(
    ELEMENT: tl.constexpr, x, mask, R: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr
):
    """Significand and exponent of Π x, and whether each row is ordinary: its x normal numbers.

    The product of two significands of halves is exact in f32.
    """
    x = tl.broadcast_to(x, (R, C))
    if not FULL:
        x = tl.where(mask, x, 1.0)
    if ELEMENT == "f64":
        m, e, special = parts(x)
        ordinary = tl.max(special.to(tl.int32), 1) == 0
        exponent = tl.sum(e, 1)
        m, more = product_of(m, R, C)
    else:
        bits = x.to(tl.int32, bitcast=True)
        field = (bits >> 23) & 0xFF
        # 0 becomes the largest; what is above 2¹²⁶ has no rough quotient.
        ordinary = tl.max((field - 1).to(tl.uint32, bitcast=True), 1) < 252
        exponent = tl.sum(field, 1) - 127 * C
        m = ((bits & -2139095041) | 0x3F800000).to(tl.float32, bitcast=True)
        if ELEMENT != "f32" and C > 1:
            a, b = tl.split(tl.reshape(m, (R, C // 2, 2)))
            m, more = product_of((a * b).to(tl.float64), R, C // 2)
        else:
            m, more = product_of(m.to(tl.float64), R, C)
    return m, exponent + more, ordinary


@triton.jit
def product_share(ELEMENT: tl.constexpr, m, exponent, dy, row_mask):
    """dy · Π x, and whether all rows hold it safely, so that dividing it by x is all there is."""
    LIMIT: tl.constexpr = 500 if ELEMENT == "f64" else 100
    safe = tl.abs(exponent) < LIMIT
    whole = m * power_of_two(tl.where(safe, exponent, 0))
    share = dy * whole[:, None]
    size = tl.max(tl.abs(share), 1)
    BIG: tl.constexpr = 1e300 if ELEMENT == "f64" else 1e30
    fits = (size < BIG) & ((size > 1.0 / BIG) | (size == 0.0))
    return share, tl.min(tl.where(row_mask & ~(safe & fits), 0, 1), 0) == 1


@triton.jit
def product_of_others(ELEMENT: tl.constexpr, s0, s1, s2, dy, x):
    """dy · Π of the others, part by part: right whatever x is."""
    if ELEMENT == "f64":
        m, e, special = parts(x)
    else:
        m, e, special = parts_f32(x)
    ratio = s0[:, None] / m
    exponent = s1[:, None] - e.to(tl.float64)
    exponent = tl.minimum(tl.maximum(exponent, -2044.0), 2044.0).to(tl.int32)
    others = scaled(ratio, exponent)
    own = tl.where(x != x, 16, tl.where(x == 0.0, 1, 4))
    left = s2[:, None].to(tl.int32) - tl.where(special, own, 0)
    zero, infinite, nan = (left & 3) > 0, ((left >> 2) & 3) > 0, (left >> 4) > 0
    others = tl.where(zero, ratio * 0.0, others)
    others = tl.where(infinite, tl.where(zero, _NAN, ratio * _INFINITY), others)
    others = tl.where(nan, _NAN, others)
    return dy.to(tl.float64) * others


@triton.jit
def mapped(KIND: tl.constexpr, ELEMENT: tl.constexpr, EXTREME: tl.constexpr, dy, x, y, p):
    """The gradient of a kind without a row state."""
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" or EXTREME else tl.float32
    if KIND == "lerp":
        return dy.to(TYPE) * tl.full((), p, tl.float64).to(TYPE)
    elif KIND == "sum":
        return dy
    elif KIND == "mean":  # p = n
        if ELEMENT == "f64":
            return dy / tl.full((), p, tl.float64)
        else:
            return dy * inverse(1.0, p, TYPE)
    elif KIND == "norm2":
        # x / y first: it is at most 1, where dy · x might overflow.
        ratio = quotient(x, tl.where(y == 0.0, 1.0, y), ELEMENT)
        return tl.where(y == 0.0, 0.0, dy * ratio)
    elif KIND == "log_sum_exp":
        return tl.where(y == -_INFINITY, 0.0, dy * exp_of_difference(x, y, ELEMENT))
    else:  # max, min with ties ALL
        return tl.where(hit(x, y), dy, 0.0)
