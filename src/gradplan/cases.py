"""Conformance cases: problems with their data and layouts, generated from the registry.

`gradplan verify` and the tests draw on the same grid, kind × element × layout × shape × options ×
data. A case builds its arrays inside larger buffers of poison (NaN with a payload of its own), so
that a read beside an input, a write beside an output and an element nobody wrote all show. What
comes out is held to `reference.check_error` on the same stored inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod, sqrt
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import args as arguments
from . import functions, plans
from .backends import reference
from .backends.reference import Descriptor
from .descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    Operand,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from .geometry import told_strides
from .kinds import (
    ElementKind,
    IndexKind,
    Named,
    OpCategory,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
)
from .registry import ELEMENTS, KINDS, KindSpec, Need
from .views import Layout as Lies
from .views import View

__all__ = [
    "QUICK_LAYOUTS",
    "SHAPES",
    "Case",
    "Data",
    "Layout",
    "Outcome",
    "Placement",
    "Problem",
    "data_of",
    "describe",
    "grid",
    "layouts_of",
    "options_of",
    "run_function",
    "run_plan",
    "strides_of",
]

Array = NDArray[Any]
Axes = tuple[int, ...]

_DTYPES: dict[ElementKind | IndexKind, np.dtype[Any]] = {
    ElementKind.F32: np.dtype(np.float32),
    ElementKind.F16: np.dtype(np.float16),
    ElementKind.BF16: np.dtype(ml_dtypes.bfloat16),
    ElementKind.F64: np.dtype(np.float64),
    IndexKind.I32: np.dtype(np.int32),
    IndexKind.I64: np.dtype(np.int64),
}
# Quiet NaNs that no arithmetic produces by itself; a stray index would count for row 0.
_POISON: dict[ElementKind | IndexKind, int] = {
    ElementKind.F32: 0x7FC5A5A5,
    ElementKind.F16: 0x7E5A,
    ElementKind.BF16: 0x7FDA,
    ElementKind.F64: 0x7FF85A5A5A5A5A5A,
    IndexKind.I32: 0,
    IndexKind.I64: 0,
}
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_GUARD = 96
_ALIGNMENT = 64
_PRODUCTS: tuple[Named, ...] = (ReduceKind.PROD, ScanKind.CUMPROD)


class Layout(StrEnum):
    """How the arrays of a case lie in memory."""

    CONTIGUOUS = "contiguous"
    TRANSPOSED = "transposed"
    SLICED = "sliced"
    OFFSET = "offset"
    NEGATIVE = "negative"
    BROADCAST = "broadcast"
    MIXED = "mixed"
    IN_PLACE = "in_place"
    SHIFTED = "shifted"


class Data(StrEnum):
    """What the arrays of a case hold."""

    RANDOM = "random"
    TIES = "ties"
    ZEROS = "zeros"
    INFINITE = "infinite"
    NAN_IN_X = "nan_in_x"
    NAN_IN_DY = "nan_in_dy"


@dataclass(frozen=True)
class Placement:
    """How one array lies in memory.

    `order` lists its axes from the outermost to the innermost. `steps` has one entry per axis:
    ±k takes every k-th element forwards or backwards, 0 repeats one (inputs only). `offset` is
    the distance of the whole from an aligned address, in elements, and `gap` that of the places of
    the innermost axis but one beyond what they need.
    """

    order: Axes
    steps: tuple[int, ...]
    offset: int = 0
    gap: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem with its data and its layout; `without` names optional arrays left out."""

    desc: Descriptor
    layout: Layout = Layout.CONTIGUOUS
    data: Data = Data.RANDOM
    without: tuple[str, ...] = ()
    seed: int = 0
    placements: tuple[tuple[str, Placement], ...] = ()
    """Placements that take the place of the layout's own, by operand."""

    def __str__(self) -> str:
        absent = f" without {', '.join(self.without)}" if self.without else ""
        return f"{self.desc} {self.layout} {self.data}{absent} seed={self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The measured relative error of a case, what its plan promised, and what else went wrong."""

    case: Case
    error: float
    guarantee: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault and self.error <= self.guarantee

    def __str__(self) -> str:
        fault = f" ({self.fault})" if self.fault else ""
        return f"{self.case}: error {self.error:.4g}, guarantee {self.guarantee:.4g}{fault}"


