"""The formulas of every kind, as scalar functions; the engines know no kind by name.

Notation is the contract's. A map kind is `apply`; a row kind adds a state (`first`, `step`,
`merge`, `finish`) summed over the row; a scan kind is a recurrence from the far end.

Types: functions see f64 where the element is f32 or f64, and f32 where it is a half (`is_wide`
has the exceptions). States are kept in f64; a row's blocks of 512 are summed in the working type.
Constants come typed (`zero`, `one`), because Numba would widen f32 · 1.0 to f64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....kinds import (
    BinaryKind,
    ElementKind,
    Named,
    ReduceKind,
    ScanKind,
    SoftmaxKind,
    TieRule,
)
from .device import inlined, ordered
from .exponential import (
    decay_f32,
    exp_f32,
    exp_f32_of_difference,
    exp_f64,
    exp_f64_of_difference,
    exp_scaled,
    exp_scaled_of_difference,
    lost_f64,
)
from .lowlevel import bits_of_f64, f64_of_bits

__all__ = ["MapFormula", "RecurrenceFormula", "map_formula", "recurrence_formula"]

Scalar = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class MapFormula:
    """dx = apply(row, dy, x, y): with nothing known of the row, a plain map.

    - `step(s, dy, x, y, i, p)` → s, `merge(s, t)` → s, `finish(s, n)` → s, tuples throughout: the
      row's state, from all its elements;
    - `settle(s, dy, y, p)` → r: of a reduction, whose dy and y are one number a row, what the map
      needs to know of them and of the state, in f64; r is the state where there is no `settle`;
    - `apply(r, dy, x, y, i, p, q, is_easy, s)` → dx; `apply2` gives a second output; r comes in
      the map's type, s is the state in f64; dy and y come to kinds that do not reduce;
    - `easy(r)`: whether a row can take the short way that `apply` offers such rows;
    - i is the element's index in C order over the reduced axes (only where `indexed`);
    - p and q are the problem's parameters.
    """

    uses: str
    apply: Scalar
    apply2: Scalar | None = None
    first: tuple[float, ...] = ()
    step: Scalar | None = None
    merge: Scalar | None = None
    finish: Scalar | None = None
    settle: Scalar | None = None
    settled: int = 1
    """How many numbers `settle` gives."""
    easy: Scalar | None = None
    indexed: bool = False
    blank: bool = False
    """Whether elements whose state is `first` all map to 0."""
    overflows: bool = False
    """Whether a sum in f32 may leave its range where the row's does not leave f64's."""


def is_wide(
    kind: Named, element: ElementKind, ties: TieRule | None, *, mapped: bool = False
) -> bool:
    """Whether a map or row kind computes in f64; `mapped` asks of the map, not of the state.

    Halves compute in f32, where that will do. So do the maps of f32 softmax, log-softmax and
    log-sum-exp, which f64 arithmetic would slow down; states are summed in f64 all the same.
    Where a map only compares or copies, f32 loses nothing.
    """
    in_f32 = (*SoftmaxKind, ReduceKind.LOG_SUM_EXP)
    chooses = (ReduceKind.MEAN, ReduceKind.MAX)
    if ties in (TieRule.FIRST, TieRule.LAST):
        return True  # f32 cannot hold the index
    if element is ElementKind.F32 and kind in chooses:
        return False
    if mapped and element is ElementKind.F32 and kind in in_f32:
        return False
    unbounded = (SoftmaxKind.LOG_SOFTMAX, ReduceKind.VAR, ReduceKind.STD)
    if not mapped and element is ElementKind.BF16 and kind in unbounded:
        return True  # a sum of bf16 may leave the range of f32
    return element in (ElementKind.F32, ElementKind.F64) or kind == ReduceKind.PROD


def _sum_merge(s, t):
    return (s[0] + t[0],)


def _keep(s, n):
    return s


def _mean(s, n):
    return (s[0] / n,)


def map_formula(kind: Named, element: ElementKind, ties: TieRule | None) -> MapFormula:
    """The formula of a map or row kind, for this element."""
    real = np.float64 if is_wide(kind, element, ties, mapped=True) else np.float32
    zero, one = real(0), real(1)
    # f32 in f64 and f16 in f32 leave so much room that dy / y can neither overflow nor lose bits:
    # there a division a row replaces one an element.
    roomy = element in (ElementKind.F32, ElementKind.F16)
    exact = element is ElementKind.F64
    exp = exp_f64 if exact else exp_f32

    if kind == SoftmaxKind.SOFTMAX:

        def step(s, dy, x, y, i, p):
            return (s[0] + y * dy,)

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            if exact or is_easy:
                return y * dy - y * r[0]  # dy − r might overflow
            return np.float64(y) * (np.float64(dy) - s[0])

        if exact:
            return _row("dy y", step, _keep, apply)
        # Small sums also take the long way: f32's subnormals feel every rounding.
        row = replace(_row("dy y", step, _keep, apply), easy=ordered(_moderate))
        return replace(row, overflows=element is ElementKind.BF16)

    if kind == SoftmaxKind.LOG_SOFTMAX:

        def step(s, dy, x, y, i, p):
            return (s[0] + dy,)

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            if is_easy:
                return dy - exp(y) * r[0]
            return np.float64(dy) - exp_f64(np.float64(y)) * s[0]

        def easy(r):
            return abs(r[0]) < 1e38  # f32 holds it, and what exp_f32 leaves out is nothing

        return replace(_row("dy y", step, _keep, apply), easy=inlined(easy))

    if kind == BinaryKind.LERP:

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            return p * dy

        def apply2(r, dy, x, y, i, p, q, is_easy, s):
            return q * dy

        return MapFormula(uses="dy", apply=inlined(apply), apply2=inlined(apply2))

    if kind == ReduceKind.MEAN:  # p = n, and 1 for a sum

        def settle(s, dy, y, p):
            return (dy / p,)

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            return r[0]

        return MapFormula(uses="dy", settle=ordered(settle), apply=inlined(apply))

    if kind == ReduceKind.NORM2:
        if exact:

            def settle(s, dy, y, p):
                return dy, y

            def apply(r, dy, x, y, i, p, q, is_easy, s):
                # x / y first: it is at most 1, where dy · x might overflow.
                return zero if r[1] == zero else r[0] * (x / r[1])

            return MapFormula(
                uses="dy x y", settle=ordered(settle), settled=2, apply=ordered(apply)
            )

        def settle(s, dy, y, p):
            return (0.0 if y == 0.0 else dy / y), dy, y

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            if roomy or is_easy:
                return x * r[0]
            # As in f64: x / y first. A row beside this one may have called for it.
            return zero if r[2] == zero else r[1] * (x / r[2])

        return MapFormula(
            uses="dy x y",
            settle=ordered(settle),
            settled=3,
            easy=ordered(_moderate),
            apply=ordered(apply),
        )

    if kind == ReduceKind.LOG_SUM_EXP:
        careful = element is ElementKind.F32  # a half's difference loses nothing that counts

        def settle(s, dy, y, p):
            empty = y == -np.inf  # and so is every x: 0 · exp(x − 0)
            return (0.0 if empty else dy), (0.0 if empty else y)

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            if exact:
                return r[0] * exp(x - r[1])
            if is_easy:
                return r[0] * (exp_f32_of_difference(x, r[1]) if careful else exp(x - r[1]))
            return np.float64(r[0]) * exp_f64(np.float64(x) - np.float64(r[1]))

        def easy(r):
            return abs(r[0]) < 2.0**100  # what exp_f32 leaves out is nothing

        return MapFormula(
            uses="dy x y",
            settle=ordered(settle),
            settled=2,
            easy=None if exact else ordered(easy),
            apply=inlined(apply),
        )

    if kind == ReduceKind.VAR:  # p = m

        def step(s, dy, x, y, i, p):
            return (s[0] + x,)

        def settle(s, dy, y, p):
            return s[0], dy * (2.0 / p), dy

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            if roomy or is_easy:
                return r[1] * (x - r[0])
            if exact:
                # Three factors, in an order that leaves the range only where the result does.
                deviation, scale = _difference(x, r[0])
                if abs(r[2]) < 1.0:
                    return r[2] * deviation * (2.0 / p) * scale
                return r[2] / p * deviation * (2.0 * scale)
            return np.float64(r[2]) * 2.0 * (np.float64(x) - s[0]) / np.float64(p)

        # Below such a mean no difference overflows. A tiny one f32 rounds to 2⁻¹⁴⁹, which no bf16
        # feels, unless dy makes much of it.
        most_mean = 2.0**960 if exact else 2.0**119
        least, most = (2.0**-900, 2.0**900) if exact else (2.0**-100, 2.0**16)

        def easy(r):
            size = abs(r[1])
            fits = (size > least) & (size < most) | (r[2] == 0.0)
            return (abs(r[0]) < most_mean) & fits

        row = _row("dy x", step, _mean, apply)
        return replace(
            row,
            apply=ordered(apply),
            settle=ordered(settle),
            settled=3,
            easy=None if roomy else ordered(easy),
        )

    if kind == ReduceKind.STD:  # p = m

        def step(s, dy, x, y, i, p):
            return (s[0] + x,)

        def settle(s, dy, y, p):
            return (0.0 if y == 0.0 else dy / (p * y)), s[0], dy / p, y

        def apply(r, dy, x, y, i, p, q, is_easy, s):
            if roomy or is_easy:
                return (x - r[1]) * r[0]
            # deviation / y is at most √n in size, where m · y might underflow.
            if exact:
                deviation, scale = _difference(x, r[1])
                return zero if r[3] == zero else r[2] * (deviation / (r[3] / scale))
            y = np.float64(r[3])
            return 0.0 if y == 0.0 else np.float64(r[2]) * ((np.float64(x) - s[0]) / y)

        reach = 2.0**900 if exact else 2.0**90

        def easy(r):
            size, y = abs(r[0]), abs(r[3])
            fits = (size > 1.0 / reach) & (size < reach) | (r[2] == 0.0)
            return ((y == 0.0) & (abs(r[1]) < np.inf)) | ((y > 1.0 / reach) & (y < reach) & fits)

        row = _row("dy x y", step, _mean, apply)
        return replace(
            row,
            apply=ordered(apply),
            settle=ordered(settle),
            settled=4,
            easy=None if roomy else ordered(easy),
        )

    if kind == ReduceKind.PROD:
        return _prod(element)

    if kind == ReduceKind.MAX:  # and min
        return _extremum(ties, zero, one)

    raise KeyError(kind)


def _moderate(r):
    """Whether f32 holds r[0] with room on both sides."""
    size = abs(r[0])
    return (size == 0.0) | ((size > 2.0**-100) & (size < 2.0**100))


@ordered
def _difference(x, mean):
    """x − mean in f64 as (difference, scale), where the difference alone might overflow."""
    if abs(mean) < 2.0**960:
        return x - mean, 1.0
    return x * 0.25 - mean * 0.25, 4.0


def _row(uses: str, step: Scalar, finish: Scalar, apply: Scalar) -> MapFormula:
    return MapFormula(
        uses=uses,
        first=(0.0,),
        step=inlined(step),
        merge=inlined(_sum_merge),
        finish=inlined(finish),
        apply=inlined(apply),
    )


def _extremum(ties: TieRule | None, zero: Any, one: Any) -> MapFormula:
    """max and min: which x equal y is all that matters, and NaN equals NaN."""

    @inlined
    def hit(x, y):
        return (x == y) | ((x != x) & (y != y))

    def apply(r, dy, x, y, i, p, q, is_easy, s):
        return r[0] if hit(x, r[1]) else zero

    if ties is TieRule.ALL:

        def all_of_it(s, dy, y, p):
            return dy, y

        return MapFormula(uses="dy x y", settle=ordered(all_of_it), settled=2, apply=inlined(apply))

    if ties is TieRule.SPLIT:

        def step(s, dy, x, y, i, p):
            return (s[0] + (one if hit(x, y) else zero),)

        def share(s, dy, y, p):
            return dy / s[0], y

        row = _row("dy x y", step, _keep, apply)
        return replace(row, settle=ordered(share), settled=2, blank=True)

    return _one_of_the_ties(ties is TieRule.FIRST, hit, zero)


def _one_of_the_ties(first: bool, hit: Scalar, zero: Any) -> MapFormula:
    """The state is the index of the tie that counts so far."""

    def step(s, dy, x, y, i, p):
        better = i < s[0] if first else i > s[0]
        return (i if hit(x, y) & better else s[0],)

    def merge(s, t):
        better = t[0] < s[0] if first else t[0] > s[0]
        return (t[0] if better else s[0],)

    def settle(s, dy, y, p):
        return s[0], dy

    def apply(r, dy, x, y, i, p, q, is_easy, s):
        return r[1] if i == r[0] else zero

    return MapFormula(
        uses="dy x y",
        settle=ordered(settle),
        settled=2,
        first=(np.inf if first else -1.0,),
        step=inlined(step),
        merge=inlined(merge),
        finish=inlined(_keep),
        apply=inlined(apply),
        indexed=True,
        blank=True,
    )


_EXPONENT = 0x7FF
_MANTISSA = 0x000FFFFFFFFFFFFF
_SIGN = -0x8000000000000000
_ONE_BITS = 0x3FF0000000000000
_MAGIC_BITS = 0x4338000000000000  # 1.5 · 2^52: adding a small integer gives its float
_MAGIC = 1.5 * 2.0**52
_SUBNORMAL_LIFT = 2.0**54
# Zeros, infinities and NaNs are counted in one number, ten bits each.
_ZERO, _INFINITY, _NAN = 1.0, 2.0**10, 2.0**20


def _prod(element: ElementKind) -> MapFormula:
    """dy · Π of the others, with no division by zero and no overflow on the way.

    The state is Π of the significands (1 ≤ |m| < 2, signs included), the sum of the exponents,
    and how many zeros, infinities and NaNs there are, which count as ±1 in the product. Leaving
    one factor out is then exact whatever it was: its significand is divided out, its exponent
    subtracted, its count taken off. A block of 512 significands multiplies to less than 2^512,
    and `merge` normalises; it also stops counting at 2, since one is all that leaves.
    """
    exact = element is ElementKind.F64
    has_subnormals = exact  # the others' are normal numbers in f64

    @ordered
    def parts(x):
        # significand, exponent and count
        lift = 0.0
        bits = bits_of_f64(x)
        if has_subnormals:
            tiny = ((bits >> 52) & _EXPONENT) == 0
            bits = bits_of_f64(x * _SUBNORMAL_LIFT if tiny else x)
            lift = 54.0 if tiny else 0.0
        field = (bits >> 52) & _EXPONENT
        special = (field == 0) | (field == _EXPONENT)
        keep = bits & (_SIGN if special else _SIGN | _MANTISSA)
        exponent = f64_of_bits(_MAGIC_BITS + field) - (_MAGIC + 1023.0) - lift
        unbounded = _NAN if x != x else _INFINITY
        count = _ZERO if field == 0 else unbounded
        return (
            f64_of_bits(keep | _ONE_BITS),
            0.0 if special else exponent,
            count if special else 0.0,
        )

    @ordered
    def split(count):
        # zeros, infinities, NaNs
        nans = float(int(count * (1.0 / _NAN)))
        rest = count - nans * _NAN
        infinities = float(int(rest * (1.0 / _INFINITY)))
        return rest - infinities * _INFINITY, infinities, nans

    @ordered
    def power(e):
        return f64_of_bits((bits_of_f64(e + (1023.0 + _MAGIC)) - _MAGIC_BITS) << 52)

    def step(s, dy, x, y, i, p):
        m, e, count = parts(x)
        return s[0] * m, s[1] + e, s[2] + count

    def merge(s, t):
        m, e, _ = parts(s[0])
        n, f, _ = parts(t[0])
        zeros, infinities, nans = split(s[2])
        more_zeros, more_infinities, more_nans = split(t[2])
        count = (
            min(zeros + more_zeros, 2.0) * _ZERO
            + min(infinities + more_infinities, 2.0) * _INFINITY
            + min(nans + more_nans, 2.0) * _NAN
        )
        return m * n, s[1] + t[1] + e + f, count

    def finish(s, n):
        m, e, _ = parts(s[0])
        return m, s[1] + e, s[2]

    def settle(s, dy, y, p):
        product = s[0] * power(min(max(s[1], -1000.0), 1000.0))
        return s[0], s[1], s[2], dy, (product if exact else product * dy)

    def easy(r):
        # Nothing special in the row, and its product a normal number, times dy too: divide it by x.
        return (r[2] == 0.0) & (abs(r[1]) < (1000.0 if exact else 800.0))

    def apply(r, dy, x, y, i, p, q, is_easy, s):
        if is_easy:
            return r[3] * (r[4] / x) if exact else r[4] / x
        m, e, count = parts(x)
        ratio = r[0] / m
        # 2^exponent in two factors, each of them a normal number.
        exponent = min(max(r[1] - e, -2044.0), 2044.0)
        low = (exponent * 0.5 + _MAGIC) - _MAGIC
        others = ratio * power(low) * power(exponent - low)
        left = r[2] - count
        nan = left >= _NAN
        left = left - (2.0 * _NAN if left >= 2.0 * _NAN else _NAN if nan else 0.0)
        infinite = left >= _INFINITY
        left = left - (
            2.0 * _INFINITY if left >= 2.0 * _INFINITY else _INFINITY if infinite else 0.0
        )
        others = ratio * 0.0 if left > 0.0 else others
        others = (others if left > 0.0 else ratio) * np.inf if infinite else others
        others = np.nan if nan else others
        return r[3] * others

    return MapFormula(
        uses="dy x",
        first=(1.0, 0.0, 0.0),
        step=inlined(step),
        merge=ordered(merge),
        finish=ordered(finish),
        settle=ordered(settle),
        settled=5,
        apply=ordered(apply),
        easy=ordered(easy),
    )


_LARGEST, _SMALLEST = 1.7976931348623157e308, 5e-324


@ordered
def times(m, e, x):
    """m · 2^e · x as such a pair: the product of a chunk leaves the range of f64 where those of the
    row, of which it is a quotient, do not. |m| stays within 2^±300 unless it is 0, infinite or NaN;
    scaling by powers of two rounds nothing."""
    big, small = abs(x) > 2.0**400, abs(x) < 2.0**-400
    x = x * (2.0**-600 if big else 2.0**600 if small else 1.0)
    e += 600.0 if big else -600.0 if small else 0.0
    m = m * x
    big, small = abs(m) > 2.0**300, abs(m) < 2.0**-300
    m = m * (2.0**-600 if big else 2.0**600 if small else 1.0)
    return m, e + (600.0 if big else -600.0 if small else 0.0)


@ordered
def value_of(m, e):
    """m · 2^e as one number."""
    for least in (600.0, 1200.0, 1800.0):
        m = m * (2.0**600 if e >= least else 2.0**-600 if e <= -least else 1.0)
    return m


@ordered
def sent_on(m, e, S):
    """m · 2^e · S, where m · 2^e alone may be out of range."""
    m, e = times(m, e, S)
    return value_of(m, e)


@ordered
def settled(m, e):
    """m · 2^e, of which range alone makes neither 0 nor infinity: in the row the next factor might
    have brought it back."""
    value = value_of(m, e)
    if value == 0.0 and m != 0.0:
        return _SMALLEST if m > 0.0 else -_SMALLEST
    if abs(value) == np.inf and abs(m) != np.inf:
        return _LARGEST if m > 0.0 else -_LARGEST
    return value


@dataclass(frozen=True, kw_only=True)
class RecurrenceFormula:
    """A scan gradient, one step at a time from the far end, all in f64.

    With T the part of the gradient that arrives from k+1:

        S = dy[k] + T,   dx[k] = out(S),   T ← gain · S

    so `gain` at step k is the contract's c[k−1]: it needs x[k] and the scan's state before and
    after k alone. The state is read from y where y is given, and otherwise recomputed from x by
    `forward`. Where `chosen`, gain is 0 or 1 and chooses: 0 · NaN must not leak.
    """

    uses_x: bool
    slots: int
    identity: tuple[float, ...] = ()
    forward: Scalar | None = None
    merge: Scalar | None = None
    product: bool = False
    """Whether the state is the product of all x, and has no `merge`: see `times`."""
    out: Scalar
    gain: Scalar
    chosen: bool = False
    grouped: bool = True
    """Whether a step is so short that several are worth a loop's body."""


