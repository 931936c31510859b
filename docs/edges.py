"""Where gradients have an edge: what gradplan, PyTorch and JAX give for the same small inputs.

Each row of `EDGES` is an experiment. `python docs/edges.py` runs all of them with whatever is
installed and writes `edges.json`, from which the pages' tables are made; the tests run them
again and hold the file to what comes out. Nothing in the tables is typed by hand.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gradplan as gp
from gradplan import BinaryKind, OpCategory, ReduceKind, ScanKind, SoftmaxKind
from gradplan.bench.forwards import LERP_WEIGHT, forward, jax_forward
from gradplan.kinds import EmbeddingKind, Named
from gradplan.registry import KINDS, KindSpec, Need

__all__ = ["EDGES", "LIBRARIES", "RECORD", "Edge", "installed", "result"]

RECORD = Path(__file__).with_name("edges.json")
_DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
_INF, _NAN = float("inf"), float("nan")
_FAMILY = {kind: family for family, kind in KINDS}
_SHOWN = 6


@dataclass(frozen=True)
class Edge:
    """One experiment: a kind, its input and the gradient that arrives.

    Of an embedding `x` are the indices into a table of `rows` rows of one column, and `dy` one
    number an index.
    """

    title: str
    kind: Named
    x: Sequence[float]
    dy: Sequence[float]
    element: str = "f32"
    rows: int = 0

    @property
    def spec(self) -> KindSpec:
        return KINDS[_FAMILY[self.kind], self.kind]

    @property
    def given(self) -> str:
        """The inputs, in short."""
        name = "indices" if self.rows else "x"
        table = f", a table of {self.rows}" if self.rows else ""
        element = "" if self.element == "f32" else f", {self.element}"
        arriving = "dout" if self.rows else "dy"
        inputs = "" if self.kind is BinaryKind.LERP else f"{name} = {_text(self.x)}, "
        return f"{inputs}{arriving} = {_text(self.dy)}{table}{element}"


EDGES = (
    Edge("a masked place", SoftmaxKind.SOFTMAX, (-_INF, 0, 0), (1, 2, 4)),
    Edge("a masked place", SoftmaxKind.LOG_SOFTMAX, (-_INF, 0), (1, 1)),
    Edge("every place masked", SoftmaxKind.SOFTMAX, (-_INF, -_INF), (1, 1)),
    Edge("a NaN arrives at a masked place", SoftmaxKind.SOFTMAX, (-_INF, 0, 0), (_NAN, 1, 2)),
    Edge("a NaN arrives", BinaryKind.LERP, (1, 2), (_NAN, 1)),
    Edge("an infinity arrives", BinaryKind.LERP, (1, 2), (_INF, 1)),
    Edge("a NaN arrives", ScanKind.CUMSUM, (1, 2, 3, 4), (1, _NAN, 1, 1)),
    Edge("a long row of a half type", ScanKind.CUMSUM, (1,) * 4096, (1,) * 4096, "bf16"),
    Edge("one zero", ScanKind.CUMPROD, (2, 0, 3, 4), (1, 1, 1, 1)),
    Edge("two zeros", ScanKind.CUMPROD, (2, 0, 3, 0), (1, 1, 1, 1)),
    Edge("a tie", ScanKind.CUMMAX, (1, 3, 3, 2), (1, 1, 1, 1)),
    Edge("a tie of four", ScanKind.CUMMAX, (3, 3, 3, 3), (1, 1, 1, 1)),
    Edge("a NaN in x", ScanKind.CUMMAX, (1, _NAN, 3, _NAN), (1, 2, 4, 8)),
    Edge("a NaN arrives", ScanKind.CUMMAX, (1, 3, 2, 4), (1, 1, _NAN, 1)),
    Edge("a NaN arrives", ScanKind.LOG_CUMSUM_EXP, (0, 0, 0), (1, _NAN, 1)),
    Edge("−inf in front", ScanKind.LOG_CUMSUM_EXP, (-_INF, -_INF, 0), (1, 1, 1)),
    Edge("a row of −inf", ScanKind.LOG_CUMSUM_EXP, (-_INF, -_INF), (1, 1)),
    Edge("a tie", ReduceKind.MAX, (1, 3, 3, 2), (1,)),
    Edge("a NaN in x", ReduceKind.MAX, (1, _NAN, 3), (1,)),
    Edge("one zero", ReduceKind.PROD, (2, 0, 3), (1,)),
    Edge("two zeros", ReduceKind.PROD, (2, 0, 0), (1,)),
    Edge("a product beyond the type", ReduceKind.PROD, (1e30, 1e30, 1e-30), (1,)),
    Edge("a row of zeros", ReduceKind.NORM2, (0, 0), (1,)),
    Edge("a row of −inf", ReduceKind.LOG_SUM_EXP, (-_INF, -_INF), (1,)),
    Edge("one element", ReduceKind.VAR, (3,), (1,)),
    Edge("a constant row", ReduceKind.STD, (2, 2, 2), (1,)),
    Edge(
        "4096 ones for one row, in a half type",
        EmbeddingKind.EMBEDDING,
        (0,) * 4096,
        (1,) * 4096,
        "bf16",
        rows=2,
    ),
    Edge("an index beyond the table", EmbeddingKind.EMBEDDING, (0, 9), (1, 1), rows=2),
    Edge("a negative index", EmbeddingKind.EMBEDDING, (0, -1), (1, 1), rows=2),
    Edge("a NaN arrives", EmbeddingKind.EMBEDDING, (0, 1, 1), (_NAN, 1, 2), rows=3),
)


def _text(numbers: Sequence[float]) -> str:
    """Numbers in short; a row of many equal ones by its count."""
    if len(numbers) > _SHOWN:
        return f"{len(numbers)} × {_number(numbers[0])}"
    return f"[{', '.join(map(_number, numbers))}]"


def _number(value: float) -> str:
    # Four digits: beyond them exponentials of different libraries need not agree.
    return f"{value + 0.0:.4g}".replace("inf", "∞").replace("nan", "NaN").replace("-", "−")


def _found(values: Any) -> str:
    """A gradient in short; of a long one the first elements."""
    numbers = [float(one) for one in np.asarray(values).reshape(-1)]
    if len(numbers) > _SHOWN:
        return f"[{', '.join(map(_number, numbers[:2]))}, …]"
    return _text(numbers)


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max())
    return e / e.sum()


# What a forward pass saves, for the kinds that must be given it.
_SAVED: dict[Named, Callable[[Any], Any]] = {
    SoftmaxKind.SOFTMAX: _softmax,
    SoftmaxKind.LOG_SOFTMAX: lambda x: np.log(_softmax(x)),
    ReduceKind.MAX: lambda x: x.max(keepdims=True),
    ReduceKind.NORM2: lambda x: np.sqrt(np.sum(x * x, keepdims=True)),
    ReduceKind.LOG_SUM_EXP: lambda x: np.logaddexp.reduce(x, keepdims=True),
    ReduceKind.STD: lambda x: x.std(keepdims=True, ddof=1),
}


def _ours(edge: Edge) -> str:
    spec, dtype = edge.spec, _DTYPES[edge.element]
    function = getattr(gp, spec.function)
    dy = np.array(edge.dy, dtype)
    if edge.kind is EmbeddingKind.EMBEDDING:
        return _found(function(dy[:, None], np.array(edge.x, np.int64), edge.rows))
    if edge.kind is BinaryKind.LERP:
        return " and ".join(map(_found, function(dy, LERP_WEIGHT)))
    x = np.array(edge.x, dtype)
    saved: dict[str, Any] = {}
    if spec.x is not Need.NO:
        saved["x"] = x
    if spec.y is Need.REQUIRED:
        saved["y"] = _SAVED[edge.kind](x)
    axis = {"axis": 0}
    if spec.category is OpCategory.REDUCTION:
        return _found(function(dy, **saved, **axis, keepdims=True))
    return _found(function(dy, **saved, **axis))


def _torch(edge: Edge) -> str:
    import torch

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[edge.element]
    dy = torch.tensor(edge.dy, dtype=dtype)
    if edge.kind is EmbeddingKind.EMBEDDING:
        table = torch.zeros(edge.rows, 1, dtype=dtype, requires_grad=True)
        leaves, inputs = [table], [table, torch.tensor(edge.x, dtype=torch.int64)]
        dy = dy[:, None]
    else:
        count = 2 if edge.kind is BinaryKind.LERP else 1
        leaves = [torch.tensor(edge.x, dtype=dtype, requires_grad=True) for _ in range(count)]
        inputs = leaves
    try:
        forward(edge.kind.value, 0)(inputs).backward(dy)
    except IndexError as error:
        return type(error).__name__
    return " and ".join(_found(leaf.grad.float().numpy()) for leaf in leaves)


def _jax(edge: Edge) -> str:
    import jax
    import jax.numpy as jnp

    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[edge.element]
    dy, run = jnp.array(edge.dy, dtype), jax_forward(edge.kind.value, 0)
    if edge.kind is EmbeddingKind.EMBEDDING:
        indices = jnp.array(edge.x, jnp.int32)
        _, back = jax.vjp(lambda table: run([table, indices]), jnp.zeros((edge.rows, 1), dtype))
        dy = dy[:, None]
    else:
        leaves = [jnp.array(edge.x, dtype)] * (2 if edge.kind is BinaryKind.LERP else 1)
        _, back = jax.vjp(lambda *tensors: run(tensors), *leaves)
    return " and ".join(_found(np.asarray(one, np.float32)) for one in back(dy))


LIBRARIES: dict[str, Callable[[Edge], str]] = {"gradplan": _ours, "torch": _torch, "jax": _jax}


def installed(library: str) -> str | None:
    """The version of a library, without what its build adds; None where it is missing."""
    if library == "gradplan":
        return gp.__version__
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return None


def result(edge: Edge, library: str) -> str:
    """What a library gives, as the table shows it."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a variance of one element
        return LIBRARIES[library](edge)


def main() -> None:
    found = {name: made for name in LIBRARIES if (made := installed(name))}
    rows = [
        {"kind": edge.kind.value, "title": edge.title, **{one: result(edge, one) for one in found}}
        for edge in EDGES
    ]
    record = {"versions": {k: v for k, v in found.items() if k != "gradplan"}, "rows": rows}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
