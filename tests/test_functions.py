"""The plain functions against torch's autograd, an oracle that shares no code with this library,
and at the edges where other libraries hurt their users."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch

import gradplan as gp

BF16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-12},
    torch.float32: {"rtol": 3e-5, "atol": 3e-6},
}
NAN, INF = np.nan, np.inf


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def distinct(*shape, dtype=torch.float64):
    """Numbers without ties, in random order, none of them zero."""
    count = int(np.prod(shape))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return ((order.to(torch.float64) + 0.5) / count - 0.3).reshape(shape).to(dtype)


def autograd(forward, x, dy=None):
    """torch's result and gradient."""
    x = x.clone().requires_grad_()
    y = forward(x)
    dy = random(*y.shape, seed=7, dtype=y.dtype) if dy is None else dy
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dy, dx


def close(got, want):
    """Both as torch tensors, of the same type."""
    got = torch.from_numpy(got) if isinstance(got, np.ndarray) else got
    torch.testing.assert_close(got, want, **TOLERANCE[want.dtype])


def flip_scan(scan):
    return lambda x, axis: scan(x.flip(axis), axis).flip(axis)


SCANS = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": lambda x, axis: torch.cummax(x, axis)[0],
    "cummin": lambda x, axis: torch.cummin(x, axis)[0],
    "logcumsumexp": torch.logcumsumexp,
}


def scan_backward(name, dy, x, y, **options):
    function = getattr(gp, f"{name}_backward")
    return function(dy, **options) if name == "cumsum" else function(dy, x, y, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_agrees_with_autograd(name, dtype):
    forward = getattr(torch, name)
    function = getattr(gp, f"{name}_backward")
    # Each axis and layout is a kernel to compile, and the conformance tests have them all.
    for axis in (-1,) if dtype is torch.float64 else (-1, 2, 0, -2):
        y, dy, dx = autograd(lambda x, axis=axis: forward(x, axis), random(4, 3, 5, dtype=dtype))
        close(function(dy, y, axis=axis), dx)
        close(function(dy.numpy(), y.numpy(), axis), dx)
    y, dy, dx = autograd(lambda x: forward(x, -1), random(4, 5, dtype=dtype))
    close(function(dy, y), dx)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("weight", [0.25, 0, 1, -1.5, 0.1])
def test_lerp_agrees_with_autograd(dtype, weight):
    a = random(3, 4, dtype=dtype, seed=1).requires_grad_()
    b = random(3, 4, dtype=dtype, seed=2).requires_grad_()
    dy = random(3, 4, dtype=dtype, seed=3)
    da, db = torch.autograd.grad(torch.lerp(a, b, weight), (a, b), dy)
    got = gp.lerp_backward(dy, weight)
    assert isinstance(got, tuple)
    close(got[0], da)
    close(got[1], db)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", SCANS)
def test_scans_agree_with_autograd(name, dtype):
    # Without ties first and last agree, and torch's choice with both.
    for axis in (-1, 0, 1, -3):
        for reverse in (False, True):
            forward = flip_scan(SCANS[name]) if reverse else SCANS[name]
            x = distinct(3, 4, 5, dtype=dtype)
            y, dy, dx = autograd(lambda x, axis=axis, forward=forward: forward(x, axis), x)
            options = {"axis": axis, "reverse": reverse}
            close(scan_backward(name, dy, x, None, **options), dx)
            if dtype is torch.float32:
                close(scan_backward(name, dy.numpy(), x.numpy(), y.numpy(), **options), dx)


@pytest.mark.parametrize("name", SCANS)
def test_scans_run_along_the_last_axis_forwards_by_default(name):
    x = distinct(3, 5, dtype=torch.float32)
    _, dy, dx = autograd(lambda x: SCANS[name](x, -1), x)
    close(scan_backward(name, dy, x, None), dx)


def norm(x, **options):
    return torch.linalg.vector_norm(x, **options)


def over(reduce):
    """A reduction that takes several axes at once, from one that takes one."""

    def several(x, dim, keepdim):
        for axis in sorted((d % x.ndim for d in dim), reverse=True):
            x = reduce(x, axis, keepdim=keepdim)
        return x

    return several


REDUCTIONS = {
    "sum": (torch.sum, ""),
    "mean": (torch.mean, ""),
    "max": (torch.amax, "xy"),
    "min": (torch.amin, "xy"),
    "prod": (over(torch.prod), "x"),
    "norm2": (norm, "xy"),
    "logsumexp": (torch.logsumexp, "xy"),
    "var": (torch.var, "x"),
    "std": (torch.std, "xy"),
}


def reduce_backward(name, dy, x, y, **options):
    function = getattr(gp, f"{name}_backward")
    needs = REDUCTIONS[name][1]
    if not needs:
        return function(dy, x.shape, **options)
    return function(dy, x, **({"y": y} if "y" in needs else {}), **options)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0,), (0, 2), (2, 0), (-1, -2), (0, 1, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions_agree_with_autograd(name, axis, keepdims):
    x = distinct(3, 4, 5, dtype=torch.float32)
    dim = tuple(range(3)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    forward = REDUCTIONS[name][0]
    y, dy, dx = autograd(lambda x: forward(x, dim=dim, keepdim=keepdims), x)
    close(reduce_backward(name, dy, x, y, axis=axis, keepdims=keepdims), dx)
    got = reduce_backward(name, dy.numpy(), x.numpy(), y.numpy(), axis=axis, keepdims=keepdims)
    assert type(got) is np.ndarray
    close(got, dx)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_agree_with_autograd_in_double(name):
    x = distinct(4, 5)
    y, dy, dx = autograd(lambda x: REDUCTIONS[name][0](x, dim=(1,), keepdim=False), x)
    close(reduce_backward(name, dy, x, y, axis=1), dx)


@pytest.mark.parametrize("correction", [0, 1, 2, 0.5])
@pytest.mark.parametrize("name", ["var", "std"])
def test_corrections_agree_with_autograd(name, correction):
    x = random(3, 5, dtype=torch.float32)
    forward = getattr(torch, name)
    y, dy, dx = autograd(lambda x: forward(x, dim=1, correction=correction), x)
    close(reduce_backward(name, dy, x, y, axis=1, correction=correction), dx)


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_are_shared_as_amax_shares_them(name):
    x = torch.tensor([[1.0, 2, 2, 1], [3, 3, 3, 3]])
    y, dy, dx = autograd(lambda x: REDUCTIONS[name][0](x, dim=(1,), keepdim=False), x)
    close(reduce_backward(name, dy, x, y, axis=1), dx)


@pytest.mark.parametrize(
    ("ties", "want"),
    [
        ("split", [0, 0.5, 0.5, 0]),
        ("all", [0, 1, 1, 0]),
        ("first", [0, 1, 0, 0]),
        ("last", [0, 0, 1, 0]),
    ],
)
def test_tie_rules_share_or_choose(ties, want):
    x = np.array([1, 2, 2, 1], np.float32)
    dy, y = np.float32(1), np.float32(2)
    for rule in (ties, gp.TieRule.coerce(ties)):
        assert gp.max_backward(dy, x, y, ties=rule).tolist() == want
    assert gp.min_backward(dy, -x, -y, ties=ties).tolist() == want


def test_the_first_tie_is_first_in_c_order_whatever_the_memory_order():
    x = np.zeros((3, 4), np.float32)
    x[1, 3] = x[2, 0] = 1
    dy = y = np.float32(1)
    for laid in (x, np.asfortranarray(x), np.flip(np.ascontiguousarray(np.flip(x)))):
        for axis in (None, (0, 1), (1, 0)):
            first = gp.max_backward(dy, laid, y, axis=axis, ties="first")
            last = gp.max_backward(dy, laid, y, axis=axis, ties="last")
            assert np.argwhere(first).tolist() == [[1, 3]]
            assert np.argwhere(last).tolist() == [[2, 0]]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=["i64", "i32"])
def test_embedding_agrees_with_autograd(shape, index):
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 6, shape, generator=generator)
    weight = torch.zeros(6, 3, requires_grad=True)
    out = torch.nn.functional.embedding(indices, weight)
    dout = random(*out.shape, dtype=torch.float32)
    (want,) = torch.autograd.grad(out, weight, dout)
    got = gp.embedding_backward(dout, indices.to(index), 6)
    assert got.shape == (6, 3)
    close(got, want)
    close(gp.embedding_backward(dout.numpy(), indices.to(index).numpy(), 6), want)


