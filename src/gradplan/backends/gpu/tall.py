"""The launches of the engine *row state then map* for a long axis beside few rows (`kernels.tall`,
`kernels.tall_products`), and when they are for a problem."""

from __future__ import annotations

from math import gcd
from typing import Any

from ...kinds import OpCategory, ReduceKind, SoftmaxKind
from .launch import WORKSPACE, Int, Pointer, Step, all_registers
from .program import Program, integer, up
from .row_tiles import COUNTS, Rows
from .table import Table

__all__ = ["program", "workspace_bytes"]

_FILLED = 0.85
"""A line that fills so much of its lanes is long enough."""
_SHORTEST = 1024
"""Lanes of a line at least."""
_LINES = 16
"""Lines of a chunk at least, so that what its program leaves is little beside what it reads."""
_TOGETHER = 64
"""Bytes of an operand that a thread reads at a time."""
_FOLDED = 1024
"""Lanes that are added up at a time, where rows repeat along a line."""
_ROWS, _CHUNKS = 4, 1024
"""Rows, and chunks, whose states are joined at a time."""
_STAGES = 3
"""A group of lines is summed while the next ones, fewer than so many, are on their way: one less
where a processor has no room for them."""
_FEW = 4
"""Lines of a program of the last launch, where nothing is joined."""
_NARROW, _NARROW_BYTES = 2048, 8192
"""Lanes of a line at most, and bytes, of which bits are left, or whose products are kept."""
_SLOTS, _NUMBERS = {ReduceKind.PROD: 3}, {ReduceKind.PROD: 6}
"""Numbers of a state, otherwise one, and of a row, otherwise three."""
_BITS = 8
"""Lines whose elements leave a bit each in a word."""
_PAIRS = 2
"""Products of two factors that are multiplied before their exponents are taken out."""
_QUOTIENTS = 80
"""Registers of what gives the gradients of products: with 72, the assembler's choice, halves keep 8
bytes on the stack of an sm_100."""
_ENOUGH = 1024
"""Lines at least: below, three launches take longer than what they save."""
_JOIN_WARPS = 8
_LINED = "row_dims row_dy row_x row_y"
_SIZES = "n width chunks each"
_NAMES = {
    "tall.tall_states": (
        f"dy x y room states {_LINED} {_SIZES}",
        "KIND ELEMENT DY X Y STAGES L G F H EARLY",
    ),
    "tall.tall_marks": (
        f"x y room states bits row_dims row_x row_y {_SIZES}",
        "ELEMENT Y PAIRS STAGES L F H EARLY",
    ),
    "tall.tall_numbers": (
        "dy y states joined row_dims row_dy row_y p q chunks total",
        "KIND TIES ELEMENT DY Y R K EARLY",
    ),
    "tall.tall_map": (
        f"dy x y out joined {_LINED} row_out {_SIZES} total",
        "KIND ELEMENT DY X Y STAGES L G EARLY",
    ),
    "tall.tall_shares": (f"out joined bits row_dims row_out {_SIZES}", "ELEMENT STAGES L EARLY"),
    "tall_products.tall_products": (
        f"x room states row_dims row_x {_SIZES}",
        "ELEMENT STAGES L G F H EARLY",
    ),
    "tall_products.tall_product_numbers": (
        "dy states joined row_dims row_dy p q chunks total",
        "ELEMENT DY R K EARLY",
    ),
    "tall_products.tall_quotients": (
        f"dy x out joined row_dims row_dy row_x row_out {_SIZES} total",
        "ELEMENT DY STAGES L G EARLY",
    ),
}
"""The arguments and the constants of the kernels."""
_BY_ROW = ("r", "u", "n")
_SUMS = ("tall.tall_states", "tall.tall_numbers", "tall.tall_map")
_WAYS = {
    ReduceKind.MAX: ("tall.tall_marks", "tall.tall_numbers", "tall.tall_shares"),
    ReduceKind.MIN: ("tall.tall_marks", "tall.tall_numbers", "tall.tall_shares"),
    ReduceKind.PROD: (
        "tall_products.tall_products",
        "tall_products.tall_product_numbers",
        "tall_products.tall_quotients",
    ),
}
"""The launches of a kind: states of chunks, numbers of rows, gradients."""


