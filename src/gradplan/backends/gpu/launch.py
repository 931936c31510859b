"""Kernels from their sources to the driver: compiled once a variant, launched with bound arguments.

A `Step` is one launch: a kernel, its grid, its arguments by name and its compile-time constants.
Pointers are named by operand; what changes from call to call is only their addresses. The variant
of a kernel is its constants, the types of its arguments and their common alignment: shapes and
numbers are ordinary arguments, so a new shape compiles nothing.

On a GPU a launch goes straight to the driver, with the arguments packed in advance. In Triton's
interpreter the same steps run on CPU memory.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ...errors import KernelFailure

__all__ = ["Int", "Interpreter", "Launcher", "Pointer", "Step", "compiled", "device_arch"]

_TRITON = (3, 6)  # the oldest whose compiler takes all kernels
WORKSPACE = "workspace"
COUNTERS = "counters"


@dataclass(frozen=True, slots=True)
class Pointer:
    """An operand's first element (or a place in the workspace), so many bytes further on."""

    operand: str
    type: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Int:
    """An integer argument of a fixed width; `aligned` ones share the step's alignment."""

    value: int
    type: str = "i64"


Argument = Pointer | Int | float | None | tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One launch."""

    kernel: str
    """module.function below `kernels`."""
    grid: int
    arguments: tuple[tuple[str, Argument], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    alignment: int = 1
    """A power of two, in elements, that divides every stride and extent it is claimed for."""
    aligned: tuple[str, ...] = ()
    """The integer arguments that it divides; "name:0" is the first of a tuple, "name:1" are
    the others."""
    cluster: int = 1
    """So many programs in a row run at the same time."""
    registers: int = 0
    """The most registers a thread may have; 0 leaves it to the compiler."""
    together: bool = False
    """All programs run at the same time: the driver refuses the launch where they cannot."""
    early: bool = False
    """It may begin before the launch before it has ended, and waits itself where it must
    (`waiting.await_launch_before`)."""
    grain: int = 0
    """So many bytes are compiled in to divide the addresses, whatever they are (1: nothing is); 0:
    16 where they do."""


def interpreted() -> bool:
    """Whether Triton runs its interpreter: decided by its own switch when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def missing() -> str | None:
    """What keeps kernels from running on a GPU here, in a sentence, or None."""
    for module, extra in (("torch", "gpu"), ("triton", "gpu")):
        try:
            importlib.import_module(module)
        except ImportError:
            return (
                f"{module} is not installed; the GPU backend needs it: "
                f"pip install 'gradplan[{extra}]'"
            )
    import torch
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _TRITON:
        return (
            f"triton {triton.__version__} is installed; the GPU backend needs "
            f"{'.'.join(map(str, _TRITON))} or newer: pip install --upgrade 'gradplan[gpu]'"
        )
    if not torch.cuda.is_available():
        return "torch finds no CUDA device on this machine; use device='cpu'"
    return None


