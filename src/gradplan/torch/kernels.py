"""From tensors to launches, with everything remembered that their layout decides.

The first call of a layout asks for the plan, checks the arrays and prepares the program. Later
calls look that up and pass addresses: outputs are always fresh, so there is nothing left to check.
This runs in every backward pass, between kernels that are as short as it is: each line counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends.gpu.programs import ready
from ..backends.gpu.streams import PER_THREAD, allocate, capturing
from ..plans import Plan
from ..views import View, view

__all__ = ["Asked", "Question", "launch", "prepare", "views_of"]


class Asked(NamedTuple):
    """A plan, and the views of its arrays; `index_shape` as embeddings have it."""

    plan: Plan
    views: dict[str, View]
    index_shape: tuple[int, ...] | None = None


class Question(Protocol):
    """Who turns tensors into a plan."""

    def ask(self, arrays: dict[str, Tensor], params: tuple[Any, ...]) -> Asked: ...


class _Recipe:
    """A program, and the bits that none of its addresses may have set."""

    __slots__ = ("device", "mask", "plan", "program")

    def __init__(self, plan: Plan, program: Any, mask: int) -> None:
        self.plan = plan
        self.program = program
        self.device = plan._backend.device
        self.mask = mask


# Programs use few layouts; one with ever new shapes must not leak.
_RECIPE_LIMIT = 4096
_recipes: dict[Hashable, _Recipe] = {}

# A stream keeps a workspace of up to so many bytes, so that no gradient of usual size takes more
# memory at a time than torch's own does. Launches on a stream follow each other; another thread
# that launches meanwhile finds it taken, and makes its own.
_KEPT = 8 << 20
_STREAMS = 32
_kept: dict[tuple[int, int], list[Tensor]] = {}


def views_of(arrays: dict[str, Tensor]) -> dict[str, View]:
    """Views of tensors; rank 0 counts as one element."""
    return {name: view(t if t.dim() else t.reshape(1), name) for name, t in arrays.items()}


def launch(
    key: Hashable,
    question: Question,
    names: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    params: tuple[Any, ...],
    keep: bool = True,
    numbers: Mapping[str, float] | None = None,
) -> None:
    """Run a gradient; outputs are among the tensors, and nothing else names them yet.

    `keep`: whether memory may stay with the stream. Below `torch.compile` it may not: its graphs
    keep account of all that lies in their pool.

    `key` tells everything that decides the program: shapes, strides, types, the device. `numbers`,
    on a GPU, are arguments of its launch which do not, and it needs no workspace.
    """
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = prepare(question, names, tensors, params)
        if numbers is not None:  # others who have the program keep theirs
            recipe.program = ready(recipe.program, recipe.device)
        if len(_recipes) >= _RECIPE_LIMIT:
            _recipes.clear()
        _recipes[key] = recipe
    addresses = {}
    low = 0
    for k, tensor in enumerate(tensors):  # `zip`, with its keyword, takes 0.2 µs more
        if tensor is not None:
            addresses[names[k]] = ptr = tensor.data_ptr()
            low |= ptr
    if low & recipe.mask:
        prepare(question, names, tensors, params)  # refuses the address that no element may have
    program, device = recipe.program, recipe.device
    stream = 0 if device is None else torch._C._cuda_getCurrentRawStream(device)
    needed = program.workspace_bytes
    if numbers is not None:
        if program.runner is not None:  # there are elements
            program.runner.run(addresses, 0, stream, 0, numbers)
    elif device is not None and not keep:
        address, _memory = recipe.plan._workspace(needed, None, {}, stream)
        program.launch(addresses, address, stream, lasting=False)
    elif not needed:
        program.launch(addresses, 0, stream)
    elif device is None or needed > _KEPT or stream == PER_THREAD or capturing(stream):
        # Freed on return, and handed out again to this stream alone.
        address, _memory = recipe.plan._workspace(needed, None, {}, stream)
        program.launch(addresses, address, stream)
    else:
        kept = _kept.get((device, stream))
        try:
            memory = kept.pop() if kept else None
        except IndexError:  # another thread was faster
            memory = None
        if memory is None or memory.numel() < needed:
            memory = allocate(1 << (needed - 1).bit_length(), device, stream)
        program.launch(addresses, memory.data_ptr(), stream)
        if kept is not None:
            kept[:] = [memory]
        elif sum(one == device for one, _ in tuple(_kept)) < _STREAMS:  # other threads add to it
            _kept[device, stream] = [memory]


def prepare(
    question: Question,
    names: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    params: tuple[Any, ...],
) -> _Recipe:
    """What runs for these tensors, or what is wrong with them."""
    # A saved result still belongs to the graph of the forward, which the kernels do not enter.
    given = zip(names, tensors, strict=True)
    arrays = {name: tensor.detach() for name, tensor in given if tensor is not None}
    plan, views, index_shape = question.ask(arrays, params)
    program = plan._prepare(views, index_shape)
    mask = min(tensor.element_size() for tensor in arrays.values()) - 1
    return _Recipe(plan, program, mask)
