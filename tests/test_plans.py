"""Plans: what they say of themselves, what they refuse, and what they leave untouched."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import itertools
import pickle
import platform
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

import gradplan as gp
from gradplan.backends.reference import check_error, gradient

DTYPES = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
SOFTMAX_KINDS = ("softmax", "log_softmax")
SCAN_KINDS = tuple(kind.value for kind in gp.ScanKind)
REDUCE_KINDS = tuple(kind.value for kind in gp.ReduceKind)
ALL_KINDS = (*SOFTMAX_KINDS, "lerp", *SCAN_KINDS, *REDUCE_KINDS, "embedding")
# One kind of each family, with every array its family knows.
FAMILIES = ("softmax", "lerp", "cumprod", "std", "embedding")
REFERENCE = gp.PlanPreference(backend="reference")


@dataclasses.dataclass
class Case:
    """A plan with arrays that it takes."""

    plan: Any
    arrays: dict[str, Any]

    @property
    def desc(self):
        return self.plan.descriptor

    @property
    def me(self):
        return type(self.plan).__name__

    @property
    def outputs(self):
        return [operand.name for operand in self.desc.operands if operand.output]

    def args(self, **changes):
        return self.plan._args_type(**{**self.arrays, **changes})

    def run(self, **options):
        """Run into fresh outputs; the results by name."""
        fresh = {name: like(self.arrays[name]) for name in self.outputs}
        self.plan.run(self.args(**fresh), **options)
        return fresh

    def exact(self, **options):
        work = np.longdouble if self.desc.element is gp.ElementKind.F64 else np.float64
        inputs = {
            name: array if name == "indices" else array.astype(work)
            for name, array in self.arrays.items()
            if array is not None and (name not in self.outputs or name == "dweight")
        }
        return gradient(self.desc, inputs, **options)

    def error(self, got):
        return check_error(self.desc, got, self.exact(), self.exact(magnitude=True))


def like(array):
    """A fresh array with the contents and strides of another."""
    span = sum((n - 1) * abs(s) for n, s in zip(array.shape, array.strides, strict=True))
    buffer = np.zeros(span // array.itemsize + 1, array.dtype)
    first = -sum((n - 1) * min(s, 0) for n, s in zip(array.shape, array.strides, strict=True))
    fresh = np.ndarray(array.shape, array.dtype, buffer, first, array.strides)
    fresh[...] = array
    return fresh


def lay(array, how):
    """The same values in another memory order."""
    if how == "c":
        return np.ascontiguousarray(array)
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "reversed":
        flipped = np.ascontiguousarray(np.flip(array))
        return np.flip(flipped)
    if how == "strided":
        wide = np.zeros(tuple(2 * n for n in array.shape), array.dtype)
        part = wide[tuple(slice(0, None, 2) for _ in array.shape)]
        part[...] = array
        return part
    raise AssertionError(how)


def forward(kind, x, axes):
    """The saved result of the forward pass, in float64."""
    keep = {"axis": axes, "keepdims": True}
    axis = axes[0] if axes else None
    with np.errstate(all="ignore"):
        if kind in ("softmax", "log_softmax", "log_sum_exp"):
            top = x.max(**keep)
            total = top + np.log(np.exp(x - top).sum(**keep))
            logs = x - total
            return {"softmax": np.exp(logs), "log_softmax": logs, "log_sum_exp": total}[kind]
        if kind == "log_cumsum_exp":
            return np.logaddexp.accumulate(x, axis=axis)
        if kind == "cumprod":
            return np.multiply.accumulate(x, axis=axis)
        if kind == "cummax":
            return np.maximum.accumulate(x, axis=axis)
        if kind == "cummin":
            return np.minimum.accumulate(x, axis=axis)
        if kind == "norm2":
            return np.sqrt((x * x).sum(**keep))
        if kind == "std":
            return x.std(ddof=1, **keep)
        return {"max": np.max, "min": np.min, "prod": np.prod}[kind](x, **keep)


def select(kind, shape=(4, 6), axis=-1, element="f32", preference=None, **more):
    """The plan of a kind, whatever its family."""
    if kind in SOFTMAX_KINDS:
        desc = gp.SoftmaxBackwardDescriptor(
            kind=kind, input_shape=shape, softmax_axis=axis, element=element
        )
        return gp.SoftmaxBackwardPlan.select(desc, preference=preference)
    if kind == "lerp":
        more.setdefault("param", 0.25)
        desc = gp.BinaryParamBackwardDescriptor(kind=kind, shape=shape, element=element, **more)
        return gp.BinaryParamBackwardPlan.select(desc, preference=preference)
    if kind in SCAN_KINDS:
        desc = gp.ScanBackwardDescriptor(
            kind=kind, input_shape=shape, scan_axis=axis, element=element, **more
        )
        return gp.ScanBackwardPlan.select(desc, preference=preference)
    if kind in REDUCE_KINDS:
        desc = gp.ReduceBackwardDescriptor(
            kind=kind, input_shape=shape, reduce_axis=axis, element=element, **more
        )
        return gp.ReduceBackwardPlan.select(desc, preference=preference)
    desc = gp.EmbeddingBackwardDescriptor(
        num_embeddings=more.pop("rows", 5),
        num_indices=shape[0],
        embedding_dim=shape[1],
        element=element,
        **more,
    )
    return gp.EmbeddingBackwardPlan.select(desc, preference=preference)


def case(kind, *args, layout="c", with_y=True, seed=0, **options):
    plan = select(kind, *args, **options)
    desc, rng = plan.descriptor, np.random.default_rng(seed)
    shape, axes = desc.shape_and_axes
    dtype = DTYPES[desc.element.value]
    # Products of many numbers near 1 stay in range.
    x = rng.uniform(0.9, 1.1, shape) if "prod" in kind else rng.standard_normal(shape)
    x = x.astype(dtype)
    arrays: dict[str, Any] = {}
    for operand in desc.operands:
        if operand.name == "indices":
            made = rng.integers(-1, desc.num_embeddings + 1, operand.shape)
            arrays["indices"] = made.astype(np.int32 if desc.index == "i32" else np.int64)
        elif operand.name == "x":
            arrays["x"] = lay(x, layout)
        elif operand.name == "y":
            y = forward(kind, x.astype(np.float64), axes)
            given = operand.required or with_y
            arrays["y"] = lay(y.astype(dtype), layout) if given else None
        else:
            arrays[operand.name] = lay(rng.standard_normal(operand.shape).astype(dtype), layout)
    return Case(plan, arrays)


def aligned(size, fill=None):
    """A uint8 buffer of this size at a multiple of 256."""
    whole = np.empty(size + 256, np.uint8)
    if fill is not None:
        whole[:] = fill
    start = -whole.ctypes.data % 256
    return whole[start : start + size]


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


def contents(args):
    kept = {}
    for field in dataclasses.fields(args):
        array = getattr(args, field.name)
        if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
            kept[field.name] = array.tobytes()
    return kept


def refused(problem, error, *words, **changes):
    """Every way in refuses these arguments in the same words, and writes nothing."""
    return refused_at_border(problem, error, problem.me, *words, **changes)


def refused_at_border(problem, error, *words, **changes):
    """The same for what is refused before the plan is asked; see
    `test_refusals_at_the_border_name_the_plan`."""
    args = problem.args(**changes)
    before = contents(args)
    messages = set()
    for attempt in (problem.plan.validate, problem.plan.run, problem.plan.bind):
        with pytest.raises(error) as caught:
            attempt(args)
        assert type(caught.value) is error
        messages.add(str(caught.value))
    assert not problem.plan.can_implement(args)
    assert contents(args) == before
    (message,) = messages
    for word in words:
        assert str(word) in message, f"{word!r} is not in {message!r}"
    return caught.value


def operands_of(*kinds):
    for kind in kinds:
        for operand in select(kind).descriptor.operands:
            yield pytest.param(kind, operand.name, id=f"{kind}-{operand.name}")


def outputs_of(*kinds):
    for kind in kinds:
        for operand in select(kind).descriptor.operands:
            if operand.output:
                yield pytest.param(kind, operand.name, id=f"{kind}-{operand.name}")


def floats_of(*kinds):
    return [param for param in operands_of(*kinds) if param.values[1] != "indices"]


def misaligned(array):
    """A copy that starts one byte off."""
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    raw[:] = array.reshape(-1).view(np.uint8)
    return raw.view(array.dtype).reshape(array.shape)


OPERANDS = pytest.mark.parametrize(("kind", "name"), list(operands_of(*FAMILIES)))
FLOATS = pytest.mark.parametrize(("kind", "name"), floats_of(*FAMILIES))
OUTPUTS = pytest.mark.parametrize(("kind", "name"), list(outputs_of(*FAMILIES)))


@OPERANDS
def test_an_argument_of_another_shape_is_invalid(kind, name):
    problem = case(kind)
    array = problem.arrays[name]
    wrong = np.concatenate([array, array])
    refused(problem, gp.InvalidProblem, name, "shape", array.shape, wrong.shape, **{name: wrong})
    # Nothing is broadcast or squeezed on the caller's behalf.
    refused(problem, gp.InvalidProblem, name, "shape", **{name: array[None]})


@OPERANDS
def test_an_argument_of_another_type_is_invalid(kind, name):
    problem = case(kind)
    array = problem.arrays[name]
    if name == "indices":
        wrong, expected, came = array.astype(np.int32), "i64", "i32"
    else:
        wrong, expected, came = array.astype(np.float64), "f32", "f64"
    refused(problem, gp.InvalidProblem, name, expected, came, **{name: wrong})
    if name == "indices":
        refused(problem, gp.InvalidProblem, name, "i64", "f64", indices=array.astype(float))


@OPERANDS
def test_a_type_outside_the_matrix_is_unsupported(kind, name):
    problem = case(kind)
    wrong = problem.arrays[name].astype(np.complex64)
    refused_at_border(problem, gp.Unsupported, name, "complex64", **{name: wrong})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        param
        for param in operands_of(*ALL_KINDS)
        if next(
            op for op in select(param.values[0]).descriptor.operands if op.name == param.values[1]
        ).required
    ],
)
def test_a_missing_argument_is_invalid(kind, name):
    refused(case(kind), gp.InvalidProblem, kind, name, "missing", **{name: None})


@pytest.mark.parametrize(
    ("kind", "optional"),
    [
        ("lerp", "da"),
        ("lerp", "db"),
        *((kind, "y") for kind in ("cumprod", "cummax", "cummin", "log_cumsum_exp", "prod")),
    ],
)
def test_what_is_optional_may_be_left_out(kind, optional):
    problem = case(kind)
    problem.plan.validate(problem.args(**{optional: None}))
    assert problem.plan.can_implement(problem.args(**{optional: None}))


@pytest.mark.parametrize("kind", ["cumsum", "sum", "mean", "var"])
def test_what_a_kind_does_not_read_is_ignored(kind):
    problem = case(kind)
    unread = {"y": "no array at all"}
    if kind != "var":
        unread["x"] = np.zeros(99)
    problem.plan.validate(problem.args(**unread))


@OUTPUTS
def test_a_read_only_output_is_invalid(kind, name):
    problem = case(kind)
    frozen = problem.arrays[name].copy()
    frozen.flags.writeable = False
    refused(problem, gp.InvalidProblem, name, "read-only", **{name: frozen})


@OPERANDS
@pytest.mark.parametrize("wrong", [[[1.0, 2.0]], 3.0, "dy", object()], ids=lambda w: str(type(w)))
def test_what_is_no_array_is_invalid(kind, name, wrong):
    refused_at_border(case(kind), gp.InvalidProblem, name, type(wrong).__name__, **{name: wrong})


@FLOATS
def test_byte_swapped_arrays_are_invalid(kind, name):
    problem = case(kind)
    wrong = problem.arrays[name].astype(">f4")
    refused_at_border(problem, gp.InvalidProblem, name, "byte", **{name: wrong})


@FLOATS
def test_masked_arrays_are_invalid(kind, name):
    problem = case(kind)
    wrong = np.ma.masked_invalid(problem.arrays[name])
    refused_at_border(problem, gp.InvalidProblem, name, "masked", **{name: wrong})


@FLOATS
def test_misaligned_pointers_are_named(kind, name):
    problem = case(kind)
    wrong = misaligned(problem.arrays[name])
    refused_at_border(problem, gp.MisalignedOperand, name, hex(wrong.ctypes.data), **{name: wrong})


@FLOATS
def test_strides_inside_an_element_are_invalid(kind, name):
    problem = case(kind)
    array = problem.arrays[name]
    record = np.zeros(array.shape, np.dtype([("value", "f4"), ("odd", "u2")], align=False))
    refused_at_border(problem, gp.InvalidProblem, name, "stride", **{name: record["value"]})


@FLOATS
def test_memory_that_does_not_reach_is_a_buffer_too_small(kind, name):
    problem = case(kind)
    shape = problem.arrays[name].shape
    needed = 4 * int(np.prod(shape))
    short = as_strided(np.zeros(3, np.float32), shape, problem.arrays[name].strides)
    args = problem.args(**{name: short})
    untouched = {other: array.tobytes() for other, array in problem.arrays.items() if other != name}
    with pytest.raises(gp.BufferTooSmall) as caught:
        problem.plan.run(args)
    assert (caught.value.needed, caught.value.got) == (needed, 12)
    for word in (name, str(needed), "12"):
        assert word in str(caught.value)
    assert not problem.plan.can_implement(args)
    assert untouched == {
        other: array.tobytes() for other, array in problem.arrays.items() if other != name
    }


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda t: t.to_sparse(), "sparse"),
        (lambda t: t.to("meta"), "meta"),
        (lambda t: t.clone().requires_grad_(), "gradplan.torch"),
        (lambda t: torch.view_as_complex(t.reshape(4, 3, 2)).conj().imag, "neg"),
    ],
    ids=["sparse", "meta", "requires-grad", "negated"],
)
def test_torch_tensors_that_cannot_be_read_as_they_lie_are_invalid(make, word):
    problem = case("softmax")
    refused_at_border(problem, gp.InvalidProblem, "dy", word, dy=make(torch.zeros(4, 6)))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("error", "make"),
    [
        (gp.InvalidProblem, lambda a: a.tolist()),
        (gp.InvalidProblem, lambda a: a.astype(">f4")),
        (gp.InvalidProblem, np.ma.masked_invalid),
        (gp.InvalidProblem, lambda a: torch.from_numpy(a).clone().requires_grad_()),
        (gp.Unsupported, lambda a: a.astype(np.complex64)),
        (gp.MisalignedOperand, misaligned),
        (gp.BufferTooSmall, lambda a: as_strided(a, a.shape, (a.strides[0] * 9, 4))),
    ],
    ids=["list", "swapped", "masked", "requires-grad", "complex", "misaligned", "short"],
)
def test_refusals_at_the_border_name_the_plan(kind, error, make):
    problem = case(kind)
    name = problem.desc.operands[0].name
    with pytest.raises(error) as caught:
        problem.plan.run(problem.args(**{name: make(problem.arrays[name])}))
    assert problem.me in str(caught.value)
    assert name in str(caught.value)


class OnTheGpu:
    """A CPU array whose DLPack export claims the first GPU: there is none to test with."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, stream=None):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
        address = prototype(ctypes.cast(pointer, ctypes.c_void_p).value)(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + 8).value = 2  # behind the data pointer
        return capsule


