"""Parts in shared memory, as `held` has them: where their elements lie, and how they are asked for
and loaded.
"""

import triton
import triton.language as tl

from ..gluon import async_copy, gl, gluon
from .formulas import operands_of
from .tiles import by_row, fetch_raw, outer_offset, place, tile_row


@triton.constexpr_function
def slices(kind, element, r, c, warps, pairs):
    """In how many slices a part is worked on: so many elements a thread at a time."""
    most = 64 if pairs else 16 if kind == "prod" else 32
    found = max(1, min(c // (warps * run_of(element, r)), r * c // (32 * warps * most)))
    return max(2, found) if kind == "prod" else found


@triton.constexpr_function
def tile_layout(out, element, r, warps):
    """A part [R, C]: 16 bytes a thread, neighbouring threads along what lies in memory together."""
    v = 4 if element == "f32" else 8
    if out == "t":
        return gl.BlockedLayout([1, v], [1, 32], [1, warps], [1, 0])
    return gl.BlockedLayout([v, 1], [r // v, 32 * v // r], [1, warps], [0, 1])


@triton.constexpr_function
def met(mode, kind, operand):
    """How elements meet an operand: "n" where only the numbers of a row know it."""
    return mode if operand in operands_of(kind) else "n"


@gluon.jit
def room(pointer, MODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
         SHARED: tl.constexpr):  # fmt: skip
    """Shared memory for the parts of an array."""
    if MODE == "t" or MODE == "c":
        return gl.allocate_shared_memory(pointer.dtype.element_ty, [STAGES, R, C], SHARED)
    else:
        return 0


@gluon.jit
def unit_place(unit, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """The place of a unit, as in `tiles`."""
    return part_place(unit // parts, (unit % parts).to(n.dtype) * C, row_dims, n, R, C, NEAR, TILE)


@gluon.jit
def part_place(tile, begin, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """The same of C places from `begin` on."""
    outer, row = tile_row(tile, row_dims, R)
    return spread(outer, row, begin, row_dims, n, R, C, NEAR, TILE)


@gluon.jit
def spread(outer, row, begin, row_dims, n, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """The same of R rows from `row` on."""
    lane = gl.arange(0, R, gl.SliceLayout(1, TILE))
    step = gl.arange(0, C, gl.SliceLayout(0, TILE))
    index = begin + step
    if NEAR:
        near = (row, lane, begin, step)
    else:
        near = (row, lane.to(gl.int64), begin, step.to(gl.int64))
    return outer, lane, index, row + lane < row_dims[0], index < n, near


@gluon.jit
def spot_of(unit, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr):
    """Where a unit begins. That takes divisions, which a loop over its slices need not repeat."""
    outer, row = tile_row(unit // parts, row_dims, R)
    return outer, row, (unit % parts).to(n.dtype) * C


@gluon.jit
def at_spot(pointer, MODE: tl.constexpr, spot, steps):
    """An array from where the rows around a spot start, for the places of its slices."""
    if MODE == "t" or MODE == "c":
        return pointer + outer_offset(spot[0], steps[0], steps[1])
    else:
        return 0


@gluon.jit
def slice_place(unit, spot, parts, row_dims, n, R: tl.constexpr, C: tl.constexpr,
                NEAR: tl.constexpr, TILE: tl.constexpr, k, S: tl.constexpr):  # fmt: skip
    """The place of the k-th of S slices, in arrays that are `at_spot`."""
    if len(row_dims) == 1:  # the compiler finds by itself what slices share, and does better so
        begin = (unit % parts).to(n.dtype) * C + k * (C // S)
        return part_place(unit // parts, begin, row_dims, n, R, C // S, NEAR, TILE)
    else:
        begin = spot[2] + k * (C // S)
        return spread(spot[0] * 0, spot[1], begin, row_dims, n, R, C // S, NEAR, TILE)


@gluon.jit
def ask_unit(
    dy, x, y, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, kept_dy, kept_x, kept_y, dy_steps,
    x_steps, y_steps, unit, units, parts, stage, n, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask for a unit's part of all arrays, slice by slice, if there is that unit."""
    spot = spot_of(unit, parts, dy_steps[0], n, R, C)
    dy, x = at_spot(dy, A, spot, dy_steps), at_spot(x, B, spot, x_steps)
    y = at_spot(y, Z, spot, y_steps)
    for k in range(S):
        ask_slice(
            dy, x, y, A, B, Z, kept_dy, kept_x, kept_y, dy_steps, x_steps, y_steps, unit, units,
            spot, parts, stage, n, k, R, C, S, NEAR, FULL, TILE,
        )  # fmt: skip


@gluon.jit
def ask_slice(
    dy, x, y, A: tl.constexpr, B: tl.constexpr, Z: tl.constexpr, kept_dy, kept_x, kept_y, dy_steps,
    x_steps, y_steps, unit, units, spot, parts, stage, n, k, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same of its k-th slice, and of arrays that are `at_spot`."""
    if unit < units:
        at = slice_place(unit, spot, parts, dy_steps[0], n, R, C, NEAR, TILE, k, S)
        ask(dy, A, kept_dy, stage * S + k, at, dy_steps, FULL)
        ask(x, B, kept_x, stage * S + k, at, x_steps, FULL)
        ask(y, Z, kept_y, stage * S + k, at, y_steps, FULL)


@gluon.jit
def ask(pointer, MODE: tl.constexpr, kept, stage, at, steps, FULL: tl.constexpr):
    """Ask for an array's part, into a place of its room."""
    if MODE == "t" or MODE == "c":
        source = place(pointer, MODE, at, steps)
        if FULL:
            async_copy.async_copy_global_to_shared(kept.index(stage), source)
        else:
            mask = at[3][:, None] & at[4][None, :]
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
    pointer, MODE: tl.constexpr, tile, steps, R: tl.constexpr, FULL: tl.constexpr,
    ROW: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One value a row, [R], for `numbers`."""
    if by_row(MODE):
        outer, row = tile_row(tile, steps[0], R)
        base = pointer + outer_offset(outer, steps[0], steps[1])
        lane = row + gl.arange(0, R, ROW)
        source = base + (lane if MODE == "u" else lane * steps[1][0])
        if FULL:
            return gl.load(source).to(TYPE)
        else:
            return gl.load(source, mask=lane < steps[0][0], other=0.0).to(TYPE)
    else:
        return 0.0


@triton.constexpr_function
def run_of(element, r):
    """Places of a warp that lie together."""
    return 32 * (4 if element == "f32" else 8) // r
