"""`gradplan bench`: which rows, who is measured on them, and what is made of the results."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidProblem
from ..kinds import ElementKind
from ..registry import KINDS
from ..terminal import (
    STOPPED,
    add_choices,
    add_command,
    console,
    file_of,
    positive,
    print_json,
    remarks,
    shape_of,
    write_text,
)
from .clocks import Effort
from .compare import Comparison, compare, show
from .lazy import needed
from .markdown import markdown, replaced
from .measure import OURS, Request
from .peers import PEERS, available, published
from .results import STDOUT, finite, read, write
from .session import Session
from .workloads import LAYOUTS, Workload, custom, defaults, read_cases

__all__ = ["add_parser"]

_QUICK = Effort(time_ms=2.0, repeats=3)
_NO_PEER, _PUBLISHED = "none", "published"


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of the command line."""
    parser = add_command(
        commands,
        "bench",
        run,
        help="time every kind against its floor and against other libraries",
        description="Time gradients against the fewest bytes they must move and against what is "
        "installed besides. Nothing is timed before its result is right. Needs PyTorch.",
        examples=[
            "gradplan bench --kind softmax --shape 4096x4096 --html report.html",
            "gradplan bench --device cuda --json new.json --resume --against old.json",
            "gradplan bench --from new.json --against old.json --fail-slower 5",
            "gradplan bench --from h200.json --html report.html --png plots",
        ],
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    rows = parser.add_argument_group("which rows")
    add_choices(rows, "default: bf16 f32; cpu: f32 f16 bf16")
    rows.add_argument("--case", **several, metavar="NAME", help="only these named cases")
    rows.add_argument("--shape", **several, type=shape_of, help="cases of your own: 8192x8192")
    rows.add_argument("--axis", type=int, default=-1, help="their axis (default: the last)")
    rows.add_argument(
        "--shapes", type=Path, metavar="FILE", help="a file of them, one a line: 64x4096 axis=0"
    )
    rows.add_argument(
        "--layout",
        **several,
        choices=LAYOUTS,
        metavar="LAYOUT",
        help=f"of your own cases, or only named cases that lie so: {', '.join(LAYOUTS)}",
    )
    rows.add_argument(
        "--peer",
        **several,
        choices=[*PEERS, _NO_PEER, _PUBLISHED],
        metavar="PEER",
        help=f"whom to compare with: {', '.join(PEERS)}, none, or published: those of the README's "
        "tables, row by row (default: all that are installed; cpu: torch)",
    )
    rows.add_argument("--no-host", action="store_true", help="leave out the cost of calls")
    effort = parser.add_argument_group("how long")
    effort.add_argument("--quick", action="store_true", help="small shapes, few repetitions")
    effort.add_argument("--repeats", type=positive, metavar="N", help="repetitions of each row")
    effort.add_argument(
        "--time", type=float, default=100.0, metavar="MS", help="device time a row (default: 100)"
    )
    effort.add_argument(
        "--peer-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for a peer to compile and run one row (default: 60)",
    )
    effort.add_argument(
        "--prepare",
        type=positive,
        metavar="N",
        help="first compile all rows in N processes at once, on a GPU: nothing is timed meanwhile",
    )
    effort.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="end in good order by then"
    )
    effort.add_argument(
        "--in-process",
        action="store_true",
        help="measure in this process, for debuggers and profilers: no limits",
    )
    kept = parser.add_argument_group("what is made of it")
    kept.add_argument(
        "--json", type=file_of, metavar="FILE", help="keep every row here; - is stdout, at the end"
    )
    kept.add_argument(
        "--commit",
        metavar="NAME",
        help="whose kernels these are, noted beside each row (default: what git says)",
    )
    kept.add_argument("--resume", action="store_true", help="skip what that file has already")
    kept.add_argument(
        "--from",
        dest="results",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: use these results",
    )
    kept.add_argument("--html", type=file_of, metavar="FILE", help="write a report, one page")
    kept.add_argument("--png", type=Path, metavar="DIR", help="write plots (needs matplotlib)")
    kept.add_argument("--against", type=Path, metavar="FILE", help="show what moved since then")
    kept.add_argument(
        "--noise",
        type=float,
        default=3.0,
        metavar="PERCENT",
        help="changes below that are none (default: 3; never less than the spread of the row)",
    )
    kept.add_argument(
        "--fail-slower", type=float, metavar="PERCENT", help="exit with 1 where a row is"
    )
    kept.add_argument(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: write the table of these results into the README",
    )
    kept.add_argument("--readme", type=Path, default=Path("README.md"), help="that README")


def run(options: argparse.Namespace) -> int:
    """Run the command; 1 where a row of ours is wrong, fails or is too slow."""
    if options.table:
        return _write_table(options.table, options.readme)
    if options.fail_slower is not None and options.against is None:
        raise InvalidProblem("--fail-slower compares with results: name them with --against")
    # What is asked of other files is looked at before hours of measuring.
    before = None if options.against is None else read(options.against)
    plots = _plots(options)
    if options.results:
        made = [read(path) for path in options.results]
        code = 0
        _check_nothing_to_measure(options)
    else:
        found, code = _measure(options)
        made = [found]
    for plot in plots:
        with remarks().status("drawing"):
            plot(made)
    moved = None
    if before is not None:
        moved = compare(before, made, options.noise / 100)
        show(moved, remarks() if options.json == STDOUT else console())
        if options.fail_slower is not None and moved.slower(options.fail_slower / 100):
            code = 1
    if options.json == STDOUT or (options.results and options.json):
        _write_json(options, made, moved)
    return code


