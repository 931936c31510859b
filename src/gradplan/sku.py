"""What a plan says of itself: its identity and its written guarantee."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from .descriptors import flag_of
from .errors import InvalidProblem
from .kinds import BackendKind, ElementKind, IndexKind, MathPrecision, OpCategory

__all__ = ["KernelSku", "PlanPreference", "PrecisionGuarantee"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionGuarantee:
    """How exact and how repeatable a plan is.

    `relative_error`: for every slice along the axis,
    ‖dx − dx*‖ ≤ relative_error · ‖A‖ + √n · (smallest subnormal of the element),
    2-norms, where dx* is the float64 result on the same stored inputs (extended precision for
    f64) and A is the same formula with every term taken absolute.
    """

    math_precision: MathPrecision
    accumulator: ElementKind
    deterministic: bool
    bit_stable_on_same_hardware: bool
    relative_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSku:
    """Which kernel a plan selected: every field is true of what runs."""

    category: OpCategory
    op: str
    element: ElementKind
    index: IndexKind | None
    layout: str
    arch: str
    backend: BackendKind
    variant: str
    precision_guarantee: PrecisionGuarantee

    def __str__(self) -> str:
        index = "" if self.index is None else f"_{self.index.value}"
        return (
            f"{self.backend.value}:{self.op}_backward_{self.element.value}{index}"
            f"_{self.layout}_{self.variant}@{self.arch}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPreference:
    """What the caller insists on: honoured, or `Unsupported` says why not.

    - `deterministic`: the same arguments give the same bits, every time;
    - `max_workspace_bytes`: the most that `plan.workspace_size` may be;
    - `backend`: this backend and no other.
    """

    deterministic: bool = True
    max_workspace_bytes: int | None = None
    backend: BackendKind | None = None

    def __post_init__(self) -> None:
        set_: Any = object.__setattr__
        deterministic = flag_of("PlanPreference", "deterministic", self.deterministic)
        set_(self, "deterministic", deterministic)
        if self.max_workspace_bytes is not None:
            try:
                limit = operator.index(self.max_workspace_bytes)
            except TypeError:
                raise InvalidProblem(
                    "PlanPreference: max_workspace_bytes must be an integer or None, "
                    f"got {self.max_workspace_bytes!r}"
                ) from None
            if limit < 0:
                raise InvalidProblem(f"PlanPreference: max_workspace_bytes is {limit}, below 0")
            set_(self, "max_workspace_bytes", limit)
        if self.backend is not None:
            set_(self, "backend", BackendKind.coerce(self.backend))
