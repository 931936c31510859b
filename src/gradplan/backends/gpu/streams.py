"""Streams and device memory: which stream is current, and whose memory a launch may use.

torch is loaded wherever a GPU backend is, so it allocates workspaces and knows the current stream;
CuPy keeps a current stream of its own, which its arrays follow.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

from ...errors import InvalidProblem, KernelFailure
from ...views import stored_bytes

__all__ = [
    "PER_THREAD",
    "OwnersStreams",
    "Streams",
    "allocate",
    "capturing",
    "handle_of",
    "made_for",
    "on_stream",
    "own_counters",
    "settle",
    "stream_counters",
    "streams_of",
    "synchronize",
    "workspace_memory",
]


class Streams:
    """The current stream of a library on a device, and the handles of streams given."""

    __slots__ = ("current", "device", "handle")

    def __init__(self, device: int, current: Callable[[], int]) -> None:
        self.device = device
        # Functions, for methods would only call them.
        self.current = current  # the handle of the stream that is current now
        self.handle = handle_of  # of a stream: an int, or an object that tells it


class OwnersStreams:
    """The same for a launch that owns memory, allocated on one of them."""

    __slots__ = ("_known", "_memory", "_streams")

    def __init__(self, streams: Streams, memory: Sequence[Any], stream: int) -> None:
        self._streams = streams
        self._memory = memory
        self._known = {stream}

    def current(self) -> int:
        return self._met(self._streams.current())

    def handle(self, stream: Any) -> int:
        return self._met(self._streams.handle(stream))

    def _met(self, handle: int) -> int:
        """The same; the allocator is told where a launch on another stream uses the memory."""
        if handle not in self._known:
            import torch

            for memory in self._memory:
                memory.record_stream(_external(torch, handle, self._streams.device))
            self._known.add(handle)
        return handle


def handle_of(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        found = protocol() if callable(protocol) else protocol
        return int(found[1])
    for name in ("cuda_stream", "ptr"):
        found = getattr(stream, name, None)
        if found is not None:
            return int(found)
    raise InvalidProblem(
        "stream must be None, an int handle, or an object with __cuda_stream__, cuda_stream or "
        f"ptr, got {type(stream).__name__}"
    )


_BY_DEVICE: dict[tuple[int, bool], Streams] = {}


def streams_of(device: int, owner: Any) -> Streams:
    """The streams that an array's library runs on."""
    cupy = type(owner).__module__.partition(".")[0] == "cupy"
    found = _BY_DEVICE.get((device, cupy))
    if found is None:
        found = _BY_DEVICE[device, cupy] = Streams(device, _current_of(device, cupy))
    return found


def _current_of(device: int, cupy: bool) -> Callable[[], int]:
    if cupy:
        cuda: Any = sys.modules["cupy"].cuda
        return lambda: int(cuda.get_current_stream(device).ptr)
    import torch

    return partial(torch._C._cuda_getCurrentRawStream, device)


def _external(torch: Any, handle: int, device: int) -> Any:
    if handle in (0, _LEGACY):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


@lru_cache(maxsize=64)
def _device(index: int) -> Any:
    """A device in torch's own terms: reading its name takes a third of a small allocation."""
    import torch

    return torch.device("cuda", index)


def allocate(size: int, device: int, stream: int) -> Any:
    """Device memory, ordered with a stream by torch's allocator."""
    import torch

    def make() -> list[Any]:
        return [torch.empty(size, dtype=torch.uint8, device=_device(device))]

    try:
        if stream == torch._C._cuda_getCurrentRawStream(device) != PER_THREAD:
            return make()[0]
        return made_for(device, stream, make)[0]
    except torch.cuda.OutOfMemoryError as error:
        raise KernelFailure(2, f"no memory for a workspace of {size} bytes: {error}") from error


def on_stream(device: int, stream: Any) -> AbstractContextManager[Any]:
    """Within it a stream is torch's current one."""
    import torch

    handle = handle_of(stream)
    return torch.cuda.stream(_external(torch, handle, device))  # type: ignore[no-any-return]