@pytest.mark.parametrize("by_count", [False, True])
def test_embedding_options_agree_with_autograd(by_count):
    indices = torch.tensor([[0, 2, 2, 5], [2, 1, 5, 1]])
    weight = torch.zeros(6, 3, requires_grad=True)
    out = torch.nn.functional.embedding(indices, weight, padding_idx=1, scale_grad_by_freq=by_count)
    dout = random(*out.shape, dtype=torch.float32)
    (want,) = torch.autograd.grad(out, weight, dout)
    close(gp.embedding_backward(dout, indices, 6, 1, by_count), want)
    close(gp.embedding_backward(dout, indices, 6, padding_idx=1, scale_grad_by_freq=by_count), want)


def test_embedding_reads_index_views_that_cannot_be_flattened():
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 9, (6, 10, 8))
    values = rng.standard_normal((6, 10, 8, 4)).astype(np.float32)
    for cut in (
        (slice(None, None, 2), slice(1, 9, 3), slice(None, None, -1)),
        (slice(None, None, -1), slice(None), slice(0, 8, 2)),
        (slice(None), slice(2, 3), slice(None)),
    ):
        indices, dout = whole[cut], values[cut]
        want = np.zeros((9, 4))
        np.add.at(want, indices.reshape(-1), dout.reshape(-1, 4).astype(np.float64))
        got = gp.embedding_backward(dout, indices, 9)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        turned = np.moveaxis(indices, 0, 2), np.moveaxis(dout, 0, 2)
        np.testing.assert_allclose(
            gp.embedding_backward(turned[1], turned[0], 9), want, rtol=1e-5, atol=1e-5
        )
    # One index for all rows, and one row for all indices: zero strides.
    everywhere = np.broadcast_to(np.int64(3), (6, 10))
    got = gp.embedding_backward(values[:, :, 0], everywhere, 9)
    np.testing.assert_allclose(got[3], values[:, :, 0].sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert not got[[0, 1, 2, 4, 5, 6, 7, 8]].any()
    got = gp.embedding_backward(np.broadcast_to(values[0, 0, 0], (6, 4)), np.full(6, 2), 9)
    np.testing.assert_allclose(got[2], 6 * values[0, 0, 0], rtol=1e-6)


def test_embedding_skips_indices_outside_the_table():
    dout = np.ones((5, 2), np.float32)
    indices = np.array([-1, 0, 3, 2, np.iinfo(np.int64).min])
    assert gp.embedding_backward(dout, indices, 3).tolist() == [[1, 1], [0, 0], [1, 1]]


def test_embedding_accumulates_into_out():
    dout = np.ones((3, 2), np.float32)
    indices = np.array([0, 2, 2])
    old = np.array([[1, 2], [-0.0, NAN], [5, 6]], np.float32)
    table = old.copy()
    got = gp.embedding_backward(dout, indices, 3, accumulate=True, out=table)
    assert got is table
    assert table[[0, 2]].tolist() == [[2, 3], [7, 8]]
    # Rows nobody names keep their bits.
    assert table[1].tobytes() == old[1].tobytes()
    got = gp.embedding_backward(dout, indices, 3, out=table)
    assert table.tolist() == [[1, 1], [0, 0], [2, 2]]
    # By count: the new sum is divided, not what was there.
    gp.embedding_backward(dout, indices, 3, None, True, True, out=table)
    assert table.tolist() == [[2, 2], [0, 0], [3, 3]]
    with pytest.raises(gp.InvalidProblem, match="out"):
        gp.embedding_backward(dout, indices, 3, accumulate=True)


@pytest.mark.parametrize(
    ("dout", "indices"),
    [((3, 2), (4,)), ((3,), (3,)), ((3, 2, 2), (3,)), ((3, 2), (3, 2)), ((2,), (1,))],
)
def test_embedding_shapes_must_agree(dout, indices):
    with pytest.raises(gp.InvalidProblem) as caught:
        gp.embedding_backward(np.ones(dout, np.float32), np.zeros(indices, np.int64), 5)
    for word in ("embedding_backward", "dout", str(dout), str(indices)):
        assert word in str(caught.value)


F32 = np.float32
SQUARE = np.arange(1, 13, dtype=F32).reshape(3, 4) / 13
COLUMN = np.array([0.5, 1, 2], F32)
ONE_OUT = {
    "softmax": lambda **o: gp.softmax_backward(SQUARE, SQUARE, **o),
    "log_softmax": lambda **o: gp.log_softmax_backward(SQUARE, SQUARE, **o),
    "cumsum": lambda **o: gp.cumsum_backward(SQUARE, **o),
    "cumprod": lambda **o: gp.cumprod_backward(SQUARE, SQUARE, **o),
    "cummax": lambda **o: gp.cummax_backward(SQUARE, SQUARE, **o),
    "cummin": lambda **o: gp.cummin_backward(SQUARE, SQUARE, **o),
    "logcumsumexp": lambda **o: gp.logcumsumexp_backward(SQUARE, SQUARE, **o),
    "sum": lambda **o: gp.sum_backward(COLUMN, (3, 4), 1, **o),
    "mean": lambda **o: gp.mean_backward(COLUMN, (3, 4), 1, **o),
    "max": lambda **o: gp.max_backward(COLUMN, SQUARE, SQUARE[:, 3], 1, **o),
    "min": lambda **o: gp.min_backward(COLUMN, SQUARE, SQUARE[:, 0], 1, **o),
    "prod": lambda **o: gp.prod_backward(COLUMN, SQUARE, axis=1, **o),
    "norm2": lambda **o: gp.norm2_backward(COLUMN, SQUARE, COLUMN, 1, **o),
    "logsumexp": lambda **o: gp.logsumexp_backward(COLUMN, SQUARE, COLUMN, 1, **o),
    "var": lambda **o: gp.var_backward(COLUMN, SQUARE, 1, **o),
    "std": lambda **o: gp.std_backward(COLUMN, SQUARE, COLUMN, 1, **o),
    "embedding": lambda **o: gp.embedding_backward(SQUARE, np.array([0, 1, 2]), 3, **o),
}


@pytest.mark.parametrize("name", ONE_OUT)
def test_out_is_written_and_returned(name, monkeypatch):
    call = ONE_OUT[name]
    want = call()
    assert want.flags.c_contiguous
    assert want.dtype == np.float32
    out = np.full((3, 4), NAN, F32)
    assert call(out=out) is out
    assert out.tobytes() == want.tobytes()
    # The type and the layout of `out` are the caller's choice; strided kernels of all kinds
    # would take long to compile here.
    tensor = torch.full((3, 4), float("nan"))
    if name in ("softmax", "cumsum", "max", "embedding"):
        tensor = torch.full((4, 3), float("nan")).T
    assert call(out=tensor) is tensor
    np.testing.assert_allclose(tensor.numpy(), want, rtol=1e-6)
    # A stream is ignored on the CPU, and a preference is honoured.
    assert call(stream=1).tobytes() == want.tobytes()
    reference = call(preference=gp.PlanPreference(backend="reference"))
    np.testing.assert_allclose(reference, want, rtol=1e-6)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(gp.Unsupported):
        call(preference=gp.PlanPreference(backend="triton"))


@pytest.mark.parametrize("name", ONE_OUT)
def test_a_wrong_out_is_refused_and_left_alone(name):
    call = ONE_OUT[name]
    frozen = np.ones((3, 4), F32)
    frozen.flags.writeable = False
    for out in (np.ones((4, 3), F32), np.ones((3, 4), np.float64), np.ones(12, F32), frozen):
        before = out.tobytes()
        with pytest.raises(gp.InvalidProblem) as caught:
            call(out=out)
        assert "Plan" in str(caught.value) or "_backward" in str(caught.value)
        assert out.tobytes() == before


@pytest.mark.parametrize("name", ONE_OUT)
def test_a_write_into_a_tensor_is_counted(name):
    # Else autograd would take what a forward pass saved for unchanged.
    out = torch.zeros(3, 4)
    for version in (1, 2):
        ONE_OUT[name](out=out)
        assert out._version == version
    ONE_OUT[name](out=out[:, :].detach())
    assert out._version == 3, "a view's writes are its base's"
    with torch.inference_mode():
        uncounted = torch.zeros(3, 4)
        ONE_OUT[name](out=uncounted)
    assert ONE_OUT[name](out=uncounted) is uncounted


def test_lerp_counts_the_writes_into_what_is_given():
    da, db = torch.zeros(3, 4), torch.zeros(3, 4)
    gp.lerp_backward(SQUARE, 0.25, out=(da, None))
    assert (da._version, db._version) == (1, 0)
    gp.lerp_backward(SQUARE, 0.25, out=(da, db))
    assert (da._version, db._version) == (2, 1)


def test_autograd_refuses_a_saved_tensor_that_was_written_to():
    saved, weight = torch.ones(3, 4), torch.ones(3, 4, requires_grad=True)
    loss = (saved * weight).sum()
    gp.softmax_backward(SQUARE, SQUARE, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_new_tensors_count_no_write():
    dy = torch.ones(3, 4)
    assert gp.softmax_backward(dy, dy)._version == 0
    assert dy._version == 0


def test_out_on_dy_works_in_place():
    dy = SQUARE.copy()
    want = gp.softmax_backward(dy, SQUARE)
    assert gp.softmax_backward(dy, SQUARE, out=dy) is dy
    assert dy.tobytes() == want.tobytes()
    y = SQUARE.copy()
    with pytest.raises(gp.InvalidProblem, match="overlaps"):
        gp.softmax_backward(SQUARE, y, out=y)


def test_out_allocates_nothing():
    dy, y, dx = (np.ones((1000, 100), F32) for _ in range(3))
    for out in ({"out": dx}, {"out": (dx, None)}):
        function = gp.softmax_backward if out["out"] is dx else gp.lerp_backward
        second = y if out["out"] is dx else 0.5
        function(dy, second, **out)
        tracemalloc.start()
        function(dy, second, **out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


def test_lerp_out_skips_what_is_none():
    da, db = np.empty((3, 4), F32), np.empty((3, 4), F32)
    want = gp.lerp_backward(SQUARE, 0.25)
    got = gp.lerp_backward(SQUARE, 0.25, out=(da, None))
    assert got[0] is da
    assert got[1] is None
    got = gp.lerp_backward(SQUARE, 0.25, out=[None, db])
    assert got[0] is None
    assert got[1] is db
    assert da.tobytes() == want[0].tobytes()
    assert db.tobytes() == want[1].tobytes()
    da[:] = db[:] = NAN
    both = gp.lerp_backward(SQUARE, 0.25, out=(da, db))
    assert both[0] is da
    assert both[1] is db
    assert da.tobytes() == want[0].tobytes()
    assert db.tobytes() == want[1].tobytes()
    assert tuple(gp.lerp_backward(SQUARE, 0.25, out=(None, None))) == (None, None)
    for out in (da, (da,), (da, db, None)):
        with pytest.raises(gp.InvalidProblem, match="out must be a pair"):
            gp.lerp_backward(SQUARE, 0.25, out=out)
    with pytest.raises(gp.InvalidProblem, match="overlaps"):
        gp.lerp_backward(SQUARE, 0.25, out=(da, da))


@pytest.mark.parametrize(
    "weight",
    [np.float64(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5, dtype=torch.float64)],
    ids=["scalar", "half", "array", "tensor"],
)
def test_lerp_takes_any_number_as_its_weight(weight):
    assert gp.lerp_backward(np.ones(4, F32), weight)[1].tolist() == [0.5] * 4


@pytest.mark.parametrize("weight", ["0.5", b"0.5", None, [0.5], 1j, 10**400], ids=range(6))
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(gp.InvalidProblem, match="lerp_backward: weight must be a number"):
        gp.lerp_backward(np.ones(4, F32), weight)


@pytest.mark.parametrize("correction", ["1", None, NAN, INF, 10**400], ids=range(5))
def test_a_correction_that_is_no_number_is_refused(correction):
    for call in (
        lambda: gp.var_backward(COLUMN, SQUARE, axis=1, correction=correction),
        lambda: gp.std_backward(COLUMN, SQUARE, COLUMN, axis=1, correction=correction),
    ):
        with pytest.raises(gp.InvalidProblem, match="correction must be"):
            call()


def test_a_weight_of_nan_finds_its_plan_again():
    from gradplan.functions import _LERP

    dy = np.ones(4, F32)
    gp.lerp_backward(dy, NAN)
    before = len(_LERP.asked)
    for weight in (float("nan"), np.float32("nan"), torch.tensor(NAN)):
        assert np.isnan(gp.lerp_backward(dy, weight)).all()
    assert len(_LERP.asked) == before


def test_lerp_reads_a_weight_that_changes_between_calls():
    dy, weight = np.ones(4, F32), torch.tensor(0.5)
    gp.lerp_backward(dy, weight)
    weight.fill_(0.25)
    assert gp.lerp_backward(dy, weight)[1].tolist() == [0.25] * 4


def test_lerp_keeps_its_weight_in_double():
    # 1 − w rounded to bf16 first would be 0.66796875.
    dy = np.full(3, 2.0**14, BF16)
    da, db = gp.lerp_backward(dy, 1 / 3 + 2.0**-12)
    assert da.tolist() == [BF16.type((2 / 3 - 2.0**-12) * 2**14)] * 3
    assert db.tolist() == [BF16.type((1 / 3 + 2.0**-12) * 2**14)] * 3
    for weight in ("a", None):
        with pytest.raises(gp.InvalidProblem, match="weight"):
            gp.lerp_backward(dy, weight)


RANK_0 = {
    "softmax": (lambda a: gp.softmax_backward(a, a), 0.5 * (0.5 - 0.25)),
    "log_softmax": (lambda a: gp.log_softmax_backward(a, a * 0), 0.0),
    "cumsum": (lambda a: gp.cumsum_backward(a), 0.5),
    "cumprod": (lambda a: gp.cumprod_backward(a, a, axis=0), 0.5),
    "cummax": (lambda a: gp.cummax_backward(a, a), 0.5),
    "cummin": (lambda a: gp.cummin_backward(a, a, a), 0.5),
    "logcumsumexp": (lambda a: gp.logcumsumexp_backward(a, a), 0.5),
    "sum": (lambda a: gp.sum_backward(a, ()), 0.5),
    "mean": (lambda a: gp.mean_backward(a, (), axis=()), 0.5),
    "max": (lambda a: gp.max_backward(a, a, a), 0.5),
    "min": (lambda a: gp.min_backward(a, a, a, keepdims=True), 0.5),
    "prod": (lambda a: gp.prod_backward(a, a), 0.5),
    "norm2": (lambda a: gp.norm2_backward(a, a, a), 0.5),
    "logsumexp": (lambda a: gp.logsumexp_backward(a, a, a), 0.5),
    "var": (lambda a: gp.var_backward(a, a), 0.0),
    "std": (lambda a: gp.std_backward(a, a, a * 0), 0.0),
    "lerp": (lambda a: gp.lerp_backward(a, 0.25)[1], 0.125),
}


@pytest.mark.parametrize("name", RANK_0)
def test_rank_0_counts_as_one_element(name):
    call, want = RANK_0[name]
    for a in (np.array(0.5, F32), np.float32(0.5), torch.tensor(0.5)):
        got = call(a)
        assert tuple(got.shape) == ()
        assert str(got.dtype).endswith("float32")
        assert float(got) == want


def test_scalars_are_one_element_for_dy_too():
    x = np.array([1, 2, 3], F32)
    assert gp.sum_backward(np.float32(2), (3,)).tolist() == [2, 2, 2]
    assert gp.mean_backward(np.float64(3), (3,)).tolist() == [1, 1, 1]
    assert gp.prod_backward(np.float32(2), x).tolist() == [12, 6, 4]
    assert gp.sum_backward(np.array(2, F32), [2, 2]).tolist() == [[2, 2], [2, 2]]
    half = ml_dtypes.bfloat16(2)
    assert gp.sum_backward(half, (2,)).dtype == BF16
    with pytest.raises(gp.InvalidProblem):
        gp.sum_backward(2.0, (3,))


def test_rank_0_takes_no_axis_beyond_its_own():
    a = np.float32(0.5)
    for call in (
        lambda: gp.softmax_backward(a, a, axis=1),
        lambda: gp.cumsum_backward(a, axis=-2),
        lambda: gp.sum_backward(a, (), axis=1),
        lambda: gp.sum_backward(a, (), axis=(0, 0)),
    ):
        with pytest.raises(gp.InvalidProblem):
            call()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_empty_arrays_succeed_and_give_empty_gradients(shape):
    a = np.zeros(shape, F32)
    for axis in range(len(shape)):
        small = np.zeros(tuple(n for d, n in enumerate(shape) if d != axis), F32)
        results = [
            gp.softmax_backward(a, a, axis),
            gp.log_softmax_backward(a, a, axis),
            gp.cumsum_backward(a, axis),
            gp.cumprod_backward(a, a, axis=axis),
            gp.cummax_backward(a, a, axis=axis),
            gp.cummin_backward(a, a, a, axis),
            gp.logcumsumexp_backward(a, a, axis=axis),
            *gp.lerp_backward(a, 0.5),
            gp.sum_backward(small, shape, axis),
            gp.mean_backward(small, shape, axis),
            gp.max_backward(small, a, small, axis),
            gp.min_backward(small, a, small, axis),
            gp.prod_backward(small, a, axis=axis),
            gp.norm2_backward(small, a, small, axis),
            gp.logsumexp_backward(small, a, small, axis),
            gp.var_backward(small, a, axis),
            gp.std_backward(small, a, small, axis),
        ]
        for result in results:
            assert result.shape == shape
            assert result.dtype == np.float32


def test_embedding_at_its_empty_ends():
    no_rows = gp.embedding_backward(np.ones((2, 3), F32), np.array([0, 1]), 0)
    assert no_rows.shape == (0, 3)
    no_columns = gp.embedding_backward(np.ones((2, 0), F32), np.array([0, 1]), 4)
    assert no_columns.shape == (4, 0)
    no_indices = gp.embedding_backward(np.ones((0, 3), F32), np.zeros(0, np.int64), 4)
    assert no_indices.tolist() == np.zeros((4, 3)).tolist()
    nested = gp.embedding_backward(np.ones((2, 0, 3), F32), np.zeros((2, 0), np.int64), 4)
    assert not nested.any()
    table = np.ones((4, 3), F32)
    gp.embedding_backward(
        np.ones((0, 3), F32), np.zeros(0, np.int64), 4, accumulate=True, out=table
    )
    assert (table == 1).all()


def test_no_axes_reduce_nothing():
    # Each element is a row of its own: n = 1.
    x = SQUARE
    for keepdims in (False, True):
        options = {"axis": (), "keepdims": keepdims}
        assert (gp.sum_backward(x, x.shape, **options) == x).all()
        assert (gp.mean_backward(x, x.shape, **options) == x).all()
        assert (gp.max_backward(x, x, x, **options) == x).all()
        assert (gp.min_backward(x, x, x, **options) == x).all()
        assert (gp.prod_backward(x, x, **options) == x).all()
        assert (gp.norm2_backward(x, -x, x, **options) == -x).all()
        assert (gp.logsumexp_backward(x, x, x, **options) == x).all()
        assert (gp.var_backward(x, x, **options) == 0).all()
        assert (gp.std_backward(x, x, 0 * x, **options) == 0).all()


@pytest.mark.parametrize(
    "axis", [[0, 1], range(2), np.array([0, 1]), torch.Size((1, 0)), torch.tensor([0, 1])], ids=repr
)
def test_axes_are_any_sequence_of_ints(axis):
    want = gp.var_backward(np.float32(2), SQUARE, axis=(0, 1))
    for _ in range(2):
        assert gp.var_backward(np.float32(2), SQUARE, axis=axis).tobytes() == want.tobytes()


@pytest.mark.parametrize("axis", [{0, 1}, {0: 1}, np.array([[0, 1]])], ids=repr)
def test_axes_that_are_no_sequence_are_invalid(axis):
    with pytest.raises(gp.InvalidProblem, match=r"sum_backward: axis must be .* sequence"):
        gp.sum_backward(np.float32(1), (3, 4), axis)


@pytest.mark.parametrize("axis", [(0, 0), (1, -1), (0, 1, -2)], ids=repr)
@pytest.mark.parametrize("keepdims", [False, True])
def test_axes_named_twice_are_invalid(axis, keepdims):
    dy = np.ones((1, 1) if keepdims else (), F32)
    with pytest.raises(gp.InvalidProblem):
        gp.sum_backward(dy, (3, 4), axis, keepdims)
    dy = np.ones((1, 4) if keepdims else (4,), F32)
    with pytest.raises(gp.InvalidProblem, match="twice"):
        gp.sum_backward(dy, (3, 4), (0, 0), keepdims)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gp.softmax_backward(SQUARE, SQUARE, axis=2),
        lambda: gp.softmax_backward(SQUARE, SQUARE, axis=-3),
        lambda: gp.softmax_backward(SQUARE, SQUARE, axis=None),
        lambda: gp.softmax_backward(SQUARE, SQUARE, axis=0.5),
        lambda: gp.softmax_backward(SQUARE, SQUARE, axis=(0,)),
        lambda: gp.softmax_backward(SQUARE, SQUARE, axis=[0]),
        lambda: gp.cumsum_backward(SQUARE, axis=2),
        lambda: gp.cumsum_backward(SQUARE, axis=[0, 1]),
        lambda: gp.sum_backward(COLUMN, (3, 4), axis=2),
        lambda: gp.sum_backward(COLUMN, (3, 4), axis=(0, 2)),
        lambda: gp.sum_backward(COLUMN, (3, 4), axis=0.5),
        lambda: gp.sum_backward(COLUMN, (3, 4), axis="1"),
        lambda: gp.sum_backward(COLUMN, (3, -4), axis=1),
        lambda: gp.sum_backward(COLUMN, (3, 4.0), axis=1),
        lambda: gp.sum_backward(COLUMN, None, axis=1),
        lambda: gp.sum_backward(COLUMN[0], (2**62, 2**62)),
        lambda: gp.sum_backward(COLUMN, (4, 3), axis=1),
        lambda: gp.sum_backward(COLUMN[:, None], (3, 4), axis=1),
        lambda: gp.sum_backward(COLUMN, (3, 4), axis=1, keepdims=True),
        lambda: gp.max_backward(COLUMN, SQUARE, SQUARE, axis=1),
        lambda: gp.cumprod_backward(SQUARE, SQUARE[:2]),
        lambda: gp.cumprod_backward(SQUARE, SQUARE, SQUARE.T),
        lambda: gp.cumprod_backward(SQUARE, None),
        lambda: gp.max_backward(COLUMN, SQUARE, None, axis=1),
        lambda: gp.max_backward(COLUMN, SQUARE, COLUMN, axis=1, ties="most"),
        lambda: gp.embedding_backward(SQUARE, np.zeros(3, np.int64), -1),
        lambda: gp.embedding_backward(SQUARE, np.zeros(3, np.int64), 5, padding_idx=5),
        lambda: gp.embedding_backward(SQUARE, np.zeros(3, np.int64), 5, padding_idx=-1),
        lambda: gp.embedding_backward(SQUARE, np.zeros(3, np.int64), [5]),
    ],
    ids=range(29),
)
def test_bad_calls_are_invalid_problems(call):
    with pytest.raises(gp.InvalidProblem):
        call()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: gp.softmax_backward(SQUARE, SQUARE, axis=2), "axis"),
        (lambda: gp.sum_backward(COLUMN, (3, 4), axis=2), "axis"),
        (lambda: gp.sum_backward(COLUMN, (4, 3), axis=1), "dy"),
        (lambda: gp.sum_backward(SQUARE, (3, 4), axis=1), "dy"),
        (lambda: gp.sum_backward(COLUMN, None, axis=1), "shape"),
        (lambda: gp.softmax_backward(SQUARE, SQUARE.T), "y"),
        (lambda: gp.softmax_backward(SQUARE, SQUARE.astype(int)), "y"),
        (lambda: gp.softmax_backward(SQUARE.astype(np.int32), SQUARE), "dy"),
        (lambda: gp.softmax_backward(SQUARE.astype(np.int8), SQUARE), "dy"),
        (lambda: gp.softmax_backward(SQUARE.tolist(), SQUARE), "dy"),
        (lambda: gp.embedding_backward(SQUARE, np.zeros(3), 5), "indices"),
        (lambda: gp.embedding_backward(SQUARE, np.zeros(3, np.int16), 5), "indices"),
        (lambda: gp.softmax_backward(SQUARE, SQUARE, out=[0]), "out"),
    ],
    ids=range(13),
)
def test_messages_of_functions_name_the_operation_and_the_argument(call, word):
    with pytest.raises(gp.GradPlanError) as caught:
        call()
    message = str(caught.value)
    assert word in message
    assert any(owner in message for owner in ("Plan", "Descriptor", "_backward")), message


