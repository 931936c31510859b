"""The launches of the engines *map* and *row state then map*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...descriptors import BinaryParamBackwardDescriptor, ReduceBackwardDescriptor
from ...geometry import Dim, Nest, c_strides, nest
from ...kinds import BinaryKind, ElementKind, OpCategory, ReduceKind, TieRule
from ...registry import Engine
from .launch import (
    COUNTERS,
    WORKSPACE,
    Argument,
    Int,
    Pointer,
    Step,
    all_registers,
)
from .operands import geometry_of, pointers_of
from .program import EMPTY, HALVES, TURNS, Program, Strides, clearing, down, integer, up
from .table import Table

__all__ = ["program", "workspace_bytes"]

_COUNTS = (ReduceKind.MAX, ReduceKind.MIN)  # whose state is how many are equal
_STATE_SLOTS = {ReduceKind.PROD: 4}
_NUMBER_SLOTS = {ReduceKind.PROD: 6}
_JOINED = ("row_dims", "row_dy", "row_y", "axis_dims", "axis_dy", "axis_y", "p", "q")
_PARTS = ("lagged_rows", "lagged_columns", "cluster_rows", "cluster_columns")


def program(desc: Any, strides: Strides, table: Table, aligned: bool = True) -> Program:
    """The program for arrays with these strides, whose addresses 16 divides or need not."""
    shape, axes = desc.shape_and_axes
    rank = len(shape)
    reduced = desc.category is OpCategory.REDUCTION
    outputs = [op.name for op in desc.operands if op.output and op.name in strides]
    if 0 in shape or not outputs:
        return EMPTY
    unread: dict[str, int] = {}
    given = strides
    if desc.op == ReduceKind.PROD:  # the product is taken anew, in f64
        unread = {"y": 0}
        strides = {name: steps for name, steps in strides.items() if name != "y"}
    sources = ("dy", "x", "y", *outputs)
    steps: list[Sequence[int]] = [strides.get(name, (0,) * rank) for name in sources]
    ties = desc.ties if desc.spec.ties else None
    order = [0] * rank
    if ties in (TieRule.FIRST, TieRule.LAST):
        for axis, stride in zip(axes, c_strides([shape[axis] for axis in axes]), strict=True):
            order[axis] = stride
    steps.append(order)
    lead = 3
    extent = prod(shape[axis] for axis in axes) if reduced else 0
    p, q = _params(desc, extent, strides)
    if desc.spec.engine is Engine.MAP or ties is TieRule.ALL:
        return _map(desc, strides, table, shape, steps, outputs, p, q)

    along = nest(shape, axes, steps, lead)
    across = nest(shape, [axis for axis in range(rank) if axis not in axes], steps, lead)
    geometry = geometry_of(desc, strides, outputs, across, along)
    n, row_count = along.size, across.size
    inner, beside = along.dims[0], across.dims[0]
    columns = beside.extent > 1 and (
        abs(beside.strides[lead]) < abs(inner.strides[lead]) or inner.extent == 1
    )
    modes = [geometry.mode(k, output=k >= 3, unit=columns) for k in range(4)]
    size = 2 if desc.element is ElementKind.F64 else 1
    full = max(1, sum(mode in ("t", "c", "s", "a") for mode in modes[:3]))
    # Products keep more beside their rows, and so do rows side by side.
    words = (
        full * size * (table.column_factor if columns else 2 if desc.op == ReduceKind.PROD else 1)
    )
    length = up(n)
    beside_tiles = row_count // beside.extent
    least = 1
    if columns:
        least = min(up(beside.extent), max(1, 32 // desc.element.size_bytes))
    # Long rows of halves wait in registers two by two.
    half = desc.element in HALVES
    prod_kind = desc.op == ReduceKind.PROD
    # What is not read in runs, or is told apart by its place, takes registers of its own.
    alignment, divided = geometry.alignment(n, modes)
    ordered = ties in (TieRule.FIRST, TieRule.LAST)
    rough = ordered or bool({"s", "a"} & {*modes})
    plain = n == length and alignment == 16 and not (rough or columns)
    packed = 2 if plain and half and not prod_kind and length >= table.packed else 1
    # Places on an axis of several dimensions are divisions: they take registers too.
    many = 4 if len(along.dims) > 1 else 1
    most = table.resident_words // 2 if rough else table.resident_words * packed
    resident = length * least * words * many <= most
    arguments: list[tuple[str, Argument]] = [
        *geometry.arguments(),
        ("axis_order", tuple(dim.strides[4] for dim in along.dims)),
        ("order_base", Int(along.offsets[4])),
        ("n", integer(n)),
        ("p", p),
        ("q", q),
    ]
    constants: list[tuple[str, Any]] = [
        ("KIND", desc.op.value),
        ("TIES", ties.value if ties else ""),
        ("ELEMENT", desc.element.value),
        *zip(("DY", "X", "Y", "OUT"), modes, strict=True),
    ]
    # What is compared two at a time lies in runs, read and written alike.
    paired = (
        desc.element in table.paired
        and desc.op in _COUNTS
        and ties is TieRule.SPLIT
        and modes[1] == modes[3]
        and modes[1] in ("t", "c")
        and {modes[0], modes[2]} <= {"r", "u"}
        and alignment == 16
    )
    pointers = pointers_of(geometry, sources, modes)
    layout = "columns" if columns else "rows"
    if prod_kind:
        length = max(2, length)
    slots = _STATE_SLOTS.get(desc.op, 1)
    number_slots = _NUMBER_SLOTS.get(desc.op, 3)

    place = ""  # of the number of registers in the table

    def step(
        phase: str,
        r: int,
        c: int,
        warps: int,
        parts: int = 1,
        states: Pointer | None = None,
        lead: int = 0,
    ) -> Step:
        registers = ahead = 0
        every = n == c * parts and beside.extent % r == 0
        strided = "s" in modes and (prod_kind or phase == "lagged")
        masked = phase in ("cluster", "lagged") and not every
        deviates = desc.op in (ReduceKind.VAR, ReduceKind.STD)
        loose = phase == "whole" and columns and deviates and not every
        if many > 1 or (prod_kind and (r > 1 or masked)) or strided or ordered or loose:
            registers = all_registers(warps)
        elif every and place and phase in ("lagged", "cluster"):
            registers = table.number_of(table.registers, place, desc.op, desc.element)
            if phase == "cluster" and "t" in modes[:3] and alignment == 16:
                ahead = table.number_of(table.ahead, place, desc.op, desc.element)
        elif (phase, warps, full, plain) == ("whole", 32, 1, True) and half and not prod_kind:
            # Two programs of the longest rows at a time.
            warps, registers = (16, 64) if deviates else (32, 32)
        return Step(
            kernel="rows.row_tiles",
            grid=-(-beside.extent // r) * beside_tiles * parts * (2 if lead else 1),
            arguments=(
                *pointers,
                ("states", states),
                ("counters", Pointer(COUNTERS, "i32") if lead else None),
                *arguments,
                ("parts", Int(parts, "i32")),
                ("lead", Int(lead or table.fill * ahead // parts, "i32")),
            ),
            constants=(
                *constants,
                ("PHASE", phase),
                ("R", r),
                ("C", c),
                ("W", _grouped(desc.element, prod_kind, modes[3] == "t", r, c, warps)),
                ("CAREFUL", max(1, min(c, 64 * warps // r)) if prod_kind else 1),
                (
                    "K",
                    _joined(r, table) if lead else up(table.cluster) if phase == "cluster" else 1,
                ),
                ("PAIRS", paired and every),
                ("NEAR", geometry.near(r, c)),
                ("AHEAD", ahead > 0),
                ("FULL", every),
            ),
            warps=warps,
            cluster=parts if phase == "cluster" else 1,
            registers=registers,
            alignment=alignment,
            aligned=divided,
        )

    item = desc.element.size_bytes
    if resident:
        tile = table.row_tile
        if columns and not rough:
            tile = max(tile, table.column_tile // item // (2 if prod_kind else full))
        room = max(least, min(tile, table.resident_words // words) // many // length)
        if columns:
            room = max(least, min(room, table.column_bytes // desc.element.size_bytes))
        r = min(up(beside.extent), down(room))
        warps = _warps(r * length * many, full, packed if full > 1 else 1, half, table)
        return Program(
            steps=(step("whole", r, length, warps),),
            runner=None,
            workspace_bytes=0,
            reads=unread,
            layout=layout,
            variant="resident",
            why=f"a program keeps {r} whole row{'s' if r > 1 else ''} in registers: one read",
        )

    together = {"c" if columns else "t", "r", "u", "n"}
    # Otherwise a pointer for each element.
    in_runs = {*modes} <= together and not (columns and alignment < 16)

    def cut(where: str, width: int) -> tuple[int, int, int, int]:
        """Rows side by side, places and warps of a part, and how many parts a row has."""
        room, warps = table.part_of(where, desc.op, desc.element)
        room //= many
        if not in_runs:
            room = min(room, table.strided_tile // full // many)
            warps = max(1, room // 512)
        each = max(1, room // warps)
        r = min(up(beside.extent), max(1, width // item)) if columns else 1
        c = max(2, min(length // 2, room // r))
        while -(-beside.extent // r) * beside_tiles * -(-n // c) < table.fill:
            if c <= max(2, 1024 // r):
                break
            c //= 2
        if prod_kind and n % c:  # what is masked takes registers
            each //= 2
        return r, c, max(1, min(32, c * r // each)), -(-n // c)

    def held() -> Program | None:
        """Parts in the shared memory of programs that stay, if that is for this problem."""
        room, warps = table.part_of(f"held_{layout}", desc.op, desc.element)
        mapped = [mode for mode in modes[:3] if mode != "n"]
        small = sum(mode in ("r", "u") for mode in mapped)
        met = [mode for mode in (modes[0], modes[2]) if not reduced and mode in ("r", "u")]
        fit = in_runs and alignment == 16 and many == 1 and not ordered
        if not room or not fit or modes[1] in ("r", "u") or len(met) > 1:
            return None
        if desc.element is ElementKind.F64 or small == len(mapped):
            return None
        programs = table.fill // 2  # one for each processor
        r = min(up(beside.extent), table.lagged_width // item) if columns else 1
        row_tiles = -(-beside.extent // r) * beside_tiles
        # A warp's loads lie along the axis, but for rows side by side.
        least = warps * 512 // item // r * (2 if prod_kind else 1)
        c = min(length, room // r)
        alone = half and desc.op in _COUNTS and (n % c or beside.extent % r)
        if alone or not geometry.near(r, c):
            c //= 2  # more registers an element: not compared two at a time, or far apart
        while c > least and row_tiles * -(-n // c) < programs >= -(-n // (c // 2)):
            c //= 2
        parts = -(-n // c)
        if c < least or not 1 < parts <= programs or row_tiles * parts >= 2**31:
            return None
        every = n % c == 0 and beside.extent % r == 0
        lanes = 32 * warps // r  # threads that join the states of a row
        wide = prod_kind or (desc.element is ElementKind.F32 and desc.op not in _COUNTS)
        words = -(-row_tiles * parts * r * (8 if wide else 4) // 8)
        launch = Step(
            kernel="held.held_rows",
            grid=min(programs, row_tiles * parts),
            arguments=(
                *pointers,
                ("told", Pointer(WORKSPACE, "fp64" if wide else "fp32")),
                *(pair for pair in arguments if pair[0] not in ("axis_order", "order_base")),
                ("parts", Int(parts, "i32")),
                ("units", Int(row_tiles * parts, "i32")),
            ),
            constants=(
                *constants,
                ("R", r),
                ("C", c),
                ("K", min(max(up(parts), lanes), lanes * (4 if wide else 8))),
                ("STAGES", table.held_parts),
                ("PAIRS", paired and every),
                ("NEAR", geometry.near(r, c)),
                ("FULL", every),
            ),
            warps=warps,
            registers=all_registers(warps),
            alignment=alignment,
            aligned=divided,
            together=True,
        )
        return Program(
            steps=(clearing(0, words), launch),
            runner=None,
            workspace_bytes=8 * words * slots,
            reads=unread,
            layout=layout,
            variant="held",
            why=f"rows are cut into {parts} parts, kept in shared memory: one read",
        )

    stays = held() if aligned else None
    clustered = False
    if table.part_of(f"cluster_{layout}", desc.op, desc.element)[0]:
        r, c, warps, parts = cut(f"cluster_{layout}", table.lagged_width)
        clustered = parts <= table.cluster
    if not clustered:
        r, c, warps, parts = cut(f"lagged_{layout}", table.lagged_width)
        clustered = parts <= table.cluster and not columns
    first = table.number_of(table.held_first, f"held_{layout}", desc.op, desc.element)
    if stays is not None and (first or not clustered):
        other = program(desc, given, table, aligned=False)
        room = max(stays.workspace_bytes, other.workspace_bytes)
        return replace(stays, unaligned=other, workspace_bytes=room)
    if in_runs:
        place = f"{'cluster' if clustered else 'lagged'}_{layout}"
    tiles = -(-beside.extent // r) * beside_tiles
    states = Pointer(WORKSPACE, "fp64")
    pieces = f"rows are cut into {parts} parts"
    if clustered:
        return Program(
            steps=(step("cluster", r, c, warps, parts, states),),
            runner=None,
            workspace_bytes=8 * slots * tiles * parts * r,
            reads=unread,
            layout=layout,
            variant="cluster",
            why=f"{pieces}, kept in registers by the programs of a cluster: one read",
        )
    known = Pointer(WORKSPACE, "fp64", 8 * slots * tiles * parts * r)
    apart = (
        step("partial", r, c, warps, parts, states),
        Step(
            kernel="rows.join_rows",
            grid=tiles,
            arguments=(
                *(pair for pair in pointers if pair[0] in ("dy", "y")),
                ("states", states),
                ("joined", known),
                *(pair for pair in arguments if pair[0] in _JOINED),
                ("parts", Int(parts, "i32")),
            ),
            constants=(
                *(pair for pair in constants if pair[0] not in ("X", "OUT")),
                ("R", r),
                ("K", _joined(r, table)),
            ),
            warps=warps,
        ),
        step("apply", r, c, warps, parts, known),
    )
    twice = dict.fromkeys(("dy", "x", "y"), 2)
    waits = table.lag > 0 and 2 * tiles * parts < TURNS
    # So many tiles are read ahead that their states are known in time, and no more than the cache
    # keeps, unless a row is longer.
    reach = min(table.lag, max(1, table.lag_bytes // (c * r * item * full)))
    ahead = min(tiles * parts, max(parts, reach))
    lagged = step("lagged", r, c, warps, parts, states, ahead)
    return Program(
        steps=(lagged,) if waits else apart,
        apart=apart if waits else (),
        counters=1 + tiles if waits else 0,
        runner=None,
        workspace_bytes=known.offset + 8 * number_slots * tiles * r,
        reads=unread if waits and parts <= reach else {**twice, **unread},
        layout=layout,
        variant="lagged" if waits else "split",
        why=f"{pieces}, read twice in one launch, the second time from the cache"
        + (" as far as it reaches" if parts > reach else "")
        if waits
        else f"{pieces}, whose states are joined in order: two reads",
    )


def _joined(r: int, table: Table) -> int:
    """So many parts of r rows are joined at a time."""
    return max(2, table.join // r)


def _grouped(element: ElementKind, product: bool, inner: bool, r: int, c: int, warps: int) -> int:
    """How many elements (pairs, of a product) a thread may join before they become f64."""
    if element is ElementKind.F64 or (element is ElementKind.F32 and not product):
        return 1
    run = 16 // element.size_bytes
    places = c // 2 if product else c
    held = run if inner else r * places // (32 * warps * min(r, run))
    return max(1, min(8 if element in HALVES else 4, down(max(1, held)), places))


def _map(
    desc: Any,
    strides: Strides,
    table: Table,
    shape: Sequence[int],
    steps: Sequence[Sequence[int]],
    outputs: Sequence[str],
    p: float,
    q: float,
) -> Program:
    whole = nest(shape, range(len(shape)), steps, 3)
    along = Nest(whole.dims[:1], whole.offsets)
    nothing = (0,) * len(whole.offsets)
    across = Nest(whole.dims[1:] or (Dim(1, nothing),), nothing)
    geometry = geometry_of(desc, strides, outputs, across, along)
    n, lines = along.size, across.dims[0].extent
    modes = [geometry.mode(k, output=k >= 3) for k in range(3 + len(outputs))]
    room = table.map_bytes // desc.element.size_bytes
    c = min(up(n), room)
    if "a" in modes and lines > 1:  # what all rows share is read once for several of them
        c = min(c, room // 8)
    r = min(up(lines), max(1, room // c))
    grid = -(-n // c) * -(-lines // r) * (across.size // lines)
    extreme = desc.op == BinaryKind.LERP and any(
        weight != 0 and not 2.0**-100 < abs(weight) < 2.0**100 for weight in (p, q)
    )
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
    return Program(
        steps=(step,),
        runner=None,
        workspace_bytes=0,
        reads={},
        layout="flat" if flat else "rows",
        variant="map",
        why="one flat run of elements" if flat else f"tiles of {r} × {c}, as the output lies",
    )


def workspace_bytes(desc: Any, table: Table) -> int:
    """The most workspace that any layout of a problem with elements needs."""
    shape, axes = desc.shape_and_axes
    n = prod(shape[axis] for axis in axes)
    rows = prod(shape) // n
    if desc.spec.engine is Engine.MAP or getattr(desc, "ties", None) is TieRule.ALL:
        return 0
    wide = max(1, table.lagged_width // desc.element.size_bytes) if rows > 1 else 1
    many = 4 if len(axes) > 1 else 1
    rooms = (table.part_of(place, desc.op, desc.element)[0] for place in _PARTS)
    room = min(room for room in rooms if room)
    step = min(room, table.strided_tile // 2) // many // wide
    # Neighbouring rows are padded to a power of two; few rows are cut finer, to fill the machine.
    states = 2 * rows * max(2, -(-n // max(2, step))) + 4 * table.fill * wide
    slots, number_slots = _STATE_SLOTS.get(desc.op, 1), _NUMBER_SLOTS.get(desc.op, 3)
    return int(8 * (slots * states + number_slots * (2 * rows + wide))) + 256


def _params(desc: Any, n: int, strides: Strides) -> tuple[float, float]:
    """The numbers p and q of the formulas."""
    if isinstance(desc, BinaryParamBackwardDescriptor):
        weights = (1.0 - desc.param, desc.param)
        return weights if "da" in strides else weights[::-1]
    if isinstance(desc, ReduceBackwardDescriptor):
        if desc.kind is ReduceKind.MEAN:
            return float(n), 0.0
        m = n - desc.correction
        share = 2.0 if desc.kind is ReduceKind.VAR else 1.0
        return share / (m if m > 0 else 1.0), 1.0 / max(n, 1)
    return 0.0, 0.0


def _warps(elements: int, operands: int, packed: int, half: bool, table: Table) -> int:
    """So many elements of all operands a thread that enough loads are under way."""
    each = table.thread_words * packed
    if half and elements * operands < table.resident_words:
        each *= 2
    if operands > 1 and elements <= table.row_tile:
        each //= 2
    return max(1, min(32, down(elements * operands // (32 * each))))
