"""The oracle itself: against torch's autograd, and against the contract's edges by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from gradplan.backends import reference
from gradplan.descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from gradplan.errors import Unsupported
from gradplan.kinds import ElementKind, ReduceKind, ScanKind

NAN, INF = np.nan, np.inf
WORK = [np.float64, np.longdouble]


def softmax(kind, shape, axis=-1, element="f64"):
    return SoftmaxBackwardDescriptor(
        kind=kind, input_shape=shape, softmax_axis=axis, element=element
    )


def scan(kind, shape, axis=-1, element="f64", **options):
    return ScanBackwardDescriptor(
        kind=kind, input_shape=shape, scan_axis=axis, element=element, **options
    )


def reduction(kind, shape, axis=-1, element="f64", **options):
    return ReduceBackwardDescriptor(
        kind=kind, input_shape=shape, reduce_axis=axis, element=element, **options
    )


def lerp(shape, param, element="f64"):
    return BinaryParamBackwardDescriptor(kind="lerp", shape=shape, param=param, element=element)


def embedding(rows, dim, count, element="f64", **options):
    return EmbeddingBackwardDescriptor(
        num_embeddings=rows, embedding_dim=dim, num_indices=count, element=element, **options
    )


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def run_scan(kind, dy, x=None, y=None, work=np.float64, magnitude=False, **options):
    """dx of one row, or of rows along the last axis."""
    arrays = {"dy": dy, "x": x, "y": y}
    arrays = {name: None if a is None else np.array(a, work) for name, a in arrays.items()}
    desc = scan(kind, arrays["dy"].shape, **options)
    return reference.gradient(desc, arrays, magnitude=magnitude)["dx"]


def run_reduce(
    kind, dy, x, y=None, axis=-1, work=np.float64, shape=None, magnitude=False, **options
):
    arrays = {"dy": dy, "x": x, "y": y}
    arrays = {name: None if a is None else np.array(a, work) for name, a in arrays.items()}
    desc = reduction(kind, shape or arrays["x"].shape, axis, **options)
    return reference.gradient(desc, arrays, magnitude=magnitude)["dx"]


def same(got, expected):
    """Equal to the last bit of the value, NaN to NaN."""
    np.testing.assert_array_equal(got, np.array(expected, got.dtype))


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


def autograd(forward, x, dy_seed=1):
    """(y, dy, dx) of torch in float64, dy random in the shape of y."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = forward(leaf)
    dy = torch.tensor(normal(*y.shape, seed=dy_seed))
    (dx,) = torch.autograd.grad(y, leaf, dy)
    return y.detach().numpy(), dy.numpy(), dx.numpy()


SHAPE = (3, 4, 5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_softmax_like_torch(kind, axis):
    y, dy, dx = autograd(lambda t: getattr(torch, kind)(t, axis), normal(*SHAPE))
    got = reference.gradient(softmax(kind, SHAPE, axis), {"dy": dy, "y": y})
    assert got.keys() == {"dx"}
    close(got["dx"], dx)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, -2.5])
def test_lerp_like_torch(weight):
    a = torch.tensor(normal(*SHAPE), requires_grad=True)
    b = torch.tensor(normal(*SHAPE, seed=2), requires_grad=True)
    dy = normal(*SHAPE, seed=1)
    da, db = torch.autograd.grad(torch.lerp(a, b, weight), (a, b), torch.tensor(dy))
    got = reference.gradient(lerp(SHAPE, weight), {"dy": dy})
    close(got["da"], da)
    close(got["db"], db)


SCANS = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": lambda t, axis: torch.cummax(t, axis).values,
    "cummin": lambda t, axis: torch.cummin(t, axis).values,
    "log_cumsum_exp": torch.logcumsumexp,
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", SCANS)
def test_scan_like_torch(kind, axis, saved, reverse):
    def forward(t):
        t = t.flip(axis) if reverse else t
        y = SCANS[kind](t, axis)
        return y.flip(axis) if reverse else y

    x = normal(*SHAPE)
    if kind == "cumprod":
        x[0, 1, 2] = x[2, 3, 4] = x[2, 3, 1] = 0
    y, dy, dx = autograd(forward, x)
    desc = scan(kind, SHAPE, axis, reverse=reverse)
    got = reference.gradient(desc, {"dy": dy, "x": x, "y": y if saved else None})
    close(got["dx"], dx)


