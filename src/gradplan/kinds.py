"""The enums of the vocabulary: families, kinds, elements and rules.

Every enum also takes the lower-case name of a member, through `Named.coerce`:
`ScanKind.coerce("log_cumsum_exp")`. Those of types take NumPy's and torch's dtypes too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

import numpy as np

from .errors import InvalidProblem, Unsupported

__all__ = [
    "BackendKind",
    "BinaryKind",
    "ElementKind",
    "EmbeddingKind",
    "IndexKind",
    "MathPrecision",
    "OpCategory",
    "ReduceKind",
    "ScanKind",
    "SoftmaxKind",
    "TieRule",
]


class Named(StrEnum):
    """An enum whose members are, and compare equal to, their lower-case names."""

    # Equal strings hash alike; and enums' own hash is a Python function, slow in every look-up.
    __hash__ = str.__hash__

    @classmethod
    def _unknown(cls, message: str) -> Exception:
        return InvalidProblem(message)

    @classmethod
    def _read(cls, value: Any) -> Any:
        """The member that another library's object stands for, or None."""
        return None

    @classmethod
    def coerce(cls, value: Any, *where: str) -> Self:
        """The member itself, or the member of that name; `where` it stands, for the message."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            member = cls._value2member_map_.get(value.lower())
        else:
            member = cls._read(value)
        if member is not None:
            return member  # type: ignore[return-value]
        names = ", ".join(member.value for member in cls)
        place = ": ".join(where or (cls.__name__,))
        raise cls._unknown(f"{place}: expected one of {names}, got {value!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class OpCategory(Named):
    """The five operator families."""

    SOFTMAX = "softmax"
    BINARY_ELEMENTWISE = "binary_elementwise"
    SCAN = "scan"
    REDUCTION = "reduction"
    EMBEDDING = "embedding"


class SoftmaxKind(Named):
    """Kinds of the softmax family.

    - `SOFTMAX`: dx = y · (dy − Σ y·dy)
    - `LOG_SOFTMAX`: dx = dy − exp(y) · Σ dy
    """

    SOFTMAX = "softmax"
    LOG_SOFTMAX = "log_softmax"


class BinaryKind(Named):
    """Kinds of the parameterised binary family.

    - `LERP`: da = (1 − w)·dy, db = w·dy
    """

    LERP = "lerp"


class ScanKind(Named):
    """Kinds of the scan family: S[k] = dy[k] + c[k]·S[k+1], run from the far end.

    - `CUMSUM`: c = 1, dx[k] = S[k]
    - `CUMPROD`: c[k] = x[k+1], dx[k] = y[k−1]·S[k] with y[−1] = 1
    - `CUMMAX`, `CUMMIN`: c[k] = 0 where k+1 starts a new winner, else 1;
      dx[k] = S[k] where k is a winner, else 0
    - `LOG_CUMSUM_EXP`: c[k] = exp(y[k] − y[k+1]), dx[k] = exp(x[k] − y[k])·S[k]
    """

    CUMSUM = "cumsum"
    CUMPROD = "cumprod"
    CUMMAX = "cummax"
    CUMMIN = "cummin"
    LOG_CUMSUM_EXP = "log_cumsum_exp"


class ReduceKind(Named):
    """Kinds of the reduction family; n is the reduced extent.

    - `SUM`: dx = dy; `MEAN`: dx = dy / n
    - `MAX`, `MIN`: dx = dy where x == y, else 0; `TieRule` shares it among ties
    - `PROD`: dx = dy · Π of the others
    - `NORM2`: dx = dy · x / y, and 0 where y == 0
    - `LOG_SUM_EXP`: dx = dy · exp(x − y), and 0 where y == −inf
    - `VAR`: dx = dy · 2 (x − mean) / m, m = n − correction, or 1 where that is ≤ 0
    - `STD`: dx = dy · (x − mean) / (m · y), and 0 where y == 0
    """

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    NORM2 = "norm2"
    LOG_SUM_EXP = "log_sum_exp"
    VAR = "var"
    STD = "std"


class EmbeddingKind(Named):
    """The one kind of the embedding family: dweight[indices[n]] += dout[n]."""

    EMBEDDING = "embedding"


class TieRule(Named):
    """Who receives the gradient of a maximum reached several times.

    `SPLIT`: all, divided by their number; `ALL`: all, undivided;
    `FIRST`, `LAST`: one of them, in C order over the reduced axes or in scan order.
    """

    SPLIT = "split"
    ALL = "all"
    FIRST = "first"
    LAST = "last"


class BackendKind(Named):
    """Who runs the kernel."""

    NUMBA = "numba"
    TRITON = "triton"
    REFERENCE = "reference"


class MathPrecision(Named):
    """The narrowest type in which a kernel does its arithmetic."""

    F32 = "f32"
    F64 = "f64"


class ElementKind(Named):
    """The type of the elements of every floating-point array of a problem."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F64 = "f64"

    @classmethod
    def _unknown(cls, message: str) -> Exception:
        return Unsupported(message)

    @classmethod
    def _read(cls, value: Any) -> Any:
        return _of_dtype(value, _ELEMENT_OF_DTYPE)

    @property
    def size_bytes(self) -> int:
        return _ELEMENT_BYTES[self]

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding to nearest: 2⁻ᵖ for p significant bits."""
        return 2.0 ** -_ELEMENT_DIGITS[self]

    @property
    def smallest_subnormal(self) -> float:
        """The distance between neighbouring numbers around zero."""
        return 2.0 ** _ELEMENT_MIN_EXPONENT[self]

    @classmethod
    def of(cls, x: Any) -> ElementKind:
        """The element of an array, or of a NumPy or torch dtype."""
        kind = _named_dtype(x, _ELEMENT_OF_DTYPE)
        if kind is None:
            raise Unsupported(
                f"the element type is one of float32, float16, bfloat16, float64; "
                f"got {_dtype_name(x)}"
            )
        return kind  # type: ignore[no-any-return]


class IndexKind(Named):
    """The type of the embedding's indices."""

    I32 = "i32"
    I64 = "i64"

    @classmethod
    def _unknown(cls, message: str) -> Exception:
        return Unsupported(message)

    @classmethod
    def _read(cls, value: Any) -> Any:
        return _of_dtype(value, _INDEX_OF_DTYPE)

    @property
    def size_bytes(self) -> int:
        return 4 if self is IndexKind.I32 else 8

    @classmethod
    def of(cls, x: Any) -> IndexKind:
        """The index kind of an array, or of a NumPy or torch dtype."""
        kind = _named_dtype(x, _INDEX_OF_DTYPE)
        if kind is None:
            raise Unsupported(f"indices are int32 or int64; got {_dtype_name(x)}")
        return kind  # type: ignore[no-any-return]


