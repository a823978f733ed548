r"""The passes over scalars, before and after the d-wide one: normaliser, value and slope, in Triton.

Before: ``c = 1/Z`` and the kernel sums of the squared norms. After: with :math:`h_r = -c_r² t_r`,

.. math:: ∂S/∂s_r = -[ c_r (A - B)_r + (E - F)_r + h_r (K̃ 1)_r + (K̃ h)_r ] / τ

Both take a tile of rows × ranks and go over the ranks in blocks, once from the left and once from the right.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_scan import apart, recurrence


@triton.jit
def _decay_to(points, at, there, read, rate):
    """Give the points at ``at``, the decay from ``there``, and whether the two tie; nothing reaches over an end."""
    s = tl.load(points + at, mask=read, other=0.0)
    neighbour = tl.load(points + there, mask=read, other=0.0)
    return tl.exp2(-tl.abs(s - neighbour) * rate), s == neighbour


@triton.jit
def normaliser_pass(
    points,
    order,
    squares,
    lengths,
    scale,
    square_sums,
    rows,
    L,
    N,
    rate,
    R: tl.constexpr,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Write ``c = 1/Z`` and ``K ‖v‖²``, both ``(B, L, N)``."""
    row = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    sample = row // L
    length = tl.load(lengths + sample, mask=row < rows, other=1).to(tl.int32) if RAGGED else N
    longest = tl.max(length) if RAGGED else N
    start_of_row = row.to(tl.int64) * N
    squares += sample.to(tl.int64) * N
    lane = tl.arange(0, NB)[None, :]
    count = tl.zeros((R, 1), dtype=tl.float32)
    total = tl.zeros((R, 1), dtype=tl.float32)
    for start in range(0, longest, NB):
        rank = start + lane
        read = (rank < length) & (row < rows)
        at = start_of_row + rank
        decay, _ = _decay_to(points, at, at - 1, read & (rank > 0), rate)
        decay = tl.where(rank > 0, decay, 0.0)
        square = tl.load(squares + tl.load(order + at, mask=read, other=0), mask=read, other=0.0)
        ones = tl.where(read, 1.0, 0.0)
        left = recurrence(decay, ones, count, 1, False)
        left_squares = recurrence(decay, square, total, 1, False)
        last = lane == NB - 1
        count = tl.sum(tl.where(last, left, 0.0), 1)[:, None]
        total = tl.sum(tl.where(last, left_squares, 0.0), 1)[:, None]
        tl.store(scale + at, left - ones, mask=read)
        tl.store(square_sums + at, left_squares - square, mask=read)
    tl.debug_barrier()
    count = tl.zeros((R, 1), dtype=tl.float32)
    total = tl.zeros((R, 1), dtype=tl.float32)
    for step in range(0, tl.cdiv(longest, NB)):
        rank = (tl.cdiv(longest, NB) - 1 - step) * NB + lane
        read = (rank < length) & (row < rows)
        at = start_of_row + rank
        decay, _ = _decay_to(points, at, at + 1, read & (rank + 1 < length), rate)
        decay = tl.where(rank + 1 < length, decay, 0.0)
        square = tl.load(squares + tl.load(order + at, mask=read, other=0), mask=read, other=0.0)
        ones = tl.where(read, 1.0, 0.0)
        right = recurrence(decay, ones, count, 1, True)
        right_squares = recurrence(decay, square, total, 1, True)
        count = tl.sum(tl.where(lane == 0, right, 0.0), 1)[:, None]
        total = tl.sum(tl.where(lane == 0, right_squares, 0.0), 1)[:, None]
        tl.store(scale + at, 1 / (tl.load(scale + at, mask=read, other=0.0) + right), mask=read)
        tl.store(square_sums + at, tl.load(square_sums + at, mask=read, other=0.0) + right_squares, mask=read)


@triton.jit
def _row_sums(summed, scale, square_sums, at, read, factor, mass):
    """Give c and t at these ranks: the d-wide pass's sums and the squared norms'."""
    c = tl.load(scale + at, mask=read, other=0.0)
    t = tl.load(summed + at, mask=read, other=0.0)
    return c, factor * t + mass * tl.load(square_sums + at, mask=read, other=0.0)