@pytest.mark.parametrize("kind", ["cummax", "cummin"])
def test_last_tie_is_torch_tie(kind):
    x = np.random.default_rng(0).integers(0, 3, (4, 20)).astype(float)
    y, dy, dx = autograd(lambda t: SCANS[kind](t, 1), x)
    close(run_scan(kind, dy, x, y, ties="last"), dx)


REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "norm2": lambda t, axes, keepdim: torch.linalg.vector_norm(t, 2, axes, keepdim),
    "log_sum_exp": torch.logsumexp,
    "var": torch.var,
    "std": torch.std,
}


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (2, 1), (0, 1, 2)])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reduction_like_torch(kind, axes):
    x = normal(*SHAPE)
    if kind in ("max", "min"):
        x = np.round(x)
    y, dy, dx = autograd(lambda t: REDUCTIONS[kind](t, axes, keepdim=True), x)
    got = reference.gradient(reduction(kind, SHAPE, axes), {"dy": dy, "x": x, "y": y})
    close(got["dx"], dx)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_prod_like_torch(axis, zeros):
    x = normal(*SHAPE)
    x[0, 0, :zeros] = 0

    def forward(t):
        return t.prod().reshape(1, 1, 1) if axis is None else t.prod(axis, keepdim=True)

    _, dy, dx = autograd(forward, x)
    close(reference.gradient(reduction("prod", SHAPE, axis), {"dy": dy, "x": x})["dx"], dx)


@pytest.mark.parametrize("correction", [0, 1, 2.5])
@pytest.mark.parametrize("kind", ["var", "std"])
def test_correction_like_torch(kind, correction):
    x = normal(*SHAPE)
    y, dy, dx = autograd(
        lambda t: getattr(torch, kind)(t, (0, 2), correction=correction, keepdim=True), x
    )
    close(run_reduce(kind, dy, x, y, axis=(0, 2), correction=correction), dx)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("scale", [False, True])
def test_embedding_like_torch(padding, scale):
    weight = torch.zeros(7, 3, dtype=torch.float64, requires_grad=True)
    indices = np.array([2, 0, 5, 2, 5, 5, 6, 2])
    dout = normal(8, 3)
    out = torch.nn.functional.embedding(
        torch.tensor(indices), weight, padding_idx=padding, scale_grad_by_freq=scale
    )
    (expected,) = torch.autograd.grad(out, weight, torch.tensor(dout))
    options = {"padding_idx": padding, "scale_grad_by_freq": scale}
    arrays = {"dout": dout, "indices": indices}
    fresh = embedding(7, 3, 8, accumulate=False, **options)
    close(reference.gradient(fresh, arrays)["dweight"], expected)
    old = normal(7, 3, seed=3)
    added = embedding(7, 3, 8, accumulate=True, **options)
    close(reference.gradient(added, {**arrays, "dweight": old})["dweight"], old + expected.numpy())


def every_problem(shape=(3, 5)):
    """(desc, arrays) for every kind, with positive x so that every y exists."""
    dy, x = normal(*shape), np.abs(normal(*shape, seed=1)) + 0.5
    total = dy[:, :1]
    for kind in ("softmax", "log_softmax"):
        yield softmax(kind, shape), {"dy": dy, "y": x}
    yield lerp(shape, 0.3), {"dy": dy}
    for kind in ScanKind:
        yield scan(kind, shape), {"dy": dy, "x": x}
    for kind in ReduceKind:
        y = x.max(-1, keepdims=True) if kind == "max" else x.min(-1, keepdims=True)
        yield reduction(kind, shape), {"dy": total, "x": x, "y": y}
    yield (
        embedding(3, shape[1], shape[0]),
        {"dout": dy, "indices": np.array([1, 0, 1]), "dweight": x},
    )


def widened(arrays):
    return {k: v if k == "indices" else v.astype(np.longdouble) for k, v in arrays.items()}


