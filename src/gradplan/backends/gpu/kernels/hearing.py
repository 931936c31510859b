"""Words that programs tell each other: each is its own flag, all bits 1 until it is told.

Nobody waits for more than the very words that it needs, and asks for them before it does.
"""

import triton
import triton.language as tl

from ..gluon import gl, gluon
from ..launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@gluon.jit
def overheard(words, needed, BITS: tl.constexpr):
    """What has been told so far, of so many bits; 0 where nothing is needed."""
    if _INTERPRETED:
        told = gl.load(words, mask=needed != 0, other=0)
        return told.to(gl.int64 if BITS == 64 else gl.int32, bitcast=True)
    else:
        return gl.inline_asm_elementwise(
            overhearing(BITS),
            "=&l,l,r" if BITS == 64 else "=&r,l,r",
            [words.to(gl.int64), needed],
            dtype=gl.int64 if BITS == 64 else gl.int32,
            is_pure=False,
            pack=1,
        )


@triton.constexpr_function
def overhearing(bits):
    return (
        f"{{ .reg .pred needed; setp.ne.s32 needed, $2, 0; mov.b{bits} $0, 0; "
        f"@needed ld.relaxed.gpu.global.b{bits} $0, [$1]; }}"
    )


@gluon.jit
def hear(words, heard, EACH: tl.constexpr, STEP: tl.constexpr = 0):
    """The same when all has been told; a thread asks for so many at once, so many bytes apart if
    that is known."""
    BITS: tl.constexpr = heard.dtype.primitive_bitwidth
    if _INTERPRETED:  # one program after the other: what it waits for is its own
        now = gl.load(words, mask=heard == -1, other=0).to(heard.dtype, bitcast=True)
        return gl.where(heard == -1, now, heard)
    else:
        return gl.inline_asm_elementwise(
            asking(EACH, BITS, STEP),
            asked(EACH, BITS),
            [words.to(gl.int64), heard],
            dtype=heard.dtype,
            is_pure=False,
            pack=EACH,
        )


@triton.constexpr_function
def asking(count, bits, step):
    """Load again each of `count` words that has not been told, until all have."""
    lines = [".reg .pred again, missing;"]
    lines += [f"mov.b{bits} ${k}, ${2 * count + k};" for k in range(count)]
    lines += ["ask:", f"setp.eq.s{bits} again, $0, -1;"]
    lines += [f"setp.eq.or.s{bits} again, ${k}, -1, again;" for k in range(1, count)]
    lines += ["@!again bra heard;"]
    for k in range(count):
        lines += [f"setp.eq.s{bits} missing, ${k}, -1;"]
        where = f"${count}+{k * step}" if step else f"${count + k}"
        lines += [f"@missing ld.relaxed.gpu.global.b{bits} ${k}, [{where}];"]
    lines += ["bra ask;", "heard:"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def asked(count, bits):
    """The constraints of that."""
    word = "l" if bits == 64 else "r"
    return ",".join([f"=&{word}"] * count + ["l"] * count + [word] * count)
