"""Gradients in torch's own differentiable operators, for second-order gradients.

Kinds that save x use torch's gradient of the forward itself, which torch can differentiate as
often as one likes; the others state their formula. Arguments are those of `torch.ops.gradplan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..kinds import BinaryKind, EmbeddingKind, Named, ReduceKind, ScanKind, SoftmaxKind

__all__ = ["FORMULAS", "kept"]


def kept(small: Tensor, dims: Sequence[int]) -> Tensor:
    """A result without the reduced axes, ascending and not negative, with them put back."""
    for dim in dims:
        small = small.unsqueeze(dim)
    return small


def _softmax(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    return y * (dy - (y * dy).sum(dim, keepdim=True))


def _log_softmax(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    return dy - y.exp() * dy.sum(dim, keepdim=True)


def _lerp(dy: Tensor, weight: float, da: bool, db: bool) -> tuple[Tensor, Tensor]:
    skipped = dy[..., None][..., :0].reshape(0)
    return (1 - weight) * dy if da else skipped, weight * dy if db else skipped


def _cumsum(dy: Tensor, dim: int) -> Tensor:
    return dy.flip(dim).cumsum(dim).flip(dim) if dy.dim() else dy.clone()


def _mean(dy: Tensor, size: Sequence[int], dims: Sequence[int], keepdim: bool) -> Tensor:
    if not size:
        return dy.clone()
    axes = sorted(dim % len(size) for dim in dims)
    return ((dy if keepdim else kept(dy, axes)) / prod(size[dim] for dim in axes)).expand(size)


def _embedding(
    dout: Tensor, indices: Tensor, rows: int, padding_idx: int | None, by_freq: bool
) -> Tensor:
    padding = -1 if padding_idx is None else padding_idx
    backward: Any = torch.ops.aten.embedding_dense_backward
    found: Tensor = backward(dout, indices, rows, padding, by_freq)
    return found


def _prod(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """torch's prod takes one axis, or all of them."""
    if len(dims) == 1:
        return x.prod(dims[0], keepdim)
    return x.prod().reshape([1] * x.dim()) if keepdim else x.prod()


def _pullback(forward: Callable[..., Tensor], *, y: bool = True) -> Callable[..., Tensor]:
    """torch's gradient of a function of x; a saved result is taken for that function of x."""

    def formula(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
        params = rest[1:] if y else rest
        pull: Any = torch.func.vjp(lambda x: forward(x, *params), x)[1]
        found: Tensor = pull(dy)[0]
        return found

    return formula


FORMULAS: dict[Named, Callable[..., Any]] = {
    SoftmaxKind.SOFTMAX: _softmax,
    SoftmaxKind.LOG_SOFTMAX: _log_softmax,
    BinaryKind.LERP: _lerp,
    ScanKind.CUMSUM: _cumsum,
    ScanKind.CUMPROD: _pullback(torch.cumprod),
    ScanKind.CUMMAX: _pullback(lambda x, dim: torch.cummax(x, dim)[0]),
    ScanKind.CUMMIN: _pullback(lambda x, dim: torch.cummin(x, dim)[0]),
    ScanKind.LOG_CUMSUM_EXP: _pullback(torch.logcumsumexp),
    ReduceKind.MEAN: _mean,
    ReduceKind.MAX: _pullback(torch.amax),
    ReduceKind.MIN: _pullback(torch.amin),
    ReduceKind.PROD: _pullback(_prod),
    ReduceKind.NORM2: _pullback(lambda x, *to: torch.linalg.vector_norm(x, 2, *to)),
    ReduceKind.LOG_SUM_EXP: _pullback(torch.logsumexp),
    ReduceKind.VAR: _pullback(
        lambda x, dims, keepdim, correction: torch.var(
            x, dims, correction=correction, keepdim=keepdim
        ),
        y=False,
    ),
    ReduceKind.STD: _pullback(
        lambda x, dims, keepdim, correction: torch.std(
            x, dims, correction=correction, keepdim=keepdim
        )
    ),
    EmbeddingKind.EMBEDDING: _embedding,
}
"""Every kind but `sum`, whose gradient is a view of dy in torch: nobody beats that."""
