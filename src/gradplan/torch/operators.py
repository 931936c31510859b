"""`torch.ops.gradplan`: one operator for each kind of the registry, the gradient of that kind.

They are what `torch.compile`, `vmap` and second-order gradients see. Plain eager code goes
straight to the kernels (`Operator.gradient`), which costs no second trip through the dispatcher.

A second-order gradient differentiates the operator's `formula`: the same gradient written in
torch's own differentiable operators. Its derivatives are used, never its values, but for tangents
of forward-mode differentiation. log-cumsum-exp states its second order itself (`_LogScan`), for
which there is one operator more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, ClassVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from ..backends.gpu.maps import is_extreme
from ..descriptors import (
    BinaryParamBackwardDescriptor,
    EmbeddingBackwardDescriptor,
    ReduceBackwardDescriptor,
    ScanBackwardDescriptor,
    SoftmaxBackwardDescriptor,
)
from ..errors import InvalidProblem
from ..functions import _merged
from ..kinds import (
    BinaryKind,
    ElementKind,
    IndexKind,
    Named,
    OpCategory,
    ReduceKind,
    ScanKind,
    TieRule,
)
from ..plans import (
    BinaryParamBackwardPlan,
    EmbeddingBackwardPlan,
    ReduceBackwardPlan,
    ScanBackwardPlan,
    SoftmaxBackwardPlan,
)
from ..registry import KINDS, KindSpec, Need
from ..views import reshape_view
from .formulas import FORMULAS, kept, pull
from .kernels import Asked, launch, prepare, views_of
from .nodes import MAX_RANK

__all__ = ["OPERATORS", "Operator"]

_library = torch.library.Library("gradplan", "DEF")
Arrays = dict[str, Tensor]
Formula = Callable[..., Any]
# Argument lists that were checked; programs use few.
_MEMORY = 4096


class Operator:
    """The gradient of one kind: its tensors first, then what describes the problem.

    A family says how its arguments are written in a schema, which outputs it allocates, which
    plan it asks for, and where a batch dimension goes.
    """

    scalars: ClassVar[str]
    result: ClassVar[str] = "Tensor"
    made: ClassVar[str] = "dx"
    differentiable: ClassVar[int] = 2
    """How many of the first tensors: dy, and what stands next; where that is x, the formula takes
    y for a function of x."""

    def __init__(self, spec: KindSpec, formula: Formula) -> None:
        self.spec = spec
        self.formula = formula
        self.tensors = self._tensors()
        self.count = len(self.tensors)
        self.names = (*self.tensors, self.made)
        self._met: set[Any] = set()
        self.op: Any = None
        """The registered operator."""
        self.twice: Any = None
        """The same for function transforms."""

    def _tensors(self) -> tuple[str, ...]:
        needs = {"x": self.spec.x, "y": self.spec.y}
        return ("dy", *(name for name, need in needs.items() if need is not Need.NO))

    @property
    def schema(self) -> str:
        """How the operator is declared."""
        optional = {"x": self.spec.x, "y": self.spec.y}
        tensors = (
            f"Tensor{'?' if optional.get(name) is Need.OPTIONAL else ''} {name}"
            for name in self.tensors
        )
        return f"{self.spec.function}({', '.join((*tensors, self.scalars))}) -> {self.result}"

    def outputs(self, *args: Any) -> Any:
        """Fresh outputs, one or a tuple; their strides follow from those of the arguments.

        A gradient is laid out like x, else like y, else like dy: what has no gaps keeps its order
        of axes, which is what torch expects of the gradient of a parameter.
        """
        return torch.empty_like(args[min(1, self.count - 1)])

    def params(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the plan must be told besides the arrays, in a form that can be looked up."""
        return args[self.count :]

    def ask(self, arrays: Arrays, params: tuple[Any, ...]) -> Asked:
        """The plan for these arrays."""
        raise NotImplementedError

    def rank(self, tensors: list[Any], rest: tuple[Any, ...]) -> int:
        """The axes of a problem whose tensors have a batch dimension."""
        return max(int(tensor.dim()) for tensor in tensors if tensor is not None)

    def batched(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        """The result, and its batch dimensions, for tensors whose dimension 0 is the batch."""
        raise NotImplementedError

    def run(self, *args: Any, keep: bool = True) -> Any:
        """The gradient of plain tensors that belong together, by the kernels; `keep` as in
        `kernels.launch`."""
        made = self.outputs(*args)
        tensors = args[: self.count]
        params = self.params(args)
        strides = [None if t is None else t.stride() for t in tensors]
        # The strides of the output follow from those of the inputs.
        key = (self, params, args[0].shape, made.shape, *strides, made.dtype, made.get_device())
        launch(key, self, self.names, (*tensors, made), params, keep)
        return made

    def checked(self, *args: Any) -> Any:
        """The same, for any caller: nothing is taken for granted."""
        tensors = self.on_one_device(args)
        facts = (*((t.shape, t.stride(), t.dtype) for t in tensors), self.params(args))
        if facts not in self._met:
            self.check(*args)
            if len(self._met) >= _MEMORY:
                self._met.clear()
            self._met.add(facts)
        return self.run(*args, keep=False)

    def faked(self, *args: Any) -> Any:
        """The same of tensors without data."""
        self.on_one_device(args)
        return self.outputs(*args)

    def on_one_device(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The tensors given, which must be on one device."""
        tensors = [tensor for tensor in args[: self.count] if tensor is not None]
        if len({tensor.device for tensor in tensors}) > 1:
            names = ", ".join(str(tensor.device) for tensor in tensors)
            raise InvalidProblem(f"{self.spec.function}: expected one device, got {names}")
        return tensors

    def check(self, *args: Any) -> None:
        """Raise what is wrong with the arguments."""
        tensors = (*args[: self.count], self.outputs(*args))
        prepare(self, self.names, tensors, self.params(args))

    def gradient(self, *args: Any, run: Callable[..., Any] | None = None) -> Any:
        """The gradient, by the shortest way that what surrounds the call allows.

        `run`: what runs for plain tensors where somebody knows better than our own.
        """
        if torch.compiler.is_compiling():
            return self.op(*args)
        if forward_ad._current_level >= 0:  # tangents go through torch's operators alone
            return self.formula(*args)
        if torch._C._are_functorch_transforms_active():
            return self.twice(*args)
        if (
            torch.is_grad_enabled()
            or torch._C._len_torch_dispatch_stack()
            or type(args[0]) is not Tensor
            or not torch._C._has_storage(args[0])  # batched by `is_grads_batched`
            or args[0]._is_zerotensor()  # without memory
        ):
            if args[0].layout is not torch.strided:  # of a table whose gradient is sparse
                args = (args[0].to_dense(), *args[1:])
            return self.op(*args)
        if args[0].is_neg():
            args = (args[0].resolve_neg(), *args[1:])
        run = run or self.run
        if not torch._C._len_torch_function_stack():
            return run(*args)
        # `enable` is active, and has no business with the steps of a gradient.
        with torch._C.DisableTorchFunction():
            return run(*args)

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what a second-order gradient needs."""
        ctx.save_for_backward(*inputs[: self.count])
        ctx.rest = inputs[self.count :]

    def second(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients of the gradient, by differentiating its formula."""
        tensors = list(ctx.saved_tensors)
        count = min(self.differentiable, self.count)
        places = [k for k in range(count) if ctx.needs_input_grad[k]]

        def formula(*chosen: Tensor) -> Any:
            given = list(tensors)
            for k, tensor in zip(places, chosen, strict=True):
                given[k] = tensor
            return self.formula(*given, *ctx.rest)

        found: list[Any] = [None] * len(ctx.needs_input_grad)
        # The formula is torch's, also where `enable` or autocast is active.
        with torch._C.DisableTorchFunction(), torch.autocast(tensors[0].device.type, enabled=False):
            chosen = [tensors[k] for k in places]
            made = pull(formula, chosen, gradients if len(gradients) > 1 else gradients[0])
        for k, gradient in zip(places, made, strict=True):
            found[k] = gradient
        return tuple(found)

    def vmap(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        """The operator of batches."""
        tensors = self._in_front(info.batch_size, in_dims, args[: self.count])
        if self.rank(tensors, args[self.count :]) > MAX_RANK:
            return self._one_by_one(info.batch_size, tensors, args[self.count :])
        return self.batched(info.batch_size, tensors, args[self.count :])

    def _in_front(self, size: int, in_dims: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Bring the batch to the front of every tensor; what has none repeats, uncopied."""
        tensors: list[Any] = []
        for tensor, dim in zip(given, in_dims, strict=False):
            if tensor is None:
                tensors.append(None)
            elif dim is None:
                tensors.append(tensor.expand(size, *tensor.shape))
            else:
                tensors.append(tensor.movedim(dim, 0))
        return tensors

    def _one_by_one(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        """The same where no plan has as many axes as the batch makes."""
        each = [[None] * size if t is None else t.unbind() for t in tensors]
        made = [self.op(*given, *rest) for given in zip(*each, strict=True)]
        if isinstance(made[0], Tensor):
            return torch.stack(made), 0
        return tuple(map(torch.stack, zip(*made, strict=True))), (0,) * len(made[0])


class _Along(Operator):
    """A gradient along one axis, where every array has the same shape."""

    scalars = "int dim"

    def ask(self, arrays: Arrays, params: tuple[Any, ...]) -> Asked:
        dy = arrays["dy"]
        kind: Any = self.spec.kind
        shape, element = tuple(dy.shape) or (1,), ElementKind.of(dy)
        desc: Any
        if self.spec.category is OpCategory.SOFTMAX:
            desc = SoftmaxBackwardDescriptor(
                kind=kind, input_shape=shape, softmax_axis=params[0], element=element
            )
            plan: Any = SoftmaxBackwardPlan
        else:
            # torch's cummax and cummin keep the last of equals.
            desc = ScanBackwardDescriptor(
                kind=kind,
                input_shape=shape,
                scan_axis=params[0],
                element=element,
                ties=TieRule.LAST,
            )
            plan = ScanBackwardPlan
        return Asked(plan.select(desc, device=dy.device), views_of(arrays))

    def batched(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        rank = tensors[0].dim() - 1
        if rank == 0:
            lines = [None if t is None else t.unsqueeze(1) for t in tensors]
            return self.op(*lines, 1).squeeze(1), 0
        return self.op(*tensors, rest[0] % rank + 1), 0


class _LogScan(_Along):
    """log-cumsum-exp, whose second order is of the same kind: with w[k, j] = exp(x[k] − y[j]) for
    k ≤ j, D(dy)[k] = Σ_j dy[j]·w[k, j] is the gradient and T(g)[j] = Σ_k g[k]·w[k, j] its
    transpose, so that g · D(dy) = dy · T(g), whose gradient by x is g·D(dy) − D(dy·T(g)).

    torch takes logarithms of dy, and has no derivative where that is 0.
    """

    def __init__(self, spec: KindSpec, formula: Formula) -> None:
        super().__init__(spec, formula)
        members = {
            "generate_vmap_rule": True,
            "forward": staticmethod(self._transposed),
            "setup_context": staticmethod(self._remember_transposed),
            "backward": staticmethod(self._second_of_transposed),
        }
        made: Any = type("transposed", (torch.autograd.Function,), members)
        self._twice = made.apply
        # As `op` and `twice`: one for eager code and `is_grads_batched`, one for transforms.
        name = "gradplan::logcumsumexp_transposed"
        schema = "logcumsumexp_transposed(Tensor g, Tensor x, Tensor? y, int dim) -> Tensor"
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _library.impl("logcumsumexp_transposed", self._transposed, device)
        torch.library.register_fake(name, self._transposed, lib=_library)
        torch.library.register_autograd(
            name,
            self._second_of_transposed,
            setup_context=self._remember_transposed,
            lib=_library,
        )
        torch.library.register_vmap(name, self._batched_transposed, lib=_library)

    def _transposed(self, g: Tensor, x: Tensor, y: Any, dim: int) -> Tensor:
        """T by the kernel of D, from the other end: with −y for x and y, it sums alone."""
        self.on_one_device((g, x, y))
        if not x.dim():
            return torch.where(x == -inf, 0.0, g)
        y = torch.logcumsumexp(x, dim) if y is None else y
        own = torch.where(x == -inf, 0.0, g * (x - y).exp()).flip(dim)
        back = -y.flip(dim)
        return torch.where(y == -inf, 0.0, self.op(own, back, back, dim).flip(dim))

    def transposed(self, g: Tensor, x: Tensor, y: Any, dim: int) -> Tensor:
        """The same, differentiable."""
        if torch._C._are_functorch_transforms_active():
            made: Tensor = self._twice(g, x, y, dim)
        else:
            made = torch.ops.gradplan.logcumsumexp_transposed(g, x, y, dim)
        return made

    def _batched_transposed(
        self, info: Any, in_dims: Sequence[Any], g: Tensor, x: Tensor, y: Any, dim: int
    ) -> tuple[Tensor, int]:
        g, x, y = self._in_front(info.batch_size, in_dims, (g, x, y))
        if x.dim() == 1:
            return torch.where(x == -inf, 0.0, g), 0
        made: Tensor = torch.ops.gradplan.logcumsumexp_transposed(g, x, y, dim % (x.dim() - 1) + 1)
        return made, 0

    def _remember_transposed(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.dim = inputs[3]

    def _second_of_transposed(self, ctx: Any, dt: Tensor) -> tuple[Any, ...]:
        g, x, y = ctx.saved_tensors
        by_g, _, by_x = self._both(g, dt, x, y, ctx.dim)
        return by_g, by_x, None, None

    def second(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        dy, x, y = ctx.saved_tensors
        with torch._C.DisableTorchFunction(), torch.autocast(x.device.type, enabled=False):
            by_dy, by_x = self._both(gradients[0], dy, x, y, *ctx.rest)[1:]
        return by_dy, by_x, None, None

    def _both(self, g: Tensor, dy: Tensor, x: Tensor, y: Any, dim: int) -> tuple[Tensor, ...]:
        """The gradients of g · D(dy) by g, by dy, and by x."""
        run = self.twice if torch._C._are_functorch_transforms_active() else self.op
        by_g, by_dy = run(dy, x, y, dim), self.transposed(g, x, y, dim)
        return by_g, by_dy, g * by_g - run(dy * by_dy, x, y, dim)


class _Reduction(Operator):
    """A reduction's gradient; `dim` lists the reduced axes, as `keepdim` left them in dy and y."""

    scalars = "int[] dim, bool keepdim"

    def params(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dims, *more = args[self.count :]
        return (tuple(dims), *more)

    def ask(self, arrays: Arrays, params: tuple[Any, ...]) -> Asked:
        dims, keepdim, *correction = params
        dx = arrays["dx"]
        kind: Any = self.spec.kind
        shape = tuple(dx.shape) or (1,)
        axes = sorted(dim % len(shape) for dim in dims)
        if dx.dim() and not keepdim:
            arrays = dict(arrays)
            for name in {"dy", "y"} & arrays.keys():
                arrays[name] = kept(arrays[name], axes)
        desc = ReduceBackwardDescriptor(
            kind=kind,
            input_shape=shape,
            reduce_axis=tuple(axes),
            element=ElementKind.of(dx),
            correction=correction[0] if correction else 1,
        )
        return Asked(ReduceBackwardPlan.select(desc, device=dx.device), views_of(arrays))

    def batched(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        dims, keepdim, *more = rest
        rank = tensors[1].dim() - 1
        if rank == 0:
            lines = [None if t is None else t.unsqueeze(1) for t in tensors]
            return self.op(*lines, [1], True, *more).squeeze(1), 0
        return self.op(*tensors, [dim % rank + 1 for dim in dims], keepdim, *more), 0


class _Moment(_Reduction):
    scalars = "int[] dim, bool keepdim, float correction"


class _Mean(_Reduction):
    """Needs no tensor but dy, and is told the shape of the input instead."""

    scalars = "SymInt[] size, int[] dim, bool keepdim"

    def outputs(self, *args: Any) -> Any:
        return args[0].new_empty(args[1])

    def params(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(args[2]), args[3]  # the output tells its shape

    def rank(self, tensors: list[Any], rest: tuple[Any, ...]) -> int:
        return len(rest[0]) + 1

    def batched(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        shape, dims, keepdim = rest
        rank = len(shape)
        if rank == 0:
            return self.op(tensors[0].unsqueeze(1), [size, 1], [1], True).squeeze(1), 0
        moved = [dim % rank + 1 for dim in dims]
        return self.op(tensors[0], [size, *shape], moved, keepdim), 0


class _Lerp(Operator):
    """da and db, each only if asked for; one that is not comes back without elements."""

    scalars = "float weight, bool da, bool db"
    result = "(Tensor, Tensor)"

    def outputs(self, *args: Any) -> Any:
        dy, _, da, db = args
        return (
            torch.empty_like(dy) if da else dy.new_empty(0),
            torch.empty_like(dy) if db else dy.new_empty(0),
        )

    def run(self, *args: Any, keep: bool = True) -> Any:
        dy, weight, *asked = args
        made = self.outputs(*args)
        if not any(asked):
            return made
        da, db = asked
        tensors = dy, made[0] if da else None, made[1] if db else None
        numbers, decides = None, weight
        if dy.is_cuda:  # where weights are arguments: a new one takes no new program
            weight += 0.0  # as descriptors have it, without −0
            p, q = (1.0 - weight, weight) if da else (weight, 1.0 - weight)
            numbers, decides = {"p": p, "q": q}, is_extreme(p, q)
        key = (self, decides, da, db, dy.shape, dy.stride(), dy.dtype, dy.get_device())
        launch(key, self, ("dy", "da", "db"), tensors, (weight,), keep, numbers)
        return made

    def check(self, *args: Any) -> None:
        """There is one array, and it may be any."""

    def ask(self, arrays: Arrays, params: tuple[Any, ...]) -> Asked:
        dy = arrays["dy"]
        desc = BinaryParamBackwardDescriptor(
            kind=BinaryKind.LERP,
            shape=tuple(dy.shape) or (1,),
            element=ElementKind.of(dy),
            param=params[0],
        )
        return Asked(BinaryParamBackwardPlan.select(desc, device=dy.device), views_of(arrays))

    def batched(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        return self.op(*tensors, *rest), tuple(0 if one else None for one in rest[1:])


class _Embedding(Operator):
    """Indices of any rank; dout has one more axis."""

    scalars = "SymInt num_embeddings, SymInt? padding_idx, bool scale_grad_by_freq"
    made = "dweight"
    differentiable = 1

    def _tensors(self) -> tuple[str, ...]:
        return ("dout", "indices")

    def outputs(self, *args: Any) -> Any:
        dout, _, rows, *_ = args
        return dout.new_empty((rows, dout.shape[-1]))

    def params(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return *args[3:], args[1].dtype  # the output tells the number of rows

    def rank(self, tensors: list[Any], rest: tuple[Any, ...]) -> int:
        return 2  # indices of any rank are merged

    def ask(self, arrays: Arrays, params: tuple[Any, ...]) -> Asked:
        padding_idx, scale_grad_by_freq, _ = params
        dout, indices = arrays["dout"], arrays["indices"]
        if dout.shape[:-1] != indices.shape:
            raise InvalidProblem(
                f"embedding_backward: dout must have the indices' shape {tuple(indices.shape)} "
                f"and one more axis, got {tuple(dout.shape)}"
            )
        if indices.dim() == 0:
            dout = dout.unsqueeze(0)
        views = views_of({**arrays, "dout": dout})
        rows, keys, table = views["dout"], views["indices"], views["dweight"]
        desc = EmbeddingBackwardDescriptor(
            num_embeddings=table.shape[0],
            embedding_dim=table.shape[1],
            num_indices=keys.size,
            element=ElementKind.of(dout),
            index=IndexKind.of(indices),
            padding_idx=padding_idx,
            accumulate=False,
            scale_grad_by_freq=scale_grad_by_freq,
        )
        # As they lie: axes are merged where both arrays allow it.
        extents, (steps, row_steps) = _merged(keys.shape, keys.strides, rows.strides[:-1])
        views["dout"] = reshape_view(
            rows, (*extents, table.shape[1]), (*row_steps, rows.strides[-1])
        )
        views["indices"] = reshape_view(keys, extents, steps)
        return Asked(EmbeddingBackwardPlan.select(desc, device=dout.device), views, extents)

    def batched(self, size: int, tensors: list[Any], rest: tuple[Any, ...]) -> tuple[Any, Any]:
        """One table below the other; what a table skips gets an index outside all of them."""
        dout, indices = tensors
        rows, padding_idx, scale_grad_by_freq = rest
        first = torch.arange(size, device=indices.device).mul_(rows)
        inside = (indices >= 0) & (indices < rows)
        if padding_idx is not None:
            inside &= indices != padding_idx
        first = first.reshape(-1, *[1] * (indices.dim() - 1))
        moved = torch.where(inside, indices + first, -1)
        tables = self.op(dout, moved, size * rows, None, scale_grad_by_freq)
        return tables.reshape(size, rows, -1), 0


_FAMILIES: dict[OpCategory, type[Operator]] = {
    OpCategory.SOFTMAX: _Along,
    OpCategory.SCAN: _Along,
    OpCategory.REDUCTION: _Reduction,
    OpCategory.BINARY_ELEMENTWISE: _Lerp,
    OpCategory.EMBEDDING: _Embedding,
}


def _family(spec: KindSpec) -> type[Operator]:
    if spec.correction:
        return _Moment
    if spec.kind is ScanKind.LOG_CUMSUM_EXP:
        return _LogScan
    return _Mean if spec.kind is ReduceKind.MEAN else _FAMILIES[spec.category]


def _register(spec: KindSpec) -> Operator:
    operator = _family(spec)(spec, FORMULAS[spec.kind])
    name = f"gradplan::{spec.function}"
    _library.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(spec.function, operator.checked, device)
    torch.library.register_fake(name, operator.faked, lib=_library)
    torch.library.register_autograd(
        name, operator.second, setup_context=operator.remember, lib=_library
    )
    torch.library.register_vmap(name, operator.vmap, lib=_library)
    operator.op = getattr(torch.ops.gradplan, spec.function).default
    members = {
        "generate_vmap_rule": True,
        "forward": staticmethod(lambda *args: operator.op(*args)),
        "setup_context": staticmethod(operator.remember),
        "backward": staticmethod(operator.second),
    }
    twice: Any = type(spec.function, (torch.autograd.Function,), members)
    operator.twice = twice.apply
    return operator


OPERATORS: dict[Named, Operator] = {
    spec.kind: _register(spec) for spec in KINDS.values() if spec.kind in FORMULAS
}
"""The operator of each kind."""
