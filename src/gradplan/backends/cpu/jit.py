"""Compiled kernels: built once by Numba, kept on disk as object code, loaded by llvmlite.

A kernel is one function `(call, slot, lo, hi)`: `call` is the address of a block of int64 (see
`program.py`), `slot` tells the running threads apart, [lo, hi) is a range of work units. Numba
compiles it, LLVM's object code goes into the user's cache folder, and every process, the
compiling one included, loads that object code. A process that finds its kernels on disk never
imports Numba.

The key of an entry holds everything the code depends on: the kernel's name, the sources of this
backend, the versions of the compilers, and the CPU with its features. Nothing is written into
the install directory; where no cache folder can be written, kernels live in memory only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Kernel", "cache_folder", "kernel"]

# No argument types: arguments come as ctypes objects, which is three times as fast where they are
# made in advance.
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32)
# Numba's native entry takes room for a result and an exception first; kernels use neither.
_UNUSED = ctypes.create_string_buffer(64)
_UNUSED_ADDRESS = ctypes.c_void_p(ctypes.addressof(_UNUSED))


class Kernel:
    """A loaded kernel: `kernel(call, slot, lo, hi)` runs it with the GIL released.

    So does `entry(*arguments(call, slot, lo, hi))`, whose arguments can be made once.
    """

    __slots__ = ("_engine", "address", "entry", "name")

    def __init__(self, name: str, engine: Any, address: int) -> None:
        self.name = name
        self.address = address
        self._engine = engine  # owns the code
        self.entry: Callable[..., int] = _ENTRY(address)

    @staticmethod
    def arguments(call: int, slot: int, lo: int, hi: int) -> tuple[Any, ...]:
        words = (ctypes.c_int64(word) for word in (call, slot, lo, hi))
        return (_UNUSED_ADDRESS, _UNUSED_ADDRESS, *words)

    def __call__(self, call: int, slot: int, lo: int, hi: int) -> None:
        self.entry(*self.arguments(call, slot, lo, hi))


_lock = threading.RLock()
_kernels: dict[str, Kernel] = {}


def kernel(name: str, build: Callable[[], Callable[[int, int, int, int], None]]) -> Kernel:
    """The kernel of that name; `build` gives its Python function where it must be compiled."""
    found = _kernels.get(name)
    if found is not None:
        return found
    with _lock:
        found = _kernels.get(name)
        if found is None:
            found = _kernels[name] = _load(name, *_object_code(name, build))
        return found


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cache_folder() -> Path:
    """Where compiled kernels are kept: $GRADPLAN_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("GRADPLAN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradplan"


@cache
def _host() -> tuple[str, str, str]:
    """LLVM's names for this machine: triple, CPU and features."""
    import llvmlite.binding as llvm

    # Newer releases initialise LLVM by themselves and refuse the explicit call.
    with contextlib.suppress(RuntimeError):
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    return llvm.get_default_triple(), llvm.get_host_cpu_name(), features


def _machine() -> Any:
    """A target machine for this host; an engine owns its own."""
    import llvmlite.binding as llvm

    _, cpu, features = _host()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
    )


@cache
def _environment() -> str:
    """A digest of all that compiled code depends on besides the kernel's name."""
    digest = hashlib.sha256()
    for package in ("numba", "llvmlite"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    digest.update(f"{sys.version_info[:2]} {_host()}\n".encode())
    folder = Path(__file__).parent
    for source in sorted(folder.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _object_code(name: str, build: Callable[[], Any]) -> tuple[str, bytes]:
    """The symbol and object code of a kernel, from disk or from Numba."""
    try:
        path = cache_folder() / _environment() / f"{name}.o"
    except RuntimeError:  # no home folder
        return _compile(build)
    try:
        stored = path.read_bytes()
        check, content = stored[:64], stored[64:]
        # A file cut short by a full disk, or damaged, must not be loaded.
        if hashlib.sha256(content).hexdigest().encode() == check:
            symbol, code = content.split(b"\n", 1)
            return symbol.decode(), code
    except (OSError, ValueError):
        pass
    symbol_text, code = _compile(build)
    content = symbol_text.encode() + b"\n" + code
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(content).hexdigest().encode() + content)
        os.replace(temporary, path)
    except OSError:  # read-only or full: the kernel still runs, from memory
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return symbol_text, code


def _compile(build: Callable[[], Any]) -> tuple[str, bytes]:
    from numba import njit, types

    signature = types.none(types.int64, types.int64, types.int64, types.int64)
    dispatcher = njit(
        signature,
        nogil=True,
        error_model="numpy",
        boundscheck=False,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        # Sums may be taken in lanes and products fused; NaN, inf and signed zeros keep their
        # meaning. Functions that need their operations in order (exp) say so themselves.
        fastmath={"reassoc", "contract"},
    )(build())
    (compiled,) = dispatcher.overloads.values()
    code = _machine().emit_object(compiled.library._final_module)
    return compiled.fndesc.llvm_func_name, code


def _load(name: str, symbol: str, code: bytes) -> Kernel:
    import llvmlite.binding as llvm

    _host()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Kernel(name, engine, engine.get_function_address(symbol))
