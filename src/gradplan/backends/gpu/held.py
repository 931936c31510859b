"""The launches of the engine *row state then map* whose parts wait in the shared memory of programs
that stay (`kernels.held`), and when they are for a problem."""

from __future__ import annotations

from ...kinds import ElementKind, OpCategory
from .launch import WORKSPACE, Int, Pointer, Step, all_registers
from .program import Program, begun_anywhere, clearing, up
from .ragged import Ragged
from .row_tiles import BY_ROW, COUNTS, Rows

__all__ = ["program"]

_TERMS = 4096  # of bfloat16 that a warp may sum in f32: see `formulas.term`
_NARROW = 128  # bytes of rows side by side below which memory is much slower


def program(rows: Rows) -> Program | None:
    """None where that is not for a problem."""
    table, op, element = rows.table, rows.desc.op, rows.desc.element
    room, warps = table.part_of(f"held_{rows.layout}", op, element)
    fit = rows.in_runs and rows.even and rows.many == 1 and not rows.ordered
    fit = fit and not isinstance(rows, Ragged)
    if not room or not fit or element is ElementKind.F64:
        return None
    by_row = [mode in BY_ROW for mode in rows.modes[:3]]
    given = [mode != "n" for mode in rows.modes[:3]]
    reduced = rows.desc.category is OpCategory.REDUCTION
    # Elements meet at most one operand of one value a row.
    if by_row[1] or by_row == given or (by_row[0] and by_row[2] and not reduced):
        return None
    programs = table.fill // 2  # one for each processor
    joiners = 4  # warps, beside those that take states and as many that write gradients
    met = (0, 2) if not reduced else (1, 2) if op in COUNTS else (1,)  # see `operands_of`
    arrays = sum(rows.modes[k] in ("t", "c") for k in met)
    classes = max(1, rows.classes)
    n = -(-rows.n // classes)  # places of a class
    r = 1
    if rows.columns:
        r = min(up(rows.beside.extent), table.held_width // arrays // rows.item, 32 * warps)
        # Strips half as wide have half as many parts, if a row would have too many: for all to
        # be held, or for those who join to ask for their states at a time, or twice.
        many = classes * -(-n // _places(rows, n, room // r, warps))
        asked = _heard(rows, joiners, r) * (2 if rows.product else 1)
        if r * rows.item > _NARROW and many > min(programs, asked):
            r //= 2
    # A warp's loads lie along the axis, but for rows side by side.
    least = warps * 512 // rows.item // r * (2 if rows.product else 1)
    c = _places(rows, n, room // r, warps)
    while c > least and rows.tiles(r) * classes * -(-n // c) < programs >= classes * -(
        -n // (c // 2)
    ):
        c //= 2
    parts = classes * -(-n // c)
    units = rows.tiles(r) * parts
    stages = min(8, table.held_bytes // (r * c * rows.item * arrays))
    # All parts of a row have room at the same time, and twice as many to be read meanwhile; of
    # them a strip of a class needs those of its neighbours too.
    most = programs * (stages // 3)
    if c < least or not 1 < parts <= most or units >= 2**31 - 8 * programs:
        return None
    wide = rows.product or (element is ElementKind.F32 and op not in COUNTS)
    words = -(-(units + (rows.classes > 0)) * r * (8 if wide else 4) // 8)
    lanes = 32 * joiners // r  # threads that join the states of a row
    heard = max(up(parts), lanes)
    if heard > _heard(rows, joiners, r):
        heard = 16 * lanes
    launch = Step(
        kernel="held.held_rows",
        grid=min(programs, units),
        arguments=(
            *rows.pointers,
            ("told", Pointer(WORKSPACE, "fp64" if wide else "fp32")),
            *(pair for pair in rows.arguments if pair[0] not in ("axis_order", "order_base")),
            ("parts", Int(parts, "i32")),
            ("units", Int(units, "i32")),
        ),
        constants=(
            *rows.constants,
            ("R", r),
            ("C", c),
            ("K", heard),
            ("MORE", parts > heard),
            ("STAGES", stages),
            ("NW", warps),
            ("JOINERS", joiners),
            ("REGISTERS", _registers(rows, rows.every(r, c))),
            ("PAIRS", rows.paired),
            ("NEAR", rows.geometry.near(r, c * classes)),
            ("FULL", rows.every(r, c)),
            ("CLASSES", rows.classes),
        ),
        warps=warps,
        registers=all_registers(-(-(2 * warps + joiners) // 4) * 4),
        alignment=rows.alignment,
        aligned=rows.aligned,
        together=True,
    )
    if rows.classes:
        launch = begun_anywhere(launch, launch.kernel, ())
    return Program(
        steps=(clearing(0, words), launch),
        runner=None,
        workspace_bytes=8 * words * rows.slots,
        reads={},
        layout=rows.layout,
        variant="held",
        why=f"rows are cut into {parts} parts, kept in shared memory"
        + (", by where they begin within 16 bytes" if rows.classes else "")
        + ": one read",
    )


def _places(rows: Rows, n: int, room: int, warps: int) -> int:
    """Places of a part that is held, of n, where there is room for so many."""
    c = min(up(n), room)
    # Halves that are not compared two at a time take more registers.
    if rows.columns and rows.half and rows.desc.op in COUNTS and not rows.paired:
        c //= 2
    halved = rows.product or (_nested(rows) and rows.desc.op in rows.table.held_halved)
    if rows.classes and rows.half and halved:
        c //= 2
    while rows.half and c // warps > _TERMS:
        c //= 2
    return c


def _heard(rows: Rows, joiners: int, r: int) -> int:
    """How many states of each of r rows so many warps ask for at a time: as many as registers
    hold."""
    return 32 * joiners // r * (16 if rows.product else 32)


def _registers(rows: Rows, every: bool) -> tuple[int, int]:
    """Of threads that write gradients, and that join states."""
    anywhere = "held_nested" if _nested(rows) else "held_classes"
    place = "held_registers" if every else anywhere if rows.classes else "held_masked"
    return rows.table.part_of(place, rows.desc.op, rows.desc.element)


def _nested(rows: Rows) -> bool:
    """Whether rows lie in several dimensions."""
    return len(rows.geometry.rows.dims) > 1
