"""Loads, stores and atomics that Numba has no spelling for.

Kernels see addresses as int64 and never a NumPy array, so nothing is bounds-checked, wrapped
around or reference-counted, and every loop is a plain one that LLVM vectorises.

Half types have no Numba type: they are converted in registers, f16 by LLVM's `fpext` and
`fptrunc` on `half` (one vector instruction where the CPU has f16c), bf16 by shifts, with one
rounding to nearest even.

Memory carries alias scopes: inputs (IN), outputs (OUT) and a kernel's own scratch (TMP) never
change under each other's hands. That is exactly what validation checked; the one overlap it
allows, an output in the place of `dy`, is safe too, because an element is stored only after the
loads of that element which feed it. So LLVM needs no run-time overlap tests, and bits do not
depend on where arrays happen to lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ....kinds import ElementKind
from .device import inlined
from .layout import LINE

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_HALF = ir.HalfType()
_F32 = ir.FloatType()
_F64 = ir.DoubleType()

_STORAGE = {
    ElementKind.F32: _F32,
    ElementKind.F16: _HALF,
    ElementKind.BF16: _I16,
    ElementKind.F64: _F64,
}
_SCOPES = (
    "in",
    "out",
    "tmp",
    "stage",
    "tile a",
    "tile b",
    "tile c",
    "tile d",
    "tile e",
    "tile f",
    "tile g",
)


def _scoped(builder: Any, instruction: Any, scope: str) -> Any:
    module = builder.module
    domain = module.add_metadata([ir.MetaDataString(module, "gradplan")])
    node = {
        name: module.add_metadata([ir.MetaDataString(module, f"gradplan {name}"), domain])
        for name in _SCOPES
    }
    instruction.set_metadata("alias.scope", module.add_metadata([node[scope]]))
    others = [node[name] for name in _SCOPES if name != scope]
    instruction.set_metadata("noalias", module.add_metadata(others))
    return instruction


def _at(builder: Any, storage: Any, address: Any, i: Any) -> Any:
    return builder.gep(builder.inttoptr(address, storage.as_pointer()), [i])


def _like(kind: Any, scalar: Any) -> Any:
    """`scalar`, or a vector of it as long as the vector type `kind`."""
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


def _const(kind: Any, scalar: Any, value: int) -> Any:
    target = _like(kind, scalar)
    return ir.Constant(target, [value] * kind.count if target is not scalar else value)


def _widen(builder: Any, element: ElementKind, value: Any, to: Any) -> Any:
    """A stored value (or a vector of them) as f32 or f64: always exact."""
    kind = value.type
    if element is ElementKind.BF16:
        wide = builder.zext(value, _like(kind, _I32))
        value = builder.bitcast(builder.shl(wide, _const(kind, _I32, 16)), _like(kind, _F32))
    elif element is ElementKind.F16:
        value = builder.fpext(value, _like(kind, _F32))
    to = _like(kind, to)
    return value if value.type == to else builder.fpext(value, to)


def _odd_f32(builder: Any, value: Any) -> Any:
    """f64 to f32, rounded to odd, so that a second rounding to a half type is the only one.

    To odd: towards zero, and where that was inexact the last bit is set.
    """
    kind = value.type
    near = builder.fptrunc(value, _like(kind, _F32))
    bits = builder.bitcast(near, _like(kind, _I32))
    size = builder.and_(bits, _const(kind, _I32, 0x7FFFFFFF))
    size = builder.fpext(builder.bitcast(size, _like(kind, _F32)), _like(kind, _F64))
    wanted = builder.and_(
        builder.bitcast(value, _like(kind, _I64)), _const(kind, _I64, 0x7FFFFFFFFFFFFFFF)
    )
    wanted = builder.bitcast(wanted, _like(kind, _F64))
    above = builder.fcmp_ordered("ogt", size, wanted)
    inexact = builder.fcmp_ordered("one", size, wanted)
    toward_zero = builder.sub(bits, builder.zext(above, _like(kind, _I32)))
    odd = builder.or_(toward_zero, builder.zext(inexact, _like(kind, _I32)))
    return builder.bitcast(odd, _like(kind, _F32))


def _narrow(builder: Any, element: ElementKind, value: Any) -> Any:
    """f32 or f64 (or a vector of them) as stored: one rounding to nearest even."""
    kind = value.type
    if element is ElementKind.F64:
        return value
    if element is ElementKind.F32:
        to = _like(kind, _F32)
        return value if kind == to else builder.fptrunc(value, to)
    if kind == _like(kind, _F64):
        value = _odd_f32(builder, value)
    if element is ElementKind.F16:
        return builder.fptrunc(value, _like(kind, _HALF))
    bits = builder.lshr(_bf16_upper(builder, value), _const(kind, _I32, 16))
    return builder.trunc(bits, _like(kind, _I16))


def _bf16_upper(builder: Any, value: Any) -> Any:
    """The bits of an f32 (or a vector of them), whose upper half is the bf16 nearest to it."""
    kind = value.type
    bits = builder.bitcast(value, _like(kind, _I32))
    last = builder.and_(builder.lshr(bits, _const(kind, _I32, 16)), _const(kind, _I32, 1))
    rounded = builder.add(bits, builder.add(_const(kind, _I32, 0x7FFF), last))
    quiet = builder.or_(bits, _const(kind, _I32, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, quiet, rounded)


def make_load(element: ElementKind, wide: bool, scope: str = "in") -> Callable[[int, int], float]:
    """`load(address, i)`: element i of an input, as f64 (wide) or f32."""
    storage = _STORAGE[element]
    out, numba_out = (_F64, types.float64) if wide else (_F32, types.float32)

    @intrinsic
    def load(_typing: Any, address: Any, i: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = _at(builder, storage, args[0], args[1])
            value = builder.load(pointer, align=element.size_bytes)
            return _widen(builder, element, _scoped(builder, value, scope), out)

        return numba_out(types.int64, types.int64), emit

    return load


def make_store(
    element: ElementKind, wide: bool, scope: str = "out", *, through_f32: bool = False
) -> Callable[[int, int, float], None]:
    """`store(address, i, value)`: round an f64 (wide) or f32 value once, into element i.

    `through_f32` spares a half the pains of a single rounding: f64 becomes f32 first, which may
    cost it 2⁻²⁴.
    """
    storage = _STORAGE[element]
    numba_in = types.float64 if wide else types.float32

    @intrinsic
    def store(_typing: Any, address: Any, i: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = _at(builder, storage, args[0], args[1])
            value = args[2]
            if through_f32 and wide and element is not ElementKind.F64:
                value = builder.fptrunc(value, _F32)
            value = _narrow(builder, element, value)
            instruction = builder.store(value, pointer, align=element.size_bytes)
            _scoped(builder, instruction, scope)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, numba_in), emit

    return store


def make_pair(scope: str) -> tuple[Any, Any]:
    """`load(address, i)` and `store(address, i, a, b)` of two neighbouring bf16, as f32.

    One word holds both: shifted up it is the first, and but for its lower half the second. So
    neither way moves anything across a vector, as taking them one by one does.
    """
    pair = types.UniTuple(types.float32, 2)
    upper = ir.Constant(_I32, 0xFFFF0000)
    sixteen = ir.Constant(_I32, 16)

    def word_at(builder: Any, args: Any) -> Any:
        return builder.bitcast(_at(builder, _I16, args[0], args[1]), _I32.as_pointer())

    @intrinsic
    def load(_typing: Any, address: Any, i: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            word = _scoped(builder, builder.load(word_at(builder, args), align=2), scope)
            first, second = builder.shl(word, sixteen), builder.and_(word, upper)
            values = [builder.bitcast(bits, _F32) for bits in (first, second)]
            return context.make_tuple(builder, pair, values)

        return pair(types.int64, types.int64), emit

    @intrinsic
    def store(_typing: Any, address: Any, i: Any, a: Any, b: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            first, second = (_bf16_upper(builder, value) for value in args[2:])
            word = builder.or_(builder.lshr(first, sixteen), builder.and_(second, upper))
            _scoped(builder, builder.store(word, word_at(builder, args), align=2), scope)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.float32, types.float32), emit

    return load, store


@intrinsic
def _stream_line(_typing: Any, target: Any, source: Any) -> Any:
    vector = ir.VectorType(_I64, LINE // 8)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[1], vector.as_pointer()), align=LINE)
        _scoped(builder, value, "stage")
        pointer = builder.inttoptr(args[0], vector.as_pointer())
        instruction = builder.store(value, pointer, align=LINE)
        once = builder.module.add_metadata([ir.Constant(_I32, 1)])
        instruction.set_metadata("nontemporal", once)
        _scoped(builder, instruction, "out")
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), emit


def make_copy(element: ElementKind, source_scope: str, target_scope: str) -> Any:
    """`copy(target, source)`: one element, as it is stored."""
    storage = ir.IntType(8 * element.size_bytes)

    @intrinsic
    def copy(_typing: Any, target: Any, source: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            size = element.size_bytes
            value = builder.load(builder.inttoptr(args[1], storage.as_pointer()), align=size)
            _scoped(builder, value, source_scope)
            pointer = builder.inttoptr(args[0], storage.as_pointer())
            _scoped(builder, builder.store(value, pointer, align=size), target_scope)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), emit

    return copy


@intrinsic
def fence(_typing: Any) -> Any:
    """Streamed lines may lag behind other stores: wait for them before telling anyone."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), emit


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Have the line at `address` brought to the second cache."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        how = [ir.Constant(_I32, word) for word in (0, 2, 1)]  # a read, near, of data
        builder.call(function, [builder.inttoptr(args[0], byte), *how])
        return context.get_dummy_value()

    return types.none(types.int64), emit