@pytest.mark.parametrize(
    ("dy", "saved"),
    [(np.float32, np.float64), (np.float64, np.float32), (np.float16, BF16), (BF16, np.float32)],
)
def test_mixed_types_are_refused(dy, saved):
    a, b = SQUARE.astype(dy), SQUARE.astype(saved)
    column = COLUMN.astype(dy)
    for call in (
        lambda: gp.softmax_backward(a, b),
        lambda: gp.cumprod_backward(a, b),
        lambda: gp.cumprod_backward(a, a, b),
        lambda: gp.var_backward(column, b, axis=1),
        lambda: gp.max_backward(column, a, COLUMN.astype(saved), axis=1),
        lambda: gp.cumsum_backward(a, out=b.copy()),
        lambda: gp.lerp_backward(a, 0.5, out=(b.copy(), None)),
        lambda: gp.embedding_backward(a, np.zeros(3, np.int64), 3, out=np.zeros((3, 4), saved)),
    ):
        with pytest.raises(gp.InvalidProblem) as caught:
            call()
        assert gp.ElementKind.of(np.dtype(dy)).value in str(caught.value)
        assert gp.ElementKind.of(np.dtype(saved)).value in str(caught.value)


def test_integers_are_no_elements():
    for dtype in (np.int32, np.int64, np.int8, np.complex64, bool):
        with pytest.raises(gp.Unsupported):
            gp.cumsum_backward(np.ones(3, dtype))
    for dtype in (np.float32, np.int16, np.uint64, bool):
        with pytest.raises(gp.Unsupported):
            gp.embedding_backward(np.ones((3, 2), F32), np.zeros(3, dtype), 3)


