"""`gradplan bench`: which rows, who is measured on them, and what is shown meanwhile."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import InvalidProblem
from ..kinds import ElementKind
from ..registry import ELEMENTS, KINDS
from .clocks import Effort
from .lazy import needed
from .markdown import markdown, replaced
from .measure import OURS, Request
from .peers import PEERS, available
from .results import Results, lowest_shares, speedups
from .workers import Apart, Failed, Here, TookTooLong, Worker
from .workloads import LAYOUTS, Workload, custom, defaults

__all__ = ["add_parser"]

_OURS_LIMIT_S = 180.0
_QUICK = Effort(time_ms=2.0, repeats=3)
_NO_PEER = "none"
# On a busy CPU torch's threads wait for each other by whole time slices: every speed-up is a lie.
_BUSY_CORES = 0.25


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of the command line."""
    parser = commands.add_parser(
        "bench",
        help="time every kind against its floor and against other libraries",
        description="Time gradients against the fewest bytes they must move and against what is "
        "installed besides. Nothing is timed before its result is right.",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    several = {"nargs": "+", "action": "extend"}
    kinds = [spec.kind.value for spec in KINDS.values()]
    elements = [element.value for element in ELEMENTS]
    parser.add_argument("--kind", **several, choices=kinds, metavar="KIND", help="only these")
    parser.add_argument("--case", **several, metavar="NAME", help="only these named cases")
    parser.add_argument(
        "--element", **several, choices=elements, help="default: bf16 f32; cpu: f32 f16 bf16"
    )
    parser.add_argument("--shape", **several, type=_shape, help="a case of your own: 8192x8192")
    parser.add_argument("--axis", type=int, default=-1, help="its axis (default: the last)")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="its layout")
    parser.add_argument(
        "--peer",
        **several,
        choices=[*PEERS, _NO_PEER],
        help="whom to compare with (default: all that are installed; cpu: torch)",
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, few repetitions")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="repetitions of each row")
    parser.add_argument(
        "--time", type=float, default=100.0, metavar="MS", help="device time a row (default: 100)"
    )
    parser.add_argument(
        "--peer-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for a peer to compile and run one row (default: 60)",
    )
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="end in good order by then"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every row here")
    parser.add_argument("--resume", action="store_true", help="skip what that file has already")
    parser.add_argument("--no-host", action="store_true", help="leave out the cost of calls")
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="measure in this process, for debuggers and profilers: no limits",
    )
    parser.add_argument(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: write the table of these results into the README",
    )
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="that README")
    parser.set_defaults(command=run)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().replace("*", "x").split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 8192x8192, got {text!r}") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError("extents are at least 1")
    return shape


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(options: argparse.Namespace) -> int:
    """Run the command; 1 where a row of ours is wrong or fails."""
    if options.table:
        return _write_table(options.table, options.readme)
    if options.resume and options.json is None:
        raise InvalidProblem("--resume goes on with a file: name it with --json")
    needed("torch")
    peers = _peers(options)
    requests = list(_requests(options, peers))
    if not requests:
        raise InvalidProblem("no kind that was asked for has a case that was asked for")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    bench = _Bench(options, peers)
    try:
        return bench.run(requests)
    finally:
        bench.close()


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
    for name in asked:
        needed(PEERS[name].module)
    return [name for name in PEERS if name in asked]


def _requests(options: argparse.Namespace, peers: Sequence[str]) -> Iterator[Request]:
    """Every row, case by case: a run that is stopped has the first cases of all kinds."""
    specs = [spec for spec in KINDS.values() if not options.kind or spec.kind.value in options.kind]
    usual = ["f32", "f16", "bf16"] if options.device == "cpu" else ["bf16", "f32"]
    elements = [ElementKind.coerce(name) for name in options.element or usual]
    effort = _QUICK if options.quick else Effort(options.time)
    if options.repeats:
        effort = replace(effort, repeats=options.repeats)
    names = (OURS, *peers)
    for case in _cases(options):
        for spec in specs:
            if case.reach.holds(spec):
                for element in elements:
                    yield Request(
                        spec.category, spec.kind, element, case, options.device, names, effort
                    )


