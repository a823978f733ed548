"""The cost of relaxed lifted plans: from points to the kernels' problem."""

from typing import NamedTuple

import torch
from torch import Tensor

from cswe.ops._recompute import recomputed
from cswe.ops.coupling import cumulative
from cswe.ops.fast_sort import sort_rows
from cswe.ops.kernels import Problem, relaxed_cross_cost, relaxed_ranks
from cswe.ops.measure import Measure, centre_of, weighted_mean, with_centres
from cswe.ops.sorting import SoftSort, filled_ranks, sort_with_padding_last


def relaxed_squared_cost(
    source: Measure, target: Measure, directions: Tensor, relaxation: SoftSort
) -> tuple[Tensor, Tensor]:
    """Give the squared D of relaxed plans and the size of the terms it is a difference of, both ``(B, L)``."""
    centre = centre_of(target)
    centred = source.points.to(directions.dtype) - centre
    # Not square().sum(): fresh memory of the size of the tokens costs more than the arithmetic.
    squares = torch.linalg.vector_norm(centred, dim=-1).square()
    projections = (centred @ directions.T).transpose(-1, -2)
    mask = None if source.mask is None else source.mask.unsqueeze(-2)
    scale = relaxation.scale(with_centres(projections, centre, directions), mask)
    points, order = sort_with_padding_last(projections / scale, mask)
    sample = RankedSample(source, squares, points, order)
    if target.points.ndim == 2:
        reference = target._replace(points=target.points - centre)
        return _relaxed_against(sample, reference, centre, directions / scale, relaxation.tau)

    def one(index: int) -> tuple[Tensor, Tensor]:
        here = slice(index, index + 1)
        part = RankedSample(source.samples(here), squares[here], points[here], order[here])
        reference = target.samples(index)
        middle = centre[index, 0]
        reference = reference._replace(points=reference.points - middle)
        return _relaxed_against(part, reference, middle, directions / scale, relaxation.tau)

    # One reference per sample: P U of all of them would be the B×L×M×d that we avoid: recomputed in backward.
    parts = [recomputed(one, index) for index in range(source.points.shape[0])]
    return torch.cat([squared for squared, _ in parts]), torch.cat([size for _, size in parts])


class RankedSample(NamedTuple):
    """Samples with their projections sorted: squares ``(B, N)``, points and order ``(B, L, N)``."""

    measure: Measure
    squares: Tensor
    points: Tensor
    order: Tensor


def _relaxed_against(
    sample: RankedSample, reference: Measure, centre: Tensor, directions: Tensor, tau: float
) -> tuple[Tensor, Tensor]:
    """Compare samples with one reference ``(M, d)``, already centred."""
    source = sample.measure
    if reference.mask is not None:
        reference = reference.only_valid()
    y = reference.points
    projections = directions @ y.T
    y_squares = y.square().sum(-1)
    ranked = relaxed_ranks(*sort_rows(projections), torch.cat([y, y_squares.unsqueeze(-1)], dim=-1), tau)

    count = y.shape[0]
    target_mass = torch.full((1, count), 1 / count, dtype=torch.float64, device=y.device)
    positions, mass = None, None
    lengths = None if source.mask is None else source.mask.sum(-1)
    if reference.is_weighted or source.is_weighted:
        if reference.is_weighted:
            assert reference.mass is not None
            by_rank = torch.argsort(projections.detach(), dim=-1, stable=True)
            target_mass = reference.mass[by_rank]
        if source.is_weighted:
            assert source.mass is not None
            mass = source.mass.unsqueeze(-2).expand(sample.order.shape).gather(-1, sample.order)
        else:
            present = torch.ones_like(sample.points, dtype=torch.float64)
            if source.mask is not None:
                present = present * filled_ranks(source.mask).unsqueeze(-2)
            mass = present / present.sum(-1, keepdim=True)
        positions = positions_among(cumulative(mass), cumulative(target_mass).expand(directions.shape[0], -1))
        mass = mass.to(y.dtype)
    target_mass = target_mass.to(y.dtype)

    value = relaxed_cross_cost(
        Problem(
            points=sample.points,
            order=sample.order,
            tokens=source.points,
            squares=sample.squares,
            targets=ranked[..., :-1] * target_mass.unsqueeze(-1),
            centre=centre,
            lengths=lengths,
            positions=positions,
            mass=mass,
            tau=tau,
        )
    )
    reference_part = (ranked[..., -1] * target_mass).sum(-1)
    size = weighted_mean(sample.squares, source.mass) + weighted_mean(y_squares, reference.mass)
    return value + reference_part, size.detach().unsqueeze(-1)


def positions_among(edges: Tensor, bins: Tensor) -> Tensor:
    """Locate edges ``(B, L, N)`` among the bins of a cumulative distribution ``(L, M)``, as bin + fraction.

    Gives ``(B, L, N + 1)``, from 0 to M.
    """
    count = bins.shape[-1]
    bins = bins.expand(*edges.shape[:-1], count).contiguous()
    inside = torch.searchsorted(bins, edges.contiguous()).clamp(max=count - 1)
    starts = torch.cat([torch.zeros_like(bins[..., :1]), bins[..., :-1]], dim=-1)
    low, high = starts.gather(-1, inside), bins.gather(-1, inside)
    part = ((edges - low) / torch.where(high > low, high - low, 1.0)).clamp(0, 1)
    return torch.cat([torch.zeros_like(edges[..., :1]), inside + part], dim=-1)
