"""Views of NumPy arrays, and of CuPy's, which describe themselves in the same terms."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from ..errors import InvalidProblem
from .layout import KINDS, SIZES, Layout, Shape, View, misaligned, remember, too_small, unsupported

_NUMPY_LAYOUTS: dict[tuple[Shape, Shape, Any], Layout] = {}
# CuPy describes its arrays in the same terms; the last word of a key is the device.
_CUPY_LAYOUTS: dict[tuple[Shape, Shape, Any, int], Layout] = {}

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
    kind = KINDS.get(dtype.name)
    if kind is None:
        raise unsupported(name, dtype)
    if not dtype.isnative:
        raise InvalidProblem(
            f"{name}: expected native byte order, got the byte-swapped dtype {dtype.str}; "
            f"convert it with array.astype({dtype.name!r})"
        )
    size = SIZES[kind]
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


def view_numpy(array: Any, name: str) -> View:
    try:
        layout = _NUMPY_LAYOUTS[array.shape, array.strides, array.dtype]
    except KeyError:
        layout = _numpy_layout(array, name, "cpu", None)
        remember(_NUMPY_LAYOUTS, (array.shape, array.strides, array.dtype), layout)
    ptr = address_of(array)
    if ptr & layout.mask:
        raise misaligned(name, ptr, layout.dtype)
    made = View(ptr, layout, array)
    base = array.base
    if base is not None and not _within(base, ptr + layout.lo, ptr + layout.hi):
        _check_extent(array, made, name)
    return made


def _within(base: Any, lo: int, hi: int) -> bool:
    """Whether these bytes are known to lie in an owner without a walk, as those of most slices are:
    it owns its memory, or tells no extent."""
    if type(base) is np.ndarray and base.base is None:
        first = address_of(base)
        return bool(first <= lo and hi <= first + base.nbytes)
    return not isinstance(base, np.ndarray) and not hasattr(base, "__array_interface__")


def view_scalar(array: Any, name: str) -> View:
    # A scalar has no address; the rank-0 array that holds its value does.
    held = np.asarray(array)
    held.flags.writeable = False
    return view_numpy(held, name)


def refuse_masked(array: Any, name: str) -> View:
    raise InvalidProblem(
        f"{name}: expected a plain array, got a masked array; pass array.filled(value)"
    )


def _check_extent(array: Any, made: View, name: str) -> None:
    """Raise `BufferTooSmall` where `made`, a view of `array`, leaves the memory of its owner.

    NumPy's `as_strided` hands out such arrays. Memory that does not tell its extent is trusted.
    """
    beyond = owner_left(array, made.lo, made.hi)
    if beyond is not None:
        raise too_small(name, made.lo, made.hi, *beyond)


def owner_left(array: Any, lo: int, hi: int) -> tuple[int, int, str] | None:
    """Where the memory of the owner of `array` begins and ends, and what it is, if these bytes of
    the array leave it."""
    base: Any = array.base
    if base is None or lo == hi or _within(base, lo, hi):
        return None
    owner = array
    while base is not None:
        if isinstance(base, np.ndarray):
            owner = base
        elif not hasattr(base, "__array_interface__"):
            break
        # Else an intermediary such as the one `as_strided` puts between two arrays.
        base = getattr(base, "base", None)
    if owner is array:
        return None
    first, end = _byte_bounds(owner)
    if first <= lo and hi <= end:
        return None
    if owner.flags.owndata:
        return first, end, "the array that owns the memory"
    try:
        # An array over a part of a buffer: the buffer itself may reach further.
        whole = np.frombuffer(base, np.uint8)
    except (TypeError, ValueError, BufferError, AttributeError):
        return None
    first, end = _byte_bounds(whole)
    return (first, end, "the buffer that owns the memory") if lo < first or end < hi else None


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


def view_cupy(array: Any, name: str) -> View:
    # Read directly: CuPy's DLPack export knows no bfloat16 and rounds odd strides silently.
    memory = array.data
    key = (array.shape, array.strides, array.dtype, memory.device_id)
    layout = _CUPY_LAYOUTS.get(key)
    if layout is None:
        layout = _numpy_layout(array, name, f"cuda:{memory.device_id}", True)
        remember(_CUPY_LAYOUTS, key, layout)
    ptr = int(memory.ptr)
    if ptr & layout.mask:
        raise misaligned(name, ptr, layout.dtype)
    return View(ptr, layout, array)
