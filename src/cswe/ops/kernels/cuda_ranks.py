# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The operation for one sample that meets as many targets, in float32 throughout: how a reference is sorted softly.

There is little to compute then, and what counts is the number of launches: plain recurrences, ranks after one another
and dimensions side by side. The squared norms are one more column of the tokens, met by :math:`-m/2` in the targets.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cswe.ops.kernels.cuda_rows import decayed, rate_of
from cswe.ops.kernels.cuda_scan import apart, recurrence
from cswe.ops.kernels.cuda_sizes import cdiv, in_parts, power_of_two
from cswe.ops.kernels.problem import Problem

MOST_RANKS = 1024
"""Beyond it chunks, which need not wait for each other, are faster."""

MOST_PARTS = 64
"""Sums over the slices, side by side."""

RANKS = 8
COLUMNS = 128
"""A tile that one warp holds with all ranks of a column in one thread: scans need no exchange."""


@triton.jit
def _neighbours(points, rank, N, rate, FROM_LEFT: tl.constexpr):
    """Give the decay from the neighbour, whether it ties, and whether there is one."""
    has = (rank > 0) & (rank < N) if FROM_LEFT else rank + 1 < N
    s = tl.load(points + rank, mask=has, other=0.0)
    there = tl.load(points + rank + (-1 if FROM_LEFT else 1), mask=has, other=1.0)
    return tl.where(has, decayed((s - there) * rate), 0.0), has & (s == there), has


@triton.jit
def _token_rows(tokens, squares, centre, order, rank, has, columns, d):
    token = tl.load(order + rank, mask=has, other=0)
    read = has[:, None] & (columns < d)[None, :]
    rows = tl.load(tokens + token[:, None] * d + columns[None, :], mask=read, other=0.0).to(tl.float32)
    rows -= tl.load(centre + columns, mask=columns < d, other=0.0)[None, :]
    square = tl.load(squares + token, mask=has, other=0.0)
    rows = tl.where((columns == d)[None, :], square[:, None], rows)
    return tl.where(has[:, None] & (columns <= d)[None, :], rows, 0.0)


@triton.jit
def _target_rows(targets, rank, has, columns, N, d):
    read = has[:, None] & (columns < d)[None, :]
    rows = tl.load(targets + rank[:, None] * d + columns[None, :], mask=read, other=0.0)
    return tl.where(has[:, None] & (columns == d)[None, :], -0.5 / N, rows)


@triton.jit
def sums_pass(points, order, scale, tokens, squares, centre, grad, out, N, d, rate, NB: tl.constexpr, DB: tl.constexpr):
    """Write ``−2 g_l c_r (K V)_r``, ``(L, N, d)``."""
    slice_index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * DB + tl.arange(0, DB)
    points += slice_index * N
    order += slice_index * N
    scale += slice_index * N
    out += slice_index * N * d
    factor = -2.0 * tl.load(grad + slice_index)
    blocks = tl.cdiv(N, NB)
    for side in tl.static_range(2):
        carry = tl.zeros((1, DB), dtype=tl.float32)
        for step in range(blocks):
            rank = (step if side == 0 else blocks - 1 - step) * NB + tl.arange(0, NB)
            present = rank < N
            decay, _, _ = _neighbours(points, rank, N, rate, side == 0)
            v = _token_rows(tokens, squares, centre, order, rank, present, columns, d)
            sums = recurrence(tl.broadcast_to(decay[:, None], (NB, DB)), v, carry, 0, side == 1)
            last = (tl.arange(0, NB) == (NB - 1 if side == 0 else 0))[:, None]
            carry = tl.sum(tl.where(last, sums, 0.0), 0)[None, :]
            c = tl.load(scale + rank, mask=present, other=0.0) * factor
            at = out + rank[:, None] * d + columns[None, :]
            write = present[:, None] & (columns < d)[None, :]
            if side == 0:
                tl.store(at, c[:, None] * sums, mask=write)
            else:
                tl.store(at, tl.load(at, mask=write, other=0.0) + c[:, None] * (sums - v), mask=write)
        tl.debug_barrier()


