# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The passes over scalars, before and after the d-wide one, in Triton.

Before: ``c = 1/Z``. After: the value, and the slope, which still lacks the kernel sums of :math:`h_r = -c_r² t_r`:

.. math:: ∂S/∂s_r = -[ c_r (A - B)_r + (E - F)_r + h_r (K̃ 1)_r + (K̃ h)_r ] / τ

Both take a tile of rows × ranks and go over the ranks in blocks, once from the left and once from the right.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import decayed
from cswe.ops.kernels.cuda_scan import apart, recurrence


@triton.jit
def _decay_from(points, at, step, reached, rate):
    """Give the decay from the neighbour a step away, and whether the two tie; nothing reaches over an end."""
    s = tl.load(points + at, mask=reached, other=0.0)
    neighbour = tl.load(points + at + step, mask=reached, other=1.0)
    return tl.where(reached, decayed((s - neighbour) * rate), 0.0), s == neighbour


@triton.jit
def _at(values, place):
    return tl.sum(tl.where(place, values, 0.0), 1)[:, None]


@triton.jit
def normaliser_pass(points, lengths, scale, rows, L, N, rate, R: tl.constexpr, NB: tl.constexpr, RAGGED: tl.constexpr):
    """Write ``c = 1/Z``, ``(B, L, N)``."""
    row = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    length = tl.load(lengths + row // L, mask=row < rows, other=1).to(tl.int32) if RAGGED else N
    longest = tl.max(length) if RAGGED else N
    start_of_row = row.to(tl.int64) * N
    lane = tl.arange(0, NB)[None, :]
    count = tl.zeros((R, 1), dtype=tl.float32)
    for start in range(0, longest, NB):
        rank = start + lane
        read = (rank < length) & (row < rows)
        at = start_of_row + rank
        decay, _ = _decay_from(points, at, -1, read & (rank > 0), rate)
        left = recurrence(decay, tl.where(read, 1.0, 0.0), count, 1, False)
        count = _at(left, lane == NB - 1)
        tl.store(scale + at, left - 1.0, mask=read)
    tl.debug_barrier()
    count = tl.zeros((R, 1), dtype=tl.float32)
    for step in range(0, tl.cdiv(longest, NB)):
        rank = (tl.cdiv(longest, NB) - 1 - step) * NB + lane
        read = (rank < length) & (row < rows)
        at = start_of_row + rank
        decay, _ = _decay_from(points, at, 1, read & (rank + 1 < length), rate)
        right = recurrence(decay, tl.where(read, 1.0, 0.0), count, 1, True)
        count = _at(right, lane == 0)
        tl.store(scale + at, 1 / (tl.load(scale + at, mask=read, other=0.0) + right), mask=read)


@triton.jit
def slope_pass(
    points,
    lengths,
    scale,
    height,
    base,
    received,
    value,
    slope,
    rows,
    L,
    N,
    rate,
    per_tau,
    R: tl.constexpr,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Write S ``(B, L)`` and its derivative by the sorted projections ``(B, L, N)``, 0 behind a sample's length.

    ``base + received`` is what the d-wide pass has of the slope.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    length = tl.load(lengths + row // L, mask=row < rows, other=1).to(tl.int32) if RAGGED else N
    longest = tl.max(length) if RAGGED else N
    start_of_row = row.to(tl.int64) * N
    lane = tl.arange(0, NB)[None, :]
    zero = tl.zeros((R, 1), dtype=tl.float32)
    result = tl.zeros((R, NB), dtype=tl.float32)
    carry, held = zero, zero
    for start in range(0, longest, NB):
        rank = start + lane
        read = (rank < length) & (row < rows)
        at = start_of_row + rank
        # c t is −h/c.
        result -= tl.load(height + at, mask=read, other=0.0) / tl.load(scale + at, mask=read, other=1.0)
        if SLOPE:
            near = read & (rank > 0)
            decay, tied = _decay_from(points, at, -1, near, rate)
            before = tl.load(height + at - 1, mask=near, other=0.0)
            beside, below = apart(decay, before, tied & near, carry, held, 1, False)
            carry, held = _at(below, lane == NB - 1), _at(beside, lane == NB - 1)
            found = tl.load(base + at, mask=read, other=0.0) + tl.load(received + at, mask=read, other=0.0)
            tl.store(slope + at, found + beside, mask=read)
    tl.store(value + row, tl.sum(result, 1)[:, None], mask=row < rows)
    if SLOPE:
        tl.debug_barrier()
        carry, held = zero, zero
        for step in range(0, tl.cdiv(longest, NB)):
            rank = (tl.cdiv(longest, NB) - 1 - step) * NB + lane
            read = (rank < length) & (row < rows)
            at = start_of_row + rank
            near = read & (rank + 1 < length)
            decay, tied = _decay_from(points, at, 1, near, rate)
            before = tl.load(height + at + 1, mask=near, other=0.0)
            beside, below = apart(decay, before, tied & near, carry, held, 1, True)
            carry, held = _at(below, lane == 0), _at(beside, lane == 0)
            tl.store(slope + at, (beside - tl.load(slope + at, mask=read, other=0.0)) * per_tau, mask=read)
        if RAGGED:
            for start in range(0, N, NB):
                rank = start + lane
                behind = (rank >= length) & (rank < N) & (row < rows)
                tl.store(slope + start_of_row + rank, tl.zeros((R, NB), dtype=tl.float32), mask=behind)
