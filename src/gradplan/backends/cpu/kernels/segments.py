"""Segment sums: the embedding's gradient.

- SORT: indices that count are sorted stably by the row they name (radix sort; a word carries
  its position in the low bits), and the places where a row begins are noted;
- APPLY: each row of the table is summed by one thread in the order of the indices, in f64,
  a slice of the columns at a time: the bits depend on nothing else, a row that is named a
  million times is shared by its slices, and rows that nobody names are zeroed on the way.
"""

from __future__ import annotations

from typing import Any

from ....kinds import ElementKind, IndexKind
from . import layout as at
from .device import inlined
from .layout import LINE
from .lowlevel import (
    STAGE_BYTES,
    fence,
    int32_load,
    int_load,
    int_store,
    make_copy,
    make_load,
    make_read_back,
    make_scratch,
    make_store,
    make_tile,
    make_trail,
    meta,
    prefetch,
)
from .rows import place

MAX_SLICE = 512
BLOCK = 64
# The most bits of a digit; keys are cut into as few digits as that allows, equally long.
DIGIT_BITS = 11
_DIGITS = 1 << DIGIT_BITS
# Rows that are called for before they are added.
_AHEAD = 6

acc_load, acc_store = make_tile("a")


def build(element: ElementKind, index: IndexKind, unit: bool) -> Any:
    """The kernel; `unit`: columns are contiguous in both arrays."""
    load, store = make_load(element, True), make_store(element, True)
    old = make_read_back(element)
    wide_index = index is IndexKind.I64
    counters = make_scratch(_DIGITS)
    sums = make_scratch(MAX_SLICE)
    size = element.size_bytes
    copy, copy_to_stage = make_copy(element, "in", "out"), make_copy(element, "in", "stage")
    stage_store = make_store(element, True, "stage")
    resume, leave = make_trail(element)
    stages = make_scratch((STAGE_BYTES + LINE) // 8)

    @inlined
    def place_of(m, i):
        extent = meta(m, at.AXIS)
        q = i // extent
        return place(m, at.AXIS, at.MORE_AXIS_AT, meta(m, at.MORE_INDEX), i - q * extent, q)

    @inlined
    def sort(m, ws, indices):
        n, rows = meta(m, at.EXTENT), meta(m, at.ROWS)
        padding, shift, bits = meta(m, at.PADDING), meta(m, at.SHIFT), meta(m, at.KEY_BITS)
        words, spare = ws + meta(m, at.WORDS_AT), ws + meta(m, at.SPARE_AT)
        starts = ws + meta(m, at.STARTS_AT)
        kept = 0
        for i in range(n):
            at_index = place_of(m, i)[1]
            key = int_load(indices, at_index) if wide_index else int(int32_load(indices, at_index))
            if key >= 0 and key < rows and key != padding:
                int_store(words, kept, (key << shift) | i)
                kept += 1
        count = counters()
        passes = (bits + DIGIT_BITS - 1) // DIGIT_BITS
        width = (bits + passes - 1) // passes
        digits = 1 << width
        for low in range(shift, shift + bits, width):
            for digit in range(digits):
                int_store(count, digit, 0)
            for i in range(kept):
                digit = (int_load(words, i) >> low) & (digits - 1)
                int_store(count, digit, int_load(count, digit) + 1)
            begin = 0
            for digit in range(digits):
                size = int_load(count, digit)
                int_store(count, digit, begin)
                begin += size
            for i in range(kept):
                word = int_load(words, i)
                digit = (word >> low) & (digits - 1)
                spot = int_load(count, digit)
                int_store(count, digit, spot + 1)
                int_store(spare, spot, word)
            words, spare = spare, words
        segments = 0
        last = -1
        for i in range(kept):
            key = int_load(words, i) >> shift
            if key != last:
                int_store(starts, segments, i)
                segments += 1
                last = key
        int_store(starts, segments, kept)
        int_store(ws, 0, segments)
        int_store(ws, 1, words)

    def segments(call, slot, lo, hi):
        m, ws, phase = meta(call, at.META), meta(call, at.WORKSPACE), meta(call, at.PHASE)
        if phase == at.PARTIAL:
            sort(m, ws, meta(call, at.X))
            return
        dout, table = meta(call, at.DY), meta(call, at.OUT)
        rows, columns = meta(m, at.ROWS), meta(m, at.COLUMNS)
        shift, slices = meta(m, at.SHIFT), meta(m, at.LANE_BLOCKS)
        accumulate, by_count = meta(m, at.ACCUMULATE), meta(m, at.BY_COUNT)
        dc = 1 if unit else meta(m, at.ACROSS + at.S_DY)
        tn, tc = meta(m, at.AXIS + at.S_OUT), 1 if unit else meta(m, at.ACROSS + at.S_OUT)
        starts = ws + meta(m, at.STARTS_AT)
        count, words = int_load(ws, 0), int_load(ws, 1)
        mask, last = (1 << shift) - 1, int_load(starts, count)
        slice_width = meta(m, at.LANE_WIDTH)
        streaming = unit and meta(m, at.STREAMING) != 0
        acc, stage = sums(), stages()
        trail = (stage, 0, 0)
        for u in range(lo, hi):
            block = u // slices
            c0 = (u - block * slices) * slice_width
            width = min(slice_width, columns - c0)
            # Targets are the named rows where we add, and all rows where we overwrite.
            first, limit = block * BLOCK, min(block * BLOCK + BLOCK, count if accumulate else rows)
            segment = first
            if not accumulate:
                segment, above = 0, count  # the first segment at or after this row
                while segment < above:
                    middle = (segment + above) // 2
                    if int_load(words, int_load(starts, middle)) >> shift < first:
                        segment = middle + 1
                    else:
                        above = middle
            called = int_load(starts, min(segment, count))
            for target in range(first, limit):
                row, begin, end = target, 0, 0
                if segment < count:
                    begin, end = int_load(starts, segment), int_load(starts, segment + 1)
                    key = int_load(words, begin) >> shift
                    if accumulate:
                        row = key
                    if key == row:
                        segment += 1
                    else:
                        end = begin
                # Rows come in no order that the hardware could foresee: call for them in advance.
                while unit and called < min(end + _AHEAD, last):
                    called_at = place_of(m, int_load(words, called) & mask)[0] + c0
                    begin_of = dout + size * called_at
                    for line in range(begin_of, begin_of + size * width, LINE):
                        prefetch(line)
                    called += 1
                here = row * tn + c0 * tc
                if not accumulate and end <= begin + 1:  # most rows: nothing to add up
                    source = 0
                    if end > begin:
                        source = place_of(m, int_load(words, begin) & mask)[0] + c0 * dc
                    if not streaming:
                        if end == begin:
                            for c in range(width):
                                store(table, here + c * tc, 0.0)
                        else:
                            for c in range(width):
                                place_in = dout + size * (source + c * dc)
                                copy(table + size * (here + c * tc), place_in)
                        continue
                    address = table + size * here
                    lead = (address & (LINE - 1)) // size
                    left = resume(stage, address, trail)
                    if end == begin:
                        for c in range(width):
                            stage_store(stage, lead + c, 0.0)
                    else:
                        for c in range(width):
                            copy_to_stage(stage + size * (lead + c), dout + size * (source + c))
                    trail = leave(stage, address, width, left)
                    continue
                for c in range(width):
                    acc_store(acc, c, 0.0)
                for i in range(begin, end):
                    source = place_of(m, int_load(words, i) & mask)[0] + c0 * dc
                    for c in range(width):
                        acc_store(acc, c, acc_load(acc, c) + load(dout, source + c * dc))
                if by_count and end > begin:
                    for c in range(width):
                        acc_store(acc, c, acc_load(acc, c) / float(end - begin))
                if accumulate:
                    for c in range(width):
                        acc_store(acc, c, acc_load(acc, c) + old(table, here + c * tc))
                if streaming:
                    address = table + size * here
                    lead = (address & (LINE - 1)) // size
                    left = resume(stage, address, trail)
                    for c in range(width):
                        stage_store(stage, lead + c, acc_load(acc, c))
                    trail = leave(stage, address, width, left)
                else:
                    for c in range(width):
                        store(table, here + c * tc, acc_load(acc, c))
        if streaming:
            resume(stage, 0, trail)
            fence()

    return segments
