"""The README's table, generated from the committed results.

`gradplan bench --table FILE …` writes it between two markers; a test holds the README to what the
files under `benchmarks/results/` generate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import InvalidProblem
from ..registry import KINDS
from .forwards import VIEW_KINDS
from .peers import PEERS
from .results import read, speedups

__all__ = ["BEGIN", "END", "commits", "markdown", "replaced", "section"]

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_MAIN = "rows"
# The elements whose tables stand first.
_SHOWN = ("bf16", "f32")
_NO_RESULTS = "No results are committed yet."
_NOTHING = "–"
_SHORT_MS = 0.1

Row = dict[str, Any]
Titled = tuple[str, str]
"""A title and its table."""


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidProblem(f"expected {BEGIN} and {END} once each, in this order")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def markdown(paths: Sequence[Path]) -> str:
    """The section for these files, in the order of their names."""
    if not paths:
        return _NO_RESULTS
    return "\n\n".join(section(read(path), fold=True) for path in sorted(paths))


def section(found: dict[str, Any], fold: bool = False) -> str:
    """The tables of one file of results, or of some of its rows; `fold` shows the first of them and
    the summary, and the others where a reader opens them."""
    rows: list[Row] = found["rows"]
    order = [spec.kind.value for spec in KINDS.values()]
    rows = sorted(rows, key=lambda row: order.index(row["kind"]))
    elements = list(dict.fromkeys(row["element"] for row in rows))
    with_axis = [row for row in rows if row["family"] != "embedding"]
    first: list[Titled] = []
    more: list[Titled] = []
    for element in elements:
        main = [row for row in with_axis if (row["case"], row["element"]) == (_MAIN, element)]
        # lerp has no rows; its flat case stands beside those of the others.
        main += [
            row
            for row in with_axis
            if (row["kind"], row["case"], row["element"]) == ("lerp", "flat", element)
        ]
        if main:
            title = f"{element}, last axis of {_shape(main[0]['shape'])}"
            place = more if fold and element not in _SHOWN else first
            place.append(_peers(title, main, _main_name))
    for element in elements:
        more += _matrix(element, [row for row in with_axis if row["element"] == element])
    for element in elements:
        more += _chain(element, [row for row in rows if row["element"] == element])
    table = [row for row in rows if row["family"] == "embedding"]
    if table:
        title = "Embedding: rows × columns of the table, number of indices"
        first.append(_peers(title, table, _embedding_name))
    summary = _summary(found, rows)
    ends = [summary] if summary else []
    shown = [_heading(found), *map("\n\n".join, first)]
    if fold:
        return "\n\n".join([*shown, *ends, *(_folded(*one) for one in more)])
    return "\n\n".join([*shown, *map("\n\n".join, more), *ends])


def _folded(title: str, table: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{table}\n\n</details>"


def _heading(found: dict[str, Any]) -> str:
    names = {"torch": "torch", "triton": "Triton", "jax": "JAX", "flag_gems": "FlagGems"}
    versions = found["versions"]
    used = [f"{title} {versions[key]}" for key, title in names.items() if versions.get(key)]
    speed = found["copy_bandwidth"]
    unit = f"{speed / 1e12:.2f} TB/s" if speed >= 1e12 else f"{speed / 1e9:.1f} GB/s"
    return (
        f"**{found['device']['name']}**, {found['date'][:10]}, gradplan {found['gradplan']}, "
        f"{', '.join(used)}. Copy bandwidth {unit}, read and written; the share is that of the "
        "time in which the fewest possible bytes could be copied."
    )


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], aligned: Sequence[str] = ()
) -> str:
    aligned = aligned or ["---"] + ["---:"] * (len(headings) - 1)
    lines = [headings, aligned, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _peers(title: str, rows: Sequence[Row], name: Callable[[Row], str]) -> Titled:
    """One line a row, with every peer's time and our speed-up over it."""
    peers = _peer_names(rows)
    headings = ["gradient", "ms", "share", *(PEERS[peer].title for peer in peers)]
    mixed = len({row["element"] for row in rows}) > 1
    lines = [
        [
            name(row) + (f", {row['element']}" if mixed else ""),
            _ms(row["ms"]) if row["ms"] else row["error"] or _NOTHING,
            _share(row),
            *(_peer_cell(row["peers"].get(peer)) for peer in peers),
        ]
        for row in rows
    ]
    return f"{title}; peers: ms (our speed-up)", _table(headings, lines)


def _matrix(element: str, rows: Sequence[Row]) -> list[Titled]:
    """Kinds by cases: the share, and the speed-up over the fastest peer."""
    cases = list(dict.fromkeys(row["case"] for row in rows if row["case"] != _MAIN))
    if not cases:
        return []
    shapes = {row["case"]: row for row in rows}
    headings = ["gradient", *(f"{case}<br>{_where(shapes[case])}" for case in cases)]
    cells = {(row["kind"], row["case"]): _cell(row) for row in rows}
    kinds = dict.fromkeys(row["kind"] for row in rows if row["case"] != _MAIN)
    lines = [[kind, *(cells.get((kind, case), "") for case in cases)] for kind in kinds]
    title = f"{element}, other shapes and layouts: share, and speed-up over the fastest peer"
    return [(title, _table(headings, lines))]


