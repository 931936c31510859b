"""`gradplan.torch` beside torch eager and torch.compile: backward, forward + backward, memory.

    python benchmarks/torch_front.py --json results.json            # resumes what is there
    python benchmarks/torch_front.py --table results.json           # markdown, and missed targets
    python benchmarks/torch_front.py --device cpu --quick           # does it run at all

Every contender runs in a process of its own, and a problem that takes it too long (torch.compile
spends minutes on some scans) ends that process alone. Device times are medians with cold caches;
small tensors are timed on the host, by the wall clock, ours and torch's own in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

from gradplan.bench.forwards import _TORCH as FORWARDS
from gradplan.bench.forwards import VIEW_KINDS
from gradplan.registry import KINDS

CONTENDERS = ("ours", "eager", "compile", "ours_compiled")
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "log_cumsum_exp")
THREE_TIMES = {*SCANS, "max", "min", "prod", "norm2", "log_sum_exp", "var", "std", "embedding"}
SMALL_FASTER = ("log_cumsum_exp", "std", "prod", "cumprod")
SMALL_SOFTMAX_US = 20.0
_START_S = 120.0
_NOT_FINISHED = "did not finish"


@dataclass(frozen=True)
class Problem:
    """A kind on one shape; embeddings read (rows, columns, indices)."""

    kind: str
    case: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    draw: str = "uniform"
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.case} {self.dtype}"


def problems(quick: bool) -> Iterator[Problem]:
    """The shapes of PEERS.md; in quick mode some like them."""
    n, long = (64, 4096) if quick else (8192, 1 << 20)
    kinds = [spec.kind.value for spec in KINDS.values() if spec.kind.value not in VIEW_KINDS]
    for dtype in ("bfloat16", "float32"):
        for kind in kinds:
            if kind == "lerp":
                yield Problem(kind, "flat", (n * n,), 0, dtype)
            elif kind != "embedding":
                yield Problem(kind, "rows", (n, n), 1, dtype)
        for kind in ("softmax", "log_softmax", *SCANS):
            yield Problem(kind, "columns", (n, n), 0, dtype)
            yield Problem(kind, "long", (64, long), 1, dtype)
        tables = (
            ((1000, 64, 500), (300, 32, 900))
            if quick
            else (
                (128256, 4096, 32768),
                (50304, 768, 262144),
            )
        )
        for case, shape, draw in (
            ("large_uniform", tables[0], "uniform"),
            ("large_zipf", tables[0], "zipf"),
            ("small_zipf", tables[1], "zipf"),
            ("small_same", tables[1], "same"),
        ):
            yield Problem("embedding", case, shape, 0, dtype, draw)
    for kind in kinds:
        if kind != "embedding":
            yield Problem(kind, "small", (16, 128), 1, "float32", small=True)


def _inputs(problem: Problem, device: str) -> tuple[list[Any], list[Any]]:
    """(tensors of the forward, leaves)."""
    import torch

    dtype = getattr(torch, problem.dtype)
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    if problem.kind == "embedding":
        rows, columns, count = problem.shape
        if problem.draw == "zipf":
            weights = torch.arange(1, rows + 1, device=device, dtype=torch.float32) ** -1.2
            indices = torch.multinomial(weights, count, replacement=True, generator=random)
        elif problem.draw == "same":
            indices = torch.full((count,), 7, device=device)
        else:
            indices = torch.randint(rows, (count,), generator=random, device=device)
        table = normal(rows, columns).requires_grad_()
        return [table, indices], [table]
    tensors = [normal(*problem.shape) for _ in range(2 if problem.kind == "lerp" else 1)]
    if problem.kind in ("prod", "cumprod"):
        # Factors near 1 keep the products inside the range of the type.
        tensors[0] = (tensors[0].float() / sqrt(problem.shape[problem.axis])).exp().to(dtype)
    for tensor in tensors:
        tensor.requires_grad_()
    return tensors, tensors


def _ours() -> Any:
    """gradplan.torch under the names that the forwards use."""
    import gradplan.torch as gt

    names = {name: getattr(gt, name) for name in gt.__all__}
    functional = SimpleNamespace(embedding=gt.embedding)
    return SimpleNamespace(**names, nn=SimpleNamespace(functional=functional))


def _forward(problem: Problem, contender: str) -> Callable[[list[Any]], Any]:
    import torch

    library = _ours() if contender.startswith("ours") else torch
    function, axis = FORWARDS[problem.kind], problem.axis

    def forward(tensors: list[Any]) -> Any:
        return function(library, tensors, axis)

    if contender in ("compile", "ours_compiled"):
        torch._dynamo.reset()
        # The graph is kept for the next call, so the backward may not consume what was saved.
        with suppress(ImportError, AttributeError):
            import torch._functorch.config as config

            config.donated_buffer = False
        compiled: Callable[[list[Any]], Any] = torch.compile(forward, dynamic=False, fullgraph=True)
        return compiled
    return forward


def measure(problem: Problem, contender: str, device: str, time_ms: float) -> dict[str, Any]:
    """Times, peak memory, and how far the gradient is from torch eager's."""
    import torch

    from gradplan.bench.clocks import Effort, cpu_samples, cuda_samples

    tensors, leaves = _inputs(problem, device)
    forward = _forward(problem, contender)
    y = forward(tensors)
    dy = torch.randn(y.shape, device=device).to(y.dtype)
    cuda = device != "cpu"

    def backward() -> Any:
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    def both() -> Any:
        return torch.autograd.grad(forward(tensors), leaves, dy)

    found: dict[str, Any] = {}
    got = [one.clone() for one in backward()]
    exact = torch.autograd.grad(_forward(problem, "eager")(tensors), leaves, dy)
    found["off_eager"] = max(
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).item()
        for a, b in zip(got, exact, strict=True)
    )
    del got, exact

    if problem.small or not cuda:
        settle = torch.cuda.synchronize if cuda else None
        calls = {"both": both, "backward": backward}
        if problem.small and contender == "ours":
            # torch's own in turns with it: spells of a shared host are longer than these calls.
            theirs = _forward(problem, "eager")
            plain = theirs(tensors)
            calls["eager both"] = lambda: torch.autograd.grad(theirs(tensors), leaves, dy)
            calls["eager backward"] = lambda: torch.autograd.grad(
                plain, leaves, dy, retain_graph=True
            )
        samples = cpu_samples(calls, 41 if problem.small else 15, settle=settle)
    else:
        effort = Effort(time_ms=time_ms)
        samples = {"both": cuda_samples(both, effort), "backward": cuda_samples(backward, effort)}
    for name, seconds in samples.items():
        found[f"{name.replace(' ', '_')}_ms"] = 1e3 * statistics.median(seconds)
    if cuda:
        del y
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def _serve(contender: str, device: str, time_ms: float) -> None:
    """Answer problems, one a line, until there are no more."""
    import torch

    answers = sys.stdout
    sys.stdout = sys.stderr
    if device != "cpu":
        torch.zeros(1, device=device)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        problem = Problem(**{**given, "shape": tuple(given["shape"])})
        try:
            found = measure(problem, contender, device, time_ms)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:200]}
        if device != "cpu":
            torch.cuda.empty_cache()
        print(json.dumps(found), file=answers, flush=True)


