"""Backends: who prepares and runs a problem on a device.

Each has the same few functions, listed in `Backend`; `find` picks one for a device.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..errors import Unsupported
from ..explanation import Other
from ..kinds import BackendKind
from ..sku import PlanPreference, PrecisionGuarantee
from ..views import View

__all__ = ["ARCHITECTURES", "Backend", "Program", "find"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""GPUs that kernels are compiled for where there is none."""


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
    here: bool
    """Whether arrays can lie there: not on a GPU that is only told of."""
    arch: str
    device: int | None
    """The index of a GPU; None where launches take no stream."""

    def guarantee(self, desc: Any) -> PrecisionGuarantee: ...
    def workspace_bound(self, desc: Any) -> int: ...
    def frugal(self) -> Backend: ...
    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program: ...
    def others(
        self, desc: Any, strides: Mapping[str, tuple[int, ...]], runs: str
    ) -> tuple[Other, ...]:
        """The variants that `prepare` does not choose for these strides, and why."""


class _NumbaBackend:
    kind = BackendKind.NUMBA
    here = True
    device: int | None = None
    arch = platform.machine() or "unknown"

    def guarantee(self, desc: Any) -> PrecisionGuarantee:
        from .cpu.precision import guarantee

        return guarantee(desc)

    def workspace_bound(self, desc: Any) -> int:
        from .cpu.programs import workspace_bound

        return workspace_bound(desc)

    def frugal(self) -> Backend:
        return self

    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program:
        from .cpu.programs import prepare

        return prepare(desc, strides, index_shape)

    def others(
        self, desc: Any, strides: Mapping[str, tuple[int, ...]], runs: str
    ) -> tuple[Other, ...]:
        from .cpu.programs import prepare

        return prepare(desc, strides).others


class _ReferenceBackend:
    kind = BackendKind.REFERENCE
    here = True
    device: int | None = None
    arch = platform.machine() or "unknown"

    def guarantee(self, desc: Any) -> PrecisionGuarantee:
        from .reference_program import guarantee

        return guarantee(desc)

    def workspace_bound(self, desc: Any) -> int:
        return 0

    def frugal(self) -> Backend:
        return self

    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program:
        from .reference_program import ReferenceProgram

        return ReferenceProgram(desc)

    def others(
        self, desc: Any, strides: Mapping[str, tuple[int, ...]], runs: str
    ) -> tuple[Other, ...]:
        return ()


class _TritonBackend:
    """A GPU; or, without an index, Triton's interpreter on CPU memory.

    Of a GPU that is not `here` all can be told, and nothing can be run: no array lies on it.
    """

    kind = BackendKind.TRITON

    def __init__(
        self,
        arch: str,
        device: int | None,
        processors: int | None,
        here: bool = True,
        marks: bool = True,
    ) -> None:
        self.arch = arch
        self.device = device
        self._processors = processors
        self._marks = marks
        self.here = here

    def frugal(self) -> Backend:
        """The same with programs that take less workspace, where they have the choice."""
        return _TritonBackend(self.arch, self.device, self._processors, self.here, marks=False)

    def _table(self) -> Any:
        from .gpu.table import table_of

        table = table_of(self.arch, self._processors)
        return table if self._marks else replace(table, marks=False)

    def guarantee(self, desc: Any) -> PrecisionGuarantee:
        from .gpu.precision import guarantee

        return guarantee(desc, self.arch)

    def workspace_bound(self, desc: Any) -> int:
        from .gpu.programs import workspace_bound

        return workspace_bound(desc, self._table())

    def prepare(
        self,
        desc: Any,
        strides: Mapping[str, tuple[int, ...]],
        index_shape: Sequence[int] | None = None,
    ) -> Program:
        from .gpu.programs import choose, ready

        made = choose(desc, strides, self._table(), index_shape)
        return ready(made, self.device) if self.here else made

    def others(
        self, desc: Any, strides: Mapping[str, tuple[int, ...]], runs: str
    ) -> tuple[Other, ...]:
        from .gpu.choices import others

        return others(desc, strides, self._table(), runs)


_NUMBA, _REFERENCE = _NumbaBackend(), _ReferenceBackend()
_triton: dict[str, Backend] = {}
# A GPU that is not here; ":108" behind it says how many multiprocessors it has.
_ARCH = re.compile(r"sm_(8\d|9\d|1\d\d)")


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
        return _kept(device, lambda: _TritonBackend("interpreter", None, None))
    name, _, index = device.partition(":")
    if _ARCH.fullmatch(name) and (not index or index.isdigit()):
        if wanted not in (None, BackendKind.TRITON):
            raise _not_on_gpu(wanted)
        processors = int(index) if index else None
        return _kept(device, lambda: _TritonBackend(name, None, processors, here=False))
    if name != "cuda" or (index and not index.isdigit()):
        raise Unsupported(
            f"device {device!r}: expected 'cpu', 'cuda' or 'cuda:N'; or 'sm_90', and the like, for "
            "plans that tell what would run there"
        )
    from .gpu import launch

    reason = launch.missing()
    if reason is None and int(index or 0) >= launch.device_count():
        reason = f"torch finds {launch.device_count()} CUDA devices on this machine"
    if reason is not None:
        raise Unsupported(f"device {device!r}: {reason}")
    if wanted not in (None, BackendKind.TRITON):
        raise _not_on_gpu(wanted)
    number = int(index or 0)
    return _kept(
        device,
        lambda: _TritonBackend(launch.device_arch(number), number, launch.processors(number)),
    )


def _kept(device: str, make: Callable[[], Backend]) -> Backend:
    return _triton.get(device) or _triton.setdefault(device, make())


def _not_on_gpu(wanted: BackendKind) -> Unsupported:
    return Unsupported(f"the {wanted} backend does not run on a GPU; triton does")
