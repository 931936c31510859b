"""The engine *row state then map* on a GPU: which launches a problem takes. Rows stay in registers,
in those of a cluster, or in shared memory, or are read twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...descriptors import BinaryParamBackwardDescriptor, ReduceBackwardDescriptor
from ...geometry import c_strides
from ...kinds import ReduceKind, TieRule
from ...registry import Engine
from . import held, maps, tall
from .launch import Int
from .program import EMPTY, HALVES, Program, Strides, before, up
from .ragged import Ragged
from .row_tiles import NUMBER_SLOTS, STATE_SLOTS, Rows
from .table import Table

__all__ = ["numbers_of", "program", "workspace_bytes"]

_PARTS = ("lagged_rows", "lagged_columns", "cluster_rows", "cluster_columns", "ragged_rows")


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
    rows = Rows(desc, strides, table, outputs, steps, ties, p, q)
    made = _chosen(rows)
    askew = made
    # What is close to the registers there are holds where elements are read in runs of 16 bytes.
    if rows.even and (made.variant != "resident" or (rows.lone and made.steps[0].registers)):
        askew = _chosen(rows.askew())
    sources = ("dy", "x", "y", *outputs)
    if rows.strips and made.variant != "resident":
        names = tuple(sources[k] for k in rows.strips)
        strips = held.program(rows.in_classes())
        if strips is not None:
            askew = before(strips, askew, names)
    if rows.alike:
        names = tuple(sources[k] for k in rows.alike)
        run = _chosen(Ragged(rows))
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
        made = before(_chosen(Ragged(rows, edged=False)), askew) if rows.even_runs else askew
    elif askew.steps != made.steps:
        made = before(made, askew)
    if _reads(made) == 2 or (rows.columns and _better_tall(rows, made)):
        lines = tall.program(rows, p, q)
        made = made if lines is None else before(lines, made)
    return replace(made, reads={**made.reads, **unread})


def _better_tall(rows: Rows, made: Program) -> bool:
    """Whether rows side by side are rather read twice, in lines, than held so."""
    table, op, element = rows.table, rows.desc.op, rows.desc.element
    few = table.number_of(table.tall_rows, "tall_rows", op, element)
    if made.alike and rows.beside.extent <= few:
        return True
    many = table.number_of(table.tall_parts, "tall_parts", op, element)
    cut = dict(made.steps[-1].arguments).get("parts")
    return made.variant == "held" and isinstance(cut, Int) and 0 < many <= cut.value


def _reads(made: Program) -> int:
    """How often a part is read, from memory or from a cache."""
    return 2 if made.variant in ("tall", "lagged", "split") else 1


def _chosen(rows: Rows) -> Program:
    """Whole rows, or those that no program keeps alone."""
    whole = rows.resident()
    if whole is not None and not rows.longest(whole):
        return whole
    parts = rows.cut("cluster")
    clustered = parts is not None and parts.number <= rows.table.cluster
    if parts is not None and clustered and rows.rather_in(parts):
        return rows.cluster(parts)
    if whole is not None:
        return whole
    waiting = held.program(rows)
    first = rows.table.number_of(
        rows.table.held_first, f"held_{rows.layout}", rows.desc.op, rows.desc.element
    )
    if waiting is not None and (first or not clustered):
        return waiting
    if parts is not None and clustered:
        return rows.cluster(parts)
    parts = rows.cut("lagged")
    assert parts is not None
    return rows.lagged(parts)


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
    slots, number_slots = STATE_SLOTS.get(desc.op, 1), NUMBER_SLOTS.get(desc.op, 3)
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