@pytest.mark.parametrize("problem", list(every_problem()), ids=lambda p: str(p[0].op))
def test_longdouble_stays_longdouble(problem):
    desc, arrays = problem
    for magnitude in (False, True):
        narrow = reference.gradient(desc, arrays, magnitude=magnitude)
        wide = reference.gradient(desc, widened(arrays), magnitude=magnitude)
        for name in narrow:
            assert narrow[name].dtype == np.float64
            assert wide[name].dtype == np.longdouble
            close(wide[name], narrow[name])
    exact, size = (reference.gradient(desc, widened(arrays), magnitude=m) for m in (False, True))
    error = reference.check_error(desc, reference.gradient(desc, arrays), exact, size)
    assert error < 20 * desc.element.unit_roundoff
    # The intermediates were wide too: the wide result carries digits a double cannot hold.
    if np.finfo(np.longdouble).nmant > 52 and desc.op not in ("sum", "max", "min"):
        assert any(np.any(a != a.astype(np.float64)) for a in exact.values())


@pytest.mark.parametrize("problem", list(every_problem()), ids=lambda p: str(p[0].op))
def test_magnitude_bounds_the_gradient(problem):
    desc, arrays = problem
    signed = reference.gradient(desc, arrays)
    size = reference.gradient(desc, arrays, magnitude=True)
    for name in signed:
        assert np.all(np.abs(signed[name]) <= size[name] * (1 + 1e-12))


def test_narrow_or_mixed_inputs_are_refused():
    desc = reduction("sum", (2,))
    with pytest.raises(TypeError, match="float64"):
        reference.gradient(desc, {"dy": np.ones(1, np.float32)})
    with pytest.raises(TypeError, match="float64"):
        reference.gradient(
            softmax("softmax", (1,)), {"dy": np.ones(1), "y": np.ones(1, np.longdouble)}
        )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty(shape):
    none = np.zeros(shape)
    for kind in ("softmax", "log_softmax"):
        got = reference.gradient(softmax(kind, shape), {"dy": none, "y": none})
        assert got["dx"].shape == shape
    got = reference.gradient(lerp(shape, 0.5), {"dy": none})
    assert got["da"].shape == got["db"].shape == shape
    for kind in ScanKind:
        assert run_scan(kind, none, none).shape == shape
    for kind in ReduceKind:
        desc = reduction(kind, shape)
        small = np.zeros(desc.dy_shape)
        got = reference.gradient(desc, {"dy": small, "x": none, "y": small})
        assert got["dx"].shape == shape
        assert reference.check_error(desc, got, got, got) == 0


def test_embedding_without_indices():
    arrays = {"dout": np.zeros((0, 2)), "indices": np.zeros(0, np.int64)}
    same(
        reference.gradient(embedding(2, 2, 0, accumulate=False), arrays)["dweight"],
        [[0, 0], [0, 0]],
    )
    old = np.array([[1.0, NAN], [-0.0, INF]])
    kept = reference.gradient(embedding(2, 2, 0), {**arrays, "dweight": old})["dweight"]
    assert kept.tobytes() == old.tobytes()
    for rows, dim in ((0, 2), (2, 0)):
        got = reference.gradient(
            embedding(rows, dim, 3, accumulate=False),
            {"dout": np.zeros((3, dim)), "indices": np.arange(3)},
        )
        assert got["dweight"].shape == (rows, dim)


# The contract's edges, by hand.


@pytest.mark.parametrize("work", WORK)
def test_softmax_by_hand(work):
    dy, y = np.array([[4, 8], [NAN, 1]], work), np.array([[0.25, 0.75], [0, 1]], work)
    desc = softmax("softmax", (2, 2))
    same(reference.gradient(desc, {"dy": dy, "y": y})["dx"], [[-0.75, 0.75], [NAN, NAN]])
    same(
        reference.gradient(desc, {"dy": dy, "y": -y}, magnitude=True)["dx"],
        [[0.25 * (4 + 7), 0.75 * (8 + 7)], [NAN, NAN]],
    )
    log = softmax("log_softmax", (1, 2))
    arrays = {"dy": np.array([[3, -1]], work), "y": np.array([[0, -INF]], work)}
    same(reference.gradient(log, arrays)["dx"], [[1, -1]])
    same(reference.gradient(log, arrays, magnitude=True)["dx"], [[7, 1]])


