"""Discrete measures in the form the plans need: masses, and equal projections merged."""

from typing import NamedTuple

import torch
from torch import Tensor

from cswe.ops.coupling import cumulative
from cswe.ops.fast_sort import sort_rows


class Measure(NamedTuple):
    """Points ``(…, N, d)`` with mask, masses (``None``: all equal), and whether the masses are more than the mask."""

    points: Tensor
    mask: Tensor | None
    is_weighted: bool
    mass: Tensor | None

    def samples(self, here: slice | int) -> "Measure":
        """Restrict to some of the samples, or to one, without the batch axis."""
        mask, mass = self.mask, self.mass
        return Measure(
            self.points[here],
            None if mask is None else mask[here],
            self.is_weighted,
            None if mass is None else mass[here],
        )

    def only_valid(self) -> "Measure":
        """Drop what is masked, of one set ``(N, d)``."""
        if self.mask is None:
            return self
        return Measure(
            self.points[self.mask],
            None,
            self.is_weighted,
            self.mass[self.mask] if self.is_weighted and self.mass is not None else None,
        )


class Quotient(NamedTuple):
    """A projected measure with equal projections merged, per point in rank order.

    Point r of mass ``mass[r]`` sits in a group of tied points that covers ``[low[r], high[r]]`` of the cumulative
    distribution; ``first[r]`` and ``last[r]`` are the group's ranks. All ``(…, N)``.
    """

    order: Tensor
    mass: Tensor
    low: Tensor
    high: Tensor
    first: Tensor
    last: Tensor

    @property
    def share(self) -> Tensor:
        """A point's part of its group's mass (0 in a group without mass)."""
        total = self.high - self.low
        return torch.where(total > 0, self.mass / torch.where(total > 0, total, 1.0), 0.0)


def quotient(projections: Tensor, weights: Tensor | None) -> Quotient:
    """Sort projections ``(…, N)`` and merge ties. Weights broadcast; ``None`` is uniform."""
    ordered, order = sort_rows(projections.detach())
    count = projections.shape[-1]
    if weights is None:
        mass = torch.full_like(ordered, 1 / count, dtype=torch.float64)
        edges = torch.arange(1, count + 1, device=ordered.device, dtype=torch.float64).expand(ordered.shape) / count
    else:
        mass = weights.expand(projections.shape).gather(-1, order)
        edges = cumulative(mass)
    ranks = torch.arange(count, device=ordered.device).expand(ordered.shape)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    ends = torch.ones_like(starts)
    ends[..., :-1] = starts[..., 1:]
    first = ranks.where(starts, 0).cummax(-1).values
    last = ranks.where(ends, count - 1).flip(-1).cummin(-1).values.flip(-1)
    with_zero = torch.cat([torch.zeros_like(edges[..., :1]), edges], dim=-1)
    return Quotient(order, mass, with_zero.gather(-1, first), edges.gather(-1, last), first, last)


def weighted_mean(values: Tensor, mass: Tensor | None) -> Tensor:
    """Average over the last axis by mass (``None``: uniform)."""
    return values.mean(-1) if mass is None else (values * mass.to(values.dtype)).sum(-1)


def centre_of(target: Measure) -> Tensor:
    """Give one vector to subtract from both sides: D does not change under translation, its rounding does.

    For one target it is ``(d,)``, for one target per sample ``(B, 1, d)``: far apart, they have no centre in common.
    It is the target's mean, rounded to steps of 2⁻⁷ of the target's size. Tokens that are stored in half precision lie
    on a grid; taken off the grid by one and the same vector, they would all be rounded in the same direction when they
    are brought back to half precision, and sums over many tokens would show it (1e-3 in the gradient of the reference).
    """
    with torch.no_grad():
        points = target.points
        centre = weighted_mean(points.mT, None if target.mass is None else target.mass.unsqueeze(-2))
        largest = points.abs().amax() if points.ndim == 2 else points.abs().amax((-1, -2)).unsqueeze(-1)
        step = torch.exp2(largest.clamp(min=1e-30).log2().floor() - 7)
        centre = torch.round(centre / step) * step
        return centre if points.ndim == 2 else centre.unsqueeze(-2)


def with_centres(projections: Tensor, centre: Tensor, directions: Tensor) -> Tensor:
    """Bring projections ``(B, L, N)`` of centred samples together again, where each had a centre of its own.

    A spread over the batch is that of the samples where they are.
    """
    return projections if centre.ndim == 1 else projections + (centre @ directions.T).transpose(-1, -2)


def root(squared: Tensor, size: Tensor | float = 1.0) -> Tensor:
    """Take the square root of what is ≥ 0 up to the rounding of terms of the given size.

    The slope of a root is infinite at 0, and below rounding it is noise: there the result and the gradient are 0.
    """
    positive = squared > 4 * torch.finfo(squared.dtype).eps * size
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
