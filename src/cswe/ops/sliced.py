"""Wasserstein distances on the line, and their average over slices."""

import torch
from torch import Tensor

from cswe.ops._inputs import (
    as_mask,
    check_finite,
    check_floating,
    check_points,
    check_weights,
    looks_at_values,
    measure_weights,
    unit_slices,
    without_autocast,
    working_dtype,
)
from cswe.ops.coupling import couple_masses
from cswe.ops.fast_sort import sort_rows, sorted_rows


@without_autocast
def wasserstein_1d(
    x: Tensor,
    y: Tensor,
    x_weights: Tensor | None = None,
    y_weights: Tensor | None = None,
    p: float = 2,
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Compute the p-Wasserstein distance between measures on the line, along the last axis.

    .. math:: W_p = \Big( \int_0^1 |F_x^{-1}(t) - F_y^{-1}(t)|^p \, dt \Big)^{1/p}

    Exact for any sizes and weights, differentiable in the points and the weights.

    Parameters
    ----------
    x, y
        Points ``(…, N)`` and ``(…, M)``; batch axes broadcast.
    x_weights, y_weights
        Masses of the same shapes, normalised inside; uniform if not given. A point of mass 0 is never read.
    p
        Order, p ≥ 1.
    validate
        Look at the values too; by default in eager use on the CPU.

    Returns
    -------
    Tensor
        The distance (not its p-th power), ``(…)``, in float32 at least.

    Examples
    --------
    >>> wasserstein_1d(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]))
    tensor(2.)
    >>> wasserstein_1d(torch.tensor([0.0]), torch.tensor([1.0, 2.0, 3.0]), y_weights=torch.tensor([1.0, 0.0, 1.0]), p=1)
    tensor(2.)
    """
    for name, points, weights in (("x", x, x_weights), ("y", y, y_weights)):
        check_floating(points, name)
        if points.ndim == 0 or points.shape[-1] == 0:
            raise ValueError(f"expected {name} of shape (…, N) with N ≥ 1 but got {tuple(points.shape)}")
        check_weights(weights, tuple(points.shape), f"{name}_weights", looks_at_values(validate, x))
    if not 1 <= p < float("inf"):
        raise ValueError(f"expected an order p ≥ 1 but got {p}")
    dtype = working_dtype(x, y)
    x, y = _without_massless(x.to(dtype), x_weights), _without_massless(y.to(dtype), y_weights)
    if looks_at_values(validate, x):
        check_finite(x, "x")
        check_finite(y, "y")
    return _root(_powered_distance(x, y, x_weights, y_weights, p), p)


@without_autocast
def sliced_wasserstein(
    x: Tensor,
    y: Tensor,
    slices: Tensor,
    slice_weights: Tensor | None = None,
    p: float = 2,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    x_weights: Tensor | None = None,
    y_weights: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Compute the sliced Wasserstein distance over given slices.

    .. math:: SW_p = \Big( Σ_l σ_l \, W_p^p(θ_l^⊤ x, θ_l^⊤ y) \Big)^{1/p}

    Parameters
    ----------
    x, y
        Points ``(N, d)`` or ``(B, N, d)``, and ``(M, d)`` or ``(B, M, d)``.
    slices
        Directions ``(L, d)``; normalised inside.
    slice_weights
        σ, ``(L,)``, normalised inside; uniform if not given.
    p
        Order, p ≥ 1.
    x_mask, y_mask
        bool or 0/1, True = valid, of the shape of the points without the last axis. What is masked is never read.
    x_weights, y_weights
        Masses of the shapes of the masks, normalised inside; uniform if not given.
    validate
        Look at the values too; by default in eager use on the CPU.

    Returns
    -------
    Tensor
        The distance, ``(B,)``, or a scalar if neither x nor y has a batch axis, in float32 at least.

    Examples
    --------
    >>> x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    >>> sliced_wasserstein(x, x + torch.tensor([3.0, 4.0]), slices=torch.eye(2))
    tensor(3.5355)
    """
    check_points(x, "x", (2, 3))
    width = x.shape[-1]
    check_points(y, "y", (2, 3), width=width)
    if x.ndim == y.ndim == 3 and x.shape[0] != y.shape[0]:
        raise ValueError(f"expected as many samples in x as in y but got {x.shape[0]} and {y.shape[0]}")
    if not 1 <= p < float("inf"):
        raise ValueError(f"expected an order p ≥ 1 but got {p}")
    look = looks_at_values(validate, x)
    dtype = working_dtype(x, y, slices)
    directions = unit_slices(slices, width, dtype, look)
    if slice_weights is not None:
        check_weights(slice_weights, (directions.shape[0],), "slice_weights", look)
    projected, masses = [], []
    for name, points, given_mask, weights in (("x", x, x_mask, x_weights), ("y", y, y_mask, y_weights)):
        mask = as_mask(given_mask, tuple(points.shape[:-1]), f"{name}_mask", look)
        check_weights(weights, tuple(points.shape[:-1]), f"{name}_weights", look, mask)
        points = points.to(dtype)
        if mask is not None:
            points = torch.where(mask.unsqueeze(-1), points, 0.0)
        if look:
            check_finite(points, name, " among its valid points")
        mass = measure_weights(points, mask, weights)
        projected.append((points @ directions.T).transpose(-1, -2))
        masses.append(None if mass is None else mass.unsqueeze(-2).expand(projected[-1].shape))
    powered = _powered_distance(projected[0], projected[1], masses[0], masses[1], p)
    if slice_weights is None:
        return _root(powered.mean(-1), p)
    share = slice_weights.to(dtype)
    return _root((powered * share).sum(-1) / share.sum(), p)


def _without_massless(points: Tensor, weights: Tensor | None) -> Tensor:
    return points if weights is None else torch.where(weights > 0, points, 0.0)


def _powered_distance(x: Tensor, y: Tensor, x_weights: Tensor | None, y_weights: Tensor | None, p: float) -> Tensor:
    """Give W_p^p along the last axis. Points without mass may be anything finite."""
    if x_weights is None and y_weights is None:
        x, y = sorted_rows(x), sorted_rows(y)
        if x.shape[-1] == y.shape[-1]:
            return (x - y).abs().pow(p).mean(-1)
        coupling = couple_masses(x.shape[-1], y.shape[-1], x.device)
        moved = x[..., coupling.rows] - y[..., coupling.cols]
    else:
        (x, x_order), (y, y_order) = sort_rows(x), sort_rows(y)
        left, right = (
            points.shape[-1] if weights is None else weights.gather(-1, order)
            for points, weights, order in ((x, x_weights, x_order), (y, y_weights, y_order))
        )
        coupling = couple_masses(left, right)
        batch = torch.broadcast_shapes(coupling.mass.shape[:-1], x.shape[:-1], y.shape[:-1])
        entries = (*batch, coupling.mass.shape[-1])
        moved = _pick(x, coupling.rows, entries) - _pick(y, coupling.cols, entries)
    return (moved.abs().pow(p) * coupling.mass.to(x.dtype)).sum(-1)


def _pick(points: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    return points.expand(*shape[:-1], points.shape[-1]).gather(-1, index.expand(shape))


def _root(powered: Tensor, p: float) -> Tensor:
    """Take the p-th root; at 0 the slope would be infinite, and the gradient is 0 instead."""
    if p == 1:
        return powered
    positive = powered > 0
    return torch.where(positive, torch.where(positive, powered, 1.0).pow(1 / p), 0.0)