def test_lerp_by_hand():
    got = reference.gradient(lerp((4,), 0.25), {"dy": np.array([4.0, -8.0, NAN, -INF])})
    same(got["da"], [3, -6, NAN, -INF])
    same(got["db"], [1, -2, NAN, -INF])
    size = reference.gradient(lerp((1,), 3.0), {"dy": np.array([-2.0])}, magnitude=True)
    same(size["da"], [4])
    same(size["db"], [6])


def test_cumsum_by_hand():
    same(run_scan("cumsum", [1, -2, 4]), [3, 2, 4])
    same(run_scan("cumsum", [1, -2, 4], reverse=True), [1, -1, 3])
    same(run_scan("cumsum", [1, -2, 4], magnitude=True), [7, 6, 4])
    same(run_scan("cumsum", [1, NAN, 4]), [NAN, NAN, 4])
    same(run_scan("cumsum", [[1, NAN], [1, 2]]), [[NAN, NAN], [3, 2]])


def test_cumprod_by_hand():
    # y = 2, −6, −24
    same(run_scan("cumprod", [1, 1, 1], [2, -3, 4]), [1 - 3 * (1 + 4), 2 * (1 + 4), -6])
    same(run_scan("cumprod", [1, -1, 1], [2, -3, 4], magnitude=True), [1 + 3 * (1 + 4), 10, 6])
    same(run_scan("cumprod", [1, 1, 1], [4, -3, 2], reverse=True), [-6, 10, -14])
    # One zero, then two.
    same(run_scan("cumprod", [1, 1, 1], [2, 0, 4]), [1, 10, 0])
    same(run_scan("cumprod", [1, 1, 1], [0, 0, 4]), [1, 0, 0])
    # A zero factor does not stop a NaN, neither before nor behind it.
    same(run_scan("cumprod", [1, 1, NAN], [2, 0, 4]), [NAN, NAN, NAN])
    same(run_scan("cumprod", [1, NAN, 1], [0, 0, 4]), [NAN, NAN, 0])
    # A saved y is used where the formula names it.
    same(run_scan("cumprod", [1, 1], [2, 3], [5, 7]), [4, 5])


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    ("x", "first", "last"),
    [
        ([1, 3, 2, 5], [1, 6, 0, 8], [1, 6, 0, 8]),
        ([1, 1, 2, 2], [3, 0, 12, 0], [1, 2, 4, 8]),
        ([3, 2, 1, 0], [15, 0, 0, 0], [15, 0, 0, 0]),
        ([3, 2, 3, 0], [15, 0, 0, 0], [3, 0, 12, 0]),
        ([-0.0, 0.0, -0.0, 0.0], [15, 0, 0, 0], [1, 2, 4, 8]),
        ([1, NAN, 9, NAN], [1, 14, 0, 0], [1, 6, 0, 8]),
        ([NAN, 1, 2, 3], [15, 0, 0, 0], [15, 0, 0, 0]),
        ([-INF, -INF, 0, INF], [3, 0, 4, 8], [1, 2, 4, 8]),
    ],
)
def test_cummax_by_hand(x, first, last, saved, work):
    dy, x = [1, 2, 4, 8], np.array(x, work)
    for ties, expected in (("first", first), ("last", last)):
        for kind, data in (("cummax", x), ("cummin", -x)):
            accumulate = np.maximum.accumulate if kind == "cummax" else np.minimum.accumulate
            y = accumulate(data) if saved else None
            same(run_scan(kind, dy, data, y, work, ties=ties), expected)
            mirrored = None if y is None else y[::-1]
            same(
                run_scan(kind, dy[::-1], data[::-1], mirrored, work, ties=ties, reverse=True),
                expected[::-1],
            )


def test_cummax_segments_are_choices():
    same(run_scan("cummax", [1, NAN, 4, INF], [1, 2, 3, 3]), [1, NAN, INF, 0])
    same(run_scan("cummax", [1, NAN, 4, -INF], [1, 0, 3, 3]), [NAN, 0, -INF, 0])
    same(run_scan("cummax", [1, -2, 4, -8], [-3, -3, 3, 1], magnitude=True), [3, 0, 12, 0])


@pytest.mark.parametrize("ties", ["split", "all"])
@pytest.mark.parametrize("kind", ["cummax", "cummin"])
def test_cummax_refuses_shared_ties(kind, ties):
    with pytest.raises(Unsupported, match=ties):
        run_scan(kind, [1, 2], [1, 2], ties=ties)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("saved", [False, True])
