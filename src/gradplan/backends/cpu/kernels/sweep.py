"""The recurrence S[k] = dy[k] + c[k]·S[k+1] where the scan's own state is saved in y, or is not
needed: one sweep from the far end, in f64 registers, one rounding an element.

Rows are lanes. Rows that lie side by side are read and written where they lie, four steps at a time
(DIRECT). All others pass through a tile, [step][lane] of elements as they are stored, turned
round on the way in and out; the same steps then run on the tile. Long rows are cut into chunks of
a fixed length, which are the lanes where there are no rows beside them, so bits do not depend on
the number of threads:

- FUSED: everything, where rows are enough to go round;
- PARTIAL: what each chunk sends on, as T ↦ partial + gain · 2^e · T;
- COMBINE: the carry that arrives at each chunk;
- APPLY: each chunk with its carry.
"""

from __future__ import annotations

from typing import Any

from ....kinds import ElementKind, Named, TieRule
from . import layout as at
from .device import inlined, ordered, unfused
from .formulas import recurrence_formula, sent_on, times
from .layout import LINE, MAX_LANES, TILE
from .lowlevel import (
    LANES,
    STAGE_BYTES,
    fence,
    float_load,
    float_store,
    make_copy,
    make_flush,
    make_load,
    make_scratch,
    make_store,
    make_tile,
    make_turn,
    meta,
    move_line,
    prefetch,
)
from .rows import lanes_of, place
from .turning import make_empty, make_fill

carry_load, carry_store = make_tile("d")
total_load, total_store = make_tile("f")
power_load, power_store = make_tile("g")
# x + (−0.0) is x, bit for bit.
_NOTHING = -0.0


@unfused
def plus(a, b):
    # Fused with the product before it where four steps are taken at once, and not where one is, a
    # sum would depend on where tiles end, which is the output's address to say.
    return a + b


