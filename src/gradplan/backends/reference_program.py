"""The reference backend: `reference.gradient` behind the interface of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..kinds import ElementKind, IndexKind, MathPrecision
from ..sku import PrecisionGuarantee
from ..views import View, as_numpy
from .reference import gradient

__all__ = ["ReferenceProgram", "guarantee"]


class ReferenceProgram:
    """Plain NumPy in float64 (extended precision for f64), rounded at the store."""

    layout = "any"
    variant = "numpy"
    why = "the definitions of the contract in plain NumPy, chosen by preference"
    workspace_bytes = 0
    reads: Mapping[str, int] = {}

    def __init__(self, desc: Any) -> None:
        self._desc = desc

    def bind(self, views: Mapping[str, View], workspace: int) -> Callable[[], None]:
        return partial(self.run, dict(views), workspace)

    def run(self, views: Mapping[str, View], workspace: int, stream: int = 0) -> None:
        desc = self._desc
        work = np.longdouble if desc.element is ElementKind.F64 else np.float64
        arrays = {}
        for operand in desc.operands:
            lent = views.get(operand.name)
            if lent is None:
                continue
            array = as_numpy(lent)
            if operand.output and operand.name != "dweight":
                continue
            if isinstance(lent.dtype, IndexKind):
                arrays[operand.name] = array.reshape(operand.shape)
            else:
                arrays[operand.name] = array.astype(work).reshape(operand.shape)
        results = gradient(desc, arrays)
        for name, result in results.items():
            if name in views:
                target = as_numpy(views[name])
                with np.errstate(all="ignore"):
                    target[...] = result.astype(target.dtype)


def guarantee(desc: Any) -> PrecisionGuarantee:
    """One rounding of a float64 result; of an extended one for f64."""
    return PrecisionGuarantee(
        math_precision=MathPrecision.F64,
        accumulator=ElementKind.F64,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        relative_error=desc.element.unit_roundoff * (1 + 2.0**-10) + 2.0**-50,
    )
