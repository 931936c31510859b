"""`gradplan.torch` inside everything that surrounds an operator in PyTorch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import gradplan as gp  # noqa: E402
import gradplan.torch as gt  # noqa: E402
from gradplan.torch.operators import OPERATORS  # noqa: E402
from torch_calls import (  # noqa: E402
    CALLS,
    Compositor,
    Transformer,
    gradient,
    losses,
    operator_arguments,
    sample,
    transposed,
)

# What torch itself does in tracing and in function transforms.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*should not be instantiated:DeprecationWarning",
        ".*torch.jit:DeprecationWarning",
        "There is a performance drop because we have not yet implemented:UserWarning",
    )
]


def test_importing_gradplan_does_not_import_torch():
    code = "import sys, gradplan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", OPERATORS, ids=str)
def test_opcheck(kind):
    """Schema, fakes with the strides of the real thing, autograd, tracing."""
    for layout in (torch.clone, transposed):
        args = [
            layout(a).detach().requires_grad_()
            if isinstance(a, torch.Tensor) and a.is_floating_point()
            else a
            for a in operator_arguments(kind)
        ]
        torch.library.opcheck(OPERATORS[kind].op, tuple(args))


def test_operators_refuse_what_does_not_fit():
    ops = torch.ops.gradplan
    x = torch.zeros(2, 3)
    for call in (
        lambda: ops.softmax_backward(x, torch.zeros(3, 2), 1),
        lambda: ops.softmax_backward(x, x.double(), 1),
        lambda: ops.softmax_backward(x, x, 2),
        lambda: ops.norm2_backward(x, x, x[0], [0], False),
        lambda: ops.embedding_backward(x, torch.zeros(3, dtype=torch.int64), 4, None, False),
        lambda: ops.embedding_backward(x, torch.zeros(2, dtype=torch.int64), 4, 9, False),
    ):
        with pytest.raises(gp.InvalidProblem):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_function_transforms(name):
    call = CALLS[name]
    x = sample(3, 4).detach()

    def ours(x):
        return call(gt, x)

    def theirs(x):
        return call(torch, x)

    def check(transform):
        torch.testing.assert_close(transform(ours), transform(theirs))

    rows = sample(5, 3, 4, seed=2).detach()
    check(lambda f: jacrev(f)(x))
    check(lambda f: vmap(f)(rows))
    check(lambda f: vmap(grad(lambda x: f(x).square().sum()))(rows))
    check(lambda f: grad(lambda r: vmap(f)(r).square().sum())(rows))
    check(lambda f: vmap(grad(lambda x: f(x).square().sum()), in_dims=2)(rows.permute(1, 2, 0)))
    check(lambda f: jvp(f, (x,), (torch.ones_like(x),)))
    check(lambda f: jacfwd(f)(x))
    check(lambda f: hessian(lambda x: f(x).square().sum())(x))
    check(lambda f: jacrev(grad(lambda x: f(x).square().sum()))(x))


def test_function_transforms_of_scalars_and_embedding():
    for f in (gt.softmax, gt.cumsum, gt.logsumexp, gt.amax, gt.mean):
        rows = sample(4).detach()
        theirs = getattr(torch, f.__name__)
        got = vmap(grad(lambda x, f=f: f(x, 0).square()))(rows)
        torch.testing.assert_close(got, vmap(grad(lambda x, f=theirs: f(x, 0).square()))(rows))

    weight, indices = sample(6, 3).detach(), torch.tensor([[0, 2, 2], [5, 2, 0], [1, 1, 1]])
    for options in ({}, {"padding_idx": 2}, {"padding_idx": -1, "scale_grad_by_freq": True}):

        def loss(look_up, w, i, options=options):
            return look_up(i, w, **options).square().sum()

        for dims in ((None, 0), (0, None), (0, 0)):
            w = weight if dims[0] is None else torch.stack([weight, 2 * weight, weight + 1])
            got, expected = (
                vmap(grad(lambda w, i, f=f: loss(f, w, i)), in_dims=dims)(w, indices)
                for f in (gt.embedding, F.embedding)
            )
            if "scale_grad_by_freq" not in options:
                torch.testing.assert_close(got, expected)
            else:
                one_by_one = [
                    grad(lambda w, i=i: loss(F.embedding, w, i))(w if dims[0] is None else w[k])
                    for k, i in enumerate(indices if dims[1] == 0 else [indices] * 3)
                ]
                torch.testing.assert_close(got, torch.stack(one_by_one))


@pytest.mark.parametrize("name", CALLS)
def test_compiled_whole(name, ran):
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = torch.compile(
        lambda x: call(gt, x * 1) * 2, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for shape in ((3, 4), (5, 7), (6, 6)):
        x = sample(*shape)
        got = gradient(compiled, x)
        torch.testing.assert_close(got, gradient(lambda x: call(torch, x * 1) * 2, x))
    assert ran


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU")
def test_compiled_by_inductor(ran):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def f(x):
        return gt.logcumsumexp(gt.softmax(x, 0).mT + 1, 0).exp() * gt.amax(x, 0).unsqueeze(1)

    x = sample(16, 24, dtype=torch.float32)
    y = torch.logcumsumexp(torch.softmax(x, 0).mT + 1, 0).exp() * x.amax(0).unsqueeze(1)
    f(x).sum().backward()
    (expected,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert ran == {"softmax": 1, "log_cumsum_exp": 1, "max": 1}


def test_compiled_embedding_and_two_results():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def f(i, w):
        values, indices = gt.cummax(gt.embedding(i, w, padding_idx=0), 0)
        return values, indices, *gt.std_mean(values, -1)

    w, i = sample(7, 3), torch.tensor([1, 0, 6, 1])
    values, indices, std, mean = f(i, w)
    (got,) = torch.autograd.grad(values.sum() + std.sum() + 2 * mean.sum(), w)
    v, k = torch.cummax(F.embedding(i, w, padding_idx=0), 0)
    (expected,) = torch.autograd.grad(v.sum() + v.std(-1).sum() + 2 * v.mean(-1).sum(), w)
    assert torch.equal(indices, k)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_read_where_they_lie(name, ran, monkeypatch):
    """Expanded, transposed and sliced: the kernel is given that very memory."""
    call = CALLS[name]
    x = sample(4, 6)
    y = call(gt, x)
    layouts = [torch.ones(()).double().expand(y.shape)]
    if y.dim() == 2:
        layouts.append(sample(*y.shape[::-1], requires_grad=False).mT)
    if y.dim():
        wide = sample(*y.shape[:-1], 2 * y.shape[-1], requires_grad=False)
        layouts += [wide[..., ::2], wide[..., 1::2]]
    seen = []
    for operator in OPERATORS.values():

        def run(*args, run=operator.run, **more):
            seen.append((args[0].data_ptr(), args[0].stride()))
            return run(*args, **more)

        monkeypatch.setattr(operator, "run", run)
    for dy in layouts:
        seen.clear()
        (got,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (expected,) = torch.autograd.grad(call(torch, x), x, dy)
        torch.testing.assert_close(got, expected)
        if not name.endswith("_mean"):  # torch.stack takes dy apart first
            assert seen == [(dy.data_ptr(), dy.stride())]


def test_a_gradient_has_the_layout_of_its_input():
    x = torch.randn(5, 3).mT.requires_grad_()
    for call in (lambda x: gt.cumprod(x, 1), lambda x: gt.amax(x, 1), lambda x: gt.std(x, 0)):
        (dx,) = torch.autograd.grad(call(x).sum(), x)
        assert dx.stride() == x.stride()


def test_only_the_gradients_asked_for(monkeypatch):
    asked = []
    operator = OPERATORS["lerp"]
    run = operator.run
    monkeypatch.setattr(
        operator, "run", lambda *args, **more: asked.append(args[2:]) or run(*args, **more)
    )
    a, b = sample(3), sample(3, seed=1)
    gt.lerp(a, b, 0.25).sum().backward()
    gt.lerp(a.detach(), b, 0.25).sum().backward()
    gt.lerp(a, b.detach(), 0.25).sum().backward()
    assert asked == [(True, True), (False, True), (True, False)]
    assert torch.equal(a.grad, torch.full((3,), 1.5).double())

    asked.clear()
    a = sample(3)
    _, z = gt.var_mean(a)
    monkeypatch.setattr(OPERATORS["var"], "run", lambda *args: pytest.fail("not asked for"))
    (got,) = torch.autograd.grad(z, a)
    torch.testing.assert_close(got, torch.full((3,), 1 / 3).double())


def test_saved_tensors_are_saved_the_way_hooks_see():
    packed = []

    def pack(t):
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gt.std(gt.softmax(sample(3, 4), 1), 1)
    assert len(packed) == 3  # y of softmax, x and y of std

    y = gt.softmax(sample(3, 4), 1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_graph_where_none_is_wanted():
    x = sample(3)
    with torch.no_grad():
        assert not gt.softmax(x, 0).requires_grad
    with torch.inference_mode():
        assert not gt.cumprod(x, 0).requires_grad
    assert not gt.cumsum(x.detach(), 0).requires_grad


@pytest.mark.parametrize("name", CALLS)
def test_autocast_follows_torch(name):
    call = CALLS[name]
    for dtype in (torch.bfloat16, torch.float32):
        x = sample(4, 6, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            mine, theirs = call(gt, x), call(torch, x)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
        dy = torch.ones_like(mine)
        (got,), (expected,) = (torch.autograd.grad(y, x, dy) for y in (mine, theirs))
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_another_dtype_for_the_result():
    x = sample(3, 4, dtype=torch.bfloat16)
    calls = {
        "softmax": lambda t: t.softmax(x, 1, dtype=torch.float32),
        "cumprod": lambda t: t.cumprod(x, 1, dtype=torch.float32),
        "mean": lambda t: t.mean(x, 1, dtype=torch.float64),
        "prod": lambda t: t.prod(x, 1, dtype=torch.float64),
        "norm": lambda t: t.linalg.vector_norm(x, dtype=torch.float32),
    }
    for call in calls.values():
        mine, theirs = call(gt), call(torch)
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
        (got,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (mine, theirs))
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected)


def test_what_is_not_ours_is_torchs(ran):
    whole = torch.arange(6).reshape(2, 3)
    assert torch.equal(gt.cumsum(whole, 0), whole.cumsum(0))
    assert torch.equal(gt.mean(whole, 1, dtype=torch.float32), whole.float().mean(1))
    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    gt.cumprod(z, 0).abs().sum().backward()
    gt.linalg.norm(torch.randn(3, 3, requires_grad=True), 2).backward()  # a singular value
    gt.norm(torch.randn(3, requires_grad=True), 1).backward()
    gt.lerp(sample(3), sample(3), sample(3)).sum().backward()
    nine = torch.randn([1] * 9, requires_grad=True)
    gt.softmax(nine, 0).sum().backward()
    gt.softmax(torch.randn(2, 3, device="meta", requires_grad=True), 0).sum().backward()
    assert not ran

    class Mine(torch.Tensor):
        pass

    y = gt.softmax(torch.randn(3).as_subclass(Mine).requires_grad_(), 0)
    assert type(y) is Mine


def test_names_of_arguments():
    x = sample(3, 4)
    assert torch.equal(gt.softmax(input=x, dim=1), x.softmax(1))
    assert torch.equal(gt.mean(x, axis=0, keepdims=True), x.mean(0, keepdim=True))
    assert torch.equal(gt.var(x, False), x.var(unbiased=False))
    assert torch.equal(gt.std(x, 1, False, True), x.std(1, False, True))
    assert torch.equal(gt.var(x, (0, 1), correction=0.5), x.var((0, 1), correction=0.5))
    values, _ = gt.max(x, dim=1)
    assert torch.equal(values, x.amax(1))
    out = torch.empty(3)
    gt.softmax(torch.ones(3), 0, out=out)
    assert torch.equal(out, torch.full((3,), 1 / 3))
    with pytest.raises(TypeError):
        gt.var(x, 0, True, correction=1)


def test_embedding_options():
    indices = torch.tensor([[0, 2], [2, 5]])
    for options in (
        {},
        {"padding_idx": 2},
        {"padding_idx": -4},
        {"scale_grad_by_freq": True},
        {"max_norm": 1.0},
        {"max_norm": 0.5, "norm_type": 1.0, "padding_idx": 0},
    ):
        for i in (indices, indices.int(), indices.mT, indices[0, 0], indices[:0]):
            got, expected = sample(6, 3), sample(6, 3)
            mine = gt.embedding(i, got, **options)
            theirs = F.embedding(i, expected, **options)
            assert torch.equal(mine, theirs)
            assert torch.equal(got, expected)  # max_norm writes to it
            mine.square().sum().backward()
            theirs.square().sum().backward()
            torch.testing.assert_close(got.grad, expected.grad)
    with pytest.raises(gp.Unsupported, match="sparse"):
        gt.embedding(indices, sample(6, 3), sparse=True)
    with pytest.raises(AssertionError, match="Padding_idx"):
        gt.embedding(indices, sample(6, 3), padding_idx=6)
    with pytest.raises(IndexError):
        gt.embedding(torch.tensor([6]), sample(6, 3))


# Edges, each with what torch makes of it.


def test_embedding_sums_halves_in_full():
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    indices = torch.zeros(4096, dtype=torch.int64)
    F.embedding(indices, weight).sum().backward()
    assert weight.grad[0, 0] < 4096  # torch adds bf16 to bf16, and stops growing
    weight.grad = None
    gt.embedding(indices, weight).sum().backward()
    assert weight.grad[0, 0] == 4096


def test_logsumexp_of_a_row_of_minus_infinity():
    x = torch.full((2, 3), -torch.inf, requires_grad=True)
    (got,) = torch.autograd.grad(gt.logsumexp(x, 1).sum(), x)
    assert not got.any()


def test_logcumsumexp_keeps_a_nan_gradient_and_zeroes_minus_infinity():
    x = torch.tensor([0.0, -torch.inf, 1.0], requires_grad=True)
    dy = torch.tensor([1.0, torch.nan, 1.0])
    (theirs,) = torch.autograd.grad(torch.logcumsumexp(x, 0), x, dy)
    assert not theirs.isnan().all()
    (got,) = torch.autograd.grad(gt.logcumsumexp(x, 0), x, dy)
    assert got[0].isnan()
    assert got[1] == 0
    assert got[2] == (x[2] - torch.logcumsumexp(x, 0)[2]).exp()


def test_norm_and_std_at_zero():
    x = torch.zeros(2, 3, requires_grad=True)
    for call in (
        lambda: gt.norm(x),
        lambda: gt.linalg.vector_norm(x, dim=1),
        lambda: gt.std(x, 1),
        lambda: gt.std_mean(x, 1)[0],
    ):
        (got,) = torch.autograd.grad(call().sum(), x)
        assert not got.any()


def test_products_with_zeros():
    x = torch.tensor([[2.0, 0.0, 3.0], [0.0, 4.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(gt.prod(x, 1).sum(), x)
    assert torch.equal(got, torch.tensor([[0.0, 6.0, 0.0], [0.0, 0.0, 0.0]]).double())
    (got,) = torch.autograd.grad(gt.cumprod(x, 1).sum(), x)
    assert torch.equal(got, torch.tensor([[1.0, 8.0, 0.0], [5.0, 0.0, 0.0]]).double())


def test_amax_of_nan_gives_its_place():
    x = torch.tensor([1.0, torch.nan, 2.0], requires_grad=True)
    (theirs,) = torch.autograd.grad(torch.amax(x, 0), x)
    assert theirs.isnan().any()
    (got,) = torch.autograd.grad(gt.amax(x, 0), x)
    assert torch.equal(got, torch.tensor([0.0, 1.0, 0.0]))


def test_variance_without_degrees_of_freedom():
    x = torch.tensor([[3.0]], requires_grad=True)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        y, z = torch.var(x, 1), gt.var(x, 1)
    (theirs,), (got,) = torch.autograd.grad(y, x), torch.autograd.grad(z, x)
    assert theirs.isnan().all()
    assert not got.any()


def test_no_axes_are_all_axes():
    x = sample(3, 4)
    for name in ("var", "std", "mean", "amax"):
        mine, theirs = getattr(gt, name)(x, ()), getattr(torch, name)(x, (0, 1))
        assert torch.equal(mine, getattr(torch, name)(x, ()))
        (got,), (expected,) = (torch.autograd.grad(y, x) for y in (mine, theirs))
        torch.testing.assert_close(got, expected)
    (torchs,) = torch.autograd.grad(torch.var(x, ()), x)
    assert torchs.isinf().all()  # it divides by 1 element − 1


def test_scans_of_halves_do_not_stall():
    n = 4096
    x = torch.zeros(n, dtype=torch.bfloat16, requires_grad=True)
    (got,) = torch.autograd.grad(gt.cumsum(x, 0).sum(), x)
    expected = torch.arange(n, 0, -1, dtype=torch.float64)
    assert ((got.double() - expected).abs() <= expected * 2.0**-8).all()


def test_softmax_of_halves_is_summed_before_it_is_rounded():
    y = torch.full((1, 1000), 1e-3).bfloat16()
    x = y.float().log().bfloat16().requires_grad_()
    made = gt.softmax(x, 1)
    dy = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    (got,) = torch.autograd.grad(made, x, dy)
    wide, steep = made.detach().double(), dy.double()
    exact = wide * (steep - (wide * steep).sum())
    assert (got.double() - exact).norm() <= 2.0**-8 * exact.norm()


def test_cummax_last_of_equals():
    x = torch.tensor([1.0, 1.0, 0.0, 1.0], requires_grad=True)
    dy = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for name in ("cummax", "cummin"):
        sign = 1 if name == "cummax" else -1
        (got,) = torch.autograd.grad(getattr(gt, name)(sign * x, 0).values, x, dy)
        (expected,) = torch.autograd.grad(getattr(torch, name)(sign * x, 0).values, x, dy)
        assert torch.equal(got, expected)


def test_conjugated_and_negated_gradients_are_resolved():
    x = sample(3)
    dy = torch.randn(3, dtype=torch.complex128).conj().imag
    assert dy.is_neg()
    (got,) = torch.autograd.grad(gt.softmax(x, 0), x, dy)
    (expected,) = torch.autograd.grad(torch.softmax(x, 0), x, dy)
    torch.testing.assert_close(got, expected)
    y = gt.cumprod(x, 0)
    torch.autograd.grad(y, x, dy, retain_graph=True)  # the layout is known now
    negated = dy.detach().requires_grad_()
    assert negated.is_neg()
    (got,) = torch.autograd.grad(gt.cumprod(negated, 0).sum(), negated)
    (expected,) = torch.autograd.grad(torch.cumprod(negated, 0).sum(), negated)
    torch.testing.assert_close(got, expected)
    (got,) = torch.autograd.grad(y, x, torch._efficientzerotensor((3,), dtype=torch.float64))
    assert not got.any()


# enable()


class Reader(nn.Module):
    """Something of everything, as people write it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 20)
        self.soft = nn.Softmax(dim=-1)
        self.log_soft = nn.LogSoftmax(dim=-1)

    def forward(self, words):
        h = self.table(words)
        seen, weights = self.attention(h, h, h)
        h = F.normalize(h + seen, dim=-1)
        h = h * self.soft(h) + F.softmin(h, dim=1)
        h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-3)
        h = torch.lerp(h, h.cumsum(1), 0.5) + h.cummax(1).values + torch.logcumsumexp(h, 1)
        scores = self.log_soft(self.head(h))
        return scores.amax(-1).mean() + weights.var() + h.norm() + scores.logsumexp(-1).prod()


