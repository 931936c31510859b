"""cummax and cummin of short rows side by side, each of which a thread takes alone
(`kernels.alone`): the launch, and when it is for a problem.
"""

from __future__ import annotations

from ...descriptors import ScanBackwardDescriptor
from ...kinds import ElementKind
from .launch import Step, all_registers
from .operands import lined, pointers_of
from .program import Program, Strides, integer, up
from .table import Table

__all__ = ["program"]


def program(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> Program | None:
    """None where this is not for arrays with these strides. x alone tells winners."""
    if not desc.spec.ties:
        return None
    given = {name: steps for name, steps in strides.items() if name != "y"}
    geometry, modes, flip, columns = lined(desc, given)
    n, beside = geometry.axis.size, geometry.rows.dims[0].extent
    # Of f64 as many as of f32, one a thread.
    narrow = ElementKind.F32 if desc.element is ElementKind.F64 else desc.element
    r, warps = table.part_of("alone", desc.kind, narrow)
    length = up(n)
    if not r or not columns or not {*modes} <= {"c", "n"}:
        return None
    if length > min(table.alone_axis, table.scan_columns):
        return None
    while warps > 1 and r // 2 >= beside:
        r, warps = r // 2, warps // 2
    if up(beside) < r:  # most of a warp would have no row
        return None
    full = n == length and beside % r == 0
    alignment, aligned = geometry.alignment(n, modes)
    used = ("dy", "x", "out")
    pointers = dict(pointers_of(geometry, ("dy", "x", "y", "dx"), modes))
    lying = dict(geometry.arguments())
    arguments = [(name, pointers[name]) for name in used]
    arguments += [("row_dims", lying["row_dims"])]
    arguments += [(f"{part}_{name}", lying[f"{part}_{name}"]) for part in _PARTS for name in used]
    found = table.number_of(table.registers, "alone", desc.kind, desc.element) if full else 0
    step = Step(
        kernel="alone.scan_alone",
        grid=-(-beside // r) * (geometry.rows.size // beside),
        arguments=(*arguments, ("n", integer(n))),
        constants=(
            ("KIND", desc.kind.value),
            ("TIES", desc.ties.value),
            ("ELEMENT", desc.element.value),
            ("FLIP", flip),
            ("PAIRS", desc.element in table.paired),
            *(("R", r), ("C", length), ("NW", warps)),
            ("FULL", full),
        ),
        warps=warps,
        # What is masked takes more.
        registers=found or (0 if full else all_registers(warps)),
        alignment=alignment,
        aligned=aligned,
    )
    return Program(
        steps=(step,),
        runner=None,
        workspace_bytes=0,
        reads={"y": 0},
        layout="columns",
        variant="resident_marked",
        why="a thread takes whole rows, whose winners it keeps as bits: one read",
    )


_PARTS = ("row", "axis")
