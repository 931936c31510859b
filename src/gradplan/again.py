"""Calls like an earlier one: torch tensors on a GPU, of layouts that were checked before.

A call looks at a dozen properties of each of its tensors, which takes the host as long as the
launch itself. torch's compiler has the same question, and one function in C++ that answers it for
all tensors at once: whether type, dtype, device, shape, strides, gradient and every flag are as
they were. Where it says so, only what it does not look at is left: addresses, and where storages
end. Everything else, and every doubt, goes the long way, which knows what to say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .views import View

if TYPE_CHECKING:
    from .plans import Plan

__all__ = ["Address", "Again", "Recent"]

_Likeness = tuple[Callable[..., bool], Callable[[tuple[Any, ...]], tuple[Any, ...]] | None]


class Address:
    """What programs read of a view."""

    __slots__ = ("ptr",)
    ptr: int


class Again:
    """A program, and a test whether tensors lie as those that it was prepared for."""

    __slots__ = (
        "_aside",
        "_facts",
        "_idle",
        "_names",
        "_pick",
        "_plan",
        "_program",
        "_streams",
        "like",
        "shape",
    )

    def __init__(
        self,
        plan: Plan,
        program: Any,
        streams: Any,
        views: dict[str, View],
        likeness: _Likeness,
        fresh: int,
        shape: tuple[int, ...],
    ) -> None:
        self.like, self._pick = likeness
        self.shape = shape
        self._plan = plan
        self._program = program
        self._streams = streams
        self._names = tuple(views)
        layouts = [lent.layout for lent in views.values()]
        count = len(layouts) - fresh
        # What is left to be asked of each tensor; its storage's end not of fresh ones (0). Strides
        # of torch have no sign.
        self._facts = [
            (layout.mask + 1 if k < count else 0, layout.mask, layout.hi)
            for k, layout in enumerate(layouts)
        ]
        # Pairs of arrays that must not share memory, unless they may be one and the same.
        reach = [layout.hi for layout in layouts]
        outputs = [k for k, name in enumerate(views) if name in plan._outputs and k < count]
        names = self._names
        self._aside = [
            (
                (one, reach[one]),
                (other, reach[other]),
                names[other] in plan._same and layouts[one] is layouts[other],
            )
            for one in outputs
            for other in range(count)
            if other != one and (other not in outputs or other > one)
        ]
        # Sets of addresses that no thread uses now; taking and putting back are atomic.
        self._idle: list[tuple[Any, list[Address]]] = []

    def launch(self, arrays: tuple[Any, ...], stream: Any, *fresh: Any) -> bool:
        """Run for arrays that are `like`, and perhaps into fresh ones; False where the long way has
        to look."""
        tensors = arrays if self._pick is None else self._pick(arrays)
        if fresh:
            tensors = (*tensors, *fresh)
        try:
            held = self._idle.pop()
        except IndexError:
            views = {name: Address() for name in self._names}
            held = views, list(views.values())
        lent, slots = held
        for slot, tensor, (size, mask, reach) in zip(slots, tensors, self._facts, strict=True):
            slot.ptr = ptr = tensor.data_ptr()
            if (
                ptr & mask
                or not ptr
                or (
                    size
                    and tensor.storage_offset() * size + reach > tensor.untyped_storage().nbytes()
                )
            ):
                return False
        for (one, reach), (other, more), may_be_one in self._aside:
            a, b = slots[one].ptr, slots[other].ptr
            if a < b + more and b < a + reach and not (may_be_one and a == b):
                return False
        streams, program = self._streams, self._program
        handle = streams.current() if stream is None else streams.handle(stream)
        address = 0
        if program.workspace_bytes:
            address, _keep = self._plan._workspace(program.workspace_bytes, None, {}, handle)
        program.run(lent, address, handle)
        self._idle.append(held)
        return True


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
            made = Again(plan, program, plan._streams_of(views), views, likeness, fresh, shape)
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
        return all(some[k] is None for k in absent) and check(*pick(some))

    return like, pick