KINDS = {
    "embedding": 1,
    "softmax": 3,
    "log_softmax": 1,
    "lerp": 1,
    "cumsum": 1,
    "cummax": 1,
    "log_cumsum_exp": 1,
    "mean": 3,
    "std": 1,
    "var": 1,
    "max": 1,
    "norm2": 2,
    "log_sum_exp": 1,
    "prod": 1,
}


def loss_and_gradients(model, words):
    model.zero_grad()
    loss = model(words)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_enable_on_a_model_as_it_is(ran):
    torch.manual_seed(0)
    model, words = Reader().double(), torch.randint(0, 20, (3, 7))
    plain = loss_and_gradients(model, words)
    assert not ran
    with gt.enable():
        ours = loss_and_gradients(model, words)
    assert ran == KINDS
    assert torch.equal(ours[0], plain[0])
    torch.testing.assert_close(ours, plain)

    ran.clear()
    with gt.enable():
        loss = model(words)
    loss.backward()  # the graph remembers
    assert ran == KINDS

    ran.clear()
    decorated = gt.enable(families=("softmax", "embedding"))(model.forward)
    decorated(words).backward()
    assert ran == {"softmax": 3, "log_softmax": 1, "embedding": 1}

    ran.clear()
    loss_and_gradients(model, words)
    assert not ran


