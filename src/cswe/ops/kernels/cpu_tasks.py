"""How the compiled loops get their work: tensors as arrays, in blocks of samples, cut into tasks for the threads."""

from collections.abc import Iterator
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from cswe.ops.kernels.cpu_steps import Array

BLOCK_ELEMENTS = 1 << 22
"""Numbers of the tokens that are converted at a time, where they must be."""

CACHE_BYTES = 1 << 19
"""What a thread should work on at a time, to find it in its own cache when it comes back to it."""

TASK_ELEMENTS = 1 << 17
"""Numbers, over samples, slices, ranks and dimensions, that take longer to work on than a thread takes to start."""

LANES = 16
"""Rows are padded to a multiple of this: the widest vector of a CPU holds as many float32."""


class Batch(Protocol):
    """What the problems of all relaxations have in common."""

    @property
    def points(self) -> Tensor:
        """Sorted projections, ``(B, L, N)``."""

    @property
    def tokens(self) -> Tensor:
        """Tokens, ``(B, N, d)``, in any floating dtype."""

    @property
    def lengths(self) -> Tensor | None:
        """Number of valid tokens per sample, ``(B,)``; ``None``: all N."""

    def samples(self, start: int, stop: int) -> Self:
        """Restrict to some of the samples."""


Some = TypeVar("Some", bound=Batch)


def array(tensor: Tensor) -> Array:
    """Give the memory of a tensor, in rows."""
    return tensor.detach().contiguous().numpy()


def tokens_of(batch: Batch) -> Array:
    """Give the tokens in the dtype that is worked in."""
    return array(batch.tokens.to(batch.points.dtype))


def room(like: Tensor, *shape: int) -> Array:
    """Make working space. torch aligns it to the vectors of a CPU, numpy does not."""
    return like.new_empty(shape).numpy()


def padded(width: int) -> int:
    """Round the width of a row up to whole vectors."""
    return -(-width // LANES) * LANES


def blocks(batch: Some) -> Iterator[tuple[slice, Some]]:
    """Cut the samples into blocks, if their tokens must be converted: half precision is no type of numba's."""
    count = batch.points.shape[0]
    size = count
    if batch.tokens.dtype != batch.points.dtype:
        size = max(1, BLOCK_ELEMENTS // batch.tokens[0].numel())
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield slice(start, stop), batch.samples(start, stop)


def lengths_of(batch: Batch) -> Array:
    """Give the number of valid tokens of every sample."""
    count, _, tokens = batch.points.shape
    return np.full(count, tokens) if batch.lengths is None else array(batch.lengths)


def by_length(lengths: Array) -> Array:
    """List the samples, the longest first: those of one length share work, and short ones even out the threads."""
    return np.argsort(-lengths, kind="stable")


def sample_groups(batch: Batch, lengths: Array, width: int) -> list[Array]:
    """Group samples so that there are enough groups, and so that the rows of one fit a core's own cache."""
    fit = CACHE_BYTES // (batch.points.shape[2] * width * batch.points.element_size())
    samples = by_length(lengths)
    size = max(1, min(fit, -(-len(samples) // _enough(batch))))
    return np.array_split(samples, -(-len(samples) // size))


def slice_groups(batch: Batch, sample_groups: int) -> list[Array]:
    """Group slices so that, combined with the groups of samples, there are enough tasks."""
    slices = np.arange(batch.points.shape[1])
    return np.array_split(slices, min(len(slices), -(-_enough(batch) // sample_groups)))


def _enough(batch: Batch) -> int:
    """Say how many tasks to make: several for every thread, none too small to be worth one."""
    elements = batch.points.numel() * batch.tokens.shape[2]
    return max(1, min(4 * torch.get_num_threads(), elements // TASK_ELEMENTS))
