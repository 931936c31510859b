"""The formulas of map and row-state gradients, one branch a kind, as in the CPU's `formulas`.

Most row states are a sum: `term` is what an element adds, `numbers` what the gradient must know of
a row, from its sum, and `apply` maps a tile by them. The ties FIRST and LAST keep an index instead,
and prod the parts of a product, which has functions of its own. Places beyond the axis are left out
by choice, never by a product with zero.
"""

import triton
import triton.language as tl

from .arithmetic import (
    exp,
    exp_of_difference,
    multiply,
    parts,
    parts_f32,
    plain_parts,
    power_of_two,
    quotient,
    reciprocal,
    reciprocal_f64,
    rough_exp,
    rough_reciprocal,
    scaled,
)

_INFINITY = tl.constexpr(float("inf"))
_FAR = tl.constexpr(2.0**62)


@triton.jit
def hit(x, y):
    """Whether x is the extremum y: NaN equals NaN."""
    return (x == y) | ((x != x) & (y != y))


@triton.jit
def term(KIND: tl.constexpr, ELEMENT: tl.constexpr, dy, x, y):
    """What an element adds to the state of its row: f64, f32 for halves, or a count.

    A few terms of bfloat16 may sum to more than f32 holds: they come divided by 2¹², exactly.
    """
    if KIND == "max" or KIND == "min":  # shared among ties
        return hit(x, y).to(tl.int32)
    elif ELEMENT == "f32" or ELEMENT == "f64":
        if KIND == "softmax":
            return y.to(tl.float64) * dy.to(tl.float64)
        elif KIND == "log_softmax":
            return dy.to(tl.float64)
        else:  # var and std
            return x.to(tl.float64)
    else:
        DOWN: tl.constexpr = 1.0 / row_scale(ELEMENT)
        if KIND == "softmax":
            return (y * DOWN) * dy
        elif KIND == "log_softmax":
            return dy * DOWN
        else:
            return x * DOWN


@triton.constexpr_function
def operands_of(kind):
    """The operands that `term` and `apply` look at for each element; of max and min whose ties
    share."""
    if counts(kind):
        return ("x", "y")
    return ("dy", "y") if kind in ("softmax", "log_softmax") else ("x",)


@triton.constexpr_function
def met(mode, kind, operand):
    """How elements meet an operand: "n" where only the numbers of a row know it."""
    return mode if operand in operands_of(kind) else "n"


@triton.constexpr_function
def counts(kind):
    """Whether a state is how many elements are equal, not a sum of them."""
    return kind in ("max", "min")


@triton.constexpr_function
def row_scale(element):
    """What a sum of `term`s is to be multiplied by."""
    return 4096.0 if element == "bf16" else 1.0


