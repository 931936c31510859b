"""Cases that meet every variant of every kind, and what tests of the GPU backend share."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest

from gradplan import cases
from gradplan.backends.gpu import aot, programs
from gradplan.backends.gpu.table import table_of
from gradplan.cases import Case, Layout
from gradplan.kinds import ElementKind, OpCategory, ScanKind
from gradplan.registry import ELEMENTS, KINDS, Engine
from gradplan.views import view

SPECS = list(KINDS.values())
HALVES = (ElementKind.F16, ElementKind.BF16)


def named_kernels() -> set[str]:
    """Every kernel that the engines' launches name."""
    folder = Path(programs.__file__).parent
    modules = set(folder.glob("*.py")) - {folder / "learned.py"}  # of `gradplan.torch`
    sources = "".join(path.read_text() for path in modules)
    kernels = "|".join(path.stem for path in folder.glob("kernels/*.py"))
    return set(re.findall(rf'"((?:{kernels})\.[a-z_]+)"', sources))


def problems(specs=SPECS, elements=ELEMENTS):
    return pytest.mark.parametrize(
        ("spec", "element"),
        [
            pytest.param(spec, element, id=f"{spec.kind}-{element}")
            for spec in specs
            for element in elements
        ],
    )


def spec_of(kind):
    return next(spec for spec in SPECS if spec.kind == kind)


def program_of(problem):
    """The program that the interpreter's table chooses for a problem's arrays."""
    strides = {name: view(array).strides for name, array in problem.arrays.items()}
    return programs.prepare(problem.desc, strides, "interpreter", 0)


SHAPES = [
    ((37,), (0,)),  # one row: in registers, and split for what takes many of them
    ((2, 140), (1,)),  # fewer rows than fill the machine: split
    ((4, 140), (1,)),  # rows enough: one after another
    ((2, 70), (1,)),
    ((8, 64), (1,)),  # the same with full tiles
    ((6, 9), (1,)),  # many short rows to a program
    ((40, 3), (0,)),  # few columns: split
    ((20, 70), (0,)),  # columns enough, whatever the element
    ((20, 24), (0,)),
    ((3, 5, 9), (1,)),  # an axis in the middle
    ((5, 8), (1,)),  # the longest row and the longest column that log-cumsum-exp keeps where y is
    ((2, 12), (0,)),  # absent
    ((7, 3), (0,)),
    ((12, 3), (0,)),
]
# Rows and columns of more parts than are joined at a time, for f64, f32 and halves.
CUT_OFTEN = [((n,), (0,)) for n in (300, 560, 1100)]
CUT_OFTEN += [((n, 3), (0,)) for n in (70, 140, 270)]
IN_LINES = [((2200, 3), (0,))]  # few rows beside a long axis
MANY_AXES = [((3, 5, 9), (0, 2)), ((3, 5, 9), (1, 2)), ((4, 6, 5), (0, 1, 2))]
MANY_AXES_CUT_OFTEN = [((5, 2, n), (0, 2)) for n in (14, 28, 54)]
TABLES = [  # (indices, dim, rows)
    ((70, 70, 9), ()),  # several slices of columns; rows named more often than a chunk is long
    ((9, 3, 40), ()),  # more rows than indices
    ((40, 16, 5), ()),  # aligned throughout
    ((0, 5, 7), ()),  # nothing to add
]
IN_PLACE = [((37, 1), (1,)), ((1, 40), (0,)), ((5, 7), ())]

VARIANTS = {
    Engine.MAP: {("map", "flat"), ("map", "rows")},
    Engine.ROW_STATE: set(itertools.product(("resident", "lagged"), ("rows", "columns"))),
    Engine.RECURRENCE: set(itertools.product(("resident", "tiled", "split"), ("rows", "columns"))),
    Engine.SEGMENT_SUM: {("sorted", "rows"), ("sorted", "strided"), ("zeros", "any")},
}
"""The variants and layouts that every kind of an engine must meet here."""


