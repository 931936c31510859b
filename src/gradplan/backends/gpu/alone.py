"""cummax and cummin of rows that one thread takes alone, side by side (`kernels.alone`), or one
warp (`kernels.row_alone`): the launches, and when they are for a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...descriptors import ScanBackwardDescriptor
from ...kinds import ElementKind
from .launch import Step
from .operands import Lined, lined, pointers_of
from .program import Program, Strides, integer, up
from .table import Table

__all__ = ["program"]


_PARTS = ("row", "axis")
_LANES = 32
_LEAST = 8
"""Places of a thread at least where a warp takes a row: what is read at a time, of halves."""


def program(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> Program | None:
    """None where this is not for arrays with these strides. x alone tells winners."""
    if not desc.spec.ties:
        return None
    lying = lined(desc, {name: steps for name, steps in strides.items() if name != "y"})
    if not {*lying.modes} <= ({"c", "n"} if lying.columns else {"t", "n"}):
        return None
    step = _by_thread(desc, lying, table) if lying.columns else _by_warp(desc, lying, table)
    if step is None:
        return None
    who = "thread" if lying.columns else "warp"
    return Program(
        steps=(step,),
        runner=None,
        workspace_bytes=0,
        reads={"y": 0},
        layout="columns" if lying.columns else "rows",
        variant="resident_marked",
        why=f"a {who} takes whole rows, whose winners it keeps as bits: one read",
    )


def _by_thread(desc: ScanBackwardDescriptor, lying: Lined, table: Table) -> Step | None:
    """Rows side by side."""
    n, beside = lying.geometry.axis.size, lying.geometry.rows.dims[0].extent
    # Of f64 as many as of f32, one a thread.
    narrow = ElementKind.F32 if desc.element is ElementKind.F64 else desc.element
    r, warps = table.part_of("alone", desc.kind, narrow)
    length = up(n)
    if not r or length > min(table.alone_axis, table.scan_columns):
        return None
    while warps > 1 and r // 2 >= beside:
        r, warps = r // 2, warps // 2
    if up(beside) < r:  # most of a warp would have no row
        return None
    full = n == length and beside % r == 0
    return Step(
        kernel="alone.scan_alone",
        grid=-(-beside // r) * (lying.geometry.rows.size // beside),
        constants=(
            *_constants(desc, lying),
            ("PAIRS", desc.element in table.paired),
            *(("R", r), ("C", length), ("NW", warps)),
            ("FULL", full),
        ),
        warps=warps,
        **_operands(lying, _PARTS),
    )


def _by_warp(desc: ScanBackwardDescriptor, lying: Lined, table: Table) -> Step | None:
    """A row in one run."""
    n = lying.geometry.axis.size
    most = table.number_of(table.alone_rows, "alone_rows", desc.kind, desc.element)
    if n > most or n != up(n) or n < _LEAST * _LANES:
        return None
    return Step(
        kernel="row_alone.scan_row_alone",
        grid=lying.geometry.rows.size,
        constants=(*_constants(desc, lying), ("E", n // _LANES)),
        warps=1,
        **_operands(lying, _PARTS[:1]),
    )


def _constants(desc: ScanBackwardDescriptor, lying: Lined) -> list[tuple[str, Any]]:
    names = ("KIND", desc.kind.value), ("TIES", desc.ties.value), ("ELEMENT", desc.element.value)
    return [*names, ("FLIP", lying.flip)]


def _operands(lying: Lined, parts: Sequence[str]) -> dict[str, Any]:
    """The arguments of a step, of all operands but y, and what divides them."""
    geometry = lying.geometry
    used = ("dy", "x", "out")
    pointers = dict(pointers_of(geometry, ("dy", "x", "y", "dx"), lying.modes))
    given = dict(geometry.arguments())
    alignment, aligned = geometry.alignment(geometry.axis.size, lying.modes)
    return {
        "arguments": (
            *((name, pointers[name]) for name in used),
            ("row_dims", given["row_dims"]),
            *((f"{part}_{name}", given[f"{part}_{name}"]) for part in parts for name in used),
            ("n", integer(geometry.axis.size)),
        ),
        "alignment": alignment,
        "aligned": aligned,
    }