def test_enable_under_compile(ran):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, words = Reader().double(), torch.randint(0, 20, (3, 7))
    plain = loss_and_gradients(model, words)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with gt.enable():
        ours = loss_and_gradients(compiled, words)
    torch.testing.assert_close(ours, plain)
    # What torch's own composites call inside stays torch's in a compiled graph.
    assert set(ran) == set(KINDS)
    ran.clear()
    torch.testing.assert_close(loss_and_gradients(compiled, words), plain)
    assert not ran

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(words):
        with gt.enable():
            return model(words)

    inside(words).backward()
    assert set(ran) == set(KINDS)


def test_enable_nests_and_is_left_on_errors(ran):
    x = sample(4)

    def used():
        ran.clear()
        torch.autograd.grad(torch.softmax(x, 0).sum() + x.cumsum(0).sum(), x)
        return set(ran)

    with gt.enable("softmax"):
        assert used() == {"softmax"}
        with gt.enable(["scan"]):
            assert used() == {"softmax", "cumsum"}
        assert used() == {"softmax"}
        with pytest.raises(ZeroDivisionError), gt.enable():
            1 / 0  # noqa: B018
        assert used() == {"softmax"}
    assert used() == set()
    again = gt.enable("scan")
    with again, again:
        assert used() == {"cumsum"}
    assert used() == set()
    with pytest.raises(gp.InvalidProblem, match="softmax"):
        gt.enable("no such family")


