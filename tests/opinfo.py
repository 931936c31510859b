"""PyTorch's own samples of the operators that `gradplan.torch` covers."""

from __future__ import annotations

import sys
import unittest
from functools import cache
from types import ModuleType

import torch

import gradplan.torch as gt

# (name, variant) in PyTorch's list: ours, the kind whose gradient runs (None: torch's own).
COVERED = {
    ("softmax", ""): (gt.softmax, "softmax"),
    ("softmax", "with_dtype"): (gt.softmax, "softmax"),
    ("log_softmax", ""): (gt.log_softmax, "log_softmax"),
    ("log_softmax", "with_dtype"): (gt.log_softmax, "log_softmax"),
    ("lerp", ""): (gt.lerp, "lerp"),
    ("cumsum", ""): (gt.cumsum, "cumsum"),
    ("cumprod", ""): (gt.cumprod, "cumprod"),
    ("cummax", ""): (gt.cummax, "cummax"),
    ("cummin", ""): (gt.cummin, "cummin"),
    ("logcumsumexp", ""): (gt.logcumsumexp, "log_cumsum_exp"),
    ("sum", ""): (gt.sum, None),
    ("mean", ""): (gt.mean, "mean"),
    ("amax", ""): (gt.amax, "max"),
    ("amin", ""): (gt.amin, "min"),
    ("max", "reduction_no_dim"): (gt.max, "max"),
    ("max", "reduction_with_dim"): (gt.max, None),
    ("max", "binary"): (gt.max, None),
    ("min", "reduction_no_dim"): (gt.min, "min"),
    ("min", "reduction_with_dim"): (gt.min, None),
    ("min", "binary"): (gt.min, None),
    ("prod", ""): (gt.prod, "prod"),
    ("linalg.vector_norm", ""): (gt.linalg.vector_norm, "norm2"),
    ("linalg.norm", ""): (gt.linalg.norm, "norm2"),
    ("linalg.norm", "subgradients_at_zero"): (gt.linalg.norm, "norm2"),
    ("norm", ""): (gt.norm, "norm2"),
    ("norm", "fro"): (gt.norm, "norm2"),
    ("norm", "nuc"): (gt.norm, None),
    ("norm", "inf"): (gt.norm, None),
    ("logsumexp", ""): (gt.logsumexp, "log_sum_exp"),
    ("var", ""): (gt.var, "var"),
    ("var", "unbiased"): (gt.var, "var"),
    ("std", ""): (gt.std, "std"),
    ("std", "unbiased"): (gt.std, "std"),
    ("var_mean", ""): (gt.var_mean, "var"),
    ("var_mean", "unbiased"): (gt.var_mean, "var"),
    ("std_mean", ""): (gt.std_mean, "std"),
    ("std_mean", "unbiased"): (gt.std_mean, "std"),
    ("nn.functional.embedding", ""): (
        lambda weight, indices, **options: gt.embedding(indices, weight, **options),
        "embedding",
    ),
}


@cache
def op_db():
    """{(name, variant): OpInfo}; imported late, because it takes seconds."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            # PyTorch's test utilities derive a class from one of its; the samples need none.
            stand_in = ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return {(op.name, op.variant_test_name): op for op in op_db}


def outputs(result):
    """The results that may have a gradient."""
    made = result if isinstance(result, tuple) else (result,)
    return [one for one in made if one.is_floating_point() or one.is_complex()]


def leaves(args):
    return [one for one in args if isinstance(one, torch.Tensor) and one.requires_grad]