@OPERANDS
def test_an_array_on_another_device_is_invalid(kind, name):
    problem = case(kind)
    away = OnTheGpu(problem.arrays[name])
    refused(problem, gp.InvalidProblem, name, "cpu", "cuda:0", **{name: away})


@pytest.mark.parametrize("kind", FAMILIES)
def test_arguments_of_another_family_are_invalid(kind):
    problem = case(kind)
    other = case("softmax" if kind != "softmax" else "lerp")
    with pytest.raises(gp.InvalidProblem) as caught:
        problem.plan.run(other.args())
    assert problem.me in str(caught.value)
    assert problem.plan._args_type.__name__ in str(caught.value)
    assert other.plan._args_type.__name__ in str(caught.value)
    assert not problem.plan.can_implement(other.args())
    assert not problem.plan.can_implement(None)


@pytest.mark.parametrize("kind", FAMILIES)
def test_arguments_are_keyword_only_and_compared_by_identity(kind):
    problem = case(kind)
    args = problem.args()
    assert len({args, args}) == 1
    assert args != problem.args()
    with pytest.raises(TypeError):
        problem.plan._args_type(*problem.arrays.values())


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_can_implement_says_yes_to_what_runs(kind):
    problem = case(kind)
    before = contents(problem.args())
    assert problem.plan.can_implement(problem.args()) is True
    problem.plan.validate(problem.args())
    assert contents(problem.args()) == before


