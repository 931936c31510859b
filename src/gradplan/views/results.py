"""New arrays of the caller's library for results, and NumPy's over memory that was lent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from ..errors import InvalidProblem, KernelFailure, Unsupported
from ..geometry import c_strides
from ..kinds import ElementKind
from .layout import DTYPES, NAMES, Shape, View
from .libraries import library_of, view


def empty_like_type(like: Any, shape: Shape, stream: Any = None) -> Any:
    """A fresh writable C-contiguous array of the library, dtype and device of `like`, for a stream
    to write to, by default the current one.

    Libraries without mutable arrays get one that `restore_type` can turn into theirs.
    """
    library = library_of(like)
    if library in ("numpy", "numpy scalar"):
        return np.empty(shape, like.dtype)
    if stream is not None and library != "cupy":
        return _empty_for(like, shape, stream)
    if library == "torch":
        try:
            if like.shape == shape:
                # Twice as fast as `new_empty`, which reads a shape in Python's terms.
                torch_ = sys.modules["torch"]
                return torch_.empty_like(like, memory_format=torch_.contiguous_format)
            return like.new_empty(shape)
        except RuntimeError as error:
            raise no_memory_for(shape, error) from error
    if library == "cupy":
        with like.device, _cupy_stream(like, stream):
            return sys.modules["cupy"].empty(shape, like.dtype)
    made = view(like, "like")
    if made.device == "cpu":
        return np.empty(shape, DTYPES[made.dtype])
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise Unsupported(
            f"an output for {type(like).__name__} on {made.device} is allocated by torch, which "
            "is not loaded; import torch, or pass out="
        )
    return torch.empty(shape, dtype=getattr(torch, NAMES[made.dtype]), device=made.device)


def _empty_for(like: Any, shape: Shape, stream: Any) -> Any:
    """`empty_like_type`, in memory that this stream may write to: what has gone back to torch may
    still be in use, by what the current stream has to do."""
    device = view(like, "like").device
    if device == "cpu":
        return empty_like_type(like, shape)
    from ..backends.gpu.streams import made_for

    index = int(device.partition(":")[2])
    return made_for(index, stream, lambda: [empty_like_type(like, shape)])[0]


def _cupy_stream(like: Any, stream: Any) -> AbstractContextManager[Any]:
    """Within it CuPy allocates for a stream, on the device of `like`, which is the current one."""
    if stream is None:
        return nullcontext()
    from ..backends.gpu.streams import handle_of

    cuda: Any = sys.modules["cupy"].cuda
    handle = handle_of(stream)
    made: Any = cuda.ExternalStream(handle, like.device.id) if handle > 1 else cuda.Stream.null
    return made  # type: ignore[no-any-return]


def no_memory_for(shape: Shape, error: RuntimeError) -> KernelFailure:
    """What torch's error means where it made an output; other errors are raised as they are."""
    if type(error).__name__ != "OutOfMemoryError":
        raise error
    return KernelFailure(2, f"no memory for an output of shape {shape}: {error}")


def torch_maker(tensors: Sequence[Any], shape: Shape) -> tuple[int, Callable[[Any], Any]]:
    """How to do what `empty_like_type` does for the first of tensors like these at the least cost:
    which of them to take, and what to call with it."""
    torch: Any = sys.modules["torch"]
    steps = c_strides(shape)
    for k, tensor in enumerate(tensors):
        # Indices have a type of their own.
        if tensor is not None and tensor.shape == shape and tensor.dtype == tensors[0].dtype:
            if tensor.stride() == steps:
                return k, torch.empty_like
            return k, partial(torch.empty_like, memory_format=torch.contiguous_format)
    return 0, methodcaller("new_empty_strided", shape, steps)


def restore_type(like: Any, result: Any, stream: Any = None) -> Any:
    """`result`, which `empty_like_type` made for this stream, as an array of the library of
    `like`."""
    library = library_of(like)
    if library == "jax":
        jax: Any = sys.modules["jax"]
        if not isinstance(result, np.ndarray):
            if result.is_cuda:
                from ..backends.gpu.streams import synchronize

                # The inputs' memory is lent for the call alone: the work on it must be done.
                synchronize(result.get_device(), stream)
            return jax.numpy.from_dlpack(result)
        restored = jax.numpy.asarray(result)
        # Left uncommitted on the default device, as JAX's own results are, unless it differs.
        return restored if restored.device == like.device else jax.device_put(result, like.device)
    if library != "dlpack":
        return result
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None:
        return result
    library_functions = namespace()
    if stream is not None and not isinstance(result, np.ndarray):
        from ..backends.gpu.streams import on_stream

        with on_stream(result.get_device(), stream):  # which the library then waits for
            return restore_type(like, result)
    for convert in ("from_dlpack", "asarray"):
        try:
            return getattr(library_functions, convert)(result)
        except (AttributeError, TypeError, ValueError, BufferError, RuntimeError):
            # bfloat16, for one, leaves NumPy neither way in most libraries.
            continue
    return result


class _Memory:
    """Lends memory to NumPy and keeps its owner alive, as the base of the array."""

    def __init__(self, lent: View, typestr: str) -> None:
        self.owner = lent.owner
        size = lent.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (lent.ptr, not lent.writable),
            "shape": lent.shape,
            "strides": tuple(stride * size for stride in lent.strides),
            "typestr": typestr,
        }


def as_numpy(lent: View) -> np.ndarray[Any, np.dtype[Any]]:
    """A NumPy array over the memory of a CPU view, with its strides and its write access."""
    if lent.device != "cpu":
        raise InvalidProblem(f"expected a view of CPU memory, got one on {lent.device}")
    dtype = DTYPES[lent.dtype]
    if lent.lo == lent.hi:
        empty = np.empty(lent.shape, dtype)
        empty.flags.writeable = lent.writable
        return empty
    # The array interface has no name for bfloat16, so it travels as its bits.
    bits = "u2" if lent.dtype is ElementKind.BF16 else dtype.str[1:]
    order = "<" if sys.byteorder == "little" else ">"
    return np.asarray(_Memory(lent, order + bits)).view(dtype)
