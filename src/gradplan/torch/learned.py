"""Reductions on a GPU whose forward pass learns what lets the backward pass move less.

Of `amax` and `amin` our forward finds, in its one read of x, the place of each row's winner: the
gradient is written without reading x, but for rows with ties. Of `var` and `std` in f32 torch's own
forward knows the mean, and the gradient is a map. Both are for large tensors, of which rows lie one
after the other, in plain eager code; all else goes the usual way, whose operators also take over
where a gradient is to be differentiated.

torch's mean is of f32, and its error a few times that of one rounding: as large as where torch's
own gradient takes the mean anew. Of halves it is rounded to a half, which is why they are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..backends.gpu import learned
from ..backends.gpu.launch import device_arch, processors
from ..backends.gpu.program import Program
from ..backends.gpu.programs import ready
from ..backends.gpu.table import Table, table_of
from ..kinds import ElementKind, ReduceKind
from .operators import OPERATORS

__all__ = ["Rows", "extremum", "moment", "rows_of"]

# Fewer elements take as long as it takes to ask for them, and torch's forward is asked for faster.
_MANY = 1 << 22


class Rows(NamedTuple):
    """So many rows of n elements."""

    rows: int
    n: int


def rows_of(x: Tensor, dim: Any) -> Rows | None:
    """The rows of a reduction over these axes, if the kernels here are for it."""
    if torch.compiler.is_compiling() or not _on_gpu(x) or x.numel() < _MANY:
        return None
    rank, shape = x.dim(), x.shape
    dims = (dim,) if isinstance(dim, int) else dim
    if not dims or not all(type(one) is int and -rank <= one < rank for one in dims):
        return None
    # The last axes, in any order.
    if {one % rank for one in dims} != {*range(rank - len(dims), rank)}:
        return None
    n = prod(shape[rank - len(dims) :])
    rows = x.numel() // n
    if (
        n % 16
        or n >= 1 << 30
        or rows < _machine(x.get_device())[0].fill
        or not torch._C._has_storage(x)  # batched
        or x._is_zerotensor()  # without memory
        or not x.is_contiguous()
        or x.data_ptr() & 15
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    return Rows(rows, n)


def _on_gpu(x: Tensor) -> bool:
    return bool(x.is_cuda)


def _machine(device: int) -> tuple[Table, int | None]:
    """The thresholds of a device, and its index."""
    found = _machines.get(device)
    if found is None:
        table = table_of(device_arch(device), processors(device))
        found = _machines[device] = table, device
    return found


_machines: dict[int, tuple[Table, int | None]] = {}


class _Recipe(NamedTuple):
    program: Program
    names: tuple[str, ...]
    device: int | None


_RECIPE_LIMIT = 1024
_recipes: dict[Any, _Recipe] = {}


def _launch(
    make: Callable[..., Program], about: tuple[Any, ...], names: str, tensors: Sequence[Any]
) -> None:
    """Run the program that `make` makes of its arguments, all that decides it but the device."""
    device = tensors[-1].get_device()
    key = (make, about, device)
    recipe = _recipes.get(key)
    if recipe is None:
        table, index = _machine(device)
        program = ready(make(*about, table), index)
        recipe = _Recipe(program, tuple(names.split()), index)
        if len(_recipes) >= _RECIPE_LIMIT:
            _recipes.clear()
        _recipes[key] = recipe
    addresses = {}
    for k, tensor in enumerate(tensors):
        addresses[recipe.names[k]] = tensor.data_ptr()
    index = recipe.device
    stream = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
    recipe.program.launch(addresses, 0, stream)


def _node(kind: ReduceKind, forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The node of `forward(x, rows, dims, keepdim, …)`, which tells y and what is known of rows."""
    operator = OPERATORS[kind]
    saves_y = "y" in operator.tensors

    def call(ctx: Any, x: Tensor, rows: Rows, *params: Any) -> Tensor:
        y, known = forward(x, rows, *params)
        ctx.save_for_backward(x, *((y,) if saves_y else ()), known)
        ctx.rows, ctx.params = rows, params
        return y

    def backward(ctx: Any, dy: Tensor) -> Any:
        *saved, known = ctx.saved_tensors

        def run(dy: Tensor, *args: Any) -> Tensor:
            return _gradient(kind, ctx.rows, known, dy, args)

        dx = operator.gradient(dy, *saved, *ctx.params, run=run)
        return dx, *(None,) * (1 + len(ctx.params))

    members = {"forward": staticmethod(call), "backward": staticmethod(backward)}
    made: Any = type(kind.value, (Function,), members)
    applied: Callable[..., Tensor] = super(Function, made).apply
    return applied


def _gradient(
    kind: ReduceKind, rows: Rows, known: Tensor, dy: Tensor, args: tuple[Any, ...]
) -> Tensor:
    operator = OPERATORS[kind]
    saved, params = args[: operator.count - 1], args[operator.count - 1 :]
    # Hooks of saved tensors may bring them back in another place.
    if not all(one.is_contiguous() and not one.data_ptr() & 15 for one in (*saved, known)):
        made: Tensor = operator.run(dy, *args)
        return made
    alike = not any(step for step, n in zip(dy.stride(), dy.shape, strict=True) if n > 1)
    if dy.data_ptr() & 15 or not (alike or dy.is_contiguous()):
        dy, alike = dy.clone(memory_format=torch.contiguous_format), False
    x = saved[0]
    made = torch.empty_like(x)
    correction = params[2] if len(params) > 2 else 0.0
    about = (kind, ElementKind.of(x), *rows, alike, correction)
    names = "dy x known dx" if len(saved) == 1 else "dy x y known dx"
    _launch(learned.gradient, about, names, (dy, *saved, known, made))
    return made


def extremum(kind: ReduceKind) -> Callable[..., Tensor]:
    """amax or amin of (x, rows, dims, keepdim)."""

    def forward(x: Tensor, rows: Rows, dims: tuple[int, ...], keepdim: bool) -> Any:
        outer = x.shape[: x.dim() - len(dims)]
        y = x.new_empty((*outer, *(1,) * len(dims)) if keepdim else outer)
        known = torch.empty(rows.rows, dtype=torch.int32, device=x.device)
        _launch(learned.extrema, (kind, ElementKind.of(x), *rows), "x y known", (x, y, known))
        return y, known

    return _node(kind, forward)


def moment(kind: ReduceKind, both: Callable[..., Any]) -> Callable[..., Tensor]:
    """var or std of (x, rows, dims, keepdim, correction), by torch's var_mean or std_mean."""

    def forward(
        x: Tensor, rows: Rows, dims: tuple[int, ...], keepdim: bool, correction: float
    ) -> Any:
        return both(x, dims, correction=correction, keepdim=keepdim)

    return _node(kind, forward)
