"""The fused pass compiled for the CPU by numba: samples and slices shared out over torch's threads.

The threads are Python's, and the compiled loops let go of the interpreter. numba's own would be a second pool, whose
default kind may not be entered from two threads at once and does not survive a fork; and loops without parallel
regions compile in a fraction of the time.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from cswe.ops._memory import share_out
from cswe.ops.kernels import cpu_loops
from cswe.ops.kernels.cpu_steps import Array
from cswe.ops.kernels.problem import Problem

BLOCK_ELEMENTS = 1 << 22
"""Numbers of the tokens that are centred, and converted if they must be, at a time."""

CACHE_BYTES = 1 << 19
"""What a thread should work on at a time, to find it in its own cache when it comes back to it."""

LANES = 16
"""Rows are padded to a multiple of this: the widest vector of a CPU holds as many float32."""


def value_and_slope(problem: Problem, with_slope: bool) -> tuple[Tensor, Tensor]:
    """Give S ``(B, L)`` and its derivative with respect to the sorted projections ``(B, L, N)``."""
    batch, slices, count, _, _ = problem.sizes
    value = problem.points.new_empty((batch, slices))
    slope = problem.points.new_empty((batch, slices, count) if with_slope else (batch, 0, 0))
    targets = _array(problem.targets)
    for here, part in _blocks(problem):
        rows, lengths = _augmented(part), _lengths(part)
        points, order = _array(part.points), _array(part.order)
        into = _array(value[here]), _array(slope[here])
        groups = _sample_groups(lengths, rows[0].nbytes)
        some_slices = _split(np.arange(slices), len(groups))
        share_out(
            cpu_loops.fused,
            [
                (points, order, rows, targets, lengths, group, some, problem.tau, *into)
                for group in groups
                for some in some_slices
            ],
        )
    return value, slope


def targets_gradient(problem: Problem, grad: Tensor) -> Tensor:
    """Give the gradient of ``Σ grad · S`` with respect to the targets, ``(L, M, d)``."""
    slices = problem.points.shape[1]
    result = torch.zeros_like(problem.targets, memory_format=torch.contiguous_format)
    for here, part in _blocks(problem):
        rows, lengths = _augmented(part), _lengths(part)
        points, order, weights = _array(part.points), _array(part.order), _array(-2 * grad[here])
        samples = _by_length(lengths)
        size = max(1, min(CACHE_BYTES // rows[0].nbytes, slices // (2 * torch.get_num_threads())))
        groups = np.array_split(np.arange(slices), -(-slices // size))
        share_out(
            cpu_loops.sums_at_ranks,
            [(points, order, rows, weights, lengths, samples, group, problem.tau, _array(result)) for group in groups],
        )
    return result


def tokens_gradient(problem: Problem, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradient of ``Σ grad · S`` with respect to the tokens ``(B, N, d)`` and their squares ``(B, N)``."""
    batch, _, count, _, width = problem.sizes
    tokens = problem.points.new_empty((batch, count, width))
    squares = problem.points.new_empty((batch, count))
    targets = _array(problem.targets)
    for here, part in _blocks(problem):
        lengths, weights = _lengths(part), _array(grad[here])
        points, order = _array(part.points), _array(part.order)
        gradient = np.zeros((len(points), count, _padded(width + 1)), points.dtype)
        groups = _sample_groups(lengths, gradient[0].nbytes)
        share_out(
            cpu_loops.sums_at_tokens,
            [(points, order, targets, weights, lengths, group, problem.tau, gradient) for group in groups],
        )
        both = torch.from_numpy(gradient)
        tokens[here], squares[here] = both[..., :width], both[..., width]
    return tokens, squares


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _blocks(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    batch, _, count, _, width = problem.sizes
    size = max(1, BLOCK_ELEMENTS // (count * _padded(width + 1)))
    for start in range(0, batch, size):
        stop = min(start + size, batch)
        yield slice(start, stop), problem.samples(start, stop)


def _augmented(problem: Problem) -> Array:
    """Centred tokens, their squares and zeros up to a whole number of vectors, ``(B, N, W)``."""
    batch, _, count, _, width = problem.sizes
    rows = problem.points.new_empty((batch, count, _padded(width + 1)))
    torch.sub(problem.tokens.detach(), problem.centre, out=rows[..., :width])
    rows[..., width] = problem.squares.detach()
    rows[..., width + 1 :] = 0
    return rows.numpy()


def _lengths(problem: Problem) -> Array:
    batch, _, count, _, _ = problem.sizes
    return np.full(batch, count) if problem.lengths is None else _array(problem.lengths)


def _by_length(lengths: Array) -> Array:
    """List the samples, the longest first: those of one length share work, and short ones even out the threads."""
    return np.argsort(-lengths, kind="stable")


def _sample_groups(lengths: Array, sample_bytes: int) -> list[Array]:
    size = max(1, CACHE_BYTES // sample_bytes)
    samples = _by_length(lengths)
    # Rather many groups than large ones: every thread should get several.
    size = min(size, max(1, len(samples) // (4 * torch.get_num_threads())))
    return np.array_split(samples, -(-len(samples) // size))


def _split(slices: Array, groups: int) -> list[Array]:
    """Cut the slices in so many parts that, with the groups of samples, every thread gets several."""
    parts = -(-4 * torch.get_num_threads() // groups)
    return np.array_split(slices, min(parts, len(slices)))
