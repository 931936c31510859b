"""Nodes of the autograd graph: torch's forward, and our gradient behind it.

Every node exists twice. `Node.plain` is the short way that eager code and `torch.compile` take;
`Node.transformed` states the same as function transforms (`torch.func`) want it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd import Function

__all__ = ["DTYPES", "MAX_RANK", "PLAIN", "applies", "node"]

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
PLAIN = frozenset({Tensor, torch.nn.Parameter})
# Before torch 2.12 axes may have names, which results keep.
_HAS_NAMES = hasattr(Tensor, "has_names")
# The kernels for GPUs are Triton's, for NVIDIA's.
_HAS_GPU = torch.version.hip is None and find_spec("triton") is not None
MAX_RANK = 8

Forward = Callable[..., Any]
Keep = Callable[..., None]
Backward = Callable[..., Any]


def applies(x: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether our gradient would be asked for here, and is one that the kernels know.

    Anything else is torch's own: what needs no gradient, integers, complex numbers, tensor
    subclasses, nested tensors, other devices; forward-mode differentiation, which has no backward
    pass; and `torch.jit.trace`, which records no Python.
    """
    compiling = torch.compiler.is_compiling()
    return (
        type(x) in PLAIN
        and (
            (x.requires_grad and torch.is_grad_enabled())
            or (not compiling and torch._C._are_functorch_transforms_active())
        )
        and x.dtype in DTYPES
        and (dtype is None or dtype in DTYPES)
        and ((x.is_cuda and _HAS_GPU) or x.is_cpu)
        and x.layout is torch.strided
        and not x.is_nested
        and x.dim() <= MAX_RANK
        and (compiling or not (x.is_neg() or torch._C._is_tracing()))
        and (compiling or not (_HAS_NAMES and x.has_names()))
        and forward_ad._current_level < 0
    )


def node(name: str, forward: Forward, keep: Keep, backward: Backward) -> Callable[..., Any]:
    """A differentiable function.

    `forward(*args)` gives the results, `keep(ctx, args, results)` saves what
    `backward(ctx, *gradients)` reads, which returns one gradient or None for each argument.
    """

    def plain(ctx: Any, *args: Any) -> Any:
        made = forward(*args)
        keep(ctx, args, made)
        return made

    def transformed(*args: Any) -> Any:
        return forward(*args)

    members = {"backward": staticmethod(backward)}
    short: Any = type(name, (Function,), {"forward": staticmethod(plain), **members})
    full: Any = type(
        name,
        (Function,),
        {
            "generate_vmap_rule": True,
            "forward": staticmethod(transformed),
            "setup_context": staticmethod(keep),
            **members,
        },
    )

    # What `short.apply` comes to where no transform is active.
    direct: Any = super(Function, short).apply

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return short.apply(*args)
        if torch._C._are_functorch_transforms_active():
            return full.apply(*args)
        return direct(*args)

    return apply
