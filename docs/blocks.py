"""The Python of a page: found, run in order, and shown with what it printed.

All blocks of a page share one process and one namespace, as a reader would paste them. A block
titled `On a GPU` runs only where there is one; elsewhere it must still be valid Python.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gradplan

__all__ = ["Block", "PageError", "blocks_of", "run", "with_outputs"]

_FENCE = re.compile(r"^```python(?P<header>[^\n]*)\n(?P<code>.*?)^```\n", re.DOTALL | re.MULTILINE)
_ON_A_GPU = "On a GPU"
_TIMEOUT_S = 300

# Reads the blocks, runs them, and tells what each has printed; a traceback names the page's lines.
_RUNNER = """
import contextlib, io, json, sys
page, todo = json.load(sys.stdin)
told, names = [], {"__name__": "__main__"}
for line, code in todo:
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        exec(compile("\\n" * line + code, page, "exec"), names)
    told.append(heard.getvalue())
print(json.dumps(told))
"""


class PageError(Exception):
    """A block of a page failed."""


@dataclass(frozen=True)
class Block:
    """One block: its code, the lines of the page before it, and where it stands."""

    code: str
    line: int
    span: tuple[int, int]
    on_a_gpu: bool


def blocks_of(text: str) -> list[Block]:
    """The Python blocks of a Markdown page, in order."""
    return [
        Block(
            found["code"],
            text.count("\n", 0, found.start("code")),
            found.span(),
            _ON_A_GPU in found["header"],
        )
        for found in _FENCE.finditer(text)
    ]


def run(blocks: Sequence[Block], page: str) -> list[str]:
    """What each block prints, in one process; `PageError` with the traceback where one fails."""
    told = [""] * len(blocks)
    for block in blocks:
        ast.parse(block.code, page)
    todo = [k for k, block in enumerate(blocks) if not block.on_a_gpu or _has_gpu()]
    if not todo:
        return told
    # The gradplan that is documented, wherever it was imported from: a relative path would not
    # survive the change of folder.
    source = str(Path(gradplan.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _RUNNER],
            input=json.dumps([page, [(blocks[k].line, blocks[k].code) for k in todo]]),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise PageError(f"{page}: a block failed\n{done.stderr}")
    for k, heard in zip(todo, json.loads(done.stdout), strict=True):
        told[k] = heard
    return told


def with_outputs(text: str, page: str) -> str:
    """The page with what each block printed below it."""
    blocks = blocks_of(text)
    for block, heard in reversed(list(zip(blocks, run(blocks, page), strict=True))):
        if heard.strip():
            _, end = block.span
            text = f"{text[:end]}\n``` {{ .text .output }}\n{heard.rstrip()}\n```\n{text[end:]}"
    return text


@cache
def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
