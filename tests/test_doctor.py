"""`gradplan doctor`: it finds what is wrong."""

from __future__ import annotations

import json

import pytest

import gradplan as gp
from gradplan import cases, cli, diagnosis


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(diagnosis, "_gpu", lambda: {"found": False, "reason": "no GPU here"})


def test_all_is_well(capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in (gp.__version__, "no GPU here", "kernel cache", "numba", "All is well."):
        assert word in shown
    assert "WRONG" not in shown


def test_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert {check["family"] for check in found["checks"]} == {c.value for c in gp.OpCategory}
    assert all(0 <= check["error"] <= check["guarantee"] for check in found["checks"])
    assert {library["name"] for library in found["libraries"]} >= {"numba", "triton", "torch"}
    assert found["threads"]["used"] == gp.get_num_threads()


def test_a_wrong_kernel_is_found(capsys, monkeypatch):
    run = cases.Problem.run

    def broken(problem, device="cpu", preference=None):
        run(problem, device)
        for name in ("dx", "da", "dweight"):
            if name in problem.arrays:
                problem.arrays[name].reshape(-1)[-1] *= 1.5

    monkeypatch.setattr(cases.Problem, "run", broken)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "WRONG" in shown
    assert "above the guarantee" in shown
    assert "Something is wrong." in shown


def test_a_kernel_that_raises_is_found(capsys, monkeypatch):
    def failing(problem, device="cpu", preference=None):
        raise gp.KernelFailure(7, "the launch failed")

    monkeypatch.setattr(cases.Problem, "run", failing)
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["checks"][0]["fault"] == "KernelFailure: the launch failed"


def test_what_is_missing_is_told_with_its_command(capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "find_spec", lambda module: None)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "missing" in shown
    assert "pip install 'gradplan[gpu]'" in shown


def test_a_cache_that_cannot_be_written_is_told(capsys, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("GRADPLAN_CACHE_DIR", str(blocked / "cache"))
    assert cli.main(["doctor"]) == 0
    assert "cannot be written (Not a directory)" in capsys.readouterr().out


def test_the_cache_is_counted(monkeypatch, tmp_path):
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "softmax.o").write_bytes(b"12345")
    monkeypatch.setenv("GRADPLAN_CACHE_DIR", str(tmp_path))
    found = diagnosis.machine()["cache"]
    assert (found["kernels"], found["bytes"], found["writable"]) == (1, 5, True)


def test_a_gpu_is_checked_too():
    devices = [device for _, device in diagnosis.subjects(gpu=True)]
    assert devices == ["cpu"] * 5 + ["cuda"] * 5
