"""Mean, spread and norms of the tokens in a store."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from cswe.tokens.store import TokenStore


@dataclass(frozen=True)
class TokenStatistics:
    """What `token_statistics` measured.

    Parameters
    ----------
    items, tokens
        How many were read.
    mean
        Mean token, float32 of shape ``(dim,)``.
    spread
        One number for all coordinates: the root of the mean variance of a coordinate.
    norm_mean, norm_min, norm_max
        Euclidean norms of tokens.
    """

    items: int
    tokens: int
    mean: Tensor
    spread: float
    norm_mean: float
    norm_min: float
    norm_max: float


def token_statistics(
    store: "TokenStore", indices: npt.NDArray[np.int64], max_items: int | None = None
) -> TokenStatistics:
    """Measure the tokens of some items of a store, item by item, in float64.

    Parameters
    ----------
    store
        The store to read.
    indices
        Which items.
    max_items
        Read at most so many, evenly spaced over `indices`.
    """
    if max_items is not None and max_items < 1:
        raise ValueError(f"max_items: expected at least 1 but got {max_items}")
    if max_items is not None and len(indices) > max_items:
        indices = indices[np.linspace(0, len(indices) - 1, max_items).round().astype(np.int64)]
    if not len(indices):
        raise ValueError(f"{store.path}: expected items to measure but there are none")
    count, norms, low, high = 0, 0.0, float("inf"), 0.0
    # Sums are taken around the first item's mean: E[x²] − E[x]² would lose the digits of a mean far from zero.
    origin: Tensor | None = None
    total = torch.zeros(store.dim, dtype=torch.float64)
    squares = torch.zeros(store.dim, dtype=torch.float64)
    for index in np.sort(indices):
        shard, row = store.locate(int(index))
        tokens = shard.tokens(store.layer)[int(shard.offsets[row]) : int(shard.offsets[row + 1])].double()
        length = tokens.norm(dim=1)
        norms += float(length.sum())
        low, high = min(low, float(length.min())), max(high, float(length.max()))
        origin = tokens.mean(0) if origin is None else origin
        shifted = tokens - origin
        total += shifted.sum(0)
        squares += shifted.square().sum(0)
        count += len(tokens)
    drift = total / count
    variance = (squares / count - drift.square()).clamp_min(0)
    mean = drift if origin is None else origin + drift
    return TokenStatistics(
        items=len(indices),
        tokens=count,
        mean=mean.float(),
        spread=float(variance.mean().sqrt()),
        norm_mean=norms / count,
        norm_min=low,
        norm_max=high,
    )
