"""JAX arrays on the CPU: every function in and out, by the library itself."""

from __future__ import annotations

import numpy as np
import pytest

import gradplan as gp
from conftest import CUDA

pytestmark = pytest.mark.skipif(CUDA, reason="JAX takes the GPU: see test_gpu_arrays")

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

SHAPE = (3, 40, 5)
FUNCTIONS = {
    "softmax": lambda dy, x: gp.softmax_backward(dy, x, axis=1),
    "log_softmax": lambda dy, x: gp.log_softmax_backward(dy, x),
    "lerp": lambda dy, x: gp.lerp_backward(dy, 0.3),
    "cumsum": lambda dy, x: gp.cumsum_backward(dy, axis=0),
    "cumprod": lambda dy, x: gp.cumprod_backward(dy, x, axis=1),
    "cummax": lambda dy, x: gp.cummax_backward(dy, x, ties="last"),
    "cummin": lambda dy, x: gp.cummin_backward(dy, x, axis=1),
    "logcumsumexp": lambda dy, x: gp.logcumsumexp_backward(dy, x, axis=1, reverse=True),
    "sum": lambda dy, x: gp.sum_backward(dy[:, 0], SHAPE, axis=1),
    "mean": lambda dy, x: gp.mean_backward(dy[0], SHAPE, axis=0),
    "max": lambda dy, x: gp.max_backward(dy[:, :1], x, x.max(1, keepdims=True), 1, keepdims=True),
    "min": lambda dy, x: gp.min_backward(dy[0, 0, 0], x, x.min()),
    "prod": lambda dy, x: gp.prod_backward(dy[:, 0], x, axis=1),
    "norm2": lambda dy, x: gp.norm2_backward(dy[:, 0], x, x[:, 1], axis=1),
    "logsumexp": lambda dy, x: gp.logsumexp_backward(dy[0], x, x[1], axis=0),
    "var": lambda dy, x: gp.var_backward(dy[:, :, 0], x, axis=2),
    "std": lambda dy, x: gp.std_backward(dy[0], x, x[1], axis=0),
    "embedding": lambda dy, x: gp.embedding_backward(
        dy, (np if isinstance(dy, np.ndarray) else jnp).arange(120).reshape(3, 40) % 7, 9
    ),
}


@pytest.fixture(params=["float32", "float16", "bfloat16", "float64"])
def arrays(request):
    """dy and x in one type."""
    rng = np.random.default_rng(0)
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield tuple(jnp.asarray(a).astype(request.param) for a in rng.normal(size=(2, *SHAPE)))
    jax.config.update("jax_enable_x64", before)


def test_no_function_is_left_out():
    names = {name.removesuffix("_backward") for name in gp.__all__ if name.endswith("_backward")}
    assert {*FUNCTIONS} == names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_numpy(name, arrays):
    def results(given):
        made = FUNCTIONS[name](*given)
        return made if isinstance(made, tuple) else (made,)

    for got, want in zip(results(arrays), results(map(np.asarray, arrays)), strict=True):
        assert isinstance(got, jax.Array)
        assert (got.dtype, got.shape, got.device) == (arrays[0].dtype, want.shape, arrays[0].device)
        assert np.asarray(got).tobytes() == want.tobytes()


def test_arrays_are_read_where_they_lie_and_left_alone(arrays):
    dy, x = arrays
    before = np.asarray(x).tobytes()
    made = gp.cumprod_backward(dy * 2, x)  # dy · 2 may still be under way
    want = gp.cumprod_backward(np.asarray(dy) * 2, np.asarray(x))
    assert np.asarray(made).tobytes() == want.tobytes()
    assert np.asarray(x).tobytes() == before
    assert isinstance(made + 1, jax.Array)


def test_an_output_is_refused(arrays):
    dy, x = arrays
    with pytest.raises(gp.InvalidProblem, match=r"dx is read-only.* JAX .* without out="):
        gp.softmax_backward(dy, x, out=x)


def test_a_trace_is_refused(arrays):
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(gp.InvalidProblem, match=r"outside jax\.jit, jax\.vmap and jax\.grad"):
            transform(lambda dy: gp.cumsum_backward(dy))(arrays[0])


def test_rank_0():
    got = gp.cumsum_backward(jnp.float32(2))
    assert isinstance(got, jax.Array)
    assert (got.shape, float(got)) == ((), 2.0)
