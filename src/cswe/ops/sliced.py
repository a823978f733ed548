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
from cswe.ops.sorting import filled_ranks, sorted_with_padding_last


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
    try:
        torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"expected x and y with batch axes that broadcast but got {tuple(x.shape)} and {tuple(y.shape)}"
        ) from None
    dtype = working_dtype(x, y)
    x, y = _without_massless(x.to(dtype), x_weights), _without_massless(y.to(dtype), y_weights)
    if looks_at_values(validate, x):
        check_finite(x, "x")
        check_finite(y, "y")
    powered, unit = _powered_distance(_ranked(x, x_weights), _ranked(y, y_weights), p, axes=(-1,))
    return _root(powered, p, unit)


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
    sides: list[_Side] = []
    for name, points, given_mask, weights in (("x", x, x_mask, x_weights), ("y", y, y_mask, y_weights)):
        mask = as_mask(given_mask, tuple(points.shape[:-1]), f"{name}_mask", look)
        check_weights(weights, tuple(points.shape[:-1]), f"{name}_weights", look, mask)
        points = points.to(dtype)
        if mask is not None:
            points = torch.where(mask.unsqueeze(-1), points, 0.0)
        if look:
            check_finite(points, name, " among its valid points")
        projected = (points @ directions.T).transpose(-1, -2)
        if mask is not None and weights is None:
            # Masses in rank order are those of every slice: one coupling serves all.
            row = mask.unsqueeze(-2)
            sides.append((sorted_with_padding_last(projected, row), filled_ranks(row).to(torch.float64)))
        else:
            mass = measure_weights(points, mask, weights)
            sides.append(_ranked(projected, None if mass is None else mass.unsqueeze(-2).expand(projected.shape)))
    share = None if slice_weights is None else slice_weights.to(dtype)
    seen = None if share is None else (share > 0).unsqueeze(-1)
    powered, unit = _powered_distance(sides[0], sides[1], p, axes=(-2, -1), seen=seen)
    if share is None:
        return _root(powered.mean(-1), p, unit)
    return _root((powered * share).sum(-1) / share.sum(), p, unit)


def _without_massless(points: Tensor, weights: Tensor | None) -> Tensor:
    return points if weights is None else torch.where(weights > 0, points, 0.0)


_Side = tuple[Tensor, Tensor | None]
"""Ascending points, and their masses in that order (``None``: uniform). Points without mass may be anything finite."""


def _ranked(points: Tensor, weights: Tensor | None) -> _Side:
    if weights is None:
        return sorted_rows(points), None
    ranked, order = sort_rows(points)
    return ranked, weights.gather(-1, order)


def _powered_distance(
    x_side: _Side, y_side: _Side, p: float, axes: tuple[int, ...], seen: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Give W_p^p along the last axis, and the unit that W_p is in, one over the given axes: of what will be seen."""
    (x, left), (y, right) = x_side, y_side
    if left is None and right is None and x.shape[-1] == y.shape[-1]:
        moved, unit = _in_units(x - y, seen, p, axes)
        return moved.abs().pow(p).mean(-1), unit
    coupling = couple_masses(
        x.shape[-1] if left is None else left, y.shape[-1] if right is None else right, device=x.device
    )
    if left is None and right is None:
        moved = x[..., coupling.rows] - y[..., coupling.cols]
    else:
        batch = torch.broadcast_shapes(coupling.mass.shape[:-1], x.shape[:-1], y.shape[:-1])
        entries = (*batch, coupling.mass.shape[-1])
        moved = _pick(x, coupling.rows, entries) - _pick(y, coupling.cols, entries)
    carries = coupling.mass > 0
    moved, unit = _in_units(moved, carries if seen is None else carries & seen, p, axes)
    return (moved.abs().pow(p) * coupling.mass.to(x.dtype)).sum(-1), unit


def _in_units(moved: Tensor, counts: Tensor | None, p: float, axes: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Measure distances in the largest that counts: a high power would leave the range of numbers, up or down."""
    if p <= 2:
        return moved, None
    length = moved.detach().abs()
    largest = (length if counts is None else torch.where(counts, length, 0.0)).amax(axes, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    # What does not count may lie further away. It adds 0, but as a number, and the gradient of its mass is seen.
    reach = torch.finfo(moved.dtype).max ** (0.5 / p)
    return (moved / largest).clamp(-reach, reach), largest.flatten(-len(axes))[..., 0]


def _pick(points: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    return points.expand(*shape[:-1], points.shape[-1]).gather(-1, index.expand(shape))


def _root(powered: Tensor, p: float, unit: Tensor | None) -> Tensor:
    """Take the p-th root; at 0 the slope would be infinite, and the gradient is 0 instead."""
    if p == 1:
        return powered
    positive = powered > 0
    root = torch.where(positive, torch.where(positive, powered, 1.0).pow(1 / p), 0.0)
    return root if unit is None else unit * root
