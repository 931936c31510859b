"""Problems in Triton's interpreter: what the tests of the GPU's kernels on CPU memory share."""

from __future__ import annotations

import pytest

import gradplan as gp
from conftest import CUDA
from covering import HALVES, spec_of
from gradplan import cases
from gradplan.cases import Case, Layout

MARKS = [
    pytest.mark.skipif(CUDA, reason="Triton compiles for the GPU in this process"),
    # NumPy warns where a GPU computes inf − inf without a word.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]

TRITON = gp.PlanPreference(backend="triton")


def check(some):
    assert_none([str(got) for case in some if not (got := cases.run_plan(case, "cpu", TRITON)).ok])


def assert_none(missed):
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


def outcome_of(problem, launch_it):
    """Launch once, within the workspace that is stated: what misses the guarantee, if it does."""
    launch_it()
    plan = problem.plan("cpu", TRITON)
    assert launch_it.workspace_size <= plan.workspace_size
    outcome = problem.outcome(plan.precision_guarantee.relative_error)
    return [] if outcome.ok else [str(outcome)]


def settle(problem):
    """Run a problem whose contents were changed, and hold it to its guarantee."""
    plan = problem.plan("cpu", TRITON)
    plan.run(problem.args())
    outcome = problem.outcome(plan.precision_guarantee.relative_error)
    assert outcome.ok, str(outcome)
    return outcome


def bound(problem):
    return problem.plan("cpu", TRITON).bind(problem.args())


def long_rows(element):
    """cumsum of halves in rows of a thousand and more, whichever kernel takes them."""
    some = [
        ((1, 1024), False, Layout.CONTIGUOUS),  # full tiles
        ((3, 1025), True, Layout.OFFSET),  # a last one of one element
        ((3, 1087), True, Layout.NEGATIVE),  # ... of all but one, walked the other way
        ((3, 1568), False, Layout.CONTIGUOUS),  # rows of full tiles
    ]
    for (rows, n), reverse, layout in some[HALVES.index(element) :: 2]:
        desc = cases.describe(spec_of("cumsum"), element, (rows, n), (1,), reverse=reverse)
        yield Case(desc=desc, layout=layout, seed=n)
