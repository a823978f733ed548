"""The fused pass compiled for the CPU by numba: samples and slices shared out over torch's threads.

The threads are torch's own (:func:`cswe.ops._memory.share_out`), and the compiled loops let go of the interpreter.
numba's would be a second pool, to fight with torch's for the cores; its default kind may not be entered from two
threads at once and does not survive a fork; and loops without parallel regions compile in a fraction of the time.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cswe.ops._memory import share_out
from cswe.ops.kernels import cpu_loops
from cswe.ops.kernels.cpu_steps import Array
from cswe.ops.kernels.problem import Problem

BLOCK_ELEMENTS = 1 << 22
"""Numbers of the tokens that are converted at a time, where they must be."""

CACHE_BYTES = 1 << 19
"""What a thread should work on at a time, to find it in its own cache when it comes back to it."""

TASK_ELEMENTS = 1 << 17
"""Numbers, over samples, slices, ranks and dimensions, that take longer to work on than a thread takes to start."""

LANES = 16
"""Rows are padded to a multiple of this: the widest vector of a CPU holds as many float32."""


def value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""
    batch, slices, count, _, width = problem.sizes
    value = problem.points.new_empty((batch, slices))
    slope = problem.points.new_empty((batch, slices, count) if with_slope else (batch, 0, 0))
    targets, centre = _array(problem.targets), _array(problem.centre)
    for here, part in _blocks(problem):
        lengths = _lengths(part)
        inputs = _tokens(part), _array(part.squares), centre, _array(part.points), _array(part.order), targets, lengths
        outputs = _array(value[here]), _array(slope[here])
        groups = _sample_groups(problem, lengths)
        tasks = [
            (*inputs, group, some, problem.tau, *outputs)
            for group in groups
            for some in _slice_groups(problem, len(groups))
        ]
        share_out(cpu_loops.fused, tasks, partial(_room, problem, len(groups[0]) + 1, _padded(width + 1)))
    return value, slope


def targets_gradient(problem: Problem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, M, d)``."""
    width = problem.targets.shape[2]
    result = torch.zeros_like(problem.targets, memory_format=torch.contiguous_format)
    groups = _slice_groups(problem, 1)
    for here, part in _blocks(problem):
        lengths, weights = _lengths(part), _array(-2 * grad[here])
        inputs = _tokens(part), _array(problem.centre), _array(part.points), _array(part.order), weights, lengths
        samples = _by_length(lengths)
        tasks = [(*inputs, samples, group, problem.tau, _array(result)) for group in groups]
        # Only where ranks and targets differ in number there is something to put aside.
        aside = 0 if part.is_square else len(groups[0])
        share_out(cpu_loops.sums_at_ranks, tasks, partial(_room, problem, aside, width))
    return result


def tokens_gradient(problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient of ``Σ grad · S`` with respect to the tokens ``(B, N, d)`` and their squares ``(B, N)``."""
    batch, _, count, _, width = problem.sizes
    tokens = problem.points.new_empty((batch, count, width))
    squares = problem.points.new_empty((batch, count))
    lengths = _lengths(problem)
    inputs = _array(problem.points), _array(problem.order), _array(problem.targets), _array(grad), lengths
    groups = _sample_groups(problem, lengths)
    tasks = [(*inputs, group, problem.tau, _array(tokens), _array(squares)) for group in groups]
    share_out(cpu_loops.sums_at_tokens, tasks, partial(_room, problem, len(groups[0]) + 1, _padded(width + 1)))
    return tokens, squares


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _tokens(problem: Problem) -> Array:
    return _array(problem.tokens.to(problem.points.dtype))


def _room(problem: Problem, rows: int, width: int) -> Array:
    """Make space for rows of N tokens. torch aligns it to the vectors of a CPU, numpy does not."""
    return problem.points.new_empty((rows, problem.points.shape[2], width)).numpy()


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _blocks(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """Cut the samples into blocks, if their tokens must be converted: half precision is no type of numba's."""
    batch = problem.points.shape[0]
    size = batch
    if problem.tokens.dtype != problem.points.dtype:
        size = max(1, BLOCK_ELEMENTS // problem.tokens[0].numel())
    for start in range(0, batch, size):
        stop = min(start + size, batch)
        yield slice(start, stop), problem.samples(start, stop)


def _lengths(problem: Problem) -> Array:
    batch, _, count, _, _ = problem.sizes
    return np.full(batch, count) if problem.lengths is None else _array(problem.lengths)


def _by_length(lengths: Array) -> Array:
    """List the samples, the longest first: those of one length share work, and short ones even out the threads."""
    return np.argsort(-lengths, kind="stable")


def _sample_groups(problem: Problem, lengths: Array) -> list[Array]:
    """Group samples so that there are enough groups, and so that the rows of one fit a core's own cache."""
    _, _, count, _, width = problem.sizes
    fit = CACHE_BYTES // (count * _padded(width + 1) * problem.points.element_size())
    samples = _by_length(lengths)
    size = max(1, min(fit, -(-len(samples) // _enough(problem))))
    return np.array_split(samples, -(-len(samples) // size))


def _slice_groups(problem: Problem, sample_groups: int) -> list[Array]:
    """Group slices so that, combined with the groups of samples, there are enough tasks."""
    slices = np.arange(problem.points.shape[1])
    return np.array_split(slices, min(len(slices), -(-_enough(problem) // sample_groups)))


def _enough(problem: Problem) -> int:
    """Say how many tasks to make: several for every thread, none too small to be worth one."""
    batch, slices, count, _, width = problem.sizes
    return max(1, min(4 * torch.get_num_threads(), batch * slices * count * width // TASK_ELEMENTS))