@lru_cache(maxsize=64)
def device_arch(index: int) -> str:
    """The architecture of a device, such as sm_90."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def processors(index: int) -> int:
    """How many multiprocessors a device has."""
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def device_count() -> int:
    """How many GPUs there are."""
    import torch

    return int(torch.cuda.device_count())


def current_device() -> int:
    """The index of the current GPU; 0 where there is none, which `missing` then explains."""
    if missing() is not None:
        return 0
    import torch

    return int(torch.cuda.current_device())


_KERNELS = (
    "arithmetic", "tiles", "waiting", "formulas", "rows", "ragged",
    "stretches", "log_tiles", "recurrence", "joins",
    "line_memory", "line_scans", "forwards", "lines", "chains", "winners", "segments", "few",
    "moves", "tall", "tall_products",
    "hearing", "held_memory", "held_states", "held_products", "held",
    "walk_memory", "walk_scans", "waves", "walks", "walk_logs", "held_scans", "alone", "row_alone",
    "learned",
)  # fmt: skip


def _function(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"{__package__}.kernels.{module}"), function)


@lru_cache(maxsize=1)
def _name_all() -> None:
    """Let Triton name all functions, in one order whichever kernel comes first.

    Its cache goes by these names, and the name of a function depends on which others had theirs
    before: without this another process that starts with another kernel finds nothing.
    """
    for module in _KERNELS:
        for one in vars(importlib.import_module(f"{__package__}.kernels.{module}")).values():
            getattr(one, "cache_key", None)


_REGISTERS = 65536  # of a multiprocessor, on every architecture that there is


def all_registers(warps: int) -> int:
    """The most that threads of a program can have, for where the assembler would spill a few."""
    # They come by eights, but for the last one.
    return min(255, _REGISTERS // (32 * warps) // 8 * 8)


_TYPES = {"i32": (4, "i"), "i64": (8, "q"), "fp64": (8, "d")}


def _signature(step: Step, pointer_bytes: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Triton's signature, constants and attributes of a step."""
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    divides = [["tt.divisibility", step.alignment]]
    claimed = step.grain or pointer_bytes
    for position, (name, value) in enumerate(step.arguments):
        if value is None:
            signature[name] = "constexpr"
            constants[name] = None
        elif isinstance(value, Pointer):
            signature[name] = f"*{value.type}"
            if claimed > 1:
                attributes[position,] = [["tt.divisibility", claimed]]
        elif isinstance(value, Int):
            signature[name] = value.type
            if step.alignment > 1 and name in step.aligned:
                attributes[position,] = divides
        elif isinstance(value, tuple):
            signature[name] = ("i64",) * len(value)
            if step.alignment > 1:
                for k in range(len(value)):
                    if name in step.aligned or f"{name}:{min(k, 1)}" in step.aligned:
                        attributes[position, k] = divides
        else:
            signature[name] = "fp64"
    for name, value in step.constants:
        signature[name] = "constexpr"
        constants[name] = value
    return signature, constants, attributes


def _source(function: Any) -> Any:
    """The compiler's class for a kernel in Triton, or in Gluon."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


_compiling = threading.Lock()
_kernels: dict[Any, Any] = {}


def _variant(step: Step, pointer_bytes: int) -> tuple[Any, ...]:
    """What tells the compiled variants of a kernel apart."""
    types = []
    for _, value in step.arguments:
        if isinstance(value, Pointer):
            types.append(f"*{value.type}")
        elif isinstance(value, Int):
            types.append(value.type)
        elif isinstance(value, tuple):
            types.append(str(len(value)))
        else:
            types.append(type(value).__name__)
    aligned = step.aligned if step.alignment > 1 else ()
    return (
        step.kernel,
        tuple(types),
        step.constants,
        step.warps,
        step.registers,
        step.alignment,
        aligned,
        step.grain or pointer_bytes,
    )


def compiled(step: Step, pointer_bytes: int, capability: int) -> Any:
    """Triton's compiled kernel of a step, for an architecture such as 90."""
    key = (_variant(step, pointer_bytes), capability)
    found = _kernels.get(key)
    if found is None:
        with _compiling:
            found = _kernels.get(key)
            if found is None:
                import triton
                from triton.backends.compiler import GPUTarget

                _name_all()
                function = _function(step.kernel)
                source = _source(function)(function, *_signature(step, pointer_bytes))
                options = {"num_warps": step.warps}
                if step.registers:
                    options["maxnreg"] = step.registers
                found = triton.compile(
                    source, target=GPUTarget("cuda", capability, 32), options=options
                )
                _kernels[key] = found
    return found


