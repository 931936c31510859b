"""Programs: a problem with known strides becomes a few launches.

The variant follows from shape, strides, element and architecture, never from the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...errors import Unsupported
from ...kinds import OpCategory
from ...registry import Engine
from . import recurrence, rows, segments
from .launch import Interpreter, Launcher, Pointer, Step
from .program import Program, Strides, in_turn
from .table import Table, table_of

__all__ = ["choose", "prepare", "ready", "workspace_bound"]


def prepare(
    desc: Any,
    strides: Strides,
    arch: str,
    device: int | None,
    index_shape: Sequence[int] | None = None,
    processors: int | None = None,
) -> Program:
    """The program for arrays with these strides; without a device, for the interpreter."""
    return ready(choose(desc, strides, table_of(arch, processors), index_shape), device)


def ready(made: Program, device: int | None) -> Program:
    """The same, to be run on a device, or in the interpreter."""
    if not made.steps:
        return made
    askew = ready(made.unaligned, device) if made.unaligned else None
    if device is None:
        return replace(made, runner=Interpreter(made.steps, made.counters), unaligned=askew)
    apart = Launcher(made.apart, device) if made.apart else None
    return replace(made, runner=Launcher(made.steps, device), apart_runner=apart, unaligned=askew)


_MOST = 2**31 - 1  # programs of one launch


def choose(
    desc: Any, strides: Strides, table: Table, index_shape: Sequence[int] | None = None
) -> Program:
    """What a table leads to; it has no runner yet."""
    made = _chosen(desc, strides, table, index_shape)
    return made if _fits(made) else _in_pieces(desc, strides, table)


def _fits(made: Program) -> bool:
    """Whether each launch has no more programs than a grid may."""
    steps = (*made.steps, *made.apart)
    return all(step.grid <= _MOST for step in steps) and (
        made.unaligned is None or _fits(made.unaligned)
    )


def _in_pieces(desc: Any, strides: Strides, table: Table) -> Program:
    """The same, one after the other for as many equal pieces of an axis as it takes, and for what
    is left: of arrays that lie so that many programs have little to do each."""
    shape, axes = desc.shape_and_axes
    free = [] if desc.spec.engine is Engine.SEGMENT_SUM else [*range(len(shape))]
    if desc.spec.engine is not Engine.MAP:  # which takes each element by itself
        free = [axis for axis in free if axis not in axes]
    axis = max(free, key=lambda one: shape[one], default=0)
    extent = shape[axis] if free else 1
    count = 2
    while count < 2 * extent:
        each = -(-extent // count)
        pieces = [(start, min(each, extent - start)) for start in range(0, extent, each)]
        sizes = {size: _chosen(_cut(desc, axis, size), strides, table) for _, size in pieces}
        if all(map(_fits, sizes.values())):
            made = [_moved(sizes[n], desc, strides, axis, start) for start, n in pieces]
            why = f"{made[0].why}; {len(made)} times, for a launch has no more than 2³¹ programs"
            return in_turn(made, why)
        count *= 2
    raise Unsupported(f"{desc.op} of shape {shape} takes more programs than a launch on a GPU has")


def _cut(desc: Any, axis: int, size: int) -> Any:
    """The problem of so many places of an axis."""
    name = "shape" if desc.category is OpCategory.BINARY_ELEMENTWISE else "input_shape"
    shape = getattr(desc, name)
    return replace(desc, **{name: (*shape[:axis], size, *shape[axis + 1 :])})


def _moved(made: Program, desc: Any, strides: Strides, axis: int, start: int) -> Program:
    """The same, further on along an axis, with the numbers of the whole problem."""
    whole: dict[str, Any] = {}
    if desc.spec.engine is Engine.MAP:
        whole = dict(zip(("p", "q"), rows.numbers_of(desc, strides), strict=True))
    further = {
        one.name: start * strides[one.name][axis] * one.dtype.size_bytes
        for one in desc.operands
        if one.name in strides and one.shape[axis] > 1
    }

    def moved(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            replace(
                step,
                arguments=tuple(
                    (name, whole.get(name, at(value))) for name, value in step.arguments
                ),
            )
            for step in steps
        )

    def at(value: Any) -> Any:
        if isinstance(value, Pointer) and value.operand in further:
            return replace(value, offset=value.offset + further[value.operand])
        return value

    askew = made.unaligned
    return replace(
        made,
        steps=moved(made.steps),
        apart=moved(made.apart),
        unaligned=None if askew is None else _moved(askew, desc, strides, axis, start),
    )


def _chosen(
    desc: Any, strides: Strides, table: Table, index_shape: Sequence[int] | None = None
) -> Program:
    engine = desc.spec.engine
    if engine in (Engine.MAP, Engine.ROW_STATE):
        return rows.program(desc, strides, table)
    if engine is Engine.RECURRENCE:
        return recurrence.program(desc, strides, table)
    return segments.program(desc, strides, index_shape or (desc.num_indices,), table)


def workspace_bound(desc: Any, table: Table) -> int:
    """The most workspace that any layout of the problem needs, in bytes."""
    if desc.spec.engine is Engine.SEGMENT_SUM:
        return segments.workspace_bytes(desc, table)
    shape, _ = desc.shape_and_axes
    if 0 in shape:
        return 0
    if desc.spec.engine is Engine.RECURRENCE:
        return recurrence.workspace_bytes(desc, table)
    return rows.workspace_bytes(desc, table)
