"""Kernels compiled ahead of time for every architecture, without a GPU."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

import gradplan as gp
from covering import SPECS, spec_of
from gradplan import cases
from gradplan.backends.gpu import aot, launch, programs
from gradplan.backends.gpu.table import table_of
from gradplan.geometry import c_strides, told_strides
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import ELEMENTS, Engine

pytest.importorskip("triton")


def run(*words):
    """The command in a process of its own: in this one Triton may be its interpreter."""
    source = str(Path(aot.__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-m", "gradplan.backends.gpu.aot", *words],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": source, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
def test_a_covering_subset_compiles_without_stack(arch):
    done = run("--quick", "--jobs", "1", "--arch", str(arch))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"sm_{arch}" in done.stdout


def test_the_names_in_tritons_cache_do_not_depend_on_which_kernel_comes_first():
    """Or a process that starts with another kernel would compile everything anew."""
    names = ["rows.row_tiles", "lines.scan_lines", "joins.scan_states", "segments.sum_chunks"]
    code = (
        "import sys; from gradplan.backends.gpu import launch\n"
        "first, *names = sys.argv[1:]; launch._function(first); launch._name_all()\n"
        "print([launch._function(name).cache_key for name in sorted(names)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, first, *names],
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, first in enumerate(names)
    }
    assert len(found) == 1


def test_every_module_of_kernels_is_named():
    folder = Path(launch.__file__).parent / "kernels"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *launch._KERNELS}


@pytest.fixture(scope="module")
def whole():
    return list(aot.variants(90))


def test_the_subset_meets_every_kernel_kind_element_and_variant(whole):
    some = aot.quick(90)
    assert {one.step.kernel for one in some} == {one.step.kernel for one in whole}
    assert {one.element for one in some} == set(ELEMENTS)
    named = {dict(one.step.constants).get("KIND") for one in some}
    assert named >= {spec.kind.value for spec in SPECS if spec.engine is not Engine.SEGMENT_SUM}
    met = {one.problem.partition(":")[0] for one in whole}
    for layout in ("rows", "columns"):
        for name in ("resident", "cluster", "lagged", "tiled", "split_recomputed"):
            assert f"{name}, {layout}" in met
    assert "chained_from_y, rows" in met
    assert {"map, flat", "map, rows", "sorted, rows", "sorted, strided"} <= met
    assert len(some) < len(whole) / 10


def test_the_subsets_share_all_kinds_in_all_phases(whole):
    def pairs(some):
        steps = [(one.step.kernel, dict(one.step.constants)) for one in some]
        return {(kernel, fixed.get("KIND"), fixed.get("PHASE")) for kernel, fixed in steps}

    subsets = [pairs(aot.quick(arch)) for arch in aot.ARCHITECTURES]
    assert set.union(*subsets) == pairs(whole)


@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
def test_no_variant_asks_for_more_threads_than_a_program_has(arch):
    """1024 threads: the compiler takes more, the driver does not."""
    warps = {(one.step.kernel, one.step.warps) for one in aot.variants(arch)}
    assert {count for _, count in warps} <= {1, 2, 4, 8, 16, 32}


def test_numbers_of_a_launch_replace_those_of_its_steps(monkeypatch):
    """As the driver sees the arguments; there is none here."""
    seen = []
    driver = SimpleNamespace(launch=lambda *_: seen.append([*launcher_block()]) or 0)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(launch, "_handle", lambda *_: (1, 0, 128))
    spec = next(spec for spec in SPECS if spec.kind == "lerp")
    desc = cases.describe(spec, ElementKind.F32, (64, 64), (), param=0.25)
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    steps = programs.choose(desc, strides, table_of("sm_90")).steps
    launcher = launch.Launcher(steps, 0)
    bound = launcher._unbound()
    launcher._idle.append(bound)
    addresses = {name: 256 * k for k, name in enumerate(strides, 1)}

    def launcher_block():
        return bound.calls[0].block

    def words(number):
        return struct.unpack("Q", struct.pack("d", number))[0]

    for numbers in (None, {"p": 0.125, "q": 0.875}, {"p": 3.0, "q": -2.0}):
        launcher.run(addresses, 0, 0, 0, numbers)
    changed = [k for k, some in enumerate(zip(*seen, strict=True)) if len(set(some)) > 1]
    assert [[block[k] for k in changed] for block in seen] == [
        [words(0.75), words(0.25)],
        [words(0.125), words(0.875)],
        [words(3.0), words(-2.0)],
    ]


def test_explain_counts_what_is_read():
    """Rows that the cache keeps are read once, longer ones twice; a cummax of y that goes to the
    first never reads x."""

    def reads(kind, shape, **options):
        spec = next(spec for spec in SPECS if spec.kind == kind)
        desc = cases.describe(spec, ElementKind.F64, shape, (1,), **options)
        strides = {op.name: c_strides(op.shape) for op in desc.operands}
        program = programs.prepare(desc, strides, "sm_90", 0)
        return program.variant, program.reads

    assert reads("softmax", (1024, 100_000)) == ("lagged", {})
    assert reads("softmax", (2, 10_000_000)) == ("lagged", {"dy": 2, "x": 2, "y": 2})
    assert reads("cummax", (1024, 256), ties="first")[1]["x"] == 0
    assert reads("cummax", (1024, 256), ties="last")[1]["x"] == 1
    assert reads("prod", (64, 256))[1]["y"] == 0


@pytest.mark.parametrize("arch", ["sm_90", "interpreter"])
def test_no_layout_needs_more_workspace_than_the_plan_states(arch):
    """`workspace_size` holds for any memory order of any operand."""
    chance = Random(1)
    for _ in range(3000):
        spec, element = chance.choice(SPECS), chance.choice(ELEMENTS)
        rank = chance.randint(1, 4)
        shape = tuple(int(10 ** chance.uniform(0, chance.choice((1, 2, 5)))) for _ in range(rank))
        if prod(shape) > 2**32:  # more programs than the small table's tiles can be counted in
            continue
        axes = (chance.randrange(rank),)
        if spec.category is OpCategory.REDUCTION:
            axes = tuple(chance.sample(range(rank), chance.randint(0, rank)))
        elif spec.category is OpCategory.EMBEDDING:
            shape = tuple(chance.randint(0, 10**5) for _ in range(3))
        fields, without = chance.choice(cases.options_of(spec, element))
        if fields.get("padding_idx") is not None:
            fields = {**fields, "padding_idx": None}
        desc = cases.describe(spec, element, shape, axes, **fields)

        def turned(operand):
            order = chance.sample(range(len(operand.shape)), len(operand.shape))
            strides, step = [0] * len(order), 1
            for axis in order:
                strides[axis] = step
                step *= operand.shape[axis]
            return tuple(strides)

        strides = aot._strides(desc, without, turned)
        needed = programs.prepare(desc, strides, arch, 0).workspace_bytes
        assert needed <= programs.workspace_bound(desc, table_of(arch)), f"{desc} {strides}"


@pytest.mark.parametrize("kind", ["softmax", "var", "prod", "max"])
def test_short_rows_need_no_workspace_whichever_way_they_lie(kind):
    for element in ELEMENTS:
        for n in (2, 64):
            desc = cases.describe(spec_of(kind), element, (2**24, n), (1,))
            assert programs.workspace_bound(desc, table_of("sm_90")) == 0
        desc = cases.describe(spec_of(kind), element, (64, 2**20), (1,))
        assert programs.workspace_bound(desc, table_of("sm_90")) > 0


def test_what_is_wrong_is_told():
    variant = next(aot.variants(90))
    assert variant.element is ElementKind.F32
    assert aot.Built(variant, 90, registers=255, shared=1 << 10).fault == ""
    assert aot.Built(variant, 90, error="no").fault == "no"
    assert aot.Built(variant, 90, stack=8).fault == "8 bytes of stack"
    assert aot.Built(variant, 80, shared=200 << 10).fault == "204800 bytes of shared memory"
    assert aot.Built(variant, 90, idle=("a", "b")).fault == "barriers that nobody uses: a, b"
    assert "does not wait first" in aot.Built(variant, 90, hasty=True).fault
    double = next(one for one in aot.variants(90) if one.element is ElementKind.F64)
    assert aot.Built(double, 90, stack=8).fault == ""


def test_a_launch_that_begins_early_must_wait_first():
    wait, load = "griddepcontrol.wait;", "ld.global.b32 %r1, [%rd1];"
    assert aot.waits_first(f"ld.param.b64 %rd1, [p];\n{wait}\n{load}")
    assert not aot.waits_first(f"{load}\n{wait}")
    assert not aot.waits_first(f"cp.async.cg.shared.global [%r1], [%rd1], 0x10;\n{wait}")
    assert not aot.waits_first("ret;")


def test_a_barrier_that_nobody_uses_is_found():
    """Its room is used by others, and written to by the machine."""
    code = """
    %arrived = ttg.local_alloc : () -> !ttg.memdesc<8x1xi64, #shared2, #smem, mutable>
    %last = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    %lasting = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    %0 = ttg.memdesc_index %arrived[%c0_i32] : !ttg.memdesc<8x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %0, 256 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    %1 = ttg.memdesc_index %last[%c0_i32] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %1, 256 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    %2 = ttg.memdesc_index %lasting[%c0_i32] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %2, 256 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
    ttg.warp_specialize(%dy, %arrived, %lasting)
