"""Calls like an earlier one: what is taken for alike, and what is left to the long way.

The programs here only note the addresses they are given, so no GPU is needed.
"""

import ctypes
import struct
from types import SimpleNamespace

import pytest

import gradplan as gp
from gradplan import again as calls
from gradplan import functions, plans
from gradplan.again import Recent
from gradplan.backends import _TritonBackend
from gradplan.backends.gpu import launch
from gradplan.views import torch_maker, view

torch = pytest.importorskip("torch")


class Program:
    def __init__(self, workspace=0):
        self.workspace_bytes = workspace
        self.ran = []
        self.started = 0

    def launch(self, addresses, workspace, stream):
        self.ran.append((addresses, workspace, stream))

    def start_at(self, addresses):
        self.started += 1
        return lambda stream: self.launch(addresses, 0, stream)


class Streams:
    device = 0

    def current(self):
        return 7

    def handle(self, stream):
        return stream


class Backend:
    device = 0


class FakePlan:
    """A plan on a GPU that this machine has not."""

    _backend = Backend()
    _same = frozenset({"dy"})

    def __init__(self, outputs=("dx",), workspace=0):
        self._outputs = outputs
        self.program = Program(workspace)

    def _prepare(self, views):
        return self.program

    def _streams_of(self, views):
        return Streams()

    def _workspace(self, needed, given, views, stream):
        if given is None:
            return 4096, None
        if given == "bad":
            raise gp.InvalidProblem("workspace")
        return given, given


def met(plan, **arrays):
    recent = Recent()
    views = {name: view(one, name) for name, one in arrays.items() if one is not None}
    recent.note(plan, views, tuple(arrays.values()))
    return recent


def tensors(count=3, **more):
    return [torch.randn(4, 6, **more) for _ in range(count)]


def test_the_same_layout_runs_with_its_own_addresses():
    plan = FakePlan(workspace=64)
    recent = met(plan, **dict(zip(("dy", "y", "dx"), tensors(), strict=True)))
    for stream, handle in ((None, 7), (3, 3)):
        others = tuple(tensors())
        again = recent.find(others)
        assert again.launch(others, stream)
        addresses = dict(zip(("dy", "y", "dx"), (t.data_ptr() for t in others), strict=True))
        assert plan.program.ran[-1] == (addresses, 4096, handle)


@pytest.mark.parametrize("needed", [0, 64])
def test_arrays_that_stay_where_they_are_start_at_once(needed):
    plan = FakePlan(workspace=needed)
    arrays, others = tuple(tensors()), tuple(tensors())
    again = met(plan, **dict(zip(("dy", "y", "dx"), arrays, strict=True))).find(arrays)
    calls = [arrays] * 4 + [others, arrays, others] + [others[:2] + arrays[2:]] * 3
    for stream, some in enumerate(calls):
        assert again.launch(some, stream)
    wanted = [tuple(one.data_ptr() for one in some) for some in calls]
    assert [tuple(addresses.values()) for addresses, _, _ in plan.program.ran] == wanted
    assert [stream for *_, stream in plan.program.ran] == [*range(len(calls))]
    assert plan.program.started == (0 if needed else 2)
    assert not again.launch((*arrays[:2], arrays[1]), None)
    assert not again.launch((*arrays[:2], arrays[1]), None), "nor the second time"


@pytest.mark.parametrize("needed", [0, 64])
def test_a_workspace_is_checked_and_used(needed):
    plan = FakePlan(workspace=needed)
    arrays = tuple(tensors())
    again = met(plan, **dict(zip(("dy", "y", "dx"), arrays, strict=True))).find(arrays)
    assert again.launch(arrays, None, 8192)
    assert plan.program.ran[-1][1] == 8192
    assert again.launch(arrays, None)
    assert plan.program.ran[-1][1] == (4096 if needed else 0)
    with pytest.raises(gp.InvalidProblem, match="workspace"):
        again.launch(arrays, None, "bad")
    assert len(plan.program.ran) == 2