def test_log_cumsum_exp_by_hand(saved, work):
    def run(dy, x, **options):
        with np.errstate(invalid="ignore"):
            y = np.logaddexp.accumulate(np.array(x, work)) if saved else None
        return run_scan("log_cumsum_exp", dy, x, y, work, **options)

    # exp(y) = 1, 2, 3: dx[k] = Σ dy[j] / exp(y[j]).
    close(run([6, 6, 6], [0, 0, 0]), [11, 5, 2])
    close(run([6, -6, 6], [0, 0, 0], magnitude=True), [11, 5, 2])
    # Nothing added yet: 0 whatever dy holds; and the sums behind it are untouched.
    same(run([NAN, INF, 2], [-INF, -INF, 0]), [0, 0, 2])
    same(run([1, 2], [-INF, -INF]), [0, 0])
    # −inf in the middle leaves y equal: c = 1.
    same(run([1, 2, 4], [0, -INF, -INF]), [7, 0, 0])
    # y = 0, +inf, +inf: equal infinities hand S on, and exp(inf − inf) is no number.
    same(run([1, 2, 4], [0, INF, 5]), [1, NAN, 0])
    same(run([1, NAN, 4], [0, 0, -INF]), [NAN, NAN, 0])
    same(run([1, 1], [1000, 1000 - 2.0**20]), [2, 0])
    same(run([1, 1], [NAN, -INF]), [NAN, 0])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="no extended precision here")
def test_log_cumsum_exp_recomputed_far_from_zero():
    """The gradient does not change with a shift of x; nor may the digits that the oracle keeps."""
    dy, x = normal(20001, seed=1), normal(20001)
    x = np.round(x * 2**20) / 2**20  # so that the shift is exact
    near = run_scan("log_cumsum_exp", dy, x, None, np.longdouble)
    far = run_scan("log_cumsum_exp", dy, x + 1024, None, np.longdouble)
    size = run_scan("log_cumsum_exp", dy, x, None, np.longdouble, magnitude=True)
    assert np.max(np.abs(far - near) / size) < 3e-16


def test_reverse_lies_along_the_named_axis():
    dy = [[1, 2], [4, 8]]
    same(run_scan("cumsum", dy, axis=0), [[5, 10], [4, 8]])
    same(run_scan("cumsum", dy, axis=0, reverse=True), [[1, 2], [5, 10]])
    same(run_scan("cumsum", dy, axis=1, reverse=True), [[1, 3], [4, 12]])


def test_sum_and_mean_by_hand():
    shape = (2, 2, 2)
    dy = np.array([[[8.0], [NAN]]])
    for kind, value in (("sum", 8), ("mean", 2)):
        got = reference.gradient(reduction(kind, shape, (0, 2)), {"dy": dy})["dx"]
        same(got, [[[value, value], [NAN, NAN]]] * 2)
    size = reference.gradient(reduction("mean", shape, (0, 2)), {"dy": -dy}, magnitude=True)["dx"]
    same(size[0, 0], [2, 2])


def test_axis_empty_reduces_nothing():
    arrays = {"dy": np.array([[5.0, 7.0]]), "x": np.array([[2.0, 3.0]])}
    for kind in ("sum", "mean", "prod"):
        same(reference.gradient(reduction(kind, (1, 2), ()), arrays)["dx"], [[5, 7]])


@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        ("split", [[6, 0, 6]]),
        ("all", [[12, 0, 12]]),
        ("first", [[12, 0, 0]]),
        ("last", [[0, 0, 12]]),
    ],
)
@pytest.mark.parametrize("work", WORK)
def test_max_ties(ties, expected, work):
    same(run_reduce("max", [[12]], [[5, 1, 5]], [[5]], work=work, ties=ties), expected)
    same(run_reduce("min", [[12]], [[1, 5, 1]], [[1]], work=work, ties=ties), expected)
    same(run_reduce("max", [[12]], [[NAN, 1, NAN]], [[NAN]], work=work, ties=ties), expected)
    size = run_reduce("max", [[-12]], [[-5, -9, -5]], [[-5]], ties=ties, magnitude=True)
    same(size, expected)


