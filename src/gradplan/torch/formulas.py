"""Gradients in torch's own differentiable operators, for second-order gradients.

Formulas are those of the contract, with its choices: where a gradient is 0 whatever dy holds, so
are its derivatives. Scans and prod use torch's gradient of the forward, which torch can
differentiate as often as one likes. Arguments are those of `torch.ops.gradplan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ..kinds import BinaryKind, EmbeddingKind, Named, ReduceKind, ScanKind, SoftmaxKind

__all__ = ["FORMULAS", "kept", "pull"]


def kept(small: Tensor, dims: Sequence[int]) -> Tensor:
    """A result without the reduced axes, ascending and not negative, with them put back."""
    for dim in dims:
        small = small.unsqueeze(dim)
    return small


def pull(function: Callable[..., Any], tensors: Sequence[Tensor], gradients: Any) -> Any:
    """The gradients of a function of these tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return torch.func.vjp(function, *tensors)[1](gradients)
    # `vjp` knows no hooks of saved tensors.
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that no path from one of them leads through another.
        given = [
            one.view_as(one) if one.requires_grad else one.detach().requires_grad_()
            for one in tensors
        ]
        made = function(*given)
    if isinstance(made, Tensor) and not made.requires_grad:  # the winners of amax are fixed
        return [torch.zeros_like(one) for one in tensors]
    return torch.autograd.grad(made, given, gradients, create_graph=again, materialize_grads=True)


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
    if 0 in size:  # of as many elements, whose gradient by dy is 0
        return dy.sum() * dy.new_zeros(size)
    axes = sorted(dim % len(size) for dim in dims)
    return ((dy if keepdim else kept(dy, axes)) / prod(size[dim] for dim in axes)).expand(size)


def _embedding(
    dout: Tensor, indices: Tensor, rows: int, padding_idx: int | None, by_freq: bool
) -> Tensor:
    places = indices.reshape(-1)
    inside = (places >= 0) & (places < rows)
    if padding_idx is not None:
        inside = inside & (places != padding_idx)
    places = torch.where(inside, places, 0)
    found = torch.where(inside[:, None], dout.reshape(-1, dout.shape[-1]), 0.0)
    if by_freq:
        counts = places.new_zeros(rows).index_add(0, places, inside.to(places.dtype))
        found = found / counts.clamp(min=1)[places][:, None]
    return found.new_zeros(rows, dout.shape[-1]).index_add(0, places, found)


def _reduced(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A formula of dy and y with the reduced axes in place, of x, and of these axes; then the
    correction. Its choices are those of the gradient: they look at the y that was saved."""

    def call(dy: Tensor, x: Tensor, y: Tensor, dims: Sequence[int], keep: bool, *more: Any) -> Any:
        if x.numel() == 0:
            return x * dy.sum()
        y = y.detach()
        if not x.dim() or not dims:  # each element by itself
            dy, x, y = dy.unsqueeze(-1), x.unsqueeze(-1), y.unsqueeze(-1)
            return formula(dy, x, y, (-1,), *more).squeeze(-1)
        axes = sorted(dim % x.dim() for dim in dims)
        if not keep:
            dy, y = kept(dy, axes), kept(y, axes)
        return formula(dy, x, y, axes, *more)

    return call


def _winners(dy: Tensor, x: Tensor, y: Tensor, axes: Sequence[int]) -> Tensor:
    x = x.detach()
    wins = (x == y) | (x.isnan() & y.isnan())
    return torch.where(wins, dy / wins.sum(axes, keepdim=True), 0.0)


def _norm2(dy: Tensor, x: Tensor, y: Tensor, axes: Sequence[int]) -> Tensor:
    top = x.detach().abs().amax(axes, keepdim=True)
    zero = (y == 0) | (top == 0)
    # x / ‖x‖, whose squares stay in range.
    x = torch.where(zero, 1.0, x / torch.where(zero, 1.0, top))
    norm: Tensor = torch.linalg.vector_norm(x, 2, axes, keepdim=True)
    return torch.where(zero, 0.0, dy * (x / norm))


def _log_sum_exp(dy: Tensor, x: Tensor, y: Tensor, axes: Sequence[int]) -> Tensor:
    nothing = y == -inf
    e = (x - torch.where(nothing, 0.0, y)).exp()
    total = e.sum(axes, keepdim=True)
    return torch.where(nothing, 0.0, dy * (e / torch.where(nothing, 1.0, total)))


def _centred(x: Tensor, axes: Sequence[int], correction: float) -> tuple[Tensor, float]:
    """x − mean, and m."""
    m = prod(x.shape[axis] for axis in axes) - correction
    return x - x.mean(axes, keepdim=True), m if m > 0 else 1.0


def _var(dy: Tensor, x: Tensor, _: Tensor, axes: Sequence[int], correction: float) -> Tensor:
    beyond, m = _centred(x, axes, correction)
    return dy * (beyond * (2 / m))


def _std(dy: Tensor, x: Tensor, y: Tensor, axes: Sequence[int], correction: float) -> Tensor:
    beyond, m = _centred(x, axes, correction)
    # y = ‖x − mean‖ / √m
    return _norm2(dy, beyond, y, axes) / m**0.5


def _prod(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """torch's prod takes one axis, or all of them."""
    if len(dims) == 1:
        return x.prod(dims[0], keepdim)
    return x.prod().reshape([1] * x.dim()) if keepdim else x.prod()


def _pullback(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's gradient of a function of x; a saved result is taken for that function of x."""

    def formula(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
        found: Tensor = pull(lambda x: forward(x, *rest[1:]), (x,), dy)[0]
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
    ReduceKind.MAX: _reduced(_winners),
    ReduceKind.MIN: _reduced(_winners),
    ReduceKind.PROD: _pullback(_prod),
    ReduceKind.NORM2: _reduced(_norm2),
    ReduceKind.LOG_SUM_EXP: _reduced(_log_sum_exp),
    # var saves no y, and looks at none.
    ReduceKind.VAR: lambda dy, x, *rest: _reduced(_var)(dy, x, dy, *rest),
    ReduceKind.STD: _reduced(_std),
    EmbeddingKind.EMBEDDING: _embedding,
}
"""Every kind but `sum`, whose gradient is a view of dy in torch: nobody beats that."""