@triton.jit
def parts_pass(
    points,
    order,
    scale,
    tokens,
    squares,
    centre,
    targets,
    summed,
    signed,
    L,
    N,
    d,
    rate,
    NB: tl.constexpr,
    DB: tl.constexpr,
):
    """Write every block of columns' share of ``−t_r/2`` and ``−[c_r (A − B)_r + (E − F)_r]/2``, ``(blocks, L, N)``."""
    slice_index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * DB + tl.arange(0, DB)
    points += slice_index * N
    order += slice_index * N
    scale += slice_index * N
    targets += slice_index * N * d
    summed += (tl.program_id(1) * L + slice_index) * N
    signed += (tl.program_id(1) * L + slice_index) * N
    blocks = tl.cdiv(N, NB)
    for side in tl.static_range(2):
        token_sum = tl.zeros((1, DB), dtype=tl.float32)
        token_held = tl.zeros((1, DB), dtype=tl.float32)
        target_sum = tl.zeros((1, DB), dtype=tl.float32)
        target_held = tl.zeros((1, DB), dtype=tl.float32)
        for step in range(blocks):
            rank = (step if side == 0 else blocks - 1 - step) * NB + tl.arange(0, NB)
            present = rank < N
            decay, tied, has = _neighbours(points, rank, N, rate, side == 0)
            decay = tl.broadcast_to(decay[:, None], (NB, DB))
            tied = tl.broadcast_to(tied[:, None], (NB, DB))
            near = rank + (-1 if side == 0 else 1)
            last = (tl.arange(0, NB) == (NB - 1 if side == 0 else 0))[:, None]
            c = tl.load(scale + rank, mask=present, other=0.0)
            t = _target_rows(targets, rank, present, columns, N, d)
            before = _token_rows(tokens, squares, centre, order, near, has, columns, d)
            beside, below = apart(decay, before, tied, token_sum, token_held, 0, side == 1)
            token_sum = tl.sum(tl.where(last, below, 0.0), 0)[None, :]
            token_held = tl.sum(tl.where(last, beside, 0.0), 0)[None, :]
            v = _token_rows(tokens, squares, centre, order, rank, present, columns, d)
            total = tl.sum(t * (below + v if side == 0 else below), 1)
            share = c * tl.sum(t * beside, 1)
            before = _target_rows(targets, near, has, columns, N, d)
            before *= tl.load(scale + near, mask=has, other=0.0)[:, None]
            beside, below = apart(decay, before, tied, target_sum, target_held, 0, side == 1)
            target_sum = tl.sum(tl.where(last, below, 0.0), 0)[None, :]
            target_held = tl.sum(tl.where(last, beside, 0.0), 0)[None, :]
            share += tl.sum(v * beside, 1)
            if side == 1:
                total += tl.load(summed + rank, mask=present, other=0.0)
                share = tl.load(signed + rank, mask=present, other=0.0) - share
            tl.store(summed + rank, total, mask=present)
            tl.store(signed + rank, share, mask=present)
        tl.debug_barrier()


@triton.jit
def finish_pass(
    points,
    scale,
    summed,
    signed,
    value,
    slope,
    parts,
    L,
    N,
    rate,
    per_tau,
    NB: tl.constexpr,
    SLOPE: tl.constexpr,
):
    """Put the shares together: S ``(L,)`` and its slope ``(L, N)``, with the normaliser's own derivative."""
    slice_index = tl.program_id(0).to(tl.int64)
    points += slice_index * N
    scale += slice_index * N
    summed += slice_index * N
    signed += slice_index * N
    slope += slice_index * N
    rank = tl.arange(0, NB)
    present = rank < N
    t = tl.zeros((NB,), dtype=tl.float32)
    base = tl.zeros((NB,), dtype=tl.float32)
    t_before = tl.zeros((NB,), dtype=tl.float32)
    t_behind = tl.zeros((NB,), dtype=tl.float32)
    for part in range(parts):
        at = part * L * N + rank
        t += tl.load(summed + at, mask=present, other=0.0)
        base += tl.load(signed + at, mask=present, other=0.0)
        t_before += tl.load(summed + at - 1, mask=present & (rank > 0), other=0.0)
        t_behind += tl.load(summed + at + 1, mask=rank + 1 < N, other=0.0)
    c = tl.load(scale + rank, mask=present, other=0.0)
    tl.store(value + slice_index, -2.0 * tl.sum(c * t, 0))
    if SLOPE:
        h = 2.0 * c * c * t
        decay, tied, has = _neighbours(points, rank, N, rate, True)
        c = tl.load(scale + rank - 1, mask=has, other=0.0)
        left, _ = apart(decay, 2.0 * c * c * t_before, tied, 0.0, 0.0, 0, False)
        left_ones, _ = apart(decay, tl.where(has, 1.0, 0.0), tied, 0.0, 0.0, 0, False)
        decay, tied, has = _neighbours(points, rank, N, rate, False)
        c = tl.load(scale + rank + 1, mask=has, other=0.0)
        right, _ = apart(decay, 2.0 * c * c * t_behind, tied, 0.0, 0.0, 0, True)
        right_ones, _ = apart(decay, tl.where(has, 1.0, 0.0), tied, 0.0, 0.0, 0, True)
        total = -2.0 * base + h * (left_ones - right_ones) + left - right
        tl.store(slope + rank, -total * per_tau, mask=present)


