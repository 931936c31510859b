"""Plain functions, like NumPy's: the arrays decide the plan, the device and what comes back.

Each is a thin wrapper: it views its arrays once, looks up the plan of their layouts, and runs it
into `out` or into a new array of the caller's own library. A question is worked out when it is
first asked; the same question about arrays of the same layouts is one look-up.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from .again import Recent
from .descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
    axes_of,
    extents_of,
    flag_of,
    number_of,
)
from .errors import InvalidProblem, Unsupported
from .kinds import (
    BinaryKind,
    ElementKind,
    EmbeddingKind,
    IndexKind,
    Named,
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
from .registry import Need, spec_of
from .sku import PlanPreference
from .views import (
    Layout,
    View,
    count_write,
    empty_like_type,
    remember,
    reshape_view,
    restore_type,
    view,
)

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

Shape = tuple[int, ...]


def _preference(given: Any) -> PlanPreference | None:
    """What was asked for, before it becomes part of a question that is looked up."""
    if given is None or isinstance(given, PlanPreference):
        return given
    raise InvalidProblem(f"preference must be a PlanPreference, got {given!r}")


def _row(lent: View) -> View:
    """Rank 0 counts as one element."""
    return lent if lent.layout.shape else reshape_view(lent, (1,), (0,))


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


def _key(question: Any, dy: Any, x: Any, y: Any) -> tuple[Any, ...]:
    """What tells calls apart that are remembered, but for how their arrays lie."""
    shape = getattr(dy, "shape", None)
    if type(shape) is list:  # as some libraries have it
        shape = tuple(shape)
    return question, shape, x is None, y is None


def _given(dy: Any, x: Any, y: Any) -> tuple[Any, ...]:
    """Those that are not None."""
    if x is None:
        return (dy,) if y is None else (dy, y)
    return (dy, x) if y is None else (dy, x, y)


class _Function:
    """What one kind's function has ready: its labels, and the questions it was asked."""

    def __init__(self, plan: Any, descriptor: Any, kind: Named) -> None:
        self.plan = plan
        self.descriptor = descriptor
        self.kind = kind
        spec = spec_of(descriptor.category, kind)
        self.name = name = spec.function
        self.needs_x = spec.x is Need.REQUIRED
        self.dy, self.x, self.y = f"{name}: dy", f"{name}: x", f"{name}: y"
        self.axis, self.out = f"{name}: axis", f"{name}: out"
        self.asked: dict[Any, Any] = {}
        self.recent: dict[Any, Recent] = {}

    def again(self, question: Any, stream: Any, dy: Any, x: Any = None, y: Any = None) -> Any:
        """The gradient of arrays like earlier ones, into new arrays; None where there were none.

        `question` tells all that the arrays do not.
        """
        recent = self.recent.get(_key(question, dy, x, y))
        arrays = _given(dy, x, y)
        again = None if recent is None else recent.find(arrays)
        if again is None:
            return None
        made = again.fresh(arrays, stream)
        if not again.launch(arrays, stream, None, made):
            return None
        return made[0] if len(made) == 1 else tuple(made)

    def note(
        self,
        question: Any,
        plan: Plan,
        views: dict[str, View],
        shape: Shape,
        dy: Any,
        x: Any = None,
        y: Any = None,
        count: int = 1,
    ) -> None:
        """Remember a call for `again`; the last of its views are new arrays of this shape."""
        if plan._backend.device is not None:
            key = _key(question, dy, x, y)
            recent = self.recent.get(key)
            if recent is None:
                recent = Recent()
                remember(self.recent, key, recent)
            recent.note(plan, views, _given(dy, x, y), count, shape)

    def select(self, device: str, preference: PlanPreference | None, **fields: Any) -> Any:
        descriptor = self.descriptor(kind=self.kind, **fields)
        return self.plan.select(descriptor, device=device, preference=preference)

    def run(
        self, plan: Plan, like: Any, views: dict[str, View], shape: Shape, out: Any, stream: Any
    ) -> Any:
        """Run into `out`, or into a new array like `like`; `shape` is the caller's own."""
        target = empty_like_type(like, shape, stream) if out is None else out
        lent = view(target, self.out)
        if lent.layout.shape != shape:
            raise InvalidProblem(f"{self.out} must have shape {shape}, got {lent.shape}")
        views["dx"] = _row(lent)
        plan._run_views(views, None, None, stream)
        if out is None:
            return restore_type(like, target, stream)
        count_write(out)
        return out


