"""Waves, as `held_scans` has them: what a part tells of itself, and what arrives at one from all
that others told.
"""

import triton
import triton.language as tl

from ..gluon import gl, gluon
from .line_scans import both_added
from .stretches import larger

_INFINITY = tl.constexpr(float("inf"))
_SOME_NAN = tl.constexpr(0x7FF8 << 48)


@gluon.jit
def tell_last(target, values, gates, GATED: tl.constexpr, G: tl.constexpr, LINES: tl.constexpr):
    """Tell what the last of the lines has, which no reader takes for what is not told yet; a gate
    is the last bit of what is told."""
    values = values.to(gl.float64)
    bits = values.to(gl.int64, bitcast=True)
    bits = gl.where(values != values, _SOME_NAN, bits)
    if GATED:
        bits = (bits & -2) | (gates & 1).to(gl.int64)
    number = gl.arange(0, G, gl.SliceLayout(1, LINES))[:, None]
    gl.atomic_xchg(target + number * 0, bits, mask=number == G - 1, sem="relaxed", scope="gpu")


@gluon.jit
def arrived_from(
    heard_s, heard_a, lane, needed, base, first, programs, units, parts, before, MODE: tl.constexpr
):
    """What arrives at this program's part of a wave, and at the wave after it, where `before`
    arrived at this one: by all that was told in it since the row began, in order."""
    # The last bit is a gate, which would make a NaN of an infinity.
    s = (heard_s & -2 if MODE == "gate" else heard_s).to(gl.float64, bitcast=True)
    a = heard_a.to(gl.float64, bitcast=True)
    mine = base + first
    end = gl.minimum(base + programs, units)
    own = mine - mine % parts - base  # lane of the row's first part
    next_own = end - end % parts - base
    for_me = (needed != 0) & (lane >= own) & (lane < first)
    for_next = (needed != 0) & (lane >= next_own)
    if MODE == "sum":
        here, there = gl.reduce(
            (gl.where(for_me, s, 0.0), gl.where(for_next, s, 0.0)), 0, both_added
        )
        here = gl.where(own < 0, here + before, here)
        there = gl.where(next_own < 0, there + before, there)
    elif MODE == "mark":
        here, there = gl.reduce(
            (gl.where(for_me, s, -_INFINITY), gl.where(for_next, s, -_INFINITY)), 0, both_larger
        )
        here = gl.where(own < 0, larger(here, before), here)
        there = gl.where(next_own < 0, larger(there, before), there)
    elif MODE == "gate":
        # What arrives was added since the last part that lets nothing through, or a row began.
        shut = (needed != 0) & (((heard_s & 1) == 0) | ((base + lane) % parts == 0))
        shut_me, shut_next = gl.reduce(
            (gl.where(shut & (lane < first), lane, -1), gl.where(shut, lane, -1)), 0, both_last
        )
        here, there = gl.reduce(
            (
                gl.where(for_me & (lane >= shut_me), s, 0.0),
                gl.where(for_next & (lane >= shut_next), s, 0.0),
            ),
            0,
            both_added,
        )
        here = gl.where((own < 0) & (shut_me < 0), here + before, here)
        there = gl.where((next_own < 0) & (shut_next < 0), there + before, there)
    else:
        begins = ((base + lane) % parts == 0) & (needed != 0)
        a = gl.where(needed != 0, a, 1.0)
        s = gl.where(needed != 0, s, 0.0)
        goes_on, a, s = gl.associative_scan((gl.where(begins, 0, 1), a, s), 0, in_turn)
        mine_last, wave_last = lane == first - 1, lane == programs - 1
        here, here_a, here_on, there, there_a, there_on = gl.reduce(
            (
                gl.where(mine_last, s, 0.0),
                gl.where(mine_last, a, 0.0),
                gl.where(mine_last, goes_on, 0),
                gl.where(wave_last, s, 0.0),
                gl.where(wave_last, a, 0.0),
                gl.where(wave_last, goes_on, 0),
            ),
            0,
            all_added,
        )
        here = gl.where(here_on != 0, here + here_a * before, here)
        here = gl.where(first > 0, here, before)
        here = gl.where(mine % parts == 0, 0.0, here)
        there = gl.where(there_on != 0, there + there_a * before, there)
        there = gl.where(end % parts == 0, 0.0, there)
    return here, there


@triton.jit
def in_turn(g1, a1, s1, g2, a2, s2):
    """Parts one after the other; where g is 0 a row begins, and nothing goes through."""
    return g1 & g2, tl.where(g2 != 0, a1 * a2, a2), tl.where(g2 != 0, s2 + a2 * s1, s2)


@triton.jit
def all_added(s1, a1, g1, s2, a2, g2, s3, a3, g3, s4, a4, g4):
    return s1 + s3, a1 + a3, g1 + g3, s2 + s4, a2 + a4, g2 + g4


@triton.jit
def both_larger(a1, b1, a2, b2):
    return larger(a1, a2), larger(b1, b2)


@triton.jit
def both_last(a1, b1, a2, b2):
    return tl.maximum(a1, a2), tl.maximum(b1, b2)
