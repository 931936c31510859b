"""What PyTorch runs for each kind: one table from kind to forward, and the graph built from it.

A benchmark asks `missing()` first: a kind of the registry without a row here is an error, never a
gap in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from gradplan.kinds import ElementKind
from gradplan.registry import KINDS

__all__ = ["DTYPES", "LERP_WEIGHT", "VIEW_KINDS", "Graph", "forward", "missing"]

LERP_WEIGHT = 0.3
VIEW_KINDS = frozenset({"sum"})
"""Kinds whose gradient torch returns as a broadcast view: it writes nothing, so no race."""

DTYPES = {
    ElementKind.F32: torch.float32,
    ElementKind.F16: torch.float16,
    ElementKind.BF16: torch.bfloat16,
    ElementKind.F64: torch.float64,
}

# (tensors, axis) → y. Reductions keep the axis, as a plan's `dy` does. The tie rules are torch's:
# the last of equals in cummax and cummin, shared among equals in amax and amin.
_FORWARDS: dict[str, Callable[[list[Any], int], Any]] = {
    "softmax": lambda t, d: torch.softmax(t[0], d),
    "log_softmax": lambda t, d: torch.log_softmax(t[0], d),
    "lerp": lambda t, d: torch.lerp(t[0], t[1], LERP_WEIGHT),
    "cumsum": lambda t, d: torch.cumsum(t[0], d),
    "cumprod": lambda t, d: torch.cumprod(t[0], d),
    "cummax": lambda t, d: torch.cummax(t[0], d).values,
    "cummin": lambda t, d: torch.cummin(t[0], d).values,
    "log_cumsum_exp": lambda t, d: torch.logcumsumexp(t[0], d),
    "sum": lambda t, d: torch.sum(t[0], d, keepdim=True),
    "mean": lambda t, d: torch.mean(t[0], d, keepdim=True),
    "max": lambda t, d: torch.amax(t[0], d, keepdim=True),
    "min": lambda t, d: torch.amin(t[0], d, keepdim=True),
    "prod": lambda t, d: torch.prod(t[0], d, keepdim=True),
    "norm2": lambda t, d: torch.linalg.vector_norm(t[0], 2, d, keepdim=True),
    "log_sum_exp": lambda t, d: torch.logsumexp(t[0], d, keepdim=True),
    "var": lambda t, d: torch.var(t[0], d, correction=1, keepdim=True),
    "std": lambda t, d: torch.std(t[0], d, correction=1, keepdim=True),
    "embedding": lambda t, d: torch.nn.functional.embedding(t[1], t[0]),
}


def missing() -> list[str]:
    """Kinds of the registry that have no row here."""
    return sorted({spec.kind.value for spec in KINDS.values()} - _FORWARDS.keys())


@dataclass(frozen=True)
class Graph:
    """A recorded forward: `leaves` in, `y` out, with a gradient `dy` for it."""

    leaves: list[Any]
    tensors: list[Any]
    y: Any
    dy: Any

    def backward(self) -> Any:
        """torch's gradient of the leaves; the graph stays for the next call."""
        return torch.autograd.grad(self.y, self.leaves, self.dy, retain_graph=True)


def forward(
    kind: str, shape: tuple[int, ...], axis: int, element: ElementKind, indices: Any, table: int
) -> Graph:
    """Random inputs of a kind, seeded by its shape, and their recorded forward.

    `shape` is the input's; for the embedding it is `dout`'s, (N, D), and `table` the row count.
    """
    random = torch.Generator().manual_seed(sum(shape))
    if kind == "embedding":
        tensors = [_normal((table, shape[1]), element, random), indices]
    else:
        tensors = [_normal(shape, element, random) for _ in range(2 if kind == "lerp" else 1)]
    if kind in ("prod", "cumprod"):
        # Factors near 1 keep every partial product well inside the range of the halves.
        tensors[0] = (tensors[0].float() / sqrt(shape[axis])).exp().to(DTYPES[element])
    leaves = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    y = _FORWARDS[kind](tensors, axis)
    return Graph(leaves, tensors, y, _normal(y.shape, element, random))


def _normal(shape: Any, element: ElementKind, random: Any) -> Any:
    return torch.randn(shape, generator=random).to(DTYPES[element])