@pytest.mark.parametrize("kind", ["softmax", "lerp", "cumprod", "max"])
def test_dx_may_be_exactly_dy(kind):
    # Reductions have dx as large as dy only where they reduce nothing or extents of 1.
    shape, axis = ((4, 1, 6), 1) if kind == "max" else ((4, 6), -1)
    for layout in ("c", "strided"):
        problem = case(kind, shape, axis, layout=layout)
        want = problem.run()
        for name in problem.outputs:
            dy = like(problem.arrays["dy"])
            changes = dict.fromkeys(problem.outputs) | {"dy": dy, name: dy}
            problem.plan.run(problem.args(**changes))
            assert dy.tobytes() == want[name].tobytes()


@pytest.mark.parametrize(
    ("kind", "with_y"),
    [
        ("softmax", True),
        ("cumsum", True),
        ("cumprod", True),
        ("log_softmax", True),
        ("log_cumsum_exp", False),
        ("cumprod", False),
        ("log_cumsum_exp", True),
    ],
)
def test_large_problems_run_in_place_too(kind, with_y):
    # Split rows and lanes read what they have not yet overwritten.
    for shape, axis in (((1, 140_000), 1), ((600, 300), 0)):
        problem = case(kind, shape, axis, with_y=with_y)
        want = problem.run()
        dy = problem.arrays["dy"]
        problem.plan.run(problem.args(dx=dy))
        assert dy.tobytes() == want["dx"].tobytes()


def test_lerp_may_write_one_output_onto_dy_and_the_other_beside():
    problem = case("lerp")
    want = problem.run()
    dy = problem.arrays["dy"]
    problem.plan.run(problem.args(da=dy))
    assert dy.tobytes() == want["da"].tobytes()
    assert problem.arrays["db"].tobytes() == want["db"].tobytes()


