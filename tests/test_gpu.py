"""Launches: graphs, streams, threads, memory, workspaces, and what is compiled anew.

Tests marked `gpu` are skipped where there is no CUDA device. Those that take a `place` run in
Triton's interpreter there instead, with smaller shapes.
"""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import pytest

import gradplan as gp
from covering import SPECS, spec_of
from gradplan import cases
from gradplan.backends.gpu import launch, programs, table
from gradplan.cases import Case
from gradplan.geometry import c_strides
from gradplan.kinds import ElementKind, OpCategory
from gradplan.views import addresses_of
from jobs import (
    JOBS,
    WITH_WORKSPACE,
    Job,
    busy,
    gpu,
    jobs,
    named_for,
    places,
    workspace_for,
)

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@jobs
def test_jobs_of_a_gpu_meet_their_variants_on_sm_90(name):
    """Told from the table, without a GPU."""
    kind, large, _, element, without, options = JOBS[name]
    desc = cases.describe(spec_of(kind), ElementKind(element), large, (1,), **options)
    strides = cases.strides_of(Case(desc=desc, without=without))
    made = programs.prepare(desc, strides, "sm_90", 0)
    assert made.variant.startswith(named_for(name))
    assert made.workspace_bytes <= programs.workspace_bound(desc, table.table_of("sm_90"))
    # A launch of pointers that 16 does not divide is compiled otherwise, or not at all.
    pointers = [value for step in made.steps for _, value in step.arguments]
    assert not any(one.offset % 16 for one in pointers if isinstance(one, launch.Pointer))


@jobs
@places
def test_jobs_meet_the_variants_they_are_named_for(name, place):
    job = Job(name, place)
    sku = job.plan.bind(job.args()).sku
    if place == "cpu" and named_for(name) in ("cluster", "held", "walked"):
        # The interpreter runs one program after another, and has no shared memory.
        assert sku.variant.startswith(("resident", "lagged", "chained", "tiled"))
    else:
        assert sku.variant.startswith(named_for(name))
    assert sku.backend is gp.BackendKind.TRITON
    assert sku.arch == ("interpreter" if place == "cpu" else launch.device_arch(0))
    needs = name in WITH_WORKSPACE or (name, place) == ("cluster", "cpu")
    assert (job.plan.bind(job.args()).workspace_size > 0) == needs


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
    contents = job.staged(3)
    for way in ways[:3] if place == "cpu" else ways * 5:
        job.load(contents)
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
@pytest.mark.parametrize("name", WITH_WORKSPACE)
def test_the_memory_of_a_bound_launch_is_in_nobodys_use(name):
    """It may run on any stream, while what the memory was used for before is still to be done."""
    job = Job(name, "cuda")
    busy(0.1)
    job.plan.run(job.args())
    launch = job.plan.bind(job.args())
    assert torch.cuda.current_stream().query()
    launch(stream=torch.cuda.Stream())
    torch.cuda.synchronize()
    job.check()


@gpu
def test_new_arrays_are_allocated_for_the_stream_that_writes_to_them():
    dy, y = torch.rand(2, 1000, 1000, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(3):  # the last two as calls like an earlier one
        used = torch.empty_like(dy)
        address = used.data_ptr()
        torch.cuda.synchronize()
        busy(0.1)
        used.zero_()
        del used
        got = gp.softmax_backward(dy, y, stream=side)
        assert got.data_ptr() != address
        side.synchronize()
        torch.testing.assert_close(got, y * (dy - (dy * y).sum(1, keepdim=True)))
        torch.cuda.synchronize()


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
    stream = torch.cuda.current_stream().cuda_stream
    # More programs than a grid holds: refused at the launch, and nothing is broken.
    wrong = launch.Launcher([replace(step, grid=2**31) for step in steps], 0)
    with pytest.raises(gp.KernelFailure, match="invalid argument") as caught:
        wrong.bind(addresses_of(views), workspace.data_ptr())(stream)
    assert caught.value.code == 1
    job.plan.run(job.args())
    torch.cuda.synchronize()
    job.check()


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
    for call, needed in ((plan.run, size), (plan.bind, plan.bind(args).workspace_size)):
        if needed:
            with pytest.raises(gp.WorkspaceTooSmall, match="workspace") as caught:
                call(args, workspace=good[: needed - 1])
            assert (caught.value.needed, caught.value.got) == (needed, needed - 1)
            shrunk = workspace_for(plan, place)
            shrunk.untyped_storage().resize_(0)
            with pytest.raises(gp.WorkspaceTooSmall, match="workspace"):
                call(args, workspace=shrunk)
    assert all(torch.equal(before[output], now) for output, now in job.bits().items())
    found = []
    for call in (plan.bind(args), plan.bind(args, workspace=good[:needed])):
        job.fill(0)
        call()
        found.append(job.bits())
    assert all(torch.equal(found[0][output], now) for output, now in found[1].items())


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
        ("cummax", (512, 1001), (520, 1003)),
        ("sum", (4096, 4096), (512, 32_768)),
        ("embedding", (30_000, 96, 300), (700_000, 112, 400)),
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


def test_the_jobs_cover_every_engine():
    kinds = {job[0] for job in JOBS.values()}
    assert {spec.engine for spec in SPECS} == {spec_of(kind).engine for kind in kinds}
    assert {spec.category for spec in SPECS} >= {OpCategory.SCAN, OpCategory.EMBEDDING}
