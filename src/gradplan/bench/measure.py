"""One row: build the problem, check ours and the peers, time what is right.

These functions run in a worker process (`workers`), and take and return plain data.
"""

from __future__ import annotations

import gc
import os
import platform
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .. import functions
from ..backends import find
from ..backends.gpu.table import Table, using
from ..cases import describe
from ..errors import KernelFailure, Unsupported
from ..geometry import told_strides
from ..kinds import ElementKind, Named, OpCategory, SoftmaxKind
from ..plans import SoftmaxBackwardPlan
from ..registry import KINDS
from ..sku import PlanPreference
from ..threads import get_num_threads
from . import clocks
from .clocks import Effort, Timing
from .lazy import needed, version_of
from .oracle import check
from .peers import PEERS, Prepared, tolerance
from .problems import Problem, build, floor_bytes, posed
from .workloads import Workload, strides_of

__all__ = ["OURS", "Request", "about", "host", "measure", "prepare"]

OURS = "ours"
_PACKAGES = ("torch", "triton", "jax", "numpy", "numba", "flag_gems")
# The oracle of f64 is extended precision, which a GPU has not: its own rounding is allowed for.
_ORACLE_F64 = 4.0
# A peer's error that a reader of its time should know.
_WORTH_TELLING = 0.1
_HOST_SHAPE = (8, 8)
_HOST_BLOCK_S = 0.002


@dataclass(frozen=True)
class Request:
    """One row, and whom to measure on it: `OURS`, or names of peers.

    Ours is what `preference` asks for, with other thresholds where a `table` is given, and on a
    GPU timed in a `chain` of launches too where that is asked for.
    """

    category: OpCategory
    kind: Named
    element: ElementKind
    workload: Workload
    device: str
    names: tuple[str, ...]
    effort: Effort = field(default_factory=Effort)
    preference: PlanPreference = field(default_factory=PlanPreference)
    table: Table | None = None
    chain: bool = False


class _Wrong(Exception):
    """A result that is not worth timing."""


def about(device: str, effort: Effort) -> dict[str, Any]:
    """The machine, the versions and the copy bandwidth; `Unsupported` where ours cannot run."""
    torch = _settle(device)
    spec = KINDS[OpCategory.SOFTMAX, SoftmaxKind.SOFTMAX]
    SoftmaxBackwardPlan.select(describe(spec, ElementKind.F32, _HOST_SHAPE, (1,)), device=device)
    versions = {"python": platform.python_version()}
    versions |= {name: found for name in _PACKAGES if (found := version_of(name))}
    if device == "cpu":
        rounds = effort.repeats or 15
        return {
            "device": _cpu(),
            "versions": versions,
            "copy_bandwidth": clocks.cpu_copy_bandwidth(rounds),
        }
    if not torch.cuda.is_available():
        raise Unsupported(f"device {device!r}: torch finds no CUDA device on this machine")
    found = torch.cuda.get_device_properties(torch.device(device))
    return {
        "device": {
            "name": found.name,
            "arch": f"sm_{found.major}{found.minor}",
            "driver": _driver(),
            "memory": found.total_memory,
        },
        "versions": versions | {"cuda": torch.version.cuda},
        "copy_bandwidth": clocks.cuda_copy_bandwidth(),
        "copies_ms": clocks.cuda_copies(),
        "copies_chain_ms": clocks.cuda_copies_chained(),
    }


def _settle(device: str) -> Any:
    """torch, set up for measuring."""
    torch = needed("torch")
    warnings.filterwarnings("ignore", module="torch")
    if device == "cpu":
        torch.set_num_threads(get_num_threads())
    elif ":" in device:
        torch.cuda.set_device(torch.device(device))
    return torch


def _cpu() -> dict[str, Any]:
    name, memory = platform.processor() or platform.machine(), None
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
        memory = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pass
    threads = get_num_threads()
    return {
        "name": name,
        "arch": platform.machine(),
        "driver": None,
        "memory": memory,
        "threads": threads,
    }


