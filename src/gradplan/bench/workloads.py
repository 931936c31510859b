"""The named cases of the benchmark, in one table for each kind of device.

The shapes are those in which these gradients are met: attention and classifier rows, long scans,
strided axes, vocabularies. Embeddings read (rows of the table, columns, indices).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..kinds import OpCategory
from ..registry import Engine, KindSpec

__all__ = ["CPU", "CUDA", "LAYOUTS", "QUICK", "Draw", "Reach", "Workload", "custom", "defaults"]

LAYOUTS = ("contiguous", "transposed", "sliced")
"""How all arrays of a case lie: in C order; in Fortran order; as `[..., 64:64 + n]` of wider ones.
"""


class Reach(StrEnum):
    """Which kinds a case is for."""

    AXIS = "kinds that run along an axis"
    EVERY_ELEMENT = "kinds that run along an axis, and lerp"
    MAP = "kinds whose every element is computed alone"
    LERP = "lerp"
    EMBEDDING = "embedding"

    def holds(self, spec: KindSpec) -> bool:
        """Whether a kind belongs here."""
        lerp = spec.category is OpCategory.BINARY_ELEMENTWISE
        embedding = spec.category is OpCategory.EMBEDDING
        return {
            Reach.AXIS: not lerp and not embedding,
            Reach.EVERY_ELEMENT: not embedding,
            Reach.MAP: spec.engine is Engine.MAP,
            Reach.LERP: lerp,
            Reach.EMBEDDING: embedding,
        }[self]


class Draw(StrEnum):
    """How the indices of an embedding are drawn."""

    UNIFORM = "uniform"
    ZIPF = "zipf"
    """Row k of the table with probability ∝ (k + 1)^−1.2."""
    SAME = "same"


@dataclass(frozen=True)
class Workload:
    """One case. `axis` means nothing to lerp and to embeddings, `draw` only to embeddings.

    `without` names saved arrays that are left out.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 1
    layout: str = "contiguous"
    draw: Draw = Draw.UNIFORM
    reach: Reach = Reach.AXIS
    without: tuple[str, ...] = ()


CUDA = (
    Workload("rows", (8192, 8192)),
    Workload("wide", (1024, 32768)),
    Workload("narrow", (32768, 1024)),
    Workload("short", (1 << 20, 64)),
    Workload("columns", (8192, 8192), axis=0),
    Workload("middle", (64, 2048, 512)),
    Workload("long", (64, 1 << 20)),
    Workload("vocabulary", (1024, 131072)),
    Workload("one", (1, 1 << 27)),
    Workload("flat", (1 << 26,), axis=0, reach=Reach.MAP),
    Workload("transposed", (8192, 8192), layout="transposed", reach=Reach.EVERY_ELEMENT),
    Workload("sliced", (8192, 8192), layout="sliced", reach=Reach.EVERY_ELEMENT),
    Workload("large_uniform", (128256, 4096, 32768), reach=Reach.EMBEDDING),
    Workload("large_zipf", (128256, 4096, 32768), draw=Draw.ZIPF, reach=Reach.EMBEDDING),
    Workload("small_zipf", (50304, 768, 262144), draw=Draw.ZIPF, reach=Reach.EMBEDDING),
    Workload("small_same", (50304, 768, 262144), draw=Draw.SAME, reach=Reach.EMBEDDING),
)

CPU = (
    Workload("rows", (2048, 2048)),
    Workload("columns", (2048, 2048), axis=0),
    Workload("flat", (1 << 22,), axis=0, reach=Reach.LERP),
    Workload("table", (30_000, 256, 20_000), reach=Reach.EMBEDDING),
)

# Small enough for a test, with every layout and every way of drawing indices once.
QUICK = (
    Workload("rows", (48, 130)),
    Workload("columns", (130, 48), axis=0),
    Workload("middle", (5, 66, 7)),
    Workload("flat", (4099,), axis=0, reach=Reach.MAP),
    Workload("transposed", (48, 66), layout="transposed", reach=Reach.EVERY_ELEMENT),
    Workload("sliced", (48, 66), layout="sliced", reach=Reach.EVERY_ELEMENT),
    Workload("uniform", (90, 34, 200), reach=Reach.EMBEDDING),
    Workload("zipf", (90, 34, 200), draw=Draw.ZIPF, reach=Reach.EMBEDDING),
    Workload("same", (90, 34, 200), draw=Draw.SAME, reach=Reach.EMBEDDING),
)


def defaults(device: str, quick: bool = False) -> tuple[Workload, ...]:
    """The table for a device."""
    if quick:
        return QUICK
    return CPU if device == "cpu" else CUDA


def custom(shape: tuple[int, ...], axis: int, layout: str) -> Workload:
    """A case of the user's own; its name says what it is."""
    axis %= len(shape)
    name = "x".join(map(str, shape)) + f"@{axis}" + ("" if layout == LAYOUTS[0] else f" {layout}")
    return Workload(name, shape, axis, layout, reach=Reach.EVERY_ELEMENT)
