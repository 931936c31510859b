"""Numbers: exp within a unit or two of the last place, exact quotients, the parts of a float.

ELEMENT is the stored type. Halves and f32 compute in f32, f64 in f64; sums over a row are f64 for
all of them.
"""

import triton
import triton.language as tl

from ..launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())
_INFINITY = tl.constexpr(float("inf"))
# log₂ e in two parts.
_LOG2_E = tl.constexpr(1.4426950216293335)
_LOG2_E_MORE = tl.constexpr(1.925963033500011e-08)
_SHIFT = tl.constexpr(1.5 * 2.0**23)
_SHIFT_BITS = tl.constexpr(0x4B400000)  # its bits


@triton.jit
def plain_exp2(x):
    """2^x as the hardware has it for f32; 0 below 2⁻¹²⁶."""
    if _INTERPRETED:  # which knows no assembler
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp_f32(x, POWER: tl.constexpr = 0):
    """exp(x) · 2^POWER, |POWER| ≤ 32, of an f32: within 2 · 2⁻²⁴ relative; below 2⁻¹²⁶ it is
    rounded once more."""
    if _INTERPRETED:  # which rounds a product before it adds
        return (tl.exp(x.to(tl.float64)) * 2.0**POWER).to(tl.float32)
    else:
        # Beyond these it is 0 or infinite. A NaN stays.
        x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 90.0, propagate_nan=tl.PropagateNan.ALL)
        # x · log₂ e, rounded to a whole number that the low bits of the sum hold, and the rest.
        shifted = tl.fma(x, _LOG2_E, _SHIFT)
        rest = tl.fma(x, _LOG2_E, _SHIFT - shifted)
        rest = tl.fma(x, _LOG2_E_MORE, rest)
        power = plain_exp2(rest)
        exponent = shifted.to(tl.int32, bitcast=True) - (_SHIFT_BITS - POWER)
        half = exponent >> 1
        return power * power_of_two_f32(half) * power_of_two_f32(exponent - half)


@triton.jit
def split_exp(x, whole, part):
    """exp(x) · 2^(whole + part) of an f32 as a number near 1 and a power of two: within
    2 · 2⁻²⁴, for a whole number and a small one, |x| below 2¹⁷."""
    if _INTERPRETED:
        power = whole.to(tl.float64) + part.to(tl.float64)
        wide = tl.exp2(x.to(tl.float64) * 1.4426950408889634 + power)
        return wide.to(tl.float32), tl.zeros_like(x).to(tl.int32)
    else:
        # As in `exp_f32`: the product is never rounded by itself.
        whole = whole + _SHIFT
        shifted = tl.fma(x, _LOG2_E, whole)
        rest = tl.fma(x, _LOG2_E, whole - shifted)
        rest = tl.fma(x, _LOG2_E_MORE, rest) + part
        return plain_exp2(rest), shifted.to(tl.int32, bitcast=True) - _SHIFT_BITS


@triton.jit
def powered(x, exponent):
    """x · 2^exponent, of normal numbers."""
    return (x.to(tl.int32, bitcast=True) + (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_f32(exponent):
    """2^exponent, for −126 ≤ exponent ≤ 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x, ELEMENT: tl.constexpr):
    """exp: for halves the hardware's, whose error is far below their own rounding."""
    if ELEMENT == "f32":
        return exp_f32(x)
    else:
        return tl.exp(x)


@triton.jit
def rough_exp(x, power):
    """exp(x) · 2^power, good enough for halves; 0 below 2⁻¹²⁶."""
    return plain_exp2(x * 1.4426950408889634 + power)  # a product and a sum that become one


@triton.jit
def exp_of_difference(x, y, ELEMENT: tl.constexpr, POWER: tl.constexpr = 0):
    """exp(x − y) · 2^POWER; for f32, what the difference loses in rounding is multiplied in
    again."""
    d = x - y
    if ELEMENT == "f32":
        lost = lost_in(d, x, y)
        e = exp_f32(d, POWER)
        return e + e * lost
    elif POWER != 0:
        return rough_exp(d, POWER * 1.0)
    else:
        return tl.exp(d)


@triton.jit
def lost_in(d, x, y):
    """What d = x − y has lost in rounding."""
    back = d - x
    lost = (x - (d - back)) - (y + back)
    return tl.where(tl.abs(lost) < _INFINITY, lost, 0.0)  # NaN at infinities


@triton.jit
def weight_below(x, y, ELEMENT: tl.constexpr, POWER: tl.constexpr = 0):
    """The same of an x that may be far below y, and yet is all that a row is held to: where the
    gradients of what is larger are no numbers. So for f64 too what is lost is multiplied in."""
    if ELEMENT == "f64":
        d = x - y
        e = tl.exp(d)
        return e + e * lost_in(d, x, y)
    else:
        return exp_of_difference(x, y, ELEMENT, POWER)


@triton.jit
def far_exp(x, y):
    """exp(x − y) of two f32 as f64, within 4 · 2⁻²⁴ relative: where f32 would be 0 or infinite
    too. It is 0 where the difference is −∞ alone, and never less than e⁻⁷⁰⁰ otherwise."""
    d = x - y
    none = d == -_INFINITY
    lost = lost_in(d, x, y)
    d = tl.maximum(d, -700.0, propagate_nan=tl.PropagateNan.ALL)
    d = tl.minimum(d, 700.0, propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED:
        return tl.where(none, 0.0, tl.exp(d.to(tl.float64) + lost.to(tl.float64)))
    else:
        shifted = tl.fma(d, _LOG2_E, _SHIFT)
        rest = tl.fma(d, _LOG2_E, _SHIFT - shifted)
        rest = tl.fma(d, _LOG2_E_MORE, rest)
        power = plain_exp2(rest)
        exponent = shifted.to(tl.int32, bitcast=True) - _SHIFT_BITS
        power = tl.where(none, 0.0, tl.fma(power, lost, power))
        return power.to(tl.float64) * power_of_two(exponent)


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
def reciprocal_f64(x):
    """1 / x within 2⁻⁵⁰ relative, for an f64 that is not 0; a division proper takes a subroutine,
    and registers for it."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f64 $0, $1;", "=d,d", [x], dtype=tl.float64, is_pure=True, pack=1
        )
        better = tl.fma(r, tl.fma(-x, r, 1.0), r)
        better = tl.fma(better, tl.fma(-x, better, 1.0), better)
        return tl.where(r == 0.0, r, better)  # x was infinite


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
