"""Kernels compiled on one machine for the tests and benchmarks on another.

`pack` compiles, without a GPU, what the tests of values, `make sanitize`, `gradplan verify` and
`gradplan bench` run on an architecture, and writes cubins and their metadata into one archive. It
can be stopped and goes on where it was; what the archive holds already is compiled again only if
its sources have changed. `unpack` puts an archive into Triton's cache on the machine with the GPU.
`save` makes one of all that a cache holds, for the next machine like this one.

A cubin is taken only where Triton would have made the same one: it is known by the hashes of its
sources, of its options and of the assembler. Triton's own key holds the hash of its library
besides, of which there is one for each version of Python; `unpack` asks for the same one unless it
is told `--any-build`, and for the same version of Triton always.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tools")]
ABOUT = "about.json"
_PLACE = "place:"  # of what was saved from a cache, whose identity is not known


def variants(arch: str, groups: Sequence[str]) -> Iterator[Any]:
    """Every variant of the groups once, those that most need first."""
    seen = set()
    for name in groups:
        for one in GROUPS[name](arch):
            if one.key not in seen:
                seen.add(one.key)
                yield one


def _of(desc: Any, strides: Any, thresholds: Any, aligned: int) -> Iterator[Any]:
    from gradplan.backends.gpu import aot, programs

    program = programs.choose(desc, strides, thresholds)
    while program is not None:
        # At odd addresses: what runs where arrays lie alike, or what is behind all others.
        if aligned == 16 or program.alike or program.unaligned is None:
            for step in (*program.steps, *program.apart):
                yield aot.Variant(step, aligned, desc.element, "")
        if aligned == 16:
            break
        program = program.unaligned


def _of_problem(problem: Any, thresholds: Any) -> Iterator[Any]:
    from gradplan.views import view

    arrays = problem.arrays
    strides = {name: view(a).strides for name, a in arrays.items()}
    aligned = 16 if all(a.ctypes.data % 16 == 0 for a in arrays.values()) else 1
    yield from _of(problem.desc, strides, thresholds, aligned)


def _of_case(case: Any, thresholds: Any) -> Iterator[Any]:
    """Without the arrays, where their size is what takes the time."""
    from gradplan import cases

    odd = case.layout in (cases.Layout.OFFSET, cases.Layout.SHIFTED)
    aligned = 1 if odd else 16
    yield from _of(case.desc, cases.strides_of(case), thresholds, aligned)


def _bench(arch: str) -> Iterator[Any]:
    from gradplan.backends.gpu.table import table_of
    from gradplan.bench.problems import posed
    from gradplan.bench.workloads import CUDA, strides_of
    from gradplan.geometry import told_strides
    from gradplan.registry import ELEMENTS, KINDS

    thresholds = table_of(arch)
    for element in ("bf16", "f32", "f16", "f64"):
        for case in CUDA:
            if element in ("f16", "f64") and case.name not in ("rows", "flat"):
                continue
            for spec in KINDS.values():
                if case.reach.holds(spec):
                    (kind,) = (one for one in ELEMENTS if one.value == element)
                    desc, _ = posed(spec, kind, case)
                    shapes = {operand.name: operand.shape for operand in desc.operands}
                    strides = {
                        name: told_strides(shapes[name], steps)
                        for name, steps in strides_of(desc, case.layout, case.without).items()
                    }
                    yield from _of(desc, strides, thresholds, 16)


def _each() -> Iterator[tuple[Any, Any]]:
    from gradplan.registry import ELEMENTS, KINDS

    for spec in KINDS.values():
        for element in ELEMENTS:
            yield spec, element


def _grid(arch: str) -> Iterator[Any]:
    from gradplan import cases
    from gradplan.backends.gpu.table import table_of

    for spec, element in _each():
        for layout in cases.layouts_of(spec):
            for case in cases.grid(spec, element, layout, turns=True):
                yield from _of_problem(cases.Problem(case), table_of(arch))


def _large(arch: str) -> Iterator[Any]:
    from covering import large
    from gradplan.backends.gpu.table import table_of

    for spec, element in _each():
        for case in large(spec, element, arch):
            yield from _of_case(case, table_of(arch))


def _small(arch: str) -> Iterator[Any]:
    from covering import SPECS, covering, small_table
    from gradplan.registry import ELEMENTS, Engine

    for k, spec in enumerate(SPECS):
        for problem in covering(spec, ELEMENTS[k % len(ELEMENTS)]):
            yield from _of_problem(problem, small_table())
            if spec.engine in (Engine.ROW_STATE, Engine.RECURRENCE):
                yield from _of_problem(problem, small_table(waits=False))


def _parts(arch: str) -> Iterator[Any]:
    from covering import small_parts

    for spec, element in _each():
        for some, thresholds in small_parts(spec):
            for case, _ in some(spec, element):
                yield from _of_case(case, thresholds)


def _sanitize(arch: str) -> Iterator[Any]:
    import sanitize

    for problem, thresholds in sanitize.some_problems(arch, None):
        yield from _of_problem(problem, thresholds)


GROUPS = {
    "bench": _bench,
    "grid": _grid,
    "large": _large,
    "parts": _parts,
    "small": _small,
    "sanitize": _sanitize,
}


def identity(variant: Any, capability: int) -> str:
    """What Triton's key of a variant holds besides its own library."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend

    from gradplan.backends.gpu import launch

    launch._name_all()
    function = launch._function(variant.step.kernel)
    signature = launch._signature(variant.step, variant.pointer_bytes)
    source = launch._source(function)(function, *signature)
    backend = make_backend(GPUTarget("cuda", capability, 32))
    asked = {"num_warps": variant.step.warps, **source.parse_options()}
    if variant.step.registers:
        asked["maxnreg"] = variant.step.registers
    options = backend.parse_options(asked)
    env = str(sorted(get_cache_invalidating_env_vars().items()))
    return f"{source.hash()}-{backend.hash()}-{options.hash()}-{env}"


