"""Which outputs share memory with what: exact where it can be decided, and bounded.

Address ranges alone would refuse the two interleaved halves of one buffer, which users do pass.
Whether two strided arrays share an element is a bounded linear Diophantine problem: NP-hard in
general, trivial for the arrays people make. So ranges are compared first, then the problem is
simplified and searched within a fixed amount of work, and what stays open is refused.

Addresses are compared whatever the devices: they share one address space, and managed or pinned
memory may be named from either side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from math import gcd

from .errors import InvalidProblem
from .views import View

__all__ = ["apart", "check_overlaps", "overlaps", "same_place", "self_overlaps"]

_Shape = tuple[int, ...]
# A coefficient and the largest value of its variable, the smallest being 0.
_Term = tuple[int, int]

# Visited nodes per question: about a tenth of a second at worst, and far from what real strides
# need.
_WORK = 100_000


def same_place(a: View, b: View) -> bool:
    """Whether both are the very same elements in the same order."""
    return a.ptr == b.ptr and a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype


def overlaps(a: View, b: View) -> bool | None:
    """Whether two views share a byte; None where the bound on the work was reached."""
    if a.hi <= b.lo or b.hi <= a.lo or a.lo == a.hi or b.lo == b.hi:
        return False
    return _share(a.shape, a.strides, a.itemsize, b.shape, b.strides, b.itemsize, b.ptr - a.ptr)


@lru_cache(maxsize=1024)
def self_overlaps(shape: _Shape, strides: _Shape) -> bool | None:
    """Whether two indices of one array name the same element; None where undecided."""
    if 0 in shape:
        return False
    axes = sorted((abs(step), n - 1) for n, step in zip(shape, strides, strict=True) if n > 1)
    budget = [_WORK]
    reach = 0  # of the axes before this one
    open_question = False
    for k, (step, last) in enumerate(axes):
        if step == 0:
            return True
        if step <= reach:
            # Two indices meet whose difference is, in its widest axis that differs, d ≥ 1:
            # step·d + Σ s·e = 0 with |e| ≤ last. Shifted to start at 0: d − 1 and e + last.
            terms = [(step, last - 1)] + [(s, 2 * m) for s, m in axes[:k]]
            answer = _solvable(terms, reach - step, budget)
            if answer:
                return True
            open_question |= answer is None
        reach += step * last
    return None if open_question else False


@lru_cache(maxsize=1024)
def _share(
    shape_a: _Shape,
    strides_a: _Shape,
    size_a: int,
    shape_b: _Shape,
    strides_b: _Shape,
    size_b: int,
    distance: int,
) -> bool | None:
    """Whether elements of two arrays meet whose first elements lie `distance` bytes apart.

    Σ i·s + u = distance + Σ j·t + v, with u and v the bytes inside an element. Negative strides
    are flipped and j and v counted from the far end, so that all coefficients are positive.
    """
    unit = gcd(size_a, size_b, distance)
    wide_a, wide_b = size_a // unit, size_b // unit
    terms = [(1, wide_a - 1), (1, wide_b - 1)]
    target = distance // unit + wide_b - 1
    for n, step in zip(shape_a, strides_a, strict=True):
        terms.append((abs(step) * wide_a, n - 1))
        if step < 0:
            target -= (n - 1) * step * wide_a
    for n, step in zip(shape_b, strides_b, strict=True):
        terms.append((abs(step) * wide_b, n - 1))
        if step > 0:
            target += (n - 1) * step * wide_b
    return _solvable(terms, target, [_WORK])


def _simplified(terms: Iterable[_Term]) -> list[_Term]:
    """Fewer terms that reach the same sums, by falling coefficient."""
    kept: list[_Term] = []
    for step, last in sorted(terms):
        if step == 0 or last == 0:
            continue
        if kept:
            low, most = kept[-1]
            ratio, odd = divmod(step, low)
            # The sums of the lower term leave no gap that this one steps over.
            if not odd and ratio <= most + 1:
                kept[-1] = (low, most + ratio * last)
                continue
        kept.append((step, last))
    kept.reverse()
    return kept


def _solvable(terms: Iterable[_Term], target: int, budget: list[int]) -> bool | None:
    """Whether Σ c·x = target has a solution with 0 ≤ x ≤ last for every term (c, last)."""
    kept = _simplified(terms)
    count = len(kept)
    # What the terms from k on can reach at most, and what all their sums are multiples of.
    most = [0] * (count + 1)
    divisor = [0] * (count + 1)
    for k in range(count - 1, -1, -1):
        step, last = kept[k]
        most[k] = most[k + 1] + step * last
        divisor[k] = gcd(divisor[k + 1], step)

    def search(k: int, rest: int) -> bool | None:
        if k == count:
            return rest == 0
        if not 0 <= rest <= most[k] or rest % divisor[k]:
            return False
        if k == count - 1:
            return True
        budget[0] -= 1
        if budget[0] < 0:
            return None
        step, last = kept[k]
        # Only some x leave a remainder that the later terms can still make up: those in a range,
        # and in one residue class. With one later term that is exact, so nothing is searched.
        least = max(0, -((most[k + 1] - rest) // step))
        top = min(last, rest // step)
        modulus = divisor[k + 1] // divisor[k]
        residue = rest // divisor[k] * pow(step // divisor[k], -1, modulus) % modulus
        first = least + (residue - least) % modulus
        if k == count - 2:
            return first <= top
        for x in range(first, top + 1, modulus):
            answer = search(k + 1, rest - step * x)
            if answer is not False:
                return answer
        return False

    return search(0, target)


def apart(out: View, views: Mapping[str, View], same: Collection[str]) -> bool:
    """The quick answer: an output's address range meets no other's, but for exactly a `same` one.

    False means that `check_overlaps` has to look. Whether an output overlaps itself is a matter
    of its layout, and not asked here.
    """
    ptr, layout = out.ptr, out.layout
    lo, hi = ptr + layout.lo, ptr + layout.hi
    for name, other in views.items():
        at, there = other.ptr, other.layout
        if at + there.lo < hi and lo < at + there.hi and other is not out:
            if at == ptr and there is layout and name in same:
                continue
            return False
    return True


_DY = frozenset({"dy"})


def check_overlaps(
    owner: str,
    inputs: list[tuple[str, View]],
    outputs: list[tuple[str, View]],
    same: Collection[str] = _DY,
) -> None:
    """Refuse outputs that overlap an input, another output or themselves.

    An output may be exactly an input whose name is in `same`; inputs may overlap each other.
    """
    for k, (name, out) in enumerate(outputs):
        lo, hi = out.lo, out.hi
        if lo == hi:
            continue
        answer = self_overlaps(out.shape, out.strides)
        if answer is not False:
            raise _refusal(owner, answer, f"output {name}", "itself", out, out)
        for other, read in inputs:
            if read.hi <= lo or hi <= read.lo or (other in same and same_place(out, read)):
                continue
            answer = overlaps(out, read)
            if answer is not False:
                hint = f" (it may be exactly {other})" if other in same else ""
                raise _refusal(owner, answer, f"output {name}", f"input {other}{hint}", out, read)
        for other, written in outputs[k + 1 :]:
            if written.hi <= lo or hi <= written.lo:
                continue
            answer = overlaps(out, written)
            if answer is not False:
                raise _refusal(owner, answer, f"output {name}", f"output {other}", out, written)


def _refusal(
    owner: str, answer: bool | None, one: str, other: str, a: View, b: View
) -> InvalidProblem:
    found = (
        f"{one} overlaps {other}"
        if answer
        else f"it could not be decided whether {one} overlaps {other}"
    )
    layouts = f"shape {a.shape} strides {a.strides}"
    if a is not b:
        layouts += f" and shape {b.shape} strides {b.strides}, {b.ptr - a.ptr} bytes apart"
    return InvalidProblem(f"{owner}: expected an output of its own, but {found}: {layouts}")
