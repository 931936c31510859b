"""Scans whose parts wait in shared memory (`kernels.walks`): the launches, and when they are for a
problem.

Rows enough to fill the machine are *walked*, each by one program from end to end. The parts of
others are *held*: all programs take them in turn, wave by wave, and tell each other what they do.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...descriptors import ScanBackwardDescriptor
from ...kinds import ElementKind, ScanKind
from .launch import WORKSPACE, Int, Pointer, Step, all_registers
from .operands import Lined, pointers_of
from .program import Program, before, begun_anywhere, clearing, integer, up
from .table import Table

__all__ = ["arrays_of", "program", "ragged", "workspace_bytes"]

_SHARED = 220 << 10
"""Bytes of shared memory that the programs of a processor have for parts."""
_OWN = 1 << 10
"""Bytes that a program has of it besides."""
_TOGETHER = 16
"""The most warps of such programs on a processor ..."""
_WIDE_TOGETHER = 8
"""... and where each computes in f64 with more than so many places a thread ..."""
_WIDE_PLACES = 16
_FEW = 2
"""... and programs, of rows side by side, where each takes many registers."""
_STAGES = 8
"""The most parts that a program has room for where rows are held."""
_JOINERS = 4
"""Warps that join what is told there, beside those that tell it and those that use it."""
_WIDTH = 128
"""Bytes of rows side by side in a strip."""
_BITS = 32
"""Places of a row whose marks are a word."""
_LONGEST = 128
"""Places of a line at most: so many additions the guarantee allows for, see `precision`."""
_LONGEST_LOG = 64
"""The same where terms wait in registers."""
_NEARLY_ALL = 0.85
_ALIGNED = 256
_MARK = "mark"
_FROM_Y = (ScanKind.CUMPROD, ScanKind.LOG_CUMSUM_EXP)
"""Kinds that read dy, x and y, and whose parts tell two words."""


class _Parts(NamedTuple):
    """How rows are cut: `r` side by side, in lines of `e` places; a program has room for
    `stages` parts, and the machine for so many programs."""

    r: int
    lines: int
    e: int
    warps: int
    stages: int
    programs: int
    tiles: int
    number: int


def arrays_of(desc: ScanBackwardDescriptor) -> tuple[str, ...]:
    """What is read and written here: x alone tells winners, and y is never summed up anew."""
    if desc.kind in _FROM_Y:
        return ("dy", "x", "y", "dx")
    return ("dy", "x", "dx") if desc.spec.ties else ("dy", "dx")


def program(
    desc: ScanBackwardDescriptor, lying: Lined, table: Table, uneven: bool
) -> Program | None:
    """None where this is not for arrays that lie so; `uneven` rows would fill no tile.

    Of cummax and cummin x alone is asked for winners, by a launch of its own: see `kernels.walks`.
    """
    if desc.element is ElementKind.F64:
        return None
    if lying.columns or not {*lying.modes} <= {"t", "n"}:
        return None
    walk = _Walk(desc, lying, table, uneven=uneven)
    return walk.made(held=False) or walk.made(held=True) if walk.alignment == 16 else None


def strips(desc: ScanBackwardDescriptor, lying: Lined, table: Table, other: Program) -> Program:
    """The same of rows side by side, copied by as many bytes as strides and addresses allow; and
    the other program where there is nothing for them."""
    if desc.element is ElementKind.F64 or not {*lying.modes} <= {"c", "n"}:
        return other
    found = other
    for grain in reversed(lying.geometry.grains(lying.geometry.axis.size, lying.modes)):
        made = _Walk(desc, lying, table, uneven=False, grain=grain).made(held=False)
        if made is not None:
            found = before(made, found) if grain > lying.geometry.item else made
        elif grain == 16:
            found = other if found is other else before(other, found)
    return found


def ragged(
    desc: ScanBackwardDescriptor, lying: Lined, table: Table, other: Program
) -> Program | None:
    """The same of rows that begin anywhere, each as its run and its edges (see `kernels.ragged`);
    and the other program for arrays that do not lie alike."""
    alike = lying.geometry.alike(lying.modes)
    if desc.element is ElementKind.F64 or lying.columns or not alike:
        return None
    if not {*lying.modes} <= {"t", "n"}:  # one value a row is none of a run
        return None
    made = _Walk(desc, lying, table, uneven=True, anywhere=True).made(held=False)
    names = tuple(("dy", "x", "y", "dx")[k] for k in alike)
    return None if made is None else before(made, other, names)


class _Walk:
    """A problem whose rows lie in runs."""

    def __init__(
        self,
        desc: ScanBackwardDescriptor,
        lying: Lined,
        table: Table,
        *,
        uneven: bool,
        anywhere: bool = False,
        grain: int = 16,
    ) -> None:
        self.desc, self.table, self.anywhere, self.uneven = desc, table, anywhere, uneven
        self.grain = grain  # bytes of a copy
        self.columns, self.flip = lying.columns, lying.flip
        geometry = self.geometry = lying.geometry
        self.n, self.rows = geometry.axis.size, geometry.rows.size
        self.beside = geometry.rows.dims[0].extent
        self.marked = bool(desc.spec.ties)
        self.kinds = (_MARK, desc.kind.value) if self.marked else (desc.kind.value,)
        self.wide = desc.kind is ScanKind.CUMPROD and table.exact_product(desc.element, self.n)
        self.log = desc.kind is ScanKind.LOG_CUMSUM_EXP
        self.processors = max(1, table.fill // 2)
        self.alignment, self.aligned = geometry.alignment(self.n, lying.modes)
        if self.columns:
            self.alignment, self.aligned = geometry.claims(self.n, lying.modes, grain)
        self.pointers = pointers_of(geometry, ("dy", "x", "y", "dx"), lying.modes)

    def made(self, held: bool) -> Program | None:
        """The program, if there are parts for it."""
        cuts = [self.cut(kind, held) for kind in self.kinds]
        base = _mark_bytes(self.rows, self.n, self.anywhere) if self.marked else 0
        words = 0
        steps = []
        for kind, parts in zip(self.kinds, cuts, strict=True):
            if parts is None:
                return None
            steps.append(self.step(kind, parts, base + 8 * words if held else None))
            if held:
                words += _told_words(kind, parts.tiles * parts.number)
        number = cuts[-1].number if cuts[-1] else 0
        if held:
            steps.insert(0, clearing(base, words))
            why = f"rows are cut into {number} parts, kept in shared memory by programs that stay"
        else:
            why = f"a program walks whole rows in {number} parts, the next on their way"
        if self.grain < 16:
            why += f", {self.grain} bytes at a time"
        source = "_marked" if self.marked else ""
        if self.desc.kind in _FROM_Y:
            source = "_from_y"
        return Program(
            steps=tuple(steps),
            runner=None,
            workspace_bytes=base + 8 * words,
            reads={"y": 0} if self.marked else {},
            layout="columns" if self.columns else "rows",
            variant=("held" if held else "walked") + source,
            why=f"{why}: one read",
            grain=self.grain,
        )

    def cut(self, kind: str, held: bool) -> _Parts | None:
        """The parts, if the table has a size for them."""
        wide = _WIDTH // self.geometry.item
        place = self.place(kind, held, wide)
        r = 1 if not self.columns else wide // 2 if place == "walked_strips" else wide
        tile, warps = self.table.part_of(place, kind, self.desc.element) if place else (0, 0)
        if not tile or (self.columns and self.beside < r):
            return None
        if held and len(self.geometry.rows.dims) > 1:
            warps = min(warps, 4)  # where rows lie takes registers
        if not (self.columns or held):
            while tile // 2 >= self.n and warps > 1:
                tile, warps = tile // 2, warps // 2
            if tile // 2 >= self.n and tile > 32 * _BITS:  # words have so many places
                tile //= 2
        parts = self.parts(kind, held, r, tile, warps)
        least = 0 if self.columns or held else self.table.walked_warps * self.processors
        while parts and parts.programs * parts.warps < least and parts.warps < 4:
            larger = self.parts(kind, held, r, 2 * tile, 2 * warps)
            if larger is None:
                break
            parts, tile, warps = larger, 2 * tile, 2 * warps
        return parts

    def parts(self, kind: str, held: bool, r: int, tile: int, warps: int) -> _Parts | None:
        """Parts of so many elements, r rows side by side, if they fit."""
        stages = self.table.walked_column_parts if self.columns else self.table.walked_parts
        lines = warps if self.columns else 32 * warps
        # What is masked takes registers; an address for every few bytes does, and where rows lie.
        masked = (self.columns or held) and not self.full(r, tile // r)
        fine = self.grain < 8
        if (masked or fine) and tile // r // lines > _BITS:
            tile //= 2
        if fine and len(self.geometry.rows.dims) > 1 and not (self.marked or self.log):
            tile //= 2
        e = tile // r // lines
        far = self.columns and not self.geometry.near(r, lines * e)
        bits = self.marked and kind != _MARK
        from_y = self.desc.kind in _FROM_Y
        item = self.geometry.item
        each = tile * item * (3 if from_y else 1) + bits * tile // 8
        together = _WIDE_TOGETHER if self.wide and e > _WIDE_PLACES else _TOGETHER
        most = min(max(1, together // warps), _SHARED // (stages * each + _OWN))
        if held:
            last = tile * item if from_y else 0  # has room for two parts
            stages = min(_STAGES, (self.table.held_bytes - 2 * last) // (each - last))
            most = stages >= 2
        longest = _LONGEST_LOG if self.log else _LONGEST
        if far or not most or e > longest or (self.marked and e < _BITS):
            return None
        if self.columns:  # what takes registers: many elements a thread, gates, f64, what is masked
            if bits and not self.full(r, tile // r):
                most = 1
            elif bits or self.wide or self.log or tile // (32 * warps) > 32:
                most = min(most, _FEW)
        tiles, number = self.tiles(r), -(-self.n // (lines * e))
        programs = self.programs(tiles, most, held)
        if held and kind == ScanKind.CUMSUM:
            programs = _even(tiles * number, programs)
        if not programs or tiles * number >= 2**31 - 4 * programs * stages:
            return None
        return _Parts(r, lines, e, warps, stages, programs, tiles, number)

    def place(self, kind: str, held: bool, wide: int) -> str:
        """The field of the table that has the size of parts, if rows are long enough for it;
        strips have so many rows, or half of them."""
        table, element = self.table, self.desc.element
        if self.columns:
            if held or self.n < table.walked_axis:
                return ""
            usual = "walked_columns" if self.grain == 16 else "walked_grains"
            width, strip = (
                table.part_of(name, kind, element)[0] for name in (usual, "walked_strips")
            )
            # In tiles sums and products of many strips are faster than copied by few bytes.
            tiled = self.desc.kind in (ScanKind.CUMSUM, ScanKind.CUMPROD)
            if self.grain < 16 and tiled and self.tiles(wide) >= table.strips:
                return ""
            # Fewer than two for each processor are made narrower.
            narrow = width and self.tiles(wide) < table.fill if self.grain == 16 else not width
            return "walked_strips" if strip and narrow else usual
        ways = {"held_scans": "held_scans"} if held else {"walked_rows": "walked_rows"}
        if self.anywhere:
            ways = {"walked_ragged": "walked_ragged"}
        elif self.uneven and not held:
            ways["walked_uneven"] = "walked_ragged"
        for way, name in ways.items():
            if self.n >= table.number_of(table.walked_from, way, self.desc.kind, element):
                return name
        return ""

    def programs(self, tiles: int, most: int, held: bool) -> int:
        """How many, up to so many for each processor; 0 where whole rows keep too few at work."""
        if held:
            return self.processors * most
        # Nearly all at work to the end; one of rows does not fill a processor.
        least = 1 if self.columns or most == 1 else 2
        sizes = [self.processors * k for k in range(most, least - 1, -1)]
        found = next((size for size in sizes if _busy(tiles, size) >= _NEARLY_ALL), 0)
        # Other ways read rows that begin anywhere element by element: most at work will do.
        if not found and self.anywhere and sizes and tiles > self.processors:
            found = max(sizes, key=lambda size: _busy(tiles, size))
        return found

    def full(self, r: int, c: int) -> bool:
        """Whether all parts of r rows by c places are full."""
        return not self.anywhere and self.n % c == 0 and self.beside % r == 0

    def tiles(self, r: int) -> int:
        return -(-self.beside // r) * (self.rows // self.beside)

    def step(self, kind: str, parts: _Parts, told: int | None) -> Step:
        """A launch, whose programs tell each other what they do at an offset of the workspace."""
        mark, held = kind == _MARK, told is not None
        used = ("x",) if mark else ("dy", "out") if self.marked else ("dy", "x", "y", "out")
        arguments = [(name, value if name in used else None) for name, value in self.pointers]
        constants: list[tuple[str, Any]] = []
        if held or not self.log:
            arguments.append(("words", Pointer(WORKSPACE, "i32") if self.marked else None))
            # What is marked is the same of all.
            name = self.desc.kind.value if mark or not self.marked else "cummax"
            constants += [("KIND", name), ("TIES", self.desc.ties.value if mark else "")]
            constants += [("MARK", mark), ("WIDE", self.wide)]
        constants += [("ELEMENT", self.desc.element.value), ("FLIP", self.flip)]
        if told is None:
            kernel = "walk_logs.walk_logs" if self.log else "walks.walk_rows"
            grid = min(parts.programs, parts.tiles)
            registers = _registers(parts.warps * -(-parts.programs // self.processors))
            constants += [("SIDE", self.columns), ("R", parts.r), ("ANYWHERE", self.anywhere)]
        else:
            kernel = "held_scans.held_scan"
            grid = min(parts.programs, parts.tiles * parts.number)
            registers = all_registers(-(-(2 * parts.warps + _JOINERS) // 4) * 4)
            arguments.append(("told", Pointer(WORKSPACE, "i64", told)))
            constants += [("K", up(max(self.processors, 32 * _JOINERS))), ("JOINERS", _JOINERS)]
            constants += [("REGISTERS", self.table.registers_of(kind, parts.warps))]
        step = Step(
            kernel=kernel,
            grid=grid,
            arguments=(
                *arguments,
                *self.geometry.arguments(),
                ("n", integer(self.n)),
                ("tiles", Int(parts.tiles, "i32")),
                ("parts", Int(parts.number, "i32")),
            ),
            constants=(
                *constants,
                ("G", parts.lines),
                ("E", parts.e),
                ("STAGES", parts.stages),
                ("NW", parts.warps),
                ("FULL", self.full(parts.r, parts.lines * parts.e)),
                *(() if held else (("V", self.grain // self.geometry.item),)),
            ),
            warps=parts.warps,
            registers=registers,
            alignment=self.alignment,
            aligned=self.aligned,
            together=held,
            grain=self.grain if self.grain < 16 else 0,
        )
        return begun_anywhere(step, kernel, ()) if self.anywhere else step


def _busy(tiles: int, programs: int) -> float:
    """The share of programs that take whole rows which are at work until the last one ends."""
    return tiles / (programs * -(-tiles // programs))


def _even(units: int, programs: int) -> int:
    """Programs that take so many parts in as few waves, but none of a few parts, which would take
    as long as any other; all where that would leave more than one of 16 idle. Measured to win a
    point for cumsum, and to lose three for cummax."""
    even = -(-units // -(-units // programs))
    return even if 16 * even >= 15 * programs else programs


def _registers(warps: int) -> int:
    """The most that a thread can have where so many warps run on a processor, each of whose four
    parts has a quarter of the registers."""
    most = all_registers(-(-warps // 4) * 4)
    return most if most == 255 else most // 8 * 8


def _told_words(kind: str, units: int) -> int:
    """Words in which so many parts tell what they do; what comes after them is aligned."""
    words = units * (2 if kind in _FROM_Y else 1)
    return -(-8 * words // _ALIGNED) * _ALIGNED // 8


def _mark_bytes(rows: int, n: int, anywhere: bool) -> int:
    """A word for so many places of each row, and one for each of its edges."""
    words = -(-n // _BITS) + (2 if anywhere else 0)
    return -(-4 * rows * words // _ALIGNED) * _ALIGNED


def workspace_bytes(desc: ScanBackwardDescriptor, table: Table) -> int:
    """The most workspace that any layout of a problem needs here."""
    if desc.element is ElementKind.F64:
        return 0
    shape, (axis,) = desc.shape_and_axes
    n = shape[axis]
    rows = prod(shape) // n
    least = table.number_of(table.walked_from, "held_scans", desc.kind, desc.element)
    marked = bool(desc.spec.ties) and table.marks
    bound = _mark_bytes(rows, n, anywhere=True) if marked else 0
    for kind in (_MARK, desc.kind.value) if marked else (desc.kind.value,):
        tile, _ = table.part_of("held_scans", kind, desc.element)
        if tile and n >= least:  # parts that are not full may be half as large
            bound += 8 * _told_words(kind, rows * -(-n // (tile // 2)))
    return bound
