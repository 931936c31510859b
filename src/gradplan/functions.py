"""Plain functions, like NumPy's: the arrays decide the plan, the device and what comes back.

Each is a thin wrapper: it views its arrays once, looks up the plan of their shape and type, and
runs it into `out` or into a new array of the caller's own library.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from .descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from .errors import InvalidProblem, Unsupported
from .kinds import (
    BinaryKind,
    ElementKind,
    IndexKind,
    Named,
    OpCategory,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
    TieRule,
)
from .plans import (
    BinaryParamBackwardPlan,
    EmbeddingBackwardPlan,
    Plan,
    ReduceBackwardPlan,
    ScanBackwardPlan,
    SoftmaxBackwardPlan,
)
from .registry import spec_of
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


def _plan(
    plan: Any,
    descriptor: type,
    device: str,
    preference: PlanPreference | None,
    fields: tuple[tuple[str, Any], ...],
) -> Any:
    if preference is not None and not isinstance(preference, PlanPreference):
        raise InvalidProblem(f"preference must be a PlanPreference, got {preference!r}")
    return _asked(plan, descriptor, device, preference, fields)


@lru_cache(maxsize=_PLAN_LIMIT)
def _asked(
    plan: Any,
    descriptor: type,
    device: str,
    preference: PlanPreference | None,
    fields: tuple[tuple[str, Any], ...],
) -> Any:
    """The plan of a question asked in plain values, without normalising it again."""
    return plan.select(descriptor(**dict(fields)), device=device, preference=preference)


def _row(lent: View) -> View:
    """Rank 0 counts as one element."""
    return lent if lent.shape else reshape_view(lent, (1,), (0,))


def _element(lent: View, label: str) -> ElementKind:
    if isinstance(lent.dtype, ElementKind):
        return lent.dtype
    names = ", ".join(ElementKind)
    raise Unsupported(f"{label}: expected elements of type {names}, got {lent.dtype.value}")


def _integer(label: str, value: Any) -> int:
    """An int, before it becomes part of a question that is looked up."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidProblem(f"{label} must be an integer, got {value!r}") from None


