"""Descriptors: equal problems compare equal, and what is wrong in itself is refused at once."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

import gradplan as gp

SOFTMAX = gp.SoftmaxBackwardDescriptor
BINARY = gp.BinaryParamBackwardDescriptor
SCAN = gp.ScanBackwardDescriptor
REDUCE = gp.ReduceBackwardDescriptor
EMBEDDING = gp.EmbeddingBackwardDescriptor

PLAIN = {
    SOFTMAX: {
        "kind": gp.SoftmaxKind.SOFTMAX,
        "input_shape": (2, 3, 4),
        "softmax_axis": 2,
        "element": gp.ElementKind.F32,
    },
    BINARY: {
        "kind": gp.BinaryKind.LERP,
        "shape": (2, 3),
        "element": gp.ElementKind.F32,
        "param": 0.25,
    },
    SCAN: {
        "kind": gp.ScanKind.CUMSUM,
        "input_shape": (2, 3, 4),
        "scan_axis": 2,
        "element": gp.ElementKind.F32,
    },
    REDUCE: {
        "kind": gp.ReduceKind.SUM,
        "input_shape": (2, 3, 4),
        "reduce_axis": (0, 2),
        "element": gp.ElementKind.F32,
    },
    EMBEDDING: {
        "num_embeddings": 7,
        "embedding_dim": 3,
        "num_indices": 5,
        "element": gp.ElementKind.F32,
    },
}
FAMILIES = pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.__name__)


def make(family, **changes):
    return family(**{**PLAIN[family], **changes})


def same(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


@FAMILIES
def test_descriptors_are_frozen_and_keyword_only(family):
    desc = make(family)
    for field in dataclasses.fields(desc):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(desc, field.name, getattr(desc, field.name))
    with pytest.raises(TypeError):
        family(*PLAIN[family].values())
    for name in PLAIN[family]:
        with pytest.raises(TypeError, match=name):
            family(**{k: v for k, v in PLAIN[family].items() if k != name})


@FAMILIES
def test_descriptors_survive_copies_and_pickles(family):
    desc = make(family)
    same(copy.deepcopy(desc), desc)
    same(pickle.loads(pickle.dumps(desc)), desc)
    same(dataclasses.replace(desc), desc)


@FAMILIES
def test_a_descriptor_used_as_a_key_keeps_its_hash(family):
    # Cached properties fill the instance on first use; equality must not see them.
    desc = make(family)
    before = hash(desc)
    assert desc.operands
    assert desc.spec
    assert hash(desc) == before
    same(desc, make(family))


@pytest.mark.parametrize(
    ("family", "given", "means"),
    [
        (SOFTMAX, {"softmax_axis": -1}, {"softmax_axis": 2}),
        (SOFTMAX, {"softmax_axis": -3}, {"softmax_axis": 0}),
        (SOFTMAX, {"input_shape": [2, 3, 4]}, {"input_shape": (2, 3, 4)}),
        (SOFTMAX, {"input_shape": torch.Size((2, 3, 4))}, {"input_shape": (2, 3, 4)}),
        (SOFTMAX, {"input_shape": np.array([2, 3, 4])}, {"input_shape": (2, 3, 4)}),
        (SOFTMAX, {"softmax_axis": np.int64(1)}, {"softmax_axis": 1}),
        (SOFTMAX, {"kind": "log_softmax"}, {"kind": gp.SoftmaxKind.LOG_SOFTMAX}),
        (SOFTMAX, {"element": "bf16"}, {"element": gp.ElementKind.BF16}),
        (SOFTMAX, {"element": np.float64}, {"element": gp.ElementKind.F64}),
        (SOFTMAX, {"element": np.dtype("f2")}, {"element": gp.ElementKind.F16}),
        (SOFTMAX, {"element": ml_dtypes.bfloat16}, {"element": gp.ElementKind.BF16}),
        (SOFTMAX, {"element": torch.bfloat16}, {"element": gp.ElementKind.BF16}),
        (BINARY, {"shape": [2, 3]}, {"shape": (2, 3)}),
        (BINARY, {"param": 1}, {"param": 1.0}),
        (BINARY, {"param": np.float32(0.5)}, {"param": 0.5}),
        (BINARY, {"param": torch.tensor(0.5)}, {"param": 0.5}),
        (BINARY, {"kind": "lerp"}, {"kind": gp.BinaryKind.LERP}),
        (SCAN, {"scan_axis": -2}, {"scan_axis": 1}),
        (SCAN, {"kind": "log_cumsum_exp"}, {"kind": gp.ScanKind.LOG_CUMSUM_EXP}),
        (SCAN, {"kind": "cummax", "ties": "last"}, {"kind": "cummax", "ties": gp.TieRule.LAST}),
        (SCAN, {"reverse": 1}, {"reverse": True}),
        (REDUCE, {"reduce_axis": -1}, {"reduce_axis": (2,)}),
        (REDUCE, {"reduce_axis": 1}, {"reduce_axis": (1,)}),
        (REDUCE, {"reduce_axis": [2, 0]}, {"reduce_axis": (0, 2)}),
        (REDUCE, {"reduce_axis": (-1, -3)}, {"reduce_axis": (0, 2)}),
        (REDUCE, {"reduce_axis": range(2)}, {"reduce_axis": (0, 1)}),
        (REDUCE, {"reduce_axis": np.array([2, 0])}, {"reduce_axis": (0, 2)}),
        (REDUCE, {"reduce_axis": np.array(1)}, {"reduce_axis": (1,)}),
        (REDUCE, {"reduce_axis": torch.tensor(1)}, {"reduce_axis": (1,)}),
        (REDUCE, {"kind": "norm2"}, {"kind": gp.ReduceKind.NORM2}),
        (REDUCE, {"kind": "max", "ties": "all"}, {"kind": "max", "ties": gp.TieRule.ALL}),
        (REDUCE, {"kind": "var", "correction": 0.0}, {"kind": "var", "correction": 0}),
        (EMBEDDING, {"index": "i32"}, {"index": gp.IndexKind.I32}),
        (EMBEDDING, {"index": np.int32}, {"index": gp.IndexKind.I32}),
        (EMBEDDING, {"index": torch.int32}, {"index": gp.IndexKind.I32}),
        (EMBEDDING, {"num_indices": np.int32(5)}, {"num_indices": 5}),
        (EMBEDDING, {"padding_idx": np.int64(2)}, {"padding_idx": 2}),
    ],
)
def test_spellings_of_one_problem_are_equal(family, given, means):
    same(make(family, **given), make(family, **means))
    assert type(make(family, **given)) is family


@pytest.mark.parametrize("kind", [k for k in gp.ScanKind if k not in ("cummax", "cummin")])
def test_scans_without_ties_ignore_the_tie_rule(kind):
    for ties in (*gp.TieRule, "middle", None):
        same(make(SCAN, kind=kind, ties=ties), make(SCAN, kind=kind))


@pytest.mark.parametrize("kind", gp.ReduceKind)
def test_reductions_ignore_the_fields_of_others(kind):
    if kind not in ("max", "min"):
        for ties in (*gp.TieRule, "middle", None):
            same(make(REDUCE, kind=kind, ties=ties), make(REDUCE, kind=kind))
    if kind not in ("var", "std"):
        for correction in (0, float("nan"), 10**400, "one", None):
            same(make(REDUCE, kind=kind, correction=correction), make(REDUCE, kind=kind))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (SOFTMAX, {"kind": "log_softmax"}),
        (SOFTMAX, {"softmax_axis": 0}),
        (SOFTMAX, {"input_shape": (2, 3, 5)}),
        (SOFTMAX, {"element": "f64"}),
        (BINARY, {"param": 0.5}),
        (SCAN, {"reverse": True}),
        (SCAN, {"kind": "cumprod"}),
        (REDUCE, {"reduce_axis": ()}),
        (REDUCE, {"kind": "mean"}),
        (EMBEDDING, {"padding_idx": 0}),
        (EMBEDDING, {"accumulate": False}),
        (EMBEDDING, {"scale_grad_by_freq": True}),
        (EMBEDDING, {"index": "i32"}),
    ],
)
def test_different_problems_differ(family, changes):
    assert make(family, **changes) != make(family)


def test_used_fields_tell_problems_apart():
    assert make(SCAN, kind="cummax", ties="last") != make(SCAN, kind="cummax")
    assert make(REDUCE, kind="max", ties="all") != make(REDUCE, kind="max")
    assert make(REDUCE, kind="std", correction=0) != make(REDUCE, kind="std")


def test_defaults_are_those_of_the_contract():
    scan = make(SCAN, kind="cummax")
    assert scan.reverse is False
    assert scan.ties is gp.TieRule.FIRST
    reduction = make(REDUCE, kind="max")
    assert reduction.ties is gp.TieRule.SPLIT
    assert make(REDUCE, kind="var").correction == 1
    table = make(EMBEDDING)
    assert table.index is gp.IndexKind.I64
    assert table.padding_idx is None
    assert table.accumulate is True
    assert table.scale_grad_by_freq is False


def test_param_is_kept_in_double():
    assert make(BINARY, param=0.1, element="f16").param == 0.1
    assert type(make(BINARY, param=1, element="f16").param) is float


def test_a_weight_of_nan_is_one_problem():
    first = make(BINARY, param=float("nan"))
    for other in (
        make(BINARY, param=-np.float32("nan")),
        pickle.loads(pickle.dumps(first)),
        copy.deepcopy(first),
    ):
        same(first, other)
        assert gp.BinaryParamBackwardPlan.select(first) is gp.BinaryParamBackwardPlan.select(other)
    assert first != make(BINARY)
    assert first != make(BINARY, param=float("nan"), element="f64")
    assert first != "a descriptor"


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (0, (1, 3, 4)),
        ((0, 2), (1, 3, 1)),
        ((2, 0), (1, 3, 1)),
        (-2, (2, 1, 4)),
        ((), (2, 3, 4)),
        ((0, 1, 2), (1, 1, 1)),
        (None, (1, 1, 1)),
    ],
)
def test_dy_shape_is_the_keepdim_form(axis, expected):
    assert make(REDUCE, reduce_axis=axis).dy_shape == expected


def test_empty_extents_are_problems_too():
    assert make(SOFTMAX, input_shape=(0, 3, 4)).input_shape == (0, 3, 4)
    assert make(REDUCE, input_shape=(2, 0, 4), reduce_axis=1).dy_shape == (2, 1, 4)
    assert make(EMBEDDING, num_indices=0, num_embeddings=0, embedding_dim=0).num_indices == 0


BAD_SHAPES = [(), (2, -1), (2, 3.5), (2, None), 6, "23", None, b"ab", ("a", 2)]
# Without an order that anybody chose, and of rank 0.
BAD_SHAPES += [bytearray(b"45"), {4, 5}, {4: 5}, np.array(4), torch.tensor(4)]


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=repr)
@pytest.mark.parametrize(
    ("family", "field"),
    [
        (SOFTMAX, "input_shape"),
        (BINARY, "shape"),
        (SCAN, "input_shape"),
        (REDUCE, "input_shape"),
    ],
    ids=["softmax", "binary", "scan", "reduce"],
)
def test_bad_shapes_are_refused_by_name(family, field, shape):
    with pytest.raises(gp.InvalidProblem) as caught:
        make(family, **{field: shape})
    assert family.__name__ in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("axis", [3, -4, 1.0, "1", None, (1,)], ids=repr)
@pytest.mark.parametrize(
    ("family", "field"), [(SOFTMAX, "softmax_axis"), (SCAN, "scan_axis")], ids=["softmax", "scan"]
)
def test_bad_axes_are_refused_by_name(family, field, axis):
    with pytest.raises(gp.InvalidProblem) as caught:
        make(family, **{field: axis})
    message = str(caught.value)
    assert family.__name__ in message
    assert field in message
    assert str(axis) in message


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (3, "3"),
        (-4, "-4"),
        ((0, 3), "3"),
        ((0, 0), "twice"),
        ((1, -2), "twice"),
        (1.5, "1.5"),
        (("0",), "0"),
        ("01", "reduce_axis"),
        ((0, None), "None"),
        ({0, 1}, "a sequence of integers, got {0, 1}"),
        ({0: 1}, "a sequence of integers"),
        (np.array([[0, 1]]), "a sequence of integers"),
        (np.array([0.0]), "0.0"),
        ((axis for axis in (0, 1)), "a sequence of integers"),
    ],
    ids=range(14),
)
def test_bad_reduced_axes_are_refused_by_name(axis, words):
    with pytest.raises(gp.InvalidProblem) as caught:
        make(REDUCE, reduce_axis=axis)
    message = str(caught.value)
    assert "ReduceBackwardDescriptor" in message
    assert "reduce_axis" in message
    assert words in message


@pytest.mark.parametrize(
    "correction",
    ["one", "1", None, float("nan"), float("inf"), [1], 10**400],
    ids=["text", "digits", "None", "nan", "inf", "list", "huge"],
)
def test_a_correction_that_is_no_number_is_refused(correction):
    with pytest.raises(gp.InvalidProblem, match="ReduceBackwardDescriptor: correction"):
        make(REDUCE, kind="var", correction=correction)


class Odd:
    """Whatever it is asked for fails in a way of its own."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __float__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "param",
    [
        *("half", "0.5", b"0.5", None, [0.5], 1j, 10**400, 10**5000),
        torch.tensor([0.5]),
        torch.empty((), device="meta"),
        torch.tensor(0.5, requires_grad=True),
        Odd(),
    ],
    ids=[
        *("text", "digits", "bytes", "None", "list", "complex", "huge", "unprintable"),
        *("rank 1", "without data", "requires grad", "odd"),
    ],
)
def test_a_param_that_is_no_number_is_refused(param):
    with pytest.raises(gp.InvalidProblem, match="BinaryParamBackwardDescriptor: param"):
        make(BINARY, param=param)