def test_fresh_arrays_are_written_to():
    plan = FakePlan()
    dy, y, dx, other = tensors(4)
    views = {name: view(one, name) for name, one in (("dy", dy), ("y", y), ("dx", dx))}
    recent = Recent()
    recent.note(plan, views, (dy, None, y), fresh=1, shape=(4, 6))
    again = recent.find((dy, None, y))
    made = again.fresh((dy, None, y))
    assert [(one.shape, one.stride(), one.dtype) for one in made] == [((4, 6), (6, 1), dy.dtype)]
    assert again.launch((dy, None, y), None, None, [other])
    addresses = {"dy": dy.data_ptr(), "y": y.data_ptr(), "dx": other.data_ptr()}
    assert plan.program.ran == [(addresses, 0, 7)]


def test_fresh_arrays_are_allocated_for_their_stream(monkeypatch):
    plan = FakePlan()
    dy, dx = tensors(2)
    recent = Recent()
    recent.note(plan, {"dy": view(dy), "dx": view(dx)}, (dy,), fresh=1, shape=(4, 6))
    met = []
    monkeypatch.setattr(calls, "made_for", lambda *words: met.append(words[:2]))
    recent.find((dy,)).fresh((dy,))
    assert not met
    recent.find((dy,)).fresh((dy,), 64)
    assert met == [(0, 64)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (2, 3, 5)])
def test_fresh_arrays_are_contiguous_and_of_the_shape_asked_for(turned, shape):
    like = torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))) if turned else None
    like = torch.randn(shape) if like is None else like
    row = torch.randn(shape[:-1])
    for arrays in ((like,), (row, like), (row, None), (row, None, like)):
        place, make = torch_maker(arrays, shape)
        made = make(arrays[place])
        assert made.shape == shape
        assert made.is_contiguous()
        assert made.stride() == torch.empty(shape).stride()


def test_no_memory_for_fresh_arrays_is_a_kernel_failure(monkeypatch):
    dy, dx = tensors(2)
    recent = Recent()

    def fails(like):
        raise torch.cuda.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "empty_like", fails)
    recent.note(FakePlan(), {"dy": view(dy), "dx": view(dx)}, (dy,), fresh=1, shape=(4, 6))
    with pytest.raises(gp.KernelFailure, match="no memory for an output of shape") as caught:
        recent.find((dy,)).fresh((dy,))
    assert caught.value.code == 2


def test_writes_are_counted():
    dy, y, dx, other = tensors(4)
    arrays = (dy, y, dx)
    again = met(FakePlan(), dy=dy, y=y, dx=dx).find(arrays)
    for version in (1, 2):
        assert again.launch(arrays, None)
        assert [one._version for one in arrays] == [0, 0, version]
    assert not again.launch((dy, y, y), None)
    assert y._version == 0
    pair = met(FakePlan(outputs=("da", "db")), dy=dy, da=None, db=other)
    assert pair.find((dy, None, other)).launch((dy, None, other), None)
    assert (dy._version, other._version) == (0, 1)


def test_fresh_arrays_count_no_write():
    dy, dx, other = tensors()
    recent = Recent()
    recent.note(FakePlan(), {"dy": view(dy), "dx": view(dx)}, (dy,), fresh=1, shape=(4, 6))
    assert recent.find((dy,)).launch((dy,), None, None, [other])
    assert (dy._version, other._version) == (0, 0)


def test_where_tangents_may_be_the_long_way_looks():
    from torch.autograd import forward_ad

    plan, arrays = FakePlan(), tuple(tensors())
    again = met(plan, **dict(zip(("dy", "y", "dx"), arrays, strict=True))).find(arrays)
    with forward_ad.dual_level():
        assert not again.launch(arrays, None)
    assert plan.program.ran == []
    assert again.launch(arrays, None)


