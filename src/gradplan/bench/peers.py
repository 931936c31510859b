"""What users would pick instead: each peer prepares a call that produces the same gradient.

Everyone is given `dy` and what its own forward saved; the forward itself is never timed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from ..kinds import ElementKind, OpCategory
from .forwards import VIEW_KINDS, forward, jax_forward
from .lazy import installed, needed
from .problems import Problem
from .workloads import Reach, Workload

__all__ = ["PEERS", "Peer", "Prepared", "available", "published", "tolerance"]


@dataclass(frozen=True)
class Prepared:
    """A call, and how to read what it returns as tensors.

    `wait` is given where only a wall clock serves; `around` is entered once for many calls.
    """

    call: Callable[[], Any]
    tensors: Callable[[Any], Sequence[Any]]
    wait: Callable[[Any], Any] | None = None
    note: str = ""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Peer:
    """A peer: its title in tables, the module it lives in, and how it prepares."""

    name: str
    title: str
    module: str
    prepare: Callable[[Problem], Prepared]
    compiles: bool = False


def tolerance(element: ElementKind) -> float:
    """How far a peer's whole result may be from dx*, relative to it.

    Wide: it tells another gradient (nothing at all is off by 1, a wrong sign or axis by more) from
    rounding, of which some peers do much in halves. Ours are held to their guarantee instead.
    """
    return {ElementKind.F64: 1e-6, ElementKind.F32: 0.05}.get(element, 0.95)


def _graph(problem: Problem, run: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """(y, leaves) of a recorded forward."""
    leaves = [leaf.detach().requires_grad_() for leaf in problem.leaves()]
    extra = [problem.inputs["indices"]] if problem.spec.category is OpCategory.EMBEDDING else []
    return run(leaves + extra), leaves


def _autograd(problem: Problem, run: Callable[..., Any], note: str = "") -> Prepared:
    torch = needed("torch")
    y, leaves = _graph(problem, run)
    dy = problem.dy

    def call() -> Any:
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return Prepared(call, lambda made: made, note=note)


def _expanded(problem: Problem, run: Callable[[Any], Any] | None = None) -> Prepared:
    """torch's gradient of a sum is a view; what stands here writes it out."""
    dy, shape = problem.dy, problem.desc.input_shape

    def expand(small: Any) -> Any:
        return small.expand(shape).contiguous()

    made = run(expand) if run is not None else expand
    note = "expand().contiguous(): a view in torch"
    return Prepared(lambda: made(dy), lambda result: [result], note=note)


def _torch(problem: Problem) -> Prepared:
    kind = problem.spec.kind.value
    if kind in VIEW_KINDS:
        return _expanded(problem)
    return _autograd(problem, forward(kind, problem.axis))


def _compile(problem: Problem) -> Prepared:
    torch = needed("torch")
    torch._dynamo.reset()
    kind = problem.spec.kind.value

    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=False, fullgraph=True)

    if kind in VIEW_KINDS:
        return _expanded(problem, compiled)
    # The graph is kept for the next call, so the backward may not consume what was saved.
    with suppress(ImportError):
        config: Any = importlib.import_module("torch._functorch.config")
        config.donated_buffer = False
    return _autograd(problem, compiled(forward(kind, problem.axis)))


def _flag_gems(problem: Problem) -> Prepared:
    gems = needed("flag_gems")
    prepared = _torch(problem)
    note = prepared.note or "operators it does not replace are torch's"
    # Entering replaces operators one by one, which takes far longer than running them.
    return replace(prepared, note=note, around=gems.use_gems)


def _jax(problem: Problem) -> Prepared:
    # JAX would take most of the device's memory at its start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax, torch = needed("jax"), needed("torch")
    if problem.desc.element is ElementKind.F64:
        jax.config.update("jax_enable_x64", True)
    run = jax_forward(problem.spec.kind.value, problem.axis)
    given = problem.leaves()
    if problem.device != "cpu":
        torch.cuda.synchronize()  # two libraries, two streams
    leaves = [_to_jax(jax, leaf) for leaf in given]
    extra = []
    if problem.spec.category is OpCategory.EMBEDDING:
        extra = [_to_jax(jax, problem.inputs["indices"].int())]
    dy = _to_jax(jax, problem.dy)
    # The pullback is a tree of what the forward saved: the compiled function takes it as input,
    # and the forward is not run again.
    _, pullback = jax.vjp(lambda *given: run([*given, *extra]), *leaves)
    backward = jax.jit(lambda saved, gradient: saved(gradient))
    note = "wall clock over batches"
    if problem.workload.layout != "contiguous":
        note += ", on contiguous arrays"
    return Prepared(
        lambda: backward(pullback, dy),
        lambda made: [torch.from_dlpack(array) for array in jax.block_until_ready(made)],
        wait=jax.block_until_ready,
        note=note,
    )


def _to_jax(jax: Any, tensor: Any) -> Any:
    # JAX keeps its own layouts: what is strided is made contiguous before anything is timed.
    return jax.numpy.from_dlpack(tensor.detach().contiguous())


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("torch", "PyTorch eager", "torch", _torch),
        Peer("compile", "torch.compile", "torch", _compile, compiles=True),
        Peer("jax", "JAX", "jax", _jax, compiles=True),
        Peer("flaggems", "FlagGems", "flag_gems", _flag_gems),
    )
}


# Kinds whose strided axes and long rows are compiled by torch too: the others take minutes, or do
# not compile.
_COMPILED_EVERYWHERE = ("softmax", "log_softmax", "cumsum")


def published(kind: str, element: ElementKind, workload: Workload) -> tuple[str, ...]:
    """Whom the tables of the README compare with, row by row: all on the main shapes of bf16, of
    the other elements PyTorch on the first of them."""
    main = workload.name == ("flat" if kind == "lerp" else "rows")
    if element is not ElementKind.BF16:
        return ("torch",) if main else ()
    if main:
        return ("torch", "compile", "jax")
    if workload.reach is Reach.EMBEDDING:
        return ("torch", "compile")
    if workload.name in ("columns", "long"):
        some = kind in _COMPILED_EVERYWHERE
        return ("torch", "compile", "jax") if some else ("torch", "jax")
    return ()


def available() -> list[str]:
    """The peers that are installed."""
    return [name for name, peer in PEERS.items() if installed(peer.module)]