@pytest.mark.parametrize("flag", [np.array([1, 0]), torch.ones(2)], ids=["numpy", "torch"])
def test_a_flag_that_is_neither_true_nor_false_is_refused(flag):
    for make_it, field in (
        (lambda: make(SCAN, reverse=flag), "ScanBackwardDescriptor: reverse"),
        (lambda: make(EMBEDDING, accumulate=flag), "EmbeddingBackwardDescriptor: accumulate"),
        (lambda: make(EMBEDDING, scale_grad_by_freq=flag), "scale_grad_by_freq"),
        (lambda: gp.PlanPreference(deterministic=flag), "PlanPreference: deterministic"),
    ):
        with pytest.raises(gp.InvalidProblem, match=f"{field} must be True or False"):
            make_it()
    assert make(SCAN, reverse=flag[0]) == make(SCAN, reverse=True)


@pytest.mark.parametrize("padding", [-1, 7, 100, 2.0, "2"], ids=repr)
def test_a_padding_index_outside_the_table_is_refused(padding):
    with pytest.raises(gp.InvalidProblem) as caught:
        make(EMBEDDING, padding_idx=padding)
    assert "EmbeddingBackwardDescriptor" in str(caught.value)
    assert "padding_idx" in str(caught.value)
    with pytest.raises(gp.InvalidProblem):
        make(EMBEDDING, num_embeddings=0, padding_idx=0)


