"""The cases of the GPU's tests meet what they claim to: told from programs, without a GPU."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest

from covering import (
    LONG,
    LONGEST,
    SPECS,
    large,
    named_kernels,
    problems,
    producible,
    signature,
    wanted,
)
from gradplan import cases, verify
from gradplan.backends.gpu import programs
from gradplan.cases import Case, Layout
from gradplan.kinds import OpCategory
from gradplan.registry import ELEMENTS, Engine
from gradplan.views import view

ARCH = "sm_90"


def program_of(case):
    return programs.prepare(case.desc, cases.strides_of(case), ARCH, 0)


@problems()
def test_large_cases_meet_every_variant(spec, element):
    """With the thresholds of a real GPU, for every kind and every element."""
    met = {signature(program_of(case)) for case in large(spec, element, ARCH)}
    assert met >= producible(ARCH)[spec.kind, element]
    assert {(variant, layout) for variant, layout, _, _ in met} >= wanted(spec, element, ARCH)


def test_large_cases_meet_every_kernel_and_long_shape():
    kernels, shapes, long = set(), set(), {}
    for spec in SPECS:
        for element in ELEMENTS:
            for case in large(spec, element, ARCH):
                program = program_of(case)
                kernels |= {step.kernel for step in (*program.steps, *program.apart)}
                shape, axes = case.desc.shape_and_axes
                if spec.category is not OpCategory.EMBEDDING:
                    shapes.add((shape, axes))
                    long[element] = max(long.get(element, 0), prod(shape[k] for k in axes))
    assert kernels == named_kernels()
    assert shapes >= {*LONG, LONGEST}
    assert min(long.values()) >= 300_001


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("ties", ["first", "last"])
@pytest.mark.parametrize("kind", ["cummax", "cummin"])
def test_short_rows_side_by_side_are_read_without_y(kind, ties, element):
    """By a thread each; longer ones, and few beside each other, are not."""
    spec = next(spec for spec in SPECS if spec.kind == kind)
    for shape, alone in (
        ((2048, 64, 512), True),
        ((9, 33, 250), True),
        ((2048, 65, 512), False),
        ((2048, 64, 16), False),
    ):
        desc = cases.describe(spec, element, shape, (1,), ties=ties)
        made = program_of(Case(desc=desc))
        kernels = [step.kernel for step in made.steps]
        assert (kernels == ["alone.scan_alone"]) is alone, (shape, kernels)
        if alone:  # all rows, by one launch
            assert (made.reads["y"], made.workspace_bytes) == (0, 0)
            assert made.steps[0].grid * dict(made.steps[0].constants)["R"] >= shape[0] * shape[2]


@problems([spec for spec in SPECS if spec.ties and spec.engine is Engine.RECURRENCE], ELEMENTS[:3])
def test_rows_that_a_warp_takes_are_read_without_y(spec, element):
    for n, alone in ((1024, True), (256, True), (1000, False), (128, False), (2048, False)):
        made = program_of(Case(desc=cases.describe(spec, element, (300, n), (1,))))
        kernels = [step.kernel for step in made.steps]
        assert (kernels == ["row_alone.scan_row_alone"]) is alone, (n, kernels)
        if alone:
            assert (made.reads["y"], made.workspace_bytes, made.steps[0].grid) == (0, 0, 300)


@pytest.mark.parametrize("layout", [one for one in Layout if one is not Layout.BROADCAST])
def test_strides_are_told_without_arrays(layout):
    for spec in SPECS:
        if layout not in cases.layouts_of(spec):
            continue
        for case in list(cases.grid(spec, ELEMENTS[0], layout))[::5]:
            arrays = cases.Problem(case).arrays
            found = {name: view(array).strides for name, array in arrays.items()}
            assert cases.strides_of(case) == found, case


def brought(case: Case):
    desc = case.desc
    names = ("ties", "reverse", "param", "correction", "index", "accumulate", "padding_idx")
    names += ("scale_grad_by_freq",)
    return tuple(str(getattr(desc, name, "")) for name in names), case.without


@problems()
def test_turns_leave_out_no_layout_shape_option_or_data(spec, element):
    whole, some = set(), set()
    for layout in cases.layouts_of(spec):
        for met, turns in ((whole, False), (some, True)):
            for case in cases.grid(spec, element, layout, turns=turns):
                met |= {layout, case.data, brought(case)}
                if layout is Layout.CONTIGUOUS:
                    met.add(case.desc.shape_and_axes)
    assert some == whole


@problems(SPECS, ELEMENTS[:1])
def test_turns_bring_every_layout_several_shapes(spec, element):
    for layout in cases.layouts_of(spec):
        met = {
            case.desc.shape_and_axes
            for one in ELEMENTS
            for case in cases.grid(spec, one, layout, turns=True)
        }
        assert len(met) >= min(3, len(cases.shapes_of(spec, layout)))


def test_tasks_of_a_gpu_hold_every_case_once(monkeypatch):
    monkeypatch.setattr(verify, "find", lambda *_: SimpleNamespace(here=True))
    counts = []
    for complete in (False, True):
        todo = verify.tasks(device="cuda", complete=complete)
        found = [case for task in todo for case in task.cases()]
        due = [
            case
            for spec in SPECS
            for element in ELEMENTS
            for layout in cases.layouts_of(spec)
            for case in cases.grid(spec, element, layout, turns=not complete)
        ]
        assert sorted(map(str, found)) == sorted(map(str, due))
        counts.append(len(found))
    assert 3 * counts[0] < counts[1]