def made_for(device: int, stream: Any, make: Callable[[], list[Any]]) -> list[Any]:
    """Tensors that torch makes, in memory that is ordered with a stream.

    To torch's allocator a stream is its handle, and one handle names another stream in each thread.
    Each of them waits for the default stream, so such memory comes from there, and goes back when
    this thread's stream has done with it. While a graph is captured it is the graph's own.
    """
    import torch

    handle = handle_of(stream)
    if handle != PER_THREAD or capturing(handle):
        with on_stream(device, handle):
            return make()
    with on_stream(device, 0):
        made = make()
    for one in made:
        one.record_stream(_external(torch, PER_THREAD, device))
    return made


def synchronize(device: int, stream: Any = None) -> None:
    """Wait for what a stream, torch's current one by default, has to do."""
    import torch

    current = torch._C._cuda_getCurrentRawStream
    handle = current(device) if stream is None else handle_of(stream)
    _external(torch, handle, device).synchronize()


def settle(device: int, stream: int) -> None:
    """Let what was allocated on a stream be used on others: what used it before must be done. While
    a graph is captured memory is the graph's own."""
    code, status = _capture(stream)
    if not status and code != _IMPLICIT:
        synchronize(device, 0 if stream == PER_THREAD else stream)


def own_counters(device: int, stream: int, count: int) -> Any:
    """So many 32-bit counters, all 0, for launches on any stream, of which one at a time runs."""
    made = _counters_on(device, stream, count)
    synchronize(device, stream)
    return made


def _counters_on(device: int, stream: int, count: int) -> Any:
    """The same for launches on this stream alone, which need not wait for them."""
    import torch

    made = allocate(4 * count, device, stream)
    with torch.cuda.stream(_external(torch, stream, device)):
        made.zero_()
    return made


_LEGACY = 1  # CU_STREAM_LEGACY: the default stream by another name
PER_THREAD = 2  # CU_STREAM_PER_THREAD
_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: another stream is being captured
_STREAMS = 32  # of a device have counters of their own
# By device and stream, whose launches follow each other; older, smaller ones may still be in use.
_counters: dict[tuple[int, int], list[Any]] = {}
_making = threading.Lock()


def stream_counters(device: int, stream: int, count: int, make: bool = True) -> int:
    """The address of a stream's counters, all 0 between launches; 0 where it has none, and is not
    to have any (`make`).

    A stream that is being captured has none: its graph may run beside this stream. Nor has the
    handle that names another stream in each thread.
    """
    if stream == PER_THREAD or capturing(stream):
        return 0
    key = (device, stream)
    found = _counters.get(key)
    if found is None or found[-1].numel() < 4 * count:
        if not make:
            return 0
        with _making:
            found = _counters.get(key)  # another thread may have made them meanwhile
            if found is None and sum(one == device for one, _ in _counters) >= _STREAMS:
                return 0
            if found is None or found[-1].numel() < 4 * count:
                made = _counters_on(device, stream, max(1024, 1 << (count - 1).bit_length()))
                # Never empty: other threads look at it without the lock.
                found = _counters[key] = [*(found or ()), made]
    return int(found[-1].data_ptr())


def capturing(stream: int) -> bool:
    """Whether launches on a stream go into a graph, or may."""
    return any(_capture(stream))


def _capture(stream: int) -> tuple[int, int]:
    """What the driver says of that: an error, and the status."""
    status = ctypes.c_int()
    code = _is_capturing()(ctypes.c_void_p(stream), ctypes.byref(status))
    return int(code), status.value


@lru_cache(maxsize=1)
def _is_capturing() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing


def workspace_memory(plan: str, given: Any, device: int) -> tuple[int, int]:
    """Address and bytes of a caller's workspace on a GPU."""
    import torch

    tensor = given
    if not isinstance(tensor, torch.Tensor):
        try:
            tensor = torch.from_dlpack(given)
        except Exception as error:
            raise InvalidProblem(
                f"{plan}: workspace must be a uint8 array on cuda:{device}, "
                f"got {type(given).__name__}"
            ) from error
    if not tensor.is_cuda or tensor.get_device() != device:
        raise InvalidProblem(f"{plan}: workspace must be on cuda:{device}, got {tensor.device}")
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.dim() != 1:
        raise InvalidProblem(
            f"{plan}: workspace must be a contiguous uint8 array of rank 1, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.data_ptr(), min(tensor.numel(), stored_bytes(tensor))
