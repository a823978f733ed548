# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Ties across the borders of chunks, in Triton: what the chunks, apart from each other, count and should not.

A chunk takes whatever lies outside it for points to its left or right (``cuda_fused``). A point outside that ties with
one of its own has a sign of 0, not ±1, and is taken out of the signed sums again here. Such ties are rare, so looking
for them must be cheap, and only chunks that have some are read.
"""

import triton
import triton.language as tl

from cswe.ops.kernels.cuda_rows import sample_length, target_rows


@triton.jit
def _point_at(points, rank, length):
    """Give the points of these ranks; where there is none, one that ties with nothing."""
    return tl.load(points + rank, mask=(rank >= 0) & (rank < length), other=float("nan"))


@triton.jit
def _forget_ties(
    points,
    order,
    scale,
    squares,
    tokens,
    tokens_low,
    high,
    low,
    targets,
    height,
    base,
    factor,
    first_chunk,
    own_chunks,
    length,
    M,
    d,
    FROM_LEFT: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    HAS_LOW: tl.constexpr,
    MIXED: tl.constexpr,
):
    """Go through a group of chunks away from one side, with the sums over the ranks that tie with the last one met.

    A run of ties that reaches into the group is followed from the chunk in which it begins. Only the group is written.
    """
    lane = tl.arange(0, C)
    beyond = first_chunk * C - 1 if FROM_LEFT else (first_chunk + own_chunks) * C
    innermost = _point_at(points, beyond + 1 if FROM_LEFT else beyond - 1, length)
    outside = 0
    while _point_at(points, beyond, length) == innermost:
        beyond += -C if FROM_LEFT else C
        outside += 1
    for first in range(0, d, DB):
        columns = first + tl.arange(0, DB)
        inside = columns < d
        # The scalar columns go along with the first piece.
        once = tl.where(first == 0, 1.0, 0.0)
        tied_tokens = tl.zeros((DB,), dtype=tl.float32)
        tied_targets = tl.zeros((DB,), dtype=tl.float32)
        tied_squares = 0.0
        tied_scale = 0.0
        tied_count = 0.0
        for step in range(-outside, own_chunks):
            start = (first_chunk + step if FROM_LEFT else first_chunk + own_chunks - 1 - step) * C
            before = _point_at(points, start - 1 if FROM_LEFT else start + C, length)
            near = _point_at(points, start if FROM_LEFT else start + C - 1, length)
            far = _point_at(points, start + C - 1 if FROM_LEFT else start, length)
            behind = _point_at(points, start + C if FROM_LEFT else start - 1, length)
            if (before == near) | (far == behind):
                ranks = start + lane
                present = ranks < length
                s = tl.load(points + ranks, mask=present, other=0.0)
                c = tl.load(scale + ranks, mask=present, other=0.0)
                token = tl.load(order + ranks, mask=present, other=0).to(tl.int32)
                q = tl.load(squares + token, mask=present, other=0.0) / length
                at = (token * d)[:, None] + columns[None, :]
                read = present[:, None] & inside[None, :]
                v = tl.load(tokens + at, mask=read, other=0.0).to(tl.float32)
                if HAS_LOW:
                    v += tl.load(tokens_low + at, mask=read, other=0.0).to(tl.float32)
                t, t_low = target_rows(high, low, targets, ranks, present, columns, inside, length, M, d, MIXED, True)
                both = t.to(tl.float32) + t_low.to(tl.float32)

                own = present & (s == before) & (step >= 0)
                h = tl.load(height + ranks, mask=own, other=0.0)
                part = factor * (c * tl.sum(both * tied_tokens[None, :], 1) + tl.sum(v * tied_targets[None, :], 1))
                part += once * (c * tied_squares + q * tied_scale + h * tied_count)
                if not FROM_LEFT:
                    part = -part
                tl.store(base + ranks, tl.load(base + ranks, mask=own, other=0.0) - part, mask=own)

                # Where all of the chunk ties, the run goes on; otherwise a new one begins.
                same = tl.where(far == before, 1.0, 0.0)
                ties = tl.where(present & (s == far), 1.0, 0.0)
                tied_tokens = tied_tokens * same + tl.sum(v * ties[:, None], 0)
                tied_targets = tied_targets * same + tl.sum(both * (ties * c)[:, None], 0)
                tied_squares = tied_squares * same + tl.sum(ties * q, 0)
                tied_scale = tied_scale * same + tl.sum(ties * c, 0)
                tied_count = tied_count * same + tl.sum(ties, 0)
        # The next piece, and the other side, add to what other threads may have written.
        tl.debug_barrier()


@triton.jit
def ties_pass(
    points,
    order,
    scale,
    squares,
    tokens,
    tokens_low,
    high,
    low,
    targets,
    lengths,
    height,
    base,
    units,
    B,
    L,
    N,
    M,
    d,
    C: tl.constexpr,
    G: tl.constexpr,
    DB: tl.constexpr,
    HAS_LOW: tl.constexpr,
    MIXED: tl.constexpr,
):
    """Take out of the signed sums what ties across the border of a chunk, ``G`` chunks of a row a program."""
    index = tl.program_id(0)
    sample = (index // L).to(tl.int64)
    slice_index = (index % L).to(tl.int64)
    length = sample_length(lengths, sample, B, N, MIXED)
    row = (sample * L + slice_index) * N
    points += row
    first_chunk = tl.program_id(1) * G
    left = first_chunk * C
    right = left + (1 + tl.arange(0, G)) * C
    crossing = _point_at(points, right - 1, length) == _point_at(points, right, length)
    entering = _point_at(points, left - 1, length) == _point_at(points, left, length)
    if entering | (tl.max(crossing.to(tl.int32), 0) > 0):
        own_chunks = tl.minimum(tl.cdiv(length, C) - first_chunk, G)
        factor = -2.0 * tl.load(units) * (M / length)
        for side in tl.static_range(2):
            _forget_ties(
                points, order + row, scale + row, squares + sample * N, tokens + sample * N * d,
                tokens_low + sample * N * d, high + slice_index * N * d, low + slice_index * N * d,
                targets + slice_index * M * d, height + row, base + row, factor, first_chunk, own_chunks,
                length, M, d, side == 0, C, DB, HAS_LOW, MIXED,
            )  # fmt: skip
