"""The launches of reductions whose forward pass learns something for the backward pass; see
`kernels.learned`. No plan asks for them: `gradplan.torch` does, which runs both passes."""

from __future__ import annotations

from ...kinds import ElementKind, ReduceKind
from .launch import Argument, Pointer, Step, all_registers
from .program import TYPES, Program, down, integer, up
from .table import Table

__all__ = ["extrema", "gradient"]

_MEANS = (ReduceKind.VAR, ReduceKind.STD)
_ALIGNMENT = 16
"""What divides n."""


def extrema(kind: ReduceKind, element: ElementKind, rows: int, n: int, table: Table) -> Program:
    """From x to y, the maximum or minimum of each row, and what is known of its winners: i32."""
    c = min(up(n), down(table.learned_bytes // element.size_bytes))
    r = min(up(rows), max(1, table.row_tile // c))
    warps = max(1, min(32, down(r * c * element.size_bytes // (32 * table.learned_thread))))
    step = Step(
        kernel="learned.extrema",
        grid=-(-rows // r),
        arguments=(
            ("x", Pointer("x", TYPES[element])),
            ("y", Pointer("y", TYPES[element])),
            ("known", Pointer("known", "i32")),
            *_extents(rows, n),
        ),
        constants=(
            ("KIND", kind.value),
            ("ELEMENT", element.value),
            ("R", r),
            ("C", c),
            ("W", 16 // element.size_bytes),
            ("FULL", n % c == 0 and rows % r == 0),
        ),
        warps=warps,
        registers=all_registers(warps),
        alignment=_ALIGNMENT,
        aligned=("n",),
    )
    return _program(step, "extrema", "one read, which tells y and where it is")


def gradient(
    kind: ReduceKind,
    element: ElementKind,
    rows: int,
    n: int,
    alike: bool,
    correction: float,
    table: Table,
) -> Program:
    """The gradient from dy, x, y (not of var) and what is known of each row: of var and std its
    mean. `alike`: dy is one number for all rows."""
    room = table.map_bytes // element.size_bytes
    c = min(up(n), room)
    r = min(up(rows), max(1, room // c))
    m = n - correction
    p = (2.0 if kind is ReduceKind.VAR else 1.0) / (m if m > 0 else 1.0)
    type_ = TYPES[element]
    y = None if kind is ReduceKind.VAR else Pointer("y", type_)
    pointers: tuple[tuple[str, Argument], ...] = (
        ("dy", Pointer("dy", type_)),
        ("x", Pointer("x", type_)),
        ("y", y),
        ("known", Pointer("known", type_ if kind in _MEANS else "i32")),
        ("out", Pointer("dx", type_)),
    )
    step = Step(
        kernel="learned.map_learned",
        grid=-(-rows // r) * -(-n // c),
        arguments=(*pointers, *_extents(rows, n), ("p", p), ("q", 1.0 / n)),
        constants=(
            ("KIND", kind.value),
            ("ELEMENT", element.value),
            ("ALIKE", alike),
            ("R", r),
            ("C", c),
            ("FULL", n % c == 0 and rows % r == 0),
        ),
        warps=4,
        alignment=_ALIGNMENT,
        aligned=("n",),
    )
    return _program(step, "map_learned", "a map by what the forward pass told of each row")


def _extents(rows: int, n: int) -> tuple[tuple[str, Argument], ...]:
    return ("rows", integer(rows)), ("n", integer(n))


def _program(step: Step, variant: str, why: str) -> Program:
    return Program(
        steps=(step,),
        runner=None,
        workspace_bytes=0,
        reads={},
        layout="rows",
        variant=variant,
        why=why,
    )
