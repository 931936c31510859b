"""Descriptors: the frozen question a plan answers.

Equal problems compare equal: negative axes, lists and names are normalised, and fields that a
kind does not use fall back to their defaults. What is wrong in itself (a bad axis) raises
`InvalidProblem` here; what is merely not supported (rank 9) raises `Unsupported` in `select`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isnan, nan, prod
from typing import Any, ClassVar

from .errors import InvalidProblem
from .kinds import (
    BinaryKind,
    ElementKind,
    EmbeddingKind,
    IndexKind,
    Named,
    OpCategory,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
    TieRule,
)
from .registry import KindSpec, Need, spec_of

__all__ = [
    "BinaryParamBackwardDescriptor",
    "EmbeddingBackwardDescriptor",
    "Operand",
    "ReduceBackwardDescriptor",
    "ScanBackwardDescriptor",
    "SoftmaxBackwardDescriptor",
    "axes_of",
    "extents_of",
    "flag_of",
    "number_of",
]


@dataclass(frozen=True, slots=True)
class Operand:
    """One array of a problem, as its descriptor expects it."""

    name: str
    shape: tuple[int, ...]
    dtype: ElementKind | IndexKind
    output: bool = False
    required: bool = True

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.size * self.dtype.size_bytes


def _int(owner: str, field: str, value: Any, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidProblem(f"{owner}: {field} must be an integer, got {value!r}") from None
    if least is not None and number < least:
        raise InvalidProblem(f"{owner}: {field} must be at least {least}, got {number}")
    return number


def number_of(label: str, value: Any) -> float:
    """A number in double; every NaN is one object, so that look-ups find it again."""
    if type(value) is float:
        return value if value == value else nan
    try:
        tracked = bool(getattr(value, "requires_grad", False))
        # What is no scalar, and text, `float` would read too, some of it.
        plain = not isinstance(value, (str, bytes, bytearray)) and not getattr(value, "ndim", 0)
        number = float(value) if plain and not tracked else None
    except OverflowError:
        raise InvalidProblem(f"{label} must be a number that fits a double") from None
    except Exception as error:  # what its own class raises: tensors without data are such
        raise InvalidProblem(f"{label} must be a number, got {value!r}") from error
    if tracked:
        raise InvalidProblem(
            f"{label} requires grad, and its graph would be lost: pass it as a float, or use a "
            "function of gradplan.torch"
        )
    if number is None:
        raise InvalidProblem(f"{label} must be a number, got {value!r}")
    return number if number == number else nan


def flag_of(owner: str, field: str, value: Any) -> bool:
    """Whether something is true; an array of several is neither."""
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except Exception as error:
        raise InvalidProblem(f"{owner}: {field} must be True or False, got {value!r}") from error


def extents_of(label: str, value: Any) -> tuple[Any, ...]:
    """The extents of a shape in their order, yet to be looked at."""
    if type(value) is tuple or type(value) is list:
        return tuple(value)
    try:
        # A set and a dict have no order that anybody chose.
        if not isinstance(value, (str, bytes, bytearray, Set, Mapping)):
            return tuple(value)
    except TypeError:  # an array of rank 0 among them
        pass
    raise InvalidProblem(f"{label} must be a sequence of extents, got {value!r}")


def _shape(owner: str, field: str, value: Any) -> tuple[int, ...]:
    extents = extents_of(f"{owner}: {field}", value)
    shape = tuple(_int(owner, f"an extent of {field}", extent, 0) for extent in extents)
    if not shape:
        raise InvalidProblem(f"{owner}: {field} has rank 0; plans take rank 1 to 8")
    return shape


def _axis(owner: str, field: str, value: Any, rank: int) -> int:
    axis = _int(owner, field, value)
    if not -rank <= axis < rank:
        raise InvalidProblem(f"{owner}: {field} {axis} is out of range for rank {rank}")
    return axis % rank


def axes_of(label: str, value: Any) -> Iterable[Any]:
    """The axes of an int, of a sequence of ints or of an array of rank 1, yet to be looked at."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    rank = getattr(value, "ndim", None)
    if rank == 1:
        return tuple(value)
    if rank == 0 or not isinstance(value, Iterable):
        return (value,)
    raise InvalidProblem(f"{label} must be an integer or a sequence of integers, got {value!r}")


class _Descriptor:
    """What plans read of every descriptor."""

    category: ClassVar[OpCategory]
    element: ElementKind

    @property
    def op(self) -> Named:
        """The kind, under one name for every family."""
        return self.kind  # type: ignore[attr-defined, no-any-return]

    @cached_property
    def spec(self) -> KindSpec:
        return spec_of(self.category, self.op)

    @property
    def shape_and_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The full shape, and the axes along which elements depend on each other."""
        raise NotImplementedError

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The arrays of the problem: inputs first, then outputs."""
        raise NotImplementedError

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _ties(me: str, spec: KindSpec, given: Any, unused: TieRule) -> TieRule:
    """The rule given, which a kind without ties does not look at."""
    return TieRule.coerce(given, me, "ties") if spec.ties else unused


