"""The check before any timing: every gradient in float64, in torch, where the arrays are.

The same definitions as `backends.reference`, with the recurrence S[k] = dy[k] + c[k]·S[k+1] run by
doubling, so that a GPU needs milliseconds for what the reference takes minutes. A test holds the
two to each other. Arrays are rows here, (outer, n); inputs are finite, as the benchmark draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

from ..kinds import OpCategory, ReduceKind, ScanKind, SoftmaxKind
from ..registry import Engine
from .lazy import needed
from .problems import Problem

__all__ = ["Errors", "check", "gradient_rows"]

# Elements held in float64 at a time, and checked in all; beyond them rows are picked evenly. An
# output is searched for NaN throughout.
_CHUNK = {"cuda": 1 << 24, "cpu": 1 << 19}
_CHECKED = {"cuda": 1 << 26, "cpu": 1 << 19}


@dataclass(frozen=True)
class Errors:
    """`worst`: the contract's measure, of the worst slice; `total`: ‖dx − dx*‖ / ‖dx*‖ over all."""

    worst: float
    total: float


def check(problem: Problem, outputs: Mapping[str, Any]) -> Errors:
    """The errors of these outputs; infinite where one is NaN, or of another shape."""
    torch = needed("torch")
    for name, due in problem.outputs.items():
        if outputs[name].shape != due.shape or bool(torch.isnan(outputs[name]).any()):
            return Errors(inf, inf)
    if problem.spec.category is OpCategory.EMBEDDING:
        return _check_embedding(problem, outputs["dweight"])
    worst, wrong, size = 0.0, 0.0, 0.0
    element = problem.desc.element
    for rows, got in _chunks(problem, outputs):
        exact = gradient_rows(problem, rows)
        bound = gradient_rows(problem, rows, magnitude=True)
        for name, found in got.items():
            error, finite = _difference(found, exact[name])
            if error is None:
                return Errors(inf, inf)
            norm = torch.linalg.vector_norm(error, dim=1)
            limit = torch.linalg.vector_norm(bound[name] * finite, dim=1)
            slack = sqrt(error.shape[1]) * element.smallest_subnormal
            excess = (norm - slack).clamp_(min=0)
            share = torch.where(excess == 0, 0.0, excess / limit)
            worst = max(worst, float(share.max()))
            wrong += float((norm * norm).sum())
            size += float(torch.where(finite, exact[name], 0.0).square().sum())
    return Errors(worst, _ratio(wrong, size))


def _ratio(wrong: float, size: float) -> float:
    if wrong == 0:
        return 0.0
    return sqrt(wrong / size) if size else inf


def _difference(found: Any, exact: Any) -> tuple[Any, Any]:
    """(|found − exact| where the stored result is finite, that mask); None where they clash."""
    torch = needed("torch")
    due = exact.to(found.dtype)
    finite = torch.isfinite(due)
    good = torch.where(finite, torch.isfinite(found), found == due)
    if not bool(good.all()):
        return None, finite
    return torch.where(finite, (found.double() - exact).abs(), 0.0), finite


