"""Programs: a problem with known strides, ready to run.

A program owns the meta block of its geometry and knows its kernel, its launches (phase, units)
and its workspace. It is immutable and shared by all threads; what changes from call to call
(addresses, workspace, phase) stands in a call block of the caller's own.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...explanation import Other
from ...geometry import Dim
from ...threads import max_threads
from ...views import View
from . import pool
from .jit import Kernel
from .kernels import layout as at

__all__ = [
    "ENOUGH_UNITS",
    "GRAIN_ELEMENTS",
    "Program",
    "Strides",
    "bytes_of",
    "cache_bytes",
    "empty",
    "float_bits",
    "launch_of",
    "lines_of",
    "room_of",
    "streams",
    "write_dim",
    "write_nest",
]

Strides = Mapping[str, tuple[int, ...]]

# Below this many elements a problem runs on the caller's thread alone: waking another costs
# some 3 µs, and 16 Ki elements take about 5.
_ALONE_ELEMENTS = 1 << 14
# A launch is handed out in pieces of this many elements at least; where there are enough for eight
# a thread, of up to eight times as many, which keep a core longer in its own part of memory
# (softmax bf16 of 2048 × 2048, two cores: 0.44 ms in place of 0.51).
GRAIN_ELEMENTS = 1 << 15
_GRAINS_A_THREAD, _LARGEST_GRAIN = 8, 1 << 18
# Units of work that feed the cores, whatever their number.
ENOUGH_UNITS = 32
# Outputs are streamed where a problem takes more than this share of the last cache. Measured with
# one of 32 MiB: ordinary stores win at 24 MiB (softmax bf16, 0.62 against 0.92 ms) and by 10 % at
# 32, and lose at 48 (softmax f32, 1.49 against 1.32).
_STREAMED_SHARE = 1.1


@dataclass(frozen=True)
class Program:
    """What a bound problem runs."""

    kernel: Callable[[], Kernel]
    meta: array[int]
    operands: tuple[str | None, ...]
    """The argument behind each pointer of the call block: dy, x, y, out, out2."""
    offsets: tuple[int, ...]
    """Added to those pointers, in bytes."""
    launches: tuple[tuple[int, int, int], ...]
    """(phase, units, grain), one after the other."""
    workspace_bytes: int
    reads: Mapping[str, int]
    """How often each input comes from memory; once, where not named."""
    layout: str
    variant: str
    why: str
    others: tuple[Other, ...] = ()
    idle: list[_Call] = field(default_factory=list)
    """Calls that no thread uses now; taking one and putting it back are atomic."""

    def bind(self, views: Mapping[str, View], workspace: int) -> Callable[[], None]:
        """A launch for these very arrays, with the workspace at this address."""
        if not self.launches:
            return _nothing
        call = _Call(self)
        call.point(views, workspace)
        return call.run

    def run(self, views: Mapping[str, View], workspace: int, stream: int = 0) -> None:
        """Launch once."""
        self._run(_Call.point, views, workspace)

    def launch(self, addresses: Mapping[str, int], workspace: int, stream: int = 0) -> None:
        """Launch once for arrays at these addresses."""
        self._run(_Call.point_at, addresses, workspace)

    def _run(self, point: Callable[[_Call, Any, int], None], arrays: Any, workspace: int) -> None:
        if not self.launches:
            return
        try:
            call = self.idle.pop()
        except IndexError:
            call = _Call(self)
        point(call, arrays, workspace)
        call.run()
        self.idle.append(call)


def _nothing() -> None:
    """What an empty problem runs."""


class _Call:
    """A call block of a program, and its launches with all they need; for one thread at a time."""

    __slots__ = ("_block", "_launches", "_meta", "_pointers")

    def __init__(self, program: Program) -> None:
        self._meta = program.meta  # which the block points to
        self._block = array("q", (program.meta.buffer_info()[0], 0, 0, 0, 0, 0, 0, 0))
        named = enumerate(zip(program.operands, program.offsets, strict=False))
        self._pointers = [(at.DY + k, name, offset) for k, (name, offset) in named if name]
        address, work = self._block.buffer_info()[0], program.kernel()
        self._launches: list[tuple[int, Callable[..., object], tuple[Any, ...]]] = [
            (phase, work.entry, work.arguments(address, 0, 0, units))
            if grain >= units
            else (phase, pool.parallel, (work, address, units, grain))
            for phase, units, grain in program.launches
        ]

    def point(self, views: Mapping[str, View], workspace: int) -> None:
        block = self._block
        for word, name, offset in self._pointers:
            block[word] = views[name].ptr + offset
        block[at.WORKSPACE] = workspace

    def point_at(self, addresses: Mapping[str, int], workspace: int) -> None:
        """The same; a small call would pay a twentieth for addresses made of views."""
        block = self._block
        for word, name, offset in self._pointers:
            block[word] = addresses[name] + offset
        block[at.WORKSPACE] = workspace

    def run(self) -> None:
        for phase, launch, arguments in self._launches:
            self._block[at.PHASE] = phase
            launch(*arguments)


def empty() -> Program:
    return Program(
        kernel=_no_kernel,
        meta=array("q"),
        operands=(),
        offsets=(),
        launches=(),
        workspace_bytes=0,
        reads={},
        layout="empty",
        variant="none",
        why="there are no elements",
    )


def _no_kernel() -> Kernel:
    raise AssertionError("an empty program has no kernel")


def float_bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])


def write_dim(meta: array[int], position: int, dim: Dim) -> None:
    meta[position] = dim.extent
    for k, step in enumerate(dim.strides):
        meta[position + 1 + k] = step


def write_nest(
    meta: array[int], dims: Sequence[Dim], innermost: int, count: int, more: int
) -> None:
    """Put the innermost dimension at `innermost`, the number of others at `count`, and those
    at `more`."""
    write_dim(meta, innermost, dims[0])
    meta[count] = len(dims) - 1
    for d, dim in enumerate(dims[1:]):
        write_dim(meta, more + d * at.DIM_WORDS, dim)


def launch_of(phase: int, units: int, elements: int) -> tuple[int, int, int]:
    """A launch of so many units that visit so many elements in all."""
    if elements <= _ALONE_ELEMENTS:
        return phase, units, units
    fair = elements // (_GRAINS_A_THREAD * max_threads())
    grain = max(GRAIN_ELEMENTS, min(fair, _LARGEST_GRAIN))
    return phase, units, max(1, units * grain // elements)


@cache
def cache_bytes() -> int:
    """The size of the last cache, or a usual one where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]
    return 32 << 20


def room_of(share: float = _STREAMED_SHARE) -> float:
    """Bytes that a problem may take before its outputs are streamed."""
    return share * cache_bytes()


def streams(desc: Any, room: float) -> bool:
    """Whether outputs go past the caches: where the problem does not fit the last one anyway.

    An ordinary store reads the line that it overwrites, and drives inputs out.
    """
    return bytes_of(desc) > room


def bytes_of(desc: Any) -> int:
    return sum(op.size_bytes for op in desc.operands)


def lines_of(size: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-size // 64) * 64
