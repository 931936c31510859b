"""Map, and row state then map: one engine, since a map is a row kind without a state.

A unit of work is a row (ROWS layout), a block of neighbouring rows side by side (COLUMNS
layout: the axis is walked in the order memory lies, many rows at a time), or, when rows are
few and long, a chunk of one of these. Chunks have a fixed length, so bits never depend on how
many threads there are:

- FUSED: state, then map;
- PARTIAL: the state of each chunk, into the workspace;
- COMBINE: chunk states to row states, in order;
- APPLY: the map alone. (A map without a state runs this.)

Inside a row, blocks of 512 are summed in lanes and the blocks' sums in f64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....kinds import ElementKind, Named, TieRule
from . import layout as at
from .device import inlined
from .formulas import is_wide, map_formula
from .lowlevel import (
    make_load,
    make_scratch,
    make_store,
    make_tuple_cast,
    make_tuple_memory,
    meta,
    meta_float,
)

_BLOCK = 512
MAX_LANES = 512


@inlined
def place(m, innermost, more_at, more, i, q):
    """Where index i of the innermost dimension and q of the others lies, for each operand.

    The offsets of dy, x, y, out, out2 and of the tie rules' index, in elements.
    """
    o1, o2, o3 = i * meta(m, innermost + 1), i * meta(m, innermost + 2), i * meta(m, innermost + 3)
    o4, o5, o6 = i * meta(m, innermost + 4), i * meta(m, innermost + 5), i * meta(m, innermost + 6)
    for d in range(more):
        entry = more_at + d * at.DIM_WORDS
        index = q
        if d + 1 < more:  # the outermost needs no division
            extent = meta(m, entry)
            q = index // extent
            index -= q * extent
        o1 += index * meta(m, entry + 1)
        o2 += index * meta(m, entry + 2)
        o3 += index * meta(m, entry + 3)
        o4 += index * meta(m, entry + 4)
        o5 += index * meta(m, entry + 5)
        o6 += index * meta(m, entry + 6)
    return o1, o2, o3, o4, o5, o6


def build(
    kind: Named,
    element: ElementKind,
    ties: TieRule | None,
    columns: bool,
    strides: str,
    scalars: bool,
    outputs: int,
    extreme: bool = False,
) -> Any:
    """The kernel of one kind.

    - `strides`: of the inner loop, "unit" (all 1), "broadcast" (dy and y 0, the rest 1), or
      "any" (read from the meta block);
    - `scalars`: dy and y are one number a row (reductions in ROWS layout);
    - `outputs`: 2 where both gradients of a binary kind are wanted;
    - `extreme`: parameters that only f64 holds.
    """
    formula = map_formula(kind, element, ties)
    wide = extreme or is_wide(kind, element, ties)
    real = np.float64 if wide else np.float32
    load = make_load(element, wide)
    zero = real(0)
    # The map may work in f32 where the state is summed in f64.
    map_wide = extreme or is_wide(kind, element, ties, mapped=True)
    map_real = np.float64 if map_wide else np.float32
    map_load, map_store = make_load(element, map_wide), make_store(element, map_wide)
    map_zero = map_real(0)
    apply, indexed, two = formula.apply, formula.indexed, outputs == 2
    apply2 = formula.apply2 or formula.apply
    reads = formula.uses.split()
    uses_x, uses_y = "x" in reads, "y" in reads
    unit, broadcast = strides == "unit", strides == "broadcast"
    has_state = formula.step is not None
    first = formula.first or (0.0,)
    first_block = tuple(real(value) for value in first)
    slots = len(first)
    state_load, state_store = make_tuple_memory(slots)
    narrow = make_tuple_cast(slots, map_wide)

    @inlined
    def stride(m, entry, operand):
        if unit:
            return 1
        if broadcast:
            return 0 if operand == at.S_DY or operand == at.S_Y else 1
        return meta(m, entry + operand)

    if formula.easy is not None:
        easy = formula.easy
    else:

        @inlined
        def easy(r):
            return False

    if has_state:
        step, merge, finish = formula.step, formula.merge, formula.finish
    else:

        @inlined
        def step(s, dy, x, y, i, p):
            return s

        @inlined
        def merge(s, t):
            return s

        @inlined
        def finish(s, n):
            return s

    @inlined
    def combine(ws, n, chunks, lo, hi):
        for row in range(lo, hi):
            s = first
            for c in range(chunks):
                s = merge(s, state_load(ws, (row * chunks + c) * slots, 1))
            state_store(ws, row * chunks * slots, 1, finish(s, float(n)))

    def reader(load, zero):
        @inlined
        def values(dy, x, y, od, ox, oy, row_dy, row_y):
            vd = row_dy if scalars else load(dy, od)
            vx = load(x, ox) if uses_x else zero
            vy = row_y
            if uses_y and not scalars:
                vy = load(y, oy)
            return vd, vx, vy

        return values

    values, map_values = reader(load, zero), reader(map_load, map_zero)

    @inlined
    def gather(m, dy, x, y, base, e0, e1):
        # The state of elements e0..e1 of the row at these offsets.
        p = real(meta_float(m, at.PARAM))
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
        si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
        index_base = meta(m, at.INDEX_BASE)
        row_dy = load(dy, base[0]) if scalars else zero
        row_y = load(y, base[2]) if scalars and uses_y else zero
        s, t, room = first, first_block, _BLOCK  # a block may span several inner runs
        e = e0
        while e < e1:
            q = e // inner
            k0 = e - q * inner
            k1 = min(inner, k0 + e1 - e, k0 + room)
            o = place(m, at.AXIS, at.MORE_AXIS_AT, more, 0, q)
            od, ox, oy, oi = base[0] + o[0], base[1] + o[1], base[2] + o[2], index_base + o[5]
            for k in range(k0, k1):
                vd, vx, vy = values(dy, x, y, od + k * sd, ox + k * sx, oy + k * sy, row_dy, row_y)
                t = step(t, vd, vx, vy, float(oi + k * si), p)
            e += k1 - k0
            room -= k1 - k0
            if room == 0:
                s, t, room = merge(s, t), first_block, _BLOCK
        return merge(s, t)

    @inlined
    def scatter(m, s, dy, x, y, out, out2, base, e0, e1):
        # The outputs of elements e0..e1, given the row's state.
        p, p2 = map_real(meta_float(m, at.PARAM)), map_real(meta_float(m, at.PARAM2))
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
        so, so2 = stride(m, at.AXIS, 4), stride(m, at.AXIS, 5)
        si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
        index_base = meta(m, at.INDEX_BASE)
        row_dy = map_load(dy, base[0]) if scalars else map_zero
        row_y = map_load(y, base[2]) if scalars and uses_y else map_zero
        r = narrow(s)
        is_easy = easy(s)
        e = e0
        while e < e1:
            q = e // inner
            lo = e - q * inner
            hi = min(inner, lo + e1 - e)
            o = place(m, at.AXIS, at.MORE_AXIS_AT, more, 0, q)
            od, ox, oy, oi = base[0] + o[0], base[1] + o[1], base[2] + o[2], index_base + o[5]
            oo, oo2 = base[3] + o[3], base[4] + o[4]
            for k in range(lo, hi):
                vd, vx, vy = map_values(
                    dy, x, y, od + k * sd, ox + k * sx, oy + k * sy, row_dy, row_y
                )
                i = float(oi + k * si)
                dx = apply(r, vd, vx, vy, i, p, p2, is_easy, s)
                if two:  # both before the first store, which may be in the place of dy
                    dx2 = apply2(r, vd, vx, vy, i, p, p2, is_easy, s)
                    map_store(out2, oo2 + k * so2, dx2)
                map_store(out, oo + k * so, dx)
            e += hi - lo

    def rows(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        dy, x, y = meta(call, at.DY), meta(call, at.X), meta(call, at.Y)
        out, out2 = meta(call, at.OUT), meta(call, at.OUT2)
        n, chunk, chunks = meta(m, at.EXTENT), meta(m, at.CHUNK), meta(m, at.CHUNKS)
        if phase == at.COMBINE:
            combine(ws, n, chunks, lo, hi)
            return
        across, more = meta(m, at.ACROSS), meta(m, at.MORE_ACROSS)
        for u in range(lo, hi):
            row = u // chunks
            e0 = (u - row * chunks) * chunk
            e1 = min(n, e0 + chunk)
            q = row // across
            base = place(m, at.ACROSS, at.MORE_ACROSS_AT, more, row - q * across, q)
            s = first
            if has_state:
                if phase == at.APPLY:
                    s = state_load(ws, row * chunks * slots, 1)
                else:
                    s = gather(m, dy, x, y, base, e0, e1)
                if phase == at.PARTIAL:
                    state_store(ws, u * slots, 1, s)
                    continue
                if phase == at.FUSED:
                    s = finish(s, float(n))
            scatter(m, s, dy, x, y, out, out2, base, e0, e1)

    if not columns:
        return rows

    # The rows' states so far, the states of the current block of steps, and what the map reads.
    scratch = make_scratch(3 * MAX_LANES * slots)
    block_load, block_store = make_tuple_memory(slots, "tile a", wide)
    result_load, result_store = make_tuple_memory(slots, "tile b", map_wide)

    @inlined
    def gather_lanes(m, dy, x, y, base, e0, e1, w, state, block):
        p = real(meta_float(m, at.PARAM))
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        jd, jx, jy = stride(m, at.ACROSS, 1), stride(m, at.ACROSS, 2), stride(m, at.ACROSS, 3)
        index_base = meta(m, at.INDEX_BASE)
        for j in range(w):
            state_store(state, j, MAX_LANES, first)
        for b in range(e0, e1, _BLOCK):
            for j in range(w):
                block_store(block, j, MAX_LANES, first_block)
            for e in range(b, min(e1, b + _BLOCK)):
                q = e // inner
                o = place(m, at.AXIS, at.MORE_AXIS_AT, more, e - q * inner, q)
                od, ox, oy = base[0] + o[0], base[1] + o[1], base[2] + o[2]
                i = float(index_base + o[5])
                for j in range(w):
                    vd, vx, vy = values(dy, x, y, od + j * jd, ox + j * jx, oy + j * jy, zero, zero)
                    s = block_load(block, j, MAX_LANES)
                    block_store(block, j, MAX_LANES, step(s, vd, vx, vy, i, p))
            for j in range(w):
                s = merge(state_load(state, j, MAX_LANES), block_load(block, j, MAX_LANES))
                state_store(state, j, MAX_LANES, s)

    @inlined
    def scatter_lanes(m, dy, x, y, out, base, e0, e1, w, state, result):
        p, p2 = map_real(meta_float(m, at.PARAM)), map_real(meta_float(m, at.PARAM2))
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        jd, jx, jy = stride(m, at.ACROSS, 1), stride(m, at.ACROSS, 2), stride(m, at.ACROSS, 3)
        jo = stride(m, at.ACROSS, 4)
        index_base = meta(m, at.INDEX_BASE)
        is_easy = True  # for all lanes, or for none
        for j in range(w):
            s = state_load(state, j, MAX_LANES)
            is_easy &= easy(s)
            result_store(result, j, MAX_LANES, narrow(s))
        for e in range(e0, e1):
            q = e // inner
            o = place(m, at.AXIS, at.MORE_AXIS_AT, more, e - q * inner, q)
            od, ox, oy = base[0] + o[0], base[1] + o[1], base[2] + o[2]
            i = float(index_base + o[5])
            oo = base[3] + o[3]
            for j in range(w):
                vd, vx, vy = map_values(
                    dy, x, y, od + j * jd, ox + j * jx, oy + j * jy, map_zero, map_zero
                )
                r = result_load(result, j, MAX_LANES)
                s = state_load(state, j, MAX_LANES)
                map_store(out, oo + j * jo, apply(r, vd, vx, vy, i, p, p2, is_easy, s))

    def side_by_side(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        dy, x, y, out = meta(call, at.DY), meta(call, at.X), meta(call, at.Y), meta(call, at.OUT)
        n, chunk, chunks = meta(m, at.EXTENT), meta(m, at.CHUNK), meta(m, at.CHUNKS)
        if phase == at.COMBINE:
            combine(ws, n, chunks, lo, hi)
            return
        across, more = meta(m, at.ACROSS), meta(m, at.MORE_ACROSS)
        width, blocks = meta(m, at.LANE_WIDTH), meta(m, at.LANE_BLOCKS)
        state = scratch()
        block = state + 8 * MAX_LANES * slots
        result = block + 8 * MAX_LANES * slots
        for u in range(lo, hi):
            group = u // chunks
            c = u - group * chunks
            e0 = c * chunk
            e1 = min(n, e0 + chunk)
            q = group // blocks
            j0 = (group - q * blocks) * width
            w = min(width, across - j0)
            row0 = q * across + j0
            base = place(m, at.ACROSS, at.MORE_ACROSS_AT, more, j0, q)
            if phase == at.APPLY:
                for j in range(w):
                    s = state_load(ws, (row0 + j) * chunks * slots, 1)
                    state_store(state, j, MAX_LANES, s)
            else:
                gather_lanes(m, dy, x, y, base, e0, e1, w, state, block)
                if phase == at.PARTIAL:
                    for j in range(w):
                        s = state_load(state, j, MAX_LANES)
                        state_store(ws, ((row0 + j) * chunks + c) * slots, 1, s)
                    continue
                for j in range(w):
                    s = finish(state_load(state, j, MAX_LANES), float(n))
                    state_store(state, j, MAX_LANES, s)
            scatter_lanes(m, dy, x, y, out, base, e0, e1, w, state, result)

    return side_by_side
