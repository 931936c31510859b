"""`gradplan.torch` on a GPU."""

from __future__ import annotations

import itertools
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

import gradplan as gp  # noqa: E402
import gradplan.torch as gt  # noqa: E402
from gradplan.torch import kernels  # noqa: E402
from gradplan.torch.operators import OPERATORS  # noqa: E402
from opinfo import COVERED, leaves, op_db, outputs  # noqa: E402
from torch_calls import (  # noqa: E402
    CALLS,
    Compositor,
    Transformer,
    losses,
    operator_arguments,
    sample,
)

# What torch's compilers warn of is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SAMPLES = 6


def on_gpu(*shape, dtype=torch.float32, seed=0):
    return sample(*shape, seed=seed).detach().to("cuda", dtype).requires_grad_()


def in_a_graph(step):
    """A graph of a step, after some on another stream, and what the step gives in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.parametrize("key", COVERED, ids="-".join)
def test_samples_of_torch(key, complete):
    op, (ours, _) = op_db()[key], COVERED[key]
    found = op.sample_inputs("cuda", torch.float64, requires_grad=True)
    for one in found if complete else itertools.islice(found, SAMPLES):
        for given in (one, one.noncontiguous()):
            args = (given.input, *given.args)
            expected, got = op(*args, **given.kwargs), ours(*args, **given.kwargs)
            for a, b in zip(outputs(expected), outputs(got), strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
            dys = [torch.randn_like(a) for a in outputs(expected)]
            theirs = torch.autograd.grad(outputs(expected), leaves(args), dys, allow_unused=True)
            mine = torch.autograd.grad(outputs(got), leaves(args), dys, allow_unused=True)
            for a, b in zip(theirs, mine, strict=True):
                torch.testing.assert_close(b, a, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_second_order(name):
    x = on_gpu(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: CALLS[name](gt, x), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: CALLS[name](gt, x), x, fast_mode=True)


@pytest.mark.parametrize("kind", OPERATORS, ids=str)
def test_opcheck(kind):
    args = [
        a.detach().clone().requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in operator_arguments(kind, "cuda")
    ]
    from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

    checks = set(DEFAULT_TEST_UTILS)
    if kind == "embedding" and torch.__version__ < (2, 12):
        # An assertion inside torch fails while it traces: integers beside gradients, on CUDA.
        checks -= {"test_aot_dispatch_dynamic"}
    torch.library.opcheck(OPERATORS[kind].op, tuple(args), test_utils=tuple(checks))


@pytest.mark.parametrize("name", CALLS)
def test_compiled_whole(name, ran):
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = torch.compile(lambda x: call(gt, x * 1) * 2, fullgraph=True, dynamic=True)
    for shape in ((8, 16), (24, 40)):
        x = on_gpu(*shape)
        y = compiled(x)
        dy = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, dy)
        (expected,) = torch.autograd.grad(call(torch, x * 1) * 2, x, dy)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CALLS)
def test_halves_are_no_less_accurate_than_torch(name, dtype):
    call = CALLS[name]
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    x = on_gpu(64, 96, dtype=dtype)
    if "prod" in name:
        x = (x.detach() / 10).exp().requires_grad_()
    mine, theirs = call(gt, x), call(torch, x)
    assert torch.equal(mine, theirs)
    dy = torch.randn_like(mine)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(call(torch, wide), wide, dy.double())
    (got,) = torch.autograd.grad(mine, x, dy)
    (torchs,) = torch.autograd.grad(theirs, x, dy)
    error, theirs_error = (got.double() - exact).norm(), (torchs.double() - exact).norm()
    assert error <= theirs_error + rounding * exact.norm()


def test_expanded_gradients_allocate_nothing_but_the_result():
    x = on_gpu(512, 512)
    for name in ("softmax", "cumsum", "cumprod", "var", "logsumexp"):
        y = CALLS[name](gt, x)
        dy = torch.ones((), device="cuda").expand(y.shape)
        torch.autograd.grad(y, x, dy, retain_graph=True)  # compiled, loaded
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, x, dy)
        assert torch.cuda.max_memory_allocated() - before <= x.nbytes + 2**17, name


def peak(call, *shape):
    """What a forward and backward pass takes at most, beside what is kept from pass to pass."""
    x = on_gpu(*shape)
    most = 0
    for turn in range(5):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call(x)
        torch.autograd.grad(y, x, torch.ones_like(y))
        del y
        if turn:  # in the first, kernels are loaded
            # The most of several: autograd's thread may let go of its last tensor a moment
            # late, which is then among what was there before.
            most = max(most, torch.cuda.max_memory_allocated() - before)
    return most


@pytest.mark.parametrize("name", CALLS)
def test_peak_memory_is_not_above_torchs(name):
    theirs = peak(lambda x: CALLS[name](torch, x), 1024, 1024)
    assert peak(lambda x: CALLS[name](gt, x), 1024, 1024) <= theirs


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_peak_memory_of_columns_is_not_above_torchs(name):
    """Whose gradient takes a workspace, and torch's none."""
    theirs = peak(lambda x: getattr(torch, name)(x, 0), 8192, 2048)
    assert peak(lambda x: getattr(gt, name)(x, 0), 8192, 2048) <= theirs


