"""Rows of the engine *row state then map* that begin anywhere within 16 bytes, each as its run and
its edges (`kernels.ragged`)."""

from __future__ import annotations

from ...kinds import ElementKind, SoftmaxKind
from .launch import Pointer, Step, all_registers
from .program import Program, begun_anywhere, edge_lanes, up
from .row_tiles import COUNTS, Parts, Rows, warps_of

__all__ = ["Ragged"]

_EIGHTHS = 8  # of a tile: pieces of rows that fill only some of them ...
_LONG_TILE = 4096  # ... by kinds that would take more registers only up to this
_NOT_RAGGED = ("axis_x", "axis_out", "axis_order", "order_base", "NEAR", "FULL")


class Ragged(Rows):
    """Such rows; `edged`: whether they have edges at all."""

    def __init__(self, rows: Rows, edged: bool = True) -> None:
        vars(self).update(vars(rows))
        self.edged = edged
        self.even = True
        self.capped = self.plain = self.lone = False
        self.paired = self.comparable

    def pairs(self, every: bool) -> bool:
        return self.paired

    def resident(self) -> Program | None:
        """Whole rows in the registers of a program, if they fit."""
        table, op, element = self.table, self.desc.op, self.desc.element
        most, warps = table.part_of("ragged_rows", op, element)
        c = max(self.length, 32 // self.item)
        if c > most:
            return None
        tile = table.ragged_tile_of(op, element, c)
        tile *= 4 if self.product and 4 * c <= tile else 1
        r = min(up(self.beside.extent), max(1, tile // c))
        if c <= table.ragged_short:
            warps = warps_of(r * c, self.full, 1, self.half, table)
            warps = max(warps, 2) if self.product and r > 1 else warps
            each = c // _EIGHTHS  # of which a tile may have fewer, by threads that read 16 bytes
            few = min(warps, each * self.item // 512)
            light = c <= _LONG_TILE or op in (SoftmaxKind.LOG_SOFTMAX, *COUNTS)
            if light and not self.product and r == 1 and self.n <= c - each and few:
                c, warps = -(-self.n // each) * each, few
        return Program(
            steps=(self.step("whole", Parts(r, c, warps, 1)),),
            runner=None,
            workspace_bytes=0,
            reads={},
            layout=self.layout,
            variant="resident",
            why=f"a program keeps {r} whole row{'s' if r > 1 else ''} in registers: one read; the "
            "edges of a row, where 16 bytes are not whole, are read apart",
        )

    def cut(self, way: str) -> Parts | None:
        """Parts for a cluster, or to be read twice as others are."""
        if way != "cluster":
            return super().cut(way)
        table = self.table
        c, warps = table.part_of("ragged_rows", self.desc.op, self.desc.element)
        most = 2 * c
        while c < most and -(-self.n // c) > table.cluster:
            c, warps = 2 * c, 2 * warps
        while self.tiles(1) * -(-self.n // c) < table.fill and warps > 1:
            if -(-2 * self.n // c) > table.cluster:
                break
            c, warps = c // 2, warps // 2
        return Parts(1, c, warps, -(-self.n // c))

    def step(self, phase: str, parts: Parts, states: Pointer | None = None, lead: int = 0) -> Step:
        """A launch of `ragged.row_ragged`."""
        made = super().step(phase, parts, states, lead)
        lanes, apart = self.lanes_of_edges(phase, parts.r, made.warps)
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

    def threads(self, phase: str, parts: Parts, every: bool) -> tuple[int, int, int]:
        """Warps, pieces and registers (0: as the compiler likes) of a tile."""
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
