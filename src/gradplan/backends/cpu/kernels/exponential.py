"""exp, written so that LLVM vectorises it.

exp(x) = 2ᵏ · exp(r), k = round(x / ln 2), r = x − k·ln 2, |r| ≤ ½ ln 2, and a polynomial for
exp(r) (its coefficients are Taylor's: on so short an interval a minimax fit gains less than a
bit). 2ᵏ is applied in two halves, so that results below the normal range round once, into the
subnormals, and results above it become inf. NaN stays NaN.

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
_C32 = tuple(_F32(1 / factorial(k)) for k in range(8))
_C = tuple(1 / factorial(k) for k in range(14))
_ONE_32, _ZERO_32 = _F32(1), _F32(0)
_LOW_32, _HIGH_32 = _F32(-104.5), _F32(89.5)


@ordered
def exp_f32(x):
    """exp of an f32, within 1.5 units in the last place."""
    bounded = x
    if bounded < _LOW_32:
        bounded = _LOW_32
    if bounded > _HIGH_32:
        bounded = _HIGH_32
    shifted = bounded * _LOG2E_32 + _ROUND_32
    k = bits_of_f32(shifted) - bits_of_f32(_ROUND_32)
    whole = shifted - _ROUND_32
    r = (bounded - whole * _LN2_HIGH_32) - whole * _LN2_LOW_32
    p = _C32[7]
    p = p * r + _C32[6]
    p = p * r + _C32[5]
    p = p * r + _C32[4]
    p = p * r + _C32[3]
    p = p * r + _C32[2]
    p = p * (r * r) + r + _ONE_32
    half = k >> np.int32(1)
    rest = k - half
    first = f32_of_bits((half + np.int32(127)) << np.int32(23))
    second = f32_of_bits((rest + np.int32(127)) << np.int32(23))
    result = p * first * second
    return x if x != x else result


@ordered
def exp_f64(x):
    """exp of an f64, within 1.5 units in the last place."""
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
def exp_mixed(x):
    """exp of an f64 to f32 precision: the argument is reduced in f64, the rest is f32."""
    bounded = x
    if bounded < -750.0:
        bounded = -750.0
    if bounded > 720.0:
        bounded = 720.0
    shifted = bounded * _LOG2E + _ROUND
    k = bits_of_f64(shifted) - bits_of_f64(_ROUND)
    whole = shifted - _ROUND
    r = _F32(bounded - whole * log(2.0))
    p = _C32[7]
    p = p * r + _C32[6]
    p = p * r + _C32[5]
    p = p * r + _C32[4]
    p = p * r + _C32[3]
    p = p * r + _C32[2]
    p = p * (r * r) + r
    half = k >> 1
    rest = k - half
    first = f64_of_bits((half + 1023) << 52)
    second = f64_of_bits((rest + 1023) << 52)
    result = (1.0 + np.float64(p)) * first * second
    return x if x != x else result