# Shapes and axes of the grid: one row; rows; columns; an axis in the middle. 130 = 128 + 2 leaves
# a tail behind every vector width and tile of scan steps.
SHAPES: tuple[tuple[tuple[int, ...], Axes], ...] = (
    ((37,), (0,)),
    ((6, 130), (1,)),
    ((130, 6), (0,)),
    ((3, 5, 9), (1,)),
)
# Only reductions take several axes: around another, neighbouring, and all.
_MANY_AXES: tuple[tuple[tuple[int, ...], Axes], ...] = (
    ((3, 5, 9), (0, 2)),
    ((3, 5, 9), (1, 2)),
    ((4, 6, 5), (0, 1, 2)),
)


# Layouts that all run the kernels of contiguous arrays.
QUICK_LAYOUTS = (Layout.CONTIGUOUS, Layout.OFFSET)


def layouts_of(spec: KindSpec) -> tuple[Layout, ...]:
    """The layouts that a kind can have: `dout` and `dweight` are never the same array."""
    return tuple(
        layout
        for layout in Layout
        if layout is not Layout.IN_PLACE or spec.category is not OpCategory.EMBEDDING
    )


def data_of(spec: KindSpec) -> tuple[Data, ...]:
    """The data that mean something for a kind."""
    skipped = set()
    if not spec.ties and spec.category is not OpCategory.EMBEDDING:
        skipped.add(Data.TIES)
    if spec.x is Need.NO and spec.y is Need.NO:
        skipped.add(Data.NAN_IN_X)
    return tuple(data for data in Data if data not in skipped)


def describe(
    spec: KindSpec, element: ElementKind, shape: tuple[int, ...], axes: Axes, **options: Any
) -> Descriptor:
    """The descriptor of a kind for a shape and axes; an embedding reads (indices, dim, rows)."""
    if spec.category is OpCategory.SOFTMAX:
        return SoftmaxBackwardDescriptor(
            kind=spec.kind,  # type: ignore[arg-type]
            input_shape=shape,
            softmax_axis=axes[0],
            element=element,
        )
    if spec.category is OpCategory.BINARY_ELEMENTWISE:
        return BinaryParamBackwardDescriptor(
            kind=spec.kind,  # type: ignore[arg-type]
            shape=shape,
            element=element,
            **{"param": 0.3, **options},
        )
    if spec.category is OpCategory.SCAN:
        return ScanBackwardDescriptor(
            kind=spec.kind,  # type: ignore[arg-type]
            input_shape=shape,
            scan_axis=axes[0],
            element=element,
            **options,
        )
    if spec.category is OpCategory.REDUCTION:
        return ReduceBackwardDescriptor(
            kind=spec.kind,  # type: ignore[arg-type]
            input_shape=shape,
            reduce_axis=axes,
            element=element,
            **options,
        )
    count, dim, rows = shape
    return EmbeddingBackwardDescriptor(
        num_embeddings=rows, embedding_dim=dim, num_indices=count, element=element, **options
    )


Options = tuple[dict[str, Any], tuple[str, ...]]


