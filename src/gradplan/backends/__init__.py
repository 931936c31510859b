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

    def bind(self, views: Mapping[str, View], workspace: int) -> Callable[[], None]:
        """A launch for these very arrays, with the workspace at this address."""


class Backend(Protocol):
    """What a backend offers to plans."""

    kind: BackendKind
    arch: str

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


_NUMBA, _REFERENCE = _NumbaBackend(), _ReferenceBackend()


def find(device: str, preference: PlanPreference) -> Backend:
    """The backend for a device, or `Unsupported` with the reason."""
    wanted = preference.backend
    if device == "cpu":
        if wanted in (None, BackendKind.NUMBA):
            return _NUMBA
        if wanted is BackendKind.REFERENCE:
            return _REFERENCE
        raise Unsupported(f"the {wanted} backend does not run on the CPU; numba and reference do")
    if device.startswith("cuda"):
        raise Unsupported(
            f"device {device!r}: this version of gradplan has no GPU backend; use device='cpu'"
        )
    raise Unsupported(f"device {device!r}: expected 'cpu', 'cuda' or 'cuda:N'")
