"""Reductions whose forward pass learns something for the backward pass: in Triton's interpreter, or
on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

import gradplan.torch as gt  # noqa: E402
from conftest import CUDA  # noqa: E402
from gradplan.backends.gpu.table import table_of  # noqa: E402
from gradplan.torch import learned  # noqa: E402
from torch_calls import sample  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    # torch's compiler makes one to trace it.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

DEVICE = "cuda" if CUDA else "cpu"
INF, NAN = float("inf"), float("nan")
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
types = pytest.mark.parametrize("dtype", TYPES, ids=["f32", "bf16", "f16", "f64"])
extrema = pytest.mark.parametrize("name", ["amax", "amin"])


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Small tensors go this way too; a list of what was launched."""
    found = []
    launch = learned._launch

    def noted(make, *args):
        found.append(make.__name__)
        launch(make, *args)

    monkeypatch.setattr(learned, "_launch", noted)
    monkeypatch.setattr(learned, "_MANY", 1)
    if CUDA:
        # Rows enough are few here.
        table = learned._machine(0)[0]
        monkeypatch.setattr(learned, "_machine", lambda device: (table_of("interpreter"), device))
        assert table.fill > table_of("interpreter").fill
    else:
        monkeypatch.setattr(learned, "_on_gpu", lambda x: True)
        monkeypatch.setattr(learned, "_machine", lambda device: (table_of("interpreter"), None))
    monkeypatch.setattr(learned, "_recipes", {})
    return found


def placed(x):
    return x.detach().to(DEVICE).requires_grad_()


def gradients(call, x, dy=None):
    y = call(x)
    dy = torch.randn(y.shape, dtype=torch.float64).to(y) if dy is None else dy
    return y, dy, torch.autograd.grad(y, x, dy)[0]


def expected(name, x, dy, dim=-1):
    """The contract's, in float64: shared among equals, NaN equals NaN."""
    x, dy = x.detach().double(), dy.double().unsqueeze(-1)
    y = getattr(torch, name)(x, dim, keepdim=True)
    wins = (x == y) | (x.isnan() & y.isnan())
    return torch.where(wins, dy / wins.sum(dim, keepdim=True), 0.0)


ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float64: 2.0**-53,
}


@types
@extrema
# One part and several, a row to a program and many, whole tiles and others.
@pytest.mark.parametrize("shape", [(5, 16), (4, 128), (64, 32), (7, 144), (3, 4, 272)])
def test_extrema(name, dtype, shape, launched):
    x = placed(sample(*shape).to(dtype))
    y, dy, got = gradients(lambda x: getattr(gt, name)(x, -1), x)
    assert launched == ["extrema", "gradient"]
    assert torch.equal(y, getattr(torch, name)(x, -1))
    wanted = expected(name, x, dy)
    assert got.dtype == dtype
    assert ((got.double() - wanted).abs() <= ROUNDING[dtype] * wanted.abs()).all()


@types
@extrema
def test_ties_nans_and_infinities(name, dtype, launched):
    sign = 1 if name == "amax" else -1
    x = sample(12, 160, requires_grad=False).clamp(-2.5, 2.5)  # two winners and more
    x[1] = 3.0  # all of them
    x[2] = -INF  # what a search begins with
    x[3, 5:] = -INF
    x[4, 150] = NAN
    x[5, [0, 70, 159]] = NAN
    x[6] = NAN
    x[7, 100] = INF
    x[8, [3, 4]] = INF
    x[9] = -x[9].abs()
    x[9, [0, 90]] = torch.tensor([0.0, -0.0]).double()  # which are equal
    x[10, [31, 32, 127, 128]] = 4.0
    x = placed((sign * x).to(dtype))
    y, dy, got = gradients(lambda x: getattr(gt, name)(x, 1), x)
    assert launched == ["extrema", "gradient"]
    theirs = getattr(torch, name)(x, 1)
    torch.testing.assert_close(y, theirs, rtol=0, atol=0, equal_nan=True)
    wanted = expected(name, x, dy)
    assert ((got.double() - wanted).abs() <= ROUNDING[dtype] * wanted.abs()).all()


@extrema
def test_a_gradient_that_is_nan_stays_in_its_row_and_place(name):
    x = placed(sample(6, 32).float())
    with torch.no_grad():
        x[4] = 1.0
    dy = torch.ones(6, device=DEVICE)
    dy[[1, 4]] = NAN
    _, _, got = gradients(lambda x: getattr(gt, name)(x, 1), x, dy)
    wins = x == getattr(torch, name)(x, 1, keepdim=True)
    assert torch.equal(got.isnan(), wins & dy.isnan()[:, None])
    assert not got[~wins].any()


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("correction", [1, 0, 2.5, 500])
@pytest.mark.parametrize("shape", [(5, 16), (4, 128), (64, 32), (7, 144), (3, 4, 272)])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")
def test_moments(name, correction, shape, launched):
    x = placed((sample(*shape) + 3).float())

    def call(library, x):
        return getattr(library, name)(x, -1, correction=correction)

    y, dy, got = gradients(lambda x: call(gt, x), x)
    assert launched == ["gradient"]
    assert torch.equal(y, call(torch, x))
    wide = x.detach().double()
    m = shape[-1] - correction if correction < shape[-1] else 1
    beyond, slope = wide - wide.mean(-1, keepdim=True), dy.double().unsqueeze(-1) / m
    if name == "var":
        wanted = 2 * beyond * slope
    else:
        wanted = beyond * slope / y.detach().double().unsqueeze(-1)
    finite = wanted.isfinite()
    assert torch.equal(got.isfinite(), finite)
    # One rounding of each step, and the mean's.
    error = 2.0**-22 * (wanted.abs() + (slope * wide.mean(-1, keepdim=True)).abs())
    assert ((got - wanted).abs() <= error)[finite].all()