def test_cummax_with_shared_ties_is_unsupported():
    for function in (gp.cummax_backward, gp.cummin_backward):
        for ties in ("split", "all"):
            with pytest.raises(gp.Unsupported, match=ties):
                function(SQUARE, SQUARE, ties=ties)


def test_torch_in_is_torch_out():
    for dtype in (torch.float32, torch.bfloat16):
        dy = random(6, 4, dtype=dtype).T
        y = random(6, 4, dtype=dtype, seed=1).softmax(0).T
        got = gp.softmax_backward(dy, y)
        assert isinstance(got, torch.Tensor)
        assert got.dtype is dtype
        assert not got.requires_grad
        exact = y.double() * (dy.double() - (y.double() * dy.double()).sum(-1, keepdim=True))
        torch.testing.assert_close(
            got.double(), exact, rtol=2.0**-8 if dtype is torch.bfloat16 else 1e-5, atol=2e-3
        )
    da, db = gp.lerp_backward(torch.ones(3), 0.5)
    assert isinstance(da, torch.Tensor)
    assert isinstance(db, torch.Tensor)
    assert isinstance(gp.sum_backward(torch.tensor(1.0), (3,)), torch.Tensor)
    table = gp.embedding_backward(torch.ones(3, 2), torch.tensor([0, 1, 1]), 2)
    assert isinstance(table, torch.Tensor)
    assert table.tolist() == [[1, 1], [2, 2]]