"""
    assert aot.idle_barriers(code) == ("last",)
    assert aot.idle_barriers(code.replace("%dy", "%last")) == ()
    assert aot.idle_barriers("%0 = ttg.local_alloc") == ()


def test_a_kernel_that_does_not_compile_is_an_answer(monkeypatch):
    def fail(step, pointer_bytes, capability):
        raise ValueError("unknown instruction")

    monkeypatch.setattr(aot.launch, "compiled", fail)
    assert aot.build(next(aot.variants(90)), 90).fault == "ValueError: unknown instruction"


def test_the_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert aot.main(["--quick"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def run_compiler(code, seconds):
    """Run code in a process whose Triton compiles, whatever this one's does."""
    source = str(Path(aot.__file__).parents[3])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=seconds)


def test_the_smallest_halves_compile_everywhere():
    """Two elements of a half are fewer than an instruction takes, and sm_89 compares no bfloat16
    two at a time."""
    code = """
import gradplan as gp
from gradplan.backends.gpu import launch, rows, table
for capability in (80, 89, 90):
    for kind, shape in (("prod", (2,)), ("prod", (3,)), ("max", (64, 1024)), ("var", (2,))):
        desc = gp.ReduceBackwardDescriptor(
            kind=kind, input_shape=shape, reduce_axis=(len(shape) - 1,), element="bf16"
        )
        steps = {"x": (1024, 1)[-len(shape):], "dx": (1024, 1)[-len(shape):]}
        strides = {op.name: steps.get(op.name, (1, 0)[-len(shape):]) for op in desc.operands}
        for step in rows.program(desc, strides, table.table_of(f"sm_{capability}")).steps:
            launch.compiled(step, 16, capability)
"""
    run_compiler(code, 300)


