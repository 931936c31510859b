"""log-cumsum-exp, a tile at a time.

No c is needed inside a tile. With F[k] = exp(y[k] − m) for one m a tile,
S[k] = F[k] · Σ_{j≥k} dy[j] / F[j], so a plain sum does, as long as the tile's y lie within e⁴⁰ of
each other; a tile where they do not takes the pairs, in f64.
"""

import triton
import triton.language as tl

from .arithmetic import exp_of_difference, weight_below
from .stretches import affine, fading, larger, log_add, pick, ratio, times
from .tiles import fetch, put

_INFINITY = tl.constexpr(float("inf"))
_RANGE = tl.constexpr(40.0)
_SMALL = tl.constexpr(2.0**-90)


@triton.jit
def log_tile(
    arrays,
    d,
    dy_steps,
    x_steps,
    y_steps,
    out_steps,
    states,
    slot,
    total,
    at,
    first,
    far,
    ends,
    n,
    carry,
    carried,
    ELEMENT: tl.constexpr,
    DY: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    OUT: tl.constexpr,
    PHASE: tl.constexpr,
    FLIP: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FULL: tl.constexpr,
):
    WIDE: tl.constexpr = ELEMENT == "f64"
    # Of halves the last rounding hides what sums of f32 lose from tile to tile.
    EXACT: tl.constexpr = ELEMENT == "f32"
    TYPE: tl.constexpr = tl.float64 if WIDE else tl.float32
    _dy, x, y, out = arrays
    row_mask = at[3]
    mask = at[4][None, :]
    u = tl.broadcast_to(fetch(x, X, at, x_steps, 0.0, WIDE, FULL), (R, C))
    here = row_mask[:, None] & mask
    if Y == "n":
        top = tl.max(tl.where(here & (u == u), u, -_INFINITY), 1)
        broken = tl.max(tl.where(here & ((u != u) | (u == _INFINITY)), 1, 0), 1)
        m0 = tl.full((R,), -_INFINITY, TYPE)
        if PHASE != "resident":
            m0 = tl.load(states + slot).to(TYPE)
        high = tl.maximum(top, m0)
        low = tl.maximum(m0, pick(u, first))
        usual = (broken == 0) & (m0 == m0) & (low > high - _RANGE) & (high < _INFINITY)
        low = high  # the reference: sums are at most their number, so that a small dy stays normal
    else:
        v = tl.broadcast_to(fetch(y, Y, at, y_steps, 0.0, WIDE, FULL), (R, C))
        # y never falls, and a NaN stays: its ends tell all.
        low = value_at(y, Y, at, ends[0], n, y_steps, R)
        high = value_at(y, Y, at, ends[1], n, y_steps, R)
        usual = (low > high - _RANGE) & (high < _INFINITY) & (low > -_INFINITY)
    # One reference a row, in the middle of what the exponents reach.
    ref = tl.where(row_mask, (high + low) * 0.5, 0.0).to(TYPE)
    e = weight_below(u, ref[:, None], ELEMENT)
    if Y == "n":
        e = tl.where(mask & (u > -_INFINITY), e, 0.0)
        f = tl.cumsum(e, 1, reverse=True)
        if PHASE != "resident":
            e0 = tl.load(states + total + slot).to(TYPE)
            f += (e0 * exp_of_difference(m0, ref, ELEMENT))[:, None]
        g = d / tl.where(f == 0.0, 1.0, f)
        own = pick(f, first).to(tl.float64)
        arriving = own
        if PHASE != "resident":
            x_past = value_at(x, X, at, ends[2], n, x_steps, R).to(TYPE)
            usual = usual & ~(x_past - ref > _RANGE)
            if EXACT:
                # From the state before the tile behind this one: what an S loses from tile to tile
                # adds up along the row, and f loses what a tile adds below its last bit.
                beyond = slot - R if FLIP else slot + R
                behind = (ends[2] >= 0) & (ends[2] < n)
                arrived = grown(states, beyond, (slot >= 0) & behind, total, x_past, ref)
                arriving = tl.where(behind, 1.0 / arrived, 0.0)
            else:
                arrived = pick(f, far[None, :]) + exp_of_difference(x_past, ref, ELEMENT)
                arriving = 1.0 / arrived.to(tl.float64)
    else:
        g = d * exp_of_difference(ref[:, None], v, ELEMENT)
        own = tl.exp(low - ref.to(tl.float64))
        arriving = own
        if PHASE != "resident":
            y_past = value_at(y, Y, at, ends[2], n, y_steps, R)
            arriving = tl.exp(ref.to(tl.float64) - y_past)
    if not WIDE:  # times weights down to e⁻²⁰, a small dy would be no normal number
        size = tl.max(tl.where(here, tl.abs(d), 0.0), 1)
        usual = usual & ((size == 0.0) | (size > _SMALL))
    if not FULL:
        g = tl.where(mask, g, 0.0)
    s = tl.cumsum(g, 1, reverse=False)
    if PHASE == "apply":
        brought = (carry * arriving).to(TYPE)
        s = tl.where(carried, s + brought[:, None], s)
        if Y == "n" and not WIDE:
            usual = usual & (~carried | (brought == 0.0) | (tl.abs(brought) > _SMALL))
    dx = tl.where(u == -_INFINITY, 0.0, e * s)
    c_first = own * arriving
    all_of_it = pick(s, first)
    s_first = own * all_of_it.to(tl.float64)
    # What overflows, or is not finite in dy, shows at the first place.
    usual = usual & (tl.abs(all_of_it) < _INFINITY)
    every = tl.min(tl.where(row_mask & ~usual, 0, 1), 0) == 1
    if every:
        if PHASE != "partial":
            put(out, OUT, dx, at, out_steps, R, C, FULL)
        if Y == "n" and PHASE != "resident" and EXACT:  # x loaded anew, as below
            x_first = value_at(x, X, at, ends[0], n, x_steps, R)
            own = grown(states, slot, slot >= 0, total, x_first, ref)
            c_first = own * arriving
            s_first = own * all_of_it.to(tl.float64)
    else:
        arriving_s = tl.zeros((R,), tl.float64)
        if PHASE == "apply":
            arriving_s = tl.where(carried, carry, 0.0)
        if Y == "n":
            before = tl.full((R,), -_INFINITY, tl.float64)
            sums = tl.zeros((R,), tl.float64)
            if PHASE != "resident":  # loaded anew, lest they take registers meanwhile
                before = tl.load(states + slot, cache_modifier=".cg")
                sums = tl.load(states + total + slot, cache_modifier=".cg")
            c_first, s_first = careful_log_sums(
                arrays, dy_steps, x_steps, out_steps, at, n, arriving_s, before, sums,
                DY, X, OUT, PHASE, FLIP, R, C,
            )  # fmt: skip
        else:
            c_first, s_first = careful_logs(
                arrays, dy_steps, x_steps, y_steps, out_steps, at, n, arriving_s,
                DY, X, Y, OUT, PHASE, FLIP, R, C,
            )  # fmt: skip
    return c_first, s_first