@pytest.mark.parametrize("axes", [(0, 2), (2, 0)])
def test_max_ties_in_c_order_of_the_reduced_axes(axes):
    x = np.zeros((2, 1, 3))
    x[0, 0, 2] = x[1, 0, 0] = 1
    first, last = np.zeros_like(x), np.zeros_like(x)
    first[0, 0, 2] = last[1, 0, 0] = 7
    same(run_reduce("max", [[[7]]], x, [[[1]]], axis=axes, ties="first"), first)
    same(run_reduce("max", [[[7]]], x, [[[1]]], axis=axes, ties="last"), last)
    # Laid out the other way round in memory, the order is still that of the index.
    same(run_reduce("max", [[[7]]], np.asfortranarray(x), [[[1]]], axis=axes, ties="first"), first)


def test_max_loser_is_zero_whatever_dy_holds():
    same(run_reduce("max", [[NAN], [INF]], [[1, 2], [2, 1]], [[2], [2]]), [[0, NAN], [INF, 0]])


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    ("dy", "x", "expected"),
    [
        (2, [3, -4, 5], [-40, 30, -24]),
        (2, [3, 0, 5], [0, 30, 0]),
        (2, [0, 4, 0], [0, 0, 0]),
        (NAN, [0, 4, 0], [NAN, NAN, NAN]),
        (INF, [0, 4, 0], [NAN, NAN, NAN]),
        (1, [INF, 2, 3], [6, INF, INF]),
        (1, [INF, 0, 3], [0, INF, NAN]),
        (1, [NAN, 2, 3], [6, NAN, NAN]),
        (1, [NAN, 0, 3], [0, NAN, NAN]),
        (7, [0], [7]),
    ],
)
def test_prod_by_hand(dy, x, expected, work):
    same(run_reduce("prod", [dy], x, work=work), expected)
    same(run_reduce("prod", [dy], x, [99], work=work), expected)  # y is not asked
    same(run_reduce("prod", [dy], x, work=work, magnitude=True), np.abs(expected))


def test_norm2_by_hand():
    dy, x, y = [[10], [NAN]], [[3, -4], [0, 0]], [[5], [0]]
    same(run_reduce("norm2", dy, x, y), [[6, -8], [0, 0]])
    same(run_reduce("norm2", dy, x, y, magnitude=True), [[6, 8], [0, 0]])
    same(run_reduce("norm2", [INF], [0, 1], [1]), [NAN, INF])
    same(run_reduce("norm2", [1], [INF, 1], [INF]), [NAN, 0])


def test_log_sum_exp_by_hand():
    dy, x, y = [[-4], [NAN]], [[0, -INF], [-INF, -INF]], [[0], [-INF]]
    same(run_reduce("log_sum_exp", dy, x, y), [[-4, 0], [0, 0]])
    same(run_reduce("log_sum_exp", dy, x, y, magnitude=True), [[4, 0], [0, 0]])
    same(run_reduce("log_sum_exp", [NAN], [0, -INF], [0]), [NAN, NAN])
    same(run_reduce("log_sum_exp", [1], [0, INF], [INF]), [0, NAN])


