"""Plots for READMEs, by matplotlib: the same three pictures as the report's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..registry import KINDS
from ..terminal import bytes_text, rate_text, seconds_text
from .peers import PEERS

__all__ = ["write_plots"]

Row = dict[str, Any]

_FAMILIES = {
    "softmax": "#2767c9",
    "binary_elementwise": "#8a5a00",
    "scan": "#b8336a",
    "reduction": "#0b7a6b",
    "embedding": "#6d4bc3",
}
_PEERS = dict(zip(PEERS, ("#d9480f", "#475569", "#5f7a12", "#a3153f"), strict=True))
_INK, _SOFT, _GRID = "#16191d", "#59626e", "#e3e6ea"
_STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _SOFT,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "text.color": _INK,
    "figure.facecolor": "white",
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
}


def write_plots(runs: Sequence[dict[str, Any]], folder: Path) -> None:
    """`share.png`, `speedup.png` and `time.png`; numbered where there are several runs."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        for number, run in enumerate(runs, 1):
            mark = f"-{number}" if len(runs) > 1 else ""
            for name, plot in (("share", _shares), ("speedup", _speedups), ("time", _times)):
                figure = plot(run)
                if figure is not None:
                    figure.savefig(folder / f"{name}{mark}.png")


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    # Not pyplot: it keeps figures, and asks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _shares(run: dict[str, Any]) -> Any:
    """Dots by family and type, with their medians."""
    rows = [row for row in run["rows"] if row["share"] is not None]
    if not rows:
        return None
    lanes = [
        (family, element)
        for family in _FAMILIES
        for element in sorted({row["element"] for row in rows if row["family"] == family})
    ]
    figure, (axes,) = _figure(9, 0.9 + 0.34 * len(lanes))
    for place, (family, element) in enumerate(lanes):
        some = [
            row["share"] for row in rows if (row["family"], row["element"]) == (family, element)
        ]
        heights = [place + (k * 7 % 11 - 5) / 24 for k in range(len(some))]
        axes.scatter(some, heights, s=22, color=_FAMILIES[family], alpha=0.55, linewidths=0)
        middle = median(some)
        axes.plot([middle] * 2, [place - 0.36, place + 0.36], color=_FAMILIES[family], linewidth=3)
    axes.axvline(1, color=_INK, linewidth=1.2)
    names = [f"{family.replace('_', ' ')}  {element}" for family, element in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(1.1, 1.03 * max(row["share"] for row in rows)))
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set_xlabel("share of the floor: the time in which the fewest bytes could be copied")
    axes.set_title(f"Share of the floor, {run['device']['name']}")
    return figure


def _speedups(run: dict[str, Any]) -> Any:
    """One panel for each case and type that any peer ran."""
    order = [spec.kind.value for spec in KINDS.values()]
    raced = [row for row in run["rows"] if any(peer["speedup"] for peer in row["peers"].values())]
    if not raced:
        return None
    groups = list(dict.fromkeys((row["element"], row["case"]) for row in raced))
    peers = [name for name in PEERS if any(row["peers"].get(name) for row in raced)]
    tallest = max(sum((row["element"], row["case"]) == group for row in raced) for group in groups)
    figure, panels = _figure(4.6 * len(groups) + 0.8, 1.3 + 0.27 * tallest, len(groups))
    for axes, group in zip(panels, groups, strict=True):
        rows = [row for row in raced if (row["element"], row["case"]) == group]
        rows.sort(key=lambda row: order.index(row["kind"]))
        for name in peers:
            known = [
                (row["peers"][name]["speedup"], place)
                for place, row in enumerate(rows)
                if row["peers"].get(name) and row["peers"][name]["speedup"]
            ]
            axes.scatter(
                [speedup for speedup, _ in known],
                [place for _, place in known],
                s=34,
                color=_PEERS[name],
                alpha=0.8,
                linewidths=0,
                label=PEERS[name].title,
            )
        axes.axvline(1, color=_INK, linewidth=1.2)
        axes.set_xscale("log")
        _ticks(axes.xaxis, lambda ratio: f"{ratio:g} ×")
        axes.set_yticks(range(len(rows)), [row["kind"] for row in rows])
        axes.invert_yaxis()
        axes.set_title(f"{group[0]}, {group[1]}: {' × '.join(map(str, rows[0]['shape']))}")
        axes.set_xlabel("speed-up")
    marks, titles = panels[0].get_legend_handles_labels()
    figure.legend(marks, titles, loc="outside upper right", frameon=False, ncols=len(titles))
    return figure


def _ticks(axis: Any, text: Callable[[float], str]) -> None:
    """1, 2, 5 of each decade of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())


def _times(run: dict[str, Any]) -> Any:
    """Time against bytes, with the floor."""
    rows = [row for row in run["rows"] if row["ms"] and row["floor_bytes"]]
    if not rows:
        return None
    figure, (axes,) = _figure(9, 5)
    for name in PEERS:
        known = [row for row in rows if (row["peers"].get(name) or {}).get("ms")]
        if known:
            axes.scatter(
                [row["floor_bytes"] for row in known],
                [row["peers"][name]["ms"] for row in known],
                s=26,
                facecolors="none",
                edgecolors=_PEERS[name],
                label=PEERS[name].title,
            )
    for family, colour in _FAMILIES.items():
        some = [row for row in rows if row["family"] == family]
        if some:
            axes.scatter(
                [row["floor_bytes"] for row in some],
                [row["ms"] for row in some],
                s=26,
                color=colour,
                alpha=0.6,
                linewidths=0,
                label=family.replace("_", " "),
            )
    speed = run["copy_bandwidth"]
    sizes = [row["floor_bytes"] for row in rows]
    ends = [min(sizes) / 1.3, max(sizes) * 1.3]
    label = f"floor, {rate_text(speed)}"
    axes.plot(ends, [1e3 * size / speed for size in ends], color=_INK, linewidth=1.3, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("fewest bytes the gradient must move")
    _ticks(axes.xaxis, bytes_text)
    _ticks(axes.yaxis, lambda ms: seconds_text(1e-3 * ms))
    axes.set_title(f"Time against bytes, {run['device']['name']}")
    axes.legend(loc="upper left", frameon=True, framealpha=0.9, edgecolor=_GRID, ncols=2)
    return figure
