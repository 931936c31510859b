"""`enable()`: existing code uses these functions, on this thread, until it is left.

A `TorchFunctionMode` sees every function and tensor method of torch that is called from Python.
Those of the families asked for are replaced by ours; all others go on as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from functools import cache, wraps
from types import FunctionType, coroutine
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kinds import OpCategory
from . import functions as ours
from . import linalg
from .nodes import PLAIN

__all__ = ["enable"]

Replacement = Callable[..., Any]


def _softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor:
    if dim is None:  # deprecated: torch warns, and chooses
        return F.softmax(input, dim, _stacklevel, dtype)
    return ours.softmax(input, dim, dtype)


def _log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor:
    if dim is None:
        return F.log_softmax(input, dim, _stacklevel, dtype)
    return ours.log_softmax(input, dim, dtype)


def _norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    return ours.norm(input, p, dim, keepdim, dtype=dtype)


def _embedding(*args: Any, **kwargs: Any) -> Tensor:
    sparse = args[6] if len(args) > 6 else kwargs.get("sparse", False)
    return (F.embedding if sparse else ours.embedding)(*args, **kwargs)


def _both(name: str) -> tuple[Any, ...]:
    return getattr(torch, name), getattr(Tensor, name)


# What is replaced, by family. `sum` is not: torch's is at the floor.
_TABLE: dict[OpCategory, dict[Replacement, tuple[Any, ...]]] = {
    OpCategory.SOFTMAX: {
        ours.softmax: (*_both("softmax"), torch.special.softmax),
        ours.log_softmax: (*_both("log_softmax"), torch.special.log_softmax),
        _softmax: (F.softmax,),
        _log_softmax: (F.log_softmax,),
    },
    OpCategory.BINARY_ELEMENTWISE: {ours.lerp: _both("lerp")},
    OpCategory.SCAN: {
        ours.cumsum: _both("cumsum"),
        ours.cumprod: _both("cumprod"),
        ours.cummax: _both("cummax"),
        ours.cummin: _both("cummin"),
        ours.logcumsumexp: _both("logcumsumexp"),
    },
    OpCategory.REDUCTION: {
        ours.mean: _both("mean"),
        ours.amax: _both("amax"),
        ours.amin: _both("amin"),
        ours.max: _both("max"),
        ours.min: _both("min"),
        ours.prod: _both("prod"),
        ours.norm: (torch.norm,),
        _norm: (Tensor.norm,),
        linalg.vector_norm: (torch.linalg.vector_norm,),
        linalg.norm: (torch.linalg.norm,),
        ours.logsumexp: (*_both("logsumexp"), torch.special.logsumexp),
        ours.var: _both("var"),
        ours.std: _both("std"),
        ours.var_mean: (torch.var_mean,),
        ours.std_mean: (torch.std_mean,),
    },
    OpCategory.EMBEDDING: {_embedding: (F.embedding,)},
}


class _Replacements:
    """Some of the table, to be looked up."""

    def __init__(self, *families: OpCategory) -> None:
        self.by_function: dict[Any, Replacement] = {}
        for family in families:
            for replacement, replaced in _TABLE[family].items():
                self.by_function.update(dict.fromkeys(replaced, replacement))
        self.pairs = tuple(self.by_function.items())


_ALL = _Replacements(*_TABLE)
_FAMILIES = {family: _Replacements(family) for family in _TABLE}

# Python functions of torch that call some of these inside; a backward pass does so where it runs
# parts of the forward again. Theirs are not seen while a mode handles the whole, so their body is
# run with the mode active.
_BODIES = frozenset(
    {
        F.softmin,
        F.gumbel_softmax,
        F.normalize,
        F.multi_head_attention_forward,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    }
)


class _Globals(dict[str, Any]):
    """Some names of its own, and all others as a module has them now: a program may replace what
    stands in torch's modules."""

    def __init__(self, own: dict[str, Any], module: dict[str, Any]) -> None:
        super().__init__(own)
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


@cache
def _body(function: FunctionType) -> Callable[..., Any]:
    """The function without the question at its top, whether a mode wants to handle it."""

    def no(*_: Any) -> bool:
        return False

    asked = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    own = dict.fromkeys(asked, no)
    module = function.__globals__
    made = FunctionType(
        function.__code__,
        # Of a backward pass a copy, which is 7 µs faster, and where nobody replaces anything.
        _Globals(own, module) if function.__module__ == F.__name__ else {**module, **own},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class enable(TorchFunctionMode):  # type: ignore[misc] # noqa: N801
    """A context manager, and a decorator, under which torch's functions have our gradients.

        with gradplan.torch.enable():
            loss = model(batch)      # unchanged code: functions, tensor methods, torch.nn modules
        loss.backward()              # inside or outside, as you like

    `families` names those to replace, all by default: "softmax", "binary_elementwise", "scan",
    "reduction", "embedding". It acts on the current thread, nests, and leaves nothing behind.
    What torch computes in one fused kernel (attention, cross entropy) stays that; so does
    `embedding(sparse=True)`. Where a backward pass runs parts of the forward again
    (`torch.utils.checkpoint`), keep it inside as well. Below `torch.compile`, what torch's own
    composites call inside (softmin, normalize, gumbel_softmax, multi-head attention) stays torch's.

    A generator or coroutine that is decorated is inside while it runs, not while it waits.
    """

    def __new__(cls, families: Any = None) -> Any:
        if isinstance(families, FunctionType):  # `@enable` without parentheses
            return enable()(families)
        return super().__new__(cls)

    def __init__(self, families: Iterable[OpCategory | str] | OpCategory | str | None = None):
        super().__init__()
        if families is None:
            self._tables: tuple[_Replacements, ...] = (_ALL,)
            return
        asked = (families,) if isinstance(families, str) else families
        self._tables = tuple(_FAMILIES[OpCategory.coerce(family)] for family in asked)

    def __call__(self, function: Any) -> Any:
        """The function, with this mode active whenever it runs."""
        if isinstance(function, type) or inspect.isasyncgenfunction(function):
            raise TypeError(
                "gradplan.torch.enable decorates functions, generators and coroutines; "
                f"got {function!r}: use `with enable():` inside"
            )

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        @wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return (yield from self._steps(function(*args, **kwargs)))

        @wraps(function)
        async def wait(*args: Any, **kwargs: Any) -> Any:
            return await coroutine(self._steps)(function(*args, **kwargs))

        if inspect.isgeneratorfunction(function):
            return generate
        return wait if inspect.iscoroutinefunction(function) else call

    def _steps(self, inner: Any) -> Generator[Any, Any, Any]:
        """What a generator or coroutine does, with this mode active in its own steps alone."""
        step, sent = inner.send, None
        while True:
            try:
                with self:
                    made = step(sent)
            except StopIteration as end:
                return end.value
            try:
                step, sent = inner.send, (yield made)
            except GeneratorExit:
                with self:
                    inner.close()
                raise
            except BaseException as error:
                step, sent = inner.throw, error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in types:
            if one not in PLAIN:  # tensor subclasses and their like handle it, with what they know
                return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            # Dynamo does not find functions of Python in a dict, but knows them when it sees them.
            for table in self._tables:
                for function, replacement in table.pairs:
                    if func is function:
                        return replacement(*args, **kwargs)
            return func(*args, **kwargs)
        for table in self._tables:
            found = table.by_function.get(func)
            if found is not None:
                return found(*args, **kwargs)
        if func in _BODIES:
            with self:
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)
