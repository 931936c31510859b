"""Tiles: how a program finds its elements.

A problem is rows × axis, each a nest of dimensions collapsed by `geometry.nest`, innermost first.
A tile holds up to R rows (neighbours along the innermost row dimension) by C steps of the axis; a
place `at` is (outer, rows, index, row_mask, axis_mask): the number of the tile above the innermost
row dimension, the rows within it, the steps of the axis, and which of both exist. With a sixth,
`near`, only what differs between the elements of a tile is worked out for each of them, in 32 bits
where that is enough (see `nearby`). An operand's `steps` are (row extents, row strides, axis
extents, axis strides), and its MODE says what the compiler may rely on:

- "t": its steps along the axis are 1;
- "c": its rows are neighbours in memory (step 1), the axis is strided;
- "s": any strides;
- "r": one value a row, whatever the place on the axis;
- "u": the same, and the values of neighbouring rows are neighbours in memory;
- "a": one value a place on the axis, whatever the row;
- "n": absent.
"""

import triton
import triton.language as tl

from ..launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())
USUAL = tl.constexpr("")  # nothing is told to the cache


@triton.jit
def tile_row(tile, extents, R: tl.constexpr):
    """The number of a tile above the innermost row dimension, and its first row within that."""
    if len(extents) == 1:
        return tile.to(tl.int64) * 0, tile.to(tl.int64) * R
    else:
        tiles = tl.cdiv(extents[0], R).to(tl.int32)
        return (tile // tiles).to(tl.int64), (tile % tiles).to(tl.int64) * R


@triton.jit
def tile_rows(tile, extents, R: tl.constexpr):
    """The same, and all its rows."""
    outer, first = tile_row(tile, extents, R)
    return outer, first + tl.arange(0, R)


@triton.jit
def nearby(tile, extents, begin, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr):
    """A tile's place from one first element: (row, rows beyond it, step, steps beyond it).

    NEAR says that no two elements of a tile are 2³¹ apart in any operand.
    """
    _, row = tile_row(tile, extents, R)
    lane, step = tl.arange(0, R), tl.arange(0, C)
    if NEAR:
        return row, lane, begin, step
    else:
        return row, lane.to(tl.int64), begin, step.to(tl.int64)


@triton.jit
def outer_offset(outer, extents, strides):
    """Where the rows of a tile start: all row dimensions above the innermost."""
    offset = outer * 0
    for d in tl.static_range(1, len(extents)):
        offset += (outer % extents[d]) * strides[d]
        outer = outer // extents[d]
    return offset


@triton.jit
def axis_offset(index, extents, strides):
    """Offsets of places on the axis, whose dimensions are told apart by division."""
    if len(extents) == 1:
        return index.to(tl.int64) * strides[0]
    else:
        offset = index.to(tl.int64) * 0
        for d in tl.static_range(0, len(extents)):
            offset += (index % extents[d]).to(tl.int64) * strides[d]
            index = index // extents[d]
        return offset


@triton.constexpr_function
def by_row(mode):
    """Whether there is one value a row."""
    return mode in ("r", "u")


@triton.jit
def place(pointer, MODE: tl.constexpr, at, steps):
    """Pointers of shape [R, C], [R, 1] or [1, C]."""
    base = pointer + outer_offset(at[0], steps[0], steps[1])
    UNIT: tl.constexpr = MODE == "c" or MODE == "u"
    if len(at) > 5:
        row, lane, begin, step = at[5]
        if MODE != "a":
            base += row if UNIT else row * steps[1][0]
        across = lane[:, None]
        if not UNIT:
            across *= steps[1][0].to(lane.dtype)
        if MODE == "t":
            base += begin
            along = step[None, :]
        elif by_row(MODE):
            along = across
        elif len(steps[2]) == 1:
            base += begin.to(tl.int64) * steps[3][0]
            along = (step * steps[3][0].to(step.dtype))[None, :]
        else:
            along = axis_offset(at[2], steps[2], steps[3])[None, :]
    else:
        across = at[1][:, None]
        if not UNIT:
            across = across.to(tl.int64) * steps[1][0]
        if MODE == "t":
            along = at[2][None, :]
        else:
            along = axis_offset(at[2], steps[2], steps[3])[None, :]
    if by_row(MODE):
        return base + across
    elif MODE == "a":
        return base + along
    else:
        return base + (across + along)


@triton.jit
def fetch(
    pointer,
    MODE: tl.constexpr,
    at,
    steps,
    other,
    WIDE: tl.constexpr,
    FULL: tl.constexpr,
    CACHE: tl.constexpr = USUAL,
):
    """An operand's part of the tile, in f32 or f64; `other` where there is no element.

    FULL says that every tile is full: nothing is masked. CACHE is what the cache is told.
    """
    return widened(fetch_raw(pointer, MODE, at, steps, other, FULL, CACHE), MODE, WIDE)


@triton.jit
def fetch_raw(
    pointer, MODE: tl.constexpr, at, steps, other, FULL: tl.constexpr, CACHE: tl.constexpr = USUAL
):
    """An operand's part of the tile as it is stored."""
    if MODE == "n":
        return 0.0
    else:
        source = place(pointer, MODE, at, steps)
        shared: tl.constexpr = by_row(MODE) or MODE == "a"  # other tiles read it too
        told: tl.constexpr = "" if shared and CACHE == "evict_first" else CACHE
        if FULL:
            return tl.load(source, eviction_policy=told)
        elif by_row(MODE):
            return tl.load(source, mask=at[3][:, None], other=other)
        elif MODE == "a":
            return tl.load(source, mask=at[4][None, :], other=other)
        else:
            mask = at[3][:, None] & at[4][None, :]
            return tl.load(source, mask=mask, other=other, eviction_policy=told)


@triton.constexpr_function
def cache_of(spent, streams=False):
    """What the second cache is told of data. Spent: nobody reads it again, and it may go at once.

    Streams: it is read, once or for the first time, by a kernel that writes about as much as it
    reads, and is kept for longest, even if nobody reads it again. Then what is written leaves the
    cache soon and in its order, and memory takes the same bytes in 2 to 4 % less time (see "What
    was tried" in the documentation).
    """
    return "evict_first" if spent else "evict_last" if streams else ""


@triton.jit
def widened(value, MODE: tl.constexpr, WIDE: tl.constexpr):
    """In f32 or f64."""
    if MODE == "n":
        return 0.0
    else:
        if in_pairs(value.dtype, MODE, value.numel) and not WIDE:
            if value.dtype == tl.bfloat16:
                return of_pairs(value, "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
            else:
                return of_pairs(value, _F16_PAIR)
        return value.to(tl.float64 if WIDE else tl.float32)


@triton.jit
def widened_again(raw, MODE: tl.constexpr, before):
    """The same numbers by another way, which the compiler does not see to be the same."""
    if MODE == "n":
        return 0.0
    else:
        if in_pairs(raw.dtype, MODE, raw.numel):
            if raw.dtype == tl.bfloat16:
                return of_pairs(raw, "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;")
            else:
                return of_pairs(raw, _F16_PAIR + " // again")
        else:
            return before


_F16_PAIR = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@triton.constexpr_function
def in_pairs(dtype, mode, count):
    """Whether a thread holds halves two by two. The compiler itself takes an instruction more for
    every second one."""
    runs = mode in ("t", "c") and count >= 64
    return not _INTERPRETED.value and runs and dtype.primitive_bitwidth == 16


@triton.jit
def of_pairs(value, CODE: tl.constexpr):
    """Two f32 from each register of two halves."""
    return tl.inline_asm_elementwise(
        CODE, "=&f,=f,r", [value], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def put(
    pointer,
    MODE: tl.constexpr,
    value,
    at,
    steps,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
    SPENT: tl.constexpr = False,
):
    """Round a tile once and store it."""
    target = place(pointer, MODE, at, steps)
    element: tl.constexpr = pointer.dtype.element_ty
    if element == tl.bfloat16 or element == tl.float16:
        value = value.to(tl.float32)
    value = tl.broadcast_to(value.to(element), (R, C))
    told: tl.constexpr = cache_of(SPENT)
    if FULL:
        tl.store(target, value, eviction_policy=told)
    else:
        mask = at[3][:, None] & at[4][None, :]
        tl.store(target, value, mask=mask, eviction_policy=told)


@triton.jit
def request(source):
    """Ask the second cache for what some pointers point to."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [source.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