@triton.jit
def _signed_part(
    points,
    order,
    squares,
    scale,
    square_sums,
    summed,
    here_signed,
    there_signed,
    at,
    step,
    read,
    reached,
    factor,
    mass,
    rate,
    ones_carry,
    ones_held,
    square_carry,
    square_held,
    scale_carry,
    scale_held,
    h_carry,
    h_held,
    reverse: tl.constexpr,
):
    """One side's share of ``c (A − B) + (E − F) + h K̃1 + K̃h`` for a block, and the states at its end.

    ``step`` leads to the neighbour on that side, ``reached`` says where there is one.
    """
    decay, tied = _decay_to(points, at, at + step, read & reached, rate)
    decay = tl.where(reached, decay, 0.0)
    tied = tied & reached
    near = read & reached
    c, t = _row_sums(summed, scale, square_sums, at, read, factor, mass)
    c_near, t_near = _row_sums(summed, scale, square_sums, at + step, near, factor, mass)
    q = tl.load(squares + tl.load(order + at, mask=read, other=0), mask=read, other=0.0)
    q_near = tl.load(squares + tl.load(order + at + step, mask=near, other=0), mask=near, other=0.0)
    h = -c * c * t
    h_near = -c_near * c_near * t_near
    ones, ones_below = apart(decay, tl.where(near, 1.0, 0.0), tied, ones_carry, ones_held, 1, reverse)
    square, square_below = apart(decay, q_near, tied, square_carry, square_held, 1, reverse)
    sent, sent_below = apart(decay, c_near, tied, scale_carry, scale_held, 1, reverse)
    normal, normal_below = apart(decay, h_near, tied, h_carry, h_held, 1, reverse)
    share = mass * (c * square + q * sent) + h * ones + normal
    return (
        share, c, t,
        ones_below, ones, square_below, square, sent_below, sent, normal_below, normal,
    )  # fmt: skip


@triton.jit
def _at(values, place):
    return tl.sum(tl.where(place, values, 0.0), 1)[:, None]


@triton.jit
def slope_pass(
    points,
    order,
    squares,
    lengths,
    scale,
    square_sums,
    summed,
    here_signed,
    there_signed,
    units,
    shift,
    value,
    slope,
    rows,
    L,
    N,
    M,
    rate,
    per_tau,
    R: tl.constexpr,
    NB: tl.constexpr,
    RAGGED: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Write S ``(B, L)`` and its derivative by the sorted projections ``(B, L, N)``, 0 behind a sample's length.

    ``units[1]`` undoes the scaling of tokens and targets (whose rows are averages), ``shift`` ``(L,)`` that tokens were read without centring.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    sample = row // L
    length = tl.load(lengths + sample, mask=row < rows, other=1).to(tl.int32) if RAGGED else N
    longest = tl.max(length) if RAGGED else N
    mass = 1.0 / length
    factor = -2.0 * tl.load(units + 1) * (M / length)
    start_of_row = row.to(tl.int64) * N
    squares += sample.to(tl.int64) * N
    lane = tl.arange(0, NB)[None, :]
    zero = tl.zeros((R, 1), dtype=tl.float32)

    result = zero
    a, b, c, d, e, f, g, k = zero, zero, zero, zero, zero, zero, zero, zero
    for start in range(0, longest, NB):
        rank = start + lane
        read = (rank < length) & (row < rows)
        at = start_of_row + rank
        if SLOPE:
            share, c_here, t, a_new, b_new, c_new, d_new, e_new, f_new, g_new, k_new = _signed_part(
                points, order, squares, scale, square_sums, summed, here_signed, there_signed,
                at, -1, read, rank > 0, factor, mass, rate, a, b, c, d, e, f, g, k, False,
            )  # fmt: skip
            last = lane == NB - 1
            # The recurrences' states leave out the own value: the next block adds it as its neighbour's.
            a, b, c, d = _at(a_new, last), _at(b_new, last), _at(c_new, last), _at(d_new, last)
            e, f, g, k = _at(e_new, last), _at(f_new, last), _at(g_new, last), _at(k_new, last)
            here = tl.load(here_signed + at, mask=read, other=0.0)
            there = tl.load(there_signed + at, mask=read, other=0.0)
            tl.store(slope + at, share + factor * (c_here * here + there), mask=read)
        else:
            c_here, t = _row_sums(summed, scale, square_sums, at, read, factor, mass)
        result += tl.sum(c_here * t, 1)[:, None]
    tl.store(value + row, result + tl.load(shift + row % L), mask=row < rows)
    if SLOPE:
        tl.debug_barrier()
        a, b, c, d, e, f, g, k = zero, zero, zero, zero, zero, zero, zero, zero
        for step in range(0, tl.cdiv(longest, NB)):
            rank = (tl.cdiv(longest, NB) - 1 - step) * NB + lane
            read = (rank < length) & (row < rows)
            at = start_of_row + rank
            share, c_here, t, a_new, b_new, c_new, d_new, e_new, f_new, g_new, k_new = _signed_part(
                points, order, squares, scale, square_sums, summed, here_signed, there_signed,
                at, 1, read, rank + 1 < length, factor, mass, rate, a, b, c, d, e, f, g, k, True,
            )  # fmt: skip
            first = lane == 0
            a, b, c, d = _at(a_new, first), _at(b_new, first), _at(c_new, first), _at(d_new, first)
            e, f, g, k = _at(e_new, first), _at(f_new, first), _at(g_new, first), _at(k_new, first)
            tl.store(slope + at, (share - tl.load(slope + at, mask=read, other=0.0)) * per_tau, mask=read)
        if RAGGED:
            for start in range(0, N, NB):
                rank = start + lane
                behind = (rank >= length) & (rank < N) & (row < rows)
                tl.store(slope + start_of_row + rank, tl.zeros((R, NB), dtype=tl.float32), mask=behind)