def test_enable_acts_on_its_thread_alone(ran):
    x = sample(4)
    inside, done = threading.Event(), threading.Event()
    found = {}

    def other():
        inside.wait(10)
        y = torch.softmax(x, 0)
        found["name"] = y.grad_fn.name()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with gt.enable():
        inside.set()
        done.wait(10)
        y = torch.softmax(x, 0)
        mine = y.grad_fn.name()
    thread.join()
    assert found["name"] == "SoftmaxBackward0"
    assert mine != found["name"]


def test_second_order_gradients_under_enable():
    x = sample(3, 4)
    with gt.enable():
        assert torch.autograd.gradgradcheck(lambda x: torch.cumprod(x, 1), x)
        assert torch.autograd.gradgradcheck(lambda x: x.logsumexp(1), x)
        (dx,) = torch.autograd.grad(torch.softmax(x, 1).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
    (dx,) = torch.autograd.grad(torch.softmax(x, 1).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_checkpoints_inside(ran):
    x = sample(3, 4)
    with gt.enable():
        y = checkpoint(
            lambda x: torch.std_mean(x.softmax(1, torch.float32).cummax(1)[0], 0)[0],
            x,
            use_reentrant=False,
        )
        y.sum().backward()
    assert ran == {"softmax": 1, "cummax": 1, "std": 1}
    (expected,) = torch.autograd.grad(x.softmax(1, torch.float32).cummax(1)[0].std(0).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_enable_leaves_sparse_embeddings_to_torch():
    table = nn.Embedding(5, 2, sparse=True)
    with gt.enable():
        table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad.is_sparse


def test_many_threads_at_once():
    x = [sample(8, 16, seed=k) for k in range(4)]
    expected = [torch.autograd.grad(torch.softmax(t, 1).square().sum(), t)[0] for t in x]
    wrong = []

    def work(k):
        for _ in range(50):
            with gt.enable():
                (got,) = torch.autograd.grad(torch.softmax(x[k], 1).square().sum(), x[k])
            if not torch.allclose(got, expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Training


@pytest.mark.parametrize("which", ["transformer", "compositor"])
def test_training_is_the_same_to_rounding_and_to_the_bit(which, ran):
    torch.manual_seed(0)
    if which == "transformer":
        model, data = Transformer(), torch.randint(0, 32, (4, 12))
    else:
        model, data = Compositor(), (torch.randn(16, 24, 3), torch.rand(16, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the work is small, and processes of tests share the cores
    torch.use_deterministic_algorithms(True)
    try:
        plain = losses(model, data, 200, False)
        first, second = (losses(model, data, 200, True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert first == second
    assert ran
    assert plain[-1] < 0.7 * plain[0]
    assert first[-1] < 0.7 * first[0]
    # Later the transformer's training magnifies any rounding: of six seeds torch's own losses
    # strayed from those in f64 by 0.002 to 66 %, and until then by less than 5e-7.
    steps = 30 if which == "transformer" else 200
    torch.testing.assert_close(
        torch.tensor(first[:steps]), torch.tensor(plain[:steps]), rtol=1e-5, atol=0
    )
