"""Why a CPU variant was chosen and no other, in words, from what `programs` found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...explanation import Other

__all__ = ["rows", "scans", "tables"]


def rows(
    *,
    unit: bool,
    turned: bool,
    lines: bool,
    strided: Sequence[str],
    split: bool | None,
    units: int,
    enough: int,
    streamed: bool,
    takes: int,
    room: float,
) -> tuple[Other, ...]:
    """For maps and row states; `split` is None where nothing is summed along the axis."""
    if turned:
        made = [Other("any", "rows are short: what is apart costs more than to turn it round")]
    elif unit:
        made = [Other("any", "every stride of the inner loop is 1, so none is read at run time")]
    else:
        made = [Other("unit", f"{', '.join(strided)}: not 1 apart along the inner loop")]
    if split is None:
        made.append(Other("split", "nothing is summed along the axis: any part runs by itself"))
    elif split:
        made.append(Other("unsplit", _too_few(units, enough)))
    elif units >= enough:
        made.append(Other("split", _enough(units, enough)))
    else:
        made.append(Other("split", "rows are too short to be worth cutting"))
    barred = _barred(unit, lines and not turned)
    return (*made, *_streaming(streamed, takes, room, barred))


def scans(
    *,
    source: str,
    split: bool,
    units: int,
    enough: int,
    extent: int,
    shortest: int,
    lines: bool,
    streamed: bool,
    takes: int,
    room: float,
) -> tuple[Other, ...]:
    """For recurrences; rows longer than `shortest` may be cut."""
    made = []
    if source == "from_y":
        made.append(Other("recomputed", "y is given: reading it is cheaper than to scan x again"))
    elif source == "recomputed":
        made.append(Other("from_y", "y is not given, so the scan is run again from x"))
    if split:
        long = "rows are too long to be recomputed whole"
        made.append(Other("unsplit", _too_few(units, enough) if units < enough else long))
    elif extent <= shortest:
        made.append(Other("split", f"rows of {extent:,} are too short to cut ({shortest:,})"))
    else:
        made.append(Other("split", _enough(units, enough)))
    barred = "" if lines else "the output does not leave in whole lines"
    if source == "recomputed":
        barred = "what is recomputed stays in the cache"
    return (*made, *_streaming(streamed, takes, room, barred))


def tables(
    *, unit: bool, lines: bool, accumulates: bool, streamed: bool, takes: int, room: float
) -> tuple[Other, ...]:
    """For embeddings."""
    barred = _barred(unit, lines)
    if accumulates:
        barred = "the table is added to, so it is read as well"
    return tuple(_streaming(streamed, takes, room, barred))


def _too_few(units: int, enough: int) -> str:
    return f"rows alone are {units:,} pieces of work; it takes {enough} to feed the cores"


def _enough(units: int, enough: int) -> str:
    return f"rows alone are {units:,} pieces of work; {enough} feed the cores"


def _barred(unit: bool, lines: bool) -> str:
    """Why the output cannot go past the caches, or had better not."""
    if not unit:
        return "strides differ from 1"
    return "" if lines else "the output leaves in short pieces"


def _streaming(streamed: bool, takes: int, room: float, barred: str) -> Iterator[Other]:
    """Whether the output goes past the caches."""
    if streamed:
        why = f"all arrays take {takes:,} bytes, more than {room:,.0f}: the caches would not help"
        yield Other("cached", why)
    elif takes <= room:
        why = f"all arrays take {takes:,} bytes, no more than {room:,.0f}: the caches may keep them"
        yield Other("streamed", why)
    else:
        yield Other("streamed", barred)
