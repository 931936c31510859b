"""Plain functions, like NumPy's: the arrays decide the plan, the device and what comes back.

Each is a thin wrapper: it views its arrays once, looks up the plan of their shape and type, and
runs it into `out` or into a new array of the caller's own library.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from .errors import InvalidProblem
from .kinds import BinaryKind, ElementKind, IndexKind, Named, ReduceKind, ScanKind, SoftmaxKind
from .plans import (
    BinaryParamBackwardPlan,
    EmbeddingBackwardPlan,
    Plan,
    ReduceBackwardPlan,
    ScanBackwardPlan,
    SoftmaxBackwardPlan,
)
from .sku import PlanPreference
from .views import View, empty_like_type, reshape_view, restore_type, view

__all__ = [
    "cummax_backward",
    "cummin_backward",
    "cumprod_backward",
    "cumsum_backward",
    "embedding_backward",
    "lerp_backward",
    "log_softmax_backward",
    "logcumsumexp_backward",
    "logsumexp_backward",
    "max_backward",
    "mean_backward",
    "min_backward",
    "norm2_backward",
    "prod_backward",
    "softmax_backward",
    "std_backward",
    "sum_backward",
    "var_backward",
]

_PLAN_LIMIT = 1024
Shape = tuple[int, ...]


@lru_cache(maxsize=_PLAN_LIMIT)
def _plan(
    plan: Any,
    descriptor: type,
    device: str,
    preference: PlanPreference | None,
    fields: tuple[tuple[str, Any], ...],
) -> Any:
    """The plan of a question asked in raw values, without normalising it again."""
    return plan.select(descriptor(**dict(fields)), device=device, preference=preference)


def _row(lent: View) -> View:
    """Rank 0 counts as one element."""
    return lent if lent.shape else reshape_view(lent, (1,), (0,))


def _element(lent: View, name: str) -> ElementKind:
    if isinstance(lent.dtype, ElementKind):
        return lent.dtype
    return ElementKind.coerce(lent.dtype.value)  # raises, naming what is supported


def _run(plan: Plan, like: Any, given: dict[str, View], output: str, shape: Shape, out: Any) -> Any:
    """Run into `out`, or into a new array like `like`; `shape` is the caller's own."""
    target = empty_like_type(like, shape) if out is None else out
    lent = view(target, "out")
    if lent.shape != shape:
        raise InvalidProblem(
            f"{type(plan).__name__}: out must have shape {shape}, got {lent.shape}"
        )
    given[output] = _row(lent)
    views = {}
    for operand in plan._operands:
        found = given.get(operand.name)
        if found is None:
            plan._check_absent(operand)
        else:
            views[operand.name] = plan._checked(operand, found)
    plan._run_views(views)
    return restore_type(like, target) if out is None else out


def _along(
    plan: Any,
    descriptor: type,
    axis_field: str,
    kind: Named,
    dy: Any,
    saved: dict[str, Any],
    axis: Any,
    out: Any,
    preference: PlanPreference | None,
    **more: Any,
) -> Any:
    """A gradient along one axis, where every array has the full shape."""
    lent = view(dy, "dy")
    element = _element(lent, "dy")
    shape = lent.shape
    given = {"dy": _row(lent)}
    for name, array in saved.items():
        if array is not None:
            given[name] = _row(view(array, name))
    fields = (
        ("kind", kind),
        ("input_shape", shape or (1,)),
        (axis_field, axis),
        ("element", element),
        *more.items(),
    )
    chosen = _plan(plan, descriptor, lent.device, preference, fields)
    return _run(chosen, dy, given, "dx", shape, out)