class _Along(_Function):
    """A gradient along one axis, where every array has the full shape."""

    def __call__(
        self,
        dy: Any,
        x: Any,
        y: Any,
        axis: Any,
        out: Any,
        preference: PlanPreference | None,
        stream: Any,
        **more: Any,
    ) -> Any:
        if type(axis) is not int:
            axis = _integer(self.axis, axis)
        question = (axis, _preference(preference), *more.values())
        if out is None and self.recent:
            made = self.again(question, stream, dy, x, y)
            if made is not None:
                return made
        lent = view(dy, self.dy)
        layout = lent.layout
        shape = layout.shape
        views = {"dy": _row(lent)}
        if x is not None:
            views["x"] = _row(view(x, self.x))
        if y is not None:
            views["y"] = _row(view(y, self.y))
        key = (layout, *question)
        plan = self.asked.get(key)
        if plan is None:
            plan = self.select(
                layout.device,
                preference,
                input_shape=shape or (1,),
                element=_element(lent, self.dy),
                **{_AXIS_FIELD[self.plan]: axis},
                **more,
            )
            remember(self.asked, key, plan)
        made = self.run(plan, dy, views, shape, out, stream)
        if out is None:
            self.note(question, plan, views, shape, dy, x, y)
        return made


_AXIS_FIELD = {SoftmaxBackwardPlan: "softmax_axis", ScanBackwardPlan: "scan_axis"}
_SOFTMAX = _Along(SoftmaxBackwardPlan, SoftmaxBackwardDescriptor, SoftmaxKind.SOFTMAX)
_LOG_SOFTMAX = _Along(SoftmaxBackwardPlan, SoftmaxBackwardDescriptor, SoftmaxKind.LOG_SOFTMAX)
_SCANS = {kind: _Along(ScanBackwardPlan, ScanBackwardDescriptor, kind) for kind in ScanKind}


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
    return _SOFTMAX(dy, None, y, axis, out, preference, stream)


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
    return _LOG_SOFTMAX(dy, None, y, axis, out, preference, stream)


def lerp_backward(
    dy: Any,
    weight: float,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
    preference: PlanPreference | None = None,
) -> tuple[Any, Any]:
    """The gradients of lerp: (da, db) = ((1 − w)·dy, w·dy); `out=(da, None)` skips db."""
    question = (number_of("lerp_backward: weight", weight), _preference(preference))
    if out is None and _LERP.recent:
        made = _LERP.again(question, stream, dy)
        if made is not None:
            return made  # type: ignore[no-any-return]
    lent = view(dy, _LERP.dy)
    layout = lent.layout
    shape = layout.shape
    key = (layout, *question)
    plan = _LERP.asked.get(key)
    if plan is None:
        element = _element(lent, _LERP.dy)
        plan = _LERP.select(
            layout.device, preference, shape=shape or (1,), element=element, param=question[0]
        )
        remember(_LERP.asked, key, plan)
    if out is None:
        targets = (empty_like_type(dy, shape, stream), empty_like_type(dy, shape, stream))
    else:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise InvalidProblem("lerp_backward: out must be a pair (da, db), either may be None")
        targets = (out[0], out[1])
    views = {"dy": _row(lent)}
    for name, target in zip(("da", "db"), targets, strict=True):
        if target is not None:
            made = view(target, f"lerp_backward: {name}")
            if made.layout.shape != shape:
                raise InvalidProblem(
                    f"lerp_backward: {name} must have shape {shape}, got {made.shape}"
                )
            views[name] = _row(made)
    plan._run_views(views, stream=stream)
    if out is not None:
        for target in targets:
            count_write(target)
        return targets
    _LERP.note(question, plan, views, shape, dy, count=2)
    return restore_type(dy, targets[0], stream), restore_type(dy, targets[1], stream)