def _cases(options: argparse.Namespace) -> list[Workload]:
    if options.shape:
        for shape in options.shape:
            if not -len(shape) <= options.axis < len(shape):
                raise InvalidProblem(f"--axis {options.axis} is outside the shape {shape}")
        return [custom(shape, options.axis, options.layout) for shape in options.shape]
    cases = defaults(options.device, options.quick)
    if not options.case:
        return list(cases)
    known = [case.name for case in cases]
    for name in options.case:
        if name not in known:
            raise InvalidProblem(f"there is no case {name!r}; there are {', '.join(known)}")
    return [case for case in cases if case.name in options.case]


@dataclass
class _Bench:
    """One run of the command."""

    options: argparse.Namespace
    peers: list[str]
    console: Console = field(default_factory=Console)
    workers: dict[str, Worker] = field(default_factory=dict)
    gave_up: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        options = self.options
        here = Here() if options.in_process else None
        self.workers = {OURS: here or Apart()}
        for name in self.peers:
            # On the CPU ours and torch take turns in one process: its speed drifts.
            shared = name == "torch" and options.device == "cpu"
            self.workers[name] = here or (self.workers[OURS] if shared else Apart())

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def run(self, requests: Sequence[Request]) -> int:
        options, effort = self.options, requests[0].effort
        try:
            about = self.workers[OURS].ask("about", options.device, effort, limit_s=_OURS_LIMIT_S)
        except (Failed, TookTooLong) as error:
            raise InvalidProblem(f"the device {options.device!r} cannot be used: {error}") from None
        self._introduce(about)
        results = Results(about, options.json)
        if options.resume:
            results = Results.resumed(about, options.json)
        done = self._rows(results, requests)
        if not options.no_host:
            self._host(results, requests)
        self._sum_up(results, done)
        return 1 if any(row["error"] for row in done) else 0

    def _left_s(self) -> float:
        limit = self.options.stop_after
        return float("inf") if limit is None else limit - (time.monotonic() - self.begin)

    def _rows(self, results: Results, requests: Sequence[Request]) -> list[dict[str, Any]]:
        done: list[dict[str, Any]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        on_terminal = self.console.is_terminal
        lines = _Lines(self.peers, requests)
        self.console.print(lines.heading(), style="bold", soft_wrap=True, highlight=False)
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not on_terminal,
        ) as progress:
            bar = progress.add_task("measuring", total=len(requests))
            for request in requests:
                label = f"{request.kind.value} {request.element.value} {request.workload.name}"
                progress.update(bar, description=label)
                wanted = results.todo(request)
                for names in self._groups(wanted):
                    if self._left_s() <= 0:
                        self.console.print("Out of time: the rest can go on with --resume.")
                        return done
                    results.note(request, self._ask(request, names))
                row = results.row(request)
                done.append(row)
                if wanted:
                    self.console.print(lines.line(row), soft_wrap=True, highlight=False)
                progress.advance(bar)
        return done

    def _groups(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Whom to ask together: those who share a worker."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(id(self.workers[name]), []).append(name)
        return [tuple(group) for group in groups.values()]

    def _ask(self, request: Request, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        kind, worker = request.kind.value, self.workers[names[0]]
        limit_s = self.options.peer_limit if OURS not in names else _OURS_LIMIT_S
        if OURS not in names and (reason := self.gave_up.get((names[0], kind))):
            return {names[0]: {"error": f"not tried: {reason}"}}
        try:
            made: dict[str, dict[str, Any]] = worker.ask(
                "measure", replace(request, names=names), limit_s=min(limit_s, self._left_s())
            )
            return made
        except TookTooLong:
            if limit_s > self._left_s():  # the end of the run, not the peer's fault
                return {}
            text = f"did not compile and run in {limit_s:.0f} s"
            for name in names:
                # A compiler that does not end for one shape seldom ends for the next.
                self.gave_up[name, kind] = f"{text} ({request.workload.name})"
            return {name: {"error": text} for name in names}
        except Exception as error:
            return {name: {"error": str(error)[:300]} for name in names}

    def _host(self, results: Results, requests: Sequence[Request]) -> None:
        kinds = {(request.category, request.kind): request for request in requests}
        for request in kinds.values():
            name = request.kind.value
            if name in results.host_us or self._left_s() <= 0:
                continue
            one = replace(request, element=ElementKind.F32)
            limit_s = min(_OURS_LIMIT_S, self._left_s())
            try:
                results.host_us[name] = self.workers[OURS].ask("host", one, limit_s=limit_s)
            except Exception as error:
                self.console.print(f"host cost of {name}: {error}", style="red", markup=False)
        results.save()

    def _introduce(self, about: dict[str, Any]) -> None:
        device, speed = about["device"], about["copy_bandwidth"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        self.console.print(
            f"{device['name']} ({device['arch']}); {versions}\n"
            f"copy bandwidth {speed / 1e9:,.0f} GB/s, read and written",
            highlight=False,
            soft_wrap=True,
        )

    def _sum_up(self, results: Results, done: list[dict[str, Any]]) -> None:
        table = Table(title="Lowest share by case", title_justify="left")
        for heading in ("case", "element", "share", "kind", "variant"):
            table.add_column(heading, justify="right" if heading == "share" else "left")
        for (case, element), row in lowest_shares(done).items():
            table.add_row(case, element, f"{row['share']:.0%}", row["kind"], row["variant"])
        if table.row_count:
            self.console.print(table)
        for name, (mean, count, worst) in speedups(done).items():
            self.console.print(
                f"Over {PEERS[name].title}: {mean:.2f} × (geometric mean of {count} rows), least "
                f"{worst['peers'][name]['speedup']:.2f} × in {worst['kind']} {worst['element']} "
                f"{worst['case']}.",
                highlight=False,
                soft_wrap=True,
            )
        if results.host_us:
            costs = results.host_us.values()
            self.console.print(
                "Host cost on 8 × 8, median and worst kind, µs: "
                + ", ".join(
                    f"{key} {median(cost[key] for cost in costs):.1f} / "
                    f"{max(cost[key] for cost in costs):.1f}"
                    for key in ("bound", "run", "function")
                ),
                highlight=False,
                soft_wrap=True,
            )
        busy = [row["other_cores"] for row in done if row.get("other_cores") is not None]
        if busy and median(busy) > _BUSY_CORES:
            self.console.print(
                "The machine is busy: no time above is to be believed.", style="bold yellow"
            )
        failed = [row for row in done if row["error"]]
        if failed:
            self.console.print(f"{len(failed)} of {len(done)} rows failed.", style="bold red")


class _Lines:
    """A table that is printed line by line, as rows come."""

    def __init__(self, peers: Sequence[str], requests: Sequence[Request]) -> None:
        self._peers = peers
        self._case = max(len("case"), *(len(request.workload.name) for request in requests))
        self._kind = max(len("kind"), *(len(request.kind.value) for request in requests))

    def heading(self) -> str:
        peers = "".join(f"{name + ' µs':>14}{'×':>9}" for name in self._peers)
        return (
            f"{'kind':<{self._kind}}  {'':<4}  {'case':<{self._case}}{'floor µs':>11}"
            f"{'ours µs':>11}{'share':>7}{peers}  variant"
        )

    def line(self, row: dict[str, Any]) -> str:
        head = f"{row['kind']:<{self._kind}}  {row['element']:<4}  {row['case']:<{self._case}}"
        if row["error"]:
            ours, end = f"{'':>11}{'':>11}{'':>7}", f"[red]{escape(row['error'])}[/]"
        elif row["ms"] is None:
            ours, end = f"{'':>11}{'':>11}{'':>7}", ""
        else:
            floor, time_us = 1e3 * row["floor_ms"], 1e3 * row["ms"]
            ours = f"{floor:>11.1f}{time_us:>11.1f}{row['share']:>7.0%}"
            end = escape(row["variant"])
        peers, notes = "", []
        for name in self._peers:
            peer = row["peers"].get(name) or {"ms": None, "speedup": None, "note": None}
            if peer["ms"]:
                speedup = f"{peer['speedup']:>9.2f}" if peer["speedup"] else f"{'':>9}"
                peers += f"{1e3 * peer['ms']:>14.1f}{speedup}"
            else:
                peers += f"{'–':>14}{'':>9}"
                if peer["note"]:
                    notes.append(f"\n    [yellow]{name}: {escape(peer['note'])}[/]")
        return escape(head) + ours + peers + "  " + end + "".join(notes)
