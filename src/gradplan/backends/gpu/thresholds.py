"""What each threshold means: how large tiles are, when a row is split, and who takes it then."""

from __future__ import annotations

from dataclasses import dataclass

from ...kinds import ElementKind

__all__ = ["ByLength", "ByPlace", "Lines", "Side", "Table"]


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
    """Whether scans are given registers, and rows whose tiles are not full where they are read for
    the second time or are products, lest the assembler spill a few."""
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
