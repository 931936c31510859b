"""On a GPU: the whole grid, graphs, streams, threads and memory, and the arrays of other libraries.

Tests marked `gpu` are skipped where there is no CUDA device. Those that take a `place` run in
Triton's interpreter there instead, with smaller shapes.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import gradplan as gp
from conftest import CUDA
from covering import SPECS, covering, large, problems, spec_of
from gradplan import cases, plans
from gradplan.backends.gpu import launch, programs, streams, table
from gradplan.cases import Case, Layout
from gradplan.geometry import c_strides
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import ELEMENTS, Engine

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
gpu = pytest.mark.gpu

PLACES = [
    pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(CUDA, reason="compiles here")),
    pytest.param("cuda", id="cuda", marks=gpu),
]

# One problem for each engine and for each way to cut it: (kind, shape on a GPU, shape in the
# interpreter, element, arrays left out, options). They are named for their variants, which a test
# asserts, so that a change of thresholds cannot empty the others.
JOBS = {
    "map": ("norm2", (512, 300), (4, 30), "f32", (), {}),
    "resident": ("var", (512, 300), (6, 9), "bf16", (), {}),
    "cluster": ("softmax", (600, 20_000), (2, 140), "f32", (), {}),
    "held": ("softmax", (150, 300_000), (2, 300), "f16", (), {}),
    "held_product": ("prod", (4, 200_000), (2, 140), "f32", ("y",), {}),
    "lagged": ("softmax", (150, 300_000), (2, 300), "f64", (), {}),
    "lagged_product": ("prod", (4, 100_000), (2, 140), "f64", ("y",), {}),
    "lagged_far": ("softmax", (3, 3_000_000), (1, 1100), "f16", (), {}),
    "scan_chained": ("cumsum", (3, 300_000), (2, 140), "f32", (), {}),
    "log_chained": ("log_cumsum_exp", (3, 300_000), (2, 140), "f32", (), {}),
    "chained_product": ("cumprod", (600, 40_000), (4, 140), "bf16", (), {}),
    "chained_far": ("cummax", (2, 3_000_000), (1, 1100), "f16", (), {}),
    "resident_marks": ("cummax", (300, 1000), (4, 20), "f32", ("y",), {}),
    "tiled_marks": ("cummax", (600, 40_000), (4, 140), "bf16", ("y",), {}),
    "chained_marks": ("cummin", (3, 300_000), (2, 140), "f32", ("y",), {}),
    "scan_resident": ("cummax", (300, 1000), (4, 20), "f32", (), {}),
    "scan_tiled": ("cummax", (600, 40_000), (4, 140), "f32", (), {}),
    "scan_split": ("cumprod", (3, 60_000), (2, 140), "f32", ("y",), {}),
    "log_split": ("log_cumsum_exp", (2, 40_000), (2, 140), "f32", ("y",), {}),
    "log_tiled": ("log_cumsum_exp", (600, 9000), (4, 140), "f32", ("y",), {}),
    "scan_halves": ("cumsum", (300, 9000), (3, 140), "bf16", (), {}),
    "embedding": ("embedding", (20_000, 96, 300), (90, 5, 9), "f32", (), {"accumulate": False}),
}
WITH_WORKSPACE = (
    "cluster",
    "held",
    "held_product",
    "lagged",
    "lagged_product",
    "lagged_far",
    "scan_chained",
    "log_chained",
    "chained_product",
    "chained_far",
    "resident_marks",
    "tiled_marks",
    "chained_marks",
    "scan_split",
    "log_split",
    "log_tiled",
    "embedding",
)


@pytest.fixture(autouse=True)
def counters():
    """The streams of each test have none yet."""
    if CUDA:
        torch.cuda.synchronize()
        streams._counters.clear()


jobs = pytest.mark.parametrize("name", list(JOBS))
places = pytest.mark.parametrize("place", PLACES)


def to_torch(array, device):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_numpy(tensor, dtype):
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


class Job:
    """A problem on torch tensors, whose contents can be replaced by those of another seed."""

    def __init__(self, name, place):
        kind, large, small, element, self.without, options = JOBS[name]
        spec = spec_of(kind)
        shape = small if place == "cpu" else large
        self.desc = cases.describe(spec, ElementKind(element), shape, (1,), **options)
        self.device = place
        self.preference = gp.PlanPreference(backend="triton")
        self.problem = self.problem_of(0)
        self.tensors = {}
        for operand in self.desc.operands:
            if operand.name in self.problem.arrays:
                array = self.problem.arrays[operand.name]
                self.tensors[operand.name] = to_torch(array, place).clone()
        self.outputs = [
            op.name for op in self.desc.operands if op.output and op.name in self.tensors
        ]
        self.plan = self.problem.plan(place, self.preference)

    def problem_of(self, seed):
        return cases.Problem(Case(desc=self.desc, without=self.without, seed=seed))

    def args(self):
        return type(self.problem.args())(**self.tensors)

    def staged(self, seed):
        """The contents of another seed, on the device; outputs are poisoned."""
        self.problem = self.problem_of(seed)
        return {name: to_torch(a, self.device) for name, a in self.problem.arrays.items()}

    def load(self, staged):
        """Replace the contents, on the current stream."""
        for name, tensor in staged.items():
            self.tensors[name].copy_(tensor)

    def fill(self, seed):
        self.load(self.staged(seed))

    def bits(self):
        return {name: self.tensors[name].view(torch.uint8).clone() for name in self.outputs}

    def check(self):
        """Hold what the outputs hold now to the guarantee, for the contents loaded last."""
        for name in self.outputs:
            array = self.problem.arrays[name]
            array[...] = to_numpy(self.tensors[name], array.dtype)
        outcome = self.problem.outcome(self.plan.precision_guarantee.relative_error)
        assert outcome.ok, str(outcome)


def workspace_for(plan, device, extra=0):
    """A caller's workspace, aligned as it must be, full of ones."""
    memory = torch.full((plan.workspace_size + extra + 512,), 255, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256
    return memory[start : start + plan.workspace_size + extra]


@gpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", list(Layout))
@problems()
def test_grid(spec, element, layout, complete):
    """Shapes and options take turns; `--complete` runs all of them, for a quarter of an hour."""
    if layout in cases.layouts_of(spec):
        check(cases.grid(spec, element, layout, turns=not complete))


@gpu
@pytest.mark.timeout(1200)
@problems()
def test_every_variant_with_large_shapes(spec, element):
    """All that the measured thresholds can choose, with long rows and long strided axes."""
    check(large(spec, element, launch.device_arch(0)))


def check(some):
    missed = [str(got) for case in some if not (got := cases.run_plan(case, "cuda")).ok]
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


@pytest.fixture
def small_table():
    """The interpreter's thresholds on the GPU: small shapes meet every variant."""

    def use(waits):
        small = table.table_of("interpreter")
        if not waits:
            never = (("", 0, 1, 0, 1),)
            small = replace(small, lag=0, scan_lag=0, chained=never, chained_many=never)
        return table.using(launch.device_arch(0), small)

    return use


@gpu
@pytest.mark.parametrize("waits", [False, True], ids=["split", "waiting"])
@problems()
def test_covering_cases_with_small_tiles(spec, element, waits, small_table, complete):
    """Every data and option in some variant; large shapes meet them all, so elements take turns."""
    if not complete and element is not ELEMENTS[SPECS.index(spec) % len(ELEMENTS)]:
        pytest.skip("another element has its turn")
    if not waits and spec.engine not in (Engine.ROW_STATE, Engine.RECURRENCE):
        pytest.skip("no program of it waits for another")
    missed = []
    with small_table(waits):
        for problem in covering(spec, element):
            problem.run("cuda")
            plan = problem.plan("cuda")
            outcome = problem.outcome(plan.precision_guarantee.relative_error)
            if not outcome.ok:
                missed.append(str(outcome))
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


# What programs that stay can hold, in tiles so small that rows of these have many of them: full
# tiles and others, and rows enough for every program to take several.
HELD = [
    ((12, 1024), (1,)),
    ((3, 752), (1,)),
    ((112, 192), (0,)),
    ((2, 104, 80), (1,)),
    ((120, 16), (0,)),
]


@gpu
@problems([spec for spec in SPECS if spec.engine is Engine.ROW_STATE], ELEMENTS[:3])
def test_held_rows_in_small_parts(spec, element):
    """All data and layouts that are held; three parts a program, on few programs."""
    small = replace(
        table.table_of("sm_90"),
        fill=16,
        resident_words=64,
        cluster=0,
        held_rows=(("", 512, 1, 256, 1),),
        held_columns=(("", 1024, 2, 512, 2),),
    )
    missed, met = [], set()
    with table.using(launch.device_arch(0), small):
        for k, (shape, axes) in enumerate(HELD):
            for (fields, without), data in itertools.product(
                cases.options_of(spec, element), cases.data_of(spec)
            ):
                desc = cases.describe(spec, element, shape, axes, **fields)
                case = Case(desc=desc, data=data, without=without, seed=k)
                program = programs.choose(desc, cases.strides_of(case), small)
                if program.variant == "held":
                    met.add((program.layout, dict(program.steps[-1].constants)["FULL"]))
                    outcome = cases.run_plan(case, "cuda")
                    if not outcome.ok:
                        missed.append(str(outcome))
    assert len(met) == 4
    assert not missed, f"{len(missed)} missed:\n" + "\n".join(missed[:10])


@gpu
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_what_is_held_need_not_be_aligned(skip):
    """Rows that begin anywhere are right too, read in another way."""
    n, rows = 1 << 18, 64
    plan = gp.SoftmaxBackwardPlan.select(
        gp.SoftmaxBackwardDescriptor(
            kind="softmax", input_shape=(rows, n), softmax_axis=1, element="bf16"
        ),
        device="cuda",
    )
    torch.cuda.manual_seed(skip)
    memory = torch.randn(3, rows * n + 8, device="cuda").to(torch.bfloat16)
    dy, y, dx = (one[skip : skip + rows * n].view(rows, n) for one in memory)
    args = gp.SoftmaxBackwardArgs(dy=dy, y=y, dx=dx)
    bound = plan.bind(args)
    results = []
    for launch_it in (bound, lambda: plan.run(args)):
        dx.fill_(torch.nan)
        launch_it()
        torch.cuda.synchronize()
        results.append(dx.clone())
    assert torch.equal(*results)
    a, b = dy.double(), y.double()
    total = (a * b).sum(1, keepdim=True)
    size = b.abs() * (a.abs() + (a * b).abs().sum(1, keepdim=True))
    error = (results[0].double() - b * (a - total)).norm(dim=1)
    assert (error <= plan.precision_guarantee.relative_error * size.norm(dim=1)).all()


def named_for(name):
    """How the variant begins that a job is named for."""
    if name in ("embedding", "scan_halves"):
        return "sorted" if name == "embedding" else "tiled"
    return re.sub("^(scan|log)_|_(product|far|marks)$", "", name)


@jobs
def test_jobs_of_a_gpu_meet_their_variants_on_sm_90(name):
    """Told from the table, without a GPU."""
    kind, large, _, element, without, options = JOBS[name]
    desc = cases.describe(spec_of(kind), ElementKind(element), large, (1,), **options)
    strides = cases.strides_of(Case(desc=desc, without=without))
    assert programs.prepare(desc, strides, "sm_90", 0).variant.startswith(named_for(name))


@jobs
@places
def test_jobs_meet_the_variants_they_are_named_for(name, place):
    job = Job(name, place)
    sku = job.plan.bind(job.args()).sku
    if place == "cpu" and named_for(name) in ("cluster", "held"):
        assert sku.variant == "lagged"  # the interpreter runs one program after another
    else:
        assert sku.variant.startswith(named_for(name))
    assert sku.backend is gp.BackendKind.TRITON
    assert sku.arch == ("interpreter" if place == "cpu" else launch.device_arch(0))
    assert (job.plan.bind(job.args()).workspace_size > 0) == (name in WITH_WORKSPACE)


@jobs
@places
def test_the_same_bits_every_time(name, place):
    """By run, by run with a workspace and by bound launch, into outputs poisoned each time."""
    job = Job(name, place)
    bound = job.plan.bind(job.args())
    workspace = workspace_for(job.plan, place)
    ways = [
        bound,
        lambda: job.plan.run(job.args()),
        lambda: job.plan.run(job.args(), workspace=workspace),
        bound,
    ]
    found = []
    for way in ways[:3] if place == "cpu" else ways * 5:
        job.fill(3)
        way()
        found.append(job.bits())
    job.check()
    for other in found[1:]:
        for output in job.outputs:
            assert torch.equal(found[0][output], other[output])


@gpu
@jobs
def test_a_bound_launch_is_captured_and_replayed(name):
    job = Job(name, "cuda")
    bound = job.plan.bind(job.args())
    bound()  # kernels are loaded now, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    for seed in (1, 2):
        job.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        job.check()


@gpu
@jobs
def test_run_with_a_workspace_is_captured_and_replayed(name):
    job = Job(name, "cuda")
    workspace = workspace_for(job.plan, "cuda")
    job.plan.run(job.args(), workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.plan.run(job.args(), workspace=workspace)
    for seed in (1, 2):
        job.fill(seed)
        workspace.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        job.check()


@gpu
@jobs
def test_two_streams_at_once(name):
    """Each with its own bound launch, one of them of high priority; run without a workspace too."""
    some = [Job(name, "cuda") for _ in range(2)]
    for seed, job in enumerate(some):
        job.fill(seed + 1)
    bound = [job.plan.bind(job.args()) for job in some]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for turn in range(20):
        for job, one, stream in zip(some, bound, streams, strict=True):
            if turn % 4 == 3:
                job.plan.run(job.args(), stream=stream)
            else:
                one(stream=stream)
    torch.cuda.synchronize()
    for job in some:
        job.check()


class Softmax:
    """Rows cut into parts whose programs wait for each other, of any size: checked on the GPU."""

    def __init__(self, shape, axis=-1, element="f64", seed=0):
        desc = gp.SoftmaxBackwardDescriptor(
            kind="softmax", input_shape=shape, softmax_axis=axis, element=element
        )
        self.axis = axis
        self.plan = gp.SoftmaxBackwardPlan.select(desc, device="cuda")
        self.dy, self.y, self.dx = (
            torch.empty(shape, dtype=getattr(torch, TORCH_TYPES[element]), device="cuda")
            for _ in range(3)
        )
        self.fill(seed)
        self.args = gp.SoftmaxBackwardArgs(dy=self.dy, y=self.y, dx=self.dx)
        assert self.plan.bind(self.args).sku.variant == ("lagged" if element == "f64" else "held")

    def fill(self, seed):
        torch.cuda.manual_seed(seed)
        self.dy.normal_()
        self.y.normal_().exp_().div_(self.y.sum(self.axis, keepdim=True))
        self.dx.fill_(torch.nan)

    def in_place(self):
        return gp.SoftmaxBackwardArgs(dy=self.dy, y=self.y, dx=self.dy)

    def bits(self):
        return self.dx.view(torch.uint8).clone()

    def check(self, dy=None):
        """By the contract, row by row in f64."""
        bound = self.plan.precision_guarantee.relative_error
        dy = self.dy if dy is None else dy
        for k in range(self.dx.shape[0] if self.axis == -1 else 1):
            some = k if self.axis == -1 else slice(None)
            a, y, got = dy[some].double(), self.y[some].double(), self.dx[some].double()
            wanted = y * (a - (y * a).sum(self.axis, keepdim=True))
            size = y * (a.abs() + (y * a).abs().sum(self.axis, keepdim=True))
            error = (got - wanted).norm(dim=self.axis)
            assert (error <= bound * size.norm(dim=self.axis) + 1e-30).all()


class Sums:
    """Rows of a cumsum whose tiles wait for those behind them: checked on the GPU."""

    def __init__(self, shape, seed=0):
        desc = gp.ScanBackwardDescriptor(
            kind="cumsum", input_shape=shape, scan_axis=1, element="f32"
        )
        self.plan = gp.ScanBackwardPlan.select(desc, device="cuda")
        self.dy, self.dx = (torch.empty(shape, device="cuda") for _ in range(2))
        self.fill(seed)
        self.args = gp.ScanBackwardArgs(dy=self.dy, dx=self.dx)
        assert self.plan.bind(self.args).sku.variant == "chained"

    def fill(self, seed):
        torch.cuda.manual_seed(seed)
        self.dy.normal_()
        self.dx.fill_(torch.nan)

    def in_place(self):
        return gp.ScanBackwardArgs(dy=self.dy, dx=self.dy)

    def bits(self):
        return self.dx.view(torch.uint8).clone()

    def check(self, dy=None):
        dy = self.dy if dy is None else dy
        wanted = dy.double().flip(1).cumsum(1).flip(1)
        size = dy.double().abs().flip(1).cumsum(1).flip(1)
        bound = self.plan.precision_guarantee.relative_error
        assert ((self.dx - wanted).norm(dim=1) <= bound * size.norm(dim=1)).all()


TORCH_TYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}
WAITING = {
    "small": lambda seed: Softmax((4, 1 << 17), seed=seed),
    "large": lambda seed: Softmax((512, 1 << 18), seed=seed),
    "columns": lambda seed: Softmax((8192, 4096), axis=0, seed=seed),
    "held": lambda seed: Softmax((300, 1 << 18), element="f32", seed=seed),
    "held_columns": lambda seed: Softmax((8192, 4096), axis=0, element="bf16", seed=seed),
    "chain": lambda seed: Sums((1, 1 << 25), seed=seed),
    "chains": lambda seed: Sums((100, 1 << 19), seed=seed),
}


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "names",
    [
        ("small", "small"),
        ("small", "large"),
        ("large", "large"),
        ("columns", "large"),
        ("held", "held"),
        ("held", "large"),
        ("held_columns", "held"),
        ("held_columns", "chains"),
        ("chain", "chains"),
        ("chain", "chain"),
        ("large", "chains"),
    ],
)
def test_programs_that_wait_on_two_streams_of_different_priority(names):
    """Neither starves the other: all finish, with the bits that each has alone."""
    some = [WAITING[name](seed) for seed, name in enumerate(names)]
    alone = []
    for one in some:
        one.plan.run(one.args)
        one.check()
        alone.append(one.bits())
        one.dx.fill_(torch.nan)
    bound = [one.plan.bind(one.args) for one in some]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5)]
    for turn in range(40):
        for k in (0, 1) if turn % 2 else (1, 0):
            if turn % 4 < 2:
                bound[k](stream=streams[k])
            else:
                some[k].plan.run(some[k].args, stream=streams[k])
    torch.cuda.synchronize()
    for one, bits in zip(some, alone, strict=True):
        assert torch.equal(one.bits(), bits)


