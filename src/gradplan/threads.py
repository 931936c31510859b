"""How many threads the CPU backend uses."""

from __future__ import annotations

import operator
import os

from .errors import InvalidProblem

__all__ = ["get_num_threads", "max_threads", "set_num_threads"]


def _cpus() -> int:
    chosen = os.environ.get("GRADPLAN_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


_max_threads = _cpus()
_num_threads = _max_threads


def max_threads() -> int:
    """The most threads there can be: workspaces are sized for them."""
    return _max_threads


def get_num_threads() -> int:
    """How many threads a large problem uses on the CPU."""
    return _num_threads


def set_num_threads(count: int) -> None:
    """Use at most this many threads: never more than $GRADPLAN_NUM_THREADS or the CPUs."""
    global _num_threads
    try:
        number = operator.index(count)
    except TypeError:
        raise InvalidProblem(f"set_num_threads takes an integer, got {count!r}") from None
    if number < 1:
        raise InvalidProblem(f"set_num_threads takes at least 1, got {number}")
    _num_threads = min(number, _max_threads)