def place_of(told: str) -> str:
    """The folder of Triton's cache for an identity, on this very machine."""
    from triton.runtime.cache import _base32, triton_key

    if told.startswith(_PLACE):
        return told.removeprefix(_PLACE)
    key = f"{triton_key()}-{told}"
    return str(_base32(hashlib.sha256(key.encode()).hexdigest()))


def about() -> dict[str, str]:
    import triton
    from triton.runtime.cache import triton_key

    build = hashlib.sha256(triton_key().encode()).hexdigest()
    return {"triton": triton.__version__, "build": build}


def compile_one(variant: Any, capability: int) -> tuple[str, dict[str, bytes]]:
    """(its identity, its files)."""
    from gradplan.backends.gpu import launch

    kernel = launch.compiled(variant.step, variant.pointer_bytes, capability)
    files = {
        name: Path(path).read_bytes()
        for name, path in kernel.metadata_group.items()
        if name.endswith((".json", ".cubin"))
    }
    told = identity(variant, capability)
    assert place_of(told) == next(iter(map(Path, kernel.metadata_group.values()))).parent.name
    return told, files


def read_archive(path: Path) -> tuple[dict[str, str], dict[str, dict[str, bytes]]]:
    """(about it, files by identity)."""
    if not path.exists():
        return about(), {}
    found: dict[str, dict[str, bytes]] = {}
    names: dict[str, str] = {}
    made: dict[str, str] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            if member.name == ABOUT:
                made = json.loads(data)
                continue
            folder, _, name = member.name.partition("/")
            if name == "identity":
                names[folder] = data.decode()
            else:
                found.setdefault(folder, {})[name] = data
    return made, {names[folder]: files for folder, files in found.items()}


def write_archive(path: Path, kernels: dict[str, dict[str, bytes]]) -> None:
    # In one step, so that it is whole at any time.
    partial = path.with_name(path.name + ".part")

    def put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))

    with tarfile.open(partial, "w:xz", preset=6) as tar:
        put(tar, ABOUT, json.dumps(about()).encode())
        for told, files in kernels.items():
            folder = hashlib.sha256(told.encode()).hexdigest()[:32]
            put(tar, f"{folder}/identity", told.encode())
            for name, data in files.items():
                put(tar, f"{folder}/{name}", data)
    partial.replace(path)