@triton.jit
def occupy(done, nanoseconds):
    """Hold a place on the machine for so long."""
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(done + tl.program_id(0), 1)


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(WAITING))
def test_programs_that_wait_where_others_hold_most_of_the_machine(name):
    """Fewer places than a row has parts, until the others go."""
    one = WAITING[name](3)
    one.plan.run(one.args)
    bits = one.bits()
    places = 2 * torch.cuda.get_device_properties(0).multi_processor_count - 3
    done = torch.zeros(places, dtype=torch.int32, device="cuda")
    other, mine = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
    occupy[(places,)](done, 1000, num_warps=32)  # compiled now
    torch.cuda.synchronize()
    for _ in range(5):
        one.dx.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            occupy[(places,)](done, 50_000_000, num_warps=32)
        for _ in range(3):
            one.plan.run(one.args, stream=mine)
        torch.cuda.synchronize()
        assert torch.equal(one.bits(), bits)


@gpu
@pytest.mark.parametrize("name", ["small", "held"])
def test_graphs_of_programs_that_wait_run_at_once(name):
    """A bound launch has counters of its own, which its graph uses on whatever stream."""
    some = [WAITING[name](seed) for seed in (1, 2)]
    graphs = []
    for one in some:
        bound = one.plan.bind(one.args)
        bound()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bound()
        graphs.append((graph, bound))
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for turn in range(5):
        for k, one in enumerate(some):
            one.fill(10 * turn + k)
        torch.cuda.synchronize()
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        for one in some:
            one.check()


