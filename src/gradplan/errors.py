"""The errors users catch.

Each derives from `GradPlanError` and from the builtin a Python user would expect.
A message names the plan, the argument, what was expected and what came.
"""

from __future__ import annotations

__all__ = [
    "BufferTooSmall",
    "GradPlanError",
    "InvalidProblem",
    "KernelFailure",
    "MisalignedOperand",
    "Unsupported",
    "WorkspaceTooSmall",
]


class GradPlanError(Exception):
    """Base of every error that gradplan raises."""


class InvalidProblem(GradPlanError, ValueError):
    """A bad shape or axis, or an argument that disagrees with its descriptor."""


class Unsupported(GradPlanError, NotImplementedError):
    """A request outside the support matrix, or a preference that nothing meets."""


class _TooSmall(GradPlanError, ValueError):
    """Memory that does not reach; `needed` and `got` are in bytes."""

    def __init__(self, needed: int, got: int, message: str | None = None) -> None:
        super().__init__(message or f"{needed} bytes are needed, got {got}")
        self.needed = needed
        self.got = got

    def __reduce__(self) -> tuple[type[_TooSmall], tuple[int, int, str]]:
        return type(self), (self.needed, self.got, str(self))


class BufferTooSmall(_TooSmall):
    """An array's memory ends before its shape and strides do."""


class WorkspaceTooSmall(_TooSmall):
    """The caller's workspace is smaller than `plan.workspace_size`, or `launch.workspace_size`."""


class MisalignedOperand(GradPlanError, ValueError):
    """A pointer that is not aligned to its element (or a workspace not to 256 bytes)."""


class KernelFailure(GradPlanError, RuntimeError):
    """A launch failed; `code` is the runtime's own code and the text is its own too."""

    def __init__(self, code: int, message: str | None = None) -> None:
        super().__init__(message or f"the kernel launch failed with code {code}")
        self.code = code

    def __reduce__(self) -> tuple[type[KernelFailure], tuple[int, str]]:
        return type(self), (self.code, str(self))
