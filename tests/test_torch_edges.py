"""`gradplan.torch` where others once met: subclasses, hooks, tangents, gradients that are 0."""

from __future__ import annotations

import asyncio
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.autograd.forward_ad as forward_ad  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch.func import grad, vmap  # noqa: E402

import gradplan as gp  # noqa: E402
import gradplan.torch as gt  # noqa: E402
from torch_calls import sample  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*prototype stage:UserWarning",
        ".*torch.jit:DeprecationWarning",
        ".*`torch.jit:DeprecationWarning",
        ".*degrees of freedom is <= 0:UserWarning",
    )
]

INF, NAN = float("inf"), float("nan")
# Each kind, as a function of one tensor along its last axis.
ALONG = {
    "softmax": lambda x: gt.softmax(x, -1),
    "log_softmax": lambda x: gt.log_softmax(x, -1),
    "cumsum": lambda x: gt.cumsum(x, -1),
    "cumprod": lambda x: gt.cumprod(x, -1),
    "cummax": lambda x: gt.cummax(x, -1)[0],
    "logcumsumexp": lambda x: gt.logcumsumexp(x, -1),
    "mean": lambda x: gt.mean(x, -1),
    "amax": lambda x: gt.amax(x, -1),
    "prod": lambda x: gt.prod(x, -1),
    "norm": lambda x: gt.norm(x, dim=-1),
    "logsumexp": lambda x: gt.logsumexp(x, -1),
    "var": lambda x: gt.var(x, -1),
    "std": lambda x: gt.std(x, -1),
    "lerp": lambda x: gt.lerp(x, 2 * x, 0.3),
}
along = pytest.mark.parametrize("function", ALONG.values(), ids=ALONG)


def is_ours(y):
    return "Backward0" not in y.grad_fn.name()


# What handles its own functions


class Recorder:
    """As torch's notes on extending it have it: no tensor, but asked before torch is."""

    @classmethod
    def __torch_function__(cls, func, kinds, args=(), kwargs=None):
        return func, args, kwargs or {}


@pytest.mark.parametrize("name", ["mean", "softmax", "std", "amax", "prod", "var_mean"])
def test_who_handles_its_own_functions_sees_them_as_they_were_called(name):
    function, given = getattr(torch, name), Recorder()
    with gt.enable():
        assert function(given, 0) == (function, (given, 0), {})
    assert getattr(gt, name)(given, 0) == (function, (given, 0), {})


def test_nested_and_masked_tensors_are_torchs():
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with gt.enable():
        assert torch.equal(torch.mean(jagged), gt.mean(jagged))
    strided = torch.nested.nested_tensor(parts, layout=torch.strided, requires_grad=True)
    gt.softmax(strided, -1).to_padded_tensor(0.0).square().sum().backward()
    assert strided.grad.is_nested
    masked = torch.masked.masked_tensor(torch.randn(3, 4), torch.rand(3, 4) > 0.3)
    with gt.enable():
        for name in ("mean", "amax", "prod", "std"):
            assert getattr(masked, name)(1).shape == (3,)


def test_names_of_arguments_that_torch_takes():
    x = sample(3, 4)
    with gt.enable():
        for y in (
            torch.linalg.norm(x, axis=1, keepdims=True),
            torch.linalg.vector_norm(input=x),
            torch.linalg.vector_norm(x=x),
            torch.mean(a=x),
            torch.softmax(x=x, axis=0),
            torch.max(x1=x),
        ):
            assert is_ours(y)
    for wrong in ({"keepdim": True}, {"dim": (0, 1)}):
        with pytest.raises(TypeError, match="prod"):
            gt.prod(x, **wrong)


def test_a_trace_records_torchs_own():
    with gt.enable():
        traced = torch.jit.trace(lambda x: torch.softmax(x, 0), sample(3))
    x = sample(3, seed=1)
    torch.testing.assert_close(traced(x), torch.softmax(x, 0))


def test_what_a_program_puts_into_torchs_modules_is_called(monkeypatch):
    x, seen = sample(3, 4), []
    with gt.enable():
        F.softmin(x, 1)
        monkeypatch.setattr(F, "_get_softmax_dim", lambda *_: seen.append(1) or 1)
        F.softmin(x)
    assert seen


# Decorators


def test_a_decorated_generator_is_inside_while_it_runs():
    x = sample(4)

    @gt.enable()
    def steps():
        try:
            got = yield is_ours(y := torch.softmax(x, 0))
            yield got, is_ours(y := torch.cumsum(x, 0))
        except ValueError:
            yield is_ours(y := torch.cumsum(x, 0)), y.shape

    running = steps()
    assert isinstance(running, types.GeneratorType)
    assert next(running)
    outside = torch.softmax(x, 0)
    assert not is_ours(outside)
    assert running.send(5) == (5, True)
    assert running.throw(ValueError()) == (True, x.shape)
    with pytest.raises(StopIteration):
        next(running)


