"""The benchmark: it times nothing wrong, keeps what it measured, and its table is the README's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console

import gradplan as gp
from gradplan import cli
from gradplan.backends import reference
from gradplan.backends.gpu import launch
from gradplan.bench import (
    command,
    forwards,
    lazy,
    markdown,
    measure,
    oracle,
    peers,
    results,
    session,
    workers,
)
from gradplan.bench.clocks import Effort, Timing
from gradplan.bench.problems import build, floor_bytes, question
from gradplan.bench.results import Results, lowest_shares, read, speedups
from gradplan.bench.workloads import (
    CPU,
    CUDA,
    LAYOUTS,
    QUICK,
    Draw,
    Reach,
    Workload,
    custom,
    strides_of,
)
from gradplan.kinds import ElementKind, OpCategory, ReduceKind, ScanKind, SoftmaxKind
from gradplan.registry import KINDS

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
ODD = ROOT / "benchmarks" / "measured" / "h200_odd.json"
SPECS = list(KINDS.values())
NAMES = [spec.kind.value for spec in SPECS]
SOFTMAX = KINDS[OpCategory.SOFTMAX, SoftmaxKind.SOFTMAX]
MEAN = KINDS[OpCategory.REDUCTION, ReduceKind.MEAN]
BENCH = ["bench", "--quick", "--in-process", "--kind", "mean", "--case", "rows", "--element", "f32"]
ROW_KEYS = {
    *("kind", "family", "element", "case", "shape", "axis", "layout", "variant", "floor_bytes"),
    *("floor_ms", "ms", "ms_min", "share", "error", "commit", "peers"),
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    # The bandwidth of a real run copies for a second or two.
    monkeypatch.setattr(measure.clocks, "cpu_copy_bandwidth", lambda rounds: 10e9)


def cases_for(spec):
    return [case for case in QUICK if case.reach.holds(spec)]


def test_every_kind_has_forwards_and_cases():
    assert forwards.missing() == []
    for table in (CUDA, CPU, QUICK):
        names = [case.name for case in table]
        assert len(set(names)) == len(names)
        for spec in SPECS:
            assert any(case.reach.holds(spec) for case in table)


def test_the_cases_are_those_that_were_agreed():
    found = {case.name: (case.shape, case.axis) for case in CUDA if case.reach is Reach.AXIS}
    assert found == {
        "rows": ((8192, 8192), 1),
        "wide": ((1024, 32768), 1),
        "narrow": ((32768, 1024), 1),
        "short": ((2**20, 64), 1),
        "columns": ((8192, 8192), 0),
        "middle": ((64, 2048, 512), 1),
        "long": ((64, 2**20), 1),
        "vocabulary": ((1024, 131072), 1),
        "one": ((1, 2**27), 1),
    }


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_the_oracle_agrees_with_the_reference(spec):
    for case in cases_for(spec):
        problem = build(spec, ElementKind.F32, case, "cpu")
        inputs = {
            name: a.numpy() if name == "indices" else a.double().numpy()
            for name, a in problem.inputs.items()
        }
        exact = reference.gradient(problem.desc, inputs)
        right = {name: torch.from_numpy(a).float() for name, a in exact.items()}
        assert oracle.check(problem, right).worst < 1e-7, case
        # The error of a known fault is the same in both measures.
        name = next(iter(right))
        right[name] = right[name].clone()
        right[name][tuple(n // 2 for n in right[name].shape)] += 0.25
        magnitude = reference.gradient(problem.desc, inputs, magnitude=True)
        got = {name: a.numpy() for name, a in right.items()}
        due = reference.check_error(problem.desc, got, exact, magnitude)
        assert oracle.check(problem, right).worst == pytest.approx(due, rel=1e-3), case


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_one_unwritten_element_never_passes(spec):
    for element in ElementKind:
        problem = build(spec, element, cases_for(spec)[0], "cpu")
        problem.poison()
        assert not oracle.check(problem, problem.outputs).worst < 1e30
        for output in problem.outputs.values():
            output.zero_()
        last = list(problem.outputs.values())[-1]
        last.view(-1)[-1] = float("nan")
        assert not oracle.check(problem, problem.outputs).worst < 1e30


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_torch_is_right_but_a_wrong_peer_is_not_timed(spec, monkeypatch):
    case = cases_for(spec)[0]
    request = measure.Request(
        spec.category, spec.kind, ElementKind.F32, case, "cpu", ("torch",), Effort(1, 1)
    )
    found = measure.measure(request)["torch"]
    assert found["ms"] > 0
    assert found["relative_error"] < 1e-4

    def halved(problem):
        prepared = peers._torch(problem)
        return replace(prepared, tensors=lambda made: [0.5 * t for t in prepared.tensors(made)])

    wrong = replace(peers.PEERS["torch"], prepare=halved)
    monkeypatch.setitem(peers.PEERS, "torch", wrong)
    found = measure.measure(request)["torch"]
    assert "ms" not in found
    assert found["error"].startswith("wrong: its relative error is 0.5")


def test_factors_stay_in_range_in_every_element():
    spec = KINDS[OpCategory.SCAN, ScanKind.CUMPROD]
    for element in ElementKind:
        for shape, axis in (((3, 7), 1), ((2, 1 << 16), 1), ((9, 4), 0), ((2, 5, 3), 1), ((1,), 0)):
            x = build(spec, element, Workload("x", shape, axis), "cpu").x
            assert x.shape == shape
            assert x.ne(0).all()
            for stride in (1, 2, 4, 32):  # a kernel may give each lane every k-th factor
                part = x.movedim(axis, -1)[..., ::stride]
                products = part.double().cumprod(-1).abs()
                assert products.min() > 1e-4
                assert products.max() < 1e4
            assert shape == (1,) or len(x.abs().unique()) > 2


def test_indices_are_drawn_as_named():
    spec = KINDS[OpCategory.EMBEDDING, next(k for c, k in KINDS if c is OpCategory.EMBEDDING)]
    counts = {}
    for draw in Draw:
        case = Workload("e", (1000, 2, 20000), draw=draw, reach=Reach.EMBEDDING)
        indices = build(spec, ElementKind.F32, case, "cpu").inputs["indices"]
        counts[draw] = np.bincount(indices.numpy(), minlength=1000)
        assert len(counts[draw]) == 1000
    assert counts[Draw.UNIFORM].max() < 100
    assert counts[Draw.SAME].max() == 20000
    assert counts[Draw.ZIPF][0] > 1.8 * counts[Draw.ZIPF][1] > 2 * counts[Draw.ZIPF][3]


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        *[("softmax", 3), ("cumsum", 2), ("cumprod", 4), ("cummax", 3), ("cummin", 3)],
        *[("log_cumsum_exp", 4), ("lerp", 3)],
    ],
)
def test_floors_count_whole_arrays(kind, arrays):
    spec = next(spec for spec in SPECS if spec.kind.value == kind)
    desc, _ = question(spec, (16, 32), 1, ElementKind.BF16)
    assert floor_bytes(desc) == arrays * 16 * 32 * 2


@pytest.mark.parametrize(("kind", "bytes_"), [("sum", 1), ("var", 2), ("max", 2)])
def test_floors_of_reductions_count_the_small_arrays_too(kind, bytes_):
    spec = next(spec for spec in SPECS if spec.kind.value == kind)
    desc, _ = question(spec, (16, 32), 1, ElementKind.F32)
    small = 2 if kind == "max" else 1
    assert floor_bytes(desc) == (bytes_ * 16 * 32 + small * 16) * 4


def test_layouts_lie_as_they_say():
    turned = build(SOFTMAX, ElementKind.F32, Workload("t", (6, 8), layout="transposed"), "cpu")
    sliced = build(SOFTMAX, ElementKind.F32, Workload("s", (6, 8), layout="sliced"), "cpu")
    for array in (*turned.inputs.values(), *turned.outputs.values()):
        assert array.stride() == (1, 6)
    for array in (*sliced.inputs.values(), *sliced.outputs.values()):
        assert array.stride() == (136, 1)
        assert array.storage_offset() == 64
    shifted = build(SOFTMAX, ElementKind.F32, Workload("s", (6, 8), layout="shifted"), "cpu")
    for array in (*shifted.inputs.values(), *shifted.outputs.values()):
        assert array.stride() == (9, 1)
        assert array.storage_offset() == 1


def test_strides_are_told_without_arrays():
    for layout in LAYOUTS:
        case = Workload("t", (6, 8, 4), layout=layout)
        made = build(SOFTMAX, ElementKind.F32, case, "cpu")
        found = {n: a.stride() for n, a in (*made.inputs.items(), *made.outputs.items())}
        assert strides_of(made.desc, layout) == found


def test_a_run_writes_its_rows(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert cli.main([*BENCH, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "mean" in shown
    assert "PyTorch eager" in shown
    found = json.loads(path.read_text())
    assert found["gradplan"] == gp.__version__
    assert {"date", "device", "versions", "copy_bandwidth", "rows", "host_us"} <= found.keys()
    assert found["versions"]["torch"] == torch.__version__
    (row,) = found["rows"]
    assert row.keys() >= ROW_KEYS
    assert (row["kind"], row["family"], row["case"]) == ("mean", "reduction", "rows")
    assert (row["shape"], row["axis"], row["layout"]) == ([48, 130], 1, "contiguous")
    assert row["floor_bytes"] == 4 * (48 * 130 + 48)
    assert row["floor_ms"] == pytest.approx(1e3 * row["floor_bytes"] / 10e9)
    assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"])
    assert row["error"] is None
    peer = row["peers"]["torch"]
    assert peer["speedup"] == pytest.approx(peer["ms"] / row["ms"])
    assert found["host_us"]["mean"].keys() == {"bound", "run", "function", "commit"}


def test_each_row_knows_whose_kernels_it_is_of(tmp_path):
    path = tmp_path / "out.json"
    words = [*BENCH, "--repeats", "1", "--json", str(path), "--resume"]
    assert cli.main([*words, "--peer", "none", "--commit", "first"]) == 0
    assert cli.main([*words, "--kind", "sum", "--commit", "second"]) == 0  # a peer of mean, too
    found = read(path)
    assert {row["kind"]: row["commit"] for row in found["rows"]} == {
        "mean": "first",
        "sum": "second",
    }
    assert found["rows"][0]["peers"]["torch"]["ms"] > 0
    assert {kind: cost["commit"] for kind, cost in found["host_us"].items()} == {
        "mean": "first",
        "sum": "second",
    }


def git(folder, *words):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_a_commit_is_told_only_of_a_checkout_of_this_package(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    (tmp_path / "results.py").write_text("one\n")
    assert results.commit_here() is None  # no checkout at all
    git(tmp_path, "init", "-q")
    (tmp_path / "other").touch()
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "a user's own project, with an environment in it")
    assert results.commit_here() is None
    git(tmp_path, "add", "results.py")
    git(tmp_path, "commit", "-qm", "ours")
    commit = git(tmp_path, "rev-parse", "HEAD")[:7]
    assert results.commit_here() == commit
    (tmp_path / "results.py").write_text("two\n")
    assert results.commit_here() == f"{commit}-dirty"


def test_every_kind_and_element_of_the_quick_cases_is_right(capsys, tmp_path):
    path = tmp_path / "all.json"
    words = ["--case", "rows", "flat", "zipf", "--peer", "none", "--no-host"]
    elements = ["--element", "f32", "bf16"]
    argv = ["bench", "--quick", "--in-process", *words, *elements, "--repeats", "1"]
    assert cli.main([*argv, "--json", str(path)]) == 0, capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert {row["kind"] for row in rows} == set(NAMES)
    assert all(row["ms"] and not row["error"] and row["peers"] == {} for row in rows)


def break_launches(monkeypatch, damage):
    launch = gp.plans.BoundLaunch.__call__

    def broken(self, stream=None):
        launch(self, stream)
        damage(self._keep[1])

    monkeypatch.setattr(gp.plans.BoundLaunch, "__call__", broken)


def test_a_wrong_result_is_an_error_and_no_timing(monkeypatch, tmp_path, capsys):
    break_launches(monkeypatch, lambda args: args.dx[3, 5].mul_(1.01))
    path = tmp_path / "wrong.json"
    assert cli.main([*BENCH, "--json", str(path), "--no-host"]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["error"].startswith("wrong: relative error")
    assert row["ms"] is None
    assert row["share"] is None
    assert row["peers"]["torch"]["ms"] > 0
    assert row["peers"]["torch"]["speedup"] is None
    assert "1 of 1 rows failed" in capsys.readouterr().out


def test_a_result_that_changes_later_is_found_out(monkeypatch, tmp_path):
    calls = iter(range(10**9))
    break_launches(monkeypatch, lambda args: next(calls) and args.dx[0, 0].mul_(1.01))
    path = tmp_path / "late.json"
    assert cli.main([*BENCH, "--json", str(path), "--no-host"]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert "after many launches" in row["error"]
    assert row["ms"] is None


def test_one_failing_row_does_not_stop_the_others(monkeypatch, tmp_path):
    bind = gp.SoftmaxBackwardPlan.bind

    def failing(self, args, **more):
        if self.descriptor.kind is SoftmaxKind.SOFTMAX:
            raise gp.KernelFailure(700, "an illegal memory access")
        return bind(self, args, **more)

    monkeypatch.setattr(gp.SoftmaxBackwardPlan, "bind", failing)
    path = tmp_path / "some.json"
    kinds = ["--kind", "softmax", "log_softmax"]
    assert cli.main([*BENCH, *kinds, "--json", str(path), "--no-host"]) == 1
    rows = {row["kind"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["softmax"]["error"] == "KernelFailure: an illegal memory access"
    assert rows["log_softmax"]["ms"] > 0
    assert rows["mean"]["ms"] > 0


def test_resuming_skips_what_is_there(monkeypatch, tmp_path):
    asked = []
    real = measure.measure

    def spied(request):
        asked.append((request.kind.value, request.names))
        return real(request)

    monkeypatch.setattr(measure, "measure", spied)
    path = str(tmp_path / "r.json")
    assert cli.main([*BENCH, "--json", path, "--peer", "none", "--no-host"]) == 0
    before = read(Path(path))["rows"][0]
    assert cli.main([*BENCH, "--json", path, "--resume", "--no-host"]) == 0
    assert cli.main([*BENCH, "--json", path, "--resume", "--no-host", "--kind", "sum"]) == 0
    assert asked == [
        ("mean", ("ours",)),
        ("mean", ("torch",)),  # ours is there, its peer is not
        ("sum", ("ours", "torch")),
    ]
    mean, _sum = read(Path(path))["rows"]
    assert mean["ms"] == before["ms"]
    assert mean["peers"]["torch"]["speedup"] == pytest.approx(
        mean["peers"]["torch"]["ms"] / mean["ms"]
    )


def test_an_error_is_tried_again_when_resuming(monkeypatch, tmp_path):
    path = str(tmp_path / "e.json")
    with monkeypatch.context() as patched:
        break_launches(patched, lambda args: args.dx.fill_(float("nan")))
        assert cli.main([*BENCH, "--json", path, "--no-host"]) == 1
    assert cli.main([*BENCH, "--json", path, "--resume", "--no-host"]) == 0
    (row,) = read(Path(path))["rows"]
    assert row["error"] is None
    assert row["ms"] > 0


def test_results_of_another_device_are_not_mixed(tmp_path, capsys):
    path = tmp_path / "other.json"
    about = {"device": {"name": "another"}, "versions": {}, "copy_bandwidth": 1e9}
    Results(about, path).save()
    assert cli.main([*BENCH, "--json", str(path), "--resume"]) == 2
    assert "is from another, this device is" in capsys.readouterr().err


def test_a_run_that_must_stop_keeps_what_it_has(tmp_path, capsys):
    path = tmp_path / "s.json"
    assert cli.main([*BENCH, "--json", str(path), "--stop-after", "0"]) == 3
    assert "go on with --resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--device", "tpu"], "device 'tpu'"),
        (["--case", "nowhere"], "no case 'nowhere'"),
        (["--shape", "8x8", "--axis", "2"], "--axis 2 is outside"),
        (["--kind", "embedding", "--shape", "8x8"], "no kind that was asked for"),
        (["--resume"], "--json"),
        (["--table", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--kind", "median"], "no kind 'median'"),
        (["--element", "int8"], "no element 'int8'"),
        (["--shape", "8x"], "expected a shape like 8192x8192"),
        (["--shapes", "nowhere.txt"], "nowhere.txt: cannot be read as shapes"),
        (["--from", "nowhere.json", "--html", "r.html"], "nowhere.json: cannot be read"),
        (["--against", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--fail-slower", "5"], "--against"),
        (["--resume", "--json", "-"], "--json"),
        (["--html", "."], "expected a file, got the folder '.'"),
        (["--json", "."], "expected a file, got the folder '.'"),
        (["--prepare", "4"], "--prepare compiles for a GPU"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(capsys, argv, reason):
    assert cli.main(["bench", "--in-process", "--quick", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert reason in captured.err


@pytest.mark.parametrize(("peer", "module"), [("jax", "jax"), ("flaggems", "flag_gems")])
def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch, capsys, peer, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main([*BENCH, "--peer", peer]) == 2
    error = capsys.readouterr().err
    assert f"needs {module}" in error
    assert "pip install" in error


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(BENCH) == 2
    assert "needs torch" in capsys.readouterr().err


def test_a_shape_of_ones_own(tmp_path):
    path = tmp_path / "own.json"
    argv = ["bench", "--in-process", "--quick", "--kind", "softmax", "lerp", "--element", "f16"]
    more = ["--shape", "3x4x5", "--axis", "-2", "--layout", "transposed", "--no-host"]
    assert cli.main([*argv, *more, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["3x4x5@1 transposed"] * 2
    assert [row["axis"] for row in rows] == [1, None]
    assert custom((8, 8), -1, "contiguous").name == "8x8@1"


def test_a_worker_is_replaced_when_it_hangs_or_dies(monkeypatch):
    worker = workers.Apart()
    request = measure.Request(
        MEAN.category, MEAN.kind, ElementKind.F32, QUICK[0], "cpu", ("ours",), Effort(1, 1)
    )
    try:
        with pytest.raises(workers.TookTooLong, match="did not finish in 0 s"):
            worker.ask("measure", request, limit_s=0.0)
        with pytest.raises(workers.Failed, match="AttributeError"):
            worker.ask("nothing_of_the_kind", limit_s=30)
        with pytest.raises(gp.Unsupported, match="tpu"):
            worker.ask("about", "tpu", Effort(1, 1), limit_s=60)
        worker._process.kill()
        worker._process.join()
        assert worker.ask("measure", request, limit_s=100)["ours"]["ms"] > 0
    finally:
        worker.close()


def test_a_peer_that_hangs_is_noted_once_and_not_tried_again(monkeypatch, tmp_path):
    class Hangs(workers.Here):
        def ask(self, name, *given, limit_s):
            if name == "measure" and given[0].names == ("torch",):
                tried.append(given[0].workload.name)
                raise workers.TookTooLong
            return super().ask(name, *given, limit_s=limit_s)

    tried = []
    monkeypatch.setattr(session, "Here", Hangs)
    monkeypatch.setattr(session.Session, "_groups", lambda self, names: [(name,) for name in names])
    path = tmp_path / "h.json"
    argv = [*BENCH, "--case", "columns", "--peer-limit", "7", "--no-host"]
    assert cli.main([*argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    notes = [row["peers"]["torch"]["note"] for row in rows]
    assert notes[0] == "did not compile and run in 7 s"
    assert notes[1].startswith("not tried: did not compile and run in 7 s (rows)")
    assert tried == ["rows"]


def test_the_peers_of_the_published_tables():
    def names(kind, element, case):
        (workload,) = [one for one in CUDA if one.name == case]
        return peers.published(kind, ElementKind(element), workload)

    assert names("cumprod", "bf16", "rows") == ("torch", "compile", "jax")
    assert names("lerp", "bf16", "flat") == ("torch", "compile", "jax")
    assert names("cumsum", "bf16", "long") == ("torch", "compile", "jax")
    assert names("cumprod", "bf16", "columns") == ("torch", "jax")
    assert names("embedding", "bf16", "small_same") == ("torch", "compile")
    assert names("cumprod", "f64", "rows") == ("torch",)
    assert names("mean", "bf16", "flat") == names("mean", "bf16", "wide") == ()
    assert names("embedding", "f32", "small_same") == names("cumsum", "f16", "long") == ()


def requests_of(argv, monkeypatch):
    """What a command line would measure."""
    found = []
    monkeypatch.setattr(session.Session, "run", lambda self, requests: found.extend(requests))
    monkeypatch.setattr(session.Session, "__post_init__", lambda self: None)
    with pytest.raises(AttributeError):  # nothing came of it
        cli.main(["bench", "--device", "cuda", *argv])
    return found


def test_published_peers_are_asked_for_row_by_row(monkeypatch):
    monkeypatch.setattr(command, "available", lambda: ["torch", "compile", "flaggems"])
    argv = ["--peer", "published", "--kind", "mean", "--case", "rows", "long", "wide"]
    found = requests_of(argv, monkeypatch)
    assert all(request.chain for request in found)
    asked = {(one.workload.name, one.element.value): one.names for one in found}
    assert asked == {
        ("rows", "bf16"): ("ours", "torch", "compile"),
        ("long", "bf16"): ("ours", "torch"),
        ("wide", "bf16"): ("ours",),
        ("rows", "f32"): ("ours", "torch"),
        ("long", "f32"): ("ours",),
        ("wide", "f32"): ("ours",),
    }


class Compiler(workers.Here):
    """A worker that notes what it compiles; one peer never ends."""

    compiled: ClassVar[list] = []

    def ask(self, name, *given, limit_s):
        assert name == "prepare"
        (request,) = given
        self.compiled.append((request.kind.value, request.workload.name, *request.names))
        if request.names == ("compile",):
            raise workers.TookTooLong
        if request.names == ("jax",):
            raise workers.Failed("no matter")


def test_everything_is_compiled_in_advance_but_what_is_there(monkeypatch):
    monkeypatch.setattr(session, "Apart", Compiler)
    monkeypatch.setattr(Compiler, "compiled", [])
    options = Namespace(prepare=1, peer_limit=7.0, stop_after=None, in_process=True, device="cuda")
    run = session.Session(options, ["compile"], Console(quiet=True))
    names = ("ours", "torch", "compile", "jax")
    rows, columns = QUICK[:2]
    request = measure.Request(MEAN.category, MEAN.kind, ElementKind.F32, rows, "cuda", names)
    results = Results({"copy_bandwidth": 10e9})
    results.row(request)["peers"]["jax"] = {"ms": 1.0, "speedup": None, "note": None}
    run._prepare(results, [request, replace(request, workload=columns)])
    assert Compiler.compiled == [
        ("mean", "rows", "compile"),  # and not again for the columns
        ("mean", "columns", "jax"),
        ("mean", "rows", "ours"),
        ("mean", "columns", "ours"),
    ]
    asked = run._ask(request, ("compile",))
    assert asked == {"compile": {"error": "did not compile and run in 14 s (rows)"}}
    asked = run._ask(replace(request, workload=columns), ("compile",))
    assert asked["compile"]["error"].startswith("not tried: did not")


@pytest.mark.parametrize("case", [one for one in CUDA if one.reach is not Reach.LERP])
def test_the_kernels_of_a_row_are_known_without_its_arrays(monkeypatch, case):
    pytest.importorskip("triton")
    steps = []
    monkeypatch.setattr(launch, "compiled", lambda step, *more: steps.append((step, more)))
    spec = next(spec for spec in SPECS[::-1] if case.reach.holds(spec))
    request = measure.Request(spec.category, spec.kind, ElementKind.BF16, case, "sm_90", ("ours",))
    assert measure.prepare(request) is None
    assert steps
    assert {more for _, more in steps} == {(16, 90)}


def test_a_peer_is_compiled_by_running_it(monkeypatch):
    ran = []

    def prepare(problem):
        prepared = peers._torch(problem)
        return replace(prepared, call=lambda: ran.append(problem.device) or prepared.call())

    monkeypatch.setitem(peers.PEERS, "torch", replace(peers.PEERS["torch"], prepare=prepare))
    request = measure.Request(
        MEAN.category, MEAN.kind, ElementKind.F32, QUICK[0], "cpu", ("torch",)
    )
    measure.prepare(request)
    assert ran == ["cpu"]


@pytest.mark.parametrize(("cores", "told"), [(1.0, True), (0.1, False)])
def test_a_busy_machine_is_told(monkeypatch, capsys, cores, told):
    monkeypatch.setattr(measure.clocks.Others, "cores", lambda self: cores)
    assert cli.main([*BENCH, "--no-host"]) == 0
    assert ("no time above is to be believed" in capsys.readouterr().out) is told


def test_timings():
    timing = Timing.of([0.005, 0.001, 0.002, 0.003, 0.004, 0.006])
    assert (timing.ms, timing.ms_min, timing.ms_p20, timing.ms_p80) == (3.5, 1, 2, 5)
    assert Effort(100).count(1) == 100
    assert Effort(100).count(1000) == 3
    assert Effort(100, repeats=7).count(1000) == 7


def test_every_repetition_on_a_gpu_begins_with_cold_caches(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 0.25

    buffer = SimpleNamespace(zero_=lambda: log.append("flush"))
    cuda = SimpleNamespace(Event=Event, synchronize=lambda: log.append("wait"))
    fake = SimpleNamespace(
        cuda=cuda, int32=None, empty=lambda count, **_: count * 4 >= 256 << 20 and buffer
    )
    monkeypatch.setattr(measure.clocks, "needed", lambda module: fake)
    seconds = measure.clocks.cuda_samples(lambda: log.append("call"), Effort(1.0))
    assert seconds == [0.25e-3] * 4
    one = ["flush", "flush", "event", "call", "event"]
    assert log == ["call", "wait", *one * 3, "wait", *one, "wait", *one * 4, "wait"]


def test_launches_one_after_the_other_take_turns(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            last = "".join(map(str, log)).rpartition("flush")[2]
            return 0.25 * sum(map(last.count, "012"))

    buffer = SimpleNamespace(zero_=lambda: log.append("flush"))
    cuda = SimpleNamespace(Event=Event, synchronize=lambda: log.append("wait"))
    fake = SimpleNamespace(cuda=cuda, int32=None, empty=lambda count, **_: buffer)
    monkeypatch.setattr(measure.clocks, "needed", lambda module: fake)
    calls = [lambda k=k: log.append(k) for k in range(3)]
    seconds = measure.clocks.cuda_chain_samples(calls, Effort(time_ms=10.0))
    assert seconds == pytest.approx([0.25e-3] * 5)
    first = [*["flush"] * 8, "event", 0, 1, 2, "event", "wait"]
    # 10 ms shared by ten: a millisecond is four calls of 0.25 ms, in whole rounds.
    chain = [*["flush"] * 8, "event", 0, 1, 2, 0, 1, 2, "event", "wait"]
    assert log == first + 6 * chain
    assert len(measure.clocks.cuda_chain_samples(calls, Effort(1.0, repeats=2))) == 1


def test_chains_go_round_more_than_a_cache():
    sets = measure.clocks.chain_sets
    assert [sets(n << 20) for n in (4, 64, 128, 512, 4096)] == [64, 8, 4, 2, 2]
    assert sets(3 << 20) == sets(0) == 0


def test_a_twin_lies_alike_in_memory_of_its_own():
    for layout in LAYOUTS:
        one = build(SOFTMAX, ElementKind.F32, Workload("t", (6, 8, 4), layout=layout), "cpu")
        other = one.twin()
        assert one.nbytes == other.nbytes == 3 * 6 * 8 * 4 * 4
        for name, array in one.inputs.items():
            assert other.inputs[name].stride() == array.stride()
            assert torch.equal(other.inputs[name], array)
            assert other.inputs[name].data_ptr() != array.data_ptr()
        (dx,) = other.outputs.values()
        assert dx.stride() == one.outputs["dx"].stride()
        assert dx.isnan().all()


def in_chains(monkeypatch):
    """Chains of three on the CPU, by a clock that says 0.5 ms."""

    def samples(calls, effort):
        for call in calls:
            call()
        chained.append(len(calls))
        return [0.5e-3]

    chained = []
    monkeypatch.setattr(measure.clocks, "chain_sets", lambda nbytes: 3)
    monkeypatch.setattr(measure.clocks, "cuda_chain_samples", samples)
    request = measure.Request(
        MEAN.category, MEAN.kind, ElementKind.F32, QUICK[0], "cpu", ("ours",), Effort(1, 1)
    )
    return replace(request, chain=True), chained


def test_a_chain_is_timed_beside_the_row(monkeypatch):
    request, chained = in_chains(monkeypatch)
    results = Results({"copy_bandwidth": 10e9})
    row = results.note(request, measure.measure(request))
    assert chained == [3]
    assert row["chain_ms"] == 0.5
    assert row["chain_share"] == pytest.approx(row["floor_ms"] / 0.5)
    assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"])
    lines = session._Lines([], [request])
    assert lines.heading().endswith("in a row µs  share  variant")
    assert f"500.0{row['chain_share']:>7.0%}" in lines.line(row)
    plain = replace(request, chain=False)
    row = Results({"copy_bandwidth": 10e9}).note(plain, measure.measure(plain))
    assert (row["chain_ms"], row["chain_share"], chained) == (None, None, [3])
    assert "in a row" not in session._Lines([], [plain]).heading()


def test_a_chain_whose_results_differ_is_an_error(monkeypatch):
    request, _ = in_chains(monkeypatch)
    seen = []

    def late(args):
        if id(args.dx) not in seen:
            seen.append(id(args.dx))
        if len(seen) == 3:  # the last set alone
            args.dx[0, 0] += 1

    break_launches(monkeypatch, late)
    found = measure.measure(request)["ours"]
    assert found["error"] == "wrong: dx differs where launches follow one another"


def some_results(path, **changes):
    """Two kinds and an embedding, one of them with a peer that gave up."""

    def row(kind, family, case, shape, axis, ms, note=None):
        peer = {"ms": None if note else 2 * ms, "speedup": None if note else 2.0, "note": note}
        return {
            "kind": kind,
            "family": family,
            "element": "bf16",
            "case": case,
            "shape": shape,
            "axis": axis,
            "layout": "contiguous",
            "variant": "rows/one",
            "floor_bytes": 1,
            "floor_ms": 0.05,
            "ms": ms,
            "ms_min": ms,
            "share": 0.05 / ms,
            "error": None,
            "peers": {"torch": peer},
        }

    found = {
        "gradplan": "0.1.0",
        "date": "2026-01-02T03:04:05+00:00",
        "device": {"name": "Some Device", "arch": "sm_90"},
        "versions": {"torch": "2.11.0"},
        "copy_bandwidth": 4.2e12,
        "copies_ms": {"64": 0.02, "1024": 0.26},
        "rows": [
            row("cumsum", "scan", "rows", [8192, 8192], 1, 0.1),
            row("softmax", "softmax", "rows", [8192, 8192], 1, 0.0625, "did not compile"),
            row("softmax", "softmax", "long", [64, 1 << 20], 1, 0.2),
            row("embedding", "embedding", "zipf", [50304, 768, 262144], None, 0.25),
        ],
        "host_us": {"softmax": {"bound": 5.0, "run": 12.0, "function": 20.0}},
    }
    path.write_text(json.dumps(found | changes))
    return path


def test_the_table_is_made_from_the_results(tmp_path):
    text = markdown.markdown([some_results(tmp_path / "a.json")])
    assert "**Some Device**, 2026-01-02, gradplan 0.1.0, torch 2.11.0." in text
    assert "4.20 TB/s" in text
    lines = text.splitlines()
    assert "| softmax | 0.062 | 80 % | did not compile |" in lines
    assert "| cumsum | 0.100 | 50 % | 0.200 (2.0 ×) |" in lines
    assert "| gradient | long<br>64 × 2²⁰, axis 1 |" in lines
    assert "| softmax | 25 % · 2.0 × |" in lines
    assert "| zipf: 50304 × 768, 262144 | 0.250 | 20 % | 0.500 (2.0 ×) |" in lines
    assert lines.index("| softmax | 0.062 | 80 % | did not compile |") < lines.index(
        "| cumsum | 0.100 | 50 % | 0.200 (2.0 ×) |"
    )
    assert "bound launch 5.0 and 5.0 µs" in text
    assert "A plain copy, by the same clock: 80 % at 64 MiB, 98 % at 1024 MiB" in text
    assert not any(line != line.rstrip() for line in lines)


def test_the_table_tells_whose_kernels_the_rows_are_of(tmp_path):
    found = json.loads(some_results(tmp_path / "a.json").read_text())
    assert markdown.commits(found) == ""
    assert "commit" not in markdown.section(found)
    first, *others = found["rows"]
    halves = {**first, "element": "f16", "commit": "new"}
    found["rows"] = [{**row, "commit": "old"} for row in (first, *others)] + [
        halves,
        {**others[-1], "element": "f32", "commit": "new"},
    ]
    found["rows"][3]["commit"] = "new"  # the embedding: all of its elements are
    found["host_us"]["softmax"]["commit"] = "older"
    assert markdown.commits(found).splitlines() == [
        "| commit | rows | which |",
        "| :--- | ---: | :--- |",
        "| `new` | 3 | embedding: zipf; cumsum f16: rows |",
        "| `old` | 3 | all others |",
    ]
    lines = markdown.section(found).splitlines()
    assert "- Rows by the commit whose kernels they are of: `old` (3), `new` (3)." in lines
    assert lines[-1].endswith("function 20.0 and 20.0 µs (`older`).")


def test_committed_rows_name_their_commits():
    for path in (*(ROOT / "benchmarks" / "results").glob("*.json"), ODD):
        found = read(path)
        commits = {one["commit"] for one in (*found["rows"], *found["host_us"].values())}
        assert all(re.fullmatch("[0-9a-f]{7}", commit) for commit in commits)


def with_chains(path, factor=1.0):
    """The same results, with times of launches that follow one another."""
    found = json.loads(some_results(path).read_text())
    for row in found["rows"]:
        row["chain_ms"] = 0.9 * factor * row["ms"]
        row["chain_share"] = row["floor_ms"] / row["chain_ms"]
    found["rows"][2]["floor_ms"] = 0.1  # not short
    found["copies_chain_ms"] = {"64": 0.016, "1024": 0.256}
    path.write_text(json.dumps(found))
    return path


def test_the_table_tells_of_launches_one_after_the_other(tmp_path):
    assert "one after the other" not in markdown.markdown([some_results(tmp_path / "a.json")])
    text = markdown.markdown([with_chains(tmp_path / "a.json")])
    lines = text.splitlines()
    title = "bf16, one launch after the other, where the floor is below 100 µs: share"
    table = lines[lines.index(f"<summary>{title}</summary>") + 2 :][:5]
    assert table == [
        "| gradient | rows | zipf |",
        "| --- | ---: | ---: |",
        "| softmax | 89 % |  |",
        "| cumsum | 56 % |  |",
        "| embedding |  | 22 % |",
    ]
    assert "- Plain copies one after the other: 100 % at 64 MiB, 100 % at 1024 MiB." in lines


def test_what_the_readme_folds_the_site_shows(tmp_path):
    found = json.loads(with_chains(tmp_path / "a.json").read_text())
    for row in found["rows"][:2]:
        found["rows"].append({**row, "element": "f64"})
    (tmp_path / "a.json").write_text(json.dumps(found))
    folded, shown = markdown.markdown([tmp_path / "a.json"]), markdown.section(found)
    titles = re.findall(r"<summary>(.*)</summary>", folded)
    assert [title.split(" ")[0] for title in titles] == ["f64,", "bf16,", "bf16,", "f64,"]
    assert "bf16, last axis of 8192 × 8192; peers: ms (our speed-up)" in folded.splitlines()
    assert "<summary>" not in shown
    for title in titles:
        assert title in shown.splitlines()
    tables = [[line for line in text.splitlines() if line[:1] == "|"] for text in (folded, shown)]
    assert sorted(tables[0]) == sorted(tables[1])


def test_the_table_goes_between_its_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{markdown.BEGIN}\nold\n{markdown.END}\nbelow\n")
    results = some_results(tmp_path / "a.json")
    argv = ["bench", "--table", str(results), "--readme", str(readme)]
    assert cli.main(argv) == 0
    text = readme.read_text()
    assert text.startswith(f"above\n{markdown.BEGIN}\n**Some Device**")
    assert text.endswith(f"\n{markdown.END}\nbelow\n")
    assert "old" not in text
    assert cli.main(argv) == 0
    assert readme.read_text() == text
    readme.write_text("no markers")
    assert cli.main(argv) == 2


def test_the_table_of_the_readme_is_that_of_the_committed_results():
    text = (ROOT / "README.md").read_text()
    committed = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert markdown.replaced(text, markdown.markdown(committed)) == text, "run: make table"


def test_summaries():
    def row(kind, share, speedup):
        peers = {"torch": {"ms": 1, "speedup": speedup}}
        return {"kind": kind, "case": "rows", "element": "f32", "share": share, "peers": peers}

    rows = [row("softmax", 0.9, 2.0), row("mean", 0.5, 8.0), row("sum", None, 1000.0)]
    mean, count, worst = speedups(rows)["torch"]
    assert (mean, count, worst["kind"]) == (pytest.approx(4.0), 2, "softmax")
    assert lowest_shares(rows)["rows", "f32"]["kind"] == "mean"


def test_the_command_imports_nothing_heavy():
    code = (
        "import sys, gradplan.bench.command as c; "
        "print([m for m in ('torch', 'jax', 'triton', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"
    assert not lazy.installed("no_such_module")


SHAPES = """
# what we train with
48x66                                   # the last axis
5x6x7 axis=1 layout=transposed
64x32 axis=0 name=mine

