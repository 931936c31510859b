"""`gradplan tune`: every threshold has its question, and the command compares what it should.

It runs in Triton's interpreter here, on problems of a few tiles; times are made up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

import gradplan as gp
from conftest import CUDA
from gradplan import cli
from gradplan.backends.gpu import programs
from gradplan.backends.gpu.table import Table, table_of, using
from gradplan.bench import measure, thresholds, tune
from gradplan.bench.oracle import check
from gradplan.bench.problems import build, floor_bytes
from gradplan.bench.thresholds import FIELDS, questions, steps_of
from gradplan.kinds import ElementKind
from gradplan.registry import KINDS

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# NumPy warns where a GPU computes inf − inf without a word.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

NOW = table_of("sm_90")
TRITON = gp.PlanPreference(backend="triton")
interpreted = pytest.mark.skipif(CUDA, reason="Triton compiles for the GPU in this process")


def test_every_field_has_its_question_or_a_reason():
    names = [field.name for field in fields(Table)]
    assert sorted(FIELDS) == sorted(names), "a field of Table needs its line in FIELDS"
    for name, ask in FIELDS.items():
        if isinstance(ask, str):
            assert len(ask) > 20
        else:
            for question in ask(name, NOW):
                assert question.name.startswith(name)
                assert question.tables[question.now] == NOW
                assert len(question.tables) > 1
                assert question.probes


@pytest.mark.parametrize("question", list(questions(NOW)), ids=lambda question: question.name)
def test_every_problem_and_value_tells_something(question):
    """Every problem is changed by a value, every value changes a problem; no program is too big."""
    changed = set()
    for probe in question.probes:
        now = steps_of(probe, "sm_90", question.tables[question.now])
        for value, table in question.tables.items():
            steps = steps_of(probe, "sm_90", table)
            assert all(step.warps in (1, 2, 4, 8, 16, 32, 64) for step in steps)
            if steps != now:
                changed |= {probe, value}
    assert changed == {*question.probes, *question.tables} - {question.now}


def test_another_table_holds_within_and_no_longer():
    spec = next(spec for spec in KINDS.values() if spec.kind.value == "softmax")
    (probe,) = thresholds._probes("softmax", (64, 64), elements="f32")
    problem = build(spec, ElementKind.F32, probe.workload, "cpu")
    before, other = table_of("sm_90"), table_of("sm_100")
    small = replace(before, row_tile=256)
    with using("sm_90", small):
        assert table_of("sm_90") is small
        assert table_of("sm_100") is other
        inside = problem.plan(gp.PlanPreference(backend="reference"))
    assert table_of("sm_90") is before
    assert problem.plan(gp.PlanPreference(backend="reference")) is not inside
    with pytest.raises(ZeroDivisionError), using("sm_90", small):
        raise ZeroDivisionError
    assert table_of("sm_90") is before


@interpreted
@pytest.mark.parametrize("kind", ["cumprod", "cummax", "cummin", "log_cumsum_exp", "prod"])
def test_problems_without_y(kind):
    (probe,) = thresholds._probes(kind, (3, 20), elements="bf16", without=("y",))
    problem = build(probe.spec, probe.element, probe.workload, "cpu")
    assert "y" not in problem.inputs
    plan = problem.plan(TRITON)
    problem.poison()
    plan.run(problem.args())
    assert check(problem, problem.outputs).worst <= plan.precision_guarantee.relative_error
    whole = 2 * 60 * 2 + (2 * 3 if kind == "prod" else 2 * 60)  # x, dx, and dy
    assert floor_bytes(problem.desc, ("y",)) == whole


SMALL = thresholds._probes("softmax", (4, 128), elements="f32")
OTHER = thresholds._probes("cumprod", (2, 70), elements="f32", without=("y",))


@pytest.fixture
def asked(monkeypatch):
    """Two fields on problems of a few tiles; a time is the number of programs, in ms."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(measure.clocks, "cpu_copy_bandwidth", lambda rounds: 10e9)
    monkeypatch.setattr(measure.clocks, "cpu_samples", made_up)
    some = {
        "resident_words": thresholds._on(SMALL),
        "scan_step": thresholds._on(OTHER),
        "fill": "a reason of some length",
    }
    monkeypatch.setattr(thresholds, "FIELDS", some)
    monkeypatch.setattr(tune, "FIELDS", some)


def made_up(calls, rounds, block_s):
    (bound,) = calls.values()
    bound()
    return {name: [1e-3 * sum(s.grid for s in bound._program.steps)] * 3 for name in calls}


def run(*words, path=None):
    more = [] if path is None else ["--json", str(path)]
    return cli.main(["tune", "--device", "cpu", "--in-process", "--repeats", "1", *words, *more])


