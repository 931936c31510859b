"""How threads share a launch: native loops, so that handing out work costs no GIL.

A control block holds one job at a time. The caller writes it, opens it, works on it, closes it
and waits until nobody is inside. A worker announces itself (`active`) before it looks whether the
job is open, the caller closes before it looks at `active`; both are sequentially consistent, so
either the worker sees a closed job and leaves, or the caller sees the worker and waits.
"""

from __future__ import annotations

from .device import ordered
from .layout import ACTIVE, CALL, EPOCH, FUNCTION, GRAIN, LIMIT, NEXT, OPEN, UNITS
from .lowlevel import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    int_load,
    pause,
    yield_thread,
)

_YIELD_AFTER = 2000


@ordered
def _work(control: int, slot: int) -> None:
    function, call = int_load(control, FUNCTION), int_load(control, CALL)
    units, grain = int_load(control, UNITS), int_load(control, GRAIN)
    while True:
        lo = atomic_add(control + 8 * NEXT, grain)
        if lo >= units:
            return
        call_kernel(function, call, slot, lo, min(lo + grain, units))


def build_caller():
    """Open the job in the control block, help with it, and return when it is done."""

    def caller(control, slot, lo, hi):
        atomic_store(control + 8 * NEXT, 0)
        atomic_add(control + 8 * EPOCH, 1)
        atomic_store(control + 8 * OPEN, 1)
        _work(control, slot)
        atomic_store(control + 8 * OPEN, 0)
        waited = 0
        while atomic_load(control + 8 * ACTIVE) != 0:
            pause()
            waited += 1
            if waited > _YIELD_AFTER:  # a worker lost its core: let it have one
                yield_thread()

    return caller


def build_worker():
    """Join every job that opens; come back after `patience` looks without one."""

    def worker(control, slot, patience, hi):
        seen = -1
        idle = 0
        while idle < patience:
            epoch = atomic_load(control + 8 * EPOCH)
            if epoch != seen and atomic_load(control + 8 * OPEN) != 0:
                seen = epoch
                atomic_add(control + 8 * ACTIVE, 1)
                if atomic_load(control + 8 * OPEN) != 0 and slot < int_load(control, LIMIT):
                    _work(control, slot)
                atomic_add(control + 8 * ACTIVE, -1)
                idle = 0
            else:
                pause()
                idle += 1

    return worker