class _Driver:
    """The few functions of the CUDA driver that a launch needs."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        # No argtypes: arguments are made ready in advance, which is faster.
        # Four of them, where cuLaunchKernel takes eleven: half the host's work.
        self.launch = library.cuLaunchKernelEx
        self._text = library.cuGetErrorString
        self._text.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def text(self, code: int) -> str:
        found = ctypes.c_char_p()
        self._text(code, ctypes.byref(found))
        return found.value.decode() if found.value else "unknown error"


@lru_cache(maxsize=1)
def _driver() -> _Driver:
    return _Driver()


# The driver's handle of a kernel, its shared memory in bytes, and how many threads a program has.
_Handle = tuple[int, int, int]
_loaded: dict[Any, _Handle] = {}


def _handle(step: Step, pointer_bytes: int, device: int) -> _Handle:
    """The handle of a step's kernel on a device."""
    key = (_variant(step, pointer_bytes), device)
    found = _loaded.get(key)
    if found is None:
        import torch

        kernel = compiled(step, pointer_bytes, int(device_arch(device)[3:]))
        with _compiling, torch.cuda.device(device):
            torch.cuda.current_stream()
            try:
                from triton.runtime import driver

                _module, function, _registers, _spills, _threads = driver.active.utils.load_binary(
                    kernel.name, kernel.kernel, kernel.metadata.shared, device
                )
            except RuntimeError as error:
                raise KernelFailure(-1, f"loading {step.kernel} failed: {error}") from error
            about = kernel.metadata
            found = _loaded[key] = int(function), int(about.shared), 32 * int(about.num_warps)
    return found


class _Packed(NamedTuple):
    """The arguments of a step as the kernel reads them."""

    words: array[int]
    pointers: tuple[tuple[int, Pointer], ...]
    """Which words are pointers."""
    offsets: tuple[int, ...]
    """The first byte of each argument."""
    numbers: tuple[tuple[str, int], ...]
    """Which words are floating-point numbers, by name."""


