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
def offset_of(m: int, entries: int, count: int, q: int, operand: int) -> int:
    """The offset of index q over `count` dimensions, innermost first, for one operand."""
    offset = 0
    for d in range(count):
        entry = entries + d * at.DIM_WORDS
        if d + 1 < count:
            extent = meta(m, entry)
            offset += (q % extent) * meta(m, entry + operand)
            q //= extent
        else:
            offset += q * meta(m, entry + operand)
    return offset


def build(
    kind: Named,
    element: ElementKind,
    ties: TieRule | None,
    columns: bool,
    strides: str,
    scalars: bool,
    outputs: int,
) -> Any:
    """The kernel of one kind.

    - `strides`: of the inner loop, "unit" (all 1), "broadcast" (dy and y 0, the rest 1), or
      "any" (read from the meta block);
    - `scalars`: dy and y are one number a row (reductions in ROWS layout);
    - `outputs`: 2 where both gradients of a binary kind are wanted.
    """
    formula = map_formula(kind, element, ties)
    wide = is_wide(kind, element, ties)
    real = np.float64 if wide else np.float32
    load, store = make_load(element, wide), make_store(element, wide)
    zero = real(0)
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
    narrow = make_tuple_cast(slots, wide)

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

    if not columns:

        @inlined
        def gather(m, dy, x, y, bd, bx, by, e0, e1):
            # The state of elements e0..e1 of the row at these offsets.
            p = real(meta_float(m, at.PARAM))
            inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
            sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
            si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
            s = first
            e = e0
            while e < e1:
                q = e // inner
                lo = e - q * inner
                hi = min(inner, lo + e1 - e)
                od = bd if scalars else bd + offset_of(m, at.MORE_AXIS_AT, more, q, 1)
                ox = bx + offset_of(m, at.MORE_AXIS_AT, more, q, 2) if uses_x else 0
                oy = by
                if uses_y and not scalars:
                    oy = by + offset_of(m, at.MORE_AXIS_AT, more, q, 3)
                oi = offset_of(m, at.MORE_AXIS_AT, more, q, 6) if indexed else 0
                row_dy = load(dy, od) if scalars else zero
                row_y = load(y, oy) if scalars and uses_y else zero
                for b in range(lo, hi, _BLOCK):
                    t = first_block
                    for k in range(b, min(hi, b + _BLOCK)):
                        vd = row_dy if scalars else load(dy, od + k * sd)
                        vx = load(x, ox + k * sx) if uses_x else zero
                        vy = row_y
                        if uses_y and not scalars:
                            vy = load(y, oy + k * sy)
                        t = step(t, vd, vx, vy, float(oi + k * si), p)
                    s = merge(s, t)
                e += hi - lo
            return s

        @inlined
        def scatter(m, s, dy, x, y, out, out2, bd, bx, by, bo, bo2, e0, e1):
            p, q2 = real(meta_float(m, at.PARAM)), real(meta_float(m, at.PARAM2))
            inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
            sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
            so, so2 = stride(m, at.AXIS, 4), stride(m, at.AXIS, 5)
            si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
            r = narrow(s)
            is_easy = easy(s)
            e = e0
            while e < e1:
                q = e // inner
                lo = e - q * inner
                hi = min(inner, lo + e1 - e)
                od = bd if scalars else bd + offset_of(m, at.MORE_AXIS_AT, more, q, 1)
                ox = bx + offset_of(m, at.MORE_AXIS_AT, more, q, 2) if uses_x else 0
                oy = by
                if uses_y and not scalars:
                    oy = by + offset_of(m, at.MORE_AXIS_AT, more, q, 3)
                oo = bo + offset_of(m, at.MORE_AXIS_AT, more, q, 4)
                oo2 = bo2 + offset_of(m, at.MORE_AXIS_AT, more, q, 5) if two else 0
                oi = offset_of(m, at.MORE_AXIS_AT, more, q, 6) if indexed else 0
                row_dy = load(dy, od) if scalars else zero
                row_y = load(y, oy) if scalars and uses_y else zero
                for k in range(lo, hi):
                    vd = row_dy if scalars else load(dy, od + k * sd)
                    vx = load(x, ox + k * sx) if uses_x else zero
                    vy = row_y
                    if uses_y and not scalars:
                        vy = load(y, oy + k * sy)
                    i = float(oi + k * si)
                    if two:
                        second = apply2(r, vd, vx, vy, i, p, q2, is_easy)
                        store(out, oo + k * so, apply(r, vd, vx, vy, i, p, q2, is_easy))
                        store(out2, oo2 + k * so2, second)
                    else:
                        store(out, oo + k * so, apply(r, vd, vx, vy, i, p, q2, is_easy))
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
                j = row - q * across
                bd = j * meta(m, at.ACROSS + 1) + offset_of(m, at.MORE_ACROSS_AT, more, q, 1)
                bx = by = bo2 = 0
                if uses_x:
                    bx = j * meta(m, at.ACROSS + 2) + offset_of(m, at.MORE_ACROSS_AT, more, q, 2)
                if uses_y:
                    by = j * meta(m, at.ACROSS + 3) + offset_of(m, at.MORE_ACROSS_AT, more, q, 3)
                bo = j * meta(m, at.ACROSS + 4) + offset_of(m, at.MORE_ACROSS_AT, more, q, 4)
                if two:
                    bo2 = j * meta(m, at.ACROSS + 5) + offset_of(m, at.MORE_ACROSS_AT, more, q, 5)
                s = first
                if has_state:
                    if phase == at.APPLY:
                        s = state_load(ws, row * chunks * slots, 1)
                    else:
                        s = gather(m, dy, x, y, bd, bx, by, e0, e1)
                    if phase == at.PARTIAL:
                        state_store(ws, u * slots, 1, s)
                        continue
                    if phase == at.FUSED:
                        s = finish(s, float(n))
                scatter(m, s, dy, x, y, out, out2, bd, bx, by, bo, bo2, e0, e1)

    @inlined
    def combine(ws, n, chunks, lo, hi):
        for row in range(lo, hi):
            s = first
            for c in range(chunks):
                s = merge(s, state_load(ws, (row * chunks + c) * slots, 1))
            state_store(ws, row * chunks * slots, 1, finish(s, float(n)))

    if not columns:
        return rows

    scratch = make_scratch(2 * MAX_LANES * slots)
    block_load, block_store = make_tuple_memory(slots, "tile a")

    def side_by_side(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        dy, x, y, out = meta(call, at.DY), meta(call, at.X), meta(call, at.Y), meta(call, at.OUT)
        n, chunk, chunks = meta(m, at.EXTENT), meta(m, at.CHUNK), meta(m, at.CHUNKS)
        if phase == at.COMBINE:
            combine(ws, n, chunks, lo, hi)
            return
        p, p2 = real(meta_float(m, at.PARAM)), real(meta_float(m, at.PARAM2))
        across, more = meta(m, at.ACROSS), meta(m, at.MORE_ACROSS)
        width, blocks = meta(m, at.LANE_WIDTH), meta(m, at.LANE_BLOCKS)
        inner, more_axis = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        jd, jx, jy = stride(m, at.ACROSS, 1), stride(m, at.ACROSS, 2), stride(m, at.ACROSS, 3)
        jo = stride(m, at.ACROSS, 4)
        state = scratch()
        block = state + 8 * MAX_LANES * slots
        for u in range(lo, hi):
            group = u // chunks
            e0 = (u - group * chunks) * chunk
            e1 = min(n, e0 + chunk)
            q = group // blocks
            j0 = (group - q * blocks) * width
            w = min(width, across - j0)
            row0 = q * across + j0
            bd = j0 * jd + offset_of(m, at.MORE_ACROSS_AT, more, q, 1)
            bx = j0 * jx + offset_of(m, at.MORE_ACROSS_AT, more, q, 2) if uses_x else 0
            by = j0 * jy + offset_of(m, at.MORE_ACROSS_AT, more, q, 3) if uses_y else 0
            bo = j0 * jo + offset_of(m, at.MORE_ACROSS_AT, more, q, 4)
            if phase == at.APPLY:
                for j in range(w):
                    s = state_load(ws, (row0 + j) * chunks * slots, 1)
                    state_store(state, j, MAX_LANES, s)
            else:
                for j in range(w):
                    state_store(state, j, MAX_LANES, first)
                for b in range(e0, e1, _BLOCK):
                    for j in range(w):
                        block_store(block, j, MAX_LANES, first)
                    for e in range(b, min(e1, b + _BLOCK)):
                        a = e // inner
                        k = e - a * inner
                        od = bd + k * meta(m, at.AXIS + 1)
                        ox = bx + k * meta(m, at.AXIS + 2)
                        oy = by + k * meta(m, at.AXIS + 3)
                        oi = k * meta(m, at.AXIS + at.S_INDEX)
                        if more_axis > 0:
                            od += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 1)
                            ox += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 2)
                            oy += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 3)
                            oi += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 6)
                        i = float(oi)
                        for j in range(w):
                            vd = load(dy, od + j * jd)
                            vx = load(x, ox + j * jx) if uses_x else zero
                            vy = load(y, oy + j * jy) if uses_y else zero
                            s = block_load(block, j, MAX_LANES)
                            block_store(block, j, MAX_LANES, step(s, vd, vx, vy, i, p))
                    for j in range(w):
                        s = merge(state_load(state, j, MAX_LANES), block_load(block, j, MAX_LANES))
                        state_store(state, j, MAX_LANES, s)
                if phase == at.PARTIAL:
                    for j in range(w):
                        s = state_load(state, j, MAX_LANES)
                        place = ((row0 + j) * chunks + (u - group * chunks)) * slots
                        state_store(ws, place, 1, s)
                    continue
                for j in range(w):
                    s = finish(state_load(state, j, MAX_LANES), float(n))
                    state_store(state, j, MAX_LANES, s)
            is_easy = True  # for all lanes, or for none
            for j in range(w):
                is_easy &= easy(state_load(state, j, MAX_LANES))
            for e in range(e0, e1):
                a = e // inner
                k = e - a * inner
                od = bd + k * meta(m, at.AXIS + 1)
                ox = bx + k * meta(m, at.AXIS + 2)
                oy = by + k * meta(m, at.AXIS + 3)
                oo = bo + k * meta(m, at.AXIS + 4)
                oi = k * meta(m, at.AXIS + at.S_INDEX)
                if more_axis > 0:
                    od += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 1)
                    ox += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 2)
                    oy += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 3)
                    oo += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 4)
                    oi += offset_of(m, at.MORE_AXIS_AT, more_axis, a, 6)
                i = float(oi)
                for j in range(w):
                    vd = load(dy, od + j * jd)
                    vx = load(x, ox + j * jx) if uses_x else zero
                    vy = load(y, oy + j * jy) if uses_y else zero
                    r = narrow(state_load(state, j, MAX_LANES))
                    store(out, oo + j * jo, apply(r, vd, vx, vy, i, p, p2, is_easy))

    return side_by_side