def test_sums_of_reversed_halves_keep_nothing_on_the_stack():
    """They have as few registers as will do."""
    code = """
from gradplan import cases
from gradplan.backends.gpu import aot, programs, table
from gradplan.registry import ELEMENTS, KINDS
(spec,) = (one for one in KINDS.values() if one.kind.value == "cumsum")
for element in ELEMENTS[:3]:
    desc = cases.describe(spec, element, (1024, 8192), (1,), reverse=True)
    strides = {operand.name: (8192, 1) for operand in desc.operands}
    for step in programs.choose(desc, strides, table.table_of("sm_90")).steps:
        fault = aot.build(aot.Variant(step, 16, element, ""), 90).fault
        assert not fault, (element, fault)
"""
    run_compiler(code, 300)


def test_long_rows_in_registers_keep_nothing_on_the_stack():
    """Nor do those of which an operand has one value a row, as the gradient of a sum has, which are
    compiled in a second each, not in minutes; nor those at odd addresses. The programs of a cluster
    meet twice, however often the compiler makes the same thing again."""
    code = """
from gradplan import cases
from gradplan.backends.gpu import aot, launch, programs, table
from gradplan.kinds import ElementKind
from gradplan.registry import KINDS
specs = {one.kind.value: one for one in KINDS.values()}
for kind, element, operand, n in (
    ("softmax", "f32", "dy", 32768), ("softmax", "bf16", "dy", 32768),
    ("softmax", "bf16", "", 32768), ("softmax", "f32", "dy", 65536),
    ("log_softmax", "f32", "dy", 32768), ("log_softmax", "f16", "dy", 32768),
    ("log_softmax", "bf16", "dy", 131072), ("log_softmax", "f16", "", 131072),
    ("max", "f32", "", 32768), ("max", "bf16", "", 32768), ("max", "f32", "x", 131072),
    ("var", "bf16", "", 32768), ("std", "f16", "", 65536), ("std", "bf16", "x", 131072),
    ("prod", "f32", "", 32768), ("prod", "bf16", "", 32768), ("prod", "f32", "x", 32768),
    ("prod", "f16", "", 65536),
):
    desc = cases.describe(specs[kind], ElementKind(element), (1024, n), (1,))
    strides = {one.name: (n, 1) if one.shape[1] > 1 else (1, 0) for one in desc.operands}
    if operand:
        strides[operand] = (1, 0)
    program = programs.choose(desc, strides, table.table_of("sm_90"))
    for step, aligned in aot._steps(program, 16):
        told = (kind, element, operand, n, aligned, step.kernel)
        fault = aot.build(aot.Variant(step, aligned, desc.element, ""), 90).fault
        assert not fault, (told, fault)
        if step.cluster > 1:
            code = launch.compiled(step, aligned, 90).asm["ptx"]
            for word in ("arrive", "wait"):
                assert code.count(f"barrier.cluster.{word}") == 2, (told, word)
"""
    run_compiler(code, 240)