def recurrence_formula(
    kind: Named, element: ElementKind, ties: TieRule | None, from_y: bool
) -> RecurrenceFormula:
    """The formula of a scan kind, with the state from y or recomputed."""
    if kind == ScanKind.CUMSUM:

        def out(S, x, before, after):
            return S

        def gain(x, before, after):
            return 1.0

        return RecurrenceFormula(uses_x=False, slots=0, out=ordered(out), gain=ordered(gain))

    if kind == ScanKind.CUMPROD:

        def forward(s, x):
            return (s[0] * x,)

        def out(S, x, before, after):
            return before[0] * S

        def gain(x, before, after):
            return x

        return RecurrenceFormula(
            uses_x=True,
            slots=1,
            identity=(1.0,),
            forward=ordered(forward),
            product=True,
            out=ordered(out),
            gain=ordered(gain),
        )

    if kind in (ScanKind.CUMMAX, ScanKind.CUMMIN):
        return _running_extremum(kind == ScanKind.CUMMAX, ties is TieRule.LAST)

    if kind == ScanKind.LOG_CUMSUM_EXP:
        return _log_cumsum_exp_of_y(element) if from_y else _log_cumsum_exp(element)

    raise KeyError(kind)


def _running_extremum(largest: bool, later_wins: bool) -> RecurrenceFormula:
    @ordered
    def beats(x, m):
        if later_wins:
            return ((x >= m) if largest else (x <= m)) | (x != x)
        return ((x > m) if largest else (x < m)) | ((x != x) & (m == m))

    def forward(s, x):
        return (x if beats(x, s[0]) else s[0],)

    def merge(s, t):
        return (t[0] if beats(t[0], s[0]) else s[0],)

    def out(S, x, before, after):
        return S if beats(x, before[0]) else 0.0

    def gain(x, before, after):
        return 0.0 if beats(x, before[0]) else 1.0

    return RecurrenceFormula(
        uses_x=True,
        slots=1,
        identity=(-np.inf if largest else np.inf,),
        forward=ordered(forward),
        merge=ordered(merge),
        out=ordered(out),
        gain=ordered(gain),
        chosen=True,
    )