@pytest.mark.parametrize(
    ("kind", "out", "other"),
    [
        ("softmax", "dx", "y"),
        ("cumprod", "dx", "x"),
        ("cumprod", "dx", "y"),
        ("std", "dx", "x"),
        ("lerp", "da", "db"),
    ],
)
def test_an_output_that_is_another_argument_is_invalid(kind, out, other):
    problem = case(kind)
    refused(problem, gp.InvalidProblem, out, other, "overlaps", **{out: problem.arrays[other]})


def test_an_embedding_table_inside_its_gradient_is_invalid():
    problem = case("embedding")
    whole = np.zeros((9, 6), np.float32)
    refused(problem, gp.InvalidProblem, "dweight", "dout", dout=whole[:4], dweight=whole[3:8])
    problem.plan.run(problem.args(dout=whole[:4], dweight=whole[4:]))


@pytest.mark.parametrize("kind", ["softmax", "cumsum", "lerp"])
def test_an_output_shifted_against_dy_is_invalid(kind):
    problem = case(kind)
    out = problem.outputs[0]
    whole = np.zeros((5, 6), np.float32)
    refused(problem, gp.InvalidProblem, out, "dy", "overlaps", dy=whole[:4], **{out: whole[1:]})
    # The same memory in another order is not "exactly dy" either.
    refused(problem, gp.InvalidProblem, out, "dy", dy=whole[:4], **{out: whole[:4][::-1]})


@OUTPUTS
def test_an_output_that_overlaps_itself_is_invalid(kind, name):
    problem = case(kind)
    row = np.zeros(6, np.float32)
    shape = problem.arrays[name].shape
    twice = as_strided(row, shape, (0, 4))
    refused(problem, gp.InvalidProblem, name, "itself", **{name: twice})


@pytest.mark.parametrize("kind", ["softmax", "cumprod", "std", "lerp"])
def test_interleaved_halves_of_one_buffer_are_fine(kind):
    problem = case(kind)
    want = problem.run()
    whole = np.zeros((4, 12), np.float32)
    halves = {}
    partner = "dy" if kind != "std" else "x"
    whole[:, 0::2] = problem.arrays[partner]
    halves[partner] = whole[:, 0::2]
    halves[problem.outputs[0]] = whole[:, 1::2]
    problem.plan.run(problem.args(**halves))
    np.testing.assert_allclose(whole[:, 1::2], want[problem.outputs[0]], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(whole[:, 0::2], problem.arrays[partner])


def test_inputs_may_overlap_each_other():
    problem = case("softmax")
    same = problem.arrays["y"]
    problem.plan.run(problem.args(dy=same))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_equal_questions_share_a_plan(kind):
    assert select(kind) is select(kind)
    assert select(kind, shape=[4, 6]) is select(kind)
    assert select(kind, element="f32", preference=gp.PlanPreference()) is select(kind)
    assert select(kind, element="f64") is not select(kind)
    assert select(kind, preference=REFERENCE) is not select(kind)
    if kind not in ("lerp", "embedding"):
        assert select(kind, axis=1) is select(kind, axis=-1)


def test_a_device_may_be_named_as_torch_does():
    desc = select("softmax").descriptor
    assert gp.SoftmaxBackwardPlan.select(desc, device=torch.device("cpu")) is select("softmax")
    assert gp.SoftmaxBackwardPlan.select(desc, device="cpu") is select("softmax")


def test_plans_are_picked_by_several_threads_at_once():
    picked = []
    start = threading.Barrier(8)

    def pick():
        start.wait()
        picked.append(select("softmax", shape=(3, 11)))

    threads = [threading.Thread(target=pick) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(picked) == 8
    assert {plan.sku for plan in picked} == {picked[0].sku}


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "embedding"])
def test_rank_nine_is_unsupported_and_rank_eight_is_not(kind):
    assert select(kind, shape=(1, 2) * 4).workspace_size >= 0
    with pytest.raises(gp.Unsupported) as caught:
        select(kind, shape=(1, 2) * 4 + (1,))
    assert "rank 9" in str(caught.value)
    assert "8" in str(caught.value)
    assert type(select(kind)).__name__ in str(caught.value)


@pytest.mark.parametrize("kind", ["cummax", "cummin"])
@pytest.mark.parametrize("ties", ["split", "all"])
def test_scans_cannot_share_among_ties(kind, ties):
    with pytest.raises(gp.Unsupported) as caught:
        select(kind, ties=ties)
    for word in ("ScanBackwardPlan", kind, "first", "last", ties):
        assert word in str(caught.value)


def test_a_backend_that_does_not_run_here_is_unsupported(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend in ("triton", gp.BackendKind.TRITON):
        with pytest.raises(gp.Unsupported, match="triton"):
            select("softmax", preference=gp.PlanPreference(backend=backend))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_gpu_that_is_not_there_is_one_clear_sentence(device):
    with pytest.raises(gp.Unsupported) as caught:
        gp.SoftmaxBackwardPlan.select(select("softmax").descriptor, device=device)
    message = str(caught.value)
    assert device in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("device", ["tpu", "", "gpu0", None], ids=repr)
def test_an_unknown_device_is_unsupported(device):
    with pytest.raises(gp.Unsupported, match="device"):
        gp.SoftmaxBackwardPlan.select(select("softmax").descriptor, device=device)


def test_select_takes_the_descriptor_of_its_family_only():
    with pytest.raises(gp.InvalidProblem) as caught:
        gp.SoftmaxBackwardPlan.select(select("cumsum").descriptor)
    for word in ("SoftmaxBackwardPlan", "SoftmaxBackwardDescriptor", "ScanBackwardDescriptor"):
        assert word in str(caught.value)
    with pytest.raises(gp.InvalidProblem, match="PlanPreference"):
        gp.SoftmaxBackwardPlan.select(select("softmax").descriptor, preference="fast")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("softmax", (1, 200_000)), ("prod", (1, 200_000)), ("cumprod", (4, 6)), ("embedding", (4, 6))],
)
def test_a_workspace_limit_is_honoured(kind, shape):
    needed = select(kind, shape).workspace_size
    assert needed > 0
    assert select(kind, shape, preference=gp.PlanPreference(max_workspace_bytes=needed))
    with pytest.raises(gp.Unsupported) as caught:
        select(kind, shape, preference=gp.PlanPreference(max_workspace_bytes=needed - 1))
    for word in (kind, needed, f"max_workspace_bytes={needed - 1}"):
        assert str(word) in str(caught.value)