def test_threads_on_one_stream_do_not_share_a_workspace():
    some = [on_gpu(8192, 256 + 64 * k, seed=k) for k in range(4)]
    expected = [torch.autograd.grad(torch.log_softmax(x, 0).square().sum(), x)[0] for x in some]
    failures = []

    def work(x, wanted):
        try:
            for _ in range(20):
                (got,) = torch.autograd.grad(gt.log_softmax(x, 0).square().sum(), x)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
        except BaseException as error:
            failures.append(error)

    workers = [
        threading.Thread(target=work, args=pair) for pair in zip(some, expected, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


@pytest.mark.parametrize("name", ["cumsum", "log_softmax"])
def test_compiled_into_graphs_of_torchs_own(name):
    """`reduce-overhead` keeps account of all memory in its pool."""
    torch._dynamo.reset()
    shape = (1, 1 << 20) if name == "cumsum" else (8192, 256)
    x = on_gpu(*shape)
    function, dim = getattr(gt, name), shape.index(max(shape))
    compiled = torch.compile(lambda x: function(x * 1, dim) * 2, mode="reduce-overhead")
    expected = torch.autograd.grad((function(x, dim) * 2).square().sum(), x)[0]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)
        del got


def test_a_captured_workspace_is_the_graphs_own():
    x = on_gpu(8192, 256)
    dy = torch.randn(8192, 256, device="cuda")

    def step():
        return torch.autograd.grad(gt.log_softmax(x, 0), x, dy)[0]

    graph, captured = in_a_graph(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
        ours = step()  # beside it, on the same stream
        torch.testing.assert_close(captured, ours, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "mean", "lerp"])
def test_a_small_one_is_torchs_own(name):
    def call(library, x):
        return library.lerp(x, x, 0.5) if name == "lerp" else getattr(library, name)(x, -1)

    small, large = on_gpu(16, 128), on_gpu(128, 128)
    own = type(call(torch, small).grad_fn)
    assert type(call(gt, small).grad_fn) is own
    for x in (large, small.detach().half().requires_grad_()):
        assert type(call(gt, x).grad_fn) is not own


def test_products_do_not_wait_for_the_device():
    x = on_gpu(64, 64)
    calls = [lambda: gt.prod(x, 1), lambda: gt.prod(x), lambda: gt.cumprod(x, 0)]
    for call in calls:
        torch.autograd.grad(call().sum(), x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            torch.autograd.grad(call().sum(), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph():
    x = on_gpu(64, 96)
    dy = torch.randn(64, 96, device="cuda")

    def step():
        y = gt.cumprod(gt.softmax(x, 1), 1)
        return torch.autograd.grad(y, x, dy)[0]

    graph, captured = in_a_graph(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(dy))
    graph.replay()
    torch.testing.assert_close(captured, step())


def test_side_streams_and_threads():
    x = on_gpu(256, 256)
    expected = torch.autograd.grad(torch.cumsum(x, 1).square().sum(), x)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (got,) = torch.autograd.grad(gt.cumsum(x, 1).square().sum(), x)
    stream.synchronize()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    gt.cumsum(x, 1).square().sum().backward()  # on the engine's own thread
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CALLS)
def test_autocast_follows_torch(name, dtype):
    x = on_gpu(16, 32, dtype=dtype)
    with torch.autocast("cuda", dtype):
        mine, theirs = CALLS[name](gt, x), CALLS[name](torch, x)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    (got,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (mine, theirs))
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_embedding_is_deterministic_and_full():
    weight = torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    indices = torch.zeros(4096, dtype=torch.int64, device="cuda")
    (first,) = torch.autograd.grad(gt.embedding(indices, weight).sum(), weight)
    assert (first[0] == 4096).all()
    big = on_gpu(100, 64)
    keys = torch.randint(0, 100, (8192,), device="cuda")
    dy = torch.randn(8192, 64, device="cuda")
    runs = [torch.autograd.grad(gt.embedding(keys, big), big, dy)[0] for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    (theirs,) = torch.autograd.grad(F.embedding(keys, big), big, dy)
    torch.testing.assert_close(runs[0], theirs, rtol=1e-4, atol=1e-4)


def test_weights_of_lerp_share_a_program():
    """But for extreme ones; and the plans of others keep their weight."""
    a, b = on_gpu(128, 64), on_gpu(128, 64, seed=1)
    dy = torch.randn(128, 64, device="cuda")
    gp.lerp_backward(dy, 0.5)
    torch.autograd.grad(gt.lerp(a, b, 0.5), (a, b), dy)
    before = len(kernels._recipes)
    for weight in (0.25, 0.5, -0.0, 1.0, 3.5, 0.1):
        for asked in ((a, b), (a,), (b,)):
            got = torch.autograd.grad(gt.lerp(a, b, weight), asked, dy)
            wanted = torch.autograd.grad(torch.lerp(a, b, weight), asked, dy)
            torch.testing.assert_close(got, wanted)
    assert len(kernels._recipes) <= before + 2  # da or db alone
    for one in gp.lerp_backward(dy, 0.5):
        assert torch.equal(one, 0.5 * dy)
    for weight in (1e-35, 1e35):
        got = torch.autograd.grad(gt.lerp(a, b, weight), (a, b), dy)
        torch.testing.assert_close(got, torch.autograd.grad(torch.lerp(a, b, weight), (a, b), dy))


@pytest.mark.parametrize("which", ["transformer", "compositor"])
def test_training(which, ran, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    if which == "transformer":
        model, data = Transformer().cuda(), torch.randint(0, 32, (4, 12), device="cuda")
    else:
        model = Compositor().cuda()
        data = (torch.randn(16, 24, 3, device="cuda"), torch.rand(16, 3, device="cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (losses(model, data, 200, True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    plain = losses(model, data, 200, False)
    assert first == second
    assert ran
    torch.testing.assert_close(torch.tensor(first), torch.tensor(plain), rtol=1e-2, atol=1e-4)
