"""The oracle: every gradient written once in plain NumPy, straight from its definition.

It is slow, allocates freely and shares no code with the engines, so that an agreement between
the two means something. The caller converts all inputs to one work dtype, float64, or longdouble
where the element itself is f64; results stay unrounded in that dtype.

Arrays are brought into rows first: shape (outer, n), the axes of the problem flattened in C order
behind all others. Each formula below is then written for the last axis.

With `magnitude=True` the same formulas run with every term taken absolute: `_Sign.of` takes
absolute values and `_Sign.minus` adds. What is a choice (a winner, a tie, an exponent) is still
made on the signed data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from ..errors import Unsupported
from ..kinds import ElementKind, ReduceKind, ScanKind, SoftmaxKind, TieRule

__all__ = ["Descriptor", "check_error", "gradient"]

Array = NDArray[Any]
Descriptor = (
    SoftmaxBackwardDescriptor
    | BinaryParamBackwardDescriptor
    | ScanBackwardDescriptor
    | ReduceBackwardDescriptor
    | EmbeddingBackwardDescriptor
)

_STORED = {
    ElementKind.F32: np.dtype(np.float32),
    ElementKind.F16: np.dtype(np.float16),
    ElementKind.BF16: np.dtype(ml_dtypes.bfloat16),
    ElementKind.F64: np.dtype(np.float64),
}


class _Sign:
    """The signed formula, or its magnitude A."""

    def __init__(self, magnitude: bool) -> None:
        self.of: Callable[[Array], Array] = np.abs if magnitude else np.positive
        self.minus: Callable[[Array, Array], Array] = np.add if magnitude else np.subtract


def gradient(
    desc: Descriptor, arrays: Mapping[str, Array | None], *, magnitude: bool = False
) -> dict[str, Array]:
    """The outputs of a problem by operand name, unrounded, in the dtype of the inputs.

    `arrays` holds the inputs by operand name: the floating ones all float64 or all longdouble,
    in the shapes of `desc.operands`. An optional `y` that is missing or None is recomputed from
    `x`. `dweight`, the old contents of the table, is read only when the problem accumulates.
    `magnitude=True` gives A in place of the gradient: each term taken absolute.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    dtypes = {array.dtype for name, array in given.items() if name != "indices"}
    if len(dtypes) != 1 or not dtypes <= {np.dtype(np.float64), np.dtype(np.longdouble)}:
        raise TypeError(f"the reference works in float64 or in longdouble, got {dtypes}")
    sign = _Sign(magnitude)
    with np.errstate(all="ignore"):
        if isinstance(desc, EmbeddingBackwardDescriptor):
            return {"dweight": _embedding(desc, given, sign)}
        if isinstance(desc, BinaryParamBackwardDescriptor):
            return _lerp(desc, given["dy"], sign)
        shape, axes = desc.shape_and_axes
        if 0 in shape:
            return {"dx": np.zeros(shape, dtypes.pop())}
        rows = {name: _rows(array, axes) for name, array in given.items()}
        if isinstance(desc, SoftmaxBackwardDescriptor):
            dx = _softmax(desc, rows, sign)
        elif isinstance(desc, ScanBackwardDescriptor):
            dx = _scan(desc, rows, sign)
        else:
            dx = _reduce(desc, rows, sign)
        return {"dx": _unrows(dx, shape, axes)}


def _order(rank: int, axes: Sequence[int]) -> list[int]:
    return [d for d in range(rank) if d not in axes] + sorted(axes)


def _rows(array: Array, axes: Sequence[int]) -> Array:
    """(outer, n): `axes` flattened in C order behind all others."""
    n = prod(array.shape[d] for d in axes)
    outer = prod(extent for d, extent in enumerate(array.shape) if d not in axes)
    return array.transpose(_order(array.ndim, axes)).reshape(outer, n)


def _unrows(rows: Array, shape: Sequence[int], axes: Sequence[int]) -> Array:
    order = _order(len(shape), axes)
    back = rows.reshape([shape[d] for d in order]).transpose(np.argsort(order))
    return np.ascontiguousarray(back)


def _sum(rows: Array) -> Array:
    return np.add.reduce(rows, axis=-1, keepdims=True)


def _softmax(desc: SoftmaxBackwardDescriptor, rows: Mapping[str, Array], sign: _Sign) -> Array:
    dy, y = sign.of(rows["dy"]), rows["y"]
    if desc.kind is SoftmaxKind.SOFTMAX:
        y = sign.of(y)
        return y * sign.minus(dy, _sum(y * dy))
    return sign.minus(dy, np.exp(y) * _sum(dy))


def _lerp(desc: BinaryParamBackwardDescriptor, dy: Array, sign: _Sign) -> dict[str, Array]:
    # 1 − w is a constant of the problem, not a term of the data: its magnitude is |1 − w|.
    w = dy.dtype.type(desc.param)
    return {"da": sign.of((1 - w) * dy), "db": sign.of(w * dy)}