@pytest.mark.parametrize("kind", ["lerp", "sum", "mean", "norm2", "log_sum_exp"])
def test_what_needs_no_workspace_meets_a_limit_of_zero(kind):
    plan = select(kind, (3, 200_000), preference=gp.PlanPreference(max_workspace_bytes=0))
    assert plan.workspace_size == 0


def test_an_embedding_too_large_to_sort_is_unsupported_at_select():
    with pytest.raises(gp.Unsupported):
        select("embedding", (1 << 30, 4), rows=1 << 40)


TOO_LARGE = [
    ("softmax", (2**70,), {}),
    ("lerp", (2**32, 2**32), {}),
    ("cumsum", (2**61,), {}),
    ("sum", (2**62, 2**62), {}),
    ("sum", (2**70, 0), {}),
    ("max", (2**31, 2**31), {"element": "f16"}),
    ("embedding", (4, 2**62), {"rows": 3}),
    ("embedding", (4, 3), {"rows": 2**62}),
    ("embedding", (2**60, 0), {"rows": 3}),
    ("embedding", (2**59, 1), {"rows": 3}),
]


@pytest.mark.parametrize(("kind", "shape", "options"), TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_a_problem_that_63_bits_cannot_count_is_invalid_at_select(kind, shape, options):
    with pytest.raises(gp.InvalidProblem, match=r"Plan: .* 63 bits"):
        select(kind, shape, **options)


@pytest.mark.parametrize("kind", ["softmax", "cumsum", "log_cumsum_exp", "lerp", "sum", "var"])
@pytest.mark.parametrize("shape", [(2**60,), (2**59, 2), (2, 2**59), (2**30, 2**30)], ids=repr)
def test_the_largest_problems_explain_themselves(kind, shape):
    plan = select(kind, shape)
    assert plan.sku
    assert plan.explain()


def test_preferences_are_normalised_and_checked():
    assert gp.PlanPreference(backend="numba") == gp.PlanPreference(backend=gp.BackendKind.NUMBA)
    assert hash(gp.PlanPreference(backend="numba")) == hash(
        gp.PlanPreference(backend=gp.BackendKind.NUMBA)
    )
    assert gp.PlanPreference() == gp.PlanPreference(
        deterministic=True, max_workspace_bytes=None, backend=None
    )
    with pytest.raises(gp.InvalidProblem, match="expected one of numba, triton, reference"):
        gp.PlanPreference(backend="cudnn")
    with pytest.raises(gp.InvalidProblem, match="max_workspace_bytes"):
        gp.PlanPreference(max_workspace_bytes=-1)
    for limit in ("abc", "64", 1.5, 64.0, [64]):
        with pytest.raises(gp.InvalidProblem, match="max_workspace_bytes must be an integer"):
            gp.PlanPreference(max_workspace_bytes=limit)
    assert gp.PlanPreference(max_workspace_bytes=np.int64(64)).max_workspace_bytes == 64
    with pytest.raises(dataclasses.FrozenInstanceError):
        gp.PlanPreference().deterministic = False
    with pytest.raises(TypeError):
        gp.PlanPreference(False)


def test_a_plan_that_need_not_be_deterministic_is_still_a_plan():
    problem = case("embedding", preference=gp.PlanPreference(deterministic=False))
    assert problem.error(problem.run()) <= problem.plan.precision_guarantee.relative_error


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("element", ["f32", "f64"])
def test_reference_plans_hold_their_guarantee(kind, element):
    problem = case(kind, (5, 33), element=element, preference=REFERENCE)
    assert problem.plan.sku.backend is gp.BackendKind.REFERENCE
    assert problem.plan.workspace_size == 0
    assert problem.error(problem.run()) <= problem.plan.precision_guarantee.relative_error
    strided = case(kind, (5, 33), element=element, preference=REFERENCE, layout="strided")
    assert_same_bits(strided.run(), problem.run())


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_plans_agree_with_the_reference_within_the_guarantee(kind):
    problem = case(kind)
    assert problem.error(problem.run()) <= problem.plan.precision_guarantee.relative_error


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_sku_tells_the_truth(kind):
    plan = select(kind)
    sku = plan.sku
    assert sku.op == kind
    assert sku.op == getattr(plan.descriptor, "kind", "embedding")
    assert f"{sku.op}" == kind
    families = {
        gp.SoftmaxBackwardPlan: gp.OpCategory.SOFTMAX,
        gp.BinaryParamBackwardPlan: gp.OpCategory.BINARY_ELEMENTWISE,
        gp.ScanBackwardPlan: gp.OpCategory.SCAN,
        gp.ReduceBackwardPlan: gp.OpCategory.REDUCTION,
        gp.EmbeddingBackwardPlan: gp.OpCategory.EMBEDDING,
    }
    assert sku.category is families[type(plan)]
    assert sku.element is gp.ElementKind.F32
    assert sku.index is (gp.IndexKind.I64 if kind == "embedding" else None)
    assert sku.backend is gp.BackendKind.NUMBA
    assert sku.arch == platform.machine()
    assert sku.layout
    assert sku.variant
    assert sku.precision_guarantee == plan.precision_guarantee
    assert kind in str(sku)
    assert hash(sku) == hash(plan.sku)


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "layout"),
    [
        ("softmax", (64, 64), 1, "rows"),
        ("softmax", (64, 64), 0, "columns"),
        ("max", (64, 64), 1, "rows"),
        ("max", (64, 64), 0, "columns"),
        ("cumsum", (64, 64), 1, "rows"),
        ("cumsum", (64, 64), 0, "columns"),
        ("lerp", (4, 4, 4), None, "flat"),
    ],
)
def test_the_layout_is_what_the_variant_assumes(kind, shape, axis, layout):
    assert select(kind, shape, axis).sku.layout == layout


@pytest.mark.parametrize("kind", ["softmax", "cumsum", "var"])
def test_a_bound_launch_knows_the_layout_of_its_arrays(kind):
    plain = case(kind, (64, 64), 1)
    turned = case(kind, (64, 64), 1, layout="fortran")
    assert plain.plan.bind(plain.args()).sku == plain.plan.sku
    assert plain.plan.sku.layout == "rows"
    assert turned.plan.bind(turned.args()).sku.layout == "columns"
    assert "columns" in turned.plan.bind(turned.args()).explain()
    # The plan itself speaks of C-contiguous arrays, whatever was bound before.
    assert turned.plan.sku.layout == "rows"


