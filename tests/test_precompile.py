"""Kernels that are compiled here for another machine: it finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import precompile

TOOLS = Path(__file__).parents[1] / "tools"

FOUND = """
import sys
sys.path.insert(0, sys.argv[1])
import precompile
from triton import knobs
from gradplan.backends.gpu import launch
told, found = set(precompile.read_archive(precompile.Path(sys.argv[2]))[1]), []
knobs.compilation.listener = lambda **about: found.append(about["cache_hit"])
for one in precompile.variants("sm_90", ["bench"]):
    if precompile.identity(one, 90) in told:
        launch.compiled(one.step, one.pointer_bytes, 90)
assert found == [True] * len(told), found
"""


def run(*command, cache):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_what_was_packed_is_found(tmp_path):
    archive, here, there = tmp_path / "kernels.tar.xz", tmp_path / "here", tmp_path / "there"
    tool = TOOLS / "precompile.py"
    some = ("--group", "bench", "--jobs", "1", "--stop-after", "0")
    code, said = run(tool, "pack", archive, *some, cache=here)
    assert code == 0, said
    assert "out of time after 1 of" in said
    code, said = run(tool, "pack", archive, *some, cache=here)
    assert "2 kernels," in said, "what was there is kept"
    code, said = run(tool, "unpack", archive, cache=there)
    assert "2 kernels into" in said
    code, said = run("-c", FOUND, TOOLS, archive, cache=there)
    assert code == 0, said
    saved, beyond = tmp_path / "saved.tar.xz", tmp_path / "beyond"
    code, said = run(tool, "save", saved, cache=there)
    assert "2 kernels," in said
    code, said = run(tool, "unpack", saved, cache=beyond)
    code, said = run("-c", FOUND, TOOLS, archive, cache=beyond)
    assert code == 0, said


def test_another_compiler_is_refused(tmp_path, monkeypatch, capsys):
    archive = tmp_path / "kernels.tar.xz"
    made = precompile.about()
    precompile.write_archive(archive, {})
    assert precompile.main(["unpack", str(archive)]) == 0
    monkeypatch.setattr(precompile, "about", lambda: {**made, "build": "another"})
    assert precompile.main(["unpack", str(archive)]) == 1
    assert "another build of triton" in capsys.readouterr().out
    assert precompile.main(["unpack", str(archive), "--any-build"]) == 0
    monkeypatch.setattr(precompile, "about", lambda: {**made, "triton": "0.0"})
    assert precompile.main(["unpack", str(archive), "--any-build"]) == 1


@pytest.mark.parametrize("group", precompile.GROUPS)
def test_every_group_has_kernels(group):
    seen = precompile.variants("sm_90", [group])
    assert len({next(seen).key for _ in range(5)}) == 5
