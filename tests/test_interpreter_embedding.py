"""Embeddings in Triton's interpreter: the sort, its marks and votes, and the order of the sums."""

from __future__ import annotations

import numpy as np
import pytest

import gradplan as gp
from covering import spec_of
from gradplan import cases
from gradplan.backends.gpu import programs, table
from gradplan.cases import Case, Data, Layout
from gradplan.kinds import ElementKind
from gradplan.registry import ELEMENTS
from interpreting import MARKS, TRITON, check, outcome_of

pytest.importorskip("triton")

pytestmark = MARKS


@pytest.mark.parametrize(
    ("count", "rows", "index", "accumulate"),
    [
        (7, 1, "i32", True),  # no digit to sort by
        (31, 3, "i64", False),  # one short of a block
        (32, 4, "i32", True),  # a block; the skipped rows' number needs one bit more
        (33, 63, "i64", True),  # a second block of one word
        (300, 64, "i64", False),  # the counts of all blocks are more than are summed at a time
        (300, 1, "i32", False),  # one row alone: every stretch but the skipped
        (90, 300, "i64", False),  # nearly every row is empty
    ],
)
def test_indices_of_any_number_are_sorted(count, rows, index, accumulate):
    for data in (Data.RANDOM, Data.TIES):
        desc = cases.describe(
            spec_of("embedding"),
            ElementKind.F32,
            (count, 3, rows),
            (),
            index=index,
            accumulate=accumulate,
        )
        check([Case(desc=desc, data=data, seed=count)])


def told(element, count, dim=11, rows=7, **options):
    return cases.describe(spec_of("embedding"), element, (count, dim, rows), (), **options)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize("element", ELEMENTS)
def test_few_indices_are_summed_in_one_launch(element, count):
    """More columns than a program sums or zeroes, positions than are read at a time, and rows than
    are zeroed at a time, in every layout; options take turns."""
    few = gp.PlanPreference(backend="triton", max_workspace_bytes=0)
    asked = cases.options_of(spec_of("embedding"), element)
    for k, layout in enumerate(Layout, count):
        if layout is Layout.IN_PLACE:
            continue
        fields, _ = asked[k % len(asked)]
        dim, rows = ((11, 7), (70, 40))[k % 2]
        desc = told(element, count, dim, rows, **fields)
        for data in (Data.RANDOM, Data.TIES, Data.NAN_IN_DY):
            problem = cases.Problem(Case(desc=desc, layout=layout, data=data, seed=k))
            launch_it = problem.plan("cpu", few).bind(problem.args())
            assert (launch_it.sku.variant, launch_it.workspace_size) == ("few", 0)
            assert not outcome_of(problem, launch_it)


@pytest.mark.parametrize(
    ("count", "dim", "rows", "accumulate", "variant"),
    [
        (128, 768, 50304, False, "few"),
        (129, 768, 50304, False, "sorted"),  # comparing would take longer than zeroing
        (512, 768, 50304, True, "few"),  # nothing is zeroed
        (513, 768, 50304, True, "sorted"),
        (512, 16, 10_000_000, False, "sorted"),
        (32, 64, 10_000_000, False, "few"),
        (512, 4096, 8192, True, "sorted"),  # all of them read all indices
        (128, 4096, 8192, True, "few"),
        (300, 8, 8, False, "few"),
    ],
)
def test_indices_are_few_where_comparing_costs_little(count, dim, rows, accumulate, variant):
    desc = told(ElementKind.BF16, count, dim, rows, accumulate=accumulate)
    strides = {"dout": (dim, 1), "indices": (1,), "dweight": (dim, 1)}
    made = programs.choose(desc, strides, table.table_of("sm_90"), (count,))
    assert made.variant == variant
    assert made.workspace_bytes <= programs.workspace_bound(desc, table.table_of("sm_90"))


