"""The launches of the engine *row state then map*: rows stay in registers, in those of a cluster,
or in shared memory, or are read twice."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ...descriptors import BinaryParamBackwardDescriptor, ReduceBackwardDescriptor
from ...geometry import c_strides, nest
from ...kinds import ElementKind, OpCategory, ReduceKind, SoftmaxKind, TieRule
from ...registry import Engine
from . import maps, tall
from .launch import COUNTERS, WORKSPACE, Argument, Int, Pointer, Step, all_registers
from .operands import geometry_of, pointers_of
from .program import (
    EMPTY,
    HALVES,
    TURNS,
    Program,
    Strides,
    before,
    begun_anywhere,
    clearing,
    down,
    edge_lanes,
    integer,
    up,
)
from .table import Table

__all__ = ["numbers_of", "program", "workspace_bytes"]

_COUNTS = (ReduceKind.MAX, ReduceKind.MIN)  # whose state is how many are equal
_EIGHTHS = 8  # of a tile: pieces of rows that fill only some of them ...
_LONG_TILE = 4096  # ... by kinds that would take more registers only up to this
_FEW_THREADS = 1024  # elements a warp
_LONGEST = 32768  # of which two programs fit into the registers of a processor
_PRODUCT_WARPS = 8  # the most for products in clusters: by 16 those of f64 take a third longer
_LIGHT = (ElementKind.F32, ElementKind.BF16)
_TERMS = 4096
_F16_MORE = 24  # registers, than bf16 of pieces
_NARROW = 128  # bytes of rows side by side below which memory is much slower
_STATE_SLOTS = {ReduceKind.PROD: 4}
_NUMBER_SLOTS = {ReduceKind.PROD: 6}
_JOINED = ("row_dims", "row_dy", "row_y", "axis_dims", "axis_dy", "axis_y", "p", "q")
_NOT_RAGGED = ("axis_x", "axis_out", "axis_order", "order_base", "NEAR", "FULL")
_PARTS = ("lagged_rows", "lagged_columns", "cluster_rows", "cluster_columns", "ragged_rows")
_BY_ROW = ("r", "u")
_LEAD = 3  # the output, whose strides decide the order of dimensions


def program(desc: Any, strides: Strides, table: Table) -> Program:
    """The program for arrays with these strides; a map has its own."""
    shape, axes = desc.shape_and_axes
    outputs = [op.name for op in desc.operands if op.output and op.name in strides]
    if 0 in shape or not outputs:
        return EMPTY
    unread: dict[str, int] = {}
    if desc.op == ReduceKind.PROD:  # the product is taken anew, in f64
        unread = {"y": 0}
        strides = {name: steps for name, steps in strides.items() if name != "y"}
    rank = len(shape)
    steps: list[Sequence[int]] = [
        strides.get(name, (0,) * rank) for name in ("dy", "x", "y", *outputs)
    ]
    ties = desc.ties if desc.spec.ties else None
    order = [0] * rank
    if ties in (TieRule.FIRST, TieRule.LAST):
        for axis, stride in zip(axes, c_strides([shape[axis] for axis in axes]), strict=True):
            order[axis] = stride
    steps.append(order)
    p, q = numbers_of(desc, strides)
    if desc.spec.engine is Engine.MAP or ties is TieRule.ALL:
        return maps.program(desc, strides, table, shape, steps, outputs, p, q)
    rows = _Rows(desc, strides, table, outputs, steps, ties, p, q)
    made = _chosen(rows)
    askew = made
    # What is close to the registers there are holds where elements are read in runs of 16 bytes.
    if rows.even and (made.variant != "resident" or (rows.lone and made.steps[0].registers)):
        askew = _chosen(rows.askew())
    sources = ("dy", "x", "y", *outputs)
    if rows.strips and made.variant != "resident":
        names = tuple(sources[k] for k in rows.strips)
        strips = rows.in_classes().held()
        if strips is not None:
            askew = before(strips, askew, names)
    if rows.alike:
        names = tuple(sources[k] for k in rows.alike)
        run = _chosen(rows.ragged())
        # Where there are no clusters, a row that stays whole is read once.
        if _reads(run) <= _reads(askew):
            askew = before(run, askew, names)
    if rows.columns and askew.alike and not rows.even:
        made = askew
    elif (
        not rows.columns
        and askew.alike
        and (rows.alignment * rows.item < 16 or rows.better_ragged(made))
    ):
        made = before(_chosen(rows.ragged(edged=False)), askew) if rows.even_runs else askew
    elif askew.steps != made.steps:
        made = before(made, askew)
    if _reads(made) == 2 or (rows.columns and _better_tall(rows, made)):
        lines = tall.program(rows, p, q)
        made = made if lines is None else before(lines, made)
    return replace(made, reads={**made.reads, **unread})


def _better_tall(rows: _Rows, held: Program) -> bool:
    """Whether rows side by side are rather read twice, in lines, than held so."""
    table, op, element = rows.table, rows.desc.op, rows.desc.element
    few = table.number_of(table.tall_rows, "tall_rows", op, element)
    if held.alike and rows.beside.extent <= few:
        return True
    many = table.number_of(table.tall_parts, "tall_parts", op, element)
    cut = dict(held.steps[-1].arguments).get("parts")
    return held.variant == "held" and isinstance(cut, Int) and 0 < many <= cut.value


def _reads(made: Program) -> int:
    """How often a part is read, from memory or from a cache."""
    return 2 if made.variant in ("tall", "lagged", "split") else 1


def _chosen(rows: _Rows) -> Program:
    """Whole rows, or those that no program keeps alone."""
    whole = rows.whole_ragged() if rows.begins_anywhere else rows.resident()
    if whole is not None and not rows.longest(whole):
        return whole
    parts = rows.cut_ragged() if rows.begins_anywhere else rows.cut("cluster")
    clustered = parts is not None and parts.number <= rows.table.cluster
    if parts is not None and clustered and rows.rather_in(parts):
        return rows.cluster(parts)
    if whole is not None:
        return whole
    held = rows.held()
    first = rows.table.number_of(
        rows.table.held_first, f"held_{rows.layout}", rows.desc.op, rows.desc.element
    )
    if held is not None and (first or not clustered):
        return held
    if parts is not None and clustered:
        return rows.cluster(parts)
    parts = rows.cut("lagged")
    assert parts is not None
    return rows.lagged(parts)


class _Parts(NamedTuple):
    """How rows are cut: so many side by side, by so many places, in so many parts a row."""

    r: int
    c: int
    warps: int
    number: int


class _Rows:
    """A problem as rows × axis, and what its tiles may rely on."""

    def __init__(
        self,
        desc: Any,
        strides: Strides,
        table: Table,
        outputs: Sequence[str],
        steps: Sequence[Sequence[int]],
        ties: TieRule | None,
        p: float,
        q: float,
    ) -> None:
        shape, axes = desc.shape_and_axes
        along = nest(shape, axes, steps, _LEAD)
        others = [axis for axis in range(len(shape)) if axis not in axes]
        across = nest(shape, others, steps, _LEAD)
        self.desc, self.table = desc, table
        self.geometry = geometry_of(desc, strides, outputs, across, along)
        self.n = along.size
        inner, self.beside = along.dims[0], across.dims[0]
        self.beside_tiles = across.size // self.beside.extent
        self.columns = self.beside.extent > 1 and (
            abs(self.beside.strides[_LEAD]) < abs(inner.strides[_LEAD]) or inner.extent == 1
        )
        self.layout = "columns" if self.columns else "rows"
        self.modes = [self.geometry.mode(k, output=k >= _LEAD, unit=self.columns) for k in range(4)]
        self.full = max(1, sum(mode in ("t", "c", "s", "a") for mode in self.modes[:3]))
        self.item = desc.element.size_bytes
        self.half = desc.element in HALVES
        self.product = desc.op == ReduceKind.PROD
        self.length = max(2, up(self.n)) if self.product else up(self.n)
        self.alignment, self.aligned = self.geometry.alignment(self.n, self.modes)
        self.ordered = ties in (TieRule.FIRST, TieRule.LAST)
        # What is not read in runs, or is told apart by its place, takes registers of its own.
        self.rough = self.ordered or bool({"s", "a"} & {*self.modes})
        self.even = self.alignment == 16 and not self.rough
        self.capped = True  # whether the table's registers are for it
        # The operands whose runs are taken apart from their edges, if rows may begin anywhere.
        met = (1,) if desc.category is OpCategory.REDUCTION else (0, 2)
        fit = not (self.columns or self.ordered) and len(along.dims) == 1 and self.n >= maps.RAGGED
        fit = fit and all(self.modes[k] == "t" for k in met)
        self.alike = self.geometry.alike(self.modes) if fit else ()
        self.begins_anywhere = False
        self.edged = True
        # Whether rows have none where 16 divides the addresses of their arrays.
        run = 16 // self.item
        whole, _ = self.geometry.alignment(self.n, self.modes, (run,))
        self.even_runs = whole == run and not self.product
        self.plain = (
            self.n == up(self.n) and self.alignment == 16 and not (self.rough or self.columns)
        )
        self.lone = self.full == 1 and self.plain
        # Places on an axis of several dimensions are divisions: they take registers too.
        self.many = 4 if len(along.dims) > 1 else 1
        # Otherwise a pointer for each element.
        together = {"c" if self.columns else "t", *_BY_ROW, "n"}
        together_all = {*self.modes} <= together
        self.in_runs = together_all and not (self.columns and self.alignment < 16)
        # The operands whose strips of rows side by side begin where 16 divides the address.
        fit = self.columns and together_all and not self.ordered and len(along.dims) == 1
        self.strips, self.apart = self.geometry.classes(self.modes) if fit else ((), 0)
        self.classes = 0
        # What is compared two at a time lies in runs, read and written alike.
        self.comparable = (
            desc.element in table.paired
            and desc.op in _COUNTS
            and ties is TieRule.SPLIT
            and self.modes[1] == self.modes[3]
            and self.modes[1] in ("t", "c")
            and {self.modes[0], self.modes[2]} <= {*_BY_ROW}
        )
        self.paired = self.comparable and self.alignment == 16
        self.pointers = pointers_of(self.geometry, ("dy", "x", "y", *outputs), self.modes)
        self.arguments: list[tuple[str, Argument]] = [
            *self.geometry.arguments(),
            ("axis_order", tuple(dim.strides[4] for dim in along.dims)),
            ("order_base", Int(along.offsets[4])),
            ("n", integer(self.n)),
            ("p", p),
            ("q", q),
        ]
        self.constants: list[tuple[str, Any]] = [
            ("KIND", desc.op.value),
            ("TIES", ties.value if ties else ""),
            ("ELEMENT", desc.element.value),
            *zip(("DY", "X", "Y", "OUT"), self.modes, strict=True),
        ]
        self.slots = _STATE_SLOTS.get(desc.op, 1)

    def askew(self) -> _Rows:
        """The same at addresses that 16 does not divide."""
        other = copy(self)
        other.alignment = 1
        other.capped = other.even = other.plain = other.lone = other.paired = False
        return other

    def in_classes(self) -> _Rows:
        """The same, places told apart by where rows begin there: see `kernels.held_memory`."""
        other = copy(self)
        other.classes = self.apart
        other.in_runs = other.even = True
        other.capped = other.plain = other.lone = other.paired = False
        return other

    def ragged(self, edged: bool = True) -> _Rows:
        """The same, each row as its run and its edges, if it has any: see `kernels.ragged`."""
        other = copy(self)
        other.edged = edged
        other.begins_anywhere = other.even = True
        other.capped = other.plain = other.lone = False
        other.paired = other.comparable
        return other

    def tiles(self, r: int) -> int:
        """How many tiles of r rows there are."""
        more = 16 // self.item - 1 if self.classes else 0  # strips may begin before the first row
        return -(-(self.beside.extent + more) // r) * self.beside_tiles

    def every(self, r: int, c: int) -> bool:
        """Whether all tiles of r rows by c places are full."""
        return not self.classes and self.n % c == 0 and self.beside.extent % r == 0

    def resident(self) -> Program | None:
        """Whole rows in the registers of a program, if they fit."""
        table, columns = self.table, self.columns
        size = 2 if self.desc.element is ElementKind.F64 else 1
        # Products keep more beside their rows (of f16 and f64 more than there is room for), and so
        # do rows side by side.
        light = self.plain and self.modes[1] == "t" and self.desc.element in _LIGHT
        heavy = self.product and not light
        words = self.full * size * (table.column_factor if columns else 2 if heavy else 1)
        least = 1
        if columns:
            least = min(up(self.beside.extent), max(1, 32 // self.item))
        # Where there are no clusters, long rows of halves wait in registers two by two.
        packed = self.plain and self.half and not self.product and self.length >= table.packed
        packed = packed and self.in_runs and table.cluster == 0
        most = table.resident_words // 2 if self.rough else table.resident_words * (1 + packed)
        if up(self.n) * least * words * self.many > most:
            return None
        tile = table.row_tile
        if columns and not self.rough:
            tile = max(tile, table.column_tile // self.item // (2 if self.product else self.full))
        room = max(least, min(tile, table.resident_words // words) // self.many // self.length)
        if columns:
            room = max(least, min(room, table.column_bytes // self.item))
        r = min(up(self.beside.extent), down(room))
        held = 2 if packed and self.full > 1 else 1
        warps = _warps(r * self.length * self.many, self.full, held, self.half, table)
        return Program(
            steps=(self.step("whole", _Parts(r, self.length, warps, 1)),),
            runner=None,
            workspace_bytes=0,
            reads={},
            layout=self.layout,
            variant="resident",
            why=f"a program keeps {r} whole row{'s' if r > 1 else ''} in registers: one read",
        )

    def longest(self, made: Program) -> bool:
        """Whether so long a row is kept whole that its program has all the warps there are, or that
        two such programs have."""
        return self.lone and made.variant == "resident" and self.length == _LONGEST

    def rather_in(self, parts: _Parts) -> bool:
        """Whether rows are taken by a cluster where another way would keep them too."""
        table, op, element = self.table, self.desc.op, self.desc.element
        most = table.number_of(table.cluster_first, f"long_{self.layout}", op, element)
        return self.full_parts(parts) and self.capped and parts.number <= most

    def full_parts(self, parts: _Parts) -> bool:
        """Whether nothing of the parts of a row needs a mask."""
        return self.even and self.n == parts.c * parts.number

    def cut(self, way: str) -> _Parts | None:
        """Parts for a cluster or to be read twice, if the table has a size for them."""
        table = self.table
        room, warps = table.part_of(f"{way}_{self.layout}", self.desc.op, self.desc.element)
        if not room:
            return None
        room //= self.many
        if not self.in_runs:
            room = min(room, table.strided_tile // self.full // self.many)
            warps = max(1, room // 512)
        each = max(1, room // warps)
        r = 1
        if self.columns:
            r = min(up(self.beside.extent), max(1, table.lagged_width // self.item))
        c = max(2, min(self.length // 2, room // r))
        while self.tiles(r) * -(-self.n // c) < table.fill:
            if c <= max(2, 1024 // r):
                break
            c //= 2
        # What is masked takes registers, and so do elements told apart, or read one by one.
        uneven = not self.even and (not self.capped or way == "cluster")
        if uneven or (self.n % c and (self.product or way == "cluster")):
            each //= 4 if self.columns and self.full > 1 and not self.capped else 2
            if self.product and not self.half and way == "cluster":
                each = max(each, room // _PRODUCT_WARPS)
        # Few threads, lest one program's registers be all that a processor has.
        if self.few_threads:
            each = _FEW_THREADS
        # One warp has no room for the products of parts that it joins.
        least = 2 if self.product and way == "lagged" else 1
        return _Parts(r, c, max(least, min(32, c * r // each)), -(-self.n // c))

    @property
    def few_threads(self) -> bool:
        """Whether parts are for few threads, which then need registers."""
        return self.product and self.columns and self.alignment < 16 and not self.rough

    def better_ragged(self, made: Program) -> bool:
        """Whether 16 divides all addresses, and still a row is better taken as its run: tiles that
        are not full mask each element, those of a run 16 bytes at a time."""
        masked = not dict(made.steps[0].constants).get("FULL", True)
        table, op, element = self.table, self.desc.op, self.desc.element
        like = ElementKind.F32 if element is ElementKind.F64 else element
        long = self.n >= table.number_of(table.ragged_even, "ragged_even", op, like)
        quotients = self.product and not self.half
        return masked and long and made.variant != "held" and not quotients

    def whole_ragged(self) -> Program | None:
        """The same of rows that begin anywhere."""
        table, op, element = self.table, self.desc.op, self.desc.element
        most, warps = table.part_of("ragged_rows", op, element)
        c = max(self.length, 32 // self.item)
        if c > most:
            return None
        tile = table.ragged_tile_of(op, element, c)
        tile *= 4 if self.product and 4 * c <= tile else 1
        r = min(up(self.beside.extent), max(1, tile // c))
        if c <= table.ragged_short:
            warps = _warps(r * c, self.full, 1, self.half, table)
            warps = max(warps, 2) if self.product and r > 1 else warps
            each = c // _EIGHTHS  # of which a tile may have fewer, by threads that read 16 bytes
            few = min(warps, each * self.item // 512)
            light = c <= _LONG_TILE or op in (SoftmaxKind.LOG_SOFTMAX, *_COUNTS)
            if light and not self.product and r == 1 and self.n <= c - each and few:
                c, warps = -(-self.n // each) * each, few
        return Program(
            steps=(self.step("whole", _Parts(r, c, warps, 1)),),
            runner=None,
            workspace_bytes=0,
            reads={},
            layout=self.layout,
            variant="resident",
            why=f"a program keeps {r} whole row{'s' if r > 1 else ''} in registers: one read; the "
            "edges of a row, where 16 bytes are not whole, are read apart",
        )

    def cut_ragged(self) -> _Parts:
        """Parts of rows that begin anywhere, for a cluster."""
        table = self.table
        c, warps = table.part_of("ragged_rows", self.desc.op, self.desc.element)
        most = 2 * c
        while c < most and -(-self.n // c) > table.cluster:
            c, warps = 2 * c, 2 * warps
        while self.tiles(1) * -(-self.n // c) < table.fill and warps > 1:
            if -(-2 * self.n // c) > table.cluster:
                break
            c, warps = c // 2, warps // 2
        return _Parts(1, c, warps, -(-self.n // c))

    def cluster(self, parts: _Parts) -> Program:
        """Parts in the registers of the programs of a cluster."""
        # Of one row a number goes from one shared memory to the others, unless it is none.
        room = 0
        if parts.r > 1 or self.product:
            room = 8 * self.slots * self.tiles(parts.r) * parts.number * parts.r
        states = Pointer(WORKSPACE, "fp64") if room else None
        return Program(
            steps=(self.step("cluster", parts, states),),
            runner=None,
            workspace_bytes=room,
            reads={},
            layout=self.layout,
            variant="cluster",
            why=f"rows are cut into {parts.number} parts, kept in registers by the programs of a "
            "cluster: one read",
        )

    def held(self) -> Program | None:
        """Parts in the shared memory of programs that stay, if that is for this problem."""
        table, op, element = self.table, self.desc.op, self.desc.element
        room, warps = table.part_of(f"held_{self.layout}", op, element)
        fit = self.in_runs and self.even and self.many == 1 and not self.ordered
        fit = fit and not self.begins_anywhere
        if not room or not fit or element is ElementKind.F64:
            return None
        by_row = [mode in _BY_ROW for mode in self.modes[:3]]
        given = [mode != "n" for mode in self.modes[:3]]
        reduced = self.desc.category is OpCategory.REDUCTION
        # Elements meet at most one operand of one value a row.
        if by_row[1] or by_row == given or (by_row[0] and by_row[2] and not reduced):
            return None
        programs = table.fill // 2  # one for each processor
        joiners = 4  # warps, beside those that take states and as many that write gradients
        met = (0, 2) if not reduced else (1, 2) if op in _COUNTS else (1,)  # see `operands_of`
        arrays = sum(self.modes[k] in ("t", "c") for k in met)
        classes = max(1, self.classes)
        n = -(-self.n // classes)  # places of a class
        r = 1
        if self.columns:
            r = min(up(self.beside.extent), table.held_width // arrays // self.item, 32 * warps)
            # Strips half as wide have half as many parts, if a row would have too many: for all to
            # be held, or for those who join to ask for their states at a time, or twice.
            many = classes * -(-n // self.held_places(n, room // r, warps))
            asked = self.heard(joiners, r) * (2 if self.product else 1)
            if r * self.item > _NARROW and many > min(programs, asked):
                r //= 2
        # A warp's loads lie along the axis, but for rows side by side.
        least = warps * 512 // self.item // r * (2 if self.product else 1)
        c = self.held_places(n, room // r, warps)
        while c > least and self.tiles(r) * classes * -(-n // c) < programs >= classes * -(
            -n // (c // 2)
        ):
            c //= 2
        parts = classes * -(-n // c)
        units = self.tiles(r) * parts
        stages = min(8, table.held_bytes // (r * c * self.item * arrays))
        # All parts of a row have room at the same time, and twice as many to be read meanwhile; of
        # them a strip of a class needs those of its neighbours too.
        most = programs * (stages // 3)
        if c < least or not 1 < parts <= most or units >= 2**31 - 8 * programs:
            return None
        wide = self.product or (element is ElementKind.F32 and op not in _COUNTS)
        words = -(-(units + (self.classes > 0)) * r * (8 if wide else 4) // 8)
        lanes = 32 * joiners // r  # threads that join the states of a row
        heard = max(up(parts), lanes)
        if heard > self.heard(joiners, r):
            heard = 16 * lanes
        launch = Step(
            kernel="held.held_rows",
            grid=min(programs, units),
            arguments=(
                *self.pointers,
                ("told", Pointer(WORKSPACE, "fp64" if wide else "fp32")),
                *(pair for pair in self.arguments if pair[0] not in ("axis_order", "order_base")),
                ("parts", Int(parts, "i32")),
                ("units", Int(units, "i32")),
            ),
            constants=(
                *self.constants,
                ("R", r),
                ("C", c),
                ("K", heard),
                ("MORE", parts > heard),
                ("STAGES", stages),
                ("NW", warps),
                ("JOINERS", joiners),
                ("REGISTERS", self.held_registers(self.every(r, c))),
                ("PAIRS", self.paired),
                ("NEAR", self.geometry.near(r, c * classes)),
                ("FULL", self.every(r, c)),
                ("CLASSES", self.classes),
            ),
            warps=warps,
            registers=all_registers(-(-(2 * warps + joiners) // 4) * 4),
            alignment=self.alignment,
            aligned=self.aligned,
            together=True,
        )
        if self.classes:
            launch = begun_anywhere(launch, launch.kernel, ())
        return Program(
            steps=(clearing(0, words), launch),
            runner=None,
            workspace_bytes=8 * words * self.slots,
            reads={},
            layout=self.layout,
            variant="held",
            why=f"rows are cut into {parts} parts, kept in shared memory"
            + (", by where they begin within 16 bytes" if self.classes else "")
            + ": one read",
        )

    @property
    def nested(self) -> bool:
        """Whether rows lie in several dimensions."""
        return len(self.geometry.rows.dims) > 1

    def held_places(self, n: int, room: int, warps: int) -> int:
        """Places of a part that is held, of n, where there is room for so many."""
        c = min(up(n), room)
        # Halves that are not compared two at a time take more registers.
        if self.columns and self.half and self.desc.op in _COUNTS and not self.paired:
            c //= 2
        halved = self.product or (self.nested and self.desc.op in self.table.held_halved)
        if self.classes and self.half and halved:
            c //= 2
        # So many terms of bfloat16 a warp may sum in f32: see `formulas.term`.
        while self.half and c // warps > _TERMS:
            c //= 2
        return c

    def heard(self, joiners: int, r: int) -> int:
        """How many states of each of r rows so many warps ask for at a time: as many as registers
        hold."""
        return 32 * joiners // r * (16 if self.product else 32)

    def held_registers(self, every: bool) -> tuple[int, int]:
        """Of threads that write gradients, and that join states."""
        anywhere = "held_nested" if self.nested else "held_classes"
        place = "held_registers" if every else anywhere if self.classes else "held_masked"
        return self.table.part_of(place, self.desc.op, self.desc.element)

    def lagged(self, parts: _Parts) -> Program:
        """Parts that are read twice: in one launch, the second time from the cache, or in two."""
        table, tiles = self.table, self.tiles(parts.r)
        states = Pointer(WORKSPACE, "fp64")
        known = Pointer(WORKSPACE, "fp64", 8 * self.slots * tiles * parts.number * parts.r)
        apart = (
            self.step("partial", parts, states),
            Step(
                kernel="rows.join_rows",
                grid=tiles,
                arguments=(
                    *(pair for pair in self.pointers if pair[0] in ("dy", "y")),
                    ("states", states),
                    ("joined", known),
                    *(pair for pair in self.arguments if pair[0] in _JOINED),
                    ("parts", Int(parts.number, "i32")),
                ),
                constants=(
                    *(pair for pair in self.constants if pair[0] not in ("X", "OUT")),
                    ("R", parts.r),
                    ("K", _joined(parts.r, table)),
                ),
                warps=parts.warps,
                registers=all_registers(parts.warps) if self.few_threads or table.roomy else 0,
            ),
            self.step("apply", parts, known),
        )
        waits = table.lag > 0 and 2 * tiles * parts.number < TURNS
        # So many tiles are read ahead that their states are known in time, and no more than the
        # cache keeps, unless a row is longer.
        each = parts.c * parts.r * self.item * self.full
        reach = min(table.lag, max(1, table.lag_bytes // each))
        ahead = min(tiles * parts.number, max(parts.number, reach))
        far = parts.number > reach
        pieces = f"rows are cut into {parts.number} parts"
        return Program(
            steps=(self.step("lagged", parts, states, ahead),) if waits else apart,
            apart=apart if waits else (),
            counters=1 + tiles if waits else 0,
            runner=None,
            workspace_bytes=known.offset + 8 * _NUMBER_SLOTS.get(self.desc.op, 3) * tiles * parts.r,
            reads={} if waits and not far else dict.fromkeys(("dy", "x", "y"), 2),
            layout=self.layout,
            variant="lagged" if waits else "split",
            why=f"{pieces}, read twice in one launch, the second time from the cache"
            + (" as far as it reaches" if far else "")
            if waits
            else f"{pieces}, whose states are joined in order: two reads",
        )

    def pieces(self, phase: str, parts: _Parts, each: int) -> int:
        """How many pieces a tile of one row is taken in, of so many elements a thread; 0: it is not
        for such a tile."""
        operands = (1,) if self.desc.category is OpCategory.REDUCTION else (0, 2)
        runs = all(self.modes[k] == "t" for k in (*operands, _LEAD))
        if phase not in ("whole", "cluster") or parts.r > 1 or not runs:
            return 0
        least = 1 if self.product else 0
        if not each or not self.full_parts(parts) or self.desc.op in _COUNTS:
            return least
        return max(1, parts.c // (32 * parts.warps) // each)

    def step(self, phase: str, parts: _Parts, states: Pointer | None = None, lead: int = 0) -> Step:
        """A launch of `rows.row_tiles`, or of `ragged.row_ragged`."""
        table, element, ragged = self.table, self.desc.element, self.begins_anywhere
        r, c, _, count = parts
        every = self.n == c * count and self.beside.extent % r == 0
        if ragged:
            warps, pieces, registers = self.ragged_threads(phase, parts)
        else:
            warps, pieces, registers = self.threads(phase, parts, every)
        joined = _joined(r, table) if lead else up(table.cluster) if phase == "cluster" else 1
        run = min(16 // self.item, self.alignment if self.columns else 16)
        made = Step(
            kernel="rows.row_tiles",
            grid=self.tiles(r) * count * (2 if lead else 1),
            arguments=(
                *self.pointers,
                ("states", states),
                ("counters", Pointer(COUNTERS, "i32") if lead else None),
                *self.arguments,
                ("parts", Int(count, "i32")),
                ("lead", Int(lead, "i32")),
            ),
            constants=(
                *self.constants,
                ("PHASE", phase),
                ("R", r),
                ("C", c),
                ("W", _grouped(element, self.product, self.modes[3] == "t", r, c, warps, run)),
                ("CAREFUL", max(1, min(c, 64 * warps // r)) if self.product else 1),
                ("K", joined),
                ("PAIRS", self.paired and (every or ragged)),
                ("PIECES", pieces),
                ("NEAR", self.geometry.near(r, c)),
                ("FULL", every),
            ),
            warps=warps,
            cluster=count if phase == "cluster" else 1,
            registers=registers,
            alignment=self.alignment,
            aligned=self.aligned,
        )
        if not ragged:
            return made
        lanes, apart = self.lanes_of_edges(phase, r, warps)
        return begun_anywhere(made, "ragged.row_ragged", _NOT_RAGGED, EDGES=lanes, APART=apart)

    def lanes_of_edges(self, phase: str, r: int, warps: int) -> tuple[int, bool]:
        """For what is beside the runs of rows, 0 where there is nothing; and whether each edge has
        lanes of its own."""
        table, op, element = self.table, self.desc.op, self.desc.element
        place = {"cluster": "rows", "whole": "whole" if warps > 1 else "warp"}.get(phase, "")
        if not self.edged:
            apart = table.number_of(table.edges_always, f"even_{place}", op, element)
        else:
            apart = table.number_of(table.edges_apart, f"ragged_{place}", op, element)
        if apart and r == 1:
            return 2 * (16 // self.item), True
        return (edge_lanes(self.n, self.item, r, warps) if self.edged else 0), False

    def threads(self, phase: str, parts: _Parts, every: bool) -> tuple[int, int, int]:
        """Warps, pieces and registers (0: as the compiler likes) of a tile, of which `every` one is
        full or not."""
        table, op, element = self.table, self.desc.op, self.desc.element
        registers, warps = 0, parts.warps
        strided = bool({"s", "a"} & {*self.modes}) and (self.product or phase == "lagged")
        masked = phase in ("cluster", "lagged") and not every
        deviates = op in (ReduceKind.VAR, ReduceKind.STD)
        loose = phase == "whole" and self.columns and deviates and not every
        uneven = phase == "cluster" and not self.even
        spacious = self.many > 1 or strided or self.ordered or loose or uneven
        place = f"{phase}_{self.layout}"
        if phase == "whole" and warps == 32 and self.lone and self.length <= _LONGEST:
            # Two programs of the longest rows at a time. Of f32 only max and min can: they keep who
            # wins, not what was read.
            place = "longest_rows"
            if (deviates or self.product) if self.half else op in _COUNTS:
                warps = 16
        at_once = table.number_of(table.at_once, place, op, element)
        pieces = self.pieces(phase, parts._replace(warps=warps), at_once)
        if every and self.in_runs and self.capped and (pieces or not at_once):
            registers = table.number_of(table.registers, place, op, element)
            if registers and pieces and element is ElementKind.F16:
                registers += _F16_MORE
        spacious = spacious or not self.capped or (at_once > 0 and not pieces)
        if not registers and (spacious or (self.product and (parts.r > 1 or masked))):
            registers = all_registers(warps)
        return warps, pieces, registers

    def ragged_threads(self, phase: str, parts: _Parts) -> tuple[int, int, int]:
        """The same of rows that begin anywhere."""
        table, op, element = self.table, self.desc.op, self.desc.element
        pieces, registers, warps = 1, 0, parts.warps
        if parts.c != up(parts.c):
            pieces = parts.c // (up(parts.c) // _EIGHTHS)
            registers = table.number_of(table.registers, "ragged_eighths", op, element)
        if phase == "cluster" or (phase == "whole" and parts.c > table.ragged_short):
            each = table.number_of(table.at_once, "ragged_rows", op, element)
            pieces = max(1, parts.c // (32 * warps) // each) if each else 1
            # Of products so few are enough for parts of that size alone.
            fits = parts.c == table.part_of("ragged_rows", op, element)[0]
            if fits if self.product else element is not ElementKind.F16:
                registers = table.number_of(table.registers, "ragged_rows", op, element)
        elif phase == "whole" and parts.r == 1 and parts.c == up(parts.c):
            place = "ragged_warp" if warps == 1 else "ragged_whole"
            registers = table.number_of(table.registers, place, op, element)
        spacious = self.product and (parts.r > 1 or table.roomy or phase == "cluster")
        spacious = spacious or parts.c != up(parts.c)
        if not registers and (spacious or (table.roomy and phase == "partial")):
            registers = all_registers(warps)
        return warps, pieces, registers


def _joined(r: int, table: Table) -> int:
    """So many parts of r rows are joined at a time."""
    return max(2, table.join // r)


def _grouped(
    element: ElementKind, product: bool, inner: bool, r: int, c: int, warps: int, run: int
) -> int:
    """How many elements (pairs, of a product) a thread may join before they become f64, of which it
    reads so many in a run."""
    if element is ElementKind.F64 or (element is ElementKind.F32 and not product):
        return 1
    places = c // 2 if product else c
    held = run if inner else r * places // (32 * warps * min(r, run))
    return max(1, min(8 if element in HALVES else 4, down(max(1, held)), places))


def workspace_bytes(desc: Any, table: Table) -> int:
    """The most workspace that any layout of a problem with elements needs."""
    shape, axes = desc.shape_and_axes
    n = prod(shape[axis] for axis in axes)
    rows = prod(shape) // n
    if desc.spec.engine is Engine.MAP or getattr(desc, "ties", None) is TieRule.ALL:
        return 0
    wide = max(1, table.lagged_width // desc.element.size_bytes) if rows > 1 else 1
    many = 4 if len(axes) > 1 else 1
    # Short rows are `resident` whichever way they lie.
    full = sum(not one.output for one in desc.operands)
    words = full * max(1, desc.element.size_bytes // 4) * max(2, table.column_factor)
    least = max(1, 32 // desc.element.size_bytes)
    if up(n) * least * words * many <= table.resident_words // 2:
        return 0
    rooms = (table.part_of(place, desc.op, desc.element)[0] for place in _PARTS)
    room = min(room for room in rooms if room)
    step = min(room, table.strided_tile // 2) // many // wide
    # Neighbouring rows are padded to a power of two; few rows are cut finer, to fill the machine.
    states = 2 * rows * max(2, -(-n // max(2, step))) + 4 * table.fill * wide
    # Strips of classes begin before their rows, and each class has parts of its own.
    room, _ = table.part_of("held_columns", desc.op, desc.element)
    strip = table.held_width // desc.element.size_bytes
    if room and rows > 1:
        each = max(1, room // strip // (2 if desc.element in HALVES else 1))
        states = max(states, 3 * rows * (-(-n // each) + 8) + 4 * table.fill * strip)
    slots, number_slots = _STATE_SLOTS.get(desc.op, 1), _NUMBER_SLOTS.get(desc.op, 3)
    parts = int(8 * (slots * states + number_slots * (2 * rows + wide))) + 256
    return max(parts, tall.workspace_bytes(desc, n, rows, table))


def numbers_of(desc: Any, strides: Strides) -> tuple[float, float]:
    """The numbers p and q of the formulas."""
    if isinstance(desc, BinaryParamBackwardDescriptor):
        weights = (1.0 - desc.param, desc.param)
        return weights if "da" in strides else weights[::-1]
    if isinstance(desc, ReduceBackwardDescriptor):
        shape, axes = desc.shape_and_axes
        n = prod(shape[axis] for axis in axes)
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
