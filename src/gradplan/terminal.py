"""What all commands share: how they read options, and how they print.

Tables and figures go to stdout, bars and remarks to stderr; where JSON goes to stdout, nothing
else does. What cannot be done is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from math import log10
from pathlib import Path
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import InvalidProblem
from .kinds import OpCategory
from .registry import ELEMENTS, KINDS, MAX_RANK

__all__ = [
    "ELEMENT_NAMES",
    "EXIT_CODES",
    "FAMILIES",
    "KIND_NAMES",
    "STOPPED",
    "Parser",
    "add_choices",
    "add_command",
    "bytes_text",
    "console",
    "file_of",
    "new_table",
    "parse_shape",
    "positive",
    "print_json",
    "print_whole",
    "progress",
    "rate_text",
    "remarks",
    "seconds_text",
    "shape_of",
    "silence",
    "write_text",
]

EXIT_CODES = """exit codes:
  0    all is well
  1    a guarantee was missed, a row failed, or something is slower than allowed
  2    the request cannot be met; stderr says why in one sentence
  3    the run was stopped before its end
  130  interrupted"""

STOPPED = 3
FAMILIES = [family.value for family in OpCategory]
KIND_NAMES = [spec.kind.value for spec in KINDS.values()]
ELEMENT_NAMES = [element.value for element in ELEMENTS]


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise InvalidProblem(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse would list all choices, which for kinds is a paragraph.
        if action.choices is None or value in action.choices:
            return
        word = "command" if action.dest == argparse.SUPPRESS else action.dest
        near = get_close_matches(str(value), map(str, action.choices), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise argparse.ArgumentError(None, f"there is no {word} {value!r}{hint}")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,  # noqa: A002  (argparse's own word)
    description: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    """A command with its examples below its options."""
    shown = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"{'examples' if len(examples) > 1 else 'example'}:\n{shown}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def add_choices(parser: argparse._ActionsContainer, elements: str = "default: all") -> None:
    """--family, --kind and --element, each for one or several names."""
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    parser.add_argument(
        "--family", **several, choices=FAMILIES, metavar="FAMILY", help="only these families"
    )
    parser.add_argument(
        "--kind", **several, choices=KIND_NAMES, metavar="KIND", help="only these kinds"
    )
    parser.add_argument(
        "--element",
        "--dtype",
        **several,
        choices=ELEMENT_NAMES,
        metavar="ELEMENT",
        help=f"f32, f16, bf16, f64 ({elements})",
    )


def shape_of(text: str) -> tuple[int, ...]:
    """An option's shape: 8192x8192."""
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_shape(text: str) -> tuple[int, ...]:
    """8192x8192 → (8192, 8192), or `ValueError` with what is wrong."""
    try:
        shape = tuple(int(part) for part in text.lower().replace("*", "x").split("x"))
    except ValueError:
        raise ValueError(f"expected a shape like 8192x8192, got {text!r}") from None
    if min(shape) < 1:
        raise ValueError(f"extents are at least 1, got {text}")
    if len(shape) > MAX_RANK:
        raise ValueError(f"plans take rank 1 to {MAX_RANK}, got rank {len(shape)}: {text}")
    return shape


def positive(text: str) -> int:
    """An option's count."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def file_of(text: str) -> Path:
    """An option's file, which is to be written."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {str(path)!r}")
    return path


def silence(stream: IO[str]) -> None:
    """Nobody reads a stream any more: from now on it goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Console(Console):
    """Goes on where nobody reads on: what a command finds, its exit code still tells."""

    def on_broken_pipe(self) -> None:
        silence(self.file)


def console() -> Console:
    """Where results go."""
    return _Console(highlight=False)


def remarks() -> Console:
    """Where bars and remarks go."""
    return _Console(stderr=True, highlight=False)


def new_table(title: str, *headings: str, right: Sequence[str] = (), **more: Any) -> Table:
    """A table in the style of all commands; columns named in `right` hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", **more)
    for heading in headings:
        number = heading in right
        table.add_column(heading, justify="right" if number else "left", no_wrap=number)
    return table


def progress(shown: Console | None = None) -> Progress:
    """A bar on stderr, where that is a terminal; it is gone when it is done."""
    shown = remarks() if shown is None else shown
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
        # Printed above the bar; but what is piped elsewhere must go there.
        redirect_stdout=sys.stdout.isatty(),
    )


def print_json(found: Any) -> None:
    """Plain JSON on stdout."""
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    print_whole(json.dumps(found, indent=2, ensure_ascii=plain))


def print_whole(text: str, stream: IO[str] | None = None) -> None:
    """Print all that there is to say, to whoever still reads."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def write_text(path: Path, text: str) -> None:
    """Put a file there in one step: it is whole at any time."""
    if path.exists() and not path.is_file():  # a pipe, a terminal: nothing to put in its place
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # where a link leads, which stays
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    place = 0
    while value >= 0.9995 * step and place < len(units) - 1:
        value /= step
        place += 1
    digits = max(0, 2 - int(log10(max(value, 1))))
    whole = value == int(value)
    text = f"{value:.0f}" if whole else f"{value:.{digits}f}"
    return f"{text} {units[place]}"


def bytes_text(count: float) -> str:
    """402653184 → 403 MB."""
    return _scaled(count, ("bytes", "kB", "MB", "GB", "TB"), 1e3)


def rate_text(bytes_per_second: float) -> str:
    """4.2e12 → 4.20 TB/s."""
    return _scaled(bytes_per_second / 1e6, ("MB/s", "GB/s", "TB/s"), 1e3)


def seconds_text(seconds: float) -> str:
    """0.0955e-3 → 95.5 µs."""
    return _scaled(1e6 * seconds, ("µs", "ms", "s"), 1e3)
