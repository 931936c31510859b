"""Explanations: why a kernel was chosen, told by the plans and printed by `gradplan explain`."""

from __future__ import annotations

import json
import re

import pytest

import gradplan as gp
from gradplan import cli
from gradplan.backends.gpu.choices import others
from gradplan.backends.gpu.programs import choose
from gradplan.backends.gpu.table import table_of
from gradplan.bench import bandwidth
from gradplan.bench.problems import FAMILIES
from gradplan.bench.workloads import LAYOUTS, strides_of
from gradplan.cases import describe
from gradplan.geometry import told_strides
from gradplan.kinds import ElementKind
from gradplan.registry import KINDS, Engine

SPECS = {spec.kind.value: spec for spec in KINDS.values()}


def plan(kind, shape, axis, device="sm_90", element=ElementKind.BF16, **fields):
    spec = SPECS[kind]
    desc = describe(spec, element, shape, (axis,), **fields)
    return FAMILIES[spec.category][0].select(desc, device=device)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_80:108"])
@pytest.mark.parametrize("kind", SPECS)
def test_a_gpu_that_is_not_here_can_be_asked(kind, arch):
    shape = (1000, 64, 300) if kind == "embedding" else (64, 4096)
    chosen = plan(kind, shape, 1, arch)
    assert chosen.sku.arch == arch.partition(":")[0]
    assert chosen.sku.backend is gp.BackendKind.TRITON
    told = chosen.explanation()
    assert told.text() == chosen.explain()
    assert told.moved >= told.fewest > 0
    json.dumps(told.plain())


def test_a_gpu_that_is_not_here_runs_nothing():
    import numpy as np

    dy = np.ones((4, 8), np.float32)
    chosen = plan("softmax", (4, 8), 1, element=ElementKind.F32)
    args = gp.SoftmaxBackwardArgs(dy=dy, y=dy, dx=np.empty_like(dy))
    with pytest.raises(gp.InvalidProblem, match="device sm_90, got cpu"):
        chosen.run(args)
    preference = gp.PlanPreference(backend="numba")
    with pytest.raises(gp.Unsupported, match="does not run on a GPU"):
        gp.SoftmaxBackwardPlan.select(chosen.descriptor, device="sm_90", preference=preference)
    for device in ("sm_75", "sm_9", "sm_90:x"):
        with pytest.raises(gp.Unsupported, match="expected 'cpu', 'cuda'"):
            gp.SoftmaxBackwardPlan.select(chosen.descriptor, device=device)


SCAN_VARIANTS = ("walked", "held", "resident", "chained", "tiled", "lagged", "split")
ROW_VARIANTS = ("resident", "cluster", "held", "tall", "lagged", "split")


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "variant"),
    [
        ("softmax", (8192, 8192), 1, "resident"),
        ("max", (1024, 131072), 1, "cluster"),
        ("softmax", (8192, 8192), 0, "held"),
        ("softmax", (64, 1 << 20), 1, "held"),
        ("softmax", (1, 1 << 27), 1, "lagged"),
        ("cumsum", (8192, 1024), 1, "resident"),
        ("cumsum", (8192, 8192), 1, "tiled"),
        ("cumsum", (64, 1 << 18), 1, "chained"),
        ("cumsum", (1 << 20, 64), 0, "lagged"),
        ("cumsum", (1024, 1 << 17), 1, "walked"),
        ("cumsum", (8192, 8192), 0, "walked"),
        ("cumsum", (1, 1 << 27), 1, "held"),
    ],
)
def test_every_other_variant_has_its_reason(kind, shape, axis, variant):
    told = plan(kind, shape, axis).explanation()
    assert told.sku.variant == variant
    tried = ROW_VARIANTS if kind != "cumsum" else SCAN_VARIANTS
    assert [other.variant for other in told.others] == [v for v in tried if v != variant]
    assert all(len(other.why) > 10 for other in told.others)


@pytest.mark.parametrize(
    ("kind", "shape", "apart", "layout"),
    [
        ("softmax", (4096, 4), "dy, y, dx", "rows, beside"),
        ("max", (4096, 4), "x, dx", "rows, beside"),
        ("softmax", (4096, 16), None, "rows, turned"),
        ("softmax", (4096, 100), None, "rows, unit"),
    ],
)
def test_short_rows_on_the_cpu(kind, shape, apart, layout):
    told = plan(kind, shape, 1, "cpu", ElementKind.F32).explanation()
    assert f"{told.sku.layout}, {told.sku.variant}" == layout
    assert ("rows are short" in told.why) == ("unit" not in layout)
    assert told.read == told.fewest_read
    reasons = {other.variant: other.why for other in told.others}
    assert reasons.get("unit") == (apart and f"{apart}: not 1 apart along the inner loop")


