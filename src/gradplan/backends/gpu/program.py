"""What a bound problem launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ...kinds import ElementKind
from ...views import View, addresses_of
from .launch import COUNTERS, WORKSPACE, Bound, Int, Interpreter, Launcher, Pointer, Step
from .streams import own_counters, stream_counters

__all__ = [
    "EMPTY",
    "HALVES",
    "TURNS",
    "TYPES",
    "Program",
    "Strides",
    "before",
    "begun_anywhere",
    "clearing",
    "down",
    "edge_lanes",
    "in_turn",
    "integer",
    "up",
]

Strides = Mapping[str, tuple[int, ...]]

TYPES = {
    ElementKind.F32: "fp32",
    ElementKind.F16: "fp16",
    ElementKind.BF16: "bf16",
    ElementKind.F64: "fp64",
}
HALVES = (ElementKind.F16, ElementKind.BF16)
TURNS = 1 << 28
"""More programs than this do not take turns: see `kernels.waiting`."""


@dataclass(frozen=True)
class Program:
    """What a bound problem launches."""

    steps: tuple[Step, ...]
    runner: Launcher | Interpreter | None
    workspace_bytes: int
    reads: Mapping[str, int]
    layout: str
    variant: str
    why: str
    counters: int = 0
    """Counters that the programs of a launch meet at: 32 bits each, no part of the workspace."""
    apart: tuple[Step, ...] = ()
    """Steps with the same result whose programs do not wait for each other."""
    apart_runner: Launcher | None = None
    unaligned: Program | None = None
    """What runs in its place where `grain` does not divide all addresses; it needs no more
    workspace."""
    grain: int = 16
    """Bytes, a power of two."""
    alike: tuple[str, ...] = ()
    """Operands whose addresses need not be divisible, but leave the same rest, all of them;
    how the others are aligned does not matter then."""

    def suited(self, addresses: Mapping[str, int]) -> Program:
        """This one, or what runs in its place for arrays at these addresses."""
        if self.unaligned is None:
            return self
        low = rest = 0
        if self.alike:
            operand, offset = self._compared[0]
            rest = addresses[operand] + offset
        for operand, offset in self._compared:
            low |= (addresses[operand] + offset) ^ rest
        return self.unaligned.suited(addresses) if low & (self.grain - 1) else self

    @cached_property
    def _compared(self) -> list[tuple[str, int]]:
        """The operands whose addresses matter, and how many bytes further on steps point."""
        values = [value for step in self.steps for _, value in step.arguments]
        pointers = [value for value in values if isinstance(value, Pointer)]
        own = (WORKSPACE, COUNTERS)
        found = [(one.operand, one.offset) for one in pointers if one.operand not in own]
        return [one for one in dict.fromkeys(found) if not self.alike or one[0] in self.alike]

    def bind(
        self, views: Mapping[str, View], workspace: int, stream: int = 0
    ) -> Callable[..., None]:
        """A launch on a stream, for arrays that this is `suited` to, with the workspace at this
        address.

        What it allocates, ordered with `stream`, is its attribute `owned`.
        """
        if self.runner is None:
            return _nothing
        bound = self.runner.bind(addresses_of(views), workspace)
        if self.counters and isinstance(bound, Bound):
            # Its own: it may be captured, and the graph run on any stream.
            bound.owned = own_counters(bound.device, stream, self.counters)
            bound.point(COUNTERS, bound.owned.data_ptr())
        return bound

    def run(self, views: Mapping[str, View], workspace: int, stream: int) -> None:
        """Launch once."""
        self.launch(addresses_of(views), workspace, stream)

    def launch(
        self, addresses: Mapping[str, int], workspace: int, stream: int, lasting: bool = True
    ) -> None:
        """Launch once for arrays at these addresses; unless `lasting`, nothing is allocated that
        stays."""
        if self.runner is None:
            return
        if self.unaligned is not None:
            suited = self.suited(addresses)
            if suited is not self:
                suited.launch(addresses, workspace, stream, lasting)
                return
        if self.apart_runner is None:
            self.runner.run(addresses, workspace, stream)
            return
        assert isinstance(self.runner, Launcher)
        found = stream_counters(self.runner.device, stream, self.counters, lasting)
        if found:
            self.runner.run(addresses, workspace, stream, found)
            self.apart_runner.load_like(self.runner)
        else:
            self.apart_runner.run(addresses, workspace, stream)

    def start_at(self, addresses: Mapping[str, int]) -> Callable[[int], None]:
        """The same without a workspace, time and again for arrays at these addresses."""
        suited = self.suited(addresses)
        if suited.apart_runner is None and isinstance(suited.runner, Launcher):
            return suited.runner.bind(addresses, 0).launch
        return partial(suited.launch, addresses, 0)


def _nothing(stream: int = 0) -> None:
    """What an empty problem launches."""


EMPTY = Program(
    steps=(),
    runner=None,
    workspace_bytes=0,
    reads={},
    layout="empty",
    variant="none",
    why="there are no elements",
)


def up(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def down(n: int) -> int:
    """The power of two below or at n."""
    return 1 << (max(n, 1).bit_length() - 1)


def integer(value: int) -> Int:
    """An extent: 32 bits where they hold it with room for a tile beyond."""
    return Int(value, "i32" if value < 2**31 - 2**17 else "i64")


def before(made: Program, other: Program, alike: tuple[str, ...] = ()) -> Program:
    """The first, and the other for addresses that neither it is for nor what is behind it."""
    if made.unaligned is not None:
        other = before(made.unaligned, other)
    room = max(made.workspace_bytes, other.workspace_bytes)
    return replace(made, unaligned=other, alike=alike or made.alike, workspace_bytes=room)


def in_turn(some: Sequence[Program], why: str) -> Program:
    """One after the other, in the same workspace."""
    apart = [one.apart or one.steps for one in some] if any(one.apart for one in some) else []
    askew = None
    if any(one.unaligned for one in some):
        askew = in_turn([one.unaligned or one for one in some], why)
    return replace(
        some[0],
        steps=tuple(step for one in some for step in one.steps),
        apart=tuple(step for steps in apart for step in steps),
        unaligned=askew,
        alike=some[0].alike if len({one.alike for one in some}) == 1 else (),
        grain=max(one.grain for one in some),
        workspace_bytes=max(one.workspace_bytes for one in some),
        counters=max(one.counters for one in some),
        why=why,
    )


def edge_lanes(n: int, item: int, r: int, warps: int) -> int:
    """Lanes for the elements of a row of n that are not in its run: see `kernels.ragged`. Of some
    rows as many as there are threads for each, or several threads would have the same."""
    v = 16 // item
    # Before a run and behind it are fewer than v each, and n % v together, or v more.
    most = v if n % v in (0, v - 1) else 2 * v
    return max(most, 32 * warps // r) if r > 1 else most


def begun_anywhere(step: Step, kernel: str, unused: Collection[str], **more: int) -> Step:
    """The same by a kernel of `kernels.ragged`: it relies on no alignment, and has not these
    arguments and constants, but some more."""
    constants = tuple(pair for pair in step.constants if pair[0] not in unused)
    return replace(
        step,
        kernel=kernel,
        arguments=tuple(pair for pair in step.arguments if pair[0] not in unused),
        constants=(*constants, *more.items()),
        alignment=1,
        aligned=(),
        grain=1,
    )


_CLEARED = 1024


def clearing(offset: int, words: int) -> Step:
    """The launch after which nothing has been told in so many words of the workspace."""
    return Step(
        kernel="waiting.clear",
        grid=-(-words // _CLEARED),
        arguments=(("told", Pointer(WORKSPACE, "i64", offset)), ("count", Int(words))),
        constants=(("B", _CLEARED),),
        warps=4,
    )
