"""Seeing less in training: some of the tokens, some of the numbers."""

from dataclasses import replace

import torch
from torch import Tensor

from cswe.tokens import Batch


def keep_tokens(batch: Batch, share: float, generator: torch.Generator) -> Batch:
    """Return a batch with a random part of every set's tokens, at least one of each.

    A set of n tokens keeps ``round(share · n)``. Fewer tokens are also less work.

    Parameters
    ----------
    batch
        Padded sets.
    share
        The part to keep; 1 returns the batch as it is.
    generator
        Decides which.

    Examples
    --------
    >>> batch = Batch(torch.randn(2, 8, 3), None, None, None, None, None, torch.arange(2))
    >>> keep_tokens(batch, 0.5, torch.Generator().manual_seed(0)).tokens.shape
    torch.Size([2, 4, 3])
    """
    if share >= 1:
        return batch
    sets, count, width = batch.tokens.shape
    device = batch.tokens.device
    draw = torch.rand(sets, count, generator=generator, device=device)
    if batch.mask is None:
        kept = max(1, round(share * count))
        chosen = draw.argsort(1)[:, :kept]
        mask = None
    else:
        lengths = (batch.mask.sum(1) * share).round().clamp(min=1)
        kept = int(lengths.max())
        chosen = draw.masked_fill(~batch.mask, 2.0).argsort(1)[:, :kept]  # padding comes last
        mask = torch.arange(kept, device=device) < lengths.unsqueeze(1)
    weights = batch.weights
    if weights is not None:
        weights = weights.gather(1, chosen)
        weights = weights if mask is None else torch.where(mask, weights, 0.0)
    tokens = batch.tokens.gather(1, chosen.unsqueeze(-1).expand(-1, -1, width))
    return replace(batch, tokens=tokens, mask=mask, weights=weights)


def drop(vectors: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Set a random part of the numbers to zero and scale the rest up (dropout with a generator of its own).

    Examples
    --------
    >>> drop(torch.ones(4), 0.0, torch.Generator())
    tensor([1., 1., 1., 1.])
    """
    if share <= 0:
        return vectors
    kept = torch.rand(vectors.shape, generator=generator, device=vectors.device) >= share
    return vectors * kept / (1 - share)