def options_of(spec: KindSpec, element: ElementKind, *, complete: bool = True) -> list[Options]:
    """(fields of the descriptor, arrays left out), the ways in which a kind can be asked.

    Each tie rule, and each optional array left out, is a kernel of its own. `complete=False` asks
    f32 for all of them and the other elements for a share that differs from kind to kind, so that
    a test run need not compile every kernel.
    """
    if spec.category is OpCategory.BINARY_ELEMENTWISE:
        asked: list[Options] = [({"param": 0.3}, ()), ({"param": 0.0}, ()), ({"param": -1.5}, ())]
        if complete or element is ElementKind.F32:
            asked += [({"param": 0.7}, ("da",)), ({"param": 0.7}, ("db",))]
        return asked
    if spec.category is OpCategory.EMBEDDING:
        indices = list(IndexKind)
        if not complete and element is not ElementKind.F32:
            indices = [indices[ELEMENTS.index(element) % 2]]
        flags = list(itertools.product((True, False), (False, True), (None, 2)))
        return [
            (
                {
                    "index": index,
                    "accumulate": accumulate,
                    "scale_grad_by_freq": scaled,
                    "padding_idx": padding,
                },
                (),
            )
            for index in indices
            for accumulate, scaled, padding in flags
        ]
    lefts: list[tuple[str, ...]] = [(), ("y",)] if spec.y is Need.OPTIONAL else [()]
    kernels = [({"ties": rule}, left) for rule in spec.ties for left in lefts]
    if not spec.ties:
        kernels = [({}, left) for left in lefts]
    elif not complete and element is not ElementKind.F32:
        turn = (list(KINDS).index((spec.category, spec.kind)) + ELEMENTS.index(element)) % 4
        if spec.category is OpCategory.SCAN:  # (rule, y given) and (other rule, y absent)
            kernels = [kernels[0], kernels[3]] if turn % 2 else [kernels[1], kernels[2]]
        else:
            kernels = [kernels[turn]]
    more: list[dict[str, Any]] = [{}]
    if spec.category is OpCategory.SCAN:
        more = [{"reverse": False}, {"reverse": True}]
    elif spec.correction:  # 1000 is above every extent of the grid: m is 1
        more = [{"correction": 1}, {"correction": 0}, {"correction": 0.5}, {"correction": 1000}]
    return [({**fields, **extra}, left) for fields, left in kernels for extra in more]


def shapes_of(spec: KindSpec, layout: Layout) -> tuple[tuple[tuple[int, ...], Axes], ...]:
    """The shapes and axes of the grid."""
    if spec.category is OpCategory.EMBEDDING:
        # (indices, dim, rows): rows long enough for two slices of 128; more rows than indices.
        return (((70, 130, 9), ()), ((9, 3, 40), ()))
    if spec.category is not OpCategory.REDUCTION:
        return SHAPES
    if layout is Layout.IN_PLACE:  # dx has the shape of dy where the reduced extents are 1
        return (((37, 1), (1,)), ((1, 130), (0,)), ((5, 7), ()))
    return SHAPES + _MANY_AXES


