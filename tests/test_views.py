"""The border: every array that is taken, every one that is refused, and which ones overlap."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import subprocess
import sys
import types
import weakref
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from gradplan import overlap
from gradplan.errors import (
    BufferTooSmall,
    InvalidProblem,
    MisalignedOperand,
    Unsupported,
)
from gradplan.kinds import ElementKind, IndexKind
from gradplan.overlap import check_overlaps, overlaps, same_place, self_overlaps
from gradplan.views import (
    Layout,
    View,
    as_numpy,
    empty_like_type,
    layout,
    numpy_arrays,
    reshape_view,
    restore_type,
    torch_tensors,
    view,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
NUMPY_DTYPES = {
    ElementKind.F32: np.dtype(np.float32),
    ElementKind.F16: np.dtype(np.float16),
    ElementKind.BF16: BF16,
    ElementKind.F64: np.dtype(np.float64),
    IndexKind.I32: np.dtype(np.int32),
    IndexKind.I64: np.dtype(np.int64),
}
TORCH_DTYPES = {
    ElementKind.F32: torch.float32,
    ElementKind.F16: torch.float16,
    ElementKind.BF16: torch.bfloat16,
    ElementKind.F64: torch.float64,
    IndexKind.I32: torch.int32,
    IndexKind.I64: torch.int64,
}


class Speaks:
    """An array of a library nobody knows: it speaks DLPack, any version, and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class SpeaksOld(Speaks):
    """The protocol before version 1: no keywords."""

    def __dlpack__(self):
        return self.array.__dlpack__()


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


class Forged:
    """An export written by hand, field by field; the calls that asked for it are recorded."""

    def __init__(
        self,
        shape=(2, 3),
        strides=None,
        *,
        data=0x10000,
        device=(1, 0),
        code=2,
        bits=32,
        lanes=1,
        byte_offset=0,
        flags=0,
        version=(1, 0),
        versioned=True,
        accepts=("stream", "max_version"),
        capsule_name=None,
    ):
        self.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.strides = strides and (ctypes.c_int64 * len(strides))(*strides)
        self.tensor = DLTensor(
            data,
            *device,
            len(shape),
            code,
            bits,
            lanes,
            ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)) if strides else None,
            byte_offset,
        )
        if versioned:
            self.managed = ManagedVersioned(*version, None, None, flags, self.tensor)
        else:
            self.managed = Managed(self.tensor, None, None)
        self.name = capsule_name or (b"dltensor_versioned" if versioned else b"dltensor")
        self.device, self.accepts, self.asked = device, accepts, []

    def __dlpack__(self, **options):
        self.asked.append(options)
        if not set(options) <= set(self.accepts):
            raise TypeError("unexpected keyword")
        return new_capsule(ctypes.addressof(self.managed), self.name, None)

    def __dlpack_device__(self):
        return self.device


def forged_in(module, **fields):
    """A `Forged` array whose type claims to live in `module`."""
    return type("Forged", (Forged,), {"__module__": module, "block_until_ready": lambda s: s})(
        **fields
    )


@pytest.mark.parametrize("kind", NUMPY_DTYPES)
def test_numpy_fields(kind):
    array = np.zeros((3, 4, 5), NUMPY_DTYPES[kind])
    made = view(array)
    assert made.ptr == array.ctypes.data
    assert (made.shape, made.strides, made.dtype) == ((3, 4, 5), (20, 5, 1), kind)
    assert (made.device, made.writable, made.owner is array) == ("cpu", True, True)
    assert (made.size, made.itemsize) == (60, array.itemsize)
    assert made.extent() == (made.lo, made.hi) == (made.ptr, made.ptr + array.nbytes)
    assert type(made.shape) is tuple
    assert f"strides {made.strides}" in repr(made)


def test_numpy_strides_are_read_where_they_lie():
    base = np.zeros((6, 8), np.float32)
    cases = {
        "transposed": (base.T, (1, 8)),
        "stepped": (base[::2, 1::3], (16, 3)),
        "flipped": (base[::-1, ::-2], (-8, -2)),
        "broadcast": (np.broadcast_to(base[0], (4, 8)), (0, 1)),
        "windows": (sliding_window_view(base[0], 3), (1, 1)),
    }
    for array, strides in cases.values():
        made = view(array)
        assert made.strides == strides
        assert made.ptr == array.ctypes.data
        assert made.extent() == np.lib.array_utils.byte_bounds(array)


def test_extent_of_a_flipped_array():
    array = np.zeros(10, np.float64)[::-1]
    made = view(array)
    assert made.extent() == (made.ptr - 72, made.ptr + 8)


def test_axes_of_extent_one_carry_stride_zero():
    assert view(np.zeros((5, 1, 4), np.float32)[:, ::-1]).strides == (4, 0, 1)
    odd = as_strided(np.zeros(4, np.float32), (1, 4), (3, 4))
    assert view(odd).strides == (0, 1)
    assert view(np.zeros((1, 1), np.float32)).strides == (0, 0)
    assert view(torch.zeros(5, 1, 4).as_strided((5, 1, 4), (4, 99, 1))).strides == (4, 0, 1)
    assert view(Speaks(np.zeros((5, 1), np.float32))).strides == (1, 0)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 1)])
def test_empty_arrays(shape):
    for array in (np.zeros(shape, np.float32), torch.zeros(shape), Speaks(np.zeros(shape))):
        made = view(array)
        assert (made.shape, made.strides, made.size) == (shape, (0,) * len(shape), 0)
        assert made.extent() == (made.ptr, made.ptr)
        assert as_numpy(made).shape == shape


