"""Parts in shared memory, as `held` has them: where their elements lie, and how they are asked for
and loaded.

Rows side by side begin anywhere within 16 bytes where these do not divide their number: 8191 halves
begin elsewhere at each place of the axis, and every eighth place where they began. So places are
told apart by CLASSES, as many as it takes, and parts have places of one class. Each class has
strips of its own, which begin where 16 divides the address, up to V - 1 rows before the strips of
rows that would begin with the first: the `shift` of the class. All arrays lie alike.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon
from ..launch import interpreted
from .ragged import run_length
from .tiles import by_row, fetch_raw, outer_offset, place, tile_row

_INTERPRETED = tl.constexpr(interpreted())


@triton.constexpr_function
def slices(kind, element, r, c, warps, pairs, classes):
    """In how many slices a part is worked on: so many elements a thread at a time."""
    most = 64 if pairs else 16 if kind == "prod" else 32
    if classes:  # where they are takes registers too
        most //= 2
    found = max(1, min(c // (warps * run_of(element, r)), r * c // (32 * warps * most)))
    return max(2, found) if kind == "prod" else found


@triton.constexpr_function
def pieces(kind, element, r, c, warps, pairs, classes):
    """In how many pieces each slice of a part that is not whole: eight elements a thread, where
    each is stored by itself."""
    if not classes or _INTERPRETED.value:  # whose shared memory has one shape
        return 1
    count = slices(kind, element, r, c, warps, pairs, classes)
    return max(1, min(c // (count * warps * run_of(element, r)), r * c // (count * 256 * warps)))


@triton.constexpr_function
def tile_layout(out, element, r, warps):
    """A part [R, C]: 16 bytes a thread, neighbouring threads along what lies in memory together."""
    v = 4 if element == "f32" else 8
    if out == "t":
        return gl.BlockedLayout([1, v], [1, 32], [1, warps], [1, 0])
    return gl.BlockedLayout([v, 1], [r // v, 32 * v // r], [1, warps], [0, 1])


@gluon.jit
def room(pointer, MODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
         SHARED: tl.constexpr):  # fmt: skip
    """Shared memory for the parts of an array."""
    if MODE == "t" or MODE == "c":
        return gl.allocate_shared_memory(pointer.dtype.element_ty, [STAGES, R, C], SHARED)
    else:
        return 0


@gluon.jit
def finer(kept, MODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, COUNT: tl.constexpr,
          P: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Room for COUNT slices of C places, as P pieces of each."""
    if P > 1 and (MODE == "t" or MODE == "c"):
        return kept._reinterpret(kept.dtype, [COUNT * P, R, C // P], SHARED)
    else:
        return kept


@gluon.jit
def classed(steps, CLASSES: tl.constexpr, V: tl.constexpr):
    """An operand's steps from place to place of a class, and behind them the step to the next
    class."""
    if CLASSES == 0:
        return steps
    else:
        each = steps[3][0]
        return steps[0], steps[1], steps[2], (each * CLASSES // V * V,), each  # it divides


@gluon.jit
def within(steps, CLASSES: tl.constexpr):
    """The steps for places in arrays that are `at_spot`."""
    if CLASSES == 0:
        return steps
    else:
        return (steps[0][0],), (steps[1][0],), steps[2], steps[3]


@gluon.jit
def unit_place(unit, parts, row_dims, n, origin, R: tl.constexpr, C: tl.constexpr,
               NEAR: tl.constexpr, TILE: tl.constexpr, CLASSES: tl.constexpr):  # fmt: skip
    """The place of a unit, as in `tiles`, of what has one value a row."""
    if CLASSES == 0:
        begin = (unit % parts).to(n.dtype) * C
        return part_place(unit // parts, begin, row_dims, n, R, C, NEAR, TILE)
    else:
        spot = spot_of(unit, parts, row_dims, n, origin, R, C, CLASSES)
        row = spot[1] - spot[4]
        return spread(spot[0], row, spot[2], row_dims, spot[5], R, C, NEAR, TILE, row)


@gluon.jit
def part_place(tile, begin, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """The same of C places from `begin` on."""
    outer, row = tile_row(tile, row_dims, R)
    return spread(outer, row, begin, row_dims, n, R, C, NEAR, TILE)


@gluon.jit
def spread(outer, row, begin, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
           TILE: tl.constexpr, number=None):  # fmt: skip
    """The same of R rows from `row` on; that is the `number` of the first, if it may be negative
    or they are counted from elsewhere."""
    lane = gl.arange(0, R, gl.SliceLayout(1, TILE))
    step = gl.arange(0, C, gl.SliceLayout(0, TILE))
    index = begin + step
    if NEAR:
        near = (row, lane, begin, step)
    else:
        near = (row, lane.to(gl.int64), begin, step.to(gl.int64))
    if number is None:
        return outer, lane, index, row + lane < row_dims[0], index < n, near
    else:
        there = (number + lane >= 0) & (number + lane < row_dims[0])
        return outer, lane, index, there, index < n, near


@gluon.jit
def spot_of(
    unit, parts, row_dims, n, origin, R: tl.constexpr, C: tl.constexpr, CLASSES: tl.constexpr
):
    """Where a unit begins: what is above its rows, the first of them, the first place. That takes
    divisions, which a loop over its slices need not repeat.

    With CLASSES places are those of its class, and behind them come its number, its shift, and how
    many places it has; rows are counted from where its strips begin. `origin` is an array, its
    steps from row to row and from place to place.
    """
    if CLASSES == 0:
        outer, row = tile_row(unit // parts, row_dims, R)
        return outer, row, (unit % parts).to(n.dtype) * C
    else:
        V: tl.constexpr = run_length(origin[0].dtype)
        part = unit % parts
        number = part % CLASSES
        outer, row = tile_row(unit // parts, reached(row_dims, V), R)
        start = origin[0] + outer_offset(outer, row_dims, origin[1])
        start += number.to(gl.int64) * origin[2]
        shift = (start.to(gl.int64) & 15) // (16 // V)
        ends = (n - number + CLASSES - 1) // CLASSES
        return outer, row, (part // CLASSES).to(n.dtype) * C, number, shift, ends


@gluon.jit
def reached(row_dims, V: tl.constexpr):
    """As many rows side by side as strips have that begin up to V - 1 rows before the first."""
    return (row_dims[0] + (V - 1),) + row_dims[1:]


@gluon.jit
def is_whole(spot, row_dims, n, R: tl.constexpr, C: tl.constexpr, CLASSES: tl.constexpr):
    """Whether a unit has all of its elements."""
    if CLASSES == 0:
        return (spot[1] + R <= row_dims[0]) & (spot[2] + C <= n)
    else:
        within = (spot[1] >= spot[4]) & (spot[1] + R <= row_dims[0] + spot[4])
        return within & (spot[2] + C <= spot[5])


@gluon.jit
def is_last(spot, row_dims, n, R: tl.constexpr, C: tl.constexpr, CLASSES: tl.constexpr):
    """Whether a unit that is not whole has the first element of an array, or the last: 16 bytes
    with it may begin before the array, or end behind it."""
    first = (spot[0] == 0) & (spot[1] == 0) & (spot[2] == 0) & (spot[3] == 0)
    count = spot[0] * 0 + 1
    for d in gl.static_range(1, len(row_dims)):
        count *= row_dims[d]
    last = (spot[0] == count - 1) & (spot[3] == (n - 1) % CLASSES)
    return first | (last & (spot[2] + C >= spot[5]) & (spot[1] + R >= row_dims[0] + spot[4]))


@gluon.jit
def at_spot(pointer, MODE: tl.constexpr, spot, steps, CLASSES: tl.constexpr):
    """An array from where the rows around a spot start, for the places of its slices."""
    if MODE == "t" or MODE == "c":
        base = pointer + outer_offset(spot[0], steps[0], steps[1])
        if CLASSES > 0:
            base = gl.multiple_of(base + spot[3].to(gl.int64) * steps[4] - spot[4], 16)
        return base
    else:
        return 0


@gluon.jit
def slice_place(unit, spot, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr,
                NEAR: tl.constexpr, TILE: tl.constexpr, k, S: tl.constexpr,
                CLASSES: tl.constexpr):  # fmt: skip
    """The place of the k-th of S slices, in arrays that are `at_spot`."""
    if CLASSES > 0:
        begin = spot[2] + k * (C // S)
        number = spot[1] - spot[4]
        return spread(spot[0] * 0, spot[1], begin, row_dims, spot[5], R, C // S, NEAR, TILE, number)
    elif len(row_dims) == 1:  # the compiler finds by itself what slices share, and does better so
        begin = (unit % parts).to(n.dtype) * C + k * (C // S)
        return part_place(unit // parts, begin, row_dims, n, R, C // S, NEAR, TILE)
    else:
        begin = spot[2] + k * (C // S)
        return spread(spot[0] * 0, spot[1], begin, row_dims, n, R, C // S, NEAR, TILE)


@gluon.jit
def ask_unit(
    dy, x, y, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, kept_dy, kept_x, kept_y, dy_steps,
    x_steps, y_steps, unit, units, parts, stage, n, origin, finer_kept, R: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Ask for a unit's part of all arrays, slice by slice, if there is that unit."""
    row_dims = dy_steps[0]
    spot = spot_of(unit, parts, row_dims, n, origin, R, C, CLASSES)
    dy, x = at_spot(dy, A, spot, dy_steps, CLASSES), at_spot(x, B, spot, x_steps, CLASSES)
    y = at_spot(y, Z, spot, y_steps, CLASSES)
    if FULL or is_whole(spot, row_dims, n, R, C, CLASSES):
        for k in range(S):
            ask_slice(
                dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, unit, units,
                spot, parts, stage, n, k, R, C, S, NEAR, TILE, CLASSES,
            )  # fmt: skip
    elif unit < units:
        ask_some(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, within(dy_steps, CLASSES),
            within(x_steps, CLASSES), within(y_steps, CLASSES), row_dims, unit, spot, parts, stage,
            n, finer_kept, R, C, S, P, NEAR, TILE, CLASSES,
        )  # fmt: skip


@gluon.jit
def ask_slice(
    dy, x, y, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, kept_dy, kept_x, kept_y, dy_steps,
    x_steps, y_steps, unit, units, spot, parts, stage, n, k, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, NEAR: tl.constexpr, TILE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The same of the k-th slice of a unit that is whole, and of arrays that are `at_spot`."""
    if unit < units:
        at = slice_place(unit, spot, parts, dy_steps[0], n, R, C, NEAR, TILE, k, S, CLASSES)
        ask(dy, A, kept_dy, stage * S + k, at, within(dy_steps, CLASSES), "all")
        ask(x, B, kept_x, stage * S + k, at, within(x_steps, CLASSES), "all")
        ask(y, Z, kept_y, stage * S + k, at, within(y_steps, CLASSES), "all")


@gluon.jit
def ask_some(
    dy, x, y, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, kept_dy, kept_x, kept_y, dy_steps,
    x_steps, y_steps, row_dims, unit, spot, parts, stage, n, finer_kept, R: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr, TILE: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """The same of all slices of a unit that is not whole."""
    if CLASSES > 0 and is_last(spot, row_dims, n, R, C, CLASSES):
        for k in range(S * P):
            at = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, k, S * P, CLASSES)
            ask(dy, A, finer_kept[0], stage * S * P + k, at, dy_steps, "apart")
            ask(x, B, finer_kept[1], stage * S * P + k, at, x_steps, "apart")
            ask(y, Z, finer_kept[2], stage * S * P + k, at, y_steps, "apart")
    else:
        for k in range(S):
            at = slice_place(unit, spot, parts, row_dims, n, R, C, NEAR, TILE, k, S, CLASSES)
            if CLASSES > 0:
                V: tl.constexpr = run_length(dy.dtype if A == "c" else x.dtype)
                at = in_wholes(at, spot, row_dims, V)
            ask(dy, A, kept_dy, stage * S + k, at, dy_steps, "masked")
            ask(x, B, kept_x, stage * S + k, at, x_steps, "masked")
            ask(y, Z, kept_y, stage * S + k, at, y_steps, "masked")


@gluon.jit
def in_wholes(at, spot, row_dims, V: tl.constexpr):
    """The same place with all rows that share 16 bytes with one that there is."""
    number = spot[1] - spot[4] + at[1] // V * V
    there = (number + V > 0) & (number < row_dims[0])
    return at[0], at[1], at[2], there, at[4], at[5]


@gluon.jit
def ask(pointer, MODE: tl.constexpr, kept, stage, at, steps, WAY: tl.constexpr):
    """Ask for an array's part, into a place of its room. What is read apart, element by element, is
    there at once."""
    if MODE == "t" or MODE == "c":
        source = place(pointer, MODE, at, steps)
        if WAY == "all":
            async_copy.async_copy_global_to_shared(kept.index(stage), source)
        else:
            mask = at[3][:, None] & at[4][None, :]
            if WAY == "apart":
                kept.index(stage).store(gl.load(source, mask=mask, other=0.0))
            else:
                async_copy.async_copy_global_to_shared(kept.index(stage), source, mask=mask)


@gluon.jit
def aside(dy, y, A: tl.constexpr, Z: tl.constexpr, at, dy_steps, y_steps, FULL: tl.constexpr):
    """The one value a row that elements meet, [R, 1], if there is one: of dy or of y."""
    if by_row(A):
        return fetch_raw(dy, A, at, dy_steps, 0.0, FULL)
    elif by_row(Z):
        return fetch_raw(y, Z, at, y_steps, 0.0, FULL)
    else:
        return 0


@gluon.jit
def loaded(
    kept, MODE: tl.constexpr, stage, beside, k, S: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The k-th of S slices of an operand's part as it is stored, or [R, 1]."""
    if MODE == "t" or MODE == "c":
        return kept.index(stage * S + k).load(TILE)
    elif by_row(MODE):
        return beside
    else:
        return 0.0


@gluon.jit
def of_rows(
    pointer, MODE: tl.constexpr, spot, steps, R: tl.constexpr, FULL: tl.constexpr,
    ROW: tl.constexpr, TYPE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """One value a row, [R], for `numbers`."""
    if by_row(MODE):
        base = pointer + outer_offset(spot[0], steps[0], steps[1])
        lane = spot[1] + gl.arange(0, R, ROW)
        if CLASSES > 0:
            lane -= spot[4]
        source = base + (lane if MODE == "u" else lane * steps[1][0])
        if FULL:
            return gl.load(source).to(TYPE)
        else:
            there = (lane >= 0) & (lane < steps[0][0]) if CLASSES > 0 else lane < steps[0][0]
            return gl.load(source, mask=there, other=0.0).to(TYPE)
    else:
        return 0.0


@triton.constexpr_function
def run_of(element, r):
    """Places of a warp that lie together."""
    return 32 * (4 if element == "f32" else 8) // r
