"""Problems to time, built from the registry, and the check that comes before any timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch_peers import Graph, forward

import gradplan as gp
from gradplan.backends.reference import check_error, gradient
from gradplan.bench.problems import FAMILIES, question
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import KindSpec

__all__ = [
    "Checked",
    "Lent",
    "Problem",
    "Wrong",
    "batch",
    "build",
    "check",
    "has_axis",
    "in_one_memory",
]


_SCAN_STEPS = 1 << 16
_ALIGNMENT = 256  # of a workspace


class Wrong(Exception):
    """A result outside its guarantee: it is not worth timing."""


@dataclass(frozen=True)
class Problem:
    """One problem with its arrays, ready to run in every way there is."""

    spec: KindSpec
    desc: Any
    plan: Any
    args: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    keywords: dict[str, Any]
    """Arguments of the plain function."""
    graph: Graph

    @property
    def function(self) -> Callable[[], Any]:
        """The plain function, which allocates its result."""
        return partial(getattr(gp, self.spec.function), **self.keywords)

    @property
    def run(self) -> Callable[[], Any]:
        return partial(self.plan.run, self.args)

    @property
    def fewest_bytes(self) -> int:
        """Each input read once, each output written once."""
        return sum(operand.size_bytes for operand in self.desc.operands)


@dataclass(frozen=True)
class Checked:
    """Worst relative errors in the contract's measure; torch's is reported, not judged."""

    error: float
    guarantee: float
    torch_error: float | None
    """None where torch is not finite where it should be, or was not asked."""


def has_axis(spec: KindSpec) -> bool:
    """Whether the kind runs along an axis at all."""
    return spec.category not in (OpCategory.BINARY_ELEMENTWISE, OpCategory.EMBEDDING)


def build(
    spec: KindSpec,
    shape: tuple[int, ...],
    axis: int = -1,
    element: ElementKind = ElementKind.F32,
    *,
    numpy: bool = True,
    table: int = 1,
    indices: Any = None,
) -> Problem:
    """A problem on NumPy arrays, or on torch tensors; every optional `y` is given, as in torch.

    For the embedding `shape` is `dout`'s, (N, D), and `table` the number of rows.
    """
    if indices is None:
        indices = torch.randint(table, shape[:1], generator=torch.Generator().manual_seed(1))
    graph = forward(spec.kind.value, shape, axis, element, indices, table)
    desc, more = question(spec, shape, axis, element, table)
    held = {
        "dy": graph.dy,
        "dout": graph.dy,
        "x": graph.leaves[0].detach(),
        "y": graph.y.detach(),
        "indices": indices,
    }
    lend = _own if numpy else _same
    inputs, outputs = {}, {}
    for operand in desc.operands:
        if operand.output:
            outputs[operand.name] = lend(torch.zeros(operand.shape, dtype=graph.dy.dtype))
        else:
            inputs[operand.name] = lend(held[operand.name])
    plan_type, args_type = FAMILIES[spec.category]
    plan, args = plan_type.select(desc), args_type(**inputs, **outputs)
    return Problem(spec, desc, plan, args, inputs, outputs, inputs | more, graph)


def batch(problem: Problem, count: int) -> Problem:
    """So many copies of a checked problem, along a new first axis; `Wrong` where one differs."""
    if count == 1:
        return problem
    extents, axes = problem.desc.shape_and_axes
    axis = 1 + (axes[0] if axes else 0)
    desc, more = question(problem.spec, (count, *extents), axis, problem.desc.element)
    arrays = {}
    for operand in desc.operands:
        one = (problem.outputs if operand.output else problem.inputs)[operand.name]
        arrays[operand.name] = np.empty(operand.shape, one.dtype)
        arrays[operand.name][...] = np.nan if operand.output else one
    plan_type, args_type = FAMILIES[problem.spec.category]
    plan, args = plan_type.select(desc), args_type(**arrays)
    plan.run(args)
    for name, one in problem.outputs.items():
        if not all(_same_bits(copy, one) for copy in arrays[name]):
            raise Wrong(f"{desc.op} {desc.shape_and_axes}: {name} differs from copy to copy")
    inputs = {name: arrays[name] for name in problem.inputs}
    outputs = {name: arrays[name] for name in problem.outputs}
    return Problem(problem.spec, desc, plan, args, inputs, outputs, inputs | more, problem.graph)


@dataclass(frozen=True)
class Lent:
    """A problem in memory that others use too: `fill` it, then `call`."""

    call: Callable[[], Any]
    inputs: Sequence[tuple[Any, Any]]
    """Where each input lies, and what it holds."""

    def fill(self) -> None:
        for place, values in self.inputs:
            place[...] = values


def in_one_memory(small: Problem, large: Problem) -> tuple[Lent, Lent, Lent]:
    """The smaller problem in the first and in the second half of the larger one's, and that one.

    An array of which both problems have equally much lies in one place for all three.
    """
    arrays = large.inputs | large.outputs
    memory = {name: np.empty(array.size, array.dtype) for name, array in arrays.items()}
    needed = small.plan.workspace_size
    workspace = _aligned(max(large.plan.workspace_size, 2 * needed + _ALIGNMENT))

    def lend(problem: Problem, second: bool) -> Lent:
        own = problem.inputs | problem.outputs
        placed = {}
        for name, array in own.items():
            begin = memory[name].size - array.size if second else 0
            placed[name] = memory[name][begin : begin + array.size].reshape(array.shape)
        _, args_type = FAMILIES[problem.spec.category]
        inputs = [(placed[name], values) for name, values in problem.inputs.items()]
        begin = -(-needed // _ALIGNMENT) * _ALIGNMENT if second else 0
        return Lent(problem.plan.bind(args_type(**placed), workspace=workspace[begin:]), inputs)

    return lend(small, second=False), lend(small, second=True), lend(large, second=False)


def _aligned(size: int) -> Any:
    """So many bytes, aligned as a workspace must be."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]


