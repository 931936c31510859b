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


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="needs a CUDA device")
    if not CUDA:
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
    """Send all tests of one kind and element to one process, which compiles their kernels once."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByKernel(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            problem = re.search(r"\[(\w+-(?:f32|f16|bf16|f64))\b", nodeid)
            return problem[1] if problem else nodeid

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

    def forbid():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

    yield forbid
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