def grid(
    spec: KindSpec,
    element: ElementKind,
    layout: Layout,
    *,
    complete: bool = True,
    quick: bool = False,
    turns: bool = False,
    own: tuple[tuple[tuple[int, ...], Axes], ...] = (),
) -> Iterator[Case]:
    """The cases of one kind, element and layout.

    Contiguous arrays meet all data; the other layouts meet random data and one edge per shape, a
    different one each, for the arithmetic does not depend on the layout. `quick` stays with what
    one kernel can run. `turns` is for a GPU, which compiles a kernel for nearly every combination:
    contiguous arrays meet each shape and each option once, any other layout one of each, which
    change from kind to kind and from element to element. `own` shapes and axes take the place of
    the grid's.
    """
    edges = data_of(spec)[1:]
    place = list(Layout).index(layout)
    counter = itertools.count(place)
    shapes, asked = shapes_of(spec, layout), options_of(spec, element, complete=complete)
    if own:
        shapes = tuple(pair for pair in own if _lies_so(spec, layout, *pair))
    elif quick:
        shapes = shapes[:1] if spec.category is OpCategory.EMBEDDING else shapes[1:2]
    if quick:
        asked = [options for options in asked if _kernel(options) == _kernel(asked[0])]
    pairs = list(itertools.product(shapes, asked))
    if turns and pairs:
        count = max(len(shapes), len(asked)) if layout is Layout.CONTIGUOUS else 1
        first = 4 * list(KINDS).index((spec.category, spec.kind)) + ELEMENTS.index(element) + place
        pairs = [
            (shapes[k % len(shapes)], asked[(k + first // len(shapes)) % len(asked)])
            for k in range(first, first + count)
        ]
    for (shape, axes), (fields, without) in pairs:
        if fields.get("padding_idx") is not None:  # the last row of a table that has fewer
            fields = {**fields, "padding_idx": min(fields["padding_idx"], shape[2] - 1)}
        desc = describe(spec, element, shape, axes, **fields)
        turn = next(counter)
        some = edges if layout is Layout.CONTIGUOUS else (edges[turn % len(edges)],)
        for data in (Data.RANDOM, *some):
            yield Case(desc=desc, layout=layout, data=data, without=without, seed=turn)


def _lies_so(spec: KindSpec, layout: Layout, shape: tuple[int, ...], axes: Axes) -> bool:
    """Whether arrays of a shape can lie in a layout: dx in the place of dy only where it has the
    shape of dy."""
    reduced = layout is Layout.IN_PLACE and spec.category is OpCategory.REDUCTION
    return not reduced or all(shape[axis] == 1 for axis in axes)


def _kernel(options: Options) -> tuple[Any, ...]:
    """What of the options decides the kernel."""
    fields, without = options
    return fields.get("ties"), fields.get("index"), without


def _placement(case: Case, operand: Operand) -> Placement:
    for name, chosen in case.placements:
        if name == operand.name:
            return chosen
    rank = len(operand.shape)
    order, ones = tuple(range(rank)), (1,) * rank
    straight = Placement(order, ones)
    sliced = Placement(order, (3, *ones[1:-1], 2) if rank > 1 else (2,))
    last_back = Placement(order, (*ones[1:], -1))
    first_back = Placement(order, (-1, *ones[1:]))
    all_back = Placement(order, (-1,) * rank)
    place = ("dy", "dout", "x", "indices", "y", "dx", "dweight", "da", "db").index(operand.name)
    layout = case.layout
    if layout is Layout.TRANSPOSED:
        return Placement(order[::-1], ones)
    if layout is Layout.SLICED:
        return sliced
    if layout is Layout.OFFSET:
        return Placement(order, ones, 2 * place + 1)
    if layout is Layout.SHIFTED:  # [..., 1:] of all arrays
        return Placement(order, ones, 1, 1)
    if layout is Layout.NEGATIVE:
        return {"x": last_back, "y": first_back}.get(operand.name, all_back)
    if layout is Layout.MIXED:
        turned = Placement(order[::-1], ones, 3)
        return (turned, sliced, all_back, last_back, straight)[place % 5]
    if layout is Layout.BROADCAST and not operand.output and operand.name != "indices":
        shape, axes = case.desc.shape_and_axes
        across = [axis for axis in range(rank) if axis not in axes]
        repeated = set(across[:1])
        if operand.name in ("dy", "dout") and operand.shape == shape and axes:
            repeated = set(axes)
        return Placement(order, tuple(0 if axis in repeated else 1 for axis in order))
    return straight


def _strides(shape: tuple[int, ...], placement: Placement) -> tuple[list[int], int]:
    """(strides, elements from the first to behind the last)."""
    strides, span = [0] * len(shape), 1
    for axis in reversed(placement.order):
        step = placement.steps[axis]
        strides[axis] = step and span * (1 if step > 0 else -1) * abs(step)
        more = placement.gap if axis == placement.order[-1] else 0
        span *= max(1, shape[axis] * abs(step) + more)
    return strides, span


def strides_of(case: Case) -> dict[str, tuple[int, ...]]:
    """The strides of a case's arrays as views tell them, without making any.

    Not of a broadcast one, whose saved `y` may not repeat where its `x` does.
    """
    made = {}
    for operand in case.desc.operands:
        if operand.name not in case.without:
            steps, _ = _strides(operand.shape, _placement(case, operand))
            made[operand.name] = told_strides(operand.shape, steps)
    return made


def _allocate(operand: Operand, placement: Placement) -> tuple[Array, Array, Array]:
    """(buffer, array within it, which elements of the buffer are not the array's)."""
    dtype, shape = _DTYPES[operand.dtype], operand.shape
    strides, span = _strides(shape, placement)
    lines = _ALIGNMENT // dtype.itemsize
    buffer = np.empty(lines + _GUARD + placement.offset + span + _GUARD, dtype)
    buffer.view(_BITS[dtype.itemsize])[:] = _POISON[operand.dtype]
    start = -buffer.ctypes.data % _ALIGNMENT // dtype.itemsize + _GUARD + placement.offset
    for extent, stride in zip(shape, strides, strict=True):
        if stride < 0 and extent:
            start -= (extent - 1) * stride
    around = np.ones(len(buffer), np.bool_)

    def strided(base: Array) -> Array:
        steps = [stride * base.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(base[start:], shape, steps)

    strided(around)[...] = False
    return buffer, strided(buffer), around


def _repeat(values: Array, placement: Placement) -> Array:
    """The values with those at 0 repeated along every axis whose step is 0."""
    for axis, step in enumerate(placement.steps):
        if step == 0 and values.shape[axis]:
            values = np.broadcast_to(values.take([0], axis), values.shape)
    return values


class Problem:
    """The arrays of a case, made once: run it, then ask for the `outcome`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.desc = desc = case.desc
        self.arrays: dict[str, Array] = {}
        self._memory: dict[str, tuple[Array, Array, Array]] = {}
        self._work = np.longdouble if desc.element is ElementKind.F64 else np.float64
        rng = np.random.default_rng([case.seed, list(Data).index(case.data)])
        given = [operand for operand in desc.operands if operand.name not in case.without]
        placements = {operand.name: _placement(case, operand) for operand in given}
        with np.errstate(all="ignore"):
            values = _values(case, placements, rng, self._work)
        for operand in given:
            self._add(operand, placements[operand.name], values.get(operand.name))
        self._inputs = {
            operand.name: self._lift(self.arrays[operand.name])
            for operand in given
            if not operand.output or (operand.name == "dweight" and _accumulates(desc))
        }
        self._before = {name: buffer.copy() for name, (buffer, _, _) in self._memory.items()}

    def _lift(self, array: Array) -> Array:
        return array.copy() if array.dtype.kind == "i" else array.astype(self._work)

    def _add(self, operand: Operand, placement: Placement, values: Array | None) -> None:
        if self.case.layout is Layout.IN_PLACE and operand.name in ("dx", "da"):
            self.arrays[operand.name] = self.arrays["dy"]
            return
        if values is not None and values.size:
            # A step of 0 can only show one value; a saved y may differ along that axis.
            steps = tuple(
                step
                or int(not np.array_equal(values, _repeat(values, _only(axis, placement)), True))
                for axis, step in enumerate(placement.steps)
            )
            placement = Placement(placement.order, steps, placement.offset, placement.gap)
        memory = _allocate(operand, placement)
        self._memory[operand.name] = memory
        array = self.arrays[operand.name] = memory[1]
        if values is not None and values.size:
            once = tuple(slice(0, 1) if step == 0 else slice(None) for step in placement.steps)
            array[once] = values[once]

    def poke(self, name: str, place: Any, value: Any) -> None:
        """Change an element, or a part, of an input before the run."""
        self.arrays[name][place] = value
        self._inputs[name][place] = self.arrays[name][place]
        self._before[name] = self._memory[name][0].copy()

    def outputs(self) -> dict[str, Array]:
        """Copies of the outputs."""
        names = [op.name for op in self.desc.operands if op.output and op.name in self.arrays]
        return {name: np.array(self.arrays[name]) for name in names}

    def exact(self) -> dict[str, Array]:
        """The outputs by the reference, unrounded."""
        return reference.gradient(self.desc, self._inputs)

    def args(self) -> Any:
        """The arguments of a plan."""
        return _PLANS[self.desc.category][1](**self.arrays)

    def plan(self, device: str = "cpu", preference: Any = None) -> Any:
        """The plan of the problem."""
        chosen = _PLANS[self.desc.category][0]
        return chosen.select(self.desc, device=device, preference=preference)

    def run(self, device: str = "cpu", preference: Any = None) -> None:
        """Run through the plan."""
        plan = self.plan(device, preference)
        if device == "cpu":
            plan.run(self.args())
        else:
            self._run_elsewhere(plan)

    def _run_elsewhere(self, plan: Any) -> None:
        """Run on copies of the whole buffers on a GPU, and bring them back.

        The views are made here: torch knows no negative strides.
        """
        import torch

        copies = {
            name: torch.from_numpy(buffer.view(np.uint8)).to(plan.device)
            for name, (buffer, _, _) in self._memory.items()
        }
        views = {}
        for operand in self.desc.operands:
            array = self.arrays.get(operand.name)
            if array is None:
                continue
            home = next(name for name in self._memory if self.arrays[name] is array)
            offset = array.ctypes.data - self._memory[home][0].ctypes.data
            views[operand.name] = View(
                copies[home].data_ptr() + offset,
                Lies(
                    array.shape,
                    tuple(step // array.itemsize for step in array.strides),
                    operand.dtype,
                    plan.device,
                    True,
                ),
                copies[home],
            )
        plan._run_views(views)
        for name, (buffer, _, _) in self._memory.items():
            buffer.view(np.uint8)[:] = copies[name].cpu().numpy()

    def call(self) -> None:
        """Run through the public function."""
        _call(self.desc, self.arrays)

    def outcome(self, guarantee: float) -> Outcome:
        """Hold what the outputs now hold to the contract."""
        magnitude = reference.gradient(self.desc, self._inputs, magnitude=True)
        got = self.outputs()
        error = reference.check_error(self.desc, got, self.exact(), magnitude)
        return Outcome(self.case, error, guarantee, self._fault(list(got)))

    def _fault(self, outputs: Sequence[str]) -> str:
        """What happened in memory that should not have."""
        for name, (buffer, array, around) in self._memory.items():
            bits = _BITS[buffer.itemsize]
            same = buffer.view(bits) == self._before[name].view(bits)
            owner = next(op for op in self.desc.operands if op.name == name)
            if name not in outputs and not any(array is self.arrays[out] for out in outputs):
                if not same.all():
                    return f"the input {name} was written to"
                continue
            if not same[around].all():
                return f"memory beside {name} was written to"
            if owner.output and name not in self._inputs:
                if np.any(array.view(bits) == bits(_POISON[owner.dtype])):
                    return f"elements of {name} were not written, or came from beside an input"
            elif name == "dweight":
                indices = self._inputs["indices"]
                named = np.unique(indices[(indices >= 0) & (indices < len(array))])
                untouched = np.delete(np.arange(len(array)), named)
                old = np.array(array)
                old[...] = self._inputs[name]
                if np.any(array.view(bits)[untouched] != old.view(bits)[untouched]):
                    return "rows of dweight that no index names have changed"
        return ""


def _only(axis: int, placement: Placement) -> Placement:
    """Repeated along one axis alone."""
    steps = tuple(0 if one == axis else 1 for one in range(len(placement.steps)))
    return Placement(placement.order, steps)


def _accumulates(desc: Descriptor) -> bool:
    return isinstance(desc, EmbeddingBackwardDescriptor) and desc.accumulate


_PLANS: Mapping[OpCategory, tuple[Any, Any]] = {
    OpCategory.SOFTMAX: (plans.SoftmaxBackwardPlan, arguments.SoftmaxBackwardArgs),
    OpCategory.BINARY_ELEMENTWISE: (
        plans.BinaryParamBackwardPlan,
        arguments.BinaryParamBackwardArgs,
    ),
    OpCategory.SCAN: (plans.ScanBackwardPlan, arguments.ScanBackwardArgs),
    OpCategory.REDUCTION: (plans.ReduceBackwardPlan, arguments.ReduceBackwardArgs),
    OpCategory.EMBEDDING: (plans.EmbeddingBackwardPlan, arguments.EmbeddingBackwardArgs),
}


def run_plan(case: Case, device: str = "cpu", preference: Any = None) -> Outcome:
    """Run a case through its plan and measure it."""
    problem = Problem(case)
    problem.run(device, preference)
    return problem.outcome(problem.plan(device, preference).precision_guarantee.relative_error)


def run_function(case: Case) -> Outcome:
    """Run a case through the public function and measure it."""
    problem = Problem(case)
    problem.call()
    return problem.outcome(problem.plan().precision_guarantee.relative_error)


def _call(desc: Descriptor, arrays: Mapping[str, Array]) -> None:
    spec = desc.spec
    function = getattr(functions, spec.function)
    saved = {name: arrays[name] for name in ("x", "y") if name in arrays}
    if isinstance(desc, EmbeddingBackwardDescriptor):
        function(
            arrays["dout"],
            arrays["indices"],
            desc.num_embeddings,
            padding_idx=desc.padding_idx,
            scale_grad_by_freq=desc.scale_grad_by_freq,
            accumulate=desc.accumulate,
            out=arrays["dweight"],
        )
    elif isinstance(desc, BinaryParamBackwardDescriptor):
        function(arrays["dy"], desc.param, out=(arrays.get("da"), arrays.get("db")))
    elif isinstance(desc, SoftmaxBackwardDescriptor):
        function(arrays["dy"], **saved, axis=desc.softmax_axis, out=arrays["dx"])
    else:
        more: dict[str, Any] = {"ties": desc.ties} if spec.ties else {}
        if isinstance(desc, ScanBackwardDescriptor):
            more.update(axis=desc.scan_axis, reverse=desc.reverse)
            function(arrays["dy"], **saved, **more, out=arrays["dx"])
            return
        if spec.correction:
            more["correction"] = desc.correction
        if spec.x is Need.NO:
            more["shape"] = desc.input_shape
        axes = desc.reduce_axis
        small = {"dy": arrays["dy"], **saved}
        for name in small.keys() - {"x"}:
            small[name] = np.squeeze(small[name], axis=axes)
        function(**small, **more, axis=axes, out=arrays["dx"])


def _from_rows(rows: Array, shape: tuple[int, ...], axes: Axes) -> Array:
    """An array of this shape, from (outer, n) with `axes` flattened in C order behind."""
    order = [axis for axis in range(len(shape)) if axis not in axes] + sorted(axes)
    return rows.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def _sprinkle(rows: Array, rng: np.random.Generator, *values: float) -> None:
    """Put the values at random places, about one a row, so that rows hold none, one or more."""
    hit = rng.random(rows.shape) < 1 / max(rows.shape[1], 2)
    rows[hit] = rng.choice(values, int(hit.sum()))


def _values(
    case: Case, placements: Mapping[str, Placement], rng: np.random.Generator, work: Any
) -> dict[str, Array]:
    """The contents of the inputs, and of a table to be added to."""
    desc, data, element = case.desc, case.data, case.desc.element
    if isinstance(desc, EmbeddingBackwardDescriptor):
        return _embedding_values(desc, data, placements, rng)
    shape, axes = desc.shape_and_axes
    n = prod(shape[axis] for axis in axes)
    outer = prod(extent for axis, extent in enumerate(shape) if axis not in axes)
    x = _x_rows(desc, data, outer, n, rng)
    small = desc.operands[0].shape
    dy = rng.normal(size=(outer, prod(small) // max(outer, 1)))
    if data is Data.ZEROS:
        _sprinkle(dy, rng, 0.0, -0.0)
        dy[:1, :1] = np.nan  # where all x are 0: only an entry written "0" stays 0
    elif data is Data.INFINITE:
        _sprinkle(dy[::2], rng, np.inf, -np.inf)
    elif data is Data.NAN_IN_DY:
        _sprinkle(dy[::2], rng, np.nan)
        dy[:1, dy.shape[1] // 2 : dy.shape[1] // 2 + 1] = np.nan
    values = {"dy": _repeat(_from_rows(dy, small, axes), placements["dy"])}
    full = _from_rows(x, shape, axes)
    # x is repeated where it is broadcast; a softmax has no x, but a y that repeats.
    for name in ("x", "y"):
        where = placements.get(name)
        if where is not None and len(where.steps) == len(shape):
            steps = tuple(
                1 if desc.op in _PRODUCTS and axis in axes else step
                for axis, step in enumerate(where.steps)
            )
            if name == "x" or "x" not in placements:
                full = _repeat(full, Placement(where.order, steps))
    stored = full.astype(_DTYPES[element])
    if "x" in placements:
        values["x"] = stored
    if "y" in placements:
        values["y"] = _forward(desc, stored.astype(work)).astype(_DTYPES[element])
    return values


def _x_rows(desc: Any, data: Data, outer: int, n: int, rng: np.random.Generator) -> Array:
    if desc.op in _PRODUCTS:
        # The walk of log |Π x| stays within a few units, so every partial product is in range.
        x = np.exp(rng.normal(size=(outer, n)) * min(0.5, 2 / sqrt(max(n, 1))))
        x *= rng.choice((-1.0, 1.0), x.shape)
    else:
        x = rng.normal(size=(outer, n)) * 2 + 0.5
    if data is Data.TIES:
        x = rng.integers(-2, 3, (outer, n)).astype(np.float64)
    elif data is Data.ZEROS:
        _sprinkle(x, rng, 0.0, -0.0)
        x[:1] = 0
    elif data is Data.INFINITE and desc.op not in _PRODUCTS:
        _sprinkle(x, rng, -np.inf)
        x[1:2] = -np.inf
        if desc.category is not OpCategory.SOFTMAX:  # softmax of +inf is NaN throughout
            _sprinkle(x[2::3], rng, np.inf)
    elif data is Data.NAN_IN_X:
        _sprinkle(x[::2], rng, np.nan)
        x[:1, n // 2 : n // 2 + 1] = np.nan
    return x


def _embedding_values(
    desc: EmbeddingBackwardDescriptor,
    data: Data,
    placements: Mapping[str, Placement],
    rng: np.random.Generator,
) -> dict[str, Array]:
    count, dim, rows = desc.num_indices, desc.embedding_dim, desc.num_embeddings
    dout = rng.normal(size=(count, dim))
    if data is Data.ZEROS:
        _sprinkle(dout, rng, 0.0, -0.0)
    elif data is Data.INFINITE:
        _sprinkle(dout, rng, np.inf, -np.inf)
    elif data is Data.NAN_IN_DY:
        _sprinkle(dout, rng, np.nan)
    # Two below and two above the table are skipped; ties all name one row.
    indices = rng.integers(-2, rows + 2, count)
    if data is Data.TIES:
        indices[:] = rows // 2
    values = {"dout": _repeat(dout, placements["dout"]), "indices": indices}
    if desc.accumulate:
        table = rng.normal(size=(rows, dim))
        _sprinkle(table, rng, -0.0)
        values["dweight"] = table
    return {
        op.name: values[op.name].astype(_DTYPES[op.dtype])
        for op in desc.operands
        if op.name in values
    }


def _forward(desc: Any, x: Array) -> Array:
    """The result y that a forward pass would save, before it is rounded to the element."""
    if isinstance(desc, ReduceBackwardDescriptor):
        return _reduced(desc, x) if x.size else np.zeros(desc.dy_shape, x.dtype)
    (axis,) = desc.shape_and_axes[1]
    if isinstance(desc, SoftmaxBackwardDescriptor):
        if x.size == 0:
            return x
        top = x.max(axis, keepdims=True)
        total = np.log(np.exp(x - top).sum(axis, keepdims=True))
        y: Array = x - top - total
        return np.exp(y) if desc.kind is SoftmaxKind.SOFTMAX else y
    scans: dict[Any, np.ufunc] = {
        ScanKind.CUMPROD: np.multiply,
        ScanKind.CUMMAX: np.maximum,
        ScanKind.CUMMIN: np.minimum,
        ScanKind.LOG_CUMSUM_EXP: np.logaddexp,
    }
    if desc.reverse:
        return np.flip(scans[desc.kind].accumulate(np.flip(x, axis), axis), axis)
    return scans[desc.kind].accumulate(x, axis)


def _reduced(desc: ReduceBackwardDescriptor, x: Array) -> Array:
    axes, kind = desc.reduce_axis, desc.kind
    simple: dict[ReduceKind, Any] = {
        ReduceKind.MAX: np.max,
        ReduceKind.MIN: np.min,
        ReduceKind.PROD: np.prod,
    }
    if kind in simple:
        return np.asarray(simple[kind](x, axis=axes, keepdims=True))
    if kind is ReduceKind.NORM2:
        return np.asarray(np.sqrt(np.sum(x * x, axis=axes, keepdims=True)))
    if kind is ReduceKind.LOG_SUM_EXP:
        return np.asarray(np.logaddexp.reduce(x, axis=axes, keepdims=True))
    n = prod(desc.input_shape[axis] for axis in axes)
    m = n - desc.correction
    deviation = x - np.mean(x, axis=axes, keepdims=True)
    total = np.sum(deviation * deviation, axis=axes, keepdims=True)
    return np.asarray(np.sqrt(total / (m if m > 0 else 1)))
