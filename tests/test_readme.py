"""The README's example runs as printed, and its table names what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradplan as gp
from gradplan.registry import KINDS

README = (Path(__file__).parent.parent / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["plans", "torch"])
def test_an_example_runs_as_printed(code: str) -> None:
    if "import torch" in code:
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "guarantee" in done.stdout or "explain" not in code


def test_every_function_of_the_registry_exists_and_is_listed() -> None:
    for spec in KINDS.values():
        assert callable(getattr(gp, spec.function))
        assert f"`{spec.function}`" in README
