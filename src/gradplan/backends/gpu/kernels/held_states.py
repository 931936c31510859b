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
_APART = tl.constexpr(200)  # so far apart the exponents of products in f32 may be


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
    wide = kind == "prod" or element == "f32"
    return gl.int32 if counts(kind) else gl.float64 if wide else gl.float32


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
def words_of(tile, part, parts, R: tl.constexpr, K: tl.constexpr, HEARD: tl.constexpr):
    """Which states are those of a tile's rows, [R, K], from a part on, and whether there are so
    many parts."""
    lane = gl.arange(0, R, gl.SliceLayout(1, HEARD))[:, None]
    one = part + gl.arange(0, K, gl.SliceLayout(0, HEARD))[None, :]
    words = tile.to(gl.int64) * parts * R + (lane + one * R)
    return words, (one < parts).to(gl.int32) + lane * 0


@triton.constexpr_function
def narrow(kind, told):
    """Whether products are told in f32: those of a unit in terms of a power of two, which is told
    behind all products."""
    return kind == "prod" and told.element_ty == gl.float32


@gluon.jit
def bases_of(told, units, R: tl.constexpr):
    """Where these powers are told."""
    return told + units.to(gl.int64) * R


@gluon.jit
def asides_of(told, units, R: tl.constexpr):
    """Where products are told part by part, in three arrays [unit, R]."""
    total = units.to(gl.int64) * R
    if told.dtype.element_ty == gl.float32:
        return told.to(gl.pointer_type(gl.float64)) + (total + units + 1) // 2
    else:
        return told + total


@gluon.jit
def tell(target, state, R: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr):
    """Store the states [R], which no reader takes for what is not told yet: a NaN of ours has
    other bits."""
    TYPE: tl.constexpr = target.dtype.element_ty
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
def tell_products(told, unit, units, lane, m, e, odd, R: tl.constexpr, ELEMENT: tl.constexpr):
    """Tell products m · 2^e of a unit's rows [R]; False where they are no plain numbers, or `odd`
    says that some factor is not usual: then nothing has been told."""
    target = told + unit.to(gl.int64) * R + lane
    if narrow("prod", told.dtype):
        highest, lowest, strange = gl.reduce((e, -e, odd), 0, three_most)
        base = (highest - lowest) >> 1
        plain = (strange == 0) & (highest + lowest <= _APART)
        if plain:
            tell(bases_of(told, units, R) + unit + lane * 0, base + m * 0.0, 1, "prod", ELEMENT)
            tell(target, m * power_of_two(e - base), R, "prod", ELEMENT)
    else:
        plain = gl.max(odd | (gl.abs(e) > 900).to(gl.int32), 0) == 0
        if plain:
            tell(target, m * power_of_two(e), R, "prod", ELEMENT)
    return plain


@triton.jit
def three_most(a, b, c, x, y, z):
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@gluon.jit
def tell_parts(told, unit, units, lane, s0, s1, s2, R: tl.constexpr, ELEMENT: tl.constexpr):
    """Tell them part by part: a product itself is NaN then, unless it is a plain number."""
    total = units.to(gl.int64) * R
    here = unit.to(gl.int64) * R + lane
    aside = asides_of(told, units, R) + here
    gl.store(aside, s0)
    gl.store(aside + total, s1)
    gl.store(aside + 2 * total, s2)
    fence(s0)
    if narrow("prod", told.dtype):
        tell(bases_of(told, units, R) + unit + lane * 0, s0 * 0.0, 1, "prod", ELEMENT)
        tell(told + here, s0 * float("nan"), R, "prod", ELEMENT)
    else:
        odd = (s2 != 0.0) | (gl.abs(s1) > 900.0)
        plain = s0 * power_of_two(gl.where(odd, 0.0, s1).to(gl.int32))
        tell(told + here, gl.where(odd, float("nan"), plain), R, "prod", ELEMENT)