@gpu
@pytest.mark.parametrize(
    "name", ["cluster", *(name for name in JOBS if re.search("held|lagged|chained", name))]
)
def test_a_captured_run_has_the_bits_of_another(name):
    """Where rows are cut into parts that are read twice, no program waits under capture: partial
    sums, then the gradient."""
    job = Job(name, "cuda")
    workspace = workspace_for(job.plan, "cuda")
    job.fill(5)
    job.plan.run(job.args(), workspace=workspace)
    bits = job.bits()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.plan.run(job.args(), workspace=workspace)
    job.fill(5)
    workspace.fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    job.check()
    for output, found in job.bits().items():
        assert torch.equal(found, bits[output])


@gpu
@pytest.mark.parametrize("name", list(WAITING))
def test_programs_that_wait_in_place(name):
    """dx is dy: a part is read by its own program alone, before it is written."""
    one = WAITING[name](7)
    dy = one.dy.clone()
    one.plan.run(one.args)
    for _ in range(3):
        one.dy.copy_(dy)
        one.plan.run(one.in_place())
        assert torch.equal(one.dy, one.dx)
    one.check(dy)


@gpu
def test_launches_of_any_size_share_the_counters_of_a_stream():
    """What one leaves in them is right for the next, whatever its rows and parts."""
    shapes = [(4, 1 << 17), (300, 250_000), (2, 120_000), (1024, 1 << 18), (1, 100_000)]
    some = [Softmax(shape, seed=k) for k, shape in enumerate(shapes)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for turn in range(6):
        for one in some if turn % 2 else some[::-1]:
            one.plan.run(one.args, stream=stream)
    torch.cuda.synchronize()
    for one in some:
        one.check()


@gpu
def test_so_many_streams_have_counters_and_others_read_twice(monkeypatch):
    monkeypatch.setattr(streams, "_STREAMS", 8)
    some = [Softmax((4, 1 << 17), seed=k) for k in range(10)]
    bound = [one.plan.bind(one.args) for one in some]
    some_streams = [torch.cuda.Stream(priority=-(k % 4)) for k in range(len(some))]
    torch.cuda.synchronize()
    for turn in range(6):
        for one, launch_it, stream in zip(some, bound, some_streams, strict=True):
            if turn % 2:
                launch_it(stream=stream)
            else:
                one.plan.run(one.args, stream=stream)
    torch.cuda.synchronize()
    for one in some:
        one.check()
    assert set(streams._counters) == {(0, one.cuda_stream) for one in some_streams[:8]}


def test_a_stream_gets_no_counters_where_nothing_may_last(monkeypatch):
    """As below `torch.compile`: what it has is used, and nothing is allocated."""
    monkeypatch.setattr(streams, "capturing", lambda stream: False)
    monkeypatch.setattr(streams, "_counters", {})
    monkeypatch.setattr(streams, "_counters_on", lambda *_: pytest.fail("allocated"))
    assert streams.stream_counters(0, 7, 100, make=False) == 0
    assert not streams._counters
    streams._counters[0, 7] = [torch.zeros(4096, dtype=torch.uint8)]
    assert streams.stream_counters(0, 7, 100, make=False) == streams._counters[0, 7][0].data_ptr()
    assert streams.stream_counters(0, 7, 2000, make=False) == 0


@gpu
def test_no_memory_for_counters_is_a_kernel_failure(no_more_memory):
    """On a stream that torch's allocator has nothing for."""
    one = WAITING["small"](1)
    workspace = workspace_for(one.plan, "cuda")
    one.plan.run(one.args, workspace=workspace)
    one.dx.fill_(torch.nan)
    handle = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    fresh = torch.cuda.ExternalStream(handle.value)
    no_more_memory()
    with pytest.raises(gp.KernelFailure, match="memory") as caught:
        one.plan.run(one.args, stream=fresh, workspace=workspace)
    assert caught.value.code == 2
    assert one.dx.isnan().all()
    torch.cuda.set_per_process_memory_fraction(1.0)
    one.plan.run(one.args, stream=fresh, workspace=workspace)
    torch.cuda.synchronize()
    one.check()


class Protocol:
    def __init__(self, stream):
        self._stream = stream

    def __cuda_stream__(self):
        return (0, self._stream.cuda_stream)


class Pointed:
    def __init__(self, stream):
        self.ptr = stream.cuda_stream


FORMS = {
    "int": lambda stream: stream.cuda_stream,
    "torch": lambda stream: stream,
    "protocol": Protocol,
    "ptr": Pointed,
    "current": None,
}


def busy(seconds=0.2):
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@gpu
@pytest.mark.parametrize("way", ["run", "bound"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["map", "lagged_far", "embedding"])
def test_work_runs_on_the_stream_it_was_given(name, form, way):
    """New contents arrive late on that stream: work on any other would see the old ones."""
    job = Job(name, "cuda")
    bound = job.plan.bind(job.args())
    bound()
    job.plan.run(job.args())  # which compiles what a capture would need
    staged = job.staged(5)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy()
        job.load(staged)
    run = bound if way == "bound" else lambda **given: job.plan.run(job.args(), **given)
    if form == "current":
        with torch.cuda.stream(stream):
            run()
    else:
        run(stream=FORMS[form](stream))
    assert not stream.query(), "the host waited for the stream"
    stream.synchronize()
    job.check()


@gpu
@pytest.mark.parametrize("wrong", ["0", 1.5, object(), [7]], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_stream_is_refused(wrong):
    job = Job("map", "cuda")
    before = job.bits()
    with pytest.raises(gp.InvalidProblem, match="stream"):
        job.plan.run(job.args(), stream=wrong)
    assert all(torch.equal(before[name], now) for name, now in job.bits().items())


@gpu
@jobs
def test_a_bound_launch_neither_allocates_nor_waits(name):
    job = Job(name, "cuda")
    bound = job.plan.bind(job.args())
    bound()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    busy(1.0)
    begin = time.perf_counter()
    for _ in range(10):
        bound()
    took = time.perf_counter() - begin
    assert not torch.cuda.current_stream().query()
    assert took < 0.3
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@gpu
def test_a_thread_that_has_never_touched_cuda():
    job = Job("lagged_far", "cuda")
    bound = job.plan.bind(job.args())
    failures = []

    def work():
        try:
            bound()
            job.plan.run(job.args())
        except BaseException as error:
            failures.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    job.check()


@places
def test_threads_at_once_select_bind_and_run(place):
    """Cold plans and kernels, asked for by several threads together."""
    names = ["map", "resident", "lagged_far", "embedding"]
    some = [Job(name, place) for name in names]
    failures = []
    ready = threading.Barrier(len(some))

    def work(job, seed):
        try:
            ready.wait()
            job.fill(seed)
            for _ in range(1 if place == "cpu" else 10):
                job.plan.bind(job.args())()
                job.plan.run(job.args())
            if place == "cuda":
                torch.cuda.current_stream().synchronize()
            job.check()
        except BaseException as error:
            failures.append(error)

    if place == "cpu":  # Triton's interpreter patches its module for a run: one at a time
        ready = threading.Barrier(1)
        for seed, job in enumerate(some):
            work(job, seed)
    else:
        workers = [threading.Thread(target=work, args=pair[::-1]) for pair in enumerate(some)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failures, failures


@places
def test_a_bound_launch_keeps_its_arrays_alive(place):
    job = Job("lagged_far", place)
    bound = job.plan.bind(job.args())
    out = job.tensors["dx"]
    address = job.tensors["dy"].data_ptr()
    for name in ("dy", "y"):
        del job.tensors[name]
    gc.collect()
    again = torch.zeros(job.desc.input_shape, dtype=torch.float16, device=place)
    assert again.data_ptr() != address
    bound()
    job.tensors["dx"] = out
    job.check()


@gpu
@pytest.mark.parametrize("name", ["map", "lagged_far", "scan_tiled", "embedding"])
def test_a_launch_that_fails_says_what_the_driver_says(name):
    job = Job(name, "cuda")
    views = job.plan._views(job.args())
    steps = job.plan._prepare(views).steps
    workspace = workspace_for(job.plan, "cuda")
    # More programs than a grid holds: refused at the launch, and nothing is broken.
    wrong = launch.Launcher([replace(step, grid=2**31) for step in steps], 0)
    with pytest.raises(gp.KernelFailure, match="invalid argument") as caught:
        wrong.bind(views, workspace.data_ptr())(torch.cuda.current_stream().cuda_stream)
    assert caught.value.code == 1
    job.plan.run(job.args())
    torch.cuda.synchronize()
    job.check()


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


@gpu
def test_out_of_memory_is_a_kernel_failure_and_the_next_call_works(no_more_memory):
    """Sorting needs 16 bytes an index: more than what torch still has in hand."""
    n, rows = 4_000_000, 50
    desc = gp.EmbeddingBackwardDescriptor(
        num_embeddings=rows, embedding_dim=1, num_indices=n, element="f32", accumulate=False
    )
    plan = gp.EmbeddingBackwardPlan.select(desc, device="cuda")
    assert plan.workspace_size > 32 << 20
    dout = torch.ones(n, 1, device="cuda")
    indices = torch.arange(n, device="cuda") % rows
    dweight = torch.full((rows, 1), torch.nan, device="cuda")
    args = gp.EmbeddingBackwardArgs(dout=dout, indices=indices, dweight=dweight)
    plan.validate(args)
    no_more_memory()
    for call in (plan.run, plan.bind):
        with pytest.raises(gp.KernelFailure, match="memory") as caught:
            call(args)
        assert caught.value.code == 2
        assert dweight.isnan().all()
    torch.cuda.set_per_process_memory_fraction(1.0)
    plan.run(args)
    assert (dweight == n // rows).all()


@gpu
def test_a_function_out_of_memory_is_a_kernel_failure_too(no_more_memory):
    dy = torch.ones(64 << 20, device="cuda")
    no_more_memory()
    with pytest.raises(gp.KernelFailure, match="memory"):
        gp.cumsum_backward(dy)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert gp.cumsum_backward(dy)[-1] == 1


@pytest.mark.parametrize("name", WITH_WORKSPACE)
@places
def test_workspaces_are_checked(name, place):
    job = Job(name, place)
    plan, args = job.plan, job.args()
    size = plan.workspace_size
    good = workspace_for(plan, place, extra=64)
    other = torch.empty(size, dtype=torch.uint8)
    refusals = [
        (good[: size - 1], gp.WorkspaceTooSmall),
        (good[1:], gp.MisalignedOperand),
        (good.view(torch.int8)[:size], gp.InvalidProblem),
        (good[: 2 * (size // 2)].view(2, -1), gp.InvalidProblem),
        ("workspace", gp.InvalidProblem),
    ]
    if place == "cuda":
        refusals.append((other, gp.InvalidProblem))
    before = job.bits()
    for wrong, error in refusals:
        for call in (plan.run, plan.bind):
            with pytest.raises(error, match="workspace"):
                call(args, workspace=wrong)
    assert all(torch.equal(before[output], now) for output, now in job.bits().items())
    with pytest.raises(gp.WorkspaceTooSmall) as caught:
        plan.run(args, workspace=good[: size - 1])
    assert (caught.value.needed, caught.value.got) == (size, size - 1)


@gpu
def test_a_workspace_over_an_argument_is_invalid():
    job = Job("lagged_far", "cuda")
    shape = job.desc.input_shape
    size = max(job.plan.workspace_size, 2 * shape[0] * shape[1])
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    job.tensors["dy"] = memory[: 2 * shape[0] * shape[1]].view(torch.float16).view(shape)
    with pytest.raises(gp.InvalidProblem, match="workspace overlaps dy"):
        job.plan.run(job.args(), workspace=memory)


@gpu
def test_mixed_devices_are_refused():
    job = Job("resident", "cuda")
    before = job.bits()
    for name in ("dy", "x"):
        here = {**job.tensors, name: job.tensors[name].cpu()}
        with pytest.raises(gp.InvalidProblem, match=f"{name}.*cuda:0.*cpu"):
            job.plan.run(type(job.args())(**here))
    a = torch.ones(3, 4)
    for dy, y in [(a.cuda(), a), (a, a.cuda()), (a.cuda(), a.numpy()), (a.numpy(), a.cuda())]:
        with pytest.raises(gp.InvalidProblem, match=r"cuda:0|cpu"):
            gp.softmax_backward(dy, y)
    with pytest.raises(gp.InvalidProblem):
        gp.softmax_backward(a.cuda(), a.cuda(), out=a)
    assert all(torch.equal(before[output], now) for output, now in job.bits().items())


@gpu
def test_cuda_is_the_current_device():
    desc = cases.describe(spec_of("sum"), ElementKind.F32, (4, 4), (1,))
    plan = gp.ReduceBackwardPlan.select(desc, device="cuda")
    assert plan.device == f"cuda:{torch.cuda.current_device()}"
    assert plan is gp.ReduceBackwardPlan.select(desc, device="cuda:0")
    assert plan is gp.ReduceBackwardPlan.select(desc, device=torch.device("cuda:0"))
    with pytest.raises(gp.Unsupported, match="CUDA devices"):
        gp.ReduceBackwardPlan.select(desc, device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(gp.Unsupported, match="numba"):
        gp.ReduceBackwardPlan.select(
            desc, device="cuda", preference=gp.PlanPreference(backend="numba")
        )


@gpu
def test_calls_like_earlier_ones_have_their_bits():
    """The short way of repeated calls: other arrays of the same layouts, and layouts in turns."""
    desc = gp.SoftmaxBackwardDescriptor(
        kind="softmax", input_shape=(48, 80), softmax_axis=1, element=gp.ElementKind.F32
    )
    plan = gp.SoftmaxBackwardPlan.select(desc, device="cuda")
    for turn in range(6):
        dy = torch.randn(48, 80, device="cuda")
        y = torch.randn(48, 80, device="cuda").softmax(1)
        if turn % 3 == 2:
            dy = dy.T.contiguous().T
        expected, dx = torch.empty_like(y), torch.full_like(y, torch.nan)
        plan.bind(gp.SoftmaxBackwardArgs(dy=dy, y=y, dx=expected))()
        args = gp.SoftmaxBackwardArgs(dy=dy, y=y, dx=dx)
        plan.run(args)
        assert torch.equal(dx, expected)
        assert plan._recent.find((dy, y, dx)) is not None
        plan.run(args, stream=torch.cuda.current_stream())
        assert torch.equal(gp.softmax_backward(dy, y), expected)
        da, db = gp.lerp_backward(dy, 0.25)
        assert torch.equal(da, dy * 0.75)
        assert torch.equal(db, dy * 0.25)
        mean = gp.mean_backward(dy[:, 0], (48, 80), axis=1)
        torch.testing.assert_close(mean, (dy[:, :1] / 80).expand(48, 80))
        plan.run(gp.SoftmaxBackwardArgs(dy=dy, y=y, dx=dy))  # in place
        assert torch.equal(dy, expected)
    with pytest.raises(gp.InvalidProblem, match="requires_grad"):
        gp.softmax_backward(dy.requires_grad_(), y)
    with pytest.raises(gp.InvalidProblem, match="overlap"):
        plan.run(gp.SoftmaxBackwardArgs(dy=dx, y=y, dx=y))


@gpu
def test_functions_take_and_return_torch_tensors():
    dy = torch.randn(33, 65, device="cuda", dtype=torch.bfloat16)
    y = torch.softmax(torch.randn(33, 65, device="cuda"), 1).bfloat16()
    got = gp.softmax_backward(dy, y)
    assert (got.device, got.dtype, got.shape) == (dy.device, dy.dtype, dy.shape)
    d, v = dy.double(), y.double()
    torch.testing.assert_close(got.double(), v * (d - (v * d).sum(1, True)), rtol=1e-2, atol=1e-4)
    out = torch.full_like(dy, torch.nan).T.contiguous().T
    assert gp.softmax_backward(dy, y, out=out) is out
    # Lying otherwise, it is summed in another order: the last bit of a bfloat16 may differ.
    torch.testing.assert_close(out, got, rtol=2.0**-7, atol=0.0)
    da, db = gp.lerp_backward(dy, 0.25)
    assert torch.equal(da, dy * 0.75)
    assert torch.equal(db, dy * 0.25)


@gpu
def test_a_new_shape_compiles_nothing():
    def run(rows, columns, param):
        dy = torch.ones(rows, columns, device="cuda")
        gp.softmax_backward(dy, dy)
        gp.cumsum_backward(dy)
        gp.lerp_backward(dy, param)

    run(1000, 1000, 0.3)
    before = len(launch._kernels)
    run(2000, 1000, 0.4)
    run(1504, 1004, -3.5)  # 16 divides neither 1000 nor 1004: the same variant
    assert len(launch._kernels) == before


def variants_of(kind, shape, axes, **options):
    desc = cases.describe(spec_of(kind), ElementKind.BF16, shape, axes, **options)
    strides = {op.name: c_strides(op.shape) for op in desc.operands}
    program = programs.prepare(desc, strides, "sm_90", 0)
    return [launch._variant(step, 16) for step in program.steps]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("softmax", (1024, 1008), (77, 976)),
        ("var", (2, 6_000_000), (3, 9_000_048)),
        ("prod", (4096, 80), (1024, 96)),
        ("cumsum", (2, 6_000_001), (1, 9_000_001)),
        ("cummax", (512, 1001), (600, 1003)),
        ("sum", (4096, 4096), (512, 32_768)),
        ("embedding", (5000, 96, 300), (700_000, 112, 400)),
    ],
)
def test_shapes_of_one_variant_share_its_kernels(kind, one, other):
    """Extents, counts and numbers are arguments: only powers of two and divisibility compile."""
    assert set(variants_of(kind, one, (1,))) == set(variants_of(kind, other, (1,)))


def test_a_new_weight_or_correction_compiles_nothing():
    assert variants_of("lerp", (64, 64), (), param=0.3) == variants_of(
        "lerp", (64, 64), (), param=-7.0
    )
    assert variants_of("var", (64, 64), (1,), correction=1) == variants_of(
        "var", (64, 64), (1,), correction=0.5
    )


# The ids send these tests all to one process: together they would fill a GPU.
MANY = 2**31 + 4160


def half(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


@gpu
@pytest.mark.parametrize("size", [pytest.param("large", id="large-bf16")])
class TestMoreThan2To31Elements:
    @pytest.fixture(autouse=True)
    def room(self):
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < 30 << 30:
            pytest.skip("needs 30 GiB of GPU memory")
        yield
        gc.collect()
        torch.cuda.empty_cache()

    def slices(self, n=MANY, width=1000):
        for start in (0, 2**30 - 500, 2**31 - 500, n - width):
            yield slice(start, start + width)

    def test_map(self, size):
        dy = half(MANY).normal_()
        da, db = half(MANY).fill_(torch.nan), half(MANY).fill_(torch.nan)
        gp.lerp_backward(dy, 0.3, out=(da, db))
        for part in self.slices():
            assert torch.equal(da[part], (dy[part].float() * np.float32(0.7)).bfloat16())
            assert torch.equal(db[part], (dy[part].float() * np.float32(0.3)).bfloat16())
        assert not da.isnan().any()

    def test_map_of_strided_rows(self, size):
        """A broadcast dy, and an output whose rows lie apart."""
        rows, columns = 2**20 + 3, 2048
        memory = half(rows, columns + 2).fill_(torch.nan)
        out = memory[:, :columns]
        dy = half(rows, 1).normal_()
        gp.sum_backward(dy, (rows, columns), axis=1, keepdims=True, out=out)
        for row in (0, 2**20 - 1, 2**20, rows - 1):
            assert (out[row] == dy[row]).all()
        assert memory[-1, columns:].isnan().all()

    @pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
    def test_many_rows(self, size, columns):
        rows, n = 2**21 + 3, 1024
        shape, axis = ((n, rows), 0) if columns else ((rows, n), 1)
        dy, y = half(*shape).normal_(), half(*shape).uniform_(0, 2 / n)
        dx = half(*shape).fill_(torch.nan)
        gp.softmax_backward(dy, y, axis=axis, out=dx)
        for row in (0, 2**20, 2**21 - 1, 2**21, rows - 1):
            d, v, got = (a.select(1 - axis, row).double() for a in (dy, y, dx))
            want = v * (d - (v * d).sum())
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)

    def test_one_long_row(self, size):
        dy, y, dx = half(MANY).normal_(), half(MANY).fill_(2.0**-31), half(MANY).fill_(torch.nan)
        total = sum(float(part.sum(dtype=torch.float64)) for part in dy.split(1 << 28)) * 2.0**-31
        gp.softmax_backward(dy, y, out=dx)
        for part in self.slices():
            want = 2.0**-31 * (dy[part].double() - total)
            torch.testing.assert_close(dx[part].double(), want, rtol=2**-7, atol=0)

    @pytest.mark.parametrize("ties", ["first", "last"])
    def test_places_beyond_32_bits(self, size, ties):
        """The winner's index needs 64 bits."""
        x = half(MANY).zero_()
        place = {"first": MANY - 7, "last": 5}[ties]
        x[[MANY - 7, MANY - 3]] = 1.0
        if ties == "last":
            x[5] = 1.0
            place = MANY - 3
        one = torch.ones(1, dtype=torch.bfloat16, device="cuda")
        dx = half(MANY).fill_(torch.nan)
        gp.max_backward(one, x, one, axis=0, keepdims=True, ties=ties, out=dx)
        assert dx[place] == 1
        assert sum(float(part.float().abs().sum()) for part in dx.split(1 << 28)) == 1

    def test_one_long_scan(self, size):
        """Ones far apart: every sum is a small whole number."""
        for reverse in (False, True):
            dy, dx = half(MANY).zero_(), half(MANY).fill_(torch.nan)
            places = [3, 2**30, 2**31 - 1, 2**31, MANY - 5]
            dy[places] = 1.0
            gp.cumsum_backward(dy, reverse=reverse, out=dx)
            for part in self.slices():
                at = torch.arange(part.start, part.stop, device="cuda")
                marks = torch.tensor(places, device="cuda")[:, None]
                want = (marks <= at if reverse else marks >= at).sum(0)
                assert torch.equal(dx[part].long(), want)

    @pytest.mark.parametrize("kind", ["cumsum", "cummax", "cumprod"])
    def test_many_scans(self, size, kind):
        rows, n = 2**20 + 3, 2048
        dy, dx = half(rows, n).normal_(), half(rows, n).fill_(torch.nan)
        x = None if kind == "cumsum" else half(rows, n).uniform_(0.999, 1.001)
        y = torch.cummax(x[-1:], 1).values if kind == "cummax" else None
        more = () if x is None else (x,)
        getattr(gp, f"{kind}_backward")(dy, *more, out=dx)
        d = dy[-1].double()
        if kind == "cumsum":
            want = d.flip(0).cumsum(0).flip(0)
        elif kind == "cumprod":
            saved = x[-1].double().cumprod(0)
            want = (d * saved).flip(0).cumsum(0).flip(0) / x[-1].double()
        else:
            first = torch.cat([torch.ones(1, 1, device="cuda").bool(), y[:, 1:] > y[:, :-1]], 1)[0]
            group = first.long().cumsum(0) - 1
            sums = torch.zeros(n, dtype=torch.float64, device="cuda").index_add_(0, group, d)
            want = torch.where(first, sums[group], 0.0)
        error = (dx[-1].double() - want).norm() / want.norm()
        assert error < 2**-7
        assert not dx[2**20 :].isnan().any()

    def test_more_than_2_to_31_rows(self, size):
        """The number of a row needs 64 bits."""
        dy, dx = half(MANY, 1).normal_(), half(MANY, 1).fill_(torch.nan)
        gp.cumsum_backward(dy, out=dx)
        assert torch.equal(dx, dy)
        dx.fill_(torch.nan)
        y = half(MANY, 1).fill_(1.0)
        gp.softmax_backward(dy, y, out=dx)
        assert not dx.any()
        del y, dx
        out = half(MANY, 2).fill_(torch.nan)
        gp.sum_backward(dy, (MANY, 2), axis=1, keepdims=True, out=out)
        for part in self.slices():
            assert (out[part] == dy[part]).all()

    def test_embedding(self, size):
        count, dim, rows = 2**25 + 65, 64, 1000
        dout = half(count, dim).zero_()
        dout[-3000:] = 1.0
        indices = torch.arange(count, device="cuda", dtype=torch.int32) % rows
        dweight = half(rows, dim).fill_(torch.nan)
        gp.embedding_backward(dout, indices, rows, out=dweight)
        assert (dweight == 3).all()

    def test_a_large_table(self, size):
        rows, dim = 2**25 + 65, 64
        dweight = half(rows, dim).fill_(torch.nan)
        dout = torch.ones(4, dim, dtype=torch.bfloat16, device="cuda")
        indices = torch.tensor([0, 2**25 + 64, 2**25, 2**25], device="cuda")
        gp.embedding_backward(dout, indices, rows, out=dweight)
        assert (dweight[[0, 2**25 + 64]] == 1).all()
        assert (dweight[2**25] == 2).all()
        assert sum(float(part.float().sum()) for part in dweight.split(1 << 22)) == 4 * dim


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


def test_the_jobs_cover_every_engine():
    kinds = {job[0] for job in JOBS.values()}
    assert {spec.engine for spec in SPECS} == {spec_of(kind).engine for kind in kinds}
    assert {spec.category for spec in SPECS} >= {OpCategory.SCAN, OpCategory.EMBEDDING}