def test_empty_arrays_need_no_alignment():
    memory = bytearray(64)
    view(np.ndarray((0,), np.float32, memory, 1))
    view(Forged((0, 3), data=0x10001))
    view(Forged((0, 3), data=None))


def test_rank_zero():
    assert view(np.zeros((), np.float32)).shape == ()
    assert view(torch.zeros(())).strides == ()
    made = view(Speaks(np.full((), 7.0)))
    assert (made.shape, made.strides, as_numpy(made)[()]) == ((), (), 7.0)


@pytest.mark.parametrize("kind", NUMPY_DTYPES)
def test_numpy_scalars_are_rank_zero_and_read_only(kind):
    scalar = NUMPY_DTYPES[kind].type(3)
    made = view(scalar)
    assert (made.shape, made.strides, made.dtype) == ((), (), kind)
    assert not made.writable
    gc.collect()
    assert as_numpy(made)[()] == scalar
    assert made.hi - made.lo == scalar.itemsize


def test_longlong_is_int64():
    assert view(np.zeros(3, np.longlong)).dtype is IndexKind.I64
    assert view(np.zeros(3, np.dtype(np.float32, metadata={"a": 1}))).dtype is ElementKind.F32


def test_harmless_subclasses(tmp_path):
    class Mine(np.ndarray):
        pass

    assert view(np.zeros((2, 3), np.float32).view(Mine)).shape == (2, 3)
    assert view(np.zeros(3, np.float32).view(np.recarray)).strides == (1,)
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(4, 4))
    assert view(mapped[1:, ::2]).strides == (4, 2)
    assert view(mapped).writable
    assert not view(np.memmap(tmp_path / "m", np.float32, "r")).writable


def test_read_only_arrays():
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    assert not view(array).writable
    assert not view(np.broadcast_to(np.float32(1), (3,))).writable
    assert not view(np.frombuffer(bytes(16), np.float32)).writable
    assert not view(Speaks(array)).writable


def test_the_address_by_either_way():
    array = np.zeros((4, 4))[1:, ::-1]
    assert numpy_arrays._address_by_field(array) == numpy_arrays._address_by_attribute(array)
    assert numpy_arrays.address_of is numpy_arrays._address_by_field


def test_no_copy_and_no_growth(monkeypatch):
    monkeypatch.setattr(layout, "_LAYOUT_LIMIT", len(numpy_arrays._NUMPY_LAYOUTS) + 8)
    for n in range(1, 60):
        assert view(np.zeros(n, np.float32)).shape == (n,)
        assert len(numpy_arrays._NUMPY_LAYOUTS) <= layout._LAYOUT_LIMIT


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i8", BF16.newbyteorder(">")])
def test_byte_swapped(dtype):
    with pytest.raises(InvalidProblem, match=r"^dy: expected native byte order, got the byte-swap"):
        view(np.zeros(3, dtype), "dy")


def test_masked():
    for array in (np.ma.zeros(3), np.ma.masked_greater(np.arange(3.0), 1), np.ma.zeros(3)[:2]):
        for _ in range(2):
            with pytest.raises(InvalidProblem, match=r"^y: expected a plain array, got a masked"):
                view(array, "y")


def test_strides_that_are_no_multiple():
    packed = np.zeros(4, np.dtype([("a", "u1"), ("b", "f4")]))["b"]
    with pytest.raises(InvalidProblem, match=r"^x: expected strides .* 4 bytes.*float32.*\(5,\)"):
        view(packed, "x")
    # What is never stepped over may be anything.
    one = np.ndarray((1, 3), np.float32, bytearray(64), 0, (5, 4))
    assert view(one).strides == (0, 1)


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.complex64, np.complex128, np.longdouble, ml_dtypes.float8_e4m3fn),
        *(np.bool_, np.uint8, np.int16, np.uint64),
        *(object, "S4", "datetime64[s]", [("a", "f4")], "f4,f4"),
    ],
)
def test_unsupported_numpy_dtypes(dtype):
    array = np.zeros(3, dtype)
    with pytest.raises(Unsupported) as caught:
        view(array, "dy")
    message = str(caught.value)
    assert message.startswith("dy: expected a dtype among float32, float16, bfloat16, float64")
    assert "int32, int64" in message
    assert f"got {array.dtype}" in message


def test_misaligned_numpy():
    for offset in (1, 2, 3):
        array = np.ndarray((3,), np.float32, bytearray(64), offset)
        with pytest.raises(MisalignedOperand, match=r"^dx: .*multiple of the 4 bytes of a float32"):
            view(array, "dx")


class Holder:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array

    @property
    def __array_interface__(self):
        return self.array.__array_interface__


