"""Which library an array belongs to, and so which viewer takes it: looked up by its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import InvalidProblem
from .dlpack import is_jax, view_dlpack
from .layout import View
from .numpy_arrays import refuse_masked, view_cupy, view_numpy, view_scalar
from .torch_tensors import meet_torch, view_torch

_VIEWER_OF_LIBRARY: dict[str, Callable[[Any, str], View]] = {
    "numpy": view_numpy,
    "numpy scalar": view_scalar,
    "masked": refuse_masked,
    "torch": view_torch,
    "cupy": view_cupy,
    "jax": view_dlpack,
    "dlpack": view_dlpack,
}


class _Viewers(dict[type, Callable[[Any, str], "View"]]):
    """The viewer of every type seen so far; `view` is `viewers[type(array)](array, name)`."""

    def __missing__(self, kind: type) -> Callable[[Any, str], View]:
        return _meet


viewers = _Viewers()
_LIBRARIES: dict[type, str | None] = {}


def view(array: Any, name: str = "array") -> View:
    """The view of any array; `name` is the argument that messages speak of."""
    return viewers[type(array)](array, name)


def library_of(array: Any) -> str | None:
    kind = type(array)
    library = _LIBRARIES.get(kind)
    if library is None:
        library = _recognise(array, kind)
        if library is not None:
            _LIBRARIES[kind] = library
    return library


def _recognise(array: Any, kind: type) -> str | None:
    names = {(base.__module__, base.__name__) for base in kind.__mro__}
    if issubclass(kind, np.ndarray):
        masked = any(
            module.startswith("numpy.ma") and name == "MaskedArray" for module, name in names
        )
        return "masked" if masked else "numpy"
    if issubclass(kind, np.generic):
        return "numpy scalar"
    if ("torch", "Tensor") in names:
        return "torch"
    if ("cupy", "ndarray") in names:
        return "cupy"
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return "jax" if is_jax(kind) else "dlpack"
    return None


def _meet(array: Any, name: str) -> View:
    """The view of the first array of its type."""
    library = library_of(array)
    if library is None:
        hint = ""
        if any(is_jax(base) and base.__name__ == "Tracer" for base in type(array).__mro__):
            hint = "; functions run at once: call them outside jax.jit, jax.vmap and jax.grad"
        raise InvalidProblem(
            f"{name}: expected a NumPy, torch, CuPy, JAX or other DLPack array, "
            f"got {type(array).__name__}{hint}"
        )
    if library == "torch":
        meet_torch(type(array))
    viewer = viewers[type(array)] = _VIEWER_OF_LIBRARY[library]
    return viewer(array, name)
