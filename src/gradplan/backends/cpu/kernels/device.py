"""How inner functions are compiled: for kernels only, with no way in from Python.

`inlined` may be summed in lanes (reassociation); `ordered` keeps its operations in order, and is
never called: a formula of two exponentials is so long that LLVM would, and not vectorise its loop;
`unfused` rounds each of them, also where a product and a sum could be one instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    return njit(function, fastmath={"reassoc", "contract"}, **_OPTIONS)


def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    return njit(function, fastmath={"contract"}, forceinline=True, **_OPTIONS)


def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    # Said, not left out: callees take on what their callers allow.
    return njit(function, fastmath=False, **_OPTIONS)
