"""Ahead of time: every kernel variant compiled for each architecture, without a GPU.

`python -m gradplan.backends.gpu.aot` compiles what the problems below lead to, and fails where a
kernel does not compile, keeps part of f32, f16 or bf16 work on the stack (local memory: slow), or
wants more shared memory than the architecture has. The problems are chosen so that every kind,
element and option meets every variant; what is left open are powers of two in between.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from ... import cases
from ...descriptors import Operand
from ...geometry import c_strides, told_strides
from ...kinds import BinaryKind, ElementKind, OpCategory, ReduceKind
from ...registry import ELEMENTS, KINDS, KindSpec
from . import launch, learned, programs
from .program import Program
from .table import table_of

__all__ = ["ARCHITECTURES", "Built", "Variant", "build", "main", "quick", "variants"]

ARCHITECTURES = (80, 90, 100)
# Bytes of shared memory that one program may have.
_SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

Axes = tuple[int, ...]
Shape = tuple[int, ...]

# Shapes and axes, one line a reason. Extents that 16 divides and others, since the compiler is
# told which; more than 2³¹ elements, which are counted in 64 bits.
_SHAPES: tuple[tuple[Shape, Axes], ...] = (
    ((4096, 64), (1,)),  # many short rows to a program
    ((4096, 100), (1,)),
    ((1024, 1000), (1,)),  # a row in registers
    ((512, 1024), (1,)),  # a row that a warp takes alone, of cummax and cummin
    ((1024, 8192), (1,)),  # the longest of them
    ((512, 40000), (1,)),  # rows enough to fill the machine, too long for registers
    ((512, 40001), (1,)),
    ((2, 3_000_000), (1,)),  # rows split over programs
    ((3, 2**31 + 64), (1,)),
    ((64, 4096), (0,)),  # columns in registers
    ((1000, 4096), (0,)),
    ((40_000, 300_000), (0,)),  # columns tile by tile
    ((300_000, 18), (0,)),  # columns split over programs
    ((8192, 4096), (0,)),  # columns whose programs wait for each other
    ((512, 2100, 8), (1,)),  # ... in clusters
    ((8, 50, 7), (1,)),  # an axis in the middle
    ((33, 1040, 256), (1,)),  # strips of a scan that are walked, narrow ones and others
)
# What one kind or element alone needs to meet a variant; the subset does without.
_MORE_SHAPES: tuple[tuple[Shape, Axes], ...] = (
    ((512, 32768), (1,)),  # the longest rows in registers
    ((512, 70_000), (1,)),  # too long for registers in bfloat16 too
    ((512, 131072), (1,)),  # ... in full parts
    ((512, 49152), (1,)),
    ((300, 4096), (1,)),  # products of f32 that are f64
    ((2, 3, 2**20), (2,)),  # rows of rows, where a gap keeps them apart, whose parts are held
    ((12, 4096), (0,)),  # columns that log-cumsum-exp keeps where y is absent
    ((33, 1040, 254), (1,)),  # strips of a scan that are copied by 4 or 8 bytes
    ((8192, 4095), (0,)),  # columns that begin anywhere
    ((300_000, 100), (0,)),  # few columns, in lines
    ((300_000, 680), (0,)),  # ... in lines as long as they may be
    ((2**20, 65), (0,)),  # ... of which scans take one row after the others
    ((64, 57_421), (1,)),  # few rows that begin anywhere, in parts half as large
    ((131, 135_395), (1,)),  # ... and long ones, in parts twice as large
    ((2, 262_145), (1,)),  # products in small parts that are read twice
)
_MANY_AXES: tuple[tuple[Shape, Axes], ...] = (
    ((64, 32, 48), (0, 2)),
    ((300, 7, 400), (0, 2)),
    ((5, 6, 7), (0, 1, 2)),
)
_TABLES: tuple[tuple[Shape, Axes], ...] = (  # (indices, dim, rows)
    ((100_000, 64, 50_000), ()),
    ((1000, 1000, 100), ()),
    ((300, 3, 10), ()),
    ((500, 300, 1000), ()),
    ((256, 128, 1000), ()),
    ((0, 64, 10), ()),
    ((2**31 + 64, 2, 1000), ()),
)


def _packed(operand: Operand) -> Shape:
    return c_strides(operand.shape)


_PIECES = (2,) * 8


def _pieces(operand: Operand) -> Shape:
    """Of an embedding with 256 indices: positions in eight dimensions, with a gap behind each."""
    steps = c_strides(operand.shape)
    if operand.output:
        return steps
    return (*(3**k * steps[0] for k in reversed(range(len(_PIECES)))), *steps[1:])


def _gapped(operand: Operand) -> Shape:
    """A gap behind every extent: nothing merges."""
    return c_strides(tuple(extent + 16 for extent in operand.shape))


def _strided(operand: Operand) -> Shape:
    return tuple(3 * step for step in c_strides(operand.shape))


def _turned(operand: Operand) -> Shape:
    """Inputs transposed, outputs not."""
    if operand.output:
        return c_strides(operand.shape)
    return c_strides(operand.shape[::-1])[::-1]


def _shared(operand: Operand) -> Shape:
    """Inputs that repeat along their first axis."""
    steps = c_strides(operand.shape)
    return steps if operand.output or operand.name == "indices" else (0, *steps[1:])


_OTHER_LAYOUTS: tuple[Callable[[Operand], Shape], ...] = (_gapped, _strided, _turned, _shared)


@dataclass(frozen=True)
class Variant:
    """A kernel to be compiled, and the problem that leads to it."""

    step: launch.Step
    pointer_bytes: int
    element: ElementKind
    problem: str

    @property
    def key(self) -> tuple[Any, ...]:
        return launch._variant(self.step, self.pointer_bytes)


@dataclass(frozen=True)
class Built:
    """What came of compiling a variant."""

    variant: Variant
    arch: int
    error: str = ""
    registers: int = 0
    stack: int = 0
    shared: int = 0
    idle: tuple[str, ...] = ()
    """Barriers that nobody uses."""
    hasty: bool = False
    """Whether it begins early, and looks at memory before it waits."""

    @property
    def fault(self) -> str:
        """What is wrong, or nothing."""
        if self.error:
            return self.error
        if self.stack and self.variant.element is not ElementKind.F64:
            return f"{self.stack} bytes of stack"
        if self.shared > _SHARED_LIMIT.get(self.arch, self.shared):
            return f"{self.shared} bytes of shared memory"
        if self.idle:
            return f"barriers that nobody uses: {', '.join(self.idle)}"
        return "it begins early, and does not wait first" if self.hasty else ""


def _options(spec: KindSpec, element: ElementKind) -> list[cases.Options]:
    """The options that are compiled in."""
    asked = cases.options_of(spec, element)
    if spec.correction:
        return asked[:1]
    if spec.kind is BinaryKind.LERP:
        return [asked[0], asked[-1], ({"param": 1e-35}, ())]
    if spec.category is OpCategory.EMBEDDING:
        return [options for options in asked if options[0]["padding_idx"] is None]
    return asked


def _drawn(spec: KindSpec, *facts: Any) -> int:
    """A number of a problem's own: one more changes nothing in those of the others."""
    text = " ".join(map(str, (spec.category, spec.kind, *facts)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _problems(more: bool = True) -> Iterator[Any]:
    """Every kind, element and option with every shape, packed and in one other layout each."""
    for spec in KINDS.values():
        embedding = spec.category is OpCategory.EMBEDDING
        shapes = _TABLES if embedding else _SHAPES + (_MORE_SHAPES if more else ())
        if spec.category is OpCategory.REDUCTION:
            shapes += _MANY_AXES
        for element in ELEMENTS:
            for options in _options(spec, element):
                for shape in shapes:
                    yield spec, element, options, shape, _packed
                    drawn = _drawn(spec, element, options, shape)
                    yield spec, element, options, shape, _OTHER_LAYOUTS[drawn % 4]
                    if embedding and shape[0][0] == prod(_PIECES):
                        yield spec, element, options, shape, _pieces


def _strides(
    desc: Any, without: Sequence[str], layout: Callable[[Operand], Shape]
) -> dict[str, Shape]:
    """The strides of every array given."""
    if layout is _pieces:
        return {operand.name: layout(operand) for operand in desc.operands}
    return {
        operand.name: told_strides(operand.shape, layout(operand))
        for operand in desc.operands
        if operand.name not in without
    }


def _positions(layout: Callable[[Operand], Shape]) -> Shape | None:
    """The shape of an embedding's indices, where they have more than one dimension."""
    return _PIECES if layout is _pieces else None


def _steps(program: Any, aligned: int) -> Iterator[tuple[launch.Step, int]]:
    """All that a program may launch, and how addresses are aligned: of rows those are compiled as
    they are, of scans as if 16 divided them."""
    for step in (*program.steps, *program.apart):
        yield step, aligned
    if program.unaligned is not None:
        rows = program.unaligned.steps[0].kernel.startswith("rows.")
        yield from _steps(program.unaligned, 1 if rows else aligned)


def variants(arch: int, turn: int | None = None) -> Iterator[Variant]:
    """Every variant once; with a `turn` those of the subset, in a shuffled order of its own."""
    seen = set()
    for program, element, aligned, name in (*_planned(arch, turn), *_learned(arch)):
        for step, divides in _steps(program, aligned):
            made = Variant(step, divides, element, f"{program.variant}, {program.layout}: {name}")
            if made.key not in seen:
                seen.add(made.key)
                yield made


_Prepared = tuple[Program, ElementKind, int, str]
"""A program, its element, how addresses are aligned, and the problem."""


def _planned(arch: int, turn: int | None) -> Iterator[_Prepared]:
    """What plans lead to."""
    problems = list(_problems(more=turn is None))
    if turn is not None:
        problems.sort(key=lambda problem: _drawn(*problem[:4], problem[4].__name__, turn))
    for spec, element, (fields, without), (shape, axes), layout in problems:
        desc = cases.describe(spec, element, shape, axes, **fields)
        strides, positions = _strides(desc, without, layout), _positions(layout)
        program = programs.prepare(desc, strides, f"sm_{arch}", 0, positions)
        aligned = 16 if layout is not _strided else 1
        name = f"{spec.kind} {element} {shape} {axes} {layout.__name__[1:]} {fields} {without}"
        yield program, element, aligned, name


# Rows and their length: whole tiles and others, a row to a program and many.
_LEARNED = ((8192, 8192), (8193, 8208), (65536, 128), (65535, 48))


def _learned(arch: int) -> Iterator[_Prepared]:
    """What `gradplan.torch` leads to beside them."""
    table = table_of(f"sm_{arch}")
    for rows, n in _LEARNED:
        for element in ELEMENTS:
            for kind in (ReduceKind.MAX, ReduceKind.MIN):
                name = f"{kind} {element} {(rows, n)}"
                yield learned.extrema(kind, element, rows, n, table), element, 16, name
        for element, kind in (
            *((one, kind) for one in ELEMENTS for kind in (ReduceKind.MAX, ReduceKind.MIN)),
            (ElementKind.F32, ReduceKind.VAR),
            (ElementKind.F32, ReduceKind.STD),
        ):
            for alike in (False, True):
                program = learned.gradient(kind, element, rows, n, alike, 1.0, table)
                yield program, element, 16, f"{kind} {element} {(rows, n)} {alike}"


def _brings(one: Variant) -> tuple[set[Any], tuple[Any, ...]]:
    """What a variant shows on every architecture, and what on one of them."""
    kernel, constants = one.step.kernel, dict(one.step.constants)
    each: set[Any] = {(kernel, one.element)}
    for name, value in constants.items():
        if name in ("DY", "X", "Y", "OUT", "OUT2"):
            each.add((name, value))
        elif not isinstance(value, int) or isinstance(value, bool):
            each.add((kernel, name, value))
    for name, argument in one.step.arguments:
        if name in ("n", "count") and isinstance(argument, launch.Int):
            each.add((kernel, name, argument.type))
    return each, (kernel, constants.get("KIND"), constants.get("PHASE"))


@cache
def _covering(arch: int) -> tuple[dict[frozenset[Any], Variant], frozenset[Any], frozenset[Any]]:
    """Variants by what they bring, all that each architecture must show, and all pairs."""
    found: dict[frozenset[Any], Variant] = {}
    wants: set[Any] = set()
    pairs: set[Any] = set()
    for one in variants(arch, turn=arch):
        each, pair = _brings(one)
        if each <= wants and pair in pairs:
            continue
        found[frozenset({*each, pair})] = one
        wants |= each
        pairs.add(pair)
    return found, frozenset(wants), frozenset(pairs)


def quick(arch: int) -> list[Variant]:
    """A covering subset: each kernel with each kind, element, tie rule and phase at least once, and
    each operand in each mode; in other combinations for each architecture, which share the pairs
    of kind and phase."""
    found, each, _ = _covering(arch)
    wants = set(each)
    taken = dict.fromkeys(ARCHITECTURES, 0)
    # The pairs that fewest have are dealt first, each to who has least.
    holders = {one: _covering(one)[2] for one in ARCHITECTURES}
    common = set.intersection(*map(set, holders.values()))
    for pair in sorted(set.union(*map(set, holders.values())), key=lambda p: (p in common, str(p))):
        holder = min((one for one in ARCHITECTURES if pair in holders[one]), key=taken.__getitem__)
        taken[holder] += 1
        if holder == arch:
            wants.add(pair)
    chosen = []
    while wants:
        brings = max(found, key=lambda some: len(some & wants))
        wants -= brings
        chosen.append(found[brings])
    return chosen


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def build(variant: Variant, arch: int) -> Built:
    """Compile a variant and read what it uses."""
    try:
        kernel = launch.compiled(variant.step, variant.pointer_bytes, arch)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.kernel)
            file.flush()
            told = subprocess.run(
                [_cuobjdump(), "--dump-resource-usage", file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
    except Exception as error:  # whatever the compiler raises is the answer
        return Built(variant, arch, error=f"{type(error).__name__}: {error}")
    found = _USAGE.search(told)
    if found is None:
        return Built(variant, arch, error=f"cuobjdump says {told!r}")
    registers, stack = map(int, found.groups())
    idle = idle_barriers(kernel.asm.get("ttgir", ""))  # one from an archive has none
    hasty = variant.step.early and not waits_first(kernel.asm.get("ptx", _WAIT))
    return Built(variant, arch, "", registers, stack, int(kernel.metadata.shared), idle, hasty)


_WAIT = "griddepcontrol.wait"
_REACHED = re.compile(rf"{re.escape(_WAIT)}|\b(?:ld|st|atom|red)\.global|\bcp\.async")


def waits_first(code: str) -> bool:
    """Whether assembly waits for the launch before it before it looks at memory."""
    first = _REACHED.search(code)
    return first is not None and first[0] == _WAIT


_INDEXED = re.compile(r"(%\w+) = ttg\.memdesc_index (%\w+)\[")
_INITIALISED = re.compile(r"ttng\.init_barrier (%\w+)")


def idle_barriers(code: str) -> tuple[str, ...]:
    """Barriers in shared memory that are initialised in Triton's code for GPUs, and then not used.

    The compiler gives their room to others, but to the machine they are barriers still: it may
    write their state there once more, as it does when another process takes its turn.
    """
    names: list[str] = _INITIALISED.findall(code)
    begin, _, rest = code.rpartition("ttng.init_barrier ")
    whole: dict[str, str] = dict(_INDEXED.findall(begin))
    barriers = dict.fromkeys(whole.get(name, name) for name in names)
    used = set(re.findall(r"%\w+", rest))
    return tuple(name[1:] for name in barriers if name not in used)


def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def build_all(todo: Sequence[tuple[Variant, int]], jobs: int) -> Generator[Built, None, None]:
    """What came of each, as it is done."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        pending = [pool.submit(build, variant, arch) for variant, arch in todo]
        try:
            for future in as_completed(pending):
                yield future.result()
        finally:
            for future in pending:
                future.cancel()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradplan.backends.gpu.aot", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES)
    )
    parser.add_argument("--quick", action="store_true", help="a covering subset, a minute or two")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, show a table, and return 1 where anything is wrong."""
    chosen = _parser().parse_args(argv)
    if launch.interpreted():
        print("gradplan: TRITON_INTERPRET=1 is set, so Triton compiles nothing", file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    console = Console()
    todo = [
        (variant, arch)
        for arch in chosen.arch
        for variant in (quick(arch) if chosen.quick else variants(arch))
    ]
    built = list(
        track(
            build_all(todo, chosen.jobs),
            f"compiling {len(todo)} variants",
            total=len(todo),
            console=console,
        )
    )
    table = Table("arch")
    table.add_column("kernel", no_wrap=True)
    for title in ("variants", "registers", "shared", "on stack", "wrong"):
        table.add_column(title, justify="right")
    for arch in chosen.arch:
        for name in sorted({one.variant.step.kernel for one in built}):
            some = [o for o in built if o.arch == arch and o.variant.step.kernel == name]
            if some:
                table.add_row(
                    f"sm_{arch}",
                    name,
                    str(len(some)),
                    str(max(one.registers for one in some)),
                    str(max(one.shared for one in some)),
                    str(sum(one.stack > 0 for one in some)),
                    str(sum(bool(one.fault) for one in some)),
                )
    console.print(table)
    wrong = [one for one in built if one.fault]
    for one in wrong:
        print(f"sm_{one.arch} {one.variant.step.kernel}: {one.fault}\n  {one.variant.problem}")
    print(f"{len(built)} variants, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
