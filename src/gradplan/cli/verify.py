"""`gradplan verify`: every kind, element and layout held to its guarantee on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

from rich.text import Text

from .. import __version__
from ..bench.workloads import Workload, custom, read_cases
from ..cases import Layout
from ..errors import InvalidProblem
from ..kinds import ElementKind, OpCategory
from ..registry import KINDS, KindSpec
from ..terminal import (
    STOPPED,
    add_choices,
    add_command,
    console,
    file_of,
    new_table,
    positive,
    print_json,
    progress,
    remarks,
    shape_of,
    write_text,
)
from ..verify import Row, Task, merged, tasks, verify

__all__ = ["add_parser"]

_MISSES_SHOWN = 5
_TELL_EVERY_S = 10.0


def add_parser(commands: Any) -> None:
    """Add `verify` to the commands."""
    parser = add_command(
        commands,
        "verify",
        _verify,
        help="hold every kind, element and layout to its guarantee on this machine",
        description="Run problems in poisoned memory and hold each result to its plan's own "
        "guarantee, against a NumPy reference in float64.",
        examples=[
            "gradplan verify --quick",
            "gradplan verify --device cuda --family scan --keep verified.json --resume",
            "gradplan verify --kind softmax var --shape 1000x333 --axis 0 --layout negative",
        ],
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add_choices(parser)
    parser.add_argument(
        "--layout",
        nargs="+",
        action="extend",
        choices=[layout.value for layout in Layout],
        metavar="LAYOUT",
        help=f"only these: {', '.join(layout.value for layout in Layout)}",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        action="extend",
        type=shape_of,
        default=[],
        help="shapes of your own, in place of the grid's: 1000x333",
    )
    parser.add_argument("--axis", type=int, default=-1, help="their axis (default: the last)")
    parser.add_argument(
        "--shapes", type=Path, metavar="FILE", help="a file of shapes, one a line: 64x4096 axis=0"
    )
    parser.add_argument("--quick", action="store_true", help="one kernel for each kind")
    parser.add_argument(
        "--complete",
        action="store_true",
        help="on a GPU: every shape and option in every layout, which compiles thousands of "
        "kernels; they take turns otherwise",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes to use (default: one a core)",
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="begin no case after that, and say how far it came",
    )
    parser.add_argument("--keep", type=file_of, metavar="FILE", help="keep what is done in a file")
    parser.add_argument("--resume", action="store_true", help="skip what that file has already")
    parser.add_argument("--json", action="store_true", help="write JSON in place of a table")


def _verify(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    if options.resume and options.keep is None:
        raise InvalidProblem("--resume goes on with a file: name it with --keep")
    todo = _tasks(options)
    if not todo:
        raise InvalidProblem("no kind that was asked for has the shapes and layouts asked for")
    kept = _Kept(options.keep, options.resume)
    rows = _collect(todo, options.jobs, kept)
    done, planned = sum(row.cases for row in rows), sum(row.planned for row in rows)
    stopped = done < planned
    ok = all(row.ok for row in rows) and not stopped
    if options.json:
        report = {
            "version": __version__,
            "device": options.device,
            "quick": options.quick,
            "ok": ok,
            "cases": done,
            "planned": planned,
            "rows": [_plain(row) for row in rows],
        }
        print_json(report)
    else:
        _show(rows)
    if stopped:
        took = time.monotonic() - begin
        text = f"Stopped after {took:.0f} s: {done} of {planned} cases were run."
        print(text, file=sys.stderr)
    if all(row.ok for row in rows):
        return STOPPED if stopped else 0
    return 1


def _tasks(options: argparse.Namespace) -> list[Task]:
    own = [custom(shape, options.axis, "contiguous") for shape in options.shape]
    if options.shapes is not None:
        own += read_cases(options.shapes)
    return tasks(
        options.quick,
        options.device,
        complete=options.complete,
        stop_after=options.stop_after,
        specs=[
            spec
            for spec in KINDS.values()
            if (not options.kind or spec.kind.value in options.kind)
            and (not options.family or spec.category.value in options.family)
        ],
        elements=[ElementKind.coerce(name) for name in options.element or ()] or None,
        layouts=[Layout(name) for name in options.layout or ()] or None,
        shapes=(lambda spec: _own_shapes(spec, own)) if own else None,
    )


def _own_shapes(
    spec: KindSpec, own: Sequence[Workload]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The shapes and axes of the user's own cases that fit a kind, as the grid has them."""
    made: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for case in own:
        if case.reach.holds(spec):
            if spec.category is OpCategory.EMBEDDING:
                rows, dim, count = case.shape
                made.append(((count, dim, rows), ()))
            else:
                made.append((case.shape, (case.axis,)))
    return tuple(made)


