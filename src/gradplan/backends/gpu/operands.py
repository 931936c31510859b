"""Operands as a kernel sees them: rows × axis, and what may be relied on in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

from ...geometry import Dim, Nest, nest
from .launch import Argument, Pointer
from .program import TYPES, Strides

__all__ = ["Geometry", "Lined", "geometry_of", "lined", "pointers_of"]

_LEAST = 4  # bytes that an asynchronous copy moves


@dataclass(frozen=True)
class Geometry:
    """Rows × axis, with every operand's strides, ready to be arguments."""

    names: tuple[str, ...]
    """Operands in the order of the kernel: dy, x, y, outputs."""
    given: tuple[bool, ...]
    rows: Nest
    axis: Nest
    type: str
    item: int

    def offset(self, k: int) -> int:
        return (self.rows.offsets[k] + self.axis.offsets[k]) * self.item

    def mode(self, k: int, output: bool = False, unit: bool = False) -> str:
        """What `kernels.tiles` may rely on; "u" only where asked for with `unit`."""
        if not self.given[k]:
            return "n"
        along = [dim.strides[k] for dim in self.axis.dims]
        across = [dim.strides[k] for dim in self.rows.dims]
        many_rows = self.rows.size > 1
        if not output:
            if not any(along):
                beside = across[0] == 1 and self.rows.dims[0].extent > 1
                return "u" if unit and beside and not any(s % 16 for s in across[1:]) else "r"
            if not any(across) and many_rows and self.axis.size > 1:
                return "a"
        if len(along) == 1 and along[0] == 1:
            return "t"
        if across[0] == 1 and self.rows.dims[0].extent > 1:
            return "c"
        return "s"

    def near(self, r: int, c: int) -> bool:
        """Whether no two elements of a tile of r rows by c steps are 2³¹ apart."""
        inner, beside = self.axis.dims[0], self.rows.dims[0]
        return all(
            abs(a) * (c - 1) + abs(b) * (r - 1) < 2**31
            for a, b in zip(inner.strides, beside.strides, strict=True)
        )

    def alike(self, modes: Sequence[str]) -> tuple[int, ...]:
        """The operands that lie in runs along the axis, the outputs among them, if the rows of all
        begin at the same places within 16 bytes wherever their first ones do, and there are no
        others but those of one value a row; none otherwise."""
        runs = tuple(k for k, mode in enumerate(modes) if mode == "t")
        rests = {tuple(dim.strides[k] * self.item % 16 for dim in self.rows.dims) for k in runs}
        ours = {*modes} <= {"t", "r", "n"} and all(mode in ("t", "n") for mode in modes[3:])
        return runs if ours and len(rests) == 1 else ()

    def classes(self, modes: Sequence[str]) -> tuple[tuple[int, ...], int]:
        """The operands that lie side by side, the outputs among them, and after how many places of
        the axis their rows begin again where they began within 16 bytes: of all of them, wherever
        the first ones do. None where they do not, or where rows overlap."""
        beside = tuple(k for k, mode in enumerate(modes) if mode == "c")
        others = [*self.axis.dims, *self.rows.dims[1:]]
        steps = {k: [dim.strides[k] for dim in others] for k in beside}
        wide = self.rows.dims[0].extent
        if not all(modes[k] in ("c", "n") for k in range(3, len(modes))) or not beside:
            return (), 0
        # 16 bytes with some of a row reach into its neighbours at most, never beyond an array that
        # they are in the middle of.
        if wide * self.item < 16 or any(step < wide for some in steps.values() for step in some):
            return (), 0
        rests = {tuple(step * self.item % 16 for step in some) for some in steps.values()}
        if len(rests) > 1:
            return (), 0
        return beside, 16 // gcd(16, steps[beside[0]][0] * self.item)

    def grains(self, n: int, modes: Sequence[str]) -> list[int]:
        """How many bytes of rows side by side can be copied at a time: the most that strides
        allow, and what is enough for a copy, if addresses are divisible by less."""
        most = min(16, self.item * self.alignment(n, modes, (16, 8, 4, 2))[0])
        return [most, _LEAST] if most > _LEAST else [most] if most == _LEAST else []

    def claims(self, n: int, modes: Sequence[str], grain: int) -> tuple[int, tuple[str, ...]]:
        """What `alignment` is to be claimed for copies of so many bytes."""
        if grain == 16:
            return self.alignment(n, modes, (16, 8, 4, 2))
        return self.alignment(n, modes, (grain // self.item,)) if grain > self.item else (1, ())

    def arguments(self) -> list[tuple[str, Argument]]:
        """row_dims, each operand's row strides, axis_dims, each operand's axis strides."""
        made: list[tuple[str, Argument]] = [
            ("row_dims", tuple(dim.extent for dim in self.rows.dims))
        ]
        for k, name in enumerate(self.names):
            made.append((f"row_{name}", tuple(dim.strides[k] for dim in self.rows.dims)))
        made.append(("axis_dims", tuple(dim.extent for dim in self.axis.dims)))
        for k, name in enumerate(self.names):
            made.append((f"axis_{name}", tuple(dim.strides[k] for dim in self.axis.dims)))
        return made

    def alignment(
        self, n: int, modes: Sequence[str], sizes: Sequence[int] = (16, 4)
    ) -> tuple[int, tuple[str, ...]]:
        """The first of these powers of two, or 1, that divides all that loads in runs depend on."""
        names: list[str] = []
        common = 0
        flat = "t" in modes
        if flat:
            names.append("n")
            common = gcd(common, n)
        if "c" in modes:
            names.append("row_dims:0")
            common = gcd(common, self.rows.dims[0].extent)
        for k, name in enumerate(self.names):
            if modes[k] == "t":
                names.append(f"row_{name}")
                for dim in self.rows.dims:
                    common = gcd(common, dim.strides[k])
            elif modes[k] == "c":
                names.append(f"axis_{name}")
                for dim in self.axis.dims:
                    common = gcd(common, dim.strides[k])
            if modes[k] in ("c", "u") and len(self.rows.dims) > 1:
                names.append(f"row_{name}:1")  # the first is 1
                for dim in self.rows.dims[1:]:
                    common = gcd(common, dim.strides[k])
        if not names:
            return 1, ()
        for size in sizes:
            if common % size == 0:
                return size, tuple(names)
        return 1, ()


def geometry_of(
    desc: Any, strides: Strides, outputs: Sequence[str], rows: Nest, axis: Nest
) -> Geometry:
    names = ("dy", "x", "y", "out", "out2")[: 3 + len(outputs)]
    sources = ("dy", "x", "y", *outputs)
    return Geometry(
        names=names,
        given=tuple(source in strides for source in sources),
        rows=rows,
        axis=axis,
        type=TYPES[desc.element],
        item=desc.element.size_bytes,
    )


def pointers_of(
    shape: Geometry, sources: Sequence[str], modes: Sequence[str]
) -> list[tuple[str, Argument]]:
    made: list[tuple[str, Argument]] = []
    for k, (name, source) in enumerate(zip(shape.names, sources, strict=True)):
        absent = modes[k] == "n"
        made.append((name, None if absent else Pointer(source, shape.type, shape.offset(k))))
    return made


class Lined(NamedTuple):
    """A scan as rows × one axis, which is walked as memory lies."""

    geometry: Geometry
    modes: list[str]
    """Of dy, x, y and dx."""
    flip: bool
    """Whether the far end, where the recurrence begins, is the first place of the axis."""
    columns: bool
    """Whether rows lie side by side."""

    def beside(self, start: int, extent: int) -> Lined:
        """The same of so many of the rows that lie side by side."""
        rows = self.geometry.rows
        inner = rows.dims[0]
        offsets = (o + start * step for o, step in zip(rows.offsets, inner.strides, strict=True))
        dims = (Dim(extent, inner.strides), *rows.dims[1:])
        geometry = replace(self.geometry, rows=Nest(dims, tuple(offsets)))
        return self._replace(geometry=geometry)


def lined(desc: Any, strides: Strides) -> Lined:
    """The same of arrays with these strides; what is not among them is absent."""
    shape, (axis,) = desc.shape_and_axes
    rank = len(shape)
    steps = [strides.get(name, (0,) * rank) for name in ("dy", "x", "y", "dx")]
    lead = 3
    along = nest(shape, (axis,), steps, lead, ordered=True)
    across = nest(shape, [d for d in range(rank) if d != axis], steps, lead)
    flip = desc.reverse
    (line,) = along.dims
    if line.strides[lead] < 0:  # walk memory forwards
        ends = tuple((line.extent - 1) * step for step in line.strides)
        along = Nest((Dim(line.extent, tuple(-step for step in line.strides)),), ends)
        flip = not flip
        (line,) = along.dims
    geometry = geometry_of(desc, strides, ("dx",), across, along)
    modes = [geometry.mode(k, output=k >= 3) for k in range(4)]
    beside = across.dims[0]
    columns = beside.extent > 1 and abs(beside.strides[lead]) < abs(line.strides[lead])
    return Lined(geometry, modes, flip, columns)
