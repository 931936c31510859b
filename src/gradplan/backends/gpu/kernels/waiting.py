"""Programs of one launch that wait for others.

A program takes its turn when it starts, and waits for none whose turn comes after its own. So the
earliest that has not ended can always go on, whatever else the machine runs: there is no deadlock,
and no program needs another to be resident.

Counters are 0 between launches, but for the one of turns, whose low bits are.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TURNS = tl.constexpr(1 << 28)
_READY = tl.constexpr(1 << 28)
_NOT_TOLD = tl.constexpr(-1)


@triton.jit
def turn(counter):
    """How many programs of this launch started before; fewer than 2²⁸ in all."""
    mine = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") & (_TURNS - 1)
    if mine == tl.num_programs(0) - 1:  # the last one fills the counter up
        tl.atomic_add(counter, _TURNS - 1 - mine, sem="relaxed", scope="gpu")
    return mine


@triton.jit
def meet_cluster():
    """Wait for all programs of a cluster, which run at the same time by their nature; what they
    stored before can then be loaded."""
    tl.inline_asm_elementwise(
        """
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 $0, $1;
        """,
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def enter_cluster(K: tl.constexpr):
    """The address of room in shared memory for what the programs of a cluster, of K at most, will
    `exchange`. To be called at the beginning: nobody may write there before all have started, which
    is awaited only then."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 8 .b64 told["
        + _text(K)
        + "]; mov.u32 $0, told; barrier.cluster.arrive.relaxed.aligned; } // $1",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def exchange(room, number, other, K: tl.constexpr):
    """Tell all programs of a cluster, of K at most, a number: what each has told, [1, K], and
    `other` beyond their number. Once in a program, in the room it got when it entered.

    The numbers go from one shared memory to the others, which takes half the time of a way through
    the second cache. What was stored before, in memory too, can be loaded.
    """
    # A thread for each program. All of it is scalar: of a tensor the compiler may make the same
    # again elsewhere, for another arrangement of threads, and a barrier must not come twice.
    room = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 rank, count, thread, at;
        .reg .pred tells;
        mov.u32 rank, %cluster_ctarank;
        mov.u32 count, %cluster_nctarank;
        mov.u32 thread, %tid.x;
        setp.lt.u32 tells, thread, count;
        mad.lo.u32 at, rank, 8, $1;
        barrier.cluster.wait.acquire.aligned;
        @tells mapa.shared::cluster.u32 at, at, thread;
        @tells st.shared::cluster.b64 [at], $2;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 $0, $1;
        }
        """,
        "=r,r,d",
        [room, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    one = tl.arange(0, K)[None, :]
    heard = tl.inline_asm_elementwise(
        "ld.shared.b64 $0, [$1];",
        "=d,r",
        [room + 8 * one],
        dtype=tl.float64,
        is_pure=False,
        pack=1,
    )
    return tl.where(one < _cluster_size(), heard, other)


@triton.jit
def _cluster_size():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_nctarank; // $1",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _text(number):
    return str(number)


@triton.jit
def alternate(mine, count, lead):
    """What a program does at its turn, of `count` first reads and as many second ones: whether it
    is a second one, and the number of what it reads.

    The first `lead` programs read first; then both kinds take turns until the first are done. A
    second one waits for programs whose turn came before its own, and for no others: whatever runs
    at the same time, the earliest that has not ended can go on.
    """
    past = mine - lead
    both = 2 * (count - lead)
    second = (past >= both) | ((past >= 0) & ((past & 1) == 1))
    number = tl.where(past < 0, mine, tl.where(past < both, past >> 1, past - both + count - lead))
    return second, number + tl.where(second | (past < 0), 0, lead)


@triton.jit
def arrive(counter, parts):
    """Whether this is the last of `parts` programs, which may load what all have stored."""
    tl.debug_barrier()  # all threads have stored
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before == parts - 1


@triton.jit
def open_up(counter, parts):
    """By the last: what it stored may now be loaded."""
    tl.debug_barrier()
    tl.atomic_add(counter, _READY - parts, sem="release", scope="gpu")


@triton.jit
def await_opening(counter):
    now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (now & _READY) == 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def leave(counter, parts):
    """The last of `parts` programs to leave closes again."""
    before = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if before == _READY + parts - 1:
        tl.atomic_add(counter, -_READY - parts, sem="relaxed", scope="gpu")


@triton.jit
def in_order(counter):
    """How many programs of this launch started before, by a counter that starts at −1."""
    return (tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") + 1).to(tl.int32)


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The launch after this one may begin when all programs of this one have; if it is EARLY, as
    the architecture can, it waits itself where it must."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_launch_before(EARLY: tl.constexpr):
    """Wait until the launch before this one has ended, and all before it, and what they stored can
    be loaded. Every program must, or the launch after this one might be before that one."""
    if EARLY:
        gdc_wait()


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Both, of a launch between others."""
    let_next_begin(EARLY)
    await_launch_before(EARLY)


@triton.jit
def clear(told, count, B: tl.constexpr):
    """Nothing has been told yet."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(told + at, _NOT_TOLD, mask=at < count)
