"""On a GPU: programs that wait for each other, on streams of any priority and in graphs."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gradplan as gp
from gradplan.backends.gpu import launch, streams
from jobs import (
    JOBS,
    Job,
    busy,
    gpu,
    workspace_for,
)

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


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
        wanted = "held" if shape[1] >= 1 << 20 else "chained"
        assert self.plan.bind(self.args).sku.variant == wanted

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
    "chain": lambda seed: Sums((7, 1 << 19), seed=seed),
    "waves": lambda seed: Sums((1, 1 << 25), seed=seed),
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
        ("waves", "waves"),
        ("waves", "held"),
        ("waves", "chains"),
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


def test_the_counters_of_a_stream_are_never_none(monkeypatch):
    """Other threads look at them while they are made."""

    class Watched(dict):
        def __setitem__(self, key, value):
            assert value
            super().__setitem__(key, value)

        def setdefault(self, key, value):
            self[key] = value
            return value

    monkeypatch.setattr(streams, "capturing", lambda stream: False)
    monkeypatch.setattr(streams, "_counters", Watched())
    made = lambda device, stream, count: torch.zeros(4 * count, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(streams, "_counters_on", made)
    first = streams.stream_counters(0, 7, 100)
    assert first == streams.stream_counters(0, 7, 1000)
    assert first != streams.stream_counters(0, 7, 2000)
    first, second = streams._counters[0, 7]  # a launch may still use the first
    assert first.numel() < second.numel()


def test_launches_that_belong_together_are_not_mixed_with_others_on_a_stream():
    """Threads may share a workspace there, by whatever plans."""

    class Call:
        block, pointers = None, ()

        def on(self, handle, stream):
            return lambda: 0

    some = [launch.Bound([Call(), Call()], 0) for _ in range(2)]
    for one in some:
        one.load(16, [None, None])
    locks = [[one._on(stream).args[2] for one in some] for stream in (7, 8)]
    assert locks[0][0] is locks[0][1]
    assert locks[1][0] is locks[1][1]
    assert locks[0][0] is not locks[1][0]


@gpu
def test_memory_for_the_streams_of_threads():
    """One handle names a stream of each thread; memory of one that is busy is not another's."""
    met = []

    def sleep_and_allocate():
        with torch.cuda.stream(torch.cuda.ExternalStream(streams.PER_THREAD)):
            busy(0.5)
        met.append(streams.allocate(1 << 20, 0, streams.PER_THREAD).data_ptr())
        if len(met) == 1:
            other = threading.Thread(target=sleep_and_allocate)
            other.start()
            other.join()

    thread = threading.Thread(target=sleep_and_allocate)
    thread.start()
    thread.join()
    assert met[0] != met[1]
    torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("stream", [0, 1, streams.PER_THREAD])
def test_streams_by_the_handles_that_cuda_names(stream):
    one = Sums((3, 300_000))
    torch.cuda.synchronize()
    got = gp.cumsum_backward(one.dy, 1, stream=stream)
    launch = one.plan.bind(one.args)
    launch(stream=stream)
    torch.cuda.synchronize()
    assert torch.equal(got, one.dx)


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
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert one.dx.isnan().all()
    one.plan.run(one.args, stream=fresh, workspace=workspace)
    torch.cuda.synchronize()
    one.check()


@gpu
def test_beside_other_processes():
    """Processes take turns on a GPU, and a launch may be interrupted in its midst: what it had on
    the chip is put away and comes back. All of it must."""
    command = [sys.executable, str(Path(__file__).with_name("beside.py")), "10"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(8)
    ]
    try:
        told = [one.communicate(timeout=240)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    assert not any(one.returncode for one in running), "\n".join(told)