@pytest.mark.parametrize(
    "thing",
    [
        *([1.0, 2.0], (1.0,), 1.0, 3, None, "abc", b"abc", {}, object()),
        *(memoryview(bytearray(8)), Holder(np.zeros(3)), np.float32, np.dtype("f4")),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_no_array_at_all(thing):
    for _ in range(2):
        with pytest.raises(InvalidProblem) as caught:
            view(thing, "dout")
        assert str(caught.value) == (
            "dout: expected a NumPy, torch, CuPy, JAX or other DLPack array, "
            f"got {type(thing).__name__}"
        )


def test_overrun_past_the_end():
    whole = np.zeros(10, np.float32)
    with pytest.raises(BufferTooSmall, match=r"^dy: .*48 bytes.* only 32 .*owns") as caught:
        view(as_strided(whole[2:], (12,), (4,)), "dy")
    assert (caught.value.needed, caught.value.got) == (48, 32)


def test_overrun_is_found_in_contiguous_and_nested_arrays():
    whole = np.zeros((4, 4))
    longer = as_strided(whole, (5, 4), (32, 8))
    assert longer.flags.c_contiguous
    cases = [
        (longer, 160, 128),
        (as_strided(as_strided(whole[1:], (2,), (8,)), (13,), (8,)), 104, 96),
        (longer[3:], 64, 32),
        (longer.T, 160, 128),
        (as_strided(whole[3], (2, 2), (32, 8)), 48, 32),
        (as_strided(whole, (3,), (-8,)), 24, 8),
        (as_strided(whole.view(np.matrix), (17,), (8,)), 136, 128),
    ]
    for array, needed, got in cases:
        with pytest.raises(BufferTooSmall) as caught:
            view(array)
        assert (caught.value.needed, caught.value.got) == (needed, got)


def test_strided_inside_the_owner_is_fine():
    whole = np.zeros((4, 4))
    for array in (
        as_strided(whole[1:2], (3, 4), (32, 8)),
        as_strided(whole[3], (16,), (-8,))[:13],
        as_strided(whole[3], (13,), (-8,)),
        as_strided(whole, (1000,), (0,)),
        as_strided(whole, (0, 99), (8, 8)),
        sliding_window_view(whole, (2, 2)),
        whole[:, 1:3].T[::-1],
        np.asfortranarray(whole)[1:, 1:],
    ):
        assert as_numpy(view(array)).tobytes() == array.tobytes()


def test_overrun_of_a_foreign_buffer(tmp_path):
    memory = bytearray(64)
    part = np.ndarray((4,), np.float32, memory, 16)
    assert view(as_strided(part, (12,), (4,))).size == 12
    with pytest.raises(BufferTooSmall, match="the buffer that owns") as caught:
        view(as_strided(part, (13,), (4,)))
    assert (caught.value.needed, caught.value.got) == (52, 48)
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(16,))
    with pytest.raises(BufferTooSmall) as caught:
        view(as_strided(mapped[8:], (9,), (4,)))
    assert (caught.value.needed, caught.value.got) == (36, 32)


def test_memory_that_tells_no_extent_is_trusted():
    tensor = torch.zeros(16)
    assert view(as_strided(tensor.numpy()[:4], (8,), (4,))).size == 8
    lent = as_numpy(view(tensor))
    assert view(as_strided(lent[:4], (16,), (4,))).size == 16
    assert view(as_strided(tensor[:4].numpy(), (8,), (4,))).size == 8


def test_owner_shrunk_behind_the_slice():
    whole = np.zeros(1000, np.float32)
    part = whole[10:]
    whole.resize(100, refcheck=False)
    with pytest.raises(BufferTooSmall):
        view(part)


def test_torch_storage_shrunk():
    tensor = torch.zeros(10)
    tail = tensor[4:]
    tensor.untyped_storage().resize_(24)
    with pytest.raises(BufferTooSmall, match=r"^x: .*40 bytes.* only 24 .*storage") as caught:
        view(tensor, "x")
    assert (caught.value.needed, caught.value.got) == (40, 24)
    with pytest.raises(BufferTooSmall) as caught:
        view(tail)
    assert (caught.value.needed, caught.value.got) == (24, 8)
    assert view(tensor[:6]).size == 6
    tensor.untyped_storage().resize_(0)
    with pytest.raises(BufferTooSmall) as caught:
        view(tensor)
    assert (caught.value.needed, caught.value.got) == (40, 0)


@pytest.mark.parametrize("kind", TORCH_DTYPES)
def test_torch_fields(kind):
    tensor = torch.zeros(6, 8, dtype=TORCH_DTYPES[kind])[1:, ::2].T
    made = view(tensor)
    assert made.ptr == tensor.data_ptr()
    assert (made.shape, made.strides, made.dtype) == ((4, 5), (2, 8), kind)
    assert (made.device, made.writable, made.owner is tensor) == ("cpu", True, True)
    assert made.extent() == (made.ptr, made.ptr + (3 * 2 + 4 * 8 + 1) * kind.size_bytes)
    assert type(made.shape) is tuple
    assert type(made.strides) is tuple


def test_torch_subclasses():
    class Mine(torch.Tensor):
        pass

    parameter = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    assert view(parameter).ptr == parameter.data_ptr()
    assert view(torch.zeros(3).as_subclass(Mine)).shape == (3,)
    assert view(torch.zeros(3).expand(4, 3)).strides == (0, 1)


def test_torch_requires_grad():
    leaf = torch.zeros(3, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.zeros(3)), leaf.to_sparse()):
        with pytest.raises(InvalidProblem, match=r"^y: .*requires_grad=True.* gradplan\.torch"):
            view(tensor, "y")
        with torch.no_grad(), pytest.raises(InvalidProblem, match=r"gradplan\.torch"):
            view(tensor, "y")
    assert view(leaf.detach()).ptr == leaf.data_ptr()


def test_torch_that_counts_one_tensor_at_a_time():
    def only_one(tensor):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError
        counted.append(tensor)

    counted = []
    graph = types.SimpleNamespace(increment_version=only_one)
    older = types.SimpleNamespace(
        _C=types.SimpleNamespace(_increment_version=only_one),
        autograd=types.SimpleNamespace(graph=graph),
        inference_mode=torch.inference_mode,
        empty=torch.empty,
    )
    tensors = torch.zeros(2), torch.zeros(3)
    with torch.inference_mode():
        uncounted = torch.zeros(4)
    for missing in (False, True):
        if missing:
            del older._C._increment_version
        counted.clear()
        torch_tensors._version_bump(older)((*tensors, uncounted))
        assert [id(one) for one in counted] == [id(one) for one in tensors]
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert torch_tensors._version_bump(torch) is torch._C._increment_version


