"""`gradplan tune`: the thresholds of the GPU's table, measured again.

Each value that a field could have is checked and timed on the problems that the field decides, as
`gradplan bench` does it. Nothing is changed: what is found is for a person to put into the table.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import geometric_mean
from typing import Any

from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..backends.gpu import aot
from ..backends.gpu.aot import Variant
from ..backends.gpu.launch import Step
from ..backends.gpu.table import table_of
from ..errors import InvalidProblem
from ..kinds import BackendKind
from ..sku import PlanPreference
from ..terminal import (
    STOPPED,
    add_command,
    console,
    file_of,
    positive,
    print_json,
    progress,
    remarks,
)
from .clocks import Effort
from .lazy import needed
from .measure import OURS, Request
from .results import STDOUT, finite, write
from .thresholds import FIELDS, Probe, Question, questions, steps_of
from .workers import Apart, Failed, Here, TookTooLong, Worker

__all__ = ["add_parser"]

_LIMIT_S = 120.0
_POINTER_BYTES = 16
# What is listed where there is no GPU whose own table could be.
_LISTED = "sm_90"


def add_parser(commands: Any) -> None:
    """Add `tune` to the commands of the command line."""
    parser = add_command(
        commands,
        "tune",
        run,
        help="measure again which thresholds the GPU's table should have",
        description="Try other values for each threshold of the GPU's table, on the problems that "
        "it decides. Every result is checked before it is timed. Nothing is changed.",
        examples=[
            "gradplan tune --list",
            "gradplan tune --device cuda --fields lagged_rows --json tuned.json",
        ],
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda or cuda:N; cpu is Triton's interpreter"
    )
    parser.add_argument(
        "--fields",
        nargs="+",
        action="extend",
        choices=list(FIELDS),
        metavar="FIELD",
        help="only these (default: all; see --list)",
    )
    parser.add_argument(
        "--json", type=file_of, metavar="FILE", help="keep all that is found here; - is stdout"
    )
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="end in good order by then"
    )
    parser.add_argument(
        "--time", type=float, default=50.0, metavar="MS", help="device time a row (default: 50)"
    )
    parser.add_argument("--repeats", type=positive, metavar="N", help="repetitions of each row")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes that compile in advance (default: one a core)",
    )
    parser.add_argument("--list", action="store_true", help="show fields, values and problems")
    parser.add_argument(
        "--in-process", action="store_true", help="measure in this process, for debuggers"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; 1 where what the table says now is wrong or fails."""
    if options.list:
        listed = list(_listed(options.fields))
        found = {"arch": _LISTED, "fields": listed}
        if options.json is None:
            _show_fields(listed)
        elif options.json == STDOUT:
            print_json(found)
        else:
            write(options.json, found)
        return 0
    needed("torch")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    tuning = _Tuning(options, Here() if options.in_process else Apart())
    try:
        return tuning.run()
    finally:
        tuning.worker.close()


