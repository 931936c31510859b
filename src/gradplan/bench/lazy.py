"""Libraries that only the benchmark needs, imported when something asks for them."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ..errors import Unsupported

__all__ = ["installed", "needed", "version_of"]

_HOW = {
    "torch": "install it with: pip install 'gradplan[torch]'",
    "jax": "install it with: pip install 'jax[cuda13]', or jax alone for a CPU",
    "flag_gems": "install it with: pip install flag-gems",
    "matplotlib": "install it with: pip install 'gradplan[bench]'",
}


def installed(module: str) -> bool:
    """Whether a module could be imported; it is not."""
    return find_spec(module) is not None


def needed(module: str) -> Any:
    """The module, or `Unsupported` with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(f"gradplan bench needs {module} here ({error}); {_HOW[module]}") from None


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
