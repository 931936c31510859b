"""Where things lie in the blocks of int64 that Python hands to kernels."""

from __future__ import annotations

# Bytes of a cache line.
LINE = 64
# The most elements of a tile that turns rows round, and of one whose scan is run again.
TILE, RECOMPUTED_TILE = 4096, 2048
# The most lanes of a scan that saves its state, or needs none.
MAX_LANES = 1024

# The control block of a shared launch; contended words lie on cache lines of their own.
EPOCH, OPEN, ACTIVE, NEXT = 0, 8, 16, 24
FUNCTION, CALL, UNITS, GRAIN, LIMIT = 32, 33, 34, 35, 36
WORDS = 40

# The call block: what changes from call to call.
META, DY, X, Y, OUT, OUT2, WORKSPACE, PHASE = range(8)
CALL_WORDS = 8

# The meta block: the geometry of a bound problem, fixed once its shape and strides are known.
# `EXTENT` is the number of elements along the axis (all reduced axes together).
EXTENT, CHUNK, CHUNKS, ROWS, LANE_WIDTH, LANE_BLOCKS = range(6)
# Of rows: the tie rules' index of the first element visited (an axis may be walked backwards).
INDEX_BASE = 6
# Of the recurrence: whether lanes are rows side by side (else chunks of a row, once it is split),
# steps to a tile, and where in the workspace chunk results, carries, states and each thread's
# checkpoints begin (bytes).
BESIDE = 10
STEPS, PARTIALS, CARRIES, STATES, CHECKPOINTS, SLOT_BYTES = 6, 7, 8, 9, 14, 15
PARAM, PARAM2 = 10, 11
# Two innermost dimensions: along the axis, and across it. An extent, then a stride for each
# operand in the order dy, x, y, out, out2, and for the index of the tie rules.
AXIS, ACROSS = 16, 24
DIM_WORDS = 8
# Further dimensions of either kind: how many, then their entries, innermost first.
MORE_AXIS, MORE_ACROSS = 12, 13
MORE_AXIS_AT, MORE_ACROSS_AT = 32, 32 + 8 * DIM_WORDS
META_WORDS = 32 + 16 * DIM_WORDS
# Whether outputs go past the caches: in a word that no dimension's entry uses.
STREAMING = ACROSS + 7
# Of a split problem, the number of its last unit: the map visits units backwards, and so begins
# with what the pass before it has left in the caches.
LAST_UNIT = AXIS + 7

# Operands as columns of a dimension's entry.
S_DY, S_X, S_Y, S_OUT, S_OUT2, S_INDEX = 1, 2, 3, 4, 5, 6

# What a kernel does in one launch. A problem whose rows are enough to go round runs FUSED;
# a long row is cut into chunks that meet through the workspace.
FUSED, PARTIAL, COMBINE, APPLY, FORWARD, FORWARD_COMBINE = range(6)

# Of the segment sum, in place of words it has no use for: the skipped row (−1: none), how a sort
# word divides into row and position, and where in the workspace its arrays begin (bytes).
PADDING, SHIFT, KEY_BITS, COLUMNS, ACCUMULATE, BY_COUNT = 6, 7, 8, 9, 14, 15
WORDS_AT, SPARE_AT, STARTS_AT, MORE_INDEX = 10, 11, 12, 13