def wanted(spec, element, arch="interpreter"):
    """The variants that a kind and an element have."""
    found = VARIANTS[spec.engine]
    # Products of f64 would take too many programs; `test_few_rows_beside_a_long_axis` has them.
    if spec.engine is Engine.ROW_STATE and (spec.kind, element) != ("prod", ElementKind.F64):
        found = found | {("tall", "columns")}
    if spec.engine is not Engine.RECURRENCE:
        return found
    found = found | {("chained", "rows")}
    if spec.kind is ScanKind.CUMSUM:
        return found
    if spec.kind in table_of(arch).lagged_scans:
        found = found | {("lagged", "columns")}
    marked = {(name, layout) for name, layout in found if name in ("resident", "tiled", "chained")}
    # What is recomputed needs the states of all tiles before: no row is walked tile by tile.
    return (
        {(f"{name}_from_y", layout) for name, layout in found}
        | {
            (f"{name}_recomputed", layout)
            for name, layout in found
            if name in ("resident", "split")
        }
        | ({(f"{name}_marked", layout) for name, layout in marked} if spec.ties else set())
    )


def candidates(spec, element):
    """Every shape, option, layout and data, in an order of its own for each kind and element."""
    shapes = TABLES if spec.category is OpCategory.EMBEDDING else SHAPES
    if spec.category is OpCategory.REDUCTION:
        shapes = shapes + MANY_AXES
    if spec.engine is Engine.ROW_STATE:
        shapes = shapes + CUT_OFTEN + IN_LINES
        if spec.category is OpCategory.REDUCTION:
            shapes = shapes + MANY_AXES_CUT_OFTEN
    some = [
        (shape, asked, layout, data)
        for layout in cases.layouts_of(spec)
        for shape in (
            IN_PLACE
            if layout is Layout.IN_PLACE and spec.category is OpCategory.REDUCTION
            else shapes
        )
        for asked in cases.options_of(spec, element)
        for data in cases.data_of(spec)
    ]
    turn = 4 * SPECS.index(spec) + ELEMENTS.index(element)
    for k in np.random.default_rng(turn).permutation(len(some)):
        (shape, axes), (fields, without), layout, data = some[k]
        desc = cases.describe(spec, element, shape, axes, **fields)
        yield Case(desc=desc, layout=layout, data=data, without=without, seed=int(k))


def covering(spec, element):
    """Problems that meet every variant, layout, option and data of a kind, each at least once, and
    every way through `programs` that the candidates know.

    Of the candidates that come first those are taken that bring most; of equals, what costs the
    interpreter least.
    """
    wants = {("variant", *one) for one in wanted(spec, element)}
    wants |= {("layout", layout) for layout in cases.layouts_of(spec)}
    wants |= {("data", data) for data in cases.data_of(spec)}
    wants |= {("option", *option) for option in options(spec, element)}
    if spec.engine is Engine.ROW_STATE:
        wants |= set(cuts(spec, element))
    some, never = [], set(wants)
    for case in candidates(spec, element):
        problem = cases.Problem(case)
        program = program_of(problem)
        if sum(step.grid for step in program.steps) > 100:  # seconds in the interpreter
            continue
        empty = program.variant in ("zeros", "none")  # which show nothing else
        brings = {("variant", program.variant, "any" if empty else program.layout)}
        if not empty:
            brings |= {("layout", case.layout), ("data", case.data)}
            brings |= {("option", *option) for option in chosen(case)}
        if program.variant == "lagged" and spec.engine is Engine.ROW_STATE:
            brings |= {("cut", *cut) for cut in cut_as(program)}
        way = ("way", *signature(program))
        wants.add(way)
        brings.add(way)
        never -= brings
        some.append((problem, brings, cost(program)))
        if not never and len(some) >= 200:
            break
    assert not never, f"never met: {sorted(never, key=str)}"
    while wants:
        problem, brings, _ = max(some, key=lambda one: (len(one[1] & wants), -one[2]))
        wants -= brings
        yield problem


def cut_as(program):
    """Whether rows have more parts than are joined at a time, by layout, and for several axes."""
    (step,) = program.steps
    often = dict(step.arguments)["parts"].value > dict(step.constants)["K"]
    yield program.layout, often
    if signature(program)[-1]:
        yield "many axes", often


def cuts(spec, element):
    """The ways to cut rows that a kind and element must meet: long ones take turns."""
    for layout in ("rows", "columns"):
        yield "cut", layout, layout == "columns"
    turn = SPECS.index(spec) + ELEMENTS.index(element)
    yield "cut", ("rows", "columns")[turn % 2], turn % 2 == 0
    if spec.category is OpCategory.REDUCTION:
        yield "cut", "many axes", turn % 4 == 0


