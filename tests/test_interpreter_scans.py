"""Scans in Triton's interpreter: walked, held, tiled and chained, and the ends of their range."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gradplan as gp
from covering import HALVES, SPECS, problems, program_of, spec_of
from gradplan import cases
from gradplan.backends.gpu import launch, programs, table, walked
from gradplan.cases import Case, Layout
from gradplan.geometry import c_strides, told_strides
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import ELEMENTS, Engine, Need
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

pytest.importorskip("triton")

pytestmark = MARKS

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
        missed += outcome_of(problem, launch_it)
    assert_none(missed)


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
        walked_ragged=sizes,
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
            missed += outcome_of(problem, launch_it)
    assert_none(missed)


@problems(WALKED, ELEMENTS[:3])
def test_rows_that_begin_anywhere_are_walked(spec, element):
    """Runs that fill their parts, that end within one, and that leave the last one empty, by one
    warp and by several; all data, while shapes, layouts and options take turns."""
    part = 1024 if spec.ties else 256
    shapes = [
        ((4, 2 * part + 9), Layout.CONTIGUOUS),
        ((4, 2 * part + 3), Layout.SHIFTED),
        ((2, 2, 3 * part - 5), Layout.CONTIGUOUS),
        ((4, part - 1), None),  # all from back to front
        ((4, 2 * part + 17), Layout.SHIFTED),
        ((4, 2 * part + 3), Layout.IN_PLACE),
        ((2, 2, 2 * part + 1), Layout.SHIFTED),
    ]
    asked = cases.options_of(spec, element)
    if spec.kind in ("cumprod", "log_cumsum_exp"):
        asked = [(fields, without) for fields, without in asked if not without]
    turn = 3 * ELEMENTS.index(element) + SPECS.index(spec)
    missed = []
    for k, data in enumerate(cases.data_of(spec), turn):
        shape, layout = shapes[k % len(shapes)]
        fields, without = asked[k % len(asked)]
        desc = cases.describe(spec, element, shape, (len(shape) - 1,), **fields)
        case = Case(desc=desc, data=data, without=without, seed=k)
        if layout is None:
            back = cases.Placement((0, 1), (1, -1), 0, 1)
            case = replace(case, placements=tuple((op.name, back) for op in desc.operands))
        else:
            case = replace(case, layout=layout)
        with table.using("interpreter", replace(walking(), walked_warps=1 + 7 * (k % 3 == 0))):
            problem = cases.Problem(case)
            launch_it = bound(problem)
            assert launch_it.sku.variant.startswith("walked")
            missed += outcome_of(problem, launch_it)
    assert_none(missed)


@problems(WALKED, ELEMENTS[:1])
def test_inputs_that_repeat_are_not_walked(spec, element):
    """One value a row is no run, nor is one for all; what is read of them is theirs alone."""
    desc = cases.describe(spec, element, (4, 133), (1,))
    drawn = ("dy",) if spec.kind == "cumprod" else ("dy", "x")  # whose factors do not repeat
    names = [op.name for op in desc.operands if op.name in drawn]
    for name, steps in itertools.product(names, ((1, 0), (0, 0))):
        case = Case(desc=desc, placements=((name, cases.Placement((0, 1), steps)),))
        with table.using("interpreter", walking()):
            problem = cases.Problem(case)
            assert not bound(problem).sku.variant.startswith("walked")
            settle(problem)


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
    desc = cases.describe(spec_of("cummax"), ElementKind.F32, (16, 4), (1,))
    frugal = replace(TRITON, max_workspace_bytes=0)
    problem = cases.Problem(Case(desc=desc, without=("y",)))
    plan = problem.plan("cpu", frugal)
    assert plan.workspace_size == 0
    assert problem.plan("cpu", TRITON).bind(problem.args()).sku.variant == "resident_marked"
    assert plan.bind(problem.args()).sku.variant == "resident_recomputed"
    plan.run(problem.args())
    assert problem.outcome(plan.precision_guarantee.relative_error).ok


@problems([spec for spec in WALKED if spec.kind != "cumsum"], ELEMENTS)
def test_rows_side_by_side_that_fill_no_tile_come_after_the_others(spec, element):
    """In tiles of their own; what remains then is masked. Options take turns."""
    few = replace(table.table_of("interpreter"), scan_fill=99, fill=99)
    asked = cases.options_of(spec, element)
    for k in range(2):
        fields, without = asked[(k + 2 * ELEMENTS.index(element)) % len(asked)]
        desc = cases.describe(spec, element, (32, 21), (0,), **fields)
        data = cases.data_of(spec)[k % len(cases.data_of(spec))]
        problem = cases.Problem(Case(desc=desc, without=without, data=data, seed=k))
        with table.using("interpreter", few):
            launch_it = bound(problem)
            assert not outcome_of(problem, launch_it)
            why = program_of(problem).why
        if element is not ElementKind.F64:
            assert "that fill no tile" in why


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((1 << 19, 128), [(32, True)]),
        ((1 << 19, 100), [(32, True), (4, True)]),
        ((1 << 19, 109), [(32, True), (16, False)]),
        ((500_001, 100), [(32, False)]),  # nor does the axis fill a tile
        ((2, 1 << 18, 4, 25), [(32, True), (4, True)]),  # two axes that are one
        ((1 << 18, 100), [(32, False)]),  # not worth more launches
    ],
)
def test_rows_side_by_side_are_cut_where_tiles_end(shape, pieces):
    axis = shape.index(max(shape))
    desc = cases.describe(spec_of("log_cumsum_exp"), ElementKind.F32, shape, (axis,))
    strides = {name: told_strides(shape, c_strides(shape)) for name in ("dy", "x", "y", "dx")}
    steps = programs.choose(desc, strides, table.table_of("sm_90")).steps
    met = [dict(step.constants) for step in steps]
    found = [(one["R"], one["FULL"]) for one in met if one.get("PHASE") == "apply"]
    assert found == pieces


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


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_large_difference_loses_in_f64(axis, saved):
    """Up to 6e-14 of a weight. Where all larger gradients are NaN, a row is held to the small ones.
    Of several tiles, those behind the NaN are taken the usual way."""
    for many, n, strided, within in (
        *((3, 2, False, 1e-15), (3, 5, True, 1e-15), (3, 70, False, 1e-15), (3, 70, True, 1e-15)),
        (1, 300, False, 5e-15),  # a chain, where y is saved: sums of many tiles
    ):
        x = np.linspace(-24.00995183691867, -20.3, n)
        x[0] = 551.4892302111513  # and so is y, from there on
        dy = np.ones(n)
        dy[0] = np.nan
        exact = np.exp(x[1:].astype(np.longdouble) - x[0]) * np.arange(n - 1, 0, -1)
        x, y, dy = (np.tile(row, (many, 1)) for row in (x, np.full(n, x[0]), dy))
        if strided:
            x, y, dy = (np.repeat(rows, 2, 1)[:, ::2] for rows in (x, y, dy))
        if not axis:
            x, y, dy = (rows.T.copy() if not strided else rows.T for rows in (x, y, dy))
        dx, _ = logs(dy, x, y if saved else None, axis)
        dx = dx if axis else dx.T
        assert np.isnan(dx[:, 0]).all()
        np.testing.assert_allclose(dx[:, 1:], np.tile(exact.astype(float), (many, 1)), rtol=within)


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
    return {"float32": ElementKind.F32, "float64": ElementKind.F64}.get(
        x.dtype.name, ElementKind.BF16
    )


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