@pytest.mark.filterwarnings("ignore")
def test_torch_without_strided_memory():
    tensor = torch.zeros(3, 3)
    sparse = [tensor.to_sparse(), tensor.to_sparse_csr(), tensor.to_mkldnn()]
    pieces = [torch.zeros(2), torch.zeros(3)]
    sparse.append(torch.nested.nested_tensor(pieces, layout=torch.jagged))
    for array in sparse:
        with pytest.raises(InvalidProblem) as caught:
            view(array, "dy")
        expected = f"dy: expected a strided torch tensor, got layout {array.layout}"
        assert str(caught.value) == expected
    nowhere = [torch.nested.nested_tensor(pieces), torch._efficientzerotensor((3,))]
    for array in nowhere:
        with pytest.raises(InvalidProblem, match=r"^dy: expected a tensor with memory of its own"):
            view(array, "dy")


def test_torch_inside_a_transform():
    def inside(row):
        with pytest.raises(InvalidProblem, match="memory of its own"):
            view(row)
        return row

    torch.func.vmap(inside)(torch.zeros(2, 3))


def test_torch_meta():
    with pytest.raises(InvalidProblem, match=r"^x: .*cpu or cuda device, got device meta"):
        view(torch.zeros(3, device="meta"), "x")


def test_torch_conj_and_neg():
    conjugated = torch.zeros(3, dtype=torch.complex64).conj()
    with pytest.raises(InvalidProblem, match=r"^x: .*conjugated tensor of torch\.complex64"):
        view(conjugated, "x")
    negated = conjugated.imag
    assert negated.is_neg()
    with pytest.raises(InvalidProblem, match=r"^x: .*negative bit.*resolve_neg"):
        view(negated, "x")
    assert view(negated.resolve_neg()).shape == (3,)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.uint8, torch.bool, torch.int16, torch.float8_e4m3fn]
)
def test_unsupported_torch_dtypes(dtype):
    with pytest.raises(Unsupported, match=rf"^dy: .*bfloat16.*int64, got {dtype}"):
        view(torch.zeros(3, dtype=dtype), "dy")


def test_misaligned_torch():
    odd = torch.frombuffer(bytearray(64), dtype=torch.float32, count=3, offset=2)
    assert odd.data_ptr() % 4 == 2
    with pytest.raises(MisalignedOperand, match=r"^x: .*float32"):
        view(odd, "x")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_cuda():
    tensor = torch.zeros(4, 6, device="cuda")[:, ::2]
    made = view(tensor)
    assert (made.device, made.strides, made.ptr) == ("cuda:0", (6, 2), tensor.data_ptr())
    other = view(Speaks(tensor))
    assert (other.device, other.strides, other.ptr) == (made.device, made.strides, made.ptr)
    assert empty_like_type(tensor, (2, 2)).device == tensor.device
    assert empty_like_type(Speaks(tensor), (2, 2)).device == tensor.device
    with pytest.raises(InvalidProblem, match="cuda:0"):
        as_numpy(made)


def test_torch_is_not_imported():
    code = "import gradplan.views, gradplan.overlap, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class CupyMemory:
    def __init__(self, ptr):
        self.ptr, self.device_id = ptr, 1


def fake_cupy(array):
    """A stand-in for a CuPy array, with the attributes that are read."""
    fields = {
        "shape": array.shape,
        "strides": array.strides,
        "dtype": array.dtype,
        "data": CupyMemory(array.ctypes.data),
        "__module__": "cupy",
    }
    return type("ndarray", (), fields)()


def test_cupy():
    array = np.zeros((4, 6), BF16)[:, ::-2]
    made = view(fake_cupy(array))
    assert (made.ptr, made.shape, made.strides) == (array.ctypes.data, (4, 3), (6, -2))
    assert (made.device, made.dtype, made.writable) == ("cuda:1", ElementKind.BF16, True)
    with pytest.raises(Unsupported, match="complex64"):
        view(fake_cupy(np.zeros(2, np.complex64)))
    with pytest.raises(MisalignedOperand):
        view(fake_cupy(np.ndarray((3,), np.float32, bytearray(64), 1)))


