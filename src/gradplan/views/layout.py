"""What kernels want of an array, whoever made it: an address, a shape, strides in elements."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import BufferTooSmall, MisalignedOperand, Unsupported
from ..kinds import ElementKind, IndexKind

Kind = ElementKind | IndexKind
Shape = tuple[int, ...]

KINDS: dict[str, Kind] = {
    "float32": ElementKind.F32,
    "float16": ElementKind.F16,
    "bfloat16": ElementKind.BF16,
    "float64": ElementKind.F64,
    "int32": IndexKind.I32,
    "int64": IndexKind.I64,
}
NAMES: dict[Kind, str] = {kind: name for name, kind in KINDS.items()}
DTYPES: dict[Kind, np.dtype[Any]] = {
    kind: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name, kind in KINDS.items()
}
SIZES: dict[Kind, int] = {kind: kind.size_bytes for kind in NAMES}


class Layout:
    """How elements lie around the first one; immutable by convention, compared by identity.

    `strides` count elements; axes of extent 1, and all axes of an empty array, carry stride 0.
    `lo` and `hi` are the first and one past the last addressed byte, counted from element
    [0, 0, …]; both are 0 when empty. `writable` is None where each array has to be asked.
    """

    __slots__ = ("device", "dtype", "hi", "lo", "mask", "shape", "strides", "writable")

    def __init__(
        self, shape: Shape, strides: Shape, dtype: Kind, device: str, writable: bool | None
    ) -> None:
        size = SIZES[dtype]
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
    def shape(self) -> Shape:
        return self.layout.shape

    @property
    def strides(self) -> Shape:
        """In elements."""
        return self.layout.strides

    @property
    def dtype(self) -> Kind:
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
        return SIZES[self.layout.dtype]

    def extent(self) -> tuple[int, int]:
        """The first and one past the last addressed byte; (ptr, ptr) when empty."""
        ptr, layout = self.ptr, self.layout
        return ptr + layout.lo, ptr + layout.hi

    def __repr__(self) -> str:
        access = "" if self.writable else ", read-only"
        return (
            f"View({NAMES[self.dtype]} {self.shape} strides {self.strides} "
            f"at {self.ptr:#x} on {self.device}{access})"
        )


def addresses_of(views: Mapping[str, View]) -> dict[str, int]:
    """Where the first elements lie, by name."""
    return {name: lent.ptr for name, lent in views.items()}


def reshape_view(base: View, shape: Shape, strides: Shape) -> View:
    """The same memory under another shape and strides, which the caller vouches for."""
    old = base.layout
    key = (old, shape, strides)
    layout = _RESHAPED.get(key)
    if layout is None:
        layout = Layout(shape, strides, old.dtype, old.device, old.writable)
        remember(_RESHAPED, key, layout)
    return View(base.ptr, layout, base.owner)


def _normalised(shape: Shape, strides: Shape, itemsize: int) -> tuple[Shape, int, int]:
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
_RESHAPED: dict[tuple[Layout, Shape, Shape], Layout] = {}


def remember(cache: dict[Any, Any], key: Any, entry: Any) -> None:
    """Put an entry into a cache that starts anew when it is full."""
    if len(cache) >= _LAYOUT_LIMIT:
        cache.clear()
    cache[key] = entry


def unsupported(name: str, came: object) -> Unsupported:
    return Unsupported(f"{name}: expected a dtype among {', '.join(KINDS)}, got {came}")


def misaligned(name: str, ptr: int, kind: Kind) -> MisalignedOperand:
    return MisalignedOperand(
        f"{name}: expected an address that is a multiple of the {SIZES[kind]} bytes of a "
        f"{NAMES[kind]}, got {ptr:#x}"
    )


def too_small(name: str, lo: int, hi: int, first: int, end: int, owner: str) -> BufferTooSmall:
    needed = hi - lo
    got = max(0, min(hi, end) - max(lo, first))
    return BufferTooSmall(
        needed,
        got,
        f"{name}: its shape and strides address {needed} bytes, of which only {got} lie inside "
        f"{owner}",
    )
