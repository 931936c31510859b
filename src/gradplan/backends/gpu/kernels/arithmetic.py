"""Numbers: exp within a unit or two of the last place, exact quotients, the parts of a float.

ELEMENT is the stored type. Halves and f32 compute in f32, f64 in f64; sums over a row are f64 for
all of them.
"""

import triton
import triton.language as tl

from ..launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def exp_f32(x):
    """exp of an f32, within 1.5 · 2⁻²⁴ relative; below 2⁻¹²⁶ it is 0."""
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts; the first has so few bits that `whole` times it is exact.
    r = (x - whole * 0.693359375) - whole * -2.1219444005469058e-4
    p = r * 0.0013926213141530752 + 0.008363203145563602
    p = p * r + 0.041666556149721146
    p = p * r + 0.16666576266288757
    p = p * r + 0.5
    p = p * (r * r) + r + 1.0
    bounded = tl.where((x >= -87.33654) & (x <= 88.72283), whole, 0.0)
    bits = p.to(tl.int32, bitcast=True) + (bounded.to(tl.int32) << 23)
    result = bits.to(tl.float32, bitcast=True)
    result = tl.where(x < -87.33654, 0.0, result)
    result = tl.where(x > 88.72283, _INFINITY, result)
    return tl.where(x != x, x, result)


@triton.jit
def exp(x, ELEMENT: tl.constexpr):
    """exp: for halves the hardware's, whose error is far below their own rounding."""
    if ELEMENT == "f32":
        return exp_f32(x)
    else:
        return tl.exp(x)


@triton.jit
def exp_of_difference(x, y, ELEMENT: tl.constexpr):
    """exp(x − y); for f32, what the difference loses in rounding is multiplied in again."""
    d = x - y
    if ELEMENT == "f32":
        back = d - x
        lost = (x - (d - back)) - (y + back)
        lost = tl.where(tl.abs(lost) < _INFINITY, lost, 0.0)  # NaN at infinities
        e = exp_f32(d)
        return e + e * lost
    else:
        return tl.exp(d)


@triton.jit
def quotient(a, b, ELEMENT: tl.constexpr):
    """a / b, correctly rounded where the element would show the difference."""
    if ELEMENT == "f32":
        a, b = tl.broadcast(a, b)
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def rough_reciprocal(x):
    """1 / x within a unit or two of f32, for |x| between 2⁻¹²⁶ and 2¹²⁶."""
    if _INTERPRETED:  # which knows no assembler
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x within a unit of f32, in the same range."""
    r = rough_reciprocal(x)
    return tl.fma(r, tl.fma(-x, r, 1.0), r)


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def parts(x):
    """Significand (1 ≤ |m| < 2, sign included), exponent, and whether x is 0, infinite or NaN.

    Those three count as ±1 with exponent 0. x is f64.
    """
    bits = x.to(tl.int64, bitcast=True)
    tiny = ((bits >> 52) & 0x7FF) == 0
    bits = tl.where(tiny, x * 18014398509481984.0, x).to(tl.int64, bitcast=True)  # 2⁵⁴
    field = (bits >> 52) & 0x7FF
    special = (field == 0) | (field == 0x7FF)
    sign = bits & (-9223372036854775807 - 1)
    significand = tl.where(special, 0, bits & 0x000FFFFFFFFFFFFF)
    m = (sign | significand | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    exponent = field.to(tl.int32) - 1023 - tl.where(tiny, 54, 0)
    return m, tl.where(special, 0, exponent), special


@triton.jit
def plain_parts(x):
    """Significand and exponent of an f64 that is a normal number."""
    bits = x.to(tl.int64, bitcast=True)
    m = ((bits & -9218868437227405313) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return m, ((bits >> 52) & 0x7FF).to(tl.int32) - 1023


@triton.jit
def parts_f32(x):
    """`parts` of an f32: the significand comes as f64."""
    bits = x.to(tl.int32, bitcast=True)
    tiny = ((bits >> 23) & 0xFF) == 0
    bits = tl.where(tiny, x * 16777216.0, x).to(tl.int32, bitcast=True)  # 2²⁴
    field = (bits >> 23) & 0xFF
    special = (field == 0) | (field == 0xFF)
    sign = bits & (-2147483647 - 1)
    significand = tl.where(special, 0, bits & 0x007FFFFF)
    m = (sign | significand | 0x3F800000).to(tl.float32, bitcast=True)
    exponent = field - 127 - tl.where(tiny, 24, 0)
    return m.to(tl.float64), tl.where(special, 0, exponent), special


@triton.jit
def power_of_two(exponent):
    """2^exponent as f64, for −1022 ≤ exponent ≤ 1023."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def scaled(m, exponent):
    """m · 2^exponent as f64, in two steps so that each power is a normal number."""
    bounded = tl.minimum(tl.maximum(exponent, -2044), 2044)
    half = bounded >> 1
    return m * power_of_two(half) * power_of_two(bounded - half)