90x34 indices=200 draw=zipf
"""


def test_a_file_of_shapes(tmp_path):
    path, out = tmp_path / "shapes.txt", tmp_path / "out.json"
    path.write_text(SHAPES)
    argv = ["bench", "--in-process", "--quick", "--family", "softmax", "embedding", "--no-host"]
    more = ["--shapes", str(path), "--element", "f32", "--peer", "none", "--json", str(out)]
    assert cli.main([*argv, *more]) == 0
    rows = read(out)["rows"]
    named = [row["case"] for row in rows if row["kind"] in ("softmax", "embedding")]
    assert named == ["48x66@1", "5x6x7@1 transposed", "mine", "90x34x200 zipf"]
    assert {row["kind"] for row in rows} == {"softmax", "log_softmax", "embedding"}
    assert all(row["ms"] for row in rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("8y8", "expected a shape like 8192x8192, got '8y8'"),
        ("8x0", "extents are at least 1"),
        ("8x8 axes=1", "got 'axes'"),
        ("8x8 axis=2", "axis 2 is outside the shape 8x8"),
        ("8x8 axis=one", "axis is a number"),
        ("8x8 layout=odd", "layout is one of"),
        ("8x8 draw=zipf", "indices="),
        ("8x8x8 indices=3", "ROWSxCOLUMNS"),
        ("# nothing", "there is no shape in it"),
    ],
)
def test_a_bad_line_is_named(tmp_path, capsys, line, reason):
    path = tmp_path / "shapes.txt"
    path.write_text(f"4x4\n\n{line}\n" if not line.startswith("#") else line)
    assert cli.main(["bench", "--in-process", "--shapes", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error
    assert "line 3" in error or line.startswith("#")


def test_layouts_choose_among_the_cases(tmp_path):
    out = tmp_path / "out.json"
    argv = ["bench", "--in-process", "--quick", "--kind", "mean", "--element", "f32", "--no-host"]
    more = ["--peer", "none", "--layout", "sliced", "transposed", "--json", str(out)]
    assert cli.main([*argv, *more]) == 0
    assert {row["layout"] for row in read(out)["rows"]} == {"sliced", "transposed"}


def test_results_go_to_stdout_and_nothing_else_does(capsys):
    assert cli.main([*BENCH, "--json", "-", "--no-host"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"][0]["kind"] == "mean"
    assert "copy bandwidth" in captured.err


def two_results(tmp_path, factors):
    old, new = some_results(tmp_path / "old.json"), tmp_path / "new.json"
    found = json.loads(old.read_text())
    for row, factor in zip(found["rows"], factors, strict=True):
        row["ms"] *= factor
    new.write_text(json.dumps(found))
    return old, new


def test_what_moved_is_shown(tmp_path, capsys):
    old, new = two_results(tmp_path, (1.2, 0.5, 1.01, 1.04))
    argv = ["bench", "--from", str(new), "--against", str(old)]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if "slower" in line or "faster" in line]
    assert ["+20.0%" in lines[0], "+4.0%" in lines[1], "-50.0%" in lines[2]] == [True] * 3
    assert "2 slower, 1 faster, 1 same" in lines[-1]
    assert cli.main([*argv, "--fail-slower", "25"]) == 0
    assert cli.main([*argv, "--fail-slower", "10"]) == 1
    assert cli.main([*argv, "--fail-slower", "1", "--noise", "30"]) == 0
    capsys.readouterr()
    assert cli.main([*argv, "--json", "-"]) == 0
    captured = capsys.readouterr()
    moved = json.loads(captured.out)["against"]
    verdicts = [change["verdict"] for change in moved["changes"]]
    assert verdicts == ["slower", "slower", "same", "faster"]
    assert "What moved" in captured.err


def test_what_moved_one_after_the_other_is_shown_beside(tmp_path, capsys):
    old, new = with_chains(tmp_path / "old.json"), with_chains(tmp_path / "new.json", 1.1)
    argv = ["bench", "--from", str(new), "--against", str(old)]
    assert cli.main(argv) == 0  # by the first clock nothing moved
    shown = capsys.readouterr().out
    assert "What moved" not in shown
    assert "one after the other × 1.100 in that of 4" in shown
    found = json.loads(new.read_text())
    found["rows"][0]["ms"] *= 2
    new.write_text(json.dumps(found))
    assert cli.main([*argv, "--json", "-"]) == 0
    captured = capsys.readouterr()
    changes = json.loads(captured.out)["against"]["changes"]
    assert [change["chain_change"] for change in changes] == pytest.approx([0.1] * 4)
    (line,) = [line for line in captured.err.splitlines() if "+100.0%" in line]
    assert "slower" in line
    assert "+10.0%" in line


def test_a_change_within_the_spread_of_a_row_is_none(tmp_path):
    old, new = two_results(tmp_path, (1.2, 1, 1, 1))
    found = json.loads(new.read_text())
    found["rows"][0] |= {"ms_p20": 0.09, "ms_p80": 0.15}
    new.write_text(json.dumps(found))
    argv = ["bench", "--from", str(new), "--against", str(old), "--fail-slower", "5"]
    assert cli.main(argv) == 0


def test_a_row_that_fails_now_counts_as_slower(tmp_path, capsys):
    old, new = two_results(tmp_path, (1, 1, 1, 1))
    found = json.loads(new.read_text())
    found["rows"][0] |= {"ms": None, "error": "wrong: by far"}
    found["rows"][1]["case"] = "another"
    found["device"]["name"] = "Another Device"
    found["versions"]["torch"] = "2.12.0"
    new.write_text(json.dumps(found))
    argv = ["bench", "--from", str(new), "--against", str(old), "--fail-slower", "5"]
    assert cli.main(argv) == 1
    shown = capsys.readouterr().out
    assert "fails now: wrong: by far" in shown
    assert "1 rows are new and 1 are gone" in shown
    assert "then on Some Device, now on Another Device" in shown
    assert "torch 2.11.0 then, 2.12.0 now" in shown


def test_results_alone_must_be_made_into_something(tmp_path, capsys):
    results = str(some_results(tmp_path / "a.json"))
    assert cli.main(["bench", "--from", results]) == 2
    assert "--html" in capsys.readouterr().err
    (tmp_path / "list.json").write_text("[]")
    assert cli.main(["bench", "--from", str(tmp_path / "list.json"), "--html", "r.html"]) == 2
    assert "not a file of results" in capsys.readouterr().err


def test_a_run_ends_in_a_report_and_a_comparison(tmp_path, capsys):
    first, page = tmp_path / "first.json", tmp_path / "r.html"
    assert cli.main([*BENCH, "--json", str(first), "--no-host"]) == 0
    argv = [*BENCH, "--no-host", "--html", str(page), "--against", str(first), "--noise", "1e6"]
    assert cli.main(argv) == 0
    assert "1 same" in capsys.readouterr().out
    assert '"kind":"mean"' in page.read_text()
