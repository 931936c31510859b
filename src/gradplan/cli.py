"""The command line: `gradplan verify`, `gradplan bench`, `gradplan tune` and `gradplan list`.

Tables and progress bars go to the terminal through rich; `--json` writes plain JSON to stdout for
programs (`bench` and `tune` take a file). Exit codes: 0 all is well, 1 a guarantee was missed or a
row of the benchmark failed, 2 the request cannot be met, 3 `verify` was stopped before its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import __version__
from .bench import command as bench
from .bench import tune
from .errors import GradPlanError
from .registry import ELEMENTS, KINDS, MAX_RANK, KindSpec
from .verify import Row, Task, merged, tasks, verify

__all__ = ["main"]

_MISSES_SHOWN = 5
_STOPPED = 3
_TELL_EVERY_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.command(options))
    except GradPlanError as error:
        print(f"gradplan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradplan", description="Gradient kernels as plans.")
    parser.add_argument("--version", action="version", version=f"gradplan {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    checker = commands.add_parser(
        "verify", help="hold every kind, element and layout to its guarantee on this machine"
    )
    checker.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    checker.add_argument("--quick", action="store_true", help="one kernel for each kind")
    checker.add_argument("--json", action="store_true", help="write JSON in place of a table")
    checker.add_argument(
        "--jobs", type=_positive, default=len(os.sched_getaffinity(0)), help="processes to use"
    )
    checker.add_argument("--kind", action="append", help="only this kind (may be repeated)")
    checker.add_argument(
        "--complete",
        action="store_true",
        help="on a GPU: every shape and option in every layout, which compiles thousands of "
        "kernels; they take turns otherwise",
    )
    checker.add_argument(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="begin no case after that, and say how far it came",
    )
    checker.set_defaults(command=_verify)

    bench.add_parser(commands)
    tune.add_parser(commands)

    lister = commands.add_parser("list", help="show what is supported")
    lister.add_argument("--json", action="store_true", help="write JSON in place of a table")
    lister.set_defaults(command=_list)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _verify(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    todo = tasks(
        options.quick, options.device, complete=options.complete, stop_after=options.stop_after
    )
    if options.kind:
        known = {task.kind.value for task in todo}
        for name in options.kind:
            if name not in known:
                print(f"gradplan: there is no kind {name!r}; see gradplan list", file=sys.stderr)
                return 2
        todo = [task for task in todo if task.kind.value in options.kind]
    rows = _collect(todo, options.jobs)
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
        print(json.dumps(report, indent=2))
    else:
        _show(rows)
    if stopped:
        took = time.monotonic() - begin
        text = f"Stopped after {took:.0f} s: {done} of {planned} cases were run."
        print(text, file=sys.stderr)
    if all(row.ok for row in rows):
        return _STOPPED if stopped else 0
    return 1


def _collect(todo: Sequence[Task], jobs: int) -> list[Row]:
    """All rows, in the order of the registry; stderr tells how far they are meanwhile.

    That is a bar on a terminal, elsewhere a line now and then; a task that missed is told at once.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    rows: list[Row] = []
    console = Console(stderr=True)
    begin = told = time.monotonic()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("compiling and checking", total=len(todo))
        for row in verify(todo, jobs):
            rows.append(row)
            progress.update(bar, advance=1, description=f"checked {row.kind} {row.element}")
            if row.misses:
                text = f"{len(row.misses)} of {row.cases} missed: {row.misses[0]}"
                console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
            now = time.monotonic()
            if not console.is_terminal and now - told > _TELL_EVERY_S:
                told = now
                count = sum(one.cases for one in rows)
                text = f"{now - begin:.0f} s: {len(rows)} of {len(todo)} tasks, {count} cases"
                console.print(text, highlight=False)
    return merged(rows)


def _plain(row: Row) -> dict[str, Any]:
    """A row in what JSON knows: it has no infinity."""
    fields = {**asdict(row), "share": row.share, "ok": row.ok}
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in fields.items()
    }


def _verdict(row: Row) -> Text:
    if row.misses:
        return Text("MISS", "bold red")
    if row.cases < row.planned:
        return Text(f"{row.cases} of {row.planned}", "yellow")
    return Text("ok", "green")


def _show(rows: Sequence[Row]) -> None:
    console = Console()
    table = Table(title="Measured against the reference", title_justify="left")
    table.add_column("kind", no_wrap=True)
    table.add_column("element")
    for heading in ("cases", "worst error", "guarantee", "share"):
        table.add_column(heading, justify="right")
    table.add_column("")
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
    console.print(table)
    missed = [row for row in rows if not row.ok]
    for row in missed:
        for miss in row.misses[:_MISSES_SHOWN]:
            console.print(miss, style="red", markup=False, highlight=False)
        if len(row.misses) > _MISSES_SHOWN:
            console.print(f"… and {len(row.misses) - _MISSES_SHOWN} more of {row.kind}")
    count, planned = sum(row.cases for row in rows), sum(row.planned for row in rows)
    if missed:
        console.print(f"{sum(len(row.misses) for row in missed)} of {count} cases missed.")
    elif count < planned:
        console.print(f"The {count} cases that were run are within their guarantees.")
    else:
        console.print(f"All {count} cases are within their guarantees.")


def _list(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps([_support(spec) for spec in KINDS.values()], indent=2, ensure_ascii=False))
        return 0
    table = Table(title="What gradplan supports", title_justify="left")
    for heading in _support(next(iter(KINDS.values()))):
        name = heading in ("kind", "function")
        table.add_column(heading.replace("_", " "), overflow="fold", no_wrap=name)
    for spec in KINDS.values():
        cells = _support(spec).values()
        table.add_row(
            *(" ".join(cell) or "–" if isinstance(cell, list) else str(cell) for cell in cells)
        )
    Console().print(table, markup=False)
    return 0


def _support(spec: KindSpec) -> dict[str, str | list[str]]:
    """One row of the support matrix."""
    return {
        "kind": spec.kind.value,
        "family": spec.category.value,
        "function": spec.function,
        "engine": spec.engine.value,
        "needs_x": spec.x.value,
        "needs_y": spec.y.value,
        "ties": [rule.value for rule in spec.ties],
        "elements": [element.value for element in ELEMENTS],
        "ranks": f"1–{MAX_RANK}",
        "formula": spec.formula,
    }
