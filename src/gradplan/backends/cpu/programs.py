"""Programs of all engines: a problem with known strides, and the most workspace it may need."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ...registry import Engine
from . import recurrence, rows, segments
from .program import Program, Strides

__all__ = ["prepare", "workspace_bound"]


def prepare(desc: Any, strides: Strides, index_shape: Sequence[int] | None = None) -> Program:
    """The program for arrays with these strides (in elements); an argument not given is absent.

    `index_shape` is the shape of an embedding's indices where they are of higher rank.
    """
    engine = desc.spec.engine
    if engine in (Engine.MAP, Engine.ROW_STATE):
        return rows.program(desc, strides)
    if engine is Engine.RECURRENCE:
        return recurrence.program(desc, strides)
    return segments.program(desc, strides, index_shape or (desc.num_indices,))


def workspace_bound(desc: Any) -> int:
    """The most workspace that any layout of the problem needs, in bytes."""
    if desc.spec.engine is Engine.SEGMENT_SUM:
        return segments.workspace_bytes(desc)
    shape, axes = desc.shape_and_axes
    total = prod(shape)
    if total == 0:
        return 0
    n = prod(shape[axis] for axis in axes)
    if desc.spec.engine is Engine.RECURRENCE:
        return recurrence.workspace_bytes(desc, n, total // n)
    return rows.workspace_bytes(desc, n, total // n)