def _number(label: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidProblem(f"{label} must be a number, got {value!r}") from None


def _run(
    function: str,
    plan: Plan,
    like: Any,
    given: dict[str, View],
    shape: Shape,
    out: Any,
    stream: Any,
) -> Any:
    """Run into `out`, or into a new array like `like`; `shape` is the caller's own."""
    target = empty_like_type(like, shape) if out is None else out
    lent = view(target, f"{function}: out")
    if lent.shape != shape:
        raise InvalidProblem(f"{function}: out must have shape {shape}, got {lent.shape}")
    given["dx"] = _row(lent)
    views = {}
    for operand in plan._operands:
        found = given.get(operand.name)
        if found is None:
            plan._check_absent(operand)
        else:
            views[operand.name] = plan._checked(operand, found)
    plan._run_views(views, stream=stream)
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
    stream: Any,
    **more: Any,
) -> Any:
    """A gradient along one axis, where every array has the full shape."""
    function = spec_of(descriptor.category, kind).function  # type: ignore[attr-defined]
    lent = view(dy, f"{function}: dy")
    shape = lent.shape
    given = {"dy": _row(lent)}
    for name, array in saved.items():
        if array is not None:
            given[name] = _row(view(array, f"{function}: {name}"))
    fields = (
        ("kind", kind),
        ("input_shape", shape or (1,)),
        (axis_field, _integer(f"{function}: axis", axis)),
        ("element", _element(lent, f"{function}: dy")),
        *more.items(),
    )
    chosen = _plan(plan, descriptor, lent.device, preference, fields)
    return _run(function, chosen, dy, given, shape, out, stream)


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
        stream,
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
        stream,
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
    lent = view(dy, "lerp_backward: dy")
    shape = lent.shape
    fields = (
        ("kind", BinaryKind.LERP),
        ("shape", shape or (1,)),
        ("element", _element(lent, "lerp_backward: dy")),
        ("param", _number("lerp_backward: weight", weight)),
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
            made = view(target, f"lerp_backward: {operand.name}")
            if made.shape != shape:
                raise InvalidProblem(
                    f"lerp_backward: {operand.name} must have shape {shape}, got {made.shape}"
                )
            given[operand.name] = plan._checked(operand, _row(made))
    plan._run_views(given, stream=stream)
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
    stream: Any,
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
        stream,
        reverse=bool(reverse),
        ties=TieRule.coerce(ties),
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
    return _scan(ScanKind.CUMSUM, dy, None, None, axis, reverse, out, preference, stream)


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
    return _scan(ScanKind.CUMPROD, dy, x, y, axis, reverse, out, preference, stream)


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
    return _scan(ScanKind.CUMMAX, dy, x, y, axis, reverse, out, preference, stream, ties)


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
    return _scan(ScanKind.CUMMIN, dy, x, y, axis, reverse, out, preference, stream, ties)


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
    return _scan(ScanKind.LOG_CUMSUM_EXP, dy, x, y, axis, reverse, out, preference, stream)


def _reduced_axes(function: str, axis: Any, rank: int) -> Shape:
    """The axes as given, counted from the front; rank 0 has one axis of one element."""
    rank = max(rank, 1)
    if axis is None:
        return tuple(range(rank))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = []
    for one in given:
        number = _integer(f"{function}: an axis", one)
        if not -rank <= number < rank:
            raise InvalidProblem(f"{function}: axis {number} is out of range for rank {rank}")
        axes.append(number % rank)
    if len(set(axes)) < len(axes):
        raise InvalidProblem(f"{function}: axis {axis!r} names an axis twice")
    return tuple(axes)


def _kept(label: str, lent: View, shape: Shape, axes: Shape) -> View:
    """A view without the reduced axes, with them put back as size 1."""
    rank = len(shape)
    if len(lent.shape) != rank - len(axes):
        expected = tuple(n for d, n in enumerate(shape) if d not in axes)
        raise InvalidProblem(
            f"{label} must have shape {expected} (keepdims=False), got {lent.shape}"
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
    stream: Any,
    **more: Any,
) -> Any:
    function = spec_of(OpCategory.REDUCTION, kind).function
    lent = view(dy, f"{function}: dy")
    given = {}
    if x is None:
        if not isinstance(shape, Iterable):
            raise InvalidProblem(f"{function}: shape must be a tuple of ints, got {shape!r}")
        extents = tuple(_integer(f"{function}: an extent of shape", n) for n in shape)
    else:
        source = view(x, f"{function}: x")
        extents = source.shape
        given["x"] = _row(source)
    axes = _reduced_axes(function, axis, len(extents))
    small = {"dy": lent}
    if y is not None:
        small["y"] = view(y, f"{function}: y")
    for name, array in small.items():
        if not extents:
            if array.shape != ():
                raise InvalidProblem(f"{function}: {name} must have shape (), got {array.shape}")
            given[name] = _row(array)
        else:
            label = f"{function}: {name}"
            given[name] = array if keepdims else _kept(label, array, extents, axes)
    fields = (
        ("kind", kind),
        ("input_shape", extents or (1,)),
        ("reduce_axis", axes),
        ("element", _element(lent, f"{function}: dy")),
        *more.items(),
    )
    plan = _plan(ReduceBackwardPlan, ReduceBackwardDescriptor, lent.device, preference, fields)
    return _run(function, plan, dy if x is None else x, given, extents, out, stream)


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
    return _reduce(ReduceKind.SUM, dy, None, None, shape, axis, keepdims, out, preference, stream)


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
    return _reduce(ReduceKind.MEAN, dy, None, None, shape, axis, keepdims, out, preference, stream)


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
    return _reduce(
        ReduceKind.MAX,
        dy,
        x,
        y,
        None,
        axis,
        keepdims,
        out,
        preference,
        stream,
        ties=TieRule.coerce(ties),
    )


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
    return _reduce(
        ReduceKind.MIN,
        dy,
        x,
        y,
        None,
        axis,
        keepdims,
        out,
        preference,
        stream,
        ties=TieRule.coerce(ties),
    )


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
    return _reduce(ReduceKind.PROD, dy, x, y, None, axis, keepdims, out, preference, stream)


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
    return _reduce(ReduceKind.NORM2, dy, x, y, None, axis, keepdims, out, preference, stream)


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
    return _reduce(ReduceKind.LOG_SUM_EXP, dy, x, y, None, axis, keepdims, out, preference, stream)


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
        ReduceKind.VAR,
        dy,
        x,
        None,
        None,
        axis,
        keepdims,
        out,
        preference,
        stream,
        correction=_number("var_backward: correction", correction),
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
        ReduceKind.STD,
        dy,
        x,
        y,
        None,
        axis,
        keepdims,
        out,
        preference,
        stream,
        correction=_number("std_backward: correction", correction),
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
    me = "embedding_backward"
    rows, keys = view(dout, f"{me}: dout"), view(indices, f"{me}: indices")
    if not isinstance(keys.dtype, IndexKind):
        raise Unsupported(f"{me}: indices: expected i32 or i64, got {keys.dtype.value}")
    if len(rows.shape) != len(keys.shape) + 1 or rows.shape[:-1] != keys.shape:
        raise InvalidProblem(
            f"{me}: dout must have the indices' shape {keys.shape} and one more axis, "
            f"got {rows.shape}"
        )
    if accumulate and out is None:
        raise InvalidProblem(f"{me}: accumulate=True adds to out, which is missing")
    dim, count = rows.shape[-1], keys.size
    fields = (
        ("num_embeddings", _integer(f"{me}: num_embeddings", num_embeddings)),
        ("embedding_dim", dim),
        ("num_indices", count),
        ("element", _element(rows, f"{me}: dout")),
        ("index", keys.dtype),
        (
            "padding_idx",
            None if padding_idx is None else _integer(f"{me}: padding_idx", padding_idx),
        ),
        ("accumulate", bool(accumulate)),
        ("scale_grad_by_freq", bool(scale_grad_by_freq)),
    )
    plan = _plan(
        EmbeddingBackwardPlan, EmbeddingBackwardDescriptor, rows.device, preference, fields
    )
    target = empty_like_type(dout, plan._operands[2].shape) if out is None else out
    table = plan._checked(plan._operands[2], view(target, f"{me}: out"))
    for operand, lent in zip(plan._operands[:2], (rows, keys), strict=True):
        plan._checked(operand, reshape_view(lent, operand.shape, (0,) * len(operand.shape)))
    extents, steps = _merged(keys.shape, keys.strides, rows.strides[:-1])
    views = {
        "dout": reshape_view(rows, (*extents, dim), (*steps[1], rows.strides[-1])),
        "indices": reshape_view(keys, extents, steps[0]),
        "dweight": table,
    }
    plan._run_views(views, index_shape=extents, stream=stream)
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
