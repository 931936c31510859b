"""Edges where range or order once gave a wrong answer: each stays as a small case of its own."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import gradplan as gp
from gradplan.backends import reference
from gradplan.backends.cpu import pool

REFERENCE = gp.PlanPreference(backend="reference")
F32, BF16 = np.float32, ml_dtypes.bfloat16


def close(got, expected, relative):
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    assert np.all(np.abs(got - expected) <= relative * np.max(np.abs(expected)))


def test_a_split_log_cumsum_exp_keeps_an_infinite_gradient():
    # The gains of a chunk multiply to less than any number; 0 · inf would be NaN.
    x = np.arange(40000, dtype=F32)[None]
    dy = np.zeros_like(x)
    dy[0, -1] = np.inf
    assert np.all(np.isposinf(gp.logcumsumexp_backward(dy, x)))


def test_a_split_cumprod_keeps_zeros_where_a_chunk_alone_would_overflow():
    x = np.full((1, 40000), 1.1, F32)
    x[0, 0] = 0
    dy = np.zeros_like(x)
    dy[0, 0] = 1
    dx = gp.cumprod_backward(dy, x)
    assert dx[0, 0] == 1
    assert not dx[0, 1:].any()


@pytest.mark.parametrize(
    ("element", "saved"), [(F32, False), (np.float64, False), (np.float64, True)]
)
@pytest.mark.parametrize("beside", [1, 3])
def test_products_of_chunks_may_leave_the_range_that_those_of_the_row_keep(element, saved, beside):
    """A chunk of 8192 steps goes down 339 decades, where y stays within 170 of 1."""
    log = np.zeros(36_000)
    log[:4096], log[8192 : 2 * 8192], log[2 * 8192 : 20_480] = 0.0953, -0.0953, 0.0953
    x = np.repeat(np.exp(log).astype(element)[:, None], beside, 1)
    exact = x.astype(np.longdouble)
    y = np.cumprod(exact, 0)
    for places in (slice(None), slice(-1, None)):
        dy = np.zeros_like(x)
        dy[places] = 1
        expected = np.empty_like(exact)
        arrived = np.zeros(beside, np.longdouble)
        for k in reversed(range(len(x))):
            arrived = dy[k] + (exact[k + 1] * arrived if k + 1 < len(x) else 0)
            expected[k] = arrived * (y[k - 1] if k else 1)
        dx = gp.cumprod_backward(dy, x, y.astype(element) if saved else None, axis=0)
        fits = np.abs(expected) < np.finfo(element).max
        np.testing.assert_allclose(
            dx[fits], expected[fits].astype(element), rtol=1e-6 if element is F32 else 1e-12
        )


def test_an_infinity_before_a_zero_in_a_long_row_of_a_product():
    x = np.ones((1, 40_000))
    x[0, 30_000], x[0, 30_005] = np.inf, 0
    dx = gp.cumprod_backward(np.ones_like(x), x)
    np.testing.assert_array_equal(dx, gp.cumprod_backward(np.ones_like(x), x, preference=REFERENCE))
    assert dx[0, 0] == np.inf


@pytest.mark.parametrize("saved", [False, True])
def test_what_a_large_difference_loses_in_f64(saved):
    """Where all larger gradients are NaN, the small one is what its row is held to."""
    x = np.array([551.4892302111513, -24.00995183691867])
    dy = np.array([np.nan, -1.244924361134788])
    y = np.logaddexp.accumulate(x) if saved else None
    dx = gp.logcumsumexp_backward(dy, x, y)
    assert np.isnan(dx[0])
    np.testing.assert_allclose(dx[1], -1.44219459017866376e-250, rtol=1e-15)


def test_a_sum_beyond_f32_does_not_spoil_log_softmax():
    dy = np.full((1, 400), 1e36, F32)
    y = np.full((1, 400), -np.log(400.0), F32)
    y[0, 0] = -100
    close(
        gp.log_softmax_backward(dy, y), gp.log_softmax_backward(dy, y, preference=REFERENCE), 1e-6
    )
    dy, y = np.array([3e38, 3e38, 1], BF16), np.array([-1, -1, -90], BF16)
    close(
        gp.log_softmax_backward(dy, y), gp.log_softmax_backward(dy, y, preference=REFERENCE), 1e-2
    )


@pytest.mark.parametrize("element", [F32, BF16])
def test_gradients_of_opposite_sign_do_not_overflow_in_softmax(element):
    dy, y = np.array([3e38, -3e38], element), np.array([0.1, 0.9], element)
    close(gp.softmax_backward(dy, y), gp.softmax_backward(dy, y, preference=REFERENCE), 1e-2)


@pytest.mark.parametrize(
    ("dy", "x"),
    [
        (np.array(1e-3, BF16), np.array([3e38, 2e38, 1e38], BF16)),
        (np.array(3e38, BF16), np.array([1e-5, 2e-5, 4e-5], BF16)),
        (np.array(1.5e308), np.array([1e-5, 1.2e-5, 1.3e-5])),
    ],
    ids=["a sum beyond f32", "bf16", "f64"],
)
def test_var_has_the_range_of_its_definition(dy, x):
    close(gp.var_backward(dy, x), gp.var_backward(dy, x, preference=REFERENCE), 1e-2)


def test_lerp_applies_a_weight_that_f32_cannot_hold():
    _, db = gp.lerp_backward(np.array([0, 1e-20], BF16), 1e39)
    close(db, np.array([0, 1e19]), 1e-2)
    da, db = gp.lerp_backward(np.zeros(1, np.float16), 1e300)
    assert da[0] == 0
    assert db[0] == 0


def test_short_inner_runs_are_summed_in_whole_blocks():
    # Axes that do not merge: blocks of 512 must not end with each run of 2.
    shape = (20000, 3, 2)
    x, dy, dx = np.full(shape, 0.1), np.ones((1, 3, 1)), np.empty(shape)
    desc = gp.ReduceBackwardDescriptor(
        kind="var", input_shape=shape, reduce_axis=(0, 2), element="f64"
    )
    plan = gp.ReduceBackwardPlan.select(desc)
    plan.run(gp.ReduceBackwardArgs(dy=dy, x=x, dx=dx))
    wide = {"dy": dy.astype(np.longdouble), "x": x.astype(np.longdouble)}
    exact = reference.gradient(desc, wide)
    magnitude = reference.gradient(desc, wide, magnitude=True)
    error = reference.check_error(desc, {"dx": dx}, exact, magnitude)
    assert error <= plan.precision_guarantee.relative_error


def test_indices_of_rank_twenty():
    steps = [8 * 3 ** (k % 5) for k in range(20)]
    indices = np.lib.stride_tricks.as_strided(np.zeros(9000, np.int64), (2,) * 20, steps)
    table = gp.embedding_backward(np.ones((2,) * 20 + (1,), F32), indices, 3)
    assert table.tolist() == [[2.0**20], [0.0], [0.0]]


def test_a_system_that_grants_no_thread_still_gets_its_result(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "_pool", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    y = np.full((4096, 256), 1 / 256, F32)
    dy = np.random.default_rng(0).normal(size=y.shape).astype(F32)
    alone = gp.softmax_backward(dy, y)
    monkeypatch.undo()
    assert np.array_equal(alone, gp.softmax_backward(dy, y))


F64_MAX, BF16_MAX = np.finfo(np.float64).max, float(ml_dtypes.finfo(BF16).max)
HALVES_AND_F32 = pytest.mark.parametrize("element", [F32, np.float16, BF16])


def same(got, expected):
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(expected, np.float64))


@HALVES_AND_F32
def test_an_infinite_gradient_meets_exponentials_that_f32_cannot_hold(element):
    # exp(−100) is nothing in f32, but inf · exp(−100) is inf; f64 itself has none of exp(−800).
    x = np.array([0, -100, -90, -800], element)
    gradients = np.array([np.inf, 1, 1, 1], element)
    same(gp.log_softmax_backward(gradients, x), [np.nan, -np.inf, -np.inf, np.nan])
    infinite, zero = np.array(np.inf, element), np.array(0, element)
    same(gp.logsumexp_backward(infinite, x, zero), [np.inf, np.inf, np.inf, np.nan])
    # Side by side with a row that is as usual, too.
    dy, xs = np.array([[1, np.inf]], element), np.stack([x, x], axis=1)
    dx = gp.logsumexp_backward(dy, xs, np.zeros_like(dy), axis=0, keepdims=True)
    same(dx[:, 1], [np.inf, np.inf, np.inf, np.nan])
    close(dx[:, 0], np.array([1, 0, 0, 0]), 1e-3)


@HALVES_AND_F32
@pytest.mark.parametrize("axis", [0, 1])
def test_log_cumsum_exp_of_y_has_the_range_of_f64(element, axis):
    def rows(*values):
        stacked = np.array([values] * 3, element)
        return stacked if axis else np.ascontiguousarray(stacked.T)

    x, y = rows(-100, 0, -95, -800), rows(-100, 0, 0, 0)
    dx = gp.logcumsumexp_backward(rows(1, 1, np.inf, 0), x, y, axis=axis)
    same(dx, rows(np.inf, np.inf, np.inf, 0))
    dx = gp.logcumsumexp_backward(rows(1, 1, 1, np.inf), x, y, axis=axis)
    same(dx, rows(np.inf, np.inf, np.inf, np.nan))
    dx = gp.logcumsumexp_backward(rows(np.nan, 1), rows(0, -90), rows(0, 0), axis=axis)
    same(dx, rows(np.nan, np.exp(-90.0)))
    dx = gp.logcumsumexp_backward(rows(1, 1), rows(0, np.nan), rows(0, np.nan), axis=axis)
    assert np.isnan(dx).all()


@pytest.mark.parametrize(
    ("dy", "x", "y"),
    [
        (1.0, np.tile([1.0, -1.0], 2048) * 1e305, 1.0001221224184255e305),
        (1e10, np.array([1.0, 2.0, 4.0]) * 1e-300, 1.5275252316519467e-300),
        (1.0, np.array([F64_MAX, -F64_MAX, -F64_MAX]), F64_MAX),
    ],
)
def test_std_has_the_range_of_its_definition_in_f64(dy, x, y):
    wide = x.astype(np.longdouble)
    exact = dy * (wide - wide.mean()) / (np.longdouble(y) * (x.size - 1))
    got = gp.std_backward(np.array(dy), x, np.array(y))
    close(got, exact.astype(np.float64), 1e-13)
    # Side by side with another row.
    both = np.stack([x, np.linspace(0.0, 1.0, x.size)], axis=1)
    beside = gp.std_backward(np.array([dy, 1.0]), both, np.array([y, 0.5]), axis=0)
    close(beside[:, 0], exact.astype(np.float64), 1e-13)
    close(beside[:, 1], 2 * (both[:, 1] - 0.5) / (x.size - 1), 1e-13)


@pytest.mark.parametrize("n", [8, 64, 40000])
def test_differences_beyond_f32_do_not_spoil_var_and_std_of_bf16(n):
    x = np.full(n, -BF16_MAX, BF16)
    x[0] = BF16_MAX
    wide = x.astype(np.float64)
    y = np.array(wide.std(ddof=1), BF16)
    deviation = wide - wide.mean()
    dx = gp.var_backward(np.array(1e-10, BF16), x)
    close(dx, float(BF16(1e-10)) * 2 * deviation / (n - 1), 4e-3)
    dx = gp.std_backward(np.array(1, BF16), x, y)
    close(dx, deviation / ((n - 1) * float(y)), 4e-3)


def test_small_differences_keep_their_bits_until_they_meet_a_large_gradient():
    n = 1 << 20
    x = np.zeros(n, BF16)
    x[::2] = 2e-38
    wide, dy = x.astype(np.float64), np.array(1e38, BF16)
    expected = float(dy) * 2 * (wide - wide.mean()) / (n - 1)
    close(gp.var_backward(dy, x), expected, 4e-3)
    x, m = wide * 1e-272, n - 1
    expected = (1e10 * 2 / m) * (x - x.mean())
    close(gp.var_backward(np.array(1e10), x), expected, 1e-13)


@pytest.mark.parametrize("dy", [1e-320, 1e-3, 1.0])
def test_var_of_f64_leaves_the_range_only_where_its_result_does(dy):
    x = np.array([F64_MAX, -F64_MAX, -F64_MAX, 0])
    wide = x.astype(np.longdouble)
    exact = np.longdouble(dy) * 2 * (wide - wide.mean()) / 3
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float64)
    got = gp.var_backward(np.array(dy), x)
    finite = np.isfinite(expected)
    same(got[~finite], expected[~finite])
    if finite.any():
        close(got[finite], expected[finite], 1e-13)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("largest", "y"),
    [
        (np.finfo(F32).max, np.array([0.5000001, 0.5000001, 1e-7], F32)),
        (BF16_MAX, np.full(8, 0.126, BF16)),
        (BF16_MAX, np.full(1500, 0.000671, BF16)),
    ],
    ids=["f32", "bf16", "bf16 in blocks"],
)
def test_softmax_of_the_largest_gradients_is_finite(largest, y, axis):
    y = np.stack([y, y], axis=1 - axis)
    dy = np.full_like(y, largest)
    wide = y.astype(np.float64)
    expected = wide * (float(largest) * (1 - wide.sum(axis, keepdims=True)))
    assert np.isfinite(expected.astype(y.dtype)).all()
    close(gp.softmax_backward(dy, y, axis=axis), expected, 4e-3)


def test_softmax_of_subnormal_gradients_rounds_once():
    rng = np.random.default_rng(0)
    y = rng.dirichlet(np.ones(3), size=2000).astype(F32)
    y[::2] = [0.999, 0.0005, 0.0005]
    dy = (rng.integers(-9, 9, y.shape) * 2.0**-149).astype(F32)
    wide = y.astype(np.float64)
    exact = wide * (dy - (wide * dy).sum(1, keepdims=True))
    error = gp.softmax_backward(dy, y).astype(np.float64) - exact
    assert np.max(np.abs(error)) <= 0.5001 * 2.0**-149


def test_no_variance_is_0_beyond_the_range_of_sums():
    x = np.full(4, 1.5e308)
    assert not gp.std_backward(np.float64(1), x, np.float64(0)).any()
