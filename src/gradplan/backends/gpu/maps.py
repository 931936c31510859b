"""The launch of the engine *map*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...geometry import Dim, Nest, nest
from ...kinds import BinaryKind
from .launch import Step
from .operands import geometry_of, pointers_of
from .program import Program, Strides, begun_anywhere, integer, up
from .table import Table

__all__ = ["RAGGED", "is_extreme", "program"]

_NOT_RAGGED = (
    "axis_dims", "axis_dy", "axis_x", "axis_y", "axis_out", "axis_out2", "NEAR", "FULL",
)  # fmt: skip
RAGGED = 32
"""Elements, below which a row is hardly more than its edges."""


def is_extreme(p: float, q: float) -> bool:
    """Whether weights take another kernel, which multiplies in f64."""
    return any(weight != 0 and not 2.0**-100 < abs(weight) < 2.0**100 for weight in (p, q))


def program(
    desc: Any,
    strides: Strides,
    table: Table,
    shape: Sequence[int],
    steps: Sequence[Sequence[int]],
    outputs: Sequence[str],
    p: float,
    q: float,
) -> Program:
    """The program for arrays with these strides, which `steps` lists in the order of the kernel."""
    whole = nest(shape, range(len(shape)), steps, 3)
    along = Nest(whole.dims[:1], whole.offsets)
    nothing = (0,) * len(whole.offsets)
    across = Nest(whole.dims[1:] or (Dim(1, nothing),), nothing)
    geometry = geometry_of(desc, strides, outputs, across, along)
    n, lines = along.size, across.dims[0].extent
    modes = [geometry.mode(k, output=k >= 3) for k in range(3 + len(outputs))]
    room = table.map_bytes // desc.element.size_bytes // len(outputs)
    c = min(up(n), room)
    if "a" in modes and lines > 1:  # what all rows share is read once for several of them
        c = min(c, room // 8)
    r = min(up(lines), max(1, room // c))
    grid = -(-n // c) * -(-lines // r) * (across.size // lines)
    extreme = desc.op == BinaryKind.LERP and is_extreme(p, q)
    sources = ("dy", "x", "y", *outputs)
    pointers = pointers_of(geometry, sources, modes)
    arguments = geometry.arguments()
    if len(outputs) == 1:
        pointers.append(("out2", None))
        rows_end = 1 + next(k for k, (name, _) in enumerate(arguments) if name == "row_out")
        arguments.insert(rows_end, ("row_out2", (0,)))
        arguments.append(("axis_out2", (0,)))
        modes.append("n")
    alignment, aligned = geometry.alignment(n, modes)
    step = Step(
        kernel="rows.map_tiles",
        grid=grid,
        arguments=(*pointers, *arguments, ("n", integer(n)), ("p", p), ("q", q)),
        constants=(
            ("KIND", desc.op.value),
            ("ELEMENT", desc.element.value),
            ("EXTREME", extreme),
            *zip(("DY", "X", "Y", "OUT", "OUT2"), modes, strict=True),
            ("R", r),
            ("C", c),
            ("NEAR", geometry.near(r, c)),
            ("FULL", n % c == 0 and lines % r == 0),
        ),
        warps=4,
        alignment=alignment,
        aligned=aligned,
    )
    flat = len(whole.dims) == 1
    made = Program(
        steps=(step,),
        runner=None,
        workspace_bytes=0,
        reads={},
        layout="flat" if flat else "rows",
        variant="map",
        why="one flat run of elements" if flat else f"tiles of {r} × {c}, as the output lies",
    )
    alike = geometry.alike(modes) if n >= RAGGED else ()
    if not alike:
        return made
    names = tuple(sources[k] for k in alike)
    ragged = begun_anywhere(step, "ragged.map_ragged", _NOT_RAGGED)
    askew = replace(made, steps=(ragged,), unaligned=made, alike=names)
    return askew if alignment * geometry.item < 16 else replace(made, unaligned=askew)