def test_cupy_outputs(monkeypatch):
    entered = []

    class Device:
        id = 3

        def __enter__(self):
            entered.append(True)

        def __exit__(self, *_):
            entered.append(False)

    like = fake_cupy(np.zeros(3, np.float32))
    like.device = Device()
    cupy = types.SimpleNamespace(empty=lambda shape, dtype: ("cupy", shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert empty_like_type(like, (2, 3)) == ("cupy", (2, 3), np.float32)
    assert entered == [True, False]
    cupy.cuda = types.SimpleNamespace(
        ExternalStream=lambda *words: nullcontext(entered.append(words)),
        Stream=types.SimpleNamespace(null=nullcontext()),
    )
    assert empty_like_type(like, (2,), 64) == ("cupy", (2,), np.float32)
    assert entered[2:] == [True, (64, 3), False]  # a stream is entered on its own device alone
    assert empty_like_type(like, (2,), 0) == ("cupy", (2,), np.float32)
    assert entered[5:] == [True, False]
    result = object()
    assert restore_type(like, result) is result


@pytest.mark.parametrize("speaks", [Speaks, SpeaksOld])
@pytest.mark.parametrize("kind", TORCH_DTYPES)
def test_dlpack_over_torch(speaks, kind):
    tensor = torch.arange(48).to(TORCH_DTYPES[kind]).reshape(6, 8)[1:, 1::2].T
    made = view(speaks(tensor))
    assert made.ptr == tensor.data_ptr()
    assert (made.shape, made.strides, made.dtype) == ((4, 5), (2, 8), kind)
    assert (made.device, made.writable) == ("cpu", True)
    assert as_numpy(made).astype(np.float64).tolist() == tensor.double().tolist()


@pytest.mark.parametrize("speaks", [Speaks, SpeaksOld])
@pytest.mark.parametrize("kind", [kind for kind in NUMPY_DTYPES if kind != ElementKind.BF16])
def test_dlpack_over_numpy(speaks, kind):
    array = np.arange(48).astype(NUMPY_DTYPES[kind]).reshape(6, 8)[::-1, ::-2]
    made = view(speaks(array))
    assert made.ptr == array.ctypes.data
    assert (made.shape, made.strides, made.dtype) == ((6, 4), (-8, -2), kind)
    assert made.extent() == np.lib.array_utils.byte_bounds(array)
    assert made.writable
    assert np.array_equal(as_numpy(made), array)


@pytest.mark.parametrize(
    ("speaks", "name"), [(Speaks, b"dltensor_versioned"), (SpeaksOld, b"dltensor")]
)
def test_the_capsule_is_the_owner_and_frees_itself(speaks, name):
    array = np.arange(6.0)
    alive = weakref.ref(array)
    made = view(speaks(array))
    assert capsule_is(made.owner, name)
    lent = as_numpy(made)
    del array
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert lent.tolist() == [0, 1, 2, 3, 4, 5]
    assert alive() is not None
    del lent
    gc.collect()
    assert alive() is None


def test_the_array_is_the_owner():
    array = np.arange(6.0)
    alive = weakref.ref(array)
    made = view(array)
    del array
    assert alive() is not None
    lent = as_numpy(made)
    del made
    assert lent.sum() == 15
    del lent
    assert alive() is None


def test_dlpack_null_strides_and_offset():
    made = view(Forged((2, 3, 4), None, byte_offset=8))
    assert (made.ptr, made.strides) == (0x10008, (12, 4, 1))
    assert made.extent() == (0x10008, 0x10008 + 96)
    made = view(Forged((2, 3), (-3, 1), versioned=False))
    assert (made.strides, made.extent()) == ((-3, 1), (0x10000 - 12, 0x10000 + 12))


def test_dlpack_writability():
    assert view(Forged()).writable
    assert view(Forged(versioned=False)).writable
    assert not view(Forged(flags=1)).writable
    assert not view(Forged(flags=2)).writable
    for module in ("jax", "jaxlib._jax", "jaxlib.xla_extension"):
        assert not view(forged_in(module, versioned=False)).writable
        assert not view(forged_in(module)).writable
    assert view(forged_in("jaxtyping", versioned=False)).writable


@pytest.mark.parametrize(
    ("device", "name"),
    [((1, 0), "cpu"), ((2, 0), "cuda:0"), ((2, 3), "cuda:3"), ((3, 0), "cpu"), ((13, 1), "cuda:1")],
)
def test_dlpack_devices(device, name):
    assert view(Forged(device=device)).device == name


@pytest.mark.parametrize("device", [(4, 0), (7, 0), (8, 0), (10, 0), (14, 0), (99, 0)])
def test_dlpack_other_devices(device):
    with pytest.raises(InvalidProblem, match=rf"^x: .*cpu or cuda.* device type {device[0]}$"):
        view(Forged(device=device), "x")


def test_dlpack_negotiation():
    newest = {"max_version": (1, 0)}
    array = Forged()
    view(array)
    assert array.asked == [newest]
    array = Forged(accepts=())
    view(array)
    assert array.asked == [newest, {}]
    array = Forged(device=(2, 0))
    view(array)
    assert array.asked == [{"stream": -1, **newest}]
    array = Forged(device=(13, 0), accepts=("stream",))
    view(array)
    assert array.asked == [{"stream": -1, **newest}, {"stream": -1}]
    array = Forged(device=(2, 0), accepts=())
    view(array)
    assert array.asked == [{"stream": -1, **newest}, {"stream": -1}, {}]
    array = forged_in("jaxlib._jax", device=(2, 0))
    view(array)
    assert array.asked == [newest]


@pytest.mark.parametrize(
    ("fields", "came"),
    [
        ({"code": 5, "bits": 64}, "complex64"),
        ({"code": 1, "bits": 8}, "uint8"),
        ({"code": 6, "bits": 8}, "bool8"),
        ({"code": 4, "bits": 32}, "bfloat32"),
        ({"code": 10, "bits": 8}, "DLPack code 10, bits 8"),
        ({"lanes": 4}, "float32 × 4 lanes"),
    ],
)
def test_dlpack_unsupported_dtypes(fields, came):
    with pytest.raises(Unsupported) as caught:
        view(Forged(**fields), "dy")
    assert str(caught.value).startswith("dy: expected a dtype among float32")
    assert str(caught.value).endswith(f"got {came}")


def test_dlpack_refusals():
    with pytest.raises(MisalignedOperand, match=r"^x: .*0x10002"):
        view(Forged(byte_offset=2), "x")
    with pytest.raises(InvalidProblem, match=r"^x: expected DLPack version 1, got 2\.0"):
        view(Forged(version=(2, 0)), "x")
    with pytest.raises(InvalidProblem, match=r"^x: expected an unused DLPack capsule"):
        view(Forged(capsule_name=b"used_dltensor"), "x")


def test_dlpack_that_fails():
    with pytest.raises(InvalidProblem, match=r"^x: .*DLPack, but Speaks answered BufferError"):
        view(Speaks(torch.zeros(3, requires_grad=True)), "x")
    with pytest.raises(InvalidProblem, match=r"^x: .*Speaks answered BufferError"):
        view(Speaks(np.zeros(3, BF16)), "x")
    with pytest.raises(InvalidProblem, match=r"^x: .*answered AttributeError"):
        view(Speaks(3), "x")


@pytest.mark.parametrize("kind", NUMPY_DTYPES)
def test_empty_like_numpy(kind):
    dtype = NUMPY_DTYPES[kind]
    for like in (
        np.zeros((4, 4), dtype).T[::2],
        dtype.type(3),
        np.zeros(3, dtype).view(np.recarray),
    ):
        made = empty_like_type(like, (2, 3))
        assert type(made) is np.ndarray
        assert (made.shape, made.dtype, made.flags.c_contiguous) == ((2, 3), dtype, True)
        assert made.flags.writeable
        assert restore_type(like, made) is made


@pytest.mark.parametrize("kind", TORCH_DTYPES)
def test_empty_like_torch(kind):
    like = torch.zeros(4, 4, dtype=TORCH_DTYPES[kind]).T[::2]
    made = empty_like_type(like, (2, 3))
    assert (tuple(made.shape), made.dtype, made.is_contiguous()) == ((2, 3), like.dtype, True)
    assert restore_type(like, made) is made


def test_empty_like_on_the_cpu_needs_no_stream():
    for like in (torch.zeros(3), np.zeros(3), Speaks(torch.zeros(3))):
        assert tuple(empty_like_type(like, (2,), stream=object()).shape) == (2,)


def test_empty_like_torch_that_requires_grad():
    made = empty_like_type(torch.nn.Parameter(torch.zeros(3)), (2,))
    assert not made.requires_grad
    assert type(made) is torch.Tensor


@pytest.mark.parametrize("kind", TORCH_DTYPES)
def test_empty_like_dlpack(kind):
    like = Speaks(torch.zeros(3, dtype=TORCH_DTYPES[kind]))
    made = empty_like_type(like, (2, 3))
    assert type(made) is np.ndarray
    assert (made.shape, made.dtype) == ((2, 3), NUMPY_DTYPES[kind])
    assert restore_type(like, made) is made


def test_empty_like_dlpack_on_a_device(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(Unsupported, match="Forged on cuda:2 is allocated by torch"):
        empty_like_type(Forged(device=(2, 2)), (3,))
    stand_in = types.SimpleNamespace(
        bfloat16="torch.bfloat16", empty=lambda shape, **how: (shape, how)
    )
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    made = empty_like_type(Forged(device=(2, 2), code=4, bits=16), (3,))
    assert made == ((3,), {"dtype": "torch.bfloat16", "device": "cuda:2"})


def test_restore_by_namespace():
    class Spoken(Speaks):
        functions = types.SimpleNamespace(from_dlpack=torch.from_dlpack)

        def __array_namespace__(self):
            return self.functions

    like = Spoken(torch.zeros(3))
    restored = restore_type(like, np.arange(3.0))
    assert type(restored) is torch.Tensor
    assert restored.tolist() == [0, 1, 2]
    # NumPy exports no bfloat16, and asarray may know it.
    Spoken.functions.asarray = lambda result: ("asarray", result)
    half = np.zeros(3, BF16)
    assert restore_type(like, half)[1] is half
    del Spoken.functions.asarray
    assert restore_type(like, half) is half


def test_restore_jax(monkeypatch):
    class Array:
        def __init__(self, how, device="cpu:0"):
            self.how, self.device = how, device

    functions = types.SimpleNamespace(
        asarray=lambda result: Array("asarray"), from_dlpack=lambda result: Array("from_dlpack")
    )
    jax = types.SimpleNamespace(
        numpy=functions, device_put=lambda result, device: Array("device_put", device)
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    like = forged_in("jaxlib._jax", versioned=False)
    like.device = "cpu:0"
    made = empty_like_type(like, (2,))
    assert type(made) is np.ndarray
    assert restore_type(like, made).how == "asarray"
    assert restore_type(like, torch.zeros(2)).how == "from_dlpack"
    like.device = "cpu:1"
    assert (restore_type(like, made).how, restore_type(like, made).device) == (
        "device_put",
        "cpu:1",
    )


def test_a_jax_tracer_is_told_to_come_later():
    tracer = type("Tracer", (), {"__module__": "jax._src.core"})
    made = type("BatchTracer", (tracer,), {"__module__": "jax._src.interpreters.batching"})
    key = type("PRNGKeyArray", (), {"__module__": "jax._src.prng"})
    with pytest.raises(InvalidProblem, match=r"^dy: .* got BatchTracer; .* outside jax\.jit"):
        view(made(), "dy")
    with pytest.raises(InvalidProblem, match=r"^dy: .* got PRNGKeyArray$"):
        view(key(), "dy")


def test_jax():
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.arange(12.0, dtype=jnp.bfloat16).reshape(3, 4)
    made = view(array)
    assert (made.shape, made.dtype, made.writable) == ((3, 4), ElementKind.BF16, False)
    assert np.array_equal(as_numpy(made), np.asarray(array))
    result = empty_like_type(array, (2,))
    result[...] = 1
    restored = restore_type(array, result)
    assert type(restored) is type(array)
    assert restored.dtype == array.dtype


@pytest.mark.parametrize("kind", NUMPY_DTYPES)
def test_as_numpy(kind):
    base = np.arange(60).reshape(5, 12).astype(NUMPY_DTYPES[kind])
    for array in (base, base.T, base[::-1, ::-3], np.broadcast_to(base[0], (3, 12)), base[2, 3]):
        made = view(array)
        lent = as_numpy(made)
        assert type(lent) is np.ndarray
        assert lent.dtype == array.dtype
        assert np.array_equal(lent, array)
        assert lent.ctypes.data == made.ptr
        assert lent.flags.writeable == made.writable
        assert np.shares_memory(lent, array) == isinstance(array, np.ndarray)


def test_as_numpy_writes_through():
    tensor = torch.zeros(4, 4, dtype=torch.bfloat16)
    as_numpy(view(tensor.T[:, ::2]))[1] = 3
    assert tensor[::2, 1].tolist() == [3, 3]
    assert tensor.sum() == 6


def test_as_numpy_of_a_device():
    with pytest.raises(InvalidProblem, match="cuda:0"):
        as_numpy(view(Forged(device=(2, 0))))


def test_reshape_view():
    array = np.arange(24.0).reshape(4, 6)[:, ::-1]
    made = view(array)
    other = reshape_view(made, (4, 1, 2, 3), (6, 77, -3, -1))
    assert (other.shape, other.strides) == ((4, 1, 2, 3), (6, 0, -3, -1))
    assert (other.extent(), other.owner, other.ptr) == (made.extent(), array, made.ptr)
    assert np.array_equal(as_numpy(other), array.reshape(4, 1, 2, 3))


def at(ptr, shape, strides, kind=ElementKind.F32):
    return View(ptr, Layout(shape, strides, kind, "cpu", True), None)


def test_halves_of_one_buffer_do_not_overlap():
    buffer = np.zeros((8, 12), np.float32)
    complex_ = np.zeros(5, np.complex64)
    square = np.zeros((16, 16), np.float32)
    pairs = [
        (buffer[::2], buffer[1::2]),
        (buffer[:, ::2], buffer[:, 1::2]),
        (buffer[:, :5], buffer[:, 5:]),
        (buffer[:, 1:5], buffer[::-1, 7:3:-1][:, ::-1][:, :0]),
        (complex_.real, complex_.imag),
        (buffer.T[::3], buffer.T[1::3]),
        (square[:8, :8], square[:8, 8:]),
        (square[::2, ::2], square[1::2]),
        (square[::2, ::2], square[:, 1::2].T),
        (buffer[::-2], buffer[::2]),
    ]
    for a, b in pairs:
        assert not np.shares_memory(a, b)
        assert overlaps(view(a), view(b)) is False
        assert overlaps(view(b), view(a)) is False
        check_overlaps("P", [("dy", view(a))], [("dx", view(b))])


def test_parts_that_do_overlap():
    buffer = np.zeros((8, 12), np.float32)
    pairs = [
        (buffer, buffer),
        (buffer[:, :6], buffer[:, 5:]),
        (buffer[::2], buffer[::3]),
        (buffer, buffer[::-1]),
        (buffer.reshape(-1)[:-1], buffer.reshape(-1)[1:]),
        (buffer.view(np.float64), buffer[:, 1::2]),
        (buffer.view(np.int64)[:, 3:4], buffer[:, 7]),
    ]
    for a, b in pairs:
        assert np.shares_memory(a, b)
        assert overlaps(view(a), view(b)) is True
        assert overlaps(view(b), view(a)) is True


def test_mixed_widths():
    buffer = np.zeros((8, 12), np.float32)
    wide = buffer[:, :2].view(np.float64)
    assert overlaps(view(wide), view(buffer[:, 2:])) is False
    assert overlaps(view(wide), view(buffer[:, 1:])) is True


ITEMS = st.sampled_from([ElementKind.F16, ElementKind.F32, ElementKind.F64])


@st.composite
def placed(draw, room=400):
    """A small strided array inside `room` bytes, with any signs of strides."""
    kind = draw(ITEMS)
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank)))
    strides = tuple(draw(st.lists(st.integers(-9, 9), min_size=rank, max_size=rank)))
    trial = at(0, shape, strides, kind)
    size = kind.size_bytes
    least, most = -trial.lo // size, (room - trial.hi) // size
    if most < least:
        return at(0, (1,), (1,), kind)
    return at(size * draw(st.integers(least, most)), shape, strides, kind)


def touched(made):
    size = made.itemsize
    return {
        made.ptr + size * sum(i * s for i, s in zip(index, made.strides, strict=True)) + byte
        for index in itertools.product(*map(range, made.shape))
        for byte in range(size)
    }


@settings(max_examples=1500, deadline=None)
@given(placed(), placed())
def test_overlap_is_exact(a, b):
    expected = not touched(a).isdisjoint(touched(b))
    assert overlaps(a, b) is expected
    assert overlaps(b, a) is expected


@settings(max_examples=500, deadline=None)
@given(placed(4000), placed(4000))
def test_overlap_agrees_with_numpy(a, b):
    memory = np.zeros(512)  # of doubles, so that every element is aligned
    lent = [
        np.ndarray(
            made.shape,
            NUMPY_DTYPES[made.dtype],
            memory,
            made.ptr,
            tuple(s * made.itemsize for s in made.strides),
        )
        for made in (a, b)
    ]
    assert overlaps(view(lent[0]), view(lent[1])) is np.shares_memory(*lent)


@settings(max_examples=1500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-40, 40)), max_size=5).filter(
        lambda axes: math.prod(n for n, _ in axes) < 2000
    )
)
def test_self_overlap_is_exact(axes):
    shape = tuple(n for n, _ in axes)
    strides = tuple(s for _, s in axes)
    places = [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    assert self_overlaps(shape, strides) is (len(set(places)) < len(places))


@settings(max_examples=800, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=5),
    st.integers(-5, 400),
)
def test_the_solver_is_exact(terms, target):
    sums = {0}
    for step, last in terms:
        sums = {s + step * x for s in sums for x in range(last + 1)}
    assert overlap._solvable(terms, target, [10**6]) is (target in sums)