_ELEMENT_BYTES = {
    ElementKind.F32: 4,
    ElementKind.F16: 2,
    ElementKind.BF16: 2,
    ElementKind.F64: 8,
}
_ELEMENT_DIGITS = {
    ElementKind.F32: 24,
    ElementKind.F16: 11,
    ElementKind.BF16: 8,
    ElementKind.F64: 53,
}
_ELEMENT_MIN_EXPONENT = {
    ElementKind.F32: -149,
    ElementKind.F16: -24,
    ElementKind.BF16: -133,
    ElementKind.F64: -1074,
}
_ELEMENT_OF_DTYPE = {
    "float32": ElementKind.F32,
    "float16": ElementKind.F16,
    "bfloat16": ElementKind.BF16,
    "float64": ElementKind.F64,
}
_INDEX_OF_DTYPE = {"int32": IndexKind.I32, "int64": IndexKind.I64}


def _named_dtype(x: Any, table: dict[str, Any]) -> Any:
    """Look up `x`, or its dtype, by the name all array libraries share ("float32")."""
    if isinstance(x, Named):
        return x if x in table.values() else None
    if isinstance(x, type):  # np.float32 and the like: a scalar type
        return table.get("int64" if x is np.longlong else x.__name__)  # two names of one type
    dtype = getattr(x, "dtype", x)
    if getattr(dtype, "byteorder", "=") in (">", "<"):  # native order reads as "=" or "|"
        return None
    name = getattr(dtype, "name", None) or str(dtype)
    return table.get(name.removeprefix("torch."))


def _of_dtype(x: Any, table: dict[str, Any]) -> Any:
    """The same for dtypes alone: an array in their place is a slip."""
    return _named_dtype(x, table) if isinstance(x, type) or not hasattr(x, "dtype") else None


def _dtype_name(x: Any) -> str:
    """What messages call it."""
    return x.__name__ if isinstance(x, type) else str(getattr(x, "dtype", x))
