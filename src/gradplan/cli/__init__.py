"""The command line: one module a command; `gradplan bench` and `gradplan tune` are in `bench`.

`--json` is for programs. Exit codes: 0 all is well, 1 a guarantee was missed, a row failed or
something is slower than allowed, 2 the request cannot be met, 3 stopped before the end.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from .. import __version__
from ..bench import command as bench
from ..bench import tune
from ..errors import GradPlanError
from ..terminal import EXIT_CODES, STOPPED, Parser, print_whole, silence
from . import completion, doctor, explain, listing, verify

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before we began
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (to the end)
            setattr(sys, name, nowhere)
        elif isinstance(stream, TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # formulas, where only ASCII can be written
    code = None
    try:
        options = parser().parse_args(argv)
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except GradPlanError as error:
        sentence = " ".join(str(error).split())
        print_whole(f"gradplan: {sentence}", sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has seen enough
        silence(sys.stdout)
        return STOPPED if code is None else code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_whole(f"gradplan: {where}{error.strerror or error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print_whole("gradplan: interrupted", sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = Parser(
        prog="gradplan",
        description="Gradient kernels as plans: look at them, check them, time them.",
        epilog=f"gradplan COMMAND --help shows options and examples.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"gradplan {__version__}")
    commands = made.add_subparsers(required=True, metavar="command", title="commands")
    doctor.add_parser(commands)
    listing.add_parser(commands)
    explain.add_parser(commands)
    verify.add_parser(commands)
    bench.add_parser(commands)
    tune.add_parser(commands)
    completion.add_parser(commands, parser)
    return made
