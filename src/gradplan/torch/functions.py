"""Differentiable functions with torch's names, signatures and results, and our gradients.

Forward results are torch's own, or equal to them (see `learned`), errors too. Where our gradient
would not be asked for, or torch's own way is at the floor already, a function is torch's: see
`nodes.applies`, and each docstring. Then the functions below return `TORCHS`, and `otherwise` hands
torch the arguments as they came.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from math import isfinite
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..errors import Unsupported
from ..kinds import BinaryKind, EmbeddingKind, Named, ReduceKind, ScanKind, SoftmaxKind
from .learned import extremum, moment, rows_of
from .nodes import MAX_RANK, PLAIN, applies, node
from .operators import OPERATORS

__all__ = [
    "amax",
    "amin",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "embedding",
    "lerp",
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
    "vector_norm",
]

Dim: TypeAlias = int | tuple[int, ...] | list[int] | None
Dtype: TypeAlias = torch.dtype | None
Number: TypeAlias = int | float

# NumPy's names for arguments, which torch takes too.
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input"}


# What a function returns that leaves the call to torch.
TORCHS: Any = None
_Call = TypeVar("_Call", bound=Callable[..., Any])


def _told(known: Signature, args: Any, kwargs: Any, named: Any) -> dict[str, Any] | None:
    """The arguments by torch's own names, without those that say what they are by default: torch
    refuses some in so many words, as `dim=None` of prod. None where they are as they came."""
    asked = known.bind(*args, **named).arguments
    if type(asked["input"]) not in PLAIN or asked.keys() & {"args", "kwargs"}:
        return None
    defaults = {name: one.default for name, one in known.parameters.items()}
    more = {n: one for n, one in asked.items() if not _is_default(one, defaults[n])}
    return None if len(more) == len(asked) and named.keys() == kwargs.keys() else more


def _is_default(given: Any, default: Any) -> bool:
    """Whether an argument says what it would without; arrays never do."""
    return not hasattr(given, "shape") and bool(given == default)


def otherwise(theirs: Callable[..., Any]) -> Callable[[_Call], _Call]:
    """Ask torch where the function does not answer: with the arguments as they came, since tensor
    subclasses look at them."""

    def decorate(ours: _Call) -> _Call:
        known = signature(ours)

        @wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            named = kwargs
            if kwargs:
                named = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
            made = ours(*args, **named)
            if made is not TORCHS:
                return made
            if torch.compiler.is_compiling():
                return theirs(*args, **kwargs)
            try:
                return theirs(*args, **kwargs)
            except (TypeError, RuntimeError) as error:  # older ones look for an axis named None
                more = _told(known, args, kwargs, named)
                if more is None:
                    raise
                try:
                    return theirs(**more)
                except Exception:  # then what torch says of the call as it came
                    raise error from None

        return cast(_Call, call)

    return decorate


def _unary(
    kind: Named,
    forward: Callable[..., Any],
    params: Callable[..., Any],
    recomputed: frozenset[torch.dtype] = frozenset(),
    fused: Callable[..., Any] | None = None,
) -> Any:
    """The node of `forward(x, *args)`, whose gradient is asked for with `params(x, *args)`.

    A second result (the indices of cummax) has no gradient. Results of the types `recomputed` are
    not saved: rounded to them, they would cost more accuracy than their recomputation, by the
    kernel itself, costs time.
    `fused(dtype, dy, *saved, *params)` is torch's gradient where that reads one type and writes
    another in one pass, or None where it does not.
    """
    operator = OPERATORS[kind]
    saves_x, saves_y = "x" in operator.tensors, "y" in operator.tensors

    def keep(ctx: Any, args: tuple[Any, ...], made: Any) -> None:
        x, y = args[0], made
        if isinstance(made, tuple):
            y, indices = made
            ctx.mark_non_differentiable(indices)
            ctx.set_materialize_grads(False)
        saved = (x,) if saves_x else ()
        if saves_y:
            saved = *saved, (None if y.dtype in recomputed else y)
        ctx.save_for_backward(*saved)
        ctx.params = params(*args)
        ctx.dtype = x.dtype
        ctx.others = (None,) * (len(args) - 1)

    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        if dy is None:
            return None, *ctx.others
        # Once: a checkpoint unpacks once. Without any, backward may run as often as one likes.
        saved = ctx.saved_tensors if saves_x or saves_y else ()
        if dy.dtype == ctx.dtype:
            return operator.gradient(dy, *saved, *ctx.params), *ctx.others
        # `dtype` or autocast changed the type: the gradient is taken in that of the result.
        if fused is not None:
            dx = fused(ctx.dtype, dy, *saved, *ctx.params)
            if dx is not None:
                return dx, *ctx.others
        wide = [None if t is None else t.to(dy.dtype) for t in saved]
        return operator.gradient(dy, *wide, *ctx.params).to(ctx.dtype), *ctx.others

    return node(kind.value, forward, keep, backward)


def _axis(x: Tensor, dim: int, *_: Any) -> tuple[Any, ...]:
    """The axis of a scan or softmax, counted from the front."""
    return (int(dim) % (x.dim() or 1),)


def _axes(x: Tensor, dim: Dim, keepdim: bool = False, *_: Any) -> tuple[Any, ...]:
    """The axes of a reduction, counted from the front; for torch, none are all."""
    rank = x.dim()
    if dim is None or isinstance(dim, (tuple, list)):
        return tuple(int(d) % (rank or 1) for d in (dim or range(rank))), keepdim
    return (int(dim) % (rank or 1),), keepdim


def _fused(backward: Callable[..., Tensor]) -> Callable[..., Any]:
    """torch's softmax on CUDA takes f32 gradients to f16, along the last axis near the floor."""

    def call(dtype: torch.dtype, dy: Tensor, y: Tensor, dim: int) -> Tensor:
        halved = dy.dtype == torch.float32 and dtype == torch.float16
        if dy.is_cuda and halved and dim == dy.dim() - 1 and dy.is_contiguous():
            return backward(dy, y, dim, dtype)
        return None

    return call