def cost(program):
    """The interpreter's time, roughly: so much a program, and more for each step of its rows."""
    total = 0
    for step in program.steps:
        fixed, numbers = dict(step.constants), dict(step.arguments)
        length = fixed.get("C", fixed.get("M", 1) * fixed.get("V", 1))
        if step.kernel.startswith(("lines", "recurrence")) and fixed.get("PHASE") == "whole":
            length = numbers["n"].value
        total += step.grid * (16 + length)
    return max(total, 1)


def chosen(case):
    """The options of a case, one by one: a kernel (tie rule and absent arrays), then the rest."""
    desc = case.desc
    names = ("reverse", "correction", "index", "accumulate", "scale_grad_by_freq", "padding_idx")
    yield "kernel", str(getattr(desc, "ties", "")), case.without
    for name in names:
        if hasattr(desc, name):
            yield name, str(getattr(desc, name))


def options(spec, element):
    shape = (4, 4, 4) if spec.category is OpCategory.EMBEDDING else (4, 4)
    for fields, without in cases.options_of(spec, element):
        desc = cases.describe(spec, element, shape, (0,), **fields)
        yield from chosen(Case(desc=desc, without=without))


# What the thresholds of a real GPU need to meet every variant, by size: shapes and axes, one line
# a reason.
LARGE = [
    ((300, 512), (1,)),  # a warp takes a row alone, of cummax and cummin
    ((5, 3, 1024), (2,)),
    ((40, 1000, 32), (1,)),  # columns in a cluster
    ((5000,), (0,)),  # one flat run
    ((5001,), (0,)),  # ... that ends within 16 bytes
    ((530, 300), (1,)),  # many short rows to a program
    ((7, 3000), (1,)),  # a row in registers
    ((7, 3001), (1,)),  # ... that begins anywhere
    ((9, 50, 8), (1,)),  # columns in registers
    ((12, 700), (0,)),  # ... and the few that log-cumsum-exp keeps where y is absent
    ((5, 140, 6), (1,)),  # ... too many for a scan, and too few to fill the machine
    ((264, 140, 8), (1,)),  # ... enough to
    ((300, 8192), (1,)),  # rows of a scan tile by tile, that would leave walking programs idle
    ((264, 2100), (1,)),  # rows of a scan, enough to fill the machine
    ((264, 4200), (1,)),  # ... that do not lie one element after the other
    ((3, 40_000), (1,)),  # rows split over programs
    ((2, 70_000), (1,)),
    ((40_000, 18), (0,)),  # columns split over programs
    ((8192, 32), (0,)),  # ... whose parts stay in shared memory
    ((264, 16_400), (1,)),  # rows too long for registers, enough to fill the machine
    ((264, 33_000), (1,)),
    ((264, 65_600), (1,)),  # ... in bfloat16
    ((33, 32_768), (1,)),  # ... whose parts are full
    ((264, 32_768), (1,)),
    ((264, 65_536), (1,)),
    ((9, 33_001), (1,)),  # ... that begin anywhere
    ((2, 300_007), (1,)),  # ... too long for a cluster
    ((264, 2100, 8), (1,)),  # columns too long for registers
    ((33, 1040, 256), (1,)),  # ... that are walked in strips
    ((33, 1040, 254), (1,)),  # ... copied by 4 or 8 bytes
    ((33, 1040, 255), (1,)),
    ((8192, 65), (0,)),  # ... that begin anywhere
    ((70_000, 66), (0,)),  # few of them, in lines
    ((1, 4_200_000), (1,)),  # a row of a product whose parts stay in shared memory
    ((264, 4100, 8), (1,)),  # ... of one operand
    ((1, 2_200_000), (1,)),  # a row of more parts than wait for each other
]
LARGE_MANY_AXES = [
    ((30, 5, 40), (0, 2)),
    ((5, 600, 7), (0, 2)),
    ((40, 300, 18), (0, 1)),
    ((300, 7, 400), (0, 2)),
    ((100, 264, 90), (0, 2)),
    ((40, 264, 30, 8), (0, 2)),
    ((180, 264, 95), (0, 2)),
    ((64, 9, 48), (0, 2)),  # products of f64 in a cluster
]
LARGE_TABLES = [  # (indices, dim, rows)
    ((50, 96, 300), ()),  # fewer indices than a chunk
    ((3000, 33, 100), ()),  # rows of several chunks
    ((9000, 40, 70), ()),  # chunks of chunks
    ((300, 2100, 70), ()),  # two slices of columns
    ((0, 64, 10), ()),  # nothing to add
]
# Few long rows and long strided axes, whatever the variant: two of them for each kind and element,
# in turn.
LONG = [
    ((2, 131_072), (1,)),
    ((1, 300_001), (1,)),
    ((300_001, 3), (0,)),
    ((2, 40_001, 3), (1,)),
]
LONGEST = ((3, 1_000_003), (1,))  # half a minute of the reference: one element a kind