def _saved(spec: KindSpec, name: str, shape: tuple[int, ...], el: ElementKind) -> list[Operand]:
    need = spec.x if name == "x" else spec.y
    if need is Need.NO:
        return []
    return [Operand(name, shape, el, required=need is Need.REQUIRED)]


@dataclass(frozen=True, kw_only=True)
class SoftmaxBackwardDescriptor(_Descriptor):
    """The gradient of softmax or log-softmax along one axis.

    - softmax: dx = y · (dy − Σ y·dy)
    - log-softmax: dx = dy − exp(y) · Σ dy
    """

    category: ClassVar[OpCategory] = OpCategory.SOFTMAX
    kind: SoftmaxKind
    input_shape: tuple[int, ...]
    softmax_axis: int
    element: ElementKind

    def __post_init__(self) -> None:
        me = type(self).__name__
        shape = _shape(me, "input_shape", self.input_shape)
        self._set(
            kind=SoftmaxKind.coerce(self.kind, me, "kind"),
            input_shape=shape,
            softmax_axis=_axis(me, "softmax_axis", self.softmax_axis, len(shape)),
            element=ElementKind.coerce(self.element, me, "element"),
        )

    @property
    def shape_and_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.input_shape, (self.softmax_axis,)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        shape, el = self.input_shape, self.element
        return (
            Operand("dy", shape, el),
            *_saved(self.spec, "y", shape, el),
            Operand("dx", shape, el, output=True),
        )


@dataclass(frozen=True, kw_only=True)
class BinaryParamBackwardDescriptor(_Descriptor):
    """The gradient of lerp(a, b, w) = a + w·(b − a): da = (1 − w)·dy, db = w·dy.

    `param` is the weight w, kept in double.
    """

    category: ClassVar[OpCategory] = OpCategory.BINARY_ELEMENTWISE
    kind: BinaryKind
    shape: tuple[int, ...]
    element: ElementKind
    param: float

    def __post_init__(self) -> None:
        me = type(self).__name__
        param = number_of(f"{me}: param", self.param)
        self._set(
            kind=BinaryKind.coerce(self.kind, me, "kind"),
            shape=_shape(me, "shape", self.shape),
            element=ElementKind.coerce(self.element, me, "element"),
            param=param + 0.0,  # −0 and 0 compare equal, so they are one problem
        )

    # A weight of NaN, which is no number's equal, is one problem too.
    def _key(self) -> tuple[Any, ...]:
        return self.kind, self.shape, self.element, None if isnan(self.param) else self.param

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BinaryParamBackwardDescriptor):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def shape_and_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, ()

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand("dy", self.shape, self.element),
            Operand("da", self.shape, self.element, output=True, required=False),
            Operand("db", self.shape, self.element, output=True, required=False),
        )


@dataclass(frozen=True, kw_only=True)
class ScanBackwardDescriptor(_Descriptor):
    """The gradient of a scan along one axis: S[k] = dy[k] + c[k]·S[k+1] from the far end.

    - cumsum: c = 1, dx[k] = S[k]
    - cumprod: c[k] = x[k+1], dx[k] = y[k−1]·S[k], y[−1] = 1
    - log-cumsum-exp: c[k] = exp(y[k] − y[k+1]), dx[k] = exp(x[k] − y[k])·S[k]
    - cummax, cummin: c[k] = 0 where k+1 starts a new winner, else 1; dx[k] = S[k] where k is a
      winner, else 0; `ties` (FIRST or LAST) says whether a later equal value wins

    `reverse=True` mirrors the axis.
    """

    category: ClassVar[OpCategory] = OpCategory.SCAN
    kind: ScanKind
    input_shape: tuple[int, ...]
    scan_axis: int
    element: ElementKind
    reverse: bool = False
    ties: TieRule = TieRule.FIRST

    def __post_init__(self) -> None:
        me = type(self).__name__
        kind = ScanKind.coerce(self.kind, me, "kind")
        shape = _shape(me, "input_shape", self.input_shape)
        self._set(
            kind=kind,
            input_shape=shape,
            scan_axis=_axis(me, "scan_axis", self.scan_axis, len(shape)),
            element=ElementKind.coerce(self.element, me, "element"),
            reverse=flag_of(me, "reverse", self.reverse),
            ties=_ties(me, spec_of(self.category, kind), self.ties, TieRule.FIRST),
        )

    @property
    def shape_and_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.input_shape, (self.scan_axis,)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        shape, el = self.input_shape, self.element
        return (
            Operand("dy", shape, el),
            *_saved(self.spec, "x", shape, el),
            *_saved(self.spec, "y", shape, el),
            Operand("dx", shape, el, output=True),
        )


