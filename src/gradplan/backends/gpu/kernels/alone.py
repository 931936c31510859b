"""cummax and cummin of short rows that lie side by side: a thread takes whole rows alone.

It runs through x in the order of the scan and keeps a bit a place, which tells whether a winner
begins there; then through dy from the far end. Neighbouring threads take neighbouring rows, so each
place is read in one run; nothing goes from thread to thread, and y is not read.
"""

import triton
import triton.language as tl

from ..gluon import gl, gluon
from ..launch import interpreted
from .stretches import beats, extremum
from .tiles import outer_offset, tile_row
from .walk_memory import unpacked
from .winners import either

_INTERPRETED = tl.constexpr(interpreted())


@gluon.jit
def scan_alone(
    dy,
    x,
    out,
    row_dims,
    row_dy,
    row_x,
    row_out,
    axis_dy,
    axis_x,
    axis_out,
    n,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ELEMENT: tl.constexpr,
    FLIP: tl.constexpr,
    PAIRS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    NW: tl.constexpr,
    FULL: tl.constexpr,
):
    """R rows of up to C places. PAIRS: halves, which are compared two at a time."""
    LANES: tl.constexpr = gl.BlockedLayout([max(1, R // (32 * NW))], [32], [NW], [0])
    TYPE: tl.constexpr = gl.float64 if ELEMENT == "f64" else gl.float32
    outer, first = tile_row(tl.program_id(0), row_dims, R)
    rows = first + gl.arange(0, R, LANES)
    row_mask = rows < row_dims[0]
    # Places are numbered in the order of the scan, which the recurrence goes through backwards;
    # the last of a shorter row stands for those beyond it too.
    at, step = start_of(x, outer, rows, row_dims, row_x, axis_x, n, FLIP)
    u = ()
    for k in gl.static_range(0, C):
        u = u + (gl.load(at) if FULL else gl.load(at, mask=row_mask, other=0.0),)
        at += step if FULL else gl.where(k + 1 < n, step, 0)
    words = winners_of(u, KIND, TIES, ELEMENT, TYPE, PAIRS, R, C, LANES)
    at, step = start_of(dy, outer, rows, row_dims, row_dy, axis_dy, n, FLIP)
    at += (n - 1) * step
    d = ()
    for k in gl.static_range(C - 1, -1, -1):
        d = (gl.load(at) if FULL else gl.load(at, mask=row_mask, other=0.0),) + d
        at -= step if FULL else gl.where(k < n, step, 0)
    at, step = start_of(out, outer, rows, row_dims, row_out, axis_out, n, FLIP)
    at += (n - 1) * step
    T = gl.full([R], 0.0, TYPE, LANES)
    for k in gl.static_range(C - 1, -1, -1):
        S = unpacked(d[k]).to(TYPE) + T
        T, value = parted(S, words[k // 16], k % 16)
        value = value.to(out.dtype.element_ty)
        if FULL:
            gl.store(at, value)
            at -= step
        else:
            T = gl.where(k < n, T, 0.0)
            gl.store(at, value, mask=row_mask & (k < n))
            at -= gl.where(k < n, step, 0)


@gluon.jit
def start_of(pointer, outer, rows, row_dims, row_steps, axis_steps, n, FLIP: tl.constexpr):
    """Where the scan of each row starts, and how far it is to the next place."""
    base = pointer + (outer_offset(outer, row_dims, row_steps) + rows)
    step = axis_steps[0]
    if FLIP:
        return base + (n - 1).to(gl.int64) * step, -step
    else:
        return base, step


@gluon.jit
def winners_of(
    u, KIND: tl.constexpr, TIES: tl.constexpr, ELEMENT: tl.constexpr, TYPE: tl.constexpr,
    PAIRS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Words of 16 bits, one a place: whether it wins over those before it."""
    words = ()
    # The first place is a winner whatever it holds.
    word = gl.full([R], 1, gl.int16, LANES)
    m = u[0] if PAIRS else extremum(KIND, unpacked(u[0]).to(TYPE))
    for k in gl.static_range(1, C):
        if k % 16 == 0:
            words = words + (word.to(gl.int32),)
            word = gl.full([R], 0, gl.int16, LANES)
        if PAIRS:
            m, word = gl.inline_asm_elementwise(
                paired(KIND, TIES, ELEMENT, k % 16), "=r,=r,r,r,r", [u[k], m, word],
                dtype=(m.dtype, gl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            value = extremum(KIND, unpacked(u[k]).to(TYPE))
            word = gl.where(beats(TIES, value, m), word | one_bit(k % 16), word)
            m = either(m, value)
    return words + (word.to(gl.int32),)


@triton.constexpr_function
def one_bit(number):
    return 1 << number if number < 15 else -(1 << 15)


@triton.constexpr_function
def paired(kind, ties, element, number):
    """Of two rows: the running extremum with one more place, and a bit of each where that wins, as
    `beats` says."""
    type_ = element + "x2"
    code = "{ .reg .b32 wins, a, b, m; "
    if ties == "first":
        code += f"set.{'lt' if kind == 'cummin' else 'gt'}.u32.{type_} wins, $2, $3; "
        code += f"set.nan.u32.{type_} a, $2, $2; set.num.u32.{type_} b, $3, $3; "
        code += "and.b32 a, a, b; "
    else:
        code += f"set.{'le' if kind == 'cummin' else 'ge'}.u32.{type_} wins, $2, $3; "
        code += f"set.nan.u32.{type_} a, $2, $2; "
    code += f"{'min' if kind == 'cummin' else 'max'}.NaN.{type_} m, $3, $2; "
    code += "or.b32 wins, wins, a; "
    code += f"and.b32 wins, wins, {hex(0x10001 << number)}; or.b32 $1, $4, wins; "
    return code + "mov.b32 $0, m; }"


@gluon.jit
def parted(s, word, BIT: tl.constexpr):
    """What goes on to the place before, and what the place has: S or 0, by a bit. By an
    assembler's hand, lest the compiler choose among halves once they are rounded, one by one."""
    if _INTERPRETED or s.dtype == gl.float64:
        wins = (word & (1 << BIT)) != 0
        return gl.where(wins, 0.0, s), gl.where(wins, s, 0.0)
    else:
        return gl.inline_asm_elementwise(
            parting(BIT), "=&r,=r,r,r", [s, word], dtype=(gl.float32, gl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.constexpr_function
def parting(number):
    return (
        f"{{ .reg .pred wins; .reg .b32 bit; and.b32 bit, $3, {hex(1 << number)}; "
        "setp.ne.b32 wins, bit, 0; selp.b32 $0, 0, $2, wins; xor.b32 $1, $0, $2; }"
    )
