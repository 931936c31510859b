"""Streamed outputs: past the caches or through them, the same bits, and nothing beside them.

Streaming is for problems larger than the last cache; here the cache is said to have no bytes, so
that small ones stream too, from any start within a line.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from gradplan.backends.cpu import program, programs
from gradplan.cases import describe
from gradplan.geometry import c_strides
from gradplan.kinds import ElementKind, OpCategory
from gradplan.registry import KINDS

DTYPES = {ElementKind.F32: np.float32, ElementKind.F16: np.float16, ElementKind.F64: np.float64}
# Rows and columns; columns narrower and wider than a stage, and than a strip; rows that are split,
# with a shorter last chunk; a batch. (16 bytes is where NumPy's arrays begin.)
SHAPES = [
    ((40, 601), 1),
    ((70_001,), 0),
    ((3, 40_000), 1),
    ((301, 64), 0),
    ((300, 70), 0),
    ((2_500, 67), 0),
    ((9, 1100), 0),
    ((2, 130, 1500), 1),
]
# Of scans rows all begin as far into a line, and columns may be narrower than one.
SCANS = [((40, 320), 1), *SHAPES[1:4], ((300, 50), 0), ((35_000, 7), 0), *SHAPES[6:]]
POISON = 0x5A


def place(array, start, margin=256):
    """A copy that begins so many bytes into a line, in the midst of poison."""
    block = np.full(array.nbytes + 2 * margin + 64, POISON, np.uint8)
    begin = -block.ctypes.data % 64 + margin // 64 * 64 + start
    view = block[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return block, view


def outputs(desc, arrays, outs, start, cache_bytes, monkeypatch):
    """The bytes of every output and of what lies around it."""
    monkeypatch.setattr(program, "cache_bytes", lambda: cache_bytes)
    blocks = {name: place(array, start) for name, array in outs.items()}
    given = arrays | {name: view for name, (_, view) in blocks.items()}
    made = programs.prepare(desc, {k: c_strides(a.shape) for k, a in given.items()})
    workspace = np.full(made.workspace_bytes + 64, POISON, np.uint8)
    address = workspace.ctypes.data + -workspace.ctypes.data % 64
    made.run({k: SimpleNamespace(ptr=a.ctypes.data) for k, a in given.items()}, address)
    assert ("streamed" in made.variant) == (cache_bytes == 0)
    # Where a block begins differs from call to call: from its poison on, it does not.
    return {
        name: block[view.ctypes.data - block.ctypes.data - 200 :][: view.nbytes + 400].tobytes()
        for name, (block, view) in blocks.items()
    }


def draw(desc, seed, rows=1):
    random = np.random.default_rng(seed)
    arrays, outs = {}, {}
    for operand in desc.operands:
        if operand.name == "indices":
            arrays["indices"] = random.integers(0, rows, operand.shape)
            continue
        numbers = random.uniform(0.5, 1.5, operand.shape).astype(DTYPES[desc.element])
        (outs if operand.output else arrays)[operand.name] = numbers
    return arrays, outs


# Every engine and way out of it; f64 shows each rounding.
@pytest.mark.parametrize(
    ("kind", "element"),
    [
        ("softmax", ElementKind.F32),
        ("lerp", ElementKind.F16),
        ("max", ElementKind.F32),
        ("cumsum", ElementKind.F16),
        ("cumprod", ElementKind.F64),
        ("cummax", ElementKind.F32),
    ],
)
def test_streamed_outputs_have_the_same_bits(kind, element, monkeypatch):
    spec = next(s for s in KINDS.values() if s.kind.value == kind)
    flat = spec.category is OpCategory.BINARY_ELEMENTWISE
    shapes = SCANS if spec.category is OpCategory.SCAN else SHAPES
    for seed, (shape, axis) in enumerate(shapes):
        more = {"param": 0.25} if flat else {}
        desc = describe(spec, element, shape, () if flat else (axis,), **more)
        arrays, outs = draw(desc, seed)
        for start in (0, 16, 64 - element.size_bytes):
            kept = outputs(desc, arrays, outs, start, 1 << 40, monkeypatch)
            streamed = outputs(desc, arrays, outs, start, 0, monkeypatch)
            assert streamed == kept, (shape, axis, start)


@pytest.mark.parametrize("columns", [128, 150, 129, 600])
def test_streamed_tables_have_the_same_bits(columns, monkeypatch):
    spec = next(s for s in KINDS.values() if s.category is OpCategory.EMBEDDING)
    element = ElementKind.F32
    desc = describe(spec, element, (300, columns, 200), (), accumulate=False)
    arrays, outs = draw(desc, columns, 200)
    for start in (0, 16, 64 - element.size_bytes):
        kept = outputs(desc, arrays, outs, start, 1 << 40, monkeypatch)
        assert outputs(desc, arrays, outs, start, 0, monkeypatch) == kept, start