@triton.jit
def in_groups(values, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr):
    """A tile [R, C] as groups of W that a thread holds: neighbours, or far apart along the axis;
    the groups are along the last axis of three."""
    if INNER:
        return tl.reshape(values, (R, C // W, W))
    else:
        return tl.permute(tl.reshape(values, (R, W, C // W)), (0, 2, 1))


@triton.jit
def row_sum(
    values,
    ELEMENT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    INNER: tl.constexpr,
):
    """Σ of `term`s as f64."""
    if values.dtype == tl.float32:
        return tl.sum(sums_of_groups(values, R, C, W, INNER), 1) * row_scale(ELEMENT)
    else:
        return tl.sum(values, 1).to(tl.float64)


@triton.jit
def sums_of_groups(values, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr):
    """The same by groups that a thread holds. Halves are summed W at a time in f32: converting
    costs more."""
    if values.dtype == tl.float32:
        return tl.sum(in_groups(values, R, C, W, INNER), 2).to(tl.float64)
    else:
        return values


@triton.jit
def tile_state(
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    dy,
    x,
    y,
    order,
    mask,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    INNER: tl.constexpr,
    FULL: tl.constexpr,
):
    """The state of a tile's part of each row: an f64 of shape [R]; not of prod."""
    if TIES == "first":
        far = (
            tl.full((1, 1), 0x3FFFFFFFFFFFFFFF, tl.int64) if order.dtype == tl.int64 else 0x7FFFFFFF
        )
        return tl.min(tl.where(hit(x, y) & mask, order, far), 1).to(tl.float64)
    elif TIES == "last":
        return tl.max(tl.where(hit(x, y) & mask, order, -1), 1).to(tl.float64)
    else:
        added = term(KIND, ELEMENT, dy, x, y)
        if added.shape[1] < C:  # the same of every place: to add it up took the assembler minutes
            total = by_rows(added).to(tl.float64) * (C if FULL else tl.sum(mask.to(tl.int32), 1))
            if added.dtype == tl.float32:
                total *= row_scale(ELEMENT)
            return total
        added = tl.broadcast_to(added, (R, C))
        if not FULL:
            added = tl.where(mask, added, tl.zeros((R, C), added.dtype))
        return row_sum(added, ELEMENT, R, C, W, INNER)


@triton.jit
def hits_of_pairs(x, y, ELEMENT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """−1 where x is the extremum y of its row, otherwise 0: halves, compared two at a time."""
    EQUAL: tl.constexpr = "set.eq.u32." + ELEMENT + "x2"
    NAN: tl.constexpr = "set.neu.u32." + ELEMENT + "x2"
    CODE: tl.constexpr = (
        "{ .reg .b32 both; "
        + NAN
        + " both, $1, $1; and.b32 both, both, $3; "
        + EQUAL
        + " $0, $1, $2; or.b32 $0, $0, both; }"
    )
    y_nan = 0 - (y != y).to(tl.int16)
    return tl.inline_asm_elementwise(
        CODE,
        "=&r,r,r,r",
        [x, tl.broadcast_to(y, (R, C)), tl.broadcast_to(y_nan, (R, C))],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def count_of_pairs(hits, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr):
    """How many elements of each row are hits, as f64; W at a time in 16 bits."""
    few = tl.reduce(in_groups(hits, R, C, W, INNER), 2, plus)
    return (0 - tl.sum(few.to(tl.int32), 1)).to(tl.float64)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def share_of_pairs(hits, share, ELEMENT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The share of each row at the hits, 0 elsewhere, rounded to the element."""
    TYPE: tl.constexpr = tl.bfloat16 if ELEMENT == "bf16" else tl.float16
    bits = share[:, None].to(TYPE).to(tl.int16, bitcast=True)
    both = tl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;",
        "=r,r,r",
        [hits, tl.broadcast_to(bits, (R, C))],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return both.to(TYPE, bitcast=True)


@triton.jit
def publish(KIND: tl.constexpr, slot, total, s0, s1, s2):
    """Leave a state for `join`."""
    tl.store(slot, told(KIND, slot, total, s0, s1, s2))


@triton.jit
def told(KIND: tl.constexpr, slot, total, s0, s1, s2):
    """The number that tells a state. A product is one number where f64 holds it; otherwise NaN, and
    its three parts stand behind `slot` in arrays of their own, `total` apart."""
    if KIND == "prod":
        odd = (s2 != 0.0) | (tl.abs(s1) > 900.0)
        exponent = tl.where(odd, 0.0, s1).to(tl.int32)
        if tl.max(odd.to(tl.int32), 0) > 0:
            tl.store(slot + total, s0)
            tl.store(slot + 2 * total, s1)
            tl.store(slot + 3 * total, s2)
        return tl.where(odd, float("nan"), s0 * power_of_two(exponent))
    else:
        return s0


@triton.constexpr_function
def told_of_none(kind, ties):
    """What would be told of no elements."""
    if kind == "prod":
        return 1.0
    return {"first": _FAR.value, "last": -1.0}.get(ties, 0.0)


@triton.jit
def join(
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    states,
    total,
    parts,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """The states of R rows, from what their parts [part, R] have published, in an order that
    depends on their number alone."""
    lane = tl.arange(0, R)[:, None]
    EMPTY: tl.constexpr = told_of_none(KIND, TIES)
    s0 = tl.full((R, K), EMPTY, tl.float64)
    s1 = tl.zeros((R, K), tl.float64)
    s2 = tl.zeros((R, K), tl.float64)
    for k in range(0, parts, K):
        one = k + tl.arange(0, K)[None, :]
        slot = states + one * R + lane
        # Another program may have written next to them a moment ago: not from the first cache.
        t0 = tl.load(slot, mask=one < parts, other=EMPTY, cache_modifier=".cg")
        s0, s1, s2 = heard(KIND, TIES, s0, s1, s2, t0, slot, total)
    return across(KIND, TIES, s0, s1, s2)


@triton.jit
def join_told(KIND: tl.constexpr, TIES: tl.constexpr, numbers, slot, total, K: tl.constexpr):
    """The state of one row, from the numbers [1, K] that its parts have told, in the same order."""
    if KIND == "prod":
        # Usually nothing is odd, and so few significands stay within f64.
        m, e = plain_parts(numbers)
        m = tl.where(numbers == numbers, m, float("nan"))
        m, e = tl.reduce((m, e), 1, times_few_parts)
        s0, more = plain_parts(m)
        s1, s2 = (e + more).to(tl.float64), tl.zeros((1,), tl.float64)
        if tl.max((m != m).to(tl.int32), 0) > 0:
            s0, s1, s2 = join_all_told(KIND, TIES, numbers, slot, total, K)
        return s0, s1, s2
    else:
        return join_all_told(KIND, TIES, numbers, slot, total, K)


@triton.jit
def join_all_told(KIND: tl.constexpr, TIES: tl.constexpr, numbers, slot, total, K: tl.constexpr):
    """The same, whatever was told."""
    s0 = tl.full((1, K), told_of_none(KIND, TIES), tl.float64)
    s1 = tl.zeros((1, K), tl.float64)
    s2 = tl.zeros((1, K), tl.float64)
    s0, s1, s2 = heard(KIND, TIES, s0, s1, s2, numbers, slot + tl.arange(0, K)[None, :], total)
    return across(KIND, TIES, s0, s1, s2)


@triton.jit
def heard(KIND: tl.constexpr, TIES: tl.constexpr, s0, s1, s2, t0, slot, total):
    """States [R, K] joined with as many that were told."""
    if KIND == "prod":
        odd = t0 != t0
        t0, e = plain_parts(t0)
        t1, t2 = e.to(tl.float64), tl.zeros(t0.shape, tl.float64)
        if tl.max(tl.max(odd.to(tl.int32), 1), 0) > 0:
            slot += total
            t0 = tl.where(odd, tl.load(slot, mask=odd, other=1.0, cache_modifier=".cg"), t0)
            slot += total
            t1 = tl.where(odd, tl.load(slot, mask=odd, other=0.0, cache_modifier=".cg"), t1)
            slot += total
            t2 = tl.load(slot, mask=odd, other=0.0, cache_modifier=".cg")
        s0, s1, s2 = merge(s0, s1, s2, t0, t1, t2)
    elif TIES == "first":
        s0 = tl.minimum(s0, t0)
    elif TIES == "last":
        s0 = tl.maximum(s0, t0)
    else:
        s0 += t0
    return s0, s1, s2


@triton.jit
def across(KIND: tl.constexpr, TIES: tl.constexpr, s0, s1, s2):
    """States [R, K] joined along K."""
    if KIND == "prod":
        s0, s1, s2 = tl.reduce((s0, s1, s2), 1, merge)
        return s0, s1, s2
    else:
        if TIES == "first":
            one = tl.min(s0, 1)
        elif TIES == "last":
            one = tl.max(s0, 1)
        else:
            one = tl.sum(s0, 1)
        return one, one, one


@triton.constexpr_function
def in_f64(element, ties):
    """Whether `numbers` are f64: those of f64, and places on the axis."""
    return element == "f64" or ties in ("first", "last")


@triton.jit
def numbers(
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, s0, s1, s2, dy, y, p, q, row_mask
):
    """All that `apply` must know of a row: up to three numbers, from its state and, of reductions,
    its dy and y (of shape [R, 1]).

    For var p = 2 / m, for std 1 / m; q = 1 / n.
    """
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" else tl.float32
    if KIND == "softmax":
        s = s0.to(TYPE)
        return s, s, s
    elif KIND == "log_softmax":
        if ELEMENT == "f32" or ELEMENT == "f64":
            factor, again = in_two(s0, TYPE)
            return factor, again, again
        else:
            # A power of two goes into the exponent: nothing gets lost that a half would show.
            size = tl.abs(s0)
            power = tl.where(size > 2.0**100, 60, tl.where(size < 2.0**-90, -30, 30))
            factor = (s0 * power_of_two(-power)).to(tl.float32)
            return factor, power.to(tl.float32), factor
    elif KIND == "var":
        factor, again = in_two(by_rows(dy).to(tl.float64) * p, TYPE)
        return (s0 * q).to(TYPE), factor, again
    elif KIND == "std":
        none = by_rows(y) == 0.0
        divisor = tl.where(none, 1.0, by_rows(y)).to(tl.float64)
        share = by_rows(dy).to(tl.float64) * p
        if ELEMENT == "f32" or ELEMENT == "f64":
            share = share / divisor
        else:
            share = share * reciprocal_f64(divisor)
        factor, again = in_two(tl.where(none, 0.0, share), TYPE)
        return (s0 * q).to(TYPE), factor, tl.where(none, 0.0, again)
    elif KIND == "prod":
        return product_numbers(ELEMENT, s0, s1, s2, by_rows(dy), row_mask)
    elif TIES == "split":
        share = quotient(by_rows(dy), s0.to(TYPE), ELEMENT)
        return share, share, share
    else:
        return s0, s0, s0


@triton.jit
def by_rows(value):
    """A number a row, [R], of a tile [R, 1], or as it is."""
    if len(value.shape) == 1:
        return value
    else:
        return tl.reshape(value, (value.shape[0],))


@triton.jit
def apply(
    KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, k0, k1, k2, dy, x, y, order
):
    """The gradient of a tile, from the `numbers` of its rows; not of prod."""
    k0, k1, k2 = k0[:, None], k1[:, None], k2[:, None]
    if KIND == "softmax":
        return y * dy - y * k0  # dy − s might overflow
    elif KIND == "log_softmax":
        if ELEMENT == "f32" or ELEMENT == "f64":
            return dy - exp(y, ELEMENT) * k1 * k0
        else:
            return dy - rough_exp(y, k1) * k0
    elif KIND == "var":
        return (x - k0) * k2 * k1
    elif KIND == "std":
        # Chosen before the products: as halves the compiler would choose them one by one.
        return tl.where(k2 == 0.0, 0.0, x - k0) * k2 * k1
    elif TIES == "split":
        return tl.where(hit(x, y), k0, 0.0)
    else:
        return tl.where(order == k0.to(order.dtype), dy, 0.0)


@triton.jit
def in_two(factor, TYPE: tl.constexpr):
    """Two numbers for an f64 that f32 need not hold; the product of something with the second,
    and then with the first, may fit."""
    if TYPE == tl.float64:
        return factor, tl.full(factor.shape, 1.0, tl.float64)
    else:
        size = tl.abs(factor)
        down = tl.where(size > 1e30, 2.0**-60, tl.where(size < 1e-30, 2.0**60, 1.0))
        return (factor * down).to(tl.float32), (1.0 / down).to(tl.float32)


@triton.jit
def inverse(numerator, p, TYPE: tl.constexpr):
    """A scalar quotient, taken in f64 and rounded once."""
    return (tl.full((), numerator, tl.float64) / tl.full((), p, tl.float64)).to(TYPE)


@triton.jit
def first_state(R: tl.constexpr):
    """The state of an empty product: significand, exponent and what is odd about it."""
    none = tl.zeros((R,), tl.float64)
    return none + 1.0, none, none


@triton.jit
def merge(s0, s1, s2, t0, t1, t2):
    """The product of two products. Zeros, infinities and NaNs are each counted up to 2, since one
    is all that leaves; the fourth count says that some factor was not usual."""
    m, more = plain_parts(s0 * t0)
    a, b = s2.to(tl.int32), t2.to(tl.int32)
    odd = a & 0
    for shift in tl.static_range(0, 8, 2):
        odd |= tl.minimum(((a >> shift) & 3) + ((b >> shift) & 3), 2) << shift
    return m, s1 + t1 + more.to(tl.float64), odd.to(tl.float64)


@triton.jit
def product_state(ELEMENT: tl.constexpr, x, mask, R: tl.constexpr, C: tl.constexpr):
    """Π of the significands, the sum of the exponents, and how many are 0, infinite or NaN.

    Those three count as ±1 in the product, so leaving one factor out is exact whatever it was.
    """
    x = tl.where(mask, tl.broadcast_to(x, (R, C)), 1.0)
    if ELEMENT == "f64":
        m, e, _ = parts(x)
    else:
        m, e, _ = parts_f32(x)
    m, e = tl.reduce((m, e), 1, times_parts)
    zeros = tl.minimum(tl.sum((x == 0.0).to(tl.int32), 1), 2)
    infinite = tl.minimum(tl.sum((tl.abs(x) == _INFINITY).to(tl.int32), 1), 2)
    nans = tl.minimum(tl.sum((x != x).to(tl.int32), 1), 2)
    odd = zeros + 4 * infinite + 16 * nans + 64
    return m, e.to(tl.float64), odd.to(tl.float64)


@triton.jit
def times_parts(m, e, other, more):
    """The product of two numbers m · 2^e."""
    m, above = plain_parts(m * other)
    return m, e + more + above


@triton.jit
def times_few_parts(m, e, other, more):
    """The same for numbers so few that their significands, below 2 each, stay within f64."""
    return m * other, e + more


@triton.jit
def product_of_pairs(
    ELEMENT: tl.constexpr,
    a,
    b,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    INNER: tl.constexpr,
):
    """Significand and exponent of Π a·b, and whether all of a and b are usual: then a plain
    quotient leaves one factor out."""
    # Not by `products_of_pairs`: tiles of several rows were measured in this order of instructions.
    usual = tl.max(tl.max(distances(ELEMENT, a, b), 1), 0) < usual_distance(ELEMENT)
    m = tl.reduce(in_groups(multiplied(ELEMENT, a, b), R, C, W, INNER), 2, multiply)
    m, e = plain_parts(m)
    m, e = product_of_groups(m, e, C // W)
    return m, e.to(tl.float64), usual


@triton.jit
def products_of_pairs(
    ELEMENT: tl.constexpr,
    a,
    b,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    INNER: tl.constexpr,
):
    """Significands and exponents of the products of W pairs, and how far from usual each pair is.
    Of what is usual, they stay within f64."""
    far = distances(ELEMENT, a, b)
    m = tl.reduce(in_groups(multiplied(ELEMENT, a, b), R, C, W, INNER), 2, multiply)
    m, e = plain_parts(m)
    return m, e, far


@triton.jit
def multiplied(ELEMENT: tl.constexpr, a, b):
    """The products of pairs as f64, of halves exact in f32 before."""
    if ELEMENT == "f32":
        return a.to(tl.float64) * b.to(tl.float64)
    else:
        return (a * b).to(tl.float64)


@triton.jit
def distances(ELEMENT: tl.constexpr, a, b):
    """How far from usual each pair is."""
    LOW: tl.constexpr = usual_reach(ELEMENT)
    if ELEMENT == "f64":
        return tl.maximum(distance_f64(a, LOW), distance_f64(b, LOW))
    elif ELEMENT == "f32":
        return tl.maximum(distance(a, LOW), distance(b, LOW))
    else:
        return distance(a * b, LOW)


@triton.constexpr_function
def usual_reach(element):
    """Usual are factors, of halves the products of two, between 2^−reach and 2^reach."""
    return {"f64": 400, "f32": 100}.get(element, 60)


@triton.constexpr_function
def usual_distance(element):
    """What is usual is less far, by `distance` or `distance_f64`, from the least that is."""
    return 2 * usual_reach(element) << (21 if element == "f64" else 24)


@triton.jit
def product_of_groups(m, e, COUNT: tl.constexpr):
    """Significands and exponents multiplied along a row, of so many numbers in all."""
    if COUNT <= 1000:
        m, e = tl.reduce((m, e), 1, times_few_parts)
        m, more = plain_parts(m)
        return m, e + more
    else:
        return tl.reduce((m, e), 1, times_parts)


@triton.jit
def product_of_row(ELEMENT: tl.constexpr, m, e, far, MANY: tl.constexpr):
    """The product of a single row, from significands below 2^MANY, exponents, and how far from
    usual the factors of each were; and whether all are usual.

    Threads meet once: what is not usual makes the product NaN. First each makes its significand one
    near 1, so that no product of them needs to be taken apart on the way: 1024 of them stay within
    2^±513, and f64 reaches to 2^±1022. Without it 1000 bits are as much as may come together.
    """
    if m.shape[1] > 1024:
        m, e = tl.reduce((by_threads(m), by_threads(e)), 2, times_few_parts)
        far = tl.max(by_threads(far), 2)
        m, e = near_one(m, e)
    elif MANY * m.shape[1] > 1000:
        m, e = near_one(m, e)
    m = tl.where(far < usual_distance(ELEMENT), m, float("nan"))
    m, e = tl.reduce((m, e), 1, times_few_parts)
    usual = tl.max((m != m).to(tl.int32), 0) == 0
    m, more = plain_parts(m)
    return m, e + more, usual


@triton.jit
def by_threads(values):
    """Values of a row, [1, COUNT], as [1, 1024, COUNT / 1024]: what lies along the last axis is in
    one thread, of 1024 or of fewer."""
    COUNT: tl.constexpr = values.shape[1]
    return tl.permute(tl.reshape(values, (1, COUNT // 1024, 1024)), (0, 2, 1))


@triton.jit
def near_one(m, e):
    """The same number, the magnitude of its significand between √½ and √2, or thereabouts."""
    m, more = plain_parts(m)
    large = tl.abs(m) > 1.4140625
    return tl.where(large, 0.5 * m, m), e + more + large.to(tl.int32)


@triton.jit
def distance(x, LOW: tl.constexpr):
    """How far |x| is above 2^−LOW, in units of its last place; very far if below."""
    return (x.to(tl.uint32, bitcast=True) << 1) - ((127 - LOW) << 24)


@triton.jit
def distance_f64(x, LOW: tl.constexpr):
    """The same of an f64, by its upper half."""
    upper = (x.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    return (upper << 1) - ((1023 - LOW) << 21)


@triton.jit
def product_numbers(ELEMENT: tl.constexpr, s0, s1, s2, dy, row_mask):
    """dy · Π x of each row as share · scale², and a third number: 1 where dividing by x is all
    there is, 2 where the scale is 1 besides, otherwise 0. The scale is a power of two, and 1 where
    the share by itself meets no usual product of factors that takes it out of f32. Otherwise the
    share is near 2⁶ where the scale is above 1 and near 2⁻⁷ where it is below: then share / x
    overflows and loses bits only where the gradient does, even where x is a subnormal or very large
    bfloat16."""
    exponent = tl.minimum(tl.maximum(s1, -1000.0), 1000.0).to(tl.int32)
    share = dy * (s0 * power_of_two(exponent))
    size, given = tl.abs(share), tl.abs(dy)
    if ELEMENT == "f64":
        scale = tl.full(share.shape, 1.0, tl.float64)
        near = scale == 1.0
        held = (size < 1e150) & (size > 1e-150) & (tl.abs(s1) < 500.0)
    else:
        _, e = plain_parts(share)
        # Far beyond these, whatever x is, the whole row is 0 or infinite.
        above, below = tl.minimum(e - 5, 252), tl.maximum(e + 8, -252)
        near = (tl.abs(e) <= 124 - product_reach(ELEMENT)) | (size == 0.0)
        e = tl.where(near, 0, (tl.maximum(above, 0) >> 1) + (tl.minimum(below, 0) >> 1))
        share = (share * power_of_two(-2 * e)).to(tl.float32)
        scale = power_of_two(e).to(tl.float32)
        held = size == size
    held = held | (given == 0.0) | ~(given < _INFINITY)
    fits = (held & (s2 == 0.0)) | ~row_mask
    return share, scale, tl.where(fits, tl.where(near, 2.0, 1.0), 0.0).to(scale.dtype)


@triton.constexpr_function
def product_reach(element):
    """What may be taken for usual anywhere: factors of f32, and products of two halves, between
    2^−reach and 2^reach; at least `usual_reach`, and what held rows take for it."""
    return 100 if element == "f32" else 80


@triton.jit
def product_quotients(ELEMENT: tl.constexpr, share, scale, a, b, SCALED: tl.constexpr = True):
    """share · scale² / a and / b; for halves by one reciprocal, of their product."""
    share, scale = share[:, None], scale[:, None]
    if ELEMENT == "f64":
        da, db = share * reciprocal_f64(a), share * reciprocal_f64(b)
    elif ELEMENT == "f32":
        da, db = share * reciprocal(a), share * reciprocal(b)
    else:
        each = share * rough_reciprocal(a * b)
        da, db = each * b, each * a
    if SCALED and ELEMENT != "f64":
        return da * scale * scale, db * scale * scale
    else:
        return da, db


@triton.jit
def product_of_others(ELEMENT: tl.constexpr, s0, s1, s2, dy, x):
    """dy · Π of the others, part by part: right whatever x is."""
    if ELEMENT == "f64":
        m, e, special = parts(x)
    else:
        m, e, special = parts_f32(x)
    ratio = s0[:, None] / m
    exponent = s1[:, None] - e.to(tl.float64)
    exponent = tl.minimum(tl.maximum(exponent, -2044.0), 2044.0).to(tl.int32)
    others = scaled(ratio, exponent)
    own = tl.where(x != x, 16, tl.where(x == 0.0, 1, 4))
    left = s2[:, None].to(tl.int32) - tl.where(special, own, 0)
    zero, infinite, nan = (left & 3) > 0, ((left >> 2) & 3) > 0, ((left >> 4) & 3) > 0
    others = tl.where(zero, ratio * 0.0, others)
    others = tl.where(infinite, tl.where(zero, float("nan"), ratio * _INFINITY), others)
    others = tl.where(nan, float("nan"), others)
    return dy.to(tl.float64) * others


@triton.jit
def mapped(KIND: tl.constexpr, ELEMENT: tl.constexpr, EXTREME: tl.constexpr, dy, x, y, p):
    """The gradient of a kind without a row state."""
    TYPE: tl.constexpr = tl.float64 if ELEMENT == "f64" or EXTREME else tl.float32
    if KIND == "lerp":
        return dy.to(TYPE) * tl.full((), p, tl.float64).to(TYPE)
    elif KIND == "sum":
        return dy
    elif KIND == "mean":  # p = n
        if ELEMENT == "f64":
            return dy / tl.full((), p, tl.float64)
        else:
            return dy * inverse(1.0, p, TYPE)
    elif KIND == "norm2":
        # x / y first: it is at most 1, where dy · x might overflow.
        ratio = quotient(x, tl.where(y == 0.0, 1.0, y), ELEMENT)
        return tl.where(y == 0.0, 0.0, dy * ratio)
    elif KIND == "log_sum_exp":
        return tl.where(y == -_INFINITY, 0.0, dy * exp_of_difference(x, y, ELEMENT))
    else:  # max, min with ties ALL
        return tl.where(hit(x, y), dy, 0.0)