def test_self_overlap_cases():
    assert self_overlaps((), ()) is False
    assert self_overlaps((3, 4), (4, 1)) is False
    assert self_overlaps((4, 3), (1, 4)) is False
    assert self_overlaps((3, 4), (0, 1)) is True
    assert self_overlaps((3, 4), (3, 1)) is True
    assert self_overlaps((3, 4), (-4, -1)) is False
    assert self_overlaps((0, 4), (0, 0)) is False
    assert self_overlaps((1, 4), (0, 1)) is False
    # Interleaved without being nested: 2·i and 3·j meet only from (3, 0), (0, 2) on.
    assert self_overlaps((3, 2), (2, 3)) is False
    assert self_overlaps((4, 3), (2, 3)) is True
    assert self_overlaps((2**40, 2**20), (2**21, 1)) is False


def hard():
    """Strides without structure, as no one makes them: a subset-sum problem."""
    big = 10**15
    return tuple(big + (7919**k) % big for k in range(2, 10))


def test_what_cannot_be_decided_is_refused(monkeypatch):
    shape, strides = (6,) * 8, hard()
    assert self_overlaps(shape, strides) is None
    spread = at(0, shape, strides)
    assert overlaps(spread, at(400, shape, strides[::-1])) is None
    undecided = "could not be decided whether output dx overlaps"
    with pytest.raises(InvalidProblem, match=rf"^P: .*{undecided} itself: shape"):
        check_overlaps("P", [], [("dx", spread)])

    monkeypatch.setattr(overlap, "_WORK", 0)
    buffer = np.zeros((7, 11), np.float32)
    left, right = view(buffer[:, :5]), view(buffer[:, 5:])
    overlap._share.cache_clear()
    with pytest.raises(InvalidProblem, match=rf"^P: .*{undecided} input y: shape"):
        check_overlaps("P", [("y", left)], [("dx", right)])
    with pytest.raises(InvalidProblem, match=rf"^P: .*{undecided} output db: shape"):
        check_overlaps("P", [], [("dx", right), ("db", left)])
    overlap._share.cache_clear()