def _log_cumsum_exp_of_y(element: ElementKind) -> RecurrenceFormula:
    """Exponentials are f32 where that is exact enough: the gains of f32, which multiply up along
    the row, are not."""
    exact, careful = element is ElementKind.F64, element is ElementKind.F32
    half = not exact and not careful

    def out(S, x, before, after):
        if exact:
            w = exp_f64_of_difference(x, after[0])
        elif careful:
            w = exp_scaled_of_difference(np.float32(x), np.float32(after[0]))
        else:
            w = exp_scaled(np.float32(x - after[0]))
        return 0.0 if x == -np.inf else w * S

    def gain(x, before, after):
        if before[0] == after[0]:
            return 1.0
        if half:
            return decay_f32(before[0] - after[0])
        return exp_f64_of_difference(before[0], after[0])

    return RecurrenceFormula(
        uses_x=True,
        slots=1,
        identity=(-np.inf,),
        out=ordered(out),
        gain=ordered(gain),
        grouped=False,
    )


def _log_cumsum_exp(element: ElementKind) -> RecurrenceFormula:
    """y = m + log E is kept as (m, E): the running maximum and the sum of exp(x − m).

    One exponential t = exp(−|x − m|) a step serves both cases: a new maximum scales the old sum
    by t, any other x adds t. Neither a logarithm nor y itself is ever needed.
    """
    exact = element is ElementKind.F64

    @ordered
    def t_of(x, m):
        t = exp_f64(-abs(x - m))
        t = 1.0 if x == m else t
        return 0.0 if x == -np.inf else t

    @ordered
    def exact_t_of(x, m):
        # A sum does not show what a small term has lost, but a gradient that is small itself does.
        t = t_of(x, m)
        if exact:
            d = x - m
            lost = lost_f64(x, m, d) * (1.0 if d < 0.0 else -1.0)
            t = t + t * lost
        return t

    def forward(s, x):
        m, total = s
        t = t_of(x, m)
        return (x if x > m else m), (total * t + 1.0 if x > m else total + t)

    def merge(s, t):
        m, total = s
        n, more = t
        scale = t_of(n, m) if n <= m else t_of(m, n)
        scale = scale if more == more else more
        if n > m:
            return n, total * scale + more
        return m, total + more * scale

    def out(S, x, before, after):
        m = before[0]
        t = exact_t_of(x, m)
        w = (1.0 if x > m else t) / after[1]
        w = np.nan if x == np.inf else w  # exp(inf − inf)
        return 0.0 if x == -np.inf else w * S

    def gain(x, before, after):
        m, total = before
        t = exact_t_of(x, m)
        c = total * (t if x > m else 1.0) / after[1]
        same = (after[1] == 0.0) | ((m == np.inf) & (after[1] == after[1]))
        return 1.0 if same else c

    return RecurrenceFormula(
        uses_x=True,
        slots=2,
        identity=(-np.inf, 0.0),
        forward=ordered(forward),
        merge=ordered(merge),
        out=ordered(out),
        gain=ordered(gain),
    )
