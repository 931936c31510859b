"""The engine *recurrence* for rows that do not fill the machine one by one: one read, on few
programs that stay.

Rows are cut into parts, as in `walks`, and all programs take them in turn, wave by wave. A part
stays in shared memory from its read to its write, and three groups of a program's warps work on
different parts at the same time, as in `held`: one *takes* and tells what parts do to what arrives
from behind, one *joins* what all programs have told of a wave, one *gives*: it runs through parts
at which all that arrives is known, and asks for the next ones.

All programs must run at the same time: the launch is a cooperative one.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon, mbarrier
from ..launch import interpreted
from .hearing import hear, overheard
from .line_scans import mode_of
from .stretches import beats
from .walk_logs import arrived_logs, ends_of, give_logs, past_place, take_logs
from .walk_memory import (
    ask_part,
    begin_of,
    copy,
    copy_layout,
    line_layout,
    lines_layout,
    nearer,
    offsets,
    shared_layout,
    word_offsets,
)
from .walk_scans import across, onward
from .walks import finish, line_totals, stretch_count
from .waves import arrived_from, tell_last

_INTERPRETED = tl.constexpr(interpreted())


@gluon.jit
def held_scan(
    dy,
    x,
    y,
    out,
    words,
    told,
    row_dims,
    row_dy,
    row_x,
    row_y,
    row_out,
    axis_dims,
    axis_dy,
    axis_x,
    axis_y,
    axis_out,
    n,
    tiles,
    parts,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    MARK: tl.constexpr,
    FLIP: tl.constexpr,
    WIDE: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    NW: tl.constexpr,
    JOINERS: tl.constexpr,
    REGISTERS: tl.constexpr,
    FULL: tl.constexpr,
):
    """As `walks.walk_rows` and `walk_logs.walk_logs`. `told` are what the parts of rows do, a word
    and, where it takes two, another behind all; a wave has no more than K of them."""
    MODE: tl.constexpr = "mark" if MARK else "log" if KIND == "log_cumsum_exp" else mode_of(KIND)
    UP: tl.constexpr = FLIP if MARK else not FLIP
    TYPE: tl.constexpr = gl.float64 if WIDE else gl.float32
    S: tl.constexpr = stretch_count(MODE, E) + 1
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SHARED: tl.constexpr = shared_layout(False, E, ELEMENT)
    if MARK:
        kept = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, G, E], SHARED)
    else:
        kept = gl.allocate_shared_memory(dy.dtype.element_ty, [STAGES, G, E], SHARED)
    kept_x, kept_y, kept_words = kept, kept, kept
    # What is behind each line of a part, and what its first stretches do.
    kept_s = gl.allocate_shared_memory(TYPE, [STAGES * S, G, 1], PLAIN)
    kept_a = kept_s
    # What is needed last comes last, and has room for two parts.
    if MODE == "affine":
        kept_x = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, G, E], SHARED)
        kept_y = gl.allocate_shared_memory(y.dtype.element_ty, [2, G, E], SHARED)
    elif MODE == "log":
        kept_y = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES, G, E], SHARED)
        kept_x = gl.allocate_shared_memory(x.dtype.element_ty, [2, G, E], SHARED)
    elif MODE == "gate":
        kept_words = gl.allocate_shared_memory(gl.int32, [STAGES, G, E // 32], PLAIN)
    # What all lines of a part do together, where that may be nothing.
    kept_all = kept_s
    if MODE == "mark":
        kept_all = gl.allocate_shared_memory(TYPE, [STAGES, G, 1], PLAIN)
    elif MODE == "gate":
        kept_all = gl.allocate_shared_memory(gl.int32, [STAGES, G, 1], PLAIN)
    if MODE == "affine":
        kept_a = gl.allocate_shared_memory(TYPE, [STAGES * S, G, 1], PLAIN)
    elif MODE == "gate" or MODE == "log":
        kept_a = gl.allocate_shared_memory(gl.int32, [STAGES * S, G, 1], PLAIN)
    # What arrives at a part, the same for all lines: of this one and the next.
    inward = gl.allocate_shared_memory(gl.float64, [2, G, 1], PLAIN)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    units = tiles * parts
    count = (units - first + programs - 1) // programs
    dy_steps = (row_dims, row_dy, axis_dy)
    x_steps = (row_dims, row_x, axis_x)
    y_steps = (row_dims, row_y, axis_y)
    out_steps = (row_dims, row_out, axis_out)
    if _INTERPRETED:  # one program, which knows no threads: one step after the other
        wave = (first * 0).to(gl.float64)
        for i in range(count):
            ask_for(
                dy, x, y, words, kept, kept_x, kept_y, kept_words, dy_steps, x_steps, y_steps, n,
                first, programs, i, count, parts, 0, MODE, UP, ELEMENT, G, E, NW, FULL,
            )  # fmt: skip
            ask_last(
                x, y, kept_x, kept_y, x_steps, y_steps, n, first, programs, i, count, parts, MODE,
                UP, ELEMENT, G, E, NW, FULL,
            )  # fmt: skip
            beside = beside_of(y, y_steps, n, first, programs, i, parts, MODE, UP, G, E, NW)
            take_part(
                dy, y, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, told, dy_steps,
                y_steps, first, programs, i, 0, units, parts, n, beside, KIND, MODE, UP, TYPE,
                ELEMENT, G, E, NW, FULL,
            )  # fmt: skip
            heard_s, heard_a = overheard_wave(told, programs, i, units, MODE, K, JOINERS)
            past = past_of(y, y_steps, n, first, programs, i, parts, MODE, UP, G * E)
            later = gl.minimum(i + 1, count - 1)
            next_past = past_of(y, y_steps, n, first, programs, later, parts, MODE, UP, G * E)
            here, wave = join_wave(
                told, first, programs, i, units, parts, heard_s, heard_a, past, next_past,
                wave, MODE, K, JOINERS,
            )  # fmt: skip
            inward.index(i & 1).store(gl.full([G, 1], 0.0, gl.float64, None) + here)
            give_part(
                dy, x, y, out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all,
                inward, dy_steps, x_steps, y_steps, out_steps, n, first, programs, i, 0, parts,
                beside, KIND, TIES, MODE, UP, TYPE, ELEMENT, G, E, NW, FULL,
            )  # fmt: skip
    else:
        arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(arrived.index(stage), 32 * NW)
            mbarrier.init(taken.index(stage), 1)
        known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        used = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(known.index(half), 1)
            mbarrier.init(used.index(half), 1)
        # Only where it is waited for: the compiler gives the room of a barrier that nobody uses to
        # others, and the machine writes the barrier there anew when another process has a turn.
        last = known
        if comes_last(MODE):
            last = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
            for half in gl.static_range(2):
                mbarrier.init(last.index(half), 32 * NW)
        gl.warp_specialize(
            [
                (
                    taking,
                    (
                        dy, y, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, told,
                        arrived, taken, dy_steps, y_steps, first, programs, count, units, parts, n,
                        KIND, MODE, UP, TYPE, ELEMENT, G, E, STAGES, NW, FULL,
                    ),
                ),
                (
                    giving,
                    (
                        dy, x, y, out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a,
                        kept_all, inward, arrived, taken, last, known, used, dy_steps, x_steps,
                        y_steps, out_steps, n, first, programs, count, parts, KIND, TIES, MODE, UP,
                        TYPE, ELEMENT, G, E, STAGES, NW, FULL,
                    ),
                ),
                (
                    joining,
                    (
                        y, told, inward, known, used, y_steps, n, first, programs, count, units,
                        parts, MODE, UP, G, E, K, JOINERS,
                    ),
                ),
            ],
            [NW, JOINERS],
            [REGISTERS[0], REGISTERS[1]],
        )  # fmt: skip


@gluon.jit
def taking(
    dy, y, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, told, arrived, taken,
    dy_steps, y_steps, first, programs, count, units, parts, n, KIND: tl.constexpr,
    MODE: tl.constexpr, UP: tl.constexpr, TYPE: tl.constexpr, ELEMENT: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Take and tell what all parts of a program do."""
    NEED: tl.constexpr = MODE if MODE == "log" else ""
    beside = beside_of(y, y_steps, n, first, programs, 0, parts, NEED, UP, G, E, NW)
    for i in range(count):
        stage = i % STAGES
        later = gl.minimum(i + 1, count - 1)
        after = beside_of(y, y_steps, n, first, programs, later, parts, NEED, UP, G, E, NW)
        mbarrier.wait(arrived.index(stage), (i // STAGES) & 1)
        take_part(
            dy, y, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, told, dy_steps,
            y_steps, first, programs, i, stage, units, parts, n, beside, KIND, MODE, UP, TYPE,
            ELEMENT, G, E, NW, FULL,
        )  # fmt: skip
        gl.thread_barrier()  # all have loaded and stored
        mbarrier.arrive(taken.index(stage))
        beside = after


@gluon.jit
def giving(
    dy, x, y, out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, inward,
    arrived, taken, last, known, used, dy_steps, x_steps, y_steps, out_steps, n, first, programs,
    count, parts, KIND: tl.constexpr, TIES: tl.constexpr, MODE: tl.constexpr, UP: tl.constexpr,
    TYPE: tl.constexpr, ELEMENT: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    STAGES: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Ask for all parts of a program, and write their gradients when all is known."""
    LAST: tl.constexpr = comes_last(MODE)
    for ahead in gl.static_range(STAGES):
        ask_for(
            dy, x, y, words, kept, kept_x, kept_y, kept_words, dy_steps, x_steps, y_steps, n, first,
            programs, ahead, count, parts, ahead, MODE, UP, ELEMENT, G, E, NW, FULL,
        )  # fmt: skip
        async_copy.mbarrier_arrive(arrived.index(ahead), increment_count=False)
        if LAST and ahead < 2:
            ask_last(
                x, y, kept_x, kept_y, x_steps, y_steps, n, first, programs, ahead, count, parts,
                MODE, UP, ELEMENT, G, E, NW, FULL,
            )  # fmt: skip
            async_copy.mbarrier_arrive(last.index(ahead), increment_count=False)
    beside = beside_of(y, y_steps, n, first, programs, 0, parts, MODE, UP, G, E, NW)
    for i in range(count):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        later = gl.minimum(i + 1, count - 1)
        after = beside_of(y, y_steps, n, first, programs, later, parts, MODE, UP, G, E, NW)
        mbarrier.wait(arrived.index(stage), phase)
        mbarrier.wait(taken.index(stage), phase)
        if LAST:
            mbarrier.wait(last.index(i & 1), (i >> 1) & 1)
        mbarrier.wait(known.index(i & 1), (i >> 1) & 1)
        give_part(
            dy, x, y, out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all,
            inward, dy_steps, x_steps, y_steps, out_steps, n, first, programs, i, stage, parts,
            beside, KIND, TIES, MODE, UP, TYPE, ELEMENT, G, E, NW, FULL,
        )  # fmt: skip
        gl.thread_barrier()  # all have loaded
        mbarrier.arrive(used.index(i & 1))
        # Before the next part: a barrier waits for all that its thread has asked for so far.
        if LAST:
            ask_last(
                x, y, kept_x, kept_y, x_steps, y_steps, n, first, programs, i + 2, count, parts,
                MODE, UP, ELEMENT, G, E, NW, FULL,
            )  # fmt: skip
            async_copy.mbarrier_arrive(last.index(i & 1), increment_count=False)
        ask_for(
            dy, x, y, words, kept, kept_x, kept_y, kept_words, dy_steps, x_steps, y_steps, n, first,
            programs, i + STAGES, count, parts, stage, MODE, UP, ELEMENT, G, E, NW, FULL,
        )  # fmt: skip
        async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)
        beside = after


@gluon.jit
def joining(
    y, told, inward, known, used, y_steps, n, first, programs, count, units, parts,
    MODE: tl.constexpr, UP: tl.constexpr, G: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    JOINERS: tl.constexpr,
):  # fmt: skip
    """Join what all programs have told of each wave."""
    LINES: tl.constexpr = lines_layout(False, 1, JOINERS)
    wave = (first * 0).to(gl.float64)
    past = past_of(y, y_steps, n, first, programs, 0, parts, MODE, UP, G * E)
    next_past = past_of(
        y, y_steps, n, first, programs, gl.minimum(1, count - 1), parts, MODE, UP, G * E
    )
    for i in range(count):
        heard_s, heard_a = overheard_wave(told, programs, i, units, MODE, K, JOINERS)
        later = gl.minimum(i + 2, count - 1)
        later_past = past_of(y, y_steps, n, first, programs, later, parts, MODE, UP, G * E)
        here, wave = join_wave(
            told, first, programs, i, units, parts, heard_s, heard_a, past, next_past, wave,
            MODE, K, JOINERS,
        )  # fmt: skip
        if i > 1:
            mbarrier.wait(used.index(i & 1), ((i >> 1) & 1) ^ 1)
        inward.index(i & 1).store(gl.full([G, 1], 0.0, gl.float64, LINES) + here)
        gl.thread_barrier()  # all have stored
        mbarrier.arrive(known.index(i & 1))
        past = next_past + 0
        next_past = later_past


@gluon.jit
def unit_of_wave(i, first, programs, parts):
    """The row of a program's part of the i-th wave, and its place from the far end."""
    unit = i * programs + first
    return unit // parts, unit % parts


@gluon.jit
def ask_for(
    dy, x, y, words, kept, kept_x, kept_y, kept_words, dy_steps, x_steps, y_steps, n, first,
    programs, i, count, parts, stage, MODE: tl.constexpr, UP: tl.constexpr, ELEMENT: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Ask for a program's i-th part, if there is one, of all arrays but the last."""
    COPY: tl.constexpr = copy_layout(False, 1, E, ELEMENT, NW)
    WORD: tl.constexpr = line_layout(False, 1, E // 32 if E > 32 else 1, NW)
    tile, place = unit_of_wave(i, first, programs, parts)
    begin = begin_of(place, parts, n, UP, G * E)
    ask_part(
        dy, x, y, words, kept, kept_x, kept_y, kept_words, dy_steps[0], dy_steps[1], x_steps[1],
        y_steps[1], dy_steps[2], x_steps[2], y_steps[2], n, 0, n, tile, begin, i < count, stage,
        needed_first(MODE), UP, False, 1, G, E, FULL, COPY, WORD,
    )  # fmt: skip


@gluon.jit
def ask_last(
    x, y, kept_x, kept_y, x_steps, y_steps, n, first, programs, i, count, parts, MODE: tl.constexpr,
    UP: tl.constexpr, ELEMENT: tl.constexpr, G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Ask for what only gradients need: y (cumprod) or x (log-cumsum-exp)."""
    COPY: tl.constexpr = copy_layout(False, 1, E, ELEMENT, NW)
    if i < count:
        tile, place = unit_of_wave(i, first, programs, parts)
        begin = begin_of(place, parts, n, UP, G * E)
        if MODE == "affine":
            ask_one(y, kept_y, i & 1, y_steps, tile, begin, n, UP, G, E, FULL, COPY)
        elif MODE == "log":
            ask_one(x, kept_x, i & 1, x_steps, tile, begin, n, UP, G, E, FULL, COPY)


@gluon.jit
def ask_one(
    pointer, kept, stage, steps, tile, begin, n, UP: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    FULL: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    base, at, there = offsets(
        tile, begin, 0, n, steps[0], steps[1], steps[2], UP, False, 1, G, E, COPY
    )
    copy(pointer + base + at, there, kept.index(stage), FULL)


@triton.constexpr_function
def comes_last(mode):
    """Whether there is an array that only gradients need."""
    return mode == "affine" or mode == "log"


@triton.constexpr_function
def needed_first(mode):
    """What `walk_memory.ask_part` asks for, of what is told of parts."""
    return {"affine": "x", "log": "y"}.get(mode, mode)


@gluon.jit
def beside_of(
    y, y_steps, n, first, programs, i, parts, MODE: tl.constexpr, UP: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """What a part needs of y besides: that of the place before each line (see `walks.finish`), or
    those at its ends and past it."""
    LINES: tl.constexpr = lines_layout(False, 1, NW)
    tile, place = unit_of_wave(i, first, programs, parts)
    begin = begin_of(place, parts, n, UP, G * E)
    if MODE == "affine":
        number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
        line = begin + (G - 1 - number if UP else number) * E
        return nearer(y, tile, line, n, y_steps[0], y_steps[1], y_steps[2], UP, False, 1, E, LINES)
    elif MODE == "log":
        lanes = gl.arange(0, 1, gl.SliceLayout(0, LINES))
        return ends_of(
            y, tile, begin, 0, n, lanes, n, y_steps[0], y_steps[1], y_steps[2], UP, False, 1, G * E
        )
    else:
        return first


@gluon.jit
def take_part(
    dy, y, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, told, dy_steps, y_steps,
    first, programs, i, stage, units, parts, n, beside, KIND: tl.constexpr, MODE: tl.constexpr,
    UP: tl.constexpr, TYPE: tl.constexpr, ELEMENT: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a part does to what arrives: told, and line by line kept."""
    LINE: tl.constexpr = line_layout(False, 1, E, NW)
    WORD: tl.constexpr = line_layout(False, 1, E // 32 if E > 32 else 1, NW)
    LINES: tl.constexpr = lines_layout(False, 1, NW)
    S: tl.constexpr = stretch_count(MODE, E) + 1
    tile, place = unit_of_wave(i, first, programs, parts)
    begin = begin_of(place, parts, n, UP, G * E)
    target = told + (i * programs + first).to(gl.int64)
    if MODE == "log":
        take_logs(
            dy, y, kept, kept_y, kept_s, kept_a, target, units, dy_steps, y_steps, tile, begin,
            stage, n, beside, ELEMENT, UP, G, E, NW, FULL,
        )  # fmt: skip
    else:
        totals, gains = line_totals(
            kept, kept_x, kept_words, stage, begin, n, KIND, MODE, UP, TYPE, False, 1, G, E, NW,
            FULL, LINE, WORD,
        )  # fmt: skip
        all_s, all_a, behind, passes = across(totals[S - 1], gains[S - 1], MODE)
        tell_last(target, all_s, all_a, MODE == "gate", G, LINES)
        put_by(kept_s, stage, behind, totals, S)
        if MODE == "affine":
            tell_last(target + units.to(gl.int64), all_a, all_a, False, G, LINES)
        if MODE == "affine" or MODE == "gate":
            put_by(kept_a, stage, passes, gains, S)
        if MODE == "mark":
            kept_all.index(stage).store(all_s)
        elif MODE == "gate":
            kept_all.index(stage).store(all_a)


@gluon.jit
def wave_words(told, programs, i, units, K: tl.constexpr, JOINERS: tl.constexpr):
    """Where it is told what the parts of a wave do, and which of them there are."""
    lane = gl.arange(0, K, gl.BlockedLayout([K // (32 * JOINERS)], [32], [JOINERS], [0]))
    base = i * programs
    needed = ((lane < programs) & (base + lane < units)).to(gl.int32)
    return told + base.to(gl.int64) + lane, lane, needed


@gluon.jit
def overheard_wave(
    told, programs, i, units, MODE: tl.constexpr, K: tl.constexpr, JOINERS: tl.constexpr
):
    """What has been told of a wave so far."""
    source, _lane, needed = wave_words(told, programs, i, units, K, JOINERS)
    heard_s = overheard(source, needed, 64)
    heard_a = heard_s
    if MODE == "affine" or MODE == "log":
        heard_a = overheard(source + units.to(gl.int64), needed, 64)
    return heard_s, heard_a


@gluon.jit
def past_of(
    y, y_steps, n, first, programs, i, parts, MODE: tl.constexpr, UP: tl.constexpr, C: tl.constexpr
):
    """y past a program's part of a wave, for `walk_logs`."""
    if MODE == "log":
        tile, place = unit_of_wave(i, first, programs, parts)
        begin = begin_of(place, parts, n, UP, C)
        return past_place(y, tile, begin, n, y_steps, UP, C)
    else:
        return first


@gluon.jit
def join_wave(
    told, first, programs, i, units, parts, heard_s, heard_a, past, next_past, wave,
    MODE: tl.constexpr, K: tl.constexpr, JOINERS: tl.constexpr,
):  # fmt: skip
    """What arrives at a program's part of a wave, and at the wave after it."""
    EACH: tl.constexpr = K // (32 * JOINERS)
    source, lane, needed = wave_words(told, programs, i, units, K, JOINERS)
    heard_s = hear(source, heard_s, EACH)
    if MODE == "affine" or MODE == "log":
        heard_a = hear(source + units.to(gl.int64), heard_a, EACH)
    base = i * programs
    if MODE == "log":
        return arrived_logs(
            heard_s, heard_a, lane, needed, base, first, programs, units, parts,
            (base + first) % parts, past, next_past, wave,
        )  # fmt: skip
    else:
        return arrived_from(
            heard_s, heard_a, lane, needed, base, first, programs, units, parts, wave, MODE
        )


@gluon.jit
def give_part(
    dy, x, y, out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, kept_all, inward,
    dy_steps, x_steps, y_steps, out_steps, n, first, programs, i, stage, parts, beside,
    KIND: tl.constexpr, TIES: tl.constexpr, MODE: tl.constexpr, UP: tl.constexpr,
    TYPE: tl.constexpr, ELEMENT: tl.constexpr, G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Run through a part, with what arrives at it."""
    WORD: tl.constexpr = line_layout(False, 1, E // 32 if E > 32 else 1, NW)
    COPY: tl.constexpr = copy_layout(False, 1, E, ELEMENT, NW)
    LINES: tl.constexpr = lines_layout(False, 1, NW)
    tile, place = unit_of_wave(i, first, programs, parts)
    begin = begin_of(place, parts, n, UP, G * E)
    if MODE == "log":
        arriving = inward.index(i & 1).load(LINES)
        give_logs(
            dy, x, y, out, kept, kept_x, kept_y, kept_s, kept_a, dy_steps, x_steps, y_steps,
            out_steps, tile, place, begin, stage, i & 1, n, beside, arriving, ELEMENT, UP, G, E, NW,
            FULL,
        )  # fmt: skip
    elif MODE == "mark":
        # No place wins where the largest does not; the first of a row always does.
        largest = the_last(kept_all.index(stage), G, LINES)
        before = the_last(inward.index(i & 1), G, LINES).to(TYPE)
        if beats(TIES, largest, before) | (place == 0):
            give_lines(
                out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, inward, out_steps, n,
                tile, begin, stage, i & 1, beside, KIND, TIES, MODE, UP, TYPE, ELEMENT, G, E, NW,
                FULL,
            )  # fmt: skip
        else:
            at, there = word_offsets(tile, begin, n, out_steps[0], UP, False, 1, G, E, WORD, False)
            put_nothing(words + at, there, gl.int32, [G, E // 32], WORD, FULL)
    elif MODE == "gate":
        if the_last(kept_all.index(stage), G, LINES) == 0:
            give_lines(
                out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, inward, out_steps, n,
                tile, begin, stage, i & 1, beside, KIND, TIES, MODE, UP, TYPE, ELEMENT, G, E, NW,
                FULL,
            )  # fmt: skip
        else:  # without a winner
            base, at, there = offsets(
                tile,
                begin,
                0,
                n,
                out_steps[0],
                out_steps[1],
                out_steps[2],
                UP,
                False,
                1,
                G,
                E,
                COPY,
            )
            put_nothing(out + base + at, there, out.dtype.element_ty, [G, E], COPY, FULL)
    else:
        give_lines(
            out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, inward, out_steps, n,
            tile, begin, stage, i & 1, beside, KIND, TIES, MODE, UP, TYPE, ELEMENT, G, E, NW, FULL,
        )  # fmt: skip


@gluon.jit
def give_lines(
    out, words, kept, kept_x, kept_y, kept_words, kept_s, kept_a, inward, out_steps, n, tile, begin,
    stage, last, beside, KIND: tl.constexpr, TIES: tl.constexpr, MODE: tl.constexpr,
    UP: tl.constexpr, TYPE: tl.constexpr, ELEMENT: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    NW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Line by line, as `walks`."""
    LINE: tl.constexpr = line_layout(False, 1, E, NW)
    WORD: tl.constexpr = line_layout(False, 1, E // 32 if E > 32 else 1, NW)
    COPY: tl.constexpr = copy_layout(False, 1, E, ELEMENT, NW)
    LINES: tl.constexpr = lines_layout(False, 1, NW)
    S: tl.constexpr = stretch_count(MODE, E) + 1
    T, totals = taken_up(kept_s, stage, S, LINES)
    passes, gains = T, totals
    if MODE == "affine" or MODE == "gate":
        passes, gains = taken_up(kept_a, stage, S, LINES)
    T = onward(T, passes, inward.index(last).load(LINES), MODE)
    finish(
        out, words, kept, kept_x, kept_y, kept_words, stage, last, out_steps[0], out_steps[1],
        out_steps[2], n, 0, n, tile, begin, T, totals, gains, beside, KIND, TIES, MODE, UP, TYPE,
        False, 1, G, E, NW, FULL, LINE, WORD, COPY,
    )  # fmt: skip


@gluon.jit
def the_last(kept, G: tl.constexpr, LINES: tl.constexpr):
    """What was kept of the last of a part's lines."""
    return gl.sum(gl.sum(kept.slice(G - 1, 1, 0).load(LINES), 0), 0)


@gluon.jit
def put_nothing(
    target, there, TYPE: tl.constexpr, SHAPE: tl.constexpr, LAYOUT: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    nothing = gl.full(SHAPE, 0, TYPE, LAYOUT)
    if FULL:
        gl.store(target, nothing)
    else:
        gl.store(target, nothing, mask=there)


@gluon.jit
def put_by(kept, stage, behind, stretches, COUNT: tl.constexpr):
    """Keep what is known of a part's lines until it is finished: what is behind each, and what its
    first stretches do."""
    kept.index(stage * COUNT).store(behind)
    for k in gl.static_range(0, COUNT - 1):
        kept.index(stage * COUNT + k + 1).store(stretches[k])


@gluon.jit
def taken_up(kept, stage, COUNT: tl.constexpr, LINES: tl.constexpr):
    stretches = ()
    for k in gl.static_range(0, COUNT - 1):
        stretches = stretches + (kept.index(stage * COUNT + k + 1).load(LINES),)
    return kept.index(stage * COUNT).load(LINES), stretches
