"""Clocks and copy bandwidth, for a CPU and for a GPU."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..threads import get_num_threads
from .lazy import needed

__all__ = [
    "BLOCK_S",
    "Effort",
    "Others",
    "Timing",
    "chain_sets",
    "cpu_copy_bandwidth",
    "cpu_samples",
    "cuda_chain_samples",
    "cuda_copies",
    "cuda_copies_chained",
    "cuda_copy_bandwidth",
    "cuda_copy_s",
    "cuda_samples",
    "medians",
    "wall_samples",
]

Call = Callable[[], object]

# Long enough for the spinning threads of the one before to go to sleep.
_SETTLE_S = 0.003
BLOCK_S = 0.01
_COPY_ELEMENTS = 4 * 2048 * 2048

_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_COPIES_MIB = (64, 128, 192, 256, 384, 512, 1024)

# Launches one after the other go round sets of arrays: when a set comes again, several times the
# L2 has been read and written since.
_CHAIN_BYTES = 512 << 20
_CHAIN_SETS = (2, 64)
_CHAIN_LAUNCHES = 256
_CHAIN_REPEATS = 5


@dataclass(frozen=True)
class Effort:
    """How long to measure: so much time a row, or exactly so many repetitions."""

    time_ms: float = 100.0
    repeats: int | None = None

    def count(self, one_ms: float, fewest: int = 3, most: int = 100) -> int:
        """Repetitions of something that takes so long."""
        if self.repeats is not None:
            return self.repeats
        return min(most, max(fewest, round(self.time_ms / max(one_ms, 1e-6))))


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, the least, and where the middle three fifths lie."""

    ms: float
    ms_min: float
    ms_p20: float
    ms_p80: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ms = sorted(1e3 * s for s in seconds)
        last = len(ms) - 1
        p20, p80 = ms[round(0.2 * last)], ms[round(0.8 * last)]
        return cls(statistics.median(ms), ms[0], p20, p80, len(ms))

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def cpu_samples(
    calls: Mapping[str, Call],
    rounds: int,
    block_s: float = BLOCK_S,
    settle: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call on the host, taken in turns; `settle` waits for a device.

    A turn settles, runs one call unclocked, then clocks a block of calls; turns alternate their
    order, so that a slow spell of the machine meets everyone.
    """
    blocks = {name: _calls_in_block(call, block_s) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for name in order:
            call, count = calls[name], blocks[name]
            if settle is not None:
                settle()
            time.sleep(_SETTLE_S)
            call()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - begin) / count)
    return samples


def medians(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns."""
    samples = cpu_samples(calls, rounds)
    return {name: statistics.median(times) for name, times in samples.items()}


def _calls_in_block(call: Call, block_s: float) -> int:
    call()
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < block_s:
        call()
        count += 1
    return max(1, round(count * block_s / spent))


class Others:
    """How many cores other processes have kept busy since this was made."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float:
        """Busy time that is not ours, over elapsed time; 0 where /proc does not tell."""
        elapsed, busy, own = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return max(0.0, busy - own) / elapsed

    @staticmethod
    def _read() -> tuple[float, float, float]:
        times = os.times()
        busy = 0.0
        with suppress(OSError):
            # user nice system idle iowait irq softirq steal
            ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
            busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, sum(times[:4])


def cpu_copy_bandwidth(
    rounds: int, elements: int = _COPY_ELEMENTS, *, with_torch: bool = True
) -> float:
    """Bytes per second, read and written, of the fastest plain copy with all threads."""
    threads = get_num_threads()
    source, target = np.ones(elements, np.float32), np.ones(elements, np.float32)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        calls: dict[str, Call] = {
            "numpy": lambda: list(pool.map(lambda pair: np.copyto(*pair), parts))
        }
        if with_torch:
            torch = needed("torch")
            lent, taken = torch.from_numpy(source), torch.from_numpy(target)
            calls["torch"] = lambda: taken.copy_(lent)
        times = medians(calls, rounds)
    return 2 * source.nbytes / min(times.values())


def cuda_samples(call: Call, effort: Effort) -> list[float]:
    """Seconds of each repetition on the device, by events, each with cold caches.

    Every repetition first writes a buffer several times the L2. It does so twice: meanwhile the
    host gets ahead, so that a caller with a slow host side is not charged for gaps.
    """
    torch = needed("torch")
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def repeat(count: int) -> list[float]:
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        for begin, end in marks:
            flush.zero_()
            flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in marks]

    call()
    torch.cuda.synchronize()
    count = effort.count(1e3 * statistics.median(repeat(3)))
    repeat(count // 4)  # the clocks of the device settle
    return repeat(count)


def chain_sets(nbytes: int) -> int:
    """How many sets of so many bytes a chain of launches goes round; 0 where the L2 would hold
    all that there may be."""
    fewest, most = _CHAIN_SETS
    count = min(most, max(fewest, -(-_CHAIN_BYTES // max(nbytes, 1))))
    return count if count * nbytes >= _FLUSH_BYTES else 0


def cuda_chain_samples(calls: Sequence[Call], effort: Effort) -> list[float]:
    """Seconds a call on the device where they follow one another, taking turns, by events around
    them all.

    What it costs to begin and to end, which `cuda_samples` counts in full, is shared by all calls
    or hidden behind the one before. While a buffer is written the host gets ahead.
    """
    torch = needed("torch")
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def chain(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):
            flush.zero_()
        begin.record()
        for k in range(count):
            calls[k % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        return float(1e-3 * begin.elapsed_time(end) / count)

    one = chain(len(calls))  # each for the first time
    share = replace(effort, time_ms=effort.time_ms / (2 * _CHAIN_REPEATS))
    rounds = -(-share.count(1e3 * one, fewest=1, most=_CHAIN_LAUNCHES) // len(calls))
    count = rounds * len(calls)
    chain(count)  # the clocks of the device settle
    return [chain(count) for _ in range(_CHAIN_REPEATS if effort.repeats is None else 1)]


def wall_samples(call: Call, wait: Callable[[object], object], effort: Effort) -> list[float]:
    """Seconds a call by the wall clock, over batches of calls that are waited for at their end."""

    def batch(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        wait(result)
        return (time.perf_counter() - begin) / count

    wait(call())
    one = batch(3)
    size = effort.count(10 * 1e3 * one, fewest=1)  # ten batches share the time
    return [batch(size) for _ in range(10 if effort.repeats is None else 3)]


def cuda_copy_s(nbytes: int) -> float:
    """Seconds of a plain copy that moves so many bytes, read and written."""
    torch = needed("torch")
    source = torch.zeros(nbytes // 2, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return statistics.median(cuda_samples(lambda: target.copy_(source), Effort(repeats=30)))


def cuda_copy_bandwidth(device: str = "cuda") -> float:
    """Bytes per second, read and written, of a copy far larger than the L2."""
    torch = needed("torch")
    with torch.cuda.device(torch.device(device)):
        return 2 * _COPY_BYTES / cuda_copy_s(2 * _COPY_BYTES)


def cuda_copies() -> dict[str, float]:
    """Milliseconds of copies that move so many MiB: what launching takes shows in short ones."""
    return {str(mib): 1e3 * cuda_copy_s(mib << 20) for mib in _COPIES_MIB}


def cuda_copies_chained() -> dict[str, float]:
    """Milliseconds of the same copies, one after the other."""
    torch = needed("torch")
    made = {}
    for mib in _COPIES_MIB:
        nbytes = mib << 20
        memory = torch.zeros(chain_sets(nbytes), 2, nbytes // 2, dtype=torch.int8, device="cuda")
        calls = [partial(target.copy_, source) for target, source in memory]
        made[str(mib)] = 1e3 * statistics.median(cuda_chain_samples(calls, Effort(time_ms=20.0)))
    return made
