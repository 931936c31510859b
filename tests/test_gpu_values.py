"""On a GPU: values. The whole grid, every variant in large shapes and in small tiles, and more
elements than 32 bits count."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gradplan as gp
from covering import (
    SPECS,
    clustered,
    clustered_table,
    covering,
    held,
    held_table,
    large,
    problems,
    small_table,
    walked_or_held,
    walked_table,
)
from gradplan import cases
from gradplan.backends.gpu import launch, table
from gradplan.cases import Layout
from gradplan.registry import ELEMENTS, Engine
from jobs import gpu

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@gpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", list(Layout))
@problems()
def test_grid(spec, element, layout, complete):
    """Shapes and options take turns; `--complete` runs all of them, for a quarter of an hour."""
    if layout in cases.layouts_of(spec):
        check(cases.grid(spec, element, layout, turns=not complete))


@gpu
@pytest.mark.timeout(1200)
@problems()
def test_every_variant_with_large_shapes(spec, element):
    """All that the measured thresholds can choose, with long rows and long strided axes."""
    check(large(spec, element, launch.device_arch(0)))


def check(some):
    missed = [str(got) for case in some if not (got := cases.run_plan(case, "cuda")).ok]
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


@gpu
@pytest.mark.parametrize("waits", [False, True], ids=["split", "waiting"])
@problems()
def test_covering_cases_with_small_tiles(spec, element, waits, complete):
    """Every data and option in some variant; large shapes meet them all, so elements take turns."""
    if not complete and element is not ELEMENTS[SPECS.index(spec) % len(ELEMENTS)]:
        pytest.skip("another element has its turn")
    if not waits and spec.engine not in (Engine.ROW_STATE, Engine.RECURRENCE):
        pytest.skip("no program of it waits for another")
    missed = []
    with table.using(launch.device_arch(0), small_table(waits)):
        for problem in covering(spec, element):
            problem.run("cuda")
            plan = problem.plan("cuda")
            outcome = problem.outcome(plan.precision_guarantee.relative_error)
            if not outcome.ok:
                missed.append(str(outcome))
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


@gpu
@problems([spec for spec in SPECS if spec.engine is Engine.ROW_STATE], ELEMENTS[:3])
def test_held_rows_in_small_parts(spec, element):
    """All data and layouts that are held, in parts as small as four warps take, on few programs;
    more parts of a row than programs too."""
    some = list(held(spec, element))
    fixed = [(program.layout, dict(program.steps[-1].constants)) for _, program in some]
    assert len({(layout, constants["FULL"]) for layout, constants in fixed}) == 4
    assert any(constants["MORE"] for _, constants in fixed)
    with table.using(launch.device_arch(0), held_table()):
        check(case for case, _ in some)


@gpu
@problems([spec for spec in SPECS if spec.engine is Engine.ROW_STATE])
def test_clusters_of_small_parts(spec, element):
    """All data and options, where programs tell each other what they have: numbers that fit, and
    products that do not."""
    some = list(clustered(spec, element))
    fixed = [(program.layout, dict(program.steps[-1].constants)) for _, program in some]
    assert len({(layout, constants["FULL"]) for layout, constants in fixed}) == 4
    whole = spec.ties or element is ELEMENTS[3]
    assert any(constants["PIECES"] == 2 for _, constants in fixed) != bool(whole)
    with table.using(launch.device_arch(0), clustered_table()):
        check(case for case, _ in some)


@gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_products_of_parts_that_no_number_holds(dtype):
    """Powers of two, so that gradients are exact: parts of 2^±10240 and ±40960, whose product is 1,
    and rows whose product is far from 1 or next to the ends of the range."""
    x = torch.ones(5, 2048, dtype=torch.float64)
    x[0, :1024], x[0, 1024:] = 2.0**10, 2.0**-10
    x[1, ::2], x[1, 1::2] = 2.0**-40, 2.0**40
    x[2, :1024], x[2, 1024:] = 2.0**-40, 2.0**40
    x[3, 7] = 2.0**60
    x[4, 3], x[4, 2000] = 2.0**-70, 2.0**-50
    product = torch.exp2(x.log2().sum(1, keepdim=True))
    right = (product / x).to(getattr(torch, dtype))
    x, y = x.to("cuda", getattr(torch, dtype)), product.to("cuda", getattr(torch, dtype))
    with table.using(launch.device_arch(0), clustered_table()):
        dx = gp.prod_backward(torch.ones_like(y), x, y, axis=1, keepdims=True)
    assert torch.equal(dx.cpu(), right)


@gpu
@problems([spec for spec in SPECS if spec.engine is Engine.RECURRENCE], ELEMENTS[:3])
def test_scans_of_small_parts_in_shared_memory(spec, element):
    """All data and options that are walked or held, on few programs, so that there are many waves
    and rounds; rows begin and end within a wave."""
    some = list(walked_or_held(spec, element))
    fixed = [(program, dict(program.steps[-1].constants)) for _, program in some]
    met = {
        (program.variant.split("_")[0], program.layout, constants["FULL"], bool(program.alike))
        for program, constants in fixed
    }
    assert len(met) == 7
    with table.using(launch.device_arch(0), walked_table()):
        check(case for case, _ in some)


@gpu
@pytest.mark.parametrize("rows", [150, 300, 4000])
@problems([spec for spec in SPECS if spec.engine is Engine.RECURRENCE], ELEMENTS[:3])
def test_rows_that_begin_anywhere_in_place(spec, element, rows):
    """What one warp writes, others have read: by programs of one to four warps, time and again."""
    desc = cases.describe(spec, element, (rows, 8191), (1,))
    torch.cuda.manual_seed(rows)
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[element]
    arrays = {
        op.name: torch.rand(op.shape, device="cuda").add(0.5).to(kind)
        for op in desc.operands
        if not op.output
    }
    if "y" in arrays and spec.kind == "log_cumsum_exp":
        arrays["y"] = arrays["x"].double().logcumsumexp(1).to(kind)
    plan = gp.ScanBackwardPlan.select(desc, device="cuda")
    dy = arrays.pop("dy")
    dx = torch.empty_like(dy)
    plan.run(gp.ScanBackwardArgs(dy=dy, dx=dx, **arrays))
    assert plan.bind(gp.ScanBackwardArgs(dy=dy, dx=dx, **arrays)).sku.variant.startswith("walked")
    other = dy.clone()
    launch_it = plan.bind(gp.ScanBackwardArgs(dy=other, dx=other, **arrays))
    for _ in range(50):
        other.copy_(dy)
        launch_it()
        assert torch.equal(other.nan_to_num(7.0), dx.nan_to_num(7.0))


@gpu
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_what_is_held_need_not_be_aligned(skip):
    """Rows that begin anywhere are right too, read in another way."""
    n, rows = 1 << 18, 64
    plan = gp.SoftmaxBackwardPlan.select(
        gp.SoftmaxBackwardDescriptor(
            kind="softmax", input_shape=(rows, n), softmax_axis=1, element="bf16"
        ),
        device="cuda",
    )
    torch.cuda.manual_seed(skip)
    memory = torch.randn(3, rows * n + 8, device="cuda").to(torch.bfloat16)
    dy, y, dx = (one[skip : skip + rows * n].view(rows, n) for one in memory)
    args = gp.SoftmaxBackwardArgs(dy=dy, y=y, dx=dx)
    bound = plan.bind(args)
    assert bound.sku.variant == ("lagged" if skip else "held")
    results = []
    for launch_it in (bound, lambda: plan.run(args)):
        dx.fill_(torch.nan)
        launch_it()
        torch.cuda.synchronize()
        results.append(dx.clone())
    assert torch.equal(*results)
    a, b = dy.double(), y.double()
    total = (a * b).sum(1, keepdim=True)
    size = b.abs() * (a.abs() + (a * b).abs().sum(1, keepdim=True))
    error = (results[0].double() - b * (a - total)).norm(dim=1)
    assert (error <= plan.precision_guarantee.relative_error * size.norm(dim=1)).all()


# The ids send these tests all to one process: together they would fill a GPU.
MANY = 2**31 + 4160


def half(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


@gpu
@pytest.mark.parametrize("size", [pytest.param("large", id="large-bf16")])
class TestMoreThan2To31Elements:
    @pytest.fixture(autouse=True)
    def room(self):
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < 30 << 30:
            pytest.skip("needs 30 GiB of GPU memory")
        yield
        gc.collect()
        torch.cuda.empty_cache()

    def slices(self, n=MANY, width=1000):
        for start in (0, 2**30 - 500, 2**31 - 500, n - width):
            yield slice(start, start + width)

    def test_map(self, size):
        dy = half(MANY).normal_()
        da, db = half(MANY).fill_(torch.nan), half(MANY).fill_(torch.nan)
        gp.lerp_backward(dy, 0.3, out=(da, db))
        for part in self.slices():
            assert torch.equal(da[part], (dy[part].float() * np.float32(0.7)).bfloat16())
            assert torch.equal(db[part], (dy[part].float() * np.float32(0.3)).bfloat16())
        assert not da.isnan().any()

    def test_map_of_strided_rows(self, size):
        """A broadcast dy, and an output whose rows lie apart."""
        rows, columns = 2**20 + 3, 2048
        memory = half(rows, columns + 2).fill_(torch.nan)
        out = memory[:, :columns]
        dy = half(rows, 1).normal_()
        gp.sum_backward(dy, (rows, columns), axis=1, keepdims=True, out=out)
        for row in (0, 2**20 - 1, 2**20, rows - 1):
            assert (out[row] == dy[row]).all()
        assert memory[-1, columns:].isnan().all()

    @pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
    def test_many_rows(self, size, columns):
        rows, n = 2**21 + 3, 1024
        shape, axis = ((n, rows), 0) if columns else ((rows, n), 1)
        dy, y = half(*shape).normal_(), half(*shape).uniform_(0, 2 / n)
        dx = half(*shape).fill_(torch.nan)
        gp.softmax_backward(dy, y, axis=axis, out=dx)
        for row in (0, 2**20, 2**21 - 1, 2**21, rows - 1):
            d, v, got = (a.select(1 - axis, row).double() for a in (dy, y, dx))
            want = v * (d - (v * d).sum())
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)

    def test_one_long_row(self, size):
        dy, y, dx = half(MANY).normal_(), half(MANY).fill_(2.0**-31), half(MANY).fill_(torch.nan)
        total = sum(float(part.sum(dtype=torch.float64)) for part in dy.split(1 << 28)) * 2.0**-31
        gp.softmax_backward(dy, y, out=dx)
        for part in self.slices():
            want = 2.0**-31 * (dy[part].double() - total)
            torch.testing.assert_close(dx[part].double(), want, rtol=2**-7, atol=0)

    @pytest.mark.parametrize("ties", ["first", "last"])
    def test_places_beyond_32_bits(self, size, ties):
        """The winner's index needs 64 bits."""
        x = half(MANY).zero_()
        place = {"first": MANY - 7, "last": 5}[ties]
        x[[MANY - 7, MANY - 3]] = 1.0
        if ties == "last":
            x[5] = 1.0
            place = MANY - 3
        one = torch.ones(1, dtype=torch.bfloat16, device="cuda")
        dx = half(MANY).fill_(torch.nan)
        gp.max_backward(one, x, one, axis=0, keepdims=True, ties=ties, out=dx)
        assert dx[place] == 1
        assert sum(float(part.float().abs().sum()) for part in dx.split(1 << 28)) == 1

    def test_one_long_scan(self, size):
        """Ones far apart: every sum is a small whole number."""
        for reverse in (False, True):
            dy, dx = half(MANY).zero_(), half(MANY).fill_(torch.nan)
            places = [3, 2**30, 2**31 - 1, 2**31, MANY - 5]
            dy[places] = 1.0
            gp.cumsum_backward(dy, reverse=reverse, out=dx)
            for part in self.slices():
                at = torch.arange(part.start, part.stop, device="cuda")
                marks = torch.tensor(places, device="cuda")[:, None]
                want = (marks <= at if reverse else marks >= at).sum(0)
                assert torch.equal(dx[part].long(), want)

    @pytest.mark.parametrize("kind", ["cumsum", "cummax", "cumprod"])
    def test_many_scans(self, size, kind):
        rows, n = 2**20 + 3, 2048
        dy, dx = half(rows, n).normal_(), half(rows, n).fill_(torch.nan)
        x = None if kind == "cumsum" else half(rows, n).uniform_(0.999, 1.001)
        y = torch.cummax(x[-1:], 1).values if kind == "cummax" else None
        more = () if x is None else (x,)
        getattr(gp, f"{kind}_backward")(dy, *more, out=dx)
        d = dy[-1].double()
        if kind == "cumsum":
            want = d.flip(0).cumsum(0).flip(0)
        elif kind == "cumprod":
            saved = x[-1].double().cumprod(0)
            want = (d * saved).flip(0).cumsum(0).flip(0) / x[-1].double()
        else:
            first = torch.cat([torch.ones(1, 1, device="cuda").bool(), y[:, 1:] > y[:, :-1]], 1)[0]
            group = first.long().cumsum(0) - 1
            sums = torch.zeros(n, dtype=torch.float64, device="cuda").index_add_(0, group, d)
            want = torch.where(first, sums[group], 0.0)
        error = (dx[-1].double() - want).norm() / want.norm()
        assert error < 2**-7
        assert not dx[2**20 :].isnan().any()

    def test_more_than_2_to_31_rows(self, size):
        """The number of a row needs 64 bits."""
        dy, dx = half(MANY, 1).normal_(), half(MANY, 1).fill_(torch.nan)
        gp.cumsum_backward(dy, out=dx)
        assert torch.equal(dx, dy)
        dx.fill_(torch.nan)
        y = half(MANY, 1).fill_(1.0)
        gp.softmax_backward(dy, y, out=dx)
        assert not dx.any()
        del y, dx
        out = half(MANY, 2).fill_(torch.nan)
        gp.sum_backward(dy, (MANY, 2), axis=1, keepdims=True, out=out)
        for part in self.slices():
            assert (out[part] == dy[part]).all()

    def test_embedding(self, size):
        count, dim, rows = 2**25 + 65, 64, 1000
        dout = half(count, dim).zero_()
        dout[-3000:] = 1.0
        indices = torch.arange(count, device="cuda", dtype=torch.int32) % rows
        dweight = half(rows, dim).fill_(torch.nan)
        gp.embedding_backward(dout, indices, rows, out=dweight)
        assert (dweight == 3).all()

    def test_a_large_table(self, size):
        rows, dim = 2**25 + 65, 64
        dweight = half(rows, dim).fill_(torch.nan)
        dout = torch.ones(4, dim, dtype=torch.bfloat16, device="cuda")
        indices = torch.tensor([0, 2**25 + 64, 2**25, 2**25], device="cuda")
        gp.embedding_backward(dout, indices, rows, out=dweight)
        assert (dweight[[0, 2**25 + 64]] == 1).all()
        assert (dweight[2**25] == 2).all()
        assert sum(float(part.float().sum()) for part in dweight.split(1 << 22)) == 4 * dim
