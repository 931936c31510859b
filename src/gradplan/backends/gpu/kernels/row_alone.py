"""cummax and cummin of rows of some hundred elements: a warp takes a row alone.

A thread has a line of E neighbouring places. It keeps a bit a place, which tells whether a winner
begins there, by what x is before its line; then dy goes through the gates from the far end. What
goes from thread to thread are the extremum of a line, and what it does to an S that arrives.
"""

import triton.language as tl

from ..gluon import gl, gluon
from .line_scans import behind_gated, mask
from .stretches import extremum
from .tiles import cache_of, outer_offset, tile_row
from .walk_memory import columns_of, copy_layout, line_layout, lines_layout, lines_of, unpacked
from .walks import anew, differing, marked, with_bit, with_winner
from .winners import before_either, either

_INFINITY = tl.constexpr(float("inf"))


@gluon.jit
def scan_row_alone(
    dy,
    x,
    out,
    row_dims,
    row_dy,
    row_x,
    row_out,
    n,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    FLIP: tl.constexpr,
    E: tl.constexpr,
):
    """A row of 32 lines of E places, up to 32, both numbered in the order of the scan."""
    LINE: tl.constexpr = line_layout(False, 1, E, 1)
    LINES: tl.constexpr = lines_layout(False, 1, 1)
    COPY: tl.constexpr = copy_layout(False, 1, E, ELEMENT, 1)
    outer, row = tile_row(gl.program_id(0), row_dims, 1)
    line = gl.arange(0, 32, gl.SliceLayout(1, COPY))
    place = gl.arange(0, E, gl.SliceLayout(0, COPY))
    at = ((31 - line if FLIP else line) * E)[:, None] + place[None, :]
    x_at = x + (outer_offset(outer, row_dims, row_x) + row * row_x[0]) + at
    dy_at = dy + (outer_offset(outer, row_dims, row_dy) + row * row_dy[0]) + at
    CACHE: gl.constexpr = cache_of(False, True)
    raw_x = gl.load(x_at, eviction_policy=CACHE)
    raw_dy = gl.load(dy_at, eviction_policy=CACHE)
    u = turned(raw_x, E, LINE, LINES)
    largest = extremum(KIND, u[0])
    for j in gl.static_range(1, E):
        largest = either(largest, extremum(KIND, u[j]))
    _, m = gl.associative_scan((largest, gl.zeros_like(largest) - _INFINITY), 0, before_either)
    words = (gl.full([32, 1], 0, gl.int32, LINES),)
    for k in gl.static_range(0, E):
        value = extremum(KIND, u[E - 1 - k if FLIP else k])
        words = with_winner(words, value, m, TIES, k, 1)
        m = either(m, value)
    number = gl.arange(0, 32, gl.SliceLayout(1, LINES))[:, None]
    words = with_bit(words, number == 0, 0, 1)
    d = turned(raw_dy, E, LINE, LINES)
    total = gl.zeros_like(largest)
    for k in gl.static_range(E - 1, -1, -1):
        total = d[E - 1 - k if FLIP else k] + total
        total = gl.where(marked(words, k), 0.0, total)
    gain = mask(words[0] == 0)
    _, _, _, T = gl.associative_scan(
        (gain, total, gl.zeros_like(gain) - 1, gl.zeros_like(total)), 0, behind_gated, reverse=True
    )
    again = (anew(words[0], n),)
    results = ()
    for k in gl.static_range(E - 1, -1, -1):
        S = d[E - 1 - k if FLIP else k] + T
        T = gl.where(marked(again, k), 0.0, S)
        if FLIP:
            results = results + (differing(S, T),)
        else:
            results = (differing(S, T),) + results
    value = gl.reshape(lines_of(results, 1, 32, E), (32, E)).to(out.dtype.element_ty)
    value = gl.convert_layout(value, COPY)
    gl.store(out + (outer_offset(outer, row_dims, row_out) + row * row_out[0]) + at, value)


@gluon.jit
def turned(raw, E: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """What a warp read in runs, as columns of lines a thread each."""
    raw = unpacked(gl.convert_layout(raw, LINE)).to(gl.float32)
    return columns_of(gl.reshape(raw, (32, 1, E)), 1, 32, E, LINES)
