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

from .layout import Layout, View, addresses_of, remember, reshape_view
from .libraries import view, viewers
from .numpy_arrays import address_of, owner_left
from .results import as_numpy, empty_like_type, no_memory_for, restore_type, torch_maker
from .torch_tensors import (
    count_write,
    in_forward_mode,
    stored_bytes,
    tensor_counter,
    write_counter,
)

__all__ = [
    "Layout",
    "View",
    "address_of",
    "addresses_of",
    "as_numpy",
    "count_write",
    "empty_like_type",
    "in_forward_mode",
    "no_memory_for",
    "owner_left",
    "remember",
    "reshape_view",
    "restore_type",
    "stored_bytes",
    "tensor_counter",
    "torch_maker",
    "view",
    "viewers",
    "write_counter",
]
