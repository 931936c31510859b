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

from .views import Layout, View, count_write, in_forward_mode

if TYPE_CHECKING:
    from .plans import Plan

__all__ = ["Again", "Recent", "Slots"]

# Two places, the distances between which the arrays there meet, and whether 0 is none of them.
_Pair = tuple[int, int, int, int, bool]
_Likeness = tuple[Callable[..., bool], Callable[[tuple[Any, ...]], tuple[Any, ...]] | None]


class Slots:
    """Views of certain layouts whose addresses are put in call by call, a set for each thread."""

    __slots__ = ("_idle", "_layouts")

    def __init__(self, layouts: Mapping[str, Any]) -> None:
        self._layouts = layouts
        # Sets that no thread uses now; taking and putting back are atomic.
        self._idle: list[tuple[dict[str, View], list[View]]] = []

    def take(self) -> tuple[dict[str, View], list[View]]:
        """The views by name, and in order."""
        try:
            return self._idle.pop()
        except IndexError:
            views = {name: View(0, layout, None) for name, layout in self._layouts.items()}
            return views, list(views.values())

    def give(self, taken: tuple[dict[str, View], list[View]]) -> None:
        self._idle.append(taken)


class Again:
    """A program, and a test whether tensors lie as those that it was prepared for."""

    __slots__ = (
        "_facts",
        "_outs",
        "_pairs",
        "_pick",
        "_plan",
        "_program",
        "_slots",
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
        layouts = {name: lent.layout for name, lent in views.items()}
        self._slots = Slots(layouts)
        count = len(layouts) - fresh
        # What is left to be asked of each tensor; its storage's end not of fresh ones (0). Strides
        # of torch have no sign.
        self._facts = [
            (k, layout.mask + 1 if k < count else 0, layout.mask, layout.hi)
            for k, layout in enumerate(layouts.values())
        ]
        self._pairs = _pairs(plan, layouts, count)
        self._outs = [k for k, name in enumerate(layouts) if name in plan._outputs and k < count]

    def launch(
        self, arrays: tuple[Any, ...], stream: Any, workspace: Any = None, fresh: Sequence[Any] = ()
    ) -> bool:
        """Run for arrays that are `like`, and perhaps into fresh ones; False where the long way has
        to look."""
        tensors = arrays if self._pick is None else self._pick(arrays)
        if fresh:
            tensors = (*tensors, *fresh)
        taken = self._slots.take()
        views, slots = taken
        # What the comparison does not see: a tangent, which the long way refuses.
        done = not in_forward_mode() and self._placed(slots, tensors) and self._apart(slots)
        if done:
            streams, program = self._streams, self._program
            handle = streams.current() if stream is None else streams.handle(stream)
            needed = program.workspace_bytes
            address = 0
            if needed or workspace is not None:
                address, _keep = self._plan._workspace(needed, workspace, views, handle)
            program.run(views, address, handle)
            for k in self._outs:
                count_write(tensors[k])
        self._slots.give(taken)
        return done

    def _placed(self, slots: list[View], tensors: tuple[Any, ...]) -> bool:
        """Put the addresses in, if they are aligned and their storages long enough."""
        # By numbers: `zip`, with its keyword, would take as long as a third of all this.
        for k, size, mask, reach in self._facts:
            tensor = tensors[k]
            slots[k].ptr = ptr = tensor.data_ptr()
            if ptr & mask or not ptr:
                return False
            if size and tensor.storage_offset() * size + reach > tensor.untyped_storage().nbytes():
                return False
        return True

    def _apart(self, slots: list[View]) -> bool:
        """`overlap.apart` for every output, with all known but the addresses."""
        for out, other, below, above, same in self._pairs:
            distance = slots[other].ptr - slots[out].ptr
            if below < distance < above and (distance or not same):
                return False
        return True


def _pairs(plan: Plan, layouts: Mapping[str, Layout], count: int) -> list[_Pair]:
    """The outputs among the first `count`, each with every other array."""
    every = [*enumerate(layouts.items())]
    return [
        (k, j, -there.hi, layout.hi, there is layout and other in plan._same)
        for k, (name, layout) in every[:count]
        if name in plan._outputs
        for j, (other, there) in every
        if j != k
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