_softmax = _unary(
    SoftmaxKind.SOFTMAX,
    lambda x, dim, dtype: torch.softmax(x, dim, dtype=dtype),
    _axis,
    fused=_fused(torch._softmax_backward_data),
)
_log_softmax = _unary(
    SoftmaxKind.LOG_SOFTMAX,
    lambda x, dim, dtype: torch.log_softmax(x, dim, dtype=dtype),
    _axis,
    fused=_fused(torch._log_softmax_backward_data),
)


# On a GPU a softmax, lerp or mean of fewer elements takes as long as it takes to ask for it. In f32
# and f64 torch's own gradient is as good there, and is asked for without Python.
_FEW = 8192


def _few(x: Any, dtype: Dtype = None) -> bool:
    return (
        isinstance(x, Tensor)
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and x.numel() < _FEW
        and x.dtype in (torch.float32, torch.float64)
        and (dtype is None or dtype == x.dtype)
    )


@otherwise(torch.softmax)
def softmax(input: Tensor, dim: int, dtype: Dtype = None, *, out: Tensor | None = None) -> Tensor:
    """`torch.softmax`: dx = y · (dy − Σ y·dy)."""
    if out is None and not _few(input, dtype) and applies(input, dtype):
        return _softmax(input, dim, dtype)
    return TORCHS


@otherwise(torch.log_softmax)
def log_softmax(
    input: Tensor, dim: int, dtype: Dtype = None, *, out: Tensor | None = None
) -> Tensor:
    """`torch.log_softmax`: dx = dy − exp(y) · Σ dy."""
    if out is None and not _few(input, dtype) and applies(input, dtype):
        return _log_softmax(input, dim, dtype)
    return TORCHS


def _lerp_keep(ctx: Any, args: tuple[Any, ...], made: Any) -> None:
    ctx.weight = float(args[2])
    ctx.dtype = args[0].dtype  # of both


def _lerp_backward(ctx: Any, dy: Tensor) -> Any:
    asked = ctx.needs_input_grad[:2]
    if not torch.compiler.is_compiling() and dy.layout is not torch.strided:
        # Of a table whose gradient is sparse.
        factors = zip((1 - ctx.weight, ctx.weight), asked, strict=True)
        return *(factor * dy if one else None for factor, one in factors), None
    da, db = OPERATORS[BinaryKind.LERP].gradient(dy, ctx.weight, *asked)
    # `to` takes a microsecond where there is nothing to be done.
    if dy.dtype != ctx.dtype:
        da, db = da.to(ctx.dtype), db.to(ctx.dtype)
    return da if asked[0] else None, db if asked[1] else None, None


_lerp = node("lerp", torch.lerp, _lerp_keep, _lerp_backward)


