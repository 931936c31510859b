"""The GPU's kernels in Triton's interpreter, on CPU memory: right in every variant.

The interpreter's table of thresholds is small, so that small shapes are split and tiled
as large ones are on a GPU. It takes about a tenth of a second a program, so every kind and element
meets a covering set of cases here; `--exhaustive` runs the whole grid, for hours.
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gradplan as gp
from conftest import CUDA
from covering import HALVES, SPECS, covering, named_kernels, problems, program_of, spec_of
from gradplan import cases
from gradplan.backends.gpu import launch, table, walked
from gradplan.cases import Case, Data, Layout
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import ELEMENTS, Engine, Need

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(CUDA, reason="Triton compiles for the GPU in this process"),
    # NumPy warns where a GPU computes inf − inf without a word.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]

TRITON = gp.PlanPreference(backend="triton")


def check(some):
    missed = [str(got) for case in some if not (got := cases.run_plan(case, "cpu", TRITON)).ok]
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


def settle(problem):
    """Run a problem whose contents were changed, and hold it to its guarantee."""
    plan = problem.plan("cpu", TRITON)
    plan.run(problem.args())
    outcome = problem.outcome(plan.precision_guarantee.relative_error)
    assert outcome.ok, str(outcome)
    return outcome


def bound(problem):
    return problem.plan("cpu", TRITON).bind(problem.args())


@problems()
def test_covering_cases(spec, element):
    missed = []
    for problem in covering(spec, element):
        plan = problem.plan("cpu", TRITON)
        plan.run(problem.args())
        outcome = problem.outcome(plan.precision_guarantee.relative_error)
        if not outcome.ok:
            missed.append(f"{bound(problem).sku.variant}: {outcome}")
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


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
            launch_it()
            plan = problem.plan("cpu", TRITON)
            outcome = problem.outcome(plan.precision_guarantee.relative_error)
            if not outcome.ok:
                missed.append(str(outcome))
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


WALKED = [spec for spec in SPECS if spec.engine is Engine.RECURRENCE]


@problems([spec for spec in WALKED if spec.ties], HALVES)
def test_rows_that_a_warp_takes_alone(spec, element):
    """All data; options take turns."""
    asked = cases.options_of(spec, element)
    missed = []
    for k, data in enumerate(cases.data_of(spec), ELEMENTS.index(element)):
        fields, without = asked[k % len(asked)]
        desc = cases.describe(spec, element, (2, 256), (1,), **fields)
        problem = cases.Problem(Case(desc=desc, data=data, without=without, seed=k))
        launch_it = bound(problem)
        assert (launch_it.sku.variant, launch_it.sku.layout) == ("resident_marked", "rows")
        launch_it()
        outcome = problem.outcome(problem.plan("cpu", TRITON).precision_guarantee.relative_error)
        if not outcome.ok:
            missed.append(str(outcome))
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


def walking():
    """The interpreter's table, with scans that are walked or held, in parts of 32 lines."""
    sizes = (
        ("cumsum", 256, 1, 256, 1),
        ("cumprod", 256, 1, 256, 1),
        ("log_cumsum_exp", 256, 1, 256, 1),
        ("", 1024, 1, 1024, 1),
    )
    return replace(
        table.table_of("interpreter"),
        fill=4,
        walked_rows=sizes,
        walked_columns=(
            ("cumsum", 1024, 2, 512, 2),
            ("cumprod", 1024, 2, 512, 2),
            ("log_cumsum_exp", 1024, 2, 512, 2),
            ("", 4096, 2, 2048, 2),
        ),
        held_scans=sizes,
    )


