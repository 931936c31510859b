"""The copy bandwidth that floors are taken from: measured here, or recorded elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import clocks
from .results import read

__all__ = ["Bandwidth", "measured", "recorded", "recorded_files"]

_ROUNDS = 5
# In a wheel beside this file; in a clone where the benchmarks are.
_PLACES = (
    Path(__file__).parent / "recorded",
    Path(__file__).parents[3] / "benchmarks" / "results",
)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, read and written, and where the figure is from."""

    bytes_per_s: float
    source: str


def measured(device: str) -> Bandwidth:
    """A quick measurement on a device that is here, well under a second."""
    if device == "cpu":
        speed = clocks.cpu_copy_bandwidth(_ROUNDS, with_torch=False)
    else:
        speed = clocks.cuda_copy_bandwidth(device)
    return Bandwidth(speed, "copies measured now")


def recorded_files() -> list[Path]:
    """The results that came with the library."""
    for folder in _PLACES:
        if found := sorted(folder.glob("*.json")):
            return found
    return []


def recorded(arch: str) -> Bandwidth | None:
    """What was recorded on a device of an architecture, or None."""
    for path in recorded_files():
        about = read(path)
        if about["device"].get("arch") == arch:
            source = f"recorded on {about['device']['name']}"
            return Bandwidth(about["copy_bandwidth"], source)
    return None