def test_a_decorated_coroutine_is_inside_while_it_runs():
    x = sample(4)

    @gt.enable
    async def inside():
        first = torch.softmax(x, 0)
        await asyncio.sleep(0.01)
        second = torch.softmax(x, 0)
        return is_ours(first) and is_ours(second)

    async def outside():
        await asyncio.sleep(0)
        y = torch.softmax(x, 0)
        return is_ours(y)

    async def both():
        return await asyncio.gather(inside(), outside())

    assert asyncio.run(both()) == [True, False]
    with pytest.raises(TypeError, match="decorates functions"):
        gt.enable()(Recorder)


# Autograd


@pytest.mark.parametrize("name", ["mean", "cumsum"])
def test_what_saves_nothing_may_run_backward_twice(name):
    x = sample(4)
    y = ALONG[name](x).sum()
    y.backward()
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first)


SPARSE = {
    "norm": lambda t, x: t.norm(x, 2, -1, True),
    "logsumexp": lambda t, x: t.logsumexp(x, -1, True),
    "var": lambda t, x: t.var(x, -1, keepdim=True),
    "std": lambda t, x: t.std(x, -1, keepdim=True),
    "prod": lambda t, x: t.prod(x, -1, True),
    "amax": lambda t, x: t.amax(x, -1, True),
    "mean": lambda t, x: t.mean(x, -1, True),
    "softmax": lambda t, x: t.softmax(x, -1),
    "log_softmax": lambda t, x: t.log_softmax(x, -1),
    "cumsum": lambda t, x: t.cumsum(x, -1),
    "cumprod": lambda t, x: t.cumprod(x, -1),
    "cummax": lambda t, x: t.cummax(x, -1)[0],
    "logcumsumexp": lambda t, x: t.logcumsumexp(x, -1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_the_gradient_of_a_table_may_be_sparse(name):
    """Of a table that is a result, whatever torch itself makes of it."""
    torch.manual_seed(3)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    places, weights = torch.tensor([0, 2, 0]), torch.randn(3, 1)

    def gradient(dense, table):
        found = F.embedding(places, table, sparse=not dense)
        (dx,) = torch.autograd.grad((found * weights).sum(), x)
        return dx.to_dense()

    torch.testing.assert_close(
        gradient(False, SPARSE[name](gt, x)), gradient(True, SPARSE[name](torch, x))
    )


@pytest.mark.parametrize("correction", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_a_correction_that_is_not_finite_is_torchs(name, correction):
    found = []
    for library in (gt, torch):
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        made = getattr(library, name)(x, -1, correction=correction)
        both = made if isinstance(made, tuple) else (made,)
        (dx,) = torch.autograd.grad(sum(one.sum() for one in both), x)
        found.append((*both, dx))
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("name", ["mean", "var_mean"])
def test_the_second_gradient_of_nothing_is_0(name, shape):
    x = torch.zeros(shape, requires_grad=True)
    made = getattr(gt, name)(x, 0)
    mean = made[1] if isinstance(made, tuple) else made
    dy = torch.ones_like(mean).requires_grad_()
    (dx,) = torch.autograd.grad(mean, x, dy, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), dy)
    assert dx.shape == shape
    assert torch.equal(again, torch.zeros_like(dy))


def test_a_sparse_gradient_of_lerp_stays_sparse():
    a, b = sample(4, 3), sample(4, 3, seed=1)
    table = gt.lerp(a, b, 0.25)
    F.embedding(torch.tensor([1, 1]), table, sparse=True).sum().backward()
    for leaf, factor in ((a, 0.75), (b, 0.25)):
        assert leaf.grad.is_sparse
        assert leaf.grad.to_dense()[1].tolist() == [2 * factor] * 3


def test_lerp_counts_the_axes_of_what_is_broadcast():
    b = torch.randn(1, requires_grad=True)
    y = gt.lerp(torch.randn([1] * 9), b, 0.5)
    y.sum().backward()
    assert b.grad.tolist() == [0.5]


@along
def test_a_batch_may_have_more_axes_than_a_plan(function):
    x = torch.randn(2, *[1, 2] * 4)

    def loss(x):
        return function(x).square().sum()

    torch.testing.assert_close(vmap(grad(loss))(x), torch.stack([grad(loss)(one) for one in x]))


@along
def test_tangents_of_a_gradient_are_kept(function):
    """Of a graph from before: a gradient of dy and its tangent is linear in both."""
    x = sample(3, 4)
    y = function(x)
    tangent = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    (expected,) = torch.autograd.grad(y, x, tangent, retain_graph=True)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.ones_like(y), tangent)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(forward_ad.unpack_dual(dx).tangent, expected)


@along
def test_second_order_gradients_below_hooks_of_saved_tensors(function):
    x = sample(3, 4)

    def second():
        (dx,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    expected = second()
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(second(), expected)


@pytest.mark.parametrize("name", ["logcumsumexp", "logsumexp", "std", "norm", "var"])
def test_third_order_gradients(name):
    def first(x):
        y = ALONG[name](x)
        return torch.autograd.grad(y.exp().sum(), x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(first, sample(2, 4))


def both_orders(function, values):
    """The gradient, and the gradients of its sum by x and by dy."""
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    y = function(x)
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    found = torch.autograd.grad(dx.sum(), (x, dy), materialize_grads=True)
    return dx.tolist(), *(one.tolist() for one in found)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("logsumexp", [-INF, -INF], ([0, 0], [0, 0], 0)),
        ("norm", [0.0, 0.0], ([0, 0], [0, 0], 0)),
        ("std", [0.0, 0.0], ([0, 0], [0, 0], 0)),
        ("var", [3.0], ([0], [0], 0)),
        ("amax", [NAN, 1.0], ([1, 0], [0, 0], 1)),
        ("logcumsumexp", [-INF, 0.0], ([0, 1], [0, 0], [0, 1])),
    ],
)
def test_where_a_gradient_is_0_so_are_its_derivatives(name, values, expected):
    assert both_orders(ALONG[name], values) == expected


def test_products_with_the_hessian_of_a_log_cumsum_exp_are_finite():
    """torch has the logarithm of dy there, of which most is 0."""
    x, v = sample(5), torch.arange(5.0, dtype=torch.float64)
    _, found = torch.autograd.functional.hvp(lambda x: gt.logcumsumexp(x, 0)[2], x, v)
    p = torch.softmax(x[:3].detach(), 0)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[:3] = p * (v[:3] - (p * v[:3]).sum())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("by_freq", [False, True])
def test_the_second_order_of_embedding(padding_idx, by_freq):
    weight, indices = sample(5, 3), torch.tensor([[1, 2, 2], [0, 1, 2]])
    y = gt.embedding(indices, weight, padding_idx, scale_grad_by_freq=by_freq)
    dy = torch.ones_like(y, requires_grad=True)
    (dweight,) = torch.autograd.grad(y, weight, dy, create_graph=True)
    factors = sample(5, 3, seed=1).detach()
    (found,) = torch.autograd.grad((dweight * factors).sum(), dy)
    expected = factors[indices]
    if by_freq:
        expected = expected / torch.bincount(indices.reshape(-1))[indices][..., None]
    if padding_idx is not None:
        expected[indices == padding_idx] = 0
    torch.testing.assert_close(found, expected)


@along
def test_second_order_gradients_through_what_stands_before(function):
    """Also where the gradient does not depend on x: the winners of amax are fixed."""
    x, weight = sample(3, 4), sample(4, 4, seed=1)
    (dx,) = torch.autograd.grad(function(x @ weight).sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert weight.grad.isfinite().all()


def test_third_order_gradients_of_a_batch_of_gradients():
    factors = sample(5, seed=1).detach()

    def third(vectorize):
        x = sample(5)
        second = torch.autograd.functional.hessian(
            lambda x: gt.logcumsumexp(x, 0) @ factors, x, vectorize=vectorize, create_graph=True
        )
        return torch.autograd.grad(second.square().sum(), x)[0]

    torch.testing.assert_close(third(True), third(False))


def test_defaults_may_be_written_out():
    for x in (sample(3, 4), sample(3, 4).detach()):
        for name, *more in (("prod", None), ("var", 0, None, True), ("std_mean", 0, None, True)):
            getattr(gt, name)(x, *more)
        gt.prod(x, keepdim=False, out=None)
        gt.std(x, unbiased=None)
        assert gt.norm(x, axis=1, keepdims=True).shape == (3, 1)


@pytest.mark.parametrize("name", ["norm", "std"])
def test_second_order_gradients_of_numbers_whose_squares_vanish(name):
    x = torch.tensor([0.0, 1e-30, 0.0], requires_grad=True)
    y = ALONG[name](x)
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert torch.autograd.grad(dx.sum(), dy)[0].isfinite()


def test_the_second_order_of_embedding_counts_beyond_256():
    weight = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    y = gt.embedding(torch.zeros(1024, dtype=torch.long), weight, scale_grad_by_freq=True)
    dy = torch.ones_like(y, requires_grad=True)
    (dweight,) = torch.autograd.grad(y, weight, dy, create_graph=True)
    (found,) = torch.autograd.grad(dweight.sum(), dy)
    assert (found == 1 / 1024).all()


def test_a_tensor_without_data_among_others_is_refused():
    t = torch.rand(3, 4)
    bare = t.to("meta")
    for call in (
        lambda: torch.ops.gradplan.softmax_backward(bare, t, 1),
        lambda: torch.ops.gradplan.softmax_backward(t, bare, 1),
        lambda: torch.ops.gradplan.logcumsumexp_transposed(bare, t, t, 1),
    ):
        with pytest.raises(gp.InvalidProblem, match=r"expected one device, got .*meta"):
            call()
    assert torch.ops.gradplan.softmax_backward(bare, bare, 1).device.type == "meta"


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mean(torch.arange(3), None, True),
        lambda: torch.var(torch.arange(3), None, True, True),
        lambda: torch.amax(torch.rand(3, 4), dim=np.array([0, 1])),
        lambda: torch.norm(torch.rand(3, 4), dim=np.array([0, 1])),
    ],
    ids=["mean", "var", "amax", "norm"],
)
def test_errors_are_torchs_own(call):
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        call()
    with gt.enable(), pytest.raises(type(theirs.value)) as ours:
        call()
    # What torch prints of where its C++ stands is not compared.
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