@dataclass(frozen=True, kw_only=True)
class ReduceBackwardDescriptor(_Descriptor):
    """The gradient of a reduction over one or several axes; n is the reduced extent.

    - sum: dx = dy; mean: dx = dy / n
    - max, min: dx = dy where x == y, else 0, shared among ties by `ties`
    - prod: dx = dy · Π of the others
    - norm2: dx = dy · x / y, and 0 where y == 0
    - log-sum-exp: dx = dy · exp(x − y), and 0 where y == −inf
    - var: dx = dy · 2 (x − mean) / m, with m = n − correction, or 1 where that is ≤ 0
    - std: dx = dy · (x − mean) / (m · y), and 0 where y == 0

    `dy` and `y` come in keepdim form (`dy_shape`).
    """

    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    kind: ReduceKind
    input_shape: tuple[int, ...]
    reduce_axis: tuple[int, ...]
    element: ElementKind
    correction: float = 1
    ties: TieRule = TieRule.SPLIT

    def __post_init__(self) -> None:
        me = type(self).__name__
        kind = ReduceKind.coerce(self.kind, me, "kind")
        spec = spec_of(self.category, kind)
        shape = _shape(me, "input_shape", self.input_shape)
        given: Any = self.reduce_axis
        named = range(len(shape)) if given is None else axes_of(f"{me}: reduce_axis", given)
        axes = sorted(_axis(me, "reduce_axis", axis, len(shape)) for axis in named)
        if len(set(axes)) < len(axes):
            raise InvalidProblem(f"{me}: reduce_axis {self.reduce_axis!r} names an axis twice")
        correction = 1.0
        if spec.correction:
            correction = number_of(f"{me}: correction", self.correction)
            if not isfinite(correction):
                raise InvalidProblem(f"{me}: correction must be finite, got {correction}")
        self._set(
            kind=kind,
            input_shape=shape,
            reduce_axis=tuple(axes),
            element=ElementKind.coerce(self.element, me, "element"),
            correction=correction,
            ties=_ties(me, spec, self.ties, TieRule.SPLIT),
        )

    @property
    def dy_shape(self) -> tuple[int, ...]:
        """The shape of `dy` and `y`: the input's, with 1 in place of each reduced extent."""
        axes = set(self.reduce_axis)
        return tuple(1 if d in axes else n for d, n in enumerate(self.input_shape))

    @property
    def shape_and_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.input_shape, self.reduce_axis

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        small, shape, el = self.dy_shape, self.input_shape, self.element
        return (
            Operand("dy", small, el),
            *_saved(self.spec, "x", shape, el),
            *_saved(self.spec, "y", small, el),
            Operand("dx", shape, el, output=True),
        )


@dataclass(frozen=True, kw_only=True)
class EmbeddingBackwardDescriptor(_Descriptor):
    """The gradient of a table look-up: dweight[indices[n]] += dout[n].

    Rows whose index is `padding_idx`, negative or ≥ `num_embeddings` are skipped.
    `accumulate=True` adds to what `dweight` holds; `False` overwrites all of it.
    `scale_grad_by_freq` divides the new sum of a row by its count of unskipped indices.
    """

    category: ClassVar[OpCategory] = OpCategory.EMBEDDING
    num_embeddings: int
    embedding_dim: int
    num_indices: int
    element: ElementKind
    index: IndexKind = IndexKind.I64
    padding_idx: int | None = None
    accumulate: bool = True
    scale_grad_by_freq: bool = False

    def __post_init__(self) -> None:
        me = type(self).__name__
        rows = _int(me, "num_embeddings", self.num_embeddings, 0)
        padding = self.padding_idx
        if padding is not None:
            padding = _int(me, "padding_idx", padding)
            if not 0 <= padding < rows:
                raise InvalidProblem(
                    f"{me}: padding_idx {padding} is outside the table of {rows} rows"
                )
        self._set(
            num_embeddings=rows,
            embedding_dim=_int(me, "embedding_dim", self.embedding_dim, 0),
            num_indices=_int(me, "num_indices", self.num_indices, 0),
            element=ElementKind.coerce(self.element, me, "element"),
            index=IndexKind.coerce(self.index, me, "index"),
            padding_idx=padding,
            accumulate=flag_of(me, "accumulate", self.accumulate),
            scale_grad_by_freq=flag_of(me, "scale_grad_by_freq", self.scale_grad_by_freq),
        )

    @property
    def op(self) -> Named:
        return EmbeddingKind.EMBEDDING

    @property
    def shape_and_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.num_indices, self.embedding_dim), (0,)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        n, dim = self.num_indices, self.embedding_dim
        return (
            Operand("dout", (n, dim), self.element),
            Operand("indices", (n,), self.index),
            Operand("dweight", (self.num_embeddings, dim), self.element, output=True),
        )
