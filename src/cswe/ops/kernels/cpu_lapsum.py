"""LapSum's operation compiled for the CPU by numba, on torch's threads as in :mod:`cswe.ops.kernels.cpu`."""

from functools import partial

import torch
from torch import Tensor

from cswe.ops._memory import share_out
from cswe.ops.kernels import cpu_lapsum_loops
from cswe.ops.kernels.cpu_tasks import (
    array,
    blocks,
    by_length,
    lengths_of,
    padded,
    room,
    sample_groups,
    slice_groups,
    tokens_of,
)
from cswe.ops.kernels.lapsum_problem import LapSumProblem


def value_and_slope(problem: LapSumProblem, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""
    batch, slices, count = problem.points.shape
    value = problem.points.new_empty((batch, slices))
    slope = problem.points.new_empty((batch, slices, count) if with_slope else (batch, 0, 0))
    targets, centre = array(problem.targets), array(problem.centre)
    _, ranks, width = problem.targets.shape
    row = padded(width)
    for here, part in blocks(problem):
        lengths = lengths_of(part)
        inputs = tokens_of(part), centre, array(part.points), array(part.order), targets, lengths
        outputs = array(value[here]), array(slope[here])
        groups = sample_groups(problem, lengths, row)
        tasks = [(*inputs, group, some, *outputs) for group in groups for some in slice_groups(problem, len(groups))]
        share_out(cpu_lapsum_loops.fused, tasks, partial(room, value, len(groups[0]) + 1, max(count, ranks), row))
    return value, slope


def targets_gradient(problem: LapSumProblem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, K, d)``."""
    result = torch.zeros_like(problem.targets, memory_format=torch.contiguous_format)
    groups = slice_groups(problem, 1)
    for here, part in blocks(problem):
        lengths, weights = lengths_of(part), array(grad[here])
        inputs = tokens_of(part), array(problem.centre), array(part.points), array(part.order), weights, lengths
        tasks = [(*inputs, by_length(lengths), group, array(result)) for group in groups]
        share_out(cpu_lapsum_loops.sums_at_ranks, tasks, partial(room, result, *result.shape[1:]))
    return result


def tokens_gradient(problem: LapSumProblem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the tokens, ``(B, N, d)``."""
    result = problem.points.new_empty(problem.tokens.shape)
    lengths = lengths_of(problem)
    inputs = array(problem.points), array(problem.order), array(problem.targets), array(grad), lengths
    tasks = [(*inputs, group, array(result)) for group in sample_groups(problem, lengths, problem.tokens.shape[2])]
    share_out(cpu_lapsum_loops.sums_at_tokens, tasks, partial(room, result, *problem.targets.shape[1:]))
    return result