def _chain(element: str, rows: Sequence[Row]) -> list[Titled]:
    """Kinds by cases: the share of short rows where launches follow one another."""
    rows = [row for row in rows if row.get("chain_share") and row["floor_ms"] < _SHORT_MS]
    if not rows:
        return []
    cases = list(dict.fromkeys(row["case"] for row in rows))
    cells = {(row["kind"], row["case"]): f"{100 * row['chain_share']:.0f} %" for row in rows}
    kinds = dict.fromkeys(row["kind"] for row in rows)
    lines = [[kind, *(cells.get((kind, case), "") for case in cases)] for kind in kinds]
    title = (
        f"{element}, one launch after the other, where the floor is below {1e3 * _SHORT_MS:.0f} µs:"
        " share"
    )
    return [(title, _table(["gradient", *cases], lines))]


def _copies(found: dict[str, Any], key: str) -> str:
    """What share of the floor plain copies reach, by what they move."""
    shares = (
        f"{100 * (int(mib) << 20) / found['copy_bandwidth'] * 1e3 / ms:.0f} % at {mib} MiB"
        for mib, ms in found[key].items()
    )
    return ", ".join(shares)


def _summary(found: dict[str, Any], rows: list[Row]) -> str:
    lines = [
        f"- Over {PEERS[name].title}: {mean:.1f} × in the geometric mean of {count} rows; least "
        f"{worst['peers'][name]['speedup']:.2f} × ({worst['kind']} {worst['element']} "
        f"{worst['case']})."
        for name, (mean, count, worst) in speedups(rows).items()
    ]
    if found.get("copies_ms"):
        shares = _copies(found, "copies_ms")
        lines.append(f"- A plain copy, by the same clock: {shares} read and written.")
    if found.get("copies_chain_ms"):
        shares = _copies(found, "copies_chain_ms")
        lines.append(f"- Plain copies one after the other: {shares}.")
    count = Counter(row["commit"] for row in rows if row.get("commit"))
    if count:
        rest = ", ".join(f"`{commit}` ({number})" for commit, number in count.most_common())
        lines.append(f"- Rows by the commit whose kernels they are of: {rest}.")
    costs = found["host_us"].values()
    if costs:
        lines.append(
            "- Host cost on 8 × 8, median and worst kind: "
            + ", ".join(
                f"{title} {median(cost[key] for cost in costs):.1f} and "
                f"{max(cost[key] for cost in costs):.1f} µs"
                for key, title in (
                    ("bound", "bound launch"),
                    ("run", "`plan.run`"),
                    ("function", "function"),
                )
            )
            + _of({cost["commit"] for cost in costs if cost.get("commit")})
            + "."
        )
    return "\n".join(lines)


def _of(commits: set[str]) -> str:
    return f" ({', '.join(f'`{commit}`' for commit in sorted(commits))})" if commits else ""


def commits(found: dict[str, Any]) -> str:
    """Whose kernels the rows are of: commits with kinds and cases, that of most rows last."""
    rows = [row for row in found["rows"] if row.get("commit")]
    if not rows:
        return ""
    beside: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        beside.setdefault((row["kind"], row["case"]), set()).add(row["commit"])
    lines: list[list[str]] = []
    most, *fewer = Counter(row["commit"] for row in rows).most_common()
    for commit, number in fewer:
        held: dict[str, dict[str, None]] = {}
        for row in rows:
            if row["commit"] == commit:
                alone = len(beside[row["kind"], row["case"]]) == 1
                name = row["kind"] if alone else f"{row['kind']} {row['element']}"
                held.setdefault(name, {})[row["case"]] = None
        together: dict[tuple[str, ...], list[str]] = {}
        for name, cases in held.items():
            together.setdefault(tuple(cases), []).append(name)
        which = (f"{', '.join(names)}: {', '.join(cases)}" for cases, names in together.items())
        lines.append([f"`{commit}`", str(number), "; ".join(which)])
    lines.append([f"`{most[0]}`", str(most[1]), "all others" if fewer else "all"])
    return _table(["commit", "rows", "which"], lines, [":---", "---:", ":---"])


def _peer_names(rows: Iterable[Row]) -> list[str]:
    seen = {name for row in rows for name in row["peers"]}
    return [name for name in PEERS if name in seen]


def _peer_cell(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return ""
    if not peer["ms"]:
        return str(peer["note"] or _NOTHING).replace("|", "\\|")
    speedup = f" ({_times(peer['speedup'])})" if peer["speedup"] else ""
    return _ms(peer["ms"]) + speedup


def _cell(row: Row) -> str:
    if row["share"] is None:
        return _NOTHING
    best = [peer["speedup"] for peer in row["peers"].values() if peer["speedup"]]
    race = best and row["kind"] not in VIEW_KINDS
    return _share(row) + (f" · {_times(min(best))}" if race else "")


def _times(ratio: float) -> str:
    """A speed-up; near 1 so that it shows on which side."""
    return f"{ratio:.1f} ×" if ratio >= 1.05 else f"{ratio:.2f} ×"


def _share(row: Row) -> str:
    return _NOTHING if row["share"] is None else f"{100 * row['share']:.0f} %"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _main_name(row: Row) -> str:
    return str(row["kind"]) + ("" if row["case"] == _MAIN else f" ({_shape(row['shape'])})")


def _embedding_name(row: Row) -> str:
    rows, columns, count = row["shape"]
    return f"{row['case']}: {rows} × {columns}, {count}"


def _where(row: Row) -> str:
    axis = "" if row["axis"] is None or len(row["shape"]) == 1 else f", axis {row['axis']}"
    return _shape(row["shape"]) + axis


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(_extent(n) for n in shape)


def _extent(n: int) -> str:
    power = n.bit_length() - 1
    digits = str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"2{digits}" if n == 1 << power and power >= 20 else str(n)