def pack(options: argparse.Namespace) -> int:
    # Lines of the source stay in, three quarters of a cubin: without them some kernels have other
    # instructions, and another key.
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    capability = int(options.arch.removeprefix("sm_"))
    made, old = read_archive(options.archive)
    if made != about():
        old = {}
    begin = time.monotonic()
    every = list(variants(options.arch, options.group))
    if options.count:
        print(f"{len(every)} kernels")
        return 0
    kept, todo = {}, []
    for one in every:
        told = identity(one, capability)
        if told in old:
            kept[told] = old[told]
        else:
            todo.append(one)
    print(f"{len(every)} kernels, {len(todo)} to compile, after {time.monotonic() - begin:.0f} s")
    failed = 0
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(options.jobs, mp_context=context) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = cache
        pending = [pool.submit(compile_one, one, capability) for one in todo]
        try:
            for number, future in enumerate(as_completed(pending), 1):
                try:
                    told, files = future.result()
                    kept[told] = files
                except Exception as error:
                    failed += 1
                    print(f"failed: {error}", flush=True)
                if number % 100 == 0:
                    print(f"{number} of {len(todo)}, {time.monotonic() - begin:.0f} s", flush=True)
                if number % 500 == 0:
                    write_archive(options.archive, kept)
                if time.monotonic() - begin > options.stop_after:
                    print(f"out of time after {number} of {len(todo)}")
                    break
        finally:
            for future in pending:
                future.cancel()
            write_archive(options.archive, kept)
    print(f"{len(kept)} kernels, {options.archive.stat().st_size / 1e6:.1f} MB, {failed} failed")
    return 1 if failed else 0


def save(options: argparse.Namespace) -> int:
    from triton import knobs

    kernels = {}
    for cubin in sorted(Path(knobs.cache.dir).glob("*/*.cubin")):
        head = cubin.with_suffix(".json")
        if head.exists() and head.with_name(f"__grp__{head.name}").exists():
            files = {one.name: one.read_bytes() for one in (head, cubin)}
            kernels[_PLACE + cubin.parent.name] = files
    write_archive(options.archive, kernels)
    print(f"{len(kernels)} kernels, {options.archive.stat().st_size / 1e6:.1f} MB")
    return 0


def unpack(options: argparse.Namespace) -> int:
    from triton import knobs

    made, kernels = read_archive(options.archive)
    here = about()
    if made["triton"] != here["triton"]:
        print(f"made with triton {made['triton']}, this is {here['triton']}")
        return 1
    if made["build"] != here["build"] and not options.any_build:
        print(
            f"made with another build of triton, {made['build'][:12]}; this: {here['build'][:12]}"
        )
        return 1
    for told, files in kernels.items():
        folder = Path(knobs.cache.dir) / place_of(told)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (head,) = (name for name in files if name.endswith(".json"))
        group = {"child_paths": {name: str(folder / name) for name in files}}
        (folder / f"__grp__{head}").write_text(json.dumps(group))
    print(f"{len(kernels)} kernels into {knobs.cache.dir}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="compile into an archive")
    packing.add_argument("archive", type=Path)
    packing.add_argument("--arch", default="sm_90")
    packing.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    packing.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    packing.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    packing.add_argument("--count", action="store_true", help="only say how many there are")
    packing.set_defaults(run=pack)
    saving = commands.add_parser("save", help="make an archive of Triton's cache")
    saving.add_argument("archive", type=Path)
    saving.set_defaults(run=save)
    unpacking = commands.add_parser("unpack", help="put an archive into Triton's cache")
    unpacking.add_argument("archive", type=Path)
    unpacking.add_argument("--any-build", action="store_true", help="of the same version of Triton")
    unpacking.set_defaults(run=unpack)
    options = parser.parse_args(argv)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