def _chunks(
    problem: Problem, outputs: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(inputs in float64, outputs), some rows at a time."""
    torch = needed("torch")
    device = problem.device.partition(":")[0]
    if problem.spec.category is OpCategory.BINARY_ELEMENTWISE:
        # No axis: any piece may be held to the bound by itself.
        size, axis = _CHUNK[device], None
        flat = {name: a.reshape(-1) for name, a in (problem.inputs | dict(outputs)).items()}
        pieces = {name: a.split(size) for name, a in flat.items()}
        for k in range(len(pieces["dy"])):
            part = {name: pieces[name][k][None] for name in pieces}
            yield {"dy": part["dy"].double()}, {name: part[name] for name in outputs}
        return
    axis = problem.axis

    def rows_of(array: Any) -> Any:
        turned = array.movedim(axis, -1)
        return turned.reshape(-1, turned.shape[-1])

    given = {name: rows_of(array) for name, array in problem.inputs.items()}
    found = {name: rows_of(array) for name, array in outputs.items()}
    outer, n = found["dx"].shape
    count = min(outer, max(1, _CHECKED[device] // n))
    chosen = torch.linspace(0, outer - 1, count, dtype=torch.float64, device=problem.device)
    for part in chosen.round().long().split(max(1, _CHUNK[device] // n)):
        yield (
            {name: array[part].double() for name, array in given.items()},
            {name: array[part] for name, array in found.items()},
        )


def _check_embedding(problem: Problem, dweight: Any) -> Errors:
    """A slice is a row of the table; columns are summed some at a time."""
    torch = needed("torch")
    desc, indices = problem.desc, problem.inputs["indices"]
    rows, columns = dweight.shape
    size = (rows,)
    error2, bound2, exact2 = (dweight.new_zeros(size, dtype=torch.float64) for _ in range(3))
    width = max(1, _CHUNK[problem.device.partition(":")[0]] // max(rows, len(indices)))
    for start in range(0, columns, width):
        part = problem.inputs["dout"][:, start : start + width].double()
        zero = part.new_zeros((rows, part.shape[1]))
        exact = zero.index_add(0, indices, part)
        bound = zero.index_add(0, indices, part.abs())
        error, finite = _difference(dweight[:, start : start + width], exact)
        if error is None:
            return Errors(inf, inf)
        error2 += error.square().sum(1)
        bound2 += (bound * finite).square().sum(1)
        exact2 += torch.where(finite, exact, 0.0).square().sum(1)
    slack = sqrt(columns) * desc.element.smallest_subnormal
    excess = (error2.sqrt() - slack).clamp_(min=0)
    share = torch.where(excess == 0, 0.0, excess / bound2.sqrt())
    return Errors(float(share.max()), _ratio(float(error2.sum()), float(exact2.sum())))


def gradient_rows(
    problem: Problem, rows: Mapping[str, Any], *, magnitude: bool = False
) -> dict[str, Any]:
    """The outputs for rows in float64; `magnitude` takes every term absolute."""
    torch = needed("torch")
    of: Callable[[Any], Any] = torch.abs if magnitude else torch.positive
    minus: Callable[[Any, Any], Any] = torch.add if magnitude else torch.sub
    desc, dy = problem.desc, of(rows["dy"])
    if problem.spec.category is OpCategory.BINARY_ELEMENTWISE:
        return {"da": of((1 - desc.param) * dy), "db": of(desc.param * dy)}
    if desc.op is SoftmaxKind.SOFTMAX:
        y = of(rows["y"])
        return {"dx": y * minus(dy, (y * dy).sum(1, keepdim=True))}
    if desc.op is SoftmaxKind.LOG_SOFTMAX:
        return {"dx": minus(dy, rows["y"].exp() * dy.sum(1, keepdim=True))}
    if problem.spec.engine is Engine.RECURRENCE:
        return {"dx": _scan(desc, dy, rows, of)}
    return {"dx": _reduce(problem, dy, rows, of, minus)}


def _scan(desc: Any, dy: Any, rows: Mapping[str, Any], of: Callable[[Any], Any]) -> Any:
    torch = needed("torch")
    if desc.kind is ScanKind.CUMSUM:
        return dy.flip(1).cumsum(1).flip(1)
    x = rows["x"]
    y = rows["y"] if "y" in rows else _saved(desc, x)
    c = torch.zeros_like(x)  # the last has no successor
    if desc.kind is ScanKind.CUMPROD:
        c[:, :-1] = of(x[:, 1:])
        before = torch.cat([torch.ones_like(y[:, :1]), of(y[:, :-1])], dim=1)
        return before * _recurrence(dy, c)
    if desc.kind is ScanKind.LOG_CUMSUM_EXP:
        c[:, :-1] = (y[:, :-1] - y[:, 1:]).exp()
        return (x - y).exp() * _recurrence(dy, c)
    sign = 1 if desc.kind is ScanKind.CUMMAX else -1
    wins = torch.ones_like(x, dtype=torch.bool)
    wins[:, 1:] = sign * x[:, 1:] >= sign * y[:, :-1]  # the last of equals wins
    c[:, :-1] = (~wins[:, 1:]).double()
    return torch.where(wins, _recurrence(dy, c), 0.0)


def _saved(desc: Any, x: Any) -> Any:
    """y where it is left out: the kernels take it anew from x, without rounding it."""
    torch = needed("torch")
    if desc.kind is ScanKind.CUMPROD:
        return x.cumprod(1)
    if desc.kind is ScanKind.LOG_CUMSUM_EXP:
        return torch.logcumsumexp(x, 1)
    return (torch.cummax if desc.kind is ScanKind.CUMMAX else torch.cummin)(x, 1).values


def _recurrence(dy: Any, c: Any) -> Any:
    """S[k] = dy[k] + c[k]·S[k+1], each step doubling the reach of every S[k]."""
    s, c, reach = dy.clone(), c.clone(), 1
    while reach < s.shape[1]:
        s[:, :-reach] += c[:, :-reach] * s[:, reach:]
        c[:, :-reach] = c[:, :-reach] * c[:, reach:]
        reach *= 2
    return s


def _reduce(
    problem: Problem,
    dy: Any,
    rows: Mapping[str, Any],
    of: Callable[[Any], Any],
    minus: Callable[[Any, Any], Any],
) -> Any:
    torch = needed("torch")
    desc, kind = problem.desc, problem.desc.kind
    n = desc.input_shape[problem.axis]
    if kind is ReduceKind.SUM:
        return dy.expand(-1, n)
    if kind is ReduceKind.MEAN:
        return (dy / n).expand(-1, n)
    x, y = rows["x"], rows.get("y")
    if kind is ReduceKind.PROD:
        one = torch.ones_like(x[:, :1])
        factors = of(x)
        before = torch.cat([one, factors[:, :-1]], dim=1).cumprod(1)
        after = torch.cat([factors[:, 1:], one], dim=1).flip(1).cumprod(1).flip(1)
        return dy * before * after
    if kind in (ReduceKind.VAR, ReduceKind.STD):
        deviation = minus(of(x), of(x).sum(1, keepdim=True) / n)
        m = n - desc.correction if n > desc.correction else 1
        if kind is ReduceKind.VAR:
            return dy * 2 * deviation / m
        return torch.where(y == 0, 0.0, dy * deviation / (m * of(y)))
    if kind is ReduceKind.NORM2:
        return torch.where(y == 0, 0.0, dy * of(x) / of(y))
    if kind is ReduceKind.LOG_SUM_EXP:
        return dy * (x - y).exp()
    chosen = x == y  # max and min: y says which; ties share
    return torch.where(chosen, dy / chosen.sum(1, keepdim=True), 0.0)