@pytest.mark.parametrize("by_count", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_few_indices_leave_the_bits_of_many(accumulate, by_count):
    """The same rows behind others that name nothing: sorted, and not sorted."""
    rng = np.random.default_rng(3)
    for turn in range(6):
        indices = rng.choice([-1, 0, 2, 2, 5, 9, 1 << 40], 6).reshape(2, 3)
        dout = rng.standard_normal((2, 3, 5)).astype(np.float32)
        if turn == 0:
            indices[...] = [[-1, 0, 2], [2, 5, 9]]
            dout[...] = -0.0
        tables = rng.standard_normal((2, 9, 5)).astype(np.float32)
        tables[1] = tables[0]
        options = {"scale_grad_by_freq": by_count, "preference": TRITON, "accumulate": accumulate}
        gp.embedding_backward(dout, indices, 9, out=tables[0], **options)
        skipped = np.full((40, 3), -1)
        more = np.concatenate([np.full((40, 3, 5), np.nan, np.float32), dout])
        indices = np.concatenate([skipped, indices])
        gp.embedding_backward(more, indices, 9, out=tables[1], **options)
        np.testing.assert_array_equal(tables[0].view("u4"), tables[1].view("u4"))


@pytest.mark.parametrize("position", [0, 39, 40, -1, 1 << 40])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("count", [40, 160], ids=["marked once", "in copies"])
def test_marks_that_others_left_name_no_row(position, padding, count):
    """Whatever the workspace holds where rows are marked, be it the position of an index."""
    rng = np.random.default_rng(5)
    indices = rng.choice([0, 3, 4, 9, -2, 12], count)
    indices[[0, 39]] = 3, 9
    dout = rng.standard_normal((count, 5)).astype(np.float32)
    table = np.full((12, 5), np.nan, np.float32)
    desc = gp.EmbeddingBackwardDescriptor(
        num_embeddings=12, embedding_dim=5, num_indices=count, element=ElementKind.F32,
        padding_idx=padding, accumulate=False,
    )  # fmt: skip
    plan = gp.EmbeddingBackwardPlan.select(desc, device="cpu", preference=TRITON)
    memory = np.full(plan.workspace_size // 8 + 64, position, np.int64)
    workspace = memory[-memory.ctypes.data % 256 // 8 :]
    args = gp.EmbeddingBackwardArgs(dout=dout, indices=indices, dweight=table)
    plan.run(args, workspace=workspace.view(np.uint8))
    exact = np.zeros((12, 5))
    for index, row in zip(indices, dout, strict=True):
        if 0 <= index < 12 and index != padding:
            exact[index] += row
    np.testing.assert_allclose(table, exact, rtol=1e-6, atol=1e-6)
    named = np.isin(np.arange(12), indices[indices != padding])
    assert not table[~named].any()


@pytest.mark.parametrize("each", [1, 4, 8])
@pytest.mark.parametrize("bits", [1, 5, 8, 9])
def test_votes_tell_how_many_of_a_digit_come_before(bits, each):
    """The assembly of a warp, which the interpreter does without, read line by line."""
    from gradplan.backends.gpu.kernels import moves

    rng = np.random.default_rng(bits)
    digits = rng.integers(0, min(1 << bits, 40), 32 * each)
    digits[: 8 * each] = (1 << bits) - 1
    lanes = np.arange(32, dtype=np.uint64)
    known = {f"${each + j}": digits[32 * j : 32 * j + 32].astype(np.uint32) for j in range(each)}
    known["%lanemask_lt"] = ((np.uint64(1) << lanes) - np.uint64(1)).astype(np.uint32)
    assert moves.ranked.fn(each).count("r") == 2 * each

    def value(name):
        return known[name] if name in known else np.uint32(int(name, 0) & 0xFFFFFFFF)

    for line in moves.ranking.fn(bits, each).strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        goal, *words = (word.strip() for word in rest.split(","))
        a = [value(word) for word in words]
        known[goal] = {
            "mov.u32": lambda a: a[0] + np.zeros(32, np.uint32),
            "mov.b32": lambda a: a[0] + np.zeros(32, np.uint32),
            "and.b32": lambda a: a[0] & a[1],
            "add.u32": lambda a: a[0] + a[1],
            "setp.ne.u32": lambda a: a[0] != a[1],
            "vote.sync.ballot.b32": lambda a: np.full(
                32, sum(1 << int(k) for k in np.flatnonzero(a[0])), np.uint32
            ),
            "bfe.s32": lambda a: -((a[0] >> a[1]) & 1).astype(np.int32).view(np.uint32),
            "lop3.b32": lambda a: a[0] & ~(a[1] ^ a[2]),
            "popc.b32": lambda a: np.array([int(one).bit_count() for one in a[0]], np.uint32),
        }[name](a)
        assert name != "lop3.b32" or words[3] == "0x90"
    found = np.concatenate([known[f"${j}"] for j in range(each)])
    before = [int((digits[:k] == digits[k]).sum()) for k in range(len(digits))]
    np.testing.assert_array_equal(found, before)


def test_the_order_of_equal_indices_is_kept():
    """Sums are taken in one order: the bits do not depend on what else is in the table."""
    rng = np.random.default_rng(0)
    dout = (rng.normal(size=(150, 4)) * 10.0 ** rng.integers(-6, 6, (150, 1))).astype(np.float32)
    indices = rng.integers(0, 3, 150)
    got = gp.embedding_backward(dout, indices, 3, preference=TRITON)
    again = gp.embedding_backward(dout, indices + 17, 40, preference=TRITON)
    np.testing.assert_array_equal(got.view("u4"), again[17:20].view("u4"))
    assert not np.delete(again, [17, 18, 19], axis=0).any()
