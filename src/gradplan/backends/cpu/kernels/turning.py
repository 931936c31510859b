"""Tiles [step][lane] of elements as they are stored: rows turned round on their way in and out, so
that neighbouring rows are lanes."""

from __future__ import annotations

from typing import Any

from ....kinds import ElementKind
from .device import inlined
from .lowlevel import LANES, make_copy, make_turn

__all__ = ["make_empty", "make_fill"]


def make_fill(element: ElementKind, tile_scope: str) -> Any:
    """`fill(tile, pitch, address, ks, js, steps, w)`: so many steps of w lanes, from memory."""
    fetch = make_copy(element, "in", tile_scope)
    turn = make_turn(element, "in", tile_scope, inwards=True)

    @inlined
    def one(tile_at, memory_at):
        fetch(tile_at, memory_at)

    return _mover(element, one, turn)


def make_empty(element: ElementKind, tile_scope: str) -> Any:
    """`empty(...)`: the other way."""
    deliver = make_copy(element, tile_scope, "out")
    turn = make_turn(element, tile_scope, "out", inwards=False)

    @inlined
    def one(tile_at, memory_at):
        deliver(memory_at, tile_at)

    return _mover(element, one, turn)


def _mover(element: ElementKind, one: Any, turn: Any) -> Any:
    size = element.size_bytes

    @inlined
    def some(tile, pitch, address, ks, js, k0, k1, j0, j1):
        for k in range(k0, k1):
            for j in range(j0, j1):
                one(tile + k * pitch + j * size, address + k * ks + j * js)

    # Backwards: the whole walk through memory then descends evenly, which the hardware foresees.
    # Eight lanes at a time: rows are often a power of two apart, and more lines than that do not
    # fit a set of the nearest cache.
    @inlined
    def move(tile, pitch, address, ks, js, steps, w):
        # Pitches and strides in bytes.
        if ks != size and ks != -size:
            for j in range(0, w, LANES):
                some(tile, pitch, address, ks, js, 0, steps, j, min(w, j + LANES))
            return
        lanes, whole = w // LANES * LANES, steps // LANES * LANES
        some(tile, pitch, address, ks, js, whole, steps, 0, lanes)
        some(tile, pitch, address, ks, js, 0, steps, lanes, w)
        for j in range(0, lanes, LANES):
            for back in range(LANES, whole + 1, LANES):
                k = whole - back
                spot = address + k * ks + j * js
                turn(tile + k * pitch + j * size, pitch, spot, js, int(ks < 0))

    return move
