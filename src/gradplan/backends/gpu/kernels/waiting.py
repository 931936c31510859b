"""Programs of one launch that wait for each other.

A program takes its turn when it starts, so the programs of the first unfinished row are running or
the next to start: a launch goes on as long as the machine has room for the programs of one row.
The counters need no clearing: every run adds the same to each, a power of two, and their low bits
are 0 again when it ends.
"""

import triton
import triton.language as tl

_TURNS = tl.constexpr(1 << 20)
_ROUND = tl.constexpr(1 << 16)


@triton.jit
def turn(counter):
    """How many programs of this launch started before; fewer than 2²⁰ in all."""
    mine = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") & (_TURNS - 1)
    if mine == tl.num_programs(0) - 1:  # the last one fills the counter up
        tl.atomic_add(counter, _TURNS - 1 - mine, sem="relaxed", scope="gpu")
    return mine


@triton.jit
def meet(counter, part, parts):
    """Wait until all `parts` programs are here; what they stored before can then be loaded."""
    tl.debug_barrier()  # all threads have stored
    mine = tl.where(part == 0, _ROUND + 1 - parts, 1)
    before = tl.atomic_add(counter, mine, sem="acq_rel", scope="gpu")
    complete = (before & -_ROUND) + _ROUND
    now = before + mine
    while now - complete < 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def meet_cluster():
    """The same for the programs of a cluster, which run at the same time by their nature."""
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
