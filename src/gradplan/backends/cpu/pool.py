"""A small thread pool of our own.

Numba's threading layers each fail someone: one aborts when two Python threads launch at once,
one dies in a forked child. Here workers are plain Python threads inside native code with the
GIL released; they watch for work for some microseconds after a job, then sleep. A launch that
finds the pool taken by another thread does its work alone: the bits are the same. A forked child
starts with a new, empty pool. Small problems never come here.
"""

from __future__ import annotations

import os
import threading
from array import array
from queue import SimpleQueue

from ...threads import get_num_threads
from .jit import Kernel, kernel

__all__ = ["parallel"]

# Looks before a worker goes to sleep. A guess, not tuned: tens of microseconds on the CPU at hand.
_PATIENCE = 4000


class _Pool:
    def __init__(self) -> None:
        from .kernels import layout as at

        self.at = at
        self.busy = threading.Lock()
        self.control = array("q", bytes(8 * (at.WORDS + 8)))
        address = self.control.buffer_info()[0]
        self.shift = -(address // 8) % 8  # to a cache line
        self.address = address + 8 * self.shift
        self.caller = _native("caller")
        self.worker = _native("worker")
        self.beds: list[SimpleQueue[None]] = []
        self.asleep: list[bool] = []

    def grow(self, workers: int) -> int:
        """Have so many workers, or as many as the system allows; tells how many there are."""
        while len(self.beds) < workers:
            slot = len(self.beds) + 1
            self.beds.append(SimpleQueue())
            self.asleep.append(False)
            name = f"gradplan-{slot}"
            worker = threading.Thread(target=self.serve, args=(slot,), name=name, daemon=True)
            try:
                worker.start()
            except RuntimeError:  # at the limit of threads, or while Python shuts down
                self.beds.pop()
                self.asleep.pop()
                break
        return min(workers, len(self.beds))

    def serve(self, slot: int) -> None:
        is_open = self.shift + self.at.OPEN
        while True:
            self.worker(self.address, slot, _PATIENCE, 0)
            self.asleep[slot - 1] = True
            if not self.control[is_open]:
                self.beds[slot - 1].get()
            self.asleep[slot - 1] = False

    def run(self, work: Kernel, call: int, units: int, grain: int, threads: int) -> None:
        threads = 1 + self.grow(threads - 1)
        control, at, shift = self.control, self.at, self.shift
        control[shift + at.FUNCTION] = work.address
        control[shift + at.CALL] = call
        control[shift + at.UNITS] = units
        control[shift + at.GRAIN] = grain
        control[shift + at.LIMIT] = threads
        for slot in range(threads - 1):
            if self.asleep[slot]:
                self.asleep[slot] = False
                self.beds[slot].put(None)
        self.caller(self.address, 0, 0, 0)


def _native(name: str) -> Kernel:
    def build():  # type: ignore[no-untyped-def]
        from .kernels import teamwork

        return getattr(teamwork, f"build_{name}")()

    return kernel(f"teamwork_{name}", build)


_pool: _Pool | None = None
_making = threading.Lock()


def _forget() -> None:
    global _pool, _making
    _pool, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def parallel(work: Kernel, call: int, units: int, grain: int) -> None:
    """Run all units of `work`, by as many threads as there are, `grain` units at a time."""
    global _pool
    threads = min(get_num_threads(), -(-units // grain))
    if threads < 2:
        work(call, 0, 0, units)
        return
    pool = _pool
    if pool is None:
        with _making:
            if _pool is None:
                _pool = _Pool()
            pool = _pool
    if not pool.busy.acquire(blocking=False):
        work(call, 0, 0, units)
        return
    try:
        pool.run(work, call, units, grain, threads)
    finally:
        pool.busy.release()