def test_a_bound_launch_knows_which_optional_arrays_it_has():
    given, absent = case("cumprod"), case("cumprod", with_y=False)
    with_y, without = given.plan.bind(given.args()), absent.plan.bind(absent.args())
    assert with_y.sku == given.plan.sku
    assert with_y.sku.variant != without.sku.variant
    assert with_y.workspace_size < without.workspace_size <= given.plan.workspace_size


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_guarantees_follow_the_contract(kind):
    for element in ("f32", "f16", "bf16", "f64"):
        promise = select(kind, element=element).precision_guarantee
        assert promise.deterministic is True
        assert promise.bit_stable_on_same_hardware is True
        unit = gp.ElementKind.coerce(element).unit_roundoff
        assert unit <= promise.relative_error < 64 * unit
        if element == "f64":
            assert promise.math_precision is gp.MathPrecision.F64
            assert promise.accumulator is gp.ElementKind.F64
        else:
            assert promise.accumulator in (gp.ElementKind.F32, gp.ElementKind.F64)


def numbers(text, label):
    (line,) = [line for line in text.splitlines() if line.split()[0] == label]
    return [int(number) for number in re.findall(r"\d+", line)]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_explain_tells_kernel_bytes_workspace_and_guarantee(kind):
    plan = select(kind)
    text = plan.explain()
    assert str(plan.sku) in text
    assert plan.sku.variant in text
    operands = plan.descriptor.operands
    spared = "y" if kind in ("cummax", "cummin", "prod") else None  # x alone tells as much
    inputs = sum(
        4 * op.size for op in operands if not op.output and op.name not in ("indices", spared)
    )
    inputs += sum(8 * op.size for op in operands if op.name == "indices")
    outputs = sum(4 * op.size for op in operands if op.output)
    read, written, least_read, least_written = numbers(text, "bytes")
    if kind == "embedding":  # accumulating reads and writes the rows of the table that are named
        rows = min(plan.descriptor.num_indices, plan.descriptor.num_embeddings)
        outputs = 4 * rows * plan.descriptor.embedding_dim
        inputs += outputs
    assert least_read == inputs
    assert read >= least_read
    assert written == least_written == outputs
    assert numbers(text, "workspace")[-1] == plan.workspace_size
    assert "relative error" in text
    assert "deterministic" in text
    assert len(text.splitlines()) <= 12


def test_explain_is_exact_for_the_arrays_of_a_bound_launch():
    problem = case("lerp")
    launch = problem.plan.bind(problem.args(db=None))
    assert numbers(launch.explain(), "bytes") == [96, 96, 96, 96]
    assert numbers(problem.plan.explain(), "bytes") == [96, 192, 96, 192]
    absent = case("cumprod", with_y=False)
    launch = absent.plan.bind(absent.args())
    assert numbers(launch.explain(), "bytes")[2:] == [192, 96]
    assert numbers(launch.explain(), "workspace")[0] == launch.workspace_size


def test_explain_counts_the_second_trip_of_split_rows():
    # A row far larger than any cache, in chunks: one trip for the sums, another for the output.
    n = 1 << 24
    plan = select("softmax", (1, n))
    assert "split" in plan.sku.variant
    read, _, least, _ = numbers(plan.explain(), "bytes")
    assert least == 2 * 4 * n
    assert read == 2 * least


@pytest.mark.parametrize("kind", FAMILIES)
def test_plans_describe_themselves(kind):
    problem = case(kind)
    assert problem.plan.device == "cpu"
    assert problem.plan.preference == gp.PlanPreference()
    assert problem.plan.descriptor == problem.desc
    assert problem.me in repr(problem.plan)
    bound = problem.plan.bind(problem.args())
    assert repr(bound) == f"<BoundLaunch {bound.sku}>"
    for name in ("sku", "precision_guarantee", "workspace_size", "descriptor", "device"):
        with pytest.raises(AttributeError):
            setattr(problem.plan, name, None)


@pytest.mark.parametrize("kind", FAMILIES)
def test_plans_are_immutable(kind):
    plan = case(kind).plan
    for name in ("_device", "_desc", "_workspace_size", "mine"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"{name}.*{type(plan).__name__}"):
            setattr(plan, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del plan._device
    assert plan.device == "cpu"


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_plan_that_has_run_travels_as_its_question(kind):
    problem = case(kind)
    problem.run()
    assert pickle.loads(pickle.dumps(problem.plan)) is problem.plan
    assert copy.deepcopy(problem.plan) is problem.plan


# Every family in the layouts that use the workspace: long rows that are split, columns, scans
# that recompute y, and the embedding's sort.
WORKSPACE_CASES = [
    ("softmax", (1, 140_000), 1, {}),
    ("softmax", (3, 70_000), 1, {}),
    ("softmax", (70_000, 3), 0, {}),
    ("log_softmax", (2000, 130), 0, {}),
    ("max", (1, 140_000), 1, {}),
    ("max", (70_000, 3), 0, {}),
    ("prod", (1, 140_000), 1, {}),
    ("prod", (70_000, 3), 0, {}),
    ("var", (2, 80_000), (0, 1), {}),
    ("cumsum", (1, 70_000), 1, {}),
    ("cumsum", (70_000, 3), 0, {}),
    ("cumprod", (1, 70_000), 1, {}),
    ("cumprod", (1, 70_000), 1, {"with_y": False}),
    ("cumprod", (70_000, 3), 0, {"with_y": False}),
    ("cumprod", (40, 1500), 1, {"with_y": False}),
    ("cummax", (1, 70_000), 1, {"with_y": False}),
    ("log_cumsum_exp", (1, 70_000), 1, {"with_y": False}),
    ("log_cumsum_exp", (1, 70_000), 1, {}),
    ("log_cumsum_exp", (3000, 70), 0, {"with_y": False}),
    ("embedding", (5000, 10), None, {"rows": 700}),
    ("embedding", (1, 300), None, {"rows": 3, "accumulate": False}),
    ("embedding", (0, 5), None, {"rows": 3, "accumulate": False}),
    ("lerp", (300, 500), None, {}),
    ("sum", (300, 500), 0, {}),
]


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "options"),
    WORKSPACE_CASES,
    ids=[f"{k}-{s[0]}x{s[1]}{'-no-y' if 'with_y' in o else ''}" for k, s, _, o in WORKSPACE_CASES],
)
def test_a_workspace_of_exactly_the_stated_size_is_enough(kind, shape, axis, options):
    for layout in ("c", "fortran"):
        problem = case(kind, shape, axis, layout=layout, **options)
        want = problem.run()
        size = problem.plan.workspace_size
        # Guards on both sides tell of a kernel that leaves its workspace; the contents are
        # garbage, all ones for one and zeros for the other.
        for fill in (0xFF, 0x00):
            whole = aligned(size + 512, fill)
            problem_workspace = whole[256 : 256 + size]
            got = problem.run(workspace=problem_workspace)
            assert_same_bits(got, want)
            assert (whole[:256] == fill).all()
            assert (whole[256 + size :] == fill).all()
        launch = problem.plan.bind(problem.args())
        exact = launch.workspace_size
        assert exact <= size
        whole = aligned(exact + 512, 0xFF)
        fresh = {name: like(problem.arrays[name]) for name in problem.outputs}
        launch = problem.plan.bind(problem.args(**fresh), workspace=whole[256 : 256 + exact])
        assert launch.workspace_size == exact
        launch()
        assert_same_bits(fresh, want)
        assert (whole[:256] == 0xFF).all()
        assert (whole[256 + exact :] == 0xFF).all()
        assert problem.error(want) <= problem.plan.precision_guarantee.relative_error