def _check_nothing_to_measure(options: argparse.Namespace) -> None:
    if options.resume:
        raise InvalidProblem("--from measures nothing, so there is nothing to --resume")
    if not (options.html or options.png or options.against or options.json):
        raise InvalidProblem("--from needs --html, --png, --against or --json: what to make of it")


def _write_json(
    options: argparse.Namespace, made: list[dict[str, Any]], moved: Comparison | None
) -> None:
    """Results, and what moved; several files of results stay several."""
    found: Any = made[0] if len(made) == 1 else {"runs": made}
    if moved is not None:
        found = {**found, "against": moved.plain()}
    if options.json == STDOUT:
        print_json(finite(found))
    else:
        write(options.json, found)


def _plots(options: argparse.Namespace) -> list[Callable[[list[dict[str, Any]]], None]]:
    """What writes the report and the plots; said at once where it cannot."""
    made: list[Callable[[list[dict[str, Any]]], None]] = []
    if options.html is not None:
        from .report import page

        made.append(lambda runs: write_text(options.html, page(runs)))
    if options.png is not None:
        needed("matplotlib")
        from .plots import write_plots

        if options.png.exists() and not options.png.is_dir():
            raise InvalidProblem(f"--png {options.png}: it is no folder")
        made.append(lambda runs: write_plots(runs, options.png))
    return made


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """(the results, the exit code)."""
    if options.resume and options.json in (None, STDOUT):
        raise InvalidProblem("--resume goes on with a file: name it with --json")
    if options.prepare and (options.in_process or options.device == "cpu"):
        raise InvalidProblem("--prepare compiles for a GPU, in processes of its own")
    needed("torch")
    peers = _peers(options)
    requests = list(_requests(options, peers))
    if not requests:
        raise InvalidProblem("no kind that was asked for has a case that was asked for")
    if options.json not in (None, STDOUT):
        options.json.parent.mkdir(parents=True, exist_ok=True)
    session = Session(options, peers, remarks() if options.json == STDOUT else console())
    try:
        results = session.run(requests)
    finally:
        session.close()
    code = 1 if session.failed else STOPPED if session.stopped else 0
    return results.plain(), code


def _write_table(results: Sequence[Path], readme: Path) -> int:
    table = markdown(results)
    try:
        readme.write_text(replaced(readme.read_text(), table))
    except OSError as error:
        raise InvalidProblem(f"--readme: {error}") from None
    return 0


def _peers(options: argparse.Namespace) -> list[str]:
    asked: list[str] | None = options.peer
    if asked is None:
        return ["torch"] if options.device == "cpu" else available()
    if _NO_PEER in asked:
        return []
    if _PUBLISHED in asked:
        return [name for name in available() if name in ("torch", "compile", "jax")]
    for name in asked:
        needed(PEERS[name].module)
    return [name for name in PEERS if name in asked]


def _requests(options: argparse.Namespace, peers: Sequence[str]) -> Iterator[Request]:
    """Every row, case by case: a run that is stopped has the first cases of all kinds."""
    specs = [
        spec
        for spec in KINDS.values()
        if (not options.kind or spec.kind.value in options.kind)
        and (not options.family or spec.category.value in options.family)
    ]
    usual = ["f32", "f16", "bf16"] if options.device == "cpu" else ["bf16", "f32"]
    elements = [ElementKind.coerce(name) for name in options.element or usual]
    effort = _QUICK if options.quick else Effort(options.time)
    if options.repeats:
        effort = replace(effort, repeats=options.repeats)
    for case in _cases(options):
        for spec in specs:
            if case.reach.holds(spec):
                for element in elements:
                    some = peers
                    if _PUBLISHED in (options.peer or ()):
                        of_row = published(spec.kind.value, element, case)
                        some = [name for name in peers if name in of_row]
                    yield Request(
                        spec.category,
                        spec.kind,
                        element,
                        case,
                        options.device,
                        (OURS, *some),
                        effort,
                        chain=options.device != "cpu",
                    )


def _cases(options: argparse.Namespace) -> list[Workload]:
    if options.shape or options.shapes:
        own = [
            custom(shape, options.axis, layout)
            for shape in options.shape or ()
            for layout in options.layout or LAYOUTS[:1]
        ]
        return own + (read_cases(options.shapes) if options.shapes else [])
    cases = defaults(options.device, options.quick)
    if options.layout:
        cases = tuple(case for case in cases if case.layout in options.layout)
    if not options.case:
        return list(cases)
    known = [case.name for case in cases]
    for name in options.case:
        if name not in known:
            raise InvalidProblem(f"there is no case {name!r}; there are {', '.join(known)}")
    return [case for case in cases if case.name in options.case]
