"""Scans in tiles that stay in registers: the launches, for arrays that lie in any way.

Where rows lie in runs a tile is made of lines (`kernels.lines`): neighbouring elements of a row
that a thread takes alone. Other tiles (`kernels.recurrence`) have their elements over threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ...descriptors import ScanBackwardDescriptor
from ...kinds import ElementKind, ScanKind, TieRule
from .chained import ALIGNED, changed, cut_of
from .chained import steps as chained_steps
from .launch import COUNTERS, WORKSPACE, Int, Pointer, Step, all_registers
from .operands import lined, pointers_of
from .program import HALVES, TURNS, Program, Strides, down, in_turn, integer, up
from .table import Table

__all__ = ["program"]

_WORDS = {1: "i8", 2: "i16", 4: "i32"}
_LEAST = 32
"""Bytes of rows side by side that are worth a launch of their own."""


def program(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> Program:
    """The program for arrays with these strides."""
    tiled = _chosen(desc, strides, table)
    even = tiled.even()
    if even < tiled.beside:
        # Lest the masks of the last tile cost all others.
        ends = ((0, even), (even, tiled.beside - even))
        parts = [_Tiled(desc, strides, table, part, marks=False).alone() for part in ends]
        why = f"those that fill no tile of {tiled.tile.r} come after the others"
        return in_turn(parts, f"{parts[0].why}; of rows side by side {why}")
    return tiled.made() or _Tiled(desc, strides, table, None, marks=False).alone()


_Beside = tuple[int, int] | None
"""The first of rows that lie side by side, and how many; None: all."""


def _chosen(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> _Tiled:
    """The tile for such a problem."""
    if _may_mark(desc, strides, table):
        if prod(desc.shape_and_axes[0]) < table.marks_from:
            alone = _Tiled(desc, strides, table, None, marks=False)
            if alone.tile.resident:  # one launch
                return alone
        marked = _Tiled(desc, strides, table, None, marks=True)
        if marked.can_mark():
            return marked
    return _Tiled(desc, strides, table, None, marks=False)


def _may_mark(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> bool:
    """Whether cummax and cummin may read x in a launch of its own, which leaves a bit a place."""
    if not desc.spec.ties or not table.marks:
        return False
    # y alone tells the first winners. Halves are bound by instructions, not by what they read: of
    # them y tells more.
    from_y = "y" in strides
    return not (from_y and (desc.ties is TieRule.FIRST or desc.element in HALVES))


class _Tile(NamedTuple):
    """A tile of r rows by c places, in lines of v where it has any, and its warps."""

    r: int
    c: int
    v: int
    warps: int
    resident: bool
    place: str = "lines"
    """The field of the table that says its size."""
    ahead: int = 0
    """So many tiles before its turn what it reads is asked for."""


class _Chunks(NamedTuple):
    """How rows are cut: `steps` tiles a chunk; how many carries are joined at a time, of so many
    rows."""

    steps: int
    number: int
    lanes: int
    joins: int


class _Tiled:
    """A problem, and the tile that was chosen for it."""

    def __init__(
        self,
        desc: ScanBackwardDescriptor,
        strides: Strides,
        table: Table,
        beside: _Beside,
        *,
        marks: bool,
    ) -> None:
        self.desc, self.strides, self.table, self.marks = desc, strides, table, marks
        self.kind, self.ties = desc.kind, desc.ties if desc.spec.ties else None
        self.given_y = "y" in strides
        self.from_y = self.given_y and not marks
        unread: set[str] = {"y"} if marks else set()
        if self.kind is ScanKind.CUMSUM:
            unread = {"x", "y"}
        elif self.from_y and self.ties is TieRule.FIRST:
            unread = {"x"}
        self.used = {name: steps for name, steps in strides.items() if name not in unread}
        lying = lined(desc, self.used)
        if beside is not None:
            lying = lying.beside(*beside)
        self.geometry, self.modes, self.flip, self.columns = lying
        self.n, self.rows = self.geometry.axis.size, self.geometry.rows.size
        self.beside = self.geometry.rows.dims[0].extent
        self.in_runs = {*self.modes} <= ({"c", "n"} if self.columns else {"t", "n"})
        self.recomputes = self.kind is not ScanKind.CUMSUM and not self.from_y and not marks
        self.length = up(self.n)
        self.item = desc.element.size_bytes
        self.size = 2 if desc.element is ElementKind.F64 else 1
        product = self.kind is ScanKind.CUMPROD and table.exact_product(desc.element, self.n)
        self.wide = desc.element is ElementKind.F64 or product
        self.alignment, self.aligned = self.geometry.alignment(self.n, self.modes)
        self.pointers = pointers_of(self.geometry, ("dy", "x", "y", "dx"), self.modes)
        self.arguments = [*self.geometry.arguments(), ("n", integer(self.n))]
        self.constants: list[tuple[str, Any]] = [
            ("KIND", self.kind.value),
            ("TIES", self.ties.value if self.ties else ""),
            ("ELEMENT", desc.element.value),
            *zip(("DY", "X", "Y", "OUT"), self.modes, strict=True),
        ]
        tile = None
        if self.in_runs and not (self.recomputes and self.ties):
            tile = self.side_lines() if self.columns else self.lines()
        self.in_lines = tile is not None
        self.tile = tile or self.plain()
        self.tiles = self.count(self.tile.r)
        self.along = -(-self.n // self.tile.c)
        self.full = self.every(self.tile.r, self.tile.c)
        self.base = 0  # bytes of words, before all else in the workspace
        self.marking: list[Step] = []

    def count(self, r: int) -> int:
        """How many tiles of r rows there are."""
        return -(-self.beside // r) * (self.rows // self.beside)

    def every(self, r: int, c: int) -> bool:
        """Whether all tiles of r rows by c places are full."""
        return self.n % c == 0 and self.beside % r == 0

    @property
    def fills(self) -> bool:
        """Whether rows are enough to fill the machine."""
        return self.tiles >= (self.table.scan_fill if self.in_lines else self.table.fill)

    def even(self) -> int:
        """How many of the rows side by side fill tiles, where the others alone keep all masked."""
        r, c = self.tile.r, self.tile.c
        table = self.table
        cut = self.columns and self.in_runs and not (self.tile.resident or self.fills or self.marks)
        asked = self.kind in table.evened and self.n * self.rows >= table.evened_from
        alone = self.n % c == 0 and not self.full and self.beside * self.item >= _LEAST
        if not (cut and asked and alone):
            return self.beside
        r = min(r, down(self.beside))
        return self.beside // r * r

    def plain(self) -> _Tile:
        """A tile whose elements lie over threads."""
        table, small = self.table, self.size
        log_side = self.columns and self.kind is ScanKind.LOG_CUMSUM_EXP
        if log_side and self.recomputes and not self.in_runs:
            small = 8  # what is not read in runs takes registers of its own
        if not self.columns:
            resident = self.length <= table.scan_resident // (2 if self.wide else 1)
            if resident and self.wide:
                small = 2
            r = max(1, table.scan_tile // self.size // self.length) if resident else 1
            r = min(up(self.beside), r)
            c = self.length if resident else min(self.length, table.scan_step // self.size)
            return _Tile(r, c, 1, self.plain_warps(r * c * small), resident)
        resident = self.length <= table.scan_columns // small
        if log_side and self.recomputes and self.item == 4 and not resident:
            small = max(small, 2)  # so do states in f64
        if self.recomputes and self.item == 2 and not (resident or self.in_runs):
            small = max(small, 4)
        few = resident or self.recomputes
        r = (table.column_bytes if few else table.scan_column_bytes) // self.item
        if not few and (self.kind is ScanKind.LOG_CUMSUM_EXP or (self.wide and self.item == 2)):
            r //= 4 if self.in_runs else 8  # numbers of a row in f64
        r = min(up(self.beside), max(1, r))
        step = table.scan_column_few if few else table.scan_column_step
        c = self.length if resident else min(self.length, max(2, step // small))
        warps = self.plain_warps(r * c * small)
        if not few:  # no two threads share a row
            warps = max(1, r * self.item // 512)
        elif self.recomputes and self.item == 2 and warps == 8 and not self.flip:
            warps = 4  # which takes registers
        return _Tile(r, c, 1, warps, resident)

    def plain_warps(self, words: int) -> int:
        return max(1, min(16, down(words // (32 * self.table.scan_words))))

    def lines(self) -> _Tile | None:
        """A tile of lines one after the other, if the table has one."""
        v = max(1, 16 // self.item)
        if self.ties is not None and self.item == 8:  # two places make too many lines to scan
            v = max(v, min(8, self.length // 2))
        size, each = self.table.lines_of(self.kind, self.desc.element, self.length)
        place = "lines"
        if self.recomputes:
            place = "forward_lines"
            size, each = self.table.part_of(place, self.kind, self.desc.element)
            if not size:
                return None
        if self.wide and self.size == 1:  # computed in f64
            size, each = size // 2, min(each, 8)
        resident = self.length <= size
        c = max(2 * v, min(self.length, size))
        r = min(up(self.beside), max(1, size // c)) if resident else 1
        if self.recomputes and not self.every(r, c):
            each = max(1, each // 2)  # what is masked takes registers
        ahead = self.table.number_of(self.table.ahead, "lines", self.kind, self.desc.element)
        return _Tile(r, c, v, max(1, size // (32 * each)), resident, place, ahead)

    def side_lines(self) -> _Tile | None:
        """The same of rows side by side, if they are long enough for two lines."""
        table, element = self.table, self.desc.element
        resident = self.length <= table.scan_columns // self.size
        places = ("short_side",) if resident else ("side", "narrow_side")
        if self.recomputes:
            places = ("forward_side",)
        least = 2 * table.side_of(places[0], self.kind, element)[2]
        if (resident and self.length < least) or not least:
            return None
        for place in places:
            side, m, v, most = table.side_of(place, self.kind, element)
            r = max(1, side // (2 if self.wide and self.item > 2 else 1))
            if resident:  # a tile of as many elements
                r, m = max(1, r * m * v // self.length), self.length // v
            r = min(up(self.beside), r)
            if self.count(r) >= table.strips:
                break
        # Such tiles take more registers.
        cut = self.count(r) < table.scan_fill and self.ties is not None
        more = self.marks and self.item == 2
        if not resident and (cut or more or not self.every(r, m * v)):
            m = max(2, m // 2)
        warps = max(1, min(most, r * m // 32))
        ahead = table.number_of(table.ahead, place, self.kind, element)
        return _Tile(r, m * v, v, warps, resident, place, ahead)

    def can_mark(self) -> bool:
        """Whether x leaves marks for this tile."""
        few = self.columns and not self.tile.resident and self.tiles < self.table.scan_fill
        return self.in_lines and not few

    def alone(self) -> Program:
        """The program of a problem without marks, which there always is."""
        made = self.made()
        assert made is not None
        return made

    def made(self) -> Program | None:
        """The program; None where rows are cut for chains, which need no marks if there is y."""
        if self.marks:
            self.mark()
        tile, table = self.tile, self.table
        if tile.resident:
            rows = f"{tile.r} whole row{'s' if tile.r > 1 else ''}"
            why = f"a program keeps {rows} in registers: one read"
            return self.program([self.step("resident", 1)], "resident", why)
        if self.in_lines and not self.columns and not self.recomputes:
            cut = cut_of(self.kind, self.desc.element, self.n, self.tiles, table)
            if cut is not None:
                return None if self.marks and self.given_y else self.chained(cut)
        if self.fills and not self.recomputes:
            why = f"rows enough to fill the machine, each in tiles of {tile.c} from its far end"
            return self.program([self.step("whole", self.along)], "tiled", why)
        return self.cut()

    def program(
        self,
        steps: Sequence[Step],
        variant: str,
        why: str,
        workspace: int = 0,
        again: int = 1,
        **more: Any,
    ) -> Program:
        """These launches; arrays are read `again` times."""
        x = again + (self.recomputes and workspace > 0) if "x" in self.used else 0
        reads = {"dy": again, "x": 1, "y": 0} if self.marks else {"dy": again, "x": x, "y": again}
        source = "_marked" if self.marks else "_from_y" if self.from_y else "_recomputed"
        return Program(
            steps=(*self.marking, *steps),
            runner=None,
            workspace_bytes=self.base + workspace,
            reads=reads,
            layout="columns" if self.columns else "rows",
            variant=variant + ("" if self.kind is ScanKind.CUMSUM else source),
            why=why,
            **more,
        )

    def mark(self) -> None:
        """A launch before the others, and its words in place of y."""
        tile, table = self.tile, self.table
        word = max(1, tile.v // 8)
        words = Pointer(WORKSPACE, _WORDS[word])
        self.base = -(-word * self.rows * -(-self.n // tile.v) // ALIGNED) * ALIGNED
        given = ("row_dims", "row_x", "axis_x", "n")
        x_alone = (*given, "row_dims:0", "row_x:1")
        launch = Step(
            kernel="winners.mark_winners",
            grid=self.tiles,
            arguments=(
                ("x", dict(self.pointers)["x"]),
                ("words", words),
                ("told", None),
                *(pair for pair in self.arguments if pair[0] in given),
            ),
            constants=(
                *(("KIND", self.kind.value), ("TIES", self.desc.ties.value), ("PHASE", "whole")),
                *(("FLIP", self.flip), ("WIDE", self.wide), ("SIDE", self.columns)),
                *(("R", tile.r), ("M", tile.c // tile.v), ("V", tile.v)),
                *(("B", 1), ("LEVELS", 1), ("T", 1), ("W", tile.warps), ("FULL", self.full)),
            ),
            warps=tile.warps,
            alignment=self.alignment,
            aligned=tuple(name for name in self.aligned if name in x_alone),
        )
        if not self.columns:  # in tiles of its own
            # As sums of short rows have them, whatever the length.
            size, each = table.lines_of(ScanKind.CUMSUM, self.desc.element, 1)
            c = max(2 * tile.v, min(self.length, size))
            r = min(up(self.beside), max(1, size // c)) if self.length <= size else 1
            launch = changed(
                launch,
                table,
                max(1, size // (32 * each)),
                grid=self.count(r),
                R=r,
                M=c // tile.v,
                FULL=self.every(r, c),
            )
        self.marking = [launch]
        absent = {"x": None, "y": words}
        self.pointers = [(name, absent.get(name, value)) for name, value in self.pointers]
        modes = {"X": "n", "Y": "b"}
        self.constants = [(name, modes.get(name, value)) for name, value in self.constants]

    def step(
        self,
        phase: str,
        steps: int,
        carries: Pointer | None = None,
        states: Pointer | None = None,
        lead: int = 0,
        joins: int = 1,
    ) -> Step:
        """A launch of the kernel that goes through tiles, `steps` of them a program."""
        if self.in_lines:
            return self.lines_step(phase, steps, carries, states, lead, joins)
        tile = self.tile
        return Step(
            kernel="recurrence.scan_tile",
            grid=self.tiles * -(-self.along // steps),
            arguments=(
                *self.pointers,
                ("carries", carries),
                ("states", states),
                *self.arguments,
                ("steps", Int(steps, "i32")),
            ),
            constants=(
                *self.constants,
                ("PHASE", phase),
                ("FLIP", self.flip),
                ("WIDE", self.wide),
                ("R", tile.r),
                ("C", tile.c),
                ("FULL", self.full),
            ),
            warps=tile.warps,
            registers=all_registers(tile.warps) if self.recomputes or self.table.roomy else 0,
            alignment=self.alignment,
            aligned=self.aligned,
        )

    def lines_step(
        self,
        phase: str,
        steps: int,
        carries: Pointer | None,
        states: Pointer | None,
        lead: int,
        joins: int,
    ) -> Step:
        """The same of tiles in lines."""
        tile, table = self.tile, self.table
        return Step(
            kernel="lines.scan_lines",
            grid=self.tiles * -(-self.along // steps) * (2 if lead else 1),
            arguments=(
                *self.pointers,
                ("carries", carries),
                ("states", states),
                ("counters", Pointer(COUNTERS, "i32") if lead else None),
                *self.arguments,
                ("steps", Int(steps, "i32")),
                ("lead", Int(lead, "i32")),
                ("window", Int(table.side_window, "i32")),
            ),
            constants=(
                *self.line_constants,
                ("PHASE", phase),
                ("FLIP", self.flip),
                ("WIDE", self.wide),
                ("SIDE", self.columns),
                ("R", tile.r),
                ("M", tile.c // tile.v),
                ("V", tile.v),
                ("K", joins if lead else 1),
                ("W", tile.warps),
                ("AHEAD", tile.ahead if phase == "whole" else 0),
                ("PAIRS", self.pairs),
                ("FULL", self.full),
            ),
            warps=tile.warps,
            registers=self.registers(phase),
            alignment=self.alignment,
            aligned=self.aligned,
        )

    @property
    def line_constants(self) -> list[tuple[str, Any]]:
        return [pair for pair in self.constants if pair[0] not in ("DY", "OUT")]

    @property
    def pairs(self) -> bool:
        """Whether halves are compared two at a time."""
        return self.ties is TieRule.LAST and self.desc.element in self.table.paired

    def registers(self, phase: str) -> int:
        """The most that a thread of lines may have; 0 leaves it to the assembler."""
        table, tile, kind = self.table, self.tile, self.kind
        # Two reads in one program need more, of rows side by side.
        usual = phase in ("whole", "resident") or not self.columns
        # So do several rows whose scan is run again.
        usual = usual and (tile.r == 1 or tile.place != "forward_lines")
        usual = usual and not (tile.resident and tile.place == "lines")
        if usual and self.full and not self.wide:
            found = table.number_of(table.registers, tile.place, kind, self.desc.element)
            if found:
                # Rows of f16 from the far end take a few more than those of bf16.
                sums = tile.place == "lines" and kind is ScanKind.CUMSUM
                more = sums and self.flip and self.desc.element is ElementKind.F16
                return found + (8 if more else 0)
        # Lest the assembler spill a few registers where it has more.
        log_side = self.columns and kind is ScanKind.LOG_CUMSUM_EXP
        tight = table.roomy or tile.resident or kind is ScanKind.CUMSUM or log_side
        tight = tight or self.recomputes or (self.columns and tile.r == 1)
        return all_registers(tile.warps) if tight or not self.full else 0

    def chained(self, cut: Any) -> Program:
        """Tiles of long rows that wait for what arrives."""
        chain = Step(
            kernel="chains.scan_chain",
            grid=0,
            arguments=(*self.pointers, ("told", None), *self.arguments),
            constants=(
                *self.line_constants,
                *(("FLIP", self.flip), ("WIDE", self.wide), ("M", 0), ("V", self.tile.v)),
                *(("B", 0), ("LEVELS", 0), ("T", 0), ("W", 0)),
                ("PAIRS", self.pairs),
                ("FULL", False),
            ),
            warps=0,
            alignment=self.alignment,
            aligned=self.aligned,
        )
        mark = self.marking[0] if self.marks else None
        launched, told = chained_steps(
            cut, chain, mark, self.table, n=self.n, rows=self.tiles, base=self.base
        )
        self.marking = launched[:-1]
        why = f"rows are cut into {cut.parts} tiles, each read once, that wait for what arrives"
        return self.program(launched[-1:], "chained", why, told)

    def cut(self) -> Program:
        """Rows in chunks that meet through carries, read twice."""
        table, tile, tiles = self.table, self.tile, self.tiles
        chunks = self.chunks()
        slots = tiles * chunks.number * tile.r
        carries = Pointer(WORKSPACE, "fp64", self.base)
        # Then there are no carries.
        filled = self.recomputes and self.fills
        states, looks = None, []
        if self.recomputes:
            states = Pointer(WORKSPACE, "fp64", 0 if filled else 16 * slots)
            # Programs that take whole rows in lines look at x themselves: it is in the cache then.
            if not (filled and self.in_lines):
                looks = self.look_at_x(states, chunks)
        if filled:
            why = f"rows enough to fill the machine, each in tiles of {tile.c}, after a look at x"
            launch = self.step("whole", self.along, None, states)
            return self.program([*looks, launch], "tiled", why, 16 * slots)
        gates = "fades" if self.kind is ScanKind.LOG_CUMSUM_EXP else ""
        if self.ties is not None:
            gates = "open" if self.in_lines else "winners"
        join = self.join("joins.join_carries", ("carries", carries), chunks, ("GATES", gates))
        launches = (
            *looks,
            self.step("partial", chunks.steps, carries, states),
            join,
            self.step("apply", chunks.steps, carries, states),
        )
        pieces = f"rows are cut into {chunks.number} chunks"
        room = 8 * slots * (2 + (2 if self.recomputes else 0))
        lagged = self.in_lines and table.scan_lag and self.kind in table.lagged_scans
        if self.recomputes or not lagged or 2 * tiles * chunks.number >= TURNS:
            why = f"{pieces} that meet through carries"
            return self.program(launches, "split", why, room, again=2)
        # What is read before it is read again is to stay in the cache.
        arrays = sum(mode != "n" for mode in self.modes[:3])
        each = chunks.steps * tile.c * tile.r * self.item * arrays
        least = min(chunks.number, table.side_window)
        lead = min(tiles * chunks.number, max(least, table.scan_lag // each))
        windows = -(-chunks.number // table.side_window)
        return self.program(
            [self.step("lagged", chunks.steps, carries, lead=lead, joins=chunks.joins)],
            "lagged",
            f"{pieces}, read twice in one launch, the second time from the cache",
            room + 16 * tile.r * tiles * windows,
            counters=1 + tiles * windows,
            apart=launches,
        )

    def chunks(self) -> _Chunks:
        """How rows are cut where they do not fill the machine, or are recomputed."""
        table, tile = self.table, self.tile
        steps = 1
        windowed = self.in_lines and not self.recomputes
        if windowed:
            steps = max(table.side_chunk // tile.c, 1)
        elif not self.recomputes:
            # Carries are to be few beside the elements.
            few = self.along * self.tiles // (8 * table.fill)
            steps = max(table.scan_chunk // tile.c, few, 1)
        number = -(-self.along // steps)
        lanes = tile.r if windowed else min(tile.r, table.join_lanes)
        # The same in one launch has windows, which are whole numbers of them.
        most = table.side_window if windowed else up(number)
        return _Chunks(steps, number, lanes, min(max(2, table.join // lanes), most))

    def join(
        self, kernel: str, values: tuple[str, Pointer], chunks: _Chunks, own: tuple[str, Any]
    ) -> Step:
        """A launch that joins carries, or states, of all chunks."""
        tile = self.tile
        warps = max(1, min(4, chunks.lanes * chunks.joins // 32))
        return Step(
            kernel=kernel,
            grid=self.tiles * (tile.r // chunks.lanes),
            arguments=(
                values,
                ("total", Int(self.tiles * chunks.number * tile.r)),
                ("tiles_along", Int(chunks.number, "i32")),
            ),
            constants=(
                own,
                ("FLIP", self.flip),
                ("R", tile.r),
                ("J", chunks.lanes),
                ("K", chunks.joins),
            ),
            warps=tile.warps if self.in_lines and not self.recomputes else warps,
        )

    def look_at_x(self, states: Pointer, chunks: _Chunks) -> list[Step]:
        """Launches for what y would tell: the states of all tiles, joined."""
        tile = self.tile
        x_alone = ("n", "row_dims:0", "row_x", "row_x:1", "axis_x")
        look = Step(
            kernel="joins.scan_states",
            grid=self.tiles * self.along,
            arguments=(
                ("x", dict(self.pointers)["x"]),
                ("states", states),
                *(pair for pair in self.arguments if pair[0] in ("row_dims", "row_x")),
                *(pair for pair in self.arguments if pair[0] in ("axis_dims", "axis_x")),
                ("n", integer(self.n)),
            ),
            constants=(
                ("KIND", self.kind.value),
                ("ELEMENT", self.desc.element.value),
                ("X", self.modes[1]),
                ("R", tile.r),
                ("C", tile.c),
                ("FULL", self.full),
            ),
            warps=tile.warps,
            alignment=self.alignment,
            aligned=tuple(name for name in self.aligned if name in x_alone),
        )
        if self.in_lines:
            kept = [pair for pair in look.constants if pair[0] not in ("X", "C", "FULL")]
            look = replace(
                look,
                kernel="forwards.line_states",
                constants=(
                    *kept,
                    *(("FLIP", self.flip), ("SIDE", self.columns)),
                    *(("M", tile.c // tile.v), ("V", tile.v), ("FULL", self.full)),
                ),
            )
        own = ("KIND", self.kind.value)
        return [look, self.join("joins.join_states", ("states", states), chunks, own)]
