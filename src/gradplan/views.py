"""One internal view of every user array, made once at the border and never a copy.

Kernels want an address, a shape and strides in elements; users bring NumPy, torch, CuPy, JAX or
anything that speaks DLPack. Everything behind the border reads `View` only, so that no other
module knows an array library. What cannot be read where it lies is refused here, by name.

This runs on every call, so the usual array costs about a microsecond: the viewer of a type and
the `Layout` of a (shape, strides, dtype) are looked up, and only worked out when first seen. An
array met again has the same `Layout` object, so what plans find out about layouts they remember
by identity.
torch, CuPy and JAX are never imported: an array of theirs proves that they are loaded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from .errors import (
    BufferTooSmall,
    InvalidProblem,
    KernelFailure,
    MisalignedOperand,
    Unsupported,
)
from .geometry import c_strides
from .kinds import ElementKind, IndexKind

__all__ = [
    "Layout",
    "View",
    "address_of",
    "addresses_of",
    "as_numpy",
    "check_extent",
    "count_write",
    "empty_like_type",
    "in_forward_mode",
    "no_memory_for",
    "remember",
    "reshape_view",
    "restore_type",
    "tensor_counter",
    "torch_maker",
    "view",
    "viewers",
    "write_counter",
]

_Kind = ElementKind | IndexKind
_Shape = tuple[int, ...]

_KINDS: dict[str, _Kind] = {
    "float32": ElementKind.F32,
    "float16": ElementKind.F16,
    "bfloat16": ElementKind.BF16,
    "float64": ElementKind.F64,
    "int32": IndexKind.I32,
    "int64": IndexKind.I64,
}
_NAMES: dict[_Kind, str] = {kind: name for name, kind in _KINDS.items()}
_DTYPES: dict[_Kind, np.dtype[Any]] = {
    kind: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name, kind in _KINDS.items()
}
_SIZES: dict[_Kind, int] = {kind: kind.size_bytes for kind in _NAMES}


class Layout:
    """How elements lie around the first one; immutable by convention, compared by identity.

    `strides` count elements; axes of extent 1, and all axes of an empty array, carry stride 0.
    `lo` and `hi` are the first and one past the last addressed byte, counted from element
    [0, 0, …]; both are 0 when empty. `writable` is None where each array has to be asked.
    """

    __slots__ = ("device", "dtype", "hi", "lo", "mask", "shape", "strides", "writable")

    def __init__(
        self, shape: _Shape, strides: _Shape, dtype: _Kind, device: str, writable: bool | None
    ) -> None:
        size = _SIZES[dtype]
        self.shape = shape
        self.strides, self.lo, self.hi = _normalised(shape, strides, size)
        self.dtype = dtype
        self.device = device
        self.writable = writable
        self.mask = size - 1 if self.hi else 0  # the bits that an aligned address has not set


class View:
    """One array: the address of its element [0, 0, …], its layout, and what keeps it alive."""

    __slots__ = ("layout", "owner", "ptr")

    def __init__(self, ptr: int, layout: Layout, owner: Any) -> None:
        self.ptr = ptr
        self.layout = layout
        self.owner = owner

    @property
    def shape(self) -> _Shape:
        return self.layout.shape

    @property
    def strides(self) -> _Shape:
        """In elements."""
        return self.layout.strides

    @property
    def dtype(self) -> _Kind:
        return self.layout.dtype

    @property
    def device(self) -> str:
        return self.layout.device

    @property
    def writable(self) -> bool:
        told = self.layout.writable
        return bool(self.owner.flags.writeable) if told is None else told

    @property
    def lo(self) -> int:
        """The address of the first byte; `ptr` when empty."""
        return self.ptr + self.layout.lo

    @property
    def hi(self) -> int:
        """One past the address of the last byte; `ptr` when empty."""
        return self.ptr + self.layout.hi

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.layout.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return _SIZES[self.layout.dtype]

    def extent(self) -> tuple[int, int]:
        """The first and one past the last addressed byte; (ptr, ptr) when empty."""
        ptr, layout = self.ptr, self.layout
        return ptr + layout.lo, ptr + layout.hi

    def __repr__(self) -> str:
        access = "" if self.writable else ", read-only"
        return (
            f"View({_NAMES[self.dtype]} {self.shape} strides {self.strides} "
            f"at {self.ptr:#x} on {self.device}{access})"
        )


def view(array: Any, name: str = "array") -> View:
    """The view of any array; `name` is the argument that messages speak of."""
    return viewers[type(array)](array, name)


def addresses_of(views: Mapping[str, View]) -> dict[str, int]:
    """Where the first elements lie, by name."""
    return {name: lent.ptr for name, lent in views.items()}


def reshape_view(base: View, shape: _Shape, strides: _Shape) -> View:
    """The same memory under another shape and strides, which the caller vouches for."""
    old = base.layout
    key = (old, shape, strides)
    layout = _RESHAPED.get(key)
    if layout is None:
        layout = Layout(shape, strides, old.dtype, old.device, old.writable)
        remember(_RESHAPED, key, layout)
    return View(base.ptr, layout, base.owner)


def _normalised(shape: _Shape, strides: _Shape, itemsize: int) -> tuple[_Shape, int, int]:
    """Strides with meaningless ones set to 0, and the addressed bytes relative to element 0."""
    if 0 in shape:
        return (0,) * len(shape), 0, 0
    lo = hi = 0
    kept = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            kept.append(0)
            continue
        kept.append(stride)
        if stride > 0:
            hi += (n - 1) * stride
        else:
            lo += (n - 1) * stride
    return tuple(kept), lo * itemsize, (hi + 1) * itemsize


# Layouts once worked out. Programs use few; a program with ever new shapes must not leak.
_LAYOUT_LIMIT = 4096
_RESHAPED: dict[tuple[Layout, _Shape, _Shape], Layout] = {}


def remember(cache: dict[Any, Any], key: Any, entry: Any) -> None:
    """Put an entry into a cache that starts anew when it is full."""
    if len(cache) >= _LAYOUT_LIMIT:
        cache.clear()
    cache[key] = entry


def _unsupported(name: str, came: object) -> Unsupported:
    return Unsupported(f"{name}: expected a dtype among {', '.join(_KINDS)}, got {came}")


def _misaligned(name: str, ptr: int, kind: _Kind) -> MisalignedOperand:
    return MisalignedOperand(
        f"{name}: expected an address that is a multiple of the {_SIZES[kind]} bytes of a "
        f"{_NAMES[kind]}, got {ptr:#x}"
    )


def _too_small(name: str, lo: int, hi: int, first: int, end: int, owner: str) -> BufferTooSmall:
    needed = hi - lo
    got = max(0, min(hi, end) - max(lo, first))
    return BufferTooSmall(
        needed,
        got,
        f"{name}: its shape and strides address {needed} bytes, of which only {got} lie inside "
        f"{owner}",
    )


_NUMPY_LAYOUTS: dict[tuple[_Shape, _Shape, Any], Layout] = {}
# CuPy describes its arrays in the same terms; the last word of a key is the device.
_CUPY_LAYOUTS: dict[tuple[_Shape, _Shape, Any, int], Layout] = {}

_word_at = ctypes.c_size_t.from_address
# The data pointer is the first field behind the object header: this is what the C macro
# PyArray_DATA compiles to, so it is frozen for as long as extensions are to keep working.
_DATA_FIELD = object.__basicsize__


def _address_by_field(array: Any) -> int:
    return _word_at(id(array) + _DATA_FIELD).value


def _address_by_attribute(array: Any) -> int:
    return int(array.ctypes.data)


def _field_is_data() -> bool:
    # `id` is an address in CPython only; asking first keeps the probe itself safe elsewhere.
    if sys.implementation.name != "cpython" or np.ndarray.__basicsize__ < _DATA_FIELD + 8:
        return False
    whole = np.zeros(8, np.float32)
    probes = (whole, whole[3:], whole[::-2], np.zeros((2, 3)).T, np.array(1.0))
    return all(_address_by_field(probe) == _address_by_attribute(probe) for probe in probes)


# Eight times as fast as `array.ctypes.data`, which would cost more than all the rest together.
address_of = _address_by_field if _field_is_data() else _address_by_attribute


def _numpy_layout(array: Any, name: str, device: str, writable: bool | None) -> Layout:
    """The layout of an array described in NumPy's terms."""
    dtype, shape = array.dtype, array.shape
    kind = _KINDS.get(dtype.name)
    if kind is None:
        raise _unsupported(name, dtype)
    if not dtype.isnative:
        raise InvalidProblem(
            f"{name}: expected native byte order, got the byte-swapped dtype {dtype.str}; "
            f"convert it with array.astype({dtype.name!r})"
        )
    size = _SIZES[kind]
    empty = 0 in shape
    strides = []
    for n, step in zip(shape, array.strides, strict=True):
        if n > 1 and step % size and not empty:
            raise InvalidProblem(
                f"{name}: expected strides that are multiples of the {size} bytes of a "
                f"{dtype.name}, got strides {array.strides} bytes for shape {shape}"
            )
        strides.append(step // size)
    return Layout(shape, tuple(strides), kind, device, writable)


def _view_numpy(array: Any, name: str) -> View:
    try:
        layout = _NUMPY_LAYOUTS[array.shape, array.strides, array.dtype]
    except KeyError:
        layout = _numpy_layout(array, name, "cpu", None)
        remember(_NUMPY_LAYOUTS, (array.shape, array.strides, array.dtype), layout)
    ptr = address_of(array)
    if ptr & layout.mask:
        raise _misaligned(name, ptr, layout.dtype)
    made = View(ptr, layout, array)
    base = array.base
    if base is not None:
        # The usual owners of a slice without the walk: an array, or what tells no extent.
        if type(base) is np.ndarray and base.base is None:
            first = address_of(base)
            if first <= ptr + layout.lo and ptr + layout.hi <= first + base.nbytes:
                return made
        elif not isinstance(base, np.ndarray) and not hasattr(base, "__array_interface__"):
            return made
        check_extent(array, made, name)
    return made


def _view_scalar(array: Any, name: str) -> View:
    # A scalar has no address; the rank-0 array that holds its value does.
    held = np.asarray(array)
    held.flags.writeable = False
    return _view_numpy(held, name)


def _refuse_masked(array: Any, name: str) -> View:
    raise InvalidProblem(
        f"{name}: expected a plain array, got a masked array; pass array.filled(value)"
    )


def check_extent(array: Any, made: View, name: str) -> None:
    """Raise `BufferTooSmall` where `made`, a view of `array`, leaves the memory of its owner.

    NumPy's `as_strided` hands out such arrays, and a shrunk storage leaves torch with them.
    Memory that does not tell its extent is trusted.
    """
    lo, hi = made.lo, made.hi
    if lo == hi:
        return
    library = _library_of(array)
    if library == "torch":
        first = made.ptr - array.storage_offset() * _SIZES[made.dtype]
        end = first + array.untyped_storage().nbytes()
        if lo < first or end < hi:
            raise _too_small(name, lo, hi, first, end, "its storage")
    if library != "numpy":
        return
    owner = array
    base: Any = array.base
    while base is not None:
        if isinstance(base, np.ndarray):
            owner = base
        elif not hasattr(base, "__array_interface__"):
            break
        # Else an intermediary such as the one `as_strided` puts between two arrays.
        base = getattr(base, "base", None)
    if owner is array:
        return
    first, end = _byte_bounds(owner)
    if first <= lo and hi <= end:
        return
    if owner.flags.owndata:
        raise _too_small(name, lo, hi, first, end, "the array that owns the memory")
    try:
        # An array over a part of a buffer: the buffer itself may reach further.
        whole = np.frombuffer(base, np.uint8)
    except (TypeError, ValueError, BufferError, AttributeError):
        return
    first, end = _byte_bounds(whole)
    if lo < first or end < hi:
        raise _too_small(name, lo, hi, first, end, "the buffer that owns the memory")


def _byte_bounds(array: Any) -> tuple[int, int]:
    first = address_of(array)
    if array.flags.forc:
        return first, first + array.nbytes
    end = first + array.itemsize
    for n, step in zip(array.shape, array.strides, strict=True):
        if n == 0:
            return first, first
        if step > 0:
            end += (n - 1) * step
        else:
            first += (n - 1) * step
    return first, end


_TORCH_LAYOUTS: dict[Any, Layout] = {}


class _Torch:
    """What torch keeps beside its tensors: nothing yet, before the first of them is met."""

    forward_ad: Any = SimpleNamespace(_current_level=-1)
    bump: Callable[[tuple[Any, ...]], object] = tuple

    @classmethod
    def meet(cls) -> None:
        torch: Any = sys.modules.get("torch")
        if hasattr(torch, "autograd"):
            cls.forward_ad = torch.autograd.forward_ad
            cls.bump = staticmethod(_version_bump(torch))


def _version_bump(torch: Any) -> Callable[[tuple[Any, ...]], object]:
    """What counts a write into each of some tensors."""
    bump: Callable[[Any], object] = torch.autograd.graph.increment_version
    try:
        # What it calls, at half its cost; older ones take one tensor at a time.
        several: Callable[[tuple[Any, ...]], object] = torch._C._increment_version
        with torch.inference_mode(False):
            probe = torch.empty(0)
        several((probe,))
        if probe._version == 1:
            return several
    except (AttributeError, TypeError, RuntimeError):
        pass

    def one_by_one(tensors: tuple[Any, ...]) -> None:
        for tensor in tensors:
            if not tensor.is_inference():  # which has no count
                bump(tensor)

    return one_by_one


def count_write(array: Any) -> None:
    """Tell torch, if the array is a tensor, that it was written to.

    Autograd compares the count when it uses what a forward pass has saved, and refuses what has
    changed meanwhile; without it a gradient would be wrong silently.
    """
    if _LIBRARIES.get(type(array)) == "torch":
        _Torch.bump((array,))


def write_counter(arrays: Iterable[Any]) -> Callable[[], object] | None:
    """What counts a write into these arrays, time and again; None where there are no tensors."""
    tensors = tuple([one for one in arrays if _LIBRARIES.get(type(one)) == "torch"])
    return partial(tensor_counter(), tensors) if tensors else None


def tensor_counter() -> Callable[[tuple[Any, ...]], object]:
    """What counts a write into each of some tensors, of which one has been met."""
    return _Torch.bump


def in_forward_mode() -> bool:
    """Whether torch's tensors may carry tangents now."""
    level: int = _Torch.forward_ad._current_level
    return level >= 0


def _refuse_dual(array: Any, name: str) -> None:
    if _Torch.forward_ad.unpack_dual(array).tangent is not None:
        raise InvalidProblem(
            f"{name}: expected a plain tensor, got a dual tensor of forward-mode autograd, whose "
            "tangent would be lost silently; use gradplan.torch, or pass tensor.detach()"
        )


def _torch_layout(array: Any, name: str) -> Layout:
    layout, device = str(array.layout), array.device
    if layout != "torch.strided":
        raise InvalidProblem(f"{name}: expected a strided torch tensor, got layout {layout}")
    if device.type not in ("cpu", "cuda"):
        raise InvalidProblem(
            f"{name}: expected a tensor on a cpu or cuda device, got device {device}"
        )
    kind = _KINDS.get(str(array.dtype).removeprefix("torch."))
    if kind is None:
        if array.is_conj():
            raise InvalidProblem(
                f"{name}: expected plain elements, got a conjugated tensor of {array.dtype}"
            )
        raise _unsupported(name, array.dtype)
    where = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    return Layout(tuple(array.shape), tuple(array.stride()), kind, where, True)


def _no_memory(array: Any, name: str) -> InvalidProblem:
    layout = str(array.layout)
    if layout != "torch.strided":
        return InvalidProblem(f"{name}: expected a strided torch tensor, got layout {layout}")
    return InvalidProblem(
        f"{name}: expected a tensor with memory of its own, got a {type(array).__name__} without "
        "(a nested, fake or zero tensor, or one inside a function transform)"
    )


def _view_torch(array: Any, name: str) -> View:
    if array.requires_grad:
        raise InvalidProblem(
            f"{name}: expected a tensor outside the autograd graph, got one with "
            "requires_grad=True, whose graph would be lost silently; use gradplan.torch, "
            "or pass tensor.detach()"
        )
    try:
        if _Torch.forward_ad._current_level >= 0:
            _refuse_dual(array, name)
        # On the CPU the device is left out of the key: comparing it would cost more than asking.
        # The layout too: what is not strided has no data pointer.
        if array.is_cuda:
            key: Any = (array.shape, array.stride(), array.dtype, array.get_device())
        elif array.is_cpu:
            key = (array.shape, array.stride(), array.dtype)
        else:
            key = (array.shape, array.stride(), array.dtype, array.layout, array.device)
        layout = _TORCH_LAYOUTS.get(key)
        negated = array.is_neg()
        ptr = array.data_ptr()
        offset = array.storage_offset()
        reach = array.untyped_storage().nbytes()
    except (RuntimeError, TypeError):
        raise _no_memory(array, name) from None
    if layout is None:
        layout = _torch_layout(array, name)
        remember(_TORCH_LAYOUTS, key, layout)
    if negated:
        raise InvalidProblem(
            f"{name}: expected plain elements, got a tensor with the negative bit; "
            "pass tensor.resolve_neg()"
        )
    made = View(ptr, layout, array)
    if offset * (layout.mask + 1) + layout.hi > reach:
        check_extent(array, made, name)
    if ptr & layout.mask:
        raise _misaligned(name, ptr, layout.dtype)
    if not ptr and layout.hi:
        raise _no_memory(array, name)
    return made


def _view_cupy(array: Any, name: str) -> View:
    # Read directly: CuPy's DLPack export knows no bfloat16 and rounds odd strides silently.
    memory = array.data
    key = (array.shape, array.strides, array.dtype, memory.device_id)
    layout = _CUPY_LAYOUTS.get(key)
    if layout is None:
        layout = _numpy_layout(array, name, f"cuda:{memory.device_id}", True)
        remember(_CUPY_LAYOUTS, key, layout)
    ptr = int(memory.ptr)
    if ptr & layout.mask:
        raise _misaligned(name, ptr, layout.dtype)
    return View(ptr, layout, array)


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
_DL_KINDS: dict[tuple[int, int], _Kind] = {
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


def _is_jax(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("jax", "jaxlib")


def _export(array: Any, name: str) -> Any:
    """The DLPack capsule of an array, by the newest protocol that it knows."""
    attempts: list[dict[str, Any]] = [{"max_version": (1, 0)}, {}]
    try:
        if _is_jax(type(array)):
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


def _view_dlpack(array: Any, name: str) -> View:
    capsule = _export(array, name)
    writable = not _is_jax(type(array))
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
        raise _unsupported(name, came if tensor.lanes == 1 else f"{came} × {tensor.lanes} lanes")

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
        raise _misaligned(name, ptr, kind)
    return View(ptr, layout, capsule)


_VIEWER_OF_LIBRARY: dict[str, Callable[[Any, str], View]] = {
    "numpy": _view_numpy,
    "numpy scalar": _view_scalar,
    "masked": _refuse_masked,
    "torch": _view_torch,
    "cupy": _view_cupy,
    "jax": _view_dlpack,
    "dlpack": _view_dlpack,
}


class _Viewers(dict[type, Callable[[Any, str], "View"]]):
    """The viewer of every type seen so far; `view` is `viewers[type(array)](array, name)`."""

    def __missing__(self, kind: type) -> Callable[[Any, str], View]:
        return _meet


viewers = _Viewers()
_LIBRARIES: dict[type, str | None] = {}


def _library_of(array: Any) -> str | None:
    kind = type(array)
    library = _LIBRARIES.get(kind)
    if library is None:
        library = _recognise(array, kind)
        if library is not None:
            _LIBRARIES[kind] = library
    return library


def _recognise(array: Any, kind: type) -> str | None:
    names = {(base.__module__, base.__name__) for base in kind.__mro__}
    if issubclass(kind, np.ndarray):
        masked = any(
            module.startswith("numpy.ma") and name == "MaskedArray" for module, name in names
        )
        return "masked" if masked else "numpy"
    if issubclass(kind, np.generic):
        return "numpy scalar"
    if ("torch", "Tensor") in names:
        return "torch"
    if ("cupy", "ndarray") in names:
        return "cupy"
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return "jax" if _is_jax(kind) else "dlpack"
    return None


def _meet(array: Any, name: str) -> View:
    """The view of the first array of its type."""
    library = _library_of(array)
    if library is None:
        hint = ""
        if any(_is_jax(base) and base.__name__ == "Tracer" for base in type(array).__mro__):
            hint = "; functions run at once: call them outside jax.jit, jax.vmap and jax.grad"
        raise InvalidProblem(
            f"{name}: expected a NumPy, torch, CuPy, JAX or other DLPack array, "
            f"got {type(array).__name__}{hint}"
        )
    if library == "torch":
        _Torch.meet()
    viewer = viewers[type(array)] = _VIEWER_OF_LIBRARY[library]
    return viewer(array, name)


def empty_like_type(like: Any, shape: _Shape, stream: Any = None) -> Any:
    """A fresh writable C-contiguous array of the library, dtype and device of `like`, for a stream
    to write to, by default the current one.

    Libraries without mutable arrays get one that `restore_type` can turn into theirs.
    """
    library = _library_of(like)
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
        return np.empty(shape, _DTYPES[made.dtype])
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise Unsupported(
            f"an output for {type(like).__name__} on {made.device} is allocated by torch, which "
            "is not loaded; import torch, or pass out="
        )
    return torch.empty(shape, dtype=getattr(torch, _NAMES[made.dtype]), device=made.device)


def _empty_for(like: Any, shape: _Shape, stream: Any) -> Any:
    """`empty_like_type`, in memory that this stream may write to: what has gone back to torch may
    still be in use, by what the current stream has to do."""
    device = view(like, "like").device
    if device == "cpu":
        return empty_like_type(like, shape)
    from .backends.gpu.streams import made_for

    index = int(device.partition(":")[2])
    return made_for(index, stream, lambda: [empty_like_type(like, shape)])[0]


def _cupy_stream(like: Any, stream: Any) -> AbstractContextManager[Any]:
    """Within it CuPy allocates for a stream, on the device of `like`, which is the current one."""
    if stream is None:
        return nullcontext()
    from .backends.gpu.streams import handle_of

    cuda: Any = sys.modules["cupy"].cuda
    handle = handle_of(stream)
    made: Any = cuda.ExternalStream(handle, like.device.id) if handle > 1 else cuda.Stream.null
    return made  # type: ignore[no-any-return]


def no_memory_for(shape: _Shape, error: RuntimeError) -> KernelFailure:
    """What torch's error means where it made an output; other errors are raised as they are."""
    if type(error).__name__ != "OutOfMemoryError":
        raise error
    return KernelFailure(2, f"no memory for an output of shape {shape}: {error}")


def torch_maker(tensors: Sequence[Any], shape: _Shape) -> tuple[int, Callable[[Any], Any]]:
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
    library = _library_of(like)
    if library == "jax":
        jax: Any = sys.modules["jax"]
        if not isinstance(result, np.ndarray):
            if result.is_cuda:
                from .backends.gpu.streams import synchronize

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
        from .backends.gpu.streams import on_stream

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
    dtype = _DTYPES[lent.dtype]
    if lent.lo == lent.hi:
        empty = np.empty(lent.shape, dtype)
        empty.flags.writeable = lent.writable
        return empty
    # The array interface has no name for bfloat16, so it travels as its bits.
    bits = "u2" if lent.dtype is ElementKind.BF16 else dtype.str[1:]
    order = "<" if sys.byteorder == "little" else ">"
    return np.asarray(_Memory(lent, order + bits)).view(dtype)
