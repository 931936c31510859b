"""Which stream memory is allocated for, and which is waited for, by a torch that only notes it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gradplan.backends.gpu import streams

PER_THREAD = streams.PER_THREAD


class Memory:
    def __init__(self, stream):
        self.stream = stream
        self.used_on = []

    def record_stream(self, stream):
        self.used_on.append(stream.handle)


class Stream:
    def __init__(self, handle, waited):
        self.handle = handle
        self._waited = waited

    def synchronize(self):
        self._waited.append(self.handle)


@pytest.fixture
def torch(monkeypatch):
    """torch with 7 as its current stream; `captured` are streams that a graph is made of."""
    current, waited = [7], []

    @contextmanager
    def stream(one):
        current.append(one.handle)
        yield
        current.pop()

    fake = SimpleNamespace(
        uint8="uint8",
        device=lambda *words: words,
        empty=lambda size, dtype, device: Memory(current[-1]),
        waited=waited,
        captured=set(),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current[-1]),
        cuda=SimpleNamespace(
            stream=stream,
            default_stream=lambda device: Stream(0, waited),
            ExternalStream=lambda handle, device: Stream(handle, waited),
            OutOfMemoryError=MemoryError,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(streams, "_device", lambda index: index)
    monkeypatch.setattr(streams, "_capture", lambda stream: (0, int(stream in fake.captured)))
    return fake


@pytest.mark.parametrize(("stream", "pool"), [(7, 7), (0, 0), (1, 0), (64, 64)])
def test_memory_comes_from_where_it_is_used(torch, stream, pool):
    made = streams.allocate(256, 0, stream)
    assert (made.stream, made.used_on) == (pool, [])
    (made,) = streams.made_for(0, stream, lambda: [torch.empty(1, None, None)])
    assert (made.stream, made.used_on) == (pool, [])


def test_the_streams_of_threads_share_a_handle_and_no_memory(torch):
    for made in (
        streams.allocate(256, 0, PER_THREAD),
        *streams.made_for(0, PER_THREAD, lambda: [torch.empty(1, None, None)]),
    ):
        assert (made.stream, made.used_on) == (0, [PER_THREAD])
    torch.captured.add(PER_THREAD)  # then it is the graph's
    for made in (
        streams.allocate(256, 0, PER_THREAD),
        *streams.made_for(0, PER_THREAD, lambda: [torch.empty(1, None, None)]),
    ):
        assert (made.stream, made.used_on) == (PER_THREAD, [])


@pytest.mark.parametrize(("stream", "waits"), [(7, 7), (64, 64), (1, 0), (PER_THREAD, 0)])
def test_what_others_may_use_is_waited_for(torch, stream, waits):
    streams.settle(0, stream)
    assert torch.waited == [waits]
    torch.captured.add(stream)
    streams.settle(0, stream)
    assert torch.waited == [waits]


@pytest.mark.parametrize(("code", "waited"), [(201, [64]), (400, [64]), (906, [])])
def test_only_a_capture_is_not_waited_for(torch, monkeypatch, code, waited):
    """Not a thread that has not touched CUDA yet."""
    monkeypatch.setattr(streams, "_capture", lambda stream: (code, 0))
    streams.settle(0, 64)
    assert torch.waited == waited


def test_a_stream_that_is_given_or_current_is_waited_for(torch):
    streams.synchronize(0)
    streams.synchronize(0, SimpleNamespace(cuda_stream=64))
    streams.synchronize(0, SimpleNamespace(ptr=1))
    assert torch.waited == [7, 64, 0]