def softmax_backward(
    dy: Any,
    y: Any,
    axis: int = -1,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of softmax: dx = y · (dy − Σ y·dy)."""
    return _along(
        SoftmaxBackwardPlan,
        SoftmaxBackwardDescriptor,
        "softmax_axis",
        SoftmaxKind.SOFTMAX,
        dy,
        {"y": y},
        axis,
        out,
        preference,
    )


def log_softmax_backward(
    dy: Any,
    y: Any,
    axis: int = -1,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of log-softmax: dx = dy − exp(y) · Σ dy."""
    return _along(
        SoftmaxBackwardPlan,
        SoftmaxBackwardDescriptor,
        "softmax_axis",
        SoftmaxKind.LOG_SOFTMAX,
        dy,
        {"y": y},
        axis,
        out,
        preference,
    )


def lerp_backward(
    dy: Any,
    weight: float,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> tuple[Any, Any]:
    """The gradients of lerp: (da, db) = ((1 − w)·dy, w·dy); `out=(da, None)` skips db."""
    lent = view(dy, "dy")
    shape = lent.shape
    fields = (
        ("kind", BinaryKind.LERP),
        ("shape", shape or (1,)),
        ("element", _element(lent, "dy")),
        ("param", weight),
    )
    plan = _plan(
        BinaryParamBackwardPlan, BinaryParamBackwardDescriptor, lent.device, preference, fields
    )
    if out is None:
        targets = (empty_like_type(dy, shape), empty_like_type(dy, shape))
    else:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise InvalidProblem("lerp_backward: out must be a pair (da, db), either may be None")
        targets = (out[0], out[1])
    given = {"dy": _row(lent)}
    for operand, target in zip(plan._operands[1:], targets, strict=True):
        if target is not None:
            made = view(target, operand.name)
            if made.shape != shape:
                raise InvalidProblem(
                    f"lerp_backward: {operand.name} must have shape {shape}, got {made.shape}"
                )
            given[operand.name] = plan._checked(operand, _row(made))
    plan._run_views(given)
    if out is not None:
        return targets
    return restore_type(dy, targets[0]), restore_type(dy, targets[1])


def _scan(
    kind: ScanKind,
    dy: Any,
    x: Any,
    y: Any,
    axis: int,
    reverse: bool,
    out: Any,
    preference: PlanPreference | None,
    ties: Any = "first",
) -> Any:
    return _along(
        ScanBackwardPlan,
        ScanBackwardDescriptor,
        "scan_axis",
        kind,
        dy,
        {"x": x, "y": y},
        axis,
        out,
        preference,
        reverse=reverse,
        ties=ties,
    )


def cumsum_backward(
    dy: Any,
    axis: int = -1,
    reverse: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of cumsum: dx[k] = dy[k] + dx[k+1]."""
    return _scan(ScanKind.CUMSUM, dy, None, None, axis, reverse, out, preference)


def cumprod_backward(
    dy: Any,
    x: Any,
    y: Any = None,
    axis: int = -1,
    reverse: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of cumprod: dx[k] = y[k−1]·S[k], S[k] = dy[k] + x[k+1]·S[k+1].

    Exact at zeros. Without `y` the products are recomputed from `x`.
    """
    return _scan(ScanKind.CUMPROD, dy, x, y, axis, reverse, out, preference)


def cummax_backward(
    dy: Any,
    x: Any,
    y: Any = None,
    axis: int = -1,
    reverse: bool = False,
    ties: Any = "first",
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of cummax: each winner receives the dy of the steps that it leads.

    `ties="last"` lets a later equal value win, as PyTorch does.
    """
    return _scan(ScanKind.CUMMAX, dy, x, y, axis, reverse, out, preference, ties)


def cummin_backward(
    dy: Any,
    x: Any,
    y: Any = None,
    axis: int = -1,
    reverse: bool = False,
    ties: Any = "first",
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of cummin: each winner receives the dy of the steps that it leads."""
    return _scan(ScanKind.CUMMIN, dy, x, y, axis, reverse, out, preference, ties)


def logcumsumexp_backward(
    dy: Any,
    x: Any,
    y: Any = None,
    axis: int = -1,
    reverse: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of log-cumsum-exp: dx[k] = exp(x[k] − y[k])·S[k].

    S[k] = dy[k] + exp(y[k] − y[k+1])·S[k+1]. Without `y` it is recomputed in f64, which is more
    accurate for half types.
    """
    return _scan(ScanKind.LOG_CUMSUM_EXP, dy, x, y, axis, reverse, out, preference)


def _reduced_axes(axis: Any, rank: int) -> Shape:
    """The axes as given, counted from the front."""
    if axis is None:
        return tuple(range(rank))
    axes: Shape
    try:
        axes = (operator.index(axis),)
    except TypeError:
        try:
            axes = tuple(operator.index(one) for one in axis)
        except TypeError:
            raise InvalidProblem(
                f"axis must be an int, a tuple of ints or None, got {axis!r}"
            ) from None
    for one in axes:
        if not -max(rank, 1) <= one < max(rank, 1):
            raise InvalidProblem(f"axis {one} is out of range for rank {rank}")
    return tuple(one % max(rank, 1) for one in axes)


def _kept(lent: View, name: str, shape: Shape, axes: Shape) -> View:
    """A view without the reduced axes, with them put back as size 1."""
    rank = len(shape)
    if len(lent.shape) != rank - len(set(axes)):
        expected = tuple(n for d, n in enumerate(shape) if d not in axes)
        raise InvalidProblem(
            f"{name} must have shape {expected} (keepdims=False), got {lent.shape}"
        )
    extents, strides = iter(lent.shape), iter(lent.strides)
    return reshape_view(
        lent,
        tuple(1 if d in axes else next(extents) for d in range(rank)),
        tuple(0 if d in axes else next(strides) for d in range(rank)),
    )


def _reduce(
    kind: ReduceKind,
    dy: Any,
    x: Any,
    y: Any,
    shape: Any,
    axis: Any,
    keepdims: bool,
    out: Any,
    preference: PlanPreference | None,
    **more: Any,
) -> Any:
    lent = view(dy, "dy")
    given = {}
    if x is None:
        try:
            extents = tuple(operator.index(n) for n in shape)
        except TypeError:
            raise InvalidProblem(f"shape must be a tuple of ints, got {shape!r}") from None
    else:
        source = view(x, "x")
        extents = source.shape
        given["x"] = _row(source)
    axes = _reduced_axes(axis, len(extents))
    full = extents or (1,)
    for name, array in (("dy", lent), ("y", None if y is None else view(y, "y"))):
        if array is None:
            continue
        if not extents:
            if array.shape != ():
                raise InvalidProblem(f"{name} must have shape (), got {array.shape}")
            given[name] = _row(array)
        else:
            given[name] = array if keepdims else _kept(array, name, extents, axes)
    fields = (
        ("kind", kind),
        ("input_shape", full),
        ("reduce_axis", axes if extents else axes[:1]),
        ("element", _element(lent, "dy")),
        *more.items(),
    )
    plan = _plan(ReduceBackwardPlan, ReduceBackwardDescriptor, lent.device, preference, fields)
    return _run(plan, dy if x is None else x, given, "dx", extents, out)


def sum_backward(
    dy: Any,
    shape: Sequence[int],
    axis: Any = None,
    keepdims: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of sum: dx = dy, for an input of this shape."""
    return _reduce(ReduceKind.SUM, dy, None, None, shape, axis, keepdims, out, preference)


def mean_backward(
    dy: Any,
    shape: Sequence[int],
    axis: Any = None,
    keepdims: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of mean: dx = dy / n, for an input of this shape."""
    return _reduce(ReduceKind.MEAN, dy, None, None, shape, axis, keepdims, out, preference)


def max_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: Any = None,
    keepdims: bool = False,
    ties: Any = "split",
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of max: dy where x == y, else 0, shared among ties by `ties`."""
    return _reduce(ReduceKind.MAX, dy, x, y, None, axis, keepdims, out, preference, ties=ties)


def min_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: Any = None,
    keepdims: bool = False,
    ties: Any = "split",
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of min: dy where x == y, else 0, shared among ties by `ties`."""
    return _reduce(ReduceKind.MIN, dy, x, y, None, axis, keepdims, out, preference, ties=ties)


def prod_backward(
    dy: Any,
    x: Any,
    y: Any = None,
    axis: Any = None,
    keepdims: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of prod: dy · Π of the others, exact at zeros."""
    return _reduce(ReduceKind.PROD, dy, x, y, None, axis, keepdims, out, preference)


def norm2_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: Any = None,
    keepdims: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of the 2-norm: dy · x / y, and 0 where y == 0."""
    return _reduce(ReduceKind.NORM2, dy, x, y, None, axis, keepdims, out, preference)


def logsumexp_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: Any = None,
    keepdims: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of log-sum-exp: dy · exp(x − y), and 0 where y == −inf."""
    return _reduce(ReduceKind.LOG_SUM_EXP, dy, x, y, None, axis, keepdims, out, preference)


def var_backward(
    dy: Any,
    x: Any,
    axis: Any = None,
    keepdims: bool = False,
    correction: float = 1,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of var: dy · 2 (x − mean) / m, m = n − correction, or 1 where that is ≤ 0."""
    return _reduce(
        ReduceKind.VAR, dy, x, None, None, axis, keepdims, out, preference, correction=correction
    )


def std_backward(
    dy: Any,
    x: Any,
    y: Any,
    axis: Any = None,
    keepdims: bool = False,
    correction: float = 1,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of std: dy · (x − mean) / (m · y), and 0 where y == 0."""
    return _reduce(
        ReduceKind.STD, dy, x, y, None, axis, keepdims, out, preference, correction=correction
    )


def embedding_backward(
    dout: Any,
    indices: Any,
    num_embeddings: int,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    accumulate: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> Any:
    """The gradient of a table look-up: dweight[indices[n]] += dout[n].

    Indices may have any rank; `dout` is `indices.shape + (D,)`. Indices outside the table, or
    equal to `padding_idx`, are skipped. `accumulate=True` adds to `out`.
    """
    rows, keys = view(dout, "dout"), view(indices, "indices")
    if not isinstance(keys.dtype, IndexKind):
        IndexKind.coerce(keys.dtype.value)  # raises, naming what is supported
    if len(rows.shape) != len(keys.shape) + 1 or rows.shape[:-1] != keys.shape:
        raise InvalidProblem(
            f"embedding_backward: dout must have the indices' shape {keys.shape} and one more "
            f"axis, got {rows.shape}"
        )
    if accumulate and out is None:
        raise InvalidProblem("embedding_backward: accumulate=True adds to out, which is missing")
    dim, count = rows.shape[-1], keys.size
    fields = (
        ("num_embeddings", num_embeddings),
        ("embedding_dim", dim),
        ("num_indices", count),
        ("element", _element(rows, "dout")),
        ("index", keys.dtype),
        ("padding_idx", padding_idx),
        ("accumulate", accumulate),
        ("scale_grad_by_freq", scale_grad_by_freq),
    )
    plan = _plan(
        EmbeddingBackwardPlan, EmbeddingBackwardDescriptor, rows.device, preference, fields
    )
    shape = plan.descriptor.operands[2].shape
    target = empty_like_type(dout, shape) if out is None else out
    table = plan._checked(plan._operands[2], view(target, "out"))
    for operand, lent in zip(plan._operands[:2], (rows, keys), strict=True):
        plan._checked(operand, reshape_view(lent, operand.shape, (0,) * len(operand.shape)))
    extents, steps = _merged(keys.shape, keys.strides, rows.strides[:-1])
    views = {
        "dout": reshape_view(rows, (*extents, dim), (*steps[1], rows.strides[-1])),
        "indices": reshape_view(keys, extents, steps[0]),
        "dweight": table,
    }
    plan._run_views(views, index_shape=extents)
    return restore_type(dout, target) if out is None else out


def _merged(shape: Shape, first: Shape, second: Shape) -> tuple[Shape, tuple[Shape, Shape]]:
    """Merge neighbouring axes, in C order, wherever both arrays allow it."""
    if 0 in shape:
        return (0,), ((0,), (0,))
    merged: list[tuple[int, int, int]] = []
    for n, a, b in zip(shape, first, second, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == a * n and merged[-1][2] == b * n:
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    if not merged:
        merged.append((1, 0, 0))
    sizes, a_steps, b_steps = zip(*merged, strict=True)
    return tuple(sizes), (tuple(a_steps), tuple(b_steps))