@problems(WALKED, ELEMENTS[:3])
def test_scans_that_are_walked_and_held(spec, element):
    """Held ones by one program, which takes all waves; on a GPU `test_gpu_values` has many. All
    data; shapes and options take turns."""
    few = 1 if spec.ties else 4  # their parts are so much shorter
    shapes = [
        ((4, 2048 // few), (1,), "walked"),
        ((3, 2048 // few + 16), (1,), "held"),
        ((256 // few, 128), (0,), "walked"),
        ((2, 80, 144), (1,), "walked"),
        ((1, 2048 // few), (1,), "held"),
        ((4, 1024 // few + 16), (1,), "walked"),
    ]
    asked = cases.options_of(spec, element)
    if spec.kind in ("cumprod", "log_cumsum_exp"):
        asked = [(fields, without) for fields, without in asked if not without]
    turn = ELEMENTS.index(element)
    missed = []
    with table.using("interpreter", walking()):
        for k, data in enumerate([*cases.data_of(spec)] * 2, turn):
            (shape, axes, variant), (fields, without) = shapes[k % 6], asked[k % len(asked)]
            desc = cases.describe(spec, element, shape, axes, **fields)
            problem = cases.Problem(Case(desc=desc, data=data, without=without, seed=k))
            launch_it = bound(problem)
            assert launch_it.sku.variant.startswith(variant)
            launch_it()
            plan = problem.plan("cpu", TRITON)
            assert launch_it.workspace_size <= plan.workspace_size
            outcome = problem.outcome(plan.precision_guarantee.relative_error)
            if not outcome.ok:
                missed.append(str(outcome))
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


@pytest.fixture
def two_passes(monkeypatch):
    """Let all programs of a launch that waits run, one after the other, twice: what the first pass
    hears is not told yet, and the second hears what the first has told. Not for dx that is dy."""

    once = launch.Interpreter.launch

    def twice(self, step, addresses):
        for _ in range(2 if step.together else 1):
            once(self, step, addresses, step.grid)

    monkeypatch.setattr(launch.Interpreter, "launch", twice)


@pytest.mark.parametrize("programs", [3])
@problems(WALKED, ELEMENTS[:2])
def test_scans_held_by_several_programs(spec, element, programs, two_passes):
    """The last wave is not full, and rows begin and end within waves."""
    part = 1024 if spec.ties else 256
    asked = cases.options_of(spec, element)
    if spec.kind in ("cumprod", "log_cumsum_exp"):
        asked = [(fields, without) for fields, without in asked if not without]
    with table.using("interpreter", replace(walking(), fill=2 * programs)):
        for k, (rows, n) in enumerate(((1, 6 * part), (3, 3 * part - 16))):
            fields, without = asked[k % len(asked)]
            desc = cases.describe(spec, element, (rows, n), (1,), **fields)
            problem = cases.Problem(Case(desc=desc, without=without, seed=k))
            assert bound(problem).sku.variant.startswith("held")
            settle(problem)


@pytest.mark.parametrize(
    ("units", "programs"), [(4096, 128), (8192, 131), (132, 132), (133, 132), (7, 132)]
)
def test_waves_are_even(units, programs):
    """No more waves than 132 programs would take, and as full as can be where few idle."""
    assert walked._even(units, 132) == programs


@pytest.mark.parametrize("rows", [1, 4], ids=["held", "walked"])
@pytest.mark.parametrize("y", [300.0, 1e3, 6e4])
def test_what_a_log_brings_from_other_parts_is_exact_for_large_y(rows, y):
    """Each part has a reference of its own, beside which an exponent is small."""
    n = 1280
    x = np.full((rows, n), y - 60, np.float32)
    x[:, 0], x[:, 640] = y, y + 1
    sums = np.logaddexp.accumulate(x.astype(np.float64), 1).astype(np.float32)
    dy = np.zeros_like(x)
    dy[:, -1] = 1.0
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, (rows, n), (1,))
    problem = cases.Problem(Case(desc=desc))
    for name, values in {"x": x, "y": sums, "dy": dy}.items():
        problem.poke(name, ..., values)
    with table.using("interpreter", walking()):
        assert bound(problem).sku.variant.startswith("held" if rows == 1 else "walked")
        settle(problem)


@pytest.mark.parametrize("rows", [1, 4], ids=["held", "walked"])
@pytest.mark.parametrize("slope", [0.5, 5.0, 10.0])
def test_an_infinite_gradient_of_a_log_stays_so(rows, slope):
    """However small the factors are that it meets one by one: their product is no 0."""
    n = 1280
    x = np.broadcast_to(slope * np.arange(n, dtype=np.float32), (rows, n)).copy()
    y = np.logaddexp.accumulate(x.astype(np.float64), 1).astype(np.float32)
    dy = np.ones((rows, n), np.float32)
    dy[:, 1100] = np.inf
    dx = np.empty_like(dy)
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, (rows, n), (1,))
    with table.using("interpreter", walking()):
        plan = gp.ScanBackwardPlan.select(desc, preference=TRITON)
        launch_it = plan.bind(gp.ScanBackwardArgs(dy=dy, x=x, y=y, dx=dx))
        assert launch_it.sku.variant.startswith("held" if rows == 1 else "walked")
        launch_it()
    assert (dx[:, :1101] == np.inf).all()
    assert np.isfinite(dx[:, 1101:]).all()


def test_an_infinite_gradient_stays_so_along_a_chain_of_logs():
    """As above, also where a tile and the step behind it are so small together."""
    n, step = 256, 700.0
    y = np.zeros((1, n), np.float32)
    for place in (60, 64, 65, 128, 160, 200):
        y[:, place:] += step
    y[:, :62] -= 30.0
    dy = np.zeros_like(y)
    dy[:, 250] = np.inf
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, (1, n), (1,))
    problem = cases.Problem(Case(desc=desc))
    for name, values in {"x": y, "y": y, "dy": dy}.items():
        problem.poke(name, ..., values)
    assert bound(problem).sku.variant.startswith("chained")
    settle(problem)


def without_lines():
    """The interpreter's table, with scans that are run again in tiles over threads, as where arrays
    do not lie in runs."""
    nowhere = (0, 0, 0, 1)
    return replace(
        table.table_of("interpreter"),
        forward_lines=(("", 0, 1, 0, 1),),
        forward_side=(("", nowhere, nowhere),),
    )


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "variant", "reverse"),
    [
        ((1, 128), 1, "split", True),
        ((128, 2), 0, "split", False),
        ((3, 128), 1, "tiled", False),
        ((3, 128), 1, "tiled", True),
    ],
)
def test_an_infinite_gradient_of_a_log_stays_so_without_y(shape, axis, variant, reverse, lines):
    """Steps of y that are so small together only: within a small step of a tile, within the tile
    and from tile to tile."""
    n = shape[axis]
    x, dy = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for place in (28, 29, 31, 64, 80, 100):
        x[place:] += 700.0
    dy[125] = np.inf
    desc = cases.describe(
        spec_of("log_cumsum_exp"), ElementKind.F32, shape, (axis,), reverse=reverse
    )
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    along = (-1, 1) if axis == 0 else (1, -1)
    for name, values in {"x": x, "dy": dy}.items():
        values = values[:: -1 if reverse else 1].reshape(along)
        problem.poke(name, ..., np.broadcast_to(values, shape))
    chosen = table.table_of("interpreter") if lines else without_lines()
    with table.using("interpreter", chosen):
        assert bound(problem).sku.variant == f"{variant}_recomputed"
        settle(problem)


LEAPS = {
    "within a part": {600: 1000},
    "between parts": {512: 1000},
    "of nearly as much": {300: 700, 512: 700, 513: 700, 768: 700},
    "to infinity": {600: np.inf},
    "from none": {300: np.inf},
}


@pytest.mark.parametrize("leap", LEAPS)
@pytest.mark.parametrize(
    ("element", "rows", "programs"), [("bf16", 1, 1), ("f32", 1, 3), ("f16", 1, 3), ("f32", 4, 1)]
)
def test_an_infinite_gradient_of_a_log_meets_a_leap(element, rows, programs, leap, request):
    """Where one step of y leaps so far that its factor is 0, what is infinite becomes NaN, and
    only there: also in the parts before that part, which hear nothing of that step."""
    n, dtype = 1024, {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[element]
    if programs > 1:
        request.getfixturevalue("two_passes")
    y = np.zeros(n, np.float64)
    for place, height in LEAPS[leap].items():
        y[place:] += height
    if leap == "from none":
        y = np.where(y > 0, 0.0, -np.inf)
    y = np.broadcast_to(y.astype(dtype), (rows, n)).copy()
    dy = np.zeros((rows, n), dtype)
    dy[:, 1000] = np.inf
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind(element), (rows, n), (1,))
    problem = cases.Problem(Case(desc=desc))
    for name, values in {"x": y, "y": y, "dy": dy}.items():
        problem.poke(name, ..., values)
    with table.using("interpreter", replace(walking(), fill=max(4, 2 * programs))):
        assert bound(problem).sku.variant.startswith("held" if rows == 1 else "walked")
        settle(problem)


def test_what_a_walk_of_a_log_carries_is_exact(monkeypatch):
    """A column whose y jumps makes its whole strip go from part to part in two ways by turns: no
    exponential of f32 may be multiplied in each time."""
    from gradplan.backends.gpu.kernels import walk_logs

    def refused(*_):
        raise AssertionError

    monkeypatch.setattr(walk_logs, "far_exp", refused)
    n, columns = 1024, 128
    x = np.full((n, columns), -60.0, np.float32)
    x[0] = 0.3
    x[::37, 0] = 41.0 * np.arange(len(x[::37]))
    y = np.logaddexp.accumulate(x.astype(np.float64), 0).astype(np.float32)
    dy, dx = np.ones_like(x), np.empty_like(x)
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, (n, columns), (0,))
    with table.using("interpreter", walking()):
        plan = gp.ScanBackwardPlan.select(desc, preference=TRITON)
        launch_it = plan.bind(gp.ScanBackwardArgs(dy=dy, x=x, y=y, dx=dx))
        assert launch_it.sku.variant.startswith("walked")
        launch_it()
    wanted = np.exp(x[0, 1] - y[:, 1].astype(np.float64)).sum()
    assert abs(dx[0, 1] / wanted - 1) < 16 * 2.0**-24


@pytest.mark.parametrize("rows", [1, 4], ids=["held", "walked"])
@pytest.mark.parametrize("kind", ["cummax", "cummin"])
def test_an_infinity_goes_through_parts_without_winners(rows, kind):
    """What parts tell of themselves is also a gate: the one must not spoil the other."""
    n = 4096
    x = np.zeros((rows, n), np.float32)
    x[:, 0] = 5 if kind == "cummax" else -5
    for last, wanted in (([np.inf], np.inf), ([3e38, 3e38], np.inf), ([-np.inf], -np.inf)):
        dy = np.ones((rows, n), np.float32)
        dy[:, n - len(last) :] = last
        dx = np.empty_like(dy)
        desc = cases.describe(spec_of(kind), ElementKind.F32, (rows, n), (1,))
        with table.using("interpreter", walking()):
            plan = gp.ScanBackwardPlan.select(desc, preference=TRITON)
            launch_it = plan.bind(gp.ScanBackwardArgs(dy=dy, x=x, dx=dx))
            assert launch_it.sku.variant.startswith("held" if rows == 1 else "walked")
            launch_it()
        assert (dx[:, 0] == wanted).all()
        assert not dx[:, 1:].any()


@pytest.mark.parametrize(
    ("ties", "later", "busy"),
    [
        ("first", 0.0, 1),
        ("last", 0.0, 1),
        ("first", 5.0, 1),
        ("last", 5.0, 2),
        ("first", np.nan, 2),
        ("last", np.nan, 2),
    ],
)
@pytest.mark.parametrize("begin", [5.0, np.nan])
def test_parts_without_a_winner_give_nothing(ties, later, busy, begin, monkeypatch):
    """Only parts in which a place may win are run through, once for marks, once for gradients."""
    from gradplan.backends.gpu.kernels import held_scans

    calls = []
    whole = held_scans.give_lines

    def counted(*given):
        calls.append(given)
        return whole(*given)

    monkeypatch.setattr(held_scans, "give_lines", counted)
    n = 4096
    x = np.zeros((1, n), np.float32)
    x[:, 3], x[:, 2500] = begin, later
    desc = cases.describe(spec_of("cummax"), ElementKind.F32, (1, n), (1,), ties=ties)
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    problem.poke("x", ..., x)
    problem.poke("dy", (..., slice(2600, None)), np.nan if busy == 2 else np.inf)
    with table.using("interpreter", walking()):
        assert bound(problem).sku.variant.startswith("held")
        settle(problem)
    if np.isnan(begin):  # after which only a NaN wins, if the last does
        busy = 2 if ties == "last" and np.isnan(later) else 1
    assert len(calls) == 2 * busy


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
        if spec.kind in ("softmax", "lerp", "cummax", "log_cumsum_exp", "embedding"):
            for problem in covering(spec, ElementKind.F32):
                program = program_of(problem)
                met |= {step.kernel for step in (*program.steps, *program.apart)}
    for case in long_rows(ElementKind.F16):
        met |= {step.kernel for step in program_of(cases.Problem(case)).steps}
    # What lies in shared memory, and what a warp takes alone, has tests of its own.
    by_others = {
        "held.held_rows",
        "held_scans.held_scan",
        "walks.walk_rows",
        "walk_logs.walk_logs",
        "row_alone.scan_row_alone",
    }
    assert met == named_kernels() - by_others


def long_rows(element):
    """cumsum of halves in rows of a thousand and more, whichever kernel takes them."""
    some = [
        ((1, 1024), False, Layout.CONTIGUOUS),  # full tiles
        ((3, 1025), True, Layout.OFFSET),  # a last one of one element
        ((3, 1087), True, Layout.NEGATIVE),  # ... of all but one, walked the other way
        ((3, 1568), False, Layout.CONTIGUOUS),  # rows of full tiles
    ]
    for (rows, n), reverse, layout in some[HALVES.index(element) :: 2]:
        desc = cases.describe(spec_of("cumsum"), element, (rows, n), (1,), reverse=reverse)
        yield Case(desc=desc, layout=layout, seed=n)


@pytest.mark.parametrize("element", [pytest.param(e, id=f"cumsum-{e}-long") for e in HALVES])
def test_long_rows_of_halves(element):
    check(long_rows(element))


@pytest.mark.parametrize("element", [pytest.param(e, id=f"cumsum-{e}-leaks") for e in HALVES])
def test_a_nan_or_an_infinity_stays_where_the_sum_has_it(element):
    """One bad element in a long row, near each end and inside, and the other row clean."""
    desc = cases.describe(spec_of("cumsum"), element, (2, 320), (1,))
    first = element is ElementKind.F16
    for bad, place in [(np.nan, 0), (np.inf, 256)] if first else [(-np.inf, 63), (np.nan, 319)]:
        problem = cases.Problem(Case(desc=desc, seed=place))
        problem.poke("dy", (1, place), bad)
        settle(problem)
        got = problem.outputs()["dx"].astype(np.float32)
        assert np.isfinite(got[0]).all()
        assert not np.isfinite(got[1, : place + 1]).any()
        assert np.isfinite(got[1, place + 1 :]).all()


SCANS = [spec for spec in SPECS if spec.category is OpCategory.SCAN]


@problems(SCANS, [ElementKind.F32, ElementKind.F64])
def test_carries_are_joined_over_many_tiles(spec, element):
    """More tiles than are joined at a time, and no multiple of them; both directions."""
    data = cases.data_of(spec)
    asked = [(("y",), SCANS.index(spec) % 2 == 0)] if spec.y is Need.OPTIONAL else []
    for without, reverse in [((), False), ((), True), *asked]:
        desc = cases.describe(spec, element, (330,), (0,), reverse=reverse)
        case = Case(desc=desc, data=data[reverse], without=without, seed=330)
        program = program_of(cases.Problem(case))
        if without and not spec.ties:
            joins = [step for step in program.steps if ".join" in step.kernel]
            assert joins
            for step in joins:
                assert dict(step.arguments)["tiles_along"].value > dict(step.constants)["K"]
        else:
            assert dict(program.steps[-1].constants)["LEVELS"] > 2
        check([case])


@pytest.mark.parametrize("axis", [0, 1])
def test_roundings_do_not_add_up_along_a_row(axis):
    """Sums of one number grow alike in every tile: each carry would be rounded the same way."""
    shape = (3, 1000) if axis else (1000, 8)
    for kind in ("cumsum", "cummax"):
        desc = cases.describe(spec_of(kind), ElementKind.F32, shape, (axis,))
        problem = cases.Problem(Case(desc=desc))
        problem.poke("dy", ..., np.float32(0.7001))
        if kind == "cummax":  # the first wins it all
            problem.poke("x", ..., np.float32(1.0))
            problem.poke("y", ..., np.float32(1.0))
        assert bound(problem).sku.variant.startswith("tiled")
        outcome = settle(problem)
        assert outcome.error < 20 * 2.0**-24


@pytest.mark.parametrize("element", [ElementKind.F32, ElementKind.BF16], ids=str)
def test_a_nan_that_arrives_does_not_reach_weights_of_zero(element):
    """In log-cumsum-exp, from tiles behind: where x is −∞ the gradient is 0."""
    desc = cases.describe(spec_of("log_cumsum_exp"), element, (1, 200), (1,))
    problem = cases.Problem(Case(desc=desc))
    for place in (10, 100):
        problem.poke("x", (0, place), -np.inf)
    problem.poke("dy", (0, 190), np.nan)
    assert bound(problem).sku.variant.startswith("chained")
    settle(problem)
    dx = problem.outputs()["dx"].astype(np.float64)[0]
    assert dx[10] == 0.0
    assert dx[100] == 0.0
    assert np.isnan(dx[50])


def test_a_limit_of_the_workspace_takes_the_bits_away():
    desc = cases.describe(spec_of("cummax"), ElementKind.F32, (2, 4), (1,))
    frugal = replace(TRITON, max_workspace_bytes=0)
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    plan = problem.plan("cpu", frugal)
    assert plan.workspace_size == 0
    assert problem.plan("cpu", TRITON).bind(problem.args()).sku.variant == "resident_marked"
    assert plan.bind(problem.args()).sku.variant == "resident_recomputed"
    plan.run(problem.args())
    assert problem.outcome(plan.precision_guarantee.relative_error).ok


def test_what_arrives_may_be_beyond_the_range_of_f32():
    """In log-cumsum-exp, S of two tiles together, scaled to one of them; the result is small."""
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, (3, 128), (1,))
    problem = cases.Problem(Case(desc=desc))
    x = np.full((3, 128), -60.0, np.float32)
    x[:, 0] = 0.0
    dy = np.zeros((3, 128), np.float32)
    dy[:, [90, 120]], dy[:, 50] = 2e38, -1e38
    problem.poke("x", ..., x)
    problem.poke("y", ..., np.float32(0.0))
    problem.poke("dy", ..., dy)
    settle(problem)
    assert np.isfinite(problem.outputs()["dx"]).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_log_sums_without_y_may_leap_from_tile_to_tile(axis, reverse):
    """Beyond what f32 can tell of exp; where tiles are read once, and where they are cut."""
    for rows, leap in ((2, 70.0), (2, 300.0), (6, 1e4)):
        shape = (rows, 150) if axis else (150, rows)
        desc = cases.describe(
            spec_of("log_cumsum_exp"), ElementKind.F32, shape, (axis,), reverse=reverse
        )
        problem = cases.Problem(Case(desc=desc, without=("y",)))
        x = np.zeros(150, np.float32)
        x[64:] = leap
        x = np.broadcast_to(x[::-1] if reverse else x, (rows, 150))
        problem.poke("x", ..., x if axis else x.T)
        problem.poke("dy", ..., np.float32(1.0))
        settle(problem)


@pytest.mark.parametrize("axis", [0, 1])
def test_log_sums_without_y_keep_a_small_gradient_from_far_away(axis):
    for small in (1e-30, 1e-35):
        shape = (2, 400) if axis else (400, 2)
        desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, shape, (axis,))
        problem = cases.Problem(Case(desc=desc, without=("y",)))
        dy = np.zeros((2, 400), np.float32)
        dy[:, -1] = small
        problem.poke("x", ..., np.float32(0.0))
        problem.poke("dy", ..., dy if axis else dy.T)
        settle(problem)
        got = problem.outputs()["dx"].reshape(-1)[0]
        assert got == pytest.approx(small / 400, rel=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_log_sums_without_y_keep_what_tiles_add_below_the_last_bit(reverse):
    """The first place outweighs all others: a tile adds less to its sum than f32 can tell, and 200
    tiles together more than the guarantee leaves out."""
    n = 200 * 32
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, (1, n), (1,), reverse=reverse)
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    x = np.full(n, np.log(0.45 * 2.0**-23 / 32))
    x[0] = 0.0
    dy = np.zeros(n)
    dy[-1] = 1.0
    problem.poke("x", ..., x[::-1] if reverse else x)
    problem.poke("dy", ..., dy[::-1] if reverse else dy)
    assert bound(problem).sku.variant == "split_recomputed"
    settle(problem)


def test_long_products_keep_the_range_of_f64():
    """Products on the way leave the range of f32; the gradient does not."""
    for axis, shape in ((1, (1, 128)), (0, (128, 2))):
        desc = cases.describe(spec_of("cumprod"), ElementKind.BF16, shape, (axis,))
        for start, place in (([1e-37, 1e15, 1e30, 1e25], 3), ([1e35, 1.0, 1e-30, 1e-30], 3)):
            problem = cases.Problem(Case(desc=desc))
            x, dy = np.ones(128), np.zeros(128)
            x[:4], dy[place] = start, 1.0
            turned = (lambda row: row[None]) if axis else (lambda row: row[:, None])
            problem.poke("x", ..., turned(x))
            held = problem.arrays["x"].astype(np.float64)
            problem.poke("y", ..., np.cumprod(held, axis))
            problem.poke("dy", ..., turned(dy))
            settle(problem)
            second = problem.outputs()["dx"].astype(np.float64).take(1, axis)
            assert (np.isfinite(second) & (second != 0)).all()


STATES = [spec for spec in SPECS if spec.engine is Engine.ROW_STATE]


@problems(STATES, [ElementKind.F32])
def test_states_are_joined_over_many_chunks(spec, element):
    for k, (fields, without) in enumerate(cases.options_of(spec, element)[::2]):
        desc = cases.describe(spec, element, (260,), (0,), **fields)
        if bound(cases.Problem(Case(desc=desc, without=without))).sku.variant == "lagged":
            data = cases.data_of(spec)[k % len(cases.data_of(spec))]
            check([Case(desc=desc, without=without, data=data)])


@pytest.mark.parametrize(
    ("count", "rows", "index", "accumulate"),
    [
        (1, 1, "i32", True),  # one word, no digit to sort by
        (31, 3, "i64", False),  # one short of a block
        (32, 4, "i32", True),  # a block; the skipped rows' number needs one bit more
        (33, 63, "i64", True),  # a second block of one word
        (300, 64, "i64", False),  # the counts of all blocks are more than are summed at a time
        (300, 1, "i32", False),  # one row alone: every stretch but the skipped
        (90, 300, "i64", False),  # nearly every row is empty
    ],
)
def test_indices_of_any_number_are_sorted(count, rows, index, accumulate):
    for data in (Data.RANDOM, Data.TIES):
        desc = cases.describe(
            spec_of("embedding"),
            ElementKind.F32,
            (count, 3, rows),
            (),
            index=index,
            accumulate=accumulate,
        )
        check([Case(desc=desc, data=data, seed=count)])


@pytest.mark.parametrize("position", [0, 39, 40, -1, 1 << 40])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("count", [40, 160], ids=["marked once", "in copies"])
def test_marks_that_others_left_name_no_row(position, padding, count):
    """Whatever the workspace holds where rows are marked, be it the position of an index."""
    rng = np.random.default_rng(5)
    indices = rng.choice([0, 3, 4, 9, -2, 12], count)
    indices[[0, 39]] = 3, 9
    dout = rng.standard_normal((count, 5)).astype(np.float32)
    table = np.full((12, 5), np.nan, np.float32)
    desc = gp.EmbeddingBackwardDescriptor(
        num_embeddings=12, embedding_dim=5, num_indices=count, element=ElementKind.F32,
        padding_idx=padding, accumulate=False,
    )  # fmt: skip
    plan = gp.EmbeddingBackwardPlan.select(desc, device="cpu", preference=TRITON)
    memory = np.full(plan.workspace_size // 8 + 64, position, np.int64)
    workspace = memory[-memory.ctypes.data % 256 // 8 :]
    args = gp.EmbeddingBackwardArgs(dout=dout, indices=indices, dweight=table)
    plan.run(args, workspace=workspace.view(np.uint8))
    exact = np.zeros((12, 5))
    for index, row in zip(indices, dout, strict=True):
        if 0 <= index < 12 and index != padding:
            exact[index] += row
    np.testing.assert_allclose(table, exact, rtol=1e-6, atol=1e-6)
    named = np.isin(np.arange(12), indices[indices != padding])
    assert not table[~named].any()


@pytest.mark.parametrize("each", [1, 4, 8])
@pytest.mark.parametrize("bits", [1, 5, 8, 9])
def test_votes_tell_how_many_of_a_digit_come_before(bits, each):
    """The assembly of a warp, which the interpreter does without, read line by line."""
    from gradplan.backends.gpu.kernels import moves

    rng = np.random.default_rng(bits)
    digits = rng.integers(0, min(1 << bits, 40), 32 * each)
    digits[: 8 * each] = (1 << bits) - 1
    lanes = np.arange(32, dtype=np.uint64)
    known = {f"${each + j}": digits[32 * j : 32 * j + 32].astype(np.uint32) for j in range(each)}
    known["%lanemask_lt"] = ((np.uint64(1) << lanes) - np.uint64(1)).astype(np.uint32)
    assert moves.ranked.fn(each).count("r") == 2 * each

    def value(name):
        return known[name] if name in known else np.uint32(int(name, 0) & 0xFFFFFFFF)

    for line in moves.ranking.fn(bits, each).strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        goal, *words = (word.strip() for word in rest.split(","))
        a = [value(word) for word in words]
        known[goal] = {
            "mov.u32": lambda a: a[0] + np.zeros(32, np.uint32),
            "mov.b32": lambda a: a[0] + np.zeros(32, np.uint32),
            "and.b32": lambda a: a[0] & a[1],
            "add.u32": lambda a: a[0] + a[1],
            "setp.ne.u32": lambda a: a[0] != a[1],
            "vote.sync.ballot.b32": lambda a: np.full(
                32, sum(1 << int(k) for k in np.flatnonzero(a[0])), np.uint32
            ),
            "bfe.s32": lambda a: -((a[0] >> a[1]) & 1).astype(np.int32).view(np.uint32),
            "lop3.b32": lambda a: a[0] & ~(a[1] ^ a[2]),
            "popc.b32": lambda a: np.array([int(one).bit_count() for one in a[0]], np.uint32),
        }[name](a)
        assert name != "lop3.b32" or words[3] == "0x90"
    found = np.concatenate([known[f"${j}"] for j in range(each)])
    before = [int((digits[:k] == digits[k]).sum()) for k in range(len(digits))]
    np.testing.assert_array_equal(found, before)


def test_the_order_of_equal_indices_is_kept():
    """Sums are taken in one order: the bits do not depend on what else is in the table."""
    rng = np.random.default_rng(0)
    dout = (rng.normal(size=(150, 4)) * 10.0 ** rng.integers(-6, 6, (150, 1))).astype(np.float32)
    indices = rng.integers(0, 3, 150)
    got = gp.embedding_backward(dout, indices, 3, preference=TRITON)
    again = gp.embedding_backward(dout, indices + 17, 40, preference=TRITON)
    np.testing.assert_array_equal(got.view("u4"), again[17:20].view("u4"))
    assert not np.delete(again, [17, 18, 19], axis=0).any()


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
    for (n, axis), without in itertools.product(((9, 1), (70, 1), (70, 0)), lefts):
        # A row for each, between rows of ordinary factors.
        rows = special if n == 9 or kind == "prod" else special[axis::2]
        count = 2 * len(rows) + 1
        shape = (count, n) if axis else (n, count)
        desc = cases.describe(spec, ElementKind(element), shape, (axis,))
        problem = cases.Problem(Case(desc=desc, without=without, seed=n))
        for row, some in enumerate(rows):
            for k, value in enumerate(some):
                place = (2 * row + 1, n - 1 - k * (n // 5))  # in both parts of a row of 70
                problem.poke("x", place if axis else place[::-1], value)
        if "y" in problem.arrays:
            with np.errstate(all="ignore"):
                y = np.cumprod(problem.arrays["x"].astype(np.float64), axis)
                problem.poke("y", ..., y.astype(problem.arrays["y"].dtype))
        settle(problem)
        if kind == "prod" and n == 70:
            assert bound(problem).sku.variant == "lagged"


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


def far_apart(shape, strides, element):
    """An array in memory of which only the pages that are touched exist."""
    dtype = cases._DTYPES[element]
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    no_reserve = 0x4000  # MAP_NORESERVE on Linux, which Python 3.11 does not name
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | no_reserve)
    steps = [step * dtype.itemsize for step in strides]
    return np.ndarray(shape, dtype, memory, 0, steps)


FAR = 2**31 + 24


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


def logs(dy, x, y, axis=1):
    """The gradient of a log-cumsum-exp, by the kernels."""
    desc = gp.ScanBackwardDescriptor(
        kind="log_cumsum_exp", input_shape=x.shape, scan_axis=axis, element=element_of(x)
    )
    plan = gp.ScanBackwardPlan.select(desc, device="cpu", preference=TRITON)
    dx = np.full_like(x, np.nan)
    plan.run(gp.ScanBackwardArgs(dy=dy, x=x, y=y, dx=dx))
    return dx.astype(np.float64), plan.precision_guarantee.relative_error


def element_of(x):
    return ElementKind.F32 if x.dtype == np.float32 else ElementKind.BF16


@pytest.mark.parametrize("lies", ["rows", "columns", "strided"])
@pytest.mark.parametrize("n", [2, 8, 90])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_small_gradient_of_a_log_cumsum_exp_is_kept(name, n, lies):
    """y spans what a tile takes the usual way, so weights reach e⁻²⁰."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.zeros((6, n))
    x[:, -1] = 39.0
    dy = np.zeros((6, n))
    dy[:, -1] = 1.1e-37
    y = np.logaddexp.accumulate(x, 1)
    x, y, dy = (array.astype(dtype) for array in (x, y, dy))
    if lies == "strided":
        x, y, dy = (np.repeat(array, 2, 1)[:, ::2] for array in (x, y, dy))
    if lies == "columns":
        dx, error = logs(dy.T.copy(), x.T.copy(), y.T.copy(), axis=0)
        dx = dx.T
    else:
        dx, error = logs(dy, x, y)
    exact = np.exp(x[:, -1].astype(np.float64) - y[:, -1].astype(np.float64)) * dy[0, -1]
    np.testing.assert_allclose(dx[:, -1], exact, rtol=error)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_sum_that_overflows_on_its_way_leaves_what_has_no_weight(rows):
    """2e38 + 2e38 − 2e38 behind x = −inf."""
    x = np.full((rows, 64), -np.inf, np.float32)
    x[:, 0] = 0.0
    dy = np.zeros_like(x)
    dy[:, [40, 31, 30]] = 2e38, 2e38, -2e38
    dx, _ = logs(dy, x, np.zeros_like(x))
    np.testing.assert_array_equal(dx[:, 1:], 0.0)
    np.testing.assert_array_equal(dx[:, 0], np.float32(2e38))


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
        desc = cases.describe(spec_of("prod"), ElementKind.F32, (4, 70), (1,))
        problem = cases.Problem(Case(desc=desc, data=data, without=("y",)))
        assert bound(problem).sku.variant == "lagged"


def test_the_sku_tells_the_truth():
    desc = cases.describe(spec_of("softmax"), ElementKind.F32, (4, 8), (1,))
    sku = cases.Problem(Case(desc=desc)).plan("cpu", TRITON).sku
    assert (sku.backend, sku.arch, sku.layout) == (gp.BackendKind.TRITON, "interpreter", "rows")
    assert "triton" in str(sku)
