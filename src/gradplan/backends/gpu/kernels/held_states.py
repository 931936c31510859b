"""States, as `held` has them: how those of parts are told, heard and joined."""

import triton
import triton.language as tl

from ..gluon import gl, gluon
from ..launch import interpreted
from .arithmetic import plain_parts, power_of_two
from .formulas import (
    counts,
    merge,
    row_scale,
    times_few_parts,
)
from .hearing import hear, overheard

_INTERPRETED = tl.constexpr(interpreted())
_ODD = tl.constexpr(1 << 20)


@triton.constexpr_function
def alone_layout(r, count, warps):
    """[R, count]: a thread has all of a row; the first R threads have one each."""
    across, over = min(r, 32), max(1, r // 32)
    return gl.BlockedLayout([1, count], [across, 32 // across], [over, warps // over], [0, 1])


@triton.constexpr_function
def heard_layout(r, k, warps):
    """States of the parts of rows [R, K], each told to one thread; neighbouring threads have
    neighbouring rows, a thread some parts one after the other."""
    across, over = min(r, 32), max(1, min(r // 32, warps))
    some = max(1, k // (32 * warps // (across * over)))
    return gl.BlockedLayout([1, some], [across, 32 // across], [over, warps // over], [0, 1])


@triton.constexpr_function
def sum_type(kind, element):
    """What the sums of a warp are; of halves f32, in groups that are small beside their bits."""
    return gl.int32 if counts(kind) else word_type(kind, element)


@triton.constexpr_function
def word_type(kind, element):
    """What a state is told in."""
    wide = kind == "prod" or (element == "f32" and not counts(kind))
    return gl.float64 if wide else gl.float32


@triton.constexpr_function
def word_bits(kind, element):
    return word_type(kind, element).primitive_bitwidth


@triton.constexpr_function
def word_scale(kind, element):
    """What a state is divided by when it is told: a part of bfloat16 may sum to more than f32
    holds, even of `term`s."""
    return 16.0 if element == "bf16" and not counts(kind) and kind != "prod" else 1.0


@triton.constexpr_function
def careful_layout(r, warps):
    """One element a thread, [R, 32 · warps / R]: what is careful takes many registers."""
    across, over = min(r, 32), max(1, r // 32)
    return gl.BlockedLayout([1, 1], [across, 32 // across], [over, warps // over], [0, 1])


@gluon.jit
def words_of(
    told, tile, spot, part, parts, row_dims, R: tl.constexpr, K: tl.constexpr, HEARD: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Where the states of a tile's rows are told, [R, K], from a part on, and which are."""
    lane = gl.arange(0, R, gl.SliceLayout(1, HEARD))[:, None]
    one = part + gl.arange(0, K, gl.SliceLayout(0, HEARD))[None, :]
    if CLASSES == 0:
        words = told + tile.to(gl.int64) * parts * R + (lane + one * R)
        return words, (one < parts).to(gl.int32) + lane * 0
    else:
        words, there = row_words(told, spot, lane, parts, row_dims, R)
        return words + one * R, ((one < parts) & there).to(gl.int32)


@gluon.jit
def row_words(told, spot, lane, parts, row_dims, R: tl.constexpr):
    """Where the first parts of rows tell their states, by their numbers, whichever class has them
    in which strip; and which rows there are."""
    number = spot[1] - spot[4] + lane
    group = spot[0] * gl.cdiv(row_dims[0], R) + number // R
    return told + (group * parts * R + number % R), (number >= 0) & (number < row_dims[0])


@gluon.jit
def target_of(
    told, unit, spot, lane, units, parts, row_dims, R: tl.constexpr, CLASSES: tl.constexpr
):
    """Where a unit tells the states of its rows; behind all others where there is none."""
    if CLASSES == 0:
        return told + unit.to(gl.int64) * R + lane
    else:
        words, there = row_words(told, spot, lane, parts, row_dims, R)
        spare = told + (units.to(gl.int64) * R + lane)
        return gl.where(there, words + (unit % parts) * R, spare)


@gluon.jit
def words_told(units, R: tl.constexpr, CLASSES: tl.constexpr):
    """How many words there are, those of rows that do not exist among them."""
    return (units.to(gl.int64) + (1 if CLASSES > 0 else 0)) * R


@gluon.jit
def tell(target, state, R: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr):
    """Store the states [R], which no reader takes for what is not told yet: a NaN of ours has
    other bits."""
    TYPE: tl.constexpr = word_type(KIND, ELEMENT)
    state = (state * (1.0 / word_scale(KIND, ELEMENT))).to(TYPE)
    state = gl.where(state != state, float("nan"), state)
    if _INTERPRETED:
        gl.store(target, state)
    else:
        gl.inline_asm_elementwise(
            telling(R, TYPE.primitive_bitwidth),
            "=r,l,d" if TYPE == gl.float64 else "=r,l,f",
            [target.to(gl.int64), state],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def tell_parts(
    target, units, s0, s1, s2, R: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Tell products part by part where they are no plain numbers."""
    odd = (s2 != 0.0) | (gl.abs(s1) > 900.0)
    total = words_told(units, R, CLASSES)
    gl.store(target + total, s0)
    gl.store(target + 2 * total, s1)
    gl.store(target + 3 * total, s2)
    fence(s0)
    plain = s0 * power_of_two(gl.where(odd, 0.0, s1).to(gl.int32))
    tell(target, gl.where(odd, float("nan"), plain), R, KIND, ELEMENT)


@gluon.jit
def heard_parts(
    told, unit, spot, parts, units, row_dims, R: tl.constexpr,
    NW: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Products of rows some of whose parts were told so, [R]: significand, exponent, and what is
    odd about them. All have been heard before."""
    HEARD: tl.constexpr = careful_layout(R, NW)
    K: tl.constexpr = 32 * NW // R
    total = words_told(units, R, CLASSES)
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, HEARD))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    for first in range(0, parts, K):
        words, needed = words_of(
            told, unit // parts, spot, first, parts, row_dims, R, K, HEARD, CLASSES
        )
        t0 = overheard(words, needed, 64).to(gl.float64, bitcast=True)
        fence(t0)
        odd = (t0 != t0) & (needed != 0)
        m, e = plain_parts(gl.where(needed != 0, t0, 1.0))
        t0 = gl.where(odd, gl.load(words + total, mask=odd, other=1.0, cache_modifier=".cg"), m)
        t1 = gl.load(words + 2 * total, mask=odd, other=0.0, cache_modifier=".cg")
        t1 = gl.where(odd, t1, e.to(gl.float64))
        t2 = gl.load(words + 3 * total, mask=odd, other=0.0, cache_modifier=".cg")
        t0, t1, t2 = gl.reduce((t0, t1, t2), 1, merge)
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    return s0, s1, s2


@gluon.jit
def fence(value):
    """What was stored before is seen by whoever hears what is told after."""
    if not _INTERPRETED:
        gl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,l", [value.to(gl.int64, bitcast=True)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def telling(r, bits):
    """By the first R threads: the others have the same."""
    return (
        "{ .reg .pred mine; .reg .u32 thread; mov.u32 thread, %tid.x; "
        f"setp.lt.u32 mine, thread, {r}; @mine st.relaxed.gpu.global.f{bits} [$1], $2; "
        "mov.u32 $0, 0; }"
    )


@gluon.jit
def numbers_of(heard):
    """What was told, as f64."""
    if heard.dtype == gl.int64:
        return heard.to(gl.float64, bitcast=True)
    else:
        return heard.to(gl.float32, bitcast=True).to(gl.float64)


@gluon.jit
def joined(
    told, tile, spot, part, parts, row_dims, KIND: tl.constexpr, ELEMENT: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, JOINERS: tl.constexpr, HEARD: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """The states of K parts of rows from one on, joined, when all of them have been told; of
    products significand, exponent, and whether some part was told otherwise."""
    BITS: tl.constexpr = word_bits(KIND, ELEMENT)
    EACH: tl.constexpr = (R * K + 32 * JOINERS - 1) // (32 * JOINERS)
    words, needed = words_of(told, tile, spot, part, parts, row_dims, R, K, HEARD, CLASSES)
    heard = hear(words, (0 - needed).to(gl.int64 if BITS == 64 else gl.int32), EACH, R * BITS // 8)
    if KIND == "prod":
        states = gl.where(needed != 0, heard.to(gl.float64, bitcast=True), 1.0)
        m, e = plain_parts(states)
        e = gl.where(states != states, _ODD, e)
        m, e = gl.reduce((m, e), 1, times_few_parts)
        odd = e > _ODD // 2
        m, above = plain_parts(m)
        return m, gl.where(odd, 0, e + above).to(gl.float64), odd.to(gl.float64)
    else:
        state = gl.sum(numbers_of(heard), 1)
        if not counts(KIND) and ELEMENT != "f32":
            state = state * (row_scale(ELEMENT) * word_scale(KIND, ELEMENT))
        return state, state, state
