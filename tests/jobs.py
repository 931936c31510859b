"""Problems for each engine and each way to cut it, on torch tensors, to test launches on."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradplan as gp
from conftest import CUDA
from covering import spec_of
from gradplan import cases
from gradplan.cases import Case
from gradplan.kinds import ElementKind

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

gpu = pytest.mark.gpu

PLACES = [
    pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(CUDA, reason="compiles here")),
    pytest.param("cuda", id="cuda", marks=gpu),
]

# One problem for each engine and for each way to cut it: (kind, shape on a GPU, shape in the
# interpreter, element, arrays left out, options). They are named for their variants, which a test
# asserts, so that a change of thresholds cannot empty the others.
JOBS = {
    "map": ("norm2", (512, 300), (4, 30), "f32", (), {}),
    "resident": ("var", (512, 300), (6, 9), "bf16", (), {}),
    "cluster": ("softmax", (600, 20_000), (2, 140), "f32", (), {}),
    "held": ("softmax", (150, 300_000), (2, 300), "f16", (), {}),
    "held_product": ("prod", (4, 200_000), (2, 140), "f32", ("y",), {}),
    "lagged": ("softmax", (150, 300_000), (2, 300), "f64", (), {}),
    "lagged_product": ("prod", (4, 100_000), (2, 140), "f64", ("y",), {}),
    "lagged_far": ("softmax", (3, 3_000_000), (1, 1100), "f16", (), {}),
    "tall": ("max", (1, 65_536, 100), (1, 2200, 3), "bf16", (), {}),
    "tall_doubles": ("min", (1, 6000, 680), (1, 2200, 3), "f64", (), {}),
    "tall_sums": ("softmax", (2, 65_536, 100), (1, 2200, 3), "f32", (), {}),
    "tall_product": ("prod", (2, 65_536, 100), (1, 2200, 3), "bf16", ("y",), {}),
    "scan_chained": ("cumsum", (3, 300_000), (2, 140), "f32", (), {}),
    "log_chained": ("log_cumsum_exp", (3, 300_000), (2, 140), "f32", (), {}),
    "chained_product": ("cumprod", (100, 40_000), (4, 140), "bf16", (), {}),
    "chained_far": ("cummax", (2, 3_000_000), (1, 1100), "f64", (), {}),
    "resident_marks": ("cummax", (300, 400), (4, 20), "f32", ("y",), {}),
    "tiled_marks": ("cummax", (300, 8192), (4, 140), "bf16", ("y",), {}),
    "chained_marks": ("cummin", (3, 300_000), (2, 140), "f64", ("y",), {}),
    "walked": ("cumsum", (264, 20_000), (4, 140), "bf16", (), {}),
    "walked_product": ("cumprod", (528, 20_000), (4, 140), "f32", (), {}),
    "walked_marks": ("cummax", (264, 20_000), (4, 140), "f16", ("y",), {}),
    "walked_anywhere": ("cumsum", (264, 20_001), (4, 140), "bf16", (), {}),
    "walked_logs_anywhere": ("log_cumsum_exp", (300, 9001), (4, 140), "f16", (), {}),
    "walked_marks_anywhere": ("cummin", (300, 9001), (4, 140), "f32", ("y",), {}),
    "held_scan": ("cumsum", (3, 1_200_000), (2, 140), "f32", (), {}),
    "held_scan_product": ("cumprod", (1, 4_200_000), (2, 140), "bf16", (), {}),
    "log_held": ("log_cumsum_exp", (3, 1_200_000), (2, 140), "f32", (), {}),
    "held_marks": ("cummin", (3, 300_000), (2, 140), "bf16", ("y",), {}),
    "scan_resident": ("cummax", (300, 400), (4, 20), "f32", (), {}),
    "scan_tiled": ("cummax", (300, 8192), (4, 140), "f32", (), {}),
    "scan_split": ("cumprod", (3, 60_000), (2, 140), "f32", ("y",), {}),
    "log_split": ("log_cumsum_exp", (2, 40_000), (2, 140), "f32", ("y",), {}),
    "log_tiled": ("log_cumsum_exp", (600, 9000), (4, 140), "f32", ("y",), {}),
    "scan_halves": ("cumsum", (300, 8192), (3, 140), "bf16", (), {}),
    "scan_split_uneven": ("cummin", (2, 32_768, 100), (1, 64, 3), "f32", (), {}),
    "embedding": ("embedding", (20_000, 96, 300), (90, 5, 9), "f32", (), {"accumulate": False}),
    "few": ("embedding", (300, 300, 1000), (5, 11, 9), "bf16", (), {"accumulate": False}),
}
WITH_WORKSPACE = (
    "held",
    "held_product",
    "lagged",
    "lagged_product",
    "lagged_far",
    "tall",
    "tall_doubles",
    "tall_sums",
    "tall_product",
    "scan_chained",
    "log_chained",
    "chained_product",
    "chained_far",
    "resident_marks",
    "tiled_marks",
    "chained_marks",
    "walked_product",
    "walked_marks",
    "walked_marks_anywhere",
    "held_scan",
    "held_scan_product",
    "log_held",
    "held_marks",
    "scan_split",
    "log_split",
    "log_tiled",
    "scan_split_uneven",
    "embedding",
)

jobs = pytest.mark.parametrize("name", list(JOBS))
places = pytest.mark.parametrize("place", PLACES)


def to_torch(array, device):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_numpy(tensor, dtype):
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


class Job:
    """A problem on torch tensors, whose contents can be replaced by those of another seed."""

    def __init__(self, name, place):
        kind, large, small, element, self.without, options = JOBS[name]
        spec = spec_of(kind)
        shape = small if place == "cpu" else large
        self.desc = cases.describe(spec, ElementKind(element), shape, (1,), **options)
        self.device = place
        self.preference = gp.PlanPreference(backend="triton")
        self.problem = self.problem_of(0)
        self.tensors = {}
        for operand in self.desc.operands:
            if operand.name in self.problem.arrays:
                array = self.problem.arrays[operand.name]
                self.tensors[operand.name] = to_torch(array, place).clone()
        self.outputs = [
            op.name for op in self.desc.operands if op.output and op.name in self.tensors
        ]
        self.plan = self.problem.plan(place, self.preference)

    def problem_of(self, seed):
        return cases.Problem(Case(desc=self.desc, without=self.without, seed=seed))

    def args(self):
        return type(self.problem.args())(**self.tensors)

    def staged(self, seed):
        """The contents of another seed, on the device; outputs are poisoned."""
        self.problem = self.problem_of(seed)
        return {name: to_torch(a, self.device) for name, a in self.problem.arrays.items()}

    def load(self, staged):
        """Replace the contents, on the current stream."""
        for name, tensor in staged.items():
            self.tensors[name].copy_(tensor)

    def fill(self, seed):
        self.load(self.staged(seed))

    def bits(self):
        return {name: self.tensors[name].view(torch.uint8).clone() for name in self.outputs}

    def check(self):
        """Hold what the outputs hold now to the guarantee, for the contents loaded last."""
        for name in self.outputs:
            array = self.problem.arrays[name]
            array[...] = to_numpy(self.tensors[name], array.dtype)
        outcome = self.problem.outcome(self.plan.precision_guarantee.relative_error)
        assert outcome.ok, str(outcome)


def workspace_for(plan, device, extra=0):
    """A caller's workspace, aligned as it must be, full of ones."""
    memory = torch.full((plan.workspace_size + extra + 512,), 255, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256
    return memory[start : start + plan.workspace_size + extra]


def named_for(name):
    """How the variant begins that a job is named for."""
    if name in ("embedding", "scan_halves"):
        return "sorted" if name == "embedding" else "tiled"
    return re.sub(
        "^(scan|log)_|(_scan)?(_product|_far|_marks|_logs|_scan|_sums|_doubles)?(_anywhere|_uneven)?$",
        "",
        name,
    )


def busy(seconds=0.2):
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(seconds * 1.5e9))