@pytest.mark.parametrize("field", ["num_embeddings", "embedding_dim", "num_indices"])
@pytest.mark.parametrize("count", [-1, 2.0, None, "2"], ids=repr)
def test_counts_that_are_none_are_refused(field, count):
    with pytest.raises(gp.InvalidProblem) as caught:
        make(EMBEDDING, **{field: count})
    assert "EmbeddingBackwardDescriptor" in str(caught.value)
    assert field in str(caught.value)


ENUMS = [
    gp.SoftmaxKind,
    gp.BinaryKind,
    gp.ScanKind,
    gp.ReduceKind,
    gp.ElementKind,
    gp.IndexKind,
    gp.TieRule,
    gp.BackendKind,
    gp.MathPrecision,
    gp.OpCategory,
]


@pytest.mark.parametrize("enum", ENUMS)
def test_enums_have_the_members_of_the_contract_under_lower_case_names(enum):
    members = {
        gp.SoftmaxKind: "SOFTMAX LOG_SOFTMAX",
        gp.BinaryKind: "LERP",
        gp.ScanKind: "CUMSUM CUMPROD CUMMAX CUMMIN LOG_CUMSUM_EXP",
        gp.ReduceKind: "SUM MEAN MAX MIN PROD NORM2 LOG_SUM_EXP VAR STD",
        gp.ElementKind: "F32 F16 BF16 F64",
        gp.IndexKind: "I32 I64",
        gp.TieRule: "SPLIT ALL FIRST LAST",
        gp.BackendKind: "NUMBA TRITON REFERENCE",
        gp.MathPrecision: "F32 F64",
        gp.OpCategory: "SOFTMAX BINARY_ELEMENTWISE SCAN REDUCTION EMBEDDING",
    }[enum]
    assert [member.name for member in enum] == members.split()
    for member in enum:
        assert member == member.name.lower()
        assert str(member) == member.name.lower()
        assert enum.coerce(member.name.lower()) is member
        assert enum.coerce(member) is member