def test_torch_reads_strides_where_they_lie():
    whole = random(7, 9, dtype=torch.float32)
    dy = whole[::2, 1::2]
    before = whole.clone()
    want = dy.flip(-1).cumsum(-1).flip(-1)
    close(gp.cumsum_backward(dy), want)
    close(gp.cumsum_backward(dy.expand(3, 4, 4)), want.expand(3, 4, 4))
    assert torch.equal(whole, before)


def test_numpy_bfloat16_comes_through_ml_dtypes():
    dy = np.array([[1, 2, 3.5], [-1, 0, 0.25]], BF16)
    got = gp.cumsum_backward(dy)
    assert type(got) is np.ndarray
    assert got.dtype == BF16
    assert got.astype(F32).tolist() == [[6.5, 5.5, 3.5], [-0.75, 0.25, 0.25]]


class OnlyDLPack:
    """An array of a library nobody knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_anything_that_speaks_dlpack_is_an_array():
    want = gp.softmax_backward(SQUARE, SQUARE)
    got = gp.softmax_backward(OnlyDLPack(SQUARE), OnlyDLPack(SQUARE))
    assert np.from_dlpack(got).tobytes() == want.tobytes()
    out = np.empty((3, 4), F32)
    lent = OnlyDLPack(out)
    assert gp.softmax_backward(SQUARE, OnlyDLPack(SQUARE), out=lent) is lent
    assert out.tobytes() == want.tobytes()
    got = gp.embedding_backward(OnlyDLPack(SQUARE), OnlyDLPack(np.array([1, 0, 1])), 2)
    np.testing.assert_allclose(np.from_dlpack(got), [SQUARE[1], SQUARE[0] + SQUARE[2]])


def test_libraries_may_be_mixed_on_one_device():
    want = gp.softmax_backward(SQUARE, SQUARE)
    got = gp.softmax_backward(torch.from_numpy(SQUARE), SQUARE)
    assert isinstance(got, torch.Tensor)
    assert got.numpy().tobytes() == want.tobytes()
    assert isinstance(gp.softmax_backward(SQUARE, torch.from_numpy(SQUARE)), np.ndarray)


def test_read_only_and_broadcast_inputs_are_fine():
    frozen = SQUARE.copy()
    frozen.flags.writeable = False
    want = gp.softmax_backward(SQUARE, SQUARE)
    assert gp.softmax_backward(frozen, frozen).tobytes() == want.tobytes()
    wide = np.broadcast_to(SQUARE[0], (5, 4))
    got = gp.softmax_backward(wide, wide)
    np.testing.assert_allclose(got, np.broadcast_to(want[0], (5, 4)), rtol=1e-6)


def test_negative_strides_are_read_where_they_lie():
    flipped = SQUARE[::-1, ::-1]
    want = gp.cumprod_backward(flipped.copy(), flipped.copy(), axis=0)
    np.testing.assert_allclose(gp.cumprod_backward(flipped, flipped, axis=0), want, rtol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda g, t: gp.softmax_backward(g, t),
        lambda g, t: gp.softmax_backward(t, g),
        lambda g, t: gp.cumprod_backward(t, t, g),
        lambda g, t: gp.var_backward(t.sum(1), g, axis=1),
        lambda g, t: gp.lerp_backward(g, 0.5),
        lambda g, t: gp.cumsum_backward(t, out=g),
        lambda g, t: gp.embedding_backward(g, torch.zeros(3, dtype=torch.int64), 3),
    ],
    ids=["dy", "y", "scan-y", "x", "lerp", "out", "dout"],
)
def test_tensors_that_require_grad_are_sent_to_gradplan_torch(call):
    plain = torch.ones(3, 4)
    with pytest.raises(gp.InvalidProblem, match=r"gradplan\.torch"):
        call(plain.clone().requires_grad_(), plain)
    # Under no_grad a parameter still requires grad; its detached self does not.
    detached = plain.clone().requires_grad_().detach()
    call(detached, plain)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of `make_dual` itself
@pytest.mark.parametrize("place", range(4))
def test_dual_tensors_are_sent_to_gradplan_torch(place):
    from torch.autograd import forward_ad

    def call(arrays):
        *inputs, out = arrays
        gp.cumprod_backward(*inputs, out=out)

    plain = [torch.ones(3, 4) for _ in range(4)]
    call(plain)
    with forward_ad.dual_level():
        call(plain)
        dual = plain.copy()
        dual[place] = forward_ad.make_dual(plain[place], torch.ones(3, 4))
        with pytest.raises(gp.InvalidProblem, match=r"tangent.*gradplan\.torch"):
            call(dual)
        dual[place] = dual[place].detach()
        call(dual)
    call(plain)


def test_a_norm_of_zero_has_gradient_zero():
    x = np.zeros((2, 4), F32)
    x[1, 2] = 3
    y = np.array([0, 3], F32)
    for dy in (np.array([1, 1], F32), np.array([NAN, 1], F32), np.array([INF, 1], F32)):
        assert gp.norm2_backward(dy, x, y, axis=1).tolist() == [[0] * 4, [0, 0, 1, 0]]


def test_a_deviation_of_zero_has_gradient_zero():
    x = np.full((2, 4), 5, F32)
    y = np.zeros(2, F32)
    for dy in (np.ones(2, F32), np.array([NAN, -INF], F32)):
        for correction in (0, 1, 4, 9):
            got = gp.std_backward(dy, x, y, axis=1, correction=correction)
            assert got.tolist() == [[0] * 4] * 2
    assert gp.var_backward(np.ones(2, F32), x, axis=1).tolist() == [[0] * 4] * 2


def test_a_variance_of_fewer_elements_than_its_correction_divides_by_one():
    x = np.array([1, 3], F32)
    assert gp.var_backward(np.float32(1), x, correction=2).tolist() == [-2, 2]
    assert gp.var_backward(np.float32(1), x, correction=7).tolist() == [-2, 2]


def test_a_log_sum_exp_row_of_minus_infinities_has_gradient_zero():
    x = np.array([[-INF, -INF, -INF], [0, -INF, 0]], F32)
    y = np.array([-INF, np.log(2)], F32)
    for dy in (np.ones(2, F32), np.array([NAN, 1], F32)):
        got = gp.logsumexp_backward(dy, x, y, axis=1)
        assert got[0].tolist() == [0, 0, 0]
        np.testing.assert_allclose(got[1], [0.5, 0, 0.5], rtol=1e-6)


def test_a_log_cumsum_exp_that_starts_at_minus_infinity_has_no_nan():
    x = np.array([-INF, -INF, 0, -INF, 0], F32)
    y = np.array([-INF, -INF, 0, 0, np.log(2)], F32)
    dy = np.ones(5, F32)
    for saved in (None, y):
        got = gp.logcumsumexp_backward(dy, x, saved)
        np.testing.assert_allclose(got, [0, 0, 2.5, 0, 0.5], rtol=1e-6)
    # Infinities that have not come yet fade out too.
    x = np.array([0, INF], F32)
    assert not np.isnan(gp.logcumsumexp_backward(np.array([1, 0], F32), x)[0])


def test_a_nan_gradient_of_log_cumsum_exp_is_kept():
    # PyTorch splits dy by sign, where a NaN falls into neither half.
    x = np.zeros(5, F32)
    dy = np.array([1, 1, NAN, 1, 1], F32)
    for y in (None, np.log(np.arange(1, 6)).astype(F32)):
        got = gp.logcumsumexp_backward(dy, x, y)
        assert np.isnan(got).tolist() == [True, True, True, False, False]
        np.testing.assert_allclose(got[3:], [1 / 4 + 1 / 5, 1 / 5], rtol=1e-6)


def test_sums_of_halves_are_kept_in_the_accumulator():
    # 4096 ones in bf16 stop at 256 when they are added in bf16.
    got = gp.embedding_backward(np.ones((4096, 3), BF16), np.zeros(4096, np.int64), 2)
    assert got.astype(F32).tolist() == [[4096] * 3, [0] * 3]
    got = gp.embedding_backward(
        torch.ones(4096, 3, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.int64), 2
    )
    assert got[0].tolist() == [4096] * 3
    assert gp.cumsum_backward(np.ones(4096, BF16)).astype(F32)[0] == 4096
    # Added to what is there before the one rounding: 256 + 1 + 1 is 258, not 256.
    table = np.full((1, 1), 256, BF16)
    gp.embedding_backward(
        np.ones((2, 1), BF16), np.zeros(2, np.int64), 1, accumulate=True, out=table
    )
    assert float(table[0, 0]) == 258


def test_softmax_of_halves_does_not_round_the_products_before_the_sum():
    rng = np.random.default_rng(3)
    y = (rng.uniform(0.5, 1.5, 256) / 256).astype(BF16)
    dy = rng.uniform(1, 2, 256).astype(BF16)
    wide_y, wide_dy = y.astype(np.float64), dy.astype(np.float64)
    exact = wide_y * (wide_dy - (wide_y * wide_dy).sum())
    scale = wide_y * (wide_dy + (wide_y * wide_dy).sum())
    got = gp.softmax_backward(dy, y).astype(np.float64)
    ours = np.linalg.norm(got - exact) / np.linalg.norm(scale)
    assert ours <= 2.0**-9
    rounded = wide_y * (wide_dy - (wide_y * wide_dy).astype(BF16).astype(np.float64).sum())
    correctly_rounded = exact.astype(BF16).astype(np.float64)
    # The data is such that the fault shows: rounding first is worse than ours.
    assert np.linalg.norm(got - correctly_rounded) < np.linalg.norm(
        rounded.astype(BF16).astype(np.float64) - correctly_rounded
    )


def test_cummax_ties_go_to_one_winner_whatever_the_length():
    # JAX's tree of comparisons gives other winners for other lengths.
    for n in (1, 2, 3, 5, 8, 13, 100, 1000):
        x = np.ones(n, F32)
        dy = np.ones(n, F32)
        y = np.ones(n, F32)
        first = np.zeros(n)
        first[0] = n
        for saved in (None, y):
            assert gp.cummax_backward(dy, x, saved).tolist() == first.tolist()
            assert gp.cummax_backward(dy, x, saved, ties="last").tolist() == [1] * n
            assert gp.cummax_backward(dy, x, saved, reverse=True).tolist() == first[::-1].tolist()
            assert gp.cummin_backward(dy, x, saved).tolist() == first.tolist()
        assert gp.cummin_backward(dy, x, ties="last").tolist() == [1] * n


def test_cummax_lets_nothing_leak_from_other_segments():
    x = np.array([1, 0, 3, 2, NAN, 5, NAN], F32)
    dy = np.array([1, 2, 4, INF, NAN, 8, 16], F32)
    got = gp.cummax_backward(dy, x)
    np.testing.assert_array_equal(got, np.array([3, 0, INF, 0, NAN, 0, 0], F32))
    got = gp.cummax_backward(dy, x, ties="last")
    np.testing.assert_array_equal(got, np.array([3, 0, INF, 0, NAN, 0, 16], F32))


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_products_with_zeros_are_exact(zeros):
    x = np.array([2, 3, 4, 5], F32)
    x[:zeros] = 0
    others = [np.prod(np.delete(x, k)) for k in range(4)]
    for y in (None, np.prod(x)):
        assert gp.prod_backward(np.float32(1), x, y).tolist() == others
    dy = np.ones(4, F32)
    want = autograd(lambda x: x.cumprod(0), torch.from_numpy(x), torch.from_numpy(dy))[2]
    for y in (None, np.cumprod(x)):
        assert gp.cumprod_backward(dy, x, y).tolist() == want.tolist()


def test_a_nan_gradient_passes_zero_factors_and_no_row_end():
    dy = np.ones((3, 8), F32)
    dy[1, 3] = NAN
    zeros = np.zeros((3, 8), F32)
    whole_row = np.zeros((3, 8), bool)
    whole_row[1] = True
    before = np.zeros((3, 8), bool)
    before[1, :4] = True
    assert (np.isnan(gp.softmax_backward(dy, zeros)) == whole_row).all()
    assert (np.isnan(gp.log_softmax_backward(dy, np.full((3, 8), -INF, F32))) == whole_row).all()
    assert (np.isnan(gp.cumsum_backward(dy)) == before).all()
    assert (np.isnan(gp.cumprod_backward(dy, zeros)) == before).all()
    assert (np.isnan(gp.lerp_backward(dy, 0.0)[1]) == np.isnan(dy)).all()
    column = np.array([1, NAN, 1], F32)
    assert (np.isnan(gp.prod_backward(column, zeros, axis=1)) == whole_row).all()
    # "Else 0" is a choice: no NaN reaches those who did not win.
    x = np.tile(np.arange(8, dtype=F32), (3, 1))
    got = gp.max_backward(column, x, x[:, 7], axis=1)
    assert np.isnan(got).sum() == 1
    assert np.isnan(got[1, 7])


def test_a_maximum_that_is_nan_goes_to_the_nans():
    x = np.array([1, NAN, 3, NAN], F32)
    assert gp.max_backward(np.float32(4), x, np.float32(NAN)).tolist() == [0, 2, 0, 2]
    assert gp.max_backward(np.float32(4), x, np.float32(NAN), ties="first").tolist() == [0, 4, 0, 0]


def test_long_rows_have_no_limit():
    # Some libraries stop at 65536 elements a row, or take the last axis only.
    n = 70_001
    y = torch.softmax(random(n, 2, dtype=torch.float32), 0)
    dy = random(n, 2, dtype=torch.float32, seed=5)
    exact = y.double() * (dy.double() - (y.double() * dy.double()).sum(0))
    torch.testing.assert_close(
        gp.softmax_backward(dy, y, axis=0).double(), exact, rtol=1e-5, atol=1e-9
    )


def test_what_equals_an_earlier_question_is_not_yet_the_same():
    """1.0 == 1, so it would find the answer to axis=1, but it is no axis."""
    x = np.ones((3, 4), np.float32)
    dy = np.ones(3, np.float32)
    gp.cumsum_backward(x, axis=1)
    gp.sum_backward(dy, (3, 4), axis=1)
    gp.var_backward(dy, x, axis=1)
    gp.var_backward(dy, x, axis=(1,))
    attempts = [
        lambda: gp.cumsum_backward(x, axis=1.0),
        lambda: gp.sum_backward(dy, (3, 4), axis=1.0),
        lambda: gp.sum_backward(dy, (3.0, 4), axis=1),
        lambda: gp.var_backward(dy, x, axis=1.0),
        lambda: gp.var_backward(dy, x, axis=(1.0,)),
    ]
    for attempt in attempts:
        with pytest.raises(gp.InvalidProblem, match="must be an integer"):
            attempt()
    assert gp.cumsum_backward(x, axis=np.int64(1)).shape == (3, 4)
    assert gp.sum_backward(dy, [3, 4], axis=[1]).shape == (3, 4)


def test_names_and_members_are_one_key():
    assert {gp.TieRule.FIRST: 1}["first"] == 1


@pytest.mark.parametrize("function", [gp.var_backward, gp.prod_backward])
def test_a_missing_x_is_named(function):
    with pytest.raises(gp.InvalidProblem, match=f"^{function.__name__} needs x, and it is missing"):
        function(np.ones(3), None)


@pytest.mark.parametrize("function", [gp.max_backward, gp.min_backward, gp.cummin_backward])
def test_an_unknown_rule_of_ties_is_named(function):
    x = np.ones(3)
    with pytest.raises(gp.InvalidProblem, match=f"^{function.__name__}: ties: expected one of spl"):
        function(x, x, x, ties="some")


@pytest.mark.parametrize("shape", [np.array(4), 5, None, {3, 2}, "32", iter([3, 2.5])])
def test_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(gp.InvalidProblem, match=r"sum_backward: (an extent of )?shape must be"):
        gp.sum_backward(np.float32(2), shape)
    assert gp.sum_backward(np.float32(2), iter([3, 2])).shape == (3, 2)


def test_flags_that_are_neither_true_nor_false_are_refused():
    dy, both = np.ones(3, np.float32), np.array([1, 0])
    indices = np.zeros(3, np.int64)
    for name, call in (
        ("cumsum_backward: reverse", lambda: gp.cumsum_backward(dy, reverse=both)),
        ("sum_backward: keepdims", lambda: gp.sum_backward(dy, (3, 2), 1, keepdims=both)),
        (
            "embedding_backward: accumulate",
            lambda: gp.embedding_backward(dy[:, None], indices, 2, accumulate=both),
        ),
    ):
        with pytest.raises(gp.InvalidProblem, match=f"{name} must be True or False"):
            call()


def test_a_weight_in_a_graph_is_refused():
    weight = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(gp.InvalidProblem, match=r"weight requires grad.*gradplan\.torch"):
        gp.lerp_backward(torch.ones(3), weight)
    da, _ = gp.lerp_backward(torch.ones(3), weight.detach())
    assert torch.allclose(da, torch.full((3,), 0.7))
