"""Lines as numbers: the recurrence through a line and across lines, and what gates it.

A mode says how S goes on: "sum" adds, "affine" multiplies by a factor first, "gate" lets it
through or not, by masks of bits.
"""

import triton
import triton.language as tl

from ..launch import interpreted
from .arithmetic import power_of_two
from .line_memory import columns_of
from .stretches import beats, extremum

_INTERPRETED = tl.constexpr(interpreted())
_LOG2_OF_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_RANGE = tl.constexpr(40.0)
_FAR = tl.constexpr(2.0**16)
# To add and take away these rounds to a whole number.
_EVEN = tl.constexpr(1.5 * 2.0**23)
_EVEN_WIDE = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def behind_sum(s1, p1, s2, p2):
    """(sum, sum of what is behind the last): the first argument is nearer the far end."""
    return s1 + s2, s1 + p2


@triton.jit
def behind_affine(a1, s1, b1, p1, a2, s2, b2, p2):
    """(a, s) as in `affine`, and the same for what is behind the last."""
    return a1 * a2, s2 + a2 * s1, a1 * b2, p2 + b2 * s1


@triton.jit
def behind_gated(a1, s1, b1, p1, a2, s2, b2, p2):
    """The same with gates: all bits set let S through, none do not; a choice, never a product."""
    return a1 & a2, s2 + chosen(a2, s1), a1 & b2, p2 + chosen(b2, s1)


@triton.jit
def last_gated(a1, s1, a2, s2):
    """The same for the last alone."""
    return a1 & a2, s2 + chosen(a2, s1)


@triton.jit
def mask(condition):
    """All bits set, or none."""
    return tl.where(condition, -1, 0)


@triton.jit
def chosen(gate, value):
    """A value, or 0, by its bits."""
    if value.dtype == tl.float32:
        return (value.to(tl.int32, bitcast=True) & gate).to(tl.float32, bitcast=True)
    else:
        return tl.where(gate != 0, value, 0.0)


@triton.jit
def even(x, nothing):
    """The nearest number of the form E · ln 2, and E: from one to another is a power of two, but
    for what rounding did to them. `nothing` is 0, in the layout of x."""
    if x.dtype == tl.float32:
        e = (x * _LOG2_OF_E + _EVEN) - _EVEN
    else:
        e = (x * _LOG2_OF_E + _EVEN_WIDE) - _EVEN_WIDE
    # As an fma, so that the product is rounded here and not joined with what is taken from it.
    return tl.fma(e, nothing + _LN_2, nothing), e


@triton.jit
def near_enough(low, high, ref):
    """Whether all y from low to high, which never fall and stay NaN, are near enough to a
    reference: weights from it are e⁻²⁰ at least, and what rounding did to it is small."""
    return (low > high - _RANGE) & (tl.abs(ref) < _FAR)


@triton.jit
def exp_between(ref, e, other, other_e):
    """exp(ref − other) in f64, both as `even` gives them, |ref| below 2¹⁶."""
    steps = e - other_e
    rest = (ref - other) - steps * _LN_2
    near = 1.0 + rest * (
        1.0 + rest * (0.5 + rest * (1.0 / 6 + rest * (1.0 / 24 + rest * (1.0 / 120))))
    )
    return near * power_of_two(tl.minimum(tl.maximum(steps, -1000.0), 1000.0).to(tl.int32))


@triton.jit
def through(MODE: tl.constexpr, s, a, arriving):
    """s + a · arriving, in the way of a mode."""
    if MODE == "sum":
        return s + arriving
    elif MODE == "affine":
        return s + a * arriving
    else:
        a, arriving = tl.broadcast(a, arriving)
        return s + chosen(a, arriving)


@triton.jit
def joined(MODE: tl.constexpr, a, b):
    """The factor or gate of two in a row."""
    if MODE == "affine":
        return a * b
    else:
        return a & b


@triton.jit
def shifted(columns, edge, UP: tl.constexpr, V: tl.constexpr):
    """Each element's neighbour above (UP) or below in memory; `edge` beyond the line."""
    if UP:
        return columns[1:] + (edge,)
    else:
        return (edge,) + columns[: V - 1]


@triton.jit
def within(d, start, n, V: tl.constexpr):
    """0 where the row has ended."""
    kept = ()
    for j in tl.static_range(0, V):
        kept = kept + (tl.where(start + j < n, d[j], 0.0),)
    return kept


@triton.jit
def factors(c, start, n, MODE: tl.constexpr, UP: tl.constexpr, V: tl.constexpr,
            FULL: tl.constexpr):  # fmt: skip
    """What S of the next place is multiplied by, or gated: nothing where the row ends."""
    FAR: tl.constexpr = V - 1 if UP else 0
    f = ()
    for j in tl.static_range(0, V):
        gate = c[j]
        if not FULL or j == FAR:  # the row may end here
            next_place = start + j + 1 if UP else start + j - 1
            exists = (next_place >= 0) & (next_place < n)
            if MODE == "affine":
                gate = tl.where(exists, gate, 1.0)
            else:
                gate = gate & mask(exists)
        if MODE == "affine":
            f = f + (gate,)
        else:
            f = f + (~gate,)
    return f


