"""What Triton's interpreter knows of types, found once.

It makes a type and a shape anew with every tensor, and asks at every operation how two of them
meet, which takes several times what NumPy does for the numbers. Here types are made once, and two
tensors of one type and shape meet as they are; whatever else meets is left to Triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

__all__ = ["remember"]

_SCALARS = (
    *("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_PLAIN = {"int32": int, "int64": int, "fp32": float, "fp64": float}
"""Types that meet themselves unchanged in every operation, and numbers that become them."""


def remember() -> None:
    """Put it in place."""
    import triton.language as tl
    from triton.runtime import interpreter

    # It computes twice whether integers overflow, and tells nobody, for it does not debug.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    found = {
        one.name: interpreter._get_np_dtype(one) for one in (getattr(tl, name) for name in _SCALARS)
    }
    _remember_numpy_types(tl, interpreter, found)
    _remember_shapes(tl, interpreter, found)
    _meet_at_once(tl, interpreter, found)


def _remember_numpy_types(tl: Any, interpreter: Any, found: dict[str, Any]) -> None:
    word = np.dtype(np.uint64)
    ask = interpreter._get_np_dtype

    def numpy_type(type_: Any) -> Any:
        scalar = type_.scalar
        if isinstance(scalar, tl.pointer_type):
            return word
        return found[scalar.name] if scalar.name in found else ask(type_)

    equal = tl.dtype.__eq__

    def same(self: Any, other: Any) -> bool:
        return self is other or bool(equal(self, other))

    interpreter._get_np_dtype = numpy_type
    tl.dtype.__eq__ = same


def _remember_shapes(tl: Any, interpreter: Any, found: dict[str, Any]) -> None:
    block, tensor = tl.block_type, tl.tensor
    describe, make, translate = block.__init__, tensor.__init__, block.to_ir
    blocks: dict[Any, tuple[Any, int]] = {}
    types: dict[Any, Any] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def describe_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([getattr(size, "value", size) for size in shape])
        known = blocks.get(key)
        if known is None:
            describe(self, element_ty, shape)
            blocks[key] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known
        self.name = f"<{self.shape}, {element_ty}>"

    def of_elements(self: Any, scalar: Any) -> Any:
        if scalar.name not in found:
            return block(scalar, self.shape)
        made = types.get(key := (self.shape, scalar.name))
        if made is None:
            made = types[key] = block(scalar, self.shape)
        return made

    def itself(self: Any, builder: Any) -> Any:
        return self if self.element_ty.name in found else translate(self, builder)

    def make_once(self: Any, handle: Any, kind: Any) -> None:
        shape = kind.shape.values if kind.is_block() else ()
        known = shapes.get(key := tuple(shape))
        if known is None:
            make(self, handle, kind)
            shapes[key] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = known

    block.__init__, block.with_element_ty, block.to_ir = describe_once, of_elements, itself
    tensor.__init__ = make_once


def _meet_at_once(tl: Any, interpreter: Any, found: dict[str, Any]) -> None:
    from triton.language.semantic import TritonSemantic as Semantic

    handle, tensor = interpreter.TensorHandle, tl.tensor
    meet, broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value
    cast = Semantic.cast
    limits = {name: np.iinfo(found[name]) for name, kind in _PLAIN.items() if kind is int}

    def constant(self: Any, value: Any, like: Any) -> Any:
        """A number as a tensor like another; None where Triton must say what it becomes."""
        wanted = _PLAIN.get(like.dtype.name)
        whole = type(value) is int
        if wanted is int:
            limit = limits[like.dtype.name]
            fits = whole and limit.min <= value <= limit.max
        else:
            fits = type(value) is float or (whole and -(2**63) <= value < 2**64)
        if wanted is None or not fits:
            return None
        if not like.type.is_block():
            return self.scalar_constant(value, like.dtype)
        data = np.full(like.handle.data.shape, value or 0, found[like.dtype.name])
        return tensor(handle(data, like.dtype), like.type)

    def meet_at_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if left and right:
            if lhs.dtype is rhs.dtype and lhs.dtype.name in _PLAIN:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and left:
            if (made := constant(self, rhs, lhs)) is not None:
                return lhs, made
        elif arithmetic_check and right and (made := constant(self, lhs, rhs)) is not None:
            return made, rhs
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        return meet(self, lhs, rhs, *flags)

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        # Shapes are remembered: those alike are one.
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def cast_once(self: Any, value: Any, goal: Any, rounding: Any = None) -> Any:
        return value if value.dtype is goal.scalar else cast(self, value, goal, rounding)

    Semantic.binary_op_type_checking_impl = meet_at_once
    Semantic.broadcast_impl_value = broadcast_once
    Semantic.cast = cast_once
