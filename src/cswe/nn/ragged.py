"""Sets of different sizes without padding to the longest: ``(values, ptr)`` and nested tensors, at the door.

Samples of similar length are padded together, at most a quarter beyond the shortest of them, so that one long set
does not make all others long.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from cswe.ops._inputs import check_floating

Ragged: TypeAlias = tuple[Tensor, Tensor]
Sets: TypeAlias = Tensor | Ragged
"""Padded tokens ``(B, N, d)``; or all tokens ``(T, d)`` with ``ptr`` ``(B + 1,)``, as in PyTorch Geometric; or
nested."""

# The most by which a set is padded: longest over shortest of a group.
_STRETCH = 1.25


class Group(NamedTuple):
    """Samples of similar length, padded."""

    samples: Tensor
    tokens: Tensor
    mask: Tensor
    weights: Tensor | None


def is_ragged(tokens: object) -> bool:
    """Say whether tokens came as ``(values, ptr)`` or as a nested tensor."""
    return isinstance(tokens, tuple | list) or (isinstance(tokens, Tensor) and tokens.is_nested)


def batch_size(tokens: Sets) -> int:
    """Give the number of sets."""
    if is_ragged(tokens) and not isinstance(tokens, Tensor):
        return len(_pair(tokens)[1]) - 1
    return int(as_padded(tokens).size(0))


def as_padded(tokens: Sets) -> Tensor:
    """Give padded tokens, or a nested tensor, back, or raise: they came as nothing that is known."""
    check_floating(tokens, "tokens")
    return cast(Tensor, tokens)


def without_mask(tokens: Sets, mask: Tensor | None) -> Sets:
    """Give the tokens back, or raise: ragged sets say their lengths themselves."""
    if mask is not None:
        raise ValueError("ragged tokens come without a mask: their lengths are in ptr")
    return tokens


def map_groups(
    function: Callable[[Tensor, Tensor, Tensor | None], Tensor], tokens: Sets, weights: Tensor | None
) -> Tensor:
    """Apply a function of padded sets to ragged ones, group by group; rows come back in the order of the samples.

    Parameters
    ----------
    function
        Takes tokens, mask and weights of a group, gives one row a sample.
    tokens
        ``(values, ptr)`` or a nested tensor.
    weights
        Masses of all tokens, ``(T,)``, or nested alike.
    """
    parts = list(groups(tokens, weights))
    rows = torch.cat([function(group.tokens, group.mask, group.weights) for group in parts])
    places = torch.cat([group.samples for group in parts])
    return rows[torch.argsort(places)]


def groups(tokens: Sets, weights: Tensor | None) -> Iterator[Group]:
    """Deal ragged sets into padded groups of similar length."""
    values, ptr = _flat(tokens)
    lengths = _lengths(values, ptr)
    flat_weights = None if weights is None else _flat_weights(weights, lengths)
    by_length = torch.argsort(lengths, stable=True)
    start = 0
    sizes = lengths[by_length].tolist()
    if not sizes:  # what is made of no set has its width and its gradients all the same
        nothing = torch.zeros((0, 1), dtype=torch.int64, device=values.device)
        some = None if flat_weights is None else flat_weights[nothing]
        yield Group(nothing[:, 0], values[nothing], nothing.bool(), some)
    while start < len(sizes):
        stop = start + 1
        while stop < len(sizes) and sizes[stop] <= max(sizes[start] * _STRETCH, sizes[start] + 1):
            stop += 1
        samples = by_length[start:stop]
        offsets = torch.arange(sizes[stop - 1], device=lengths.device)
        mask = offsets < lengths[samples].unsqueeze(1)
        index = torch.where(mask, ptr[samples].unsqueeze(1) + offsets, 0).to(values.device)
        samples, mask = samples.to(values.device), mask.to(values.device)
        yield Group(samples, values[index], mask, None if flat_weights is None else flat_weights[index])
        start = stop


def all_values(tokens: Sets) -> Tensor:
    """Give all tokens of ragged sets, ``(T, d)``."""
    values, ptr = _flat(tokens)
    _lengths(values, ptr)
    return values


def _flat(tokens: Sets) -> Ragged:
    """Unpack to all tokens ``(T, d)`` and ptr on the CPU, or raise."""
    if isinstance(tokens, Tensor):
        parts = tokens.unbind()
        return torch.cat(parts), torch.tensor([0, *map(len, parts)], device="cpu").cumsum(0)
    values, ptr = _pair(tokens)
    return values, ptr.detach().cpu().long()


def _pair(tokens: Ragged) -> Ragged:
    """Give ``(values, ptr)`` back, or raise, without a look at the numbers in ptr: that would wait for a GPU."""
    if len(tokens) != 2:
        raise ValueError(f"expected ragged tokens as (values, ptr) but got a tuple of {len(tokens)}")
    values, ptr = tokens
    check_floating(values, "the values of ragged tokens")
    if not isinstance(ptr, Tensor) or ptr.ndim != 1 or ptr.is_floating_point() or len(ptr) == 0:
        raise ValueError("expected ptr to be a tensor of B + 1 whole numbers, where each set starts and the last ends")
    if len(ptr) == 1 and values.numel():
        raise ValueError(f"expected ptr to ascend from 0 to the number of tokens, {len(values)}, but got one number")
    return values, ptr


def _lengths(values: Tensor, ptr: Tensor) -> Tensor:
    if values.ndim != 2:
        raise ValueError(f"expected the values of ragged tokens of shape (T, d) but got {tuple(values.shape)}")
    lengths = ptr.diff()
    if int(ptr[0]) != 0 or int(ptr[-1]) != len(values) or bool((lengths < 0).any()):
        raise ValueError(
            f"expected ptr to ascend from 0 to the number of tokens, {len(values)}, but got {ptr.tolist()}"
        )
    if bool((lengths == 0).any()):
        raise ValueError(f"sample {int((lengths == 0).nonzero()[0])} has no token; an empty set has no embedding")
    return lengths


def _flat_weights(weights: Tensor, lengths: Tensor) -> Tensor:
    if isinstance(weights, Tensor) and weights.is_nested:
        parts = weights.unbind()
        shapes = [tuple(part.shape) for part in parts]
        if shapes != [(length,) for length in lengths.tolist()]:
            raise ValueError("expected nested weights of as many numbers as the sets have tokens, set by set")
        return torch.cat(parts)
    check_floating(weights, "weights")
    count = int(lengths.sum())
    if tuple(weights.shape) != (count,):
        raise ValueError(f"expected weights of ragged tokens of shape ({count},) but got {tuple(weights.shape)}")
    return weights
