"""The named cases of the benchmark, in one table for each kind of device.

The shapes are those in which these gradients are met: attention and classifier rows, long scans,
strided axes, vocabularies. Embeddings read (rows of the table, columns, indices).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..errors import InvalidProblem
from ..geometry import c_strides
from ..kinds import OpCategory
from ..registry import Engine, KindSpec, Need
from ..terminal import parse_shape

__all__ = [
    "CPU",
    "CUDA",
    "LAYOUTS",
    "QUICK",
    "SLICE_START",
    "Draw",
    "Reach",
    "Workload",
    "custom",
    "defaults",
    "memory_order",
    "read_cases",
    "strides_of",
]

SLICE_START = 64
LAYOUTS = ("contiguous", "transposed", "sliced", "permuted", "shifted")
"""How all arrays of a case lie: in C order; in Fortran order; as `[..., 64:64 + n]` of wider ones;
with every second axis inside the others; as `[..., 1:]`, so that rows begin at odd addresses.
"""


def memory_order(rank: int) -> tuple[int, ...]:
    """The axes of a permuted array, outermost first."""
    return (*range(0, rank, 2), *range(1, rank, 2))


class Reach(StrEnum):
    """Which kinds a case is for."""

    AXIS = "kinds that run along an axis"
    EVERY_ELEMENT = "kinds that run along an axis, and lerp"
    RECOMPUTED = "scans that can do without a saved y"
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
            Reach.RECOMPUTED: spec.engine is Engine.RECURRENCE and spec.y is Need.OPTIONAL,
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
    Workload("permuted", (32, 16, 64, 32, 64), 4, layout="permuted", reach=Reach.EVERY_ELEMENT),
    Workload("rows_no_y", (8192, 8192), reach=Reach.RECOMPUTED, without=("y",)),
    Workload("columns_no_y", (8192, 8192), axis=0, reach=Reach.RECOMPUTED, without=("y",)),
    Workload("long_no_y", (64, 1 << 20), reach=Reach.RECOMPUTED, without=("y",)),
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
    Workload("permuted", (2, 3, 5, 4, 6), 4, layout="permuted", reach=Reach.EVERY_ELEMENT),
    Workload("uniform", (90, 34, 200), reach=Reach.EMBEDDING),
    Workload("zipf", (90, 34, 200), draw=Draw.ZIPF, reach=Reach.EMBEDDING),
    Workload("same", (90, 34, 200), draw=Draw.SAME, reach=Reach.EMBEDDING),
)


def defaults(device: str, quick: bool = False) -> tuple[Workload, ...]:
    """The table for a device."""
    if quick:
        return QUICK
    return CPU if device == "cpu" else CUDA


def custom(shape: tuple[int, ...], axis: int, layout: str, name: str = "") -> Workload:
    """A case of the user's own; its name says what it is."""
    if not -len(shape) <= axis < len(shape):
        raise InvalidProblem(f"--axis {axis} is outside the shape {shape}")
    axis %= len(shape)
    if not name:
        name = "x".join(map(str, shape)) + f"@{axis}"
        name += "" if layout == LAYOUTS[0] else f" {layout}"
    return Workload(name, shape, axis, layout, reach=Reach.EVERY_ELEMENT)


def read_cases(path: Path) -> list[Workload]:
    """The cases of a file, one a line; blank lines and what follows a # do not count.

    8192x8192                       # the last axis
    64x2048x512 axis=1 layout=transposed name=attention
    50304x768 indices=262144 draw=zipf    # an embedding: rows × columns of its table
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise InvalidProblem(f"{path}: cannot be read as shapes: {reason}") from None
    made = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                made.append(_case_of(words))
            except ValueError as error:
                raise InvalidProblem(f"{path}, line {number}: {error}") from None
    if not made:
        raise InvalidProblem(f"{path}: there is no shape in it")
    return made


def _case_of(words: Sequence[str]) -> Workload:
    """One line of a file of shapes; `ValueError` says what is wrong with it."""
    shape = parse_shape(words[0])
    given = dict(word.partition("=")[::2] for word in words[1:])
    unknown = given.keys() - {"axis", "layout", "name", "indices", "draw"}
    if unknown:
        raise ValueError(f"expected axis=, layout=, name=, indices= or draw=, got {min(unknown)!r}")
    layout, name = given.get("layout", LAYOUTS[0]), given.get("name", "")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    numbers = {}
    for field in ("axis", "indices"):
        if field in given:
            try:
                numbers[field] = int(given[field])
            except ValueError:
                raise ValueError(f"{field} is a number, got {given[field]!r}") from None
    if "indices" not in numbers:
        if "draw" in given:
            raise ValueError("draw= is for embeddings, which have indices=")
        axis = numbers.get("axis", -1)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axis {axis} is outside the shape {words[0]}")
        return custom(shape, axis, layout, name)
    draws = [draw.value for draw in Draw]
    draw = given.get("draw", Draw.UNIFORM.value)
    if len(shape) != 2 or draw not in draws or numbers["indices"] < 1:
        raise ValueError(
            f"an embedding is ROWSxCOLUMNS indices=N, with draw one of {', '.join(draws)}"
        )
    sizes = (*shape, numbers["indices"])
    name = name or "x".join(map(str, sizes)) + f" {draw}"
    return Workload(name, sizes, draw=Draw(draw), reach=Reach.EMBEDDING)


def strides_of(desc: Any, layout: str, without: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """The strides, in elements, of a problem's arrays in a layout."""
    made = {}
    for operand in desc.operands:
        if operand.name in without:
            continue
        shape = operand.shape
        if layout == "transposed":
            made[operand.name] = c_strides(shape[::-1])[::-1]
        elif layout == "sliced":
            made[operand.name] = c_strides((*shape[:-1], shape[-1] + 2 * SLICE_START))
        elif layout == "shifted":
            made[operand.name] = c_strides((*shape[:-1], shape[-1] + 1))
        elif layout == "permuted":
            order = memory_order(len(shape))
            inner = dict(zip(order, c_strides([shape[axis] for axis in order]), strict=True))
            made[operand.name] = tuple(inner[axis] for axis in range(len(shape)))
        else:
            made[operand.name] = c_strides(shape)
    return made
