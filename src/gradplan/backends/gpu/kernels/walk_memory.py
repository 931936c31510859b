"""Parts in shared memory, as `walks` and `held_scans` have them: where their elements lie, how they
are asked for, and how a thread gets the lines that it runs through.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon
from ..launch import interpreted
from .ragged import runs_of
from .tiles import outer_offset, tile_row

_INTERPRETED = tl.constexpr(interpreted())


@triton.constexpr_function
def line_layout(side, r, e, warps):
    """A part with a line a thread: [G, E], or [G E, R] where rows lie side by side."""
    if side:
        return gl.BlockedLayout([e, max(1, r // 32)], [1, 32], [warps, 1], [1, 0])
    return gl.BlockedLayout([1, e], [32, 1], [warps, 1], [1, 0])


@triton.constexpr_function
def lines_layout(side, r, warps):
    """What each line has, [G, R]."""
    if side:
        return gl.BlockedLayout([1, max(1, r // 32)], [1, 32], [warps, 1], [1, 0])
    return gl.BlockedLayout([1, 1], [32, 1], [warps, 1], [1, 0])


@triton.constexpr_function
def copy_layout(side, r, e, element, warps, v=0):
    """A part as it is copied: 16 bytes a thread, or so many elements, neighbouring threads side by
    side."""
    v = v or {"f32": 4, "f64": 2}.get(element, 8)
    run = (r if side else e) // v
    across = min(32, run)
    return gl.BlockedLayout([1, v], [32 // across, across], [warps, 1], [1, 0])


@triton.constexpr_function
def shared_layout(side, e, element):
    """Lines one after the other are turned, lest threads meet in a bank."""
    if side:
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    item = {"f32": 4, "f64": 8}.get(element, 2)
    pieces = max(1, e * item // 16)
    return gl.SwizzledSharedLayout(16 // item, max(1, 8 // pieces), min(8, pieces), [1, 0])


@gluon.jit
def unit_of(i, first, programs, parts):
    """The tile of rows of a program's i-th part, and its place from the far end."""
    return first + i // parts * programs, i % parts


@gluon.jit
def begin_of(place, parts, n, UP: tl.constexpr, C: tl.constexpr):
    """The first place of a part of C that is so far from the far end."""
    return (parts - 1 - place if UP else place).to(n.dtype) * C


@gluon.jit
def run_of(pointer, tile, n, row_dims, row_steps, ANYWHERE: tl.constexpr):
    """Of a tile's one row: how many elements are before its run, and how many are in it. All are,
    unless rows begin ANYWHERE: then it begins and ends where 16 divides the address."""
    if ANYWHERE:
        outer, row = tile_row(tile, row_dims, 1)
        start = pointer + outer_offset(outer, row_dims, row_steps) + row * row_steps[0]
        return runs_of(start, n)
    else:
        return 0, n


@gluon.jit
def is_whole(tile, begin, n, row_dims, SIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Whether a part of a run of n places has all of its C."""
    if SIDE:
        _, row = tile_row(tile, row_dims, R)
        return (begin + C <= n) & (row + R <= row_dims[0])
    else:
        return begin + C <= n


@gluon.jit
def begun(pointer, base, ANYWHERE: tl.constexpr):
    """Where a part begins."""
    if ANYWHERE:
        return gl.multiple_of(pointer + base, 16)
    else:
        return pointer + base


@gluon.jit
def offsets(
    tile, begin, head, n, row_dims, row_steps, axis_steps, UP: tl.constexpr, SIDE: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Where the elements of a part are, lines from the far end on, and which exist: of a run of n
    places, so many behind the beginning of its row."""
    outer, row = tile_row(tile, row_dims, R)
    base = outer_offset(outer, row_dims, row_steps)
    if SIDE:
        step = gl.arange(0, G * E, gl.SliceLayout(1, LAYOUT))
        lane = gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
        line = step // E
        beyond = (G - 1 - line if UP else line) * E + step % E
        there = (begin + beyond < n)[:, None] & (row + lane < row_dims[0])[None, :]
        base += row + begin.to(gl.int64) * axis_steps[0]
        # No two elements of a part are 2³¹ apart.
        return base, (beyond * axis_steps[0].to(gl.int32))[:, None] + lane[None, :], there
    else:
        line = gl.arange(0, G, gl.SliceLayout(1, LAYOUT))
        step = gl.arange(0, E, gl.SliceLayout(0, LAYOUT))
        beyond = ((G - 1 - line if UP else line) * E)[:, None] + step[None, :]
        return base + row * row_steps[0] + begin + head, beyond, begin + beyond < n


@gluon.jit
def word_offsets(
    tile, begin, n, row_dims, UP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, LAYOUT: tl.constexpr, ANYWHERE: tl.constexpr,
):  # fmt: skip
    """The same of words, each of 32 places; those of edges come behind."""
    outer, row = tile_row(tile, row_dims, R)
    W: tl.constexpr = E // 32
    count = gl.cdiv(n, 32).to(gl.int64)
    stride = count
    if ANYWHERE:
        stride += 2
    if SIDE:
        step = gl.arange(0, G * W, gl.SliceLayout(1, LAYOUT))
        lane = gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
        line = step // W
        index = (begin // 32 + (G - 1 - line if UP else line) * W + step % W).to(gl.int64)
        there = (index < count)[:, None] & (row + lane < row_dims[0])[None, :]
        at = (outer * count + index)[:, None] * row_dims[0] + (row + lane)[None, :]
        return at, there
    else:
        line = gl.arange(0, G, gl.SliceLayout(1, LAYOUT))
        step = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))
        index = begin // 32 + ((G - 1 - line if UP else line) * W)[:, None] + step[None, :]
        return (outer * row_dims[0] + row) * stride + index, index < count


