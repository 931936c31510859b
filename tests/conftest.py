"""Shared by all tests: how they are spread over processes, and the number of threads."""

from __future__ import annotations

import re

import pytest

import gradplan as gp


def pytest_addoption(parser):
    parser.addoption(
        "--complete",
        action="store_true",
        help="run every option of every kind for every element; compiles twice the kernels",
    )


@pytest.fixture
def complete(request):
    return request.config.getoption("--complete")


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
