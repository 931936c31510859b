"""The results of a run: a JSON file that is whole after every row.

{"gradplan", "date", "device", "versions", "copy_bandwidth", "rows": [...], "host_us": {...}}; a
row names its kind as the registry does. Times are in ms, `copy_bandwidth` in bytes per second
read and written, `share` is floor / time. On a GPU `copies_ms` tells how long plain copies take
that move so many MiB. `ms` is null where there is no time to tell: "error", or a peer's "note",
says why. `commit` is the one whose kernels a row, or a host cost, is of. `chain_ms`, `chain_share`
and `copies_chain_ms` are the same for launches that follow one another, each on arrays that are in
no cache any more; there are none on a CPU, nor where a row is too small.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from .. import __version__
from ..errors import InvalidProblem
from ..kinds import OpCategory
from ..terminal import write_text
from .forwards import VIEW_KINDS
from .measure import OURS, Request

__all__ = [
    "STDOUT",
    "Results",
    "busy",
    "commit_here",
    "finite",
    "lowest_shares",
    "read",
    "speedups",
    "write",
]

STDOUT = Path("-")
"""What stands for stdout where a file is named."""

# On a busy CPU torch's threads wait for each other by whole time slices: every speed-up is a lie.
_BUSY_CORES = 0.25
_TIMES = ("ms", "ms_min", "ms_p20", "ms_p80", "repeats")
_SHARES = ("share", "chain_ms", "chain_share")


@dataclass
class Results:
    """All rows so far, and the file they are kept in, if any."""

    about: dict[str, Any]
    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    host_us: dict[str, dict[str, Any]] = field(default_factory=dict)
    commit: str | None = None

    @classmethod
    def resumed(cls, about: dict[str, Any], path: Path, commit: str | None = None) -> Results:
        """Go on with a file, if it is there and from the same device."""
        if not path.exists():
            return cls(about, path, commit=commit)
        before = read(path)
        names = before["device"].get("name"), about["device"].get("name")
        if names[0] != names[1]:
            raise InvalidProblem(f"{path} is from {names[0]}, this device is {names[1]}")
        return cls(about, path, before["rows"], before["host_us"], commit)

    def row(self, request: Request) -> dict[str, Any]:
        """The row of a request; a new one where there is none yet."""
        case, embedding = request.workload, request.category is OpCategory.EMBEDDING
        no_axis = embedding or request.category is OpCategory.BINARY_ELEMENTWISE
        key = {
            "kind": request.kind.value,
            "family": request.category.value,
            "element": request.element.value,
            "case": case.name,
            "shape": list(case.shape),
            "axis": None if no_axis else case.axis,
            "layout": case.layout,
        }
        for row in self.rows:
            if key.items() <= row.items():
                return row
        nothing = {"variant": None, "floor_bytes": None, "floor_ms": None}
        times = dict.fromkeys((*_TIMES, *_SHARES))
        row = {**key, **nothing, **times, "error": None, "commit": None, "peers": {}}
        self.rows.append(row)
        return row

    def todo(self, request: Request) -> list[str]:
        """Whom of the request its row does not know yet; an error of ours is tried again."""
        row = self.row(request)
        return [
            name
            for name in request.names
            if (row["ms"] is None if name == OURS else name not in row["peers"])
        ]

    def note(self, request: Request, made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Put what was measured into the row, and the row into the file."""
        row = self.row(request)
        for name, found in made.items():
            if name == OURS:
                row |= dict.fromkeys((*_TIMES, *_SHARES)) | found
                row["error"] = found.get("error")
                row["commit"] = self.commit
                if row["error"]:
                    row |= dict.fromkeys(_TIMES)
                elif row["ms"]:
                    row["floor_ms"] = 1e3 * row["floor_bytes"] / self.about["copy_bandwidth"]
                    row["share"] = row["floor_ms"] / row["ms"]
                    if row["chain_ms"]:
                        row["chain_share"] = row["floor_ms"] / row["chain_ms"]
            else:
                error = found.get("error")
                timing = {key: None if error else found.get(key) for key in _TIMES}
                said = error or found.get("note")
                known = {"relative_error": found.get("relative_error")}
                row["peers"][name] = {**timing, "speedup": None, "note": said, **known}
        for peer in row["peers"].values():
            peer["speedup"] = peer["ms"] / row["ms"] if peer["ms"] and row["ms"] else None
        self.save()
        return row

    def note_host(self, kind: str, cost: dict[str, float]) -> None:
        """What calls of a kind cost the host, in µs."""
        self.host_us[kind] = {**cost, "commit": self.commit}

    def plain(self) -> dict[str, Any]:
        """What the file holds."""
        return {
            "gradplan": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.about,
            "rows": [row for row in self.rows if row["ms"] or row["error"] or row["peers"]],
            "host_us": self.host_us,
        }

    def save(self) -> None:
        """Write the file in one step: a run may be stopped at any time."""
        if self.path is not None:
            write(self.path, self.plain())


def commit_here() -> str | None:
    """The commit of the checkout that holds this package, if one does: `-dirty` where its files
    are others."""
    here = Path(__file__)
    try:
        # An environment inside somebody's checkout is no part of it.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(path: Path, found: dict[str, Any]) -> None:
    """Put a file there in one step: it is whole at any time."""
    text = json.dumps(finite(found), indent=1, ensure_ascii=False)
    write_text(path, text + "\n")


def finite(value: Any) -> Any:
    """The same in what JSON knows: it has no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def read(path: Path) -> dict[str, Any]:
    """A file of results, or `InvalidProblem` with what is wrong."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidProblem(f"{path}: cannot be read as results: {reason}") from None
    if not isinstance(found, dict):
        raise InvalidProblem(f"{path}: not a file of results")
    absent = {"device", "versions", "copy_bandwidth", "rows", "host_us"} - found.keys()
    if absent:
        raise InvalidProblem(f"{path}: not a file of results: no {', '.join(sorted(absent))}")
    return found


def speedups(rows: list[dict[str, Any]]) -> dict[str, tuple[float, int, dict[str, Any]]]:
    """By peer: the geometric mean of our speed-ups, over how many rows, and the worst row.

    Kinds that torch answers with a view are no race, and stay out.
    """
    made = {}
    rows = [row for row in rows if row["kind"] not in VIEW_KINDS]
    names = dict.fromkeys(name for row in rows for name in row["peers"])
    for name in names:
        races = [row for row in rows if row["peers"].get(name, {}).get("speedup")]
        if races:
            worst = min(races, key=lambda row: float(row["peers"][name]["speedup"]))
            mean = geometric_mean(row["peers"][name]["speedup"] for row in races)
            made[name] = mean, len(races), worst
    return made


def busy(rows: list[dict[str, Any]]) -> bool:
    """Whether other processes had the machine, so that no time is to be believed."""
    cores = [row["other_cores"] for row in rows if row.get("other_cores") is not None]
    return bool(cores) and median(cores) > _BUSY_CORES


def lowest_shares(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By case and element: the row with the lowest share of its floor."""
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["share"] is None:
            continue
        key = row["case"], row["element"]
        if key not in made or row["share"] < made[key]["share"]:
            made[key] = row
    return made