@gluon.jit
def heard_parts(told, unit, parts, units, ELEMENT: tl.constexpr, R: tl.constexpr, NW: tl.constexpr):
    """Products of rows some of whose parts were told so, [R]: significand, exponent, and what is
    odd about them. All have been heard before."""
    HEARD: tl.constexpr = careful_layout(R, NW)
    K: tl.constexpr = 32 * NW // R
    BITS: tl.constexpr = told.dtype.element_ty.primitive_bitwidth
    total = units.to(gl.int64) * R
    aside = asides_of(told, units, R)
    s0 = gl.full([R], 1.0, gl.float64, gl.SliceLayout(1, HEARD))
    s1 = s0 * 0.0
    s2 = s0 * 0.0
    for first in range(0, parts, K):
        here, needed = words_of(unit // parts, first, parts, R, K, HEARD)
        t0 = numbers_of(overheard(told + here, needed, BITS))
        fence(t0)
        odd = (t0 != t0) & (needed != 0)
        m, e = plain_parts(gl.where(needed != 0, t0, 1.0))
        t1 = e.to(gl.float64)
        if narrow("prod", told.dtype):
            base = numbers_of(overheard(bases_of(told, units, R) + here // R, needed, BITS))
            t1 += base
        t0 = gl.where(odd, gl.load(aside + here, mask=odd, other=1.0, cache_modifier=".cg"), m)
        more = gl.load(aside + total + here, mask=odd, other=0.0, cache_modifier=".cg")
        t1 = gl.where(odd, more, t1)
        t2 = gl.load(aside + 2 * total + here, mask=odd, other=0.0, cache_modifier=".cg")
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
    told, tile, part, parts, units, KIND: tl.constexpr, ELEMENT: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, JOINERS: tl.constexpr, HEARD: tl.constexpr,
):  # fmt: skip
    """The states of K parts of rows from one on, joined, when all of them have been told; of
    products significand, exponent, and whether some part was told otherwise."""
    BITS: tl.constexpr = told.dtype.element_ty.primitive_bitwidth
    TYPE: tl.constexpr = gl.int64 if BITS == 64 else gl.int32
    EACH: tl.constexpr = (R * K + 32 * JOINERS - 1) // (32 * JOINERS)
    words, needed = words_of(tile, part, parts, R, K, HEARD)
    if narrow(KIND, told.dtype):
        # Asked for first, so that they have arrived when all products have.
        bases, early = early_bases(told, tile, part, parts, units, R, K, JOINERS)
    heard = hear(told + words, (0 - needed).to(TYPE), EACH, R * BITS // 8)
    if KIND == "prod":
        states = gl.where(needed != 0, numbers_of(heard), 1.0)
        m, e = plain_parts(states)
        e = gl.where(states != states, _ODD, e)
        m, e = gl.reduce((m, e), 1, times_few_parts)
        odd = e > _ODD // 2
        m, above = plain_parts(m)
        e = (e + above).to(gl.float64)
        if narrow(KIND, told.dtype):
            e += gl.sum(numbers_of(hear(bases, early, max(1, K // (32 * JOINERS)))), 0)
        return m, gl.where(odd, 0.0, e), odd.to(gl.float64)
    else:
        state = gl.sum(numbers_of(heard), 1)
        if not counts(KIND) and ELEMENT != "f32":
            state = state * (row_scale(ELEMENT) * word_scale(KIND, ELEMENT))
        return state, state, state


@gluon.jit
def early_bases(
    told, tile, part, parts, units, R: tl.constexpr, K: tl.constexpr, JOINERS: tl.constexpr
):
    """Where the powers of two of K parts from one on are told, and what has been told so far."""
    EACH: tl.constexpr = max(1, K // (32 * JOINERS))
    one = part + gl.arange(0, K, gl.BlockedLayout([EACH], [32], [JOINERS], [0]))
    bases = bases_of(told, units, R) + tile.to(gl.int64) * parts + one
    return bases, overheard(bases, (one < parts).to(gl.int32), 32)