@otherwise(torch.lerp)
def lerp(
    input: Tensor, end: Tensor, weight: Tensor | Number, *, out: Tensor | None = None
) -> Tensor:
    """`torch.lerp`: da = (1 − w)·dy, db = w·dy in one pass, each only if asked for.

    A weight that is a tensor is torch's own: no plan takes one.
    """
    if (
        out is None
        and type(weight) in (int, float)
        and (applies(input) or applies(end))
        and isinstance(input, Tensor)
        and isinstance(end, Tensor)
        and input.dtype == end.dtype
        and input.device == end.device
        and input.dim() <= MAX_RANK
        and end.dim() <= MAX_RANK
    ):
        if input.shape != end.shape:
            input, end = torch.broadcast_tensors(input, end)
        if not _few(input):
            return _lerp(input, end, weight)
    return TORCHS


_cumsum = _unary(ScanKind.CUMSUM, lambda x, dim, dtype: torch.cumsum(x, dim, dtype=dtype), _axis)
_cumprod = _unary(ScanKind.CUMPROD, lambda x, dim, dtype: torch.cumprod(x, dim, dtype=dtype), _axis)
_logcumsumexp = _unary(
    ScanKind.LOG_CUMSUM_EXP,
    torch.logcumsumexp,
    _axis,
    frozenset({torch.float16, torch.bfloat16}),
)
_cummax = _unary(ScanKind.CUMMAX, lambda x, dim: tuple(torch.cummax(x, dim)), _axis)
_cummin = _unary(ScanKind.CUMMIN, lambda x, dim: tuple(torch.cummin(x, dim)), _axis)


@otherwise(torch.cumsum)
def cumsum(input: Tensor, dim: int, *, dtype: Dtype = None, out: Tensor | None = None) -> Tensor:
    """`torch.cumsum`: dx[k] = dy[k] + dx[k+1], in the accumulator's precision."""
    if out is None and applies(input, dtype):
        return _cumsum(input, dim, dtype)
    return TORCHS


@otherwise(torch.cumprod)
def cumprod(input: Tensor, dim: int, *, dtype: Dtype = None, out: Tensor | None = None) -> Tensor:
    """`torch.cumprod`, in linear work and without a division: exact at zeros."""
    if out is None and applies(input, dtype):
        return _cumprod(input, dim, dtype)
    return TORCHS


