"""Stretches of a scan's axis, and how two of them join: what one does to an S that arrives at its
far end, and where no y is given the scan's own state, its winner or m + log e.
"""

import triton
import triton.language as tl

# exp of less than this is 0 in f64: half its least number, and that is rounded to 0.
NOTHING = tl.constexpr(-745.1332191019411)
LEAST = tl.constexpr(2.0**-1074)


@triton.jit
def affine(c1, s1, c2, s2):
    """(c, s) stands for S ↦ s + c · S; the first argument is the part nearer the far end."""
    return c1 * c2, s2 + c2 * s1


@triton.jit
def fading(c1, s1, c2, s2):
    """The same of factors that are never larger than 1, in f64."""
    return times(c1, c2), s2 + c2 * s1


@triton.jit
def times(a, b):
    """The product of two such factors, 0 only where one of them is: what is infinite stays so,
    however small the factors are that it meets one by one."""
    product = a * b
    return tl.where((product == 0.0) & (a != 0.0) & (b != 0.0), LEAST, product)


@triton.jit
def gated(f1, s1, f2, s2):
    """Gates of a stretch: bit 0, its first element is a winner; bit 1, one of the others is."""
    closed = ((f2 & 2) | (f1 & 1)) != 0
    return (f2 & 3) | ((f1 & 1) << 1) | (f1 & 2), s2 + tl.where(closed, 0.0, s1)


@triton.jit
def opened(f1, s1, f2, s2):
    """A gate a stretch: 1 lets all that arrives through to its first element."""
    return f1 & f2, s2 + tl.where(f2 != 0, s1, 0.0)


@triton.jit
def first_wins(m1, i1, m2, i2):
    wins = (m2 > m1) | ((m2 != m2) & (m1 == m1))
    return tl.where(wins, m2, m1), tl.where(wins, i2, i1)


@triton.jit
def last_wins(m1, i1, m2, i2):
    wins = (m2 >= m1) | (m2 != m2)
    return tl.where(wins, m2, m1), tl.where(wins, i2, i1)


@triton.jit
def larger(a, b):
    """The larger; NaN is larger than any number."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def ratio(a, b):
    """exp(a − b), and 1 where they are equal: two infinities have no difference."""
    return tl.where(a == b, 1.0, tl.exp(a - b))


@triton.jit
def log_add(m1, e1, m2, e2):
    """(m, e) stands for m + log e, m the largest term, in f64."""
    # Of the two, one is the largest: the other alone takes an exponential.
    less = tl.where(m1 == m2, 1.0, tl.exp(-tl.abs(m1 - m2)))
    rises = m2 > m1
    return larger(m1, m2), tl.where(rises, e1, e2) * less + tl.where(rises, e2, e1)


@triton.jit
def pick(value, chosen):
    """The value of each row at the one chosen place: picked, never multiplied."""
    return tl.sum(tl.where(chosen, value, 0.0), 1)


@triton.jit
def extremum(KIND: tl.constexpr, x):
    """cummin is cummax of −x."""
    if KIND == "cummin":
        return -x
    else:
        return x


@triton.jit
def beats(TIES: tl.constexpr, x, m):
    if TIES == "first":
        return (x > m) | ((x != x) & (m == m))
    else:
        return (x >= m) | (x != x)