def _same(tensor: Any) -> Any:
    return tensor


def _own(array: Any) -> Any:
    """A copy as a NumPy array, which lies where NumPy puts it: torch's are aligned to lines."""
    return np.array(_as_numpy(array))


def _as_numpy(array: Any) -> Any:
    """The same memory as a NumPy array; bf16 through ml_dtypes."""
    if isinstance(array, np.ndarray):
        return array
    if array.dtype == torch.bfloat16:
        return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array.numpy()


def _results(problem: Problem, made: Any) -> dict[str, Any]:
    """What a function returned, by operand name."""
    arrays = made if isinstance(made, tuple) else (made,)
    return {k: _as_numpy(a) for k, a in zip(problem.outputs, arrays, strict=True)}


def _same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)))


def check(problem: Problem, *, torch: bool = True) -> Checked:
    """Run every way that will be timed; raise `Wrong` where one misses the guarantee.

    Torch's own error is told where it is asked for. The oracle walks a scan step by step, so of a
    long one it walks the far end, which depends on nothing before it.
    """
    desc, got = problem.desc, {k: _as_numpy(a) for k, a in problem.outputs.items()}
    for array in got.values():
        array.fill(np.nan)
    problem.run()
    seen, asked, given = got, desc, {k: _as_numpy(a) for k, a in problem.inputs.items()}
    extents, axes = desc.shape_and_axes
    ends = desc.category is OpCategory.SCAN and extents[axes[0]] > _SCAN_STEPS
    if ends:
        last = (*[slice(None)] * axes[0], slice(-_SCAN_STEPS, None))
        seen, given = ({k: a[last] for k, a in arrays.items()} for arrays in (got, given))
        asked, _ = question(problem.spec, seen["dx"].shape, axes[0], desc.element)
    work = np.longdouble if desc.element is ElementKind.F64 else np.float64
    wide = {name: a if name == "indices" else a.astype(work) for name, a in given.items()}
    exact = gradient(asked, wide)
    magnitude = gradient(asked, wide, magnitude=True)
    if ends:  # cut off, the first step takes itself for the row's start
        first: tuple[Any, ...] = (*[slice(None)] * axes[0], 0)
        seen = {"dx": seen["dx"].copy()}
        seen["dx"][first] = exact["dx"][first]
    error = check_error(asked, seen, exact, magnitude)
    guarantee = problem.plan.precision_guarantee.relative_error
    label = f"{desc.op} {desc.element} {desc.shape_and_axes}"
    if not error <= guarantee:
        raise Wrong(f"{label}: relative error {error:.3g} is above its guarantee {guarantee:.3g}")
    kept = {name: array.copy() for name, array in got.items()}
    returned = _results(problem, problem.function())
    for array in got.values():
        array.fill(np.nan)
    problem.plan.bind(problem.args)()
    for name, array in kept.items():
        if not _same_bits(array, returned[name]):
            raise Wrong(f"{label}: the function's {name} differs from the plan's")
        if not _same_bits(array, got[name]):
            raise Wrong(f"{label}: the bound launch's {name} differs from the plan's")
    if not torch:
        return Checked(error, guarantee, None)
    peer = {name: np.array(a) for name, a in _results(problem, problem.graph.backward()).items()}
    torch_error = check_error(desc, peer, exact, magnitude)
    return Checked(error, guarantee, torch_error if isfinite(torch_error) else None)
