"""What the lines of a part do together to what arrives from behind, and the edges of a row.

Where rows begin anywhere, parts are of a row's run (see `ragged`). Its two edges are a line each of
one place a thread, read and written element by element.
"""

import triton
import triton.language as tl

from ..gluon import gl, gluon
from ..launch import interpreted
from .line_scans import behind_affine, behind_gated, behind_sum, mask
from .ragged import run_length
from .stretches import beats, extremum, larger
from .walk_memory import address_of, edge_word
from .winners import before_either, either

_INTERPRETED = tl.constexpr(interpreted())
_INFINITY = tl.constexpr(float("inf"))


@gluon.jit
def across(leaving, gain, MODE: tl.constexpr):
    """What each line and all behind it do to what arrives, [G, R], and what those behind it do
    alone: what is added, and a factor or a gate."""
    nothing = gl.zeros_like(leaving)
    if MODE == "sum":
        s, behind = gl.associative_scan((leaving, nothing), 0, behind_sum)
        return s, s, behind, behind
    elif MODE == "mark":
        s, behind = gl.associative_scan((leaving, nothing - _INFINITY), 0, before_either)
        return s, s, behind, behind
    elif MODE == "affine":
        a, s, b, behind = gl.associative_scan(
            (gain, leaving, nothing + 1.0, nothing), 0, behind_affine
        )
        return s, a, behind, b
    else:
        a, s, b, behind = gl.associative_scan(
            (gain, leaving, gl.zeros_like(gain) - 1, nothing), 0, behind_gated
        )
        return s, a, behind, b


@gluon.jit
def onward(s, a, arriving, MODE: tl.constexpr):
    """s + a · what arrives, of any shape and f64, in the type of s."""
    arriving = arriving.to(s.dtype)
    if MODE == "sum":
        return s + arriving
    elif MODE == "mark":
        return either(s, gl.zeros_like(s) + arriving)
    elif MODE == "affine":
        return s + a.to(s.dtype) * arriving
    else:
        return s + gl.where(a != 0, arriving, 0.0)


@triton.constexpr_function
def lowest(kind):
    """What no number is an extremum before."""
    return float("inf") if kind == "cummin" else -float("inf")


@gluon.jit
def all_have_read(NW: tl.constexpr):
    """All warps have: what they read may be where one of them writes."""
    if NW > 1 and not _INTERPRETED:
        gl.thread_barrier()


@gluon.jit
def edge_places(
    n, head, body, UP: tl.constexpr, BEHIND: tl.constexpr, V: tl.constexpr, LINES: tl.constexpr
):
    """The places of an edge before or BEHIND a run, from the far end on, [V, 1], which of them
    there are, and the first of them in memory."""
    number = gl.arange(0, V, gl.SliceLayout(1, LINES))[:, None]
    if BEHIND:
        first = head + body
        count = n - first
    else:
        first = head * 0
        count = head
    return first + (count - 1 - number if UP else number), number < count, first


@gluon.jit
def edge(
    dy, x, y, out, words, row_dims, row_dy, row_x, row_y, row_out, axis_dy, axis_x, axis_y,
    axis_out, n, head, body, tile, arriving, KIND: tl.constexpr, TIES: tl.constexpr,
    MODE: tl.constexpr, UP: tl.constexpr, BEHIND: tl.constexpr, TYPE: tl.constexpr,
    NW: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The gradients of an edge, or its marks, at which so much arrives, f64 [1]; returns what
    leaves it. Each warp works it out for itself."""
    V: tl.constexpr = run_length(x.dtype) if MODE == "mark" else run_length(out.dtype)
    place, there, first = edge_places(n, head, body, UP, BEHIND, V, LINES)
    if MODE == "mark":
        at, _ = address_of(tile, 0, place, n, row_dims, row_x, axis_x, False, 1)
        total = extremum(KIND, gl.load(x + at, mask=there, other=lowest(KIND)).to(TYPE))
        gain = total
    else:
        at, _ = address_of(tile, 0, place, n, row_dims, row_dy, axis_dy, False, 1)
        d = gl.load(dy + at, mask=there, other=0.0).to(TYPE)
        total = d
        gain = d
        if MODE == "affine":
            at, _ = address_of(tile, 0, place, n, row_dims, row_x, axis_x, False, 1)
            u = gl.load(x + at, mask=there, other=1.0).to(TYPE)
            nearer = place - 1 if UP else place + 1
            at, exists = address_of(tile, 0, nearer, n, row_dims, row_y, axis_y, False, 1)
            w = gl.load(y + at, mask=there & exists, other=1.0).to(TYPE)
            total = u * d
            gain = u
        elif MODE == "gate":
            word = gl.load(words + edge_word(tile, n, row_dims, BEHIND))
            wins = there & (((word >> gl.where(there, place - first, 0).to(gl.int32)) & 1) != 0)
            total = gl.where(wins, 0.0, d)
            gain = mask(~wins)
    all_s, all_a, behind, passes = across(total, gain, MODE)
    last = gl.arange(0, V, gl.SliceLayout(1, LINES))[:, None] == V - 1
    left = onward(all_s.to(gl.float64), all_a, arriving[None, :], MODE)
    T = onward(behind, passes, arriving[None, :], MODE)
    if MODE == "mark":
        wins = there & (beats(TIES, total, T) | (place == (n - 1 if UP else 0)))
        bit = gl.full([V, 1], 1, gl.int32, LINES) << gl.where(there, place - first, 0).to(gl.int32)
        word = gl.sum(gl.sum(gl.where(wins, bit, 0), 0), 0)
        gl.store(words + edge_word(tile, n, row_dims, BEHIND), word)
        return gl.reduce(gl.where(last, left, -_INFINITY), 0, larger)
    else:
        value = d + T
        if MODE == "affine":
            value = w * value
        elif MODE == "gate":
            value = gl.where(wins, value, 0.0)
        element: tl.constexpr = out.dtype.element_ty
        if element == gl.bfloat16 or element == gl.float16:
            value = value.to(gl.float32)
        at, _ = address_of(tile, 0, place, n, row_dims, row_out, axis_out, False, 1)
        all_have_read(NW)
        gl.store(out + at, value.to(element), mask=there)
        return gl.sum(gl.where(last, left, 0.0), 0)