@pytest.mark.parametrize("kind", ["softmax", "cumprod", "embedding", "lerp"])
def test_workspaces_are_checked(kind):
    problem = case(kind, (2, 140_000) if kind == "softmax" else (4, 6))
    size = problem.plan.workspace_size
    before = contents(problem.args())

    def attempt(error, workspace, *words, calls=(problem.plan.run, problem.plan.bind)):
        for run in calls:
            with pytest.raises(error) as caught:
                run(problem.args(), workspace=workspace)
            for word in (problem.me, "workspace", *words):
                assert str(word) in str(caught.value)
        assert contents(problem.args()) == before
        return caught.value

    if size:
        exact = problem.plan.bind(problem.args()).workspace_size
        for call, needed in ((problem.plan.run, size), (problem.plan.bind, exact)):
            for short in {0, needed - 1} if needed else ():
                small = aligned(short)
                raised = attempt(gp.WorkspaceTooSmall, small, needed, short, calls=[call])
                assert (raised.needed, raised.got) == (needed, short)
        attempt(gp.MisalignedOperand, aligned(size + 256)[64 : 64 + size], "256")
    else:
        problem.run(workspace=aligned(0))
    wide = aligned(4 * size + 256)
    attempt(gp.InvalidProblem, wide.view(np.float32), "uint8", "float32")
    attempt(gp.InvalidProblem, wide.reshape(2, -1), "uint8")
    attempt(gp.InvalidProblem, wide[::2], "uint8")
    attempt(gp.InvalidProblem, [0] * size, "uint8", "list")
    attempt(gp.InvalidProblem, torch.zeros(size + 256, dtype=torch.uint8, device="meta"), "cpu")
    frozen = aligned(size + 256)
    frozen.flags.writeable = False
    attempt(gp.InvalidProblem, frozen, "read-only")


def test_a_workspace_whose_memory_ends_before_it_does_is_too_small():
    problem = case("softmax", (1, 3_000_000))
    size = problem.plan.workspace_size
    around = np.full(1024 + size, 7, np.uint8)
    start = -around.ctypes.data % 256
    buffer = (ctypes.c_uint8 * 16).from_buffer(around, start)
    tensor = torch.from_numpy(aligned(size))
    shrunk = torch.empty(size, dtype=torch.uint8)
    shrunk.untyped_storage().resize_(16)
    as_strided = np.lib.stride_tricks.as_strided
    for workspace, got in (
        (as_strided(np.frombuffer(buffer, np.uint8), (size,), (1,)), 16),
        (as_strided(aligned(16), (size,), (1,)), 272),
        (shrunk, 16),
    ):
        for run in (problem.plan.run, problem.plan.bind):
            with pytest.raises(gp.WorkspaceTooSmall) as caught:
                run(problem.args(), workspace=workspace)
            assert caught.value.got <= got < caught.value.needed
    assert (around == 7).all()
    # What only looks like it: a part of an array, and a tensor's memory.
    problem.run(workspace=as_strided(aligned(2 * size)[:16], (size,), (1,)))
    problem.run(workspace=tensor)


