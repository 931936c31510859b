"""The arrays of CuPy and JAX, and what is said where a library or the GPU is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import gradplan as gp
from conftest import CUDA
from covering import spec_of
from gradplan import cases, plans
from gradplan.kinds import ElementKind
from jobs import busy, gpu

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@gpu
class TestCupy:
    @pytest.fixture(autouse=True)
    def cupy(self):
        return pytest.importorskip("cupy")

    def test_in_and_out(self, cupy):
        rng = np.random.default_rng(0)
        dy, x = rng.normal(size=(2, 40, 70)).astype(np.float32)
        y = np.exp(x) / np.exp(x).sum(1, keepdims=True)
        got = gp.softmax_backward(cupy.asarray(dy), cupy.asarray(y))
        assert type(got) is cupy.ndarray
        want = gp.softmax_backward(dy, y)
        np.testing.assert_allclose(cupy.asnumpy(got), want, rtol=1e-5, atol=1e-7)
        out = cupy.full((40, 70), cupy.nan, cupy.float32)
        back = slice(None, None, -1)
        gp.softmax_backward(
            cupy.asarray(dy)[back, back], cupy.asarray(y)[back, back], out=out[back, back]
        )
        np.testing.assert_allclose(cupy.asnumpy(out), want, rtol=1e-5, atol=1e-7)

    def test_plans_scans_and_tables(self, cupy):
        rng = np.random.default_rng(1)
        dy = rng.normal(size=(5, 700)).astype(np.float64)
        got = gp.cumsum_backward(cupy.asarray(dy)[:, ::-1], axis=1)
        want = np.cumsum(dy, 1)[:, ::-1]
        np.testing.assert_allclose(cupy.asnumpy(got), want, rtol=1e-12, atol=1e-12)
        indices = rng.integers(0, 9, 5)
        got = gp.embedding_backward(cupy.asarray(dy), cupy.asarray(indices), 9)
        want = gp.embedding_backward(dy, indices, 9)
        np.testing.assert_allclose(cupy.asnumpy(got), want, rtol=1e-12)

    def test_work_runs_on_cupys_current_stream(self, cupy):
        """Even where torch's current stream is another."""
        n = 1 << 20
        dy, dx = cupy.zeros(n, cupy.float32), cupy.full(n, cupy.nan, cupy.float32)
        fresh = cupy.ones(n, cupy.float32)
        gp.lerp_backward(dy, 0.5, out=(dx, None))
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                busy()
            dy[...] = fresh
            gp.lerp_backward(dy, 0.5, out=(dx, None))
            assert not stream.done
        stream.synchronize()
        assert bool((dx == 0.5).all())
        gp.lerp_backward(fresh, 0.25, out=(dx, None), stream=stream)
        stream.synchronize()
        assert bool((dx == 0.75).all())


@gpu
class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "gpu":
            pytest.skip("JAX runs on the CPU here")
        return jax

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_in_and_out(self, jax, dtype):
        rng = np.random.default_rng(0)
        dy, x = (jax.numpy.asarray(a, dtype) for a in rng.normal(size=(2, 40, 70)))
        y = jax.nn.softmax(x, 1)
        got = gp.softmax_backward(dy * 2, y)  # dy · 2 may still be under way
        assert isinstance(got, jax.Array)
        assert (got.dtype, got.shape, got.device) == (dy.dtype, dy.shape, dy.device)
        want = gp.softmax_backward(np.asarray(dy * 2), np.asarray(y))
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(got + 1), got + 1)

    def test_embedding_and_scan(self, jax):
        rng = np.random.default_rng(1)
        dout, indices = rng.normal(size=(300, 20)).astype(np.float32), rng.integers(0, 9, 300)
        got = gp.embedding_backward(jax.numpy.asarray(dout), jax.numpy.asarray(indices, "int32"), 9)
        want = gp.embedding_backward(dout, indices, 9)
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)
        got = gp.cumsum_backward(jax.numpy.asarray(dout), axis=0)
        want = gp.cumsum_backward(dout, axis=0)
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)

    def test_inputs_may_go_while_the_work_is_under_way(self, jax):
        """JAX takes its memory back as soon as nobody holds it, and knows nothing of our stream."""
        n = 1 << 22
        gp.cumsum_backward(jax.numpy.ones(n))
        torch.cuda.synchronize()
        busy()
        got = gp.cumsum_backward(jax.numpy.ones(n))
        others = [jax.numpy.full(n, jax.numpy.nan).block_until_ready() for _ in range(4)]
        assert np.asarray(got)[0] == n
        assert len(others) == 4

    def test_on_another_stream(self, jax):
        """What is returned has been written to."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            busy(0.1)
        got = gp.cumsum_backward(jax.numpy.ones(1000), stream=side)
        assert side.query()
        np.testing.assert_array_equal(got, np.arange(1000, 0, -1))

    def test_an_output_is_refused(self, jax):
        a = jax.numpy.ones((3, 4))
        with pytest.raises(gp.InvalidProblem):
            gp.softmax_backward(a, a, out=a)


@pytest.mark.parametrize("module", ["torch", "triton"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:2"])
def test_a_missing_library_is_one_clear_sentence(monkeypatch, module, device):
    monkeypatch.setitem(sys.modules, module, None)
    desc = cases.describe(spec_of("sum"), ElementKind.F32, (4, 4), (1,))
    monkeypatch.setattr(plans, "_plans", {})
    with pytest.raises(gp.Unsupported) as caught:
        gp.ReduceBackwardPlan.select(desc, device=device)
    message = str(caught.value)
    assert message.startswith(f"device '{'cuda:0' if device == 'cuda' else device}': {module} is")
    assert "pip install 'gradplan[gpu]'" in message
    assert "\n" not in message
    assert len(message) < 160


def test_an_older_triton_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(
        gp.Unsupported, match=r"triton 3\.5\.1 is installed; .* needs 3\.6 or newer"
    ):
        gp.SoftmaxBackwardPlan.select(
            gp.SoftmaxBackwardDescriptor(
                kind="softmax", input_shape=(4, 8), softmax_axis=1, element="f32"
            ),
            device="cuda",
        )


@pytest.mark.skipif(CUDA, reason="says what a machine without a GPU says")
def test_a_missing_gpu_is_one_clear_sentence(capsys):
    from gradplan import cli

    desc = cases.describe(spec_of("sum"), ElementKind.F32, (4, 4), (1,))
    with pytest.raises(gp.Unsupported, match=r"^device 'cuda:0': torch finds no CUDA device .*$"):
        gp.ReduceBackwardPlan.select(desc, device="cuda")
    assert cli.main(["verify", "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "CUDA device" in told


@pytest.mark.skipif(CUDA, reason="says what a machine without a GPU says")
def test_without_the_interpreter_triton_on_the_cpu_says_how():
    code = (
        "import gradplan as gp, numpy as np; a = np.ones((2, 2), 'f')\n"
        "try: gp.softmax_backward(a, a, preference=gp.PlanPreference(backend='triton'))\n"
        "except gp.Unsupported as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TRITON_INTERPRET=1" in done.stdout