@triton.jit
def careful_logs(
    arrays, dy_steps, x_steps, y_steps, out_steps, at, n, arriving,
    DY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr,
    FLIP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FADES: tl.constexpr = False,
):  # fmt: skip
    """A tile whose y are far apart or not finite, by pairs in f64, in small steps: what they need
    is read again, so that the usual way keeps its registers. FADES: see `fading`, which takes
    registers that others do not have."""
    dy, x, y, out = arrays
    H: tl.constexpr = eighth(C)
    begin = tl.min(at[2], 0)
    factor = tl.full((R,), 1.0, tl.float64)
    s = arriving
    for step in range(0, C // H):
        low, here, ahead = small_step(at, begin, step, n, FLIP, C, H)
        index, mask, has_next = here[2], here[4], ahead[4]
        d = tl.broadcast_to(fetch(dy, DY, here, dy_steps, 0.0, True, False), (R, H))
        u = fetch(x, X, here, x_steps, 0.0, True, False)
        v = fetch(y, Y, here, y_steps, 0.0, True, False)
        c = ratio(v, fetch(y, Y, ahead, y_steps, 0.0, True, False))
        c = tl.broadcast_to(tl.where(has_next[None, :], c, 1.0), (R, H))
        d = tl.where(mask[None, :], d, 0.0)
        a, sums = tl.associative_scan((c, d), 1, fading if FADES else affine, reverse=False)
        sums += a * s[:, None]
        if FLIP:
            first = (index == low + H - 1)[None, :]
        else:
            first = (index == low)[None, :]
        s = pick(sums, first)
        factor = times(factor, pick(a, first)) if FADES else factor * pick(a, first)
        if PHASE != "partial":
            w = weight_below(u, v, width_of(dy.dtype.element_ty))
            dx = tl.where(u == -_INFINITY, 0.0, w * sums)
            tl.debug_barrier()  # threads that hold the same have loaded dy, which may be dx
            put(out, OUT, dx, here, out_steps, R, H, False)
    return factor, s


@triton.jit
def careful_log_sums(
    arrays, dy_steps, x_steps, out_steps, at, n, arriving, m0, e0,
    DY: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, PHASE: tl.constexpr,
    FLIP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, SMALL: tl.constexpr = 256,
):  # fmt: skip
    """The same where no y was given, but the state (m0, e0) before the tile. SMALL: so many
    elements a small step, of all rows."""
    dy, x, _y, out = arrays
    H: tl.constexpr = few(R, C, SMALL)
    COUNT: tl.constexpr = C // H
    begin = tl.min(at[2], 0)
    factor = tl.full((R,), 1.0, tl.float64)
    s = arriving
    lowest = tl.full((R, H), -_INFINITY, tl.float64)
    none = tl.zeros((R, H), tl.float64)
    # The state before each step, all of them in registers.
    number = tl.arange(0, COUNT)[None, :]
    tops = tl.zeros((R, COUNT), tl.float64)
    parts = tl.zeros((R, COUNT), tl.float64)
    m, e = m0, e0
    # Known when it runs only: else the assembler would unroll both loops.
    count = tl.cdiv(tl.minimum(n - begin, C), H).to(tl.int32)
    for step in range(0, count):
        tops = tl.where(number == step, m[:, None], tops)
        parts = tl.where(number == step, e[:, None], parts)
        low = begin + (count - 1 - step if FLIP else step) * H
        index = low + tl.arange(0, H)
        mask = index < n
        here = (at[0], at[1], index, at[3], mask)
        u = tl.broadcast_to(fetch(x, X, here, x_steps, 0.0, True, False), (R, H))
        u = tl.where(mask[None, :], u, lowest)
        top = tl.reduce(u, 1, larger)
        sums = tl.sum(tl.where(mask[None, :], ratio(u, top[:, None]), 0.0), 1)
        m, e = log_add(m, e, top, sums)
    for step in range(0, count):
        chosen = number == count - 1 - step
        m, e = pick(tops, chosen), pick(parts, chosen)
        far = begin if FLIP else begin + count * H - C
        low, here, ahead = small_step(at, far, step, n, FLIP, C, H)
        index, mask, has_next = here[2], here[4], ahead[4]
        if FLIP:
            first = (index == tl.minimum(low + H, n) - 1)[None, :]
        else:
            first = (index == low)[None, :]
        d = tl.broadcast_to(fetch(dy, DY, here, dy_steps, 0.0, True, False), (R, H))
        d = tl.where(mask[None, :], d, 0.0)
        u = tl.broadcast_to(fetch(x, X, here, x_steps, 0.0, True, False), (R, H))
        x_next = tl.broadcast_to(fetch(x, X, ahead, x_steps, 0.0, True, False), (R, H))
        begun = (tl.where(mask[None, :], u, lowest), tl.where(mask[None, :], 1.0, none))
        m1, e1 = tl.associative_scan(begun, 1, log_add, reverse=True)
        m1, e1 = log_add(m[:, None], e[:, None], m1, e1)
        # The state one step on: the same scan over what follows, begun with the first.
        begun = (
            tl.where(has_next[None, :], x_next, lowest),
            tl.where(has_next[None, :], 1.0, none),
        )
        m2, e2 = tl.associative_scan(begun, 1, log_add, reverse=True)
        m2, e2 = log_add(pick(u, first)[:, None], tl.full((R, 1), 1.0, tl.float64), m2, e2)
        m2, e2 = log_add(m[:, None], e[:, None], m2, e2)
        same = (m1 == m2) & (tl.abs(m1) == _INFINITY)
        c = tl.where(same, 1.0, ratio(m1, m2) * e1 / e2)
        c = tl.where(has_next[None, :], c, 1.0)
        a, sums = tl.associative_scan((c, d), 1, fading, reverse=False)
        sums += a * s[:, None]
        s = pick(sums, first)
        factor = times(factor, pick(a, first))
        if PHASE != "partial":
            w = weight_below(u, m1, width_of(dy.dtype.element_ty)) / e1
            w = tl.where(u == _INFINITY, float("nan"), w)
            dx = tl.where(u == -_INFINITY, 0.0, w * sums)
            tl.debug_barrier()
            put(out, OUT, dx, here, out_steps, R, H, False)
    return factor, s


@triton.jit
def grown(states, slot, there, total, x, ref):
    """exp(y − ref) at the place of x, from the state before it, in f64."""
    ref = ref.to(tl.float64)
    m = tl.load(states + slot, mask=there, other=-_INFINITY)
    e = tl.load(states + total + slot, mask=there, other=0.0)
    return e * tl.exp(m - ref) + tl.exp(x.to(tl.float64) - ref)


@triton.jit
def small_step(at, begin, step, n, FLIP: tl.constexpr, C: tl.constexpr, H: tl.constexpr):
    """H places of a tile of C, counted from its far end: the lowest, all of them from the far end
    on, and what follows each."""
    if FLIP:
        low = begin + step * H
        index = low + tl.arange(0, H)
        follows = index - 1
    else:
        low = begin + C - H - step * H
        index = low + (H - 1) - tl.arange(0, H)
        follows = index + 1
    mask = index < n
    has_next = mask & (follows >= 0) & (follows < n)
    here = (at[0], at[1], index, at[3], mask)
    return low, here, (at[0], at[1], follows, at[3], has_next)


@triton.constexpr_function
def width_of(dtype):
    """How exact a weight must be of what is computed in f64, whatever it is stored in."""
    return "f64" if dtype == tl.float64 else ""


@triton.constexpr_function
def eighth(c):
    return max(1, c // 8)


@triton.constexpr_function
def few(r, c, most):
    """Places of a small step of r rows that take many registers."""
    return min(eighth(c), max(1, most // r))


@triton.jit
def value_at(pointer, MODE: tl.constexpr, at, place, n, steps, R: tl.constexpr):
    """One value a row, f64, at a place of the axis; 0 where there is none."""
    index = place + tl.arange(0, 1)
    there = (at[0], at[1], index, at[3], (index >= 0) & (index < n))
    value = fetch(pointer, MODE, there, steps, 0.0, True, False)
    return tl.reshape(tl.broadcast_to(value, (R, 1)), (R,))
