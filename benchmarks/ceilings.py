"""What a gradient of whole rows can reach at most on this GPU, by the clock of `gradplan bench`.

Whoever takes whole rows reads a block, of one array or of two, joins all of it, and only then
writes as much as one. `ceilings.cu` does that and nothing else, by hand, in blocks of 2 to 128 KiB,
in registers, in shared memory and in both, and by clusters up to 256 KiB: the best of them is the
ceiling for rows of that many bytes. What a launch takes that does nothing is measured too.

"Kept" are those that tell the second cache to keep what they read for longest; what others pay for
that, whose own data the cache held before, is measured as well. Needs nvcc and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from gradplan.bench import clocks

_MIB = (64, 128)  # of each array
_AFTER_MIB = (12, 24, 36)  # of data that others read again and again
_AFTER = "256 threads, 4 registers, 0 shared"


def _built(folder: str) -> Any:
    library = Path(folder) / "ceilings.so"
    source = Path(__file__).with_suffix(".cu")
    target = ["-gencode", "arch=compute_90a,code=sm_90a"]
    shared = ["-shared", "-Xcompiler", "-fPIC", "-cudart", "shared"]
    subprocess.run(["nvcc", "-O3", *target, *shared, "-o", library, source], check=True)
    built = ctypes.CDLL(str(library))
    built.way_name.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    built.way_launch.argtypes = [
        *(ctypes.c_int, pointer, pointer, pointer),
        *(ctypes.c_size_t, pointer),
    ]
    return built


def measure(time_ms: float) -> dict[str, Any]:
    """The share of each way, where what it wrote is right."""
    import torch

    bandwidth = clocks.cuda_copy_bandwidth()
    x = torch.randn(max(_MIB) << 18, device="cuda")
    y = torch.randn_like(x)
    out = torch.empty_like(x)

    def shares(launch: Callable[[int], object], inputs: int) -> dict[str, float]:
        found = {}
        for mib in _MIB:
            size = mib << 20
            out.fill_(float("nan"))
            launch(size)
            right = x + y if inputs == 2 else x
            torch.testing.assert_close(out[: size // 4], right[: size // 4], rtol=1e-4, atol=1e-6)
            samples = clocks.cuda_samples(partial(launch, size), clocks.Effort(time_ms=time_ms))
            moved = (inputs + 1) * size
            found[f"{moved >> 20} MiB"] = moved / bandwidth / statistics.median(samples)
        return found

    def copy(size: int) -> None:
        out[: size // 4].copy_(x[: size // 4])

    nothing = 0.0
    rows: list[dict[str, Any]] = [{"way": "a plain copy", "block_bytes": None, **shares(copy, 1)}]
    after: dict[str, Any] = {}
    size = max(_MIB) << 20
    pointers = x.data_ptr(), y.data_ptr(), out.data_ptr()
    stream = torch.cuda.current_stream().cuda_stream
    with tempfile.TemporaryDirectory() as folder:
        library = _built(folder)
        for i in range(library.way_count()):

            def launch(size: int, i: int = i) -> None:
                code = library.way_launch(i, *pointers, size, stream)
                if code:
                    raise RuntimeError(f"{library.way_name(i).decode()}: CUDA error {code}")

            library.way_prepare(i)
            inputs = library.way_inputs(i)
            if inputs == 0:
                samples = clocks.cuda_samples(partial(launch, 0), clocks.Effort(repeats=200))
                nothing = 1e6 * statistics.median(samples)
                continue
            way = library.way_name(i).decode() + (", two inputs" if inputs == 2 else "")
            rows.append({"way": way, "block_bytes": library.way_bytes(i), **shares(launch, inputs)})
            if way.removesuffix(", kept") == _AFTER:
                after[way] = {
                    f"{mib} MiB": _after(partial(launch, size), mib) for mib in _AFTER_MIB
                }
    return {
        "what": (__doc__ or "").partition("\n")[0],
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "copy_bytes_per_s": bandwidth,
        "us_of_a_launch_that_does_nothing": round(nothing, 2),
        "rows": rows,
        "us_of_reading_so_much_four_times_after": after,
    }


def _after(call: Callable[[], object], mib: int, repeats: int = 15) -> list[float]:
    """Microseconds of four passes, one by one, over data that was in the cache before a call."""
    import torch

    data = torch.randn(mib << 18, device="cuda")
    taken = []
    for _ in range(repeats):
        for _ in range(3):
            data.amax()
        call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        marks[0].record()
        for mark in marks[1:]:
            data.amax()
            mark.record()
        torch.cuda.synchronize()
        taken.append([1e3 * a.elapsed_time(b) for a, b in pairwise(marks)])
    return [round(statistics.median(each), 2) for each in zip(*taken, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--time-ms", type=float, default=12.0, help="measuring, a number")
    options = parser.parse_args()
    found = measure(options.time_ms)
    print(f"a launch that does nothing: {found['us_of_a_launch_that_does_nothing']} us")
    for row in found["rows"]:
        block = f"{row['block_bytes'] >> 10} KiB" if row["block_bytes"] else ""
        shares = "  ".join(f"{name} {100 * row[name]:5.1f} %" for name in row if "MiB" in name)
        print(f"{block:>8}  {row['way']:48} {shares}")
    for way, passes in found["us_of_reading_so_much_four_times_after"].items():
        print(f"after {way}: {passes}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
