"""Triton's interpreter, made exact and fast enough to run the conformance grid.

As it comes, its scans and reductions call the combine function element by element, a rounding to
bfloat16 truncates, and other casts and matrix products take the bits of a bfloat16 for a number.
All are replaced: scans and reductions step along the axis with whole slices, bfloat16 rounds to
nearest, ties to even, as the hardware does, and otherwise goes through f32.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

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
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        # A scalar is an array of one element, which NumPy no longer turns into an int.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    _installed = True


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
    outputs = [np.empty_like(values) for values in inputs]
    acc = tuple(values[0] for values in inputs)
    with np.errstate(all="ignore"):
        for k in range(len(inputs[0])):
            if k:
                acc = _combine(op, acc, tuple(values[k] for values in inputs), types)
            for output, values in zip(outputs, acc, strict=True):
                output[k] = values
    return [
        op.to_tensor(np.ascontiguousarray(np.moveaxis(output, 0, op.axis)), dtype)
        for output, dtype in zip(outputs, types, strict=True)
    ]


def _reduce(op: Any, given: Any) -> list[Any]:
    axis = op.axis
    given, axis = op.unravel(given, axis)
    types = [tensor.dtype for tensor in given]
    inputs = [_slices(tensor.handle.data, axis) for tensor in given]
    acc = tuple(values[0] for values in inputs)
    with np.errstate(all="ignore"):
        for k in range(1, len(inputs[0])):
            acc = _combine(op, acc, tuple(values[k] for values in inputs), types)
    made = []
    for values, dtype in zip(acc, types, strict=True):
        kept: Any = values
        if op.keep_dims:
            kept = np.expand_dims(values, axis)
        elif op.axis is None:
            kept = values.item()
        made.append(op.to_tensor(kept, dtype))
    return made