def _packed(step: Step) -> _Packed:
    data = bytearray()
    pointers = []
    offsets = []
    numbers = []

    def put(code: str, size: int, value: Any) -> None:
        data.extend(bytes(-len(data) % size))
        offsets.append(len(data))
        data.extend(struct.pack(code, value))

    for name, value in step.arguments:
        if value is None:
            continue
        if isinstance(value, Pointer):
            put("Q", 8, 0)
            pointers.append((len(data) // 8 - 1, value))
        elif isinstance(value, Int):
            put(_TYPES[value.type][1], _TYPES[value.type][0], value.value)
        elif isinstance(value, tuple):
            for one in value:
                put("q", 8, one)
        else:
            put("d", 8, value)
            numbers.append((name, len(data) // 8 - 1))
    put("Q", 8, 0)  # Triton's two scratch pointers, which our kernels do not use
    put("Q", 8, 0)
    data.extend(bytes(-len(data) % 8))
    return _Packed(array("Q", bytes(data)), tuple(pointers), tuple(offsets), tuple(numbers))


class _Call:
    """One launch whose arguments are ready but for pointers, the kernel's handle and the stream."""

    __slots__ = ("_arguments", "_attributes", "_grid", "_keep", "block", "numbers", "pointers")

    def __init__(self, step: Step, packed: _Packed) -> None:
        self.block = array("Q", packed.words)
        self.pointers = packed.pointers
        self.numbers = packed.numbers
        address, words = self.block.buffer_info()
        size = array("Q", (8 * words,))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        extra = array("Q", (1, address, 2, size.buffer_info()[0], 0))
        each = array("Q", (address + offset for offset in packed.offsets))
        # CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and its three extents, and
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
        told = []
        if step.together:
            told.append((2, 0, 1, 0, 0))
        if step.cluster > 1:
            told.append((4, 0, step.cluster, 1, 1))
        if step.early:
            told.append((6, 0, 1, 0, 0))
        attribute = array("I", [word for one in told for word in (*one, *(0,) * 13)])
        number = len(told)
        self._grid = step.grid
        self._attributes = attribute.buffer_info()[0], number
        self._keep = (size, extra, attribute, each)
        # Where all run at the same time, a graph takes arguments one by one.
        self._arguments = (
            _pointer(each.buffer_info()[0]) if step.together else None,
            None if step.together else _pointer(extra.buffer_info()[0]),
        )

    def on(self, handle: _Handle, stream: int) -> Callable[[], int]:
        """The launch of a kernel on a stream, with nothing left for ctypes to convert."""
        function, shared, threads = handle
        stream &= 2**64 - 1  # what a caller gives is for the driver to judge
        # CUlaunchConfig: grid, block, shared memory, stream, attributes and their number.
        config = struct.pack(
            "7I4xQQI4x", self._grid, 1, 1, threads, 1, 1, shared, stream, *self._attributes
        )
        return partial(_driver().launch, config, _pointer(function), *self._arguments)


_pointer = ctypes.c_void_p.from_param


class Bound:
    """The launches of a program, and where in their arguments addresses go."""

    __slots__ = (
        "_handles",
        "_known",
        "_lock",
        "_ready",
        "aligned",
        "calls",
        "device",
        "operands",
        "owned",
        "rest",
    )
    _STREAMS = 32  # whose launches are kept ready

    def __init__(self, calls: list[_Call], device: int) -> None:
        self.calls = calls
        self.device = device
        self._lock = threading.Lock()
        self.aligned = 0
        self._handles: list[_Handle] = []
        # By stream, for the driver reads it from memory that all threads share; and by alignment.
        self._ready: dict[int, Callable[[], int]] = {}
        self._known = {self.aligned: self._ready}
        self.owned: Any = None
        slots = [
            (call.block, word, pointer.operand, pointer.offset)
            for call in calls
            for word, pointer in call.pointers
        ]
        self.operands = [slot for slot in slots if slot[2] not in (WORKSPACE, COUNTERS)]
        self.rest = [slot for slot in slots if slot[2] in (WORKSPACE, COUNTERS)]

    def load(self, aligned: int, handles: list[_Handle]) -> None:
        """The kernels for addresses that are so aligned."""
        self.aligned, self._handles = aligned, handles
        self._ready = self._known.setdefault(aligned, {})

    def launch(self, stream: int) -> None:
        start = self._ready.get(stream) or self._on(stream)
        code = start()
        if code:
            _launch_again(code, start, self.device)

    __call__ = launch

    def _on(self, stream: int) -> Callable[[], int]:
        pairs = zip(self.calls, self._handles, strict=True)
        made = [call.on(handle, stream) for call, handle in pairs]
        start = made[0]
        if len(made) > 1 or any(slot[2] == WORKSPACE for slot in self.rest):
            lock = _locks.setdefault((self.device, stream), threading.Lock())
            start = partial(_launch_all, made, self._lock, lock, self.device)
        if len(self._ready) >= self._STREAMS:
            self._ready.clear()
        self._ready[stream] = start
        return start

    def point(self, place: str, address: int) -> None:
        """Another workspace, or other counters, as well aligned as those before."""
        for block, word, name, offset in self.rest:
            if name == place:
                block[word] = address + offset

    def number(self, numbers: Mapping[str, float]) -> None:
        """Other numbers, for these arguments."""
        for call in self.calls:
            for name, word in call.numbers:
                if name in numbers:
                    (call.block[word],) = struct.unpack("Q", struct.pack("d", numbers[name]))


class Launcher:
    """The steps of a program, ready to be bound to addresses on one device."""

    def __init__(self, steps: Sequence[Step], device: int) -> None:
        self.steps = tuple(steps)
        self.device = device
        self._packed = [_packed(step) for step in self.steps]
        self._handles: dict[int, list[_Handle]] = {}
        # Those that no thread uses now; taking and putting back are atomic.
        self._idle: list[Bound] = []

    def bind(self, addresses: Mapping[str, int], workspace: int) -> Bound:
        """A launch on a stream, for arrays at these very addresses."""
        bound = self._unbound()
        self._point(bound, addresses, workspace, 0)
        return bound

    def run(
        self,
        addresses: Mapping[str, int],
        workspace: int,
        stream: int,
        counters: int = 0,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """Launch once. With `numbers` in place of those of the steps, always with some: what a
        launch was given stays until the next."""
        try:
            bound = self._idle.pop()
        except IndexError:
            bound = self._unbound()
        self._point(bound, addresses, workspace, counters)
        if numbers is not None:
            bound.number(numbers)
        bound.launch(stream)
        self._idle.append(bound)

    def load_like(self, other: Launcher) -> None:
        """Load the kernels for what another has met: under capture it would be too late."""
        if len(self._handles) < len(other._handles):
            for aligned in other._handles.keys() - self._handles.keys():
                self._load(aligned)

    def _load(self, aligned: int) -> list[_Handle]:
        found = [_handle(step, aligned, self.device) for step in self.steps]
        self._handles[aligned] = found
        return found

    def _unbound(self) -> Bound:
        steps = zip(self.steps, self._packed, strict=True)
        return Bound([_Call(step, packed) for step, packed in steps], self.device)

    def _point(
        self, bound: Bound, addresses: Mapping[str, int], workspace: int, counters: int
    ) -> None:
        """Put the addresses in; pointers are claimed to be aligned to 16 bytes, or to nothing."""
        aligned = 16
        for block, word, name, offset in bound.operands:
            block[word] = address = addresses[name] + offset
            if address & 15:
                aligned = 1
        for block, word, name, offset in bound.rest:
            block[word] = address = (workspace if name == WORKSPACE else counters) + offset
            if address & 15:
                aligned = 1
        if aligned != bound.aligned:
            bound.load(aligned, self._handles.get(aligned) or self._load(aligned))


# By device and stream: what threads launch there may share a workspace.
_locks: dict[tuple[int, int], threading.Lock] = {}


def _launch_all(
    starts: Sequence[Callable[[], int]], own: threading.Lock, lock: threading.Lock, device: int
) -> int:
    """One launch after the other; those of two threads do not mix, nor come between, with this
    launch or on this stream."""
    with own, lock:
        for start in starts:
            code = start()
            if code:
                _launch_again(code, start, device)
    return 0


def _launch_again(code: int, start: Callable[[], int], device: int) -> None:
    """A thread that has not touched CUDA yet, or stands on another device, is put right."""
    if code in (201, 400):  # invalid context, invalid handle
        import torch

        with torch.cuda.device(device):
            torch.cuda.current_stream(device).query()
            code = start()
    if code:
        raise KernelFailure(code, f"the launch failed: {_driver().text(code)} (CUDA {code})")


class Interpreter:
    """The steps of a program in Triton's interpreter, on CPU memory."""

    def __init__(self, steps: Sequence[Step], counters: int) -> None:
        from . import interpreter

        interpreter.install()
        self.steps = tuple(steps)
        self._counters = counters

    def bind(self, addresses: Mapping[str, int], workspace: int) -> Callable[..., None]:
        counters = (ctypes.c_int32 * self._counters)()
        own = {WORKSPACE: workspace, COUNTERS: ctypes.addressof(counters)}

        def run(stream: int = 0) -> None:
            for step in self.steps:
                self.launch(step, {**addresses, **own})
            assert not any(counters[1:]), "a counter was left counting"

        return run

    def launch(self, step: Step, addresses: Mapping[str, int], together: int = 1) -> None:
        """One launch. Programs wait for each other where all run `together`; here one does it all,
        which tells two parts before it waits."""
        arguments = {
            name: _tensor(addresses[value.operand] + value.offset, value.type)
            if isinstance(value, Pointer)
            else value.value
            if isinstance(value, Int)
            else value
            for name, value in step.arguments
        }
        grid = together if step.together else step.grid
        _function(step.kernel)[(grid,)](**arguments, **dict(step.constants))

    def run(self, addresses: Mapping[str, int], workspace: int, stream: int) -> None:
        self.bind(addresses, workspace)(stream)


_TORCH_TYPES = {
    "u8": "uint8",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
}


def _tensor(address: int, type_: str) -> Any:
    """A tensor at an address: the interpreter reads its pointer and type alone."""
    import torch

    dtype = getattr(torch, _TORCH_TYPES[type_])
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