STAGE_BYTES = 4096


def make_flush(element: ElementKind) -> Any:
    """`flush(stage, address, count)`: move `count` elements from a stage to an output.

    The stage is aligned to a line, and its first element lies in it as far from a line's start as
    `address` does. Whole lines go past the caches, which spares reading what is overwritten and
    leaves the inputs where they are.
    """
    size = element.size_bytes
    copy = make_copy(element, "stage", "out")

    @inlined
    def flush(stage, address, count):
        end = address + size * count
        first, last = (address + LINE - 1) & -LINE, end & -LINE
        shift = stage - (address & -LINE)
        first = min(first, end)
        last = max(first, last)
        for at in range(address, first, size):
            copy(at, at + shift)
        for at in range(first, last, LINE):
            _stream_line(at, at + shift)
        for at in range(last, end, size):
            copy(at, at + shift)

    return flush


def move_line(target: int, source: int) -> None:
    """Copy a line between stages."""
    for word in range(LINE // 8):
        int_store(target, word, int_load(source, word))


def make_trail(element: ElementKind) -> tuple[Any, Any]:
    """`resume` and `leave`: flushes of pieces that follow each other in memory, each ascending.

    A line that two pieces share is written once, whole: what `leave` does not send stays in the
    stage until the next piece completes it. Sent in halves, it would have to be read back: columns
    64 wide take 2 to 5 times as long where arrays do not begin on a line, and NumPy's do not.

    A trail is (stage, left, after): outputs from `left` to `after` wait in this stage's first line.

    - `resume(stage, target, trail)`: before elements are put in the stage for `target`; tells
      where what has to leave begins;
    - `leave(stage, target, count, left)`: after; gives the new trail;
    - to end it, resume at 0, where nothing lies.
    """
    size = element.size_bytes
    flush = make_flush(element)
    move = inlined(move_line)

    @inlined
    def resume(stage, target, trail):
        kept, left, after = trail
        if target != after:
            flush(kept, left, (after - left) // size)
            return target
        if left < after:
            move(stage, kept)
        return left

    @inlined
    def leave(stage, target, count, left):
        after = target + size * count
        cut = max(left, after & -LINE)
        flush(stage, left, (cut - left) // size)
        return stage + (cut & -LINE) - (target & -LINE), cut, after

    return resume, leave


def make_read_back(element: ElementKind) -> Callable[[int, int], float]:
    """`load(address, i)` of what an output holds, as f64: for accumulation."""
    storage = _STORAGE[element]

    @intrinsic
    def load(_typing: Any, address: Any, i: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = _at(builder, storage, args[0], args[1])
            value = builder.load(pointer, align=element.size_bytes)
            return _widen(builder, element, _scoped(builder, value, "out"), _F64)

        return types.float64(types.int64, types.int64), emit

    return load


def _raw(storage: Any, numba_type: Any, scope: str | None) -> tuple[Any, Any]:
    """A load and a store of plain numbers."""
    align = 4 if storage == _I32 else 8

    @intrinsic
    def load(_typing: Any, address: Any, i: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = builder.load(_at(builder, storage, args[0], args[1]), align=align)
            return value if scope is None else _scoped(builder, value, scope)

        return numba_type(types.int64, types.int64), emit

    @intrinsic
    def store(_typing: Any, address: Any, i: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = _at(builder, storage, args[0], args[1])
            instruction = builder.store(args[2], pointer, align=align)
            if scope is not None:
                _scoped(builder, instruction, scope)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, numba_type), emit

    return load, store


def make_tile(name: str) -> tuple[Any, Any]:
    """A load and a store of doubles in one of a kernel's tiles ("a" to "g")."""
    return _raw(_F64, types.float64, f"tile {name}")


int_load, int_store = _raw(_I64, types.int64, None)
int32_load, _ = _raw(_I32, types.int32, None)
float_load, float_store = _raw(_F64, types.float64, None)
meta, _ = _raw(_I64, types.int64, "in")
meta_float, _ = _raw(_F64, types.float64, "in")


def make_scratch(count: int) -> Callable[[], int]:
    """`scratch()`: the address of `count` doubles on this thread's stack."""

    @intrinsic
    def scratch(_typing: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            with builder.goto_entry_block():
                block = builder.alloca(ir.ArrayType(_F64, count))
                block.align = 64
            return builder.ptrtoint(block, _I64)

        return types.int64(), emit

    return scratch


def _bitcast(to: Any, source: Any, target: Any) -> Any:
    """The same bits as another type."""

    @intrinsic
    def cast(_typing: Any, value: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], to)

        return target(source), emit

    return cast


bits_of_f32 = _bitcast(_I32, types.float32, types.int32)
f32_of_bits = _bitcast(_F32, types.int32, types.float32)
bits_of_f64 = _bitcast(_I64, types.float64, types.int64)
f64_of_bits = _bitcast(_F64, types.int64, types.float64)


@intrinsic
def atomic_add(_typing: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address`; gives the old value."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_load(_typing: Any, address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def atomic_store(_typing: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        # An exchange, not a plain store: it orders the caller's later look at `active`.
        builder.atomic_rmw("xchg", pointer, args[1], "seq_cst")
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), emit


@intrinsic
def call_kernel(_typing: Any, function: Any, call: Any, slot: Any, lo: Any, hi: Any) -> Any:
    """Call a compiled kernel by the address of its native entry."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        byte = ir.IntType(8)
        kind = ir.FunctionType(_I32, [byte.as_pointer()] * 2 + [_I64] * 4)
        with builder.goto_entry_block():
            unused = builder.alloca(ir.ArrayType(byte, 64))
        pointer = builder.bitcast(unused, byte.as_pointer())
        entry = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(entry, [pointer, pointer, *values[1:]])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5), emit


@intrinsic
def pause(_typing: Any) -> Any:
    """Tell the CPU that this is a waiting loop."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if builder.module.triple.startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.none(), emit


yield_thread = types.ExternalFunction("sched_yield", types.int32())


def make_tuple_memory(count: int, scope: str = "tmp", wide: bool = True) -> tuple[Any, Any]:
    """`load(address, i, pitch)` and `store(...)` of `count` numbers, one every `pitch` elements.

    A state of several numbers for many lanes lies as one array per number, so that lanes are
    contiguous and the loops over them vectorise.
    """
    storage, align = (_F64, 8) if wide else (_F32, 4)
    kind = types.UniTuple(types.float64 if wide else types.float32, count)

    def place(builder: Any, args: Any, k: int) -> Any:
        base = _at(builder, storage, args[0], args[1])
        return builder.gep(base, [builder.mul(args[2], ir.Constant(_I64, k))]) if k else base

    @intrinsic
    def load(_typing: Any, address: Any, i: Any, pitch: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            values = [
                _scoped(builder, builder.load(place(builder, args, k), align=align), scope)
                for k in range(count)
            ]
            return context.make_tuple(builder, kind, values)

        return kind(types.int64, types.int64, types.int64), emit

    @intrinsic
    def store(_typing: Any, address: Any, i: Any, pitch: Any, values: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            for k in range(count):
                value = builder.extract_value(args[3], k)
                pointer = place(builder, args, k)
                _scoped(builder, builder.store(value, pointer, align=align), scope)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.int64, kind), emit

    return load, store


def make_tuple_cast(count: int, wide: bool) -> Any:
    """A tuple of f64 as f64 (wide) or f32."""
    source = types.UniTuple(types.float64, count)
    target = types.UniTuple(types.float64 if wide else types.float32, count)

    @intrinsic
    def cast(_typing: Any, values: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            parts = [builder.extract_value(args[0], k) for k in range(count)]
            if not wide:
                parts = [builder.fptrunc(part, _F32) for part in parts]
            return context.make_tuple(builder, target, parts)

        return target(source), emit

    return cast


LANES = 8
"""Rows that a transposing tile takes at a time."""


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight, turned round: three rounds of interleaving halves."""
    for span in (4, 2, 1):
        turned = list(rows)
        for i in range(LANES):
            if i & span:
                continue
            a, b = rows[i], rows[i + span]
            low, high = [], []
            for k in range(LANES):
                if k & span:
                    low.append(LANES + k - span)
                    high.append(LANES + k)
                else:
                    low.append(k)
                    high.append(k + span)
            mask = ir.VectorType(_I32, LANES)
            turned[i] = builder.shuffle_vector(a, b, ir.Constant(mask, low))
            turned[i + span] = builder.shuffle_vector(a, b, ir.Constant(mask, high))
        rows = turned
    return rows


def make_transposers(element: ElementKind, tile_name: str) -> tuple[Any, Any]:
    """Moves of 8 steps of 8 rows between memory, where steps are neighbours, and a tile.

    `fill(tile, address, row_stride, back)` and `empty(...)`: the address of the first row's first
    step; `back` is 0 where steps ascend in memory, 1 where they descend.
    """
    storage = _STORAGE[element]
    vector = ir.VectorType(storage, LANES)
    doubles = ir.VectorType(_F64, LANES)
    size = element.size_bytes
    scope = f"tile {tile_name}"

    def row(builder: Any, args: Any, j: int) -> Any:
        step = builder.mul(args[2], ir.Constant(_I64, j * size))
        shift = builder.mul(args[3], ir.Constant(_I64, (LANES - 1) * size))
        address = builder.sub(builder.add(args[1], step), shift)
        return builder.inttoptr(address, vector.as_pointer())

    def line(builder: Any, args: Any, k: int) -> Any:
        # Line k of the tile, counted from the other end where steps descend.
        ends = ir.Constant(_I64, k), ir.Constant(_I64, LANES - 1 - k)
        index = builder.select(builder.icmp_signed("==", args[3], ir.Constant(_I64, 0)), *ends)
        offset = builder.mul(index, ir.Constant(_I64, LANES * 8))
        return builder.inttoptr(builder.add(args[0], offset), doubles.as_pointer())

    @intrinsic
    def fill(_typing: Any, tile: Any, address: Any, row_stride: Any, back: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows = []
            for j in range(LANES):
                value = _scoped(builder, builder.load(row(builder, args, j), align=size), "in")
                rows.append(_widen(builder, element, value, _F64))
            for k, values in enumerate(_transposed(builder, rows)):
                _scoped(builder, builder.store(values, line(builder, args, k), align=8), scope)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), emit

    @intrinsic
    def empty(_typing: Any, tile: Any, address: Any, row_stride: Any, back: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            lines = [
                _scoped(builder, builder.load(line(builder, args, k), align=8), scope)
                for k in range(LANES)
            ]
            for j, values in enumerate(_transposed(builder, lines)):
                stored = _narrow(builder, element, values)
                _scoped(builder, builder.store(stored, row(builder, args, j), align=size), "out")
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), emit

    return fill, empty


def make_turn(element: ElementKind, source_scope: str, target_scope: str, *, inwards: bool) -> Any:
    """`turn(tile, tile_pitch, address, pitch, back)`: 8 steps of 8 lanes, as they are stored, from
    memory, where steps are neighbours, to a tile, where lanes are (inwards), or from the tile.

    Pitches are in bytes, between steps of the tile and between lanes in memory. The addresses are
    the first step's of the first lane; where `back` is 1, steps descend in memory.
    """
    size = element.size_bytes
    vector = ir.VectorType(ir.IntType(8 * size), LANES)

    def lane(builder: Any, args: Any, j: int) -> Any:
        shift = builder.mul(args[4], ir.Constant(_I64, (LANES - 1) * size))
        start = builder.add(args[2], builder.mul(args[3], ir.Constant(_I64, j)))
        return builder.inttoptr(builder.sub(start, shift), vector.as_pointer())

    def step(builder: Any, args: Any, k: int) -> Any:
        # Counted from the other end where steps descend.
        ahead = builder.icmp_signed("==", args[4], ir.Constant(_I64, 0))
        last = ir.Constant(_I64, LANES - 1)
        first = builder.select(ahead, args[0], builder.add(args[0], builder.mul(args[1], last)))
        pitch = builder.select(ahead, args[1], builder.neg(args[1]))
        place = builder.add(first, builder.mul(pitch, ir.Constant(_I64, k)))
        return builder.inttoptr(place, vector.as_pointer())

    source, target = (lane, step) if inwards else (step, lane)

    @intrinsic
    def turn(_typing: Any, tile: Any, tile_pitch: Any, address: Any, pitch: Any, back: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows = []
            for j in range(LANES):
                value = builder.load(source(builder, args, j), align=size)
                rows.append(_scoped(builder, value, source_scope))
            for j, value in enumerate(_transposed(builder, rows)):
                instruction = builder.store(value, target(builder, args, j), align=size)
                _scoped(builder, instruction, target_scope)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), emit

    return turn
