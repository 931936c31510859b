"""Where rows are measured: a process of its own for ours and for each peer.

A kernel that faults ends its CUDA context, and a compiler that hangs cannot be interrupted from
Python: either takes its process with it, and the next row gets a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import Unsupported
from . import measure

__all__ = ["Apart", "Failed", "Here", "TookTooLong", "Worker"]

_START_S = 60.0


class TookTooLong(Exception):
    """No answer within the limit."""


class Failed(Exception):
    """The call raised, or its process died."""


class Worker(Protocol):
    """Something that answers the functions of `measure`."""

    def ask(self, name: str, *given: Any, limit_s: float) -> Any: ...

    def close(self) -> None: ...


class Here:
    """This very process: no limits, but a debugger or a profiler sees everything."""

    def ask(self, name: str, *given: Any, limit_s: float) -> Any:
        """The answer; `Failed` where the call raises."""
        try:
            return getattr(measure, name)(*given)
        except Unsupported:
            raise
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Nothing to end."""


class Apart:
    """A process of its own, started at once and again after it is lost."""

    def __init__(self) -> None:
        # A forked child could not use CUDA, nor the threads that its parent has.
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None
        handle, self._log = tempfile.mkstemp(prefix="gradplan-bench-", suffix=".log")
        os.close(handle)
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs, self._log), daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, name: str, *given: Any, limit_s: float) -> Any:
        """The answer; `TookTooLong` or `Failed` where there is none."""
        if self._process is None or not self._process.is_alive():
            self._stop()
            self._start()
        try:
            # Starting, which imports torch, is not what the limit is about.
            if not self._pipe.poll(_START_S) or self._pipe.recv() != "ready":
                raise EOFError
            self._pipe.send((name, given))
            if not self._pipe.poll(limit_s):
                self._stop()
                raise TookTooLong(f"did not finish in {limit_s:.0f} s")
            kind, answer, usable = self._pipe.recv()
        except (EOFError, OSError):
            self._stop()
            raise Failed(f"its process died{self._last_words()}") from None
        if not usable:
            self._stop()
        if kind == "answer":
            return answer
        raise Unsupported(answer) if kind == "Unsupported" else Failed(answer)

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = Path(self._log).read_text(errors="replace").strip().splitlines()
            if lines:
                return f": {lines[-1][:300]}"
        return ""

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def close(self) -> None:
        """End the process."""
        self._stop()
        with suppress(OSError):
            os.unlink(self._log)


def _serve(pipe: Any, log: str) -> None:
    """Answer until the other end is gone."""
    # What compilers and libraries print belongs to no table.
    file = os.open(log, os.O_WRONLY | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    with suppress(ImportError):
        import torch  # noqa: F401  (before the first limit begins)
    try:
        while True:
            pipe.send("ready")
            name, given = pipe.recv()
            try:
                answer = ("answer", getattr(measure, name)(*given))
            except Unsupported as error:
                answer = ("Unsupported", str(error))
            except Exception as error:
                answer = ("error", f"{type(error).__name__}: {error}"[:300])
            pipe.send((*answer, _usable()))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _usable() -> bool:
    """Whether the CUDA context, if there is one, has survived."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
