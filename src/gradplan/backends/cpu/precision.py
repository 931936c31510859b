"""What the CPU kernels promise, from the operations they do.

u is the element's unit roundoff (one rounding at the store) and v the accumulator's, 2⁻⁵³.
Row sums are taken in blocks of 512 whose sums are added; a rounding loses a quarter of v on
average even where all errors point one way, so k additions lose at most about k·v / 4.
Scans run step by step, so their loss grows with the extent.
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
# Roundings a step, in quarters: cumprod multiplies and adds, and its y is a product too;
# log-cumsum-exp adds an exponential (1.5 units) and a quotient a step.
_SCAN_LOSS = {ScanKind.CUMSUM: 1.0, ScanKind.CUMPROD: 4.0, ScanKind.LOG_CUMSUM_EXP: 10.0}


def _in_f32(desc: Any) -> bool:
    """Whether part of the arithmetic is f32: always finer than a half's own rounding."""
    exponential = desc.op in (SoftmaxKind.LOG_SOFTMAX, ReduceKind.LOG_SUM_EXP)
    if desc.element is ElementKind.F32:
        return exponential
    if desc.element not in _HALVES or desc.op == ReduceKind.PROD:
        return False
    if desc.category in (OpCategory.SCAN, OpCategory.EMBEDDING):
        return False
    return getattr(desc, "ties", None) not in (TieRule.FIRST, TieRule.LAST) or not desc.spec.ties


def guarantee(desc: Any) -> PrecisionGuarantee:
    """The written guarantee of a problem, for any layout and any number of threads."""
    shape, axes = desc.shape_and_axes
    n = 1
    for axis in axes:
        n *= shape[axis]
    narrow = _in_f32(desc)
    blocks = min(n, 512) + n / 512
    if desc.category is OpCategory.SCAN:
        loss = (8 + n * _SCAN_LOSS.get(desc.op, 1.0) / 4) * _V
    elif desc.op == ReduceKind.PROD:
        loss = (8 + n / 2) * _V
    elif desc.category is OpCategory.EMBEDDING:
        loss = (4 + n / 4) * _V
    else:
        loss = (8 + blocks / 4) * _V
    if desc.element in _HALVES and narrow:
        loss += (8 + 512 / 4) * 2.0**-24
    elif narrow:
        loss += 1.5 * 2.0**-24  # of the exponential
    return PrecisionGuarantee(
        math_precision=MathPrecision.F32 if narrow else MathPrecision.F64,
        accumulator=ElementKind.F32 if narrow and desc.element in _HALVES else ElementKind.F64,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        relative_error=desc.element.unit_roundoff * (1 + 2.0**-20) + loss,
    )
