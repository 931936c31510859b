"""The GPU's kernels in Triton's interpreter, on CPU memory: right in every variant.

The interpreter's table of thresholds is small, so that small shapes are split and tiled
as large ones are on a GPU. It takes about a tenth of a second a program, so every kind and element
meets a covering set of cases here; `--exhaustive` runs the whole grid, for hours.
Scans and embeddings have files of their own.
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gradplan as gp
from covering import HALVES, SPECS, covering, named_kernels, problems, program_of, spec_of
from gradplan import cases, plans
from gradplan.backends.gpu import interpreter, programs, table
from gradplan.cases import Case, Data, Layout
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import ELEMENTS, Engine
from interpreting import (
    MARKS,
    TRITON,
    assert_none,
    bound,
    check,
    long_rows,
    outcome_of,
    settle,
)

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")
tl = triton.language

from gradplan.backends.gpu.kernels.formulas import join_told, told  # noqa: E402

pytestmark = MARKS


@problems()
def test_covering_cases(spec, element):
    missed = []
    for problem in covering(spec, element):
        plan = problem.plan("cpu", TRITON)
        plan.run(problem.args())
        outcome = problem.outcome(plan.precision_guarantee.relative_error)
        if not outcome.ok:
            missed.append(f"{bound(problem).sku.variant}: {outcome}")
    assert_none(missed)


@problems([spec for spec in SPECS if spec.engine in (Engine.MAP, Engine.ROW_STATE)])
def test_rows_that_begin_anywhere(spec, element):
    """One to a program and several, whole and in parts; of one element beside the run, and of all
    that there can be; of data that products find hard."""
    met = set()
    for (shape, data), layout in itertools.product(
        (((3, 33), Data.RANDOM), ((5, 2, 63), Data.RANDOM), ((2, 301), Data.RANDOM),
         ((3, 101), Data.ZEROS), ((2, 155), Data.INFINITE), ((3, 77), Data.NAN_IN_X)),
        (Layout.CONTIGUOUS, Layout.SHIFTED),
    ):  # fmt: skip
        if data not in cases.data_of(spec):
            continue
        axes = () if spec.category is OpCategory.BINARY_ELEMENTWISE else (len(shape) - 1,)
        desc = cases.describe(spec, element, shape, axes)
        problem = cases.Problem(Case(desc=desc, layout=layout, data=data, seed=shape[-1]))
        settle(problem)
        found = program_of(problem)
        constants = dict(found.steps[0].constants)
        if found.steps[0].kernel.startswith("ragged."):
            met.add((constants.get("PHASE"), constants["R"] > 1))
    if spec.engine is Engine.MAP:
        assert met >= {(None, False)}
    else:
        assert met >= {("whole", True), ("lagged", False)}


@problems([spec for spec in SPECS if spec.category is not OpCategory.EMBEDDING], ELEMENTS[:1])
def test_more_programs_than_a_launch_may_have(spec, element, monkeypatch):
    """Some axis is taken piece by piece, whichever way arrays lie along it."""
    monkeypatch.setattr(programs, "_MOST", 2)
    monkeypatch.setattr(plans, "_plans", {})
    layouts = cases.layouts_of(spec)
    if spec.category is OpCategory.REDUCTION:
        layouts = [layout for layout in layouts if layout is not Layout.IN_PLACE]
    shapes = [((7, 3, 5), (1,)), ((4, 9, 3), (2,))]
    if spec.engine is Engine.MAP and spec.category is OpCategory.REDUCTION:
        shapes.append(((9, 5, 7), (0, 1, 2)))  # each element by itself, whatever is reduced
    for layout, (shape, axes) in itertools.product(layouts, shapes):
        desc = cases.describe(spec, element, shape, axes)
        problem = cases.Problem(Case(desc=desc, layout=layout))
        found = program_of(problem)
        assert max(step.grid for step in found.steps) <= 2
        assert "times, for a launch" in found.why
        settle(problem)


@problems(
    [spec for spec in SPECS if spec.engine is Engine.ROW_STATE and not spec.ties], ELEMENTS[:3]
)
def test_a_row_in_pieces(spec, element):
    """All data and options: what is not usual may be in one piece alone."""
    missed = []
    for (fields, without), (k, data) in itertools.product(
        cases.options_of(spec, element), enumerate(cases.data_of(spec))
    ):
        desc = cases.describe(spec, element, (3, 64), (1,), **fields)
        problem = cases.Problem(Case(desc=desc, data=data, without=without, seed=k))
        assert dict(program_of(problem).steps[0].constants)["PIECES"] == 2
        plan = problem.plan("cpu", TRITON)
        plan.run(problem.args())
        outcome = problem.outcome(plan.precision_guarantee.relative_error)
        if not outcome.ok:
            missed.append(str(outcome))
    assert_none(missed)


def held_shapes(element):
    """Rows of two to four parts, one after the other, longer of halves, and side by side, in full
    tiles and others."""
    ragged, full = (1008, 1024) if element in HALVES else (400, 512)
    return [((3, full), (1,)), ((64, 128), (0,)), ((2, ragged), (1,)), ((2, 40, 80), (1,))]


def holding():
    """The interpreter's table, with rows of few parts held."""
    return replace(
        table.table_of("interpreter"),
        fill=4,
        resident_words=16,
        held_rows=(("", 512, 1, 256, 1),),
        held_columns=(("", 2048, 2, 1024, 2),),
        held_width=256,
    )


