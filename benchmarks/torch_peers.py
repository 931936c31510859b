"""What PyTorch runs for each kind: the graph built from the forwards of `gradplan bench`."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from gradplan.bench import forwards
from gradplan.bench.forwards import VIEW_KINDS, missing
from gradplan.kinds import ElementKind

__all__ = ["DTYPES", "VIEW_KINDS", "Graph", "forward", "missing"]

DTYPES = {
    ElementKind.F32: torch.float32,
    ElementKind.F16: torch.float16,
    ElementKind.BF16: torch.bfloat16,
    ElementKind.F64: torch.float64,
}


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
    y = forwards.forward(kind, axis)(tensors)
    return Graph(leaves, tensors, y, _normal(y.shape, element, random))


def _normal(shape: Any, element: ElementKind, random: Any) -> Any:
    return torch.randn(shape, generator=random).to(DTYPES[element])
