"""The recurrence S[k] = dy[k] + c[k]·S[k+1] where the scan's own state is recomputed from x, many
rows at a time. (Where y holds it, `sweep` does the work.)

Rows are lanes: a tile holds some steps of some rows, [step][lane] in f64 on the stack, so that
every formula vectorises across lanes whatever the layout. Only filling and emptying the tile
knows strides and element types. The same kernel serves rows that lie side by side (lanes
contiguous in memory), rows that lie one after the other, and one long row, whose chunks are
the lanes. Chunks have a fixed length, so bits do not depend on the number of threads:

- FUSED: everything, where rows are enough to go round;
- FORWARD, FORWARD_COMBINE: the scan's state at each chunk's start;
- PARTIAL: what each chunk sends on, as T ↦ partial + gain · 2^e · T;
- COMBINE: the carry that arrives at each chunk;
- APPLY: each chunk with its carry.

The state runs forwards once, leaving a checkpoint a tile, and each tile recomputes
its own states from there: two reads of x and no temporary of the size of a row.
"""

from __future__ import annotations

from typing import Any

from ....kinds import ElementKind, Named, TieRule
from . import layout as at
from .device import inlined, ordered
from .formulas import recurrence_formula, sent_on, settled, times
from .layout import RECOMPUTED_TILE as TILE
from .lowlevel import (
    LANES,
    float_load,
    float_store,
    make_load,
    make_scratch,
    make_store,
    make_tile,
    make_transposers,
    make_tuple_memory,
    meta,
)
from .rows import lanes_of, place

MAX_LANES = 512

d_load, d_store = make_tile("a")
x_load, x_store = make_tile("b")
carry_load, carry_store = make_tile("d")
gain_load, gain_store = make_tile("e")
total_load, total_store = make_tile("f")
power_load, power_store = make_tile("g")
# x + (−0.0) is x, bit for bit.
_NOTHING = -0.0