@interpreted
def test_values_are_checked_timed_and_compared(asked, tmp_path, capsys):
    path = tmp_path / "found" / "t.json"
    assert run(path=path) == 0
    shown = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["copy_bandwidth"] == 10e9
    table = thresholds.apart(table_of("interpreter"), "scan_step")
    asked_of = zip(found["questions"], ("resident_words", "scan_step"), (SMALL, OTHER), strict=True)
    for question, name, (probe,) in asked_of:
        assert (question["name"], question["now"]) == (name, str(getattr(table, name)))
        times = {row["value"]: row["ms"] for row in question["rows"]}
        programs_of = {
            value: sum(
                one.grid
                for one in steps_of(probe, "interpreter", replace(table, **{name: int(value)}))
            )
            for value in question["values"]
        }
        assert times == pytest.approx(programs_of)
        assert len(set(times.values())) > 1
        assert question["loss"] == pytest.approx(times[question["now"]] / min(times.values()) - 1)
    rows, step = found["questions"]
    assert rows["best"] == str(2 * table.resident_words)  # whole rows: one launch
    assert step["best"] == str(2 * table.scan_step)
    for row in step["rows"]:
        assert row["share"] == pytest.approx(row["floor_bytes"] / 10e9 / (1e-3 * row["ms"]))
        assert row["relative_error"] <= row["guarantee"]
        assert row["without"] == ["y"]
    assert f"{table.scan_step} now" in shown
    assert f"{2 * table.scan_step} best" in shown
    assert "What the table loses" in shown


@interpreted
def test_a_value_that_fails_is_told_and_skipped(asked, monkeypatch, tmp_path, capsys):
    table = table_of("interpreter")
    real = programs.ready

    def failing(made, device):
        if device is None and table_of("interpreter").scan_step == 2 * table.scan_step:
            raise gp.KernelFailure(-1, "out of resource: shared memory")
        return real(made, device)

    monkeypatch.setattr(programs, "ready", failing)
    path = tmp_path / "t.json"
    assert run("--fields", "scan_step", path=path) == 0
    (step,) = json.loads(path.read_text())["questions"]
    assert step["ratios"][str(2 * table.scan_step)] is None
    assert step["best"] == step["now"]
    assert step["loss"] == 0
    shown = capsys.readouterr().out
    assert "KernelFailure: out of resource: shared memory" in shown
    assert "failed" in shown


@interpreted
def test_a_wrong_result_of_the_table_itself_is_an_error(asked, monkeypatch, tmp_path):
    launched = gp.plans.BoundLaunch.__call__

    def broken(self, stream=None):
        launched(self, stream)
        self._keep[1].dx[1, 5].mul_(1.01)

    monkeypatch.setattr(gp.plans.BoundLaunch, "__call__", broken)
    path = tmp_path / "t.json"
    assert run("--fields", "resident_words", path=path) == 1
    (question,) = json.loads(path.read_text())["questions"]
    assert all(row["error"].startswith("wrong: relative error") for row in question["rows"])
    assert question["best"] is None


@interpreted
def test_what_two_values_share_is_measured_once(asked, monkeypatch):
    """A tile longer than half the row is cut to it: both values launch the same."""
    seen = []
    real = measure.measure
    monkeypatch.setattr(measure, "measure", lambda request: seen.append(request) or real(request))
    now = table_of("interpreter").resident_words
    assert run("--fields", "resident_words") == 0
    assert sorted(request.table.resident_words for request in seen) == [now, 2 * now]


@interpreted
def test_a_run_that_must_stop_says_how_far_it_came(asked, capsys):
    assert run("--stop-after", "0") == 3
    shown = capsys.readouterr().out
    assert "Out of time" in shown
    assert "0 of 2 questions were answered" in shown


def test_kernels_are_compiled_in_advance_once_each(asked, monkeypatch):
    """On a GPU, in processes of their own; what does not compile is told where it is measured."""
    built = []

    def build_all(todo, jobs):
        assert jobs == 3
        for variant, capability in todo:
            built.append((variant.key, capability))
            yield variant

    monkeypatch.setattr(tune.aot, "build_all", build_all)
    options = SimpleNamespace(
        jobs=3, time=1.0, repeats=1, stop_after=None, device="cuda", json=None
    )
    tuning = tune._Tuning(options, None)
    tuning.arch = "sm_90"
    tuning._compile(list(thresholds.questions(NOW)))
    assert len(built) == len(set(built)) == 2
    assert {capability for _, capability in built} == {90}
    options.stop_after = 0.0
    built.clear()
    tuning._compile(list(thresholds.questions(NOW)))
    assert len(built) == 1


def test_the_list_needs_no_gpu(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main(["tune", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in FIELDS:
        assert name in shown
    assert f"[{NOW.fill}]" in shown


@pytest.mark.skipif(CUDA, reason="says what a machine without a GPU says")
@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--device", "cuda"], "CUDA device"),
        (["--device", "cpu", "--fields", "scan_product"], "nothing is measured"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(capsys, monkeypatch, argv, reason):
    monkeypatch.setattr(measure.clocks, "cpu_copy_bandwidth", lambda rounds: 10e9)
    assert cli.main(["tune", "--in-process", *argv]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert reason in told


def test_the_command_imports_nothing_heavy():
    code = (
        "import sys, gradplan.bench.tune; "
        "print([m for m in ('torch', 'jax', 'triton', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"


def test_the_list_for_programs(capsys, tmp_path):
    assert cli.main(["tune", "--list", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)["fields"]
    assert {one["field"].partition(" ")[0] for one in listed} == set(FIELDS)
    assert all(one.get("nothing") or one["now"] in one["values"] for one in listed)
    path = tmp_path / "listed.json"
    assert cli.main(["tune", "--list", "--fields", "chunk", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["fields"]
    assert found in listed