@problems([spec for spec in SPECS if spec.engine is Engine.ROW_STATE], ELEMENTS[:3])
def test_rows_of_few_parts_that_are_held(spec, element):
    """By one program, which the interpreter runs; on a GPU `test_gpu_values` has many. All data;
    shapes and options take turns."""
    asked = [
        (fields, without)
        for fields, without in cases.options_of(spec, element)
        if fields.get("ties") not in ("all", "first", "last")
    ]
    shapes = held_shapes(element)
    turn = ELEMENTS.index(element)
    missed = []
    with table.using("interpreter", holding()):
        for k, data in enumerate(cases.data_of(spec), turn):
            (shape, axes), (fields, without) = shapes[k % 4], asked[k % len(asked)]
            desc = cases.describe(spec, element, shape, axes, **fields)
            problem = cases.Problem(Case(desc=desc, data=data, without=without, seed=k))
            launch_it = bound(problem)
            assert launch_it.sku.variant == "held"
            missed += outcome_of(problem, launch_it)
    assert_none(missed)


@problems([spec for spec in SPECS if spec.engine is Engine.ROW_STATE], ELEMENTS[:3])
def test_rows_side_by_side_that_begin_anywhere(spec, element):
    """Held by classes of places, one to eight of them, of which the last have fewer; strips that
    are whole, that begin before the first row and end behind the last one, and both. Elements take
    turns with the data."""
    asked = [
        (fields, without)
        for fields, without in cases.options_of(spec, element)
        if fields.get("ties") not in ("all", "first", "last")
    ]
    shapes = [
        ((67, 421), (0,), Layout.CONTIGUOUS),
        ((2, 67, 139), (1,), Layout.CONTIGUOUS),
        ((70, 271), (0,), Layout.SHIFTED),
        ((3, 45, 130), (1,), Layout.IN_PLACE),
        ((64, 260), (0,), Layout.CONTIGUOUS),
        ((67, 133), (0,), Layout.CONTIGUOUS),
        ((2, 2, 65, 77), (2,), Layout.SHIFTED),
    ]
    turn = 3 * ELEMENTS.index(element) + SPECS.index(spec)
    missed = []
    with table.using("interpreter", replace(holding(), fill=128)):
        for k, data in [*enumerate(cases.data_of(spec), turn)][turn % 3 :: 3]:
            (shape, axes, layout), (fields, without) = shapes[k % 7], asked[k % len(asked)]
            if spec.kind == "prod":  # whose parts are smaller, and more of them
                shape = tuple((1 + (axis in axes)) * size for axis, size in enumerate(shape))
            if layout is Layout.IN_PLACE and spec.category is OpCategory.REDUCTION:
                layout = Layout.CONTIGUOUS  # its dy is another shape
            desc = cases.describe(spec, element, shape, axes, **fields)
            case = Case(desc=desc, data=data, layout=layout, without=without, seed=k)
            problem = cases.Problem(case)
            launch_it = bound(problem)
            assert launch_it.sku.variant == "held", (shape, layout)
            assert dict(program_of(problem).steps[-1].constants)["CLASSES"]
            missed += outcome_of(problem, launch_it)
    assert_none(missed)