def _listed(names: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """What each field is measured on, or why on nothing."""
    table = table_of(_LISTED)
    for name, ask in FIELDS.items():
        if names and name not in names:
            continue
        if isinstance(ask, str):
            yield {"field": name, "now": str(getattr(table, name)), "nothing": ask}
            continue
        for question in ask(name, table):
            yield {
                "field": question.name,
                "now": question.now,
                "values": list(question.tables),
                "problems": list(map(str, question.probes)),
            }


def _show_fields(listed: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"Thresholds of {_LISTED}", title_justify="left")
    for heading in ("field", "values [now]", "measured on"):
        table.add_column(escape(heading), overflow="fold")
    for one in listed:
        if "nothing" in one:
            table.add_row(one["field"], one["now"], f"nothing: {one['nothing']}")
            continue
        values = (f"[{value}]" if value == one["now"] else value for value in one["values"])
        table.add_row(one["field"], escape(" ".join(values)), ", ".join(one["problems"]))
    console().print(table)


@dataclass
class Answer:
    """What was measured for a question: for each problem and value a row, or None."""

    question: Question
    rows: dict[tuple[Probe, str], dict[str, Any] | None] = field(default_factory=dict)

    def ms(self, probe: Probe, value: str) -> float | None:
        row = self.rows.get((probe, value))
        return None if row is None or row.get("error") else row["ms"]

    def ratio(self, value: str) -> float | None:
        """Time against what is now, a geometric mean; None unless all problems have both."""
        ratios = []
        for probe in self.question.probes:
            now, other = self.ms(probe, self.question.now), self.ms(probe, value)
            if now is None or other is None:
                return None
            ratios.append(other / now)
        return geometric_mean(ratios)

    @property
    def best(self) -> str | None:
        """The value with the least time, where there is anything to compare."""
        ratios = {value: self.ratio(value) for value in self.question.tables}
        known = {value: ratio for value, ratio in ratios.items() if ratio is not None}
        return min(known, key=known.__getitem__) if known else None

    @property
    def loss(self) -> float | None:
        """How much longer what is now takes than the best."""
        ratio = None if self.best is None else self.ratio(self.best)
        return None if ratio is None else 1 / ratio - 1

    def errors(self) -> Iterator[str]:
        for (probe, value), row in self.rows.items():
            if row and row.get("error"):
                yield f"{self.question.name} {value}, {probe}: {row['error']}"

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.question.name,
            "now": self.question.now,
            "values": list(self.question.tables),
            "best": self.best,
            "loss": self.loss,
            "ratios": {value: self.ratio(value) for value in self.question.tables},
            "rows": [
                {
                    "kind": probe.spec.kind.value,
                    "element": probe.element.value,
                    "shape": list(probe.workload.shape),
                    "axis": probe.workload.axis,
                    "without": list(probe.workload.without),
                    "draw": probe.workload.draw.value,
                    "value": value,
                    **row,
                }
                for (probe, value), row in self.rows.items()
                if row is not None
            ],
        }