@pytest.mark.parametrize(
    ("family", "given"),
    [
        (SOFTMAX, {"kind": "hardmax"}),
        (SOFTMAX, {"kind": gp.ScanKind.CUMSUM}),
        (BINARY, {"kind": "slerp"}),
        (SCAN, {"kind": "sum"}),
        (SCAN, {"kind": "cummax", "ties": "middle"}),
        (REDUCE, {"kind": None}),
        (REDUCE, {"kind": "max", "ties": 3}),
    ],
)
def test_unknown_kinds_are_refused_with_the_known_ones(family, given):
    field = "ties" if "ties" in given else "kind"
    with pytest.raises(gp.InvalidProblem, match=f"Descriptor: {field}: expected one of"):
        make(family, **given)


@pytest.mark.parametrize(
    "element",
    ["f8", "int32", None, 32, np.int32, torch.int64, np.dtype(">f4"), float, np.zeros(2)],
    ids=repr,
)
def test_an_element_outside_the_matrix_is_unsupported(element):
    with pytest.raises(gp.Unsupported, match="f32, f16, bf16, f64"):
        make(SOFTMAX, element=element)


@pytest.mark.parametrize("index", ["i16", "f32", None, np.int16, torch.float32], ids=repr)
def test_an_index_type_outside_the_matrix_is_unsupported(index):
    with pytest.raises(gp.Unsupported, match="i32, i64"):
        make(EMBEDDING, index=index)


