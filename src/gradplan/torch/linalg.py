"""`torch.linalg.vector_norm` and `norm` with our gradient for order 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .functions import TORCHS, Dim, Dtype, Number, otherwise, vector_norm
from .nodes import applies

__all__ = ["norm", "vector_norm"]


@otherwise(torch.linalg.norm)
def norm(
    input: Tensor,
    ord: Number | str | None = None,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    out: Tensor | None = None,
    dtype: Dtype = None,
) -> Tensor:
    """`torch.linalg.norm` where it is the 2-norm of vectors, flattened or Frobenius.

    Other orders, and ord=2 of matrices (their largest singular value), are torch's own.
    """
    if out is None and applies(input, dtype) and _is_2_norm(input, ord, dim):
        return vector_norm(input, 2, dim, keepdim, dtype=dtype)
    return TORCHS


def _is_2_norm(x: Tensor, ord: Any, dim: Any) -> bool:
    axes = x.dim() if dim is None else len(dim) if isinstance(dim, (tuple, list)) else 1
    if ord is None:
        return axes > 0
    if ord == "fro":
        return axes == 2
    return ord == 2 and axes == 1
