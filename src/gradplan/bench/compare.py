"""Two runs side by side: what became slower, what faster, and what cannot be told from noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.text import Text

from ..terminal import new_table, rate_text, seconds_text

__all__ = ["Change", "Comparison", "compare", "show"]

Row = dict[str, Any]
_KEY = ("kind", "element", "case", "shape", "axis", "layout")
_SHOWN = 40


@dataclass(frozen=True)
class Change:
    """A row that both runs have: times in ms, and the change of it that may be noise."""

    row: Row
    before: float
    after: float
    noise: float
    chain: tuple[float, float] | None = None
    """The times where launches follow one another, if both runs have them."""

    @property
    def change(self) -> float:
        """0.1 is a tenth slower."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        if abs(self.change) <= self.noise:
            return "same"
        return "slower" if self.change > 0 else "faster"

    @property
    def chain_change(self) -> float | None:
        return None if self.chain is None else self.chain[1] / self.chain[0] - 1

    def plain(self) -> dict[str, Any]:
        told = {"before_ms": self.before, "after_ms": self.after, "change": self.change}
        more = {"verdict": self.verdict, "chain_change": self.chain_change}
        return {**{key: self.row[key] for key in _KEY}, **told, **more}


@dataclass(frozen=True)
class Comparison:
    """What came of two runs; the largest changes for the worse come first."""

    changes: tuple[Change, ...]
    broken: tuple[Row, ...]
    """Rows that had a time and have an error now."""
    added: int
    gone: int
    notes: tuple[str, ...]

    def slower(self, limit: float) -> bool:
        """Whether a row is slower by more than a limit, or has no time any more."""
        worse = (one for one in self.changes if one.verdict == "slower")
        return bool(self.broken) or any(one.change > limit for one in worse)

    def plain(self) -> dict[str, Any]:
        return {
            "changes": [one.plain() for one in self.changes],
            "broken": [{key: row[key] for key in (*_KEY, "error")} for row in self.broken],
            "added": self.added,
            "gone": self.gone,
            "notes": list(self.notes),
        }


def compare(before: dict[str, Any], after: Sequence[dict[str, Any]], noise: float) -> Comparison:
    """What moved, where changes within `noise`, or within a row's own spread, are none."""
    old = {_key(row): row for row in before["rows"]}
    new = {_key(row): row for run in after for row in run["rows"]}
    common = [(old[key], row) for key, row in new.items() if key in old]
    changes = [
        Change(now, was["ms"], now["ms"], max(noise, _spread(was), _spread(now)), _chain(was, now))
        for was, now in common
        if was.get("ms") and now.get("ms")
    ]
    return Comparison(
        changes=tuple(sorted(changes, key=lambda one: -one.change)),
        broken=tuple(now for was, now in common if was.get("ms") and now.get("error")),
        added=len(new.keys() - old.keys()),
        gone=len(old.keys() - new.keys()),
        notes=tuple(_notes(before, after)),
    )


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(str(row.get(name)) for name in _KEY)


def _chain(was: Row, now: Row) -> tuple[float, float] | None:
    before, after = was.get("chain_ms"), now.get("chain_ms")
    return (before, after) if before and after else None


def _spread(row: Row) -> float:
    """Half the width of the middle three fifths of a row's samples, relative to the median."""
    if row.get("ms_p80") is None or row.get("ms_p20") is None:
        return 0.0
    return float((row["ms_p80"] - row["ms_p20"]) / (2 * row["ms"]))


def _notes(before: dict[str, Any], after: Sequence[dict[str, Any]]) -> list[str]:
    """What else differs and may be the reason."""
    notes = []
    for run in after:
        names = before["device"].get("name"), run["device"].get("name")
        if names[0] != names[1]:
            notes.append(f"then on {names[0]}, now on {names[1]}")
        speeds = before["copy_bandwidth"], run["copy_bandwidth"]
        if abs(speeds[1] / speeds[0] - 1) > 0.03:
            notes.append(f"copies: {rate_text(speeds[0])} then, {rate_text(speeds[1])} now")
        for name, version in run["versions"].items():
            was = before["versions"].get(name)
            if was and was != version:
                notes.append(f"{name} {was} then, {version} now")
    return list(dict.fromkeys(notes))


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"


def show(moved: Comparison, shown: Console) -> None:
    """A table of what moved, and a sentence for all the rest."""
    some = [one for one in moved.changes if one.verdict != "same"]
    if some:
        chained = any(one.chain for one in some)
        beside = ("one after the other",) if chained else ()
        right = ("before", "now", "change")
        headings = ("kind", "", "case", *right, "", *beside)
        table = new_table("What moved", *headings, right=(*right, *beside))
        # The worst and the best: of a long list the middle is left out.
        listed = some if len(some) <= _SHOWN else some[: _SHOWN // 2] + some[-_SHOWN // 2 :]
        for one in listed:
            table.add_row(
                one.row["kind"],
                one.row["element"],
                one.row["case"],
                seconds_text(1e-3 * one.before),
                seconds_text(1e-3 * one.after),
                _percent(one.change),
                Text(one.verdict, "red" if one.verdict == "slower" else "green"),
                *([_percent(one.chain_change)] if chained else []),
            )
        shown.print(table)
        if len(listed) < len(some):
            shown.print(f"{len(some) - len(listed)} more between these two halves.")
    for row in moved.broken:
        text = f"{row['kind']} {row['element']} {row['case']} fails now: {row['error']}"
        shown.print(Text(text, "red"), soft_wrap=True)
    counts = {
        name: sum(one.verdict == name for one in moved.changes)
        for name in ("slower", "faster", "same")
    }
    parts = [f"{count} {name}" for name, count in counts.items()]
    if moved.changes:
        mean = geometric_mean(one.after / one.before for one in moved.changes)
        parts[-1] += f"; time × {mean:.3f} in the geometric mean of {len(moved.changes)} rows"
    chains = [one.chain for one in moved.changes if one.chain]
    if chains:
        mean = geometric_mean(after / before for before, after in chains)
        parts[-1] += f"; one after the other × {mean:.3f} in that of {len(chains)}"
    if moved.added or moved.gone:
        parts.append(f"{moved.added} rows are new and {moved.gone} are gone")
    shown.print(", ".join(parts) + ".", soft_wrap=True)
    for note in moved.notes:
        shown.print(Text(f"Note: {note}.", "yellow"), soft_wrap=True)