@pytest.mark.parametrize(
    ("kind", "numpy_type", "torch_type"),
    [
        (gp.ElementKind.F32, np.float32, torch.float32),
        (gp.ElementKind.F16, np.float16, torch.float16),
        (gp.ElementKind.BF16, ml_dtypes.bfloat16, torch.bfloat16),
        (gp.ElementKind.F64, np.float64, torch.float64),
    ],
)
def test_element_kind_of_reads_arrays_and_dtypes(kind, numpy_type, torch_type):
    for x in (
        np.zeros((2, 3), numpy_type),
        np.zeros((), numpy_type),
        np.dtype(numpy_type),
        numpy_type,
        numpy_type(1),
        torch.zeros(2, 3, dtype=torch_type),
        torch_type,
        kind,
    ):
        assert gp.ElementKind.of(x) is kind


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(2, np.int32),
        np.complex64,
        torch.int64,
        torch.zeros(2, dtype=torch.complex64),
        np.dtype(">f4"),
        np.zeros(2, bool),
        "no dtype",
        None,
    ],
    ids=repr,
)
def test_element_kind_of_anything_else_is_unsupported(x):
    with pytest.raises(gp.Unsupported, match="float32, float16, bfloat16, float64"):
        gp.ElementKind.of(x)


@pytest.mark.parametrize("index", [np.int32, torch.int64, np.zeros(1, np.int64), np.dtype("i4")])
def test_index_kind_of_reads_arrays_and_dtypes(index):
    assert gp.IndexKind.of(index) in (gp.IndexKind.I32, gp.IndexKind.I64)
    assert gp.IndexKind.of(np.int32) is gp.IndexKind.I32
    assert gp.IndexKind.of(np.longlong) is gp.IndexKind.I64  # whose own name is another
    with pytest.raises(gp.Unsupported, match=r"int64; got int16$"):
        gp.IndexKind.of(np.int16)
    for other in (np.int32, np.floating, np.generic, np.longdouble):
        with pytest.raises(gp.Unsupported, match=rf"float64; got {other.__name__}$"):
            gp.ElementKind.of(other)
    with pytest.raises(gp.Unsupported, match=r"int64; got integer$"):
        gp.IndexKind.of(np.integer)


def test_errors_are_the_builtins_a_user_would_catch():
    assert issubclass(gp.InvalidProblem, ValueError)
    assert issubclass(gp.Unsupported, NotImplementedError)
    assert issubclass(gp.BufferTooSmall, ValueError)
    assert issubclass(gp.WorkspaceTooSmall, ValueError)
    assert issubclass(gp.MisalignedOperand, ValueError)
    assert issubclass(gp.KernelFailure, RuntimeError)
    for error in (
        gp.InvalidProblem,
        gp.Unsupported,
        gp.BufferTooSmall,
        gp.WorkspaceTooSmall,
        gp.MisalignedOperand,
        gp.KernelFailure,
    ):
        assert issubclass(error, gp.GradPlanError)


@pytest.mark.parametrize("error", [gp.BufferTooSmall, gp.WorkspaceTooSmall])
def test_sizes_travel_with_the_error(error):
    # Errors cross process borders, for one in multiprocessing pools.
    raised = pickle.loads(pickle.dumps(error(100, 60, "dy: too small")))
    assert (raised.needed, raised.got, str(raised)) == (100, 60, "dy: too small")
    assert "100" in str(error(100, 60))
    assert "60" in str(error(100, 60))


def test_a_kernel_failure_keeps_the_code_of_the_runtime():
    raised = pickle.loads(pickle.dumps(gp.KernelFailure(719, "unspecified launch failure")))
    assert (raised.code, str(raised)) == (719, "unspecified launch failure")
    assert "719" in str(gp.KernelFailure(719))
