"""gradplan: gradient kernels as plans.

Softmax and log-softmax, lerp, the scans, the reductions and embedding: each gradient comes as a
plain function (`softmax_backward`), and as a plan that tells its kernel, workspace and guarantee
before it runs. Arrays are read where they lie, and the bits are the same every time.
"""

from __future__ import annotations

from .args import (
    BinaryParamBackwardArgs,
    EmbeddingBackwardArgs,
    ReduceBackwardArgs,
    ScanBackwardArgs,
    SoftmaxBackwardArgs,
)
from .descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from .errors import (
    BufferTooSmall,
    GradPlanError,
    InvalidProblem,
    KernelFailure,
    MisalignedOperand,
    Unsupported,
    WorkspaceTooSmall,
)
from .functions import (
    cummax_backward,
    cummin_backward,
    cumprod_backward,
    cumsum_backward,
    embedding_backward,
    lerp_backward,
    log_softmax_backward,
    logcumsumexp_backward,
    logsumexp_backward,
    max_backward,
    mean_backward,
    min_backward,
    norm2_backward,
    prod_backward,
    softmax_backward,
    std_backward,
    sum_backward,
    var_backward,
)
from .kinds import (
    BackendKind,
    BinaryKind,
    ElementKind,
    IndexKind,
    MathPrecision,
    OpCategory,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
    TieRule,
)
from .plans import (
    BinaryParamBackwardPlan,
    BoundLaunch,
    EmbeddingBackwardPlan,
    ReduceBackwardPlan,
    ScanBackwardPlan,
    SoftmaxBackwardPlan,
)
from .sku import KernelSku, PlanPreference, PrecisionGuarantee
from .threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "BackendKind",
    "BinaryKind",
    "BinaryParamBackwardArgs",
    "BinaryParamBackwardDescriptor",
    "BinaryParamBackwardPlan",
    "BoundLaunch",
    "BufferTooSmall",
    "ElementKind",
    "EmbeddingBackwardArgs",
    "EmbeddingBackwardDescriptor",
    "EmbeddingBackwardPlan",
    "GradPlanError",
    "IndexKind",
    "InvalidProblem",
    "KernelFailure",
    "KernelSku",
    "MathPrecision",
    "MisalignedOperand",
    "OpCategory",
    "PlanPreference",
    "PrecisionGuarantee",
    "ReduceBackwardArgs",
    "ReduceBackwardDescriptor",
    "ReduceBackwardPlan",
    "ReduceKind",
    "ScanBackwardArgs",
    "ScanBackwardDescriptor",
    "ScanBackwardPlan",
    "ScanKind",
    "SoftmaxBackwardArgs",
    "SoftmaxBackwardDescriptor",
    "SoftmaxBackwardPlan",
    "SoftmaxKind",
    "TieRule",
    "Unsupported",
    "WorkspaceTooSmall",
    "cummax_backward",
    "cummin_backward",
    "cumprod_backward",
    "cumsum_backward",
    "embedding_backward",
    "get_num_threads",
    "lerp_backward",
    "log_softmax_backward",
    "logcumsumexp_backward",
    "logsumexp_backward",
    "max_backward",
    "mean_backward",
    "min_backward",
    "norm2_backward",
    "prod_backward",
    "set_num_threads",
    "softmax_backward",
    "std_backward",
    "sum_backward",
    "var_backward",
]
