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
def exp_f32(x):
    """exp of an f32, within 1.5 · 2⁻²⁴ relative; below 2⁻¹²⁶ it is 0.

    Where it serves, results so small stand beside others near 1, and vanish.
    """
    shifted = x * _LOG2E_32 + _ROUND_32
    k = bits_of_f32(shifted) - bits_of_f32(_ROUND_32)
    whole = shifted - _ROUND_32
    r = (x - whole * _LN2_HIGH_32) - whole * _LN2_LOW_32
    p = _M32[4]
    p = p * r + _M32[3]
    p = p * r + _M32[2]
    p = p * r + _M32[1]
    p = p * r + _M32[0]
    p = p * (r * r) + r + _ONE_32
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
def exp_f32_of_difference(x, y):
    """exp(x − y) of two f32: what the difference loses in rounding is multiplied in again."""
    d = x - y
    back = d - x
    lost = (x - (d - back)) - (y + back)
    lost = lost if lost == lost else _ZERO_32  # at infinities
    e = exp_f32(d)
    return e + e * lost


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
    return 1.0 + np.float64(below_one) if d > _HALF_BOUND else np.float64(exp_f32(t))
