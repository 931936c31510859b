"""Map, and row state then map: one engine, since a map is a row kind without a state.

A unit of work is a row (ROWS layout), a block of neighbouring rows side by side (COLUMNS
layout: the axis is walked in the order memory lies, many rows at a time), or, when rows are
few and long, a chunk of one of these. Short rows lie side by side too, in tiles that turn them
round (`turning`), or where they are. Chunks have a fixed length, so bits never depend on how
many threads there are:

- FUSED: state, then map;
- PARTIAL: the state of each chunk, into the workspace;
- COMBINE: chunk states to row states, in order;
- APPLY: the map alone. (A map without a state runs this.)

Inside a row, blocks of 512 are summed in lanes and the blocks' sums in f64; where a block leaves
the range of f32, all is summed again in f64. Where a problem does not fit the caches, results are
staged in the nearest one and leave it by whole lines, past the others.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ....kinds import ElementKind, Named, TieRule
from . import layout as at
from .device import inlined
from .formulas import is_wide, map_formula
from .layout import LINE, TILE
from .lowlevel import (
    STAGE_BYTES,
    fence,
    make_flush,
    make_load,
    make_pair,
    make_scratch,
    make_store,
    make_trail,
    make_tuple_cast,
    make_tuple_memory,
    meta,
    meta_float,
)
from .turning import make_empty, make_fill

_BLOCK = 512


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


@inlined
def is_finite(value):
    return abs(value) < np.inf


@inlined
def unit_of(m, phase, u):
    """The unit that a launch visits as its u-th."""
    last = meta(m, at.LAST_UNIT)
    return last - u if phase == at.APPLY and last > 0 else u


@inlined
def lanes_of(m, phase, v):
    """The lanes of the unit that a launch of a scan visits as its v-th: their group of rows, the
    first of them, their number and how many begin at the row's start; the first of their steps and
    how many these are; the number of the first lane's chunk, and how many more the next lane's is.
    """
    n, chunk, chunks = meta(m, at.EXTENT), meta(m, at.CHUNK), meta(m, at.CHUNKS)
    lanes, width, blocks = meta(m, at.ACROSS), meta(m, at.LANE_WIDTH), meta(m, at.LANE_BLOCKS)
    split, beside = phase != at.FUSED, meta(m, at.BESIDE) != 0
    u = unit_of(m, phase, v)
    q = u // blocks
    j0 = (u - q * blocks) * width
    w, length, k_start = min(width, lanes - j0), chunk, 0
    begins, c0, c_step = w, 0, 0
    if split and beside:
        c = q % chunks
        q //= chunks
        k_start = c * chunk
        length = min(chunk, n - k_start)
        begins = w if c == 0 else 0
        c0, c_step = (q * lanes + j0) * chunks + c, chunks
    elif split:
        if j0 >= lanes:  # the last chunk, shorter than the others
            j0, w = lanes, 1
            length = n - lanes * chunk
        begins = 1 if j0 == 0 else 0
        c0, c_step = q * chunks + j0, 1
    return q, j0, w, begins, k_start, length, c0, c_step


def max_lanes(settled: int) -> int:
    """How many rows side by side a kernel has room for, on its stack."""
    return 2048 if settled < 5 else 1024


def build(
    kind: Named,
    element: ElementKind,
    ties: TieRule | None,
    columns: bool,
    unit: bool,
    reduced: bool,
    outputs: int,
    extreme: bool = False,
    turned: bool = False,
) -> Any:
    """The kernel of one kind.

    - `unit`: the strides of the inner loop are all 1; otherwise they are read at run time;
    - `reduced`: dy and y are one number a row;
    - `outputs`: 2 where both gradients of a binary kind are wanted;
    - `extreme`: parameters that only f64 holds;
    - `turned`: short rows side by side, unit strides in tiles that turn them round.
    """
    formula = map_formula(kind, element, ties)
    wide = extreme or is_wide(kind, element, ties)
    # The map may work in f32 where the state is summed in f64.
    map_wide = extreme or is_wide(kind, element, ties, mapped=True)
    map_real = np.float64 if map_wide else np.float32
    source, target = ("tile d", "tile e") if turned else ("in", "out")
    map_load, map_store = (
        make_load(element, map_wide, source),
        make_store(element, map_wide, target),
    )
    stage_store, flush = make_store(element, map_wide, "stage"), make_flush(element)
    resume, leave = make_trail(element)
    map_zero = map_real(0)
    row_load = make_load(element, True, source)
    apply, indexed, two = formula.apply, formula.indexed, outputs == 2
    apply2 = formula.apply2 or formula.apply
    reads = formula.uses.split()
    uses_x, uses_y = "x" in reads, "y" in reads
    has_state, blank, overflows = formula.step is not None, formula.blank, formula.overflows
    first = formula.first or (0.0,)
    slots = len(first)
    settled = formula.settled if formula.settle is not None else slots
    state_load, state_store = make_tuple_memory(slots)
    narrow = make_tuple_cast(settled, map_wide)
    size = element.size_bytes
    stage_elements = STAGE_BYTES // size
    stages = make_scratch((3 * STAGE_BYTES + 4096) // 8)
    # bf16 in rows is taken two by two: softmax in 0.18 ns an element in place of 0.22.
    by_pairs = unit and element is ElementKind.BF16 and sys.byteorder == "little"
    map_by_pairs = by_pairs and not (map_wide or two)
    pair_load, pair_store = make_pair("in")[0], make_pair("out")[1]
    pair_stage, nothing = make_pair("stage")[1], np.float32(0)

    @inlined
    def lead_of(address):
        return (address & (LINE - 1)) // size

    @inlined
    def behind(room, address):
        # A load whose low 12 bits are those of a store shortly before it waits for that store: a
        # stage that lies a little behind the input, modulo 4096, is never in its way.
        return room + ((address - 256 - room) & (4095 & -LINE))

    @inlined
    def stride(m, entry, operand):
        return 1 if unit else meta(m, entry + operand)

    if formula.easy is not None:
        easy = formula.easy
    else:

        @inlined
        def easy(r):
            return True

    if formula.settle is not None:
        settle = formula.settle
    else:

        @inlined
        def settle(s, dy, y, p):
            return s

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

    # Chunk states lie as [chunk][number][row].
    @inlined
    def combine(ws, rows, n, chunks, lo, hi):
        for c in range(chunks):
            for row in range(lo, hi):
                s = first if c == 0 else state_load(ws, row, rows)
                state_store(ws, row, rows, merge(s, state_load(ws, c * slots * rows + row, rows)))
        for row in range(lo, hi):
            state_store(ws, row, rows, finish(state_load(ws, row, rows), float(n)))

    def reader(load, zero):
        @inlined
        def values(dy, x, y, od, ox, oy, row_y):
            vd = zero if reduced else load(dy, od)
            vx = load(x, ox) if uses_x else zero
            vy = row_y
            if uses_y and not reduced:
                vy = load(y, oy)
            return vd, vx, vy

        return values

    map_values = reader(map_load, map_zero)

    @inlined
    def pairs_of(dy, x, y, od, ox, oy, row_y):
        vd = (nothing, nothing) if reduced else pair_load(dy, od)
        vx = pair_load(x, ox) if uses_x else (nothing, nothing)
        vy = (row_y, row_y)
        if uses_y and not reduced:
            vy = pair_load(y, oy)
        return vd, vx, vy

    def gatherer(wide):
        real = np.float64 if wide else np.float32
        load, zero, by_two = make_load(element, wide), real(0), by_pairs and not wide
        values, first_block = reader(load, zero), tuple(real(value) for value in first)

        @inlined
        def gather(m, dy, x, y, base, e0, e1):
            # The state of elements e0..e1 of the row at these offsets.
            p = real(meta_float(m, at.PARAM))
            inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
            sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
            si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
            index_base = meta(m, at.INDEX_BASE)
            row_y = load(y, base[2]) if reduced and uses_y else zero
            s, t, room = first, first_block, _BLOCK  # a block may span several inner runs
            e = e0
            while e < e1:
                q = e // inner
                k0 = e - q * inner
                k1 = min(inner, k0 + e1 - e, k0 + room)
                o = place(m, at.AXIS, at.MORE_AXIS_AT, more, 0, q)
                od, ox, oy, oi = base[0] + o[0], base[1] + o[1], base[2] + o[2], index_base + o[5]
                e += k1 - k0
                room -= k1 - k0
                if by_two:
                    for k in range(k0, k1 - 1, 2):
                        a, b, c = pairs_of(dy, x, y, od + k, ox + k, oy + k, row_y)
                        t = step(step(t, a[0], b[0], c[0], 0.0, p), a[1], b[1], c[1], 0.0, p)
                    k0 = k1 - (k1 - k0) % 2
                for k in range(k0, k1):
                    vd, vx, vy = values(dy, x, y, od + k * sd, ox + k * sx, oy + k * sy, row_y)
                    t = step(t, vd, vx, vy, float(oi + k * si), p)
                if room == 0:
                    s, t, room = merge(s, t), first_block, _BLOCK
            return merge(s, t)

        return gather

    gather_once, gather_wide = gatherer(wide), gatherer(True)

    @inlined
    def gather(m, dy, x, y, base, e0, e1):
        s = gather_once(m, dy, x, y, base, e0, e1)
        if overflows and not is_finite(s[0]):
            s = gather_wide(m, dy, x, y, base, e0, e1)
        return s

    @inlined
    def map_run(m, r, s, dy, x, y, od, ox, oy, oi, target, target2, count, is_easy, staged):
        # So many elements from these offsets on, to the stage or to the output at `target`.
        p, p2 = map_real(meta_float(m, at.PARAM)), map_real(meta_float(m, at.PARAM2))
        sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
        so, so2 = stride(m, at.AXIS, 4), stride(m, at.AXIS, 5)
        si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
        done = 0
        if map_by_pairs:
            done = count // 2 * 2
            for k in range(0, done, 2):
                vd, vx, vy = pairs_of(dy, x, y, od + k, ox + k, oy + k, map_zero)
                a = apply(r, vd[0], vx[0], vy[0], 0.0, p, p2, is_easy, s)
                b = apply(r, vd[1], vx[1], vy[1], 0.0, p, p2, is_easy, s)
                if staged:
                    pair_stage(target, k, a, b)
                else:
                    pair_store(target, k, a, b)
        for k in range(done, count):
            vd, vx, vy = map_values(dy, x, y, od + k * sd, ox + k * sx, oy + k * sy, map_zero)
            i = float(oi + k * si)
            dx = apply(r, vd, vx, vy, i, p, p2, is_easy, s)
            if two:  # both before the first store, which may be in the place of dy
                dx2 = apply2(r, vd, vx, vy, i, p, p2, is_easy, s)
                if staged:
                    stage_store(target2, k, dx2)
                else:
                    map_store(target2, k * so2, dx2)
            if staged:
                stage_store(target, k, dx)
            else:
                map_store(target, k * so, dx)

    @inlined
    def scatter(m, s, dy, x, y, out, out2, base, e0, e1, room, streaming):
        # The outputs of elements e0..e1, given the row's state.
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        sd, sx, sy = stride(m, at.AXIS, 1), stride(m, at.AXIS, 2), stride(m, at.AXIS, 3)
        so, so2 = stride(m, at.AXIS, 4), stride(m, at.AXIS, 5)
        si = meta(m, at.AXIS + at.S_INDEX) if indexed else 0
        index_base = meta(m, at.INDEX_BASE)
        row_dy = row_load(dy, base[0]) if reduced else 0.0
        row_y = row_load(y, base[2]) if reduced and uses_y else 0.0
        settled = settle(s, row_dy, row_y, meta_float(m, at.PARAM))
        r, is_easy = narrow(settled), easy(settled)
        e = e0
        while e < e1:
            q = e // inner
            lo = e - q * inner
            hi = min(inner, lo + e1 - e)
            o = place(m, at.AXIS, at.MORE_AXIS_AT, more, 0, q)
            e += hi - lo
            while lo < hi:
                od, ox, oy = base[0] + o[0] + lo * sd, base[1] + o[1] + lo * sx, base[2] + o[2]
                oy, oi = oy + lo * sy, index_base + o[5] + lo * si
                to = out + size * (base[3] + o[3] + lo * so)
                to2 = out2 + size * (base[4] + o[4] + lo * so2)
                # A loop for easy rows and one for others: LLVM does not part long ones by itself.
                if not (unit and streaming):
                    n = hi - lo
                    if is_easy:
                        map_run(m, r, s, dy, x, y, od, ox, oy, oi, to, to2, n, True, False)
                    else:
                        map_run(m, r, s, dy, x, y, od, ox, oy, oi, to, to2, n, False, False)
                    break
                stage = behind(room, x + size * ox if uses_x else dy + size * od)
                lead, lead2 = lead_of(to), lead_of(to2)
                n = min(hi - lo, stage_elements - (max(lead, lead2) if two else lead))
                a, b = stage + size * lead, stage + STAGE_BYTES + 64 + size * lead2
                if is_easy:
                    map_run(m, r, s, dy, x, y, od, ox, oy, oi, a, b, n, True, True)
                else:
                    map_run(m, r, s, dy, x, y, od, ox, oy, oi, a, b, n, False, True)
                flush(stage, to, n)
                if two:
                    flush(stage + STAGE_BYTES + 64, to2, n)
                lo += n

    @inlined
    def clear(m, out, base, e0, e1, room, streaming):
        # Zeros for elements e0..e1 of the row at these offsets.
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        so = stride(m, at.AXIS, 4)
        if unit and streaming:
            for k in range(stage_elements):
                stage_store(room, k, map_zero)
        e = e0
        while e < e1:
            q = e // inner
            lo = e - q * inner
            hi = min(inner, lo + e1 - e)
            oo = base[3] + place(m, at.AXIS, at.MORE_AXIS_AT, more, 0, q)[3]
            e += hi - lo
            while lo < hi:
                if not (unit and streaming):
                    for k in range(lo, hi):
                        map_store(out, oo + k * so, map_zero)
                    break
                target = out + size * (oo + lo)
                count = min(hi - lo, stage_elements - lead_of(target))
                flush(room, target, count)
                lo += count

    def rows(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        dy, x, y = meta(call, at.DY), meta(call, at.X), meta(call, at.Y)
        out, out2 = meta(call, at.OUT), meta(call, at.OUT2)
        n, chunk, chunks = meta(m, at.EXTENT), meta(m, at.CHUNK), meta(m, at.CHUNKS)
        count = meta(m, at.ROWS)
        if phase == at.COMBINE:
            combine(ws, count, n, chunks, lo, hi)
            return
        streaming = meta(m, at.STREAMING) != 0
        across, more = meta(m, at.ACROSS), meta(m, at.MORE_ACROSS)
        room = stages()
        for v in range(lo, hi):
            u = unit_of(m, phase, v)
            row = u // chunks
            c = u - row * chunks
            e0 = c * chunk
            e1 = min(n, e0 + chunk)
            q = row // across
            base = place(m, at.ACROSS, at.MORE_ACROSS_AT, more, row - q * across, q)
            s = first
            if has_state:
                if phase == at.APPLY:
                    # The states of chunks but the first are still there: one that holds nothing
                    # that counts need not be read again.
                    if blank and c > 0:
                        own = state_load(ws, c * slots * count + row, count)
                        if own == first:
                            clear(m, out, base, e0, e1, room, streaming)
                            continue
                    s = state_load(ws, row, count)
                else:
                    s = gather(m, dy, x, y, base, e0, e1)
                if phase == at.PARTIAL:
                    state_store(ws, c * slots * count + row, count, s)
                    continue
                if phase == at.FUSED:
                    s = finish(s, float(n))
            scatter(m, s, dy, x, y, out, out2, base, e0, e1, room, streaming)
        if streaming:
            fence()

    if not columns:
        return rows

    # The rows' states so far, the states of the current block of steps, and what the map reads.
    lanes = max_lanes(settled)
    scratch = make_scratch(lanes * (2 * slots + settled) + 512)
    result_load, result_store = make_tuple_memory(settled, "tile b", map_wide)
    kept_load, kept_store = make_tuple_memory(slots, "tile c")

    def lanes_gatherer(wide):
        real = np.float64 if wide else np.float32
        load, zero = make_load(element, wide, source), real(0)
        values, first_block = reader(load, zero), tuple(real(value) for value in first)
        block_load, block_store = make_tuple_memory(slots, "tile a", wide)

        @inlined
        def gather_lanes(m, dy, x, y, base, e0, e1, w, state, block):
            p = real(meta_float(m, at.PARAM))
            inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
            kd, kx, ky = meta(m, at.AXIS + 1), meta(m, at.AXIS + 2), meta(m, at.AXIS + 3)
            jd, jx, jy = stride(m, at.ACROSS, 1), stride(m, at.ACROSS, 2), stride(m, at.ACROSS, 3)
            ki = meta(m, at.AXIS + at.S_INDEX)
            index_base = meta(m, at.INDEX_BASE)
            for j in range(w):
                kept_store(state, j, lanes, first)
            for b in range(e0, e1, _BLOCK):
                for j in range(w):
                    block_store(block, j, lanes, first_block)
                e, end = b, min(e1, b + _BLOCK)
                while e < end:
                    # Four steps at a time, where the innermost axis has them: a state is then
                    # loaded and stored once for four.
                    q = e // inner
                    k = e - q * inner
                    o = place(m, at.AXIS, at.MORE_AXIS_AT, more, k, q)
                    od, ox, oy = base[0] + o[0], base[1] + o[1], base[2] + o[2]
                    i = index_base + o[5]
                    if k + 4 <= inner and e + 4 <= end:
                        e += 4
                        for j in range(w):
                            s = block_load(block, j, lanes)
                            d, a, c = od + j * jd, ox + j * jx, oy + j * jy
                            row_y = load(y, c) if reduced and uses_y else zero
                            vd, vx, vy = values(dy, x, y, d, a, c, row_y)
                            s = step(s, vd, vx, vy, float(i), p)
                            vd, vx, vy = values(dy, x, y, d + kd, a + kx, c + ky, row_y)
                            s = step(s, vd, vx, vy, float(i + ki), p)
                            vd, vx, vy = values(dy, x, y, d + 2 * kd, a + 2 * kx, c + 2 * ky, row_y)
                            s = step(s, vd, vx, vy, float(i + 2 * ki), p)
                            vd, vx, vy = values(dy, x, y, d + 3 * kd, a + 3 * kx, c + 3 * ky, row_y)
                            s = step(s, vd, vx, vy, float(i + 3 * ki), p)
                            block_store(block, j, lanes, s)
                    else:
                        e += 1
                        for j in range(w):
                            s = block_load(block, j, lanes)
                            d, a, c = od + j * jd, ox + j * jx, oy + j * jy
                            row_y = load(y, c) if reduced and uses_y else zero
                            vd, vx, vy = values(dy, x, y, d, a, c, row_y)
                            block_store(block, j, lanes, step(s, vd, vx, vy, float(i), p))
                for j in range(w):
                    s = merge(kept_load(state, j, lanes), block_load(block, j, lanes))
                    kept_store(state, j, lanes, s)

        return gather_lanes

    gather_lanes_once, gather_lanes_wide = lanes_gatherer(wide), lanes_gatherer(True)

    @inlined
    def gather_lanes(m, dy, x, y, base, e0, e1, w, state, block):
        gather_lanes_once(m, dy, x, y, base, e0, e1, w, state, block)
        if overflows:
            fits = True
            for j in range(w):
                fits &= is_finite(kept_load(state, j, lanes)[0])
            if not fits:
                gather_lanes_wide(m, dy, x, y, base, e0, e1, w, state, block)

    @inlined
    def map_lanes(m, x, dy, y, od, ox, oy, i, state, result, target, lo, hi, is_easy, staged):
        # One step of lanes lo..hi, to the stage or to the output at `target`.
        p, p2 = map_real(meta_float(m, at.PARAM)), map_real(meta_float(m, at.PARAM2))
        jd, jx, jy = stride(m, at.ACROSS, 1), stride(m, at.ACROSS, 2), stride(m, at.ACROSS, 3)
        jo = stride(m, at.ACROSS, 4)
        for j in range(lo, hi):
            vd, vx, vy = map_values(dy, x, y, od + j * jd, ox + j * jx, oy + j * jy, map_zero)
            r = result_load(result, j, lanes)
            s = kept_load(state, j, lanes)
            dx = apply(r, vd, vx, vy, i, p, p2, is_easy, s)
            if staged:
                stage_store(target, j - lo, dx)
            else:
                map_store(target, j * jo, dx)

    @inlined
    def scatter_lanes(m, dy, x, y, out, base, e0, e1, w, state, result, room, streaming):
        inner, more = meta(m, at.AXIS), meta(m, at.MORE_AXIS)
        jd, jy = stride(m, at.ACROSS, 1), stride(m, at.ACROSS, 3)
        index_base = meta(m, at.INDEX_BASE)
        whole = meta_float(m, at.PARAM)
        is_easy = True  # for all lanes, or for none
        for j in range(w):
            row_dy = row_load(dy, base[0] + j * jd) if reduced else 0.0
            row_y = row_load(y, base[2] + j * jy) if reduced and uses_y else 0.0
            settled = settle(kept_load(state, j, lanes), row_dy, row_y, whole)
            is_easy &= easy(settled)
            result_store(result, j, lanes, narrow(settled))
        trail = (room, 0, 0)
        for e in range(e0, e1):
            q = e // inner
            o = place(m, at.AXIS, at.MORE_AXIS_AT, more, e - q * inner, q)
            od, ox, oy = base[0] + o[0], base[1] + o[1], base[2] + o[2]
            i = float(index_base + o[5])
            oo = base[3] + o[3]
            # A loop for easy lanes and one for others: LLVM does not part long ones by itself.
            if not (unit and streaming):
                to = out + size * oo
                if is_easy:
                    map_lanes(m, x, dy, y, od, ox, oy, i, state, result, to, 0, w, True, False)
                else:
                    map_lanes(m, x, dy, y, od, ox, oy, i, state, result, to, 0, w, False, False)
                continue
            lo = 0
            while lo < w:
                stage = behind(room, x + size * (ox + lo) if uses_x else dy + size * (od + lo))
                target = out + size * (oo + lo)
                lead = lead_of(target)
                hi = min(w, lo + stage_elements - lead)
                to = stage + size * lead
                left = resume(stage, target, trail)
                if is_easy:
                    map_lanes(m, x, dy, y, od, ox, oy, i, state, result, to, lo, hi, True, True)
                else:
                    map_lanes(m, x, dy, y, od, ox, oy, i, state, result, to, lo, hi, False, True)
                trail = leave(stage, target, hi - lo, left)
                lo = hi
        resume(room, 0, trail)

    def side_by_side(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        dy, x, y, out = meta(call, at.DY), meta(call, at.X), meta(call, at.Y), meta(call, at.OUT)
        n, chunk, chunks = meta(m, at.EXTENT), meta(m, at.CHUNK), meta(m, at.CHUNKS)
        rows = meta(m, at.ROWS)
        if phase == at.COMBINE:
            combine(ws, rows, n, chunks, lo, hi)
            return
        streaming = meta(m, at.STREAMING) != 0
        across, more = meta(m, at.ACROSS), meta(m, at.MORE_ACROSS)
        width, blocks = meta(m, at.LANE_WIDTH), meta(m, at.LANE_BLOCKS)
        room = stages()
        state = scratch()
        block = state + 8 * lanes * slots
        for v in range(lo, hi):
            u = unit_of(m, phase, v)
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
                if has_state:
                    for j in range(w):
                        kept_store(state, j, lanes, state_load(ws, row0 + j, rows))
            else:
                gather_lanes(m, dy, x, y, base, e0, e1, w, state, block)
                if phase == at.PARTIAL:
                    for j in range(w):
                        spot = c * slots * rows + row0 + j
                        state_store(ws, spot, rows, kept_load(state, j, lanes))
                    continue
                for j in range(w):
                    s = finish(kept_load(state, j, lanes), float(n))
                    kept_store(state, j, lanes, s)
            near = x + size * base[1] if uses_x else dy + size * base[0]
            result = behind(block + 8 * lanes * slots, near)
            scatter_lanes(m, dy, x, y, out, base, e0, e1, w, state, result, room, streaming)
        if streaming:
            fence()

    if not turned:
        return side_by_side

    fill, empty = make_fill(element, "tile d"), make_empty(element, "tile e")
    tiles = make_scratch(4 * TILE * size // 8)

    def turned_round(call, slot, lo, hi):
        m = meta(call, at.META)
        tile_m = m + 8 * at.META_WORDS  # the same problem as it lies in tiles
        dy, x, y, out = meta(call, at.DY), meta(call, at.X), meta(call, at.Y), meta(call, at.OUT)
        n, across, more = meta(m, at.EXTENT), meta(m, at.ACROSS), meta(m, at.MORE_ACROSS)
        kd, kx = size * meta(m, at.AXIS + 1), size * meta(m, at.AXIS + 2)
        ky, ko = size * meta(m, at.AXIS + 3), size * meta(m, at.AXIS + 4)
        jd, jx = size * meta(m, at.ACROSS + 1), size * meta(m, at.ACROSS + 2)
        jy, jo = size * meta(m, at.ACROSS + 3), size * meta(m, at.ACROSS + 4)
        width, blocks = meta(m, at.LANE_WIDTH), meta(m, at.LANE_BLOCKS)
        pitch, steps, origin = size * width, 1 if reduced else n, (0, 0, 0, 0, 0, 0)
        room, state, d_tile = stages(), scratch(), tiles()
        x_tile, y_tile = d_tile + size * TILE, d_tile + 2 * size * TILE
        o_tile = d_tile + 3 * size * TILE
        block = state + 8 * lanes * slots
        result = block + 8 * lanes * slots
        for u in range(lo, hi):
            q = u // blocks
            j0 = (u - q * blocks) * width
            w = min(width, across - j0)
            base = place(m, at.ACROSS, at.MORE_ACROSS_AT, more, j0, q)
            fill(d_tile, pitch, dy + size * base[0], kd, jd, steps, w)
            if uses_x:
                fill(x_tile, pitch, x + size * base[1], kx, jx, n, w)
            if uses_y:
                fill(y_tile, pitch, y + size * base[2], ky, jy, steps, w)
            if has_state:
                gather_lanes(tile_m, d_tile, x_tile, y_tile, origin, 0, n, w, state, block)
                for j in range(w):
                    s = finish(kept_load(state, j, lanes), float(n))
                    kept_store(state, j, lanes, s)
            scatter_lanes(
                tile_m, d_tile, x_tile, y_tile, o_tile, origin, 0, n, w, state, result, room, False
            )
            empty(o_tile, pitch, out + size * base[3], ko, jo, n, w)

    return turned_round