@triton.jit
def back_pass(
    points,
    order,
    scale,
    targets,
    grad,
    out,
    out_squares,
    L,
    N,
    d,
    rate,
    each,
    NB: tl.constexpr,
    DB: tl.constexpr,
):
    """Add ``−2 g_l (K c T_l)`` to the rows of tokens and squares, ``(parts, N, d)``: ``each`` slices a part."""
    part = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * DB + tl.arange(0, DB)
    out += part * N * d
    out_squares += part * N
    blocks = tl.cdiv(N, NB)
    for number in range(each):
        slice_index = part * each + number
        if slice_index < L:
            factor = -2.0 * tl.load(grad + slice_index)
            for side in tl.static_range(2):
                carry = tl.zeros((1, DB), dtype=tl.float32)
                for step in range(blocks):
                    rank = (step if side == 0 else blocks - 1 - step) * NB + tl.arange(0, NB)
                    present = rank < N
                    decay, _, _ = _neighbours(points + slice_index * N, rank, N, rate, side == 0)
                    c = tl.load(scale + slice_index * N + rank, mask=present, other=0.0)
                    t = _target_rows(targets + slice_index * N * d, rank, present, columns, N, d) * c[:, None]
                    sums = recurrence(tl.broadcast_to(decay[:, None], (NB, DB)), t, carry, 0, side == 1)
                    last = (tl.arange(0, NB) == (NB - 1 if side == 0 else 0))[:, None]
                    carry = tl.sum(tl.where(last, sums, 0.0), 0)[None, :]
                    if side == 1:
                        sums -= t
                    token = tl.load(order + slice_index * N + rank, mask=present, other=0)
                    is_square = (columns == d)[None, :]
                    at = tl.where(is_square, out_squares + token[:, None], out + token[:, None] * d + columns[None, :])
                    write = present[:, None] & (columns <= d)[None, :]
                    tl.store(at, tl.load(at, mask=write, other=0.0) + factor * sums, mask=write)
                    # A row's next turn may come in another thread.
                    tl.debug_barrier()


def fits(problem: Problem) -> bool:
    """Whether this is one sample that meets as many targets, few enough."""
    batch, _, count, targets, _ = problem.sizes
    return batch == 1 and count == targets and count <= MOST_RANKS and problem.lengths is None


def _shared(problem: Problem) -> tuple[int, int, int, float, int]:
    _, slices, count, _, width = problem.sizes
    return slices, count, width, rate_of(problem.tau), cdiv(width + 1, COLUMNS)


def targets_gradient(problem: Problem, grad: Tensor, scale: Tensor) -> Tensor:
    """Give the gradient of the targets, ``(L, N, d)``; ``scale`` is 1/Z."""
    slices, count, width, rate, _ = _shared(problem)
    result = torch.empty((slices, count, width), dtype=torch.float32, device=scale.device)
    sums_pass[(slices, cdiv(width, COLUMNS))](
        problem.points, problem.order, scale, problem.tokens, problem.squares, problem.centre, grad, result,
        count, width, rate, NB=RANKS, DB=COLUMNS, num_warps=1,
    )  # fmt: skip
    return result


def value_and_slope(problem: Problem, scale: Tensor, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(1, L)`` and its slope ``(1, L, N)``."""
    slices, count, width, rate, blocks = _shared(problem)
    summed, signed = torch.empty((2, blocks, slices, count), dtype=torch.float32, device=scale.device).unbind()
    parts_pass[(slices, blocks)](
        problem.points, problem.order, scale, problem.tokens, problem.squares, problem.centre, problem.targets,
        summed, signed, slices, count, width, rate, NB=RANKS, DB=COLUMNS, num_warps=1,
    )  # fmt: skip
    value = problem.points.new_empty((1, slices))
    slope = torch.empty_like(problem.points) if with_slope else problem.points.new_empty((1, 0, 0))
    finish_pass[(slices,)](
        problem.points, scale, summed, signed, value, slope if with_slope else value, blocks, slices, count,
        rate, 1 / problem.tau, NB=power_of_two(count), SLOPE=with_slope, num_warps=1,
    )  # fmt: skip
    return value, slope


def tokens_gradient(problem: Problem, grad: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradients of the tokens ``(1, N, d)`` and of their squares ``(1, N)``."""
    slices, count, width, rate, blocks = _shared(problem)
    each, parts = in_parts(slices, MOST_PARTS)
    rows = torch.zeros((parts, count, width), dtype=torch.float32, device=scale.device)
    square = torch.zeros((parts, count), dtype=torch.float32, device=scale.device)
    back_pass[(parts, blocks)](
        problem.points, problem.order, scale, problem.targets, grad, rows, square, slices, count, width, rate, each,
        NB=RANKS, DB=COLUMNS, num_warps=1,
    )  # fmt: skip
    return rows.sum(0, keepdim=True), square.sum(0, keepdim=True)
