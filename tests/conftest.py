"""Shared by all tests: how they are spread over processes, where kernels run, and threads."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter

import pytest

import gradplan as gp

try:
    import torch

    CUDA = torch.cuda.is_available()
except ImportError:
    CUDA = False
# Else JAX takes three quarters of a GPU's memory in every test process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if not CUDA:
    # Triton reads it once, when it is imported: its kernels then run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption(
        "--complete",
        action="store_true",
        help="run every option of every kind for every element; compiles twice the kernels",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run the whole grid in Triton's interpreter too, for hours",
    )


# What takes longest on a GPU, so that no process is left with it at the end: parts of the names of
# tests.
LONG = (
    "[large-",
    "large_shapes[cum",
    "large_shapes[log_cumsum_exp",
    "small_parts_in_shared_memory",
    "large_shapes",
    "small_tiles",
    "test_torch_gpu",
    "test_grid[cum",
    "test_grid",
)


def length(nodeid):
    """Where a test stands among the long ones; the others come last."""
    return next((place for place, part in enumerate(LONG) if part in nodeid), len(LONG))


def scope(nodeid, apart):
    """What goes to one process: the tests of a kind and element, which share kernels; `apart`, on a
    GPU, each test function of them, for there few are shared and they take longer."""
    problem = re.search(r"\[(\w+-(?:f32|f16|bf16|f64))\b", nodeid)
    if not problem:
        return nodeid
    # What fills a GPU stays together.
    together = not apart or problem[1].startswith("large-")
    return problem[1] if together else f"{nodeid.partition('[')[0]} {problem[1]}"


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="needs a CUDA device")
    if CUDA:
        items.sort(key=lambda item: length(item.nodeid))
    else:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(missing)


@pytest.fixture
def complete(request):
    return request.config.getoption("--complete")


@pytest.fixture
def exhaustive(request):
    return request.config.getoption("--exhaustive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Send tests that share kernels to one process, which compiles them once."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    if CUDA:  # the order stands already
        config.option.loadscopereorder = False

    class ByKernel(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope(nodeid, apart=CUDA)

    return ByKernel(config, log)


@pytest.fixture
def threads():
    """`gp.set_num_threads`, undone afterwards."""
    before = gp.get_num_threads()
    yield gp.set_num_threads
    gp.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch):
    """How often `gradplan.torch` ran the gradient of each kind."""
    from gradplan.torch.operators import OPERATORS

    count = Counter()
    for kind, operator in OPERATORS.items():

        def run(*args, kind=kind, run=operator.run, **more):
            count[kind.value] += 1
            return run(*args, **more)

        monkeypatch.setattr(operator, "run", run)
    return count


@pytest.fixture(autouse=True)
def counters():
    """The streams of each test on a GPU have none yet."""
    if CUDA:
        from gradplan.backends.gpu import streams

        torch.cuda.synchronize()
        streams._counters.clear()


@pytest.fixture
def no_more_memory():
    """A function that forbids torch to take any more memory of the GPU; undone afterwards."""
    held = []

    def forbid():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        # What other tests have left may lie in large blocks, the rest of which is free.
        size = 1 << 36
        while size >= 1 << 20:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError:
                size //= 2

    yield forbid
    held.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