def program(rows: Rows, p: float, q: float) -> Program | None:
    """None where this is not for a problem that lies so."""
    table: Table = rows.table
    geometry, modes, item = rows.geometry, rows.modes, rows.item
    reduction = rows.desc.category is OpCategory.REDUCTION
    met = (1,) if reduction else (0, 2)
    fit = table.tall_programs[0] > 0 and rows.columns and not rows.ordered
    fit = fit and rows.many == 1 and all(modes[k] == "c" for k in (*met, 3))
    if not fit or not all(modes[k] in _BY_ROW for k in range(3) if k not in met):
        return None
    wide, blocks = rows.beside.extent, rows.beside_tiles
    lying = [k for k, mode in enumerate(modes) if mode == "c"]
    if any(geometry.axis.dims[0].strides[k] != wide for k in lying):  # in one run
        return None
    run = 16 // item
    if any(dim.strides[k] % run for k in lying for dim in geometry.rows.dims[1:]):
        return None
    marked = rows.desc.op in COUNTS
    longest = table.tall_bytes // item
    if marked or rows.product:
        longest = min(longest, _NARROW, _NARROW_BYTES // item)
    lanes, width = _line(wide, run, longest)
    count = rows.n * wide // width if width else 0
    most = table.tall_programs[item > 2]
    if count < _LINES or count * blocks < min(_ENOUGH, _LINES * most) or blocks > most:
        return None
    # Exponentials take registers: a thread has fewer lanes.
    most_warps = 32 if rows.desc.op == SoftmaxKind.LOG_SOFTMAX else 16
    warps = min(most_warps, max(1, lanes // (32 * run)))
    together = max(1, _TOGETHER // item * 32 * warps // lanes // len(met))
    if marked:
        together = _BITS
    elif rows.product:
        together = 2 * _PAIRS
    whole = count // together
    each = max(-(-_LINES // together), -(-whole * blocks // most))
    chunks = -(-whole // each)
    few = -(-_FEW // together)
    pieces = -(-whole // few)
    slots, numbers = _SLOTS.get(rows.desc.op, 1), _NUMBERS.get(rows.desc.op, 3)
    states = _aligned(8 * slots * blocks * chunks * width)
    joined = states + _aligned(8 * slots * blocks * chunks * wide)
    bits = joined + _aligned(8 * numbers * blocks * wide)
    words = blocks * -(-rows.n * wide // (width * _BITS)) * width if marked else 0
    folded = up(min(wide, _FOLDED))
    room = {
        "room": Pointer(WORKSPACE, "fp64"),
        "states": Pointer(WORKSPACE, "fp64", states),
        "joined": Pointer(WORKSPACE, "fp64", joined),
        "bits": Pointer(WORKSPACE, "u8", bits),
    }
    given = {
        **dict(rows.pointers),
        **room,
        **dict(geometry.arguments()),
        "n": integer(rows.n),
        "width": Int(width, "i32"),
        "p": p,
        "q": q,
        "total": Int(blocks * wide),
    }
    constants = {
        **dict(rows.constants),
        "PAIRS": rows.desc.element in table.paired,
        "L": lanes,
        "G": together,
        "F": max(1, _FOLDED // folded),
        "H": folded,
        "R": _ROWS,
        "K": _CHUNKS // (4 if rows.product else 1),  # whose parts take registers
        "EARLY": table.early,
    }
    aligned = ("width", *(f"row_{geometry.names[k]}:1" for k in lying))
    first, second, last = _WAYS.get(rows.desc.op, _SUMS)

    def step(kernel: str, grid: int, parts: int, each: int, stages: int = 1) -> Step:
        names, own = _NAMES[kernel]
        own_warps = _JOIN_WARPS if kernel == second else warps
        here = {**given, "chunks": Int(parts, "i32"), "each": Int(each, "i32")}
        fixed = {**constants, "STAGES": stages}
        fewest = _QUOTIENTS if rows.product and kernel == last else 0
        return Step(
            kernel=kernel,
            grid=grid,
            arguments=tuple((name, here[name]) for name in names.split()),
            constants=tuple((name, fixed[name]) for name in own.split()),
            warps=own_warps,
            registers=all_registers(own_warps) if own_warps > 8 else fewest,
            alignment=run,
            aligned=aligned,
            early=table.early and kernel != first,
        )

    # By way of shared memory where the compiler would wait for a line before it asks for the next.
    ahead = 2 if marked or rows.desc.op == SoftmaxKind.LOG_SOFTMAX else 1
    group = together * lanes * item * (1 if reduction else 2)
    stages = _STAGES if (_STAGES - 1) * group <= table.tall_room else _STAGES - 1
    steps = (
        step(first, blocks * chunks, chunks, each, stages),
        step(second, blocks * -(-wide // _ROWS), chunks, each),
        step(last, blocks * pieces, pieces, few, ahead),
    )
    twice = ("x",) if reduction else ("dy", "y")
    if rows.desc.op == SoftmaxKind.LOG_SOFTMAX:
        twice = ("dy",)
    return Program(
        steps=steps,
        runner=None,
        workspace_bytes=bits + words,
        reads={} if marked else dict.fromkeys(twice, 2),
        layout="columns",
        variant="tall",
        why=("a place" if width == wide else f"{width // wide} places")
        + f" of all rows, {width} elements, make a line, and {each * together} lines a chunk, "
        "whose states are joined in order: "
        + ("one read, and a bit an element" if marked else "two reads"),
    )


def _aligned(size: int) -> int:
    """So that 16 divides the address of what comes behind: otherwise nothing is claimed of any."""
    return -(-size // 16) * 16


def _line(wide: int, run: int, most: int) -> tuple[int, int]:
    """Lanes, a power of two, and how many of them a line has: a multiple of all rows, and of 16
    bytes; none if there is no such line."""
    least = wide * (run // gcd(run, wide))
    found = (0, 0)
    lanes = min(_SHORTEST, most)
    while lanes <= most:
        width = lanes // least * least
        if width * found[0] > found[1] * lanes or (width and not found[0]):
            found = (lanes, width)
        if width >= _FILLED * lanes:
            break
        lanes *= 2
    return found


def workspace_bytes(desc: Any, n: int, rows: int, table: Table) -> int:
    """The most workspace that any layout needs here."""
    item: int = desc.element.size_bytes
    most = table.tall_bytes // item
    programs = 2 * table.tall_programs[item > 2]
    if not programs or n * rows < _LINES * min(_SHORTEST, most) // 2:
        return 0
    # A chunk has so many lines that what is left of it is less than so much of it.
    lines = min(programs * most, 2 * rows * n // _LINES + most)
    words = rows * n // _BITS + programs * most if desc.op in COUNTS else 0
    left = _SLOTS.get(desc.op, 1) * (lines + programs * min(rows, most))
    return 8 * (left + _NUMBERS.get(desc.op, 3) * rows) + words + 3 * 16
