"""PyTorch's functions with gradplan's gradients.

    import gradplan.torch as gt

    y = gt.softmax(x, dim=-1)     # torch's result; its gradient runs our kernel

    with gt.enable():             # or: existing code and models, unchanged, on this thread
        loss = model(batch)

Forward results are torch's own, or equal to them. Gradients arrive as they lie (expanded,
transposed, sliced) and are read there; only those asked for are computed. Second-order gradients,
`torch.func`, `torch.compile` and autocast work as they do in torch; forward-mode differentiation is
torch's.

Torch's own, because it is at the floor already: `sum` (its gradient is a view), `max` and `min`
with a dim (they scatter one number a row); on a GPU also a softmax, lerp or mean of fewer than 8192
elements in f32 or f64. Torch's own, because no plan covers it: lerp with a tensor for a weight,
norms of another order than 2, integers, complex numbers, more than 8 axes.
"""

from __future__ import annotations

from . import linalg
from .functions import (
    amax,
    amin,
    cummax,
    cummin,
    cumprod,
    cumsum,
    embedding,
    lerp,
    log_softmax,
    logcumsumexp,
    logsumexp,
    max,
    mean,
    min,
    norm,
    prod,
    softmax,
    std,
    std_mean,
    sum,
    var,
    var_mean,
)
from .mode import enable

__all__ = [
    "amax",
    "amin",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "embedding",
    "enable",
    "lerp",
    "linalg",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "max",
    "mean",
    "min",
    "norm",
    "prod",
    "softmax",
    "std",
    "std_mean",
    "sum",
    "var",
    "var_mean",
]