@otherwise(torch.logcumsumexp)
def logcumsumexp(input: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """`torch.logcumsumexp`: dx[k] = exp(x[k] − y[k])·S[k], and 0 where x[k] is −inf."""
    if out is None and applies(input):
        return _logcumsumexp(input, dim)
    return TORCHS


@otherwise(torch.cummax)
def cummax(input: Tensor, dim: int, *, out: Any = None) -> Any:
    """`torch.cummax`: (values, indices); the last of equals wins, as in torch.

    Saves the input and the values, where torch saves the indices: neither may be changed in place
    before the backward pass.
    """
    if out is None and applies(input):
        return torch.return_types.cummax(_cummax(input, dim))
    return TORCHS


@otherwise(torch.cummin)
def cummin(input: Tensor, dim: int, *, out: Any = None) -> Any:
    """`torch.cummin`: (values, indices); the last of equals wins, as in torch. See `cummax`."""
    if out is None and applies(input):
        return torch.return_types.cummin(_cummin(input, dim))
    return TORCHS


def sum(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.sum` itself: its gradient is an expanded view of dy, which costs nothing."""
    return torch.sum(*args, **kwargs)


def _mean_params(x: Tensor, dim: Dim, keepdim: bool, dtype: Dtype) -> tuple[Any, ...]:
    return (tuple(x.shape), *_axes(x, dim, keepdim))


_mean = _unary(
    ReduceKind.MEAN,
    lambda x, dim, keepdim, dtype: torch.mean(x, dim, keepdim, dtype=dtype),
    _mean_params,
)


@otherwise(torch.mean)
def mean(
    input: Tensor,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.mean`: dx = dy / n."""
    if out is None and not _few(input, dtype) and applies(input, dtype):
        return _mean(input, dim, keepdim, dtype)
    return TORCHS


def _extremum(kind: ReduceKind, forward: Callable[..., Any]) -> Any:
    usual, known = _unary(kind, forward, _axes), extremum(kind)

    def call(x: Tensor, dim: Dim, keepdim: bool) -> Any:
        rows = rows_of(x, dim)
        if rows is None:
            return usual(x, dim, keepdim)
        return known(x, rows, *_axes(x, dim, keepdim))

    return call


_amax = _extremum(ReduceKind.MAX, torch.amax)
_amin = _extremum(ReduceKind.MIN, torch.amin)
# Without a dim torch shares the gradient of max among equals too.
_max = _unary(ReduceKind.MAX, torch.max, lambda x: _axes(x, None))
_min = _unary(ReduceKind.MIN, torch.min, lambda x: _axes(x, None))


@otherwise(torch.amax)
def amax(
    input: Tensor, dim: Dim = (), keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`torch.amax`: dy where x == y, shared among equals."""
    if out is None and applies(input):
        return _amax(input, dim, keepdim)
    return TORCHS


@otherwise(torch.amin)
def amin(
    input: Tensor, dim: Dim = (), keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`torch.amin`: dy where x == y, shared among equals."""
    if out is None and applies(input):
        return _amin(input, dim, keepdim)
    return TORCHS


@otherwise(torch.max)
def max(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.max`: without a dim, dy where x == y, shared among equals.

    With a dim it is torch's own: it has the index, and scatters one number a row.
    """
    if not args and not kwargs and applies(input):
        return _max(input)
    return TORCHS


@otherwise(torch.min)
def min(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.min`: see `max`."""
    if not args and not kwargs and applies(input):
        return _min(input)
    return TORCHS


def _prod_forward(x: Tensor, dim: int | None, keepdim: bool, dtype: Dtype) -> Tensor:
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


_prod = _unary(ReduceKind.PROD, _prod_forward, _axes)


@otherwise(torch.prod)
def prod(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.prod`: dy · Π of the others, exact at zeros, and without waiting for the device."""
    asked = not keepdim if dim is None else isinstance(dim, int)
    if out is None and asked and applies(input, dtype):
        return _prod(input, dim, keepdim, dtype)
    return TORCHS


_vector_norm = _unary(
    ReduceKind.NORM2,
    lambda x, dim, keepdim, dtype: torch.linalg.vector_norm(x, 2, dim, keepdim, dtype=dtype),
    _axes,
)


@otherwise(torch.linalg.vector_norm)
def vector_norm(
    input: Tensor,
    ord: Number | str = 2,
    dim: Dim = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.linalg.vector_norm`: dx = dy · x / y, and 0 where y == 0.

    Orders other than 2 are torch's own.
    """
    if ord == 2 and out is None and applies(input, dtype):
        return _vector_norm(input, dim, keepdim, dtype)
    return TORCHS


_norm = _unary(
    ReduceKind.NORM2,
    lambda x, dim, keepdim, p, dtype: torch.norm(x, p, dim, keepdim, dtype=dtype),
    _axes,
)


@otherwise(torch.norm)
def norm(
    input: Tensor,
    p: Number | str | None = "fro",
    dim: Dim = None,
    keepdim: bool = False,
    out: Tensor | None = None,
    dtype: Dtype = None,
) -> Tensor:
    """`torch.norm` of order 2, "fro" included; other orders are torch's own."""
    if p in (2, "fro", None) and out is None and applies(input, dtype):
        return _norm(input, dim, keepdim, p, dtype)
    return TORCHS


_logsumexp = _unary(ReduceKind.LOG_SUM_EXP, torch.logsumexp, _axes)


@otherwise(torch.logsumexp)
def logsumexp(
    input: Tensor, dim: Dim, keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`torch.logsumexp`: dx = dy · exp(x − y), and 0 where y is −inf."""
    if out is None and applies(input):
        return _logsumexp(input, dim, keepdim)
    return TORCHS


def _moment(kind: ReduceKind, forward: Callable[..., Any], both: Callable[..., Any]) -> Any:
    def one(x: Tensor, dim: Dim, keepdim: bool, correction: Number) -> Any:
        return forward(x, dim, correction=correction, keepdim=keepdim)

    def params(x: Tensor, dim: Dim, keepdim: bool, correction: Number) -> tuple[Any, ...]:
        return (*_axes(x, dim, keepdim), float(correction))

    usual, known = _unary(kind, one, params), moment(kind, both)

    def call(x: Tensor, dim: Dim, keepdim: bool, correction: Number) -> Any:
        rows = rows_of(x, dim) if x.dtype == torch.float32 else None
        if rows is None:
            return usual(x, dim, keepdim, correction)
        return known(x, rows, *params(x, dim, keepdim, correction))

    return call


def _moment_and_mean(kind: ReduceKind, forward: Callable[..., Any]) -> Any:
    """The node of var_mean or std_mean: two results, and only the gradients that come are taken."""
    operator = OPERATORS[kind]

    def call(x: Tensor, dim: Dim, keepdim: bool, correction: Number) -> Any:
        return tuple(forward(x, dim, correction=correction, keepdim=keepdim))

    def keep(ctx: Any, args: tuple[Any, ...], made: Any) -> None:
        x, dim, keepdim, correction = args
        ctx.set_materialize_grads(False)
        ctx.params = (*_axes(x, dim, keepdim), float(correction))
        ctx.save_for_backward(*((x, made[0]) if "y" in operator.tensors else (x,)))

    def backward(ctx: Any, dy: Any, dmean: Any) -> Any:
        saved = ctx.saved_tensors
        x = saved[0]
        dims, keepdim, _ = ctx.params
        dx = None
        if dy is not None:
            dx = operator.gradient(dy, *saved, *ctx.params)
        if dmean is not None:
            size = tuple(x.shape)
            if dx is None:
                dx = OPERATORS[ReduceKind.MEAN].gradient(dmean, size, dims, keepdim)
            else:
                if not keepdim and size:
                    for dim in sorted(dims):
                        dmean = dmean.unsqueeze(dim)
                # Each element of dmean stands for that many of x.
                dx = dx + dmean / (x.numel() // dmean.numel() if dmean.numel() else 1)
        return dx, None, None, None

    return node(f"{kind.value}_mean", call, keep, backward)


_var = _moment(ReduceKind.VAR, torch.var, torch.var_mean)
_std = _moment(ReduceKind.STD, torch.std, torch.std_mean)
_var_mean = _moment_and_mean(ReduceKind.VAR, torch.var_mean)
_std_mean = _moment_and_mean(ReduceKind.STD, torch.std_mean)


def _moments(
    ours: Any,
    input: Tensor,
    dim: Any,
    unbiased: bool | None,
    keepdim: bool,
    correction: Number | None,
    out: Any = None,
) -> Any:
    """torch asks by `correction`, or as it once did: (unbiased) or (dim, unbiased, keepdim)."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if out is not None or not applies(input) or (unbiased is not None and correction is not None):
        return TORCHS
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if isinstance(correction, float) and not isfinite(correction):
        return TORCHS
    return ours(input, dim, keepdim, correction)


@otherwise(torch.var)
def var(
    input: Tensor,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: Number | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.var`: dx = dy · 2 (x − mean) / m, m = n − correction, or 1 where that is ≤ 0."""
    return _moments(_var, input, dim, unbiased, keepdim, correction, out)


@otherwise(torch.std)
def std(
    input: Tensor,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: Number | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.std`: dx = dy · (x − mean) / (m · y), and 0 where y == 0."""
    return _moments(_std, input, dim, unbiased, keepdim, correction, out)


@otherwise(torch.var_mean)
def var_mean(
    input: Tensor,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: Number | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch.var_mean`."""
    both: tuple[Tensor, Tensor] = _moments(_var_mean, input, dim, unbiased, keepdim, correction)
    return both


@otherwise(torch.std_mean)
def std_mean(
    input: Tensor,
    dim: Dim = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: Number | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch.std_mean`."""
    both: tuple[Tensor, Tensor] = _moments(_std_mean, input, dim, unbiased, keepdim, correction)
    return both


def _embedding_forward(
    weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, False)


def _embedding_keep(ctx: Any, args: tuple[Any, ...], made: Any) -> None:
    weight, indices, padding_idx, scale_grad_by_freq = args
    ctx.save_for_backward(indices)
    padding = None if padding_idx < 0 else padding_idx
    ctx.params = weight.shape[0], padding, scale_grad_by_freq


def _embedding_backward(ctx: Any, dout: Tensor) -> Any:
    operator = OPERATORS[EmbeddingKind.EMBEDDING]
    return operator.gradient(dout, *ctx.saved_tensors, *ctx.params), None, None, None


_embedding = node("embedding", _embedding_forward, _embedding_keep, _embedding_backward)


@otherwise(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding`: rows are summed in f32 or better, deterministically.

    `sparse=True` is refused: the gradient is dense.
    """
    if sparse:
        raise Unsupported(
            "gradplan.torch.embedding: the gradient is a dense tensor; sparse=True wants a sparse "
            "one: use torch.nn.functional.embedding"
        )
    padding = -1 if padding_idx is None else padding_idx
    if applies(weight) and weight.dim() == 2 and -weight.shape[0] <= padding < weight.shape[0]:
        if max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
        if padding_idx is not None and padding < 0:
            padding += weight.shape[0]
        return _embedding(weight, input, padding, scale_grad_by_freq)
    return TORCHS
