"""Clocks, memory counters and the machine's own figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import gradplan as gp
from gradplan.bench.clocks import Others, medians
from gradplan.bench.clocks import cpu_copy_bandwidth as copy_bandwidth

__all__ = [
    "Others",
    "copy_bandwidth",
    "l3_bytes",
    "machine",
    "medians",
    "peak_extra_bytes",
]

Call = Callable[[], object]


def peak_extra_bytes(call: Call) -> tuple[int, int | None]:
    """The peak beyond what was held before: as allocators tell it, and as resident memory.

    Resident memory also shows native allocations, in steps of some hundred KiB; None where the
    kernel does not let a process reset its high-water mark.
    """
    call()
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    call()
    traced = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return traced, None
    resident = _status_bytes("VmRSS")
    call()
    return traced, max(0, _status_bytes("VmHWM") - resident)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def l3_bytes() -> int:
    """The size of the last cache, or 0 where /sys does not tell."""
    with suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]
    return 0


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    packages = ("numpy", "numba", "llvmlite", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "l3_bytes": l3_bytes(),
        "load_average": os.getloadavg(),
        "threads": {"gradplan": gp.get_num_threads(), "torch": torch.get_num_threads()},
        "python": platform.python_version(),
        "versions": {"gradplan": gp.__version__, **versions},
    }
