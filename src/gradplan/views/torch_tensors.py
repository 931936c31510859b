"""Views of torch's tensors, and what autograd must be told of writes into them.

torch is never imported here: a tensor proves that it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ..errors import InvalidProblem
from .layout import KINDS, Layout, View, misaligned, remember, too_small, unsupported

_TORCH_LAYOUTS: dict[Any, Layout] = {}
_TENSORS: set[type] = set()
"""The types of tensors that have been met."""


class _Torch:
    """What torch keeps beside its tensors: nothing yet, before the first of them is met."""

    forward_ad: Any = SimpleNamespace(_current_level=-1)
    bump: Callable[[tuple[Any, ...]], object] = tuple


def meet_torch(kind: type) -> None:
    """Before the first view of a tensor of its type."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "autograd"):
        _Torch.forward_ad = torch.autograd.forward_ad
        _Torch.bump = staticmethod(_version_bump(torch))
    _TENSORS.add(kind)


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
    if type(array) in _TENSORS:
        _Torch.bump((array,))


def write_counter(arrays: Iterable[Any]) -> Callable[[], object] | None:
    """What counts a write into these arrays, time and again; None where there are no tensors."""
    tensors = tuple([one for one in arrays if type(one) in _TENSORS])
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


def stored_bytes(array: Any) -> int:
    """How many bytes its storage has from the first element on, where it is a tensor of torch:
    a storage may have been shrunk since."""
    if not hasattr(array, "untyped_storage"):
        return sys.maxsize
    ahead: int = array.storage_offset() * array.element_size()
    return max(0, int(array.untyped_storage().nbytes()) - ahead)


def _torch_layout(array: Any, name: str) -> Layout:
    layout, device = str(array.layout), array.device
    if layout != "torch.strided":
        raise InvalidProblem(f"{name}: expected a strided torch tensor, got layout {layout}")
    if device.type not in ("cpu", "cuda"):
        raise InvalidProblem(
            f"{name}: expected a tensor on a cpu or cuda device, got device {device}"
        )
    kind = KINDS.get(str(array.dtype).removeprefix("torch."))
    if kind is None:
        if array.is_conj():
            raise InvalidProblem(
                f"{name}: expected plain elements, got a conjugated tensor of {array.dtype}"
            )
        raise unsupported(name, array.dtype)
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


def view_torch(array: Any, name: str) -> View:
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
    ahead = offset * (layout.mask + 1)
    if ahead + layout.hi > reach and layout.hi:  # a storage that was shrunk
        first = ptr - ahead
        raise too_small(name, ptr, ptr + layout.hi, first, first + reach, "its storage")
    if ptr & layout.mask:
        raise misaligned(name, ptr, layout.dtype)
    if not ptr and layout.hi:
        raise _no_memory(array, name)
    return View(ptr, layout, array)