OTHERS = {
    "shape": lambda: torch.randn(4, 7),
    "rank": lambda: torch.randn(24),
    "strides": lambda: torch.randn(6, 4).T,
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "dtype": lambda: torch.randn(4, 6, dtype=torch.float64),
    "device": lambda: torch.empty(4, 6, device="meta"),
    "gradient": lambda: torch.randn(4, 6, requires_grad=True),
    "negated": lambda: torch._neg_view(torch.randn(4, 6)),
    "subclass": lambda: torch.nn.Parameter(torch.randn(4, 6), requires_grad=False),
    "sparse": lambda: torch.randn(4, 6).to_sparse(),
    "an array": lambda: torch.randn(4, 6).numpy(),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_layout_goes_the_long_way(other):
    dy, y, dx = tensors()
    recent = met(FakePlan(), dy=dy, y=y, dx=dx)
    assert recent.find((dy, y, dx)) is not None
    for place in range(3):
        arrays = [dy, y, dx]
        arrays[place] = OTHERS[other]()
        assert recent.find(tuple(arrays)) is None
    with torch.no_grad():
        assert recent.find((dy, y, torch.randn(4, 6, requires_grad=True))) is None


def test_what_is_not_given_tells_calls_apart():
    plan = FakePlan(outputs=("da", "db"))
    dy, out = tensors(2)
    recent = met(plan, dy=dy, da=out, db=None)
    assert recent.find((dy, None, out)) is None
    assert recent.find((dy, out, out)) is None
    again = recent.find((dy, out, None))
    assert again.launch((dy, out, None), None)
    assert plan.program.ran[-1][0] == {"dy": dy.data_ptr(), "da": out.data_ptr()}


def test_arrays_that_share_memory_go_the_long_way():
    buffer = torch.randn(100)
    dy, y, dx = (buffer[k : k + 24].view(4, 6) for k in (0, 24, 48))
    recent = met(FakePlan(), dy=dy, y=y, dx=dx)
    again = recent.find((dy, y, dx))
    assert again.launch((dy, y, dx), None)
    assert again.launch((dy, y, dy), None), "in place of dy itself"
    assert not again.launch((dy, y, y), None)
    assert not again.launch((dy, y, buffer[40:64].view(4, 6)), None)
    assert not again.launch((dy, y, buffer[1:25].view(4, 6)), None)
    assert again.launch((dy, dy, dx), None), "inputs may"


def test_outputs_that_share_memory_go_the_long_way():
    dy, da, db = tensors()
    again = met(FakePlan(outputs=("da", "db")), dy=dy, da=da, db=db).find((dy, da, db))
    assert again.launch((dy, da, db), None)
    assert not again.launch((dy, da, da), None)


def test_a_shrunk_storage_goes_the_long_way():
    dy, y, dx = tensors()
    again = met(FakePlan(), dy=dy, y=y, dx=dx).find((dy, y, dx))
    y.untyped_storage().resize_(16)
    assert not again.launch((dy, y, dx), None)


def test_a_few_layouts_take_turns():
    plan, recent = FakePlan(), Recent()
    made = [[torch.randn(4, n), torch.randn(4, n)] for n in range(2, 9)]
    for pair in made:
        views = {name: view(one, name) for name, one in zip(("dy", "dx"), pair, strict=True)}
        recent.note(plan, views, tuple(pair))
    found = [recent.find(tuple(pair)) is not None for pair in made]
    assert found == [False] * 3 + [True] * 4


def test_layouts_that_only_come_and_go_are_noted_no_more():
    plan, recent = FakePlan(), Recent()
    pairs = [tuple(torch.randn(2, 4, n).unbind()) for n in range(1, 40)]
    noted = []
    for pair in pairs:
        views = {name: view(one, name) for name, one in zip(("dy", "dx"), pair, strict=True)}
        recent.note(plan, views, pair)
        noted.append(any(one.like(*pair) for one in recent._met))
    assert noted == [True] * 8 + [False] * 31
    assert recent.find(pairs[7]) is not None
    views = {name: view(one, name) for name, one in zip(("dy", "dx"), pairs[30], strict=True)}
    recent.note(plan, views, pairs[30])
    assert recent.find(pairs[30]) is not None, "one that came back lets others in again"


def test_empty_arrays_are_not_remembered():
    dy, dx = torch.empty(0, 4), torch.empty(0, 4)
    assert met(FakePlan(), dy=dy, dx=dx).find((dy, dx)) is None


def test_without_the_comparison_all_go_the_long_way(monkeypatch):
    monkeypatch.setattr("gradplan.again._guards", lambda: None)
    arrays = tensors()
    recent = met(FakePlan(), **dict(zip(("dy", "y", "dx"), arrays, strict=True)))
    assert recent.find(tuple(arrays)) is None


def test_on_the_cpu_nothing_is_remembered():
    dy = torch.randn(4, 6)
    desc = gp.ScanBackwardDescriptor(
        kind="cumsum", input_shape=(4, 6), scan_axis=1, element=gp.ElementKind.F32
    )
    plan = gp.ScanBackwardPlan.select(desc)
    plan.run(gp.ScanBackwardArgs(dy=dy, dx=torch.empty(4, 6)))
    assert plan._recent.find((dy, dy)) is None


@pytest.fixture
def launches(monkeypatch):
    """What the driver of a GPU would be told, (stream, words) each: the arrays lie on the CPU."""
    told = []

    def driver(config, _function, _each, extra):
        _, block, _, size, _ = (ctypes.c_uint64 * 5).from_address(extra)
        words = ctypes.c_uint64.from_address(size).value // 8
        (stream,) = struct.unpack_from("Q", config, 32)
        told.append((stream, set((ctypes.c_uint64 * words).from_address(block))))
        return 0

    backend = _TritonBackend("sm_90", 0, 132)
    monkeypatch.setattr(plans, "find", lambda device, preference: backend)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "streams_of", lambda device, owner: Streams())
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    monkeypatch.setattr(plans, "allocate", lambda size, device, stream: memory[:size])
    monkeypatch.setattr(calls, "made_for", lambda device, stream, make: make())
    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(launch=driver))
    monkeypatch.setattr(launch, "_handle", lambda *_: (1, 0, 32))
    monkeypatch.setattr(launch, "_pointer", lambda address: address)
    made = [one for one in vars(functions).values() if isinstance(one, functions._Function)]
    for one in [*made, *functions._SCANS.values(), *functions._REDUCTIONS.values()]:
        monkeypatch.setattr(one, "asked", {})
        monkeypatch.setattr(one, "recent", {})
    return told


