"""Calls like an earlier one: torch tensors on a GPU, of layouts that were checked before.

A call looks at a dozen properties of each of its tensors, which takes the host as long as the
launch itself. torch's compiler has the same question, and one function in C++ that answers it for
all tensors at once: whether type, dtype, device, shape, strides, gradient and every flag are as
they were. Where it says so, only what it does not look at is left: addresses, and where storages
end. Everything else, and every doubt, goes the long way, which knows what to say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .backends.gpu.streams import made_for
from .views import Layout, View, in_forward_mode, no_memory_for, tensor_counter, torch_maker

if TYPE_CHECKING:
    from .plans import Plan

__all__ = ["Again", "Recent"]

# Two arrays, the distances between which they meet, and whether 0 is none of them.
_Pair = tuple[str, str, int, int, bool]
_Likeness = tuple[Callable[..., bool], Callable[[tuple[Any, ...]], tuple[Any, ...]] | None]


class Again:
    """A program, and a test whether tensors lie as those that it was prepared for."""

    __slots__ = (
        "_count",
        "_facts",
        "_fresh",
        "_last",
        "_layouts",
        "_make",
        "_pairs",
        "_pick",
        "_plan",
        "_program",
        "_shape",
        "_streams",
        "_written",
        "like",
    )

    def __init__(
        self,
        plan: Plan,
        program: Any,
        streams: Any,
        views: dict[str, View],
        arrays: tuple[Any, ...],
        likeness: _Likeness,
        fresh: int,
        shape: tuple[int, ...],
    ) -> None:
        self.like, self._pick = likeness
        self._shape = shape
        self._plan = plan
        self._program = program
        self._streams = streams
        # Where arrays lay last, and the launch for those that lie there again; replaced as a whole,
        # for threads share it.
        self._last: tuple[dict[str, int], Callable[[int], None] | None] = ({}, None)
        self._layouts = layouts = {name: lent.layout for name, lent in views.items()}
        names = [*layouts]
        count = len(names) - fresh
        # What is left to be asked of each tensor. Strides of torch have no sign.
        self._facts = [
            (k, name, layouts[name].mask, layouts[name].mask + 1, layouts[name].hi)
            for k, name in enumerate(names[:count])
        ]
        self._fresh = names[count:]
        self._make = torch_maker(arrays, shape) if fresh else None
        outputs = [name for name in names[:count] if name in plan._outputs]
        self._pairs = _pairs(plan, layouts, outputs)
        self._count = tensor_counter()
        self._written = count - len(outputs)  # the first of them: they come last

    def fresh(self, arrays: tuple[Any, ...], stream: Any = None) -> list[Any]:
        """New tensors for the outputs, to be written to on this stream."""
        assert self._make is not None
        if stream is not None:
            return made_for(self._streams.device, stream, lambda: self.fresh(arrays))
        place, make = self._make
        like = arrays[place]
        try:
            return [make(like) for _ in self._fresh]
        except RuntimeError as error:
            raise no_memory_for(self._shape, error) from error

    def launch(
        self, arrays: tuple[Any, ...], stream: Any, workspace: Any = None, fresh: Sequence[Any] = ()
    ) -> bool:
        """Run for arrays that are `like`, and perhaps into fresh ones; False where the long way has
        to look."""
        if in_forward_mode():  # which the comparison does not see, and the long way may refuse
            return False
        tensors = arrays if self._pick is None else self._pick(arrays)
        addresses = {}
        # By numbers: `zip`, with its keyword, would take as long as a third of all this.
        for k, name, mask, size, reach in self._facts:
            tensor = tensors[k]
            addresses[name] = ptr = tensor.data_ptr()
            if ptr & mask or not ptr:
                return False
            if tensor.storage_offset() * size + reach > tensor.untyped_storage().nbytes():
                return False
        if fresh:
            for k, name in enumerate(self._fresh):
                addresses[name] = ptr = fresh[k].data_ptr()
                if not ptr:
                    return False
        streams, program = self._streams, self._program
        needed = program.workspace_bytes
        lay, start = self._last
        if addresses != lay:
            # `overlap.apart` for every output, with all known but the addresses.
            for out, other, below, above, same in self._pairs:
                distance = addresses[other] - addresses[out]
                if below < distance < above and (distance or not same):
                    return False
            start = None
            self._last = addresses, None
        elif start is None and not needed:  # who comes twice may come often
            start = program.start_at(addresses)
            self._last = addresses, start
        handle = streams.current() if stream is None else streams.handle(stream)
        if start is not None and workspace is None:
            start(handle)
        else:
            address = 0
            if needed or workspace is not None:
                views = {} if workspace is None else self._views(addresses)
                address, _keep = self._plan._workspace(needed, workspace, views, handle)
            program.launch(addresses, address, handle)
        if not fresh:
            self._count(tensors[self._written :])
        return True

    def _views(self, addresses: dict[str, int]) -> dict[str, View]:
        return {name: View(addresses[name], one, None) for name, one in self._layouts.items()}


def _pairs(plan: Plan, layouts: Mapping[str, Layout], outputs: Sequence[str]) -> list[_Pair]:
    """Each of these outputs with every other array."""
    return [
        (out, other, -there.hi, layouts[out].hi, there is layouts[out] and other in plan._same)
        for out in outputs
        for other, there in layouts.items()
        if other != out
    ]


class Recent:
    """The calls that a plan or a function met last."""

    __slots__ = ("_met", "_notes")
    _MOST = 4  # layouts that take turns
    _PATIENCE = 8  # layouts in a row that were none of them: more come and go

    def __init__(self) -> None:
        self._met: tuple[Again, ...] = ()
        self._notes = 0

    def find(self, arrays: tuple[Any, ...]) -> Again | None:
        """An earlier call for arrays like these; None stands for one that is not given."""
        for one in self._met:
            if one.like(*arrays):
                self._notes = 0
                return one
        return None

    def note(
        self,
        plan: Plan,
        views: dict[str, View],
        arrays: tuple[Any, ...],
        fresh: int = 0,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Remember a call that went the long way: its views, and the arrays to be compared, which
        are all but the last `fresh`, of this shape."""
        if plan._backend.device is None or self._notes >= self._PATIENCE:
            return
        self._notes += 1
        if any(not lent.layout.hi for lent in views.values()):
            return
        likeness = _likeness(arrays)
        if likeness is not None:
            program = plan._prepare(views)
            streams = plan._streams_of(views)
            made = Again(plan, program, streams, views, arrays, likeness, fresh, shape)
            self._met = (made, *self._met[: self._MOST - 1])