class Worker:
    """A contender's process; lost and started again where it takes too long or dies."""

    def __init__(self, contender: str, device: str, time_ms: float) -> None:
        self._command = [
            sys.executable,
            __file__,
            *("--serve", contender, "--device", device, "--time-ms", str(time_ms)),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._lines: Queue[str | None] = Queue()

    def ask(self, problem: Problem, limit_s: float) -> dict[str, Any]:
        try:
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(problem.__dict__) + "\n")
            self._process.stdin.flush()
            answer = self._lines.get(timeout=limit_s)
        except Empty:
            self.close()
            return {"error": f"{_NOT_FINISHED} in {limit_s:.0f} s"}
        except OSError:
            answer = None
        if answer is None:
            self.close()
            return {"error": "its process died"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: Queue[str | None] = Queue()
        self._lines = lines

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        if lines.get(timeout=_START_S) is None:
            raise OSError("it did not start")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def prepare(
    options: argparse.Namespace, chosen: Sequence[Problem], rows: dict[str, dict[str, Any]]
) -> None:
    """Let all who compile do so, in many processes: what they leave in caches is found later.

    Who does not end is noted, and not asked again.
    """
    # As many compilers run side by side as were asked for: each keeps to one core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    jobs = deque(
        (name, problem)
        for name in options.contenders[::-1]
        for problem in chosen
        if name != "eager" and name not in rows.get(problem.name, {})
    )
    begin, count = time.monotonic(), len(jobs)

    def work(_: int) -> None:
        workers = {name: Worker(name, options.device, 1.0) for name in options.contenders}
        try:
            while jobs:
                try:
                    name, problem = jobs.popleft()
                except IndexError:  # another took the last
                    return
                # Many share the machine: what takes its time may take it twice.
                found = workers[name].ask(problem, 2 * options.limit_s)
                if found.get("error", "").startswith(_NOT_FINISHED):
                    rows.setdefault(problem.name, {**problem.__dict__})[name] = found
        finally:
            for worker in workers.values():
                worker.close()

    with ThreadPoolExecutor(options.prepare) as pool:
        list(pool.map(work, range(options.prepare)))
    print(f"compiled {count} in {time.monotonic() - begin:.0f} s", flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    path = Path(options.json) if options.json else None
    results: dict[str, Any] = {"device": options.device, "rows": {}}
    if path is not None and path.exists():
        results = json.loads(path.read_text())
    results.update(_machine(options.device))
    chosen = [
        problem
        for problem in problems(options.quick)
        if not options.only or any(word in problem.name for word in options.only)
    ]
    if options.prepare:
        prepare(options, chosen, results["rows"])
    workers = {name: Worker(name, options.device, options.time_ms) for name in options.contenders}
    try:
        for problem in chosen:
            row = results["rows"].setdefault(problem.name, {**problem.__dict__})
            for name, worker in workers.items():
                if name in row:
                    continue
                row[name] = worker.ask(problem, options.limit_s)
                print(f"{problem.name:36} {name:14} {row[name]}", flush=True)
                if path is not None:
                    path.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        for worker in workers.values():
            worker.close()
    return results


def _machine(device: str) -> dict[str, Any]:
    import torch

    import gradplan

    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    return {"machine": name, "torch": torch.__version__, "gradplan": gradplan.__version__}


def table(results: dict[str, Any]) -> str:
    """Markdown of all rows, then what misses a target."""
    shown = [one for one in CONTENDERS if any(one in row for row in results["rows"].values())]
    head = ("problem", *(f"{what} {name}" for what in ("bwd", "fwd+bwd") for name in shown))
    lines = [
        f"{results.get('machine')}, torch {results.get('torch')}; ms, and our speed-up in brackets",
        "",
        f"| {' | '.join(head)} |",
        f"| --- {'| ---: ' * (len(head) - 1)}|",
    ]
    for name, row in results["rows"].items():
        cells = [name + (" *" if "earlier" in row else "")]
        for what in ("backward_ms", "both_ms"):
            ours = row.get("ours", {}).get(what)
            for contender in shown:
                found = row.get(contender, {})
                ms = found.get(what)
                if contender == "eager":  # in turns with ours, where that was done
                    ms = row.get("ours", {}).get(f"eager_{what}", ms)
                if ms is None:
                    cells.append(_fault(found.get("error", "")))
                elif contender == "ours" or ours is None:
                    cells.append(f"{ms:.3f}")
                else:
                    cells.append(f"{ms:.3f} ({ms / ours:.1f} ×)")
        lines.append(f"| {' | '.join(cells)} |")
    earlier = sorted({row["earlier"] for row in results["rows"].values() if "earlier" in row})
    if earlier:
        lines += ["", f"\\* Taken with an earlier tree: {', '.join(earlier)}."]
    missed = list(misses(results))
    lines += ["", "Targets missed:", "", *(f"- {text}" for text in missed or ["none"])]
    return "\n".join(lines)


def _fault(error: str) -> str:
    """What a cell says of a contender without a time."""
    return error if error.startswith("did not finish") else "failed" if error else ""


def misses(results: dict[str, Any]) -> Iterator[str]:
    """Where a target of the front end is missed."""
    for name, row in results["rows"].items():
        ours, eager = row.get("ours", {}), row.get("eager", {})
        name += " *" if "earlier" in row else ""
        if "error" in ours:
            yield f"{name}: ours failed: {ours['error']}"
        if "backward_ms" not in ours:
            continue
        if row["small"]:
            beside = ours.get("eager_both_ms", eager.get("both_ms", float("inf")))
            over = 1e3 * (ours["both_ms"] - beside)
            if row["kind"] == "softmax" and over > SMALL_SOFTMAX_US:
                yield f"{name}: {over:.0f} µs above eager, forward + backward"
            if row["kind"] in SMALL_FASTER and over > 0:
                yield f"{name}: {over:.0f} µs slower than eager, forward + backward"
            continue
        for peer in ("eager", "compile"):
            ms = row.get(peer, {}).get("backward_ms")
            if ms is not None and ours["backward_ms"] > 1.03 * ms:
                yield f"{name}: backward {ours['backward_ms'] / ms:.2f} × the time of {peer}"
        tripled = row["kind"] in THREE_TIMES or (row["kind"], row["case"]) == ("softmax", "columns")
        ms = eager.get("backward_ms")
        if tripled and ms is not None and ms < 3 * ours["backward_ms"]:
            yield f"{name}: backward only {ms / ours['backward_ms']:.2f} × faster than eager"
        peak = eager.get("peak_bytes")
        if peak is not None and ours.get("peak_bytes", 0) > peak + (1 << 20):
            yield f"{name}: peak memory {ours['peak_bytes'] / peak:.2f} × eager's"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="where results are kept; those there are not taken again")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS[:3])
    parser.add_argument("--only", nargs="+", help="problems whose name contains one of these")
    parser.add_argument("--limit-s", type=float, default=30.0, help="a problem, a contender")
    parser.add_argument("--time-ms", type=float, default=50.0, help="measuring, a number")
    parser.add_argument(
        "--prepare", type=int, metavar="N", help="first compile everything in N processes at once"
    )
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--table", metavar="JSON", help="print the table of earlier results")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve, options.device, options.time_ms)
    elif options.table:
        print(table(json.loads(Path(options.table).read_text())))
    else:
        print(table(run(options)))


if __name__ == "__main__":
    main()