def test_rows_that_begin_anywhere_are_moved_16_bytes_at_a_time():
    """The compiler is told of an alignment, and would forget it without a word."""
    code = """
import re
from gradplan import cases
from gradplan.backends.gpu import launch, programs, table
from gradplan.geometry import c_strides, told_strides
from gradplan.kinds import ElementKind
from gradplan.registry import KINDS
specs = {one.kind.value: one for one in KINDS.values()}
for kind, element, shape in (
    ("softmax", "bf16", (8192, 8191)), ("softmax", "f32", (1 << 20, 63)),
    ("log_softmax", "bf16", (4096, 50257)), ("log_softmax", "f64", (4096, 511)),
    ("max", "f16", (1 << 20, 63)), ("var", "f32", (64, 1048575)), ("prod", "bf16", (4096, 50257)),
    ("mean", "bf16", (8192, 8191)), ("norm2", "f32", (1 << 20, 63)),
):
    ties = {"ties": "split"} if kind == "max" else {}
    desc = cases.describe(specs[kind], ElementKind(element), shape, (1,), **ties)
    strides = {one.name: told_strides(one.shape, c_strides(one.shape)) for one in desc.operands}
    (step,) = programs.choose(desc, strides, table.table_of("sm_90")).steps
    assert step.kernel.startswith("ragged."), (kind, shape, step.kernel)
    words = launch.compiled(step, 1, 90).asm["ptx"].splitlines()
    for way in ("ld.global", "st.global"):
        wide = [one for one in words if way in one and re.search(r"\\.v4\\.b32|\\.v2\\.b64", one)]
        assert wide or (kind, way) == ("mean", "ld.global"), (kind, element, shape, way)
"""
    run_compiler(code, 240)


