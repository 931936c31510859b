"""The engine *recurrence* on few programs that stay: one read, the next parts on their way.

Rows are cut into parts, which arrive in shared memory by asynchronous copies while the part before
is worked on. A thread takes a line, E neighbouring places of a row, and runs through them alone;
only what each line does to what arrives from behind goes through a scan across threads.

What goes on from a place is T = x · S (cumprod), S where the place is no winner (cummax, cummin),
or S itself: so a line needs no neighbour's x.

Rows that fill the machine, or strips of them, are walked by a program each, from end to end. For
others see `held_scans`, and for Gluon `held`.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon
from ..launch import interpreted
from .line_scans import mask, mode_of
from .stretches import beats, extremum, larger
from .walk_memory import (
    address_of,
    ask,
    begin_of,
    begun,
    columns_of,
    copy_layout,
    flat,
    is_whole,
    line_layout,
    lined,
    lines_layout,
    lines_of,
    nearer,
    numbers_of,
    offsets,
    run_of,
    shared_layout,
    unit_of,
    word_offsets,
)
from .walk_scans import across, edge, lowest, onward
from .winners import either

_INTERPRETED = tl.constexpr(interpreted())
_INFINITY = tl.constexpr(float("inf"))


@gluon.jit
def walk_rows(
    dy,
    x,
    y,
    out,
    words,
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
    SIDE: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    STAGES: tl.constexpr,
    NW: tl.constexpr,
    FULL: tl.constexpr,
    ANYWHERE: tl.constexpr,
    V: tl.constexpr,
):
    """`tiles` of R rows, in `parts` of G lines of E places; a program has room for STAGES of them.

    MARK: x alone is read, and leaves a bit a place in `words`, for the launch that reads dy and
    them. ANYWHERE: rows one by one that begin at any address, in all arrays alike; parts are those
    of their runs, and places are counted from where those begin. Elements are copied V at a time.
    """
    MODE: tl.constexpr = "mark" if MARK else mode_of(KIND)
    # The far end is where a walk begins; marks are walked the other way.
    UP: tl.constexpr = FLIP if MARK else not FLIP
    TYPE: tl.constexpr = gl.float64 if WIDE else gl.float32
    C: tl.constexpr = G * E
    SHAPE: tl.constexpr = [C, R] if SIDE else [G, E]
    BITS: tl.constexpr = [C // 32, R] if SIDE else [G, E // 32]
    LINE: tl.constexpr = line_layout(SIDE, R, E, NW)
    WORD: tl.constexpr = line_layout(SIDE, R, E // 32 if E > 32 else 1, NW)
    COPY: tl.constexpr = copy_layout(SIDE, R, E, ELEMENT, NW, V)
    SHARED: tl.constexpr = shared_layout(SIDE, E, ELEMENT)
    PLAIN: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if MARK:
        kept = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES] + SHAPE, SHARED)
    else:
        kept = gl.allocate_shared_memory(dy.dtype.element_ty, [STAGES] + SHAPE, SHARED)
    kept_x, kept_y, kept_words = kept, kept, kept
    if MODE == "affine":
        kept_x = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES] + SHAPE, SHARED)
        kept_y = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES] + SHAPE, SHARED)
    elif MODE == "gate":
        kept_words = gl.allocate_shared_memory(gl.int32, [STAGES] + BITS, PLAIN)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    count = (tiles - first + programs - 1) // programs * parts
    for stage in gl.static_range(STAGES - 1):
        ask(
            dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y,
            axis_dy, axis_x, axis_y, n, first, programs, stage, count, parts, stage,
            MODE, UP, SIDE, R, G, E, FULL, COPY, WORD, ANYWHERE,
        )  # fmt: skip
    LINES: tl.constexpr = lines_layout(SIDE, R, NW)
    carry = gl.full([R], 0.0, gl.float64, gl.SliceLayout(0, LINES))
    for i in range(count):
        freed = (i + STAGES - 1) % STAGES
        ask(
            dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y,
            axis_dy, axis_x, axis_y, n, first, programs, i + STAGES - 1, count, parts, freed,
            MODE, UP, SIDE, R, G, E, FULL, COPY, WORD, ANYWHERE,
        )  # fmt: skip
        if ANYWHERE:
            tile, place = unit_of(i, first, programs, parts)
            if MARK:
                head, body = run_of(x, tile, n, row_dims, row_x, ANYWHERE)
            else:
                head, body = run_of(dy, tile, n, row_dims, row_dy, ANYWHERE)
            if place == 0:
                carry = edge(
                    dy, x, y, out, words, row_dims, row_dy, row_x, row_y, row_out, axis_dy, axis_x,
                    axis_y, axis_out, n, head, body, tile,
                    gl.zeros_like(carry) - (_INFINITY if MARK else 0.0), KIND, TIES, MODE, UP, UP,
                    TYPE, NW, LINES,
                )  # fmt: skip
        else:
            head, body = 0, n
        async_copy.wait_group(STAGES - 1)
        tile, place = unit_of(i, first, programs, parts)
        begin = begin_of(place, parts, n, UP, C)
        # What is not masked takes fewer instructions.
        if FULL or is_whole(tile, begin, body, row_dims, SIDE, R, C):
            carry = walk_part(
                y, out, words, kept, kept_x, kept_y, kept_words, i % STAGES, row_dims, row_y,
                row_out, axis_y, axis_out, n, head, body, tile, begin, place, carry, KIND, TIES,
                MODE, UP, TYPE, SIDE, R, G, E, NW, True, LINE, WORD, COPY, ANYWHERE,
            )  # fmt: skip
        else:
            carry = walk_part(
                y, out, words, kept, kept_x, kept_y, kept_words, i % STAGES, row_dims, row_y,
                row_out, axis_y, axis_out, n, head, body, tile, begin, place, carry, KIND, TIES,
                MODE, UP, TYPE, SIDE, R, G, E, NW, False, LINE, WORD, COPY, ANYWHERE,
            )  # fmt: skip
        if ANYWHERE:
            if place == parts - 1:
                edge(
                    dy, x, y, out, words, row_dims, row_dy, row_x, row_y, row_out, axis_dy, axis_x,
                    axis_y, axis_out, n, head, body, tile, carry, KIND, TIES, MODE, UP, not UP,
                    TYPE, NW, LINES,
                )  # fmt: skip


@gluon.jit
def walk_part(
    y, out, words, kept, kept_x, kept_y, kept_words, stage, row_dims, row_y, row_out, axis_y,
    axis_out, n, head, body, tile, begin, place, carry, KIND: tl.constexpr, TIES: tl.constexpr,
    MODE: tl.constexpr, UP: tl.constexpr, TYPE: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr, LINE: tl.constexpr,
    WORD: tl.constexpr, COPY: tl.constexpr, ANYWHERE: tl.constexpr,
):  # fmt: skip
    """A part that has arrived in shared memory; `carry`, f64 [R], leaves the one behind it, and
    returned is what leaves this one."""
    LINES: tl.constexpr = lines_layout(SIDE, R, NW)
    # Of a line that are walked one after the other, but for the last.
    STRETCHES: tl.constexpr = stretch_count(MODE, E)
    nothing = gl.zeros_like(carry) - (_INFINITY if MODE == "mark" else 0.0)
    totals, gains = line_totals(
        kept, kept_x, kept_words, stage, begin, body, KIND, MODE, UP, TYPE, SIDE, R, G, E, NW, FULL,
        LINE, WORD, ANYWHERE,
    )  # fmt: skip
    all_s, all_a, behind, passes = across(totals[STRETCHES], gains[STRETCHES], MODE)
    if ANYWHERE:
        arriving = carry[None, :]
    else:
        arriving = gl.where(place > 0, carry, nothing)[None, :]
    left = onward(all_s.to(gl.float64), all_a, arriving, MODE)
    last = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None] == G - 1
    if MODE == "mark":
        leaving = gl.reduce(gl.where(last, left, -_INFINITY), 0, larger)
    else:
        leaving = gl.sum(gl.where(last, left, 0.0), 0)
    T = onward(behind, passes, arriving, MODE)
    beyond = T
    behind_y = 1.0
    if MODE == "affine":
        if ANYWHERE and not UP and not FULL:
            at, exists = address_of(tile, 0, head + body, n, row_dims, row_y, axis_y, False, 1)
            behind_y = gl.load(y + at, mask=exists, other=1.0).to(TYPE)
        number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
        line = begin + head + (G - 1 - number if UP else number) * E
        beyond = nearer(y, tile, line, n, row_dims, row_y, axis_y, UP, SIDE, R, E, LINES)
    finish(
        out, words, kept, kept_x, kept_y, kept_words, stage, stage, row_dims, row_out, axis_out, n,
        head, body, tile, begin, T, totals, gains, beyond, KIND, TIES, MODE, UP, TYPE, SIDE, R, G,
        E, NW, FULL, LINE, WORD, COPY, ANYWHERE, behind_y,
    )  # fmt: skip
    return leaving


@gluon.jit
def line_totals(
    kept, kept_x, kept_words, stage, begin, n, KIND: tl.constexpr, MODE: tl.constexpr,
    UP: tl.constexpr, TYPE: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr, LINE: tl.constexpr, WORD: tl.constexpr,
    ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """What each line does to what arrives, [G, R]: what is added, and a factor or a gate; before
    the last what its first stretches do."""
    LINES: tl.constexpr = lines_layout(SIDE, R, NW)
    if MODE == "mark":
        if FULL and not _INTERPRETED and kept.dtype != gl.float32:
            raw = lined(kept.index(stage).load(LINE), SIDE, R, G, E)
            total = extremum(KIND, extremes(raw, KIND, R, G, E, LINES).to(TYPE))
        else:
            values = numbers_of(
                kept, stage, begin, n, lowest(KIND), TYPE, UP, SIDE, R, G, E, FULL, LINE, LINES
            )
            total = extremum(KIND, values[0])
            for j in gl.static_range(1, E):
                total = either(total, extremum(KIND, values[j]))
        return (total,), (total,)
    else:
        d = numbers_of(kept, stage, begin, n, 0.0, TYPE, UP, SIDE, R, G, E, FULL, LINE, LINES)
        if MODE == "affine":
            u = numbers_of(
                kept_x, stage, begin, n, let_through(ANYWHERE), TYPE, UP, SIDE, R, G, E, FULL, LINE,
                LINES,
            )  # fmt: skip
            total = u[nth(0, E, UP)] * d[nth(0, E, UP)]
            gain = u[nth(0, E, UP)]
            for k in gl.static_range(1, E):
                total = u[nth(k, E, UP)] * (d[nth(k, E, UP)] + total)
                gain *= u[nth(k, E, UP)]
            return (total,), (gain,)
        else:
            B: tl.constexpr = block_of(E)
            w = d
            if MODE == "gate":
                w = lined(kept_words.index(stage).load(WORD), SIDE, R, G, E // 32)
                w = columns_of(w, R, G, E // 32, LINES)
            all_s = gl.zeros_like(d[0])
            all_a = all_s
            totals = ()
            gains = ()
            for block in gl.static_range(0, E // B):
                total = gl.zeros_like(d[0])
                for k in gl.static_range(block * B, (block + 1) * B):
                    total = d[nth(k, E, UP)] + total
                    if MODE == "gate":
                        total = gl.where(marked(w, nth(k, E, UP)), 0.0, total)
                gain = total
                if MODE == "gate":
                    gain = mask(w[nth(block, E // B, UP)] == 0)
                if block > 0:
                    total = onward(total, gain, all_s, MODE)
                    if MODE == "gate":
                        gain = gain & all_a
                all_s = total
                all_a = gain
                if (block + 1) * B % 64 == 0 or block == E // B - 1:
                    totals = totals + (all_s,)
                    gains = gains + (all_a,)
            return totals, gains


# A chain of additions has 32 places on the way there, a few across lines, and 64 on the way back:
# fewer than the guarantee counts, see `precision`.
@triton.constexpr_function
def block_of(e):
    return min(32, e)


@triton.constexpr_function
def stretch_count(mode, e):
    return max(0, e // 64 - 1) if mode in ("sum", "gate") else 0


@triton.constexpr_function
def begins_stretch(mode, place):
    return mode in ("sum", "gate") and place % 64 == 0


@triton.constexpr_function
def nth(k, e, up):
    """The k-th place of a line, from its far end."""
    return e - 1 - k if up else k


@gluon.jit
def marked(words, PLACE: tl.constexpr):
    """Whether a place of a line wins."""
    return (words[PLACE // 32] & one_bit(PLACE % 32)) != 0


@gluon.jit
def extremes(t, KIND: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
             LINES: tl.constexpr):  # fmt: skip
    """The extremum of each line of halves [G, R, E], two at a time; a NaN is one."""
    if E == 2:
        a, b = gl.split(t)
        a, b = gl.convert_layout(a, LINES), gl.convert_layout(b, LINES)
        return paired(a, b, KIND, 1)
    else:
        a, b = gl.split(gl.permute(gl.reshape(t, (G, R, 2, E // 2)), (0, 1, 3, 2)))
        return extremes(paired(a, b, KIND, 2), KIND, R, G, E // 2, LINES)


@gluon.jit
def paired(a, b, KIND: tl.constexpr, COUNT: tl.constexpr):
    return gl.inline_asm_elementwise(
        extreme_of(KIND, a.dtype.name, COUNT),
        "=r,r,r" if COUNT == 2 else "=h,h,h",
        [a, b],
        dtype=a.dtype,
        is_pure=True,
        pack=COUNT,
    )


@triton.constexpr_function
def extreme_of(kind, type_, count):
    name = {"bf16": "bf16", "fp16": "f16"}[type_] + ("x2" if count == 2 else "")
    return f"{'min' if kind == 'cummin' else 'max'}.NaN.{name} $0, $1, $2;"


@gluon.jit
def finish(
    out, words, kept, kept_x, kept_y, kept_words, stage, last, row_dims, row_out, axis_out, n, head,
    body, tile, begin, T, totals, gains, beyond, KIND: tl.constexpr, TIES: tl.constexpr,
    MODE: tl.constexpr, UP: tl.constexpr, TYPE: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, NW: tl.constexpr, FULL: tl.constexpr, LINE: tl.constexpr,
    WORD: tl.constexpr, COPY: tl.constexpr, ANYWHERE: tl.constexpr = False, behind_y=1.0,
):  # fmt: skip
    """Run through a part, what arrives at each line being T, [G, R], and store it; its y are kept
    at `last`, and `beyond` is y of the place before each line, where that is needed; `behind_y` is
    that behind the last place."""
    LINES: tl.constexpr = lines_layout(SIDE, R, NW)
    number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
    line = begin + (G - 1 - number if UP else number) * E
    if MODE == "mark":
        values = numbers_of(
            kept, stage, begin, body, lowest(KIND), TYPE, UP, SIDE, R, G, E, FULL, LINE, LINES
        )
        found = ()
        for _ in gl.static_range(0, E // 32):
            found = found + (gl.full([G, R], 0, gl.int32, LINES),)
        for k in gl.static_range(0, E):
            value = extremum(KIND, values[nth(k, E, UP)])
            found = with_winner(found, value, T, TIES, nth(k, E, UP), E // 32)
            if not FULL or k == 0:  # the row may begin here
                begins = line + head + nth(k, E, UP) == (n - 1 if UP else 0)
                found = with_bit(found, begins, nth(k, E, UP), E // 32)
            T = either(T, value)
        if ANYWHERE and not FULL:  # what arrives goes through places behind the run
            found = within_run(found, line, body, E // 32)
        at, there = word_offsets(tile, begin, n, row_dims, UP, SIDE, R, G, E, WORD, ANYWHERE)
        value = flat(lines_of(found, R, G, E // 32), SIDE, R, G, E // 32)
        value = gl.convert_layout(value, WORD)
        if FULL:
            gl.store(words + at, value)
        else:
            gl.store(words + at, value, mask=there)
    else:
        d = numbers_of(kept, stage, begin, body, 0.0, TYPE, UP, SIDE, R, G, E, FULL, LINE, LINES)
        u, w, c = d, d, d
        if MODE == "affine":
            u = numbers_of(
                kept_x, stage, begin, body, let_through(ANYWHERE), TYPE, UP, SIDE, R, G, E, FULL,
                LINE, LINES,
            )  # fmt: skip
            w = numbers_of(
                kept_y, last, begin, body, behind_y, TYPE, UP, SIDE, R, G, E, FULL, LINE, LINES
            )
            beyond = beyond.to(TYPE)
        elif MODE == "gate":
            again = anew(kept_words.index(stage).load(WORD), n)
            c = columns_of(lined(again, SIDE, R, G, E // 32), R, G, E // 32, LINES)
        begun = T
        results = ()
        for k in gl.static_range(0, E):
            if k > 0 and begins_stretch(MODE, k):
                T = onward(totals[k // 64 - 1], gains[k // 64 - 1], begun, MODE)
            S = d[nth(k, E, UP)] + T
            value = S
            if MODE == "sum":
                T = S
            elif MODE == "affine":
                if k == E - 1:
                    weight = beyond
                else:
                    weight = w[nth(k + 1, E, UP)]
                value = weight * S
                T = u[nth(k, E, UP)] * S
            else:
                gate = marked(c, nth(k, E, UP))
                T = gl.where(gate, 0.0, S)
                value = differing(S, T)
            if UP:
                results = (value,) + results
            else:
                results = results + (value,)
        store_part(
            out, kept, stage, results, tile, begin, head, body, row_dims, row_out, axis_out, UP,
            SIDE, R, G, E, FULL, LINE, COPY, ANYWHERE,
        )  # fmt: skip


@gluon.jit
def store_part(
    out, kept, stage, results, tile, begin, head, n, row_dims, row_out, axis_out, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    LINE: tl.constexpr, COPY: tl.constexpr, ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """Round a part once and store it, where lines lie one after the other by way of its own shared
    memory."""
    value = lines_of(results, R, G, E)
    element: tl.constexpr = out.dtype.element_ty
    if element == gl.bfloat16 or element == gl.float16:
        value = value.to(gl.float32)
    value = flat(value.to(element), SIDE, R, G, E)
    if SIDE:
        value = gl.convert_layout(value, LINE)
        base, at, there = offsets(
            tile, begin, head, n, row_dims, row_out, axis_out, UP, SIDE, R, G, E, LINE
        )
    else:
        kept.index(stage).store(value)
        value = kept.index(stage).load(COPY)
        base, at, there = offsets(
            tile, begin, head, n, row_dims, row_out, axis_out, UP, SIDE, R, G, E, COPY
        )
    if FULL:
        gl.store(begun(out, base, ANYWHERE) + at, value)
    else:
        gl.store(begun(out, base, ANYWHERE) + at, value, mask=there)


@triton.constexpr_function
def let_through(anywhere):
    """The factor of places that a part has not: behind the run of a row is an edge."""
    return 1.0 if anywhere else 0.0


@gluon.jit
def within_run(words, line, body, COUNT: tl.constexpr):
    """The words of a line without the bits of places behind the run."""
    found = ()
    for k in gl.static_range(0, COUNT):
        left = gl.minimum(gl.maximum(body - line - 32 * k, 0), 32).to(gl.int32)
        kept = words[k] & ((gl.zeros_like(left) + 1 << left) - 1)
        found = found + (gl.where(left > 31, words[k], kept),)
    return found


@gluon.jit
def differing(s, t):
    """The bits of s that t has not, which is s or 0: s or 0. By an assembler's hand, lest the
    compiler choose among halves once they are rounded, one by one."""
    if _INTERPRETED:
        return (s.to(gl.int32, bitcast=True) ^ t.to(gl.int32, bitcast=True)).to(
            s.dtype, bitcast=True
        )
    else:
        return gl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [s, t], dtype=gl.float32, is_pure=True, pack=1
        )


@gluon.jit
def anew(words, n):
    """The same words, in a way that the assembler does not see through: it would keep conditions
    that it made of them before, of which there are seven."""
    if _INTERPRETED:
        return words
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 order; add.u32 order, $2, 0x3210; prmt.b32 $0, $1, $1, order; }",
            "=r,r,r",
            [words, gl.minimum(n, 0).to(gl.int32)],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )


@triton.constexpr_function
def one_bit(number):
    return 1 << number if number < 31 else -(1 << 31)


@gluon.jit
def with_winner(words, x, m, TIES: tl.constexpr, PLACE: tl.constexpr, COUNT: tl.constexpr):
    """The words of a line with a bit set where a place's x wins over m."""
    if _INTERPRETED:
        return with_bit(words, beats(TIES, x, m), PLACE, COUNT)
    else:
        found = ()
        for k in gl.static_range(0, COUNT):
            word = words[k]
            if k == PLACE // 32:
                word = gl.inline_asm_elementwise(
                    winning(TIES, PLACE % 32), "=r,r,r,0", [x, m, word], dtype=gl.int32,
                    is_pure=True, pack=1,
                )  # fmt: skip
            found = found + (word,)
        return found


@triton.constexpr_function
def winning(ties, number):
    """Set a bit on a condition, as `beats`: the compiler would choose between two words."""
    if ties == "first":
        beats = "setp.num.f32 wins, $2, $2; setp.nan.and.f32 wins, $1, $1, wins; "
        beats += "setp.gt.or.f32 wins, $1, $2, wins; "
    else:
        beats = "setp.nan.f32 wins, $1, $1; setp.ge.or.f32 wins, $1, $2, wins; "
    return "{ .reg .pred wins; " + beats + f"@wins or.b32 $0, $0, {hex(1 << number)}; }}"


@gluon.jit
def with_bit(words, wins, PLACE: tl.constexpr, COUNT: tl.constexpr):
    """The words of a line with a bit set where a place wins."""
    found = ()
    for k in gl.static_range(0, COUNT):
        word = words[k]
        if k == PLACE // 32:
            word = gl.where(wins, word | one_bit(PLACE % 32), word)
        found = found + (word,)
    return found
