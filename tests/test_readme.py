"""The README's examples run as printed, and its table names what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradplan as gp
from blocks import blocks_of, run
from gradplan.registry import KINDS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run_as_printed() -> None:
    pytest.importorskip("torch")
    said = run(blocks_of(README), "README.md")
    assert len(said) == 2
    assert "guarantee" in said[0]


def test_every_function_of_the_registry_exists_and_is_listed() -> None:
    for spec in KINDS.values():
        assert callable(getattr(gp, spec.function))
        assert f"`{spec.function}`" in README