def _scan(desc: ScanBackwardDescriptor, rows: Mapping[str, Array], sign: _Sign) -> Array:
    if desc.reverse:
        rows = {name: array[:, ::-1] for name, array in rows.items()}
    dy, x, y = sign.of(rows["dy"]), rows.get("x"), rows.get("y")
    if desc.kind is ScanKind.CUMSUM:
        dx = np.cumsum(dy[:, ::-1], axis=-1)[:, ::-1]
    elif x is None:
        raise KeyError("x")
    elif desc.kind is ScanKind.CUMPROD:
        dx = _cumprod(dy, sign.of(x), None if y is None else sign.of(y))
    elif desc.kind is ScanKind.LOG_CUMSUM_EXP:
        dx = _log_cumsum_exp(dy, x, y)
    else:
        if desc.ties not in desc.spec.ties:
            raise Unsupported(f"{desc.kind}: ties are first or last, got {desc.ties}")
        if desc.kind is ScanKind.CUMMIN:  # the running minimum of x is that of −x, negated
            x, y = -x, None if y is None else -y
        dx = _cummax(dy, x, y, desc.ties)
    return dx[:, ::-1] if desc.reverse else dx


def _recurrence(dy: Array, c: Array) -> Array:
    """S[k] = dy[k] + c[k]·S[k+1] from the far end, where S[n−1] = dy[n−1]; c has n − 1 columns."""
    s = dy.T.copy()
    c = np.ascontiguousarray(c.T)
    for k in range(len(c) - 1, -1, -1):
        s[k] += c[k] * s[k + 1]
    return s.T


def _cumprod(dy: Array, x: Array, y: Array | None) -> Array:
    if y is None:
        y = np.multiply.accumulate(x, axis=-1)
    before = np.concatenate([np.ones_like(y[:, :1]), y[:, :-1]], axis=-1)
    return before * _recurrence(dy, x[:, 1:])


def _log_cumsum_exp(dy: Array, x: Array, y: Array | None) -> Array:
    if y is None:
        # The running sum of exp(x − top), top the running maximum. Unlike logaddexp step by step
        # it rounds y once: at |y| ≈ 1000 the steps would lose more than a good f64 kernel does.
        top = np.maximum.accumulate(x, axis=-1)
        fade = _ratio(top[:, :-1], top[:, 1:])
        y = top + np.log(_recurrence(_ratio(x, top)[:, ::-1], fade[:, ::-1])[:, ::-1])
    c = _ratio(y[:, :-1], y[:, 1:])
    return np.where(x == -np.inf, 0, np.exp(x - y) * _recurrence(dy, c))


def _ratio(a: Array, b: Array) -> Array:
    """exp(a − b), and 1 where they are equal: two infinities have no difference."""
    return np.where(a == b, 1, np.exp(a - b))


def _cummax(dy: Array, x: Array, y: Array | None, ties: TieRule) -> Array:
    if y is None:
        y = np.maximum.accumulate(x, axis=-1)  # a NaN stays
    here, best = x[:, 1:], y[:, :-1]
    if ties is TieRule.FIRST:
        wins = (here > best) | (np.isnan(here) & ~np.isnan(best))
    else:
        wins = (here >= best) | np.isnan(here)
    # Each dy goes to the winner in office at its place: S[k] of a winner is the sum over its
    # segment, and no term of another segment takes part.
    outer, n = x.shape
    winner = np.zeros((outer, n), np.intp)  # the first element always starts as winner
    winner[:, 1:] = np.where(wins, np.arange(1, n), 0)
    winner = np.maximum.accumulate(winner, axis=-1)
    dx = np.zeros_like(dy)
    np.add.at(dx, (np.arange(outer)[:, None], winner), dy)
    return dx


def _reduce(desc: ReduceBackwardDescriptor, rows: Mapping[str, Array], sign: _Sign) -> Array:
    kind, dy = desc.kind, sign.of(rows["dy"])
    n = prod(desc.input_shape[d] for d in desc.reduce_axis)
    if kind is ReduceKind.SUM:
        return np.repeat(dy, n, axis=-1)
    if kind is ReduceKind.MEAN:
        return np.repeat(dy / n, n, axis=-1)
    x = rows["x"]
    if kind is ReduceKind.PROD:
        return dy * _product_of_others(sign.of(x))
    if kind in (ReduceKind.VAR, ReduceKind.STD):
        term = sign.of(x)
        deviation = sign.minus(term, _sum(term) / n)
        m = np.full_like(dy, n) - desc.correction
        m = np.where(m <= 0, 1, m)
        if kind is ReduceKind.VAR:
            return dy * 2 * deviation / m
        y = rows["y"]
        return np.where(y == 0, 0, dy * deviation / (m * sign.of(y)))
    y = rows["y"]
    if kind is ReduceKind.NORM2:
        return np.where(y == 0, 0, dy * sign.of(x) / sign.of(y))
    if kind is ReduceKind.LOG_SUM_EXP:
        return np.where(y == -np.inf, 0, dy * np.exp(x - y))
    return _extremum(dy, x, y, desc.ties)  # max and min: y says which


