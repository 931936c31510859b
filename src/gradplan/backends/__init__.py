"""Backends: who prepares and runs a problem on a device.

Each has the same few functions, listed in `Backend`; `find` picks one for a device.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import Unsupported
from ..kinds import BackendKind
from ..sku import PlanPreference, PrecisionGuarantee
from ..views import View

__all__ = ["Backend", "Program", "find"]


class Program(Protocol):
    """A problem whose strides are known: it can be bound to arrays."""

    @property
    def layout(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def reads(self) -> Mapping[str, int]: ...

    def bind(self, views: Mapping[str, View], workspace: int) -> Callable[..., None]:
        """A launch for these very arrays, with the workspace at this address.

        On a GPU it takes the handle of a stream.
        """

    def run(self, views: Mapping[str, View], workspace: int, stream: int) -> None:
        """Launch once; `stream` is the handle of a stream, and 0 where there are none."""


class Backend(Protocol):
    """What a backend offers to plans."""

    kind: BackendKind
    arch: str
    device: int | None
    """The index of a GPU; None where launches take no stream."""

    def guarantee(self, desc: Any) -> PrecisionGuarantee: ...
    def workspace_bound(self, desc: Any) -> int: ...
    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program: ...


class _NumbaBackend:
    kind = BackendKind.NUMBA
    device: int | None = None
    arch = platform.machine() or "unknown"

    def guarantee(self, desc: Any) -> PrecisionGuarantee:
        from .cpu.precision import guarantee

        return guarantee(desc)

    def workspace_bound(self, desc: Any) -> int:
        from .cpu.programs import workspace_bound

        return workspace_bound(desc)

    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program:
        from .cpu.programs import prepare

        return prepare(desc, strides, index_shape)


class _ReferenceBackend:
    kind = BackendKind.REFERENCE
    device: int | None = None
    arch = platform.machine() or "unknown"

    def guarantee(self, desc: Any) -> PrecisionGuarantee:
        from .reference_program import guarantee

        return guarantee(desc)

    def workspace_bound(self, desc: Any) -> int:
        return 0

    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program:
        from .reference_program import ReferenceProgram

        return ReferenceProgram(desc, index_shape)


class _TritonBackend:
    """A GPU; or, without an index, Triton's interpreter on CPU memory."""

    kind = BackendKind.TRITON

    def __init__(self, device: int | None) -> None:
        from .gpu import launch

        self.device = device
        self.arch = "interpreter" if device is None else launch.device_arch(device)
        self._processors = None if device is None else launch.processors(device)

    def guarantee(self, desc: Any) -> PrecisionGuarantee:
        from .gpu.precision import guarantee

        return guarantee(desc, self.arch)

    def workspace_bound(self, desc: Any) -> int:
        from .gpu.programs import workspace_bound

        return workspace_bound(desc, self.arch, self._processors)

    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program:
        from .gpu.programs import prepare

        return prepare(desc, strides, self.arch, self.device, index_shape, self._processors)


_NUMBA, _REFERENCE = _NumbaBackend(), _ReferenceBackend()
_triton: dict[int | None, Backend] = {}


def find(device: str, preference: PlanPreference) -> Backend:
    """The backend for a device, or `Unsupported` with the reason."""
    wanted = preference.backend
    if device == "cpu":
        if wanted in (None, BackendKind.NUMBA):
            return _NUMBA
        if wanted is BackendKind.REFERENCE:
            return _REFERENCE
        from .gpu import launch

        if not launch.interpreted():
            raise Unsupported(
                "the triton backend runs on device='cuda', and on the CPU only in Triton's "
                "interpreter: set TRITON_INTERPRET=1 before Triton is imported"
            )
        return _triton.get(None) or _triton.setdefault(None, _TritonBackend(None))
    name, _, index = device.partition(":")
    if name != "cuda" or (index and not index.isdigit()):
        raise Unsupported(f"device {device!r}: expected 'cpu', 'cuda' or 'cuda:N'")
    from .gpu import launch

    reason = launch.missing()
    if reason is None and int(index or 0) >= launch.device_count():
        reason = f"torch finds {launch.device_count()} CUDA devices on this machine"
    if reason is not None:
        raise Unsupported(f"device {device!r}: {reason}")
    if wanted not in (None, BackendKind.TRITON):
        raise Unsupported(f"the {wanted} backend does not run on a GPU; triton does")
    number = int(index or 0)
    return _triton.get(number) or _triton.setdefault(number, _TritonBackend(number))
