"""The launches of the engine *recurrence*."""

from __future__ import annotations

from math import prod

from ...descriptors import ScanBackwardDescriptor
from ...kinds import ScanKind
from . import alone, tiled, walked
from .chained import ALIGNED, PLACES
from .launch import COUNTERS, WORKSPACE, Pointer
from .operands import lined
from .program import EMPTY, HALVES, Program, Strides, before, up
from .table import Table

__all__ = ["program", "workspace_bytes"]


def program(desc: ScanBackwardDescriptor, strides: Strides, table: Table) -> Program:
    """The program for arrays with these strides."""
    shape, _ = desc.shape_and_axes
    if 0 in shape:
        return EMPTY
    made = alone.program(desc, strides, table)
    if made is not None:
        return made
    made = tiled.program(desc, strides, table)
    used = walked.arrays_of(desc)
    if not {*used} <= {*strides} or (desc.spec.ties and not table.marks):
        return made
    lying = lined(desc, {name: strides[name] for name in used})
    if lying.columns:
        return walked.strips(desc, lying, table, made)
    # All tiles of which are full, or that are better in tiles all the same.
    least = table.number_of(table.walked_from, "walked_uneven", desc.kind, desc.element)
    even = _every_full(made) or shape[desc.scan_axis] < least
    walk = walked.program(desc, lying, table, not even)
    run = walked.ragged(desc, lying, table, made)
    if walk is not None:
        return before(walk, run or made)
    if run is None:
        return made
    if not (even and _reads_whole(made, desc.element.size_bytes)):
        return run
    # No workspace for the sake of addresses that hardly anybody has.
    return before(made, run) if made.workspace_bytes or not run.workspace_bytes else made


def _every_full(made: Program) -> bool:
    """Whether no tile is masked."""
    return all(dict(step.constants).get("FULL", True) for step in made.steps)


def _reads_whole(made: Program, item: int) -> bool:
    """Whether what lies in the caller's arrays is moved 16 bytes at a time, at such addresses."""
    own = (WORKSPACE, COUNTERS)
    return all(
        step.alignment * item >= 16
        for step in made.steps
        if any(isinstance(one, Pointer) and one.operand not in own for _, one in step.arguments)
    )


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
    small = 4 if desc.element in HALVES else 2
    small = 8 if desc.kind is ScanKind.LOG_CUMSUM_EXP else small
    columns = table.scan_chunk
    if desc.kind is not ScanKind.CUMSUM:  # which may be recomputed
        columns = min(columns, table.scan_column_few // small)
        _, m, v, _ = table.side_of("forward_side", desc.kind, desc.element)
        columns = min(columns, max(2, m // 2) * v or columns)
    forward, _ = table.part_of("forward_lines", desc.kind, desc.element)
    for used, limit, step in (
        (True, table.scan_resident // 2, table.scan_step // 2),
        (True, tile // 2, tile // 2),
        (forward > 0, forward // 2, forward // 2),
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
