"""Long rows of a scan in one read: tiles that wait for what arrives from behind (`kernels.chains`),
and the launch that marks winners before them (`kernels.winners`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ...kinds import ElementKind, ScanKind
from .launch import WORKSPACE, Pointer, Step, all_registers
from .program import TURNS, clearing
from .table import Table

__all__ = ["ALIGNED", "PLACES", "Cut", "changed", "cut_of", "steps"]

ALIGNED = 256
"""Bytes of the workspace in which words of one sort begin."""
PLACES = ("chained", "chained_far", "chained_many")
"""The fields of the table that say how rows are cut."""


class Cut(NamedTuple):
    """How a row is cut into tiles, and how those are joined."""

    tile: int
    warps: int
    parts: int
    stretch: int
    levels: int
    lanes: int
    registers: int

    def words(self, rows: int) -> int:
        """Words in which programs tell each other what they do: a turn, tiles and stretches."""
        each = sum(-(-self.parts // int(self.stretch**level)) for level in range(self.levels))
        return -(-8 * (1 + 2 * rows * each) // ALIGNED) * ALIGNED // 8


def cut_of(
    kind: ScanKind, element: ElementKind, n: int, rows: int, table: Table, place: str = ""
) -> Cut | None:
    """The cut of so many rows of n elements, by a place of the table or by the one that is meant
    for them; None where they are not cut."""
    many = rows >= table.scan_fill
    if not place:
        if many and n < table.chained_from:
            return None
        place = "chained_many" if many else "chained"
        tile, _ = table.part_of(place, kind, element)
        if tile and not many and n > 2 * table.chain**2 * tile:
            place = "chained_far"
    tile, warps = table.part_of(place, kind, element)
    parts = -(-n // tile) if tile else 0
    stretch, levels, lanes = _levels(parts, table.chain)
    if parts <= 1 or not stretch or rows * parts >= TURNS:
        return None
    cap = table.number_of(table.registers, place, kind, element)
    return Cut(tile, warps, parts, stretch, levels, lanes, cap)


def _levels(tiles: int, stretch: int) -> tuple[int, int, int]:
    """How many tiles make a stretch, in how many levels, and how many are joined at a time; all 0
    where there are too many. Three ways, lest every length have a kernel of its own."""
    fewer = max(2, stretch // 2)
    ways = ((stretch, 2, 4 * stretch), (fewer, 5, 16 * fewer), (fewer, 7, 16 * fewer))
    for size, levels, lanes in ways:
        longest = lanes - 2 * size * (levels - 1)
        if tiles <= longest * size ** (levels - 1):
            return size, levels, lanes
    return 0, 0, 0


def changed(step: Step, table: Table, warps: int, grid: int, **constants: Any) -> Step:
    """The same launch in other tiles."""
    new = {**constants, "W": warps}
    pairs = tuple((name, new.get(name, value)) for name, value in step.constants)
    # Lest the assembler spill a few registers, where it is not known to have enough.
    registers = 0 if new["FULL"] and table.registers else all_registers(warps)
    return replace(step, grid=grid, warps=warps, constants=pairs, registers=registers)


def steps(
    cut: Cut, chain: Step, mark: Step | None, table: Table, *, n: int, rows: int, base: int
) -> tuple[list[Step], int]:
    """The launches, and the bytes of the workspace from `base` on that they tell each other in.

    `chain` and `mark` are launches whose tiles are not decided yet; `mark` is kept as it is where
    its rows are not cut.
    """
    fixed = dict(chain.constants)
    v, spare = fixed["V"], table.roomy or fixed["KIND"] == ScanKind.LOG_CUMSUM_EXP
    first = []
    words = 0
    if mark is not None:
        element = ElementKind(fixed["ELEMENT"])
        own = cut_of(ScanKind.CUMSUM, element, n, rows, table, "chained")
        if own is not None and rows < table.scan_fill:
            words = own.words(rows)
            mark = _told_at(_cut(mark, table, own, rows, v, n, PHASE="chained", R=1), base)
        first = [mark]
    chain = _told_at(_cut(chain, table, cut, rows, v, n), base + 8 * words)
    full = n % cut.tile == 0
    registers = all_registers(cut.warps) if spare or not full else 0
    if full and cut.registers:
        registers = cut.registers
    words += cut.words(rows)
    return [clearing(base, words), *first, replace(chain, registers=registers)], 8 * words


def _cut(step: Step, table: Table, cut: Cut, rows: int, v: int, n: int, **constants: Any) -> Step:
    return changed(
        step,
        table,
        cut.warps,
        grid=rows * cut.parts,
        M=cut.tile // v,
        B=cut.stretch,
        LEVELS=cut.levels,
        T=cut.lanes,
        FULL=n % cut.tile == 0,
        **constants,
    )


def _told_at(step: Step, offset: int) -> Step:
    told = ("told", Pointer(WORKSPACE, "i64", offset))
    return replace(step, arguments=tuple(told if p[0] == "told" else p for p in step.arguments))
