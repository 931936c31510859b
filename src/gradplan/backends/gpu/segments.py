"""The launches of the engine *segment sum*: sort the indices, then sum the rows they name; of few
indices one that sorts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from ...descriptors import EmbeddingBackwardDescriptor
from ...errors import Unsupported
from .launch import WORKSPACE, Argument, Int, Pointer, Step, all_registers
from .program import EMPTY, TYPES, Program, Strides, integer, up
from .table import Table

__all__ = ["program", "workspace_bytes"]

_BOUNDS_BLOCK = 512
_FEWEST = 32  # up to so many indices are read by the same kernel
_F64_BYTES = 8
_MARK_COPIES = 8
_WARP_BYTES = 512  # what the threads of a warp load at a time


@dataclass(frozen=True)
class _Level:
    """A list of entries that is summed in chunks; what crosses their ends is the next list."""

    entries: int
    length: int

    @property
    def chunks(self) -> int:
        return -(-self.entries // self.length)


def _levels(n: int, table: Table) -> list[_Level]:
    # A whole number of those that are loaded at a time; and lists must become shorter.
    levels = [_Level(n, max(table.chunk, table.together))]
    while (chunks := levels[-1].chunks) > 1:
        entries, most = 2 * chunks, max(table.chunk_more, table.together_more, 4)
        # Two lists about as long as each other, if they are no longer than that.
        even = max(up(isqrt(2 * entries)), table.together_more, 4)
        levels.append(_Level(entries, most if entries <= most else min(even, most)))
    return levels


def _sort_bits(desc: EmbeddingBackwardDescriptor) -> tuple[int, int]:
    """Bits that number the positions, and the rows with one more for what is skipped."""
    n, rows = desc.num_indices, desc.num_embeddings
    shift, key_bits = max(n - 1, 1).bit_length(), max(rows, 1).bit_length()
    if shift + key_bits > 62:
        raise Unsupported(
            f"EmbeddingBackwardPlan: {rows} rows and {n} indices need more than 62 bits to number"
        )
    return shift, key_bits


def _digits(key_bits: int, table: Table) -> tuple[int, int]:
    """Passes of the sort, and the bits of each."""
    passes = -(-key_bits // table.sort_bits)
    return passes, -(-key_bits // passes)


def _copies(desc: EmbeddingBackwardDescriptor, table: Table) -> int:
    """In how many places rows are marked: blocks that name one row all wait for each other. No more
    than take as much room as the sorted words; a power of two, 0 where nothing is marked."""
    n, rows = desc.num_indices, desc.num_embeddings
    copies = 0 if desc.accumulate else 1
    while n >= table.mark_blocks * table.sort_block and 0 < copies < min(_MARK_COPIES, n // rows):
        copies *= 2
    return copies


def _places(desc: EmbeddingBackwardDescriptor, table: Table) -> dict[str, int]:
    """Where the parts of the workspace begin."""
    n = desc.num_indices
    _, bits = _digits(_sort_bits(desc)[1], table)
    blocks = -(-n // table.sort_block)
    number = 1 if integer(n).type == "i64" else 2
    words = {
        "words": n,
        "spare": n,
        "counts": -(-(blocks << bits) // number),
        "totals": 1 << bits,
        "marks": _copies(desc, table) * desc.num_embeddings,
        "bounds": 2 * desc.num_embeddings if desc.scale_grad_by_freq else 0,
    }
    for k, level in enumerate(_levels(n, table)[:-1]):
        words[f"keys{k}"] = 2 * level.chunks
        words[f"sums{k}"] = 2 * level.chunks * desc.embedding_dim
    places, end = {}, 0
    for name, size in words.items():
        places[name] = end
        end += -(-8 * size // 256) * 256
    places["end"] = end
    return places


class _Few(NamedTuple):
    """How a program that reads all indices works: on so many of them at most, and columns that it
    sums; so many rows and columns that it zeroes."""

    n: int
    d: int
    t: int
    z: int
    sums: int
    """Programs that sum ..."""
    zeros: int
    """... and that zero."""

    def zeroing(self, desc: EmbeddingBackwardDescriptor, t: int) -> _Few:
        """The same with programs that zero so many rows."""
        zeros = -(-desc.num_embeddings // t) * -(-desc.embedding_dim // self.z)
        return self._replace(t=t, zeros=zeros)


def _few(desc: EmbeddingBackwardDescriptor, table: Table) -> _Few | None:
    """If indices are so few that each program may read them all: what that costs must not be more
    than what else it does, unless programs are few."""
    n, rows, columns = desc.num_indices, desc.num_embeddings, desc.embedding_dim
    if n > table.few_indices:
        return None
    most = _FEWEST
    while most < n:
        most *= 4
    d, z = min(up(columns), table.few_columns), min(up(columns), table.few_zeros)
    t = max(1, min(table.few_words // most, table.few_zeros // z))
    sums, zeros = n * -(-columns // d), -(-rows // t) * -(-columns // z)
    if desc.accumulate:
        t, z, zeros = 1, 1, 0
    dear = zeros > table.few_programs and 2 * t * min(columns, z) < table.few_zeros
    return None if sums > table.few_programs or dear else _Few(most, d, t, z, sums, zeros)


def workspace_bytes(desc: EmbeddingBackwardDescriptor, table: Table) -> int:
    """The workspace of a problem, whatever the layout."""
    n = desc.num_indices
    if desc.num_embeddings * desc.embedding_dim == 0 or n == 0 or _few(desc, table):
        return 0
    return _places(desc, table)["end"]


@dataclass(frozen=True)
class _Problem:
    desc: EmbeddingBackwardDescriptor
    strides: Strides
    index_shape: tuple[int, ...]
    table: Table

    @property
    def unit(self) -> bool:
        """Whether columns lie one after the other."""
        desc = self.desc
        value = desc.num_indices == 0 or self.strides["dout"][-1] == 1
        return desc.embedding_dim == 1 or (value and self.strides["dweight"][1] == 1)

    @property
    def alignment(self) -> int:
        steps = (self.strides["dweight"][0], *self.strides["dout"][:-1], self.desc.embedding_dim)
        return 16 if self.unit and all(step % 16 == 0 for step in steps) else 1

    @property
    def goal(self) -> tuple[tuple[str, Argument], ...]:
        row, column = self.strides["dweight"]
        return (("table_row", Int(row)), ("table_column", Int(column)))

    @property
    def size(self) -> tuple[tuple[str, Argument], ...]:
        desc = self.desc
        return (("rows", integer(desc.num_embeddings)), ("columns", integer(desc.embedding_dim)))

    @property
    def clear_tile(self) -> tuple[int, int]:
        """Rows and columns of the table that a program zeroes."""
        desc, table = self.desc, self.table
        rows, columns = up(desc.num_embeddings), up(desc.embedding_dim)
        return min(table.clear_rows, rows), min(table.clear_columns, columns)

    @property
    def clear_tiles(self) -> int:
        t, d = self.clear_tile
        return -(-self.desc.num_embeddings // t) * -(-self.desc.embedding_dim // d)

    @property
    def weight(self) -> Pointer:
        return Pointer("dweight", TYPES[self.desc.element])


def program(
    desc: EmbeddingBackwardDescriptor,
    strides: Strides,
    index_shape: Sequence[int],
    table: Table,
) -> Program:
    """The program for arrays with these strides; positions run over `index_shape` in C order."""
    n = desc.num_indices
    if desc.num_embeddings * desc.embedding_dim == 0 or (n == 0 and desc.accumulate):
        return EMPTY
    problem = _Problem(desc, strides, tuple(index_shape), table)
    layout = "rows" if problem.unit else "strided"
    if n == 0:
        return Program(
            steps=(_clear(problem),),
            runner=None,
            workspace_bytes=0,
            reads={},
            layout=layout,
            variant="zeros",
            why="there are no indices: the table is zeroed",
        )
    few = _few(desc, table)
    if few is not None:
        return Program(
            steps=(_sum_few(problem, few),),
            runner=None,
            workspace_bytes=0,
            reads={},
            layout=layout,
            variant="few",
            why="indices so few that every program reads them all: one launch, nothing is sorted",
        )
    shift, key_bits = _sort_bits(desc)
    passes, bits = _digits(key_bits, table)
    places = _places(desc, table)
    words = Pointer(WORKSPACE, "i64", places["words" if passes % 2 == 0 else "spare"])
    bounds = Pointer(WORKSPACE, "i64", places["bounds"]) if desc.scale_grad_by_freq else None
    steps = list(_sort(problem, places, shift, passes, bits))
    if bounds is not None:
        steps.append(_find_bounds(problem, words, bounds, shift))
    steps.extend(_sums(problem, places, words, bounds, shift))
    return Program(
        steps=tuple(steps),
        runner=None,
        workspace_bytes=places["end"],
        reads={},
        layout=layout,
        variant="sorted",
        why=f"indices are sorted in {passes} pass{'es' if passes > 1 else ''}, then summed in "
        f"chunks of {table.chunk} in their order",
    )


def _clear(problem: _Problem) -> Step:
    t, d = problem.clear_tile
    return Step(
        kernel="segments.clear_rows",
        grid=problem.clear_tiles,
        arguments=(("table", problem.weight), *problem.goal, *problem.size),
        constants=(("UNIT", problem.unit), ("T", t), ("D", d)),
        warps=4,
        alignment=problem.alignment,
        aligned=("table_row", "columns"),
    )


def _sum_few(problem: _Problem, few: _Few) -> Step:
    """One launch for all: a program a position and some columns, and behind them those that zero
    what no index names."""
    desc, table = problem.desc, problem.table
    # What does not lie in runs takes an address an element, and positions in many dimensions take
    # divisions: halves and f32 would go to the stack. With a thread a row to be zeroed, each would
    # divide for all positions.
    dims = len(problem.index_shape)
    words = table.few_words // (1 if problem.unit else 4)
    words //= 1 if dims == 1 else 2 if dims == 2 else 4 if dims <= 4 else 8
    if dims > 2 and few.t > 8 * table.few_warps:
        few = few.zeroing(desc, 8 * table.few_warps)
    return Step(
        kernel="few.sum_few",
        grid=few.sums + few.zeros,
        arguments=(
            ("indices", Pointer("indices", desc.index.value)),
            ("values", Pointer("dout", TYPES[desc.element])),
            ("table", problem.weight),
            ("index_dims", tuple(reversed(problem.index_shape))),
            ("index_steps", tuple(reversed(problem.strides["indices"]))),
            ("value_steps", tuple(reversed(problem.strides["dout"][:-1]))),
            ("value_column", Int(problem.strides["dout"][-1])),
            *problem.goal,
            *problem.size,
            ("padding", Int(-1 if desc.padding_idx is None else desc.padding_idx)),
            ("count", Int(desc.num_indices, "i32")),
        ),
        constants=(
            ("ELEMENT", desc.element.value),
            ("UNIT", problem.unit),
            ("ACCUMULATE", desc.accumulate),
            ("BY_COUNT", desc.scale_grad_by_freq),
            ("N", few.n),
            ("P", max(1, min(few.n, words // few.d))),
            ("D", few.d),
            ("T", few.t),
            ("Z", few.z),
            ("S", min(few.z, max(1, words // few.t))),
        ),
        warps=table.few_warps,
        registers=all_registers(table.few_warps),
        alignment=problem.alignment,
        aligned=("value_steps", "table_row", "columns"),
    )


def _sort(
    problem: _Problem, places: dict[str, int], shift: int, passes: int, bits: int
) -> Iterator[Step]:
    """A stable radix sort, from the lowest digit of the rows up; every pass zeroes its share of
    the rows that nobody names, unless they are to be kept."""
    desc, table = problem.desc, problem.table
    early = table.early
    block = table.sort_block
    blocks = -(-desc.num_indices // block)
    indices = Pointer("indices", desc.index.value)
    words = [Pointer(WORKSPACE, "i64", places[name]) for name in ("words", "spare")]
    number = integer(desc.num_indices).type
    counts = Pointer(WORKSPACE, number, places["counts"])
    totals = Pointer(WORKSPACE, number, places["totals"])
    marks = None if desc.accumulate else Pointer(WORKSPACE, "i64", places["marks"])
    t, d = problem.clear_tile if marks else (1, 1)
    tiles = problem.clear_tiles if marks else 0
    for turn in range(passes):
        source, target = words[turn % 2], words[(turn + 1) % 2]
        numbers: tuple[tuple[str, Argument], ...] = (
            ("index_dims", tuple(reversed(problem.index_shape))),
            ("index_steps", tuple(reversed(problem.strides["indices"]))),
            ("rows", Int(desc.num_embeddings)),
            ("padding", Int(-1 if desc.padding_idx is None else desc.padding_idx)),
            ("count", integer(desc.num_indices)),
            ("low", Int(shift + turn * bits, "i32")),
            ("shift", Int(shift, "i32")),
        )
        fixed = (("FIRST", turn == 0), ("BITS", bits), ("BLOCK", block))
        copies = _copies(desc, table)
        tile, end = turn * tiles // passes, (turn + 1) * tiles // passes
        yield Step(
            kernel="segments.count_digits",
            grid=blocks,
            arguments=(
                ("indices", indices),
                ("words", source),
                ("counts", counts),
                ("marks", marks if turn == 0 else None),
                *numbers,
            ),
            constants=(*fixed, ("COPIES", copies if turn == 0 else 0), ("EARLY", early)),
            warps=1,
            early=early and turn > 0,
        )
        yield Step(
            kernel="segments.sum_counts",
            grid=1 << bits,
            arguments=(("counts", counts), ("totals", totals), ("blocks", Int(blocks, "i32"))),
            constants=(("BLOCK", table.sum_block), ("EARLY", early)),
            warps=4,
            early=early,
        )
        yield Step(
            kernel="moves.move_words",
            grid=blocks + end - tile,
            arguments=(
                ("indices", indices),
                ("words", source),
                ("moved", target),
                ("counts", counts),
                ("totals", totals),
                ("marks", marks),
                ("table", problem.weight),
                *numbers,
                ("blocks", Int(blocks, "i32")),
                ("tile", Int(tile, "i32")),
                *problem.goal,
                ("columns", integer(desc.embedding_dim)),
            ),
            constants=(
                *fixed,
                ("COPIES", copies),
                ("UNIT", problem.unit),
                ("T", t),
                ("D", d),
                ("EARLY", early),
            ),
            warps=1,
            early=early,
            # What does not lie in runs takes an address an element.
            registers=0 if problem.unit else all_registers(1),
            alignment=problem.alignment,
            aligned=("table_row", "columns"),
        )


def _find_bounds(problem: _Problem, words: Pointer, bounds: Pointer, shift: int) -> Step:
    n = problem.desc.num_indices
    return Step(
        kernel="segments.find_bounds",
        grid=-(-n // _BOUNDS_BLOCK),
        arguments=(
            ("words", words),
            ("bounds", bounds),
            ("rows", Int(problem.desc.num_embeddings)),
            ("count", Int(n)),
            ("shift", Int(shift, "i32")),
        ),
        constants=(("BLOCK", _BOUNDS_BLOCK), ("EARLY", problem.table.early)),
        warps=4,
        early=problem.table.early,
    )


def _width(columns: int, most: int, item: int) -> int:
    """The columns that a program sums: the slices that reach least beyond the last column, as wide
    as they may be, but none narrower than a warp loads at a time."""
    widest = min(up(columns), most)
    widths = [widest]
    while widths[-1] * item > _WARP_BYTES:
        widths.append(widths[-1] // 2)
    return min(widths, key=lambda d: (-(-columns // d) * d, -d))


def _sums(
    problem: _Problem, places: dict[str, int], words: Pointer, bounds: Pointer | None, shift: int
) -> Iterator[Step]:
    """Sum the words, and what is left of them, list by list."""
    desc, strides, table = problem.desc, problem.strides, problem.table
    columns = desc.embedding_dim
    levels = _levels(desc.num_indices, table)
    for k, level in enumerate(levels):
        first, last = k == 0, k == len(levels) - 1
        each = table.together if first else table.together_more
        item = desc.element.size_bytes if first else _F64_BYTES
        # What does not lie in runs takes an address an element, and a quotient in each column
        # registers of its own.
        runs = problem.alignment > 1
        bounded = first and runs and not desc.scale_grad_by_freq
        wide = table.chunk_bytes // (1 if runs else 4) if first else table.chunk_more_bytes
        d = _width(columns, wide // item, item)
        value_dims: tuple[tuple[str, Argument], ...]
        if first:
            entries, values = words, Pointer("dout", TYPES[desc.element])
            value_dims = (
                ("index_dims", tuple(reversed(problem.index_shape))),
                ("value_steps", tuple(reversed(strides["dout"][:-1]))),
                ("value_column", Int(strides["dout"][-1])),
            )
        else:
            entries = Pointer(WORKSPACE, "i64", places[f"keys{k - 1}"])
            values = Pointer(WORKSPACE, "fp64", places[f"sums{k - 1}"])
            value_dims = (
                ("index_dims", (0,)),
                ("value_steps", (0,)),
                ("value_column", Int(1)),
            )
        yield Step(
            kernel="segments.sum_chunks",
            grid=level.chunks * -(-columns // d),
            arguments=(
                ("entries", entries),
                ("values", values),
                ("keys", None if last else Pointer(WORKSPACE, "i64", places[f"keys{k}"])),
                ("sums", None if last else Pointer(WORKSPACE, "fp64", places[f"sums{k}"])),
                ("bounds", bounds),
                ("table", problem.weight),
                *value_dims,
                *problem.goal,
                *problem.size,
                ("count", Int(level.entries)),
                ("length", Int(level.length, "i32")),
                ("shift", Int(shift, "i32")),
            ),
            constants=(
                ("FIRST", first),
                ("LAST", last),
                ("ELEMENT", desc.element.value),
                ("UNIT", problem.unit),
                ("ACCUMULATE", desc.accumulate),
                ("BY_COUNT", desc.scale_grad_by_freq),
                ("P", max(1, each // (4 if desc.scale_grad_by_freq else 1))),
                ("D", d),
                ("EARLY", table.early),
            ),
            early=table.early,
            # A thread holds its columns of all entries that are summed at a time.
            warps=max(1, min(4, d * item // _WARP_BYTES)),
            registers=table.chunk_registers if bounded else all_registers(4),
            alignment=problem.alignment,
            aligned=("value_steps", "table_row", "columns"),
        )