@lru_cache(maxsize=1)
def _guards() -> Any:
    """torch's comparison, where it has the one we know, and it works."""
    try:
        import torch

        guards: Any = torch._C._dynamo.guards.TensorGuards

        one, other = torch.empty(2, 3), torch.empty(3, 2).T
        made = guards(one, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        same, others = made.check(one), (other, one.double(), one.requires_grad_())
        with torch.no_grad():
            same = same and not made.check(one)
        return guards if same and not any(map(made.check, others)) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def _likeness(arrays: tuple[Any, ...]) -> _Likeness | None:
    """Whether others are as these are, and which of them are given; None where that cannot be
    asked at once."""
    torch: Any = sys.modules.get("torch")
    given = [k for k, one in enumerate(arrays) if one is not None]
    tensors = [arrays[k] for k in given]
    if torch is None or any(type(one) is not torch.Tensor for one in tensors):
        return None
    guards = _guards()
    if guards is None:
        return None
    made = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = made.check
    if not check(*tensors):
        return None
    if len(given) == len(arrays):
        return check, None
    absent = [k for k in range(len(arrays)) if k not in given]

    def pick(some: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([some[k] for k in given])

    def like(*some: Any) -> bool:
        for k in absent:
            if some[k] is not None:
                return False
        return check(*pick(some))

    return like, pick