@triton.jit
def prefixes(d, f, MODE: tl.constexpr, UP: tl.constexpr, V: tl.constexpr):
    """Through a line from its far side: S of each place, and what an S behind the line is
    multiplied by (or gated)."""
    if UP:
        s = (d[V - 1],)
        a = (f[V - 1],)
        for j in tl.static_range(1, V):
            s = (through(MODE, d[V - 1 - j], f[V - 1 - j], s[0]),) + s
            if MODE != "sum":
                a = (joined(MODE, f[V - 1 - j], a[0]),) + a
    else:
        s = (d[0],)
        a = (f[0],)
        for j in tl.static_range(1, V):
            s = s + (through(MODE, d[j], f[j], s[j - 1]),)
            if MODE != "sum":
                a = a + (joined(MODE, f[j], a[j - 1]),)
    return s, (s if MODE == "sum" else a)


@triton.jit
def steps_up(KIND: tl.constexpr, TIES: tl.constexpr, y, y_before, y_after, UP: tl.constexpr,
             V: tl.constexpr):  # fmt: skip
    """Where the running extremum y moves on, and whether it does after the line, as masks."""
    m = shifted(y, y_before, not UP, V)
    wins = ()
    for j in tl.static_range(0, V):
        wins = wins + (mask(beats(TIES, extremum(KIND, y[j]), extremum(KIND, m[j]))),)
    nearer = y[V - 1] if UP else y[0]
    return wins, mask(beats(TIES, extremum(KIND, y_after), extremum(KIND, nearer)))


@triton.jit
def leads_of(x, y, ELEMENT: tl.constexpr, PAIRS: tl.constexpr, SIDE: tl.constexpr,
             L: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Of V columns, where x is the running extremum y or NaN, as masks."""
    if SIDE:
        found = ()
        for j in tl.static_range(0, V):
            found = found + (leads(x[j], y[j], ELEMENT, PAIRS),)
        return found
    else:
        return columns_of(leads(x, y, ELEMENT, PAIRS), L, V)


@triton.jit
def leads(x, y, ELEMENT: tl.constexpr, PAIRS: tl.constexpr):
    """The same of one of them. By an assembler's hand: the compiler would turn masks into
    conditions, of which there are only seven at a time. PAIRS: halves, compared two by two."""
    if PAIRS:
        CODE: tl.constexpr = (
            "{ .reg .b32 a, b; set.eq.u32.TYPEx2 a, $2, $3; set.neu.u32.TYPEx2 b, $2, $2; "
            "or.b32 a, a, b; prmt.b32 $0, a, 0, 0x0000; prmt.b32 $1, a, 0, 0x2222; }"
        )
        return tl.inline_asm_elementwise(
            typed(CODE, ELEMENT), "=r,=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=2
        )
    elif ELEMENT == "f64" or _INTERPRETED:
        return mask((x == y) | (x != x))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; set.eq.u32.f32 a, $1, $2; set.neu.u32.f32 b, $1, $1; "
            "or.b32 $0, a, b; }",
            "=r,r,r",
            [x.to(tl.float32), y.to(tl.float32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.constexpr_function
def typed(code, element):
    return code.replace("TYPE", element)


@triton.jit
def tiled(values, SIDE: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """What each line has, as [rows, lines], or [lines, rows] where rows lie side by side."""
    return tl.reshape(values, (M, R) if SIDE else (R, M))


@triton.jit
def spread(values, SIDE: tl.constexpr):
    """What each row has, for all its lines."""
    return values[None, :] if SIDE else values[:, None]


@triton.constexpr_function
def mode_of(kind):
    """How the recurrence of a kind goes through a line."""
    return {"cumprod": "affine", "cummax": "gate", "cummin": "gate"}.get(kind, "sum")


@triton.constexpr_function
def gates_of(kind):
    """How carries of a kind are joined: see `join_span`."""
    if kind == "log_cumsum_exp":
        return "fades"
    return "open" if mode_of(kind) == "gate" else ""


@triton.jit
def picked(values, one, AXIS: tl.constexpr):
    """The value of each row at the one chosen line: picked, never multiplied."""
    return tl.sum(tl.where(one, values, tl.zeros_like(values)), AXIS)


@triton.jit
def both_picked(a, s, one, AXIS: tl.constexpr):
    """The same for two values, at once."""
    a = tl.where(one, a, tl.zeros_like(a))
    s = tl.where(one, s, tl.zeros_like(s))
    return tl.reduce((a, s), AXIS, both_added)


@triton.jit
def both_added(a1, s1, a2, s2):
    return a1 + a2, s1 + s2
