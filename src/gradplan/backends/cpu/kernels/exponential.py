"""exp, written so that LLVM vectorises it.

exp(x) = 2ᵏ · exp(r), k = round(x / ln 2), r = x − k·ln 2, |r| ≤ ½ ln 2, and a polynomial for
exp(r). In f64, 2ᵏ is applied in two halves, so that results below the normal range round once,
into the subnormals, and results above it become inf. NaN stays NaN.

The operations must stay in this order, so these functions allow contraction but no
reassociation.
"""

from __future__ import annotations

from math import factorial, log

import numpy as np

from .device import ordered
from .lowlevel import bits_of_f32, bits_of_f64, f32_of_bits, f64_of_bits

_F32 = np.float32
_LOG2E_32 = _F32(1 / log(2.0))
_LOG2E = 1 / log(2.0)
# ln 2 in two parts; the first has so few bits that k times it is exact.
_LN2_HIGH_32 = _F32(0.693359375)
_LN2_LOW_32 = _F32(log(2.0) - 0.693359375)
_LN2_HIGH = float.fromhex("0x1.62e42fefa0000p-1")
_LN2_LOW = float.fromhex("0x1.cf79abc9e3b39p-40")
# Adding 1.5 · 2^(p−1) leaves the nearest integer in the low bits.
_ROUND_32 = _F32(1.5 * 2**23)
_ROUND = 1.5 * 2**52
_C = tuple(1 / factorial(k) for k in range(14))
# exp(r) ≈ 1 + r + r²·(…): Chebyshev's fit, within 0.18 units in the last place.
_M32 = tuple(
    _F32(c)
    for c in (
        0.5,
        0.16666576266288757,
        0.041666556149721146,
        0.008363203145563602,
        0.0013926213141530752,
    )
)
_ONE_32, _ZERO_32, _INF_32 = _F32(1), _F32(0), _F32(np.inf)
# ln 2⁻¹²⁶ and the logarithm of the largest f32.
_LOW_32, _HIGH_32 = _F32(-87.33654), _F32(88.72283)


@ordered
def _parts_f32(x):
    """exp(x) as p · 2ᵏ, in f32."""
    shifted = x * _LOG2E_32 + _ROUND_32
    k = bits_of_f32(shifted) - bits_of_f32(_ROUND_32)
    whole = shifted - _ROUND_32
    r = (x - whole * _LN2_HIGH_32) - whole * _LN2_LOW_32
    p = _M32[4]
    p = p * r + _M32[3]
    p = p * r + _M32[2]
    p = p * r + _M32[1]
    p = p * r + _M32[0]
    return p * (r * r) + r + _ONE_32, k


@ordered
def exp_f32(x):
    """exp of an f32, within 1.5 · 2⁻²⁴ relative; below 2⁻¹²⁶ it is 0.

    It serves where results so small stand beside others near 1, and vanish: not where they meet
    a number that f32 hardly holds, or an infinite one.
    """
    p, k = _parts_f32(x)
    result = f32_of_bits(bits_of_f32(p) + (k << np.int32(23)))
    result = _ZERO_32 if x < _LOW_32 else result
    result = _INF_32 if x > _HIGH_32 else result
    return x if x != x else result


@ordered
def exp_f64(x):
    """exp of an f64, within 1.5 · 2⁻⁵³ relative."""
    bounded = x
    if bounded < -750.0:
        bounded = -750.0
    if bounded > 720.0:
        bounded = 720.0
    shifted = bounded * _LOG2E + _ROUND
    k = bits_of_f64(shifted) - bits_of_f64(_ROUND)
    whole = shifted - _ROUND
    r = (bounded - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = _C[13]
    p = p * r + _C[12]
    p = p * r + _C[11]
    p = p * r + _C[10]
    p = p * r + _C[9]
    p = p * r + _C[8]
    p = p * r + _C[7]
    p = p * r + _C[6]
    p = p * r + _C[5]
    p = p * r + _C[4]
    p = p * r + _C[3]
    p = p * r + _C[2]
    p = p * (r * r) + r + 1.0
    half = k >> 1
    rest = k - half
    first = f64_of_bits((half + 1023) << 52)
    second = f64_of_bits((rest + 1023) << 52)
    result = p * first * second
    return x if x != x else result


@ordered
def _lost_f32(x, y, d):
    """What d = x − y of two f32 has lost in rounding."""
    back = d - x
    lost = (x - (d - back)) - (y + back)
    return lost if lost == lost else _ZERO_32  # at infinities


@ordered
def exp_f64_of_difference(x, y):
    """exp(x − y): what the difference loses in rounding, which is much where it is large, is
    multiplied in again."""
    d = x - y
    e = exp_f64(d)
    return e + e * lost_f64(x, y, d)


@ordered
def lost_f64(x, y, d):
    """What d = x − y has lost in rounding."""
    back = d - x
    lost = (x - (d - back)) - (y + back)
    return lost if lost == lost else 0.0  # at infinities


@ordered
def exp_f32_of_difference(x, y):
    """exp(x − y) of two f32: what the difference loses in rounding is multiplied in again."""
    d = x - y
    e = exp_f32(d)
    return e + e * _lost_f32(x, y, d)


# An f32 exponential scaled in f64 has the range of f64, but for its subnormals: they are as good as
# 0, and not 0. Below the first of these the scale would be no normal number, and below the second
# f64 itself rounds to 0. Above 709 only a y that belongs to another x can lead.
_LOW_SCALE, _LOW, _HIGH = _F32(-708.0), _F32(-745.13324), _F32(709.0)


@ordered
def exp_scaled(t):
    """exp of a difference of two halves, up to 709, as an f64: within 1.5 · 2⁻²⁴ relative."""
    p, k = _parts_f32(_LOW_SCALE if t < _LOW_SCALE else t)
    # NaN stays NaN: a half's has no bits so low that they would be among those kept of k.
    result = f64_of_bits(bits_of_f64(np.float64(p)) + (np.int64(k) << 52))
    return 0.0 if t < _LOW else result


@ordered
def exp_scaled_of_difference(x, y):
    """exp(x − y) of two f32 likewise."""
    d = x - y
    t = _LOW_SCALE if d < _LOW_SCALE else d
    p, k = _parts_f32(_HIGH if t > _HIGH else t)
    result = np.float64(p + p * _lost_f32(x, y, d)) * f64_of_bits((np.int64(k) + 1023) << 52)
    return 0.0 if d < _LOW else result


# exp(t) − 1 = t + t²·(…) for −ln 2 ≤ t ≤ 0: Taylor's, within 2⁻²⁵ relative before roundings.
_E32 = tuple(_F32(1 / factorial(k)) for k in range(2, 10))
_HALF_BOUND = -0.69


@ordered
def decay_f32(d):
    """exp of a d ≤ 0 in f32 arithmetic, as an f64 whose distance from 1 is relatively exact.

    Where exp(d) ≥ ½ it is 1 + (exp(d) − 1), the part in brackets within 3.5 · 2⁻²⁴ relative: a
    product of many factors near 1 then loses by how far it is from 1, not by how many they are.
    """
    t = _F32(d)
    p = _E32[7]
    p = p * t + _E32[6]
    p = p * t + _E32[5]
    p = p * t + _E32[4]
    p = p * t + _E32[3]
    p = p * t + _E32[2]
    p = p * t + _E32[1]
    p = p * t + _E32[0]
    below_one = p * (t * t) + t
    return 1.0 + np.float64(below_one) if d > _HALF_BOUND else exp_scaled(t)