def build(kind: Named, element: ElementKind, ties: TieRule | None, direct: bool) -> Any:
    """The kernel of one scan kind; `direct`: rows lie side by side, in unit strides."""
    formula = recurrence_formula(kind, element, ties, True)
    size = element.size_bytes
    source, target = ("in", "out") if direct else ("tile a", "tile b")
    load, store = (
        make_load(element, True, source),
        make_store(element, True, target, through_f32=True),
    )
    stage_store = make_store(element, True, "stage", through_f32=True)
    flush, move = make_flush(element), inlined(move_line)
    uses_x, stateful, chosen = formula.uses_x, formula.slots > 0, formula.chosen
    out, gain = formula.out, formula.gain
    identity = formula.identity or (0.0,)
    grouped = formula.grouped
    stage_elements = STAGE_BYTES // size
    stage_pitch = STAGE_BYTES + LINE
    carries_room = make_scratch(3 * MAX_LANES)
    stage_room = make_scratch(4 * stage_pitch // 8 + 512)

    @ordered
    def send(g, S):
        if not uses_x:
            return S
        if chosen:
            return _NOTHING if g == 0.0 else S
        return g * S

    @inlined
    def values(d, x, y, j):
        vd = load(d, j)
        vx = load(x, j) if uses_x else 0.0
        vy = load(y, j) if stateful else 0.0
        return vd, vx, (vy,)

    def steps_with(put):
        # One step of all lanes, and four; o is where the step's results go.
        @ordered
        def one(d, x, y, o, before_y, has_before, starts, carry, lo, hi, shift):
            for j in range(lo, hi):
                vd, vx, after = values(d, x, y, j)
                before = identity
                if stateful and has_before:
                    before = (load(before_y, j),)
                S = plus(vd, carry_load(carry, j))
                dx = out(S, vx, before, after)
                if chosen and j < starts:
                    dx = S  # the first element always wins: what comes, it takes
                put(o, shift + j, dx)
                carry_store(carry, j, send(gain(vx, before, after), S))

        @ordered
        def four(d, x, y, o, kd, kx, ky, ko, carry, lo, hi, shift):
            for j in range(lo, hi):
                T = carry_load(carry, j)
                vd, vx, after = values(d, x, y, j)
                vd1, vx1, before1 = values(d - kd, x - kx, y - ky, j)
                S = plus(vd, T)
                dx = out(S, vx, before1, after)
                T = send(gain(vx, before1, after), S)
                vd2, vx2, before2 = values(d - 2 * kd, x - 2 * kx, y - 2 * ky, j)
                S = plus(vd1, T)
                dx1 = out(S, vx1, before2, before1)
                T = send(gain(vx1, before2, before1), S)
                vd3, vx3, before3 = values(d - 3 * kd, x - 3 * kx, y - 3 * ky, j)
                S = plus(vd2, T)
                dx2 = out(S, vx2, before3, before2)
                T = send(gain(vx2, before3, before2), S)
                before4 = (load(y - 4 * ky, j),) if stateful else (0.0,)
                S = plus(vd3, T)
                dx3 = out(S, vx3, before4, before3)
                carry_store(carry, j, send(gain(vx3, before4, before3), S))
                put(o, shift + j, dx)
                put(o - ko, shift + j, dx1)
                put(o - 2 * ko, shift + j, dx2)
                put(o - 3 * ko, shift + j, dx3)

        return one, four

    one, four = steps_with(store)
    one_staged, four_staged = steps_with(stage_store)

    @ordered
    def measure(d, x, y, before_y, has_before, carry, gains, powers, w):
        # A step of PARTIAL: what is sent on, and the product of the gains.
        for j in range(w):
            vd, vx, after = values(d, x, y, j)
            before = identity
            if stateful and has_before:
                before = (load(before_y, j),)
            g = gain(vx, before, after)
            carry_store(carry, j, send(g, vd + carry_load(carry, j)))
            if chosen:
                total_store(gains, j, total_load(gains, j) * g)
            elif uses_x:
                # What arrived at a factor 0 is a 0 in a sum: an infinity does not meet it.
                kept = total_load(gains, j)
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
                elif chosen or not uses_x:
                    T = partial + send(g, T)
                else:
                    T = partial + sent_on(g, float_load(partials, 3 * c + 2), T)

    @inlined
    def sweep(
        d, x, y, o, kd, kx, ky, ko, steps, w, has_before, starts, carry, room, streaming, ahead
    ):
        # Steps steps − 1 … 0, the first at these addresses; pitches in bytes. What is read next
        # is called for on the way, a little at a time, so that memory works while we do.
        next_d, next_x, next_y, jd, jx, jy, reach = ahead
        lane, offset, a_time = 0, 0, (w * reach // LINE * (4 if grouped else 1)) // steps + 1
        # What waits in the stage, from `left` down; the stage holds outputs from `low` up.
        kept, left, low, stage = room, o + steps * ko, o + steps * ko, room
        window = (max(STAGE_BYTES, 4 * ko) + 2 * LINE) & -LINE
        k = steps - 1
        while k >= 0:
            if not direct and reach > 0:
                for _ in range(a_time):
                    if lane < w:
                        prefetch(next_d + lane * jd + offset)
                        if uses_x:
                            prefetch(next_x + lane * jx + offset)
                        if stateful:
                            prefetch(next_y + lane * jy + offset)
                        offset += LINE
                        if offset >= reach:
                            lane, offset = lane + 1, 0
            group = 4 if grouped and k >= 4 else 1
            d_k, x_k, y_k, o_k = d + k * kd, x + k * kx, y + k * ky, o + k * ko
            has, begun = (has_before or k > 0), (starts if k == 0 else 0)
            if not streaming:
                if group == 4:
                    four(d_k, x_k, y_k, o_k, kd, kx, ky, ko, carry, 0, w, 0)
                else:
                    one(d_k, x_k, y_k, o_k, y_k - ky, has, begun, carry, 0, w, 0)
            elif ko == w * size:
                # Steps follow each other in memory: many leave together, and what they have of a
                # line that the next ones complete waits for those (see `make_trail`).
                begin, end = o_k - (group - 1) * ko, o_k + ko
                if begin < low:
                    low = ((end + LINE - 1) & -LINE) - window
                    stage = room + ((d_k - o_k + low - 256 - room) & (4095 & -LINE))
                    if left > end:
                        move(stage - low + (end & -LINE), kept)
                shift = stage - low
                if group == 4:
                    four_staged(d_k, x_k, y_k, shift + o_k, kd, kx, ky, ko, carry, 0, w, 0)
                else:
                    to = shift + o_k
                    one_staged(d_k, x_k, y_k, to, y_k - ky, has, begun, carry, 0, w, 0)
                if begin - 4 * ko < low or k < group:
                    cut = begin if k < group else min(left, (begin + LINE - 1) & -LINE)
                    flush(shift + (cut & -LINE), cut, (left - cut) // size)
                    kept, left = shift + (begin & -LINE), cut
                    low = end
            else:
                lo = 0
                while lo < w:
                    begin = o_k + size * lo
                    lead = (begin & (LINE - 1)) // size
                    hi = min(w, lo + stage_elements - lead)
                    # A little behind the input, modulo 4096: see rows.
                    stage = room + ((d_k + size * lo - 256 - room) & (4095 & -LINE))
                    if group == 4 and (ko & (LINE - 1)) == 0:
                        four_staged(
                            d_k,
                            x_k,
                            y_k,
                            stage,
                            kd,
                            kx,
                            ky,
                            -stage_pitch,
                            carry,
                            lo,
                            hi,
                            lead - lo,
                        )
                        for g in range(4):
                            flush(stage + g * stage_pitch, begin - g * ko, hi - lo)
                    else:
                        group = 1
                        one_staged(
                            d_k,
                            x_k,
                            y_k,
                            stage,
                            y_k - ky,
                            has,
                            begun,
                            carry,
                            lo,
                            hi,
                            lead - lo,
                        )
                        flush(stage, begin, hi - lo)
                    lo = hi
            k -= group

    fill = empty = empty_streaming = fetch = set_before = None
    tiles_room = lane_stage = make_scratch(1)
    if not direct:
        fetch = make_copy(element, "in", "tile a")
        fill, empty = make_fill(element, "tile a"), make_empty(element, "tile b")
        to_stage = make_copy(element, "tile b", "stage")
        turn_to_stage = make_turn(element, "tile b", "stage", inwards=False)
        set_before = make_store(element, True, "tile a")
        tiles_room = make_scratch((4 * TILE + 2 * MAX_LANES) * size // 8)
        lane_stage = make_scratch((TILE * size + MAX_LANES * 2 * LINE) // 8 + 512)

        @inlined
        def empty_streaming(tile, address, js, steps, w, room):
            # Where steps ascend in memory, w is a multiple of 8, and all lanes begin as far into a
            # line.
            pitch = w * size
            stage_row = (steps * size + LINE) & -LINE
            whole = steps // LANES * LANES
            lead = address & (LINE - 1)
            for j in range(0, w, LANES):
                for k in range(0, whole, LANES):
                    spot = room + j * stage_row + lead + k * size
                    turn_to_stage(tile + k * pitch + j * size, pitch, spot, stage_row, 0)
            if whole < steps:
                for j in range(w):
                    spot = room + j * stage_row + lead
                    for k in range(whole, steps):
                        to_stage(spot + k * size, tile + k * pitch + j * size)
            for j in range(w):
                flush(room + j * stage_row, address + j * js, steps)

    def kernel(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        if phase == at.COMBINE:
            combine(m, ws, lo, hi)
            return
        steps, more = meta(m, at.STEPS), meta(m, at.MORE_ACROSS)
        kd, kx = size * meta(m, at.AXIS + 1), size * meta(m, at.AXIS + 2)
        ky, ko = size * meta(m, at.AXIS + 3), size * meta(m, at.AXIS + 4)
        jd, jx = size * meta(m, at.ACROSS + 1), size * meta(m, at.ACROSS + 2)
        jy, jo = size * meta(m, at.ACROSS + 3), size * meta(m, at.ACROSS + 4)
        streaming = meta(m, at.STREAMING) != 0
        forwards = kd == size and (not stateful or (kx == size and ky == size))
        carry = carries_room()
        gains = carry + 8 * MAX_LANES
        powers = gains + 8 * MAX_LANES
        room = stage_room()
        partials, carries = ws + meta(m, at.PARTIALS), ws + meta(m, at.CARRIES)
        tiles, lane_room = tiles_room(), lane_stage()
        d_tile, x_tile = tiles, tiles + size * TILE
        o_tile, y_tile = tiles + 2 * size * TILE, tiles + 3 * size * TILE
        for v in range(lo, hi):
            q, j0, w, begins, k_start, length, c0, c_step = lanes_of(m, phase, v)
            base = place(m, at.ACROSS, at.MORE_ACROSS_AT, more, j0, q)
            dy = meta(call, at.DY) + size * base[0] + k_start * kd
            x = meta(call, at.X) + size * base[1] + k_start * kx
            y = meta(call, at.Y) + size * base[2] + k_start * ky
            o = meta(call, at.OUT) + size * base[3] + k_start * ko
            for j in range(w):
                carry_store(carry, j, _NOTHING)
                total_store(gains, j, 1.0)
                power_store(powers, j, 0.0)
                if phase == at.APPLY:
                    carry_store(carry, j, float_load(carries, c0 + j * c_step))
            if direct:
                if phase == at.PARTIAL:
                    for back in range(length):
                        k = length - 1 - back
                        has = k > 0 or begins == 0
                        y_k = y + k * ky
                        d_k, x_k = dy + k * kd, x + k * kx
                        measure(d_k, x_k, y_k, y_k - ky, has, carry, gains, powers, w)
                else:
                    sweep(
                        dy,
                        x,
                        y,
                        o,
                        kd,
                        kx,
                        ky,
                        ko,
                        length,
                        w,
                        begins == 0,
                        begins,
                        carry,
                        room,
                        streaming,
                        (0, 0, 0, 0, 0, 0, 0),
                    )
            else:
                pitch = w * size
                # Tiles begin where lines of the output do: one written in two pieces, by tiles that
                # are far apart in time, would have to come back (f32 rows of 2048: 3.3 in place of
                # 1.3 ms for NumPy's arrays, which begin 16 bytes into a line).
                head = (-o & (LINE - 1)) // size if streaming and ko == size else 0
                k0 = length
                while k0 > 0:
                    end = k0
                    k0 = max(0, head + (end - 1 - head) // steps * steps)
                    count = end - k0
                    fill(d_tile, pitch, dy + k0 * kd, kd, jd, count, w)
                    if uses_x:
                        fill(x_tile, pitch, x + k0 * kx, kx, jx, count, w)
                    if stateful:  # with one step before the first
                        fill(y_tile + pitch, pitch, y + k0 * ky, ky, jy, count, w)
                        for j in range(w):
                            if k0 == 0 and j < begins:
                                set_before(y_tile, j, identity[0])
                            else:
                                fetch(y_tile + j * size, y + j * jy + (k0 - 1) * ky)
                    if phase == at.PARTIAL:
                        for i in range(count):
                            at_k = (count - 1 - i) * pitch
                            y_k = y_tile + at_k + pitch
                            measure(
                                d_tile + at_k,
                                x_tile + at_k,
                                y_k,
                                y_k - pitch,
                                True,
                                carry,
                                gains,
                                powers,
                                w,
                            )
                        continue
                    ahead = (0, 0, 0, 0, 0, 0, 0)
                    if k0 > 0 and forwards:
                        k1 = max(0, k0 - steps)
                        ahead = (dy + k1 * kd, x + k1 * kx, y + k1 * ky, jd, jx, jy, steps * size)
                    sweep(
                        d_tile,
                        x_tile,
                        y_tile + pitch,
                        o_tile,
                        pitch,
                        pitch,
                        pitch,
                        pitch,
                        count,
                        w,
                        True,
                        begins if k0 == 0 else 0,
                        carry,
                        room,
                        False,
                        ahead,
                    )
                    target = o + k0 * ko
                    if streaming and ko == size and w % LANES == 0:
                        empty_streaming(o_tile, target, jo, count, w, lane_room)
                    else:
                        empty(o_tile, pitch, target, ko, jo, count, w)
            if phase == at.PARTIAL:
                for j in range(w):
                    spot = 3 * (c0 + j * c_step)
                    float_store(partials, spot, carry_load(carry, j))
                    float_store(partials, spot + 1, total_load(gains, j))
                    float_store(partials, spot + 2, power_load(powers, j))
        if streaming:
            fence()

    return kernel