def rows(count, n=37):
    return [torch.randn(3, n) for _ in range(count)]


CALLS = {
    "softmax": lambda: (gp.softmax_backward, rows(2), {}),
    "lerp": lambda: (gp.lerp_backward, rows(1), {"weight": 0.25}),
    "cumsum": lambda: (gp.cumsum_backward, rows(1), {}),
    "cumprod": lambda: (gp.cumprod_backward, rows(3), {"axis": 0}),
    "cumprod without y": lambda: (gp.cumprod_backward, rows(2), {}),
    "sum": lambda: (gp.sum_backward, rows(1, 1), {"shape": (3, 37), "axis": 1, "keepdims": True}),
    "std": lambda: (
        gp.std_backward, [*rows(1, 1), *rows(1), *rows(1, 1)], {"axis": 1, "keepdims": True}
    ),
    "embedding": lambda: (
        gp.embedding_backward, [*rows(1), torch.tensor([4, 1, 4])], {"num_embeddings": 5}
    ),
}  # fmt: skip


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_a_table_of_the_shape_of_its_indices_has_the_type_of_its_rows(index, launches):
    """The first call goes the long way, the others are like it."""
    for _ in range(3):
        indices = torch.arange(32, dtype=index).reshape(4, 8) % 4
        found = gp.embedding_backward(torch.ones(4, 8, 8), indices, num_embeddings=4, stream=1)
        assert (found.shape, found.dtype) == ((4, 8), torch.float32)


@pytest.mark.parametrize("kind", CALLS)
def test_functions_launch_again_with_the_addresses_of_each_call(kind, launches, monkeypatch):
    function, _, options = CALLS[kind]()
    long_way = []
    run = plans.Plan._run_views

    def noted(*given, **named):
        long_way.append(given)
        run(*given, **named)

    monkeypatch.setattr(plans.Plan, "_run_views", noted)
    kept = []
    for stream in range(1, 5):
        _, arrays, _ = CALLS[kind]()
        found = function(*arrays, **options, stream=stream)
        outputs = found if isinstance(found, tuple) else (found,)
        wanted = {one.data_ptr() for one in (*arrays, *outputs)}
        assert {one for one, _ in launches} == {stream}
        assert wanted <= set.union(*(words for _, words in launches))
        assert all(one.is_contiguous() and one.dtype == arrays[0].dtype for one in outputs)
        shape = (5, 37) if kind == "embedding" else (3, 37)
        assert all(one.shape == shape and one._version == 0 for one in outputs)
        kept.append((arrays, outputs))
        launches.clear()
    assert len(long_way) == 1