_LERP = _Function(BinaryParamBackwardPlan, BinaryParamBackwardDescriptor, BinaryKind.LERP)


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
    ties: Any = TieRule.FIRST,
) -> Any:
    run = _SCANS[kind]
    ties = TieRule.coerce(ties, run.name, "ties")
    reverse = flag_of(run.name, "reverse", reverse)
    return run(dy, x, y, axis, out, preference, stream, reverse=reverse, ties=ties)


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


def _reduced_axes(function: str, axis: int | Shape | None, rank: int) -> Shape:
    """The axes as given, counted from the front; rank 0 has one axis of one element."""
    rank = max(rank, 1)
    if axis is None:
        return tuple(range(rank))
    axes = []
    for number in axis if isinstance(axis, tuple) else (axis,):
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


class _Reduction(_Function):
    """The gradient of a reduction; `dy` and `y` come with or without the reduced axes."""

    def __call__(
        self,
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
        extents = self._extents(shape) if x is None else ()
        if axis is not None and type(axis) is not int:
            axes = axes_of(self.axis, axis)
            axis = tuple([_integer(f"{self.name}: an axis", one) for one in axes])
        keepdims = flag_of(self.name, "keepdims", keepdims)
        question = (extents, axis, keepdims, _preference(preference), *more.values())
        if out is None and self.recent:
            made = self.again(question, stream, dy, x, y)
            if made is not None:
                return made
        lent = view(dy, self.dy)
        source = None
        if x is not None:
            source = view(x, self.x)
            extents = source.layout.shape
        saved = None if y is None else view(y, self.y)
        key = (lent.layout, None if saved is None else saved.layout, extents, *question)
        answer = self.asked.get(key)
        if answer is None:
            answer = self._answer(lent, saved, extents, axis, keepdims, preference, more)
            remember(self.asked, key, answer)
        plan, dy_layout, y_layout = answer
        views = {"dy": View(lent.ptr, dy_layout, lent.owner)}
        if source is not None:
            views["x"] = _row(source)
        if saved is not None and y_layout is not None:
            views["y"] = View(saved.ptr, y_layout, saved.owner)
        made = self.run(plan, dy if x is None else x, views, extents, out, stream)
        if out is None:
            self.note(question, plan, views, extents, dy, x, y)
        return made

    def _extents(self, shape: Any) -> Shape:
        if shape is None and self.needs_x:
            raise InvalidProblem(f"{self.name} needs x, and it is missing")
        extents = extents_of(f"{self.name}: shape", shape)
        try:
            return tuple(map(operator.index, extents))
        except TypeError:
            return tuple([_integer(f"{self.name}: an extent of shape", n) for n in extents])

    def _answer(
        self,
        dy: View,
        y: View | None,
        extents: Shape,
        axis: int | Shape | None,
        keepdims: bool,
        preference: PlanPreference | None,
        more: dict[str, Any],
    ) -> tuple[Plan, Layout, Layout | None]:
        """The plan of a question, and the layouts of `dy` and `y` in keepdim form."""
        axes = _reduced_axes(self.name, axis, len(extents))

        def whole(lent: View, label: str) -> Layout:
            if not extents:
                if lent.shape != ():
                    raise InvalidProblem(f"{label} must have shape (), got {lent.shape}")
                return _row(lent).layout
            return lent.layout if keepdims else _kept(label, lent, extents, axes).layout

        layouts = whole(dy, self.dy), None if y is None else whole(y, self.y)
        plan: Plan = self.select(
            dy.device,
            preference,
            input_shape=extents or (1,),
            reduce_axis=axes,
            element=_element(dy, self.dy),
            **more,
        )
        return plan, *layouts


_REDUCTIONS = {
    kind: _Reduction(ReduceBackwardPlan, ReduceBackwardDescriptor, kind) for kind in ReduceKind
}


def _reduce(kind: ReduceKind, *given: Any, **more: Any) -> Any:
    return _REDUCTIONS[kind](*given, **more)


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
        ties=TieRule.coerce(ties, "max_backward", "ties"),
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
        ties=TieRule.coerce(ties, "min_backward", "ties"),
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
        correction=number_of("var_backward: correction", correction),
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
        correction=number_of("std_backward: correction", correction),
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
    if type(num_embeddings) is not int:
        num_embeddings = _integer(f"{me}: num_embeddings", num_embeddings)
    if padding_idx is not None:
        padding_idx = _integer(f"{me}: padding_idx", padding_idx)
    accumulate = flag_of(me, "accumulate", accumulate)
    scaled = flag_of(me, "scale_grad_by_freq", scale_grad_by_freq)
    if accumulate and out is None:
        raise InvalidProblem(f"{me}: accumulate=True adds to out, which is missing")
    options = (num_embeddings, padding_idx, accumulate, scaled)
    question = (_preference(preference), *options)
    if out is None and _EMBEDDING.recent:
        made = _EMBEDDING.again(question, stream, dout, indices)
        if made is not None:
            return made
    rows = view(dout, "embedding_backward: dout")
    keys = view(indices, "embedding_backward: indices")
    key = (rows.layout, keys.layout, *question)
    answer = _EMBEDDING.asked.get(key)
    if answer is None:
        answer = _embedding(rows, keys, preference, *options)
        remember(_EMBEDDING.asked, key, answer)
    plan, extents, dout_layout, indices_layout = answer
    target = out
    if out is None:
        target = empty_like_type(dout, plan._operands[2].shape, stream)
    views = {
        "dout": View(rows.ptr, dout_layout, rows.owner),
        "indices": View(keys.ptr, indices_layout, keys.owner),
        "dweight": view(target, "embedding_backward: out"),
    }
    plan._run_views(views, None, extents, stream)
    if out is not None:
        count_write(out)
        return out
    if len(extents) == 1:  # else the plan itself does not say what runs
        _EMBEDDING.note(question, plan, views, plan._operands[2].shape, dout, indices)
    return restore_type(dout, target, stream)


_EMBEDDING = _Function(EmbeddingBackwardPlan, EmbeddingBackwardDescriptor, EmbeddingKind.EMBEDDING)


def _embedding(
    rows: View,
    keys: View,
    preference: PlanPreference | None,
    num_embeddings: int,
    padding_idx: int | None,
    accumulate: bool,
    scale_grad_by_freq: bool,
) -> tuple[Plan, Shape, Layout, Layout]:
    """The plan of a question, the indices' shape with axes merged, and both layouts so."""
    me = "embedding_backward"
    if not isinstance(keys.dtype, IndexKind):
        raise Unsupported(f"{me}: indices: expected i32 or i64, got {keys.dtype.value}")
    if len(rows.shape) != len(keys.shape) + 1 or rows.shape[:-1] != keys.shape:
        raise InvalidProblem(
            f"{me}: dout must have the indices' shape {keys.shape} and one more axis, "
            f"got {rows.shape}"
        )
    dim = rows.shape[-1]
    descriptor = EmbeddingBackwardDescriptor(
        num_embeddings=num_embeddings,
        embedding_dim=dim,
        num_indices=keys.size,
        element=_element(rows, f"{me}: dout"),
        index=keys.dtype,
        padding_idx=padding_idx,
        accumulate=accumulate,
        scale_grad_by_freq=scale_grad_by_freq,
    )
    plan = EmbeddingBackwardPlan.select(descriptor, device=rows.device, preference=preference)
    extents, steps = _merged(keys.shape, keys.strides, rows.strides[:-1])
    dout = reshape_view(rows, (*extents, dim), (*steps[1], rows.strides[-1]))
    return plan, extents, dout.layout, reshape_view(keys, extents, steps[0]).layout


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