def test_scans_of_rows_that_begin_anywhere_move_16_bytes_at_a_time():
    """What is copied into shared memory, and what is written but for the edges."""
    code = """
import re
from gradplan import cases
from gradplan.backends.gpu import launch, programs, table
from gradplan.geometry import c_strides
from gradplan.registry import KINDS

for kind, element in (("cumsum", "bf16"), ("cumprod", "f32"), ("cummax", "f16"),
                      ("log_cumsum_exp", "bf16")):
    spec = next(spec for spec in KINDS.values() if spec.kind.value == kind)
    desc = cases.describe(spec, element, (4096, 5001), (1,))
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    program = programs.choose(desc, strides, table.table_of("sm_90"))
    assert program.variant.startswith("walked") and program.alike, program.variant
    for step in program.steps:
        words = launch.compiled(step, 1, 90).asm["ptx"]
        copies = re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global[^;]*;", words)
        small = [one for one in copies if "0x10" not in one]
        assert len(copies) > 4 * len(small), (kind, step.kernel, copies[:3])
        assert not small or kind == "cummax", (kind, small)  # words of marks
        assert "st.global.v4" in words or dict(step.constants).get("MARK"), (kind, step.kernel)
"""
    run_compiler(code, 240)


def test_lines_on_their_way_fit_into_shared_memory():
    """Of the smallest machine of an architecture: 99 KiB on an sm_86, sm_89 or sm_120."""
    code = """
from gradplan import cases
from gradplan.backends.gpu import aot, programs, table
from gradplan.geometry import c_strides, told_strides
from gradplan.registry import ELEMENTS, KINDS

for kind in ("max", "softmax", "std", "prod"):
    spec = next(spec for spec in KINDS.values() if spec.kind.value == kind)
    for element in ELEMENTS:
        for shape in ((300000, 100), (300000, 680)):
            desc = cases.describe(spec, element, shape, (0,))
            strides = {op.name: told_strides(op.shape, c_strides(op.shape)) for op in desc.operands}
            for arch, most in ((80, 99), (90, 227), (120, 99)):
                program = programs.choose(desc, strides, table.table_of(f"sm_{arch}"))
                assert program.variant == "tall", (kind, element, shape, arch)
                for step in (program.steps[0], program.steps[-1]):
                    built = aot.build(aot.Variant(step, 16, element, ""), arch)
                    told = (kind, element, shape, arch, step.kernel, built.shared)
                    assert built.shared <= most << 10, told
                    assert built.shared > 0 or step is program.steps[-1], told
                    assert not built.error, (told, built.error)
                    assert not built.fault or arch == 120, (told, built.fault)
"""
    run_compiler(code, 400)