@pytest.mark.parametrize("kind", ["softmax", "cumprod", "embedding"])
def test_a_workspace_over_an_argument_is_invalid(kind):
    problem = case(kind)
    size = problem.plan.workspace_size
    for name, array in problem.arrays.items():
        whole = aligned(size + array.nbytes + 256)
        inside = whole[: array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        args = problem.args(**{name: inside})
        before = whole.tobytes(), contents(args)
        for run in (problem.plan.run, problem.plan.bind):
            with pytest.raises(gp.InvalidProblem) as caught:
                run(args, workspace=whole)
            assert f"workspace overlaps {name}" in str(caught.value)
            assert problem.me in str(caught.value)
        assert (whole.tobytes(), contents(args)) == before


def test_a_workspace_may_be_a_torch_tensor():
    problem = case("cumprod", with_y=False)
    size = problem.plan.workspace_size
    whole = torch.full((size + 256,), 255, dtype=torch.uint8)
    start = -whole.data_ptr() % 256
    got = problem.run(workspace=whole[start : start + size])
    assert_same_bits(got, problem.run())


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_writes_into_tensors_are_counted(kind):
    problem = case(kind)
    tensors = {name: torch.from_numpy(array) for name, array in problem.arrays.items()}

    def versions():
        return {name: tensor._version for name, tensor in tensors.items()}

    def counted(number):
        return {name: number if name in problem.outputs else 0 for name in tensors}

    args = problem.args(**tensors)
    problem.plan.validate(args)
    launch = problem.plan.bind(args)
    assert versions() == counted(0)
    for number, run in enumerate((launch, launch, lambda: problem.plan.run(args)), 1):
        run()
        assert versions() == counted(number)

    class Mine(problem.plan._args_type):
        """Arguments of a type that is not remembered."""

    problem.plan.run(Mine(**tensors))
    assert versions() == counted(4)


def test_tensors_without_a_count_are_written_to():
    problem = case("softmax")
    with torch.inference_mode():
        dx = torch.zeros(4, 6)
    args = problem.args(dx=dx)
    problem.plan.run(args)
    problem.plan.bind(args)()
    with torch.inference_mode():
        problem.plan.run(args)
    assert_same_bits({"dx": dx.numpy()}, problem.run())


def test_a_bound_launch_keeps_its_workspace():
    problem = case("cumprod", with_y=False)
    want = problem.run()
    workspace = aligned(problem.plan.workspace_size, 0xAA)
    alive = weakref.ref(workspace)
    launch = problem.plan.bind(problem.args(), workspace=workspace)
    del workspace
    gc.collect()
    assert alive() is not None
    launch()
    assert_same_bits({"dx": problem.arrays["dx"]}, want)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_bound_launch_runs_as_often_as_called_and_sees_new_contents(kind):
    more = {"accumulate": False} if kind == "embedding" else {}
    problem = case(kind, **more)
    launch = problem.plan.bind(problem.args())
    want = problem.run()
    for _ in range(3):
        launch()
    assert_same_bits({name: problem.arrays[name] for name in want}, want)
    source = problem.arrays["dout" if kind == "embedding" else "dy"]
    source *= -3
    want = problem.run()
    launch()
    assert_same_bits({name: problem.arrays[name] for name in want}, want)


@pytest.mark.parametrize("kind", ["softmax", "cumprod", "embedding"])
def test_a_bound_launch_keeps_its_arrays_alive(kind):
    shape = (300, 500)
    problem = case(kind, shape, **({"accumulate": False} if kind == "embedding" else {}))
    want = problem.run()
    out = problem.arrays[problem.outputs[0]]
    launch = problem.plan.bind(problem.args())
    others = [weakref.ref(a) for name, a in problem.arrays.items() if name not in want]
    problem.arrays.clear()
    gc.collect()
    # New arrays of the same size would land in the memory of any that was freed.
    filler = [np.full(shape, np.nan, np.float32) for _ in range(8)]
    assert all(other() is not None for other in others)
    launch()
    assert out.tobytes() == want["dweight" if kind == "embedding" else "dx"].tobytes()
    del launch, filler
    gc.collect()
    assert all(other() is None for other in others)


def test_bound_launches_of_torch_tensors_keep_them_alive():
    dy, y = torch.rand(300, 500), torch.rand(300, 500).softmax(-1)
    dx = torch.empty(300, 500)
    plan = select("softmax", (300, 500))
    launch = plan.bind(gp.SoftmaxBackwardArgs(dy=dy.clone(), y=y.clone(), dx=dx))
    gc.collect()
    filler = [torch.full((300, 500), float("nan")) for _ in range(8)]
    launch()
    assert len(filler) == 8
    torch.testing.assert_close(dx, torch._softmax_backward_data(dy, y, -1, torch.float32))


@pytest.mark.parametrize("kind", ["softmax", "embedding"])
def test_streams_are_ignored_on_the_cpu(kind):
    problem = case(kind, **({"accumulate": False} if kind == "embedding" else {}))
    want = problem.run()
    for stream in (None, 0, 1, object()):
        assert_same_bits(problem.run(stream=stream), want)
        for name in want:
            problem.arrays[name][...] = -1
        problem.plan.bind(problem.args())(stream=stream)
        assert_same_bits({name: problem.arrays[name] for name in want}, want)


def test_run_and_launch_return_nothing():
    problem = case("softmax")
    assert problem.plan.run(problem.args()) is None
    assert problem.plan.bind(problem.args())() is None


def test_one_plan_serves_eight_threads_at_once():
    plan = select("cumprod", (64, 700))
    problems = [case("cumprod", (64, 700), with_y=k % 2 == 0, seed=k) for k in range(8)]
    assert all(problem.plan is plan for problem in problems)
    wanted = [problem.run()["dx"].tobytes() for problem in problems]
    failures = []
    start = threading.Barrier(8)

    def work(problem, want):
        start.wait()
        failures.extend(k for k in range(30) if problem.run()["dx"].tobytes() != want)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(problems, wanted, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("shape", [(4, 0), (0, 6), (0, 0)])
def test_a_problem_without_elements_writes_nothing(kind, shape):
    plan = select(kind, shape)
    arrays = {op.name: np.ones(op.shape, np.float32) for op in plan.descriptor.operands}
    if kind == "embedding":
        arrays["indices"] = np.zeros(shape[0], np.int64)
    args = plan._args_type(**arrays)
    before = contents(args)
    plan.run(args)
    plan.bind(args)()
    assert contents(args) == before
    assert "no elements" in plan.explain()
    assert plan.sku.op == kind


def test_an_embedding_without_indices_still_zeroes_what_it_overwrites():
    plan = select("embedding", (0, 3), accumulate=False)
    table = np.full((5, 3), np.nan, np.float32)
    args = gp.EmbeddingBackwardArgs(
        dout=np.zeros((0, 3), np.float32), indices=np.zeros(0, np.int64), dweight=table
    )
    plan.run(args)
    assert (table == 0).all()


@pytest.mark.parametrize("kind", ["softmax", "cumsum", "max", "lerp"])
def test_results_do_not_depend_on_the_layout_beyond_the_guarantee(kind):
    for layout, (shape, axis) in itertools.product(
        ("c", "fortran", "reversed", "strided"), (((5, 7), 1), ((5, 7), 0))
    ):
        problem = case(kind, shape, axis, layout=layout)
        assert problem.error(problem.run()) <= problem.plan.precision_guarantee.relative_error


@pytest.mark.parametrize("kind", ["softmax", "cumsum", "lerp"])
def test_a_call_like_an_earlier_one_is_checked_too(kind):
    """Layouts that were found good before say nothing about addresses or access."""
    problem = case(kind)
    problem.plan.run(problem.args())
    out = problem.outputs[0]
    locked = problem.arrays[out].copy()
    locked.flags.writeable = False
    refused(problem, gp.InvalidProblem, out, "read-only", **{out: locked})
    whole = np.zeros((5, 6), np.float32)
    refused(problem, gp.InvalidProblem, out, "dy", "overlaps", dy=whole[:4], **{out: whole[1:]})
    problem.plan.run(problem.args())