@pytest.mark.parametrize("work", WORK)
def test_var_and_std_by_hand(work):
    x = [[1, 2, 3, 6]]
    same(run_reduce("var", [[3]], x, work=work), [[-4, -2, 0, 6]])
    same(run_reduce("var", [[3]], x, work=work, correction=0), [[-3, -1.5, 0, 4.5]])
    for correction in (3, 4, 5.5):  # m = 1, 0 and −1.5
        same(run_reduce("var", [[3]], x, work=work, correction=correction), [[-12, -6, 0, 18]])
    same(run_reduce("var", [[-3]], [[-1, 2, 3, -6]], magnitude=True), [[8, 10, 12, 18]])
    same(run_reduce("std", [[3]], x, [[2]], work=work), [[-1, -0.5, 0, 1.5]])
    same(run_reduce("std", [[3]], x, [[2]], work=work, correction=4), [[-3, -1.5, 0, 4.5]])
    same(run_reduce("std", [[-3]], [[-1, 2, 3, -6]], [[2]], magnitude=True), [[2, 2.5, 3, 4.5]])
    same(run_reduce("std", [[NAN], [2]], [[1, 1], [0, 4]], [[0], [2]]), [[0, 0], [-2, 2]])
    same(run_reduce("var", [[NAN], [2]], [[1, 1], [0, 4]]), [[NAN, NAN], [-8, 8]])
    same(run_reduce("var", [[3]], [[5]]), [[0]])


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_embedding_by_hand(index):
    indices = np.array([1, 3, -1, 1, 4, 0, 3, 1], index)
    dout = np.array([[1.0], [2.0], [NAN], [4.0], [NAN], [NAN], [INF], [-8.0]])
    old = np.array([[7.0], [10.0], [-0.0], [1.0]])
    arrays = {"dout": dout, "indices": indices, "dweight": old}

    def run(magnitude=False, **options):
        options = {"padding_idx": 0, "index": "i32" if index is np.int32 else "i64", **options}
        return reference.gradient(embedding(4, 1, 8, **options), arrays, magnitude=magnitude)

    added = run()["dweight"]
    same(added, [[7], [7], [0], [INF]])
    assert np.signbit(added[2, 0])
    same(run(accumulate=False)["dweight"], [[0], [-3], [0], [INF]])
    same(run(scale_grad_by_freq=True)["dweight"], [[7], [9], [0], [INF]])
    same(run(accumulate=False, scale_grad_by_freq=True)["dweight"], [[0], [-1], [0], [INF]])
    same(run(magnitude=True)["dweight"], [[7], [23], [0], [INF]])
    same(
        run(magnitude=True, accumulate=False, scale_grad_by_freq=True)["dweight"],
        [[0], [13 / 3], [0], [INF]],
    )
    same(run(padding_idx=None)["dweight"], [[NAN], [7], [0], [INF]])


# The measure of the error.


def row_error(got, exact, magnitude=None, element="f32", dtype=None):
    """check_error on the rows of a cumsum, worked in float64 for every element."""
    exact = np.atleast_2d(np.array(exact, np.float64))
    got = np.atleast_2d(np.array(got, dtype or exact.dtype))
    size = np.abs(exact) if magnitude is None else np.atleast_2d(magnitude).astype(exact.dtype)
    desc = scan("cumsum", exact.shape, element=element)
    return reference.check_error(desc, {"dx": got}, {"dx": exact}, {"dx": size})


def test_error_of_the_right_answer_is_small():
    exact = normal(50, 7)
    stored = {
        "f32": np.float32,
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "f64": np.float64,
    }
    for element, dtype in stored.items():
        error = row_error(exact.astype(dtype), exact, element=element, dtype=dtype)
        unit = ElementKind.coerce(element).unit_roundoff
        assert (0 if element == "f64" else 0.05 * unit) <= error <= unit


def test_error_is_the_worst_slice():
    assert row_error([3, 4], [3, 4]) == 0
    assert row_error([3, 4.5], [3, 4]) == pytest.approx(0.1)
    assert row_error([3, 4.5], [3, 4], [30, 40]) == pytest.approx(0.01)
    # A small slice next to a large one is not excused by it.
    assert row_error([[3e6, 4e6], [3, 4.5]], [[3e6, 4e6], [3, 4]]) == pytest.approx(0.1)
    desc = scan("cumsum", (2, 2), axis=0, element="f32")
    exact = {"dx": np.array([[3e6, 3.0], [4e6, 4.0]])}
    got = {"dx": np.array([[3e6, 3.0], [4e6, 4.5]])}
    assert reference.check_error(desc, got, exact, exact) == pytest.approx(0.1)
    desc = reduction("sum", (2, 2), (), element="f32")
    assert reference.check_error(desc, got, exact, exact) == pytest.approx(0.125)


def test_error_of_lerp_and_embedding_slices():
    exact = {"da": np.array([[3.0, 0.0], [0.0, 4.0]]), "db": np.ones((2, 2))}
    got = {"da": np.array([[3.0, 0.0], [0.5, 4.0]])}  # db was skipped
    assert reference.check_error(lerp((2, 2), 0.5), got, exact, exact) == pytest.approx(0.1)
    exact = {"dweight": np.array([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])}
    got = {"dweight": np.array([[3.0, 4.5], [30.0, 40.0], [0.0, 0.0]])}
    desc = embedding(3, 2, 5)
    assert reference.check_error(desc, got, exact, exact) == pytest.approx(0.1)