def test_launches_that_begin_early_wait_for_those_before():
    """Of an architecture that can do so; and lines are on their way by 16 bytes while others are
    summed."""
    code = """
import re
from gradplan import cases
from gradplan.backends.gpu import aot, launch, programs, table
from gradplan.geometry import c_strides, told_strides
from gradplan.registry import KINDS

def steps_of(kind, element, shape, axes, arch, **fields):
    spec = next(spec for spec in KINDS.values() if spec.kind.value == kind)
    desc = cases.describe(spec, element, shape, axes, **fields)
    strides = {op.name: told_strides(op.shape, c_strides(op.shape)) for op in desc.operands}
    index = (shape[0],) if kind == "embedding" else None
    program = programs.choose(desc, strides, table.table_of(f"sm_{arch}"), index)
    assert program.variant in ("sorted", "tall"), (kind, program.variant)
    return program.steps

for kind, element, shape, axes, fields in (
    ("embedding", "bf16", (70000, 96, 300), (), {"accumulate": False}),
    ("embedding", "f32", (70000, 96, 300), (), {"scale_grad_by_freq": True}),
    ("max", "bf16", (300000, 100), (0,), {}),
    ("max", "f32", (300000, 100), (0,), {}),
    ("softmax", "bf16", (300000, 100), (0,), {}),
    ("std", "f32", (300000, 100), (0,), {}),
    ("prod", "bf16", (300000, 100), (0,), {}),
):
    for arch in (80, 90):
        steps = steps_of(kind, element, shape, axes, arch, **fields)
        assert [step.early for step in steps] == [arch == 90 and k > 0 for k in range(len(steps))]
        for k, step in enumerate(steps):
            words = launch.compiled(step, 16, arch).asm["ptx"]
            told = (kind, element, arch, step.kernel)
            assert ("griddepcontrol.wait" in words) == (arch == 90 and (
                k > 0 or kind == "embedding")), told
            assert aot.waits_first(words) or not step.early, told
            # What comes behind a problem's last launch is not ours to hurry.
            last = k == len(steps) - 1
            assert ("launch_dependents" in words) == (arch == 90 and not last), told
            if k == 0 and kind != "embedding":
                copies = re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global[^;]*;", words)
                assert copies and all("0x10" in one for one in copies), (told, copies[:2])
"""
    run_compiler(code, 240)


@pytest.mark.parametrize("kind", ["cumsum", "softmax", "var", "prod", "lerp"])
def test_no_launch_has_more_programs_than_a_grid(kind):
    """Two places side by side are little to do for a program, and make many."""
    shape = (2**32 + 5, 2, 2)
    desc = cases.describe(next(s for s in SPECS if s.kind == kind), ElementKind.F16, shape, (1,))
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    if kind == "lerp":  # which else is one long row
        strides["dy"] = (4, 1, 2)
    found = programs.choose(desc, strides, table_of("sm_90"))
    assert all(step.grid < 2**31 for step in found.steps)
    assert len(found.steps) > 1
    ends = [dict(step.arguments)["dy"].offset for step in found.steps]
    assert ends == sorted(set(ends))
    assert found.workspace_bytes <= programs.workspace_bound(desc, table_of("sm_90"))


def test_a_mean_in_pieces_is_that_of_the_whole():
    desc = cases.describe(spec_of("mean"), ElementKind.F16, (2**31 + 8, 2, 2), (0, 1, 2))
    strides = {"dy": (0, 0, 0), "dx": (16, 4, 1)}
    found = programs.choose(desc, strides, table_of("sm_90"))
    assert len(found.steps) > 1
    assert {dict(step.arguments)["p"] for step in found.steps} == {4.0 * (2**31 + 8)}
    assert {dict(step.arguments)["dy"].offset for step in found.steps} == {0}
    ends = [dict(step.arguments)["out"].offset for step in found.steps]
    assert ends == sorted(set(ends))


def test_what_cannot_be_cut_is_refused():
    desc = cases.describe(spec_of("embedding"), ElementKind.F32, (4, 3, 5), (0,))
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    with pytest.raises(gp.Unsupported, match="more programs than a launch"):
        programs._in_pieces(desc, strides, table_of("sm_90"))


@pytest.mark.parametrize(("arch", "shared"), [("sm_80", 163), ("sm_90", 227), ("sm_120", 99)])
def test_rows_are_held_where_they_fit(arch, shared):
    """No launch takes more shared memory than its architecture has."""
    desc = cases.describe(next(s for s in SPECS if s.kind == "softmax"), ElementKind.F32,
                          (8192, 8192), (0,))  # fmt: skip
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    found = programs.choose(desc, strides, table_of(arch))
    held = 3 * 2 * 4 * 32 * 256  # parts, operands, bytes, rows, places
    assert (found.variant == "held") == (held <= shared << 10)