def build(kind: Named, element: ElementKind, ties: TieRule | None) -> Any:
    """The kernel of one scan kind without its y."""
    formula = recurrence_formula(kind, element, ties, from_y=False)
    load, store = make_load(element, True), make_store(element, True)
    slots, chosen, identity = formula.slots, formula.chosen, formula.identity
    product = formula.product
    left = 2 if product else slots  # numbers that a chunk leaves of its state
    size = element.size_bytes
    out, gain, forward, merge = formula.out, formula.gain, formula.forward, formula.merge
    state_load, state_store = make_tuple_memory(slots, "tile c")
    kept_load, kept_store = make_tuple_memory(slots)
    # Pitch between the numbers of a state: a tile of them, with one step before the first.
    pitch = TILE + MAX_LANES
    scratch = make_scratch(3 * TILE + pitch * slots + 3 * MAX_LANES)

    @ordered
    def send(g, S):
        if chosen:
            return _NOTHING if g == 0.0 else S
        return g * S

    # Tiles are filled and emptied backwards: the whole walk through memory then descends
    # evenly, which the hardware foresees. Forwards inside backwards costs twice the time.
    def mover(put, tile_name):
        turn, _ = make_transposers(element, tile_name)

        @inlined
        def fill(tile, address, ks, js, steps, w):
            if js == 1:
                for back in range(steps):
                    k = steps - 1 - back
                    for j in range(w):
                        put(tile, k * w + j, load(address, k * ks + j))
                return
            whole = steps // LANES * LANES if w == LANES and (ks == 1 or ks == -1) else 0
            for j in range(w):
                for k in range(whole, steps):
                    put(tile, k * w + j, load(address, j * js + k * ks))
            for back in range(LANES, whole + 1, LANES):
                k = whole - back
                turn(tile + 8 * k * LANES, address + size * k * ks, js, int(ks < 0))

        return fill

    fill_d, fill_x = mover(d_store, "a"), mover(x_store, "b")
    _, turn_back = make_transposers(element, "a")

    @inlined
    def empty(tile, address, ks, js, steps, w):
        if js == 1:
            for back in range(steps):
                k = steps - 1 - back
                for j in range(w):
                    store(address, k * ks + j, d_load(tile, k * w + j))
            return
        whole = steps // LANES * LANES if w == LANES and (ks == 1 or ks == -1) else 0
        for j in range(w):
            for k in range(whole, steps):
                store(address, j * js + k * ks, d_load(tile, k * w + j))
        for back in range(LANES, whole + 1, LANES):
            k = whole - back
            turn_back(tile + 8 * k * LANES, address + size * k * ks, js, int(ks < 0))

    def steps_of(fixed):
        # The sequential loops, for any number of lanes or for one known to the compiler.
        @ordered
        def advance(xs, states, steps, lanes):
            w = fixed or lanes
            for k in range(steps):  # states[k + 1] from states[k]
                for j in range(w):
                    s = forward(state_load(states, k * w + j, pitch), x_load(xs, k * w + j))
                    state_store(states, (k + 1) * w + j, pitch, s)

        @ordered
        def carry_on(ds, gs, carry, steps, lanes):
            w = fixed or lanes
            for back in range(steps):
                k = steps - 1 - back
                for j in range(w):
                    i = k * w + j
                    S = d_load(ds, i) + carry_load(carry, j)
                    d_store(ds, i, S)
                    carry_store(carry, j, send(gain_load(gs, i), S))

        return advance, carry_on

    advance_any, carry_any = steps_of(0)
    advance_8, carry_8 = steps_of(LANES)

    @ordered
    def run_forward(xs, states, steps, w):
        # A long body vectorises only where the compiler does not unroll it first.
        if w == LANES and slots < 2:
            advance_8(xs, states, steps, w)
        else:
            advance_any(xs, states, steps, w)

    @ordered
    def run_backward(ds, xs, states, gs, carry, steps, w):
        # Only S itself runs step by step; gains and outputs are flat loops over the tile.
        for i in range(steps * w):
            before = state_load(states, i, pitch)
            after = state_load(states, i + w, pitch)
            gain_store(gs, i, gain(x_load(xs, i), before, after))
        if w == LANES:
            carry_8(ds, gs, carry, steps, w)
        else:
            carry_any(ds, gs, carry, steps, w)
        for i in range(steps * w):
            before = state_load(states, i, pitch)
            after = state_load(states, i + w, pitch)
            d_store(ds, i, out(d_load(ds, i), x_load(xs, i), before, after))

    @ordered
    def multiply(xs, totals, powers, steps, w):
        for k in range(steps):
            for j in range(w):
                m, e = total_load(totals, j), power_load(powers, j)
                m, e = times(m, e, x_load(xs, k * w + j))
                total_store(totals, j, m)
                power_store(powers, j, e)

    @ordered
    def multiply_gains(gs, gains, powers, steps, w):
        for back in range(steps):
            k = steps - 1 - back
            for j in range(w):
                g, kept = gain_load(gs, k * w + j), total_load(gains, j)
                if chosen:
                    total_store(gains, j, kept * g)
                else:
                    # What arrived at a factor 0 is a 0 in a sum: an infinity does not meet it.
                    m, e = times(kept, power_load(powers, j), g)
                    total_store(gains, j, kept if kept == 0.0 else m)
                    power_store(powers, j, e)

    @ordered
    def combine(m, ws, lo, hi):
        chunks = meta(m, at.CHUNKS)
        partials, carries = ws + meta(m, at.PARTIALS), ws + meta(m, at.CARRIES)
        for row in range(lo, hi):
            T = _NOTHING
            for back in range(chunks):
                c = row * chunks + chunks - 1 - back
                float_store(carries, c, T)
                partial, g = float_load(partials, 3 * c), float_load(partials, 3 * c + 1)
                # The far end receives nothing, which is not the same as gain · 0.
                if back == 0:
                    T = partial
                elif chosen:
                    T = partial + send(g, T)
                else:
                    T = partial + sent_on(g, float_load(partials, 3 * c + 2), T)

    @ordered
    def combine_forward(m, ws, lo, hi):
        chunks, states = meta(m, at.CHUNKS), ws + meta(m, at.STATES)
        for row in range(lo, hi):
            if product:
                total, power = 1.0, 0.0
                for c in range(row * chunks, (row + 1) * chunks):
                    own, more = float_load(states, c * left), float_load(states, c * left + 1)
                    float_store(states, c * left, settled(total, power))
                    total, power = times(total, power + more, own)
            else:
                s = identity
                for c in range(row * chunks, (row + 1) * chunks):
                    own = kept_load(states, c * left, 1)
                    kept_store(states, c * left, 1, s)
                    s = merge(s, own)

    def recurrence(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        if phase == at.COMBINE:
            combine(m, ws, lo, hi)
            return
        if phase == at.FORWARD_COMBINE:
            combine_forward(m, ws, lo, hi)
            return
        steps, more = meta(m, at.STEPS), meta(m, at.MORE_ACROSS)
        kd, kx = meta(m, at.AXIS + 1), meta(m, at.AXIS + 2)
        ko = meta(m, at.AXIS + 4)
        jd, jx = meta(m, at.ACROSS + 1), meta(m, at.ACROSS + 2)
        jo = meta(m, at.ACROSS + 4)
        ds = scratch()
        xs = ds + 8 * TILE
        states = xs + 8 * TILE
        gs = states + 8 * pitch * slots
        carry = gs + 8 * TILE
        gains = carry + 8 * MAX_LANES
        powers = gains + 8 * MAX_LANES
        checkpoints = ws + meta(m, at.CHECKPOINTS) + slot * meta(m, at.SLOT_BYTES)
        partials, carries = ws + meta(m, at.PARTIALS), ws + meta(m, at.CARRIES)
        chunk_states = ws + meta(m, at.STATES)
        for v in range(lo, hi):
            q, j0, w, begins, k_start, length, c0, c_step = lanes_of(m, phase, v)
            base = place(m, at.ACROSS, at.MORE_ACROSS_AT, more, j0, q)
            dy = meta(call, at.DY) + size * (base[0] + k_start * kd)
            x = meta(call, at.X) + size * (base[1] + k_start * kx)
            o = meta(call, at.OUT) + size * (base[3] + k_start * ko)
            tiles = (length + steps - 1) // steps
            for j in range(w):
                carry_store(carry, j, _NOTHING)
                total_store(gains, j, 1.0)
                power_store(powers, j, 0.0)
                if phase == at.APPLY:
                    carry_store(carry, j, float_load(carries, c0 + j * c_step))
                state_store(states, j, pitch, identity)
                if phase == at.PARTIAL or phase == at.APPLY:
                    s = kept_load(chunk_states, (c0 + j * c_step) * left, 1)
                    state_store(states, j, pitch, s)
            for tile in range(tiles):
                k0 = tile * steps
                count = min(steps, length - k0)
                if phase != at.FORWARD:
                    for j in range(w):
                        spot = tile * w * slots + j
                        kept_store(checkpoints, spot, w, state_load(states, j, pitch))
                    if tile + 1 == tiles:
                        break
                fill_x(xs, x + size * k0 * kx, kx, jx, count, w)
                if phase == at.FORWARD and product:
                    multiply(xs, gains, powers, count, w)
                    continue
                run_forward(xs, states, count, w)
                for j in range(w):
                    s = state_load(states, count * w + j, pitch)
                    state_store(states, j, pitch, s)
            if phase == at.FORWARD:
                for j in range(w):
                    spot = (c0 + j * c_step) * left
                    if product:
                        float_store(chunk_states, spot, total_load(gains, j))
                        float_store(chunk_states, spot + 1, power_load(powers, j))
                    else:
                        kept_store(chunk_states, spot, 1, state_load(states, j, pitch))
                continue
            for back in range(tiles):
                tile = tiles - 1 - back
                k0 = tile * steps
                count = min(steps, length - k0)
                fill_d(ds, dy + size * k0 * kd, kd, jd, count, w)
                fill_x(xs, x + size * k0 * kx, kx, jx, count, w)
                for j in range(w):
                    spot = tile * w * slots + j
                    state_store(states, j, pitch, kept_load(checkpoints, spot, w))
                run_forward(xs, states, count, w)
                run_backward(ds, xs, states, gs, carry, count, w)
                if chosen and k0 == 0:
                    # The first element always wins: what it did not take, it takes now.
                    for j in range(begins):
                        d_store(ds, j, d_load(ds, j) + carry_load(carry, j))
                if phase == at.PARTIAL:
                    multiply_gains(gs, gains, powers, count, w)
                else:
                    empty(ds, o + size * k0 * ko, ko, jo, count, w)
            if phase == at.PARTIAL:
                for j in range(w):
                    spot = 3 * (c0 + j * c_step)
                    float_store(partials, spot, carry_load(carry, j))
                    float_store(partials, spot + 1, total_load(gains, j))
                    float_store(partials, spot + 2, power_load(powers, j))

    return recurrence