def _driver() -> str | None:
    """The version of the kernel module, as it tells it itself."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), None)


def measure(request: Request) -> dict[str, dict[str, Any]]:
    """What came of each name: a timing, or an "error" or "note" that says why there is none."""
    torch = _settle(request.device)
    made: dict[str, dict[str, Any]] = {}
    try:
        problem = build(
            KINDS[request.category, request.kind],
            request.element,
            request.workload,
            request.device,
        )
        made = _measure(problem, request)
    finally:
        problem = None  # type: ignore[assignment]
        gc.collect()
        if request.device != "cpu":
            with suppress(Exception):  # where the context is lost, the error of the row stands
                torch.cuda.empty_cache()
    return made


def _measure(problem: Problem, request: Request) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    ready: dict[str, Prepared] = {}
    after: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in request.names:
        try:
            if name == OURS:
                ready[name], after[name], made[name] = _ours(problem, request)
            else:
                ready[name], made[name] = _peer(problem, name)
        except Exception as error:
            made[name] = {"error": _text(error)}
    try:
        others = clocks.Others()
        for name, timing in _time(ready, request).items():
            made[name] |= timing.plain()
        if OURS in ready and request.device == "cpu":
            made[OURS]["other_cores"] = others.cores()
    except Exception as error:
        for name in ready:
            if "ms" not in made[name]:
                made[name]["error"] = _text(error)
    for name, again in after.items():
        try:
            made[name] |= again()
        except Exception as error:
            made[name] = {"error": _text(error)}
    return made


def _text(error: Exception) -> str:
    if isinstance(error, _Wrong):
        return str(error)
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}"[:300]


def _synchronize(problem: Problem) -> None:
    if problem.device != "cpu":
        needed("torch").cuda.synchronize()


def _thresholds(request: Request) -> AbstractContextManager[None]:
    if request.table is None:
        return nullcontext()
    return using(find(request.device, request.preference).arch, request.table)


def _ours(
    problem: Problem, request: Request
) -> tuple[Prepared, Callable[[], dict[str, Any]], dict[str, Any]]:
    """A bound launch whose result is within its guarantee, and what is done after the timing: a
    look at the result, and the time in a chain."""
    torch = needed("torch")
    with _thresholds(request):
        plan = problem.plan(request.preference)
        launch = plan.bind(problem.args())
    problem.poison()
    launch()
    _synchronize(problem)
    guarantee = plan.precision_guarantee.relative_error
    allowed = guarantee * (_ORACLE_F64 if problem.desc.element is ElementKind.F64 else 1.0)
    errors = check(problem, problem.outputs)
    if not errors.worst <= allowed:
        raise _Wrong(
            f"wrong: relative error {errors.worst:.3g} is above the guarantee {guarantee:.3g}"
        )
    kept = {name: output.clone() for name, output in problem.outputs.items()}
    problem.poison()

    def unchanged(outputs: dict[str, Any], when: str) -> None:
        # What a launch leaves behind in its workspace must not change the next one.
        _synchronize(problem)
        for name, output in outputs.items():
            if not torch.equal(output, kept[name]):
                raise _Wrong(f"wrong: {name} differs {when}")

    def again() -> dict[str, Any]:
        unchanged(problem.outputs, "after many launches")
        count = clocks.chain_sets(problem.nbytes) if request.chain else 0
        if not count:
            return {}
        try:
            others = [problem.twin() for _ in range(count - 1)]
            with _thresholds(request):
                launches = [launch, *(plan.bind(other.args()) for other in others)]
        except (torch.OutOfMemoryError, KernelFailure):  # no memory: the row stands without it
            return {}
        seconds = clocks.cuda_chain_samples(launches, request.effort)
        for one in (problem, *others):
            unchanged(one.outputs, "where launches follow one another")
        return {"chain_ms": 1e3 * median(seconds)}

    sku = launch.sku
    about_it = {
        "variant": f"{sku.layout}/{sku.variant}",
        "backend": sku.backend.value,
        "floor_bytes": floor_bytes(problem.desc, problem.workload.without),
        "relative_error": errors.worst,
        "guarantee": guarantee,
    }
    return Prepared(launch, lambda made: []), again, about_it


def _peer(problem: Problem, name: str) -> tuple[Prepared, dict[str, Any]]:
    prepared = PEERS[name].prepare(problem)
    with prepared.around():
        tensors = prepared.tensors(prepared.call())
        _synchronize(problem)
    found = dict(zip(problem.outputs, tensors, strict=True))
    errors = check(problem, found)
    if not errors.total <= tolerance(problem.desc.element):
        raise _Wrong(f"wrong: its relative error is {errors.total:.3g}")
    notes = [prepared.note] if prepared.note else []
    if errors.total > _WORTH_TELLING:
        notes.append(f"relative error {errors.total:.2g}")
    return prepared, {"relative_error": errors.total, "note": "; ".join(notes) or None}


def _time(ready: dict[str, Prepared], request: Request) -> dict[str, Timing]:
    effort = request.effort
    if request.device == "cpu":
        block_s = min(clocks.BLOCK_S, 1e-4 * effort.time_ms)
        calls = {name: _waited(prepared) for name, prepared in ready.items()}
        rounds = effort.count(1e3 * block_s, most=15)
        with ExitStack() as stack:
            for prepared in ready.values():
                stack.enter_context(prepared.around())
            samples = clocks.cpu_samples(calls, rounds, block_s)
        return {name: Timing.of(seconds) for name, seconds in samples.items()}
    made = {}
    for name, prepared in ready.items():
        with prepared.around():
            if prepared.wait is not None:
                seconds = clocks.wall_samples(prepared.call, prepared.wait, effort)
            else:
                seconds = clocks.cuda_samples(prepared.call, effort)
        made[name] = Timing.of(seconds)
    return made


def _waited(prepared: Prepared) -> Callable[[], object]:
    wait = prepared.wait
    return prepared.call if wait is None else lambda: wait(prepared.call())


def prepare(request: Request) -> None:
    """Compile what a row needs, for ours or for the one peer that is named, into caches on disk."""
    (name,) = request.names
    if name == OURS:
        _compile(request)
    else:
        _run_once(request, name)


def _run_once(request: Request, name: str) -> None:
    """A peer compiles what it runs."""
    # As many compilers run side by side as were asked for: each keeps to one core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch = _settle(request.device)
    spec = KINDS[request.category, request.kind]
    problem = build(spec, request.element, request.workload, request.device)
    prepared = PEERS[name].prepare(problem)
    with prepared.around():
        prepared.tensors(prepared.call())
        _synchronize(problem)
    del problem, prepared
    gc.collect()
    if request.device != "cpu":
        torch.cuda.empty_cache()


def _compile(request: Request) -> None:
    """The kernels of a row, without its arrays."""
    from ..backends.gpu.launch import compiled

    backend = find(request.device, request.preference)
    case = request.workload
    desc, _ = posed(KINDS[request.category, request.kind], request.element, case)
    shapes = {operand.name: operand.shape for operand in desc.operands}
    strides = {
        name: told_strides(shapes[name], steps)
        for name, steps in strides_of(desc, case.layout, case.without).items()
    }
    with _thresholds(request):
        program: Any = backend.prepare(desc, strides)
    for step in program.steps:
        compiled(step, 16, int(backend.arch.removeprefix("sm_")))


def host(request: Request) -> dict[str, float]:
    """Microseconds of the host for a bound launch, `plan.run` and the function, on 8 × 8."""
    _settle(request.device)
    shape = (8, 8, 8) if request.category is OpCategory.EMBEDDING else _HOST_SHAPE
    spec = KINDS[request.category, request.kind]
    problem = build(spec, request.element, Workload("host", shape), request.device)
    if request.device == "cpu" and request.element is not ElementKind.BF16:  # NumPy has no bf16
        problem.inputs = {name: array.numpy() for name, array in problem.inputs.items()}
        problem.outputs = {name: array.numpy() for name, array in problem.outputs.items()}
    plan, args = problem.plan(), problem.args()
    function = getattr(functions, spec.function)
    calls: dict[str, Callable[[], object]] = {
        "bound": plan.bind(args),
        "run": partial(plan.run, args),
        "function": partial(function, **problem.inputs, **problem.keywords),
    }
    effort = request.effort
    # A block stays below the 1024 launches that a stream holds before the host must wait.
    block_s = min(_HOST_BLOCK_S, 1e-4 * effort.time_ms)
    wait = None if request.device == "cpu" else needed("torch").cuda.synchronize
    rounds = effort.count(10)
    samples = clocks.cpu_samples(calls, rounds, block_s, wait)
    return {name: 1e6 * median(seconds) for name, seconds in samples.items()}
