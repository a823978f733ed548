"""The fused pass compiled for the CPU by numba: samples and slices shared out over torch's threads.

The threads are torch's own (:func:`cswe.ops._memory.share_out`), and the compiled loops let go of the interpreter.
numba's would be a second pool, to fight with torch's for the cores; its default kind may not be entered from two
threads at once and does not survive a fork; and loops without parallel regions compile in a fraction of the time.
"""

from functools import partial

import torch
from torch import Tensor

from cswe.ops._memory import share_out
from cswe.ops.kernels import cpu_loops
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
from cswe.ops.kernels.problem import Problem


def value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""
    batch, slices, count, _, width = problem.sizes
    value = problem.points.new_empty((batch, slices))
    slope = problem.points.new_empty((batch, slices, count) if with_slope else (batch, 0, 0))
    targets, centre = array(problem.targets), array(problem.centre)
    row = padded(width + 1)
    for here, part in blocks(problem):
        lengths = lengths_of(part)
        inputs = tokens_of(part), array(part.squares), centre, array(part.points), array(part.order), targets, lengths
        outputs = array(value[here]), array(slope[here])
        groups = sample_groups(problem, lengths, row)
        tasks = [
            (*inputs, group, some, problem.tau, *outputs)
            for group in groups
            for some in slice_groups(problem, len(groups))
        ]
        share_out(cpu_loops.fused, tasks, partial(room, value, len(groups[0]) + 1, count, row))
    return value, slope


def targets_gradient(problem: Problem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, M, d)``."""
    _, _, count, _, width = problem.sizes
    result = torch.zeros_like(problem.targets, memory_format=torch.contiguous_format)
    groups = slice_groups(problem, 1)
    for here, part in blocks(problem):
        lengths, weights = lengths_of(part), array(-2 * grad[here])
        inputs = tokens_of(part), array(problem.centre), array(part.points), array(part.order), weights, lengths
        samples = by_length(lengths)
        tasks = [(*inputs, samples, group, problem.tau, array(result)) for group in groups]
        # Only where ranks and targets differ in number there is something to put aside.
        aside = 0 if part.is_square else len(groups[0])
        share_out(cpu_loops.sums_at_ranks, tasks, partial(room, result, aside, count, width))
    return result


def tokens_gradient(problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient of ``Σ grad · S`` with respect to the tokens ``(B, N, d)`` and their squares ``(B, N)``."""
    batch, _, count, _, width = problem.sizes
    tokens = problem.points.new_empty((batch, count, width))
    squares = problem.points.new_empty((batch, count))
    lengths, row = lengths_of(problem), padded(width + 1)
    inputs = array(problem.points), array(problem.order), array(problem.targets), array(grad), lengths
    groups = sample_groups(problem, lengths, row)
    tasks = [(*inputs, group, problem.tau, array(tokens), array(squares)) for group in groups]
    share_out(cpu_loops.sums_at_tokens, tasks, partial(room, tokens, len(groups[0]) + 1, count, row))
    return tokens, squares