class _Kept:
    """Rows of earlier runs and of this one, in a file that is whole after every task."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is not None and resume and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                self._rows = {
                    key: Row(**{**row, "misses": tuple(row["misses"])})
                    for key, row in found["done"].items()
                }
                version = found["version"]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InvalidProblem(f"{path}: not a file that --keep wrote") from None
            if version != __version__:
                raise InvalidProblem(f"{path} is of gradplan {version}, this is {__version__}")

    def row(self, task: Task) -> Row | None:
        """The row of a task that is done and missed nothing."""
        row = self._rows.get(task.key)
        return row if row is not None and row.ok and row.cases == row.planned else None

    def note(self, task: Task, row: Row) -> None:
        if self._path is not None:
            self._rows[task.key] = row
            done = {key: asdict(one) for key, one in self._rows.items()}
            text = json.dumps({"version": __version__, "done": done}, indent=1)
            write_text(self._path, text + "\n")


def _collect(todo: Sequence[Task], jobs: int, kept: _Kept) -> list[Row]:
    """All rows, in the order of the registry; stderr tells how far they are meanwhile.

    That is a bar on a terminal, elsewhere a line now and then; a task that missed is told at once.
    """
    shown = remarks()
    rows = [row for task in todo if (row := kept.row(task)) is not None]
    left = [task for task in todo if kept.row(task) is None]
    if rows:
        shown.print(f"{len(rows)} of {len(todo)} tasks are done already.")
    begin = told = time.monotonic()
    with progress(shown) as bars:
        bar = bars.add_task("compiling and checking", total=len(todo), completed=len(rows))
        for task, row in verify(left, jobs):
            rows.append(row)
            kept.note(task, row)
            bars.update(bar, advance=1, description=f"checked {row.kind} {row.element}")
            if row.misses:
                text = f"{len(row.misses)} of {row.cases} missed: {row.misses[0]}"
                shown.print(Text(text, "red"), soft_wrap=True)
            now = time.monotonic()
            if not shown.is_terminal and now - told > _TELL_EVERY_S:
                told = now
                count = sum(one.cases for one in rows)
                shown.print(f"{now - begin:.0f} s: {len(rows)} of {len(todo)} tasks, {count} cases")
    return merged(rows)


def _plain(row: Row) -> dict[str, Any]:
    """A row in what JSON knows: it has no infinity."""
    found = {field.name: getattr(row, field.name) for field in fields(row)}
    found |= {"share": row.share, "ok": row.ok}
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in found.items()
    }


def _verdict(row: Row) -> Text:
    if row.misses:
        return Text("MISS", "bold red")
    if row.cases < row.planned:
        return Text(f"{row.cases} of {row.planned}", "yellow")
    return Text("ok", "green")


def _show(rows: Sequence[Row]) -> None:
    shown = console()
    right = ("cases", "worst error", "guarantee", "share")
    table = new_table("Measured against the reference", "kind", "element", *right, "", right=right)
    for row in rows:
        table.add_row(
            row.kind,
            row.element,
            str(row.cases),
            f"{row.worst_error:.2e}",
            f"{row.guarantee:.2e}",
            f"{row.share:.0%}" if isfinite(row.share) else "–",
            _verdict(row),
        )
    shown.print(table)
    missed = [row for row in rows if not row.ok]
    for row in missed:
        for miss in row.misses[:_MISSES_SHOWN]:
            shown.print(Text(miss, "red"))
        if len(row.misses) > _MISSES_SHOWN:
            shown.print(f"… and {len(row.misses) - _MISSES_SHOWN} more of {row.kind}")
    count, planned = sum(row.cases for row in rows), sum(row.planned for row in rows)
    if missed:
        shown.print(f"{sum(len(row.misses) for row in missed)} of {count} cases missed.")
    elif count < planned:
        shown.print(f"The {count} cases that were run are within their guarantees.")
    else:
        shown.print(f"All {count} cases are within their guarantees.")