@gluon.jit
def edge_word(tile, n, row_dims, BEHIND: tl.constexpr):
    """Where the word of an edge is: that before a row's run, or that behind it."""
    outer, row = tile_row(tile, row_dims, 1)
    count = gl.cdiv(n, 32).to(gl.int64)
    return (outer * row_dims[0] + row) * (count + 2) + count + (1 if BEHIND else 0)


@gluon.jit
def ask(
    dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y,
    axis_dy, axis_x, axis_y, n, first, programs, i, count, parts, stage,
    MODE: tl.constexpr, UP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, FULL: tl.constexpr, COPY: tl.constexpr, WORD: tl.constexpr,
    ANYWHERE: tl.constexpr,
):  # fmt: skip
    """Ask for a program's i-th part of all arrays, if there is one."""
    tile, place = unit_of(i, first, programs, parts)
    begin = begin_of(place, parts, n, UP, G * E)
    if MODE == "mark":
        head, body = run_of(x, tile, n, row_dims, row_x, ANYWHERE)
    else:
        head, body = run_of(dy, tile, n, row_dims, row_dy, ANYWHERE)
    ask_part(
        dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y, axis_dy,
        axis_x, axis_y, n, head, body, tile, begin, i < count, stage, MODE, UP, SIDE, R, G, E, FULL,
        COPY, WORD, ANYWHERE,
    )  # fmt: skip