def _product_of_others(x: Array) -> Array:
    """Π of all but one's own: the product before times the product after, never a quotient."""
    one = np.ones_like(x[:, :1])
    before = np.multiply.accumulate(np.concatenate([one, x[:, :-1]], axis=-1), axis=-1)
    after = np.multiply.accumulate(np.concatenate([one, x[:, :0:-1]], axis=-1), axis=-1)
    return before * after[:, ::-1]


def _extremum(dy: Array, x: Array, y: Array, ties: TieRule) -> Array:
    chosen = (x == y) | (np.isnan(x) & np.isnan(y))
    if ties is TieRule.SPLIT:
        dy = dy / _sum(chosen)
    elif ties is TieRule.FIRST:
        chosen &= np.cumsum(chosen, axis=-1) == 1
    elif ties is TieRule.LAST:
        chosen &= np.cumsum(chosen[:, ::-1], axis=-1)[:, ::-1] == 1
    return np.where(chosen, dy, 0)


def _embedding(desc: EmbeddingBackwardDescriptor, given: Mapping[str, Array], sign: _Sign) -> Array:
    dout, indices = sign.of(given["dout"]), given["indices"]
    kept = (indices >= 0) & (indices < desc.num_embeddings)
    if desc.padding_idx is not None:
        kept &= indices != desc.padding_idx
    total = np.zeros((desc.num_embeddings, desc.embedding_dim), dout.dtype)
    np.add.at(total, indices[kept], dout[kept])
    count = np.bincount(indices[kept], minlength=desc.num_embeddings)[:, None]
    if desc.scale_grad_by_freq:
        total = total / np.maximum(count, 1)
    if desc.accumulate:
        old = sign.of(given["dweight"])
        total = np.where(count > 0, old + total, old)  # −0 + 0 would lose a bit of `old`
    return total


def check_error(
    desc: Descriptor,
    got: Mapping[str, Array],
    exact: Mapping[str, Array],
    magnitude: Mapping[str, Array],
) -> float:
    """The least `relative_error` with which `got` meets the contract: the worst over all slices.

    A slice runs along the axes of the problem; it is a row of `dweight` for the embedding and the
    whole array for lerp. `exact` and `magnitude` come from `gradient`. Infinite where `got` and
    `exact`, both stored as the element, are not finite in the same places in the same way.
    """
    if not got:
        raise ValueError("there is no output to check")
    if isinstance(desc, EmbeddingBackwardDescriptor):
        axes: tuple[int, ...] = (1,)
    elif isinstance(desc, BinaryParamBackwardDescriptor):
        axes = tuple(range(len(desc.shape)))
    else:
        axes = desc.shape_and_axes[1]
    worst = 0.0
    for name, array in got.items():
        if not array.shape == exact[name].shape == magnitude[name].shape:
            raise ValueError(f"{name}: expected shape {exact[name].shape}, got {array.shape}")
        slices = (_rows(a, axes) for a in (array, exact[name], magnitude[name]))
        with np.errstate(all="ignore"):
            worst = max(worst, _worst_slice(*slices, element=desc.element))
    return worst


def _worst_slice(got: Array, exact: Array, magnitude: Array, *, element: ElementKind) -> float:
    if got.size == 0:
        return 0.0
    stored, due = got.astype(_STORED[element]), exact.astype(_STORED[element])
    finite = np.isfinite(due)
    same = (stored == due) | (np.isnan(stored) & np.isnan(due))
    if not np.all(np.where(finite, np.isfinite(stored), same)):
        return float("inf")
    error = np.where(finite, np.abs(got.astype(exact.dtype) - exact), 0)
    # A that overflows where the result does not would excuse any error; the result itself is
    # never larger than A.
    bound = np.where(np.isfinite(magnitude), np.abs(magnitude), np.abs(exact))
    bound = np.where(finite, bound, 0)
    # Squares of very large or very small numbers are kept in range by the largest of the slice.
    scale = np.maximum(error.max(axis=-1), bound.max(axis=-1))
    scale = np.where(scale == 0, 1, scale)
    error_norm = np.sqrt(np.sum(np.square(error / scale[:, None]), axis=-1))
    bound_norm = np.sqrt(np.sum(np.square(bound / scale[:, None]), axis=-1))
    slack = np.sqrt(exact.dtype.type(got.shape[1])) * element.smallest_subnormal / scale
    excess = np.maximum(error_norm - slack, 0)
    return float(np.max(np.where(excess == 0, 0, excess / bound_norm)))
