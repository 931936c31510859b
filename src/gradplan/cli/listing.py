"""`gradplan list`: the support matrix, from the registry."""

from __future__ import annotations

import argparse
from typing import Any

from rich.text import Text

from ..registry import ELEMENTS, KINDS, MAX_RANK, KindSpec, Need
from ..terminal import FAMILIES, add_command, console, new_table, print_json

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add `list` to the commands."""
    parser = add_command(
        commands,
        "list",
        _list,
        help="show what is supported",
        description="Every kind with its function, what it needs saved, and its formula.",
        examples=["gradplan list --family scan", "gradplan list --json | jq '.[].kind'"],
    )
    parser.add_argument(
        "--family",
        nargs="+",
        action="extend",
        choices=FAMILIES,
        metavar="FAMILY",
        help=f"only these: {', '.join(FAMILIES)}",
    )
    parser.add_argument("--json", action="store_true", help="write JSON in place of a table")


def _list(options: argparse.Namespace) -> int:
    wanted = options.family or FAMILIES
    specs = [spec for spec in KINDS.values() if spec.category.value in wanted]
    if options.json:
        print_json([support(spec) for spec in specs])
        return 0
    elements = ", ".join(element.value for element in ELEMENTS)
    table = new_table(
        "What gradplan supports",
        *("kind", "function and gradient", "needs", "ties"),
        caption=f"Each for {elements}, rank 1 to {MAX_RANK}, any strides, on the CPU and on a GPU. "
        "(y): may be left out.",
        caption_justify="left",
    )
    table.columns[0].no_wrap = True
    family = None
    for spec in specs:
        if spec.category is not family:
            family = spec.category
            table.add_section()
        table.add_row(
            spec.kind.value,
            Text.assemble(spec.function, "\n", (spec.formula, "dim")),
            _needs(spec),
            "\n".join(rule.value for rule in spec.ties) or "–",
        )
    console().print(table)
    return 0


def _needs(spec: KindSpec) -> str:
    """The arrays that the forward must have saved."""
    shown = {Need.NO: "", Need.REQUIRED: "{}", Need.OPTIONAL: "({})"}
    names = [shown[need].format(name) for name, need in (("x", spec.x), ("y", spec.y))]
    return " ".join(filter(None, names)) or "–"


def support(spec: KindSpec) -> dict[str, str | list[str]]:
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
        "devices": ["cpu", "cuda"],
        "formula": spec.formula,
    }