def test_what_runs_at_addresses_that_16_does_not_divide():
    desc = cases.describe(next(s for s in SPECS if s.kind == "softmax"), ElementKind.BF16,
                          (64, 1 << 20), (1,))  # fmt: skip
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    found = programs.choose(desc, strides, table_of("sm_90"))
    assert found.variant == "held"
    addresses = dict.fromkeys(strides, 1 << 20)
    assert found.suited(addresses) is found
    addresses["y"] += 2
    other = found.suited(addresses)
    assert other.variant == "lagged"
    assert other.suited(addresses) is other
    assert other.workspace_bytes <= found.workspace_bytes


@pytest.mark.parametrize("n", [8191, 8192])
def test_rows_that_begin_anywhere_lie_alike(n):
    """The same place within 16 bytes in all arrays, or each element is read by itself."""
    spec = next(s for s in SPECS if s.kind == "log_softmax")
    desc = cases.describe(spec, ElementKind.BF16, (64, n), (1,))
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    found = programs.choose(desc, strides, table_of("sm_90"))
    places = {name: (1 << 20) + 2 * k for k, name in enumerate(strides)}
    for addresses, kernel in (
        (dict.fromkeys(strides, 1 << 20), "ragged." if n % 2 else "rows."),
        (dict.fromkeys(strides, (1 << 20) + 6), "ragged."),
        ({name: 32 * k + 6 for k, name in enumerate(strides)}, "ragged."),
        (places, "rows."),
    ):
        one = found.suited(addresses)
        assert one.steps[0].kernel.startswith(kernel), (addresses, one.steps[0].kernel)
        assert one.suited(addresses) is one
        assert one.workspace_bytes <= found.workspace_bytes
    strides["y"] = (n + 3, 1)  # its rows begin elsewhere
    assert programs.choose(desc, strides, table_of("sm_90")).steps[0].kernel.startswith("rows.")


@pytest.mark.parametrize("n", [8191, 8192])
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "cummax", "log_cumsum_exp"])
def test_scans_of_rows_that_begin_anywhere_lie_alike(kind, n):
    """The same; workspaces are no larger than the plan's."""
    spec = next(s for s in SPECS if s.kind == kind)
    desc = cases.describe(spec, ElementKind.BF16, (4096, n), (1,))
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    found = programs.choose(desc, strides, table_of("sm_90"))
    bound = programs.workspace_bound(desc, table_of("sm_90"))
    for addresses, alike in (
        (dict.fromkeys(strides, 1 << 20), n % 2 == 1),
        (dict.fromkeys(strides, (1 << 20) + 6), True),
        ({name: (1 << 20) + 2 * k for k, name in enumerate(strides)}, False),
    ):
        one = found.suited(addresses)
        assert bool(one.alike) == alike, (addresses, one.variant)
        assert not alike or one.variant.startswith("walked")
        assert one.suited(addresses) is one
        assert one.workspace_bytes <= found.workspace_bytes <= bound
    strides["dx"] = (n + 3, 1)  # its rows begin elsewhere
    other = programs.choose(desc, strides, table_of("sm_90"))
    assert not other.alike
    assert other.unaligned is None or not other.unaligned.alike


@pytest.mark.parametrize("n", [12288, 12289, 30001])
@pytest.mark.parametrize("kind", ["softmax", "max", "var"])
def test_rows_that_stay_whole_are_read_once_without_clusters(kind, n):
    desc = cases.describe(next(s for s in SPECS if s.kind == kind), ElementKind.BF16, (64, n), (1,))
    strides = {op.name: told_strides(op.shape, c_strides(op.shape)) for op in desc.operands}
    found = programs.choose(desc, strides, table_of("sm_80"))
    behind = found
    while behind.unaligned is not None:
        behind = behind.unaligned
    assert found.variant == behind.variant
