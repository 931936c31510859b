"""Problems to time: the question, and its arrays as torch tensors on a device.

Inputs are drawn on the device from a fixed seed, so that two processes hold the same bits. `y` is
what torch's own forward saves, in the element, so ours and torch start from the same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

from .. import args as arguments
from .. import plans
from ..cases import describe
from ..explanation import fewest_bytes
from ..kinds import ElementKind, OpCategory, ReduceKind, ScanKind
from ..registry import KindSpec, Need
from ..sku import PlanPreference
from .forwards import LERP_WEIGHT, forward
from .lazy import needed
from .workloads import SLICE_START, Draw, Workload, memory_order

__all__ = ["FAMILIES", "Problem", "build", "dtype_of", "floor_bytes", "posed", "question"]

FAMILIES: dict[OpCategory, tuple[Any, Any]] = {
    OpCategory.SOFTMAX: (plans.SoftmaxBackwardPlan, arguments.SoftmaxBackwardArgs),
    OpCategory.BINARY_ELEMENTWISE: (
        plans.BinaryParamBackwardPlan,
        arguments.BinaryParamBackwardArgs,
    ),
    OpCategory.SCAN: (plans.ScanBackwardPlan, arguments.ScanBackwardArgs),
    OpCategory.REDUCTION: (plans.ReduceBackwardPlan, arguments.ReduceBackwardArgs),
    OpCategory.EMBEDDING: (plans.EmbeddingBackwardPlan, arguments.EmbeddingBackwardArgs),
}

# Of a row's factors, this many pairs differ from ±1 at most: see `_factors`.
_PAIRS = 4096


def question(
    spec: KindSpec, shape: tuple[int, ...], axis: int, element: ElementKind, table: int = 1
) -> tuple[Any, dict[str, Any]]:
    """The descriptor, and what its function takes besides the arrays.

    Tie rules are torch's: the last of equals in cummax and cummin, shared in amax and amin. For
    the embedding `shape` is `dout`'s, (N, D), and `table` the number of rows.
    """
    if spec.category is OpCategory.SOFTMAX:
        return describe(spec, element, shape, (axis,)), {"axis": axis}
    if spec.category is OpCategory.SCAN:
        ties: dict[str, Any] = {"ties": "last"} if spec.ties else {}
        return describe(spec, element, shape, (axis,), **ties), {"axis": axis, **ties}
    if spec.category is OpCategory.REDUCTION:
        extent = {"shape": shape} if spec.x is Need.NO else {}
        more = {"axis": axis, "keepdims": True, **extent}
        return describe(spec, element, shape, (axis,)), more
    if spec.category is OpCategory.BINARY_ELEMENTWISE:
        return describe(spec, element, shape, (), param=LERP_WEIGHT), {"weight": LERP_WEIGHT}
    desc = describe(spec, element, (*shape, table), (), accumulate=False)
    return desc, {"num_embeddings": table}


def posed(spec: KindSpec, element: ElementKind, workload: Workload) -> tuple[Any, dict[str, Any]]:
    """The question of a case, likewise."""
    if spec.category is OpCategory.EMBEDDING:
        rows, dim, count = workload.shape
        return question(spec, (count, dim), 0, element, rows)
    return question(spec, workload.shape, workload.axis, element)


def floor_bytes(desc: Any, without: tuple[str, ...] = ()) -> int:
    """The fewest bytes the gradient must move: each input read once, each output written once.

    The winners of cummax and cummin can be told from one saved array, so one is counted; `prod`
    takes its product anew.
    """
    given = [operand.name for operand in desc.operands if operand.name not in without]
    return sum(fewest_bytes(desc, given))


def dtype_of(element: ElementKind) -> Any:
    torch = needed("torch")
    return {
        ElementKind.F32: torch.float32,
        ElementKind.F16: torch.float16,
        ElementKind.BF16: torch.bfloat16,
        ElementKind.F64: torch.float64,
    }[element]


@dataclass
class Problem:
    """One problem with its arrays. `seed` lets what only peers need be drawn later."""

    spec: KindSpec
    desc: Any
    workload: Workload
    device: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    keywords: dict[str, Any]
    """What the plain function takes besides the inputs."""
    x: Any
    seed: int

    @property
    def dy(self) -> Any:
        """The gradient of the result; an embedding calls it `dout`."""
        return self.inputs["dout" if "dout" in self.inputs else "dy"]

    @property
    def axis(self) -> int:
        return self.workload.axis

    def plan(self, preference: PlanPreference | None = None) -> Any:
        chosen = FAMILIES[self.spec.category][0]
        return chosen.select(self.desc, device=self.device, preference=preference)

    def args(self) -> Any:
        return FAMILIES[self.spec.category][1](**self.inputs, **self.outputs)

    def leaves(self) -> list[Any]:
        """What a forward pass starts from, without the indices."""
        element, layout = self.desc.element, self.workload.layout
        draw = _Draws(self.device, self.seed + 1)
        if self.spec.category is OpCategory.EMBEDDING:
            shape: tuple[int, ...] = (self.desc.num_embeddings, self.desc.embedding_dim)
        else:
            shape = self.desc.shape_and_axes[0]
        count = 2 if self.spec.category is OpCategory.BINARY_ELEMENTWISE else 1
        if self.x is not None:
            return [self.x]
        return [_place(draw.normal(shape, element), layout) for _ in range(count)]

    @property
    def nbytes(self) -> int:
        """Of all arrays, without what lies between their elements."""
        arrays = (*self.inputs.values(), *self.outputs.values())
        return sum(array.numel() * array.element_size() for array in arrays)

    def twin(self) -> Problem:
        """The same in arrays of its own, which lie alike; the outputs hold NaN."""

        def apart(arrays: dict[str, Any]) -> dict[str, Any]:
            layout = self.workload.layout
            return {name: _place(array.clone(), layout) for name, array in arrays.items()}

        made = replace(self, inputs=apart(self.inputs), outputs=apart(self.outputs))
        made.poison()
        return made

    def poison(self) -> None:
        """Fill the outputs with NaN: an element nobody writes shows."""
        for output in self.outputs.values():
            output.fill_(float("nan"))


def build(spec: KindSpec, element: ElementKind, workload: Workload, device: str) -> Problem:
    """The arrays of a case."""
    torch = needed("torch")
    seed = 1 + sum(workload.shape)
    draw = _Draws(device, seed)
    inputs: dict[str, Any] = {}
    x = None
    desc, keywords = posed(spec, element, workload)
    if spec.category is OpCategory.EMBEDDING:
        rows, dim, count = workload.shape
        inputs["dout"] = draw.normal((count, dim), element)
        inputs["indices"] = draw.indices(workload.draw, count, rows)
    else:
        (shape,) = {op.shape for op in desc.operands if op.name == "dy"}
        inputs["dy"] = _place(draw.normal(shape, element), workload.layout)
        if spec.x is not Need.NO or spec.y is not Need.NO:
            if desc.op in (ReduceKind.PROD, ScanKind.CUMPROD):
                x = draw.factors(workload.shape, workload.axis, element)
            else:
                x = draw.normal(workload.shape, element)
            x = _place(x, workload.layout)
        if spec.x is not Need.NO:
            inputs["x"] = x
        if spec.y is not Need.NO and "y" not in workload.without:
            inputs["y"] = _place(forward(spec.kind.value, workload.axis)([x]), workload.layout)
    outputs = {
        op.name: _place(
            torch.empty(op.shape, dtype=dtype_of(element), device=device), workload.layout
        )
        for op in desc.operands
        if op.output
    }
    return Problem(spec, desc, workload, device, inputs, outputs, keywords, x, seed)


def _place(tensor: Any, layout: str) -> Any:
    """The same values, lying as the layout says."""
    if layout == "transposed":
        turned = tuple(reversed(range(tensor.dim())))
        return tensor.permute(turned).contiguous().permute(turned)
    if layout == "permuted":
        order = memory_order(tensor.dim())
        back = tuple(order.index(axis) for axis in range(tensor.dim()))
        return tensor.permute(order).contiguous().permute(back)
    if layout == "sliced":
        *outer, n = tensor.shape
        wide = tensor.new_zeros((*outer, n + 2 * SLICE_START))
        return wide[..., SLICE_START : SLICE_START + n].copy_(tensor)
    if layout == "shifted":
        *outer, n = tensor.shape
        return tensor.new_zeros((*outer, n + 1))[..., 1:].copy_(tensor)
    return tensor


class _Draws:
    """Random tensors of one seed, made where they are used."""

    def __init__(self, device: str, seed: int) -> None:
        self._torch = needed("torch")
        self._device = device
        self._random = self._torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], element: ElementKind) -> Any:
        torch = self._torch
        work = torch.float64 if element is ElementKind.F64 else torch.float32
        numbers = torch.randn(shape, generator=self._random, device=self._device, dtype=work)
        return numbers.to(dtype_of(element))

    def factors(self, shape: tuple[int, ...], axis: int, element: ElementKind) -> Any:
        """Factors of a product that stays in range in every element, however long the row.

        ±1, and among them pairs (a, 1/a). Unpaired factors near 1 would not do: rounded to a half
        they lean to one side, and 2²⁰ of them underflow. Few pairs keep the walk of the rounding
        errors short, and a ≈ exp(±2/√pairs) keeps the product of any part in range too: kernels
        and peers multiply in many orders.
        """
        torch, n = self._torch, shape[axis]
        outer = prod(shape) // n
        bits = torch.randint(
            0, 2, (outer, n), generator=self._random, device=self._device, dtype=torch.int8
        )
        rows = (2 * bits - 1).to(dtype_of(element))
        step = 2 * max(1, n // (2 * _PAIRS))
        first = rows[:, : n // 2 * 2 : step]
        spread = min(0.5, 2 / sqrt(max(1, first.shape[1])))
        first *= self.normal(tuple(first.shape), ElementKind.F32).mul(spread).exp().to(rows.dtype)
        rows[:, 1 : n // 2 * 2 : step] *= (1 / first.abs().double()).to(rows.dtype)
        others = [extent for k, extent in enumerate(shape) if k != axis]
        return rows.reshape(*others, n).movedim(-1, axis).contiguous()

    def indices(self, draw: Draw, count: int, rows: int) -> Any:
        torch = self._torch
        where = {"device": self._device, "generator": self._random}
        if draw is Draw.SAME:
            return torch.full((count,), rows // 2, device=self._device)
        if draw is Draw.UNIFORM:
            return torch.randint(rows, (count,), **where)
        ranks = torch.arange(1, rows + 1, device=self._device, dtype=torch.float64)
        below = (ranks**-1.2).cumsum(0)
        points = torch.rand(count, dtype=torch.float64, **where) * below[-1]
        return torch.searchsorted(below, points).clamp_(max=rows - 1)