TALL = [spec for spec in SPECS if spec.engine is Engine.ROW_STATE]


@problems(TALL)
def test_few_rows_beside_a_long_axis(spec, element):
    """In lines of all rows, full ones and others, with an end that is no line; all data."""
    asked = [
        (fields, without)
        for fields, without in cases.options_of(spec, element)
        if fields.get("ties") not in ("all", "first", "last")
    ]
    shapes = [((700, 3), (0,)), ((257, 10), (0,)), ((2, 336, 7), (1,)), ((400, 16), (0,))]
    lines = replace(
        table.table_of("interpreter"), resident_words=16, tall_programs=(2, 2), tall_bytes=128
    )
    missed = []
    with table.using("interpreter", lines):
        for k, data in enumerate(cases.data_of(spec), ELEMENTS.index(element)):
            (shape, axes), (fields, without) = shapes[k % 4], asked[k % len(asked)]
            desc = cases.describe(spec, element, shape, axes, **fields)
            problem = cases.Problem(Case(desc=desc, data=data, without=without, seed=k))
            launch_it = bound(problem)
            assert launch_it.sku.variant == "tall", shape
            missed += outcome_of(problem, launch_it)
    assert_none(missed)


@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_part_may_leave_the_range_that_its_row_keeps(element, axis, monkeypatch):
    """Products of parts beyond f64 whose own product is 1: a plain quotient all the same."""
    from gradplan.backends.gpu.kernels import held

    def refused(*_):
        pytest.fail("the careful way")

    monkeypatch.setattr(held, "careful_product", refused)
    monkeypatch.setattr(held, "careful_shares", refused)
    n, power = ((1024, 3) if element != "f32" else (512, 6)) if axis else (64, 39)
    if axis == 0 and element == "f16":
        pytest.skip("32 factors of f16 stay in range")
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[element]
    half = np.full(n // 2, 2.0**power)
    x = np.concatenate([half, 1 / half])
    dy = np.array([1.0, -3.0, 0.5] if axis else np.arange(128) - 64.0)
    shape = (len(dy), n) if axis else (n, len(dy))
    lent = np.broadcast_to(x if axis else x[:, None], shape).astype(dtype, order="C")
    desc = cases.describe(spec_of("prod"), ElementKind(element), shape, (axis,))
    dx = np.empty(shape, dtype)
    args = gp.ReduceBackwardArgs(dy=np.expand_dims(dy, axis).astype(dtype), x=lent, dx=dx)
    with table.using("interpreter", holding()):
        bound_launch = gp.ReduceBackwardPlan.select(desc, preference=TRITON).bind(args)
        assert bound_launch.sku.variant == "held"
        bound_launch()
    wanted = np.expand_dims(dy, axis) / (x if axis else x[:, None])
    np.testing.assert_array_equal(dx.astype(np.float64), np.broadcast_to(wanted, shape))


@pytest.mark.parametrize("power", [2, 3, 4, 40])
def test_products_side_by_side_are_told_whatever_lies_between_them(power):
    """In f32 in terms of one power of two as long as that reaches for all; otherwise apart."""
    half = 2.0 ** (np.where(np.arange(128) % 2, power, -power) * np.ones((32, 1)))
    x = np.concatenate([half, 1 / half]).astype(ml_dtypes.bfloat16)
    dy = (np.arange(128) - 64.0)[None, :]
    desc = cases.describe(spec_of("prod"), ElementKind.BF16, x.shape, (0,))
    dx = np.empty_like(x)
    args = gp.ReduceBackwardArgs(dy=dy.astype(ml_dtypes.bfloat16), x=x, dx=dx)
    with table.using("interpreter", holding()):
        launch_it = gp.ReduceBackwardPlan.select(desc, preference=TRITON).bind(args)
        assert launch_it.sku.variant == "held"
        launch_it()
    np.testing.assert_array_equal(dx.astype(np.float64), dy / x.astype(np.float64))


def test_factors_near_the_largest_bfloat16_keep_the_guarantee_of_prod():
    """A share divided by such a factor must not be subnormal where the gradient is not: rows whose
    gradient lies between two bfloat16, just above a power of two, would show it."""
    rng = np.random.default_rng(0)
    rows = 1_000_000
    x = 2.0 ** rng.integers(20, 27, (rows, 8)) * rng.uniform(1, 2, (rows, 8))
    x[:, 0] = 2.0**127 * rng.uniform(1, 1.98, rows)
    x[:, 4] = 2.0**-75 * rng.uniform(1, 2, rows)  # its pair
    x = x.astype(ml_dtypes.bfloat16)
    dy = rng.uniform(1, 2, (rows, 1)).astype(ml_dtypes.bfloat16)
    others = x[:, 1:].astype(np.float64).prod(1) * dy[:, 0].astype(np.float64)
    far = np.abs(2 * np.frexp(others)[0] - (1 + 2.0**-8))
    worst = np.argsort(far)[:512]
    x, dy, others = x[worst], dy[worst], others[worst]
    desc = cases.describe(spec_of("prod"), ElementKind.BF16, x.shape, (1,))
    plan = gp.ReduceBackwardPlan.select(desc, preference=TRITON)
    dx = np.empty_like(x)
    plan.run(gp.ReduceBackwardArgs(dy=dy, x=x, dx=dx))
    error = np.abs(dx[:, 0].astype(np.float64) - others) / others
    assert error.max() <= plan.precision_guarantee.relative_error


LAGGING = [spec for spec in SPECS if spec.engine in (Engine.ROW_STATE, Engine.RECURRENCE)]


@problems(LAGGING)
def test_two_reads_in_one_launch_have_the_bits_of_two_launches(spec, element):
    """What a captured run launches; one case for each layout, elements take turns."""
    if element is not ELEMENTS[SPECS.index(spec) % len(ELEMENTS)]:
        pytest.skip("another element has its turn")
    layouts = set()
    for problem in covering(spec, element):
        program = program_of(problem)
        if not program.variant.startswith("lagged") or program.layout in layouts:
            continue
        layouts.add(program.layout)
        settle(problem)
        bits = problem.outputs()["dx"].tobytes()
        assert program.apart
        small = replace(table.table_of("interpreter"), lag=0, scan_lag=0)
        with table.using("interpreter", small):
            again = cases.Problem(problem.case)  # in place, an input is spoilt
            assert bound(again).sku.variant.startswith("split")
            settle(again)
        assert again.outputs()["dx"].tobytes() == bits
    if spec.engine is Engine.ROW_STATE:
        assert layouts == {"rows", "columns"}
    else:
        assert layouts == ({"columns"} if spec.kind in LAGGED_SCANS else set())


LAGGED_SCANS = table.table_of("interpreter").lagged_scans


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", list(Layout))
@problems()
def test_the_whole_grid(spec, element, layout, exhaustive):
    if not exhaustive:
        pytest.skip("hours: --exhaustive runs it")
    if layout in cases.layouts_of(spec):
        check(cases.grid(spec, element, layout))


def test_every_kernel_is_met():
    """What `programs` may launch, these tests launch."""
    met = set()
    for spec in SPECS:
        if spec.kind in ("softmax", "max", "prod", "lerp", "cummax", "log_cumsum_exp", "embedding"):
            for problem in covering(spec, ElementKind.F32):
                program = program_of(problem)
                met |= {step.kernel for step in (*program.steps, *program.apart)}
    for case in long_rows(ElementKind.F16):
        met |= {step.kernel for step in program_of(cases.Problem(case)).steps}
    # What lies in shared memory, what a warp takes alone, and few indices, have tests of their own.
    by_others = {
        "held.held_rows",
        "held_scans.held_scan",
        "walks.walk_rows",
        "walk_logs.walk_logs",
        "row_alone.scan_row_alone",
        "few.sum_few",
    }
    assert met == named_kernels() - by_others


STATES = [spec for spec in SPECS if spec.engine is Engine.ROW_STATE]


@problems(STATES, [ElementKind.F32])
def test_states_are_joined_over_many_chunks(spec, element):
    for k, (fields, without) in enumerate(cases.options_of(spec, element)[::2]):
        desc = cases.describe(spec, element, (260,), (0,), **fields)
        if bound(cases.Problem(Case(desc=desc, without=without))).sku.variant == "lagged":
            data = cases.data_of(spec)[k % len(cases.data_of(spec))]
            check([Case(desc=desc, without=without, data=data)])


TINY = {"f32": 1e-40, "f16": 6e-8, "bf16": 1e-40, "f64": 1e-310}

BIG = {"f32": 1e30, "f16": 6e4, "bf16": 1e30, "f64": 1e300}


@pytest.mark.parametrize(
    ("kind", "element"),
    [
        pytest.param(kind, element, id=f"{kind}-{element}-careful")
        for kind in ("prod", "cumprod")
        for element in ("f32", "f16", "bf16", "f64")
    ],
)
def test_products_of_anything(kind, element):
    """Zeros, infinities, NaNs, subnormals and exponents far apart, beside each other and alone."""
    tiny, big = TINY[element], BIG[element]
    special = [
        [0.0],
        [np.nan],
        [-0.0, 0.0],
        [np.nan, 0.0],
        [big, 1 / big, -big, 1 / big],
    ]
    if kind == "prod":  # beyond its range a scan promises no more than ordinary overflow
        special += [[np.inf], [-np.inf, np.inf], [0.0, np.inf], [0.0, np.inf, np.nan]]
        special += [[tiny], [big / 2, tiny], [big, big, 1 / big, 1 / big]]
    spec = spec_of(kind)
    lefts = [(), ("y",)] if kind == "cumprod" else [("y",)]
    places = [(9, 1), (70, 1), (70, 0)]
    if kind == "prod":
        places.append((150, 1))
    for (n, axis), without in itertools.product(places, lefts):
        # A row for each, between rows of ordinary factors.
        rows = special if n == 9 or kind == "prod" else special[axis::2]
        count = 2 * len(rows) + 1
        shape = (count, n) if axis else (n, count)
        desc = cases.describe(spec, ElementKind(element), shape, (axis,))
        problem = cases.Problem(Case(desc=desc, without=without, seed=n))
        for row, some in enumerate(rows):
            for k, value in enumerate(some):
                place = (2 * row + 1, n - 1 - k * (n // 5))  # in both parts of a row of 150
                problem.poke("x", place if axis else place[::-1], value)
        if "y" in problem.arrays:
            with np.errstate(all="ignore"):
                y = np.cumprod(problem.arrays["x"].astype(np.float64), axis)
                problem.poke("y", ..., y.astype(problem.arrays["y"].dtype))
        settle(problem)
        if kind == "prod" and n >= 70:
            whole = n == 70 and axis == 1 and element != "f64"
            assert bound(problem).sku.variant == ("resident" if whole else "lagged")


@pytest.mark.parametrize(("element", "often"), [("f32", 560), ("bf16", 1100), ("f64", 300)])
def test_products_beyond_the_exponents_of_f64(element, often):
    """One half of a row takes the product far beyond f64, the other half brings it back to 1."""
    big = 2.0 ** np.floor(np.log2(BIG[element]))
    for n, axis in [(140, 1), (often, 1), (280, 0)]:  # few parts, many, and columns
        shape = (2, n) if axis else (n, 2)
        desc = cases.describe(spec_of("prod"), ElementKind(element), shape, (axis,))
        problem = cases.Problem(Case(desc=desc, without=("y",), seed=n))
        row = (1, slice(None)) if axis else (slice(None), 1)
        x = np.repeat((big, 1 / big), n // 2)
        problem.poke("x", row, x)
        assert bound(problem).sku.variant == "lagged"
        problem.plan("cpu", TRITON).run(problem.args())
        dy = problem.arrays["dy"].astype(np.float64)[(1, 0) if axis else (0, 1)]
        got = problem.outputs()["dx"]
        np.testing.assert_array_equal(got[row], (dy / x).astype(got.dtype))
        assert np.isfinite(got.astype(np.float64)).all()


@triton.jit
def tell_and_join(states, found, K: tl.constexpr):
    """What the programs of a cluster would tell each other of a row."""
    part = tl.arange(0, K)
    s0, s1 = tl.load(found + part), tl.load(found + K + part)
    s2 = tl.load(found + 2 * K + part)
    numbers = told("prod", states + part, K, s0, s1, s2)
    s0, s1, s2 = join_told("prod", "", numbers[None, :], states, K, K)
    one = tl.arange(0, 1)
    tl.store(found + one, s0)
    tl.store(found + K + one, s1)
    tl.store(found + 2 * K + one, s2)


@pytest.mark.parametrize(
    ("exponents", "odd"),
    [
        ([3, -5, 900, 0, 7, -900, 1, 2], {}),
        ([3, -5, 901, 0, 7, -901, 1, 2], {}),  # beyond what one number tells
        ([40_000, -39_000, 0, 0, 0, 0, 0, 0], {}),
        ([1, 2, 3, 4, 5, 6, 7, 8], {2: 64.0 + 1.0, 5: 64.0 + 1.0}),  # a zero in two parts
        ([1, 2, 3, 4, 5, 6, 7, 8], {7: 64.0}),
    ],
    ids=["usual", "large", "far", "zeros", "not usual"],
)
def test_programs_of_a_cluster_join_products(exponents, odd):
    k = len(exponents)
    found = np.array([np.linspace(1.0, 1.97, k), exponents, [odd.get(i, 0.0) for i in range(k)]])
    significand = np.prod(found[0])
    found, states = torch.from_numpy(found.copy()), torch.zeros(4 * k, dtype=torch.float64)
    interpreter.install()
    tell_and_join[(1,)](states, found, k)
    m, e, more = found[:, 0].tolist()
    assert 1.0 <= m < 2.0
    assert np.isclose(m * 2.0 ** (e - sum(exponents)), significand, rtol=1e-15)
    counted = [sum(int(one) >> shift & 3 for one in odd.values()) for shift in (0, 2, 4, 6)]
    assert more == sum(min(one, 2) << 2 * k for k, one in enumerate(counted))


def far_apart(shape, strides, element):
    """An array in memory of which only the pages that are touched exist."""
    dtype = cases._DTYPES[element]
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    no_reserve = 0x4000  # MAP_NORESERVE on Linux, which Python 3.11 does not name
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | no_reserve)
    steps = [step * dtype.itemsize for step in strides]
    return np.ndarray(shape, dtype, memory, 0, steps)


FAR = 2**31 + 24


SPOILT = {
    "nothing": [],
    "a zero": [(700, 0.0)],
    "two zeros": [(3, 0.0), (2000, -0.0)],
    "an infinity": [(1500, np.inf)],
    "a NaN": [(1023, np.nan), (1024, 0.0)],
    "large and small by turns": [(np.s_[::2], 2.0**14), (np.s_[1::2], 2.0**-14)],
    "far apart": [(np.s_[:4], 2.0**100), (np.s_[1024:1028], 2.0**-100)],
    "far apart beside each other": [(np.s_[:4], 2.0**100), (np.s_[4:8], 2.0**-100)],
}


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("n", [2048, 8192, 16384])
@pytest.mark.parametrize("element", ELEMENTS)
def test_products_of_whole_rows(element, n, spoilt):
    """Rows as an H200 takes them, of so many products of groups that threads first make them one
    each, and near 1."""
    if spoilt.startswith("far") and element is ElementKind.F16:
        pytest.skip("beyond f16")
    if n == 16384 and element is ElementKind.F64:
        pytest.skip("in no program's registers")
    desc = cases.describe(spec_of("prod"), element, (2, n), (1,))
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    x = np.exp(np.random.default_rng(5).normal(size=(2, n)) / 64)
    for places, value in SPOILT[spoilt]:
        x[1, places] = value
    problem.poke("x", ..., x)
    with table.using("interpreter", table.table_of("sm_90")):
        assert bound(problem).sku.variant == "resident"
        settle(problem)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("n", [64, 70, 200])  # a full tile, not a full one, parts
def test_one_value_a_row_is_added_up_as_often_as_there_are_places(element, n):
    """As the gradient of a sum comes to log_softmax."""
    desc = cases.describe(spec_of("log_softmax"), element, (3, n), (1,))
    rng = np.random.default_rng(n)
    dtype = cases._DTYPES[element]
    y, dx = rng.normal(-3.0, 1.0, (3, n)).astype(dtype), np.empty((3, n), dtype)
    dy = np.broadcast_to(np.array([[1.5], [-0.25], [np.inf]], dtype), (3, n))
    plan = gp.SoftmaxBackwardPlan.select(desc, preference=TRITON)
    plan.run(gp.SoftmaxBackwardArgs(dy=dy, y=y, dx=dx))
    wide, given = y.astype(np.float64), dy.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wanted = given - np.exp(wide) * given.sum(1, keepdims=True)
    some = np.finfo(np.float64).eps if element is ElementKind.F64 else 2.0**-23
    some = {ElementKind.F16: 2.0**-10, ElementKind.BF16: 2.0**-7}.get(element, 8 * some)
    size = np.abs(given[:2]) * (1 + n * np.exp(wide[:2]))
    assert (np.abs(dx[:2].astype(np.float64) - wanted[:2]) <= some * size).all()
    assert np.isnan(dx[2].astype(np.float64)).all()


def test_a_zero_that_reaches_a_product_keeps_its_sign():
    desc = cases.describe(spec_of("prod"), ElementKind.F32, (2, 2048), (1,))
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    problem.poke("x", ..., np.ones((2, 2048)))
    problem.poke("dy", ..., np.array([[-0.0], [0.0]]))
    with table.using("interpreter", table.table_of("sm_90")):
        assert bound(problem).sku.variant == "resident"
        settle(problem)
    assert (np.signbit(problem.outputs()["dx"]) == [[True], [False]]).all()


@pytest.mark.parametrize("kind", ["softmax", "sum", "cumsum", "cummax", "prod"])
@pytest.mark.parametrize("rows_far", [True, False], ids=["rows", "axis"])
def test_strides_beyond_32_bits(kind, rows_far):
    """Addresses are 64-bit, along the axis and across it."""
    element = ElementKind.BF16
    shape, axes = (3, 40), (1,)
    strides = (FAR, 1) if rows_far else (1, FAR)
    if not rows_far:
        shape, axes = (3, 3), (1,)
    desc = cases.describe(spec_of(kind), element, shape, axes)
    problem = cases.Problem(Case(desc=desc))
    bound(problem)()
    near = problem.outputs()["dx"]
    arrays = {}
    for operand in desc.operands:
        if operand.name in problem.arrays:
            array = problem.arrays[operand.name]
            if operand.shape == shape:
                away = far_apart(shape, strides, element)
                away[...] = array if not operand.output else np.nan
                array = away
            arrays[operand.name] = array
    plan = problem.plan("cpu", TRITON)
    plan.run(type(problem.args())(**arrays))
    np.testing.assert_array_equal(np.array(arrays["dx"]).view("u2"), near.view("u2"))


def test_embedding_strides_beyond_32_bits():
    rng = np.random.default_rng(3)
    dout = far_apart((5, 3), (FAR, 1), ElementKind.BF16)
    dout[...] = rng.normal(size=(5, 3))
    table = far_apart((3, 3), (FAR, 1), ElementKind.BF16)
    table[...] = np.nan
    indices = np.array([2, 0, 2, 1, 2])
    gp.embedding_backward(dout, indices, 3, out=table, preference=TRITON)
    near = gp.embedding_backward(np.array(dout), indices, 3, preference=TRITON)
    np.testing.assert_array_equal(np.array(table).view("u2"), near.view("u2"))


@problems(elements=[ElementKind.BF16])
def test_ranks_up_to_eight(spec, element):
    if spec.category is OpCategory.EMBEDDING:
        pytest.skip("a table has rank 2")
    fields, without = cases.options_of(spec, element)[0]
    for shape, axis in [((2, 1, 2, 1, 3, 1, 2, 2), 4), ((2, 2, 1, 3, 2), 0)]:
        desc = cases.describe(spec, element, shape, (axis,), **fields)
        check([Case(desc=desc, layout=layout, without=without) for layout in (Layout.MIXED,)])


@problems([spec for spec in SPECS if spec.kind in ("softmax", "cumprod", "prod", "embedding")])
def test_a_workspace_of_exactly_the_stated_size_is_enough(spec, element):
    """Filled with ones beforehand, guarded behind, and twice: what it holds does not matter."""
    shape = (40, 5, 6) if spec.category is OpCategory.EMBEDDING else (150,)
    fields = {"accumulate": False} if spec.category is OpCategory.EMBEDDING else {}
    desc = cases.describe(spec, element, shape, (0,), **fields)
    without = ("y",) if spec.kind == "cumprod" else ()
    problem = cases.Problem(Case(desc=desc, without=without))
    plan = problem.plan("cpu", TRITON)
    size = plan.workspace_size
    assert bound(problem).workspace_size <= size
    memory = np.full(size + 512, 255, np.uint8)
    start = -memory.ctypes.data % 256
    workspace = memory[start : start + size]
    found = []
    for _ in range(2):
        plan.run(problem.args(), workspace=workspace)
        found.append(problem.outputs())
    assert problem.outcome(plan.precision_guarantee.relative_error).ok
    for name, first in found[0].items():
        np.testing.assert_array_equal(first.view("u1"), found[1][name].view("u1"))
    assert (memory[start + size :] == 255).all()
    assert (memory[:start] == 255).all()
    if size:
        with pytest.raises(gp.WorkspaceTooSmall):
            plan.run(problem.args(), workspace=workspace[:-1])


def test_the_variant_does_not_depend_on_the_data():
    for data in Data:
        desc = cases.describe(spec_of("prod"), ElementKind.F32, (4, 150), (1,))
        problem = cases.Problem(Case(desc=desc, data=data, without=("y",)))
        assert bound(problem).sku.variant == "lagged"


def test_the_sku_tells_the_truth():
    desc = cases.describe(spec_of("softmax"), ElementKind.F32, (4, 8), (1,))
    sku = cases.Problem(Case(desc=desc)).plan("cpu", TRITON).sku
    assert (sku.backend, sku.arch, sku.layout) == (gp.BackendKind.TRITON, "interpreter", "rows")
    assert "triton" in str(sku)