@gluon.jit
def ask_part(
    dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y, axis_dy,
    axis_x, axis_y, n, head, body, tile, begin, exists, stage, MODE: tl.constexpr,
    UP: tl.constexpr, SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    FULL: tl.constexpr, COPY: tl.constexpr, WORD: tl.constexpr, ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """The same of the part of a tile that begins there, if it exists."""
    if exists:
        # Of rows one by one masks are few.
        if FULL or (SIDE and is_whole(tile, begin, body, row_dims, SIDE, R, G * E)):
            ask_arrays(
                dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y,
                axis_dy, axis_x, axis_y, n, head, body, tile, begin, stage, MODE, UP, SIDE, R, G, E,
                True, COPY, WORD, ANYWHERE,
            )  # fmt: skip
        else:
            ask_arrays(
                dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y,
                axis_dy, axis_x, axis_y, n, head, body, tile, begin, stage, MODE, UP, SIDE, R, G, E,
                False, COPY, WORD, ANYWHERE,
            )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def ask_arrays(
    dy, x, y, words, kept, kept_x, kept_y, kept_words, row_dims, row_dy, row_x, row_y, axis_dy,
    axis_x, axis_y, n, head, body, tile, begin, stage, MODE: tl.constexpr, UP: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    COPY: tl.constexpr, WORD: tl.constexpr, ANYWHERE: tl.constexpr,
):  # fmt: skip
    """The same, all of its elements if it is FULL."""
    if MODE == "mark":
        base, at, there = offsets(
            tile, begin, head, body, row_dims, row_x, axis_x, UP, SIDE, R, G, E, COPY
        )
        copy(begun(x, base, ANYWHERE) + at, there, kept.index(stage), FULL)
    else:
        base, at, there = offsets(
            tile, begin, head, body, row_dims, row_dy, axis_dy, UP, SIDE, R, G, E, COPY
        )
        copy(begun(dy, base, ANYWHERE) + at, there, kept.index(stage), FULL)
    if MODE == "affine" or MODE == "x":
        base, at, there = offsets(
            tile, begin, head, body, row_dims, row_x, axis_x, UP, SIDE, R, G, E, COPY
        )
        copy(begun(x, base, ANYWHERE) + at, there, kept_x.index(stage), FULL)
    if MODE == "affine" or MODE == "y":
        base, at, there = offsets(
            tile, begin, head, body, row_dims, row_y, axis_y, UP, SIDE, R, G, E, COPY
        )
        copy(begun(y, base, ANYWHERE) + at, there, kept_y.index(stage), FULL)
    if MODE == "gate":
        at, there = word_offsets(tile, begin, n, row_dims, UP, SIDE, R, G, E, WORD, ANYWHERE)
        copy(words + at, there, kept_words.index(stage), FULL)


@gluon.jit
def copy(source, there, target, FULL: tl.constexpr):
    if FULL:
        async_copy.async_copy_global_to_shared(target, source)
    else:
        async_copy.async_copy_global_to_shared(target, source, mask=there)


@gluon.jit
def lined(raw, SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr):
    """A part, or its words, by lines: [G, R, E]."""
    if SIDE:
        return gl.permute(gl.reshape(raw, (G, E, R)), (0, 2, 1))
    else:
        return gl.reshape(raw, (G, R, E))


@gluon.jit
def flat(lines, SIDE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr):
    """The other way."""
    if SIDE:
        return gl.reshape(gl.permute(lines, (0, 2, 1)), (G * E, R))
    else:
        return gl.reshape(lines, (G, E))


@gluon.jit
def columns_of(t, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, LINES: tl.constexpr):
    """The E columns [G, R] of lines; nothing moves."""
    if E == 1:
        return (gl.convert_layout(gl.reshape(t, (G, R)), LINES),)
    else:
        a, b = gl.split(gl.permute(gl.reshape(t, (G, R, 2, E // 2)), (0, 1, 3, 2)))
        return columns_of(a, R, G, E // 2, LINES) + columns_of(b, R, G, E // 2, LINES)


@gluon.jit
def lines_of(columns, R: tl.constexpr, G: tl.constexpr, E: tl.constexpr):
    """The other way."""
    if E == 1:
        return gl.reshape(columns[0], (G, R, 1))
    else:
        a = lines_of(columns[: E // 2], R, G, E // 2)
        b = lines_of(columns[E // 2 :], R, G, E // 2)
        return gl.reshape(gl.permute(gl.join(a, b), (0, 1, 3, 2)), (G, R, E))


@gluon.jit
def numbers_of(
    kept, stage, begin, n, other, TYPE: tl.constexpr, UP: tl.constexpr, SIDE: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr, LINE: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The columns of an array's part, and `other` where the row has ended."""
    raw = unpacked(kept.index(stage).load(LINE)).to(TYPE)
    if not FULL:
        if SIDE:
            step = gl.arange(0, G * E, gl.SliceLayout(1, LINE))
            line = step // E
            index = begin + (G - 1 - line if UP else line) * E + step % E
            raw = gl.where((index < n)[:, None], raw, other)
        else:
            line = gl.arange(0, G, gl.SliceLayout(1, LINE))
            step = gl.arange(0, E, gl.SliceLayout(0, LINE))
            index = begin + ((G - 1 - line if UP else line) * E)[:, None] + step[None, :]
            raw = gl.where(index < n, raw, other)
    return columns_of(lined(raw, SIDE, R, G, E), R, G, E, LINES)


@gluon.jit
def unpacked(raw):
    """bfloat16 as f32, two by two: an instruction each."""
    if raw.dtype != gl.bfloat16 or _INTERPRETED:
        return raw
    else:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [raw],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )


@gluon.jit
def address_of(
    tile, lane, place, n, row_dims, row_steps, axis_steps, SIDE: tl.constexpr, R: tl.constexpr
):
    """Where places of a tile's rows are, and which exist."""
    outer, row = tile_row(tile, row_dims, R)
    base = outer_offset(outer, row_dims, row_steps)
    there = (place >= 0) & (place < n) & (row + lane < row_dims[0])
    if SIDE:
        return base + row + place.to(gl.int64) * axis_steps[0] + lane, there
    else:
        return base + row * row_steps[0] + place + lane, there


@gluon.jit
def nearer(
    y, tile, line, n, row_dims, row_y, axis_y, UP: tl.constexpr, SIDE: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """y of the place before each line, 1 where the row begins, [G, R]."""
    lane = gl.arange(0, R, gl.SliceLayout(0, LINES))[None, :]
    index = line - 1 if UP else line + E
    at, there = address_of(tile, lane, index, n, row_dims, row_y, axis_y, SIDE, R)
    return gl.load(y + at, mask=there, other=1.0)
