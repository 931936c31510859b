"""The launches of the engine *recurrence*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...descriptors import ScanBackwardDescriptor
from ...kinds import ElementKind, ScanKind, TieRule
from . import walked
from .chained import ALIGNED, PLACES, changed, cut_of
from .chained import steps as chained_steps
from .launch import COUNTERS, WORKSPACE, Argument, Int, Pointer, Step, all_registers
from .operands import lined, pointers_of
from .program import EMPTY, HALVES, TURNS, Program, Strides, down, integer, up
from .table import Table

__all__ = ["program", "workspace_bytes"]


def program(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> Program:
    """The program for arrays with these strides."""
    shape, _ = desc.shape_and_axes
    if 0 in shape:
        return EMPTY
    made = _tiled(desc, strides, table)
    marked = bool(desc.spec.ties)
    needs_y = desc.kind in (ScanKind.CUMPROD, ScanKind.LOG_CUMSUM_EXP)
    if (needs_y and "y" not in strides) or (marked and not table.marks):
        return made
    used = {"dy", "dx", *(("x", "y") if needs_y else ("x",) if marked else ())}
    given = {name: steps for name, steps in strides.items() if name in used}
    walk = walked.program(desc, lined(desc, given), table)
    if walk is None:
        return made
    room = max(walk.workspace_bytes, made.workspace_bytes)
    return replace(walk, unaligned=made, workspace_bytes=room)


def _tiled(
    desc: ScanBackwardDescriptor, strides: Strides, table: Table, *, marks: bool = True
) -> Program:
    """The same of tiles in registers.

    `marks`: cummax and cummin may read x in a launch of its own, which leaves a bit a place.
    """
    from_y = "y" in strides
    kind, ties = desc.kind, desc.ties if desc.spec.ties else None
    sources = ("dy", "x", "y", "dx")
    used = dict(strides)
    if kind is ScanKind.CUMSUM:
        used.pop("x", None)
        used.pop("y", None)
    elif from_y and ties is TieRule.FIRST:
        used.pop("x")  # y alone tells the winners
        marks = False
    # Halves are bound by instructions, not by what they read: of them y tells more.
    marks = marks and table.marks and ties is not None and not (from_y and desc.element in HALVES)
    if marks:
        from_y = False
        used.pop("y", None)
    geometry, modes, flip, columns = lined(desc, used)
    n, row_count = geometry.axis.size, geometry.rows.size
    beside = geometry.rows.dims[0]
    if marks and not {*modes} <= ({"c", "n"} if columns else {"t", "n"}):
        return _tiled(desc, strides, table, marks=False)
    recomputes = kind is not ScanKind.CUMSUM and not from_y and not marks
    length = up(n)
    item = desc.element.size_bytes
    size = 2 if desc.element is ElementKind.F64 else 1
    small = size
    if columns and kind is ScanKind.LOG_CUMSUM_EXP and recomputes and not {*modes} <= {"c", "n"}:
        small = 8  # what is not read in runs takes registers of its own
    resident = length <= (table.scan_columns if columns else table.scan_resident) // small
    if columns:
        few = resident or recomputes
        r = (table.column_bytes if few else table.scan_column_bytes) // item
        if not few and kind is ScanKind.LOG_CUMSUM_EXP:
            r //= 4  # numbers of a row in f64
        r = min(up(beside.extent), max(1, r))
        step_size = table.scan_column_few if few else table.scan_column_step
        c = length if resident else min(length, max(2, step_size // small))
    else:
        r = 1
        if resident:
            r = min(up(beside.extent), max(1, table.scan_tile // size // length))
        c = length if resident else min(length, table.scan_step // size)
    # Factors rounded one by one add up their errors: long products are f64.
    wide = desc.element is ElementKind.F64 or (kind is ScanKind.CUMPROD and n > table.scan_product)
    tiles = -(-beside.extent // r) * (row_count // beside.extent)
    constants: list[tuple[str, Any]] = [
        ("KIND", kind.value),
        ("TIES", ties.value if ties else ""),
        ("ELEMENT", desc.element.value),
        *zip(("DY", "X", "Y", "OUT"), modes, strict=True),
    ]
    rest: list[tuple[str, Any]] = [
        ("FLIP", flip),
        ("WIDE", wide),
        ("R", r),
        ("C", c),
        ("FULL", n % c == 0 and beside.extent % r == 0),
    ]
    alignment, aligned = geometry.alignment(n, modes)
    pointers = pointers_of(geometry, sources, modes)
    arguments = [*geometry.arguments(), ("n", integer(n))]
    warps = _scan_warps(r * c * small, table)
    if columns and recomputes and item == 2 and warps == 8 and not flip:  # which takes registers
        warps = 4
    if columns and not (resident or recomputes):  # no two threads share a row
        warps = max(1, r * item // 512)
    layout = "columns" if columns else "rows"
    source = "_marked" if marks else "_from_y" if from_y else "_recomputed"
    if kind is ScanKind.CUMSUM:
        source = ""

    gates = ties is not None
    lines = not recomputes and {*modes} <= ({"c", "n"} if columns else {"t", "n"})
    place, ahead = "lines", 0
    short = table.side_of("short_side", kind, desc.element)
    if columns and lines and (not resident or length >= 2 * short[2]):
        for place in ("short_side",) if resident else ("side", "narrow_side"):
            side, m, v, most = table.side_of(place, kind, desc.element)
            r = max(1, side // (2 if wide and item > 2 else 1))
            if resident:  # a tile of as many elements
                r, m = max(1, r * m * v // length), length // v
            r = min(up(beside.extent), r)
            tiles = -(-beside.extent // r) * (row_count // beside.extent)
            if tiles >= table.strips:
                break
        cut = tiles < table.scan_fill and ties is not None
        # Such tiles take more registers.
        more = marks and item == 2
        if not resident and (cut or more or n % (m * v) or beside.extent % r):
            m = max(2, m // 2)
        c = m * v
        warps = max(1, min(most, r * m // 32))
        ahead = table.number_of(table.ahead, place, kind, desc.element)
    elif lines and not columns:
        v = max(1, 16 // item)
        tile, each = table.lines_of(kind, desc.element, length)
        if wide and size == 1:  # computed in f64
            tile, each = tile // 2, min(each, 8)
        resident = length <= tile
        c = max(2 * v, min(length, tile))
        r = min(up(beside.extent), max(1, tile // c)) if resident else 1
        tiles = -(-beside.extent // r) * (row_count // beside.extent)
        warps = max(1, tile // (32 * each))
    else:
        lines = False
    along_tiles = -(-n // c)
    full = n % c == 0 and beside.extent % r == 0
    base = 0  # bytes of words, before all else in the workspace
    marking: list[Step] = []
    if marks:
        if not lines or (columns and not resident and tiles < table.scan_fill):
            return _tiled(desc, strides, table, marks=False)
        word = max(1, v // 8)
        words = Pointer(WORKSPACE, {1: "i8", 2: "i16", 4: "i32"}[word])
        base = -(-word * row_count * -(-n // v) // ALIGNED) * ALIGNED
        given = ("row_dims", "row_x", "axis_x", "n")
        x_alone = (*given, "row_dims:0", "row_x:1")
        marking = [
            Step(
                kernel="winners.mark_winners",
                grid=tiles,
                arguments=(
                    ("x", dict(pointers)["x"]),
                    ("words", words),
                    ("told", None),
                    *(pair for pair in arguments if pair[0] in given),
                ),
                constants=(
                    *(("KIND", kind.value), ("TIES", constants[1][1]), ("PHASE", "whole")),
                    *(("FLIP", flip), ("WIDE", wide), ("SIDE", columns)),
                    *(("R", r), ("M", c // v), ("V", v), ("B", 1), ("LEVELS", 1), ("T", 1)),
                    *(("W", warps), ("FULL", full)),
                ),
                warps=warps,
                alignment=alignment,
                aligned=tuple(name for name in aligned if name in x_alone),
            )
        ]
        if not columns:  # in tiles of its own
            tile, each = table.lines_of(ScanKind.CUMSUM, desc.element, length)
            step = max(2 * v, min(length, tile))
            together = min(up(beside.extent), max(1, tile // step)) if length <= tile else 1
            whole = n % step == 0 and beside.extent % together == 0
            count = -(-beside.extent // together) * (row_count // beside.extent)
            marking = [
                changed(
                    marking[0],
                    table,
                    max(1, tile // (32 * each)),
                    grid=count,
                    R=together,
                    M=step // v,
                    FULL=whole,
                )
            ]
        absent = {"x": None, "y": words}
        pointers = [(name, absent.get(name, value)) for name, value in pointers]
        modes_now = {"X": "n", "Y": "b"}
        constants = [(name, modes_now.get(name, value)) for name, value in constants]
    registers = 0
    if full and not wide and (columns or not resident):
        registers = table.number_of(table.registers, place, kind, desc.element)
    # Lest the assembler spill a few registers where it has more.
    tight = (
        table.roomy
        or resident
        or kind is ScanKind.CUMSUM
        or (columns and kind is ScanKind.LOG_CUMSUM_EXP)
        or not full
    )
    window = table.side_window

    def tile_step(
        phase: str,
        steps: int,
        carries: Pointer | None = None,
        states: Pointer | None = None,
        lead: int = 0,
    ) -> Step:
        if lines:
            # Two reads in one program need more, of rows side by side.
            given = registers if phase in ("whole", "resident") or not columns else 0
            return Step(
                kernel="lines.scan_lines",
                grid=tiles * -(-along_tiles // steps) * (2 if lead else 1),
                arguments=(
                    *pointers,
                    ("carries", carries),
                    ("counters", Pointer(COUNTERS, "i32") if lead else None),
                    *arguments,
                    ("steps", Int(steps, "i32")),
                    ("lead", Int(lead, "i32")),
                    ("window", Int(window, "i32")),
                ),
                constants=(
                    *(pair for pair in constants if pair[0] not in ("DY", "OUT")),
                    ("PHASE", phase),
                    ("FLIP", flip),
                    ("WIDE", wide),
                    ("SIDE", columns),
                    ("R", r),
                    ("M", c // v),
                    ("V", v),
                    ("K", joins if lead else 1),
                    ("AHEAD", ahead if phase == "whole" else 0),
                    ("PAIRS", ties is TieRule.LAST and desc.element in table.paired),
                    ("FULL", full),
                ),
                warps=warps,
                registers=given or (all_registers(warps) if tight else 0),
                alignment=alignment,
                aligned=aligned,
            )
        return Step(
            kernel="recurrence.scan_tile",
            grid=tiles * -(-along_tiles // steps),
            arguments=(
                *pointers,
                ("carries", carries),
                ("states", states),
                *arguments,
                ("steps", Int(steps, "i32")),
            ),
            constants=(*constants, ("PHASE", phase), *rest),
            warps=warps,
            registers=all_registers(warps) if recomputes or table.roomy else 0,
            alignment=alignment,
            aligned=aligned,
        )

    def made(
        steps: Sequence[Step],
        variant: str,
        why: str,
        workspace: int = 0,
        again: int = 1,
        **more: Any,
    ) -> Program:
        return Program(
            steps=(*marking, *steps),
            runner=None,
            workspace_bytes=base + workspace,
            reads={
                "dy": again,
                "x": 1 if marks else (again + (recomputes and workspace > 0)) if "x" in used else 0,
                "y": 0 if marks else again,
            },
            layout=layout,
            variant=variant + source,
            why=why,
            **more,
        )

    if resident:
        return made(
            [tile_step("resident", 1)],
            "resident",
            f"a program keeps {r} whole row{'s' if r > 1 else ''} in registers: one read",
        )
    cut_up = cut_of(kind, desc.element, n, tiles, table) if lines and not columns else None
    if cut_up is not None:
        if marks and "y" in strides:
            return _tiled(desc, strides, table, marks=False)
        chain = Step(
            kernel="chains.scan_chain",
            grid=0,
            arguments=(*pointers, ("told", None), *arguments),
            constants=(
                *(pair for pair in constants if pair[0] not in ("DY", "OUT")),
                *(("FLIP", flip), ("WIDE", wide), ("M", 0), ("V", v), ("B", 0), ("LEVELS", 0)),
                *(("T", 0), ("W", 0)),
                ("PAIRS", ties is TieRule.LAST and desc.element in table.paired),
                ("FULL", False),
            ),
            warps=0,
            alignment=alignment,
            aligned=aligned,
        )
        mark = marking[0] if marks else None
        launched, told = chained_steps(cut_up, chain, mark, table, n=n, rows=tiles, base=base)
        marking = launched[:-1]
        why = f"rows are cut into {cut_up.parts} tiles, each read once, that wait for what arrives"
        return made(launched[-1:], "chained", why, told)
    if tiles >= (table.scan_fill if lines else table.fill) and not recomputes:
        why = f"rows enough to fill the machine, each in tiles of {c} from its far end"
        return made([tile_step("whole", along_tiles)], "tiled", why)
    steps_each = 1
    if lines:
        steps_each = max(table.side_chunk // c, 1)
    elif not recomputes:
        # Carries are to be few beside the elements.
        steps_each = max(table.scan_chunk // c, along_tiles * tiles // (8 * table.fill), 1)
    chunks = -(-along_tiles // steps_each)
    slots = tiles * chunks * r
    carries = Pointer(WORKSPACE, "fp64", base)
    tiled = recomputes and tiles >= table.fill  # then there are no carries
    states = Pointer(WORKSPACE, "fp64", 0 if tiled else 16 * slots) if recomputes else None
    launches = []
    lanes = r if lines else min(r, table.join_lanes)
    joins = max(2, table.join // lanes)
    # The same in one launch has windows, which are whole numbers of them.
    joins = min(joins, window if lines else up(chunks))
    join_warps = max(1, min(4, lanes * joins // 32))
    common: list[tuple[str, Argument]] = [
        ("total", Int(slots)),
        ("tiles_along", Int(chunks, "i32")),
    ]
    joined: list[tuple[str, Any]] = [
        ("FLIP", flip),
        ("R", r),
        ("J", lanes),
        ("K", joins),
    ]
    if states is not None:
        x = next(value for name, value in pointers if name == "x")
        launches.append(
            Step(
                kernel="recurrence.scan_states",
                grid=tiles * along_tiles,
                arguments=(
                    ("x", x),
                    ("states", states),
                    *(pair for pair in arguments if pair[0] in ("row_dims", "row_x")),
                    *(pair for pair in arguments if pair[0] in ("axis_dims", "axis_x")),
                    ("n", integer(n)),
                ),
                constants=(
                    ("KIND", kind.value),
                    ("ELEMENT", desc.element.value),
                    ("X", modes[1]),
                    ("R", r),
                    ("C", c),
                    ("FULL", n % c == 0 and beside.extent % r == 0),
                ),
                warps=warps,
                alignment=alignment,
                aligned=tuple(
                    name
                    for name in aligned
                    if name in ("n", "row_dims:0", "row_x", "row_x:1", "axis_x")
                ),
            )
        )
        launches.append(
            Step(
                kernel="recurrence.join_states",
                grid=tiles * (r // lanes),
                arguments=(("states", states), *common),
                constants=(("KIND", kind.value), *joined),
                warps=join_warps,
            )
        )
        if tiled:
            launches.append(tile_step("whole", along_tiles, None, states))
            why = f"rows enough to fill the machine, each in tiles of {c}, after a look at x"
            return made(launches, "tiled", why, 16 * slots)
    launches.append(tile_step("partial", steps_each, carries, states))
    launches.append(
        Step(
            kernel="recurrence.join_carries",
            grid=tiles * (r // lanes),
            arguments=(("carries", carries), *common),
            constants=(("GATES", "" if not gates else "open" if lines else "winners"), *joined),
            warps=warps if lines else join_warps,
        )
    )
    launches.append(tile_step("apply", steps_each, carries, states))
    pieces = f"rows are cut into {chunks} chunks"
    size = 8 * slots * (2 + (2 if recomputes else 0))
    windows = -(-chunks // window)
    if lines and table.scan_lag and kind in table.lagged_scans and 2 * tiles * chunks < TURNS:
        # What is read before it is read again is to stay in the cache.
        each = steps_each * c * r * item * sum(mode != "n" for mode in modes[:3])
        ahead = min(tiles * chunks, max(min(chunks, window), table.scan_lag // each))
        return made(
            [tile_step("lagged", steps_each, carries, lead=ahead)],
            "lagged",
            f"{pieces}, read twice in one launch, the second time from the cache",
            size + 16 * r * tiles * windows,
            counters=1 + tiles * windows,
            apart=tuple(launches),
        )
    return made(launches, "split", f"{pieces} that meet through carries", size, again=2)


def _scan_warps(words: int, table: Table) -> int:
    return max(1, min(16, down(words // (32 * table.scan_words))))


def workspace_bytes(desc: ScanBackwardDescriptor, table: Table) -> int:
    """The most workspace that any layout of a problem with elements needs."""
    shape, (axis,) = desc.shape_and_axes
    n = shape[axis]
    rows = prod(shape) // n
    words = 4  # carries, and states or what windows hand on
    bound = 0
    tile, _ = table.lines_of(desc.kind, desc.element)
    chained = [table.part_of(place, desc.kind, desc.element)[0] for place in PLACES]
    # What is not read in runs is taken in smaller steps.
    small = 8 if desc.kind is ScanKind.LOG_CUMSUM_EXP else 2
    columns = table.scan_chunk
    if desc.kind is not ScanKind.CUMSUM:  # which may be recomputed
        columns = min(columns, table.scan_column_few // small)
    for used, limit, step in (
        (True, table.scan_resident // 2, table.scan_step // 2),
        (True, tile // 2, tile // 2),
        *((True, tile, tile) for tile in chained if tile),
        (rows > 1, table.scan_columns // small, min(columns, table.side_chunk // 2)),
    ):
        if used and up(n) > limit:
            # Rows taken together are padded to a power of two: at most twice as many.
            most = 2 * rows * -(-n // max(2, step))
            bound = max(bound, 8 * words * most)
    if bound:
        bound += 2 * ALIGNED
    if desc.spec.ties and table.marks:  # a word a line
        sides = (table.side, table.short_side, table.narrow_side)
        lines = (one[2] for side in sides for entry in side for one in entry[1:])
        least = min(max(1, 16 // desc.element.size_bytes), *lines)
        bound += ALIGNED + 2 * rows * -(-n // min(8, least))
    return max(bound, walked.workspace_bytes(desc, table))