def test_a_constant_row_has_no_deviation():
    x = placed(torch.full((4, 64), 7.0))
    _, _, got = gradients(lambda x: gt.std(x, 1), x)
    assert not got.any()


@pytest.mark.parametrize("name", ["var", "std"])
def test_means_that_f32_does_not_reach(name):
    x = sample(5, 48, requires_grad=False).float()
    x[1, 3] = INF
    x[2, 4] = NAN
    x[3, ::2], x[3, 1::2] = 3e38, -3e38
    x = placed(x)
    _, dy, got = gradients(lambda x: getattr(gt, name)(x, 1), x, torch.ones(5, device=DEVICE))
    monkey = x.detach().requires_grad_()
    y = getattr(gt, name)(monkey.T.contiguous().T, 1)  # the usual way
    (usual,) = torch.autograd.grad(y, monkey, dy)
    torch.testing.assert_close(got, usual, equal_nan=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda t, x: t.amax(x, 1),
        lambda t, x: t.amin(x, (1,), keepdim=True),
        lambda t, x: t.amax(x.reshape(6, 4, 8), (2, 1)),
        lambda t, x: t.var(x, [1], keepdim=True),
        lambda t, x: t.std(x.reshape(2, 3, 32), -1),
        lambda t, x: t.var(x.reshape(6, 4, 8), (1, 2), correction=0),
    ],
)
@pytest.mark.parametrize("scale", ["sum", "weighted", "strided", "askew"])
def test_gradients_as_they_come(call, scale, launched):
    def loss(library, x):
        y = call(library, x)
        if scale == "sum":
            return y.sum()  # dy is one number
        if scale == "weighted":
            return (y * torch.arange(1.0, 7.0, device=DEVICE).reshape(y.shape)).sum()
        if scale == "askew":  # an address that 16 does not divide
            return torch.cat([y.new_ones(1), y.flatten()])[1:].square().sum()
        return torch.stack([y, y], -1)[..., 1].exp().sum()

    x = placed(sample(6, 32).float())
    (got,) = torch.autograd.grad(loss(gt, x), x)
    assert launched[-1] == "gradient"
    (wanted,) = torch.autograd.grad(loss(torch, x), x)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_second_order(name, launched):
    x = placed(sample(4, 16))
    call = getattr(gt, name)
    assert torch.autograd.gradcheck(lambda x: call(x, 1), x)
    assert torch.autograd.gradgradcheck(lambda x: call(x, 1), x)
    assert torch.autograd.gradcheck(lambda x: call(x, 1), x, check_batched_grad=True)
    assert "gradient" in launched


@pytest.mark.parametrize("name", ["var", "std"])
def test_second_order_of_moments(name, launched):
    x = placed(sample(4, 16).float())
    for library in (gt, torch):
        y = getattr(library, name)(x, 1)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        if library is gt:
            ours = first.detach(), second
    torch.testing.assert_close(ours, (first.detach(), second))


def test_a_change_in_place_is_noticed():
    for name in ("amax", "std"):
        x = placed(sample(4, 16).float())
        y = getattr(gt, name)(x * 1, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.add_(1).sum(), x)
    x = placed(sample(4, 16).float())
    gt.var(x, 1).add_(1).sum().backward()  # whose result nobody needs, as in torch


def test_saved_tensors_may_come_back_elsewhere(launched):
    x = placed(sample(4, 16).float())

    def unpack(t):
        return torch.stack([t, t], -1)[..., 0]

    with saved_tensors_hooks(lambda t: t, unpack):
        made = [getattr(gt, name)(x, 1) for name in ("amax", "var", "std")]
    for y, name in zip(made, ("amax", "var", "std"), strict=True):
        (got,) = torch.autograd.grad(y.sum(), x)
        (wanted,) = torch.autograd.grad(getattr(torch, name)(x, 1).sum(), x)
        torch.testing.assert_close(got, wanted)
    assert "gradient" not in launched


def test_retained_and_checkpointed():
    x = placed(sample(4, 16).float())
    y = gt.amax(x, 1)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with gt.enable():
        y = torch.utils.checkpoint.checkpoint(
            lambda x: x.amax(1) + x.std(1), x, use_reentrant=False
        )
        (got,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad((x.amax(1) + x.std(1)).sum(), x)
    torch.testing.assert_close(got, wanted)


def test_everything_else_goes_the_usual_way(launched):
    x = placed(sample(8, 32).float())
    for call in (
        lambda: gt.amax(x, 0),
        lambda: gt.amax(x, (0, 1)),  # one row
        lambda: gt.amax(x, ()),
        lambda: gt.amax(x.T, 0),
        lambda: gt.amax(x[:, :20], 1),
        lambda: gt.amax(x[:, 1:17], 1),
        lambda: gt.var(x.half(), 1),
        lambda: gt.std(x.double(), 1),
        lambda: gt.var(x),
        lambda: torch.func.vmap(lambda x: gt.amax(x, 1))(x.reshape(2, 4, 32)),
    ):
        torch.autograd.grad(call().sum(), x)
    torch.func.grad(lambda x: gt.amax(x, 1).sum())(x)
    compiled = torch.compile(lambda x: gt.amax(x, 1) + gt.var(x, 1), backend="aot_eager")
    torch.autograd.grad(compiled(x).sum(), x)
    for dim in (2, (1, 1), (0, -2), "1"):
        for library in (torch, gt):
            with pytest.raises((IndexError, RuntimeError, TypeError)):
                library.amax(x, dim)
    assert not launched
