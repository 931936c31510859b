"""`gradplan doctor`: what is here, what is missing, and whether the kernels are right."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table
from rich.text import Text

from ..diagnosis import Check, Library, check, libraries, machine, subjects
from ..terminal import (
    add_command,
    bytes_text,
    console,
    new_table,
    print_json,
    progress,
    seconds_text,
)

__all__ = ["add_parser"]

# Above this a check has compiled its kernel, or loaded a library.
_COMPILED_S = 0.5


def add_parser(commands: Any) -> None:
    """Add `doctor` to the commands."""
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        help="look at this machine, and check one kernel of each family",
        description="What is installed and what is missing, the GPU, threads and the cache; then "
        "one problem of each family is run and checked. The first run compiles.",
        examples=["gradplan doctor", "gradplan doctor --json"],
    )
    parser.add_argument("--json", action="store_true", help="write JSON in place of tables")


def _doctor(options: argparse.Namespace) -> int:
    about, known = machine(), libraries()
    todo = subjects(gpu=about["gpu"]["found"])
    checked = []
    with progress() as bars:
        bar = bars.add_task("checking", total=len(todo))
        for spec, device in todo:
            bars.update(bar, description=f"checking {spec.kind.value} on {device}")
            checked.append(check(spec, device))
            bars.advance(bar)
    ok = all(one.ok for one in checked)
    if options.json:
        found = {
            "ok": ok,
            **about,
            "libraries": [vars(library) for library in known],
            "checks": [one.plain() for one in checked],
        }
        print_json(found)
    else:
        _show(about, known, checked)
    return 0 if ok else 1


def _show(about: dict[str, Any], known: list[Library], checked: list[Check]) -> None:
    shown = console()
    shown.print(_machine(about))
    table = new_table("Libraries", "", "version", "for", "to install")
    for library in known:
        found = library.version is not None
        table.add_row(
            Text(library.name, "" if found else "yellow"),
            library.version or Text("missing", "yellow"),
            library.role,
            "" if found else Text(library.install),
        )
    shown.print(table)
    right = ("error", "guarantee", "took")
    table = new_table("Self-check, one kind of each family", "kind", *right, "", right=right)
    for one in checked:
        took = seconds_text(one.seconds) + (", compiled" if one.seconds > _COMPILED_S else "")
        table.add_row(
            f"{one.kind} on {one.device}",
            "–" if one.error is None else f"{one.error:.1e}",
            "–" if one.guarantee is None else f"{one.guarantee:.1e}",
            took,
            Text("ok", "green") if one.ok else Text("WRONG", "bold red"),
        )
    shown.print(table)
    for one in checked:
        if not one.ok:
            text = f"{one.kind} on {one.device}: {one.fault}"
            shown.print(Text(text, "red"), soft_wrap=True)
    shown.print("All is well." if all(one.ok for one in checked) else "Something is wrong.")


def _machine(about: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("gradplan", Text(f"{about['gradplan']} in {about['where']}"))
    table.add_row("Python", Text(f"{about['python']}, {about['executable']}"))
    table.add_row("machine", Text(about["platform"]))
    threads = about["threads"]
    chosen = threads["GRADPLAN_NUM_THREADS"]
    source = "one a core" if chosen is None else f"GRADPLAN_NUM_THREADS={chosen}"
    table.add_row("threads", Text(f"{threads['used']} ({source}), {threads['layer']}"))
    table.add_row("GPU", _gpu(about["gpu"]))
    table.add_row("kernel cache", _cache(about["cache"]))
    return table


def _gpu(gpu: dict[str, Any]) -> Text:
    if not gpu["found"]:
        return Text(f"none: {gpu['reason']}", "yellow")
    more = f", first of {gpu['count']}" if gpu["count"] > 1 else ""
    return Text(
        f"{gpu['name']} ({gpu['arch']}, {gpu['multiprocessors']} multiprocessors, "
        f"{bytes_text(gpu['memory'])}){more}, CUDA {gpu['cuda']}"
    )


def _cache(cache: dict[str, Any]) -> Text:
    if not cache["writable"]:
        where = cache["folder"] or "nowhere"
        text = f"{where} cannot be written ({cache['reason']}): kernels are compiled in every run"
        return Text(text, "yellow")
    return Text(f"{cache['folder']}, {cache['kernels']} kernels, {bytes_text(cache['bytes'])}")
