"""The report: one page that opens from disk, needs no network, and holds all of its results.

`page.html` is the frame, `page.css` and `page.js` are put into it, and so are the results, as
JSON. The script builds every text node from data by `textContent`, so nothing in a file of results
can become markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ... import __version__
from ...registry import KINDS
from ..forwards import VIEW_KINDS
from ..peers import PEERS
from ..results import busy, finite, speedups
from ..workloads import CPU, CUDA, QUICK

__all__ = ["page"]


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The whole page for these results, each as a file of them holds it."""
    data = {
        "gradplan": __version__,
        "kinds": [spec.kind.value for spec in KINDS.values()],
        "families": list(dict.fromkeys(spec.category.value for spec in KINDS.values())),
        "cases": list(dict.fromkeys(case.name for case in (*CUDA, *CPU, *QUICK))),
        "peers": {peer.name: peer.title for peer in PEERS.values()},
        "views": sorted(VIEW_KINDS),
        "runs": [{**run, "speedups": _speedups(run), "busy": busy(run["rows"])} for run in runs],
    }
    # "</script>" must not end the script it stands in.
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")
    parts = {"css": _asset("page.css"), "js": _asset("page.js"), "data": text}
    made = _asset("page.html")
    for name, part in parts.items():
        made = made.replace(f"/*{name}*/", part, 1)
    return made


def _speedups(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "peer": name,
            "mean": mean,
            "count": count,
            "least": worst["peers"][name]["speedup"],
            "worst": f"{worst['kind']} {worst['element']} {worst['case']}",
        }
        for name, (mean, count, worst) in speedups(run["rows"]).items()
    ]


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
