"""Sets of vectors as vectors: the sliced Wasserstein embedding, and L-moments of projections."""

from math import sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from cswe.ops._gpu import gpu_kernels
from cswe.ops._inputs import (
    as_mask,
    check_finite,
    check_floating,
    check_points,
    check_weights,
    looks_at_values,
    unit_slices,
    whole,
    without_autocast,
    working_dtype,
)
from cswe.ops.coupling import couple_masses, rank_coupling
from cswe.ops.fast_sort import permuted, sort_rows, sorted_rows
from cswe.ops.sorting import filled_ranks, sort_with_padding_last, sorted_with_padding_last

Interpolation = Literal["barycentric", "linear"]
Order = Literal["reference", "rank", "argsort"]
ORDERS = get_args(Order)


@without_autocast
def swe(
    tokens: Tensor,
    reference: Tensor,
    slices: Tensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    interpolation: Interpolation = "barycentric",
    order: Order = "reference",
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Embed sets by their displacement to a reference, slice by slice (the paper's SWE).

    .. math:: z_{il}[j] = q_{il}[ρ_l(j)] - θ_l^⊤ u_j

    where ρ_l(j) is the *rank* of reference point j along slice l and q the sample's quantile function on M ranks.
    For N = M, :math:`‖z_{il}‖²/M` is the squared 1-D Wasserstein distance to the reference; for other N it is at most
    that, and :math:`‖z_{il} - z_{jl}‖²/M ≤ W_2²(i, j)`.

    Parameters
    ----------
    tokens
        ``(B, N, d)``.
    reference
        Reference points U, ``(M, d)``.
    slices
        Directions ``(L, d)``; normalised inside.
    mask
        ``(B, N)``, bool or 0/1, True = valid. What is masked is never read.
    weights
        Masses ``(B, N)``, normalised inside; uniform if not given.
    interpolation
        ``"barycentric"``: q is the mean of the sample's quantile function over each M-th of the mass. It preserves the
        mean, does not change when every token is repeated, and takes weights. ``"linear"``: between order statistics,
        as the paper intends, at (m − 1)/(M − 1) from the least to the largest (with one reference point, their median);
        no weights.
    order
        ``"reference"`` lists z by reference point (the paper), ``"rank"`` by rank: continuous in the reference, and
        what a linear head sees is the quantile function. ``"argsort"`` is for results to be held against: it gathers
        as public code does, by the inverse of the ranks, which is no transport unless the reference is sorted.
    validate
        Look at the values too; by default in eager use on the CPU.

    Returns
    -------
    Tensor
        z, ``(B, L, M)``, in float32 at least. Gradients flow to tokens, reference, slices and weights.

    Examples
    --------
    >>> tokens = torch.tensor([[[3.0], [1.0], [2.0]]])
    >>> swe(tokens, reference=torch.tensor([[10.0], [30.0], [20.0]]), slices=torch.ones(1, 1))
    tensor([[[ -9., -27., -18.]]])
    """
    check_points(tokens, "tokens", (3,))
    batch, count, width = tokens.shape
    check_points(reference, "reference", (2,), width=width)
    if interpolation not in ("barycentric", "linear"):
        raise ValueError(f"expected interpolation 'barycentric' or 'linear' but got {interpolation!r}")
    if order not in ORDERS:
        raise ValueError(f"expected order to be one of {', '.join(ORDERS)} but got {order!r}")
    if interpolation == "linear" and weights is not None:
        raise ValueError("linear interpolation between order statistics takes no weights; use 'barycentric'")
    look = looks_at_values(validate, tokens)
    mask = as_mask(mask, (batch, count), "mask", look)
    check_weights(weights, (batch, count), "weights", look, mask)
    dtype = working_dtype(tokens, reference, slices)
    directions = unit_slices(slices, width, dtype, look)
    tokens = tokens.to(dtype)
    if mask is not None:
        tokens = torch.where(mask.unsqueeze(-1), tokens, 0.0)
    if look:
        check_finite(tokens, "tokens", " among the valid ones")
        check_finite(reference, "reference")
    projections = (tokens @ directions.T).transpose(-1, -2)
    quantiles = quantile_function(projections, reference.shape[0], mask, weights, interpolation)
    return displacement(quantiles, directions @ reference.to(dtype).T, order)


def quantile_function(
    values: Tensor,
    points: int,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    interpolation: Interpolation = "barycentric",
) -> Tensor:
    """Give the quantile functions of values ``(B, L, N)`` on M ranks, ``(B, L, M)``; mask and weights ``(B, N)``."""
    row_mask = None if mask is None else mask.unsqueeze(-2)
    if interpolation == "linear":
        return _interpolate(sorted_with_padding_last(values, row_mask), points, row_mask)
    if weights is None:
        compiled = gpu_kernels("cuda_quantiles", values)
        if compiled is not None and (mask is not None or values.shape[-1] != points):
            lengths = None if mask is None else mask.sum(-1)
            hidden = values if row_mask is None else values.masked_fill(~row_mask, torch.finfo(values.dtype).max)
            averages: Tensor = compiled.averages(sorted_rows(hidden), lengths, points)
            return averages
        ranked = sorted_with_padding_last(values, row_mask)
        mass = None if mask is None else filled_ranks(mask).unsqueeze(-2)
    else:
        ranked, order = sort_with_padding_last(values, row_mask)
        mass = weights if mask is None else torch.where(mask, weights, 0.0)
        mass = mass.unsqueeze(-2).expand(values.shape).gather(-1, order)
    return quantiles_of_sorted(ranked, mass, points)


def quantiles_of_sorted(ranked: Tensor, mass: Tensor | None, points: int) -> Tensor:
    """Give the barycentric quantile functions ``(…, M)`` of ascending values ``(…, N)``.

    Masses in rank order broadcast (``None``: uniform).
    """
    count = ranked.shape[-1]
    if mass is None and not torch.compiler.is_compiling():
        if count == points:
            return ranked
        return (rank_coupling(count, points, device=ranked.device).T @ ranked) * points
    if mass is None:
        # In a compiled graph the number of tokens may be symbolic: no branch and no integer coupling on it.
        mass = torch.ones_like(ranked)
    return (couple_masses(mass, points).T @ ranked) * points


def displacement(quantiles: Tensor, reference: Tensor, order: Order) -> Tensor:
    """Subtract the reference's projections ``(L, M)`` from quantile functions ``(B, L, M)``, rank by rank."""
    ranked, by_rank = sort_rows(reference)
    if order == "rank":
        return quantiles - ranked
    # argsort lists the points by rank; its inverse, which is needed here, gives each point its rank.
    rank = torch.argsort(by_rank, dim=-1)
    if order == "argsort":
        return permuted(quantiles, by_rank, rank) - reference
    return permuted(quantiles, rank, by_rank) - reference


def _interpolate(ranked: Tensor, points: int, mask: Tensor | None) -> Tensor:
    """Interpolate linearly between order statistics, at (m − 1)(N − 1)/(M − 1), or in the middle for M = 1."""
    count = ranked.shape[-1]
    last = torch.full((1, 1, 1), count - 1, device=ranked.device)
    if mask is not None:
        last = (mask.sum(-1, keepdim=True) - 1).clamp(min=0)  # a mask that was not looked at may leave nothing
    steps = torch.arange(points, device=ranked.device, dtype=torch.float64) + (0.5 if points == 1 else 0)
    position = steps * last / max(points - 1, 1)
    below = torch.minimum(position.floor().long(), last)
    above = torch.minimum(below + 1, last)
    part = (position - below).to(ranked.dtype)
    shape = (*ranked.shape[:-1], points)
    low = ranked.gather(-1, below.expand(shape))
    return low + part * (ranked.gather(-1, above.expand(shape)) - low)


@without_autocast
def l_moments(
    values: Tensor,
    k: int,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    estimator: Literal["plugin", "unbiased"] = "plugin",
    scale: Literal["orthonormal", "textbook"] = "orthonormal",
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Compute the first k L-moments along the last axis: mean, spread, skewness, … of a set of numbers.

    They are the coefficients of the quantile function in shifted Legendre polynomials,

    .. math:: λ_{j+1} = \sqrt{2j+1} \int_0^1 F^{-1}(t)\, P^*_j(t)\, dt,

    so in this scale :math:`Σ_j (λ_j - λ'_j)² ≤ W_2²`. Any N ≥ 1 and any weights; λ₁ is the mean.

    Parameters
    ----------
    values
        ``(…, N)``.
    k
        Number of moments.
    mask
        bool or 0/1, True = valid, broadcastable to values. What is masked is never read.
    weights
        Masses, broadcastable to values, normalised inside; uniform if not given. Gradients flow to them.
    estimator
        ``"plugin"``: of the set itself. ``"unbiased"``: the textbook sample L-moments [1]_ of a population the set was
        drawn from; needs N ≥ k and takes no weights. They differ by O(1/N).
    scale
        ``"textbook"`` leaves out the factor √(2j+1).
    validate
        Look at the values too; by default in eager use on the CPU.

    Returns
    -------
    Tensor
        ``(…, k)``, in float32 at least.

    References
    ----------
    .. [1] Hosking. L-moments: analysis and estimation of distributions using linear combinations of order statistics.
       J. R. Statist. Soc. B, 1990.

    Examples
    --------
    >>> l_moments(torch.tensor([4.0, 1.0, 3.0, 2.0]), k=2)
    tensor([2.5000, 1.0825])
    >>> l_moments(torch.tensor([4.0, 1.0, 3.0, 2.0]), k=2, estimator="unbiased", scale="textbook")
    tensor([2.5000, 0.8333])
    """
    check_floating(values, "values")
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"expected values of shape (…, N) with N ≥ 1 but got {tuple(values.shape)}")
    k = whole(k, "k", more=" moments")
    if estimator not in ("plugin", "unbiased"):
        raise ValueError(f"expected estimator 'plugin' or 'unbiased' but got {estimator!r}")
    if scale not in ("orthonormal", "textbook"):
        raise ValueError(f"expected scale 'orthonormal' or 'textbook' but got {scale!r}")
    if estimator == "unbiased" and weights is not None:
        raise ValueError("the unbiased estimator takes no weights; use estimator='plugin'")
    look = looks_at_values(validate, values)
    mask = _broadcast(mask, values, "mask")
    weights = _broadcast(weights, values, "weights")
    mask = as_mask(mask, tuple(values.shape), "mask", look)
    check_weights(weights, tuple(values.shape), "weights", look, mask)
    values = values.to(working_dtype(values, weights))
    if mask is not None:
        values = torch.where(mask, values, 0.0)
    if look:
        check_finite(values, "values", " among the valid ones")
    filled = None if mask is None else filled_ranks(mask)
    if weights is None:
        ranked = sorted_with_padding_last(values, mask)
        mass = None if filled is None else filled.to(values.dtype)
    else:
        ranked, order = sort_with_padding_last(values, mask)
        mass = weights.gather(-1, order)
        mass = mass if filled is None else torch.where(filled, mass, 0.0)
    moments = _unbiased(ranked, k, mask, look) if estimator == "unbiased" else l_moments_of_sorted(ranked, mass, k)
    if scale == "textbook":
        if estimator == "plugin":
            moments = moments / _orthonormal(k, moments)
    elif estimator == "unbiased":
        moments = moments * _orthonormal(k, moments)
    return moments


def l_moments_of_sorted(ranked: Tensor, mass: Tensor | None, k: int) -> Tensor:
    r"""Give k L-moments of ascending values ``(…, N)`` with masses that broadcast (``None``: uniform).

    Summed by parts, over the gaps between neighbours: with cumulative masses t and :math:`J_j = \int_0^t P^*_j`,
    :math:`λ_{j+1} = -\sqrt{2j+1} Σ_i J_j(t_i) (s_{i+1} - s_i)`. Padding (mass 0, gap 0) drops out, nothing cancels at
    the ends, and gradients reach values and masses.
    """
    count = ranked.shape[-1]
    if mass is None:
        # Data-free: one small matrix, made in float64, takes the place of the gaps.
        edges = torch.arange(count + 1, device=ranked.device, dtype=torch.float64) / count
        steps = torch.diff(torch.cat([edges.unsqueeze(0), _integrated_legendre(edges, k)]), dim=-1)
        return ranked @ steps.to(ranked.dtype).T
    mass = mass.to(ranked.dtype)
    edges = mass.cumsum(-1)
    total = edges[..., -1:]
    moments = [(ranked * mass).sum(-1) / total.squeeze(-1)]
    # The last value has no gap behind it. (A tensor of N − 1 gaps would forbid N = 2 in an exported graph.)
    is_last = torch.arange(count, device=ranked.device) == count - 1
    gaps = torch.where(is_last, 0.0, torch.roll(ranked, -1, -1) - ranked)
    for polynomial in _integrated_legendre(edges / total, k):
        moments.append(-(polynomial * gaps).sum(-1))
    return torch.stack(moments, dim=-1)


def _integrated_legendre(t: Tensor, k: int) -> Tensor:
    r"""Give :math:`\sqrt{2j+1}\, J_j(t)` for j = 1 … k − 1, ``(k − 1, …)``.

    :math:`J_j = 2 t (t - 1)\, C_{j-1}(2t - 1) / (j (j + 1))` with Gegenbauer polynomials C of index 3/2: the factor
    t(t − 1) is exact at both ends, where differences of Legendre polynomials would cancel.
    """
    x = 2 * t - 1
    bump = 2 * t * (t - 1)
    before, current = torch.zeros_like(x), torch.ones_like(x)
    rows = []
    for j in range(1, k):
        rows.append(bump * current * (sqrt(2 * j + 1) / (j * (j + 1))))
        before, current = current, ((2 * j + 1) * x * current - (j + 1) * before) / j
    return torch.stack(rows) if rows else t.new_zeros((0, *t.shape))


def _unbiased(ranked: Tensor, k: int, mask: Tensor | None, look: bool) -> Tensor:
    r"""Give the textbook sample L-moments :math:`\frac1N Σ_i w_j(i)\, s_i`, by the discrete Legendre polynomials w_j.

    They obey a recurrence of three terms. The textbook's sums of binomials, which they equal, cancel from k = 16 on.
    """
    count = ranked.shape[-1]
    length = torch.full((1,), count, device=ranked.device) if mask is None else mask.sum(-1, keepdim=True)
    if (mask is None and count < k) or (look and bool((length < k).any())):
        raise ValueError(f"the unbiased estimator needs at least k = {k} values but a set has {int(length.min())}")
    ranks = torch.arange(count, device=ranked.device, dtype=torch.float64)
    present = (ranks < length).to(torch.float64)
    share = present / length
    values = ranked.double()
    moments = [(values * share).sum(-1)]
    # All polynomials but the first sum to zero: one value subtracted changes nothing but the rounding.
    values = (values - values[..., count // 2 : count // 2 + 1].detach()) * share
    before, current = torch.zeros_like(present), present
    for j in range(1, k):
        ahead = (2 * j - 1) * (2 * ranks - length + 1) * current - (j - 1) * (length + j - 1) * before
        before, current = current, ahead / (j * (length - j).clamp(min=1))
        moments.append((values * current).sum(-1))
    return torch.stack(moments, dim=-1).to(ranked.dtype)


def _orthonormal(k: int, like: Tensor) -> Tensor:
    return torch.tensor([sqrt(2 * j + 1) for j in range(k)], dtype=like.dtype, device=like.device)


def _broadcast(tensor: Tensor | None, values: Tensor, name: str) -> Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor but got {type(tensor).__name__}")
    try:
        return tensor.expand(values.shape)
    except RuntimeError:
        raise ValueError(
            f"expected {name} broadcastable to values of shape {tuple(values.shape)} but got {tuple(tensor.shape)}"
        ) from None
