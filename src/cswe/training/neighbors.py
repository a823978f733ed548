"""Nearest neighbours among vectors that come in blocks: exact, whatever their number."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from cswe.training.errors import UserError

Metric = Literal["cosine", "euclidean"]


def nearest(
    queries: Tensor, blocks: Iterable[Tensor], k: int, metric: Metric = "cosine", skip: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find the k nearest of all vectors for each query.

    Parameters
    ----------
    queries
        ``(Q, size)``.
    blocks
        The vectors ``(n, size)``, in blocks; only one is held at a time.
    k
        How many.
    metric
        ``"cosine"``: one minus the cosine of the angle; ``"euclidean"``.
    skip
        A position for each query that is left out, itself say, ``(Q,)``.

    Returns
    -------
    tuple
        Distances, ascending, and positions, both ``(Q, k)``, fewer where there are fewer vectors. Of equal distances
        the first position comes first.

    Examples
    --------
    >>> vectors = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.1]])
    >>> nearest(vectors[1:2], vectors.split(2), k=2)[1]
    tensor([[1, 2]])
    """
    if k < 1:
        raise UserError(f"k: expected at least 1 but got {k}")
    if queries.ndim != 2:
        raise UserError(f"queries: expected vectors (Q, size) but got shape {tuple(queries.shape)}")
    queries = queries.double()
    if metric == "cosine":
        queries = torch.nn.functional.normalize(queries, dim=1)
    best = queries.new_empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    start = 0
    for block in blocks:
        if block.ndim != 2 or block.shape[1] != queries.shape[1]:
            raise UserError(
                f"blocks: expected vectors (n, {queries.shape[1]}) in blocks, as vectors.split(1000) makes them, but "
                f"got a block of shape {tuple(block.shape)}"
            )
        vectors = block.double()
        if metric == "cosine":
            distances = 1 - queries @ torch.nn.functional.normalize(vectors, dim=1).T
        else:
            # Not by ‖x‖² + ‖y‖² − 2⟨x, y⟩, which cancels for near ones, and those are what is asked for.
            distances = torch.cdist(queries, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        here = torch.arange(start, start + len(block), device=queries.device).expand(len(queries), -1)
        if skip is not None:
            distances = distances.masked_fill(here == skip.unsqueeze(1), torch.inf)
        # Earlier blocks come first, so that equal distances keep the order of their positions.
        best, order = _least(torch.cat([best, distances], dim=1), k)
        places = torch.cat([places, here], dim=1).gather(1, order)
        start += len(block)
    kept = int(torch.isfinite(best).sum(1).min()) if best.numel() else 0
    return best[:, :kept], places[:, :kept]


def _least(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Give the k least of every row, ascending, and where they are; of equal ones the first come first.

    As the first columns of a stable sort, which takes many times as long: only rows are sorted whose k-th has equals
    beyond, since which of those `topk` takes is anyone's guess.
    """
    k = min(k, values.shape[1])
    found, order = values.topk(k, dim=1, largest=False)
    unsure = (values <= found[:, -1:]).sum(1) != k
    if bool(unsure.any()):
        order[unsure] = values[unsure].sort(dim=1, stable=True)[1][:, :k]
    order = order.sort(dim=1)[0]
    found, rank = values.gather(1, order).sort(dim=1, stable=True)
    return found, order.gather(1, rank)
