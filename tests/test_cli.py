"""The command line: what it prints, what it returns, and that a wrong kernel is found out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

import gradplan as gp
from gradplan import cases, cli, terminal, verify
from gradplan.errors import Unsupported
from gradplan.registry import ELEMENTS, KINDS

QUICK = ["verify", "--quick", "--jobs", "1", "--kind", "mean"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"gradplan {gp.__version__}\n"


def test_list_shows_every_kind(capsys):
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    for spec in KINDS.values():
        assert spec.function in shown
        assert spec.formula in shown


def test_list_as_json_is_the_registry(capsys):
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == [spec.kind.value for spec in KINDS.values()]
    found = next(row for row in rows if row["kind"] == "cummax")
    assert found["needs_x"] == "yes"
    assert found["needs_y"] == "optional"
    assert found["ties"] == ["first", "last"]
    assert found["elements"] == [element.value for element in ELEMENTS]


def test_verify_shows_a_table(capsys):
    assert cli.main([*QUICK, "--kind", "sum"]) == 0
    shown = capsys.readouterr().out
    assert "mean" in shown
    assert "ok" in shown
    assert "MISS" not in shown
    assert "within their guarantees" in shown


def test_verify_as_json(capsys):
    assert cli.main([*QUICK, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["device"] == "cpu"
    (row,) = report["rows"]
    assert row["kind"] == "mean"
    assert 0 < row["worst_error"] <= row["guarantee"]
    assert row["share"] == row["worst_error"] / row["guarantee"]
    assert row["misses"] == []


def wrong(monkeypatch, damage):
    """Let every plan run and then damage what it wrote."""
    run = cases.Problem.run

    def broken(problem, device="cpu", preference=None):
        run(problem, device)
        damage(problem)

    monkeypatch.setattr(cases.Problem, "run", broken)


def one_value(problem):
    problem.arrays["dx"].reshape(-1)[-1] *= 1.5


def one_lost_nan(problem):
    dx = problem.arrays["dx"]
    dx[np.isnan(dx)] = 0


def one_unwritten(problem):
    dx = problem.arrays["dx"]
    dx.view(f"u{dx.itemsize}").reshape(-1)[0] = cases._POISON[problem.desc.element]


def one_beside(problem):
    dx = problem.arrays["dx"]
    np.lib.stride_tricks.as_strided(dx, (dx.size + 1,), (dx.itemsize,))[-1] = 0


def one_input(problem):
    problem.arrays["dy"].reshape(-1)[0] = 0


@pytest.mark.parametrize("damage", [one_value, one_lost_nan, one_unwritten, one_beside, one_input])
def test_a_wrong_kernel_is_a_miss(monkeypatch, capsys, damage):
    wrong(monkeypatch, damage)
    assert cli.main(QUICK) == 1
    shown = capsys.readouterr().out
    assert "MISS" in shown
    assert "cases missed" in shown
    assert cli.main([*QUICK, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["rows"][0]["misses"]


def test_an_error_is_a_miss(monkeypatch, capsys):
    def failing(problem):
        raise gp.KernelFailure(7, "the launch failed")

    wrong(monkeypatch, failing)
    assert cli.main(QUICK) == 1
    assert "KernelFailure: the launch failed" in capsys.readouterr().out


def test_quick_covers_every_kind_and_every_element():
    todo = verify.tasks(quick=True)
    assert {task.kind for task in todo} == {spec.kind for spec in KINDS.values()}
    assert {task.element for task in todo} == set(ELEMENTS)
    assert len(todo) <= 30


def test_all_covers_every_kind_with_every_element():
    pairs = {(task.kind, task.element) for task in verify.tasks()}
    assert pairs == {(spec.kind, element) for spec in KINDS.values() for element in ELEMENTS}


def test_a_run_that_must_stop_says_how_far_it_came(monkeypatch, capsys):
    def one_case(self, *given, **more):
        now[0] += 1.0
        return real(self, *given, **more)

    now, real = [100.0], cases.Problem.run
    monkeypatch.setattr(cases.Problem, "run", one_case)
    monkeypatch.setattr(verify.time, "time", lambda: now[0])
    few = ["verify", "--jobs", "1", "--kind", "mean", "--stop-after", "3"]
    assert cli.main(few) == 3
    captured = capsys.readouterr()
    assert "The 3 cases that were run are within their guarantees" in captured.out
    assert "3 of" in captured.out
    assert captured.err.endswith("cases were run.\n")
    assert ": 3 of " in captured.err
    now[0] = 100.0
    assert cli.main([*few, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["cases"] == 3 < report["planned"]
    assert [row["cases"] for row in report["rows"]] == [3, 0, 0, 0]
    assert all(row["planned"] > 3 for row in report["rows"])


def test_a_miss_is_an_error_even_where_time_is_out(monkeypatch, capsys):
    wrong(monkeypatch, one_value)
    now = iter(range(10**6))
    monkeypatch.setattr(verify.time, "time", lambda: float(next(now)))
    assert cli.main(["verify", "--jobs", "1", "--kind", "mean", "--stop-after", "3"]) == 1
    captured = capsys.readouterr()
    assert "MISS" in captured.out
    assert "missed: ReduceBackwardDescriptor" in captured.err


def test_what_takes_long_tells_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(cli.verify, "_TELL_EVERY_S", -1.0)
    assert cli.main([*QUICK, "--kind", "sum"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].partition(",")[0] for line in told] == [
        "1 of 2 tasks",
        "2 of 2 tasks",
    ]


def test_rows_of_one_kind_and_element_are_joined():
    def row(kind, cases, worst, guarantee, *misses):
        return verify.Row(kind, "f32", cases, worst, guarantee, misses, 10)

    parts = [row("sum", 0, 0.0, 1.0), row("max", 5, 0.2, 1e-3, "a"), row("sum", 7, 0.0, 1e-7)]
    some, most = verify.merged([*parts, row("max", 6, 0.1, 1e-3, "b")])
    assert (some.kind, some.cases, some.planned, some.guarantee) == ("sum", 7, 20, 1e-7)
    assert (most.kind, most.cases, most.worst_error, most.misses) == ("max", 11, 0.2, ("a", "b"))


def test_processes_share_the_work():
    todo = [task for task in verify.tasks(quick=True) if task.kind in ("sum", "mean")]
    rows = [row for _, row in verify.verify(todo, jobs=2)]
    assert {row.kind for row in rows} == {"sum", "mean"}
    assert all(row.ok for row in rows)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["verify", "--device", "tpu"], "device 'tpu'"),
        (["verify", "--kind", "median"], "no kind 'median'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(capsys, argv, reason):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_a_device_without_a_backend_is_one_sentence(monkeypatch, capsys):
    def absent(device, preference):
        raise Unsupported(f"device {device!r} has no backend here")

    monkeypatch.setattr(verify, "find", absent)
    assert cli.main(["verify", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "gradplan: device 'cuda' has no backend here\n"


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "gradplan", "list", "--json"], capture_output=True, check=True
    )
    assert len(json.loads(done.stdout)) == len(KINDS)


@pytest.mark.parametrize("modules", ["gradplan", "gradplan.cases, gradplan.verify"])
def test_imports_stay_light(modules):
    heavy = ("numba", "torch", "triton", "rich", "matplotlib")
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"


def test_shapes_and_layouts_of_ones_own(capsys, tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("9x7 axis=0\n12x5 indices=30\n")
    argv = ["verify", "--jobs", "1", "--kind", "mean", "embedding", "--element", "f32", "--json"]
    more = ["--shape", "5x6", "4x3x2", "--shapes", str(path), "--layout", "contiguous", "offset"]
    assert cli.main([*argv, *more]) == 0
    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    # Three shapes, contiguous with all data and offset with two.
    mean = next(spec for spec in KINDS.values() if spec.kind.value == "mean")
    assert rows["mean"]["cases"] == 3 * (len(cases.data_of(mean)) + 2)
    assert rows["embedding"]["cases"] > 0


def test_shapes_of_ones_own_in_all_layouts(capsys, tmp_path):
    """In place of dy only where dx has its shape; a table without a row 2 has no padding there."""
    path = tmp_path / "shapes.txt"
    path.write_text("2x5 indices=30\n")
    argv = ["verify", "--jobs", "1", "--kind", "mean", "embedding", "--element", "f32", "--json"]
    assert cli.main([*argv, "--shape", "5x6", "5x1", "--shapes", str(path)]) == 0
    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["embedding"]["cases"] > 0
    mean = next(spec for spec in KINDS.values() if spec.kind.value == "mean")
    places = len(cases.layouts_of(mean))
    edges = len(cases.data_of(mean)) - 1
    assert cases.Layout.IN_PLACE in cases.layouts_of(mean)
    # Contiguous with all data, elsewhere random and one more; one shape alone can lie in place.
    assert rows["mean"]["cases"] == 2 * (1 + edges) + 2 * (2 * (places - 1) - 1)
    only = ["--shape", "5x6", "--layout", "in_place"]
    assert cli.main(["verify", "--jobs", "1", "--kind", "mean", "--element", "f32", *only]) == 2
    assert "no kind that was asked for has the shapes and layouts" in capsys.readouterr().err


def test_families_and_elements_are_chosen():
    specs = [spec for spec in KINDS.values() if spec.category is gp.OpCategory.SCAN]
    todo = verify.tasks(specs=specs, elements=[gp.ElementKind.F64])
    assert {(task.category, task.element) for task in todo} == {
        (gp.OpCategory.SCAN, gp.ElementKind.F64)
    }
    assert len(todo) == 5


def test_verifying_goes_on_where_it_stopped(monkeypatch, capsys, tmp_path):
    path = tmp_path / "kept.json"
    argv = [*QUICK, "--kind", "sum", "--keep", str(path)]
    with monkeypatch.context() as patched:
        wrong(patched, one_value)
        assert cli.main(argv) == 1
    capsys.readouterr()
    ran = []
    check = verify.check
    monkeypatch.setattr(verify, "check", lambda task: ran.append(task.kind.value) or check(task))
    # What missed is tried again, and what is done is not.
    assert cli.main([*argv, "--resume"]) == 0
    assert sorted(ran) == ["mean", "sum"]
    assert cli.main([*argv, "--resume", "--kind", "max"]) == 0
    assert sorted(ran) == ["max", "mean", "sum"]
    captured = capsys.readouterr()
    assert "2 of 3 tasks are done already." in captured.err
    broken = json.dumps({"version": gp.__version__, "done": {"some": {"kind": "sum"}}})
    for text in ("[]", "{", broken, '{"version": "0.0", "done": {}}'):
        path.write_text(text)
        assert cli.main([*argv, "--resume"]) == 2
    assert "gradplan 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["verify", "--resume"], "--keep"),
        (["verify", "--kind", "embedding", "--shape", "4x4"], "no kind that was asked for"),
        (["verify", "--shape", "4x4", "--axis", "5"], "--axis 5 is outside"),
        (["verify", "--layout", "odd"], "no layout 'odd'"),
        (["verify", "--keep", "."], "expected a file, got the folder '.'"),
        (["verify", "--keep", ""], "expected a file"),
        (["verify", "--shape", "x".join("222222222")], "plans take rank 1 to 8, got rank 9"),
        (["verify", "--jobs", "none"], "expected a number, got 'none'"),
        (["frobnicate"], "no command 'frobnicate'"),
        ([], "command"),
        (["list", "--family", "scans"], "did you mean 'scan'?"),
    ],
)
def test_a_bad_request_is_one_sentence(capsys, argv, reason):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_a_file_that_cannot_be_written_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main([*QUICK, "--keep", str(tmp_path / "file" / "x.json")]) == 2
    assert "Traceback" not in (error := capsys.readouterr().err)
    assert error.splitlines()[-1].startswith("gradplan: ")


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_beside_it(monkeypatch, tmp_path):
    def full(*_):
        raise OSError("no room")

    goal = tmp_path / "kept.json"
    goal.write_text("before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no room"):
        terminal.write_text(goal, "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert goal.read_text() == "before"


def test_links_stay_and_what_is_no_file_is_written_to(tmp_path):
    goal, link = tmp_path / "goal.json", tmp_path / "link.json"
    link.symlink_to(goal)
    terminal.write_text(link, "{}")
    assert (link.is_symlink(), goal.read_text()) == (True, "{}")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    terminal.write_text(pipe, "found")
    assert (pipe.is_fifo(), os.read(reader, 9)) == (True, b"found")
    os.close(reader)


def ran(command, end):
    """Exit code and what was said, of a command of ours whose output ends so."""
    line = f"{sys.executable} -m gradplan {command} {end}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("end", ["| true", ">&-"])
@pytest.mark.parametrize(
    "words",
    [
        *("list", "list --json", "explain softmax --shape 8x8", "tune --list"),
        *("completion bash", "doctor"),
    ],
)
def test_who_stops_reading_has_seen_enough(words, end):
    assert ran(words, end) == (0, "")


@pytest.mark.parametrize("end", ["2>&1 | true", ">&- 2>&-"])
@pytest.mark.parametrize("words", ["nothing", "verify --device nowhere", "explain softmax"])
def test_what_cannot_be_done_is_told_though_nobody_reads_on(words, end):
    assert ran(words, end) == (2, "")


@pytest.mark.parametrize("end", ["| true", "2>&1 | true", "--json | true"])
def test_a_miss_is_told_though_nobody_reads_on(tmp_path, end):
    script = tmp_path / "missing.py"
    script.write_text(
        "import sys\n"
        "from dataclasses import replace\n"
        "from gradplan import cli, verify\n"
        "check = verify.check\n"
        "verify.check = lambda task: replace(check(task), misses=('something',))\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    command = shlex.join([sys.executable, str(script), *QUICK])
    done = subprocess.run(["bash", "-c", f"{command} {end}; exit ${{PIPESTATUS[0]}}"], check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["completion", "zsh"]])
def test_where_only_ascii_can_be_written(words):
    done = subprocess.run(
        [sys.executable, "-m", "gradplan", *words],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in words:
        formulas = {row["formula"] for row in json.loads(done.stdout)}
        assert formulas == {spec.formula for spec in KINDS.values()}


@pytest.mark.parametrize(
    "command", ["doctor", "list", "explain", "verify", "bench", "tune", "completion"]
)
def test_every_command_has_examples_that_parse(capsys, command):
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text
    examples = re.findall(r"^  (?:source <\()?gradplan ([^|)#\n]*)", text, re.M)
    assert examples
    for example in examples:
        assert cli.parser().parse_args(shlex.split(example)).command


def test_the_interrupted_say_so(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.listing, "_list", interrupted)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr().err == "gradplan: interrupted\n"


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (terminal.bytes_text(402653184), "403 MB"),
        (terminal.bytes_text(0), "0 bytes"),
        (terminal.bytes_text(999_999), "1.00 MB"),
        (terminal.bytes_text(12), "12 bytes"),
        (terminal.seconds_text(95.5e-6), "95.5 µs"),
        (terminal.seconds_text(2.0), "2 s"),
        (terminal.seconds_text(0.25e-6), "0.25 µs"),
        (terminal.rate_text(4.22e12), "4.22 TB/s"),
    ],
)
def test_numbers_are_short(text, due):
    assert text == due