def test_same_place():
    array = np.zeros((4, 6), np.float32)
    assert same_place(view(array), view(array[:]))
    assert not same_place(view(array), view(array[:, ::-1]))
    assert not same_place(view(array), view(array.T))
    assert not same_place(view(array), view(array.view(np.int32)))
    assert not same_place(view(array), view(array.copy()))
    assert same_place(view(array[:1]), view(as_strided(array, (1, 6), (999, 4))))


def test_an_output_may_be_exactly_dy():
    array = np.zeros((4, 6), np.float32)
    dy, y = view(array), view(np.zeros((4, 6), np.float32))
    check_overlaps("P", [("dy", dy), ("y", y)], [("dx", view(array))])
    check_overlaps("P", [("dy", dy)], [("da", view(array)), ("db", y)])
    check_overlaps("P", [("dy", dy)], [("da", y), ("db", view(array))])
    check_overlaps("P", [("dy", y), ("y", y)], [("dx", dy)])


def test_every_other_overlap_is_refused():
    array = np.zeros((4, 6), np.float32)
    whole, apart = view(array), view(np.zeros((4, 6), np.float32))
    part = view(array.reshape(-1)[2:20])
    cases = [
        ([("dy", apart), ("y", whole)], [("dx", whole)], "output dx overlaps input y"),
        ([("dy", whole), ("y", whole)], [("dx", whole)], "output dx overlaps input y"),
        ([("dy", part)], [("dx", whole)], "output dx overlaps input dy .it may be exactly dy"),
        ([("dy", view(array[::-1]))], [("dx", whole)], "output dx overlaps input dy"),
        ([("dy", whole)], [("da", whole), ("db", whole)], "output da overlaps output db"),
        ([("dy", apart)], [("da", whole), ("db", part)], "output da overlaps output db"),
        ([("dout", whole)], [("dweight", whole)], "output dweight overlaps input dout"),
        (
            [("dy", apart)],
            [("dx", view(np.lib.stride_tricks.as_strided(array, (4, 6), (0, 4))))],
            "output dx overlaps itself",
        ),
    ]
    for inputs, outputs, message in cases:
        with pytest.raises(InvalidProblem, match=f"^SoftmaxBackwardPlan: .*{message}"):
            check_overlaps("SoftmaxBackwardPlan", inputs, outputs)
    check_overlaps("P", [("dout", whole)], [("dx", whole)], same={"dout"})
    with pytest.raises(InvalidProblem, match="output dx overlaps input dy"):
        check_overlaps("P", [("dy", whole)], [("dx", whole)], same=())


def test_inputs_may_do_as_they_like():
    array = np.zeros((4, 6), np.float32)
    spread = view(np.broadcast_to(array[0], (4, 6)))
    out = view(np.zeros((4, 6), np.float32))
    check_overlaps("P", [("dy", view(array)), ("y", spread), ("x", view(array))], [("dx", out)])


def test_empty_arrays_overlap_nothing():
    array = np.zeros((4, 6), np.float32)
    nothing = view(array[2:2])
    inside = at(view(array).ptr + 8, (0, 3), (3, 1))
    for empty in (nothing, inside):
        assert overlaps(empty, view(array)) is False
        check_overlaps("P", [("y", empty)], [("dx", view(array))])
        check_overlaps("P", [("y", view(array))], [("dx", empty), ("db", empty)])
        check_overlaps("P", [], [("da", view(array)), ("db", empty)])
