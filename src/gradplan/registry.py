"""The one table of kinds: what each computes, what it needs and which engine runs it.

Selection, the support matrix, the conformance grid, `gradplan verify` and the benchmarks all
read this table. Adding a kind means adding its row here, its formula to each backend, and its
row in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .kinds import (
    BinaryKind,
    ElementKind,
    EmbeddingKind,
    Named,
    OpCategory,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
    TieRule,
)

__all__ = ["ELEMENTS", "KINDS", "MAX_RANK", "Engine", "KindSpec", "Need", "spec_of"]

MAX_RANK = 8
"""The largest rank that the engines' loop nests are written for."""

ELEMENTS = tuple(ElementKind)


class Need(StrEnum):
    """Whether a saved array must, may or need not be given."""

    NO = "–"
    OPTIONAL = "optional"
    REQUIRED = "yes"


class Engine(StrEnum):
    """The four ways in which gradients run through memory."""

    MAP = "map"
    ROW_STATE = "row state then map"
    RECURRENCE = "recurrence"
    SEGMENT_SUM = "segment sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSpec:
    """One row of the table.

    `ties` lists the tie rules the kind takes (none: the field is ignored), and `correction`
    says whether it reads `correction`.
    """

    kind: Named
    category: OpCategory
    engine: Engine
    function: str
    formula: str
    x: Need = Need.NO
    y: Need = Need.NO
    ties: tuple[TieRule, ...] = ()
    correction: bool = False


_SCAN_TIES = (TieRule.FIRST, TieRule.LAST)
_ALL_TIES = tuple(TieRule)

_SPECS = (
    KindSpec(
        kind=SoftmaxKind.SOFTMAX,
        category=OpCategory.SOFTMAX,
        engine=Engine.ROW_STATE,
        function="softmax_backward",
        formula="y · (dy − Σ y·dy)",
        y=Need.REQUIRED,
    ),
    KindSpec(
        kind=SoftmaxKind.LOG_SOFTMAX,
        category=OpCategory.SOFTMAX,
        engine=Engine.ROW_STATE,
        function="log_softmax_backward",
        formula="dy − exp(y) · Σ dy",
        y=Need.REQUIRED,
    ),
    KindSpec(
        kind=BinaryKind.LERP,
        category=OpCategory.BINARY_ELEMENTWISE,
        engine=Engine.MAP,
        function="lerp_backward",
        formula="da = (1 − w)·dy, db = w·dy",
    ),
    KindSpec(
        kind=ScanKind.CUMSUM,
        category=OpCategory.SCAN,
        engine=Engine.RECURRENCE,
        function="cumsum_backward",
        formula="S[k], c[k] = 1",
    ),
    KindSpec(
        kind=ScanKind.CUMPROD,
        category=OpCategory.SCAN,
        engine=Engine.RECURRENCE,
        function="cumprod_backward",
        formula="y[k−1] · S[k], c[k] = x[k+1]",
        x=Need.REQUIRED,
        y=Need.OPTIONAL,
    ),
    KindSpec(
        kind=ScanKind.CUMMAX,
        category=OpCategory.SCAN,
        engine=Engine.RECURRENCE,
        function="cummax_backward",
        formula="S[k] where k is a winner, else 0; c[k] = 0 where k+1 wins, else 1",
        x=Need.REQUIRED,
        y=Need.OPTIONAL,
        ties=_SCAN_TIES,
    ),
    KindSpec(
        kind=ScanKind.CUMMIN,
        category=OpCategory.SCAN,
        engine=Engine.RECURRENCE,
        function="cummin_backward",
        formula="S[k] where k is a winner, else 0; c[k] = 0 where k+1 wins, else 1",
        x=Need.REQUIRED,
        y=Need.OPTIONAL,
        ties=_SCAN_TIES,
    ),
    KindSpec(
        kind=ScanKind.LOG_CUMSUM_EXP,
        category=OpCategory.SCAN,
        engine=Engine.RECURRENCE,
        function="logcumsumexp_backward",
        formula="exp(x[k] − y[k]) · S[k], c[k] = exp(y[k] − y[k+1])",
        x=Need.REQUIRED,
        y=Need.OPTIONAL,
    ),
    KindSpec(
        kind=ReduceKind.SUM,
        category=OpCategory.REDUCTION,
        engine=Engine.MAP,
        function="sum_backward",
        formula="dy",
    ),
    KindSpec(
        kind=ReduceKind.MEAN,
        category=OpCategory.REDUCTION,
        engine=Engine.MAP,
        function="mean_backward",
        formula="dy / n",
    ),
    KindSpec(
        kind=ReduceKind.MAX,
        category=OpCategory.REDUCTION,
        engine=Engine.ROW_STATE,
        function="max_backward",
        formula="dy where x == y, else 0; shared among ties by the tie rule",
        x=Need.REQUIRED,
        y=Need.REQUIRED,
        ties=_ALL_TIES,
    ),
    KindSpec(
        kind=ReduceKind.MIN,
        category=OpCategory.REDUCTION,
        engine=Engine.ROW_STATE,
        function="min_backward",
        formula="dy where x == y, else 0; shared among ties by the tie rule",
        x=Need.REQUIRED,
        y=Need.REQUIRED,
        ties=_ALL_TIES,
    ),
    KindSpec(
        kind=ReduceKind.PROD,
        category=OpCategory.REDUCTION,
        engine=Engine.ROW_STATE,
        function="prod_backward",
        formula="dy · Π of the others",
        x=Need.REQUIRED,
        y=Need.OPTIONAL,
    ),
    KindSpec(
        kind=ReduceKind.NORM2,
        category=OpCategory.REDUCTION,
        engine=Engine.MAP,
        function="norm2_backward",
        formula="dy · x / y, and 0 where y == 0",
        x=Need.REQUIRED,
        y=Need.REQUIRED,
    ),
    KindSpec(
        kind=ReduceKind.LOG_SUM_EXP,
        category=OpCategory.REDUCTION,
        engine=Engine.MAP,
        function="logsumexp_backward",
        formula="dy · exp(x − y), and 0 where y == −inf",
        x=Need.REQUIRED,
        y=Need.REQUIRED,
    ),
    KindSpec(
        kind=ReduceKind.VAR,
        category=OpCategory.REDUCTION,
        engine=Engine.ROW_STATE,
        function="var_backward",
        formula="dy · 2 (x − mean) / m",
        x=Need.REQUIRED,
        correction=True,
    ),
    KindSpec(
        kind=ReduceKind.STD,
        category=OpCategory.REDUCTION,
        engine=Engine.ROW_STATE,
        function="std_backward",
        formula="dy · (x − mean) / (m · y), and 0 where y == 0",
        x=Need.REQUIRED,
        y=Need.REQUIRED,
        correction=True,
    ),
    KindSpec(
        kind=EmbeddingKind.EMBEDDING,
        category=OpCategory.EMBEDDING,
        engine=Engine.SEGMENT_SUM,
        function="embedding_backward",
        formula="dweight[indices[n]] += dout[n]",
    ),
)

KINDS: dict[tuple[OpCategory, Named], KindSpec] = {
    (spec.category, spec.kind): spec for spec in _SPECS
}
"""Every kind, in the order of the contract."""


def spec_of(category: OpCategory, kind: Named) -> KindSpec:
    """The row of one kind."""
    return KINDS[category, kind]
