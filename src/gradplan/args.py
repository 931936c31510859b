"""Arguments: the arrays of one call, compared by identity and never copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "BinaryParamBackwardArgs",
    "EmbeddingBackwardArgs",
    "ReduceBackwardArgs",
    "ScanBackwardArgs",
    "SoftmaxBackwardArgs",
]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SoftmaxBackwardArgs:
    """`dy`: gradient of the result; `y`: the result; `dx`: where the gradient is written."""

    dy: Any
    y: Any
    dx: Any


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BinaryParamBackwardArgs:
    """`dy`: gradient of the result; `da`, `db`: outputs, where None skips that gradient."""

    dy: Any
    da: Any = None
    db: Any = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ScanBackwardArgs:
    """`dy`: gradient of the scan; `dx`: output; `x`, `y`: the scan's input and result."""

    dy: Any
    dx: Any
    x: Any = None
    y: Any = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ReduceBackwardArgs:
    """`dy`, `y`: gradient and result in keepdim form; `dx`: output; `x`: the input."""

    dy: Any
    dx: Any
    x: Any = None
    y: Any = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class EmbeddingBackwardArgs:
    """`dout` [N, D], `indices` [N], and the output `dweight` [V, D]."""

    dout: Any
    indices: Any
    dweight: Any