class _Tuning:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, worker: Worker) -> None:
        self.begin = time.monotonic()
        self.options = options
        self.worker = worker
        self.stopped = False
        self.console = remarks() if options.json == STDOUT else console()
        self.effort = Effort(options.time, options.repeats)
        self.preference = PlanPreference(backend=BackendKind.TRITON)
        self.arch = ""
        self.bandwidth = 1.0
        self._known: dict[tuple[Probe, tuple[Step, ...]], dict[str, Any]] = {}

    def run(self) -> int:
        options = self.options
        try:
            about = self.worker.ask("about", options.device, self.effort, limit_s=_LIMIT_S)
        except (Failed, TookTooLong) as error:
            raise InvalidProblem(f"the device {options.device!r} cannot be used: {error}") from None
        self.arch = "interpreter" if options.device == "cpu" else about["device"]["arch"]
        self.bandwidth = about["copy_bandwidth"]
        asked = list(questions(table_of(self.arch), options.fields))
        if not asked:
            raise InvalidProblem("nothing is measured for these fields: see gradplan tune --list")
        self.console.print(
            f"{about['device']['name']} ({self.arch}), "
            f"copy bandwidth {self.bandwidth / 1e9:,.0f} GB/s, read and written",
            highlight=False,
        )
        if self.arch != "interpreter":
            self._compile(asked)
        answers: list[Answer] = []
        for answer in self._answers(asked):
            answers.append(answer)
            self._show(answer)
            self._save(about, answers)
        self._sum_up(answers, len(asked))
        wrong = any(
            value == answer.question.now and row and row.get("error")
            for answer in answers
            for (_, value), row in answer.rows.items()
        )
        if options.json == STDOUT:
            print_json(finite(self._plain(about, answers)))
        return 1 if wrong else STOPPED if self.stopped else 0

    def _left_s(self) -> float:
        limit = self.options.stop_after
        return float("inf") if limit is None else limit - (time.monotonic() - self.begin)

    def _compile(self, asked: Sequence[Question]) -> None:
        """Fill Triton's cache with every kernel, in many processes: there it takes longest."""
        todo: dict[Any, Variant] = {}
        for question in asked:
            for probe in question.probes:
                for table in question.tables.values():
                    for step in steps_of(probe, self.arch, table):
                        variant = Variant(step, _POINTER_BYTES, probe.element, str(probe))
                        todo.setdefault(variant.key, variant)
        capability = int(self.arch.removeprefix("sm_"))
        with progress() as bars:
            bar = bars.add_task("compiling", total=len(todo))
            pairs = [(variant, capability) for variant in todo.values()]
            # What fails here, fails again where it is measured, and is told there.
            with closing(aot.build_all(pairs, self.options.jobs)) as building:
                for _ in building:
                    bars.advance(bar)
                    if self._left_s() <= 0:
                        break

    def _answers(self, asked: Sequence[Question]) -> Iterator[Answer]:
        total = sum(len(question.probes) * len(question.tables) for question in asked)
        with progress() as bars:
            bar = bars.add_task("measuring", total=total)
            for question in asked:
                answer = Answer(question)
                for probe in question.probes:
                    # What is now comes first: a run that is stopped can still compare.
                    for value in sorted(question.tables, key=lambda one: one != question.now):
                        if self._left_s() <= 0:
                            self.stopped = True
                            self.console.print("Out of time: the rest was not measured.")
                            if answer.rows:
                                yield answer
                            return
                        bars.update(bar, description=f"{question.name} {value}, {probe}")
                        answer.rows[probe, value] = self._row(question, probe, value)
                        bars.advance(bar)
                yield answer

    def _row(self, question: Question, probe: Probe, value: str) -> dict[str, Any] | None:
        """The timing of one value on one problem; one that was measured before is kept."""
        steps = steps_of(probe, self.arch, question.tables[value])
        found = self._known.get((probe, steps))
        if found is None:
            found = self._measure(probe, question, value)
            if found is None:
                return None
            self._known[probe, steps] = found
        now = steps_of(probe, self.arch, question.tables[question.now])
        return {**found, "same": value != question.now and steps == now}

    def _measure(self, probe: Probe, question: Question, value: str) -> dict[str, Any] | None:
        request = Request(
            probe.spec.category,
            probe.spec.kind,
            probe.element,
            probe.workload,
            self.options.device,
            (OURS,),
            self.effort,
            self.preference,
            question.tables[value],
        )
        try:
            limit_s = min(_LIMIT_S, self._left_s())
            found: dict[str, Any] = self.worker.ask("measure", request, limit_s=limit_s)[OURS]
        except TookTooLong as error:
            return None if self._left_s() <= 0 else {"error": str(error)}
        except Exception as error:
            return {"error": str(error)[:300]}
        if "error" not in found:
            found["share"] = 1e3 * found["floor_bytes"] / self.bandwidth / found["ms"]
        return found

    def _show(self, answer: Answer) -> None:
        question, best = answer.question, answer.best
        table = Table(title=question.name, title_justify="left", title_style="bold")
        table.add_column("µs, share of the floor")
        for value in question.tables:
            marks = [" now"] * (value == question.now) + [" best"] * (value == best)
            table.add_column(value + "".join(marks), justify="right", no_wrap=True)
        for probe in question.probes:
            cells = (_cell(answer.rows.get((probe, value))) for value in question.tables)
            table.add_row(str(probe), *cells)
        table.add_section()
        ratios = (answer.ratio(value) for value in question.tables)
        table.add_row(
            "time, geometric mean",
            *("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        )
        self.console.print(table)
        for error in answer.errors():
            self.console.print(error, style="red", markup=False, highlight=False, soft_wrap=True)

    def _sum_up(self, answers: Sequence[Answer], asked: int) -> None:
        table = Table(title="What the table loses", title_justify="left")
        for heading in ("field", "now", "best", "loss"):
            table.add_column(heading, justify="left" if heading == "field" else "right")
        for answer in sorted(answers, key=lambda one: -(one.loss or 0.0)):
            loss = "–" if answer.loss is None else f"{answer.loss:.1%}"
            table.add_row(answer.question.name, answer.question.now, answer.best or "–", loss)
        self.console.print(table)
        if len(answers) < asked:
            self.console.print(f"{len(answers)} of {asked} questions were answered.")

    def _save(self, about: dict[str, Any], answers: Iterable[Answer]) -> None:
        if self.options.json not in (None, STDOUT):
            write(self.options.json, self._plain(about, answers))

    @staticmethod
    def _plain(about: dict[str, Any], answers: Iterable[Answer]) -> dict[str, Any]:
        return {
            "gradplan": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **about,
            "questions": [answer.plain() for answer in answers],
        }


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row.get("error"):
        return "[red]failed[/]"
    return "=" if row["same"] else f"{1e3 * row['ms']:.1f} {row['share']:>4.0%}"
