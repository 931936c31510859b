"""What a plan knows about its choice, as data: the kernel, why it and no other, and what it moves.

`plan.explanation()` makes one; `plan.explain()` is its text, and `gradplan explain` prints it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .kinds import ReduceKind, ScanKind
from .sku import KernelSku

__all__ = ["Explanation", "Other", "added_to_bytes", "fewest_bytes"]

# Which of a cummax's elements won can be told from x alone; a product is taken anew from x.
_SPARED = (ScanKind.CUMMAX, ScanKind.CUMMIN, ReduceKind.PROD)


def fewest_bytes(desc: Any, given: Collection[str]) -> tuple[int, int]:
    """The fewest bytes that must be read and written: each of the arrays given once.

    A saved array that says nothing new is not counted.
    """
    read = written = 0
    for operand in desc.operands:
        if operand.name not in given:
            continue
        if operand.output:
            written += operand.size_bytes
        elif not (operand.name == "y" and desc.op in _SPARED):
            read += operand.size_bytes
    if getattr(desc, "accumulate", False):
        written = added_to_bytes(desc)
    return read + added_to_bytes(desc), written


def added_to_bytes(desc: Any) -> int:
    """What is read and written of a table that is added to: no more rows than indices."""
    if not getattr(desc, "accumulate", False):
        return 0
    rows = min(desc.num_embeddings, desc.num_indices)
    return int(rows * desc.embedding_dim * desc.element.size_bytes)


@dataclass(frozen=True, slots=True)
class Other:
    """A variant that was not chosen, and why."""

    variant: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer to "what runs here, and why?". Sizes are in bytes."""

    arrays: str
    """Which arrays it speaks of."""
    formula: str
    engine: str
    sku: KernelSku
    why: str
    others: tuple[Other, ...]
    read: int
    written: int
    fewest_read: int
    fewest_written: int
    workspace: int
    workspace_bound: int
    """Enough for any layout of the arrays."""

    @property
    def moved(self) -> int:
        """All bytes that come from memory or go there."""
        return self.read + self.written

    @property
    def fewest(self) -> int:
        """The fewest bytes that the gradient must move."""
        return self.fewest_read + self.fewest_written

    def floor_s(self, bandwidth: float) -> float:
        """The time in which the fewest bytes could be copied, at so many bytes per second."""
        return self.fewest / bandwidth

    def promise(self) -> str:
        """The guarantee in words."""
        promise = self.sku.precision_guarantee
        return (
            f"relative error {promise.relative_error:.3g}, "
            f"{promise.math_precision.value} arithmetic, {promise.accumulator.value} accumulator, "
            + ("deterministic" if promise.deterministic else "not deterministic")
            + (", bit-stable" if promise.bit_stable_on_same_hardware else "")
        )

    def text(self) -> str:
        """What `plan.explain()` gives."""
        sku = self.sku
        lines = [
            f"{sku.op} backward, {sku.element.value}, for {self.arrays}: {self.formula}",
            f"  kernel     {sku}",
            f"  engine     {self.engine}",
            f"  variant    {sku.layout}, {sku.variant}: {self.why}",
            f"  bytes      read {self.read}, written {self.written}; "
            f"fewest possible {self.fewest_read} and {self.fewest_written}",
            f"  workspace  {self.workspace} bytes (any layout: {self.workspace_bound})",
            f"  guarantee  {self.promise()}",
        ]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """The same in what JSON knows."""
        sku = self.sku
        promise = sku.precision_guarantee
        return {
            "kind": str(sku.op),
            "element": sku.element.value,
            "arrays": self.arrays,
            "formula": self.formula,
            "sku": str(sku),
            "backend": sku.backend.value,
            "arch": sku.arch,
            "engine": self.engine,
            "layout": sku.layout,
            "variant": sku.variant,
            "why": self.why,
            "others": [{"variant": other.variant, "why": other.why} for other in self.others],
            "bytes": {
                "read": self.read,
                "written": self.written,
                "fewest_read": self.fewest_read,
                "fewest_written": self.fewest_written,
            },
            "workspace": self.workspace,
            "workspace_bound": self.workspace_bound,
            "guarantee": {
                "relative_error": promise.relative_error,
                "math_precision": promise.math_precision.value,
                "accumulator": promise.accumulator.value,
                "deterministic": promise.deterministic,
                "bit_stable_on_same_hardware": promise.bit_stable_on_same_hardware,
            },
        }
