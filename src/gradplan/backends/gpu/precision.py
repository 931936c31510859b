"""What the GPU kernels promise, from the operations they do.

u is the element's unit roundoff (one rounding at the store), w = 2⁻²⁴ that of f32, v = 2⁻⁵³ that
of f64. Row sums, carries between tiles, products and segment sums are f64 for every element, but
that halves of a row that a warp has (up to 4096, at most 128 a thread), and a chunk of an
embedding's, are summed in f32 first; maps and the scan of a tile are f32 for all but f64.
"""

from __future__ import annotations

from typing import Any

from ...kinds import ElementKind, MathPrecision, OpCategory, ReduceKind, ScanKind, SoftmaxKind
from ...sku import PrecisionGuarantee
from .table import table_of

__all__ = ["guarantee"]

_W, _V = 2.0**-24, 2.0**-53
# Roundings of an f32 map before the last: the row's sum or the reciprocal rounded to f32, the
# difference, the product, the quotient, an exponential of 2 and its two factors.
_MAP_LOSS: dict[Any, float] = {
    SoftmaxKind.SOFTMAX: 3.0,
    SoftmaxKind.LOG_SOFTMAX: 4.5,
    ReduceKind.SUM: 0.0,
    ReduceKind.MEAN: 1.0,
    ReduceKind.MAX: 1.0,
    ReduceKind.MIN: 1.0,
    ReduceKind.PROD: 3.0,
    ReduceKind.NORM2: 2.0,
    ReduceKind.LOG_SUM_EXP: 4.5,
    ReduceKind.VAR: 5.0,
    ReduceKind.STD: 5.0,
}
# Kinds whose row state is a sum.
_SUMMED = (SoftmaxKind.SOFTMAX, SoftmaxKind.LOG_SOFTMAX, ReduceKind.VAR, ReduceKind.STD)
# The longest chain of additions in a tile's scan: in a thread, across a warp, across warps. In
# `walks` 32 there, across a warp and eight, 64 back, and a few to join them: no more with the 16
# that are added below.
_SCAN_CHAIN = 64 + 5 + 32


def guarantee(desc: Any, arch: str) -> PrecisionGuarantee:
    """The written guarantee of a problem, for any layout."""
    element = desc.element
    shape, axes = desc.shape_and_axes
    n = 1
    for axis in axes:
        n *= shape[axis]
    half = element in (ElementKind.F16, ElementKind.BF16)
    narrow = element is not ElementKind.F64
    accumulator = ElementKind.F64
    loss = (8 + n) * 4 * _V
    if desc.category is OpCategory.SCAN:
        if element is ElementKind.F64:
            loss = (16 + n) * (6 if desc.kind is ScanKind.LOG_CUMSUM_EXP else 2) * _V
        elif desc.kind is ScanKind.CUMPROD:
            # Shorter rows round their factors one by one in f32; longer ones in f64.
            if not table_of(arch).exact_product(element, n):
                loss += 2 * (n + 8) * _W
                accumulator = ElementKind.F32
        else:
            loss += (min(n, _SCAN_CHAIN) + 16) * _W
            accumulator = ElementKind.F32
            if half and desc.kind is ScanKind.LOG_CUMSUM_EXP:
                # Two of the hardware's exponentials, of arguments rounded between 32 and 64.
                loss += 2 * 38 * _W
    elif narrow:
        if desc.category is OpCategory.BINARY_ELEMENTWISE:
            loss = 1.0 * _W
        elif desc.category is OpCategory.EMBEDDING:
            if half:
                loss += min(desc.num_indices, table_of(arch).chunk) * _W
                accumulator = ElementKind.F32
        else:
            loss += _MAP_LOSS[desc.op] * _W
            if half:  # the hardware's exp and quotient, and some twenty additions
                loss += 100 * _W
                if desc.op in _SUMMED:
                    accumulator = ElementKind.F32
    summed = desc.category is OpCategory.EMBEDDING and not half  # in f64, and nothing else done
    math = MathPrecision.F32 if narrow and not summed else None
    if desc.category is OpCategory.SCAN and accumulator is ElementKind.F64:
        math = None
    return PrecisionGuarantee(
        math_precision=math or MathPrecision.F64,
        accumulator=accumulator,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        relative_error=element.unit_roundoff * (1 + 2.0**-12) + loss,
    )
