"""Loop nests: how a problem of any rank and strides becomes a few long loops.

Dimensions fall into two groups, those along the axis (reduced or scanned) and those across it.
Within a group the order of visits is free, so dimensions of extent 1 go, dimensions are sorted
by the output's strides, walked forwards, and merged wherever every operand allows it: a
contiguous rank-8 map is one flat loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Dim", "Nest", "c_strides", "nest", "told_strides"]


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop: its extent, and each operand's step in elements."""

    extent: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of one group, innermost first, and where each operand starts (elements)."""

    dims: tuple[Dim, ...]
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        total = 1
        for dim in self.dims:
            total *= dim.extent
        return total


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def told_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides as views tell them: 0 along an extent of 1, and everywhere in an empty array."""
    if 0 in shape:
        return (0,) * len(shape)
    return tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))


def nest(
    shape: Sequence[int],
    axes: Sequence[int],
    strides: Sequence[Sequence[int]],
    lead: int,
    *,
    ordered: bool = False,
) -> Nest:
    """Collapse the dimensions `axes` of a problem.

    `strides` holds one row per operand; `lead` is the operand (the output) whose strides decide
    the order. `ordered=True` keeps a single axis as it is: a scan may not turn round.
    """
    count = len(strides)
    offsets = [0] * count
    dims = []
    for axis in axes:
        extent = shape[axis]
        if extent == 1 and not ordered:
            continue
        steps = [row[axis] for row in strides]
        if steps[lead] < 0 and not ordered:
            for k in range(count):
                offsets[k] += (extent - 1) * steps[k]
                steps[k] = -steps[k]
        dims.append(Dim(extent, tuple(steps)))
    dims.sort(key=lambda dim: (abs(dim.strides[lead]), sum(map(abs, dim.strides))))
    merged: list[Dim] = []
    for dim in dims:
        if merged:
            inner = merged[-1]
            if all(o == i * inner.extent for o, i in zip(dim.strides, inner.strides, strict=True)):
                merged[-1] = Dim(inner.extent * dim.extent, inner.strides)
                continue
        merged.append(dim)
    if not merged:
        merged.append(Dim(1, (0,) * count))
    return Nest(tuple(merged), tuple(offsets))
