"""Every plan held to its own guarantee, over the grid of the registry and beyond it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradplan as gp
from gradplan import cases, plans
from gradplan.backends.cpu import program
from gradplan.cases import Case, Data, Layout, Placement
from gradplan.kinds import ElementKind, OpCategory, ReduceKind, ScanKind
from gradplan.registry import ELEMENTS, KINDS, MAX_RANK, Engine, Need

SPECS = list(KINDS.values())


def problems(specs=SPECS, elements=ELEMENTS):
    """kind × element; the id also decides which test process compiles its kernels."""
    return pytest.mark.parametrize(
        ("spec", "element"),
        [
            pytest.param(spec, element, id=f"{spec.kind}-{element}")
            for spec in specs
            for element in elements
        ],
    )


def crossed(name, values, specs=SPECS, elements=ELEMENTS, keep=lambda spec, element, value: True):
    """kind × element × value, with the kind and the element first in the id."""
    return pytest.mark.parametrize(
        ("spec", "element", name),
        [
            pytest.param(spec, element, value, id=f"{spec.kind}-{element}-{value}")
            for spec in specs
            for element in elements
            for value in values
            if keep(spec, element, value)
        ],
    )


def check(some):
    """Run the cases, by plan and by function in turn; all must meet their guarantees."""
    missed = []
    for run, case in zip(itertools.cycle((cases.run_plan, cases.run_function)), some, strict=False):
        outcome = run(case)
        if not outcome.ok:
            missed.append(f"{run.__name__} {outcome}")
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


def shape_for(spec, *shape):
    """A shape, or an embedding of as many indices into a table of seven rows."""
    if spec.category is OpCategory.EMBEDDING:
        return (shape[0], shape[1] if len(shape) > 1 else 1, 7)
    return shape


def bits(array):
    return array.view(f"u{array.itemsize}")


@crossed("layout", list(Layout), keep=lambda spec, _, layout: layout in cases.layouts_of(spec))
def test_grid(spec, element, layout, complete):
    check(cases.grid(spec, element, layout, complete=complete))


EXTENTS = [
    1,  # no neighbour: the far end of a scan, m = 1 of a variance
    2,  # the least with a neighbour
    3,  # below every vector width; a third is not exact
    127,  # one short of a tile of 128 scan steps and of a slice of 128 columns
    128,  # exactly one
    129,  # one more: a second tile of a single step
    1000,  # two blocks of 512 in a row's sum, the second one short
    65537,  # a prime above the chunk of 65536, and 8 scan chunks of 8192 with one element over
    300001,  # above 2 · 65536 and 4 · 8192: rows are split; no multiple of anything
]


@crossed("n", EXTENTS)
def test_extents(spec, element, n, complete):
    """n along the axis as one row, as rows and as columns; the long ones as a row alone."""
    shapes = [((n,), (0,))]
    if n <= 1000:
        shapes += [((3, n), (1,)), ((n, 3), (0,))]
    asked = cases.options_of(spec, element, complete=complete)
    edges = itertools.cycle(cases.data_of(spec))
    some = []
    for shape, axes in shapes:
        for fields, without in asked:
            desc = cases.describe(spec, element, shape_for(spec, *shape), axes, **fields)
            kinds = {Data.RANDOM, next(edges)} if n <= 1000 else {next(edges)}
            some += [Case(desc=desc, data=data, without=without) for data in sorted(kinds)]
    if n == EXTENTS[-1]:  # the reference takes seconds: elements share the options among them
        some = some[ELEMENTS.index(element) % len(some) :][:1]
    check(some)


@problems()
def test_outputs_past_the_caches(spec, element, monkeypatch):
    """Outputs of a problem too large for the caches leave by whole lines: here, of small ones."""
    monkeypatch.setattr(program, "cache_bytes", lambda: 0)
    monkeypatch.setattr(plans, "_plans", {})
    shapes = [
        ((40, 2053), (0,)),  # wider than a strip
        ((70, 256), (0,)),  # whole lines
    ]
    if spec.engine is Engine.RECURRENCE:
        shapes += [
            ((3, 4992), (1,)),  # all rows as far into a line
            ((64, 288), (1,)),  # by eights, and one tile of 32 steps
            ((1, 4999), (1,)),
        ]
    else:
        shapes += [
            ((3, 4999), (1,)),  # rows longer than a stage, none at the start of a line
            ((5, 1030), (1,)),
        ]
    fields, without = next(
        (fields, without)
        for fields, without in cases.options_of(spec, element)
        if "y" not in without and not fields.get("accumulate")
    )
    layouts = {Layout.CONTIGUOUS, Layout.OFFSET}
    if spec.category is not OpCategory.REDUCTION:  # whose dy is as large only where n = 1
        layouts |= {Layout.IN_PLACE}.intersection(cases.layouts_of(spec))
    for (shape, axes), layout in itertools.product(shapes, sorted(layouts)):
        desc = cases.describe(spec, element, shape_for(spec, *shape), axes, **fields)
        case = Case(desc=desc, layout=layout, without=without)
        problem = cases.Problem(case)
        assert "streamed" in problem.plan().bind(problem.args()).sku.variant
        outcome = cases.run_plan(case)
        assert outcome.ok, str(outcome)


WITH_AXIS = [spec for spec in SPECS if spec.category.endswith(("softmax", "scan", "reduction"))]


@crossed("n", [2, 5, 8, 13, 40], WITH_AXIS)
def test_short_rows(spec, element, n):
    """Many rows of a few elements: side by side, where they lie or through tiles, and several of
    these, of which the last is not full."""
    asked = cases.options_of(spec, element)
    layouts = set(cases.layouts_of(spec))
    if spec.category is OpCategory.REDUCTION:  # whose dy is as large only where n = 1
        layouts -= {Layout.IN_PLACE}
    edges, met = itertools.cycle(cases.data_of(spec)), set()
    for turn, layout in enumerate(sorted(layouts)):
        fields, without = asked[(n + turn) % len(asked)]
        rows = 2 * 4096 // n + 3 if layout is Layout.CONTIGUOUS else 203
        desc = cases.describe(spec, element, (rows, n), (1,), **fields)
        case = Case(desc=desc, layout=layout, data=next(edges), without=without)
        problem = cases.Problem(case)
        met.add(problem.plan().bind(problem.args()).sku.variant)
        outcome = cases.run_plan(case)
        assert outcome.ok, str(outcome)
    if spec.engine is Engine.ROW_STATE or spec.category is OpCategory.REDUCTION:
        lying = element in (ElementKind.F32, ElementKind.F64) and n < 8
        assert met & ({"beside", "turned"} if lying else {"turned"}), met


@crossed("rank", list(range(1, MAX_RANK + 1)), elements=[ElementKind.F32])
def test_ranks(spec, element, rank):
    """Each axis of each rank, in memory orders that no two operands share."""
    if spec.category is OpCategory.EMBEDDING:
        check_index_rank(rank - 1)
        return
    shape = (2, 3, 1, 4, 2, 3, 2, 2)[:rank]
    fields, without = cases.options_of(spec, element)[0]
    layouts = (Layout.CONTIGUOUS, Layout.TRANSPOSED, Layout.MIXED)
    for axis in range(rank):
        desc = cases.describe(spec, element, shape, (axis,), **fields)
        check(Case(desc=desc, layout=layout, without=without, seed=axis) for layout in layouts)


def check_index_rank(rank):
    """Indices of any rank and strides mean what their flattened copies mean."""
    rng = np.random.default_rng(rank)
    shape = (2, 3, 2, 1, 2, 3, 2)[:rank]
    indices = rng.integers(-1, 6, shape[::-1]).T
    dout = rng.normal(size=(*shape, 10)).astype(np.float32)[..., ::2]
    got = gp.embedding_backward(dout, indices, 5)
    flat = gp.embedding_backward(dout.reshape(-1, 5), indices.reshape(-1), 5)
    np.testing.assert_array_equal(got, flat)
    expected = np.zeros((5, 5))
    for key, row in zip(indices.reshape(-1), dout.reshape(-1, 5), strict=True):
        if 0 <= key < 5:
            expected[key] += row
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


REDUCTIONS = [spec for spec in SPECS if spec.category is OpCategory.REDUCTION]


@problems(REDUCTIONS, [ElementKind.F32])
def test_several_axes_in_any_order(spec, element):
    """Ties are decided in C order, whatever the order of the axes in the tuple or in memory."""
    some = []
    for axes in [(0, 1), (0, 2), (1, 3), (0, 1, 3), (0, 1, 2, 3), ()]:
        for order in set(itertools.permutations(axes)):
            for fields, without in cases.options_of(spec, element):
                desc = cases.describe(spec, element, (3, 2, 5, 4), order, **fields)
                for layout in (Layout.CONTIGUOUS, Layout.TRANSPOSED, Layout.MIXED):
                    data = Data.TIES if spec.ties else Data.RANDOM
                    some.append(Case(desc=desc, layout=layout, data=data, without=without))
    check(some)


@pytest.mark.parametrize("ties", ["first", "last"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("axes", [(0, 2), (2, 0), (2, 1, 0), (1, 2)])
def test_ties_follow_the_index_and_not_memory(ties, order, axes):
    """All elements tie except the first and last of every axis, so the winner is the first or
    last of the others in C order."""
    shape = (4, 5, 6)
    memory = np.empty([shape[axis] for axis in order], np.float32)
    dx = memory.transpose(np.argsort(order))
    x, y = np.ones(shape, np.float32), np.ones(1, np.float32)
    for axis in axes:
        np.moveaxis(x, axis, 0)[[0, -1]] = 0
    small = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    dy = np.arange(1, np.prod(small) + 1, dtype=np.float32).reshape(small)
    y = np.broadcast_to(y, small)
    for out in (dx, dx[::-1, ::-1, ::-1]):
        out[...] = np.nan
        gp.max_backward(dy, x, y, axis=axes, keepdims=True, ties=ties, out=out)
        expected = np.zeros(shape, np.float32)
        end = 1 if ties == "first" else -2
        place = tuple(slice(end, end + 1) if a in axes else slice(None) for a in range(3))
        expected[place] = dy
        np.testing.assert_array_equal(out, expected)


@problems()
def test_nothing_to_do(spec, element):
    """No elements: success, and no byte written."""
    if spec.category is OpCategory.EMBEDDING:
        shapes = [((0, 3, 4), ()), ((5, 0, 4), ()), ((5, 3, 0), ())]
    else:
        shapes = [((0,), (0,)), ((3, 0), (1,)), ((3, 0), (0,)), ((0, 4, 2), (1,))]
    some = []
    for (shape, axes), layout in itertools.product(shapes, (Layout.CONTIGUOUS, Layout.SLICED)):
        desc = cases.describe(spec, element, shape, axes)
        some.append(Case(desc=desc, layout=layout))
    check(some)


@problems([spec for spec in SPECS if spec.category is OpCategory.EMBEDDING])
def test_no_indices_still_overwrite_the_table(spec, element):
    desc = cases.describe(spec, element, (0, 3, 4), (), accumulate=False)
    problem = cases.Problem(Case(desc=desc))
    problem.run()
    assert not problem.arrays["dweight"].any()


@st.composite
def arrangements(draw, spec, element):
    """A small problem of any rank whose operands lie in memory in ways of their own."""
    if spec.category is OpCategory.EMBEDDING:
        shape = tuple(draw(st.integers(0, n)) for n in (40, 140, 12))
        axes = ()
    else:
        rank = draw(st.integers(1, MAX_RANK))
        longest = {1: 700, 2: 40, 3: 12, 4: 6}.get(rank, 3)
        shape = tuple(draw(st.integers(1, longest)) for _ in range(rank))
        axes = (draw(st.integers(0, rank - 1)),)
        if spec.category is OpCategory.REDUCTION:
            axes = tuple(draw(st.permutations(range(rank)))[: draw(st.integers(0, rank))])
    fields, without = draw(st.sampled_from(cases.options_of(spec, element, complete=False)))
    if fields.get("padding_idx") is not None and shape[2] <= fields["padding_idx"]:
        fields = {**fields, "padding_idx": None}
    desc = cases.describe(spec, element, shape, axes, **fields)
    shapes = {op.name: op.shape for op in desc.operands}
    in_place = shapes.get("dx", shapes.get("da")) == shapes.get("dy") and draw(st.booleans())
    placements = []
    for op in desc.operands:
        steps = [-3, -2, -1, 1, 1, 1, 2, 3]
        if not (op.output or op.name == "indices" or (in_place and op.name == "dy")):
            steps.append(0)
        rank = len(op.shape)
        placement = Placement(
            tuple(draw(st.permutations(range(rank)))),
            tuple(draw(st.sampled_from(steps)) for _ in range(rank)),
            draw(st.integers(0, 9)),
        )
        placements.append((op.name, placement))
    return Case(
        desc=desc,
        layout=Layout.IN_PLACE if in_place and "da" not in without else Layout.MIXED,
        data=draw(st.sampled_from(cases.data_of(spec))),
        without=without,
        seed=draw(st.integers(0, 999)),
        placements=tuple(placements),
    )


@problems()
@settings(
    derandomize=True,
    max_examples=15,
    deadline=None,  # the first example compiles
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_strides(spec, element, data):
    case = data.draw(arrangements(spec, element))
    outcome = data.draw(st.sampled_from([cases.run_plan, cases.run_function]))(case)
    assert outcome.ok, str(outcome)


@problems()
def test_nan_reaches_what_the_formula_names(spec, element):
    """One NaN in dy, at either end and inside, along rows and along columns: its neighbours and
    the rows beside it stay clean."""
    for shape, axes in [((5, 33), (1,)), ((33, 5), (0,))]:
        for fields, without in cases.options_of(spec, element, complete=False):
            desc = cases.describe(spec, element, shape_for(spec, *shape), axes, **fields)
            dy = desc.operands[0]
            for place in (0, dy.size // 2, dy.size - 1):
                problem = cases.Problem(Case(desc=desc, without=without))
                problem.poke(dy.name, np.unravel_index(place, dy.shape), np.nan)
                problem.run()
                exact = problem.exact()
                for name, got in problem.outputs().items():
                    np.testing.assert_array_equal(
                        np.isnan(got), np.isnan(exact[name]), f"{problem.case} NaN at {place}"
                    )


SPLIT = {
    "row": ((300_001,), (0,)),
    "columns": ((200_000, 8), (0,)),
    "rows": ((300, 1000), (1,)),
    "long": ((5_000_000,), (0,)),
}


@crossed(
    "shape",
    list(SPLIT),
    elements=[ElementKind.F32, ElementKind.BF16],
    keep=lambda _, element, shape: shape != "long" or element is ElementKind.F32,
)
def test_same_bits_for_any_number_of_threads(spec, element, shape, threads):
    extents, axes = SPLIT[shape]
    asked = cases.options_of(spec, element, complete=False)
    for fields, without in asked[-1:] if shape == "long" else asked[:2]:
        desc = cases.describe(spec, element, shape_for(spec, *extents), axes, **fields)
        problem = cases.Problem(Case(desc=desc, without=without))
        table = problem.arrays.get("dweight")
        old = None if table is None else table.copy()
        first = None
        for count in (1, 2, 2, 1):
            threads(count)
            if old is not None:
                table[...] = old  # the sum would otherwise go on
            problem.run()
            outputs = problem.outputs()
            if first is None:
                first = outputs
            for name, got in outputs.items():
                assert np.array_equal(bits(got), bits(first[name])), f"{desc} {name} {count}"


@pytest.mark.parametrize("kind", [ScanKind.CUMPROD, ScanKind.CUMMAX, ScanKind.LOG_CUMSUM_EXP])
def test_many_long_rows_are_split_where_the_scan_is_recomputed(kind):
    """Enough rows to feed all cores, each too long for the checkpoints of one pass."""
    spec = KINDS[OpCategory.SCAN, kind]
    desc = cases.describe(spec, ElementKind.F32, (32, 2, 65537), (2,))
    # Pairs of rows with a gap behind each pair: the outer axes cannot be merged.
    gap = Placement((0, 1, 2), (2, 1, 1))
    names = ("dy", "x", "dx")
    case = Case(desc=desc, without=("y",), placements=tuple((name, gap) for name in names))
    problem = cases.Problem(case)
    assert "split" in problem.plan().bind(problem.args()).sku.variant
    check([case])


def test_scan_is_no_difference_of_totals():
    """A huge head must not wipe out the tail: total minus prefix would return 0 or 8."""
    dy = np.ones(4001, np.float32)
    dy[0] = 1e8
    dx = gp.cumsum_backward(dy)
    np.testing.assert_array_equal(dx[1:], np.arange(4000, 0, -1, dtype=np.float32))


# f32 log-softmax rounds its sum, an exponential, a product and the result: 4.5 units in all.
LIMITS = {ElementKind.BF16: 2**-7.5, ElementKind.F16: 2**-10.5, ElementKind.F32: 2**-21.8}


@problems(elements=LIMITS)
def test_guarantees_are_tight(spec, element):
    """Small, and no more than 8 times what is measured; a sum only moves values."""
    shares = []
    for shape in ((6, 130), (40, 3), (60, 2)):
        for fields, without in cases.options_of(spec, element, complete=False):
            desc = cases.describe(spec, element, shape_for(spec, *shape), (1,), **fields)
            data = Data.TIES if spec.ties else Data.RANDOM
            outcome = cases.run_plan(Case(desc=desc, data=data, without=without))
            assert outcome.guarantee < LIMITS[element]
            shares.append(outcome.error / outcome.guarantee)
    moves_only = spec.kind is ReduceKind.SUM or (
        spec.category is OpCategory.REDUCTION and spec.ties and "split" not in str(fields)
    )
    assert moves_only or max(shares) >= 1 / 8


@problems(elements=[ElementKind.F64])
def test_f64_bounds_hold_for_tenths(spec, element):
    """0.1 throughout: partial sums are rounded in the same direction for long stretches."""
    fields, without = cases.options_of(spec, element, complete=False)[0]
    desc = cases.describe(spec, element, shape_for(spec, 65537), (0,), **fields)
    problem = cases.Problem(Case(desc=desc, without=without))
    problem.poke(desc.operands[0].name, ..., 0.1)
    outcome = settled(problem)
    if spec.kind is ScanKind.CUMSUM:  # far more than one rounding: the bound has a reason
        assert outcome.error > 16 * element.unit_roundoff


def settled(problem):
    problem.run()
    outcome = problem.outcome(problem.plan().precision_guarantee.relative_error)
    assert outcome.ok, str(outcome)
    return outcome


# Added to 1 one by one, each of these is lost entirely.
LOST = 0.49 * 2.0**-52


def lost_scan(problem):
    problem.poke("dy", ..., LOST)
    problem.poke("dy", -1, 1.0)
    if "x" in problem.arrays:  # the first element wins throughout
        sign = 1.0 if problem.desc.kind is ScanKind.CUMMAX else -1.0
        problem.poke("x", ..., -sign)
        problem.poke("x", 0, sign)


def lost_row_sum(problem):
    problem.poke("dy", ..., LOST)
    problem.poke("dy", 0, 1.0)
    problem.poke("y", ..., -1000.0)
    problem.poke("y", 5, 0.0)


def lost_embedding(problem):
    problem.poke("dout", ..., LOST)
    problem.poke("dout", 0, 1.0)
    problem.poke("indices", ..., 3)


def drifting_product(problem):
    """1.5 · (1 + 2⁻⁵²) is halfway between two numbers, and every such product rounds up."""
    problem.poke("x", ..., 1 + 2.0**-52)
    problem.poke("x", slice(0, 16), 1.5)
    problem.poke("dy", ..., 1.0)


@pytest.mark.parametrize(
    ("kind", "shape", "options", "without", "fill"),
    [
        pytest.param("cumsum", (1000, 8), {}, (), lost_scan, id="cumsum-f64"),
        pytest.param("cummax", (1000, 8), {}, ("y",), lost_scan, id="cummax-f64"),
        pytest.param("cummin", (1000, 8), {"ties": "last"}, ("y",), lost_scan, id="cummin-f64"),
        pytest.param("log_softmax", (512, 8), {}, (), lost_row_sum, id="log_softmax-f64"),
        pytest.param(
            "embedding", (1000, 8, 7), {"accumulate": False}, (), lost_embedding, id="embedding-f64"
        ),
        pytest.param("prod", (512,), {}, ("y",), drifting_product, id="prod-f64"),
        pytest.param("cumprod", (512,), {}, ("y",), drifting_product, id="cumprod-f64"),
    ],
)
def test_f64_bounds_hold_when_all_errors_point_one_way(kind, shape, options, without, fill):
    """Data made so that each rounding loses as much as a rounding can, always in one direction."""
    spec = next(spec for spec in SPECS if spec.kind == kind)
    desc = cases.describe(spec, ElementKind.F64, shape, (0,), **options)
    problem = cases.Problem(Case(desc=desc, without=without))
    fill(problem)
    settled(problem)


def test_every_kind_is_in_the_grid():
    """The grid follows the registry: what a row says it needs, its cases have."""
    for spec in SPECS:
        case = next(cases.grid(spec, ElementKind.F32, Layout.CONTIGUOUS))
        arrays = cases.Problem(case).arrays
        for name, need in (("x", spec.x), ("y", spec.y)):
            assert (need is Need.NO) == (name not in arrays)
        assert spec.engine in Engine
