"""Triton's interpreter, made exact and fast enough to run the conformance grid.

As it comes, its scans and reductions call the combine function element by element, a rounding to
bfloat16 truncates, and other casts and matrix products take the bits of a bfloat16 for a number.
All are replaced: scans double their reach and reductions halve their length at each step, combining
neighbouring stretches in a tree as the hardware does; bfloat16 rounds to nearest, ties to even, and
otherwise goes through f32; a maximum drops a NaN as the hardware's does, and a fused product is not
rounded by itself; the language is patched once a launch, not at every call, and what tells of
shapes and types is made once.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from . import interpreted_types

__all__ = ["install"]

_installed = False


def install() -> None:
    """Put the replacements in place, once."""
    global _installed
    if _installed:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter.ScanOps.generic_scan = _scan
    interpreter.ReduceOps.generic_reduce = _reduce
    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(source) == "fp32" and str(target) == "bf16":
            rounded = np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)
            return rounded.view(np.uint16)
        if str(source) == "bf16" and str(target) == "fp32":
            return (np.asarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return original(values, source, target, mode)

    interpreter._convert_float = convert
    builder = interpreter.InterpreterBuilder
    cast, multiply = builder.cast_impl, builder.create_dot

    def cast_through_f32(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar == tl.bfloat16) != (target.scalar == tl.bfloat16):
            source = cast(self, source, tl.float32)
        return cast(self, source, target)

    def multiply_f32(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = cast(self, a, tl.float32), cast(self, b, tl.float32)
        return multiply(self, a, b, *more)

    builder.cast_impl, builder.create_dot = cast_through_f32, multiply_f32
    # Without `propagate_nan` a maximum drops a NaN.
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_fma = _fused
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        # A scalar is an array of one element, which NumPy no longer turns into an int.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    patch_language = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        # Each call of a function patches the language again, which takes longer than the call.
        # What is patched already shows in a name of its own.
        seen = function.__globals__.values()
        languages = [one for one in (tl, tl.core) if any(value is one for value in seen)]
        if languages and all(one.static_print is print for one in languages):
            return interpreter._LangPatchScope()
        return patch_language(function)

    interpreter._patch_lang = patch_once
    interpreted_types.remember()
    _installed = True


def _fused(self: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once but for one case in 2²⁹: f32 by way of f64, which holds a product."""
    values = [np.asarray(one.data, np.float64) for one in (a, b, c)]
    made = values[0] * values[1] + values[2]
    return type(c)(made.astype(c.data.dtype), c.dtype.scalar)


def _combine(op: Any, acc: Any, data: Any, types: Any) -> tuple[Any, ...]:
    arguments = [
        op.to_tensor(np.atleast_1d(values), dtype)
        for values, dtype in zip((*acc, *data), (*types, *types), strict=True)
    ]
    made = op.combine_fn.fn(*arguments)
    made = made if isinstance(made, tuple) else (made,)
    return tuple(
        np.asarray(one.handle.data).reshape(values.shape)
        for one, values in zip(made, data, strict=True)
    )


def _slices(values: Any, axis: int) -> Any:
    return np.moveaxis(values, axis, 0)


def _scan(op: Any, given: Any) -> list[Any]:
    types = [tensor.dtype for tensor in given]
    inputs = [_slices(tensor.handle.data, op.axis) for tensor in given]
    outputs = [np.array(values, order="C") for values in inputs]
    n, *rest = outputs[0].shape  # powers of two, as all shapes in Triton
    reach = 1
    with np.errstate(all="ignore"):
        while reach < n:
            # Pairs of stretches: what the first comes to goes before each of the second.
            pairs = [output.reshape(-1, 2, reach, *rest) for output in outputs]
            first = tuple(
                np.repeat(pair[:, 0, -1:], reach, 1).reshape(n // 2, *rest) for pair in pairs
            )
            second = tuple(pair[:, 1].reshape(n // 2, *rest) for pair in pairs)
            for pair, made in zip(pairs, _combine(op, first, second, types), strict=True):
                pair[:, 1] = made.reshape(-1, reach, *rest)
            reach *= 2
    return [
        op.to_tensor(np.ascontiguousarray(np.moveaxis(output, 0, op.axis)), dtype)
        for output, dtype in zip(outputs, types, strict=True)
    ]


def _reduce(op: Any, given: Any) -> list[Any]:
    axis = op.axis
    given, axis = op.unravel(given, axis)
    types = [tensor.dtype for tensor in given]
    inputs = [_slices(tensor.handle.data, axis) for tensor in given]
    with np.errstate(all="ignore"):
        while len(inputs[0]) > 1:
            first = tuple(values[0::2] for values in inputs)
            second = tuple(values[1::2] for values in inputs)
            inputs = list(_combine(op, first, second, types))
    made = []
    for values, dtype in zip(inputs, types, strict=True):
        kept: Any = values[0]
        if op.keep_dims:
            kept = np.expand_dims(kept, axis)
        elif op.axis is None:
            kept = kept.item()
        made.append(op.to_tensor(kept, dtype))
    return made