def test_error_counts_non_finite_positions():
    assert row_error([NAN, INF, -INF, 3], [NAN, INF, -INF, 3]) == 0
    assert row_error([-NAN, INF, 4.0], [NAN, INF, 5.0]) == pytest.approx(0.2)
    assert row_error([INF], [NAN]) == INF
    assert row_error([NAN], [INF]) == INF
    assert row_error([-INF], [INF]) == INF
    assert row_error([3e38], [INF]) == INF
    assert row_error([0], [NAN]) == INF
    assert row_error([NAN, 1], [0, 1]) == INF
    assert row_error([INF, 1], [3, 1]) == INF
    # What is left out does not weigh: A of the other positions is all there is.
    assert row_error([INF, 4], [INF, 5], [INF, 5]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("element", "dtype", "largest", "over"),
    [
        ("f16", np.float16, 65504.0, 65520.0),
        ("bf16", ml_dtypes.bfloat16, 255 * 2.0**120, 255.5 * 2.0**120),
        ("f32", np.float32, float(np.finfo(np.float32).max), 2.0**128 - 2.0**103),
    ],
)
def test_error_at_the_end_of_the_range(element, dtype, largest, over):
    below = over - (over - largest) / 4
    assert row_error([INF], [over], element=element, dtype=dtype) == 0
    assert row_error([-INF], [-over], element=element, dtype=dtype) == 0
    assert row_error([largest], [over], element=element, dtype=dtype) == INF
    assert row_error([INF], [below], element=element, dtype=dtype) == INF
    assert row_error([largest], [below], element=element, dtype=dtype) < 0.01
    # A result not yet rounded is judged as what it becomes.
    assert row_error([over * 2], [over], element=element) == 0


def test_error_near_zero():
    tiny = 2.0**-24
    assert row_error([tiny, -tiny], [0, 0], element="f16", dtype=np.float16) == 0
    assert row_error([2 * tiny, 0], [0, 0], element="f16", dtype=np.float16) == INF
    excess = 2 - 2**0.5  # √n subnormals are free
    assert row_error([2 * tiny, 0], [0, 0], [tiny, 0], element="f16") == pytest.approx(excess)
    assert row_error([0, 0], [0, 0], element="f16", dtype=np.float16) == 0
    # So small that squares vanish in the work dtype.
    assert row_error([2e-200], [1e-200], element="f64") == pytest.approx(1)
    assert row_error([1e-200], [0], element="f64") == INF


def test_error_is_not_hidden_by_overflow():
    assert row_error([2e300], [1e300], element="f64") == pytest.approx(1)
    assert row_error([2e30], [1e30], [1e160]) == pytest.approx(1e-130)
    assert row_error([6, 8], [3, 4], [INF, 4]) == pytest.approx(1)
    assert row_error([6, 8], [3, 4], [NAN, NAN]) == pytest.approx(1)


def test_error_notices_a_wrong_formula():
    """What the measure is for: a kernel that forgets one term in one row is far outside."""
    shape = (64, 300)
    y = np.exp(normal(*shape))
    y /= y.sum(-1, keepdims=True)
    desc, arrays = softmax("softmax", shape, element="f32"), {"dy": normal(*shape, seed=1), "y": y}
    exact = reference.gradient(desc, arrays)
    size = reference.gradient(desc, arrays, magnitude=True)
    got = {"dx": exact["dx"].astype(np.float32)}
    assert reference.check_error(desc, got, exact, size) < desc.element.unit_roundoff
    got["dx"][5] += y[5] * y[5, 7] * arrays["dy"][5, 7]
    assert reference.check_error(desc, got, exact, size) > 100 * desc.element.unit_roundoff


def test_error_refuses_what_it_cannot_compare():
    desc = scan("cumsum", (2,))
    exact = {"dx": np.ones(2)}
    with pytest.raises(ValueError, match="no output"):
        reference.check_error(desc, {}, exact, exact)
    with pytest.raises(ValueError, match="shape"):
        reference.check_error(desc, {"dx": np.ones(3)}, exact, exact)
    with pytest.raises(KeyError):
        reference.check_error(desc, {"da": np.ones(2)}, exact, exact)
