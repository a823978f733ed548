r"""Couplings between ranks, and quantile functions on M ranks.

The optimal plan between two sorted one-dimensional measures is the north-west corner rule: walk along both
cumulative distributions and pass on what overlaps. Its marginals are exact and it has at most N + M − 1 entries.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from cswe.ops._inputs import check_floating, check_weights, looks_at_values, whole, working_dtype


@dataclass(frozen=True)
class RankCoupling:
    """A coupling Λ of total mass 1 between N and M ranks, as a list of entries ``Λ[rows, cols] = mass``.

    An operator like the sorts: ``Λ @ w`` for ``(…, M)`` values, ``Λ.T @ w`` for ``(…, N)`` values, ``Λ.dense()``.
    ``rows``, ``cols`` and ``mass`` have shape ``(K,)``, or ``(…, K)`` for batched weights.
    """

    rows: Tensor
    cols: Tensor
    mass: Tensor
    size: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, ``(…, N, M)``."""
        return torch.Size((*self.mass.shape[:-1], *self.size))

    @property
    def T(self) -> "RankCoupling":
        """The coupling read the other way."""
        return RankCoupling(self.cols, self.rows, self.mass, (self.size[1], self.size[0]))

    def __matmul__(self, w: Tensor) -> Tensor:
        check_floating(w, "the right-hand side of @")
        if w.ndim == 0 or w.shape[-1] != self.size[1]:
            raise ValueError(f"expected a right-hand side of shape (…, {self.size[1]}) but got {tuple(w.shape)}")
        w = w.to(working_dtype(w))
        batch = torch.broadcast_shapes(w.shape[:-1], self.mass.shape[:-1])
        mass = self.mass.to(w.dtype)
        result = w.new_zeros((*batch, self.size[0]))
        if mass.ndim == 1:
            return result.index_add(-1, self.rows, w[..., self.cols] * mass)
        entries = (*batch, mass.shape[-1])
        carried = w.expand(*batch, w.shape[-1]).gather(-1, self.cols.expand(entries)) * mass
        return result.scatter_add(-1, self.rows.expand(entries), carried)

    def dense(self) -> Tensor:
        """Give the matrix Λ itself, ``(…, N, M)``."""
        flat = self.mass.new_zeros((*self.mass.shape[:-1], self.size[0] * self.size[1]))
        return flat.scatter_add(-1, self.rows * self.size[1] + self.cols, self.mass).reshape(self.shape)


def rank_coupling(n: int | Tensor, m: int | Tensor, device: torch.device | str | None = None) -> RankCoupling:
    r"""Couple N ranks with M ranks monotonically: the plan of every 1-D optimal transport problem of these weights.

    Parameters
    ----------
    n, m
        A number of ranks with uniform weights, or the weights in rank order, ``(…, N)`` and ``(…, M)``. Weights are
        normalised; batch axes broadcast; gradients flow to them.
    device
        Where to put the result if no tensor says so.

    Returns
    -------
    RankCoupling
        Exact marginals; N + M − gcd(N, M) entries for uniform weights (integer arithmetic, so no entry is a rounding
        artefact), N + M − 1 otherwise, some of them possibly zero. Masses are float64.

    Examples
    --------
    >>> rank_coupling(2, 3).dense()
    tensor([[0.3333, 0.1667, 0.0000],
            [0.0000, 0.1667, 0.3333]], dtype=torch.float64)
    """
    for name, given in (("n", n), ("m", m)):
        if isinstance(given, Tensor):
            if given.ndim == 0 or given.shape[-1] == 0:
                raise ValueError(f"expected {name} to be a number or of shape (…, N) but got {tuple(given.shape)}")
            check_weights(given, tuple(given.shape), name, looks_at_values(None, given))
        else:
            whole(given, name, more=" ranks")
    return couple_masses(n, m, device)


def couple_masses(n: int | Tensor, m: int | Tensor, device: torch.device | str | None = None) -> RankCoupling:
    """Couple likewise, without a look at the weights."""
    where = next((given.device for given in (n, m) if isinstance(given, Tensor)), device)
    # While torch.compile traces, counts may be symbols, of which there is no greatest common divisor.
    if not isinstance(n, Tensor) and not isinstance(m, Tensor) and (n == m or not torch.compiler.is_compiling()):
        return _uniform(n, m, where)
    left, right = (
        cumulative(given)
        if isinstance(given, Tensor)
        else torch.arange(1, given + 1, device=where, dtype=torch.float64) / given
        for given in (n, m)
    )
    return couple_edges(left, right)


def couple_edges(left: Tensor, right: Tensor) -> RankCoupling:
    """Couple two cumulative distributions ``(…, N)`` and ``(…, M)`` that both end at 1."""
    batch = torch.broadcast_shapes(left.shape[:-1], right.shape[:-1])
    n, m = left.shape[-1], right.shape[-1]
    both = torch.cat([left.expand(*batch, n), right.expand(*batch, m)], dim=-1)
    # Both end at 1: one of the two last edges is enough.
    edges, order = torch.sort(both, dim=-1, stable=True)
    edges, order = edges[..., :-1], order[..., :-1]
    mass = torch.diff(edges, dim=-1, prepend=torch.zeros_like(edges[..., :1]))
    # The entry that ends at an edge belongs to the rank whose edges have not passed yet.
    is_left = (order < n).to(torch.int64)
    passed_left = is_left.cumsum(-1) - is_left
    passed_right = (1 - is_left).cumsum(-1) - (1 - is_left)
    return RankCoupling(passed_left.clamp(max=n - 1), passed_right.clamp(max=m - 1), mass, (n, m))


def cumulative(weights: Tensor) -> Tensor:
    """Cumulative weights ``(…, N)`` in float64, ending at exactly 1."""
    edges = weights.to(torch.float64).cumsum(-1)
    return edges / edges[..., -1:]


def _uniform(n: int, m: int, device: torch.device | str | None) -> RankCoupling:
    if n == m:
        ranks = torch.arange(n, device=device)
        return RankCoupling(ranks, ranks, torch.full((n,), 1 / n, dtype=torch.float64, device=device), (n, n))
    # In units of 1/(n m / gcd) all edges are integers.
    divisor = gcd(n, m)
    step_n, step_m = m // divisor, n // divisor
    left = torch.arange(1, n + 1, device=device) * step_n
    right = torch.arange(1, m + 1, device=device) * step_m
    # Edges that coincide (every step_n-th one, gcd of them) would give empty entries.
    edges = torch.cat([left, right.reshape(divisor, step_n)[:, :-1].flatten()]).sort().values
    starts = torch.cat([edges.new_zeros(1), edges[:-1]])
    mass = (edges - starts).to(torch.float64) / (n * step_n)
    return RankCoupling(starts // step_n, starts // step_m, mass, (n, m))
