"""A problem of the engine *row state then map* as rows × axis, and its launches of `kernels.rows`:
rows in the registers of a program, in those of a cluster, or read twice."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from ...geometry import nest
from ...kinds import ElementKind, OpCategory, ReduceKind, TieRule
from . import maps
from .launch import COUNTERS, WORKSPACE, Argument, Int, Pointer, Step, all_registers
from .operands import geometry_of, pointers_of
from .program import HALVES, TURNS, Program, Strides, down, integer, up
from .table import Table

__all__ = ["BY_ROW", "COUNTS", "NUMBER_SLOTS", "STATE_SLOTS", "Parts", "Rows", "warps_of"]

COUNTS = (ReduceKind.MAX, ReduceKind.MIN)  # whose state is how many are equal
STATE_SLOTS = {ReduceKind.PROD: 4}
NUMBER_SLOTS = {ReduceKind.PROD: 6}
BY_ROW = ("r", "u")  # one value a row
_FEW_THREADS = 1024  # elements a warp
_LONGEST = 32768  # of which two programs fit into the registers of a processor
_PRODUCT_WARPS = 8  # the most for products in clusters: by 16 those of f64 take a third longer
_LIGHT = (ElementKind.F32, ElementKind.BF16)
_F16_MORE = 24  # registers, than bf16 of pieces
_JOINED = ("row_dims", "row_dy", "row_y", "axis_dims", "axis_dy", "axis_y", "p", "q")
_LEAD = 3  # the output, whose strides decide the order of dimensions


class Parts(NamedTuple):
    """How rows are cut: so many side by side, by so many places, in so many parts a row."""

    r: int
    c: int
    warps: int
    number: int


class Rows:
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
        together = {"c" if self.columns else "t", *BY_ROW, "n"}
        together_all = {*self.modes} <= together
        self.in_runs = together_all and not (self.columns and self.alignment < 16)
        # The operands whose strips of rows side by side begin where 16 divides the address.
        fit = self.columns and together_all and not self.ordered and len(along.dims) == 1
        self.strips, self.apart = self.geometry.classes(self.modes) if fit else ((), 0)
        self.classes = 0
        # What is compared two at a time lies in runs, read and written alike.
        self.comparable = (
            desc.element in table.paired
            and desc.op in COUNTS
            and ties is TieRule.SPLIT
            and self.modes[1] == self.modes[3]
            and self.modes[1] in ("t", "c")
            and {self.modes[0], self.modes[2]} <= {*BY_ROW}
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
        self.slots = STATE_SLOTS.get(desc.op, 1)

    def askew(self) -> Rows:
        """The same at addresses that 16 does not divide."""
        other = copy(self)
        other.alignment = 1
        other.capped = other.even = other.plain = other.lone = other.paired = False
        return other

    def in_classes(self) -> Rows:
        """The same, places told apart by where rows begin there: see `kernels.held_memory`."""
        other = copy(self)
        other.classes = self.apart
        other.in_runs = other.even = True
        other.capped = other.plain = other.lone = other.paired = False
        return other

    def tiles(self, r: int) -> int:
        """How many tiles of r rows there are."""
        more = 16 // self.item - 1 if self.classes else 0  # strips may begin before the first row
        return -(-(self.beside.extent + more) // r) * self.beside_tiles

    def every(self, r: int, c: int) -> bool:
        """Whether all tiles of r rows by c places are full."""
        return not self.classes and self.n % c == 0 and self.beside.extent % r == 0

    def pairs(self, every: bool) -> bool:
        """Whether what is compared is so two at a time, where `every` tile is full or not."""
        return self.paired and every

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
        warps = warps_of(r * self.length * self.many, self.full, held, self.half, table)
        return Program(
            steps=(self.step("whole", Parts(r, self.length, warps, 1)),),
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

    def rather_in(self, parts: Parts) -> bool:
        """Whether rows are taken by a cluster where another way would keep them too."""
        table, op, element = self.table, self.desc.op, self.desc.element
        most = table.number_of(table.cluster_first, f"long_{self.layout}", op, element)
        return self.full_parts(parts) and self.capped and parts.number <= most

    def full_parts(self, parts: Parts) -> bool:
        """Whether nothing of the parts of a row needs a mask."""
        return self.even and self.n == parts.c * parts.number

    def cut(self, way: str) -> Parts | None:
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
        return Parts(r, c, max(least, min(32, c * r // each)), -(-self.n // c))

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

    def cluster(self, parts: Parts) -> Program:
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

    def lagged(self, parts: Parts) -> Program:
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
            workspace_bytes=known.offset + 8 * NUMBER_SLOTS.get(self.desc.op, 3) * tiles * parts.r,
            reads={} if waits and not far else dict.fromkeys(("dy", "x", "y"), 2),
            layout=self.layout,
            variant="lagged" if waits else "split",
            why=f"{pieces}, read twice in one launch, the second time from the cache"
            + (" as far as it reaches" if far else "")
            if waits
            else f"{pieces}, whose states are joined in order: two reads",
        )

    def pieces(self, phase: str, parts: Parts, each: int) -> int:
        """How many pieces a tile of one row is taken in, of so many elements a thread; 0: it is not
        for such a tile."""
        operands = (1,) if self.desc.category is OpCategory.REDUCTION else (0, 2)
        runs = all(self.modes[k] == "t" for k in (*operands, _LEAD))
        if phase not in ("whole", "cluster") or parts.r > 1 or not runs:
            return 0
        least = 1 if self.product else 0
        if not each or not self.full_parts(parts) or self.desc.op in COUNTS:
            return least
        return max(1, parts.c // (32 * parts.warps) // each)

    def step(self, phase: str, parts: Parts, states: Pointer | None = None, lead: int = 0) -> Step:
        """A launch of `rows.row_tiles`."""
        table, element = self.table, self.desc.element
        r, c, _, count = parts
        every = self.n == c * count and self.beside.extent % r == 0
        warps, pieces, registers = self.threads(phase, parts, every)
        joined = _joined(r, table) if lead else up(table.cluster) if phase == "cluster" else 1
        run = min(16 // self.item, self.alignment if self.columns else 16)
        return Step(
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
                ("PAIRS", self.pairs(every)),
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

    def threads(self, phase: str, parts: Parts, every: bool) -> tuple[int, int, int]:
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
            if (deviates or self.product) if self.half else op in COUNTS:
                warps = 16
        at_once = table.number_of(table.at_once, place, op, element)
        pieces = self.pieces(phase, parts._replace(warps=warps), at_once)
        if every and self.in_runs and self.capped and (pieces or not at_once):
            registers = table.number_of(table.registers, place, op, element)
            if registers and pieces and element is ElementKind.F16:
                registers += _F16_MORE
        spacious = spacious or not self.capped or (at_once > 0 and not pieces)
        if table.roomy and phase == "apply" and not every:
            spacious = spacious or self.desc.category is OpCategory.SOFTMAX
        if not registers and (spacious or (self.product and (parts.r > 1 or masked))):
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


def warps_of(elements: int, operands: int, packed: int, half: bool, table: Table) -> int:
    """So many elements of all operands a thread that enough loads are under way."""
    each = table.thread_words * packed
    if half and elements * operands < table.resident_words:
        each *= 2
    if operands > 1 and elements <= table.row_tile:
        each //= 2
    return max(1, min(32, down(elements * operands // (32 * each))))
