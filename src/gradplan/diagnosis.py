"""What `gradplan doctor` finds: the machine, libraries, the cache, and whether kernels are right.

The self-check runs one problem of each family where the plans would run it, poisoned memory and
float64 reference included, as `gradplan verify` does it.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import __version__, cases
from .kinds import ElementKind
from .registry import KINDS, KindSpec
from .threads import get_num_threads

__all__ = ["Check", "Library", "check", "libraries", "machine", "subjects"]


@dataclass(frozen=True)
class Library:
    """A library that gradplan can use, what for, and how to get it where it is missing."""

    name: str
    role: str
    version: str | None
    install: str


# (package, module, what it is for, how to get it)
_LIBRARIES = (
    ("numba", "numba", "CPU backend", "pip install gradplan"),
    ("triton", "triton", "GPU backend", "pip install 'gradplan[gpu]'"),
    ("torch", "torch", "GPU backend, gradplan.torch, bench", "pip install 'gradplan[torch]'"),
    ("numpy", "numpy", "arrays", "pip install gradplan"),
    ("ml_dtypes", "ml_dtypes", "bfloat16 in NumPy", "pip install gradplan"),
    ("jax", "jax", "arrays, a peer of bench", "pip install 'gradplan[jax]'"),
    ("cupy", "cupy", "arrays", "pip install 'gradplan[cupy]'"),
    ("matplotlib", "matplotlib", "bench --png", "pip install 'gradplan[bench]'"),
)


def libraries() -> list[Library]:
    """Each library with its version, without importing it."""
    return [
        Library(name, role, _version(name, module), install)
        for name, module, role, install in _LIBRARIES
    ]


def _version(package: str, module: str) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # CuPy's wheels are named after their CUDA
        return "installed"


def machine() -> dict[str, Any]:
    """Python, the processor, the GPU, threads and the cache, in what JSON knows."""
    return {
        "gradplan": __version__,
        "where": str(Path(__file__).parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu": {"arch": platform.machine(), "cores": os.cpu_count()},
        "threads": {
            "used": get_num_threads(),
            "layer": "gradplan's own pool",
            "GRADPLAN_NUM_THREADS": os.environ.get("GRADPLAN_NUM_THREADS"),
        },
        "gpu": _gpu(),
        "cache": _cache(),
    }


def _gpu() -> dict[str, Any]:
    from .backends.gpu import launch

    reason = launch.missing()
    if reason is not None:
        return {"found": False, "reason": reason}
    import torch

    index = launch.current_device()
    found = torch.cuda.get_device_properties(index)
    return {
        "found": True,
        "name": found.name,
        "arch": launch.device_arch(index),
        "multiprocessors": launch.processors(index),
        "memory": found.total_memory,
        "count": launch.device_count(),
        "cuda": torch.version.cuda,
    }


def _cache() -> dict[str, Any]:
    from .backends.cpu.jit import cache_folder

    try:
        folder = cache_folder()
    except RuntimeError as error:  # no home folder
        return {"folder": None, "writable": False, "reason": str(error), "kernels": 0, "bytes": 0}
    kernels = list(folder.glob("*/*.o")) if folder.is_dir() else []
    found: dict[str, Any] = {
        "folder": str(folder),
        "writable": True,
        "reason": None,
        "kernels": len(kernels),
        "bytes": sum(path.stat().st_size for path in kernels),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found |= {"writable": False, "reason": error.strerror or str(error)}
    return found


@dataclass(frozen=True)
class Check:
    """What came of one family on one device; `fault` says what is wrong, or is empty."""

    family: str
    kind: str
    device: str
    sku: str
    error: float | None
    guarantee: float | None
    seconds: float
    fault: str

    @property
    def ok(self) -> bool:
        return not self.fault

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def subjects(gpu: bool) -> list[tuple[KindSpec, str]]:
    """One kind of each family, its last and hardest, on each device that there is."""
    last = {spec.category: spec for spec in KINDS.values()}
    return [(spec, device) for device in ("cpu", "cuda")[: 1 + gpu] for spec in last.values()]


def check(spec: KindSpec, device: str) -> Check:
    """Run one problem, poisoned memory around it, against the float64 reference."""
    case = next(iter(cases.grid(spec, ElementKind.F32, cases.Layout.CONTIGUOUS, quick=True)))
    begin = time.perf_counter()
    sku, error, guarantee = "", None, None
    try:
        problem = cases.Problem(case)
        plan = problem.plan(device)
        sku = str(plan.sku)
        problem.run(device)
        outcome = problem.outcome(plan.precision_guarantee.relative_error)
        error, guarantee = outcome.error, outcome.guarantee
        fault = "" if outcome.ok else outcome.fault or "the error is above the guarantee"
    except Exception as caught:  # whatever it is, it is the diagnosis
        fault = f"{type(caught).__name__}: {caught}"
    took = time.perf_counter() - begin
    family, kind = spec.category.value, spec.kind.value
    return Check(family, kind, device, sku, error, guarantee, took, fault)
