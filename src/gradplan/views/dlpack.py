"""Views of whatever speaks DLPack, JAX arrays among them."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

from ..errors import InvalidProblem
from ..kinds import ElementKind, IndexKind
from .layout import Kind, Layout, View, misaligned, remember, unsupported


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_DL_LAYOUTS: dict[Any, Layout] = {}
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY, _COPIED = 1, 2
_DL_KINDS: dict[tuple[int, int], Kind] = {
    (2, 32): ElementKind.F32,
    (2, 16): ElementKind.F16,
    (4, 16): ElementKind.BF16,
    (2, 64): ElementKind.F64,
    (0, 32): IndexKind.I32,
    (0, 64): IndexKind.I64,
}
_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}

# Prototypes of our own: those on `ctypes.pythonapi` itself are shared with everybody.
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def is_jax(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("jax", "jaxlib")


def _export(array: Any, name: str) -> Any:
    """The DLPack capsule of an array, by the newest protocol that it knows."""
    attempts: list[dict[str, Any]] = [{"max_version": (1, 0)}, {}]
    try:
        if is_jax(type(array)):
            # JAX computes on threads and streams of its own and takes a stream for a handle to
            # wait on, -1 included: what makes its memory safe to read is to wait for it.
            array.block_until_ready()
        elif int(array.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED):
            # -1: no synchronisation. The caller orders the launch on a stream.
            attempts[:1] = [{"stream": -1, "max_version": (1, 0)}, {"stream": -1}]
        for attempt in attempts[:-1]:
            try:
                return array.__dlpack__(**attempt)
            except TypeError:
                continue
        return array.__dlpack__(**attempts[-1])
    except Exception as error:
        # Producers raise what they like; the user is told which argument it was.
        raise InvalidProblem(
            f"{name}: expected an array that exports itself through DLPack, but "
            f"{type(array).__name__} answered {type(error).__name__}: {error}"
        ) from error


def view_dlpack(array: Any, name: str) -> View:
    capsule = _export(array, name)
    writable = not is_jax(type(array))
    # The capsule is not renamed: it stays the owner and frees the tensor when it goes.
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(
            _capsule_pointer(capsule, b"dltensor_versioned")
        )
        if managed.major != 1:
            raise InvalidProblem(
                f"{name}: expected DLPack version 1, got {managed.major}.{managed.minor}"
            )
        # Writes to a copy made for the export would never reach the user's array.
        writable = writable and not managed.flags & (_READ_ONLY | _COPIED)
        tensor = managed.tensor
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise InvalidProblem(
            f"{name}: expected an unused DLPack capsule from {type(array).__name__}.__dlpack__, "
            f"got {capsule!r}"
        )

    if tensor.device_type in (_CPU, _CUDA_HOST):
        device = "cpu"
    elif tensor.device_type in (_CUDA, _CUDA_MANAGED):
        device = f"cuda:{tensor.device_id}"
    else:
        raise InvalidProblem(
            f"{name}: expected an array on a cpu or cuda device, got DLPack device type "
            f"{tensor.device_type}"
        )
    kind = _DL_KINDS.get((tensor.code, tensor.bits))
    if kind is None or tensor.lanes != 1:
        came = f"{_DL_CODES.get(tensor.code, f'DLPack code {tensor.code}, bits ')}{tensor.bits}"
        raise unsupported(name, came if tensor.lanes == 1 else f"{came} × {tensor.lanes} lanes")

    rank = tensor.ndim
    shape = tuple(tensor.shape[:rank]) if rank else ()
    if tensor.strides:
        strides = tuple(tensor.strides[:rank])
    else:
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(rank))
    key = (shape, strides, kind, device, writable)
    layout = _DL_LAYOUTS.get(key)
    if layout is None:
        layout = Layout(*key)
        remember(_DL_LAYOUTS, key, layout)
    ptr = tensor.data + tensor.byte_offset
    if ptr & layout.mask:
        raise misaligned(name, ptr, kind)
    return View(ptr, layout, capsule)
