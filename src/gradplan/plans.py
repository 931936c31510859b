"""Plans: the answer to a descriptor.

`select` asks whether and how a problem can be run; `validate` checks one call's arrays;
`bind` fixes the kernel variant for them; `run` does all of it. What depends on the arrays'
layouts alone (most of validation, and the variant) is remembered by them, so that a call like an
earlier one has only its addresses to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from operator import attrgetter
from typing import Any, ClassVar, Self

import numpy as np

from .again import Recent
from .args import (
    BinaryParamBackwardArgs,
    EmbeddingBackwardArgs,
    ReduceBackwardArgs,
    ScanBackwardArgs,
    SoftmaxBackwardArgs,
)
from .backends import Backend, Program, find
from .backends.gpu.streams import (
    OwnersStreams,
    Streams,
    allocate,
    settle,
    streams_of,
    workspace_memory,
)
from .descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    Operand,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from .errors import GradPlanError, InvalidProblem, MisalignedOperand, Unsupported, WorkspaceTooSmall
from .explanation import Explanation, added_to_bytes, fewest_bytes
from .geometry import c_strides, told_strides
from .overlap import apart, check_overlaps
from .registry import MAX_RANK
from .sku import KernelSku, PlanPreference, PrecisionGuarantee
from .views import (
    View,
    address_of,
    addresses_of,
    count_write,
    owner_left,
    stored_bytes,
    viewers,
    write_counter,
)

__all__ = [
    "BinaryParamBackwardPlan",
    "BoundLaunch",
    "EmbeddingBackwardPlan",
    "Plan",
    "ReduceBackwardPlan",
    "ScanBackwardPlan",
    "SoftmaxBackwardPlan",
]

_ANY = PlanPreference()
_WORKSPACE_ALIGNMENT = 256
# Kernels count elements and bytes in signed 64-bit words.
_MOST = 2**63 - 1
# Variants remembered by a plan, and plans by the process; both are small.
_PROGRAM_LIMIT = 256
_PLAN_LIMIT = 4096

Views = dict[str, View]
_layout_of = attrgetter("layout")


def _device_name(device: Any) -> str:
    name = str(device).lower()
    if name == "cuda":  # the current one at this moment
        from .backends.gpu.launch import current_device

        return f"cuda:{current_device()}"
    return "cpu" if name == "cpu:0" else name


class BoundLaunch:
    """A launch for certain arrays: validated once, kept alive, called as often as you like.

    It owns its workspace, so one run may be in flight at a time.
    """

    __slots__ = ("_count", "_keep", "_launch", "_plan", "_program", "_streams")

    def __init__(
        self,
        plan: Plan,
        program: Program,
        launch: Callable[..., None],
        keep: tuple[Any, ...],
        streams: Streams | OwnersStreams | None,
    ) -> None:
        self._plan = plan
        self._program = program
        self._launch = launch
        self._keep = keep
        self._streams = streams
        views: Views = keep[0]
        outputs = [views[name].owner for name in plan._outputs if name in views]
        self._count = write_counter(outputs)

    def __call__(self, stream: Any = None) -> None:
        """Run it, on a GPU on the stream that is current now or on the one given.

        On the CPU `stream` is ignored and the work is done on return.
        """
        streams = self._streams
        if streams is None:
            self._launch()
        else:
            self._launch(streams.current() if stream is None else streams.handle(stream))
        if self._count is not None:
            self._count()

    @property
    def sku(self) -> KernelSku:
        """The kernel that runs for these very arrays."""
        return self._plan._sku_of(self._program)

    @property
    def workspace_size(self) -> int:
        """The bytes of workspace that these very arrays need."""
        return self._program.workspace_bytes

    def explain(self) -> str:
        """What runs and why, for these very arrays."""
        return self.explanation().text()

    def explanation(self) -> Explanation:
        """The same as data."""
        views: Views = self._keep[0]
        strides = {name: lent.strides for name, lent in views.items()}
        return self._plan._explanation(self._program, strides, "these arrays")

    def __repr__(self) -> str:
        return f"<BoundLaunch {self.sku}>"


class Plan:
    """A selected kernel family for one descriptor; immutable, shared and thread-safe."""

    _descriptor_type: ClassVar[type]
    _args_type: ClassVar[type]
    _same: ClassVar[frozenset[str]] = frozenset({"dy"})
    _made = False

    def __init__(self, descriptor: Any, device: str, preference: PlanPreference) -> None:
        self._desc = descriptor
        self._device = device
        self._preference = preference
        self._backend: Backend = find(device, preference)
        self._operands: tuple[Operand, ...] = descriptor.operands
        self._me = type(self).__name__
        self._arguments = [(op, op.name, f"{self._me}: {op.name}") for op in self._operands]
        self._outputs = tuple(op.name for op in self._operands if op.output)
        self._check_support()
        self._guarantee = self._backend.guarantee(descriptor)
        self._workspace_size = self._backend.workspace_bound(descriptor)
        if self._workspace_size > _MOST:
            raise InvalidProblem(
                f"{self._me}: {descriptor.op} of this shape needs a workspace of more bytes than "
                "63 bits can count"
            )
        limit = preference.max_workspace_bytes
        if limit is not None and self._workspace_size > limit:
            self._backend = self._backend.frugal()
            self._workspace_size = self._backend.workspace_bound(descriptor)
        if limit is not None and self._workspace_size > limit:
            raise Unsupported(
                f"{self._me}: {descriptor.op} of this shape may need {self._workspace_size} bytes "
                f"of workspace, above max_workspace_bytes={limit}"
            )
        self._programs: dict[Any, Program] = {}
        self._examined: dict[Any, Program] = {}
        self._streams: dict[type, Streams] = {}
        self._recent = Recent()
        self._arrays_of: Any = attrgetter(*(op.name for op in self._operands))
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._made:  # all who asked this question share the plan
            raise FrozenInstanceError(f"cannot assign to {name!r} of a {self._me}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name!r} of a {self._me}")

    def __reduce__(self) -> tuple[Any, ...]:
        # What it remembers points into memory; the question is enough to find it again.
        return _shared_plan, (type(self), self._desc, self._device, self._preference)

    @classmethod
    def select(
        cls, descriptor: Any, *, device: Any = "cpu", preference: PlanPreference | None = None
    ) -> Self:
        """The plan for a problem on a device; equal questions share one plan.

        Raises `Unsupported` where nothing can run it, and says why.
        """
        if not isinstance(descriptor, cls._descriptor_type):
            raise InvalidProblem(
                f"{cls.__name__}.select: expected a {cls._descriptor_type.__name__}, "
                f"got {type(descriptor).__name__}"
            )
        if preference is None:
            preference = _ANY
        elif not isinstance(preference, PlanPreference):
            raise InvalidProblem(
                f"{cls.__name__}.select: preference must be a PlanPreference, got {preference!r}"
            )
        plan: Self = _shared_plan(cls, descriptor, _device_name(device), preference)
        return plan

    def _check_support(self) -> None:
        desc = self._desc
        shape, _ = desc.shape_and_axes
        if len(shape) > MAX_RANK:
            raise Unsupported(f"{self._me}: rank {len(shape)} is above the limit of {MAX_RANK}")
        for operand in self._operands:
            if max(operand.shape) > _MOST or operand.size_bytes > _MOST:
                raise InvalidProblem(
                    f"{self._me}: {operand.name} of shape {operand.shape} has more elements or "
                    "bytes than 63 bits can count"
                )
        allowed = desc.spec.ties
        if allowed and desc.ties not in allowed:
            names = ", ".join(rule.value for rule in allowed)
            raise Unsupported(f"{self._me}: {desc.op} takes ties {names}; got {desc.ties.value}")

    @property
    def descriptor(self) -> Any:
        """The problem this plan answers."""
        return self._desc

    @property
    def device(self) -> str:
        """Where its arrays must be."""
        return self._device

    @property
    def preference(self) -> PlanPreference:
        """What was insisted on."""
        return self._preference

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """The written guarantee, for any layout of the arrays."""
        return self._guarantee

    @property
    def workspace_size(self) -> int:
        """Bytes of workspace that are enough for any layout."""
        return self._workspace_size

    @property
    def sku(self) -> KernelSku:
        """The kernel that runs for C-contiguous arrays with every optional input given."""
        return self._sku_of(self._contiguous_program())

    def explain(self) -> str:
        """What runs and why, for C-contiguous arrays with every optional input given."""
        return self.explanation().text()

    def explanation(
        self,
        strides: Mapping[str, tuple[int, ...]] | None = None,
        arrays: str = "C-contiguous arrays",
    ) -> Explanation:
        """The same as data; or for arrays with these strides, in elements.

        An array that `strides` does not name is taken as not given. `arrays` is how the text calls
        them.
        """
        if strides is None:
            strides = self._contiguous_strides()
        for operand in self._operands:
            if operand.name in strides:
                if len(strides[operand.name]) != len(operand.shape):
                    self._disagrees(operand, "rank", len(operand.shape), len(strides[operand.name]))
            else:
                self._check_absent(operand)
        # In the order of the operands, which the programs are remembered by.
        seen = {
            operand.name: told_strides(operand.shape, strides[operand.name])
            for operand in self._operands
            if operand.name in strides
        }
        return self._explanation(self._program(seen), seen, arrays)

    def validate(self, args: Any) -> None:
        """Raise what is wrong with these arguments; touch nothing."""
        self._prepare(self._views(args))

    def can_implement(self, args: Any) -> bool:
        """Whether `validate` would pass."""
        try:
            self.validate(args)
        except GradPlanError:
            return False
        return True

    def bind(self, args: Any, *, workspace: Any = None) -> BoundLaunch:
        """Fix the kernel variant for these very arrays, and keep them alive.

        A workspace of `launch.workspace_size` bytes is enough, as an earlier launch for such arrays
        tells it; `plan.workspace_size` always is. Without one the launch owns a workspace for any
        stream: on a GPU that waits for what the current stream has to do.
        """
        views = self._views(args)
        program = self._prepare(views)
        streams = self._streams_of(views)
        if streams is None:
            suited = getattr(program, "suited", None)  # the GPU's, in its interpreter
            if suited is not None:
                program = suited(addresses_of(views))
            needed = program.workspace_bytes
            address, keep = self._workspace(needed, workspace, views, least=needed)
            launch = program.bind(views, address)
            return BoundLaunch(self, program, launch, (views, args, keep), None)
        handle = streams.current()
        gpu: Any = program
        gpu = gpu.suited(addresses_of(views))
        needed = gpu.workspace_bytes
        address, keep = self._workspace(needed, workspace, views, handle, least=needed)
        if workspace is None and keep is not None:
            settle(streams.device, handle)
        bound = gpu.bind(views, address, handle)
        launch = bound.__call__  # a method is called faster than an object that has it
        own = (keep if workspace is None else None, getattr(bound, "owned", None))
        owned = [memory for memory in own if memory is not None]
        used = OwnersStreams(streams, owned, handle) if owned else streams
        return BoundLaunch(self, gpu, launch, (views, args, keep), used)

    def run(self, args: Any, *, stream: Any = None, workspace: Any = None) -> None:
        """Validate and run. Without a workspace the plan provides one for the call."""
        arrays = again = None
        if self._backend.device is not None and type(args) is self._args_type:
            arrays = self._arrays_of(args)
            again = self._recent.find(arrays)
            if again is not None and again.launch(arrays, stream, workspace):
                return
        views = self._views(args)
        self._run_views(views, workspace, stream=stream)
        if arrays is not None and again is None:
            self._recent.note(self, views, arrays)
        for name in self._outputs:
            if name in views:
                count_write(views[name].owner)

    def _run_views(
        self,
        views: Views,
        workspace: Any = None,
        index_shape: tuple[int, ...] | None = None,
        stream: Any = None,
    ) -> None:
        program = self._prepare(views, index_shape)
        needed = program.workspace_bytes
        handle = address = 0
        streams = self._streams_of(views)
        if streams is not None:
            handle = streams.current() if stream is None else streams.handle(stream)
        if needed or workspace is not None:
            # The allocator may hand the memory out again at once: to this stream alone.
            address, _keep = self._workspace(needed, workspace, views, handle)
        program.run(views, address, handle)

    def _streams_of(self, views: Views) -> Streams | None:
        """The streams of the arrays' own library; None on the CPU."""
        device = self._backend.device
        if device is None:
            return None
        owner = views[self._operands[0].name].owner
        streams = self._streams.get(type(owner))
        if streams is None:
            streams = self._streams[type(owner)] = streams_of(device, owner)
        return streams

    def _views(self, args: Any) -> Views:
        """Views of the arguments, in the order of the operands."""
        if type(args) is not self._args_type and not isinstance(args, self._args_type):
            raise InvalidProblem(
                f"{self._me}: expected {self._args_type.__name__}, got {type(args).__name__}"
            )
        views = {}
        for operand, name, label in self._arguments:
            array = getattr(args, name)
            if array is None:
                self._check_absent(operand)
            else:
                views[name] = viewers[type(array)](array, label)
        return views

    def _check_absent(self, operand: Operand) -> None:
        if operand.required:
            saved = operand.name in ("x", "y")
            role = "output" if operand.output else "saved tensor" if saved else "input"
            raise InvalidProblem(
                f"{self._me}: {self._desc.op} needs {operand.name}, and this {role} is missing"
            )

    def _check(self, operand: Operand, lent: View, shape: tuple[int, ...]) -> None:
        if lent.shape != shape:
            self._disagrees(operand, "shape", shape, lent.shape)
        if lent.dtype is not operand.dtype:
            self._disagrees(operand, "type", operand.dtype.value, lent.dtype.value)
        if lent.device != self._device:
            self._disagrees(operand, "device", self._device, lent.device)
        if operand.output and not lent.writable:
            raise self._read_only(operand.name)

    def _disagrees(self, operand: Operand, what: str, expected: Any, came: Any) -> None:
        raise InvalidProblem(f"{self._me}: {operand.name} must have {what} {expected}, got {came}")

    def _read_only(self, name: str) -> InvalidProblem:
        return InvalidProblem(
            f"{self._me}: the output {name} is read-only (as every array of JAX is: functions "
            "return a new one, without out=)"
        )

    def _prepare(self, views: Views, index_shape: tuple[int, ...] | None = None) -> Program:
        """Validate, and give the program for these layouts.

        `views` follow the order of the operands. Indices of higher rank (`index_shape`), which
        functions pass, stand for all of an embedding's leading axes.
        """
        if len(views) == len(self._operands):
            key: tuple[Any, ...] = (index_shape, *map(_layout_of, views.values()))
        else:
            key = (index_shape, *views, *map(_layout_of, views.values()))
        program = self._examined.get(key)
        if program is None:
            program = self._examine(views, index_shape)
            if len(self._examined) >= _PROGRAM_LIMIT:
                self._examined.clear()
            self._examined[key] = program
        for name in self._outputs:
            out = views.get(name)
            if out is None:
                continue
            if out.layout.writable is not True and not out.writable:
                raise self._read_only(name)
            if not apart(out, views, self._same):
                self._check_overlaps(views)
        return program

    def _examine(self, views: Views, index_shape: tuple[int, ...] | None) -> Program:
        """All that depends on layouts alone."""
        for operand in self._operands:
            lent = views.get(operand.name)
            if lent is None:
                self._check_absent(operand)
                continue
            shape = operand.shape
            if index_shape is not None and not operand.output:
                shape = index_shape + shape[1:]
            self._check(operand, lent, shape)
        self._check_overlaps(views)
        return self._program({name: lent.strides for name, lent in views.items()}, index_shape)

    def _check_overlaps(self, views: Views) -> None:
        inputs = [(name, lent) for name, lent in views.items() if name not in self._outputs]
        outputs = [(name, views[name]) for name in self._outputs if name in views]
        check_overlaps(self._me, inputs, outputs, self._same)

    def _program(
        self, strides: Mapping[str, tuple[int, ...]], index_shape: tuple[int, ...] | None = None
    ) -> Program:
        key = (tuple(strides), tuple(strides.values()), index_shape)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _PROGRAM_LIMIT:
                self._programs.clear()
            program = self._backend.prepare(self._desc, strides, index_shape)
            self._programs[key] = program
        return program

    def _contiguous_program(self) -> Program:
        return self._program(self._contiguous_strides())

    def _contiguous_strides(self) -> dict[str, tuple[int, ...]]:
        shapes = {operand.name: operand.shape for operand in self._operands}
        return {name: told_strides(shape, c_strides(shape)) for name, shape in shapes.items()}

    def _workspace(
        self, needed: int, given: Any, views: Views, stream: int = 0, least: int | None = None
    ) -> tuple[int, Any]:
        """The address of a workspace, and what keeps it alive.

        One that is given has at least so many bytes; by default as many as any layout needs, so
        that what does for one call of a plan does for all.
        """
        if given is None:
            if needed == 0:
                return 0, None
            if self._backend.device is not None:
                memory = allocate(needed, self._backend.device, stream)
                return memory.data_ptr(), memory
            own = np.empty(needed + _WORKSPACE_ALIGNMENT, np.uint8)
            address = address_of(own)
            return -(-address // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT, own
        least = self._workspace_size if least is None else least
        return self._checked_workspace(given, views, max(least, needed)), given

    def _checked_workspace(self, given: Any, views: Views, least: int) -> int:
        if self._backend.device is None:
            address, size = self._host_workspace(given)
        else:
            address, size = workspace_memory(self._me, given, self._backend.device)
        if size < least:
            raise WorkspaceTooSmall(
                least, size, f"{self._me}: workspace needs {least} bytes, got {size}"
            )
        if address % _WORKSPACE_ALIGNMENT and size:
            raise MisalignedOperand(
                f"{self._me}: workspace must be aligned to {_WORKSPACE_ALIGNMENT} bytes, "
                f"got address {address:#x}"
            )
        for name, lent in views.items():
            lo, hi = lent.extent()
            if lo < address + size and address < hi:
                raise InvalidProblem(f"{self._me}: workspace overlaps {name}")
        return address

    def _host_workspace(self, given: Any) -> tuple[int, int]:
        array = given
        if not isinstance(array, np.ndarray):
            try:
                array = np.from_dlpack(given)
            except Exception as error:
                raise InvalidProblem(
                    f"{self._me}: workspace must be a uint8 array on {self._device}, "
                    f"got {type(given).__name__}"
                ) from error
        if array.dtype != np.uint8 or not array.flags.c_contiguous or array.ndim != 1:
            raise InvalidProblem(
                f"{self._me}: workspace must be a contiguous uint8 array of rank 1, "
                f"got {array.dtype} of shape {array.shape}"
            )
        if not array.flags.writeable:
            raise InvalidProblem(f"{self._me}: workspace is read-only")
        address, size = address_of(array), array.nbytes
        if array is not given:
            size = min(size, stored_bytes(given))
        beyond = owner_left(array, address, address + size)
        if beyond is not None:  # what NumPy's `as_strided` hands out
            first, end, _ = beyond
            size = max(0, end - address) if first <= address else 0
        return address, size

    def _sku_of(self, program: Program) -> KernelSku:
        desc = self._desc
        return KernelSku(
            category=desc.category,
            op=desc.op,
            element=desc.element,
            index=getattr(desc, "index", None),
            layout=program.layout,
            arch=self._backend.arch,
            backend=self._backend.kind,
            variant=program.variant,
            precision_guarantee=self._guarantee,
        )

    def _explanation(
        self, program: Program, strides: Mapping[str, tuple[int, ...]], arrays: str
    ) -> Explanation:
        desc = self._desc
        inputs = [op for op in self._operands if not op.output and op.name in strides]
        read = sum(op.size_bytes * program.reads.get(op.name, 1) for op in inputs)
        fewest_read, written = fewest_bytes(desc, strides)
        return Explanation(
            arrays=arrays,
            formula=("dx = " if "dx" in self._outputs else "") + desc.spec.formula,
            engine=desc.spec.engine.value,
            sku=self._sku_of(program),
            why=program.why,
            others=self._backend.others(desc, strides, program.variant),
            read=read + added_to_bytes(desc),
            written=written,
            fewest_read=fewest_read,
            fewest_written=written,
            workspace=program.workspace_bytes,
            workspace_bound=self._workspace_size,
        )

    def __repr__(self) -> str:
        return f"<{self._me} {self._desc.op} {self._desc.element.value} on {self._device}>"


_plans: dict[Any, Any] = {}


def _shared_plan(cls: Any, desc: Any, device: str, preference: PlanPreference) -> Any:
    key = (cls, desc, device, preference)
    plan = _plans.get(key)
    if plan is None:
        plan = cls(desc, device, preference)
        if len(_plans) >= _PLAN_LIMIT:
            _plans.clear()
        # Two threads may have made one each: both get the first that was put here.
        plan = _plans.setdefault(key, plan)
    return plan


def forget_plans() -> None:
    """Select every plan anew from now on; those in hand stay as they are."""
    _plans.clear()


class SoftmaxBackwardPlan(Plan):
    """softmax: dx = y · (dy − Σ y·dy); log-softmax: dx = dy − exp(y) · Σ dy."""

    _descriptor_type = SoftmaxBackwardDescriptor
    _args_type = SoftmaxBackwardArgs


class BinaryParamBackwardPlan(Plan):
    """lerp: da = (1 − w)·dy, db = w·dy; an output that is None is skipped."""

    _descriptor_type = BinaryParamBackwardDescriptor
    _args_type = BinaryParamBackwardArgs


class ScanBackwardPlan(Plan):
    """Scans: S[k] = dy[k] + c[k]·S[k+1], run from the far end."""

    _descriptor_type = ScanBackwardDescriptor
    _args_type = ScanBackwardArgs


class ReduceBackwardPlan(Plan):
    """Reductions, with `dy` and `y` in keepdim form."""

    _descriptor_type = ReduceBackwardDescriptor
    _args_type = ReduceBackwardArgs


class EmbeddingBackwardPlan(Plan):
    """dweight[indices[n]] += dout[n]; indices outside the table or equal to padding are skipped."""

    _descriptor_type = EmbeddingBackwardDescriptor
    _args_type = EmbeddingBackwardArgs