@pytest.mark.parametrize("kind", ["log_softmax", "prod"])
def test_rows_that_lie_side_by_side_on_the_cpu_are_not_turned_round(kind):
    desc = plan(kind, (16, 4096), 0, "cpu").descriptor
    strides = {op.name: (4096, 2) for op in desc.operands}
    told = FAMILIES[desc.category][0].select(desc).explanation(strides)
    assert (told.sku.layout, told.sku.variant) == ("columns", "any")
    assert told.read >= 2 * told.fewest_read
    assert "short" not in told.why


@pytest.mark.parametrize("shape", [(1024, 2048), (8192, 1024)])
def test_what_comes_after_a_scan_in_registers_has_its_cost(shape):
    told = plan("cumsum", shape, 1).explanation()
    assert told.sku.variant == "resident"
    costs = {other.variant: other.why for other in told.others}
    assert not any("not for this kind" in costs[name] for name in ("tiled", "split"))


def test_a_reason_names_a_threshold_that_decides():
    # What is told must be so: with the field set to what it names, the variant is taken.
    from dataclasses import replace

    chosen = plan("log_softmax", (64, 1 << 20), 1, element=ElementKind.F32)
    told = {other.variant: other.why for other in chosen.explanation().others}
    table, strides = table_of("sm_90"), strides_of(chosen.descriptor, "contiguous")
    for variant in ("resident", "cluster"):
        value, field = re.search(r"it would take ([\d,]+) \((\w+)\)", told[variant]).groups()
        number = int(value.replace(",", ""))
        changed = choose(chosen.descriptor, strides, replace(table, **{field: number}))
        assert changed.variant == variant
        below = choose(chosen.descriptor, strides, replace(table, **{field: number // 2}))
        assert below.variant != variant
    assert "bytes more" in told["split"]
    first = plan("softmax", (64, 2048, 512), 1, element=ElementKind.F32).explanation().others
    assert "held_first" in next(other.why for other in first if other.variant == "cluster")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SPECS)
def test_reasons_are_found_for_every_kind_and_layout(kind, layout):
    spec = SPECS[kind]
    shape = (1000, 64, 300) if kind == "embedding" else (300, 7, 40000)
    desc = describe(spec, ElementKind.F32, shape, (2,))
    strides = strides_of(desc, layout)
    for arch in ("sm_80", "sm_90", "interpreter"):
        found = others(desc, strides, table_of(arch))
        assert bool(found) == (spec.engine in (Engine.ROW_STATE, Engine.RECURRENCE))
    assert FAMILIES[spec.category][0].select(desc).explanation(strides).others


@pytest.mark.parametrize("kind", ["cumprod", "log_cumsum_exp"])
def test_a_scan_that_is_run_again_tells_why(kind):
    """Whole rows stay up to a threshold of their own; what is cut would be read once more."""
    desc = describe(next(s for s in KINDS.values() if s.kind == kind), ElementKind.BF16,
                    (8192, 8192), (1,))  # fmt: skip
    strides = strides_of(desc, "contiguous", ["y"])
    told = {other.variant: other.why for other in others(desc, strides, table_of("sm_90"))}
    assert told["resident"].endswith("it would take 8,192 (forward_lines)")
    assert told["split"] == f"it would read {2 * 8192 * 8192 * 2:,} bytes more"


def test_arrays_left_out_are_told():
    chosen = plan("cumprod", (64, 512), 1)
    strides = strides_of(chosen.descriptor, "contiguous", ["y"])
    told = chosen.explanation(strides, "arrays without y")
    assert told.sku.variant.endswith("recomputed")
    assert "from_y" in {other.variant for other in told.others}
    assert told.arrays == "arrays without y"
    with pytest.raises(gp.InvalidProblem, match="needs x"):
        chosen.explanation(strides_of(chosen.descriptor, "contiguous", ["x"]))
    with pytest.raises(gp.InvalidProblem, match="rank 2, got 1"):
        chosen.explanation({**strides, "dy": (1,)})


def explained(capsys, *argv):
    code = cli.main(["explain", *argv])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_the_command_prints_what_the_plan_tells(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    argv = ["softmax", "--shape", "8192x8192", "--axis", "0", "--dtype", "bf16", "--arch", "sm_90"]
    shown = explained(capsys, *argv)
    for word in ("softmax_backward_bf16_columns_held@sm_90", "resident:", "cluster:", "split:"):
        assert word in shown
    for word in ("1.00 × the least", "recorded on NVIDIA H200", "workspace", "relative error"):
        assert word in shown
    found = json.loads(explained(capsys, *argv, "--json", "--bandwidth", "1000"))
    assert found["floor_s"] == pytest.approx(3 * 2 * 8192**2 / 1e12)
    assert found["bytes"]["fewest_read"] == 2 * 2 * 8192**2
    assert found["variant"] == "held"
    others = {other["variant"] for other in found["others"]}
    assert others == {"resident", "cluster", "tall", "lagged", "split"}


@pytest.mark.parametrize("shape", ["32768x2048", "300000x100"])
def test_the_command_says_why_rows_are_not_held(capsys, shape):
    """They would be in too many parts, or are so few that strips of them are narrow."""
    argv = ["softmax", "--shape", shape, "--axis", "0", "--dtype", "f32", "--arch", "sm_90"]
    found = json.loads(explained(capsys, *argv, "--json"))
    assert found["variant"] == "tall"
    told = {other["variant"]: other["why"] for other in found["others"]}
    if shape == "32768x2048":
        assert "tall_parts" in told["held"]
    else:
        assert "it would take" in told["held"]


def test_the_command_says_why_a_row_is_not_kept_whole(capsys):
    argv = ["max", "--shape", "1024x32768", "--axis", "1", "--dtype", "f32", "--arch", "sm_90"]
    found = json.loads(explained(capsys, *argv, "--json"))
    assert found["variant"] == "cluster"
    told = {other["variant"]: other["why"] for other in found["others"]}
    assert "cluster_first" in told["resident"]


def test_the_command_measures_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(bandwidth.clocks, "cpu_copy_bandwidth", lambda *_, **__: 12e9)
    found = json.loads(explained(capsys, "mean", "--shape", "64x1000x3", "--axis", "0,2", "--json"))
    assert found["bandwidth"] == 12e9
    assert found["bytes"]["fewest_read"] == 4 * 1000
    assert found["sku"].startswith("numba:mean_backward_f32")


def test_bandwidth_is_measured_without_torch():
    assert 1e8 < bandwidth.clocks.cpu_copy_bandwidth(1, 1 << 16, with_torch=False) < 1e13


@pytest.mark.parametrize(
    "argv",
    [
        ["cummax", "--ties", "last", "--reverse", "--without", "y", "--layout", "transposed"],
        ["var", "--correction", "0", "--layout", "sliced"],
        ["lerp", "--param", "0.1", "--without", "db"],
    ],
)
def test_options_of_kinds(capsys, argv):
    more = ["--shape", "32x64", "--arch", "sm_90", "--json"]
    assert json.loads(explained(capsys, *argv, *more))["sku"]


def test_an_embedding_has_words_of_its_own(capsys):
    argv = ["embedding", "--shape", "100x8", "--num-indices", "50", "--index", "i32", "--overwrite"]
    found = json.loads(explained(capsys, *argv, "--padding-idx", "3", "--arch", "sm_80", "--json"))
    assert found["bytes"]["fewest_read"] == 50 * 8 * 4 + 50 * 4
    assert found["bandwidth"] is None
    assert "not known" in explained(capsys, *argv, "--arch", "sm_80")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["softmx", "--shape", "8"], "no kind 'softmx' (did you mean 'softmax'?)"),
        (["softmax"], "--shape"),
        (["softmax", "--shape", "8y8"], "expected a shape like 8192x8192, got '8y8'"),
        (["softmax", "--shape", "8x8", "--axis", "2"], "out of range"),
        (["softmax", "--shape", "8x8", "--axis", "0,1"], "one axis"),
        (["softmax", "--shape", "8x8", "--dtype", "int8"], "int8"),
        (["softmax", "--shape", "8x8", "--device", "tpu"], "device 'tpu'"),
        (["softmax", "--shape", "8x8", "--ties", "first"], "softmax has none"),
        (["softmax", "--shape", "8x8", "--without", "x"], "softmax has dy, y, dx"),
        (["softmax", "--shape", "8x8", "--without", "y"], "needs y"),
        (["softmax", "--shape", "8x8", "--processors", "8"], "--arch"),
        (["softmax", "--shape", "8x8", "--bandwidth", "0"], "above 0"),
        (["softmax", "--shape", "1x1x1x1x1x1x1x1x1"], "rank 9"),
        (["embedding", "--shape", "8x8"], "--num-indices"),
        (["lerp", "--shape", "8", "--backend", "cuda"], "BackendKind"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(capsys, argv, reason):
    assert cli.main(["explain", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_without_a_gpu_the_architecture_is_hinted_at(capsys, monkeypatch):
    reason = "torch finds no CUDA device"
    monkeypatch.setattr("gradplan.backends.gpu.launch.missing", lambda: reason)
    monkeypatch.setattr("gradplan.cli.explain.missing", lambda: reason)
    assert cli.main(["explain", "softmax", "--shape", "8x8", "--device", "cuda"]) == 2
    assert "--arch sm_90" in capsys.readouterr().err


def test_several_axes_may_begin_with_a_minus(capsys):
    words = ["explain", "sum", "--shape", "8x64x64", "--axis", "-2,-1", "--arch", "sm_90"]
    assert cli.main(words) == 0
    assert "sum backward" in capsys.readouterr().out


def test_a_device_that_is_not_here_is_told_of_and_not_run_on(capsys):
    assert cli.main(["explain", "softmax", "--shape", "64x64", "--device", "sm_90"]) == 0
    assert "recorded on" in capsys.readouterr().out
    assert cli.main(["verify", "--device", "sm_90"]) == 2
    assert "is not here" in capsys.readouterr().err


def test_a_table_that_is_added_to_is_written_where_indices_point():
    told = plan("embedding", (16, 768, 50304), 0, accumulate=True).explanation()
    assert told.written == told.fewest_written == 16 * 768 * 2


def test_scans_in_shared_memory_have_true_reasons():
    def told(kind, shape, axis, runs=""):
        desc = plan(kind, shape, axis).descriptor
        found = others(desc, strides_of(desc, "contiguous"), table_of("sm_90"), runs)
        return {one.variant: one.why for one in found}

    assert "walked_axis" in told("cummax", (512, 8192), 0)["walked"]
    assert "walked_from" in told("cumsum", (64, 1 << 18), 1)["held"]
    askew = told("cummax", (1, 1 << 27), 1, "chained_from_y")
    for variant in ("walked", "held"):
        assert askew[variant] == "16 does not divide all addresses"
    many = plan("cumsum", (1 << 23, 16), 1)
    assert many.workspace_size == 0


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "variant"),
    [
        ("softmax", (8192, 8192), 0, "lagged"),
        ("std", (64, 2048, 512), 1, "cluster"),
        ("prod", (1024, 131072), 1, "cluster"),
        ("prod", (1024, 131072), 1, "held"),
        ("var", (1024, 131072), 1, "cluster"),
    ],
)
def test_what_runs_at_addresses_that_are_not_aligned_has_its_reasons(kind, shape, axis, variant):
    """And what runs where they are has its own, of the same variant too."""
    desc = plan(kind, shape, axis, element=ElementKind.F32).descriptor
    shapes = {one.name: one.shape for one in desc.operands}
    strides = {
        name: told_strides(shapes[name], steps)
        for name, steps in strides_of(desc, "contiguous").items()
    }
    table = table_of("sm_90")
    chosen = choose(desc, strides, table)
    chain = [chosen]
    while chain[-1].unaligned is not None:
        chain.append(chain[-1].unaligned)
    assert variant in {one.variant for one in chain}
    told = {one.variant: one.why for one in others(desc, strides, table, variant)}
    assert set(told) == {*ROW_VARIANTS} - {variant}
    whys = ("16 does not divide all addresses", "the arrays do not lie alike within 16 bytes")
    askew = [one for one, why in told.items() if why in whys]
    assert ("held" in askew) == (variant != chosen.variant)


def test_what_runs_where_arrays_do_not_lie_alike_has_its_reasons():
    """Held rows, then clusters of rows that begin anywhere, then those that are read twice."""
    desc = plan("softmax", (64, 65600), 1, element=ElementKind.F32).descriptor
    strides = strides_of(desc, "contiguous")
    chain = [choose(desc, strides, table_of("sm_90"))]
    while chain[-1].unaligned is not None:
        chain.append(chain[-1].unaligned)
    assert [one.variant for one in chain] == ["held", "cluster", "lagged"]
    for place, why in enumerate(("16 does not divide all addresses", "do not lie alike"), 1):
        found = others(desc, strides, table_of("sm_90"), chain[place].variant)
        told = {one.variant: one.why for one in found}
        assert set(told) == {*ROW_VARIANTS} - {chain[place].variant}
        assert why in told[chain[place - 1].variant]
