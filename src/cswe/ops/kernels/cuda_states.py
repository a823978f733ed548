# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""What lies outside each chunk of ranks, as decayed sums of rows: on tensor cores, in Triton.

The ranks of a sample and slice are cut into chunks of C. Seen from a chunk's neighbour on the left, with point e, all
that lies left of the chunk is :math:`\sum_k e^{-(e - s_k)/τ} w_k`, and alike on the right. Eight chunks and their two
sides are the sixteen rows of one small product of weights with the rows: one look at up to 8·C ranks gives all of
their states. Longer samples are taken 8·C ranks at a time, with a carry, once from each end.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import WEIGHT_UNIT, decayed, sample_length, split, target_rows


@triton.jit
def _collect(
    acc,
    total,
    beside,
    points,
    order,
    scale,
    squares,
    rows,
    rows_low,
    targets,
    start,
    stop,
    length,
    bound,
    edge,
    left,
    columns,
    inside,
    M,
    d,
    rate,
    KB: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    PRECISE: tl.constexpr,
    MIXED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the ranks from ``start`` to ``stop`` to sixteen states, each by its own side of its own bound.

    ``total`` and ``beside`` collect the weights and the states of a scalar, ``(16, KB)``: squared norms for tokens, c
    for targets. A state without an edge has one infinitely far away.
    """
    for first in tl.range(start, stop, KB, num_stages=STAGES):
        k = first + tl.arange(0, KB)
        present = k < stop
        s = tl.load(points + k, mask=present, other=float("inf"))
        if TOKENS:
            token = tl.load(order + k, mask=present, other=0).to(tl.int32)
            scalar = tl.load(squares + token, mask=present, other=0.0)
            at = token * d
            read = present[:, None] & inside[None, :]
            x = tl.load(rows + at[:, None] + columns[None, :], mask=read, other=0.0)
            if HAS_LOW:
                x_low = tl.load(rows_low + at[:, None] + columns[None, :], mask=read, other=0.0)
        else:
            scalar = tl.load(scale + k, mask=present, other=0.0)
            x, x_low = target_rows(rows, rows_low, targets, k, present, columns, inside, length, M, d, MIXED, HAS_LOW)
        weight = decayed((edge[:, None] - s[None, :]) * rate)
        weight = tl.where((k[None, :] < bound[:, None]) == left[:, None], weight, 0.0)
        total += weight
        beside += weight * scalar[None, :]
        if not TOKENS:
            weight *= scalar[None, :] * WEIGHT_UNIT
        first_part, second_part = split(weight)
        acc = tl.dot(first_part, x, acc)
        if PRECISE:
            acc = tl.dot(second_part, x, acc)
        if HAS_LOW:
            acc = tl.dot(first_part, x_low, acc)
    return acc, total, beside


@triton.jit
def _store(
    acc,
    total,
    beside,
    states,
    states_low,
    masses,
    scalars,
    where,
    write,
    columns,
    inside,
    d,
    piece,
    PRECISE: tl.constexpr,
):
    high, low = split(acc)
    at = where[:, None] * d + columns[None, :]
    mask = write[:, None] & inside[None, :]
    tl.store(states + at, high, mask=mask)
    if PRECISE:
        tl.store(states_low + at, low, mask=mask)
    first = write & (where * 0 + piece == 0)
    tl.store(masses + where, total, mask=first)
    tl.store(scalars + where, beside, mask=first)


@triton.jit
def _walk(
    points,
    order,
    scale,
    squares,
    rows,
    rows_low,
    targets,
    states,
    states_low,
    masses,
    scalars,
    first_state,
    length,
    columns,
    inside,
    piece,
    M,
    d,
    rate,
    FROM_LEFT: tl.constexpr,
    C: tl.constexpr,
    KB: tl.constexpr,
    DB: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    PRECISE: tl.constexpr,
    MIXED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Find the states of one side, eight chunks at a time; line 8 is what the next eight will find."""
    line = tl.arange(0, 16)
    left = line < (16 if FROM_LEFT else 0)
    blocks = tl.cdiv(length, 8 * C)
    carry = tl.zeros((DB,), dtype=tl.float32)
    carried = 0.0
    carried_beside = 0.0
    carry_edge = tl.load(points + (0 if FROM_LEFT else length - 1))
    for step in range(blocks):
        start = (step if FROM_LEFT else blocks - 1 - step) * 8 * C
        stop = tl.minimum(start + 8 * C, length)
        if FROM_LEFT:
            bound = tl.where(line < 8, start + line * C, stop)
            at_edge = bound - 1
            valid = (bound > 0) & (bound <= stop) & (line <= 8)
            write = (line < 8) & (bound > 0) & (bound < length)
        else:
            bound = tl.where(line < 8, start + line * C + C, start)
            at_edge = bound
            valid = (bound < length) & (line <= 8)
            write = (line < 8) & (bound < length)
        edge = tl.load(points + at_edge, mask=valid, other=-1e38)
        reach = tl.where(valid, decayed((edge - carry_edge) * rate), 0.0)
        acc = reach[:, None] * carry[None, :]
        weights = tl.zeros((16, KB), dtype=tl.float32)
        scalar = tl.zeros((16, KB), dtype=tl.float32)
        acc, weights, scalar = _collect(
            acc, weights, scalar, points, order, scale, squares, rows, rows_low, targets,
            start, stop, length, bound, edge, left,
            columns, inside, M, d, rate, KB, TOKENS, HAS_LOW, PRECISE, MIXED, STAGES,
        )  # fmt: skip
        total = reach * carried + tl.sum(weights, 1)
        beside = reach * carried_beside + tl.sum(scalar, 1)
        carry = tl.sum(tl.where((line == 8)[:, None], acc, 0.0), 0)
        carried = tl.sum(tl.where(line == 8, total, 0.0), 0)
        carried_beside = tl.sum(tl.where(line == 8, beside, 0.0), 0)
        carry_edge = tl.load(points + (stop - 1 if FROM_LEFT else start))
        if TOKENS:
            acc = acc * (1 / tl.maximum(total, 1e-30))[:, None]
        where = first_state + (start // C + line) * 2 + (0 if FROM_LEFT else 1)
        _store(
            acc, total, beside, states, states_low, masses, scalars, where, write,
            columns, inside, d, piece, PRECISE,
        )  # fmt: skip


@triton.jit
def states_pass(
    points,
    order,
    scale,
    squares,
    rows,
    rows_low,
    targets,
    lengths,
    states,
    states_low,
    masses,
    scalars,
    B,
    L,
    N,
    M,
    d,
    rate,
    C: tl.constexpr,
    KB: tl.constexpr,
    DB: tl.constexpr,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    PRECISE: tl.constexpr,
    MIXED: tl.constexpr,
    RAGGED: tl.constexpr,
    ONE_LOOK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the states of tokens (averages, with their masses) or of ``c T`` (sums) around every chunk.

    ``states`` is ``(B, L, chunks, 2, d)`` in half precision, left before right, ``masses`` and ``scalars`` the same
    without d. Where a chunk has nothing on a side, nothing is written. ``rows`` are the tokens ``(B, N, d)`` or T
    ``(L, N, d)``.
    """
    index = tl.program_id(0)
    piece = index % PIECES
    index = index // PIECES
    sample = (index // L).to(tl.int64)
    slice_index = (index % L).to(tl.int64)
    length = sample_length(lengths, sample, B, N, RAGGED)
    row = sample * L + slice_index
    points += row * N
    order += row * N
    scale += row * N
    squares += sample * N
    if TOKENS:
        rows += sample * N * d
        rows_low += sample * N * d
    else:
        rows += slice_index * N * d
        rows_low += slice_index * N * d
        targets += slice_index * M * d
    first_state = row * tl.cdiv(N, C) * 2
    columns = piece * DB + tl.arange(0, DB)
    inside = columns < d
    line = tl.arange(0, 16)
    if ONE_LOOK:
        left = line < 8
        chunk = line % 8
        bound = tl.where(left, chunk * C, chunk * C + C)
        valid = (bound < length) & (bound > 0)
        edge = tl.load(points + tl.where(left, bound - 1, bound), mask=valid, other=-1e38)
        acc = tl.zeros((16, DB), dtype=tl.float32)
        weights = tl.zeros((16, KB), dtype=tl.float32)
        scalar = tl.zeros((16, KB), dtype=tl.float32)
        acc, weights, scalar = _collect(
            acc, weights, scalar, points, order, scale, squares, rows, rows_low, targets,
            0, length, length, bound, edge, left,
            columns, inside, M, d, rate, KB, TOKENS, HAS_LOW, PRECISE, MIXED, STAGES,
        )  # fmt: skip
        total = tl.sum(weights, 1)
        beside = tl.sum(scalar, 1)
        if TOKENS:
            acc = acc * (1 / tl.maximum(total, 1e-30))[:, None]
        where = first_state + chunk * 2 + tl.where(left, 0, 1)
        _store(
            acc, total, beside, states, states_low, masses, scalars, where, valid,
            columns, inside, d, piece, PRECISE,
        )  # fmt: skip
    else:
        _walk(
            points, order, scale, squares, rows, rows_low, targets, states, states_low, masses, scalars,
            first_state, length,
            columns, inside, piece, M, d, rate, True, C, KB, DB, TOKENS, HAS_LOW, PRECISE, MIXED, STAGES,
        )  # fmt: skip
        _walk(
            points, order, scale, squares, rows, rows_low, targets, states, states_low, masses, scalars,
            first_state, length,
            columns, inside, piece, M, d, rate, False, C, KB, DB, TOKENS, HAS_LOW, PRECISE, MIXED, STAGES,
        )  # fmt: skip
