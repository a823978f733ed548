"""The cost of plans made by LapSum: true couplings, so only the cross term is relaxed."""

from typing import NamedTuple

import torch
from torch import Tensor

from cswe.ops._recompute import recomputed
from cswe.ops.fast_sort import sort_rows
from cswe.ops.kernels.lapsum import choose_lapsum, lapsum_cross, lapsum_ranks
from cswe.ops.kernels.lapsum_problem import LapSumProblem
from cswe.ops.lapsum import LapSum, couple, couple_densely
from cswe.ops.measure import Measure, centre_of, weighted_mean, with_centres
from cswe.ops.sorting import sort_with_padding_last

BLOCK_ELEMENTS = 1 << 21
"""Numbers that one temporary may hold in plain torch: samples and slices are taken in blocks of that size."""


def coupled_squared_cost(
    source: Measure, target: Measure, directions: Tensor, relaxation: LapSum
) -> tuple[Tensor, Tensor]:
    r"""Give the squared D and the size of the terms it is a difference of, both ``(B, L)``.

    Both sides are coupled smoothly with the same ranks of equal mass, as many as the target has (valid) points: with
    :math:`\tilde Q` and :math:`\tilde P` these couplings and K their number, the plan is :math:`K \tilde Q^⊤ \tilde P`.
    Its marginals are the given ones for any sizes and weights.
    """
    centre = centre_of(target)
    x, y = source.points.to(directions.dtype) - centre, target.points - centre
    # Not square().sum(): fresh memory of the size of the tokens costs more than the arithmetic.
    x_squares, y_squares = (torch.linalg.vector_norm(points, dim=-1).square() for points in (x, y))
    squares = weighted_mean(x_squares, source.mass) + weighted_mean(y_squares, target.mass)
    projections = (x @ directions.T).transpose(-1, -2)
    mask = None if source.mask is None else source.mask.unsqueeze(-2)
    unit = relaxation.scale(with_centres(projections, centre, directions), mask) * relaxation.alpha
    way = choose_lapsum(x.device, is_uniform=not (source.is_weighted or target.is_weighted))
    if way == "cpu":
        sample = RankedSample(source, *sort_with_padding_last(projections / unit, mask))
        cross = _compiled_cross(sample, target, centre, directions / unit)
    else:
        cross = _plain_cross(source._replace(points=x), target._replace(points=y), directions / unit, way == "dense")
    return squares.unsqueeze(-1) - 2 * cross, squares.detach().unsqueeze(-1)


class RankedSample(NamedTuple):
    """Samples with their projections over the temperature sorted: points and order ``(B, L, N)``."""

    measure: Measure
    points: Tensor
    order: Tensor


def _compiled_cross(sample: RankedSample, target: Measure, centre: Tensor, directions: Tensor) -> Tensor:
    """Give ⟨x, γ y⟩ per sample and slice, ``(B, L)``, of uniform measures."""
    if target.points.ndim == 2:
        return _cross_with_one(sample, target, centre, directions)

    def one(index: int) -> Tensor:
        here = slice(index, index + 1)
        part = RankedSample(sample.measure.samples(here), sample.points[here], sample.order[here])
        return _cross_with_one(part, target.samples(index), centre[index, 0], directions)

    # One reference per sample: P U of all of them would be the B×L×M×d that we avoid: recomputed in backward.
    batch = target.points.shape[0]
    return torch.cat([recomputed(one, index) for index in range(batch)])


def _cross_with_one(sample: RankedSample, reference: Measure, centre: Tensor, directions: Tensor) -> Tensor:
    y = reference.only_valid().points - centre
    return lapsum_cross(
        LapSumProblem(
            points=sample.points,
            order=sample.order,
            tokens=sample.measure.points,
            targets=lapsum_ranks(*sort_rows(directions @ y.T), y),
            centre=centre,
            lengths=None if sample.measure.mask is None else sample.measure.mask.sum(-1),
        )
    )


def _plain_cross(source: Measure, target: Measure, directions: Tensor, dense: bool) -> Tensor:
    """Give ⟨x, γ y⟩ per sample and slice, ``(B, L)``, of any measures, in plain torch on any device."""
    batch, count, width = source.points.shape
    ranks = target.points.shape[-2]
    slices = max(1, min(directions.shape[0], BLOCK_ELEMENTS // (max(count, ranks) * width)))
    samples = max(1, BLOCK_ELEMENTS // (slices * max(count, ranks) * width))
    rows = []
    for start in range(0, batch, samples):
        here = slice(start, start + samples)
        x, y = source.samples(here), (target if target.points.ndim == 2 else target.samples(here))
        rows.append(
            torch.cat(
                [
                    # Recomputed in backward: kept, the rows carried there would be the B×L×N×d that we avoid.
                    recomputed(_cross, x, y, part, dense)
                    for part in directions.split(slices)
                ],
                dim=-1,
            )
        )
    return torch.cat(rows)


def _cross(x: Measure, y: Measure, directions: Tensor, dense: bool) -> Tensor:
    ranks = torch.arange(1, y.points.shape[-2] + 1, device=y.points.device, dtype=torch.float64)
    number = ranks[-1:] if y.mask is None else y.mask.sum(-1, keepdim=True)
    levels = (torch.minimum(ranks, number) / number).unsqueeze(-2)
    x_ranked, y_ranked = (_ranked(measure.points, directions, measure.mass, levels, dense) for measure in (x, y))
    return (number * (x_ranked * y_ranked).sum((-1, -2))).to(x.points.dtype)


def _ranked(points: Tensor, directions: Tensor, mass: Tensor | None, levels: Tensor, dense: bool) -> Tensor:
    """Carry points ``(…, N, d)`` to the ranks along every slice, ``(…, L, K, d)``."""
    projections, order = sort_with_padding_last((points @ directions.T).transpose(-1, -2), None)
    if mass is None:
        masses = torch.full_like(projections, 1 / points.shape[-2], dtype=torch.float64)
    else:
        masses = mass.unsqueeze(-2).expand(order.shape).gather(-1, order)
    rows = points.unsqueeze(-3).expand(*order.shape, points.shape[-1])
    ranked = rows.gather(-2, order.unsqueeze(-1).expand(rows.shape)).double()
    return (couple_densely if dense else couple)(
        projections.double(), ranked, masses, levels.expand(*order.shape[:-1], -1)
    )