def signature(program):
    """What tells the ways through `programs` apart."""
    constants = [dict(step.constants) for step in program.steps]
    kernels = tuple(
        dict.fromkeys(
            (step.kernel, fixed.get("PHASE", fixed.get("LEVEL")), step.grain)
            for step, fixed in zip(program.steps, constants, strict=True)
        )
    )
    dims = [dict(step.arguments).get("axis_dims", ()) for step in program.steps]
    layout = "any" if program.variant == "zeros" else program.layout
    return program.variant, layout, kernels, any(len(one) > 1 for one in dims)


@cache
def producible(arch):
    """Every signature that a kind and element can have, from all that is compiled in advance."""
    found = {}
    for spec, element, (fields, without), (shape, axes), layout in aot._problems():
        desc = cases.describe(spec, element, shape, axes, **fields)
        strides = aot._strides(desc, without, layout)
        program = programs.prepare(desc, strides, arch, 0, aot._positions(layout))
        if program.steps:
            found.setdefault((spec.kind, element), set()).add(signature(program))
    return found


def large(spec, element, arch="sm_90"):
    """Cases that meet all that a kind and element can have on a GPU, then the long ones.

    Small shapes come first and lie in every way; large ones are contiguous. Data take turns.
    """
    met = set()
    shapes = LARGE_TABLES if spec.category is OpCategory.EMBEDDING else LARGE
    if spec.category is OpCategory.REDUCTION:
        shapes = LARGE + LARGE_MANY_AXES
    shapes = sorted(shapes, key=lambda one: prod(one[0]))
    turn = 4 * SPECS.index(spec) + ELEMENTS.index(element)
    asked = cases.options_of(spec, element)
    asked = asked[turn % len(asked) :] + asked[: turn % len(asked)]
    ways = [Layout.CONTIGUOUS, Layout.SLICED, Layout.TRANSPOSED, Layout.NEGATIVE, Layout.MIXED]
    ways.append(Layout.SHIFTED)
    data = itertools.cycle(cases.data_of(spec))
    for shape, axes in shapes:
        desc = cases.describe(spec, element, shape, axes, **asked[0][0])
        size = max(prod(operand.shape) for operand in desc.operands)
        for layout in ways if size < 2**21 else ways[:1]:
            for fields, without in asked:
                desc = cases.describe(spec, element, shape, axes, **fields)
                case = Case(desc=desc, layout=layout, without=without, seed=turn)
                program = programs.prepare(desc, cases.strides_of(case), arch, 0)
                if program.steps and (brings := signature(program)) not in met:
                    met.add(brings)
                    yield replace(case, data=next(data))
    never = producible(arch)[spec.kind, element] - met
    assert not never, f"never met: {sorted(never, key=str)}"
    if spec.category is not OpCategory.EMBEDDING:
        fields, without = asked[0]
        longest = [LONGEST] if SPECS.index(spec) % 3 == ELEMENTS.index(element) else []
        for shape, axes in [LONG[turn % 4], LONG[(turn + 1 + turn // 4) % 4], *longest]:
            desc = cases.describe(spec, element, shape, axes, **fields)
            yield Case(desc=desc, data=next(data), without=without, seed=turn)


def small_table(waits=True):
    """The interpreter's thresholds: small shapes meet every variant, or those that never wait."""
    small = table_of("interpreter")
    if waits:
        return small
    never = (("", 0, 1, 0, 1),)
    return replace(small, lag=0, scan_lag=0, chained=never, chained_many=never)


# What programs that stay can hold, in tiles so small that rows of these have many of them: full
# tiles and others, and rows enough for every program to take several.
HELD = [
    ((60, 4096), (1,)),
    ((3, 3008), (1,)),
    ((192, 384), (0,)),
    ((2, 200, 80), (1,)),
    ((240, 16), (0,)),
    ((1600, 128), (0,)),  # more parts than programs, and than are heard at a time
    ((4416, 64), (0,)),
]
# The same of clusters: full parts, two of them and as many as there may be, and others.
CLUSTERED = [
    ((5, 2048), (1,)),
    ((3, 8192), (1,)),
    ((4, 3000), (1,)),
    ((96, 64), (0,)),
    ((2, 90, 40), (1,)),
]
# Scans of parts in shared memory: rows and strips enough for nine programs or eighteen, and fewer;
# parts that are full and others; rows that begin anywhere, whose last part may be empty.
WALKED = [
    ((18, 4096), (1,)),
    ((27, 3088), (1,)),
    ((27, 3087), (1,)),
    ((9, 2, 4099), (2,)),
    ((5, 40_960), (1,)),
    ((2, 80_016), (1,)),
    ((512, 576), (0,)),
    ((2, 400, 560), (1,)),
]


def held_table():
    return replace(
        table_of("sm_90"),
        fill=144,
        resident_words=64,
        cluster=0,
        held_rows=(("prod", 2048, 4, 1024, 4), ("", 1024, 4, 512, 4)),
        held_columns=(("", 2048, 4, 1024, 4),),
    )


def clustered_table():
    """Parts of one warp, of which full ones are taken in two pieces."""
    never = (("", 0, 4, 0, 4),)
    return replace(
        table_of("sm_90"),
        fill=4,
        resident_words=64,
        cluster_rows=(("", 1024, 1, 1024, 1),),
        cluster_columns=(("", 1024, 2, 1024, 2),),
        held_rows=never,
        held_columns=never,
        at_once=(("cluster_rows", "", 16, 16),),
        registers=(),
    )


def walked_table():
    few = ("cumsum", "cumprod", "log_cumsum_exp")
    sizes = (*((kind, 512, 2, 512, 2) for kind in few), ("", 2048, 2, 2048, 2))
    strips = (*((kind, 2048, 2, 1024, 2) for kind in few), ("", 4096, 2, 2048, 2))
    return replace(
        table_of("sm_90"),
        fill=18,
        walked_rows=sizes,
        walked_ragged=sizes,
        walked_warps=1,
        walked_from=(),
        walked_columns=strips,
        walked_strips=strips,
        walked_axis=1,
        held_scans=(*((kind, 2048, 8, 1024, 4) for kind in few), ("", 8192, 8, 4096, 4)),
    )


def held(spec, element):
    """Cases that are held in small parts, with their programs."""
    return _in_parts(spec, element, HELD, held_table(), ("held",))


def clustered(spec, element):
    """Cases that small clusters take, with their programs; also with one value a row."""
    small = clustered_table()
    yield from _in_parts(spec, element, CLUSTERED, small, ("cluster",))
    for shape, axes in CLUSTERED:
        for fields, without in cases.options_of(spec, element):
            desc = cases.describe(spec, element, shape, axes, **fields)
            case = Case(desc=desc, without=without, placements=one_value_a_row(desc))
            program = programs.choose(desc, cases.strides_of(case), small)
            if program.variant == "cluster":
                yield case, program


def one_value_a_row(desc):
    """Placements of the inputs that repeat along the axes."""
    shape, axes = desc.shape_and_axes
    order = tuple(range(len(shape)))
    steps = tuple(0 if axis in axes else 1 for axis in order)
    inputs = [one.name for one in desc.operands if not one.output and one.shape == shape]
    return tuple((name, cases.Placement(order, steps)) for name in inputs)


def walked_or_held(spec, element):
    """Cases of a scan that are walked or held in small parts, with their programs."""
    return _in_parts(spec, element, WALKED, walked_table(), ("walked", "held"))


def small_parts(spec):
    """The ways in which parts of a kind's rows are kept on the chip: cases of each that are cut
    small, and the thresholds that cut them."""
    if spec.engine is Engine.ROW_STATE:
        return [(held, held_table()), (clustered, clustered_table())]
    if spec.engine is Engine.RECURRENCE:
        return [(walked_or_held, walked_table())]
    return []


def _in_parts(spec, element, shapes, small, variants):
    for k, (shape, axes) in enumerate(shapes):
        for (fields, without), data in itertools.product(
            cases.options_of(spec, element), cases.data_of(spec)
        ):
            desc = cases.describe(spec, element, shape, axes, **fields)
            case = Case(desc=desc, data=data, without=without, seed=k)
            program = programs.choose(desc, cases.strides_of(case), small)
            if program.variant.startswith(variants):
                yield case, program
