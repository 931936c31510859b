"""Programs: a problem with known strides becomes a few launches.

The variant follows from shape, strides, element and architecture, never from the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...registry import Engine
from . import recurrence, rows, segments
from .launch import Interpreter, Launcher
from .program import Program, Strides
from .table import Table, table_of

__all__ = ["choose", "prepare", "ready", "workspace_bound"]


def prepare(
    desc: Any,
    strides: Strides,
    arch: str,
    device: int | None,
    index_shape: Sequence[int] | None = None,
    processors: int | None = None,
) -> Program:
    """The program for arrays with these strides; without a device, for the interpreter."""
    return ready(choose(desc, strides, table_of(arch, processors), index_shape), device)


def ready(made: Program, device: int | None) -> Program:
    """The same, to be run on a device, or in the interpreter."""
    if not made.steps:
        return made
    askew = ready(made.unaligned, device) if made.unaligned else None
    if device is None:
        return replace(made, runner=Interpreter(made.steps, made.counters), unaligned=askew)
    apart = Launcher(made.apart, device) if made.apart else None
    return replace(made, runner=Launcher(made.steps, device), apart_runner=apart, unaligned=askew)


def choose(
    desc: Any, strides: Strides, table: Table, index_shape: Sequence[int] | None = None
) -> Program:
    """What a table leads to; it has no runner yet."""
    engine = desc.spec.engine
    if engine in (Engine.MAP, Engine.ROW_STATE):
        return rows.program(desc, strides, table)
    if engine is Engine.RECURRENCE:
        return recurrence.program(desc, strides, table)
    return segments.program(desc, strides, index_shape or (desc.num_indices,), table)


def workspace_bound(desc: Any, table: Table) -> int:
    """The most workspace that any layout of the problem needs, in bytes."""
    if desc.spec.engine is Engine.SEGMENT_SUM:
        return segments.workspace_bytes(desc, table)
    shape, _ = desc.shape_and_axes
    if 0 in shape:
        return 0
    if desc.spec.engine is Engine.RECURRENCE:
        return recurrence.workspace_bytes(desc, table)
    return rows.workspace_bytes(desc, table)
