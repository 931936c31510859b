"""One run of `gradplan bench`: workers, rows as they come, and what is said at the end."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..errors import InvalidProblem
from ..kinds import ElementKind
from ..terminal import new_table, progress
from .measure import OURS, Request
from .peers import PEERS
from .results import STDOUT, Results, busy, commit_here, lowest_shares, speedups
from .workers import Apart, Failed, Here, TookTooLong, Worker

__all__ = ["Session"]

_OURS_LIMIT_S = 180.0


@dataclass
class Session:
    """One run of the command."""

    options: argparse.Namespace
    peers: list[str]
    console: Console
    workers: dict[str, Worker] = field(default_factory=dict)
    gave_up: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin = time.monotonic()
        self.failed = self.stopped = False
        self._kept: tempfile.TemporaryDirectory[str] | None = None
        options = self.options
        if options.prepare and "jax" in self.peers:
            self._keep_compiled()
        here = Here() if options.in_process else None
        self.workers = {OURS: here or Apart()}
        for name in self.peers:
            # On the CPU ours and torch take turns in one process: its speed drifts.
            shared = name == "torch" and options.device == "cpu"
            self.workers[name] = here or (self.workers[OURS] if shared else Apart())

    def _keep_compiled(self) -> None:
        """Let JAX keep what it compiles where its next process finds it, as the others do."""
        self._kept = tempfile.TemporaryDirectory(prefix="gradplan-jax-")
        # Whoever has a place for it already is left alone.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", self._kept.name)
        for name in ("MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
            os.environ.setdefault(f"JAX_PERSISTENT_CACHE_{name}", "0")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self._kept is not None:
            self._kept.cleanup()

    def run(self, requests: Sequence[Request]) -> Results:
        """Measure every request, and tell how it went."""
        options, effort = self.options, requests[0].effort
        try:
            about = self.workers[OURS].ask("about", options.device, effort, limit_s=_OURS_LIMIT_S)
        except (Failed, TookTooLong) as error:
            raise InvalidProblem(f"the device {options.device!r} cannot be used: {error}") from None
        self._introduce(about)
        path = None if options.json == STDOUT else options.json
        commit = options.commit or commit_here()
        results = Results(about, path, commit=commit)
        if options.resume and path is not None:
            results = Results.resumed(about, path, commit)
        if options.prepare:
            self._prepare(results, requests)
        done = self._rows(results, requests)
        if not options.no_host:
            self._host(results, requests)
        self._sum_up(results, done)
        self.failed = any(row["error"] for row in done)
        return results

    def _prepare(self, results: Results, requests: Sequence[Request]) -> None:
        """Compile what is not measured yet, in many processes; peers first, who take longest."""
        jobs = deque(
            sorted(
                (
                    replace(request, names=(name,))
                    for request in requests
                    for name in results.todo(request)
                    if name == OURS or PEERS[name].compiles
                ),
                key=lambda job: [*PEERS, OURS].index(job.names[0]),
            )
        )
        begin, count = time.monotonic(), len(jobs)
        with progress() as bars, ThreadPoolExecutor(self.options.prepare) as pool:
            bar = bars.add_task("compiling", total=count)
            turns = range(min(self.options.prepare, count))
            for _ in pool.map(lambda _: self._compile(jobs, lambda: bars.advance(bar)), turns):
                pass
        took = time.monotonic() - begin
        self.console.print(f"compiled for {count} rows in {took:.0f} s", highlight=False)

    def _compile(self, jobs: deque[Request], done: Callable[[], None]) -> None:
        """Do jobs while there are any, in one process."""
        worker = Apart()
        try:
            while jobs and self._left_s() > 0:
                try:
                    job = jobs.popleft()
                except IndexError:  # another took the last
                    return
                (name,) = job.names
                # Many share the machine: what takes its time may take it twice.
                given_s = _OURS_LIMIT_S if name == OURS else 2 * self.options.peer_limit
                if (name, job.kind.value) not in self.gave_up:
                    try:
                        worker.ask("prepare", job, limit_s=min(given_s, self._left_s()))
                    except TookTooLong:
                        if name != OURS and given_s <= self._left_s():
                            self._give_up(name, job, given_s)
                    except Exception:  # said where the row is measured
                        pass
                done()
        finally:
            worker.close()

    def _give_up(self, name: str, request: Request, limit_s: float) -> str:
        """A compiler that does not end for one shape seldom ends for the next."""
        text = f"did not compile and run in {limit_s:.0f} s"
        self.gave_up[name, request.kind.value] = f"{text} ({request.workload.name})"
        return text

    def _left_s(self) -> float:
        limit = self.options.stop_after
        return float("inf") if limit is None else limit - (time.monotonic() - self.begin)

    def _rows(self, results: Results, requests: Sequence[Request]) -> list[dict[str, Any]]:
        done: list[dict[str, Any]] = []
        lines = _Lines(self.peers, requests)
        self.console.print(lines.heading(), style="bold", soft_wrap=True, highlight=False)
        with progress() as bars:
            bar = bars.add_task("measuring", total=len(requests))
            for request in requests:
                label = f"{request.kind.value} {request.element.value} {request.workload.name}"
                bars.update(bar, description=label)
                wanted = results.todo(request)
                for names in self._groups(wanted):
                    if self._left_s() <= 0:
                        self.stopped = True
                        self.console.print("Out of time: the rest can go on with --resume.")
                        return done
                    results.note(request, self._ask(request, names))
                row = results.row(request)
                done.append(row)
                if wanted:
                    self.console.print(lines.line(row), soft_wrap=True, highlight=False)
                bars.advance(bar)
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
            tried = reason.endswith(f"({request.workload.name})")
            return {names[0]: {"error": reason if tried else f"not tried: {reason}"}}
        try:
            made: dict[str, dict[str, Any]] = worker.ask(
                "measure", replace(request, names=names), limit_s=min(limit_s, self._left_s())
            )
            return made
        except TookTooLong:
            if limit_s > self._left_s():  # the end of the run, not the peer's fault
                return {}
            return {name: {"error": self._give_up(name, request, limit_s)} for name in names}
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
                results.note_host(name, self.workers[OURS].ask("host", one, limit_s=limit_s))
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
        headings = ("case", "element", "share", "kind", "variant")
        table = new_table("Lowest share by case", *headings, right=("share",))
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
        if busy(done):
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
        self._chain = any(request.chain for request in requests)
        self._case = max(len("case"), *(len(request.workload.name) for request in requests))
        self._kind = max(len("kind"), *(len(request.kind.value) for request in requests))

    def heading(self) -> str:
        peers = "".join(f"{name + ' µs':>14}{'×':>9}" for name in self._peers)
        chain = f"{'in a row µs':>13}{'share':>7}" if self._chain else ""
        return (
            f"{'kind':<{self._kind}}  {'':<4}  {'case':<{self._case}}{'floor µs':>11}"
            f"{'ours µs':>11}{'share':>7}{chain}{peers}  variant"
        )

    def line(self, row: dict[str, Any]) -> str:
        head = f"{row['kind']:<{self._kind}}  {row['element']:<4}  {row['case']:<{self._case}}"
        chain = f"{'':>20}" if self._chain else ""
        if row["error"]:
            ours, end = f"{'':>29}{chain}", f"[red]{escape(row['error'])}[/]"
        elif row["ms"] is None:
            ours, end = f"{'':>29}{chain}", ""
        else:
            floor, time_us = 1e3 * row["floor_ms"], 1e3 * row["ms"]
            if self._chain and row.get("chain_ms"):
                chain = f"{1e3 * row['chain_ms']:>13.1f}{row['chain_share']:>7.0%}"
            ours = f"{floor:>11.1f}{time_us:>11.1f}{row['share']:>7.0%}{chain}"
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
