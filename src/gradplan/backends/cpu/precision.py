"""What the CPU kernels promise, from the operations they do.

u is the element's unit roundoff (one rounding at the store) and v the accumulator's, 2⁻⁵³. Each
rounding on the way loses at most v, and on some data all of them do, so the loss is v times the
longest chain of roundings: row sums are taken in blocks of 512 whose sums are added, and scans
run step by step.
"""

from __future__ import annotations

from typing import Any

from ...kinds import (
    ElementKind,
    MathPrecision,
    OpCategory,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
    TieRule,
)
from ...sku import PrecisionGuarantee

__all__ = ["guarantee"]

_V = 2.0**-53
_HALVES = (ElementKind.F16, ElementKind.BF16)
# Roundings a step: cumprod multiplies and adds, or multiplies for its y; log-cumsum-exp has two
# exponentials of 1.5 units each, a quotient, a product and a sum.
_SCAN_LOSS = {ScanKind.CUMPROD: 2.0, ScanKind.LOG_CUMSUM_EXP: 6.0}
# Halves of log-cumsum-exp: a gain in f32 loses at most 3.5 units times the logarithm that it adds,
# and what arrives weaker than e⁻⁶⁰ counts for nothing beside the element that received it whole:
# 5.1 · 60 units at most, within the 512 that halves are given anyway.
# Roundings of the f32 maps before the last: the row's sum and its difference or product, and an
# exponential of 1.5 units.
_F32_LOSS: dict[Any, float] = {
    SoftmaxKind.SOFTMAX: 2.0,
    SoftmaxKind.LOG_SOFTMAX: 3.5,
    ReduceKind.LOG_SUM_EXP: 2.5,
    ScanKind.LOG_CUMSUM_EXP: 2.5,
}


def _in_f32(desc: Any) -> bool:
    """Whether part of the arithmetic is f32: always finer than a half's own rounding."""
    if desc.element is ElementKind.F32:
        return desc.op in _F32_LOSS
    if desc.element not in _HALVES or desc.op == ReduceKind.PROD:
        return False
    if desc.category in (OpCategory.SCAN, OpCategory.EMBEDDING):
        return bool(desc.op == ScanKind.LOG_CUMSUM_EXP)
    return getattr(desc, "ties", None) not in (TieRule.FIRST, TieRule.LAST) or not desc.spec.ties


def guarantee(desc: Any) -> PrecisionGuarantee:
    """The written guarantee of a problem, for any layout and any number of threads."""
    shape, axes = desc.shape_and_axes
    n = 1
    for axis in axes:
        n *= shape[axis]
    narrow, half = _in_f32(desc), desc.element in _HALVES
    blocks = min(n, 512) + n / 512
    scan = desc.category is OpCategory.SCAN
    if scan:
        loss = (8 + n * _SCAN_LOSS.get(desc.op, 1.0)) * _V
    elif desc.op == ReduceKind.PROD:
        loss = (8 + n) * _V
    elif desc.category is OpCategory.EMBEDDING:
        loss = (4 + n) * _V
    else:
        loss = (8 + blocks) * _V
    if half and narrow:
        loss += (8 + 512) * 2.0**-24
    elif half and scan:
        loss += 2.0**-24  # f64 is stored through f32
    elif narrow:
        loss += _F32_LOSS[desc.op] * 2.0**-24
    return PrecisionGuarantee(
        math_precision=MathPrecision.F32 if narrow else MathPrecision.F64,
        accumulator=ElementKind.F32 if narrow and half and not scan else ElementKind.F64,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        relative_error=desc.element.unit_roundoff * (1 + 2.0**-20) + loss,
    )
