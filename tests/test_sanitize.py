"""What `make sanitize` runs: every kernel, in parts that make up the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from covering import named_kernels

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import sanitize

SANITIZER = """#!/bin/sh
test "$1" = --tool || exit 9
tool=$2; shift 2
if test $tool = racecheck; then
  test "$1 $2" = "--kernel-regex-exclude kns=held_" || exit 9
  shift 2
fi
test "$1 $2" = "--error-exitcode 1" || exit 9
shift 2
case "$tool $*" in
  *$FAULT*) echo "========= Invalid __global__ read"; exit 1;;
  *$HANGS*) sleep 60;;
esac
echo "$tool: $*"
"""


def test_every_kernel_runs_among_the_first():
    some = sanitize.some_problems("sm_90", None)
    wanted = named_kernels()
    for problem, thresholds in some[: len(some) // 3]:
        wanted -= {way[0] for way in sanitize._ways(problem, thresholds)}
    assert not wanted


@pytest.mark.parametrize(("fault", "hangs"), [("nobody", "nobody"), ("racecheck", "2/2")])
def test_all_tools_run_over_all_parts(monkeypatch, tmp_path, capsys, fault, hangs):
    path = tmp_path / "compute-sanitizer"
    path.write_text(SANITIZER.replace("$FAULT", fault).replace("$HANGS", hangs))
    path.chmod(0o755)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: str(path))
    wrong = sanitize.run_parts(2, ["--device", "cpu"], 20.0 if hangs == "nobody" else 1.0)
    shown = capsys.readouterr().out
    assert "memcheck 1/2: right" in shown
    assert "    initcheck: " in shown
    if hangs == "nobody":
        assert wrong == 0
    else:
        assert wrong == 4
        assert "racecheck 1/2: wrong, exit code 1" in shown
        assert "Invalid __global__ read" in shown
        assert "memcheck 2/2: did not end in 1 s" in shown


def test_parts_are_told(capsys):
    assert sanitize.part_of("2/3") == (2, 3)
    for wrong in ("0/3", "4/3", "2", "a/b"):
        with pytest.raises(SystemExit):
            sanitize.main(["--device", "cpu", "--part", wrong])
