"""Thresholds: how large tiles are and when a row is split, one table an architecture.

The numbers for the H200 (sm_90) were measured on it; other architectures use them until somebody
measures there. The interpreter's are small, so that small shapes meet every variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...kinds import ElementKind

__all__ = ["Table", "table_of", "using"]


Lines = tuple[tuple[str, int, int, int, int], ...]
"""By kind ("" for the others): two sizes for halves, two for the other types."""


ByPlace = tuple[tuple[str, str, int, int], ...]
"""By field of tiles and kind: a number for halves, one for f32."""


ByLength = tuple[tuple[str, int, int, int], ...]
"""By kind, and for rows of so many elements at least: a number for halves, one for the others."""


Side = tuple[int, int, int, int]
"""How many rows side by side, in how many lines each, of how many elements; and warps."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Sizes are in elements of a tile, unless they say otherwise."""

    fill: int
    """So many programs fill the machine: with fewer, rows are split."""
    map_bytes: int
    """A map's tile, in bytes of all outputs."""
    row_tile: int
    """Short rows are put together up to this."""
    resident_words: int
    """What a program may keep of its rows, in 32-bit registers, all operands together."""
    packed: int
    """Where there are no clusters, rows of halves from here on count half."""
    column_factor: int
    """Neighbouring rows count so many times."""
    column_bytes: int
    """Neighbouring rows that stay in registers are taken together up to this many bytes ..."""
    column_tile: int
    """... and, with all their places and operands, this many."""
    lagged_rows: Lines
    """Rows cut into parts, a program each: the elements of a part and its warps, for halves and
    for f32; half as many of f64."""
    lagged_columns: Lines
    """The same where neighbouring rows are cut together ..."""
    lagged_width: int
    """... so many bytes of them."""
    cluster_rows: Lines
    """The same where the programs of a cluster hold the rows ..."""
    cluster_columns: Lines
    """... or rows side by side (0: never) ..."""
    ragged_rows: Lines
    """The same of rows that begin anywhere; of those that are no longer a program keeps whole ones
    ..."""
    ragged_short: int
    """... and those up to so many elements by as many warps as rows that begin where 16 divides the
    address ..."""
    ragged_tile: ByLength
    """... of so many elements together."""
    ragged_even: ByPlace
    """Rows that begin and end where 16 divides the address, and would fill no tile, are taken as
    the others from so many elements on."""
    held_rows: Lines
    """The same where programs that stay keep parts in shared memory (0: never) ..."""
    held_columns: Lines
    """... or rows side by side ..."""
    held_width: int
    """... so many bytes of them ..."""
    held_bytes: int
    """... with room for so many bytes of parts ..."""
    held_registers: Lines
    """... and so many registers for threads that write gradients, and that join states: for halves,
    and for f32."""
    held_masked: Lines
    """The same of parts that are not full ..."""
    held_classes: Lines
    """... and of rows side by side that begin anywhere ..."""
    held_nested: Lines
    """... in several dimensions."""
    held_halved: tuple[str, ...]
    """Kinds whose parts of halves are half as long there, beside prod, whose parts are so in all
    rows that begin anywhere."""
    walked_rows: Lines
    """Scans whose rows fill the machine, each walked by a program: the elements of a part in shared
    memory (0: never), and its warps; "mark" stands for the launch that marks winners ..."""
    walked_from: ByPlace
    """... of rows of so many elements at least; "walked_uneven" are those that would fill no tile
    ..."""
    walked_parts: int
    """... with room for so many parts ..."""
    walked_warps: int
    """... twice as large, by twice as many warps, where there would be fewer warps a processor."""
    walked_ragged: Lines
    """The same of rows that begin anywhere, and of those that would fill no tile."""
    walked_columns: Lines
    """The same of rows side by side, in strips of 128 bytes ..."""
    walked_strips: Lines
    """... and of strips half as wide, where there would be fewer than `fill` (0: never) ..."""
    walked_grains: Lines
    """... and of strips that are copied by less than 16 bytes at a time (0: narrow ones) ..."""
    walked_axis: int
    """... along an axis of so many places at least ..."""
    walked_column_parts: int
    """... with room for so many parts."""
    held_scans: Lines
    """The same of longer rows whose parts all programs take in turn, with room for `held_bytes` of
    them ..."""
    held_scan_registers: Lines
    """... and registers, as in `held_registers`, but by four warps, and by eight."""
    tall_programs: tuple[int, int]
    """Few rows side by side, of which all places lie in one run, are taken in lines by so many
    programs (0: never): of halves, and of the others ..."""
    tall_bytes: int
    """... of so many bytes at most ..."""
    tall_room: int
    """... with room for so many bytes of lines that are on their way ..."""
    tall_rows: ByPlace
    """... and up to so many rows even where strips that begin anywhere could be held ..."""
    tall_parts: ByPlace
    """... or where those held would be cut into so many parts or more (0: never)."""
    held_first: ByPlace
    """Whether rows are held where a cluster could take them."""
    cluster_first: ByPlace
    """Up to so many programs, a cluster takes full parts of rows that could be held, or of the
    longest that could be kept whole."""
    lag: int
    """So many parts are read before the first is read again, from the cache (0: in two launches),
    ..."""
    lag_bytes: int
    """... or so many bytes of them, if that is less."""
    strided_tile: int
    """The elements of a part, all operands together, that does not lie in runs."""
    cluster: int
    """The most programs of a cluster, 0 where the architecture has none."""
    scan_tile: int
    """Short rows of a scan are put together up to this."""
    scan_resident: int
    """The longest row of a scan that stays in registers; half of it where numbers are f64."""
    scan_step: int
    """A tile of a longer row."""
    scan_product: tuple[int, int]
    """The longest row whose factors are rounded one by one in f32: of halves, and of f32."""
    scan_words: int
    """Elements of a scan a thread: decides the number of warps."""
    scan_columns: int
    """The longest axis of neighbouring rows that stays in registers."""
    alone: Lines
    """Neighbouring rows of cummax and cummin that a thread takes alone: how many a program has, of
    halves two a thread at least (0: never), and its warps ..."""
    alone_axis: int
    """... along an axis of so many places at most."""
    alone_rows: ByPlace
    """The longest row in one run, of 2ᵏ places, that a warp takes alone; 1024 at most."""
    scan_column_bytes: int
    """Neighbouring rows of a longer axis: so many that no thread shares its rows ..."""
    scan_column_step: int
    """... and walks the axis by this many steps at a time."""
    scan_column_few: int
    """Steps of a tile where the scan is recomputed."""
    scan_fill: int
    """So many programs fill the machine where each takes whole rows in lines."""
    scan_lag: int
    """So many bytes are read before the first is read again; 0: in two launches ..."""
    lagged_scans: tuple[str, ...]
    """... which takes the others no longer."""
    chained: Lines
    """Long rows of a scan that lie one element after the other: the tile of a program that waits
    for what arrives (0: never), and its warps; half as many of f64."""
    chained_far: Lines
    """The same of rows so long that more than twice `chain` stretches are joined."""
    chained_many: Lines
    """The same where there are rows enough to fill the machine ..."""
    chained_from: int
    """... of at least so many elements."""
    chain: int
    """So many tiles make a stretch, and stretches a longer one; a power of two."""
    evened: tuple[str, ...]
    """Scans of which rows side by side that fill no tile come after those that do, where rows are
    cut ..."""
    evened_from: int
    """... and so many elements make up for more launches."""
    scan_chunk: int
    """The fewest steps of a chunk of a longer row that is cut."""
    lines: Lines
    """Rows of a scan that lie one element after the other: the tile and the elements a thread, for
    halves and for the other types."""
    side: tuple[tuple[str, Side, Side], ...]
    """Rows of a scan that lie side by side, for halves and for the other types ..."""
    short_side: tuple[tuple[str, Side, Side], ...]
    """... and the same of rows that fit into a tile; it has as many elements of shorter rows ..."""
    narrow_side: tuple[tuple[str, Side, Side], ...]
    """... and of longer ones where `side` makes fewer tiles ..."""
    ahead: ByPlace
    """Of rows side by side, so many tiles before its turn what a tile reads is asked for; of sums
    of rows in lines, whether it is in registers by then."""
    strips: int
    """... than so many."""
    side_chunk: int
    """The elements of such a row in a chunk ..."""
    side_window: int
    """... so many of which hand on their carries together."""
    short_lines: Lines
    """The same for kinds of which rows that fit into such a tile take another."""
    forward_lines: Lines
    """The same where y is not given and the scan is run again from x (0: never in lines) ..."""
    forward_side: tuple[tuple[str, Side, Side], ...]
    """... and of rows side by side (no rows: never)."""
    thread_words: int
    """Elements a thread keeps of a tile of rows; twice as many halves, but for the longest rows."""
    learned_bytes: int
    """What a program reads of its rows at a time where a forward pass looks for winners, in bytes,
    ..."""
    learned_thread: int
    """... and a thread of that."""
    sort_block: int
    """Indices of an embedding that a warp sorts at a time, a power of two, at least 32 ..."""
    sort_bits: int
    """... by at most so many bits."""
    sum_block: int
    """Blocks of a digit that are counted together at a time."""
    chunk: int
    """Words of a sorted list that a program sums, a power of two ..."""
    chunk_bytes: int
    """... so many bytes of each at most ..."""
    together: int
    """... so many at a time, a power of two, no larger than the chunk ..."""
    chunk_registers: int
    """... by threads of so many registers."""
    chunk_more: int
    """Entries of later lists that a program sums, at most ..."""
    chunk_more_bytes: int
    """... so many bytes of each at most ..."""
    together_more: int
    """... and so many at a time."""
    mark_blocks: int
    """From so many blocks on, the rows that they name are marked in several copies."""
    clear_rows: int
    """Rows of an embedding table that a program zeroes ..."""
    clear_columns: int
    """... and columns."""
    few_indices: int
    """So many indices are summed in one launch that sorts nothing, ..."""
    few_columns: int
    """... in so many columns a program, a power of two ..."""
    few_words: int
    """... of so many elements at a time, by ..."""
    few_warps: int
    """... so many warps, or ..."""
    few_zeros: int
    """... so many of rows that nobody names."""
    few_programs: int
    """More programs than this must each do more than read the indices."""
    marks_from: int
    """Elements of a problem from which on cummax and cummin of short rows, whose y is not given,
    take two launches."""
    join: int
    """Carries joined at a time, of up to `join_lanes` rows."""
    join_lanes: int
    edges_apart: ByPlace = ()
    """Whether both edges of a row that begins anywhere have lanes of their own ..."""
    edges_always: ByPlace = ()
    """... and there are lanes for edges even where no row has any: the assembler takes loads in
    another order then."""
    early: bool = False
    """Whether a launch may begin before the one before it has ended."""
    marks: bool = True
    """Whether cummax and cummin may leave a bit a place in the workspace."""
    paired: tuple[ElementKind, ...] = ()
    """Halves that the architecture compares two at a time."""
    roomy: bool = False
    """Whether scans must be given registers, lest the assembler spill a few."""
    at_once: ByPlace = ()
    """Elements that a thread takes to the end before it takes the next ones, of full tiles of one
    row whose state is a sum or a product; 0 takes all of them a step at a time, as the compiler
    does."""
    registers: ByPlace = ()
    """The most registers of a thread, of full tiles: fewer, so that more programs run at a time,
    or more than the assembler takes by itself; 0 leaves it to the rules."""

    def lines_of(self, kind: str, element: ElementKind, length: int = 0) -> tuple[int, int]:
        """The tile of a scan's rows of so many elements, and how many a thread takes of it."""
        if length and kind in (name for name, *_ in self.short_lines):
            tile, each = _line_of(self.short_lines, kind, element)
            if length <= tile:
                return tile, each
        return _line_of(self.lines, kind, element)

    def side_of(self, place: str, kind: str, element: ElementKind) -> Side:
        """The tile of a scan's rows that lie side by side, by the field that says so."""
        half = element in (ElementKind.F16, ElementKind.BF16)
        sides: tuple[tuple[str, Side, Side], ...] = getattr(self, place)
        for name, halves, others in sides:
            if name in ("", kind):
                return halves if half else others
        raise KeyError(kind)

    def number_of(self, numbers: ByPlace, place: str, kind: str, element: ElementKind) -> int:
        """What `registers` or `ahead` say for a kind where a field of tiles decides."""
        for where, name, halves, others in numbers:
            if where == place and name in ("", kind):
                half = element in (ElementKind.F16, ElementKind.BF16)
                return halves if half else others if element is ElementKind.F32 else 0
        return 0

    def ragged_tile_of(self, kind: str, element: ElementKind, length: int) -> int:
        """How many elements of rows of so many, which begin anywhere, are put together."""
        half = element in (ElementKind.F16, ElementKind.BF16)
        for name, least, halves, others in self.ragged_tile:
            if name in ("", kind) and length >= least:
                return halves if half else others
        raise KeyError(kind)

    def part_of(self, place: str, kind: str, element: ElementKind) -> tuple[int, int]:
        """The elements of a part of rows, by the field that says so, and its warps."""
        tile, warps = _line_of(getattr(self, place), kind, element)
        return (tile // 2 if element is ElementKind.F64 else tile), warps

    def exact_product(self, element: ElementKind, n: int) -> bool:
        """Whether products along a row of so many are f64: factors rounded one by one add up their
        errors."""
        half = element in (ElementKind.F16, ElementKind.BF16)
        return n > self.scan_product[0 if half else 1]

    def registers_of(self, kind: str, warps: int) -> tuple[int, int]:
        """The registers of threads of held scans that write gradients, and that join states."""
        sizes = next(sizes for name, *sizes in self.held_scan_registers if name in ("", kind))
        return (sizes[0], sizes[1]) if warps <= 4 else (sizes[2], sizes[3])


def _line_of(lines: Lines, kind: str, element: ElementKind) -> tuple[int, int]:
    for name, *sizes in lines:
        if name in ("", kind):
            half = element in (ElementKind.F16, ElementKind.BF16)
            first, second = sizes[:2] if half else sizes[2:]
            return first, second
    raise KeyError(kind)


_SM_90 = Table(
    early=True,
    fill=264,
    map_bytes=4096,
    row_tile=1024,
    resident_words=32768,
    packed=16384,
    column_factor=4,
    column_bytes=128,
    column_tile=8192,
    lagged_rows=(
        ("softmax", 16384, 8, 8192, 4),
        ("max", 16384, 8, 16384, 8),
        ("min", 16384, 8, 16384, 8),
        ("prod", 16384, 4, 16384, 8),
        ("log_softmax", 16384, 8, 8192, 4),
        ("", 16384, 4, 16384, 4),
    ),
    lagged_columns=(
        ("log_softmax", 8192, 2, 4096, 4),
        ("", 16384, 4, 8192, 4),
    ),
    lagged_width=128,
    cluster_rows=(
        ("log_softmax", 16384, 4, 8192, 4),
        ("softmax", 16384, 8, 8192, 8),
        ("prod", 16384, 4, 16384, 8),
        ("", 16384, 4, 16384, 8),
    ),
    ragged_rows=(
        ("softmax", 8192, 4, 8192, 8),
        ("log_softmax", 16384, 4, 8192, 4),
        ("prod", 16384, 8, 8192, 4),
        ("max", 16384, 4, 16384, 4),
        ("min", 16384, 4, 16384, 4),
        ("", 16384, 4, 8192, 4),
    ),
    ragged_short=8192,
    ragged_tile=(
        ("softmax", 128, 2048, 512),
        ("log_softmax", 256, 512, 256),
        ("log_softmax", 128, 1024, 128),
        ("", 1, 512, 512),
    ),
    ragged_even=(
        ("ragged_even", "softmax", 2048, 2048),
        ("ragged_even", "log_softmax", 2048, 2048),
        ("ragged_even", "prod", 2048, 2048),
        ("ragged_even", "", 1, 1),
    ),
    edges_apart=(
        ("ragged_rows", "softmax", 1, 1),
        ("ragged_rows", "log_softmax", 1, 1),
        ("ragged_rows", "max", 1, 1),
        ("ragged_rows", "min", 1, 1),
    ),
    edges_always=(
        ("even_rows", "var", 1, 0),
        ("even_whole", "softmax", 0, 1),
    ),
    cluster_columns=(
        ("var", 0, 4, 16384, 4),
        ("prod", 0, 4, 0, 4),
        ("", 0, 4, 8192, 4),
    ),
    held_rows=(
        ("softmax", 8192, 4, 4096, 4),
        ("log_softmax", 8192, 4, 4096, 4),
        ("", 16384, 4, 8192, 4),
    ),
    held_columns=(
        ("softmax", 16384, 4, 4096, 4),
        ("log_softmax", 16384, 4, 4096, 4),
        ("", 32768, 4, 16384, 4),
    ),
    held_width=256,
    held_bytes=192 << 10,
    held_registers=(
        ("max", 112, 144, 136, 144),
        ("min", 112, 144, 136, 144),
        ("", 136, 144, 136, 144),
    ),
    held_masked=(
        ("prod", 136, 144, 136, 144),
        ("var", 152, 136, 144, 136),
        ("std", 152, 136, 144, 136),
        ("", 152, 136, 152, 136),
    ),
    held_classes=(
        ("prod", 168, 120, 168, 120),
        ("log_softmax", 160, 128, 160, 128),
        ("var", 152, 128, 160, 144),
        ("std", 152, 128, 160, 144),
        ("", 152, 128, 152, 128),
    ),
    held_nested=(
        ("prod", 168, 120, 168, 120),
        ("softmax", 152, 128, 176, 128),
        ("log_softmax", 168, 128, 168, 128),
        ("var", 152, 128, 160, 144),
        ("std", 152, 128, 160, 144),
        ("", 176, 128, 152, 128),
    ),
    held_halved=(),
    walked_rows=(
        ("cumsum", 2048, 1, 1024, 1),
        ("cumprod", 1024, 1, 2048, 2),
        ("log_cumsum_exp", 2048, 2, 2048, 2),
        ("", 2048, 1, 4096, 2),
    ),
    walked_from=(
        ("walked_rows", "cumsum", 16384, 16384),
        ("walked_rows", "cumprod", 1024, 2048),
        ("walked_rows", "log_cumsum_exp", 1024, 1024),
        ("walked_rows", "", 2048, 2048),
        ("walked_ragged", "log_cumsum_exp", 768, 512),
        ("walked_ragged", "", 512, 512),
        ("walked_uneven", "cumsum", 512, 4096),
        ("walked_uneven", "", 512, 512),
        ("held_scans", "cumprod", 1 << 20, 1 << 20),
        ("held_scans", "log_cumsum_exp", 1 << 20, 1 << 20),
        ("held_scans", "cumsum", 1 << 20, 1 << 20),
        ("held_scans", "", 1 << 16, 1 << 16),
    ),
    walked_parts=2,
    walked_warps=8,
    walked_ragged=(
        ("cumprod", 1024, 1, 512, 1),
        ("log_cumsum_exp", 1024, 1, 512, 1),
        ("", 2048, 1, 1024, 1),
    ),
    walked_columns=(
        ("cumsum", 16384, 4, 0, 4),
        ("cumprod", 4096, 4, 2048, 4),
        ("log_cumsum_exp", 8192, 8, 2048, 4),
        ("", 8192, 4, 8192, 8),
    ),
    walked_strips=(
        ("cumsum", 0, 4, 0, 4),
        ("cumprod", 4096, 4, 0, 4),
        ("log_cumsum_exp", 4096, 4, 0, 4),
        ("", 8192, 4, 0, 4),
    ),
    walked_grains=(
        ("cumsum", 16384, 4, 8192, 4),
        ("cumprod", 4096, 4, 2048, 4),
        ("log_cumsum_exp", 8192, 8, 2048, 4),
        ("", 0, 4, 8192, 4),
    ),
    walked_axis=1024,
    walked_column_parts=3,
    held_scans=(
        ("cumsum", 16384, 4, 8192, 4),
        ("cumprod", 8192, 8, 4096, 4),
        ("log_cumsum_exp", 8192, 4, 4096, 4),
        ("mark", 16384, 4, 8192, 4),
        ("", 16384, 8, 8192, 4),
    ),
    held_scan_registers=(("cumprod", 208, 96, 112, 80), ("", 208, 96, 120, 80)),
    tall_programs=(528, 396),
    tall_bytes=16384,
    tall_room=128 << 10,
    tall_rows=(
        ("tall_rows", "softmax", 256, 256),
        ("tall_rows", "log_softmax", 1024, 1024),
        ("tall_rows", "max", 1024, 1024),
        ("tall_rows", "min", 1024, 1024),
        ("tall_rows", "", 1024, 128),
    ),
    tall_parts=(
        ("tall_parts", "softmax", 4096, 256),
        ("tall_parts", "log_softmax", 4096, 256),
        ("tall_parts", "max", 128, 128),
        ("tall_parts", "min", 128, 128),
    ),
    held_first=(
        ("held_rows", "prod", 1, 1),
        ("held_columns", "", 1, 1),
    ),
    cluster_first=(
        ("long_rows", "prod", 0, 4),
        ("long_rows", "", 0, 8),
    ),
    lag=352,
    lag_bytes=18 << 20,
    strided_tile=4096,
    cluster=8,
    scan_tile=1024,
    scan_resident=4096,
    scan_step=1024,
    scan_product=(8192, 1024),
    scan_words=16,
    scan_columns=128,
    alone=(("", 256, 4, 128, 4),),
    alone_axis=64,  # a chain of additions, of which the guarantee allows for some more
    alone_rows=(("alone_rows", "", 1024, 1024),),
    scan_column_bytes=1024,
    scan_column_step=4,
    scan_column_few=64,
    scan_fill=192,
    scan_lag=26 << 20,
    lagged_scans=("cumsum",),
    chained=(
        ("cumsum", 8192, 4, 8192, 8),
        ("log_cumsum_exp", 2048, 2, 2048, 4),
        ("", 4096, 4, 2048, 4),
    ),
    chained_far=(
        ("cumsum", 8192, 4, 8192, 8),
        ("cumprod", 4096, 4, 2048, 4),
        ("", 4096, 4, 4096, 8),
    ),
    chained_many=(("cumprod", 2048, 4, 1024, 4), ("", 0, 4, 0, 4)),
    chained_from=16384,
    chain=16,
    evened=("cummax", "cummin", "log_cumsum_exp"),
    evened_from=1 << 25,
    scan_chunk=32,
    side=(
        ("cumsum", (64, 8, 16, 4), (64, 16, 16, 4)),
        ("cumprod", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("log_cumsum_exp", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("", (32, 16, 16, 4), (32, 8, 8, 4)),
    ),
    short_side=(
        ("log_cumsum_exp", (32, 8, 8, 2), (64, 4, 16, 4)),
        ("", (128, 4, 16, 4), (64, 4, 16, 4)),
    ),
    narrow_side=(
        ("cumsum", (32, 32, 16, 8), (32, 16, 16, 4)),
        ("cumprod", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("log_cumsum_exp", (32, 16, 8, 4), (32, 8, 8, 4)),
        ("", (32, 16, 16, 4), (32, 8, 16, 4)),
    ),
    ahead=(
        ("lines", "cumsum", 1, 0),
        ("side", "cumsum", 0, 0),
        ("side", "cumprod", 1, 0),
        ("side", "log_cumsum_exp", 1, 1),
        ("side", "", 0, 1),
        ("narrow_side", "cumsum", 0, 0),
        ("narrow_side", "cumprod", 1, 1),
        ("narrow_side", "log_cumsum_exp", 1, 2),
        ("narrow_side", "", 0, 1),
    ),
    strips=512,
    side_chunk=512,
    side_window=64,
    lines=(
        ("cumsum", 2048, 16, 4096, 32),
        ("cumprod", 1024, 16, 1024, 8),
        ("log_cumsum_exp", 1024, 32, 1024, 16),
        ("", 1024, 8, 1024, 16),
    ),
    short_lines=(("cumsum", 4096, 32, 4096, 32), ("log_cumsum_exp", 512, 16, 256, 8)),
    forward_lines=(("", 1024, 32, 1024, 16),),
    forward_side=(("", (32, 8, 8, 4), (32, 8, 8, 4)),),
    thread_words=32,
    learned_bytes=8192,
    learned_thread=64,
    sort_block=256,
    sort_bits=9,
    sum_block=1024,
    chunk=128,
    chunk_bytes=2048,
    together=8,
    chunk_registers=80,
    chunk_more=128,
    chunk_more_bytes=512,
    together_more=16,
    mark_blocks=512,
    clear_rows=8,
    clear_columns=1024,
    few_indices=512,
    few_columns=256,
    few_words=4096,
    few_warps=4,
    few_zeros=16384,
    few_programs=2048,
    marks_from=1 << 14,
    join=1024,
    join_lanes=32,
    paired=(ElementKind.F16, ElementKind.BF16),
    at_once=(
        ("longest_rows", "prod", 32, 0),
        ("cluster_rows", "prod", 0, 16),
        ("cluster_rows", "softmax", 32, 32),
        ("cluster_rows", "log_softmax", 16, 16),
        ("cluster_rows", "var", 16, 32),
        ("cluster_rows", "std", 16, 32),
        ("ragged_rows", "softmax", 8, 0),
        ("ragged_rows", "log_softmax", 16, 8),
        ("ragged_rows", "var", 16, 32),
        ("ragged_rows", "std", 16, 32),
    ),
    registers=(
        ("lines", "cumsum", 64, 0),
        ("lines", "cummax", 80, 0),
        ("lines", "cummin", 80, 0),
        ("lines", "log_cumsum_exp", 136, 128),
        ("forward_lines", "cumprod", 128, 0),
        ("forward_lines", "log_cumsum_exp", 168, 136),
        ("side", "cumsum", 128, 0),
        ("side", "cumprod", 168, 0),
        ("side", "cummax", 255, 168),
        ("side", "cummin", 255, 168),
        ("short_side", "cumsum", 128, 0),
        ("narrow_side", "cumsum", 128, 128),
        ("narrow_side", "cummax", 255, 168),
        ("narrow_side", "cummin", 255, 168),
        ("chained", "cumprod", 128, 128),
        ("chained", "log_cumsum_exp", 128, 96),
        ("chained_far", "log_cumsum_exp", 168, 0),
        ("chained", "cummax", 96, 96),
        ("chained", "cummin", 96, 96),
        ("lagged_rows", "softmax", 80, 0),
        ("lagged_rows", "log_softmax", 80, 168),
        ("lagged_rows", "max", 96, 0),
        ("lagged_rows", "min", 96, 0),
        ("lagged_rows", "prod", 0, 96),
        ("lagged_columns", "softmax", 168, 0),
        ("lagged_columns", "log_softmax", 0, 96),
        ("lagged_columns", "max", 128, 0),
        ("lagged_columns", "min", 128, 0),
        ("lagged_columns", "var", 168, 96),
        ("lagged_columns", "std", 168, 96),
        ("longest_rows", "softmax", 32, 0),
        ("longest_rows", "var", 64, 0),
        ("longest_rows", "std", 64, 0),
        ("longest_rows", "prod", 56, 0),
        ("cluster_rows", "var", 80, 96),
        ("cluster_rows", "std", 80, 96),
        ("cluster_rows", "prod", 168, 120),
        ("ragged_rows", "softmax", 80, 80),
        ("ragged_rows", "log_softmax", 0, 168),
        ("ragged_rows", "max", 0, 168),
        ("ragged_rows", "min", 0, 168),
        ("ragged_rows", "var", 96, 96),
        ("ragged_rows", "std", 96, 96),
        ("ragged_rows", "prod", 80, 128),
        ("ragged_eighths", "log_softmax", 0, 80),
        ("ragged_whole", "prod", 80, 80),
        ("ragged_warp", "prod", 0, 72),
        ("whole_columns", "prod", 96, 0),
        ("cluster_columns", "max", 0, 80),
        ("cluster_columns", "min", 0, 80),
        ("cluster_columns", "var", 0, 168),
    ),
)

_INTERPRETER = Table(
    fill=3,
    map_bytes=256,
    row_tile=64,
    resident_words=128,
    packed=1 << 30,
    column_factor=1,
    column_bytes=16,
    column_tile=256,
    lagged_rows=(("", 128, 4, 64, 4),),
    lagged_columns=(("", 128, 4, 64, 4),),
    lagged_width=16,
    cluster_rows=(("", 128, 4, 64, 4),),
    cluster_columns=(("", 128, 4, 64, 4),),
    ragged_rows=(("", 128, 1, 128, 1),),
    ragged_short=64,
    ragged_tile=(("softmax", 64, 256, 128), ("", 1, 256, 256)),
    ragged_even=(
        ("ragged_even", "max", 1, 1),
        ("ragged_even", "min", 1, 1),
        ("ragged_even", "", 2048, 2048),
    ),
    held_rows=(("", 0, 4, 0, 4),),
    held_columns=(("", 0, 4, 0, 4),),
    held_width=128,
    held_bytes=192 << 10,
    held_registers=(("", 136, 144, 136, 144),),
    held_masked=(("", 152, 136, 152, 136),),
    held_classes=(("", 152, 128, 152, 128),),
    held_nested=(("", 152, 128, 152, 128),),
    held_halved=(),
    walked_rows=(("", 0, 4, 0, 4),),
    walked_from=(),
    walked_parts=2,
    walked_warps=1,
    walked_ragged=(("", 0, 4, 0, 4),),
    walked_columns=(("", 0, 4, 0, 4),),
    walked_strips=(("", 0, 4, 0, 4),),
    walked_grains=(("", 0, 4, 0, 4),),
    walked_axis=1,
    walked_column_parts=3,
    held_scans=(("", 0, 4, 0, 4),),
    held_scan_registers=(("cumprod", 208, 96, 112, 80), ("", 208, 96, 120, 80)),
    tall_programs=(8, 8),
    tall_bytes=128,
    tall_room=128 << 10,
    tall_rows=(),
    tall_parts=(),
    held_first=(),
    cluster_first=(),
    edges_apart=(("ragged_warp", "max", 1, 1), ("ragged_warp", "log_softmax", 1, 1)),
    edges_always=(("even_warp", "max", 1, 0),),
    lag=5,
    lag_bytes=1 << 20,
    strided_tile=128,
    cluster=0,
    scan_tile=64,
    scan_resident=64,
    scan_step=32,
    scan_product=(64, 64),
    scan_words=32,
    scan_columns=16,
    alone=(("", 4, 1, 4, 1),),
    alone_axis=8,
    alone_rows=(("alone_rows", "", 256, 0),),
    scan_column_bytes=64,
    scan_column_step=4,
    scan_column_few=8,
    scan_fill=3,
    scan_lag=1024,
    lagged_scans=("cumsum", "cumprod", "cummax", "log_cumsum_exp"),
    chained=(("", 32, 1, 32, 1),),
    chained_far=(("", 32, 1, 32, 1),),
    chained_many=(("cumprod", 32, 1, 32, 1), ("", 0, 1, 0, 1)),
    chained_from=64,
    chain=2,
    evened=("cumprod", "cummax", "cummin", "log_cumsum_exp"),
    evened_from=1,
    scan_chunk=8,
    side=(("cumsum", (8, 2, 4, 1), (4, 2, 2, 1)), ("", (8, 2, 2, 1), (4, 4, 2, 1))),
    short_side=(("cumsum", (8, 2, 4, 1), (4, 2, 2, 1)), ("", (8, 2, 2, 1), (4, 4, 2, 1))),
    narrow_side=(("", (4, 2, 4, 1), (2, 4, 2, 1)),),
    ahead=(("side", "", 1, 0), ("narrow_side", "", 0, 2), ("lines", "cumsum", 1, 0)),
    strips=3,
    side_chunk=12,
    side_window=2,
    lines=(("", 32, 1, 32, 1),),
    short_lines=(("log_cumsum_exp", 16, 1, 16, 1),),
    forward_lines=(("", 32, 1, 32, 1),),
    forward_side=(("", (8, 2, 2, 1), (4, 4, 2, 1)),),
    thread_words=32,
    learned_bytes=256,
    learned_thread=16,
    sort_block=32,
    sort_bits=2,
    sum_block=4,
    chunk=8,
    chunk_bytes=128,
    together=4,
    chunk_registers=80,
    chunk_more=8,
    chunk_more_bytes=64,
    together_more=2,
    mark_blocks=4,
    clear_rows=4,
    clear_columns=64,
    few_indices=6,
    few_columns=32,
    few_words=128,
    few_warps=1,
    few_zeros=64,
    few_programs=128,
    marks_from=32,
    join=8,
    join_lanes=2,
    at_once=(("whole_rows", "", 1, 1), ("ragged_rows", "softmax", 0, 0), ("ragged_rows", "", 1, 1)),
)


_OTHERS = replace(
    _SM_90,
    cluster_rows=tuple(
        (kind, a, max(8, w), b, max(8, v)) for kind, a, w, b, v in _SM_90.cluster_rows
    ),
    ragged_rows=tuple(
        (kind, a, max(8, w), b, max(8, v)) for kind, a, w, b, v in _SM_90.ragged_rows
    ),
    edges_always=(),  # found by measuring on sm_90
    # For the stack; what is enough for others was found by compiling for sm_90.
    registers=(("ragged_whole", "prod", 128, 128),),
    held_scans=(("cumprod", 8192, 4, 4096, 4), *_SM_90.held_scans),
    held_masked=(
        ("softmax", 136, 144, 152, 136),
        ("std", 152, 136, 144, 128),
        *_SM_90.held_masked,
    ),
    held_classes=(
        ("var", 136, 136, 160, 144),
        ("std", 136, 136, 160, 144),
        *_SM_90.held_classes,
    ),
    held_nested=(
        ("prod", 200, 112, 168, 120),
        ("var", 200, 112, 152, 144),
        ("std", 200, 112, 152, 144),
        ("softmax", 176, 128, 176, 128),
        ("log_softmax", 176, 128, 176, 128),
        *_SM_90.held_nested,
    ),
    held_halved=("var", "std"),
)
_NONE: Lines = (("", 0, 1, 0, 1),)
_SM_80 = replace(
    _OTHERS,
    early=False,
    tall_room=64 << 10,
    registers=(),
    roomy=True,
    cluster=0,
    held_rows=_NONE,  # a processor's shared memory is less than half as large again as a part
    held_columns=_NONE,
    walked_rows=_NONE,
    walked_ragged=_NONE,
    walked_columns=_NONE,
    walked_grains=_NONE,
    walked_strips=_NONE,
    held_scans=_NONE,
    paired=(ElementKind.F16,),
)
# A program has less shared memory than it keeps rows in.
_SM_120 = replace(
    _OTHERS,
    tall_room=64 << 10,
    held_rows=_NONE,
    held_columns=_NONE,
    walked_rows=_NONE,
    walked_ragged=_NONE,
    walked_columns=_NONE,
    walked_grains=_NONE,
    walked_strips=_NONE,
    held_scans=_NONE,
)
_PROCESSORS = 132  # of the H200


_TABLES = {"interpreter": _INTERPRETER, "sm_80": _SM_80, "sm_90": _SM_90}


def table_of(arch: str, processors: int | None = None) -> Table:
    """The thresholds of an architecture, on a device with so many multiprocessors."""
    others = _SM_120 if arch.startswith("sm_12") else _OTHERS
    table = _TABLES.get(arch, _TABLES["sm_80"] if arch.startswith("sm_8") else others)
    if processors is None or processors == _PROCESSORS:
        return table
    return replace(table, fill=2 * processors)


@contextmanager
def using(arch: str, table: Table) -> Iterator[None]:
    """Other thresholds for an architecture meanwhile: to measure them, or to test small tiles.

    What is selected and bound within keeps them. Plans are shared, so they are forgotten before
    and after; no other thread may select any meanwhile.
    """
    from ...plans import forget_plans

    before = dict(_TABLES)
    _TABLES[arch] = table
    forget_plans()
    try:
        yield
    finally:
        _TABLES.clear()
        _TABLES.update(before)
        forget_plans()
