"""What a forward pass runs for each kind, in torch and in JAX: one table each.

`missing()` names the kinds of the registry without a row; a test keeps it empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..registry import KINDS
from .lazy import needed

__all__ = ["LERP_WEIGHT", "VIEW_KINDS", "forward", "jax_forward", "missing"]

LERP_WEIGHT = 0.3
VIEW_KINDS = frozenset({"sum"})
"""Kinds whose gradient torch returns as a broadcast view: it writes nothing, so no race."""

# (torch, tensors, axis) → y. Reductions keep the axis, as a plan's `dy` does. The tie rules are
# torch's: the last of equals in cummax and cummin, shared among equals in amax and amin.
_TORCH: dict[str, Callable[[Any, Sequence[Any], int], Any]] = {
    "softmax": lambda th, t, d: th.softmax(t[0], d),
    "log_softmax": lambda th, t, d: th.log_softmax(t[0], d),
    "lerp": lambda th, t, d: th.lerp(t[0], t[1], LERP_WEIGHT),
    "cumsum": lambda th, t, d: th.cumsum(t[0], d),
    "cumprod": lambda th, t, d: th.cumprod(t[0], d),
    "cummax": lambda th, t, d: th.cummax(t[0], d).values,
    "cummin": lambda th, t, d: th.cummin(t[0], d).values,
    "log_cumsum_exp": lambda th, t, d: th.logcumsumexp(t[0], d),
    "sum": lambda th, t, d: th.sum(t[0], d, keepdim=True),
    "mean": lambda th, t, d: th.mean(t[0], d, keepdim=True),
    "max": lambda th, t, d: th.amax(t[0], d, keepdim=True),
    "min": lambda th, t, d: th.amin(t[0], d, keepdim=True),
    "prod": lambda th, t, d: th.prod(t[0], d, keepdim=True),
    "norm2": lambda th, t, d: th.linalg.vector_norm(t[0], 2, d, keepdim=True),
    "log_sum_exp": lambda th, t, d: th.logsumexp(t[0], d, keepdim=True),
    "var": lambda th, t, d: th.var(t[0], d, correction=1, keepdim=True),
    "std": lambda th, t, d: th.std(t[0], d, correction=1, keepdim=True),
    "embedding": lambda th, t, d: th.nn.functional.embedding(t[1], t[0]),
}

_JAX: dict[str, Callable[[Any, Sequence[Any], int], Any]] = {
    "softmax": lambda jx, t, d: jx.nn.softmax(t[0], axis=d),
    "log_softmax": lambda jx, t, d: jx.nn.log_softmax(t[0], axis=d),
    "lerp": lambda jx, t, d: t[0] + LERP_WEIGHT * (t[1] - t[0]),
    "cumsum": lambda jx, t, d: jx.lax.cumsum(t[0], axis=d),
    "cumprod": lambda jx, t, d: jx.lax.cumprod(t[0], axis=d),
    "cummax": lambda jx, t, d: jx.lax.cummax(t[0], axis=d),
    "cummin": lambda jx, t, d: jx.lax.cummin(t[0], axis=d),
    "log_cumsum_exp": lambda jx, t, d: jx.lax.cumlogsumexp(t[0], axis=d),
    "sum": lambda jx, t, d: jx.numpy.sum(t[0], axis=d, keepdims=True),
    "mean": lambda jx, t, d: jx.numpy.mean(t[0], axis=d, keepdims=True),
    "max": lambda jx, t, d: jx.numpy.max(t[0], axis=d, keepdims=True),
    "min": lambda jx, t, d: jx.numpy.min(t[0], axis=d, keepdims=True),
    "prod": lambda jx, t, d: jx.numpy.prod(t[0], axis=d, keepdims=True),
    "norm2": lambda jx, t, d: jx.numpy.linalg.norm(t[0], axis=d, keepdims=True),
    "log_sum_exp": lambda jx, t, d: jx.nn.logsumexp(t[0], axis=d, keepdims=True),
    "var": lambda jx, t, d: jx.numpy.var(t[0], axis=d, ddof=1, keepdims=True),
    "std": lambda jx, t, d: jx.numpy.std(t[0], axis=d, ddof=1, keepdims=True),
    "embedding": lambda jx, t, d: jx.numpy.take(t[0], t[1], axis=0),
}


def missing() -> list[str]:
    """Kinds of the registry that have no row in one of the tables."""
    kinds = {spec.kind.value for spec in KINDS.values()}
    return sorted((kinds - _TORCH.keys()) | (kinds - _JAX.keys()))


def forward(kind: str, axis: int) -> Callable[[Sequence[Any]], Any]:
    """torch's function of a kind; an embedding takes its table and its indices.

    It looks nothing up when called, so that a compiler can follow it.
    """
    torch, function = needed("torch"), _TORCH[kind]
    return lambda tensors: function(torch, tensors, axis)


def jax_forward(kind: str, axis: int) -> Callable[[Sequence[Any]], Any]:
    """JAX's function of a kind."""
    jax, function = needed("jax"), _JAX[kind]
    return lambda arrays: function(jax, arrays, axis)
