"""Gluon, Triton's lower level; where Triton runs its interpreter, which does not know it, the same
names in terms of Triton's own: layouts mean nothing there, and a copy is done when it is asked for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .launch import interpreted

__all__ = ["async_copy", "gl", "gluon", "mbarrier"]

gluon: Any
gl: Any
async_copy: Any
mbarrier: Any

if not interpreted():
    import triton.experimental.gluon as _gluon
    import triton.experimental.gluon.language as _language
    from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
    from triton.experimental.gluon.language.nvidia.ampere import mbarrier as _mbarrier

    gluon, gl, async_copy, mbarrier = _gluon, _language, _async_copy, _mbarrier
else:
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def _number(value: Any) -> int:
        return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)

    class _Memory:
        """Shared memory: what was stored, as a whole or by number."""

        def __init__(self) -> None:
            self._value: Any = None
            self._parts: dict[int, _Memory] = {}

        def index(self, number: Any) -> _Memory:
            return self._parts.setdefault(_number(number), _Memory())

        def slice(self, start: Any, length: Any, dim: Any) -> _Memory:
            found = _Memory()
            data = self._value.handle.data
            taken = data.take(range(_number(start), _number(start) + _number(length)), _number(dim))
            type_ = self._value.dtype
            handle = TensorHandle(taken, type_.scalar)
            found._value = tl.tensor(handle, tl.block_type(type_, list(taken.shape)))
            return found

        def store(self, value: Any) -> None:
            self._value = value

        def load(self, layout: Any) -> Any:
            return self._value

    def _copy(memory: _Memory, source: Any, mask: Any = None) -> None:
        memory.store(tl.load(source, mask=mask))

    def _nothing(*_: Any, **__: Any) -> None:
        return None

    gluon = SimpleNamespace(jit=triton.jit)
    async_copy = SimpleNamespace(
        async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_nothing
    )

    mbarrier = None

    class _Language:
        BlockedLayout = SliceLayout = SwizzledSharedLayout = staticmethod(_nothing)

        def __getattr__(self, name: str) -> Any:
            return getattr(tl, name)

        @staticmethod
        def arange(start: Any, end: Any, layout: Any) -> Any:
            return tl.arange(start, end)

        @staticmethod
        def full(shape: Any, value: Any, dtype: Any, layout: Any) -> Any:
            return tl.full(shape, value, dtype)

        @staticmethod
        def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
            return value

        @staticmethod
        def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> _Memory:
            return _Memory()

    gl = _Language()
